# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: written as transformers loads them, checked, and never replaced by accident."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from grpo.model.checkpoint import check_checkpoint, locked, new_directory, remove_leftovers
from grpo.model.gptoss_format import ModelError, Shape
from grpo.model.random_weights import MATRIX_GAIN, write_full
from grpo.plan.hub import TINY_PATH

SMALL = Shape(
    layers=2, hidden=64, intermediate=96, experts=4, experts_per_token=2, heads=4, kv_heads=2, head_dim=16, vocab=800
)


@pytest.fixture(scope="module", autouse=True)
def small_shards():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.model.checkpoint.SHARD_BYTES", 100_000)
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random checkpoint in several shards, with the tiny model's tokenizer from an .xz."""
    source = tmp_path_factory.mktemp("tokenizer")
    (source / "tokenizer.json.xz").write_bytes(lzma.compress((TINY_PATH / "tokenizer.json").read_bytes()))
    return write_full(tmp_path_factory.mktemp("full") / "model", SMALL, source)


def test_transformers_loads_random_weights_of_the_right_size_bit_for_bit(small):
    config = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(small, quantization_config=config, dtype=torch.bfloat16).eval()
    loaded, files = model.state_dict(), list(small.glob("*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        tensors[name] = convert_moe_packed_tensors(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
    assert len(files) > 1 and tensors.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    for name, fan_in in (
        ("mlp.experts.gate_up_proj", SMALL.hidden),
        ("mlp.experts.down_proj", SMALL.intermediate),
        ("self_attn.o_proj.weight", SMALL.heads * SMALL.head_dim),
    ):
        gain = MATRIX_GAIN[name.removesuffix(".weight").rpartition(".")[2]]
        assert tensors[f"model.layers.1.{name}"].float().std().item() == pytest.approx(gain / fan_in**0.5, rel=0.05)
    with torch.no_grad():
        assert 0 < model(torch.arange(40).unsqueeze(0)).logits.float().std() < 10


def test_a_seed_decides_every_byte(small, tmp_path):
    again = write_full(tmp_path / "again", SMALL, small)
    other = write_full(tmp_path / "other", SMALL, small, seed=1)
    first, second, third = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (small, again, other)
    )
    assert first == second != third


def cut_short(folder):
    path = next(folder.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)


def bend_a_shape(folder):
    path = min(folder.glob("*.safetensors"))
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].T.contiguous()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "cannot read .*model-.*safetensors"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "index.json does not say .* is None, not "),
        (bend_a_shape, r"1 problems: model.embed_tokens.weight is \('BF16', 64, 800\), not \('BF16', 800, 64\)"),
    ],
)
def test_check_finds_damage(small, tmp_path, damage, message):
    damage(shutil.copytree(small, tmp_path / "model"))
    with pytest.raises(ModelError, match=message):
        check_checkpoint(tmp_path / "model")


def test_tokenizer_must_fit(small, tmp_path):
    with pytest.raises(ModelError, match="ids up to 791, the model 700"):
        write_full(tmp_path / "a", dataclasses.replace(SMALL, vocab=700), small)
    content = json.loads((small / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"lacks Harmony's special tokens <\|call\|>"):
        write_full(tmp_path / "a", SMALL, tmp_path)


def test_force_replaces_a_checkpoint(small, tmp_path):
    out = shutil.copytree(small, tmp_path / "model")
    (out / "left over").write_text("")
    with pytest.raises(ModelError, match="not empty"):
        write_full(out, SMALL, small)
    write_full(out, SMALL, small, force=True)
    assert not (out / "left over").exists() and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    """A folder that a living process writes stays; the earlier checkpoint comes back where nothing replaced it."""
    out, left, busy = tmp_path / "model", tmp_path / ".model-1.tmp", tmp_path / ".model-2.tmp"
    for folder in (left, busy, tmp_path / ".model-1.old", tmp_path / ".other-1.tmp"):
        folder.mkdir()
    (tmp_path / ".model-1.old" / "config.json").write_text('{"model_type": "gpt_oss"}')
    with locked(busy) as is_free:
        assert is_free
        remove_leftovers(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model-2.tmp", ".other-1.tmp", "model"]
    remove_leftovers(out)
    assert not busy.exists() and (out / "config.json").is_file()


@pytest.mark.parametrize(("umask", "modes"), [(0o022, (0o755, 0o644)), (0o077, (0o700, 0o600))])
def test_a_written_folder_is_as_readable_as_the_umask_says(tmp_path, umask, modes):
    before = os.umask(umask)
    try:
        with new_directory(tmp_path / "model", force=False) as folder:
            (folder / "weights").write_text("x")
    finally:
        os.umask(before)
    paths = tmp_path / "model", tmp_path / "model" / "weights"
    assert tuple(path.stat().st_mode & 0o777 for path in paths) == modes
