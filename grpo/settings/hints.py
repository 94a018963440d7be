# SPDX-License-Identifier: Apache-2.0
"""Hints where the user wrote something else than a setting: a typo, a flag, or the name that another trainer has."""

import difflib
import re
import shlex
from collections.abc import Sequence

from grpo.common import split_commas
from grpo.settings.foreign import ANSWERS, OTHER_VALUES, PEFT_TARGET, SETTING_OF, TRL_ANSWER, TRL_REASONS
from grpo.settings.parsing import parse_value
from grpo.settings.table import FIELDS

# SageMaker, PBS, Valohai and Alibaba's PAI put these before names of their own and of a job's hyperparameters.
PLATFORM_PREFIXES = ("SM_", "PBS_", "VH_", "PAI_")


def canonical_name(word: str) -> str:
    """A flag or a variable in the spelling of settings: `--num-generations` becomes NUM_GENERATIONS."""
    return word.lstrip("-").upper().replace("-", "_")


def nearest_setting(variable: str) -> str | None:
    """The setting that an environment variable was probably meant to be, or None for another program's variable.

    It may differ from the setting's name in case, in underscores, or by a final S. Settings of more than four letters
    are also found by similarity; shorter ones are not, because `SPEED` is not `SEED`."""
    name = canonical_name(variable)
    if name.startswith(PLATFORM_PREFIXES):  # SM_OUTPUT_DIR is no misspelt OUTPUT_DIR.
        return None
    for setting in FIELDS:
        if name == f"{setting}S" or name.replace("_", "") == setting.replace("_", ""):
            return setting
    similar = difflib.get_close_matches(name, [setting for setting in FIELDS if len(setting) > 4], 1, cutoff=0.83)
    return similar[0] if similar else None


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


def set_hint(setting: str, value: str) -> str:
    """What to write to set `setting` to `value`; where it would refuse the value, the setting with the reason."""
    if remedy := OTHER_VALUES.get((setting, value.lower())):
        return f"{remedy[0]} ({remedy[1]})"
    if not value:
        return f"{setting} (a value is missing)"
    if setting == "LORA_TARGETS":
        value = own_targets(value)
        if not value:
            known = "all-linear, q_proj, k_proj, v_proj, o_proj, experts (of all layers), or 7.experts (of layer 7)"
            return f"LORA_TARGETS ({known})"
    try:
        parse_value(setting, value)
    except ValueError as error:
        return f"{setting} ({error})"
    return f"{setting}={shlex.quote(value)}"


def fill_in(answer: str, value: str) -> str:
    """An answer of grpo/settings/foreign.py with the `value` that the user gave in place of {}."""
    if match := re.search(r"([A-Z_]+)=([\w,-]*)\{\}", answer):
        answer = answer.replace(match[0], set_hint(match[1], value and match[2] + value))
    return answer.replace("{}", shlex.quote(value) if value else "...")


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
        answers.append(f"{' '.join([flag, *values])}: {flag_answer(canonical_name(flag), values)}")
    return answers


def flag_answer(name: str, values: Sequence[str]) -> str:
    """The answer to a flag in the spelling of settings, NO_USE_VLLM, with these values."""
    value, is_negated = ",".join(values), name.startswith("NO_") and name not in ANSWERS and name not in TRL_REASONS
    name = name.removeprefix("NO_") if is_negated else name
    if name in TRL_REASONS:
        return TRL_ANSWER + TRL_REASONS[name]
    setting = SETTING_OF.get(name) or (name if name in FIELDS else None)
    if name not in ANSWERS and not setting:
        setting = nearest_setting(name)
    if setting and not values and str(FIELDS[setting].type).startswith("bool"):
        value = "0" if is_negated else "1"
    if setting:
        return f"set {set_hint(setting, value)}"
    return fill_in(ANSWERS.get(name, "no such setting, --help lists them"), value)
