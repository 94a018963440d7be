# SPDX-License-Identifier: Apache-2.0
"""scripts/dev/reliability.py: programs are killed and interrupted at chosen moments, and what is wrong is seen."""

import json
import shutil
import signal
import sys
import zipfile

import pytest
import reliability
from reliability import PROGRAMS, Program, faults_of, run_command

from grpo.output.layout import ADAPTER
from grpo.preflight.checks import preflight
from scripts.dev import record
from scripts.dev.strike import Moment

# A program with a child: each does file operations, before each of which it may be killed. With the file `continued` in
# its folder it comes to another result, with `orphan` its child stays.
STAND_IN = """
import os, pathlib, subprocess, sys, time
case = pathlib.Path(sys.argv[1])
if len(sys.argv) > 2:
    (case / "child.csv").write_text("a")
    time.sleep(60 if sys.argv[2] == "orphan" else 0)
    (case / "child.csv").write_text("b")
    sys.exit()
started = case / "started.tmp"
started.touch()
kind = "orphan" if (case / "orphan").exists() else "child"
child = subprocess.Popen([sys.executable, __file__, case, kind], env=os.environ | {"RANK": "1"})
if not (case / "orphan").exists():
    child.wait()
time.sleep(float(os.environ["PAUSE"]))
(case / "a.json").write_text('{"seconds": %s, "value": %d}' % (time.time(), (case / "continued").exists()))
started.unlink()
"""
KILL = str(int(signal.SIGKILL))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a campaign whose only program is STAND_IN, once undisturbed."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    program = Program(2, 2, f"PAUSE=0.05 {script} {{case}}", "*.csv a.json")
    monkeypatch.setattr(reliability, "PROGRAMS", {"only": program})
    reliability.prepare(tmp_path, ["only"], 1)
    return tmp_path


def test_operations_are_counted_and_a_moment_is_struck(folder):
    program, whole = reliability.PROGRAMS["only"], folder / "whole" / "only"
    assert not faults_of(program, whole, whole)
    counts = {path.name: int(path.read_text()) for path in (whole / "operations").iterdir()}
    assert counts == {"stand_in": 3, "stand_in1": 2}
    case = folder / "kills" / "0"
    assert run_command(program, case, Moment("stand_in", "2", KILL)) == -signal.SIGKILL
    assert (case / "child.csv").exists() and not (case / "a.json").exists()
    paused = program._replace(command=program.command.replace("=0.05", "=300"))
    delayed = Moment("stand_in", "1", str(int(signal.SIGTERM)), "0.8", "first")
    assert run_command(paused, folder / "kills" / "1", delayed) == -signal.SIGTERM
    assert run_command(program, case) == 0 and not faults_of(program, case, whole)


def test_a_process_that_goes_on_is_an_orphan(folder):
    case = folder / "signals" / "0"
    case.mkdir(parents=True)
    (case / "orphan").touch()
    with pytest.raises(RuntimeError, match=r"went on for 1 s after .*: .*stand_in"):
        run_command(reliability.PROGRAMS["only"], case, late_s=1)


@pytest.mark.parametrize("part", ["kills", "signals"])
def test_a_case_is_struck_continued_and_compared(folder, monkeypatch, part):
    monkeypatch.setattr(reliability, "SIGNALS", (signal.SIGTERM, signal.SIGTERM))  # Ctrl-C would show a traceback.
    for number in range(2):
        finding, signals = reliability.attack(folder, part, "only", number, 1)
        assert not finding and signals <= 3
    original = reliability.run_command

    def spoiled(program, case, *moment):
        if not moment:  # This is the continuation.
            (case / "continued").touch()
        return original(program, case, *(Moment("stand_in", "1", *moment[0][2:3]), 60) if moment else ())

    monkeypatch.setattr(reliability, "run_command", spoiled)
    finding, signals = reliability.attack(folder, part, "only", 3, 1)
    assert finding.startswith("a.json; stand_in") and signals >= 1


