# SPDX-License-Identifier: Apache-2.0
"""The memory plan: sizes, batches that follow, and advice where a run does not fit."""

import dataclasses
import json
import math
import re

import pytest
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU, H100, LARGE_CONFIG, plan_inputs

from grpo.plan import memory
from grpo.plan.advice import memory_advice
from grpo.plan.engine_memory import capture_sizes, describe_cache
from grpo.plan.hub import REAL_CONFIG, checkpoint_gib
from grpo.plan.machine import GIB
from grpo.preflight.choices import choose_generation_batch, choose_micro_batch
from grpo.settings.parsing import MAY_CHANGE, parse_value
from grpo.settings.table import Settings

BF16_CONFIG = REAL_CONFIG | {"quantization_config": None}
FLASH = {"attention": "torch_flash", "packing": "prefix"}
BESIDE_VLLM = FLASH | {"beside_vllm": True}


def gpu(free, **facts):
    """An H100 with so many free GiB."""
    return dataclasses.replace(H100, gpu_free=free, **facts)


def plan(machine=H100, config=REAL_CONFIG, prompt_len=940, attention="eager", packing="none", beside_vllm=False, **s):
    """The plan of a run with settings `s`."""
    inputs = memory.PlanInputs(config, machine, prompt_len, attention, packing, beside_vllm)
    return memory.plan_memory(Settings(**s), inputs)


def reasons(machine, **s):
    """(that of MICRO_BATCH, that of GENERATION_BATCH) of a run with settings `s` without vLLM."""
    inputs = memory.PlanInputs(REAL_CONFIG, machine, 940, "eager")
    chosen = memory.plan_memory(Settings(**s), inputs)
    return [choose(Settings(**s), inputs, chosen).reason for choose in (choose_micro_batch, choose_generation_batch)]


def test_a_process_needs_2_gib_beside_what_its_engine_keeps_in_host_memory():
    """For each of the processes of a machine."""
    beside = plan(beside_vllm=True)
    assert beside.on_host > 10
    for processes in (1, 2):
        needed = processes * (beside.on_host + 2)
        machine = dataclasses.replace(H100, ram_free=needed + 0.01, here=processes)
        assert not memory.host_shortfall(beside, machine)
        short = memory.host_shortfall(beside, dataclasses.replace(machine, ram_free=needed - 0.01))
        assert short.endswith(f"{needed - 0.01:.1f} GiB are free")


def test_the_cache_counts_layers_and_window_as_vllm_does():
    """Without `layer_types` the even layers have the window, the last of an odd number too; 0 or null is no window."""
    three = REAL_CONFIG | {"num_hidden_layers": 3}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    listed = plan(config=three | {"layer_types": kinds}, **BESIDE_VLLM).engine
    assert plan(config=three, **BESIDE_VLLM).engine == listed
    endless = plan(config=REAL_CONFIG | {"sliding_window": 10**6}, **BESIDE_VLLM).engine
    for window in (0, None):
        assert plan(config=REAL_CONFIG | {"sliding_window": window}, **BESIDE_VLLM).engine == endless


LONG_LAYERS = [  # Free GiB, EXPERTS, tokens of a completion; tokens of a layer's chunk, GiB of its inputs on the host.
    (22.0, "shared", 4000, 0, 0),
    (22.0, "shared", 8192, memory.LAYER_CHUNK, 0),
    (22.0, "shared", 32_768, memory.LAYER_CHUNK, 6),
    (22.0, "paged", 32_768, memory.LAYER_CHUNK, 6),
    (46.0, "paged", 65_536, memory.LAYER_CHUNK, 0),
    (78.6, "shared", 130_000, 0, 0),
]


