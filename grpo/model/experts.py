# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's experts: fused, frozen, and optionally kept in MXFP4."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# The values are those of transformers' grouped_mm experts bit by bit: the same matrix products, and in between the same
# roundings to BF16, in two kernels instead of some twenty passes over memory. No gradient is computed for the weights.
GATE_ALPHA, GATE_LIMIT = 1.702, 7.0  # gpt-oss's clamped SwiGLU


def install_experts() -> str:
    """Register this script's experts with transformers; returns their name.

    https://huggingface.co/docs/transformers/experts_interface
    """

    ALL_EXPERTS_FUNCTIONS.register("frozen_experts", experts_forward)
    return "frozen_experts"


def experts_forward(module, hidden_states, top_k_index, top_k_weights):
    """transformers' experts interface: `hidden_states` (N, H), `top_k_index` and `top_k_weights` (N, k) -> (N, H)."""
    hidden_states = hidden_states.to(module.gate_up_proj_bias.dtype)
    return frozen_experts()(hidden_states, top_k_index, top_k_weights, module)


def expert_weights(module: Any, name: str) -> Any:
    """(E, in, out) weights of `gate_up_proj` or `down_proj`: a parameter, or unpacked for the moment."""
    if hasattr(module, name):
        return getattr(module, name)
    unpacked = unpack_mxfp4(getattr(module, f"{name}_blocks"), getattr(module, f"{name}_scales"))
    return unpacked.to(module.gate_up_proj_bias.dtype)


