# SPDX-License-Identifier: Apache-2.0
"""evaluation.json as a table: for the terminal, the report and the cards of models."""

from collections.abc import Mapping
from typing import Any

from grpo.figures.text import finite_number, object_at, table_lines, with_interval, wrapped
from grpo.figures.verdict import reward_comparisons, verdict

HEADER = ["", "Reward", "Regret", "Parse rate", "Best action", "Cut off", "Answers by action"]
# Names of the models for readers, by their keys in evaluation.json.
MODEL_NAMES = {
    "before": "base model",
    "start": "start adapter",
    "after": "trained",
    "before_greedy": "base model, greedy",
    "start_greedy": "start adapter, greedy",
    "after_greedy": "trained, greedy",
}


def heldout_rows(evaluation: Mapping[str, Any]) -> list[list[str]]:
    """The rows below HEADER: reference policies (random, best constant action, oracle) around both models."""
    rows = []
    if "oracle" in evaluation:  # the rows have a reward for every action
        rows.append(["random action", with_interval(evaluation, "random")])
        rows.append([f"always [{evaluation.get('constant_action')}]", with_interval(evaluation, "constant")])
    for key, name in MODEL_NAMES.items():
        if figures := object_at(evaluation, key):
            cells = [with_interval(figures, column) for column in ("reward", "regret")]
            rates = ("parse_rate", "best_action_rate", "clipped_ratio")
            shares = [with_interval(figures, column, ".2f") for column in rates]
            rows.append([name, *cells, *shares, answers_by_action(figures)])
    rows += [["oracle", with_interval(evaluation, "oracle")]] if "oracle" in evaluation else []
    return [row + [""] * (len(HEADER) - len(row)) for row in rows]


def heldout_table(evaluation: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows without the columns in which no model has a figure: rows without actions have no regret, and
    exact figures no completions that were cut off."""
    rows = heldout_rows(evaluation)
    kept = [n for n in range(len(HEADER)) if not n or any(row[n] not in ("", "-") for row in rows)]
    return [HEADER[n] for n in kept], [[row[n] for n in kept] for row in rows]


def answers_by_action(figures: Mapping[str, Any]) -> str:
    """How many answers named each action and how many none: `[0] 12, [1] 0, none 3`; expected numbers if exact."""
    counts = figures.get("action_counts")
    if not isinstance(counts, list):
        return ""
    named = {f"[{k}]": count for k, count in enumerate(counts)} | {"none": figures.get("unparsed")}
    return ", ".join(f"{name} {round(finite_number(count), 1) + 0.0:g}" for name, count in named.items())


def evaluation_table(results: Mapping[str, Any]) -> str:
    """evaluation.json as a table for the terminal."""
    samples = "one completion" if results["samples"] == 1 else f"{results['samples']} completions"
    how = "exact" if results["exact"] else f"{samples} a prompt"
    over = "prompts, of a day together" if results["by_day"] else "prompts"
    header, rows = heldout_table(results)
    # Only rewards keep their intervals, because a terminal is narrow.
    rows = [row[:2] + [cell.partition(" (")[0] for cell in row[2:]] for row in rows]
    others = {"difference": "base model", "difference_start": "start adapter"}
    others |= {"difference_constant": f"always [{results.get('constant_action')}]"}
    for key, other in others.items():
        if key in results:
            rows.append([f"trained - {other}", with_interval(results[key], "reward", "+.3f")])
    names = {key: name for key, name in MODEL_NAMES.items() if key in results}
    functions = dict.fromkeys(name for key in names for name in results[key].get("functions", {}))
    for function in functions if len(functions) > 1 or "oracle" in results else ():
        rows.append([f"function {function}:"])
        scores = {name: object_at(results[key], "functions", function) for key, name in names.items()}
        rows += [[f"  {name}", with_interval(figures, "reward")] for name, figures in scores.items()]
    # The same as `measure` in heldout_reward.py: REWARDS, or --rewards, are in the rows `function`.
    reward = "reward_action_k" if "oracle" in results else "reward"
    heading = f"Mean {reward} at temperature {results['temperature']:g}, {how}, 95% interval over {over}"
    return "\n".join([heading, *table_lines([header, *rows]), *wrapped(verdict(reward_comparisons(results)))])
