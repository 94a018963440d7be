#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the project on the machine it runs on, and write the figures as JSON.

    python scripts/bench.py demo --out docs/results/demo-cpu.json --figure docs/demo.png
    python scripts/bench.py curves --out docs/results/curves-cpu.json
    python scripts/bench.py curves --proof runs/proof --out curves.json
    python scripts/bench.py attention --out docs/results/attention-h100.json
    python scripts/bench.py rollout --model checkpoints/full --data 'days/*.csv' --out rollout.json
    python scripts/bench.py generate --model checkpoints/full --data 'days/*.csv' --out generate.json
    python scripts/bench.py step --model checkpoints/full --data 'days/*.csv' \\
        --lengths completions.csv --out step.json
    python scripts/bench.py shared --model checkpoints/full --data 'days/*.csv' --out shared.json

`demo` runs train_grpo.py on the tiny model for seeds 1 to 10 and records reward and plant before and after training.

`curves` trains the tiny model by this trainer and by plain TRL's with the same prompts and random numbers, a seed after the
other, and compares the exact held-out reward. Exit code 1 unless the 95% interval of the difference lies within 0.01.
With `--proof` it trains the model of docs/proof.md on a GPU instead, once with each ROLLOUT_SYNC and once by plain TRL.

`attention` compares every attention that the learner can use here with float64, over rows that share a prompt, and times
it. Exit code 1 if one is further off than its bound or raises; packages that are missing are named.

`rollout` measures vLLM beside the trainer in two child processes that each run train_grpo.py's own `main()`: one step that
fills the compile caches (`--warm-caches` leaves it out), then three steps of 12 prompts x 8 completions x 512 tokens, the
same prompts by transformers' generate, and 16 completions x 2,300 tokens. Exit code 1 if a base weight has changed.

`generate` measures three such steps without vLLM and with packed experts, while all but 22 GiB of the card is occupied, and
transformers' own generate in the same process, with the whole card.

`faults` runs the entry point once as it is and once with kills, a full GPU and a dying engine in each phase of a step, started
again after each (docs/reliability.md, "On a GPU"). Exit code 1 if one does not end as it should, or a step is missing at the
end.

`export` merges a random adapter into a checkpoint with scripts/export.py, and compares log-probs of the merged model, in stock
transformers and in vLLM, with those of base and adapter. Exit code 1 where they differ by a fifth of what the adapter does.

