# SPDX-License-Identifier: Apache-2.0
"""Rewards: what counts as an answer, and what it is worth. The examples in rewards.py are tests as well."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rewards


def test_the_best_action_is_the_best_and_no_near_one():
    """By `best`, by evaluations and by metrics.csv: the second action is worse by a thousandth."""
    row = [0.5, 0.499, 0.5]
    columns = {f"reward_action_{k}": [value] * 3 for k, value in enumerate(row)}
    assert rewards.best([f"assistantfinal[{k}]" for k in range(3)], **columns) == [1.0, 0.0, 1.0]
    assert rewards.score_answers([row], [[0, 1, 1, 2]])["best_action_rate"] == 0.5
    assert rewards.best_action([0.499, 0.5, 0.5]) == 1


TABLE = {"reward_action_0": [0.1, 0.1, 0.7], "reward_action_1": [0.9, 0.9, 0.7]}
TEXTS = ["assistantfinal[1]", "analysis so [1]", "assistantfinal[0]"]


def test_action_and_best_score_actions_and_format_looks_at_the_form_alone():
    assert rewards.action(TEXTS, **TABLE) == pytest.approx([0.9, 0.02, 0.7])
    assert rewards.action(TEXTS, invalid_reward=-1.0, **TABLE) == [0.9, -1.0, 0.7]
    assert rewards.best(TEXTS, **TABLE) == [1.0, -0.1, 1.0], "a tie is the best too"
    assert rewards.format([*TEXTS, "assistantfinal [3] \n", "assistantfinal[1] because"]) == [1.0, 0.0, 1.0, 1.0, 0.0]


def table(name, *rows):
    """Columns `name`_0 .. of these rows, the shorter ones filled with None."""
    return {f"{name}_{k}": list(column) for k, column in enumerate(itertools.zip_longest(*rows))}


def test_regret_of_a_softmax_in_a_file_of_eight_decimals():
    """exp(-10) reads 0.00003, exp(-100) and exp(-1000) read 0 and count as 5e-9."""
    written = [0.73103, 0.26894, round(0.73103 * math.exp(-10), 8), 0.0, 0.0]
    answers = [f"assistantfinal[{k}]" for k in range(5)]
    by_softmax = rewards.regret(answers, **table("reward_action", *[written] * 5))
    assert by_softmax[:3] == pytest.approx([0.0, -0.6931, -2.3979], abs=2e-4)
    assert by_softmax[3:] == pytest.approx([-math.log1p(math.log(0.73103 / 5e-9))] * 2)


@given(st.lists(st.floats(-0.8, 0.0), min_size=2, max_size=6))
def test_regret_is_the_same_from_values_and_from_their_softmax(q):
    """Where nothing is below 5e-9, and the two stand in files side by side: one with four actions, one with fewer."""
    weights = [math.exp((value - max(q)) / 0.05) for value in q]
    softmax, answers = [weight / sum(weights) for weight in weights], [f"assistantfinal[{k}]" for k in range(len(q))]
    columns = table("reward_action", *[softmax] * len(q), [0.5, 0.5])
    by_q = rewards.regret([*answers, "assistantfinal[1]"], **columns | table("q_action", *[q] * len(q), [None]))
    by_softmax = rewards.regret([*answers, "assistantfinal[1]"], **columns)
    assert by_q == pytest.approx(by_softmax, abs=1e-6) and by_q[-1] == 0.0 and max(by_q) == 0.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6), st.sampled_from(sorted(rewards.ACTION_REWARDS)))
def test_no_answer_is_worse_than_any(values, name):
    """A tenth of the range, or 0.1 where all are equal, and where a tenth of it is lost in rounding."""
    answers = [*(f"assistantfinal[{k}]" for k in range(len(values))), f"analysis[{values.index(max(values))}]"]
    columns = table("reward_action", *[values] * len(answers)) | table("q_action", *[values] * len(answers))
    *named, none = rewards.ACTION_REWARDS[name](answers, **columns)
    spread = max(named) - min(named)
    assert none < min(named)
    assert none == pytest.approx(min(named) - (spread / 10 or 0.1)) or spread < 1e-9


@pytest.mark.parametrize(("count", "draws", "least", "most"), [(3, 2000, 1860, 1940), (8, 150, 127, 150)])
def test_an_interval_covers_the_true_mean_as_often_as_it_says(count, draws, least, most):
    """Of eight clusters by the bootstrap, of three by Student's t. The shares are 0.93 and 0.95 (3,000 draws); the
    limits, four standard deviations of so many draws around them."""
    generator = random.Random(3)
    drawn = [[generator.gauss(0.5, 0.2) for _ in range(count)] for _ in range(draws)]
    assert least <= sum(low <= 0.5 <= high for low, high in map(rewards.confidence_interval, drawn)) <= most


def test_what_every_window_says_an_interval_says():
    """Five windows, all of them better, some by much: Student's t takes the spread for symmetric and would deny it."""
    low, high = rewards.confidence_interval([-30.0, -60.0, -90.0, -250.0, -650.0])
    assert -650 <= low < -400 and -75 < high <= -30
    low, high = rewards.confidence_interval([-30.0, -60.0, -90.0, -250.0, 20.0])
    assert low < 0 < high


