# SPDX-License-Identifier: Apache-2.0
"""The train/inference mismatch check against a stub of vLLM."""

import contextlib
import dataclasses
import itertools
import math
import statistics

import pytest
import torch
from engines import digest, set_adapter
from helpers import read_csv
from stub_vllm import SYNCS

from grpo.model.attention import unwrap_peft
from grpo.output.folder import cut_logs
from grpo.rollout import parity, weight_sync
from grpo.rollout.parity import (
    BASE,
    FIXED,
    SAMPLED,
    MismatchCheck,
    MismatchGrown,
    MismatchWatch,
    ParityError,
    adapter_problem,
    base_problem,
    check_mismatch,
    effect_problem,
    effect_share,
    rounded_once_more,
    sampled_kl,
)
from grpo.settings.table import Settings

MOMENTS = (BASE, "before the first step", "after a sleep")


@pytest.mark.parametrize(("sync", "targets"), [("merge", "all-linear"), ("lora", "all-linear"), ("lora", "experts")])
def test_an_engine_that_agrees_passes(build, sync, targets):
    trainer = build(ROLLOUT_SYNC=sync, TEMPERATURE=0.9, LORA_TARGETS=targets)
    set_adapter(trainer, 5)
    before = digest(trainer.model), digest(trainer.model, adapter=True)
    trainer.model.train()
    check_mismatch(trainer)
    figures = {(row["when"], row["kind"]): row for row in trainer.run.parity}
    assert list(figures) == list(itertools.product(MOMENTS, (FIXED, SAMPLED)))
    bound = 0.02 if sync == "lora" else 1e-4  # the test adapter is rounded to BF16 on its way
    assert all(row["mean"] < bound for row in figures.values())
    controls = [figures[moment, FIXED]["control_mean"] for moment in MOMENTS[1:]]
    assert min(controls) > parity.PARITY_LEAST_EFFECT, "the test adapter is visible"
    assert all(row["kl"] < bound for (_, kind), row in figures.items() if kind == SAMPLED)
    assert trainer.run.watch.seen == max(row["mean"] for row in figures.values())
    calls, rounds = trainer.run.engine.llm.calls, 3 if sync == "lora" else 4  # the last one with a small adapter
    assert trainer.run.engine.llm.asleep and calls.count("wake_up") == calls.count("sleep") == rounds
    assert (digest(trainer.model), digest(trainer.model, adapter=True)) == before and trainer.model.training


@pytest.mark.parametrize("sync", SYNCS)
def test_an_engine_that_ignores_the_adapter_is_seen_and_the_adapter_restored(build, monkeypatch, sync):
    trainer = build(ROLLOUT_SYNC=sync, TEMPERATURE=0.9)
    set_adapter(trainer, 5)
    trainer.run.engine.llm.ignore_adapter = True
    before = digest(trainer.model, adapter=True)
    with pytest.raises(
        ParityError, match="before the first step, fixed.*other ROLLOUT_SYNC.*USE_VLLM=0.*docs/mismatch"
    ):
        check_mismatch(trainer)
    monkeypatch.setattr(parity, "PARITY_ALLOWANCE", 50.0)
    with pytest.raises(ParityError, match="-?0% of the test adapter's effect"):
        check_mismatch(trainer)
    assert digest(trainer.model, adapter=True) == before


@pytest.mark.parametrize("sync", SYNCS)
def test_an_engine_that_keeps_its_first_adapter_is_seen(build, sync):
    """The first is the one of the comparison without an adapter."""
    trainer = build(ROLLOUT_SYNC=sync)
    trainer.run.engine.llm.keeps_first_adapter = True
    with pytest.raises(
        ParityError, match="^before the first step, fixed tokens: with the test adapter vLLM and trainer"
    ):
        check_mismatch(trainer)
    assert len(trainer.run.parity) == 3, "without an adapter both agreed"


