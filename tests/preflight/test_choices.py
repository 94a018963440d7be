# SPDX-License-Identifier: Apache-2.0
"""Automatic choices say what and why. Run: python -m pytest tests/preflight/test_choices.py"""

from __future__ import annotations

import pytest

from grpo.preflight import choices
from grpo.preflight.choices import choose_attention, choose_epsilon_high, choose_loss, choose_packing
from grpo.settings import FIELDS, Settings

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


def test_loss_choice():
    """Liger's loss for every type but the one that it normalizes otherwise."""
    kinds = {name: choose_loss(name)[0] for name in FIELDS["LOSS_TYPE"].metadata["choices"]}
    assert kinds == dict.fromkeys(kinds, "liger") | {"luspo": "trl"}


def test_clip_range_choice():
    assert choose_epsilon_high(Settings(EPSILON=0.1))[0] == 0.1
    assert choose_epsilon_high(Settings(EPSILON_HIGH=0.3))[0] == 0.3
    assert choose_epsilon_high(Settings(LOSS_TYPE="cispo"))[0] == 5.0
