# SPDX-License-Identifier: Apache-2.0
"""Held-out rows: those that EVAL_DATA names, or a part of DATA that a hash chooses."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from grpo.data.files import INSTRUCTING, Row, data_fingerprint, find_files, read_rows
from grpo.data.formats import is_dataset
from grpo.settings import ROOT, Problems, Settings, split_commas

# Training files that come with the project -> the held-out files that belong to them.
DEMO = {
    "data/tes_train.csv": "data/tes_heldout.csv",
    "data/tes_train_compact.csv": "data/tes_heldout_compact.csv",
    "data/gsm8k_train.jsonl": "data/gsm8k_heldout.jsonl",
}
DATE_COLUMNS = {"timestamp", "datetime", "date", "day", "time", "日時", "日付"}
DATE = re.compile(r"\s*([0-9]{4})[-/]([0-9]{1,2})[-/]([0-9]{1,2})(?![0-9])")
# In days or prompts: of fewer than LEAST_GROUPS none is held out; fewer than LEAST_HELD_OUT give no usable interval.
LEAST_GROUPS, LEAST_HELD_OUT = 20, 5
MOST_HELD_OUT = 64  # days or prompts that are held out, and rows that are evaluated


@dataclass(frozen=True)
class Split:
    """The rows of a run that train, those that are evaluated, and how they were told apart."""

    train: list[Row]
    heldout: list[Row]
    reason: str


def demo_heldout(data: str) -> str | None:
    """The held-out file of the project's training file that DATA names; None where DATA names anything else."""
    return next((heldout for train, heldout in DEMO.items() if names_only(data, train)), None)


def names_only(text: str, path: str) -> bool:
    """Whether a setting such as DATA names this one file of the project, and nothing beside it."""
    if any(map(is_dataset, split_commas(text))):
        return False
    return [file.resolve() for file in find_files("DATA", text, Problems())] == [ROOT / path]


def read_split(settings: Settings, problems: Problems) -> Split:
    """Read DATA and the held-out rows; with EVAL_SAMPLES=0 all rows of DATA train."""
    rows = read_rows("DATA", settings.DATA, problems, settings.SYSTEM_PROMPT)
    if not settings.EVAL_SAMPLES:
        return Split(rows, [], "EVAL_SAMPLES=0, all rows of DATA train")
    if settings.EVAL_DATA is not None:
        heldout = read_rows("EVAL_DATA", settings.EVAL_DATA, problems, settings.SYSTEM_PROMPT)
        return Split(rows, heldout, f"the rows of EVAL_DATA ({settings.EVAL_DATA}), all rows of DATA train")
    return hold_out(rows, settings.EVAL_SHARE)


def hold_out(rows: Sequence[Row], share: float) -> Split:
    """Hold out whole days of rows that carry a date, and whole prompts of others: neighbouring hours, and the same
    prompt in several rows, give each other away.

    The groups are ordered by a hash of the day or prompt alone, and the first ones are held out: all whose hash lies
    below `share`, but at least LEAST_HELD_OUT and at most MOST_HELD_OUT. A group that was trained beside held-out ones
    is never held out when others are added, because its place in the order can only move back. Of the held-out rows at
    most MOST_HELD_OUT are evaluated, and none whose prompt is trained on another day.
    """
    if not share:
        return Split(list(rows), [], "EVAL_SHARE=0, all rows of DATA train")
    keys = [group_of(row) for row in rows]
    hashes = {key: hash_of(key) for key in keys}
    kinds = " and ".join(sorted({f"{kind}s" for kind, _ in hashes}))
    if len(hashes) < LEAST_GROUPS:
        reason = f"none: DATA has {len(hashes)} {kinds or 'prompts'}, and it takes {LEAST_GROUPS} to hold some out"
        return Split(list(rows), [], reason)
    count = min(max(sum(value < share for value in hashes.values()), LEAST_HELD_OUT), MOST_HELD_OUT)
    chosen = set(sorted(hashes, key=hashes.__getitem__)[:count])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    trained = set(map(prompt_of, train))
    apart = [row for row, key in zip(rows, keys, strict=True) if key in chosen and prompt_of(row) not in trained]
    if not apart:
        reason = f"none: the prompts of the {count} {kinds} that a hash chose are in other rows too"
        return Split(list(rows), [], reason)
    evaluated = set(map(id, sorted(apart, key=lambda row: data_fingerprint([row]))[:MOST_HELD_OUT]))
    heldout = [row for row in apart if id(row) in evaluated]
    reason = f"{len(rows) - len(train)} rows of DATA do not train: {count} of its {len(hashes)} {kinds}"
    reason += f", chosen by a hash (EVAL_SHARE={share:g})"
    if len(heldout) < len(rows) - len(train):
        reason += f"; {len(heldout)} of them are evaluated"
    return Split(train, heldout, reason)


def group_of(row: Row) -> tuple[str, str]:
    """The group that a row is held out with: ("day", its date), or ("prompt", its prompt) where it carries no date."""
    date = date_of(row)
    return ("day", date) if date else ("prompt", prompt_of(row))


def date_of(row: Row) -> str | None:
    """The day of a row, such as 2025-09-01, from a column of DATE_COLUMNS that begins with a date; None without one."""
    for name, cell in row.columns.items():
        if name.lower() in DATE_COLUMNS and (match := DATE.match(str(cell))):
            year, month, day = match.groups()
            return f"{year}-{int(month):02}-{int(day):02}"
    return None


def prompt_of(row: Row) -> str:
    """A row's prompt as one text, without the system message, which SYSTEM_PROMPT may add."""
    return json.dumps([message for message in row.messages if message[0] not in INSTRUCTING])


def hash_of(group: tuple[str, str]) -> float:
    """A number from 0 to 1 that depends on a group's day or prompt alone."""
    return int.from_bytes(hashlib.sha256(json.dumps(group).encode()).digest()[:8], "big") / 2**64
