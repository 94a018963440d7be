# SPDX-License-Identifier: Apache-2.0
"""Changes vLLM and the process in which it starts. Each change names its upstream issue or source file."""

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import triton

from grpo.common import allocator_settings, log, restored_variables
from grpo.plan.engine_memory import SWIZZLED_AT_ONCE

# TRL sets the same log level; with a lower one vLLM warns of every kernel that a rollout compiles (vllm/envs.py).
VLLM_SWITCHES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
# vLLM redirects these for its own compilation (vllm/compilation/); the trainer's kernels must not follow.
COMPILER_VARIABLES = ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextlib.contextmanager
def vllm_environment() -> Iterator[None]:
    """Sets vLLM's variables while it starts in this process. Afterwards the compilers' variables are as before."""
    with restored_variables(*COMPILER_VARIABLES):
        for name, value in VLLM_SWITCHES.items():
            os.environ.setdefault(name, value)
        # The weight sync and torch's seed would not reach another process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # In a process that compiles, but not in one that loads compiled code, torch moves Triton's cache into its own,
        # of which vLLM has one per configuration: https://github.com/sgl-project/sglang-omni/issues/439
        os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
        # vLLM keeps expandable segments out of the memory that sleeps, but looks for them in this one of torch's two
        # variables, and not beside spaces (vllm/device_allocator/cumem.py).
        if settings := allocator_settings():
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
        yield


def patch_kernels() -> None:
    """Repairs vLLM's copy of triton_kernels before the engine uses any of it. If a repair fails, rollouts take longer
    or the start takes more memory, with the same results."""
    for patch in (swizzle_in_parts, compile_router_once, tune_decoding):
        try:
            from vllm.utils.import_utils import has_triton_kernels  # vLLM is optional

            if has_triton_kernels():
                patch()
        except Exception as error:
            log.warning("%s does not fit this vLLM (%r): time or memory may be lost", patch.__name__, error)


def swizzle_in_parts() -> None:
    """Lets vLLM lay out the experts of a matrix for a Hopper card SWIZZLED_AT_ONCE at a time, with the same result.

    The temporaries of all 128 experts of a gpt-oss-120b matrix take 9 GiB beside the loaded model, and with sleep mode
    they stay in a pool that gives nothing back meanwhile: a card of 80 GB has no room for them. The experts of
    gpt-oss-20b are one part. https://github.com/vllm-project/vllm/issues/34877; TensorRT-LLM did the same in
    https://github.com/NVIDIA/TensorRT-LLM/pull/16125."""
    details = importlib.import_module("triton_kernels.tensor_details.layout_details.hopper_value")
    layout = details.HopperMXValueLayout
    swizzle_whole = layout.swizzle_data
    if hasattr(swizzle_whole, "__wrapped__"):
        return

    @functools.wraps(swizzle_whole)
    def swizzle_data(self: Any, data: torch.Tensor) -> torch.Tensor:
        if self.mx_axis != 1 or len(data) <= SWIZZLED_AT_ONCE:
            return swizzle_whole(self, data)
        # The layout returns transposed views of contiguous tensors, and so must this.
        return torch.cat([swizzle_whole(self, part).mT for part in data.split(SWIZZLED_AT_ONCE)]).mT

    layout.swizzle_data = swizzle_data


def compile_router_once() -> None:
    """Turns a stride that two kernels of vLLM's router take as a compile-time constant into an argument.

    The stride is the number of tokens rounded up to 32, so every new size of a prefill compiled both kernels in the
    middle of a rollout, 1.2 s on an H100. Upstream repaired it in the same way, after the copy of triton_kernels that
    vLLM 0.26 ships: https://github.com/triton-lang/triton/issues/10872."""
    # Imported by their full names, as `from triton_kernels import topk` would load vLLM's copy a second time.
    tensor, topk = map(importlib.import_module, ("triton_kernels.tensor", "triton_kernels.topk"))
    # The kernels are replaced in the globals of the functions that launch them.
    for launcher, name, stride in (
        (topk.topk_forward, "_topk_forward", "stride_rn"),
        (tensor.sum_bitmatrix_rows, "_sum_bitmatrix_rows", "stride_bn"),
    ):
        kernel = launcher.__globals__[name]
        if "constexpr" in str(kernel.fn.__annotations__.get(stride)):
            del kernel.fn.__annotations__[stride]
            launcher.__globals__[name] = triton.jit(kernel.fn)


def tune_decoding() -> None:
    """Lets two blocks of the experts' products share a multiprocessor of a Hopper card while decoding: at most 128
    registers a thread (the second product takes 129), and tiles in plain order. The results are the same bits;
    decoding is 3 to 8% faster with 1 to 96 sequences.

    Only tiles of 16 rows are tuned, gpt-oss-20b's for up to 135 tokens: larger ones would spill. triton_kernels' own
    update_opt_flags_constraints knows neither the size nor these two flags (matmul_ogs_details/opt_flags.py)."""
    scope = importlib.import_module("triton_kernels.matmul_ogs").matmul_ogs.__globals__
    choose = scope["make_opt_flags"]
    if torch.cuda.get_device_capability()[0] != 9 or hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def tuned(*arguments: Any, **options: Any) -> Any:
        flags = choose(*arguments, **options)
        if flags.block_m != 16:
            return flags
        kernel = {**flags.target_kernel_kwargs, "maxnreg": 128}
        return dataclasses.replace(flags, group_m=1, target_kernel_kwargs=kernel)

    scope["make_opt_flags"] = tuned


def keep_weights_asleep(llm: Any) -> None:
    """Makes vLLM sleep by grpo/rollout/sleep_backend.py. Backends are pluggable; vLLM reads at the first sleep which
    one to take (vllm/device_allocator/sleep_mode_backend.py)."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory  # vLLM is optional

    SleepModeBackendFactory.register_backend("keep", "grpo.rollout.sleep_backend", "KeepBackend")
    llm.llm_engine.vllm_config.model_config.sleep_mode_backend = "keep"  # not an engine argument in 0.26


def close_process_group() -> None:
    """Closes vLLM's process group now; called when the process ends, because torch warns of an open one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
