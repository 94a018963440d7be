# SPDX-License-Identifier: Apache-2.0
"""What several processes find out about one run: the plan of each, all problems once."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import CLEAN
from machines import CPU, H100, only
from ranked import in_ranks

from grpo.plan.hub import DOWNLOAD_GIB, REAL_CONFIG
from grpo.plan.memory import NCCL_GIB, Shapes, plan_memory
from grpo.preflight.agree import adopt_rank0_state, merge_rank_problems
from grpo.preflight.banner import banner, memory_facts
from grpo.preflight.checks import check_memory, check_settings, preflight
from grpo.settings import Problems, Settings

TWO, FOUR = (dataclasses.replace(H100, ranks=count, here=2) for count in (2, 4))


def test_a_plan_is_of_one_process():
    """Seven prompts: two processes get four at most."""
    given = REAL_CONFIG, "torch_flash", DOWNLOAD_GIB, "prefix"

    def plan(machine, **changes):
        config, attention, checkpoint, packing = given
        return plan_memory(Settings(**changes), config, machine, 940, attention, checkpoint, packing)

    assert plan(TWO, PROMPTS_PER_STEP=7).engine == plan(H100, PROMPTS_PER_STEP=4).engine
    assert plan(TWO, PROMPTS_PER_STEP=7).micro_batch == plan(H100, PROMPTS_PER_STEP=4).micro_batch
    assert (plan(TWO).nccl, plan(H100).nccl) == (NCCL_GIB, 0.0)
    assert plan(TWO, PROMPTS_PER_STEP=8).learning_peak - plan(H100, PROMPTS_PER_STEP=4).learning_peak == NCCL_GIB
    assert f"+ NCCL {NCCL_GIB:.2f} +" in plan(TWO).parts and "NCCL" not in plan(H100).parts
    small = [dataclasses.replace(machine, gpu_free=55.0) for machine in (H100, TWO)]
    alone, shared = (plan(machine, USE_VLLM=False).generation_batch for machine in small)
    assert shared > alone, "transformers generates a batch together"
    asleep = dict(memory_facts(plan(FOUR), FOUR))["vLLM asleep"]
    assert "13.9 GiB of host memory (28 of 2 engines, 110 are free)" in asleep
    asleep = dict(memory_facts(plan(FOUR, EXPERTS="shared"), FOUR))["vLLM asleep"]
    assert "16.0 GiB on the GPU, 0.0 GiB of host memory" in asleep
    full = dataclasses.replace(FOUR, gpu_free=22.0)
    asleep = dict(memory_facts(plan(full, EXPERTS="shared"), full))["vLLM asleep"]
    assert "2.0 GiB of host memory (4 of 2 engines, 110 are free)" in asleep, "what is not lent"
    asleep = dict(memory_facts(plan(FOUR, EXPERTS="paged"), FOUR))["vLLM asleep"]
    assert (
        "25.5 GiB of host memory, 11.6 of them experts, embeddings and head of the learner (51 of 2 engines" in asleep
    )


def test_host_memory_is_shared():
    """It has room for one sleeping engine, and not for two; on a CPU for one model."""
    shapes = Shapes(REAL_CONFIG, dataclasses.replace(TWO, ram_free=25.0), 940, "torch_flash", "prefix", DOWNLOAD_GIB)
    problems = Problems()
    check_memory(Settings(), shapes, problems)
    assert "each of 2 sleeping engines keeps 13.9 GiB in host memory, 25.0 GiB are free. Free some" in only(problems)
    assert "or start fewer processes" in only(problems)
    check_memory(Settings(EXPERTS="shared"), shapes, problems)
    assert len(problems) == 1
    check_memory(
        Settings(EXPERTS="paged"),
        dataclasses.replace(shapes, machine=dataclasses.replace(TWO, ram_free=50.0)),
        problems,
    )
    told = problems.pop()
    assert "each of 2 sleeping engines, with paged weights, keeps 25.5 GiB" in told
    assert told.endswith("or start fewer processes, or set EXPERTS=bf16"), "which fits, and is faster than without vLLM"
    check_memory(Settings(), dataclasses.replace(shapes, machine=dataclasses.replace(H100, ram_free=25.0)), problems)
    assert len(problems) == 1


def test_more_gpus_than_processes_are_a_hint_and_fewer_prompts_an_error():
    problems = Problems()
    check_settings(Settings(), None, dataclasses.replace(H100, gpus=8), problems)
    assert "torchrun --nproc-per-node 8 train_grpo.py" in only(problems) and "CUDA_VISIBLE_DEVICES=0" in only(problems)
    problems.clear()
    check_settings(Settings(PROMPTS_PER_STEP=3), None, FOUR, problems)
    assert only(problems).startswith("PROMPTS_PER_STEP: 3 cannot be shared out among 4 processes")


def checked(ranks, tmp_path, own):
    """Problems, step, prompts of each and generation batch in a run of which each process sees its `own` environment."""
    environ = CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run"), "EVAL_SAMPLES": "0"} | own[ranks.rank]
    machine = H100 if environ.pop("GPU", "") else CPU
    merged = merge_rank_problems(preflight(environ, machine, ranks))
    if merged.problems:
        return list(merged.problems)
    changed = dataclasses.replace(merged.run, step=9) if not ranks.rank else merged.run
    known = adopt_rank0_state(dataclasses.replace(merged, run=changed))
    return [
        known.run.step,
        known.plan.generation_batch,
        "2, each with its own model: 4, 4 of 8 prompts" in banner(merged),
    ]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, None),
        ({"SEED": "x"}, "SEED: 'x' is not accepted, expected a whole number. Unset it for the default (42) (rank 1)"),
        ({"SEED": "7"}, "SEED: 42 on rank 0 and 7 on rank 1. Every process"),
        ({"GPU": "1"}, "GPUs: 0 on rank 0 and 1 on rank 1. Every process needs one GPU"),
        ({"EXPERTS": "mxfp4"}, "EXPERTS: bf16 on rank 0 and mxfp4 on rank 1. Set EXPERTS to one of the two"),
        ({"DATA": "data/tes_heldout_compact.csv"}, "DATA: data/tes_train_compact.csv on rank 0 and "),
    ],
)
def test_all_processes_have_the_same_input(tmp_path, other, said):
    both = {"GENERATION_BATCH": "16", "USE_VLLM": "0", "ATTN_IMPL": "eager", "EXPERTS": "auto"}
    first, second = in_ranks(2, checked, tmp_path, [both, both | other])
    assert first == second and (first == [9, 16, True] if said is None else only(first).startswith(said)), first
