# SPDX-License-Identifier: Apache-2.0
"""How long a run still takes, by the pace of its last steps."""

from __future__ import annotations

import contextlib
import csv
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

RECENT = 10  # steps that the pace is taken from
LEAST = 3  # steps before the pace is known: the first ones also compile and load
UNKNOWN = f"time left not known before step {LEAST}"


class Pace:
    """The times of a run of `total` steps, from the rows of its metrics.csv, evaluated every `eval_steps` steps (0:
    only before and after)."""

    def __init__(self, total: int, eval_steps: int, rows: Iterable[Mapping[str, str | float | None]] = ()):
        self.total, self.eval_steps = total, eval_steps
        self.step_s: list[float] = []
        self.eval_s: list[float] = []
        for row in rows:
            self.add(row)

    @classmethod
    def read(cls, metrics: Path, total: int, eval_steps: int) -> Pace:
        """The pace by a metrics.csv, which may be missing."""
        with contextlib.suppress(OSError), metrics.open(newline="", encoding="utf-8", errors="replace") as file:
            return cls(total, eval_steps, csv.DictReader(file))
        return cls(total, eval_steps)

    def add(self, row: Mapping[str, str | float | None]) -> None:
        """Adds the times of a row, text or numbers; an empty cell, None and NaN do not count."""
        for column, seconds in (("step_s", self.step_s), ("eval_s", self.eval_s)):
            with contextlib.suppress(ValueError):
                if not math.isnan(value := float(row.get(column) or "nan")):
                    seconds.append(value)

    def evaluations_left(self, step: int) -> int:
        """How many evaluations follow `step`, the last one included."""
        return 1 + ((self.total - 1) // self.eval_steps - step // self.eval_steps if self.eval_steps else 0)

    def seconds_left(self, step: int) -> float:
        """Seconds from the end of `step` to that of the last evaluation: steps at the median of the last RECENT,
        evaluations like the last one (none while none is known). NaN before LEAST steps."""
        if len(self.step_s) < LEAST:
            return math.nan
        return (self.total - step) * median(self.step_s[-RECENT:]) + self.evaluations_left(step) * sum(self.eval_s[-1:])

    def left(self, step: int, now: float | None = None) -> str:
        """`about 1 h 40 min left, until 17:20`, by this machine's clock; empty where it is not known."""
        if math.isnan(seconds := self.seconds_left(step)):
            return ""
        now = time.time() if now is None else now
        hours, minutes = divmod(round(seconds / 60), 60)
        duration = f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
        start, end = time.localtime(now), time.localtime(now + seconds)
        clock = time.strftime("%H:%M" if start[:3] == end[:3] else "%a %d %b %H:%M", end)
        return f"about {duration} left, until {clock}"
