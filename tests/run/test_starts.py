# SPDX-License-Identifier: Apache-2.0
"""Starts in a folder that changes between the checks and the lock, or where nothing can be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from run_folders import metrics_row
from runs import environment

import train_grpo
from grpo.preflight.checks import preflight, run_records
from grpo.run.folder import CHECKPOINT_FILES, COMPLETE, lock_run, prepare_run
from grpo.run.logs import COMPLETIONS, METRICS, CsvLog
from grpo.settings import ROOT


@pytest.fixture
def start(monkeypatch, tmp_path, tiny, quiet):
    """Starts a run in tmp_path/run: (exit code, the run's state as `launch` gets it, None where it gets none). `meanwhile` is
    called after the checks, before the lock."""

    def start_once(meanwhile=lambda: None, **settings):
        launched = []
        with monkeypatch.context() as patch:
            for name, value in environment(tmp_path / "run", **settings).items():
                patch.setenv(name, value)
            patch.setattr(train_grpo, "lock_run", lambda folder: [meanwhile(), lock_run(folder)][1])
            patch.setattr(train_grpo, "launch", lambda result: launched.append(result.run) or 0)
            code = train_grpo.main([])
        return code, launched[0] if launched else None

    return start_once


@pytest.fixture
def other(monkeypatch, tmp_path, tiny):
    """What another process with the same settings leaves after `step` steps; COMPLETE where these are all."""

    def leave(step):
        with monkeypatch.context() as patch:
            for name, value in environment(tmp_path / "run").items():
                patch.setenv(name, value)
            result = preflight(os.environ)
        prepare_run(result.run, result.settings, run_records(result))
        folder, done = tmp_path / "run", range(result.run.step + 1, step + 1)
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        for name in CHECKPOINT_FILES:
            (checkpoint / name).write_text("{}")
        CsvLog(folder / "metrics.csv", METRICS).write(metrics_row(step) for step in done)
        each = range(result.settings.completions_per_step)
        rows = [dict.fromkeys(COMPLETIONS, "x") | {"step": step, "reward": 0.5} for step in done for _ in each]
        CsvLog(folder / "completions.csv", COMPLETIONS).write(rows)
        if step == result.settings.TOTAL_STEPS:
            (folder / COMPLETE).write_text(f'{{"steps": {step}}}')

    return leave


def test_a_start_looks_again_once_it_has_the_lock(start, other, capfd):
    """Another run began, went on or ended while this one checked."""
    code, state = start(lambda: other(2))
    assert (code, state.step) == (0, 2), "not from step 0 over what is there"
    code, state = start()
    assert (code, state.step) == (0, 2) and capfd.readouterr().out.count("checking again") == 1, "nothing had changed"
    code, state = start(lambda: other(6))
    assert code == 2 and state is None and "complete (6 of 6 steps)" in capfd.readouterr().err


def test_overwrite_deletes_no_run_that_ended_during_its_checks(start, other, tmp_path, capfd):
    other(2)
    code, state = start((tmp_path / "run" / COMPLETE).touch, OVERWRITE=1)
    assert code == 2 and state is None and "another process wrote there during the checks" in capfd.readouterr().err
    (tmp_path / "run" / "notes.txt").touch()
    code, state = start(OVERWRITE=1)
    assert code == 0 and state.exists, "it is there since before the checks"
    assert "DELETES the run that is there (OVERWRITE=1), and what no run wrote: notes.txt\n" in capfd.readouterr().out


def test_a_disk_that_is_full_before_the_first_file_is_named(start, monkeypatch, tmp_path, capfd, caplog):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert start(full)[0] == 2
    said = capfd.readouterr().err
    assert "its lock cannot be taken (no space left on the disk of OUTPUT_DIR=" in said and "Traceback" not in said
    launch = train_grpo.launch
    monkeypatch.setattr("grpo.run.folder.os.replace", full)
    for name, value in environment(tmp_path / "run").items():
        monkeypatch.setenv(name, value)
    assert launch(preflight(os.environ)) == 1
    assert "no space left on the disk of" in caplog.text and "inodes" in caplog.text, (
        "on stderr: there is no training.log yet"
    )
    assert "Traceback" not in caplog.text
    assert not list((tmp_path / "run").iterdir()), "no stray .tmp"


@pytest.mark.parametrize("own", [None, "/somewhere/else"])
def test_what_torch_compiles_lies_in_the_users_cache(tmp_path, own):
    environ = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environ |= {"XDG_CACHE_HOME": str(tmp_path)} | ({"TORCHINDUCTOR_CACHE_DIR": own} if own else {})
    program = "import sys, os, grpo; assert 'torch' not in sys.modules; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == (own or str(tmp_path / "torchinductor"))
