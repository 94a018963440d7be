# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/make_dataset.py: plant, optimum, rewards, profiles, prompts, files.

python -m pytest tests/test_dataset.py -q
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
import re
import shutil
from datetime import date, datetime, timedelta
from pathlib import Path

import make_dataset as md
import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.data.files import read_csv
from grpo.settings import Problems
from grpo.tasks.tes.dataset import (
    HELDOUT_STREAM,
    ROWS_STREAM,
    SEED,
    short_hours,
    short_windows,
    synthetic_rows,
    synthetic_windows,
    trajectory,
    window_rows,
    with_short_hours,
)
from grpo.tasks.tes.plant import HOURS, Plant, best_action, boltzmann, q_values, solve, step
from grpo.tasks.tes.profiles import (
    HELDOUT_START,
    TRAIN_START,
    Profile,
    ProfileError,
    Window,
    read_profile,
    synthetic_profile,
    to_csv,
    windows,
)
from grpo.tasks.tes.prompts import State, render_compact, render_full
from rewards import baselines

PLANT = Plant()
DATA = ROOT / "data"
FILES = ("tes_train.csv", "tes_heldout.csv", "tes_train_compact.csv", "tes_heldout_compact.csv")

loads = st.floats(0, 120, allow_subnormal=False)
intensities = st.floats(0.1, 0.7, allow_subnormal=False)
energies = st.floats(0, PLANT.capacity_kwh, allow_subnormal=False)


# ---- The plant and the optimum --------------------------------------------------------------------------------------


def hour_by_hand(energy: float, output: float, load: float, co2: float) -> tuple[float, float]:
    """One hour as the specification tells it, in branches and literals; returns energy after it and cost."""
    from_pump = min(output, load)
    from_storage = min(energy, load - from_pump)
    unserved = load - from_pump - from_storage
    charged = min(output - from_pump, 300.0 - (energy - from_storage))
    return energy - from_storage + charged, (output / 4.0 * co2 + 10.0 * unserved) / 6.0


def brute_force(energy: float, load: np.ndarray, co2: np.ndarray, price: float) -> np.ndarray:
    """Value of each first action, by trying every sequence of actions."""
    best = np.full(4, -math.inf)
    for actions in itertools.product(range(4), repeat=len(load)):
        at, total = energy, 0.0
        for action, demand, intensity in zip(actions, load, co2, strict=True):
            at, cost = hour_by_hand(at, 100.0 * action / 3.0, demand, intensity)
            total -= cost
        best[actions[0]] = max(best[actions[0]], total + price * at)
    return best


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(loads, intensities), min_size=1, max_size=4), energies, intensities)
def test_values_equal_those_of_brute_force(hours: list[tuple[float, float]], energy: float, low: float) -> None:
    load, co2 = np.array(hours).T
    price = low / 4.0 / 6.0
    expected = brute_force(energy, load, co2, price)
    for grid in (None, 0.5):  # with and without the even grid, a state that was asked for is exact
        solution = solve(PLANT, load, co2, price, start_kwh=energy, grid_kwh=grid)
        np.testing.assert_allclose(q_values(solution, 0, energy), expected, rtol=0, atol=1e-6)
        assert np.interp(energy, solution.nodes[0], solution.values[0]) == pytest.approx(expected.max(), abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(loads, intensities), min_size=4, max_size=4), energies, st.integers(0, 3))
def test_values_stay_exact_along_a_trajectory(hours: list[tuple[float, float]], energy: float, action: int) -> None:
    load, co2 = np.array(hours).T
    solution = solve(PLANT, load, co2, 0.01, start_kwh=energy, grid_kwh=None)
    after = float(step(PLANT, energy, action, load[0], co2[0]).energy_kwh)
    expected = brute_force(after, load[1:], co2[1:], 0.01)
    np.testing.assert_allclose(q_values(solution, 1, after), expected, rtol=0, atol=1e-6)


def test_even_grid_alone_is_close_on_typical_days() -> None:
    window = windows(synthetic_profile(5, 4))[0]
    even = window.solve(PLANT, start_kwh=None, grid_kwh=0.05)
    for energy in (37.0, 150.0, 263.0):
        exact = window.solve(PLANT, start_kwh=energy, grid_kwh=None)
        np.testing.assert_allclose(q_values(even, 0, energy), q_values(exact, 0, energy), rtol=0, atol=0.01)


