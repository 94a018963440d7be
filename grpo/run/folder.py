# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what is there, and what may be done with it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.data.files import Row, data_fingerprint, find_files
from grpo.run.files import whole_file
from grpo.run.logs import trim_csv
from grpo.settings import MAY_CHANGE, Problems, Settings, show

if TYPE_CHECKING:
    from filelock import FileLock


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` (or itself) that exists."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path


COMPLETE = "complete.json"  # the very last file that a run writes, after its zip
ADAPTER = "adapter_model.safetensors"
BEST = "best"  # folder of the best evaluated adapter (grpo/run/best.py)
SETTINGS, DELETING = "settings.json", "deleting.json"  # what the former is called while OVERWRITE=1 deletes the rest
NO_RUN = {
    SETTINGS + ".tmp",
    "lost+found",
}  # a kill in a run's first write leaves the one, a new file system has the other
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


def run_folder(settings: Settings) -> Path:
    """OUTPUT_DIR as an absolute path without links, so that the zip has a place beside it."""
    return Path(settings.OUTPUT_DIR).expanduser().resolve()


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint, whole or not, in order."""
    steps = ((path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return sorted((int(step), path) for step, path in steps if step.isdigit())


def was_written(path: Path) -> bool:
    """Whether a checkpoint was written to its end, which is trainer_state.json, and still holds its adapter."""
    with contextlib.suppress(ValueError, OSError):
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        return (path / ADAPTER).is_file()
    return False


def last_checkpoint(folder: Path) -> tuple[int, Path | None]:
    """Step and folder of the last complete checkpoint: one that was cut off while it was written does not count."""
    for step, path in reversed(checkpoints(folder)):
        if was_written(path) and all((path / name).is_file() for name in CHECKPOINT_FILES):
            return step, path
    return 0, None


def unresumable(folder: Path, step: int) -> str | None:
    """What training on from `step`, that of the last complete checkpoint, would replace although it is of a later step;
    None where there is no such thing. An unpacked zip is like that, and a run whose checkpoints were deleted."""
    steps = 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        steps = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))["steps"]
    if steps > step:
        return f"a complete run of {steps} steps"
    if not step and (folder / ADAPTER).is_file():  # no run leaves it without a checkpoint
        return "a trained adapter"
    stripped = [path.name for _, path in checkpoints(folder) if was_written(path)]
    return f"the adapter of {stripped[-1]}" if stripped and not step else None


OTHER = "choose another OUTPUT_DIR"
OWN = re.compile(
    r"(superseded-)?checkpoint-\d+(\.\d+)?|(metrics|completions)(\.superseded)?\.csv|best|best\.old|report|report\.html|.*\.tmp"
    r"|(settings|deleting|versions|evaluation|closed_loop|complete|adapter_config|.*token.*)\.json|training\.log|README\.md"
    r"|adapter_model\.safetensors|chat_template\.jinja|tokenizer\.model|training_args\.bin|runs"  # runs: tensorboard's
)


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
        record = json.loads((folder / (DELETING if half else SETTINGS)).read_text(encoding="utf-8"))
        before, fingerprint = record["settings"], record["data_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        what = "it holds files, but no run of this script (no readable settings.json)"
        problems.add(where, what, f"Empty it yourself, or {OTHER}")
        return RunState(folder)
    if settings.OVERWRITE:
        for path in sorted(path for path in needed_files(settings) if path.is_relative_to(folder)):
            problems.add("OVERWRITE", f"it would delete {path}, which this run needs", f"Move that away, or {OTHER}")
        return RunState(folder, exists=True, foreign=foreign_files(folder), changed=last_change(folder))
    if half:
        what = "an OVERWRITE=1 that was deleting the run in it did not come to its end"
        problems.add(where, what, f"Set OVERWRITE=1 to delete the rest and start again, or {OTHER}")
        return RunState(folder, exists=True)
    step, checkpoint = last_checkpoint(folder)
    if settings.RESUME != "never" and (lost := unresumable(folder, step)):
        what = f"it holds {lost}, but not the optimizer state that it takes to continue (a run's zip has none)"
        use = f"Use it as it is (python scripts/evaluate.py --adapter {shlex.quote(str(folder))})"
        problems.add(where, what, f"{use}, set OVERWRITE=1 to delete it, or {OTHER}")
        return RunState(folder, exists=True)
    check_resume(settings, folder, step, before, problems)
    if rows and fingerprint != data_fingerprint(rows):
        fix = f"Restore the data to continue it, set OVERWRITE=1, or {OTHER}"
        problems.add("DATA", f"the run in {folder} was started on other rows", fix)
    return RunState(folder, step, checkpoint, exists=True, choices=record.get("choices") or {})


def zip_of(folder: Path) -> Path:
    """OUTPUT_DIR.zip."""
    return folder.with_name(folder.name + ".zip")


def lock_of(folder: Path) -> Path:
    """The lock file beside OUTPUT_DIR."""
    return folder.with_name(f".{folder.name}.lock")


def check_neighbours(folder: Path, where: str, problems: Problems) -> None:
    """What a run writes beside its folder can be written: nothing else has these names, and the lock is no link, which
    others may have put into a shared folder to have its target written to."""
    lock, archive = lock_of(folder), zip_of(folder)
    if lock.is_symlink() or (lock.exists() and not (lock.is_file() and os.access(lock, os.W_OK))):
        what = "a link" if lock.is_symlink() else "not a file that you may write"
        problems.add(where, f"its lock {lock} is {what}", f"Remove that, or {OTHER}")
    if archive.exists() and not archive.is_file():
        problems.add(where, f"its zip {archive} is not a file", f"Move that away, or {OTHER}")


def foreign_files(folder: Path) -> tuple[str, ...]:
    """Names in OUTPUT_DIR of what no run of this script writes; inside of a run's own folders nobody looks."""
    names = (path.name + "/" * path.is_dir() for path in sorted(folder.iterdir()))
    return tuple(name for name in names if not OWN.fullmatch(name.rstrip("/")) and name.rstrip("/") not in NO_RUN)


def last_change(folder: Path) -> int:
    """When something in OUTPUT_DIR was last written, made or deleted (ns since 1970); its subfolders' contents aside."""
    return max(path.lstat().st_mtime_ns for path in (folder, *folder.iterdir()))


def check_resume(settings: Settings, folder: Path, step: int, before: Mapping[str, Any], problems: Problems) -> None:
    """The run in `folder`, at `step` and with the settings `before`, may go on with these settings. A setting that there
    is no longer hinders nothing."""
    where, delete = f"OUTPUT_DIR={settings.OUTPUT_DIR}", f"OVERWRITE=1 to delete it, or {OTHER}"
    if settings.RESUME == "never":
        problems.add(where, f"it holds a run (last checkpoint: step {step}) and RESUME=never", f"Set {delete}")
    elif step > settings.TOTAL_STEPS:
        what = f"the run in {folder} has {step} steps, more than {settings.TOTAL_STEPS}"
        problems.add("TOTAL_STEPS", what, f"Set TOTAL_STEPS={step} or higher, {delete}")
    elif step >= settings.TOTAL_STEPS and (folder / COMPLETE).exists():
        what = f"it holds a run that is complete ({step} of {settings.TOTAL_STEPS} steps)"
        problems.add(where, what, f"Raise TOTAL_STEPS to train on, set {delete}")
    for name, value in dataclasses.asdict(settings).items():
        if name not in MAY_CHANGE and name in before and show(before[name]) != show(value):
            what = f"the run in {folder} was started with {show(before[name])}, now it is {show(value)}"
            problems.add(name, what, f"Set {name}={show(before[name])} to continue it, {delete}")


def needed_files(settings: Settings) -> set[Path]:
    """What this run reads and must not be deleted: data, model, start adapter, the user's reward functions with all that they import, the
    working folder."""
    used = {Path.cwd()}
    for name in ("DATA", "EVAL_DATA", "EVAL_PROFILE"):  # also those that this run has no use for
        used.update(find_files(name, getattr(settings, name), Problems()))
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
    (folder / COMPLETE).unlink(missing_ok=True)  # TOTAL_STEPS was raised
    for step, path in checkpoints(folder):
        if step > run.step:  # most likely cut off while it was written
            retire_checkpoint(path)
    for name in ("metrics.csv", "completions.csv"):
        trim_csv(folder / name, run.step)
    for name, record in records.items():
        write_text(folder / name, json.dumps(record, indent=2) + "\n")


def delete_run(folder: Path) -> None:
    """Delete the zip of the run in `folder` and empty that. The folder itself stays: it may be a mount point. Cut off, it
    holds DELETING, by which `inspect_run` knows what was begun."""
    with contextlib.suppress(FileNotFoundError):  # cut off once before
        os.replace(folder / SETTINGS, folder / DELETING)
    zip_of(folder).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name not in (DELETING, *NO_RUN):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (folder / DELETING).unlink()


def retire_checkpoint(checkpoint: Path) -> None:
    """Rename a checkpoint that cannot be continued to `superseded-checkpoint-N`: the Trainer neither counts nor deletes
    it then. One without an adapter is deleted."""
    if not (checkpoint / ADAPTER).is_file():
        shutil.rmtree(checkpoint)
        return
    names = (f"superseded-{checkpoint.name}" + f".{count}" * (count > 1) for count in itertools.count(1))
    checkpoint.rename(next(path for name in names if not (path := checkpoint.with_name(name)).exists()))


def lock_run(folder: Path) -> FileLock | None:
    """A lock file beside OUTPUT_DIR, held until this process ends; None where another process holds it. Raises OSError
    where it cannot be made; filelock follows no link."""
    from filelock import FileLock, Timeout  # late: where packages are missing, the preflight is to say so

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(lock_of(folder), blocking=False)
    with contextlib.suppress(Timeout):
        lock.acquire()
    return lock if lock.is_locked else None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with whole_file(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        file.write(text)


def continuation(folder: Path, settings: Mapping[str, Any]) -> str:
    """What the same command does with the run in `folder` that ended before it was complete."""
    hinders = ["OVERWRITE=1"] * bool(settings.get("OVERWRITE")) + ["RESUME=never"] * (settings.get("RESUME") == "never")
    if (folder / DELETING).is_file():
        return "the same command deletes the rest and starts at step 0"
    again = "the same command" + (f" WITHOUT {' and '.join(hinders)}" if hinders else "")
    step, checkpoint = last_checkpoint(folder)
    return f"{again} continues from step {step}" if checkpoint else f"{again} starts at step 0: no checkpoint was saved"


def full_disk(error: BaseException, folder: Path) -> str | None:
    """The disk that is full of bytes or of files, where an exception or one that it came from says so; None for any other.

    safetensors and torch.save raise no OSError (torch: `enforce fail at inline_container.cc`, for every failed write).
    """
    ours = f"OUTPUT_DIR={folder}"
    places = {ours: str(folder)} | {name: name for name in (tempfile.gettempdir(), "/dev/shm") if Path(name).exists()}
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
        if number == errno.EDQUOT or "Disk quota exceeded" in text or (ours in full and "inline_container" in text):
            return next(iter(full.values()), ours)
        cause = cause.__cause__ or cause.__context__
    return None