@pytest.mark.parametrize("factor", [2.0, 0.9, 0.5, -1.0])
def test_another_multiple_of_the_adapter_is_seen(build, monkeypatch, factor):
    """Too much of it is as wrong as too little."""
    trainer, factors = build(), weight_sync.stored_factors

    def wrong(layer, active=True):
        a, b = factors(layer, active)
        return a, factor * b

    monkeypatch.setattr(weight_sync, "stored_factors", wrong)
    if factor != 0.9:  # whose difference a noisy model might have
        with pytest.raises(ParityError, match="^before the first step, fixed tokens: with the test adapter"):
            check_mismatch(trainer)
    monkeypatch.setattr(parity, "PARITY_ALLOWANCE", 50.0)
    with pytest.raises(ParityError, match="^both test adapters, fixed tokens: .*effect.* vLLM"):
        check_mismatch(trainer)


def test_an_engine_that_is_stale_after_its_sleep_is_seen(build, monkeypatch):
    """Only the opposite adapter in the second round shows it."""
    trainer = build(ROLLOUT_SYNC="lora")
    stub, add = trainer.run.engine.llm, trainer.run.engine.llm.llm_engine.add_lora

    def add_lora(request):
        if len(stub.loaded) and request.lora_int_id > 2:
            stub.loaded[request.lora_int_id] = next(iter(stub.loaded.values()))
            return True
        return add(request)

    monkeypatch.setattr(stub.llm_engine, "add_lora", add_lora)
    with pytest.raises(ParityError, match="^after a sleep, fixed tokens: with the test adapter"):
        check_mismatch(trainer)


def test_a_small_update_that_does_not_arrive_is_seen(build, monkeypatch):
    """In BF16, as on a GPU; rounding to the nearest loses it. A learning rate that is large enough loses nothing. Too
    much of an update is refused as well."""
    # In so narrow a model random rounding is no noise that PARITY_ALLOWANCE would accept.
    monkeypatch.setattr(parity, "PARITY_ALLOWANCE", 1.0)
    monkeypatch.setattr(parity, "EFFECT_LIMIT", 1.0)
    monkeypatch.setattr(parity, "EFFECT_ERROR", 1.0)
    trainer = build(PARITY_LIMIT=1.0, dtype=torch.bfloat16)
    set_adapter(trainer, 5)
    before = digest(trainer.model, adapter=True)
    check_mismatch(trainer)
    monkeypatch.setattr(weight_sync, "round_stochastically", lambda values, generator: values.bfloat16())
    with pytest.raises(ParityError, match=r"^[0-9.]+% of an update as .* report it.*PARITY=off.*USE_VLLM=0"):
        check_mismatch(trainer)
    trainer.run.resolved.settings = dataclasses.replace(trainer.run.settings, LEARNING_RATE=0.1)
    check_mismatch(trainer)
    for share in (0.98, 1.02, math.nan):
        monkeypatch.setattr(weight_sync, "update_share", lambda *_, share=share: (share, 0.001))
        with pytest.raises(ParityError, match=f"^{100 * share:.1f}% of an update"):
            check_mismatch(trainer)
    assert digest(trainer.model, adapter=True) == before


def test_more_than_the_whole_of_a_small_update_is_refused_too(build, monkeypatch):
    """An update that is added twice or to other weights reaches vLLM as more than it is."""
    trainer = build(PARITY_LIMIT=1.0, dtype=torch.bfloat16)
    set_adapter(trainer, 5)
    check = MismatchCheck(trainer)
    for share, words in ((1.02, "^102.0% of an update"), (0.98, "^98.0% of an update"), (math.nan, "^nan% of an")):
        monkeypatch.setattr(weight_sync, "update_share", lambda *_, share=share: (share, 0.001))
        with pytest.raises(ParityError, match=words):
            check.compare_share()
    for share in (0.99, 1.013):
        monkeypatch.setattr(weight_sync, "update_share", lambda *_, share=share: (share, 0.001))
        check.compare_share()


