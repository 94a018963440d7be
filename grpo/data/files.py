# SPDX-License-Identifier: Apache-2.0
"""Reads training and held-out rows from users' files. Every problem names file, row, column and line."""

import functools
import glob
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo.common import ROOT, Problems, is_text, one_line, path_fault, read_number, split_commas
from grpo.data.formats import (
    Cell,
    Columns,
    Record,
    Table,
    UnreadableFile,
    is_dataset,
    read_dataset,
    read_literal,
    reader_of,
)
from grpo.harmony import TOKEN, begins_turn
from grpo.phases import with_progress
from grpo.settings.table import MOST_REWARD

REWARD_COLUMN = re.compile("reward_action_(0|[1-9][0-9]{0,5})")
Q_COLUMN = re.compile("q_action_(0|[1-9][0-9]{0,5})")
NEAR_ACTION = re.compile(r"(reward|q)[\W_]*action[\W_]*(\d{1,9})", re.IGNORECASE)
# Keyword arguments of reward functions: those that TRL passes or drops, and the four that docs/data.md adds. A column
# with one of these names is passed as `csv_NAME`; every other column keeps its name.
RESERVED_ARGUMENTS = {
    "prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "environments", "episodes", "truncated", "raw_completions", "rendered_prompts",
}  # fmt: skip
PROMPT_COLUMNS = ("prompt", "user", "question")
FORMATS_DOC = "docs/data.md#prompts-of-other-formats"
TABLE_DOC = "docs/data.md#from-a-table-to-the-format"
MOST_PROBLEMS = 20  # So many kinds of problems are listed; further ones are only counted.
ROW_LOCATION = re.compile(r", row [0-9]+(?: \(line [0-9]+\))?(?=[,:])")
HALF_A_CHARACTER = "the prompt holds half a character (a lone surrogate)", "Write it as UTF-8"  # problem, remedy
# Keys of a message in TRL's form or in ShareGPT's, as text that cannot be parsed holds them.
MESSAGE_KEYS = [re.compile(rf"""["'](?:{names})\\?["']\s*:""") for names in ("role|from", "content|value")]
INSTRUCTING = ("system", "developer")  # gpt-oss's template takes these roles only in the first message
Messages = tuple[tuple[str, str], ...]
Conversation = list[dict[str, Cell]]  # messages in TRL's form, with `role` and `content`


@dataclass(frozen=True)
class Row:
    """A row of a file. `prompt` is empty until `prepare_rows` fills it in."""

    file: str
    number: int  # 1 is the first row below the header
    messages: Messages  # (role, text) of each message, or a single ("rendered", text)
    rewards: tuple[float, ...]  # reward_action_k of each action; empty if the file has none
    columns: Columns  # every column of the file
    prompt: str = ""
    q: tuple[float, ...] = ()  # q_action_k of each action; empty if the file has none
    trl_prompt: str | Conversation = ""  # the prompt in the form of the file, as TRL passes it to reward functions

    @property
    def id(self) -> str:
        return f"{label(self.file)}:{self.number}"

    @property
    def reset_arguments(self) -> dict[str, object]:
        """What an environment's `reset` gets: all columns, and the prompt as TRL passes it."""
        return {**self.columns, "prompt": self.trl_prompt}


def label(file: str) -> str:
    """The name of a file or data set in logs: a file's name without folders and ending, or a data set's org/name."""
    return file if is_dataset(file) else Path(file).stem


def find_files(setting: str, text: str, problems: Problems) -> list[Path]:
    """The files that a setting names by paths or globs, relative to the current folder or to the project's root."""
    files: dict[Path, None] = {}
    fix = "Name existing files or a glob such as 'days/*.csv' (quoted)"
    for part in split_commas(text):
        if fault := path_fault(part):
            problems.add(setting, f"{part!r} cannot be read ({fault})", fix)
            continue
        named = (Path(part).expanduser(), ROOT / part)
        globbed = (sorted(map(Path, glob.glob(str(path), recursive=True))) for path in named)
        matches: list[Path] = []
        # A file whose name looks like a glob, such as day[1].csv, comes before what the glob matches.
        for paths in (named[:1], named[1:], *globbed):
            matches = matches or list(filter(os.path.isfile, paths))
        if not matches and named[0].is_dir():
            problems.add(setting, f"{part!r} is a folder", f"Name its files: '{part.rstrip('/')}/*.csv' (quoted)")
        elif not matches:
            problems.add(setting, f"no file matches {part!r}", fix)
        files |= dict.fromkeys(matches)
    if not text.strip():
        problems.add(setting, "it is empty", fix)
    return list(files)


