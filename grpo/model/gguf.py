# SPDX-License-Identifier: Apache-2.0
"""A gpt-oss as a GGUF file for llama.cpp: experts stay in MXFP4, bit for bit, the rest is BF16 or float32.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3; names, keys and types are those that
llama.cpp's own converter gives gpt-oss (conversion/gpt_oss.py there).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo.plan.hub import read_json

F32, BF16, MXFP4 = 0, 30, 39  # ggml's tensor types
UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9  # GGUF's value types
MOSTLY_MXFP4_MOE, QUANTIZATION_VERSION, ALIGNMENT = 38, 2, 32
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn": "attn_sinks", "mlp.router": "ffn_gate_inp",
}  # fmt: skip

Read = Callable[[str], torch.Tensor]  # a tensor of the checkpoint by its name
# Name in GGUF, type, shape in elements, maker of its bytes.
Part = tuple[str, int, list[int], Callable[[], torch.Tensor]]


def ggml_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks (..., B, 16) and scales (..., B) of a checkpoint as ggml's (..., B, 17): the scale before the codes. There
    elements 2i and 2i + 1 share byte i, here elements i and i + 16; the codes and the scale's bias are the same."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.cat((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), -1)


def parts(shapes: Mapping[str, Sequence[int]], read: Read) -> Iterator[Part]:
    """Every tensor of the file, for a checkpoint whose tensors have these shapes by name. The rows of gate_up_proj alternate
    gate, up; here each has its own tensor."""
    for name, shape in shapes.items():
        layer, stem, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(\w+)", name).groups()
        block = f"blk.{layer}." if layer else ""
        if stem != "mlp.experts":
            target = f"{block}{NAMES[stem]}.{'weight' if kind == 'sinks' else kind}"
            exact = len(shape) == 1 or stem == "mlp.router"
            dtype = torch.float32 if exact else torch.bfloat16
            yield target, F32 if exact else BF16, list(shape), lambda n=name, d=dtype: read(n).to(d)
        elif not kind.endswith("_scales"):
            one = [("gate", slice(0, None, 2)), ("up", slice(1, None, 2))]
            if kind.startswith("down"):
                one = [("down", slice(None))]
            for which, rows in one:
                target, count = f"{block}ffn_{which}_exps", shape[1] // len(one)
                if kind.endswith("_bias"):
                    yield f"{target}.bias", F32, [shape[0], count], lambda n=name, r=rows: read(n)[:, r].float()
                else:
                    yield (
                        f"{target}.weight",
                        MXFP4,
                        [shape[0], count, shape[2] * 32],
                        lambda n=name, r=rows: ggml_mxfp4(read(n)[:, r], read(n.replace("_blocks", "_scales"))[:, r]),
                    )


def part_bytes(kind: int, shape: Sequence[int]) -> int:
    """Of a tensor of ggml's type `kind`."""
    elements = torch.Size(shape).numel()
    return elements // 32 * 17 if kind == MXFP4 else elements * {F32: 4, BF16: 2}[kind]


def metadata(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The model's sizes under llama.cpp's keys, from its config.json."""
    yarn = config.get("rope_scaling") or config["rope_parameters"]
    sizes = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config.get("rope_theta") or yarn["rope_theta"]),
        "rope.scaling.type": yarn["rope_type"],
        "rope.scaling.factor": float(yarn["factor"]),
        "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(yarn.get("beta_fast", 32)),
        "rope.scaling.yarn_beta_slow": float(yarn.get("beta_slow", 1)),
    }
    general = {"architecture": "gpt-oss", "type": "model", "name": name, "file_type": MOSTLY_MXFP4_MOE}
    general["quantization_version"] = QUANTIZATION_VERSION
    return {f"general.{key}": value for key, value in general.items()} | {
        f"gpt-oss.{key}": value for key, value in sizes.items()
    }


def vocabulary(folder: Path, size: int, template: str | None) -> dict[str, Any]:
    """The tokenizer in `folder` under llama.cpp's keys, filled up to `size` tokens; it is declared as gpt-oss's own
    (`gpt-4o` there)."""
    found, about = read_json(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json")
    ids, tokens, kinds = dict(found["model"]["vocab"]), [f"[PAD{n}]" for n in range(size)], [UNUSED] * size
    for token, number in ids.items():
        tokens[number], kinds[number] = token, NORMAL
    for one in found["added_tokens"]:
        ids[one["content"]], tokens[one["id"]] = one["id"], one["content"]
        special = one["special"] or re.fullmatch(r"<\|.*\|>", one["content"])
        kinds[one["id"]] = CONTROL if special else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in found["model"]["merges"]]
    values: dict[str, Any] = {"model": "gpt2", "pre": "gpt-4o", "tokens": tokens, "token_type": kinds, "merges": merges}
    for key, gguf in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        text = about.get(key)
        text = text.get("content") if isinstance(text, dict) else text
        if text in ids:
            values[f"{gguf}_token_id"] = ids[text]
    values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return values | ({"tokenizer.chat_template": template} if template else {})


def text_bytes(text: str) -> bytes:
    """A text behind its length."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Any) -> bytes:
    """A value behind its type: text, whole number, float, or a list of texts or whole numbers."""
    if isinstance(value, list):
        texts = isinstance(value[0], str)
        items = map(text_bytes, value) if texts else (struct.pack("<i", one) for one in value)
        return struct.pack("<IIQ", ARRAY, STRING if texts else INT32, len(value)) + b"".join(items)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text_bytes(value)
    return struct.pack("<If", FLOAT32, value) if isinstance(value, float) else struct.pack("<II", UINT32, value)


def write_gguf(path: Path, values: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], read: Read) -> None:
    """Write the file: metadata `values`, then every tensor of a checkpoint with these `shapes`; memory holds one tensor."""
    plan, offset, head = list(parts(shapes, read)), 0, []
    for name, kind, shape, _ in plan:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))  # the innermost first
        head.append(text_bytes(name) + sizes + struct.pack("<IQ", kind, offset))
        offset += -(-part_bytes(kind, shape) // ALIGNMENT) * ALIGNMENT
    with path.open("xb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(plan), len(values)))
        file.writelines(text_bytes(key) + value_bytes(value) for key, value in values.items())
        file.writelines(head)
        for _, kind, shape, make in plan:
            file.write(bytes(-file.tell() % ALIGNMENT))
            data = make().contiguous().view(torch.uint8).numpy()
            if data.nbytes != part_bytes(kind, shape):
                raise ValueError(f"{path.name}: a tensor of shape {shape} has {data.nbytes} bytes")
            file.write(data)
        file.write(bytes(-file.tell() % ALIGNMENT))
