# SPDX-License-Identifier: Apache-2.0
"""The thermal energy storage (TES) plant: one hour of it, and the exact optimum."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rewards import TEMPERATURE

HOURS = tuple(range(8, 18))  # decision hours of a day: 08:00 to 17:00, the building closes at 18:00
DECISION_DAYS = 3  # days decided on in a window; one more day follows it and prices what is left in the storage
LOW_HOURS = 5  # number of the next day's lowest CO2 intensities in decision hours whose mean prices stored energy
START_KWH = 150.0  # stored at the start of a window: half of the capacity
SAME_KWH = 1e-7  # energies that are closer than this differ by rounding alone


@dataclass(frozen=True)
class Plant:
    """An air-source heat pump (ASHP) with a thermal storage behind it."""

    rated_kw: float = 100.0  # thermal output at ratio 1 [kW]
    cop: float = 4.0  # thermal output / electricity [-]
    capacity_kwh: float = 300.0  # of the storage [kWh thermal]
    ratios: tuple[float, ...] = (0.0, 1 / 3, 2 / 3, 1.0)  # output ratio of each action [-]
    unserved_kg_per_kwh: float = 10.0  # penalty on load that nothing serves [kg CO2 / kWh thermal]
    cost_scale: float = 6.0  # kg CO2 in one unit of cost

    @property
    def outputs_kw(self) -> np.ndarray:
        """Thermal output of each action [kW], shape (K,)."""
        return self.rated_kw * np.asarray(self.ratios)


PLANT = Plant()


class Step(NamedTuple):
    """The result of one hour; every field has the broadcast shape of the inputs of `step`."""

    energy_kwh: np.ndarray  # stored after the hour
    reward: np.ndarray  # minus the hourly cost
    emissions_kg: np.ndarray  # CO2 of the electricity
    unserved_kwh: np.ndarray  # load that neither heat pump nor storage served


def step(energy_kwh: ArrayLike, action: ArrayLike, load_kw: ArrayLike, co2_kg_per_kwh: ArrayLike) -> Step:
    """Runs the plant for one hour; all arguments broadcast against each other.

    The heat pump serves the load first, then the storage does. Surplus charges the storage up to its capacity, the rest
    is lost. Electricity follows the scheduled output, so heat that is lost costs as much as heat that is used."""
    output, load, co2 = PLANT.outputs_kw[np.asarray(action)], np.asarray(load_kw), np.asarray(co2_kg_per_kwh)
    balance = np.asarray(energy_kwh) + (output - load)  # one-hour steps: kW and kWh have the same number
    energy = np.clip(balance, 0.0, PLANT.capacity_kwh)
    unserved = np.maximum(-balance, 0.0)
    emissions = output / PLANT.cop * co2
    reward = -(emissions + PLANT.unserved_kg_per_kwh * unserved) / PLANT.cost_scale
    return Step(*np.broadcast_arrays(energy, reward, emissions, unserved))


def low_co2(co2: np.ndarray) -> float:
    """Mean of the `LOW_HOURS` lowest CO2 intensities of one day's decision hours [kg/kWh]; shape (10,)."""
    return float(np.mean(np.sort(co2)[:LOW_HOURS]))


def terminal_price(next_co2: np.ndarray) -> float:
    """Value of a stored kWh after the last decision: the cost of making it in the next day's lowest-CO2 hours."""
    return low_co2(next_co2) / PLANT.cop / PLANT.cost_scale


@dataclass(frozen=True)
class Solution:
    """Optimal values of T decisions; index t is the time before decision t, index T the end."""

    load_kw: np.ndarray  # (T,)
    co2: np.ndarray  # (T,) [kg/kWh]
    nodes: tuple[np.ndarray, ...]  # T + 1 ascending arrays of storage energies [kWh]
    values: tuple[np.ndarray, ...]  # T + 1 arrays: the best reward to come from each node


def solve(load_kw: np.ndarray, co2: np.ndarray, price_per_kwh: float, start_kwh: ArrayLike = START_KWH) -> Solution:
    """Dynamic programming backwards over T decisions (night hours change nothing, so they are left out).

    load_kw, co2: shape (T,). price_per_kwh: value of a kWh left at the end. start_kwh: one energy or several, (S,).

    An even grid of energies would not be exact: where a low output just fails to serve a load, the value falls by up to
    10/6 per kWh within a fraction of a kWh, and interpolation smears that over a cell. So the nodes of each hour are
    the energies that can be reached from `start_kwh`: their successors are nodes themselves, and the values there are
    exact. They stay few because the outputs and the capacity are multiples of 100/3 kWh: an energy is determined by its
    last visit to an empty or full storage and by the thirds put in since, at most 10 (t + 1) from one start."""
    actions = np.arange(len(PLANT.ratios))[:, None]
    nodes = [distinct_energies(np.atleast_1d(np.asarray(start_kwh, float)))]
    for t in range(len(load_kw)):
        nodes.append(distinct_energies(step(nodes[t], actions, load_kw[t], co2[t]).energy_kwh.ravel()))
    # Backward: values. Each successor is a node up to rounding, and interpolation is continuous at nodes.
    values = [price_per_kwh * nodes[-1]]
    for t in reversed(range(len(load_kw))):
        after = step(nodes[t], actions, load_kw[t], co2[t])
        values.append((after.reward + np.interp(after.energy_kwh, nodes[t + 1], values[-1])).max(axis=0))
    return Solution(load_kw, co2, tuple(nodes), tuple(reversed(values)))


def distinct_energies(energies: np.ndarray) -> np.ndarray:
    """Sorts energies and drops repeats, also those that differ by rounding errors only; shape (N,) to (<= N,)."""
    energies = np.sort(energies)
    return energies[np.diff(energies, prepend=-np.inf) > SAME_KWH]


def q_values(solution: Solution, t: int, energy_kwh: float | np.ndarray) -> np.ndarray:
    """Value of each action at decision t from `energy_kwh` (any shape S) and optimal afterwards; shape S + (K,)."""
    energy = np.asarray(energy_kwh, float)[..., None]
    actions = np.arange(len(PLANT.ratios))
    after = step(energy, actions, solution.load_kw[t], solution.co2[t])
    return after.reward + np.interp(after.energy_kwh, solution.nodes[t + 1], solution.values[t + 1])


def best_action(q: np.ndarray) -> int:
    """Index of the largest of K action values; of equal ones (to 1e-9) the first, which uses the least electricity."""
    return int(np.flatnonzero(q >= q.max() - 1e-9)[0])


def softmax(q: np.ndarray) -> np.ndarray:
    """Softmax of action values in units of TEMPERATURE over the last axis; less the largest, so nothing overflows."""
    weights = np.exp((q - q.max(axis=-1, keepdims=True)) / TEMPERATURE)
    return weights / weights.sum(axis=-1, keepdims=True)
