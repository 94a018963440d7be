# SPDX-License-Identifier: Apache-2.0
"""How steps on several GPUs are measured: here with two processes of the tiny model."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import bench
import pytest
from conftest import CLEAN, ROOT

from grpo.measure import many

FOUND = {"step_s": 8.0, "rollout_s": 4.0, "learn_s": 3.0, "tokens_mean": 512.0, "startup_s": 90.0, "reduced_mb": 8.0}


@pytest.mark.slow
def test_a_child_measures_two_processes(tiny, tmp_path, monkeypatch):
    for name, value in CLEAN.items():
        monkeypatch.setenv(name, value)
    data = ROOT / "data/tes_train_compact.csv"
    given = {"model": "tiny", "data": str(data), "run": str(tmp_path / "run"), "tokens": 8, "resume": False}
    found = many.run_many(SimpleNamespace(**given), 2, 3)
    assert (
        found.keys() == FOUND.keys() | {"subject", *many.OWN}
        and 0 < found["rollout_s"] + found["learn_s"] < found["step_s"] * 1.01
    )
    # 15,360 parameters, the loss, and two numbers of each of the 24 completions' 8 tokens, in float32.
    assert found["reduced_mb"] == pytest.approx((15_360 + 1 + 2 * 24 * 8) * 4 / 1e6, rel=0.01)
    assert found["startup_s"] > 1 and found["tokens_mean"] <= 8
    assert 0 < found["own_min_s"] <= found["own_max_s"] and 0 < found["own_min_s"] + found["add_up_s"] < found["step_s"]
    monkeypatch.setattr(many, "subprocess", SimpleNamespace(run=lambda *given, **named: None))
    again = {"resume": True}
    assert many.run_many(SimpleNamespace(**given | again), 2, 3) == found, "is not run again"
    assert not many.run_many(SimpleNamespace(**given | again | {"tokens": 9}), 2, 3), "another step is"


def test_weak_and_strong_scaling(tmp_path, monkeypatch):
    """12 prompts on each, 12 and 48 in all; one run for what is both."""
    seconds = {(1, 12): 8.0, (1, 48): 30.0, (2, 12): 5.0, (2, 24): 10.0, (2, 48): 15.0}
    asked = []

    def run(options, gpus, prompts):
        asked.append((gpus, prompts))
        return FOUND | {"step_s": seconds[gpus, prompts]} | ({"own_max_s": 2.0} if gpus > 1 else {})

    monkeypatch.setattr(many, "run_many", run)
    monkeypatch.setattr(sys, "argv", f"bench.py many --model m --data d --out {tmp_path / 'many.json'}".split())
    assert bench.main() == 0 and asked == list(seconds)
    record = json.loads((tmp_path / "many.json").read_text())
    found = {one["name"]: one["value"] for one in record["figures"]}
    assert {name: value for name, value in found.items() if name.startswith(("weak", "strong"))} == {
        "weak_2": 0.8, "strong_2x96": 1.6, "strong_2x384": 2.0,
    }  # fmt: skip
    assert found["2x96_own_max_s"] == 2.0 and "1x96_own_max_s" not in found
    assert found["2x384_tok_s"] == 384 * 512 / 15 and "--gpus 1 2 --prompts 12 --tokens 512" in record["command"]
    monkeypatch.setattr(many, "run_many", lambda *given: {})
    assert bench.main() == 1
