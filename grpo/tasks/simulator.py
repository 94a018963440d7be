# SPDX-License-Identifier: Apache-2.0
"""The interface between the simulator of a task and the rest of the project.

A task is a folder grpo/tasks/NAME, chosen by TASK=NAME. Its task.json holds (docs/tasks.md):
- `defaults`: values of settings, which replace the defaults of grpo/settings/table.py;
- `heldout`: training files that come with the project, and for each the EVAL_DATA that belongs to it;
- `profiles`: held-out files that come with the project, and for each the EVAL_PROFILE that belongs to it;
- `best_by` and `figures`: columns of metrics.csv that its simulator measures. With BEST_BY=`best_by` the adapter with
  the lowest value of the first column is the best.

A task's simulator is the object SIMULATOR in the simulator.py of its folder.
"""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grpo.common import Problems
from grpo.data.files import Row
from grpo.figures.verdict import Comparison
from grpo.settings.table import Settings

if TYPE_CHECKING:  # a check that names missing packages must run without numpy
    import numpy as np

GREEDY = "_greedy"  # suffix of a model's name in `totals`, for one pass with its likeliest answers
START = "start"  # the name there of the adapter that a run starts from
AS_START = {"trained" + suffix: START + suffix for suffix in ("", GREEDY)}
BEFORE_TRAINING = ("base", "base" + GREEDY, START, START + GREEDY)
# closed_loop.json: `totals` holds the figures of each policy, among them `base` and `trained`.
Record = dict[str, Any]


class Responder(Protocol):
    """A model, with its adapter or without, that answers the prompts of a simulator."""

    def texts(self, prompts: Sequence[str], moment: int, greedy: bool) -> Sequence[str]:
        """A completion of each prompt, special tokens included. `moment` counts the calls of a simulation: it seeds the
        sampling, in the same way for every model."""

    def probabilities(self, prompts: Sequence[str], greedy: bool, actions: int) -> np.ndarray:
        """(N, K): the probability of answering each of K actions to each of N prompts, for an exact evaluation."""


@dataclass(frozen=True)
class SimulationPlan:
    """Whether a simulator runs beside the held-out rows of a run; each simulator's subclass adds its own inputs."""

    reason: str = "the task has no simulator"
    runs: bool = False
    is_mentioned: bool = False  # rows or settings refer to the simulator, so the log says why it does not run
    why_sampled: str = ""  # why its evaluations must sample; empty if they may weigh all actions by probability
    episodes: tuple[str, ...] = ()  # names of the episodes, which are simulated in parallel
    dates: tuple[str, ...] = field(default=(), kw_only=True)  # ISO dates on which the model acts, if it does on any

    def opening_prompts(self) -> list[str]:
        """The prompts of the first moment, for memory plans: later prompts are hardly longer."""
        return []


@dataclass(frozen=True)
class ReportSection:
    """The part of a run's report that is made from closed_loop.json."""

    verdict: str = ""  # sentences; empty unless both models were measured
    title: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    note: str = ""  # below the table


class Simulator(ABC):
    """Lets a model act, answer by answer, and measures the outcome."""

    @abstractmethod
    def plan(
        self,
        settings: Settings,
        rows: Sequence[Row],
        template: str | None,
        use_vllm: bool,
        is_chosen: bool,
        problems: Problems,
    ) -> SimulationPlan:
        """Decide whether the simulator runs beside these held-out `rows`; if so, read the files of EVAL_PROFILE and add
        their faults to `problems`. `template` is the model's chat template; `is_chosen` is true if the user set
        EVAL_PROFILE. This is called before any heavy import."""

    @abstractmethod
    def new_record(self, plan: Any, settings: Settings, samples: int, exact: bool) -> Record:
        """The record before any model has acted: the conditions of the measurement, and the reference policies."""

    def keep_base(self, record: Record, earlier: Record) -> None:
        """Copy the totals of the base model and of the start adapter from an `earlier` record of the same measurement:
        one equal but for `totals`."""
        if all(earlier.get(key) == value for key, value in record.items() if key != "totals"):
            kept = set(BEFORE_TRAINING) & earlier["totals"].keys()
            record["totals"] |= {name: earlier["totals"][name] for name in kept}

    def as_start(self, record: Record) -> Record:
        """A copy of a record in which the trained model is called START: it has not learned yet."""
        return record | {"totals": {AS_START.get(name, name): total for name, total in record["totals"].items()}}

    @abstractmethod
    def run(self, plan: Any, record: Record, name: str, responder: Responder, greedy: bool = True) -> None:
        """Let a model act and put its figures into the record as `name`; with `greedy` also its likeliest answers, as
        `name` + GREEDY."""

    @abstractmethod
    def figures(self, record: Record, name: str) -> dict[str, float]:
        """The columns of metrics.csv, as task.json names them, that have a value for the model `name`."""

    def summary(self, record: Record, name: str) -> str:
        """The figures of the model `name` for a line of the log."""
        figures = self.figures(record, name).items()
        return ", ".join(f"{column.replace('_', ' ')} {value:,.1f}" for column, value in figures)

    @abstractmethod
    def table(self, record: Record) -> str:
        """The record as a table for the terminal."""

    def comparisons(self, record: Record) -> list[Comparison]:
        """The trained model in `record` against the base model and fixed rules; empty if nobody compared them."""
        return []

    def report(self, record: Record) -> ReportSection:
        """The section for report.html and for the adapter's card; `record` may be empty."""
        return ReportSection()

    def plan_by_hand(
        self, profiles: Sequence[str], settings: Settings, template: str | None, problems: Problems
    ) -> SimulationPlan:
        """`plan` for scripts/evaluate.py, where the user asks for a simulation. `profiles` are the files of --profile;
        if there are none, those of EVAL_PROFILE are used. The plan's `reason` describes them."""
        profile = ",".join(profiles) or settings.EVAL_PROFILE
        return self.plan(dataclasses.replace(settings, EVAL_PROFILE=profile), [], template, False, True, problems)


def load_simulator(task: str) -> Simulator | None:
    """The simulator of the task with this name; None if the task has no simulator."""
    if not (Path(__file__).parent / task / "simulator.py").is_file():
        return None
    simulator: Simulator = importlib.import_module(f"grpo.tasks.{task}.simulator").SIMULATOR
    return simulator
