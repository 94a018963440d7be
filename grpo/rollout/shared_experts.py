# SPDX-License-Identifier: Apache-2.0
"""The learner's experts read vLLM's own weights, which must stay on the GPU then. Read in 0.26:
vllm/model_executor/layers/quantization/mxfp4.py (GptOssMxfp4MoEMethod) and the layouts of its copy of triton_kernels."""

from __future__ import annotations

from typing import Any

import torch

from grpo.model.load import QuantizedExperts

# What `grpo.model.experts.dequantize_swizzled` reads: what triton_kernels' layouts say of themselves.
VALUES = {"name": "HOPPER_VALUE", "mx_axis": 1, "mma_version": 3}
SCALES = {"name": "HOPPER_SCALE", "mx_axis": 1, "num_warps": 8}


def share_experts(policy: torch.nn.Module, model: Any) -> list[int]:
    """Lend the experts of `policy`, loaded without weights, those of vLLM's GptOss `model`: of each layer the same. Returns the
    addresses of the tensors.

    Raises RuntimeError where vLLM keeps them in another layout than on a Hopper card: elsewhere, and where LoRA is enabled, it takes
    other kernels. Nothing is lent then."""
    ours = [module for module in policy.modules() if isinstance(module, QuantizedExperts)]
    lent = []
    for module, layer in zip(ours, model.model.layers, strict=True):
        held = layer.mlp.experts.routed_experts
        inner, hidden = module.gate_up_proj_bias.shape[1] // 2, module.down_proj_bias.shape[1]
        try:
            method = held.quant_method
            lent.append({
                "gate_up_proj": (*tensors(held.w13_weight, method.w13_precision_config), 2 * inner, hidden),
                "down_proj": (*tensors(held.w2_weight, method.w2_precision_config), hidden, inner),
            })  # fmt: skip
        except AttributeError as error:
            raise RuntimeError(f"vLLM keeps its experts otherwise: {error}") from error
    pointers = []
    for module, weights in zip(ours, lent, strict=True):
        module.shared = weights
        pointers += [tensor.data_ptr() for given in weights.values() for tensor in given[:2]]
    return pointers


def tensors(weight: Any, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales (triton_kernels' Storage) of a matrix. Raises AttributeError or RuntimeError for another layout."""
    storages = weight.storage, config.weight_scale.storage
    for storage, expected in zip(storages, (VALUES, SCALES), strict=True):
        found = {name: getattr(storage.layout, name) for name in expected}
        if found != expected:
            raise RuntimeError(f"vLLM keeps its experts as {found}, not as {expected}")
    return storages[0].data, storages[1].data
