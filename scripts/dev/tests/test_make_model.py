# SPDX-License-Identifier: Apache-2.0
"""scripts/dev/make_model.py: what it refuses, and how the making of its rows ends."""

import os
import signal
import subprocess
import sys
import time

import make_model
import pytest
from helpers import CLEAN, ROOT

from grpo.common import InputError


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("full --out {tmp}/new", "arguments are required: --tokenizer"),
        ("full --out {tmp}/new --tokenizer {tmp}", "No such file or directory: '{tmp}/tokenizer.json'"),
        ("tiny --out {tmp}", "exists and is not empty"),
        ("tiny --out {tmp}/file/model", "Not a directory"),
    ],
)
def test_errors(command, message, tmp_path, capsys):
    (tmp_path / "file").write_text("keep me")
    with pytest.raises((InputError, SystemExit)) as caught:
        make_model.main(command.format(tmp=tmp_path).split())
    assert getattr(caught.value, "code", 2) == 2, "argparse ends by itself, run_script for the rest"
    assert message.format(tmp=tmp_path) in f"{caught.value} {capsys.readouterr().err}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


INTERRUPTED = """
import multiprocessing.process, os, signal, sys, time
from scripts.dev import warmup_rows
from grpo.process.ending import run_script

start, begun = multiprocessing.process.BaseProcess.start, []

def start_and_strike(process):
    start(process)
    begun.append(process)
    if len(begun) == 2:
        time.sleep(3 * (sys.argv[1] == "SIGKILL"))  # Both ask for their end with the parent, on a busy machine too.
        os.kill(os.getpid() if sys.argv[2] == "self" else begun[0].pid, signal.Signals[sys.argv[1]])
        time.sleep(0.01)

multiprocessing.process.BaseProcess.start = start_and_strike
os.cpu_count = lambda: 3
if sys.argv[2] == "first of three":  # The pool ends the third before it has begun.
    begin = warmup_rows.begin_worker
    warmup_rows.begin_worker = lambda: (time.sleep(2 * (len(begun) == 2)), begin())
sys.exit(run_script(lambda: len(warmup_rows.make_rows("compact", 100, 1, 1.0)[1])))
"""


@pytest.mark.parametrize(
    ("name", "target", "code"),
    [
        ("SIGINT", "self", 130),
        ("SIGTERM", "self", 143),
        ("SIGKILL", "self", -9),
        ("SIGKILL", "first", 1),
        ("SIGKILL", "first of three", 1),
    ],
)
def test_no_process_outlives_the_one_that_makes_rows(name, target, code, tmp_path):
    """An interrupt between the starts of two processes left one that waited for ever, and a kill left all."""
    command = [sys.executable, "-c", INTERRUPTED, name, target]
    environ = CLEAN | {"PYTHONPATH": str(ROOT)}
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(command, env=environ, stderr=file, start_new_session=True)
    assert process.wait(60) == code
    assert ("Traceback" in errors.read_text()) == (target != "self")
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("a process goes on")
    except ProcessLookupError:
        pass
