# SPDX-License-Identifier: Apache-2.0
"""Statistics of measured rewards: baselines, 95% intervals, and the figures of evaluation.json.

Of scipy it could use Student's t alone: the bootstrap there knows neither clusters of different weights nor widened
percentiles, and `--check`, which loads the plant, would start seconds later."""

import itertools
import math
import random
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import Any

from rewards import best_action

Scores = dict[str, Any]  # Figures, and lists of figures, by name.
Rows = Sequence[Sequence[float]]  # (N, K): figures by prompt and action, or by prompt and completion
Clusters = Sequence[Hashable] | None  # (N,): the cluster of each prompt, such as its day; None: each is its own


def baselines(rows: Rows) -> dict[str, float]:
    """Mean reward of a uniformly random, the best constant and the best possible policy over `rows` of shape (N, K).

    >>> baselines([[0.0, 1.0], [0.5, 0.5], [0.25, 0.0]])
    {'random': 0.375, 'constant': 0.5, 'constant_action': 1, 'oracle': 0.5833333333333334}
    """
    if not rows:
        raise ValueError("baselines need at least one row of rewards")
    # Only actions that all rows have can be constant.
    means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=False)]
    return {
        "random": math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows),
        "constant": max(means),
        "constant_action": best_action(means),
        "oracle": math.fsum(max(row) for row in rows) / len(rows),
    }


RESAMPLES, RESAMPLING_SEED = 2000, 20250106
LEAST_RESAMPLED = 5  # Bootstrap intervals of fewer clusters are too narrow.
LEAST_ALIKE = 6  # Fewer clusters that are all alike prove nothing: 2 x 0.5^5 is more than 5%.
Interval = tuple[float, float] | tuple[None, None]
# Student's t, 97.5%, for 1 to 28 degrees of freedom.
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
    2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
)  # fmt: skip


def student_t(degrees: int) -> float:
    """The 97.5% quantile of Student's t; beyond the table, the start of its expansion around the normal quantile."""
    return STUDENT_T[degrees - 1] if degrees <= len(STUDENT_T) else 1.96 + (1.96**3 + 1.96) / (4 * degrees)


def confidence_interval(
    values: Sequence[float], weights: Sequence[float] | None = None, clusters: Clusters = None
) -> Interval:
    """95% interval of sum(values) / sum(weights), (N,) each, or of the mean without weights.

    `clusters` (N,) names the cluster of each value, such as its prompt or day. Values of a cluster are summed up,
    because they are not independent. From LEAST_RESAMPLED clusters on, the interval is a percentile bootstrap with a
    fixed seed. Its percentiles are widened as in Student's t (T. C. Hesterberg, What Teachers Should Know About the
    Bootstrap, The American Statistician 69, 2015, "expanded percentile"): with five clusters the interval covers the
    mean in 92% of cases instead of 83%. Resamples whose weights do not sum above 0 are skipped. Fewer clusters get
    Student's t with the ratio's linearized error (W. G. Cochran, Sampling Techniques, 1977, chapter 6). There is no
    interval, (None, None), for a single cluster and for fewer than LEAST_ALIKE clusters that are all alike: they show
    no spread, and an interval of width zero would say that there is none. Raises ValueError without values, if weights
    and values differ in number, or if no weights sum above 0.

    >>> [round(end, 3) for end in confidence_interval([0.0, 1.0, 2.0])], confidence_interval([1.0, 1.0])
    ([-1.484, 3.484], (None, None))
    """
    weights = [1.0] * len(values) if weights is None else weights
    if not values or len(weights) != len(values):
        raise ValueError(f"{len(values)} values with {len(weights)} weights: an interval needs a weight for each value")
    sums: dict[Hashable, tuple[float, float]] = {}
    for cluster, value, weight in zip(clusters or range(len(values)), values, weights, strict=True):
        value_sum, weight_sum = sums.get(cluster, (0.0, 0.0))
        sums[cluster] = (value_sum + value, weight_sum + weight)
    values, weights = zip(*sums.values(), strict=True)
    count, total_weight = len(values), math.fsum(weights)
    if total_weight <= 0:
        raise ValueError(f"the weights sum to {total_weight:g}, and an interval needs a sum above 0")
    if count < LEAST_RESAMPLED:
        mean = math.fsum(values) / total_weight
        errors = [(value - mean * weight) ** 2 for value, weight in sums.values()]
        error = math.sqrt(math.fsum(errors) * count / max(count - 1, 1)) / total_weight
        half_width = student_t(count - 1) * error if count > 1 else 0.0
        return unless_alike(mean - half_width, mean + half_width, count)
    generator, means = random.Random(RESAMPLING_SEED), []
    for _ in range(RESAMPLES):
        drawn = generator.choices(range(count), k=count)
        if (total := sum(weights[i] for i in drawn)) > 0:
            means.append(sum(values[i] for i in drawn) / total)
    means.sort()

    def percentile(share: float) -> float:
        rank = share * (len(means) - 1)
        return means[int(rank)] + (rank - int(rank)) * (means[math.ceil(rank)] - means[int(rank)])

    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * student_t(count - 1))
    return unless_alike(percentile(tail), percentile(1 - tail), count)


def unless_alike(low: float, high: float, clusters: int) -> Interval:
    """The interval, or (None, None) if it has no width, but for rounding, and fewer than LEAST_ALIKE clusters."""
    is_empty = high - low <= 1e-9 * max(1.0, abs(low))
    return (None, None) if is_empty and clusters < LEAST_ALIKE else (low, high)


