# SPDX-License-Identifier: Apache-2.0
"""closed_loop.json: what each policy did in each window, and the totals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import rewards
from grpo.phases import ROWS_S, Phase
from grpo.settings import ROOT, Settings
from grpo.tasks.simulator import GREEDY, Record, SimulationPlan
from grpo.tasks.tes import closed_loop as loop
from grpo.tasks.tes import profiles as tes_profiles
from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, START_KWH, Plant
from grpo.tasks.tes.profiles import Window
from grpo.tasks.tes.prompts import State, render_full, state_at

MODELS = ("base", "trained")
ASKED = (*MODELS, *(name + GREEDY for name in MODELS))
LEAST_WINDOWS = 3  # fewer give no interval
UNSERVED_KWH = 0.05  # A window in which more load than this stays unserved is counted.


@dataclass(frozen=True)
class Case:
    """A window with its name and the CO2 intensity of all its hours, shape (72,), NaN where the file has no such
    hour."""

    name: str
    window: Window
    co2: np.ndarray


def read_cases(path: Path, co2_column: str | None = None, load_column: str | None = None) -> list[Case]:
    """The windows of a profile CSV. Raises ProfileError with every problem of the file."""
    profile = tes_profiles.read_profile(path, co2_column, load_column)
    cases = []
    for window in tes_profiles.windows(profile):
        first = profile.dates.index(window.dates[0])
        co2 = profile.co2[first : first + DECISION_DAYS].ravel()
        cases.append(Case(f"{path.stem}: {window.dates[0]}", window, co2))
    return cases


def hourly(values: np.ndarray, hours: int, night: float | None) -> list[float | None]:
    """Decision hours, shape (T,), as a list of all `hours` from midnight of the first day, with `night` in the
    others."""
    decided = iter(values.tolist())
    return [tidy(next(decided)) if hour % 24 in HOURS else night for hour in range(hours)]


def tidy(value: float | None) -> float | None:
    """A number for JSON: six decimals, None for NaN, which JSON does not know."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6) + 0.0
    return value


@dataclass(frozen=True)
class ClosedLoopPlan(SimulationPlan):
    """The windows that a model controls, and how it is asked: `prompt` is `full` or `compact`."""

    prompt: str = ""
    profiles: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    render: Callable[[State], str] = render_full
    start_kwh: float = START_KWH
    hours: int = 24 * DECISION_DAYS  # of each window
    vote: bool = False  # the majority of the answers decides, instead of each answer in a pass of its own

    @property
    def windows(self) -> list[Window]:
        return [case.window for case in self.cases]

    @property
    def decisions(self) -> int:
        return sum(hour % 24 in HOURS for hour in range(self.hours))

    def opening_prompts(self) -> list[str]:
        return [self.render(state_at(window, Plant(), 0, self.start_kwh)) for window in self.windows]


def new_record(plan: ClosedLoopPlan, settings: Settings, samples: int, exact: bool = False) -> Record:
    """closed_loop.json with the rules and the optimum, before a model was asked. `exact`: by the probabilities of its
    answers."""
    plant, windows, hours = Plant(), plan.windows, plan.hours
    names = ("MODEL_ID", "EVAL_TEMPERATURE", "TOP_P", "MAX_COMPLETION_LEN", "SEED", "REASONING_EFFORT", "PROMPT_DATE")
    record: Record = {
        "profiles": list(plan.profiles),
        "start_kwh": plan.start_kwh,
        "samples": samples,
        "vote": plan.vote,
        "exact": exact,
        "safe_action": loop.safe_action(plant),
        "safe_action_reason": loop.SAFE_REASON,
        # With others, figures are not the same measurement.
        "sampling": {name.lower(): getattr(settings, name) for name in names} | {"prompt": plan.prompt},
        "windows": [
            {
                "name": case.name,
                "start": f"{case.window.dates[0]} 00:00",
                "hours": hours,
                "load_kw": hourly(case.window.load_kw.ravel(), hours, 0.0),
                "co2_kg_per_kwh": [tidy(value) for value in case.co2[:hours].tolist()],
                "policies": {},
            }
            for case in plan.cases
        ],
        "totals": {},
    }
    optimum = loop.optimum(windows, plant, plan.start_kwh, plan.decisions)
    for name, policy in {"optimum": optimum, **loop.RULES}.items():
        trace = loop.closed_loop(windows, plant, policy, plan.start_kwh, plan.decisions)
        add_policy(record, name, windows, trace, np.zeros(len(windows), int))
    return record


