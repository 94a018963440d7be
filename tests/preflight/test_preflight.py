# SPDX-License-Identifier: Apache-2.0
"""Preflight: choices, memory plan, machine, packages, run directory. Run: python -m pytest tests/test_preflight.py"""

from __future__ import annotations

import csv
import dataclasses
import doctest
import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import CLEAN, RENDERED, ROOT, run_script, write_csv
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from machines import CPU, GOOD_VERSIONS, H100, package_problems
from peft import LoraConfig

import train_grpo
from grpo.data.files import Row, data_fingerprint, read_csv
from grpo.data.scoring import check_rewards, reward_callable
from grpo.model.load import load_model
from grpo.preflight import checks
from grpo.preflight.checks import banner, check_machine, check_settings, preflight
from grpo.preflight.choices import (
    HUB_FLASH,
    attention_warning,
    choose_attention,
    choose_epsilon_high,
    choose_experts,
    choose_packing,
    hub_kernel_doubt,
)
from grpo.preflight.hub import REAL_CONFIG, REAL_MODEL, ModelFiles, checkpoint_gib, count_parameters, find_model
from grpo.preflight.machine import (
    GIB,
    TESTED,
    cgroup_free,
    check_trackers,
    installed_versions,
    read_machine,
    version_key,
    wandb_can_start,
)
from grpo.preflight.memory import ASLEEP_GIB, PASS_TOKENS, find_limits, misfit, pass_tokens, plan_memory
from grpo.run.folder import CHECKPOINT_FILES, COMPLETE, inspect_run, lock_run, prepare_run, retire_checkpoint
from grpo.run.logs import CsvLog, banner_text, parse_rate_warning, trim_csv
from grpo.settings import Problems, Settings


def only(problems):
    assert len(problems) == 1, problems
    return problems[0]


# ---- Choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "gpus", "capability", "installed", "chosen"),
    [
        ("auto", 0, 0.0, (), "eager"),
        ("auto", 0, 0.0, ("flash-attn-3", "flash-attn-4"), "eager"),
        ("auto", 1, 9.0, (), "torch_flash"),
        ("auto", 1, 9.0, ("flash-attn", "flash-attn-4"), "torch_flash"),
        ("auto", 1, 9.0, ("flash-attn-3",), "flash_attention_3"),
        ("auto", 1, 8.9, ("flash-attn-3",), "torch_flash"),
        ("auto", 1, 10.0, ("flash-attn-3",), "torch_flash"),
        ("auto", 1, 10.0, ("flash-attn-3", "flash-attn-4"), "flash_attention_4"),
        ("flex_attention", 1, 9.0, ("flash-attn-3",), "flex_attention"),
    ],
)
def test_attention_choice_says_why(requested, gpus, capability, installed, chosen):
    attention, reason = choose_attention(requested, gpus, capability, installed)
    assert attention == chosen and len(reason) > 10
    assert (reason == "set by ATTN_IMPL") is (requested != "auto")
    assert attention_warning(attention) is None


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("kernels-community/vllm-flash-attn3", ["forward pass takes", "backward pass is not known to handle"]),
        ("kernels-community/flash-attn2", ["loads kernels-community/vllm-flash-attn3 in its place", "not known"]),
        ("kernels-community/vllm-flash-attn3@v1", ["loads kernels-community/vllm-flash-attn3 in its place"]),
        ("kernels-community/metal-flash-sdpa", ["neither its forward nor its backward pass is known"]),
        ("someone/sink-attention", ["neither its forward nor its backward pass is known"]),
    ],
)
def test_hub_kernels_pass_with_what_is_not_known(kernel, words):
    attention, reason = choose_attention(kernel, 1, 9.0, ())
    assert attention == kernel and reason.startswith("set by ATTN_IMPL; ") and "sinks" in reason
    assert all(word in reason for word in words), reason
    warning = attention_warning(kernel)
    assert f"ATTN_IMPL={kernel}" in warning and "may be wrong" in warning and "ATTN_IMPL=torch_flash" in warning


def test_transformers_still_exchanges_hub_kernels_as_the_doubt_says(monkeypatch):
    """For a gpt-oss it takes any name with `flash` in it for its first compatible one, and no other."""
    from transformers import GptOssForCausalLM, modeling_utils

    assert GptOssForCausalLM._compatible_flash_implementations == [
        HUB_FLASH[0], "flash_attention_4", HUB_FLASH[1]]  # fmt: skip
    loaded = []
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda name, **more: loaded.append(name))
    model = GptOssForCausalLM.__new__(GptOssForCausalLM)
    asked = ("kernels-community/flash-attn2", *HUB_FLASH, "someone/sink-attention")
    for name in asked:
        GptOssForCausalLM._check_and_adjust_attn_implementation(model, name)
    assert loaded == [HUB_FLASH[0], *asked[1:]]
    for name, taken in zip(asked, loaded, strict=True):
        assert ("in its place" in hub_kernel_doubt(name)) is (name != taken)


@pytest.mark.parametrize(
    ("requested", "attention", "gpus", "chosen"),
    [
        (None, "torch_flash", 1, "prefix"),
        (None, "flex_attention", 1, "prefix"),
        (None, "eager", 0, "prefix"),
        (None, "eager", 1, "none"),
        (None, "kernels-community/vllm-flash-attn3", 1, "none"),
        ("none", "torch_flash", 1, "none"),
        ("prefix", "eager", 1, "prefix"),
    ],
)
def test_packing_choice(requested, attention, gpus, chosen):
    packing, reason = choose_packing(requested, attention, gpus)
    assert packing == chosen and (reason == "set by PACKING") is (requested is not None)


def test_experts_choice():
    """BF16 where it fits with passes and cache as large as with packed experts."""
    wide, packed = plan(), plan_with(experts="mxfp4")
    assert packed.weights == pytest.approx(wide.weights - 24 * 32 * 3 * 2880**2 * (2 - 4.25 / 8) / GIB
                                           + 32 * 3 * 2880**2 * 2 / GIB)  # fmt: skip
    choose = choose_experts
    same = dataclasses.replace(packed, micro_batch=wide.micro_batch)
    assert choose(None, True, wide, same, 79.0)[0] == "bf16"
    assert choose(None, True, wide, same, wide.peak - 1)[0] == "mxfp4"
    larger = dataclasses.replace(packed, micro_batch=wide.micro_batch + 1)
    kind, reason = choose(None, True, wide, larger, 79.0)
    assert kind == "mxfp4" and f"passes of {wide.micro_batch}" in reason
    assert choose(None, False, wide, larger, 1.0)[0] == "bf16"
    assert choose("bf16", True, wide, larger, 1.0) == ("bf16", "as EXPERTS says")


