# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what is there, and what may be done with it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.data.files import Row, data_fingerprint, find_files
from grpo.run.best import best_fault
from grpo.run.durable import (
    MANIFEST,
    begins_with,
    damage,
    file_sha256,
    read_json,
    read_sealed,
    sync_files,
    write_sealed,
)
from grpo.run.logs import check_columns
from grpo.run.place import (
    ADAPTER,
    BEST,
    COMPLETE,
    DELETING,
    EXIT,
    NO_RUN,
    OTHER,
    SETTINGS,
    RunLock,
    check_neighbours,
    check_own,
    delete_run,
    foreign_files,
    lock_of,
    lock_run,
    unused,
    zip_of,
)
from grpo.settings import MAY_CHANGE, Problems, Settings, load_settings, show


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` (or itself) that exists."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path


# Those that a run goes on without, and what becomes of it where they are damaged.
AGAIN = "what it held is measured again"
RECORDS = {
    "evaluation.json": AGAIN,
    "closed_loop.json": AGAIN,
    COMPLETE: "the run has as many steps as its last checkpoint",
}
LOGS = ("metrics.csv", "completions.csv")


@dataclass(frozen=True)
class RunState:
    """What OUTPUT_DIR holds: the step and folder of its last complete checkpoint (0 and None for a fresh run)."""

    folder: Path
    step: int = 0
    checkpoint: Path | None = None
    exists: bool = False
    choices: dict[str, Any] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()  # what OVERWRITE=1 deletes although no run writes anything of that name
    notes: tuple[str, ...] = ()  # what is damaged, and what becomes of it


def run_folder(settings: Settings) -> Path:
    """OUTPUT_DIR as an absolute path without links, so that the zip has a place beside it."""
    return Path(settings.OUTPUT_DIR).expanduser().resolve()


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint, whole or not, in order."""
    steps = ((path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return sorted((int(step), path) for step, path in steps if step.isdigit())


def was_written(path: Path) -> bool:
    """Whether a checkpoint was written to its end, damaged since or not, and still holds its adapter."""
    cut_off = False
    with contextlib.suppress(OSError, ValueError):  # a manifest that is damaged was written
        cut_off = not read_sealed(path / MANIFEST)
    return not cut_off and (path / ADAPTER).is_file()


def broken(path: Path, step: int) -> str | None:
    """Why the run cannot be continued from a checkpoint, in words; None where it can."""
    if fault := damage(path):
        return fault
    saved = read_json(path / "trainer_state.json", empty=(OSError, ValueError)).get("global_step")
    if saved != step:
        return f"its trainer_state.json is of step {saved}"
    for name, (size, _) in read_sealed(path / MANIFEST)["ends"].items():
        log_path = path.parent / name
        if log_path.is_file() and log_path.stat().st_size < size:  # as in a copy that was made while the run wrote
            return f"{name} is shorter than it was then (a copy of it, or moving it away, mends that)"
    return None


def find_checkpoint(folder: Path) -> tuple[int, Path | None, list[str]]:
    """Step and folder of the last checkpoint that can be continued, 0 and None without one; and what is wrong with each
    later one."""
    faults = []
    for step, path in reversed(checkpoints(folder)):
        fault = broken(path, step)
        if not fault:
            return step, path, faults
        faults.append(f"{path.name}: {fault}")
    return 0, None, faults


def last_checkpoint(folder: Path) -> tuple[int, Path | None]:
    """Step and folder of the last complete checkpoint: one that was cut off or damaged does not count."""
    return find_checkpoint(folder)[:2]


def mark_complete(folder: Path, steps: int) -> None:
    """Say that a run has all its `steps`, and which adapter it came to, once all that it left is on the disk."""
    sync_files(folder)
    write_sealed(folder / COMPLETE, {"steps": steps, "adapter_sha256": file_sha256(folder / ADAPTER)})


def rotate_checkpoints(folder: Path, limit: int) -> None:
    """Delete all checkpoints but the `limit` last ones, by step: modification times tell nothing after a copy, or where the
    clock was wrong."""
    for _, path in checkpoints(folder)[:-limit]:
        shutil.rmtree(path, ignore_errors=True)


def complete_steps(folder: Path) -> int:
    """Steps of the complete run in `folder`; 0 where it is not complete, or does not say."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(read_sealed(folder / COMPLETE)["steps"])
    return 0


def unresumable(folder: Path, step: int) -> str | None:
    """What training on from `step`, that of the last complete checkpoint, would replace although it is of a later step;
    None where there is no such thing. An unpacked zip is like that, and a run whose checkpoints were deleted."""
    steps = complete_steps(folder)
    if steps > step and not (step and (folder / f"checkpoint-{steps}").is_dir()):  # damaged: `prepare_run` keeps both
        return f"a complete run of {steps} steps"
    if not step and (folder / ADAPTER).is_file():  # no run leaves it without a checkpoint
        return "a trained adapter"
    stripped = [path.name for _, path in checkpoints(folder) if was_written(path)]
    return f"the adapter of {stripped[-1]}" if stripped and not step else None


def check_place(settings: Settings, problems: Problems) -> bool:
    """Checks that OUTPUT_DIR, and the lock and the zip beside it, can be written. Returns whether a run can lie there."""
    folder, where = run_folder(settings), f"OUTPUT_DIR={settings.OUTPUT_DIR}"
    parent = existing_parent(folder)
    if not settings.OUTPUT_DIR.strip() or not parent.is_dir():
        fault = f"{parent} is a file, not a folder" if settings.OUTPUT_DIR.strip() else "it is empty"
        problems.add(where, fault, "Name a folder for the run")
        return False
    if not os.access(parent, os.W_OK):
        problems.add(where, f"{parent} is not writable", "Choose a folder that is")
    if folder.parent == folder or not os.access(existing_parent(folder.parent), os.W_OK):
        problems.add(where, f"{folder}.zip could not be written beside it", "Choose a folder inside a writable one")
    if folder.name:
        check_neighbours(folder, where, problems)
    return bool(folder.name)


def lock_output_dir(environ: Mapping[str, str]) -> tuple[RunLock | None, str | None]:
    """The lock of OUTPUT_DIR, or why it cannot be had. Both are None where settings or packages cannot be used: then
    the checks refuse the start, with every problem at once."""
    settings, _, problems = load_settings(environ)
    if not problems:
        check_place(settings, problems)
    if problems:
        return None, None
    folder, reason = run_folder(settings), "another process is writing there. Wait for it"
    try:
        if lock := lock_run(folder):
            return lock, None
    except ImportError:
        return None, None
    except OSError as error:
        disk = full_disk(error, folder)
        reason = f"no space left on the disk of {disk}" if disk else str(error)
        reason = f"its lock {lock_of(folder)} cannot be taken ({reason}). Mend that"
    return None, f"OUTPUT_DIR={settings.OUTPUT_DIR}: {reason}, or {OTHER}"


def inspect_run(settings: Settings, rows: Sequence[Row], problems: Problems) -> RunState:
    """What is in OUTPUT_DIR, with a problem wherever this run must not go on there."""
    folder, where = run_folder(settings), f"OUTPUT_DIR={settings.OUTPUT_DIR}"
    if not check_place(settings, problems):
        return RunState(folder)
    if not folder.exists() or all(path.name in NO_RUN for path in folder.iterdir()):
        archive = zip_of(folder)
        if archive.is_file() and not settings.OVERWRITE:
            problems.add(where, f"{archive} of an earlier run is there", f"Move it away, set OVERWRITE=1, or {OTHER}")
        return RunState(folder)
    deleting = (folder / DELETING).is_file()
    try:
        record = read_sealed(folder / (DELETING if deleting else SETTINGS))
        before, fingerprint, choices = record["settings"], record["data_sha256"], record.get("choices") or {}
        if not isinstance(before, dict) or not isinstance(choices, dict):
            raise ValueError("it holds no settings")
    except (OSError, ValueError, KeyError) as error:
        fault, fix = "it holds files, but no run of this script (no settings.json)", "Empty it yourself"
        if (folder / SETTINGS).exists():
            fault = (
                f"its settings.json is damaged, or is no run's ({error}): nothing says what the run was started with"
            )
            fix = f"Put the one of {copies(folder)} in its place"
        problems.add(where, fault, f"{fix}, or {OTHER}")
        return RunState(folder)
    if settings.OVERWRITE:
        for path in sorted(path for path in needed_files(settings) if path.is_relative_to(folder)):
            problems.add("OVERWRITE", f"it would delete {path}, which this run needs", f"Move that away, or {OTHER}")
        return RunState(folder, exists=True, foreign=foreign_files(folder))
    if deleting:
        fault = "an OVERWRITE=1 that was deleting the run in it did not come to its end"
        problems.add(where, fault, f"Set OVERWRITE=1 to delete the rest and start again, or {OTHER}")
        return RunState(folder, exists=True)
    check_own(folder, where, problems)
    step, checkpoint, faults = find_checkpoint(folder)
    if lost := unresumable(folder, step):
        reason = "; ".join(faults) if faults and not step else "a run's zip has none"
        use = f"Use it as it is (python scripts/evaluate.py --adapter {shlex.quote(str(folder))})"
        fault = f"it holds {lost}, but no checkpoint that can be continued ({reason})"
        problems.add(where, fault, f"{use}, set OVERWRITE=1 to delete it, or {OTHER}")
        return RunState(folder, exists=True)
    check_resume(settings, folder, max(step, complete_steps(folder)), before, problems)
    if rows and fingerprint != data_fingerprint(rows):
        fix = f"Restore the data to continue it{earlier_heldout(settings, before)}, set OVERWRITE=1, or {OTHER}"
        problems.add("DATA", f"the run in {folder} was started on other rows", fix)
    notes = [] if problems else damage_notes(folder, step, faults)
    if checkpoint and not problems:
        notes += check_logs(folder, step, checkpoint, where, problems)
    return RunState(folder, step, checkpoint, exists=True, choices=choices, notes=tuple(notes))


def damage_notes(folder: Path, step: int, faults: Sequence[str]) -> list[str]:
    """What is damaged in a run that goes on all the same, from `step`: later checkpoints with their `faults`, best/ and
    records."""
    notes = []
    if faults:
        goes_on = f"continues from step {step}" if step else "starts at step 0"
        notes.append(f"{'; '.join(faults)}: set aside, the run {goes_on}")
    if fault := best_fault(folder / BEST):
        notes.append(f"{BEST}/: {fault}: set aside, the choice of the best adapter begins again")
    for name, consequence in RECORDS.items():
        with contextlib.suppress(FileNotFoundError):
            try:
                read_sealed(folder / name)
            except ValueError as error:
                notes.append(f"{name} is damaged ({error}): {consequence}")
    return notes


def check_logs(folder: Path, step: int, checkpoint: Path, where: str, problems: Problems) -> list[str]:
    """Adds a problem where a log does not begin with the bytes that it held when the checkpoint was made, or has other
    columns than today. Returns a note on each log that is missing: its owner may have moved it away to go on."""
    notes = []
    for name, end in read_sealed(checkpoint / MANIFEST)["ends"].items():
        path = folder / name
        if not path.exists():
            notes.append(f"{name} is not there: it begins again at step {step + 1}")
        elif not begins_with(path, end):
            fault = f"{name} is no longer what was written until {checkpoint.name}: it was edited or damaged"
            fix = f"Put the one of {copies(folder)} in its place, move it away to go on without its rows"
            problems.add(where, fault, f"{fix}, set OVERWRITE=1 to start again, or {OTHER}")
        elif fault := check_columns(path):
            fix = "Finish the run with the version that began it (up to commit 7add771: with that one)"
            problems.add(where, f"{name}: {fault}", f"{fix}, set OVERWRITE=1 to start again, or {OTHER}")
    return notes


def earlier_heldout(settings: Settings, before: Mapping[str, Any]) -> str:
    """The part of a sentence that names the settings with which a run held out other rows of DATA than it would now;
    empty where they are the same."""
    now = {"EVAL_DATA": settings.EVAL_DATA, "EVAL_SAMPLES": settings.EVAL_SAMPLES}
    then = {name: before.get(name) for name in now}
    changed = {"EVAL_DATA"} if then["EVAL_DATA"] != now["EVAL_DATA"] else set()
    changed |= {"EVAL_SAMPLES"} if bool(then["EVAL_SAMPLES"]) != bool(now["EVAL_SAMPLES"]) else set()
    values = " ".join(f"{name}={show(then[name])}" for name in now if name in changed)
    return f", with {values} as at its start if that is what changed (held-out rows do not train)" if values else ""


def copies(folder: Path) -> str:
    """Where else a file of the run in `folder` may be."""
    return f"{folder.name}.zip or of another copy" if zip_of(folder).is_file() else "another copy"


def check_resume(settings: Settings, folder: Path, step: int, before: Mapping[str, Any], problems: Problems) -> None:
    """The run in `folder`, which has come to `step` with the settings `before`, may go on with these settings. A setting
    that there is no longer hinders nothing."""
    where, delete = f"OUTPUT_DIR={settings.OUTPUT_DIR}", f"OVERWRITE=1 to delete it, or {OTHER}"
    length = "TOTAL_STEPS" if settings.NUM_TRAIN_EPOCHS is None else "NUM_TRAIN_EPOCHS"
    if step > settings.TOTAL_STEPS:
        what = f"the run in {folder} has {step} steps, more than {settings.TOTAL_STEPS}"
        more = f"Set TOTAL_STEPS={step} or higher" if length == "TOTAL_STEPS" else f"Raise {length}"
        problems.add(length, what, f"{more}, set {delete}")
    elif step >= settings.TOTAL_STEPS and (folder / COMPLETE).exists():
        what = f"it holds a run that is complete ({step} of {settings.TOTAL_STEPS} steps)"
        problems.add(where, what, f"Raise {length} to train on, set {delete}")
    for name, value in dataclasses.asdict(settings).items():
        if name not in MAY_CHANGE and name in before and show(before[name]) != show(value):
            what = f"the run in {folder} was started with {show(before[name]) or 'nothing'}, now it is {show(value) or 'nothing'}"
            problems.add(name, what, f"Set {name}={show(before[name])} to continue it, {delete}")


def needed_files(settings: Settings) -> set[Path]:
    """What this run reads and must not be deleted: data, model, start adapter, the user's reward functions with all that they import, the
    working folder."""
    used = {Path.cwd()}
    for name in ("DATA", "EVAL_DATA", "EVAL_PROFILE"):  # also those that this run has no use for
        used.update(find_files(name, getattr(settings, name) or "", Problems()))
    for folder in filter(None, (settings.MODEL_ID, settings.INIT_ADAPTER)):
        used |= {Path(folder)} if Path(folder).exists() else set()
    files = (getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()])
    return {path.resolve() for path in used | {Path(file) for file in files if file}}


def prepare_run(run: RunState, settings: Settings, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Make OUTPUT_DIR ready: delete what OVERWRITE=1 allows, drop what a resumed run will write again, write `records`, by
    the name of their JSON file."""
    folder = run.folder
    if run.exists and settings.OVERWRITE:
        delete_run(folder)
    folder.mkdir(parents=True, exist_ok=True)
    later = [path for step, path in checkpoints(folder) if step > run.step]  # cut off, damaged, or without its logs
    if later and (folder / COMPLETE).exists():  # what the finished run was for
        kept = unused(folder, f"superseded-adapter-{complete_steps(folder) or 'last'}")
        kept.mkdir()
        for path in [*folder.glob("adapter_*"), *folder.glob("README.md")]:
            shutil.copy2(path, kept)
    (folder / COMPLETE).unlink(missing_ok=True)  # TOTAL_STEPS was raised
    (folder / EXIT).unlink(missing_ok=True)
    for path in later:
        retire_checkpoint(path)
    cut_logs(folder, run.checkpoint)
    for name, record in records.items():
        write_sealed(folder / name, record)


def cut_logs(folder: Path, checkpoint: Path | None) -> None:
    """Cut each log back to what it held when the checkpoint was made: the run writes the later rows again. Without a
    checkpoint it begins them anew. A log that was moved away has no end in any checkpoint any more: a new one begins."""
    missing = [name for name in LOGS if not (folder / name).exists()]
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


def retire_checkpoint(checkpoint: Path) -> None:
    """Rename a checkpoint that cannot be continued to `superseded-checkpoint-N`: the Trainer neither counts nor deletes
    it then. One without an adapter is deleted, and so is a manifest that was half written."""
    if not (checkpoint / ADAPTER).is_file():
        shutil.rmtree(checkpoint)
        return
    for half in checkpoint.glob("*.tmp"):
        half.unlink()
    checkpoint.rename(unused(checkpoint.parent, f"superseded-{checkpoint.name}"))


def continuation(folder: Path, settings: Mapping[str, Any]) -> str:
    """What the same command does with the run in `folder` that ended before it was complete."""
    if (folder / DELETING).is_file():
        return "the same command deletes the rest and starts at step 0"
    again = "the same command WITHOUT OVERWRITE=1" if settings.get("OVERWRITE") else "the same command"
    step, checkpoint = last_checkpoint(folder)
    return f"{again} continues from step {step}" if checkpoint else f"{again} starts at step 0: no checkpoint was saved"


TORCH_SAYS = ("inline_container", "iostream error")  # of its zip's writer, and of the stream below it


def full_disk(error: BaseException, folder: Path) -> str | None:
    """The disk that is full of bytes or of files, where an exception or one that it came from says so; None for any other.

    safetensors and torch.save raise no OSError; what torch says (TORCH_SAYS) it says of every failed write.
    """
    ours = f"OUTPUT_DIR={folder}"
    places = {ours: str(existing_parent(folder))} | {
        name: name for name in (tempfile.gettempdir(), "/dev/shm") if Path(name).exists()
    }
    full = {name: name for name, place in places.items() if shutil.disk_usage(place).free < 2**26}
    for name, place in places.items():
        files = os.statvfs(place)
        if files.f_files and not files.f_favail:  # a file system without a table of inodes says 0 of 0
            full.setdefault(name, f"{name} (no inodes left: delete files, however small)")
    cause: BaseException | None = error
    while cause is not None:
        number, text = getattr(cause, "errno", None), str(cause)
        if number == errno.ENOSPC or "No space left on device" in text:
            return next(iter(full.values()), f"{ours} (it has room: see `df -i` for its inodes, or a quota is met)")
        torch_failed = ours in full and any(words in text for words in TORCH_SAYS)
        if number == errno.EDQUOT or "Disk quota exceeded" in text or torch_failed:
            return next(iter(full.values()), ours)
        cause = cause.__cause__ or cause.__context__
    return None
