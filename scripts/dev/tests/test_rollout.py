# SPDX-License-Identifier: Apache-2.0
"""`bench.py rollout`: what a child measures of a run of the entry point, with a stub in vLLM's place."""

import os
import sys
from types import SimpleNamespace
from unittest import mock

import bench
import pytest
import torch
from expert_models import load
from stub_vllm import pretend_vllm, stub_engine

import train_grpo
from grpo.learn import timer
from grpo.learn.trainer import Trainer
from grpo.model.attention import unwrap_peft
from grpo.model.load import VOCAB_WEIGHTS
from grpo.plan.machine import Machine
from grpo.rollout import engine as rollout_engine
from scripts.dev import record, rollout

WORDS = f"""--model tiny --data {record.ROOT}/data/tes_heldout_compact.csv --child --set PROMPTS_PER_STEP=2
    --set MAX_COMPLETION_LEN=12 --set ATTN_IMPL=eager --set LEARNING_RATE=1e-2"""


@pytest.fixture
def child(tmp_path, monkeypatch, quiet):
    """Runs a child of `bench.py` on the tiny model; returns its exit code and the values that it has written. A GPU is
    pretended: 11 of its 16 GiB were free before, and at most 14 were in use; it is there after the run."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    for name, size in {"synchronize": None, "empty_cache": None, "mem_get_info": (2 * 2**30, 2**34)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda size=size: size)
    monkeypatch.setattr(rollout, "read_machine", lambda: Machine(gpu_free=11.0))
    monkeypatch.setattr(timer, "gpu_used_gib", lambda: 14.0)
    pretend_vllm(monkeypatch, stub_engine)

    def main(arguments):
        code = train_grpo.main(arguments)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        return code

    def run(*words):
        paths = ["--run", f"{tmp_path}/run", "--out", f"{tmp_path}/out"]
        monkeypatch.setattr(sys, "argv", ["bench.py", "rollout", *WORDS.split(), *paths, *words])
        options = bench.parse_args()
        options.main = main
        with mock.patch.dict(os.environ):
            code = rollout.bench_rollout(options)
        return code, record.read_json(rollout.child_path(options))

    run.folder = tmp_path / "run"
    return run


def test_a_child_measures_a_run_and_what_vllm_lends(child, monkeypatch):
    weight = torch.ones(4, 6, dtype=torch.bfloat16)
    monkeypatch.setattr(rollout, "lent_tensors", lambda policy: {"a": weight, "b": weight + 1})
    before = rollout_engine.Engine.generate, Trainer.learn, Trainer.sample
    code, values = child()
    assert code == 0 and (rollout_engine.Engine.generate, Trainer.learn, Trainer.sample) == before, (
        "nothing stays watched"
    )
    steps = record.steps_of(child.folder)
    assert len(steps) == 3 and values["step_s"] == pytest.approx(steps.step_s[1:].mean())
    assert steps.tokens_mean.eq(12).all(), "every completion is full"
    assert values["job_peak_gib"] == 9 and values["plan_error"] > -1 and values["startup_s"] > 0
    assert 0 < values["parity_mean"] <= values["parity_max"] and values["parity_control_mean"] > values["parity_mean"]
    assert values["sync_share"] == pytest.approx(1, abs=0.02) and values["generate_tok_s"] > values["rollout_tok_s"]
    assert values["lent_tensors"] == 2 and not values["lent_changed"] and not values["base_changed"]
    assert values["asleep_gib"] == 0 and "paged_gib" not in values and "rows" not in values
    figures = rollout.run_figures(SimpleNamespace(set=[("SEED", 1)], free_gib=None), values)
    named = {row["name"]: row["note"] for row in figures}
    assert {"handover_s", "wake_s", "lent_changed", "startup_s"} <= named.keys()
    assert named["step_s"].startswith("2 x 8 completions, 12 tokens each, EXPERTS=bf16, SEED=1: mean")


def test_fewer_tokens_than_memory_is_planned_for(child):
    assert child("--set", "TOTAL_STEPS=1", "--tokens", "5")[0] == 0
    assert record.steps_of(child.folder).tokens_mean.eq(5).all()


@pytest.mark.parametrize("name", ["lent_changed", "base_changed"])
def test_a_weight_that_is_written_fails(child, monkeypatch, name):
    """Here after a step has learned."""
    weight, learn = torch.ones(4, 6, dtype=torch.bfloat16), Trainer.learn
    monkeypatch.setattr(rollout, "lent_tensors", lambda policy: {"lent": weight})

    def write(trainer, *arguments):
        loss = learn(trainer, *arguments)
        norm = unwrap_peft(trainer.model).model.layers[0].input_layernorm.weight
        changed = weight if name == "lent_changed" else norm.data
        changed.view(-1)[3] = torch.nextafter(changed.view(-1)[3], torch.tensor(9.0, dtype=changed.dtype))
        return loss

    monkeypatch.setattr(Trainer, "learn", write)
    code, values = child("--set", "TOTAL_STEPS=1")
    assert code == 1 and [key for key in ("lent_changed", "base_changed") if values[key]] == [name]


def test_direct_answers_are_measured_by_rows_a_minute(child):
    """Without vLLM, and with figures of nothing that is generated."""
    code, values = child("--set", "DIRECT_ANSWERS=1")
    assert code == 0 and values["rows_per_minute"] == pytest.approx(120 / values["step_s"])
    assert values["job_peak_gib"] == 9 and not values["base_changed"]
    assert not values.keys() & {"rows", "rollout_tok_s", "generate_tok_s", "parity_mean", "asleep_gib"}
    figures = rollout.run_figures(SimpleNamespace(set=[], free_gib=None), values)
    notes = {row["name"]: row["note"] for row in figures}
    assert notes["step_s"].startswith("DIRECT_ANSWERS, 2 prompts, EXPERTS=mxfp4")
    assert "the pass that chooses" in notes["rollout_s"]


def test_a_run_that_fails_fails(child):
    assert child("--data", "missing.csv") == (2, {})


def test_what_vllm_lends_is_summed_bit_by_bit(tiny):
    packed, model = load(tiny, "mxfp4"), load(tiny, "shared")
    assert not rollout.lent_tensors(model), "none yet"
    for ours, theirs in zip(model.model.layers, packed.model.layers, strict=True):
        tensors = {name: getattr(theirs.mlp.experts, name).clone() for name in dict(theirs.mlp.experts.named_buffers())}
        names = ("gate_up_proj", "down_proj")
        ours.mlp.experts.shared = {name: (tensors[f"{name}_blocks"], tensors[f"{name}_scales"], 0, 0) for name in names}
    for name in VOCAB_WEIGHTS:
        model.get_parameter(name).data = packed.get_parameter(name).clone()
    sums, layers = rollout.bit_sums(rollout.lent_tensors(model)), len(model.model.layers)
    assert len(sums) == 4 * layers + 2 and set(VOCAB_WEIGHTS) < set(sums)
    model.model.layers[-1].mlp.experts.shared["down_proj"][0].view(-1)[5] ^= 1
    model.lm_head.weight.data[3, 2] *= -1
    after = rollout.bit_sums(rollout.lent_tensors(model))
    assert [name for name in after if after[name] != sums[name]] == [f"{layers - 1}.down_proj.values", "lm_head.weight"]


def test_episodes_are_measured(child):
    """Their turns are generated one by one, so there is no speed of generating alone."""
    words = f"--data {record.ROOT}/data/tes_day_train.jsonl", "TASK=tes_day", f"REWARDS={record.NOISE}"
    smallest = "TOTAL_STEPS=1", "PROMPTS_PER_STEP=1", "NUM_GENERATIONS=2", "MAX_COMPLETION_LEN=400"
    code, values = child(*" --set ".join((*words, *smallest)).split())
    assert code == 0 and values["rollout_tok_s"] > 0 and "generate_tok_s" not in values
