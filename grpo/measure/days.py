# SPDX-License-Identifier: Apache-2.0
"""Real days: a folder of hourly profiles, split into days to train on and days held out, trained on and measured."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time
from pathlib import Path
from typing import Any

import numpy as np

from grpo.measure.outcome import outcome_figures
from grpo.measure.record import SCRIPT, figure, read_json, steps_of, without_folders, write
from grpo.run.durable import file_sha256
from grpo.settings import FIELDS
from grpo.tasks.tes.dataset import SEED, SHORT_SHARE, profile_files, read_profiles
from grpo.tasks.tes.profiles import Profile, ProfileError, to_csv, windows
from grpo.tasks.tes.record import LEAST_WINDOWS
from grpo.tasks.tes.simulator import SIMULATOR

FEWEST_WINDOWS = 20  # to walk through, as in the demo's data: real ones, and varied ones where they are fewer
VARY = 2.0  # largest factor of a varied day's load


@dataclass(frozen=True)
class Split:
    """Profiles by their file's name without ending."""

    train: dict[str, Profile]
    heldout: dict[str, Profile]
    paths: dict[str, Path]

    def windows(self, name: str) -> int:
        """The number of windows of `train` or `heldout`."""
        return sum(len(windows(profile)) for profile in getattr(self, name).values())


def read_split(folder: Path, pattern: str, heldout: Sequence[str], **columns: str | None) -> Split:
    """The profiles of a folder, split by files. `heldout` holds names of files, or how many of the last ones by date;
    without it the last third is held out, at least one. `columns` are those of `read_profile`. Raises ProfileError with
    every problem."""
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise ProfileError([f"{folder}: holds no profile ({pattern}); docs/plant.md says what one looks like"])
    try:
        profiles = read_profiles(paths, ("full",), **columns)
    except ProfileError as error:
        advice = []
        if any("header: no datetime column" in problem for problem in error.problems):
            advice = ["--files PATTERN leaves out CSVs that are no profiles"]
        raise ProfileError([*error.problems, *advice]) from None
    ordered = sorted(paths, key=lambda path: profiles[path.stem].dates)
    if not heldout or (len(heldout) == 1 and heldout[0].isdigit()):
        count = int(heldout[0]) if heldout else max(1, len(ordered) // 3)
        held = ordered[max(0, len(ordered) - count) :]
    else:
        names = {Path(name).name for name in heldout}
        held = [path for path in ordered if path.name in names]
        if unknown := names - {path.name for path in held}:
            there = ", ".join(path.name for path in ordered)
            raise ProfileError([f"--heldout {name}: {folder} has no such profile, only {there}" for name in unknown])
    if not 0 < len(held) < len(ordered):
        count = "1 profile" if len(ordered) == 1 else f"{len(ordered)} profiles"
        needs = "at least one must be trained on and one held out"
        raise ProfileError([f"{folder}: {count}, {len(held)} held out; {needs}"])
    trained, problems = [path for path in ordered if path not in held], []
    for train, other in itertools.product(trained, held):
        if shared := sorted(set(profiles[train.stem].dates) & set(profiles[other.stem].dates)):
            days = f"both have {', '.join(map(str, shared))}; take it out of one"
            problems.append(f"{train.name} (to train on) and {other.name} (held out) {days}")
    if problems:
        raise ProfileError(problems)
    by_name = ({path.stem: profiles[path.stem] for path in side} for side in (trained, held))
    return Split(*by_name, {path.stem: path for path in ordered})


def write_data(split: Split, out: Path, prompt: str) -> dict[str, str]:
    """Writes training rows, held-out rows and held-out profiles below `out`, and returns the settings that name these
    files. Raises OSError.

    Two real windows alone taught a policy that left a fifth of a warmer month's load unserved (docs/tried.md)."""
    walks = math.ceil(FEWEST_WINDOWS / split.windows("train"))
    more = {"trajectories": walks, "short_share": SHORT_SHARE, "vary": VARY}
    files = {
        ("DATA", "train"): dict(profile_files(split.train, (prompt,), SEED, **more)),
        ("EVAL_DATA", "heldout"): dict(profile_files(split.heldout, (prompt,), SEED)),
        ("EVAL_PROFILE", "profiles"): {f"{name}.csv": hours_csv(profile) for name, profile in split.heldout.items()},
    }
    settings = {}
    for (setting, folder), texts in files.items():
        (out / folder).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / folder / name).write_bytes(text.encode())
        settings[setting] = ",".join(str(out / folder / name) for name in texts)
    return settings


