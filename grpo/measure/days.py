# SPDX-License-Identifier: Apache-2.0
"""Real days: a folder of hourly profiles, split into days to train on and days held out, trained on and measured."""

from __future__ import annotations

import argparse
import dataclasses
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

from grpo.measure.proof import reward_figures
from grpo.measure.record import SCRIPT, figure, read_json, short, steps_of, write
from grpo.run.durable import file_sha256
from grpo.settings import Settings
from grpo.tasks.tes.dataset import SEED, SHORT_SHARE, profile_files, read_profiles
from grpo.tasks.tes.profiles import Profile, ProfileError, to_csv, windows
from grpo.tasks.tes.record import LEAST_WINDOWS, table

FEWEST_WINDOWS = 20  # to walk through, as in the demo's data: real ones, and varied ones where they are fewer
VARY = 2.0  # largest factor of a varied day's load
PLANT = {"regret_percent": "%", "unserved_kwh": "kWh", "co2_kg": "kg"}  # figures of each policy, units


@dataclass(frozen=True)
class Split:
    """Profiles by their file's name without ending."""

    train: dict[str, Profile]
    heldout: dict[str, Profile]
    paths: dict[str, Path]


def read_split(folder: Path, pattern: str, heldout: Sequence[str], **columns: str | None) -> Split:
    """The profiles of a folder, split by files. `heldout`: names of files, or how many of the last ones by date; without,
    the last third, at least one. Columns: as of `read_profile`. Raises ProfileError with every problem."""
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise ProfileError([f"{folder}: holds no profile ({pattern}); docs/plant.md says what one looks like"])
    try:
        found = read_profiles(paths, ("full",), **columns)
    except ProfileError as error:
        other = any("header: no datetime column" in problem for problem in error.problems)
        raise ProfileError(
            [*error.problems, *["--files PATTERN leaves out CSVs that are no profiles"] * other]
        ) from None
    ordered = sorted(paths, key=lambda path: found[path.stem].dates)
    if not heldout or (len(heldout) == 1 and heldout[0].isdigit()):
        count = int(heldout[0]) if heldout else max(1, len(ordered) // 3)
        held = ordered[max(0, len(ordered) - count) :]
    else:
        held = [path for path in ordered if path.name in {Path(name).name for name in heldout}]
        if unknown := {Path(name).name for name in heldout} - {path.name for path in held}:
            names = ", ".join(path.name for path in ordered)
            raise ProfileError([f"--heldout {name}: {folder} has no such profile, only {names}" for name in unknown])
    if not 0 < len(held) < len(ordered):
        several = f"{len(ordered)} profile{'s' * (len(ordered) > 1)}, {len(held)} held out"
        raise ProfileError([f"{folder}: {several}; at least one must be trained on and one held out"])
    trained, problems = [path for path in ordered if path not in held], []
    for train, other in itertools.product(trained, held):
        if shared := sorted(set(found[train.stem].dates) & set(found[other.stem].dates)):
            days = f"both have {', '.join(map(str, shared))}; take it out of one"
            problems.append(f"{train.name} (to train on) and {other.name} (held out) {days}")
    if problems:
        raise ProfileError(problems)
    train, rest = ({path.stem: found[path.stem] for path in some} for some in (trained, held))
    return Split(train, rest, {path.stem: path for path in ordered})


def write_data(split: Split, out: Path, prompt: str) -> dict[str, str]:
    """Training rows, held-out rows and held-out profiles below `out`; the settings that name these files. Raises OSError.

    Two real windows alone taught a policy that left a fifth of a warmer month's load unserved (docs/tried.md)."""
    walks = math.ceil(FEWEST_WINDOWS / sum(len(windows(profile)) for profile in split.train.values()))
    more = {"trajectories": walks, "short_share": SHORT_SHARE, "vary": VARY}
    files = {"DATA": dict(profile_files(split.train, (prompt,), SEED, **more))}
    files["EVAL_DATA"] = dict(profile_files(split.heldout, (prompt,), SEED))
    files["EVAL_PROFILE"] = {f"{name}.csv": hours_csv(profile) for name, profile in split.heldout.items()}
    paths: dict[str, list[str]] = {}
    for setting, folder in (("DATA", "train"), ("EVAL_DATA", "heldout"), ("EVAL_PROFILE", "profiles")):
        (out / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files[setting].items():
            (out / folder / name).write_bytes(text.encode())
            paths.setdefault(setting, []).append(str(out / folder / name))
    return {setting: ",".join(names) for setting, names in paths.items()}


def hours_csv(profile: Profile) -> str:
    """A profile with the column names that need no choice, and every digit: the closed loop must see what the rows tell."""
    rows = [
        (datetime.combine(day, time(hour)), float(co2[hour]), float(load[hour]))
        for day, co2, load in zip(profile.dates, profile.co2, profile.load_kw, strict=True)
        for hour in np.flatnonzero(np.isfinite(co2)).tolist()
    ]
    return to_csv(("datetime", "co2_kg_per_kwh", "load_kw"), rows)


def measured(run: Path, split: Split, label: str = "") -> list[dict[str, Any]]:
    """What the run of a split came to: held-out reward and, policy by policy, the plant; as far as the run has them.
    `label` stands behind the names where several runs are in one file."""
    count = {name: sum(len(windows(profile)) for profile in getattr(split, name).values()) for name in ("train", "heldout")}  # fmt: skip
    made = [figure(f"{name}_windows", value, "windows", "of three days") for name, value in count.items()]
    made.append(figure("steps", len(steps_of(run)), "steps"))
    evaluation = read_json(run / "evaluation.json")
    made += reward_figures(evaluation)[0] if {"before", "after"} <= evaluation.keys() else []
    for policy, total in read_json(run / "closed_loop.json").get("totals", {}).items():
        for name, unit in PLANT.items():
            low, high = (total.get(f"{name}{end}") for end in ("_low", "_high"))
            note = "" if low is None else f"95% interval over windows {low:.2f} to {high:.2f}"
            made += [figure(f"{name}_{policy}", total[name], unit, note)] if total[name] is not None else []
    return [one | {"name": one["name"] + label} for one in made]


def shown_command(
    environ: Mapping[str, str], options: argparse.Namespace, given: Sequence[str], heldout: Sequence[str]
) -> str:
    """The command that was given, with the settings that it had from the environment, without folders of the machine."""
    names = [spec.name for spec in dataclasses.fields(Settings) if spec.name in environ and spec.name not in given]
    settings = [f"{name}={short(environ[name])}" for name in names]
    held = " ".join(map(short, heldout))
    seeds = f" --seeds {' '.join(map(str, options.seeds))}" * bool(options.seeds)
    model = short(options.model)
    return " ".join([*settings, f"python scripts/days.py FOLDER --model {model} --heldout {held}{seeds}"])


def splits(options: argparse.Namespace) -> list[Split]:
    """The split that was asked for; with `--heldout each` one for each file, held out in turn. Raises ProfileError."""
    columns = {"co2_column": options.co2_column, "load_column": options.load_column}
    first = read_split(options.folder, options.files, [] if options.heldout == ["each"] else options.heldout, **columns)
    if options.heldout != ["each"]:
        return [first]
    return [read_split(options.folder, options.files, [path.name], **columns) for path in first.paths.values()]


def days(options: argparse.Namespace) -> int:
    """Make the data, run train_grpo.py for each split and seed, print the plant's tables, write the figures; returns the
    exit code of train_grpo.py. Raises ProfileError, OSError."""
    made, chosen = [], splits(options)
    runs = list(itertools.product(chosen, options.seeds or [None]))
    for split, seed in runs:
        label = "".join(
            [f"/{name}" for name in split.heldout if len(chosen) > 1] + [f"/seed{seed}"] * (seed is not None)
        )
        out = options.out / label[1:].replace("/", "-")  # with one run the folder itself
        given = write_data(split, out / "data", "compact" if options.model == "tiny" else "full")
        given |= {"MODEL_ID": options.model, "OUTPUT_DIR": str(out / "run")} | (
            {} if seed is None else {"SEED": str(seed)}
        )
        held = sum(len(windows(profile)) for profile in split.heldout.values())
        few = f" (fewer than {LEAST_WINDOWS}: no interval)" * (held < LEAST_WINDOWS)
        names = f"train on {', '.join(split.train)}; held out {', '.join(split.heldout)}"
        print(f"{names}: {held} window(s){few}", flush=True)
        if code := subprocess.run([sys.executable, str(SCRIPT)], env=os.environ | given).returncode:
            return code
        plant = read_json(out / "run/closed_loop.json")
        print(f"\n{table(plant)}" if plant else "\nthe closed loop was not run: training.log says why")
        print(f"report: {out / 'run/report.html'}", flush=True)
        made += measured(out / "run", split, label)
    if options.results:
        files = [file_record(chosen[0], name, len(chosen) > 1) for name in chosen[0].paths]
        held_out = ["each"] if len(chosen) > 1 else [chosen[0].paths[name].name for name in chosen[0].heldout]
        more = {"files": files} | ({"source": options.source} if options.source else {})
        write(options.results, made, shown_command(os.environ, options, list(given), held_out), **more)
    return 0


def file_record(split: Split, name: str, each: bool) -> dict[str, str]:
    """A profile's name and SHA-256, and the set that it was in."""
    path = split.paths[name]
    place = "held out in turn" if each else "heldout" if name in split.heldout else "train"
    return {"name": path.name, "sha256": file_sha256(path), "set": place}
