# SPDX-License-Identifier: Apache-2.0
"""What is changed inside vLLM, and in the process that it starts in, with the upstream issue or source file beside each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import triton

from grpo.settings import log

# The level of logging is what TRL sets; below it vLLM warns of every kernel that the warm-up compiles (vllm/envs.py).
VLLM_SWITCHES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
# vLLM redirects these for its own compilation (vllm/compilation/); the trainer's kernels must not follow.
COMPILER_VARIABLES = ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextlib.contextmanager
def vllm_environment() -> Iterator[None]:
    """vLLM's variables while it starts, in this process; afterwards the compilers' variables are what they were."""
    kept = {name: os.environ.get(name) for name in COMPILER_VARIABLES}
    for name, value in VLLM_SWITCHES.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in another process neither weights nor the seed would reach it
    # torch moves Triton's cache into its own, which vLLM keeps by settings, in a process that compiles but not in one
    # that loads what was compiled: https://github.com/sgl-project/sglang-omni/issues/439
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def patch_kernels() -> None:
    """Repair vLLM's copy of triton_kernels before the engine compiles any of it. Where that fails a run is slower, no worse."""
    for patch in (compile_router_once, tune_decoding):
        try:
            from vllm.utils.import_utils import has_triton_kernels  # vLLM is optional

            if has_triton_kernels():
                patch()
        except Exception as error:
            what = "vLLM's experts are not what they were (%s: %r): rollouts may take a little longer. Nothing else changes"
            log.warning(what, patch.__name__, error)


def compile_router_once() -> None:
    """Make a stride that two kernels of vLLM's router compile in as a constant an argument of theirs at run time.

    It is the number of tokens rounded up to 32, so every new size of a prefill compiled both kernels in the middle of a
    rollout, 1.2 s on an H100. Upstream repaired it in the same way, after the copy of triton_kernels that vLLM 0.26 ships:
    https://github.com/triton-lang/triton/issues/10872.
    """
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
    update_opt_flags_constraints, knows neither the size nor these two flags (matmul_ogs_details/opt_flags.py).
    """
    scope = importlib.import_module("triton_kernels.matmul_ogs").matmul_ogs.__globals__
    choose = scope["make_opt_flags"]
    if torch.cuda.get_device_capability()[0] != 9 or hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def tuned(*arguments: Any, **named: Any) -> Any:
        flags = choose(*arguments, **named)
        kernel = {**flags.target_kernel_kwargs, "maxnreg": 128}
        return dataclasses.replace(flags, group_m=1, target_kernel_kwargs=kernel) if flags.block_m == 16 else flags

    scope["make_opt_flags"] = tuned


def keep_weights_asleep(llm: Any) -> None:
    """Let vLLM sleep by grpo/rollout/sleep_backend.py. Backends are pluggable (vllm/device_allocator/sleep_mode_backend.py);
    which one is taken is read at the first sleep."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory  # vLLM is optional

    SleepModeBackendFactory.register_backend("keep", "grpo.rollout.sleep_backend", "KeepBackend")
    llm.llm_engine.vllm_config.model_config.sleep_mode_backend = "keep"  # not an engine argument in 0.26


def close_process_group() -> None:
    """Close what vLLM opened, at the very end: torch warns of it otherwise."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
