# SPDX-License-Identifier: Apache-2.0
"""The log, the project's folder, the problems of an input, and helpers for texts: what every room may use."""

import argparse
import contextlib
import difflib
import logging
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("train_grpo")


def split_commas(text: str) -> list[str]:
    """The parts of a comma-separated setting, without spaces around them and without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


class Problems(list[str]):
    """Problems of the input, collected so that the user fixes everything in one go."""

    def add(self, where: str, fault: str, fix: str) -> None:
        """Adds one line, even if a file's name or another program's message in it has line breaks."""
        self.append(one_line(f"{where}: {fault}. {fix}"))


class InputError(ValueError):
    """The input is wrong; `args` are the problems, each a sentence for the user."""


def printable(text: str) -> str:
    """A text for a terminal or a page: characters that move the cursor, change colours or the order of letters are
    replaced, because a stranger's model, adapter or file may hold them. Line feeds and tabs stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", "\ufffd", text)


def one_line(text: str, limit: int = 2000) -> str:
    """A `printable` text on one line; its middle is left out where it has more than `limit` characters."""
    text = printable(" ".join(text.splitlines()))
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def nearest_hint(word: str, known: Iterable[str]) -> str:
    """`; the nearest is ...`, to end a sentence with the known word that was probably meant; empty if none is near."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; the nearest is {near[0]}" if near else ""


def read_number(text: str, kind: type[float] = float) -> float:
    """A number in plain digits. Raises ValueError, also for other scripts' digits and `1_0`, which Python accepts."""
    if not text.isascii() or "_" in text:
        raise ValueError(f"{text!r} is not written in plain digits")
    return kind(text)


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold the text: file names, the environment and JSON may contain lone surrogates."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


@contextlib.contextmanager
def restored_variables(*names: str) -> Iterator[None]:
    """After the block these environment variables are as before."""
    kept = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, before in kept.items():
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before


def allocator_settings() -> str:
    """The user's settings of torch's allocator, without spaces. torch reads the first of two variables that is set."""
    text = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    return text.replace(" ", "").strip(",")


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for each lone surrogate: neither UTF-8 nor a tokenizer takes them."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def path_fault(path: str | Path) -> str | None:
    """Why there can be no file at `path`; None if there can be one, even if it does not exist yet."""
    try:
        os.stat(Path(path).expanduser())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RuntimeError, ValueError) as error:  # a long name, a loop of links, no access, no such user
        return getattr(error, "strerror", None) or str(error)
    return None


def format_exception(error: BaseException) -> str:
    return one_line(": ".join(filter(None, (type(error).__name__, text_of(error)))), 300)


def text_of(value: object, kind: Callable[[object], str] = str) -> str:
    """The text of a user's object by `str` or `repr`, which are the user's own code and may raise anything."""
    try:
        return kind(value)
    except (Exception, SystemExit) as error:
        return f"its text cannot be made: {type(error).__name__}"


def in_range(low: float, high: float, kind: type[float] = float) -> Callable[[str], float]:
    """An argparse type: a finite number from low to high."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind.__name__} from {low:g} to {high:g}")
        return value

    return parse


def wrap(line: str, indent: int) -> str:
    """A line broken at 100 columns, with the lines after the first one indented."""
    return textwrap.fill(line, 100, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def reflow(about: str | None) -> str:
    """A script's docstring for `--help`: wraps its paragraphs at 100 columns, but leaves indented ones as they are."""
    parts = (about or "").strip("\n").split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else wrap(" ".join(part.split()), 0) for part in parts)
