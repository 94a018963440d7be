# SPDX-License-Identifier: Apache-2.0
"""Run the entry point in this process or a child, and watch its trainer, engine and GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo.learn.trainer import Trainer
from grpo.measure.record import BENCH, NOISE, commit, read_json
from grpo.plan.machine import read_machine
from grpo.rollout.engine import Engine


@contextlib.contextmanager
def intercept(owner: Any, name: str, watch: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile a call of `owner.name`, a method or a module's function, becomes one of `watch`, which gets the original
    first and then the arguments."""
    original = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *given, **named: watch(original, *given, **named)):
        yield


@contextlib.contextmanager
def kept_trainers() -> Iterator[list[Trainer]]:
    """The trainers that are made meanwhile."""
    made: list[Trainer] = []

    def keep(init: Callable[..., None], trainer: Trainer, *given: Any, **named: Any) -> None:
        init(trainer, *given, **named)
        made.append(trainer)

    with intercept(Trainer, "__init__", keep):
        yield made


def completions_of(tokens: int) -> contextlib.AbstractContextManager[None]:
    """Meanwhile completions end after `tokens`, whatever MAX_COMPLETION_LEN is, unless the caller says otherwise."""

    def limited(generate: Any, engine: Engine, prompts: Any, seed: int, max_tokens: Any = None, **named: Any) -> Any:
        return generate(engine, prompts, seed, max_tokens or tokens, **named)

    return intercept(Engine, "generate", limited)


def run_w1(options: argparse.Namespace, **settings: object) -> int:
    """W1 by the entry point: three steps of 12 prompts x 8 completions in OUTPUT_DIR=`options.run`. Returns its exit code."""
    common = {
        "MODEL_ID": options.model, "DATA": options.data, "OUTPUT_DIR": Path(options.run).absolute(), "OVERWRITE": 1,
        "USE_VLLM": 1, "PROMPTS_PER_STEP": 12, "NUM_GENERATIONS": 8, "TOTAL_STEPS": 3, "SAVE_STEPS": 9,
        "EVAL_SAMPLES": 0, "REWARDS": f"action,{NOISE}",
        "INVALID_REWARD": 0,  # set, so that the checks only warn: noise pays garbage
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in (common | settings).items()})
    return options.main([])


def child_result(options: argparse.Namespace, child: str) -> Path:
    """Where a child of `run_child` writes what it found."""
    return Path(options.run).absolute().with_name(f"{options.command}-{child}.json")


def run_child(options: argparse.Namespace, child: str) -> int:
    """The same command of bench.py with `--child`, in a process of its own; returns the exit code, 1 without a result."""
    out = child_result(options, child)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    command = [sys.executable, str(BENCH), options.command, "--child", child, "--out", str(out)]
    for name in ("model", "data", "run", "lengths", "sync", "targets", "proof", "steps"):
        if hasattr(options, name):
            command += [f"--{name}", str(getattr(options, name))]
    code = subprocess.run(command, check=False).returncode
    if code or not out.exists():
        print(f"child {child} ended with exit code {code}; {out} holds what it had measured, if any", file=sys.stderr)
    return code or int(not out.exists())


def subject(options: argparse.Namespace) -> list[str]:
    """What a child measures, besides what its name says."""
    return [commit(), *(str(getattr(options, name, "")) for name in ("model", "data", "lengths", "tokens"))]


def keep(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what a child has found so far: it is not lost with a part that fails."""
    Path(options.out).write_text(json.dumps({"subject": subject(options)} | found), encoding="utf-8")


def kept(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What a child has written there about the same subject; empty where it has not."""
    found = read_json(path)
    return found if found.get("subject") == subject(options) else {}


# ---- Time and memory ----


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


class PeakMemory(threading.Thread):
    """Samples the driver's count of used GPU memory in GiB, that of other processes left out; `peak` is the most.

    Entered before this process touches the GPU: what is free then is where it counts from, its own CUDA context included.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.peak, self.ended = read_machine().gpu_free, 0.0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            self.peak = max(self.peak, self.before - torch.cuda.mem_get_info()[0] / 2**30)

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.join()


def occupy(leave_gib: float) -> torch.Tensor:
    """All of the GPU's memory but for `leave_gib`, until the tensor is deleted."""
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info()[0] - int(leave_gib * 2**30)
    return torch.empty(max(0, room), dtype=torch.uint8, device="cuda")


# ---- A step on given tokens ----


def padded_batch(trainer: Trainer, lengths: list[int]) -> dict[str, torch.Tensor]:
    """A step's batch as TRL pads it, (B, P) and (B, C), with random completions of these lengths behind the run's first
    prompts, eight to a prompt."""
    rows = trainer.run.rows
    prompts = [rows[i // 8 % len(rows)].prompt for i in range(len(lengths))]
    padded = trainer.processing_class(text=prompts, padding=True, padding_side="left", return_tensors="pt")
    generator, shape = torch.Generator().manual_seed(0), (len(lengths), max(lengths))
    batch = {
        "prompt_ids": padded["input_ids"],
        "prompt_mask": padded["attention_mask"],
        "completion_ids": torch.randint(0, trainer.model.config.vocab_size, shape, generator=generator),
        "completion_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long(),
        "advantages": torch.randn(len(lengths), generator=generator),
        "num_items_in_batch": torch.tensor(float(sum(lengths))),
    }
    return {name: value.to(trainer.model.device) for name, value in batch.items()}


def prompts_of(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """Token ids of the prompts of a padded batch, one for each of its rows."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]


def our_learning(trainer: Trainer, batch: dict[str, torch.Tensor], repeats: int = 2) -> dict[str, float]:
    """`weighed` of `Trainer.learn`, the last of `repeats`."""
    for _ in range(repeats):
        torch.cuda.empty_cache()
        with weighed() as found:
            trainer.learn(trainer.model, batch)
        trainer.model.zero_grad(set_to_none=True)
    trainer._metrics["train"].clear()
    return found


def given_step(trainer: Trainer, lengths: list[int]) -> dict[str, float]:
    """Seconds of a step whose completions have these lengths, eight to a prompt: `rollout` with waking, weight sync and
    sleeping, `generate` of it, and `learn` (the second of two times). No stop token ends a completion sooner."""
    engine, batch = trainer.run.engine, padded_batch(trainer, lengths)
    prompts = prompts_of(batch)
    started = time.perf_counter()
    engine.wake()
    engine.sync_weights(trainer.accelerator.unwrap_model(trainer.model))
    with mock.patch.object(engine, "stop_token_ids", []):
        completions, _ = engine.generate(prompts, 1, lengths)
    engine.sleep()
    return {
        "rollout": time.perf_counter() - started,
        "generate": engine.seconds["generate"],
        "learn": our_learning(trainer, batch)["seconds"],
        "tokens": sum(map(len, completions)),
    }
