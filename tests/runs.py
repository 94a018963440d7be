# SPDX-License-Identifier: Apache-2.0
"""Runs of the entry point as a user starts them, and what they have come to."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conftest import CLEAN, ROOT, SCRIPT

SETTINGS = {
    "MODEL_ID": "tiny", "TOTAL_STEPS": 6, "SAVE_STEPS": 2, "PROMPTS_PER_STEP": 3, "NUM_GENERATIONS": 4, "EVAL_SAMPLES": 0,
    "DATA": "data/tes_heldout_compact.csv", "SEED": 5, "REWARDS": "action,paused:hold", "PYTHONPATH": str(ROOT / "tests"),
}  # fmt: skip


def environment(folder: Path, **settings: object) -> dict[str, str]:
    return CLEAN | {name: str(value) for name, value in (SETTINGS | {"OUTPUT_DIR": folder} | settings).items()}


def start(folder: Path, *before: str, **settings: object) -> subprocess.Popen:
    """A run as a process; `before` is what stands before `python` on its command line."""
    command: Sequence[str] = [*before, sys.executable, str(SCRIPT)]
    return subprocess.Popen(command, env=environment(folder, **settings), cwd=ROOT, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip


def start_held(folder: Path, step: int, *before: str, **settings: object) -> subprocess.Popen:
    """A run that has done `step` steps and waits in the next one (see paused.py)."""
    process = start(folder, *before, HOLD_AT=step + 1, **settings)
    wait_until(lambda: has_step(folder, step), process)
    return process


def go_on(folder: Path) -> None:
    folder.with_name("go").touch()


def finish(process: subprocess.Popen) -> str:
    """The output of a run, once it has ended."""
    return process.communicate()[0]


def has_step(folder: Path, step: int) -> bool:
    path = folder / "metrics.csv"
    return path.exists() and any(line.startswith(f"{step},") for line in path.read_text().splitlines())


def has_line(path: Path, words: str) -> bool:
    return path.exists() and words in path.read_text(encoding="utf-8")


def wait_until(true: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Waits as long as the process lives: pytest's own limit ends what takes for ever."""
    while not true():
        assert process is None or process.poll() is None or true(), process.communicate()[0]
        time.sleep(0.02)
