# SPDX-License-Identifier: Apache-2.0
"""`bench.py curves`: this trainer and plain TRL's learn the same, and a difference would be seen."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

import train_grpo
from grpo.measure import curves
from grpo.measure.record import read_json


def seed(ours, trl):
    """What a seed found whose curves end at these rewards, the greedy ones 0.5."""
    one = {name: {"reward": {"2": value}, "greedy_reward": {"2": 0.5}, "s": 1.0} for name, value in (("ours", ours), ("trl", trl))}  # fmt: skip
    return one | {"adapter_apart": 0.1}


def figures(*pairs):
    seeds = {n: seed(*pair) for n, pair in enumerate(pairs, 1)}
    return {one["name"]: one["value"] for one in curves.curve_figures(seeds)}


def test_the_verdict_needs_the_whole_interval():
    assert figures((0.50, 0.504), (0.60, 0.595), (0.70, 0.700))["equivalent"] == 1
    assert figures((0.50, 0.500))["equivalent"] == 0, "one seed has no interval"
    assert figures((0.50, 0.510), (0.60, 0.612), (0.70, 0.711))["equivalent"] == 0, "the mean is off"
    wide = figures((0.50, 0.550), (0.60, 0.550), (0.70, 0.700))
    assert wide["equivalent"] == 0 and wide["reward_difference_2"] == pytest.approx(0), "too few to say"
    assert wide["reward_spread"] == pytest.approx(0.1) and wide["seeds_unpaired"] == 769


@pytest.mark.slow
def test_two_seeds_learn_what_plain_trl_learns(tmp_path, monkeypatch):
    """In float32, to rounding; and not with another learning rate for TRL."""
    options = {"seeds": 2, "steps": 2, "run": str(tmp_path / "run"), "out": str(tmp_path / "out.json")}
    options = SimpleNamespace(**options, main=train_grpo.main)
    assert curves.bench_curves(options) == 0
    found = {one["name"]: one["value"] for one in read_json(tmp_path / "out.json")["figures"]}
    assert found["seeds"] == 2 and 0 < found["adapter_apart_largest"] < 1e-2
    assert found["reward_difference_2"] == pytest.approx(0, abs=1e-5)
    assert abs(found["seed1_reward_ours"] - found["seed2_reward_ours"]) > 1e-5
    changed = curves.plain_trainer

    def slower(ours):
        ours.args = copy.copy(ours.args)
        ours.args.learning_rate /= 2
        return changed(ours)

    monkeypatch.setattr(curves, "plain_trainer", slower)
    options.seeds = options.steps = 1
    curves.bench_curves(options)
    (apart,) = (one["value"] for one in read_json(tmp_path / "out.json")["figures"] if "largest" in one["name"])
    assert apart > 0.3