def test_a_ratio_and_clusters():
    """Values of one cluster count once, and a ratio's weights vary with its values: here it is the same everywhere."""
    values, weights = [1.0, 2.0, 6.0, 3.0, 1.0, 2.0], [1.0, 2.0, 6.0, 3.0, 1.0, 2.0]
    assert rewards.confidence_interval(values, weights) == (1.0, 1.0)
    twice = rewards.confidence_interval([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], clusters=[1, 1, 2, 2, 3, 3])
    assert twice == pytest.approx((1 - 4.303 / 3**0.5, 1 + 4.303 / 3**0.5), rel=1e-3), "hours of a day are one"
    rows, days = [[0.0, 1.0]] * 12, [day for day in range(6) for _ in range(2)]
    scored = rewards.score_answers(rows, [[0], [1]] * 6, clusters=days)
    assert scored["reward_low"] == scored["reward_high"] == 0.5, "each day earns as much"
    assert rewards.paired_difference([0.0] * 12, [0.0, 1.0] * 6, days)["reward_low"] == 0.5
    assert rewards.score_values([[0.0], [1.0]] * 6, days)["reward_high"] == 0.5


@pytest.mark.parametrize("count", range(1, 8))
def test_fewer_than_six_clusters_that_are_all_alike_give_no_interval(count):
    """An interval of width zero would decide, where nothing but one value was seen: of a single day, or of a reward
    that is 0 or 1. The width is zero but for rounding where weights differ."""
    known = count >= 6
    assert rewards.confidence_interval([10.432] * count) == ((10.432, 10.432) if known else (None, None))
    weights = [float(n) for n in range(1, count + 1)]
    interval = rewards.confidence_interval([0.1 * weight for weight in weights], weights)
    assert interval == (pytest.approx((0.1, 0.1)) if known else (None, None))
    hours = [day for day in range(count) for _ in range(3)]
    difference = rewards.paired_difference([0.0, 0.5, 1.0] * count, [0.3, 0.2, 2.0] * count, hours)
    assert (difference["reward_low"] is not None) == known and difference["clusters"] == count
    scores = rewards.score_values([[1.0]] * count)
    assert (scores["reward_low"] is None) == (not known) and scores["reward"] == 1.0


def test_a_difference_is_that_of_the_same_prompts():
    """Two models that earn the same rewards on other prompts do not earn the same."""
    before, after = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 0.0, 3.0, 2.0, 5.0, 4.0]
    difference = rewards.paired_difference(before, after)
    assert difference["reward"] == 0 and difference["reward_low"] < -0.5 and difference["reward_high"] > 0.5
    assert rewards.paired_difference(after, [reward + 1 for reward in after])["reward"] == 1.0


def test_prompts_are_resampled_and_not_their_completions():
    """Sixteen equal answers to a prompt are one observation: the interval is that of the prompts alone."""
    rows, singles = [[0.0, 1.0]] * 20, [[k % 2] for k in range(20)]
    few, many = (rewards.score_answers(rows, [answers * n for answers in singles]) for n in (1, 16))
    assert (few["reward_low"], few["reward_high"]) == (many["reward_low"], many["reward_high"])
    assert few["reward_high"] - few["reward_low"] > 0.35
    assert rewards.score_answers(rows, singles) == few, "the seed is fixed"


def test_unreadable_answers_and_different_numbers_of_answers():
    rows, answers = [[0.2, 0.8], [0.4, 0.1]], [[None, 1], [None, 0]]
    for invalid, mean in ((-1.0, (0.8 + 0.4 - 2) / 4), (math.nan, (0.8 + 0.4 + 0.2 + 0.1) / 4)):
        scores = rewards.score_answers(rows, answers, invalid)
        assert scores["reward"] == pytest.approx(mean) and scores["regret"] == pytest.approx(0.6 - mean)
        assert scores["unparsed"] == 2 and scores["action_counts"] == [1, 1] and scores["best_action_rate"] == 0.5
    scores = rewards.score_answers([[0.0, 1.0], [0.0, 1.0]], [[1, 1, 1], [0]])
    assert scores["reward"] == 0.75 and scores["reward_by_prompt"] == [1.0, 0.0], "prompts count by their answers"


def test_an_evaluation_of_nothing_is_an_error():
    for rows, answers in (([], []), ([[1.0, 0.0]], [[]]), ([[1.0, 0.0]], [])):
        with pytest.raises(ValueError, match="every prompt needs"):
            rewards.score_answers(rows, answers)
    for values, weights in (([], None), ([1.0], [1.0, 2.0]), ([1.0], [0.0])):
        with pytest.raises(ValueError):
            rewards.confidence_interval(values, weights)
    with pytest.raises(ValueError):
        rewards.paired_difference([0.1], [0.1, 0.2])
