# SPDX-License-Identifier: Apache-2.0
"""Users' files to rows. Every problem names file, row, column and line."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import glob
import hashlib
import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.data.formats import Record, Table, UnreadableFile, is_dataset, read_dataset, reader_of
from grpo.phases import with_progress
from grpo.settings import MOST_REWARD, ROOT, Problems, is_text, listed, one_line, path_fault, read_number

INDEX = "(0|[1-9][0-9]{0,5})"
REWARD_COLUMN = re.compile(f"reward_action_{INDEX}")
Q_COLUMN = re.compile(f"q_action_{INDEX}")
ODD_COLUMN = re.compile(rf"(?:reward|q)_action_(?!{INDEX}\Z)\d+")  # too many digits, a 0 before them, of another script
# Keyword arguments that TRL gives to reward functions or leaves out, and the three that docs/data.md adds: a column of
# that name goes by `csv_NAME`. Every other column keeps its name.
RESERVED_ARGUMENTS = {
    "prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "environments", "truncated", "raw_completions", "rendered_prompts",
}  # fmt: skip
PROMPT_COLUMNS = ("prompt", "user", "question")
# Columns of common formats that hold a prompt in another form -> how datasets' `map` makes a `prompt` of it.
# docs/data.md has these lines whole.
FOREIGN_PROMPTS = {
    "conversations": (
        '[{"role": {"human": "user", "gpt": "assistant"}.get(turn["from"], "system"), "content": turn["value"]} '
        'for turn in row["conversations"][:-1]]'
    ),
    "chosen": 'row["chosen"][:-1]',
    "instruction": r'"\n\n".join(filter(None, [row["instruction"], row.get("input")]))',
}
FORMATS_DOC = "docs/data.md#prompts-of-other-formats"
SHOWN = 20  # problems listed per file: the rest is counted


@dataclass(frozen=True)
class Row:
    """One row: `prompt` as text (rendered later by `render_rows`), rewards by action, every column, and the values
    q_action_k of as many actions, where the file has them."""

    file: str
    number: int  # 1 is the first row below the header
    messages: tuple[tuple[str, str], ...]  # (role, text) ..., or one ("rendered", text)
    rewards: tuple[float, ...]
    columns: dict[str, Any]
    prompt: str = ""
    q: tuple[float, ...] = ()
    conversational: bool = False  # the file gave messages, and so reward functions get messages

    @property
    def id(self) -> str:
        return f"{label(self.file)}:{self.number}"


def label(file: str) -> str:
    """What identifies a file or data set in logs: its name without folders and ending, or org/name."""
    return file if is_dataset(file) else Path(file).stem


def find_files(setting: str, text: str, problems: Problems) -> list[Path]:
    """The files that a setting names: paths or globs, relative to the current folder or else to this project's."""
    found: dict[Path, None] = {}
    fix = "Name existing files or a glob such as 'days/*.csv' (quoted)"
    for part in listed(text):
        if fault := path_fault(part):
            problems.add(setting, f"{part!r} cannot be read ({fault})", fix)
            continue
        places = [Path(part).expanduser(), ROOT / part]
        ways = [[place] for place in places] + [sorted(map(Path, glob.glob(str(p), recursive=True))) for p in places]
        matches = next((files for way in ways if (files := [path for path in way if os.path.isfile(path)])), [])
        if not matches:
            problems.add(setting, f"no file matches {part!r}", fix)
        for path in [path for path in matches if not is_text(str(path))]:
            problems.add(setting, f"the name {str(path)!r} is not UTF-8", "Rename the file")
            matches.remove(path)
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


