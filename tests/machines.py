# SPDX-License-Identifier: Apache-2.0
"""Machines, package versions and a large model that tests pretend to have, and the problems with them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers import CLEAN

from grpo.common import Problems
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.machine import TESTED, TESTED_VLLM, Machine, check_packages
from grpo.plan.memory import PlanInputs
from grpo.preflight.checks import preflight
from grpo.preflight.resolve import ResolvedRun
from grpo.settings.table import Settings

H100 = Machine("NVIDIA H100 80GB HBM3", 1, 79.6, 79.0, 110.0, 16, "x86_64")
CPU = Machine(ram_free=20.0, cores=2, arch="x86_64")
LARGE_CONFIG = REAL_CONFIG | {"num_hidden_layers": 36, "num_local_experts": 128}  # gpt-oss-120b
GOOD_VERSIONS = {name: oldest for name, (oldest, _) in (TESTED | TESTED_VLLM).items()}


def only(problems: Sequence[str]) -> str:
    """The only problem of a list."""
    assert len(problems) == 1, problems
    return problems[0]


def plan_inputs(machine: Machine, beside_vllm: bool = False) -> PlanInputs:
    """Inputs of the memory plan of gpt-oss-20b on a machine."""
    return PlanInputs(REAL_CONFIG, machine, 940, "torch_flash", "prefix", beside_vllm)


def resolved_run(output_dir: Path, machine: Machine = CPU, **settings: Any) -> ResolvedRun:
    """A run of the tiny model's demo, of 783 training rows and 8 prompts a step, as far as a check takes it."""
    environ = {"MODEL_ID": "tiny", "OUTPUT_DIR": output_dir} | settings
    return preflight(CLEAN | {name: str(value) for name, value in environ.items()}, machine)


def package_problems(versions: Mapping[str, str | None], use_vllm: bool = False, **changes: Any) -> Problems:
    problems = Problems()
    check_packages(Settings(**changes), versions, problems, use_vllm)
    return problems
