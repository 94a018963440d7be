# SPDX-License-Identifier: Apache-2.0
"""The train/inference mismatch check against a stub of vLLM."""

import dataclasses
import itertools
import math

import pytest
import torch
from engines import digest, set_adapter
from stub_vllm import SYNCS

from grpo.rollout import weight_sync
from grpo.rollout.parity import MismatchCheck, ParityError, check_mismatch, parity_problem

MOMENTS = ("before the first step", "after a sleep")


@pytest.mark.parametrize(("sync", "targets"), [("merge", "all-linear"), ("lora", "all-linear"), ("lora", "experts")])
def test_an_engine_that_agrees_passes(build, sync, targets):
    trainer = build(ROLLOUT_SYNC=sync, TEMPERATURE=0.9, LORA_TARGETS=targets)
    set_adapter(trainer, 5)
    before = digest(trainer.model), digest(trainer.model, adapter=True)
    trainer.model.train()
    check_mismatch(trainer)
    kinds = [(result["when"], result["kind"]) for result in trainer.run.parity]
    assert kinds == list(itertools.product(MOMENTS, ("fixed tokens", "sampled tokens")))
    bound = 0.02 if sync == "lora" else 1e-4  # the test adapter is rounded to BF16 on its way
    assert all(p["mean"] < bound and p["control_mean"] > 2 * p["mean"] for p in trainer.run.parity)
    assert trainer.run.parity[0]["control_mean"] > 0.1, "the test adapter is strong"
    calls, rounds = trainer.run.engine.llm.calls, 2 if sync == "lora" else 3  # the last one with a small adapter
    assert trainer.run.engine.llm.asleep and calls.count("wake_up") == calls.count("sleep") == rounds
    assert (digest(trainer.model), digest(trainer.model, adapter=True)) == before and trainer.model.training


@pytest.mark.parametrize("sync", SYNCS)
def test_an_engine_that_ignores_the_adapter_is_seen_and_the_adapter_restored(build, sync):
    trainer = build(ROLLOUT_SYNC=sync, TEMPERATURE=0.9)
    set_adapter(trainer, 5)
    trainer.run.engine.llm.ignore_adapter = True
    before = digest(trainer.model, adapter=True)
    with pytest.raises(ParityError, match="ROLLOUT_SYNC.*ATTN_IMPL=eager.*USE_VLLM=0"):
        check_mismatch(trainer)
    trainer.run.settings = dataclasses.replace(trainer.run.settings, PARITY_LIMIT=50.0)
    with pytest.raises(ParityError, match="cannot be told whether vLLM uses the adapter"):
        check_mismatch(trainer)
    assert digest(trainer.model, adapter=True) == before


@pytest.mark.parametrize("sync", SYNCS)
def test_an_engine_that_keeps_its_first_adapter_is_seen_after_a_sleep(build, sync):
    """Only another adapter in the second round shows it."""
    trainer = build(ROLLOUT_SYNC=sync)
    trainer.run.engine.llm.keeps_first_adapter = True
    with pytest.raises(ParityError, match="^after a sleep, fixed tokens: vLLM and trainer differ"):
        check_mismatch(trainer)
    assert len(trainer.run.parity) == 3, "the first round passed"


def test_a_small_update_that_does_not_arrive_is_seen(build, monkeypatch):
    """In BF16, as on a GPU; rounding to the nearest loses it. A learning rate that is large enough loses nothing."""
    trainer = build(PARITY_LIMIT=1.0, dtype=torch.bfloat16)
    set_adapter(trainer, 5)
    before = digest(trainer.model, adapter=True)
    check_mismatch(trainer)
    monkeypatch.setattr(weight_sync, "round_stochastically", lambda values, generator: values.bfloat16())
    with pytest.raises(ParityError, match=r"^[0-9.]+% of an update as .* report it.*PARITY=off.*USE_VLLM=0"):
        check_mismatch(trainer)
    trainer.run.settings = dataclasses.replace(trainer.run.settings, LEARNING_RATE=0.1)
    check_mismatch(trainer)
    monkeypatch.setattr(weight_sync, "update_share", lambda *_: (0.98, 0.001))
    with pytest.raises(ParityError, match="^98.0% of an update"):
        check_mismatch(trainer)
    assert digest(trainer.model, adapter=True) == before


def breaks_in_decoding(stub, monkeypatch):
    """As with wrong CUDA graphs: prefill is right."""
    report = stub._logprobs
    monkeypatch.setattr(stub, "_logprobs", lambda values: report([value + 0.1 for value in values]))


def loses_a_token(stub, monkeypatch):
    """A log-prob that is not a number: the others agree, and a mean that leaves it out would pass."""
    report = stub._report
    monkeypatch.setattr(stub, "_report", lambda values: report(values.index_fill(-1, torch.tensor([0]), math.nan)))


def breaks_in_its_sleep(stub, monkeypatch):
    wake = stub.wake_up

    def wake_up():
        wake()
        if stub.calls.count("wake_up") == 2:
            stub.model.model.norm.weight.mul_(0.5)

    monkeypatch.setattr(stub, "wake_up", wake_up)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (lambda stub, _: setattr(stub, "shift", 0.1), "before the first step, fixed tokens: .* differ by 0"),
        (lambda stub, _: setattr(stub, "shift", math.nan), "before the first step, fixed tokens: .* differ by nan"),
        (breaks_in_decoding, "before the first step, sampled tokens"),
        (loses_a_token, "before the first step, fixed tokens: .* differ by nan"),
        (breaks_in_its_sleep, "after a sleep, fixed tokens"),
    ],
)
def test_the_check_sees_what_is_wrong(build, monkeypatch, fault, seen):
    trainer = build()
    fault(trainer.run.engine.llm, monkeypatch)
    with pytest.raises(ParityError, match=f"^{seen}"):
        check_mismatch(trainer)


def test_certain_samples_are_no_failure(build, monkeypatch):
    """A model that is sure of every sampled token shows no adapter there; the fixed tokens do."""
    differences = MismatchCheck.differences

    def certain(check, engine_rows, rows, *options):
        figures = differences(check, engine_rows, rows, *options)
        return figures if rows == check.fixed else figures | {"control_mean": figures["mean"]}

    monkeypatch.setattr(MismatchCheck, "differences", certain)
    check_mismatch(build())


@pytest.mark.parametrize(
    ("mean", "control", "words"),
    [
        (0.05, 0.2, None), (0.01, 0.021, None), (0.01, None, None), (0.0, 0.0, "cannot be told"),
        (0.01, 0.019, "cannot be told"), (0.051, 0.2, "PARITY_LIMIT is 0.05"), (math.nan, 0.2, "PARITY_LIMIT"),
    ],
)  # fmt: skip
def test_parity_problem(mean, control, words):
    problem = parity_problem(mean, control, 0.05)
    assert problem is None if words is None else words in problem
