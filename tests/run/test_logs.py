# SPDX-License-Identifier: Apache-2.0
"""Logs of a run: rows that read back, warnings. Run: python -m pytest tests/run/test_logs.py"""

from __future__ import annotations

import csv

from grpo.run.logs import CsvLog, parse_rate_warning, trim_csv


def test_logs_survive_carriage_returns(tmp_path):
    path = tmp_path / "completions.csv"
    written = [{"step": 1, "completion": "a\rb"}, {"step": 2, "completion": 'c\r\n"d"'}]
    CsvLog(path, ["step", "completion"]).write(written)
    assert trim_csv(path, 1) == 1
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["step", "completion"], ["1", "a\rb"]]


def test_trimming_a_log(tmp_path):
    path = tmp_path / "completions.csv"
    path.write_text('step,completion\n1,"two\nlines"\n2,b\n3,c\n3,"torn off', encoding="utf-8")
    assert trim_csv(path, 2) == 2
    assert path.read_text(encoding="utf-8") == 'step,completion\n1,"two\nlines"\n2,b\n'
    assert (tmp_path / "completions.superseded.csv").read_text(encoding="utf-8") == "3,c\n3,torn off\n"
    assert trim_csv(path, 2) == 0 and trim_csv(tmp_path / "none.csv", 1) == 0


def test_parse_rate_warnings():
    warn = parse_rate_warning
    assert warn([0.1] * 4) is None, "too early to say"
    assert "only 0.10" in warn([0.1] * 5)
    assert warn([0.95] * 30) is None
    assert "fell to 0.70" in warn([0.95] * 10 + [0.7] * 5)
    assert warn([0.95] * 10 + [0.90] * 5) is None, "noise"
    assert warn([0.2] * 5 + [0.9] * 5) is None, "rising"