def test_reachable_energies_stay_few_and_thinning_stays_close() -> None:
    window = windows(synthetic_profile(6, 4))[0]
    exact = window.solve(PLANT, grid_kwh=None)
    assert all(nodes.size <= 10 * (t + 1) for t, nodes in enumerate(exact.nodes))
    odd = Plant(ratios=(0.0, 0.317, 0.691, 1.0), capacity_kwh=287.3)  # no common divisor: the nodes would explode
    full = window.solve(odd, grid_kwh=None, max_nodes=20000)
    thin = window.solve(odd, grid_kwh=None, max_nodes=1000)
    assert max(nodes.size for nodes in thin.nodes) <= 1000 < max(nodes.size for nodes in full.nodes)
    np.testing.assert_allclose(q_values(thin, 0, 150.0), q_values(full, 0, 150.0), rtol=0, atol=0.02)


@given(energies, st.integers(0, 3), loads, intensities)
def test_step_conserves_energy(energy: float, action: int, load: float, co2: float) -> None:
    done = step(PLANT, energy, action, load, co2)
    output = 100.0 * action / 3.0
    served = load - done.unserved_kwh
    assert energy + output == pytest.approx(done.energy_kwh + served + done.lost_kwh, abs=1e-9)
    assert 0 <= done.energy_kwh <= 300 and done.unserved_kwh >= 0 and done.lost_kwh >= 0 and served >= -1e-9
    assert done.unserved_kwh == 0 or done.energy_kwh == 0  # nothing is left unserved while heat is stored
    assert done.lost_kwh == 0 or done.energy_kwh == 300
    by_hand = hour_by_hand(energy, output, load, co2)
    assert (done.energy_kwh, -done.reward) == (pytest.approx(by_hand[0], abs=1e-9), pytest.approx(by_hand[1], abs=1e-9))


def test_step_broadcasts_and_charges_for_the_scheduled_output() -> None:
    done = step(PLANT, np.array([0.0, 300.0])[:, None], np.arange(4), 50.0, 0.4)
    assert done.energy_kwh.shape == done.reward.shape == done.lost_kwh.shape == (2, 4)
    np.testing.assert_allclose(done.emissions_kg[0], done.emissions_kg[1])  # a full storage saves nothing
    np.testing.assert_allclose(done.emissions_kg[1], [0.0, 10 / 3, 20 / 3, 10.0])
    assert done.lost_kwh[1, 3] == pytest.approx(50.0) and done.unserved_kwh[0, 0] == pytest.approx(50.0)


def test_end_is_worth_the_five_lowest_hours_of_the_next_day() -> None:
    window = windows(synthetic_profile(7, 4))[0]
    q = q_values(window.solve(PLANT), 29, 200.0)
    load, co2 = float(window.load_kw[2, 9]), float(window.co2[2, 9])
    low = sum(sorted(window.co2[3])[:5]) / 5  # of the decision hours: nights do not count
    energy, cost = hour_by_hand(200.0, 0.0, load, co2)
    assert q[0] == pytest.approx(-cost + energy * low / 24, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"load": np.ones(2)}, "shape"), ({"start_kwh": None, "grid_kwh": None}, "no energy")],
)
def test_solve_rejects_what_it_cannot_use(options: dict, reason: str) -> None:
    load = options.pop("load", np.ones(3))
    with pytest.raises(ValueError, match=reason):
        solve(PLANT, load, np.ones(3), 0.01, **options)


# ---- Rewards --------------------------------------------------------------------------------------------------------


def test_softmax_golden() -> None:
    q = np.array([-1.0, -1.05, -1.1, -1.0])  # differences of 0, 1, 2, 0 temperatures
    total = 2 + math.exp(-1) + math.exp(-2)
    expected = [1 / total, math.exp(-1) / total, math.exp(-2) / total, 1 / total]
    np.testing.assert_allclose(boltzmann(q), expected, rtol=1e-12)
    np.testing.assert_allclose(expected, [0.3995, 0.1470, 0.0541, 0.3995], atol=1e-4)


def test_softmax_is_stable() -> None:
    with np.errstate(over="raise", invalid="raise"):
        rewards = boltzmann(np.array([[-5000.0, 0.0, -5000.0, 0.0], [4000.0, 3999.0, -9e5, 0.0]]))
    np.testing.assert_allclose(rewards, [[0, 0.5, 0, 0.5], [1, 0, 0, 0]], atol=1e-8)


def test_best_action_prefers_the_first_of_equals() -> None:
    assert best_action(np.array([-1.0, -0.5, -0.5 + 1e-12, -2.0])) == 1
    assert best_action(np.array([-1.0, -0.5, -0.5 + 1e-6, -2.0])) == 2


# ---- Days and rows --------------------------------------------------------------------------------------------------


