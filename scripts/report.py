#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the report of a run: RUN_DIR/report.html, one file without network or scripts, and its figures as PNGs.

    python scripts/report.py runs/first

Works on a run that is complete, interrupted, resumed or still going: what its data does not allow is left out, with one
sentence that says why. train_grpo.py writes it at the end of every run. It reads metrics.csv, completions.csv,
settings.json, evaluation.json and closed_loop.json, and nothing else; the text of completions is escaped and cut.

Exit codes: 0 written, 2 there is no run to report on.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import functools
import io
import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import train_grpo  # noqa: E402

# ---- What the figures mean -------------------------------------------------------------------------------------------

MEAN_OF = 10  # steps in a moving mean


def meaning(*columns: str) -> str:
    """What metrics.csv's columns mean, as the run documents them."""
    return " ".join(train_grpo.METRICS[name][1] for name in columns)


MOVING = f"Dots: steps; line: mean of the last {MEAN_OF}."
# Columns of metrics.csv in each learning curve; a curve of one column has a moving mean as well.
CURVES = {
    "reward": ("reward",),
    "parse_rate": ("parse_rate",),
    "best_action_rate": ("best_action_rate",),
    "length": ("tokens_mean", "tokens_max"),
    "clipped_ratio": ("clipped_ratio",),
    "zero_std": ("zero_std_fraction",),
    "entropy": ("entropy",),
    "mismatch": ("logp_diff_mean", "logp_diff_max"),
    "is_ratio": ("is_ratio_mean",),
    "gpu_memory": ("gpu_peak_gib",),
}
# Every figure: title, and the one line that stands below it. docs/report.md has the same table.
FIGURES = {
    "reward": ("Reward", f"{meaning('reward')} {MOVING}"),
    "parse_rate": ("Parse rate", f"{meaning('parse_rate')} {MOVING}"),
    "best_action_rate": ("Best action", f"{meaning('best_action_rate')} {MOVING}"),
    "length": ("Completion length", "Mean and longest completion of each step, in tokens."),
    "clipped_ratio": ("Clipped ratio", f"{meaning('clipped_ratio')} {MOVING}"),
    "zero_std": ("Groups without a signal", f"{meaning('zero_std_fraction')} {MOVING}"),
    "entropy": ("Entropy", f"{meaning('entropy')} {MOVING}"),
    "mismatch": ("Engine against trainer", f"{meaning('logp_diff_mean')} Also the largest difference of each step."),
    "is_ratio": ("Importance ratio", f"{meaning('is_ratio_mean')} {MOVING}"),
    "phases": ("Time per phase", "Seconds of a step by phase, stacked; several steps share a bar in a long run."),
    "gpu_memory": ("GPU memory", f"{meaning('gpu_peak_gib')} {MOVING}"),
    "actions": ("Actions over training", "Share of the sampled completions that named each action, or none, by step."),
    "heldout": ("Held-out reward", "Mean reward on held-out prompts; bars are 95% intervals, lines what other policies earn."),
    "plant": ("Three days at the plant", "From top to bottom: the output that each policy chose (line) for the cooling load (grey), energy in the storage, CO2 intensity of the electricity, emissions summed up since the start."),
}  # fmt: skip

# What a policy is called and drawn as, everywhere. Colours: Okabe and Ito, distinguishable when colour-blind; line
# styles and markers differ as well.
POLICIES = {
    "base": ("base model", "#D55E00", "-"),
    "trained": ("trained", "#0072B2", "-"),
    "optimum": ("optimum", "#009E73", "--"),
    "follow_the_load": ("follow the load", "#777777", ":"),
    "charge_when_clean": ("charge when clean", "#777777", ":"),
}
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
INK = "#333333"
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that a figure looks the same everywhere
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.7,
}
PHASES = {
    "wake": ("wake", "#56B4E9"),
    "handover": ("hand-over", "#F0E442"),
    "generation": ("generation", "#0072B2"),
    "sleep": ("sleep", "#CC79A7"),
    "reward": ("reward", "#009E73"),
    "learn": ("learn", "#E69F00"),
}
DPI = 200  # 960 pixels wide: sharp on a phone, too
MOST_BARS = 40  # in a figure; more steps than that share bars
MOST_ACTIONS = 7  # drawn one by one; the rest share a colour
MOST_WINDOWS = 3  # of the closed loop that get a figure
EXAMPLES = 3  # completions shown of each kind
HEAD, TAIL = 3000, 1500  # characters of a completion that are shown from its begin and its end
SHORT = 300  # characters up to which a completion is not folded


class ReportError(RuntimeError):
    """There is nothing to report on, or nowhere to write; the message says what to do."""


# ---- Reading what a run wrote ----------------------------------------------------------------------------------------


def read_log(path: Path) -> Iterator[dict[str, str]]:
    """Whole rows of metrics.csv or completions.csv, as text by column, also while the run goes on writing.

    A last row that is half written (no line end, or cells missing) is left out. Raises ReportError where the file is
    not a log of this project.
    """

    def lines(file: Iterable[str]) -> Iterator[str]:
        for line in file:
            if line.endswith(("\n", "\r")):  # only the last can lack it
                yield line.replace("\0", "")

    limit = csv.field_size_limit(sys.maxsize)  # csv's own limit is 128 KiB a cell; a completion may be longer
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.reader(lines(file))
            header = next(rows, None)
            if header is not None and "step" not in header:
                raise ReportError(f"{path} has no column `step`: it is not a log of train_grpo.py")
            for cells in rows:
                if len(cells) == len(header) and cells[header.index("step")].isdigit():
                    yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ReportError(f"{path} cannot be read as CSV ({error}); was it edited by another program?") from None
    finally:
        csv.field_size_limit(limit)


