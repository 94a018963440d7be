# SPDX-License-Identifier: Apache-2.0
"""The rollout engine with a stub in vLLM's place (tests/stub_vllm.py). Run: python -m pytest tests/test_engine.py"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import math
import os
import re
import shutil
import sys
import zipfile
from types import ModuleType, SimpleNamespace

import pytest
from conftest import read_csv
from hypothesis import given
from hypothesis import strategies as st
from stub_vllm import SYNCS, StubLLM, StubLoRARequest, StubSampling
from trainers import BOTH, loss_and_gradients, make
from trl import GRPOConfig

import train_grpo
from grpo.learn.trainer import importance_ratio
from grpo.preflight.checks import check_machine, check_settings
from grpo.preflight.choices import choose_rollouts
from grpo.preflight.hub import DOWNLOAD_GIB, REAL_CONFIG, ModelFiles
from grpo.preflight.machine import GIB, TESTED, Machine, check_packages, installed_versions
from grpo.preflight.memory import BATCHED_TOKENS, EnginePlan, capture_sizes, plan_memory
from grpo.rollout import engine as rollout_engine
from grpo.rollout.engine import (
    WARM_UP_TOKENS,
    Engine,
    EngineError,
    close_process_group,
    engine_arguments,
    lora_layers,
    merged_weights,
    push_weights,
)
from grpo.rollout.parity import ParityError, parity_gate, parity_problem, score_tokens
from grpo.rollout.vllm_patches import mend_kernels
from grpo.run.folder import last_checkpoint
from grpo.run.logs import METRICS, banner_text
from grpo.settings import FIELDS, ROOT, Problems, Settings, parse_value

H100 = Machine("NVIDIA H100 80GB HBM3", 1, 79.6, 79.0, 110.0, 16, "x86_64")
EXACT = 2e-4  # nats: both sides compute in float32, in another order


def only(problems):
    assert len(problems) == 1, problems
    return problems[0]


@pytest.fixture
def build(tiny, tmp_path):
    """A trainer in float32 without autocast and, in `trainer.run.engine`, a stub of the same precision beside it."""
    engines = []

    def build(**changes):
        import torch

        trainer = make(tiny, tmp_path, **changes)
        trainer.accelerator.state._mixed_precision = "no"
        trainer.accelerator.native_amp = False
        settings = trainer.run.settings
        stub = StubLLM(tiny, enable_lora=settings.ROLLOUT_SYNC == "lora", dtype=torch.float32)
        engine = Engine(stub, StubSampling, StubLoRARequest, settings, trainer.eos_token_ids)
        engine.sleep()
        stub.calls.clear()
        engines.append(engine)
        trainer.run.engine = engine
        trainer.model.eval()
        return trainer

    yield build
    for engine in engines:
        shutil.rmtree(engine.folder, ignore_errors=True)


def set_adapter(trainer, seed, strength=0.1):
    """A random adapter whose values BF16 holds exactly, so that vLLM's copy of it is exact too."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            scale = strength if "lora_B" in name else 0.2
            parameter.data = (torch.randn(parameter.shape, generator=generator) * scale).bfloat16().float()


def prompts_of(trainer):
    return trainer.processing_class(text=[row.prompt for row in trainer.run.rows])["input_ids"]


def trainer_logps(trainer, prompts, completions, temperature=1.0):
    rows = [list(p) + list(c) for p, c in zip(prompts, completions, strict=True)]
    return score_tokens(trainer, rows, list(map(len, prompts)), temperature)


def flat(rows):
    import torch

    return torch.tensor([value for row in rows for value in row])


def digest(model, adapter=False):
    import torch

    return {
        name: hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, p in model.named_parameters()
        if ("lora_" in name) == adapter
    }


# ---- The engine uses the adapter that is trained ---------------------------------------------------------------------


@pytest.mark.parametrize("targets", ["all-linear", "k_proj,o_proj", "q_proj"])
@pytest.mark.parametrize("sync", SYNCS)
def test_rollouts_are_sampled_from_the_policy(build, sync, targets):
    """Log-probs of sampled tokens and of given ones, with a temperature, against the trainer's; and without adapter."""
    trainer = build(ROLLOUT_SYNC=sync, LORA_TARGETS=targets, TEMPERATURE=0.7)
    set_adapter(trainer, 1)
    policy, engine, prompts = trainer.model, trainer.run.engine, prompts_of(trainer)
    ids, values = engine.rollout(policy, prompts, seed=4)
    assert [len(row) for row in values] == [len(row) for row in ids] and all(1 <= len(row) <= 8 for row in ids)
    stops = [[token in trainer.eos_token_ids for token in row] for row in ids]
    assert any(row[-1] for row in stops) and not any(any(row[:-1]) for row in stops), "a stop token ends, and stays"
    ours = trainer_logps(trainer, prompts, ids, 0.7)
    assert (flat(values) - ours).abs().max() < EXACT
    assert (flat(values) - trainer_logps(trainer, prompts, ids, 1.0)).abs().max() > 10 * EXACT, "temperature counts"
    with policy.disable_adapter():
        without = trainer_logps(trainer, prompts, ids, 0.7)
        fixed = score_tokens(trainer, prompts, [1] * len(prompts), 1.0)
    assert (ours - without).abs().max() > 50 * EXACT, "the adapter must matter, or the test above proves nothing"
    base_ids, base_values = engine.rollout(policy, prompts, seed=4, active=False)
    with policy.disable_adapter():
        assert (flat(base_values) - trainer_logps(trainer, prompts, base_ids, 0.7)).abs().max() < EXACT
    for active in (True, False):
        engine.wake()
        engine.hand_over(policy, active)
        expected = score_tokens(trainer, prompts, [1] * len(prompts), 1.0) if active else fixed
        assert (flat(engine.score(prompts)) - expected).abs().max() < EXACT
        assert (flat(engine.score(prompts)) - (fixed if active else expected + 1)).abs().max() > 50 * EXACT
        engine.sleep()


@pytest.mark.parametrize("sync", SYNCS)
def test_every_rollout_uses_the_adapter_of_that_moment(build, sync):
    """Three adapters, three rollouts, and after each sleep what the engine holds is not trusted."""
    trainer = build(ROLLOUT_SYNC=sync)
    engine, prompts, before = trainer.run.engine, prompts_of(trainer), None
    for seed in (1, 2, 3):
        set_adapter(trainer, seed)
        ids, values = engine.rollout(trainer.model, prompts, seed=0)
        assert (flat(values) - trainer_logps(trainer, prompts, ids)).abs().max() < EXACT, f"adapter {seed}"
        engine.wake()
        engine.hand_over(trainer.model)
        scored = flat(engine.score(prompts))
        engine.sleep()
        assert before is None or (scored - before).abs().max() > 50 * EXACT, "another adapter, other log-probs"
        before = scored
    set_adapter(trainer, 1)
    engine.wake()
    engine.hand_over(trainer.model)
    engine.score(prompts)
    set_adapter(trainer, 2)
    engine.hand_over(trainer.model)  # without a sleep, which would have emptied the prefix cache
    expected = score_tokens(trainer, prompts, [1] * len(prompts), 1.0)
    assert (flat(engine.score(prompts)) - expected).abs().max() < EXACT


@pytest.mark.parametrize("sync", SYNCS)
def test_hand_overs_leave_the_policy_bit_for_bit(build, sync):
    trainer = build(ROLLOUT_SYNC=sync)
    set_adapter(trainer, 1)
    base, adapter = digest(trainer.model), digest(trainer.model, adapter=True)
    engine = trainer.run.engine
    engine.wake()
    for i in range(30):
        engine.hand_over(trainer.model, active=i % 3 > 0)
    engine.hand_over(trainer.model)
    assert digest(trainer.model) == base and digest(trainer.model, adapter=True) == adapter
    prompts = prompts_of(trainer)
    expected = score_tokens(trainer, prompts, [1] * len(prompts), 1.0)
    assert (flat(engine.score(prompts)) - expected).abs().max() < EXACT, "no drift on the engine's side either"


