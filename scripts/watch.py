#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Follow a run in the terminal: step, time left, reward, parse rate, lengths, GPU (its use too, where nvidia-smi is
there), last warnings and evaluations.

    python scripts/watch.py runs/first     # ends with the run, or by Ctrl-C, which leaves the run alone

It only reads files, so it can be started before the run, beside it or after it, on another machine that sees the
folder. Whether a process still runs is known from the lock beside the folder, where the file system shares locks.
Without a terminal it prints the state once. Exit codes: 0, or 2 where RUN_DIR is no folder, or its log no run's.
"""

import argparse
import contextlib
import fcntl
import io
import math
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.common import InputError, printable, reflow
from grpo.evaluate.run_files import read_json, read_metrics
from grpo.figures.text import finite_number, fitting, object_at
from grpo.output.folder import continuation
from grpo.output.layout import COMPLETE, SETTINGS, lock_path
from grpo.output.logs import RECENT_STEPS, TIME_UNKNOWN, Pace
from grpo.process.ending import run_script

# Lines of training.log with a warning, an error or a critical message (`12:07:54 W train_grpo: ...`), of the box below
# one (`banner_text`), and about an evaluation.
NEWS = re.compile(r"^(?:\d\d:\d\d:\d\d (?:[WEC] .*: .+|I train_grpo: measured .*)|\| .* \|)$", re.MULTILINE)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # Such characters would act on the terminal.
DONE = "complete"
SHOWN, LONGEST = 5, 300  # lines of NEWS, characters of one
CLEAR = "\x1b[H\x1b[J"


def is_running(folder: Path) -> bool:
    """Whether a process holds the run's lock (`lock_run`); true where that cannot be known."""
    # An OSError means that the lock is held or was never made, as in a copy of a run or before its start.
    with contextlib.suppress(OSError), lock_path(folder.resolve()).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def read_news(path: Path) -> list[str]:
    """The last warnings, errors and evaluations of training.log, oldest first; none where it is not there yet."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [CONTROL.sub(" ", line[:LONGEST]) for line in NEWS.findall(text)[-SHOWN:]]


def status_of(folder: Path, settings: Mapping[str, Any], metrics: pandas.DataFrame) -> str:
    """Why no next step will come, or else how long the run still takes."""
    if not folder.exists():
        return f"{folder} does not exist yet: waiting for a run to make it"
    numbers = {name: value for name, value in settings.items() if isinstance(value, int)}  # Users may edit the file.
    total, step = numbers.get("TOTAL_STEPS", 0), metrics["step"].max() if len(metrics) else 0
    # A run that is resumed with more steps still has the complete.json of its first steps, which does not count.
    if finite_number(read_json(folder / COMPLETE).get("steps")) >= total:
        return DONE
    if settings and not is_running(folder):
        overwrite = bool(settings.get("OVERWRITE"))
        return f"no process is running; {continuation(folder, overwrite)}"
    if not step:
        is_run = (folder / SETTINGS).exists()
        return "waiting for the first step" if is_run else f"{folder} holds no run (an OUTPUT_DIR): waiting for one"
    if not total:
        return TIME_UNKNOWN
    if step >= total:
        return "every step is done: evaluation and saving"
    shared = max(1, numbers.get("STEPS_PER_GENERATION", 1) * numbers.get("NUM_ITERATIONS", 1))
    pace = Pace(total, numbers.get("EVAL_STEPS", 0), metrics.to_dict("records"), shared)
    return pace.time_left(step) or TIME_UNKNOWN


def gpu_lines() -> list[str]:
    """What nvidia-smi says about each GPU of this machine at the moment, which the run may not be on; [] without it."""
    query = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu"]
    lines = []
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        command = [*query, "--format=csv,noheader,nounits"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        for line in output.splitlines():
            index, busy, used, total, power, degrees = (cell.strip() for cell in line.split(","))
            memory = f"{int(used) / 1024:.1f} of {int(total) / 1024:.1f} GiB"
            lines.append(f"GPU {index} now   {busy}% busy, {memory}, {power} W, {degrees} C")
    return lines


def frame(folder: Path) -> tuple[list[str], bool]:
    """The lines to show now, and whether the run is complete. Reads all files again: the run may be another."""
    settings = object_at(read_json(folder / "settings.json"), "settings")
    metrics = read_metrics(folder / "metrics.csv") if (folder / "metrics.csv").is_file() else pandas.DataFrame()
    status, news = status_of(folder, settings, metrics), read_news(folder / "training.log")
    if not len(metrics):
        return [status, *news], status == DONE
    last, recent = metrics.iloc[-1], metrics["reward"].tail(RECENT_STEPS)
    form = fitting(".3f", last["reward"], recent.mean())
    lines = [
        f"step        {last['step']} of {settings.get('TOTAL_STEPS', '?')}, {status}",
        f"reward      {last['reward']:{form}}, mean of the last {len(recent)}: {recent.mean():{form}}",
    ]
    if not math.isnan(last["tokens_mean"]):  # Nothing is generated with DIRECT_ANSWERS.
        lines.append(f"parse rate  {last['parse_rate']:.2f}, clipped {last['clipped_ratio']:.2f}")
        lines.append(f"length      {last['tokens_mean']:,.0f} tokens, longest {last['tokens_max']:,.0f}")
    if isinstance(last["ends"], str):
        turns, calls, seconds = (last[name] for name in ("turns_mean", "calls_mean", "tool_s_mean"))
        lines.append(f"episodes    {turns:.1f} turns, {calls:.1f} calls, environment {seconds:.2f} s")
        lines.append(f"ends        {last['ends']}")
    if not math.isnan(last["gpu_peak_gib"]):
        lines.append(f"GPU         {last['gpu_peak_gib']:.1f} GiB")
    if status != DONE:
        lines += gpu_lines()
    return [*lines, *news], status == DONE


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="OUTPUT_DIR of a run; it may not be there yet")
    options = parser.parse_args(arguments)
    if options.run_dir.exists() and not options.run_dir.is_dir():
        raise InputError(f"{options.run_dir} is not a folder. Name a run's OUTPUT_DIR")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # A character outside the encoding must not end the watching.
    is_once = not sys.stdout.isatty()
    try:
        while True:
            lines, is_complete = frame(options.run_dir)
            print("" if is_once else CLEAR, printable("\n".join(lines)), sep="", flush=True)
            if is_once or is_complete:
                return 0
            time.sleep(1.0)
    except KeyboardInterrupt:
        print("stopped watching; the run goes on", file=sys.stderr)
        return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
