# SPDX-License-Identifier: Apache-2.0
"""OUTPUT_DIR and the files beside it: their names, the lock, full disks, and the deletion by OVERWRITE=1."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.common import Problems
from grpo.settings.environment import load_settings
from grpo.settings.table import Settings

if TYPE_CHECKING:
    from filelock import FileLock

SETTINGS = "settings.json"
DELETING = "deleting.json"  # settings.json is renamed to this while OVERWRITE=1 deletes the other files.
RUN_ENV = "run.env"  # The settings that the user gave, for a shell.
COMPLETE = "complete.json"  # The last file of a run, written after its zip.
EXIT = "exit.json"  # The exit code and reason of a run under torchrun.
MANIFEST = "manifest.json"  # The last file of a checkpoint.
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
UNFINISHED = "adapter.tmp"  # The folder that the adapter is written to, before its files are moved to OUTPUT_DIR.
BEST = "best"  # The folder of the best evaluated adapter.
BEST_RECORD = "best.json"  # The last file of that folder.
MEASURED_LATER = "evaluation-*.json"  # What scripts/evaluate.py writes there about the run's adapter.
LOGS = ("metrics.csv", "completions.csv")
TRAINING_LOG = "training.log"
APPENDED = (*LOGS, TRAINING_LOG)  # The files that a run that continues appends to.
# What a folder without a run may hold: a file that a kill in a run's first write left, and a new file system's folder.
NO_RUN = {SETTINGS + ".tmp", "lost+found"}
LOCK_WAIT = 0.5  # seconds, because scripts/watch.py shares the lock for an instant to see whether a process holds it
ANOTHER_DIR = "choose another OUTPUT_DIR"
# The names of all folders and files that a run writes. OVERWRITE=1 deletes them.
RUN_FOLDERS = re.compile(
    r"(superseded-)?checkpoint-\d+(\.\d+)?|superseded-(adapter-\w+|best)(\.\d+)?|best(\.old|\.tmp)?|adapter\.tmp"
    r"|report|runs"
)
RUN_FILES = re.compile(
    r"((metrics|completions)\.csv|report\.html|training\.log|README\.md"
    r"|(settings|versions|evaluation|closed_loop|complete|exit|adapter_config)\.json|adapter_model\.safetensors"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json|chat_template\.jinja|tokenizer\.model"
    r"|training_args\.bin|run\.env)(\.tmp)?"
)


def is_of_run(name: str) -> bool:
    """Whether a run writes a file or a folder of this name into OUTPUT_DIR."""
    return bool(RUN_FOLDERS.fullmatch(name) or RUN_FILES.fullmatch(name))


def existing_parent(path: Path) -> Path:
    """The nearest path above `path` (or itself) that exists, as far as this user may see."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if os.path.exists(parent))  # `Path.exists` may raise.


def run_folder(settings: Settings) -> Path:
    """OUTPUT_DIR as an absolute path without links, so that the zip can lie beside it."""
    return Path(settings.OUTPUT_DIR).expanduser().resolve()


def unused_path(folder: Path, name: str) -> Path:
    """A path in `folder` where nothing is: `name`, or else `name.2`, `name.3` and so on."""
    paths = (folder / (name if count == 1 else f"{name}.{count}") for count in itertools.count(1))
    return next(path for path in paths if not path.exists())


def zip_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".zip")


def lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


@dataclass
class RunLock:
    """The lock of OUTPUT_DIR, and what was created for it: the lock file, then the folders above, innermost first."""

    file: FileLock
    created: list[Path]

    def release(self, remove: bool = False) -> None:
        """Lets others write to OUTPUT_DIR. `remove`, for a start that was refused, also deletes the `created` paths."""
        for path in self.created if remove else ():
            with contextlib.suppress(OSError):  # The path may be gone, or hold other people's files by now.
                path.rmdir() if path.is_dir() else path.unlink()
        self.file.release()


def lock_run(folder: Path) -> RunLock | None:
    """Locks OUTPUT_DIR until this process ends; returns None if another process holds the lock. Raises OSError if the
    lock file cannot be created, for example because there is a link, which filelock does not follow."""
    from filelock import FileLock, Timeout  # Imported here, so that the preflight can report it missing.

    path = lock_path(folder)
    created = [parent for parent in (path, *path.parents) if not os.path.lexists(parent)]
    lock = RunLock(FileLock(path, timeout=LOCK_WAIT), created)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.file.acquire()
    except Timeout:
        return None
    except OSError:
        lock.release(remove=True)
        raise
    return lock


def check_output_dir(settings: Settings, problems: Problems) -> bool:
    """Checks that OUTPUT_DIR and the zip beside it can be written. Returns False if OUTPUT_DIR can be no folder."""
    folder, where = run_folder(settings), f"OUTPUT_DIR={settings.OUTPUT_DIR}"
    parent = existing_parent(folder)
    if not settings.OUTPUT_DIR.strip() or not parent.is_dir():
        fault = f"{parent} is a file, not a folder" if settings.OUTPUT_DIR.strip() else "it is empty"
        problems.add(where, fault, "Name a folder for the run")
        return False
    for path in {parent, existing_parent(folder.parent)}:
        if not os.access(path, os.W_OK | os.X_OK) or not folder.name:
            problems.add(where, f"{path} is not writable", "Choose a writable folder inside a writable one")
    if not os.access(parent, os.R_OK | os.X_OK):
        problems.add(where, f"{parent} cannot be read", "Make it readable, or choose another folder")
        return False
    return bool(folder.name)