@pytest.mark.parametrize(("free", "kind", "length", "chunk", "on_host"), LONG_LAYERS)
def test_layers_run_in_chunks_only_where_one_completion_does_not_fit_otherwise(free, kind, length, chunk, on_host):
    """And their inputs wait on the host only where that is not enough."""
    job = BESIDE_VLLM | {"EXPERTS": kind, "ROLLOUT_SYNC": "merge", "MAX_COMPLETION_LEN": length}
    machine = gpu(free, capability=9.0)
    chosen = plan(machine, **job)
    assert not memory.memory_shortfall(chosen, machine)
    assert (chosen.layer_chunk, chosen.checkpoints) == (chunk, on_host)
    if chunk:
        assert memory.memory_shortfall(plan(machine, **job, LORA_DROPOUT=0.1), machine), "dropout would differ"
        assert memory.memory_shortfall(plan(machine, **job, MICRO_BATCH=2), machine), "MICRO_BATCH=1 is faster"
        assert memory.memory_shortfall(plan(machine, **job, GRADIENT_CHECKPOINTING=False), machine)
    if on_host:
        alone = plan(gpu(18.0), **job | {"EXPERTS": "mxfp4", "beside_vllm": False})
        assert memory.host_shortfall(alone, dataclasses.replace(machine, ram_free=7.0)).startswith("the learner with")
        needed = chosen.on_host + chosen.checkpoints + 2
        assert not memory.host_shortfall(chosen, dataclasses.replace(machine, ram_free=needed + 0.01))
        short = memory.host_shortfall(chosen, dataclasses.replace(machine, ram_free=needed - 0.01))
        assert f"with the {on_host:.1f} GiB that each layer's backward pass starts from needs {needed:.1f}" in short


def test_the_least_memory_is_what_the_documentation_says():
    """docs/memory.md, to a tenth of a GiB."""
    text = " ".join((ROOT / "docs/memory.md").read_text(encoding="utf-8").split())
    figures = re.search(
        r"needs ([\d.]+) GiB of free memory with `shared` and ([\d.]+) with `paged`, completions of 512 tokens "
        r"([\d.]+) and ([\d.]+), and without vLLM, with `mxfp4`, ([\d.]+) and (\d+\.\d)\. ",
        text,
    ).groups()
    jobs = [("shared", 4000), ("paged", 4000), ("shared", 512), ("paged", 512), ("mxfp4", 4000), ("mxfp4", 512)]
    for (kind, length), least in zip(jobs, map(float, figures), strict=True):
        job = {"EXPERTS": kind, "MAX_COMPLETION_LEN": length, "ROLLOUT_SYNC": "merge", "USE_VLLM": kind != "mxfp4"}
        for free, fits in ((least, True), (least - 0.2, False)):
            chosen = plan(gpu(free), **BESIDE_VLLM, **job)
            assert bool(memory.memory_shortfall(chosen, gpu(free))) is not fits, (kind, length, free)


def test_the_plan_names_the_weights_that_are_away_while_vllm_is_awake():
    paged = plan(beside_vllm=True, EXPERTS="paged")
    assert f"weights {paged.weights:.2f} (awake without {paged.paged:.2f}) + " in paged.parts


def test_a_layer_is_dequantized_only_while_the_learner_computes():
    """While vLLM is awake, packed experts take 4.25 bits for each 16 of BF16's, and no layer is dequantized."""
    packed, wide = (plan(beside_vllm=True, EXPERTS=kind, MICRO_BATCH=1) for kind in ("mxfp4", "bf16"))
    layer = 32 * 3 * 2880**2 * 2 / GIB
    assert wide.rollout_peak - packed.rollout_peak == pytest.approx(24 * layer * (1 - 4.25 / 16))
    assert packed.learning - wide.learning == pytest.approx(layer)


def test_a_checkpoint_in_bf16_is_loaded_as_it_is():
    engine = plan(config=BF16_CONFIG, beside_vllm=True).engine
    assert engine.loading == 0.5 and engine.weights * GIB == 2 * 20_914_757_184


