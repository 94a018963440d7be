# SPDX-License-Identifier: Apache-2.0
"""What is changed inside vLLM, with the upstream issue beside each."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import sys
from typing import Any

import torch

from grpo.settings import log

KEEP_BYTES = 32 * 2**20  # larger allocations hold experts and embeddings, which never change


def mend_kernels() -> None:
    """Repair vLLM's copy of triton_kernels before the engine compiles any of it. Where that fails a run is slower, no worse."""
    for mend, cost in (
        (compile_router_once, "may stop for a second to compile"),
        (tune_decoding, "take a little longer"),
    ):
        try:
            from vllm.utils.import_utils import has_triton_kernels

            if has_triton_kernels():
                mend()
        except Exception as error:
            what = "vLLM's experts are not what they were (%s: %r): rollouts %s. Nothing else changes"
            log.warning(what, mend.__name__, error, cost)


def compile_router_once() -> None:
    """Make a stride that two kernels of vLLM's router compile in as a constant an argument of theirs at run time.

    It is the number of tokens rounded up to 32, so every new size of a prefill compiled both kernels in the middle of a
    rollout, 1.2 s on an H100. Upstream mended it in the same way, after the copy of triton_kernels that vLLM 0.26 ships:
    https://github.com/triton-lang/triton/issues/10872.
    """
    import triton

    # By their full names: `from triton_kernels import topk` would load vLLM's copy under another name, a second time.
    tensor, topk = map(importlib.import_module, ("triton_kernels.tensor", "triton_kernels.topk"))
    # The names as the two functions that launch the kernels see them.
    for launcher, name, stride in (
        (topk.topk_forward, "_topk_forward", "stride_rn"),
        (tensor.sum_bitmatrix_rows, "_sum_bitmatrix_rows", "stride_bn"),
    ):
        kernel = launcher.__globals__[name]
        if "constexpr" in str(kernel.fn.__annotations__.get(stride)):
            del kernel.fn.__annotations__[stride]
            launcher.__globals__[name] = triton.jit(kernel.fn)


def tune_decoding() -> None:
    """Let two blocks of the experts' products share a multiprocessor of a Hopper card while decoding: at most 128 registers a
    thread (the second product takes 129), and tiles in plain order. The same bits, 3 to 8% sooner with 1 to 96 sequences.

    For tiles of 16 rows alone, with gpt-oss-20b those of up to 135 tokens: larger ones would spill. triton_kernels' own setter,
    update_opt_flags_constraints, knows neither the size nor these two flags.
    """

    scope = importlib.import_module("triton_kernels.matmul_ogs").matmul_ogs.__globals__
    choose = scope["make_opt_flags"]
    if torch.cuda.get_device_capability()[0] != 9 or hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def tuned(*arguments: Any, **named: Any) -> Any:
        flags = choose(*arguments, **named)
        if flags.block_m != 16:
            return flags
        kernel = {**flags.target_kernel_kwargs, "maxnreg": 128}
        return dataclasses.replace(flags, group_m=1, target_kernel_kwargs=kernel)

    scope["make_opt_flags"] = tuned


def keep_weights_asleep(llm: Any) -> None:
    """A sleep backend for vLLM that copies weights which never change to host memory once instead of at every sleep.

    vLLM's own copies all of them each time (0.3 s against 0.06 s on an H100). Sleep backends are pluggable
    (vllm/device_allocator/sleep_mode_backend.py); which one is taken is read at the first sleep.
    """
    from vllm.device_allocator import get_mem_allocator_instance
    from vllm.device_allocator.cumem import create_and_map, libcudart, unmap_and_release
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

    class KeepBackend(SleepModeBackend):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[int, Any] = {}

        def suspend(self, level: int = 1) -> None:
            if level != 1:
                raise ValueError("only level 1: level 2 discards the weights, and waking would generate garbage")
            self._state = "SUSPENDED"
            for pointer, data in get_mem_allocator_instance().pointer_to_data.items():
                size = data.handle[1]
                if data.tag == "weights" and pointer not in self.kept:
                    if size >= KEEP_BYTES:
                        # Exactly `size` bytes, touched by all cores, then pinned.
                        backup = torch.zeros(size, dtype=torch.uint8)
                        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(backup.data_ptr(), size, 0)))
                        self.kept[pointer] = backup
                    else:  # attention weights, LoRA buffers: written between two sleeps
                        backup = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                        data.cpu_backup_tensor = backup
                    libcudart.cudaMemcpy(backup.data_ptr(), pointer, size)
                unmap_and_release(data.handle)
                data.is_asleep = True
            torch.cuda.empty_cache()

        def resume(self, tags: list[str] | None = None) -> None:
            self._state = "RESUMING"
            for pointer, data in get_mem_allocator_instance().pointer_to_data.items():
                if not data.is_asleep or (tags is not None and data.tag not in tags):
                    continue
                create_and_map(data.handle)
                data.is_asleep = False
                backup = self.kept.get(pointer, data.cpu_backup_tensor)
                if backup is not None:
                    libcudart.cudaMemcpy(pointer, backup.data_ptr(), data.handle[1])
                    data.cpu_backup_tensor = None
            self._state = "RUNNING"

        @classmethod
        def preserves_communicators(cls) -> bool:
            return True

    module = sys.modules[__name__]
    module.KeepBackend = KeepBackend  # vLLM looks the class up by module and name
    SleepModeBackendFactory.register_backend("keep", __name__, "KeepBackend")
    llm.llm_engine.vllm_config.model_config.sleep_mode_backend = "keep"  # not an engine argument in 0.26
