# SPDX-License-Identifier: Apache-2.0
"""Lines about work that takes time: one when it begins, more or a bar meanwhile, one when it ends.

A thread writes them, so that a call that returns nothing for minutes (vLLM compiles) is not silent either.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from grpo.settings import log

LINE_S = 30.0  # seconds between two lines about the same work
ROWS_S = 5.0  # seconds before the first line about rows: most files are read sooner
BAR_S = 0.5  # seconds between two pictures of the bar
CELLS = 30  # of the bar
FILE_ONLY = {"file_only": True}  # `extra` of a log message that the terminal does not need
Item = TypeVar("Item")


class Bar:
    """The bar in the last line of a terminal. Whoever else writes to the terminal does it inside `wiped`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.drawn = False

    def draw(self, share: float, text: str) -> None:
        """Draws the bar, filled by `share` (0 to 1), with a text behind it."""
        filled = round(CELLS * min(share, 1.0))
        line = f"[{'#' * filled}{'.' * (CELLS - filled)}] {text}"[: shutil.get_terminal_size().columns - 1]
        self.show(f"\r{line}\x1b[K")
        self.drawn = True

    @contextlib.contextmanager
    def wiped(self) -> Iterator[None]:
        """Takes the bar off the terminal while the block writes to it."""
        with self.lock:
            if self.drawn:
                self.drawn = False
                self.show("\r\x1b[K")
            yield

    def show(self, text: str) -> None:
        """Writes to the terminal, if it is still there."""
        with contextlib.suppress(OSError, ValueError):  # The terminal was closed.
            sys.stdout.write(text)
            sys.stdout.flush()


BAR = Bar()


class Phase:
    """A piece of work, used in a `with`. Count what is finished in `done`; the last line says `result`.

    Phases inside another one only add to its lines: `closed loop, base model, decision 4 of 30, 12 s`. With `first_s`
    there are no lines at begin and end, and none before so many seconds: for work that is mostly short.
    """

    active: list[Phase] = []  # from the outermost to the innermost

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
                write(f"{self.label} ...")
            threading.Thread(target=self.watch, args=[sys.stdout.isatty()], daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finished.set()
        # An inner phase that did not end, in a generator that an exception left behind, ends with this one.
        del Phase.active[Phase.active.index(self) if self in Phase.active else len(Phase.active) :]
        if self.outermost:
            with BAR.wiped():
                pass
            if not self.first_s:
                result = self.result or ("stopped" if kind else "done")
                write(f"{self.label}: {result} ({self.seconds:.1f} s)")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def count(self) -> str:
        """How far the work is: `decision 4 of 30`; empty where nothing is counted."""
        of_total = f" of {self.total:,}" if self.total else ""
        return f"{self.unit} {self.done:,}{of_total}" if self.unit else ""

    def watch(self, in_terminal: bool) -> None:
        """Writes lines, and in a terminal draws the bar, until the phase ends."""
        next_s = self.first_s or LINE_S
        while not self.finished.wait(min(BAR_S, next_s) if in_terminal else max(0.01, next_s - self.seconds)):
            phases = list(Phase.active)
            parts = [part for phase in phases for part in (phase.label, phase.count) if part]
            text = f"{', '.join(parts)}, {self.seconds:.0f} s"
            shares = [phase.done / phase.total for phase in phases if phase.total] if in_terminal else []
            if self.seconds >= next_s:
                next_s = self.seconds + LINE_S
                write(text, terminal=not shares)
            with BAR.lock:  # Nothing may be drawn once the phase has wiped its bar.
                if shares and not self.finished.is_set():
                    BAR.draw(shares[0], text)


def write(line: str, terminal: bool = True) -> None:
    """Writes a line into training.log and, with `terminal`, onto the screen; before there is a log, onto the screen
    alone."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", line, extra=None if terminal else FILE_ONLY)
    elif terminal:
        with BAR.wiped():
            print(line, flush=True)


def with_progress(
    label: str, items: Iterable[Item], unit: str = "row", total: int = 0, each: int = 1, first_s: float = ROWS_S
) -> Iterator[Item]:
    """Yields the same items, of `each` units, counted in a phase."""
    with Phase(label, unit, total, first_s) as phase:
        for item in items:
            yield item
            phase.done = min(phase.done + each, total) if total else phase.done + each
