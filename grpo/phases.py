# SPDX-License-Identifier: Apache-2.0
"""Lines about work that takes time: one when it begins, more meanwhile, one when it ends.

A thread writes them, so that a call that returns nothing for minutes (vLLM compiles) is not silent either.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from grpo.common import log

LINE_S = 30.0  # seconds between two lines about the same work
ROWS_S = 5.0  # seconds before the first line about rows: most files are read sooner
FILE_ONLY = {"file_only": True}  # `extra` of a log message that the terminal does not need
Item = TypeVar("Item")


class Phase:
    """A piece of work, used in a `with`. Count what is finished in `done`; the last line says `result`.

    Phases inside another one only add to its lines: `closed loop, base model, decision 4 of 30, 12 s`. `first_s` is for
    work that is mostly short: there are no lines at begin and end, and the first one comes after so many seconds."""

    active: list[Phase] = []  # the phases that have not ended, outermost first

    def __init__(self, label: str = "", unit: str = "", total: int = 0, first_s: float = 0.0):
        """`unit`: what is counted, in the singular, up to `total` (0: unknown)."""
        self.label, self.unit, self.total, self.first_s = label, unit, total, first_s
        self.done, self.result = 0, ""
        self.finished = threading.Event()

    def __enter__(self) -> Phase:
        self.started = time.monotonic()
        self.outermost = not Phase.active
        Phase.active.append(self)
        if self.outermost:
            if not self.first_s:
                write_line(f"{self.label} ...")
            threading.Thread(target=self.watch, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finished.set()
        # An inner phase in a generator that an exception abandoned has not ended yet: it ends with this one.
        del Phase.active[Phase.active.index(self) if self in Phase.active else len(Phase.active) :]
        if self.outermost and not self.first_s:
            result = self.result or ("stopped" if kind else "done")
            write_line(f"{self.label}: {result} ({self.seconds:.1f} s)")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def count(self) -> str:
        """How far the work is: `decision 4 of 30`; empty where nothing is counted."""
        of_total = f" of {self.total:,}" if self.total else ""
        return f"{self.unit} {self.done:,}{of_total}" if self.unit else ""

    def watch(self) -> None:
        """Writes lines until the phase ends."""
        wait_s = self.first_s or LINE_S
        while not self.finished.wait(wait_s):
            parts = [part for phase in list(Phase.active) for part in (phase.label, phase.count) if part]
            write_line(f"{', '.join(parts)}, {self.seconds:.0f} s")
            wait_s = LINE_S


def write_line(line: str) -> None:
    """Writes a line into training.log and onto the screen; before there is a log, onto the screen alone."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", line)
    else:
        print(line, flush=True)


def with_progress(
    label: str, items: Iterable[Item], unit: str = "row", total: int = 0, each: int = 1, first_s: float = ROWS_S
) -> Iterator[Item]:
    """Yields `items` and counts them in a phase, `each` units for every item."""
    with Phase(label, unit, total, first_s) as phase:
        for item in items:
            yield item
            phase.done = min(phase.done + each, total) if total else phase.done + each
