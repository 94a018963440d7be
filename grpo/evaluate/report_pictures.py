# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of a run's report, without pyplot, so that the caller's matplotlib state does not change."""

import base64
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo.evaluate.run_files import FUNCTION, Run
from grpo.figures.text import finite_number, with_interval
from grpo.output.logs import EPISODE_METRICS, EVALUATED, METRICS
from grpo.settings.table import TASK_FIGURES

MEAN_STEPS = 10  # steps in a moving mean
DPI = 160
MEASURED = ["heldout_reward"]


class Curve(NamedTuple):
    """Columns of metrics.csv with a common unit, their caption, and a sentence for where all of them are always 0."""

    columns: list[str]
    caption: str
    if_zero: str = ""


CURVES = {
    "Held-out reward": Curve(MEASURED, "What the answers to held-out prompts are worth; step 0 is before training."),
    **{figure["title"]: Curve([name], figure["meaning"]) for name, figure in TASK_FIGURES.items()},
    "Reward": Curve(["reward"], "What the answers of a step are worth, by your reward functions."),
    "Parse rate": Curve(["parse_rate"], "Share of answers that can be read: that name one action, or hold any text."),
    "Best action": Curve(["best_action_rate"], "Share of answers that name an action with their row's highest reward."),
    "Length of answers": Curve(["tokens_mean", "tokens_max"], "Tokens of a step's answers: the mean and the longest."),
    "Cut-off answers": Curve(
        ["clipped_ratio"], "Share of answers that met MAX_COMPLETION_LEN before their end.", "No answer was cut off."
    ),
    "Prompts that taught nothing": Curve(
        ["zero_std_fraction"], "Share of prompts whose answers all earned the same.", "Every prompt taught something."
    ),
    "Entropy": Curve(["entropy"], "How undecided the model is at each token: near 0 it always writes the same."),
    "vLLM against trainer": Curve(["logp_diff_mean"], "How far their log-probs of the same tokens lie apart."),
    "GPU memory": Curve(["gpu_peak_gib"], "Most memory in use on the GPU, by other programs too."),
}
# Of columns that share a picture.
LABELS = {"tokens_mean": "mean", "tokens_max": "longest", "turns_mean": "turns", "calls_mean": "calls"}
LABEL_WIDTH = 40  # Characters of labels that fit beside each other in a legend.
EPISODE_CURVES = {
    "Turns and calls": Curve(["turns_mean", "calls_mean"], "Turns and calls of an episode, their means."),
    "Calls answered with an error": Curve(["call_errors"], EPISODE_METRICS["call_errors"][1], "No call was an error."),
    "Time of environments": Curve(["tool_s_mean"], EPISODE_METRICS["tool_s_mean"][1]),
}
PHASES = ("wake_s", "handover_s", "generation_s", "sleep_s", "reward_s", "learn_s")
REFERENCES = {"random": ":", "constant": "-.", "oracle": "--"}  # line styles by key of evaluation.json
# Inches and points. A phone shows a picture 358 pixels wide: its smallest text is then 10 pixels high.
WIDTH, HEIGHT, FONT_SIZE, LEGEND_SIZE = 4.3, 2.6, 10.5, 9.2
STYLE: dict[str, Any] = {"font.size": FONT_SIZE, "axes.axisbelow": True, "lines.markersize": 5}
STYLE |= {"legend.fontsize": LEGEND_SIZE, "legend.frameon": False}
STYLE |= {name: FONT_SIZE for name in ("xtick.labelsize", "ytick.labelsize", "axes.labelsize")}
# `1e6` above the axis is below the legend, and an offset is read over.
STYLE |= {"axes.formatter.limits": (-7, 12), "axes.formatter.useoffset": False}
STYLE |= {"axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#E6E6E6"}


def panel(unit: str) -> Axes:
    """New axes over steps: text stays readable on a phone, and other screens fit two columns."""
    axes = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained").subplots()
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    return axes


def picture(axes: Axes, title: str, caption: str) -> tuple[str, str, str]:
    """(title, caption, PNG in base64); the legend is above the axes, where it covers nothing."""
    if labels := axes.get_legend_handles_labels()[1]:
        columns = max(1, min(3, LABEL_WIDTH // max(map(len, labels))))
        style = {"borderaxespad": 0.2, "columnspacing": 0.8, "handlelength": 1.3, "handletextpad": 0.5}
        axes.legend(loc="lower left", bbox_to_anchor=(-0.05, 1), ncols=columns, **style)
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
        # The space is for functions such as `_score`: a legend leaves out what begins with an underscore.
        label = LABELS.get(column, f" {column.removeprefix(FUNCTION)}") if values.shape[1] > 1 else None
        if column in EVALUATED:
            axes.plot(points, "o-", color=colour, label=label)
        else:
            axes.plot(points, ".", color=colour, alpha=0.45, markeredgewidth=0)
            axes.plot(points.rolling(MEAN_STEPS, min_periods=1).mean(), color=colour, label=label)
    for name, value in references.items():
        label = f"{name} {with_interval(references, name, '.2f')}"
        axes.axhline(value, color="#666666", linestyle=REFERENCES[name], label=label)


def draw_phases(axes: Axes, metrics: pandas.DataFrame) -> None:
    """Draw the seconds of each step as stacked areas by phase; generation is the remainder of the rollout."""
    spent = metrics.reindex(columns=list(PHASES)).fillna(0.0)
    generation = metrics["rollout_s"] - spent[["wake_s", "handover_s", "sleep_s"]].sum(axis=1)
    spent = spent.assign(generation_s=generation.clip(lower=0.0).fillna(0.0))
    spent = spent.loc[:, spent.any()]
    labels = [phase.removesuffix("_s").replace("handover", "weight sync") for phase in spent]
    axes.stackplot(metrics["step"], spent.to_numpy().T, labels=labels, step="mid")


def pictures(run: Run) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(title, caption, PNG in base64) of each picture for which the run has values in at least two steps, and a
    sentence for each whose values are all 0."""
    values = run.metrics.set_index("step").drop(columns=list(EVALUATED))
    drawn, values = [], values.join(run.evaluated_steps(), how="outer")
    sentences = []
    known = {name: finite_number(run.evaluation.get(name)) for name in REFERENCES}
    references = {name: value for name, value in known.items() if value == value}
    functions = [name for name in values if name.startswith(FUNCTION)]
    several = {"Reward functions": Curve(functions, "What each function gives, before its weight.")}
    for title, (columns, caption, if_zero) in (
        CURVES | EPISODE_CURVES | (several if len(functions) > 1 else {})
    ).items():
        if values[columns].notna().sum().max() < 2:
            continue
        others = references if columns == MEASURED else {}
        if not others and not values[columns].fillna(0.0).to_numpy().any():
            sentences.append(if_zero or f"{title}: 0 in every step.")
            continue
        axes = panel((METRICS | EPISODE_METRICS).get(columns[0], ("reward",))[0])
        draw_curve(axes, values[columns], others)
        drawn.append(picture(axes, title, caption))
    if len(run.metrics) > 1 and run.metrics["learn_s"].any():
        draw_phases(axes := panel("s per step"), run.metrics)
        drawn.append(picture(axes, "Time per phase", "Seconds of a step, stacked, without evaluations."))
    return drawn, sentences
