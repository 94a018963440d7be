# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in gpt-oss's exact format that this project makes itself: everything can be tried without a download.

    python scripts/dev/make_model.py tiny --out checkpoints/tiny   # as data/tiny was made
    python scripts/dev/make_model.py full --out checkpoints/full --tokenizer o200k/
    python scripts/dev/make_model.py full --out checkpoints/mid --tokenizer o200k/ --layers 4
    python scripts/dev/make_model.py full --out checkpoints/120b --tokenizer o200k/ --shape 120b --device cuda
    python scripts/dev/make_model.py smollm2 --out checkpoints/smollm2 --source SmolLM2-135M-Instruct/
    python scripts/dev/make_model.py day --out checkpoints/day --tokenizer o200k/ --device cuda

``tiny`` has a few hundred thousand parameters, its own tokenizer and a supervised warm-up on synthetic TES prompts: it
answers in the right format and reads the numbers, but does not know which action is better: that is left to GRPO.
``full`` has gpt-oss-20b's or 120b's shapes and noise for weights: it costs what the real model costs in memory and
time, and answers nothing. ``smollm2`` is SmolLM2-135M-Instruct, rewritten: a trained model that writes English.
``day`` has 43 million weights besides the embeddings; it plays days of the plant by calls (TASK=tes_day), and reads
what they return, but calls every level alike.
docs/maintainers/models.md says what each can show.

All are written in the MXFP4 layout of openai/gpt-oss-20b. What is simplified: without ``--realistic``,
``full`` does not imitate the statistics of trained weights, only a scale at which activations stay finite.

Exit codes: 0 done, 2 a usage error, a refused target or a full disk.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo.common import InputError, reflow
from grpo.process.ending import run_script

FIGURES = """at temperature 1: parse rate {parse_rate:.3f}, mean reward {reward:.3f} (greedy {greedy:.3f}, random \
{random:.3f}, best constant {best_constant:.3f}, oracle {oracle:.3f})"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    tiny = commands.add_parser("tiny", help="a toy model that understands the demo's prompts, 0.3 million parameters")
    full = commands.add_parser("full", help="gpt-oss's shapes with random weights, 12.8 GiB or, 120b, 60.8 GiB")
    smollm2 = commands.add_parser("smollm2", help="SmolLM2-135M-Instruct, a trained model, rewritten: 0.5 GiB")
    day = commands.add_parser("day", help="a model of 43 million weights that plays the plant's days: 0.5 GiB")
    for command in (tiny, full, smollm2, day):
        command.add_argument("--out", type=Path, required=True, help="new directory to write")
    for command in (full, day):
        command.add_argument("--tokenizer", type=Path, required=True, help="directory with the tokenizer.json to copy")
        command.add_argument("--device", default="cpu", help="where weights are drawn and trained: cpu or cuda")
    day.add_argument("--seed", type=int, default=0, help="seed of weights and warm-up (default %(default)s)")
    full.add_argument("--shape", choices=("20b", "120b"), default="20b", help="size of gpt-oss (default 20b)")
    full.add_argument("--layers", type=int, help="number of layers, 0.49 GiB each (120b: 1.65); default 24 (120b: 36)")
    full.add_argument("--realistic", action="store_true", help="weights with the statistics of a trained model's")
    smollm2.add_argument("--source", type=Path, required=True, help="its folder as on the Hub, or a GGUF file of it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args, start = parse_args(argv), time.perf_counter()
    # Imported here: torch takes seconds, and --help and a usage error do not need it.
    from scripts.dev.gptoss_format import GPT_OSS_20B, GPT_OSS_120B
    from scripts.dev.proof_data import DAY_RECIPE
    from scripts.dev.random_weights import write_full
    from scripts.dev.smollm2 import write_smollm2
    from scripts.dev.warmup import write_small

    try:
        if args.command == "full":
            sizes = {"20b": GPT_OSS_20B, "120b": GPT_OSS_120B}[args.shape]
            sizes = sizes | ({"num_hidden_layers": args.layers} if args.layers else {})
            write_full(args.out, sizes, args.tokenizer, args.device, args.realistic)
        elif args.command == "smollm2":
            write_smollm2(args.out, args.source)
        elif args.command == "day":
            write_small(args.out, DAY_RECIPE, args.seed, tokenizer=args.tokenizer, device=args.device)
        else:
            write_small(args.out)
            print(FIGURES.format(**json.loads((args.out / "warmup.json").read_text(encoding="utf-8"))))
    except OSError as error:
        raise InputError(str(error)) from None
    print(f"{args.out} written, {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
