# SPDX-License-Identifier: Apache-2.0
"""The tiny model: tokenizer, what the shipped one knows and does not know, and how it is made."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, GptOssForCausalLM

from grpo.model.gptoss_format import SPECIAL_TOKENS, TINY
from grpo.model.load import load_model
from grpo.model.tiny import RECIPE, make_tokenizer, write_tiny
from grpo.model.warmup import figures
from grpo.model.warmup_rows import PROBE_SEED, Answer, Rows, warmup_rows
from grpo.plan.hub import read_json
from grpo.tasks.tes.dataset import synthetic_rows

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@settings(deadline=None, max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_numbers_are_single_tokens_and_special_tokens_come_last(tokenizer) -> None:
    for n in range(101):
        assert len(tokenizer.encode(str(n)).ids) == 1
        assert len(tokenizer.encode(f" {n}").ids) == 1
        assert tokenizer.decode(tokenizer.encode(f"a {n}b{n}").ids) == f"a {n}b{n}"
    size = tokenizer.get_vocab_size()
    assert size == TINY.vocab
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(size - len(ids), size))


def test_special_tokens_of_the_tokenizer(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == ("<|return|>", "<|endoftext|>", "left")
    generation = GenerationConfig.from_pretrained(tiny)
    assert tokenizer.convert_ids_to_tokens(generation.eos_token_id) == ["<|return|>", "<|endoftext|>", "<|call|>"]
    assert tokenizer.decode(tokenizer("<|channel|>final [3]").input_ids, skip_special_tokens=True) == "final [3]"


@pytest.fixture(scope="module")
def probe(tokenizer) -> Rows:
    return Rows(warmup_rows((PROBE_SEED + 100, 10, "compact")), tokenizer, Answer.of(tokenizer), "cpu")


@pytest.fixture(scope="module")
def model(tiny: Path) -> GptOssForCausalLM:
    return load_model(str(tiny), read_json(tiny / "config.json"), "eager").float()


def test_the_shipped_model_is_small_and_of_this_recipe(tiny: Path, tokenizer) -> None:
    assert sum(path.stat().st_size for path in tiny.iterdir()) < 1e6
    assert read_json(tiny / "config.json")["num_hidden_layers"] == TINY.layers
    assert Tokenizer.from_file(str(tiny / "tokenizer.json")).get_vocab() == tokenizer.get_vocab()
    assert json.loads((tiny / "warmup.json").read_text())["steps"] == RECIPE.steps


def test_it_knows_the_format_and_not_the_choice(model, probe, tokenizer) -> None:
    """Exactly, on rows of its own: it answers in the right form, names every action as often as another, and its likeliest
    action earns no more than the best constant one. What a run shows afterwards was learned by GRPO."""
    found = figures(model, probe, Answer.of(tokenizer))
    assert found["parse_rate"] > 0.99
    assert found["reward"] == pytest.approx(found["random"], abs=0.01)
    assert found["greedy"] <= found["best_constant"] < 0.7 * found["oracle"]


def test_sampled_answers_agree_with_the_figures(tiny: Path, model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = synthetic_rows(4321, 4)
    roles = {"developer": "system", "user": "user"}
    chats = [[{"role": role, "content": row[column]} for role, column in roles.items()] for row in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    out = model.generate(**encoded, max_new_tokens=10, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(out[:, encoded.input_ids.shape[1] :])
    pattern = re.compile(r"<\|channel\|>final<\|message\|>\[([0-3])\]<\|return\|>(<\|endoftext\|>)*")
    actions = [int(match[1]) for match in map(pattern.fullmatch, texts) if match]
    assert len(actions) >= 0.95 * len(rows)
    # Of 120 answers 30 name each action, give or take four standard deviations of 4.7.
    assert all(abs(actions.count(k) - len(actions) / 4) < 19 for k in range(4))


def test_making_it_is_deterministic_and_leaves_the_callers_random_stream_alone(tmp_path: Path) -> None:
    recipe, state = replace(RECIPE, windows=2, probe_windows=1, steps=4, batch=8), torch.get_rng_state()
    for name in ("first", "second"):
        write_tiny(tmp_path / name, recipe, log=lambda line: None)
    for name in ("model.safetensors", "warmup.json", "tokenizer.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert torch.equal(torch.get_rng_state(), state)
