# SPDX-License-Identifier: Apache-2.0
"""OUTPUT_DIR before a run: inspects what it holds, checks that this run may go on there, and makes it ready."""

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo.common import Problems
from grpo.data.files import Row, data_fingerprint
from grpo.output import layout
from grpo.output.best import adapter_fault
from grpo.output.checkpoints import (
    CUT_OFF,
    begins_with,
    checkpoints,
    find_checkpoint,
    retire_checkpoint,
    rotate_checkpoints,
)
from grpo.output.durable import Record, file_sha256, read_sealed, sync_files, write_sealed, write_text
from grpo.output.layout import (
    ADAPTER,
    ANOTHER_DIR,
    BEST,
    COMPLETE,
    DELETING,
    EXIT,
    LOGS,
    MANIFEST,
    NO_RUN,
    RUN_ENV,
    SETTINGS,
)
from grpo.settings.parsing import MAY_CHANGE, show
from grpo.settings.table import Settings


@dataclass(frozen=True)
class RunState:
    """What OUTPUT_DIR holds: the step and folder of its last whole checkpoint (0 and None for a fresh run)."""

    folder: Path
    step: int = 0
    checkpoint: Path | None = None
    exists: bool = False  # Whether the folder holds a run, in whatever state.
    choices: Record = field(default_factory=dict)  # `choices` of settings.json.
    notes: tuple[str, ...] = ()  # Each names a damaged file and what the run does about it.
    complete_steps: int = 0  # Steps of the run there if it is complete, else 0.

    @property
    def began_with_vllm(self) -> bool | None:
        """Whether vLLM generated when the run there was started; None if that is not recorded."""
        rollouts = self.choices.get("rollouts")
        return bool(rollouts[0]) if isinstance(rollouts, list) and rollouts else None


def mark_complete(folder: Path, steps: int) -> None:
    """Records that a run has all its `steps`, with the checksum of its adapter. All its files are on the disk first."""
    sync_files(folder)
    write_sealed(folder / COMPLETE, {"steps": steps, "adapter_sha256": file_sha256(folder / ADAPTER)})


def complete_steps(folder: Path) -> int:
    """Steps of the complete run in `folder`; 0 where it is not complete or its record is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(read_sealed(folder / COMPLETE)["steps"])
    return 0


def model_commit(record: Record, model_id: str) -> str | None:
    """The Hub's commit of `model_id` in the contents of a settings.json: None for another model, for one that is no
    Hub's, and in runs that did not record it yet."""
    commit = record.get("choices", {}).get("model_commit")
    return commit if isinstance(commit, str) and record["settings"].get("MODEL_ID") == model_id else None


def recorded_commit(settings: Settings) -> str | None:
    """The Hub's commit of the model with which the run in OUTPUT_DIR began, and with which it has to continue; None if
    it starts at step 0. `inspect_run` reports what is wrong with the folder."""
    with contextlib.suppress(OSError, ValueError, KeyError, RuntimeError):
        if not settings.OVERWRITE:
            return model_commit(read_sealed(layout.run_folder(settings) / SETTINGS), settings.MODEL_ID)
    return None


