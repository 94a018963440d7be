# SPDX-License-Identifier: Apache-2.0
"""The verdict on a trained model, and what tables, report and cards make of it."""

from __future__ import annotations

import pytest

from grpo.figures.verdict import BASE, Comparison, compare, describe_best, obstacle, reward_verdict, verdict

CONSTANT, RULE = "always [0], the best constant action", "the best fixed rule, charge_when_clean"
OUTCOMES = [  # low, high, clusters, outcome, reason
    (0.1, 0.3, 40, "better", "all of it is above 0"),
    (-0.3, -0.1, 40, "worse", "all of it is below 0"),
    (-0.1, 0.3, 40, "unknown", "0 lies inside, nearer to the lower end"),
    (-0.3, 0.1, 40, "unknown", "0 lies inside, nearer to the upper end"),
    (0.0, 0.3, 40, "unknown", "0 is an end"),
    (None, None, None, "unknown", "there is none"),
    (10.432, 10.432, None, "unknown", "a record of an earlier version, of a single day"),
    (10.432, 10.432, 5, "unknown", "five that agree may do so by chance"),
    (10.432, 10.432, 6, "better", "six that agree do not"),
]


@pytest.mark.parametrize(("low", "high", "clusters", "outcome", "reason"), OUTCOMES)
def test_an_outcome_follows_the_interval(low, high, clusters, outcome, reason):
    assert Comparison(BASE, low, high, clusters).outcome == outcome, reason
    figures = {"reward": 0.1, "reward_low": low, "reward_high": high, "clusters": clusters}
    assert compare(BASE, figures) == Comparison(BASE, low, high, clusters), reason
    if low is not None:
        mirrored = {"better": "worse", "worse": "better"}.get(outcome, outcome)
        assert Comparison(BASE, -high, -low, clusters).outcome == mirrored, reason


ENDS = {"better": (0.1, 0.2), "worse": (-0.2, -0.1), "unknown": (-0.1, 0.1)}
VERDICTS = [  # against the base model, against the constant action, the sentence, what follows `No adapter`
    ("better", "better", f"the trained model is better than {BASE} and {CONSTANT}", ""),
    ("better", "unknown", f"the trained model is better than {BASE}, but cannot be told from {CONSTANT}", ""),
    ("better", "worse", f"the trained model is better than {BASE}, but is worse than {CONSTANT}", f"beats {CONSTANT}"),
    ("unknown", "unknown", f"this evaluation cannot tell the trained model from {BASE} or {CONSTANT}", "is shown to"),
    ("unknown", "better", f"the trained model is better than {CONSTANT}, but cannot be told from {BASE}", "is shown"),
    ("worse", "worse", f"the trained model is worse than {BASE} and {CONSTANT}", f"beats {BASE}"),
]


@pytest.mark.parametrize(("base", "constant", "words", "reason"), VERDICTS)
def test_a_verdict_names_every_policy_that_was_compared(base, constant, words, reason):
    comparisons = [Comparison(BASE, *ENDS[base]), Comparison(CONSTANT, *ENDS[constant])]
    assert verdict(comparisons) == words
    assert obstacle(comparisons).startswith(reason) and bool(obstacle(comparisons)) is bool(reason)


def test_three_policies_and_none():
    ends = (ENDS["better"], ENDS["worse"], ENDS["unknown"])
    three = [Comparison(other, *interval) for other, interval in zip((BASE, CONSTANT, RULE), ends, strict=True)]
    words = f"it is better than {BASE}, but is worse than {CONSTANT}, but cannot be told from {RULE}"
    assert verdict(three, "it") == words
    assert verdict([]) == obstacle([]) == ""


@pytest.mark.parametrize(
    ("low", "clusters", "words"),
    [
        (None, 1, "; a single day shows nothing"),
        (None, 4, "; 4 days are too few or too alike for an interval"),
        (0.1, 5, "; an interval over few days cannot show rare losses: where one day in ten bears a large loss"),
        (0.1, 29, "; an interval over few days cannot show rare losses"),
        (0.1, 30, ""),
        (0.1, None, ""),
    ],
)
def test_an_interval_over_few_clusters_says_so(low, clusters, words):
    """Once, however many policies it was compared with."""
    high = None if low is None else low + 0.1
    comparisons = [Comparison(other, low, high, clusters, "day") for other in (BASE, CONSTANT)]
    clause, separator, caveat = verdict(comparisons).partition("; ")
    assert (separator + caveat).startswith(words) and bool(caveat) is bool(words) and ";" not in caveat
    assert ("is better than" in clause) is (low is not None)


def test_a_model_whose_answers_got_no_reward_is_not_compared():
    """Every function returned None for all of its answers."""
    figures = {"before": {"reward": 0.5}, "after": {"reward": None}}
    assert reward_verdict(figures).startswith("No answer to a held-out prompt got a reward after training")
    figures["before"]["reward"] = None
    assert "a reward before and after training" in reward_verdict(figures)


def test_small_rewards_are_told_apart():
    """As `from 0.000 to 0.000` they were not, though the verdict did."""
    gain = {"reward": 4.04e-5, "reward_low": 1.03e-5, "reward_high": 7.6e-5, "clusters": 40}
    text = reward_verdict({"before": {"reward": 0.0029}, "after": {"reward": 0.0029404}, "difference": gain})
    assert "by +4.04e-05 (95% interval +1.03e-05 to +7.6e-05), from 0.0029 to 0.00294: the trained model is b" in text
    best = describe_best({"by": "reward", "step": 4, "value": 2.9e-05, "base_value": 0.0, "better_than_base": True})
    assert "with a held-out reward of 2.9e-05 (base model: held-out reward of 0)" in best
