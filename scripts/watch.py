#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Follow a run in the terminal: progress, time left, reward, parse rate, speed, memory, warnings.

    python scripts/watch.py runs/first            until it is complete; Ctrl-C ends watching
    python scripts/watch.py runs/first --once     one picture

It only reads files, again for each picture, so it can be started before the run, beside it or after it, on another
machine that sees the folder, and it survives a run that is interrupted, resumed or made again. Whether a process still
runs is known from the lock beside the folder, where the file system shares locks (a local disk and NFS do). Without a
terminal it prints plain text, one picture a step. Exit codes: 0, or 2 where RUN_DIR is not a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo.evaluate import run_data
from grpo.evaluate.run_data import duration, number, part, read_json
from grpo.run.folder import COMPLETE, continuation
from grpo.run.pace import RECENT, UNKNOWN, Pace
from grpo.run.place import lock_of
from grpo.settings import fold

WIDTH = 40  # cells of a sparkline
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
# What start_logging writes: `12:07:54 W train_grpo: ...`, of a warning, an error or a critical message, or in the lines
# below it a box (`banner_text`).
WARNING = re.compile(r"^(\d\d:\d\d:\d\d [WEC] [^\n]*?: )(?:\n=+\n((?:\| .* \|\n)+)=+$|(.*)$)", re.MULTILINE)
DONE = "complete"
WARNINGS = 4  # lines shown
LONGEST = 300  # characters of one


@dataclass(frozen=True)
class State:
    """What a picture shows. `said`: what hinders the next step, if anything; `ago`: seconds since the last one."""

    folder: str
    metrics: pandas.DataFrame = field(default_factory=pandas.DataFrame)
    total: int | None = None
    eval_steps: int = 0
    said: str = ""
    ago: float = math.nan
    evaluation: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        return int(self.metrics["step"].iloc[-1]) if len(self.metrics) else 0


def read_state(folder: Path) -> State:
    """Everything that the files say now. Nothing is remembered between two calls, so whatever happened to them in the
    meantime (rows dropped by a resumed run, a folder made again) is simply what the next picture shows."""
    settings = part(read_json(folder / "settings.json"), "settings")
    total = number(settings.get("TOTAL_STEPS"))
    found: dict[str, Any] = {"total": int(total) if total > 0 else None}
    found["eval_steps"] = int(max(0, number(settings.get("EVAL_STEPS"))))
    said = "waiting: the first step has not ended yet"
    try:
        found["metrics"] = run_data.read_metrics(folder / "metrics.csv")
        found["ago"] = max(0.0, time.time() - (folder / "metrics.csv").stat().st_mtime)
        if len(found["metrics"]):
            said = "every step is done: evaluation and saving" if found["metrics"]["step"].max() >= total else ""
    except run_data.ReportError as error:
        said = f"waiting: {error}"
    except OSError:
        said = f"waiting: {'the run is starting' if found['total'] else 'there is no run in this folder yet'}: no metrics.csv"
    # A resumed run with more steps finds the complete.json of its first part: that one does not count.
    if number(read_json(folder / COMPLETE).get("steps")) >= (found["total"] or 0):
        said = DONE
    elif settings and not is_running(folder):
        said = f"no process is running; {continuation(folder, settings)}"
    evaluation, warnings = read_json(folder / "evaluation.json"), read_warnings(folder / "training.log")
    return State(folder.absolute().name, said=said, evaluation=evaluation, warnings=warnings, **found)


