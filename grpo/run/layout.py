# SPDX-License-Identifier: Apache-2.0
"""OUTPUT_DIR and what lies beside it: the names, the lock, the disk, and the deletion by OVERWRITE=1."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.run.durable import tmp_path_for
from grpo.settings import Problems, Settings, load_settings

if TYPE_CHECKING:
    from filelock import FileLock

SETTINGS = "settings.json"
DELETING = "deleting.json"  # settings.json is renamed to this while OVERWRITE=1 deletes the other files.
COMPLETE = "complete.json"  # The last file of a run, written after its zip.
EXIT = "exit.json"  # The exit code and reason of a run under torchrun.
MANIFEST = "manifest.json"  # The last file of a checkpoint.
ADAPTER = "adapter_model.safetensors"
BEST = "best"  # The folder of the best evaluated adapter.
LOGS = ("metrics.csv", "completions.csv")
# A folder with nothing but these holds no run: a kill in a run's first write leaves the first one, a new file system
# has the second one.
NO_RUN = {SETTINGS + ".tmp", "lost+found"}
OTHER = "choose another OUTPUT_DIR"
# The names of all that a run writes: of other files in OUTPUT_DIR the banner says that OVERWRITE=1 deletes them too.
FOLDERS = re.compile(
    r"(superseded-)?checkpoint-\d+(\.\d+)?|superseded-(adapter-(\d+|last)|best)(\.\d+)?|best(\.old|\.tmp)?|adapter\.tmp|report|runs"
)
FILES = re.compile(
    r"((metrics|completions)\.csv|report\.html|training\.log|README\.md"
    r"|(settings|deleting|versions|evaluation|closed_loop|complete|exit|adapter_config)\.json|adapter_model\.safetensors"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json|chat_template\.jinja|tokenizer\.model"
    r"|training_args\.bin)(\.tmp)?"
)
# Files that stand in FOLDERS alone; tensorboard writes into runs/.
INNER_FILES = re.compile(
    r"((best|manifest|trainer_state)\.json)(\.tmp)?|(optimizer|scheduler)\.pt|rng_state(_\d+)?\.pth|[a-z_]+(_\d+)?\.png"
    r"|events\.out\.tfevents\..*"
)


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` (or itself) that exists."""
    path = path.expanduser().absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def run_folder(settings: Settings) -> Path:
    """OUTPUT_DIR as an absolute path without links, so that the zip can lie beside it."""
    return Path(settings.OUTPUT_DIR).expanduser().resolve()


def unused_path(folder: Path, name: str) -> Path:
    """A path in `folder` where nothing is: `name`, or else `name.2`, `name.3` and so on."""
    paths = (folder / (name if count == 1 else f"{name}.{count}") for count in itertools.count(1))
    return next(path for path in paths if not path.exists())


def zip_path(folder: Path) -> Path:
    """OUTPUT_DIR.zip."""
    return folder.with_name(folder.name + ".zip")


def lock_path(folder: Path) -> Path:
    """The lock file beside OUTPUT_DIR."""
    return folder.with_name(f".{folder.name}.lock")


@dataclass
class RunLock:
    """The lock of OUTPUT_DIR, with the paths that were created for it: its file, then the folders above, innermost
    first."""

    file: FileLock
    created: list[Path]

    def release(self, remove: bool = False) -> None:
        """Lets others write to OUTPUT_DIR. `remove` deletes what was created for the lock: a start was refused."""
        for path in self.created if remove else ():
            with contextlib.suppress(OSError):  # It was never created, or holds other people's files by now.
                path.rmdir() if path.is_dir() else path.unlink()
        self.file.release()


def lock_run(folder: Path) -> RunLock | None:
    """Locks OUTPUT_DIR until this process ends; returns None where another process holds the lock. Raises OSError where
    the lock cannot be created: filelock follows no link."""
    from filelock import FileLock, Timeout  # Late, so that the preflight can say which packages are missing.

    path = lock_path(folder)
    created = [parent for parent in (path, *path.parents) if not os.path.lexists(parent)]
    lock = RunLock(FileLock(path, blocking=False), created)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.file.acquire()
    except Timeout:
        return None
    except OSError:
        lock.release(remove=True)
        raise
    return lock


def check_neighbours(folder: Path, where: str, problems: Problems) -> None:
    """Adds problems where the lock or the zip beside OUTPUT_DIR cannot be written. A lock that is a link is refused:
    others may have put it into a shared folder to have its target written to."""
    lock, archive = lock_path(folder), zip_path(folder)
    if lock.is_symlink():
        problems.add(where, f"its lock {lock} is a link", f"Remove that, or {OTHER}")
    elif lock.exists() and not (lock.is_file() and os.access(lock, os.W_OK)):
        problems.add(where, f"its lock {lock} is not a file that you may write", f"Remove that, or {OTHER}")
    for label, path in (("its zip", archive), ("its unfinished zip", tmp_path_for(archive))):
        if path.exists() and not path.is_file():
            problems.add(where, f"{label} {path} is not a file", f"Move that away, or {OTHER}")
        elif os.path.lexists(path):
            parent = path.parent.stat()
            owners = (0, parent.st_uid, path.lstat().st_uid)
            if parent.st_mode & stat.S_ISVTX and os.geteuid() not in owners:  # As in /tmp, only owners delete.
                problems.add(where, f"{label} {path} is another user's", f"Have it removed, or {OTHER}")