def score_probabilities(
    rows: Rows, probabilities: Rows, answers: Sequence[float], invalid_reward: float = 0.0, clusters: Clusters = None
) -> Scores:
    """Mean reward, regret and parse rate of a policy on N prompts, with 95% intervals over the prompts or `clusters`.

    `rows` are the rewards by prompt and action, (N, K), and `probabilities` (N, K) the probabilities or shares of the
    same actions. The remainder to 1 is completions without an action, which score `invalid_reward` or, if it is nan,
    the row's lowest reward. `answers` (N,) is the number of each prompt's answers, which weights the prompt. Regret is
    the row's highest reward minus the mean. `reward_by_prompt` is for `paired_difference`. Raises ValueError without
    prompts or answers.

    >>> scores = score_probabilities([[0.0, 1.0], [0.6, 0.4]], [[0.0, 0.5], [1.0, 0.0]], [2, 2])
    >>> scores["reward"], round(scores["regret"], 6), scores["parse_rate"], scores["action_counts"], scores["unparsed"]
    (0.55, 0.25, 0.75, [2.0, 1.0], 1.0)
    """
    if not rows or len(rows) != len(answers) or not all(answers):
        raise ValueError("every prompt needs at least one answer")
    figures: dict[str, list[float]] = {"reward": [], "regret": [], "parse_rate": []}
    best_named, counts = [], [0.0] * max(map(len, rows))
    for row, p, count in zip(rows, probabilities, answers, strict=True):
        invalid_score, parsed = min(row) if math.isnan(invalid_reward) else invalid_reward, math.fsum(p)
        mean = math.fsum(a * b for a, b in zip(row, p, strict=True)) + invalid_score * (1 - parsed)
        figures["reward"].append(mean)
        figures["regret"].append(max(row) - mean)
        figures["parse_rate"].append(parsed)
        best_named.append(count * math.fsum(b for a, b in zip(row, p, strict=True) if a == max(row)))
        counts = [c + count * b for c, b in itertools.zip_longest(counts, p, fillvalue=0.0)]
    scores: Scores = {}
    # Weighted by the number of answers, so that the figures are means over completions, not over prompts.
    weights = [count / max(answers) for count in answers]
    for name, values in figures.items():
        sums = [v * w for v, w in zip(values, weights, strict=True)]
        low, high = confidence_interval(sums, weights, clusters)
        scores |= {name: math.fsum(sums) / math.fsum(weights), f"{name}_low": low, f"{name}_high": high}
    total = math.fsum(answers)
    return scores | {
        "best_action_rate": math.fsum(best_named) / total,
        "action_counts": [round(value, 6) for value in counts],
        "unparsed": round(total - math.fsum(counts), 6),
        "reward_by_prompt": [round(value, 9) for value in figures["reward"]],
    }


def score_answers(
    rows: Rows, answers: Sequence[Sequence[int | None]], invalid_reward: float = 0.0, clusters: Clusters = None
) -> Scores:
    """`score_probabilities` of sampled actions, a list for each of N prompts; None is an answer without action."""
    if len(rows) != len(answers):
        raise ValueError("every prompt needs at least one answer")
    pairs = zip(rows, answers, strict=True)
    shares = [[own.count(k) / max(len(own), 1) for k in range(len(row))] for row, own in pairs]
    scores = score_probabilities(rows, shares, list(map(len, answers)), invalid_reward, clusters)
    return scores | {"action_counts": list(map(round, scores["action_counts"])), "unparsed": round(scores["unparsed"])}


def mean_of_known(values: Sequence[float | None], clusters: Clusters = None) -> Scores:
    """Mean of the values (N,) that are not None, with its `confidence_interval`. Raises ValueError if all are None."""
    pairs = zip(values, clusters or range(len(values)), strict=True)
    known = [(value, cluster) for value, cluster in pairs if value is not None]
    kept = [value for value, _ in known]
    low, high = confidence_interval(kept, clusters=[cluster for _, cluster in known])
    return {"reward": math.fsum(kept) / len(kept), "reward_low": low, "reward_high": high}


def score_values(values: Rows, clusters: Clusters = None) -> Scores:
    """`mean_of_known` of the mean rewards of N prompts, given the rewards of their completions. NaN is left out, and a
    prompt without any other reward has None in `reward_by_prompt`. If no prompt has a reward, the other figures are
    None too.

    >>> score_values([[0.0, 1.0], [math.nan], [1.0, math.nan]])
    {'reward': 0.75, 'reward_low': -2.4265, 'reward_high': 3.9265, 'reward_by_prompt': [0.5, None, 1.0]}
    """
    kept = [[value for value in row if not math.isnan(value)] for row in values]
    means = [round(math.fsum(row) / len(row), 9) if row else None for row in kept]
    no_figures = dict.fromkeys(("reward", "reward_low", "reward_high"))
    return {**(mean_of_known(means, clusters) if any(kept) else no_figures), "reward_by_prompt": means}


def paired_difference(
    before: Sequence[float | None], after: Sequence[float | None], clusters: Clusters = None
) -> Scores:
    """`mean_of_known` of after - before by prompt, in which the difficulty of a prompt cancels out, and the number of
    its clusters. A prompt that has None in either list is left out.

    >>> paired_difference([0.1, 0.9, None], [0.2, 1.0, 0.5])
    {'reward': 0.1, 'reward_low': None, 'reward_high': None, 'clusters': 2}
    """
    pairs = zip(before, after, strict=True)
    gains = [None if a is None or b is None else round(b - a, 9) for a, b in pairs]
    known = {cluster for cluster, gain in zip(clusters or range(len(gains)), gains, strict=True) if gain is not None}
    return mean_of_known(gains, clusters) | {"clusters": len(known)}
