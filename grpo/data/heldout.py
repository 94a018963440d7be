# SPDX-License-Identifier: Apache-2.0
"""The rule for held-out rows: which rows are not trained on, so that evaluations can measure what was learned.

Held out are the rows that EVAL_DATA names, or else EVAL_SHARE of DATA: whole days of rows that carry a date, whole
prompts of others, chosen by a hash (`hold_out`). scripts/sft.py and verl follow the same rule, because a run may start
from their weights."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo.common import ROOT, Problems, one_line, split_commas
from grpo.data.files import INSTRUCTING, Row, data_fingerprint, find_files, in_template, read_rows, template_fault
from grpo.data.formats import is_dataset
from grpo.settings.table import Settings

DATE_COLUMNS = {"timestamp", "datetime", "date", "day", "time", "created_at", "日時", "日付"}
# Forms of a date at the begin of a cell. With slashes and the year at the end, 06/01/2025, some write the month first
# and some the day: it is taken for a day, but not for a certain one.
YEAR_FIRST = re.compile(r"\s*([0-9]{4})([-/.年])([0-9]{1,2})[-/.月]([0-9]{1,2})(?![0-9])")
DAY_FIRST = re.compile(r"\s*([0-9]{1,2})\.([0-9]{1,2})\.([0-9]{4})(?![0-9])")
AMBIGUOUS = re.compile(r"\s*([0-9]{1,2})[/-]([0-9]{1,2})[/-]([0-9]{4})(?![0-9])")
# Forms that are only named to the user, because they are not read: 20250601, June 1, 2025, 1 Jun 2025.
MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
OTHER_FORMS = re.compile(
    rf"\s*(?:(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?!\d)"
    rf"|(?:\w+,?\s+)?(?:{MONTH}\s+\d{{1,2}}|\d{{1,2}}[\s-]{MONTH}),?[\s-]+\d{{2,4}}(?!\d))",
    re.IGNORECASE,
)
LEAST_GROUPS = 20  # Days or prompts that DATA must have before any is held out.
MOST_HELD_OUT = 64  # Most held-out rows that are evaluated.


@dataclass(frozen=True)
class Split:
    """The training rows and the held-out rows of a run, and the reason for this split."""

    train: list[Row]
    heldout: list[Row]
    reason: str
    longest_prompt: int = 0  # In tokens; 0 until `prepare_rows` has rendered the prompts.


def names_single_file(text: str, path: str) -> bool:
    """Whether a setting such as DATA names exactly one file, the project's `path`."""
    if any(map(is_dataset, split_commas(text))):
        return False
    return [file.resolve() for file in find_files("DATA", text, Problems())] == [ROOT / path]


def read_split(settings: Settings, problems: Problems, train_only: bool = False) -> Split:
    """DATA and the held-out rows, their questions in PROMPT_TEMPLATE; with EVAL_SAMPLES=0 nothing is held out. With
    `train_only`, for programs that evaluate nothing, rows are held out all the same, but not returned, and EVAL_DATA is
    not read. Rows are held out by the question alone: another template holds out the same ones."""
    if fault := template_fault(settings.PROMPT_TEMPLATE):
        problems.add("PROMPT_TEMPLATE", fault, "Write it as in 'Answer the next question: {}'")
    split = split_rows(settings, problems, train_only)
    train, heldout = (in_template(rows, settings.PROMPT_TEMPLATE) for rows in (split.train, split.heldout))
    return replace(split, train=train, heldout=heldout)


def split_rows(settings: Settings, problems: Problems, train_only: bool) -> Split:
    """The rows of `read_split` without PROMPT_TEMPLATE."""
    rows = read_rows("DATA", settings.DATA, problems, settings.SYSTEM_PROMPT)
    if not settings.EVAL_SAMPLES:
        return Split(rows, [], "EVAL_SAMPLES=0: all rows of DATA are training rows")
    if settings.EVAL_DATA is None:
        split = hold_out(rows, settings.EVAL_SHARE, bool(settings.ENVIRONMENT))
        return replace(split, heldout=[]) if train_only else split
    reason = f"EVAL_DATA ({settings.EVAL_DATA}) is held out, DATA is trained on"
    if train_only:
        return Split(rows, [], reason)
    heldout = read_rows("EVAL_DATA", settings.EVAL_DATA, problems, settings.SYSTEM_PROMPT)
    return Split(rows, heldout, "; ".join([reason, *date_notes(heldout)]))


