# SPDX-License-Identifier: Apache-2.0
"""Simulates a thermal energy storage (TES) plant and writes the CSVs that the trainer reads.

    python scripts/make_dataset.py                      # write data/*.csv from seeded synthetic weather
    python scripts/make_dataset.py --check              # regenerate, compare byte for byte with data/ (exit 1: differs)
    python scripts/make_dataset.py --summary            # reward of random, best constant and oracle, for each CSV
    python scripts/make_dataset.py --profile my.csv [more.csv ...] --out DIR      # the same from your own hourly data
    options: --prompt full|compact|both  --seed N  --co2-column NAME  --load-column NAME
             --start-kwh E  --explore P  --trajectories N  --short-share S

A row is one decision of the plant: the prompt, the exact value `q_action_k` of each of the four actions in that state,
and the reward `reward_action_k`, the Boltzmann softmax of the four values. docs/data.md explains all of it.
Exit codes: 0 done, 1 `--check` found a difference, 2 bad input (every problem is named).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.tasks.tes.dataset import DATA_DIR, EXPLORE, SEED, file_name, number, profile_files, summary, synthetic_files
from grpo.tasks.tes.plant import START_KWH, Plant
from grpo.tasks.tes.profiles import Profile, ProfileError, decode, read_profile, windows


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with code 2 on a wrong one."""
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="regenerate and compare byte for byte, write nothing")
    mode.add_argument("--summary", action="store_true", help="tabulate the files that exist, write nothing")
    mode.add_argument("--profile", nargs="+", metavar="CSV", help="your own hourly profiles instead of synthetic days")
    parser.add_argument("--out", metavar="DIR", help="where the files are (default data/; required with --profile)")
    parser.add_argument(
        "--prompt", choices=("full", "compact", "both"), help="(default both, with --profile full: every hour once)"
    )
    seed = number(0, 2**32 - 1, int)
    parser.add_argument("--seed", type=seed, default=SEED, help="of days and trajectories (default %(default)s)")
    own = parser.add_argument_group("with --profile")
    own.add_argument("--co2-column", metavar="NAME", help="CO2 intensity [kg/kWh], where names do not tell")
    own.add_argument("--load-column", metavar="NAME", help="cooling load [kW], where names do not tell")
    energy = number(0, Plant().capacity_kwh)
    own.add_argument("--start-kwh", type=energy, metavar="E", help=f"stored at the start (default {START_KWH:g})")
    own.add_argument("--explore", type=number(0, 1), metavar="P", help=f"share of random actions (default {EXPLORE})")
    own.add_argument(
        "--trajectories", type=number(1, 1000, int), metavar="N", help="a window, from the 2nd at random starts"
    )
    own.add_argument(
        "--short-share",
        type=number(0, 0.9),
        metavar="S",
        help="least share of hours whose load exceeds the stored energy",
    )
    args = parser.parse_args(argv)
    named = ("co2_column", "load_column", "start_kwh", "explore", "trajectories", "short_share")
    only = [f"--{name.replace('_', '-')}" for name in named if getattr(args, name) is not None]
    if only and not args.profile:
        parser.error(f"{', '.join(only)}: only with --profile; the synthetic files have fixed settings")
    if args.profile and args.out is None:
        parser.error("--profile needs --out DIR, so that your files do not mix with the synthetic ones")
    if args.prompt is None:  # in both forms, a folder of your own files would train every hour twice
        args.prompt = "full" if args.profile else "both"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    out = Path(args.out) if args.out else DATA_DIR
    prompts = ("full", "compact") if args.prompt == "both" else (args.prompt,)
    try:
        if args.summary:
            return show(out)
        files = dict(own_files(args, prompts) if args.profile else synthetic_files(args.seed, prompts))
        if args.check:
            return check(out, files, args.seed)
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_bytes(text.encode())
    except ProfileError as error:
        shown = error.problems[:30]
        rest = len(error.problems) - len(shown)
        print("\n".join(shown + [f"... and {rest} more problem(s)"] * bool(rest)), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename or out}: {error.strerror}; choose another --out", file=sys.stderr)
        return 2
    print(f"wrote {', '.join(files)} to {out}")
    print(summary(files))
    return 0


def own_files(args: argparse.Namespace, prompts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Reads all profiles before anything is made, so that one run names the problems of every file."""
    profiles: dict[str, Profile] = {}
    problems: list[str] = []
    for path in map(Path, args.profile):
        names = {file_name(path.stem, prompt) for prompt in prompts}
        taken = names & {file_name(stem, prompt) for stem in profiles for prompt in prompts}
        if taken:
            problems.append(f"{path}: another profile makes {', '.join(sorted(taken))} too; rename one of them")
            continue
        try:
            profiles[path.stem] = read_profile(path, args.co2_column, args.load_column)
        except ProfileError as error:
            problems += error.problems
    if problems:
        raise ProfileError(problems)
    for stem, profile in profiles.items():
        made = windows(profile)
        used = {day for window in made for day in window.dates}
        spare = [str(day) for day in profile.dates if day not in used]
        print(f"{stem}: {len(profile.dates)} days, {len(made)} window(s)" + f"; not used: {spare}" * bool(spare))
    start_kwh = START_KWH if args.start_kwh is None else args.start_kwh
    explore = EXPLORE if args.explore is None else args.explore
    return profile_files(
        profiles, prompts, args.seed, start_kwh, explore, args.trajectories or 1, args.short_share or 0.0
    )


def check(out: Path, files: dict[str, str], seed: int) -> int:
    """Compares files with what they should hold; returns 1 and names those that differ."""
    wrong = []
    for name, text in files.items():
        path = out / name
        if not path.is_file():
            wrong.append(f"{path}: missing")
        elif (stored := path.read_bytes()) != text.encode():
            at = next((i for i, (a, b) in enumerate(zip(stored, text.encode(), strict=False)) if a != b), None)
            at = min(len(stored), len(text.encode())) if at is None else at
            line = stored[:at].count(b"\n") + 1
            wrong.append(f"{path}: differs from line {line} on")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        print(f"make them again with: python scripts/make_dataset.py --seed {seed} --out {out}", file=sys.stderr)
        return 1
    print(f"{len(files)} files in {out} are what seed {seed} gives")
    return 0


def show(out: Path) -> int:
    """Tabulates the data files of a folder."""
    paths = sorted(out.glob("tes_*.csv"))
    if not paths:
        raise ProfileError([f"{out}: no tes_*.csv in it; make them first or choose another --out"])
    print(summary({path.name: decode(path.read_bytes()) for path in paths}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
