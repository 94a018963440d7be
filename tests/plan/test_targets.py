# SPDX-License-Identifier: Apache-2.0
"""LORA_TARGETS: what its words match, and what is said about it."""

from __future__ import annotations

import json
import random

import pytest
from runs import environment

import train_grpo
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.targets import (
    EXPERT_PARAMETERS,
    LINEAR_MODULES,
    canonical,
    expected_shapes,
    hit_lines,
    matched,
    parameters,
    place_of,
    spans,
)


@pytest.mark.parametrize(
    ("targets", "count", "numbers"),
    [("all-linear", 96, 1_990_656), ("q_proj,o_proj", 48, 1_339_392), ("7.experts", 2, 1_843_200), ("experts", 48, 44_236_800),
     ("all-linear,q_proj,7.experts,7.mlp.experts.down_proj", 98, 3_833_856), ("layers.7.mlp.experts", 2, 1_843_200),
     ("24.experts", 0, 0)],
)  # fmt: skip
def test_what_words_match_in_gpt_oss_20b(targets, count, numbers):
    """At rank 4; 1,990,656 is PEFT's own count of `all-linear`."""
    found = matched(targets, 24)
    assert (len(found), parameters(REAL_CONFIG, 4, found)) == (count, numbers)
    assert matched(canonical(found, 24), 24) == found
    shapes = expected_shapes(REAL_CONFIG, 4, targets)
    assert {place_of(name) for name in shapes} == found and len(shapes) == 2 * count


def test_any_choice_has_a_name():
    choose = random.Random(1)
    for _ in range(50):
        linear = [(layer, name) for name in LINEAR_MODULES if choose.random() < 0.5 for layer in range(5)]
        experts = [(layer, name) for layer in range(5) if choose.random() < 0.5 for name in EXPERT_PARAMETERS]
        assert matched(canonical([*linear, *experts], 5), 5) == {*linear, *experts}


def test_the_hits_in_words():
    lines = list(hit_lines("all-linear, 7.experts,7.mlp.experts.down_proj,7.experts,99.experts", REAL_CONFIG, 4))
    assert lines == [
        "all-linear: layers 0 to 23, each q_proj 27,904 + k_proj 13,568 + v_proj 13,568 + o_proj 27,904 parameters = 1,990,656",
        "7.experts: layer 7 gate_up_proj 1,105,920 + down_proj 737,280 parameters",
        "7.mlp.experts.down_proj: layer 7 down_proj 737,280 parameters",
        "99.experts: nothing",
    ]
    assert spans([7, 23, 15]) == "7, 15, 23" and spans([0, 1, 2, 4, 5]) == "0 to 2, 4, 5"


@pytest.mark.slow
def test_a_run_on_experts_reports_its_hits_and_continues(tmp_path, monkeypatch, quiet, capsys):
    """Packed, through the entry point: the report is printed and kept, a second start goes on, another run starts from the adapter."""
    for name, value in environment(
        tmp_path / "run", LORA_TARGETS="v_proj,1.experts", EXPERTS="mxfp4", LORA_R=3
    ).items():
        monkeypatch.setenv(name, value)
    assert train_grpo.main([]) == 0
    assert "1.experts: layer 1 gate_up_proj 2,304 + down_proj 1,536 parameters" in capsys.readouterr().out
    kept = json.loads((tmp_path / "run" / "settings.json").read_text())["choices"]["lora_targets"]
    assert kept["1.experts"] == {"1": {"gate_up_proj": 2304, "down_proj": 1536}} and set(kept["v_proj"]) == set("012")
    monkeypatch.setenv("TOTAL_STEPS", "8")
    assert train_grpo.main([]) == 0
    monkeypatch.setenv("INIT_ADAPTER", str(tmp_path / "run"))
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "second"))
    for name in ("LORA_TARGETS", "LORA_R"):
        monkeypatch.delenv(name)
    assert train_grpo.main([]) == 0
    assert "on v_proj,1.experts" in capsys.readouterr().out
