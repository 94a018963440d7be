# SPDX-License-Identifier: Apache-2.0
"""The rollout engine with a stub in vLLM's place (tests/stub_vllm.py)."""

import gc
import math
import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
import triton
from engines import prompts_of, rollout, set_adapter
from helpers import read_csv
from machines import H100

from grpo.evaluate.models import trained_model
from grpo.plan.engine_memory import EnginePlan, capture_sizes
from grpo.plan.hub import REAL_CONFIG, TINY_PATH
from grpo.plan.machine import GIB
from grpo.plan.memory import PlanInputs, plan_memory
from grpo.rollout.engine import EngineError, chosen_backends, engine_arguments, gpu_used_gib, start_engine
from grpo.rollout.vllm_patches import close_process_group, vllm_environment
from grpo.settings.table import Settings

# What `chosen_backends` reads of vLLM's GptOssForCausalLM.
ATTENTION = SimpleNamespace(
    attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"), impl=SimpleNamespace(vllm_flash_attn_version=3)
)
QUANTIZATION = SimpleNamespace(mxfp4_backend=SimpleNamespace(value="TRITON"))
LAYER = SimpleNamespace(
    attn=SimpleNamespace(attn=ATTENTION),
    mlp=SimpleNamespace(experts=SimpleNamespace(routed_experts=SimpleNamespace(quant_method=QUANTIZATION))),
)
VLLM_MODEL = SimpleNamespace(get_submodule={"model.layers.0": LAYER}.__getitem__)


def test_backends_that_moved_are_unknown():
    assert chosen_backends(VLLM_MODEL)["experts"] == "TRITON"
    assert chosen_backends(SimpleNamespace(get_submodule=lambda name: SimpleNamespace())) == {}


def test_a_seed_is_a_rollout(build):
    trainer = build(TEMPERATURE=2.0)
    engine, prompts = trainer.run.engine, prompts_of(trainer)
    first = rollout(engine, trainer.model, prompts, seed=7)
    torch.rand(5)
    assert engine.llm.asleep and rollout(engine, trainer.model, prompts, seed=7) == first
    assert rollout(engine, trainer.model, prompts, seed=8)[0] != first[0]
    turns = []
    for trainer.state.global_step in (3, 3, 4):
        turns.append(trainer.sample(prompts))
    assert turns[0] == turns[1] != turns[2], "the step is the seed"
    assert all(len(sample.logps) == len(sample.ids) for sample in turns[0])


def test_the_metrics_of_steps_beside_the_engine(build, monkeypatch):
    """Through TRL's own loop. GPU memory is the most that is in use, awake or learning: 50 GiB awake and 30 asleep in
    the first step, 20 and 25 in the second."""
    assert gpu_used_gib() == 0, "without a GPU"
    trainer = build(TOTAL_STEPS=2)
    engine = trainer.run.engine
    engine.llm.shift = -0.3
    used = lambda: ((30, 50), (25, 20))[min(trainer.state.global_step, 1)][not engine.llm.asleep]  # noqa: E731
    for module in ("rollout.sampler", "learn.timer"):
        monkeypatch.setattr(f"grpo.{module}.gpu_used_gib", used)
    trainer.train()
    rows = read_csv(trainer.run.folder / "metrics.csv")
    assert float(rows[0]["logp_diff_mean"]) == pytest.approx(0.3, abs=1e-3)
    assert float(rows[0]["is_ratio_mean"]) == pytest.approx(math.exp(0.3), abs=1e-2)
    assert [row["gpu_peak_gib"] for row in rows] == ["50", "25"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * GIB, 80 * GIB))
    assert gpu_used_gib() == 20


