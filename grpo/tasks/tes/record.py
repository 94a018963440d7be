# SPDX-License-Identifier: Apache-2.0
"""closed_loop.json: what each policy did in each window, and the totals."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rewards
from grpo.settings import ROOT
from grpo.tasks.tes import profiles as tes_profiles
from grpo.tasks.tes.closed_loop import (
    RULES,
    SAFE_REASON,
    Ask,
    Trace,
    closed_loop,
    decisions_in,
    model_policy,
    optimum,
    priced_kg,
    safe_action,
)
from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, START_KWH, Plant
from grpo.tasks.tes.profiles import Window, read_profile
from grpo.tasks.tes.prompts import State

MODELS = ("base", "trained")
LEAST_WINDOWS = 3  # fewer give no interval: a bootstrap over two windows says nothing


@dataclass(frozen=True)
class Case:
    """A window with its name and the CO2 intensity of all its hours, shape (72,), NaN where the file has no such hour."""

    name: str
    window: Window
    co2: np.ndarray


def read_cases(path: Path, co2_column: str | None = None, load_column: str | None = None) -> list[Case]:
    """The windows of a profile CSV. Raises ProfileError with every problem of the file."""
    profile = read_profile(path, co2_column, load_column)
    index = {day: i for i, day in enumerate(profile.dates)}
    cases = []
    for window in tes_profiles.windows(profile):
        days = [index[day] for day in window.dates[:DECISION_DAYS]]
        cases.append(Case(f"{path.stem}: {window.dates[0]}", window, profile.co2[days].ravel()))
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
) -> dict[str, Any]:
    """closed_loop.json with the rules and the optimum, before a model was asked. `sampling` says how it will be."""
    plant, windows, decisions = Plant(), [case.window for case in cases], decisions_in(hours)
    record: dict[str, Any] = {
        "profiles": list(profiles),
        "start_kwh": start_kwh,
        "samples": samples,
        "vote": vote,
        "safe_action": safe_action(plant),
        "safe_action_reason": SAFE_REASON,
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
    for name, policy in {"optimum": optimum(windows, plant, start_kwh, decisions), **RULES}.items():
        add_policy(record, name, windows, closed_loop(windows, plant, policy, start_kwh, decisions))
    return record


def add_policy(
    record: dict[str, Any],
    name: str,
    windows: Sequence[Window],
    trace: Trace,
    unparsed: Sequence[int] | None = None,
    answers: int = 0,
) -> None:
    """Put a policy into the record and compute the totals again.

    trace: of all windows, or of all windows as often as each was run (pass by pass): the hours that are kept are the
    first pass's, `mean` and the totals are means over the passes. unparsed: answers that could not be read, by row of
    the trace; answers: all of them.
    """
    plant, count = Plant(), len(windows)
    passes = len(trace.actions) // count
    unparsed = np.zeros(len(trace.actions), int) if unparsed is None else np.asarray(unparsed)
    priced = priced_kg(trace, list(windows) * passes, plant)
    for i, entry in enumerate(record["windows"]):
        rows, hours = slice(i, None, count), entry["hours"]
        storage = [trace.start_kwh]  # a night keeps it
        for value in hourly(trace.storage_kwh[i], hours, None):
            storage.append(storage[-1] if value is None else value)
        sums = {"co2_kg": trace.co2_kg.sum(axis=1), "unserved_kwh": trace.unserved_kwh.sum(axis=1),
                "storage_cycled_kwh": trace.cycled_kwh, "priced_kg": priced}  # fmt: skip
        entry["policies"][name] = {
            "actions": hourly(trace.actions[i], hours, None),
            "output_kw": hourly(trace.output_kw[i], hours, 0.0),
            "storage_kwh": storage[1:],
            "co2_kg": hourly(trace.co2_kg[i], hours, 0.0),
            "unserved_kwh": hourly(trace.unserved_kwh[i], hours, 0.0),
            "unparsed": int(unparsed[rows].sum()),
            "answers": answers // count,
            "mean": {key: tidy(float(values[rows].mean())) for key, values in sums.items()},
        }
    add_totals(record)


def add_totals(record: dict[str, Any]) -> None:
    """Totals over the windows, regret with its interval, and the difference of the two models, from `mean` alone."""

    def means(name: str, key: str) -> list[float]:
        return [entry["policies"][name]["mean"][key] for entry in record["windows"]]

    def interval(values: Sequence[float], weights: Sequence[float]) -> tuple[float | None, float | None]:
        if len(values) < LEAST_WINDOWS or math.fsum(weights) <= 0:
            return None, None
        low, high = rewards.bootstrap_interval(values, weights)
        return tidy(low), tidy(high)

    entries = [entry["policies"] for entry in record["windows"]]
    best = means("optimum", "priced_kg")
    scale = math.fsum(best)
    order = [name for name in (*MODELS, "optimum", *RULES) if name in entries[0]]
    record["totals"] = {}
    for name in order:
        above = [100 * (mine - other) for mine, other in zip(means(name, "priced_kg"), best, strict=True)]
        low, high = interval(above, best)
        totals = {key: tidy(math.fsum(means(name, key))) for key in entries[0][name]["mean"]}
        record["totals"][name] = totals | {
            "regret_percent": tidy(math.fsum(above) / scale) if scale > 0 else None,
            "regret_percent_low": low,
            "regret_percent_high": high,
            "unparsed": sum(policies[name]["unparsed"] for policies in entries),
            "answers": sum(policies[name]["answers"] for policies in entries),
        }
    record.pop("difference", None)
    if all(name in entries[0] for name in MODELS):
        pairs = zip(means("trained", "priced_kg"), means("base", "priced_kg"), strict=True)
        change = [100 * (trained - base) for trained, base in pairs]
        low, high = interval(change, best)
        percent = tidy(math.fsum(change) / scale) if scale > 0 else None
        record["difference"] = {"regret_percent": percent, "regret_percent_low": low, "regret_percent_high": high}


def keep_models(record: dict[str, Any], path: Path, names: Sequence[str] = MODELS) -> bool:
    """Take over what `path` holds of the models `names` if it is of the same windows, samples and settings; whether it
    was. A file that is not there, or cannot be read, is none of the same."""
    alike, asked = (
        ("start_kwh", "samples", "vote", "safe_action", "sampling"),
        ("name", "hours", "load_kw", "co2_kg_per_kwh"),
    )
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        mine, theirs = (
            [[one[key] for key in alike], *([window[key] for key in asked] for window in one["windows"])]
            for one in (record, earlier)
        )
        if mine != theirs:
            return False
        for name in names:
            found = [window["policies"].get(name) for window in earlier["windows"]]
            if all(found):
                for entry, policy in zip(record["windows"], found, strict=True):
                    entry["policies"][name] = policy
        add_totals(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def run_model(
    record: dict[str, Any], name: str, cases: Sequence[Case], ask: Ask, render: Callable[[State], str]
) -> None:
    """Let a model run through the cases and put it into the record as `name`, base or trained. With `vote`, `samples`
    answers decide each hour; without, every window is run `samples` times, all of them side by side."""
    samples, hours = record["samples"], record["windows"][0]["hours"]
    votes, passes = (samples, 1) if record["vote"] else (1, samples)
    windows = [case.window for case in cases]
    unparsed = np.zeros(len(windows) * passes, int)
    policy = model_policy(ask, render, votes, unparsed)
    trace = closed_loop(windows * passes, Plant(), policy, record["start_kwh"], decisions_in(hours))
    add_policy(record, name, windows, trace, unparsed, votes * trace.actions.size)


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Write closed_loop.json whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def check_writable(path: Path, problems: Any) -> None:
    """Add a problem where `write_record` could not write `path`. Tried, because permission bits do not tell all of it."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = path.with_name(path.name + ".tmp")
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        problems.add(str(path), f"cannot be written: {error.strerror}", "Name another --out, in a folder that exists")


