# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what is there, and what may be done with it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.data.files import Row, data_fingerprint, find_files
from grpo.data.scoring import REWARD_INTERFACE
from grpo.run.best import best_fault
from grpo.run.durable import damage, file_sha256, matches, read_manifest, read_sealed, sync_files, write_sealed
from grpo.run.log_rows import LogRows, read_log
from grpo.run.place import (
    ADAPTER,
    BEST,
    COMPLETE,
    DELETING,
    EXIT,
    NO_RUN,
    OTHER,
    SETTINGS,
    check_neighbours,
    check_own,
    delete_run,
    foreign_files,
    last_change,
    lock_of,
    unused,
    zip_of,
)
from grpo.settings import MAY_CHANGE, Problems, Settings, show

if TYPE_CHECKING:
    from filelock import FileLock


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
CHECKPOINT_FILES = ("trainer_state.json", ADAPTER, "optimizer.pt", "scheduler.pt")


@dataclass(frozen=True)
class RunState:
    """What OUTPUT_DIR holds: the step and folder of its last complete checkpoint (0 and None for a fresh run)."""

    folder: Path
    step: int = 0
    checkpoint: Path | None = None
    exists: bool = False
    choices: dict[str, Any] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()  # what OVERWRITE=1 deletes although no run writes anything of that name
    changed: int = 0  # with OVERWRITE=1: when the folder last did (ns), see `last_change`
    notes: tuple[str, ...] = ()  # what was found damaged, and what becomes of it


