# SPDX-License-Identifier: Apache-2.0
"""Hourly profiles of CO2 intensity and cooling load: read from CSVs, or synthetic."""

import contextlib
import csv
import io
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from grpo.common import InputError
from grpo.data.files import merge_alike
from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, PLANT, START_KWH, Solution, solve, terminal_price

TRAIN_START, HELDOUT_START = date(2025, 4, 7), date(2025, 9, 1)  # Mondays; a window starts on every Monday


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

    def solve(self, first: int = 0, start_kwh: ArrayLike = START_KWH) -> Solution:
        """Solves the window's decisions from number `first` on, for one storage energy at their start or several."""
        load_kw, co2 = (values[:DECISION_DAYS].ravel()[first:] for values in (self.load_kw, self.co2))
        return solve(load_kw, co2, terminal_price(self.co2[DECISION_DAYS]), start_kwh)


def cut_windows(profile: Profile) -> list[Window]:
    """Cuts a profile into windows of three days plus the next; that next day starts the following window.

    A block of N consecutive days gives (N - 1) // 3 windows; the days left over at its end are not used."""
    spans, first = [], 0
    while first + DECISION_DAYS < len(profile.dates):
        last = first + DECISION_DAYS
        if (profile.dates[last] - profile.dates[first]).days == DECISION_DAYS:
            spans.append(slice(first, last + 1))
            first = last
        else:  # a day within the span is missing: the next window starts after the gap
            gaps = (i for i in range(first, last) if (profile.dates[i + 1] - profile.dates[i]).days != 1)
            first = next(gaps) + 1
    hours = slice(HOURS[0], HOURS[-1] + 1)
    return [Window(profile.dates[s], profile.co2[s, hours], profile.load_kw[s, hours]) for s in spans]


def synthetic_profile(seed: int | Sequence[int], days: int, start: date = TRAIN_START) -> Profile:
    """Makes `days` consecutive days of synthetic weather.

    CO2 intensity: a level of the week, a solar dip around noon whose depth follows the sky of the day (from overcast to
    clear), a morning and an evening peak; 0.15 to 0.6 kg/kWh. Cooling load: a level of the day, about 10 to 60 kW with
    some persistence, an afternoon slope, sometimes an early closing, hourly noise; zero outside the decision hours.
    Values are rounded as a data file would (0.001 kg/kWh, 0.1 kW)."""
    rng = np.random.default_rng(seed)
    hour = np.arange(24)
    co2, load = np.empty((days, 24)), np.zeros((days, 24))
    base, level = rng.uniform(0.36, 0.50), rng.uniform(10.0, 60.0)
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


# Patterns of the columns' names, after NFKC normalisation (full-width letters, subscript 2) and lowercasing.
COLUMN_PATTERNS = {"datetime": r"date|time|日時", "co2": r"co2|carbon", "load": r"load|cool|demand|\[kw\]|冷房|需要"}
DATETIME_FORMATS = ("%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S")  # what spreadsheets write; ISO 8601 is read too


