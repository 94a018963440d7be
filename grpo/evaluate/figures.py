# SPDX-License-Identifier: Apache-2.0
"""The figures of a run's report, drawn without pyplot so that nothing of a caller's matplotlib is changed."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.ticker import MaxNLocator

from grpo.evaluate.run_data import PHASES, interval, number, part, phase_seconds
from grpo.run.logs import METRICS

MEAN_OF = 10  # steps in a moving mean
DPI = 200  # 960 pixels wide: sharp on a phone, too
MOST_BARS = 40  # in a figure; more steps than that share bars
MOST_ACTIONS = 7  # drawn one by one; the rest share a colour
# Learning curves by their name: title and columns of metrics.csv.
CURVES = {
    "reward": ("Reward", ["reward"]),
    "parse_rate": ("Parse rate", ["parse_rate"]),
    "best_action_rate": ("Best action", ["best_action_rate"]),
    "length": ("Completion length", ["tokens_mean", "tokens_max"]),
    "clipped_ratio": ("Clipped ratio", ["clipped_ratio"]),
    "zero_std": ("Groups without a signal", ["zero_std_fraction"]),
    "entropy": ("Entropy", ["entropy"]),
    "mismatch": ("Train/inference mismatch", ["logp_diff_mean", "logp_diff_max"]),
    "gpu_memory": ("GPU memory", ["gpu_peak_gib"]),
    "gpu_utilization": ("GPU utilization", ["gpu_utilization"]),
}
# Colours: Okabe and Ito, distinguishable when colour-blind. A policy looks the same everywhere: name, colour, line.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
POLICIES = {
    "base": ("base model", "#D55E00", "-"),
    "trained": ("trained", "#0072B2", "-"),
    "optimum": ("optimum", "#009E73", "--"),
}
# What other policies earn on the held-out prompts, keys of evaluation.json: colour and line.
REFERENCES = {"random": ("#999999", ":"), "constant": ("#333333", "-."), "oracle": ("#009E73", "--")}
EVALUATIONS = {  # columns of evaluated steps: axis, digits, key of a policy's totals
    "heldout_reward": ("held-out reward", ".2f", ""),
    "plant_regret": ("plant regret, %", ",.1f", "regret_percent"),
    "plant_unserved_kwh": ("unserved, kWh", ",.1f", "unserved_kwh"),
}
UNSERVED_KWH = 0.05  # less is a rounding error
UNSERVED = {"facecolor": "#CC79A7", "edgecolor": "black", "hatch": "////", "linewidth": 0.4}
MARK = {"color": "#CC79A7", "markeredgecolor": "black", "markeredgewidth": 0.7, "markersize": 4.5}
PHASE_LABELS = {"handover": "weight sync"}  # else as in metrics.csv
STYLE = {"font.size": 9.5, "legend.fontsize": 8.5, "legend.frameon": False, "axes.axisbelow": True, "axes.grid": True}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.formatter.useoffset": False}
STYLE |= {"grid.color": "#E6E6E6"}


def policy(name: str) -> tuple[str, str, str]:
    """Label, colour and line style of a policy."""
    return POLICIES.get(name, (re.sub(r"^always_(\d+)$", r"always [\1]", name).replace("_", " "), "#777777", ":"))


@dataclass
class Picture:
    """A figure of the page: `name` is its id there, `line` the sentence below it."""

    name: str
    title: str
    line: str
    png: bytes

    @property
    def data(self) -> str:
        return base64.b64encode(self.png).decode("ascii")


def canvas(height: float = 2.9, heights: Sequence[float] = (1.0,)) -> list[Axes]:
    """Panels above each other in one column of 4.8 inches: text stays readable on a phone, two columns fit elsewhere."""
    figure = Figure(figsize=(4.8, height), dpi=DPI, layout="constrained")
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": list(heights)})
    return [row[0] for row in grid]


def legend(axes: Axes, columns: int = 3) -> None:
    """Above `axes`, where it covers nothing; none without labels."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.98), ncols=columns, borderaxespad=0.2, columnspacing=1.2, handlelength=1.6)  # fmt: skip


