# SPDX-License-Identifier: Apache-2.0
"""The logs of a run: rows that read back, and warnings about what they hold."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import numpy as np
import pytest
from helpers import read_csv
from run_folders import ROW

from grpo.output.logs import (
    LEAST_STEPS,
    METRICS,
    FunctionLog,
    Pace,
    RunLog,
    parse_rate_warning,
    reward_warning,
)
from grpo.reward.scoring import Completion
from grpo.settings.table import Settings


def write_step(log, step, completions, totals, zero_std_fraction=0.0):
    """A step's rows in both logs; 1.0 is every figure that does not come from the completions."""
    rates = log.write_completions(step, completions, totals, [[]] * len(totals), zero_std_fraction)
    log.write_step(step, {name: 1.0 for name in METRICS if name not in ("step", "time")} | rates)


def test_a_log_knows_its_end_whether_resumed_or_not(tmp_path):
    """And refuses other columns than it has: nothing may stand under a wrong name."""
    log, text = RunLog(tmp_path, Settings(TOTAL_STEPS=8, LOG_PROMPTS=True)), "CO₂\ra"
    for step in (1, 2):
        write_step(log, step, [Completion(ROW, text, None, 9, False)] * 2, [0.1, 0.5])
        contents = {name: (tmp_path / name).read_bytes() for name in ("metrics.csv", "completions.csv")}
        ends = {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in contents.items()}
        assert log.sync() == ends
        log = RunLog(tmp_path, Settings(TOTAL_STEPS=8, LOG_PROMPTS=True))
        assert log.sync() == ends and [len(log.history["reward"]), len(log.pace.step_s)] == [step, step]
    assert [row["completion"] for row in read_csv(tmp_path / "completions.csv")] == [text] * 4
    with pytest.raises(ValueError, match="completions.csv has the columns step, .*, prompt, and this run has"):
        RunLog(tmp_path, Settings(TOTAL_STEPS=8))


def test_an_evaluated_figure_keeps_the_digits_of_evaluation_json(tmp_path):
    """The report draws both: a reward of -1,999,996 in euros fell to -2,000,000 wherever it came from this log."""
    log = RunLog(tmp_path, Settings())
    rates = log.write_completions(1, [Completion(ROW, "[1]", 1, 9, False)], [0.5], [[]], 0.0)
    log.write_step(1, dict.fromkeys(METRICS.keys() - {"step", "time"}, 1.0) | rates | {"heldout_reward": -1999996.25})
    assert float(read_csv(tmp_path / "metrics.csv")[0]["heldout_reward"]) == -1999996.25


class Silent:
    def __str__(self):
        return 1 / 0


def test_whatever_a_function_logs_is_written(tmp_path):
    """In the middle of a run nothing that cannot be written as JSON or UTF-8 may end it."""
    circle = []
    circle.append(circle)
    for value, read in (
        ({"a": np.arange(2), "b": math.nan}, {"a": [0, 1], "b": pytest.approx(math.nan, nan_ok=True)}),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ({np.int64(4): 3}, "{4: 3}" if np.__version__ < "2" else "{np.int64(4): 3}"),
        (circle, "[[...]]"),
        (Silent(), "its text cannot be made: ZeroDivisionError"),
        ("half \ud800", "half \ud800"),
    ):
        logged = FunctionLog(1)
        logged.log_extra("seen", [value])
        log = RunLog(tmp_path, Settings(REWARDS="my:own"), ["own"])
        log.write_completions(1, [Completion(ROW, "x", None, 9, False)], [0.1], [[0.1]], 0.0, logged=logged)
        assert json.loads(read_csv(tmp_path / "completions.csv")[-1]["log_extra"]) == {"seen": read}


def test_a_file_may_have_a_name_that_is_not_utf_8(tmp_path):
    row = dataclasses.replace(ROW, file="d\udcff.csv")
    write_step(RunLog(tmp_path, Settings()), 1, [Completion(row, "x", None, 9, False)], [0.1])
    assert read_csv(tmp_path / "completions.csv")[0]["prompt_id"] == f"d\\udcff:{row.number}"


def test_only_a_simulated_run_has_columns_of_the_plant(tmp_path):
    """And a run keeps those that it began with, also where the simulator comes or goes in the middle."""
    figures = {"plant_regret", "plant_unserved_kwh"}
    for name, settings, simulates, expected in (
        ("plant", Settings(), True, figures),
        ("routing", Settings(), False, set()),
        ("maths", Settings(TASK="gsm8k"), True, set()),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for is_simulated in (simulates, not simulates):
            log = RunLog(folder, settings, (), is_simulated)
            write_step(log, 1, [Completion(ROW, "[1]", 1, 9, False)], [0.5])
            assert set(log.metrics.columns) == set(METRICS) - figures | expected


@pytest.mark.parametrize(
    ("warning", "words"),
    [
        (parse_rate_warning([0.1] * 5), "only 0.10"),
        (parse_rate_warning([0.95] * 10 + [0.7] * 5), "fell to 0.70"),
        (parse_rate_warning([0.95] * 10 + [0.90] * 5), None),
        (parse_rate_warning([0.6] * 5 + [0.95] * 5 + [0.7] * 5), "its best was 0.95"),
        (reward_warning([0.5] * 4, [1] * 4), None),
        (reward_warning([0.5] * 8, [0.9] * 3 + [1] * 5), "nothing is learned"),
        (reward_warning([0.5] * 9, [1] * 4 + [0.9] + [1] * 4), None),
        (reward_warning([0.5, math.nan], [0.9, 0]), "the reward is nan"),
        (reward_warning([math.nan, 0.5], [0, 0.9]), None),
    ],
)
def test_warnings(warning, words):
    assert warning is None if words is None else words in warning


def test_a_warning_comes_again_after_ten_steps(tmp_path, caplog):
    log = RunLog(tmp_path, Settings(TOTAL_STEPS=40))
    for step in range(1, 31):
        write_step(log, step, [Completion(ROW, "[1]", 1, 9, False)] * 2, [0.5, 0.5], zero_std_fraction=1.0)
    assert caplog.text.count("nothing is learned") == 3


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
    assert Pace(total, eval_steps, rows).seconds_left(LEAST_STEPS) == pytest.approx(seconds, nan_ok=True)


def test_seconds_left_where_one_step_of_four_generates():
    assert Pace(40, 0, times(*[7, 1, 1, 1] * 4), 4).seconds_left(16) == pytest.approx(24 * 2.5)
    assert math.isnan(Pace(40, 0, times(7, 1, 1), 4).seconds_left(3))


@pytest.mark.parametrize(
    ("step_s", "words"), [(60.0, "about 1 h 40 min left"), (0.1, "about 10 s left"), (6.0, "about 10 min left")]
)
def test_the_time_left_in_words(step_s, words):
    assert Pace(103, 0, times(*[step_s] * 3)).time_left(3) == words
