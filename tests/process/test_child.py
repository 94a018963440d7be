# SPDX-License-Identifier: Apache-2.0
"""Programs that a script starts: a signal to the script ends them as they promise, and their exit codes come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from helpers import CLEAN, ROOT
from runs import wait_until

from grpo.process.child import run_child

# A child that counts its signals, says when it listens, and ends a moment after the first one.
CHILD = """
import signal, sys, time
received = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: received.append(number))
print("listening", flush=True)
while not received:
    time.sleep(0.01)
time.sleep(0.3)
print("saved", received, flush=True)
sys.exit(128 + received[0])
"""
PARENT = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Under `nohup` it is ignored.
from concurrent.futures import ThreadPoolExecutor
from grpo.process.child import forwarding_signals, run_child
command = [sys.executable, "-c", sys.argv[2]]
if sys.argv[1] == "pool":
    with forwarding_signals(), ThreadPoolExecutor(1) as pool:
        codes = list(pool.map(run_child, [command, command], [{}, {}]))
else:
    code = run_child(command, {})
    print("next", code)
    run_child(command, {})
"""


def test_exit_codes_and_output_come_back(tmp_path):
    for code, expected in (("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
        assert run_child([sys.executable, "-c", code], {}) == expected
    with (tmp_path / "log").open("w") as log:
        assert run_child([sys.executable, "-c", "import os; print(os.environ['A'])"], {"A": "b"}, log) == 0
    assert (tmp_path / "log").read_text() == "b\n"


def start(folder, kind):
    """(PARENT of this kind, whose child listens by now, the file that both write to)."""
    output, command = folder / "output", [sys.executable, "-c", PARENT, kind, CHILD]
    with output.open("w") as file:
        environ = CLEAN | {"PYTHONPATH": str(ROOT)}
        parent = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder, env=environ, process_group=0)
    wait_until(lambda: "listening" in output.read_text() or parent.poll() is not None)
    return parent, output


@pytest.mark.parametrize("kind", ["plain", "pool"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_child_once_and_nothing_else_is_started(tmp_path, kind, number):
    """A terminal sends Ctrl-C to the whole group of processes: the child must not receive it a second time."""
    parent, output = start(tmp_path, kind)
    os.killpg(parent.pid, number)
    assert parent.wait() == 128 + number, output.read_text()
    lines = output.read_text().split("\n")
    assert lines == ["listening", f"saved [{int(number)}]", ""], "no traceback, and no second child"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a child that its parent was killed")
def test_a_killed_script_leaves_no_child(tmp_path):
    parent, output = start(tmp_path, "plain")
    parent.kill()
    wait_until(lambda: "saved" in output.read_text())
    assert f"saved [{int(signal.SIGTERM)}]" in output.read_text(), "it ends as it promises"
