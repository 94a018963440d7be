# SPDX-License-Identifier: Apache-2.0
"""A flash kernel in plain torch, with the interface of attention.Kernel: for tests on a CPU, in any float type."""

import torch

from grpo.model.attention import Kernel


def sequences(q, cu_seqlens_q, cu_seqlens_k, window_size_left):
    """Per sequence: slices of the queries and of the keys, and the mask (queries, keys) of what a query sees."""
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(cu_seqlens_q) - 1):
        rows, cols = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1]), slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        n_q, n_k = cu_seqlens_q[i + 1] - cu_seqlens_q[i], cu_seqlens_k[i + 1] - cu_seqlens_k[i]
        # Distance from each key forward to the query; the last query stands at the last key.
        distance = torch.arange(n_q, device=q.device)[:, None] + (n_k - n_q) - torch.arange(n_k, device=q.device)
        yield rows, cols, (distance >= 0) & (distance <= (n_k if window_size_left < 0 else window_size_left))


def scores_of(q, k, visible, scale):
    """(Hq, queries, keys), -inf where masked; the keys' heads are repeated for their group of query heads."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~visible, -torch.inf)


def reference_forward(q, k, v, *, softmax_scale, max_seqlen_q, max_seqlen_k, window_size_right, **shape):
    """Output in the type of `q` and lse in float32 at least, computed in float64, so that only callers round. The lse
    is not contiguous, as a kernel may return it."""
    wide_q, wide_k, wide_v = (x.double() for x in (q, k, v))
    out = torch.zeros_like(wide_q)
    lse = wide_q.new_full((q.shape[1], q.shape[0]), -torch.inf)
    for rows, cols, visible in sequences(q, **shape):
        scores = scores_of(wide_q[rows], wide_k[cols], visible, softmax_scale)
        lse[:, rows] = scores.logsumexp(-1)
        values = wide_v[cols].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows] = torch.einsum("hqk,khd->qhd", (scores - lse[:, rows, None]).exp(), values)
    return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32)).T.contiguous().T


def reference_backward(
    dout, q, k, v, out, lse, *, softmax_scale, max_seqlen_q, max_seqlen_k, window_size_right, **shape
):
    """The kernels' own formula: probabilities from the lse passed in, rowsum(dout * out) from the out passed in.

    Unlike autograd through the scores it therefore stays right for an out and lse that a sink was folded into."""
    assert lse.is_contiguous()
    wide_q, wide_k, wide_v, wide_dout, wide_out = (x.double() for x in (q, k, v, dout, out))
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros_like(x) for x in (wide_q, wide_k, wide_v))
    delta = (wide_dout * wide_out).sum(-1).T[..., None]  # (Hq, Tq, 1)
    for rows, cols, visible in sequences(q, **shape):
        p = (scores_of(wide_q[rows], wide_k[cols], visible, softmax_scale) - lse[:, rows, None]).exp()
        dp = torch.einsum("qhd,khd->hqk", wide_dout[rows], wide_v[cols].repeat_interleave(group, 1))
        ds = p * (dp - delta[:, rows]) * softmax_scale
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, wide_k[cols].repeat_interleave(group, 1))
        # Each key head collects the gradients of its group of query heads.
        dk[cols] += torch.einsum("hqk,qhd->khd", ds, wide_q[rows]).unflatten(1, (-1, group)).sum(2)
        dv[cols] += torch.einsum("hqk,qhd->khd", p, wide_dout[rows]).unflatten(1, (-1, group)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


REFERENCE = Kernel(reference_forward, reference_backward)
