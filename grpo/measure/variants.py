# SPDX-License-Identifier: Apache-2.0
"""Runs of a measurement: watched in this process, or as variants, each measured in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from peft import PeftModel

from grpo.learn.trainer import Trainer
from grpo.measure.record import BENCH, NOISE, Figure, Json, commit, environment, read_json, write
from grpo.plan.machine import GIB
from grpo.run.child import run_child
from grpo.settings import parse_value

Function = Callable[..., Any]  # a function of the project that is watched, with its own arguments
# The settings of all runs. INVALID_REWARD is set because the checks then only warn that noise pays for garbage.
COMMON = f"""USE_VLLM=1 PROMPTS_PER_STEP=12 NUM_GENERATIONS=8 TOTAL_STEPS=3 SAVE_STEPS=9 EVAL_SAMPLES=0 OVERWRITE=1
    REWARDS=action,{NOISE} INVALID_REWARD=0"""


# What goes with DIRECT_ANSWERS: nothing is generated, and the reward of every action is looked up.
DIRECT = environment("USE_VLLM=auto REWARDS=action")


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
    common = environment(COMMON)
    if parse_value("DIRECT_ANSWERS", str(settings.get("DIRECT_ANSWERS", 0))):
        common |= DIRECT
    return {name: str(value) for name, value in {**common, **paths, **settings}.items()}


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


@dataclass(frozen=True)
class Variant:
    """Settings of a run under a name, and the GiB of the GPU that are left to it (None: all that are free)."""

    name: str
    settings: Mapping[str, str]
    free_gib: float | None = None

    def describe(self) -> str:
        """The variant in words, for the figures' notes."""
        words = [f"{name}={value}" for name, value in self.settings.items()]
        if self.free_gib:
            words.append(f"all but {self.free_gib:g} GiB of the GPU occupied")
        return ", ".join(words)


def result_path(options: argparse.Namespace, child: str) -> Path:
    """The JSON that a child process writes, beside the run's folder."""
    return Path(options.run).absolute().with_name(f"{options.command}-{child}.json")


def subject_of(options: argparse.Namespace, child: str) -> list[str]:
    """What a child measures: commit, options and variant. Results of another subject are not used."""
    variants = [variant for variant in getattr(options, "variants", ()) if variant.name == child]
    names = ("model", "data", "set", "tokens", "kernels", "trl", "steps", "trl_parts")
    return [commit(), *(str(getattr(options, name, "")) for name in names), str(variants)]


def write_result(options: argparse.Namespace, child: str, values: Json, done: bool = False) -> None:
    """Writes what a child has measured so far, so that nothing is lost if the rest fails; `done`: that is all."""
    record = {"subject": subject_of(options, child), "done": done, **values}
    path = result_path(options, child)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")


def read_result(options: argparse.Namespace, child: str, only_done: bool = False) -> Json:
    """What a child has measured of this subject; empty if it has not, or with `only_done` if it did not finish."""
    record = read_json(result_path(options, child))
    is_ours = record.get("subject") == subject_of(options, child) and (record.get("done") or not only_done)
    return record if is_ours else {}


def measure_child(options: argparse.Namespace, child: str) -> int:
    """Runs this same command with `--child` in a new process. Returns its exit code, or 1 if it wrote no result."""
    path = result_path(options, child)
    path.unlink(missing_ok=True)
    code = run_child([sys.executable, str(BENCH), *sys.argv[1:], "--child", child])
    if code or not path.exists():
        print(f"{child} ended with exit code {code}; {path} holds what it had measured, if any", file=sys.stderr)
    return code or int(not path.exists())


def run_variants(options: argparse.Namespace, figures_of: Callable[[Variant, Json, str], list[Figure]]) -> int:
    """Runs the variants one after the other and writes the JSON after each. `figures_of` gets a variant, what its child
    measured, and what stands before the names of its figures. Returns 1 if a child failed."""
    failed, figures = False, []
    for variant in options.variants:
        if not (options.resume and read_result(options, variant.name, only_done=True)):
            ballast = occupy(variant.free_gib) if variant.free_gib else None
            failed |= measure_child(options, variant.name) != 0
            del ballast
            torch.cuda.empty_cache()
        if values := read_result(options, variant.name):
            prefix = f"{variant.name.replace('-', '_')}_" if options.variant else ""
            figures += figures_of(variant, values, prefix)
            write(Path(options.out), figures)
    return int(failed)
