# SPDX-License-Identifier: Apache-2.0
"""The reliability campaign: two cases of it, and that it finds what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import Counter

import pytest
import reliability
from conftest import CLEAN, ROOT

from grpo.measure import kills, record
from grpo.run.durable import sealed
from grpo.run.folder import ADAPTER, COMPLETE

# In place of train_grpo.py: four file operations, after each of which it may be killed, then a complete run. With a file
# `continued` in the folder it comes to another adapter.
STAND_IN = f"""
import json, os, pathlib, shutil, sys, time
run = pathlib.Path(os.environ["OUTPUT_DIR"])
adapter = b"two" if (run.parent / "continued").exists() else b"one"
run.mkdir(exist_ok=True)
for name in ("completions.csv", "training.log"):
    (run / name).touch()
(run / "metrics.csv").write_text("step,step_s,reward/action\\n1,0.5,0.25\\n")
(run / "{ADAPTER}").write_bytes(adapter)
time.sleep(float(os.environ.get("PAUSE", 0)))
shutil.make_archive(str(run), "zip", run.parent, run.name)
(run / "{COMPLETE}").write_text(json.dumps({sealed({"steps": 4})!r}))
"""


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """The folder of a campaign whose only command is STAND_IN, once uninterrupted."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(kills, "COMMANDS", {"only": f"OUTPUT_DIR={{place}}/run PAUSE=0.05 {script}"})
    monkeypatch.setattr(kills, "SIGNALS", {"KILL": 1, "TERM": 1})  # Python answers a Ctrl-C with a traceback
    kills.prepare(tmp_path, "kills")
    return tmp_path


def test_file_operations_are_counted_and_killed_before(campaign):
    whole, place = campaign / "whole" / "only", campaign / "kills" / "0"
    operations = int((whole / kills.OPERATIONS).read_text())
    assert operations >= 6 and not kills.faults(whole, whole / "run")
    command = kills.COMMANDS["only"]
    assert kills.run_command(command, place, 5, signal.SIGKILL) == -signal.SIGKILL
    assert (place / "run" / "metrics.csv").exists() and not (place / "run" / ADAPTER).exists()
    delayed = campaign / "kills" / "1"
    assert kills.run_command(command.replace("=0.05", "=300"), delayed, 5, signal.SIGTERM, 0.1) == -signal.SIGTERM
    assert (delayed / "run" / ADAPTER).exists(), "the signal came while it waited"
    assert kills.run_command(command, place) == 0 and not kills.faults(place, whole / "run")


def test_a_killed_run_is_continued_and_compared(campaign, monkeypatch):
    counts, run_command = Counter(), kills.run_command
    assert not kills.kill(campaign, campaign / "kills" / "1", 1, 1, counts)
    assert counts["kills_cases"] == 1 <= counts["kills"]

    def spoiled(command, place, operation=0, number=0, delay=0.0):
        if not operation:  # the continuation
            (place / "continued").touch()
        return run_command(command, place, operation, signal.SIGKILL if number else 0, 0.0)

    monkeypatch.setattr(kills, "run_command", spoiled)
    finding = kills.kill(campaign, campaign / "kills" / "2", 1, 2, counts)
    assert finding.startswith(f"{ADAPTER}; only: ") and "after file operation" in finding
    monkeypatch.setattr(kills, "run_command", lambda command, place, *moment: 3)
    assert kills.kill(campaign, campaign / "kills" / "3", 1, 3, counts) == "ended with exit code 3; only: "


def test_everything_that_differs_is_named(campaign):
    whole, place = campaign / "whole" / "only" / "run", campaign / "place"
    shutil.copytree(campaign / "whole" / "only", place)
    (place / "run" / "x.tmp").touch()
    (place / kills.OUTPUT).write_text("Traceback")
    (place / "run" / ADAPTER).write_bytes(b"two")
    (place / "run" / "metrics.csv").write_text("step,step_s,reward/action\n1,0.7,0.5\n")
    (whole / "evaluation.json").write_text(json.dumps(sealed({"reward": 1})))
    (place / "run" / "evaluation.json").write_text(json.dumps(sealed({"reward": 2})))
    expected = [ADAPTER, "metrics.csv", "evaluation.json", "stray x.tmp", "the zip", "a traceback"]
    assert kills.faults(place, whole) == expected
    (place / "run" / "metrics.csv").write_text("step,step_s,reward/action\n1,0.7,0.25\n")
    assert "metrics.csv" not in kills.faults(place, whole), "only the time differs"


