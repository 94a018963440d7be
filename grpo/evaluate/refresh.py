# SPDX-License-Identifier: Apache-2.0
"""The report of a run that goes on, written again every few minutes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

from transformers.trainer_callback import TrainerCallback

from grpo.settings import ROOT

REFRESH_S = 300.0  # seconds between two reports


class ReportRefreshCallback(TrainerCallback):
    """Starts scripts/report.py in a process of its own, with the lowest priority, so that no step waits for it or fails
    with it. The entry writes the last report."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, time.monotonic()
        self.writer: subprocess.Popen | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        is_writing = self.writer is not None and self.writer.poll() is None
        if is_writing or time.monotonic() - self.started < REFRESH_S:
            return
        self.started = time.monotonic()
        command = ["nice", "-n", "19", sys.executable, str(ROOT / "scripts" / "report.py"), str(self.folder)]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with contextlib.suppress(OSError):  # no `nice`, no memory for another process
            self.writer = subprocess.Popen(command, **streams)

    def on_train_end(self, args, state, control, **kwargs):
        if self.writer is not None:
            self.writer.terminate()
            self.writer.wait()
