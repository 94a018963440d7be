# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the experts, which run only where tensors are on a GPU.

A test compares each of them in Triton's interpreter with plain torch in experts.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def load_gate_up(gate_up, bias, row, expert, columns, BLOCK: tl.constexpr):
    """One row of `gate_up` (rows, 2 * columns) with its expert's bias, as (gate, up), each (BLOCK,)."""
    at = tl.arange(0, 2 * BLOCK)
    mask = at < 2 * columns
    gate_up_row = tl.load(gate_up + row * 2 * columns + at, mask, 0.0).to(tl.float32)
    gate_up_row += tl.load(bias + expert * 2 * columns + at, mask, 0.0).to(tl.float32)
    return tl.split(tl.reshape(round_to(gate_up_row, gate_up), (BLOCK, 2)))


@triton.jit
def activation(gate_up, bias, expert, out, columns, limit: tl.constexpr, alpha: tl.constexpr, BLOCK: tl.constexpr):
    """gpt-oss's gated activation of a row, (2 * columns,) to (columns,), rounded where torch rounds it."""
    row = tl.program_id(0).to(tl.int64)
    gate, up = load_gate_up(gate_up, bias, row, tl.load(expert + row), columns, BLOCK)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    sigmoid = round_to(1 / (1 + tl.exp(-round_to(gate * alpha, gate_up))), gate_up)
    value = round_to(up + 1, gate_up) * round_to(gate * sigmoid, gate_up)
    at = tl.arange(0, BLOCK)
    tl.store(out + row * columns + at, value.to(out.dtype.element_ty), at < columns)


