# SPDX-License-Identifier: Apache-2.0
"""What a start locks and leaves behind, and what it says where nothing can be written."""

from __future__ import annotations

import errno
import os

import pytest
from helpers import run_python
from run_folders import write_steps
from runs import environment

import train_grpo
from grpo.output import layout
from grpo.output.folder import prepare_run
from grpo.output.layout import lock_run
from grpo.preflight.checks import preflight, run_records
from grpo.process.ending import Outcome


@pytest.fixture
def start(monkeypatch, tmp_path, quiet):
    """Starts a run in tmp_path/run: (exit code, the run's state as `launch` gets it, None where it gets none).
    `before` is called before the lock is taken, `meanwhile` before the checks."""

    def start_once(before=lambda: None, meanwhile=lambda: None, arguments=(), **settings):
        launched = []
        with monkeypatch.context() as patch:
            for name, value in environment(tmp_path / "run", **settings).items():
                patch.setenv(name, value)
            patch.setattr(layout, "lock_run", lambda path: [before(), lock_run(path)][1])
            patch.setattr(train_grpo, "preflight", lambda *arguments: [meanwhile(), preflight(*arguments)][1])
            patch.setattr(train_grpo, "launch", lambda result: launched.append(result.state) or Outcome(0))
            code = train_grpo.main(arguments)
        return code, launched[0] if launched else None

    return start_once


def test_a_start_locks_first_and_then_checks_what_is_there(start, tmp_path, capfd):
    path, locks = tmp_path / "run", []

    def run_of_two_steps():
        """Another process had the same settings and the lock."""
        result = preflight(os.environ)
        prepare_run(result.state, result.settings, run_records(result))
        write_steps(path, [1, 2], 12, saved=[2])

    code, state = start(run_of_two_steps, lambda: locks.append(lock_run(path)))
    assert (code, state.step) == (0, 2), "not from step 0 over what is there"
    assert locks == [None], "nobody else writes there while the checks read it"
    lock = lock_run(path)
    assert start() == (2, None) and "another process is writing there" in capfd.readouterr().err
    assert start(arguments=["--check"])[0] == 0, "which writes nothing"
    lock.release()
    assert start(OVERWRITE=1)[0] == 0
    assert "DELETES the run that is there (OVERWRITE=1)\n" in capfd.readouterr().out


def test_a_refused_start_leaves_nothing_behind(start, tmp_path, capfd):
    """No folder above OUTPUT_DIR and no lock; but those of an earlier run."""
    deep = tmp_path / "new" / "run"
    for wrong in ({"MODEL_ID": "/nowhere"}, {"SEED": "x"}):
        assert start(**{"OUTPUT_DIR": deep} | wrong)[0] == 2
        assert not list(tmp_path.iterdir()), capfd.readouterr().err

    def interrupted():
        assert (deep.parent / ".run.lock").exists()
        raise KeyboardInterrupt

    assert start(meanwhile=interrupted, OUTPUT_DIR=deep)[0] == 130 and not list(tmp_path.iterdir())
    assert "interrupted before the run began: nothing was written to OUTPUT_DIR" in capfd.readouterr().err
    (tmp_path / ".run.lock").touch()
    assert start(MODEL_ID="/nowhere")[0] == 2 and [path.name for path in tmp_path.iterdir()] == [".run.lock"]


def test_a_disk_that_is_full_before_the_first_file_is_named(start, monkeypatch, tmp_path, capfd, caplog):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert start(full)[0] == 2
    assert ".run.lock cannot be taken ([Errno 28] No space left on device)" in capfd.readouterr().err
    assert start(meanwhile=full)[0] == 1, "as `> nohup.out` raises it"
    assert "output: No space left on device before the run began" in capfd.readouterr().err
    launch = train_grpo.launch
    monkeypatch.setattr("grpo.output.durable.os.replace", full)
    for name, value in environment(tmp_path / "run").items():
        monkeypatch.setenv(name, value)
    assert launch(preflight(os.environ)).code == 1
    assert "no space left on a disk (`df -h`" in caplog.text and "Traceback" not in caplog.text
    assert not list((tmp_path / "run").iterdir()), "no stray .tmp"


def test_what_torch_compiles_lies_in_the_users_cache(tmp_path):
    program = "import sys, os, grpo; assert 'torch' not in sys.modules; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    assert run_python("-c", program, XDG_CACHE_HOME=tmp_path).stdout.strip() == str(tmp_path / "torchinductor")
