#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prove that the path a user runs learns: make a mid-size gpt-oss, train it with train_grpo.py, collect the figures.

    python scripts/prove.py --out runs/proof --device cuda --tokenizer o200k/       # all of it, 20 minutes of one H100
    python scripts/prove.py --out runs/proof --stage make --device cuda --tokenizer o200k/
    python scripts/prove.py --out runs/proof --stage train --set LEARNING_RATE=1e-3
    python scripts/prove.py --out runs/proof --stage collect
    python scripts/prove.py --out runs/proof-cpu --scale cpu                        # a toy model, 10 minutes of one CPU core
    python scripts/prove.py --out runs/proof-small --scale small                    # the same code in a minute, proves nothing

`make` writes OUT/data (training rows, held-out rows and their hourly profile) and OUT/model: a gpt-oss that a supervised
warm-up has taught to read full TES prompts and to answer in the right format, but to choose little better than chance.
`train` runs train_grpo.py on it as a user would, in OUT/run. `collect` compares held-out reward and closed-loop CO2
before and after, and writes them with the command as JSON; its exit code is 1 unless both improved.
A stage that is complete is not repeated (--force does). docs/proof.md explains the recipe.

What is simplified: the model never reasons, and the features that it needs are there before GRPO starts. So this shows
that rollouts, rewards, gradients, hand-over and evaluation work together, not how much gpt-oss-20b would gain.

Exit codes: 0 done, 1 the run did not improve, 2 a usage error; those of train_grpo.py where it fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo.settings import ROOT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.measure.proof import collect, read_json, stale, train
from grpo.measure.proof_data import SCALES, Scale
from grpo.measure.proof_model import make
from grpo.model.gptoss_format import ModelError


def setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.isupper():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as LEARNING_RATE=1e-3")
    return name, value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Prove that the path a user runs learns.", epilog="Examples and exit codes: top of this file."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the proof: data/, model/, run/")
    parser.add_argument("--scale", choices=tuple(SCALES), default="mid", help="(default %(default)s)")
    parser.add_argument("--stage", choices=("make", "train", "collect", "all"), default="all")
    parser.add_argument("--device", default="cpu", help="of the warm-up: cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json or tokenizer.json.xz")
    parser.add_argument("--warmup-seconds", type=float, help="budget of the warm-up (default: the scale's)")
    parser.add_argument("--warmup-steps", type=int, help="budget in steps (default: the scale's)")
    parser.add_argument("--batch", type=int, help="rows of a warm-up step")
    parser.add_argument("--windows", type=int, help="of warm-up rows, 40 each")
    parser.add_argument("--probe-windows", type=int, help="of the rows on which the warm-up is measured")
    parser.add_argument("--lr", type=float, help="learning rate of the warm-up's first phase")
    parser.add_argument("--sharpness", type=float, help="of the softened targets: 0 says nothing, 1 is the reward")
    parser.add_argument(
        "--uniform", type=float, help="share of the softened targets that is spread evenly: 1 knows the format alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and warm-up (default %(default)s)")
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="a setting of train_grpo.py"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/proof-h100.json", help="JSON to write")
    parser.add_argument("--report-name", default="proof-report.html", help="of the report, beside the JSON")
    parser.add_argument("--force", action="store_true", help="repeat stages that are complete")
    return parser.parse_args(argv)


def chosen_scale(options: argparse.Namespace) -> Scale:
    """The scale with the command line's changes."""
    changes = {
        "seconds": options.warmup_seconds, "steps": options.warmup_steps, "batch": options.batch,
        "windows": options.windows, "probe_windows": options.probe_windows, "lr": options.lr, "sharpness": options.sharpness,
        "uniform": options.uniform,
    }  # fmt: skip
    return replace(SCALES[options.scale], **{name: value for name, value in changes.items() if value is not None})


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_args(argv)
    scale = chosen_scale(options)
    started = time.perf_counter()

    def log(line: str) -> None:
        print(line, flush=True)

    def wanted(stage: str, complete: bool) -> bool:
        if options.stage == stage:
            return options.force or not complete
        return options.stage == "all" and (options.force or not complete)

    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if wanted("make", (options.out / "model" / "warmup.json").is_file()):
            make(options, scale, log)
        trained = "after" in read_json(options.out / "run" / "evaluation.json") and not stale(options.out)
        if wanted("train", trained):
            code = train(options, scale, log)
            if code:
                return code
        if options.stage in ("collect", "all"):
            return collect(options, log)
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        log(f"{time.perf_counter() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
