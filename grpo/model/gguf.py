# SPDX-License-Identifier: Apache-2.0
"""A gpt-oss as a GGUF file for llama.cpp: experts stay in MXFP4, bit for bit, the rest is BF16 or float32.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3; names, keys and types are those that
llama.cpp's own converter gives gpt-oss (conversion/gpt_oss.py there).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo.plan.hub import read_json

F32, BF16, MXFP4 = 0, 30, 39  # ggml's tensor types
UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9  # GGUF's value types
MOSTLY_MXFP4_MOE, QUANTIZATION_VERSION, ALIGNMENT = 38, 2, 32
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn": "attn_sinks", "mlp.router": "ffn_gate_inp",
}  # fmt: skip
SIZES = {  # llama.cpp's keys, and those of config.json
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "expert_feed_forward_length": "intermediate_size",
    "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}  # fmt: skip
Value = str | int | float | list[str] | list[int]  # of metadata
Read = Callable[[str], torch.Tensor]  # a tensor of the checkpoint by its name
# Name in GGUF, type, shape in elements, maker of its bytes.
Part = tuple[str, int, list[int], Callable[[], torch.Tensor]]


def ggml_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks (..., B, 16) and scales (..., B) of a checkpoint as ggml's (..., B, 17): the scale before the codes. Here
    elements 2i and 2i + 1 share byte i, there elements i and i + 16; the codes and the scale's bias are the same."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.cat((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), -1)


def file_tensor(read: Read, name: str, kind: int, rows: slice | None = None) -> torch.Tensor:
    """A tensor of the checkpoint as the file holds it in ggml's type `kind`: all of it, or these rows of each
    expert."""
    if kind == MXFP4:
        return ggml_mxfp4(read(name)[:, rows], read(name.replace("_blocks", "_scales"))[:, rows])
    tensor = read(name) if rows is None else read(name)[:, rows]
    return tensor.to(torch.float32 if kind == F32 else torch.bfloat16)


def parts(shapes: Mapping[str, Sequence[int]], read: Read) -> Iterator[Part]:
    """Every tensor of the file, for a checkpoint whose tensors have these shapes by name. The rows of gate_up_proj
    alternate gate, up; in the file each has its own tensor."""
    for name, shape in shapes.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        block = f"blk.{layer[1]}." if layer else ""
        stem, _, last = name[layer.end() if layer else 0 :].rpartition(".")
        if stem != "mlp.experts":
            kind = F32 if len(shape) == 1 or stem == "mlp.router" else BF16
            target = f"{block}{NAMES[stem]}.{'weight' if last == 'sinks' else last}"
            yield target, kind, list(shape), partial(file_tensor, read, name, kind)
        elif not last.endswith("_scales"):
            halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
            if last.startswith("down"):
                halves = {"down": slice(None)}
            for half, rows in halves.items():
                target, sizes = f"{block}ffn_{half}_exps", [shape[0], shape[1] // len(halves)]
                if last.endswith("_bias"):
                    yield f"{target}.bias", F32, sizes, partial(file_tensor, read, name, F32, rows)
                else:
                    make = partial(file_tensor, read, name, MXFP4, rows)
                    yield f"{target}.weight", MXFP4, [*sizes, shape[2] * 32], make


def part_bytes(kind: int, shape: Sequence[int]) -> int:
    """Size of a tensor of ggml's type `kind`."""
    elements = torch.Size(shape).numel()
    return elements // 32 * 17 if kind == MXFP4 else elements * {F32: 4, BF16: 2}[kind]


def metadata(config: Mapping[str, Any], name: str) -> dict[str, Value]:
    """The model's sizes under llama.cpp's keys, from its config.json."""
    yarn = config.get("rope_scaling") or config["rope_parameters"]
    sizes: dict[str, Value] = {key: config[source] for key, source in SIZES.items()}
    sizes |= {
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config.get("rope_theta") or yarn["rope_theta"]),
        "rope.scaling.type": yarn["rope_type"],
        "rope.scaling.factor": float(yarn["factor"]),
        "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(yarn.get("beta_fast", 32)),
        "rope.scaling.yarn_beta_slow": float(yarn.get("beta_slow", 1)),
    }
    general: dict[str, Value] = {
        "general.architecture": "gpt-oss",
        "general.type": "model",
        "general.name": name,
        "general.file_type": MOSTLY_MXFP4_MOE,
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    return general | {f"gpt-oss.{key}": value for key, value in sizes.items()}


def vocabulary(folder: Path, size: int, template: str | None) -> dict[str, Value]:
    """The tokenizer in `folder` under llama.cpp's keys, filled up to `size` tokens; it is declared as gpt-oss's own
    (`gpt-4o` there)."""
    tokenizer, config = read_json(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json")
    ids, tokens, kinds = dict(tokenizer["model"]["vocab"]), [f"[PAD{n}]" for n in range(size)], [UNUSED] * size
    for text, number in ids.items():
        tokens[number], kinds[number] = text, NORMAL
    for token in tokenizer["added_tokens"]:
        text, number = token["content"], token["id"]
        ids[text], tokens[number] = number, text
        kinds[number] = CONTROL if token["special"] or re.fullmatch(r"<\|.*\|>", text) else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    values: dict[str, Value] = {
        "model": "gpt2",
        "pre": "gpt-4o",
        "tokens": tokens,
        "token_type": kinds,
        "merges": merges,
    }
    for key, target in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        token = config.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if text in ids:
            values[f"{target}_token_id"] = ids[text]
    values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return values | ({"tokenizer.chat_template": template} if template else {})


def text_bytes(text: str) -> bytes:
    """A text behind its length."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Value) -> bytes:
    """A value behind its type: text, whole number, float, or a list of texts or whole numbers."""
    if isinstance(value, list):
        kind = STRING if isinstance(value[0], str) else INT32
        items = (text_bytes(item) if isinstance(item, str) else struct.pack("<i", item) for item in value)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(items)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text_bytes(value)
    return struct.pack("<If", FLOAT32, value) if isinstance(value, float) else struct.pack("<II", UINT32, value)


def write_gguf(path: Path, values: Mapping[str, Value], shapes: Mapping[str, Sequence[int]], read: Read) -> None:
    """Write the file: metadata `values`, then every tensor of a checkpoint with these `shapes`; memory holds one
    tensor."""
    plan, offset, head = list(parts(shapes, read)), 0, []
    for name, kind, shape, _ in plan:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))  # the innermost first
        head.append(text_bytes(name) + sizes + struct.pack("<IQ", kind, offset))
        offset += -(-part_bytes(kind, shape) // ALIGNMENT) * ALIGNMENT
    with path.open("xb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(plan), len(values)))
        file.writelines(text_bytes(key) + value_bytes(value) for key, value in values.items())
        file.writelines(head)
        for name, kind, shape, make in plan:
            file.write(bytes(-file.tell() % ALIGNMENT))
            data = make().contiguous().view(torch.uint8).numpy().data
            if data.nbytes != part_bytes(kind, shape):
                raise ValueError(f"{path.name}: {name} of shape {shape} has {data.nbytes} bytes")
            file.write(data)
        file.write(bytes(-file.tell() % ALIGNMENT))
