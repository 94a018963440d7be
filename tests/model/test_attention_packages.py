# SPDX-License-Identifier: Apache-2.0
"""Attention from packages, without them and without a GPU: the adapters of FlashAttention 2, 3 and 4 on stand-ins with the
packages' signatures, and what happens if a package is broken.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types

import pytest
import torch
from machines import CPU, GOOD_VERSIONS, H100, package_problems
from packed_rows import packed
from reference_kernel import reference_backward, reference_forward

import train_grpo
from grpo.model.attention import KERNELS, unusable_attention
from grpo.preflight.checks import check_settings
from grpo.preflight.machine import FLASH_PACKAGES, installed_versions
from grpo.settings import Problems, Settings

FLASH = tuple(FLASH_PACKAGES)

# The arguments, their order and defaults are those of the packages (https://github.com/Dao-AILab/flash-attention): a call
# that does not fit them is a TypeError.
FLASH2 = {  # flash_attn/flash_attn_interface.py of 2.7.0; later ones append arguments with a default
    "_flash_attn_varlen_forward": """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None""",
    "_flash_attn_varlen_backward": """dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, deterministic, rng_state=None""",
}
FLASH3 = {  # the operators of hopper/flash_api.cpp as of May 2025; newer ones have the same arguments with more defaults
    "fwd": """q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale,
        k_descale, v_descale, softmax_scale, is_causal, window_size_left=-1, window_size_right=-1, attention_chunk=0,
        softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0""",
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


def compute(package, a):
    """What a package's function returns, by the reference kernel, from the arguments `a` of a call, as it names them."""
    causal = a.pop("is_causal" if package == "flash_attention_3" else "causal", False)
    left, right = (a.pop(f"window_size_{side}", None) for side in ("left", "right"))
    if package == "flash_attention_4":
        assert left is right is None if causal else left >= 0 == right
    else:
        assert causal and right == 0
    starts, longest = ([a.pop(f"{name}_seqlen{s}_{x}") for x in "qk"] for name, s in (("cu", "s"), ("max", "")))
    for x, n in zip(starts, longest, strict=True):
        assert x.dtype == torch.int32 and n == int(x.diff().max())
    shape = *starts, *longest, a.pop("softmax_scale"), None if left in (None, -1) else left + 1
    q, k, v, out, dout = (a.pop(name, None) for name in ("q", "k", "v", "out", "dout"))
    lse, places = a.pop("softmax_lse", a.pop("lse", None)), [a.pop(name, None) for name in ("dq", "dk", "dv")]
    tells_lse = a.pop("return_lse", package != "flash_attention_4")
    assert a.pop("num_splits", 1) == 1 and not any(a.values())
    if dout is None:
        out, lse = reference_forward(q, k, v, *shape)
        return out, lse if tells_lse else None, None, None
    gradients = reference_backward(dout, q, k, v, out, lse, *shape)
    if package == "flash_attention_4":
        return *gradients, None
    assert lse.is_contiguous()
    for place, gradient in zip(places, gradients, strict=True):
        place.copy_(gradient)
    return torch.zeros(1)


def stand_in(package, name, arguments):
    space = {}
    exec(f"def {name}({arguments}): pass", space)
    signature = inspect.signature(space[name])
    return lambda *a, **keywords: compute(package, signature.bind(*a, **keywords).arguments)


@pytest.fixture(params=FLASH)
def package(request, monkeypatch):
    """The name of an implementation whose package a stand-in takes the place of."""
    module, functions = STAND_INS[request.param]
    made = {name: stand_in(request.param, name, arguments) for name, arguments in functions.items()}
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    vars(sys.modules[module]).update(made)
    monkeypatch.setattr(torch.ops, "flash_attn_3", types.SimpleNamespace(**made), raising=False)
    return request.param


@pytest.mark.parametrize("window", [None, 3])
def test_adapters_call_their_packages_right(package, window):
    """Output, log-sum-exp and gradients are the reference's, those for an out and lse that a sink was folded into too."""
    kernel = KERNELS[package]
    q, k, v, shape = packed()
    arguments = *shape, window
    out, lse = kernel.forward(q, k, v, *arguments)
    assert all(map(torch.equal, (out, lse), reference_forward(q, k, v, *arguments)))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    total = torch.logaddexp(lse, torch.linspace(-1, 1, len(lse))[:, None]).T.contiguous().T
    out = out * (lse - total).exp().T[..., None]
    gradients = kernel.backward(dout, q, k, v, out, total, *arguments)
    expected = reference_backward(dout, q, k, v, out, total, *arguments)
    assert all(torch.equal(found, right) for found, right in zip(gradients, expected, strict=True))


def test_usable_packages_and_other_attention_have_no_problem(package):
    assert not any(map(unusable_attention, (package, "torch_flash", "eager", "org/kernel")))


@pytest.mark.parametrize("attention", FLASH)
def test_metadata_without_a_module_ends_before_the_model_is_loaded(monkeypatch, capsys, attention):
    module, _ = STAND_INS[attention]
    monkeypatch.setitem(sys.modules, module.split(".")[0], None)
    monkeypatch.setattr("grpo.model.load.unseen_gpu", lambda machine: None)
    check = types.SimpleNamespace(run=None, settings=None, machine=CPU, attention=(attention, "set by ATTN_IMPL"))
    assert train_grpo.launch(check, "") == 2
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


@pytest.mark.parametrize("version", ["2.6.3", "2.7.0"])
def test_flash_attn_before_2_7_is_refused(monkeypatch, version):
    known = installed_versions
    fake = lambda names: {n: version if n == "flash-attn" else known([n])[n] for n in names}  # noqa: E731
    monkeypatch.setattr("grpo.preflight.machine.installed_versions", fake)
    problems = package_problems(GOOD_VERSIONS, ATTN_IMPL="flash_attention_2")
    if version.startswith("2.6"):
        assert len(problems) == 1 and f"2.7.0 or newer, {version} is installed" in problems[0]
        assert "docs/install.md" in problems[0]
    else:
        assert not problems


@pytest.mark.parametrize(("capability", "refused"), [(8.9, True), (9.0, False), (10.0, False), (0.0, False)])
def test_flash_attention_4_needs_a_hopper_card_or_a_newer_one(capability, refused):
    """A capability of 0 is one that could not be read."""
    problems = Problems()
    check_settings(
        Settings(ATTN_IMPL="flash_attention_4"), None, dataclasses.replace(H100, capability=capability), problems
    )
    assert any("flash_attention_4 needs compute capability 9.0" in problem for problem in problems) is refused
