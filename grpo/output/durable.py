# SPDX-License-Identifier: Apache-2.0
"""Writes files so that a crash leaves them whole or absent, and detects damaged ones by their checksums."""

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from grpo.common import InputError, Problems, log

SEAL = "sha256"  # The key of a JSON record that holds the checksum of all its other values.
Record = dict[str, Any]  # A JSON object, whose values may be of any type.
# File name -> types of the values that are read from its record. `read_json` refuses others; a value may be missing.
TYPES: dict[str, dict[str, Any]] = {
    "settings.json": {"settings": dict, "sources": dict, "choices": dict, "machine": dict, "data_sha256": str},
    "deleting.json": {"settings": dict, "choices": dict, "data_sha256": str},
    "manifest.json": {"files": dict[str, str], "ends": dict[str, tuple[int, str]]},
    "complete.json": {"steps": int, "adapter_sha256": str},
    "best.json": {
        "by": str, "figure": str, "base": dict[str, float], "measured": dict, "evaluated": list[dict[str, float]],
        "step": int, "value": float, "base_value": float, "better_than_base": bool, "in_words": str,
        "comparisons": list[dict], "adapter_sha256": str,
    },
    "evaluation.json": {"before": dict, "before_greedy": dict, "after": dict, "difference": dict,
                        "difference_constant": dict},
    "model.safetensors.index.json": {"weight_map": dict[str, str]},
    "closed_loop.json": {"windows": list[dict], "totals": dict[str, dict]},
}  # fmt: skip
SCRATCH = "train_grpo-scratch-"  # The names of scratch folders begin with this.
LARGEST = 2**28  # The most bytes that `read_json` reads; the records of the longest runs have a few million.


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk, not in memory alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # Some network file systems cannot sync a folder.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> list[Path]:
    """Syncs all readable files below a folder, no links, and returns their paths in order. Weights become as readable
    as their folder, because safetensors lets only their owner read them."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    paths = sorted(path for path in files if os.access(path, os.R_OK))
    for path in paths:
        if path.suffix == ".safetensors" and path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode | path.parent.stat().st_mode & 0o444)
        sync(path)
    return paths


def move_files(source: Path, target: Path, last: str) -> None:
    """Moves all files of the folder `source` into `target`, the one called `last` at the end, and deletes `source`.
    Each file appears whole, and a link or a pipe of its name is replaced, not written to."""
    staged = target / f"{last}.tmp"
    for path in sync_files(source):
        os.replace(path, staged if path.name == last else target / path.name)
    source.rmdir()
    os.replace(staged, target / last)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a new path to write to, which replaces `path` when the block ends. After an error neither a part of the
    file nor the new path stays. Open it with mode `x`, so that a link which somebody put there is not followed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    with whole_file(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        file.write(text)


def write_named(path: Path, text: str) -> None:
    """`write_text` for a file that the user named: it may be a link, a pipe or a device such as /dev/stdout. Raises
    OSError with the file's name, which a full disk's own error lacks."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_text(path.resolve(), text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_writable(path: Path, problems: Problems) -> None:
    """Adds a problem where `write_named` could not write `path`."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        problems.add(str(path), "cannot be written", "Name another --out, in a folder that you may write to")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Yields whether this process could lock a folder. The lock ends with the block, or with a killed process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def scratch_folder() -> Path:
    """A new temporary folder that nobody else can read, with a random name so that nobody can put a link there first.
    It is deleted when this process ends; if it is killed, by the next process that makes a scratch folder."""
    me = str(os.getpid())
    for leftover in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        maker = leftover.name.removeprefix(SCRATCH).partition("-")[0]
        if maker != me and Path("/proc", maker).exists():
            continue  # Its maker may not have locked it yet.
        with contextlib.suppress(OSError):
            if leftover.lstat().st_uid == os.geteuid():
                with locked(leftover) as is_free:
                    if is_free:
                        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{me}-"))
    with contextlib.suppress(OSError):  # On a file system without locks nothing is taken for a leftover.
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # The lock lasts until this process ends.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def regular_file_size(path: Path) -> int:
    """The size of a file in bytes. Raises OSError, and ValueError if not regular: reading a pipe might never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    return status.st_size


def type_fault(value: object, kind: Any, name: str) -> str | None:
    """Why a JSON value, called `name`, is not of the type `kind`, such as `int` or `dict[str, tuple[int, str]]`; None
    if it is. A whole number is a float too; a tuple is a JSON array of that length."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    accepted = {float: (int, float), tuple: (list,)}.get(origin, (origin,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and origin is not bool):
        words = {dict: "an object", list: "an array", tuple: "an array", str: "a text", bool: "true or false"}
        return f"`{name}` is not {words.get(origin, 'a number')}"
    parts: list[tuple[object, Any]] = []
    if isinstance(value, dict) and arguments:
        parts = [(element, arguments[1]) for element in value.values()]
    elif isinstance(value, list) and origin is tuple:
        if len(value) != len(arguments):
            return f"`{name}` has {len(value)} elements instead of {len(arguments)}"
        parts = list(zip(value, arguments, strict=True))
    elif isinstance(value, list) and arguments:
        parts = [(element, arguments[0]) for element in value]
    return next(filter(None, (type_fault(element, part, name) for element, part in parts)), None)


def read_json(path: Path, empty: tuple[type[Exception], ...] = ()) -> Record:
    """The object in a JSON file. Raises OSError, and InputError with the file's name if it holds no JSON object, or a
    value of another type than TYPES says. Errors of a type in `empty` give an empty object."""
    try:
        if regular_file_size(path) > LARGEST:
            raise ValueError(f"it is larger than {LARGEST / 2**20:.0f} MiB")
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("it holds no JSON object")
        for name, kind in TYPES.get(path.name, {}).items():
            if name in record and (fault := type_fault(record[name], kind, name)):
                raise ValueError(fault)
        return record
    except (OSError, ValueError, RecursionError) as error:
        failure = error if isinstance(error, OSError) else InputError(f"{path.name} cannot be read ({error})")
    if isinstance(failure, empty):
        return {}
    raise failure


def sealed(record: Record) -> Record:
    """A JSON record with the SHA-256 of its values, which does not depend on the file's layout. It comes first, because
    users may delete its line, and the last line could not go without the comma before it."""
    plain = {name: value for name, value in record.items() if name != SEAL}
    normalized = json.loads(json.dumps(plain))  # Turns all keys into strings, so that they sort as after reading.
    return {SEAL: hashlib.sha256(json.dumps(normalized, sort_keys=True).encode()).hexdigest()} | plain


def write_sealed(path: Path, record: Record) -> None:
    """Writes a JSON record with its own checksum, whole or not at all."""
    write_text(path, json.dumps(sealed(record), indent=1) + "\n")


def read_sealed(path: Path) -> Record:
    """A JSON object without its checksum. A record without one is accepted, so that users can edit it and delete that
    line. Raises OSError if the file cannot be read, and ValueError if it is damaged."""
    record = read_json(path)
    if record.get(SEAL) not in (None, sealed(record)[SEAL]):
        raise ValueError(f"{path.name} does not match its checksum")
    record.pop(SEAL, None)
    return record


def read_measured(path: Path) -> Record:
    """A sealed file of measurements; an empty record where it is missing, or damaged, of which it warns."""
    try:
        return read_sealed(path)
    except ValueError as error:
        log.warning("%s is damaged, so its figures are measured again: %s", path.name, error)
    except OSError:
        pass
    return {}


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file. Raises OSError where it cannot be read, or is not a regular file."""
    try:
        regular_file_size(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
