# SPDX-License-Identifier: Apache-2.0
"""The learner reads vLLM's own experts, embeddings and output head, which must stay on the GPU then. Read in 0.26:
vllm/model_executor/models/gpt_oss.py, layers/vocab_parallel_embedding.py, layers/quantization/mxfp4.py (GptOssMxfp4MoEMethod),
and the layouts of its copy of triton_kernels."""

from __future__ import annotations

from typing import Any

import torch

from grpo.model.load import quantized_experts, tables_of

# What `grpo.model.experts.dequantize_swizzled` reads: what triton_kernels' layouts say of themselves.
VALUES = {"name": "HOPPER_VALUE", "mx_axis": 1, "mma_version": 3}
SCALES = {"name": "HOPPER_SCALE", "mx_axis": 1, "num_warps": 8}


def share_weights(policy: torch.nn.Module, model: Any) -> list[int]:
    """Lend `policy`, loaded without them, the weights of vLLM's GptOss `model` that never change: of each layer the experts,
    embeddings and head. Returns the addresses of the tensors.

    Raises RuntimeError where vLLM keeps them as other tensors, or in another layout than on a Hopper card: elsewhere, and where
    LoRA is enabled, it takes other kernels. Nothing is lent then."""
    if policy.config.tie_word_embeddings:
        raise RuntimeError("vLLM reads no head where the embeddings are tied to it")
    ours, tables, experts = quantized_experts(policy), tables_of(policy), []
    try:
        for module, layer in zip(ours, model.model.layers, strict=True):
            held = layer.mlp.experts.routed_experts
            inner, hidden = module.gate_up_proj_bias.shape[1] // 2, module.down_proj_bias.shape[1]
            method = held.quant_method
            experts.append({
                "gate_up_proj": (*tensors(held.w13_weight, method.w13_precision_config), 2 * inner, hidden),
                "down_proj": (*tensors(held.w2_weight, method.w2_precision_config), hidden, inner),
            })  # fmt: skip
        rows = [rows_like(*pair) for pair in zip(tables, (model.model.embedding, model.lm_head), strict=True)]
    except AttributeError as error:
        raise RuntimeError(f"vLLM keeps its weights otherwise: {error}") from error
    for module, weights in zip(ours, experts, strict=True):
        module.shared = weights
    for table, lent in zip(tables, rows, strict=True):
        table.data = lent
    lent = [tensor for weights in experts for given in weights.values() for tensor in given[:2]]
    return [tensor.data_ptr() for tensor in (*lent, *rows)]


def tensors(weight: Any, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales (triton_kernels' Storage) of a matrix. Raises AttributeError or RuntimeError for another layout."""
    storages = weight.storage, config.weight_scale.storage
    for storage, expected in zip(storages, (VALUES, SCALES), strict=True):
        found = {name: getattr(storage.layout, name) for name in expected}
        if found != expected:
            raise RuntimeError(f"vLLM keeps its experts as {found}, not as {expected}")
    return storages[0].data, storages[1].data


def rows_like(table: torch.Tensor, module: Any) -> torch.Tensor:
    """The rows of vLLM's table, padded to a multiple of 64, in place of `table`. Raises RuntimeError where they differ."""
    rows = module.weight.data[: len(table)]
    found, expected = ((*one.shape, one.dtype, one.device) for one in (rows, table))
    if found != expected or not rows.is_contiguous():
        raise RuntimeError(f"vLLM keeps its embeddings as {found}, not as {expected}")
    return rows
