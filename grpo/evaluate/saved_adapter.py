# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the adapter that a command line names: its files, its base model's, and the settings of its run."""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from grpo.common import Problems, one_line
from grpo.output.best import adapter_fault, read_best
from grpo.output.durable import file_sha256, read_json
from grpo.output.folder import model_commit
from grpo.output.layout import ADAPTER, SETTINGS
from grpo.plan.hub import ModelFiles, count_parameters, find_model
from grpo.plan.machine import GIB, Machine
from grpo.plan.vllm_model import fixed_faults
from grpo.preflight.adapter import CONFIG, missing_files
from grpo.settings.environment import load_settings
from grpo.settings.parsing import show
from grpo.settings.table import Settings

# Settings that are taken from the record of the adapter's run; all others come from the command's environment.
RECORDED = (
    "MODEL_ID", "TASK", "REASONING_EFFORT", "PROMPT_DATE", "EVAL_TEMPERATURE", "TOP_P", "SEED", "DATA", "EVAL_DATA",
    "EVAL_SHARE", "EVAL_SAMPLES", "EVAL_EXACT", "EVAL_PROFILE", "SYSTEM_PROMPT", "DIRECT_ANSWERS",
)  # fmt: skip
# These are recorded too, but the environment may replace them: other rows, or another machine, may need other values.
REPLACEABLE = ("MAX_PROMPT_LEN", "MAX_COMPLETION_LEN", "REWARDS", "INVALID_REWARD", "EXPERTS")


def run_folders(adapter: Path | None) -> tuple[Path, ...]:
    """The folders that may hold the settings.json of the adapter's run: its own and, for best/ and checkpoints, its
    parent."""
    return (adapter, adapter.resolve().parent) if adapter else ()


def recorded_settings(adapter: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment, updated from the settings.json of the adapter's run: RECORDED settings replace those of the
    environment, REPLACEABLE ones fill in what it lacks. Without settings.json, MODEL_ID is filled in from
    adapter_config.json. REWARDS=auto becomes the functions that the run chose."""
    for path in run_folders(adapter):
        try:
            record = read_json(path / SETTINGS)
            values = dict(record["settings"])
            if values.get("REWARDS", "") is None:
                values["REWARDS"] = ((record.get("choices") or {}).get("rewards") or [None])[0]
            replaceable, fixed = (
                {name: show(values[name]) for name in names if name in values} for names in (REPLACEABLE, RECORDED)
            )
            return replaceable | dict(environ) | fixed
        except (OSError, ValueError, KeyError, TypeError):
            continue
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if adapter and (base := read_json(adapter / CONFIG).get("base_model_name_or_path")):
            return {"MODEL_ID": str(base)} | dict(environ)
    return dict(environ)


def commit_of_run(adapter: Path | None, model_id: str) -> str | None:
    """The Hub's commit of `model_id` on which the run of the adapter trained, from the same settings.json."""
    for path in run_folders(adapter):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return model_commit(read_json(path / SETTINGS), model_id)
    return None


def recorded_fingerprint(adapter: Path) -> str:
    """The `data_fingerprint` of the rows that the adapter's run was trained on; empty where it is not recorded."""
    for path in run_folders(adapter):
        with contextlib.suppress(OSError, ValueError):
            return str(read_json(path / SETTINGS).get("data_sha256", ""))
    return ""


def load_run_settings(adapter: Path | None, **changes: str | None) -> tuple[Settings, Problems]:
    """The settings of the adapter's run with the non-empty `changes`, and the problems of these settings and of the
    adapter's files: they must exist, and match the checksum in their folder, if there is one."""
    replaced = {name: value for name, value in changes.items() if value}
    settings, _, problems = load_settings(recorded_settings(adapter, os.environ) | replaced)
    fault = None
    if adapter and not adapter.is_dir():
        fault = "there is no such folder"
    elif adapter and (missing := missing_files(adapter)):
        fault = f"it lacks {' and '.join(missing)}"
    elif adapter:
        fault = adapter_fault(adapter)
    if fault:
        problems.add(str(adapter), fault, "Name the folder of a run that has ended, its best/, or a checkpoint")
    return settings, problems


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
