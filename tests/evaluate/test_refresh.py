# SPDX-License-Identifier: Apache-2.0
"""The report of a run that goes on. Run: python -m pytest tests/evaluate/test_refresh.py"""

from __future__ import annotations

import subprocess
import time

import pytest
from run_folders import metrics_row, write_run

from grpo.evaluate import refresh
from grpo.evaluate.refresh import ReportRefreshCallback


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(refresh, "REFRESH_S", 0.0)
    return write_run(tmp_path / "run", [metrics_row(1), metrics_row(2)])


def test_the_report_is_written_beside_the_run(folder):
    callback = ReportRefreshCallback(folder)
    callback.on_step_begin(None, None, None)
    assert callback.writer.wait() == 0 and "training report" in (folder / "report.html").read_text(encoding="utf-8")


def test_one_at_a_time_at_most_every_few_minutes_and_none_after_training(folder, monkeypatch):
    started = []
    sleep = lambda command, **options: started.append(command) or popen(["sleep", "1000"], **options)  # noqa: E731
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", sleep)
    callback = ReportRefreshCallback(folder)
    for _ in range(3):
        callback.on_step_begin(None, None, None)
    assert len(started) == 1 and started[0][-1] == str(folder)
    callback.on_train_end(None, None, None)
    assert callback.writer.returncode not in (None, 0)
    monkeypatch.setattr(refresh, "REFRESH_S", 300.0)
    for seconds, count in ((200.0, 1), (301.0, 2)):
        callback.started = time.monotonic() - seconds
        callback.on_step_begin(None, None, None)
        assert len(started) == count
    callback.on_train_end(None, None, None)


def test_a_report_that_cannot_be_started_fails_no_step(folder, monkeypatch):
    def fails(*arguments, **options):
        raise FileNotFoundError("nice")

    monkeypatch.setattr(subprocess, "Popen", fails)
    callback = ReportRefreshCallback(folder)
    callback.on_step_begin(None, None, None)
    callback.on_train_end(None, None, None)
