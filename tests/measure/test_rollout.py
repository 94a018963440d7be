# SPDX-License-Identifier: Apache-2.0
"""`bench.py rollout` and `step`: what a child measures of a run, with a stub in vLLM's place."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import RENDERED
from engines import trainer_with_engine
from expert_models import load
from machines import H100
from trainers import make, plain_float32

import train_grpo
from grpo.measure import record, rollout, step, trl_path, variants, watched
from grpo.measure.variants import Variant
from grpo.model import experts
from grpo.model import load as model_load
from grpo.model.experts import dequantize_mxfp4
from grpo.model.load import TABLES
from grpo.plan.machine import installed_versions
from grpo.rollout import engine as rollout_engine

PARITY = [{"mean": m, "max": 2 * m, "control_mean": 1 - m} for m in (0.1, 0.2)]


@pytest.fixture
def child(tiny, tmp_path, monkeypatch):
    """Options of a child whose entry point trains the tiny model for three steps of 2 x 8 completions beside a stub of
    vLLM. What a GPU would say is pretended: 11 GiB were free, 2 are; vLLM keeps 3 GiB in host memory and lends 5."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    sizes = {"memory_allocated": 2**29, "max_memory_allocated": 2**30, "memory_reserved": 2**30}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda size=size: size)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * 2**30, 2**34))
    monkeypatch.setattr("grpo.measure.watched.read_machine", lambda: SimpleNamespace(gpu_free=11.0))
    backup, lent = SimpleNamespace(numel=lambda: 3 * 2**30), (0, 5 * 2**30)
    blocks = [
        SimpleNamespace(is_asleep=True, cpu_backup_tensor=backup, handle=lent),
        SimpleNamespace(is_asleep=False, cpu_backup_tensor=None, handle=lent),
    ]
    allocator = ModuleType("vllm.device_allocator")
    allocator.get_mem_allocator_instance = lambda: SimpleNamespace(pointer_to_data=dict(enumerate(blocks)))
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, allocator.__name__, allocator)
    monkeypatch.setattr(model_load, "load_base", lambda *arguments: None)
    different = SimpleNamespace(format=lambda text: RENDERED.format(text.split()[1] * 20))
    monkeypatch.setattr("trainers.RENDERED", different)  # so that a wrong prompt matters
    options = argparse.Namespace(
        command="rollout", child="run", model=str(tiny), data="d", run=str(tmp_path / "run"), tokens=None, kernels="own",
        set=[], lengths=None, trl=False, variants=[Variant("run", {})], after=lambda trainer: None,
    )  # fmt: skip
    monkeypatch.setattr(rollout_engine, "start_engine", lambda *arguments: options.engine)

    def main(arguments):
        folder = Path(os.environ["OUTPUT_DIR"])
        assert str(folder) == options.run and os.environ["PROMPTS_PER_STEP"] == "12"
        folder.mkdir()
        model_load.load_base()
        changes = {"NUM_GENERATIONS": 8, "MAX_COMPLETION_LEN": 6, "TOTAL_STEPS": int(os.environ["TOTAL_STEPS"])}
        if os.environ["USE_VLLM"] == "1":
            trainer = trainer_with_engine(tiny, folder, **changes, LOSS_TYPE="bnpo", EXPERTS="bf16")
            options.engine = trainer.run.engine
            # Each completion would be of one token.
            options.engine.stop_token_ids = list(range(trainer.model.config.vocab_size))
            rollout_engine.start_engine("settings", "plan", "path", "eos", trainer.model)
            trainer.run.parity += PARITY
        else:
            trainer = plain_float32(make(tiny, folder, **changes))
        trainer.train()
        trainer.run.plan = dataclasses.replace(trainer.run.plan, weights=8.0, adapter=1.0, learning=6.0)
        options.after(trainer)
        return 0

    options.main = main
    with mock.patch.dict(os.environ):
        yield options


def measured(options):
    """What a child has written."""
    return variants.kept(options, options.child, only_done=True)


