# SPDX-License-Identifier: Apache-2.0
"""The logs of a run: rows that read back, and warnings about what they hold."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from functools import partial

import pytest
from conftest import read_csv

from grpo.data.files import Row
from grpo.data.scoring import Completion
from grpo.run.logs import (
    LEAST,
    METRICS,
    Pace,
    RunLog,
    garbage_gains,
    garbage_warning,
    parse_rate_warning,
    reward_warning,
)

ROW = Row("d.csv", 1, (("user", "x"),), (0.0, 1.0), {})


def write_step(log, step, completions, totals, zero_std_fraction=0.0):
    """A step's rows in both logs; 1.0 is every figure that does not come from the completions."""
    log.write_completions(step, completions, totals, [[]] * len(totals), zero_std_fraction)
    log.write_step(step, {name: 1.0 for name in METRICS if name not in (*log.rates, "step", "time")})


def test_a_log_knows_its_end_whether_resumed_or_not(tmp_path):
    """And refuses other columns than it has: nothing may stand under a wrong name."""
    log, text = RunLog(tmp_path, 8, prompts=True), "CO₂\ra"
    for step in (1, 2):
        write_step(log, step, [Completion(ROW, text, None, 9, False)] * 2, [0.1, 0.5])
        contents = {name: (tmp_path / name).read_bytes() for name in ("metrics.csv", "completions.csv")}
        ends = {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in contents.items()}
        assert log.sync() == ends
        log = RunLog(tmp_path, 8, prompts=True)
        assert log.sync() == ends and [len(log.reward_history), len(log.pace.step_s)] == [step, step]
    assert [row["completion"] for row in read_csv(tmp_path / "completions.csv")] == [text] * 4
    with pytest.raises(ValueError, match="completions.csv has the columns step, .*, prompt, and this run has"):
        RunLog(tmp_path, 8)


EQUAL, FINE, NONE, LOST = (0.5, 1.0, 0.9), (0.5, 0.9, 0.9), (math.nan, 0.0, 0.9), (0.5, 1.0, 0.0)


@pytest.mark.parametrize(
    ("warn", "history", "words"),
    [
        (parse_rate_warning, [0.1] * 5, "only 0.10"),
        (parse_rate_warning, [0.95] * 10 + [0.7] * 5, "fell to 0.70"),
        (parse_rate_warning, [0.95] * 10 + [0.90] * 5, None),
        (reward_warning, [EQUAL] * 4, None),
        (reward_warning, [FINE] * 3 + [EQUAL] * 5, "nothing is learned"),
        (reward_warning, [EQUAL] * 4 + [FINE] + [EQUAL] * 4, None),
        (reward_warning, [FINE, NONE], "the reward is nan"),
        (reward_warning, [NONE, FINE], None),
        (reward_warning, [FINE] + [EQUAL] * 3 + [LOST] * 10, "Nothing was learned for 13 steps"),
        (reward_warning, [FINE] + [LOST] * 9, "nothing is learned"),
        (reward_warning, [LOST] * 20, "nothing is learned"),  # it never could answer
        (partial(reward_warning, total_steps=3), [EQUAL] * 2, None),
        (partial(reward_warning, total_steps=3), [EQUAL] * 3, "in every step of this run: nothing was learned"),
        (partial(reward_warning, total_steps=3), [EQUAL, FINE, EQUAL], None),
    ],
)
def test_warnings(warn, history, words):
    warning = warn(history)
    assert warning is None if words is None else words in warning


POEM = "<|channel|>final<|message|>A poem<|return|>"
UNREAD = ("<|channel|>analysis<|message|>Hm", "<|channel|>final<|message|> ")


