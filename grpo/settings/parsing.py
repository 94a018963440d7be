# SPDX-License-Identifier: Apache-2.0
"""Settings read from environment variables, with hints for typos and for the names of other trainers."""

import argparse
import difflib
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import date
from operator import gt, le, lt
from typing import Any

from grpo.common import (
    Problems,
    is_text,
    nearest_hint,
    one_line,
    path_fault,
    read_number,
    split_commas,
)
from grpo.settings.foreign import ANSWERS, COMMON_WORDS, OTHER_VALUES, PEFT_TARGET, TRL_ANSWER
from grpo.settings.table import FIELDS, TASKS, Settings, Value

MOST_WHOLE = 10**9  # Upper limit of a whole number whose setting has no `high`: plans multiply such numbers.
MOST_FLOAT = 1e30  # The same for other numbers, well within float32's 3e38.
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
MAY_CHANGE = {name for name, spec in FIELDS.items() if spec.metadata.get("resume")}


def show(value: Value) -> str:
    """A setting's value as a user would write it: `auto` for None, 1 and 0 for booleans."""
    if value is None:
        return "auto"
    return f"{value:g}" if isinstance(value, (float, bool)) else str(value)


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
    if spec.get("path") and (fault := path_fault(text)):
        raise ValueError(fault)
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


def canonical_name(word: str) -> str:
    """A flag or a variable in the spelling of settings: `--num-generations` becomes NUM_GENERATIONS."""
    return word.lstrip("-").upper().replace("-", "_")


def nearest_setting(variable: str) -> str | None:
    """The setting that an environment variable was probably meant to be, or None for another program's variable.

    It may differ from the setting's name in case, in underscores, or by a final S. Settings of more than four letters
    are also found by similarity; shorter ones are not, because `SPEED` is not `SEED`."""
    name = canonical_name(variable)
    spellings = {spelling: known for known in FIELDS for spelling in (known.replace("_", ""), f"{known}S")}
    similar = difflib.get_close_matches(name, [known for known in FIELDS if len(known) > 4], 1, cutoff=0.83)
    return spellings.get(name) or spellings.get(name.replace("_", "")) or (similar[0] if similar else None)


def own_targets(text: str) -> str:
    """PEFT's names of modules and parameters as words of LORA_TARGETS; empty if one of them cannot be said in these."""
    words = []
    for part in split_commas(text):
        if match := PEFT_TARGET.fullmatch(part):
            experts = f"{match['layer']}.experts" if match["layer"] else "experts"
            words.append(match["module"] or experts)
        elif part == "all-linear":
            words.append(part)
        else:
            return ""
    return ",".join(dict.fromkeys(words))


def fill_in(answer: str, value: str) -> str:
    """An answer of grpo/settings/foreign.py with the `value` that the user gave, or where the setting that it names
    would refuse the value, with the reason: what an answer says to set is accepted."""
    match = re.search(r"([A-Z_]+)=\{\}", answer)
    if not match:
        return answer.replace("{}", shlex.quote(value) if value else "...")
    name, fault = match[1], ""
    if remedy := OTHER_VALUES.get((name, value.lower())):
        return f"set {remedy[0]} ({remedy[1]})"
    if not value:
        fault = "a value is missing"
    elif name == "LORA_TARGETS" and not (value := own_targets(value)):
        fault = "all-linear, q_proj, k_proj, v_proj, o_proj, experts (of all layers), or 7.experts (of layer 7)"
    else:
        try:
            parse_value(name, value)
        except ValueError as error:
            fault = str(error)
    return answer.replace(match[0], f"{name} ({fault})") if fault else answer.replace("{}", shlex.quote(value))