def inspect_run(settings: Settings, rows: Sequence[Row], problems: Problems) -> RunState:
    """The state of the run in OUTPUT_DIR. Adds a problem for each reason why this run must not go on there."""
    folder, where = layout.run_folder(settings), f"OUTPUT_DIR={settings.OUTPUT_DIR}"
    if not layout.check_output_dir(settings, problems):
        return RunState(folder)
    before = len(problems)
    layout.check_entries(settings, problems)
    if len(problems) > before:
        return RunState(folder)
    if not folder.exists() or all(path.name in NO_RUN for path in folder.iterdir()):
        archive = layout.zip_path(folder)
        if archive.is_file() and not settings.OVERWRITE:
            fix = f"Move it away, set OVERWRITE=1 to replace it, or {ANOTHER_DIR}"
            problems.add(where, f"{archive} of an earlier run is there", fix)
        return RunState(folder)
    deleting = (folder / DELETING).is_file()
    try:
        record = read_sealed(folder / (DELETING if deleting else SETTINGS))
        recorded, fingerprint, choices = record["settings"], record["data_sha256"], record.get("choices", {})
    except (OSError, ValueError, KeyError) as error:
        fault, fix = "it holds files, but no run of this script (no settings.json)", "Empty it yourself"
        if (folder / SETTINGS).exists():
            fault = f"its settings.json is damaged ({error}): nothing else says what the run was started with"
            fix = "Put another copy in its place (the run's zip may have one)"
        problems.add(where, fault, f"{fix}, or {ANOTHER_DIR}")
        return RunState(folder)
    if settings.OVERWRITE:
        for name in ("MODEL_ID", "INIT_ADAPTER"):
            path = Path(getattr(settings, name) or "/")
            if path.exists() and path.resolve().is_relative_to(folder):
                problems.add("OVERWRITE", f"it would delete the folder that {name} names", f"Move it, or {ANOTHER_DIR}")
        return RunState(folder, exists=True)
    if deleting:
        fault = "OVERWRITE=1 was interrupted while it deleted the run there"
        problems.add(where, fault, f"Set OVERWRITE=1 to delete the rest and start again, or {ANOTHER_DIR}")
        return RunState(folder, exists=True)
    step, checkpoint, faults = find_checkpoint(folder)
    fault_list = "; ".join(f"{path.name}: {fault}" for path, fault in faults.items())
    if not step and (adapter := unresumable_adapter(folder, faults)):
        reason = fault_list or "a run's zip has none"
        fix = f"Use it as it is (python scripts/evaluate.py {shlex.quote(str(folder))})"
        fault = f"it holds {adapter}, but no checkpoint that can be continued ({reason})"
        problems.add(where, fault, f"{fix}, set OVERWRITE=1 to delete it, or {ANOTHER_DIR}")
        return RunState(folder, exists=True)
    complete = complete_steps(folder)
    check_resume(settings, folder, max(step, complete), recorded, problems)
    if rows and fingerprint != data_fingerprint(rows):
        start = Path(settings.OUTPUT_DIR, *([BEST] if (folder / BEST / ADAPTER).is_file() else []))
        fix = f"To learn from these rows too, start from its adapter: set INIT_ADAPTER={shlex.quote(str(start))} and "
        fix += f"{ANOTHER_DIR} (docs/data.md#the-next-day). To continue it, restore DATA, EVAL_DATA and EVAL_SAMPLES"
        if settings.EVAL_DATA is None and settings.EVAL_SAMPLES and settings.EVAL_SHARE:
            fix += "; if DATA is the same, an earlier version held other rows out: finish the run with that version"
        fault, fix = f"the run in {folder} was started on other rows", f"{fix}. OVERWRITE=1 deletes it"
        problems.add("DATA", fault, fix)
    notes = []
    if not problems:
        notes = damage_notes(folder, step, fault_list)
        notes += check_logs(folder, step, checkpoint, where, problems) if checkpoint else []
    return RunState(folder, step, checkpoint, exists=True, choices=choices, notes=tuple(notes), complete_steps=complete)


def unresumable_adapter(folder: Path, faults: Mapping[Path, str]) -> str | None:
    """Names the adapter that training from step 0 would replace; None if there is none. An unpacked zip has one, and so
    has a run whose checkpoints were deleted. `faults` are those of the checkpoints."""
    if (folder / ADAPTER).is_file():  # A run that leaves this file also leaves a checkpoint.
        return "a trained adapter"
    written = [path.name for path, fault in faults.items() if fault != CUT_OFF and (path / ADAPTER).is_file()]
    return f"the adapter of {written[0]}" if written else None


def damage_notes(folder: Path, step: int, fault_list: str) -> list[str]:
    """Notes on damage that does not stop the run from going on at `step`: in later checkpoints, and in best/."""
    notes = []
    if fault_list:
        consequence = f"continues from step {step}" if step else "starts at step 0"
        notes.append(f"{fault_list}: set aside, the run {consequence}")
    if fault := adapter_fault(folder / BEST):
        notes.append(f"{BEST}/: {fault}: set aside, the choice of the best adapter begins again")
    return notes


def check_logs(folder: Path, step: int, checkpoint: Path, where: str, problems: Problems) -> list[str]:
    """Adds a problem for each log that does not begin with the bytes that it held when the checkpoint was written.
    Returns a note on each missing log: the user may have moved a damaged one away."""
    notes = []
    for name, end in read_sealed(checkpoint / MANIFEST)["ends"].items():
        path = folder / name
        if not path.exists():
            notes.append(f"{name} is not there: a new one begins at step {step + 1}")
        elif not begins_with(path, end):
            fault = f"the rows of {name} up to {checkpoint.name} were edited or damaged"
            fix = "Put another copy in its place (the run's zip may have one), move it away to go on without its rows"
            problems.add(where, fault, f"{fix}, set OVERWRITE=1 to start again, or {ANOTHER_DIR}")
    return notes