def test_gpt_oss_120b_takes_what_the_documentation_says():
    """docs/maintainers/learner.md, row by row."""
    text = (ROOT / "docs/maintainers/learner.md").read_text(encoding="utf-8")
    pattern = r"\| ([\d.]+) \(H.*?\) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| micro-batches of (\d+)(.*) \|"
    rows = re.findall(pattern, text)
    assert len(rows) == 4
    for free, completion, *peaks, micro, rest in rows:
        job = {"EXPERTS": "shared", "ROLLOUT_SYNC": "merge", "MAX_COMPLETION_LEN": int(completion.replace(",", ""))}
        chosen = plan(gpu(float(free), capability=9.0), LARGE_CONFIG, **BESIDE_VLLM, **job)
        planned = chosen.start_peak, chosen.rollout_peak, chosen.learning_peak
        assert [f"{peak:.1f}" for peak in planned] == peaks and str(chosen.micro_batch) == micro
        assert ("parts" in rest) is (chosen.expert_parts > 1)
    assert f"{chosen.on_host:.1f} GiB of host memory at most, {checkpoint_gib(LARGE_CONFIG):.0f} of disk" in text
    assert f"more than its weights, {chosen.engine.weights:.1f} GiB" in text


@pytest.mark.parametrize(("free", "micro", "parts"), [(80.4, 16, 4), (85.0, 16, 1)])
def test_experts_are_dequantized_in_parts_where_micro_batches_gain(free, micro, parts):
    """With whole layers 80.4 GiB have room for micro-batches of 4 alone: 24 times a step all layers are dequantized."""
    job = {"EXPERTS": "shared", "ROLLOUT_SYNC": "merge", "MAX_COMPLETION_LEN": 512}
    chosen = plan(gpu(free, capability=9.0), LARGE_CONFIG, **BESIDE_VLLM, **job)
    assert (chosen.micro_batch, chosen.expert_parts) == (micro, parts)


WHOLE_H200 = 139.8
KEPT = {"EXPERTS": "shared", "GRADIENT_CHECKPOINTING": False}
FEW = {"EXPERTS": "shared", "PROMPTS_PER_STEP": 1, "NUM_GENERATIONS": 4}
# The constants of the plan were chosen with these rows in view, so their agreement is no independent proof.
RECORDED = [  # Result, figure, GiB that were free, settings, prompts of 930 tokens; how far off the plan may be.
    ("shared-h200", "shared_job_peak_gib", WHOLE_H200, {"EXPERTS": "shared"}, 0.05),
    ("shared-h200", "bf16_job_peak_gib", WHOLE_H200, {"EXPERTS": "bf16"}, 0.05),
    ("shared-kept-h200", "shared_kept_job_peak_gib", WHOLE_H200, KEPT | {"MICRO_BATCH": 24}, 0.05),
    ("shared-kept-h200", "paged_22_job_peak_gib", 22.0, {"EXPERTS": "paged"}, 0.05),
    ("experts-bf16-h200", "job_peak_gib", WHOLE_H200, {"EXPERTS": "bf16"}, 0.05),
    ("experts-shared-h200", "job_peak_gib", WHOLE_H200, KEPT, 0.05),
    ("experts-120b-h200", "job_peak_gib", WHOLE_H200, {"EXPERTS": "shared"}, 0.05),
    ("experts-120b-h100", "job_peak_gib", 79.2, {"EXPERTS": "shared"}, 0.05),
    ("experts-shared-h100", "job_peak_gib", 79.2, KEPT, 0.05),
    ("experts-shared-kept20-h100", "job_peak_gib", 79.2, KEPT | {"MICRO_BATCH": 20}, 0.05),
    ("experts-shared-recomputed-h100", "job_peak_gib", 79.2, {"EXPERTS": "shared"}, 0.05),
    ("steps-per-generation-h100", "job_peak_gib", 79.2, KEPT | {"STEPS_PER_GENERATION": 4}, 0.05),
    ("experts-shared-384-h100", "job_peak_gib", 79.2, KEPT | {"NUM_GENERATIONS": 32}, 0.05),
    ("experts-shared-384-recomputed-h100", "job_peak_gib", 79.2, {"EXPERTS": "shared", "NUM_GENERATIONS": 32}, 0.05),
    ("experts-shared-4000-h200", "job_peak_gib", WHOLE_H200, KEPT | {"MAX_COMPLETION_LEN": 4000}, 0.05),
    ("experts-shared-22-4000-h200", "job_peak_gib", 22.0, {"EXPERTS": "shared", "MAX_COMPLETION_LEN": 4000}, 0.05),
    ("experts-shared-22-h200", "job_peak_gib", 22.0, {"EXPERTS": "shared"}, 0.05),
    ("long-22-h200", "job_peak_gib", 22.0, FEW | {"MAX_COMPLETION_LEN": 32_768}, 0.05),
    ("long-46-h200", "job_peak_gib", 46.0, FEW | {"MAX_COMPLETION_LEN": 65_536}, 0.05),
    ("long-78-h200", "job_peak_gib", 78.6, FEW | {"MAX_COMPLETION_LEN": 130_048}, 0.05),
    ("experts-paged-22-h200", "job_peak_gib", 22.0, {"EXPERTS": "paged"}, 0.05),
    ("experts-paged-22-older-cards-h200", "job_peak_gib", 22.0, {"EXPERTS": "paged"}, 0.05),
    ("step-h200", "job_peak_bf16_gib", WHOLE_H200, {"EXPERTS": "bf16", "MAX_COMPLETION_LEN": 4000}, 0.01),
    ("step-h200", "w1_job_peak_mxfp4_gib", 40.0, {"EXPERTS": "mxfp4"}, 0.05),
    # Without vLLM the CUDA context counts as a part of the tenth that stays free.
    ("generate-h200", "job_peak_gib", 22.0, {"EXPERTS": "mxfp4", "USE_VLLM": False}, 0.09),
]


