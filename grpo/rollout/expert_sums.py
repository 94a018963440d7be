# SPDX-License-Identifier: Apache-2.0
"""Sums of the experts' outputs of each token, in blocks of columns that run at the same time.

triton_kernels gives all columns of a token to one warp, which reads its experts' outputs one after the other: a chain
of 24 reads in gpt-oss-20b, at any number of tokens. The sums here are the same bits.
"""

import torch
import triton
import triton.language as tl

BLOCK = 256  # Columns of a block.


@triton.jit
def _sum_experts(X, stride_row, Out, stride_out, Index, columns, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for n in tl.static_range(EXPERTS):
        row = tl.load(Index + token * EXPERTS + n).to(tl.int64)
        total += tl.load(X + row * stride_row + column, mask=(column < columns) & (row != -1), other=0.0).to(tl.float32)
    tl.store(Out + token * stride_out + column, total.to(Out.dtype.element_ty), mask=column < columns)


def sum_experts(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` (1, tokens, N) becomes the sums of the rows of `x` (1, 1, M, N) that `index` (tokens, experts) names; -1
    is no row."""
    (tokens, experts), columns = index.shape, x.shape[-1]
    grid = tokens, triton.cdiv(columns, BLOCK)
    _sum_experts[grid](x, x.stride(2), out, out.stride(1), index, columns, EXPERTS=experts, BLOCK_N=BLOCK, num_warps=1)
    return out
