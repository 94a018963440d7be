# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints so that an unfinished one is recognized after a kill, checks them, and deletes old ones."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from grpo.output.durable import file_sha256, read_sealed, sync, sync_files, write_sealed, write_text
from grpo.output.layout import ADAPTER, ADAPTER_CONFIG, MANIFEST, unused_path

LogEnd = tuple[int, str]  # How many bytes a log holds, and their SHA-256.
CUT_OFF = "it was cut off while it was written"
ROLLOUT = "rollout.pt"  # Only where the step after the checkpoint learns from the same rollout.
# What a run continues from. `Trainer._save_checkpoint` (grpo/learn/trainer.py) writes it by transformers, with MANIFEST
# and what lets others load the adapter.
RESUME_FILES = (
    ADAPTER, ADAPTER_CONFIG, "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", ROLLOUT,
)  # fmt: skip


def begin_checkpoint(checkpoint: Path) -> None:
    """Marks a checkpoint as unfinished: its manifest stays empty until `finish_checkpoint`."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_text(checkpoint / MANIFEST, "{}\n")
    sync(checkpoint)


def finish_checkpoint(checkpoint: Path, ends: Mapping[str, LogEnd]) -> None:
    """Writes a checkpoint's manifest: the SHA-256 of each file, and where each log ended (`ends`, by the
    log's name). Everything that the manifest names is on the disk before the manifest is."""
    paths = [path for path in sync_files(checkpoint) if path.name != MANIFEST]
    files = {str(path.relative_to(checkpoint)): file_sha256(path) for path in paths}
    write_sealed(checkpoint / MANIFEST, {"files": files, "ends": dict(ends)})
    sync(checkpoint)
    sync(checkpoint.parent)


def begins_with(log_file: Path, end: LogEnd) -> bool:
    """Whether a log still begins with the bytes that it held when a checkpoint was written."""
    (remaining, expected), digest = end, hashlib.sha256()
    if remaining < 0 or not log_file.is_file():  # The manifest may be damaged; reading a pipe might never end.
        return False
    with log_file.open("rb") as file:
        while block := file.read(min(remaining, 2**20)):
            digest.update(block)
            remaining -= len(block)
    return digest.hexdigest() == expected


def checkpoint_fault(checkpoint: Path) -> str | None:
    """Why the run cannot be continued from its checkpoint; None where it can."""
    name = MANIFEST
    try:
        record = read_sealed(checkpoint / name)
        if not record:
            return CUT_OFF
        ends = record["ends"]
        for name, expected in record["files"].items():
            if file_sha256(checkpoint / name) != expected:
                return f"{name} is damaged"
    except FileNotFoundError:
        return f"{name} is missing"
    except ValueError as error:
        return f"{MANIFEST} is damaged ({error})"
    except (OSError, KeyError) as error:
        return f"{name} cannot be read ({error})"
    for name, (size, _) in ends.items():
        log_file = checkpoint.parent / name
        if log_file.is_file() and log_file.stat().st_size < size:  # The folder was copied while the run wrote.
            return f"{name} is shorter than when the checkpoint was written (restore a copy of {name}, or move it away)"
    return None


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint, whole or not, in order."""
    steps = ((path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return sorted((int(step), path) for step, path in steps if step.isascii() and step.isdigit())


def find_checkpoint(folder: Path) -> tuple[int, Path | None, dict[Path, str]]:
    """(step, folder) of the last checkpoint that can be continued, 0 and None without, and the faults of later ones."""
    faults: dict[Path, str] = {}
    for step, path in reversed(checkpoints(folder)):
        fault = checkpoint_fault(path)
        if not fault:
            return step, path, faults
        faults[path] = fault
    return 0, None, faults


def rotate_checkpoints(folder: Path, limit: int) -> None:
    """Deletes all checkpoints but the last `limit` by step: the Trainer goes by file times, which a copy changes."""
    for _, path in checkpoints(folder)[:-limit]:
        shutil.rmtree(path, ignore_errors=True)


def retire_checkpoint(checkpoint: Path) -> None:
    """Renames a checkpoint that cannot be continued to `superseded-checkpoint-N`, which the Trainer neither counts nor
    deletes. One without an adapter is deleted."""
    if not (checkpoint / ADAPTER).is_file():
        shutil.rmtree(checkpoint)
        return
    for half_written in checkpoint.glob("*.tmp"):
        half_written.unlink()
    checkpoint.rename(unused_path(checkpoint.parent, f"superseded-{checkpoint.name}"))