def test_a_child_measures_a_run_and_what_vllm_lends(child, monkeypatch):
    weight = torch.ones(4, 6, dtype=torch.bfloat16)
    monkeypatch.setattr(rollout, "lent_tensors", lambda policy: {"one": weight, "other": weight + 1})
    counts = {"experts_elements": 7, "experts_different": 0}
    monkeypatch.setattr(
        rollout, "compare_with_checkpoint", lambda base, folder: counts if folder == Path(child.model) else {}
    )
    before = {name: getattr(rollout_engine.Engine, name) for name in ("rollout", "wake")}
    assert rollout.bench_rollout(child) == 0
    assert before == {name: getattr(rollout_engine.Engine, name) for name in before}, "nothing stays watched"
    values, steps = measured(child), record.steps_of(Path(child.run))
    assert len(steps) == 3 and values["step_s"] == pytest.approx(steps.step_s[1:].mean())
    assert steps.tokens_mean.eq(6).all(), "every completion is full"
    assert values["job_peak_gib"] == 9 and values["plan_error"] == pytest.approx((8 + 1 + 6) / 9 - 1)
    assert values["host_gib"] == 3 and values["lent_gib"] == 5 and values["asleep_gib"] == 0
    assert (values["parity_mean"], values["parity_max"], values["parity_control_mean"]) == (0.2, 0.4, 0.8)
    assert values["same_seed_alike"] == 16 and values["adapter_nonzero_lora_b"] > 0 and values["startup_s"] > 0
    assert values["sync_share"] == pytest.approx(1, abs=1e-3) and values["generate_tok_s"] > values["rollout_tok_s"]
    assert values["lent_tensors"] == 2 and not values["lent_changed"] and not values["base_changed"]
    assert values["experts_elements"] == 7 and "paged_gib" not in values and "rows" not in values
    figures = rollout.run_figures(Variant("shared-22", {"EXPERTS": "shared"}, 22.0), values, "shared_22_")
    named = {row["name"]: row for row in figures}
    assert {"shared_22_handover_s", "shared_22_wake_s", "shared_22_lent_changed", "shared_22_startup_s"} <= named.keys()
    note = named["shared_22_step_s"]["note"]
    assert "2 x 8 completions, 6 tokens each" in note and "EXPERTS=shared, all but 22 GiB of the GPU occupied" in note


@pytest.mark.parametrize("fault", ["a lent weight is written", "a base weight is written", "an expert", "the run"])
def test_a_child_fails(child, monkeypatch, fault):
    weight = torch.ones(4, 6, dtype=torch.bfloat16)
    monkeypatch.setattr(rollout, "lent_tensors", lambda policy: {"one": weight})
    different = {"experts_different": int(fault == "an expert")}
    monkeypatch.setattr(rollout, "compare_with_checkpoint", lambda base, folder: different)

    def after(trainer):
        if fault == "a lent weight is written":
            weight[2, 3] = 1.0078125  # the next number in BF16
        elif fault == "a base weight is written":
            norm = trainer.model.get_base_model().model.layers[0].input_layernorm.weight
            norm.data[3] = torch.nextafter(norm.data[3], torch.tensor(9.0))

    child.after = after
    if fault == "the run":
        child.main = lambda arguments: 3
    child.variants = [Variant("run", {"TOTAL_STEPS": "1"}, 22.0 if fault == "a lent weight is written" else None)]
    assert rollout.bench_rollout(child) == (3 if fault == "the run" else 1)
    values = measured(child)
    if fault == "a lent weight is written":
        assert values["lent_changed"] == 1 and "experts_different" not in values, "no room on a small card"
    assert values.get("base_changed") == (None if fault == "the run" else int(fault == "a base weight is written"))


def test_settings_kernels_and_paged_weights(child, monkeypatch):
    monkeypatch.setattr(rollout_engine, "engine_arguments", lambda settings, plan: {"plan": plan})
    child.variants, child.kernels = [Variant("run", {"TOTAL_STEPS": "1", "EXPERTS": "paged"})], "older-cards"

    def after(trainer):
        trainer.run.engine.pages = SimpleNamespace(nbytes=2**23, leave=lambda: None, enter=lambda: None)
        assert rollout_engine.engine_arguments("s", "p") == {"plan": "p", "attention_backend": "TRITON_ATTN"}

    child.after = after
    assert rollout.bench_rollout(child) == 0 and os.environ["EXPERTS"] == "paged"
    values = measured(child)
    assert values["learn_s"] == pytest.approx(record.steps_of(Path(child.run)).learn_s[0]) and "only" not in values
    assert values["which"] == "the first step" and "lent_tensors" not in values
    assert values["paged_gib"] == 2**-7


def test_rollouts_without_vllm(child):
    child.variants = [Variant("run", {"USE_VLLM": "0", "EXPERTS": "mxfp4"}, 22.0)]
    assert rollout.bench_rollout(child) == 0
    values, steps = measured(child), record.steps_of(Path(child.run))[1:]
    assert values["rows"] == 4 and values["generate_tok_s"] == steps.rollout_tokens_per_s.mean()
    assert not {"wake_s", "host_gib", "parity_mean"} & values.keys() and not values["base_changed"]


def test_completions_can_be_shorter_than_the_settings_allow(child):
    child.tokens, child.variants = 4, [Variant("run", {"TOTAL_STEPS": "1"})]
    assert rollout.bench_rollout(child) == 0 and record.steps_of(Path(child.run)).tokens_mean.eq(4).all()


