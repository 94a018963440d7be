# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of a run's report, without pyplot, so that the caller's matplotlib state does not change."""

import base64
import io
from collections.abc import Mapping
from typing import Any

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo.evaluate.run_files import FUNCTION, Run
from grpo.figures.text import finite_number
from grpo.output.logs import EPISODE_METRICS, EVALUATED, METRICS
from grpo.settings.table import TASK_FIGURES

MEAN_STEPS = 10  # steps in a moving mean
DPI = 160
MEASURED = ["heldout_reward"]
CURVES = {  # title: columns of metrics.csv with a common unit; their meanings become the caption
    "Held-out reward": MEASURED,
    **{figure["title"]: [name] for name, figure in TASK_FIGURES.items()},
    "Reward": ["reward"],
    "Parse rate": ["parse_rate"],
    "Best action": ["best_action_rate"],
    "Completion length": ["tokens_mean", "tokens_max"],
    "Clipped ratio": ["clipped_ratio"],
    "Groups without a signal": ["zero_std_fraction"],
    "Entropy": ["entropy"],
    "Train/inference mismatch": ["logp_diff_mean"],
    "GPU memory": ["gpu_peak_gib"],
}
EPISODE_CURVES = {
    "Turns and calls": ["turns_mean", "calls_mean"],
    "Calls answered with an error": ["call_errors"],
    "Time of environments": ["tool_s_mean"],
}
PHASES = ("wake_s", "handover_s", "generation_s", "sleep_s", "reward_s", "learn_s")
REFERENCES = {"random": ":", "constant": "-.", "oracle": "--"}  # line styles by key of evaluation.json
STYLE: dict[str, Any] = {"font.size": 9.5, "legend.fontsize": 8.5, "legend.frameon": False, "axes.axisbelow": True}
STYLE |= {"axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#E6E6E6"}


def panel(unit: str) -> Axes:
    """New axes over steps, 4.8 inches wide: text stays readable on a phone, and other screens fit two columns."""
    axes = Figure(figsize=(4.8, 2.7), dpi=DPI, layout="constrained").subplots()
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    return axes


def picture(axes: Axes, title: str, caption: str) -> tuple[str, str, str]:
    """(title, caption, PNG in base64); the legend is above the axes, where it covers nothing."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, columnspacing=1.2)
    buffer, figure = io.BytesIO(), axes.get_figure(root=True)
    assert figure is not None, "panel() makes axes in a figure"
    figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    return title, caption, base64.b64encode(buffer.getvalue()).decode("ascii")


def draw_curve(axes: Axes, values: pandas.DataFrame, references: Mapping[str, float]) -> None:
    """Draw the columns over the index, the steps: training figures as dots with a line for their moving mean, evaluated
    ones as joined dots. `references` are other policies' values, drawn as horizontal lines."""
    # Joined dots of training figures look like a barcode if the longest completion jumps between two lengths.
    for index, column in enumerate(values):
        points, colour = values[column].dropna(), f"C{index}"
        label = column.removeprefix(FUNCTION) if values.shape[1] > 1 else None
        if column in EVALUATED:
            axes.plot(points, "o-", color=colour, markersize=5, label=label)
        else:
            axes.plot(points, ".", color=colour, alpha=0.45, markersize=4, markeredgewidth=0)
            axes.plot(points.rolling(MEAN_STEPS, min_periods=1).mean(), color=colour, label=label)
    for name, value in references.items():
        axes.axhline(value, color="#666666", linestyle=REFERENCES[name], label=f"{name} {value:.2f}")


def draw_phases(axes: Axes, metrics: pandas.DataFrame) -> None:
    """Draw the seconds of each step as stacked areas by phase; generation is the remainder of the rollout."""
    spent = metrics.reindex(columns=list(PHASES)).fillna(0.0)
    generation = metrics["rollout_s"] - spent[["wake_s", "handover_s", "sleep_s"]].sum(axis=1)
    spent = spent.assign(generation_s=generation.clip(lower=0.0).fillna(0.0))
    spent = spent.loc[:, spent.any()]
    labels = [phase.removesuffix("_s").replace("handover", "weight sync") for phase in spent]
    axes.stackplot(metrics["step"], spent.to_numpy().T, labels=labels, step="mid")


def pictures(run: Run) -> list[tuple[str, str, str]]:
    """(title, caption, PNG in base64) of each picture for which the run has values in at least two steps."""
    values = run.metrics.set_index("step").drop(columns=list(EVALUATED))
    drawn, values = [], values.join(run.evaluated_steps(), how="outer")
    known = {name: finite_number(run.evaluation.get(name)) for name in REFERENCES}
    references = {name: value for name, value in known.items() if value == value}
    functions = [name for name in values if name.startswith(FUNCTION)]
    meanings = METRICS | EPISODE_METRICS | dict.fromkeys(functions, ("reward", "Mean before its weight."))
    several = {"Reward functions": functions} if len(functions) > 1 else {}
    for title, columns in (CURVES | EPISODE_CURVES | several).items():
        if values[columns].notna().sum().max() > 1:
            axes = panel(meanings[columns[0]][0])
            draw_curve(axes, values[columns], references if columns == MEASURED else {})
            drawn.append(picture(axes, title, " ".join(dict.fromkeys(meanings[column][1] for column in columns))))
    if len(run.metrics) > 1 and run.metrics["learn_s"].any():
        draw_phases(axes := panel("s per step"), run.metrics)
        drawn.append(picture(axes, "Time per phase", "Seconds of a step, stacked; evaluations are not counted."))
    return drawn