def find_columns(header: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Finds the datetime, co2 and load columns in a header; returns their names and the header's faults."""
    columns: dict[str, str] = {}
    problems = []
    plain = {name: unicodedata.normalize("NFKC", name).strip().lower() for name in header}
    for kind, pattern in COLUMN_PATTERNS.items():
        matches = [name for name in header if name not in columns.values() and re.search(pattern, plain[name])]
        matches = [name for name in matches if plain[name] == kind] or matches  # An exact name wins.
        if len(matches) != 1:
            problem = f"{len(matches)} columns could be the {kind} column ({pattern}) of {list(header)}"
            problems.append(f"{problem}; name one of them {kind}, and separate columns by commas")
        if matches:
            columns[kind] = matches[0]
    return columns, problems


def parse_datetime(text: str) -> datetime:
    """Reads the start of an hour in local time. Raises ValueError, whose message names the fault."""
    stamp = None
    with contextlib.suppress(ValueError):
        stamp = datetime.fromisoformat(text)
    for form in DATETIME_FORMATS:
        with contextlib.suppress(ValueError):
            stamp = stamp or datetime.strptime(text, form)
    if stamp is None or stamp.tzinfo or (stamp.minute, stamp.second, stamp.microsecond) != (0, 0, 0):
        raise ValueError("is no full hour in local time; write it like 2025-04-14 08:00:00, one row an hour")
    return stamp


def parse_number(text: str, kind: str, stamp: datetime | None) -> float:
    """A number of `kind` co2 or load. Raises ValueError, whose message (`is ...`) follows the text; also for a load
    outside the decision hours, if the hour `stamp` is given."""
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(text.replace("_", "?"))  # Python would read 1_0 as 10
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("is no number of 0 or more; write it with a decimal point and no unit")
    if kind == "co2" and value > 2.0:
        raise ValueError("is more than 2 kg/kWh; divide by 1000 if it is in g/kWh")
    if kind == "load" and value > (most := PLANT.rated_kw + PLANT.capacity_kwh):
        raise ValueError(f"is more than the {most:.0f} kW of heat pump and full storage; divide by 1000 if it is in W")
    if kind == "load" and value > 0 and stamp and stamp.hour not in HOURS:
        raise ValueError(f"is a load outside {HOURS[0]:02d}:00-{HOURS[-1]:02d}:00, which is not simulated; set it to 0")
    return value


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a CSV in UTF-8 (with or without byte order mark) or CP932. Raises InputError."""
    for encoding in ("utf-8-sig", "cp932"):
        try:
            lines = list(filter(None, csv.reader(io.StringIO(path.read_text(encoding)))))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            continue
        if not lines:
            raise InputError(f"{path}: is empty; the first line must name the columns")
        return lines[0], lines[1:]
    raise InputError(f"{path}: is neither UTF-8 nor CP932 (Shift JIS); save it as a CSV in UTF-8")


def read_profile(path: str | Path) -> Profile:
    """Reads hourly data from a CSV with a datetime, a CO2 intensity [kg/kWh] and a cooling load [kW] column.

    Columns are found by name (English or Japanese). Days must be complete in the decision hours; night hours may be
    missing. A file may hold several blocks of consecutive days. Raises InputError listing problems with file, row (1
    is the first below the header) and column."""
    header, rows = read_table(path := Path(path))
    columns, problems = find_columns(header)
    if problems:
        raise InputError(*(f"{path}, header: {problem}" for problem in problems))
    hours: dict[datetime, dict[str, float]] = {}
    for number, cells in enumerate(rows, 1):
        if not any(cell.strip() for cell in cells):
            continue  # empty cells, as spreadsheets leave them behind the table
        if len(cells) != len(header):
            problems.append(f"{path}, row {number}: {len(cells)} cells, the header has {len(header)} columns")
            continue
        stamp, values = None, {}
        for kind, column in columns.items():  # datetime first
            text = cells[header.index(column)].strip()
            try:
                if kind == "datetime":
                    stamp = parse_datetime(text)
                else:
                    values[kind] = parse_number(text, kind, stamp)
            except ValueError as error:
                problems.append(f"{path}, row {number}, column {column!r}: {text!r} {error}")
        if stamp in hours:
            problems.append(f"{path}, row {number}: '{stamp}' stands there twice; keep one of the rows")
        elif stamp:
            hours[stamp] = values
    problems += [f"{path}: {problem}" for problem in day_problems(hours)]
    if problems:
        raise InputError(*merge_alike(str(path), problems))  # A year by quarter hours has tens of thousands.
    dates = tuple(sorted({stamp.date() for stamp in hours}))
    co2_and_load = np.full((2, len(dates), 24), np.nan)
    for stamp, values in hours.items():
        co2_and_load[:, dates.index(stamp.date()), stamp.hour] = values["co2"], values["load"]
    return Profile(dates, *co2_and_load)


def day_problems(stamps: Collection[datetime]) -> list[str]:
    """The reasons why the days of these hours cannot be cut into windows."""
    dates, problems = sorted({stamp.date() for stamp in stamps}), []
    for day in dates:
        missing = [f"{hour:02d}:00" for hour in HOURS if datetime.combine(day, time(hour)) not in stamps]
        if missing:
            problems.append(f"{day}: no row for {' '.join(missing)}; every day needs each decision hour")
    spans = zip(dates, dates[DECISION_DAYS:], strict=False)
    if not any((last - first).days == DECISION_DAYS for first, last in spans):
        problems.append(f"there are no {DECISION_DAYS + 1} consecutive days (three to decide on, one after)")
    return problems


def profile_csv(profiles: Sequence[Profile]) -> str:
    """The text of a CSV for `read_profile`, rounded to 3 and 1 decimals; no value may be NaN."""
    days = (day for p in profiles for day in zip(p.dates, p.co2, p.load_kw, strict=True))
    rows = [
        (datetime.combine(day, time(hour)), f"{co2[hour]:.3f}", f"{load[hour]:.1f}")
        for day, co2, load in days
        for hour in range(24)
    ]
    return to_csv(("datetime", "co2_kg_per_kwh", "load_kw"), rows)


def to_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Writes a table as CSV text with plain line feeds."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
