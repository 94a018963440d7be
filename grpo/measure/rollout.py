# SPDX-License-Identifier: Apache-2.0
"""vLLM beside the trainer."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pandas
import psutil
import torch

from grpo.learn.trainer import Trainer
from grpo.measure import watched
from grpo.measure.record import read_json, shown, steps_of, tabled, write
from grpo.model.attention import attention_of
from grpo.rollout import engine as rollout_engine
from grpo.rollout.engine import Engine

LONG_TOKENS = 2300
ROLLOUT = """
rollout_tok_s | tokens/s | 96 x 512 tokens, adapter on {targets}, {sync}; mean of those after the first; prefill of 12 prompts included
hf_generate_tok_s | tokens/s | transformers' generate, 16 of the same prompts x 128 tokens, same process
speedup | x | the two above
rollout_compiled | kernels | compiled by Triton, or read from its cache, during the rollouts
handover_s | s | ROLLOUT_SYNC={sync}
sync_share | share | of the adapter's update that vLLM's weights held in the last step
sleep_s wake_s | s | after the first
asleep_gib | GiB | GPU memory that the sleeping engine holds before the first rollout, by the driver
asleep_later_gib | GiB | the same after three steps, with what trainer and libraries took meanwhile
same_seed_alike | completions | of 96: the same rollout twice, with one seed
start_to_rollout_s | s | process start to first rollout, {caches}; mismatch check included, the bench's copy of the weights left out
long_rollout_s | s | 16 completions, {long_tokens} tokens in all
long_step_s | s | rollout, weight sync, waking and sleeping, and learning from as many tokens
short_step_s | s | the whole step of 96 x 512
short_learn_s | s | its learning
job_peak_gib | GiB | by the driver, engine and CUDA context included
parity_mean | nats | worst of fixed and sampled tokens, before and after a sleep
parity_max | nats |
parity_control_mean | nats | smallest with the trainer's adapter off
base_changed_elements | | base weights of the trainer, bit for bit
adapter_nonzero_lora_b | tensors | lora_B starts at 0: how many the three steps have moved
hf_generate_many_tok_s | tokens/s | transformers' generate with 48 at once x 64 tokens
speedup_many | x | rollout_tok_s by that
start_cold_s | s | the same in the machine's first process: compile caches as that found them
"""


def free_gib() -> float:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**30


class RolloutWatch:
    """Watches a run's start and its rollouts. `found` holds figures, `base` the frozen weights with copies from before."""

    def __init__(self) -> None:
        self.born, self.copying, self.free = psutil.Process().create_time(), 0.0, 0.0
        self.found: dict[str, Any] = {}
        self.rollouts: list[dict[str, float]] = []
        self.base: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.prompt_ids: list[list[int]] = []
        self.trainers: list[Trainer] = []

    def start(self, start_engine: Callable[..., Engine], *given: Any) -> Engine:
        started, self.free = time.perf_counter(), free_gib()
        frozen = [p.detach() for p in self.trainers[0].model.parameters() if not p.requires_grad]
        self.base = [(p, p.to("cpu", copy=True)) for p in frozen]
        self.copying = time.perf_counter() - started
        engine = start_engine(*given)
        self.found["asleep_gib"] = self.free - free_gib()
        return engine

    def sync(self, sync_weights: Callable[..., None], engine: Engine, *given: Any, **named: Any) -> None:
        with watched.weighed() as found:
            sync_weights(engine, *given, **named)
        engine.seconds["handover"] = found["seconds"]

    def rollout(self, rollout: Callable[..., Any], engine: Engine, policy: Any, prompts: Any, *given: Any) -> Any:
        from triton import knobs  # no Triton on a CPU

        # Without the bench's own copy of the base weights, which no user's run makes.
        self.found.setdefault("start_to_rollout_s", time.time() - self.born - self.copying)
        compiled: list[dict[str, Any]] = []
        with mock.patch.object(knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event)):
            result = rollout(engine, policy, prompts, *given)
        self.rollouts.append({"tokens": sum(map(len, result[0])), "compiled": len(compiled), **engine.seconds})
        self.prompt_ids = [list(ids) for ids in prompts]
        return result

    def changed_elements(self) -> int:
        """Elements of the base weights that differ bit for bit."""
        changed = 0
        for weight, before in self.base:
            now, then = (t.contiguous().view(torch.uint8) for t in (weight, before.to(weight.device)))
            changed += int((now != then).view(-1, weight.element_size()).any(dim=1).sum())
        return changed


