# SPDX-License-Identifier: Apache-2.0
"""Days of the plant as a fourth task of scripts/dev/language.py: an episode of ten calls, and the rules beside it."""

import random
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from typing import Any

import numpy as np

from grpo.tasks.tes.closed_loop import RULES, Policy
from grpo.tasks.tes.dataset import TRAIN_FACTOR, synthetic_windows, vary_loads
from grpo.tasks.tes.plant import HOURS, PLANT, q_values
from grpo.tasks.tes.profiles import HELDOUT_START
from grpo.tasks.tes.prompts import State
from grpo.tasks.tes_day.environment import TRAIN_START, Day, day_rows

Row = dict[str, Any]
STREAMS = {"train": 11, "heldout": 12, "warmup": 13}
WEEKS = 100  # in which a part's days lie: intervals are over days, and need many


def draw_day(rng: random.Random, part: str) -> tuple[Row, list[Row], list[Row]]:
    """A day, the best calls, and for the warm-up random ones. Loads and stored energy vary as in
    data/tes_day_train.jsonl, but not those of held-out days."""
    start = (HELDOUT_START if part == "heldout" else TRAIN_START) + timedelta(weeks=rng.randrange(WEEKS))
    ((window, numbers),) = synthetic_windows(rng.randrange(2**31), STREAMS[part], 1, start)
    if part == "heldout":
        row = rng.choice(list(day_rows(window)))
    else:
        row = rng.choice(list(day_rows(vary_loads(window, numbers, TRAIN_FACTOR["compact"]), numbers)))
    best = decide(row, lambda day: int(q_values(day.solution, day.hour, day.stored).argmax()))
    return row, calls(best.levels), calls([rng.randrange(len(PLANT.ratios)) for _ in HOURS])


def calls(levels: Sequence[int]) -> list[Row]:
    return [{"name": "run", "arguments": {"level": level}} for level in levels]


class Decided(Day):
    """A day that remembers its levels."""

    levels: list[int]


def decide(row: Row, choose: Callable[[Day], int]) -> Decided:
    """The day of a row after `choose` has decided its hours."""
    day = Decided()
    day.reset(**row)
    day.levels = []
    while not day.done:
        day.levels.append(choose(day))
        day.run(day.levels[-1])
    return day


def rule_rewards(rows: Sequence[Row]) -> tuple[str, list[float]]:
    """The rule that earns most in the days of `rows`, and what it earns in each."""

    def earned(rule: Policy, row: Row) -> float:
        stamp = date.fromisoformat(row["date"])

        def choose(day: Day) -> int:
            now = datetime.combine(stamp, time(HOURS[day.hour]))
            # No rule reads the next day's loads.
            state = State(now, day.stored, day.load, day.co2, np.full(len(HOURS), np.nan), day.next_co2)
            level = rule([state])[0]
            assert level is not None
            return level

        return sum(decide(row, choose).step_rewards)

    rewards = {name: [earned(rule, row) for row in rows] for name, rule in RULES.items()}
    best = max(rewards, key=lambda name: sum(rewards[name]))
    return best, rewards[best]
