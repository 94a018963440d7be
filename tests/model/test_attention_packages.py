# SPDX-License-Identifier: Apache-2.0
"""Flash kernels without their packages and without a GPU: the adapters of FlashAttention 2 and 3 and of torch's own on
stand-ins with their signatures, and broken packages."""

import inspect
import sys
import types

import pytest
import torch
from reference_kernel import reference_backward, reference_forward

from grpo.model.attention import KERNELS, SEQLENS
from grpo.model.load import load_model
from grpo.plan.machine import FLASH_PACKAGES

FLASH = tuple(FLASH_PACKAGES)

# The arguments of the packages (https://github.com/Dao-AILab/flash-attention), in their order: a call that does not fit
# them is a TypeError. Of those that have a default, only the ones that the adapters name.
STAND_INS = {
    "flash_attention_2": ("flash_attn.flash_attn_interface", {  # of 2.7.0; later ones append arguments with a default
        "_flash_attn_varlen_forward": """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
            softmax_scale, causal, window_size_left=-1, window_size_right=-1""",
        "_flash_attn_varlen_backward": """dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
            alibi_slopes, deterministic""",
    }),
    "flash_attention_3": ("flash_attn_3._C", {  # the operators of hopper/flash_api.cpp as of May 2025
        "fwd": """q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
            max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
            q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left=-1, window_size_right=-1,
            num_splits=0""",
        "bwd": """dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            max_seqlen_q, max_seqlen_k, softmax_scale, is_causal, window_size_left=-1, window_size_right=-1,
            deterministic=False""",
    }),
}  # fmt: skip
assert STAND_INS.keys() == FLASH_PACKAGES.keys()
# (queries, keys) of each packed sequence: as many keys as queries, keys of a prefix before them, a single query.
LENGTHS = [(5, 5), (3, 9), (1, 6), (7, 7)]
TORCH = "_flash_attention_forward", "_flash_attention_backward"
TORCHS_NAMES = {  # and those of the packages
    "query": "q", "key": "k", "value": "v", "grad_out": "dout", "logsumexp": "softmax_lse", "cum_seq_q": "cu_seqlens_q",
    "cum_seq_k": "cu_seqlens_k", "max_q": "max_seqlen_q", "max_k": "max_seqlen_k", "scale": "softmax_scale",
}  # fmt: skip


def compute(package, a):
    """The result of a package's function by the reference kernel, from a call's arguments `a` as it names them."""
    a = {TORCHS_NAMES.get(name, name): value for name, value in a.items() if name not in ("rng_state", "unused")}
    causal = a.pop("is_causal" if package in ("flash_attention_3", "torch_flash") else "causal", False)
    shape = {name: a.pop(name) for name in (*SEQLENS, "softmax_scale")}
    left, right = (a.pop(f"window_size_{side}", None) for side in ("left", "right"))
    assert causal and right == 0
    shape |= {"window_size_left": left, "window_size_right": 0}
    for x in "qk":
        starts = shape[f"cu_seqlens_{x}"]
        assert starts.dtype == torch.int32 and shape[f"max_seqlen_{x}"] == int(starts.diff().max())
    q, k, v, out, dout = (a.pop(name, None) for name in ("q", "k", "v", "out", "dout"))
    lse, targets = a.pop("softmax_lse", None), [a.pop(name, None) for name in ("dq", "dk", "dv")]
    assert a.pop("num_splits", 1) == 1 and not any(a.values())
    if dout is None:
        out, lse = reference_forward(q, k, v, **shape)
        return out, lse, None, None
    gradients = reference_backward(dout, q, k, v, out, lse, **shape)
    if package == "torch_flash":
        return *gradients, None
    for target, gradient in zip(targets, gradients, strict=True):
        target.copy_(gradient)
    return torch.zeros(1)


def stand_in(package, name, arguments):
    space = {}
    exec(f"def {name}({arguments}): pass", space)
    signature = inspect.signature(space[name])
    return lambda *a, **keywords: compute(package, signature.bind(*a, **keywords).arguments)


@pytest.fixture(params=FLASH)
def package(request, monkeypatch):
    """The name of an implementation whose functions stand-ins take the place of."""
    if request.param == "torch_flash":
        schemas = {name: getattr(torch.ops.aten, name).default._schema.arguments for name in TORCH}
        functions = {}
        for name, schema in schemas.items():
            arguments = (f"{a.name}=None" if a.has_default_value() else a.name for a in schema)
            functions[name] = stand_in(request.param, name, ", ".join(arguments))
        monkeypatch.setattr(torch.ops, "aten", types.SimpleNamespace(**functions))
        return request.param
    module, signatures = STAND_INS[request.param]
    functions = {name: stand_in(request.param, name, arguments) for name, arguments in signatures.items()}
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    vars(sys.modules[module]).update(functions)
    monkeypatch.setattr(torch.ops, "flash_attn_3", types.SimpleNamespace(**functions), raising=False)
    return request.param


def packed():
    """q (Tq, Hq, D), k and v (Tk, Hkv, D) in float32, and a kernel's shape without its window."""
    g = torch.Generator().manual_seed(0)
    queries, keys = zip(*LENGTHS, strict=True)
    shape = {f"cu_seqlens_{x}": torch.tensor([0, *n]).cumsum(0).int() for x, n in (("q", queries), ("k", keys))}
    shape |= {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys), "softmax_scale": 0.3}
    q = torch.randn(sum(queries), 4, 8, generator=g)
    k, v = (torch.randn(sum(keys), 2, 8, generator=g) for _ in range(2))
    return q, k, v, shape


@pytest.mark.parametrize("package", [*FLASH, "torch_flash"], indirect=True)
@pytest.mark.parametrize("window", [-1, 2])
def test_adapters_call_their_functions_right(package, window):
    """Output, log-sum-exp and gradients are the reference's."""
    kernel = KERNELS[package]()
    q, k, v, shape = packed()
    shape |= {"window_size_left": window, "window_size_right": 0}
    out, lse = kernel.forward(q, k, v, **shape)
    assert all(map(torch.equal, (out, lse), reference_forward(q, k, v, **shape)))
    inputs = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)), q, k, v, out, lse.contiguous()
    gradients = kernel.backward(*inputs, **shape)[:3]
    assert all(map(torch.equal, gradients, reference_backward(*inputs, **shape)))


@pytest.mark.parametrize("attention", FLASH)
def test_metadata_without_a_module_ends_before_weights_are_loaded(monkeypatch, attention):
    monkeypatch.setitem(sys.modules, STAND_INS[attention][0].split(".")[0], None)
    with pytest.raises(ModuleNotFoundError):
        load_model("/nowhere", {}, attention)