def test_synthetic_days_are_seeded_and_plausible() -> None:
    one, same, other = synthetic_profile(1, 8), synthetic_profile(1, 8), synthetic_profile(2, 8)
    assert np.array_equal(one.co2, same.co2) and np.array_equal(one.load_kw, same.load_kw)
    assert not np.array_equal(one.co2, other.co2)
    assert one.co2.min() >= 0.15 and one.co2.max() <= 0.6
    night = np.ones(24, bool)
    night[list(HOURS)] = False
    assert not one.load_kw[:, night].any() and (one.load_kw[:, ~night] > 0).all()


def test_windows_share_the_next_day_and_never_span_a_gap() -> None:
    profile = synthetic_profile(3, 15)
    cut = windows(profile)
    assert [w.dates[0] for w in cut] == [profile.dates[i] for i in (0, 3, 6, 9)]
    assert all(w.load_kw.shape == w.co2.shape == (4, 10) for w in cut)
    keep = [i for i in range(15) if i != 5]
    gapped = Profile(tuple(profile.dates[i] for i in keep), profile.co2[keep], profile.load_kw[keep])
    assert [w.dates[0] for w in windows(gapped)] == [profile.dates[i] for i in (0, 6, 9)]
    for window in windows(gapped):
        assert [(day - window.dates[0]).days for day in window.dates] == [0, 1, 2, 3]


def test_rows_of_a_window() -> None:
    window = windows(synthetic_profile(4, 4))[0]
    full = window_rows(window, np.random.default_rng(0), "full")
    compact = window_rows(window, np.random.default_rng(0), "compact")
    assert [row["timestep"] for row in full] == [*range(8, 18), *range(32, 42), *range(56, 66)]
    assert [row["q_action_0"] for row in full] == [row["q_action_0"] for row in compact]
    assert [datetime.fromisoformat(row["timestamp"]).hour for row in full] == [*HOURS] * 3
    assert "energy [kWh]: 150\n" in full[0]["prompt"]
    optimal = window_rows(window, np.random.default_rng(0), "full", explore=0.0)
    # Along the optimum, the best value falls by what the hour cost: Bellman's equation between rows.
    for before, after in itertools.pairwise(optimal):
        best = max(before[f"q_action_{k}"] for k in range(4))
        day, hour = divmod(before["timestep"], 24)
        output = 100.0 * before["optimal_action"] / 3
        load, co2 = window.load_kw[day, hour - 8], window.co2[day, hour - 8]
        energy = float(re.search(r"energy \[kWh\]: (\d+)", before["prompt"])[1])
        unserved = max(0.0, load - output - energy - 0.5)
        assert unserved == 0  # on such days the optimum serves all load
        assert best == pytest.approx(-output / 4 * co2 / 6 + max(after[f"q_action_{k}"] for k in range(4)), abs=1e-9)


def test_synthetic_rows() -> None:
    rows = synthetic_rows(3, 2)
    assert len(rows) == 60 and rows == synthetic_rows(3, 2) and rows != synthetic_rows(4, 2)
    assert rows[:30] == synthetic_rows(3, 1)
    for row in rows:
        assert isinstance(row["q_action_3"], float) and isinstance(row["reward_action_0"], float)
        assert sum(row[f"reward_action_{k}"] for k in range(4)) == pytest.approx(1)
    with pytest.raises(ValueError, match="seed must be"):
        synthetic_rows(2**32, 1)
    committed = (DATA / "tes_train_compact.csv").read_text() + (DATA / "tes_heldout_compact.csv").read_text()
    assert not any(row["user"] in committed for row in synthetic_rows(SEED, 2))


# ---- Prompts --------------------------------------------------------------------------------------------------------


def a_state(hour: int, energy: float = 150.0) -> State:
    """A state with numbers that can be told apart."""
    load, co2 = np.arange(20.0, 30.0), np.array([0.40, 0.35, 0.30, 0.25, 0.20, 0.21, 0.26, 0.31, 0.36, 0.41])
    return State(datetime(2025, 4, 14, hour), energy, load, co2, load + 10, co2 + 0.1)


def test_full_prompt() -> None:
    text = render_full(a_state(9, 87.6))
    assert re.findall(r"<\|start\|>(\w+)", text) == ["system", "developer", "user", "assistant"]
    assert text.endswith("<|end|><|start|>assistant") and text.count("<|end|>") == 3 and text.count("←Now!!!") == 1
    assert "Current time [h]: 2025-04-14 09:00:00\n- Current TES energy [kWh]: 88\n" in text
    assert "  - 08:00: past hour -> omitted (state uses zero)\n  - 09:00: load=21.0 kW, co2=0.350 kg-CO2/kWh  ←" in text
    assert "load_mean=34.5 kW" in text and "co2_low5_avg=0.344 kg" in text and "co2_min=0.300 kg" in text
    assert "in {0, 1, 2, 3}" in text and "{" not in text.split("<|start|>user")[1]


