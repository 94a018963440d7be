# SPDX-License-Identifier: Apache-2.0
"""The plant and its optimum, the rewards made from it, and what prompts tell of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from datetime import datetime

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.tasks.tes.plant import PLANT, best_action, q_values, softmax, solve, step
from grpo.tasks.tes.profiles import cut_windows, synthetic_profile
from grpo.tasks.tes.prompts import State, render_compact

loads = st.floats(0, 120, allow_subnormal=False)
intensities = st.floats(0.1, 0.7, allow_subnormal=False)
energies = st.floats(0, PLANT.capacity_kwh, allow_subnormal=False)


def hour_by_hand(energy: float, output: float, load: float, co2: float) -> tuple[float, float]:
    """One hour as the specification tells it, in branches and literals; returns energy after it and cost."""
    from_pump = min(output, load)
    from_storage = min(energy, load - from_pump)
    unserved = load - from_pump - from_storage
    charged = min(output - from_pump, 300.0 - (energy - from_storage))
    return energy - from_storage + charged, (output / 4.0 * co2 + 10.0 * unserved) / 6.0


def brute_force(energy: float, load: np.ndarray, co2: np.ndarray, price: float) -> np.ndarray:
    """Value of each first action, by trying every sequence of actions."""
    best = np.full(4, -math.inf)
    for actions in itertools.product(range(4), repeat=len(load)):
        at, total = energy, 0.0
        for action, demand, intensity in zip(actions, load, co2, strict=True):
            at, cost = hour_by_hand(at, 100.0 * action / 3.0, demand, intensity)
            total -= cost
        best[actions[0]] = max(best[actions[0]], total + price * at)
    return best


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(loads, intensities), min_size=2, max_size=4), energies, intensities, st.integers(0, 3))
def test_values_equal_those_of_brute_force(hours, energy, low, action) -> None:
    """A state that was asked for is exact, and so are those that follow from it."""
    load, co2 = np.array(hours).T
    price = low / 4.0 / 6.0
    after = float(step(energy, action, load[0], co2[0]).energy_kwh)
    first, second = brute_force(energy, load, co2, price), brute_force(after, load[1:], co2[1:], price)
    for start in (energy, [0.0, energy, 300.0]):
        solution = solve(load, co2, price, start)
        np.testing.assert_allclose(q_values(solution, 0, energy), first, rtol=0, atol=1e-6)
        np.testing.assert_allclose(q_values(solution, 1, after), second, rtol=0, atol=1e-6)


def test_reachable_energies_stay_few() -> None:
    nodes = cut_windows(synthetic_profile(6, 4))[0].solve().nodes
    assert len(nodes) == 31 and all(reached.size <= 10 * (t + 1) for t, reached in enumerate(nodes))


def test_softmax_of_values_that_are_far_apart() -> None:
    with np.errstate(over="raise", invalid="raise"):
        rewards = softmax(np.array([[-5000.0, 0.0, -5000.0, 0.0], [4000.0, 3999.0, -9e5, 0.0]]))
    np.testing.assert_allclose(rewards, [[0, 0.5, 0, 0.5], [1, 0, 0, 0]], atol=1e-8)


def test_a_millionth_makes_an_action_better() -> None:
    assert best_action(np.array([-1.0, -0.5, -0.5 + 1e-6, -2.0])) == 2


def a_state(hour: int, energy: float = 150.0) -> State:
    """A state with numbers that can be told apart."""
    load, co2 = np.arange(20.0, 30.0), np.array([0.40, 0.35, 0.30, 0.25, 0.20, 0.21, 0.26, 0.31, 0.36, 0.41])
    return State(datetime(2025, 4, 14, hour), energy, load, co2, load + 10, co2 + 0.1)


def test_compact_prompt() -> None:
    system, user = render_compact(a_state(14))
    assert all(f"[{k}]" in system for k in range(4))
    assert user == (
        "hour 14 store 50 load 26 co2 26 next 34 gain 58 short 0 room 100 need 0 rank 0 ahead 31 36 41 loads 27 28 29"
    )
    _, tight = render_compact(a_state(8, 6.0))
    assert "store 2 load 20 " in tight and " short 14 room 100 need 22 rank 8 " in tight
    assert " room 20 " in render_compact(a_state(8, 300.0))[1]
    assert " need 4 " in render_compact(a_state(8, 200.0))[1]  # 225 later, 200 - 20 left: 45 kWh
    flat = dataclasses.replace(a_state(8), co2=np.full(10, 0.3))
    assert " rank 0 " in render_compact(flat)[1]  # equal is not lower
    # Loads above the heat pump's 100 kW are told; no more of an output than 100 kWh can be short or find room.
    _, peak = render_compact(dataclasses.replace(a_state(15, 30.0), load_kw=np.full(10, 142.4)))
    assert " load 142 " in peak and " short 100 room 100 need 28 " in peak and peak.endswith(" loads 142 142")


@settings(max_examples=50, deadline=None)
@given(st.integers(8, 17), energies, st.lists(st.tuples(st.floats(0, 500), st.floats(0, 2)), min_size=20, max_size=20))
def test_compact_prompt_is_short_and_small(hour: int, energy: float, hours: list[tuple[float, float]]) -> None:
    load, co2 = np.array(hours).T
    state = State(datetime(2025, 4, 14, hour), energy, load[:10], co2[:10], load[10:], co2[10:])
    words = render_compact(state)[1].split()
    assert len(words) <= 40 and all(word.isalnum() for word in words)
    assert all(0 <= int(word) <= 200 for word in words if word.isdigit())