def references(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Label, reward and look of the policies in REFERENCES that evaluation.json has."""
    for key, (colour, style) in REFERENCES.items():
        if not math.isnan(value := number(evaluation.get(key))):
            label = f"always [{evaluation.get('constant_action')}]" if key == "constant" else key
            yield label, value, {"color": colour, "linestyle": style, "linewidth": 1.4}


def picture(axes: Axes, name: str, title: str, line: str, columns: int = 3) -> Picture:
    """The finished figure, with the legend of `axes`."""
    legend(axes, columns)
    buffer = io.BytesIO()
    axes.figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    return Picture(name, title, line, buffer.getvalue())


def step_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.set_xlabel("step")


def curve(metrics: pandas.DataFrame, name: str, evaluation: Mapping[str, Any]) -> Picture:
    """A learning curve: a dot a step, and a line through their moving mean. `evaluation`: whose references it gets, or
    empty."""
    title, columns = CURVES[name]
    line = " ".join(METRICS[column][1] for column in columns)
    if evaluation:
        line += " Lines across: what other policies earn on the held-out prompts."
    axes, values = canvas()[0], metrics.set_index("step")[columns]
    # Steps joined by lines would be a barcode where the longest completion jumps between two lengths.
    for column, colour in zip(columns, PALETTE, strict=False):
        label = column if len(columns) > 1 else None
        axes.plot(values[column], ".", color=colour, alpha=0.45, markersize=4, markeredgewidth=0)
        axes.plot(values[column].rolling(MEAN_OF, min_periods=1).mean(), color=colour, label=label)
    for label, value, look in references(evaluation):
        axes.axhline(value, label=f"{label} {value:.2f}", **look)
    unit = METRICS[columns[0]][0]
    if name == "mismatch" and values.min(axis=None) > 0:
        axes.set_yscale("log")
    if unit in ("share", "tokens", "GiB", "percent"):  # from 0, and as much above it as is needed
        top = max(0.1, 1.08 * values.max(axis=None))
        axes.set_ylim(-0.03 * top, top)
    axes.set_ylabel(unit)
    step_axis(axes)
    return picture(axes, name, title, line, 3 if evaluation else 2)


def evaluations_figure(
    found: pandas.DataFrame, evaluation: Mapping[str, Any], rule: tuple[str, Mapping[str, Any]], best: Mapping[str, Any]
) -> Picture:
    """What the evaluated steps came to, a panel for each column of `found` that has values.

    found: `Run.evaluated()`; rule: name and totals of the best rule at the plant; best: best.json; both may be empty.
    """
    shown, kept = found.dropna(axis=1, how="all"), best.get("step")
    panels = canvas(1.0 + 1.6 * shown.shape[1], [1.0] * shown.shape[1])
    base, trained, star = policy("base")[1], policy("trained")[1], {"color": "#E69F00", "markeredgecolor": "black"}
    for axes, column in zip(panels, shown, strict=True):
        (text, digits, total), values = EVALUATIONS[column], shown[column].dropna()
        axes.plot(values, "o-", color=trained, markersize=4)
        if values.index[0] == 0:
            axes.axhline(values[0], color=base, linestyle=(0, (6, 3)), linewidth=1.2)
            axes.plot(0, values[0], "s", color=base, markersize=6, label=f"base {values[0]:{digits}}")
        if not math.isnan(value := number(rule[1].get(total))):
            axes.axhline(value, color="#333333", linestyle=":", label=f"{policy(rule[0])[0]} {value:{digits}}")
        if kept and kept in values.index:  # step 0 is the base model's here, in best.json INIT_ADAPTER's
            axes.axvline(kept, color="#999999", linewidth=1)
            axes.plot(kept, values[kept], "*", markersize=12, label=f"kept {values[kept]:{digits}}", **star)
        for label, value, look in references(evaluation) if column == "heldout_reward" else ():
            axes.axhline(value, label=f"{label} {value:.2f}", **look)
        if column == "plant_regret" and 0 < 10 * values.min() < values.max():
            axes.set_yscale("log")
        axes.set_ylabel(text)
        legend(axes)
    step_axis(panels[-1])
    plant = ", regret and unserved load of the closed loop" if shown.shape[1] > 1 else ""
    line = f"Held-out reward{plant} at every evaluated step; step 0 is the base model."
    if rule[0] and shown.shape[1] > 1:
        line += f" Dotted: {policy(rule[0])[0]}, the rule with the lowest regret."
    if kept:
        line += f" Star: step {kept}, whose adapter is kept in best/ (chosen by {str(best.get('figure', '?')).replace('_', ' ')})."
    return picture(panels[0], "evaluations", "Evaluation while it trained", line)


def stacked(layers: pandas.DataFrame, colours: Sequence[str], label: str) -> Axes:
    """Bars over steps (the index of `layers`), one layer a column; as many steps share a bar as MOST_BARS asks for."""
    bar = np.arange(len(layers)) // math.ceil(len(layers) / MOST_BARS)
    steps, heights = layers.index.to_series().groupby(bar), layers.groupby(bar).mean()
    left, width = steps.min() - 0.5, steps.max() - steps.min() + 1
    axes, bottom = canvas(3.1)[0], 0.0 * left
    for (name, height), colour in zip(heights.items(), colours, strict=True):
        hatch = "////" if colour == "#DDDDDD" else ""
        axes.bar(left, height, width * (0.92 if len(left) < 25 else 1.0), bottom=bottom, align="edge", color=colour, label=name, hatch=hatch, edgecolor="white", linewidth=0.3)  # fmt: skip
        bottom += height
    axes.grid(False, axis="x")
    axes.margins(x=0.01)
    axes.set_ylabel(label)
    step_axis(axes)
    return axes


def phases_figure(metrics: pandas.DataFrame) -> Picture:
    spent = phase_seconds(metrics).set_index(metrics["step"])
    spent = spent.loc[:, spent.any()]
    axes = stacked(spent.rename(columns=PHASE_LABELS), [PALETTE[PHASES.index(name)] for name in spent], "s per step")
    return picture(axes, "phases", "Time per phase", "Seconds of a step by phase, stacked; several steps share a bar in a long run.")  # fmt: skip


def actions_figure(counts: pandas.DataFrame) -> Picture:
    """`counts`: completions by step (rows) and by the action that they name (columns, '' for none)."""
    shares = counts.div(counts.sum(axis=1), axis=0)
    named = [action for action in shares.sum().sort_values(ascending=False, kind="stable").index if action]
    shown = sorted(named if len(named) <= MOST_ACTIONS else named[: MOST_ACTIONS - 1], key=lambda a: (len(a), a))
    layers = [shares[action].rename(f"[{action[:6]}]") for action in shown]
    colours = list(PALETTE[: len(shown)])
    if rest := named[len(shown) :]:
        layers, colours = [*layers, shares[rest].sum(axis=1).rename("others")], [*colours, PALETTE[-1]]
    if "" in shares:
        layers, colours = [*layers, shares[""].rename("no action")], [*colours, "#DDDDDD"]
    axes = stacked(pandas.concat(layers, axis=1), colours, "share of completions")
    axes.set_ylim(0, 1)
    line = "Share of the sampled completions that named each action, or none, by step."
    return picture(axes, "actions", "Actions over training", line, 5)


def heldout_figure(evaluation: Mapping[str, Any]) -> Picture:
    axes, labels = canvas(2.0)[0], []
    for label, value, look in references(evaluation):
        axes.axvline(value, label=label, **look)
    for key, who in (("after", "trained"), ("before", "base")):
        value, low, high = interval(part(evaluation, key), "reward")
        if not math.isnan(value):
            label, colour, _ = policy(who)
            error = None if math.isnan(low + high) else [[max(0.0, value - low)], [max(0.0, high - value)]]
            axes.errorbar([value], [len(labels)], xerr=error, fmt="o", color=colour, capsize=5, markersize=7, linewidth=2)  # fmt: skip
            labels.append(label)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.grid(False, axis="y")
    axes.set_xlabel("mean reward")
    line = "Mean reward on held-out prompts; bars are 95% intervals, lines what other policies earn."
    return picture(axes, "heldout", "Held-out reward", line)


def mark_unserved(axes: Axes, unserved_kwh: Sequence[float], load_kw: Sequence[float]) -> None:
    """Hatch the part of each hour's load that nothing served, with a triangle above it, as a small part is hardly seen."""
    hours = np.flatnonzero(np.array(unserved_kwh, float) > UNSERVED_KWH)
    if len(hours):
        top, missing = np.array(load_kw, float)[hours], np.array(unserved_kwh, float)[hours]
        bars = axes.bar(hours, missing, 1.0, bottom=top - missing, align="edge", **UNSERVED)
        (marks,) = axes.plot(hours + 0.5, top + 9, "v", **MARK)
        look = {"handler_map": {tuple: HandlerTuple(ndivide=None, pad=0)}, "handlelength": 2.4, "borderaxespad": 0.2}
        axes.legend([(bars, marks)], ["load unserved"], loc="lower right", bbox_to_anchor=(1.01, 0.95), **look)


def unserved_text(unserved_kwh: Sequence[float]) -> str:
    hours = [value for value in unserved_kwh if value > UNSERVED_KWH]
    return f"{len(hours)} hour{'s' * (len(hours) != 1)}, {math.fsum(hours):,.1f} kWh" if hours else "none"


def plant_figure(window: Mapping[str, Any], start_kwh: float, index: int) -> Picture:
    """One panel for each policy's output, then storage, intensity and emissions over the hours of one window.

    Raises KeyError, TypeError or ValueError where the window is not as scripts/evaluate.py writes it.
    """
    shown = [name for name in POLICIES if name in window["policies"]]
    hours = range(len(window["load_kw"]) + 1)

    def held(values: Sequence[float | None]) -> np.ndarray:  # what holds for an hour is drawn until the next begins
        return np.array([*values, values[-1]], float)

    panels = canvas(4.0 + 0.9 * len(shown), (*[0.9] * len(shown), 1.1, 0.8, 1.1))
    outputs, (storage, carbon, emitted) = panels[:-3], panels[-3:]
    carbon.fill_between(hours, held(window["co2_kg_per_kwh"]), step="post", color="#C9B38C", linewidth=0)
    for axes, name, width in zip(outputs, shown, (2.4, 1.8, 1.3), strict=False):
        one, (label, colour, style) = window["policies"][name], policy(name)
        line = {"color": colour, "linestyle": style, "linewidth": width}
        axes.fill_between(hours, held(window["load_kw"]), step="post", color="#CCCCCC", linewidth=0)
        axes.step(hours, held(one["output_kw"]), where="post", color=colour, linewidth=1.5)
        axes.set_title(label, loc="left", fontsize=9.5, color=colour, pad=3)
        mark_unserved(axes, one["unserved_kwh"], window["load_kw"])
        storage.plot(hours, [start_kwh, *one["storage_kwh"]], label=label, **line)
        emitted.plot(hours, np.cumsum([0.0, *one["co2_kg"]]), **line)
    most = max((axes.get_ylim()[1] for axes in outputs), default=None)
    texts = ["kW"] * len(outputs) + ["storage, kWh", "kg CO2/kWh", "kg CO2 so far"]
    for axes, text in zip(panels, texts, strict=True):
        axes.set_ylabel(text)
        axes.set_ylim(0, most if axes in outputs else None)
    emitted.set_xlim(0, hours[-1])
    days = [datetime.fromisoformat(window["start"]) + timedelta(hours=hour) for hour in hours[::24]]
    emitted.set_xticks(hours[::24], [f"{day:%b %d}" for day in days])
    title = f"Three days at the plant ({str(window.get('name', ''))[:120]})"
    line = "From top to bottom: the output that each policy chose (line) for the cooling load (grey), energy in the storage, CO2 intensity of the electricity, emissions summed up since the start."
    left = [f"{policy(name)[0]} {unserved_text(window['policies'][name]['unserved_kwh'])}" for name in shown]
    line += f" Load left unserved (hatched, below a triangle): {', '.join(left)}."
    return picture(storage, f"plant_{index}", title, line)