def missing_actions_problem(row: Row) -> str:
    """The problem of a file without reward columns; `row` is any row of that file."""
    hint = "; they may hold the same numbers as q_action_k" if "q_action_0" in row.columns else ""
    return f"there is no column reward_action_0, reward_action_1, ... among {join_names(row.columns)}{hint}"


def join_names(columns: Iterable[str]) -> str:
    """Column names as text for a message, in which the user can see a mistyped one."""
    return one_line(", ".join(columns), 200)


def near_columns(header: Sequence[str]) -> dict[str, str]:
    """The columns that have the name of one that is read, but for case, separators and leading zeros, and that name.
    They would be passed on as columns of the user's own, and every row lack what they hold. Single common words, such
    as `System`, are left to the user, and beside `prompt` so are the other prompts."""
    missing = {"reasoning_effort", "chat_template_kwargs"} - set(header)
    if {"user", "question", "messages"} & set(header) and "prompt" not in header:
        missing |= {"prompt", "question"} - set(header)
    known = {name.replace("_", ""): name for name in missing}
    near = {}
    for name in header:
        right = known.get(re.sub(r"[\W_]", "", name).lower(), name)
        if match := NEAR_ACTION.fullmatch(name):
            right = f"{match[1].lower()}_action_{int(match[2])}"
        if right != name:
            near[name] = right
    return near


def check_header(path: str, header: Sequence[str], problems: Problems) -> int:
    """The number of reward_action_k columns. Adds a problem for each fault of the header."""
    where = f"{path}, header"
    for name, count in Counter(header).items():
        if count > 1:
            problems.add(where, f"column {one_line(repr(name), 200)} stands there twice", "Name every column once")
    for name in sorted(RESERVED_ARGUMENTS & set(header)):
        if (renamed := f"csv_{name}") in header:
            problem = f"reward functions get the column {name} as {renamed}, and there is a column {renamed} too"
            problems.add(where, problem, "Rename one of the two")
    if not {*PROMPT_COLUMNS, "messages"} & set(header):
        problem = f"there is neither a `prompt` nor a `user` column among {join_names(header)}"
        fix = f"Add one of them (or `question`, or `messages`); {TABLE_DOC} makes one of other columns in ten lines"
        if other := next((name for name in header if name.lower() in (*PROMPT_COLUMNS, "messages")), None):
            fix = f"Rename `{other}` to `{other.lower()}`"
        problems.add(where, problem, fix)
    if near := near_columns(header):
        for name, column in near.items():
            problem = f"column {one_line(repr(name), 200)} is nearly `{column}`, and would not be read as it"
            problems.add(where, problem, f"Rename it to `{column}`, or to another name if it is something else")
        return 0  # The numbers of the others may have a gap that the renamed ones fill.
    actions = sorted(int(match[1]) for match in map(REWARD_COLUMN.fullmatch, header) if match)
    values = sorted(int(match[1]) for match in map(Q_COLUMN.fullmatch, header) if match)
    gap = next((k for k in range(len(actions)) if k not in actions), None)
    if gap is not None:
        problem = f"reward_action_{gap} is missing among {join_names(header)}"
        problems.add(where, problem, "Number the actions from 0 without a gap")
    elif len(actions) == 1:
        problem = f"there is only one action, reward_action_0, among {join_names(header)}"
        problems.add(where, problem, "GRPO needs at least two actions to compare")
    if actions and values and values != actions:
        problem = f"there are {', '.join(f'q_action_{k}' for k in values)}, but {len(actions)} columns reward_action_k"
        problems.add(where, problem, "Give every action both, or rename the columns q_action_k")
    return len(actions)