def number(value: Any) -> float:
    """A finite number, or NaN for anything else (an empty cell, `inf`, None)."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        return math.nan
    return result if math.isfinite(result) else math.nan


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of metrics.csv in order of their steps: `step` a whole number, every other column but `time` a float.

    Columns that the file lacks (it is older) are NaN. Of two rows for one step the later counts.
    """
    rows = {}
    for cells in read_log(path):
        row = {name: number(cells.get(name)) for name in train_grpo.METRICS}
        rows[int(cells["step"])] = row | {"step": int(cells["step"]), "time": cells.get("time", "")}
    return [rows[step] for step in sorted(rows)]


def part(found: Any, *names: str) -> dict[str, Any]:
    """The object at a path of names inside JSON; an empty one where there is none, or something else."""
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


@dataclass(frozen=True)
class Example:
    """A completion that is shown; `text` is cut already."""

    step: int
    prompt_id: str
    action: str
    best_action: str
    reward: float
    tokens: str
    truncated: bool
    text: str
    rank: tuple[float, int] = (0.0, 0)

    @property
    def folded(self) -> bool:
        return len(self.text) > SHORT or self.text.count("\n") > 4

    @property
    def facts(self) -> str:
        action = f"action [{self.action}]" if self.action else "no action"
        best = f" (best [{self.best_action}])" if self.best_action else ""
        reward = "none" if math.isnan(self.reward) else f"{self.reward:.3g}"
        cut = ", truncated" if self.truncated else ""
        return f"step {self.step}, prompt {self.prompt_id}: {action}{best}, reward {reward}, {self.tokens} tokens{cut}"


KINDS = {
    "best": "Highest reward",
    "worst": "Lowest reward of an answer that parses",
    "unparsed": "No action could be read",
    "truncated": "Truncated at MAX_COMPLETION_LEN",
}


@dataclass
class Completions:
    """What the report needs of completions.csv: actions by step ('' where none was named) and some examples."""

    count: int = 0
    actions: dict[int, Counter[str]] = field(default_factory=dict)
    examples: dict[str, list[Example]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def keep(self, kind: str, example: Example) -> None:
        """Keep the example if it ranks among the first of its kind; one for each prompt."""
        held = self.examples[kind]
        rivals = [one for one in held if one.prompt_id == example.prompt_id] or (held if len(held) >= EXAMPLES else [])
        lowest = min(rivals, key=lambda one: one.rank, default=None)
        if lowest is not None:
            if lowest.rank >= example.rank:
                return
            held.remove(lowest)
        held.append(example)
        held.sort(key=lambda one: one.rank, reverse=True)


def cut(text: str) -> str:
    """A completion as it is shown: control characters made visible, and the middle of a long one left out."""
    left_out = len(text) - HEAD - TAIL
    if left_out > 0:
        text = f"{text[:HEAD]}\n[... {left_out:,} characters left out ...]\n{text[-TAIL:]}"
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", "\ufffd", text)


def read_completions(path: Path) -> Completions:
    """One pass over completions.csv, whatever its size; recent steps are preferred as examples."""
    found = Completions()
    if not path.is_file():
        return found
    for cells in read_log(path):
        step, action, reward = int(cells["step"]), cells.get("parsed_action", ""), number(cells.get("reward"))
        found.count += 1
        found.actions.setdefault(step, Counter())[action] += 1
        truncated, best = cells.get("truncated") == "1", cells.get("best_action", "")
        ranks = {
            "best": None if math.isnan(reward) else (reward, step),
            # Data without reward columns names no actions at all: there every completion may be the worst.
            "worst": (-reward, step) if not math.isnan(reward) and (action or not best) else None,
            "unparsed": None if action or truncated else (0.0, step),
            "truncated": (0.0, step) if truncated else None,
        }
        for kind, rank in ranks.items():
            held = found.examples[kind]
            if rank is not None and (len(held) < EXAMPLES or rank > held[-1].rank):
                text = cut(cells.get("completion", ""))
                prompt = cells.get("prompt_id", "")[:120]
                found.keep(kind, Example(step, prompt, action, best, reward, cells.get("tokens", ""), truncated, text, rank))  # fmt: skip
    return found


@dataclass
class Run:
    """Everything that a report is made of."""

    folder: Path
    metrics: list[dict[str, Any]]
    completions: Completions
    record: dict[str, Any]  # settings.json
    evaluation: dict[str, Any]
    closed_loop: dict[str, Any]

    @property
    def settings(self) -> Mapping[str, Any]:
        return part(self.record, "settings")

    @property
    def steps(self) -> int:
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def total(self) -> int | None:
        total = self.settings.get("TOTAL_STEPS")
        return total if isinstance(total, int) else None

    def values(self, column: str) -> list[float]:
        return [row[column] for row in self.metrics]


def read_run(folder: Path) -> Run:
    """Raises ReportError where the folder holds no run."""
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder. Name a run's OUTPUT_DIR")
    if not (folder / "metrics.csv").is_file():
        raise ReportError(
            f"{folder}: there is no metrics.csv. Name a run's OUTPUT_DIR, after the run has loaded its model"
        )
    return Run(
        folder,
        read_metrics(folder / "metrics.csv"),
        read_completions(folder / "completions.csv"),
        *(read_json(folder / f"{name}.json") for name in ("settings", "evaluation", "closed_loop")),
    )


# ---- Parts of the page -----------------------------------------------------------------------------------------------


@dataclass
class Picture:
    """A figure of the page: `name` is a key of FIGURES, `detail` what only this one shows."""

    name: str
    file: str
    png: bytes
    detail: str = ""

    @property
    def title(self) -> str:
        return FIGURES[self.name][0]

    @property
    def line(self) -> str:
        return FIGURES[self.name][1]

    @property
    def data(self) -> str:
        return base64.b64encode(self.png).decode("ascii")


@dataclass
class Table:
    header: list[str]
    rows: list[list[str]]
    text: str = ""


@dataclass
class Section:
    """One part of the page. `notes`: sentences above it, `missing`: what is left out, and why."""

    title: str
    notes: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def spread(result: Mapping[str, Any], name: str, digits: str = ".3f", unit: str = "") -> str:
    """A figure with its 95% interval where there is one: `0.521 (0.480 to 0.560)`; `-` without the figure."""
    value, low, high = (number(result.get(name + end)) for end in ("", "_low", "_high"))
    if math.isnan(value):
        return "-"
    interval = "" if math.isnan(low + high) else f" ({low:{digits}} to {high:{digits}})"
    return f"{value:{digits}}{unit}{interval}"


def moving_mean(values: Sequence[float], window: int = MEAN_OF) -> list[float]:
    """Mean of the last `window` values up to each one, NaN left out; NaN where all of them are."""
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if not math.isnan(value)]
        means.append(math.fsum(known) / len(known) if known else math.nan)
    return means