@pytest.mark.parametrize(("result", "figure", "free", "changes", "limit"), RECORDED)
def test_the_plan_is_close_to_the_peaks_that_were_measured(result, figure, free, changes, limit):
    figures = json.loads((ROOT / f"docs/results/{result}.json").read_text(encoding="utf-8"))["figures"]
    (peak,) = (row["value"] for row in figures if row["name"] == figure)
    machine, config = gpu(free, gpu_total=WHOLE_H200), LARGE_CONFIG if "120b" in result else REAL_CONFIG
    job = {"MAX_COMPLETION_LEN": 512, "ROLLOUT_SYNC": "merge"} | changes
    chosen = plan(machine, config, 930, **FLASH, beside_vllm="USE_VLLM" not in changes, **job)
    assert chosen.peak == pytest.approx(peak, rel=limit)


@pytest.mark.parametrize("free", [22.0, 21.4])
def test_a_step_without_vllm_fits_22_gib(free):
    """With room for a CUDA context too. By hand: 12 layers cache all 1,452 tokens of a row, 12 the last 128.
    On a CPU all prompts of a batch are computed together."""
    machine, job = gpu(free), {"EXPERTS": "mxfp4", "MAX_COMPLETION_LEN": 512}
    chosen = plan(machine, **job)
    cache = 96 * 2 * 8 * 64 * 2 * 12 * (1452 + 128)
    step = 96 * (64 * 1452 * 2 * 4 + 201_088 * 4 * 8) + 32 * 3 * 2880**2 * 2  # The last is a layer, dequantized.
    assert chosen.generation_batch == 96 and chosen.generation == pytest.approx((cache + step) / GIB)
    assert not memory.memory_shortfall(chosen, machine) and "5.6 GiB) fit in 90% of 2" in reasons(machine, **job)[1]
    assert plan(machine, EXPERTS="mxfp4").generation_batch == 32, "of 4,000 tokens"
    large = dataclasses.replace(CPU, ram_free=100.0)
    assert plan(large, GENERATION_BATCH=96, **job).generation > 5 * chosen.generation