@triton.jit
def activation_backward(
    gate_up, bias, expert, gradient, out, columns, limit: tl.constexpr, alpha: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of the gradient with respect to `gate_up` (rows, 2 * columns), given that of the `activation`."""
    row = tl.program_id(0).to(tl.int64)
    gate_in, up_in = load_gate_up(gate_up, bias, row, tl.load(expert + row), columns, BLOCK)
    gate = tl.minimum(gate_in, limit)
    up = tl.minimum(tl.maximum(up_in, -limit), limit)
    sigmoid = 1 / (1 + tl.exp(-gate * alpha))
    at = tl.arange(0, BLOCK)
    d = tl.load(gradient + row * columns + at, at < columns, 0.0).to(tl.float32)
    d_gate = tl.where(gate_in <= limit, d * (up + 1) * sigmoid * (1 + alpha * gate * (1 - sigmoid)), 0.0)
    d_up = tl.where(tl.abs(up_in) <= limit, d * gate * sigmoid, 0.0)
    both = tl.reshape(tl.join(d_gate, d_up), (2 * BLOCK,))
    at = tl.arange(0, 2 * BLOCK)
    tl.store(out + row * 2 * columns + at, both.to(out.dtype.element_ty), at < 2 * columns)


@triton.jit
def combine(rows, bias, expert, inverse, weights, out, columns, top_k: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up a token's rows, one for each of its `top_k` experts, with their biases and router weights."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for pair in tl.static_range(top_k):
        row = tl.load(inverse + token * top_k + pair)
        value = tl.load(rows + row * columns + at, mask, 0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + tl.load(expert + row) * columns + at, mask, 0.0).to(tl.float32)
            value = round_to(value, rows)
        if weights is not None:
            # Rounded as the product would be: to BF16, unless the weights are wider.
            value = round_to(value * tl.load(weights + token * top_k + pair).to(tl.float32), weights)
        total += value
    if weights is not None:
        total = round_to(total, weights)
    tl.store(out + token * columns + at, total.to(out.dtype.element_ty), mask)


@triton.jit
def combine_backward(
    gradient, rows, bias, expert, inverse, weights, d_rows, d_weights, columns, top_k: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradients of `combine` with respect to one pair's row and its router weight."""
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(inverse + pair)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    d = tl.load(gradient + pair // top_k * columns + at, mask, 0.0).to(tl.float32)
    value = tl.load(rows + row * columns + at, mask, 0.0).to(tl.float32)
    value += tl.load(bias + tl.load(expert + row) * columns + at, mask, 0.0).to(tl.float32)
    tl.store(d_weights + pair, tl.sum(d * value, 0).to(d_weights.dtype.element_ty))
    scaled = d * tl.load(weights + pair).to(tl.float32)
    tl.store(d_rows + row * columns + at, scaled.to(d_rows.dtype.element_ty), mask)


@triton.jit
def power_of(scale):
    # The bits of the float32 2 ** (scale - 127), which is subnormal for a scale of 0.
    return tl.where(scale == 0, 1 << 22, scale << 23).to(tl.float32, bitcast=True)


@triton.jit
def first_code(code):
    # Moves the first e2m1 of a byte, which its low bits hold, to the top bits of a float32.
    return (code & 8) << 28 | (code & 7) << 22


@triton.jit
def second_code(code):
    # The same for the second e2m1, which the high bits hold.
    return (code & 128) << 24 | (code & 112) << 18


@triton.jit
def e2m1_to_float32(bits, power):
    # An e2m1 has the layout of a float32's top bits, but an exponent bias of 1 instead of 127: the factor is 2**126.
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * power


@triton.jit
def two_weights(low, high, power):
    """Two weights as the BF16 halves of one int32, `low` first, from the bits of `first_code` and `second_code`."""
    # Every value fits into a BF16 exactly, subnormal ones included, so cutting off a float32 does not round.
    low = e2m1_to_float32(low, power).to(tl.uint32, bitcast=True)
    high = e2m1_to_float32(high, power).to(tl.uint32, bitcast=True)
    return (low >> 16 | high & 0xFFFF0000).to(tl.int32, bitcast=True)


@triton.jit
def dequantize(blocks, scales, out, groups, BLOCK: tl.constexpr):
    """Dequantizes BLOCK groups of 32 MXFP4 weights, 16 bytes and one scale each, to BF16."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    inside = group < groups
    power = power_of(tl.load(scales + group, inside, 0).to(tl.int32))
    at = group * 16 + tl.arange(0, 16)[None, :]
    code = tl.load(blocks + at, inside, 0).to(tl.uint32)
    tl.store(out + at, two_weights(first_code(code), second_code(code), power), inside)


@triton.jit
def dequantize_swizzled(
    values, scales, out, rows, groups, value_lines, value_words, scale_lines, scale_shorts, GROUPS: tl.constexpr
):
    """Dequantizes 16 rows of an expert's weights in GROUPS groups of 32 columns.

    In `values` 16 rows take 4 lines, and 64 of their columns take 32 words of each line. Half t % 2 of line t // 2
    belongs to the rows t and t + 8: its word [u, v] of (4, 4) holds the two weights of byte 8 v + u and of byte 8 v + u
    + 4, for both rows. In `scales` 16 rows take half of a line, and a short holds the scales of rows t and t + 8."""
    row_block = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    values += (expert * value_lines + row_block * 4) * value_words
    scales += (expert * scale_lines + row_block // 16 * 8 + row_block % 8) * scale_shorts + row_block // 8 % 2 * 16
    out += (expert * rows + row_block * 16) * groups * 16

    row = tl.arange(0, 8)[:, None, None]
    chunk = tl.program_id(0) * (GROUPS // 2) + tl.arange(0, GROUPS // 2)[None, :, None]
    word = row // 2 * value_words + chunk * 32 + row % 2 * 16 + tl.arange(0, 16)[None, None, :]
    bits = tl.load(values + word, chunk * 32 < value_words, 0).to(tl.uint32, bitcast=True)
    # Now the words are in the order of the weights' bytes, so that a thread stores the 16 bytes of four words at once.
    bits = tl.permute(tl.reshape(bits, (8, GROUPS // 2, 4, 4)), (0, 1, 3, 2))[:, :, :, None, :]
    bits = tl.reshape(tl.broadcast_to(bits, (8, GROUPS // 2, 4, 2, 4)), (8, GROUPS, 16))

    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[None, :, None]
    byte = tl.arange(0, 16)[None, None, :]
    inside, second = group < groups, byte // 4 % 2
    scale = tl.load(scales + group // 2 * 32 + row * 2 + group % 2, inside, 0).to(tl.int32)
    # The halves of a word hold the first and the second weights of four bytes. The first three weights lie where a
    # BF16 has them, shifted right by 0, 3 and 6 bits; the bits of the last one fill the gaps.
    last = (bits << 1) & 0x80008000 | (bits >> 3) & 0x01800180 | (bits >> 7) & 0x00400040
    upper, lower = bits << second * 6, tl.where(second == 1, last, bits << 3)
    upper = two_weights((upper << 16) & 0x81C00000, upper & 0x81C00000, power_of(scale & 255))
    lower = two_weights((lower << 16) & 0x81C00000, lower & 0x81C00000, power_of(scale >> 8 & 255))
    at = out + (row * groups + group) * 16 + byte
    rows_left = rows - row_block * 16
    tl.store(at, upper, inside & (row < rows_left))
    tl.store(at + groups * 128, lower, inside & (row + 8 < rows_left))


@triton.jit
def dequantized_tile(bits, power, like, COLUMNS: tl.constexpr, GROUPS: tl.constexpr):
    # A tile of weights in the type of `like`, transposed for tl.dot.
    return tl.trans(tl.reshape(e2m1_to_float32(bits, power), (COLUMNS, GROUPS * 16)).to(like.dtype.element_ty))


@triton.jit
def packed_product(
    even, odd, blocks, scales, offs, out, width, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr
):
    """The products of each expert's rows, which end at `offs`, with its packed weights, dequantized tile by tile. The
    grid is (tiles of `width`, experts). `even` and `odd` (rows, depth / 2) are the even and odd columns of the rows, as
    a byte holds an even and an odd weight; `out` is (rows, width)."""
    expert = tl.program_id(1)
    begin = tl.load(offs + expert - 1, expert > 0, 0)
    end = tl.load(offs + expert)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    groups = depth // 32
    line = (expert.to(tl.int64) * width + column) * groups  # index of a group of 32 weights: one scale and 16 bytes
    for start_row in range(begin, end, ROWS):
        row = start_row + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, groups, GROUPS):
            group = start + tl.arange(0, GROUPS)
            inside = (column < width)[:, None] & (group < groups)[None, :]
            at = line[:, None] + group[None, :]
            scale = tl.load(scales + at, inside, 0).to(tl.int32)
            power = power_of(scale)[:, :, None]
            byte = at[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
            code = tl.load(blocks + byte, inside[:, :, None], 0).to(tl.uint32)
            low = dequantized_tile(first_code(code), power, even, COLUMNS, GROUPS)
            high = dequantized_tile(second_code(code), power, even, COLUMNS, GROUPS)
            half = start * 16 + tl.arange(0, GROUPS * 16)  # a byte's low bits hold the even weight
            where = row.to(tl.int64)[:, None] * (depth // 2) + half[None, :]
            mask = (row < end)[:, None] & (half < depth // 2)[None, :]
            total = tl.dot(tl.load(even + where, mask, 0.0), low, total)
            total = tl.dot(tl.load(odd + where, mask, 0.0), high, total)
        place = out + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), (row < end)[:, None] & (column < width)[None, :])
