# SPDX-License-Identifier: Apache-2.0
"""Lets the learner read vLLM's experts, embeddings and output head, which must then stay on the GPU.

Written for vLLM 0.26: vllm/model_executor/models/gpt_oss.py, layers/vocab_parallel_embedding.py,
layers/quantization/mxfp4.py (GptOssMxfp4MoEMethod), and the layouts of its copy of triton_kernels."""

from typing import Any

import torch

from grpo.model.experts import quantized_experts
from grpo.model.load import vocab_weights

# The layouts that `grpo.model.experts.dequantize_swizzled` reads, as triton_kernels describes them.
VALUE_LAYOUT = {"name": "HOPPER_VALUE", "mx_axis": 1, "mma_version": 3}
SCALE_LAYOUT = {"name": "HOPPER_SCALE", "mx_axis": 1, "num_warps": 8}


def share_weights(policy: torch.nn.Module, model: Any) -> list[int]:
    """Lets `policy`, loaded without experts, embeddings and head, use the weights of vLLM's GptOss `model`, which never
    change. Returns the addresses of the tensors.

    Raises RuntimeError, and changes nothing, if vLLM keeps the weights as other tensors or in another layout than on a
    Hopper card, as it does on other cards and with its own LoRA, whose kernels need that."""
    modules, tables, experts = quantized_experts(policy), vocab_weights(policy), []
    try:
        for module, layer in zip(modules, model.model.layers, strict=True):
            routed = layer.mlp.experts.routed_experts
            inner, hidden = module.gate_up_proj_bias.shape[1] // 2, module.down_proj_bias.shape[1]
            gate_up = swizzled_tensors(routed.w13_weight, routed.quant_method.w13_precision_config)
            down = swizzled_tensors(routed.w2_weight, routed.quant_method.w2_precision_config)
            experts.append({"gate_up_proj": (*gate_up, 2 * inner, hidden), "down_proj": (*down, hidden, inner)})
        pairs = zip(tables, (model.model.embedding, model.lm_head), strict=True)
        rows = [module.weight.data[: len(table)] for table, module in pairs]  # vLLM pads tables to a multiple of 64.
    except AttributeError as error:
        raise RuntimeError(f"vLLM keeps its weights otherwise: {error}") from error
    for module, weights in zip(modules, experts, strict=True):
        module.shared = weights
    for table, lent_rows in zip(tables, rows, strict=True):
        table.data = lent_rows
    lent = [tensor for weights in experts for arguments in weights.values() for tensor in arguments[:2]]
    return [tensor.data_ptr() for tensor in (*lent, *rows)]


def swizzled_tensors(weight: Any, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of a matrix of experts, from triton_kernels' Tensor and PrecisionConfig. Raises AttributeError
    or RuntimeError for another layout."""
    storages = weight.storage, config.weight_scale.storage
    for storage, expected in zip(storages, (VALUE_LAYOUT, SCALE_LAYOUT), strict=True):
        layout = {name: getattr(storage.layout, name) for name in expected}
        if layout != expected:
            raise RuntimeError(f"vLLM keeps its experts as {layout}, not as {expected}")
    return storages[0].data, storages[1].data
