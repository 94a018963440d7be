# SPDX-License-Identifier: Apache-2.0
"""closed_loop.json: what each policy did in each window, and the totals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rewards
from grpo.phases import ROWS_S, Phase
from grpo.settings import ROOT
from grpo.tasks.tes import closed_loop as loop
from grpo.tasks.tes import profiles as tes_profiles
from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, START_KWH, Plant
from grpo.tasks.tes.profiles import Window
from grpo.tasks.tes.prompts import State

Record = dict[str, Any]  # closed_loop.json
MODELS = ("base", "trained")
GREEDY = "_greedy"  # behind a model's name: its likeliest answers, one pass
ASKED = (*MODELS, *(name + GREEDY for name in MODELS))
LEAST_WINDOWS = 3  # fewer give no interval


@dataclass(frozen=True)
class Case:
    """A window with its name and the CO2 intensity of all its hours, shape (72,), NaN where the file has no such hour."""

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


def hourly(values: np.ndarray, hours: int, night: float | None) -> list[Any]:
    """Decision hours, shape (T,), as a list of all `hours` from midnight of the first day, with `night` in the others."""
    decided = iter(values.tolist())
    return [tidy(next(decided)) if hour % 24 in HOURS else night for hour in range(hours)]


def tidy(value: Any) -> Any:
    """A number for JSON: six decimals, None for NaN, which JSON does not know."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6) + 0.0
    return value


def new_record(
    cases: Sequence[Case],
    profiles: Sequence[str],
    samples: int,
    vote: bool,
    sampling: Mapping[str, Any],
    start_kwh: float = START_KWH,
    hours: int = 24 * DECISION_DAYS,
    exact: bool = False,
) -> Record:
    """closed_loop.json with the rules and the optimum, before a model was asked. `sampling` says how it will be; `exact`:
    by its probabilities."""
    plant, windows, decisions = Plant(), [case.window for case in cases], loop.decisions_in(hours)
    record: Record = {
        "profiles": list(profiles),
        "start_kwh": start_kwh,
        "samples": samples,
        "vote": vote,
        "exact": exact,
        "safe_action": loop.safe_action(plant),
        "safe_action_reason": loop.SAFE_REASON,
        "sampling": dict(sampling),
        "windows": [
            {
                "name": case.name,
                "start": f"{case.window.dates[0]} 00:00",
                "hours": hours,
                "load_kw": hourly(case.window.load_kw.ravel(), hours, 0.0),
                "co2_kg_per_kwh": [tidy(value) for value in case.co2[:hours].tolist()],
                "policies": {},
            }
            for case in cases
        ],
        "totals": {},
    }
    for name, policy in {"optimum": loop.optimum(windows, plant, start_kwh, decisions), **loop.RULES}.items():
        trace = loop.closed_loop(windows, plant, policy, start_kwh, decisions)
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

    `trace` is of all windows as often as each was run, pass by pass: the hours that are kept are the first pass's, `mean`
    and the totals are means over the passes, or `sums` (W,) where they are given. `unparsed` counts answers that could
    not be read by row of the trace; `answers` are all of them.
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
    """Totals over the windows, regret with its interval, and the difference of the two models, from `mean` alone."""
    entries = [entry["policies"] for entry in record["windows"]]
    priced = {name: [one[name]["mean"]["priced_kg"] for one in entries] for name in entries[0]}
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

    record["totals"] = {}
    for name in [name for name in (*ASKED, "optimum", *loop.RULES) if name in priced]:
        mine = [policies[name] for policies in entries]
        sums = {key: tidy(math.fsum(one["mean"][key] for one in mine)) for key in mine[0]["mean"]}
        counts = {key: tidy(sum(one[key] for one in mine)) for key in ("unparsed", "answers")}
        record["totals"][name] = sums | regret(name, "optimum") | counts
    record.pop("difference", None)
    if priced.keys() >= set(MODELS):
        record["difference"] = regret("trained", "base")