def bins(steps: Sequence[int], most: int = MOST_BARS) -> list[list[int]]:
    """Steps in at most `most` bars of equally many consecutive steps; the last bar may have fewer."""
    size = max(1, math.ceil(len(steps) / most))
    return [list(steps[first : first + size]) for first in range(0, len(steps), size)]


def policy(name: str) -> tuple[str, str, str]:
    """Label, colour and line style of a policy."""
    if match := re.fullmatch(r"always_(\d+)", name):
        return f"always [{match[1]}]", "#777777", ":"
    return POLICIES.get(name, (name, "#777777", ":"))


# ---- Figures ---------------------------------------------------------------------------------------------------------


class Canvas:
    """A figure of one column, 4.8 inches wide: its text stays readable on a phone, two stand side by side elsewhere.

    Made without pyplot, so that nothing of a caller's matplotlib is changed.
    """

    def __init__(self, name: str, height: float = 2.9, heights: Sequence[float] = (1.0,)):
        from matplotlib.figure import Figure

        self.name, self.figure = name, Figure(figsize=(4.8, height), dpi=DPI, layout="constrained")
        ratios = {"height_ratios": list(heights)}
        grid = self.figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=ratios)
        self.axes = [row[0] for row in grid]

    def legend(self, axes: Any, columns: int) -> None:
        """Above the axes, where it covers nothing."""
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.98), ncols=columns, borderaxespad=0.2, columnspacing=1.2, handlelength=1.6)  # fmt: skip

    def picture(self, detail: str = "", file: str = "") -> Picture:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
        return Picture(self.name, f"{file or self.name}.png", buffer.getvalue(), detail)


UNITS = {column: unit for column, (unit, _) in train_grpo.METRICS.items()}


def whole_steps(axes: Any) -> None:
    """Ticks at whole steps only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.set_xlabel("step")


def curve(run: Run, name: str) -> Picture:
    """A learning curve over the columns CURVES[name], of which at least one has a value."""
    canvas = Canvas(name)
    axes, steps = canvas.axes[0], [row["step"] for row in run.metrics]
    columns = CURVES[name]
    for column, colour in zip(columns, ("#0072B2", "#E69F00"), strict=False):
        values = run.values(column)
        if len(columns) == 1:
            axes.plot(steps, values, ".", color="#7FB2D6", markersize=4 if len(steps) < 300 else 2)
            axes.plot(steps, moving_mean(values), color=colour)
        else:
            axes.plot(steps, values, ".-", color=colour, markersize=4, linewidth=1, label=column)
    finite = [value for column in columns for value in run.values(column) if not math.isnan(value)]
    if name in ("clipped_ratio", "zero_std"):  # small where all is well: as much of 0 to 1 as is needed
        top = min(1.03, max(0.1, 1.15 * max(finite)))
        axes.set_ylim(-0.03 * top, top)
    elif UNITS[columns[0]] == "share":
        axes.set_ylim(-0.03, 1.03)
    elif name in ("length", "gpu_memory"):
        axes.set_ylim(0, 1.1 * max(finite) or 1)
    elif name == "mismatch" and min(finite) > 0:
        axes.set_yscale("log")
    if axes.get_yscale() == "linear":
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_ylabel(UNITS[columns[0]] or "ratio")
    whole_steps(axes)
    canvas.legend(axes, 2)
    return canvas.picture()


def phase_seconds(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by phase; what was not measured is 0. Generation is the rollout without its other parts."""
    known = {name: 0.0 if math.isnan(value := number(row.get(f"{name}_s"))) else value for name in ("rollout", "wake", "handover", "sleep", "reward", "learn")}  # fmt: skip
    generation = max(0.0, known.pop("rollout") - known["wake"] - known["handover"] - known["sleep"])
    return {name: generation if name == "generation" else known[name] for name in PHASES}


def stacked(axes: Any, groups: Sequence[Sequence[int]], layers: Sequence[tuple[str, str, list[float], str]]) -> None:
    """Bars over groups of steps; a layer is (label, colour, height by group, hatch)."""
    left = [group[0] - 0.5 for group in groups]
    width = [group[-1] - group[0] + 1 for group in groups]
    bottom = [0.0] * len(groups)
    gap = 0.92 if len(groups) < 25 else 1.0
    for label, colour, heights, hatch in layers:
        axes.bar(left, heights, [w * gap for w in width], bottom=bottom, align="edge", color=colour, label=label, hatch=hatch, edgecolor="white", linewidth=0.3)  # fmt: skip
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.grid(False, axis="x")
    axes.margins(x=0.01)
    whole_steps(axes)


