# SPDX-License-Identifier: Apache-2.0
"""Packed rows for tests of attention."""

from __future__ import annotations

import torch
from reference_kernel import reference_backward, reference_forward

from grpo.model.attention import Kernel

REFERENCE = Kernel(reference_forward, reference_backward)
HEADS, KEY_HEADS, DIM, SCALE = 4, 2, 8, 0.3
# (queries, keys) of each packed sequence: as many keys as queries, keys of a prefix before them, a single query.
LENGTHS = [(5, 5), (3, 9), (1, 6), (7, 7)]


def normal(*shape, generator, dtype):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def packed():
    """q (Tq, Hq, D), k and v (Tk, Hkv, D) in float32, and a kernel's shape without its window."""
    g = torch.Generator().manual_seed(0)
    queries, keys = zip(*LENGTHS, strict=True)
    shape = {f"cu_seqlens_{x}": torch.tensor([0, *n]).cumsum(0).int() for x, n in (("q", queries), ("k", keys))}
    shape |= {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys), "softmax_scale": SCALE}
    q = torch.randn(sum(queries), HEADS, DIM, generator=g)
    k, v = (torch.randn(sum(keys), KEY_HEADS, DIM, generator=g) for _ in range(2))
    return q, k, v, shape
