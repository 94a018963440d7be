# SPDX-License-Identifier: Apache-2.0
"""Users' hourly profiles and invented ones."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from pathlib import Path

import pytest

from grpo.common import InputError
from grpo.tasks.tes.plant import HOURS
from grpo.tasks.tes.profiles import Profile, cut_windows, read_profile, synthetic_profile


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


def with_column(name: str) -> str:
    table = profile_rows()
    return as_csv([row[:3] + [name if i == 0 else "1"] + row[3:] for i, row in enumerate(table)])


GOOD = as_csv(profile_rows())
JAPANESE = renamed("datetime", "CO2排出係数[kg-CO2/kWh]", "冷房需要[kW]")
NOON = 13  # row of 12:00 on the first day
AT_NOON = "row 13,"
# One cell of a good profile (row, column), a text that is accepted there and one that is not, and what the message
# says.
CELLS = {
    "not a number": (NOON, 2, "30", "30 kW", (AT_NOON, "'load'", "'30 kW'", "number")),
    "digits apart": (NOON, 2, "10", "1_0", (AT_NOON, "'load'", "number")),
    "empty cell": (NOON, 1, " 0.3 ", "", (AT_NOON, "'co2'", "number")),
    "negative load": (NOON, 2, "0", "-0.1", (AT_NOON, "'load'", "0 or more")),
    "grams": (NOON, 1, "0.456", "456", (AT_NOON, "'co2'", "1000")),
    "watts": (NOON, 2, "400", "38000", (AT_NOON, "'load'", "'38000' is more than the 400 kW", "in W")),
    "load at night": (3, 2, "0", "5", ("row 3,", "'load'", "outside 08:00-17:00")),
    "half hours": (NOON, 0, "2025/4/14 12:00", "2025-04-14 12:30:00", (AT_NOON, "full hour", "12:00")),
    "utc offset": (NOON, 0, "2025-04-14 12:00", "2025-04-14 12:00+09:00", (AT_NOON, "local time")),
    "duplicate": (NOON, 0, "2025-04-14 12:00", "2025-04-14 11:00:00", ("row 13:", "stands there twice")),
}
ROWS = profile_rows()
SWAPPED = as_csv([*ROWS[:13], *ROWS[14:12:-1], *ROWS[15:]])
# A whole file that is accepted and one that is not for a single reason, and what the message says.
FILES = {
    "missing hour": (as_csv(ROWS[:4] + ROWS[5:]), as_csv(ROWS[:13] + ROWS[14:]), ("2025-04-14", "12:00")),
    "every morning": (as_csv(profile_rows(hours=range(8, 18))), as_csv(profile_rows(hours=range(9, 18))), ("08:00",)),
    "too few days": (SWAPPED, as_csv(profile_rows(3)), ("no 4 consecutive days",)),
    "short blocks": (
        as_csv(profile_rows(6)[:25] + profile_rows(6)[49:]),
        as_csv(profile_rows(7)[:73] + profile_rows(7)[97:]),
        ("no 4 consecutive days",),
    ),
    "extra cell": (GOOD, GOOD.replace("0.312,32.5\n", "0.312,32,5\n", 1), ("row 13: 4 cells, the header has 3",)),
    "decimal commas": (GOOD, GOOD.replace(".", ","), ("row 1: 5 cells, the header has 3 columns", "like it: 95")),
    "quarter hours": (GOOD, GOOD.replace(":00,", ":15,"), ("row 1,", "row 20", "mine.csv: and 77 more problems")),
    "blank lines": (GOOD.replace("\n", "\n\n"), "", ("is empty",)),
    "semicolons": (GOOD, GOOD.replace(",", ";"), ("mine.csv, header", "commas")),
    "no co2 column": (renamed("datetime", "Grid ＣＯ₂ (kg)", "x_load"), renamed("datetime", "grid", "load"), ("co2",)),
    "no load column": (renamed("datetime", "co2", "demand"), renamed("datetime", "co2", "kWh"), ("0 columns",)),
    "two loads": (with_column("heating_load"), with_column("b_load").replace(",load,", ",a_load,", 1), ("2 columns",)),
}
FILES |= {
    name: (changed(row, at, good), changed(row, at, bad), parts) for name, (row, at, good, bad, parts) in CELLS.items()
}


@pytest.mark.parametrize("name", FILES)
def test_profile_errors(name: str, tmp_path: Path) -> None:
    good, bad, parts = FILES[name]
    path = tmp_path / "mine.csv"
    path.write_text(good)
    assert cut_windows(read_profile(path))
    path.write_text(bad)
    with pytest.raises(InputError) as caught:
        read_profile(path)
    # A single reason gives a single message; a row of another hour is also missing where it was.
    most = {"every morning": 4, "semicolons": 3, "quarter hours": 21}.get(name, 2)
    assert len(caught.value.args) <= most, caught.value.args
    message = "\n".join(caught.value.args)
    assert all(part in message for part in (str(path), *parts)), message


def test_encodings(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    # A byte order mark must not hide the plain name: the other time column would be as good.
    rows = with_column("time_of_use").replace("datetime,co2,load", "datetime,CO2排出係数[kg-CO2/kWh],冷房需要[kW]")
    for encoding in ("utf-8-sig", "cp932"):
        path.write_bytes(rows.encode(encoding))
        profile = read_profile(path)
        assert profile.co2[0, 12] == 0.312 and profile.load_kw[3, 8] == 28.5 and profile.dates[0] == date(2025, 4, 14)
    for raw, reason in ((GOOD.encode("utf-16"), "name one of them datetime"), (b"datetime,\x81\x20,x", "CP932")):
        path.write_bytes(raw)
        with pytest.raises(InputError, match=f"mine.csv.*{reason}"):
            read_profile(path)


def test_windows_share_the_next_day_and_never_span_a_gap() -> None:
    profile = synthetic_profile(3, 15)
    cut = cut_windows(profile)
    assert [w.dates[0] for w in cut] == [profile.dates[i] for i in (0, 3, 6, 9)]
    assert all(w.load_kw.shape == w.co2.shape == (4, 10) for w in cut)
    keep = [i for i in range(15) if i != 5]
    gapped = Profile(tuple(profile.dates[i] for i in keep), profile.co2[keep], profile.load_kw[keep])
    assert [w.dates[0] for w in cut_windows(gapped)] == [profile.dates[i] for i in (0, 6, 9)]
    for window in cut_windows(gapped):
        assert [(day - window.dates[0]).days for day in window.dates] == [0, 1, 2, 3]