def flag_answers(words: Sequence[str]) -> list[str]:
    """An answer to each part of a command line that is not an option: `--num-generations 8: set NUM_GENERATIONS=8`."""
    answers: list[str] = []
    flags: list[list[str]] = []  # Each list holds a flag and the words after it.
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            flags.append(word.split("=", 1))
        elif flags:
            flags[-1].append(word)
        else:
            answers.append(f"{word}: settings stand before `python`")
    for flag, *values in flags:
        name, value = canonical_name(flag), ",".join(values)
        positive = name if name in ANSWERS else name.removeprefix("NO_")
        setting = positive if positive in FIELDS else nearest_setting(positive)
        answer = ANSWERS.get(positive) or (f"set {setting}={{}}" if setting else "no such setting, --help lists them")
        named = answer.removeprefix("set ").removesuffix("={}")
        if not values and named in FIELDS and str(FIELDS[named].type).startswith("bool"):
            value = "1" if name == positive else "0"
        answers.append(f"{' '.join([flag, *values])}: {fill_in(answer, value)}")
    return answers


def unknown_variables(environ: Mapping[str, str]) -> tuple[Problems, list[str]]:
    """Problems of variables that look like settings but are not, and warnings about words that any program exports and,
    in one line, about TRL's arguments that have no setting here."""
    problems, warnings = Problems(), []
    trl_names: dict[str, list[str]] = {}  # The reason why there is no setting -> variables.
    for variable in sorted(set(environ) - set(FIELDS) - set(split_commas(environ.get("IGNORE_VARS", "")))):
        name, ignore = canonical_name(variable), f"IGNORE_VARS={variable} if it belongs to another program"
        value = environ[variable].strip().encode("utf-8", "backslashreplace").decode()
        answer = ANSWERS.get(name, "")
        if answer.startswith(TRL_ANSWER) and value:
            trl_names.setdefault(answer.removeprefix(TRL_ANSWER), []).append(variable)
        elif answer and not answer.startswith(TRL_ANSWER):
            fix = one_line(fill_in(answer, value), 300)
            if name in COMMON_WORDS.split():
                warnings.append(f"{variable} is set but is not a setting: {fix}; or {ignore}")
            else:
                problems.add(variable, "no such setting", f"{fix[0].upper()}{fix[1:]}; or {ignore}")
        elif setting := nearest_setting(variable):
            problems.add(variable, f"no such setting, the nearest is {setting}", f"Write {setting}, or {ignore}")
    if trl_names:
        reasons = "; ".join(f"{', '.join(variables)} ({reason})" for reason, variables in trl_names.items())
        ignored = ",".join(variable for variables in trl_names.values() for variable in variables)
        warnings.append(f"{TRL_ANSWER}{reasons}. IGNORE_VARS={ignored} for those of another program")
    return problems, warnings


def load_settings(environ: Mapping[str, str]) -> tuple[Settings, dict[str, str], Problems]:
    """Returns the settings in the environment, the source of each value (`default`, `tiny`, the task's name or
    `environment`), and the problems. A setting whose value is refused keeps its default."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems = Problems()
    tiny, task = environ.get("MODEL_ID", "").strip() == "tiny", environ.get("TASK", "").strip().lower()
    for name, spec in FIELDS.items():
        values[name], sources[name] = spec.default, "default"
        if tiny and spec.metadata["tiny"] is not None:
            values[name], sources[name] = spec.metadata["tiny"], "tiny"
        if name in TASKS.get(task, {}):
            values[name], sources[name] = TASKS[task][name], task
        if (text := environ.get(name)) is not None:
            try:
                values[name], sources[name] = parse_value(name, text), "environment"
            except ValueError as error:
                fault = f"{one_line(repr(text), 200)} is not accepted, {error}"
                problems.add(name, fault, f"Unset it for the default ({show(values[name])})")
    problems.extend(unknown_variables(environ)[0])
    return Settings(**values), sources, problems


def parse_assignment(text: str) -> tuple[str, str]:
    """An argparse type: (name, value) of NAME=VALUE. It does not check that there is such a setting."""
    name, sign, value = text.partition("=")
    if not sign or not name.isupper():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as LEARNING_RATE=1e-3")
    return name, value
