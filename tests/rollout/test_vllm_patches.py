# SPDX-License-Identifier: Apache-2.0
"""What is changed in vLLM's copy of triton_kernels; functions of this file stand in for the copy's."""

import dataclasses
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import triton
import triton.language as tl
from interpreter import cached_source, interpreted

from grpo.rollout.vllm_patches import patch_kernels


@triton.jit
def _topk_forward(x, stride_rm: tl.constexpr, stride_rn: tl.constexpr, n_rows):
    tl.store(x + stride_rm * stride_rn, n_rows)


@triton.jit
def _sum_bitmatrix_rows(x, stride_bm: tl.constexpr, stride_bn: tl.constexpr, n_rows):
    tl.store(x + stride_bm * stride_bn, n_rows)


def topk_forward():
    return _topk_forward


def sum_bitmatrix_rows():
    return _sum_bitmatrix_rows


@dataclasses.dataclass
class OptFlags:
    block_m: int
    group_m: int
    target_kernel_kwargs: dict


def make_opt_flags(rows):
    return OptFlags(rows, 8, {"own": 1})


def matmul_ogs(rows):
    return make_opt_flags(rows)


@pytest.fixture
def modules(monkeypatch):
    """vLLM and triton_kernels on a Hopper card; what is patched comes back."""
    for kernel in (_topk_forward, _sum_bitmatrix_rows):
        monkeypatch.setitem(globals(), kernel.fn.__name__, kernel)
        monkeypatch.setattr(kernel.fn, "__annotations__", dict(kernel.fn.__annotations__))
    monkeypatch.setitem(globals(), "make_opt_flags", make_opt_flags)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    fakes = {
        "vllm.utils.import_utils": SimpleNamespace(has_triton_kernels=lambda: True),
        "triton_kernels": MagicMock(),  # with other modules: in vLLM its attributes are copies under another name
        "triton_kernels.topk": SimpleNamespace(topk_forward=topk_forward),
        "triton_kernels.tensor": SimpleNamespace(sum_bitmatrix_rows=sum_bitmatrix_rows),
        "triton_kernels.matmul_ogs": SimpleNamespace(matmul_ogs=matmul_ogs),
        "triton_kernels.tensor_details.layout_details.hopper_value": SimpleNamespace(HopperMXValueLayout=MagicMock()),
    }
    for name, module in {"vllm": MagicMock(), "vllm.utils": MagicMock(), **fakes}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fakes


def test_the_router_is_not_compiled_for_every_number_of_tokens(modules, caplog):
    patch_kernels()
    before = topk_forward(), sum_bitmatrix_rows()
    constants = [[parameter.name for parameter in kernel.params if parameter.is_constexpr] for kernel in before]
    assert constants == [["stride_rm"], ["stride_bm"]]
    patch_kernels()  # So is a router that upstream repaired.
    assert (topk_forward(), sum_bitmatrix_rows()) == before and not caplog.records, "what is patched is left alone"


IN_PARTS = """
import torch
from triton_kernels.tensor_details.layout import HopperMXValueLayout
from grpo.rollout import vllm_patches

data = torch.randint(256, (5, 96, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8).mT
whole = HopperMXValueLayout(data.shape, mx_axis=1).swizzle_data(data)
sizes = []
inner = HopperMXValueLayout.swizzle_data
HopperMXValueLayout.swizzle_data = lambda self, part: (sizes.append(len(part)), inner(self, part))[1]
vllm_patches.SWIZZLED_AT_ONCE = 2
vllm_patches.swizzle_in_parts()
vllm_patches.swizzle_in_parts()
parts = HopperMXValueLayout(data.shape, mx_axis=1).swizzle_data(data)
assert torch.equal(parts, whole) and parts.stride() == whole.stride() and sizes == [2, 2, 1], sizes
few = HopperMXValueLayout(data[:2].shape, mx_axis=1).swizzle_data(data[:2])
assert torch.equal(few, whole[:2]) and sizes == [2, 2, 1, 2]
print("all equal")
"""


def test_experts_are_laid_out_in_parts_as_they_are_at_once():
    """By vLLM's own code: the same bytes in the same order in memory."""
    interpreted(IN_PARTS, cached_source() / "third_party")


def test_what_moved_is_one_warning(modules, caplog):
    del modules["triton_kernels.matmul_ogs"].matmul_ogs
    patch_kernels()
    (record,) = caplog.records
    assert "tune_decoding does not fit this vLLM (" in record.getMessage()


TUNED = (1, {"own": 1, "maxnreg": 128})


@pytest.mark.parametrize(
    ("capability", "rows", "flags"), [(9, 16, TUNED), (9, 32, (8, {"own": 1})), (10, 16, (8, {"own": 1}))]
)
def test_decoding_on_hopper_gets_its_own_flags(modules, monkeypatch, caplog, capability, rows, flags):
    """Tiles of 16 rows, and nothing else about them changes; a second engine in the process tunes nothing twice."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (capability, 0))
    patch_kernels()
    tuned = make_opt_flags
    patch_kernels()
    assert make_opt_flags is tuned and matmul_ogs(rows) == OptFlags(rows, *flags) and not caplog.records
