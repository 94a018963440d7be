# SPDX-License-Identifier: Apache-2.0
"""What the trainer shares with the engine, the evaluation and the mismatch check during a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.data.files import Row
from grpo.preflight.memory import Plan
from grpo.rollout.engine import Engine
from grpo.run.signals import StopRequest
from grpo.settings import Settings


@dataclass
class RunContext:
    """The run's settings, rows and choices, and what of it changes while it goes on."""

    settings: Settings
    rows: list[Row]
    plan: Plan
    folder: Path
    attention: str  # of the learner, as ATTN_IMPL names it
    packing: str  # `prefix` or `none`
    stop: StopRequest
    engine: Engine | None = None  # None: transformers generates
    stream: str = "train"  # or `evaluation`, or `base`: an evaluation without the adapter
    parity: list[dict[str, Any]] = field(default_factory=list)  # what the mismatch check measured