def test_garbage_that_earns_more_is_boxed_once_and_equal_rewards_are_warned_of_again(tmp_path, caplog):
    """Rows without actions are answered by words in the final channel, not by an empty one."""
    free, log = dataclasses.replace(ROW, rewards=()), RunLog(tmp_path, 40)
    completions = [Completion(free, text, None, 9, False) for text in (POEM, *UNREAD, UNREAD[0])]
    for step in range(1, 31):
        write_step(log, step, completions, [0.1, 0.5, 0.6, math.nan], zero_std_fraction=1.0)
        assert ("garbage is being learned" in caplog.text) is (step >= 10)
    assert caplog.text.count("nothing is learned") == 3, "after step 5, and again every WARN_EVERY steps"
    (message,) = (record.getMessage() for record in caplog.records if "garbage" in record.getMessage())
    lines = message.splitlines()[1:]
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 100, "a box that fits into a terminal"
    assert "earned 0.45 more than the others" in message


def test_garbage_is_compared_inside_its_groups():
    """A hard prompt whose answers all earn little, and an unreadable one that is its worst: nothing is wrong there."""
    easy, hard = (dataclasses.replace(ROW, number=number) for number in (1, 2))
    read = [Completion(row, POEM, action, 9, False) for row in (easy, hard) for action in (0, 1, None)]
    assert garbage_gains(read, [-0.1, -0.1, -0.4, -9.0, -9.0, -9.9]) == pytest.approx([-0.3, -0.9])
    assert garbage_gains(read[1:3] + read[4:], [0.3, 0.3, 0.1, 0.3]) == pytest.approx([0.0, 0.2]), "equal is no gain"
    assert garbage_gains(read[:2] + read[5:], [1.0, 2.0, 3.0]) == [], "a group of one kind alone says nothing"
    assert garbage_gains(read, [math.nan, math.nan, 1.0, math.nan, 2.0, 3.0]) == [1.0], "nor does what was left out"
    assert garbage_gains(read[:3], [0.1 + 0.2, 0.1 + 0.2, 0.3]) == [0.0], "nor rounding"


@pytest.mark.parametrize(
    ("steps", "warns", "reason"),
    [
        ([[0.2, 0.2]] * 10, True, "all groups pay garbage more"),
        ([[]] * 6 + [[0.2]] * 4, False, "four groups are too few"),
        ([[-0.2, -0.1]] * 10, False, "less than answers"),
        ([[1.0, -0.9]] * 10, False, "more in one group, less in the next: chance"),
        ([[1.0, -0.9], [0.9, 0.8]] * 5 + [[0.7] * 40], True, "more, and too often for chance"),
        ([[0.3] * 3] * 10 + [[-0.3] * 3] * 10, False, "the last ten steps count"),
    ],
)
def test_when_garbage_is_warned_about(steps, warns, reason):
    assert (garbage_warning(steps) is not None) is warns, reason


def times(*step_s, **eval_s):
    """Rows of metrics.csv with these times, and one more with that of an evaluation."""
    return [{"step_s": str(value), "eval_s": ""} for value in step_s] + ([{"step_s": "", **eval_s}] if eval_s else [])


@pytest.mark.parametrize(
    ("rows", "total", "eval_steps", "seconds"),
    [
        (times(10, 10), 10, 0, math.nan),  # too few to know
        (times(900, 10, 10), 10, 0, 70),  # the first step loads: a median
        (times(*[99] * 20, *[1] * 10), 40, 0, 37),  # the last ten count
        (times(1, 1, 1, eval_s="100"), 10, 4, 7 + 3 * 100),  # steps 4 and 8, and the end
        (times(1, 1, 1, eval_s=100.0), 8, 4, 5 + 2 * 100),  # the last step is evaluated once
    ],
)
def test_seconds_left_after_step_3(rows, total, eval_steps, seconds):
    assert Pace(total, eval_steps, rows).seconds_left(LEAST) == pytest.approx(seconds, nan_ok=True)


@pytest.mark.parametrize(
    ("step_s", "words"),
    [
        (60.0, "about 1 h 40 min left, until 13:40"),
        (0.1, "about 10 s left, until 12:00"),
        (600.0, "about 16 h 40 min left, until Tue 03 Mar 04:40"),
    ],
)
def test_the_time_left_has_the_hour_at_which_it_ends(step_s, words):
    noon = time.mktime((2026, 3, 2, 12, 0, 0, 0, 0, -1))
    assert Pace(103, 0, times(*[step_s] * 3)).left(3, noon) == words
