# SPDX-License-Identifier: Apache-2.0
"""Simulates a thermal energy storage (TES) plant and writes the CSVs that the trainer reads.

    python scripts/make_dataset.py                      # write data/*.csv from seeded synthetic weather
    python scripts/make_dataset.py --check              # regenerate, compare byte for byte with data/ (exit 1: differs)
    python scripts/make_dataset.py --summary            # reward of random, best constant and oracle, for each CSV
    python scripts/make_dataset.py --profile my.csv [more.csv ...] --out DIR      # the same from your own hourly data
    options: --prompt full|compact|both  --seed N  --co2-column NAME  --load-column NAME
             --start-kwh E  --explore P  --trajectories N  --short-share S

A row is one decision of the plant: the prompt, the exact value `q_action_k` of each of the four actions in that state,
and the reward `reward_action_k`, the Boltzmann softmax of the four values. docs/data.md explains all of it.
Exit codes: 0 done, 1 `--check` found a difference, 2 bad input (every problem is named).
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import math
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rewards import baselines

# ---- Settings -------------------------------------------------------------------------------------------------------

HOURS = tuple(range(8, 18))  # decision hours of a day: 08:00 to 17:00, the building closes at 18:00
DECISION_DAYS = 3  # days decided on in a window; one more day follows it and prices what is left in the storage
LOW_HOURS = 5  # stored energy is worth the mean of the next day's so many lowest intensities in decision hours
TEMPERATURE = 0.05  # of the softmax that turns action values into rewards
START_KWH = 150.0  # half full
EXPLORE = 0.25  # share of decisions on a trajectory that are random instead of optimal
SHORT_SHARE = 0.3  # of the rows of the committed training files: hours whose load exceeds the stored energy
SEED = 1  # of the committed files
TRAIN_WINDOWS, HELDOUT_WINDOWS = {"full": 4, "compact": 20}, {"full": 2, "compact": 5}
TRAIN_START, HELDOUT_START = date(2025, 4, 7), date(2025, 9, 1)  # Mondays; a window starts on every Monday
# Random streams: the same seed never gives the same day in two.
TRAIN_STREAM, HELDOUT_STREAM, ROWS_STREAM, SHORT_STREAM = 0, 1, 2, 3
MOST_DRAWS = 200  # of short hours from each window of a profile
DATA_DIR = Path(__file__).resolve().parent.parent / "data"

CONTEXT_COLUMNS = {"full": ("prompt",), "compact": ("system", "user")}
KEY_COLUMNS = ("timestep", "timestamp")
PROFILE_COLUMNS = ("datetime", "co2_kg_per_kwh", "load_kw")

# ---- The plant ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plant:
    """An air-source heat pump (ASHP) with a thermal storage behind it."""

    rated_kw: float = 100.0  # thermal output at ratio 1 [kW]
    cop: float = 4.0  # thermal output / electricity [-]
    capacity_kwh: float = 300.0  # of the storage [kWh thermal]
    ratios: tuple[float, ...] = (0.0, 1 / 3, 2 / 3, 1.0)  # output ratio of each action [-]
    unserved_kg_per_kwh: float = 10.0  # penalty on load that nothing serves [kg CO2 / kWh thermal]
    cost_scale: float = 6.0  # kg CO2 in one unit of cost

    @property
    def outputs_kw(self) -> np.ndarray:
        """Thermal output of each action [kW], shape (K,)."""
        return self.rated_kw * np.asarray(self.ratios)


class Step(NamedTuple):
    """What one hour did; every field has the broadcast shape of the inputs of `step`."""

    energy_kwh: np.ndarray  # stored after the hour
    reward: np.ndarray  # minus the hourly cost
    emissions_kg: np.ndarray  # CO2 of the electricity
    unserved_kwh: np.ndarray  # load that neither heat pump nor storage served
    lost_kwh: np.ndarray  # surplus that did not fit into the storage


def step(plant: Plant, energy_kwh: Any, action: Any, load_kw: Any, co2_kg_per_kwh: Any) -> Step:
    """Runs the plant for one hour; all arguments broadcast against each other.

    The heat pump serves the load first, then the storage does. Surplus charges the storage up to its capacity, the rest
    is lost. Electricity follows the scheduled output, so heat that is lost costs as much as heat that is used.
    """
    output = plant.outputs_kw[action]
    balance = energy_kwh + (output - load_kw)  # one-hour steps: kW and kWh have the same number
    energy = np.clip(balance, 0.0, plant.capacity_kwh)
    unserved = np.maximum(-balance, 0.0)
    lost = np.maximum(balance - plant.capacity_kwh, 0.0)
    emissions = output / plant.cop * co2_kg_per_kwh
    reward = -(emissions + plant.unserved_kg_per_kwh * unserved) / plant.cost_scale
    return Step(*np.broadcast_arrays(energy, reward, emissions, unserved, lost))


def low_co2(co2_kg_per_kwh: np.ndarray) -> float:
    """Mean of the `LOW_HOURS` lowest CO2 intensities of one day's decision hours [kg/kWh]; shape (10,)."""
    return float(np.mean(np.sort(co2_kg_per_kwh)[:LOW_HOURS]))


def terminal_price(plant: Plant, next_co2: np.ndarray) -> float:
    """Value of a stored kWh after the last decision: the cost of making it in the next day's cheapest hours."""
    return low_co2(next_co2) / plant.cop / plant.cost_scale


# ---- The optimum ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solution:
    """Optimal values of T decisions; index t is the time before decision t, index T the end."""

    plant: Plant
    load_kw: np.ndarray  # (T,)
    co2: np.ndarray  # (T,) [kg/kWh]
    nodes: tuple[np.ndarray, ...]  # T + 1 ascending arrays of storage energies [kWh]
    values: tuple[np.ndarray, ...]  # T + 1 arrays: the best reward to come from each node