def keep_models(record: Record, path: Path, names: Sequence[str] = MODELS) -> bool:
    """Take over what `path` holds of the models `names`, sampled and greedy, if it is of the same windows, samples and settings; whether it
    was. A file that is not there, or cannot be read, is none of the same."""

    def asked(one: Mapping[str, Any]) -> list[Any]:
        alike = [one.get(key) for key in ("start_kwh", "samples", "vote", "exact", "safe_action", "sampling")]
        return alike + [w[key] for w in one["windows"] for key in ("name", "hours", "load_kw", "co2_kg_per_kwh")]

    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if asked(record) != asked(earlier):
            return False
        for entry, found in zip(record["windows"], earlier["windows"], strict=True):
            kept = [name for model in names for name in (model, model + GREEDY) if name in found["policies"]]
            entry["policies"] |= {name: found["policies"][name] for name in kept}
        add_totals(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def run_model(record: Record, name: str, cases: Sequence[Case], ask: loop.Ask, render: Callable[[State], str]) -> None:
    """Let a model run through the cases and put it into the record as `name`, one of ASKED. With `vote`, `samples` answers
    decide each hour; without, every window is run `samples` times, all of them side by side; a greedy one once."""
    votes, passes = (record["samples"], 1) if record["vote"] else (1, record["samples"])
    if name.endswith(GREEDY):
        votes = passes = 1
    windows, decisions = [case.window for case in cases], loop.decisions_in(record["windows"][0]["hours"])
    unparsed = np.zeros(len(windows) * passes, int)
    policy = loop.model_policy(ask, render, votes, unparsed)
    with Phase("greedy" if name.endswith(GREEDY) else "", first_s=ROWS_S):
        trace = loop.closed_loop(windows * passes, Plant(), policy, record["start_kwh"], decisions)
    add_policy(record, name, windows, trace, unparsed, votes * trace.actions.size)


def run_exact(
    record: Record,
    name: str,
    cases: Sequence[Case],
    probabilities: Callable[[Sequence[str], bool], np.ndarray],
    render: Callable[[State], str],
) -> None:
    """As `run_model`, but all that can happen, by the probabilities of the answers: `probabilities(prompts, greedy)` are
    (N, K). Puts the model as `name` and as its greedy policy into the record; the hours of both are the greedy path's."""
    windows, decisions, start = [case.window for case in cases], loop.decisions_in(record["windows"][0]["hours"]), record["start_kwh"]  # fmt: skip
    unread, samples = np.zeros(len(windows), int), record["samples"]

    def likeliest(states: Sequence[State]) -> list[int | None]:
        p = probabilities([render(state) for state in states], True)
        read = p.any(axis=1)
        unread[:] += ~read
        return [int(action) if known else None for action, known in zip(p.argmax(axis=1), read, strict=True)]

    with Phase("greedy", first_s=ROWS_S):
        trace = loop.closed_loop(windows, Plant(), likeliest, start, decisions)
    chances = lambda states: probabilities([render(state) for state in states], False)  # noqa: E731
    found = loop.expected_loop(windows, Plant(), chances, start, decisions)
    sums = loop.expected_outcome(found, windows, start, decisions)
    add_policy(record, name, windows, trace, found.unparsed * samples, trace.actions.size * samples, sums)
    for entry, dropped in zip(record["windows"], found.dropped.tolist(), strict=True):
        entry["policies"][name]["dropped"] = tidy(dropped)
    add_policy(record, name + GREEDY, windows, trace, unread, trace.actions.size)


def table(record: Mapping[str, Any]) -> str:
    """The totals for the terminal."""
    count, hours = len(record["windows"]), record["windows"][0]["hours"]
    row = "  {:<18} {:>8} {:>13} {:>11} {:>9} {:>20}  {}"
    samples = record["samples"]
    way = f"the majority of {samples} answers" if record["vote"] else f"{samples} pass{'es' * (samples != 1)}"
    way = "exact" if record["exact"] else way
    lines = [
        f"Closed loop, {count} window{'s' * (count != 1)} of {hours} hours from {record['start_kwh']:g} kWh, {way}"
    ]
    lines += [row.format("policy", "kg CO2", "unserved kWh", "cycled kWh", "regret", "95% interval", "unparsed")]
    for name, total in record["totals"].items():
        sums = [f"{total[key]:.1f}" for key in ("co2_kg", "unserved_kwh", "storage_cycled_kwh")]
        regret, low, high = (total[f"regret_percent{end}"] for end in ("", "_low", "_high"))
        shown = ["" if regret is None else f"{regret:.1f} %", "" if low is None else f"{low:.1f} to {high:.1f}"]
        unparsed = f"{round(total['unparsed'], 1):g} of {total['answers']}" if total["answers"] else ""
        lines.append(row.format(name, *sums, *shown, unparsed).rstrip())
    if change := record.get("difference"):
        regret, low, high = change.values()
        interval = "" if low is None else f", 95% interval {low:+.1f} to {high:+.1f}"
        if regret is not None:
            lines.append(f"  trained against base: regret {regret:+.1f} points{interval}")
    return "\n".join(lines)


def sampling_of(settings: Any, prompt: str) -> dict[str, Any]:
    """The settings that decide what a model answers: with others, its figures are not the same measurement."""
    names = ("MODEL_ID", "EVAL_TEMPERATURE", "TOP_P", "MAX_COMPLETION_LEN", "SEED", "REASONING_EFFORT", "PROMPT_DATE")
    return {name.lower(): getattr(settings, name) for name in names} | {"prompt": prompt}


def shown_path(path: Path) -> str:
    """A path for the record: relative to the project or the current folder where it lies inside."""
    for base in (ROOT, Path.cwd()):
        if path.resolve().is_relative_to(base):
            return path.resolve().relative_to(base).as_posix()
    return path.name
