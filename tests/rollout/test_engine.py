# SPDX-License-Identifier: Apache-2.0
"""The rollout engine with a stub in vLLM's place (tests/stub_vllm.py)."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton
from conftest import read_csv
from engines import prompts_of, set_adapter, trainer_with_engine
from machines import H100
from stub_vllm import SYNCS, StubLLM, StubLoRARequest, StubSampling

from grpo.evaluate.models import TrainedModel
from grpo.learn.timer import UtilizationSampler
from grpo.phases import Phase
from grpo.plan.hub import DOWNLOAD_GIB, REAL_CONFIG
from grpo.plan.machine import GIB
from grpo.plan.memory import BATCHED_TOKENS, EnginePlan, Shapes, capture_sizes, plan_memory
from grpo.rollout.engine import (
    WARM_UP_TOKENS,
    Engine,
    EngineError,
    RequestBar,
    adapter_folder,
    engine_arguments,
    gpu_used_gib,
    start_engine,
)
from grpo.rollout.vllm_patches import close_process_group
from grpo.settings import Settings


@pytest.fixture
def build(tiny, tmp_path):
    return functools.partial(trainer_with_engine, tiny, tmp_path)


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


def test_a_seed_is_a_rollout(build):
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


def test_a_step_learns_from_the_engines_log_probs(build):
    """Through TRL's own loop: rollout, rewards, `training_step`; the step's mismatch and ratio are in its metrics."""
    trainer = build(TOTAL_STEPS=1)
    trainer.run.engine.llm.shift = -0.3
    trainer.train()
    (row,) = read_csv(trainer.run.folder / "metrics.csv")
    assert float(row["logp_diff_mean"]) == pytest.approx(0.3, abs=1e-3)
    assert float(row["is_ratio_mean"]) == pytest.approx(math.exp(0.3), abs=1e-2)


def test_gpu_memory_is_what_is_in_use_awake_or_learning(build, monkeypatch):
    """In GiB: 50 awake and 30 asleep in the first step, 20 and 25 in the second."""
    trainer = build(TOTAL_STEPS=2)
    assert gpu_used_gib() == 0
    used = lambda: ((30, 50), (25, 20))[min(trainer.state.global_step, 1)][not trainer.run.engine.asleep]  # noqa: E731
    for module in ("rollout.engine", "learn.timer"):
        monkeypatch.setattr(f"grpo.{module}.gpu_used_gib", used)
    trainer.train()
    assert [row["gpu_peak_gib"] for row in read_csv(trainer.run.folder / "metrics.csv")] == ["50", "25"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * GIB, 80 * GIB))
    assert gpu_used_gib() == 20


class SamplerOfTests(UtilizationSampler):
    """Reads 100 % while the engine is awake, 50 % while it sleeps, of a GPU that is not there."""

    def __init__(self, trainer):
        super().__init__(lambda: 50.0 if trainer.run.engine.asleep else 100.0)


def test_gpu_utilization_is_the_mean_over_each_step(build, monkeypatch):
    """Sampled by hand: once in the rollout, three times while it learns; what is between the steps does not count."""
    trainer = build(TOTAL_STEPS=2)
    trainer.timer.sampler = sampler = SamplerOfTests(trainer)
    generate, learn = trainer.run.engine.generate, trainer.learn
    take = lambda: sampler.samples.append(sampler.read())  # noqa: E731
    monkeypatch.setattr(trainer.run.engine, "generate", lambda *a, **k: (take(), generate(*a, **k))[1])
    monkeypatch.setattr(trainer, "learn", lambda *a: (take(), take(), take(), learn(*a))[3])
    sampler.samples.append(0.0)  # before the first step
    trainer.train()
    assert [row["gpu_utilization"] for row in read_csv(trainer.run.folder / "metrics.csv")] == ["62.5", "62.5"]


def test_the_utilization_is_sampled_in_the_background_until_training_ends(monkeypatch):
    monkeypatch.setattr("grpo.learn.timer.SAMPLE_S", 0.001)
    sampler = UtilizationSampler(itertools.cycle([40, 60]).__next__)
    sampler.start()
    while len(sampler.samples) < 10:
        time.sleep(0.001)
    assert 40 < sampler.mean() < 60
    sampler.ended.set()

    def fails():
        raise RuntimeError("Driver/library version mismatch")

    broken = UtilizationSampler(fails)
    broken.start()
    assert broken.mean() is None


def test_vllms_bar_counts_finished_requests_and_shows_nothing(capsys):
    """As vLLM's `_run_engine` fills it; the bar around the prompts that it takes in counts none."""
    with Phase("generating", "completion", 3, first_s=1000) as phase:
        assert list(RequestBar(phase, ["a", "b", "c"], desc="Rendering prompts")) == ["a", "b", "c"] and not phase.done
        bar = RequestBar(phase, total=3, desc="Processed prompts", dynamic_ncols=True, postfix="0 toks/s")
        for done in (1, 2, 3):
            assert bar.format_dict["elapsed"] > 0, "vLLM divides by it"
            bar.postfix = "9 toks/s"
            bar.update(1)
            assert phase.done == bar.n == done
        bar.refresh()
        bar.close()
    assert capsys.readouterr() == ("", "")