def phases_figure(run: Run) -> Picture:
    by_step = {row["step"]: phase_seconds(row) for row in run.metrics}
    groups = bins(sorted(by_step))
    layers = []
    for name, (label, colour) in PHASES.items():
        heights = [math.fsum(by_step[step][name] for step in group) / len(group) for group in groups]
        if any(heights):
            layers.append((label, colour, heights, ""))
    canvas = Canvas("phases", 3.1)
    stacked(canvas.axes[0], groups, layers)
    canvas.axes[0].set_ylabel("s per step")
    canvas.legend(canvas.axes[0], 3)
    return canvas.picture()


def actions_figure(found: Completions) -> Picture:
    groups = bins(sorted(found.actions), 25)
    totals = Counter()
    for counts in found.actions.values():
        totals.update(counts)
    named = sorted((action for action in totals if action), key=lambda a: (len(a), a))
    if len(named) > MOST_ACTIONS:
        frequent = {action for action, _ in totals.most_common() if action}
        frequent = set(sorted(frequent, key=lambda a: -totals[a])[: MOST_ACTIONS - 1])
        named = [action for action in named if action in frequent]
    shown = set(named)

    def shares(wanted: Callable[[str], bool]) -> list[float]:
        heights = []
        for group in groups:
            counts = sum((found.actions[step] for step in group), Counter())
            heights.append(sum(n for action, n in counts.items() if wanted(action)) / counts.total())
        return heights

    layers = [
        (f"[{action[:6]}]", PALETTE[i], shares(lambda a, action=action: a == action), "")
        for i, action in enumerate(named)
    ]
    if any(others := shares(lambda a: bool(a) and a not in shown)):
        layers.append(("others", PALETTE[-1], others, ""))
    if any(unparsed := shares(lambda a: not a)):
        layers.append(("no action", "#DDDDDD", unparsed, "////"))
    canvas = Canvas("actions", 3.1)
    stacked(canvas.axes[0], groups, layers)
    canvas.axes[0].set_ylim(0, 1)
    canvas.axes[0].set_ylabel("share of completions")
    canvas.legend(canvas.axes[0], 5)
    return canvas.picture()


