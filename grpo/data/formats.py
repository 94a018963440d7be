# SPDX-License-Identifier: Apache-2.0
"""Files and data sets to records, whatever their format: CSV, JSON lines, Parquet, a name on the Hub."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo.settings import ROOT, Problems, described

Record = tuple[str, dict[str, Any]]  # where it stands, in words, and its columns
# The names of the columns, and what makes the records once these are found good; it adds the problems it meets.
Table = tuple[list[str], Callable[[Problems], Iterator[Record]]]

csv.field_size_limit(2**31 - 1)  # a cell may be longer than the 131,072 characters that Python reads, in logs too


class UnreadableFile(Exception):
    """A file without a single row to look at; its arguments are those of `Problems.add`."""


def read_content(path: Path) -> bytes:
    """The bytes of a file. Raises UnreadableFile."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableFile(path, f"cannot be read ({error.strerror})", "Check the path and its permissions") from None


# First bytes of files that are no text -> what they are, and what to do.
MAGIC = {
    b"\x1f\x8b": ("compressed with gzip", "Unpack it (gunzip)"),
    b"PK": ("a workbook or a zip", "Open it and save it as 'CSV UTF-8', or unpack it"),
    b"PAR1": ("Parquet", "Name it .parquet"),
    b"\xff\xfe": ("UTF-16", "Save it as UTF-8"),
    b"\xfe\xff": ("UTF-16", "Save it as UTF-8"),
}


def decode(path: Path, content: bytes) -> str:
    """UTF-8, with or without a byte order mark. Raises UnreadableFile."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if known := next((known for magic, known in MAGIC.items() if content.startswith(magic)), None):
            raise UnreadableFile(f"{path}, line 1", f"it is {known[0]}", known[1]) from None
        where = f"{path}, line {content[: error.start].count(bytes([10])) + 1}"
        fix = "Save the file as UTF-8 (a workbook or UTF-16: open it in a spreadsheet and save it as 'CSV UTF-8')"
        raise UnreadableFile(where, f"byte {error.start} is not UTF-8", fix) from None


MOST_COLUMNS = 1000


def check_width(name: object, columns: int) -> None:
    """Raises UnreadableFile for a table so wide that it is a mistake: each row would become a dict of that many cells."""
    if columns > MOST_COLUMNS:
        what = f"it has {columns:,} columns, and {MOST_COLUMNS:,} are the most"
        raise UnreadableFile(f"{name}, header", what, "Leave out those that no reward needs, or swap rows and columns")


def split_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line that it begins in, cells) of the header and of every row of a CSV, read as they are asked for; empty lines are
    none. Raises UnreadableFile."""
    start, found, content = 1, 0, read_content(path)
    if b"\0" in content:
        decode(path, content)  # UTF-16 is the better word for it
        where = f"{path}, line {content.partition(bytes(1))[0].count(bytes([10])) + 1}"
        raise UnreadableFile(where, "it holds a NUL byte", "Export the CSV again; UTF-16 must become UTF-8")
    # Line by line: io.StringIO would hold four bytes for each character.
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline=""), strict=True)
    try:
        for cells in reader:
            if cells:
                found += 1
                yield start, cells
            start = reader.line_num + 1
    except UnicodeDecodeError:
        decode(path, content)  # tells where: this error knows its place in a part of the file only
        raise
    except csv.Error as error:
        where = f"{path}, row {found} (from line {start})" if found else f"{path}, line {start}"
        fix = "Close every quote, and double quotes inside a quoted cell"
        raise UnreadableFile(where, f"broken CSV quoting ({error})", fix) from None


def read_csv_table(path: Path) -> Table:
    """Columns and records of a CSV. Raises UnreadableFile."""
    lines = split_csv(path)
    header = [name.strip() for name in next(lines, (0, []))[1]]
    if not header:
        raise UnreadableFile(path, "it is empty", "Give it a header and at least one row")
    check_width(path, len(header))

    def records(problems: Problems) -> Iterator[Record]:
        for number, (line, cells) in enumerate(lines, 1):
            where = f"{path}, row {number} (line {line})"
            if len(cells) == len(header):
                yield where, dict(zip(header, cells, strict=True))
            else:
                what = f"it has {len(cells)} cells, the header has {len(header)}"
                problems.add(where, what, "Quote cells that hold commas or line breaks")

    return header, records


