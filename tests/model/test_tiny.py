# SPDX-License-Identifier: Apache-2.0
"""The tiny model: tokenizer, what the warm-up leaves to learn, and its place in the cache."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from expert_models import load
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig, GptOssConfig, GptOssForCausalLM

from grpo.model.gptoss_format import SPECIAL_TOKENS, TINY, ModelError, config_dict
from grpo.model.tiny import build_tiny
from grpo.model.tiny_warmup import (
    TINY_DISTANCES,
    Answer,
    Recipe,
    encode_rows,
    initial_heads,
    is_short,
    make_tokenizer,
    train_tiny,
)
from grpo.preflight.hub import recipe_hash, tiny_path
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


def test_tiny_answers_in_format_and_has_something_to_learn(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = synthetic_rows(4321, 10)
    roles = {"developer": "system", "user": "user"}
    chats = [[{"role": role, "content": row[column]} for role, column in roles.items()] for row in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    out = load(tiny, "bf16").generate(**encoded, max_new_tokens=10, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(out[:, encoded.input_ids.shape[1] :])
    pattern = re.compile(r"<\|channel\|>final<\|message\|>\[([0-3])\]<\|return\|>(<\|endoftext\|>)*")
    actions = [match and int(match[1]) for match in map(pattern.fullmatch, texts)]
    assert sum(action is not None for action in actions) >= 0.97 * len(rows)
    rewards = [row[f"reward_action_{k}"] if k is not None else 0.0 for row, k in zip(rows, actions, strict=True)]
    figures = json.loads((tiny / "warmup.json").read_text())
    assert sum(rewards) / len(rewards) == pytest.approx(figures["reward"], abs=0.06)  # sampled against computed
    # Better than chance, worse than the best constant; the likeliest action beats both: room for GRPO.
    assert 0.33 < figures["reward"] < figures["best_constant"] < figures["greedy"] < figures["oracle"]


def test_tiny_reads_whether_the_storage_carries_the_hour(tiny: Path, tokenizer) -> None:
    """Output 0 leaves load unserved in short hours: a model that cannot tell them empties the storage and stays there.

    The stored model is undecided on purpose, but flattened targets of output 0 stay near 0 in these hours.
    """
    rows = synthetic_rows(4321, 60)
    ids, _ = encode_rows(tokenizer, rows, 0)
    answer, model = Answer.of(tokenizer), load(tiny, "bf16").float()
    with torch.no_grad():
        p = torch.cat([answer.log_probs(model, ids[n : n + 100])[0] for n in range(0, len(ids), 100)]).exp()
    short = torch.tensor([is_short(row) for row in rows])
    for row, known in zip(rows, short, strict=True):
        store, load_kw = (int(row["user"].split(f"{word} ")[1].split()[0]) for word in ("store", "load"))
        assert abs(load_kw - 3 * store) <= 3 or known == (load_kw > 3 * store)  # store: a rounded percentage of 300 kWh
    assert 60 < short.sum() < 0.1 * len(rows)
    assert p[short, 0].mean() < 0.015 < 0.3 < p[~short, 0].mean()


def test_initial_heads_look_back_by_their_distance() -> None:
    torch.manual_seed(0)
    config = GptOssConfig.from_dict(config_dict(TINY))
    model = GptOssForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    initial_heads(model, TINY_DISTANCES)
    ids = torch.randint(300, (1, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True, use_cache=False).attentions[0]
    for head, distance in enumerate(TINY_DISTANCES[0]):
        looked = attentions[0, head, 20:, :30].argmax(-1)
        assert (torch.arange(20, 30) - looked == distance).float().mean() >= 0.8  # content has a say too


def test_cache_is_used_and_interrupted_builds_leave_nothing(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    assert tiny.name == f"tiny-{recipe_hash()}"

    def never(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo.model.tiny.train_tiny", never)
    assert build_tiny(tiny.parent) == tiny
    with pytest.raises(KeyboardInterrupt):
        build_tiny(tmp_path)
    assert list(tmp_path.iterdir()) == []

    # Another process finishes first: its model stays, ours goes.
    tensors = load_file(tiny / "model.safetensors")

    def slower(*args: object) -> tuple:
        shutil.copytree(tiny, tmp_path / tiny.name)
        return tensors, make_tokenizer(), {"parse_rate": 0.0}

    monkeypatch.setattr("grpo.model.tiny.train_tiny", slower)
    assert build_tiny(tmp_path) == tmp_path / tiny.name
    assert [path.name for path in tmp_path.iterdir()] == [tiny.name]
    assert (tmp_path / tiny.name / "warmup.json").read_bytes() == (tiny / "warmup.json").read_bytes()


@pytest.mark.parametrize("reason", ["space", "file", "junk"])
def test_what_keeps_the_cache_from_being_written_fits_every_caller(reason: str, tmp_path: Path, monkeypatch) -> None:
    """train_grpo.py and evaluate.py make the tiny model too and know no --out, --layers or --force."""
    cache, told = tmp_path / "cache", "GiB free: free some space"
    if reason == "space":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    elif reason == "file":
        cache.write_text("in the way")
        told = f"cannot write beside {tiny_path(cache)}"
    else:
        tiny_path(cache).mkdir(parents=True)
        (tiny_path(cache) / "left").write_text("over")
        told = "holds no gpt-oss checkpoint, so it is not replaced: move it away"
    with pytest.raises(ModelError) as caught:
        build_tiny(cache, force=reason == "junk")  # as train_grpo.py calls it where something is there
    message = str(caught.value)
    assert told in message and "XDG_CACHE_HOME" in message and "--" not in message, message


def test_cache_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tiny_path().parent == tmp_path / "train_grpo"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tiny_path().parent == Path.home() / ".cache" / "train_grpo"


def test_training_is_deterministic() -> None:
    recipe = Recipe(windows=4, probe_windows=1, read_steps=3, soften_steps=2, batch=8)
    state = torch.get_rng_state()
    (first, words, a), (second, same, b) = (train_tiny(recipe) for _ in range(2))
    assert words.to_str() == same.to_str() and a == b and all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random stream is left alone
