# SPDX-License-Identifier: Apache-2.0
"""Settings read from environment variables, and what is said about variables that are none."""

from collections.abc import Mapping
from typing import Any

from grpo.common import Problems, one_line, split_commas
from grpo.settings.foreign import ANSWERS, COMMON_WORDS, TRL_ANSWER, TRL_REASONS
from grpo.settings.hints import canonical_name, fill_in, nearest_setting
from grpo.settings.parsing import parse_value, show
from grpo.settings.table import FIELDS, TASKS, Settings


def load_settings(environ: Mapping[str, str]) -> tuple[Settings, dict[str, str], Problems]:
    """Returns the settings in the environment, the source of each value (`default`, `tiny`, the task's name or
    `environment`), and the problems. A setting whose value is refused keeps its default."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems = Problems()
    model_id, task = environ.get("MODEL_ID", "").strip(), environ.get("TASK", "").strip().lower()
    for name in FIELDS:
        values[name], sources[name] = own_default(name, model_id, task)
        if (text := environ.get(name)) is not None:
            try:
                values[name], sources[name] = parse_value(name, text), "environment"
            except ValueError as error:
                unit = FIELDS[name].metadata["unit"]
                fault = f"{one_line(repr(text), 200)} is not accepted, {error}"
                fault += f" (unit: {unit})" if unit and unit != "date" else ""
                problems.add(name, fault, f"Unset it for the default ({show(values[name])})")
    problems += unknown_variables(environ)[0]
    return Settings(**values), sources, problems


def own_default(name: str, model_id: str, task: str) -> tuple[Any, str]:
    """The default of setting `name` in a run with this MODEL_ID and TASK, and its source, see `load_settings`."""
    if name in TASKS.get(task, {}):
        return TASKS[task][name], task
    if model_id == "tiny" and (tiny := FIELDS[name].metadata["tiny"]) is not None:
        return tiny, "tiny"
    return FIELDS[name].default, "default"


def unknown_variables(environ: Mapping[str, str]) -> tuple[Problems, list[str]]:
    """Problems of variables that look like settings but are not, and warnings about words that any program exports and,
    in one line, about TRL's arguments that have no setting here."""
    problems, warnings = Problems(), []
    trl_variables: dict[str, list[str]] = {}  # By the reason why there is no setting.
    for variable in sorted(set(environ) - set(FIELDS) - set(split_commas(environ.get("IGNORE_VARS", "")))):
        name, ignore = canonical_name(variable), f"IGNORE_VARS={variable} if it belongs to another program"
        value = environ[variable].strip().encode("utf-8", "backslashreplace").decode()
        if name in TRL_REASONS:
            if value:
                trl_variables.setdefault(TRL_REASONS[name], []).append(variable)
        elif name in ANSWERS:
            fix = one_line(fill_in(ANSWERS[name], value), 300)
            if name in COMMON_WORDS:
                warnings.append(f"{variable} is set but is not a setting: {fix}; or {ignore}")
            else:
                problems.add(variable, "no such setting", f"{fix[0].upper()}{fix[1:]}; or {ignore}")
        elif setting := nearest_setting(variable):
            problems.add(variable, f"no such setting, the nearest is {setting}", f"Write {setting}, or {ignore}")
    if trl_variables:
        reasons = "; ".join(f"{', '.join(variables)} ({reason})" for reason, variables in trl_variables.items())
        ignored = ",".join(variable for variables in trl_variables.values() for variable in variables)
        warnings.append(f"{TRL_ANSWER}{reasons}. IGNORE_VARS={ignored} for those of another program")
    return problems, warnings
