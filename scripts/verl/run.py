#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The rows and rewards of train_grpo.py through verl: SFT, PPO with a critic or GRPO on one to eight GPUs.

    export MODEL_ID=my/llama TASK=gsm8k OUTPUT_DIR=runs/verl
    python scripts/verl/run.py all --dry-run                  # every check, every command line
    python scripts/verl/run.py all                            # sft merge ppo merge
    python scripts/verl/run.py grpo merge algorithm.lam=0.95   # an option of verl, for the last trainer
    python scripts/verl/run.py upload --push you/name --dry-run

Settings are environment variables, as for train_grpo.py; docs/verl.md says which verl knows. merge
and upload take the newest checkpoint; ppo and grpo start from the merged model of sft, where there
is one.
Exit codes: 0 done, 2 bad input (every problem is named), 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo.preflight.machine import check_trackers, installed_versions, read_machine
from grpo.run.hub import PushError, check_account, listing, upload
from grpo.settings import InputError
from grpo.verl.commands import (
    TRAINERS,
    VERSION,
    Place,
    merge_command,
    places,
    shown,
    train_command,
    with_environment,
    write_card,
)
from grpo.verl.rows import Prepared, prepare, write_data

STEPS = ("data", *TRAINERS, "merge", "upload", "all")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with code 2 on a wrong one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="STEP", help=f"{', '.join(STEPS)}; KEY=VALUE: for the last trainer")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of this machine (default: all that are visible)")
    parser.add_argument("--config", metavar="NAME", help="YAML of scripts/verl/ instead of the step's own, as gpt_oss")
    parser.add_argument("--push", metavar="REPO", help="upload: the repository of the Hub")
    parser.add_argument("--dry-run", action="store_true", help="check and print everything, run nothing")
    args = parser.parse_intermixed_args(argv)
    args.options = [word for word in args.words if "=" in word]
    args.steps = [word for word in args.words if "=" not in word]
    if wrong := [step for step in args.steps if step not in STEPS]:
        parser.error(f"{wrong[0]!r} is no step: {', '.join(STEPS)}")
    if "all" in args.steps:
        args.steps = ["sft", "merge", "ppo", "merge"] + ["upload"] * bool(args.push)
    args.trainer = next((step for step in reversed(args.steps) if step in TRAINERS), None)
    if (args.options or args.config) and not args.trainer:
        parser.error("options and --config are for a trainer: name sft, ppo or grpo")
    if "upload" in args.steps and not args.push:
        parser.error("upload: give --push REPO")
    args.gpus = args.gpus or read_machine().gpus or 1
    return args


def run(command: Sequence[str], dry: bool) -> None:
    """Prints a command line, and runs it. Raises CalledProcessError."""
    print(f"\n{shown(command)}", flush=True)
    if not dry:
        subprocess.run(command, env=with_environment(os.environ), check=True)


def train(trainer: str, args: argparse.Namespace, p: Prepared) -> None:
    """One trainer, unless it has finished; PPO and GRPO start from what SFT made, or would have made by then."""
    if (there := Place(p.data.parent, trainer).step() or 0) >= p.settings.TOTAL_STEPS:
        print(f"{trainer}: step {there} is there, TOTAL_STEPS={p.settings.TOTAL_STEPS}")
        return
    sft = Place(p.data.parent, "sft").merged
    made = trainer != "sft" and ((sft / "config.json").exists() or (args.dry_run and "sft" in args.steps))
    print(f"{trainer} on {args.gpus} GPU(s), from {sft if made else p.settings.MODEL_ID}", flush=True)
    config, more = (args.config, args.options) if trainer == args.trainer else (None, ())
    run(train_command(trainer, p, args.gpus, str(sft) if made else None, config, more), args.dry_run)


def merge(args: argparse.Namespace, p: Prepared, last: str | None) -> None:
    """The newest checkpoint in Hugging Face's format. Raises InputError where there is none."""
    place = Place(p.data.parent, last) if last else places(p)[-1]
    step = p.settings.TOTAL_STEPS if args.dry_run and last else place.step()
    if step is None:
        raise InputError(f"merge: there is no checkpoint in {place.out}. Run sft, ppo or grpo first")
    if place.merged.exists() and not args.dry_run:
        shutil.rmtree(place.merged)  # of an older step, perhaps in other shards
    run(merge_command(place, step), args.dry_run)


def push(args: argparse.Namespace, p: Prepared) -> None:
    """Upload the newest merged model, or print what that would be. Raises InputError where there is none."""
    place = places(p)[-1]
    if args.dry_run and set(args.steps) & set(TRAINERS):
        print(f"\nthen the merged model goes to {args.push}")
        return
    if not (place.merged / "config.json").exists():
        raise InputError(f"upload: there is no merged model in {place.out}. Run merge first")
    write_card(p, place)
    print(listing(place.merged, args.push) if args.dry_run else f"uploaded: {upload(place.merged, args.push)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    p = prepare(os.environ, args.steps, args.gpus)
    found = installed_versions(["verl"])["verl"]
    if not args.dry_run and set(args.steps) - {"data", "upload"}:
        check_trackers(p.settings, os.environ, p.problems)
        if found != VERSION:
            what = f"this Python has {found or 'none'}, the options are those of {VERSION}"
            p.problems.add("verl", what, "pip install -r requirements-verl.txt into an environment of its own")
    if p.problems:
        print(*p.problems, sep="\n", file=sys.stderr)
        return 2
    try:
        if "upload" in args.steps:
            check_account(args.push, args.dry_run)
        if not args.dry_run and set(args.steps) & {"data", *TRAINERS}:
            print(f"data: {write_data(p)}", flush=True)
        last = None
        for step in args.steps:
            if step in TRAINERS:
                train(step, args, p)
                last = step
            elif step == "merge":
                merge(args, p, last)
            elif step == "upload":
                push(args, p)
    except (InputError, ValueError) as error:
        print(*error.args, sep="\n", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"verl ended with exit code {error.returncode}: the lines above say why", file=sys.stderr)
        return 1
    except (PushError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
