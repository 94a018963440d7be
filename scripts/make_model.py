# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in gpt-oss's exact format that this project makes itself: everything can be tried without a download.

    python scripts/make_model.py tiny --out checkpoints/tiny   # as data/tiny was made
    python scripts/make_model.py full --out checkpoints/full --tokenizer o200k/
    python scripts/make_model.py full --out checkpoints/mid --layers 4 --no-tokenizer
    python scripts/make_model.py check checkpoints/full   # names, types, shapes

``tiny`` has a few hundred thousand parameters, its own tokenizer and a supervised warm-up on synthetic TES prompts: it
answers in the right format and reads the numbers, but does not know which action is better: that is left to GRPO.
``full`` has gpt-oss-20b's shapes and noise for weights: it costs what the real model costs in memory and time, and
answers nothing. docs/models.md says what each can show.

Both are written in the MXFP4 layout of openai/gpt-oss-20b. What is simplified: ``full`` does not imitate the
statistics of trained weights, only a scale at which activations stay finite.

Exit codes: 0 done, 2 a usage error, a refused target, a full disk or a failed check.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.settings import fold

SIZES = """{path}: {parameters:,} parameters in {tensors} tensors, {files} file(s), {bytes:,} bytes; \
names, types and shapes are what transformers expects"""
FIGURES = """{explained:.0%} of what there is to read is read; at temperature 1: parse rate {parse_rate:.3f}, \
mean reward {reward:.3f} (greedy {greedy:.3f}, random {random:.3f}, best constant {best_constant:.3f}, oracle \
{oracle:.3f})"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=fold(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    tiny = commands.add_parser("tiny", help="a toy model that understands the demo's prompts, 0.3 million parameters")
    tiny.add_argument("--out", type=Path, required=True, help="directory to write")
    tiny.add_argument("--steps", type=int, default=None, help="steps of the warm-up (default: those of data/tiny)")
    tiny.add_argument("--force", action="store_true", help="replace what is there")

    full = commands.add_parser("full", help="gpt-oss-20b's shapes with random weights, 12.8 GiB")
    full.add_argument("--out", type=Path, required=True, help="directory to write")
    tokenizer = full.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json or tokenizer.json.xz to copy")
    tokenizer.add_argument("--no-tokenizer", action="store_true", help="write none: prompts cannot be rendered then")
    full.add_argument("--device", default="cpu", help="where the weights are drawn: cpu (default), cuda, cuda:1, ...")
    full.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    full.add_argument("--layers", type=int, default=24, help="number of layers, 0.45 GiB each (default 24)")
    full.add_argument("--force", action="store_true", help="replace a checkpoint that is there")

    check = commands.add_parser("check", help="compare a checkpoint's tensors with what transformers expects")
    check.add_argument("out", type=Path, metavar="directory")

    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args, start = parse_args(argv), time.perf_counter()
    # Late: torch takes seconds, which --help and a usage error need not.
    from grpo.model.checkpoint import check_checkpoint
    from grpo.model.gptoss_format import ModelError, Shape
    from grpo.model.random_weights import write_full
    from grpo.model.tiny import RECIPE, write_tiny

    path = args.out
    try:
        if args.command == "full":
            write_full(path, Shape(layers=args.layers), args.tokenizer, args.device, args.seed, args.force)
        elif args.command == "tiny":
            write_tiny(path, replace(RECIPE, steps=args.steps or RECIPE.steps), args.force)
        print(SIZES.format(path=path, **check_checkpoint(path)))
        if args.command == "tiny":
            print(FIGURES.format(**json.loads((path / "warmup.json").read_text(encoding="utf-8"))))
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