def test_clip_range_choice():
    assert choose_epsilon_high(Settings(EPSILON=0.1))[0] == 0.1
    assert choose_epsilon_high(Settings(EPSILON_HIGH=0.3))[0] == 0.3
    assert choose_epsilon_high(Settings(LOSS_TYPE="cispo"))[0] == 5.0


def test_parameter_count_of_the_real_model():
    """20.9 billion parameters, as the model card says; 38.96 GiB in BF16, as measured on a GPU."""
    counts = count_parameters(REAL_CONFIG)
    assert counts["total"] == 20_914_757_184
    assert counts["total"] * 2 / GIB == pytest.approx(38.96, abs=0.01)
    assert sum(counts[k] for k in ("experts", "attention", "embeddings")) < counts["total"]


def test_parameter_count_is_transformers_own(tiny):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny))
    assert count_parameters(config)["total"] == model.num_parameters()


def plan(machine=H100, prompt_len=940, **changes):
    return plan_memory(Settings(**changes), REAL_CONFIG, machine, prompt_len, "eager")


def plan_with(machine=H100, prompt_len=940, **options):
    return plan_memory(Settings(), REAL_CONFIG, machine, prompt_len, "torch_flash", **options)


def test_default_run_fits_an_80_gb_gpu():
    chosen = plan()
    assert chosen.peak < H100.gpu_free and chosen.weights == pytest.approx(38.96, abs=0.01)
    assert 96 % chosen.micro_batch == 0 and 96 % chosen.generation_batch == 0
    assert "96" in chosen.micro_batch_reason and "79.0 GiB" in chosen.micro_batch_reason


def test_plan_obeys_and_grows():
    assert plan(MICRO_BATCH=2).micro_batch == 2 and plan(MICRO_BATCH=2).micro_batch_reason == "set by MICRO_BATCH"
    assert plan(MICRO_BATCH=4).learning > plan(MICRO_BATCH=2).learning
    assert plan(MAX_COMPLETION_LEN=512).micro_batch >= plan(MAX_COMPLETION_LEN=4000).micro_batch
    assert plan(GRADIENT_CHECKPOINTING=False, MICRO_BATCH=1).learning > 2 * plan(MICRO_BATCH=1).learning
    small = plan(dataclasses.replace(H100, gpu_free=45.0))
    assert small.micro_batch <= plan().micro_batch and small.generation_batch < plan().generation_batch


def test_a_pass_is_as_large_as_pays():
    """By the tokens that it really computes: short completions of shared prompts go through together."""
    for length in (24, 512, 4000):
        for packing in ("prefix", "none"):
            settings = Settings(PROMPTS_PER_STEP=32, NUM_GENERATIONS=8, MAX_COMPLETION_LEN=length)
            arguments = settings, REAL_CONFIG, dataclasses.replace(H100, gpu_free=2000.0), 940, "torch_flash"
            chosen = plan_memory(*arguments, packing=packing).micro_batch
            share = packing == "prefix"
            assert pass_tokens(settings, chosen, 940, share) <= PASS_TOKENS
            larger = 2 * chosen  # 256 has no other divisors
            assert larger > 256 or pass_tokens(settings, larger, 940, share) > PASS_TOKENS
            assert chosen == {24: 256, 512: 64, 4000: 8}[length] or not share


@given(st.integers(1, 30), st.integers(2, 16), st.floats(1, 200))
def test_planned_batches_always_divide(prompts, generations, free):
    machine = dataclasses.replace(H100, gpu_free=free)
    chosen = plan(machine, PROMPTS_PER_STEP=prompts, NUM_GENERATIONS=generations)
    assert prompts * generations % chosen.micro_batch == 0
    assert prompts * generations % chosen.generation_batch == 0


def test_lora_size_is_pefts_own(tiny):
    from peft import get_peft_model

    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    settings = Settings(MODEL_ID="tiny", LORA_R=3)
    model = get_peft_model(load_model(str(tiny), config, "eager"), LoraConfig(**train_grpo.lora_options(settings)))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapter = plan_memory(settings, config, CPU, 100, "eager").adapter
    assert adapter * GIB == pytest.approx(trainable * 16)


# ---- The largest values that fit -------------------------------------------------------------------------------------


def plans_of(kinds, config=REAL_CONFIG, machine=H100, prompt_len=940, checkpoint=None, attention="torch_flash"):
    packing = choose_packing(None, attention, 1)[0]
    return lambda changed: [
        plan_memory(changed, config, machine, prompt_len, attention, checkpoint, packing, kind) for kind in kinds
    ]