`step` measures learning beside TRL's padded path in one process, on the same rollouts, and with packed experts while all
but 40 GiB of the card is occupied. W1 is 12 prompts x 8 completions x 512 tokens, W2 96 completions with the lengths of
the CSV, W3 its first 16. `--only bf16` (seven minutes on an H100, most of them TRL's path) or `--only mxfp4` (two) runs one half
and reads the other's last run in the same folder.

`shared` measures three steps of 12 prompts x 8 completions x 512 tokens with each value of EXPERTS, and with EXPERTS=shared while
all but 22 or 20 GiB of the card are occupied, once of 4,000 tokens, and with EXPERTS=paged in 22, also with the kernels that vLLM takes
on older cards and with an adapter on the experts, each in a process of its own. Exit code 1 if one fails, if a weight that vLLM lends
is not the checkpoint's, or if it has changed. `--only shared shared-22` runs these alone.

`many` starts train_grpo.py by torchrun on 1, 2, ... GPUs: three steps with the same work for each (weak scaling: 12 prompts x 8
completions x 512 tokens), and with the same work in all, of 96 and of 384 completions (strong). `--resume` goes on where the last
call ended.

The JSON holds `command, machine, date, versions, commit, figures: [{name, value, unit, note}]`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_grpo
from grpo.preflight.choices import ATTENTION
from grpo.settings import assignment, choices, fold


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=fold(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, run: str, model: bool = True, data: bool = True) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text)
        one.add_argument("--out", required=True, help="JSON to write")
        if run:
            one.add_argument("--run", default=f"runs/bench-{name}", help=run)
        if model:
            one.add_argument("--model", required=True, help="checkpoint folder")
        if model and data:
            one.add_argument("--data", required=True, help="training CSVs")
        return one

    one = command("demo", "the demo on ten seeds, on the CPU", "folder of the runs; deleted first", model=False)
    one.add_argument("--figure", required=True, help="PNG to write")
    one = command("curves", "learning curves beside plain TRL's", "folder of the runs; deleted first", model=False)
    one.add_argument("--seeds", type=int, default=20, help="1 to this one (default %(default)s)")
    one.add_argument("--steps", type=int, default=150, help="TOTAL_STEPS (default %(default)s)")
    one.add_argument(
        "--proof", metavar="DIR", help="--out of a `prove.py --stage make`: its model on a GPU, one seed of each way"
    )
    one.add_argument("--child", help=argparse.SUPPRESS)
    one = command("rollout", "vLLM beside the trainer", "OUTPUT_DIR of the runs; deleted first")
    one.add_argument("--sync", default="merge", choices=choices("ROLLOUT_SYNC")[1:], help="ROLLOUT_SYNC")
    one.add_argument("--targets", default="all-linear", help="LORA_TARGETS (default %(default)s)")
    one.add_argument("--warm-caches", action="store_true", help="compile caches are filled: do not start once for them")
    one.add_argument("--child", choices=("warm", "short"), help=argparse.SUPPRESS)
    command("generate", "rollouts without vLLM on a small card", "OUTPUT_DIR of the run; deleted first")
    one = command("step", "the learner beside TRL's padded path", "OUTPUT_DIR of the runs; deleted first")
    one.add_argument("--lengths", required=True, help="CSV whose `completion` column gives the lengths of W2 and W3")
    one.add_argument("--only", choices=("bf16", "mxfp4"), help="run this half; the other's last run is read")
    one.add_argument("--child", choices=("bf16", "mxfp4"), help=argparse.SUPPRESS)
    one = command("shared", "EXPERTS=shared beside bf16 and mxfp4", "OUTPUT_DIR of the runs; deleted first")
    one.add_argument("--only", nargs="+", metavar="NAME", help="these children only (an unknown one lists them)")
    one.add_argument("--child", help=argparse.SUPPRESS)
    one = command("many", "the same step on 1, 2, ... GPUs", "OUTPUT_DIR of the runs; deleted first")
    one.add_argument("--gpus", nargs="+", type=int, default=[1, 2], help="numbers of GPUs (default 1 2)")
    one.add_argument("--prompts", type=int, default=12, help="of one GPU (default %(default)s)")
    one.add_argument("--tokens", type=int, default=512, help="of a completion (default %(default)s)")
    one.add_argument("--resume", action="store_true", help="leave out what has ended, of this commit")
    one.add_argument("--started", type=float, help=argparse.SUPPRESS)
    one.add_argument("--vllm", action="store_true", help=argparse.SUPPRESS)
    one.add_argument("--child", help=argparse.SUPPRESS)
    one = command(
        "faults",
        "kills, full memory and a dying engine in each phase of a step",
        "folder of the runs; the last ones are deleted first",
    )
    one.add_argument("--faults", nargs="+", metavar="HOW:PHASE", help="these only, in this order")
    one.add_argument("--set", type=assignment, action="append", default=[], metavar="NAME=VALUE", help="a setting")
    one.add_argument("--child", help=argparse.SUPPRESS)
    one = command(
        "export", "a merged model beside base and adapter", "folder of both; the last one is deleted first", data=False
    )
    one = command("attention", "the learner's attention against float64", "", model=False)
    one.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="on a CPU: eager, small, in float32")
    one.add_argument("--only", nargs="+", choices=ATTENTION, help="these implementations only")
    return parser.parse_args()


def main() -> int:
    options = parse_args()
    options.main = train_grpo.main
    from grpo.measure import (  # late: --help needs no torch
        attention,
        curves,
        demo,
        export,
        faults,
        generate,
        many,
        rollout,
        shared,
        step,
    )

    modules = (attention, curves, demo, export, faults, generate, many, rollout, shared, step)
    module = {one.__name__.rpartition(".")[2]: one for one in modules}[options.command]
    return getattr(module, f"bench_{options.command}")(options)


if __name__ == "__main__":
    sys.exit(main())
