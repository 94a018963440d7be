# SPDX-License-Identifier: Apache-2.0
"""Weight sync: the trainer's adapter, as vLLM takes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo.run.folder import ADAPTER


def lora_layers(policy: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """PEFT's name of every adapted linear layer -> the layer."""
    return {
        name: module
        for name, module in policy.named_modules()
        if "default" in getattr(module, "lora_A", {}) and hasattr(module, "get_base_layer")
    }


def write_adapter(policy: torch.nn.Module, folder: Path, rank: int, active: bool = True) -> None:
    """Write the adapter as PEFT would, A (r, in) and B (out, r) in BF16, with alpha = r because B carries the scale,
    multiplied in float32 (one rounding). B is zero where the adapter is not `active`."""
    tensors = {}
    for name, layer in lora_layers(policy).items():
        b = layer.lora_B["default"].weight.detach().float() * (layer.scaling["default"] if active else 0.0)
        for kind, weight in (("A", layer.lora_A["default"].weight.detach()), ("B", b)):
            tensors[f"{name}.lora_{kind}.weight"] = weight.to("cpu", torch.bfloat16).contiguous()
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / ADAPTER)


@torch.no_grad()
def merged_weights(policy: torch.nn.Module, active: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the checkpoint, W + scale * B @ A of shape (out, in)) of every adapted layer, out of place in float32,
    rounded once.

    The base is only read: PEFT's merge_adapter works in place and drifts (https://github.com/huggingface/trl/issues/6688).
    """
    for name, layer in lora_layers(policy).items():
        weight = layer.get_base_layer().weight
        merged = weight
        if active:
            a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
            merged = torch.addmm(weight.float(), b, a, alpha=layer.scaling["default"]).to(weight.dtype)
        yield name.removeprefix("base_model.model.") + ".weight", merged


def push_weights(model: torch.nn.Module, merged: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy merged attention weights into vLLM's GptOss: q, k, v are the rows of `attn.qkv_proj.weight`, in that order
    (vllm/model_executor/models/gpt_oss.py). Raises RuntimeError, as torch does, for a weight of another shape."""
    parameters = {name.replace(".base_layer.", "."): value for name, value in model.named_parameters()}
    for name, weight in merged:
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        stem, rows = stem.replace(".self_attn", ".attn"), len(weight)
        # Query rows first, then as many key rows as value rows.
        part = {"q_proj": slice(rows), "k_proj": slice(-2 * rows, -rows), "v_proj": slice(-rows, None)}.get(kind)
        parameters[f"{stem}.{'qkv_proj' if part else kind}.weight"].data[part or slice(None)].copy_(weight)