def accepted(settings, plans, machine):
    """As the preflight decides: the experts' choice, then the check of the machine."""
    two = plans(settings)
    kind = choose_experts(None, len(two) > 1, two[0], two[-1], machine.gpu_free)[0]
    problems = Problems()
    files = ModelFiles(None, dict(REAL_CONFIG))
    plan = two[-1] if kind == "mxfp4" else two[0]
    check_machine(settings, files, machine, plan, problems, lambda changed, machine: plans(changed)[-1])
    return not [p for p in problems if p.startswith(("GPU ", "VLLM_GPU_MEM", "MAX_COMPLETION_LEN"))]


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    free=st.floats(14, 140), micro=st.sampled_from([None, 1, 7, 96]), length=st.sampled_from([64, 4000, 20_000]),
    kinds=st.sampled_from([["bf16"], ["mxfp4"], ["bf16", "mxfp4"]]), checkpoint=st.sampled_from([None, 13.8]),
    attention=st.sampled_from(["torch_flash", "eager"]), share=st.sampled_from([None, 0.3]),
    generation=st.sampled_from([None, 24]), prompt_len=st.integers(1, 3000),
)  # fmt: skip
def test_the_largest_values_fit_are_accepted_and_the_next_do_not(
    free, micro, length, kinds, checkpoint, attention, share, generation, prompt_len
):
    machine = dataclasses.replace(H100, gpu_free=free)
    settings = Settings(MICRO_BATCH=micro, MAX_COMPLETION_LEN=length, VLLM_GPU_MEM=share, GENERATION_BATCH=generation)
    plans = plans_of(kinds, machine=machine, prompt_len=prompt_len, checkpoint=checkpoint, attention=attention)
    limits = find_limits(settings, REAL_CONFIG, machine, prompt_len, lambda s: plans(s)[-1])
    for name, most, (value, reason) in zip(
        ("MAX_COMPLETION_LEN", "MICRO_BATCH"), (131072 - prompt_len, 96), limits, strict=True
    ):
        assert 0 <= value <= most and reason
        fits = {
            n: any(not misfit(plan, machine) for plan in plans(dataclasses.replace(settings, **{name: n})))
            for n in (1, value // 2, value, value + 1, value + 50, 2 * value + 1)
            if 1 <= n <= most
        }
        assert fits == {n: n <= value for n in fits}, "fits up to the named value and not beyond"
        if value:
            assert accepted(dataclasses.replace(settings, **{name: value}), plans, machine)
        assert f"with {value + 1} " in reason or value in (0, most)


def test_what_limits_a_completion():
    """Memory, one completion in vLLM's cache, or the positions of the model; and MICRO_BATCH=auto shrinks for it."""

    def find(free, kind="bf16", checkpoint=None, **changes):
        machine = dataclasses.replace(H100, gpu_free=free)
        plans = plans_of([kind], machine=machine, checkpoint=checkpoint)
        return find_limits(Settings(**changes), REAL_CONFIG, machine, 940, lambda s: plans(s)[0])

    (length, reason), _ = find(79.0)
    assert length > 60_000 and "learning in passes of 1 would need" in reason and reason.endswith("free are 71.1")
    fixed, reason = find(79.0, MICRO_BATCH=8)[0]
    assert 8 * 940 < fixed < length / 4 and "passes of 8" in reason
    (length, reason), (size, whole) = find(139.0, "mxfp4", MAX_COMPLETION_LEN=100)
    assert (length, size) == (131072 - 940, 96) and "the model has 131072 positions" in reason
    assert whole == ", the whole step"
    (length, reason), _ = find(79.0, checkpoint=13.8, VLLM_GPU_MEM=0.212)
    assert 0 < length < 131072 - 940 and "one completion may need" in reason
    (length, why), (size, reason) = find(30.0)
    assert (length, size) == (0, 0) and why.startswith(": learning in passes of 1") and reason.startswith(": learning")


def test_while_learning_the_sleeping_engine_takes_its_part():
    chosen = plans_of(["bf16"], checkpoint=13.8)(Settings(MICRO_BATCH=24))[0]
    assert chosen.learning_peak == pytest.approx(chosen.weights + chosen.adapter + chosen.learning + ASLEEP_GIB)
    assert chosen.peak == chosen.learning_peak > chosen.rollout_peak


@pytest.fixture
def real_size(tiny, tmp_path, claimed_gpu):
    """Settings for a checkpoint of the real size, without its weights, on a machine whose nvidia-smi shows an H100."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny / name).exists():
            (folder / name).write_bytes((tiny / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(REAL_CONFIG))
    (folder / "model.safetensors").touch()
    return {
        "MODEL_ID": folder, "DATA": "data/tes_train_compact.csv", "EVAL_SAMPLES": 0, "USE_VLLM": 0,
        "OUTPUT_DIR": tmp_path / "run", "IGNORE_VARS": "", **claimed_gpu,
    }  # fmt: skip


def printed(done, title):
    return [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.split()[:1] == [title]]


def test_check_names_the_largest_values(real_size):
    done = run_script("--check", **real_size)
    assert done.returncode == 0, done.stdout + done.stderr
    # By hand: 76 tokens of prompt; a bucket holds 81,920 tokens and the next one 90,112. A token takes 2 x 2,880 x 24 bytes
    # of kept states and 248,320 of one layer's backward pass, so 90,112 of them 32.4 GiB beside 39.1 of everything else.
    assert printed(done, "largest") == [
        "MAX_COMPLETION_LEN=81844; with 81845 learning in passes of 1 would need 71.5 GiB, 90% of what is free are 71.1",
        "MICRO_BATCH=20; with 21 learning in passes of 21 would need 71.5 GiB, 90% of what is free are 71.1",
    ]
    auto, packed = (printed(run_script("--check", **real_size, EXPERTS=kind), "largest") for kind in ("auto", "mxfp4"))
    assert auto == packed != printed(done, "largest"), "with EXPERTS=auto the experts may be packed to make room"
    done = run_script("--check", **real_size, MICRO_BATCH=60)
    assert done.returncode == 2, done.stdout
    assert "With all else as set, MAX_COMPLETION_LEN=" in done.stderr and " or MICRO_BATCH=" in done.stderr
    fits = done.stderr.split("With all else as set, ")[1].split(" fits")[0].split(" or ")
    for setting in fits:
        name, value = setting.split("=")
        done = run_script("--check", **real_size | {"MICRO_BATCH": 60, name: value})
        assert done.returncode == 0 and f"{setting};" in done.stdout, done.stdout + done.stderr
    done = run_script("--check", **real_size, MAX_COMPLETION_LEN=131072)
    assert "are more than the model's 131072 positions. Set it to" in done.stderr


def test_a_cpu_has_no_limits_to_name(tiny):
    environ = {"MODEL_ID": "tiny", "EVAL_SAMPLES": "0"}
    check = preflight(CLEAN | environ, CPU)
    assert check.plan.largest_length is check.plan.largest_micro_batch is None
    assert "largest " not in [line.split()[0] for line in banner(check).splitlines() if line.split()]


def test_check_warns_of_a_hub_kernel(real_size, tmp_path):
    kernel = "kernels-community/vllm-flash-attn3"
    done = run_script("--check", **real_size, ATTN_IMPL=kernel)
    assert done.returncode == 2 and f"{kernel} is loaded by the kernels package, which is not installed" in done.stderr
    (tmp_path / "site" / "kernels-0.16.2.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "kernels-0.16.2.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.16.2\n")
    done = run_script("--check", **real_size, ATTN_IMPL=kernel, PYTHONPATH=tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {attention_warning(kernel)} |" in done.stdout
    assert "backward pass is not known to handle" in only(printed(done, "attention"))
    assert "its gradients may be wrong" not in run_script("--check", **real_size).stdout


# ---- Settings against each other and the machine ---------------------------------------------------------------------

CONFLICTS = [
    ({"GENERATION_BATCH": 5}, CPU, ["GENERATION_BATCH: 5 does not divide", "12 x 8 = 96", "nearest that does is 4"]),
    ({"ATTN_IMPL": "flex"}, H100, ["'flex' is unknown", "flex_attention"]),
    ({"ATTN_IMPL": "flex_attention"}, CPU, ["needs a GPU"]),
    ({"ATTN_IMPL": "torch_flash"}, CPU, ["needs a GPU"]),
    ({"ATTN_IMPL": "flash_attention_3"}, dataclasses.replace(H100, capability=8.0), ["made for Hopper"]),
    ({"ATTN_IMPL": "org/kernel", "PACKING": "prefix"}, H100, ["PACKING: org/kernel takes padded rows only"]),
    ({}, dataclasses.replace(H100, capability=7.5), ["GPU: ", "compute capability 7.5"]),
    ({"LORA_TARGETS": "q_proj, v_porj"}, CPU, ["'v_porj' is no linear module", "nearest is v_proj"]),
    ({"LORA_TARGETS": "q_proj,all-linear"}, CPU, ["'all-linear' is no linear module"]),
    ({"LORA_TARGETS": ","}, CPU, ["names no module"]),
    ({"LOSS_TYPE": "luspo"}, CPU, ["LOSS_IMPL=trl"]),
    ({"WARMUP_STEPS": 100}, CPU, ["rise over 100 steps, the run has 100"]),
    ({"TEMPERATURE": 0.005}, H100, ["no colder than 0.01", "USE_VLLM=0"]),
    ({"ROLLOUT_SYNC": "lora", "LORA_R": 513}, H100, ["rank 512 at most", "ROLLOUT_SYNC=merge"]),
    ({"USE_VLLM": True}, CPU, ["needs a GPU"]),
    ({}, dataclasses.replace(H100, gpus=2), ["2 GPUs are visible", "CUDA_VISIBLE_DEVICES=0"]),
]


@pytest.mark.parametrize(("changes", "machine", "messages"), CONFLICTS, ids=lambda v: str(v)[:40])
def test_conflicts(changes, machine, messages):
    problems = Problems()
    check_settings(Settings(**changes), None, machine, problems)
    for message in messages:
        assert message in only(problems)


def test_trackers_are_known_and_installed(monkeypatch):
    problems = Problems()
    check_trackers(Settings(REPORT_TO="mlflow"), {}, problems)
    assert "'mlflow' is unknown" in only(problems)
    monkeypatch.setattr("grpo.preflight.machine.installed_versions", dict.fromkeys)
    problems = Problems()
    check_trackers(Settings(REPORT_TO="tensorboard, none"), {}, problems)
    assert "tensorboard is not installed" in only(problems)


def test_wandb_is_logged_in_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.preflight.machine.installed_versions", lambda names: dict.fromkeys(names, "1"))
    home = {"HOME": str(tmp_path)}
    problems = Problems()
    check_trackers(Settings(REPORT_TO="trackio,wandb"), home, problems)
    assert "wandb has no API key" in only(problems) and "WANDB_MODE=offline" in only(problems)
    for variable in ({"WANDB_API_KEY": "k"}, {"WANDB_MODE": "offline"}, {"WANDB_DISABLED": "true"}):
        assert wandb_can_start(home | variable)
    assert not wandb_can_start(home | {"WANDB_MODE": "online"})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_can_start(home)
    assert not wandb_can_start(home | {"WANDB_BASE_URL": "https://wandb.example.org/"})
    assert not wandb_can_start(home | {"NETRC": str(tmp_path / "none")})
    (tmp_path / ".netrc").write_text("machine\n")  # torn
    assert not wandb_can_start(home)


def test_lora_targets_that_exist():
    for targets in ("all-linear", " all-linear ", "q_proj", "q_proj, o_proj"):
        problems = Problems()
        check_settings(Settings(LORA_TARGETS=targets), None, CPU, problems)
        assert not problems


def test_vllm_is_accepted_for_an_mxfp4_checkpoint():
    problems = Problems()
    check_settings(Settings(USE_VLLM=True), REAL_CONFIG, H100, problems)
    assert not problems


def machine_problems(machine, **changes):
    problems = Problems()
    settings = Settings(**changes)
    files = ModelFiles(Path("/nowhere"), dict(REAL_CONFIG))
    planned = lambda settings, machine: plan_memory(settings, REAL_CONFIG, machine, 940, "eager")  # noqa: E731
    check_machine(settings, files, machine, planned(settings, machine), problems, planned)
    return [p for p in problems if not p.startswith("HF_HOME")]


def test_machine(tmp_path, monkeypatch):
    out = str(tmp_path / "run")
    assert not machine_problems(H100, OUTPUT_DIR=out)
    assert "no GPU is visible" in only(machine_problems(CPU, OUTPUT_DIR=out))
    assert "MODEL_ID=tiny" in only(machine_problems(CPU, OUTPUT_DIR=out))
    small = dataclasses.replace(H100, gpu="NVIDIA L4", gpu_total=22.5, gpu_free=22.0)
    problem = only(machine_problems(small, OUTPUT_DIR=out))
    assert "GPU NVIDIA L4" in problem and "22 of 22 GiB are free" in problem and "rent a larger GPU" in problem
    bare = dataclasses.replace(H100, compiler="")
    assert "C compiler: there is none" in only(machine_problems(bare, OUTPUT_DIR=out))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20})())
    assert f"OUTPUT_DIR={out}" in only(machine_problems(H100, OUTPUT_DIR=out))


def test_the_compiler_is_the_one_that_triton_takes(monkeypatch):
    for found, compiler in ((("clang", "cc", "tcc"), "clang"), (("gcc", "clang"), "gcc"), ((), "")):
        monkeypatch.setattr(shutil, "which", lambda name, found=found: name if name in found else None)
        monkeypatch.delenv("CC", raising=False)
        assert read_machine().compiler == compiler
        monkeypatch.setenv("CC", "tcc")
        assert read_machine().compiler == ("tcc" if "tcc" in found else "")


def test_a_container_has_the_memory_of_its_limit(tmp_path):
    assert cgroup_free(tmp_path) == math.inf
    for name, text in (("memory.max", "max"), ("memory.current", f"{3 * 2**30}"), ("memory.stat", f"anon 5\ninactive_file {2**30}")):  # fmt: skip
        (tmp_path / name).write_text(text + "\n")
    assert cgroup_free(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text(f"{10 * 2**30}\n")
    assert cgroup_free(tmp_path) == 8.0
    (tmp_path / "memory.max").unlink()
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text(f"{4 * 2**30}\n")
    (old / "memory.usage_in_bytes").write_text(f"{3 * 2**30}\n")
    (old / "memory.stat").write_text("total_inactive_file 0\n")
    assert cgroup_free(tmp_path) == 1.0


def test_missing_download_space_names_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5 * 2**30})())
    problems = Problems()
    plan = plan_memory(Settings(), REAL_CONFIG, H100, 940, "eager")
    check_machine(Settings(OUTPUT_DIR=str(tmp_path / "r")), ModelFiles(None, {}), H100, plan, problems, None)
    assert f"HF_HOME={tmp_path / 'hf'}" in only(problems) and "12.9 GiB" in only(problems)
    # A download that broke off: what is there does not have to come again.
    (tmp_path / "model-00000.safetensors").write_bytes(b"")
    os.truncate(tmp_path / "model-00000.safetensors", 5 * 2**30)
    problems = Problems()
    files = ModelFiles(tmp_path, {})
    check_machine(Settings(OUTPUT_DIR=str(tmp_path / "r")), files, H100, plan, problems, None)
    assert "7.9 GiB" in only(problems)
    assert checkpoint_gib(REAL_MODEL, files) == 12.9
    assert checkpoint_gib("mine", files) == 5.0
    os.truncate(tmp_path / "model-00000.safetensors", 13_761_264_768)
    problems = Problems()
    check_machine(Settings(OUTPUT_DIR=str(tmp_path / "r")), files, H100, plan, problems, None)
    assert not problems


# ---- Packages --------------------------------------------------------------------------------------------------------


def test_packed_experts_need_a_checkpoint_that_has_them():
    problems, config = Problems(), {k: v for k, v in REAL_CONFIG.items() if k != "quantization_config"}
    check_settings(Settings(EXPERTS="mxfp4"), config, CPU, problems)
    assert "has no MXFP4 experts" in only(problems)


def test_packages():
    assert not package_problems(GOOD_VERSIONS)
    assert "trl: the package is not installed" in only(package_problems(GOOD_VERSIONS | {"trl": None}))
    for version in ("1.15.9", "1.17.0"):
        problem = only(package_problems(GOOD_VERSIONS | {"trl": version}))
        assert f"trl: version {version} is outside the tested range (from 1.16, below 1.17)" in problem
        assert not package_problems(GOOD_VERSIONS | {"trl": version}, ALLOW_UNTESTED=True)
    assert not package_problems(GOOD_VERSIONS | {"torch": "2.11.0+cu130"})
    for name in ("flash_attention_2", "flash_attention_3", "flash_attention_4"):
        problem = only(package_problems(GOOD_VERSIONS, ATTN_IMPL=name))
        assert "is not installed" in problem and "docs/install.md" in problem


def test_this_environment_is_inside_the_tested_range():
    assert not package_problems(installed_versions(TESTED))


# ---- Reward functions ------------------------------------------------------------------------------------------------

ROW = Row("d.csv", 1, (("user", "x"),), (0.0, 1.0), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actoin", "nearest: action"),
        ("action=high", "weight 'high' of 'action' is not a number"),
        ("action=inf", "not finite"),
        ("", "no reward function"),
        ("action,action=2", "named twice"),
        ("nowhere:score", "cannot be loaded: ModuleNotFoundError"),
        ("my_broken:score", "SyntaxError"),
        ("my_rewards:scroe", "AttributeError"),
        ("my_rewards:NUMBER", "is no function"),
    ],
)
def test_bad_rewards(text, message, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("NUMBER = 3\n\ndef score(completions, **columns):\n    return [0.0]\n")
    (tmp_path / "my_broken.py").write_text("def score(:\n")
    monkeypatch.chdir(tmp_path)
    problems = Problems()
    check_rewards(Settings(REWARDS=text), [ROW], problems)
    assert message in only(problems) and only(problems).startswith("REWARDS")


def test_rewards_of_ones_own_need_no_columns(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(
        "def score(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    bare, problems = dataclasses.replace(ROW, rewards=()), Problems()
    assert check_rewards(Settings(REWARDS="own_rewards:score=2,format"), [bare], problems) == [
        ("own_rewards:score", 2.0),
        ("format", 1.0),
    ]
    assert not problems
    check_rewards(Settings(), [bare], problems)
    assert "d.csv, columns: there is no column reward_action_0" in only(problems) and "should" not in only(problems)
    problems.clear()
    named = dataclasses.replace(bare, columns={"user": "x", "Reward_Action_0": "1", "Reward_Action_1": "0"})
    check_rewards(Settings(), [named], problems)
    assert "(should 'Reward_Action_0' be `reward_action_0`?)" in only(problems)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("PROMPT,reward_action_0,reward_action_1", "(should 'PROMPT' be `prompt`?)"),
        ("user,reward_action_0,Reward Action 1", "(should 'Reward Action 1' be `reward_action_1`?)"),
        ("user,reward_action_0,reward_action_2,reward-action-1", "(should 'reward-action-1' be `reward_action_1`?)"),
        ("user,reward_action_0,reward_action_2", "beside reward_action_0, reward_action_2. Number"),
    ],
)
def test_the_column_that_was_meant_is_named(tmp_path, header, message):
    (tmp_path / "d.csv").write_text(f"{header}\n{'x,' * header.count(',')}1\n")
    problems = Problems()
    read_csv(tmp_path / "d.csv", problems)
    assert message in only(problems)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PK\x03\x04\x14\0\x06\0[Content_Types].xml", "an Excel workbook"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Excel workbook (.xls)"),
        ("user,reward_action_0,reward_action_1\nx,1,2\n".encode("utf-16"), "text in UTF-16"),
        ("\ufeffuser,reward_action_0,reward_action_1\nx,1,2\n".encode("utf-16-be"), "text in UTF-16"),
    ],
)
def test_files_that_are_no_csv_are_called_by_their_name(tmp_path, content, kind):
    (tmp_path / "d.csv").write_bytes(content)
    problems = Problems()
    assert not read_csv(tmp_path / "d.csv", problems)
    assert f"d.csv: it is {kind}" in only(problems) and "save it as 'CSV UTF-8'" in only(problems)


def test_rows_that_teach_nothing(tmp_path):
    """Every action pays the same: a problem where all rows are like that, as long as nothing else is rewarded."""
    flat = dataclasses.replace(ROW, rewards=(0.5, 0.5))

    def problems(text, *rows):
        found = Problems()
        check_rewards(Settings(REWARDS=text), rows, found)
        return found

    for text in ("action", "best", "action=2,best"):
        assert "every row pays all its actions the same" in only(problems(text, flat, flat))
        assert not problems(text, flat, flat, ROW)
    assert not problems("action,format", flat)
    assert not problems("format", flat)


# ---- Warnings --------------------------------------------------------------------------------------------------------


def data_warnings(**environ):
    check = preflight(CLEAN | {"MODEL_ID": "tiny"} | {k: str(v) for k, v in environ.items()}, CPU)
    found = checks.data_warnings(check)
    assert all(banner_text(text) in banner(check) for text in found)
    return found


def test_a_run_is_warned_of_flat_rows(tiny, tmp_path):
    rows = [["first", 0, 1], ["second", 1, 1], ["third", 0.5, 0.5], ["fourth", 1, 0]]
    names = ["user", "reward_action_0", "reward_action_1"]
    half = write_csv(tmp_path / "half.csv", names, rows)
    more = write_csv(tmp_path / "more.csv", names, rows[:3])
    output = {"OUTPUT_DIR": tmp_path / "run", "EVAL_SAMPLES": 0}
    assert not data_warnings(DATA=half, **output)
    assert only(data_warnings(DATA=more, **output)) == (
        f"2 of 3 rows pay all their actions the same and teach nothing; the first is {more}, row 2"
    )
    assert not data_warnings(DATA=more, REWARDS="format", **output)


def test_a_run_is_warned_of_an_evaluation_on_the_demos_rows(tiny, tmp_path, good_csv):
    output = {"OUTPUT_DIR": tmp_path / "run"}
    assert not data_warnings(DATA="data/tes_train_compact.csv", **output), "the demo's own rows"
    warning = only(data_warnings(DATA=good_csv, **output))
    assert "Evaluated on the demo's rows and closed loop (data/tes_heldout_compact.csv), nothing held out" in warning
    assert "EVAL_DATA='...'" in warning and "EVAL_SAMPLES=0" in warning
    output["EVAL_PROFILE"] = ""
    assert "closed loop" not in only(data_warnings(DATA=good_csv, **output))
    assert not data_warnings(DATA=good_csv, EVAL_SAMPLES=0, **output)
    assert not data_warnings(DATA=good_csv, EVAL_DATA="data/tes_heldout_compact.csv", **output)


def test_a_run_is_warned_of_held_out_prompts_that_are_trained_on(tiny, tmp_path, good_csv):
    other = write_csv(
        tmp_path / "other.csv",
        ["prompt", "reward_action_0", "reward_action_1"],
        [[RENDERED.format(text), 0, 1] for text in ("question 3", "question 3", "question 7", "another")],
    )
    warning = only(data_warnings(DATA=good_csv, EVAL_DATA=other, OUTPUT_DIR=tmp_path / "run"))
    assert warning.startswith("2 of 3 held-out prompts are in DATA as well")


# ---- Model files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_id", "message"),
    [("./nowhere", "neither a folder nor a Hub id"), ("nowhere", "neither a folder"), ("a/b/c", "neither a folder")],
)
def test_unknown_models(model_id, message):
    problems = Problems()
    assert find_model(model_id, problems) is None
    assert message in only(problems)


def test_folders_that_are_no_gpt_oss(tmp_path):
    problems = Problems()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    find_model(str(tmp_path), problems)
    assert "model_type 'llama'" in only(problems)
    problems.clear()
    (tmp_path / "config.json").write_text("{")
    find_model(str(tmp_path), problems)
    assert "cannot be read" in only(problems)
    problems.clear()
    (tmp_path / "config.json").write_text(json.dumps(REAL_CONFIG))
    find_model(str(tmp_path), problems)
    assert "tokenizer.json is missing" in only(problems)


def test_a_model_of_the_hub_is_taken_from_its_cache(tiny, tmp_path):
    """The layout that huggingface_hub keeps; offline, so that nothing but the cache can answer."""
    repository = tmp_path / "hf" / "hub" / "models--someone--small-gpt-oss"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "0123abc").symlink_to(tiny)
    settings = {
        "HF_HOME": tmp_path / "hf", "MODEL_ID": "someone/small-gpt-oss", "DATA": "data/tes_train_compact.csv",
        "OUTPUT_DIR": tmp_path / "run", "MAX_COMPLETION_LEN": 8, "TOTAL_STEPS": 1, "PROMPTS_PER_STEP": 2,
        "NUM_GENERATIONS": 2, "IGNORE_VARS": "", "EVAL_SAMPLES": 0,
    }  # fmt: skip
    done = run_script(**settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        json.loads((tmp_path / "run" / "adapter_config.json").read_text())["base_model_name_or_path"]
        == "someone/small-gpt-oss"
    )
    done = run_script("--check", **settings | {"MODEL_ID": "someone/other"})
    assert done.returncode == 2 and "someone/other is not in the cache and cannot be fetched" in done.stderr


# ---- Prompts too long, and everything at once ------------------------------------------------------------------------


def test_long_prompts_are_named(tiny, tmp_path):
    rows = [[RENDERED.format("short"), 0, 1], [RENDERED.format("long " * 300), 0, 1]]
    path = write_csv(tmp_path / "long.csv", ["prompt", "reward_action_0", "reward_action_1"], rows)
    environ = {"MODEL_ID": "tiny", "DATA": str(path), "OUTPUT_DIR": str(tmp_path / "run"), "EVAL_SAMPLES": "0"}
    check = preflight(CLEAN | environ | {"PROMPTS_PER_STEP": "2"}, CPU)
    problem = only(check.problems)
    assert f"{path}, row 2: the prompt has" in problem and "MAX_PROMPT_LEN is 256" in problem
    needed = problem.split("MAX_PROMPT_LEN=")[1].rstrip(".")
    assert not preflight(CLEAN | environ | {"MAX_PROMPT_LEN": needed}, CPU).problems
    assert only(preflight(CLEAN | environ | {"MAX_PROMPT_LEN": str(int(needed) - 1)}, CPU).problems)


def test_everything_at_once_exits_2_and_writes_nothing(tmp_path):
    bad = write_csv(tmp_path / "bad.csv", ["prompt", "reward_action_0", "reward_action_1"], [["x", "a", 1]])
    done = run_script(
        MODEL_ID="./nowhere", DATA=f"{bad},{tmp_path}/none.csv", LEARING_RATE=1, SEED="x", GENERATION_BATCH=7, REWARDS="actoin",
        REPORT_TO="mlflow", OUTPUT_DIR=tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 2
    for words in (
        "LEARING_RATE",
        "SEED: 'x'",
        "GENERATION_BATCH: 7",
        "'actoin'",
        "mlflow",
        "./nowhere",
        "none.csv",
        "column reward_action_0: 'a'",
    ):
        assert words in done.stderr, words
    assert "8 problems" in done.stderr and "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.csv"]


def test_the_real_model_without_a_gpu_is_one_clear_answer(tmp_path):
    done = run_script(OUTPUT_DIR=tmp_path / "run", IGNORE_VARS="")
    assert done.returncode == 2
    assert "no GPU is visible, and openai/gpt-oss-20b needs one" in done.stderr and "MODEL_ID=tiny" in done.stderr


# ---- Run directory ---------------------------------------------------------------------------------------------------


def run_dir(tmp_path, **changes):
    """A folder as an interrupted run leaves it, with a whole checkpoint at step 4 and a torn one at step 6."""
    settings = dataclasses.replace(Settings(OUTPUT_DIR=str(tmp_path / "run"), TOTAL_STEPS=8), **changes)
    folder = tmp_path / "run"
    folder.mkdir()
    record = {"settings": dataclasses.asdict(settings), "data_sha256": data_fingerprint([ROW])}
    (folder / "settings.json").write_text(json.dumps(record))
    for step, names in ((2, CHECKPOINT_FILES), (4, CHECKPOINT_FILES), (6, ("optimizer.pt",))):
        (folder / f"checkpoint-{step}").mkdir()
        for name in names:
            (folder / f"checkpoint-{step}" / name).write_text("{}")
    return settings, folder


def inspect(settings, rows=(ROW,)):
    problems = Problems()
    return inspect_run(settings, rows, problems), problems


def test_a_fresh_folder(tmp_path):
    state, problems = inspect(Settings(OUTPUT_DIR=str(tmp_path / "new" / "run")))
    assert not problems and not state.exists and state.checkpoint is None


def test_an_interrupted_run_continues_from_its_last_whole_checkpoint(tmp_path):
    settings, folder = run_dir(tmp_path)
    state, problems = inspect(settings)
    assert not problems and (state.step, state.checkpoint) == (4, folder / "checkpoint-4")
    (folder / "checkpoint-4" / "trainer_state.json").write_text("{")
    assert inspect(settings)[0].step == 2, "a torn state file does not count"


def test_what_may_not_continue(tmp_path):
    settings, folder = run_dir(tmp_path)
    change = dataclasses.replace
    assert "RESUME=never" in only(inspect(change(settings, RESUME="never"))[1])
    assert not inspect(change(settings, TOTAL_STEPS=20, SAVE_STEPS=3))[1], "a longer run is the same run"
    assert "LEARNING_RATE: the run in" in only(inspect(change(settings, LEARNING_RATE=1e-6))[1])
    assert "5e-05" in only(inspect(change(settings, LEARNING_RATE=1e-6))[1])
    assert "started on other rows" in only(inspect(settings, [dataclasses.replace(ROW, rewards=(1.0, 0.0))])[1])
    assert not inspect(change(settings, TOTAL_STEPS=4))[1], (
        "every step, but not the last file: evaluation and zip are owed"
    )
    (folder / COMPLETE).write_text("{}")
    assert "complete (4 of 4 steps)" in only(inspect(change(settings, TOTAL_STEPS=4))[1])
    assert not inspect(change(settings, TOTAL_STEPS=4, OVERWRITE=True))[1]


def test_a_run_that_reached_a_later_step_is_not_cut_short(tmp_path):
    settings, _ = run_dir(tmp_path)
    problem = only(inspect(dataclasses.replace(settings, TOTAL_STEPS=3))[1])
    assert problem.startswith("TOTAL_STEPS: ") and "has 4 steps, more than 3. Set TOTAL_STEPS=4 or higher" in problem


def strip(folder, *steps):
    """What a zip leaves of checkpoints: no optimizer, no scheduler."""
    for step in steps:
        for name in ("optimizer.pt", "scheduler.pt"):
            (folder / f"checkpoint-{step}" / name).unlink()


UNRESUMABLE = [  # what the folder of `run_dir` lost or got, what the problem must name
    ("an unpacked zip of an interrupted run", (2, 4), {"adapter_model.safetensors": ""}, "it holds a trained adapter, but"),
    ("an unpacked zip of a failed run", (2, 4), {}, "it holds the adapter of checkpoint-4, but"),
    ("a complete run whose checkpoints were deleted", None, {"complete.json": '{"steps": 8}'}, "it holds a complete run of 8 steps, but"),
    ("a complete run whose last checkpoint was deleted", (), {"complete.json": '{"steps": 8}'}, "it holds a complete run of 8 steps, but"),
    ("an adapter and nothing else", None, {"adapter_model.safetensors": ""}, "it holds a trained adapter, but"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "lost", "files", "message"), UNRESUMABLE, ids=[case[0] for case in UNRESUMABLE])
def test_a_trained_adapter_that_cannot_be_trained_on_is_not_replaced(tmp_path, reason, lost, files, message):
    settings, folder = run_dir(tmp_path)
    if lost is None:
        for path in folder.glob("checkpoint-*"):
            shutil.rmtree(path)
    else:
        strip(folder, *lost)
    for name, text in files.items():
        (folder / name).write_text(text)
    for changes in ({}, {"TOTAL_STEPS": 20}):
        problem = only(inspect(dataclasses.replace(settings, **changes))[1])
        assert problem.startswith(f"OUTPUT_DIR={folder}: {message}") and "OVERWRITE=1" in problem, reason
        assert f"scripts/evaluate.py --adapter {folder})" in problem and "choose another OUTPUT_DIR" in problem
    assert not inspect(dataclasses.replace(settings, OVERWRITE=True))[1]


def test_what_may_continue_although_an_adapter_is_there(tmp_path):
    settings, folder = run_dir(tmp_path)
    (folder / "adapter_model.safetensors").touch()
    assert not inspect(settings)[1], "interrupted: a whole checkpoint is there as well"
    strip(folder, 4)
    assert not inspect(settings)[1] and inspect(settings)[0].step == 2, "an earlier checkpoint is whole"
    (folder / "complete.json").write_text('{"steps": 2}')
    assert not inspect(settings)[1], "a complete run that is to train on"


def test_a_run_without_a_whole_checkpoint_starts_anew(tmp_path):
    """Killed before its first checkpoint, or while it was written: its state is written last."""
    settings, folder = run_dir(tmp_path)
    for step in (2, 4):
        shutil.rmtree(folder / f"checkpoint-{step}")
    (folder / "checkpoint-6" / "adapter_model.safetensors").touch()
    for _ in range(2):
        state, problems = inspect(settings)
        assert not problems and state.exists and state.step == 0
        (folder / "checkpoint-6" / "trainer_state.json").write_text("{")


def test_no_checkpoint_with_an_adapter_is_deleted(tmp_path):
    settings, folder = run_dir(tmp_path)
    strip(folder, 4)
    (folder / "checkpoint-4-mine").mkdir()
    (folder / "superseded-checkpoint-4").mkdir()
    check = preflight({"MODEL_ID": "./nowhere", "OUTPUT_DIR": str(folder)}, CPU)
    state, problems = inspect(settings)
    prepare_run(dataclasses.replace(check, settings=settings, run=state))
    assert not problems and state.step == 2
    assert sorted(path.name for path in folder.glob("*checkpoint-*")) == [
        "checkpoint-2", "checkpoint-4-mine", "superseded-checkpoint-4", "superseded-checkpoint-4.2",
    ]  # fmt: skip
    assert (folder / "superseded-checkpoint-4.2" / "adapter_model.safetensors").is_file()


def test_the_trainer_leaves_what_was_set_aside(tmp_path):
    from transformers.trainer_utils import rotate_checkpoints

    for step in range(1, 5):
        (tmp_path / f"checkpoint-{step}").mkdir()
    retire_checkpoint(tmp_path / "checkpoint-4")
    assert not (tmp_path / "checkpoint-4").exists(), "no adapter: deleted"
    (tmp_path / "checkpoint-1" / "adapter_model.safetensors").touch()
    retire_checkpoint(tmp_path / "checkpoint-1")
    rotate_checkpoints(output_dir=str(tmp_path), save_total_limit=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "superseded-checkpoint-1"]


def test_overwrite_never_deletes_what_the_run_needs(tmp_path):
    settings, folder = run_dir(tmp_path, OVERWRITE=True)
    inside = dataclasses.replace(ROW, file=str(folder / "mine.csv"))
    assert f"it would delete {folder / 'mine.csv'}" in only(inspect(settings, [inside])[1])


@pytest.mark.parametrize("name", ["DATA", "EVAL_DATA", "EVAL_PROFILE"])
def test_overwrite_never_deletes_a_file_that_a_setting_names(tmp_path, name):
    """Not even one that this run would not read (EVAL_SAMPLES=0)."""
    settings, folder = run_dir(tmp_path, OVERWRITE=True, EVAL_SAMPLES=0)
    (folder / "sub").mkdir()
    (folder / "sub" / "mine.csv").touch()
    changed = dataclasses.replace(settings, **{name: f"{folder}/*/mine.csv"})
    assert f"it would delete {folder / 'sub' / 'mine.csv'}, which" in only(inspect(changed)[1])


def test_overwrite_never_deletes_a_users_reward_function(tmp_path, monkeypatch):
    settings, folder = run_dir(tmp_path, OVERWRITE=True, REWARDS="reward_inside:score")
    (folder / "reward_inside.py").write_text(
        "def score(completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    problems = Problems()
    check_rewards(settings, [ROW], problems)
    assert not problems
    assert f"it would delete {folder / 'reward_inside.py'}, which" in only(inspect(settings)[1])
    monkeypatch.delitem(sys.modules, "reward_inside")


def test_a_zip_of_an_earlier_run_is_not_overwritten(tmp_path):
    (tmp_path / "run.zip").write_text("precious")
    assert "run.zip of an earlier run is there" in only(inspect(Settings(OUTPUT_DIR=str(tmp_path / "run")))[1])
    assert not inspect(Settings(OUTPUT_DIR=str(tmp_path / "run"), OVERWRITE=True))[1]


def test_a_run_folder_has_one_writer(tmp_path):
    import subprocess

    lock = lock_run(tmp_path / "run")
    code = f"import pathlib; from grpo.run.folder import lock_run; print(lock_run(pathlib.Path({str(tmp_path / 'run')!r})))"
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert lock is not None and other.stdout.strip() == "None"
    lock.release()
    assert "None" not in subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout


def test_garbage_must_not_pay(tmp_path):
    row = dataclasses.replace(ROW, rewards=(-3.0, -1.0))
    problems = Problems()
    check_rewards(Settings(), [row], problems)
    assert "more than the lowest reward -3" in only(problems) and "INVALID_REWARD=-3" in only(problems)
    problems.clear()
    check_rewards(Settings(INVALID_REWARD=-3.0), [row], problems)
    check_rewards(Settings(), [row], problems, chosen=True)
    check_rewards(Settings(REWARDS="best"), [row], problems)
    assert not problems


def test_logs_survive_carriage_returns(tmp_path):
    path = tmp_path / "completions.csv"
    written = [{"step": 1, "completion": "a\rb"}, {"step": 2, "completion": 'c\r\n"d"'}]
    CsvLog(path, ["step", "completion"]).write(written)
    assert trim_csv(path, 1) == 1
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["step", "completion"], ["1", "a\rb"]]


REWARD_RESULTS = [
    ("[1, None, 0.5]", None), ("[True, 0, 1]", None), ("__import__('numpy').ones(3)", None),
    ("[1, 2]", "returned 2 rewards for 3"), ("None", "returned NoneType"), ("['a', 1, 2]", "returned 'a'"),
    ("[1, 2, float('inf')]", "returned inf"), ("[1 / 0]", "raised ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "message"), REWARD_RESULTS)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_a_reward_may_return(result, message, kind, tmp_path, monkeypatch):
    import asyncio

    name = f"returns_{abs(hash((result, kind)))}"
    (tmp_path / f"{name}.py").write_text(f"{kind} score(completions, **columns):\n    return {result}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = reward_callable(f"{name}:score", Settings())
    call = (lambda: asyncio.run(reward(["a", "b", "c"]))) if kind != "def" else (lambda: reward(["a", "b", "c"]))
    if message is None:
        assert len(call()) == 3
    else:
        with pytest.raises(RuntimeError, match=f"REWARDS: {name}:score {message}"):
            call()


def test_a_reward_that_returns_one_number_for_all_is_found_before_the_run(tmp_path, monkeypatch):
    body = "def score(completions, *, prompt_id, reward_action_0, **columns):\n    return [sum(reward_action_0)]\n"
    (tmp_path / "total.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    row = dataclasses.replace(ROW, columns={"reward_action_0": 0.0, "reward_action_1": 1.0})
    problems = Problems()
    check_rewards(Settings(REWARDS="total:score"), [row], problems)
    assert "REWARDS: total:score returned 1 rewards for 2 completions" in only(problems)


def test_a_reward_that_cannot_be_called_is_found_before_the_run(tmp_path, monkeypatch):
    (tmp_path / "narrow.py").write_text("def score(completions):\n    return [0.0]\n")
    monkeypatch.chdir(tmp_path)
    problems = Problems()
    check_rewards(Settings(REWARDS="narrow:score"), [ROW], problems)
    assert "cannot be called with (completions, **columns)" in only(problems)


def test_folders_of_others_are_never_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        problem = only(inspect(Settings(OUTPUT_DIR=str(tmp_path), OVERWRITE=overwrite))[1])
        assert "no run of this script" in problem
    assert "not a folder" in only(inspect(Settings(OUTPUT_DIR=str(tmp_path / "thesis.txt")))[1])
    problem = only(inspect(Settings(OUTPUT_DIR=str(tmp_path / "thesis.txt" / "a" / "b")))[1])
    assert f"{tmp_path / 'thesis.txt'} is a file, not a folder" in problem


def test_trimming_a_log(tmp_path):
    path = tmp_path / "completions.csv"
    path.write_text('step,completion\n1,"two\nlines"\n2,b\n3,c\n3,"torn off', encoding="utf-8")
    assert trim_csv(path, 2) == 2
    assert path.read_text(encoding="utf-8") == 'step,completion\n1,"two\nlines"\n2,b\n'
    assert (tmp_path / "completions.superseded.csv").read_text(encoding="utf-8") == "3,c\n3,torn off\n"
    assert trim_csv(path, 2) == 0 and trim_csv(tmp_path / "none.csv", 1) == 0


def test_parse_rate_warnings():
    warn = parse_rate_warning
    assert warn([0.1] * 4) is None, "too early to say"
    assert "only 0.10" in warn([0.1] * 5)
    assert warn([0.95] * 30) is None
    assert "fell to 0.70" in warn([0.95] * 10 + [0.7] * 5)
    assert warn([0.95] * 10 + [0.90] * 5) is None, "noise"
    assert warn([0.2] * 5 + [0.9] * 5) is None, "rising"


def test_requirements_are_inside_the_tested_ranges():
    for name in ("requirements.txt", "requirements-cpu.txt"):
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            package, equals, version = line.split("#")[0].strip().partition("==")
            if equals and package in TESTED:
                oldest, untested = TESTED[package]
                key = version_key
                assert key(oldest) <= key(version) < key(untested), f"{name}: {line}"


def test_doctests():
    failed, attempted = doctest.testmod(train_grpo)
    assert failed == 0 and attempted >= 6
