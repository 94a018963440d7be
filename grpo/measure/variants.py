# SPDX-License-Identifier: Apache-2.0
"""Child processes of a measurement: each writes its figures while it goes on, and a variant of a run has its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo.measure.record import BENCH, Figure, Json, commit, read_json, write
from grpo.measure.watched import occupy


@dataclass(frozen=True)
class Variant:
    """Settings of a run under a name, and the GiB of the GPU that are left to it (None: all that are free)."""

    name: str
    settings: Mapping[str, str]
    free_gib: float | None = None

    def describe(self) -> str:
        """The variant in words, for the figures' notes."""
        words = [f"{name}={value}" for name, value in self.settings.items()]
        if self.free_gib:
            words.append(f"all but {self.free_gib:g} GiB of the GPU occupied")
        return ", ".join(words)


def result_path(options: argparse.Namespace, child: str) -> Path:
    """The JSON that a child process writes, beside the run's folder."""
    return Path(options.run).absolute().with_name(f"{options.command}-{child}.json")


def subject_of(options: argparse.Namespace, child: str) -> list[str]:
    """What a child measures: commit, options and variant. Results of another subject are not used."""
    variants = [variant for variant in getattr(options, "variants", ()) if variant.name == child]
    names = ("model", "data", "set", "lengths", "tokens", "kernels", "trl", "steps", "trl_parts")
    return [commit(), *(str(getattr(options, name, "")) for name in names), str(variants)]


def write_result(options: argparse.Namespace, child: str, values: Json, done: bool = False) -> None:
    """Writes what a child has measured so far, so that nothing is lost if the rest fails; `done`: that is all."""
    record = {"subject": subject_of(options, child), "done": done, **values}
    path = result_path(options, child)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")


def read_result(options: argparse.Namespace, child: str, only_done: bool = False) -> Json:
    """What a child has measured of this subject; empty if it has not, or with `only_done` if it did not finish."""
    record = read_json(result_path(options, child))
    is_ours = record.get("subject") == subject_of(options, child) and (record.get("done") or not only_done)
    return record if is_ours else {}


def run_child(options: argparse.Namespace, child: str) -> int:
    """Runs this same command with `--child` in a new process. Returns its exit code, or 1 if it wrote no result."""
    path = result_path(options, child)
    path.unlink(missing_ok=True)
    code = subprocess.run([sys.executable, str(BENCH), *sys.argv[1:], "--child", child], check=False).returncode
    if code or not path.exists():
        print(f"{child} ended with exit code {code}; {path} holds what it had measured, if any", file=sys.stderr)
    return code or int(not path.exists())


def run_variants(options: argparse.Namespace, figures_of: Callable[[Variant, Json, str], list[Figure]]) -> int:
    """Runs the variants one after the other and writes the JSON after each. `figures_of` gets a variant, what its child
    measured, and what stands before the names of its figures. Returns 1 if a child failed."""
    failed, figures = False, []
    for variant in options.variants:
        if not (options.resume and read_result(options, variant.name, only_done=True)):
            ballast = occupy(variant.free_gib) if variant.free_gib else None
            failed |= run_child(options, variant.name) != 0
            del ballast
            torch.cuda.empty_cache()
        if values := read_result(options, variant.name):
            prefix = f"{variant.name.replace('-', '_')}_" if options.variant else ""
            figures += figures_of(variant, values, prefix)
            write(Path(options.out), figures)
    return int(failed)
