# SPDX-License-Identifier: Apache-2.0
"""OUTPUT_DIR as a place: its neighbours, what lies in it that is no run's, and how it is emptied."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.run.durable import half_of
from grpo.settings import Problems

if TYPE_CHECKING:
    from filelock import FileLock

SETTINGS, DELETING = "settings.json", "deleting.json"  # what the former is called while OVERWRITE=1 deletes the rest
# A kill in a run's first write leaves the one, a new file system has the other.
NO_RUN = {SETTINGS + ".tmp", "lost+found"}
ADAPTER = "adapter_model.safetensors"
COMPLETE = "complete.json"  # the very last file that a run writes, after its zip
EXIT = "exit.json"  # how a run under torchrun ended; written behind the zip
BEST = "best"  # folder of the best evaluated adapter (grpo/run/best.py)
OTHER = "choose another OUTPUT_DIR"
FOLDERS = re.compile(
    r"(superseded-)?checkpoint-\d+(\.\d+)?|superseded-(adapter-(\d+|last)|best)(\.\d+)?|best(\.old|\.tmp)?|report|runs"
)
FILES = re.compile(
    r"((metrics|completions)\.csv|report\.html|training\.log|README\.md"
    r"|(settings|deleting|versions|evaluation|closed_loop|complete|exit|adapter_config)\.json|adapter_model\.safetensors"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json|chat_template\.jinja|tokenizer\.model"
    r"|training_args\.bin)(\.tmp)?"
)
# Of FOLDERS; in runs/ tensorboard's.
INNER = re.compile(
    r"((best|manifest|trainer_state)\.json)(\.tmp)?|(optimizer|scheduler)\.pt|rng_state(_\d+)?\.pth|[a-z_]+(_\d+)?\.png"
    r"|events\.out\.tfevents\..*"
)


def unused(folder: Path, name: str) -> Path:
    """`name`, or with a number behind it, as a path in `folder` where nothing is."""
    names = (name + f".{count}" * (count > 1) for count in itertools.count(1))
    return next(path for name in names if not (path := folder / name).exists())


def zip_of(folder: Path) -> Path:
    """OUTPUT_DIR.zip."""
    return folder.with_name(folder.name + ".zip")


def lock_of(folder: Path) -> Path:
    """The lock file beside OUTPUT_DIR."""
    return folder.with_name(f".{folder.name}.lock")


@dataclass
class RunLock:
    """The lock of OUTPUT_DIR, and what was made for it: the file and the folders above it, the innermost first."""

    file: FileLock
    made: list[Path]

    def release(self, remove: bool = False) -> None:
        """Let others write to OUTPUT_DIR; `remove` leaves nothing behind, for a start that was refused."""
        for path in self.made if remove else ():
            with contextlib.suppress(OSError):  # it was never made, or holds somebody else's files by now
                path.rmdir() if path.is_dir() else path.unlink()
        self.file.release()


def lock_run(folder: Path) -> RunLock | None:
    """The lock of OUTPUT_DIR, held until this process ends; None where another process holds it. Raises OSError where
    it cannot be made; filelock follows no link."""
    from filelock import FileLock, Timeout  # late: where packages are missing, the preflight is to say so

    path = lock_of(folder)
    made = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    lock = RunLock(FileLock(path, blocking=False), made)
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
    """What a run writes beside its folder can be written: nothing else has these names, and the lock is no link, which
    others may have put into a shared folder to have its target written to."""
    lock, archive = lock_of(folder), zip_of(folder)
    if lock.is_symlink() or (lock.exists() and not (lock.is_file() and os.access(lock, os.W_OK))):
        what = "a link" if lock.is_symlink() else "not a file that you may write"
        problems.add(where, f"its lock {lock} is {what}", f"Remove that, or {OTHER}")
    for what, path in (("its zip", archive), ("what its zip is called while it is written,", half_of(archive))):
        if path.exists() and not path.is_file():
            problems.add(where, f"{what} {path} is not a file", f"Move that away, or {OTHER}")
        elif os.path.lexists(path) and not may_replace(path):
            problems.add(where, f"{what} {path} is another user's", f"Have it removed, or {OTHER}")


def may_replace(path: Path) -> bool:
    """Whether what is there may be deleted: in a folder like /tmp only by its owner, whoever may write there."""
    shared = path.parent.stat()
    return not shared.st_mode & stat.S_ISVTX or os.geteuid() in (0, shared.st_uid, path.lstat().st_uid)


def check_own(folder: Path, where: str, problems: Problems) -> None:
    """What has a name of the run's own in OUTPUT_DIR is of its kind: libraries write there too, and would write through a
    link that others put there."""
    for path in sorted(folder.iterdir()):
        inner, file = FOLDERS.fullmatch(path.name), FILES.fullmatch(path.name)
        if path.is_symlink() and (inner or file):
            what = "a link, which a run would write through"
        elif inner and not path.is_dir():
            what = "not a folder"
        elif file and not inner and not (path.is_file() and os.access(path, os.R_OK | os.W_OK)):
            what = "not a file that you may read and write"
        else:
            continue
        problems.add(where, f"{path.name} in it is {what}", f"Move that away, or {OTHER}")


def foreign_files(folder: Path) -> tuple[str, ...]:
    """Names in OUTPUT_DIR, and in a run's own folders there, of what no run of this script writes."""
    found = []
    for path in sorted(path for path in folder.iterdir() if path.name not in NO_RUN):
        if not (FOLDERS.fullmatch(path.name) or FILES.fullmatch(path.name)):
            found.append(path.name + "/" * path.is_dir())
        elif not path.is_symlink():
            files = (inner for inner in sorted(path.rglob("*")) if not inner.is_dir())
            own = (FILES, INNER)
            found += [str(f.relative_to(folder)) for f in files if not any(names.fullmatch(f.name) for names in own)]
    return tuple(found)


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
