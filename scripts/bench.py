#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the project on the machine it runs on, and write the figures as JSON.

    python scripts/bench.py demo --out docs/results/demo-cpu.json --figure docs/demo.png
    python scripts/bench.py main --model checkpoints/full --data 'days/*.csv' --out docs/results/main-h100.json

`demo` runs train_grpo.py on the tiny model for seeds 1 to 3 and records held-out reward before and after training.

    python scripts/bench.py rollout --model checkpoints/full --data 'days/*.csv' --out docs/results/rollout-h100.json

`rollout` measures vLLM beside the trainer in two child processes that each run train_grpo.py's own `main()`: one that
fills the compile caches (`--warm-caches` leaves it out), and one that trains three steps of 12 prompts x 8 completions x
512 tokens, lets transformers' generate complete the same prompts, and ends with 16 completions x 2,300 tokens.

    python scripts/bench.py step --model checkpoints/full --data 'days/*.csv' --lengths completions.csv --out docs/results/step-h100.json

`step` measures learning beside TRL's padded path in one process, on the same rollouts, and with packed experts while all
but 40 GiB of the card is occupied. W1 is 12 prompts x 8 completions x 512 tokens, W2 96 completions with the lengths of
the CSV, W3 its first 16. `--only bf16` (seven minutes on an H100, most of them TRL's path) or `--only mxfp4` (two) runs one half
and reads the other's last run in the same folder.

    python scripts/bench.py resume --model checkpoints/full --data 'days/*.csv' --out docs/results/resume-h100.json

`resume` kills a run (SIGKILL) two steps after a checkpoint, gives the same command again, and counts the completions that the
second process sampled just as the first had. Exit code 1 unless all of the step behind the checkpoint are alike.

    python scripts/bench.py attention --out docs/results/attention-h100.json

`attention` compares every attention that the learner can use here with float64, over rows that share a prompt, and times
it. Exit code 1 if one is further off than its bound or raises; packages that are missing are named.

`main` runs train_grpo.py's own `main()` in this process (so that every weight can be compared before and after) for a
few steps of 4 prompts x 4 completions x 128 tokens, and records time per phase, peak memory, how many adapter tensors
moved and how many elements of the base weights changed (0, or the run is broken and the exit code is 1).

The JSON holds `command, machine, date, versions, commit, figures: [{name, value, unit, note}]`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# ---- What every measurement says about itself ------------------------------------------------------------------------


def commit() -> str:
    """The commit that is measured; `-dirty` where the tree differs from it, results left out: a measurement writes them
    while it goes on. BENCH_COMMIT names it outside a checkout."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = [*git, "status", "--porcelain", "--", ".", ":!docs/results"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("-dirty" if changed.strip() else "")


def machine() -> str:
    """Processor, memory and GPU in words."""
    import torch

    gpu = "no GPU"
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        gpu = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    return f"{gpu}; {os.cpu_count()} cores {platform.machine()}; Python {platform.python_version()}"


def write(path: Path, figures: list[dict[str, Any]], command: str | None = None) -> None:
    """The measurement as JSON, in the form of all files under docs/results/."""
    versions = {}
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "liger-kernel", "triton", "vllm"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    record = {
        "command": command or " ".join(["python", "scripts/bench.py", *sys.argv[1:]]),
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "commit": commit(),
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for one in figures:
        print(f"{one['name']:<28} {one['value']:>14,.6g} {one['unit']:<10} {one['note']}")
    print(f"written: {path}")


def file_system(path: str) -> str:
    """Type of the file system that a path lies on, as Linux names it: ext4, tmpfs, ..."""
    lines = (line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines())
    mounts = {Path(line[1]): line[2] for line in lines}
    whole = Path(path).resolve()
    return next(mounts[place] for place in (whole, *whole.parents) if place in mounts)


def shown(kind: str, *flags: str) -> str:
    """The command of a measurement that needs a checkpoint, without the paths of the machine it ran on."""
    return " ".join(["python scripts/bench.py", kind, "--model CHECKPOINT --data CSVS --out JSON", *flags])


def steps_of(run: Path) -> list[dict[str, str]]:
    """Rows of a run's metrics.csv as text by column."""
    import report

    return list(report.read_log(run / "metrics.csv"))


def figure(name: str, value: float, unit: str, note: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "note": note}


# ---- demo: the tiny model on three seeds -----------------------------------------------------------------------------


def bench_demo(options: argparse.Namespace) -> int:
    """Held-out reward before and after training on the tiny model, three seeds; exit code 1 unless each seed gains."""
    import make_model

    make_model.build_tiny()  # once, so that no seed pays for it
    runs, figures, gains = [], [], []
    for seed in (1, 2, 3):
        run = Path(options.run) / f"seed-{seed}"
        environ = os.environ | {
            "MODEL_ID": "tiny", "SEED": str(seed), "OUTPUT_DIR": str(run), "OVERWRITE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        started = time.perf_counter()
        subprocess.run([sys.executable, str(ROOT / "train_grpo.py")], env=environ, check=True)
        seconds = time.perf_counter() - started
        result = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
        before, after = result["before"], result["after"]
        runs.append((run, result))
        gains.append(after["reward"] - before["reward"])
        figures += [
            figure(f"seed{seed}_before", before["reward"], "reward", "held-out mean reward, sampled"),
            figure(f"seed{seed}_after", after["reward"], "reward", "the same prompts after training"),
            figure(f"seed{seed}_parse_rate_after", after["parse_rate"], "share"),
            figure(f"seed{seed}_total_s", seconds, "s", "process start to zip, model already made"),
        ]
        plant = json.loads((run / "closed_loop.json").read_text(encoding="utf-8"))["totals"]
        for name, when in (("base", "before"), ("trained", "after")):
            figures += [
                figure(f"seed{seed}_co2_{when}", plant[name]["co2_kg"], "kg", "closed loop, five windows of three days"),
                figure(f"seed{seed}_unserved_{when}", plant[name]["unserved_kwh"], "kWh", "load that nothing served"),
                figure(f"seed{seed}_plant_regret_{when}", plant[name]["regret_percent"], "%", "against the exact optimum, unserved load at its price"),
            ]  # fmt: skip
    figures += [figure(name, runs[0][1][name], "reward", "held-out rows") for name in ("random", "constant", "oracle")]
    figures.append(figure("optimum_co2", plant["optimum"]["co2_kg"], "kg", "the same windows"))
    plot_runs(runs, Path(options.figure))
    write(Path(options.out), figures)
    return int(min(gains) <= 0)


def plot_runs(runs: list[tuple[Path, dict[str, Any]]], path: Path) -> None:
    """Reward of the sampled completions over the steps, one line a seed, with what other policies earn beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plot, axes = plt.subplots(figsize=(7.2, 3.6), dpi=160)
    for (run, result), colour in zip(runs, ("#0b6e99", "#d9730d", "#448361"), strict=False):
        rewards = [float(row["reward"]) for row in steps_of(run)]
        smooth = [
            sum(rewards[max(0, i - 9) : i + 1]) / len(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))
        ]
        steps = range(1, len(rewards) + 1)
        axes.plot(steps, rewards, color=colour, alpha=0.18, linewidth=0.8)
        label = f"{run.name.replace('-', ' ')}: held-out {result['before']['reward']:.2f} to {result['after']['reward']:.2f}"
        axes.plot(steps, smooth, color=colour, linewidth=1.8, label=label)
    last = len(rewards)
    for name, text in (("oracle", "held-out: oracle"), ("constant", "best constant"), ("random", "random")):
        value = runs[0][1][name]
        axes.axhline(value, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(last * 1.01, value, f"{text} {value:.2f}", va="center", fontsize=8, color="#333333")
    axes.set(xlabel="optimizer step", ylabel="mean reward of the step's rows", xlim=(1, last), ylim=(0.2, 0.85))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.1), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    plot.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, metadata={"Software": None})


# ---- main: the whole path, weights compared before and after ---------------------------------------------------------


def noise(completions: list[str], **columns: Any) -> list[float]:
    """A reward of 0 to 1 by the completion's hash: random weights never answer, and equal rewards would move nothing."""
    return [int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF for text in completions]


def run_in_process(settings: dict[str, str]) -> dict[str, Any]:
    """`train_grpo.main()` in this process with `settings`; keeps a copy of every base weight and the trainer.

    Returns {"code", "total_s", "load_s", "parameters": [(parameter, copy)], "trainer"}.
    """
    import train_grpo

    os.environ.update(settings)
    seen: dict[str, Any] = {}
    load_model, make_trainer = train_grpo.load_model, train_grpo.make_trainer

    def load_and_keep(*arguments: Any) -> Any:
        started = time.perf_counter()
        model = load_model(*arguments)
        seen["load_s"] = time.perf_counter() - started
        copying = time.perf_counter()
        seen["parameters"] = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters()]
        run_in_process.copy_s = time.perf_counter() - copying
        return model

    def make_and_keep(*arguments: Any) -> Any:
        seen["trainer"] = make_trainer(*arguments)
        return seen["trainer"]

    train_grpo.load_model, train_grpo.make_trainer = load_and_keep, make_and_keep
    started = time.perf_counter()
    seen["code"] = train_grpo.main([])
    seen["total_s"] = time.perf_counter() - started
    return seen


def changed_elements(parameters: list[tuple[Any, Any]]) -> int:
    """Elements that differ bit for bit. By identity, not by name: PEFT renames the modules that it wraps."""
    import torch

    changed = 0
    for parameter, before in parameters:
        now, then = (t.contiguous().view(torch.uint8) for t in (parameter.detach(), before.to(parameter.device)))
        changed += int((now != then).view(-1, parameter.element_size()).any(dim=1).sum())
    return changed


def bench_main(options: argparse.Namespace) -> int:
    run = Path(options.run).absolute()
    settings = {
        "MODEL_ID": str(options.model), "DATA": options.data, "USE_VLLM": "0", "EVAL_SAMPLES": "0", "PROMPTS_PER_STEP": "4",
        "NUM_GENERATIONS": "4", "MAX_COMPLETION_LEN": "128", "TOTAL_STEPS": str(options.steps), "SAVE_STEPS": "1",
        "SAVE_TOTAL_LIMIT": "99", "OUTPUT_DIR": str(run), "OVERWRITE": "1", "ATTN_IMPL": options.attention,
        "MICRO_BATCH": str(options.micro_batch), "REWARDS": options.rewards,
    }  # fmt: skip
    loaded = run_in_process(settings)
    if loaded["code"]:
        return loaded["code"]
    total = loaded["total_s"]
    changed = changed_elements(loaded["parameters"])

    from safetensors.torch import load_file

    elements = sum(p.numel() for p, _ in loaded["parameters"])
    first = load_file(run / "checkpoint-1" / "adapter_model.safetensors")
    last = load_file(run / "adapter_model.safetensors")
    moved = sum(bool((last[name] != first[name]).any()) for name in last)
    trained = sum(bool(last[name].any()) for name in last if "lora_B" in name)
    steps = steps_of(run)
    plan = json.loads((run / "settings.json").read_text(encoding="utf-8"))["choices"]["plan"]
    later = steps[1:] or steps  # the first step pays for compilation and caches

    def mean(name: str) -> float:
        return sum(float(step[name]) for step in later) / len(later)

    figures = [
        figure("load_s", loaded["load_s"], "s", "checkpoint to a dequantized BF16 model on the GPU"),
        figure("first_step_s", float(steps[0]["step_s"]), "s", "compilation and allocation included"),
        *(figure(name, mean(name), "s", f"mean of steps 2 to {len(steps)}") for name in ("step_s", "rollout_s", "reward_s", "learn_s")),
        figure("rollout_tokens_per_s", mean("rollout_tokens_per_s"), "tokens/s", "transformers' generate, 16 sequences"),
        figure("total_s", total, "s", "the whole run, loading and saving included"),
        figure("gpu_peak_gib", max(float(step["gpu_peak_gib"] or 0) for step in steps), "GiB", "allocated, any step"),
        figure("planned_peak_gib", sum(plan[k] for k in ("weights", "adapter")) + max(plan["generation"], plan["learning"]), "GiB", "what --check predicts"),
        figure("base_elements", elements, "", "elements of the base weights that were compared"),
        figure("base_changed_elements", changed, "", "bit for bit, against a copy made right after loading"),
        figure("adapter_tensors", len(last), ""),
        figure("adapter_moved_tensors", moved, "", "differ between the first checkpoint and the end"),
        figure("adapter_nonzero_lora_b", trained, "", "lora_B starts at 0"),
        figure("completed_steps", len(steps), "steps"),
        figure("reward_std", mean("reward_std"), "reward", "the bench rewards noise: advantages were not all 0"),
    ]  # fmt: skip
    environment = " ".join(f"{k}={v}" for k, v in settings.items() if k not in ("MODEL_ID", "DATA", "OUTPUT_DIR"))
    write(Path(options.out), figures, f"python scripts/bench.py main --attention {options.attention}  # {environment}")
    return int(changed != 0 or moved == 0)


# ---- rollout: vLLM beside the trainer --------------------------------------------------------------------------------


def process_start() -> float:
    """When this process started, in seconds since the epoch (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - boot + ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles meanwhile, or reads from its cache on disk."""
    from triton import knobs

    before, names = knobs.runtime.jit_post_compile_hook, []

    def hook(**event: Any) -> Any:
        names.append(str(getattr(event.get("fn"), "name", event.get("fn"))))
        return before(**event) if before else None

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


class FirstRollout(BaseException):
    """Ends the child that only fills the caches. No Exception: those a run answers itself."""


def rollout_child(options: argparse.Namespace) -> int:
    """One child of `bench_rollout`: runs the entry point with its engine watched, and writes what it saw as JSON."""
    import torch

    import train_grpo

    seen: dict[str, Any] = {"rollouts": []}
    rollout, start_engine = train_grpo.Engine.rollout, train_grpo.start_engine
    hand_over = train_grpo.Engine.hand_over
    born = process_start()

    def free() -> float:
        train_grpo.empty_cache()
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

    train_grpo.start_engine, train_grpo.Engine.rollout = watched_start, watched_rollout
    train_grpo.Engine.hand_over = watched_hand_over
    generate = limit_completions(512)
    run = Path(options.run).absolute()
    settings = {
        "MODEL_ID": str(options.model), "DATA": options.data, "USE_VLLM": "1", "PROMPTS_PER_STEP": "12",
        "NUM_GENERATIONS": "8", "MAX_COMPLETION_LEN": str(LONG_TOKENS), "TOTAL_STEPS": "3", "SAVE_STEPS": "9",
        "OUTPUT_DIR": str(run), "OVERWRITE": "1", "REWARDS": "action,bench:noise", "EVAL_SAMPLES": "0",
        "ROLLOUT_SYNC": options.sync,
    }  # fmt: skip
    try:
        finished = run_in_process(settings)
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


LONG_TOKENS = 2300


def limit_completions(tokens: int) -> Any:
    """Let the engine's completions end after `tokens`, whatever MAX_COMPLETION_LEN is; returns the method without it."""
    import train_grpo

    generate = train_grpo.Engine.generate

    def limited(self: Any, prompt_ids: Any, seed: int, max_tokens: Any = None, **named: Any) -> Any:
        return generate(self, prompt_ids, seed, max_tokens or tokens, **named)

    train_grpo.Engine.generate = limited
    return generate


def given_step(trainer: Any, generate: Any, lengths: list[int]) -> dict[str, float]:
    """Seconds of a step whose completions have these lengths, eight to a prompt: waking, hand-over, generation, sleep,
    and learning from completions of these lengths (the second of two times). No stop token ends one sooner."""
    engine, batch = trainer.run.engine, padded_batch(trainer, lengths, 8)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    started = time.perf_counter()
    engine.wake()
    engine.hand_over(trainer.accelerator.unwrap_model(trainer.model))
    stop, engine.stop_token_ids = engine.stop_token_ids, []
    completions, _ = generate(engine, rows, 1, lengths)
    engine.stop_token_ids = stop
    engine.sleep()
    rollout = time.perf_counter() - started
    learn = our_learning(trainer, batch)["seconds"]
    return {
        "generate": engine.seconds["generate"], "rollout": rollout, "learn": learn, "sequences": len(completions),
        "tokens": sum(map(len, completions)),
    }  # fmt: skip


def hf_generate(trainer: Any, prompt_ids: list[list[int]], tokens: int) -> dict[str, float]:
    """transformers' generate on the same prompts, with its own attention and experts, on the GPU that vLLM just used."""
    import torch

    import train_grpo

    policy = trainer.accelerator.unwrap_model(trainer.model)
    policy.eval()
    base, ours = policy.get_base_model(), policy.config._experts_implementation
    base.set_experts_implementation("grouped_mm")  # what transformers takes by itself
    longest, pad = max(map(len, prompt_ids)), trainer.processing_class.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in prompt_ids], device=policy.device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.no_grad(), train_grpo.attention_of(policy, "eager"), torch.autocast("cuda", torch.bfloat16):
        output = policy.generate(
            input_ids=ids,
            attention_mask=(ids != pad).long(),
            do_sample=True,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    base.set_experts_implementation(ours)
    return {"tokens": output[:, longest:].numel(), "seconds": seconds, "sequences": len(prompt_ids)}


def bench_rollout(options: argparse.Namespace) -> int:
    """Two children, then the figures. Exit code 1 where a base weight changed."""
    results: dict[str, Any] = {}
    for child in ("short",) if options.warm_caches else ("warm", "short"):
        out = Path(options.run).absolute().with_name(f"rollout-{child}.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            __file__,
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


# ---- step: this learner beside TRL's padded path ---------------------------------------------------------------------

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense BF16, from the data sheets


def floor_seconds(config: dict[str, Any], distinct: int, scored: int) -> float:
    """Time of the arithmetic alone at the card's peak: three products (forward, recomputed forward, gradient of the input;
    weights are frozen) for each of `distinct` tokens, and the head for the `scored` ones."""
    import torch

    import train_grpo

    parts = train_grpo.count_parameters(config)
    active = parts["attention"] + parts["experts"] * config["num_experts_per_tok"] / config["num_local_experts"]
    name = torch.cuda.get_device_name(0)
    peak = next((value for key, value in PEAK_FLOPS.items() if key in name), math.nan)
    return 6 * (active * distinct + config["vocab_size"] * config["hidden_size"] * scored) / peak


def padded_batch(trainer: Any, lengths: list[int], group: int) -> dict[str, Any]:
    """A step's batch as TRL pads it, with random completions of these lengths behind the run's first prompts."""
    import torch

    rows = trainer.processing_class(text=[row.prompt for row in trainer.run.rows[: len(lengths) // group]])["input_ids"]
    width, longest = max(map(len, rows)), max(lengths)
    generator, shape = torch.Generator().manual_seed(0), (len(lengths), longest)
    batch = {name: torch.zeros(len(lengths), width, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
    batch["completion_ids"] = torch.randint(0, 199_000, shape, generator=generator)
    batch["completion_mask"] = (torch.arange(longest)[None] < torch.tensor(lengths)[:, None]).long()
    for i in range(len(lengths)):
        row = rows[i // group]
        batch["prompt_ids"][i, width - len(row) :] = torch.tensor(row)
        batch["prompt_mask"][i, width - len(row) :] = 1
    batch["advantages"] = torch.randn(len(lengths), generator=generator)
    batch["num_items_in_batch"] = torch.tensor(float(sum(lengths)))
    return {name: value.cuda() for name, value in batch.items()}


@contextlib.contextmanager
def weighed() -> Iterator[dict[str, float]]:
    """Fills in `seconds` until the GPU has done what was asked of it meanwhile, and `peak_gib`, the most memory that torch
    allocated beyond what was there."""
    import torch

    found: dict[str, float] = {}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    started = time.perf_counter()
    yield found
    torch.cuda.synchronize()
    found["seconds"] = time.perf_counter() - started
    found["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30


def trl_learning(trainer: Any, batch: dict[str, Any], micro: int, least: int | None = None) -> dict[str, Any]:
    """TRL's own padded path on `batch`: the pass for old log-probs that it makes beside vLLM, then loss and backward of
    micro-batches of `micro`. Returns seconds (in all, and of that pass), log-probs, the adapter's gradient in one piece and the
    most memory that torch allocated meanwhile. `least`: only so many micro-batches, to warm up."""
    import torch
    from trl import GRPOTrainer

    ours = trainer.__class__
    trainer.__class__ = GRPOTrainer
    model, (ids, mask, keep) = trainer.model, joined(batch)
    count = len(ids) if least is None else micro * least
    trainer.current_gradient_accumulation_steps = max(count // micro, 1)
    try:
        with weighed() as found:
            started = time.perf_counter()
            with torch.no_grad():
                logps = trainer._get_per_token_logps_and_entropies(
                    model, ids[:count], mask[:count], keep, batch_size=micro
                )[0]
            torch.cuda.synchronize()
            old = time.perf_counter() - started
            for i in range(0, count, micro):
                part = {k: v[i : i + micro] if v.ndim else v for k, v in batch.items()}
                trainer._compute_loss(model, part | {"old_per_token_logps": logps[i : i + micro]}).backward()
        return found | {"old_seconds": old, "logps": logps, "gradient": adapter_gradient(model)}
    finally:
        trainer.__class__, trainer.current_gradient_accumulation_steps = ours, 1
        trainer._metrics["train"].clear()
        model.zero_grad(set_to_none=True)


def adapter_gradient(model: Any) -> Any:
    """The gradient of all that learns, in one float32 vector."""
    import torch

    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def compare_gradients(trainer: Any, batch: dict[str, Any], attention: str = "flex_attention") -> dict[str, float]:
    """Relative differences (2-norm of the difference by the 2-norm) of the adapter's gradient on the first two groups of
    `batch`: this learner against TRL's path, TRL's with micro-batches of 4 against 8, and this learner with the prompts exchanged.

    Every completion counts to its last column, so that TRL's mean over a micro-batch is the same however it is cut; the
    importance correction, which TRL applies beside its own vLLM alone, is left out of both. Leaves the model with `attention`
    and transformers' experts, as TRL's path needs it.
    """
    import torch

    rows = 2 * trainer.num_generations
    part = {k: v[:rows] if v.ndim else v for k, v in batch.items() if torch.is_tensor(v) and "sampling" not in k}
    part["completion_mask"] = torch.ones_like(part["completion_mask"])
    part["num_items_in_batch"] = part["completion_mask"].sum().float()
    wrong = {**part, **{k: part[k].roll(trainer.num_generations, 0) for k in ("prompt_ids", "prompt_mask")}}
    ours = []
    for one in (part, wrong):
        trainer.learn(trainer.model, one)
        ours.append(adapter_gradient(trainer.model))
        trainer.model.zero_grad(set_to_none=True)
    trainer._metrics["train"].clear()
    base = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    base.set_attn_implementation(attention)
    base.set_experts_implementation("grouped_mm")
    theirs, four = (trl_learning(trainer, part, micro)["gradient"] for micro in (8, 4))

    def apart(one: Any) -> float:
        return ((one - theirs).norm() / theirs.norm()).item()

    return {"difference": apart(ours[0]), "batching": apart(four), "wrong_prompt": apart(ours[1])}


def head_peak(trainer: Any, tokens: int) -> float:
    """GiB that log-probs of `tokens` tokens and their backward pass take beyond the states."""
    import torch

    base = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    states = torch.randn(tokens, base.config.hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.randint(0, base.config.vocab_size, (tokens,), device="cuda")
    torch.cuda.empty_cache()
    with weighed() as found:
        with trainer.accelerator.autocast():
            logps, _ = trainer.head(base, states, targets)
        logps.sum().backward()
    return found["peak_gib"]


def our_learning(trainer: Any, batch: dict[str, Any], repeats: int = 2) -> dict[str, float]:
    """Seconds of `Learner.learn` (the last of `repeats`) and the most memory that torch allocated beyond what was there."""
    import torch

    for _ in range(repeats):
        torch.cuda.empty_cache()
        with weighed() as found:
            trainer.learn(trainer.model, batch)
        trainer.model.zero_grad(set_to_none=True)
    trainer._metrics["train"].clear()
    return found


def real_lengths(path: Path, model: str) -> list[int]:
    """Tokens of the `completion` column of a CSV, in the model's vocabulary."""
    from tokenizers import Tokenizer

    csv.field_size_limit(2**31 - 1)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    with path.open(newline="", encoding="utf-8") as file:
        return [len(tokenizer.encode(row["completion"]).ids) for row in csv.DictReader(file)]


class PeakMemory(threading.Thread):
    """Samples the driver's count of used GPU memory in GiB, ballast of other processes left out; `peaks` by `phase`.

    Made before this process touches the GPU: what is free then is where it counts from, its own CUDA context included.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import train_grpo

        self.before = train_grpo.read_machine().gpu_free
        self.peaks: dict[str, float] = {}
        self.phase, self.running = "starting", True
        self.start()

    def run(self) -> None:
        import torch

        while self.running:
            phase, used = self.phase, self.before - torch.cuda.mem_get_info()[0] / 2**30
            self.peaks[phase] = max(self.peaks.get(phase, 0.0), used)
            time.sleep(0.05)


def step_child(options: argparse.Namespace) -> int:
    """One child of `bench_step`: three steps of W1 through the entry point; with BF16 experts also TRL's path, W2 and W3."""
    import torch

    import train_grpo

    tokens, seen = 512, {"child": options.child, "commit": commit()}
    generate, most = limit_completions(tokens), "4000" if options.child == "bf16" else str(tokens)
    learn = train_grpo.Learner.learn

    def learn_and_keep(self: Any, model: Any, batch: dict[str, Any]) -> Any:
        seen["batch"] = batch
        return learn(self, model, batch)

    train_grpo.Learner.learn = learn_and_keep
    memory = PeakMemory()
    run = Path(options.run).absolute()
    settings = {
        "MODEL_ID": str(options.model), "DATA": options.data, "USE_VLLM": "1", "PROMPTS_PER_STEP": "12",
        "NUM_GENERATIONS": "8", "MAX_COMPLETION_LEN": most, "TOTAL_STEPS": "3", "SAVE_STEPS": "9", "EVAL_SAMPLES": "0",
        "OUTPUT_DIR": str(run), "OVERWRITE": "1", "REWARDS": "action,bench:noise", "EXPERTS": options.child,
    }  # fmt: skip
    os.environ.update(settings)
    make_trainer = train_grpo.make_trainer

    def make_and_keep(*arguments: Any) -> Any:
        seen["trainer"] = make_trainer(*arguments)
        return seen["trainer"]

    wake, sleep = train_grpo.Engine.wake, train_grpo.Engine.sleep

    def watched_wake(self: Any) -> None:
        memory.phase = "rollout"
        wake(self)

    def watched_sleep(self: Any) -> None:
        sleep(self)
        memory.phase = "learning"

    train_grpo.make_trainer = make_and_keep
    train_grpo.Engine.wake, train_grpo.Engine.sleep = watched_wake, watched_sleep
    code = train_grpo.main([])
    memory.running = False
    memory.join()
    train_grpo.Learner.learn, train_grpo.Engine.wake, train_grpo.Engine.sleep = learn, wake, sleep
    if code:
        return code
    trainer, batch = seen.pop("trainer"), seen.pop("batch")
    config = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))
    plan = json.loads((run / "settings.json").read_text(encoding="utf-8"))["choices"]["plan"]
    engine = plan["engine"]
    awake = engine["weights"] + engine["scratch"] + engine["cache"]
    planned = plan["weights"] + plan["adapter"] + max(awake, plan["learning"] + engine["asleep"])
    seen["steps"] = steps_of(run)
    seen |= {"job_peaks_gib": memory.peaks, "planned_gib": planned, "micro_batch": plan["micro_batch"]}
    out = Path(options.out)

    def keep() -> None:  # after each part: what was measured is not lost with a part that fails
        out.write_text(json.dumps(seen), encoding="utf-8")

    trainer.model.train()
    seen["w1"] = our_learning(trainer, batch)
    prompts = batch["prompt_mask"].sum(1)[:: trainer.num_generations].sum().item()
    scored = int(batch["completion_mask"].sum().item())
    seen["w1_floor_s"] = floor_seconds(config, prompts + scored, scored)
    keep()
    if options.child == "mxfp4":
        return 0
    lengths = real_lengths(Path(options.lengths), options.model)
    ragged = [lengths[i % len(lengths)] for i in range(96)]
    # W3: rollout and learning of the first sixteen of those completions, two prompts.
    w3 = given_step(trainer, generate, lengths[:16])
    seen["w3_rollout_s"], seen["w3_learn_s"], seen["w3_tokens"] = w3["rollout"], w3["learn"], w3["tokens"]
    seen["long_peak_gib"] = our_learning(trainer, padded_batch(trainer, [4000] * 16, 8), 1)["peak_gib"]
    scored = min(16, plan["micro_batch"]) * 4000
    seen["long_logits_gib"] = scored * config["vocab_size"] * 4 / 2**30
    seen["long_head_gib"] = head_peak(trainer, scored)
    keep()
    w2 = padded_batch(trainer, ragged, 8)
    seen["w2"] = our_learning(trainer, w2, 1)  # its kernels are compiled by now
    seen["w2_mean"], seen["w2_max"] = sum(ragged) / 96, max(ragged)
    keep()
    with torch.no_grad():
        ours = trainer._get_per_token_logps_and_entropies(trainer.model, *joined(batch))[0]
        shifted = {**batch, **{k: batch[k].roll(trainer.num_generations * 3, 0) for k in ("prompt_ids", "prompt_mask")}}
        wrong = trainer._get_per_token_logps_and_entropies(trainer.model, *joined(shifted))[0]
    seen["gradients"] = compare_gradients(trainer, batch)
    trl_learning(trainer, batch, 8, least=1)
    theirs = trl_learning(trainer, batch, 8)
    seen |= {
        "w1_trl_s": theirs["seconds"],
        "w1_trl_old_s": theirs["old_seconds"],
        "w1_trl_peak_gib": theirs["peak_gib"],
    }
    keep()
    four = trl_learning(trainer, batch, 4, least=2)["logps"]
    mask = batch["completion_mask"].bool()
    seen["logp_difference"] = (ours - theirs["logps"]).abs()[mask].mean().item()
    seen["logp_wrong_prompt"] = (wrong - theirs["logps"]).abs()[mask].mean().item()
    seen["logp_batching"] = (four - theirs["logps"][:8]).abs()[mask[:8]].mean().item()
    keep()
    try:
        trl_learning(trainer, w2, 4, least=1)
        seen["w2_trl_s"] = trl_learning(trainer, w2, 4)["seconds"]
    except torch.OutOfMemoryError as error:
        seen["w2_trl_error"] = str(error).splitlines()[0][:200]
        print(f"bench: TRL's padded path does not fit W2: {seen['w2_trl_error']}", file=sys.stderr)
    keep()
    return 0


def joined(batch: dict[str, Any]) -> tuple[Any, Any, int]:
    """(ids (B, P + C), mask, C) of a padded batch."""
    import torch

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1), batch["completion_ids"].size(1)


def bench_step(options: argparse.Namespace) -> int:
    """Two children, BF16 and packed experts; with the packed ones all but 40 GiB of the card is occupied."""
    results: dict[str, Any] = {}
    for child in ("bf16", "mxfp4"):
        out = Path(options.run).absolute().with_name(f"step-{child}.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        if options.only in (None, child):
            out.unlink(missing_ok=True)
            command = [sys.executable, __file__, "step", "--child", child, "--model", options.model]
            command += ["--data", options.data, "--lengths", options.lengths, "--out", str(out), "--run", options.run]
            with contextlib.nullcontext() if child == "bf16" else ballast(40.0):
                code = subprocess.run(command, check=False).returncode
            if code:
                print(f"child {child} ended with exit code {code}; {out} holds what it had measured", file=sys.stderr)
                return code
        elif child == "mxfp4" and not out.exists():
            continue
        if not out.exists():
            print(f"no {out}: run --only {child} first", file=sys.stderr)
            return 1
        results[child] = json.loads(out.read_text(encoding="utf-8"))
        if results[child]["commit"] != commit():
            print(f"{out} is of commit {results[child]['commit']}: run --only {child} again", file=sys.stderr)
            return 1
        # After each child: what was measured is not lost when the machine is given back during the next one.
        write(Path(options.out), step_figures(results), shown("step", "--lengths real_completions.csv"))
    return 0


def step_figures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures of the children that have ended: `bf16`, then `mxfp4`."""
    one, packed = results["bf16"], results.get("mxfp4")
    later = one["steps"][1:]

    def mean(name: str) -> float:
        return sum(float(step[name]) for step in later) / len(later)

    generated = sum(
        float(step["rollout_tokens_per_s"])
        * float(step["rollout_s"])
        / (float(step["rollout_s"]) - sum(float(step[name]) for name in ("wake_s", "handover_s", "sleep_s")))
        for step in later
    )
    # What a step has besides: rewards, clipping, the optimizer, logging; of 96 completions, so rather more than W3's.
    rest = mean("step_s") - mean("rollout_s") - one["w1"]["seconds"]
    peak = {child: max(seen["job_peaks_gib"].values()) for child, seen in results.items()}
    error = {child: seen["planned_gib"] / peak[child] - 1 for child, seen in results.items()}
    figures = [
        figure("w1_step_s", mean("step_s"), "s", "12 x 8 completions of 512 tokens, the whole step: mean of steps 2 and 3 of a run"),
        figure("w1_rollout_s", mean("rollout_s"), "s", "its rollout, hand-over, waking and sleeping included"),
        figure("w1_wake_s", mean("wake_s"), "s", "of that"),
        figure("w1_handover_s", mean("handover_s"), "s", "of that"),
        figure("w1_sleep_s", mean("sleep_s"), "s", "of that"),
        figure("w1_reward_s", mean("reward_s"), "s", "decoding and scoring the completions"),
        figure("rollout_tok_s", mean("rollout_tokens_per_s"), "tokens/s", "tokens by that time"),
        figure("generate_tok_s", generated / len(later), "tokens/s", "the same without hand-over, waking and sleeping"),
        figure("w1_learn_s", one["w1"]["seconds"], "s", f"its learning alone, in passes of up to {one['micro_batch']} completions of 4,000"),
        figure("w1_learn_peak_gib", one["w1"]["peak_gib"], "GiB", "allocated beyond weights and sleeping engine"),
        figure("w1_floor_s", one["w1_floor_s"], "s", "the arithmetic alone at the card's dense BF16 peak"),
        figure("w1_floor_ratio", one["w1"]["seconds"] / one["w1_floor_s"], "x", "learning against it"),
        figure("w2_learn_s", one["w2"]["seconds"], "s", f"96 completions, mean {one['w2_mean']:.0f}, longest {one['w2_max']} tokens, with their prompts"),
        figure("w2_peak_gib", one["w2"]["peak_gib"], "GiB", "allocated beyond weights and sleeping engine"),
        figure("long_learn_peak_gib", one["long_peak_gib"], "GiB", f"16 completions of 4,000 tokens in passes of up to {one['micro_batch']}, allocated beyond weights and sleeping engine"),
        figure("long_head_gib", one["long_head_gib"], "GiB", "of that, what the log-probs of one such pass and their backward take beyond the states"),
        figure("long_logits_gib", one["long_logits_gib"], "GiB", "what the logits of one such pass would take in float32; half of it in BF16"),
        figure("w3_step_s", one["w3_rollout_s"] + one["w3_learn_s"] + rest, "s", f"16 completions of that kind, {one['w3_tokens']} tokens in all: rollout, learning, and the {rest:.2f} s that a step of W1 has besides"),
        figure("w3_rollout_s", one["w3_rollout_s"], "s", "waking, hand-over and sleeping included"),
        figure("w3_learn_s", one["w3_learn_s"], "s"),
        figure("job_peak_bf16_gib", peak["bf16"], "GiB", "EXPERTS=bf16, MAX_COMPLETION_LEN=4000; " + ", ".join(f"{phase} {gib:.1f}" for phase, gib in one["job_peaks_gib"].items())),
        figure("plan_error_bf16", error["bf16"], "share", "plan of --check against that peak"),
        figure("w1_learn_trl_s", one["w1_trl_s"], "s", "TRL's padded path on the same rollouts in the same process: flex attention, old log-probs, micro-batches of 8"),
        figure("w1_speedup", one["w1_trl_s"] / one["w1"]["seconds"], "x", "learning against it"),
        figure("w1_trl_old_logps_s", one["w1_trl_old_s"], "s", "of that, the pass for old log-probs"),
        figure("w1_trl_peak_gib", one["w1_trl_peak_gib"], "GiB", "allocated beyond weights and sleeping engine"),
        figure("gradient_difference", one["gradients"]["difference"], "share", "adapter's gradient on 16 of the completions, this learner against TRL's path: 2-norm of the difference by the 2-norm"),
        figure("gradient_batching", one["gradients"]["batching"], "share", "TRL's path with micro-batches of 4 against 8"),
        figure("gradient_wrong_prompt", one["gradients"]["wrong_prompt"], "share", "this learner with the prompts exchanged against TRL's path"),
        figure("logp_difference", one["logp_difference"], "nats", "mean over tokens, this learner against TRL's path"),
        figure("logp_batching", one["logp_batching"], "nats", "TRL's path against itself with micro-batches of 4"),
        figure("logp_wrong_prompt", one["logp_wrong_prompt"], "nats", "this learner with other rows' prompts against TRL's path"),
    ]  # fmt: skip
    if packed:
        figures += [
            figure("w1_job_peak_mxfp4_gib", peak["mxfp4"], "GiB", "EXPERTS=mxfp4, all but 40 GiB of the card occupied; by the driver, engine and CUDA context included"),
            figure("w1_learn_mxfp4_s", packed["w1"]["seconds"], "s", f"EXPERTS=mxfp4, passes of up to {packed['micro_batch']} completions"),
            figure("mxfp4_ratio", packed["w1"]["seconds"] / one["w1"]["seconds"], "x", "learning against EXPERTS=bf16"),
            figure("plan_error_mxfp4", error["mxfp4"], "share", "the same with EXPERTS=mxfp4"),
        ]  # fmt: skip
    if "w2_trl_s" in one:
        figures.append(figure("w2_learn_trl_s", one["w2_trl_s"], "s", "TRL's padded path, micro-batches of 4"))
        figures.append(figure("w2_speedup", one["w2_trl_s"] / one["w2"]["seconds"], "x", "learning against it"))
    return figures


# ---- resume: a killed run beside its continuation --------------------------------------------------------------------

RESUME_SAVE, RESUME_KILL, RESUME_TOTAL = 4, 6, 8  # steps: of the checkpoint, before SIGKILL, of the whole run


def sampled_by_step(path: Path) -> dict[int, list[tuple[str, str, str]]]:
    """(prompt_id, completion, tokens) of each row of a log of completions, by step; a row that is torn off is left out."""
    import train_grpo

    found: dict[int, list[tuple[str, str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, fieldnames=list(train_grpo.COMPLETIONS)):  # what was superseded has no header
            if row["truncated"] and row["step"] != "step":
                found.setdefault(int(row["step"]), []).append((row["prompt_id"], row["completion"], row["tokens"]))
    return found


def bench_resume(options: argparse.Namespace) -> int:
    """Exit code 1 where the step behind the checkpoint was sampled otherwise, or the run could not be killed in time."""
    run = Path(options.run).absolute()
    prompts, group = 4, 4
    settings = {
        "MODEL_ID": options.model, "DATA": options.data, "PROMPTS_PER_STEP": str(prompts), "NUM_GENERATIONS": str(group), "EVAL_SAMPLES": "0",
        "MAX_COMPLETION_LEN": str(options.tokens), "TOTAL_STEPS": str(RESUME_TOTAL), "SAVE_STEPS": str(RESUME_SAVE),
        "REWARDS": "action,bench:noise", "OUTPUT_DIR": str(run), "LR_SCHEDULER": "constant_with_warmup",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "train_grpo.py")]
    if run.exists():
        print(f"bench: {run} is there already; delete it or name another with --run", file=sys.stderr)
        return 2
    process = subprocess.Popen(command, env=os.environ | settings)
    log = run / "metrics.csv"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > RESUME_KILL):
        time.sleep(0.02)
    if process.poll() is not None:
        print(f"bench: the run ended with exit code {process.returncode} before it could be killed", file=sys.stderr)
        return 1
    process.kill()
    process.wait()
    started = time.perf_counter()
    code = subprocess.run(command, env=os.environ | settings, check=False).returncode
    seconds = time.perf_counter() - started
    if code:
        print(f"bench: the run that goes on ended with exit code {code}", file=sys.stderr)
        return code
    first, again = (sampled_by_step(run / f"completions{kind}.csv") for kind in (".superseded", ""))
    rows = len(steps_of(run))
    alike = [
        sum(a == b for a, b in zip(first.get(step, []), again[step], strict=False))
        for step in range(RESUME_SAVE + 1, RESUME_KILL + 1)
    ]
    resumed = json.loads((run / "settings.json").read_text(encoding="utf-8"))["resumed_from_step"]
    figures = [
        figure("resumed_from_step", resumed, "steps", f"killed after step {RESUME_KILL}, a checkpoint every {RESUME_SAVE}"),
        figure("completions_per_step", prompts * group, "completions"),
        figure("next_step_alike", alike[0], "completions", "of the step behind the checkpoint, sampled as the killed process had"),
        figure("later_step_alike", alike[1], "completions", "of the step after, whose adapter has had one more update in each process"),
        figure("metrics_rows", rows, "rows", f"in metrics.csv at the end of {RESUME_TOTAL} steps"),
        figure("second_process_s", seconds, "s", "the run that went on, from process start to zip"),
    ]  # fmt: skip
    write(Path(options.out), figures, shown("resume", f"--tokens {options.tokens}"))
    return int(alike[0] != prompts * group or rows != RESUME_TOTAL)


# ---- attention: every implementation against float64 ------------------------------------------------------------------

# Largest relative error in the 2-norm, by the type of the inputs. BF16: five times its unit roundoff (2^-8). Eager attention,
# which rounds scores and probabilities to BF16, comes to 0.006, and to 0.012 for sinks; a window that is off by one to 0.09.
ERROR_BOUNDS = {"bfloat16": 0.02, "float32": 1e-5}
PARTS = ("out", "q", "k", "v", "sinks")


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Sizes of one comparison: a prompt and its completions in tokens, heads, and the width of the sliding window."""

    prompt: int = 930
    completions: tuple[int, ...] = (512, 401, 203, 37)
    heads: int = 64
    key_heads: int = 8
    dim: int = 64
    window: int = 128


SMALL_CASE = AttentionCase(21, (12, 7, 3, 1), 4, 2, 16, 5)


def exact_attention(case: AttentionCase, window: int | None, inputs: Any, gradient: Any) -> list[Any]:
    """Output (n, Hq, D) and gradients of q (n, Hq, D), k and v (n, Hkv, D) and sinks (Hq,), all float64, for `inputs`
    (q, k, v, sinks) and the `gradient` (n, Hq, D) of the output.

    Softmax over scores in full, with the sink as one more column; n are the tokens without padding. It shares no code
    with the learner: tokens of a completion see the prompt's and, causally, their own.
    """
    import torch

    q, k, v, sinks = (x.detach().double().requires_grad_() for x in inputs)
    lengths = torch.tensor([case.prompt, *case.completions])
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(q.device)
    own = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(q.device)
    position = own + case.prompt * (segment > 0)
    distance = position[:, None] - position[None]
    visible = ((segment[:, None] == segment) | (segment == 0)) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    group, out = case.heads // case.key_heads, torch.zeros_like(q, requires_grad=False)
    for head in range(case.key_heads):  # the scores of all heads at once would take gigabytes
        heads = slice(head * group, (head + 1) * group)
        scores = torch.einsum("qhd,kd->hqk", q[:, heads], k[:, head]) / math.sqrt(case.dim)
        column = sinks[heads, None, None].expand(-1, len(q), 1)
        weights = torch.cat([scores.masked_fill(~visible, -torch.inf), column], 2).softmax(2)[:, :, :-1]
        part = torch.einsum("hqk,kd->qhd", weights, v[:, head])
        part.backward(gradient[:, heads].double())
        out[:, heads] = part.detach()
    return [out, *(x.grad for x in (q, k, v, sinks))]


def learners_attention(attention: str, case: AttentionCase, layout: Any, inputs: Any, sliding: bool) -> Any:
    """A call without arguments that returns what GptOssAttention gets from `attention` for `inputs` (q (1, Hq, T, D), k and
    v (1, Hkv, T, D), sinks (Hq,)): (1, T, Hq, D)."""
    from transformers.models.gpt_oss.modeling_gpt_oss import ALL_ATTENTION_FUNCTIONS, eager_attention_forward

    import train_grpo

    name = train_grpo.install_attention(attention)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
    q, k, v, sinks = inputs
    masks = train_grpo.attention_masks(layout, attention, case.window, q.dtype)
    mask = masks["sliding_attention" if sliding else "full_attention"]
    module = SimpleNamespace(num_key_value_groups=case.heads // case.key_heads, sinks=sinks, training=True)
    rest = {"scaling": 1 / math.sqrt(case.dim), "sliding_window": case.window if sliding else None, "s_aux": sinks}
    return lambda: function(module, q, k, v, mask, dropout=0.0, **rest)[0]


def milliseconds(call: Any, repeats: int = 9, passes: int = 5) -> float:
    """Median over `repeats` of the time of one of `passes` calls in a row; the caller has warmed up."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        for _ in range(passes):
            call()
        wait()
        seconds.append((time.perf_counter() - started) / passes)
    return 1000 * statistics.median(seconds)


def bench_attention(options: argparse.Namespace) -> int:
    """Error and time of every attention of the learner. Exit code 1 where one is out of bounds or raises, or none ran."""
    import torch

    import train_grpo

    case, device = SMALL_CASE if options.small else AttentionCase(), torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench: no GPU here; use --device cpu --small", file=sys.stderr)
        return 2
    # Packages last: one that breaks the CUDA context takes what follows with it.
    here = sorted(train_grpo.ATTENTION, key=lambda name: name in train_grpo.FLASH_PACKAGES)
    chosen = options.only or (here if device.type == "cuda" else ["eager"])
    if unknown := [name for name in chosen if name not in train_grpo.ATTENTION]:
        print(f"bench: --only: no {', '.join(unknown)}; use {', '.join(train_grpo.ATTENTION)}", file=sys.stderr)
        return 2
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    bound = ERROR_BOUNDS[str(dtype).removeprefix("torch.")]
    generator = torch.Generator().manual_seed(0)
    # Which tokens they are does not matter here: what attends to what is a matter of places.
    prompts = [list(range(case.prompt))] * len(case.completions)
    layout = train_grpo.make_layout(prompts, [list(range(n)) for n in case.completions], True, True, device)
    tokens, width = case.prompt + sum(case.completions), layout.ids.shape[1]

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(device, dtype)

    # Sinks about as large as the log-sum-exp of a window's scores, so that leaving them out shows in every part.
    sinks = (5 + torch.randn(case.heads, generator=generator)).to(device, dtype)
    leaves = [normal(width, n, case.dim) for n in (case.heads, case.key_heads, case.key_heads)]
    inputs = [x.transpose(0, 1)[None].contiguous().requires_grad_() for x in leaves] + [sinks.requires_grad_()]
    gradient = normal(1, width, case.heads, case.dim)
    gradient[:, tokens:] = 0  # nothing depends on padding
    kinds = {"full": None, "window": case.window}
    exact = {
        kind: exact_attention(case, size, [*(x[:tokens] for x in leaves), sinks], gradient[0, :tokens])
        for kind, size in kinds.items()
    }
    shape = f"{tokens} tokens: a prompt of {case.prompt} and completions of {', '.join(map(str, case.completions))}"
    figures = [
        figure("tokens", tokens, "tokens", f"{shape}; {case.heads} heads over {case.key_heads} of {case.dim}, {dtype}"),
        figure("error_bound", bound, "relative", "largest error: 2-norm of the difference to float64 by the 2-norm of float64"),
    ]  # fmt: skip
    failed, measured = [], []
    flags = [*(["--device cpu"] * (device.type == "cpu")), *(["--small"] * options.small)]
    flags += ["--only", *options.only] if options.only else []
    command = " ".join(["python scripts/bench.py attention", *flags])  # without --out: a path of this machine
    packages = {name: package for name, (package, _) in train_grpo.FLASH_PACKAGES.items()} | {"eager": "transformers"}
    for attention in chosen:
        distribution = packages.get(attention, "torch")
        try:
            for kind in kinds:
                seen = "full attention" if kind == "full" else f"sliding window of {case.window}"
                call = learners_attention(attention, case, layout, inputs, kind == "window")

                def both(call: Any = call) -> Any:
                    out = call()
                    return [out, *torch.autograd.grad(out, inputs, gradient)]

                out, *gradients = (x.detach().double() for x in both())
                # Rows (T, H, D) as float64 has them; what padding got counts as error, but for its output.
                found = [out[0, :tokens], *(g[0].transpose(0, 1) for g in gradients[:3]), gradients[3]]
                for part, ours, true in zip(PARTS, found, exact[kind], strict=True):
                    norm = true.norm()
                    if len(ours) > len(true):
                        true = torch.cat([true, true.new_zeros(len(ours) - len(true), *true.shape[1:])])
                    error = ((ours - true).norm() / norm).item()
                    what = "output" if part == "out" else f"gradient of {part}"
                    figures.append(figure(f"{attention}_{kind}_{part}_error", error, "relative", f"{what}, {seen}"))
                    if not error <= bound:  # NaN is out of bounds
                        failed.append(f"{attention}: {what}, {seen}: error {error:.3g} exceeds {bound:.3g}")
                took = milliseconds(both)
                figures.append(figure(f"{attention}_{kind}_ms", took, "ms", f"forward and backward, {seen}"))
            figures.append(figure(f"{attention}_usable", 1, "", f"{distribution} {package_version(distribution)}"))
            measured.append(attention)
        except ImportError as error:
            note = f"cannot be imported here: {error}"
            figures.append(figure(f"{attention}_usable", 0, "", note))
        except Exception as error:  # one that fails must not take the others' figures with it
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            figures.append(figure(f"{attention}_usable", 0, "", reason))
            failed.append(f"{attention}: {reason}")
        # After each: what was measured is not lost when a kernel takes the process with it.
        write(Path(options.out), figures, command)
    if not measured:
        failed.append("no implementation could be measured")
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return int(bool(failed))


def package_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


@contextlib.contextmanager
def ballast(leave_gib: float) -> Iterator[None]:
    """Another process holds the GPU's memory but for `leave_gib`."""
    code = (
        "import sys, torch; free = torch.cuda.mem_get_info()[0]; "
        f"held = torch.empty(max(0, int(torch.cuda.mem_get_info()[0] - {leave_gib} * 2**30)), dtype=torch.uint8, device='cuda'); "
        "print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        yield
    finally:
        process.stdin.close()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("main", help="the whole path for a few steps")
    one.add_argument("--model", required=True, help="checkpoint folder or Hub id")
    one.add_argument("--data", required=True, help="training CSVs")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--run", default="runs/bench", help="OUTPUT_DIR of the run; deleted first")
    one.add_argument("--steps", type=int, default=4)
    one.add_argument("--attention", default="auto")
    one.add_argument("--micro-batch", type=int, default=4)
    one.add_argument("--rewards", default="action,bench:noise")
    one = commands.add_parser("rollout", help="vLLM beside the trainer")
    one.add_argument("--model", required=True, help="checkpoint folder or Hub id")
    one.add_argument("--data", required=True, help="training CSVs")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--run", default="runs/bench-rollout", help="OUTPUT_DIR of the runs; deleted first")
    one.add_argument("--sync", default="merge", choices=("merge", "lora"), help="ROLLOUT_SYNC")
    one.add_argument(
        "--warm-caches", action="store_true", help="the compile caches are filled: do not start once for them"
    )
    one.add_argument("--child", choices=("warm", "short"), help=argparse.SUPPRESS)
    one = commands.add_parser("step", help="the learner beside TRL's padded path")
    one.add_argument("--model", required=True, help="checkpoint folder")
    one.add_argument("--data", required=True, help="training CSVs")
    one.add_argument("--lengths", required=True, help="CSV whose `completion` column gives the lengths of W2 and W3")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--run", default="runs/bench-step", help="OUTPUT_DIR of the runs; deleted first")
    one.add_argument("--only", choices=("bf16", "mxfp4"), help="run this half; the other's last run is read")
    one.add_argument("--child", choices=("bf16", "mxfp4"), help=argparse.SUPPRESS)
    one = commands.add_parser("resume", help="a killed run beside its continuation")
    one.add_argument("--model", required=True, help="checkpoint folder, Hub id or `tiny`")
    one.add_argument("--data", required=True, help="training CSVs")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--run", default="runs/bench-resume", help="OUTPUT_DIR of the run; must not exist")
    one.add_argument("--tokens", type=int, default=256, help="MAX_COMPLETION_LEN")
    one = commands.add_parser("attention", help="the learner's attention against float64")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="on a CPU: eager, in float32")
    one.add_argument("--small", action="store_true", help="tiny sizes")
    one.add_argument("--only", nargs="+", metavar="ATTN_IMPL", help="these implementations only")
    one = commands.add_parser("demo", help="the tiny model on three seeds, on the CPU")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--figure", required=True, help="PNG to write")
    one.add_argument("--run", default="runs/bench-demo", help="folder of the three runs; deleted first")
    options = parser.parse_args()
    if options.command == "rollout":
        return rollout_child(options) if options.child else bench_rollout(options)
    if options.command == "step":
        return step_child(options) if options.child else bench_step(options)
    programs = {"main": bench_main, "demo": bench_demo, "resume": bench_resume, "attention": bench_attention}
    return programs[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
