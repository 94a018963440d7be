# SPDX-License-Identifier: Apache-2.0
"""`bench.py curves`: this trainer and plain TRL's learn the same, and a difference would be seen."""

from __future__ import annotations

import copy
import os
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest

import train_grpo
from grpo.measure import curves
from grpo.measure.proof_data import SCALES, write_data
from grpo.measure.record import read_json
from grpo.measure.watched import child_result


def seed(ours, trl):
    """What a seed found whose curves end at these rewards, the greedy ones 0.5."""
    one = {name: {"reward": {"2": value}, "greedy_reward": {"2": 0.5}, "s": 1.0} for name, value in (("ours", ours), ("trl", trl))}  # fmt: skip
    return one | {"adapter_apart": 0.1}


def figures(*pairs):
    seeds = {n: seed(*pair) for n, pair in enumerate(pairs, 1)}
    return {one["name"]: one["value"] for one in curves.curve_figures(seeds)}


def test_the_verdict_needs_the_whole_interval():
    assert figures((0.50, 0.502), (0.60, 0.598), (0.70, 0.700))["equivalent"] == 1
    assert figures((0.50, 0.500))["equivalent"] == 0, "one seed has no interval"
    assert figures((0.50, 0.510), (0.60, 0.612), (0.70, 0.711))["equivalent"] == 0, "the mean is off"
    wide = figures((0.50, 0.550), (0.60, 0.550), (0.70, 0.700))
    assert wide["equivalent"] == 0 and wide["reward_difference_2"] == pytest.approx(0), "too few to say"
    assert wide["reward_spread"] == pytest.approx(0.1) and wide["seeds_unpaired"] == 769


@pytest.mark.slow
def test_two_seeds_learn_what_plain_trl_learns(tmp_path, monkeypatch):
    """In float32, to rounding; and not with another learning rate for TRL."""
    options = {"seeds": 2, "steps": 2, "run": str(tmp_path / "run"), "out": str(tmp_path / "out.json"), "proof": None}
    options = SimpleNamespace(**options, main=train_grpo.main)
    assert curves.bench_curves(options) == 0
    found = {one["name"]: one["value"] for one in read_json(tmp_path / "out.json")["figures"]}
    assert found["seeds"] == 2 and 0 < found["adapter_apart_largest"] < 1e-2
    assert found["reward_difference_2"] == pytest.approx(0, abs=1e-5)
    assert abs(found["seed1_reward_ours"] - found["seed2_reward_ours"]) > 1e-5
    plain = curves.plain_trainer

    def slower(ours):
        ours.args = copy.copy(ours.args)
        ours.args.learning_rate /= 2
        return plain(ours)

    def apart(other):
        monkeypatch.setattr(curves, "plain_trainer", other)
        options.seeds = options.steps = 1
        curves.bench_curves(options)
        return next(one["value"] for one in read_json(tmp_path / "out.json")["figures"] if "largest" in one["name"])

    assert apart(partial(plain, parts=4)) < 1e-2, "in micro-batches, as the proof's model needs it"
    assert apart(slower) > 0.3


def test_rows_come_once_for_each_micro_batch():
    repeated = curves.Repeated([1, 1, 2, 2, 3, 3, 4, 4], 4, 2)
    assert list(repeated) == [1, 1, 2, 2] * 2 + [3, 3, 4, 4] * 2 and len(repeated) == 16


@pytest.mark.slow
def test_the_proofs_model_is_trained_in_each_way(tmp_path, tiny, monkeypatch, quiet):
    """With the tiny model in its place and without vLLM: all ways then sample the same, and learn the same."""
    scale = SCALES["small"]
    monkeypatch.setattr(curves, "SCALES", {"mid": scale})
    write_data(tmp_path / "proof/data", scale)
    (tmp_path / "proof/model").symlink_to(tiny)
    options = SimpleNamespace(
        command="curves", proof=str(tmp_path / "proof"), steps=2, run=str(tmp_path / "run"), main=train_grpo.main,
        out=str(tmp_path / "out.json"), child=None,
    )  # fmt: skip
    with mock.patch.dict(os.environ):
        for way in ("merge", "trl"):
            options.child, options.out = way, str(child_result(options, way))
            assert curves.bench_curves(options) == 0
    options.child, options.out = None, str(tmp_path / "out.json")
    monkeypatch.setattr(curves, "choices", lambda name: ("auto", "merge"))
    monkeypatch.setattr(curves, "run_child", lambda options, way: 0)  # they have run
    assert curves.bench_curves(options) == 0
    found = {one["name"]: one["value"] for one in read_json(tmp_path / "out.json")["figures"]}
    assert found["reward_merge_2"] == pytest.approx(found["reward_trl_2"], abs=1e-4) and found["reward_merge_2"] > 0.2
    assert found["reward_merge_difference_2"] == found["reward_merge_2"] - found["reward_trl_2"]
    assert found["merge_s"] > 0
    monkeypatch.setattr(curves, "run_child", lambda options, way: int(way == "trl"))
    assert curves.bench_curves(options) == 1
