# SPDX-License-Identifier: Apache-2.0
"""The exit code of a program whose output nobody can take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CLEAN, ROOT

CODE = """
import sys
from grpo.run.ending import end_quietly
sys.exit(end_quietly(lambda: print("x" * int(sys.argv[1])) or 5))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_of_the_terminal_does_not_change_the_exit_code():
    environ = CLEAN | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", CODE, "9"], stdout=full, stderr=subprocess.PIPE, env=environ)
        assert (done.returncode, done.stderr) == (5, b"")
        done = subprocess.run([sys.executable, "-c", CODE, "100000"], stdout=full, stderr=subprocess.PIPE, env=environ)
    assert done.returncode not in (0, 5) and b"No space left" in done.stderr, "the work itself was cut short"


def test_a_reader_that_is_gone_is_the_signal_of_a_pipe():
    command = f"{sys.executable} -c '{CODE}' 1000000 | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=CLEAN | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 141 and not done.stderr, done.stderr