def hold_out(rows: Sequence[Row], share: float, episodes: bool = False) -> Split:
    """Hold out whole days of rows that carry a date, and all rows with the same prompt of others: a model that trained
    on an hour knows something about the next hour, and several rows may share a prompt. With `episodes` the columns,
    which an environment is reset with, are part of a prompt.

    Days or prompts are the groups. A group is held out if a hash of the day or prompt alone lies below `share`. So rows
    that are added hold out no group that was trained on, and train on no group that was held out: runs on the rows of
    yesterday and of today compare. Of the first LEAST_GROUPS groups, by their order in DATA, exactly `share` is held
    out, those of the lowest hashes: chance would hold out none or a quarter of so few. Fewer groups hold out none.

    A row of a held-out group whose prompt is also trained on is trained on as well: it could not be evaluated. At most
    MOST_HELD_OUT held-out rows are evaluated."""
    if not share:
        return Split(list(rows), [], "EVAL_SHARE=0: all rows of DATA are training rows")
    keys = [group_of(row, episodes) for row in rows]
    hashes = {key: int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:8], "big") / 2**64 for key in keys}
    kinds = " and ".join(sorted({f"{kind}s" for kind, _ in hashes}))
    notes = date_notes(rows)
    if len(hashes) < LEAST_GROUPS:
        groups = kinds.removesuffix("s") if len(hashes) == 1 else kinds or "prompts"
        reason = f"none: DATA has {len(hashes)} {groups}, and it takes {LEAST_GROUPS} to hold some out"
        return Split(list(rows), [], "; ".join([reason, *notes]))
    groups_in_order = list(hashes)
    first = sorted(groups_in_order[:LEAST_GROUPS], key=hashes.__getitem__)[: max(1, round(share * LEAST_GROUPS))]
    chosen = {*first, *(key for key in groups_in_order[LEAST_GROUPS:] if hashes[key] < share)}
    trained = {prompt_of(row, episodes) for row, key in zip(rows, keys, strict=True) if key not in chosen}
    is_held = [key in chosen and prompt_of(row, episodes) not in trained for row, key in zip(rows, keys, strict=True)]
    train = [row for row, held in zip(rows, is_held, strict=True) if not held]
    unseen = [row for row, held in zip(rows, is_held, strict=True) if held]
    if not unseen:
        reason = f"none: the prompts of the {len(chosen)} {kinds} that a hash chose are in other rows too, which are "
        reason += "trained on. Write more of the row into its prompt, such as the time"
        return Split(list(rows), [], "; ".join([reason, *notes]))
    evaluated = set(map(id, sorted(unseen, key=lambda row: data_fingerprint([row]))[:MOST_HELD_OUT]))
    heldout = [row for row in unseen if id(row) in evaluated]
    reason = f"{len(unseen)} rows of DATA are not trained on: {len(chosen)} of its {len(hashes)} {kinds}"
    reasons = [f"{reason}, chosen by a hash (EVAL_SHARE={share:g})"]
    if repeated := sum(key in chosen for key in keys) - len(unseen):
        reasons.append(f"{repeated} more rows of these are trained on, because their prompts are in other rows too")
    reasons += notes
    if len(heldout) < len(unseen):
        reasons.append(f"{len(heldout)} of them are evaluated")
    return Split(train, heldout, "; ".join(reasons))


def group_of(row: Row, episodes: bool = False) -> tuple[str, str]:
    """The group with which a row is held out: ("day", its date), or ("prompt", its prompt) if it has no date."""
    date = date_of(row)
    return ("day", date) if date else ("prompt", prompt_of(row, episodes))


def date_of(row: Row) -> str | None:
    """The date with which a cell of DATE_COLUMNS begins, such as 2025-09-01; None if there is no such cell. A date that
    has two readings stays as it is, 06/01/2025, because a day needs no reading to be held out as a whole."""
    cells = (cell for name, cell in row.columns.items() if name.strip().lower() in DATE_COLUMNS)
    return next(filter(None, map(read_date, cells)), None)


def read_date(cell: object) -> str | None:
    """The date with which a cell begins; None if it begins with none."""
    text = str(cell)
    if match := YEAR_FIRST.match(text):
        year, _, month, day = match.groups()
    elif match := DAY_FIRST.match(text):
        day, month, year = match.groups()
    elif match := AMBIGUOUS.match(text):
        first, second, year = match.groups()
        is_date = min(int(first), int(second)) in range(1, 13) and max(int(first), int(second)) <= 31
        return f"{int(first):02}/{int(second):02}/{year}" if is_date else None
    else:
        return None
    is_date = int(month) in range(1, 13) and int(day) in range(1, 32)
    return f"{year}-{int(month):02}-{int(day):02}" if is_date else None


def trained_days_warning(days: Sequence[str], rows: Sequence[Row]) -> str:
    """A warning of simulated `days` on which `rows` are trained; empty if there are none."""
    shared = sorted(set(days) & set(filter(None, map(date_of, rows))))
    if not shared:
        return ""
    fault = f"{len(shared)} of {len(days)} simulated days, such as {shared[0]}, are in DATA as well"
    return f"{fault}: their figures are not held out. Take them out of the profile or of DATA"


def date_notes(rows: Sequence[Row]) -> list[str]:
    """What the user should know of the dates in `rows`: those with two readings, and columns that may hold dates and
    were not taken for days, so that neighbouring hours may be trained on and evaluated."""
    notes, dates = [], list(map(date_of, rows))
    two_readings = (date for date in dates if date and "/" in date and max(map(int, date.split("/")[:2])) <= 12)
    if date := next(two_readings, None):
        notes.append(f"whether {date} begins with the day or the month is not guessed: each such text is one day")
    dateless = [row for row, date in zip(rows, dates, strict=True) if date is None]
    for name in dict.fromkeys(name for row in dateless for name in row.columns):
        cells = [row.columns.get(name) for row in dateless]
        if name.strip().lower() in DATE_COLUMNS and any(cells):
            fault = f"{next(filter(None, cells))!r} is no date that is recognised"
        elif all(read_date(cell) or OTHER_FORMS.match(str(cell)) for cell in cells):
            fault = f"the name is not one for dates such as {cells[0]!r}"
        else:
            continue
        fix = "write days as 2025-09-01 into a column `date` if neighbouring rows resemble each other"
        notes.append(f"the column `{one_line(name, 40)}` is not taken for the day, {one_line(fault, 120)}: {fix}")
    return notes


def prompt_of(row: Row, episodes: bool = False) -> str:
    """A row's prompt as one text, without system messages: SYSTEM_PROMPT may have added one. With `episodes` it holds
    the row's columns too."""
    prompt = json.dumps([message for message in row.messages if message[0] not in INSTRUCTING])
    return prompt + json.dumps(row.columns, default=str) if episodes else prompt
