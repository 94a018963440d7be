#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prove that the path a user runs learns: make a mid-size gpt-oss, train it with train_grpo.py, collect the figures.

    python scripts/dev/prove.py --out runs/proof --device cuda --tokenizer o200k/    # all stages
    python scripts/dev/prove.py --out runs/proof --stage make --device cuda --tokenizer o200k/
    python scripts/dev/prove.py --out runs/proof --stage train --set LEARNING_RATE=1e-3
    python scripts/dev/prove.py --out runs/proof --stage collect
    python scripts/dev/prove.py --out runs/proof-cpu --scale cpu      # a toy model, 10 minutes of one CPU core
    python scripts/dev/prove.py --out runs/proof-reason --reason --device cuda --tokenizer o200k/    # with reasoning
    python scripts/dev/prove.py --out runs/proof-small --scale small  # the same code in a minute, proves nothing

`make` writes OUT/data (training rows, held-out rows and their hourly profile) and OUT/model: a gpt-oss that a
supervised warm-up has taught to read full TES prompts and to answer in the right format, but to choose little better
than chance. `train` runs train_grpo.py on it as a user would, in OUT/run. With --reason `chains` measures what its
chains are worth. `other` plays best/ on other days than those that chose it. `collect` compares held-out reward and
closed-loop CO2 before and after, and writes them with the command as JSON; its exit code is 1 unless both improved. A
stage that is complete is not repeated (--force does).
docs/maintainers/proof.md explains the recipe.

What is simplified: the model reasons in one fixed form (--reason) or not at all, and the features that it needs are
there before GRPO starts. So this shows that rollouts, rewards, gradients, weight sync and evaluation work together, not
how much gpt-oss-20b would gain.

Exit codes: 0 done, 1 the run did not improve, 2 a usage error; those of train_grpo.py where it fails.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo.common import ROOT, reflow
from grpo.process.ending import run_script
from scripts.dev.record import parse_assignment

RECIPE = ("seconds", "steps")  # Fields of a scale's recipe that options change.


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the proof: data/, model/, run/")
    add("--scale", choices=("mid", "small", "cpu"), default="mid", help="size of the proof (default %(default)s)")
    add("--reason", action="store_true", help="a short chain of reasoning before each answer, for every stage")
    add("--stage", choices=("make", "train", "chains", "other", "collect", "all"), default="all")
    add("--device", default="cpu", help="device of the warm-up: cpu (default), cuda, cuda:1, ...")
    add("--tokenizer", type=Path, help="folder with tokenizer.json")
    add("--warmup-seconds", type=float, dest="seconds", help="budget of the warm-up (default: the scale's)")
    add("--warmup-steps", type=int, dest="steps", help="budget in steps (default: the scale's)")
    add("--seed", type=int, default=0, help="seed of weights and warm-up (default %(default)s)")
    text = "a setting of train_grpo.py"
    add("--set", type=parse_assignment, action="append", default=[], metavar="NAME=VALUE", help=text)
    add("--results", type=Path, default=ROOT / "docs/results/proof.json", help="JSON to write, beside the report")
    add("--force", action="store_true", help="repeat stages that are complete")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_args(argv)
    # Imported here: --help needs no torch.
    from scripts.dev.proof import prove
    from scripts.dev.proof_data import SCALES, reasoning

    changes = {name: value for name in RECIPE if (value := getattr(options, name)) is not None}
    scale = reasoning(SCALES[options.scale]) if options.reason else SCALES[options.scale]
    return prove(options, replace(scale, recipe=replace(scale.recipe, **changes)))


if __name__ == "__main__":
    sys.exit(run_script(main))
