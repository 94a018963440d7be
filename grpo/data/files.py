# SPDX-License-Identifier: Apache-2.0
"""Users' CSVs to rows. Every problem names file, row, column and line."""

from __future__ import annotations

import contextlib
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

REWARD_COLUMN = re.compile(r"reward_action_(0|[1-9]\d*)")
Q_COLUMN = re.compile(r"q_action_(0|[1-9]\d*)")
# Keyword arguments that TRL and this project give to reward functions: a CSV column of that name goes by `csv_NAME`.
RESERVED_ARGUMENTS = {
    "prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "environments", "truncated", "prompt_id", "invalid_reward",
}  # fmt: skip
SHOWN = 20  # problems listed per file: the rest is counted


@dataclass(frozen=True)
class Row:
    """One row of a CSV: `prompt` as text (rendered later by `render_rows`), rewards by action, every column, and the values
    q_action_k of as many actions, where the file has them."""

    file: str
    number: int  # 1 is the first row below the header
    messages: tuple[tuple[str, str], ...]  # (role, text) ..., or one ("rendered", text)
    rewards: tuple[float, ...]
    columns: dict[str, Any]
    prompt: str = ""
    q: tuple[float, ...] = ()

    @property
    def id(self) -> str:
        return f"{Path(self.file).stem}:{self.number}"


def find_files(setting: str, text: str, problems: Problems) -> list[Path]:
    """The files that a setting names: paths or globs, relative to the current folder or else to this project's."""
    found: dict[Path, None] = {}
    fix = "Name existing CSV files or a glob such as 'days/*.csv' (quoted)"
    for part in listed(text):
        places = [Path(part).expanduser(), ROOT / part]
        ways = [[place] for place in places] + [sorted(map(Path, glob.glob(str(p), recursive=True))) for p in places]
        matches = next((files for way in ways if (files := [path for path in way if path.is_file()])), [])
        if not matches:
            problems.add(setting, f"no file matches {part!r}", fix)
        found |= dict.fromkeys(matches)
    if not text.strip():
        problems.add(setting, "it is empty", fix)
    return list(found)


def near_column(name: str, header: Iterable[str]) -> str:
    """A question in brackets that names the column which was probably meant to be `name`, or nothing."""
    others = {column.lower(): column for column in header if not REWARD_COLUMN.fullmatch(column)}
    near = difflib.get_close_matches(name, others, 1, 0.6)
    return f" (should {others[near[0]]!r} be `{name}`?)" if near else ""


def no_actions(row: Row) -> str:
    """What is wrong with a file that has no rewards, of which this is a row."""
    return "there is no column reward_action_0, reward_action_1, ..." + near_column("reward_action_0", row.columns)


