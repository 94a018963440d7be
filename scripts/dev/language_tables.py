# SPDX-License-Identifier: Apache-2.0
"""The tables that docs/ shows of what `scripts/dev/language.py collect` has recorded."""

import functools
import itertools
import re
import statistics
from collections.abc import Mapping

from grpo.common import ROOT
from grpo.figures.text import markdown_table
from scripts.dev.record import Json, read_lines, recorded_values

RESULTS = ROOT / "docs/results/language-h200.json"
DAYS = "language-days-h200.json"
TASKS = {"stories": "word problems", "tickets": "tickets", "sentences": "sentences"}
POINT = "3e-4, rank 16, 16 prompts x 8"
# File of results -> name of a run -> what differs from `POINT`, in the order of its table.
SWEEPS = {
    RESULTS.name: {
        "default": "5e-5, rank 4: the defaults until November 2026",
        "rate-1e-4": "rate 1e-4",
        "grpo": POINT,
        "rate-1e-3": "rate 1e-3",
        "rank-4": "rank 4",
        "rank-64": "rank 64",
        "group-4": "32 prompts x 4",
        "rollout-4": "`STEPS_PER_GENERATION=4`",
    },
    "language-sweep-h200.json": {
        "grpo": POINT,
        "rank-1": "rank 1, alpha 2",
        "alpha-16": "alpha 16, as the rank",
        "alpha-64": "alpha 64, four times the rank",
        "group-16": "8 prompts x 16",
        "experts": "adapter on experts as well",
        "beta-0.02": "`BETA=0.02`",
        "loss-cispo": "`LOSS_TYPE=cispo`",
        "loss-grpo": "`LOSS_TYPE=grpo`",
        "loss-dr_grpo": "`LOSS_TYPE=dr_grpo`",
    },
    "language-steps-h200.json": {
        "rate1e-5": "rate 1e-5",
        "rate1e-4-steps120": "rate 1e-4, 120 steps",
        "steps120": "120 steps",
        "dapo": "`LOSS_TYPE=dapo`",
    },
}
SHOWN = 3  # completions of each task's first and last step in the docs
LONGEST_TEXT = 150  # characters of a completion in the docs
# A reason and an answer, each in its channel.
TURN = re.compile(
    r"<\|channel\|>analysis<\|message\|>(.*)<\|end\|><\|start\|>assistant<\|channel\|>final<\|message\|>(.*)"
)
table = functools.partial(markdown_table, longest_cell=2000)  # More than any cell has: nothing is cut.


def completions() -> list[Json]:
    return read_lines(RESULTS.with_suffix(".jsonl"))


def seeds(values: Mapping[str, float], task: str, run: str) -> list[int]:
    """The seeds for which a task has this run."""
    names = (name.split(".") for name in values if name.endswith(f".{run}.gain"))
    return sorted(int(seed) for of, seed, *_ in names if of == task)


def with_ends(values: Mapping[str, float], name: str) -> str:
    """A difference and its interval: `+0.51 (0.45 to 0.57)`."""
    return f"{values[name]:+.2f} ({values[name + '_low']:.2f} to {values[name + '_high']:.2f})"


def gains_table() -> str:
    """The held-out reward of each task and seed before GRPO, after it, and after SFT."""
    values, rows = recorded_values(RESULTS.name), []
    for task, words in TASKS.items():
        for seed in seeds(values, task, "grpo"):
            name = f"{task}.{seed}"
            ends = (values[f"{name}.start"], values[f"{name}.grpo"], values[f"{name}.grpo.greedy"])
            gain, over = with_ends(values, f"{name}.grpo.gain"), with_ends(values, f"{name}.sft_over_grpo")
            rows.append([f"{words}, {seed}", *(f"{value:.2f}" for value in ends), gain, over])
    header = ["task, seed", "before", "after GRPO", "greedy", "gain of GRPO (95%)", "SFT over GRPO (95%)"]
    return table(header, rows)


def days_table() -> str:
    """The held-out reward of days before and after GRPO, and that of the best rule."""
    values, rows = recorded_values(DAYS), []
    for seed in seeds(values, "days", "grpo"):
        name = f"days.{seed}"
        ends = (values[f"{name}.{of}"] for of in ("start", "grpo", "grpo.greedy", "rule"))
        rows.append([str(seed), *(f"{value:.2f}" for value in ends), with_ends(values, f"{name}.grpo_over_rule")])
    return table(["seed", "before", "after GRPO", "greedy", "best rule", "GRPO over the rule (95%)"], rows)


def sweep_table(results: str) -> str:
    """The gains of the runs of one task, one change at a time, and their time beside other runs."""
    values, rows = recorded_values(results), []
    for run, words in SWEEPS[results].items():
        names = [f"stories.{seed}.{run}" for seed in seeds(values, "stories", run)]
        gains = [values[f"{name}.gain"] for name in names]
        minutes = statistics.mean(values[f"{name}.learning_s"] for name in names) / 60
        mean = statistics.mean(gains)
        shown = ", ".join(f"{gain:.2f}" for gain in gains)
        rows.append([words, shown, f"{mean:.2f}", f"{minutes:.1f}", f"{mean / minutes:.2f}"])
    return table(["", "gain, by seed", "mean", "minutes", "gain a minute"], rows)


def completions_table() -> str:
    """Completions of the first and of the last step, as they came; `=>` stands between reason and answer."""
    rows = []
    groups = itertools.groupby(completions(), key=lambda row: (row["task"], row["when"]))
    for row in itertools.chain.from_iterable(itertools.islice(group, SHOWN) for _, group in groups):
        turn = TURN.fullmatch(row["completion"].removesuffix("<|return|>"))
        text = f"{turn[1]} => {turn[2]}" if turn else row["completion"]
        text = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."
        prompt = row["prompt"].partition(" Which desk")[0]
        rows.append([row["when"], f"{row['reward']:.2f}", prompt, f"`{text}`"])
    return table(["", "reward", "prompt", "completion"], rows)
