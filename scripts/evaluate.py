#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Score an adapter on any rows, or let it act in the simulator of its task: the demo's plant, through held-out days.

    python scripts/evaluate.py runs/first --data my.csv             # mean reward on these rows (settings from its run)
    python scripts/evaluate.py runs/first/best --data my.csv --base-too     # and that of its base model
    python scripts/evaluate.py runs/first --data my.csv --rewards mine:score
    python scripts/evaluate.py runs/first                           # its held-out rows, or the plant in closed loop
    python scripts/evaluate.py --model tiny                         # a base model
    python scripts/evaluate.py runs/first --profile profiles/*.csv --samples 8

With --data every row is answered and scored as the run scores its held-out rows. Without it those rows are scored,
unless the run's rows are the plant's: then the model controls it hour by hour, beside rules and the exact optimum.
Every window is three days of a profile (docs/plant.md) that begin with 150 kWh stored. Each hour's prompts of all
windows are one batch; the answer moves the plant, and its new state makes the next prompt. docs/evaluation.md defines
every figure.
Exit codes: 0 done, 2 bad input (every problem is named), 4 vLLM failed, 1 anything else.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.common import in_range
from grpo.evaluate.evaluate_adapter import evaluate
from grpo.evaluate.saved_adapter import note_best
from grpo.process.ending import run_script


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a run's folder, its best/, or a checkpoint")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="rows to score, read as DATA is")
    parser.add_argument("--rewards", metavar="REWARDS", help="reward functions for --data (default: the run's)")
    parser.add_argument("--base-too", action="store_true", help="evaluate the base model as well (with RUN)")
    parser.add_argument("--model", metavar="MODEL_ID", help="base model (default: the adapter's run's, or MODEL_ID)")
    text = "answers to each row, or passes of the simulator (default: the run's EVAL_SAMPLES)"
    parser.add_argument("--samples", type=in_range(1, 1000, int), metavar="N", help=text)
    text = "JSON to write (default evaluation-NAME.json in RUN or here; NAME: --data's, heldout or closed_loop)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "without --data: input files of the simulator (default: the run's EVAL_PROFILE, else its task's)"
    parser.add_argument("--profile", nargs="+", metavar="CSV", help=text)
    args = parser.parse_args(argv)
    if args.rewards and not args.data:
        parser.error("--rewards: only with --data")
    if args.profile and args.data:
        parser.error("--profile: only without --data")
    if args.base_too and args.run is None:
        parser.error("--base-too: only with RUN; without it the base model is what is evaluated")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    text, path = evaluate(args)
    print(text)
    print(f"written: {path}")
    if args.run:
        note_best(args.run)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
