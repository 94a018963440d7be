# SPDX-License-Identifier: Apache-2.0
"""Attention with gpt-oss's sinks, computed exactly, over packed sequences that share a prompt."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from grpo.model.packing import PackedBatch, may_attend


def hidden_states(model: PreTrainedModel, batch: PackedBatch, attention: str) -> Tensor:
    """(N, hidden): the last hidden states of the base `model` that predict the completion tokens of `batch`.

    GptOssModel takes masks by layer type; for a Hub kernel it makes its own from the (R, T) mask of real tokens."""
    windows = {"full_attention": None, "sliding_attention": model.config.sliding_window}
    masks: dict[str, PackedBatch] | dict[str, Tensor] | Tensor
    if attention in KERNELS:
        masks = dict.fromkeys(windows, batch)
    elif attention == "eager":
        allowed = {kind: may_attend(batch, size)[:, None] for kind, size in windows.items()}  # (R, 1, T, T)
        lowest, dtype = torch.finfo(model.dtype).min, model.dtype
        masks = {kind: torch.zeros_like(x, dtype=dtype).masked_fill_(~x, lowest) for kind, x in allowed.items()}
    else:
        masks = (batch.segment >= 0).long()
    out = model.model(input_ids=batch.ids, position_ids=batch.positions, attention_mask=masks, use_cache=False)
    return out.last_hidden_state.flatten(0, 1)[batch.state_index]


class Kernel(NamedTuple):
    """A causal flash kernel without sinks, over concatenated sequences; queries and keys are aligned at their ends.

    forward(q, k, v, **shape) -> (out, lse) and backward(dout, q, k, v, out, lse, **shape) -> (dq, dk, dv). q and out
    are (Tq, Hq, D), k and v (Tk, Hkv, D), lse (Hq, Tq) float32 by the natural logarithm. The shape has the packages'
    names: cu_seqlens_q and cu_seqlens_k (S + 1,) int32, max_seqlen_q, max_seqlen_k, softmax_scale, and how many keys
    before and after its own position a query sees, window_size_left (-1 means no limit) and window_size_right."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]


SEQLENS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def torch_flash() -> Kernel:
    """The FlashAttention 2 that comes with torch."""

    def forward(q, k, v, softmax_scale, **shape):
        seqlens = [shape.pop(name) for name in SEQLENS]
        return torch.ops.aten._flash_attention_forward(
            q, k, v, *seqlens, 0.0, True, False, scale=softmax_scale, **shape
        )[:2]

    def backward(dout, q, k, v, out, lse, softmax_scale, **shape):
        seqlens = [shape.pop(name) for name in SEQLENS]
        # Only dropout reads the random state; type and shape are copied from torch.nn.attention.varlen.
        state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *seqlens, 0.0, True, state, unused, scale=softmax_scale, **shape
        )

    return Kernel(forward, backward)


def flash_attention_2() -> Kernel:
    """The kernels of the package flash-attn, version 2."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

    def forward(q, k, v, **shape):
        return _flash_attn_varlen_forward(q, k, v, **shape, dropout_p=0.0, causal=True)[:2]

    def backward(dout, q, k, v, out, lse, **shape):
        gradients = [x.new_empty(x.shape) for x in (q, k, v)]
        shape |= {"dropout_p": 0.0, "causal": True, "softcap": 0.0, "alibi_slopes": None, "deterministic": False}
        _flash_attn_varlen_backward(dout, q, k, v, out, lse, *gradients, **shape)
        return tuple(gradients)

    return Kernel(forward, backward)


def flash_attention_3() -> Kernel:
    """The kernels of flash-attn 3 for Hopper, as operators of torch."""
    import flash_attn_3._C  # noqa: F401  registers the operators

    # The operators have kept their argument names since May 2025; the package's Python functions have not.
    fwd, bwd = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd
    # These arguments have no default in older builds.
    absent = """k_new v_new q_v out cu_seqlens_k_new seqused_q seqused_k page_table kv_batch_idx leftpad_k
        rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale"""

    def forward(q, k, v, **shape):
        return fwd(q, k, v, **shape, **dict.fromkeys(absent.split()), is_causal=True, num_splits=1)[:2]

    def backward(dout, q, k, v, out, lse, **shape):
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        shape |= {"seqused_q": None, "seqused_k": None, "is_causal": True, "deterministic": False}
        bwd(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **shape)
        return dq, dk, dv  # the returned tuple differs between builds, but every build fills these tensors

    return Kernel(forward, backward)


# Each function imports its package. A new one is a value of ATTN_IMPL only if FLASH_PACKAGES in grpo/plan/machine.py
# lists it too; the setting's text, docs/maintainers/learner.md and docs/install.md name it, and a test has a stand-in.
KERNELS = {kernel.__name__: kernel for kernel in (torch_flash, flash_attention_2, flash_attention_3)}


def install_attention(attention: str) -> str:
    """Register this project's attention with transformers; return the name under which a model finds it.

    https://huggingface.co/docs/transformers/attention_interface"""
    if attention not in KERNELS:
        return attention
    KERNELS[attention]()  # A package that is missing or broken raises here, before weights are loaded.
    # The name must not contain `flash`: transformers would replace it by a kernel from the Hub.
    name = "sinks_" + attention.replace("flash", "kernel")
    AttentionInterface.register(name, functools.partial(kernel_attention, attention))
    return name


