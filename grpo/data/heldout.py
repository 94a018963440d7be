# SPDX-License-Identifier: Apache-2.0
"""Chooses the held-out rows: those that EVAL_DATA names, or a part of DATA, by a hash."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from grpo.data.files import INSTRUCTING, Row, data_fingerprint, find_files, read_rows
from grpo.data.formats import is_dataset
from grpo.settings import ROOT, Problems, Settings, split_commas

DATE_COLUMNS = {"timestamp", "datetime", "date", "day", "time", "日時", "日付"}
DATE = re.compile(r"\s*([0-9]{4})[-/]([0-9]{1,2})[-/]([0-9]{1,2})(?![0-9])")
# Days or prompts that DATA must have before any is held out, and the fewest that a confidence interval needs.
LEAST_GROUPS, LEAST_HELD_OUT = 20, 5
MOST_HELD_OUT = 64  # limits both the days or prompts that are held out and the rows that are evaluated


@dataclass(frozen=True)
class Split:
    """The training rows and the held-out rows of a run, and the reason for this split."""

    train: list[Row]
    heldout: list[Row]
    reason: str


def names_single_file(text: str, path: str) -> bool:
    """Whether a setting such as DATA names exactly one file, the project's `path`."""
    if any(map(is_dataset, split_commas(text))):
        return False
    return [file.resolve() for file in find_files("DATA", text, Problems())] == [ROOT / path]


def read_split(settings: Settings, problems: Problems) -> Split:
    """Read DATA and the held-out rows; with EVAL_SAMPLES=0 nothing is held out."""
    rows = read_rows("DATA", settings.DATA, problems, settings.SYSTEM_PROMPT)
    if not settings.EVAL_SAMPLES:
        return Split(rows, [], "EVAL_SAMPLES=0: all rows of DATA are training rows")
    if settings.EVAL_DATA is not None:
        heldout = read_rows("EVAL_DATA", settings.EVAL_DATA, problems, settings.SYSTEM_PROMPT)
        return Split(rows, heldout, f"EVAL_DATA ({settings.EVAL_DATA}) is held out, DATA is trained on")
    return hold_out(rows, settings.EVAL_SHARE)


def hold_out(rows: Sequence[Row], share: float) -> Split:
    """Hold out whole days of rows that carry a date, and all rows with the same prompt of others: a model that trained
    on an hour knows something about the next hour, and several rows may share a prompt.

    Days or prompts are the groups, ordered by a hash of the day or prompt alone. The first ones are held out: all whose
    hash lies below `share`, but at least LEAST_HELD_OUT and at most MOST_HELD_OUT. Below LEAST_GROUPS groups none is
    held out; from there on, rows added to DATA hold out no group that was trained on before, because a group can only
    move back in this order. At most MOST_HELD_OUT held-out rows are evaluated, none with a training row's prompt."""
    if not share:
        return Split(list(rows), [], "EVAL_SHARE=0: all rows of DATA are training rows")
    keys = [group_of(row) for row in rows]
    digests = {key: hashlib.sha256(json.dumps(key).encode()).digest() for key in keys}
    hashes = {key: int.from_bytes(digest[:8], "big") / 2**64 for key, digest in digests.items()}  # from 0 to 1
    kinds = " and ".join(sorted({f"{kind}s" for kind, _ in hashes}))
    if len(hashes) < LEAST_GROUPS:
        groups = kinds.removesuffix("s") if len(hashes) == 1 else kinds or "prompts"
        reason = f"none: DATA has {len(hashes)} {groups}, and it takes {LEAST_GROUPS} to hold some out"
        return Split(list(rows), [], reason)
    count = min(max(sum(value < share for value in hashes.values()), LEAST_HELD_OUT), MOST_HELD_OUT)
    chosen = set(sorted(hashes, key=hashes.__getitem__)[:count])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    trained = set(map(prompt_of, train))
    unseen = [row for row, key in zip(rows, keys, strict=True) if key in chosen and prompt_of(row) not in trained]
    if not unseen:
        reason = f"none: the prompts of the {count} {kinds} that a hash chose are in other rows too"
        return Split(list(rows), [], reason)
    evaluated = set(map(id, sorted(unseen, key=lambda row: data_fingerprint([row]))[:MOST_HELD_OUT]))
    heldout = [row for row in unseen if id(row) in evaluated]
    reason = f"{len(rows) - len(train)} rows of DATA are not trained on: {count} of its {len(hashes)} {kinds}"
    reason += f", chosen by a hash (EVAL_SHARE={share:g})"
    if len(heldout) < len(rows) - len(train):
        reason += f"; {len(heldout)} of them are evaluated"
    return Split(train, heldout, reason)


def group_of(row: Row) -> tuple[str, str]:
    """The group with which a row is held out: ("day", its date), or ("prompt", its prompt) if it has no date."""
    date = date_of(row)
    return ("day", date) if date else ("prompt", prompt_of(row))


def date_of(row: Row) -> str | None:
    """The date with which a cell of DATE_COLUMNS begins, such as 2025-09-01; None if there is no such cell."""
    for name, cell in row.columns.items():
        if name.lower() in DATE_COLUMNS and (match := DATE.match(str(cell))):
            year, month, day = match.groups()
            return f"{year}-{int(month):02}-{int(day):02}"
    return None


def prompt_of(row: Row) -> str:
    """A row's prompt as one text, without system messages: SYSTEM_PROMPT may have added one."""
    return json.dumps([message for message in row.messages if message[0] not in INSTRUCTING])
