# SPDX-License-Identifier: Apache-2.0
"""How programs end: by a result, a failure, a signal, or because nobody takes their output."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import CLEAN, ROOT, run_python
from runs import wait_until

from grpo.common import InputError
from grpo.learn.finite import NotFinite
from grpo.process.ending import Finished, StartedRun, UnloadableModel, decide_outcome, run_script
from grpo.process.heartbeat import RankLost
from grpo.reward.calling import RewardError
from grpo.rollout.engine import EngineError
from grpo.rollout.parity import MismatchGrown
from grpo.settings.table import Settings

ENVIRON = CLEAN | {"PYTHONPATH": str(ROOT)}
CODE = """
import sys
from grpo.process.ending import {end}
sys.exit({end}(lambda: print("x" * int(sys.argv[1])) or 5))
"""
CUT_OFF = b"output: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    ("end", "length", "code", "error"),
    [
        ("end_quietly", 9, 5, b""),  # A run that has ended: only its last words are lost.
        ("end_quietly", 100_000, 1, None),  # The work itself was cut short.
        ("run_script", 9, 1, CUT_OFF),  # ask.py --csv questions.csv > answers.csv
        ("run_script", 100_000, 1, CUT_OFF),
    ],
)
def test_a_full_disk_takes_the_output(end, length, code, error):
    command = [sys.executable, "-c", CODE.format(end=end), str(length)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=-1, env=ENVIRON | {"PYTHONUNBUFFERED": ""})
    assert done.returncode == code
    assert b"No space left" in done.stderr if error is None else done.stderr == error


@pytest.mark.parametrize("end", ["end_quietly", "run_script"])
def test_a_reader_that_is_gone_is_the_signal_of_a_pipe(end):
    """As in `--help | head -1`."""
    code = CODE.format(end=end)
    command = f"{sys.executable} -c '{code}' 1000000 | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=ENVIRON)
    assert done.returncode == 141 and not done.stderr, done.stderr


@pytest.mark.parametrize("end", ["end_quietly", "run_script"])
def test_streams_that_were_closed_are_no_failure(end):
    """As by `>&-`. A run's files do not get their numbers, under which libraries would write into them."""
    code = f"import os, sys, grpo.process.ending as e; sys.exit(e.{end}(lambda: print(1) or os.open('/', 0)))"
    command = f'{sys.executable} -c "{code}" <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", command], env=ENVIRON).returncode >= 3


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


AGAIN = "the same command starts at step 0"


@pytest.mark.parametrize(
    ("end", "code", "of_a_script", "of_a_run"),
    [
        (InputError("a: no. Do b", "c: no"), 2, "a: no. Do b; c: no", None),
        (UnloadableModel("no weights"), 1, "model: no weights", "model: no weights"),
        (MismatchGrown("1 nat"), 3, "PARITY: 1 nat", "PARITY: 1 nat"),
        (EngineError("no memory"), 4, "vLLM: no memory", "vLLM: no memory"),
        (NotFinite("nan"), 1, "training: nan", f"training: nan; {AGAIN}: no checkpoint was saved; where it fails"),
        (RewardError("f raised"), 1, "f raised", f"f raised; when its cause is fixed, {AGAIN}"),
        (OSError(28, "No space", "out"), 1, "out: No space", "no space left on a disk (`df -h` and `df -i`"),
        (PermissionError(13, "No", "out"), 1, "out: No", "the run failed (PermissionError: [Errno 13] No: 'out')"),
        (torch.OutOfMemoryError("full\nx"), 1, "the run failed", "out of memory: full; MICRO_BATCH=3 learns the same"),
        (KeyboardInterrupt(), 130, "interrupted", f"stopped at once; {AGAIN}"),
        (KeyboardInterrupt(signal.SIGTERM), 143, "interrupted", f"stopped at once; {AGAIN}"),
        (RankLost(1, 4, "vLLM: no"), 4, "rank 1 ended: vLLM: no", f"rank 1 ended: vLLM: no; {AGAIN}"),
        (Finished(Path("run"), 5, 9.6), 0, "complete: 5 steps in 10 s.", "complete: 5 steps in 10 s. Adapter: run, "),
        (Finished(Path("run"), 5, 9.6, 15), 143, "interrupted at step 5", f"interrupted at step 5; {AGAIN}"),
        (ZeroDivisionError("x"), 1, "the run failed (Zero", "the run failed (ZeroDivisionError: x); when its"),
    ],
)
def test_how_a_program_ends_decides_its_code_and_words(tmp_path, end, code, of_a_script, of_a_run):
    script, run = decide_outcome(end), decide_outcome(end, StartedRun(tmp_path, Settings(), micro_batch=6))
    assert script.code == code and script.reason.startswith(of_a_script) and "is fixed" not in script.reason
    assert of_a_run is None or (run.code == code and run.reason.startswith(of_a_run))
    assert script.is_fault == of_a_script.startswith("the run failed"), "a traceback only where nobody foresaw it"
    assert run.is_zipped == isinstance(end, (MismatchGrown, EngineError, NotFinite, torch.OutOfMemoryError))


def test_a_script_prints_each_problem_on_a_line(capsys, quiet):
    def fail():
        raise InputError("a: no. Do b", "c: no. Do d")

    assert run_script(fail) == 2 and capsys.readouterr() == ("", "a: no. Do b\nc: no. Do d\n")


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
    for times in ("once", "twice"):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, times], env=ENVIRON, cwd=tmp_path, stdout=-1, stderr=-1, text=True,
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