def solve(
    plant: Plant,
    load_kw: np.ndarray,
    co2_kg_per_kwh: np.ndarray,
    price_per_kwh: float,
    start_kwh: float | Sequence[float] | np.ndarray | None = START_KWH,
    grid_kwh: float | None = 0.5,
    max_nodes: int = 4096,
) -> Solution:
    """Dynamic programming backwards over T decisions (night hours change nothing, so they are left out).

    load_kw, co2_kg_per_kwh: shape (T,). price_per_kwh: value of a kWh that is left at the end.

    An even grid alone is not exact: where a low output just fails to serve a load, the value falls by up to 10/6 per
    kWh within a fraction of a kWh, and interpolation smears that over a cell. So the grid of each hour also holds every
    energy that can be reached from `start_kwh`. The successors of such a node are nodes themselves, hence the values
    there are exact. They stay few because the outputs and the capacity are multiples of 100/3 kWh: an energy is
    determined by its last visit to an empty or full storage and by the thirds put in since, at most 10 (t + 1) in all.
    A plant whose nodes exceed `max_nodes` in an hour gets them thinned, which is inexact again by less than a cell.

    start_kwh: one energy or several; None leaves the even grid alone. grid_kwh: spacing of the even grid, which serves
    states that `start_kwh` does not lead to; None leaves the reachable energies alone (fast, exact for those only).
    Raises ValueError where the shapes differ or no nodes are asked for.
    """
    load, co2 = np.asarray(load_kw, float), np.asarray(co2_kg_per_kwh, float)
    if load.ndim != 1 or load.shape != co2.shape:
        raise ValueError(f"load_kw {load.shape} and co2_kg_per_kwh {co2.shape} must both have shape (T,)")
    if start_kwh is None and grid_kwh is None:
        raise ValueError("give start_kwh, grid_kwh or both: there is no energy to solve for")
    actions = np.arange(len(plant.ratios))[:, None]
    cells = 1 if grid_kwh is None else math.ceil(plant.capacity_kwh / grid_kwh)
    even = np.empty(0) if grid_kwh is None else np.linspace(0.0, plant.capacity_kwh, cells + 1)

    # Forward: what can be reached.
    reached = np.empty(0) if start_kwh is None else distinct(np.atleast_1d(np.asarray(start_kwh, float)))
    nodes = [np.union1d(reached, even)]
    for t in range(load.size):
        reached = distinct(step(plant, reached, actions, load[t], co2[t]).energy_kwh.ravel())
        if reached.size > max_nodes:
            reached = reached[np.linspace(0, reached.size - 1, max_nodes).round().astype(int)]
        nodes.append(np.union1d(reached, even))

    # Backward: values. A successor that is a node is met up to rounding, and interpolation is continuous there.
    values = [price_per_kwh * nodes[-1]]
    for t in reversed(range(load.size)):
        after = step(plant, nodes[t], actions, load[t], co2[t])
        values.append((after.reward + np.interp(after.energy_kwh, nodes[t + 1], values[-1])).max(axis=0))
    return Solution(plant, load, co2, tuple(nodes), tuple(reversed(values)))


def distinct(energies: np.ndarray) -> np.ndarray:
    """Sorts energies and drops repeats, also those that differ by rounding errors only; shape (N,) to (<= N,)."""
    energies = np.sort(energies)
    return energies[np.diff(energies, prepend=-np.inf) > 1e-7]


def q_values(solution: Solution, t: int, energy_kwh: float | np.ndarray) -> np.ndarray:
    """Value of each action at decision t from `energy_kwh` (any shape S) and optimal afterwards; shape S + (K,)."""
    energy = np.asarray(energy_kwh, float)[..., None]
    actions = np.arange(len(solution.plant.ratios))
    after = step(solution.plant, energy, actions, solution.load_kw[t], solution.co2[t])
    return after.reward + np.interp(after.energy_kwh, solution.nodes[t + 1], solution.values[t + 1])


def best_action(q: np.ndarray) -> int:
    """Index of the largest of K action values; of equal ones (to 1e-9) the first, which uses the least electricity."""
    return int(np.flatnonzero(q >= q.max() - 1e-9)[0])


def boltzmann(q: np.ndarray, temperature: float = TEMPERATURE) -> np.ndarray:
    """Softmax of action values over the last axis; the largest is subtracted first, so nothing overflows."""
    weights = np.exp((q - q.max(axis=-1, keepdims=True)) / temperature)
    return weights / weights.sum(axis=-1, keepdims=True)


# ---- Hourly profiles ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """Hourly data of D days in ascending order; days may be left out between blocks of consecutive ones."""

    dates: tuple[date, ...]  # D
    co2: np.ndarray  # (D, 24) [kg/kWh]; NaN where the file has no such night hour
    load_kw: np.ndarray  # (D, 24)


@dataclass(frozen=True)
class Window:
    """`DECISION_DAYS` consecutive days to decide on and the day after them; decision hours only."""

    dates: tuple[date, ...]  # 4
    co2: np.ndarray  # (4, 10) [kg/kWh]
    load_kw: np.ndarray  # (4, 10)

    def solve(self, plant: Plant, first: int = 0, **options: Any) -> Solution:
        """Solves the decisions of the window from number `first` on; options as of `solve`."""
        load_kw, co2 = (values[:DECISION_DAYS].ravel()[first:] for values in (self.load_kw, self.co2))
        return solve(plant, load_kw, co2, terminal_price(plant, self.co2[DECISION_DAYS]), **options)


