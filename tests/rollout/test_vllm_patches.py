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
    import vllm.third_party.triton_kernels as triton_kernels

    sys.modules["triton_kernels"] = triton_kernels
    return True
"""


@pytest.fixture
def router(tmp_path, monkeypatch):
    """A function that installs a fake vLLM with a copy of triton_kernels, and returns one that returns vLLM's kernels.

    As in vLLM 0.26 the copy gets its second name from an alias, so a module of it can be loaded under either.
    """

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "triton_kernels")]:
            del sys.modules[name]

    def build(
        constant=": tl.constexpr", launcher="topk_forward", is_installed=True, chooser="make_opt_flags", capability=9
    ):
        package, utils = tmp_path / "vllm" / "third_party" / "triton_kernels", tmp_path / "vllm" / "utils"
        package.mkdir(parents=True)
        utils.mkdir()
        for folder in (package, package.parent, utils.parent, utils):
            (folder / "__init__.py").touch()
        (utils / "import_utils.py").write_text(
            IMPORT_UTILS if is_installed else "def has_triton_kernels():\n    return False"
        )
        names = {"kernel": "_topk_forward", "columns": "stride_rm", "rows": "stride_rn", "launcher": launcher}
        (package / "topk.py").write_text(ROUTER.format(constant=constant, **names))
        names = {"kernel": "_sum_bitmatrix_rows", "columns": "stride_bm", "rows": "stride_bn"}
        (package / "tensor.py").write_text(ROUTER.format(constant=constant, launcher="sum_bitmatrix_rows", **names))
        (package / "matmul_ogs.py").write_text(EXPERTS.format(chooser=chooser))
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (capability, 0))
        monkeypatch.syspath_prepend(tmp_path)
        forget()

        def used():
            from triton_kernels.tensor import sum_bitmatrix_rows
            from triton_kernels.topk import topk_forward

            return topk_forward(), sum_bitmatrix_rows()

        return used

    yield build
    forget()


def test_the_router_is_not_compiled_for_every_number_of_tokens(router, caplog):
    used = router()
    patch_kernels()
    before = used()
    constants = [[parameter.name for parameter in kernel.params if parameter.is_constexpr] for kernel in before]
    assert constants == [["stride_rm", "BLOCK"], ["stride_bm", "BLOCK"]]
    patch_kernels()
    assert used() == before, "what is patched is left alone"
    assert not caplog.records


@pytest.mark.parametrize("is_installed", [True, False])
def test_what_needs_no_patch_is_left_alone(router, caplog, is_installed):
    """A router that upstream repaired, and a vLLM without triton_kernels."""
    used = router(constant="", is_installed=is_installed)
    patch_kernels()
    assert not caplog.records and ("triton_kernels" in sys.modules) == is_installed
    if is_installed:
        assert [kernel.fn.__module__ for kernel in used()] == ["triton_kernels.topk", "triton_kernels.tensor"]


@pytest.mark.parametrize(
    ("moved", "patch"),
    [({"launcher": "forward"}, "compile_router_once"), ({"chooser": "choose_flags"}, "tune_decoding")],
)
def test_what_moved_is_one_warning(router, caplog, moved, patch):
    router(**moved)
    patch_kernels()
    (record,) = caplog.records
    assert f"{patch} does not fit this vLLM (" in record.getMessage()


TUNED = (1, {"own": 1, "maxnreg": 128})


@pytest.mark.parametrize(
    ("capability", "rows", "flags"), [(9, 16, TUNED), (9, 32, (8, {"own": 1})), (10, 16, (8, {"own": 1}))]
)
def test_decoding_on_hopper_gets_its_own_flags(router, caplog, capability, rows, flags):
    """Tiles of 16 rows, and nothing else about them changes; a second engine in the process tunes nothing twice."""
    router(capability=capability)
    patch_kernels()
    patch_kernels()
    from triton_kernels.matmul_ogs import OptFlags, matmul_ogs

    assert matmul_ogs(rows) == OptFlags(rows, *flags) and not caplog.records
    assert matmul_ogs.__globals__["make_opt_flags"].__name__ == "make_opt_flags"