@pytest.mark.parametrize("sync", SYNCS)
def test_order_of_a_rollout(build, sync):
    trainer = build(ROLLOUT_SYNC=sync)
    engine, prompts = trainer.run.engine, prompts_of(trainer)
    handing = ["add_lora"] if sync == "lora" else ["apply_model", "reset_prefix_cache"]
    for _ in range(2):
        engine.rollout(trainer.model, prompts, seed=1)
    assert engine.llm.calls == ["wake_up", *handing, "generate", "sleep"] * 2
    assert engine.asleep and all(engine.seconds[name] > 0 for name in ("wake", "handover", "generate", "sleep"))
    engine.sleep()
    assert engine.llm.calls.count("sleep") == 2, "sleeping twice is once"
    if sync == "lora":
        one, two = engine.llm.requests
        assert one.lora_int_id != two.lora_int_id and one.lora_name != two.lora_name
    else:
        assert engine.llm.requests == [None, None]


def test_what_is_written_for_vllm_is_pefts_format(build):
    import torch
    from safetensors.torch import load_file

    trainer = build(ROLLOUT_SYNC="lora")
    set_adapter(trainer, 1)
    folder = trainer.run.engine.write_adapter(trainer.model, active=True)
    config, tensors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")  # fmt: skip
    assert config["lora_alpha"] == config["r"] == 4 and config["bias"] == "none", "B carries the scale"
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    state = {n.replace(".default", ""): p for n, p in trainer.model.named_parameters() if "lora_" in n}
    assert set(tensors) == set(state) and {t.dtype for t in tensors.values()} == {torch.bfloat16}
    for name, parameter in state.items():
        assert torch.equal(tensors[name].float(), parameter.detach() * (2.0 if "lora_B" in name else 1.0))
    off = load_file(trainer.run.engine.write_adapter(trainer.model, active=False) / "adapter_model.safetensors")
    assert not any(t.any() for n, t in off.items() if "lora_B" in n)


def test_merged_weights_are_rounded_once_and_refused_where_they_do_not_fit(build):
    import torch

    trainer = build()
    set_adapter(trainer, 1)
    names = [name for name, _ in merged_weights(trainer.model)]
    assert names[0] == "model.layers.0.self_attn.q_proj.weight" and len(names) == 8
    layer = next(iter(lora_layers(trainer.model).values()))
    layer.get_base_layer().weight.data = layer.get_base_layer().weight.data.bfloat16()
    _, merged = next(merged_weights(trainer.model))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    exact = layer.get_base_layer().weight.double() + 2.0 * b.double() @ a.double()
    assert merged.dtype == torch.bfloat16 and torch.equal(merged, exact.float().bfloat16())
    engine = trainer.run.engine
    engine.wake()
    with pytest.raises(ValueError, match="q_proj.weight: .* does not fit"):
        engine.llm.apply_model(lambda m: push_weights(m, [(names[0], torch.zeros(500, 64))]))
    with pytest.raises(ValueError, match="o_proj.weight: .* does not fit"):
        engine.llm.apply_model(lambda m: push_weights(m, [(names[3], torch.zeros(8, 8))]))


def test_a_seed_is_a_rollout(build):
    import torch

    trainer = build(TEMPERATURE=2.0)
    engine, prompts = trainer.run.engine, prompts_of(trainer)
    first = engine.rollout(trainer.model, prompts, seed=7)
    torch.rand(5)
    assert engine.rollout(trainer.model, prompts, seed=7) == first
    assert engine.rollout(trainer.model, prompts, seed=8)[0] != first[0]
    trainer.state.global_step = 3
    one, two = (trainer._generate_single_turn(prompts, None, {}, 1) for _ in range(2))
    trainer.state.global_step = 4
    other = trainer._generate_single_turn(prompts, None, {}, 1)
    assert one == two and one[0] != other[0], "the step is the seed"
    assert [len(v) for v in one[1]] == [len(c) for c in one[0]], "TRL gets the log-probs"


def test_an_evaluation_of_the_base_leaves_the_adapter_out(build):
    trainer = build()
    set_adapter(trainer, 1)
    prompts = prompts_of(trainer)
    trainer.run.stream = "base"
    ids, values = trainer._generate_single_turn(prompts, None, {}, 1)
    with trainer.model.disable_adapter():
        assert (flat(values) - trainer_logps(trainer, prompts, ids)).abs().max() < EXACT
    assert (flat(values) - trainer_logps(trainer, prompts, ids)).abs().max() > 10 * EXACT


def test_generating_needs_an_awake_engine_with_the_adapter(build):
    trainer = build()
    engine, prompts = trainer.run.engine, prompts_of(trainer)
    with pytest.raises(EngineError, match="awake"):
        engine.generate(prompts, 1)
    with pytest.raises(EngineError, match="sleeping"):
        engine.hand_over(trainer.model)
    engine.wake()
    with pytest.raises(EngineError, match="handed over"):
        engine.generate(prompts, 1)
    engine.hand_over(trainer.model)
    engine.sleep()
    engine.wake()
    with pytest.raises(EngineError, match="handed over"):
        engine.generate(prompts, 1)
    assert "generate" not in engine.llm.calls


def test_a_missing_log_prob_is_none_for_trl(build):
    trainer = build()
    trainer.run.engine.llm.shift = math.nan
    ids, values = trainer.run.engine.rollout(trainer.model, prompts_of(trainer), seed=1)
    assert values == [[None] * len(row) for row in ids]


# ---- Faults ----------------------------------------------------------------------------------------------------------


def test_faults_name_what_failed_and_what_helps(build):
    import torch

    def broken(call, error, **changes):
        trainer = build(**changes)
        trainer.run.engine.llm.fail[call] = (1, error)
        with pytest.raises(EngineError) as caught:
            trainer.run.engine.rollout(trainer.model, prompts_of(trainer), seed=1)
        assert caught.value.__cause__ is error
        return str(caught.value)

    message = broken("wake_up", torch.OutOfMemoryError("CUDA out of memory"))
    assert "waking" in message and "OutOfMemoryError" in message and "MICRO_BATCH" in message
    message = broken("generate", RuntimeError("an illegal memory access\nlong trace"))
    assert "generating failed (RuntimeError: an illegal memory access)" in message and "it continues" in message
    assert "host memory" in broken("sleep", MemoryError()).lower()
    assert "ROLLOUT_SYNC" in broken("apply_model", KeyError("attn"))
    assert "ROLLOUT_SYNC" in broken("add_lora", ValueError("rank"), ROLLOUT_SYNC="lora")


def test_an_adapter_that_the_engine_does_not_load_is_an_error(build, monkeypatch):
    trainer = build(ROLLOUT_SYNC="lora")
    engine, write = trainer.run.engine, Engine.write_adapter

    def lose(self, policy, active):
        folder = write(self, policy, active)
        (folder / "adapter_model.safetensors").unlink()
        return folder

    engine.wake()
    engine.hand_over(trainer.model)
    monkeypatch.setattr(Engine, "write_adapter", lose)
    with pytest.raises(EngineError, match="No adapter found"):
        engine.hand_over(trainer.model)
    monkeypatch.undo()
    monkeypatch.setattr(engine.llm.llm_engine, "add_lora", lambda request: False)
    with pytest.raises(EngineError, match="did not take"):
        engine.hand_over(trainer.model)


