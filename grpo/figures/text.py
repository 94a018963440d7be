# SPDX-License-Identifier: Apache-2.0
"""Measured figures as text: for tables in the terminal and in Markdown, and for the report of a run."""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.common import one_line


def finite_number(value: object) -> float:
    """A finite number, or NaN for anything else: an empty cell, `inf`, None."""
    try:
        result = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
    return result if math.isfinite(result) else math.nan


def object_at(record: object, *names: str) -> dict[str, Any]:
    """The JSON object at a path of `names` inside `record`; an empty one if the path leads to no object."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record if isinstance(record, dict) else {}


def fitting(form: str, *values: float) -> str:
    """A `form` such as `.3f`, or the same with three significant digits where all `values` are too small for it: in
    `0.000 (-0.000 to 0.000)` nobody sees what was learned. Below 1e-9 they are rounding.

    >>> [format(value, fitting("+.3f", value)) for value in (0.0123, 0.00123, -2.88e-05, 0.0, 1e-17, math.nan)]
    ['+0.012', '+0.00123', '-2.88e-05', '+0.000', '+0.000', '+nan']
    """
    largest = max((abs(value) for value in values if not math.isnan(value)), default=0.0)
    return re.sub(r"\.\df", ".3g", form) if 1e-9 < largest < 0.01 else form


def with_interval(figures: Mapping[str, object], name: str, digits: str = ".3f", label: str = "") -> str:
    """A figure with its 95% interval, if it has one: `0.521 (0.480 to 0.560)`; `-` if the figure is missing."""
    value, low, high = (finite_number(figures.get(name + end)) for end in ("", "_low", "_high"))
    if math.isnan(value):
        return "-"
    digits = fitting(digits, value, low, high)
    interval = "" if math.isnan(low + high) else f" ({label}{low:{digits}} to {high:{digits}})"
    return f"{value:{digits}}{interval}"


def plain(value: float) -> str:
    """A figure with six digits, without an exponent where it is large: a reward may be money.

    >>> plain(-0.12345678), plain(-1999870.0), plain(-0.0), plain(999999.7)
    ('-0.123457', '-1,999,870', '0', '1,000,000')
    """
    return f"{value + 0.0:.6g}" if abs(value) < 999_999.5 else f"{value:,.0f}"


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines for a terminal: the first column is aligned left, the others right."""
    columns = max(map(len, rows))
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    lines = []
    for row in rows:
        others = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=False)]
        lines.append("  ".join([f"  {row[0]:<{widths[0]}}", *others]).rstrip())
    return lines


def wrapped(text: str) -> list[str]:
    """A sentence below a table, as lines for a terminal."""
    return textwrap.wrap(text, 110, initial_indent="  ", subsequent_indent="    ")


def markdown_table(header: list[str], rows: list[list[str]], longest_cell: int = 300) -> str:
    """A Markdown table, each cell on one line; longer cells lose their middle."""
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([one_line(cell, longest_cell).replace("|", "\\|") for cell in cells] for cells in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)
