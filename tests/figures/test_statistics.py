# SPDX-License-Identifier: Apache-2.0
"""Baselines, intervals and differences of rewards. The examples in statistics.py are tests as well."""

from __future__ import annotations

import math
import random

import pytest

from grpo.figures.statistics import confidence_interval, paired_difference, score_answers, score_values, student_t


@pytest.mark.parametrize(("count", "draws", "least", "most"), [(3, 2000, 1860, 1940), (8, 150, 127, 150)])
def test_an_interval_covers_the_true_mean_as_often_as_it_says(count, draws, least, most):
    """Of eight clusters by the bootstrap, of three by Student's t. The shares are 0.93 and 0.95 (3,000 draws); the
    limits, four standard deviations of so many draws around them."""
    generator = random.Random(3)
    drawn = [[generator.gauss(0.5, 0.2) for _ in range(count)] for _ in range(draws)]
    assert least <= sum(low <= 0.5 <= high for low, high in map(confidence_interval, drawn)) <= most


def test_what_every_window_says_an_interval_says():
    """Five windows, all of them better, some by much: Student's t takes the spread for symmetric and would deny it."""
    low, high = confidence_interval([-30.0, -60.0, -90.0, -250.0, -650.0])
    assert -650 <= low < -400 and -75 < high <= -30
    low, high = confidence_interval([-30.0, -60.0, -90.0, -250.0, 20.0])
    assert low < 0 < high


def test_students_t_goes_on_beyond_its_table():
    """97.5% quantiles of printed tables; the normal one, 1.96, is 4% too small behind the table's end."""
    expected = {1: 12.706, 28: 2.048, 29: 2.045, 40: 2.021, 120: 1.980}
    assert {degrees: round(student_t(degrees), 3) for degrees in expected} == pytest.approx(expected, abs=0.004)


def test_a_ratio_and_clusters():
    """Values of one cluster count once, and a ratio's weights vary with its values: here it is the same everywhere."""
    values, weights = [1.0, 2.0, 6.0, 3.0, 1.0, 2.0], [1.0, 2.0, 6.0, 3.0, 1.0, 2.0]
    assert confidence_interval(values, weights) == (1.0, 1.0)
    twice = confidence_interval([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], clusters=[1, 1, 2, 2, 3, 3])
    assert twice == pytest.approx((1 - 4.303 / 3**0.5, 1 + 4.303 / 3**0.5), rel=1e-3), "hours of a day are one"
    rows, days = [[0.0, 1.0]] * 12, [day for day in range(6) for _ in range(2)]
    scored = score_answers(rows, [[0], [1]] * 6, clusters=days)
    assert scored["reward_low"] == scored["reward_high"] == 0.5, "each day earns as much"
    assert paired_difference([0.0] * 12, [0.0, 1.0] * 6, days)["reward_low"] == 0.5
    assert score_values([[0.0], [1.0]] * 6, days)["reward_high"] == 0.5


@pytest.mark.parametrize("count", range(1, 8))
def test_fewer_than_six_clusters_that_are_all_alike_give_no_interval(count):
    """An interval of width zero would decide, where nothing but one value was seen: of a single day, or of a reward
    that is 0 or 1. The width is zero but for rounding where weights differ."""
    known = count >= 6
    assert confidence_interval([10.432] * count) == ((10.432, 10.432) if known else (None, None))
    weights = [float(n) for n in range(1, count + 1)]
    interval = confidence_interval([0.1 * weight for weight in weights], weights)
    assert interval == (pytest.approx((0.1, 0.1)) if known else (None, None))
    hours = [day for day in range(count) for _ in range(3)]
    difference = paired_difference([0.0, 0.5, 1.0] * count, [0.3, 0.2, 2.0] * count, hours)
    assert (difference["reward_low"] is not None) == known and difference["clusters"] == count
    scores = score_values([[1.0]] * count)
    assert (scores["reward_low"] is None) == (not known) and scores["reward"] == 1.0


def test_a_difference_is_that_of_the_same_prompts():
    """Two models that earn the same rewards on other prompts do not earn the same."""
    before, after = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 0.0, 3.0, 2.0, 5.0, 4.0]
    difference = paired_difference(before, after)
    assert difference["reward"] == 0 and difference["reward_low"] < -0.5 and difference["reward_high"] > 0.5
    assert paired_difference(after, [reward + 1 for reward in after])["reward"] == 1.0


def test_prompts_are_resampled_and_not_their_completions():
    """Sixteen equal answers to a prompt are one observation: the interval is that of the prompts alone."""
    rows, singles = [[0.0, 1.0]] * 20, [[k % 2] for k in range(20)]
    few, many = (score_answers(rows, [answers * n for answers in singles]) for n in (1, 16))
    assert (few["reward_low"], few["reward_high"]) == (many["reward_low"], many["reward_high"])
    assert few["reward_high"] - few["reward_low"] > 0.35
    assert score_answers(rows, singles) == few, "the seed is fixed"


def test_unreadable_answers_and_different_numbers_of_answers():
    rows, answers = [[0.2, 0.8], [0.4, 0.1]], [[None, 1], [None, 0]]
    for invalid, mean in ((-1.0, (0.8 + 0.4 - 2) / 4), (math.nan, (0.8 + 0.4 + 0.2 + 0.1) / 4)):
        scores = score_answers(rows, answers, invalid)
        assert scores["reward"] == pytest.approx(mean) and scores["regret"] == pytest.approx(0.6 - mean)
        assert scores["unparsed"] == 2 and scores["action_counts"] == [1, 1] and scores["best_action_rate"] == 0.5
    scores = score_answers([[0.0, 1.0], [0.0, 1.0]], [[1, 1, 1], [0]])
    assert scores["reward"] == 0.75 and scores["reward_by_prompt"] == [1.0, 0.0], "prompts count by their answers"


def test_an_evaluation_of_nothing_is_an_error():
    for rows, answers in (([], []), ([[1.0, 0.0]], [[]]), ([[1.0, 0.0]], [])):
        with pytest.raises(ValueError, match="every prompt needs"):
            score_answers(rows, answers)
    for values, weights in (([], None), ([1.0], [1.0, 2.0]), ([1.0], [0.0])):
        with pytest.raises(ValueError, match="an interval needs a"):
            confidence_interval(values, weights)
    with pytest.raises(ValueError):
        paired_difference([0.1], [0.1, 0.2])
