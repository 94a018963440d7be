# SPDX-License-Identifier: Apache-2.0
"""The figures of a run's report."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any

from grpo.evaluate.run_data import Completions, Run, number
from grpo.run.logs import METRICS

MEAN_OF = 10  # steps in a moving mean

MOVING = f"Dots: steps; line: mean of the last {MEAN_OF}."


def meaning(*columns: str) -> str:
    """What metrics.csv's columns mean, as the run documents them."""
    return " ".join(METRICS[name][1] for name in columns)


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


UNITS = {column: unit for column, (unit, _) in METRICS.items()}


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
