# SPDX-License-Identifier: Apache-2.0
"""`bench.py curves`: this trainer and plain TRL's learn the same, and a difference would be seen."""

from __future__ import annotations

import argparse
import os
import sys
from unittest import mock

import bench
import pytest

import train_grpo
from grpo.measure import curves, variants
from grpo.measure.record import read_json


def figures(*pairs):
    """Figures of seeds whose curves end at these rewards of (this trainer, TRL), the greedy ones at 0.5."""
    seeds = {}
    for number, ends in enumerate(pairs, 1):
        rewards = [{"reward": {"2": end}, "greedy_reward": {"2": 0.5}, "s": 1.0} for end in ends]
        seeds[number] = {"ours": rewards[0], "trl": rewards[1], "adapter_apart": 0.1}
    return {row["name"]: row["value"] for row in curves.curve_figures(seeds)}


@pytest.mark.parametrize(
    "pairs, equivalent",
    [
        ([(0.50, 0.502), (0.60, 0.598), (0.70, 0.700)], 1),
        ([(0.50, 0.500)], 0),  # One seed has no interval.
        ([(0.50, 0.510), (0.60, 0.612), (0.70, 0.711)], 0),  # The mean is off,
        ([(0.510, 0.50), (0.612, 0.60), (0.711, 0.70)], 0),  # in the other direction too.
    ],
)
def test_the_verdict_needs_the_whole_interval(pairs, equivalent):
    assert figures(*pairs)["equivalent"] == equivalent


def test_rows_come_once_for_each_micro_batch():
    assert curves.repeated([1, 1, 2, 2, 3, 3, 4, 4], 4, 2) == [1, 1, 2, 2] * 2 + [3, 3, 4, 4] * 2


@pytest.mark.slow
def test_two_seeds_learn_what_plain_trl_learns(tmp_path, monkeypatch, quiet):
    """In float32, to rounding; and not with another learning rate for TRL."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    monkeypatch.setattr(sys, "argv", f"bench.py curves --run {tmp_path}/run --out {tmp_path}/out.json".split())
    sys.argv += ["--seeds", "2", "--steps", "2", "--set", "PROMPTS_PER_STEP=2"]
    options = bench.parse_args()
    options.main = train_grpo.main

    def run_here(options, child):
        with mock.patch.dict(os.environ), mock.patch.object(curves.torch, "set_num_threads"):
            return curves.bench_curves(argparse.Namespace(**vars(options) | {"child": child}))

    pool = mock.MagicMock(__enter__=lambda pool: mock.Mock(map=map))
    monkeypatch.setattr(curves, "ThreadPoolExecutor", lambda jobs: pool)
    monkeypatch.setattr(curves, "measure_child", run_here)
    assert curves.bench_curves(options) == 0
    rows = {row["name"]: row["value"] for row in read_json(tmp_path / "out.json")["figures"]}
    assert rows["seeds"] == 2 and 0 < rows["adapter_apart_largest"] < 1e-2
    assert rows["reward_difference_2"] == pytest.approx(0, abs=1e-5)
    assert abs(rows["seed1_reward_ours"] - rows["seed2_reward_ours"]) > 1e-5

    plain_trainer = curves.plain_trainer

    def apart(change):
        def changed(ours, functions, parts):
            trainer = plain_trainer(ours, functions, change.get("parts", 1))
            trainer.args.learning_rate *= change.get("rate", 1)
            return trainer

        monkeypatch.setattr(curves, "plain_trainer", changed)
        assert run_here(options, "3") == 0
        return variants.read_result(options, "3")["adapter_apart"]

    assert apart({"parts": 4}) < 1e-2, "in micro-batches, as a larger model needs it"
    assert apart({"rate": 0.5}) > 0.3
    monkeypatch.setattr(curves, "measure_child", lambda options, child: 1)
    options.resume, options.seeds = True, 4
    assert curves.bench_curves(options) == 1, "a seed failed, and those that are done are not run again"