def is_running(folder: Path) -> bool:
    """Whether a process holds the run's lock (`grpo.run.folder.lock_run`); true where that cannot be known."""
    # An error: it is held, or there is no lock file, as with a copy of a run or one that has not started.
    with contextlib.suppress(OSError), lock_of(folder.resolve()).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def read_warnings(path: Path) -> list[str]:
    """The last warnings, errors and critical messages of training.log, oldest first: the first line of each, or what
    stands in its box."""
    text = ""
    with contextlib.suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
    found = WARNING.findall(text)[-WARNINGS:]
    lines = [head + (" ".join(re.findall(r"^\| (.*?) +\|$", box, re.MULTILINE)) or first) for head, box, first in found]
    lines = [line if len(line) <= LONGEST else f"{line[:LONGEST]} ..." for line in lines]
    return [re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", line) for line in lines]  # they would act on the terminal


def time_left(state: State) -> str:
    if not state.total:
        return UNKNOWN
    return Pace(state.total, state.eval_steps, state.metrics.to_dict("records")).left(state.step) or UNKNOWN


def sparkline(values: pandas.Series, width: int = WIDTH, low: float = math.nan, high: float = math.nan) -> str:
    """Values as a line of at most `width` blocks from `low` to `high`, NaN: their lowest and highest; NaN is a blank."""
    size = max(1, math.ceil(len(values) / width))
    means = values.groupby([i // size for i in range(len(values))]).mean()
    low, high = (means.min() if math.isnan(low) else low), (means.max() if math.isnan(high) else high)
    span, most = high - low, len(BLOCKS) - 1
    heights = (means - low) / span * most if span > 0 else means * 0 + most // 2
    return "".join(" " if math.isnan(height) else BLOCKS[round(height)] for height in heights)


def shown(value: float, digits: str = ".3f") -> str:
    return "-" if math.isnan(value) else f"{value:{digits}}"


def frame(state: State) -> RenderableType:
    """One picture of the run. Every text from a file is put in as Text: rich's markup in it means nothing."""
    title = Text(state.folder, style="bold")
    warnings = [Text(line, style="yellow") for line in state.warnings]
    if not state.step:
        return Group(title.append(f"  {state.said}", style="yellow"), *warnings)
    ago = f"   last step {duration(state.ago)} ago" * (state.said != DONE)
    metrics, last = state.metrics, state.metrics.iloc[-1]
    phases = run_data.phase_seconds(metrics.tail(1)).iloc[0].items()
    spent = ", ".join(f"{name} {s:.{int(s < 10)}f} s" for name, s in phases if s)
    recent = metrics["reward"].tail(RECENT)
    lines = [
        ("step", ProgressBar(total=state.total or state.step, completed=state.step, width=WIDTH)),
        ("", Text(f"{state.step}/{state.total or '?'}   {state.said or time_left(state)}{ago}")),
        ("reward", sparkline(metrics["reward"])),
        ("", f"{shown(last['reward'])}   mean of the last {len(recent)}: {shown(recent.mean())}"),
        ("parse rate", sparkline(metrics["parse_rate"], low=0.0, high=1.0)),
        ("", f"{shown(last['parse_rate'], '.2f')}   clipped {shown(last['clipped_ratio'], '.2f')}"),
        ("length", f"{shown(last['tokens_mean'], ',.0f')} tokens, longest {shown(last['tokens_max'], ',.0f')}"),
        ("speed", f"{shown(last['rollout_tokens_per_s'], ',.0f')} tokens/s in the rollout"),
        ("time", f"step {duration(last['step_s'])}"),
        ("", spent),
    ]
    if not math.isnan(last["gpu_peak_gib"]):
        most = metrics["gpu_peak_gib"].max()
        busy = "" if math.isnan(last["gpu_utilization"]) else f"   busy {last['gpu_utilization']:.0f} % of the step"
        lines.append(("GPU", f"{last['gpu_peak_gib']:.1f} GiB, most so far {most:.1f} GiB{busy}"))
    if not math.isnan(last["logp_diff_mean"]):
        lines.append(("mismatch", f"{last['logp_diff_mean']:.4f} nats on average between vLLM and trainer"))
    if len(measured := metrics[metrics["heldout_reward"].notna()]):
        at = measured.iloc[-1]
        plant = f"   plant regret {shown(at['plant_regret'], '.1f')} %, unserved {shown(at['plant_unserved_kwh'], ',.1f')} kWh"
        plant *= not math.isnan(at["plant_regret"])
        lines.append(("measured", f"after step {at['step']:.0f}: held-out reward {shown(at['heldout_reward'])}{plant}"))
    if state.said == DONE and part(state.evaluation, "before"):
        lines += [(Text(who), f"held-out reward {text}") for who, text, *_ in run_data.heldout_rows(state.evaluation)]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    for label, line in lines:
        table.add_row(label, line)
    return Group(title, table, *warnings)


def follow(folder: Path, console: Console, every: float = 1.0) -> None:
    """Show pictures until the run is complete; without a terminal only those that tell something new."""
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop") if console.is_terminal else None
    seen = None
    with live or contextlib.nullcontext():
        while True:
            state = read_state(folder)
            if live:
                live.update(frame(state), refresh=True)
            elif (state.step, state.total, state.said) != seen:
                console.print(frame(state), "")
            seen = state.step, state.total, state.said
            if state.said == DONE:
                return
            time.sleep(every)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=fold(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="OUTPUT_DIR of a run; it may not be there yet")
    parser.add_argument("--once", action="store_true", help="print one picture and exit")
    options = parser.parse_args(arguments)
    if options.run_dir.exists() and not options.run_dir.is_dir():
        print(f"watch: {options.run_dir} is not a folder. Name a run's OUTPUT_DIR", file=sys.stderr)
        return 2
    sys.stdout.reconfigure(errors="replace")  # an encoding without some character must not end the watching
    console = Console()
    try:
        if options.once:
            console.print(frame(read_state(options.run_dir)))
        else:
            follow(options.run_dir, console)
    except KeyboardInterrupt:
        print("stopped watching; the run goes on", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
