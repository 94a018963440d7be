# SPDX-License-Identifier: Apache-2.0
"""The report of a run that goes on. Run: python -m pytest tests/evaluate/test_refresh.py"""

from __future__ import annotations

import subprocess
import time

from run_folders import metrics_row, write_run

from grpo.evaluate import refresh
from grpo.evaluate.refresh import ReportRefreshCallback


def test_the_report_is_written_beside_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(refresh, "REFRESH_S", 0.0)
    folder = write_run(tmp_path / "run", [metrics_row(1), metrics_row(2)])
    callback = ReportRefreshCallback(folder)
    callback.on_step_begin(None, None, None)
    assert callback.writer.wait() == 0 and "training report" in (folder / "report.html").read_text(encoding="utf-8")


def test_one_at_a_time_at_most_every_few_minutes_and_none_after_training(tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen

    def sleep(command, **options):
        started.append(command)
        return popen(["sleep", "1000"], **options)

    monkeypatch.setattr(subprocess, "Popen", sleep)
    callback = ReportRefreshCallback(tmp_path)
    for seconds, count in ((200.0, 0), (301.0, 1), (301.0, 1)):  # The first report is not finished the third time.
        callback.started = time.monotonic() - seconds
        callback.on_step_begin(None, None, None)
        assert len(started) == count
    callback.on_train_end(None, None, None)
    assert callback.writer.returncode not in (None, 0)
