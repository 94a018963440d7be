# SPDX-License-Identifier: Apache-2.0
"""scripts/days.py: a folder of profiles split by days, trained on and measured."""

import csv
import json
from datetime import date, timedelta
from pathlib import Path

import days as script
import pytest
from days import read_split, write_data
from helpers import CLEAN
from runs import child_here, coarsen

from grpo.common import InputError
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
    sides = read_split(fill(tmp_path / "days", names), "*.csv", asked_for)
    train, held = ([path.stem for path in side] for side in sides)
    assert held == heldout and train == [name for name in names if name not in heldout]


def test_rows_tell_of_their_own_days(tmp_path):
    train, heldout = read_split(fill(tmp_path / "days"), "*.csv", ())
    settings, rows = write_data(train, heldout, tmp_path / "out", "compact"), {}
    for name in ("DATA", "EVAL_DATA"):
        texts = [Path(path).read_text().splitlines(True) for path in settings[name].split(",")]
        rows[name] = [row for lines in texts for row in csv.DictReader(lines)]
    train_days, heldout_days = ({row["timestamp"][:10] for row in rows[name]} for name in ("DATA", "EVAL_DATA"))
    assert len(rows["EVAL_DATA"]) == 30 and not train_days & heldout_days
    assert 3 * 7 * 30 < len(rows["DATA"]) < 900, "three windows walked through seven times, and short hours"
    loads = {float(row["user"].split(" load ")[1].split()[0]) for row in rows["DATA"]}
    assert max(loads) > 1.3 * max(float(profile.load_kw.max()) for profile in train.values()), "and varied"
    assert settings["EVAL_PROFILE"] == str(tmp_path / "days" / "last.csv")
    assert "tes_last.csv" in write_data(train, heldout, tmp_path / "out", "full")["EVAL_DATA"]


def ambiguous(folder):
    path = folder / "b.csv"
    path.write_text(path.read_text().replace("load_kw", "load_kw,cooling_kw", 1).replace(".0\n", ".0,1\n"))


DAYS_OF_B = ", ".join(str(MONDAY + timedelta(days=7 + i)) for i in range(4))
REFUSED = [  # What spoils the folder, options, and words of the answer.
    (lambda folder: [path.unlink() for path in folder.iterdir()], [], "holds no profile (*.csv)"),
    (None, ["--heldout", "9"], "4 profiles, 4 held out; at least one must be trained on"),
    (None, ["--heldout", "c.csv"], "--heldout c.csv: "),
    (None, ["--heldout", "²"], "--heldout ²: "),  # A digit, but no number for int().
    (
        lambda folder: (folder / "last.csv").write_bytes((folder / "b.csv").read_bytes()),
        ["--heldout", "last.csv"],
        f"b.csv (to train on) and last.csv (held out) both have {DAYS_OF_B}; take",
    ),
    (None, ["--files", "/abs/*.csv"], "--files '/abs/*.csv': name files of "),
    (None, ["--out", "x,y"], "--out x,y: settings separate files by commas; name another folder"),
    (lambda folder: (folder / "b.csv").rename(folder / "b,2.csv"), [], "b,2.csv: settings separate files by commas"),
    (ambiguous, [], "2 columns could be the load column ("),
]


@pytest.mark.parametrize(("spoil", "options", "words"), REFUSED)
def test_what_cannot_be_used_is_refused(tmp_path, monkeypatch, spoil, options, words):
    monkeypatch.setattr("days.run_child", None)  # nothing is started
    folder = fill(tmp_path / "days")
    if spoil:
        spoil(folder)
    with pytest.raises(InputError) as caught:
        script.main([str(folder), "--out", str(tmp_path / "out"), *options])
    assert words in "\n".join(caught.value.args) and not (tmp_path / "out").exists()


def test_two_steps_on_real_files_of_days(tmp_path, capfd, monkeypatch):
    folder, out = fill(tmp_path / "days", ("a", "b")), tmp_path / "out"
    settings = {"TOTAL_STEPS": "2", "PROMPTS_PER_STEP": "2", "NUM_GENERATIONS": "2", "EVAL_SAMPLES": "1"}
    settings["TASK"] = "gsm8k"  # Of another run in this shell: a plant's rows have no `answer`.
    for name, value in (CLEAN | settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("days.run_child", child_here)
    for profile in folder.iterdir():
        coarsen(profile)
    (folder / "notes.csv").write_text("no,profile\n")
    words = [str(folder), "--files", "[ab].csv", "--out", str(out), "--model", "tiny"]
    assert script.main(words) == 0
    shown = capfd.readouterr().out
    assert "train on a; held out b: 1 window(s) (fewer than 3: no confidence interval)" in shown
    assert "charge when clean" in shown and (out / "run/report.html").is_file()
    # The plant was run on the days held out, and on nothing else.
    (window,) = json.loads((out / "run/closed_loop.json").read_text())["windows"]
    assert window["name"] == f"b: {MONDAY + timedelta(days=7)}" and "trained" in window["policies"]
    assert window["load_kw"][:10] == tes.cut_windows(read_profile(folder / "b.csv"))[0].load_kw[0].tolist()
    # The exit code of a run that fails is passed on.
    monkeypatch.setenv("LEARNING_RAT", "1")
    assert script.main(words) == 2
    assert "LEARNING_RATE" in capfd.readouterr().err
