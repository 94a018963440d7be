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
