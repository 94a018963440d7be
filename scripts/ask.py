#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask an adapter a prompt or a CSV of prompts, or print how to serve it with vLLM.

    python scripts/ask.py runs/first/best "What now? Answer [0], [1] or [2]."
    python scripts/ask.py runs/first/best --csv prompts.csv > answers.csv
    python scripts/ask.py runs/first/best --serve   # prints vllm serve ..., curl ...
    python scripts/ask.py --model merged "What now?"   # a model without an adapter, as of export.py

The adapter is a run's folder (its last step), its best/, a checkpoint, or any LoRA of PEFT.
With a run's ENVIRONMENT each prompt is an episode, and a CSV's columns go to its reset.
Prompts are rendered as the run rendered them; a CSV is read as DATA is (docs/data.md), rewards
are not needed. transformers generates: on a GPU, or for tiny.
Exit codes: 0 done, 2 bad input (every problem is named), 1 anything else.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.common import in_range, printable
from grpo.evaluate.ask import as_csv, ask, serve_commands
from grpo.evaluate.saved_adapter import note_best
from grpo.process.ending import run_script


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", nargs="?", metavar="RUN_OR_ADAPTER", help="folder of the adapter")
    parser.add_argument("prompt", nargs="?", help="the user's message, or a conversation rendered in Harmony")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message to go with it")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="prompts in a file like DATA's, instead of one prompt")
    parser.add_argument("--temperature", type=in_range(0, 10), default=0.0, metavar="T", help="0: greedy (default)")
    parser.add_argument("--model", metavar="MODEL_ID", help="base model (default: what the run or the adapter names)")
    parser.add_argument("--base", action="store_true", help="ask the base model, without the adapter")
    parser.add_argument("--serve", action="store_true", help="print how to serve it with vLLM, and start nothing")
    args = parser.parse_intermixed_args(argv)  # the prompt may also come after options
    if args.model and args.adapter and args.prompt is None and not os.path.isdir(args.adapter):
        args.adapter, args.prompt = None, args.adapter  # `--model` alone names what is asked.
    args.adapter = None if args.adapter is None else Path(args.adapter)
    if args.adapter is None and not args.model:
        parser.error("name the folder of an adapter, or a model with --model")
    if bool(args.csv) + (args.prompt is not None) + (args.serve and args.prompt is None) != 1:
        parser.error("give a prompt, or --csv FILE, or --serve (with a prompt or without)")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.serve:
        print(serve_commands(args))
        return 0
    # Progress goes to stderr: stdout may be redirected to a file of answers.
    with contextlib.redirect_stdout(sys.stderr):
        answers = ask(args)
    if args.adapter:
        note_best(args.adapter)
    if args.csv:
        table = as_csv(answers)  # A file gets the answers as they are.
        print(printable(table) if sys.stdout.isatty() else table, end="")
    else:
        print(printable(answers[0]["completion"]))
        if "action" in answers[0]:
            print(f"action: {answers[0]['action']}")
        if "end" in answers[0]:
            print(f"end: {answers[0]['end']}, reward: {answers[0]['reward']}")
            if "fault" in answers[0]:
                print(f"fault: {printable(answers[0]['fault'])}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