def add_policy(
    record: Record,
    name: str,
    windows: Sequence[Window],
    trace: loop.Trace,
    unparsed: np.ndarray,
    answers: int = 0,
    sums: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Put a policy into the record and compute the totals again.

    `trace` holds all windows as often as each was run, pass by pass: the hours that are kept are the first pass's,
    `mean` and the totals are means over the passes, or `sums` (W,) where there are some. `unparsed` counts answers that
    could not be read by row of the trace; `answers` are all of them.
    """
    count = len(windows)
    sums = sums or loop.outcome(trace, list(windows) * (len(trace.actions) // count))
    for i, entry in enumerate(record["windows"]):
        rows, hours = slice(i, None, count), entry["hours"]
        storage = [trace.start_kwh]  # a night keeps it
        for value in hourly(trace.storage_kwh[i], hours, None):
            storage.append(storage[-1] if value is None else value)
        entry["policies"][name] = {
            "actions": hourly(trace.actions[i], hours, None),
            "output_kw": hourly(trace.output_kw[i], hours, 0.0),
            "storage_kwh": storage[1:],
            "co2_kg": hourly(trace.co2_kg[i], hours, 0.0),
            "unserved_kwh": hourly(trace.unserved_kwh[i], hours, 0.0),
            "unparsed": tidy(unparsed[rows].sum().item()),
            "answers": answers // count,
            "mean": {key: tidy(float(values[rows].mean())) for key, values in sums.items()},
        }
    add_totals(record)


def add_totals(record: Record) -> None:
    """Totals over the windows, regret with its interval, the windows with unserved load, and the difference of the two
    models, from `mean` alone."""
    windows = [entry["policies"] for entry in record["windows"]]
    priced = {name: [policies[name]["mean"]["priced_kg"] for policies in windows] for name in windows[0]}
    best = priced["optimum"]
    scale = math.fsum(best)

    def regret(mine: str, other: str) -> dict[str, float | None]:
        above = [100 * (a - b) for a, b in zip(priced[mine], priced[other], strict=True)]
        low = high = None
        if len(best) >= LEAST_WINDOWS and scale > 0:
            low, high = rewards.confidence_interval(above, best)
        percent = math.fsum(above) / scale if scale > 0 else None
        figures = {"regret_percent": percent, "regret_percent_low": low, "regret_percent_high": high}
        return {name: tidy(value) for name, value in figures.items()}

    def losses(name: str) -> dict[str, float | str | None]:
        unserved = {entry["name"]: entry["policies"][name]["mean"]["unserved_kwh"] for entry in record["windows"]}
        worst, most = max(unserved.items(), key=lambda item: item[1])
        count = sum(kwh > UNSERVED_KWH for kwh in unserved.values())
        return {"unserved_windows": count, "worst_window": worst if count else None, "worst_unserved_kwh": most}

    record["totals"] = {}
    for name in [name for name in (*ASKED, "optimum", *loop.RULES) if name in priced]:
        entries = [policies[name] for policies in windows]
        sums = {key: tidy(math.fsum(entry["mean"][key] for entry in entries)) for key in entries[0]["mean"]}
        counts = {key: tidy(sum(entry[key] for entry in entries)) for key in ("unparsed", "answers")}
        record["totals"][name] = sums | losses(name) | regret(name, "optimum") | counts
    record.pop("difference", None)
    if priced.keys() >= set(MODELS):
        record["difference"] = regret("trained", "base")


def keep_models(record: Record, path: Path, names: Sequence[str] = MODELS) -> bool:
    """Take over what `path` holds of the models `names`, sampled and greedy, if it is of the same windows, samples and
    settings; returns whether it is. A file that is not there, or cannot be read, is of no measurement."""

    def how(measured: Record) -> list[object]:
        settings = [measured.get(key) for key in ("start_kwh", "samples", "vote", "exact", "safe_action", "sampling")]
        inputs = ("name", "hours", "load_kw", "co2_kg_per_kwh")
        return settings + [window[key] for window in measured["windows"] for key in inputs]

    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if how(record) != how(earlier):
            return False
        for entry, old in zip(record["windows"], earlier["windows"], strict=True):
            kept = [name for model in names for name in (model, model + GREEDY) if name in old["policies"]]
            entry["policies"] |= {name: old["policies"][name] for name in kept}
        add_totals(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def run_model(plan: ClosedLoopPlan, record: Record, name: str, ask: loop.Ask) -> None:
    """Let a model run through the windows and put it into the record as `name`, one of ASKED. With `vote`, `samples`
    answers decide each hour; without, every window is run `samples` times, all of them side by side; a greedy one
    once."""
    votes, passes = (record["samples"], 1) if plan.vote else (1, record["samples"])
    if name.endswith(GREEDY):
        votes = passes = 1
    unparsed = np.zeros(len(plan.windows) * passes, int)
    policy = loop.model_policy(ask, plan.render, votes, unparsed)
    with Phase("greedy" if name.endswith(GREEDY) else "", first_s=ROWS_S):
        trace = loop.closed_loop(plan.windows * passes, Plant(), policy, plan.start_kwh, plan.decisions)
    add_policy(record, name, plan.windows, trace, unparsed, votes * trace.actions.size)


def run_exact(
    plan: ClosedLoopPlan, record: Record, name: str, probabilities: Callable[[Sequence[str], bool], np.ndarray]
) -> None:
    """As `run_model`, but all that can happen, by the probabilities of the answers: `probabilities(prompts, greedy)`
    are (N, K). Puts the model as `name` and as its greedy policy into the record; the hours of both are the greedy
    path's."""
    windows, samples, unread = plan.windows, record["samples"], np.zeros(len(plan.windows), int)

    def likeliest(states: Sequence[State]) -> list[int | None]:
        p = probabilities([plan.render(state) for state in states], True)
        is_read = np.any(p > 0, axis=1)
        unread[:] += ~is_read
        pairs = zip(p.argmax(axis=1).tolist(), list(is_read), strict=True)
        return [action if known else None for action, known in pairs]

    def chances(states: Sequence[State]) -> np.ndarray:
        return probabilities([plan.render(state) for state in states], False)

    with Phase("greedy", first_s=ROWS_S):
        trace = loop.closed_loop(windows, Plant(), likeliest, plan.start_kwh, plan.decisions)
    expected = loop.expected_loop(windows, Plant(), chances, plan.start_kwh, plan.decisions)
    sums = loop.expected_outcome(expected, windows, plan.start_kwh, plan.decisions)
    add_policy(record, name, windows, trace, expected.unparsed * samples, trace.actions.size * samples, sums)
    for entry, dropped in zip(record["windows"], expected.dropped.tolist(), strict=True):
        entry["policies"][name]["dropped"] = tidy(dropped)
    add_policy(record, name + GREEDY, windows, trace, unread, trace.actions.size)


def shown_path(path: Path) -> str:
    """A path for the record: relative to the project or the current folder where it lies inside."""
    for base in (ROOT, Path.cwd()):
        if path.resolve().is_relative_to(base):
            return path.resolve().relative_to(base).as_posix()
    return path.name