def hours_csv(profile: Profile) -> str:
    """A profile with the column names that need no choice, and every digit: the closed loop must see what the rows
    tell."""
    rows = [
        (datetime.combine(day, time(hour)), float(co2[hour]), float(load[hour]))
        for day, co2, load in zip(profile.dates, profile.co2, profile.load_kw, strict=True)
        for hour in np.flatnonzero(np.isfinite(co2)).tolist()
    ]
    return to_csv(("datetime", "co2_kg_per_kwh", "load_kw"), rows)


def run_figures(run: Path, split: Split, label: str) -> list[dict[str, Any]]:
    """What the run of a split came to, as far as the run has it. `label` is put after the names, where several runs are
    in one file."""
    names = ("train", "heldout")
    figures = [figure(f"{name}_windows{label}", split.windows(name), "windows", "of three days") for name in names]
    figures.append(figure(f"steps{label}", len(steps_of(run)), "steps"))
    return figures + outcome_figures(run, label=label)


def shown_command(
    environ: Mapping[str, str], options: argparse.Namespace, chosen: Sequence[str], heldout: Sequence[str]
) -> str:
    """The command that was given, with the settings that it had from the environment besides those `chosen` here,
    without folders of the machine."""
    settings = [f"{name}={environ[name]}" for name in FIELDS if name in environ and name not in chosen]
    words = [*settings, "python", "scripts/days.py", "FOLDER", "--model", options.model, "--heldout", *heldout]
    if options.seeds:
        words += ["--seeds", *map(str, options.seeds)]
    return " ".join(map(without_folders, words))


def splits(options: argparse.Namespace) -> list[Split]:
    """The split that was asked for; with `--heldout each` one for each file, held out in turn. Raises ProfileError."""
    columns = {"co2_column": options.co2_column, "load_column": options.load_column}
    each = options.heldout == ["each"]
    first = read_split(options.folder, options.files, [] if each else options.heldout, **columns)
    if not each:
        return [first]
    return [read_split(options.folder, options.files, [path.name], **columns) for path in first.paths.values()]


def days(options: argparse.Namespace) -> int:
    """Makes the data, runs train_grpo.py for each split and seed, prints the plant's tables, writes the figures;
    returns the exit code of train_grpo.py. Raises ProfileError, OSError."""
    figures, chosen = [], splits(options)
    for split, seed in itertools.product(chosen, options.seeds or [None]):
        label = f"/{next(iter(split.heldout))}" if len(chosen) > 1 else ""
        label += f"/seed{seed}" if seed is not None else ""
        out = options.out / label[1:].replace("/", "-")  # with one run the folder itself
        settings = write_data(split, out / "data", "compact" if options.model == "tiny" else "full")
        settings |= {"MODEL_ID": options.model, "OUTPUT_DIR": str(out / "run")}
        settings |= {"SEED": str(seed)} if seed is not None else {}
        held = split.windows("heldout")
        few = f" (fewer than {LEAST_WINDOWS}: no interval)" if held < LEAST_WINDOWS else ""
        names = f"train on {', '.join(split.train)}; held out {', '.join(split.heldout)}"
        print(f"{names}: {held} window(s){few}", flush=True)
        if code := subprocess.run([sys.executable, str(SCRIPT)], env=os.environ | settings).returncode:
            return code
        plant = read_json(out / "run/closed_loop.json")
        print(f"\n{SIMULATOR.table(plant)}" if plant else "\nthe closed loop was not run: training.log says why")
        print(f"report: {out / 'run/report.html'}", flush=True)
        figures += run_figures(out / "run", split, label)
    if options.results:
        held_out = ["each"] if len(chosen) > 1 else [chosen[0].paths[name].name for name in chosen[0].heldout]
        more = {"files": [file_record(chosen[0], name, len(chosen) > 1) for name in chosen[0].paths]}
        more |= {"source": options.source} if options.source else {}
        write(options.results, figures, shown_command(os.environ, options, list(settings), held_out), **more)
    return 0


def file_record(split: Split, name: str, each: bool) -> dict[str, str]:
    """A profile's name and SHA-256, and the set that it was in."""
    side = "heldout" if name in split.heldout else "train"
    path = split.paths[name]
    return {"name": path.name, "sha256": file_sha256(path), "set": "held out in turn" if each else side}
