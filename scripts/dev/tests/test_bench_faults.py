# SPDX-License-Identifier: Apache-2.0
"""`bench.py faults`: each fault comes in its phase, and a fault that went by unseen or a lost row fails."""

import argparse
import os
import signal
import zipfile
from unittest import mock

import pytest
import torch

from grpo.rollout.engine import EngineError
from scripts.dev import faults, record

ERRORS = {"kill": KeyboardInterrupt, "memory": torch.OutOfMemoryError, "dying": EngineError}


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_fault_comes_in_its_phase(build, monkeypatch, fault):
    """A kill comes at once here, as a KeyboardInterrupt, and a full GPU is pretended."""
    kind, phase = fault.split(":")
    timer = mock.Mock(return_value=mock.Mock(start=mock.Mock(side_effect=KeyboardInterrupt)))
    monkeypatch.setattr(faults.threading, "Timer", timer)
    monkeypatch.setattr(faults, "occupy", mock.Mock(side_effect=torch.OutOfMemoryError))
    trainer = build(TOTAL_STEPS=4, SAVE_STEPS=2)
    with pytest.raises(ERRORS[kind]):
        faults.bench_faults(argparse.Namespace(child=f"{fault}:2", main=lambda arguments: trainer.train()))
    if kind == "kill":
        timer.assert_called_once_with(faults.PHASES[phase][2], os.kill, (os.getpid(), signal.SIGKILL))
    # In the second step's learning, in its checkpoint, or in the rollout that follows.
    assert trainer.state.global_step == {"learn": 1}.get(phase, 2)
    assert trainer.run.engine.llm.asleep == (phase in ("wake", "learn", "save"))


DEAD = "generating failed (RuntimeError: EngineCore died)"
# Exit codes of the four starts, the message of the dying engine's, prompts of the second run's steps, and what bench.py
# returns.
ENDS = [
    ((0, 137, 4, 0), DEAD, "ab", 0),
    ((0, 0, 4, 0), DEAD, "ab", 1),  # The kill went by unseen,
    ((0, 137, 0, 0), DEAD, "ab", 1),  # or the dying engine.
    ((0, 137, 4, 1), DEAD, "ab", 1),  # The same command did not continue.
    ((1, 137, 4, 0), DEAD, "ab", 1),  # The run without a fault failed.
    ((0, 137, 4, 0), "the run failed", "ab", 1),  # It ended of something else.
    ((0, 137, 4, 0), DEAD, "aa", 1),  # A completion is another's,
    ((0, 137, 4, 0), DEAD, "a", 1),  # or a step is missing.
]


@pytest.mark.parametrize(("codes", "message", "prompts", "expected"), ENDS)
def test_faults_must_be_seen_and_continued(tmp_path, monkeypatch, codes, message, prompts, expected):
    """A kill and a dying engine, with runs that are pretended: each start writes the whole run."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    monkeypatch.setattr(faults, "SAVE_EVERY", 1)
    starts, remaining = [], list(codes)

    def run(command, env, output):
        assert (env["EXPERTS"], env["SAVE_STEPS"], env["TOTAL_STEPS"]) == ("shared", "2", "3")
        starts.append(command[command.index("--child") + 1] if "--child" in command else "")
        folder = tmp_path / "run" / ("faults" if len(starts) > 1 else "whole")
        folder.mkdir(exist_ok=True)
        ids = "abc" if len(starts) == 1 else prompts + "c"
        steps = "".join(f"{n}\n" for n, _ in enumerate(ids, 1))
        (folder / "metrics.csv").write_text(f"step\n{steps}")
        (folder / "completions.csv").write_text("prompt_id\n" + "\n".join(ids))
        with zipfile.ZipFile(folder.with_name(f"{folder.name}.zip"), "w") as archive:
            archive.write(folder / "metrics.csv")
        output.write(f"20:16:00 C train_grpo: {message if starts[-1].startswith('dying') else DEAD}\nbye\n")
        return remaining.pop(0)

    monkeypatch.setattr(faults, "run_child", run)
    names, out = ["kill:wake", "dying:generate"], tmp_path / "o.json"
    options = {"run": tmp_path / "run", "out": out, "model": "m", "data": "d", "set": [("EXPERTS", "shared")]}
    assert faults.bench_faults(argparse.Namespace(child=None, faults=names, **options)) == expected
    assert starts == ["", "kill:wake:1", "dying:generate:2", ""]
    figures = {row["name"]: row["value"] for row in record.read_json(out)["figures"]}
    assert figures["kill_at_wake"] == (codes[1] == 137) and figures["rows_whole"] == (prompts == "ab")