def windows(profile: Profile) -> list[Window]:
    """Cuts a profile into windows of three days plus the next; that next day starts the following window.

    A block of N consecutive days gives (N - 1) // 3 windows; the days left over at its end are not used.
    """
    spans = []
    first = 0
    while first + DECISION_DAYS < len(profile.dates):
        last = first + DECISION_DAYS
        if (profile.dates[last] - profile.dates[first]).days == DECISION_DAYS:
            spans.append(slice(first, last + 1))
            first = last
        else:  # a day is missing within: start behind the gap
            gaps = (i for i in range(first, last) if (profile.dates[i + 1] - profile.dates[i]).days != 1)
            first = next(gaps) + 1
    hours = slice(HOURS[0], HOURS[-1] + 1)
    return [Window(profile.dates[s], profile.co2[s, hours], profile.load_kw[s, hours]) for s in spans]


def synthetic_profile(seed: int | Sequence[int], days: int, start: date = TRAIN_START) -> Profile:
    """Makes `days` consecutive days of invented weather.

    CO2 intensity: a level of the week, a solar dip around noon whose depth follows the sky of the day (from overcast to
    clear), a morning and an evening peak; 0.15 to 0.6 kg/kWh. Cooling load: a level of the day, about 10 to 60 kW with
    some persistence, an afternoon slope, sometimes an early closing, hourly noise; zero outside the decision hours.
    Values are rounded as a data file would (0.001 kg/kWh, 0.1 kW).
    """
    rng = np.random.default_rng(seed)
    hour = np.arange(24)
    co2, load = np.empty((days, 24)), np.zeros((days, 24))
    base = rng.uniform(0.36, 0.50)
    level = rng.uniform(10.0, 60.0)
    for day in range(days):
        base = np.clip(base + rng.normal(0.0, 0.02), 0.33, 0.53)
        sky = rng.uniform(0.0, 1.0)  # 0 overcast, 1 clear
        noon, width = rng.uniform(11.0, 13.5), rng.uniform(2.2, 3.5)
        dip = (0.02 + 0.26 * sky) * np.exp(-(((hour - noon) / width) ** 2) / 2)
        morning = rng.uniform(0.0, 0.03) * np.exp(-(((hour - 7.5) / 1.5) ** 2) / 2)
        evening = rng.uniform(0.01, 0.06) * np.exp(-(((hour - 18.5) / 2.0) ** 2) / 2)
        co2[day] = np.clip(base - dip + morning + evening + rng.normal(0.0, 0.006, 24), 0.15, 0.6)

        level = 0.3 * level + 0.7 * rng.uniform(8.0, 62.0)
        slope = rng.uniform(-0.02, 0.04) * (hour - 12.5)
        early_closing = np.where((hour >= 16) & (rng.random() < 0.1), 0.5, 1.0)
        shape = (1.0 + slope) * early_closing * rng.normal(1.0, 0.08, 24)
        load[day, HOURS] = np.clip(level * shape, 2.0, 90.0)[list(HOURS)]
    dates = tuple(start + timedelta(days=day) for day in range(days))
    return Profile(dates, co2.round(3), load.round(1))


class ProfileError(ValueError):
    """A profile that cannot be used; `problems` lists everything that is wrong with it, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


# What a header may be called, after NFKC normalisation (full-width letters, subscript 2) and lowercasing.
COLUMN_PATTERNS = {
    "datetime": r"date|time|日時",
    "co2": r"co2|carbon",
    "load": r"load|cool|demand|\[kw\]|冷房|需要",
}
DATETIME_FORMATS = ("%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S")  # beside ISO 8601: what spreadsheets write


def find_columns(header: list[str], chosen: dict[str, str | None]) -> tuple[dict[str, int], list[str]]:
    """Finds the datetime, co2 and load columns in a header; returns their positions and what is wrong with it."""
    found: dict[str, int] = {}
    problems = []
    plain = [unicodedata.normalize("NFKC", name).strip().lower() for name in header]
    for kind, pattern in COLUMN_PATTERNS.items():
        name = chosen.get(kind)
        if name is not None:
            matches = [i for i, column in enumerate(header) if column.strip() == name.strip()]
            if not matches:
                problems.append(f"no column named {name!r} (asked for with --{kind}-column); the header has {header}")
        else:
            others = {i for other, i in found.items() if other != kind}
            others |= {i for i, column in enumerate(header) if column in (chosen.get("co2"), chosen.get("load"))}
            matches = [i for i, column in enumerate(plain) if i not in others and re.search(pattern, column)]
            if kind == "datetime":  # the plain name wins over, say, time_of_use
                matches = [i for i in matches if plain[i] == kind] or matches
            if not matches:
                advice = f"or name it with --{kind}-column" if kind != "datetime" else "one row an hour"
                problems.append(
                    f"no {kind} column: a header should contain one of {pattern}, {advice}; it has {header}"
                )
        if len(matches) > 1:
            names = [header[i] for i in matches]
            advice = f"choose one with --{kind}-column" if kind != "datetime" else "rename the others"
            problems.append(f"{len(matches)} columns could be the {kind} column: {names}; {advice}")
        if matches:
            found[kind] = matches[0]
    return found, problems


def parse_datetime(text: str) -> datetime:
    """Reads the start of an hour in local time; raises ValueError with what is wrong."""
    stamp = None
    for parse in (datetime.fromisoformat, *(lambda s, f=f: datetime.strptime(s, f) for f in DATETIME_FORMATS)):
        try:
            stamp = parse(text)
            break
        except ValueError:
            continue
    if stamp is None:
        raise ValueError("is not a date and time; write it like 2025-04-14 08:00:00")
    if stamp.tzinfo is not None:
        raise ValueError("has a UTC offset; write the plant's local time without one")
    if (stamp.minute, stamp.second, stamp.microsecond) != (0, 0, 0):
        raise ValueError("is not a full hour; give hourly means, one row an hour")
    return stamp


def parse_number(text: str, kind: str, hour: int | None) -> float:
    """Reads a CO2 intensity or a load; raises ValueError with what is wrong."""
    if not text:
        raise ValueError("is empty; fill it in")
    try:
        value = float(text) if "_" not in text else math.nan  # Python would read 1_0 as 10
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("is not a finite number; fill it in, with a decimal point and no unit")
    if value < 0:
        raise ValueError("is negative; it must be 0 or more")
    if kind == "co2" and value > 2.0:
        raise ValueError("is more than 2 kg/kWh; divide by 1000 if it is in g/kWh")
    if kind == "load" and value > 0 and hour is not None and hour not in HOURS:
        raise ValueError(f"is a load outside {HOURS[0]:02d}:00-{HOURS[-1]:02d}:00, which is not simulated; set it to 0")
    return value


def decode(raw: bytes) -> str:
    """Decodes a CSV in UTF-8 (with or without byte order mark) or CP932; raises ValueError with what to do."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in raw:
        raise ValueError("is not UTF-8 text (UTF-16 or binary); save it as a CSV in UTF-8")
    for encoding in ("utf-8-sig", "cp932"):
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise ValueError("is neither UTF-8 nor CP932 (Shift JIS); save it as a CSV in UTF-8")


