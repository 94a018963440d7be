#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Follow a run in the terminal: progress, time left, reward, parse rate, speed, memory, warnings.

    python scripts/watch.py runs/first            until the run is complete, or Ctrl-C (the run goes on)
    python scripts/watch.py runs/first --once     one picture

It only reads files, anew for each picture, so it can be started before the run, beside it or after it, on another
machine that sees the folder, and it survives a run that is interrupted, resumed or made anew. Whether a process still
runs is known from the lock beside the folder, where the file system shares locks (a local disk and NFS do). Without a
terminal it prints plain text, one picture a step. Exit codes: 0, or 2 where RUN_DIR is not a folder.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.evaluate.figures import PHASES, bins, moving_mean, phase_seconds, spread
from grpo.evaluate.report import duration
from grpo.evaluate.run_data import ReportError, number, part, read_json, read_metrics
from grpo.run.folder import COMPLETE, continuation

try:
    import rich  # noqa: F401
except ImportError:
    sys.exit("error: watch.py draws with rich, which is not installed. Run: pip install -r requirements.txt")
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

RECENT = 10  # steps that time left and the means are taken from
WIDTH = 40  # cells of a sparkline
BLOCKS, ASCII_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", "_.-~=+*#"
# What start_logging writes: `12:07:54 W train_grpo: ...`, of a warning, an error or a critical message.
WARNING = re.compile(r"^\d\d:\d\d:\d\d [WEC] ")
WARNINGS = 4  # lines shown
LONGEST = 300  # characters of one
TAIL = 1 << 16  # bytes of training.log that are searched for them


@dataclass(frozen=True)
class State:
    """What a picture shows, read at `now` [s since 1970]; `waiting` says why there are no steps yet."""

    folder: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    total: int | None = None
    complete: bool = False
    evaluation: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    waiting: str = ""
    stopped: str = ""  # what the same command does, where no process holds the run's lock and it is not complete
    written: float = math.nan  # when metrics.csv last grew [s since 1970]
    now: float = math.nan


