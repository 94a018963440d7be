#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Teaches an adapter the best answers of DATA (supervised fine-tuning), to start train_grpo.py from.

    python scripts/sft.py --out runs/sft
    INIT_ADAPTER=runs/sft python train_grpo.py

The settings are those of train_grpo.py (environment variables): MODEL_ID, DATA, LORA_*,
PROMPTS_PER_STEP rows a step, TOTAL_STEPS, LEARNING_RATE, SEED, EXPERTS. A row's answer is its
column `answer`, else its best action (docs/adapters.md); with ENVIRONMENT it shows the calls in
its column `calls` (docs/environments.md).
Exit codes: 0 done, 2 bad input (every problem is named), 1 anything else.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.common import InputError
from grpo.plan.hub import fetch_weights
from grpo.preflight.sft import sft_preflight
from grpo.process.ending import run_script


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the adapter")
    resolved, turns = sft_preflight(os.environ, parser.parse_args(argv).out)
    if resolved.problems:
        raise InputError(*resolved.problems)
    from grpo.learn.sft import learn_answers  # Heavy modules are imported after the checks.
    from grpo.model.load import unseen_gpu

    assert resolved.files  # Otherwise there was a problem.
    if problem := unseen_gpu(resolved.machine) or fetch_weights(resolved.settings.MODEL_ID, resolved.files):
        raise InputError(problem)
    s, rows = resolved.settings, sum(map(bool, turns))
    print(f"{s.MODEL_ID}: {s.TOTAL_STEPS} steps of {s.PROMPTS_PER_STEP} of {rows} rows with an answer", flush=True)
    folder = learn_answers(resolved, turns)
    print(f"adapter: {folder}. Next: INIT_ADAPTER={folder} python train_grpo.py")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