def test_an_evaluation_of_the_base_leaves_the_adapter_out(build, monkeypatch):
    trainer, asked = build(), []
    set_adapter(trainer, 1)
    monkeypatch.setattr(trainer.run.engine, "rollout", lambda *given: asked.append(given) or ([[2]] * 4, [[0.0]] * 4))
    for base in (True, False):
        TrainedModel(trainer).complete([row.prompt for row in trainer.run.rows], base=base)
    expected = [(prompts_of(trainer), active, trainer.run.settings.EVAL_TEMPERATURE) for active in (False, True)]
    assert [(given[1], *given[3:]) for given in asked] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_an_evaluation_has_its_own_temperature_and_no_log_probs(build, monkeypatch, temperature):
    """Log-probs at another temperature would be misread as the rollouts'; the rollouts keep theirs."""
    trainer = build(TEMPERATURE=1.5)
    engine, prompts, asked = trainer.run.engine, prompts_of(trainer), []
    whole = engine._run
    monkeypatch.setattr(engine, "_run", lambda rows, given: asked.append(given[0]) or whole(rows, given))
    ids, values = engine.rollout(trainer.model, prompts, seed=1, temperature=temperature)
    assert len(ids) == 4 and values == []
    assert engine.rollout(trainer.model, prompts, seed=1)[1]
    assert [(one.temperature, one.logprobs, one.top_p) for one in asked] == [(temperature, None, 1.0), (1.5, 0, 1.0)]
    texts = trainer.processing_class.batch_decode(ids)
    if not temperature:
        assert texts == trainer.processing_class.batch_decode(
            engine.rollout(trainer.model, prompts, 2, temperature=0.0)[0]
        )
    assert TrainedModel(trainer).generate([row.prompt for row in trainer.run.rows], 1, 0, temperature, False)
    assert asked[-1].temperature == temperature


def test_generating_needs_an_awake_engine_with_the_adapter(build):
    trainer = build()
    engine, prompts = trainer.run.engine, prompts_of(trainer)
    with pytest.raises(EngineError, match="awake"):
        engine.generate(prompts, 1)
    with pytest.raises(EngineError, match="sleeping engine"):
        engine.sync_weights(trainer.model)
    for _ in range(2):  # synced once and asleep since is not synced
        engine.wake()
        with pytest.raises(EngineError, match="synced"):
            engine.generate(prompts, 1)
        engine.sync_weights(trainer.model)
        engine.sleep()
    assert "generate" not in engine.llm.calls


def test_a_missing_log_prob_is_none_for_trl(build):
    trainer = build()
    trainer.run.engine.llm.shift = math.nan
    ids, values = trainer.run.engine.rollout(trainer.model, prompts_of(trainer), seed=1)
    assert values == [[None] * len(row) for row in ids]