def check_output_dir(settings: Settings, problems: Problems) -> bool:
    """Checks that OUTPUT_DIR, and the lock and the zip beside it, can be written. Returns False where the folder cannot
    hold a run at all."""
    folder, where = run_folder(settings), f"OUTPUT_DIR={settings.OUTPUT_DIR}"
    parent = existing_parent(folder)
    if not settings.OUTPUT_DIR.strip() or not parent.is_dir():
        fault = f"{parent} is a file, not a folder" if settings.OUTPUT_DIR.strip() else "it is empty"
        problems.add(where, fault, "Name a folder for the run")
        return False
    if not os.access(parent, os.W_OK):
        problems.add(where, f"{parent} is not writable", "Choose a folder that is")
    if folder.parent == folder or not os.access(existing_parent(folder.parent), os.W_OK):
        fault = f"{folder}.zip cannot be written: its folder is read-only"
        problems.add(where, fault, "Choose a folder inside a writable one")
    if folder.name:
        check_neighbours(folder, where, problems)
    return bool(folder.name)


def lock_output_dir(environ: Mapping[str, str]) -> tuple[RunLock | None, str | None]:
    """The lock of OUTPUT_DIR, or the reason why it cannot be taken. Both are None where settings or packages cannot be
    used: the checks then list every problem at once."""
    settings, _, problems = load_settings(environ)
    if problems or not check_output_dir(settings, problems) or problems:
        return None, None
    folder, reason = run_folder(settings), "another process is writing there. Wait for it"
    try:
        if lock := lock_run(folder):
            return lock, None
    except ImportError:
        return None, None
    except OSError as error:
        disk = full_disk(error, folder)
        cause = f"no space left on the disk of {disk}" if disk else str(error)
        reason = f"its lock {lock_path(folder)} cannot be taken ({cause}). Mend that"
    return None, f"OUTPUT_DIR={settings.OUTPUT_DIR}: {reason}, or {OTHER}"


def check_own_files(folder: Path, where: str, problems: Problems) -> None:
    """Adds a problem for each of a run's names in OUTPUT_DIR that a link or the wrong kind of file has. PEFT, the
    tokenizer and the Trainer would write through a link that others put there."""
    for path in sorted(folder.iterdir()):
        is_folder, is_file = FOLDERS.fullmatch(path.name), FILES.fullmatch(path.name)
        fault = ""
        if path.is_symlink() and (is_folder or is_file):
            fault = "a link, which a run would write through"
        elif is_folder and not path.is_dir():
            fault = "not a folder"
        elif is_file and not (path.is_file() and os.access(path, os.R_OK | os.W_OK)):
            fault = "not a file that you may read and write"
        if fault:
            problems.add(where, f"{path.name} in it is {fault}", f"Move that away, or {OTHER}")


def foreign_files(folder: Path) -> tuple[str, ...]:
    """Names of the files in OUTPUT_DIR, and in a run's folders there, that no run of this script writes."""
    names = []
    for path in sorted(path for path in folder.iterdir() if path.name not in NO_RUN):
        if not (FOLDERS.fullmatch(path.name) or FILES.fullmatch(path.name)):
            names.append(f"{path.name}/" if path.is_dir() else path.name)
        elif not path.is_symlink():
            for inner in sorted(path.rglob("*")):
                if not (inner.is_dir() or FILES.fullmatch(inner.name) or INNER_FILES.fullmatch(inner.name)):
                    names.append(str(inner.relative_to(folder)))
    return tuple(names)


def delete_run(folder: Path) -> None:
    """Deletes the zip of the run in `folder` and all that is in it. The folder itself stays, because it may be a mount
    point. After a kill it holds DELETING, which tells `inspect_run` that the deletion had begun."""
    with contextlib.suppress(FileNotFoundError):  # An earlier deletion was killed after the renaming.
        os.replace(folder / SETTINGS, folder / DELETING)
    zip_path(folder).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name not in (DELETING, *NO_RUN):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (folder / DELETING).unlink()


TORCH_WRITE_ERRORS = ("inline_container", "iostream error")  # Of its zip writer, and of the stream below it.


def full_disk(error: BaseException, folder: Path) -> str | None:
    """The disk that is full of bytes or of files, where an exception or its cause says so; None for any other.

    safetensors and torch.save raise no OSError, and torch says the same of every failed write.
    """
    output_dir = f"OUTPUT_DIR={folder}"
    disks = {output_dir: str(existing_parent(folder))}
    disks |= {path: path for path in (tempfile.gettempdir(), "/dev/shm") if Path(path).exists()}
    full = {}
    for name, path in disks.items():
        inodes = os.statvfs(path)
        if shutil.disk_usage(path).free < 2**26:
            full[name] = name
        elif inodes.f_files and not inodes.f_favail:  # A file system without a table of inodes says 0 of 0.
            full[name] = f"{name} (no inodes left: delete files, however small)"
    cause: BaseException | None = error
    while cause is not None:
        number, text = getattr(cause, "errno", None), str(cause)
        if number == errno.ENOSPC or "No space left on device" in text:
            has_room = f"{output_dir} (it has room: see `df -i` for its inodes, or a quota is met)"
            return next(iter(full.values()), has_room)
        torch_failed = output_dir in full and any(words in text for words in TORCH_WRITE_ERRORS)
        if number == errno.EDQUOT or "Disk quota exceeded" in text or torch_failed:
            return next(iter(full.values()), output_dir)
        cause = cause.__cause__ or cause.__context__
    return None
