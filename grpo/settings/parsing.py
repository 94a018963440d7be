# SPDX-License-Identifier: Apache-2.0
"""The value of a setting and its text: what a user writes is checked and read, what a run has is shown."""

import math
import os
from collections.abc import Mapping
from datetime import date
from operator import gt, le, lt
from typing import Any

from grpo.common import is_text, nearest_hint, path_fault, read_number
from grpo.settings.foreign import OTHER_VALUES
from grpo.settings.table import FIELDS, Value

MOST_WHOLE = 10**9  # Upper limit of a whole number whose setting has no `high`: plans multiply such numbers.
MOST_FLOAT = 1e30  # The same for other numbers, well within float32's 3e38.
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
MAY_CHANGE = {name for name, spec in FIELDS.items() if spec.metadata.get("resume")}


def show(value: Value) -> str:
    """A setting's value as a user would write it: `auto` for None, 1 and 0 for booleans. Reading it gives the same."""
    if value is None:
        return "auto"
    if not isinstance(value, (float, bool)):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else str(value)


def accepted_words(name: str) -> tuple[str, ...]:
    """The words that setting `name` accepts, `auto` first if it is one; empty for a setting without `choices`."""
    words = FIELDS[name].metadata.get("choices", ())
    return ("auto", *words) if words and str(FIELDS[name].type).endswith("| None") else words


def parse_value(name: str, text: str) -> Value:
    """The value of setting `name` written as `text`. Raises ValueError with a sentence on what is expected."""
    spec, text = FIELDS[name].metadata, text.strip()
    kind, optional, _ = str(FIELDS[name].type).partition(" | None")
    if not is_text(text):
        raise ValueError("it holds bytes that are not UTF-8")
    if optional and text.lower() == "auto":
        return None
    if remedy := OTHER_VALUES.get((name, text.lower())):
        raise ValueError(f"set {remedy[0]} ({remedy[1]})")
    if kind == "bool":
        if text.lower() not in TRUE + FALSE:
            raise ValueError("expected auto, 1 or 0" if optional else "expected 1 or 0")
        return text.lower() in TRUE
    if known := accepted_words(name):
        if text.lower() not in known:
            raise ValueError(f"expected one of {', '.join(known)}{nearest_hint(text.lower(), known)}")
        return text.lower()
    if spec.get("date"):
        try:
            return date.fromisoformat(text).isoformat()
        except ValueError:
            raise ValueError(f"expected a day such as {FIELDS[name].default}") from None
    if spec.get("path"):
        if fault := path_fault(text):
            raise ValueError(fault)
        return os.path.expanduser(text)  # Libraries get it as it is, and a shell does not expand `~` in quotes.
    return text if kind == "str" else parse_number(text, kind == "int", bool(optional), spec)


def parse_number(text: str, whole: bool, optional: bool, spec: Mapping[str, Any]) -> float:
    """A number within the limits of a setting's metadata `spec`, an int if it must be `whole`. Raises ValueError."""
    try:
        value = read_number(text, int if whole else float)
    except ValueError:
        expected = "expected a whole number" if whole else "expected a number"
        raise ValueError(f"{expected} or auto" if optional else expected) from None
    nan = spec.get("nan")
    if not whole and not math.isfinite(value) and not (nan and math.isnan(value)):
        raise ValueError("expected a finite number or nan" if nan else "expected a finite number")
    limits = {"high": MOST_WHOLE if whole else MOST_FLOAT, **spec}
    for limit, words, exceeds in (("low", "at least", lt), ("above", "above", le), ("high", "at most", gt)):
        if limit in limits and exceeds(value, limits[limit]):
            raise ValueError(f"must be {words} {show(limits[limit])}")
    return value