def test_torch_gives_its_free_blocks_back_before_the_engine_wakes(build, monkeypatch):
    """vLLM maps memory past torch's allocator, and nothing is tried a second time."""
    engine = build().run.engine
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: engine.llm.calls.append("empty_cache"))
    engine.wake()
    assert engine.llm.calls == ["empty_cache", "wake_up"]


@pytest.mark.parametrize(
    ("sync", "call", "error", "words"),
    [
        ("merge", "wake_up", torch.OutOfMemoryError("CUDA out of memory"), ["waking", "OutOfMemoryError", "MICRO_BATCH"]),
        ("merge", "generate", RuntimeError("an illegal memory access\nlong trace"),
         ["generating failed (RuntimeError: an illegal memory access). ", "it continues"]),
        ("merge", "sleep", MemoryError(), ["Host memory"]),
        ("merge", "apply_model", KeyError("attn"), ["weight sync", "ROLLOUT_SYNC"]),
        ("lora", "add_lora", ValueError("rank"), ["weight sync", "ROLLOUT_SYNC"]),
    ],
)  # fmt: skip
def test_faults_name_what_failed_and_what_helps(build, sync, call, error, words):
    trainer = build(ROLLOUT_SYNC=sync)
    trainer.run.engine.llm.fail[call] = (1, error)
    with pytest.raises(EngineError) as caught:
        trainer.run.engine.rollout(trainer.model, prompts_of(trainer), seed=1)
    assert caught.value.__cause__ is error and all(word in str(caught.value) for word in words)


def test_answers_that_do_not_match_the_requests_are_errors(build, monkeypatch):
    trainer = build()
    engine, prompts = trainer.run.engine, prompts_of(trainer)
    engine.wake()
    engine.sync_weights(trainer.model)
    whole = engine.llm.generate
    monkeypatch.setattr(engine.llm, "generate", lambda *a, **k: whole(*a, **k)[1:])
    with pytest.raises(EngineError, match="3 of 4"):
        engine.generate(prompts, 1)
    monkeypatch.setattr(engine.llm, "generate", whole)
    monkeypatch.setattr(engine.llm, "_logprobs", lambda values: SimpleNamespace(logprobs=values[1:]))
    with pytest.raises(EngineError, match="number of log-probs"):
        engine.generate(prompts, 1)


def test_engine_arguments():
    def arguments(**changes):
        shapes = Shapes(REAL_CONFIG, H100, 930, "eager", checkpoint=DOWNLOAD_GIB)
        plan = plan_memory(Settings(**changes), shapes).engine
        return plan, engine_arguments(Settings(**changes), plan, "/model", 79.6)

    engine, merge = arguments(SEED=7)
    expected = {"model": "/model", "dtype": "bfloat16", "seed": 7, "enable_sleep_mode": True, "max_model_len": 5120,
                "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "skip_tokenizer_init": True,
                "kv_cache_memory_bytes": int(engine.cache * GIB), "max_num_seqs": 96, "enforce_eager": False}  # fmt: skip
    assert merge.items() >= expected.items() and "quantization" not in merge, "MXFP4 as the checkpoint says"
    assert merge["gpu_memory_utilization"] == pytest.approx(engine.awake / 79.6)
    captures = {"cudagraph_capture_sizes": list(capture_sizes(96)), "cudagraph_specialize_lora": False}
    assert merge["compilation_config"] == captures | {"cudagraph_mode": "FULL_DECODE_ONLY"}
    lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "lora_target_modules": ["qkv_proj", "o_proj"]}
    for r, rank in {1: 1, 2: 8, 8: 8, 9: 16, 16: 16, 200: 256}.items():
        _, native = arguments(ROLLOUT_SYNC="lora", LORA_R=r)
        assert {k: v for k, v in native.items() if k not in merge} == lora | {"max_lora_rank": rank}
    plan, both = arguments(ROLLOUT_SYNC="lora", LORA_TARGETS="all-linear,7.experts")
    assert both["lora_target_modules"] == ["qkv_proj", "o_proj", "experts"]
    # Of rank 8, in BF16, on the experts of all 24 layers.
    assert (plan.weights - engine.weights) * GIB == pytest.approx(2 * 8 * 24 * 32 * (2880 + 5760 + 2 * 2880))
    assert arguments(ROLLOUT_SYNC="lora")[0].weights == engine.weights
    _, eager = arguments(VLLM_EAGER=True)
    assert eager["enforce_eager"] is True and "compilation_config" not in eager


