# SPDX-License-Identifier: Apache-2.0
"""Rewards: what counts as an answer, and what it is worth. The examples in rewards.py are tests as well."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rewards
from grpo.figures import statistics
from grpo.reward.calling import load_rewards
from grpo.reward.episode import Episode
from grpo.settings.table import Settings


def test_the_best_action_is_the_best_and_no_near_one():
    """By `best`, by evaluations and by metrics.csv: the second action is worse by a thousandth."""
    row = [0.5, 0.499, 0.5]
    columns = {f"reward_action_{k}": [value] * 3 for k, value in enumerate(row)}
    assert rewards.best([f"assistantfinal[{k}]" for k in range(3)], **columns) == [1.0, 0.0, 1.0]
    assert statistics.score_answers([row], [[0, 1, 1, 2]])["best_action_rate"] == 0.5
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


def test_a_row_with_fewer_actions_has_no_others():
    """The table's empty cells are no actions that earn 0."""
    columns = table("reward_action", *[[0.1, 0.2, 0.9], [0.5, 0.7]] * 2)
    answers = ["assistantfinal[2]", "assistantfinal[2]", "assistantfinal[0]", "assistantfinal[1]"]
    assert rewards.action(answers, **columns) == pytest.approx([0.9, 0.48, 0.1, 0.7])


def test_a_lost_episode_earns_what_the_worst_of_its_own_prompt_did():
    ends = [("done", 1.0), ("done", 2.0), ("failed", None), ("done", -5.0), ("timeout", None)]
    episodes = [Episode("", [], [1], [0], None, reward, end) for end, reward in ends]
    columns = {"episodes": episodes, "prompts": ["a", "a", "a", "b", "c"]}
    assert rewards.environment([""] * 5, **columns) == [1.0, 2.0, 1.0, -5.0, None]
    (function,) = load_rewards([("environment", 1.0)], Settings(INVALID_REWARD=-1.0))
    assert function([""] * 5, **columns) == [1.0, 2.0, -1.0, -5.0, -1.0]


def test_an_environment_may_pay_calls_or_the_end_or_both():
    paid = [([0.5, -0.25], None), (None, 1.0), ([0.5, -0.25], 1.0), (None, None)]
    episodes = [Episode("", [], [1, 1], [0, 1], by_turn, reward, "done") for by_turn, reward in paid]
    assert rewards.environment([""] * 4, episodes=episodes, prompts=["a"] * 4) == [0.25, 1.0, 1.25, None]


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
