# SPDX-License-Identifier: Apache-2.0
"""Flash kernels without their packages and without a GPU: the adapters of FlashAttention 2, 3 and 4 and of torch's own
on stand-ins with their signatures, and broken packages."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch
from machines import CPU
from packed_rows import packed
from reference_kernel import reference_backward, reference_forward
from transformers.integrations import hub_kernels

import train_grpo
from grpo.model.attention import KERNELS, SEQLENS, unusable_attention
from grpo.plan.machine import FLASH_PACKAGES
from grpo.run.ranks import Ranks

FLASH = tuple(FLASH_PACKAGES)

# The arguments, their order and defaults are those of the packages (https://github.com/Dao-AILab/flash-attention): a
# call that does not fit them is a TypeError.
FLASH2 = {  # flash_attn/flash_attn_interface.py of 2.7.0; later ones append arguments with a default
    "_flash_attn_varlen_forward": """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None""",
    "_flash_attn_varlen_backward": """dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, deterministic, rng_state=None""",
}
FLASH3 = {  # the operators of hopper/flash_api.cpp as of May 2025; newer ones have more defaults
    "fwd": """q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0,
        pack_gqa=None, sm_margin=0""",
    "bwd": """dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, softmax_scale, is_causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        deterministic=False, sm_margin=0""",
}
FLASH4 = {  # flash_attn/cute/interface.py of 4.0.0b26; of the defaults behind the window, those that a call could name
    "_flash_attn_fwd": """q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False,
        softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, num_splits=1, pack_gqa=None,
        return_lse=False, out=None, lse=None""",
    "_flash_attn_bwd": """q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, dlse=None, learnable_sink=None""",
}
STAND_INS = {
    "flash_attention_2": ("flash_attn.flash_attn_interface", FLASH2),
    "flash_attention_3": ("flash_attn_3._C", FLASH3),
    "flash_attention_4": ("flash_attn.cute.interface", FLASH4),
}
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
    if package == "flash_attention_4":
        assert left is right is None if causal else left >= 0 == right
    else:
        assert causal and right == 0
    shape |= {"window_size_left": -1 if left is None else left, "window_size_right": 0}
    for x in "qk":
        starts = shape[f"cu_seqlens_{x}"]
        assert starts.dtype == torch.int32 and shape[f"max_seqlen_{x}"] == int(starts.diff().max())
    q, k, v, out, dout = (a.pop(name, None) for name in ("q", "k", "v", "out", "dout"))
    lse, targets = a.pop("softmax_lse", a.pop("lse", None)), [a.pop(name, None) for name in ("dq", "dk", "dv")]
    returns_lse = a.pop("return_lse", package != "flash_attention_4")
    assert a.pop("num_splits", 1) == 1 and not any(a.values())
    if dout is None:
        out, lse = reference_forward(q, k, v, **shape)
        return out, lse if returns_lse else None, None, None
    gradients = reference_backward(dout, q, k, v, out, lse, **shape)
    if package in ("flash_attention_4", "torch_flash"):
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
        named = {n: ", ".join(a.name + "=None" * a.has_default_value() for a in schemas[n]) for n in TORCH}
        functions = {name: stand_in(request.param, name, arguments) for name, arguments in named.items()}
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


def test_usable_packages_and_other_attention_have_no_problem(package):
    assert not any(map(unusable_attention, (package, "torch_flash", "eager")))


def test_a_hub_kernel_is_loaded_by_transformers_or_the_reason_is_named(monkeypatch):
    """The package `kernels` is in the GPU set only: a function stands in for its download here."""
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: False)
    assert "the Hub kernel cannot be used (ImportError" in unusable_attention("org/flash-attn2")
    names = []

    def get_kernel(name, **options):
        names.append(name)
        if name == "org/none":
            raise FileNotFoundError("no build for\ntorch 2.11")
        return types.SimpleNamespace(flash_attn_varlen_func=print)

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    assert unusable_attention("org/flash-attn2") is None
    problem = unusable_attention("org/none")
    assert "no build for torch 2.11" in problem and "ATTN_IMPL=torch_flash" in problem
    assert names == ["org/flash-attn2", "org/none"]


@pytest.mark.parametrize("attention", FLASH)
def test_metadata_without_a_module_ends_before_the_model_is_loaded(monkeypatch, capsys, attention):
    module, _ = STAND_INS[attention]
    monkeypatch.setitem(sys.modules, module.split(".")[0], None)
    monkeypatch.setattr("grpo.model.load.unseen_gpu", lambda machine: None)
    used = {"machine": CPU, "attention": attention, "ranks": Ranks(), "files": "files", "plan": "plan"}
    resolved = types.SimpleNamespace(run=None, settings=None, **used)
    assert train_grpo.launch(resolved) == 2
    problem = capsys.readouterr().err
    distribution, install = FLASH_PACKAGES[attention]
    for part in (f"ATTN_IMPL: {attention}", distribution, "ModuleNotFoundError", install, "ATTN_IMPL=torch_flash"):
        assert part in problem


@pytest.mark.parametrize("missing", [0, 1], ids=["forward", "backward"])
def test_a_package_without_the_functions_is_named(monkeypatch, package, missing):
    module, functions = STAND_INS[package]
    name = list(functions)[missing]
    monkeypatch.delattr(torch.ops.flash_attn_3 if package == "flash_attention_3" else sys.modules[module], name)
    assert name in unusable_attention(package)
