# SPDX-License-Identifier: Apache-2.0
"""Runs of the entry point as a user starts them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from conftest import CLEAN, ROOT, SCRIPT

SETTINGS = {
    "MODEL_ID": "tiny", "TOTAL_STEPS": 6, "SAVE_STEPS": 2, "PROMPTS_PER_STEP": 3, "NUM_GENERATIONS": 4, "EVAL_SAMPLES": 0,
    "DATA": "data/tes_heldout_compact.csv", "SEED": 5,
}  # fmt: skip


def start(folder: Path, **settings: object) -> subprocess.Popen:
    environ = CLEAN | {k: str(v) for k, v in (SETTINGS | {"OUTPUT_DIR": folder} | settings).items()}
    return subprocess.Popen([sys.executable, str(SCRIPT)], env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.time() + 200
    while time.time() < deadline:
        path = folder / "metrics.csv"
        if path.exists() and any(line.startswith(f"{step},") for line in path.read_text().splitlines()):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never logged")
