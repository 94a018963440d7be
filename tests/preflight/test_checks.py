# SPDX-License-Identifier: Apache-2.0
"""Checks of settings, memory and disk, all of them at once, and the plan and warnings that a run begins with."""

import dataclasses
import functools
import itertools
import os
import shutil
import types

import pytest
from helpers import RENDERED, ROOT, run_script, write_csv
from machines import CPU, H100, LARGE_CONFIG, only, plan_inputs, resolved_run

from grpo.common import Problems
from grpo.output.folder import RunState
from grpo.plan import memory
from grpo.plan.hub import REAL_CONFIG, ModelFiles
from grpo.plan.memory import plan_memory
from grpo.preflight import banner, checks, resolve
from grpo.preflight.choices import EXPERTS_REASONS, Choice, choose_checkpointing, choose_experts, choose_total_steps
from grpo.settings.table import FIELDS, Settings

HEADER = ["prompt", "reward_action_0", "reward_action_1"]
TWO_GPUS = dataclasses.replace(H100, gpus=2, freest="7")
CONFLICTS = [
    ({"GENERATION_BATCH": 7, "STEPS_PER_GENERATION": 2}, CPU, ["STEPS_PER_GENERATION x ", "2 x 12 x 8 = 192"]),
    ({"LOSS_TYPE": "vespo", "IMPORTANCE_SAMPLING_LEVEL": "sequence"}, CPU, ["IMPORTANCE_SAMPLING_LEVEL: vespo"]),
    ({"GENERATION_BATCH": 5}, CPU, ["GENERATION_BATCH: 5 does not divide", "12 x 8 = 96", "nearest that does is 4"]),
    ({"ATTN_IMPL": "torch_flahs"}, H100, ["'torch_flahs' is unknown; the nearest is torch_flash", "flash_attention_3"]),
    ({"ATTN_IMPL": "torch_flash"}, CPU, ["needs a GPU"]),
    ({"ATTN_IMPL": "org/kernel", "PACKING": "prefix"}, H100, ["PACKING: org/kernel takes padded rows only"]),
    ({}, dataclasses.replace(H100, capability=7.5), ["GPU: ", "compute capability 7.5"]),
    ({"EVAL_TEMPERATURE": 2.1}, H100, ["EVAL_TEMPERATURE", "from 0.01 to 2"]),
    ({"TEMPERATURE": 0.005}, H100, ["at temperatures from 0.01 to 2", "USE_VLLM=0"]),
    ({"LOSS_TYPE": "vespo", "IS_CORRECTION": "sequence_mask"}, CPU, ["vespo"]),
    ({"LORA_TARGETS": "q_proj, v_porj"}, CPU, ["'v_porj' is nothing in gpt-oss", "nearest is v_proj"]),
    ({"LORA_TARGETS": "q_proj,24.experts"}, CPU, ["'24.experts' matches nothing", "layers 0 to 23"]),
    ({"LORA_TARGETS": "experts", "ROLLOUT_SYNC": "merge"}, H100, ["ROLLOUT_SYNC", "experts", "auto", "USE_VLLM=0"]),
    ({"LORA_R": 513, "ROLLOUT_SYNC": "lora"}, H100, ["LORA_R", "at most 512, this is 513", "USE_VLLM=0"]),
    ({"LORA_TARGETS": ","}, CPU, ["names no module"]),
    ({"WARMUP_STEPS": 100}, CPU, ["rise over 100 steps, the run has 100"]),
    ({"USE_VLLM": True}, CPU, ["needs a GPU"]),
    ({}, TWO_GPUS, ["2 GPUs are visible", "torchrun --nproc-per-node 2 train_grpo.py", "CUDA_VISIBLE_DEVICES=7"]),
    ({"PROMPTS_PER_STEP": 3}, dataclasses.replace(H100, ranks=4, here=2), ["3 cannot be shared out among 4 processes"]),
    *(
        ({"LORA_TARGETS": f"q_proj,{name}"}, CPU, [repr(name), "takes an adapter", "all-linear", "q_proj", "7.experts"])
        for name in ("gate_up_proj", "-1.experts", "99999.experts")
    ),
]  # fmt: skip


def settings_problems(machine, config=None, **changes):
    problems = Problems()
    config = config or ({"num_hidden_layers": 24} if "24" in changes.get("LORA_TARGETS", "") else None)
    settings = Settings(**changes)
    use_vllm = settings.USE_VLLM is not False and machine.gpus > 0
    checks.check_settings(settings, config, machine, use_vllm, problems)
    return problems


@pytest.mark.parametrize(("changes", "machine", "messages"), CONFLICTS, ids=lambda value: str(value)[:40])
def test_conflicts(changes, machine, messages):
    problem = only(settings_problems(machine, **changes))
    assert all(message in problem for message in messages), problem


