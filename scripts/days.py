#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train on real days and measure on others: from a folder of hourly profiles to a report.

    python scripts/days.py profiles/                                  # holds out the last third
    python scripts/days.py profiles/ --heldout 2 --out runs/mine      # the last two by date
    python scripts/days.py profiles/ --heldout may.csv --model tiny   # on a CPU
    TOTAL_STEPS=50 python scripts/days.py profiles/                   # settings pass through

A profile is a CSV with one row an hour: docs/plant.md, "Your own days". OUT gets data/ (training rows and held-out
rows) and run/, the OUTPUT_DIR of train_grpo.py. The same command continues what was interrupted.

Exit codes: 0 done, 2 the profiles cannot be used (every problem is named); those of train_grpo.py where it fails.
"""

import argparse
import itertools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.common import ROOT, InputError, reflow
from grpo.process.child import run_child
from grpo.process.ending import run_script
from grpo.settings.table import Settings
from grpo.tasks.tes.dataset import SEED, SHORT_SHARE, profile_files, read_profiles
from grpo.tasks.tes.profiles import Profile, cut_windows
from grpo.tasks.tes.record import LEAST_WINDOWS

FEWEST_WINDOWS = 20  # training windows, as in the demo's data; varied copies stand in for missing real ones
VARY = 2.0  # largest factor of a varied day's load
Profiles = dict[Path, Profile]  # by their files


def window_count(profiles: Profiles) -> int:
    return sum(len(cut_windows(profile)) for profile in profiles.values())


def choose_heldout(ordered: Sequence[Path], heldout: Sequence[str], folder: Path) -> list[Path]:
    """The files of `folder` to hold out, of those `ordered` by date, as `read_split` says. Raises InputError."""
    if not heldout or (len(heldout) == 1 and heldout[0].isdecimal()):
        count = int(heldout[0]) if heldout else max(1, len(ordered) // 3)
        chosen = list(ordered[max(0, len(ordered) - count) :])
    else:
        names = {Path(name).name for name in heldout}
        chosen = [path for path in ordered if path.name in names]
        present = ", ".join(path.name for path in ordered)
        if unknown := names - {path.name for path in chosen}:
            raise InputError(*(f"--heldout {name}: {folder} has no such profile, only {present}" for name in unknown))
    if not 0 < len(chosen) < len(ordered):
        counts = f"{len(ordered)} profile{'s' if len(ordered) > 1 else ''}, {len(chosen)} held out"
        raise InputError(f"{folder}: {counts}; at least one must be trained on and one held out")
    return chosen


def read_split(folder: Path, pattern: str, heldout: Sequence[str]) -> tuple[Profiles, Profiles]:
    """The profiles of a folder to train on, and those held out. `heldout` names files, or how many to hold out, the
    last by date; if it is empty, the last third, at least one. Raises InputError with every problem."""
    try:
        paths = sorted(folder.glob(pattern))
    except (ValueError, NotImplementedError):  # Empty, or absolute.
        raise InputError(f"--files {pattern!r}: name files of {folder}, such as '2025-*.csv'") from None
    if commas := [path for path in paths if "," in str(path)]:
        raise InputError(*(f"{path}: settings separate files by commas; rename it, or its folder" for path in commas))
    if not paths:
        raise InputError(f"{folder}: holds no profile ({pattern}); docs/plant.md says what one looks like")
    profiles = read_profiles(paths)
    ordered = sorted(paths, key=lambda path: profiles[path].dates)
    heldout_paths = choose_heldout(ordered, heldout, folder)
    trained, problems = [path for path in ordered if path not in heldout_paths], []
    for path, other in itertools.product(trained, heldout_paths):
        if shared := sorted(set(profiles[path].dates) & set(profiles[other].dates)):
            dates = ", ".join(map(str, shared))
            pair = f"{path.name} (to train on) and {other.name} (held out)"
            problems.append(f"{pair} both have {dates}; take it out of one")
    if problems:
        raise InputError(*problems)
    return {path: profiles[path] for path in trained}, {path: profiles[path] for path in heldout_paths}


def write_data(train: Profiles, heldout: Profiles, out: Path, prompt: str) -> dict[str, str]:
    """Writes training and held-out rows below `out`; returns the settings that name them and the held-out profiles.

    Varied copies fill up the training windows: two real ones alone left a fifth of a warmer month's load unserved."""
    trajectories = math.ceil(FEWEST_WINDOWS / window_count(train))
    files = {
        "DATA": profile_files(train, (prompt,), SEED, trajectories=trajectories, short_share=SHORT_SHARE, vary=VARY),
        "EVAL_DATA": profile_files(heldout, (prompt,), SEED),
    }
    settings = {"EVAL_PROFILE": ",".join(map(str, heldout))}
    for (setting, texts), folder in zip(files.items(), (out / "train", out / "heldout"), strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        paths = {folder / name: text for name, text in texts}
        for path, text in paths.items():
            path.write_bytes(text.encode())
        settings[setting] = ",".join(map(str, paths))
    return settings


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    add, model = parser.add_argument, os.environ.get("MODEL_ID") or Settings.MODEL_ID
    add("folder", metavar="FOLDER", type=Path, help="of hourly profiles")
    add("--files", default="*.csv", metavar="PATTERN", help="which of its files are profiles (default %(default)s)")
    add("--heldout", nargs="+", default=[], metavar="N|FILE", help="files held out, or how many of the last ones")
    add("--out", type=Path, default=Path("runs/days"), help="folder of data and run (default %(default)s)")
    add("--model", default=model, help="MODEL_ID; `tiny` reads compact prompts (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_args(argv)
    if "," in str(options.out):
        raise InputError(f"--out {options.out}: settings separate files by commas; name another folder")
    try:
        train, heldout = read_split(options.folder, options.files, options.heldout)
        settings = write_data(train, heldout, options.out / "data", "compact" if options.model == "tiny" else "full")
        settings |= {"TASK": "tes", "MODEL_ID": options.model, "OUTPUT_DIR": str(options.out / "run")}
        count = window_count(heldout)
        few = f" (fewer than {LEAST_WINDOWS}: no confidence interval)" if count < LEAST_WINDOWS else ""
        names, held_names = (", ".join(path.stem for path in side) for side in (train, heldout))
        print(f"train on {names}; held out {held_names}: {count} window(s){few}", flush=True)
        return run_child([sys.executable, str(ROOT / "train_grpo.py")], settings)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(run_script(main))
