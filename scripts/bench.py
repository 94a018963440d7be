#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the project on the machine it runs on, and write the figures as JSON.

    python scripts/bench.py demo --out docs/results/demo-cpu.json --figure docs/demo.png
    python scripts/bench.py main --model checkpoints/full --data 'days/*.csv' --out docs/results/main-h100.json

`demo` runs train_grpo.py on the tiny model for seeds 1 to 3 and records held-out reward before and after training.

    python scripts/bench.py rollout --model checkpoints/full --data 'days/*.csv' --out docs/results/rollout-h100.json

`rollout` measures vLLM beside the trainer in two child processes that each run train_grpo.py's own `main()`: one that
fills the compile caches (`--warm-caches` leaves it out), and one that trains three steps of 12 prompts x 8 completions x
512 tokens, lets transformers' generate complete the same prompts, and ends with 16 completions x 2,300 tokens.

    python scripts/bench.py step --model checkpoints/full --data 'days/*.csv' --lengths completions.csv --out docs/results/step-h100.json

`step` measures learning beside TRL's padded path in one process, on the same rollouts, and with packed experts while all
but 40 GiB of the card is occupied. W1 is 12 prompts x 8 completions x 512 tokens, W2 96 completions with the lengths of
the CSV, W3 its first 16. `--only bf16` (seven minutes on an H100, most of them TRL's path) or `--only mxfp4` (two) runs one half
and reads the other's last run in the same folder.

    python scripts/bench.py resume --model checkpoints/full --data 'days/*.csv' --out docs/results/resume-h100.json

`resume` kills a run (SIGKILL) two steps after a checkpoint, gives the same command again, and counts the completions that the
second process sampled just as the first had. Exit code 1 unless all of the step behind the checkpoint are alike.

    python scripts/bench.py attention --out docs/results/attention-h100.json

`attention` compares every attention that the learner can use here with float64, over rows that share a prompt, and times
it. Exit code 1 if one is further off than its bound or raises; packages that are missing are named.

`main` runs train_grpo.py's own `main()` in this process (so that every weight can be compared before and after) for a
few steps of 4 prompts x 4 completions x 128 tokens, and records time per phase, peak memory, how many adapter tensors
moved and how many elements of the base weights changed (0, or the run is broken and the exit code is 1).

The JSON holds `command, machine, date, versions, commit, figures: [{name, value, unit, note}]`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_grpo
from grpo.measure.attention import bench_attention
from grpo.measure.demo import bench_demo
from grpo.measure.resume import bench_resume
from grpo.measure.rollout import bench_rollout, rollout_child
from grpo.measure.step import bench_step, step_child
from grpo.measure.whole import bench_main


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("main", help="the whole path for a few steps")
    one.add_argument("--model", required=True, help="checkpoint folder or Hub id")
    one.add_argument("--data", required=True, help="training CSVs")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--run", default="runs/bench", help="OUTPUT_DIR of the run; deleted first")
    one.add_argument("--steps", type=int, default=4)
    one.add_argument("--attention", default="auto")
    one.add_argument("--micro-batch", type=int, default=4)
    one.add_argument("--rewards", default="action,grpo.measure.noise:noise")
    one = commands.add_parser("rollout", help="vLLM beside the trainer")
    one.add_argument("--model", required=True, help="checkpoint folder or Hub id")
    one.add_argument("--data", required=True, help="training CSVs")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--run", default="runs/bench-rollout", help="OUTPUT_DIR of the runs; deleted first")
    one.add_argument("--sync", default="merge", choices=("merge", "lora"), help="ROLLOUT_SYNC")
    one.add_argument(
        "--warm-caches", action="store_true", help="the compile caches are filled: do not start once for them"
    )
    one.add_argument("--child", choices=("warm", "short"), help=argparse.SUPPRESS)
    one = commands.add_parser("step", help="the learner beside TRL's padded path")
    one.add_argument("--model", required=True, help="checkpoint folder")
    one.add_argument("--data", required=True, help="training CSVs")
    one.add_argument("--lengths", required=True, help="CSV whose `completion` column gives the lengths of W2 and W3")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--run", default="runs/bench-step", help="OUTPUT_DIR of the runs; deleted first")
    one.add_argument("--only", choices=("bf16", "mxfp4"), help="run this half; the other's last run is read")
    one.add_argument("--child", choices=("bf16", "mxfp4"), help=argparse.SUPPRESS)
    one = commands.add_parser("resume", help="a killed run beside its continuation")
    one.add_argument("--model", required=True, help="checkpoint folder, Hub id or `tiny`")
    one.add_argument("--data", required=True, help="training CSVs")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--run", default="runs/bench-resume", help="OUTPUT_DIR of the run; must not exist")
    one.add_argument("--tokens", type=int, default=256, help="MAX_COMPLETION_LEN")
    one = commands.add_parser("attention", help="the learner's attention against float64")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="on a CPU: eager, in float32")
    one.add_argument("--small", action="store_true", help="tiny sizes")
    one.add_argument("--only", nargs="+", metavar="ATTN_IMPL", help="these implementations only")
    one = commands.add_parser("demo", help="the tiny model on three seeds, on the CPU")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--figure", required=True, help="PNG to write")
    one.add_argument("--run", default="runs/bench-demo", help="folder of the three runs; deleted first")
    options = parser.parse_args()
    options.main = train_grpo.main
    if options.command == "rollout":
        return rollout_child(options) if options.child else bench_rollout(options)
    if options.command == "step":
        return step_child(options) if options.child else bench_step(options)
    programs = {"main": bench_main, "demo": bench_demo, "resume": bench_resume, "attention": bench_attention}
    return programs[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
