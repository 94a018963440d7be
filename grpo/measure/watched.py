# SPDX-License-Identifier: Apache-2.0
"""Runs of the entry point in this process, and how their functions, times and memory are watched."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from peft import PeftModel

from grpo.learn.trainer import Trainer
from grpo.measure.record import NOISE, environment
from grpo.plan.machine import GIB

Function = Callable[..., Any]  # a function of the project that is watched, with its own arguments
# The settings of all runs. INVALID_REWARD is set because the checks then only warn that noise pays for garbage.
COMMON = f"""USE_VLLM=1 PROMPTS_PER_STEP=12 NUM_GENERATIONS=8 TOTAL_STEPS=3 SAVE_STEPS=9 EVAL_SAMPLES=0 OVERWRITE=1
    REWARDS=action,{NOISE} INVALID_REWARD=0"""


@contextlib.contextmanager
def intercept(owner: type | ModuleType, name: str, watch: Function) -> Iterator[None]:
    """In the block, a call of `owner.name` (a method or a module's function) becomes a call of `watch`, which gets the
    original first and then the arguments."""
    original = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *arguments, **named: watch(original, *arguments, **named)):
        yield


def run_settings(options: argparse.Namespace, settings: Mapping[str, str | int]) -> dict[str, str]:
    """The settings of a run in OUTPUT_DIR=`options.run`: three steps of 12 prompts x 8 completions beside vLLM, unless
    `settings` say otherwise."""
    paths = {"MODEL_ID": options.model, "DATA": options.data, "OUTPUT_DIR": Path(options.run).absolute()}
    return {name: str(value) for name, value in {**environment(COMMON), **paths, **settings}.items()}


def policy_of(trainer: Trainer) -> PeftModel:
    """The trainer's model with its adapter, without accelerate's wrapper."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if not isinstance(policy, PeftModel):
        raise TypeError(f"the trainer's model is a {type(policy).__name__}, not a PeftModel")
    return policy


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
    cost["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / GIB


def free_gib() -> float:
    """GiB of the GPU that are free once torch has given back what it does not use."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / GIB


def occupy(leave_gib: float) -> torch.Tensor:
    """Takes all of the GPU's memory but for `leave_gib`, until the returned tensor is deleted."""
    size = int((free_gib() - leave_gib) * GIB)
    return torch.empty(max(0, size), dtype=torch.uint8, device="cuda")
