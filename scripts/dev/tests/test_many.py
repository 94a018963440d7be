# SPDX-License-Identifier: Apache-2.0
"""How steps on several GPUs are measured: here with two processes of the tiny model."""

import sys
import threading
from types import SimpleNamespace

import bench
import pytest
from helpers import CLEAN, ROOT

from grpo.plan.machine import GIB
from scripts.dev import many
from scripts.dev.record import read_json

VALUES = {"step_s": 8.0, "rollout_s": 4.0, "learn_s": 3.0, "tokens_mean": 512.0, "startup_s": 90.0}
VALUES |= {"host_gib": 20.0}


@pytest.mark.slow
def test_two_processes_are_measured(tmp_path, monkeypatch):
    for name, value in (CLEAN | {"BENCH_COMMIT": "c1"}).items():
        monkeypatch.setenv(name, value)
    command = f"many --model tiny --data {ROOT}/data/tes_train_compact.csv --run {tmp_path}/run --out o.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", *command.split(), "--set", "MAX_COMPLETION_LEN=8"])
    options = bench.parse_args()
    values = many.run_many(options, 2, 3)
    assert values.keys() == VALUES.keys() | {"sum_mb", "sum_ms"} and values["tokens_mean"] <= 8
    assert 1 < values["startup_s"] < 900
    assert 0 <= values["host_gib"] < 20 and 0 < values["sum_ms"] < 10_000
    assert 0.01 < values["sum_mb"] < 1, "in float32: the adapter's gradients, and two numbers a token"
    assert 0 < values["rollout_s"] + values["learn_s"] < values["step_s"] * 1.01
    monkeypatch.setattr(many, "run_child", lambda *arguments: 1)
    assert not many.run_many(options, 2, 3), "it failed"


def test_host_memory_is_the_most_beyond_the_start(monkeypatch):
    """By memory that a machine would report; other programs free theirs meanwhile, so the real figure may be 0."""
    available, seen_all = [50, 47, 30, 49, 55], threading.Event()

    def virtual_memory():
        if len(available) == 1:
            seen_all.set()
        return SimpleNamespace(available=(available.pop(0) if len(available) > 1 else available[0]) * GIB)

    monkeypatch.setattr(many.psutil, "virtual_memory", virtual_memory)
    monkeypatch.setattr(many, "WATCH_SECONDS", 0.001)
    with many.host_memory() as memory:
        assert seen_all.wait(60)
    assert memory == {"host_gib": 20}


def test_weak_and_strong_scaling(tmp_path, monkeypatch):
    """12 prompts on each, 12 and 48 in all; one run for what is both."""
    seconds = {(1, 12): 8.0, (1, 48): 30.0, (2, 12): 5.0, (2, 24): 10.0, (2, 48): 15.0}
    monkeypatch.setattr(many, "run_many", lambda options, *size: VALUES | {"step_s": seconds[size]})
    monkeypatch.setattr(sys, "argv", f"bench.py many --model m --data d --out {tmp_path / 'many.json'}".split())
    assert bench.main() == 0
    figures = {row["name"]: row["value"] for row in read_json(tmp_path / "many.json")["figures"]}
    scaling = {name: value for name, value in figures.items() if name.startswith(("weak", "strong"))}
    assert figures["2x96_host_gib"] == 20 and "2x96_sum_ms" not in figures
    assert scaling == {"weak_2": 0.8, "strong_2x96": 1.6, "strong_2x384": 2.0}
    assert figures["2x384_tok_s"] == 384 * 512 / 15 and sum(name.endswith("_step_s") for name in figures) == 5
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--set", "NUM_GENERATIONS=4"])
    assert bench.main() == 0
    figures = {row["name"]: row["value"] for row in read_json(tmp_path / "many.json")["figures"]}
    assert figures["2x192_tok_s"] == 192 * 512 / 15
    monkeypatch.setattr(many, "run_many", lambda *arguments: {})
    assert bench.main() == 1
