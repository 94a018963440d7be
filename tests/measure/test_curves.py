# SPDX-License-Identifier: Apache-2.0
"""`bench.py curves`: this trainer and plain TRL's learn the same, and a difference would be seen."""

from __future__ import annotations

import argparse
import copy
import os
from unittest import mock

import pytest

import train_grpo
from grpo.measure import curves, variants
from grpo.measure.record import read_json


def seed(ours, trl):
    """What a seed measured whose curves end at these rewards, the greedy ones at 0.5."""
    ends = {"ours": ours, "trl": trl}
    sides = {name: {"reward": {"2": end}, "greedy_reward": {"2": 0.5}, "s": 1.0} for name, end in ends.items()}
    return sides | {"adapter_apart": 0.1}


def figures(*pairs):
    seeds = {number: seed(*pair) for number, pair in enumerate(pairs, 1)}
    return {row["name"]: row["value"] for row in curves.curve_figures(seeds)}


def test_the_verdict_needs_the_whole_interval():
    assert figures((0.50, 0.502), (0.60, 0.598), (0.70, 0.700))["equivalent"] == 1
    assert figures((0.50, 0.500))["equivalent"] == 0, "one seed has no interval"
    assert figures((0.50, 0.510), (0.60, 0.612), (0.70, 0.711))["equivalent"] == 0, "the mean is off"
    assert figures((0.510, 0.50), (0.612, 0.60), (0.711, 0.70))["equivalent"] == 0, "in the other direction too"
    wide = figures((0.50, 0.550), (0.60, 0.550), (0.70, 0.700))
    assert wide["equivalent"] == 0 and wide["reward_difference_2"] == pytest.approx(0), "too few to say"
    assert wide["reward_spread"] == pytest.approx(0.1) and wide["seeds_unpaired"] == 769


def test_rows_come_once_for_each_micro_batch():
    repeated = curves.Repeated([1, 1, 2, 2, 3, 3, 4, 4], 4, 2)
    assert list(repeated) == [1, 1, 2, 2] * 2 + [3, 3, 4, 4] * 2 and len(repeated) == 16


@pytest.mark.slow
def test_two_seeds_learn_what_plain_trl_learns(tmp_path, monkeypatch, quiet):
    """In float32, to rounding; and not with another learning rate for TRL."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    options = argparse.Namespace(
        command="curves", child=None, run=str(tmp_path / "run"), out=str(tmp_path / "out.json"), seeds=2, steps=2, jobs=2,
        trl_parts=1, set=[("PROMPTS_PER_STEP", "2")], resume=False, main=train_grpo.main,
    )  # fmt: skip

    def run(options, child):  # in this process
        with mock.patch.dict(os.environ):
            return curves.bench_curves(argparse.Namespace(**vars(options) | {"child": child}))

    monkeypatch.setattr(curves, "run_child", run)
    monkeypatch.setattr(
        curves, "ThreadPoolExecutor", lambda jobs: mock.MagicMock(__enter__=lambda pool: mock.Mock(map=map))
    )
    assert curves.bench_curves(options) == 0
    rows = {row["name"]: row["value"] for row in read_json(tmp_path / "out.json")["figures"]}
    assert rows["seeds"] == 2 and 0 < rows["adapter_apart_largest"] < 1e-2
    assert rows["reward_difference_2"] == pytest.approx(0, abs=1e-5)
    assert abs(rows["seed1_reward_ours"] - rows["seed2_reward_ours"]) > 1e-5
    options.resume = True
    monkeypatch.setattr(curves, "run_child", lambda options, child: 1)
    assert curves.bench_curves(options) == 0, "nothing is run again"
    plain = curves.plain_trainer

    def slower(ours, parts):
        ours.args = copy.copy(ours.args)
        ours.args.learning_rate /= 2
        return plain(ours)

    def apart(trainer):
        monkeypatch.setattr(curves, "plain_trainer", trainer)
        assert run(options, "3") == 0
        return variants.kept(options, "3")["adapter_apart"]

    assert apart(lambda ours, parts: plain(ours, 4)) < 1e-2, "in micro-batches, as a larger model needs it"
    assert apart(slower) > 0.3
    monkeypatch.setattr(curves, "run_child", lambda options, child: 1)
    options.seeds = 4
    assert curves.bench_curves(options) == 1, "a seed failed"