def heldout_figure(evaluation: Mapping[str, Any]) -> Picture:
    canvas = Canvas("heldout", 2.0)
    axes = canvas.axes[0]
    constant = evaluation.get("constant_action")
    names = {"random": "random", "constant": f"always [{constant}]", "oracle": "oracle"}
    for (key, label), colour, style in zip(names.items(), ("#999999", INK, "#009E73"), (":", "-.", "--"), strict=True):
        if not math.isnan(value := number(evaluation.get(key))):
            axes.axvline(value, color=colour, linestyle=style, label=label, linewidth=1.4)
    labels = []
    for key, who in (("after", "trained"), ("before", "base")):
        result = evaluation.get(key) or {}
        value, low, high = (number(result.get(f"reward{end}")) for end in ("", "_low", "_high"))
        if math.isnan(value):
            continue
        label, colour, _ = policy(who)
        error = None if math.isnan(low + high) else [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.errorbar([value], [len(labels)], xerr=error, fmt="o", color=colour, capsize=5, markersize=7, linewidth=2)
        labels.append(label)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.grid(False, axis="y")
    axes.set_xlabel("mean reward")
    canvas.legend(axes, 3)
    return canvas.picture()


def plant_figure(window: Mapping[str, Any], start_kwh: float, index: int) -> Picture:
    """One panel for each policy's output, then storage, intensity and emissions over the hours of one window; raises
    KeyError, TypeError or ValueError where the window is not as scripts/evaluate.py writes it."""
    shown = [name for name in ("base", "trained", "optimum") if name in window["policies"]]
    count = len(window["load_kw"])
    hours = list(range(count + 1))

    def checked(values: Sequence[float | None]) -> list[float]:
        if len(values) != count:
            raise ValueError(f"{len(values)} values for {count} hours")
        return [number(value) for value in values]

    def held(values: Sequence[float | None]) -> list[float]:  # what holds for an hour is drawn until the next begins
        return [*checked(values), number(values[-1])]

    canvas = Canvas("plant", 4.0 + 0.9 * len(shown), (*[0.9] * len(shown), 1.1, 0.8, 1.1))
    storage, carbon, emitted = canvas.axes[-3:]
    carbon.fill_between(hours, held(window["co2_kg_per_kwh"]), step="post", color="#C9B38C", linewidth=0)
    for order, name in enumerate(shown):
        one, (label, colour, style) = window["policies"][name], policy(name)
        line = {"color": colour, "linestyle": style, "linewidth": (2.4, 1.8, 1.3)[order]}
        axes = canvas.axes[order]
        axes.fill_between(hours, held(window["load_kw"]), step="post", color="#CCCCCC", label="load", linewidth=0)
        axes.step(hours, held(one["output_kw"]), where="post", color=colour, linewidth=1.5, label="output")
        axes.set_title(label, loc="left", fontsize=9.5, color=colour, pad=3)
        axes.set_ylabel("kW")
        storage.plot(hours, [start_kwh, *checked(one["storage_kwh"])], label=label, **line)
        emitted.plot(hours, [0.0, *accumulate(checked(one["co2_kg"]))], **line)
    for axes, text in ((storage, "storage, kWh"), (carbon, "kg CO2/kWh"), (emitted, "kg CO2 so far")):
        axes.set_ylabel(text)
    most = max((axes.get_ylim()[1] for axes in canvas.axes[: len(shown)]), default=1.0)
    for axes in canvas.axes:
        axes.set_ylim(0, most if axes in canvas.axes[: len(shown)] else None)
    canvas.legend(storage, 3)
    emitted.set_xlim(0, count)
    with contextlib.suppress(KeyError, ValueError):  # without a readable start the axis counts hours
        first = datetime.fromisoformat(str(window["start"]))
        midnights = [h for h in hours if (first + timedelta(hours=h)).hour == 0]
        if 0 < len(midnights) <= 15:
            emitted.set_xticks(midnights, [f"{first + timedelta(hours=h):%b %d}" for h in midnights])
    return canvas.picture(str(window.get("name", ""))[:120], f"plant_{index}")


# ---- Sections --------------------------------------------------------------------------------------------------------


def curves_section(run: Run) -> Section:
    section = Section("Learning curves")
    if len(run.metrics) < 2:
        section.missing.append(f"A curve needs two steps, and there {'is one' if run.metrics else 'is none'} so far.")
        return section
    for name, columns in CURVES.items():
        if name == "gpu_memory":
            continue
        if all(math.isnan(value) for column in columns for value in run.values(column)):
            listed = " and ".join(f"`{column}`" for column in columns)
            section.missing.append(
                f"{FIGURES[name][0]} is left out: no step has a value in {listed}. {meaning(columns[0])}"
            )
        else:
            section.pictures.append(curve(run, name))
    return section


def machine_section(run: Run) -> Section:
    section = Section("Time and memory")
    if not run.metrics:
        section.missing.append("No step has ended yet.")
        return section
    section.pictures.append(phases_figure(run))
    if all(math.isnan(value) for value in run.values("gpu_peak_gib")):
        section.missing.append(
            "GPU memory is left out: no step has a value in `gpu_peak_gib`; without a GPU it is empty."
        )
    elif len(run.metrics) > 1:
        section.pictures.append(curve(run, "gpu_memory"))
    else:
        section.notes.append(f"GPU memory peak: {run.metrics[0]['gpu_peak_gib']:.1f} GiB.")
    return section


def actions_section(run: Run) -> Section:
    section = Section("Actions")
    if not run.completions.count:
        section.missing.append("There are no completions yet.")
    elif not any(action for counts in run.completions.actions.values() for action in counts):
        section.missing.append("No completion names an action: the data has no actions, or no answer parses.")
    else:
        section.pictures.append(actions_figure(run.completions))
    return section


def heldout_section(run: Run) -> Section:
    section, found = Section("Held-out prompts: before and after"), run.evaluation
    if not part(found, "before"):
        section.missing.append(no_evaluation(run))
        return section
    if not part(found, "after"):
        section.missing.append("There is no evaluation after training: the run goes on, or was interrupted.")
    constant = f"best constant action [{found['constant_action']}]"
    rows = [["random action", spread(found, "random"), "", "", "", "", ""]]
    rows.append([constant, spread(found, "constant"), "", "", "", "", ""])
    actions = max((len(found[key].get("action_counts") or []) for key in ("before", "after") if found.get(key)), default=0)  # fmt: skip
    counted = []
    for key, label in (("before", policy("base")[0]), ("after", policy("trained")[0])):
        if result := found.get(key):
            figures = [spread(result, name) for name in ("reward", "regret")]
            figures += [spread(result, name, ".2f") for name in ("parse_rate", "best_action_rate", "clipped_ratio")]
            length = f"{number(result.get('tokens_mean')):,.0f}, {number(result.get('tokens_max')):,.0f}"
            rows.append([label, *figures, length])
            if counts := result.get("action_counts"):
                unparsed = result.get("unparsed", 0)
                answers = max(1, sum(counts) + unparsed)
                shares = [f"{n / answers:.1%}" for n in [*counts, *[0] * (actions - len(counts)), unparsed]]
                counted.append([label, *shares])
    rows.append(["oracle", spread(found, "oracle"), "", "", "", "", ""])
    header = ["", "Reward", "Regret", "Parse rate", "Best action", "Clipped", "Tokens"]
    text = f"{found.get('samples', '?')} completions for each prompt. In brackets: 95% intervals, bootstrap over prompts. Regret: the row's best reward minus the reward earned. Tokens: mean, longest."
    section.pictures.append(heldout_figure(found))
    section.tables.append(Table(header, rows, text))
    if counted:
        header = ["", *(f"[{k}]" for k in range(actions)), "no action"]
        section.tables.append(Table(header, counted, "Share of each action among the held-out completions."))
    return section


def no_evaluation(run: Run) -> str:
    if run.settings.get("EVAL_SAMPLES") == 0:
        return "Held-out prompts were not evaluated: EVAL_SAMPLES is 0."
    return "There is no evaluation on held-out prompts (evaluation.json) yet."


def plant_section(run: Run) -> Section:
    section, found = Section("Closed loop: three days at the plant"), run.closed_loop
    if not found:
        section.missing.append("The plant was not run in closed loop: there is no closed_loop.json (scripts/evaluate.py writes it).")  # fmt: skip
        return section
    windows, totals = found["windows"], found["totals"]
    samples = found.get("samples", 1)
    asked = "Each hour takes one sampled answer."
    if samples != 1 and found.get("vote"):
        asked = f"Each hour takes the majority of {samples} sampled answers."
    elif samples != 1:
        asked = f"Each hour takes one sampled answer; every window was run {samples} times: drawn is the first, the table has means."
    section.notes.append(
        f"{len(windows)} window{'' if len(windows) == 1 else 's'} of {short(', '.join(map(str, found.get('profiles') or [])))}, "
        f"with {number(found.get('start_kwh')):g} kWh in the storage at first. {asked} An answer that cannot be parsed counts as "
        f"[{found.get('safe_action', '?')}], the safe action: {str(found.get('safe_action_reason', 'no reason was recorded')).rstrip('.')}."
    )
    start = number(found.get("start_kwh"))
    for index, window in enumerate(windows[:MOST_WINDOWS], 1):
        section.pictures.append(plant_figure(window, start, index))
    if len(windows) > MOST_WINDOWS:
        section.notes.append(f"Shown: the first {MOST_WINDOWS} windows. The table counts all of them.")
    order = [*(name for name in ("base", "trained", "optimum") if name in totals)]
    order += [name for name in totals if name not in order]
    rows = []
    for name in order:
        one = totals[name]
        answers = f"{one['unparsed']} of {one['answers']}" if one.get("answers") else ""
        figures = (f"{number(one.get(key)):,.1f}" for key in ("co2_kg", "unserved_kwh", "storage_cycled_kwh"))
        rows.append([policy(name)[0], *figures, spread(one, "regret_percent", ",.1f"), answers])
    header = ["", "CO2, kg", "Unserved, kWh", "Storage cycled, kWh", "Regret, %", "Unparsed"]
    text = "Totals over all windows. Regret: cost above the optimum's, in percent (docs/evaluation.md), with its 95% interval over windows where there are three or more. Little CO2 is worth nothing where load stays unserved."
    section.tables.append(Table(header, rows, text))
    return section


def examples_section(run: Run) -> Section:
    section = Section("Completions, good and bad")
    section.examples = {KINDS[kind]: held for kind, held in run.completions.examples.items() if held}
    if not run.completions.count:
        section.missing.append("There are no completions yet.")
    else:
        section.notes.append(f"Chosen from {run.completions.count:,} completions; of equal ones the latest are shown, one for each prompt.")  # fmt: skip
        none = [KINDS[kind][0].lower() + KINDS[kind][1:] for kind, held in run.completions.examples.items() if not held]
        section.missing += [f"None to show: {', '.join(none)}."] if none else []
    return section


SECTIONS = (curves_section, machine_section, actions_section, heldout_section, plant_section, examples_section)


def guarded(make: Callable[[Run], Section], run: Run) -> Section:
    """A section, or one that says that its data is not as agreed: a file edited by hand must not cost the report."""
    try:
        return make(run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        title = {"plant_section": "Closed loop", "heldout_section": "Held-out prompts"}.get(make.__name__, "A section")
        return Section(title, missing=[f"{title} is left out: its data is not as expected ({type(error).__name__}: {str(error)[:200]})."])  # fmt: skip


# ---- Summary ---------------------------------------------------------------------------------------------------------


def reward_verdict(run: Run) -> str:
    """Whether training improved the held-out reward, in plain words."""
    before, after, difference = (part(run.evaluation, key) for key in ("before", "after", "difference"))
    value, low, high = (number(difference.get(name)) for name in ("reward", "reward_low", "reward_high"))
    if not before:
        return no_evaluation(run)
    if not after:
        return "Whether training helped is not known yet: there is no evaluation after training."
    if math.isnan(value + low + high):
        change = number(after.get("reward")) - number(before.get("reward"))
        return (
            f"Held-out reward changed by {change:+.3f}; without a confidence interval nothing can be said about chance."
        )
    said = f"Held-out reward changed by {value:+.3f} (95% interval {low:+.3f} to {high:+.3f})"
    if low > 0:
        said += ": the improvement exceeds its confidence interval, the trained model is better than the base model."
        constant = number(run.evaluation.get("constant"))
        if number(after.get("reward_low")) > constant:
            said += f" It also beats the best constant action ({constant:.3f})."
        elif number(after.get("reward_high")) < constant:
            said += f" It still earns less than the best constant action ({constant:.3f})."
        return said
    if high < 0:
        return f"{said}: the trained model is worse than the base model, beyond its confidence interval."
    return f"{said}: the interval contains zero, so this evaluation cannot tell the trained model from the base model."


def plant_verdict(run: Run) -> str:
    """Whether the trained model runs the plant better than the base model, in plain words; empty without both."""
    base, trained = part(run.closed_loop, "totals", "base"), part(run.closed_loop, "totals", "trained")
    difference = part(run.closed_loop, "difference")
    if not base or not trained:
        return ""
    ends = (f"{number(one.get('regret_percent')):,.1f}%" for one in (base, trained))
    said = f"At the plant regret went from {' to '.join(ends)}"
    value, low, high = (number(difference.get(f"regret_percent{end}")) for end in ("", "_low", "_high"))
    if math.isnan(value + low + high):
        said += "; no confidence interval was recorded (it needs three windows), so nothing can be said about chance"
    else:
        said += f", by {value:+,.1f} points (95% interval {low:+,.1f} to {high:+,.1f}): "
        if high < 0:
            said += "the improvement exceeds its confidence interval, the trained model runs it better"
        elif low > 0:
            said += "the trained model runs it worse, beyond its confidence interval"
        else:
            said += "the interval contains zero, so this cannot tell the trained model from the base model"
    unserved, before = number(trained.get("unserved_kwh")), number(base.get("unserved_kwh"))
    if unserved > before + 0.05:
        said += f". Besides, {unserved:,.1f} kWh of load stayed unserved, {before:,.1f} before"
    return said + "."


@dataclass
class Tile:
    label: str
    value: str
    lines: list[str]


ARROW = " \u2192 "


def tiles(run: Run) -> list[Tile]:
    """The figures at the top of the page, as far as the run has them."""
    steps = f"{run.steps} of {run.total}" if run.total else str(run.steps)
    state = "every step is done" if run.total and run.steps >= run.total else "in progress, or interrupted"
    resumed = run.record.get("resumed_from_step")
    found = [Tile("Steps", steps, [state, *([f"resumed from step {resumed}"] if resumed else [])])]
    measured = {key: one for key in ("before", "after") if (one := part(run.evaluation, key))}
    if "before" in measured:
        value = ARROW.join(f"{number(one.get('reward')):.3f}" for one in measured.values())
        lines = [f"{key}: {spread(one, 'reward')}" for key, one in measured.items()]
        others = (("random", "random"), ("best constant", "constant"), ("oracle", "oracle"))
        lines.append(", ".join(f"{label} {spread(run.evaluation, key)}" for label, key in others))
        found.append(Tile("Held-out reward", value, lines))
    plant = {name: one for name in ("base", "trained", "optimum") if (one := part(run.closed_loop, "totals", name))}
    models = [one for name, one in plant.items() if name != "optimum"]
    if models:
        value = ARROW.join(f"{number(one.get('co2_kg')):,.0f}" for one in models) + " kg"
        unserved = [number(one.get("unserved_kwh")) for one in models]
        # Cooling nothing emits nothing: the figure above must not be read without this one.
        lines = [f"unserved load: {ARROW.join(f'{value:,.0f}' for value in unserved)} kWh"] if any(unserved) else []
        for name, one in plant.items():
            line = f"{policy(name)[0]}: {number(one.get('co2_kg')):,.0f} kg"
            regret = f", regret {spread(one, 'regret_percent', ',.1f', '%')}" if name != "optimum" else ""
            lines.append(line + regret)
        found.append(Tile("CO2 in closed loop", value, lines))
    rewards = [value for value in run.values("reward") if not math.isnan(value)]
    if len(rewards) >= 2 * MEAN_OF:
        value = ARROW.join(f"{statistics.fmean(part):.3f}" for part in (rewards[:MEAN_OF], rewards[-MEAN_OF:]))
        found.append(
            Tile("Reward while training", value, [f"mean of the first {MEAN_OF} and of the last {MEAN_OF} steps"])
        )
    return found


def short(text: str) -> str:
    """A setting's value without the folders of absolute paths: a report may be shown to others."""
    parts = [part.strip() for part in text.split(",")]
    return ", ".join(Path(part).name if part.startswith("/") else part for part in parts)


def duration(seconds: float) -> str:
    """`1:02:03 h`, `4:05 min` or `6.7 s`; `-` where it is not known."""
    if math.isnan(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h" if minutes >= 60 else f"{minutes}:{rest:02} min"


def facts(run: Run) -> list[tuple[str, str]]:
    """What was run, in words."""
    s, machine, choices = run.settings, part(run.record, "machine"), part(run.record, "choices")
    found = [("Run", run.folder.resolve().name)]
    for label, name in (("Model", "MODEL_ID"), ("Training data", "DATA"), ("Held-out data", "EVAL_DATA"), ("Rewards", "REWARDS")):  # fmt: skip
        if name in s:
            found.append((label, short(str(s[name]))))
    if "PROMPTS_PER_STEP" in s and "NUM_GENERATIONS" in s:
        found.append(("A step", f"{s['PROMPTS_PER_STEP']} prompts x {s['NUM_GENERATIONS']} completions of at most {s.get('MAX_COMPLETION_LEN', '?')} tokens"))  # fmt: skip
    if "LORA_R" in s:
        found.append(("Adapter", f"LoRA, rank {s['LORA_R']}, on {s.get('LORA_TARGETS', '?')}; learning rate {s.get('LEARNING_RATE', '?')}"))  # fmt: skip
    for label, name in (
        ("Rollouts", "rollouts"),
        ("Attention", "attention"),
        ("Packing", "packing"),
        ("Experts", "experts"),
    ):
        if isinstance(chosen := choices.get(name), list) and len(chosen) == 2:
            word = {True: "vLLM", False: "transformers"}.get(chosen[0], chosen[0])
            found.append((label, f"{word} ({chosen[1]})"))
    if machine:
        found.append(("Machine", machine.get("gpu") or f"no GPU, {machine.get('cores', '?')} cores"))
    seconds = [value for value in run.values("step_s") if not math.isnan(value)]
    if seconds:
        found.append(("Time", f"{duration(math.fsum(seconds))} for {len(seconds)} steps, median {duration(statistics.median(seconds))} a step"))  # fmt: skip
        found.append(("Last step ended", run.metrics[-1]["time"]))
    return found


# ---- The page --------------------------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ name }}: training report</title>
<style>
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1000px; background: #fff; color: #222;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid #ddd; }
h3 { font-size: 1rem; margin: 1.25rem 0 .5rem; }
.verdict { background: #f2f6fa; border-left: 4px solid #0072B2; padding: .75rem 1rem; margin: 1rem 0; }
.verdict p { margin: .25rem 0; }
.tiles { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 210px), 1fr)); }
.tile { border: 1px solid #ddd; border-radius: 8px; padding: .75rem 1rem; }
.tile b { display: block; font-size: 1.4rem; line-height: 1.3; font-weight: 600; }
.tile span { display: block; line-height: 1.4; margin-top: .25rem; }
.small, .tile span, figcaption, .missing, caption { color: #555; font-size: .875rem; }
dl { display: grid; grid-template-columns: minmax(6.5rem, auto) 1fr; gap: .2rem .9rem; margin: 1rem 0; font-size: .9375rem; }
dt { color: #555; } dd { margin: 0; }
.figures { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); }
figure { margin: 0; } figure img { display: block; width: 100%; height: auto; }
figcaption b { color: #222; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; caption-side: bottom; padding-top: .4rem; }
.scroll + .small { margin-top: -.5rem; }
th, td { padding: .35rem .4rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e5e5e5; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
.glossary td { white-space: normal; text-align: left; vertical-align: top; }
.glossary th { text-align: left; }
article { border: 1px solid #ddd; border-radius: 8px; padding: .6rem .9rem; margin: .6rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; background: #f7f7f7; padding: .6rem; margin: .5rem 0 0;
  font: .8125rem/1.45 ui-monospace, Menlo, Consolas, monospace; max-height: 32rem; overflow-y: auto; }
summary { cursor: pointer; font-size: .9375rem; }
</style>
</head>
<body>
<h1>{{ name }}: training report</h1>
<div class="verdict">{% for sentence in verdicts %}<p>{{ sentence }}</p>{% endfor %}</div>
<div class="tiles">
{%- for tile in tiles %}
<div class="tile">{{ tile.label }}<b>{{ tile.value }}</b>{% for line in tile.lines %}<span>{{ line }}</span>{% endfor %}</div>
{%- endfor %}
</div>
<dl>{% for label, text in facts %}<dt>{{ label }}</dt><dd>{{ text }}</dd>{% endfor %}</dl>
{%- for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{%- for note in section.notes %}
<p>{{ note }}</p>
{%- endfor %}
{%- if section.pictures %}
<div class="figures">
{%- for picture in section.pictures %}
<figure id="{{ picture.file }}"><img alt="{{ picture.title }}: {{ picture.line }}" src="data:image/png;base64,{{ picture.data }}">
<figcaption><b>{{ picture.title }}</b>{% if picture.detail %} ({{ picture.detail }}){% endif %}. {{ picture.line }}</figcaption></figure>
{%- endfor %}
</div>
{%- endif %}
{%- for table in section.tables %}
<div class="scroll"><table>
<tr>{% for cell in table.header %}<th>{{ cell }}</th>{% endfor %}</tr>
{%- for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</table></div>
<p class="small">{{ table.text }}</p>
{%- endfor %}
{%- for kind, examples in section.examples.items() %}
<h3>{{ kind }}</h3>
{%- for example in examples %}
<article><div class="small">{{ example.facts }}</div>
{%- if example.folded %}
<details><summary>{{ example.text[:120] }} ...</summary>
<pre>
{{ example.text }}</pre></details>
{%- else %}
<pre>
{{ example.text }}</pre>
{%- endif %}
</article>
{%- endfor %}
{%- endfor %}
{%- for sentence in section.missing %}
<p class="missing">{{ sentence }}</p>
{%- endfor %}
</section>
{%- endfor %}
<section>
<h2>Glossary</h2>
<details><summary>The columns of metrics.csv</summary>
<table class="glossary"><tr><th>Column</th><th>Unit</th><th>Meaning</th></tr>
{%- for column, unit, text in glossary %}
<tr><td>{{ column }}</td><td>{{ unit }}</td><td>{{ text }}</td></tr>
{%- endfor %}
</table></details>
</section>
</body>
</html>
"""


@functools.cache
def page_template() -> Any:
    """The compiled page. It escapes every value by itself; nothing is marked as safe."""
    import jinja2

    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)


def render(run: Run, sections: Sequence[Section]) -> str:
    """The page of a run, whose sections were made before."""
    return page_template().render(
        name=run.folder.resolve().name,
        verdicts=[sentence for sentence in (reward_verdict(run), plant_verdict(run)) if sentence],
        tiles=tiles(run),
        facts=facts(run),
        sections=sections,
        glossary=[(name, unit, text) for name, (unit, text) in train_grpo.METRICS.items()],
    )


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html and `folder`/report/*.png from what the run has written so far; returns the page.

    Imports matplotlib and jinja2, but neither torch nor pyplot, and changes no setting of them. Raises ReportError
    where there is no run in the folder, where it cannot be written to, or where one of the two is not installed.
    """
    run = read_run(Path(folder))
    try:
        import jinja2  # noqa: F401
        import matplotlib.style
    except ImportError as error:
        raise ReportError(f"{error.name} is missing: the report needs what requirements.txt lists") from error
    with matplotlib.style.context(["default", STYLE]):  # whatever style the caller or the user has set
        sections = [guarded(make, run) for make in SECTIONS]
    page, images = run.folder / "report.html", run.folder / "report"
    try:
        images.mkdir(exist_ok=True)
        pictures = {picture.file: picture.png for section in sections for picture in section.pictures}
        for old in images.glob("*.png"):
            if old.name not in pictures and re.sub(r"_\d+$", "", old.stem) in FIGURES:  # of an earlier report
                old.unlink()
        for name, png in pictures.items():
            (images / name).write_bytes(png)
        # A lone surrogate in a JSON file cannot be written as UTF-8.
        train_grpo.write_text(page, render(run, sections).encode("utf-8", "replace").decode("utf-8"))
    except OSError as error:
        raise ReportError(f"the report cannot be written to {run.folder}: {error.strerror or error}") from error
    return page


def figures_md() -> str:
    """The glossary of figures as a Markdown table, for docs/report.md."""
    rows = [["Figure", "File", "Meaning"], ["---"] * 3]
    rows += [[title, f"`{name}{'_N' if name == 'plant' else ''}.png`", line] for name, (title, line) in FIGURES.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="OUTPUT_DIR of a run")
    try:
        page = write_report(parser.parse_args(arguments).run_dir)
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
