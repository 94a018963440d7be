# SPDX-License-Identifier: Apache-2.0
"""Users' CSVs to rows. Every problem names file, row, column and line."""

from __future__ import annotations

import csv
import difflib
import glob
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.settings import ROOT, Problems, listed


def no_actions(row: Row) -> str:
    """What is wrong with a file that has no rewards, of which this is a row."""
    return "there is no column reward_action_0, reward_action_1, ..." + near_column("reward_action_0", row.columns)


def flat_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows whose actions all pay the same: answers to them cannot be told apart."""
    return [row for row in rows if len(set(row.rewards)) == 1]


REWARD_COLUMN = re.compile(r"reward_action_(0|[1-9]\d*)")
# Keyword arguments that TRL and this script themselves pass to reward functions: a CSV column of that name goes by `csv_NAME`.
RESERVED_ARGUMENTS = {"prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments", "truncated", "prompt_id", "invalid_reward"}  # fmt: skip
SHOWN = 20  # problems listed per file: the rest is counted
# First bytes of files that are given in place of a CSV.
FOREIGN = {
    b"PK\x03\x04": "an Excel workbook or another zipped file",
    b"\xd0\xcf\x11\xe0": "an Excel workbook (.xls)",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}


@dataclass(frozen=True)
class Row:
    """One row of a CSV: `prompt` as text (rendered later by `render_rows`), rewards by action, and every column."""

    file: str
    number: int  # 1 is the first row below the header
    messages: tuple[tuple[str, str], ...]  # (role, text) ..., or one ("rendered", text)
    rewards: tuple[float, ...]
    columns: dict[str, Any]
    prompt: str = ""

    @property
    def id(self) -> str:
        return f"{Path(self.file).stem}:{self.number}"


def find_files(setting: str, text: str, problems: Problems) -> list[Path]:
    """The files that a setting names: paths or globs, relative to the current folder or else to this script's."""
    found: list[Path] = []
    for part in listed(text):
        candidates = [Path(part).expanduser(), ROOT / part]
        matches = next(([c] for c in candidates if c.is_file()), None)
        matches = matches or next(
            (m for c in candidates if (m := sorted(map(Path, glob.glob(str(c), recursive=True))))), []
        )
        matches = [m for m in matches if m.is_file()]
        if not matches:
            problems.add(
                setting, f"no file matches {part!r}", "Name existing CSV files or a glob such as 'days/*.csv' (quoted)"
            )
        found += [m for m in matches if m not in found]
    if not text.strip():
        problems.add(setting, "it is empty", "Name CSV files or a glob")
    return found


def near_column(name: str, header: Iterable[str]) -> str:
    """A question in brackets that names the column which was probably meant to be `name`, or nothing."""
    others = {column.lower(): column for column in header if not REWARD_COLUMN.fullmatch(column)}
    near = difflib.get_close_matches(name, others, 1, 0.6)
    return f" (should {others[near[0]]!r} be `{name}`?)" if near else ""


