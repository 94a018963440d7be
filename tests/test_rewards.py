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
from rewards import assistant_turn, parse_action

PROMPT = "<|start|>user<|message|>Choose [0] to [3]<|end|><|start|>assistant"
THINK = "<|channel|>analysis<|message|>Is it [1] or [2]?"
FINAL = "<|start|>assistant<|channel|>final<|message|>"

ANSWERS = [  # (completion as the model wrote it, action, reason)
    (f"{THINK}<|end|>{FINAL}[3]<|return|>", 3, "reasoning, then the final channel"),
    (f"{THINK}<|end|>{FINAL}[2]", 2, "cut off right after the answer: it stands there"),
    (f"{THINK}<|end|>{FINAL}I choose [ 2 ]\n, so [2].<|return|>", 2, "words around, spaces inside, and twice the same"),
    (f"{THINK}<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>[1]<|return|>", 1, "content type"),
    (f"{FINAL}[0]<|end|>{FINAL}[1]<|return|><|endoftext|>", 1, "the last final message counts, padding behind"),
]
NO_ANSWERS = [
    (THINK, "cut off while reasoning"),
    (f"{THINK}<|end|>{FINAL}[2", "cut off inside the answer"),
    (f"{THINK}<|end|>{FINAL}[4]<|return|>", "no such action"),
    (f"{THINK}<|end|>{FINAL}[1.5]<|return|>", "fraction"),
    (f"{THINK}<|end|>{FINAL}[0][1][2][3]<|return|>", "all actions named: hedging must not pay"),
    (f"{THINK} The answer: assistantfinal[2]", "the words of a channel, without its tokens"),
    ("assistantfinal[2]", "not a single token of the format (real completions keep theirs)"),
    ("<|channel|>finally<|message|>[2]<|end|>", "a channel that begins alike"),
    (f"{FINAL}[" + "1" * 5000 + "]", "a number that Python refuses to read"),
]
STRIPPED = [
    ("analysisIt says assistantfinal[1] there.assistantfinal[0]", 0, "glued channels, and the last one counts"),
    ("final[2]", 2, "no reasoning"),
    ("analysis[1] is best, so [1]", None, "never reached the final channel"),
]


@pytest.mark.parametrize(("text", "action", "reason"), ANSWERS + [(text, None, reason) for text, reason in NO_ANSWERS])
def test_answers(text, action, reason):
    assert parse_action(assistant_turn(PROMPT, text)) == action, reason


@pytest.mark.parametrize(("text", "action", "reason"), STRIPPED)
def test_text_without_special_tokens(text, action, reason):
    assert parse_action(text) == action, reason


@given(st.text(), st.integers(1, 12))
def test_any_text_parses_to_an_action_in_range_or_none(text, actions):
    action = parse_action(assistant_turn(PROMPT, text), actions)
    assert action is None or 0 <= action < actions


def test_only_the_assistants_last_turn_is_completed():
    """A conversation has earlier ones, whose answers are not the completion's."""
    earlier = f"<|start|>user<|message|>A?<|end|>{FINAL}[1]<|end|>{PROMPT}"
    assert assistant_turn(earlier, THINK) == f"<|start|>assistant{THINK}"
    assert parse_action(assistant_turn(earlier, THINK)) is None, "[1] was answered to another question"
    opened = f"{earlier}<|channel|>final<|message|>"
    assert parse_action(assistant_turn(opened, "[3]<|return|>")) == 3
    assert assistant_turn("no turn", "[3]") == "[3]"


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
