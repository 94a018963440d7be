# SPDX-License-Identifier: Apache-2.0
"""What is changed in vLLM's copy of triton_kernels, on modules written for the test."""

from __future__ import annotations

import sys

import pytest

from grpo.rollout.vllm_patches import patch_kernels

ROUTER = """
import triton
import triton.language as tl

@triton.jit
def {kernel}(x, {columns}: tl.constexpr, {rows}{constant}, n_rows, BLOCK: tl.constexpr):
    tl.store(x + {columns} * {rows}, n_rows)

def {launcher}():
    return {kernel}
"""

EXPERTS = """
import dataclasses

@dataclasses.dataclass
class OptFlags:
    block_m: int
    group_m: int
    target_kernel_kwargs: dict

def {chooser}(rows):
    return OptFlags(rows, 8, {{"own": 1}})

def matmul_ogs(rows):
    return {chooser}(rows)
"""

IMPORT_UTILS = """
import sys

def has_triton_kernels():
    if {is_installed}:
        import vllm.third_party.triton_kernels
        sys.modules["triton_kernels"] = vllm.third_party.triton_kernels
    return {is_installed}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a fake vLLM with a copy of triton_kernels. As in vLLM 0.26 the copy gets its second name
    from an alias, so a module of it can be loaded under either."""

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "triton_kernels")]:
            del sys.modules[name]

    def build(constant=": tl.constexpr", is_installed=True, chooser="make_opt_flags", capability=9):
        names = {"kernel": "_topk_forward", "columns": "stride_rm", "rows": "stride_rn", "launcher": "topk_forward"}
        sums = {"kernel": "_sum_bitmatrix_rows", "columns": "stride_bm", "rows": "stride_bn"}
        for path, text in {
            "utils/import_utils.py": IMPORT_UTILS.format(is_installed=is_installed),
            "third_party/triton_kernels/topk.py": ROUTER.format(constant=constant, **names),
            "third_party/triton_kernels/tensor.py": ROUTER.format(constant=constant, launcher="sum_bitmatrix_rows", **sums),
            "third_party/triton_kernels/matmul_ogs.py": EXPERTS.format(chooser=chooser),
        }.items():
            (tmp_path / "vllm" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "vllm" / path).write_text(text)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (capability, 0))
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    yield build
    forget()


def router():
    """Its two kernels."""
    from triton_kernels.tensor import sum_bitmatrix_rows
    from triton_kernels.topk import topk_forward

    return topk_forward(), sum_bitmatrix_rows()


def test_the_router_is_not_compiled_for_every_number_of_tokens(install, caplog):
    install()
    patch_kernels()
    before = router()
    constants = [[parameter.name for parameter in kernel.params if parameter.is_constexpr] for kernel in before]
    assert constants == [["stride_rm", "BLOCK"], ["stride_bm", "BLOCK"]]
    patch_kernels()
    assert router() == before and not caplog.records, "what is patched is left alone"


def test_a_router_that_upstream_repaired_is_left_alone(install, caplog):
    install(constant="")
    patch_kernels()
    assert [kernel.fn.__module__ for kernel in router()] == ["triton_kernels.topk", "triton_kernels.tensor"]
    assert not caplog.records


def test_a_vllm_without_the_kernels_is_left_alone(install, caplog):
    install(is_installed=False)
    patch_kernels()
    assert not caplog.records and "triton_kernels" not in sys.modules


def test_what_moved_is_one_warning(install, caplog):
    install(chooser="choose_flags")
    patch_kernels()
    (record,) = caplog.records
    assert "vLLM's experts are not what they were (tune_decoding: " in record.getMessage()


TUNED = (1, {"own": 1, "maxnreg": 128})


@pytest.mark.parametrize(
    ("capability", "rows", "flags"), [(9, 16, TUNED), (9, 32, (8, {"own": 1})), (10, 16, (8, {"own": 1}))]
)
def test_decoding_on_hopper_gets_its_own_flags(install, caplog, capability, rows, flags):
    """Tiles of 16 rows, and nothing else about them changes; a second engine in the process tunes nothing twice."""
    install(capability=capability)
    patch_kernels()
    patch_kernels()
    from triton_kernels.matmul_ogs import OptFlags, matmul_ogs

    assert matmul_ogs(rows) == OptFlags(rows, *flags) and not caplog.records
    assert not hasattr(getattr(matmul_ogs.__globals__["make_opt_flags"], "__wrapped__", None), "__wrapped__")
