# SPDX-License-Identifier: Apache-2.0
"""Automatic choices say what and why. Run: python -m pytest tests/preflight/test_choices.py"""

from __future__ import annotations

import dataclasses

import pytest
from machines import CPU, H100

from grpo.preflight import choices
from grpo.preflight.choices import choose_attention, choose_epsilon_high, choose_packing
from grpo.preflight.hub import REAL_CONFIG
from grpo.preflight.memory import Shapes, choose_experts
from grpo.settings import Settings

CHOSEN = [
    ("auto", 0, 0.0, ("flash-attn-3", "flash-attn-4"), "eager"), ("auto", 1, 9.0, (), "torch_flash"),
    ("auto", 1, 9.0, ("flash-attn", "flash-attn-4"), "torch_flash"), ("auto", 1, 9.0, ("flash-attn-3",), "flash_attention_3"),
    ("auto", 1, 8.9, ("flash-attn-3",), "torch_flash"), ("auto", 1, 10.0, ("flash-attn-3",), "torch_flash"),
    ("auto", 1, 10.0, ("flash-attn-3", "flash-attn-4"), "flash_attention_4"), ("eager", 1, 9.0, ("flash-attn-3",), "eager"),
    ("org/kernel", 1, 9.0, (), "org/kernel"),
]  # fmt: skip


@pytest.mark.parametrize(("requested", "gpus", "capability", "installed", "chosen"), CHOSEN)
def test_attention_choice_says_why(requested, gpus, capability, installed, chosen):
    attention, reason = choose_attention(requested, gpus, capability, installed)
    assert attention == chosen and len(reason) > 10
    assert (reason == "set by ATTN_IMPL") is (requested != "auto")
    warning = choices.attention_warning(attention) or ""
    assert ("gradients may be wrong" in warning and f"ATTN_IMPL={chosen}" in warning) is ("/" in chosen)


PACKED = [
    (None, "torch_flash", 1, "prefix"), (None, "eager", 0, "prefix"), (None, "eager", 1, "none"),
    (None, "org/kernel", 1, "none"), ("none", "torch_flash", 1, "none"), ("prefix", "eager", 1, "prefix"),
]  # fmt: skip


@pytest.mark.parametrize(("requested", "attention", "gpus", "chosen"), PACKED)
def test_packing_choice(requested, attention, gpus, chosen):
    packing, reason = choose_packing(requested, attention, gpus)
    assert packing == chosen and (reason == "set by PACKING") is (requested is not None)


def shapes(machine, checkpoint=12.9):
    return Shapes(REAL_CONFIG, machine, 940, "torch_flash", "prefix", checkpoint)


def test_experts_choice():
    """BF16 where it fits with micro-batches and cache as large as with quantized experts."""
    wide, quantized = shapes(H100, None).plans(Settings()).values()
    same = dataclasses.replace(quantized, micro_batch=wide.micro_batch)
    assert choose_experts(None, True, wide, same, 79.0)[0] == "bf16"
    assert choose_experts(None, True, wide, same, wide.peak - 1)[0] == "mxfp4"
    larger = dataclasses.replace(quantized, micro_batch=wide.micro_batch + 1)
    kind, reason = choose_experts(None, True, wide, larger, 79.0)
    assert kind == "mxfp4" and f"micro-batches of {wide.micro_batch}" in reason
    assert choose_experts(None, False, wide, larger, 1.0)[0] == "bf16"
    assert choose_experts("bf16", True, wide, larger, 1.0) == ("bf16", "as EXPERTS says")


def test_the_plan_is_that_of_the_chosen_experts():
    small = shapes(dataclasses.replace(H100, gpu_free=50.0))
    assert small.choose_experts(Settings(EXPERTS=None))[0] == "mxfp4"
    assert small.plan(Settings(EXPERTS=None)).weights < 20 and small.plan(Settings()).weights > 38
    assert small.plan(Settings()).engine and small.plan(Settings(USE_VLLM=False)).engine is None
    assert shapes(CPU).choose_experts(Settings(EXPERTS=None))[0] == "mxfp4", "a CPU plans with its own free memory"


def test_clip_range_choice():
    assert choose_epsilon_high(Settings(EPSILON=0.1))[0] == 0.1
    assert choose_epsilon_high(Settings(EPSILON_HIGH=0.3))[0] == 0.3
    assert choose_epsilon_high(Settings(LOSS_TYPE="cispo"))[0] == 5.0
