#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a small Llama of random weights, to try verl without a download.

    python scripts/verl/make_llama.py --out checkpoints/llama --tokenizer folder/with/tokenizer.json

Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="folder of a tokenizer to copy")
    parser.add_argument("--hidden", type=int, default=256, help="width, a multiple of 64 (default 256)")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    args = parser.parse_args()
    from grpo.model.gptoss_format import ModelError
    from grpo.verl.llama import write_llama  # heavy: after the command line

    try:
        count = write_llama(args.out, args.tokenizer, args.hidden, args.layers)
    except (ModelError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{args.out}: a Llama of {count:,} random weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