def read_profile(path: str | Path, co2_column: str | None = None, load_column: str | None = None) -> Profile:
    """Reads hourly data from a CSV with a datetime, a CO2 intensity [kg/kWh] and a cooling load [kW] column.

    Columns are found by name (English or Japanese) unless they are named here. Days must be complete in the decision
    hours; night hours may be missing. A file may hold several blocks of consecutive days, each of four days or more.
    Raises ProfileError listing every problem with file, row (1 is the first below the header), line and column.
    """
    path = Path(path)
    try:
        reader = csv.reader(io.StringIO(decode(path.read_bytes()), newline=""))
        rows, line = [], 1  # pairs of (line that the row begins in, cells)
        for cells in reader:
            rows.append((line, cells))
            line = reader.line_num + 1
    except OSError as error:
        raise ProfileError([f"{path}: cannot be read: {error.strerror}"]) from None
    except (ValueError, csv.Error) as error:
        raise ProfileError([f"{path}: {error}"]) from None
    header = rows[0][1] if rows else []
    if not any(cell.strip() for cell in header):
        raise ProfileError([f"{path}: is empty; the first line must name the columns"])
    if len(header) < 3:
        raise ProfileError([f"{path}, header: only {len(header)} column(s) {header}; separate three by commas"])
    columns, problems = find_columns(header, {"co2": co2_column, "load": load_column})
    if problems:
        raise ProfileError([f"{path}, header: {problem}" for problem in problems])
    if columns["co2"] == columns["load"]:
        raise ProfileError([f"{path}, header: column {header[columns['co2']]!r} cannot be both co2 and load"])

    hours: dict[datetime, tuple[float, float]] = {}
    seen: dict[datetime, str] = {}
    previous: datetime | None = None
    for number, (line, row) in enumerate(((line, row) for line, row in rows[1:] if row), start=1):
        if not any(cell.strip() for cell in row):
            continue  # empty cells, as spreadsheets leave them behind the table
        here = f"row {number} (line {line})"
        if len(row) != len(header):
            problems.append(f"{path}, {here}: {len(row)} cells, the header has {len(header)} columns")
            continue
        stamp: datetime | None = None
        values = {}
        for kind in ("datetime", "co2", "load"):
            text = row[columns[kind]].strip()
            try:
                if kind == "datetime":
                    stamp = parse_datetime(text)
                else:
                    values[kind] = parse_number(text, kind, stamp.hour if stamp else None)
            except ValueError as error:
                problems.append(f"{path}, {here}, column {header[columns[kind]]!r}: {text!r} {error}")
        if stamp is None:
            continue
        where = f"{path}, {here}, column {header[columns['datetime']]!r}: '{stamp}'"
        if stamp in seen:
            problems.append(f"{where} is in {seen[stamp]} already; keep one of them")
        elif previous is not None and stamp < previous:
            problems.append(f"{where} comes after '{previous}'; sort the rows by time")
        seen.setdefault(stamp, here)
        previous = stamp
        hours[stamp] = (values.get("co2", 0.0), values.get("load", 0.0))

    dates = sorted({stamp.date() for stamp in seen})
    for day in dates:
        missing = [f"{hour:02d}:00" for hour in HOURS if datetime.combine(day, time(hour)) not in seen]
        if missing:
            problems.append(f"{path}: {day}: no row for {' '.join(missing)}; every day needs each decision hour")
    starts = [i for i, day in enumerate(dates) if i == 0 or (day - dates[i - 1]).days != 1] + [len(dates)]
    needed = DECISION_DAYS + 1
    if len(dates) < needed:
        problems.append(f"{path}: {len(dates)} day(s); at least {needed} are needed (three to decide on, one after)")
    else:
        for start, end in zip(starts, starts[1:], strict=False):
            if end - start < needed:
                gap = "add the days missing around them or take these out"
                span = f"{dates[start]} to {dates[end - 1]}"
                problems.append(f"{path}: {span}: {end - start} consecutive day(s), {needed} are needed; {gap}")
    if problems:
        raise ProfileError(problems)
    table = np.full((len(dates), 24, 2), np.nan)
    index = {day: i for i, day in enumerate(dates)}
    for stamp, pair in hours.items():
        table[index[stamp.date()], stamp.hour] = pair
    return Profile(tuple(dates), table[..., 0], table[..., 1])


def profile_csv(profiles: Sequence[Profile]) -> str:
    """Writes profiles as one CSV, the way `read_profile` reads it back."""
    rows = []
    for profile in profiles:
        for day, co2, load in zip(profile.dates, profile.co2, profile.load_kw, strict=True):
            for hour in range(24):
                rows.append([datetime.combine(day, time(hour)), f"{co2[hour]:.3f}", f"{load[hour]:.1f}"])
    return to_csv(PROFILE_COLUMNS, rows)


