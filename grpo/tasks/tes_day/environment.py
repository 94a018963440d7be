# SPDX-License-Identifier: Apache-2.0
"""A day of the plant as an environment: each hour is a call, and begins with the storage that the earlier ones left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import date

import numpy as np

from grpo.tasks.tes.dataset import SEED, TRAIN_FACTOR, synthetic_windows, vary_loads
from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, PLANT, START_KWH, low_co2, q_values, solve, step, terminal_price
from grpo.tasks.tes.profiles import HELDOUT_START, Window

# Random streams of the days' windows, other ones than those of grpo/tasks/tes/dataset.py.
TRAIN_STREAM, HELDOUT_STREAM = 4, 5
TRAIN_WINDOWS, HELDOUT_WINDOWS = 100, 10
TRAIN_START = date(2023, 1, 2)  # A Monday; a window starts on every Monday, and no training day is held out.
PROMPT = "Plan the decision hours of {}."


Hours = str | Sequence[float]  # A number for each decision hour, or JSON text of them.


class Day:
    """The plant of docs/plant.md over the decision hours of one day.

    `step_rewards` are minus the cost of each hour's decision against the best one in its state [kg CO2], so their sum
    is minus the day's cost against the optimum: the performance difference lemma, as in `rewards.regret`. Hours that
    are left undecided run at level 0, and `get_reward` charges each what its worst level costs: not to decide must not
    be free. Charged as level 0, which is often best, it was: a run learned to end 27% of its days by broken calls."""

    def __init__(self) -> None:
        self.step_rewards: list[float] = []
        self.done = False

    def reset(
        self,
        load: Sequence[float],
        co2: Sequence[float],
        next_co2: Sequence[float],
        stored: float = START_KWH,
        **_: object,
    ) -> str:
        """Begins a day. The columns have a number for each decision hour: `load` [kW], `co2` and that of the next day,
        `next_co2` [kg/kWh]; `stored` is the energy in the storage [kWh]."""
        self.load, self.co2, self.next_co2 = (numbers(values) for values in (load, co2, next_co2))
        self.stored, self.hour = float(stored), 0
        if not 0 <= self.stored <= PLANT.capacity_kwh:
            raise ValueError(f"stored is {stored}, not a number from 0 to {PLANT.capacity_kwh:.0f} kWh")
        self.step_rewards, self.done = [], False
        self.solution = solve(self.load, self.co2, terminal_price(self.next_co2), self.stored)
        hours = [
            f"{hour:02d}:00 load {load:.0f} kW, CO2 {co2:.3f} kg/kWh"
            for hour, load, co2 in zip(HOURS, self.load, self.co2, strict=True)
        ]
        facts = [
            f"Heat pump: level 0 to 3 gives 0, 33, 67 or {PLANT.rated_kw:.0f} kW at a COP of {PLANT.cop:.0f}. Storage: "
            f"{PLANT.capacity_kwh:.0f} kWh; it takes the surplus and serves what the heat pump does not.",
            f"A kWh of load that nothing serves counts as {PLANT.unserved_kg_per_kwh:.0f} kg CO2.",
            f"The next day's five lowest CO2 factors average {low_co2(self.next_co2):.3f} kg/kWh.",
        ]
        return "\n\n" + "\n".join([*facts, *hours, self._state()])

    def _state(self) -> str:
        now = f"Now {HOURS[self.hour]:02d}:00, stored {self.stored:.0f} kWh"
        return f"{now}, load {self.load[self.hour]:.0f} kW, CO2 {self.co2[self.hour]:.3f} kg/kWh."

    def run(self, level: int) -> str:
        """Runs the heat pump for this hour, and returns the state of the next one.

        Args:
            level: Output of the heat pump, from 0 (off) to 3 (full).
        """
        if isinstance(level, bool) or level not in range(len(PLANT.ratios)):
            raise ValueError(f"level is a whole number from 0 to {len(PLANT.ratios) - 1}")
        reward, unserved = self._decide(int(level))  # JSON knows one kind of numbers: a model may write 2.0.
        self.step_rewards.append(reward)
        text = "The day is over." if self.done else self._state()
        return f"{text} {unserved:.0f} kWh of the load were not served." if unserved else text

    def get_reward(self) -> float:
        """The reward of the hours that no call has decided."""
        reward = 0.0
        while not self.done:
            reward += float(self._rewards().min())
            self._decide(0)
        return reward

    def _rewards(self) -> np.ndarray:
        """The reward of each level in this hour."""
        values = q_values(self.solution, self.hour, self.stored)
        return (values - values.max()) * PLANT.cost_scale

    def _decide(self, level: int) -> tuple[float, float]:
        """Runs this hour. Returns its reward and the load that was not served [kWh]."""
        reward = float(self._rewards()[level])
        after = step(self.stored, level, self.load[self.hour], self.co2[self.hour])
        self.stored, self.hour = float(after.energy_kwh), self.hour + 1
        self.done = self.hour == len(HOURS)
        return reward, float(after.unserved_kwh)


def numbers(values: Hours) -> np.ndarray:
    """The column of a row, a list or its JSON text, as an array with a number for each decision hour."""
    array = np.asarray(json.loads(values) if isinstance(values, str) else values, float)
    if array.shape != (len(HOURS),):
        raise ValueError(f"a column has {array.size} numbers, not one for each of the {len(HOURS)} decision hours")
    if not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(f"a column has {array.min()}, and each of its numbers must be 0 or more")
    return array


def day_rows(window: Window, rng: np.random.Generator | None = None) -> Iterator[dict[str, object]]:
    """A row for each decision day of a window, which begins with START_KWH, or with `rng` at a random energy."""
    for day in range(DECISION_DAYS):
        yield {
            "prompt": PROMPT.format(window.dates[day]),
            "date": window.dates[day].isoformat(),
            "stored": START_KWH if rng is None else round(float(rng.uniform(0.0, PLANT.capacity_kwh)), 1),
            "load": window.load_kw[day].tolist(),
            "co2": window.co2[day].tolist(),
            "next_co2": window.co2[day + 1].tolist(),
        }


def day_files(seed: int = SEED) -> Iterator[tuple[str, str]]:
    """(name, text) of data/tes_day_train.jsonl and data/tes_day_heldout.jsonl: days of other seeds."""

    def text(stream: int, count: int, start: date, varied: bool) -> str:
        rows: list[dict[str, object]] = []
        for window, rng in synthetic_windows(seed, stream, count, start):
            rows += day_rows(vary_loads(window, rng, TRAIN_FACTOR["compact"]), rng) if varied else day_rows(window)
        return "".join(json.dumps(row) + "\n" for row in rows)

    yield "tes_day_train.jsonl", text(TRAIN_STREAM, TRAIN_WINDOWS, TRAIN_START, True)
    yield "tes_day_heldout.jsonl", text(HELDOUT_STREAM, HELDOUT_WINDOWS, HELDOUT_START, False)