def breaks_in_decoding(stub, monkeypatch):
    """As with wrong CUDA graphs: prefill is right."""
    report = stub._logprobs
    monkeypatch.setattr(stub, "_logprobs", lambda values: report([value + 0.3 for value in values]))


def loses_a_log_prob(stub, monkeypatch):
    report = stub._logprobs
    monkeypatch.setattr(stub, "_logprobs", lambda values: report([math.nan, *values[1:]]))


def loses_a_token(stub, monkeypatch):
    """A log-prob that is not a number: the others agree, and a mean that leaves it out would pass."""
    report = stub._report
    monkeypatch.setattr(stub, "_report", lambda values: report(values.index_fill(-1, torch.tensor([0]), math.nan)))


def breaks_in_its_sleep(stub, monkeypatch):
    wake = stub.wake_up

    def wake_up():
        wake()
        if stub.calls.count("wake_up") == 3:
            stub.model.model.norm.weight.mul_(0.5)

    monkeypatch.setattr(stub, "wake_up", wake_up)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (lambda stub, _: setattr(stub, "shift", 0.3), f"{BASE}, fixed tokens: .* differ by 0.3.* model itself"),
        (lambda stub, _: setattr(stub, "shift", math.nan), f"{BASE}, fixed tokens: .* differ by nan"),
        (breaks_in_decoding, f"{BASE}, sampled tokens: .* differ by 0.3"),
        (loses_a_log_prob, f"{BASE}, sampled tokens: .* differ by nan"),
        (loses_a_token, f"{BASE}, fixed tokens: .* differ by nan"),
        (breaks_in_its_sleep, "after a sleep, fixed tokens"),
    ],
)
def test_the_check_sees_what_is_wrong(build, monkeypatch, fault, seen):
    trainer = build()
    fault(trainer.run.engine.llm, monkeypatch)
    with pytest.raises(ParityError, match=f"^{seen}"):
        check_mismatch(trainer)


def test_the_test_adapter_is_as_strong_as_the_noise_demands(build):
    """Six times the difference without an adapter must be visible, and no more than twice that is wanted."""
    effects = []
    for noise in (0.0, 0.05):
        trainer = build()
        check = MismatchCheck(trainer)
        check.base = noise
        with parity.random_adapter(trainer.model, 1) as adapter:
            check.strengthen(adapter)
            effects.append(
                (check.trainer_logps(check.fixed, [1] * len(check.fixed), 1.0) - without(check)).abs().mean()
            )
    weak, strong = effects
    assert parity.PARITY_LEAST_EFFECT <= weak < 0.3 <= strong < 1.2


def without(check):
    with check.policy.disable_adapter():
        return check.trainer_logps(check.fixed, [1] * len(check.fixed), 1.0)


@pytest.mark.parametrize(
    ("mean", "limit", "rounding", "passes"),
    [
        (0.1, 0.1, 0.0, True),
        (0.11, 0.1, 0.073, False),
        (0.11, 0.1, 0.074, True),  # 1.5 x 0.074
        (0.11, 0.2, 0.0, True),
        (0.11, 0.1, math.nan, False),
        (math.nan, 0.1, 1.0, False),
        (math.inf, 0.1, 1.0, False),
    ],
)
def test_base_problem(mean, limit, rounding, passes):
    problem = base_problem(mean, limit, rounding)
    assert problem is None if passes else f"PARITY_LIMIT is {limit:g}" in problem


def test_one_more_rounding_changes_as_much_as_rounding_does(build):
    """BF16 against float32, with the same weights. float32 itself has next to no rounding."""
    trainer = build()
    check, network = MismatchCheck(trainer), unwrap_peft(trainer.model)
    network.bfloat16()
    before = without(check)
    with rounded_once_more(network, 1):
        estimate = (without(check) - before).abs().mean()
    assert torch.equal(before, without(check)), "the network computes as before"
    network.float()
    exact = without(check)
    with rounded_once_more(network, 1):
        assert (without(check) - exact).abs().mean() < 1e-5
    rounding = (exact - before).abs().mean()
    assert 0.4 < rounding / estimate < parity.PARITY_GROWTH, (rounding, estimate)


