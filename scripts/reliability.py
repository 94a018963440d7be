#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kill commands and damage their checkpoints: nothing may be lost, nothing be silently wrong.

    python scripts/reliability.py --out docs/results/reliability.json    # all of it, in about an hour of two cores
    python scripts/reliability.py --part kills --size 5 --out few.json   # each command once
    python scripts/reliability.py --part kills --only 13 --out one.json  # case 13 again

docs/reliability.md, "The campaign", says what the parts do; grpo/measure/kills.py has the table of commands. It runs on
a CPU, without a network. A case's choices depend on its number and the seed alone, but kills after a delay also depend
on how fast the machine is. The folder of a case with a finding is kept. The JSON is written after each case.

Exit codes: 0 nothing was found, 1 something was (it is printed, with how to do it again), 2 --run is a folder that no
campaign made.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import runpy
import shutil
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.measure import kills
from grpo.settings import MOST_WHOLE, fold, number

KILLS = 60  # cases, unless --size says otherwise; of damage all that there are
FIGURES = """
kills_cases | runs | killed at a random moment and continued by the same command until complete; {kills_asked} asked for
kills_different | runs | of these differ from the uninterrupted run, or left something stray
kills | kills | half just before a random file operation, half up to a second later; a run gets one to four
kills_KILL kills_TERM kills_INT kills_HUP | kills | by signal
damage_cases | files | damaged, each in a run of its own; {damage_asked} asked for
damage_different | runs | did not say so, or did not come to the result of an undamaged run
minutes | min | of {jobs} processes side by side
"""


def run_child(place: str, operation: str, signal_number: str, delay: str, script: str, *arguments: str) -> None:
    """The process that is killed: a script of the project, whose file operations are watched."""
    kills.watch_files(Path(place), int(operation), int(signal_number), float(delay))
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=fold(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    add, count = parser.add_argument, number(1, MOST_WHOLE, int)
    add("--out", required=True, help="JSON to write")
    add(
        "--part",
        nargs="+",
        choices=kills.PARTS,
        default=list(kills.PARTS),
        metavar="PART",
        help="kills, damage, or both",
    )
    add("--size", type=count, help="of each part: how many cases")
    add("--seed", type=int, default=1, help="of every choice (default 1)")
    add("--only", type=int, metavar="NUMBER", help="this case of the part")
    add("--jobs", type=count, default=2, help="processes side by side (default 2)")
    add(
        "--run",
        default="runs/reliability",
        help="folder of all runs; the last campaign's is deleted (default %(default)s)",
    )
    return parser.parse_args()


def numbers_of(part: str, folder: Path, options: argparse.Namespace) -> list[int]:
    """Which cases of a part are run."""
    if options.only is not None:
        return [options.only]
    if part == "kills":
        return list(range(options.size or KILLS))
    count = len(kills.damages(folder))
    return sorted(random.Random(options.seed).sample(range(count), min(options.size or count, count)))


def run_campaign(options: argparse.Namespace, folder: Path) -> int:
    """All cases of the chosen parts; returns the exit code."""
    from grpo.measure.record import save, tabled, write  # late: --help needs no torch

    began, counts, values = time.monotonic(), Counter(), {"jobs": options.jobs}

    def run_case(part: str, case: int) -> str:
        place = folder / part / str(case)
        try:
            finding = kills.PARTS[part](folder, place, options.seed, case, counts)
        except Exception:
            finding = f"the campaign itself failed: {traceback.format_exc()}"
        if not finding:
            shutil.rmtree(place)
        return finding

    for part in options.part:
        kills.prepare(folder, part)
        numbers = numbers_of(part, folder, options)
        values |= {f"{part}_asked": len(numbers), f"{part}_different": 0}
        with ThreadPoolExecutor(options.jobs) as pool:
            for case, finding in zip(numbers, pool.map(functools.partial(run_case, part), numbers), strict=True):
                if finding:
                    values[f"{part}_different"] += 1
                    again = f"--part {part} --seed {options.seed} --only {case}"
                    print(f"FOUND {part} {case}: {finding}\n  in {folder / part}; again: {again}", flush=True)
                values["minutes"] = (time.monotonic() - began) / 60
                save(Path(options.out), tabled(FIGURES, {**counts, **values}))
    write(Path(options.out), tabled(FIGURES, {**counts, **values}))
    findings = sum(values[f"{part}_different"] for part in options.part)
    print(f"{findings} found", flush=True)
    return int(findings > 0)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        run_child(*sys.argv[2:])
        return 0
    options = parse_args()
    from grpo.measure.record import fresh_folder

    try:
        folder = fresh_folder(Path(options.run).resolve())
    except FileExistsError as error:
        print(error, file=sys.stderr)
        return 2
    return run_campaign(options, folder)


if __name__ == "__main__":
    sys.exit(main())