@functools.cache
def frozen_experts() -> Callable[..., Any]:
    """apply(hidden (N, H), index (N, k), weights (N, k), module): differentiable in `hidden` and `weights`."""

    class FrozenExperts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, index, weights, module):
            count = module.gate_up_proj_bias.shape[0]
            expert, order = index.flatten().sort()  # (S,), S = N * k: token-expert pairs, by expert
            place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
            ends = torch.searchsorted(expert, torch.arange(count, device=expert.device), right=True).int()
            gate_up = expert_weights(module, "gate_up_proj")
            raw = grouped_mm(hidden[order // index.shape[1]], gate_up, ends)  # (S, 2I)
            active = activation(raw, module.gate_up_proj_bias, expert)
            down = expert_weights(module, "down_proj")
            out = grouped_mm(active, down, ends)  # (S, H)
            bias = module.down_proj_bias
            ctx.save_for_backward(raw, out, gate_up, down, module.gate_up_proj_bias, bias, expert, place, ends, weights)  # fmt: skip
            return combine(out, bias, expert, place, weights, index.shape[1])

        @staticmethod
        def backward(ctx, gradient):
            raw, out, gate_up, down, gate_up_bias, bias, expert, place, ends, weights = ctx.saved_tensors
            spread, d_weights = combine_backward(gradient.contiguous(), out, bias, expert, place, weights)
            d_raw = activation_backward(grouped_mm(spread, down.transpose(1, 2), ends), raw, gate_up_bias, expert)
            d_hidden = grouped_mm(d_raw, gate_up.transpose(1, 2), ends)
            return combine(d_hidden, None, expert, place, None, weights.shape[1]), None, d_weights, None

    return FrozenExperts.apply


def grouped_mm(rows: Any, weights: Any, ends: Any) -> Any:
    """(S, in) rows, sorted by expert, times (E, in, out) weights; `ends` (E,) int32 is where each expert's rows end."""

    return torch.nn.functional.grouped_mm(rows, weights, offs=ends)


def activation(raw: Any, bias: Any, expert: Any) -> Any:
    """gpt-oss's gate: `raw` (S, 2I) interleaved gate and up, `bias` (E, 2I), `expert` (S,) -> (S, I)."""

    if raw.is_cuda:
        out = raw.new_empty(len(raw), raw.shape[1] // 2)
        launch_rows(expert_kernels().activation, len(raw), out.shape[1], raw, bias, expert, out, limit=GATE_LIMIT, alpha=GATE_ALPHA)  # fmt: skip
        return out
    gate_up = raw + bias[expert]
    gate, up = gate_up[..., ::2].clamp(max=GATE_LIMIT), gate_up[..., 1::2].clamp(-GATE_LIMIT, GATE_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * GATE_ALPHA))


def activation_backward(gradient: Any, raw: Any, bias: Any, expert: Any) -> Any:
    """Gradient of `activation` with respect to `raw`: (S, I) -> (S, 2I)."""

    out = torch.empty_like(raw)
    if raw.is_cuda:
        launch_rows(expert_kernels().activation_backward, len(raw), gradient.shape[1], raw, bias, expert, gradient, out, limit=GATE_LIMIT, alpha=GATE_ALPHA)  # fmt: skip
        return out
    gate_up = raw + bias[expert]
    gate, up = gate_up[..., ::2].clamp(max=GATE_LIMIT), gate_up[..., 1::2].clamp(-GATE_LIMIT, GATE_LIMIT)
    sigmoid = torch.sigmoid(gate * GATE_ALPHA)
    slope = sigmoid * (1 + GATE_ALPHA * gate * (1 - sigmoid))
    out[..., ::2] = gradient * (up + 1) * slope * (gate_up[..., ::2] <= GATE_LIMIT)
    out[..., 1::2] = gradient * gate * sigmoid * (gate_up[..., 1::2].abs() <= GATE_LIMIT)
    return out


def combine(rows: Any, bias: Any, expert: Any, place: Any, weights: Any, pairs: int) -> Any:
    """(S, H) expert outputs, sorted by expert, to (N, H) tokens: plus `bias` (E, H), times `weights` (N, k), summed in
    float32 over the k = `pairs` of a token; `place` (S,) is where each pair stands. Plain sums where both are None."""
    if rows.is_cuda:
        out = rows.new_empty(len(place) // pairs, rows.shape[1])
        launch_rows(expert_kernels().combine, len(out), rows.shape[1], rows, bias, expert, place, weights, out, pairs=pairs)  # fmt: skip
        return out
    out = (rows if bias is None else rows + bias[expert])[place]
    out = out if weights is None else out * weights.flatten()[:, None]
    return out.view(-1, pairs, rows.shape[1]).sum(1).to(rows.dtype)


def combine_backward(gradient: Any, rows: Any, bias: Any, expert: Any, place: Any, weights: Any) -> tuple[Any, Any]:
    """Gradients of `combine` with respect to `rows` (S, H) and `weights` (N, k), given that of its result (N, H)."""

    spread, pairs = torch.empty_like(rows), weights.shape[1]
    if rows.is_cuda:
        d_weights = torch.empty_like(weights)
        launch_rows(expert_kernels().combine_backward, len(rows), rows.shape[1], gradient, rows, bias, expert, place, weights, spread, d_weights, pairs=pairs)  # fmt: skip
        return spread, d_weights
    wide = gradient.repeat_interleave(pairs, 0)
    spread[place] = (wide * weights.flatten()[:, None]).to(rows.dtype)
    return spread, (wide * (rows + bias[expert])[place]).sum(-1).view_as(weights).to(weights.dtype)


def unpack_mxfp4(blocks: Any, scales: Any) -> Any:
    """(E, in, out) BF16 weights of `blocks` (E, out, in / 32, 16) and `scales` (E, out, in / 32), exactly: pairs of e2m1
    codes, the first in the low bits, and powers of two with a bias of 127 (OCP Microscaling Formats 1.0)."""

    if blocks.is_cuda:
        import triton

        out = torch.empty(*blocks.shape[:2], blocks.shape[2] * 32, dtype=torch.bfloat16, device=blocks.device)
        groups = scales.numel()
        expert_kernels().unpack[(triton.cdiv(groups, 128),)](blocks, scales, out, groups, BLOCK=128, num_warps=4)
        return out.transpose(1, 2)

    return convert_moe_packed_tensors(blocks, scales)


def launch_rows(kernel: Any, rows: int, columns: int, *tensors: Any, **constants: Any) -> None:
    """Start a kernel with one program for each row."""
    if rows:
        width = 1 << (columns - 1).bit_length()
        kernel[(rows,)](*tensors, columns, BLOCK=width, num_warps=8 if width >= 1024 else 1, **constants)


@functools.cache
def expert_kernels() -> Any:
    """The Triton kernels, compiled when a GPU first needs them. Each has a twin in plain torch above, which a test holds
    against it in Triton's interpreter."""
    global triton, tl, round_to, load_gate_up, e2m1  # kernels find what they call among globals
    import triton
    import triton.language as tl

    @triton.jit
    def round_to(x, like):
        return x.to(like.dtype.element_ty).to(tl.float32)

    @triton.jit
    def load_gate_up(raw, bias, row, expert, columns, BLOCK: tl.constexpr):
        at = tl.arange(0, 2 * BLOCK)
        mask = at < 2 * columns
        both = tl.load(raw + row * 2 * columns + at, mask, 0.0).to(tl.float32)
        both += tl.load(bias + expert * 2 * columns + at, mask, 0.0).to(tl.float32)
        return tl.split(tl.reshape(round_to(both, raw), (BLOCK, 2)))

    @triton.jit
    def activation(raw, bias, expert, out, columns, limit: tl.constexpr, alpha: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        gate, up = load_gate_up(raw, bias, row, tl.load(expert + row), columns, BLOCK)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        sigmoid = round_to(1 / (1 + tl.exp(-round_to(gate * alpha, raw))), raw)
        value = round_to(up + 1, raw) * round_to(gate * sigmoid, raw)
        at = tl.arange(0, BLOCK)
        tl.store(out + row * columns + at, value.to(out.dtype.element_ty), at < columns)

    @triton.jit
    def activation_backward(raw, bias, expert, gradient, out, columns, limit: tl.constexpr, alpha: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        gate_raw, up_raw = load_gate_up(raw, bias, row, tl.load(expert + row), columns, BLOCK)
        gate = tl.minimum(gate_raw, limit)
        up = tl.minimum(tl.maximum(up_raw, -limit), limit)
        sigmoid = 1 / (1 + tl.exp(-gate * alpha))
        at = tl.arange(0, BLOCK)
        d = tl.load(gradient + row * columns + at, at < columns, 0.0).to(tl.float32)
        d_gate = tl.where(gate_raw <= limit, d * (up + 1) * sigmoid * (1 + alpha * gate * (1 - sigmoid)), 0.0)
        d_up = tl.where(tl.abs(up_raw) <= limit, d * gate * sigmoid, 0.0)
        both = tl.reshape(tl.join(d_gate, d_up), (2 * BLOCK,))
        at = tl.arange(0, 2 * BLOCK)
        tl.store(out + row * 2 * columns + at, both.to(out.dtype.element_ty), at < 2 * columns)

    @triton.jit
    def combine(rows, bias, expert, place, weights, out, columns, pairs: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        mask = at < columns
        total = tl.zeros((BLOCK,), tl.float32)
        for pair in tl.static_range(pairs):
            row = tl.load(place + token * pairs + pair)
            value = tl.load(rows + row * columns + at, mask, 0.0).to(tl.float32)
            if bias is not None:
                value += tl.load(bias + tl.load(expert + row) * columns + at, mask, 0.0).to(tl.float32)
                value = round_to(value, rows)
            if weights is not None:
                # Rounded as the product would be: to BF16, unless the weights are wider.
                value = round_to(value * tl.load(weights + token * pairs + pair).to(tl.float32), weights)
            total += value
        if weights is not None:
            total = round_to(total, weights)
        tl.store(out + token * columns + at, total.to(out.dtype.element_ty), mask)

    @triton.jit
    def combine_backward(gradient, rows, bias, expert, place, weights, spread, d_weights, columns, pairs: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        pair = tl.program_id(0).to(tl.int64)
        row = tl.load(place + pair)
        at = tl.arange(0, BLOCK)
        mask = at < columns
        d = tl.load(gradient + pair // pairs * columns + at, mask, 0.0).to(tl.float32)
        value = tl.load(rows + row * columns + at, mask, 0.0).to(tl.float32)
        value += tl.load(bias + tl.load(expert + row) * columns + at, mask, 0.0).to(tl.float32)
        tl.store(d_weights + pair, tl.sum(d * value, 0).to(d_weights.dtype.element_ty))
        scaled = d * tl.load(weights + pair).to(tl.float32)
        tl.store(spread + row * columns + at, scaled.to(spread.dtype.element_ty), mask)

    @triton.jit
    def unpack(blocks, scales, out, groups, BLOCK: tl.constexpr):
        group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = group < groups
        scale = tl.load(scales + group, inside, 0).to(tl.int32)
        # 2 ** (scale - 127) by its bits; that of 0 is subnormal.
        power = tl.where(scale == 0, 1 << 22, scale << 23).to(tl.float32, bitcast=True)[:, None]
        byte = tl.arange(0, 16)[None, :]
        code = tl.load(blocks + group[:, None] * 16 + byte, inside[:, None], 0).to(tl.int32)
        low, high = e2m1(code & 15) * power, e2m1(code >> 4) * power
        both = tl.reshape(tl.join(low, high), (BLOCK, 32))
        at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(out + at, both.to(out.dtype.element_ty), inside[:, None])

    @triton.jit
    def e2m1(code):
        exponent, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
        value = tl.where(exponent == 0, half, (1 + half) * (1 << tl.maximum(exponent - 1, 0)).to(tl.float32))
        return value * tl.where(code >= 8, -1.0, 1.0)  # -value is 0 - value in older Triton, which loses the sign of 0

    return argparse.Namespace(
        activation=activation, activation_backward=activation_backward, combine=combine,
        combine_backward=combine_backward, unpack=unpack,
    )  # fmt: skip
