# SPDX-License-Identifier: Apache-2.0
"""A run in this process with its trainer and engine watched."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from grpo.learn.trainer import Trainer
from grpo.model import load
from grpo.model.attention import attention_of
from grpo.preflight.machine import read_machine
from grpo.rollout.engine import Engine


def run_in_process(main: Callable[..., int], settings: dict[str, str]) -> dict[str, Any]:
    """The entry point's `main` in this process with `settings`; keeps a copy of every base weight and the trainer.

    Returns {"code", "total_s", "load_s", "parameters": [(parameter, copy)], "trainer"}.
    """

    os.environ.update(settings)
    seen: dict[str, Any] = {}
    load_model = load.load_model

    def load_and_keep(*arguments: Any) -> Any:
        started = time.perf_counter()
        model = load_model(*arguments)
        seen["load_s"] = time.perf_counter() - started
        copying = time.perf_counter()
        seen["parameters"] = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters()]
        run_in_process.copy_s = time.perf_counter() - copying
        return model

    load.load_model = load_and_keep
    keep_trainer(seen)
    started = time.perf_counter()
    seen["code"] = main([])
    seen["total_s"] = time.perf_counter() - started
    return seen


def keep_trainer(seen: dict[str, Any]) -> None:
    """Let the next trainer that is made be seen["trainer"]."""
    make = Trainer.__init__

    def make_and_keep(self: Trainer, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        seen["trainer"] = self

    Trainer.__init__ = make_and_keep


def changed_elements(parameters: list[tuple[Any, Any]]) -> int:
    """Elements that differ bit for bit. By identity, not by name: PEFT renames the modules that it wraps."""

    changed = 0
    for parameter, before in parameters:
        now, then = (t.contiguous().view(torch.uint8) for t in (parameter.detach(), before.to(parameter.device)))
        changed += int((now != then).view(-1, parameter.element_size()).any(dim=1).sum())
    return changed


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


LONG_TOKENS = 2300


def limit_completions(tokens: int) -> Any:
    """Let the engine's completions end after `tokens`, whatever MAX_COMPLETION_LEN is; returns the method without it."""

    generate = Engine.generate

    def limited(self: Any, prompt_ids: Any, seed: int, max_tokens: Any = None, **named: Any) -> Any:
        return generate(self, prompt_ids, seed, max_tokens or tokens, **named)

    Engine.generate = limited
    return generate


def given_step(trainer: Any, generate: Any, lengths: list[int]) -> dict[str, float]:
    """Seconds of a step whose completions have these lengths, eight to a prompt: waking, hand-over, generation, sleep,
    and learning from completions of these lengths (the second of two times). No stop token ends one sooner."""
    engine, batch = trainer.run.engine, padded_batch(trainer, lengths, 8)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    started = time.perf_counter()
    engine.wake()
    engine.sync_weights(trainer.accelerator.unwrap_model(trainer.model))
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

    policy = trainer.accelerator.unwrap_model(trainer.model)
    policy.eval()
    base, ours = policy.get_base_model(), policy.config._experts_implementation
    base.set_experts_implementation("grouped_mm")  # what transformers takes by itself
    longest, pad = max(map(len, prompt_ids)), trainer.processing_class.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in prompt_ids], device=policy.device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.no_grad(), attention_of(policy, "eager"), torch.autocast("cuda", torch.bfloat16):
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


def padded_batch(trainer: Any, lengths: list[int], group: int) -> dict[str, Any]:
    """A step's batch as TRL pads it, with random completions of these lengths behind the run's first prompts."""

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

    found: dict[str, float] = {}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    started = time.perf_counter()
    yield found
    torch.cuda.synchronize()
    found["seconds"] = time.perf_counter() - started
    found["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30


def our_learning(trainer: Any, batch: dict[str, Any], repeats: int = 2) -> dict[str, float]:
    """Seconds of `Learner.learn` (the last of `repeats`) and the most memory that torch allocated beyond what was there."""

    for _ in range(repeats):
        torch.cuda.empty_cache()
        with weighed() as found:
            trainer.learn(trainer.model, batch)
        trainer.model.zero_grad(set_to_none=True)
    trainer._metrics["train"].clear()
    return found


class PeakMemory(threading.Thread):
    """Samples the driver's count of used GPU memory in GiB, ballast of other processes left out; `peaks` by `phase`.

    Made before this process touches the GPU: what is free then is where it counts from, its own CUDA context included.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)

        self.before = read_machine().gpu_free
        self.peaks: dict[str, float] = {}
        self.phase, self.running = "starting", True
        self.start()

    def run(self) -> None:

        while self.running:
            phase, used = self.phase, self.before - torch.cuda.mem_get_info()[0] / 2**30
            self.peaks[phase] = max(self.peaks.get(phase, 0.0), used)
            time.sleep(0.05)


def joined(batch: dict[str, Any]) -> tuple[Any, Any, int]:
    """(ids (B, P + C), mask, C) of a padded batch."""

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1), batch["completion_ids"].size(1)


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