def test_compact_prompt() -> None:
    system, user = render_compact(a_state(14))
    assert all(f"[{k}]" in system for k in range(4))
    assert user == (
        "hour 14 store 50 load 26 co2 26 next 34 gain 58 short 0 room 100 need 0 rank 0 ahead 31 36 41 loads 27 28 29"
    )
    _, tight = render_compact(a_state(8, 6.0))
    assert "store 2 load 20 " in tight and " short 14 room 100 need 22 rank 8 " in tight
    assert " room 20 " in render_compact(a_state(8, 300.0))[1]
    assert " need 4 " in render_compact(a_state(8, 200.0))[1]  # 225 later, 200 - 20 left: 45 kWh
    flat = dataclasses.replace(a_state(8), co2=np.full(10, 0.3))
    assert " rank 0 " in render_compact(flat)[1]  # equal is not lower


@settings(max_examples=50, deadline=None)
@given(st.integers(8, 17), energies, st.lists(st.tuples(st.floats(0, 500), st.floats(0, 2)), min_size=20, max_size=20))
def test_compact_prompt_is_short_and_small(hour: int, energy: float, hours: list[tuple[float, float]]) -> None:
    load, co2 = np.array(hours).T
    state = State(datetime(2025, 4, 14, hour), energy, load[:10], co2[:10], load[10:], co2[10:])
    words = render_compact(state)[1].split()
    assert len(words) <= 40 and all(word.isalnum() for word in words)
    assert all(0 <= int(word) <= 100 for word in words if word.isdigit())


# ---- Profiles -------------------------------------------------------------------------------------------------------


def profile_rows(days: int = 4, hours: range = range(24)) -> list[list[str]]:
    """A good profile as a table: header, then a row an hour."""
    table = [["datetime", "co2", "load"]]
    for i in range(days):
        for hour in hours:
            stamp = datetime(2025, 4, 14, hour) + timedelta(days=i)
            table.append([str(stamp), f"0.{300 + hour}", f"{20 + hour}.5" if hour in HOURS else "0.0"])
    return table


