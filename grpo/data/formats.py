# SPDX-License-Identifier: Apache-2.0
"""Reads tables of records from files (CSV, JSON lines, Parquet) and from data sets of the Hub."""

import ast
import contextlib
import csv
import io
import itertools
import json
import os
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo.common import ROOT, Problems, format_exception

Cell = Any  # Text in a CSV; any value that JSON or Parquet can hold in other formats.
Columns = dict[str, Cell]
Record = tuple[str, Columns]  # The location for messages ("FILE, row 3"), and the columns of the record.
Table = tuple[list[str], list[Record]]  # The names of the columns, and the records.

EXCELS_LINE = re.compile(r"sep=(.?)")  # Its first line where it names the separator.
csv.field_size_limit(2**31 - 1)  # Cells of data and logs may exceed Python's default of 131,072 characters.


class UnreadableFile(Exception):
    """No row of the file can be read; the arguments are those of `Problems.add`."""


def read_literal(text: str) -> Cell:
    """The value that a text holds as JSON, as a Python literal, or as numpy prints a list of objects, without commas
    between them: so pandas writes to a CSV what it read from Parquet. Raises ValueError."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        tokens = [token.string for token in tokenize.generate_tokens(io.StringIO(text.strip()).readline)]
        tokens = list(filter(str.strip, tokens))  # Line breaks are tokens too.
        pairs = zip(["", *tokens], tokens, strict=False)
        separated = [f", {token}" if (before, token) == ("}", "{") else token for before, token in pairs]
        return ast.literal_eval(" ".join(separated))
    except (ValueError, SyntaxError, tokenize.TokenError, TypeError, RecursionError, MemoryError):
        raise ValueError("it is neither JSON nor a Python literal") from None


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark. Raises UnreadableFile."""
    try:
        # Bytes are decoded because text mode would translate line breaks, which cells may contain.
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UnreadableFile(path, f"cannot be read ({error.strerror})", "Check the path and its permissions") from None
    except UnicodeDecodeError as error:
        fix = "Save it as UTF-8 (a workbook as 'CSV UTF-8'), unpack .gz and .zip, name Parquet .parquet"
        line = error.object[: error.start].count(b"\n") + 1
        raise UnreadableFile(f"{path}, line {line}", f"byte {error.start} is not UTF-8", fix) from None


def other_separator(text: str) -> str | None:
    """A semicolon or a tab, if it separates the columns: by commas the header is one cell, by this mark several, and as
    many as the first row."""

    def sizes(mark: str) -> list[int]:
        records = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
        with contextlib.suppress(csv.Error):
            return list(map(len, itertools.islice(filter(None, records), 2)))
        return []

    if sizes(",")[:1] != [1]:
        return None
    for mark in ";\t":
        header, *rows = sizes(mark) or [0]
        if header > 1 and rows in ([], [header]):
            return mark
    return None


def check_separator(path: Path, text: str) -> None:
    """Raises UnreadableFile if semicolons or tabs separate the columns, as where Excel is set to German, or if the
    first line names the separator, as Excel takes it. Beside semicolons numbers have decimal commas."""
    line, options = text.lstrip("\r\n").partition("\n")[0].rstrip("\r"), ""
    if match := EXCELS_LINE.fullmatch(line.strip('"')):
        mark, options = match[1] or ",", ", skiprows=1"
        fault = f"its first line is {line!r}, which only Excel takes, and no header"
    elif separator := other_separator(text):
        mark, fault = separator, f"its columns are separated by {separator!r}, not by commas"
    else:
        return
    if mark == ";":
        options += ", decimal=','"
    copy = path.with_name(f"commas-{path.name}")
    saving = f"pandas.read_csv({str(path)!r}, sep={mark!r}{options}).to_csv({str(copy)!r}, index=False)"
    raise UnreadableFile(path, fault, f"Save it with commas: {saving}; DATA may name only the new file then")


def read_csv_table(path: Path, problems: Problems) -> Table:
    """The table of a CSV; a row of another length than the header is a problem. Raises UnreadableFile."""
    text = read_text(path)
    check_separator(path, text)
    reader, line = csv.reader(io.StringIO(text, newline=""), strict=True), 1
    header: list[str] = []
    records: list[Record] = []
    number = 0
    try:
        for cells in reader:
            if cells and header:
                number += 1
                where = f"{path}, row {number} (line {line})"
                if len(cells) == len(header):
                    records.append((where, dict(zip(header, cells, strict=True))))
                else:
                    problem = f"it has {len(cells)} cells, the header has {len(header)}"
                    problems.add(where, problem, "Quote cells that hold commas or line breaks")
            if not header:
                header = [name.strip() for name in cells]
            line = reader.line_num + 1
    except csv.Error as error:
        fix = "Close every quote, and double quotes inside a quoted cell"
        raise UnreadableFile(f"{path}, from line {line} on", f"broken CSV quoting ({error})", fix) from None
    if not header:
        raise UnreadableFile(path, "it is empty", "Give it a header and at least one row")
    return header, records


