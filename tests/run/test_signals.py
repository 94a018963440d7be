# SPDX-License-Identifier: Apache-2.0
"""Runs that are asked to end: Ctrl-C, SIGTERM, SIGHUP, a lost terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import sys
import time

import pytest
from conftest import ROOT, SCRIPT
from runs import ASKED, environment, finish, go_on, has_line, start_held, wait_until

import train_grpo
from grpo.run.folder import COMPLETE, last_checkpoint
from grpo.run.signals import StopRequest


def test_a_lost_terminal_does_not_keep_the_run_from_saving(tiny, tmp_path):
    """The real thing: the run on a terminal of its own, whose other end is closed. Every write to it fails then, and the
    kernel sends SIGHUP."""
    folder = tmp_path / "run"
    child, terminal = pty.fork()
    if not child:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, str(SCRIPT)], environment(folder, SAVE_STEPS=99, HOLD_AT=2))
    os.set_blocking(terminal, False)
    while not folder.with_name("held").exists():
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        time.sleep(0.01)
    os.close(terminal)
    wait_until(lambda: has_line(folder))
    go_on(folder)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    log = (folder / "training.log").read_text(encoding="utf-8")
    assert last_checkpoint(folder)[0] == 2 and (tmp_path / "run.zip").exists()
    assert "the same command continues from step 2" in log and "Traceback" not in log


def test_neither_nohup_nor_a_reader_that_is_gone_ends_the_run(tiny, tmp_path):
    """`nohup train_grpo.py | tee log`, the terminal is closed and the reader ends."""
    folder = tmp_path / "run"
    # What Python cannot flush at its end is exit code 120.
    process = start_held(folder, 1, "nohup", TOTAL_STEPS=3, PYTHONUNBUFFERED="")
    process.send_signal(signal.SIGHUP)
    process.stdout.close()
    go_on(folder)
    assert process.wait() == 0 and (folder / COMPLETE).exists() and has_line(folder, "complete: 3 steps")


def test_a_second_hang_up_is_ignored_and_a_second_ctrl_c_is_not():
    """Shell and kernel both send SIGHUP."""
    request = StopRequest()
    request.at_once = False
    request.receive(signal.SIGHUP)
    request.receive(signal.SIGHUP)
    assert request.signal == signal.SIGHUP
    with pytest.raises(KeyboardInterrupt) as stop:
        request.receive(signal.SIGINT)
    assert stop.value.args == (signal.SIGINT,) and request.signal == signal.SIGHUP


def test_a_second_ctrl_c_ends_the_run_with_one_line(tiny, tmp_path):
    """Held in its second step, the run ends by nothing else."""
    folder = tmp_path / "run"
    process = start_held(folder, 1, SAVE_STEPS=1)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: has_line(folder), process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130 and "Traceback" not in output and "KeyboardInterrupt" not in output
    assert output.rstrip().endswith("stopped at once; the same command continues from step 1")
    assert len(output.split(ASKED)[1].split("\n")) <= 3


@pytest.mark.parametrize("moment", ["preflight", "launch"])
def test_ctrl_c_before_the_run_begins_is_one_line(monkeypatch, tmp_path, capsys, tiny, moment):
    def stop(*arguments):
        raise KeyboardInterrupt

    for name, value in environment(tmp_path / "run").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train_grpo, moment, stop)
    assert train_grpo.main([]) == 130
    assert capsys.readouterr().err.strip() == "interrupted before the run began: nothing was written to OUTPUT_DIR"
    assert not (tmp_path / "run").exists()
