# SPDX-License-Identifier: Apache-2.0
"""Measurements that run the entry point: their settings, watched functions, completions of full length."""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from grpo.rollout.engine import Engine
from grpo.settings.parsing import parse_value
from scripts.dev.record import NOISE, split_settings

Function = Callable[..., Any]  # a function of the project that a measurement watches, with its own arguments
# The settings of all runs. Without INVALID_REWARD the checks would refuse NOISE, which pays for garbage.
COMMON = f"""USE_VLLM=1 PROMPTS_PER_STEP=12 NUM_GENERATIONS=8 TOTAL_STEPS=3 SAVE_STEPS=9 EVAL_SAMPLES=0 OVERWRITE=1
    REWARDS=action,{NOISE} INVALID_REWARD=0"""
# With DIRECT_ANSWERS these replace COMMON's: nothing is generated, and the reward of every action is looked up.
DIRECT = split_settings("USE_VLLM=auto REWARDS=action")


@contextlib.contextmanager
def intercept(owner: type | ModuleType, name: str, watch: Function) -> Iterator[None]:
    """In the block, a call of `owner.name` (a method or a module's function) becomes `watch(original, *arguments)`."""
    original = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *arguments, **named: watch(original, *arguments, **named)):
        yield


def run_settings(options: argparse.Namespace, settings: Mapping[str, str | int]) -> dict[str, str]:
    """The settings of a run in OUTPUT_DIR=`options.run`: those of COMMON unless `settings` say otherwise."""
    paths = {"MODEL_ID": options.model, "DATA": options.data, "OUTPUT_DIR": Path(options.run).absolute()}
    common = split_settings(COMMON)
    if parse_value("DIRECT_ANSWERS", str(settings.get("DIRECT_ANSWERS", 0))):
        common |= DIRECT
    return {name: str(value) for name, value in {**common, **paths, **settings}.items()}


def let_none_end(engine: Engine) -> None:
    """No completion of the engine ends before its limit: neither by the run's stop tokens nor by the one of the
    checkpoint's config, which vLLM takes besides."""
    engine.stop_token_ids = []
    engine.sampling = functools.partial(engine.sampling, ignore_eos=True)