# ---- Prompts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a prompt tells of the plant before a decision; arrays cover the ten decision hours of a day, shape (10,)."""

    stamp: datetime  # start of the hour that is decided on
    energy_kwh: float
    load_kw: np.ndarray  # today
    co2: np.ndarray  # today [kg/kWh]
    next_load_kw: np.ndarray  # the next day
    next_co2: np.ndarray  # the next day [kg/kWh]
    plant: Plant = Plant()

    @property
    def short_kwh(self) -> float:
        """Load of the hour that the stored energy cannot serve, and that output 0 would leave unserved."""
        return max(0.0, float(self.load_kw[HOURS.index(self.stamp.hour)]) - self.energy_kwh)


def state_at(window: Window, plant: Plant, t: int, energy_kwh: float) -> State:
    """What the prompt of decision t of a window tells, in the CSVs as in the closed loop."""
    day, i = divmod(t, len(HOURS))
    stamp = datetime.combine(window.dates[day], time(HOURS[i]))
    today, after = (window.load_kw[day], window.co2[day]), (window.load_kw[day + 1], window.co2[day + 1])
    return State(stamp, float(energy_kwh), *today, *after, plant)


# The text below is an interface: it is what the users' files say, word for word.
FULL_SYSTEM = """\
You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-11-06

Reasoning: medium

# Valid channels: analysis, commentary, final. Channel must be included for every message."""

FULL_DEVELOPER = """\
# Instructions

You are an optimisation agent that supervises a thermal energy storage (TES) plant. Your job is to minimise cumulative \
CO₂ emissions over the full simulation horizon by planning TES charge and discharge decisions.
Developer instructions: respond using ASCII characters only. Return a single line formatted exactly as \
`[action_index]`, where action_index is an integer in {0, 1, 2, 3}. Do not include additional text, explanations, \
markdown, or keys.

"""

FULL_USER = """\
Objective:
- Minimise total CO₂ emissions = electricity consumption × time-varying CO₂ intensity over the horizon.

Current context:
- Current time [h]: {stamp}
- Current TES energy [kWh]: {energy:.0f}

Forecast data:
Forecast features (raw values aligned with the RL look-ahead):

- Remaining business hours today (08:00-17:00, close at 18:00):
{hours}

- Next-day planning metrics (for terminal planning):
  - load_mean={load_mean:.1f} kW (average cooling demand for next day)
  - co2_low5_avg={co2_low:.3f} kg-CO2/kWh (average of lowest 5 hours of CO2 factor for next day)
  - co2_min={co2_min:.3f} kg-CO2/kWh (minimum CO2 factor for next day)

System parameters:
ASHP rated capacity [kW]: {plant.rated_kw:.1f}
ASHP base COP [-]: {plant.cop:.1f}
TES capacity [kWh]: {plant.capacity_kwh:.1f}

Action space for the next hour:
0 → ASHP output ratio = 0.00 (ASHP off; rely on TES if demand exists)
1 → ASHP output ratio ≈ 0.33 (low output; TES covers most of the remaining demand)
2 → ASHP output ratio ≈ 0.67 (medium output; TES supplements when load exceeds this level)
3 → ASHP output ratio = 1.00 (full output; any surplus charges TES if capacity remains)

Operational notes:
- TES discharges automatically when load exceeds the scheduled ASHP output and energy is available.
- TES charges automatically when ASHP output exceeds the load and free capacity exists.
- Always maintain TES capacity between minimum and maximum bounds (0 < capacity < {plant.capacity_kwh:.0f}); \
violating these constraints incurs a large penalty.

Decision requirements:
- Optimise with a full-horizon perspective rather than a greedy step.
- Keep TES utilisation efficient; avoid unnecessary saturation or depletion.
- Prioritise emission reductions even if it requires near-term energy use.
- Consider pre-charging during low-carbon periods and discharging during high-carbon periods while respecting TES \
energy limits.
- Consider next-day information when making decisions.

Return format:
- Output a single token formatted as `[action_index]` (e.g., `[0]`, `[1]`, `[2]`, `[3]`)."""

COMPACT_SYSTEM = "Answer with one action: [0] [1] [2] [3]."


def render_full(state: State) -> str:
    """Renders a state as a whole Harmony conversation that ends where the assistant starts to write."""
    lines = []
    for hour, load, co2 in zip(HOURS, state.load_kw, state.co2, strict=True):
        if hour < state.stamp.hour:
            lines.append(f"  - {hour:02d}:00: past hour -> omitted (state uses zero)")
        else:
            now = "  ←Now!!!" if hour == state.stamp.hour else ""
            lines.append(f"  - {hour:02d}:00: load={load:.1f} kW, co2={co2:.3f} kg-CO2/kWh{now}")
    user = FULL_USER.format(
        stamp=state.stamp,
        energy=state.energy_kwh,
        hours="\n".join(lines),
        load_mean=np.mean(state.next_load_kw),
        co2_low=low_co2(state.next_co2),
        co2_min=np.min(state.next_co2),
        plant=state.plant,
    )
    messages = (("system", FULL_SYSTEM), ("developer", FULL_DEVELOPER), ("user", user))
    return "".join(f"<|start|>{role}<|message|>{text}<|end|>" for role, text in messages) + "<|start|>assistant"


