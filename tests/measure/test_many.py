# SPDX-License-Identifier: Apache-2.0
"""How steps on several GPUs are measured: here with two processes of the tiny model."""

from __future__ import annotations

import json
import sys

import bench
import pytest
from conftest import CLEAN, ROOT

from grpo.measure import many

VALUES = {"step_s": 8.0, "rollout_s": 4.0, "learn_s": 3.0, "tokens_mean": 512.0, "startup_s": 90.0, "reduced_mb": 8.0}


@pytest.mark.slow
def test_a_child_measures_two_processes(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    for name, value in CLEAN.items():
        monkeypatch.setenv(name, value)
    command = f"many --model tiny --data {ROOT}/data/tes_train_compact.csv --run {tmp_path}/run --out o.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", *command.split(), "--set", "MAX_COMPLETION_LEN=8", "--resume"])
    options = bench.parse_args()
    values = many.run_many(options, 2, 3)
    assert values.keys() == VALUES.keys() | {"subject", "done"}
    assert 0 < values["rollout_s"] + values["learn_s"] < values["step_s"] * 1.01
    assert values["reduced_mb"] == 15_360 * 4 / 1e6 and values["startup_s"] > 1 and values["tokens_mean"] <= 8
    monkeypatch.setattr(many, "run_child", lambda *arguments: None)
    assert many.run_many(options, 2, 3) == values, "is not run again"
    options.set = [("MAX_COMPLETION_LEN", "9")]
    assert not many.run_many(options, 2, 3), "another step is"


def test_weak_and_strong_scaling(tmp_path, monkeypatch):
    """12 prompts on each, 12 and 48 in all; one run for what is both."""
    seconds, asked = {(1, 12): 8.0, (1, 48): 30.0, (2, 12): 5.0, (2, 24): 10.0, (2, 48): 15.0}, []

    def run(options, gpus, prompts):
        asked.append((gpus, prompts))
        return VALUES | {"step_s": seconds[gpus, prompts]}

    monkeypatch.setattr(many, "run_many", run)
    monkeypatch.setattr(sys, "argv", f"bench.py many --model m --data d --out {tmp_path / 'many.json'}".split())
    assert bench.main() == 0 and asked == list(seconds)
    figures = {row["name"]: row["value"] for row in json.loads((tmp_path / "many.json").read_text())["figures"]}
    scaling = {name: value for name, value in figures.items() if name.startswith(("weak", "strong"))}
    assert scaling == {"weak_2": 0.8, "strong_2x96": 1.6, "strong_2x384": 2.0}
    assert figures["2x384_tok_s"] == 384 * 512 / 15
    monkeypatch.setattr(many, "run_many", lambda *arguments: {})
    assert bench.main() == 1