def check_header(path: str, header: Sequence[str], problems: Problems) -> int:
    """How many actions the columns name, their q_action_k too; problems where they cannot be those of a training file."""
    where = f"{path}, header"
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        raise UnreadableFile(where, "its cells are separated by semicolons or tabs", "Save it with commas")
    for name in sorted(name for name, count in Counter(header).items() if count > 1):
        what = f"column {one_line(repr(name), 200)} stands there twice" if name else "columns have no name"
        fix = "Name every column once" + (
            " (a spreadsheet leaves such ones as commas at the end of each line)" * (not name)
        )
        problems.add(where, what, fix)
    if header[:1] and header[0].startswith("sep="):
        raise UnreadableFile(f"{path}, line 1", "it is a hint for spreadsheets", "Delete the line")
    if not {*PROMPT_COLUMNS, "messages"} & set(header):
        what = "there is neither a `prompt` nor a `user` column"
        if foreign := next((name for name in FOREIGN_PROMPTS if name in header), None):
            fix = f"Make a `prompt` of `{foreign}`: {map_text(FOREIGN_PROMPTS[foreign])}"
            problems.add(where, what, f"{fix} ({FORMATS_DOC})")
        else:
            fix = "Add one of them (or `question`, or `messages`); docs/data.md shows the forms"
            problems.add(where, what + near_column("prompt", header), fix)
    if odd := next(filter(ODD_COLUMN.fullmatch, header), None):
        problems.add(where, f"{odd!r} numbers no action", "Write 0, 1, 2, ... in plain digits, six at most")
        return 0
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
    numbers = {}
    for name in names:
        cell = columns[name].strip() if isinstance(columns[name], str) else columns[name]
        try:
            number = read_number(cell) if isinstance(cell, str) else math.nan if isinstance(cell, bool) else float(cell)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            missing = f"the {'value' if name[0] == 'q' else 'reward'} is missing"
            what = missing if cell in ("", None) else f"{one_line(repr(cell), 200)} is not a finite number"
            problems.add(f"{where}, column {name}", what, "Every action needs a number, in plain digits")
        elif abs(number) > MOST_REWARD:
            what = f"{cell!r} is more than {MOST_REWARD:g} in size, and float32 cannot sum the squares of such rewards"
            problems.add(f"{where}, column {name}", what, "Divide all of them by the same number")
        numbers[name] = number
    return numbers


Messages = tuple[tuple[str, str], ...]
SPECIAL = re.compile(r"<\|(?:start|end|message|channel|return|call|constrain|startoftext|endoftext)\|>")  # Harmony's
INSTRUCTING = ("system", "developer")  # roles of which gpt-oss's template takes the first message alone
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and a symbol by their category, but nothing to see


def is_blank(text: str) -> bool:
    """Whether there is nothing to see: spaces, controls, characters without a width or a mark alone."""
    if text[:1].isalnum() and text[0] not in FILLERS:  # the rule, and a hundred thousand rows are asked
        return False
    kinds = ("" if one in FILLERS else unicodedata.category(one) for one in text)
    return not any(kind and kind[0] not in "ZM" and kind not in ("Cc", "Cf") for kind in kinds)


def as_conversation(prompt: Any) -> Any:
    """A list of messages that is text (in JSON, or in Python's words as pandas writes it to a CSV) as such a list; everything
    else as it is."""
    if isinstance(prompt, str) and re.match(r"\s*\[\s*\{", prompt):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                found = read(prompt.strip())
                if all("role" in one for one in found):
                    return found
    return prompt


def map_text(prompt: str) -> str:
    """The line of Python that adds a column `prompt` to a data set of the `datasets` library."""
    return f'data.map(lambda row: {{"prompt": {prompt}}})'


def prompt_column(columns: Mapping[str, Any]) -> str:
    """The column that may hold a conversation: `prompt`, or `messages` in a file that has none of PROMPT_COLUMNS."""
    return "messages" if "messages" in columns and not any(name in columns for name in PROMPT_COLUMNS) else "prompt"


def read_conversation(where: str, name: str, prompt: Any, problems: Problems) -> Messages:
    """Messages of a column `name` that holds a list of them, as TRL's data sets do; none after a problem."""
    where = f"{where}, column {name}"
    try:
        messages = tuple((message["role"], message["content"]) for message in prompt)
        if fault := conversation_fault(name, messages):
            problems.add(where, *fault)
            return ()
    except (TypeError, KeyError, IndexError):
        what = "it is neither text nor a list of messages with `role` and `content`"
        problems.add(where, what, 'Write text, or [{"role": "user", "content": "..."}]')
        return ()
    if is_blank(messages[-1][1]):
        problems.add(where, "the user's message is empty", "Fill it in or remove the row")
    return messages


def conversation_fault(name: str, messages: Sequence[tuple[Any, Any]]) -> tuple[str, str] | None:
    """What is wrong with the messages of a column `name`, and what to do. Raises IndexError where there are none."""
    roles = [role for role, _ in messages]
    order = "system or developer first, then user and assistant"
    for role in roles:
        if role not in (*INSTRUCTING, "user", "assistant"):
            what = f"the role {one_line(repr(role), 200)} is not known ({order})"
            return what, "Leave such messages out, or write the whole prompt rendered, as text"
    for number, (role, text) in enumerate(messages, 1):
        if (number == 1 and role == "assistant") or (number > 1 and role in INSTRUCTING):
            return f"message {number} is of the role {role!r} ({order})", "Put the messages in this order"
        if not isinstance(text, str):
            return f"the content of message {number} is not text", "Write it as text"
    if roles[-1] != "user":
        fix = "Leave the answer out: " + map_text(f'row["{name}"][:-1]') + f" ({FORMATS_DOC})"
        return f"it ends with the message of the role {roles[-1]!r}, not with the user's", fix
    return None


