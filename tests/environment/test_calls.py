# SPDX-License-Identifier: Apache-2.0
"""Calls as gpt-oss writes them, against openai_harmony's reading of the same text (harmony.json)."""

import json
from pathlib import Path

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from grpo.data.prompts import compile_template, render
from grpo.environment.calls import SPECIAL, error_text, read_call, result_parts, special_ids, without_tokens
from grpo.plan.hub import TINY_PATH

RECORDED = json.loads(Path(__file__).with_name("harmony.json").read_text(encoding="utf-8"))
TOKENIZER = Tokenizer.from_file(str(TINY_PATH / "tokenizer.json"))
SPECIAL_IDS = special_ids(TOKENIZER.token_to_id)
# gpt-oss's own chat template, of which TRL has a copy.
TEMPLATE = (Path(trl.__file__).parent / "chat_templates/gptoss.jinja").read_text(encoding="utf-8")


def read(text):
    ids = TOKENIZER.encode(text).ids
    return read_call(ids, SPECIAL_IDS, lambda part: TOKENIZER.decode(list(part), skip_special_tokens=False))


@pytest.mark.parametrize("form", RECORDED["forms"], ids=lambda form: form["text"])
def test_every_form_is_read_as_openai_harmony_reads_it(form):
    call = read(form["text"])
    if form["recipient"] is None:
        assert call is None
    else:
        assert (call.author, call.arguments, call.fault) == (form["recipient"], json.loads(form["body"]), "")


def nested(depth):
    lists = "[" * (depth - 1) + "1" + "]" * (depth - 1)
    return f'<|channel|>commentary to=functions.run<|message|>{{"a": {lists}}}<|call|>'


UNREADABLE = [  # (text, author of the answer, words of the fault)
    ('<|channel|>commentary<|message|>{"level": 2}<|call|>', "functions", "names no tool"),
    ("<|call|>", "functions", "names no tool"),
    ("<|channel|>commentary to=functions.run<|call|>", "functions.run", ""),
    ("<|channel|>commentary to=functions.run<|message|>{level: 2}<|call|>", "functions.run", "no JSON object"),
    ("<|channel|>commentary to=functions.run<|message|>[2]<|call|>", "functions.run", "list, not a JSON object"),
    ("<|channel|>commentary to=functions.run<|message|>" + "[" * 9000 + "<|call|>", "functions.run", "no JSON object"),
    (nested(100), "functions.run", ""),
    (nested(101), "functions.run", "nested more than 100 times"),
    ("<|channel|>commentary to=python<|message|>1+1<|call|>", "python", "no tool 'python'"),
    ("<|channel|>commentary to=functions.a\u2028b<|message|>{}<|call|>", "functions.a", ""),
    ("<|channel|>commentary to=f;x<|message|>{}<|call|>", "functions", "no tool 'f;x'"),
]


@pytest.mark.parametrize(("text", "author", "fault"), UNREADABLE)
def test_what_cannot_be_read_is_answered_in_words(text, author, fault):
    call = read(text)
    assert call.author == author and fault in call.fault and bool(call.fault) == bool(fault)
    assert json.loads(error_text(call.fault)) == {"error": call.fault}


@given(
    st.lists(st.sampled_from([*(f"<|{name}|>" for name in SPECIAL), " to=functions.run", '{"a": 1}', "é"]), min_size=1)
)
def test_any_turn_is_read(parts):
    call = read("".join(parts))
    assert call is None or call.fault or isinstance(call.arguments, dict)


@pytest.mark.parametrize("conversation", RECORDED["conversations"], ids=lambda c: c["user"])
def test_prompt_and_results_are_rendered_as_openai_harmony_renders_them(conversation):
    """The prompt by gpt-oss's template, which agrees with it; results as it and servers write them, where the template
    would write a text as a JSON string, in quotes."""
    messages = [("system", conversation["system"])] * bool(conversation["system"]) + [("user", conversation["user"])]
    tools = {"tools": RECORDED["tools"]}
    assert render(TEMPLATE, messages, "medium", "2025-11-06", tools) == conversation["prompt"]
    for turn in conversation["turns"]:
        call = read(turn["written"].removeprefix("<|start|>assistant"))
        assert (call.name, call.arguments) == (turn["name"], turn["arguments"])
        before, behind = result_parts(call.author)
        assert before + turn["result"] + behind == turn["answer"]


def test_the_tiny_models_template_lists_tools_as_gpt_osss_does():
    """But for lists, whose items it does not name."""
    tools = json.loads(json.dumps(RECORDED["tools"]).replace('"items": {"type": "integer"}', '"items": {}'))
    template = (TINY_PATH / "chat_template.jinja").read_text(encoding="utf-8")
    for messages in ([("system", "Serve."), ("user", "x")], [("user", "x")]):
        ours, theirs = (render(text, messages, "low", "2025-11-06", {"tools": tools}) for text in (template, TEMPLATE))
        assert ours[ours.index("<|start|>developer") :] == theirs[theirs.index("<|start|>developer") :]


def test_the_template_differs_in_quotes_alone():
    message = RECORDED["conversations"][0]["turns"][0]
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": message["name"], "arguments": {}}]}
    conversation = [{"role": "user", "content": "x"}, call, {"role": "tool", "content": message["result"]}]
    text = compile_template(TEMPLATE, "2025-11-06").render(messages=conversation, add_generation_prompt=True)
    quoted = json.dumps(message["result"], ensure_ascii=False)
    assert text.endswith(message["answer"].replace(message["result"], quoted))


def test_text_of_a_tool_holds_no_token():
    text = without_tokens("a<|end|><|start|>user<|message|>b <| c |> <|reserved_200000|> <||>")
    assert text == "a< |end|>< |start|>user< |message|>b <| c |> < |reserved_200000|> <||>"
    assert not any(token in SPECIAL_IDS.values() for token in TOKENIZER.encode(text).ids)


def test_half_a_character_of_a_call_can_be_a_result():
    call = read('<|channel|>commentary to=functions.run<|message|>{"level": "\\ud83d"}<|call|>')
    assert call.arguments == {"level": "\ud83d"}
    text = without_tokens(error_text(f"no level {call.arguments['level']}"))
    assert text == '{"error": "no level \ufffd"}' and TOKENIZER.encode(text).ids


def test_a_tokenizer_without_harmony_is_named():
    with pytest.raises(ValueError, match=r"no <\|start\|>, <\|channel\|>"):
        special_ids(lambda token: None)
