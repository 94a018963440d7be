# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: written as transformers loads them, checked, and never half-written or replaced by accident."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from grpo.model.checkpoint import check_checkpoint
from grpo.model.gptoss_format import ModelError, Shape
from grpo.model.random_weights import MATRIX_GAIN, write_full
from grpo.plan.hub import TINY_PATH

SMALL = Shape(
    layers=2, hidden=64, intermediate=96, experts=4, experts_per_token=2, heads=4, kv_heads=2, head_dim=16, vocab=640
)


@pytest.fixture(scope="module", autouse=True)
def small_shards(tiny):  # which is made with ordinary ones
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.model.checkpoint.SHARD_BYTES", 100_000)
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in several shards, with the tiny model's tokenizer from an .xz."""
    source = tmp_path_factory.mktemp("tokenizer")
    (source / "tokenizer.json.xz").write_bytes(lzma.compress((TINY_PATH / "tokenizer.json").read_bytes()))
    return write_full(tmp_path_factory.mktemp("full") / "model", SMALL, source)


def load(directory: Path):
    config = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(directory, quantization_config=config, dtype=torch.bfloat16).eval()


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """Tensors by their names in the model: (E, in, out) where the file holds blocks and scales."""
    tensors = {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        tensors[name] = convert_moe_packed_tensors(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
    return tensors


def test_checkpoint_loads_bit_for_bit(small: Path) -> None:
    model, tensors = load(small), stored(small)
    loaded, rope = model.state_dict(), model.config.rope_parameters
    assert tensors.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"], rope["truncate"]) == ("yarn", 150000.0, 32.0, False)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]


def test_random_weights_are_sane(small: Path) -> None:
    tensors = stored(small)
    for n in range(SMALL.layers):
        layer = f"model.layers.{n}."
        for name, gain, fan_in in (
            ("mlp.experts.gate_up_proj", MATRIX_GAIN["gate_up_proj"], SMALL.hidden),
            ("mlp.experts.down_proj", MATRIX_GAIN["down_proj"], SMALL.intermediate),
            ("self_attn.o_proj.weight", MATRIX_GAIN["o_proj"], SMALL.heads * SMALL.head_dim),
        ):
            assert tensors[layer + name].float().std().item() == pytest.approx(gain / fan_in**0.5, rel=0.05)
    with torch.no_grad():
        logits = load(small)(torch.arange(40).unsqueeze(0)).logits
    assert torch.isfinite(logits).all() and 0 < logits.float().std() < 10


def test_same_seed_same_bytes(small: Path, tmp_path: Path) -> None:
    other = write_full(tmp_path / "again", SMALL, small)
    changed = write_full(tmp_path / "other", SMALL, small, seed=1)
    names = sorted(path.name for path in small.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert all((small / name).read_bytes() == (other / name).read_bytes() for name in names)
    assert any((small / name).read_bytes() != (changed / name).read_bytes() for name in names)
    assert len(list(small.glob("*.safetensors"))) > 1


def cut_short(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)


def bend_a_shape(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].replace(b'"shape":[640,64]', b'"shape":[64,640]')
    path.write_bytes(data[:8] + header + data[8 + length :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "cannot read .*model-.*safetensors"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "index.json does not say .* is None, not "),
        (bend_a_shape, r"1 problems: model.embed_tokens.weight is \('BF16', 64, 640\), not \('BF16', 640, 64\)"),
        (lambda folder: (folder / "extra.safetensors").write_bytes(b"no"), "cannot read .*extra.safetensors"),
    ],
    ids=["cut short", "lost", "bent", "junk"],
)
def test_check_finds_damage(small: Path, tmp_path: Path, damage, message: str) -> None:
    damage(shutil.copytree(small, tmp_path / "model"))
    with pytest.raises(ModelError, match=message):
        check_checkpoint(tmp_path / "model")


def test_tokenizer_must_fit(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ids up to 591, the model 500"):
        write_full(tmp_path / "a", dataclasses.replace(SMALL, vocab=500), small)
    content = json.loads((small / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"lacks Harmony's special tokens <\|call\|>"):
        write_full(tmp_path / "a", SMALL, tmp_path)


def test_force_replaces_a_checkpoint(small: Path, tmp_path: Path) -> None:
    out = write_full(tmp_path / "model", SMALL, small)
    (out / "left over").write_text("")
    with pytest.raises(ModelError, match="not empty"):
        write_full(out, SMALL, small)
    write_full(out, SMALL, small, force=True)
    assert not (out / "left over").exists() and [path.name for path in tmp_path.iterdir()] == ["model"]