def read_messages(where: str, columns: dict[str, Any], system: str, problems: Problems) -> Messages:
    """Messages of a row, or ("rendered", text). `system`: for rows that have no system message of their own."""
    given = {name: columns.get(name) for name in (*PROMPT_COLUMNS, "messages", "system")}
    given = {name: "" if value is None else value for name, value in given.items()}
    column = prompt_column(columns)
    if not isinstance(talk := as_conversation(given[column]), str) or column == "messages":
        found, told = read_conversation(where, column, talk, problems), str(given["system"]).strip()
        own = found[:1] and found[0][0] in INSTRUCTING
        if own and not is_blank(told) and told != found[0][1].strip():
            what, fix = f"it holds another message than `{column}` begins with", "Leave one of the two out"
            problems.add(f"{where}, column system", what, fix)
        told = told or system
        return found if own or not told else (("system", told), *found)
    del given["messages"]
    for name, value in given.items():
        if not isinstance(value, str):
            problems.add(f"{where}, column {name}", f"{value!r} is not text", "Write it as text")
            return ()
    name = next((name for name in PROMPT_COLUMNS if not is_blank(given[name])), None)
    if name is None:
        there = next(name for name in PROMPT_COLUMNS if name in columns)
        problems.add(f"{where}, column {there}", "the prompt is empty", "Fill it in or remove the row")
    prompt, told = given[name or "prompt"], given["system"].strip() or system
    if name != "prompt" or not prompt.strip().startswith("<|start|>"):
        return ((("system", told),) if told else ()) + (("user", prompt.strip()),)
    if not re.search(r"<\|start\|>assistant(?:<\|channel\|>[^<]*(?:<\|message\|>)?)?\Z", prompt):
        what, fix = "a rendered prompt must end where the assistant begins", "End it with <|start|>assistant"
        problems.add(f"{where}, column prompt", what, fix)
    return (("rendered", prompt),)


def make_rows(
    name: str, header: Sequence[str], records: Iterable[Record], actions: int, system: str, problems: Problems
) -> Iterator[Row]:
    """Rows of the file `name` out of its records, with the rewards of so many `actions`."""
    names = [f"reward_action_{k}" for k in range(actions)]
    q_names = [f"q_action_{k}" for k in range(actions)] if "q_action_0" in header else []
    for number, (where, columns) in enumerate(records, 1):
        rewards = read_numbers(where, columns, names, problems)
        columns |= rewards
        messages = read_messages(where, columns, system, problems)
        if not all(is_text(text) for _, text in messages):
            problems.add(where, "the prompt holds half a character (a lone surrogate)", "Write it as UTF-8")
        # Text in `columns`, as it was before there was a use for them: runs know their rows by a fingerprint of these.
        q = read_numbers(where, columns, q_names, problems)
        if tokens := {token: None for role, text in messages if role != "rendered" for token in SPECIAL.findall(text)}:
            what = (
                f"it holds {', '.join(tokens)}: the model reads these as the end of a message, or the begin of another"
            )
            problems.add(where, what, "Take it out, or write the whole prompt rendered, from its first <|start|> on")
        cell = columns.get(prompt_column(columns))
        talk = "user" in columns or not isinstance(as_conversation(cell), (str, type(None)))
        yield Row(name, number, messages, tuple(rewards.values()), columns, "", tuple(q.values()), talk)


ROW_PLACE = re.compile(r", row ([0-9]+)(?: \(line [0-9]+\))?(?=[,:])")
ROWS_NAMED = 5  # of rows with the same problem


