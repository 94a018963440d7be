# SPDX-License-Identifier: Apache-2.0
"""Real days: a folder of hourly profiles, split into days to train on and days held out, trained on and measured."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, time
from pathlib import Path

import numpy as np

from grpo.measure.record import SCRIPT
from grpo.run.child import run_child
from grpo.tasks.tes.dataset import SEED, SHORT_SHARE, profile_files, read_profiles
from grpo.tasks.tes.profiles import Profile, ProfileError, to_csv, windows
from grpo.tasks.tes.record import LEAST_WINDOWS

FEWEST_WINDOWS = 20  # As in the demo's data. Varied windows make up for missing real ones.
VARY = 2.0  # largest factor of a varied day's load


def window_count(profiles: dict[str, Profile]) -> int:
    return sum(len(windows(profile)) for profile in profiles.values())


@dataclass(frozen=True)
class Split:
    """Profiles by their file's name without ending."""

    train: dict[str, Profile]
    heldout: dict[str, Profile]


def choose_heldout(ordered: Sequence[Path], heldout: Sequence[str], folder: Path) -> list[Path]:
    """The files to hold out, chosen from those of `folder`, `ordered` by date, as `read_split` says. Raises
    ProfileError."""
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


def read_split(folder: Path, pattern: str, heldout: Sequence[str]) -> Split:
    """The profiles of a folder, split by files. `heldout` holds names of files, or how many of the last ones by date;
    without it the last third is held out, at least one. Raises ProfileError with every problem."""
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise ProfileError([f"{folder}: holds no profile ({pattern}); docs/plant.md says what one looks like"])
    profiles = read_profiles(paths)
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
    return Split(*({path.stem: profiles[path.stem] for path in side} for side in (trained, held)))


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
    """A profile as CSV, with the columns' standard names and every digit, so that the closed loop sees the numbers that
    the rows show."""
    rows = [
        (datetime.combine(day, time(hour)), float(co2[hour]), float(load[hour]))
        for day, co2, load in zip(profile.dates, profile.co2, profile.load_kw, strict=True)
        for hour in np.flatnonzero(np.isfinite(co2)).tolist()
    ]
    return to_csv(("datetime", "co2_kg_per_kwh", "load_kw"), rows)


def days(options: argparse.Namespace) -> int:
    """Makes the data and runs train_grpo.py on it; returns its exit code. Raises ProfileError, OSError."""
    split = read_split(options.folder, options.files, options.heldout)
    settings = write_data(split, options.out / "data", "compact" if options.model == "tiny" else "full")
    settings |= {"MODEL_ID": options.model, "OUTPUT_DIR": str(options.out / "run")}
    held = window_count(split.heldout)
    few = f" (fewer than {LEAST_WINDOWS}: no interval)" if held < LEAST_WINDOWS else ""
    names = f"train on {', '.join(split.train)}; held out {', '.join(split.heldout)}"
    print(f"{names}: {held} window(s){few}", flush=True)
    return run_child([sys.executable, str(SCRIPT)], settings)
