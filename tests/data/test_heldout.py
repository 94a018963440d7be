# SPDX-License-Identifier: Apache-2.0
"""Which rows are held out of DATA."""

import dataclasses
import json

import pytest
from helpers import write_csv
from machines import only

from grpo.common import Problems
from grpo.data.files import Row, data_fingerprint
from grpo.data.heldout import LEAST_GROUPS, MOST_HELD_OUT, date_of, group_of, hold_out, read_split
from grpo.settings.table import Settings


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


@pytest.mark.parametrize(("share", "count"), [(0.1, 2), (0.05, 1), (0.01, 1), (0.25, 5), (0.5, 10)])
@pytest.mark.parametrize("make", [prompts, days])
def test_of_the_fewest_days_or_prompts_exactly_the_share_is_held_out(make, share, count):
    """A hash of each alone would hold out none of 20 in an eighth of all cases, and five or more in a twentieth."""
    rows = make(LEAST_GROUPS)
    held = keys(rows) - keys(hold_out(rows, share).train)
    assert len(held) == count and f"{count} of its {LEAST_GROUPS} " in hold_out(rows, share).reason


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("make", [prompts, days])
def test_rows_that_are_added_change_nothing_for_the_others(make, share):
    """What was trained on is not held out later, and what was held out is not trained on."""
    earlier, trained = set(), set()
    for count in (LEAST_GROUPS, LEAST_GROUPS + 1, 25, 100, 330, 900 if make is prompts else 336):
        split = hold_out(make(count), share)
        held = keys(make(count)) - keys(split.train)
        assert earlier <= held and not trained & held and held
        earlier, trained = held, keys(split.train)


def test_neither_file_nor_number_nor_other_columns_decide():
    for rows in (prompts(60), days(60)):
        held = keys(hold_out(rows, 0.2).heldout)
        moved = [dataclasses.replace(row, file=f"{n % 3}.csv", number=99 - n) for n, row in enumerate(rows)]
        moved = [dataclasses.replace(row, rewards=(1.0, 0.0)) for row in moved]
        briefed = [dataclasses.replace(row, messages=(("system", "Be brief."), *row.messages)) for row in rows]
        assert keys(hold_out(moved, 0.2).heldout) == keys(hold_out(briefed, 0.2).heldout) == held
        split = hold_out(rows * 5, 0.2)
        assert not keys(split.train) & keys(split.heldout), "a prompt in several rows stays together"
        # The order and a missing row matter to the first twenty alone: the others have their own hash.
        for others in (rows[::-1], rows[1:]):
            assert len(keys(hold_out(others, 0.2).heldout) ^ held) <= 8


def test_a_row_whose_prompt_is_trained_on_another_day_is_trained_on_and_counted():
    rows = days(60)
    held = [row for row in rows if row not in hold_out(rows, 0.1).train]
    again = dataclasses.replace(held[0], columns={"timestamp": "2031-01-01"})
    split = hold_out([*rows, again], 0.1)
    assert again in split.train, "its own day is trained"
    assert held[0] in split.train and held[0] not in split.heldout and held[1] in split.heldout
    assert len(split.train) + len(split.heldout) == len(rows) + 1, "no row is lost"
    assert "1 more rows of these are trained on, because their prompts are in other rows too" in split.reason
    alike = [dataclasses.replace(row, messages=(("user", "What now?"),)) for row in rows]
    split = hold_out(alike, 0.1)
    assert split.train == alike and not split.heldout
    assert "are in other rows too, which are trained on. Write more of the row into its prompt" in split.reason


def test_what_an_environment_is_reset_with_is_part_of_a_prompt(tmp_path):
    """Rows with one prompt are as many groups as they have other columns; without an environment they are one."""
    data = tmp_path / "worlds.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Plan.", "target": n // 2}) + "\n" for n in range(80)))
    split = read_split(Settings(DATA=str(data), ENVIRONMENT="worlds:Sum"), problems := Problems())
    train, held = ([row.columns["target"] for row in part] for part in (split.train, split.heldout))
    assert len(train) + len(held) == 80 and held and not set(train) & set(held)
    plain = read_split(Settings(DATA=str(data)), problems)
    assert not plain.heldout and "DATA has 1 prompt, and it takes 20" in plain.reason and not problems


def test_of_too_few_rows_nothing_is_held_out():
    few = {"19 prompts": prompts(19), "19 days": days(19, 24), "1 prompt": prompts(1), "0 prompts": []}
    for words, rows in few.items():
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
    ({"timestamp": "2025-13-01"}, None),
    ({"timestamp": "01.06.2025 08:00"}, "2025-06-01"),
    ({"Created_At": "2025-06-01T08:00:00Z"}, "2025-06-01"),
    ({"日付": "2025年6月1日 8時"}, "2025-06-01"),
    ({"date": "2025.06.01"}, "2025-06-01"),
    ({"date": "6/1/2025 8:00"}, "06/01/2025"),
    ({"date": "13/06/2025"}, "13/06/2025"),
    ({"date": "45/06/2025"}, None),
    ({"date": "13/14/2025"}, None),
    ({"date": "32.06.2025"}, None),
    ({"timestamp": "1748736000"}, None),
    ({"timestamp": None, "date": "2025-06-01"}, "2025-06-01"),
]