def test_an_evaluation_has_its_own_temperature_and_no_log_probs(build, monkeypatch):
    """Log-probs at another temperature would be misread as the rollouts'; the rollouts keep theirs. An evaluation of
    the base leaves the adapter out."""
    trainer = build(TEMPERATURE=1.5, EVAL_TEMPERATURE=0.3)
    set_adapter(trainer, 1)
    engine, prompts, requests, active = trainer.run.engine, prompts_of(trainer), [], []
    run, sync = engine._run, engine.sync_weights
    monkeypatch.setattr(engine, "_run", lambda rows, sampling: requests.append(sampling) or run(rows, sampling))
    ids, values = rollout(engine, trainer.model, prompts, seed=1, temperature=0.0)
    assert values == [None] * 4 and ids == rollout(engine, trainer.model, prompts, 2, temperature=0.0)[0], "greedy"
    assert rollout(engine, trainer.model, prompts, seed=1)[1]
    monkeypatch.setattr(engine, "sync_weights", lambda policy, on, seed: active.append(on) or sync(policy, on, seed))
    for base in (True, False):
        assert trained_model(trainer).complete([row.prompt for row in trainer.run.rows], base=base)
    assert active == [False, True]
    asked = [(sampling.temperature, sampling.logprobs) for sampling in requests]
    assert asked == [(0.0, None), (0.0, None), (1.5, 0), (0.3, None), (0.3, None)]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ("wake_up", torch.OutOfMemoryError("full"), "waking the engine failed (OutOfMemoryError: full). The GPU is"),
        ("apply_model", KeyError("attn"), "the weight sync failed (KeyError: 'attn'). Try the other ROLLOUT_SYNC"),
        ("generate", RuntimeError("bad access\nlong trace"), "generating failed (RuntimeError: bad access). Run the"),
        ("sleep", MemoryError(), "putting the engine to sleep failed (MemoryError: ). Host memory may be short"),
    ],
)
def test_faults_name_what_failed_and_what_helps(build, call, error, words):
    trainer = build(EXPERTS="bf16")
    trainer.run.engine.llm.fail[call] = (1, error)
    with pytest.raises(EngineError) as caught:
        rollout(trainer.run.engine, trainer.model, prompts_of(trainer), seed=1)
    assert caught.value.__cause__ is error and words in str(caught.value)
    assert gc.isenabled(), "it pauses while vLLM generates"
    assert ("or set EXPERTS=mxfp4" in str(caught.value)) == (call == "wake_up")


def test_log_probs_and_answers_that_are_missing(build, monkeypatch):
    """TRL takes None for a log-prob; another number of them, or of answers, is an error."""
    trainer = build()
    engine, prompts = trainer.run.engine, prompts_of(trainer)
    engine.llm.shift = math.nan
    ids, values = rollout(engine, trainer.model, prompts, seed=1)
    assert values == [[None] * len(row) for row in ids]
    engine.wake()
    engine.sync_weights(trainer.model)
    generate = engine.llm.generate
    monkeypatch.setattr(engine.llm, "_logprobs", lambda values: SimpleNamespace(logprobs=values[1:]))
    with pytest.raises(EngineError, match="number of log-probs"):
        engine.generate(prompts, 1, 4, 1.0, None)
    monkeypatch.setattr(engine.llm, "generate", lambda *a, **k: generate(*a, **k)[1:])
    with pytest.raises(EngineError, match="3 of 4"):
        engine.generate(prompts, 1, 4, 1.0, None)


