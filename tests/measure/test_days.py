# SPDX-License-Identifier: Apache-2.0
"""scripts/days.py: a folder of profiles split by days, trained on and measured."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from datetime import date, timedelta
from pathlib import Path

import days as script
import numpy as np
import pytest
from conftest import CLEAN

from grpo.measure.days import hours_csv, read_split, write_data
from grpo.tasks.tes import profiles as tes
from grpo.tasks.tes.profiles import profile_csv, read_profile, synthetic_profile

MONDAY = date(2025, 6, 2)
NAMES = ("z_first", "b", "a", "last")  # in the order of their days, not of the alphabet


def fill(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """A folder with a profile of four days for each name, a week from start to start."""
    folder.mkdir()
    for i, name in enumerate(names):
        text = profile_csv([synthetic_profile((5, i), 4, MONDAY + timedelta(days=7 * i))])
        (folder / f"{name}.csv").write_text(text)
    return folder


SPLITS = [
    (NAMES, (), ["last"]),
    (tuple("abcdef"), (), ["e", "f"]),
    (NAMES, ("2",), ["a", "last"]),
    (("a", "b"), (), ["b"]),
    (NAMES, ("b.csv", "x/z_first.csv"), ["z_first", "b"]),
]


@pytest.mark.parametrize(("names", "asked_for", "heldout"), SPLITS)
def test_files_are_split_by_date_or_name_and_a_third_is_held_out(tmp_path, names, asked_for, heldout):
    split = read_split(fill(tmp_path / "days", names), "*.csv", asked_for)
    assert list(split.heldout) == heldout and list(split.train) == [name for name in names if name not in heldout]


def test_rows_tell_of_their_own_days_and_the_plant_sees_every_digit(tmp_path):
    folder = fill(tmp_path / "days")
    night = read_profile(folder / "last.csv")
    night.co2[1, 3], night.co2[0, 9] = np.nan, 1 / 3
    split = read_split(folder, "*.csv", ())
    split.heldout["last"] = night
    settings, rows = write_data(split, tmp_path / "out", "compact"), {}
    for name in ("DATA", "EVAL_DATA"):
        texts = [Path(path).read_text().splitlines(True) for path in settings[name].split(",")]
        rows[name] = [row for lines in texts for row in csv.DictReader(lines)]
    train_days, heldout_days = ({row["timestamp"][:10] for row in rows[name]} for name in ("DATA", "EVAL_DATA"))
    assert len(rows["EVAL_DATA"]) == 30 and not train_days & heldout_days
    assert 3 * 7 * 30 < len(rows["DATA"]) < 900, "three windows walked through seven times, and short hours"
    loads = {float(row["user"].split(" load ")[1].split()[0]) for row in rows["DATA"]}
    assert max(loads) > 1.3 * max(float(profile.load_kw.max()) for profile in split.train.values()), "and varied"
    again, night.load_kw[1, 3] = read_profile(settings["EVAL_PROFILE"]), np.nan
    for name in ("co2", "load_kw"):
        assert np.array_equal(getattr(again, name), getattr(night, name), equal_nan=True)
    assert hours_csv(night).count("\n") == 1 + 4 * 24 - 1
    assert "tes_last.csv" in write_data(split, tmp_path / "out", "full")["EVAL_DATA"]


def test_each_file_and_seed_has_its_run(tmp_path, monkeypatch):
    """With a folder, and names of its figures, of its own; the command names no folder of the machine."""
    started = []

    def pretend(command, env):
        assert str(command[-1]).endswith("train_grpo.py")
        out = Path(env["OUTPUT_DIR"])
        started.append((env["SEED"], Path(env["EVAL_PROFILE"]).name, out.relative_to(tmp_path).as_posix()))
        out.mkdir()
        (out / "metrics.csv").write_text("step\n")
        return 0

    monkeypatch.setattr("grpo.measure.days.run_child", pretend)
    monkeypatch.setenv("TOTAL_STEPS", "3")
    folder, results = fill(tmp_path / "days", ("a", "b")), tmp_path / "out.json"
    words = f"{folder} --out {tmp_path}/out --heldout each --seeds 1 2 --results {results}".split()
    monkeypatch.setattr(sys, "argv", ["/here/scripts/days.py", *words])
    assert script.main(words) == 0
    assert started == [(seed, f"{name}.csv", f"out/{name}-seed{seed}/run") for name in "ab" for seed in "12"]
    record = json.loads(results.read_text())
    assert [row["name"] for row in record["figures"]][:2] == ["train_windows/a/seed1", "heldout_windows/a/seed1"]
    assert {file["set"] for file in record["files"]} == {"held out in turn"}
    command = "TOTAL_STEPS=3 python scripts/days.py days --out out --heldout each --seeds 1 2 --results out.json"
    assert record["command"] == command


def ambiguous(folder):
    path = folder / "b.csv"
    path.write_text(path.read_text().replace("load_kw", "load_kw,cooling_kw", 1).replace(".0\n", ".0,1\n"))


DAYS_OF_B = ", ".join(str(MONDAY + timedelta(days=7 + i)) for i in range(4))
REFUSED = [  # What spoils the folder, options, and words of the answer.
    (lambda folder: [path.unlink() for path in folder.iterdir()], [], "holds no profile (*.csv)"),
    (None, ["--heldout", "0"], "4 profiles, 0 held out"),
    (None, ["--heldout", "9"], "4 profiles, 4 held out; at least one must be trained on"),
    (None, ["--heldout", "c.csv"], "--heldout c.csv: "),
    (
        lambda folder: (folder / "last.csv").write_bytes((folder / "b.csv").read_bytes()),
        ["--heldout", "last.csv"],
        f"b.csv (to train on) and last.csv (held out) both have {DAYS_OF_B}; take",
    ),
    (ambiguous, [], "2 columns could be the load column: ['load_kw', 'cooling_kw']; choose one with --load-column"),
    (lambda folder: (folder / "notes.csv").write_text("a,b,c\n"), [], "notes.csv, header: no datetime column"),
]


@pytest.mark.parametrize(("spoil", "options", "words"), REFUSED)
def test_what_cannot_be_used_is_refused(tmp_path, capsys, monkeypatch, spoil, options, words):
    monkeypatch.setattr("grpo.measure.days.run_child", None)  # nothing is started
    folder = fill(tmp_path / "days")
    if spoil:
        spoil(folder)
    assert script.main([str(folder), "--out", str(tmp_path / "out"), *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert words in lines[0] and not (tmp_path / "out").exists()
    assert lines[-1].startswith("--files PATTERN leaves out") == ("notes" in words)


def test_two_steps_on_real_files_of_days(tmp_path, capfd, monkeypatch):
    folder, results = fill(tmp_path / "days", ("a", "b")), tmp_path / "out.json"
    settings = {"TOTAL_STEPS": "2", "PROMPTS_PER_STEP": "2", "NUM_GENERATIONS": "2", "EVAL_SAMPLES": "1"}
    for name, value in (CLEAN | settings).items():
        monkeypatch.setenv(name, value)
    options = ["--files", "[ab].csv", "--results", str(results), "--source", "https://example.org/days"]
    (folder / "notes.csv").write_text("no,profile\n")
    assert script.main([str(folder), "--out", str(tmp_path / "out"), "--model", "tiny", *options]) == 0
    shown = capfd.readouterr().out
    assert "train on a; held out b: 1 window(s) (fewer than 3: no interval)" in shown
    assert "charge_when_clean" in shown and (tmp_path / "out/run/report.html").is_file()
    record = json.loads(results.read_text())
    assert record["source"] == "https://example.org/days"
    hashes = [(f"{name}.csv", hashlib.sha256((folder / f"{name}.csv").read_bytes()).hexdigest()) for name in "ab"]
    assert [(file["name"], file["sha256"]) for file in record["files"]] == hashes
    assert [file["set"] for file in record["files"]] == ["train", "heldout"]
    figures = {row["name"]: row["value"] for row in record["figures"]}
    assert figures["steps"] == 2 and figures["train_windows"] == figures["heldout_windows"] == 1
    assert {"reward_before", "reward_after", "regret_percent_base", "unserved_kwh_trained"} <= figures.keys()
    # The plant was run on the days held out, and on nothing else.
    (window,) = json.loads((tmp_path / "out/run/closed_loop.json").read_text())["windows"]
    assert window["name"] == f"b: {MONDAY + timedelta(days=7)}"
    assert window["load_kw"][8:18] == tes.windows(read_profile(folder / "b.csv"))[0].load_kw[0].tolist()
    # Again, as after an interrupt between two runs: what is complete is not refused, and its figures are written.
    results.unlink()
    assert script.main([str(folder), "--out", str(tmp_path / "out"), "--model", "tiny", *options]) == 0
    assert "run is complete" in capfd.readouterr().out and json.loads(results.read_text())["figures"]
    # The exit code of a run that fails is passed on.
    monkeypatch.setenv("LEARNING_RAT", "1")
    assert script.main([str(folder), "--out", str(tmp_path / "out"), "--files", "[ab].csv", "--model", "tiny"]) == 2
    assert "LEARNING_RATE" in capfd.readouterr().err