def kernel_attention(
    name, module, query, key, value, attention_mask, scaling, sliding_window=None, s_aux=None, **kwargs
):
    """The flash kernel `name` behind transformers' attention interface: `query` (1, Hq, T, D), `key` and `value`
    (1, Hkv, T, D), `attention_mask` a PackedBatch, `s_aux` the sinks (Hq,). Returns (1, T, Hq, D)."""
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    out = SinkAttention.apply(*flat, s_aux, attention_mask, KERNELS[name](), scaling, sliding_window)
    return out.unsqueeze(0), None


class SinkAttention(torch.autograd.Function):
    """Attention with sinks, computed with a flash kernel that has none: apply(q, k, v, sink, batch, kernel, scale,
    window) with q (T, Hq, D), k and v (T, Hkv, D), sink (Hq,). Exact in q, k and v; the sinks are frozen.

    A sink is one more score in the softmax's denominator, with a value of 0. With lse' = logaddexp(lse, sink) and
    out' = out * exp(lse - lse'), the kernel's own backward on (out', lse') computes P' = exp(S - lse') and
    dS = P' * (dP - rowsum(dout * out')), which is the gradient of the wider softmax."""

    @staticmethod
    def forward(ctx, q, k, v, sink, batch, kernel, scale, window):
        n, keys = batch.queries, batch.keys
        shape = {name: getattr(batch, name) for name in SEQLENS} | {"softmax_scale": scale}
        shape |= {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
        out, lse = kernel.forward(q[:n], k[keys], v[keys], **shape)
        total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])  # (Hq, n)
        out.mul_((lse - total).exp().T[..., None])  # In place: torch computes it in float32 without a copy of `out`.
        out = pad(out, (0, 0, 0, 0, 0, len(q) - n))
        ctx.save_for_backward(q, k, v, out, total)
        ctx.batch, ctx.kernel, ctx.shape = batch, kernel, shape
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, total = ctx.saved_tensors
        n, keys = ctx.batch.queries, ctx.batch.keys
        gradient = gradient[:n].contiguous()
        dq, dk, dv = ctx.kernel.backward(gradient, q[:n], k[keys], v[keys], out[:n], total.contiguous(), **ctx.shape)
        # A prompt's key has a gradient from each of its completions; these are summed in float32.
        wide = torch.promote_types(k.dtype, torch.float32)
        dk, dv = (torch.zeros(k.shape, dtype=wide, device=k.device).index_add_(0, keys, d.to(wide)) for d in (dk, dv))
        return pad(dq, (0, 0, 0, 0, 0, len(q) - n)), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def unwrap_peft(model: torch.nn.Module) -> PreTrainedModel:
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


@contextlib.contextmanager
def using_attention(model: torch.nn.Module, implementation: str) -> Iterator[None]:
    """Run `model` with the attention `implementation` inside the block, such as another one for generation."""
    base = unwrap_peft(model)
    before = base.config._attn_implementation
    base.set_attn_implementation(implementation)
    try:
        yield
    finally:
        base.set_attn_implementation(before)