def render_compact(state: State) -> tuple[str, str]:
    """Renders a state as (system, user): one short line of words and integers from 0 to 100, for a tiny model.

    hour   of the day                                 short  kWh that the load exceeds the stored energy by
    store  stored energy, percent of the capacity     room   kWh of output that load and free capacity can take
    load   now, kW                                    need   later load of today beyond the stored energy, 10 kWh
    co2    intensity now, 0.01 kg/kWh                 rank   later hours of today with a lower intensity than now
    next   the next day's five lowest, mean, ditto    ahead  intensities of the later hours of today, 0.01 kg/kWh
    gain   50 + next - co2                            loads  loads of the later hours of today, kW
    """
    now = state.stamp.hour - HOURS[0]
    load, later_load, later_co2 = state.load_kw[now], state.load_kw[now + 1 :], state.co2[now + 1 :]
    next_co2, co2 = low_co2(state.next_co2), state.co2[now]
    need = later_load.sum() - max(state.energy_kwh - load, 0.0)
    words: list[str | int] = ["hour", state.stamp.hour]
    words += ["store", whole(100 * state.energy_kwh / state.plant.capacity_kwh)]
    words += ["load", whole(load), "co2", whole(100 * co2), "next", whole(100 * next_co2)]
    words += ["gain", whole(50 + 100 * (next_co2 - co2))]
    words += ["short", whole(load - state.energy_kwh)]
    words += ["room", whole(load + state.plant.capacity_kwh - state.energy_kwh)]
    words += ["need", whole(need / 10), "rank", int((later_co2 < co2).sum())]
    words += ["ahead", *(whole(100 * value) for value in later_co2)]
    words += ["loads", *(whole(value) for value in later_load)]
    return COMPACT_SYSTEM, " ".join(map(str, words))


def whole(value: float) -> int:
    """Rounds to an integer and clips to 0..100: one token in the tiny model's vocabulary."""
    return min(100, max(0, round(float(value))))


# ---- Rows -----------------------------------------------------------------------------------------------------------


def trajectory(
    window: Window,
    rng: np.random.Generator,
    prompt: str = "full",
    start_kwh: float | None = START_KWH,
    explore: float = EXPLORE,
    plant: Plant | None = None,
) -> list[tuple[dict[str, Any], State]]:
    """Follows one trajectory through a window; returns the row and the state of each of its 30 decisions.

    The trajectory takes the optimal action, or with probability `explore` a random one, so that later rows start from
    states an imperfect policy gets into. The values in a row are those of its own state and do not depend on the action
    taken. start_kwh None draws the start from 0 to the capacity. The same rng state gives the same trajectory for both
    prompts. Keys: timestep (hours since the first day's midnight), timestamp, the prompt's columns, optimal_action,
    q_action_k, reward_action_k (floats).
    """
    plant = plant or Plant()
    energy = round(float(rng.uniform(0.0, plant.capacity_kwh)), 1) if start_kwh is None else start_kwh
    solution = window.solve(plant, start_kwh=energy, grid_kwh=None)
    rows = []
    for t in range(DECISION_DAYS * len(HOURS)):
        day, i = divmod(t, len(HOURS))
        row, state = row_at(window, plant, t, energy, q_values(solution, t, energy), prompt)
        rows.append((row, state))
        # Both numbers are always drawn, so a draw more or less does not shift the rest of the trajectory.
        chance, random_action = rng.random(), int(rng.integers(len(plant.ratios)))
        action = random_action if chance < explore else row["optimal_action"]
        energy = float(step(plant, energy, action, window.load_kw[day, i], window.co2[day, i]).energy_kwh)
    return rows


def row_at(
    window: Window, plant: Plant, t: int, energy_kwh: float, q: np.ndarray, prompt: str
) -> tuple[dict[str, Any], State]:
    """The row and the state of decision t of a window; q: the values of its K actions. Keys: see `trajectory`."""
    state = state_at(window, plant, t, energy_kwh)
    texts = (render_full(state),) if prompt == "full" else render_compact(state)
    day, i = divmod(t, len(HOURS))
    row = {
        "timestep": 24 * day + HOURS[i],
        "timestamp": state.stamp.isoformat(),
        **dict(zip(CONTEXT_COLUMNS[prompt], texts, strict=True)),
        "optimal_action": best_action(q),
        **{f"q_action_{k}": float(value) for k, value in enumerate(q)},
        **{f"reward_action_{k}": float(value) for k, value in enumerate(boltzmann(q))},
    }
    return row, state


def short_hours(
    window: Window, rng: np.random.Generator, prompt: str, plant: Plant | None = None
) -> list[tuple[dict[str, Any], State]]:
    """A short hour, row and state, for each decision hour of the day: on one of the three days, with too little stored.

    The energies are random below the load, so hours without a load give none. Trajectories would give short hours of
    the morning almost alone, and a policy trained on those empties the storage before the last load of the day.
    """
    plant = plant or Plant()
    made = []
    for i in range(len(HOURS)):
        day, share = int(rng.integers(DECISION_DAYS)), rng.random()
        load, t = window.load_kw[day, i], len(HOURS) * day + i
        energy = math.floor(10 * share * load) / 10
        if energy < load:
            rest = window.solve(plant, t, start_kwh=energy, grid_kwh=None)
            made.append(row_at(window, plant, t, energy, q_values(rest, 0, energy), prompt))
    return made


def window_rows(*arguments: Any, **named: Any) -> list[dict[str, Any]]:
    """The rows of `trajectory`, which takes the same arguments."""
    return [row for row, _ in trajectory(*arguments, **named)]


def with_short_hours(
    decisions: Sequence[tuple[dict[str, Any], State]],
    more: Iterable[tuple[Window, np.random.Generator]],
    prompt: str,
    share: float,
) -> list[dict[str, Any]]:
    """The rows of `decisions`, and behind them `short_hours` until these are `share` of all rows.

    A short hour's load exceeds the stored energy: it has to be served now, and not doing so costs a hundred times what
    serving costs. The optimum's neighbourhood holds few of them; a policy that saves CO2 with an emptier storage meets
    many (docs/evaluation.md). `more`: windows to take them from; where they end, so does the search.
    """
    rows, short = [row for row, _ in decisions], sum(state.short_kwh > 0 for _, state in decisions)
    found = (row for window, rng in more for row, _ in short_hours(window, rng, prompt))
    while short < share * len(rows) and (row := next(found, None)):
        rows.append(row)
        short += 1
    return rows


