# SPDX-License-Identifier: Apache-2.0
"""Draws a token of each row of logits, with its log-prob, in one pass over the logits.

vLLM's own sampler (vllm/v1/sample/) makes float32 tensors of all probabilities, of all log-probs and of the noise: it
moves sixteen times the logits' bytes, 1.2 GB a step of 96 sequences.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048  # Columns of a program.
MOST_BLOCKS = 1024  # Programs of a row, whose results one program combines.


@triton.jit
def _values(Logits, stride, row, column, temperature, columns):
    logit = tl.load(Logits + row.to(tl.int64) * stride + column, mask=column < columns, other=float("-inf"))
    return tl.div_rn(logit, temperature)


@triton.jit
def _draw_blocks(Logits, stride, Temperature, Seed, Token, Score, Top, Total, columns, blocks, BLOCK_N: tl.constexpr):
    """The token of a block whose probability, divided by an exponential draw, is highest: of all tokens it is each with
    its probability. Its score is the logarithm of this. Beside it the largest value, and the sum of exponentials below
    it."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature, seed = tl.load(Temperature + row), tl.load(Seed)
    lanes: tl.constexpr = BLOCK_N // 4
    lane = tl.arange(0, lanes)
    top = tl.full([lanes], float("-inf"), tl.float32)
    for n in tl.static_range(4):
        top = tl.maximum(top, _values(Logits, stride, row, block * BLOCK_N + n * lanes + lane, temperature, columns))
    highest = tl.max(top)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # Otherwise no token of the block is allowed.
    draws = tl.rand4x(seed, (row * blocks + block) * lanes + lane)
    best, total, token = tl.full([lanes], -1.0, tl.float32), tl.zeros([lanes], tl.float32), tl.zeros([lanes], tl.int32)
    for n in tl.static_range(4):
        column = block * BLOCK_N + n * lanes + lane
        share = tl.exp(_values(Logits, stride, row, column, temperature, columns) - base)
        # -log(1 - u), whose small values decide: there 1 - u would be rounded, so its series is taken.
        u = tl.maximum(draws[n], 4.7e-10)
        exponential = tl.where(u < 0.001, u * (1 + u * (0.5 + u * 0.33333333)), -tl.log(1 - u))
        ratio = tl.where(column < columns, share / exponential, -1.0)
        token = tl.where(ratio > best, column, token)  # A NaN is above nothing: the row's log-prob says so.
        best = tl.maximum(best, ratio)
        total += share
    place = row * blocks + block
    winner = tl.argmax(best, 0)
    tl.store(Token + place, tl.sum(tl.where(lane == winner, token, 0)))
    tl.store(Score + place, base + tl.log(tl.max(best)))
    tl.store(Top + place, highest)
    tl.store(Total + place, tl.sum(total))


@triton.jit
def _draw_rows(
    Logits, stride, Temperature, Token, Score, Top, Total, OutToken, OutLogp, blocks, BLOCKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    place = tl.arange(0, BLOCKS)
    mask = place < blocks
    top = tl.load(Top + row * blocks + place, mask=mask, other=float("-inf"))
    total = tl.load(Total + row * blocks + place, mask=mask, other=0.0)
    highest = tl.max(top)
    normalizer = highest + tl.log(tl.sum(tl.where(mask, total * tl.exp(top - highest), 0.0)))
    score = tl.load(Score + row * blocks + place, mask=mask, other=float("-inf"))
    winner = tl.argmax(tl.where(score == score, score, float("-inf")), 0)
    token = tl.load(Token + row * blocks + tl.minimum(winner, blocks - 1)).to(tl.int64)
    logit = tl.load(Logits + row.to(tl.int64) * stride + token)
    tl.store(OutToken + row, token)
    tl.store(OutLogp + row, tl.div_rn(logit, tl.load(Temperature + row)) - normalizer)


def draw_tokens(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows,) tokens, int64, and their log-probs after `temperature` (rows,), float32, of `logits` (rows, vocabulary),
    float32. The noise depends on torch's generator of the logits' device, from which it takes one number."""
    rows, columns = logits.shape
    blocks = triton.cdiv(columns, BLOCK)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and blocks <= MOST_BLOCKS
    seed = torch.randint(2**62, (1,), device=logits.device)
    # Tensors of their own, as Triton compiles a kernel again for a view that is not aligned.
    score, top, total = (torch.empty((rows, blocks), dtype=torch.float32, device=logits.device) for _ in range(3))
    tokens_of_blocks = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logps = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _draw_blocks[rows, blocks](
        logits, logits.stride(0), temperature, seed, tokens_of_blocks, score, top, total, columns, blocks,
        BLOCK_N=BLOCK, num_warps=4,
    )  # fmt: skip
    _draw_rows[(rows,)](
        logits, logits.stride(0), temperature, tokens_of_blocks, score, top, total, tokens, logps, blocks,
        BLOCKS=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return tokens, logps