def test_generation_counts_the_layers_of_each_kind():
    """By `layer_types`, as transformers' cache does; of an odd number of layers without it one more is sliding."""
    three = REAL_CONFIG | {"num_hidden_layers": 3}
    kinds = ("full_attention", "sliding_attention")
    sizes = [
        memory.generation_gib(Settings(), memory.PlanInputs(config, gpu(79.0), 940, "eager"), 96)
        for config in (three, *(three | {"layer_types": [kind] * 3} for kind in kinds))
    ]
    columns = [4940 + 2 * 128, 3 * 4940, 3 * 128]
    token = 96 * 2 * 8 * 64 * 2 / GIB
    assert [size - sizes[2] for size in sizes] == pytest.approx([(n - columns[2]) * token for n in columns])


def test_each_process_generates_its_part_rounded_up():
    """97 completions on three processes are 33, 32 and 32: the memory of 33 is needed."""
    parts = [
        memory.generation_gib(Settings(), memory.PlanInputs(REAL_CONFIG, gpu(79.0, ranks=ranks), 940, "eager"), total)
        for ranks, total in ((1, 33), (3, 97), (3, 99), (3, 96))
    ]
    assert parts[0] == parts[1] == parts[2] > parts[3]


def test_kept_activations_limit_micro_batches_alone():
    """While transformers generates, no activations are kept, so it may use as much memory as with checkpointing."""
    job = {"prompt_len": 930, "EXPERTS": "mxfp4", "NUM_GENERATIONS": 32}
    plans = [plan(gpu(80.0), **FLASH, **job, GRADIENT_CHECKPOINTING=checkpointing) for checkpointing in (False, True)]
    assert [chosen.generation_batch for chosen in plans] == [384, 384]
    assert [chosen.micro_batch for chosen in plans] == [2, 12]
    for checkpointing, share in ((False, "70%"), (True, "90%")):
        reason = reasons(gpu(80.0), EXPERTS="mxfp4", GRADIENT_CHECKPOINTING=checkpointing)[0]
        assert reason.endswith(f"fit beside the weights in {share} of 80.0 GiB free on the GPU")


def test_the_smallest_batch_is_not_said_to_fit():
    """With kept activations learning may take 70% of the GPU, and BF16 weights are nearly that alone."""
    cramped = {"EXPERTS": "bf16", "GRADIENT_CHECKPOINTING": False}
    reason = reasons(gpu(60.0), **cramped)[0]
    assert plan(gpu(60.0), **cramped).micro_batch == 1 and reason.startswith("the smallest, whose ")
    assert reason.endswith("GiB do not fit beside the weights in 70% of 60.0 GiB free on the GPU")
    assert reasons(H100, MICRO_BATCH=2)[0] == "set by MICRO_BATCH"
    assert plan(gpu(10.0), EXPERTS="mxfp4").generation_batch == 1
    assert "GiB) do not fit in 90% of 10.0" in reasons(gpu(10.0), EXPERTS="mxfp4")[1]


def test_a_micro_batch_is_as_large_as_pays():
    """By the tokens that it really computes: short completions of shared prompts go through together."""
    assert [memory.bucket(n) for n in (5, 100, 1000, 5026)] == [32, 128, 1024, 5120]
    for length, packing, most in ((24, "prefix", 256), (512, "prefix", 64), (4000, "prefix", 8), (512, "none", 32)):
        job = {"PROMPTS_PER_STEP": 32, "NUM_GENERATIONS": 8, "MAX_COMPLETION_LEN": length}
        assert plan(gpu(2000.0), attention="torch_flash", packing=packing, **job).micro_batch == most
        assert memory.micro_batch_tokens(Settings(**job), most, 940, packing == "prefix") <= memory.MICRO_BATCH_TOKENS


def test_an_adapter_takes_16_bytes_a_parameter():
    """In float32, with its gradient and two moments; test_targets.py has PEFT's count of `all-linear` at rank 4."""
    assert plan().adapter * GIB == pytest.approx(1_990_656 * 16)


