# SPDX-License-Identifier: Apache-2.0
"""A policy runs the plant hour by hour: rules, the optimum, or a model."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import rewards
from grpo.tasks.tes import plant as tes
from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, START_KWH, Plant
from grpo.tasks.tes.profiles import Window
from grpo.tasks.tes.prompts import State, state_at

DECISIONS = DECISION_DAYS * len(HOURS)
Policy = Callable[[Sequence[State]], Sequence[int | None]]  # one action for each state; None: no answer could be read
# ask(prompts, samples, hour): `samples` completions of each prompt, in the order of the prompts
Ask = Callable[[Sequence[str], int, int], Sequence[str]]


@dataclass(frozen=True)
class Trace:
    """What a policy did in W windows over T decisions; arrays of shape (W, T) unless noted."""

    actions: np.ndarray  # int
    output_kw: np.ndarray  # thermal output of the heat pump
    storage_kwh: np.ndarray  # after the hour
    co2_kg: np.ndarray
    unserved_kwh: np.ndarray
    start_kwh: float

    @property
    def cycled_kwh(self) -> np.ndarray:
        """Energy taken out of the storage over the window, (W,)."""
        before = np.concatenate([np.full((len(self.storage_kwh), 1), self.start_kwh), self.storage_kwh[:, :-1]], axis=1)
        return np.maximum(before - self.storage_kwh, 0.0).sum(axis=1)


def safe_action(plant: Plant) -> int:
    """The action for an answer that cannot be read (why: SAFE_REASON)."""
    return int(np.argmax(plant.outputs_kw))


SAFE_REASON = "full output: serves the load whatever the storage holds, and emits the most, so no answer never pays"


def closed_loop(
    windows: Sequence[Window], plant: Plant, policy: Policy, start_kwh: float = START_KWH, decisions: int = DECISIONS
) -> Trace:
    """Runs W windows side by side for their first `decisions` decision hours; `policy` gets the W states of an hour and
    returns W actions. Night hours change nothing (no load, output 0) and are left out, as in `plant.solve`."""
    energy = np.full(len(windows), float(start_kwh))
    steps: list[tuple[np.ndarray, ...]] = []
    for t in range(decisions):
        day, i = divmod(t, len(HOURS))
        chosen = policy([state_at(w, plant, t, e) for w, e in zip(windows, energy, strict=True)])
        actions = np.array([safe_action(plant) if action is None else action for action in chosen], dtype=int)
        load, co2 = (np.array([getattr(w, name)[day, i] for w in windows]) for name in ("load_kw", "co2"))
        after = tes.step(plant, energy, actions, load, co2)
        energy = after.energy_kwh
        steps.append((actions, plant.outputs_kw[actions], energy, after.emissions_kg, after.unserved_kwh))
    return Trace(*(np.stack(column, axis=1) for column in zip(*steps, strict=True)), start_kwh=start_kwh)


def end_price(window: Window, plant: Plant, decisions: int = DECISIONS) -> float:
    """Worth of a kWh that is left at the end [kg CO2]: making it in the cheapest hours of the day after."""
    return tes.terminal_price(plant, window.co2[math.ceil(decisions / len(HOURS))]) * plant.cost_scale


def priced_kg(trace: Trace, windows: Sequence[Window], plant: Plant) -> np.ndarray:
    """The plant's own objective of `plant.solve` in kg CO2, shape (W,): emissions, plus 10 kg for each unserved
    kWh, minus the worth of what the storage gained. Nobody looks good by serving nothing or by emptying the storage."""
    price = np.array([end_price(window, plant, trace.actions.shape[1]) for window in windows])
    gained = trace.storage_kwh[:, -1] - trace.start_kwh
    return trace.co2_kg.sum(axis=1) + plant.unserved_kg_per_kwh * trace.unserved_kwh.sum(axis=1) - gained * price


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
            action = max(action, int(np.flatnonzero(fits)[-1]))
        actions.append(action)
    return actions


def first_output(plant: Plant, needed_kw: float) -> int:
    """The first action whose output is at least `needed_kw`, the last where none is."""
    enough = np.flatnonzero(plant.outputs_kw >= needed_kw - 1e-9)
    return int(enough[0]) if enough.size else len(plant.ratios) - 1


RULES: dict[str, Policy] = {f"always_{k}": lambda states, k=k: [k] * len(states) for k in range(len(Plant().ratios))}
RULES |= {"follow_the_load": follow_the_load, "charge_when_clean": charge_when_clean}


def optimum(windows: Sequence[Window], plant: Plant, start_kwh: float, decisions: int = DECISIONS) -> Policy:
    """The exact optimum of each window (`plant.solve`), for one pass through them from `start_kwh`."""
    solutions = []
    for window in windows:
        load, co2 = window.load_kw.ravel()[:decisions], window.co2.ravel()[:decisions]
        price = end_price(window, plant, decisions) / plant.cost_scale
        solutions.append(tes.solve(plant, load, co2, price, start_kwh=start_kwh))
    hours = iter(range(decisions))

    def policy(states: Sequence[State]) -> list[int]:
        t = next(hours)
        values = (tes.q_values(one, t, s.energy_kwh) for one, s in zip(solutions, states, strict=True))
        return [tes.best_action(q) for q in values]

    return policy


def model_policy(ask: Ask, render: Callable[[State], str], votes: int, unparsed: np.ndarray) -> Policy:
    """A model as a policy: prompts out of states, completions, parsed actions. `votes`: answers to each state, of which
    the majority counts, or of equally frequent ones the first. Those that cannot be read are counted into `unparsed` (W,)."""
    hours = itertools.count()

    def policy(states: Sequence[State]) -> list[int | None]:
        prompts = [render(state) for state in states]
        texts = ask(prompts, votes, next(hours))
        if len(texts) != len(prompts) * votes:
            raise ValueError(f"{len(texts)} completions came back for {len(prompts)} prompts x {votes}")
        chosen = []
        for n, (state, prompt) in enumerate(zip(states, prompts, strict=True)):
            turns = [rewards.assistant_turn(prompt, text) for text in texts[n * votes : (n + 1) * votes]]
            answers = [rewards.parse_action(turn, len(state.plant.ratios)) for turn in turns]
            unparsed[n] += answers.count(None)
            counts = Counter(answer for answer in answers if answer is not None)
            chosen.append(max(counts, key=counts.get, default=None))
        return chosen

    return policy


def decisions_in(hours: int) -> int:
    """Decision hours among the first `hours` hours of a window."""
    return sum(hour % 24 in HOURS for hour in range(hours))
