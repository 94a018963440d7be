# SPDX-License-Identifier: Apache-2.0
"""Hourly profiles of CO2 intensity and cooling load: read from CSVs, or invented."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, START_KWH, Plant, Solution, solve, terminal_price

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

    def solve(self, plant: Plant, first: int = 0, start_kwh: ArrayLike = START_KWH) -> Solution:
        """Solves the decisions of the window from number `first` on, for one storage energy at their start or
        several."""
        load_kw, co2 = (values[:DECISION_DAYS].ravel()[first:] for values in (self.load_kw, self.co2))
        return solve(plant, load_kw, co2, terminal_price(plant, self.co2[DECISION_DAYS]), start_kwh)


def windows(profile: Profile) -> list[Window]:
    """Cuts a profile into windows of three days plus the next; that next day starts the following window.

    A block of N consecutive days gives (N - 1) // 3 windows; the days left over at its end are not used.
    """
    spans, first = [], 0
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


class ProfileError(ValueError):
    """A profile that cannot be used; `problems` lists everything that is wrong with it, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


# What a header may be called, after NFKC normalisation (full-width letters, subscript 2) and lowercasing.
COLUMN_PATTERNS = {"datetime": r"date|time|日時", "co2": r"co2|carbon", "load": r"load|cool|demand|\[kw\]|冷房|需要"}
DATETIME_FORMATS = ("%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S")  # beside ISO 8601: what spreadsheets write


def find_columns(header: list[str], chosen: dict[str, str | None]) -> tuple[dict[str, int], list[str]]:
    """Finds the datetime, co2 and load columns in a header; returns their positions and what is wrong with it."""
    columns: dict[str, int] = {}
    problems = []
    plain = [unicodedata.normalize("NFKC", name).strip().lower() for name in header]
    for kind, pattern in COLUMN_PATTERNS.items():
        name, option = chosen.get(kind), f"--{kind}-column"
        if name is not None:
            matches = [i for i, column in enumerate(header) if column.strip() == name.strip()]
            missing = f"no column named {name!r} (asked for with {option}); the header has {header}"
        else:
            others = {*columns.values(), *(i for i, name in enumerate(header) if name in chosen.values())}
            matches = [i for i, column in enumerate(plain) if i not in others and re.search(pattern, column)]
            if kind == "datetime":  # the plain name wins over, say, time_of_use
                matches = [i for i in matches if plain[i] == kind] or matches
            advice = "one row an hour" if kind == "datetime" else f"or name it with {option}"
            missing = f"no {kind} column: a header should contain one of {pattern}, {advice}; it has {header}"
        if not matches:
            problems.append(missing)
            continue
        columns[kind] = matches[0]
        if len(matches) > 1:
            advice = "rename the others" if kind == "datetime" else f"choose one with {option}"
            names = [header[i] for i in matches]
            problems.append(f"{len(matches)} columns could be the {kind} column: {names}; {advice}")
    if not problems and columns["co2"] == columns["load"]:
        problems.append(f"column {header[columns['co2']]!r} cannot be both co2 and load")
    return columns, problems


def parse_datetime(text: str) -> datetime:
    """Reads the start of an hour in local time; raises ValueError with what is wrong."""
    stamp = None
    with contextlib.suppress(ValueError):
        stamp = datetime.fromisoformat(text)
    for form in DATETIME_FORMATS:
        with contextlib.suppress(ValueError):
            stamp = stamp or datetime.strptime(text, form)
    if stamp is None:
        raise ValueError("is not a date and time; write it like 2025-04-14 08:00:00")
    if stamp.tzinfo is not None:
        raise ValueError("has a UTC offset; write the plant's local time without one")
    if (stamp.minute, stamp.second, stamp.microsecond) != (0, 0, 0):
        raise ValueError("is not a full hour; give hourly means, one row an hour")
    return stamp


def parse_number(text: str, kind: str, stamp: datetime | None) -> float:
    """Reads a CO2 intensity or a load; raises ValueError with what is wrong."""
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(text.replace("_", "?"))  # Python would read 1_0 as 10
    at_night = kind == "load" and value > 0 and stamp and stamp.hour not in HOURS
    wrong = {
        "is empty; fill it in": not text,
        "is not a finite number; fill it in, with a decimal point and no unit": not math.isfinite(value),
        "is negative; it must be 0 or more": value < 0,
        "is more than 2 kg/kWh; divide by 1000 if it is in g/kWh": kind == "co2" and value > 2.0,
        f"is a load outside {HOURS[0]:02d}:00-{HOURS[-1]:02d}:00, which is not simulated; set it to 0": at_night,
    }
    if reason := next((reason for reason, is_so in wrong.items() if is_so), None):
        raise ValueError(reason)
    return value


