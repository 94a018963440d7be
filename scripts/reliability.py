#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kill runs, damage what they leave, feed them anything: nothing may be lost, nothing be silently wrong.

    python scripts/reliability.py --out docs/results/reliability.json    # all of it
    python scripts/reliability.py --quick --out quick.json               # a little of each part, in one to three minutes
    python scripts/reliability.py --part kills --size 20 --seed 7 --out kills.json
    python scripts/reliability.py --part kills --only 13 --out one.json  # the thirteenth again

docs/reliability.md, "The campaign", says what the parts do. On a CPU, without a network. Each number of a part is the same
for a seed, however many are run; kills after a time also depend on how fast the machine is. A run or file with a finding
is kept. The JSON is written while it goes on: what was stopped holds what was done.

Exit codes: 0 nothing was found, 1 something was (it is printed, with how to do it again), 2 --run is a folder that no
campaign made, 3 nothing was, in --minutes that were too few.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_grpo
from grpo.settings import MOST_WHOLE, fold, number

PARTS = ("kills", "damage", "csv", "settings", "models", "disk")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=fold(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    add, count = parser.add_argument, number(1, MOST_WHOLE, int)
    add("--out", required=True, help="JSON to write")
    add("--part", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    add("--size", type=count, help="of each part: how many runs, files, inputs")
    add("--quick", action="store_true", help="a little of each")
    add("--seed", type=int, default=1, help="of every choice (default 1)")
    add("--only", type=int, metavar="NUMBER", help="this one of the part")
    add("--minutes", type=float, default=float("inf"), help="begin nothing after so many")
    add("--jobs", type=count, default=2, help="processes side by side (default 2)")
    add(
        "--run",
        default="runs/reliability",
        help="folder of all that is made; the last campaign's is deleted first (default %(default)s)",
    )
    return parser.parse_args()


def main() -> int:
    options = parse_args()
    options.main = train_grpo.main
    # Before anything is imported: one thread a process, nothing from a network.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    from grpo.measure.campaign import bench_reliability

    return bench_reliability(options)


if __name__ == "__main__":
    sys.exit(main())
