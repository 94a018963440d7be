# SPDX-License-Identifier: Apache-2.0
"""Several processes check one run: the plan of each, all problems once."""

import dataclasses
import os

import pytest
from helpers import CLEAN, write_csv
from machines import CPU, H100, only, plan_inputs
from ranked import in_ranks
from test_checks import memory_problems

from grpo.output.folder import RunState
from grpo.plan import hub
from grpo.plan.memory import NCCL_GIB, plan_memory
from grpo.preflight import checks, choices, resolve
from grpo.preflight.banner import asleep_text, banner
from grpo.preflight.choices import Choice
from grpo.settings.table import Settings

TWO, FOUR = (dataclasses.replace(H100, ranks=count, here=2) for count in (2, 4))


def plan(machine, **changes):
    return plan_memory(Settings(**changes), plan_inputs(machine, True))


def test_a_plan_is_of_one_process():
    """Seven prompts: two processes get four at most."""
    assert plan(TWO, PROMPTS_PER_STEP=7).engine == plan(H100, PROMPTS_PER_STEP=4).engine
    assert (plan(TWO).nccl, plan(H100).nccl) == (NCCL_GIB, 0.0)
    assert plan(TWO, PROMPTS_PER_STEP=8).learning_peak - plan(H100, PROMPTS_PER_STEP=4).learning_peak == NCCL_GIB


@pytest.mark.parametrize(
    ("experts", "free", "words"),
    [
        ("shared", 79.0, "15.2 GiB on the GPU, 0.0 GiB of host memory"),
        ("shared", 22.0, "1.2 GiB of host memory (2 of 2 engines, 110 are free)"),
        ("paged", 79.0, "25.2 GiB of host memory, 11.6 of them experts, embeddings and head of the learner (50 of 2"),
    ],
)
def test_the_host_memory_of_sleeping_engines_is_shown(experts, free, words):
    machine = dataclasses.replace(FOUR, gpu_free=free)
    chosen = plan(machine, EXPERTS=experts)
    assert words in asleep_text(chosen, machine, chosen.engine.asleep)


def test_host_memory_is_shared():
    """It has room for one sleeping engine, and not for two."""
    alone, little, more = (
        dataclasses.replace(machine, ram_free=free) for machine, free in ((H100, 25.0), (TWO, 25.0), (TWO, 50.0))
    )
    problem = only(memory_problems(little, True))
    assert "each of 2 sleeping engines needs 15.6 GiB of host memory, 25.0 GiB are free. Free some" in problem
    assert not memory_problems(little, True, EXPERTS="shared") and not memory_problems(alone, True)
    problem = only(memory_problems(more, True, EXPERTS="paged"))
    assert problem.endswith("or start fewer processes, or set EXPERTS=bf16"), "which fits, and is faster than no vLLM"


def checked(ranks, tmp_path, own):
    """The problems, or step and batch of a resumed run, of which each process sees its `own` environment."""
    environ = CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run"), "EVAL_SAMPLES": "0"} | own[ranks.rank]
    machine = H100 if environ.pop("GPU", "") else CPU
    if environ.get("GRADIENT_CHECKPOINTING") == "auto":  # As if only one of the GPUs had room for all activations.
        choices.choose_checkpointing = lambda *_: Choice(bool(ranks.rank), "test")
    resolve.inspect_run = lambda *_: RunState(tmp_path, 9, tmp_path, True, {"plan": {"generation_batch": ranks.size}})
    resolved = checks.preflight(environ, machine, ranks)
    assert resolved.problems or "2, each with its own model: 4, 4 of 8 prompts" in banner(resolved)
    return list(resolved.problems) or [resolved.state.step, resolved.plan.generation_batch]


ON_ANY_MACHINE = {"USE_VLLM": "0", "ATTN_IMPL": "eager", "EXPERTS": "bf16"}


def test_activations_may_be_kept_on_some_gpus_alone(tmp_path):
    auto = ON_ANY_MACHINE | {"GRADIENT_CHECKPOINTING": "auto"}
    assert in_ranks(2, checked, tmp_path, [auto, auto]) == [[9, 2], [9, 2]]
    (problem,), _ = in_ranks(2, checked, tmp_path, [auto, auto | {"GRADIENT_CHECKPOINTING": "1"}])
    assert problem.startswith("GRADIENT_CHECKPOINTING: auto on rank 0 and 1 on rank 1")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({}, None),
        ({"SEED": "x"}, "SEED: 'x' is not accepted, expected a whole number. Unset it for the default (42) (rank 1)"),
        ({"SEED": "7"}, "SEED: 42 on rank 0 and 7 on rank 1. Every process"),
        ({"GPU": "1"}, "GPUs: 0 on rank 0 and 1 on rank 1. Every process needs one GPU"),
    ],
)
def test_all_processes_have_the_same_input(tmp_path, other, message):
    first, second = in_ranks(2, checked, tmp_path, [ON_ANY_MACHINE, ON_ANY_MACHINE | other])
    assert first == second
    assert first == [9, 2] if message is None else only(first).startswith(message)


def test_processes_that_see_different_commits_are_a_problem(tmp_path, monkeypatch):
    """As when the model changes on the Hub between the starts of two machines."""
    find = hub.find_model

    def checked_there(ranks):
        monkeypatch.setattr(hub, "find_model", lambda *args: dataclasses.replace(find(*args), commit=str(ranks.rank)))
        return checked(ranks, tmp_path, [ON_ANY_MACHINE] * 2)

    for problems in in_ranks(2, checked_there):
        assert only(problems).startswith("commit of MODEL_ID: 0 on rank 0 and 1 on rank 1. Every process")


def test_rows_that_differ_under_the_same_name_are_a_problem(tmp_path):
    """As on machines that share no disk."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        write_csv(tmp_path / str(rank) / "rows.csv", ["user", "reward_action_0", "reward_action_1"], [["x", rank, 2]])

    def checked_there(ranks):
        os.chdir(tmp_path / str(ranks.rank))
        return checked(ranks, tmp_path, [ON_ANY_MACHINE | {"DATA": "rows.csv"}] * 2)

    for problems in in_ranks(2, checked_there):
        assert only(problems).startswith("rows of DATA and EVAL_DATA: ")