def merge_alike(problems: Iterable[str]) -> list[str]:
    """Problems of one file; one of several rows stands there once, with the first row and how many more there are."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(ROW_PLACE.sub("", problem, count=1), []).append(problem)
    merged = []
    for first, *more in alike.values():
        rows = [match[1] for problem in more[:ROWS_NAMED] if (match := ROW_PLACE.search(problem))]
        if len(more) > ROWS_NAMED:
            rows.append("...")
        if more:
            plural = "one more row" if len(more) == 1 else f"{len(more)} more rows"
            first += f". The same in {plural}: {', '.join(rows)}"
        merged.append(first)
    return merged


def read_file(
    name: str, read: Callable[[], Table], problems: Problems, system: str = "", rewards: bool = True
) -> list[Row]:
    """The rows of one file or data set; problems name it, the row (1 is the first), the column and in text the line.

    Accepted: a `prompt` column (rendered in Harmony, beginning with `<|start|>`, or plain text, taken as the user's
    message, or a list of messages), `question`, `messages`, or `user` with an optional `system`; `reward_action_0` ..
    `reward_action_{K-1}` with finite numbers, K >= 2, for the rewards that need them, and `q_action_k` beside them. Other
    columns pass through. `system`: the message of rows without their own. Without `rewards` these pass through as well,
    whatever they are."""
    mine = Problems()
    try:
        header, records = read()
        actions = check_header(name, header, mine)
        made = make_rows(name, header, records(mine), actions * rewards, system, mine) if not mine else ()
        rows = list(with_progress(f"reading {name}", made))
    except UnreadableFile as error:
        problems.add(*error.args)
        return []
    if not rows and not mine:
        mine.add(name, "there is no row below the header", "Add at least one row")
    told = merge_alike(mine)
    problems += told[:SHOWN]
    if len(told) > SHOWN:
        problems.add(name, f"and {len(told) - SHOWN} more problems like these", "Fix the file and run again")
    return [] if mine else rows


def read_csv(path: Path, problems: Problems, system: str = "", rewards: bool = True) -> list[Row]:
    """`read_file` of a file in one of the formats of grpo/data/formats.py, by its ending; CSV with any other."""
    return read_file(str(path), functools.partial(reader_of(path), path), problems, system, rewards)


def read_rows(setting: str, text: str, problems: Problems, system: str = "") -> list[Row]:
    """The rows of every file, and of every data set of the Hub, that a setting names."""
    parts = listed(text)
    sets = [part for part in parts if is_dataset(part)]
    files = ",".join(part for part in parts if part not in sets)
    rows = [
        row
        for path in (find_files(setting, files, problems) if files or not sets else ())
        for row in read_csv(path, problems, system)
    ]
    for part in sets:
        read = functools.partial(read_dataset, part, "test" if setting == "EVAL_DATA" else "train")
        rows += read_file(part, read, problems, system)
    names: dict[str, str] = {}
    for file in dict.fromkeys(row.file for row in rows):
        if (other := names.setdefault(label(file), file)) != file:
            fix = "Rename one: rows are identified in the logs by file name and row"
            problems.add(setting, f"{other} and {file} have the same name", fix)
    return rows


def data_fingerprint(rows: Sequence[Row]) -> str:
    """SHA-256 over everything that training sees of the rows, whatever their files are called."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.messages, row.rewards, sorted(row.columns.items())], default=str).encode())
    return digest.hexdigest()


def data_prompt(row: Row) -> str | list[dict[str, Any]]:
    """The prompt as it stands in the data, which is what TRL hands to reward functions: text, or a list of messages."""
    role, first = row.messages[0]
    if role == "rendered":
        return first
    cells = row.columns
    if isinstance(talk := as_conversation(cells.get(prompt_column(cells))), list):
        return talk
    name = next((name for name in PROMPT_COLUMNS if not is_blank(cells.get(name) or "")), None)
    text = cells[name] if name else row.messages[-1][1]
    if not row.conversational:
        return text
    system = cells.get("system") or ""
    messages = [{"role": "user", "content": text}]
    return messages if is_blank(system) else [{"role": "system", "content": system}, *messages]


def reward_columns(row: Row) -> dict[str, Any]:
    """The columns of a row as keyword arguments of a reward function."""
    columns = {(f"csv_{name}" if name in RESERVED_ARGUMENTS else name): value for name, value in row.columns.items()}
    columns |= {f"q_action_{k}": value for k, value in enumerate(row.q)}
    return columns


def renamed_columns(rows: Iterable[Row]) -> list[str]:
    """The columns that reward functions get under another name; not `prompt`, which they get as `prompts`."""
    names = dict.fromkeys(name for row in {tuple(row.columns): row for row in rows}.values() for name in row.columns)
    return [name for name in names if name in RESERVED_ARGUMENTS and name != "prompt"]


def column_names(rows: Iterable[Row]) -> list[str]:
    """The names of `reward_columns` of all these rows, in order: reward functions get every column with every row."""
    kinds = {tuple(row.columns): row for row in rows}  # one row of each set of columns
    return list(dict.fromkeys(name for row in kinds.values() for name in reward_columns(row)))