def test_a_model_whose_log_probs_rounding_shifts_may_differ_more(build, monkeypatch):
    """What a trained model's unlikely tokens need, and no more than it."""

    @contextlib.contextmanager
    def coarse(network, seed):
        network.model.norm.weight.data *= 1.3
        yield
        network.model.norm.weight.data /= 1.3

    monkeypatch.setattr(parity, "rounded_once_more", coarse)
    trainer = build(PARITY_LIMIT=0.001)
    check = MismatchCheck(trainer)
    check.compare_base()
    explained = [parity.PARITY_GROWTH * row["rounding"] for row in check.results]
    assert min(explained) > trainer.run.settings.PARITY_LIMIT
    trainer.run.engine.llm.shift = min(explained) - 0.002
    check.compare_base()
    trainer.run.engine.llm.shift = max(explained) + 0.002
    with pytest.raises(ParityError, match="^without an adapter, fixed tokens: .* rounding would explain [0-9.]+: "):
        check.compare_base()


@pytest.mark.parametrize(
    ("mean", "base", "rounding", "passes"),
    [
        (0.085, 0.05, 0.0, True),  # 1.5 x 0.05 + 0.01
        (0.086, 0.05, 0.0, False),
        (0.086, 0.02, 0.051, True),  # 1.5 x 0.051 + 0.01: what a trained model needs, whose noise the adapter changes
        (0.012, 0.0, 0.0, False),
        (math.nan, 0.05, 0.05, False),
        (0.01, math.nan, 0.05, False),
    ],
)
def test_adapter_problem(mean, base, rounding, passes):
    problem = adapter_problem(mean, base, rounding)
    assert problem is None if passes else "does not generate with the trainer's adapter" in problem


@pytest.mark.parametrize(
    ("share", "error", "words"),
    [
        (0.94, 0.01, None),
        (1.069, 0.01, None),  # 3% and 4 x 1%
        (1.1, 0.01, "110% of the test adapter's effect"),
        (0.9, 0.01, "90% of"),
        (1.0, 0.11, "known to 11% only"),
        (0.0, 0.3, "known to 30% only"),
        (math.nan, 0.01, "nan% of"),
        (1.0, math.nan, "100% of"),
    ],
)
def test_effect_problem(share, error, words):
    problem = effect_problem(share, error)
    assert problem is None if words is None else words in problem


def test_rounding_on_both_sides_is_no_missing_share():
    generator = torch.Generator().manual_seed(0)
    for share in (1.0, 0.9):
        effect, shares = torch.randn(4000, generator=generator).double(), []
        for _ in range(100):
            trainer, engine, without = torch.randn(3, 4000, generator=generator, dtype=torch.float64) * 0.3
            shown = effect + trainer - without
            shares.append(effect_share(share * effect + engine - (effect + trainer), shown)[0])
        # In the direction of the trainer's effect alone the right model would show 0.93.
        assert statistics.fmean(shares) == pytest.approx(share, abs=0.003 if share == 1 else 0.015)


def test_the_share_of_an_effect_is_that_which_was_taken_within_its_standard_error():
    generator = torch.Generator().manual_seed(0)
    effect, shares, errors = torch.randn(400, generator=generator), [], []
    for _ in range(200):
        noise = torch.randn(400, generator=generator) * (0.05 + 0.2 * effect.abs())  # larger where more changes
        share, error = effect_share(-0.1 * effect + noise, effect)
        shares.append(share)
        errors.append(error)
    assert abs(statistics.fmean(shares) - 0.9) < 0.005
    assert statistics.stdev(shares) == pytest.approx(statistics.fmean(errors), rel=0.15)


