#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train on real days and measure on others: from a folder of hourly profiles to a report.

    python scripts/days.py profiles/                                  # holds out the last third
    python scripts/days.py profiles/ --heldout 2 --out runs/mine      # the last two by date
    python scripts/days.py profiles/ --heldout may.csv --model tiny   # on a CPU
    TOTAL_STEPS=50 python scripts/days.py profiles/                   # settings pass through

A profile is a CSV with one row an hour: docs/plant.md, "Your own days". OUT gets data/ (training rows and held-out
rows) and run/, the OUTPUT_DIR of train_grpo.py. The same command continues what was interrupted.

Exit codes: 0 done, 2 the profiles cannot be used (every problem is named); those of train_grpo.py where it fails.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.run.ending import run_script
from grpo.settings import InputError, Settings, reflow


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    add, model = parser.add_argument, os.environ.get("MODEL_ID") or Settings.MODEL_ID
    add("folder", metavar="FOLDER", type=Path, help="of hourly profiles")
    add("--files", default="*.csv", metavar="PATTERN", help="which of its files are profiles (default %(default)s)")
    add("--heldout", nargs="+", default=[], metavar="N|FILE", help="files held out, or how many of the last ones")
    add("--out", type=Path, default=Path("runs/days"), help="folder of data and run (default %(default)s)")
    add("--model", default=model, help="MODEL_ID; `tiny` reads compact prompts (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_args(argv)
    from grpo.measure.days import train_on_days  # Imported here: --help needs no torch.

    try:
        return train_on_days(options)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(run_script(main))
