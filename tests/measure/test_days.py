# SPDX-License-Identifier: Apache-2.0
"""scripts/days.py: a folder of profiles split by days, trained on and measured."""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import days as script
import numpy as np
import pytest
from conftest import CLEAN, ROOT

from grpo.measure.days import hours_csv, read_split, shown_command, write_data
from grpo.tasks.tes import profiles as tes
from grpo.tasks.tes.profiles import profile_csv, read_profile, synthetic_profile

MONDAY = date(2025, 6, 2)
NAMES = ("z_first", "b", "a", "last")  # in the order of their days, not of the alphabet


def fill(folder: Path, names: tuple[str, ...] = NAMES, apart: int = 7) -> Path:
    """A folder with a profile of four days for each name, `apart` days from start to start."""
    folder.mkdir()
    for i, name in enumerate(names):
        text = profile_csv([synthetic_profile((5, i), 4, MONDAY + timedelta(days=apart * i))])
        (folder / f"{name}.csv").write_text(text)
    return folder


SPLITS = [((), ["last"]), (("2",), ["a", "last"]), (("b.csv", "x/z_first.csv"), ["z_first", "b"])]


@pytest.mark.parametrize("heldout, expected", SPLITS)
def test_files_are_split_by_date_or_by_name(tmp_path, heldout, expected):
    split = read_split(fill(tmp_path / "days"), "*.csv", heldout)
    assert list(split.heldout) == expected and list(split.train) == [name for name in NAMES if name not in expected]


@pytest.mark.parametrize("count, held", [(2, 1), (5, 1), (6, 2), (9, 3)])
def test_a_third_of_the_files_is_held_out(tmp_path, count, held):
    assert len(read_split(fill(tmp_path / "days", tuple("abcdefghi"[:count])), "*.csv", ()).heldout) == held


def test_rows_tell_of_their_own_days_and_the_plant_sees_every_digit(tmp_path):
    folder = fill(tmp_path / "days")
    night = read_profile(folder / "last.csv")
    night.co2[1, 3], night.co2[0, 9] = np.nan, 1 / 3
    split = read_split(folder, "*.csv", ())
    split.heldout["last"] = night
    settings = write_data(split, tmp_path / "out", "compact")
    rows = {name: [row for path in settings[name].split(",") for row in csv.DictReader(io.StringIO(Path(path).read_text()))] for name in ("DATA", "EVAL_DATA")}  # fmt: skip
    days = {name: {row["timestamp"][:10] for row in found} for name, found in rows.items()}
    assert len(rows["EVAL_DATA"]) == 30 and not days["DATA"] & days["EVAL_DATA"]
    assert 3 * 7 * 30 < len(rows["DATA"]) < 900, "three windows walked through seven times, and short hours"
    loads = {float(row["user"].split(" load ")[1].split()[0]) for row in rows["DATA"]}
    seen = max(float(profile.load_kw.max()) for profile in split.train.values())
    assert max(loads) > 1.3 * seen, "and varied"
    again, night.load_kw[1, 3] = read_profile(settings["EVAL_PROFILE"]), np.nan
    for name in ("co2", "load_kw"):
        assert np.array_equal(getattr(again, name), getattr(night, name), equal_nan=True)
    assert hours_csv(night).count("\n") == 1 + 4 * 24 - 1
    assert "tes_last.csv" in write_data(split, tmp_path / "out", "full")["EVAL_DATA"]


def test_the_command_names_no_folder_of_the_machine():
    options = argparse.Namespace(model="/big/disk/my model", seeds=[1, 2])
    environ = {"TOTAL_STEPS": "3", "DATA": "mine", "HOME": "/root", "REWARDS": "action,format=0.1"}
    words = "python scripts/days.py FOLDER --model 'my model' --heldout a.csv last.csv --seeds 1 2"
    assert (
        shown_command(environ, options, ["DATA", "MODEL_ID"], ["a.csv", "last.csv"])
        == f"REWARDS=action,format=0.1 TOTAL_STEPS=3 {words}"
    )