def as_csv(table: list[list[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in table)


def changed(row: int, column: int, text: str) -> str:
    """A good profile with one cell changed; row as the messages count them, 0 is the header."""
    table = profile_rows()
    table[row][column] = text
    return as_csv(table)


def renamed(*header: str) -> str:
    return as_csv([list(header), *profile_rows()[1:]])


def with_column(name: str, where: int = 3) -> str:
    table = profile_rows()
    return as_csv([row[:where] + [name if i == 0 else "1"] + row[where:] for i, row in enumerate(table)])


GOOD = as_csv(profile_rows())
NOON = 13  # row of 12:00 on the first day
# Each case: a file that is accepted and one that is not for a single reason, and what the message must name.
PROFILES = {
    "not a number": (
        changed(NOON, 2, "30"),
        changed(NOON, 2, "30 kW"),
        ("row 13 (line 14)", "'load'", "'30 kW'", "number"),
    ),
    "digits apart": (changed(NOON, 2, "10"), changed(NOON, 2, "1_0"), ("row 13 (line 14)", "'load'", "number")),
    "nan": (changed(NOON, 1, "0.3"), changed(NOON, 1, "nan"), ("row 13 (line 14)", "'co2'", "finite")),
    "empty cell": (changed(NOON, 1, " 0.3 "), changed(NOON, 1, ""), ("row 13 (line 14)", "'co2'", "empty")),
    "negative load": (changed(NOON, 2, "0"), changed(NOON, 2, "-0.1"), ("row 13 (line 14)", "'load'", "negative")),
    "negative co2": (changed(NOON, 1, "0"), changed(NOON, 1, "-0.1"), ("row 13 (line 14)", "'co2'", "negative")),
    "grams": (changed(NOON, 1, "0.456"), changed(NOON, 1, "456"), ("row 13 (line 14)", "'co2'", "1000")),
    "load at night": (changed(3, 2, "0"), changed(3, 2, "5"), ("row 3 (line 4)", "'load'", "outside 08:00-17:00")),
    "half hours": (
        changed(NOON, 0, "2025/4/14 12:00"),
        changed(NOON, 0, "2025-04-14 12:30:00"),
        ("row 13 (line 14)", "full hour", "12:00"),
    ),
    "no datetime": (
        changed(NOON, 0, "2025-04-14T12:00"),
        changed(NOON, 0, "noon"),
        ("row 13 (line 14)", "'datetime'", "'noon'"),
    ),
    "utc offset": (
        changed(NOON, 0, "2025-04-14 12:00"),
        changed(NOON, 0, "2025-04-14 12:00+09:00"),
        ("row 13 (line 14)", "UTC offset"),
    ),
    "duplicate": (GOOD, changed(NOON, 0, "2025-04-14 11:00:00"), ("row 13 (line 14)", "row 12 (line 13)", "12:00")),
    "unsorted": (
        GOOD,
        as_csv([*profile_rows()[:13], *profile_rows()[14:12:-1], *profile_rows()[15:]]),
        ("row 14 (line 15)", "sort"),
    ),
    "missing hour": (
        as_csv(profile_rows()[:4] + profile_rows()[5:]),
        as_csv(profile_rows()[:13] + profile_rows()[14:]),
        ("2025-04-14", "12:00"),
    ),
    "every morning": (as_csv(profile_rows(hours=range(8, 18))), as_csv(profile_rows(hours=range(9, 18))), ("08:00",)),
    "too few days": (GOOD, as_csv(profile_rows(3)), ("3 day(s)", "at least 4")),
    "short block": (
        as_csv(profile_rows(9)[:97] + profile_rows(9)[121:]),
        as_csv(profile_rows(8)[:97] + profile_rows(8)[121:]),
        ("2025-04-19 to 2025-04-21", "3 consecutive"),
    ),
    "extra cell": (GOOD, GOOD.replace("0.312,32.5\n", "0.312,32,5\n", 1), ("row 13 (line 14)", "4 cells", "3 columns")),
    "blank lines": (GOOD.replace("\n", "\n\n"), "\n" + GOOD, ("is empty",)),
    "empty file": (GOOD, "", ("is empty",)),
    "only a header": (GOOD, "datetime,co2,load\n", ("0 day(s)",)),
    "semicolons": (GOOD, GOOD.replace(",", ";"), ("mine.csv, header", "commas")),
    "no co2 column": (renamed("datetime", "Grid ＣＯ₂ (kg)", "x_load"), renamed("datetime", "grid", "load"), ("co2",)),
    "no load column": (renamed("datetime", "co2", "demand"), renamed("datetime", "co2", "kWh"), ("--load-column",)),
    "no time column": (renamed("timestamp", "co2", "load"), renamed("t", "co2", "load"), ("datetime",)),
    "two loads": (with_column("outdoor_degc"), with_column("heating_load"), ("'load'", "'heating_load'", "--load-c")),
    "two co2s": (with_column("time_of_use"), with_column("CO2_lag"), ("'co2'", "'CO2_lag'", "--co2-column")),
    "japanese": (
        renamed("datetime", "CO2排出係数[kg-CO2/kWh]", "冷房需要[kW]"),
        renamed("datetime", "CO2排出係数[kg-CO2/kWh]", "CO2排出量[kg]"),
        ("CO2排出量[kg]", "--co2-column"),
    ),
}


@pytest.mark.parametrize("name", PROFILES)
def test_profile_errors(name: str, tmp_path: Path) -> None:
    good, bad, parts = PROFILES[name]
    path = tmp_path / "mine.csv"
    path.write_text(good)
    assert windows(read_profile(path))
    path.write_text(bad)
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    # A single reason gives a single message; a moved row is also missing where it was.
    days = 4 if name == "every morning" else 2
    assert len(caught.value.problems) <= days, caught.value.problems
    message = str(caught.value)
    assert all(part in message for part in (str(path), *parts)), message


def test_all_problems_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    table = profile_rows()
    table[9][1], table[10][2], table[11][0] = "x", "-1", "never"
    (tmp_path / "a.csv").write_text(as_csv(table))
    (tmp_path / "b.csv").write_text(as_csv(profile_rows(2)))
    profiles = [str(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv")]
    assert md.main(["--profile", *profiles, "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    parts = (
        "a.csv, row 9 (line 10), column 'co2'", "row 10 (line 11), column 'load'", "row 11 (line 12), column 'datetime'",
        "2 day(s)", "c.csv: cannot",
    )  # fmt: skip
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()


def test_a_long_list_of_problems_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "a.csv"
    path.write_text(GOOD.replace(",0.3", ",?0.3"))
    assert md.main(["--profile", str(path), "--out", str(tmp_path)]) == 2
    assert "and 66 more problem(s)" in capsys.readouterr().err  # 96 hours, 30 shown


def test_rows_are_counted_as_by_the_trainer(tmp_path: Path) -> None:
    """Below the header and without blank lines; the line is where the row begins."""

    path = tmp_path / "mine.csv"
    head = "datetime,co2,load,prompt,reward_action_0,reward_action_1\n"
    day = '2025-04-14 0{}:00,0.3,{},"two\nlines",1,{}\n'
    path.write_text(head + day.format(8, 1, 1) + "\n" + day.format(9, "x", "x"))
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    problems = Problems()
    read_csv(path, problems)
    (mine,), (theirs,) = ([line for line in lines if "'x'" in line] for lines in (caught.value.problems, problems))
    assert mine.startswith(f"{path}, row 2 (line 5), column 'load': 'x'"), mine
    assert theirs.startswith(f"{path}, row 2 (line 5), column reward_action_1: 'x'"), theirs


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp932"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    # A byte order mark must not hide the plain name: the other time column would be as good.
    rows = with_column("time_of_use").replace("datetime,co2,load", "datetime,CO2排出係数[kg-CO2/kWh],冷房需要[kW]")
    path.write_bytes(rows.encode(encoding))
    profile = read_profile(path)
    assert profile.co2[0, 12] == 0.312 and profile.load_kw[3, 8] == 28.5 and profile.dates[0] == date(2025, 4, 14)


@pytest.mark.parametrize(("raw", "reason"), [(GOOD.encode("utf-16"), "UTF-16"), (b"datetime,\x81\x20,x", "CP932")])
def test_wrong_encodings(raw: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(raw)
    with pytest.raises(ProfileError, match=f"mine.csv.*{reason}.*save it"):
        read_profile(path)


def test_columns_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(with_column("heating_load"))
    assert read_profile(path, load_column="load").load_kw[0, 12] == 32.5
    path.write_text(renamed("datetime", "a", "b"))
    assert read_profile(path, "a", "b").co2[0, 12] == 0.312
    for names, reason in ((("c", "b"), "no column named 'c'"), (("a", "a"), "both co2 and load")):
        with pytest.raises(ProfileError, match=reason):
            read_profile(path, *names)


def test_heldout_profile_reads_back(tmp_path: Path) -> None:
    profile = read_profile(DATA / "profile_heldout.csv")
    cut = windows(profile)
    made = synthetic_windows(SEED, HELDOUT_STREAM, 5, HELDOUT_START)
    assert len(cut) == 5
    for window, (expected, _) in zip(cut, made, strict=True):
        assert window.dates == expected.dates
        assert np.array_equal(window.co2, expected.co2) and np.array_equal(window.load_kw, expected.load_kw)


# ---- Files and command line -----------------------------------------------------------------------------------------


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("name", "count"), list(zip(FILES, (155, 60, 815, 150), strict=True)))
def test_files_are_consistent(name: str, count: int) -> None:
    rows = table(DATA / name)
    assert len(rows) == count
    context = ["system", "user"] if "compact" in name else ["prompt"]
    values = [f"{kind}_action_{k}" for kind in ("q", "reward") for k in range(4)]
    assert list(rows[0]) == ["timestep", "timestamp", *context, "optimal_action", *values]
    q = np.array([[float(row[f"q_action_{k}"]) for k in range(4)] for row in rows])
    rewards = np.array([[float(row[f"reward_action_{k}"]) for k in range(4)] for row in rows])
    weights = np.exp((q - q.max(axis=1, keepdims=True)) / 0.05)
    np.testing.assert_allclose(rewards, weights / weights.sum(axis=1, keepdims=True), atol=1e-6)
    best = [int(row["optimal_action"]) for row in rows]
    np.testing.assert_allclose(q[np.arange(len(q)), best], q.max(axis=1), atol=1e-8)
    assert (DATA / name).stat().st_size < 700_000
    made = baselines(rewards.tolist())
    assert made["random"] == pytest.approx(0.25, abs=1e-6)
    assert made["random"] + 0.05 < made["constant"] < made["oracle"] - 0.1  # actions matter
    assert set(best) == {0, 1, 2, 3}


def test_train_and_heldout_share_nothing() -> None:
    for suffix in ("", "_compact"):
        train, heldout = (table(DATA / f"tes_{split}{suffix}.csv") for split in ("train", "heldout"))
        assert not {row["timestamp"] for row in train} & {row["timestamp"] for row in heldout}
        column = "user" if suffix else "prompt"
        assert not {row[column] for row in train} & {row[column] for row in heldout}
    # The numbers of a day, without its date and the storage: a compact row of 08:00 holds nearly all of them.
    days = [
        {row["user"].split("ahead")[1] for row in rows if " hour 8 " in f" {row['user']}"} for rows in (train, heldout)
    ]
    assert len(days[0]) > 60 and len(days[1]) == 15 and not days[0] & days[1]
    made = [synthetic_windows(SEED, stream, 20, TRAIN_START) for stream in range(3)]
    made.append(list(itertools.islice(short_windows(SEED), 20)))
    days = [day.tobytes() for stream in made for window, _ in stream for day in window.co2]
    assert len(days) == len(set(days)) == 4 * 20 * 4


def test_short_hours_are_added_up_to_their_share() -> None:
    made = synthetic_windows(5, ROWS_STREAM, 3, TRAIN_START)
    decisions = [one for window, rng in made for one in trajectory(window, rng, "compact", None)]
    first = [row for row, _ in decisions]
    short = sum(state.short_kwh > 0 for _, state in decisions)
    for row, (_, state) in zip(first, decisions, strict=True):
        assert abs(int(re.search(r"short (\d+)", row["user"])[1]) - min(100, state.short_kwh)) <= 0.5
    assert 0 < short < 0.2 * len(first)
    for share in (0.0, 0.25, 0.5):
        rows = with_short_hours(decisions, short_windows(5), "compact", share)
        assert rows[:90] == first and with_short_hours(decisions, short_windows(5), "compact", share) == rows
        added = [int(re.search(r"short (\d+)", row["user"])[1]) for row in rows[90:]]
        count = short + len(added)
        assert bool(added) == (share > 0) and (not added or share <= count / len(rows) < share + 1 / len(rows))
        assert sum(kwh == 0 for kwh in added) <= 0.1 * len(added)  # less than half a kWh is told as 0
    # Where further windows end, so does the search.
    few = with_short_hours(decisions, itertools.islice(short_windows(5), 2), "compact", 0.9)
    assert len(few) == 90 + 2 * len(HOURS)


def test_short_hours_are_spread_over_the_day_and_exact() -> None:
    """One for each hour: a trajectory hardly ever is short in the afternoon, a policy that empties the storage is."""
    window, rng = next(short_windows(5))
    made = short_hours(window, rng, "compact")
    assert [state.stamp.hour for _, state in made] == list(HOURS)
    assert all(state.short_kwh > 0 for _, state in made) and len({state.stamp.date() for _, state in made}) > 1
    plant, grid = Plant(), window.solve(Plant(), grid_kwh=0.25)
    for row, state in made:
        t = len(HOURS) * window.dates.index(state.stamp.date()) + HOURS.index(state.stamp.hour)
        assert row["timestep"] == 24 * (t // len(HOURS)) + state.stamp.hour
        mine = [row[f"q_action_{k}"] for k in range(4)]
        assert np.allclose(mine, q_values(grid, t, state.energy_kwh), atol=0.5)
        served = [kw >= state.short_kwh for kw in plant.outputs_kw]
        assert served[row["optimal_action"]] or not any(served)
    # An hour without a load cannot be short.
    idle = Window(window.dates, window.co2, np.where(np.arange(10) == 4, 0.0, window.load_kw))
    assert [state.stamp.hour for _, state in short_hours(idle, rng, "full")] == [8, 9, 10, 11, 13, 14, 15, 16, 17]


def test_check_passes_on_the_committed_files(capsys: pytest.CaptureFixture) -> None:
    assert md.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", [*FILES, "profile_heldout.csv"])
def test_check_names_a_changed_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for path in DATA.glob("*.csv"):
        shutil.copy(path, tmp_path / path.name)
    stored = (tmp_path / name).read_bytes()
    at = len(stored) // 2
    (tmp_path / name).write_bytes(stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :])
    assert md.main(["--check", "--out", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    line = stored[:at].count(b"\n") + 1
    assert f"{tmp_path / name}: differs from line {line} on" in message and message.count("differs") == 1
    (tmp_path / name).unlink()
    assert md.main(["--check", "--out", str(tmp_path)]) == 1
    assert f"{name}: missing" in capsys.readouterr().err


def test_check_fails_for_another_seed(capsys: pytest.CaptureFixture) -> None:
    assert md.main(["--check", "--seed", str(SEED + 1), "--prompt", "compact"]) == 1
    assert "profile_heldout.csv: differs" in capsys.readouterr().err


def test_summary_tells_the_rewards_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert md.main(["--summary"]) == 0
    text = capsys.readouterr().out
    for name in FILES:
        rows = table(DATA / name)
        rewards = [[float(row[f"reward_action_{k}"]) for k in range(4)] for row in rows]
        oracle = sum(map(max, rewards)) / len(rows)
        constant = max(sum(column) / len(rows) for column in zip(*rewards, strict=True))
        (line,) = (line for line in text.splitlines() if line.startswith(name + " "))
        assert line.split()[1] == str(len(rows)) and f"{oracle:.3f}" in line and f"{constant:.3f} ([" in line
    assert md.main(["--summary", "--out", str(tmp_path)]) == 2
    assert "no tes_*.csv" in capsys.readouterr().err
    (tmp_path / "tes_x.csv").write_text("prompt,optimal_action,reward_action_0\nhello,0,much\n")
    assert md.main(["--summary", "--out", str(tmp_path)]) == 2
    assert "tes_x.csv" in capsys.readouterr().err


def test_own_profiles(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    long, short = tmp_path / "long.csv", tmp_path / "short.csv"
    long.write_text(as_csv(profile_rows(9)))
    short.write_bytes(PROFILES["japanese"][0].encode("utf-8-sig"))
    out = tmp_path / "out"
    options = ["--out", str(out), "--prompt", "both", "--trajectories", "2", "--explore", "0", "--start-kwh", "120"]
    assert md.main(["--profile", str(long), str(short), *options]) == 0
    report = capsys.readouterr().out
    assert "long: 9 days, 2 window(s); not used: ['2025-04-21', '2025-04-22']" in report
    names = ["tes_long.csv", "tes_long_compact.csv", "tes_short.csv", "tes_short_compact.csv"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert [len(table(out / name)) for name in names] == [120, 120, 60, 60]
    energies = re.findall(r"energy \[kWh\]: (\d+)", table(out / "tes_short.csv")[0]["prompt"])
    assert energies == ["120"] and "energy [kWh]: 120\n" not in table(out / "tes_short.csv")[30]["prompt"]
    assert "load=32.5 kW, co2=0.312 kg-CO2/kWh" in table(out / "tes_short.csv")[0]["prompt"]
    # The same rows, and short hours behind them.
    more = tmp_path / "more"
    assert md.main(["--profile", str(long), "--out", str(more), *options[2:], "--short-share", "0.4"]) == 0
    rows, added = table(out / "tes_long_compact.csv"), table(more / "tes_long_compact.csv")
    assert added[:120] == rows and len(added) > 130
    assert sum(" short 0 " not in row["user"] for row in added) >= 0.35 * len(added)


def test_a_folder_of_own_files_holds_every_hour_once(tmp_path: Path) -> None:
    """DATA='DIR/*.csv' takes all of them; the repository's own files are in both forms by default."""
    (tmp_path / "long.csv").write_text(as_csv(profile_rows(7)))
    out = tmp_path / "out"
    assert md.main(["--profile", str(tmp_path / "long.csv"), "--out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == ["tes_long.csv"] and len(table(out / "tes_long.csv")) == 60
    assert md.main(["--out", str(tmp_path / "both")]) == 0
    assert sorted(path.name for path in (tmp_path / "both").glob("tes_*")) == sorted(FILES)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--profile", "a.csv"], "--out"),
        (["--explore", "0.1"], "--profile"),
        (["--check", "--summary"], "not allowed"),
        (["--seed", "-1"], "from 0"),
        (["--seed", "x"], "'x'"),
        (["--profile", "a.csv", "--out", "x", "--explore", "2"], "from 0 to 1"),
        (["--profile", "a.csv", "--out", "x", "--start-kwh", "nan"], "from 0 to 300"),
        (["--prompt", "long"], "long"),
    ],
)
def test_wrong_command_lines(arguments: list[str], reason: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        md.main(arguments)
    assert caught.value.code == 2 and reason in capsys.readouterr().err


def test_profiles_that_would_overwrite_each_other(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("a.csv", "a_compact.csv"):
        (tmp_path / name).write_text(GOOD)
    profiles = [str(tmp_path / name) for name in ("a.csv", "a_compact.csv")]
    assert md.main(["--profile", *profiles, "--prompt", "both", "--out", str(tmp_path)]) == 2
    assert "tes_a_compact.csv too; rename" in capsys.readouterr().err


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert md.main(["--out", str(tmp_path / "file")]) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_csv_text_round_trips() -> None:
    text = to_csv(("a", "b"), [["x\ny", 'say "hi", ok']])
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["a", "b"], ["x\ny", 'say "hi", ok']]
    assert "\r" not in text
