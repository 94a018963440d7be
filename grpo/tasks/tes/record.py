# SPDX-License-Identifier: Apache-2.0
"""closed_loop.json: what each policy did in each window, and the totals."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo.figures.statistics import confidence_interval
from grpo.figures.text import finite_number
from grpo.phases import ROWS_S, Phase
from grpo.settings.table import Settings
from grpo.tasks.simulator import AS_START, BEFORE_TRAINING, GREEDY, START, Record, SimulationPlan
from grpo.tasks.tes import closed_loop as loop
from grpo.tasks.tes import profiles as tes_profiles
from grpo.tasks.tes.plant import DECISION_DAYS, START_KWH
from grpo.tasks.tes.profiles import Window
from grpo.tasks.tes.prompts import State, render_full, state_at

ORDER = tuple(name + suffix for suffix in ("", GREEDY) for name in ("base", START, "trained"))  # Of models in totals.
LEAST_WINDOWS = 3  # windows of fewer different days give no interval
UNSERVED_KWH = 0.05  # A window in which more load than this stays unserved is counted.


def read_windows(path: Path) -> list[tuple[str, Window]]:
    """The windows of a profile CSV with their names. Raises InputError with every problem of the file."""
    windows = tes_profiles.cut_windows(tes_profiles.read_profile(path))
    return [(f"{path.stem}: {window.dates[0]}", window) for window in windows]


def json_number(value: float | None) -> float | None:
    """A float rounded to six decimals, without a negative zero; other values as they are."""
    return round(value, 6) + 0.0 if isinstance(value, float) else value


@dataclass(frozen=True)
class ClosedLoopPlan(SimulationPlan):
    """The windows that a model controls, and how it is asked: `prompt` is `full` or `compact`."""

    prompt: str = ""
    profiles: tuple[str, ...] = ()
    windows: tuple[Window, ...] = ()  # those of `episodes`
    render: Callable[[State], str] = render_full

    def opening_prompts(self) -> list[str]:
        return [self.render(state_at(window, 0, START_KWH)) for window in self.windows]


def new_record(plan: ClosedLoopPlan, settings: Settings, samples: int, exact: bool = False) -> Record:
    """closed_loop.json with the rules and the optimum, before a model was asked. `exact`: models are measured by the
    probabilities of their answers. Hours are decision hours, 08:00 to 17:00 of three days."""
    names = ("MODEL_ID", "EVAL_TEMPERATURE", "TOP_P", "MAX_COMPLETION_LEN", "SEED", "REASONING_EFFORT", "PROMPT_DATE")
    record: Record = {
        "profiles": list(plan.profiles),
        "samples": samples,
        "exact": exact,
        # Figures with other values are not the same measurement.
        "sampling": {name.lower(): getattr(settings, name) for name in names} | {"prompt": plan.prompt},
        "windows": [
            {
                "name": name,
                "load_kw": window.load_kw[:DECISION_DAYS].ravel().tolist(),
                "co2_kg_per_kwh": window.co2.ravel().tolist(),  # The day after, which prices what is left, is included.
                "policies": {},
            }
            for name, window in zip(plan.episodes, plan.windows, strict=True)
        ],
        "totals": {},
    }
    for name, policy in {"optimum": loop.optimal_policy(plan.windows), **loop.RULES}.items():
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
    """Puts a policy into the record and computes the totals again.

    `trace` holds the windows once for each pass, pass by pass, and the record keeps the hours of the first pass. `mean`
    and the totals are means over the passes, or `sums` (W,) if these are passed. `unparsed` is the number of answers
    without an action by row of `trace`, and `answers` the number of all answers."""
    count = len(windows)
    sums = sums or loop.outcome(trace, list(windows) * (len(trace.actions) // count))
    for i, entry in enumerate(record["windows"]):
        rows = slice(i, None, count)
        entry["policies"][name] = {
            "actions": trace.actions[i].tolist(),
            "storage_kwh": [json_number(value) for value in trace.storage_kwh[i].tolist()],
            "unparsed": json_number(unparsed[rows].sum().item()),
            "answers": answers // count,
            "mean": {key: json_number(float(values[rows].mean())) for key, values in sums.items()},
        }
    add_totals(record)


def add_totals(record: Record) -> None:
    """From `mean` alone: totals, regret with its interval, windows with unserved load, and the trained model's
    difference from the base model and from the best rule."""
    windows = [entry["policies"] for entry in record["windows"]]
    priced = {name: [policies[name]["mean"]["priced_kg"] for policies in windows] for name in windows[0]}
    # Windows of the same days in several profiles share their weather and the grid's CO2: they count as one.
    dates = [entry["name"].rpartition(": ")[2] for entry in record["windows"]]
    optimum = priced["optimum"]
    whole = math.fsum(optimum)

    def regret(mine: str, other: str) -> dict[str, float | None]:
        above = [100 * (a - b) for a, b in zip(priced[mine], priced[other], strict=True)]
        low = high = None
        if len(set(dates)) >= LEAST_WINDOWS and whole > 0:
            low, high = confidence_interval(above, optimum, dates)
        percent = math.fsum(above) / whole if whole > 0 else None
        figures = {"regret_percent": percent, "regret_percent_low": low, "regret_percent_high": high}
        return {name: json_number(value) for name, value in figures.items()}

    def losses(name: str) -> dict[str, float | str | None]:
        # Pairs, not a dictionary: files of one name in two folders give windows of one name.
        unserved = [(entry["policies"][name]["mean"]["unserved_kwh"], entry["name"]) for entry in record["windows"]]
        most, worst = max(unserved, key=lambda pair: pair[0])
        count = sum(kwh > UNSERVED_KWH for kwh, _ in unserved)
        return {"unserved_windows": count, "worst_window": worst if count else None, "worst_unserved_kwh": most}

    record["totals"] = {}
    for name in [name for name in (*ORDER, "optimum", *loop.RULES) if name in priced]:
        entries = [policies[name] for policies in windows]
        sums = {key: json_number(math.fsum(entry["mean"][key] for entry in entries)) for key in entries[0]["mean"]}
        counts = {key: json_number(sum(entry[key] for entry in entries)) for key in ("unparsed", "answers")}
        record["totals"][name] = sums | losses(name) | regret(name, "optimum") | counts
    for name in ("difference", "difference_start", "difference_rule"):
        record.pop(name, None)
    if priced.keys() >= {"base", "trained"}:
        record["difference"] = regret("trained", "base")
    if priced.keys() >= {"trained", START}:
        record["difference_start"] = regret("trained", START)
    if "trained" in priced and (rule := best_rule(record["totals"])):
        record["difference_rule"] = regret("trained", rule)


def best_rule(totals: Mapping[str, Mapping[str, object]]) -> str | None:
    """The fixed rule of the lowest regret, constant actions among them; None if `totals` has no rule with a regret."""
    regrets = {name: finite_number(totals[name].get("regret_percent")) for name in loop.RULES if name in totals}
    known = {name: regret for name, regret in regrets.items() if not math.isnan(regret)}
    return min(known, key=known.__getitem__, default=None)


def keep_base(record: Record, earlier: Record) -> None:
    """Copies the policies of base model and start adapter from an earlier record of the same measurement."""

    def conditions(measured: Record) -> list[object]:
        inputs = [[window.get(key) for key in ("name", "load_kw", "co2_kg_per_kwh")] for window in measured["windows"]]
        return [measured.get(key) for key in ("samples", "exact", "sampling")] + inputs

    if conditions(record) == conditions(earlier):
        for entry, old in zip(record["windows"], earlier["windows"], strict=True):
            kept = set(BEFORE_TRAINING) & old["policies"].keys()
            entry["policies"] |= {name: old["policies"][name] for name in kept}
        add_totals(record)


def as_start(record: Record) -> Record:
    """A copy of a record in which the trained model is called START: it has not learned yet."""
    windows = [
        entry | {"policies": {AS_START.get(name, name): policy for name, policy in entry["policies"].items()}}
        for entry in record["windows"]
    ]
    copy = record | {"windows": windows}
    add_totals(copy)
    return copy


def run_model(plan: ClosedLoopPlan, record: Record, name: str, ask: loop.Ask) -> None:
    """Lets a model run through the windows and puts it into the record as `name`: in `samples` passes side by side,
    or in one where the name says that it answers greedily."""
    passes = 1 if name.endswith(GREEDY) else record["samples"]
    unparsed = np.zeros(len(plan.windows) * passes, int)
    policy = loop.model_policy(ask, plan.render, unparsed)
    with Phase("greedy" if name.endswith(GREEDY) else "", first_s=ROWS_S):
        trace = loop.closed_loop(plan.windows * passes, policy)
    add_policy(record, name, plan.windows, trace, unparsed, trace.actions.size)


def run_exact(
    plan: ClosedLoopPlan, record: Record, name: str, probabilities: Callable[[Sequence[str], bool], np.ndarray]
) -> None:
    """Puts a model into the record as `name`, by its expectation over all answers instead of samples, and as its greedy
    policy; the hours of both are those of the greedy pass. `probabilities(prompts, greedy)` are (N, K)."""
    windows, samples, unparsed = plan.windows, record["samples"], np.zeros(len(plan.windows), int)

    def likeliest(states: Sequence[State]) -> list[int | None]:
        p = probabilities([plan.render(state) for state in states], True)
        actions = [int(row.argmax()) if row.any() else None for row in p]
        unparsed[:] += [action is None for action in actions]
        return actions

    with Phase("greedy", first_s=ROWS_S):
        trace = loop.closed_loop(windows, likeliest)
    expected = loop.expected_loop(windows, lambda states: probabilities([*map(plan.render, states)], False))
    sums = loop.expected_outcome(expected, windows)
    add_policy(record, name, windows, trace, expected.unparsed * samples, trace.actions.size * samples, sums)
    add_policy(record, name + GREEDY, windows, trace, unparsed, trace.actions.size)
