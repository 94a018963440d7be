#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the report of a run that is complete, interrupted or still going: RUN_DIR/report.html.

    python scripts/report.py runs/first

Exit codes: 0 written, 2 there is no run to report on, or a file of it is damaged.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.common import reflow
from grpo.evaluate.report import write_report
from grpo.process.ending import run_script


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="OUTPUT_DIR of a run")
    page = write_report(parser.parse_args(arguments).run_dir)
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
