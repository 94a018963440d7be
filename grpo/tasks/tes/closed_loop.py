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
from grpo.phases import with_progress
from grpo.tasks.tes import plant as tes
from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, START_KWH, Plant
from grpo.tasks.tes.profiles import Window
from grpo.tasks.tes.prompts import State, state_at

DECISIONS = DECISION_DAYS * len(HOURS)
Policy = Callable[[Sequence[State]], Sequence[int | None]]  # one action for each state; None: no answer could be read
# ask(prompts, samples, hour): `samples` completions of each prompt, in the order of the prompts
Ask = Callable[[Sequence[str], int, int], Sequence[str]]
SAME_KWH, LEAST_PROBABILITY = 1e-7, 1e-6  # energies that are one state; states that are dropped


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
    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for t in with_progress("", range(decisions), "decision", decisions):
        day, i = divmod(t, len(HOURS))
        answers = policy([state_at(w, plant, t, e) for w, e in zip(windows, energy, strict=True)])
        actions = np.array([safe_action(plant) if answer is None else answer for answer in answers], dtype=int)
        load, co2 = (np.array([getattr(w, name)[day, i] for w in windows]) for name in ("load_kw", "co2"))
        after = tes.step(plant, energy, actions, load, co2)
        energy = after.energy_kwh
        steps.append((actions, plant.outputs_kw[actions], energy, after.emissions_kg, after.unserved_kwh))
    chosen, output, storage, co2, unserved = (np.stack(column, axis=1) for column in zip(*steps, strict=True))
    return Trace(chosen, output, storage, co2, unserved, start_kwh)


@dataclass
class Expectation:
    """What a policy that chooses by chance does in W windows in expectation: arrays (W,), in kWh, kg and answers."""

    end_kwh: np.ndarray
    co2_kg: np.ndarray
    unserved_kwh: np.ndarray
    cycled_kwh: np.ndarray
    unparsed: np.ndarray  # answers that cannot be read
    dropped: np.ndarray  # probability of the states that were left out


def expected_loop(
    windows: Sequence[Window],
    plant: Plant,
    chances: Callable[[Sequence[State]], np.ndarray],
    start_kwh: float = START_KWH,
    decisions: int = DECISIONS,
) -> Expectation:
    """`closed_loop` of all that can happen: hour by hour the probabilities of the storage energies that can be reached.
    `chances` of S states are those of the K actions, (S, K); what is left of 1 is the safe action's. Energies that
    differ by rounding are one state, states below LEAST_PROBABILITY are dropped and the others share their
    probability."""
    count, actions = len(windows), np.arange(len(plant.ratios))
    load_kw, co2 = (
        np.stack([getattr(window, name) for window in windows]) for name in ("load_kw", "co2")
    )  # (W, 4, 10)
    sums = Expectation(*np.zeros((6, count)))
    where, energy, weight = np.arange(count), np.full(count, float(start_kwh)), np.ones(count)
    for t in with_progress("", range(decisions), "decision", decisions):
        day, i = divmod(t, len(HOURS))
        states = [state_at(windows[w], plant, t, e) for w, e in zip(where.tolist(), energy, strict=True)]
        p = chances(states).astype(float)
        unread = 1 - p.sum(axis=1)
        p[:, safe_action(plant)] += unread
        after = tes.step(plant, energy[:, None], actions, load_kw[where, day, i, None], co2[where, day, i, None])
        joint = weight[:, None] * p
        out = np.maximum(energy[:, None] - after.energy_kwh, 0.0)
        for name, values in (("co2_kg", after.emissions_kg), ("unserved_kwh", after.unserved_kwh), ("cycled_kwh", out)):
            np.add.at(getattr(sums, name), where, (joint * values).sum(axis=1))
        np.add.at(sums.unparsed, where, weight * unread)
        where, energy, weight = merged(np.repeat(where, len(actions)), after.energy_kwh.ravel(), joint.ravel())
        kept = weight >= LEAST_PROBABILITY
        where, energy, weight = where[kept], energy[kept], weight[kept]
        whole = np.bincount(where, weight, count)
        sums.dropped = 1 - (1 - sums.dropped) * np.minimum(whole, 1.0)
        weight = weight / whole[where]
    sums.end_kwh = np.bincount(where, weight * energy, count)
    return sums


def merged(where: np.ndarray, energy: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States of windows (S,), each once, in order; the weights of those that are one state added up."""
    order = np.lexsort((energy, where))
    where, energy, weight = where[order], energy[order], weight[order]
    new = (np.diff(where, prepend=-1) > 0) | (np.diff(energy, prepend=-np.inf) > SAME_KWH)
    return where[new], energy[new], np.bincount(np.cumsum(new) - 1, weight)


def end_price(window: Window, plant: Plant, decisions: int) -> float:
    """Worth of a kWh that is left at the end [kg CO2]: making it in the cheapest hours of the day after."""
    return tes.terminal_price(plant, window.co2[math.ceil(decisions / len(HOURS))]) * plant.cost_scale


def outcome(trace: Trace, windows: Sequence[Window]) -> dict[str, np.ndarray]:
    """`expected_outcome` of each pass through a window, where nothing is left to chance."""
    sums = trace.co2_kg.sum(axis=1), trace.unserved_kwh.sum(axis=1), trace.cycled_kwh
    certain = Expectation(trace.storage_kwh[:, -1], *sums, *np.zeros((2, len(windows))))
    return expected_outcome(certain, windows, trace.start_kwh, trace.actions.shape[1])


def expected_outcome(
    sums: Expectation, windows: Sequence[Window], start_kwh: float, decisions: int
) -> dict[str, np.ndarray]:
    """The figures of `mean` in closed_loop.json, (W,). `priced_kg` is the plant's own objective of `plant.solve` in kg
    CO2: emissions, plus 10 kg for each unserved kWh, minus the worth of what the storage gained. Nobody looks good by
    serving nothing or by emptying the storage."""
    price = np.array([end_price(window, Plant(), decisions) for window in windows])
    unserved = Plant().unserved_kg_per_kwh * sums.unserved_kwh
    return {
        "co2_kg": sums.co2_kg,
        "unserved_kwh": sums.unserved_kwh,
        "storage_cycled_kwh": sums.cycled_kwh,
        "priced_kg": sums.co2_kg + unserved - (sums.end_kwh - start_kwh) * price,
    }


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


def always(action: int) -> Policy:
    """The same action in every hour."""
    return lambda states: [action] * len(states)


RULES: dict[str, Policy] = {f"always_{k}": always(k) for k in range(len(Plant().ratios))}
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
        values = (tes.q_values(solution, t, s.energy_kwh) for solution, s in zip(solutions, states, strict=True))
        return [tes.best_action(q) for q in values]

    return policy


def model_policy(ask: Ask, render: Callable[[State], str], votes: int, unparsed: np.ndarray) -> Policy:
    """A model as a policy: prompts out of states, completions, parsed actions. Of the `votes` answers to each state the
    majority counts, or of equally frequent ones the first. Those that cannot be read are counted into `unparsed`
    (W,)."""
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
            chosen.append(max(counts, key=lambda action: counts[action], default=None))
        return chosen

    return policy