def test_answers_that_do_not_match_the_requests_are_errors(build, monkeypatch):
    trainer = build()
    engine, prompts = trainer.run.engine, prompts_of(trainer)
    engine.wake()
    engine.hand_over(trainer.model)
    whole = engine.llm.generate
    monkeypatch.setattr(engine.llm, "generate", lambda *a, **k: whole(*a, **k)[1:])
    with pytest.raises(EngineError, match="3 of 4"):
        engine.generate(prompts, 1)

    def shorter(*arguments, **keywords):
        outputs = whole(*arguments, **keywords)
        outputs[0].outputs[0].logprobs.logprobs.pop()
        return outputs

    monkeypatch.setattr(engine.llm, "generate", shorter)
    with pytest.raises(EngineError, match="number of log-probs"):
        engine.generate(prompts, 1)


# ---- Parity gate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("agrees", [True, False])
def test_the_gate_restores_the_adapter(build, sync, agrees):
    trainer = build(ROLLOUT_SYNC=sync, TEMPERATURE=0.9)
    set_adapter(trainer, 5)
    engine = trainer.run.engine
    engine.llm.ignore_adapter = not agrees
    before = digest(trainer.model), digest(trainer.model, adapter=True)
    trainer.model.train()
    if agrees:
        parity_gate(trainer)
        assert engine.asleep and len(trainer.run.parity) == 4
        assert {(p["when"], p["kind"]) for p in trainer.run.parity} == {
            (when, kind) for when in ("before the first step", "after a sleep") for kind in ("fixed tokens", "sampled tokens")
        }  # fmt: skip
        bound = 0.02 if sync == "lora" else 1e-4  # the gate's adapter is rounded to BF16 on its way
        assert all(p["mean"] < bound and p["control_mean"] > 2 * p["mean"] for p in trainer.run.parity)
        assert trainer.run.parity[0]["control_mean"] > 0.1, "the test adapter is strong"
        assert engine.llm.calls.count("wake_up") == engine.llm.calls.count("sleep") == 2
    else:
        with pytest.raises(ParityError, match="ROLLOUT_SYNC.*ATTN_IMPL=eager.*USE_VLLM=0"):
            parity_gate(trainer)
    assert (digest(trainer.model), digest(trainer.model, adapter=True)) == before
    assert trainer.model.training


def test_the_gate_sees_what_is_wrong(build):
    """Each fault alone; the same trainer without a fault passes."""
    trainer = build()
    stub = trainer.run.engine.llm
    for fault, value in (("noise", 0.2), ("shift", 0.1), ("shift", math.nan)):
        setattr(stub, fault, value)
        with pytest.raises(
            ParityError, match=r"before the first step, fixed tokens: .* differ by (0\.[0-9]+|nan) nats"
        ):
            parity_gate(trainer)
        trainer.run.engine.sleep()
        setattr(stub, fault, 0.0)
    parity_gate(trainer)


@pytest.mark.parametrize("sync", SYNCS)
def test_the_gate_is_not_satisfied_by_a_wide_limit(build, sync):
    trainer = build(ROLLOUT_SYNC=sync, PARITY_LIMIT=50.0)
    trainer.run.engine.llm.ignore_adapter = True
    with pytest.raises(ParityError, match="cannot be told whether vLLM uses the adapter"):
        parity_gate(trainer)


def test_the_gate_sees_faults_in_decoding_alone(build, monkeypatch):
    """An engine whose prefill is right and whose decoding is not, as with wrong CUDA graphs."""
    trainer = build()
    stub = trainer.run.engine.llm
    sample = stub._sample

    def shifted(*arguments):
        stub.shift = 0.1
        try:
            return sample(*arguments)
        finally:
            stub.shift = 0.0

    monkeypatch.setattr(stub, "_sample", shifted)
    with pytest.raises(ParityError, match="before the first step, sampled tokens"):
        parity_gate(trainer)


def test_certain_samples_are_no_failure(build):
    """A model that is sure of every sampled token shows no adapter there; the fixed tokens do. (Low temperature, and
    differences of a fifth of PARITY_LIMIT.)"""
    trainer = build(TEMPERATURE=0.05)
    trainer.run.engine.llm.noise = 0.012
    parity_gate(trainer)


def test_missing_log_probs_of_samples_are_a_parity_error(build, monkeypatch):
    trainer = build()
    stub = trainer.run.engine.llm
    monkeypatch.setattr(stub, "_logprobs", lambda t, v, p: type("Flat", (), {"logprobs": [math.nan] * len(v)})())
    with pytest.raises(ParityError, match="sampled tokens"):
        parity_gate(trainer)


def test_the_gate_sees_an_engine_that_breaks_when_it_sleeps(build, monkeypatch):
    trainer = build()
    stub = trainer.run.engine.llm
    wake = stub.wake_up

    def wake_up():
        wake()
        if stub.calls.count("wake_up") == 2:
            stub.model.model.norm.weight.mul_(0.5)

    monkeypatch.setattr(stub, "wake_up", wake_up)
    with pytest.raises(ParityError, match="after a sleep, fixed tokens"):
        parity_gate(trainer)


def test_a_gate_that_is_off_says_so(build, caplog):
    trainer = build(PARITY="off")
    with caplog.at_level(logging.WARNING, "train_grpo"):
        parity_gate(trainer)
    assert "| PARITY=off" in caplog.text and "======" in caplog.text and not trainer.run.engine.llm.calls
    lines = banner_text("text").strip().splitlines()
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("mean", "control", "limit", "words"),
    [
        (0.014, 0.2, 0.05, None),
        (0.05, 0.2, 0.05, None),
        (0.01, 0.021, 0.05, None),
        (0.01, None, 0.05, None),
        (0.0, 0.0, 0.05, "cannot be told"),
        (0.0, math.nan, 0.05, "cannot be told"),
        (0.051, 0.2, 0.05, "PARITY_LIMIT is 0.05"),
        (0.051, 0.2, 0.06, None),
        (math.nan, 0.2, 0.05, "PARITY_LIMIT"),
        (math.inf, 0.2, 0.05, "PARITY_LIMIT"),
        (0.01, 0.019, 0.05, "cannot be told"),
        (0.01, 0.01, 0.05, "cannot be told"),
    ],
)
def test_parity_problem(mean, control, limit, words):
    problem = parity_problem(mean, control, limit)
    assert problem is None if words is None else words in problem


# ---- Importance sampling reaches the loss ----------------------------------------------------------------------------


def scored_batch(trainer):
    """A step's batch as TRL makes it, with the advantages replaced by ones that are not zero."""
    import torch

    set_adapter(trainer, 1)
    trainer.model.train()
    rows = [0, 0, 1, 1]
    inputs = trainer._generate_and_score_completions([{"prompt": trainer.run.rows[i].prompt, "row": i} for i in rows])
    inputs["advantages"] = torch.tensor([1.3, -0.7, 0.4, -2.0])
    return inputs