def test_everything_that_differs_is_named(folder):
    whole, case = folder / "whole" / "only", folder / "kills" / "0"
    shutil.copytree(whole, case)
    program = reliability.PROGRAMS["only"]._replace(results="*.csv *.json run.zip run/metrics.csv")
    for path, reward in ((whole, "0.25"), (case, "0.5")):
        (path / "run").mkdir()
        (path / "run" / "metrics.csv").write_text(f"step,step_s,reward/action\n1,{reward},{reward}\n")
        (path / "b.json").write_text(json.dumps({"folder": str(path), "value": reward}))
        with zipfile.ZipFile(path / "run.zip", "w") as archive:
            archive.writestr(f"run/{ADAPTER}", reward)
    (case / "x.tmp").touch()
    (case / "tmp" / "torchelastic_x").mkdir()
    (case / "tmp" / "y").touch()
    blocks = ["Traceback (most recent call last):\n  File x\nValueError\n"]
    (case / "output.txt").write_text(blocks[0])
    expected = ["b.json", "run.zip", "run/metrics.csv", "stray x.tmp", "stray y", "a traceback"]
    assert faults_of(program, case, whole) == expected
    (case / "run" / "metrics.csv").write_text("step,step_s,reward/action\n1,0.7,0.25\n")
    (case / "output.txt").write_text('Traceback (most recent call last):\n  File "<frozen importlib._bootstrap>"\nKey')
    assert faults_of(program, case, whole) == ["b.json", "run.zip", "stray x.tmp", "stray y"]
    (case / "child.csv").unlink()
    assert faults_of(program, case, whole)[0] == "child.csv"


def test_findings_are_printed_with_how_to_do_them_again(tmp_path, monkeypatch, capsys):
    def attack(folder, part, name, number, seed):
        (folder / part / f"{name}-{number}").mkdir(parents=True)
        return ("", "two adapters", 1 / (2 - number))[number], 1

    monkeypatch.setattr(reliability, "prepare", lambda *arguments: None)
    monkeypatch.setattr(reliability, "attack", attack)
    command = ["scripts/dev/reliability.py", "--out", f"{tmp_path}/out.json", "--run", f"{tmp_path}/folder"]
    monkeypatch.setattr(sys, "argv", [*command, "--part", "kills", "--only", "sft", "--size", "3"])
    assert reliability.main() == 1
    figures = {row["name"]: row["value"] for row in record.read_json(tmp_path / "out.json")["figures"]}
    assert figures == {"kills_sft_cases": 3, "kills_sft_signals": 2, "kills_sft_different": 2}
    output = capsys.readouterr().out
    assert "FOUND kills sft/1: two adapters" in output and "again: --part kills --seed 1 --only sft/1" in output
    assert "FOUND kills sft/2: ZeroDivisionError" in output
    kept = sorted(path.name for path in (tmp_path / "folder" / "kills").iterdir())
    assert kept == ["sft-1", "sft-2"], "the others are deleted"
    monkeypatch.setattr(sys, "argv", [*command, "--part", "kills", "--only", "sft/0", "ask/0"])
    assert reliability.main() == 0 and "kills_ask_cases" in capsys.readouterr().out
    for word, message in (("st/1", "st: no program has this name"), ("sft/x", "x is not the number of a case")):
        monkeypatch.setattr(sys, "argv", [*command, "--only", word])
        with pytest.raises(SystemExit):
            reliability.main()
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "train_grpo.py" in PROGRAMS[name].command])
def test_the_commands_are_accepted(tmp_path, monkeypatch, name):
    """Their settings and the inputs that `prepare` makes, by the checks before a run. tests/run kills real runs."""
    monkeypatch.setattr(reliability, "run_whole", lambda *arguments: None)
    reliability.prepare(tmp_path, [name], 1)
    words = PROGRAMS[name].command.format(case=tmp_path, inputs=tmp_path / "inputs").split()
    settings = dict(word.split("=", 1) for word in words if word.partition("=")[0].isupper())
    assert not preflight(settings).problems
