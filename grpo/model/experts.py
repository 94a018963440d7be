# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's experts: fused, frozen, and optionally kept in MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OURS = "frozen_experts"  # name of `experts_forward` in transformers
GATE_ALPHA, GATE_LIMIT = 1.702, 7.0  # gpt-oss's clamped SwiGLU
FEW = 256  # tokens, up to which reading the weights takes longer than computing with them
Adapters = Mapping[str, tuple[Tensor, Tensor]]
Product = Callable[[torch.nn.Module, str, Tensor, Tensor], Tensor]


def experts_forward(
    module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts interface: `hidden_states` (N, H), `top_k_index` and `top_k_weights` (N, k) -> (N, H).

    The weights get no gradient. While `module.adapters` holds the factors A (E, in, r) and B (E, r, out) of a parameter by
    its name, their product is added to it.
    """
    hidden, adapters = hidden_states.to(module.gate_up_proj_bias.dtype), getattr(module, "adapters", {})
    few = len(hidden) <= FEW and not torch.is_grad_enabled()
    if few and hidden.is_cuda and not adapters and hasattr(module, "gate_up_proj_blocks"):
        return routed_experts(module, hidden, top_k_index, top_k_weights, adapters, packed_product)
    every = few and grouped_mm_waits(hidden.device)
    return (every_expert if every else routed_experts)(module, hidden, top_k_index, top_k_weights, adapters)


# https://huggingface.co/docs/transformers/experts_interface
ALL_EXPERTS_FUNCTIONS.register(OURS, experts_forward)


def expert_weights(module: torch.nn.Module, name: str) -> Tensor:
    """(E, in, out) weights of `gate_up_proj` or `down_proj`: a parameter, or dequantized for the moment, from vLLM's tensors
    where `module.shared` holds `dequantize_swizzled`'s arguments by that name."""
    if hasattr(module, name):
        return getattr(module, name)
    if shared := getattr(module, "shared", {}):
        weights = dequantize_swizzled(*shared[name])
    else:
        weights = dequantize_mxfp4(getattr(module, f"{name}_blocks"), getattr(module, f"{name}_scales"))
    return weights.to(module.gate_up_proj_bias.dtype)


def frozen_product(module: torch.nn.Module, name: str, rows: Tensor, offs: Tensor) -> Tensor:
    """(S, in) rows, sorted by expert, times the weights `name` of their expert: (S, out). Expert e has those before `offs`[e]."""
    return FrozenProduct.apply(rows, offs, module, name)


def even_and_odd(rows: Tensor) -> Tensor:
    """(2, S, K / 2): the even and the odd columns of (S, K)."""
    return rows.unflatten(1, (-1, 2)).permute(2, 0, 1).contiguous()


def packed_product(module: torch.nn.Module, name: str, rows: Tensor, offs: Tensor) -> Tensor:
    """`frozen_product` on a GPU with packed weights, which are dequantized on their way into the product: for few rows, where
    reading and writing them takes longer than the arithmetic. Without gradients; sums are rounded in another order."""
    blocks, scales = (getattr(module, f"{name}_{part}") for part in ("blocks", "scales"))
    out, halves = rows.new_empty(len(rows), blocks.shape[1]), even_and_odd(rows)
    tile = {"ROWS": 16 if len(rows) <= 16 * len(blocks) else 32, "COLUMNS": 128, "GROUPS": 4}
    grid = -(-out.shape[1] // tile["COLUMNS"]), len(blocks)
    kernels().packed_product[grid](*halves, blocks, scales, offs, out, out.shape[1], rows.shape[1], **tile, num_warps=4)
    return out


def routed_experts(
    module: torch.nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, adapters: Adapters,
    product: Product = frozen_product,
) -> Tensor:  # fmt: skip
    """Each token's experts. The values are those of transformers' grouped_mm experts bit by bit: the same matrix products, and in
    between the same roundings to BF16, in two kernels instead of some twenty trips through memory."""
    expert, order = index.flatten().sort()  # (S,), S = N * k: token-expert pairs, by expert
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    count, top_k = module.gate_up_proj_bias.shape[0], index.shape[1]
    offs = torch.searchsorted(expert, torch.arange(count, device=expert.device), right=True).int()

    def project(rows: Tensor, name: str) -> Tensor:
        out = product(module, name, rows, offs)
        if name not in adapters:
            return out
        # On Blackwell the kernels may leave an expert without rows some gradient (https://github.com/pytorch/pytorch/issues/172439).
        used = offs.diff(prepend=offs.new_zeros(1)).bool()[:, None, None]
        a, b = (torch.where(used, factor.to(rows.dtype), 0) for factor in adapters[name])
        return out + grouped_mm(grouped_mm(rows, a, offs=offs), b, offs=offs)

    gate_up = project(Spread.apply(hidden, expert, order, inverse, top_k), "gate_up_proj")  # (S, 2I)
    down = project(Activation.apply(gate_up, module.gate_up_proj_bias, expert), "down_proj")  # (S, H)
    return Combine.apply(down, module.down_proj_bias, expert, inverse, weights, top_k)


def grouped_mm_waits(device: torch.device) -> bool:
    """Whether torch has no kernel for `grouped_mm` there (it has for Hopper and data-centre Blackwell): the host then waits
    for the offsets, which no CUDA graph can hold, and launches a product for each expert."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10)


def every_expert(module: torch.nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, adapters: Adapters) -> Tensor:
    """`routed_experts` without gradients for few tokens, each computed by every expert: reading the weights takes longer than
    the arithmetic, of which most is not used."""
    count, tokens = len(module.gate_up_proj_bias), len(hidden)
    expert = torch.arange(count, device=hidden.device)[:, None].expand(-1, tokens).flatten()

    def project(rows: Tensor, name: str) -> Tensor:  # (E, N, in) -> (E * N, out)
        out = torch.bmm(rows, expert_weights(module, name))
        if name in adapters:
            a, b = (factor.to(rows.dtype) for factor in adapters[name])
            out = out + rows @ a @ b
        return out.flatten(0, 1)

    gate_up = project(hidden.expand(count, -1, -1), "gate_up_proj")
    active = activation(gate_up, module.gate_up_proj_bias, expert).unflatten(0, (count, tokens))
    row = (index * tokens + torch.arange(tokens, device=hidden.device)[:, None]).flatten()
    return combine(project(active, "down_proj"), module.down_proj_bias, expert, row, weights, index.shape[1])


class Spread(torch.autograd.Function):
    """(N, H) tokens to (S, H): a row for each pair, sorted by expert."""

    @staticmethod
    def forward(ctx, hidden, expert, order, inverse, pairs):
        ctx.save_for_backward(expert, inverse)
        ctx.pairs = pairs
        return hidden[order // pairs]

    @staticmethod
    def backward(ctx, gradient):
        expert, inverse = ctx.saved_tensors
        return combine(gradient.contiguous(), None, expert, inverse, None, ctx.pairs), None, None, None, None


class FrozenProduct(torch.autograd.Function):
    """(S, in) rows times the weights `name` (E, in, out) of their expert, which get no gradient.

    Without gradient checkpointing every layer waits for its backward pass, so packed weights are dequantized again there
    instead of being kept: those of all layers would take 36 GiB of gpt-oss-20b. With checkpointing only one layer waits."""

    @staticmethod
    def forward(ctx, rows, offs, module, name):
        weights = expert_weights(module, name)
        ctx.packed = (module, name) if getattr(module, "dequantize_again", False) else None
        ctx.save_for_backward(offs, *(() if ctx.packed else (weights,)))
        return grouped_mm(rows, weights, offs=offs)

    @staticmethod
    def backward(ctx, gradient):
        offs, *kept = ctx.saved_tensors
        weights = expert_weights(*ctx.packed) if ctx.packed else kept[0]
        return grouped_mm(gradient.contiguous(), weights.transpose(1, 2), offs=offs), None, None, None


class Activation(torch.autograd.Function):
    """`activation` with `activation_backward`."""

    @staticmethod
    def forward(ctx, gate_up, bias, expert):
        ctx.save_for_backward(gate_up, bias, expert)
        return activation(gate_up, bias, expert)

    @staticmethod
    def backward(ctx, gradient):
        return activation_backward(gradient.contiguous(), *ctx.saved_tensors), None, None


class Combine(torch.autograd.Function):
    """`combine` with `combine_backward`."""

    @staticmethod
    def forward(ctx, rows, bias, expert, inverse, weights, pairs):
        ctx.save_for_backward(rows, bias, expert, inverse, weights)
        return combine(rows, bias, expert, inverse, weights, pairs)

    @staticmethod
    def backward(ctx, gradient):
        d_rows, d_weights = combine_backward(gradient.contiguous(), *ctx.saved_tensors)
        return d_rows, None, None, None, d_weights, None


def gate_and_up(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up (S, I), clamped, of interleaved ones (S, 2I)."""
    return gate_up[:, ::2].clamp(max=GATE_LIMIT), gate_up[:, 1::2].clamp(-GATE_LIMIT, GATE_LIMIT)


def activation(gate_up: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    """gpt-oss's gate: `gate_up` (S, 2I) interleaved, `bias` (E, 2I), `expert` (S,) -> (S, I)."""
    if gate_up.is_cuda:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        launch_rows(kernels().activation, *out.shape, gate_up, bias, expert, out, limit=GATE_LIMIT, alpha=GATE_ALPHA)
        return out
    gate, up = gate_and_up(gate_up + bias[expert])
    return (up + 1) * (gate * torch.sigmoid(gate * GATE_ALPHA))


def activation_backward(gradient: Tensor, gate_up: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    """Gradient of `activation` with respect to `gate_up`: (S, I) -> (S, 2I)."""
    out = torch.empty_like(gate_up)
    if gate_up.is_cuda:
        tensors = gate_up, bias, expert, gradient, out
        launch_rows(kernels().activation_backward, *gradient.shape, *tensors, limit=GATE_LIMIT, alpha=GATE_ALPHA)
        return out
    biased = gate_up + bias[expert]
    gate, up = gate_and_up(biased)
    sigmoid = torch.sigmoid(gate * GATE_ALPHA)
    slope = sigmoid * (1 + GATE_ALPHA * gate * (1 - sigmoid))
    out[:, ::2] = gradient * (up + 1) * slope * (biased[:, ::2] <= GATE_LIMIT)
    out[:, 1::2] = gradient * gate * sigmoid * (biased[:, 1::2].abs() <= GATE_LIMIT)
    return out


def combine(
    rows: Tensor, bias: Tensor | None, expert: Tensor, inverse: Tensor, weights: Tensor | None, pairs: int
) -> Tensor:
    """(S, H) expert outputs, sorted by expert, to (N, H) tokens: plus `bias` (E, H), times `weights` (N, k), summed in
    float32 over the k = `pairs` of a token; `inverse` (S,) is the inverse permutation: the row of each pair. Plain sums
    where both are None."""
    if rows.is_cuda:
        out = rows.new_empty(len(inverse) // pairs, rows.shape[1])
        launch_rows(kernels().combine, *out.shape, rows, bias, expert, inverse, weights, out, pairs=pairs)
        return out
    out = (rows if bias is None else rows + bias[expert])[inverse]
    out = out if weights is None else out * weights.flatten()[:, None]
    return out.view(-1, pairs, rows.shape[1]).sum(1).to(rows.dtype)


def combine_backward(
    gradient: Tensor, rows: Tensor, bias: Tensor, expert: Tensor, inverse: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `combine` with respect to `rows` (S, H) and `weights` (N, k), given that of its result (N, H)."""
    spread, pairs = torch.empty_like(rows), weights.shape[1]
    if rows.is_cuda:
        d_weights = torch.empty_like(weights)
        tensors = gradient, rows, bias, expert, inverse, weights, spread, d_weights
        launch_rows(kernels().combine_backward, *rows.shape, *tensors, pairs=pairs)
        return spread, d_weights
    wide = gradient.repeat_interleave(pairs, 0)
    spread[inverse] = (wide * weights.flatten()[:, None]).to(rows.dtype)
    return spread, (wide * (rows + bias[expert])[inverse]).sum(-1).view_as(weights).to(weights.dtype)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """(E, in, out) BF16 weights of `blocks` (E, out, in / 32, 16) and `scales` (E, out, in / 32), exactly: pairs of e2m1
    codes, the first in the low bits, and powers of two with a bias of 127 (OCP Microscaling Formats 1.0)."""
    if not blocks.is_cuda:
        return convert_moe_packed_tensors(blocks, scales)
    out = torch.empty(*blocks.shape[:2], blocks.shape[2] * 32, dtype=torch.bfloat16, device=blocks.device)
    groups = scales.numel()
    kernels().dequantize[(-(-groups // 128),)](blocks, scales, out.view(torch.int32), groups, BLOCK=128, num_warps=4)
    return out.transpose(1, 2)


def dequantize_swizzled(values: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """(E, `columns`, `rows`) BF16 weights as `dequantize_mxfp4` gives them, of vLLM's tensors on a Hopper card: uint8 `values`
    (E, columns * 2, rows / 4) and `scales` (E, columns, rows / 32), views of their transposes, padded to whole tiles: those of
    triton_kernels' layouts HOPPER_VALUE and, for 8 warps, HOPPER_SCALE. Raises RuntimeError for tensors that cannot be them."""
    words, shorts = values.mT.view(torch.int32), scales.mT.view(torch.int16)  # of 8 weights, of 2 scales
    out = torch.empty(len(words), rows, columns, dtype=torch.bfloat16, device=words.device)
    sizes, pairs = (*words.shape[1:], *shorts.shape[1:]), out.view(torch.int32)
    if any(held < needed for held, needed in zip(sizes, (rows / 4, columns / 2, rows / 32, columns / 2), strict=True)):
        raise RuntimeError(f"values {(*values.shape,)} and scales {(*scales.shape,)} do not hold {rows} x {columns}")
    grid = -(-columns // 512), -(-rows // 16), len(words)
    kernels().dequantize_swizzled[grid](words, shorts, pairs, rows, columns // 32, *sizes, GROUPS=16, num_warps=4)
    return out.mT


def launch_rows(kernel: Any, rows: int, columns: int, *tensors: Tensor | None, **constants: float) -> None:
    """Start a kernel with one program for each row."""
    if rows:
        width = 1 << (columns - 1).bit_length()
        kernel[(rows,)](*tensors, columns, BLOCK=width, num_warps=8 if width >= 1024 else 1, **constants)


def kernels() -> ModuleType:
    # Late: triton comes with torch's builds for GPUs only.
    from grpo.model import expert_kernels

    return expert_kernels