def table_of(name: str | Path, rows: Sequence[Columns], lines: Sequence[int] = ()) -> Table:
    """The table of rows that begin at these `lines`, with None for columns that a row lacks. Raises UnreadableFile."""
    if not rows:
        raise UnreadableFile(name, "it is empty", "Give it at least one row")
    header = list(dict.fromkeys(key.strip() for row in rows for key in row))
    locations = [f" (line {line})" for line in lines] or [""] * len(rows)
    return header, [
        (f"{name}, row {number}{location}", dict.fromkeys(header) | {key.strip(): cell for key, cell in row.items()})
        for number, (row, location) in enumerate(zip(rows, locations, strict=True), 1)
    ]


def unique_keys(pairs: list[tuple[str, Cell]]) -> Columns:
    """A JSON object. Raises ValueError for a key that stands there twice, also beside spaces, which names of columns
    lose: one of the two values would be lost."""
    keys = Counter(key.strip() for key, _ in pairs)
    if repeated := [key for key, count in keys.items() if count > 1]:
        raise ValueError(f"the key {repeated[0]!r} stands there twice in an object")
    return dict(pairs)


def read_json_table(path: Path, problems: Problems) -> Table:
    """The table of JSON lines, one object a line, or of one JSON list of objects. Raises UnreadableFile."""
    text, fix = read_text(path), "Write one JSON object a line, as datasets' to_json does"
    is_list = text.lstrip().startswith("[")

    def parse(part: str, line: int) -> Any:
        """The JSON value in a part of the file that begins at this line."""
        try:
            return json.loads(part, object_pairs_hook=unique_keys)
        except json.JSONDecodeError as error:
            where, fault = f"{path}, line {line + error.lineno - 1}", f"{error.msg}, column {error.colno}"
        except (ValueError, RecursionError) as error:
            where, fault = str(path) if is_list else f"{path}, line {line}", str(error)
        raise UnreadableFile(where, f"it is not JSON ({fault})", fix)

    if is_list:
        rows, lines = parse(text, 1), []
    else:
        parts = [(line, part) for line, part in enumerate(text.split("\n"), 1) if part.strip()]
        rows, lines = [parse(part, line) for line, part in parts], [line for line, _ in parts]
    for n, row in enumerate(rows):
        if not isinstance(row, dict):
            where = f"{path}, line {lines[n]}" if lines else f"{path}, row {n + 1}"
            raise UnreadableFile(where, "it is no JSON object", fix)
    return table_of(path, rows, lines)


def read_parquet_table(path: Path, problems: Problems) -> Table:
    """The table of a Parquet file. Raises UnreadableFile."""
    from pyarrow import ArrowException, parquet  # Imported late, because most runs read CSVs.

    try:
        return table_of(path, parquet.read_table(path).to_pylist())
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        problem = f"it is no Parquet file ({str(error)[:300]})"
        raise UnreadableFile(path, problem, "Download or write it again") from None


def reader_of(path: Path) -> Callable[[Path, Problems], Table]:
    """The function that reads a file with this ending; the default is CSV."""
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json"):
        return read_json_table
    return read_parquet_table if path.suffix.lower() == ".parquet" else read_csv_table


DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+){0,2}(\[[\w:%]*\])?")


def is_dataset(part: str) -> bool:
    """Whether a part of DATA names a data set of the Hub: `org/name`, `org/name:config` or `org/name:config:split`, the
    split perhaps with a slice such as `[:200]`. Existing files and names with a file's ending are no data sets."""
    # The file system is checked last because every row.id calls this, and most names have a file's ending.
    if not DATASET.fullmatch(part) or Path(part).suffix[1:].isalpha():
        return False
    return not os.path.exists(part) and not os.path.exists(ROOT / part)


def read_dataset(name: str, split: str, problems: Problems) -> Table:
    """The table of a data set of the Hub; `split` is used if the name has none. Raises UnreadableFile."""
    repository, _, rest = name.partition(":")
    config, _, named_split = rest.partition(":")
    try:
        import datasets  # Imported late, because that takes a second.

        rows = datasets.load_dataset(repository, config or None, split=named_split or split).to_list()
    except Exception as error:  # load_dataset raises a dozen types, whose messages say what is wrong
        fix = "Write org/name:config:split, check the network and HF_TOKEN, or name files that exist"
        problem = f"no file of that name is there, and no data set could be loaded ({format_exception(error)})"
        raise UnreadableFile(name, problem, fix) from None
    return table_of(name, rows)
