# SPDX-License-Identifier: Apache-2.0
"""`bench.py rollout` and `step`: what a child measures of a run, with a stub in vLLM's place."""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import RENDERED
from engines import trainer_with_engine
from expert_models import load
from machines import H100
from trainers import make, plain_float32

import train_grpo
from grpo.learn import timer
from grpo.measure import record, rollout, step, variants
from grpo.measure.variants import Variant
from grpo.model.load import TABLES
from grpo.plan.machine import Machine, installed_versions
from grpo.rollout import engine as rollout_engine

PARITY = [{"mean": m, "max": 2 * m, "control_mean": 1 - m} for m in (0.1, 0.2)]


@pytest.fixture
def child(tiny, tmp_path, monkeypatch):
    """Options of a child whose entry point trains the tiny model for three steps of 2 x 8 completions beside a stub of
    vLLM. What a GPU would say is pretended: 11 of 16 GiB were free, and at most 14 are in use."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    sizes = {"synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "is_available": True}
    sizes |= {"memory_allocated": 2**29, "max_memory_allocated": 2**30, "mem_get_info": (2 * 2**30, 2**34)}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda size=size: size)
    monkeypatch.setattr(rollout, "read_machine", lambda: Machine(gpu_free=11.0))
    different = types.SimpleNamespace(format=lambda text: RENDERED.format(text.split()[1] * 20))
    monkeypatch.setattr("trainers.RENDERED", different)  # Prompts of several lengths are padded.
    options = argparse.Namespace(
        command="rollout", child="run", model=str(tiny), data="d", run=str(tmp_path / "run"), tokens=None, kernels="own",
        set=[], trl=False, variants=[Variant("run", {})], after=lambda trainer: None,
    )  # fmt: skip
    monkeypatch.setattr(rollout_engine, "start_engine", lambda *arguments: options.engine)

    def main(arguments):
        folder = Path(os.environ["OUTPUT_DIR"])
        assert str(folder) == options.run and os.environ["PROMPTS_PER_STEP"] == "12"
        folder.mkdir()
        changes = {"NUM_GENERATIONS": 8, "MAX_COMPLETION_LEN": 6, "TOTAL_STEPS": int(os.environ["TOTAL_STEPS"])}
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            if os.environ["USE_VLLM"] == "1":
                trainer = trainer_with_engine(tiny, folder, **changes, LOSS_TYPE="bnpo", EXPERTS="bf16")
                options.engine = trainer.run.engine
                # Each completion would be of one token.
                options.engine.stop_token_ids = list(range(trainer.model.config.vocab_size))
                rollout_engine.start_engine("settings", "plan", "path", "eos", trainer.model)
                trainer.run.parity += PARITY
            else:
                trainer = plain_float32(make(tiny, folder, **changes))
            with mock.patch.object(timer, "gpu_used_gib", return_value=14.0):
                trainer.train()
        trainer.run.plan = dataclasses.replace(trainer.run.plan, weights=8.0, adapter=1.0, learning=6.0)
        options.after(trainer)
        return 0

    options.main = main
    with mock.patch.dict(os.environ):
        yield options


def measured(options):
    """The values that a child has written."""
    return variants.read_result(options, options.child, only_done=True)


def test_a_child_measures_a_run_and_what_vllm_lends(child, monkeypatch):
    weight = torch.ones(4, 6, dtype=torch.bfloat16)
    monkeypatch.setattr(rollout, "lent_tensors", lambda policy: {"a": weight, "b": weight + 1})
    before = {name: getattr(rollout_engine.Engine, name) for name in ("rollout", "wake")}
    assert rollout.bench_rollout(child) == 0
    assert before == {name: getattr(rollout_engine.Engine, name) for name in before}, "nothing stays watched"
    values, steps = measured(child), record.steps_of(Path(child.run))
    assert len(steps) == 3 and values["step_s"] == pytest.approx(steps.step_s[1:].mean())
    assert steps.tokens_mean.eq(6).all(), "every completion is full"
    assert values["job_peak_gib"] == 9 and values["plan_error"] == pytest.approx((8 + 1 + 6) / 9 - 1)
    assert values["asleep_gib"] == 0 and values["startup_s"] > 0
    assert (values["parity_mean"], values["parity_max"], values["parity_control_mean"]) == (0.2, 0.4, 0.8)
    assert values["sync_share"] == pytest.approx(1, abs=1e-3) and values["generate_tok_s"] > values["rollout_tok_s"]
    assert values["lent_tensors"] == 2 and not values["lent_changed"] and not values["base_changed"]
    assert "paged_gib" not in values and "rows" not in values
    figures = rollout.run_figures(Variant("shared-22", {"EXPERTS": "shared"}, 22.0), values, "shared_22_")
    named = {row["name"]: row["note"] for row in figures}
    assert {"shared_22_handover_s", "shared_22_wake_s", "shared_22_lent_changed", "shared_22_startup_s"} <= named.keys()
    assert "2 x 8 completions, 6 tokens each" in named["shared_22_step_s"]
    assert "EXPERTS=shared, all but 22 GiB of the GPU occupied" in named["shared_22_step_s"]


@pytest.mark.parametrize("fault", ["a lent weight is written", "a base weight is written", "the run fails"])
def test_a_child_fails(child, monkeypatch, fault):
    weight = torch.ones(4, 6, dtype=torch.bfloat16)
    monkeypatch.setattr(rollout, "lent_tensors", lambda policy: {"lent": weight})

    def after(trainer):
        if fault == "a lent weight is written":
            weight[2, 3] = 1.0078125  # the next number in BF16
        else:
            norm = trainer.model.get_base_model().model.layers[0].input_layernorm.weight
            norm.data[3] = torch.nextafter(norm.data[3], torch.tensor(9.0))

    child.after, child.variants = after, [Variant("run", {"TOTAL_STEPS": "1"})]
    if fault == "the run fails":
        child.main = lambda arguments: 3
        assert rollout.bench_rollout(child) == 3 and not measured(child)
    else:
        assert rollout.bench_rollout(child) == 1
        changed = measured(child)["base_changed"], measured(child)["lent_changed"]
        assert changed == ((0, 1) if fault == "a lent weight is written" else (1, 0))


def test_settings_kernels_tokens_and_paged_weights(child, monkeypatch):
    monkeypatch.setattr(rollout_engine, "engine_arguments", lambda settings, plan: {"plan": plan})
    child.variants = [Variant("run", {"TOTAL_STEPS": "1", "EXPERTS": "paged"})]
    child.kernels, child.tokens = "older-cards", 4

    def after(trainer):
        trainer.run.engine.pages = mock.Mock(nbytes=2**23)
        assert rollout_engine.engine_arguments("s", "p") == {"plan": "p", "attention_backend": "TRITON_ATTN"}

    child.after = after
    assert rollout.bench_rollout(child) == 0 and os.environ["EXPERTS"] == "paged"
    values, steps = measured(child), record.steps_of(Path(child.run))
    assert steps.tokens_mean.eq(4).all() and values["learn_s"] == pytest.approx(steps.learn_s[0])
    assert values["which"] == "the first step" and "lent_tensors" not in values and values["paged_gib"] == 2**-7


def test_rollouts_without_vllm(child):
    child.variants = [Variant("run", {"USE_VLLM": "0", "EXPERTS": "mxfp4"}, 22.0)]
    assert rollout.bench_rollout(child) == 0
    values, steps = measured(child), record.steps_of(Path(child.run))[1:]
    assert values["rows"] == 4 and values["generate_tok_s"] == steps.rollout_tokens_per_s.mean()
    assert not {"wake_s", "asleep_gib", "parity_mean"} & values.keys() and not values["base_changed"]


def test_a_step_is_measured_beside_trls(child, monkeypatch):
    """TRL's path is TRL's own: it gives the gradient that this learner gives, in float32 on a CPU."""
    monkeypatch.setattr(step, "ATTENTION", "eager")
    monkeypatch.setattr(step, "LONGEST", 6)
    child.variants, child.command, child.trl = [Variant("run", {"TOTAL_STEPS": "2"})], "step", True
    trainers, batches, gradients = [], [], []

    def keep_gradient():
        policy = variants.policy_of(trainers[0])
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
        policy.zero_grad()

    def after(trainer):
        trainers.append(trainer)
        batches.append(step.padded_batch(trainer, [6] * 16))
        trainer.learn(trainer.model, batches[0])
        keep_gradient()

    child.after = after
    assert step.bench_step(child) == 0
    for micro in (8, 4):
        step.trl_learning(trainers[0], batches[0], micro)
        keep_gradient()
    ours, theirs, in_fours = gradients
    assert (ours - theirs).norm() < 1e-4 * theirs.norm() and (in_fours - theirs).norm() < 1e-4 * theirs.norm()
    values = measured(child)
    assert 0 < values["w1_trl_old_logps_s"] < values["w1_learn_trl_s"] and values["w1_trl_micro_batch"] in (8, 16)
    assert 0 < values["w1_speedup_without_pass"] < values["w1_speedup"] and values["long_learn_peak_gib"] == 0.5
    named = {row["name"] for row in step.step_figures(child.variants[0], values, "")}
    assert {"step_s", "rollout_tok_s", "job_peak_gib", "w1_learn_s", "w1_learn_trl_s"} <= named


@pytest.mark.parametrize(
    "room, fits, best", [(99, 99, 24), (16, 99, 16), (1, 99, 8), (99, 16, 16)], ids=["all", "room", "first", "oom"]
)
def test_trls_path_is_timed_at_its_best_micro_batch(monkeypatch, room, fits, best):
    """Of those that take no more memory than this learner; here as many GiB as completions, fastest at 24."""
    tried = []

    def learning(trainer, batch, micro, only_first=False):
        tried.append(micro)
        if micro > fits:
            raise torch.OutOfMemoryError
        return {"seconds": abs(micro - 24), "peak_gib": micro, "micro": micro}

    monkeypatch.setattr(step, "trl_learning", learning)
    monkeypatch.setattr(step, "policy_of", lambda trainer: torch.nn.Linear(1, 1))
    assert step.fastest_trl("trainer", {"advantages": torch.ones(48)}, room)["micro"] == best
    assert max(tried) <= 48, "never more than there are"


def test_what_vllm_lends_is_summed_bit_by_bit(tiny):
    """The sum of a tensor's bits changes with one bit of an expert, and with a sign of the head."""
    packed, model = load(tiny, "mxfp4"), load(tiny, "shared")
    assert not rollout.lent_tensors(model), "none yet"
    for ours, theirs in zip(model.model.layers, packed.model.layers, strict=True):
        ours.mlp.experts.shared = {
            name: (*(getattr(theirs.mlp.experts, f"{name}_{part}").clone() for part in ("blocks", "scales")), 0, 0)
            for name in ("gate_up_proj", "down_proj")
        }
    for name in TABLES:
        model.get_parameter(name).data = packed.get_parameter(name).clone()
    sums, layers = rollout.bit_sums(rollout.lent_tensors(model)), len(model.model.layers)
    assert len(sums) == 4 * layers + 2 and set(TABLES) < set(sums)
    model.model.layers[-1].mlp.experts.shared["down_proj"][0].view(-1)[5] ^= 1
    model.lm_head.weight.data[3, 2] *= -1
    after = rollout.bit_sums(rollout.lent_tensors(model))
    assert [name for name in after if after[name] != sums[name]] == [f"{layers - 1}.down_proj.values", "lm_head.weight"]


def test_the_checks_let_a_measurement_begin(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.preflight.resolve.read_machine", lambda: H100)
    versions = installed_versions
    monkeypatch.setattr("grpo.preflight.resolve.installed_versions", lambda names: versions(names) | {"vllm": "0.26.0"})
    data = str(record.ROOT / "data/tes_train_compact.csv")
    options = argparse.Namespace(model="tiny", data=data, run=tmp_path / "run")
    with mock.patch.dict(os.environ, variants.run_settings(options, {"ATTN_IMPL": "eager"})):
        assert train_grpo.main(["--check"]) == 0
