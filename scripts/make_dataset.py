# SPDX-License-Identifier: Apache-2.0
"""Simulates a thermal energy storage (TES) plant and writes the CSVs that the trainer reads.

    python scripts/make_dataset.py              # write data/*.csv from seeded synthetic weather
    python scripts/make_dataset.py --profile my.csv [more.csv ...] --out DIR   # the same from your own hourly data

A row is one decision of the plant: the prompt, the exact value `q_action_k` of each of the four actions in that state,
and the reward `reward_action_k`, the Boltzmann softmax of the four values. docs/plant.md explains all of it.
Exit codes: 0 done, 2 bad input (every problem is named).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.common import InputError, in_range
from grpo.process.ending import run_script
from grpo.tasks.tes import dataset
from grpo.tasks.tes.profiles import cut_windows
from grpo.tasks.tes_day.environment import day_files


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; `own` holds those options of --profile that are set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--profile", nargs="+", metavar="CSV", help="your own hourly profiles, not synthetic days")
    parser.add_argument("--out", metavar="DIR", help="where the files are (default data/; required with --profile)")
    prompts, about = ("full", "compact", "both"), "form of the prompts (default both; with --profile full)"
    parser.add_argument("--prompt", choices=prompts, help=about)
    seed = in_range(0, 2**32 - 1, int)
    parser.add_argument("--seed", type=seed, default=dataset.SEED, help="random seed (default %(default)s)")
    add = parser.add_argument_group("with --profile").add_argument
    own = [
        add("--explore", type=in_range(0, 1), metavar="P", help="share of random actions (default 0.25)"),
        add("--trajectories", type=in_range(1, 1000, int), metavar="N", help="per window (default 1)"),
        add("--short-share", type=in_range(0, 0.9), metavar="S", help="least share of short hours"),
        add("--vary", type=in_range(1, 10), metavar="F", help="further trajectories get loads x 1/F to F"),
    ]
    args = parser.parse_args(argv)
    args.own = {action.dest: value for action in own if (value := getattr(args, action.dest)) is not None}
    if args.own and not args.profile:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in args.own)
        parser.error(f"{names}: only with --profile; the synthetic files have fixed settings")
    if args.profile and args.out is None:
        parser.error("--profile needs --out DIR, so that your files do not mix with the synthetic ones")
    if args.prompt is None:  # A run on a folder of your own files in both forms would train every hour twice.
        args.prompt = "full" if args.profile else "both"
    return args


def make(args: argparse.Namespace) -> dict[str, str]:
    """The text of each file, by its name."""
    prompts = ("full", "compact") if args.prompt == "both" else (args.prompt,)
    if not args.profile:
        return dict([*dataset.synthetic_files(args.seed, prompts), *day_files(args.seed)])
    profiles = dataset.read_profiles(map(Path, args.profile))
    stems = {path.stem for path in profiles}
    if args.prompt == "both" and (overwritten := sorted(stems & {f"{stem}_compact" for stem in stems})):
        fault = "has the name of another profile's compact rows; rename it"
        raise InputError(*(f"--prompt both: {stem}.csv {fault}" for stem in overwritten))
    for path, profile in profiles.items():
        cut = cut_windows(profile)
        used = {day for window in cut for day in window.dates}
        spare = [str(day) for day in profile.dates if day not in used]
        unused = f"; not used: {spare}" if spare else ""
        print(f"{path.stem}: {len(profile.dates)} days, {len(cut)} window(s){unused}")
    return dict(dataset.profile_files(profiles, prompts, args.seed, **args.own))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    out = Path(args.out) if args.out else dataset.DATA_DIR
    try:
        files = make(args)
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_bytes(text.encode())
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror}; choose another --out") from None
    print(f"wrote {', '.join(files)} to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
