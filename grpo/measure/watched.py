# SPDX-License-Identifier: Apache-2.0
"""Runs of the entry point in this process whose trainer, engine and GPU memory are watched."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo.learn.trainer import Trainer
from grpo.measure.record import NOISE, environment
from grpo.plan.machine import read_machine
from grpo.rollout.engine import Engine


@contextlib.contextmanager
def intercept(owner: Any, name: str, watch: Callable[..., Any]) -> Iterator[None]:
    """In the block, a call of `owner.name` (a method or a module's function) becomes a call of `watch`, which gets the
    original first and then the arguments."""
    original = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *arguments, **named: watch(original, *arguments, **named)):
        yield


@contextlib.contextmanager
def kept_trainers() -> Iterator[list[Trainer]]:
    """A list to which every trainer that the block makes is added."""
    trainers: list[Trainer] = []

    def keep(init: Callable[..., None], trainer: Trainer, *arguments: Any, **named: Any) -> None:
        init(trainer, *arguments, **named)
        trainers.append(trainer)

    with intercept(Trainer, "__init__", keep):
        yield trainers


def completions_of(tokens: int) -> contextlib.AbstractContextManager[None]:
    """In the block, vLLM's completions end after `tokens` whatever MAX_COMPLETION_LEN is, unless the caller asks for
    another number."""

    def limited(generate: Any, engine: Engine, prompts: Any, seed: int, max_tokens: Any = None, **named: Any) -> Any:
        return generate(engine, prompts, seed, max_tokens or tokens, **named)

    return intercept(Engine, "generate", limited)


# The checks only warn that noise pays garbage when INVALID_REWARD is set.
COMMON = f"""USE_VLLM=1 PROMPTS_PER_STEP=12 NUM_GENERATIONS=8 TOTAL_STEPS=3 SAVE_STEPS=9 EVAL_SAMPLES=0 OVERWRITE=1
    REWARDS=action,{NOISE} INVALID_REWARD=0"""


def run_entry(options: argparse.Namespace, settings: Mapping[str, object]) -> int:
    """Runs the entry point in OUTPUT_DIR=`options.run` and returns its exit code: three steps of 12 prompts x 8
    completions beside vLLM, or what `settings` says instead."""
    place = {"MODEL_ID": options.model, "DATA": options.data, "OUTPUT_DIR": Path(options.run).absolute()}
    os.environ.update({name: str(value) for name, value in {**environment(COMMON), **place, **settings}.items()})
    return options.main([])


# ---- Time and memory ----


@contextlib.contextmanager
def weighed() -> Iterator[dict[str, float]]:
    """Fills in `seconds`, until the GPU has finished the block's work, and `peak_gib`, the most memory that torch
    allocated beyond what was allocated before."""
    cost: dict[str, float] = {}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    started = time.perf_counter()
    yield cost
    torch.cuda.synchronize()
    cost["seconds"] = time.perf_counter() - started
    cost["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30


class PeakMemory(threading.Thread):
    """Samples the GPU memory that the driver counts as used, in GiB, without that of other processes; `peak` is the
    most.

    It is made before this process touches the GPU: `before` is what is free then, so that the process's own CUDA
    context counts. Sampling itself makes that context.
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


def free_gib() -> float:
    """GiB of the GPU that are free once torch has given back what it does not use."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**30


def occupy(leave_gib: float) -> torch.Tensor:
    """Takes all of the GPU's memory but for `leave_gib`, until the returned tensor is deleted."""
    size = int((free_gib() - leave_gib) * 2**30)
    return torch.empty(max(0, size), dtype=torch.uint8, device="cuda")