def check_resume(settings: Settings, folder: Path, step: int, recorded: Record, problems: Problems) -> None:
    """Adds a problem for each setting with which the run in `folder` must not go on from `step`, given the settings
    that it has `recorded`. Recorded settings that this version no longer has are ignored."""
    where, delete = f"OUTPUT_DIR={settings.OUTPUT_DIR}", f"OVERWRITE=1 to delete it, or {ANOTHER_DIR}"
    length = "TOTAL_STEPS" if settings.NUM_TRAIN_EPOCHS is None else "NUM_TRAIN_EPOCHS"
    if step > settings.TOTAL_STEPS:
        fault = f"the run in {folder} has {step} steps, more than {settings.TOTAL_STEPS}"
        fix = f"Set TOTAL_STEPS={step} or higher" if length == "TOTAL_STEPS" else f"Raise {length}"
        problems.add(length, fault, f"{fix}, set {delete}")
    elif step >= settings.TOTAL_STEPS and (folder / COMPLETE).exists():
        fault = f"it holds a run that is complete ({step} of {settings.TOTAL_STEPS} steps)"
        problems.add(where, fault, f"Raise {length} to train on, set {delete}")
    for name, value in dataclasses.asdict(settings).items():
        if name not in MAY_CHANGE and name in recorded and show(recorded[name]) != show(value):
            then, now = (show(setting) or "nothing" for setting in (recorded[name], value))
            fault = f"the run in {folder} was started with {then}, now it is {now}"
            problems.add(name, fault, f"Set {name}={shlex.quote(show(recorded[name]))} to continue it, {delete}")


def prepare_run(state: RunState, settings: Settings, records: Mapping[str, Record]) -> None:
    """Makes OUTPUT_DIR ready: deletes the old run if OVERWRITE=1, cuts back what a resumed run writes again, and writes
    `records`, the contents of JSON files by name."""
    folder = state.folder
    if state.exists and settings.OVERWRITE:
        layout.delete_run(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (COMPLETE, EXIT):  # A complete run goes on if TOTAL_STEPS was raised.
        (folder / name).unlink(missing_ok=True)
    for step, path in checkpoints(folder):
        if step > state.step:  # The run cannot continue from this one: see `find_checkpoint`.
            retire_checkpoint(path)
    rotate_checkpoints(folder, settings.SAVE_TOTAL_LIMIT)  # A kill may have come before the last rotation's end.
    cut_logs(folder, state.checkpoint)
    for name, record in records.items():
        write_sealed(folder / name, record)
    write_text(folder / RUN_ENV, env_text(settings, records.get(SETTINGS, {}).get("sources", {})))
    (folder / DELETING).unlink(missing_ok=True)


def env_text(settings: Settings, sources: Mapping[str, str]) -> str:
    """The settings that come from the environment as lines that a shell reads, without OUTPUT_DIR, because another run
    needs another folder, and OVERWRITE, which would delete one."""
    chosen = [name for name, source in sources.items() if source == "environment"]
    lines = [
        f"{name}={shlex.quote(show(getattr(settings, name)))}"
        for name in chosen
        if name not in ("OUTPUT_DIR", "OVERWRITE")
    ]
    command = "set -a; . run.env; set +a; OUTPUT_DIR=runs/second python train_grpo.py"
    return "\n".join([f"# Starts the same run in another folder: {command}", *lines, ""])


def add_record(folder: Path, name: str, values: Record) -> None:
    write_sealed(folder / name, read_sealed(folder / name) | values)


def cut_logs(folder: Path, checkpoint: Path | None) -> None:
    """Cuts each log back to its length at the checkpoint, because the run writes the later rows again; deletes all logs
    without a checkpoint. A log that was moved away is removed from all manifests, because a new one begins."""
    missing = {name for name in LOGS if not (folder / name).exists()}
    for manifest in [path / MANIFEST for _, path in checkpoints(folder)] if missing else ():
        with contextlib.suppress(OSError, ValueError, KeyError):  # A damaged checkpoint is not continued anyway.
            record = read_sealed(manifest)
            ends = {name: end for name, end in record["ends"].items() if name not in missing}
            write_sealed(manifest, record | {"ends": ends})
    ends = read_sealed(checkpoint / MANIFEST)["ends"] if checkpoint else {}
    for path in (folder / name for name in LOGS):
        if path.name not in ends:
            path.unlink(missing_ok=True)
        elif path.exists():
            os.truncate(path, ends[path.name][0])


def continuation(folder: Path, overwrite: bool) -> str:
    """A clause: what the command of the incomplete run in `folder` does if given again. `overwrite`: its OVERWRITE."""
    if (folder / DELETING).is_file():
        return "the same command deletes the rest and starts at step 0"
    # scripts/demo.sh sets OVERWRITE=1 itself, where it is not set: to leave it out would delete the run.
    command = "the same command WITH OVERWRITE=0" if overwrite else "the same command"
    step, checkpoint, _ = find_checkpoint(folder)
    consequence = f"continues from step {step}" if checkpoint else "starts at step 0: no checkpoint was saved"
    return f"{command} {consequence}"