def table_of(name: object, found: Sequence[Record]) -> Table:
    """Records that may lack columns which others have: there they get None. Raises UnreadableFile."""
    header = list(dict.fromkeys(name.strip() for _, columns in found for name in columns))
    check_width(name, len(header))

    def records(problems: Problems) -> Iterator[Record]:
        for where, columns in found:
            yield where, dict.fromkeys(header) | {name.strip(): value for name, value in columns.items()}

    return header, records


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError where a key stands in it twice: the first value would be lost without a word."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice!r} stands there twice")
    return made


def read_json_table(path: Path) -> Table:
    """Columns and records of JSON lines, one object a line, or of one JSON list of objects. Raises UnreadableFile."""
    text = decode(path, read_content(path))
    found: list[tuple[int, Any]] = []  # line, object
    fix = "Write one JSON object a line, as datasets' to_json does"
    line = 1
    try:
        if text.lstrip().startswith("["):
            found = [(1, one) for one in json.loads(text, object_pairs_hook=once)]
        else:
            for line, row in enumerate(text.split("\n"), 1):
                found += [(line, json.loads(row, object_pairs_hook=once))] if row.strip() else []
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{path}, line {line}", f"it is not JSON ({error})", fix) from None
    if wrong := next((line for line, one in found if not isinstance(one, dict)), None):
        raise UnreadableFile(f"{path}, line {wrong}", "it is no JSON object", fix)
    if not found:
        raise UnreadableFile(path, "it is empty", fix)
    return table_of(path, [(f"{path}, row {number} (line {at})", one) for number, (at, one) in enumerate(found, 1)])


def read_parquet_table(path: Path) -> Table:
    """Columns and records of a Parquet file. Raises UnreadableFile."""
    try:
        from pyarrow import ArrowException, parquet  # late: most runs read CSVs
    except ImportError as error:
        raise UnreadableFile(path, f"Parquet needs pyarrow ({error})", "Run pip install pyarrow") from None
    try:
        table = parquet.read_table(io.BytesIO(read_content(path)))
        check_width(path, table.num_columns)
        found = table.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        what = f"it is no Parquet file ({str(error)[:300]})"
        raise UnreadableFile(path, what, "Download or write it again") from None
    return numbered(str(path), found)


def numbered(name: str, found: Iterable[dict[str, Any]]) -> Table:
    """Records of a table without lines. Raises UnreadableFile."""
    if not (records := [(f"{name}, row {number}", one) for number, one in enumerate(found, 1)]):
        raise UnreadableFile(name, "it is empty", "Give it at least one row")
    return table_of(name, records)


READERS = {
    ".jsonl": read_json_table, ".ndjson": read_json_table, ".json": read_json_table, ".parquet": read_parquet_table,
}  # fmt: skip


def reader_of(path: Path) -> Callable[[Path], Table]:
    """What reads a file, by its ending."""
    return READERS.get(path.suffix.lower(), read_csv_table)


DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+){0,2}(\[[\w:%]*\])?")


def is_dataset(part: str) -> bool:
    """Whether a part of DATA names a data set of the Hub, `org/name`, `org/name:config` or `org/name:config:split`, of
    the latter a part such as `[:200]`: no file of that name is there, and it does not end as a file."""
    # The disk last: rows ask for the names of their files all the time, and these end as files.
    if not DATASET.fullmatch(part) or Path(part).suffix[1:].isalpha():
        return False
    return not os.path.exists(part) and not os.path.exists(ROOT / part)


def read_dataset(name: str, split: str) -> Table:
    """Columns and records of a data set of the Hub, of `split` where the name says none. Raises UnreadableFile."""
    repository, _, rest = name.partition(":")
    config, _, own = rest.partition(":")
    try:
        import datasets  # late: it takes a second

        found = datasets.load_dataset(repository, config or None, split=own or split)
    except Exception as error:  # it raises a dozen kinds: what they say is the answer
        fix = "Write org/name:config:split, check the network and HF_TOKEN, or name files that exist"
        what = f"no file of that name is there, and no data set could be loaded ({described(error)})"
        raise UnreadableFile(name, what, fix) from None
    return numbered(name, found.to_list())
