# SPDX-License-Identifier: Apache-2.0
"""The state that trainer, engine, evaluation and mismatch check of a run share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.data.files import Row
from grpo.plan.memory import Plan
from grpo.process.ending import StopRequest
from grpo.process.ranks import Ranks
from grpo.rollout.engine import Engine
from grpo.rollout.parity import MismatchWatch
from grpo.settings.table import Settings


@dataclass
class RunContext:
    """The settings, rows and choices of a run, and the state that changes during it."""

    settings: Settings
    rows: list[Row]
    plan: Plan
    folder: Path
    attention: str  # The learner's attention, as ATTN_IMPL names it.
    packing: str  # `prefix` or `none`.
    stop: StopRequest
    ranks: Ranks = field(default_factory=Ranks)
    action_functions: tuple[int, ...] = ()  # Indices of the functions that EXPECTED_REWARD looks up; empty: off.
    engine: Engine | None = None  # None: transformers generates.
    parity: list[dict[str, Any]] = field(default_factory=list)  # Figures of each comparison of the mismatch check.
    watch: MismatchWatch | None = None  # Compares the mismatch of each rollout with these.
