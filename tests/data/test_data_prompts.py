# SPDX-License-Identifier: Apache-2.0
"""Prompts: their order and their rendering. Run: python -m pytest tests/data/test_data_prompts.py"""

from __future__ import annotations

import datetime

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from grpo.data.prompts import prompt_order, render


@given(st.integers(1, 40), st.integers(0, 5), st.integers(1, 120))
def test_every_epoch_asks_every_row_once(rows, seed, count):
    order = list(prompt_order(rows, seed, count))
    assert len(order) == count
    for start in range(0, count - rows + 1, rows):
        assert sorted(order[start : start + rows]) == list(range(rows)), "each epoch sees every row once"
    assert order == list(prompt_order(rows, seed, count + 7))[:count], "a longer run begins with the shorter one"


def test_prompt_order_golden():
    assert list(prompt_order(5, 42, 12)) == [4, 1, 0, 3, 2, 0, 3, 1, 2, 4, 2, 0]


TEMPLATE = (
    "{%- for message in messages %}<|start|>{{ message['role'] }}<|message|>{{ message['content'] | trim }}"
    "{{ {'é': 1} | tojson }}<|end|>\n{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{{ strftime_now('%Y-%m-%d') }} {{ reasoning_effort }}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_rendering_is_transformers_own(tiny):
    """Our renderer without torch against apply_chat_template, on a template that uses what templates use."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    messages = [("system", "Be brief.  "), ("user", "ä <b> & 'x'\n\n  y")]
    conversation = [{"role": role, "content": text} for role, text in messages]
    moment = datetime.datetime(2025, 11, 6)
    for template in (TEMPLATE, tokenizer.chat_template):
        theirs = tokenizer.apply_chat_template(
            conversation, chat_template=template, tokenize=False, add_generation_prompt=True,
            reasoning_effort="high", strftime_now=moment.strftime,
        )  # fmt: skip
        assert render(template, messages, "high", "2025-11-06") == theirs
        assert "2025-11-06" in theirs and "high" in theirs