def short_windows(seed: int) -> Iterator[tuple[Window, np.random.Generator]]:
    """Invented windows without end, of a random stream of their own, on the Mondays of the training days."""
    for i in itertools.count():
        start = TRAIN_START + timedelta(weeks=i % max(TRAIN_WINDOWS.values()))
        profile = synthetic_profile((seed, SHORT_STREAM, i), DECISION_DAYS + 1, start)
        yield windows(profile)[0], np.random.default_rng((seed, SHORT_STREAM, i, 1))


def synthetic_windows(seed: int, stream: int, count: int, start: date) -> list[tuple[Window, np.random.Generator]]:
    """Makes `count` windows of invented days, one on each Monday from `start`, with a generator for each trajectory."""
    made = []
    for i in range(count):
        profile = synthetic_profile((seed, stream, i), DECISION_DAYS + 1, start + timedelta(weeks=i))
        made.append((windows(profile)[0], np.random.default_rng((seed, stream, i, 1))))
    return made


def synthetic_rows(seed: int, windows: int) -> list[dict[str, Any]]:
    """Makes 30 compact rows for each of `windows` windows (system, user, q_action_k, reward_action_k as floats, ...).

    The days come from a random stream of their own, so no seed repeats the days of the files under data/. A window
    takes some 5 ms. Raises ValueError for a seed outside 0 to 2**32 - 1, where streams could overlap.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, got {seed}")
    made = synthetic_windows(seed, ROWS_STREAM, windows, TRAIN_START)
    return [row for window, rng in made for row in window_rows(window, rng, "compact", None)]


def to_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Writes a table as CSV text with plain line feeds."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def rows_csv(rows: list[dict[str, Any]]) -> str:
    """Writes rows of `window_rows` as CSV text; eight decimals, so that all machines write the same bytes."""
    columns = list(rows[0])
    cells = [[f"{row[c]:.8f}" if isinstance(row[c], float) else row[c] for c in columns] for row in rows]
    return to_csv(columns, cells)


# ---- Files ----------------------------------------------------------------------------------------------------------


def synthetic_files(seed: int, prompts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the files under data/; full prompts describe the first windows of the compact ones."""
    splits = (
        ("train", TRAIN_STREAM, TRAIN_WINDOWS, TRAIN_START, None, SHORT_SHARE),
        ("heldout", HELDOUT_STREAM, HELDOUT_WINDOWS, HELDOUT_START, START_KWH, 0.0),
    )
    for split, stream, counts, start, start_kwh, share in splits:
        for prompt in prompts:
            made = synthetic_windows(seed, stream, counts[prompt], start)
            decisions = [one for window, rng in made for one in trajectory(window, rng, prompt, start_kwh)]
            rows = with_short_hours(decisions, short_windows(seed), prompt, share)
            yield file_name(split, prompt), rows_csv(rows)
    count = max(HELDOUT_WINDOWS.values())
    dates = [HELDOUT_START + timedelta(weeks=i) for i in range(count)]
    blocks = [synthetic_profile((seed, HELDOUT_STREAM, i), DECISION_DAYS + 1, day) for i, day in enumerate(dates)]
    yield "profile_heldout.csv", profile_csv(blocks)


def profile_files(
    profiles: dict[str, Profile],
    prompts: Sequence[str],
    seed: int,
    start_kwh: float,
    explore: float,
    trajectories: int,
    short_share: float = 0.0,
) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the files made from the users' profiles; further trajectories start at random energies."""
    for stem, profile in profiles.items():
        made = list(enumerate(windows(profile)))
        for prompt in prompts:
            decisions = []
            for w, window in made:
                for n in range(trajectories):
                    rng = np.random.default_rng((seed, w, n))
                    decisions += trajectory(window, rng, prompt, start_kwh if n == 0 else None, explore)
            more = (
                (window, np.random.default_rng((seed, w, n)))
                for n in range(trajectories, trajectories + MOST_DRAWS)
                for w, window in made
            )
            rows = with_short_hours(decisions, more, prompt, short_share)
            yield file_name(stem, prompt), rows_csv(rows)


def file_name(stem: str, prompt: str) -> str:
    """Name of a data file: the split or the profile's stem, and a suffix for the compact prompt."""
    return f"tes_{stem}.csv" if prompt == "full" else f"tes_{stem}_compact.csv"


# ---- Summary --------------------------------------------------------------------------------------------------------


def summary(texts: dict[str, str]) -> str:
    """Tabulates the baselines of data files (name -> CSV text); files without reward columns are left out."""
    width = max(map(len, texts), default=0)
    lines = [
        f"{'file':<{width}} {'rows':>5} {'random':>7} {'best constant':>14} {'oracle':>7}  optimal actions 0/1/2/3"
    ]
    for name, text in texts.items():
        table = list(csv.DictReader(io.StringIO(text, newline="")))
        columns = sorted(c for c in (table[0] if table else {}) if c.startswith("reward_action_"))
        if not columns:
            continue
        try:
            made = baselines([[float(row[c]) for c in columns] for row in table])
            best = np.bincount([int(row["optimal_action"]) for row in table], minlength=len(columns))
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError([f"{name}: is not a file of this program: {error!r}; make it again"]) from None
        constant = f"{made['constant']:.3f} ([{made['constant_action']}])"
        share = "/".join(f"{100 * n / len(table):.0f}%" for n in best)
        lines.append(
            f"{name:<{width}} {len(table):>5} {made['random']:>7.3f} {constant:>14} {made['oracle']:>7.3f}  {share}"
        )
    return "\n".join(lines)


