# SPDX-License-Identifier: Apache-2.0
"""Measurements that run the entry point: settings, watched functions, GPU memory, results of child processes."""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from grpo.measure.record import NOISE, Json, commit, read_json, split_settings
from grpo.plan.machine import GIB
from grpo.settings import parse_value

Function = Callable[..., Any]  # a function of the project that a measurement watches, with its own arguments
# The settings of all runs. Without INVALID_REWARD the checks would refuse NOISE, which pays for garbage.
COMMON = f"""USE_VLLM=1 PROMPTS_PER_STEP=12 NUM_GENERATIONS=8 TOTAL_STEPS=3 SAVE_STEPS=9 EVAL_SAMPLES=0 OVERWRITE=1
    REWARDS=action,{NOISE} INVALID_REWARD=0"""
# With DIRECT_ANSWERS these replace COMMON's: nothing is generated, and the reward of every action is looked up.
DIRECT = split_settings("USE_VLLM=auto REWARDS=action")


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
    common = split_settings(COMMON)
    if parse_value("DIRECT_ANSWERS", str(settings.get("DIRECT_ANSWERS", 0))):
        common |= DIRECT
    return {name: str(value) for name, value in {**common, **paths, **settings}.items()}


def free_gib() -> float:
    """GiB of the GPU that are free once torch has given back what it does not use."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / GIB


def occupy(leave_gib: float) -> torch.Tensor:
    """Takes all of the GPU's memory but for `leave_gib`, until the returned tensor is deleted."""
    size = int((free_gib() - leave_gib) * GIB)
    return torch.empty(max(0, size), dtype=torch.uint8, device="cuda")


def result_path(options: argparse.Namespace, child: str) -> Path:
    """The JSON that a child process writes, beside the run's folder."""
    return Path(options.run).absolute().with_name(f"{options.command}-{child}.json")


def subject_of(options: argparse.Namespace) -> list[str]:
    """What is measured: commit, model, data and settings. Results of another subject are not used."""
    return [commit(), options.model, options.data, str(options.set)]


def write_result(options: argparse.Namespace, child: str, values: Json) -> None:
    """Writes what a child has measured to its `result_path`."""
    record = {"subject": subject_of(options), **values}
    result_path(options, child).write_text(json.dumps(record), encoding="utf-8")


def read_result(options: argparse.Namespace, child: str) -> Json:
    """What a child has measured of this subject; empty if it has not measured it."""
    record = read_json(result_path(options, child))
    return record if record.get("subject") == subject_of(options) else {}
