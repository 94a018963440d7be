# SPDX-License-Identifier: Apache-2.0
"""What the preflight plans and refuses for vLLM."""

from __future__ import annotations

import dataclasses
import math

import pytest
from machines import H100

from grpo.preflight.checks import check_settings
from grpo.preflight.choices import choose_rollouts
from grpo.preflight.hub import DOWNLOAD_GIB, REAL_CONFIG
from grpo.preflight.machine import GIB, TESTED, Machine, check_packages
from grpo.preflight.memory import capture_sizes, plan_memory
from grpo.settings import Problems, Settings


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
    chosen = plan()
    engine, fixed = chosen.engine, chosen.weights + chosen.adapter
    assert chosen.peak < H100.gpu_free
    assert chosen.peak == pytest.approx(fixed + max(engine.awake, chosen.learning + engine.asleep))
    assert engine.awake == pytest.approx(engine.weights + engine.scratch + engine.cache)
    without = plan_memory(Settings(), REAL_CONFIG, H100, 930, "eager")
    assert without.engine is None and chosen.micro_batch <= without.micro_batch


def test_a_share_and_little_room_shrink_the_cache():
    wanted, small = plan().engine, plan(VLLM_GPU_MEM=0.25).engine
    assert small.cache == pytest.approx(79.6 * 0.25 - small.weights - small.scratch) and small.cache < wanted.cache
    assert "VLLM_GPU_MEM=0.25 leaves" in small.cache_reason and "waits its turn" in small.cache_reason
    assert plan(VLLM_GPU_MEM=0.5).engine.cache == wanted.cache, "more than a step needs is not taken"
    tight = plan(dataclasses.replace(H100, gpu_free=62.0)).engine
    assert 0 < tight.cache < wanted.cache and "beside the trainer" in tight.cache_reason


def test_capture_sizes():
    """A batch runs in the next larger graph: its own up to 16, at most a quarter more from there on."""
    for most in range(1, 4097, 3):
        sizes = capture_sizes(most)
        assert sizes[:16] == tuple(range(1, min(most, 16) + 1)) and sizes[-1] == most
        assert all(size < larger <= size * 1.25 for size, larger in zip(sizes[15:], sizes[16:], strict=False))
        assert len(sizes) <= 16 + 4 * max(0, math.log2(most) - 4) + 1


@pytest.mark.parametrize(
    ("requested", "gpus", "tiny", "vllm", "uses", "words"),
    [
        (True, 0, True, None, True, "set by USE_VLLM"),
        (False, 1, False, "0.26.0", False, "set by USE_VLLM"),
        (None, 0, False, "0.26.0", False, "no GPU"),
        (None, 1, True, "0.26.0", False, "tiny"),
        (None, 1, False, None, False, "NOT INSTALLED"),
        (None, 1, False, "0.26.0", True, "a GPU and vLLM"),
    ],
)
def test_choose_rollouts(requested, gpus, tiny, vllm, uses, words):
    chosen, reason = choose_rollouts(requested, gpus, tiny, vllm)
    assert chosen is uses and words in reason


def settings_problems(machine=H100, **changes):
    problems = Problems()
    check_settings(Settings(**changes), REAL_CONFIG, machine, problems)
    return problems


@pytest.mark.parametrize("target", ["gate_up_proj", "mlp.experts.down_proj", "router", "experts"])
def test_adapters_on_experts_are_refused_with_what_works(target):
    (problem,) = settings_problems(LORA_TARGETS=f"q_proj,{target}")
    assert repr(target) in problem and "MXFP4 experts" in problem and "all-linear" in problem and "q_proj" in problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"USE_VLLM": True, "TEMPERATURE": 2.0}, None),
        ({"TEMPERATURE": 2.1}, "vLLM takes at most 2"),
        ({"TEMPERATURE": 2.1, "USE_VLLM": False}, None),
        ({"TEMPERATURE": 2.1, "machine": Machine(ram_free=20.0)}, None),
        ({"LOSS_TYPE": "vespo", "IS_CORRECTION": "sequence_mask"}, "vespo"),
        ({"LOSS_TYPE": "vespo"}, None),
    ],
)
def test_settings_that_vllm_refuses(changes, words):
    problems = settings_problems(**changes)
    assert len(problems) == (words is not None) and all(words in problem for problem in problems)


def test_untested_versions_of_vllm_are_refused_where_it_is_used():
    def problems(version, uses, **changes):
        found, good = Problems(), {name: oldest for name, (oldest, _) in TESTED.items()}
        check_packages(Settings(**changes), good | {"vllm": version}, found, uses)
        return found

    assert not problems("0.26.0", True) and not problems("0.26.3+cu130", True)
    for version in ("0.25.9", "0.27.0"):
        (problem,) = problems(version, True)
        assert f"vllm: version {version} is outside the tested range" in problem
        assert not problems(version, False) and not problems(version, True, ALLOW_UNTESTED=True)
    assert problems(None, True)[0].startswith("vllm: the package is not installed") and not problems(None, False)
