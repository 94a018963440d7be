# SPDX-License-Identifier: Apache-2.0
"""Logs of a run: rows that read back, warnings. Run: python -m pytest tests/run/test_logs.py"""

from __future__ import annotations

import csv
import math

import pytest

from grpo.run.logs import CsvLog, parse_rate_warning, reward_warning, trim_csv


def test_logs_survive_carriage_returns(tmp_path):
    path = tmp_path / "completions.csv"
    written = [{"step": 1, "completion": "a\rb"}, {"step": 2, "completion": 'c\r\n"d"'}]
    CsvLog(path, ["step", "completion"]).write(written)
    trim_csv(path, 1)
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["step", "completion"], ["1", "a\rb"]]


def test_trimming_a_log(tmp_path):
    path = tmp_path / "completions.csv"
    path.write_text('step,completion\n1,"two\nlines"\n2,b\n3,c\n3,"torn off', encoding="utf-8")
    trim_csv(path, 2)
    assert path.read_text(encoding="utf-8") == 'step,completion\n1,"two\nlines"\n2,b\n'
    assert (tmp_path / "completions.superseded.csv").read_text(encoding="utf-8") == "3,c\n3,torn off\n"
    trim_csv(tmp_path / "none.csv", 1)


EQUAL, FINE, NONE = (0.5, 1.0), (0.5, 0.9), (math.nan, 0.0)


@pytest.mark.parametrize(
    ("warn", "history", "words"),
    [
        (parse_rate_warning, [0.1] * 4, None),
        (parse_rate_warning, [0.1] * 5, "only 0.10"),
        (parse_rate_warning, [0.95] * 30, None),
        (parse_rate_warning, [0.95] * 10 + [0.7] * 5, "fell to 0.70"),
        (parse_rate_warning, [0.95] * 10 + [0.90] * 5, None),
        (parse_rate_warning, [0.2] * 5 + [0.9] * 5, None),
        (reward_warning, [], None),
        (reward_warning, [EQUAL] * 4, None),
        (reward_warning, [FINE] * 3 + [EQUAL] * 5, "nothing is learned"),
        (reward_warning, [EQUAL] * 9 + [FINE], None),
        (reward_warning, [EQUAL] * 4 + [FINE] + [EQUAL] * 4, None),
        (reward_warning, [FINE, NONE], "the reward is nan"),
        (reward_warning, [NONE, FINE], None),
    ],
)
def test_warnings(warn, history, words):
    said = warn(history)
    assert said is None if words is None else words in said
