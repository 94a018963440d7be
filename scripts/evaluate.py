#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Score an adapter on any rows, or let it control the plant of the demo through held-out days.

    python scripts/evaluate.py runs/first --data my.csv             # mean reward on these rows (settings from its run)
    python scripts/evaluate.py runs/first/best --data my.csv --base-too     # and that of its base model
    python scripts/evaluate.py runs/first --data my.csv --rewards mine:score
    python scripts/evaluate.py runs/first                           # without --data: the plant, in closed loop
    python scripts/evaluate.py --model tiny                         # a base model
    python scripts/evaluate.py runs/first --profile profiles/*.csv --samples 8 --vote

With --data every row is answered and scored as the run scores its held-out rows. Without it the model controls the
plant hour by hour, beside rules and the exact optimum: every window is three days of a profile (docs/plant.md) from 150
kWh. All windows are asked in one batch an hour; the answer moves the plant, and the plant's new state makes the next
prompt. docs/evaluation.md defines every figure.
Exit codes: 0 done, 2 bad input (every problem is named), 4 vLLM failed, 1 anything else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.data.scoring import RewardError
from grpo.evaluate.rows import evaluate_rows
from grpo.evaluate.standalone import InputError, evaluate_adapter
from grpo.rollout.engine import EngineError
from grpo.run.best import read_best
from grpo.settings import number
from grpo.tasks.tes.plant import DECISION_DAYS, START_KWH, Plant
from grpo.tasks.tes.record import table

# Options of the closed loop, which --data has no use for.
CLOSED_LOOP = ("profile", "vote", "hours_limit", "start_kwh", "prompt", "co2_column", "load_column")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with code 2 on a wrong one."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a run's folder, its best/, or a checkpoint")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="the same as RUN")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="score these rows, read as DATA is, instead")
    parser.add_argument("--rewards", metavar="REWARDS", help="with --data: reward functions (default: the run's)")
    parser.add_argument("--base-too", action="store_true", help="evaluate the base model as well (with --adapter)")
    parser.add_argument("--model", metavar="MODEL_ID", help="base model (default: the adapter's run's, or MODEL_ID)")
    profiles = ["data/profile_heldout.csv"]
    parser.add_argument("--profile", nargs="+", metavar="CSV", default=profiles, help="(default %(default)s)")
    parser.add_argument("--samples", type=number(1, 1000, int), metavar="N", help="passes through each window, or with --vote answers an hour (default: the run's EVAL_SAMPLES, else 1)")  # fmt: skip
    parser.add_argument("--vote", action="store_true", help="the majority of N answers decides each hour")
    parser.add_argument("--hours-limit", type=number(9, 24 * DECISION_DAYS, int), default=24 * DECISION_DAYS, metavar="H", help="only the first H hours of each window (default %(default)s)")  # fmt: skip
    parser.add_argument("--start-kwh", type=number(0, Plant().capacity_kwh), default=START_KWH, metavar="E", help="stored at the start (default %(default)g)")  # fmt: skip
    parser.add_argument("--prompt", choices=("auto", "full", "compact"), default="auto", help="auto: as the held-out rows of the run (default %(default)s)")  # fmt: skip
    parser.add_argument("--co2-column", metavar="NAME", help="CO2 intensity [kg/kWh], where names do not tell")
    parser.add_argument("--load-column", metavar="NAME", help="cooling load [kW], where names do not tell")
    out = "(default closed_loop.json in RUN, with --data evaluation-NAME.json; without RUN in the current folder)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    args = parser.parse_args(argv)
    if args.run and args.adapter:
        parser.error("--adapter: it is the same as RUN, give one of the two")
    args.adapter = args.adapter or args.run
    if args.rewards and not args.data:
        parser.error("--rewards: only with --data")
    if other := [name for name in CLOSED_LOOP if args.data and getattr(args, name) != parser.get_default(name)]:
        parser.error(f"--{other[0].replace('_', '-')}: only without --data")
    if args.base_too and args.adapter is None:
        parser.error("--base-too: only with --adapter or RUN; without it the base model is what is evaluated")
    if args.vote and (args.samples == 1 or (args.samples is None and args.adapter is None)):
        parser.error("--vote: needs --samples of 2 or more, or there is nothing to count")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    try:
        if args.data:
            text, path = evaluate_rows(args)
        else:
            record, path = evaluate_adapter(args)
            text = table(record)
    except InputError as error:
        print(*error.args, sep="\n", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"vLLM: {error}", file=sys.stderr)
        return 4
    except RewardError as error:
        print(error, file=sys.stderr)
        return 1
    print(text)
    print(f"written: {path}")
    if args.adapter and (best := read_best(args.adapter).get("in_words")):
        print(f"({args.adapter} holds the last step's adapter; {best}: {args.adapter / 'best'})", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
