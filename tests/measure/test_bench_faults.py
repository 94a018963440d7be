# SPDX-License-Identifier: Apache-2.0
"""`bench.py faults`: each fault comes in its phase, and a fault that went by unseen or a lost row fails."""

from __future__ import annotations

import argparse
import os
import signal
import zipfile
from unittest import mock

import pytest
import torch
from engines import trainer_with_engine

from grpo.measure import faults, record
from grpo.measure.faults import Start
from grpo.rollout.engine import EngineError

ERRORS = {"kill": KeyboardInterrupt, "memory": torch.OutOfMemoryError, "dying": EngineError}


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_fault_comes_in_its_phase(tiny, tmp_path, monkeypatch, fault):
    """A kill comes at once here, as a KeyboardInterrupt, and a full GPU is pretended."""
    kind, phase = fault.split(":")
    timer = mock.Mock(return_value=mock.Mock(start=mock.Mock(side_effect=KeyboardInterrupt)))
    monkeypatch.setattr(faults.threading, "Timer", timer)
    monkeypatch.setattr(faults, "occupy", mock.Mock(side_effect=torch.OutOfMemoryError))
    trainer = trainer_with_engine(tiny, tmp_path, TOTAL_STEPS=4, SAVE_STEPS=2)
    with pytest.raises(ERRORS[kind]):
        faults.bench_faults(argparse.Namespace(child=f"{fault}:2", main=lambda arguments: trainer.train()))
    if kind == "kill":
        timer.assert_called_once_with(faults.PHASES[phase][2], os.kill, (os.getpid(), signal.SIGKILL))
    # In the second step's learning, in its checkpoint, or in the rollout that follows.
    assert trainer.state.global_step == {"learn": 1}.get(phase, 2)
    assert trainer.run.engine.asleep == (phase in ("wake", "learn", "save"))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Calls bench_faults for a kill and a dying engine, with starts that end with these codes; returns its exit code
    and the figures."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    rows = mock.Mock(return_value=True)
    monkeypatch.setattr(faults, "is_whole", rows)

    def run(*codes, message="generating failed (RuntimeError: EngineCore died)", names=("kill:wake", "dying:generate")):
        starts = [Start(code, 1.0, message, "checkpoint-2") for code in codes]
        monkeypatch.setattr(faults, "start_run", mock.Mock(side_effect=starts))
        out = tmp_path / "o.json"
        code = faults.bench_faults(argparse.Namespace(child=None, run=tmp_path / "run", out=out, set=[], faults=names))
        return code, {row["name"]: row for row in record.read_json(out).get("figures", [])}

    run.rows, run.folder = rows, tmp_path / "run"
    return run


def test_faults_that_are_seen_and_continued_pass(bench):
    code, figures = bench(0, 137, 4, 0)
    assert code == 0 and figures["kill_at_wake"]["value"] == figures["dying_at_generate"]["value"] == 1
    starts = [call.args[2:] for call in faults.start_run.call_args_list]
    assert starts == [(6,), (6, "kill:wake:2"), (6, "dying:generate:4"), (6,)]


@pytest.mark.parametrize("codes", [(0, 0, 4, 0), (0, 137, 0, 0), (0, 137, 4, 1), (1, 137, 4, 0)])
def test_an_exit_code_that_the_fault_does_not_explain_fails(bench, codes):
    assert bench(*codes)[0] == 1


def test_another_message_a_lost_row_and_a_stray_file_fail(bench):
    assert bench(0, 137, 4, 0, message="the run failed")[0] == 1
    bench.rows.return_value = False
    assert bench(0, 137, 4, 0)[0] == 1
    bench.rows.side_effect = lambda *arguments: (bench.folder / "x.tmp").touch() or True
    code, figures = bench(0, 137, 4, 0)
    assert code == 1 and figures["stray"]["note"] == "x.tmp"


def test_an_unknown_fault_and_a_folder_of_others_are_refused(bench, capsys):
    assert bench(names=["kill:sleeping"])[0] == 2 and "kill:sleeping" in capsys.readouterr().err
    bench.folder.mkdir()
    assert bench()[0] == 2 and "no measurement made it" in capsys.readouterr().err


def test_the_message_is_that_of_this_start(tmp_path, monkeypatch):
    outputs = ["C train_grpo: out of memory\n20:16:00 C train_grpo: free some\nbye", "I train_grpo: on"]

    def run(command, env, stdout):
        assert (env["EXPERTS"], env["SAVE_STEPS"]) == ("shared=", "2")
        stdout.write(f"20:16:00 {outputs.pop(0)}\n")
        return 1

    monkeypatch.setattr(faults, "run_child", run)
    options = argparse.Namespace(model="m", data="d", set=[("EXPERTS", "shared=")])
    starts = [faults.start_run(options, tmp_path / "run", 2, "memory:learn:2") for _ in range(2)]
    assert [start.message for start in starts] == ["out of memory | free some", "20:16:00 I train_grpo: on"]
    assert [start.shows("memory:learn") for start in starts] == [True, False]


def test_rows_are_compared_with_a_run_in_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "COMPLETIONS", 2)

    def folder(name, steps, prompt="p"):
        path = tmp_path / name
        path.mkdir()
        (path / "metrics.csv").write_text("step\n" + "".join(f"{n}\n" for n in steps))
        rows = "".join(f"{n},p{n}\n{n},{prompt}{n}\n" for n in steps)
        (path / "completions.csv").write_text(f"step,prompt_id\n{rows}")
        with zipfile.ZipFile(path.with_name(f"{name}.zip"), "w") as archive:
            archive.write(path / "metrics.csv")
        return path

    whole = folder("whole", (1, 2))
    assert faults.is_whole(folder("same", (1, 2)), whole, 2)
    for name, steps, prompt in (("other", (1, 2), "q"), ("doubled", (1, 1), "p"), ("short", (1,), "p")):
        assert not faults.is_whole(folder(name, steps, prompt), whole, 2), name
    content = bytearray((tmp_path / "same.zip").read_bytes())
    content[content.index(b"step\n1")] ^= 1
    (tmp_path / "same.zip").write_bytes(content)
    assert not faults.is_whole(tmp_path / "same", whole, 2), "the zip does not read"