def decode(raw: bytes) -> str:
    """Decodes a CSV in UTF-8 (with or without byte order mark) or CP932; raises ValueError with what to do."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in raw:
        raise ValueError("is not UTF-8 text (UTF-16 or binary); save it as a CSV in UTF-8")
    for encoding in ("utf-8-sig", "cp932"):
        with contextlib.suppress(UnicodeDecodeError):
            return raw.decode(encoding)
    raise ValueError("is neither UTF-8 nor CP932 (Shift JIS); save it as a CSV in UTF-8")


def read_cells(path: Path) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The header of a CSV, and every row as (`row 1 (line 2)`, cells). Raises ProfileError."""
    try:
        reader = csv.reader(io.StringIO(decode(path.read_bytes()), newline=""))
        header: list[str] = next(reader, [])
        rows: list[tuple[str, list[str]]] = []
        line = reader.line_num + 1  # that the next row begins in
        for cells in reader:
            rows += [(f"row {len(rows) + 1} (line {line})", cells)] if cells else []
            line = reader.line_num + 1
    except OSError as error:
        raise ProfileError([f"{path}: cannot be read: {error.strerror}"]) from None
    except (ValueError, csv.Error) as error:
        raise ProfileError([f"{path}: {error}"]) from None
    if not any(cell.strip() for cell in header):
        raise ProfileError([f"{path}: is empty; the first line must name the columns"])
    if len(header) < 3:
        raise ProfileError([f"{path}, header: only {len(header)} column(s) {header}; separate three by commas"])
    return header, rows


def read_profile(path: str | Path, co2_column: str | None = None, load_column: str | None = None) -> Profile:
    """Reads hourly data from a CSV with a datetime, a CO2 intensity [kg/kWh] and a cooling load [kW] column.

    Columns are found by name (English or Japanese) unless they are named here. Days must be complete in the decision
    hours; night hours may be missing. A file may hold several blocks of consecutive days, each of four days or more.
    Raises ProfileError listing every problem with file, row (1 is the first below the header), line and column.
    """
    header, rows = read_cells(path := Path(path))
    columns, problems = find_columns(header, {"co2": co2_column, "load": load_column})
    if problems:
        raise ProfileError([f"{path}, header: {problem}" for problem in problems])
    hours: dict[datetime, tuple[dict[str, float], str]] = {}  # what the hour's first row holds, and where it stands
    for here, row in rows:
        if not any(cell.strip() for cell in row):
            continue  # empty cells, as spreadsheets leave them behind the table
        if len(row) != len(header):
            problems.append(f"{path}, {here}: {len(row)} cells, the header has {len(header)} columns")
            continue
        stamp, values = None, {}
        for kind, column in columns.items():  # datetime first
            text = row[column].strip()
            try:
                if kind == "datetime":
                    stamp = parse_datetime(text)
                else:
                    values[kind] = parse_number(text, kind, stamp)
            except ValueError as error:
                problems.append(f"{path}, {here}, column {header[column]!r}: {text!r} {error}")
        if stamp is None:
            continue
        where = f"{path}, {here}, column {header[columns['datetime']]!r}: '{stamp}'"
        if stamp in hours:
            problems.append(f"{where} is in {hours[stamp][1]} already; keep one of them")
        elif hours and stamp < (previous := next(reversed(hours))):
            problems.append(f"{where} comes after '{previous}'; sort the rows by time")
        hours.setdefault(stamp, (values, here))
    problems += [f"{path}: {problem}" for problem in day_problems(hours)]
    if problems:
        raise ProfileError(problems)
    dates = tuple(sorted({stamp.date() for stamp in hours}))
    table = np.full((2, len(dates), 24), np.nan)
    for stamp, (values, _) in hours.items():
        table[:, dates.index(stamp.date()), stamp.hour] = values["co2"], values["load"]
    return Profile(dates, *table)


def day_problems(stamps: Collection[datetime]) -> list[str]:
    """What hinders cutting the days of these hours into windows."""
    dates, needed = sorted({stamp.date() for stamp in stamps}), DECISION_DAYS + 1
    problems = []
    for day in dates:
        missing = [f"{hour:02d}:00" for hour in HOURS if datetime.combine(day, time(hour)) not in stamps]
        if missing:
            problems.append(f"{day}: no row for {' '.join(missing)}; every day needs each decision hour")
    if len(dates) < needed:
        return [*problems, f"{len(dates)} day(s); at least {needed} are needed (three to decide on, one after)"]
    starts = [i for i, day in enumerate(dates) if i == 0 or (day - dates[i - 1]).days != 1] + [len(dates)]
    for start, end in itertools.pairwise(starts):
        if end - start < needed:
            span = f"{dates[start]} to {dates[end - 1]}: {end - start} consecutive day(s), {needed} are needed"
            problems.append(f"{span}; add the days missing around them or take these out")
    return problems


def profile_csv(profiles: Sequence[Profile]) -> str:
    """Writes profiles as one CSV, the way `read_profile` reads it back."""
    days = (day for p in profiles for day in zip(p.dates, p.co2, p.load_kw, strict=True))
    hours = (
        (datetime.combine(day, time(hour)), co2[hour], load[hour]) for day, co2, load in days for hour in range(24)
    )
    rows = [[stamp, f"{co2:.3f}", f"{load:.1f}"] for stamp, co2, load in hours]
    return to_csv(("datetime", "co2_kg_per_kwh", "load_kw"), rows)


def to_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Writes a table as CSV text with plain line feeds."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
