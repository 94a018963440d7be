# SPDX-License-Identifier: Apache-2.0
"""A task's own simulator, and what the rest of the project asks of it.

A task is a folder grpo/tasks/NAME, chosen by TASK=NAME. Its task.json holds (docs/tasks.md):
- `defaults`: values of settings, which come before those of grpo/settings.py;
- `profiles`: held-out files that come with the project, and the EVAL_PROFILE that belongs to each;
- `best_by` and `figures`: columns of metrics.csv that its simulator measures. The first one, which is better the lower
  it is, chooses the best adapter where BEST_BY is this name. A simulator is an object named SIMULATOR in the folder's
  simulator.py.
"""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grpo.data.files import Row
from grpo.settings import Problems, Settings

if TYPE_CHECKING:  # the checks before a run name numpy where it is missing
    import numpy as np

GREEDY = "_greedy"  # behind a model's name: its likeliest answers, one pass
# closed_loop.json: `totals` holds the figures of each policy, of `base` and `trained` among them.
Record = dict[str, Any]


class Responder(Protocol):
    """A model, with its adapter or without, that answers the prompts of a simulator."""

    def texts(self, prompts: Sequence[str], moment: int, greedy: bool) -> Sequence[str]:
        """A completion of each prompt, special tokens included. `moment` counts the simulator's questions: each has
        random numbers of its own, the same ones for every model."""

    def probabilities(self, prompts: Sequence[str], greedy: bool, actions: int) -> np.ndarray:
        """(N, K): how likely each of K actions is answered to each of N prompts. Only an exact evaluation asks this."""


@dataclass(frozen=True)
class SimulationPlan:
    """Whether a simulator runs beside the held-out rows of a run, and on what; a simulator adds its own inputs."""

    reason: str = "the task has no simulator"
    runs: bool = False
    is_mentioned: bool = False  # rows or settings are about the simulator; other runs say nothing of it
    why_sampled: str = ""  # why its evaluations sample; empty where they may go through all actions by probability
    rollouts: int = 0  # that one pass needs, one after the other
    episodes: tuple[str, ...] = ()  # names of what is simulated side by side

    def opening_prompts(self) -> list[str]:
        """The prompts of the first moment. Later ones are hardly longer."""
        return []


@dataclass(frozen=True)
class ReportSection:
    """What a run's report shows of closed_loop.json."""

    verdict: str = ""  # sentences; empty without figures of both models
    title: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    note: str = ""  # below the table


class Simulator(ABC):
    """Lets a model act, answer by answer, and measures what comes of it."""

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
        """Decide whether it runs beside these held-out `rows`, and read the files of EVAL_PROFILE if so; what is wrong
        with them is added to `problems`. `template` is the model's chat template, `is_chosen` says that the user set
        EVAL_PROFILE. It runs before anything heavy is imported."""

    @abstractmethod
    def new_record(self, plan: Any, settings: Settings, samples: int, exact: bool) -> Record:
        """closed_loop.json before a model was asked: how it will be, and what other policies achieve."""

    def keep_base(self, record: Record, earlier: Record) -> None:
        """Take over what an earlier closed_loop.json holds of the base model, if it is the same measurement: all but
        `totals` is equal."""
        if all(earlier.get(key) == value for key, value in record.items() if key != "totals"):
            kept = {"base", "base" + GREEDY} & earlier["totals"].keys()
            record["totals"] |= {name: earlier["totals"][name] for name in kept}

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

    def warning(self, base: Mapping[str, float], now: Mapping[str, float], record: Record) -> str | None:
        """A sentence where the trained model acts worse than the base model while its held-out reward rises. `base` and
        `now` are columns of metrics.csv, `now` with `step`."""
        return None

    @abstractmethod
    def table(self, record: Record) -> str:
        """The record for the terminal."""

    def report(self, record: Record) -> ReportSection:
        """The record for report.html and for the adapter's card; `record` may be empty."""
        return ReportSection()

    def plan_by_hand(
        self, profiles: Sequence[str], settings: Settings, template: str | None, problems: Problems
    ) -> SimulationPlan:
        """`plan` for scripts/evaluate.py, where the user asks for a simulation, with the files `profiles` of --profile
        (without any: those of EVAL_PROFILE). The plan's `reason` says how it was made."""
        profile = ",".join(profiles) or settings.EVAL_PROFILE
        return self.plan(dataclasses.replace(settings, EVAL_PROFILE=profile), [], template, False, True, problems)


def load_simulator(task: str) -> Simulator | None:
    """The simulator of the task with this name; None where it has none."""
    if not (Path(__file__).parent / task / "simulator.py").is_file():
        return None
    simulator: Simulator = importlib.import_module(f"grpo.tasks.{task}.simulator").SIMULATOR
    return simulator
