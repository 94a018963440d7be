# SPDX-License-Identifier: Apache-2.0
"""The state that trainer, engine, evaluation and mismatch check of a run share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.data.files import Row
from grpo.environment.pool import EnvironmentPool
from grpo.plan.memory import Plan
from grpo.preflight.resolve import ResolvedRun
from grpo.process.ending import StopRequest
from grpo.process.ranks import Ranks
from grpo.rollout.engine import Engine
from grpo.rollout.parity import MismatchWatch
from grpo.settings.table import Settings


@dataclass
class RunContext:
    """The resolved run, of which nothing changes any more, and the state that changes during it."""

    resolved: ResolvedRun
    stop: StopRequest
    engine: Engine | None = None  # None: transformers generates.
    parity: list[dict[str, Any]] = field(default_factory=list)  # Figures of each comparison of the mismatch check.
    environments: EnvironmentPool | None = None  # Those of ENVIRONMENT; None without it.
    watch: MismatchWatch | None = None  # Compares the mismatch of each rollout with these.

    @property
    def settings(self) -> Settings:
        return self.resolved.settings

    @property
    def rows(self) -> list[Row]:
        return self.resolved.rows

    @property
    def plan(self) -> Plan:
        assert self.resolved.plan  # A run that passed its checks has a plan.
        return self.resolved.plan

    @property
    def folder(self) -> Path:
        return self.resolved.state.folder

    @property
    def ranks(self) -> Ranks:
        return self.resolved.ranks