def run_folder(settings: Settings) -> Path:
    """OUTPUT_DIR as an absolute path without links, so that the zip has a place beside it."""
    return Path(settings.OUTPUT_DIR).expanduser().resolve()


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint, whole or not, in order."""
    steps = ((path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return sorted((int(step), path) for step, path in steps if step.isdigit())


def was_written(path: Path) -> bool:
    """Whether a checkpoint was written to its end, damaged since or not, and still holds its adapter."""
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError):  # damaged, so it was there: its state may be damaged as well
        return (path / ADAPTER).is_file()
    with contextlib.suppress(ValueError, OSError, RecursionError):
        if manifest is None:  # trainer_state.json was the end
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        return manifest != {} and (path / ADAPTER).is_file()
    return False


def broken(path: Path, step: int) -> str | None:
    """Why the run cannot be continued from a checkpoint, in words; None where it can."""
    lost = [name for name in CHECKPOINT_FILES if not (path / name).is_file()]
    if fault := damage(path) or (f"{lost[0]} is missing" if lost else None):
        return fault
    try:
        found = json.loads((path / "trainer_state.json").read_text(encoding="utf-8")).get("global_step", step)
    except (OSError, ValueError, AttributeError, RecursionError):
        return "trainer_state.json is damaged"
    return None if found == step else f"its trainer_state.json is of step {found}"


def find_checkpoint(folder: Path, most: int | None = None) -> tuple[int, Path | None, list[str]]:
    """Step and folder of the last checkpoint that can be continued, not after step `most`, 0 and None without one; and what
    is wrong with each that is later."""
    faults = []
    for step, path in reversed(checkpoints(folder)):
        if most is None or step <= most:
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


def read_logs(folder: Path, step: int, checkpoint: Path | None, completions: int | None) -> dict[str, LogRows]:
    """The logs of the run in `folder` by their names, read for going on after `step` from its checkpoint: metrics.csv with
    one row a step, completions.csv with `completions` of them (None: unknown)."""
    record = (checkpoint and read_manifest(checkpoint)) or {}
    headers, ends = record.get("logs", {}), record.get("ends", {})
    rows = {"metrics.csv": 1, "completions.csv": completions}
    return {
        name: read_log(folder / name, step, count, headers.get(name, ()), ends.get(name))
        for name, count in rows.items()
    }


def log_notes(folder: Path, step: int, logs: Mapping[str, LogRows]) -> list[str]:
    """What is repaired in the logs of a run that continues from `step`, and which rows say something else than before."""
    notes = [f"{name}: {words}" for name, rows in logs.items() for words in rows.repairs]
    for name in [name for name, rows in logs.items() if rows.altered]:
        right = 0
        for earlier, path in checkpoints(folder):
            with contextlib.suppress(OSError, ValueError):
                end = (read_manifest(path) or {}).get("ends", {}).get(name)
                right = earlier if earlier < step and end and matches(folder / name, end) else right
        what = f"the text of rows of steps {right + 1} to {step} is not what was written"
        notes.append(f"{name}: {what}. They stay as they are: nothing is learned from them")
    return notes


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


def inspect_run(settings: Settings, rows: Sequence[Row], problems: Problems) -> RunState:
    """What is in OUTPUT_DIR, with a problem wherever this run must not go on there."""
    folder, where = run_folder(settings), f"OUTPUT_DIR={settings.OUTPUT_DIR}"
    parent = existing_parent(folder)
    if not settings.OUTPUT_DIR.strip() or not parent.is_dir():
        what = f"{parent} is a file, not a folder" if settings.OUTPUT_DIR.strip() else "it is empty"
        problems.add(where, what, "Name a folder for the run")
        return RunState(folder)
    if not os.access(parent, os.W_OK):
        problems.add(where, f"{parent} is not writable", "Choose a folder that is")
    if folder.parent == folder or not os.access(existing_parent(folder.parent), os.W_OK):
        problems.add(where, f"{folder}.zip could not be written beside it", "Choose a folder inside a writable one")
    if not folder.name:
        return RunState(folder)
    check_neighbours(folder, where, problems)
    if not folder.exists() or all(path.name in NO_RUN for path in folder.iterdir()):
        archive = zip_of(folder)
        if archive.is_file() and not settings.OVERWRITE:
            problems.add(where, f"{archive} of an earlier run is there", f"Move it away, set OVERWRITE=1, or {OTHER}")
        return RunState(folder)
    half = (folder / DELETING).is_file()
    try:
        record = read_sealed(folder / (DELETING if half else SETTINGS))
        before, fingerprint, choices = record["settings"], record["data_sha256"], record.get("choices") or {}
        if not isinstance(before, dict) or not isinstance(choices, dict):
            raise ValueError("it holds no settings")
    except (OSError, ValueError, KeyError) as error:
        what, fix = "it holds files, but no run of this script (no settings.json)", "Empty it yourself"
        if (folder / SETTINGS).exists():
            what = f"its settings.json is damaged, or is no run's ({error}): nothing says what the run was started with"
            fix = f"Put the one of {copies(folder)} in its place"
        problems.add(where, what, f"{fix}, or {OTHER}")
        return RunState(folder)
    if settings.OVERWRITE:
        for path in sorted(path for path in needed_files(settings) if path.is_relative_to(folder)):
            problems.add("OVERWRITE", f"it would delete {path}, which this run needs", f"Move that away, or {OTHER}")
        return RunState(folder, exists=True, foreign=foreign_files(folder), changed=last_change(folder))
    if half:
        what = "an OVERWRITE=1 that was deleting the run in it did not come to its end"
        problems.add(where, what, f"Set OVERWRITE=1 to delete the rest and start again, or {OTHER}")
        return RunState(folder, exists=True)
    check_own(folder, where, problems)
    step, checkpoint, faults = find_checkpoint(folder)
    if settings.RESUME != "never" and (lost := unresumable(folder, step)):
        what = f"it holds {lost}, but not the optimizer state that it takes to continue (a run's zip has none)"
        if faults and not step:
            what += f"; {'; '.join(faults)}"
        use = f"Use it as it is (python scripts/evaluate.py --adapter {shlex.quote(str(folder))})"
        problems.add(where, what, f"{use}, set OVERWRITE=1 to delete it, or {OTHER}")
        return RunState(folder, exists=True)
    check_resume(settings, folder, max(step, complete_steps(folder)), before, problems)
    if checkpoint:
        check_interface(folder, before, choices, problems)
    if rows and fingerprint != data_fingerprint(rows):
        fix = f"Restore the data to continue it{earlier_heldout(settings, before)}, set OVERWRITE=1, or {OTHER}"
        problems.add("DATA", f"the run in {folder} was started on other rows", fix)
    if problems:
        return RunState(folder, step, checkpoint, exists=True, choices=choices)
    step, checkpoint, notes = check_logs(settings, folder, step, checkpoint, problems)
    if faults:
        notes.insert(0, f"{'; '.join(faults)}: set aside, the run {goes_on(step)}")
    if checkpoint and read_manifest(checkpoint) is None:
        notes.append(f"{checkpoint.name} has no manifest.json (an earlier version wrote it): taken without a check")
    if fault := best_fault(folder / BEST):
        notes.append(f"{BEST}/: {fault}: set aside, the choice of the best adapter begins again")
    for name, becomes in RECORDS.items():
        with contextlib.suppress(FileNotFoundError):
            try:
                read_sealed(folder / name)
            except ValueError as error:
                notes.append(f"{name} is damaged ({error}): {becomes}")
    return RunState(folder, step, checkpoint, exists=True, choices=choices, notes=tuple(notes))


def earlier_heldout(settings: Settings, before: Mapping[str, Any]) -> str:
    """The part of a sentence that names the settings with which a run held out other rows of DATA than it would now;
    empty where they are the same. Earlier versions held out none: their runs have a file as EVAL_DATA."""
    now = {"EVAL_DATA": settings.EVAL_DATA, "EVAL_SAMPLES": settings.EVAL_SAMPLES}
    then = {name: before.get(name) for name in now}
    changed = {"EVAL_DATA"} if then["EVAL_DATA"] != now["EVAL_DATA"] else set()
    changed |= {"EVAL_SAMPLES"} if bool(then["EVAL_SAMPLES"]) != bool(now["EVAL_SAMPLES"]) else set()
    values = " ".join(f"{name}={show(then[name])}" for name in now if name in changed)
    return f", with {values} as at its start if that is what changed (held-out rows do not train)" if values else ""


def copies(folder: Path) -> str:
    """Where else a file of the run in `folder` may be."""
    return f"{folder.name}.zip or of another copy" if zip_of(folder).is_file() else "another copy"


def goes_on(step: int) -> str:
    return f"continues from step {step}" if step else "starts at step 0"


def check_logs(
    settings: Settings, folder: Path, step: int, checkpoint: Path | None, problems: Problems
) -> tuple[int, Path | None, list[str]]:
    """The checkpoint to continue from, the last one to which both logs are whole, and what is repaired in them; a problem
    where there is none."""
    logs = read_logs(folder, step, checkpoint, settings.completions_per_step)
    gaps = {name: rows.whole_to for name, rows in logs.items() if rows.whole_to < step}
    if not gaps:
        return step, checkpoint, log_notes(folder, step, logs)
    whole = min(gaps.values())
    what = " and ".join(f"{name} is not whole at step {last + 1}" for name, last in gaps.items())
    earlier, path, _ = find_checkpoint(folder, whole)
    if path is None:
        what = f"{what}, and no checkpoint is before it"
        fix = f"Put the log of {copies(folder)} in its place, set OVERWRITE=1 to start again"
        problems.add(f"OUTPUT_DIR={settings.OUTPUT_DIR}", what, f"{fix}, or {OTHER}")
        return step, checkpoint, []
    notes = [f"{what}: later checkpoints are set aside, the run {goes_on(earlier)}"]
    logs = read_logs(folder, earlier, path, settings.completions_per_step)
    return earlier, path, notes + log_notes(folder, earlier, logs)


def check_resume(settings: Settings, folder: Path, step: int, before: Mapping[str, Any], problems: Problems) -> None:
    """The run in `folder`, which has come to `step` with the settings `before`, may go on with these settings. A setting
    that there is no longer hinders nothing."""
    where, delete = f"OUTPUT_DIR={settings.OUTPUT_DIR}", f"OVERWRITE=1 to delete it, or {OTHER}"
    length = "TOTAL_STEPS" if settings.NUM_TRAIN_EPOCHS is None else "NUM_TRAIN_EPOCHS"
    if settings.RESUME == "never":
        problems.add(where, f"it holds a run (last checkpoint: step {step}) and RESUME=never", f"Set {delete}")
    elif step > settings.TOTAL_STEPS:
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


def check_interface(folder: Path, before: Mapping[str, Any], choices: Mapping[str, Any], problems: Problems) -> None:
    """The run in `folder`, begun with the settings `before`, called functions of the user's own as they are called
    now. Those of this project earn the same by either way."""
    if ":" in str(before.get("REWARDS")) and choices.get("reward_interface", 1) != REWARD_INTERFACE:
        what = (
            f"the run in {folder} began when functions of your own were given other prompts and completions "
            "(CHANGELOG.md): its rewards would change on the way"
        )
        fix = "Continue it with the version of this project that began it, set OVERWRITE=1 to begin anew"
        problems.add("REWARDS", what, f"{fix}, or {OTHER}")


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
    for log in read_logs(folder, run.step, run.checkpoint, settings.completions_per_step).values():
        log.write()
    for name, record in records.items():
        write_sealed(folder / name, record)


def retire_checkpoint(checkpoint: Path) -> None:
    """Rename a checkpoint that cannot be continued to `superseded-checkpoint-N`: the Trainer neither counts nor deletes
    it then. One without an adapter is deleted, and so is a manifest that was half written."""
    if not (checkpoint / ADAPTER).is_file():
        shutil.rmtree(checkpoint)
        return
    for half in checkpoint.glob("*.tmp"):
        half.unlink()
    checkpoint.rename(unused(checkpoint.parent, f"superseded-{checkpoint.name}"))


def lock_run(folder: Path) -> FileLock | None:
    """A lock file beside OUTPUT_DIR, held until this process ends; None where another process holds it. Raises OSError
    where it cannot be made; filelock follows no link."""
    from filelock import FileLock, Timeout  # late: where packages are missing, the preflight is to say so

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(lock_of(folder), blocking=False)
    with contextlib.suppress(Timeout):
        lock.acquire()
    return lock if lock.is_locked else None


def continuation(folder: Path, settings: Mapping[str, Any]) -> str:
    """What the same command does with the run in `folder` that ended before it was complete."""
    hinders = ["OVERWRITE=1"] * bool(settings.get("OVERWRITE")) + ["RESUME=never"] * (settings.get("RESUME") == "never")
    if (folder / DELETING).is_file():
        return "the same command deletes the rest and starts at step 0"
    again = "the same command" + (f" WITHOUT {' and '.join(hinders)}" if hinders else "")
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
