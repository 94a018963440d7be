# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's layers as a supervised warm-up of a small model computes them: all at once, in few products."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, GptOssForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

PAD_KEYS = 8  # kernels want sizes that are multiples of it
FAST = "warmup"  # name of both fast layers in transformers


def fast_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    s_aux: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with sinks by PyTorch's fused kernels: the sink is one more key whose value is zero.

    Kernels want sizes that are multiples of 8: the heads get 8 dimensions more, of which one carries the sink's logit,
    and `PAD_KEYS` keys are added, of which the mask (1, 1, T, T + 8) shows the first. query (B, H, T, D).
    """
    batch, heads, columns, size = query.shape
    groups = heads // key.shape[1]
    # Under autocast RoPE leaves float32 behind; the mask has the type to compute in.
    query, key, value = (x.to(attention_mask.dtype) for x in (query, key, value))
    one = query.new_zeros(batch, heads, columns, 8)
    one[..., 0] = 1
    query = torch.cat((query, one), dim=-1)
    key, value = (functional.pad(x.repeat_interleave(groups, dim=1), (0, 8)) for x in (key, value))
    sinks = query.new_zeros(batch, heads, PAD_KEYS, size + 8)
    sinks[..., 0, size] = (s_aux / scaling).to(query.dtype)
    key = torch.cat((key, sinks), dim=2)
    value = torch.cat((value, torch.zeros_like(sinks)), dim=2)
    # The fused kernel for a GPU that takes any mask; a CPU's own.
    fused = SDPBackend.EFFICIENT_ATTENTION if query.device.type == "cuda" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel([fused, SDPBackend.MATH]):
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out[..., :size].transpose(1, 2).contiguous(), None


def fast_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All experts on all tokens (N, H) in three matrix products; those that the router left out get a weight of zero.

    Half of the arithmetic is wasted with 4 of 8, and it is still faster than a loop over experts.
    """
    experts, hidden, _ = module.gate_up_proj.shape

    def project(columns: slice) -> torch.Tensor:
        matrix = module.gate_up_proj[..., columns].permute(1, 0, 2).reshape(hidden, -1)
        return torch.addmm(module.gate_up_proj_bias[..., columns].reshape(-1), hidden_states, matrix)

    gate = project(slice(0, None, 2)).clamp(max=module.limit)
    up = project(slice(1, None, 2)).clamp(min=-module.limit, max=module.limit)
    # The type of the products, BF16 under autocast: wide tensors in float32 would take twice the memory.
    weights = torch.zeros(len(hidden_states), experts, dtype=gate.dtype, device=gate.device)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(weights.dtype))
    inner = (up + 1) * gate * torch.sigmoid(gate * module.alpha)
    inner = inner.unflatten(-1, (experts, -1)) * weights.unsqueeze(-1)
    out = inner.flatten(-2) @ module.down_proj.reshape(-1, hidden)
    return (out + weights @ module.down_proj_bias).to(hidden_states.dtype)


def masks(columns: int, window: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Additive masks of `fast_attention`, (1, 1, T, T + 8). Padding stands behind the tokens: causality hides it."""
    visible = torch.ones(columns, columns, dtype=torch.bool, device=device).tril()
    made = {}
    for name, allowed in (("full_attention", visible), ("sliding_attention", visible.triu(1 - window))):
        mask = torch.full((1, 1, columns, columns + PAD_KEYS), torch.finfo(dtype).min, dtype=dtype, device=device)
        mask[0, 0, :, :columns].masked_fill_(allowed, 0)
        mask[..., columns] = 0  # the sink
        made[name] = mask
    return made


def forward(model: GptOssForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states (B, T, H) of rows padded on the right; with the fast layers in BF16 autocast on a GPU."""
    fast, cuda = model.config._attn_implementation == FAST, ids.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    mask = masks(ids.shape[1], model.config.sliding_window, dtype, ids.device) if fast else None
    with torch.autocast("cuda", torch.bfloat16, enabled=fast and cuda):
        return model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


AttentionInterface.register(FAST, fast_attention)
ALL_EXPERTS_FUNCTIONS.register(FAST, fast_experts)
