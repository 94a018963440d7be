# SPDX-License-Identifier: Apache-2.0
"""Whether a trained model is better than other policies, and which adapter to load: decided and worded here. Log,
report, tables and cards print these sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.figures.statistics import LEAST_ALIKE
from grpo.figures.text import finite_number, fitting, object_at, with_interval
from grpo.settings.table import TASK_FILES

BASE = "the base model"
START_ADAPTER = "the adapter it started from"
CONSTANT = "always [{}], the best constant action"
RULE = "the best fixed rule, {}"
# Of so many clusters at least one bears a loss that one cluster in ten bears, with a probability of 95%.
FEW_CLUSTERS = 30
RARE_LOSSES = (  # measured with such losses; docs/evaluation.md says the same
    "an interval over few {0}s cannot show rare losses: where one {0} in ten bears a large loss, only 38% of 95% "
    "intervals over five {0}s hold the true mean, 65% of those over 15"
)


@dataclass(frozen=True)
class Comparison:
    """The 95% interval of a trained model's gain over another policy, above 0 where it is better, over `clusters` of a
    `unit` such as days. Both ends are None where there is no interval, `clusters` where nobody counted them."""

    other: str
    low: float | None
    high: float | None
    clusters: int | None = None
    unit: str = "prompt"

    @property
    def outcome(self) -> str:
        """`better`, `worse`, or `unknown`. An interval of width zero over few clusters shows no spread: unknown."""
        if self.low is None or self.high is None:
            return "unknown"
        if not self.low < self.high and (self.clusters or 0) < LEAST_ALIKE:
            return "unknown"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "unknown"

    def caveat(self) -> str:
        """Why the interval says little; empty if it does not."""
        if self.clusters == 1:
            return f"a single {self.unit} shows nothing"
        if self.clusters is None or self.clusters >= FEW_CLUSTERS:
            return ""
        if self.low is None:
            return f"{self.clusters} {self.unit}s are too few or too alike for an interval"
        return RARE_LOSSES.format(self.unit)


def compare(other: str, figures: Mapping[str, object], unit: str = "prompt") -> Comparison:
    """The comparison by the gain of reward in `figures`."""
    low, high = (finite_number(figures.get(f"reward_{end}")) for end in ("low", "high"))
    clusters = finite_number(figures.get("clusters"))
    known = not math.isnan(low + high)
    count = None if math.isnan(clusters) else int(clusters)
    return Comparison(other, low if known else None, high if known else None, count, unit)


def verdict(comparisons: Sequence[Comparison], trained: str = "the trained model") -> str:
    """A clause on how the model, called `trained`, compares with each of the other policies; empty without any. It
    never names the base model alone if another policy was compared."""
    if not comparisons:
        return ""
    others = {outcome: [c.other for c in comparisons if c.outcome == outcome] for outcome in ("better", "worse")}
    parts = [f"is {outcome} than {' and '.join(names)}" for outcome, names in others.items() if names]
    unknown = " or ".join(c.other for c in comparisons if c.outcome == "unknown")
    if unknown and parts:
        parts.append(f"cannot be told from {unknown}")
    clause = f"{trained} {', but '.join(parts)}" if parts else f"this evaluation cannot tell {trained} from {unknown}"
    caveats = dict.fromkeys(filter(None, (comparison.caveat() for comparison in comparisons)))
    return "; ".join([clause, *caveats])


def obstacle(comparisons: Sequence[Comparison]) -> str:
    """Why a model is not one to load, in words that follow `No adapter`; empty if it is one, or was not compared."""
    for comparison in comparisons:
        if comparison.outcome == "worse":
            return f"beats {comparison.other}"
    is_unknown = any(c.other == BASE and c.outcome == "unknown" for c in comparisons)
    return f"is shown to beat {BASE}" if is_unknown else ""


def reward_comparisons(evaluation: Mapping[str, Any]) -> list[Comparison]:
    """The trained model's held-out reward against the base model's and that of the best constant action, from
    evaluation.json."""
    unit = "day" if evaluation.get("by_day") else "prompt"
    if not object_at(evaluation, "after"):
        return []
    comparisons = []
    if object_at(evaluation, "before"):
        comparisons.append(compare(BASE, object_at(evaluation, "difference"), unit=unit))
    if "difference_start" in evaluation:
        comparisons.append(compare(START_ADAPTER, object_at(evaluation, "difference_start"), unit=unit))
    if "constant_action" in evaluation:
        name = CONSTANT.format(evaluation["constant_action"])
        comparisons.append(compare(name, object_at(evaluation, "difference_constant"), unit=unit))
    return comparisons


def reward_verdict(evaluation: Mapping[str, Any]) -> str:
    """Whether training improved the held-out reward of evaluation.json, and how it compares with a constant action."""
    before, after = object_at(evaluation, "before"), object_at(evaluation, "after")
    if not before or not after:
        return "Held-out prompts were not evaluated before and after training: the run goes on, or evaluates none."
    old, new = finite_number(before.get("reward")), finite_number(after.get("reward"))
    if unknown := [when for when, reward in (("before", old), ("after", new)) if math.isnan(reward)]:
        return f"No answer to a held-out prompt got a reward {' and '.join(unknown)} training: nothing can be compared."
    change = {"reward": new - old} | object_at(evaluation, "difference")
    clause = verdict(reward_comparisons(evaluation))
    difference = with_interval(change, "reward", "+.3f", "95% interval ")
    ends = " to ".join(f"{reward:{fitting('.3f', old, new)}}" for reward in (old, new))
    return f"The last step's adapter changed held-out reward by {difference}, from {ends}: {clause}."


# BEST_BY -> the column of metrics.csv that decides, and a phrase for it: of a simulator, its first in task.json.
DECIDING = {"reward": ("heldout_reward", "held-out reward of {:.3f}")} | {
    task["best_by"]: next((column, figure["words"]) for column, figure in task["figures"].items())
    for task in TASK_FILES.values()
    if task.get("best_by")
}


def read_comparisons(record: Mapping[str, Any]) -> list[Comparison]:
    """The comparisons of the best adapter, from best.json; none in the record of an earlier version."""
    return [Comparison(**comparison) for comparison in record.get("comparisons", [])]


def describe_best(record: Mapping[str, Any]) -> str:
    """A clause that says from which step best/ comes, and whether it beats the base model and other policies."""
    words = fitting(DECIDING[record["by"]][1], record["value"], record["base_value"])
    value, base_value = (words.format(record[name]) for name in ("value", "base_value"))
    step = f"step {record['step']} is the best of the evaluated ones, with a {value}"
    if not record["better_than_base"]:
        return f"{step}, but NOT BETTER than {BASE} without any adapter ({base_value})"
    clause = verdict(read_comparisons(record), "it")
    return f"{step} (base model: {base_value}){clause and ': '}{clause}"


def objection(record: Mapping[str, Any]) -> str:
    """Why the adapter in best/ is not one to load, in words that follow `No adapter`; empty if it is."""
    return obstacle(read_comparisons(record)) if record.get("better_than_base", True) else f"beats {BASE}"


def loading_advice(record: Mapping[str, Any], last_step: int | None) -> str:
    """A paragraph on which adapter to load, for the run's model card and its report: that in best/, or that of
    `last_step` beside it; None if there is none beside it."""
    if "in_words" not in record:
        unknown = f"nothing was measured on held-out rows, so whether it beats {BASE} is not known"
        return f"**Load the last step's adapter, in the run's folder**: {unknown}.\n"
    if reason := objection(record):
        return f"**No adapter {reason}**: {record['in_words']}. It is in `best/`.\n"
    # Of ten measured steps that learned nothing, the best one's interval is above 0 in up to a fifth of runs. One alone
    # was not chosen.
    flatters = " The same held-out data chose it, so its figure and intervals flatter."
    chosen = "" if len(record.get("evaluated", ())) == 1 else flatters
    last = "" if last_step is None else f" The one in this folder is of step {last_step}, the last."
    return f"**Load the adapter in `best/`**: {record['in_words']}.{chosen}{last}\n"
