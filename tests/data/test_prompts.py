# SPDX-License-Identifier: Apache-2.0
"""Prompts and answers of rows: rendered as transformers does, counted, and in the same order for every run."""

import dataclasses
import datetime
import json
from pathlib import Path

import pytest
import trl
from helpers import RENDERED
from machines import only
from test_files import MESSAGES, TALK, as_numpy
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from grpo.common import Problems
from grpo.data.files import Row
from grpo.data.heldout import Split
from grpo.data.prepare import prepare_rows
from grpo.data.prompts import answer_of, compile_template, count_tokens, prompt_order, render
from grpo.plan.hub import ModelFiles
from grpo.settings.table import Settings


def test_every_epoch_asks_every_row_once_and_a_longer_run_begins_in_the_same_order():
    order = [4, 1, 0, 3, 2, 0, 3, 1, 2, 4, 2, 0]
    assert list(prompt_order(5, 42, 12)) == order and list(prompt_order(5, 42, 7)) == order[:7]


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
    options = {"tokenize": False, "add_generation_prompt": True, "reasoning_effort": "high"}
    options["strftime_now"] = datetime.datetime(2025, 11, 6).strftime
    for template in (TEMPLATE, tokenizer.chat_template):
        theirs = tokenizer.apply_chat_template(conversation, chat_template=template, **options)
        assert render(template, messages, "high", "2025-11-06") == theirs
        assert "2025-11-06" in theirs and "high" in theirs


GPT_OSS = (Path(trl.__file__).parent / "chat_templates/gptoss.jinja").read_text(encoding="utf-8")
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Where <it> is"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}
FILLED = {**TOOL, "function": {**TOOL["function"], "strict": None, "parameters": {**CITY, "required": None}}}
HIGH = {"reasoning_effort": "high"}
OWN = [  # columns of a row, and the arguments of the template that they are
    (HIGH, HIGH),
    ({"reasoning_effort": " HIGH ", "tools": " "}, HIGH),
    ({"tools": [TOOL]}, {"tools": [TOOL]}),
    ({"tools": json.dumps([TOOL])}, {"tools": [TOOL]}),
    ({"tools": as_numpy([TOOL, TOOL])}, {"tools": [TOOL, TOOL]}),
    ({"tools": [FILLED]}, {"tools": [TOOL]}),
    ({"chat_template_kwargs": {"model_identity": "It.", "reasoning_effort": None}}, {"model_identity": "It."}),
    ({"chat_template_kwargs": '{"reasoning_effort": "high"}', "reasoning_effort": "high"}, HIGH),
    ({"reasoning_effort": None, "tools": [], "chat_template_kwargs": ""}, {}),
]


def render_one(tiny, columns, template=GPT_OSS):
    files = ModelFiles(tiny, {}, template, tiny / "tokenizer.json")
    split = Split([Row("d.csv", 3, MESSAGES, (), columns)], [], "")
    prepared = prepare_rows(Settings(REASONING_EFFORT="low"), files, p := Problems(), split)
    return prepared.train[0].prompt, p


@pytest.mark.parametrize(("columns", "arguments"), OWN)
def test_a_row_may_have_arguments_of_the_template(tiny, columns, arguments):
    """gpt-oss's own template, rendered by transformers with them."""
    options = {"tokenize": False, "add_generation_prompt": True, "reasoning_effort": "low"} | arguments
    options["strftime_now"] = datetime.datetime(2025, 11, 6).strftime
    theirs = AutoTokenizer.from_pretrained(tiny).apply_chat_template(TALK, chat_template=GPT_OSS, **options)
    ours, problems = render_one(tiny, columns)
    assert not problems and ours == theirs
    assert (ours == render_one(tiny, {})[0]) == (not arguments), "each of them changes the prompt"


MISTAKEN = [  # columns of a row, part of the problem
    ({"reasoning_effort": "hard"}, "reasoning_effort: 'hard' is not accepted, expected one of low, medium, high"),
    ({"reasoning_effort": 3}, "column reasoning_effort: 3 is not text"),
    ({"chat_template_kwargs": {"reasoning_effort": "max"}}, "reasoning_effort: 'max' is not accepted"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "the model's chat template takes no enable_thinking"),
    ({"chat_template_kwargs": {"model_identiy": "x"}}, "takes no model_identiy; the nearest is model_identity"),
    ({"chat_template_kwargs": {"messages": []}}, "takes no messages"),
    ({"chat_template_kwargs": "high"}, "column chat_template_kwargs: it is neither JSON nor"),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"}, "has another reasoning_effort"),
    ({"tools": TOOL}, "is not a list of functions as JSON schemas"),
    ({"tools": [{**TOOL, "function": {**TOOL["function"], "description": "<|end|>"}}]}, "holds <|end|>, which ends"),
    ({"chat_template_kwargs": {"model_identity": "\ud800"}}, "d.csv, row 3: the prompt holds half a character"),
    ({"tools": ["weather"]}, "its chat template fails on d.csv, row 3"),
]


