# SPDX-License-Identifier: Apache-2.0
"""The JSON that every measurement writes, and where it writes on the way."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas
import torch

from grpo.plan.machine import installed_versions
from grpo.run import durable
from grpo.settings import ROOT

BENCH, SCRIPT = ROOT / "scripts" / "bench.py", ROOT / "train_grpo.py"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "liger-kernel", "triton", "vllm")
MARK = "made_by_a_measurement"  # a file in every folder that the next measurement may delete
NOISE = "grpo.measure.noise:noise"
read_json = functools.partial(durable.read_json, empty=(FileNotFoundError,))


def commit() -> str:
    """The commit that is measured, with `-dirty` behind it where the tree differs from it. Results are left out of the
    comparison, because a measurement writes them while it runs. BENCH_COMMIT names the commit outside a checkout."""
    if name := os.environ.get("BENCH_COMMIT"):
        return name

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", ".", ":!docs/results")
        return git("rev-parse", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """Processor, memory and GPU in words."""
    gpu = "no GPU"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"{gpu}; {os.cpu_count()} cores {platform.machine()}; Python {platform.python_version()}"


def environment(words: str) -> dict[str, str]:
    """NAME=VALUE words as settings of train_grpo.py."""
    return dict(word.split("=", 1) for word in words.split())


def figure(name: str, value: float, unit: str, note: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "note": note}


def tabled(table: str, values: Mapping[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    """Figures of a table with lines `names | unit | note`: those that `values` holds, in the table's order. A note may
    name other values in braces. `prefix` is put before every name."""
    figures = []
    for line in table.strip().splitlines():
        names, unit, note = (cell.strip() for cell in line.split("|"))
        present = [name for name in names.split() if values.get(name) is not None]
        figures += [figure(prefix + name, values[name], unit, note.format(**values)) for name in present]
    return figures


def without_folders(word: str) -> str:
    """A word of a command as a shell takes it. Of an absolute path only the name stays, as in `--set MODEL_ID=/a/b`."""
    return shlex.quote(re.sub(r"(^|=|,)/(?:[^/,]*/)*", r"\1", word))


def this_command() -> str:
    """The command that runs now, without the folders of this machine."""
    script = Path(sys.argv[0])
    return " ".join(["python", f"{script.parent.name}/{script.name}", *map(without_folders, sys.argv[1:])])


def save(path: Path, figures: Sequence[Mapping[str, Any]], command: str | None = None, **more: Any) -> None:
    """Writes the measurement as JSON, in the form of all files under docs/results/; `more` are further keys."""
    record = {
        "command": command or this_command(),
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "versions": {name: version for name, version in installed_versions(PACKAGES).items() if version},
        "commit": commit(),
        **more,
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write(path: Path, figures: Sequence[Mapping[str, Any]], command: str | None = None, **more: Any) -> None:
    """`save`, and the same on the screen."""
    save(path, figures, command, **more)
    for row in figures:
        print(f"{row['name']:<28} {row['value']:>14,.6g} {row['unit']:<10} {row['note']}")
    print(f"written: {path}")


def steps_of(run: Path) -> pandas.DataFrame:
    """A run's metrics.csv, one row a step."""
    return pandas.read_csv(run / "metrics.csv")


def fresh_folder(path: Path) -> Path:
    """An empty folder for all that a measurement makes; what an earlier measurement left there is deleted. Raises
    FileExistsError for a folder that no measurement made."""
    if path.exists() and not (path / MARK).is_file():
        raise FileExistsError(
            f"--run {path} exists, and no measurement made it. Name another folder, or delete it yourself"
        )
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    (path / MARK).touch()
    return path
