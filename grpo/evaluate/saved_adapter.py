# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the adapter that a command line names: its files, its base model's, and the settings of its run."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from grpo.common import InputError, Problems, one_line, split_commas
from grpo.figures.text import object_at
from grpo.output.best import adapter_fault, read_best
from grpo.output.durable import Record, file_sha256, read_json
from grpo.output.folder import model_commit
from grpo.output.layout import ADAPTER, ADAPTER_CONFIG, SETTINGS
from grpo.plan.hub import ModelFiles, count_parameters, find_model
from grpo.plan.machine import GIB, Machine
from grpo.plan.vllm_model import fixed_faults
from grpo.preflight.adapter import missing_files, read_lora_config, tensor_shapes
from grpo.settings.environment import load_settings
from grpo.settings.parsing import show
from grpo.settings.table import Settings

# Settings that are taken from the record of the adapter's run; all others come from the command's environment.
RECORDED = (
    "MODEL_ID", "TASK", "REASONING_EFFORT", "PROMPT_DATE", "EVAL_TEMPERATURE", "TOP_P", "SEED", "DATA", "EVAL_DATA",
    "EVAL_SHARE", "EVAL_SAMPLES", "EVAL_EXACT", "EVAL_PROFILE", "SYSTEM_PROMPT", "PROMPT_TEMPLATE", "DIRECT_ANSWERS",
    "ENVIRONMENT",
)  # fmt: skip
# These are recorded too, but the environment may replace them: other rows, or another machine, may need other values.
REPLACEABLE = (
    "MAX_PROMPT_LEN", "MAX_COMPLETION_LEN", "MAX_TURNS", "MAX_TURN_LEN", "MAX_RESULT_LEN", "ENV_TIMEOUT", "REWARDS",
    "INVALID_REWARD", "OVERLONG_SHARE", "EXPERTS",
)  # fmt: skip


def run_folders(adapter: Path | None) -> tuple[Path, ...]:
    """The folders that may hold the settings.json of the adapter's run: its own and, for best/ and checkpoints, its
    parent."""
    return (adapter, adapter.resolve().parent) if adapter else ()


def run_folder(adapter: Path) -> Path | None:
    """The folder of the run that made the adapter; None where no settings.json names one."""
    return next((path for path in run_folders(adapter) if (path / SETTINGS).is_file()), None)


def run_record(adapter: Path | None) -> Record:
    """settings.json of the adapter's run; empty where there is none that can be read."""
    records = (read_json(path / SETTINGS, empty=(OSError, ValueError)) for path in run_folders(adapter))
    return next((record for record in records if "settings" in record), {})


def recorded_settings(adapter: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment, updated from the settings.json of the adapter's run: RECORDED settings replace those of the
    environment, REPLACEABLE ones fill in what it lacks. Without settings.json, MODEL_ID is filled in from
    adapter_config.json. REWARDS=auto becomes the functions that the run chose."""
    if record := run_record(adapter):
        values = dict(record["settings"])
        if values.get("REWARDS", "") is None:
            choice = object_at(record, "choices").get("rewards")
            values["REWARDS"] = choice[0] if isinstance(choice, list) and choice else None
        replaceable, fixed = (
            {name: show(values[name]) for name in names if name in values} for names in (REPLACEABLE, RECORDED)
        )
        return replaceable | dict(environ) | fixed
    config = read_json(adapter / ADAPTER_CONFIG, empty=(OSError, ValueError)) if adapter else {}
    base = config.get("base_model_name_or_path")
    return ({"MODEL_ID": str(base)} if base else {}) | dict(environ)


def commit_of_run(adapter: Path | None, model_id: str) -> str | None:
    """The Hub's commit of `model_id` on which the run of the adapter trained, from the same settings.json."""
    return model_commit(run_record(adapter), model_id)


def load_run_settings(adapter: Path | None, **changes: str | None) -> tuple[Settings, Problems]:
    """The settings of the adapter's run with the non-empty `changes`, and the problems of these settings and of the
    adapter's files: they must be those of a LoRA, and match the checksum in their folder, if there is one."""
    replaced = {name: value for name, value in changes.items() if value}
    settings, _, problems = load_settings(recorded_settings(adapter, os.environ) | replaced)
    fault = None
    if adapter and not adapter.is_dir():
        fault = "there is no such folder"
    elif adapter and (missing := missing_files(adapter)):
        fault = f"it lacks {' and '.join(missing)}"
    elif adapter and not (fault := adapter_fault(adapter)):
        try:
            read_lora_config(adapter), tensor_shapes(adapter / ADAPTER)
        except (OSError, InputError) as error:
            fault = str(error)
    if fault:
        problems.add(str(adapter), fault, "Name the folder of a run that has ended, its best/, or a checkpoint")
    return settings, problems


def strange_code(adapter: Path | None, setting: str, text: str, remedy: str) -> str | None:
    """Why the code that the adapter's settings.json names in a `setting`, whose value is `text`, must not be loaded:
    its module would come from the folder of the adapter, and whoever made that is not asked to run code here. None for
    other modules. `remedy`: how the user may ask for it."""
    folders = [folder.resolve() for folder in run_folders(adapter) if (folder / SETTINGS).exists()]
    for part in split_commas(text):
        module, colon, _ = part.partition("=")[0].strip().partition(":")
        source = Path(*module.split(".")).resolve()
        if colon and any(source.is_relative_to(folder) for folder in folders):
            fault = f"{setting}: {part} of its settings.json is a module in the adapter's own folder"
            return f"{adapter}: {fault}. If you trust that code, {remedy}"
    return None


def strange_environment(adapter: Path | None, settings: Settings) -> str | None:
    """`strange_code` of the run's ENVIRONMENT, unless the user has set the same one."""
    name = settings.ENVIRONMENT
    if name == os.environ.get("ENVIRONMENT"):
        return None
    return strange_code(adapter, "ENVIRONMENT", name, f"set ENVIRONMENT={shlex.quote(name)}")


def note_best(adapter: Path) -> None:
    """Prints to stderr which adapter was the best, if `adapter` is the folder of a run that kept another one."""
    best = read_best(adapter)
    if best and (adapter / ADAPTER).is_file() and best.get("adapter_sha256") != file_sha256(adapter / ADAPTER):
        words = one_line(best["in_words"])
        print(f"({adapter} holds the last step's adapter; {words}: {adapter / 'best'})", file=sys.stderr)


def check_model(settings: Settings, adapter: Path | None, machine: Machine, problems: Problems) -> ModelFiles | None:
    """The files of MODEL_ID; None after a problem."""
    # Without the adapter's files its base model is unknown, and MODEL_ID's default may be another model.
    if adapter and missing_files(adapter):
        return None
    files = find_model(settings.MODEL_ID, problems, commit_of_run(adapter, settings.MODEL_ID))
    for fault in fixed_faults(files.config) if files else ():
        problems.add(f"MODEL_ID={settings.MODEL_ID}", fault, "Name another model, or correct config.json")
    if files and not machine.gpus and count_parameters(files.config)["total"] * 2 / GIB > 4:
        problems.add("--model", f"{settings.MODEL_ID} needs a GPU, and {machine.no_gpu}", "Run it on an NVIDIA GPU")
    return files