@pytest.mark.parametrize(("free", "there"), [(4 * 100 + 1, True), (4 * 100, False)])
def test_an_adapter_that_has_no_room_in_memory_goes_to_the_disk(tmp_path, monkeypatch, free, there):
    """A container's /dev/shm holds 64 MiB, and an adapter on all experts 88 MB."""
    policy, memory = torch.nn.Linear(10, 10), tmp_path / "shm"
    policy.bias.requires_grad = False
    memory.mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    folder = adapter_folder(policy, memory)
    assert folder.parent == (memory if there else tmp_path) and folder.stat().st_mode & 0o077 == 0
    assert adapter_folder(policy, tmp_path / "none").parent == tmp_path


class Pages:
    """In place of PagedWeights: tells what is asked of it."""

    nbytes = 0

    def __init__(self, told):
        self.leave, self.enter = lambda: told.append("leave"), lambda: told.append("enter")


def test_the_learners_weights_make_room_for_an_awake_engine(monkeypatch):
    told = []
    llm = SimpleNamespace(wake_up=lambda: told.append("wakes"), sleep=lambda level: told.append("sleeps"))
    engine = Engine(llm, StubSampling, StubLoRARequest, Settings(), [])
    engine.pages = Pages(told)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("gives blocks back"))
    for _ in range(2):  # the second time there is nothing to do
        engine.sleep()
    for _ in range(2):
        engine.wake()
    assert told == ["sleeps", "enter", "leave", "gives blocks back", "wakes"]


@pytest.mark.parametrize("own", [None, "/somewhere/else"])
def test_triton_keeps_its_cache_where_the_next_start_looks(monkeypatch, own, tiny):
    """torch would move it while vLLM starts; the trainer's own variables come back as they were."""
    seen = {}

    class LLM(StubLLM):
        def __init__(self, model, **arguments):
            seen.update(os.environ)
            told.append("vLLM starts")
            os.environ["TRITON_CACHE_DIR"] = "/moved"
            super().__init__(model, max_model_len=arguments["max_model_len"])

    vllm, request = ModuleType("vllm"), ModuleType("vllm.lora.request")
    vllm.LLM, vllm.SamplingParams, request.LoRARequest = LLM, StubSampling, StubLoRARequest
    for name, module in {"vllm": vllm, "vllm.lora": ModuleType("vllm.lora"), "vllm.lora.request": request}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("patch_kernels", "keep_weights_asleep", "Engine.warm_up"):
        monkeypatch.setattr(f"grpo.rollout.engine.{name}", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if own:
        monkeypatch.setenv("TRITON_CACHE_DIR", own)
    at_exit, told = [], []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr(
        Engine, "lend_weights", lambda engine, policy, whole: told.append((policy, engine.asleep, whole))
    )
    monkeypatch.setattr("grpo.rollout.engine.PagedWeights", lambda policy: Pages(told))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("gives blocks back") if not own else None)
    settings = Settings(EXPERTS="shared" if own else "paged")
    engine = start_engine(settings, EnginePlan(1, 1, 1, "", 1, 1, 2048, 8, (1, 8)), str(tiny), [], "policy")
    assert engine.asleep and close_process_group in at_exit
    before = ["vLLM starts", ("policy", False, False)] if own else ["leave", "gives blocks back", "vLLM starts"]
    assert told[: len(before)] == before and ("enter" in told) is (not own), "before it first sleeps"
    assert seen["TRITON_CACHE_DIR"] == (own or triton.knobs.cache.dir)
    assert os.environ.get("TRITON_CACHE_DIR") == own


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
    Engine(LLM(), StubSampling, StubLoRARequest, Settings(ROLLOUT_SYNC="lora"), []).warm_up(max_model_len)
    assert len(calls) == len(WARM_UP_TOKENS), "a native adapter has other kernels"
