# SPDX-License-Identifier: Apache-2.0
"""Which rows are held out of DATA."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import write_csv

from grpo.data import heldout
from grpo.data.files import Row
from grpo.data.heldout import LEAST_GROUPS, LEAST_HELD_OUT, MOST_HELD_OUT, date_of, group_of, hold_out, read_split
from grpo.settings import Problems, Settings


def question(text, **columns):
    return Row("a.csv", 1, (("user", text),), (0.0, 1.0), columns)


def prompts(count):
    return [question(f"question {n}") for n in range(count)]


def days(count, hours=3):
    stamps = [f"2025-{1 + day // 28:02}-{1 + day % 28:02}" for day in range(count)]
    return [question(f"{day} at {hour}", timestamp=f"{day}T{hour:02}:00") for day in stamps for hour in range(hours)]


def keys(rows):
    return set(map(group_of, rows))


@pytest.mark.parametrize("rows", [prompts(500), days(300)], ids=["prompts", "days"])
def test_a_share_is_held_out_by_whole_days_or_prompts(rows):
    split = hold_out(rows, 0.1)
    assert 0.04 * len(keys(rows)) < len(keys(rows) - keys(split.train)) < 0.16 * len(keys(rows))
    assert not keys(split.train) & keys(split.heldout) and len(split.heldout) <= MOST_HELD_OUT
    assert split.train == sorted(split.train, key=rows.index), "in the order of DATA"
    assert f" of its {len(keys(rows))} {group_of(rows[0])[0]}s, chosen by a hash (EVAL_SHARE=0.1)" in split.reason


@pytest.mark.parametrize("share", [0.01, 0.5])
@pytest.mark.parametrize("make", [prompts, days])
def test_what_was_trained_is_never_held_out_when_rows_are_added(make, share):
    """Also at the limits: of few rows at least LEAST_HELD_OUT groups are held out, of many at most MOST_HELD_OUT."""
    trained = set()
    for count in (LEAST_GROUPS, 25, 100, 330):
        split = hold_out(make(count), share)
        assert LEAST_HELD_OUT <= len(keys(make(count)) - keys(split.train)) <= MOST_HELD_OUT
        assert not trained & keys(split.heldout)
        trained |= keys(split.train)


def test_neither_file_nor_place_nor_other_columns_decide():
    rows = prompts(60)
    held = keys(hold_out(rows, 0.2).heldout)
    moved = [dataclasses.replace(row, file="b.csv", number=99, rewards=(1.0, 0.0)) for row in reversed(rows)]
    briefed = [dataclasses.replace(row, messages=(("system", "Be brief."), *row.messages)) for row in rows]
    assert keys(hold_out(moved, 0.2).heldout) == keys(hold_out(briefed, 0.2).heldout) == held
    split = hold_out(rows * 5, 0.2)
    assert not keys(split.train) & keys(split.heldout), "a prompt in several rows stays together"


def test_a_held_out_prompt_that_is_trained_on_another_day_is_not_evaluated():
    rows = days(60)
    held = [row for row in rows if row not in hold_out(rows, 0.1).train]
    again = dataclasses.replace(held[0], columns={"timestamp": "2031-01-01"})
    assert again in hold_out([*rows, again], 0.1).train, "its own day is trained"
    split = hold_out([*rows, again], 0.1)
    assert held[0] not in split.heldout and held[0] not in split.train and held[1] in split.heldout
    alike = [dataclasses.replace(row, messages=(("user", "What now?"),)) for row in rows]
    assert hold_out(alike, 0.1) == heldout.Split(alike, [], hold_out(alike, 0.1).reason)
    assert "are in other rows too" in hold_out(alike, 0.1).reason


def test_of_too_few_rows_nothing_is_held_out():
    for rows, words in (
        (prompts(19), "19 prompts"),
        (days(19, 24), "19 days"),
        (prompts(1), "1 prompt"),
        ([], "0 prompts"),
    ):
        split = hold_out(rows, 0.5)
        assert split.train == rows and not split.heldout and f"DATA has {words}, and it takes 20" in split.reason
    assert hold_out(prompts(20), 0.1).heldout and hold_out(prompts(500), 0).train == prompts(500)


def test_a_large_table_is_evaluated_in_part():
    split = hold_out(days(300, 24), 0.2)
    assert len(split.heldout) == MOST_HELD_OUT < 7200 - len(split.train)
    assert split.reason.endswith(f"; {MOST_HELD_OUT} of them are evaluated")
    assert len(keys(split.heldout)) > 15, "of many days, not the hours of a few"


DATES = [
    ({"timestamp": "2025-09-01T08:00:00"}, "2025-09-01"),
    ({"Date": "2025/9/1"}, "2025-09-01"),
    ({"note": "x", "datetime": " 2025-09-1 8:00"}, "2025-09-01"),
    ({"day": "Monday", "time": "08:00"}, None),
    ({"born": "2025-09-01"}, None),
    ({"timestamp": "2025-09-011"}, None),
]


@pytest.mark.parametrize(("columns", "day"), DATES)
def test_the_day_of_a_row(columns, day):
    assert date_of(question("x", **columns)) == day
    assert group_of(question("x", **columns))[0] == ("day" if day else "prompt")


def test_settings_decide_what_is_held_out(tmp_path):
    header = ["question", "reward_action_0", "reward_action_1"]
    data = write_csv(tmp_path / "data.csv", header, [[f"question {n}", 0, 1] for n in range(40)])
    other = write_csv(tmp_path / "other.csv", header, [["another", 0, 1]])
    for changes, train, held in (
        ({}, 35, 5),
        ({"EVAL_SHARE": 0.0}, 40, 0),
        ({"EVAL_SAMPLES": 0}, 40, 0),
        ({"EVAL_DATA": str(other)}, 40, 1),
    ):
        split = read_split(Settings(DATA=str(data), **changes), problems := Problems())
        assert (len(split.train), len(split.heldout)) == (train, held) and not problems, changes
