# SPDX-License-Identifier: Apache-2.0
"""Files that survive a crash whole, and checksums that tell when one did not."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.settings import Problems, log

MANIFEST = "manifest.json"  # of a checkpoint: its last file
EARLIER = "runs of versions that did not write it are finished by commit 7add771"
SEAL = "sha256"  # key of a JSON record: the checksum of all its others


def sync(path: Path) -> None:
    """Have what a file or folder holds on the disk, not in memory alone."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:  # some network file systems know no such thing for a folder
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def sync_files(folder: Path) -> list[Path]:
    """Have all files below a folder on the disk; returns them in order. Who may read the folder may read its weights: safetensors
    leaves them to their owner alone."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        if path.suffix == ".safetensors":
            path.chmod(path.stat().st_mode | path.parent.stat().st_mode & 0o444)
        sync(path)
    return paths


def half_of(path: Path) -> Path:
    """What a file is called while `whole_file` writes it."""
    return path.with_name(path.name + ".tmp")


@contextlib.contextmanager
def whole_file(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """A new path to write to (`temporary`, or else `half_of` it), which takes the place of `path` when the block ends. Open it
    with mode `x`: a link that somebody put there in the meantime is not followed. Nothing stays behind after an error, as a
    part of a file would only fill a disk that is full already."""
    temporary = temporary or half_of(path)
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, whatever fails meanwhile."""
    with whole_file(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        file.write(text)


def is_stream(path: Path) -> bool:
    """Whether it is a pipe or a device, such as /dev/stdout: to be written to, never to be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_named(path: Path, text: str) -> None:
    """`write_text` for a file that the user named, in a folder of theirs: a link leads to the file that is meant, that keeps its
    permissions, and what is called as its half would be is another file of theirs."""
    if is_stream(path):
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))
    half = path.with_name(f"{secrets.token_hex(8)}.tmp")
    with whole_file(path, half) as temporary, temporary.open("x", encoding="utf-8") as file:
        if path.exists():
            shutil.copymode(path, temporary)
        file.write(text)


def check_writable(path: Path, problems: Problems) -> None:
    """Add a problem where `write_named` could not write `path`. Tried, because permission bits do not tell all of it."""
    try:
        if is_stream(path):  # a trial would end it for who reads it
            return
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(path, os.O_WRONLY))
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))):
            pass
    except OSError as error:
        problems.add(str(path), f"cannot be written: {error.strerror}", "Name another --out, in a folder that exists")


def checksum(record: Mapping[str, Any]) -> str:
    """SHA-256 of what a JSON file of `record` says, however it is laid out."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(record)), sort_keys=True).encode()).hexdigest()


def read_json(path: Path, empty: tuple[type[Exception], ...] = ()) -> dict[str, Any]:
    """The object in a JSON file; an empty one where `empty` are met. Raises OSError, and ValueError, which names the file,
    for what is none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raised = error if isinstance(error, OSError) else ValueError(f"{path.name} cannot be read ({error})")
        if isinstance(raised, empty):
            return {}
        raise raised from None


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON record with its own checksum, for `read_sealed`."""
    plain = {name: value for name, value in record.items() if name != SEAL}
    return plain | {SEAL: checksum(plain)}


def write_sealed(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON record with its own checksum, whole or not at all."""
    write_text(path, json.dumps(sealed(record), indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """A JSON object, without its checksum. One that has none is taken as it is: who edits a record deletes that line.

    Raises OSError where it cannot be read, ValueError where it does not say what was written.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    if record.pop(SEAL, None) not in (None, checksum(record)):
        raise ValueError("it does not match its checksum")
    return record


def is_intact(path: Path) -> bool:
    """Whether measurements can be taken over from a sealed file; a damaged one is warned about."""
    try:
        return bool(read_sealed(path))
    except OSError:
        return False
    except ValueError as error:
        log.warning("%s is damaged (%s): what it held is measured again", path.name, error)
        return False


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def begins_with(path: Path, end: Sequence[Any]) -> bool:
    """Whether a log still begins with what it held when a checkpoint was made: `end` is (bytes, SHA-256)."""
    (left, expected), digest = end, hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(min(left, 2**20)):
            digest.update(block)
            left -= len(block)
    return not left and digest.hexdigest() == expected


def begin_checkpoint(checkpoint: Path) -> None:
    """Mark a checkpoint as one that is being written: until `finish_checkpoint` its manifest is empty."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_text(checkpoint / MANIFEST, "{}\n")
    sync(checkpoint)


def finish_checkpoint(checkpoint: Path, ends: Mapping[str, Sequence[Any]]) -> None:
    """Write a checkpoint's manifest: the SHA-256 of each file by its name, and how many bytes each log holds with their
    SHA-256 (`ends`). Everything that the manifest names is on the disk before the manifest is."""
    paths = [path for path in sync_files(checkpoint) if path.name != MANIFEST]
    files = {str(path.relative_to(checkpoint)): file_sha256(path) for path in paths}
    write_sealed(checkpoint / MANIFEST, {"files": files, "ends": dict(ends)})
    sync(checkpoint)
    sync(checkpoint.parent)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files by its manifest, in words; None where all are as they were written."""
    name = MANIFEST
    try:
        record = read_sealed(checkpoint / MANIFEST)
        if not record:
            return "it was cut off while it was written"
        for name, expected in record["files"].items():
            if file_sha256(checkpoint / name) != expected:
                return f"{name} is damaged"
        if not isinstance(record.get("ends"), dict):
            return f"{MANIFEST} does not say how long the logs were ({EARLIER})"
    except FileNotFoundError:
        return f"{name} is missing" + (f" ({EARLIER})" if name == MANIFEST else "")
    except (OSError, ValueError, KeyError) as error:
        return f"{name} cannot be read ({error})"
    return None