@pytest.mark.parametrize(
    ("mode", "shift", "ratio"),
    [
        ("token_truncate", 0.0, 1.0),
        ("token_truncate", -0.7, math.exp(0.7)),
        ("token_truncate", -2.0, 2.5),
        ("token_mask", -0.7, math.exp(0.7)),
        ("token_mask", -2.0, 0.0),
        ("sequence_truncate", 0.0, 1.0),
        ("none", -0.7, 1.0),
    ],
)
def test_importance_ratios_reach_the_loss(build, mode, shift, ratio):
    """The stub reports log-probs that are off by `shift`: the gradient is scaled by the ratio, truncated at 2.5."""
    trainer = build(IS_CORRECTION=mode, IS_CLIP_MAX=2.5)
    trainer.run.engine.llm.shift = shift
    inputs = scored_batch(trainer)
    assert "importance_sampling_ratio" not in inputs, "TRL's correction is off"
    assert inputs["old_per_token_logps"] is None if "old_per_token_logps" in inputs else True
    plain = {name: value for name, value in inputs.items() if name != "sampling_per_token_logps"}
    uncorrected, expected = loss_and_gradients(trainer, plain, "liger")
    logged = trainer._metrics["train"]
    logged.clear()
    loss, gradient = loss_and_gradients(trainer, inputs, "liger")
    assert logged["sampling/sampling_logp_difference/mean"] == [pytest.approx(abs(shift), abs=1e-3)]
    assert logged["sampling/sampling_logp_difference/max"] == [pytest.approx(abs(shift), abs=1e-3)]
    assert logged["sampling/importance_sampling_ratio/mean"] == [pytest.approx(ratio, abs=1e-3)]
    assert expected.norm() > 1e-3 and abs(uncorrected) > 1e-3
    assert loss == pytest.approx(ratio * uncorrected, rel=2e-3, abs=1e-7)
    assert (gradient - ratio * expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize("loss_type", BOTH)
def test_both_losses_use_the_ratios_alike(build, loss_type):
    """Another ratio for each token, which moves the gradient, and plain TRL agrees."""
    trainer = build(LOSS_TYPE=loss_type)
    trainer.run.engine.llm.noise = 0.5
    inputs = scored_batch(trainer)
    expected_loss, expected = loss_and_gradients(trainer, inputs, "plain")
    for implementation in ("trl", "liger"):
        loss, gradient = loss_and_gradients(trainer, inputs, implementation)
        assert loss == pytest.approx(expected_loss, rel=1e-3, abs=1e-6)
        assert (gradient - expected).norm() < 2e-3 * expected.norm()
    plain = {name: value for name, value in inputs.items() if name != "sampling_per_token_logps"}
    _, uncorrected = loss_and_gradients(trainer, plain, "liger")
    assert (gradient - uncorrected).norm() > 0.02 * uncorrected.norm()


def test_a_step_learns_from_the_engines_log_probs(build):
    """Through TRL's own loop: rollout, rewards, `training_step`; the step's parity and ratio are in its metrics."""
    trainer = build(TOTAL_STEPS=1)
    trainer.run.engine.llm.shift = -0.3
    trainer.train()
    (row,) = read_csv(trainer.run.folder / "metrics.csv")
    assert float(row["logp_diff_mean"]) == pytest.approx(0.3, abs=1e-3)
    assert float(row["is_ratio_mean"]) == pytest.approx(math.exp(0.3), abs=1e-2)


# ---- The whole path --------------------------------------------------------------------------------------------------

RUN = {
    "MODEL_ID": "tiny", "USE_VLLM": "1", "TOTAL_STEPS": "4", "SAVE_STEPS": "1", "PROMPTS_PER_STEP": "3", "SEED": "5",
    "NUM_GENERATIONS": "4", "EVAL_SAMPLES": "0", "DATA": "data/tes_heldout_compact.csv", "LEARNING_RATE": "1e-2",
    "ATTN_IMPL": "eager", "EVAL_PROFILE": "", "LR_SCHEDULER": "constant",  # a run whose TOTAL_STEPS is raised stays the same
    "PARITY_LIMIT": 0.15,  # BF16 on a model whose prompt tokens are as unlikely as 20 nats
}  # fmt: skip


class Run:
    """`train_grpo.main` in this process on a machine that claims a GPU and vLLM, with a stub in vLLM's place."""

    def __init__(self, monkeypatch, folder, tiny):
        self.monkeypatch, self.folder, self.tiny, self.stubs = monkeypatch, folder, tiny, []

    def __call__(self, prepare=lambda stub: None, **settings):
        versions = installed_versions
        with self.monkeypatch.context() as patch:
            for name in set(os.environ) & set(FIELDS):
                patch.delenv(name)
            patch.setenv("TOKENIZERS_PARALLELISM", "false")
            for name, value in (RUN | {"OUTPUT_DIR": str(self.folder)} | settings).items():
                patch.setenv(name, str(value))
            patch.setattr(sys, "argv", ["train_grpo.py"])
            patch.setattr("grpo.preflight.checks.read_machine", lambda: H100)
            patch.setattr("grpo.model.load.unseen_gpu", lambda machine: None)
            patch.setattr(
                "grpo.preflight.checks.installed_versions", lambda names: versions(names) | {"vllm": "0.26.0"}
            )

            def start_engine(settings, plan, model_path, stop_token_ids):
                arguments = engine_arguments(settings, plan, model_path, H100.gpu_total)
                keep = {k: v for k, v in arguments.items() if "lora" in k and k.startswith(("enable", "max_lora_r"))}
                stub = StubLLM(arguments["model"], max_model_len=arguments["max_model_len"], **keep)
                prepare(stub)
                self.stubs.append(stub)
                engine = Engine(stub, StubSampling, StubLoRARequest, settings, stop_token_ids)
                engine.sleep()
                return engine

            patch.setattr("grpo.rollout.engine.start_engine", start_engine)
            return train_grpo.main([])

    def read(self, name):
        return (self.folder / name).read_text(encoding="utf-8")


@pytest.fixture
def start(monkeypatch, tmp_path, tiny, quiet):
    return lambda name="run": Run(monkeypatch, tmp_path / name, tiny)


def adapter(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def straight():
    """What an uninterrupted run of four steps left: filled by the first test that needs it, kept for the others."""
    return {}


@pytest.fixture
def whole(straight, start):
    if not straight:
        run = start("whole")
        code = run()
        straight.update(code=code, metrics=read_csv(run.folder / "metrics.csv"), completions=run.read("completions.csv"),
                        log=run.read("training.log"), adapter=adapter(run.folder), calls=run.stubs[0].calls,
                        record=json.loads(run.read("settings.json")))  # fmt: skip
    return straight


def test_a_run_with_vllm(whole):
    assert whole["code"] == 0 and [row["step"] for row in whole["metrics"]] == list("1234")
    for row in whole["metrics"]:
        assert 0 < float(row["logp_diff_mean"]) < 0.02 and float(row["is_ratio_mean"]) == pytest.approx(1, abs=0.02)
        assert float(row["logp_diff_max"]) >= float(row["logp_diff_mean"])
        assert float(row["clipped_ratio"]) < 0.5, "completions end at the stop tokens"
        for name in ("wake_s", "handover_s", "sleep_s"):
            assert 0 <= float(row[name]) <= float(row["rollout_s"])
        assert float(row["handover_s"]) > 0
    assert whole["record"]["choices"]["rollouts"] == [True, "set by USE_VLLM"]
    engine = whole["record"]["choices"]["plan"]["engine"]
    assert engine["max_num_seqs"] == 12 and engine["capture_sizes"] == list(range(1, 13))
    for words in ("parity before the first step, fixed tokens", "parity after a sleep, sampled tokens", "complete: 4"):
        assert words in whole["log"]
    assert "vLLM awake" in whole["log"] and "Traceback" not in whole["log"]
    # The sleep of the start, two rounds of the gate, four steps: never two rollouts for one step.
    gate = ["wake_up", "apply_model", "reset_prefix_cache", "generate", "generate", "sleep"]
    step = ["wake_up", "apply_model", "reset_prefix_cache", "generate", "sleep"]
    assert whole["calls"] == ["sleep", *gate * 2, *step * 4]


def assert_like(whole, folder):
    import torch

    assert (folder / "completions.csv").read_text(encoding="utf-8") == whole["completions"]
    names = [n for n in METRICS if not n.endswith(("_s", "time"))]
    rows = read_csv(folder / "metrics.csv")
    assert [[r[n] for n in names] for r in rows] == [[r[n] for n in names] for r in whole["metrics"]]
    mine = adapter(folder)
    assert all(torch.equal(mine[name], tensor) for name, tensor in whole["adapter"].items())
    assert any(t.any() for n, t in mine.items() if "lora_B" in n)


def test_a_resumed_run_generates_what_the_whole_one_did(whole, start):
    run = start()
    assert run(TOTAL_STEPS=2) == 0
    assert run(TOTAL_STEPS=4) == 0
    assert "continuing from step 2" in run.read("training.log")
    assert_like(whole, run.folder)


def test_a_dying_engine_leaves_a_run_that_continues(whole, start):
    """The gate calls generate four times, so the seventh call is step 3: exit 4, zip, checkpoint 2, then the rest."""
    run = start()

    def die(stub):
        stub.fail["generate"] = (7, RuntimeError("an illegal memory access was encountered"))

    assert run(die) == 4
    log = run.read("training.log")
    assert "vLLM: generating failed (RuntimeError: an illegal memory access" in log and "it continues" in log
    with zipfile.ZipFile(run.folder.with_name("run.zip")) as archive:
        assert archive.testzip() is None and "run/checkpoint-2/adapter_model.safetensors" in archive.namelist()
    assert last_checkpoint(run.folder)[0] == 2
    assert run() == 0
    assert_like(whole, run.folder)


def test_a_run_with_the_native_adapter_and_an_evaluation(start, tmp_path, tiny):
    """Before and after training with vLLM, the first without adapter; continued with the other hand-over."""
    rows = (ROOT / RUN["DATA"]).read_text(encoding="utf-8").splitlines()[:4]
    held_out = tmp_path / "held_out.csv"
    held_out.write_text("\n".join(rows) + "\n", encoding="utf-8")
    run = start()
    assert run(ROLLOUT_SYNC="lora", TEMPERATURE=1.5, TOTAL_STEPS=1, EVAL_SAMPLES=2, EVAL_DATA=held_out) == 0
    assert not Engine(None, None, None, None, []).folder.exists(), "nothing stays in shared memory"
    result = json.loads(run.read("evaluation.json"))
    assert 0 <= result["before"]["reward"] <= result["oracle"] and 0 <= result["after"]["reward"] <= result["oracle"]
    calls, requests = run.stubs[0].calls, run.stubs[0].requests
    assert calls[-12:] == ["wake_up", "add_lora", "generate", "sleep"] * 3, "before, step 1, after"
    assert len({r.lora_int_id for r in requests}) == len({r.lora_name for r in requests}) == 5
    assert float(read_csv(run.folder / "metrics.csv")[0]["logp_diff_mean"]) < 0.02
    assert run(ROLLOUT_SYNC="merge", TEMPERATURE=1.4, TOTAL_STEPS=2) == 2, (
        "a resumed run may not change what it samples"
    )
    assert run(ROLLOUT_SYNC="merge", TEMPERATURE=1.5, TOTAL_STEPS=2) == 0
    assert len(read_csv(run.folder / "metrics.csv")) == 2


def test_torch_gives_its_free_blocks_back_before_the_engine_wakes(build, monkeypatch):
    """vLLM maps memory past torch's allocator, and nothing is tried a second time."""
    engine, order = build().run.engine, []
    engine.sleep()
    monkeypatch.setattr("grpo.rollout.engine.empty_cache", lambda: order.append("empty_cache"))
    wake_up = engine.llm.wake_up
    monkeypatch.setattr(engine.llm, "wake_up", lambda *given: (order.append("wake_up"), wake_up(*given)))
    engine.wake()
    assert order == ["empty_cache", "wake_up"]


def test_a_run_goes_on_without_vllm_where_that_is_said(start, capfd):
    """`auto` alone does not change how rollouts are generated, say on a machine without a GPU."""
    run = start()
    assert run(TOTAL_STEPS=1) == 0
    capfd.readouterr()
    assert run(TOTAL_STEPS=2, USE_VLLM="auto") == 2
    told = capfd.readouterr().err
    assert "was started with USE_VLLM=1, now it is 0" in told and "USE_VLLM=0 to go on like this" in told
    assert run(TOTAL_STEPS=2, USE_VLLM=0) == 0
    assert [row["wake_s"] != "" for row in read_csv(run.folder / "metrics.csv")] == [True, False]
    assert "as the run was started" not in run.read("training.log"), "GENERATION_BATCH=auto is planned anew"


def test_a_run_stops_where_vllm_and_trainer_do_not_agree(start, capfd):
    run = start()
    assert run(lambda stub: setattr(stub, "ignore_adapter", True)) == 3
    log = run.read("training.log")
    assert "PARITY: before the first step, fixed tokens: vLLM and trainer differ" in log and "ROLLOUT_SYNC" in log
    assert len(run.read("metrics.csv").splitlines()) == 1, "no step was made"
    # What exit code 3 names can be tried at once, in the same folder.
    assert run(ROLLOUT_SYNC="lora", TOTAL_STEPS="1") == 0 and len(read_csv(run.folder / "metrics.csv")) == 1
    assert run(PARITY="off", TOTAL_STEPS="1", IS_CORRECTION="none", OVERWRITE="1") == 0
    assert "| PARITY=off" in run.read("training.log")
    row = read_csv(run.folder / "metrics.csv")[0]
    assert float(row["logp_diff_mean"]) > 0 and float(row["is_ratio_mean"]) == 1 and row["handover_s"]


def test_a_start_that_fails_is_told(start, monkeypatch):
    run = start()

    def broken(stub):
        raise EngineError("starting the engine failed (ValueError: no room). VLLM_EAGER=1 ...")

    assert run(broken) == 4
    assert "vLLM: starting the engine failed" in run.read("training.log")


# ---- Plan ------------------------------------------------------------------------------------------------------------

FILES = ModelFiles(None, dict(REAL_CONFIG))


def plan(machine=H100, prompt_len=930, **changes):
    return plan_memory(Settings(**changes), REAL_CONFIG, machine, prompt_len, "eager", DOWNLOAD_GIB)


def planned(settings, machine):
    """As the preflight plans 930 tokens of prompt with EXPERTS and USE_VLLM as set."""
    checkpoint = None if settings.USE_VLLM is False else DOWNLOAD_GIB
    kind = settings.EXPERTS or "mxfp4"
    return plan_memory(
        settings, REAL_CONFIG, machine, 930, "torch_flash", checkpoint, settings.PACKING or "prefix", kind
    )


def machine_problems(machine, tmp_path, files=FILES, resumed=False, **changes):
    problems, settings = Problems(), Settings(OUTPUT_DIR=str(tmp_path / "run"), **changes)
    check_machine(settings, files, machine, planned(settings, machine), problems, planned, resumed)
    return [p for p in problems if not p.startswith("HF_HOME")]


def advice(problem):
    """({setting: value} of each change that a refusal names, best first; the rest of the advice)."""
    named, rest = re.search(r"With all else as set, (.*?) (?:fits|fit together)(.*)", problem).groups()
    return [dict(pair.split("=") for pair in way.split(" and ")) for way in named.split(" or ")], rest


@pytest.mark.parametrize(("completion", "gib"), [(512, 2.1), (4000, 9.8)])
def test_cache_of_a_step(completion, gib):
    """12 prompts of 930 tokens x 8 completions, counted by hand from vLLM's blocks of 16 tokens x 12 layers."""
    engine = plan(MAX_COMPLETION_LEN=completion).engine
    block = 12 * 16 * 2 * 8 * 64 * 2
    whole = -(-(930 + completion) // 16)
    assert engine.cache * GIB == pytest.approx(block * (1 + 1024 + 12 * (58 + 8 * (whole - 58 + 10))))
    assert engine.cache == pytest.approx(gib, abs=0.1) and "the rest waits" not in engine.cache_reason
    assert 0 <= engine.max_model_len - 930 - completion < 1024 and engine.max_num_seqs == 96
    assert 13.8 < engine.weights < 16 and engine.scratch > 0.5
    assert f"12 prompts of 930 tokens x 8 completions of {completion}" in engine.cache_reason


def test_the_real_run_fits_beside_the_trainer(tmp_path):
    chosen = plan()
    assert chosen.peak < H100.gpu_free and not machine_problems(H100, tmp_path)
    engine = chosen.engine
    assert chosen.peak == pytest.approx(
        chosen.weights + chosen.adapter + max(engine.awake, chosen.learning + engine.asleep)
    )
    assert engine.awake == pytest.approx(engine.weights + engine.scratch + engine.cache)
    without = plan_memory(Settings(), REAL_CONFIG, H100, 930, "eager")
    assert without.engine is None and chosen.micro_batch <= without.micro_batch


def test_a_share_and_little_room_shrink_the_cache():
    wanted, small = plan().engine, plan(VLLM_GPU_MEM=0.25).engine
    assert small.cache == pytest.approx(79.6 * 0.25 - small.weights - small.scratch) and small.cache < wanted.cache
    assert "VLLM_GPU_MEM=0.25 leaves" in small.cache_reason and "waits its turn" in small.cache_reason
    assert plan(VLLM_GPU_MEM=0.5).engine.cache == wanted.cache, "more than a step needs is not taken"
    tight = plan(dataclasses.replace(H100, gpu_free=62.0)).engine
    assert 0 < tight.cache < wanted.cache and "beside the trainer" in tight.cache_reason


def test_what_does_not_fit_is_told(tmp_path):
    problem = only(machine_problems(dataclasses.replace(H100, gpu_free=50.0), tmp_path))
    assert problem.startswith("VLLM_GPU_MEM: vLLM needs at least") and "50 of 80 GiB are free" in problem
    little = dataclasses.replace(H100, ram_free=12.0)
    problem = only(machine_problems(little, tmp_path))
    assert problem.startswith("memory: the sleeping engine keeps") and "12.0 GiB are free" in problem
    assert "USE_VLLM=0" in problem


def card(free, total=None):
    return dataclasses.replace(H100, gpu_free=free, gpu_total=total or free + 0.6)


@pytest.mark.parametrize(
    ("machine", "changes", "ways", "rest"),
    [
        (card(56.0, 79.6), {}, ["EXPERTS", "USE_VLLM"], "Or free 2.0 GiB more of the GPU"),
        (card(56.0, 79.6), {"resumed": True}, ["EXPERTS", "USE_VLLM"], "Or free 2.0 GiB more of the GPU"),
        (H100, {"VLLM_GPU_MEM": 0.9, "MAX_COMPLETION_LEN": 12_000},
         ["VLLM_GPU_MEM", "EXPERTS", "MAX_COMPLETION_LEN", "PROMPTS_PER_STEP", "USE_VLLM"], ""),
        (H100, {"VLLM_GPU_MEM": 0.1}, ["VLLM_GPU_MEM", "VLLM_GPU_MEM", "USE_VLLM"], ""),
        (H100, {"MICRO_BATCH": 60, "GENERATION_BATCH": 96}, ["MAX_COMPLETION_LEN", "MICRO_BATCH"], ""),
        (card(79.0), {"USE_VLLM": False, "GENERATION_BATCH": 96, "MAX_COMPLETION_LEN": 12_000}, ["GENERATION_BATCH"], ""),
        (card(60.0), {"GRADIENT_CHECKPOINTING": False},
         ["GRADIENT_CHECKPOINTING", "MAX_COMPLETION_LEN"], ""),
        (H100, {"VLLM_GPU_MEM": 0.9, "MAX_COMPLETION_LEN": 12_000, "resumed": True},
         ["VLLM_GPU_MEM", "EXPERTS", "USE_VLLM"], ""),
        (card(23.0), {"EXPERTS": "mxfp4"}, ["USE_VLLM"], ""),
        (card(23.0), {}, ["EXPERTS USE_VLLM"], "Or rent a larger GPU"),
        (card(40.0), {"MAX_COMPLETION_LEN": 60_000, "MICRO_BATCH": 8}, None, "Or rent a larger GPU"),
    ],
)  # fmt: skip
def test_a_refusal_names_what_fits_and_nothing_else(tmp_path, machine, changes, ways, rest):
    """Every named change passes the check that refuses, and no smaller one does."""
    problem = only(machine_problems(machine, tmp_path, **changes))
    proposed, end = advice(problem)
    assert ways is None or [" ".join(way) for way in proposed] == ways
    assert end == "" if not rest else rest in end
    if "free" in end:
        free = machine.gpu_free + float(re.search(r"free (.*) GiB", end)[1])
        assert machine_problems(card(free - 1.0, machine.gpu_total), tmp_path, **changes)
        assert not machine_problems(card(free, machine.gpu_total), tmp_path, **changes)
    for way in proposed:
        assert not machine_problems(machine, tmp_path, **changes | parsed(way)), way
        for name, value in parsed(way).items():
            left = {n: v for n, v in parsed(way).items() if n != name}
            assert machine_problems(machine, tmp_path, **changes | left), f"{name} is not needed"
            if name in ("MAX_COMPLETION_LEN", "MICRO_BATCH", "PROMPTS_PER_STEP"):
                assert machine_problems(machine, tmp_path, **changes | left | {name: value + 1})
            elif name == "VLLM_GPU_MEM" and value:
                assert machine_problems(machine, tmp_path, **changes | {name: value - 0.01})


def parsed(way):
    return {name: parse_value(name, value) for name, value in way.items()}


def test_where_no_setting_helps_the_missing_memory_is_told(tmp_path):
    problem = only(machine_problems(card(12.0, 15.6), tmp_path))
    told = re.search(r"No setting helps on this GPU: the smallest run needs (\d+) GiB free, (.*) more than", problem)
    needed = int(told[1])
    assert needed - 12.0 == float(told[2]) > 3 and problem.endswith("Or rent a larger GPU"), problem
    least = {"EXPERTS": "mxfp4", "USE_VLLM": False, "MAX_COMPLETION_LEN": 1}
    assert machine_problems(card(needed - 1.0), tmp_path, **least)
    assert not machine_problems(card(float(needed)), tmp_path, **least)
    # A checkpoint in BF16 has no packed experts to propose.
    files = ModelFiles(None, {name: value for name, value in REAL_CONFIG.items() if name != "quantization_config"})
    assert "No setting helps" in only(machine_problems(card(30.0), tmp_path, files))


def test_capture_sizes_golden():
    assert capture_sizes(96) == (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96)
    assert capture_sizes(1) == (1,) and capture_sizes(12) == tuple(range(1, 13))


@given(st.integers(1, 4096))
def test_capture_sizes(most):
    sizes = capture_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    # A batch runs in the next larger graph: its own up to 16, at most a quarter more from there on.
    assert sizes[:16] == tuple(range(1, min(most, 16) + 1))
    for size, larger in zip(sizes[15:], sizes[16:], strict=False):
        assert larger <= size * 1.25
    assert len(sizes) <= 16 + 4 * max(0, math.log2(most) - 4) + 1


@pytest.mark.parametrize(
    ("requested", "gpus", "tiny", "vllm", "uses", "words"),
    [
        (True, 0, True, None, True, "set by USE_VLLM"),
        (False, 1, False, "0.26.0", False, "set by USE_VLLM"),
        (None, 0, False, "0.26.0", False, "no GPU"),
        (None, 1, True, "0.26.0", False, "tiny"),
        (None, 1, False, None, False, "NOT INSTALLED"),
        (None, 1, False, "0.26.0", True, "a GPU and vLLM"),
    ],
)
def test_choose_rollouts(requested, gpus, tiny, vllm, uses, words):
    chosen, reason = choose_rollouts(requested, gpus, tiny, vllm)
    assert chosen is uses and words in reason


def test_engine_arguments():
    def arguments(**changes):
        settings = Settings(**changes)
        return engine_arguments(settings, plan(**changes).engine, "/model", 79.6)

    merge = arguments(SEED=7)
    engine = plan().engine
    assert merge["model"] == "/model" and merge["dtype"] == "bfloat16" and merge["seed"] == 7
    assert "quantization" not in merge, "MXFP4 as the checkpoint says"
    assert merge["enable_sleep_mode"] and merge["logprobs_mode"] == "processed_logprobs"
    assert merge["generation_config"] == "vllm" and merge["skip_tokenizer_init"]
    assert merge["kv_cache_memory_bytes"] == int(engine.cache * GIB)
    assert merge["gpu_memory_utilization"] == pytest.approx(engine.awake / 79.6)
    assert merge["max_model_len"] == 5120 and merge["max_num_seqs"] == 96 and merge["enforce_eager"] is False
    assert not {name for name in merge if "lora" in name}
    compilation = merge["compilation_config"]
    assert compilation["cudagraph_capture_sizes"] == list(capture_sizes(96))
    assert compilation["cudagraph_mode"] == "FULL_DECODE_ONLY" and not compilation["cudagraph_specialize_lora"]
    lora = arguments(ROLLOUT_SYNC="lora")
    assert {k: v for k, v in lora.items() if k not in merge} == {
        "enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8,
        "lora_target_modules": ["qkv_proj", "o_proj"],
    }  # fmt: skip
    ranks = {r: arguments(ROLLOUT_SYNC="lora", LORA_R=r)["max_lora_rank"] for r in (1, 2, 8, 9, 16, 200)}
    assert ranks == {1: 1, 2: 8, 8: 8, 9: 16, 16: 16, 200: 256}
    eager = arguments(VLLM_EAGER=True)
    assert eager["enforce_eager"] is True and "compilation_config" not in eager


def settings_problems(machine=H100, **changes):
    problems = Problems()
    check_settings(Settings(**changes), REAL_CONFIG, machine, problems)
    return problems


@pytest.mark.parametrize("target", ["gate_up_proj", "mlp.experts.down_proj", "router", "experts"])
def test_adapters_on_experts_are_refused_with_what_works(target):
    problem = only(settings_problems(LORA_TARGETS=f"q_proj,{target}"))
    assert repr(target) in problem and "MXFP4 experts" in problem and "all-linear" in problem and "q_proj" in problem


def test_settings_that_vllm_refuses():
    assert not settings_problems(USE_VLLM=True) and not settings_problems(TEMPERATURE=2.0)
    assert "vLLM takes at most 2" in only(settings_problems(TEMPERATURE=2.1))
    assert "vLLM takes at most 2" in only(settings_problems(TEMPERATURE=2.1, USE_VLLM=True))
    assert not settings_problems(TEMPERATURE=2.1, USE_VLLM=False)
    assert not settings_problems(Machine(ram_free=20.0), TEMPERATURE=2.1)
    assert "vespo" in only(settings_problems(LOSS_TYPE="vespo", IS_CORRECTION="sequence_mask"))
    assert not settings_problems(LOSS_TYPE="vespo")


def test_untested_versions_of_vllm_are_refused_where_it_is_used():
    good = {name: oldest for name, (oldest, _) in TESTED.items()}

    def problems(version, uses, **changes):
        found = Problems()
        check_packages(Settings(**changes), good | {"vllm": version}, found, uses)
        return found

    assert not problems("0.26.0", True) and not problems("0.26.3+cu130", True)
    for version in ("0.25.9", "0.27.0"):
        assert f"vllm: version {version} is outside the tested range" in only(problems(version, True))
        assert not problems(version, False) and not problems(version, True, ALLOW_UNTESTED=True)
    assert "vllm: the package is not installed" in only(problems(None, True))
    assert not problems(None, False)


# ---- Hook points -----------------------------------------------------------------------------------------------------


ROUTER = """
import triton
import triton.language as tl

@triton.jit
def {kernel}(x, {one}: tl.constexpr, {rows}{constant}, n_rows, BLOCK: tl.constexpr):
    tl.store(x + {one} * {rows}, n_rows)

def {launcher}():
    return {kernel}
"""


EXPERTS = """
import dataclasses

@dataclasses.dataclass
class OptFlags:
    block_m: int
    group_m: int
    target_kernel_kwargs: dict

def {chooser}(rows):
    return OptFlags(rows, 8, {{"own": 1}})

def matmul_ogs(rows):
    return {chooser}(rows)
"""


IMPORT_UTILS = """
import sys

def has_triton_kernels():
    import vllm.third_party.triton_kernels as triton_kernels

    sys.modules["triton_kernels"] = triton_kernels
    return True
"""


@pytest.fixture
def router(tmp_path, monkeypatch):
    """A function that puts a vLLM with a copy of triton_kernels in its place, and one that returns the modules that vLLM uses.

    As in vLLM 0.26 the copy gets its second name from an alias, so a module of it can be loaded under either.
    """
    pytest.importorskip("triton")

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "triton_kernels")]:
            monkeypatch.delitem(sys.modules, name)

    def build(constant=": tl.constexpr", launcher="topk_forward", there=True, chooser="make_opt_flags", capability=9):
        package = tmp_path / "vllm" / "third_party" / "triton_kernels"
        package.mkdir(parents=True)
        (tmp_path / "vllm" / "utils").mkdir()
        for folder in (package, package.parent, tmp_path / "vllm", tmp_path / "vllm" / "utils"):
            (folder / "__init__.py").touch()
        text = IMPORT_UTILS if there else "def has_triton_kernels():\n    return False"
        (tmp_path / "vllm" / "utils" / "import_utils.py").write_text(text)
        names = {"kernel": "_topk_forward", "one": "stride_rm", "rows": "stride_rn", "launcher": launcher}
        (package / "topk.py").write_text(ROUTER.format(constant=constant, **names))
        names = {"kernel": "_sum_bitmatrix_rows", "one": "stride_bm", "rows": "stride_bn"}
        (package / "tensor.py").write_text(ROUTER.format(constant=constant, launcher="sum_bitmatrix_rows", **names))
        (package / "matmul_ogs.py").write_text(EXPERTS.format(chooser=chooser))
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (capability, 0))
        monkeypatch.syspath_prepend(tmp_path)
        forget()

        def used():
            from triton_kernels.tensor import sum_bitmatrix_rows
            from triton_kernels.topk import topk_forward

            return topk_forward(), sum_bitmatrix_rows()

        return used

    yield build
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "triton_kernels")]:
        del sys.modules[name]  # for good: monkeypatch would put them back


