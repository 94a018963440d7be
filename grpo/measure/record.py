# SPDX-License-Identifier: Apache-2.0
"""What every measurement says about itself, and how it is written."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas
import torch

from grpo.plan.machine import installed_versions
from grpo.run import durable
from grpo.settings import ROOT

BENCH, SCRIPT = ROOT / "scripts" / "bench.py", ROOT / "train_grpo.py"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "liger-kernel", "triton", "vllm")
read_json = functools.partial(durable.read_json, empty=(FileNotFoundError,))
NOISE = "grpo.measure.noise:noise"


def commit() -> str:
    """The commit that is measured; `-dirty` where the tree differs from it, results left out: a measurement writes them
    while it goes on. BENCH_COMMIT names it outside a checkout."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!docs/results")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """Processor, memory and GPU in words."""
    gpu = "no GPU"
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        gpu = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    return f"{gpu}; {os.cpu_count()} cores {platform.machine()}; Python {platform.python_version()}"


def figure(name: str, value: float, unit: str, note: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "note": note}


def tabled(table: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Figures of a table with lines `names | unit | note`: those that `found` holds, in the table's order. A note may name
    other values of `found` in braces."""
    made = []
    for line in table.strip().splitlines():
        names, unit, note = (cell.strip() for cell in line.split("|"))
        made += [figure(name, found[name], unit, note.format(**found)) for name in names.split() if name in found]
    return made


def short(value: str) -> str:
    """A word of a command, of a path in this machine only the name."""
    return shlex.quote(Path(value).name if value.startswith("/") else value)


def save(path: Path, figures: list[dict[str, Any]], command: str | None = None, **more: Any) -> None:
    """The measurement as JSON, in the form of all files under docs/results/; `more`: further keys."""
    record = {
        "command": command or " ".join(["python", "scripts/bench.py", *map(short, sys.argv[1:])]),
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "versions": {name: version for name, version in installed_versions(PACKAGES).items() if version},
        "commit": commit(),
        **more,
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write(path: Path, figures: list[dict[str, Any]], command: str | None = None, **more: Any) -> None:
    """`save`, and the same on the screen."""
    save(path, figures, command, **more)
    for one in figures:
        print(f"{one['name']:<28} {one['value']:>14,.6g} {one['unit']:<10} {one['note']}")
    print(f"written: {path}")


def shown(kind: str, *flags: str, given: str = "--model CHECKPOINT --data CSVS") -> str:
    """The command of a measurement of what is `given`, without the paths of the machine it ran on."""
    return " ".join(["python scripts/bench.py", kind, given, "--out JSON", *flags])


def steps_of(run: Path) -> pandas.DataFrame:
    """A run's metrics.csv, one row a step."""
    return pandas.read_csv(run / "metrics.csv")