# ---- Command line ---------------------------------------------------------------------------------------------------


def number(low: float, high: float, kind: type = float) -> Any:
    """Makes an argparse type: a finite number from low to high."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind.__name__} from {low:g} to {high:g}")
        return value

    return parse


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with code 2 on a wrong one."""
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="regenerate and compare byte for byte, write nothing")
    mode.add_argument("--summary", action="store_true", help="tabulate the files that exist, write nothing")
    mode.add_argument("--profile", nargs="+", metavar="CSV", help="your own hourly profiles instead of synthetic days")
    parser.add_argument("--out", metavar="DIR", help="where the files are (default data/; required with --profile)")
    parser.add_argument(
        "--prompt", choices=("full", "compact", "both"), help="(default both, with --profile full: every hour once)"
    )
    seed = number(0, 2**32 - 1, int)
    parser.add_argument("--seed", type=seed, default=SEED, help="of days and trajectories (default %(default)s)")
    own = parser.add_argument_group("with --profile")
    own.add_argument("--co2-column", metavar="NAME", help="CO2 intensity [kg/kWh], where names do not tell")
    own.add_argument("--load-column", metavar="NAME", help="cooling load [kW], where names do not tell")
    energy = number(0, Plant().capacity_kwh)
    own.add_argument("--start-kwh", type=energy, metavar="E", help=f"stored at the start (default {START_KWH:g})")
    own.add_argument("--explore", type=number(0, 1), metavar="P", help=f"share of random actions (default {EXPLORE})")
    own.add_argument(
        "--trajectories", type=number(1, 1000, int), metavar="N", help="a window, from the 2nd at random starts"
    )
    own.add_argument(
        "--short-share",
        type=number(0, 0.9),
        metavar="S",
        help="least share of hours whose load exceeds the stored energy",
    )
    args = parser.parse_args(argv)
    named = ("co2_column", "load_column", "start_kwh", "explore", "trajectories", "short_share")
    only = [f"--{name.replace('_', '-')}" for name in named if getattr(args, name) is not None]
    if only and not args.profile:
        parser.error(f"{', '.join(only)}: only with --profile; the synthetic files have fixed settings")
    if args.profile and args.out is None:
        parser.error("--profile needs --out DIR, so that your files do not mix with the synthetic ones")
    if args.prompt is None:  # in both forms, a folder of your own files would train every hour twice
        args.prompt = "full" if args.profile else "both"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    out = Path(args.out) if args.out else DATA_DIR
    prompts = ("full", "compact") if args.prompt == "both" else (args.prompt,)
    try:
        if args.summary:
            return show(out)
        files = dict(own_files(args, prompts) if args.profile else synthetic_files(args.seed, prompts))
        if args.check:
            return check(out, files, args.seed)
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_bytes(text.encode())
    except ProfileError as error:
        shown = error.problems[:30]
        rest = len(error.problems) - len(shown)
        print("\n".join(shown + [f"... and {rest} more problem(s)"] * bool(rest)), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename or out}: {error.strerror}; choose another --out", file=sys.stderr)
        return 2
    print(f"wrote {', '.join(files)} to {out}")
    print(summary(files))
    return 0


def own_files(args: argparse.Namespace, prompts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Reads all profiles before anything is made, so that one run names the problems of every file."""
    profiles: dict[str, Profile] = {}
    problems: list[str] = []
    for path in map(Path, args.profile):
        names = {file_name(path.stem, prompt) for prompt in prompts}
        taken = names & {file_name(stem, prompt) for stem in profiles for prompt in prompts}
        if taken:
            problems.append(f"{path}: another profile makes {', '.join(sorted(taken))} too; rename one of them")
            continue
        try:
            profiles[path.stem] = read_profile(path, args.co2_column, args.load_column)
        except ProfileError as error:
            problems += error.problems
    if problems:
        raise ProfileError(problems)
    for stem, profile in profiles.items():
        made = windows(profile)
        used = {day for window in made for day in window.dates}
        spare = [str(day) for day in profile.dates if day not in used]
        print(f"{stem}: {len(profile.dates)} days, {len(made)} window(s)" + f"; not used: {spare}" * bool(spare))
    start_kwh = START_KWH if args.start_kwh is None else args.start_kwh
    explore = EXPLORE if args.explore is None else args.explore
    return profile_files(
        profiles, prompts, args.seed, start_kwh, explore, args.trajectories or 1, args.short_share or 0.0
    )


def check(out: Path, files: dict[str, str], seed: int) -> int:
    """Compares files with what they should hold; returns 1 and names those that differ."""
    wrong = []
    for name, text in files.items():
        path = out / name
        if not path.is_file():
            wrong.append(f"{path}: missing")
        elif (stored := path.read_bytes()) != text.encode():
            at = next((i for i, (a, b) in enumerate(zip(stored, text.encode(), strict=False)) if a != b), None)
            at = min(len(stored), len(text.encode())) if at is None else at
            line = stored[:at].count(b"\n") + 1
            wrong.append(f"{path}: differs from line {line} on")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        print(f"make them again with: python scripts/make_dataset.py --seed {seed} --out {out}", file=sys.stderr)
        return 1
    print(f"{len(files)} files in {out} are what seed {seed} gives")
    return 0


def show(out: Path) -> int:
    """Tabulates the data files of a folder."""
    paths = sorted(out.glob("tes_*.csv"))
    if not paths:
        raise ProfileError([f"{out}: no tes_*.csv in it; make them first or choose another --out"])
    print(summary({path.name: decode(path.read_bytes()) for path in paths}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
