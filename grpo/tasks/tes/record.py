# SPDX-License-Identifier: Apache-2.0
"""closed_loop.json: what each policy did in each window, and the totals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import rewards
from grpo.phases import ROWS_S, Phase
from grpo.settings import Settings
from grpo.tasks.simulator import GREEDY, Record, SimulationPlan
from grpo.tasks.tes import closed_loop as loop
from grpo.tasks.tes import profiles as tes_profiles
from grpo.tasks.tes.plant import DECISION_DAYS, START_KWH
from grpo.tasks.tes.profiles import Window
from grpo.tasks.tes.prompts import State, render_full, state_at

MODELS = ("base", "trained")
ASKED = (*MODELS, *(name + GREEDY for name in MODELS))
LEAST_WINDOWS = 3  # fewer give no interval
UNSERVED_KWH = 0.05  # A window in which more load than this stays unserved is counted.


def read_windows(path: Path) -> list[tuple[str, Window]]:
    """The windows of a profile CSV with their names. Raises InputError with every problem of the file."""
    windows = tes_profiles.windows(tes_profiles.read_profile(path))
    return [(f"{path.stem}: {window.dates[0]}", window) for window in windows]


def tidy(value: float | None) -> float | None:
    """A number for JSON: six decimals."""
    return round(value, 6) + 0.0 if isinstance(value, float) else value


@dataclass(frozen=True)
class ClosedLoopPlan(SimulationPlan):
    """The windows that a model controls, and how it is asked: `prompt` is `full` or `compact`."""

    prompt: str = ""
    profiles: tuple[str, ...] = ()
    windows: tuple[Window, ...] = ()  # those of `episodes`
    render: Callable[[State], str] = render_full

    def opening_prompts(self) -> list[str]:
        return [self.render(state_at(window, loop.PLANT, 0, START_KWH)) for window in self.windows]


def new_record(plan: ClosedLoopPlan, settings: Settings, samples: int, exact: bool = False) -> Record:
    """closed_loop.json with the rules and the optimum, before a model was asked. `exact`: by the probabilities of its
    answers. Hours are decision hours, 08:00 to 17:00 of three days."""
    names = ("MODEL_ID", "EVAL_TEMPERATURE", "TOP_P", "MAX_COMPLETION_LEN", "SEED", "REASONING_EFFORT", "PROMPT_DATE")
    record: Record = {
        "profiles": list(plan.profiles),
        "samples": samples,
        "exact": exact,
        # With others, figures are not the same measurement.
        "sampling": {name.lower(): getattr(settings, name) for name in names} | {"prompt": plan.prompt},
        "windows": [
            {
                "name": name,
                "load_kw": window.load_kw[:DECISION_DAYS].ravel().tolist(),
                "co2_kg_per_kwh": window.co2.ravel().tolist(),  # With the day after, which prices what is left.
                "policies": {},
            }
            for name, window in zip(plan.episodes, plan.windows, strict=True)
        ],
        "totals": {},
    }
    for name, policy in {"optimum": loop.optimum(plan.windows), **loop.RULES}.items():
        trace = loop.closed_loop(plan.windows, policy)
        add_policy(record, name, plan.windows, trace, np.zeros(len(plan.windows), int))
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
        rows = slice(i, None, count)
        entry["policies"][name] = {
            "actions": trace.actions[i].tolist(),
            "storage_kwh": [tidy(value) for value in trace.storage_kwh[i].tolist()],
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


def keep_base(record: Record, earlier: Record) -> None:
    """Take over what an earlier record holds of the base model, sampled and greedy, if it is of the same windows,
    samples and settings."""

    def how(measured: Record) -> list[object]:
        inputs = [[window.get(key) for key in ("name", "load_kw", "co2_kg_per_kwh")] for window in measured["windows"]]
        return [measured.get(key) for key in ("samples", "exact", "sampling")] + inputs

    if how(record) == how(earlier):
        for entry, old in zip(record["windows"], earlier["windows"], strict=True):
            kept = {"base", "base" + GREEDY} & old["policies"].keys()
            entry["policies"] |= {name: old["policies"][name] for name in kept}
        add_totals(record)


def run_model(plan: ClosedLoopPlan, record: Record, name: str, ask: loop.Ask) -> None:
    """Let a model run through the windows and put it into the record as `name`, one of ASKED: `samples` times, all of
    them side by side, a greedy one once."""
    passes = 1 if name.endswith(GREEDY) else record["samples"]
    unparsed = np.zeros(len(plan.windows) * passes, int)
    policy = loop.model_policy(ask, plan.render, unparsed)
    with Phase("greedy" if name.endswith(GREEDY) else "", first_s=ROWS_S):
        trace = loop.closed_loop(plan.windows * passes, policy)
    add_policy(record, name, plan.windows, trace, unparsed, trace.actions.size)


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
        trace = loop.closed_loop(windows, likeliest)
    expected = loop.expected_loop(windows, chances)
    sums = loop.expected_outcome(expected, windows)
    add_policy(record, name, windows, trace, expected.unparsed * samples, trace.actions.size * samples, sums)
    add_policy(record, name + GREEDY, windows, trace, unread, trace.actions.size)