@pytest.mark.parametrize(("columns", "day"), DATES)
def test_the_day_of_a_row(columns, day):
    assert date_of(question("x", **columns)) == day
    assert group_of(question("x", **columns))[0] == ("day" if day else "prompt")


FIX = "write days as 2025-09-01 into a column `date` if neighbouring rows resemble each other"
NOTES = [  # name of a column, its cells by day, note in the reason, whether days are held out
    ("date", "2025-06-{:02}", "", True),
    ("date", "{:02}.06.2025", "", True),
    ("created_at", "2025-06-{:02} 08:00", "", True),
    ("date", "{:02}/06/2025", "whether 01/06/2025 begins with the day or the month is not guessed: each such", True),
    ("timestamp", "17487{:02}000", "the column `timestamp` is not taken for the day, '1748701000' is no date", False),
    ("day", "{}", "the column `day` is not taken for the day, '1' is no date that is recognised: " + FIX, False),
    ("measured", "2025-06-{:02}", "the column `measured` is not taken for the day, the name is not one for", False),
    ("opened", "June {}, 2025", "the column `opened` is not taken for the day, the name is not one for", False),
    ("opened", "Mon {} Jun 2025", "the column `opened` is not taken for the day", False),
    ("opened", "202506{:02}", "the column `opened` is not taken for the day, the name is not one for", False),
    ("date", "{}-Jun-25", "the column `date` is not taken for the day, '1-Jun-25' is no date that is", False),
    ("note", "day {}", "", False),
    ("ticket", "2025990{}", "", False),
]


@pytest.mark.parametrize(("name", "cell", "words", "is_by_day"), NOTES)
def test_dates_are_recognised_or_named(name, cell, words, is_by_day):
    """Of the 24 hours of 25 days, whose neighbours give each other away."""
    rows = [question(f"{day}, {hour}", **{name: cell.format(day)}) for day in range(1, 26) for hour in range(24)]
    split = hold_out(rows, 0.1)
    assert ("days, chosen by a hash" in split.reason) is is_by_day
    assert words in split.reason and bool(words) is ("column" in split.reason or "guessed" in split.reason)
    cells = [{row.columns[name] for row in part} for part in (split.train, split.heldout)]
    assert not is_by_day or not cells[0] & cells[1]


def test_a_template_is_put_around_the_questions_and_holds_out_the_same_rows(tmp_path):
    """Rendered prompts and conversations stay as they are; reward functions get the prompt that the model gets."""
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "1+1"},
    ]
    prompts = [f"What is {n} {{}}?" for n in range(40)] + [
        talk,
        talk[:1],
        "<|start|>user<|message|>7<|end|><|start|>assistant",
    ]
    rows = [{"prompt": prompt, "system": "Be brief."} for prompt in prompts]
    data = tmp_path / "maths.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def split(template, problems):
        return read_split(Settings(DATA=str(data), PROMPT_TEMPLATE=template), problems)

    plain, inside = split("{}", Problems()), split("Answer:\n{}\nNow.", problems := Problems())
    assert (
        not problems
        and plain.heldout
        and [row.number for row in inside.heldout] == [row.number for row in plain.heldout]
    )
    assert data_fingerprint(inside.train) != data_fingerprint(plain.train)
    rows_by_number = {row.number: row for row in [*inside.train, *inside.heldout]}
    first, conversation, single, rendered = (rows_by_number[number] for number in (1, 41, 42, 43))
    assert first.messages == (("system", "Be brief."), ("user", "Answer:\nWhat is 0 {}?\nNow."))
    assert first.trl_prompt == first.messages[-1][1] and single.trl_prompt[-1]["content"] == "Answer:\nHi\nNow."
    assert conversation.messages[-1] == ("user", "1+1") and rendered.messages[0][0] == "rendered"
    for template, words in (("Answer:", "has no {}"), ("<|end|>{}", "it holds <|end|>")):
        split(template, problems := Problems())
        assert only(problems).startswith("PROMPT_TEMPLATE: ") and words in only(problems)


def test_settings_decide_what_is_held_out(tmp_path):
    header = ["question", "reward_action_0", "reward_action_1"]
    data = write_csv(tmp_path / "data.csv", header, [[f"question {n}", 0, 1] for n in range(40)])
    other = write_csv(tmp_path / "other.csv", header, [["another", 0, 1]])
    none_held = (({"EVAL_SHARE": 0.0}, 40, 0), ({"EVAL_SAMPLES": 0}, 40, 0))
    for changes, train, held in (({}, 37, 3), *none_held, ({"EVAL_DATA": str(other)}, 40, 1)):
        split = read_split(Settings(DATA=str(data), **changes), problems := Problems())
        assert (len(split.train), len(split.heldout)) == (train, held) and not problems, changes
        without = read_split(Settings(DATA=str(data), **changes), problems, train_only=True)
        assert without.train == split.train and not without.heldout, "where nothing is evaluated"
    read_split(Settings(DATA=str(data), EVAL_DATA="missing.csv"), problems, train_only=True)
    assert not problems, "it is not read then"