def flat_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows whose actions all pay the same: answers to them cannot be told apart."""
    return [row for row in rows if len(set(row.rewards)) == 1 and len(set(row.q)) < 2]


class UnreadableFile(Exception):
    """A file without a single row to look at; its arguments are those of `Problems.add`."""


def read_records(path: Path) -> list[tuple[int, list[str]]]:
    """(line that it begins in, cells) of the header and of every row of a CSV in UTF-8, with or without a byte order
    mark; empty lines are none. Raises UnreadableFile."""
    records: list[tuple[int, list[str]]] = []
    start = 1
    try:
        content = path.read_bytes()
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        if b"\0" in content:
            where = f"{path}, line {content.partition(bytes(1))[0].count(bytes([10])) + 1}"
            raise UnreadableFile(where, "it holds a NUL byte", "Export the CSV again; UTF-16 must become UTF-8")
        for cells in reader:
            if cells:
                records.append((start, cells))
            start = reader.line_num + 1
    except OSError as error:
        raise UnreadableFile(path, f"cannot be read ({error.strerror})", "Check the path and its permissions") from None
    except UnicodeDecodeError as error:
        where = f"{path}, line {content[: error.start].count(bytes([10])) + 1}"
        fix = "Save the file as UTF-8 (a workbook or UTF-16: open it in a spreadsheet and save it as 'CSV UTF-8')"
        raise UnreadableFile(where, f"byte {error.start} is not UTF-8", fix) from None
    except csv.Error as error:
        where = f"{path}, row {len(records)} (from line {start})" if records else f"{path}, line {start}"
        fix = "Close every quote, and double quotes inside a quoted cell"
        raise UnreadableFile(where, f"broken CSV quoting ({error})", fix) from None
    if not records:
        raise UnreadableFile(path, "it is empty", "Give it a header and at least one row")
    return records


def check_header(path: Path, header: Sequence[str], problems: Problems) -> int:
    """How many actions the columns name, their q_action_k too; problems where they cannot be those of a training file."""
    where = f"{path}, header"
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        raise UnreadableFile(where, "its cells are separated by semicolons or tabs", "Save it with commas")
    for name in sorted({name for name in header if header.count(name) > 1}):
        what = f"column {name!r} stands there twice" if name else "a column has no name"
        problems.add(where, what, "Name every column once")
    if "prompt" not in header and "user" not in header:
        what = "there is neither a `prompt` nor a `user` column" + near_column("prompt", header)
        problems.add(where, what, "Add one of them; docs/data.md shows both forms")
    actions = sorted(int(m[1]) for name in header if (m := REWARD_COLUMN.fullmatch(name)))
    gap = next((k for k in range(len(actions)) if k not in actions), None)
    if gap is not None:
        what = f"reward_action_{gap} is missing beside {', '.join(f'reward_action_{k}' for k in actions)}"
        near = near_column(f"reward_action_{gap}", header)
        problems.add(where, what + near, "Number the actions from 0 without a gap")
    elif len(actions) == 1:
        what = "there is only one action, reward_action_0" + near_column("reward_action_1", header)
        problems.add(where, what, "GRPO needs at least two actions to compare")
    values = sorted(int(m[1]) for name in header if (m := Q_COLUMN.fullmatch(name)))
    if actions and values and values != actions:
        what = f"there are {', '.join(f'q_action_{k}' for k in values)}, but {len(actions)} columns reward_action_k"
        problems.add(where, what, "Give every action both, or rename the columns q_action_k")
    return len(actions)


def read_numbers(where: str, columns: dict[str, Any], names: Sequence[str], problems: Problems) -> dict[str, float]:
    """The cells of `columns` that have these names, as numbers; a problem for each that is none."""
    numbers = dict.fromkeys(names, math.nan)
    for name in names:
        cell = columns[name].strip()
        with contextlib.suppress(ValueError):
            numbers[name] = float(cell)
        if not math.isfinite(numbers[name]):
            what = (
                f"{cell!r} is not a finite number"
                if cell
                else f"the {'value' if name[0] == 'q' else 'reward'} is missing"
            )
            problems.add(f"{where}, column {name}", what, "Every action needs a number")
    return numbers


def read_row(where: str, columns: dict[str, Any], actions: int, problems: Problems) -> tuple[Any, tuple[float, ...]]:
    """Messages and rewards of a row; `columns` gets its rewards as numbers."""
    found = read_numbers(where, columns, [f"reward_action_{k}" for k in range(actions)], problems)
    columns |= found
    rewards = tuple(found.values())
    prompt, user, system = (columns.get(name, "").strip() for name in ("prompt", "user", "system"))
    if not (prompt or user):
        name = "prompt" if "prompt" in columns else "user"
        problems.add(f"{where}, column {name}", "the prompt is empty", "Fill it in or remove the row")
    if not prompt.startswith("<|start|>"):
        return ((("system", system),) if system else ()) + (("user", prompt or user),), rewards
    if not re.search(r"<\|start\|>assistant(?:<\|channel\|>[^<]*(?:<\|message\|>)?)?\Z", columns["prompt"]):
        what, fix = "a rendered prompt must end where the assistant begins", "End it with <|start|>assistant"
        problems.add(f"{where}, column prompt", what, fix)
    return (("rendered", columns["prompt"]),), rewards


def read_csv(path: Path, problems: Problems) -> list[Row]:
    """The rows of one CSV; problems name the file, the row (1 is the first below the header), the column and the line.

    Accepted: a `prompt` column (rendered in Harmony, beginning with `<|start|>`, or plain text, taken as the user's
    message), or `user` with an optional `system`; `reward_action_0` .. `reward_action_{K-1}` with finite numbers, K >= 2,
    for the rewards that need them, and `q_action_k` beside them. Other columns pass through as text."""
    mine, rows = Problems(), []
    csv.field_size_limit(2**31 - 1)
    try:
        (_, names), *records = read_records(path)
        header = [name.strip() for name in names]
        actions = check_header(path, header, mine)
    except UnreadableFile as error:
        problems.add(*error.args)
        return []
    if not records:
        mine.add(str(path), "there is no row below the header", "Add at least one row")
    q_names = [f"q_action_{k}" for k in range(actions)] if "q_action_0" in header else []
    for number, (line, cells) in enumerate(records if not mine else [], 1):
        where = f"{path}, row {number} (line {line})"
        if len(cells) != len(header):
            what = f"it has {len(cells)} cells, the header has {len(header)}"
            mine.add(where, what, "Quote cells that hold commas or line breaks")
            continue
        columns: dict[str, Any] = dict(zip(header, cells, strict=True))
        messages, rewards = read_row(where, columns, actions, mine)
        # Text in `columns`, as it was before there was a use for them: runs know their rows by a fingerprint of these.
        q = read_numbers(where, columns, q_names, mine)
        rows.append(Row(str(path), number, messages, rewards, columns, q=tuple(q.values())))
    problems += mine[:SHOWN]
    if len(mine) > SHOWN:
        problems.add(str(path), f"and {len(mine) - SHOWN} more problems like these", "Fix the file and run again")
    return [] if mine else rows


def read_rows(setting: str, text: str, problems: Problems) -> list[Row]:
    """The rows of every file that a setting names."""
    rows = [row for path in find_files(setting, text, problems) for row in read_csv(path, problems)]
    names: dict[str, str] = {}
    for file in dict.fromkeys(row.file for row in rows):
        if (other := names.setdefault(Path(file).stem, file)) != file:
            fix = "Rename one: rows are identified in the logs by file name and row"
            problems.add(setting, f"{other} and {file} have the same name", fix)
    return rows


def data_fingerprint(rows: Sequence[Row]) -> str:
    """SHA-256 over everything that training sees of the rows, whatever their files are called."""
    seen = (json.dumps([row.messages, row.rewards, sorted(row.columns.items())], default=str) for row in rows)
    return hashlib.sha256("".join(seen).encode()).hexdigest()


def reward_columns(row: Row, actions: int) -> dict[str, Any]:
    """The columns of a row as keyword arguments of a reward function; a file with fewer actions is filled with None."""
    columns = {f"reward_action_{k}": None for k in range(actions)}
    columns |= {(f"csv_{name}" if name in RESERVED_ARGUMENTS else name): value for name, value in row.columns.items()}
    return columns | {f"q_action_{k}": value for k, value in enumerate(row.q)} | {"prompt_id": row.id}