def test_settings_that_go_together():
    for words in (" all-linear ", "q_proj, o_proj", "experts,7.experts,q_proj"):
        assert not settings_problems(CPU, LORA_TARGETS=words)
    assert not settings_problems(H100, LORA_TARGETS="experts", USE_VLLM=False, ROLLOUT_SYNC="merge")
    assert not settings_problems(H100, LORA_R=513, ROLLOUT_SYNC="merge")
    assert not settings_problems(H100, TEMPERATURE=2.1, USE_VLLM=False) and not settings_problems(CPU, TEMPERATURE=2.1)
    assert not settings_problems(H100, TEMPERATURE=2.0, LOSS_TYPE="vespo")
    assert not settings_problems(dataclasses.replace(H100, capability=0.0)), "where it could not be read"
    assert not settings_problems(H100, REAL_CONFIG, USE_VLLM=True, EXPERTS="mxfp4")
    bf16 = REAL_CONFIG | {"quantization_config": None}
    assert "has no MXFP4 experts" in only(settings_problems(CPU, bf16, EXPERTS="mxfp4"))


def test_vllm_needs_the_whole_uuid_of_a_gpu(monkeypatch):
    """torch and nvidia-smi take its first letters, too."""
    for visible, refused in (("GPU-af7b61d8", True), ("GPU-af7b61d8-21af-baea-6a19-42a1f9f7c3cb", False), ("3", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert bool(settings_problems(H100)) == refused and not settings_problems(H100, USE_VLLM=False)
        assert not settings_problems(dataclasses.replace(H100, is_planned=True))


def test_importance_ratios_need_the_log_probs_of_all_tokens():
    for vllm, correction, refused in ((True, "token_mask", 1), (True, "none", 0), (False, "token_mask", 0)):
        problems = Problems()
        checks.check_top_p(Settings(TOP_P=0.9, IS_CORRECTION=correction), vllm, problems)
        assert len(problems) == refused and all("IS_CORRECTION=none" in problem for problem in problems)
    checks.check_top_p(Settings(TOP_P=0.9, IS_CORRECTION="none", NUM_ITERATIONS=2), True, problems := Problems())
    assert only(problems).endswith("Set TOP_P=1")


def test_expected_rewards_are_off_by_themselves_and_refused_where_they_cannot_be(tiny_run):
    resolved = tiny_run()
    assert not resolved.problems and not resolved.settings.EXPECTED_REWARD
    resolved = tiny_run(REWARDS="format,regret", EXPECTED_REWARD=1)
    expected = resolved.choices["EXPECTED_REWARD"]
    assert resolved.settings.EXPECTED_REWARD and expected.value
    assert "format" not in expected.reason and "regret" in expected.reason
    problem = only(tiny_run(TOP_P=0.9, EXPECTED_REWARD=1).problems)
    assert problem.startswith("EXPECTED_REWARD: it cannot be used: TOP_P") and "EXPECTED_REWARD=auto" in problem


TIED = REAL_CONFIG | {"tie_word_embeddings": True}
SHARED = [  # Capability, whether vLLM generates, ROLLOUT_SYNC, config.json, and a word of the problem.
    (9.0, True, "merge", REAL_CONFIG, ""), (8.9, True, "merge", REAL_CONFIG, "8.9"),
    (10.0, True, "merge", REAL_CONFIG, "10.0"), (9.0, True, "lora", REAL_CONFIG, "ROLLOUT_SYNC"),
    (9.0, False, "merge", REAL_CONFIG, "vLLM"), (9.0, True, "merge", TIED, "output head"),
]  # fmt: skip


@pytest.mark.parametrize(("capability", "vllm", "sync", "config", "word"), SHARED)
def test_experts_are_shared_where_vllms_layout_is_known(capability, vllm, sync, config, word):
    """`paged` goes with any card, sync and model beside vLLM."""
    machine = dataclasses.replace(H100, capability=capability)
    for kind, words in (("bf16", []), ("paged", [] if vllm else ["vLLM"]), ("shared", [word] if word else [])):
        problems = Problems()
        checks.check_experts(Settings(EXPERTS=kind, ROLLOUT_SYNC=sync), config, machine, vllm, problems)
        assert len(problems) == len(words) and all(word in problem for word in words for problem in problems)


@pytest.fixture
def tiny_run(tmp_path):
    """Resolves a run without evaluations, unless EVAL_SAMPLES is set."""
    return functools.partial(resolved_run, tmp_path / "run", EVAL_SAMPLES=0)


# With `auto` these are rules and no values: held-out rows and days of other data, a reward of each row, and what fits.
DEMO = {"EVAL_DATA", "EVAL_PROFILE"}
RULES = {*DEMO, "INVALID_REWARD", "NUM_TRAIN_EPOCHS", "VLLM_GPU_MEM", "GPU_MEM_LIMIT"}


def test_every_choice_has_its_reason_and_no_setting_is_auto_any_more(tiny_run):
    """settings.json records them as they were asked for, but for those that say so, and all choices beside them."""
    resolved = tiny_run(EVAL_SAMPLES=8, NUM_TRAIN_EPOCHS=1)
    assert not resolved.problems and all(choice.reason for choice in resolved.choices.values())
    for name, value in vars(resolved.settings).items():
        assert value not in (None, "auto") or name in RULES, name
        assert name not in resolved.choices or resolved.choices[name].value == value, name
        asked, recorded = getattr(Settings(), name), getattr(resolved.recorded, name)
        if resolved.sources[name] == "chosen" and name not in DEMO:
            assert name in {"EXPERTS", "ROLLOUT_SYNC", "TOTAL_STEPS"} and recorded == value != asked
        elif name in resolved.choices and resolved.sources[name] == "default":
            assert recorded == asked
    choices = checks.run_records(resolved)["settings.json"]["choices"]
    assert choices["sync"][0] == "merge" and choices["experts"][1].startswith("no GPU")
    assert set(choices) >= {"rewards", "attention", "rollouts", "evaluation", "simulation", "best", "plan", "heldout"}


def test_a_choice_that_nobody_knows_yet_is_shown_and_recorded(tiny_run):
    """A new setting that has `auto` needs nothing but its line in the table and its choosing function."""
    resolved = tiny_run()
    resolved = dataclasses.replace(resolved, choices=resolved.choices | {"NEW": Choice(0.5, "a test")})
    assert ("NEW", "0.5: a test") in list(banner.run_lines(resolved))
    assert checks.run_records(resolved)["settings.json"]["choices"]["new"] == [0.5, "a test"]


def test_what_is_checked_beside_settings_is_in_the_plan_too(tiny_run):
    """Each part is tested alone elsewhere: experts without vLLM, Hub kernels, a large model, words that are none."""
    assert "does not generate here" in only(tiny_run(EXPERTS="shared").problems)
    assert "its gradients may be wrong" in banner.banner(tiny_run(H100, ATTN_IMPL="org/kernel"))
    assert "cannot be used, see below" in banner.banner(tiny_run(OUTPUT_DIR=__file__))
    assert dict(banner.run_lines(tiny_run(H100, USE_VLLM=1)))["rollouts"] == "vLLM: set by USE_VLLM"
    experts = banner.banner(tiny_run(LORA_R=3, LORA_TARGETS="v_proj,1.experts"))
    assert "v_proj: 3 matrices, 1,152 parameters" in experts and "1.experts: 2 matrices, 3,840 parameters" in experts
    text = "\n".join(tiny_run(MODEL_ID="openai/gpt-oss-20b", MAX_PROMPT_LEN=2048).problems)
    assert "no GPU is visible, and openai/gpt-oss-20b needs one" in text
    little = dataclasses.replace(CPU, ram_free=0.01)
    advice = "of memory and 0.0 GiB are free. Free some memory, or lower {}MAX_COMPLETION_LEN"
    assert advice.format("") in only(tiny_run(little).problems), "MICRO_BATCH is 1 already"
    assert advice.format("MICRO_BATCH or ") in only(tiny_run(little, MICRO_BATCH=8).problems)
    resolved = tiny_run(STEPS=5, DEBUG=1)
    assert not resolved.problems
    assert banner.banner(resolved).count("STEPS is set but is not a setting: set TOTAL_STEPS=5") == 1


def test_the_plan_says_that_a_complete_run_goes_on(tiny_run, tmp_path):
    """TOTAL_STEPS=30 of the first command is easily left out of the next one."""
    interrupted = RunState(tmp_path, 30, tmp_path / "checkpoint-30", exists=True)
    complete = dataclasses.replace(interrupted, complete_steps=30)
    assert banner.output_dir_text(dataclasses.replace(tiny_run(), state=interrupted)) == "continues from step 30"
    text = banner.output_dir_text(dataclasses.replace(tiny_run(), state=complete))
    assert " a run that was complete (30 steps): TOTAL_STEPS=400 (tiny) stretches LR_SCHEDULER=linear, so" in text
    longer = dataclasses.replace(tiny_run(LR_SCHEDULER="constant", TOTAL_STEPS=50), state=complete)
    assert banner.output_dir_text(longer).endswith("complete (30 steps): TOTAL_STEPS=50 (environment)")


STEPS = [  # NUM_TRAIN_EPOCHS, rows, PROMPTS_PER_STEP and the steps; 1.1 x 70 is more than 77 in floating point.
    (None, 30, 12, 100), (1, 30, 12, 3), (2, 30, 12, 5), (1.1, 70, 1, 77), (0.1, 30, 1, 3), (0.01, 30, 12, 1),
    (1, 0, 12, 100),
]  # fmt: skip


@pytest.mark.parametrize(("epochs", "rows", "prompts", "steps"), STEPS)
def test_steps_of_so_many_epochs(epochs, rows, prompts, steps):
    settings = Settings(NUM_TRAIN_EPOCHS=epochs, PROMPTS_PER_STEP=prompts)
    chosen = choose_total_steps(settings, {"TOTAL_STEPS": "default"}, rows, Problems())
    assert chosen.value == steps and ("NUM_TRAIN_EPOCHS" in chosen.reason) is (epochs is not None and rows > 0)
    twice = dataclasses.replace(settings, NUM_ITERATIONS=2, PROMPTS_PER_STEP=2 * prompts)
    assert choose_total_steps(twice, {"TOTAL_STEPS": "default"}, rows, Problems()).value == steps


@pytest.mark.parametrize(("steps", "epochs"), [(2, "0.02"), (91, "0.93"), (98, "1.0"), (4000, "40.9")])
def test_a_small_part_of_the_rows_is_not_called_none(tiny_run, steps, epochs):
    length = dict(banner.run_lines(tiny_run(TOTAL_STEPS=steps)))["length"]
    assert length.startswith(f"{steps} steps, {epochs} epochs over the rows")


def test_epochs_are_resolved_to_steps_before_anything_uses_them(tiny_run):
    resolved = tiny_run(NUM_TRAIN_EPOCHS=2.5)
    assert not resolved.problems and (resolved.settings.TOTAL_STEPS, resolved.sources["TOTAL_STEPS"]) == (245, "chosen")
    assert "NUM_TRAIN_EPOCHS=2.5 x 783 rows / 8 prompts" in dict(banner.run_lines(resolved))["length"]
    assert "rise over 98 steps, the run has 98" in only(tiny_run(NUM_TRAIN_EPOCHS=1, WARMUP_STEPS=98).problems)
    assert "TOTAL_STEPS=5 is set as well. Unset one" in only(tiny_run(NUM_TRAIN_EPOCHS=1, TOTAL_STEPS=5).problems)


def memory_problems(machine, beside_vllm=False, **changes):
    problems = Problems()
    settings, inputs = Settings(**changes), plan_inputs(machine, beside_vllm)
    checks.check_memory(settings, inputs, plan_memory(settings, inputs), problems)
    return problems


def test_memory():
    assert not memory_problems(H100) and not memory_problems(H100, True)
    small = dataclasses.replace(H100, gpu="NVIDIA L4", gpu_total=22.5, gpu_free=22.0)
    problem = only(memory_problems(small))
    assert problem.startswith(
        "GPU NVIDIA L4: 22.0 of 22.5 GiB are free, and learning in micro-batches of 1 would need 4"
    )
    assert "weights 38.96 + adapter" in problem and "EXPERTS=mxfp4 fits" in problem
    problem = memory_problems(H100, MAX_COMPLETION_LEN=131_072 - 939)[0]
    assert f"more than the model's 131072 positions. Set it to {131_072 - 940} or lower" in problem
    for share, name in ((None, f"GPU {H100.gpu}"), (0.2, "VLLM_GPU_MEM")):  # A setting is named if the user set it.
        problem = memory_problems(dataclasses.replace(H100, gpu_free=50.0), True, VLLM_GPU_MEM=share)[0]
        assert problem.startswith(f"{name}: 50.0 of 79.6 GiB are free, and vLLM would have 0.0 GiB of cache")
    # On a Hopper card, which can share the weights, nothing of them goes to the host.
    for capability, way_on in ((0.0, "or set USE_VLLM=0"), (9.0, "or set EXPERTS=shared")):
        problem = only(memory_problems(dataclasses.replace(H100, ram_free=12.0, capability=capability), True))
        assert problem.startswith("memory: the sleeping engine needs") and "12.0 GiB are free" in problem
        assert problem.endswith(way_on)


def test_a_run_on_a_gpu_without_a_compiler_is_refused(tiny_run, monkeypatch):
    monkeypatch.setattr("grpo.plan.machine.compiler_fault", lambda: "there is no gcc")
    for machine, refused in ((H100, True), (CPU, False)):
        problems = tiny_run(machine=machine).problems
        assert any(problem.startswith("compiler: Triton compiles") for problem in problems) == refused


@pytest.mark.parametrize("capability", [8.0, 9.0])
def test_the_plan_stays_below_the_limit_of_gpu_memory(tiny_run, capability):
    """With vLLM and without; a limit above what is free changes nothing."""
    machine = dataclasses.replace(H100, capability=capability)
    assert machine.limited(79.5) == machine == machine.limited(None)
    for limit, beside_vllm in itertools.product((22.0, 40.0, 60.0), (False, True)):
        limited = tiny_run(machine=machine, GPU_MEM_LIMIT=limit).machine
        assert (
            limited == machine.limited(limit) and f"GPU_MEM_LIMIT allows {limit} of 79.6 GiB" in limited.gpu_memory_text
        )
        inputs = plan_inputs(limited, beside_vllm)
        settings = Settings(EXPERTS=choose_experts(Settings(), inputs).value)
        plan = plan_memory(settings, inputs)
        assert limit * 0.4 < plan.peak <= limit, (limit, beside_vllm)
        assert not memory_problems(limited, beside_vllm, EXPERTS=settings.EXPERTS)
    unknown = dataclasses.replace(machine, gpu_total=0.0, gpu_free=0.0)
    fix = "tell its memory. Set GPU_MEM_LIMIT to the GiB that the run may take"
    assert only(memory_problems(unknown, True, EXPERTS="mxfp4")).endswith(fix)
    problem = only(memory_problems(machine.limited(12.0), True, EXPERTS="mxfp4"))
    assert "GPU_MEM_LIMIT allows 12.0 of 79.6 GiB, and" in problem and "Raise GPU_MEM_LIMIT if" in problem


@pytest.mark.parametrize(
    ("capability", "free", "beside_vllm", "chosen"),
    [
        (9.0, 79.0, True, "shared"), (8.9, 79.0, True, "bf16"), (8.9, 40.0, True, "paged"), (8.9, 22.0, True, "paged"),
        (8.9, 16.0, True, "paged"), (8.9, 16.0, False, "mxfp4"),  # Nothing fits.
    ],
)  # fmt: skip
def test_experts_are_chosen_by_the_machine(capability, free, beside_vllm, chosen):
    """Where nothing fits, the refusal is about the smallest ones."""
    machine = dataclasses.replace(H100, capability=capability, gpu_free=free)
    inputs = plan_inputs(machine, beside_vllm)
    for sync, kind in (("merge", chosen), ("lora", "bf16" if chosen == "shared" else chosen)):
        settings = Settings(EXPERTS=None, ROLLOUT_SYNC=sync)
        assert choose_experts(settings, inputs) == Choice(kind, EXPERTS_REASONS[kind])
    whole = dataclasses.replace(inputs, config=REAL_CONFIG | {"quantization_config": None})
    assert choose_experts(Settings(EXPERTS=None), whole) == Choice("bf16", "the checkpoint's are not quantized")
    problems = memory_problems(machine, beside_vllm, EXPERTS=chosen)
    assert not problems if free > 16 else "weights 12.8" in only(problems), "39 GiB were not asked for"


def test_packed_experts_stay_on_the_gpu_where_the_host_has_no_room_for_paged_ones():
    machine = dataclasses.replace(H100, capability=8.9, gpu_free=44.4)
    for ram, kind, problems in ((30.0, "paged", 0), (24.0, "mxfp4", 0), (12.0, "paged", 1)):
        machine = dataclasses.replace(machine, ram_free=ram)
        choice = choose_experts(Settings(EXPERTS=None), plan_inputs(machine, True))
        assert choice.value == kind and ("no room for paged" in choice.reason) == (kind == "mxfp4")
        assert len(memory_problems(machine, True, EXPERTS=kind)) == problems


SET = "GRADIENT_CHECKPOINTING"
CHECKPOINTING = [  # GPU memory, what is set, whether activations are recomputed, the micro-batch, and the reason.
    (139.8, {}, False, 24, "there is room for all that micro-batches of 15,108 tokens keep"),
    (79.0, {}, False, 16, "there is room for all that micro-batches of 10,072 tokens keep"),
    (70.0, {}, True, 48, "without it micro-batches would have"),
    (70.0, {SET: False}, False, 12, f"set by {SET}"),
    (139.0, {SET: True}, True, 48, f"set by {SET}"),
    # An H200 has room for micro-batches of 8,500 tokens: MICRO_BATCH asks for others.
    (139.0, {"MICRO_BATCH": 4}, True, 4, "without it micro-batches would have 2,988 tokens, fewer than 8,500"),
    (139.0, {"MICRO_BATCH": 48}, True, 48, "without it micro-batches of 30,216 tokens would take over 70% of the mem"),
]


@pytest.mark.parametrize(("free", "changes", "recomputed", "micro_batch", "reason"), CHECKPOINTING)
def test_activations_are_kept_where_large_micro_batches_leave_room(free, changes, recomputed, micro_batch, reason):
    inputs = plan_inputs(dataclasses.replace(H100, capability=9.0, gpu_free=free), True)
    settings = Settings(EXPERTS="shared", MAX_COMPLETION_LEN=512, **changes)
    chosen = choose_checkpointing(settings, inputs)
    assert chosen.value == recomputed and chosen.reason.startswith(reason)
    plan = plan_memory(dataclasses.replace(settings, GRADIENT_CHECKPOINTING=recomputed), inputs)
    assert plan.micro_batch == micro_batch and (recomputed or plan.learning_peak < 0.7 * free)
    assert choose_checkpointing(settings, plan_inputs(CPU)).value == changes.get(SET, True)


def test_the_time_of_evaluations_is_shown_before_a_run():
    """By hand: 64 x 4 answers of 4,000 tokens, of which 96 run at once, take 38.7 s x 256 / 96, three times, and 64
    greedy ones 35 s, twice."""
    settings = Settings(USE_VLLM=True, EVAL_SAMPLES=4, EVAL_STEPS=50, TOTAL_STEPS=100, MAX_COMPLETION_LEN=4000)
    machine = dataclasses.replace(H100, gpu="NVIDIA H200")
    plan = plan_memory(settings, plan_inputs(machine, beside_vllm=True))
    run = types.SimpleNamespace(settings=settings, machine=machine, config=REAL_CONFIG, plan=plan)
    run.eval_rows = [None] * 64
    assert banner.evaluation_time(run) == "all take some 6 min if completions have 4,000 tokens"
    run.settings = dataclasses.replace(settings, INIT_ADAPTER="runs/sft")
    assert banner.evaluation_time(run).startswith("all take some 9 min")
    run.machine = dataclasses.replace(H100, gpu="NVIDIA B200")
    assert banner.evaluation_time(run) == ""


def test_gpt_oss_120b_is_planned_for_one_card(tiny_run):
    """With shared weights; what is printed of it, and what is refused."""
    settings = Settings(EXPERTS="shared", ROLLOUT_SYNC="merge", MAX_COMPLETION_LEN=512)
    problems = Problems()
    for free, parts in ((139.0, None), (78.6, "4 parts of a layer's experts"), (70.0, "4 parts of a layer's experts")):
        assert not problems
        machine = dataclasses.replace(H100, capability=9.0, gpu_free=free)
        inputs = dataclasses.replace(plan_inputs(machine, True), config=LARGE_CONFIG)
        dequantized = dict(banner.memory_lines(tiny_run(), plan_memory(settings, inputs))).get("dequantized")
        assert dequantized is parts or dequantized.startswith(parts)
        assert free == 70 or choose_experts(dataclasses.replace(settings, EXPERTS=None), inputs).value == "shared"
        checks.check_memory(settings, inputs, plan_memory(settings, inputs), problems)
    assert "70.0 of 79.6 GiB are free, and vLLM would have 0.0 GiB of cache" in only(problems)
    assert "With all else as set, EXPERTS=mxfp4 and USE_VLLM=0 fits" in only(problems)


def test_the_reason_for_parts_of_experts_is_the_micro_batch(tiny_run):
    """A whole layer may fit as well, beside far fewer completions."""
    settings = Settings(EXPERTS="paged", ROLLOUT_SYNC="merge", MAX_COMPLETION_LEN=512)
    machine = dataclasses.replace(H100, capability=9.0, gpu_free=78.6)
    inputs = dataclasses.replace(plan_inputs(machine, True), config=LARGE_CONFIG)
    plan = plan_memory(settings, inputs)
    room = 0.9 * 78.6 - plan.held - plan.engine.asleep
    whole = [n for n in memory.divisors(96) if memory.learning_gib(settings, inputs, n) <= room]
    assert 2 * max(whole) < plan.micro_batch and plan.expert_parts == 4
    text = dict(banner.memory_lines(tiny_run(), plan))["dequantized"]
    assert text.endswith(": with a whole layer at a time less than half as many completions fit")


def test_disk_space(tmp_path, monkeypatch):
    """What is there of a download that broke off does not have to come again."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def problems(free, folder=None, config=REAL_CONFIG):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
        problems = Problems()
        files = ModelFiles(folder, config)
        checks.check_disk(Settings(OUTPUT_DIR=str(tmp_path / "run"), MODEL_ID="hub/model"), files, 0.1, problems)
        return problems

    assert problems(2**20)[0].startswith(f"OUTPUT_DIR={tmp_path / 'run'}: checkpoints, logs and the zip need 0.7 GiB")
    problem = only(problems(5 * 2**30))
    assert problem.startswith(f"HF_HOME={tmp_path / 'hf'}: ") and "12.8 GiB" in problem
    assert "60.8 GiB" in only(problems(50 * 2**30, config=LARGE_CONFIG))
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert only(problems(5 * 2**30)).startswith(f"HF_HOME={tmp_path / 'caches' / 'huggingface'}: ")
    (tmp_path / "model.safetensors").touch()
    for size, need in ((5 * 2**30, ["7.8 GiB"]), (13_761_264_768, [])):
        os.truncate(tmp_path / "model.safetensors", size)
        missing = problems(5 * 2**30, tmp_path)
        assert len(missing) == len(need) and all(words in problem for words in need for problem in missing)


def test_everything_at_once_exits_2_and_writes_nothing(tiny, tmp_path):
    """Through the real entry: a list and no traceback, whatever the environment, the data and a model folder hold."""
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes()[:9000])
    (tmp_path / "my_exit.py").write_text("raise SystemExit\n")
    write_csv(tmp_path / "bad.csv", HEADER, [["x", "a", 1]])
    before = sorted(path.name for path in tmp_path.iterdir())
    done = run_script(
        cwd=tmp_path, MODEL_ID=tmp_path / "model", DATA="bad.csv,none.csv", EVAL_DATA="~nobody-here/x.csv",
        REPORT_TO="oddity", NUM_GENERATIONS=10**18, SEED="1" * 5000, REWARDS="my_exit:score", LEARNING_RATES="\udcff",
        GENERATION_BATCH=7, WARMUP_STEPS="x", OUTPUT_DIR="run", code=2,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    named = ("tokenizer.json fails", "~nobody-here", "NUM_GENERATIONS", "SEED: ", "my_exit:score", "none.csv", "oddity")
    for words in (*named, "column reward_action_0: 'a'", "GENERATION_BATCH: 7", "WARMUP_STEPS: 'x'", "LEARNING_RATES"):
        assert words in done.stderr, words
    assert "11 problems" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) in (before, sorted([*before, "__pycache__"]))


def test_long_prompts_are_named(tiny_run, tmp_path):
    rows = [[RENDERED.format("short"), 0, 1], [RENDERED.format("long " * 300), 0, 1]]
    path = write_csv(tmp_path / "long.csv", HEADER, rows)
    problem = only(tiny_run(DATA=path).problems)
    assert f"{path}, row 2: the prompt has" in problem and "MAX_PROMPT_LEN is 256" in problem
    assert not tiny_run(DATA=path, MAX_PROMPT_LEN=problem.split("MAX_PROMPT_LEN=")[1]).problems
    write_csv(path, HEADER, [*rows, [RENDERED.format("long " * 900), 0, 1]])
    problem = only(tiny_run(DATA=path).problems)
    assert f"{path}, row 3: the prompt has" in problem and "2 of 3 prompts are longer than that" in problem


def test_a_resumed_run_keeps_what_auto_chose(tiny_run, tmp_path, monkeypatch):
    """Unless the record was edited to what divides no rollout, or vLLM generated then."""
    choices = {"rollouts": [False, ""], "plan": {"generation_batch": 2}}
    monkeypatch.setattr(resolve, "inspect_run", lambda *_: RunState(tmp_path, 4, tmp_path, True, choices))
    kept, chosen = tiny_run(), tiny_run(GENERATION_BATCH=16)
    assert kept.choices["GENERATION_BATCH"] == Choice(2, "as the run was started")
    assert kept.plan.generation_batch == kept.settings.GENERATION_BATCH == 2 and chosen.plan.generation_batch == 16
    assert not kept.problems and not chosen.problems
    choices["plan"] = {"generation_batch": 5}
    assert tiny_run().plan.generation_batch == 64
    choices |= {"rollouts": [True, ""], "plan": {"generation_batch": 2}}
    other = tiny_run()
    assert "was started with USE_VLLM=1, now it is 0 (no GPU" in only(other.problems)
    assert other.plan.generation_batch == 64 and not tiny_run(USE_VLLM=0).problems


def test_the_plan_lists_the_settings_that_are_not_at_their_defaults(tiny_run):
    """All of them with --check. Listed is what was chosen and what the user set to something else than the default for
    MODEL_ID=tiny: 4 samples are that of other models alone, and a rank of 8 is tiny's."""
    resolved = tiny_run(SEED=7, EPSILON=0.2, EVAL_SAMPLES=4, LORA_R=8)

    def names(**options) -> list[str]:
        settings = banner.banner(resolved, **options).partition("\nThis run\n")[0].splitlines()[1:]
        return [line.split()[0] for line in settings if line]

    assert names() == ["MODEL_ID", "EVAL_SAMPLES", "SEED", "OUTPUT_DIR"] and names(every_setting=True) == list(FIELDS)


def test_a_run_is_warned_where_nothing_is_held_out_or_it_is_trained_on(tiny_run, tmp_path, good_csv):
    assert not banner.data_warnings(tiny_run(EVAL_SAMPLES=8)), "the demo's own rows"
    warning = only(banner.data_warnings(tiny_run(EVAL_SAMPLES=8, DATA=good_csv)))
    assert "Nothing is measured" in warning and "DATA has 12 prompts, and it takes 20" in warning
    assert "EVAL_DATA='...'" in warning and "EVAL_SAMPLES=0" in warning
    for changes in ({"EVAL_SAMPLES": 0}, {"EVAL_SHARE": 0}, {"EVAL_DATA": "data/tes_heldout_compact.csv"}):
        assert not banner.data_warnings(tiny_run(**{"EVAL_SAMPLES": 8, "DATA": good_csv} | changes))
    mistyped = tiny_run(EVAL_SAMPLES=8, DATA=good_csv, EVAL_DATA="gone.csv")
    assert "no file matches" in only(mistyped.problems) and not banner.data_warnings(mistyped), "one fault, one remedy"
    rows = [[RENDERED.format(text), 0, 1] for text in ("question 3", "question 3", "question 7", "another")]
    other = write_csv(tmp_path / "other.csv", HEADER, rows)
    warning = only(banner.data_warnings(tiny_run(EVAL_SAMPLES=8, DATA=good_csv, EVAL_DATA=other)))
    assert warning.startswith("2 of 3 held-out prompts are in DATA as well")
    swapped = {"DATA": "data/tes_heldout_compact.csv", "EVAL_DATA": "data/tes_train_compact.csv"}
    warning = only(banner.data_warnings(tiny_run(EVAL_SAMPLES=8, **swapped, EVAL_PROFILE="data/profile_heldout.csv")))
    assert warning.startswith("15 of 15 simulated days, such as 2025-09-01, are in DATA as well")


def test_the_tiny_models_fifth_action_is_never_answered(tiny_run, tmp_path):
    """And an answer that MAX_COMPLETION_LEN cuts can never be written whole."""
    header = ["prompt", *(f"reward_action_{k}" for k in range(5))]
    data = write_csv(tmp_path / "five.csv", header, [["Which?", 0, 0.1, 0.2, 0.3, 1]])
    warnings = tiny_run(DATA=data, MAX_COMPLETION_LEN=6).warnings
    assert "MODEL_ID=tiny: it answers [0] to [3] alone, and rows have up to 5 actions" in warnings[0]
    assert "MAX_COMPLETION_LEN=6: the answers of 1 of 1 rows have more tokens" in warnings[1] and len(warnings) == 2
    assert not tiny_run().warnings


def test_the_plan_says_which_rows_are_held_out_and_names_no_plant_where_there_is_none(tiny_run, tmp_path):
    rows = [["x" * n, n / 50, 1 - n / 50] for n in range(1, 41)]
    path = write_csv(tmp_path / "forty.csv", ["question", *HEADER[1:]], rows)
    resolved = tiny_run(DATA=path, EVAL_SAMPLES=8)
    facts = dict(banner.run_lines(resolved))
    assert not resolved.problems and (len(resolved.rows), len(resolved.eval_rows)) == (34, 6)
    assert facts["data"] == "34 training rows, 6 held-out rows"
    assert facts["held out"].startswith("6 rows of DATA are not trained on: 6 of its 40 prompts")
    assert resolved.best_by == "reward" and "plant" not in banner.banner(resolved)
    assert dict(banner.run_lines(tiny_run(DATA=path)))["evaluation"] == "none: EVAL_SAMPLES=0"


def test_rows_of_the_plant_need_a_profile_for_the_closed_loop(tiny_run, tmp_path):
    """With the user's own rows one line says how to switch it on; the demo's rows come with its days."""
    own, profile = tmp_path / "own.csv", "data/profile_heldout.csv"
    shutil.copy(ROOT / "data/tes_heldout_compact.csv", own)
    resolved = tiny_run(EVAL_SAMPLES=8, EVAL_DATA=own)
    assert dict(banner.run_lines(resolved))["closed loop"].startswith("off: set EVAL_PROFILE to the hourly profile")
    refused = tiny_run(EVAL_SAMPLES=8, EVAL_DATA=own, BEST_BY="plant")
    assert "BEST_BY: the closed loop does not run (set EVAL_PROFILE" in only(refused.problems)
    assert tiny_run(EVAL_SAMPLES=8, EVAL_DATA=own, EVAL_PROFILE=profile).best_by == "plant"
    assert " windows of profile_heldout.csv, " in banner.banner(tiny_run(EVAL_SAMPLES=8))


def test_a_profile_that_nothing_reads_is_a_problem(tiny_run, good_csv):
    """It was passed over in silence, even if mistyped, beside rows that are none of the plant's."""
    own = functools.partial(tiny_run, DATA=good_csv, EVAL_DATA=good_csv, EVAL_SAMPLES=8)
    for task, words in (("tes", "no held-out prompts are those of the plant"), ("gsm8k", "the task has no simulator")):
        problem = only(own(TASK=task, REWARDS="action", EVAL_PROFILE="data/profile_hedlout.csv").problems)
        assert problem.startswith("EVAL_PROFILE: it has no effect: the closed loop does not run (" + words)
    for harmless in ({"EVAL_PROFILE": " "}, {"EVAL_PROFILE": "auto"}, {"EVAL_PROFILE": "x", "EVAL_SAMPLES": 0}):
        assert not own(**harmless).problems
    assert "no file matches" in only(tiny_run(EVAL_SAMPLES=8, EVAL_PROFILE="none.csv").problems), "said once"


def test_garbage_that_pays_is_refused_or_warned_of_where_it_was_set(tiny_run):
    assert only(tiny_run(REWARDS="action=-1").problems).startswith("REWARDS: an unreadable answer earns")
    warned = tiny_run(REWARDS="action", INVALID_REWARD=0.5)
    warning = "INVALID_REWARD=0.5: an unreadable answer earns 0.5 on average (action 0.5)"
    assert not warned.problems and f"\n| {warning}" in banner.banner(warned)


def test_a_home_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """PyTorch would end with a traceback while it is imported."""
    monkeypatch.setenv("HOME", "/proc/nobody")
    problems = Problems()
    checks.check_disk(Settings(OUTPUT_DIR=str(tmp_path / "run"), MODEL_ID="tiny"), ModelFiles(None, {}), 0.1, problems)
    assert only(problems).startswith("HOME=/proc/nobody: the caches of PyTorch, Triton and the Hub's library ")
