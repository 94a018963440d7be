# SPDX-License-Identifier: Apache-2.0
"""The reliability campaign: a little of it, and that it finds what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import reliability
from conftest import CLEAN, ROOT

from grpo.evaluate import page  # here, so that no fork imports it anew
from grpo.measure import campaign, forks, hostile_input, kills
from grpo.measure.forks import Campaign, Found
from grpo.run.durable import sealed
from grpo.run.folder import ADAPTER, COMPLETE


def values(path: Path) -> dict[str, float]:
    return {one["name"]: one["value"] for one in json.loads(path.read_text())["figures"]}


@pytest.mark.slow
def test_a_little_of_every_part_finds_nothing(tiny, tmp_path):
    out, command = tmp_path / "out.json", [sys.executable, "scripts/reliability.py", "--quick", "--seed", "3"]
    done = subprocess.run(
        [*command, "--out", out, "--run", tmp_path / "made"], env=CLEAN, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found, asked = values(out), {name: part.quick for name, part in campaign.PARTS.items()}
    assert found["kills"] >= found["kills_runs"] == asked["kills"] and found["damage_cases"] == asked["damage"]
    assert all(found[f"{name}_cases"] == asked[name] for name in ("csv", "settings", "models"))
    assert found["settings_by_command"] == found["csv_by_command"] + 1 == 2


@pytest.fixture
def ask(tmp_path, monkeypatch, capfd):
    """A part of the campaign with another `main`: exit code, what it printed, figures."""
    monkeypatch.setattr(campaign, "import_all", lambda: None)

    def ask_once(main, part, **more):
        given = {"size": 3, "quick": False, "seed": 1, "only": None, "minutes": 1, "jobs": 2}
        options = {"main": main, "run": tmp_path / "made", "out": tmp_path / "out.json", "part": [part]} | given | more
        code = campaign.bench_reliability(SimpleNamespace(**options))
        return code, capfd.readouterr().out, values(tmp_path / "out.json")

    return ask_once


def test_a_traceback_is_found_and_told_with_how_to_do_it_again(ask, tmp_path):
    def main(arguments):
        raise ZeroDivisionError if "rows1.csv" in os.environ["DATA"] else SystemExit(0)

    code, said, found = ask(main, "csv")
    assert code == 1 and found["csv_findings"] == 3, "SystemExit is no answer either"
    assert "FOUND csv 1: it raised Traceback" in said and "--part csv --seed 1 --only 1" in said
    assert (tmp_path / "made" / "csv" / "0" / "rows1.csv").is_file(), "kept"
    code, said, found = ask(lambda arguments: 2, "settings", only=7)
    assert code == 1 and "FOUND settings 7: refused without a reason" in said and found["settings_cases"] == 1
    assert ask(lambda arguments: 0, "settings")[0] == 0 and not (tmp_path / "made" / "settings" / "0").exists()


def test_a_model_that_cannot_be_loaded_is_named_and_the_command_is_timed(ask, monkeypatch):
    def main(arguments):
        os.write(1, said)
        return 0 if arguments else 1

    said = b"20:16:00 I train_grpo: model: 0.32M parameters"
    assert "loading ended with 1" in ask(main, "models", size=1)[1]
    said = b"20:16:00 C train_grpo: model: no such tensor"
    assert ask(main, "models", size=1)[2]["models_load_refused"] == 1 and "FOUND" not in ask(main, "models", size=1)[1]
    monkeypatch.setattr(hostile_input, "asked_by_command", lambda given: (0, "", 11.0))
    assert "the command: 11.0 s" in ask(lambda arguments: 0, "settings", only=99)[1]


def test_a_process_that_crashes_is_a_finding_and_too_little_time_is_told(ask):
    code, said, found = ask(lambda arguments: os.kill(os.getpid(), signal.SIGKILL), "csv")
    assert code == 1 and "its process crashed" in said and found["csv_findings"] == 1
    code, _, found = ask(lambda arguments: 0, "csv", minutes=0)
    assert code == 3 and "csv_cases" not in found


def test_an_interrupt_before_the_run_is_no_finding_and_one_that_leaks_is(tmp_path, monkeypatch, capfd):
    def main(arguments):
        raise KeyboardInterrupt

    ends = Campaign(main, tmp_path, 1), tmp_path / "place", {}
    assert forks.run_to_end(*ends) == 70 and "Traceback" in capfd.readouterr().err
    monkeypatch.setattr(forks, "clean_environment", lambda given: os.kill(os.getpid(), signal.SIGINT) or {})
    assert forks.run_to_end(*ends) == 130 and not capfd.readouterr().err


def test_a_folder_that_no_campaign_made_is_left_alone_and_no_size_is_not_all(ask, tmp_path, monkeypatch, capfd):
    mine = tmp_path / "made" / "mine"
    mine.parent.mkdir()
    mine.touch()
    (tmp_path / "out.json").write_text('{"figures": []}')
    assert ask(lambda arguments: 0, "csv")[0] == 2 and mine.exists()
    (mine.parent / forks.MARK).touch()
    assert ask(lambda arguments: 0, "csv")[0] == 0 and not mine.exists()
    monkeypatch.setattr(sys, "argv", ["reliability.py", "--out", "x.json", "--size", "0"])
    with pytest.raises(SystemExit):
        reliability.parse_args()
    assert "--size: '0' is not int from 1 to 1e+09" in capfd.readouterr().err


def make_run(folder: Path, adapter: bytes) -> None:
    """What `faults` looks at in a complete run, and its zip."""
    folder.mkdir(parents=True)
    (folder / ADAPTER).write_bytes(adapter)
    for name in ("completions.csv", "training.log"):
        (folder / name).touch()
    (folder / "metrics.csv").write_text("step,step_s,reward/action\n1,0.5,0.25\n")
    (folder / COMPLETE).write_text(json.dumps(sealed({"steps": 4})))
    shutil.make_archive(str(folder), "zip", folder.parent, folder.name)


def test_what_differs_is_named(tmp_path):
    make_run(tmp_path / "whole" / "run", b"one")
    make_run(tmp_path / "a" / "run", b"one")
    assert not kills.faults(tmp_path / "a", tmp_path / "whole" / "run")
    (tmp_path / "a" / "run" / "x.tmp").touch()
    (tmp_path / "a" / forks.OUTPUT).write_text("Traceback")
    (tmp_path / "a" / "run" / ADAPTER).write_bytes(b"two")
    (tmp_path / "a" / "run" / "metrics.csv").write_text("step,step_s,reward/action\n1,0.7,0.5\n")
    found = kills.faults(tmp_path / "a", tmp_path / "whole" / "run")
    assert found == [ADAPTER, "metrics.csv", "stray x.tmp", "the zip", "a traceback"]


def test_damage_must_be_told_and_a_lost_log_refused(tmp_path):
    """A stand-in for the run, which comes to the right end and says this of the damage."""
    said, whole = [], tmp_path / "whole"

    def main(arguments):
        folder = Path(os.environ["OUTPUT_DIR"])
        shutil.rmtree(folder)
        shutil.copytree(whole / "records-3", folder.parent, dirs_exist_ok=True)
        os.write(1, said[0].encode())
        return 0

    for name in ("checkpoint", "records"):
        for steps in (2, 3):
            make_run(whole / f"{name}-{steps}" / "run", b"one")
            make_run(whole / f"{name}-{steps}" / "run" / "best", b"one")
    make_run(whole / "checkpoint-2" / "run" / "checkpoint-2", b"one")
    campaign = Campaign(main, tmp_path, 1)
    cases = {(name, kind): number for number, (_, name, kind) in enumerate(kills.damages(campaign))}

    def found(name, kind, words):
        place, made, said[:] = tmp_path / f"{name} {kind} {words}".replace("/", "-"), Found(), [words]
        place.mkdir()
        kills.damage(campaign, place, cases[name, kind], made)
        return [text.partition(":")[0] for _, text in made.findings]

    assert found(COMPLETE, "zeroed", "") == found(f"best/{ADAPTER}", "deleted", "") == ["not told"]
    assert not found(COMPLETE, "zeroed", "complete.json is damaged") and not found(COMPLETE, "deleted", "")
    assert found("metrics.csv", "deleted", "") == ["not told"]
    assert not found("metrics.csv", "deleted", "metrics.csv is not there: it begins again at step 3")
    refused = found("metrics.csv", "zeroed", "")[0]
    assert refused.startswith("ended with 0, not refused with 'metrics.csv is no longer what was written")


def test_a_killed_run_is_continued_and_compared(tmp_path):
    """A stand-in for the run, of which every second one comes to another adapter."""
    assert page

    def main(arguments):
        folder = Path(os.environ["OUTPUT_DIR"])
        if "OVERWRITE" in os.environ:
            shutil.rmtree(folder)
        try:
            for _ in range(20):
                folder.with_name("begun").open("w").close()
                time.sleep(0.005)
        except KeyboardInterrupt:
            return 130
        make_run(folder, b"one" if int(folder.parent.name) % 2 else b"two")
        return 0

    for name in kills.VARIANTS:
        make_run(tmp_path / "whole" / name / "run", b"one")
        (tmp_path / "whole" / name / "life.json").write_text(json.dumps({"seconds": 0.1, "operations": 20}))
    make_run(tmp_path / "whole" / "short" / "run", b"one")
    (tmp_path / "whole" / "short" / "run" / COMPLETE).write_text(json.dumps(sealed({"steps": 2})))
    found = Found()
    for number in range(6):
        (tmp_path / str(number)).mkdir()
        kills.kill(Campaign(main, tmp_path, 1), tmp_path / str(number), number, found)
    assert found.counts["kills_runs"] == 6 <= found.counts["kills"]
    assert {number for number, _ in found.findings} == {0, 2, 4}
    assert all(ADAPTER in text and ("before operation" in text or "after" in text) for _, text in found.findings)
