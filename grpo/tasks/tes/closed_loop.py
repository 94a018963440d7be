# SPDX-License-Identifier: Apache-2.0
"""A policy runs the plant hour by hour: rules, the optimum, or a model."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from grpo.harmony import assistant_turn, parse_action
from grpo.phases import with_progress
from grpo.tasks.tes import plant as tes
from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, PLANT, SAME_KWH, START_KWH
from grpo.tasks.tes.profiles import Window
from grpo.tasks.tes.prompts import State, state_at

DECISIONS = DECISION_DAYS * len(HOURS)
Policy = Callable[[Sequence[State]], Sequence[int | None]]  # one action for each state; None: the answer names none
Ask = Callable[[Sequence[str], int], Sequence[str]]  # ask(prompts, hour): a completion of each prompt
LEAST_PROBABILITY = 1e-6  # less likely states are dropped


@dataclass(frozen=True)
class Trace:
    """What a policy did in W windows over T decisions: arrays (W, T)."""

    actions: np.ndarray  # int
    storage_kwh: np.ndarray  # after the hour
    co2_kg: np.ndarray
    unserved_kwh: np.ndarray


# An answer without an action counts as full output: this serves the load even with an empty storage, and emits most, so
# that answering nothing never pays.
SAFE_ACTION = int(np.argmax(PLANT.outputs_kw))


def closed_loop(windows: Sequence[Window], policy: Policy) -> Trace:
    """Runs W windows side by side from START_KWH; `policy` gets the W states of an hour and returns W actions. Night
    hours change nothing (no load, output 0) and are left out, as in `plant.solve`."""
    energy = np.full(len(windows), START_KWH)
    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for t in with_progress("", range(DECISIONS), "decision", DECISIONS):
        day, i = divmod(t, len(HOURS))
        answers = policy([state_at(w, t, e) for w, e in zip(windows, energy, strict=True)])
        actions = np.array([SAFE_ACTION if answer is None else answer for answer in answers], dtype=int)
        load, co2 = (np.array([getattr(w, name)[day, i] for w in windows]) for name in ("load_kw", "co2"))
        after = tes.step(energy, actions, load, co2)
        energy = after.energy_kwh
        steps.append((actions, energy, after.emissions_kg, after.unserved_kwh))
    return Trace(*(np.stack(column, axis=1) for column in zip(*steps, strict=True)))


@dataclass
class Expectation:
    """What a policy that chooses by chance does in W windows in expectation, up to the end of a window: arrays (W,)."""

    end_kwh: np.ndarray
    co2_kg: np.ndarray
    unserved_kwh: np.ndarray
    cycled_kwh: np.ndarray  # energy taken out of the storage
    unparsed: np.ndarray  # number of answers without an action


def expected_loop(windows: Sequence[Window], probabilities: Callable[[Sequence[State]], np.ndarray]) -> Expectation:
    """The expectation of `closed_loop` over all outcomes: the probabilities of the reachable storage energies, hour by
    hour. `probabilities` are those of K actions in S states, (S, K); the remainder to 1 goes to SAFE_ACTION. Energies
    that differ only by rounding are merged; states below LEAST_PROBABILITY are dropped in favour of the rest."""
    count, actions = len(windows), np.arange(len(PLANT.ratios))
    load_kw, co2 = (np.stack([getattr(w, name) for w in windows]) for name in ("load_kw", "co2"))  # (W, 4, 10)
    sums = Expectation(*np.zeros((5, count)))
    # Of each state: its window, the stored energy and its probability.
    window, energy, weight = np.arange(count), np.full(count, START_KWH), np.ones(count)
    for t in with_progress("", range(DECISIONS), "decision", DECISIONS):
        day, i = divmod(t, len(HOURS))
        states = [state_at(windows[w], t, e) for w, e in zip(window.tolist(), energy, strict=True)]
        p = probabilities(states).astype(float)
        unparsed = 1 - p.sum(axis=1)
        p[:, SAFE_ACTION] += unparsed
        after = tes.step(energy[:, None], actions, load_kw[window, day, i, None], co2[window, day, i, None])
        joint = weight[:, None] * p
        discharged = np.maximum(energy[:, None] - after.energy_kwh, 0.0)
        hourly = {"co2_kg": after.emissions_kg, "unserved_kwh": after.unserved_kwh, "cycled_kwh": discharged}
        for name, values in hourly.items():
            np.add.at(getattr(sums, name), window, (joint * values).sum(axis=1))
        np.add.at(sums.unparsed, window, weight * unparsed)
        window, energy, weight = merge_states(np.repeat(window, len(actions)), after.energy_kwh.ravel(), joint.ravel())
        kept = weight >= LEAST_PROBABILITY
        window, energy, weight = window[kept], energy[kept], weight[kept]
        whole = np.bincount(window, weight, count)
        weight = weight / whole[window]
    sums.end_kwh = np.bincount(window, weight * energy, count)
    return sums


def merge_states(
    window: np.ndarray, energy: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorts S states by window and energy, merges equal ones and adds up their weights; (S,) to (<= S,)."""
    order = np.lexsort((energy, window))
    window, energy, weight = window[order], energy[order], weight[order]
    new = (np.diff(window, prepend=-1) > 0) | (np.diff(energy, prepend=-np.inf) > SAME_KWH)
    return window[new], energy[new], np.bincount(np.cumsum(new) - 1, weight)


