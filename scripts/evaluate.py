#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Let a model control the plant hour by hour through held-out days, beside rules and the exact optimum.

    python scripts/evaluate.py --adapter runs/first                 # a trained adapter (settings from its run)
    python scripts/evaluate.py --adapter runs/first --base-too      # and its base model, on the same seeds
    python scripts/evaluate.py --model tiny                         # a base model
    python scripts/evaluate.py --adapter runs/first --profile profiles/*.csv --samples 8 --vote

Every window is three days of a profile (docs/data.md) from 150 kWh. All windows are asked in one batch an hour; the
answer moves the plant, and the plant's new state makes the next prompt. docs/evaluation.md defines every figure.
Exit codes: 0 done, 2 bad input (every problem is named), 4 vLLM failed, 1 anything else.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
for folder in (str(ROOT), str(ROOT / "scripts")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import make_dataset  # noqa: E402
from make_dataset import DECISION_DAYS, HOURS, START_KWH, Plant, State, Window, state_at  # noqa: E402

import rewards  # noqa: E402

DECISIONS = DECISION_DAYS * len(HOURS)
MODELS = ("base", "trained")
RULES = ("always_0", "always_1", "always_2", "always_3", "follow_the_load", "charge_when_clean")
LEAST_WINDOWS = 3  # fewer give no interval: a bootstrap over two windows says nothing

Policy = Callable[[Sequence[State]], Sequence[int | None]]  # one action for each state; None: no answer could be read

# ---- The simulation: pure --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """What a policy did in W windows over T decisions; arrays of shape (W, T) unless noted."""

    actions: np.ndarray  # int
    output_kw: np.ndarray  # thermal output of the heat pump
    storage_kwh: np.ndarray  # after the hour
    co2_kg: np.ndarray
    unserved_kwh: np.ndarray
    safe: np.ndarray  # (W,) decisions that the safe action took, as the policy gave none
    start_kwh: float

    @property
    def cycled_kwh(self) -> np.ndarray:
        """Energy taken out of the storage over the window, (W,)."""
        before = np.concatenate([np.full((len(self.storage_kwh), 1), self.start_kwh), self.storage_kwh[:, :-1]], axis=1)
        return np.maximum(before - self.storage_kwh, 0.0).sum(axis=1)


def safe_action(plant: Plant) -> int:
    """The action for an answer that cannot be read: full output.

    It serves every load that the plant can serve at all, whatever the storage holds, so unserved load never grows by an
    unreadable answer; and no action emits more, so writing none never pays.

    >>> safe_action(Plant())
    3
    """
    return int(np.argmax(plant.outputs_kw))


SAFE_REASON = "full output: serves the load whatever the storage holds, and emits the most, so no answer never pays"


def closed_loop(
    windows: Sequence[Window],
    plant: Plant,
    policy: Policy,
    start_kwh: float = START_KWH,
    decisions: int = DECISIONS,
) -> Trace:
    """Runs W windows side by side for their first `decisions` decision hours; `policy` gets the W states of an hour and
    returns W actions. Night hours change nothing (no load, output 0) and are left out, as in `make_dataset.solve`.

    Raises ValueError where the policy returns another number of actions, or one that the plant does not have.
    """
    energy = np.full(len(windows), float(start_kwh))
    steps: list[tuple[np.ndarray, ...]] = []
    safe = np.zeros(len(windows), dtype=int)
    for t in range(decisions):
        day, i = divmod(t, len(HOURS))
        chosen = list(policy([state_at(w, plant, t, e) for w, e in zip(windows, energy, strict=True)]))
        if len(chosen) != len(windows):
            raise ValueError(f"the policy gave {len(chosen)} actions for {len(windows)} states")
        safe += [action is None for action in chosen]
        actions = np.array([safe_action(plant) if action is None else action for action in chosen], dtype=int)
        if actions.size and not (actions.min() >= 0 and actions.max() < len(plant.ratios)):
            raise ValueError(f"the policy gave actions {sorted(set(actions.tolist()))}, the plant has {plant.ratios}")
        load, co2 = (np.array([getattr(w, name)[day, i] for w in windows]) for name in ("load_kw", "co2"))
        after = make_dataset.step(plant, energy, actions, load, co2)
        energy = after.energy_kwh
        steps.append((actions, plant.outputs_kw[actions], energy, after.emissions_kg, after.unserved_kwh))
    columns = (np.stack(column, axis=1) for column in zip(*steps, strict=True))
    return Trace(*columns, safe=safe, start_kwh=start_kwh)


def end_price(window: Window, plant: Plant, decisions: int = DECISIONS) -> float:
    """Worth of a kWh that is left at the end [kg CO2]: making it in the cheapest hours of the day after."""
    following = math.ceil(decisions / len(HOURS))
    return make_dataset.terminal_price(plant, window.co2[following]) * plant.cost_scale


def priced_kg(trace: Trace, windows: Sequence[Window], plant: Plant) -> np.ndarray:
    """The plant's own objective of `make_dataset.solve` in kg CO2, shape (W,): emissions, plus 10 kg for each unserved
    kWh, minus the worth of what the storage gained. Nobody looks good by serving nothing or by emptying the storage."""
    price = np.array([end_price(window, plant, trace.actions.shape[1]) for window in windows])
    gained = trace.storage_kwh[:, -1] - trace.start_kwh
    return trace.co2_kg.sum(axis=1) + plant.unserved_kg_per_kwh * trace.unserved_kwh.sum(axis=1) - gained * price


# ---- Policies --------------------------------------------------------------------------------------------------------


def always(action: int) -> Policy:
    """The same action in every hour."""
    return lambda states: [action] * len(states)


def follow_the_load(states: Sequence[State]) -> list[int]:
    """The smallest output that serves the load alone, full output where none does: the storage is not used."""
    return [first_output(s.plant, s.load_kw[s.stamp.hour - HOURS[0]]) for s in states]


def charge_when_clean(states: Sequence[State]) -> list[int]:
    """In hours whose CO2 intensity is at most the median of the day's: the largest output whose surplus still fits into
    the storage. In the others: the smallest output with which the storage serves the rest."""
    actions = []
    for s in states:
        now = s.stamp.hour - HOURS[0]
        action = first_output(s.plant, s.load_kw[now] - s.energy_kwh)
        if s.co2[now] <= np.median(s.co2):
            fits = s.energy_kwh + s.plant.outputs_kw - s.load_kw[now] <= s.plant.capacity_kwh + 1e-9
            action = max(action, int(np.flatnonzero(fits)[-1]) if fits.any() else 0)
        actions.append(action)
    return actions


def first_output(plant: Plant, needed_kw: float) -> int:
    """The first action whose output is at least `needed_kw`, the last where none is."""
    enough = np.flatnonzero(plant.outputs_kw >= needed_kw - 1e-9)
    return int(enough[0]) if enough.size else len(plant.ratios) - 1


def optimum(windows: Sequence[Window], plant: Plant, start_kwh: float, decisions: int = DECISIONS) -> Policy:
    """The exact optimum of each window (`make_dataset.solve`), for one pass through them from `start_kwh`."""
    solutions = []
    for window in windows:
        load, co2 = window.load_kw.ravel()[:decisions], window.co2.ravel()[:decisions]
        price = end_price(window, plant, decisions) / plant.cost_scale
        solutions.append(make_dataset.solve(plant, load, co2, price, start_kwh=start_kwh, grid_kwh=None))
    hours = iter(range(decisions))

    def policy(states: Sequence[State]) -> list[int]:
        t = next(hours)
        pairs = zip(solutions, states, strict=True)
        return [make_dataset.best_action(make_dataset.q_values(one, t, s.energy_kwh)) for one, s in pairs]

    return policy


def majority(answers: Sequence[int | None]) -> int | None:
    """The action that most answers name; of equally frequent ones the one that was named first. None without any.

    >>> [majority([2, None, 1, 2]), majority([None, 3, 0]), majority([None, None])]
    [2, 3, None]
    """
    counts = Counter(answer for answer in answers if answer is not None)
    return counts.most_common(1)[0][0] if counts else None


class ModelPolicy:
    """A model as a policy: prompts out of states, completions, parsed actions.

    ask(prompts, samples, hour): `samples` completions of each prompt, in the order of the prompts. `votes`: answers to
    each state, of which the majority counts. `unparsed` counts answers by state, shape (W,).
    """

    def __init__(
        self,
        ask: Callable[[Sequence[str], int, int], Sequence[str]],
        render: Callable[[State], str],
        votes: int = 1,
    ):
        self.ask, self.render, self.votes = ask, render, votes
        self.hour = self.answers = 0
        self.unparsed: np.ndarray | None = None

    def __call__(self, states: Sequence[State]) -> list[int | None]:
        prompts = [self.render(state) for state in states]
        texts = self.ask(prompts, self.votes, self.hour)
        if len(texts) != len(prompts) * self.votes:
            raise ValueError(f"{len(texts)} completions came back for {len(prompts)} prompts x {self.votes}")
        chosen, unparsed = [], []
        for n, (state, prompt) in enumerate(zip(states, prompts, strict=True)):
            mine = texts[n * self.votes : (n + 1) * self.votes]
            actions = len(state.plant.ratios)
            answers = [rewards.parse_action(rewards.assistant_turn(prompt, text), actions) for text in mine]
            chosen.append(majority(answers))
            unparsed.append(answers.count(None))
        self.unparsed = np.array(unparsed) + (0 if self.unparsed is None else self.unparsed)
        self.answers += len(texts)
        self.hour += 1
        return chosen


# ---- Prompts ---------------------------------------------------------------------------------------------------------


def prompt_kind(conversations: Sequence[Sequence[tuple[str, str]]]) -> str | None:
    """Which renderer of make_dataset made these prompts: `full`, `compact`, or None where it was neither (or not one).

    conversations: (role, text) pairs as `train_grpo.Row.messages`, one ("rendered", text) for a rendered prompt. Full
    prompts must say the same of task, plant and actions word for word: another plant is not the one simulated here.
    """
    day = np.zeros(len(HOURS))
    sample = make_dataset.render_full(State(datetime(2025, 1, 1, HOURS[0]), 0.0, day, day, day, day))
    head, tail = sample.partition("- Current time [h]:")[0], sample[sample.index("System parameters:") :]

    def kind(conversation: Sequence[tuple[str, str]]) -> str | None:
        roles, texts = zip(*conversation, strict=True)
        if roles == ("rendered",) and texts[0].startswith(head) and texts[0].endswith(tail):
            return "full"
        words = texts[-1].split()
        compact = roles == ("system", "user") and texts[0] == make_dataset.COMPACT_SYSTEM
        return "compact" if compact and words[::2][:4] == ["hour", "store", "load", "co2"] else None

    kinds = {kind(conversation) for conversation in conversations}
    return kinds.pop() if len(kinds) == 1 else None


def renderer(kind: str, render: Callable[[Sequence[tuple[str, str]]], str]) -> Callable[[State], str]:
    """State -> prompt, ready to generate from. render: the model's chat template, for prompts that need one."""
    if kind == "full":
        return make_dataset.render_full
    cache: dict[tuple[str, str], str] = {}

    def compact(state: State) -> str:
        system, user = make_dataset.render_compact(state)
        if (system, user) not in cache:  # a template takes longer than the tiny model's token
            cache[system, user] = render((("system", system), ("user", user)))
        return cache[system, user]

    return compact


# ---- Profiles and the record -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A window with its name and the CO2 intensity of all its hours, shape (72,), NaN where the file has no such hour."""

    name: str
    window: Window
    co2: np.ndarray


def read_cases(path: Path, co2_column: str | None = None, load_column: str | None = None) -> list[Case]:
    """The windows of a profile CSV. Raises make_dataset.ProfileError with every problem of the file."""
    profile = make_dataset.read_profile(path, co2_column, load_column)
    index = {day: i for i, day in enumerate(profile.dates)}
    cases = []
    for window in make_dataset.windows(profile):
        days = [index[day] for day in window.dates[:DECISION_DAYS]]
        cases.append(Case(f"{path.stem}: {window.dates[0]}", window, profile.co2[days].ravel()))
    return cases


def hourly(values: np.ndarray, hours: int, night: str) -> list[Any]:
    """Decision hours, shape (T,), as a list of all `hours` from midnight of the first day. Night hours get `night`:
    "none", "zero", or "keep" for the value before (the first one's is the list's first)."""
    filled: list[Any] = []
    decided = iter(values.tolist())
    for hour in range(hours):
        if hour % 24 in HOURS:
            filled.append(tidy(next(decided)))
        else:
            filled.append({"none": None, "zero": 0.0, "keep": filled[-1] if filled else None}[night])
    return filled


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
                "load_kw": hourly(case.window.load_kw.ravel(), hours, "zero"),
                "co2_kg_per_kwh": [tidy(value) for value in case.co2[:hours].tolist()],
                "policies": {},
            }
            for case in cases
        ],
        "totals": {},
    }
    rules: dict[str, Policy] = {f"always_{k}": always(k) for k in range(len(plant.ratios))}
    rules |= {"follow_the_load": follow_the_load, "charge_when_clean": charge_when_clean}
    for name, policy in {"optimum": optimum(windows, plant, start_kwh, decisions), **rules}.items():
        add_policy(record, name, windows, closed_loop(windows, plant, policy, start_kwh, decisions))
    return record


def decisions_in(hours: int) -> int:
    """Decision hours among the first `hours` hours of a window.

    >>> [decisions_in(hours) for hours in (8, 9, 24, 34, 72)]
    [0, 1, 10, 12, 30]
    """
    return sum(hour % 24 in HOURS for hour in range(hours))


def add_policy(
    record: dict[str, Any],
    name: str,
    windows: Sequence[Window],
    trace: Trace,
    unparsed: Sequence[int] | None = None,
    answers: int = 0,
) -> None:
    """Put a policy into the record and compute the totals anew.

    trace: of all windows, or of all windows as often as each was run (pass by pass): the hours that are kept are the
    first pass's, `mean` and the totals are means over the passes. unparsed: answers that could not be read, by row of
    the trace; answers: all of them.
    """
    plant, count = Plant(), len(windows)
    passes = len(trace.actions) // count
    unparsed = np.zeros(len(trace.actions), int) if unparsed is None else np.asarray(unparsed)
    priced = priced_kg(trace, list(windows) * passes, plant)
    for i, entry in enumerate(record["windows"]):
        rows = slice(i, None, count)
        storage = hourly(trace.storage_kwh[i], entry["hours"], "keep")
        means = {
            "co2_kg": trace.co2_kg[rows].sum(axis=1).mean(),
            "unserved_kwh": trace.unserved_kwh[rows].sum(axis=1).mean(),
            "storage_cycled_kwh": trace.cycled_kwh[rows].mean(),
            "priced_kg": priced[rows].mean(),
        }
        entry["policies"][name] = {
            "actions": hourly(trace.actions[i], entry["hours"], "none"),
            "output_kw": hourly(trace.output_kw[i], entry["hours"], "zero"),
            "storage_kwh": [trace.start_kwh if value is None else value for value in storage],
            "co2_kg": hourly(trace.co2_kg[i], entry["hours"], "zero"),
            "unserved_kwh": hourly(trace.unserved_kwh[i], entry["hours"], "zero"),
            "unparsed": int(unparsed[rows].sum()),
            "answers": answers // count,
            "mean": {key: tidy(float(value)) for key, value in means.items()},
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
    was.

    A file that is not there, or cannot be read, is none of the same.
    """
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        mine = [[w[key] for key in ("name", "hours", "load_kw", "co2_kg_per_kwh")] for w in record["windows"]]
        theirs = [[w[key] for key in ("name", "hours", "load_kw", "co2_kg_per_kwh")] for w in earlier["windows"]]
        same = all(record[key] == earlier[key] for key in ("start_kwh", "samples", "vote", "safe_action", "sampling"))
        if mine != theirs or not same:
            return False
        for name in names:
            found = [w["policies"][name] for w in earlier["windows"] if name in w["policies"]]
            if len(found) == len(mine):
                for entry, policy in zip(record["windows"], found, strict=True):
                    entry["policies"][name] = policy
        add_totals(record)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def run_model(
    record: dict[str, Any], name: str, cases: Sequence[Case], ask: Callable[..., Sequence[str]], render: Any
) -> None:
    """Let a model run through the cases and put it into the record as `name`, base or trained. With `vote`, `samples`
    answers decide each hour; without, every window is run `samples` times, all of them side by side."""
    samples, vote, hours = record["samples"], record["vote"], record["windows"][0]["hours"]
    windows = [case.window for case in cases]
    policy = ModelPolicy(ask, render, samples if vote else 1)
    passes = windows * (1 if vote else samples)
    trace = closed_loop(passes, Plant(), policy, record["start_kwh"], decisions_in(hours))
    add_policy(record, name, windows, trace, policy.unparsed, policy.answers)


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


# ---- Models without a trainer ----------------------------------------------------------------------------------------

# What the adapter's run recorded of its model and sampling; the rest belongs to the machine and comes from here.
RECORDED = (
    "MODEL_ID", "REASONING_EFFORT", "PROMPT_DATE", "MAX_COMPLETION_LEN", "TEMPERATURE", "TOP_P", "SEED", "DATA", "EVAL_DATA", "EVAL_SAMPLES",
)  # fmt: skip


def recorded_settings(adapter: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with what settings.json of the adapter's folder (or of the run that a checkpoint lies in) says."""
    import train_grpo

    for path in (adapter, adapter.resolve().parent) if adapter else ():
        try:
            found = json.loads((path / "settings.json").read_text(encoding="utf-8"))["settings"]
            return dict(environ) | {name: train_grpo.show(found[name]) for name in RECORDED if name in found}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return dict(environ)


class TransformersModel:
    """A model, with its adapter or without, that transformers generates with (eager attention: exact at any length)."""

    def __init__(self, settings: Any, model_path: str, config: Mapping[str, Any], adapter: Path | None):
        import train_grpo

        self.settings, self.tokenizer = settings, train_grpo.load_tokenizer(model_path)
        self.model = train_grpo.load_model(model_path, config, "eager").eval()
        self.eos = stop_tokens(self.model.generation_config.eos_token_id, self.tokenizer)
        if adapter is not None:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, str(adapter)).eval()

    def ask(self, prompts: Sequence[str], samples: int, seed: int, base: bool = False) -> list[str]:
        """`samples` completions of each prompt, special tokens included, in the order of the prompts."""
        import contextlib

        import torch

        s = self.settings
        rows = [prompt for prompt in prompts for _ in range(samples)]
        chunk = s.GENERATION_BATCH or 64
        texts: list[str] = []
        torch.manual_seed(seed)
        without = self.model.disable_adapter() if base and hasattr(self.model, "disable_adapter") else None
        with torch.no_grad(), without or contextlib.nullcontext():
            for start in range(0, len(rows), chunk):
                batch = self.tokenizer(text=rows[start : start + chunk], padding=True, return_tensors="pt")
                batch = batch.to(self.model.device)
                ids = self.model.generate(
                    **batch, do_sample=True, temperature=s.TEMPERATURE, top_p=s.TOP_P, top_k=0,
                    max_new_tokens=s.MAX_COMPLETION_LEN, eos_token_id=self.eos, pad_token_id=self.tokenizer.pad_token_id,
                )  # fmt: skip
                completions = ids[:, batch["input_ids"].shape[1] :].tolist()
                texts += self.tokenizer.batch_decode([until_stop(one, self.eos) for one in completions])
        return texts


class VllmModel:
    """A model that vLLM generates with: MXFP4 weights, the adapter loaded natively from its folder (ROLLOUT_SYNC=lora's
    way). There is no trainer beside it, so it stays awake."""

    def __init__(
        self, settings: Any, files: Any, model_path: str, adapter: Path | None, machine: Any, prompt_len: int, rows: int
    ):
        import dataclasses

        import train_grpo

        self.tokenizer = train_grpo.load_tokenizer(model_path)
        rank = settings.LORA_R
        if adapter is not None:
            rank = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"]
        # The plan of a step serves for an hour: as many sequences as are asked at once, no trainer's memory.
        s = dataclasses.replace(
            settings, ROLLOUT_SYNC="lora", LORA_R=rank, PROMPTS_PER_STEP=rows, NUM_GENERATIONS=1,
        )  # fmt: skip
        plan = train_grpo.plan_engine(
            s, files.config, machine, prompt_len, 0.0, train_grpo.checkpoint_gib(settings.MODEL_ID, files)
        )
        if plan.cache < plan.cache_least:
            need = plan.weights + plan.scratch + plan.cache_least
            raise train_grpo.EngineError(f"it needs {need:.1f} GiB of the GPU, {machine.gpu_free:.1f} are free")
        eos = stop_tokens(train_grpo.load_generation_config(model_path).eos_token_id, self.tokenizer)
        self.engine = train_grpo.start_engine(s, plan, model_path, eos)
        self.engine.wake()
        self.adapter, self.seed = adapter, s.SEED

    def ask(self, prompts: Sequence[str], samples: int, seed: int, base: bool = False) -> list[str]:
        """`samples` completions of each prompt, special tokens included, in the order of the prompts."""
        rows = [prompt for prompt in prompts for _ in range(samples)]
        self.engine.use_adapter(None if base else self.adapter)
        ids, _ = self.engine.generate(self.tokenizer(text=rows)["input_ids"], seed)
        return self.tokenizer.batch_decode(ids)


def stop_tokens(eos: int | Sequence[int] | None, tokenizer: Any) -> list[int]:
    """The ids that end a completion, as TRL collects them: the generation config's and the tokenizer's."""
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return ids if tokenizer.eos_token_id in ids else [tokenizer.eos_token_id, *ids]


def until_stop(ids: Sequence[int], stop: Sequence[int]) -> list[int]:
    """A completion without the padding behind its stop token.

    >>> until_stop([5, 6, 2, 0, 0], [2])
    [5, 6, 2]
    """
    end = next((i for i, token in enumerate(ids) if token in stop), len(ids) - 1)
    return list(ids[: end + 1])


# ---- Command line ----------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with code 2 on a wrong one."""
    about = (__doc__ or "").partition("\n")[0]
    number = make_dataset.number
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--base-too", action="store_true", help="evaluate the base model as well (with --adapter)")
    parser.add_argument("--model", metavar="MODEL_ID", help="base model (default: the adapter's run's, or MODEL_ID)")
    profiles = ["data/profile_heldout.csv"]
    parser.add_argument("--profile", nargs="+", metavar="CSV", default=profiles, help="(default %(default)s)")
    parser.add_argument("--samples", type=number(1, 1000, int), metavar="N", help="passes through each window, or with --vote answers an hour (default: the run's EVAL_SAMPLES, else 1)")  # fmt: skip
    parser.add_argument("--vote", action="store_true", help="the majority of N answers decides each hour")
    parser.add_argument("--hours-limit", type=number(9, 24 * DECISION_DAYS, int), default=24 * DECISION_DAYS, metavar="H", help="only the first H hours of each window (default %(default)s)")  # fmt: skip
    parser.add_argument("--start-kwh", type=number(0, Plant().capacity_kwh), default=START_KWH, metavar="E", help="stored at the start (default %(default)g)")  # fmt: skip
    parser.add_argument("--prompt", choices=("auto", "full", "compact"), default="auto", help="auto: as the held-out rows of the run (default %(default)s)")  # fmt: skip
    parser.add_argument("--co2-column", metavar="NAME", help="CO2 intensity [kg/kWh], where names do not tell")
    parser.add_argument("--load-column", metavar="NAME", help="cooling load [kW], where names do not tell")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default closed_loop.json in DIR, without --adapter in the current folder)")  # fmt: skip
    args = parser.parse_args(argv)
    if args.base_too and args.adapter is None:
        parser.error("--base-too: only with --adapter; without it the base model is what is evaluated")
    if args.vote and (args.samples == 1 or (args.samples is None and args.adapter is None)):
        parser.error("--vote: needs --samples of 2 or more, or there is nothing to count")
    return args


def choose_prompt(requested: str, settings: Any) -> tuple[str, str]:
    """(renderer of the prompts, reason): what the run's held-out or training rows are, where they can be read."""
    import train_grpo

    if requested != "auto":
        return requested, "set by --prompt"
    for name in ("EVAL_DATA", "DATA"):
        rows = train_grpo.read_rows(name, getattr(settings, name), train_grpo.Problems())
        if rows and (kind := prompt_kind([row.messages for row in rows])):
            return kind, f"as in {name}"
    return (
        "compact" if settings.MODEL_ID == "tiny" else "full"
    ), "the data of the run are not here, as the model needs"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    import train_grpo

    environ = recorded_settings(args.adapter, os.environ)
    if args.model:
        environ["MODEL_ID"] = args.model
    settings, _, problems = train_grpo.load_settings(environ)
    args.samples = args.samples or (settings.EVAL_SAMPLES if args.adapter else 0) or 1
    if args.adapter is not None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            if not (args.adapter / name).is_file():
                problems.add(f"--adapter {args.adapter}", f"{name} is not there", "Name a run's folder or a checkpoint")
    out = args.out or (args.adapter or Path()) / "closed_loop.json"
    if args.out or not problems:  # a folder that is no adapter's has been told already
        check_writable(out, problems)
    cases: list[Case] = []
    paths: list[Path] = []
    for name in args.profile:  # a name with a comma is one file here, not two as in a setting
        paths += [Path(name)] if Path(name).is_file() else train_grpo.find_files("--profile", name, problems)
    for path in paths:
        try:
            cases += read_cases(path, args.co2_column, args.load_column)
        except make_dataset.ProfileError as error:
            problems += error.problems
    machine = train_grpo.read_machine()
    versions = train_grpo.installed_versions(["vllm"])
    use_vllm, why = train_grpo.choose_rollouts(
        settings.USE_VLLM, machine.gpus, settings.MODEL_ID == "tiny", versions["vllm"]
    )
    if settings.MODEL_ID == "tiny" and not problems:
        import make_model

        try:
            make_model.build_tiny()
        except make_model.ModelError as error:
            problems.append(f"MODEL_ID=tiny: {error}")
    # Without its adapter there is nothing to look up: the base model may be another one than the default.
    missing = any(problem.startswith("--adapter") for problem in problems)
    files = None if missing else train_grpo.find_model(settings.MODEL_ID, problems)
    if files and not machine.gpus and train_grpo.count_parameters(files.config)["total"] * 2 / train_grpo.GIB > 4:
        problems.add("--model", f"{settings.MODEL_ID} needs a GPU and none is visible", "Run it where there is one")
    if problems:
        return refuse(problems)

    kind, reason = choose_prompt(args.prompt, settings)
    if kind == "compact" and files.template is None:
        problems.add(f"MODEL_ID={settings.MODEL_ID}", "it has no chat template", "Add chat_template.jinja, or --prompt full")  # fmt: skip
        return refuse(problems)
    sampling = sampling_of(settings, kind)
    profiles = [shown_path(path) for path in paths]
    record = new_record(cases, profiles, args.samples, args.vote, sampling, args.start_kwh, args.hours_limit)
    if not keep_models(record, out) and out.exists():
        problems.add(str(out), "it holds another evaluation (other windows, samples or settings)", "Name another --out")
        return refuse(problems)

    render = renderer(
        kind,
        lambda messages: train_grpo.render(files.template, messages, settings.REASONING_EFFORT, settings.PROMPT_DATE),
    )
    rows = len(cases) * args.samples
    print(f"{settings.MODEL_ID}, {kind} prompts ({reason}), {len(cases)} window(s) x {args.samples}, "
          f"{'vLLM' if use_vllm else 'transformers'}: {why}", flush=True)  # fmt: skip
    model_path = str(files.folder) if settings.MODEL_ID == "tiny" else settings.MODEL_ID
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if use_vllm:
            # Room for the longest prompt: measured on the first hour, which lists the most, and a little more.
            tokenizer = train_grpo.load_tokenizer(model_path)
            first = [render(state_at(case.window, Plant(), 0, args.start_kwh)) for case in cases]
            longest = max(map(len, tokenizer(text=first)["input_ids"])) + 32
            model: Any = VllmModel(settings, files, model_path, args.adapter, machine, longest, rows)
        else:
            model = TransformersModel(settings, model_path, files.config, args.adapter)
        for name in ("base", "trained") if args.base_too else ("trained" if args.adapter else "base",):
            started = time.perf_counter()

            def ask(prompts: Sequence[str], samples: int, hour: int, name: str = name) -> list[str]:
                # The same seeds as a run's own closed loop, and the same for both models.
                seed = train_grpo.sampling_seed(settings.SEED, hour + 1, "evaluation")
                return model.ask(prompts, samples, seed, base=name == "base")

            run_model(record, name, cases, ask, render)
            write_record(record, out)
            print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    except train_grpo.EngineError as error:
        print(f"vLLM: {error}", file=sys.stderr)
        return 4
    print(table(record))
    print(f"written: {out}")
    return 0


def refuse(problems: Sequence[str]) -> int:
    """Print every problem; returns exit code 2."""
    print("\n".join(dict.fromkeys(problems)), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
