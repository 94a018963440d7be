# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in gpt-oss's exact format that this project makes itself: everything can be tried without a download.

    python scripts/make_model.py tiny                        # a trained toy model, into the user's cache directory
    python scripts/make_model.py tiny --out checkpoints/tiny
    python scripts/make_model.py full --out checkpoints/full --tokenizer o200k/   # gpt-oss-20b's shapes, random weights
    python scripts/make_model.py full --out checkpoints/mid --layers 4 --no-tokenizer
    python scripts/make_model.py check checkpoints/full      # every tensor's name, type, shape and place

``tiny`` has a few hundred thousand parameters, its own tokenizer and a short supervised warm-up on synthetic TES
prompts: it answers in the right format, reads the numbers, but leans only a little to the better action, so that GRPO
has something to improve within a minute on two CPU cores. ``full`` has gpt-oss-20b's shapes and noise for weights: it
costs what the real model costs in memory and time and answers nothing. docs/models.md says what each can show.

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
from grpo.model.checkpoint import check_checkpoint
from grpo.model.gptoss_format import GPT_OSS_20B, ModelError
from grpo.model.random_weights import write_full
from grpo.model.tiny import build_tiny, write_tiny

# Command line


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make checkpoints in gpt-oss's exact format.",
        epilog="Examples and exit codes: see the top of this file.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    tiny = commands.add_parser("tiny", help="a trained toy model, a few hundred thousand parameters, under a minute")
    tiny.add_argument("--out", type=Path, help="directory to write (default: the user's cache directory)")
    tiny.add_argument("--seed", type=int, help="of the weights and the warm-up (default 0; another one needs --out)")
    tiny.add_argument("--force", action="store_true", help="replace what is there")

    full = commands.add_parser("full", help="gpt-oss-20b's shapes with random weights, 12.8 GiB")
    full.add_argument("--out", type=Path, required=True, help="directory to write")
    full.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json or tokenizer.json.xz to copy")
    full.add_argument("--no-tokenizer", action="store_true", help="write none; nothing can then render a prompt")
    full.add_argument("--device", default="cpu", help="where the noise is made: cpu (default), cuda, cuda:1, ...")
    full.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    full.add_argument("--layers", type=int, default=GPT_OSS_20B.layers, help="default 24, 0.45 GiB each")
    full.add_argument("--force", action="store_true", help="replace a checkpoint that is there")

    check = commands.add_parser("check", help="compare a checkpoint's tensors with what transformers expects")
    check.add_argument("directory", type=Path)

    args = parser.parse_args(argv)
    if args.command == "full" and (args.tokenizer is None) != args.no_tokenizer:
        parser.error("full needs --tokenizer DIR or --no-tokenizer, and not both")
    if args.command == "tiny" and args.seed not in (None, 0) and args.out is None:
        parser.error("the cache keeps the model of seed 0: give --out with another --seed")
    return args


def report(directory: Path) -> None:
    """Print the result of `check_checkpoint`."""
    found = check_checkpoint(directory)
    print(
        f"{directory}: {found['parameters']:,} parameters in {found['tensors']} tensors, {found['files']} file(s), "
        f"{found['bytes']:,} bytes; names, types and shapes are what transformers expects"
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    start = time.perf_counter()
    try:
        if args.command == "check":
            report(args.directory)
        elif args.command == "full":
            write_full(
                args.out, replace(GPT_OSS_20B, layers=args.layers), args.tokenizer, args.device, args.seed, args.force
            )
            report(args.out)
        else:
            if args.out is None:
                path = build_tiny(force=args.force, log=print)
            else:
                path = args.out
                write_tiny(path, args.seed or 0, args.force, log=print)
            report(path)
            figures = json.loads((path / "warmup.json").read_text(encoding="utf-8"))
            print(
                f"sampled at temperature 1: parse rate {figures['parse_rate']:.3f}, mean reward {figures['reward']:.3f}"
                f" (greedy {figures['greedy']:.3f}, random {figures['random']:.3f}, best constant "
                f"{figures['best_constant']:.3f}, oracle {figures['oracle']:.3f})"
            )
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