def test_damage_must_be_told_and_must_not_change_the_result(campaign, monkeypatch):
    """A stand-in for the run, which comes to the right end and says this of the damage."""
    for name in ("two", "three"):
        shutil.copytree(campaign / "whole" / "only", campaign / "whole" / name)
    (campaign / "whole" / "two" / "run" / "checkpoint-2").mkdir()
    for name in ("optimizer.pt", "manifest.json"):
        (campaign / "whole" / "two" / "run" / "checkpoint-2" / name).write_text("{}")
    cases, output = {case: number for number, case in enumerate(kills.damages(campaign))}, []
    assert len(cases) == 2 * 2 * 6

    def run_command(command, place):
        assert "TOTAL_STEPS=3 train_grpo.py" in command
        damaged = (place / "run" / "checkpoint-2" / "optimizer.pt").exists()
        shutil.rmtree(place)
        shutil.copytree(campaign / "whole" / "three", place)
        (place / kills.OUTPUT).write_text(output[0])
        assert damaged or "missing" in output[0]
        return 0

    monkeypatch.setattr(kills, "run_command", run_command)

    def finding(state, name, kind, words):
        output[:] = [words]
        case = cases[state, f"checkpoint-2/{name}", kind]
        place = campaign / "damage" / f"{case} {words}"
        return kills.damage(campaign, place, 1, case, Counter())

    assert not finding("complete", "optimizer.pt", "zeroed", "checkpoint-2: optimizer.pt is damaged")
    assert not finding("interrupted", "optimizer.pt", "deleted", "checkpoint-2: optimizer.pt is missing")
    assert not finding("complete", "manifest.json", "deleted", "checkpoint-2 has no manifest.json")
    assert finding("complete", "optimizer.pt", "one bit", "").startswith("not told: checkpoint-2/optimizer.pt of a run")
    (campaign / "whole" / "three" / "run" / ADAPTER).write_bytes(b"two")
    assert "the zip" in finding("complete", "optimizer.pt", "one bit", "checkpoint-2: optimizer.pt is damaged")


def test_findings_are_told_with_how_to_do_them_again(tmp_path, monkeypatch, capsys):
    def case(folder, place, seed, number, counts):
        place.mkdir(parents=True)
        counts["kills_cases"] += 1
        return {1: "two adapters", 2: 1 / 0 if number == 2 else ""}.get(number, "")

    monkeypatch.setattr(kills, "prepare", lambda folder, part: None)
    monkeypatch.setitem(kills.PARTS, "kills", case)
    out, made = tmp_path / "out.json", tmp_path / "made"

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["scripts/reliability.py", "--out", str(out), "--run", str(made), *words])
        code = reliability.main()
        return code, {row["name"]: row["value"] for row in record.read_json(out)["figures"]}, capsys.readouterr().out

    code, figures, output = run("--part", "kills", "--size", "3")
    assert code == 1 and figures["kills_different"] == 2 and figures["kills_cases"] == 3
    assert "FOUND kills 1: two adapters" in output and "again: --part kills --seed 1 --only 1" in output
    assert "the campaign itself failed: Traceback" in output and "ZeroDivisionError" in output
    assert sorted(path.name for path in (made / "kills").iterdir()) == ["1", "2"], "the others are deleted"
    assert run("--part", "kills", "--only", "0")[0] == 0
    (made / record.MARK).unlink()
    assert reliability.main() == 2 and "no measurement made it" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["reliability.py", "--out", "x.json", "--size", "0"])
    with pytest.raises(SystemExit):
        reliability.main()
    assert "--size: '0' is not int from 1 to 1e+09" in capsys.readouterr().err


@pytest.mark.slow
def test_a_case_of_each_part_finds_nothing(tiny, tmp_path):
    command = [sys.executable, "scripts/reliability.py", "--size", "1", "--seed", "3", "--out", tmp_path / "out.json"]
    environment = CLEAN | {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [*command, "--run", tmp_path / "made"], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {row["name"]: row["value"] for row in record.read_json(tmp_path / "out.json")["figures"]}
    assert figures["kills"] >= figures["kills_cases"] == figures["damage_cases"] == 1
    assert zipfile.ZipFile(tmp_path / "made/whole/padded/run.zip").testzip() is None
