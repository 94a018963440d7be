# SPDX-License-Identifier: Apache-2.0
"""The rows, the files under data/, and scripts/make_dataset.py."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import make_dataset as md
import numpy as np
import pytest
from helpers import ROOT, read_csv
from test_tes_profiles import GOOD, JAPANESE, as_csv, profile_rows

from grpo.common import InputError
from grpo.tasks.tes.dataset import SEED, profile_files, short_hours, synthetic_windows
from grpo.tasks.tes.plant import HOURS, PLANT, q_values
from grpo.tasks.tes.profiles import TRAIN_START, Window, synthetic_profile

DATA = ROOT / "data"
NAMES = ("tes_train.csv", "tes_heldout.csv", "tes_train_compact.csv", "tes_heldout_compact.csv")


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    table = profile_rows()
    table[9][1], table[10][2], table[11][0] = "x", "-1", "never"
    (tmp_path / "a.csv").write_text(as_csv(table))
    (tmp_path / "b.csv").write_text(as_csv(profile_rows(2)))
    (tmp_path / "d.csv").write_text(GOOD.replace(",0.3", ",?0.3"))
    profiles = [str(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv", "d.csv")]
    with pytest.raises(InputError) as caught:
        md.main(["--profile", *profiles, "--out", str(tmp_path / "out")])
    message = str(caught.value)
    parts = ["a.csv, row 9, column 'co2'", "row 10, column 'load'", "row 11, column 'datetime'"]
    parts += ["no 4 consecutive days", "c.csv: cannot", "d.csv, row 20, column", "d.csv: and 4 more"]
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()


def test_train_and_heldout_share_nothing() -> None:
    for suffix in ("", "_compact"):
        train, heldout = (read_csv(DATA / f"tes_{split}{suffix}.csv") for split in ("train", "heldout"))
        assert not {row["timestamp"] for row in train} & {row["timestamp"] for row in heldout}
        column = "user" if suffix else "prompt"
        assert not {row[column] for row in train} & {row[column] for row in heldout}
    streams = [synthetic_windows(SEED, stream, 20, TRAIN_START) for stream in range(4)]
    days = [day.tobytes() for stream in streams for window, _ in stream for day in window.co2]
    assert len(days) == len(set(days)) == 4 * 20 * 4


def test_short_hours_are_spread_over_the_day_and_exact() -> None:
    """One for each hour: a trajectory hardly ever is short in the afternoon, a policy that empties the storage is."""
    window, rng = next(synthetic_windows(5, 3, 1, TRAIN_START))
    decisions = short_hours(window, rng, "compact")
    assert [state.stamp.hour for _, state in decisions] == list(HOURS)
    assert all(state.short_kwh > 0 for _, state in decisions)
    assert len({state.stamp.date() for _, state in decisions}) > 1
    grid = window.solve(start_kwh=np.linspace(0, PLANT.capacity_kwh, 61))
    for row, state in decisions:
        t = len(HOURS) * window.dates.index(state.stamp.date()) + HOURS.index(state.stamp.hour)
        mine = [row[f"q_action_{k}"] for k in range(4)]
        assert np.allclose(mine, q_values(grid, t, state.energy_kwh), atol=0.5)
    # An hour without a load cannot be short.
    idle = Window(window.dates, window.co2, np.where(np.arange(10) == 4, 0.0, window.load_kw))
    assert [state.stamp.hour for _, state in short_hours(idle, rng, "full")] == [8, 9, 10, 11, 13, 14, 15, 16, 17]


DAYS = ("tes_day_train.jsonl", "tes_day_heldout.jsonl")


def test_the_committed_files_are_those_of_their_seed(tmp_path: Path) -> None:
    assert md.main(["--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*NAMES, *DAYS, "profile_heldout.csv"])
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (DATA / path.name).read_bytes(), path.name


def test_own_profiles(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    long, short = tmp_path / "long.csv", tmp_path / "short.csv"
    long.write_text(as_csv(profile_rows(9)))
    short.write_bytes(JAPANESE.encode("utf-8-sig"))
    out = tmp_path / "out"
    options = ["--out", str(out), "--prompt", "both", "--trajectories", "2", "--explore", "0"]
    assert md.main(["--profile", str(long), str(short), *options]) == 0
    report = capsys.readouterr().out
    assert "long: 9 days, 2 window(s); not used: ['2025-04-21', '2025-04-22']" in report
    names = ["tes_long.csv", "tes_long_compact.csv", "tes_short.csv", "tes_short_compact.csv"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert [len(read_csv(out / name)) for name in names] == [120, 120, 60, 60]
    energies = re.findall(r"energy \[kWh\]: (\d+)", read_csv(out / "tes_short.csv")[0]["prompt"])
    assert energies == ["150"] and "energy [kWh]: 150\n" not in read_csv(out / "tes_short.csv")[30]["prompt"]
    assert "load=32.5 kW, co2=0.312 kg-CO2/kWh" in read_csv(out / "tes_short.csv")[0]["prompt"]
    # The same rows, and short hours behind them.
    more = tmp_path / "more"
    assert md.main(["--profile", str(long), "--out", str(more), *options[2:], "--short-share", "0.4"]) == 0
    rows, added = read_csv(out / "tes_long_compact.csv"), read_csv(more / "tes_long_compact.csv")
    assert added[:120] == rows and len(added) > 130
    assert sum(" short 0 " not in row["user"] for row in added) >= 0.35 * len(added)
    # By default DATA='DIR/*.csv' holds every hour once.
    assert md.main(["--profile", str(long), "--out", str(tmp_path / "once")]) == 0
    assert [path.name for path in (tmp_path / "once").iterdir()] == ["tes_long.csv"]


def test_further_walks_vary_the_loads() -> None:
    """The first is as it was; the factors themselves are those of the committed files."""
    profiles = {Path("x"): synthetic_profile(3, 7)}
    plain, other = (
        list(csv.DictReader(text.splitlines()))
        for vary in (1, 3)
        for _, text in profile_files(profiles, ("compact",), 1, trajectories=2, short_share=0.3, vary=vary)
    )
    first = [*range(30), *range(60, 90)]
    assert [plain[i] for i in first] == [other[i] for i in first] and plain[30:60] != other[30:60]


OWN = ["--profile", "a.csv", "--out", "x"]
WRONG = [(OWN[:2], "--out"), (["--explore", "0.1"], "--profile")]
WRONG += [(["--seed", "-1"], "from 0"), ([*OWN, "--vary", "nan"], "from 1 to 10")]


@pytest.mark.parametrize(("arguments", "reason"), WRONG)
def test_wrong_command_lines(arguments: list[str], reason: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        md.main(arguments)
    assert caught.value.code == 2 and reason in capsys.readouterr().err


def test_profiles_and_folders_that_cannot_be_written(tmp_path: Path) -> None:
    profiles = [tmp_path / name for name in ("a.csv", "b/a.csv")]
    profiles[1].parent.mkdir()
    for path in profiles:
        path.write_text(GOOD)
    with pytest.raises(InputError, match=r"b/a.csv: another profile has this name too; rename"):
        md.main(["--profile", *map(str, profiles), "--out", str(tmp_path)])
    with pytest.raises(InputError, match="choose another --out"):
        md.main(["--out", str(profiles[0])])
    profiles[1] = profiles[0].rename(tmp_path / "b" / "a_compact.csv")
    profiles[0].write_text(GOOD)
    options = ["--profile", *map(str, profiles), "--out", str(tmp_path / "out"), "--prompt"]
    with pytest.raises(InputError, match="both: a_compact.csv has the name of another profile's compact rows; rename"):
        md.main([*options, "both"])
    assert not (tmp_path / "out").exists()
    assert md.main([*options, "compact"]) == 0 and len(list((tmp_path / "out").iterdir())) == 2