def read_state(folder: Path, now: float | None = None) -> State:
    """Everything that the files say now. Nothing is remembered between two calls, so whatever happened to them in the
    meantime (rows dropped by a resumed run, a folder made anew) is simply what the next picture shows."""
    now = time.time() if now is None else now
    found: dict[str, Any] = {"folder": folder.absolute().name, "now": now}
    settings = part(read_json(folder / "settings.json"), "settings")
    total = settings.get("TOTAL_STEPS")
    found["total"] = total if isinstance(total, int) and total > 0 else None
    try:
        found["rows"] = read_metrics(folder / "metrics.csv")
        found["written"] = (folder / "metrics.csv").stat().st_mtime
        if not found["rows"]:
            found["waiting"] = "the first step has not ended yet"
    except ReportError as error:
        found["waiting"] = str(error)
    except OSError:
        started = "the run is starting" if found["total"] else "there is no run in this folder yet"
        found["waiting"] = f"{started}: no metrics.csv"
    found["evaluation"] = read_json(folder / "evaluation.json")
    found["warnings"] = read_warnings(folder / "training.log")
    # A resumed run with more steps finds the complete.json of its first part: that one does not count.
    steps = number(read_json(folder / COMPLETE).get("steps"))
    found["complete"] = steps >= (found["total"] or 0)
    if not found["complete"] and settings and not is_running(folder):
        found["stopped"] = f"no process is running; {continuation(folder, settings)}"
    return State(**found)


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of the run (`grpo.run.folder.lock_run`); true where that cannot be known."""
    folder = folder.resolve()
    try:
        with folder.with_name(f".{folder.name}.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or there is no lock file: a copy of a run, or one that has not started
        return True
    return False


def read_warnings(path: Path) -> list[str]:
    """The last warnings, errors and critical messages of training.log, their first lines, oldest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    # Control characters would act on the terminal.
    return [re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", line) for line in lines if WARNING.match(line)][-WARNINGS:]


def known(rows: Sequence[dict[str, Any]], column: str) -> list[float]:
    """The values that a column has, in order."""
    return [row[column] for row in rows if not math.isnan(row[column])]


def seconds_left(state: State) -> float:
    """From the median of the last steps; NaN where nothing is known. Evaluation and saving are not counted."""
    seconds = known(state.rows[-RECENT:], "step_s")
    if not state.total or not seconds:
        return math.nan
    return max(0, state.total - state.rows[-1]["step"]) * statistics.median(seconds)


def sparkline(values: Sequence[float], width: int = WIDTH, blocks: str = BLOCKS) -> str:
    """Values as a line of at most `width` blocks between their lowest and their highest; NaN is a blank.

    >>> sparkline([0, 1, 2, 3], blocks="0123")
    '0123'
    >>> sparkline([5, 5, math.nan], blocks="0123")
    '11 '
    """
    bars = bins(range(len(values)), width) if values else []
    groups = [[values[i] for i in bar if not math.isnan(values[i])] for bar in bars]
    means = [math.fsum(group) / len(group) if group else math.nan for group in groups]
    finite = [value for value in means if not math.isnan(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    most = len(blocks) - 1

    def block(value: float) -> str:
        if math.isnan(value):
            return " "
        return blocks[round((value - low) / span * most) if span > 0 else most // 2]

    return "".join(block(value) for value in means)


def shown(value: float, digits: str = ".3f", unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{digits}}{unit}"


def phases(row: dict[str, Any]) -> str:
    """Time per phase of a step; phases that took no time are left out."""
    parts = [(PHASES[name][0], spent) for name, spent in phase_seconds(row).items() if spent]
    return ", ".join(f"{label} {spent:.2g} s" if spent < 10 else f"{label} {spent:.0f} s" for label, spent in parts)


def evaluation_table(evaluation: dict[str, Any]) -> Table:
    """The held-out table that a complete run ends with."""
    table = Table(box=None, pad_edge=False, title="Held-out reward", title_justify="left", title_style="bold")
    for column in ("", "reward", "regret", "parse rate"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for key, label in (("random", "random"), ("constant", f"always [{evaluation.get('constant_action')}]")):
        table.add_row(Text(label), spread(evaluation, key))
    for key, label in (("before", "before training"), ("after", "after training")):
        if result := part(evaluation, key):
            figures = [spread(result, name) for name in ("reward", "regret")]
            table.add_row(label, *figures, shown(number(result.get("parse_rate")), ".2f"))
    table.add_row("oracle", spread(evaluation, "oracle"))
    return table


def frame(state: State, ascii_only: bool = False) -> RenderableType:
    """One picture of the run. `ascii_only`: for a terminal whose encoding has no block characters.

    Every text from a file is put in as Text: rich's markup in it means nothing.
    """
    title = Text(state.folder, style="bold")
    if state.complete:
        title.append("  complete", style="green")
    if not state.rows:
        title.append(f"  {state.stopped or f'waiting: {state.waiting}'}", style="yellow")
        return Group(title, *warning_lines(state))

    last, recent = state.rows[-1], state.rows[-RECENT:]
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    ago = state.now - state.written
    progress = Text(f"{last['step']}/{state.total or '?'}")
    if state.stopped:
        progress.append(f"   last step {duration(max(0.0, ago))} ago; {state.stopped}", style="yellow")
    elif state.total and last["step"] >= state.total and not state.complete:
        progress.append(f"   every step is done {duration(max(0.0, ago))} ago: evaluation and saving")
    elif not state.complete:
        progress.append(f"   left {duration(seconds_left(state))}   last step {duration(max(0.0, ago))} ago")
    rewards, parses = ([row[name] for row in state.rows] for name in ("reward", "parse_rate"))

    def mean(column: str) -> float:
        return moving_mean([row[column] for row in recent])[-1]

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("step", ProgressBar(total=state.total or last["step"], completed=last["step"], width=WIDTH))
    table.add_row("", progress)
    table.add_row("reward", Text(sparkline(rewards, blocks=blocks)))
    table.add_row("", f"{shown(last['reward'])}   mean of the last {len(recent)}: {shown(mean('reward'))}   first: {shown(rewards[0])}")  # fmt: skip
    table.add_row("parse rate", Text(sparkline(parses, blocks=blocks)))
    table.add_row("", f"{shown(last['parse_rate'], '.2f')}   clipped {shown(last['clipped_ratio'], '.2f')}   length {shown(last['tokens_mean'], ',.0f')} tokens, longest {shown(last['tokens_max'], ',.0f')}")  # fmt: skip
    speed = f"{shown(last['rollout_tokens_per_s'], ',.0f')} tokens/s in the rollout   step {duration(last['step_s'])}"
    table.add_row("speed", speed)
    table.add_row("phases", phases(last) or "-")
    if peaks := known(state.rows, "gpu_peak_gib"):
        table.add_row("GPU memory", f"{shown(last['gpu_peak_gib'], '.1f')} GiB   most so far {max(peaks):.1f} GiB")
    if mismatch := known(state.rows[-1:], "logp_diff_mean"):
        table.add_row("engine", f"differs from the trainer by {mismatch[0]:.4f} nats on average")
    parts: list[RenderableType] = [title, table, *warning_lines(state)]
    if state.complete and part(state.evaluation, "before"):
        parts += [Text(), evaluation_table(state.evaluation)]
    return Group(*parts)


def warning_lines(state: State) -> list[Text]:
    return [Text(line if len(line) <= LONGEST else f"{line[:LONGEST]} ...", style="yellow") for line in state.warnings]


def follow(folder: Path, console: Console, every: float = 1.0) -> None:
    """Show pictures until the run is complete."""
    ascii_only = console.options.ascii_only
    if not console.is_terminal:
        seen = None
        while True:
            state = read_state(folder)
            last = state.rows[-1]["step"] if state.rows else state.waiting
            if (last, state.complete, state.stopped) != seen:
                seen = last, state.complete, state.stopped
                console.print(frame(state, ascii_only), "")
            if state.complete:
                return
            time.sleep(every)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            state = read_state(folder)
            live.update(frame(state, ascii_only), refresh=True)
            if state.complete:
                return
            time.sleep(every)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="OUTPUT_DIR of a run; it may not be there yet")
    parser.add_argument("--once", action="store_true", help="print one picture and exit")
    options = parser.parse_args(arguments)
    if options.run_dir.exists() and not options.run_dir.is_dir():
        print(f"watch: {options.run_dir} is not a folder. Name a run's OUTPUT_DIR", file=sys.stderr)
        return 2
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # an encoding without some character must not end the watching
    console = Console()
    try:
        if options.once:
            console.print(frame(read_state(options.run_dir), console.options.ascii_only))
        else:
            follow(options.run_dir, console)
    except KeyboardInterrupt:
        print("stopped watching; the run goes on", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
