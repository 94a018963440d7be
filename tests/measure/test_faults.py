# SPDX-License-Identifier: Apache-2.0
"""`bench.py faults`: each fault comes in its phase, and a fault that went by unseen or a lost row is told."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace

import pytest
import torch
from engines import trainer_with_engine

from grpo.measure import faults, record
from grpo.rollout.engine import EngineError


class Struck(Exception):
    """In place of a SIGKILL."""


@pytest.fixture
def child(tiny, tmp_path, monkeypatch):
    """Options of a child with its fault, and its trainer; a kill raises Struck at once, a full GPU is pretended."""

    def strike_now(seconds, kill, arguments):
        assert arguments[1] == signal.SIGKILL and kill is faults.os.kill
        return SimpleNamespace(start=lambda: (_ for _ in ()).throw(Struck))

    def full(leave_gib):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(faults.threading, "Timer", strike_now)
    monkeypatch.setattr(faults, "occupy", full)
    trainer = trainer_with_engine(tiny, tmp_path, TOTAL_STEPS=4, SAVE_STEPS=2)

    def main(arguments):
        trainer.train()
        return 0

    return lambda fault: SimpleNamespace(child=fault, main=main), trainer


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_fault_comes_in_its_phase(child, fault):
    options, trainer = child
    how, phase = fault.split(":")
    errors = {"kill": Struck, "memory": torch.OutOfMemoryError, "dying": EngineError}
    with pytest.raises(errors[how]):
        faults.bench_faults(options(f"{fault}:2"))
    # In the second step's learning, in its checkpoint, or in the rollout that follows.
    assert trainer.state.global_step == {"learn": 1}.get(phase, 2)
    assert trainer.run.engine.asleep == (phase in ("wake", "learn", "save"))


def test_what_was_not_seen_or_is_missing_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    codes, words = [], ["vLLM: generating failed (RuntimeError: EngineCore died)"]
    rows = {"whole": True, "alike": 60, "of": 64}
    monkeypatch.setattr(faults, "same_rows", lambda *arguments: rows)

    def start(options, folder, steps, fault=""):
        assert steps == 6
        return {"code": codes.pop(0), "seconds": 1.0, "line": words[0], "checkpoint": "checkpoint-2"}

    monkeypatch.setattr(faults, "start_run", start)
    options = SimpleNamespace(child=None, run=tmp_path / "run", out=tmp_path / "o.json", set=[])
    options.faults = ["kill:wake", "dying:generate"]

    def code(*starts):
        codes[:] = starts
        return faults.bench_faults(options)

    assert code(0, -9, 4, 0) == 0
    figures = {row["name"]: row["value"] for row in json.loads(options.out.read_text())["figures"]}
    assert figures["kill_at_wake"] == figures["dying_at_generate"] == 1 and figures["completions_alike"] == 60
    assert code(0, 0, 4, 0) == code(0, -9, 0, 0) == code(0, -9, 4, 1) == code(1, -9, 4, 0) == code(0, -9, 1, 0) == 1
    rows["whole"] = False
    assert code(0, -9, 4, 0) == 1
    rows["whole"], words[0] = True, "the run failed"
    assert code(0, -9, 4, 0) == 1, "of something else"
    monkeypatch.setattr(faults, "was_seen", lambda *arguments: True)
    monkeypatch.setattr(faults, "same_rows", lambda *arguments: (options.run / "x.tmp").touch() or rows)
    assert code(0, -9, 4, 0) == 1 and "x.tmp" in options.out.read_text()
    (options.run / record.MARK).unlink()
    assert code() == 2 and "no measurement made it" in capsys.readouterr().err
    options.faults = ["kill:sleeping"]
    assert faults.bench_faults(options) == 2 and "kill:sleeping" in capsys.readouterr().err


def test_the_last_words_are_those_of_this_start(tmp_path, monkeypatch):
    words = [
        ["I train_grpo: memory", "C train_grpo: out of memory", "C train_grpo: free some", "bye"],
        ["I train_grpo: on"],
    ]

    def run(command, env, stdout, **more):
        assert (env["EXPERTS"], env["SAVE_STEPS"]) == ("shared=", "2")
        stdout.write("".join(f"20:16:00 {line}\n" for line in words.pop(0)))
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(faults.subprocess, "run", run)
    options = SimpleNamespace(model="m", data="d", set=[("EXPERTS", "shared=")])
    starts = [faults.start_run(options, tmp_path / "run", 2, "memory:learn:2") for _ in range(2)]
    assert [start["line"] for start in starts] == ["out of memory | free some", "20:16:00 I train_grpo: on"]
    assert [faults.was_seen("memory:learn", start) for start in starts] == [True, False]


def test_rows_are_compared_with_a_run_in_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "COMPLETIONS", 2)
    monkeypatch.setattr(faults.zipfile, "ZipFile", lambda path: SimpleNamespace(testzip=lambda: None))

    def folder(name, steps, last="b"):
        made = tmp_path / name
        made.mkdir()
        (made / "metrics.csv").write_text("step\n" + "".join(f"{n}\n" for n in steps))
        rows = "".join(f"{n},p{n},a\n{n},p{n},{last}\n" for n in steps)
        (made / "completions.csv").write_text(f"step,prompt_id,completion\n{rows}")
        return made

    whole = folder("whole", (1, 2))
    assert faults.same_rows(folder("same", (1, 2)), whole, 2) == {"whole": True, "alike": 4, "of": 4}
    assert faults.same_rows(folder("other", (1, 2), "c"), whole, 2) == {"whole": True, "alike": 2, "of": 4}
    assert not faults.same_rows(folder("doubled", (1, 1)), whole, 2)["whole"]
    assert not faults.same_rows(folder("short", (1,)), whole, 2)["whole"]
