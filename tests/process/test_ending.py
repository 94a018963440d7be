# SPDX-License-Identifier: Apache-2.0
"""How programs end: whose output nobody can take, and that are interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import CLEAN, ROOT, run_python
from runs import wait_until

CODE = """
import sys
from grpo.process.ending import end_quietly
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("length", [9, 100000])
def test_answers_that_a_full_disk_cuts_off_are_no_success(length):
    """`ask.py --csv questions.csv > answers.csv`"""
    code = CODE.replace("end_quietly", "run_script").replace("or 5", "or 0")
    with open("/dev/full", "w") as full:
        environ = CLEAN | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
        command = [sys.executable, "-c", code, str(length)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environ)
    assert (done.returncode, done.stderr) == (1, b"output: No space left on device\n")


def test_a_reader_that_is_gone_is_the_signal_of_a_pipe():
    command = f"{sys.executable} -c '{CODE}' 1000000 | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=CLEAN | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 141 and not done.stderr, done.stderr


LEFT_BEHIND = """
import atexit, multiprocessing, sys, threading, time
from grpo.process import ending
ending.LEFT_BEHIND_S = 1
def main():
    {left}
    return 3
atexit.register(print, "uploaded", flush=True)
sys.exit(ending.end_quietly(main))
"""
THREAD = "threading.Thread(target=time.sleep, args=(600,), name='judge').start()"
ENDED = "still running 1 s after the end, and ended now: judge (a reward function may have left it)\n"


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (THREAD, ENDED),
        (THREAD.replace("threading.Thread", "multiprocessing.get_context('fork').Process"), ENDED),
        (THREAD.replace("600", "0.1"), ""),
        (THREAD.replace("name='judge'", "daemon=True"), ""),
    ],
)
def test_what_a_reward_function_leaves_behind_does_not_keep_a_program_alive(left, message):
    done = run_python("-c", LEFT_BEHIND.format(left=left), code=3)
    assert (done.stdout, done.stderr) == ("uploaded\n", message)


FAILURES = """
import sys
from grpo.reward.calling import RewardError
from grpo.process.ending import UnloadableModel, run_script
from grpo.common import InputError
def fail():
    raise {error}
sys.exit(run_script(fail))
"""


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        ("InputError('a: no. Do b', 'c: no. Do d')", 2, "a: no. Do b\nc: no. Do d\n"),
        ("UnloadableModel('no weights')", 1, "model: no weights\n"),
        ("RewardError('REWARDS: f raised it')", 1, "REWARDS: f raised it\n"),
        ("OSError(28, 'No space left on device', 'out.json')", 1, "out.json: No space left on device\n"),
    ],
)
def test_a_script_names_what_the_user_can_mend(error, code, shown):
    assert run_python("-c", FAILURES.format(error=error), code=code).stderr == shown


SCRIPT = """
import pathlib, sys, time
from grpo.process.ending import run_script
def main():
    try:
        print("working", flush=True)
        time.sleep(60)
    finally:
        pathlib.Path("cleaned").touch()
        time.sleep(60 * (sys.argv[1] == "twice"))
sys.exit(run_script(main))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_script_cleans_up_and_says_so(tmp_path, number):
    environ = CLEAN | {"PYTHONPATH": str(ROOT)}
    for times in ("once", "twice"):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, times], env=environ, cwd=tmp_path, stdout=-1, stderr=-1, text=True,
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # Under nohup SIGHUP is ignored.
        )  # fmt: skip
        assert process.stdout.readline() == "working\n"
        process.send_signal(number)
        if times == "twice":
            wait_until((tmp_path / "cleaned").exists)
            process.send_signal(number)
        error = process.communicate()[1]
        expected = (128 + number, "\ninterrupted\n") if times == "once" else (-number, "")
        assert (process.returncode, error) == expected and (tmp_path / "cleaned").exists()
        (tmp_path / "cleaned").unlink()
