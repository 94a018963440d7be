# SPDX-License-Identifier: Apache-2.0
"""Log-probs of a model's tokens, from logits in float32 of which one tile exists at a time."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from trl.kernels import chunked_logprob as kernels

from grpo.model.head import float32_logits
from grpo.plan.memory import HEAD_ROWS, HEAD_TILE

# Arguments of TRL's kernels by which gpt-oss's logits stay as they are.
PLAIN = {"logit_scale": 1.0, "softcap": 1.0, "HAS_SOFTCAP": False, "BLOCK_SIZE": kernels._BLOCK_SIZE}
ENTROPY_ALONE = {f"HAS_{name.upper()}": name == "entropy" for name in kernels.OPTIONAL_OUTPUTS}
Fold = Callable[..., None]  # Folds a tile into statistics, or turns it into its gradient: Triton's kernel, or torch.


def logit_tiles(states: Tensor, weight: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows of `states`, rows of `weight`, their logits), each valid until the next, from one buffer."""
    buffer = states.new_empty(min(len(states), HEAD_ROWS) * min(len(weight), HEAD_TILE), dtype=torch.float32)
    for row in range(0, len(states), HEAD_ROWS):
        rows = slice(row, row + HEAD_ROWS)
        for token in range(0, len(weight), HEAD_TILE):
            vocabulary = slice(token, token + HEAD_TILE)
            shape = len(states[rows]), len(weight[vocabulary])
            tile = buffer[: math.prod(shape)].view(shape)
            yield rows, vocabulary, float32_logits(states[rows], weight[vocabulary], out=tile)


class HeadLogProbs(torch.autograd.Function):
    """TRL's ChunkedLogProbFunction for a frozen head without bias, but with logits in float32.

    TRL's own rounds a BF16 model's logits to BF16 before their softmax, in both passes; its kernel for divergences no
    longer does (trl/kernels/chunked_divergence.py), so this class can go when the one for log-probs follows."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (N,) of `targets` (N,) after `states` (N, hidden), by the head's `weight` (V, hidden)
        and after `temperature`. Entropies have no gradient."""
        ctx.arguments = PLAIN | {"inv_t": 1 / temperature}
        inputs = states.to(weight.dtype)
        sums = states.new_zeros(7, len(states), dtype=torch.float32)  # TRL's statistics of each row, over its tiles
        sums[0] = -math.inf
        for rows, vocabulary, logits in logit_tiles(inputs, weight):
            on_gpu, grid = kernels._use_triton(logits.device), (len(logits),)
            fold: Fold = kernels._forward_kernel[grid] if on_gpu else kernels._forward_tile
            tile = logits, logits.stride(0), targets[rows], *sums[:, rows], vocabulary.start, logits.shape[1]
            fold(*tile, **ENTROPY_ALONE, **ctx.arguments)
        largest, total, weighted, *_, target_logits = sums
        log_z = largest + total.log()
        entropies = log_z - weighted / total
        ctx.save_for_backward(states, weight, targets, log_z)
        ctx.mark_non_differentiable(entropies)
        return target_logits - log_z, entropies

    @staticmethod
    def backward(ctx: Any, slopes: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of `states` from that of the log-probs, `slopes` (N,). Logits are computed again, and each tile
        becomes its own gradient."""
        states, weight, targets, log_z = ctx.saved_tensors
        gradient, slopes = torch.zeros_like(states, dtype=torch.float32), slopes.float().contiguous()
        for rows, vocabulary, logits in logit_tiles(states.to(weight.dtype), weight):
            on_gpu, grid = kernels._use_triton(logits.device), (len(logits), -(-logits.shape[1] // kernels._BLOCK_SIZE))
            fold: Fold = kernels._backward_kernel[grid] if on_gpu else kernels._backward_tile
            unused = log_z[rows]  # in place of entropies and their gradient
            known = targets[rows], log_z[rows], unused, slopes[rows], unused, vocabulary.start, logits.shape[1]
            fold(logits, logits.stride(0), *known, HAS_LOGPROB_GRAD=True, HAS_ENTROPY_GRAD=False, **ctx.arguments)
            kernels._addmm_fp32(gradient[rows], logits.to(weight.dtype), weight[vocabulary])
        return gradient.to(states.dtype), None, None, None