def entry_fault(path: Path) -> str | None:
    """Why a run cannot use this file or folder of its own in OUTPUT_DIR, if it is there: another kind of file, which
    may hang the run or lead out of OUTPUT_DIR, or no access. None if it can."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    is_folder = bool(RUN_FOLDERS.fullmatch(path.name))
    if stat.S_ISLNK(mode):
        return f"{path.name} is a link, and the run would follow it out of the folder"
    if is_folder != stat.S_ISDIR(mode) or not (is_folder or stat.S_ISREG(mode)):
        return f"{path.name} is no {'folder' if is_folder else 'regular file'}"
    if not os.access(path, os.R_OK | (os.X_OK if is_folder else 0)):
        return f"{path.name} cannot be read"
    # Other files are replaced as a whole, which their folder alone decides.
    if (is_folder or path.name in APPENDED) and not os.access(path, os.W_OK):
        return f"{path.name} cannot be written"
    return None


def check_entries(settings: Settings, problems: Problems) -> None:
    """Adds a problem if the run could not use what lies in OUTPUT_DIR, or the zip beside it. OVERWRITE=1 deletes all of
    it, for which folders alone matter."""
    folder, names = run_folder(settings), set[str]()
    if folder.is_dir():
        names = {path.name for path in folder.iterdir() if is_of_run(path.name) or path.name == DELETING}
    if settings.OVERWRITE:
        folders = [Path(part, name) for part, inside, _ in os.walk(folder) for name in inside]
        ours = [path for path in folders if path.relative_to(folder).parts[0] in names and not path.is_symlink()]
        closed = sorted(path for path in ours if not os.access(path, os.R_OK | os.W_OK | os.X_OK))
        faults = [f"{path.relative_to(folder)} cannot be deleted" for path in closed]
    else:
        faults = list(filter(None, (entry_fault(folder / name) for name in sorted(names))))
    archive = zip_path(folder)
    for path in (archive, archive.with_name(archive.name + ".tmp")):
        if path.is_dir():
            faults.append(f"{path} is a folder, in the place of the run's zip")
    if faults:
        shown = "; ".join(faults[:5]) + (f" and {len(faults) - 5} more" if len(faults) > 5 else "")
        problems.add(f"OUTPUT_DIR={settings.OUTPUT_DIR}", shown, f"Mend it or move it away, or {ANOTHER_DIR}")


def lock_output_dir(environ: Mapping[str, str]) -> tuple[RunLock | None, str | None]:
    """(the lock of OUTPUT_DIR, the problem that prevents it); one of them is None. Both are None if settings or
    packages have problems, because the preflight then lists all of them."""
    settings, _, problems = load_settings(environ)
    check_output_dir(settings, problems)
    if problems:
        return None, None
    folder, reason = run_folder(settings), "another process is writing there. Wait for it"
    try:
        if lock := lock_run(folder):
            return lock, None
    except ImportError:
        return None, None
    except OSError as error:
        reason = f"its lock {lock_path(folder)} cannot be taken ({error}). Mend that"
    return None, f"OUTPUT_DIR={settings.OUTPUT_DIR}: {reason}, or {ANOTHER_DIR}"


def delete_run(folder: Path) -> None:
    """Deletes the run in `folder`, its zip, and what was measured of its adapter later: the new run's zip would hold
    these figures as its own. The folder itself stays, because it may be a mount point, and so do all other files. The
    folder holds DELETING until `prepare_run` has written the new run's settings, so that `inspect_run` knows after a
    kill that the deletion had begun."""
    with contextlib.suppress(FileNotFoundError):  # An earlier deletion may have been killed after the renaming.
        os.replace(folder / SETTINGS, folder / DELETING)
    zip_path(folder).unlink(missing_ok=True)
    for path in folder.iterdir():
        if is_of_run(path.name) or path.match(MEASURED_LATER):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


TORCH_WRITE_ERRORS = ("inline_container", "iostream error")  # By torch's zip writer, and by the stream below it.


def is_full_disk(error: BaseException, folder: Path) -> bool:
    """Whether an exception or its cause says that a disk or a quota is full. safetensors and torch.save raise no
    OSError, and torch's message is the same for every failed write: for that, the free space of `folder` decides."""
    cause: BaseException | None = error
    while cause is not None:
        number, text = getattr(cause, "errno", None), str(cause)
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in text:
            return True
        if any(words in text for words in TORCH_WRITE_ERRORS):
            return shutil.disk_usage(existing_parent(folder)).free < 2**26
        cause = cause.__cause__ or cause.__context__
    return False