def test_a_step_is_measured_beside_trls(child, monkeypatch, tmp_path):
    """In float32 on a CPU this learner's gradients are TRL's, and other prompts give others."""
    monkeypatch.setattr(trl_path, "ATTENTION", "eager")
    monkeypatch.setattr(step, "LONGEST", 6)
    (tmp_path / "lengths.csv").write_text("completion\n" + "one two three\n" * 5 + '"hour 8\nload 30"\n')
    child.variants = [Variant("run", {"TOTAL_STEPS": "2"})]
    child.command, child.trl, child.lengths = "step", True, str(tmp_path / "lengths.csv")
    assert step.bench_step(child) == 0
    values = measured(child)
    assert values["gradient_difference"] < 1e-4 and values["gradient_batching"] < 1e-4
    assert values["gradient_wrong_prompt"] > 1e-3
    assert 0 < values["w1_trl_old_logps_s"] < values["w1_learn_trl_s"] and values["w1_trl_micro_batch"] in (8, 16)
    assert 0 < values["w1_speedup_without_pass"] < values["w1_speedup"] and values["long_learn_peak_gib"] == 0.5
    lengths = step.real_lengths(Path(child.lengths), child.model)
    assert len(lengths) == 96 and len(set(lengths)) == 2 and values["w2_max"] == max(lengths)
    named = {row["name"] for row in step.step_figures(child.variants[0], values, "")}
    assert {
        "step_s",
        "rollout_tok_s",
        "job_peak_gib",
        "w1_learn_s",
        "w1_learn_trl_s",
        "w2_learn_s",
        "w2_learn_trl_s",
    } <= named


@pytest.mark.parametrize(
    "room, fits, best", [(99, 99, 24), (16, 99, 16), (1, 99, 8), (99, 16, 16)], ids=["all", "room", "first", "oom"]
)
def test_trls_path_is_timed_at_its_best_micro_batch(monkeypatch, room, fits, best):
    """Of those that take no more memory than this learner; here as many GiB as completions, fastest at 24."""
    tried = []

    def learning(trainer, batch, micro, least=None):
        tried.append(micro)
        if micro > fits:
            raise torch.OutOfMemoryError
        return {"seconds": abs(micro - 24), "peak_gib": micro}

    monkeypatch.setattr(trl_path, "trl_learning", learning)
    trainer = SimpleNamespace(model=torch.nn.Linear(1, 1))
    assert trl_path.fastest_trl(trainer, {"advantages": torch.ones(48)}, room)["micro"] == best
    assert max(tried) <= 48, "never more than there are"


def test_weights_are_compared_bit_by_bit(tiny, monkeypatch):
    """With the checkpoint's own tensors in vLLM's place, then with a bit of an expert and a sign of the head
    changed."""
    monkeypatch.setattr(experts, "dequantize_swizzled", lambda values, scales, *_: dequantize_mxfp4(values, scales))
    packed, model = load(tiny, "mxfp4"), load(tiny, "shared")
    assert not rollout.lent_tensors(model), "none yet"
    for ours, theirs in zip(model.model.layers, packed.model.layers, strict=True):
        ours.mlp.experts.shared = {
            name: (*(getattr(theirs.mlp.experts, f"{name}_{part}").clone() for part in ("blocks", "scales")), 0, 0)
            for name in ("gate_up_proj", "down_proj")
        }
    for name in TABLES:
        model.get_parameter(name).data = packed.get_parameter(name).clone()
    sums, layers, c = rollout.bit_sums(rollout.lent_tensors(model)), len(model.model.layers), model.config
    assert len(sums) == 4 * layers + 2 and set(TABLES) < set(sums)
    assert rollout.compare_with_checkpoint(model, tiny) == {
        "experts_elements": layers * c.num_local_experts * 3 * c.hidden_size * c.intermediate_size,
        "experts_different": 0,
        "tables_elements": 2 * c.vocab_size * c.hidden_size,
        "tables_different": 0,
    }
    model.model.layers[-1].mlp.experts.shared["down_proj"][0].view(-1)[5] ^= 1
    model.lm_head.weight.data[3, 2] *= -1
    counts = rollout.compare_with_checkpoint(model, tiny)
    assert counts["experts_different"] == counts["tables_different"] == 1
    now = rollout.bit_sums(rollout.lent_tensors(model))
    assert [name for name in now if now[name] != sums[name]] == [f"{layers - 1}.down_proj.values", "lm_head.weight"]


def test_the_checks_let_a_measurement_begin(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.preflight.resolve.read_machine", lambda: H100)
    versions = installed_versions
    monkeypatch.setattr("grpo.preflight.resolve.installed_versions", lambda names: versions(names) | {"vllm": "0.26.0"})
    place = {"model": "tiny", "data": str(record.ROOT / "data/tes_train_compact.csv"), "run": tmp_path / "run"}
    with mock.patch.dict(os.environ):
        options = SimpleNamespace(**place, main=lambda arguments: train_grpo.main(["--check"]))
        assert watched.run_entry(options, {"ATTN_IMPL": "eager"}) == 0
