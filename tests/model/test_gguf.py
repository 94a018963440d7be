# SPDX-License-Identifier: Apache-2.0
"""GGUF: read back as its specification says, every tensor is that of the checkpoint."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from grpo.model.experts import dequantize_mxfp4
from grpo.model.gguf import metadata, vocabulary, write_gguf
from grpo.plan.hub import read_json

KVALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # ggml's, twice the codes' values
SCALARS = {4: "<I", 5: "<i", 6: "<f"}


class Reader:
    """A GGUF file's metadata and tensors (as float32 numpy arrays), by the specification's structs."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        magic, version, tensors, pairs = self.take("<4sIQQ")
        assert (magic, version) == (b"GGUF", 3)
        self.values = {self.text(): self.value(self.take("<I")[0]) for _ in range(pairs)}
        about = [(self.text(), self.take(f"<{self.take('<I')[0]}Q"), *self.take("<IQ")) for _ in range(tensors)]
        start = -(-self.at // 32) * 32
        assert all(offset % 32 == 0 for *_, offset in about) and len(data) % 32 == 0
        self.tensors = {name: self.tensor(sizes[::-1], kind, start + offset) for name, sizes, kind, offset in about}
        self.kinds = {name: kind for name, _, kind, _ in about}

    def take(self, form: str) -> tuple:
        self.at += struct.calcsize(form)
        return struct.unpack_from(form, self.data, self.at - struct.calcsize(form))

    def text(self) -> str:
        (size,) = self.take("<Q")
        return self.take(f"<{size}s")[0].decode()

    def value(self, kind: int) -> object:
        if kind == 9:
            kind, count = self.take("<IQ")
            return [self.value(kind) for _ in range(count)]
        return self.text() if kind == 8 else self.take(SCALARS[kind])[0]

    def tensor(self, shape: tuple[int, ...], kind: int, at: int) -> np.ndarray:
        count = int(np.prod(shape))
        if kind == 0:
            return np.frombuffer(self.data, "<f4", count, at).reshape(shape)
        if kind == 30:
            return (np.frombuffer(self.data, "<u2", count, at).astype("<u4") << 16).view("<f4").reshape(shape)
        assert kind == 39
        blocks = np.frombuffer(self.data, "u1", count // 32 * 17, at).reshape(-1, 17)
        codes, scale = blocks[:, 1:], 2.0 ** (blocks[:, :1].astype(int) - 128)
        return (np.concatenate([KVALUES[codes & 15], KVALUES[codes >> 4]], 1) * scale).astype("<f4").reshape(shape)


@pytest.fixture(scope="module")
def file(tiny, tmp_path_factory):
    path, tensors = tmp_path_factory.mktemp("gguf") / "model.gguf", load_file(tiny / "model.safetensors")
    config = read_json(tiny / "config.json")
    values = metadata(config, "tiny") | vocabulary(tiny, config["vocab_size"], "{{ messages }}")
    write_gguf(path, values, {name: tensor.shape for name, tensor in tensors.items()}, tensors.__getitem__)
    return Reader(path.read_bytes())


def test_every_tensor_is_the_checkpoints(tiny, file):
    stored = load_file(tiny / "model.safetensors")
    tensors = {name: torch.tensor(value) for name, value in file.tensors.items()}

    def compare(name: str, expected: torch.Tensor, kind: int) -> None:
        assert file.kinds[name] == kind and torch.equal(tensors.pop(name), expected.float()), name

    names = {"attn_output": "self_attn.o_proj", "ffn_gate_inp": "mlp.router"}
    names |= {f"attn_{kind}": f"self_attn.{kind}_proj" for kind in "qkv"}
    norms = {"attn_norm": "input_layernorm.weight", "post_attention_norm": "post_attention_layernorm.weight"}
    norms |= {"attn_sinks": "self_attn.sinks"}
    for layer in range(3):
        block, source = f"blk.{layer}.", f"model.layers.{layer}."
        for target, name in names.items():
            compare(f"{block}{target}.weight", stored[f"{source}{name}.weight"], 0 if "router" in name else 30)
            compare(f"{block}{target}.bias", stored[f"{source}{name}.bias"], 0)
        for target, name in norms.items():
            compare(f"{block}{target}.weight", stored[f"{source}{name}"], 0)
        experts = f"{source}mlp.experts."
        for part, first, step, name in (("gate", 0, 2, "gate_up"), ("up", 1, 2, "gate_up"), ("down", 0, 1, "down")):
            weights = dequantize_mxfp4(stored[f"{experts}{name}_proj_blocks"], stored[f"{experts}{name}_proj_scales"])
            compare(f"{block}ffn_{part}_exps.weight", weights.transpose(1, 2)[:, first::step], 39)
            compare(f"{block}ffn_{part}_exps.bias", stored[f"{experts}{name}_proj_bias"][:, first::step], 0)
    compare("token_embd.weight", stored["model.embed_tokens.weight"], 30)
    compare("output_norm.weight", stored["model.norm.weight"], 0)
    compare("output.weight", stored["lm_head.weight"], 30)
    assert not tensors


def test_metadata_and_tokens(tiny, file):
    values, tokenizer = file.values, AutoTokenizer.from_pretrained(tiny)
    assert values["general.architecture"] == "gpt-oss" and values["tokenizer.chat_template"] == "{{ messages }}"
    expected = {
        "block_count": 3, "expert_used_count": 2, "attention.head_count_kv": 2, "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.yarn_beta_fast": 32.0,
    }  # fmt: skip
    assert {name: values[f"gpt-oss.{name}"] for name in expected} == expected
    assert values["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(792))
    assert values["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    control = [n for n, kind in enumerate(values["tokenizer.ggml.token_type"]) if kind == 3]
    assert control == sorted(tokenizer.added_tokens_decoder)
    left, right = values["tokenizer.ggml.merges"][0].split(" ")
    assert left + right in tokenizer.get_vocab()
