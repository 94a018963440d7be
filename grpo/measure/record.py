# SPDX-License-Identifier: Apache-2.0
"""What every measurement says about itself."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from grpo.evaluate.run_data import read_log
from grpo.settings import ROOT

BENCH = ROOT / "scripts" / "bench.py"
NOISE = "grpo.measure.noise:noise"


def commit() -> str:
    """The commit that is measured; `-dirty` where the tree differs from it, results left out: a measurement writes them
    while it goes on. BENCH_COMMIT names it outside a checkout."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = [*git, "status", "--porcelain", "--", ".", ":!docs/results"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("-dirty" if changed.strip() else "")


def machine() -> str:
    """Processor, memory and GPU in words."""

    gpu = "no GPU"
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        gpu = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    return f"{gpu}; {os.cpu_count()} cores {platform.machine()}; Python {platform.python_version()}"


def write(path: Path, figures: list[dict[str, Any]], command: str | None = None) -> None:
    """The measurement as JSON, in the form of all files under docs/results/."""
    versions = {}
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "liger-kernel", "triton", "vllm"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    record = {
        "command": command or " ".join(["python", "scripts/bench.py", *sys.argv[1:]]),
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "commit": commit(),
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for one in figures:
        print(f"{one['name']:<28} {one['value']:>14,.6g} {one['unit']:<10} {one['note']}")
    print(f"written: {path}")


def file_system(path: str) -> str:
    """Type of the file system that a path lies on, as Linux names it: ext4, tmpfs, ..."""
    lines = (line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines())
    mounts = {Path(line[1]): line[2] for line in lines}
    whole = Path(path).resolve()
    return next(mounts[place] for place in (whole, *whole.parents) if place in mounts)


def shown(kind: str, *flags: str) -> str:
    """The command of a measurement that needs a checkpoint, without the paths of the machine it ran on."""
    return " ".join(["python scripts/bench.py", kind, "--model CHECKPOINT --data CSVS --out JSON", *flags])


def steps_of(run: Path) -> list[dict[str, str]]:
    """Rows of a run's metrics.csv as text by column."""

    return list(read_log(run / "metrics.csv"))


def figure(name: str, value: float, unit: str, note: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "note": note}


def package_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
