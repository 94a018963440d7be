# SPDX-License-Identifier: Apache-2.0
"""What the preflight plans and refuses for vLLM."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import H100

from grpo.preflight.choices import choose_rollouts
from grpo.preflight.hub import DOWNLOAD_GIB, REAL_CONFIG
from grpo.preflight.machine import GIB
from grpo.preflight.memory import capture_sizes, plan_memory
from grpo.settings import Settings


def plan(machine=H100, prompt_len=930, **changes):
    return plan_memory(Settings(**changes), REAL_CONFIG, machine, prompt_len, "eager", DOWNLOAD_GIB)


@pytest.mark.parametrize(("completion", "gib"), [(512, 2.1), (4000, 9.8)])
def test_cache_of_a_step(completion, gib):
    """12 prompts of 930 tokens x 8 completions, counted by hand from vLLM's blocks of 16 tokens x 12 layers."""
    engine = plan(MAX_COMPLETION_LEN=completion).engine
    block = 12 * 16 * 2 * 8 * 64 * 2
    whole = -(-(930 + completion) // 16)
    assert engine.cache * GIB == pytest.approx(block * (1 + 1024 + 12 * (58 + 8 * (whole - 58 + 10))))
    assert engine.cache == pytest.approx(gib, abs=0.1) and "the rest waits" not in engine.cache_reason
    assert 0 <= engine.max_model_len - 930 - completion < 1024 and engine.max_num_seqs == 96
    assert 13.8 < engine.weights < 16 and engine.scratch > 0.5
    assert f"12 prompts of 930 tokens x 8 completions of {completion}" in engine.cache_reason


def test_the_real_run_fits_beside_the_trainer():
    chosen, engine = plan(), plan().engine
    larger = max(engine.weights + engine.scratch + engine.cache, chosen.learning + engine.asleep)
    assert chosen.peak == pytest.approx(chosen.weights + chosen.adapter + larger) and chosen.peak < H100.gpu_free
    without = plan_memory(Settings(), REAL_CONFIG, H100, 930, "eager")
    assert without.engine is None and chosen.micro_batch <= without.micro_batch


def test_a_share_and_little_room_shrink_the_cache():
    wanted, small = plan().engine, plan(VLLM_GPU_MEM=0.25).engine
    assert small.cache == pytest.approx(79.6 * 0.25 - small.weights - small.scratch) and small.cache < wanted.cache
    assert "VLLM_GPU_MEM=0.25 leaves" in small.cache_reason and "waits its turn" in small.cache_reason
    assert plan(VLLM_GPU_MEM=0.5).engine.cache == wanted.cache, "more than a step needs is not taken"
    tight = plan(dataclasses.replace(H100, gpu_free=62.0)).engine
    assert 0 < tight.cache < wanted.cache and "beside the trainer" in tight.cache_reason


@given(st.integers(1, 4096))
def test_capture_sizes(most):
    sizes = capture_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    # A batch runs in the next larger graph: its own up to 16, at most a quarter more from there on.
    assert sizes[:16] == tuple(range(1, min(most, 16) + 1))
    for size, larger in zip(sizes[15:], sizes[16:], strict=False):
        assert larger <= size * 1.25
    assert len(sizes) <= 16 + 4 * max(0, math.log2(most) - 4) + 1


ROLLOUTS = [
    (True, 0, True, None, True, "set by USE_VLLM"), (False, 1, False, "0.26.0", False, "set by USE_VLLM"),
    (None, 0, False, "0.26.0", False, "no GPU"), (None, 1, True, "0.26.0", False, "tiny"),
    (None, 1, False, None, False, "NOT INSTALLED"), (None, 1, False, "0.26.0", True, "a GPU and vLLM"),
]  # fmt: skip


@pytest.mark.parametrize(("requested", "gpus", "tiny", "vllm", "uses", "words"), ROLLOUTS)
def test_choose_rollouts(requested, gpus, tiny, vllm, uses, words):
    chosen, reason = choose_rollouts(requested, gpus, tiny, vllm)
    assert chosen is uses and words in reason
