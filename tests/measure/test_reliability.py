# SPDX-License-Identifier: Apache-2.0
"""scripts/reliability.py: a case of each part, and that the campaign sees what is wrong."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections import Counter
from unittest import mock

import pytest
import reliability

from grpo.measure import record
from grpo.measure.record import environment
from grpo.preflight.checks import preflight
from grpo.run.durable import sealed
from grpo.run.folder import ADAPTER, COMPLETE

# In place of train_grpo.py: some file operations, before each of which it may be killed, then a complete run. With a
# file `continued` in the folder it comes to another adapter.
STAND_IN = f"""
import json, os, pathlib, shutil, time
run = pathlib.Path(os.environ["OUTPUT_DIR"])
run.mkdir(exist_ok=True)
(run / "completions.csv").touch()
(run / "metrics.csv").write_text("step,step_s,reward/action\\n1,0.5,0.25\\n")
(run / "{ADAPTER}").write_bytes(b"two" if (run.parent / "continued").exists() else b"one")
time.sleep(float(os.environ.get("PAUSE", 0)))
shutil.make_archive(str(run), "zip", run.parent, run.name)
(run / "{COMPLETE}").write_text(json.dumps({sealed({"steps": 4})!r}))
"""


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """The folder of a campaign whose only command is STAND_IN, once uninterrupted."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(reliability, "COMMANDS", {"only": f"OUTPUT_DIR={{case}}/run PAUSE=0.05 {script}"})
    monkeypatch.setattr(reliability, "SIGNALS", {"KILL": 1, "TERM": 1})  # Python answers a Ctrl-C with a traceback.
    reliability.prepare(tmp_path, "kills")
    return tmp_path


def test_file_operations_are_counted_and_killed_before(campaign):
    whole, case = campaign / "whole" / "only", campaign / "kills" / "0"
    assert not reliability.faults_of(whole, whole / "run")
    command = reliability.COMMANDS["only"]
    assert reliability.run_command(command, case, 4, signal.SIGKILL) == -signal.SIGKILL
    assert (case / "run" / "metrics.csv").exists() and not (case / "run" / ADAPTER).exists()
    delayed, paused = campaign / "kills" / "1", command.replace("=0.05", "=300")
    assert reliability.run_command(paused, delayed, 4, signal.SIGTERM, 0.1) == -signal.SIGTERM
    assert (delayed / "run" / ADAPTER).exists(), "the signal came while it waited"
    assert reliability.run_command(command, case) == 0 and not reliability.faults_of(case, whole / "run")


def test_a_killed_run_is_continued_and_compared(campaign, monkeypatch):
    counts, run_command = Counter(), reliability.run_command
    assert not reliability.kill(campaign, campaign / "kills" / "1", 1, 1, counts) and counts["kills_cases"] == 1

    def spoiled(command, case, operation=0, number=0, delay=0.0):
        if not operation:  # This is the continuation.
            (case / "continued").touch()
        return run_command(command, case, operation, signal.SIGKILL if number else 0, 0.0)

    monkeypatch.setattr(reliability, "SIGNALS", {"KILL": 1})
    monkeypatch.setattr(reliability, "run_command", spoiled)
    finding = reliability.kill(campaign, campaign / "kills" / "2", 1, 2, counts)
    assert finding.startswith(f"{ADAPTER}; only: ") and "after file operation" in finding and counts["kills"] >= 1


def test_everything_that_differs_is_named(campaign):
    whole, case = campaign / "whole" / "only" / "run", campaign / "case"
    shutil.copytree(campaign / "whole" / "only", case)
    (case / "run" / "x.tmp").touch()
    (case / reliability.OUTPUT).write_text("Traceback")
    (case / "run" / ADAPTER).write_bytes(b"two")
    (case / "run" / "metrics.csv").write_text("step,step_s,reward/action\n1,0.7,0.5\n")
    for run, reward in ((whole, 1), (case / "run", 2)):
        (run / "evaluation.json").write_text(json.dumps(sealed({"reward": reward})))
        (run / "best").mkdir()
        (run / "best" / ADAPTER).write_bytes(b"%d" % reward)
    expected = [ADAPTER, "metrics.csv", "evaluation.json", f"best/{ADAPTER}", "stray x.tmp", "the zip", "a traceback"]
    assert reliability.faults_of(case, whole) == expected
    (case / "run" / "metrics.csv").write_text("step,step_s,reward/action\n1,0.7,0.25\n")
    assert "metrics.csv" not in reliability.faults_of(case, whole), "only the time differs"