def read_numbers(where: str, columns: Columns, names: Sequence[str], problems: Problems) -> dict[str, float]:
    """The cells of the columns `names` as numbers. Adds a problem for each that is not a finite number."""
    numbers = {}
    for name in names:
        cell = columns[name].strip() if isinstance(columns[name], str) else columns[name]
        try:
            number = read_number(cell) if isinstance(cell, str) else float(cell)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if isinstance(cell, bool) or not math.isfinite(number):
            problem = f"{one_line(repr(cell), 200)} is not a finite number"
            fix = "Every action needs a number in plain digits, such as -1509.79"
            problems.add(f"{where}, column {name}", problem, fix)
        elif abs(number) > MOST_REWARD:
            problem = f"{cell!r} is more than {MOST_REWARD:g} in size, too much for float32"
            problems.add(f"{where}, column {name}", problem, "Divide all of them by the same number")
        numbers[name] = number
    return numbers


def as_conversation(prompt: Cell) -> Cell:
    """The messages that a cell holds as text, see `read_literal`; else the cell. Raises ValueError for text that names
    roles as a list of messages does and cannot be read: as a prompt it would be trained on in this form."""
    if not isinstance(prompt, str) or not re.match(r"\s*[\[{\"]", prompt):
        return prompt
    try:
        value = read_literal(prompt)
    except ValueError as error:
        if re.match(r"\s*\"?\[?\s*\{", prompt) and all(key.search(prompt) for key in MESSAGE_KEYS):
            raise ValueError(f"it begins as messages do, and {error}") from None
        return prompt
    if isinstance(value, str):  # Encoded as JSON twice.
        inner = as_conversation(value)
        return prompt if inner is value else inner
    messages = value if isinstance(value, list) else [value]
    keys = [message.keys() for message in messages if isinstance(message, dict)]
    return value if any({"role", "content"} <= names or {"from", "value"} <= names for names in keys) else prompt


def is_empty(cell: Cell) -> bool:
    """Whether a cell, or the content of a message, holds no text at all."""
    return cell in (None, []) or not str(cell).strip()


def read_conversation(where: str, name: str, prompt: Cell, problems: Problems) -> Messages:
    """The messages in a cell of the column `name`, a list of messages as in TRL's data sets; () after a problem."""
    try:
        messages = tuple((message["role"], message["content"]) for message in prompt)
    except (TypeError, KeyError):
        messages = ()
    roles = [role for role, _ in messages]
    known = bool(roles) and roles[0] in (*INSTRUCTING, "user")
    known = known and all(role in ("user", "assistant") for role in roles[1:])
    if known and any(message.get("tool_calls") for message in prompt):
        problem = "it holds tool calls, which are not rendered"
        fix = "Write the whole prompt rendered, as text that begins with <|start|>"
    elif known and roles[-1] == "user" and is_empty(messages[-1][1]):
        problem, fix = "the prompt is empty: its last message holds no text", "Fill it in or remove the row"
    elif not known or not all(isinstance(text, str) for _, text in messages):
        problem = "it is no list of messages with text: system or developer first, then user and assistant"
        fix = 'Write [{"role": "user", "content": "..."}], or the whole prompt as text'
    elif roles[-1] != "user":
        problem = f"it ends with a message of the role {roles[-1]!r}, not with the user's question"
        fix = f'Leave the answer out: data.map(lambda row: {{"prompt": row["{name}"][:-1]}}) ({FORMATS_DOC})'
    else:
        return messages
    problems.add(f"{where}, column {name}", problem, fix)
    return ()


def prompt_column(where: str, columns: Columns, problems: Problems) -> str:
    """The column that holds a row's prompt; empty after a problem. With `prompt` the others are any columns, as in TRL;
    without it two of them are a problem: `user` may be a nickname beside a `question`."""
    columns = {name: columns[name] for name in (*PROMPT_COLUMNS, "messages") if name in columns}
    filled = [name for name, cell in columns.items() if not is_empty(cell)]
    if len(filled) == 1 or "prompt" in filled:
        return filled[0]
    if not filled:
        problems.add(f"{where}, column {next(iter(columns))}", "the prompt is empty", "Fill it in or remove the row")
    else:
        fix = "Rename the one that is the prompt to `prompt`, or the others to names of your own"
        problems.add(where, f"{' and '.join(filled)} may each be the prompt, and a row has one", fix)
    return ""


