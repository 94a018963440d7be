# SPDX-License-Identifier: Apache-2.0
"""A killed run beside its continuation."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from pathlib import Path

from grpo.measure.record import NOISE, read_json, shown, steps_of, tabled, write
from grpo.run.logs import COMPLETIONS
from grpo.settings import ROOT

SAVE, KILL, TOTAL = 4, 6, 8  # steps: of the checkpoint, before SIGKILL, of the whole run
PROMPTS, GROUP = 4, 4
RESUME = f"""
resumed_from_step | steps | killed after step {KILL}, a checkpoint every {SAVE}
completions_per_step | completions |
next_step_alike | completions | of the step behind the checkpoint, sampled as the killed process had
later_step_alike | completions | of the step after, whose adapter has had one more update in each process
metrics_rows | rows | in metrics.csv at the end of {TOTAL} steps
second_process_s | s | the run that went on, from process start to zip
"""


def sampled_by_step(path: Path) -> dict[int, list[tuple[str, str, str]]]:
    """(prompt_id, completion, tokens) of each row of a log of completions, by step; a row that is torn off is left out."""
    found: dict[int, list[tuple[str, str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:  # not by pandas, which cannot read a row that is torn off
        for row in csv.DictReader(file, fieldnames=list(COMPLETIONS)):  # what was superseded has no header
            if row["truncated"] and row["step"] != "step":
                found.setdefault(int(row["step"]), []).append((row["prompt_id"], row["completion"], row["tokens"]))
    return found


def run_twice(run: Path, command: list[str], environ: dict[str, str]) -> tuple[int, float]:
    """Kill a run after step KILL and give its command again; (exit code, seconds of the second process)."""
    process, log = subprocess.Popen(command, env=environ), run / "metrics.csv"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > KILL):
        time.sleep(0.02)
    if process.poll() is not None:
        print(f"bench: the run ended with exit code {process.returncode} before it could be killed", file=sys.stderr)
        return 1, 0.0
    process.kill()
    process.wait()
    started = time.perf_counter()
    code = subprocess.run(command, env=environ, check=False).returncode
    if code:
        print(f"bench: the run that goes on ended with exit code {code}", file=sys.stderr)
    return code, time.perf_counter() - started


def bench_resume(options: argparse.Namespace) -> int:
    """Exit code 1 where the step behind the checkpoint was sampled otherwise, or the run could not be killed in time."""
    run = Path(options.run).absolute()
    if run.exists():
        print(f"bench: {run} is there already; delete it or name another with --run", file=sys.stderr)
        return 2
    settings = {
        "MODEL_ID": options.model, "DATA": options.data, "OUTPUT_DIR": str(run), "EVAL_SAMPLES": "0",
        "PROMPTS_PER_STEP": str(PROMPTS), "NUM_GENERATIONS": str(GROUP), "MAX_COMPLETION_LEN": str(options.tokens),
        "TOTAL_STEPS": str(TOTAL), "SAVE_STEPS": str(SAVE), "REWARDS": f"action,{NOISE}",
        "LR_SCHEDULER": "constant_with_warmup",
    }  # fmt: skip
    code, seconds = run_twice(run, [sys.executable, str(ROOT / "train_grpo.py")], os.environ | settings)
    if code:
        return code
    first, again = (sampled_by_step(run / f"completions{kind}.csv") for kind in (".superseded", ""))
    alike = [sum(a == b for a, b in zip(first.get(n, []), again[n], strict=False)) for n in range(SAVE + 1, KILL + 1)]
    found = {
        "resumed_from_step": read_json(run / "settings.json")["resumed_from_step"],
        "completions_per_step": PROMPTS * GROUP,
        "next_step_alike": alike[0],
        "later_step_alike": alike[1],
        "metrics_rows": len(steps_of(run)),
        "second_process_s": seconds,
    }
    write(Path(options.out), tabled(RESUME, found), shown("resume", f"--tokens {options.tokens}"))
    return int(alike[0] != PROMPTS * GROUP or found["metrics_rows"] != TOTAL)