DAMAGED = [
    (("complete", "optimizer.pt", "zeroed"), "checkpoint-2: optimizer.pt is damaged", ""),
    (("interrupted", "manifest.json", "deleted"), "checkpoint-2 has no manifest.json", ""),
    (("complete", "optimizer.pt", "one bit"), "", "not told: checkpoint-2/optimizer.pt of a run that was complete"),
]


@pytest.mark.parametrize(("case", "output", "finding"), DAMAGED)
def test_damage_must_be_told_and_must_not_change_the_result(campaign, monkeypatch, case, output, finding):
    """A stand-in for the run, which comes to the right end and says this of the damage."""
    checkpoint = campaign / "whole" / "2" / "run" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    for name in (f"checkpoint-2/{case[1]}", COMPLETE, ADAPTER):
        (checkpoint.parent / name).write_text("{}")
    shutil.copytree(campaign / "whole" / "only", campaign / "whole" / "3")

    def run_command(command, folder):
        damaged = folder / "run" / "checkpoint-2" / case[1]
        assert damaged.read_bytes() != b"{}" if damaged.exists() else case[2] == "deleted"
        assert (folder / "run" / COMPLETE).exists() == (case[0] == "complete")
        shutil.rmtree(folder)
        shutil.copytree(campaign / "whole" / "3", folder)
        (folder / reliability.OUTPUT).write_text(output)
        return 0

    monkeypatch.setattr(reliability, "run_command", run_command)
    cases = reliability.damages(campaign)
    assert len(cases) == len(set(cases)) == 2 * 6
    number = cases.index((case[0], f"checkpoint-2/{case[1]}", case[2]))
    result = reliability.damage(campaign, campaign / "damage" / "1", 1, number, Counter())
    assert result.startswith(finding) and bool(result) == bool(finding)


def test_findings_are_printed_with_how_to_do_them_again(tmp_path, monkeypatch, capsys):
    def case(folder, case, seed, number, counts):
        case.mkdir(parents=True)
        return ("", "two adapters", 1 / (2 - number))[number]

    monkeypatch.setattr(reliability, "prepare", lambda folder, part: None)
    monkeypatch.setitem(reliability.PARTS, "kills", case)
    command = ["scripts/reliability.py", "--out", f"{tmp_path}/out.json", "--run", f"{tmp_path}/folder"]
    monkeypatch.setattr(sys, "argv", [*command, "--part", "kills", "--size", "3"])
    assert reliability.main() == 1
    figures = {row["name"]: row["value"] for row in record.read_json(tmp_path / "out.json")["figures"]}
    assert figures == {"kills_different": 2}
    output = capsys.readouterr().out
    assert "FOUND kills 1: two adapters" in output and "again: --part kills --seed 1 --only 1" in output
    assert "FOUND kills 2: ZeroDivisionError" in output
    kept = sorted(path.name for path in (tmp_path / "folder" / "kills").iterdir())
    assert kept == ["1", "2"], "the others are deleted"
    monkeypatch.setattr(sys, "argv", [*command, "--part", "kills", "--only", "0"])
    assert reliability.main() == 0


@pytest.mark.parametrize("command", [*reliability.COMMANDS.values(), *reliability.DAMAGED.values()])
def test_the_commands_are_accepted(tmp_path, command):
    """Their settings and the inputs that `prepare` makes, by the checks before a run. tests/run kills real runs."""
    with mock.patch.object(reliability, "COMMANDS", {}):
        reliability.prepare(tmp_path, "kills")
    settings, _, script = command.format(case=tmp_path, inputs=tmp_path / "inputs").rpartition(" ")
    assert script == "train_grpo.py" and not preflight(environment(settings)).problems