def read_csv(path: Path, problems: Problems) -> list[Row]:
    """The rows of one CSV. Problems name the file, the row (1 is the first below the header), the column and the line.

    Accepted: a `prompt` column (rendered in Harmony, beginning with `<|start|>`, or plain text, taken as the user's
    message), or `user` with an optional `system`; `reward_action_0` .. `reward_action_{K-1}` with finite numbers, K >= 2,
    for the rewards that need them. Other columns pass through as text.
    """
    mine = Problems()
    csv.field_size_limit(2**31 - 1)
    try:
        content = path.read_bytes()
    except OSError as error:
        problems.add(str(path), f"cannot be read ({error.strerror})", "Check the path and its permissions")
        return []
    for start, kind in FOREIGN.items():
        if content.startswith(start):
            fix = "Open it in a spreadsheet and save it as 'CSV UTF-8'"
            problems.add(str(path), f"it is {kind}, not UTF-8 text", fix)
            return []
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        problems.add(
            f"{path}, line {line}",
            f"byte {error.start} is not UTF-8",
            "Save the file as UTF-8 (in a spreadsheet: 'CSV UTF-8')",
        )
        return []
    if "\0" in text:
        problems.add(
            f"{path}, line {text[: text.index(chr(0))].count(chr(10)) + 1}",
            "it holds a NUL byte",
            "Export the CSV again; UTF-16 must become UTF-8",
        )
        return []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records: list[tuple[int, int, list[str]]] = []
    start = 1
    try:
        for cells in reader:
            if cells:
                records.append((len(records), start, cells))
            start = reader.line_num + 1
    except csv.Error as error:
        where = f"{path}, row {len(records)} (from line {start})" if records else f"{path}, line {start}"
        problems.add(
            where, f"broken CSV quoting ({error})", "Close every quote, and double quotes inside a quoted cell"
        )
        return []
    if not records:
        problems.add(str(path), "it is empty", "Give it a header and at least one row")
        return []
    header = [name.strip() for name in records[0][2]]
    for name in sorted({name for name in header if header.count(name) > 1}):
        mine.add(
            f"{path}, header",
            f"column {name!r} stands there twice" if name else "a column has no name",
            "Name every column once",
        )
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        problems.add(f"{path}, header", "its cells are separated by semicolons or tabs", "Save it with commas")
        return []
    if "prompt" not in header and "user" not in header:
        mine.add(
            f"{path}, header",
            "there is neither a `prompt` nor a `user` column" + near_column("prompt", header),
            "Add one of them; docs/data.md shows both forms",
        )
    actions = sorted(int(m[1]) for name in header if (m := REWARD_COLUMN.fullmatch(name)))
    if actions and actions != list(range(len(actions))):
        gap = next(k for k in range(len(actions) + 1) if k not in actions)
        mine.add(
            f"{path}, header",
            f"reward_action_{gap} is missing beside {', '.join(f'reward_action_{k}' for k in actions)}"
            + near_column(f"reward_action_{gap}", header),
            "Number the actions from 0 without a gap",
        )
    elif len(actions) == 1:
        mine.add(
            f"{path}, header",
            "there is only one action, reward_action_0" + near_column("reward_action_1", header),
            "GRPO needs at least two actions to compare",
        )
    if not records[1:]:
        mine.add(str(path), "there is no row below the header", "Add at least one row")
    rows: list[Row] = []
    for number, line, cells in records[1:] if not mine else []:
        where = f"{path}, row {number} (line {line})"
        if len(cells) != len(header):
            mine.add(
                where,
                f"it has {len(cells)} cells, the header has {len(header)}",
                "Quote cells that hold commas or line breaks",
            )
            continue
        columns: dict[str, Any] = dict(zip(header, cells, strict=True))
        values = []
        for k in actions:
            cell = columns[f"reward_action_{k}"].strip()
            try:
                values.append(float(cell))
                if not math.isfinite(values[-1]):
                    raise ValueError
            except ValueError:
                what = "the reward is missing" if not cell else f"{cell!r} is not a finite number"
                mine.add(f"{where}, column reward_action_{k}", what, "Every action needs a number")
        columns |= {f"reward_action_{k}": value for k, value in zip(actions, values, strict=False)}
        prompt, user, system = (columns.get(name, "").strip() for name in ("prompt", "user", "system"))
        if not (prompt or user):
            mine.add(
                f"{where}, column {'prompt' if 'prompt' in header else 'user'}",
                "the prompt is empty",
                "Fill it in or remove the row",
            )
        if prompt.startswith("<|start|>"):
            messages = (("rendered", columns["prompt"]),)
            if not re.search(r"<\|start\|>assistant(?:<\|channel\|>[^<]*(?:<\|message\|>)?)?\Z", columns["prompt"]):
                mine.add(
                    f"{where}, column prompt",
                    "a rendered prompt must end where the assistant begins",
                    "End it with <|start|>assistant",
                )
        else:
            messages = ((("system", system),) if system else ()) + (("user", prompt or user),)
        rows.append(Row(str(path), number, messages, tuple(values), columns))
    problems += mine[:SHOWN]
    if len(mine) > SHOWN:
        problems.add(str(path), f"and {len(mine) - SHOWN} more problems like these", "Mend the file and run again")
    return [] if mine else rows


def read_rows(setting: str, text: str, problems: Problems) -> list[Row]:
    """The rows of every file that a setting names."""
    rows = [row for path in find_files(setting, text, problems) for row in read_csv(path, problems)]
    names: dict[str, str] = {}
    for row in rows:
        if names.setdefault(Path(row.file).stem, row.file) != row.file:
            fix = "Rename one: rows are identified in the logs by file name and row"
            problems.add(setting, f"{names[Path(row.file).stem]} and {row.file} have the same name", fix)
            break
    return rows


def data_fingerprint(rows: Sequence[Row]) -> str:
    """SHA-256 over everything that training sees of the rows, whatever their files are called."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.messages, row.rewards, sorted(row.columns.items())], default=str).encode())
    return digest.hexdigest()


def reward_columns(row: Row, actions: int) -> dict[str, Any]:
    """The columns of a row as keyword arguments of a reward function; a file with fewer actions is filled with None."""
    columns = {f"reward_action_{k}": None for k in range(actions)}
    columns |= {(f"csv_{name}" if name in RESERVED_ARGUMENTS else name): value for name, value in row.columns.items()}
    return columns | {"prompt_id": row.id}
