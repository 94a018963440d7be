# SPDX-License-Identifier: Apache-2.0
"""Attention from packages, without them and without a GPU: the adapters of FlashAttention 2, 3 and 4 on stand-ins with the
packages' signatures, and what happens if a package is broken.
"""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch
from machines import CPU, GOOD_VERSIONS, H100, package_problems
from packed_rows import LENGTHS, SCALE, packed
from reference_kernel import reference_backward, reference_forward

import train_grpo
from grpo.model.attention import KERNELS, unusable_attention
from grpo.preflight.checks import check_settings
from grpo.preflight.machine import FLASH_PACKAGES, installed_versions
from grpo.settings import Problems, Settings

FLASH = tuple(FLASH_PACKAGES)

# ---- Stand-ins -------------------------------------------------------------------------------------------------------
# The arguments, their order and defaults are those of the packages (https://github.com/Dao-AILab/flash-attention): a call
# that does not fit them is a TypeError. What they compute is the reference kernel's, from the arguments as they name them.


def window_of(causal, left, right, unlimited=-1):
    """The reference kernel's window, from a mask that has to be causal."""
    assert causal and right == 0
    return None if left == unlimited else left + 1


def shape_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, window):
    """What the reference kernel takes behind its tensors; the longest row is the longest."""
    for starts, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert starts.dtype == torch.int32 and longest == int(starts.diff().max())
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, window


def fill(places, values):
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def flash2_stand_in():
    """flash_attn/flash_attn_interface.py of 2.7.0; later ones append arguments with a default."""

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
        leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        assert not (dropout_p or softcap or return_softmax)
        assert alibi_slopes is block_table is leftpad_k is seqused_k is None
        window = window_of(causal, window_size_left, window_size_right)
        shape = shape_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window)
        return *reference_forward(q, k, v, *shape), torch.empty(0), torch.zeros(2)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert not (dropout_p or softcap or deterministic) and alibi_slopes is rng_state is None
        assert softmax_lse.is_contiguous()
        window = window_of(causal, window_size_left, window_size_right)
        shape = shape_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window)
        fill((dq, dk, dv), reference_backward(dout, q, k, v, out, softmax_lse, *shape))
        return torch.zeros(1)

    return _flash_attn_varlen_forward, _flash_attn_varlen_backward


def flash3_stand_in():
    """The operators of hopper/flash_api.cpp as of May 2025; newer ones have the same arguments with more defaults."""

    def fwd(
        q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
        max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
        v_descale, softmax_scale, is_causal, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
        is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        assert k_new is v_new is q_v is out is cu_seqlens_k_new is seqused_q is seqused_k is page_table is kv_batch_idx
        assert leftpad_k is rotary_cos is rotary_sin is seqlens_rotary is q_descale is k_descale is v_descale is None
        assert k_new is None and not (attention_chunk or softcap)
        window = window_of(is_causal, window_size_left, window_size_right)
        shape = shape_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window)
        return *reference_forward(q, k, v, *shape), torch.empty(0), torch.empty(0)

    def bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q,
        max_seqlen_k, softmax_scale, is_causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert seqused_q is seqused_k is None and not (softcap or deterministic)
        assert softmax_lse.is_contiguous()
        window = window_of(is_causal, window_size_left, window_size_right)
        shape = shape_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window)
        fill((dq, dk, dv), reference_backward(dout, q, k, v, out, softmax_lse, *shape))
        return (torch.zeros(1),) * 5

    return fwd, bwd


def flash4_stand_in():
    """flash_attn/cute/interface.py of 4.0.0b26."""

    def mask_of(causal, left, right):
        if causal:
            assert left is right is None
            return None
        return window_of(left is not None, left, right, unlimited=None)

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
        intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
        block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None,
        q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None,
        seqlen_k_per_split=None, disable_scheduler_metadata=False,
    ):  # fmt: skip
        assert qv is seqused_q is seqused_k is page_table is softcap is learnable_sink is score_mod is mask_mod is None
        window = mask_of(causal, window_size_left, window_size_right)
        shape = shape_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window)
        found, sums = reference_forward(q, k, v, *shape)
        return found, sums if return_lse else None, None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
        num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
        AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
        learnable_sink=None,
    ):  # fmt: skip
        assert seqused_q is seqused_k is score_mod is score_mod_bwd is mask_mod is dlse is learnable_sink is None
        assert not (softcap or deterministic)
        window = mask_of(causal, window_size_left, window_size_right)
        shape = shape_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window)
        return reference_backward(dout, q, k, v, out, lse, *shape)

    return _flash_attn_fwd, _flash_attn_bwd


STAND_INS = {
    "flash_attention_2": ("flash_attn.flash_attn_interface", flash2_stand_in),
    "flash_attention_3": ("flash_attn_3._C", flash3_stand_in),
    "flash_attention_4": ("flash_attn.cute.interface", flash4_stand_in),
}


def put_module(monkeypatch, name, functions=()):
    """A module of this name, its packages included, that holds `functions`; an empty one without."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    sys.modules[name].__dict__.update({function.__name__: function for function in functions})


@pytest.fixture(params=FLASH)
def package(request, monkeypatch):
    """The name of an implementation whose package a stand-in takes the place of."""
    module, make = STAND_INS[request.param]
    put_module(monkeypatch, module, make())
    operators = types.SimpleNamespace(**{function.__name__: function for function in flash3_stand_in()})
    monkeypatch.setattr(torch.ops, "flash_attn_3", operators, raising=False)
    return request.param


@pytest.mark.parametrize("window", [None, 3])
def test_adapters_call_their_packages_right(package, window):
    """Output, log-sum-exp and gradients are the reference's, those for an out and lse that a sink was folded into too."""
    kernel = KERNELS[package]
    q, k, v, shape = packed(torch.float32, LENGTHS)
    q, k, v, arguments = q.detach(), k.detach(), v.detach(), (*shape, window)
    out, lse = kernel.forward(q, k, v, *arguments)
    for found, expected in zip((out, lse), reference_forward(q, k, v, *arguments), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    total = torch.logaddexp(lse, torch.linspace(-1, 1, len(lse))[:, None]).T.contiguous().T
    out = out * (lse - total).exp().T[..., None]
    gradients = kernel.backward(dout, q, k, v, out, total, *arguments)
    expected = reference_backward(dout, q, k, v, out, total, *arguments)
    for name, found, right in zip(("q", "k", "v"), gradients, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert arguments[4] == SCALE


# ---- Broken packages -------------------------------------------------------------------------------------------------


def test_usable_packages_have_no_problem(package):
    assert unusable_attention(package) is None


@pytest.mark.parametrize("attention", ["torch_flash", "eager", "org/kernel"])
def test_other_attention_imports_nothing(attention):
    assert unusable_attention(attention) is None


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
    module, make = STAND_INS[package]
    name = make()[missing].__name__
    if package == "flash_attention_3":
        monkeypatch.delattr(torch.ops.flash_attn_3, name)
    else:
        monkeypatch.delattr(sys.modules[module], name)
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


@pytest.mark.parametrize(
    ("capability", "refused"), [(8.0, True), (8.9, True), (9.0, False), (10.0, False), (0.0, False)]
)
def test_flash_attention_4_needs_a_hopper_card_or_a_newer_one(capability, refused):
    """A capability of 0 is one that could not be read."""
    problems = Problems()
    machine = dataclasses.replace(H100, capability=capability)
    check_settings(Settings(ATTN_IMPL="flash_attention_4"), None, machine, problems)
    assert any("flash_attention_4 needs compute capability 9.0" in problem for problem in problems) is refused
