# SPDX-License-Identifier: Apache-2.0
"""Real days: a folder of hourly profiles, split into days to train on and days held out, trained on and measured."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time
from pathlib import Path

import numpy as np

from grpo.measure import record
from grpo.measure.record import Figure, figure
from grpo.preflight.checks import preflight
from grpo.run.child import run_child
from grpo.run.durable import file_sha256
from grpo.run.folder import IS_COMPLETE
from grpo.settings import FIELDS
from grpo.tasks.tes.dataset import SEED, SHORT_SHARE, profile_files, read_profiles
from grpo.tasks.tes.profiles import Profile, ProfileError, to_csv, windows
from grpo.tasks.tes.record import LEAST_WINDOWS
from grpo.tasks.tes.simulator import SIMULATOR

FEWEST_WINDOWS = 20  # to walk through, as in the demo's data: real ones, and varied ones where they are fewer
VARY = 2.0  # largest factor of a varied day's load


def window_count(profiles: dict[str, Profile]) -> int:
    return sum(len(windows(profile)) for profile in profiles.values())


@dataclass(frozen=True)
class Split:
    """Profiles by their file's name without ending."""

    train: dict[str, Profile]
    heldout: dict[str, Profile]
    paths: dict[str, Path]


def choose_heldout(ordered: Sequence[Path], heldout: Sequence[str], folder: Path) -> list[Path]:
    """The files that are held out of those of `folder`, which come in the `ordered` of their dates: as `read_split`
    says. Raises ProfileError."""
    if not heldout or (len(heldout) == 1 and heldout[0].isdigit()):
        count = int(heldout[0]) if heldout else max(1, len(ordered) // 3)
        chosen = list(ordered[max(0, len(ordered) - count) :])
    else:
        names = {Path(name).name for name in heldout}
        chosen = [path for path in ordered if path.name in names]
        present = ", ".join(path.name for path in ordered)
        if unknown := names - {path.name for path in chosen}:
            raise ProfileError([f"--heldout {name}: {folder} has no such profile, only {present}" for name in unknown])
    if not 0 < len(chosen) < len(ordered):
        counts = f"{len(ordered)} profile{'s' if len(ordered) > 1 else ''}, {len(chosen)} held out"
        raise ProfileError([f"{folder}: {counts}; at least one must be trained on and one held out"])
    return chosen


def read_split(
    folder: Path, pattern: str, heldout: Sequence[str], co2_column: str | None = None, load_column: str | None = None
) -> Split:
    """The profiles of a folder, split by files. `heldout` holds names of files, or how many of the last ones by date;
    without it the last third is held out, at least one. Raises ProfileError with every problem."""
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise ProfileError([f"{folder}: holds no profile ({pattern}); docs/plant.md says what one looks like"])
    try:
        profiles = read_profiles(paths, ("full",), co2_column=co2_column, load_column=load_column)
    except ProfileError as error:
        advice = []
        if any("header: no datetime column" in problem for problem in error.problems):
            advice = ["--files PATTERN leaves out CSVs that are no profiles"]
        raise ProfileError([*error.problems, *advice]) from None
    ordered = sorted(paths, key=lambda path: profiles[path.stem].dates)
    held = choose_heldout(ordered, heldout, folder)
    trained, problems = [path for path in ordered if path not in held], []
    for path, other in itertools.product(trained, held):
        if shared := sorted(set(profiles[path.stem].dates) & set(profiles[other.stem].dates)):
            dates = ", ".join(map(str, shared))
            pair = f"{path.name} (to train on) and {other.name} (held out)"
            problems.append(f"{pair} both have {dates}; take it out of one")
    if problems:
        raise ProfileError(problems)
    train, heldout_profiles = ({path.stem: profiles[path.stem] for path in side} for side in (trained, held))
    return Split(train, heldout_profiles, {path.stem: path for path in ordered})


def write_data(split: Split, out: Path, prompt: str) -> dict[str, str]:
    """Writes training rows, held-out rows and held-out profiles below `out`, and returns the settings that name these
    files. Raises OSError.

    Two real windows alone taught a policy that left a fifth of a warmer month's load unserved (docs/tried.md)."""
    walks = math.ceil(FEWEST_WINDOWS / window_count(split.train))
    train = profile_files(split.train, (prompt,), SEED, trajectories=walks, short_share=SHORT_SHARE, vary=VARY)
    files = {
        ("DATA", "train"): dict(train),
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


def run_figures(run: Path, split: Split, suffix: str) -> list[Figure]:
    """The windows of a split and the figures of its run, as far as that has them. `suffix` is put after the names."""
    figures = [
        figure(f"train_windows{suffix}", window_count(split.train), "windows", "of three days"),
        figure(f"heldout_windows{suffix}", window_count(split.heldout), "windows", "of three days"),
        figure(f"steps{suffix}", len(record.steps_of(run)), "steps"),
    ]
    return figures + record.outcome_figures(run, suffix=suffix)


def read_splits(options: argparse.Namespace) -> list[Split]:
    """The split that was asked for; with `--heldout each` one for each file, held out in turn. Raises ProfileError."""
    columns = options.co2_column, options.load_column
    each = options.heldout == ["each"]
    first = read_split(options.folder, options.files, [] if each else options.heldout, *columns)
    if not each:
        return [first]
    return [read_split(options.folder, options.files, [path.name], *columns) for path in first.paths.values()]


def file_records(split: Split, in_turn: bool) -> list[dict[str, str]]:
    """The name of each profile, its SHA-256, and the set that it was in."""
    records = []
    for name, path in split.paths.items():
        side = "heldout" if name in split.heldout else "train"
        records.append({"name": path.name, "sha256": file_sha256(path), "set": "held out in turn" if in_turn else side})
    return records


def is_complete(settings: Mapping[str, str]) -> bool:
    """Whether the run with these settings is complete, which is the only reason why train_grpo.py would refuse it."""
    problems = preflight(os.environ | settings).problems
    return len(problems) == 1 and IS_COMPLETE in problems[0]


def days(options: argparse.Namespace) -> int:
    """Makes the data, runs train_grpo.py for each split and seed, prints the plant's tables, writes the figures;
    returns the exit code of train_grpo.py. Raises ProfileError, OSError."""
    figures, splits = [], read_splits(options)
    own_settings = [f"{name}={os.environ[name]}" for name in FIELDS if name in os.environ]
    for split, seed in itertools.product(splits, options.seeds or [None]):
        suffix = f"/{next(iter(split.heldout))}" if len(splits) > 1 else ""
        suffix += f"/seed{seed}" if seed is not None else ""
        out = options.out / suffix[1:].replace("/", "-")  # With one run it is the folder itself.
        settings = write_data(split, out / "data", "compact" if options.model == "tiny" else "full")
        settings |= {"MODEL_ID": options.model, "OUTPUT_DIR": str(out / "run")}
        settings |= {"SEED": str(seed)} if seed is not None else {}
        held = window_count(split.heldout)
        few = f" (fewer than {LEAST_WINDOWS}: no interval)" if held < LEAST_WINDOWS else ""
        names = f"train on {', '.join(split.train)}; held out {', '.join(split.heldout)}"
        print(f"{names}: {held} window(s){few}", flush=True)
        if is_complete(settings):
            print(f"{out / 'run'} is complete")
        elif code := run_child([sys.executable, str(record.SCRIPT)], settings):
            return code
        plant = record.read_json(out / "run/closed_loop.json")
        print(f"\n{SIMULATOR.table(plant)}" if plant else "\nthe closed loop was not run: training.log says why")
        print(f"report: {out / 'run/report.html'}", flush=True)
        figures += run_figures(out / "run", split, suffix)
    if options.results:
        more: record.Json = {"files": file_records(splits[0], len(splits) > 1)}
        more |= {"source": options.source} if options.source else {}
        words = [*map(record.without_folders, own_settings), record.this_command()]
        record.write(options.results, figures, " ".join(words), more)
    return 0
