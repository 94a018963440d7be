# SPDX-License-Identifier: Apache-2.0
"""Finished runs with a damaged file are given one more step, and come to what an undamaged run comes to."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from reliability import KINDS
from runs import assert_same_run, environment

import train_grpo
from grpo.run.durable import file_sha256, sealed
from grpo.run.folder import ADAPTER, COMPLETE

# A run whose TOTAL_STEPS is raised stays the same.
SETTINGS = {"PROMPTS_PER_STEP": 1, "NUM_GENERATIONS": 4, "LR_SCHEDULER": "constant", "SAVE_STEPS": 1, "EVAL_SAMPLES": 1}


@pytest.fixture
def run(monkeypatch, tmp_path, tiny, quiet):
    """`train_grpo.main` in this process: exit code."""

    def run_once(folder=tmp_path / "run", **settings):
        for name, value in environment(folder, **SETTINGS | settings).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("grpo.evaluate.page.write_report", lambda folder: None)  # its plots take longer than a step
        code = train_grpo.main([])
        quiet()
        return code

    return run_once


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def finished(made, run, tmp_path):
    """A copy of a run of two steps, and that run when it was given a third one."""
    whole = made / "whole"
    if not whole.exists():
        assert run(whole, TOTAL_STEPS=2) == 0
        shutil.copytree(whole, made / "finished")
        assert run(whole, TOTAL_STEPS=3) == 0
    shutil.copytree(made / "finished", tmp_path / "run")
    return tmp_path / "run", whole


STATES = (ADAPTER, "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STATES)
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_continued(finished, run, name, kind):
    folder, whole = finished
    adapter = (folder / ADAPTER).read_bytes()
    KINDS[kind](folder / "checkpoint-2" / name)
    assert run(TOTAL_STEPS=3, EVAL_SAMPLES=0) == 0
    log = (folder / "training.log").read_text(encoding="utf-8")
    assert f"checkpoint-2: {name} is damaged: set aside, the run continues from step 1" in log
    assert "continuing from step 1" in log and "Traceback" not in log
    assert_same_run(folder, whole)
    assert (folder / "superseded-checkpoint-2" / name).is_file()
    assert (folder / "superseded-adapter-2" / ADAPTER).read_bytes() == adapter


@pytest.mark.parametrize("kind", ["zeroed", "one bit"])
def test_damaged_records_are_measured_again(finished, run, kind):
    folder, whole = finished
    for name in ("evaluation.json", COMPLETE, "best/best.json"):
        KINDS[kind](folder / name)
    os.utime(folder / "checkpoint-1", (4e9, 4e9))  # of a clock that was wrong
    assert run(TOTAL_STEPS=3, SAVE_TOTAL_LIMIT=1) == 0
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    log = (folder / "training.log").read_text(encoding="utf-8")
    assert "evaluation.json is damaged" in log and "Traceback" not in log
    assert_same_run(folder, whole)
    assert json.loads((folder / "evaluation.json").read_text()) == json.loads((whole / "evaluation.json").read_text())
    assert json.loads((folder / COMPLETE).read_text()) == sealed(
        {"steps": 3, "adapter_sha256": file_sha256(folder / ADAPTER)}
    )