def outcome(trace: Trace, windows: Sequence[Window]) -> dict[str, np.ndarray]:
    """The figures of `expected_outcome` for what has happened: row i of `trace` is a pass through `windows[i]`."""
    cycled_kwh = np.maximum(-np.diff(trace.storage_kwh, prepend=START_KWH), 0.0).sum(axis=1)
    sums = trace.co2_kg.sum(axis=1), trace.unserved_kwh.sum(axis=1), cycled_kwh
    return expected_outcome(Expectation(trace.storage_kwh[:, -1], *sums, np.zeros(len(windows))), windows)


def expected_outcome(sums: Expectation, windows: Sequence[Window]) -> dict[str, np.ndarray]:
    """The figures of `mean` in closed_loop.json, (W,). `priced_kg` is the plant's own objective of `plant.solve` in kg
    CO2: emissions, plus 10 kg for each unserved kWh, minus the worth of the energy gained in the storage. So serving no
    load or emptying the storage does not improve it."""
    prices = [tes.terminal_price(window.co2[DECISION_DAYS]) * PLANT.cost_scale for window in windows]
    unserved = PLANT.unserved_kg_per_kwh * sums.unserved_kwh
    return {
        "co2_kg": sums.co2_kg,
        "unserved_kwh": sums.unserved_kwh,
        "storage_cycled_kwh": sums.cycled_kwh,
        "priced_kg": sums.co2_kg + unserved - (sums.end_kwh - START_KWH) * np.array(prices),
    }


def follow_the_load(states: Sequence[State]) -> list[int]:
    """The smallest output that serves the load alone, full output where none does: the storage is not used."""
    return [smallest_serving_action(s.load_kw[s.stamp.hour - HOURS[0]]) for s in states]


def charge_when_clean(states: Sequence[State]) -> list[int]:
    """Charges in hours whose CO2 intensity is at most the median of the day's, with the largest output whose surplus
    still fits into the storage; in other hours takes the smallest output with which the storage serves the rest."""
    actions = []
    for s in states:
        now = s.stamp.hour - HOURS[0]
        action = smallest_serving_action(s.load_kw[now] - s.energy_kwh)
        if s.co2[now] <= np.median(s.co2):
            fits = s.energy_kwh + PLANT.outputs_kw - s.load_kw[now] <= PLANT.capacity_kwh + 1e-9
            action = max(action, int(np.flatnonzero(fits)[-1]))
        actions.append(action)
    return actions


def smallest_serving_action(needed_kw: float) -> int:
    """The first action whose output is at least `needed_kw`, or the last action if there is none."""
    enough = np.flatnonzero(PLANT.outputs_kw >= needed_kw - 1e-9)
    return int(enough[0]) if enough.size else len(PLANT.ratios) - 1


def constant_policy(action: int) -> Policy:
    return lambda states: [action] * len(states)


RULES: dict[str, Policy] = {f"always_{k}": constant_policy(k) for k in range(len(PLANT.ratios))}
RULES |= {"follow_the_load": follow_the_load, "charge_when_clean": charge_when_clean}


def optimal_policy(windows: Sequence[Window]) -> Policy:
    """The exact optimum of each window (`plant.solve`). The policy counts the hours, so it serves a single pass."""
    solutions, hours = [window.solve() for window in windows], itertools.count()

    def policy(states: Sequence[State]) -> list[int]:
        t = next(hours)
        values = (tes.q_values(solution, t, s.energy_kwh) for solution, s in zip(solutions, states, strict=True))
        return [tes.best_action(q) for q in values]

    return policy


def optimal_kg(window: Window) -> float:
    """The optimum's `priced_kg` in a window."""
    worth_at_start = START_KWH * tes.terminal_price(window.co2[DECISION_DAYS])
    return (worth_at_start - float(window.solve().values[0][0])) * PLANT.cost_scale


def model_policy(ask: Ask, render: Callable[[State], str], unparsed: np.ndarray) -> Policy:
    """A policy that asks a model with rendered states, and parses its actions. It adds the completions that name no
    action to `unparsed` (W,). It counts the hours, so it serves a single pass."""
    hours = itertools.count()

    def policy(states: Sequence[State]) -> list[int | None]:
        prompts = [render(state) for state in states]
        texts = zip(prompts, ask(prompts, next(hours)), strict=True)
        turns = [assistant_turn(prompt, text) for prompt, text in texts]
        actions = [parse_action(turn, len(PLANT.ratios)) for turn in turns]
        unparsed[:] += [action is None for action in actions]
        return actions

    return policy