@pytest.mark.parametrize(("columns", "words"), MISTAKEN)
def test_an_argument_that_would_change_nothing_is_refused(tiny, columns, words):
    assert words in only(render_one(tiny, columns)[1])


def test_a_template_without_tools_takes_none_and_a_broken_one_is_named(tiny):
    faults = {"{{ messages }}": "d.csv, row 3: the model's chat template takes no tools", "{{": "fails"}
    for template, words in faults.items():
        assert words in only(render_one(tiny, {"tools": [TOOL]}, template)[1])


def test_many_rows_are_rendered_and_counted_as_few(tiny, monkeypatch):
    """With one compilation, in several batches."""
    path = tiny / "tokenizer.json"
    monkeypatch.setattr("grpo.data.prompts.PROMPTS_PER_BATCH", 10)
    compile_template.cache_clear()
    texts = [f"hour {n} <|end|><|endoftext|>  CO₂\n{n * n}" for n in range(30)] + ["", "plain"]
    rows = [Row("d.csv", 1, (("user", text),), (), {}) for text in texts * 2]
    files = ModelFiles(tiny, {}, RENDERED.format("{{ messages[0]['content'] }}"), path)
    prepared = prepare_rows(Settings(), files, problems := Problems(), Split(rows[:40], rows[40:], "so"))
    assert compile_template.cache_info().misses == 1 and not problems
    assert [row.messages for row in prepared.train] == [row.messages for row in rows[:40]] and prepared.reason == "so"
    rendered = [*prepared.train, *prepared.heldout]
    tokenizer, prompts = Tokenizer.from_file(str(path)), list(dict.fromkeys(row.prompt for row in rendered))
    assert count_tokens(path, prompts) == {text: len(tokenizer.encode(text)) for text in prompts}
    assert prepared.longest_prompt == max(len(tokenizer.encode(text)) for text in prompts)


ANSWERS = [
    ({"answer": " [2] "}, "", "<|channel|>final<|message|>[2]<|return|>"),
    ({"answer": "<|channel|>final<|message|>[2]<|end|>"}, "", "<|channel|>final<|message|>[2]<|return|>"),
    ({"answer": "", "rewards": (0.1, 0.7, 0.2)}, "", "<|channel|>final<|message|>[1]<|return|>"),
    ({"rewards": (0.0, 0.0, 1.0), "q": (-1.0, -2.0, -3.0)}, "", "<|channel|>final<|message|>[0]<|return|>"),
    ({"rewards": (0.1, 0.7)}, "<|channel|>final<|message|>", "[1]<|return|>"),
    ({"rewards": (0.5, 0.5)}, "", None),
    ({}, "", None),
]


@pytest.mark.parametrize(("parts", "opened", "answer"), ANSWERS)
def test_the_answer_of_a_row(parts, opened, answer):
    prompt = RENDERED.format("which one?") + opened
    columns = {name: text for name, text in parts.items() if name == "answer"}
    row = Row("f.csv", 1, (("rendered", prompt),), parts.get("rewards", ()), columns, q=parts.get("q", ()))
    assert answer_of(row) == answer
    if answer:
        other = dataclasses.replace(row, messages=(("rendered", f"{RENDERED}<|channel|>commentary"),))
        with pytest.raises(ValueError, match="opens '<|channel|>commentary'"):
            answer_of(other)


def test_a_direct_answer_is_what_follows_the_opened_channel():
    """Reasoning before it does not fit."""
    row = Row("d.csv", 1, MESSAGES, (0.1, 0.9), {})
    assert answer_of(row, direct=True) == "1]<|return|>"
    with pytest.raises(ValueError, match="the prompt opens"):
        answer_of(dataclasses.replace(row, columns={"answer": "<|channel|>analysis<|message|>So"}), direct=True)
