# SPDX-License-Identifier: Apache-2.0
"""Harmony's grammar: what counts as an answer, and what completes the prompt. Its examples are tests too."""

import pytest
from helpers import RENDERED
from hypothesis import given
from hypothesis import strategies as st

from grpo.harmony import ANSWER_BEFORE, ASSISTANT, assistant_turn, open_answer, parse_action

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


@pytest.mark.parametrize("end", ["", "<|channel|>final<|message|>", f"{THINK}<|end|>{ASSISTANT}"])
def test_an_opened_prompt_ends_where_the_action_is_named(end):
    opened = open_answer(RENDERED.format("x") + end)
    assert opened.endswith(ASSISTANT + ANSWER_BEFORE) and opened.count(ANSWER_BEFORE) == 1
    assert open_answer(opened) == opened
    with pytest.raises(ValueError, match="the prompt ends with"):
        open_answer(opened + "1")