def test_the_kl_estimate_equals_the_sum_over_all_tokens():
    """k3 is unbiased: weighted by the engine's probabilities, it is KL(engine || trainer)."""
    generator = torch.Generator().manual_seed(0)
    engine, trainer = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    expected = (engine.exp() * (engine - trainer)).sum()
    weighted = sum(p * sampled_kl(d[None]) for p, d in zip(engine.exp(), engine - trainer, strict=True))
    assert weighted.item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_run_is_watched(caplog):
    watch = MismatchWatch(Settings(), [{"mean": 0.03}, {"mean": 0.05}])
    for mean in (0.05, 0.149):
        watch.compare(1, mean, 0.0)
    assert not caplog.records
    watch.compare(7, 0.16, 0.0)
    assert (
        "step 7: vLLM's log-probs differ from the trainer's by 0.1600 nats" in caplog.text
        and "saw 0.0500" in caplog.text
    )
    for mean in (0.2, 0.31):
        watch.compare(8, mean, 0.0)
    assert len(caplog.records) == 1, "until it doubles"
    watch.compare(9, 0.33, 0.0)
    watch.compare(10, 0.05, 0.02)
    assert len(caplog.records) == 3 and "2.0% of the sampled tokens have none (NaN)" in caplog.text


@pytest.mark.parametrize(("mean", "unknown"), [(1.01, 0.0), (0.05, 0.11), (math.nan, 1.0), (math.inf, 0.0)])
def test_a_run_that_learns_from_garbage_ends(caplog, mean, unknown):
    """With PARITY=off it was told to go on: it only warns."""
    watch = MismatchWatch(Settings(), [{"mean": 0.05}])
    with pytest.raises(MismatchGrown, match="step 3.*steps before are saved.*USE_VLLM=0 or PARITY=off"):
        watch.compare(3, mean, unknown)
    assert MismatchGrown.code == 3 and MismatchGrown.is_zipped
    MismatchWatch(Settings(PARITY="off"), []).compare(3, mean, unknown)
    assert "vLLM's log-probs differ" in caplog.text and "mismatch check" not in caplog.records[-1].message.split(".")[0]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_whose_engine_drifts_ends_with_a_checkpoint_of_the_last_good_step(build, monkeypatch, steps):
    """The log-probs of step 3 are wrong; learning from step 2's rollout a second time is no mismatch."""
    trainer = build(TOTAL_STEPS=4, STEPS_PER_GENERATION=steps, SAVE_STEPS=100, LEARNING_RATE=0.1)
    check_mismatch(trainer)
    engine, generate = trainer.run.engine, trainer.run.engine.generate

    def drifting(*arguments, **options):
        engine.llm.shift = 2.0 if trainer.state.global_step == 2 else 0.0
        return generate(*arguments, **options)

    monkeypatch.setattr(engine, "generate", drifting)
    compare, compared = trainer.run.watch.compare, []
    monkeypatch.setattr(
        trainer.run.watch, "compare", lambda step, *figures: compared.append(step) or compare(step, *figures)
    )
    with pytest.raises(MismatchGrown, match="^step 3"):
        trainer.train()
    assert compared == ([1, 2, 3] if steps == 1 else [1, 3])
    folder = trainer.run.folder
    assert trainer.state.global_step == 2 and (folder / "checkpoint-2" / "manifest.json").is_file()
    assert read_csv(folder / "completions.csv")[-1]["step"] == "3", "its completions were written"
    cut_logs(folder, folder / "checkpoint-2")  # A resumed run writes them again.
    assert int(read_csv(folder / "completions.csv")[-1]["step"]) < 3 == len(read_csv(folder / "metrics.csv")) + 1


def test_certain_samples_are_no_failure(build):
    """A model that is sure of every sampled token shows no adapter there; the fixed tokens do."""
    trainer = build()
    check_mismatch(trainer)
    assert all("control_mean" not in row for row in trainer.run.parity if row["kind"] == SAMPLED)
