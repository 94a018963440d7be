# SPDX-License-Identifier: Apache-2.0
"""The weight files of a checkpoint, and the names of the tensors that a gpt-oss needs in them."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.output.durable import read_json, regular_file_size

WEIGHTS_INDEX = "model.safetensors.index.json"  # It lists the weights to load; `original/` and `metal/` hold copies.
SINGLE_FILE = "model.safetensors"  # The weights of a checkpoint without an index.
LARGEST_HEADER = 10**8  # safetensors' own limit, in bytes.
OF_MODEL = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
OF_LAYER = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.sinks", "mlp.router.weight",
    "mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias",
)  # fmt: skip
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def weight_files(folder: Path) -> list[str]:
    """The names of a checkpoint's weight files: those in its index, or the only one if it has no index. Others in the
    folder are left over from another download."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return sorted(set(read_json(folder / WEIGHTS_INDEX)["weight_map"].values()))
    return [SINGLE_FILE]


def missing_shards(folder: Path) -> list[str]:
    """The weight files that a checkpoint lacks."""
    return [name for name in weight_files(folder) if not (folder / name).is_file()]


def tensor_names(config: Mapping[str, Any], is_mxfp4: bool) -> set[str]:
    """The tensors of a checkpoint with this config.json, named as in openai/gpt-oss-20b and by transformers."""
    names = list(OF_LAYER)
    names += [f"{name}{part}" for name in EXPERTS for part in (("_blocks", "_scales") if is_mxfp4 else ("",))]
    has_bias = config.get("attention_bias", True)
    names += [f"{name}.{part}" for name in PROJECTIONS for part in (("weight", "bias") if has_bias else ("weight",))]
    layers = range(config["num_hidden_layers"])
    return {*OF_MODEL, *(f"model.layers.{layer}.{name}" for layer in layers for name in names)}


def listed_tensors(folder: Path) -> set[str]:
    """The names of a checkpoint's tensors, from its index or the header of its only file. Empty where neither is there
    yet, and where it cannot be read: the library that loads it says so better."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if (folder / WEIGHTS_INDEX).is_file():
            return set(read_json(folder / WEIGHTS_INDEX)["weight_map"])
        regular_file_size(folder / SINGLE_FILE)
        with (folder / SINGLE_FILE).open("rb") as file:  # The header is JSON, and the file begins with its size.
            size = int.from_bytes(file.read(8), "little")
            return set(json.loads(file.read(min(size, LARGEST_HEADER)))) - {"__metadata__"}
    return set()


def shorten(names: set[str]) -> str:
    """The number of these tensors, and the names of the first ones."""
    first = ", ".join(sorted(names)[:2])
    return f"{len(names)} tensors ({first}, ...)" if len(names) > 2 else first


def names_fault(folder: Path, config: Mapping[str, Any], is_mxfp4: bool) -> str | None:
    """Which tensors the checkpoint in `folder` lacks, and which it has that no gpt-oss has; None if all names match. A
    loader would leave the first ones at random values and pass over the others."""
    listed, expected = listed_tensors(folder), tensor_names(config, is_mxfp4)
    if not listed:
        return None
    lacking = expected - listed - ({"lm_head.weight"} if config.get("tie_word_embeddings") else set())
    unknown, parts = listed - expected, []
    if lacking:
        parts.append(f"lack {shorten(lacking)}")
    if unknown:
        parts.append(f"hold {shorten(unknown)}, which this program does not know")
    return f"its weights {' and '.join(parts)}" if parts else None