def test_each_file_and_seed_has_its_run(tmp_path, monkeypatch):
    """With a folder, and names of its figures, of its own."""
    started, real = [], subprocess.run

    def run(command, env=None, **options):
        if not str(command[-1]).endswith("train_grpo.py"):
            return real(command, env=env, **options)
        out = Path(env["OUTPUT_DIR"])
        started.append((env["SEED"], Path(env["EVAL_PROFILE"]).name, out))
        out.mkdir()
        (out / "metrics.csv").write_text("step\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    folder, results = fill(tmp_path / "days", ("a", "b")), tmp_path / "out.json"
    options = ["--out", str(tmp_path / "out"), "--heldout", "each", "--seeds", "1", "2", "--results", str(results)]
    assert script.main([str(folder), *options]) == 0
    expected = [(seed, f"{name}.csv", tmp_path / f"out/{name}-seed{seed}/run") for name in "ab" for seed in "12"]
    assert started == expected
    record = json.loads(results.read_text())
    assert [one["name"] for one in record["figures"]][:3] == [
        "train_windows/a/seed1",
        "heldout_windows/a/seed1",
        "steps/a/seed1",
    ]
    assert {one["set"] for one in record["files"]} == {"held out in turn"} and "--heldout each --seeds 1 2" in record[
        "command"
    ]


def ambiguous(folder: Path) -> None:
    text = (folder / "b.csv").read_text().replace("load_kw", "load_kw,cooling_kw", 1).replace(".0\n", ".0,1\n")
    (folder / "b.csv").write_text(text)


def few_days(folder: Path) -> None:
    (folder / "b.csv").write_text(profile_csv([synthetic_profile(1, 3, MONDAY)]))


def doubled(folder: Path) -> None:
    (folder / "last.csv").write_bytes((folder / "b.csv").read_bytes())


def only_one(folder: Path) -> None:
    for name in NAMES[1:]:
        (folder / f"{name}.csv").unlink()


def emptied(folder: Path) -> None:
    only_one(folder)
    (folder / f"{NAMES[0]}.csv").unlink()


DAYS_OF_B = ", ".join(str(MONDAY + timedelta(days=7 + i)) for i in range(4))
REFUSED = [
    (emptied, [], "holds no profile (*.csv)"),
    (only_one, [], "1 profile, 1 held out; at least one must be trained on"),
    (None, ["--heldout", "4"], "4 profiles, 4 held out; at least one must be trained on"),
    (None, ["--heldout", "0"], "4 profiles, 0 held out"),
    (None, ["--heldout", "9"], "4 profiles, 4 held out"),
    (None, ["--heldout", "c.csv"], "--heldout c.csv: "),
    (few_days, [], "3 day(s); at least 4 are needed"),
    (doubled, ["--heldout", "last.csv"], f"b.csv (to train on) and last.csv (held out) both have {DAYS_OF_B}; take it"),
    (ambiguous, [], "2 columns could be the load column: ['load_kw', 'cooling_kw']; choose one with --load-column"),
    (None, ["--co2-column", "x"], "no column named 'x' (asked for with --co2-column)"),
]


@pytest.mark.parametrize("spoil, options, words", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_sentence(tmp_path, capsys, monkeypatch, spoil, options, words):
    monkeypatch.setattr(subprocess, "run", None)  # nothing is started
    folder = fill(tmp_path / "days")
    if spoil:
        spoil(folder)
    assert script.main([str(folder), "--out", str(tmp_path / "out"), *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert all(words in line for line in lines if "asked" in words) and words in lines[0]
    assert len(lines) == (4 if "asked" in words else 1) and not (tmp_path / "out").exists()


def test_a_csv_that_is_no_profile_is_named_with_what_leaves_it_out(tmp_path, capsys):
    folder = fill(tmp_path / "days")
    (folder / "notes.csv").write_text("a,b,c\n1,2,3\n")
    assert script.main([str(folder)]) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert "notes.csv, header: no datetime column" in first and last.startswith("--files PATTERN leaves out")


def start(folder: Path, out: Path, *options: str, **settings: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        str(ROOT / "scripts/days.py"),
        str(folder),
        "--out",
        str(out),
        "--model",
        "tiny",
        *options,
    ]
    small = {"TOTAL_STEPS": "2", "PROMPTS_PER_STEP": "2", "NUM_GENERATIONS": "2", "EVAL_SAMPLES": "1"}
    return subprocess.run(command, env=CLEAN | small | settings, cwd=ROOT, capture_output=True, text=True)


def test_two_steps_on_real_files_of_days(tmp_path, tiny):
    folder, results = fill(tmp_path / "days", ("a", "b")), tmp_path / "out.json"
    (folder / "notes.csv").write_text("no,profile\n")
    options = ("--files", "[ab].csv", "--results", str(results), "--source", "https://example.org/days")
    done = start(folder, tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    assert "train on a; held out b: 1 window(s) (fewer than 3: no interval)" in done.stdout
    assert "charge_when_clean" in done.stdout and (tmp_path / "out/run/report.html").is_file()
    record = json.loads(results.read_text())
    assert record["source"] == "https://example.org/days" and "--heldout b.csv" in record["command"]
    hashes = [(f"{name}.csv", hashlib.sha256((folder / f"{name}.csv").read_bytes()).hexdigest()) for name in "ab"]
    assert [(one["name"], one["sha256"]) for one in record["files"]] == hashes
    assert [one["set"] for one in record["files"]] == ["train", "heldout"]
    figures = {one["name"]: one["value"] for one in record["figures"]}
    assert figures["steps"] == 2 and figures["train_windows"] == figures["heldout_windows"] == 1
    assert {"reward_before", "reward_after", "regret_percent_base", "unserved_kwh_trained"} <= figures.keys()
    # The plant was run on the days held out, and on nothing else.
    plant = json.loads((tmp_path / "out/run/closed_loop.json").read_text())
    assert [window["name"] for window in plant["windows"]] == [f"b: {MONDAY + timedelta(days=7)}"]
    window = tes.windows(read_profile(folder / "b.csv"))[0]
    assert plant["windows"][0]["load_kw"][8:18] == window.load_kw[0].tolist()


def test_the_exit_code_of_a_run_that_fails_is_passed_on(tmp_path):
    done = start(fill(tmp_path / "days"), tmp_path / "out", LEARNING_RAT="1")
    assert done.returncode == 2 and "LEARNING_RATE" in done.stderr and "report:" not in done.stdout