NO_CHECKPOINTING = {"GRADIENT_CHECKPOINTING": False}
LONG = {"USE_VLLM": False, "GENERATION_BATCH": 96, "MAX_COMPLETION_LEN": 26_000}
LARGE_SHARE = {"VLLM_GPU_MEM": 0.9, "MAX_COMPLETION_LEN": 12_000}
ADVICE = [  # Free GiB, settings, config.json, and the settings that are named.
    (56.0, {}, REAL_CONFIG, ["EXPERTS", "USE_VLLM"]),
    (79.0, LARGE_SHARE, REAL_CONFIG, ["VLLM_GPU_MEM", "EXPERTS", "USE_VLLM"]),
    (79.0, {"MICRO_BATCH": 60, "GENERATION_BATCH": 96}, REAL_CONFIG, ["MICRO_BATCH"]),
    (79.0, LONG, REAL_CONFIG, ["GENERATION_BATCH"]),
    (60.0, NO_CHECKPOINTING, REAL_CONFIG, ["GRADIENT_CHECKPOINTING", "EXPERTS"]),
    (40.0, NO_CHECKPOINTING | {"MICRO_BATCH": 8}, REAL_CONFIG, [*NO_CHECKPOINTING, "MICRO_BATCH", "EXPERTS"]),
    (19.0, {"EXPERTS": "paged"}, REAL_CONFIG, ["EXPERTS", "USE_VLLM"]),
    (20.0, {"EXPERTS": "shared"}, REAL_CONFIG, ["EXPERTS", "EXPERTS", "USE_VLLM"]),
    (40.0, NO_CHECKPOINTING | {"MICRO_BATCH": 96}, BF16_CONFIG, []),
    (12.0, {}, REAL_CONFIG, []),
    (74.0, {"EXPERTS": "shared"}, LARGE_CONFIG, ["EXPERTS", "USE_VLLM"]),
    (66.0, {"EXPERTS": "shared"}, LARGE_CONFIG, []),
]


@pytest.mark.parametrize(("free", "changes", "config", "named"), ADVICE)
def test_a_refusal_names_settings_that_fit(free, changes, config, named):
    """Each alone, or all together; a resumed run may change all of them."""
    small = memory.PlanInputs(config, gpu(free), 930, **BESIDE_VLLM)
    settings = Settings(**changes)
    assert not small.fits(settings, {})
    advice = memory_advice(settings, small)
    assert re.findall(r"([A-Z_]+)=", advice) == named and MAY_CHANGE.issuperset(named)
    if not named:
        assert "Free some memory" in advice
        return
    assert advice.endswith(" fits")
    for remedy in advice.removeprefix("With all else as set, ").removesuffix(" fits").split(" or "):
        values = re.findall(r"([A-Z_]+)=([\w.]+)", remedy)
        assert small.fits(settings, {name: parse_value(name, value) for name, value in values}), remedy


@pytest.mark.parametrize(
    ("changes", "lowered"),
    [
        ({"MAX_COMPLETION_LEN": 130_048}, {"MAX_COMPLETION_LEN": 16_256}),
        ({"LORA_R": 64, "LORA_TARGETS": "experts", "MAX_COMPLETION_LEN": 512}, {"LORA_R": 8}),
        ({"LORA_R": 64, "LORA_TARGETS": "experts", "MAX_COMPLETION_LEN": 512, "INIT_ADAPTER": "runs/sft"}, {}),
    ],
)
def test_a_refusal_names_what_to_lower_only_where_it_then_fits(changes, lowered):
    small = plan_inputs(gpu(21.5, is_planned=True), True)
    settings = Settings(EXPERTS="paged", **changes)
    advice = memory_advice(settings, small)
    assert {name: int(value) for name, value in re.findall(r"ower ([A-Z_]+) to (\d+)", advice)} == lowered
    assert all(small.fits(settings, {name: value}) for name, value in lowered.items())
    assert advice.endswith("or rent a larger GPU" if lowered else "Rent a larger GPU") and "nvidia-smi" not in advice
    limited = dataclasses.replace(small, machine=gpu(79.0).limited(4.0))
    advice = memory_advice(Settings(EXPERTS="paged"), limited)
    assert advice == "Raise GPU_MEM_LIMIT if the GPU has room. Rent a larger GPU"


