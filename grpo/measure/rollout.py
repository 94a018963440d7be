# SPDX-License-Identifier: Apache-2.0
"""vLLM beside the trainer."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from grpo.measure.record import BENCH, NOISE, figure, file_system, shown, steps_of, write
from grpo.measure.watched import (
    LONG_TOKENS,
    changed_elements,
    counted_compilations,
    given_step,
    hf_generate,
    limit_completions,
    process_start,
    run_in_process,
)
from grpo.model.load import empty_cache
from grpo.rollout import engine as rollout_engine
from grpo.rollout.engine import Engine


class FirstRollout(BaseException):
    """Ends the child that only fills the caches. No Exception: those a run answers itself."""


def rollout_child(options: argparse.Namespace) -> int:
    """One child of `bench_rollout`: runs the entry point with its engine watched, and writes what it saw as JSON."""

    seen: dict[str, Any] = {"rollouts": []}
    rollout, start_engine = Engine.rollout, rollout_engine.start_engine
    hand_over = Engine.sync_weights
    born = process_start()

    def free() -> float:
        empty_cache()
        return torch.cuda.mem_get_info()[0] / 2**30

    def watched_start(*arguments: Any) -> Any:
        seen["free_before_gib"] = free()
        engine = start_engine(*arguments)
        seen["asleep_gib"] = seen["free_before_gib"] - free()
        seen["start_engine_done_s"] = time.time() - born
        return engine

    def watched_hand_over(self: Any, *arguments: Any, **named: Any) -> None:
        started = time.perf_counter()
        hand_over(self, *arguments, **named)
        torch.cuda.synchronize()
        self.seconds["handover"] = time.perf_counter() - started

    def watched_rollout(self: Any, policy: Any, prompt_ids: Any, *arguments: Any, **named: Any) -> Any:
        # Without the bench's own copy of the base weights, which no user's run makes.
        seen.setdefault("start_to_rollout_s", time.time() - born - run_in_process.copy_s)
        with counted_compilations() as compiled:
            result = rollout(self, policy, prompt_ids, *arguments, **named)
        query = ["nvidia-smi", "--query-gpu=clocks.sm,temperature.gpu", "--format=csv,noheader,nounits"]
        clock, celsius = subprocess.run(query, capture_output=True, text=True).stdout.split(",")
        seen["rollouts"].append(
            {
                "sm_mhz": float(clock),
                "celsius": float(celsius),
                "tokens": sum(map(len, result[0])),
                "sequences": len(result[0]),
                "compiled": sorted(compiled),
                **self.seconds,
            }
        )
        seen["prompt_ids"] = [list(ids) for ids in prompt_ids]
        if options.child == "warm":
            raise FirstRollout
        return result

    rollout_engine.start_engine, Engine.rollout = watched_start, watched_rollout
    Engine.sync_weights = watched_hand_over
    generate = limit_completions(512)
    run = Path(options.run).absolute()
    settings = {
        "MODEL_ID": str(options.model), "DATA": options.data, "USE_VLLM": "1", "PROMPTS_PER_STEP": "12",
        "NUM_GENERATIONS": "8", "MAX_COMPLETION_LEN": str(LONG_TOKENS), "TOTAL_STEPS": "3", "SAVE_STEPS": "9",
        "OUTPUT_DIR": str(run), "OVERWRITE": "1", "REWARDS": f"action,{NOISE}", "EVAL_SAMPLES": "0",
        "ROLLOUT_SYNC": options.sync,
    }  # fmt: skip
    try:
        finished = run_in_process(options.main, settings)
    except FirstRollout:
        finished = {"code": 0}
    if finished["code"]:
        return finished["code"]
    if options.child == "short":
        seen["steps"] = steps_of(run)
        trainer = finished["trainer"]
        seen["parity"] = trainer.run.parity
        seen["asleep_later_gib"] = seen["free_before_gib"] - free()
        policy = trainer.accelerator.unwrap_model(trainer.model)
        twice = [rollout(trainer.run.engine, policy, seen["prompt_ids"], 7)[0] for _ in range(2)]
        seen["alike"] = sum(one == other for one, other in zip(*twice, strict=True))
        Path(options.out).write_text(json.dumps(seen), encoding="utf-8")
        seen["hf"] = hf_generate(trainer, seen["prompt_ids"][:16], 128)
        trainer.model.train()
        seen["long"] = given_step(trainer, generate, [LONG_TOKENS] * 16)
        seen["base_changed_elements"] = changed_elements(finished["parameters"])
        Path(options.out).write_text(json.dumps(seen), encoding="utf-8")
        # With 96 rows transformers' eager attention wants more than is free.
        with contextlib.suppress(torch.OutOfMemoryError):
            seen["hf_many"] = hf_generate(trainer, seen["prompt_ids"][:48], 64)
    Path(options.out).write_text(json.dumps(seen), encoding="utf-8")
    return 0


def bench_rollout(options: argparse.Namespace) -> int:
    """Two children, then the figures. Exit code 1 where a base weight changed."""
    results: dict[str, Any] = {}
    for child in ("short",) if options.warm_caches else ("warm", "short"):
        out = Path(options.run).absolute().with_name(f"rollout-{child}.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            str(BENCH),
            "rollout",
            "--child",
            child,
            "--model",
            options.model,
            "--data",
            options.data,
        ]
        command += ["--out", str(out), "--run", options.run, "--sync", options.sync]
        done = subprocess.run(command, check=False)
        if done.returncode or not out.exists():
            print(f"child {child} ended with exit code {done.returncode}", file=sys.stderr)
            return done.returncode or 1
        results[child] = json.loads(out.read_text(encoding="utf-8"))
    short = results["short"]
    long = short["long"]
    later = short["rollouts"][1:]
    speeds = [one["tokens"] / one["generate"] for one in later]
    hf = short["hf"]["tokens"] / short["hf"]["seconds"]
    found = "caches as found" if options.warm_caches else "warm caches"

    def mean(name: str) -> float:
        return sum(one[name] for one in later) / len(later)

    worst = max(short["parity"], key=lambda one: one["mean"])
    figures = [
        figure("rollout_tok_s", sum(speeds) / len(speeds), "tokens/s", f"96 x 512 tokens, adapter on, {options.sync}; mean of {len(speeds)} after the first; prefill of 12 prompts included"),
        figure("rollout_first_tok_s", short["rollouts"][0]["tokens"] / short["rollouts"][0]["generate"], "tokens/s", "the first rollout of the process"),
        figure("hf_generate_tok_s", hf, "tokens/s", "transformers' generate, 16 of the same prompts x 128 tokens, same process"),
        figure("speedup", sum(speeds) / len(speeds) / hf, "x", "the two above"),
        figure("rollout_compiled", sum(len(one["compiled"]) for one in short["rollouts"]), "kernels", "compiled by Triton, or read from its cache, during the rollouts"),
        figure("handover_s", mean("handover"), "s", f"ROLLOUT_SYNC={options.sync}"),
        figure("sleep_s", mean("sleep"), "s", "after the first"),
        figure("wake_s", mean("wake"), "s", "after the first"),
        figure("asleep_gib", short["asleep_gib"], "GiB", "GPU memory that the sleeping engine holds before the first rollout, by the driver"),
        figure("asleep_later_gib", short["asleep_later_gib"], "GiB", "the same after three steps, with what trainer and libraries took meanwhile"),
        figure("same_seed_alike", short["alike"], "completions", f"of {short['rollouts'][0]['sequences']}: the same rollout twice, with one seed"),
        figure("start_to_rollout_s", short["start_to_rollout_s"], "s", f"process start to first rollout, {found}, checkpoint on {file_system(options.model)}; parity gate included, the bench's copy of the weights left out"),
        figure("long_rollout_s", long["generate"], "s", f"{long['sequences']} completions, {long['tokens']} tokens in all"),
        figure("long_step_s", long["rollout"] + long["learn"], "s", "rollout, hand-over, waking and sleeping, and learning from as many tokens"),
        figure("long_learn_s", long["learn"], "s", "its learning"),
        figure("short_step_s", float(short["steps"][-1]["step_s"]), "s", "the whole step of 96 x 512"),
        figure("short_learn_s", float(short["steps"][-1]["learn_s"]), "s", "its learning"),
        figure("parity_mean", worst["mean"], "nats", "worst of fixed and sampled tokens, before and after a sleep"),
        figure("parity_max", max(one["max"] for one in short["parity"]), "nats"),
        figure("parity_control_mean", min(one["control_mean"] for one in short["parity"]), "nats", "smallest with the trainer's adapter off"),
        figure("run_logp_diff_mean", float(short["steps"][-1]["logp_diff_mean"]), "nats", "sampled tokens of the last training step"),
        figure("base_changed_elements", short["base_changed_elements"], "", "base weights of the trainer, bit for bit"),
    ]  # fmt: skip
    if many := short.get("hf_many"):
        rate = many["tokens"] / many["seconds"]
        figures += [
            figure("hf_generate_many_tok_s", rate, "tokens/s", f"transformers' generate with {many['sequences']} at once x 64 tokens"),
            figure("speedup_many", sum(speeds) / len(speeds) / rate, "x", "rollout_tok_s by that"),
        ]  # fmt: skip
    if "warm" in results:
        figures.append(
            figure(
                "start_cold_s",
                results["warm"]["start_to_rollout_s"],
                "s",
                "the same in the machine's first process: compile caches as that found them",
            )
        )
    command = shown("rollout", f"--sync {options.sync}", *["--warm-caches"] * options.warm_caches)
    write(Path(options.out), figures, command)
    return int(short["base_changed_elements"] != 0)