def table(record: Mapping[str, Any]) -> str:
    """The totals for the terminal."""
    count, hours = len(record["windows"]), record["windows"][0]["hours"]
    plural = "" if count == 1 else "s"
    lines = [
        f"Closed loop, {count} window{plural} of {hours} hours from {record['start_kwh']:g} kWh",
        f"  {'policy':<18} {'kg CO2':>8} {'unserved kWh':>13} {'cycled kWh':>11} {'regret':>9} {'95% interval':>20}  unparsed",
    ]
    for name, total in record["totals"].items():
        regret = "" if total["regret_percent"] is None else f"{total['regret_percent']:.1f} %"
        low, high = total["regret_percent_low"], total["regret_percent_high"]
        interval = "" if low is None else f"{low:.1f} to {high:.1f}"
        unparsed = f"{total['unparsed']} of {total['answers']}" if total["answers"] else ""
        lines.append(
            f"  {name:<18} {total['co2_kg']:>8.1f} {total['unserved_kwh']:>13.1f} {total['storage_cycled_kwh']:>11.1f} "
            f"{regret:>9} {interval:>20}  {unparsed}".rstrip()
        )
    if change := record.get("difference"):
        low, high = change["regret_percent_low"], change["regret_percent_high"]
        interval = "" if low is None else f", 95% interval {low:+.1f} to {high:+.1f}"
        if change["regret_percent"] is not None:
            lines.append(f"  trained against base: regret {change['regret_percent']:+.1f} points{interval}")
    return "\n".join(lines)


def sampling_of(settings: Any, prompt: str) -> dict[str, Any]:
    """The settings that decide what a model answers: with others, its figures are not the same measurement."""
    names = ("MODEL_ID", "TEMPERATURE", "TOP_P", "MAX_COMPLETION_LEN", "SEED", "REASONING_EFFORT", "PROMPT_DATE")
    return {name.lower(): getattr(settings, name) for name in names} | {"prompt": prompt}


def shown_path(path: Path) -> str:
    """A path for the record: relative to the project or the current folder where it lies inside."""
    for base in (ROOT, Path.cwd()):
        if path.resolve().is_relative_to(base):
            return path.resolve().relative_to(base).as_posix()
    return path.name