def read_messages(where: str, columns: Columns, system: str, problems: Problems) -> tuple[Messages, str | Conversation]:
    """The messages of a row, or (("rendered", text),), and the prompt that TRL passes to reward functions; () and ""
    after a problem. `system` is the default system message."""
    if not (column := prompt_column(where, columns, problems)):
        return (), ""
    try:
        prompt = as_conversation(columns[column])
    except ValueError as error:
        fix = "Write JSON (json.dumps), save it as JSON lines (to_json), or put words in front if it is meant as text"
        problems.add(f"{where}, column {column}", str(error), fix)
        return (), ""
    own_system = "" if columns.get("system") is None else columns["system"]
    if column == "messages" or isinstance(prompt, (list, dict)):
        messages = read_conversation(where, column, prompt, problems)
        system = str(own_system).strip() or system
        is_added = system and messages and messages[0][0] not in INSTRUCTING
        return (("system", system), *messages) if is_added else messages, prompt
    for name, cell in ((column, prompt), ("system", own_system)):
        if not isinstance(cell, str):
            problems.add(f"{where}, column {name}", f"{cell!r} is not text", "Write it as text")
            return (), ""
    if column == "prompt" and prompt.strip().startswith("<|start|>"):
        if not begins_turn(prompt):
            problem = "a rendered prompt must end where the assistant begins"
            problems.add(f"{where}, column prompt", problem, "End it with <|start|>assistant")
        return (("rendered", prompt),), prompt
    trl_prompt: str | Conversation = prompt
    if column != "prompt" and "user" in columns:  # The rows of a file get one form.
        trl_prompt = [{"role": "system", "content": own_system}] if own_system.strip() else []
        trl_prompt.append({"role": "user", "content": prompt})
    user, system = ("user", prompt.strip()), own_system.strip() or system
    return (("system", system), user) if system else (user,), trl_prompt


def make_rows(
    name: str, header: Sequence[str], records: Iterable[Record], actions: int, system: str, problems: Problems
) -> Iterator[Row]:
    """The rows of the file `name`, made from its records; `actions` is the number of its reward columns."""
    names = [f"reward_action_{k}" for k in range(actions)]
    q_names = [f"q_action_{k}" for k in range(actions)] if "q_action_0" in header else []
    for number, (where, columns) in enumerate(records, 1):
        rewards = read_numbers(where, columns, names, problems)
        columns |= rewards
        info = columns.get("extra_info")  # Where verl's own data sets keep the answer.
        if isinstance(info, dict) and info.get("answer") and columns.get("answer") is None:
            columns["answer"] = info["answer"]
        # In `columns` the values stay text, because `data_fingerprint`, which identifies a run's data, includes it.
        q = read_numbers(where, columns, q_names, problems)
        messages, trl_prompt = read_messages(where, columns, system, problems)
        if not all(is_text(text) for _, text in messages):
            problems.add(where, *HALF_A_CHARACTER)
        unrendered = "\n".join(text for role, text in messages if role != "rendered")
        if tokens := dict.fromkeys(TOKEN.findall(unrendered)):
            problem = f"it holds {', '.join(tokens)}: the model reads these as the begin or end of a message"
            fix = "Take it out, or write the whole prompt rendered, from its first <|start|> on"
            problems.add(where, problem, fix)
        yield Row(name, number, messages, (*rewards.values(),), columns, "", (*q.values(),), trl_prompt)


