# SPDX-License-Identifier: Apache-2.0
"""metrics.csv and completions.csv of a run that is continued: which rows stay, which are set aside, what is repaired."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from grpo.run.durable import matches, sync
from grpo.run.logs import NUMBERS, function_column, rewrite, write_rows

Place = tuple[int, int]  # of rows in a log: their first byte, and the first one behind them


class FoundRow(NamedTuple):
    """A row of a log, its place, how many of its lines held bytes that are no text, and whether it is there to its end."""

    cells: list[str]
    start: int
    end: int
    odd: int
    ended: bool


def found_rows(path: Path, start: int = 0, end: int | None = None) -> Iterator[FoundRow]:
    """Rows of a log that may be missing, one by one: it may be larger than the memory."""
    at, odd, ended = start, 0, True

    def lines(file: io.TextIOWrapper) -> Iterator[str]:
        nonlocal at, odd, ended
        for line in file:
            content = line.encode("utf-8", "surrogateescape")
            text = content.replace(b"\0", b"").decode("utf-8", "replace")
            at, odd, ended = at + len(content), odd + (text != line), text[-1:] == "\n"
            yield text

    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(start)
        text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        for cells in csv.reader(lines(text)):  # it takes a line only when a row needs it
            yield FoundRow(cells, start, at, odd, ended or at < size)
            start, odd = at, 0
            if at == end:
                return


def add_place(places: list[Place], start: int, end: int) -> None:
    """Rows that stand behind each other are one place: there may be millions."""
    if places and places[-1][1] == start:
        start = places.pop()[0]
    places.append((start, end))


@dataclass
class Block:
    """Rows of one step: their places, how many they are, and a hash of what they say."""

    places: list[Place] = field(default_factory=list)
    count: int = 0
    said: int = 0

    def add(self, row: FoundRow) -> None:
        add_place(self.places, row.start, row.end)
        self.count, self.said = self.count + 1, hash((self.said, *row.cells))


@dataclass
class LogRows:
    """A log as `read_log` found it: the places of the rows to keep and of those to set aside, the last step to which no row
    is missing, and what is repaired by writing the rows to keep again."""

    path: Path
    header: list[str] = field(default_factory=list)
    kept: list[Place] = field(default_factory=list)
    aside: list[Place] = field(default_factory=list)
    whole_to: int = 0
    repairs: list[str] = field(default_factory=list)
    altered: bool = False  # whether a row to keep says something else than what was written
    body: int | None = None  # first byte behind the header; None where that is not there as it should be

    def cells(self, places: Iterable[Place]) -> Iterator[list[str]]:
        return (row.cells for place in places for row in found_rows(self.path, *place) if row.cells)

    def write(self) -> None:
        """Leave in the log what is kept, and add the rest to NAME.superseded.csv, below the header: nothing is lost."""
        if self.aside:
            aside = self.path.with_name(self.path.stem + ".superseded.csv")
            with aside.open("a+", newline="", encoding="utf-8", errors="replace") as file:
                file.seek(0)
                known = next(csv.reader(file), None)  # another one: an earlier version set rows aside
                above = [] if known == self.header or not self.header else [self.header]
                write_rows(file, itertools.chain(above, self.cells(self.aside)))
            sync(aside)
        if not self.kept:
            self.path.unlink(missing_ok=True)  # `CsvLog` begins it again
        elif not self.repairs and len(self.kept) == 1 and self.kept[0][0] == self.body:
            os.truncate(self.path, self.kept[0][1])
        elif self.aside or self.repairs:
            rewrite(self.path, itertools.chain([self.header], self.cells(self.kept)))


def is_whole(header: Sequence[str], cells: Sequence[str]) -> bool:
    """Whether a row has a step, as many cells as the header, and numbers or nothing where these belong."""
    if not cells or len(cells) != len(header) or not re.fullmatch("[0-9]{1,9}", cells[0]):
        return False
    try:
        for name, cell in zip(header, cells, strict=True):
            if cell and (name in NUMBERS or name.startswith(function_column(""))):
                float(cell)
    except ValueError:
        return False
    return True


def sha256_of(rows: Iterable[Sequence[str]]) -> str:
    """SHA-256 of a log with these rows."""
    digest = hashlib.sha256()
    write_rows(SimpleNamespace(write=lambda text: digest.update(text.encode())), rows)
    return digest.hexdigest()


def read_log(
    path: Path,
    last_step: int,
    per_step: int | None = None,
    header: Sequence[str] = (),
    end: Sequence[Any] | None = None,
) -> LogRows:
    """A log that is continued after `last_step`: rows after it (they will be written again) and what is no whole row are set
    aside, a step that is there twice is kept once, and the checkpoint's header takes the place of a damaged one. Nothing
    is written.

    per_step: rows of each step, None where it is unknown; header: the checkpoint's, empty where it does not say; end: the
    log's when the checkpoint was made, None likewise. Where the log begins with just that, nobody looks at its rows.
    """
    log, odd, steps = LogRows(path, list(header)), 0, dict[int, list[Block]]()
    before, mixed = 0, False
    if end and matches(path, end):
        log.whole_to, log.body = last_step, next(found_rows(path)).end
        log.kept = [(log.body, end[0])]
        for row in found_rows(path, end[0]):
            add_place(log.aside, row.start, row.end)
        return log
    for number, row in enumerate(found_rows(path)):
        odd += row.odd
        if number == 0 and row.ended:
            if row.cells[:1] == ["step"] and set(header) <= set(row.cells):
                log.header, log.body = row.cells, row.end
                continue
            if not is_whole(log.header, row.cells):
                continue
        if row.ended and is_whole(log.header, row.cells) and 0 < (step := int(row.cells[0])) <= last_step:
            before, mixed = step, mixed or step < before
            blocks = steps.setdefault(step, [])
            if not blocks or blocks[-1].count == per_step:
                blocks.append(Block())
            blocks[-1].add(row)
        elif row.cells:
            add_place(log.aside, row.start, row.end)
    log.repairs += ["its header was missing or damaged"] * (log.body is None and bool(header))
    log.repairs += [f"{odd} of its lines held bytes that are no text"] * bool(odd)
    log.repairs += ["its steps were not in order"] * mixed
    for step in sorted(steps):
        first, *more = steps[step]
        if more and all((block.count, block.said) == (first.count, first.said) for block in more):
            log.repairs.append(f"step {step} was there {1 + len(more)} times")
            log.aside += [place for block in more for place in block.places]
            more = []
        if step == log.whole_to + 1 and not more and first.count == (per_step or first.count):
            log.whole_to = step
            places = log.kept
        else:
            places = log.aside
        for place in (place for block in (first, *more) for place in block.places):
            add_place(places, *place)
    if end and log.whole_to == last_step:
        log.altered = sha256_of(itertools.chain([log.header], log.cells(log.kept))) != end[1]
        log.repairs += ["the ends of its lines were damaged"] * (not log.altered and not log.repairs)
    return log
