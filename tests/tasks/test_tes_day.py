# SPDX-License-Identifier: Apache-2.0
"""A day of the plant as an environment: costs, texts, and the committed days."""

import json

import numpy as np
import pytest
from helpers import ROOT

from grpo.environment.worker import describe
from grpo.tasks.tes.plant import HOURS, PLANT, START_KWH, q_values, step, terminal_price
from grpo.tasks.tes_day.environment import Day

ROWS = [json.loads(line) for line in (ROOT / "data/tes_day_heldout.jsonl").read_text().splitlines()]


def played(row, choose):
    """The environment after a day, and the texts that it returned."""
    day = Day()
    texts = [day.reset(**row)]
    while not day.done:
        texts.append(day.run(choose(day)))
    return day, texts


def best(day):
    return int(q_values(day.solution, day.hour, day.stored).argmax())


def priced_kg(row, levels):
    """What a day costs [kg CO2]: emissions, unserved load, less the worth of what is left."""
    energy, cost = row["stored"], 0.0
    for level, load, co2 in zip(levels, row["load"], row["co2"], strict=True):
        after = step(energy, level, load, co2)
        energy, cost = float(after.energy_kwh), cost - float(after.reward) * PLANT.cost_scale
    return cost - terminal_price(np.array(row["next_co2"])) * PLANT.cost_scale * energy


def test_rewards_sum_to_the_cost_against_the_optimum():
    rng = np.random.default_rng(0)
    for row in ROWS[:10]:
        chosen, optimal = [], []
        best_day, _ = played(row, lambda day, taken=optimal: taken.append(best(day)) or taken[-1])
        day, _ = played(row, lambda day, taken=chosen: taken.append(int(rng.integers(4))) or taken[-1])
        assert best_day.step_rewards == pytest.approx([0.0] * len(HOURS), abs=1e-9)
        gap = priced_kg(row, optimal) - priced_kg(row, chosen)
        assert sum(day.step_rewards) == pytest.approx(gap, abs=1e-6) and gap < -1


def test_an_hour_that_nobody_decides_is_not_free():
    """Else the best answer to a day would be none, or to the rest of a day where level 0 is best."""
    off, _ = played(ROWS[0], lambda day: 0)
    day = Day()
    day.reset(**ROWS[0])
    assert day.get_reward() <= sum(off.step_rewards) < -1000 and day.get_reward() == 0 and day.done
    assert off.get_reward() == 0
    day.reset(**ROWS[0])
    for _ in range(len(HOURS) - 1):
        day.run(best(day))
    assert best(day) == 0 and day.get_reward() < -1 and sum(day.step_rewards) == pytest.approx(0, abs=1e-9)


def test_each_hour_begins_with_what_the_last_one_left():
    row = ROWS[0] | {"load": [90.0] * 10, "stored": START_KWH}
    day, texts = played(row, lambda day: 0)
    now = [f"load 90 kW, CO2 {co2:.3f} kg/kWh." for co2 in row["co2"]]
    assert f"Now 08:00, stored 150 kWh, {now[0]}" in texts[0] and "17:00 load 90 kW" in texts[0]
    assert texts[1] == f"Now 09:00, stored 60 kWh, {now[1]}"
    assert texts[2] == f"Now 10:00, stored 0 kWh, {now[2]} 30 kWh of the load were not served."
    assert texts[-1] == "The day is over. 90 kWh of the load were not served." and len(day.step_rewards) == 10


def test_its_tool_is_described_and_takes_levels_alone():
    (tool,) = describe(Day).tools
    assert tool["function"]["name"] == "run" and list(tool["function"]["parameters"]["properties"]) == ["level"]
    day = Day()
    day.reset(**ROWS[0])
    for level in (4, True, 1.5, "1", None):
        with pytest.raises(ValueError, match="from 0 to 3"):
            day.run(level)
    assert day.run(2.0).startswith("Now 09:00")
    with pytest.raises(ValueError, match="3 numbers, not one for each of the 10"):
        day.reset(**ROWS[0] | {"load": "[1, 2, 3]"})


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        ("load", "[null, 1, 1, 1, 1, 1, 1, 1, 1, 1]", "a column has nan"),
        ("co2", [-0.1] + [0.3] * 9, "a column has -0.1"),
        ("stored", 301, "stored is 301, not a number from 0 to 300"),
        ("stored", "nan", "stored is nan"),
    ],
)
def test_days_that_cannot_be_are_refused(column, value, fault):
    """Of a load that is missing every reward was NaN, and its episodes were left out without a word."""
    with pytest.raises(ValueError, match=fault):
        Day().reset(**ROWS[0] | {column: value})


def test_held_out_days_are_others():
    train = (ROOT / "data/tes_day_train.jsonl").read_text().splitlines()
    assert not {row["date"] for row in ROWS} & {json.loads(line)["date"] for line in train}
