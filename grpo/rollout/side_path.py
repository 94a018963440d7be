# SPDX-License-Identifier: Apache-2.0
"""A side path in vLLM's attention: the adapter's low-rank product beside qkv_proj and o_proj, exact and inside the graphs.

W x + bias + B (A x) as one product, of [W B] with [x; A x]: summed in float32 and rounded once. Added to an output that is
BF16 already, most of a small update would be rounded away again, as it is in merged weights. vLLM's experts stay as they
are; its own LoRA would switch them to slower kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

RANK = "side_path_rank"  # in vLLM's additional_config, which its compile cache is keyed by
PROJECTIONS = {"qkv_proj": 3, "o_proj": 1}  # linear layers of an attention -> projections that each of them holds
COLUMNS = 64  # B is padded with zeros to a multiple: rows of [W B] then begin at multiples of 128 bytes


class SidePath:
    """In place of the linear layer's method in vLLM (`LinearMethodBase.apply`)."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(N, out) for x (N, in)."""
        return linear(torch.cat((x, linear(x, layer.side_a)), dim=-1), layer.side_weight, bias)


def add_side_path(layer: torch.nn.Module, rank: int) -> None:
    """Give a linear layer, not loaded yet, a side path of zeros: `side_weight` (out, in + k), of which `weight` and `side_b`
    (out, k) become views, and `side_a` (k, in). They are buffers, as no checkpoint has them, and stay where they are: the
    graphs know their addresses."""
    (rows, width), like = layer.weight.shape, {"dtype": layer.weight.dtype, "device": layer.weight.device}
    columns = -(-rank // COLUMNS) * COLUMNS
    whole = torch.zeros(rows, width + columns, **like)
    whole[:, :width] = layer.weight.data
    layer.weight.data = whole[:, :width]
    layer.register_buffer("side_weight", whole, persistent=False)
    layer.register_buffer("side_b", whole[:, width:], persistent=False)
    layer.register_buffer("side_a", torch.zeros(columns, width, **like), persistent=False)
    layer.quant_method = SidePath()


def register_side_path() -> None:
    """Have vLLM build gpt-oss with side paths, where `additional_config` has their RANK."""
    from vllm import ModelRegistry  # vLLM is optional
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, OAIAttention

    class GptOssWithSidePath(GptOssForCausalLM):
        def __init__(self, vllm_config: Any, prefix: str = ""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            rank = vllm_config.additional_config.get(RANK, 0)
            for attention in self.modules() if rank else ():
                if isinstance(attention, OAIAttention):
                    for name, projections in PROJECTIONS.items():
                        add_side_path(getattr(attention, name), rank * projections)

    ModelRegistry.register_model("GptOssForCausalLM", GptOssWithSidePath)