def vllm_plan(machine=H100, **changes):
    return plan(machine, prompt_len=930, beside_vllm=True, **changes)


def cache_text(machine=H100, **changes):
    return describe_cache(Settings(**changes), vllm_plan(machine, **changes).engine, 930)


@pytest.mark.parametrize(("completion", "gib"), [(512, 2.1), (4000, 9.8)])
def test_cache_of_a_step(completion, gib):
    """12 prompts of 930 tokens x 8 completions, counted by hand from vLLM's blocks of 16 tokens x 12 layers."""
    engine = vllm_plan(MAX_COMPLETION_LEN=completion).engine
    block = 12 * 16 * 2 * 8 * 64 * 2
    whole = -(-(930 + completion) // 16)
    assert engine.cache * GIB == pytest.approx(block * (1 + 1024 + 12 * (58 + 8 * (whole - 58 + 10))))
    assert engine.cache == pytest.approx(gib, abs=0.1)
    assert "the rest waits" not in cache_text(MAX_COMPLETION_LEN=completion)
    assert 0 <= engine.max_model_len - 930 - completion < 1024 and engine.max_num_seqs == 96
    assert engine.weights == pytest.approx(12.816 + 9.455 * 0.08, abs=0.001) and engine.scratch > 0.5


def test_a_rollout_of_several_steps_is_planned_as_a_step_of_as_many_prompts():
    shared, large = vllm_plan(STEPS_PER_GENERATION=4).engine, vllm_plan(PROMPTS_PER_STEP=48).engine
    assert shared.max_num_seqs == 384 and shared == large
    assert "one rollout: 48 prompts" in cache_text(STEPS_PER_GENERATION=4)
    assert "largest divisor of 384 " in reasons(H100, STEPS_PER_GENERATION=4)[1]


def test_a_share_and_little_room_shrink_the_cache():
    wanted, small = vllm_plan().engine, vllm_plan(VLLM_GPU_MEM=0.25).engine
    assert small.cache == pytest.approx(79.6 * 0.25 - small.weights - small.scratch) and small.cache < wanted.cache
    text = cache_text(VLLM_GPU_MEM=0.25)
    assert "VLLM_GPU_MEM=0.25 leaves" in text and "waits its turn" in text
    assert vllm_plan(VLLM_GPU_MEM=0.5).engine.cache == wanted.cache, "more than a step needs is not taken"
    tight = vllm_plan(gpu(62.0)).engine
    assert 0 < tight.cache < wanted.cache and "beside the trainer leaves" in cache_text(gpu(62.0))


@given(st.integers(17, 4096))
def test_capture_sizes(most):
    """A batch runs in the next larger graph: its own up to 16, at most a quarter more from there on."""
    sizes = capture_sizes(most)
    assert sizes[:16] == tuple(range(1, 17)) and sizes[-1] == most
    assert all(size < larger <= size * 1.25 for size, larger in zip(sizes[15:], sizes[16:], strict=False))
    assert len(sizes) <= 16 + 4 * max(0, math.log2(most) - 4) + 1


def test_a_plan_takes_as_long_whatever_the_size_of_a_step():
    """The most that the settings let through: no list of every number up to that."""
    job = {"PROMPTS_PER_STEP": 10**5, "NUM_GENERATIONS": 10**5, "MAX_COMPLETION_LEN": 10**9}
    for machine, beside_vllm in ((H100, True), (CPU, False)):
        chosen = plan(machine, prompt_len=10**9, **FLASH, beside_vllm=beside_vllm, **job)
        assert chosen.micro_batch == chosen.generation_batch == 1
    assert memory.divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