def constants(kernel):
    return [parameter.name for parameter in kernel.params if parameter.is_constexpr]


@pytest.mark.parametrize("own", [None, "/somewhere/else"])
def test_triton_keeps_its_cache_where_the_next_start_looks(monkeypatch, own, tiny):
    """torch would move it while vLLM starts; the trainer's own variables come back as they were."""
    import torch
    import triton

    seen = {}

    class LLM(StubLLM):
        def __init__(self, model, **arguments):
            seen.update(os.environ)
            os.environ["TRITON_CACHE_DIR"] = "/moved"
            super().__init__(model, max_model_len=arguments["max_model_len"])

    vllm, request = ModuleType("vllm"), ModuleType("vllm.lora.request")
    vllm.LLM, vllm.SamplingParams, request.LoRARequest = LLM, StubSampling, StubLoRARequest
    for name, module in {"vllm": vllm, "vllm.lora": ModuleType("vllm.lora"), "vllm.lora.request": request}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("mend_kernels", "keep_weights_asleep"):
        monkeypatch.setattr(train_grpo, name, lambda *llm: None)
    monkeypatch.setattr(Engine, "warm_up", lambda self, max_model_len: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if own:
        monkeypatch.setenv("TRITON_CACHE_DIR", own)
    plan = EnginePlan(1, 1, 1, "", 1, 1, 2048, 8, (1, 8))
    at_exit = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    engine = rollout_engine.start_engine(Settings(), plan, str(tiny), [])
    assert engine.asleep and close_process_group in at_exit
    assert seen["TRITON_CACHE_DIR"] == (own or triton.knobs.cache.dir)
    assert os.environ.get("TRITON_CACHE_DIR") == own


def test_the_router_is_not_compiled_for_every_number_of_tokens(router, caplog):
    used = router()
    mend_kernels()
    assert [constants(kernel) for kernel in used()] == [["stride_rm", "BLOCK"], ["stride_bm", "BLOCK"]]
    before = used()
    mend_kernels()
    assert used() == before, "what is mended is left alone"
    assert not caplog.records


def test_a_router_that_upstream_mended_is_left_alone(router, caplog):
    used = router(constant="")
    mend_kernels()
    assert [kernel.fn.__module__ for kernel in used()] == ["triton_kernels.topk", "triton_kernels.tensor"]
    before = used()
    mend_kernels()
    assert used() == before and not caplog.records


def test_no_router_is_no_warning(router, caplog):
    router(there=False)
    mend_kernels()
    assert not caplog.records and "triton_kernels" not in sys.modules


def test_a_router_that_moved_is_a_warning(router, caplog):
    router(launcher="forward")
    mend_kernels()
    message = only([record.getMessage() for record in caplog.records])
    assert "vLLM's experts are not what they were (compile_router_once: " in message and "stop for a second" in message


TUNED = (1, {"own": 1, "maxnreg": 128})


@pytest.mark.parametrize(
    ("capability", "rows", "flags"), [(9, 16, TUNED), (9, 32, (8, {"own": 1})), (10, 16, (8, {"own": 1}))]
)
def test_decoding_on_hopper_gets_its_own_flags(router, caplog, capability, rows, flags):
    """Tiles of 16 rows, and nothing else about them changes; a second engine in the process tunes nothing twice."""
    router(capability=capability)
    mend_kernels()
    mend_kernels()
    from triton_kernels.matmul_ogs import OptFlags, matmul_ogs

    assert matmul_ogs(rows) == OptFlags(rows, *flags) and not caplog.records
    assert matmul_ogs.__globals__["make_opt_flags"].__name__ == "make_opt_flags"


def test_experts_that_moved_are_a_warning(router, caplog):
    router(chooser="choose_flags")
    mend_kernels()
    assert (
        "tune_decoding: KeyError('make_opt_flags')): rollouts take a little longer" in caplog.records[-1].getMessage()
    )
    assert len(caplog.records) == 1, "the router was mended all the same"


def compiled_for(tokens):
    """What Triton compiles vLLM 0.26's kernels of experts and router for, in a prefill of so many tokens: the block's rows
    (opt_flags.py), and whether the numbers that they are passed are multiples of 16 (matmul_ogs.py, routing.py, topk.py,
    reduce_bitmatrix.py of triton_kernels; 32 experts, 4 for each token)."""
    pairs, up = 4 * tokens, lambda n, size: -(-n // size)
    rows = max(16, min(128, 1 << (pairs // 32 - 1).bit_length()))
    blocks = up(pairs - 32 + 1, rows) + 32 - 1
    parts = 4 * up(tokens, 128)
    multiple = lambda *numbers: tuple(n % 16 == 0 for n in numbers)  # noqa: E731
    return {
        ("first product", rows, multiple(tokens, blocks)),
        ("second product", rows, multiple(pairs, blocks)),
        ("memset", multiple(2 * pairs, up(tokens, 32), parts)),
        ("routing", multiple(tokens, parts)),
        ("top k", multiple(tokens)),
        ("sums", multiple(tokens, parts)),
    }


def test_the_warm_up_meets_all_that_a_prefill_compiles():
    kinds = {n: compiled_for(n) for n in range(33, BATCHED_TOKENS + 1)}
    met = set().union(*map(kinds.get, WARM_UP_TOKENS))
    missing = {n: kind - met for n, kind in kinds.items() if kind - met}
    assert not missing, list(missing.items())[:3]
    for n in WARM_UP_TOKENS:
        others = set().union(*(kinds[other] for other in WARM_UP_TOKENS if other != n))
        assert kinds[n] - others, f"{n} meets nothing that the others do not"


@pytest.mark.parametrize("max_model_len", [4940, 200])
def test_the_warm_up_prefills_its_numbers_of_tokens(tiny, max_model_len):
    vocabulary = json.loads((tiny / "config.json").read_text())["vocab_size"]
    calls = []

    class LLM:
        def generate(self, prompts, parameters, use_tqdm, lora_request):
            assert {(p.max_tokens, p.temperature) for p in parameters} == {(1, 0.0)}, "no draw, no decoding"
            calls.append([row["prompt_token_ids"] for row in prompts])
            return prompts

    engine = Engine(LLM(), StubSampling, StubLoRARequest, Settings(), [])
    engine.warm_up(max_model_len)
    assert [sum(map(len, rows)) for rows in calls] == list(WARM_UP_TOKENS)
    assert all(0 < len(row) < max_model_len for rows in calls for row in rows)
    assert max(max(row) for rows in calls for row in rows) < vocabulary
    starts = [tuple(row[:16]) for rows in calls for row in rows]
    assert len(set(starts)) == len(starts), "nothing is found in the prefix cache"
    assert engine.seconds["warm_up"] > 0
    calls.clear()
    Engine(LLM(), StubSampling, StubLoRARequest, Settings(ROLLOUT_SYNC="lora"), []).warm_up(max_model_len)
    assert not calls, "other kernels"


def test_trl_leaves_vllm_and_its_correction_to_us():
    """With use_vllm off TRL must still pass on the log-probs that `_generate_single_turn` returns, and compute none."""
    from trl import GRPOTrainer

    scoring = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert scoring.count("self.use_vllm and self.vllm_importance_sampling_correction") >= 3
    assert "sampling_per_token_logps_list" in scoring and 'float("nan") if x is None' in scoring
    assert 'output["sampling_per_token_logps"]' in scoring


@pytest.mark.parametrize("mode", FIELDS["IS_CORRECTION"].metadata["choices"])
def test_no_correction_is_left_to_trl(mode, tmp_path):
    settings = Settings(OUTPUT_DIR=str(tmp_path), IS_CORRECTION=mode, IS_CLIP_MAX=2.0)
    config = GRPOConfig(**train_grpo.grpo_options(settings, cuda=False))
    assert config.vllm_importance_sampling_correction is False and config.use_vllm is False
    assert config.per_device_train_batch_size == settings.completions_per_step
    assert config.gradient_accumulation_steps == config.steps_per_generation == 1


def test_importance_ratio():
    import torch

    logps, sampled = torch.zeros(2, 3), torch.tensor([[-1.0, math.nan, 0.5], [-0.5, -0.5, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    e = math.exp
    golden = {
        "token_truncate": [[2.0, 1, e(-0.5)], [e(0.5), e(0.5), 1]],
        "token_mask": [[0.0, 1, e(-0.5)], [e(0.5), e(0.5), 1]],
        "sequence_truncate": [[e(0.5)], [2.0]],
        "sequence_mask": [[e(0.5)], [0.0]],
    }
    for mode, expected in golden.items():
        found = importance_ratio(logps, sampled, mask, mode, 2.0)
        torch.testing.assert_close(found, torch.tensor(expected), msg=mode)
    assert set(golden) | {"none"} == set(FIELDS["IS_CORRECTION"].metadata["choices"])


def test_a_model_that_cannot_be_loaded_ends_the_run_with_the_reason(start, monkeypatch):
    def load_model(*arguments):
        raise ValueError("model.safetensors: cut short. Download the model again")

    monkeypatch.setattr("grpo.model.load.load_model", load_model)
    run = start()
    assert run() == 1
    assert "model: model.safetensors: cut short. Download the model again" in run.read("training.log")