def test_engine_arguments(monkeypatch):
    def arguments(**changes):
        plan = plan_memory(Settings(**changes), PlanInputs(REAL_CONFIG, H100, 930, "eager", beside_vllm=True)).engine
        return plan, engine_arguments(Settings(**changes), plan, "/model", 79.6)

    engine, merge = arguments()
    assert merge["logprobs_mode"] == "processed_logprobs" and "quantization" not in merge, "MXFP4 as it is stored"
    assert merge["hf_overrides"] == {"head_dtype": "float32"}
    pinned = {sync: engine_arguments(Settings(ROLLOUT_SYNC=sync), engine, "/", 80, True) for sync in ("merge", "lora")}
    assert pinned["merge"]["moe_backend"] == "triton" and not {"moe_backend"} & {*merge, *pinned["lora"]}
    assert merge["gpu_memory_utilization"] == pytest.approx(engine.awake / 79.6)
    assert merge["compilation_config"]["cudagraph_capture_sizes"] == list(capture_sizes(96))
    assert merge["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    turns = arguments(ENVIRONMENT="grpo.tasks.tes_day:Day")[1]["compilation_config"]
    assert turns["cudagraph_mode"] == "FULL_AND_PIECEWISE" and turns["cudagraph_capture_sizes"] == list(
        capture_sizes(1024)
    ), "steps that turns join have more tokens than sequences"
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # vLLM would make no graphs at all.
    plain = arguments(ENVIRONMENT="grpo.tasks.tes_day:Day")[1]["compilation_config"]
    assert plain["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert "compilation_config" not in arguments(VLLM_EAGER=True)[1] and "speculative_config" not in merge
    for r, rank in {1: 1, 2: 8, 8: 8, 9: 16, 200: 256}.items():
        native, lora = arguments(ROLLOUT_SYNC="lora", LORA_R=r)
        assert lora["max_lora_rank"] == rank and lora["lora_target_modules"] == ["qkv_proj", "o_proj"]
    plan, lora = arguments(ROLLOUT_SYNC="lora", LORA_TARGETS="all-linear,7.experts")
    assert lora["lora_target_modules"] == ["qkv_proj", "o_proj", "experts"]
    # Of rank 8, in BF16, on the experts of all 24 layers.
    assert native.weights == engine.weights
    assert (plan.weights - engine.weights) * GIB == pytest.approx(2 * 8 * 24 * 32 * (2880 + 5760 + 2 * 2880))


@pytest.mark.parametrize(
    ("experts", "cache", "lent", "pointers"),
    [("paged", None, 0, None), ("shared", "/somewhere/else", 0, ["policy", "vllm"]), ("shared", None, 1, None)],
)
def test_paged_weights_leave_and_shared_ones_are_lent_while_vllm_is_awake(monkeypatch, experts, cache, lent, pointers):
    """From its start on: what the learner reads, or all of vLLM's weights (None) where there is room for them. torch
    gives its free blocks back before: vLLM maps memory past torch's allocator. Triton keeps its cache where the next
    start looks, and the trainer's own variables come back as they were."""
    environment, at_exit, calls = {}, [], []
    log = lambda name: lambda *_, **__: calls.append(name)  # noqa: E731

    def start_llm(model, **arguments):
        environment.update(os.environ)
        calls.append("vLLM starts")
        os.environ["TRITON_CACHE_DIR"] = "/moved"  # as torch does
        assert arguments["moe_backend"] == "triton", "Hopper and MXFP4"
        apply_model = lambda function: [function(VLLM_MODEL)]  # noqa: E731
        return SimpleNamespace(sleep=log("sleeps"), wake_up=log("wakes"), apply_model=apply_model)

    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, MagicMock(LLM=start_llm))
    for name in ("patch_kernels", "keep_weights_asleep"):
        monkeypatch.setattr(f"grpo.rollout.engine.{name}", lambda *arguments: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30, major=9)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", log("gives blocks back"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if cache:
        monkeypatch.setenv("TRITON_CACHE_DIR", cache)
    monkeypatch.setattr("atexit.register", at_exit.append)
    backend = SimpleNamespace(lend=lambda pointers: calls.append(("lends", pointers)))  # The real one imports vLLM.
    monkeypatch.setitem(sys.modules, "grpo.rollout.sleep_backend", backend)
    monkeypatch.setattr("grpo.rollout.engine.share_weights", lambda policy, model: [policy, "vllm"])
    pages = SimpleNamespace(nbytes=0, offload=log("offload"), reload=log("reload"))
    monkeypatch.setattr("grpo.rollout.engine.PagedWeights", lambda policy: pages)
    plan = EnginePlan(1, 1, 1, 1, "", 1, 1, 2048, 8, (1, 8), lent)
    engine = start_engine(Settings(EXPERTS=experts), plan, str(TINY_PATH), [], "policy")
    assert engine.backends == {"experts": "TRITON", "attention": "FLASH_ATTN 3"}
    assert close_process_group in at_exit
    assert environment["TRITON_CACHE_DIR"] == (cache or triton.knobs.cache.dir)
    assert os.environ.get("TRITON_CACHE_DIR") == cache
    engine.wake()
    start, wake = ["gives blocks back", "vLLM starts"], ["gives blocks back", "wakes"]
    expected = {
        "paged": ["offload", *start, "sleeps", "reload", "offload", *wake],
        "shared": [*start, ("lends", pointers), "sleeps", *wake],
    }
    assert calls == expected[experts]


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256, expandable_segments: True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        {},
    ],
)
def test_vllm_learns_of_expandable_segments_as_torch_reads_them(variables):
    """It reads one of torch's two variables, and its memory that sleeps must hold none."""
    others = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    text = next(iter(variables.values()), "").replace(" ", "")
    with patch.dict(os.environ, others | variables, clear=True), vllm_environment():
        assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") == text