def merge_alike(where: str, problems: Iterable[str]) -> list[str]:
    """The problems of rows, one of each kind, which names the first row that has it and counts the others. Beyond
    MOST_PROBLEMS kinds a last line, which begins with `where`, counts the others."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(ROW_LOCATION.sub("", problem, count=1), []).append(problem)
    kinds = [f"{first}. Further rows like it: {len(more)}" if more else first for first, *more in alike.values()]
    if more := len(kinds[MOST_PROBLEMS:]):
        kinds[MOST_PROBLEMS:] = [one_line(f"{where}: and {more} more problems like these")]
    return kinds


def rows_of_table(
    name: str, read: Callable[[Problems], Table], problems: Problems, system: str = "", rewards: bool = True
) -> list[Row]:
    """The rows of a file or data set, whose table `read` returns; an empty list after a problem.

    docs/data.md describes the columns. `system` is the default system message. Without `rewards` none are read."""
    new_problems = Problems()
    try:
        header, records = read(new_problems)
        problems_of_rows = len(new_problems)
        actions = check_header(name, header, new_problems)
        if len(new_problems) > problems_of_rows:
            records = []  # Rows below a wrong header would repeat its problem.
        lazy = make_rows(name, header, records, actions if rewards else 0, system, new_problems)
        rows = list(with_progress(f"reading {name}", lazy))
    except UnreadableFile as error:
        problems.add(*error.args)
        return []
    if not rows and not new_problems:
        new_problems.add(name, "there is no row below the header", "Add at least one row")
    problems += merge_alike(name, new_problems)
    return [] if new_problems else rows


def read_file(path: Path, problems: Problems, system: str = "", rewards: bool = True) -> list[Row]:
    """Reads a file in the format that its ending names (grpo/data/formats.py), or else as CSV; see `rows_of_table`."""
    return rows_of_table(str(path), functools.partial(reader_of(path), path), problems, system, rewards)


def read_rows(setting: str, text: str, problems: Problems, system: str = "") -> list[Row]:
    """The rows of every file and data set of the Hub that `setting` names in its value `text`. `system` is the default
    system message. Adds a problem where two files have the same name in logs."""
    datasets = [part for part in split_commas(text) if is_dataset(part)]
    files = ",".join(part for part in split_commas(text) if part not in datasets)
    rows: list[Row] = []
    for path in find_files(setting, files, problems) if files or not datasets else ():
        rows += read_file(path, problems, system)
    for name in datasets:
        read = functools.partial(read_dataset, name, "test" if setting == "EVAL_DATA" else "train")
        rows += rows_of_table(name, read, problems, system)
    names: dict[str, str] = {}
    for file in dict.fromkeys(row.file for row in rows):
        if (other := names.setdefault(label(file), file)) != file:
            fix = "Rename one: rows are identified in the logs by file name and row"
            problems.add(setting, f"{other} and {file} have the same name", fix)
    return rows


def in_template(rows: Iterable[Row], template: str) -> list[Row]:
    """The rows with PROMPT_TEMPLATE in the place of a question, which its {} stands for. Rendered prompts and
    conversations stay as they are, and `{}` alone changes nothing."""

    def fill(row: Row) -> Row:
        instructions, question = row.messages[:-1], dict(row.messages[-1:]).get("user")
        if question is None or any(role not in INSTRUCTING for role, _ in instructions):
            return row
        text, prompt = template.replace("{}", question), row.trl_prompt
        prompt = text if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": text}]
        return replace(row, messages=(*instructions, ("user", text)), trl_prompt=prompt)

    return list(rows) if template == "{}" else list(map(fill, rows))


def template_fault(template: str) -> str:
    """What is wrong with a PROMPT_TEMPLATE; '' if nothing is."""
    if tokens := dict.fromkeys(TOKEN.findall(template)):
        return f"it holds {', '.join(tokens)}: the model reads these as the begin or end of a message"
    return "" if "{}" in template else "it has no {}, which stands for the row's question"


def data_fingerprint(rows: Sequence[Row]) -> str:
    """SHA-256 over the messages, rewards and columns of the rows; the names of their files do not matter."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.messages, row.rewards, sorted(row.columns.items())], default=str).encode())
    return digest.hexdigest()


def reward_columns(row: Row) -> Columns:
    """The columns of a row as keyword arguments of a reward function."""
    columns = {(f"csv_{name}" if name in RESERVED_ARGUMENTS else name): cell for name, cell in row.columns.items()}
    return columns | {f"q_action_{k}": value for k, value in enumerate(row.q)}


def column_names(rows: Iterable[Row]) -> list[str]:
    """The union of the names of `reward_columns` over the rows: a reward function gets every column for every row."""
    return list(dict.fromkeys(name for row in rows for name in reward_columns(row)))
