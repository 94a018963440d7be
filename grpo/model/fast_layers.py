# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's layers in few large products, for the supervised warm-up of a small model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, GptOssForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

PAD = 8  # kernels need sizes that are multiples of PAD
FAST = "warmup"  # name of both fast layers in transformers


def fast_attention(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, s_aux: Tensor, **kwargs
) -> tuple[Tensor, None]:
    """Attention with sinks by PyTorch's fused kernels: the sink is one more key whose value is zero.

    Each head of `query` (B, H, T, D) and of the keys gets `PAD` more dimensions, the first of which carries the sink's
    logit. `PAD` keys are added, and the mask (1, 1, T, T + PAD) hides all but the first. Returns (B, T, H, D).
    """
    batch, heads, columns, size = query.shape
    groups = heads // key.shape[1]
    # Under autocast RoPE returns float32; the mask has the type to compute in.
    query, key, value = (x.to(attention_mask.dtype) for x in (query, key, value))
    unit = query.new_zeros(batch, heads, columns, PAD)
    unit[..., 0] = 1
    query = torch.cat((query, unit), dim=-1)
    key, value = (functional.pad(x.repeat_interleave(groups, dim=1), (0, PAD)) for x in (key, value))
    sinks = query.new_zeros(batch, heads, PAD, size + PAD)
    sinks[..., 0, size] = (s_aux / scaling).to(query.dtype)
    key = torch.cat((key, sinks), dim=2)
    value = torch.cat((value, torch.zeros_like(sinks)), dim=2)
    # The first is the fused kernel that takes any mask.
    fused = SDPBackend.EFFICIENT_ATTENTION if query.is_cuda else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel([fused, SDPBackend.MATH]):
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out[..., :size].transpose(1, 2).contiguous(), None


def fast_experts(module: GptOssExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """All experts on all tokens (N, H) in three matrix products; experts that the router did not choose have weight 0.

    With 4 of 8 experts half of the arithmetic is wasted, but it is still faster than a loop over experts.
    """
    experts, hidden, _ = module.gate_up_proj.shape

    def project(columns: slice) -> Tensor:
        matrix = module.gate_up_proj[..., columns].permute(1, 0, 2).reshape(hidden, -1)
        return torch.addmm(module.gate_up_proj_bias[..., columns].reshape(-1), hidden_states, matrix)

    gate = project(slice(0, None, 2)).clamp(max=module.limit)
    up = project(slice(1, None, 2)).clamp(min=-module.limit, max=module.limit)
    # The weights get the type of the products, BF16 under autocast: float32 would take twice the memory.
    weights = torch.zeros(len(hidden_states), experts, dtype=gate.dtype, device=gate.device)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(weights.dtype))
    inner = (up + 1) * gate * torch.sigmoid(gate * module.alpha)
    inner = inner.unflatten(-1, (experts, -1)) * weights.unsqueeze(-1)
    out = inner.flatten(-2) @ module.down_proj.reshape(-1, hidden)
    return (out + weights @ module.down_proj_bias).to(hidden_states.dtype)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask of `fast_attention`, (1, 1, T, T + PAD), for `visible` (T, T): which keys each query sees."""
    shown = functional.pad(visible, (0, PAD))
    shown[:, len(visible)] = True  # the sink
    return torch.zeros_like(shown, dtype=dtype).masked_fill_(~shown, torch.finfo(dtype).min)[None, None]


def forward(model: GptOssForCausalLM, ids: Tensor) -> Tensor:
    """Last hidden states (B, T, H) of rows padded on the right; with the fast layers in BF16 autocast on a GPU."""
    fast, mask = model.config._attn_implementation == FAST, None
    if fast:
        dtype = torch.bfloat16 if ids.is_cuda else torch.float32
        # Padding comes after the tokens, so the causal mask hides it from them.
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        sliding = causal.triu(1 - (model.config.sliding_window or ids.shape[1]))
        mask = {"full_attention": additive_mask(causal, dtype), "sliding_attention": additive_mask(sliding, dtype)}
    with torch.autocast("cuda", torch.bfloat16, enabled=fast and ids.is_cuda):
        return model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


AttentionInterface.register(FAST, fast_attention)
ALL_EXPERTS_FUNCTIONS.register(FAST, fast_experts)