def hf_tokens_per_second(trainer: Trainer, prompt_ids: list[list[int]], tokens: int) -> float:
    """transformers' generate on the same prompts, with its own attention and experts, on the GPU that vLLM just used."""
    policy = trainer.accelerator.unwrap_model(trainer.model).eval()
    base, ours = policy.get_base_model(), policy.config._experts_implementation
    base.set_experts_implementation("grouped_mm")  # what transformers takes by itself
    batch = trainer.processing_class.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
    wanted = {"do_sample": True, "max_new_tokens": tokens, "min_new_tokens": tokens}
    with (
        watched.weighed() as found,
        torch.no_grad(),
        attention_of(policy, "eager"),
        torch.autocast("cuda", torch.bfloat16),
    ):
        policy.generate(**batch.to(policy.device), **wanted)
    base.set_experts_implementation(ours)
    policy.train()
    return len(prompt_ids) * tokens / found["seconds"]


def after_the_run(watch: RolloutWatch, run: Path) -> dict[str, Any]:
    """What the three steps and their trainer still tell: figures by name."""
    trainer = watch.trainers[0]
    engine, policy = trainer.run.engine, trainer.accelerator.unwrap_model(trainer.model)
    rollouts, parity = pandas.DataFrame(watch.rollouts), pandas.DataFrame(trainer.run.parity)
    later = rollouts[1:]
    found = {
        "asleep_later_gib": watch.free - free_gib(),
        "rollout_tok_s": (later.tokens / later.generate).mean(),
        "rollout_compiled": int(rollouts.compiled.sum()),
        **{f"{name}_s": later[name].mean() for name in ("handover", "sleep", "wake")},
        "short_step_s": steps_of(run).step_s.iloc[-1],
        **steps_of(run)[["sync_share"]].iloc[-1].dropna(),  # a native adapter has none
        "short_learn_s": steps_of(run).learn_s.iloc[-1],
        "job_peak_gib": steps_of(run).gpu_peak_gib.max(),
        "parity_mean": parity["mean"].max(),
        "parity_max": parity["max"].max(),
        "parity_control_mean": parity.control_mean.min(),
    }
    twice = [engine.rollout(policy, watch.prompt_ids, 7)[0] for _ in range(2)]
    found["same_seed_alike"] = sum(one == other for one, other in zip(*twice, strict=True))
    found["hf_generate_tok_s"] = hf_tokens_per_second(trainer, watch.prompt_ids[:16], 128)
    found["speedup"] = found["rollout_tok_s"] / found["hf_generate_tok_s"]
    long = watched.given_step(trainer, [LONG_TOKENS] * 16)
    found |= {"long_rollout_s": long["generate"], "long_step_s": long["rollout"] + long["learn"]}
    found["long_tokens"] = long["tokens"]
    found["base_changed_elements"] = watch.changed_elements()
    lora_b = [parameter for name, parameter in policy.named_parameters() if "lora_B" in name]
    found["adapter_nonzero_lora_b"] = sum(bool(parameter.any()) for parameter in lora_b)
    with contextlib.suppress(torch.OutOfMemoryError):  # with 96 rows its eager attention wants more than is free
        found["hf_generate_many_tok_s"] = hf_tokens_per_second(trainer, watch.prompt_ids[:48], 64)
        found["speedup_many"] = found["rollout_tok_s"] / found["hf_generate_many_tok_s"]
    return found


def rollout_child(options: argparse.Namespace) -> int:
    """One child of `bench_rollout`: runs the entry point with its engine watched, and writes what it found."""
    watch, warm = RolloutWatch(), options.child == "warm"
    with watched.completions_of(512):
        with (
            watched.kept_trainers() as watch.trainers, watched.intercept(rollout_engine, "start_engine", watch.start),
            watched.intercept(Engine, "sync_weights", watch.sync), watched.intercept(Engine, "rollout", watch.rollout),
        ):  # fmt: skip
            steps = {"TOTAL_STEPS": 1} if warm else {}
            given = {"ROLLOUT_SYNC": options.sync, "LORA_TARGETS": options.targets} | steps
            code = watched.run_w1(options, MAX_COMPLETION_LEN=LONG_TOKENS, **given)
        if not (code or warm):
            watch.found |= after_the_run(watch, Path(options.run))
    watched.keep(options, watch.found)
    return code


def bench_rollout(options: argparse.Namespace) -> int:
    """Two children, then the figures. Exit code 1 where a base weight changed."""
    if options.child:
        return rollout_child(options)
    found: dict[str, Any] = {"sync": options.sync, "targets": options.targets}
    for child in ("short",) if options.warm_caches else ("warm", "short"):
        if code := watched.run_child(options, child):
            return code
        found |= read_json(watched.child_result(options, child))
        if child == "warm":
            found["start_cold_s"] = found["start_to_rollout_s"]
    found["caches"] = "caches as found" if options.warm_caches else "warm caches"
    flags = ["--sync", options.sync, "--targets", options.targets, *["--warm-caches"] * options.warm_caches]
    write(Path(options.out), tabled(ROLLOUT, found), shown("rollout", *flags))
    return int(found["base_changed_elements"] != 0)
