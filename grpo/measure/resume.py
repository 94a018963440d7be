# SPDX-License-Identifier: Apache-2.0
"""A killed run beside its continuation."""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from grpo.measure.record import NOISE, figure, shown, steps_of, write
from grpo.run.logs import COMPLETIONS
from grpo.settings import ROOT

RESUME_SAVE, RESUME_KILL, RESUME_TOTAL = 4, 6, 8  # steps: of the checkpoint, before SIGKILL, of the whole run


def sampled_by_step(path: Path) -> dict[int, list[tuple[str, str, str]]]:
    """(prompt_id, completion, tokens) of each row of a log of completions, by step; a row that is torn off is left out."""

    found: dict[int, list[tuple[str, str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, fieldnames=list(COMPLETIONS)):  # what was superseded has no header
            if row["truncated"] and row["step"] != "step":
                found.setdefault(int(row["step"]), []).append((row["prompt_id"], row["completion"], row["tokens"]))
    return found


def bench_resume(options: argparse.Namespace) -> int:
    """Exit code 1 where the step behind the checkpoint was sampled otherwise, or the run could not be killed in time."""
    run = Path(options.run).absolute()
    prompts, group = 4, 4
    settings = {
        "MODEL_ID": options.model, "DATA": options.data, "PROMPTS_PER_STEP": str(prompts), "NUM_GENERATIONS": str(group), "EVAL_SAMPLES": "0",
        "MAX_COMPLETION_LEN": str(options.tokens), "TOTAL_STEPS": str(RESUME_TOTAL), "SAVE_STEPS": str(RESUME_SAVE),
        "REWARDS": f"action,{NOISE}", "OUTPUT_DIR": str(run), "LR_SCHEDULER": "constant_with_warmup",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "train_grpo.py")]
    if run.exists():
        print(f"bench: {run} is there already; delete it or name another with --run", file=sys.stderr)
        return 2
    process = subprocess.Popen(command, env=os.environ | settings)
    log = run / "metrics.csv"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > RESUME_KILL):
        time.sleep(0.02)
    if process.poll() is not None:
        print(f"bench: the run ended with exit code {process.returncode} before it could be killed", file=sys.stderr)
        return 1
    process.kill()
    process.wait()
    started = time.perf_counter()
    code = subprocess.run(command, env=os.environ | settings, check=False).returncode
    seconds = time.perf_counter() - started
    if code:
        print(f"bench: the run that goes on ended with exit code {code}", file=sys.stderr)
        return code
    first, again = (sampled_by_step(run / f"completions{kind}.csv") for kind in (".superseded", ""))
    rows = len(steps_of(run))
    alike = [
        sum(a == b for a, b in zip(first.get(step, []), again[step], strict=False))
        for step in range(RESUME_SAVE + 1, RESUME_KILL + 1)
    ]
    resumed = json.loads((run / "settings.json").read_text(encoding="utf-8"))["resumed_from_step"]
    figures = [
        figure("resumed_from_step", resumed, "steps", f"killed after step {RESUME_KILL}, a checkpoint every {RESUME_SAVE}"),
        figure("completions_per_step", prompts * group, "completions"),
        figure("next_step_alike", alike[0], "completions", "of the step behind the checkpoint, sampled as the killed process had"),
        figure("later_step_alike", alike[1], "completions", "of the step after, whose adapter has had one more update in each process"),
        figure("metrics_rows", rows, "rows", f"in metrics.csv at the end of {RESUME_TOTAL} steps"),
        figure("second_process_s", seconds, "s", "the run that went on, from process start to zip"),
    ]  # fmt: skip
    write(Path(options.out), figures, shown("resume", f"--tokens {options.tokens}"))
    return int(alike[0] != prompts * group or rows != RESUME_TOTAL)
