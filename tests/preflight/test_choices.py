# SPDX-License-Identifier: Apache-2.0
"""Automatic choices say what and why. Run: python -m pytest tests/preflight/test_choices.py"""

from __future__ import annotations

import dataclasses

import pytest
from conftest import ROOT

from grpo.data.files import Row
from grpo.preflight import choices
from grpo.settings import Settings, load_settings

CHOSEN = [
    ("auto", 0, 0.0, ("flash-attn-3", "flash-attn-4"), "eager"), ("auto", 1, 9.0, (), "torch_flash"),
    ("auto", 1, 9.0, ("flash-attn", "flash-attn-4"), "torch_flash"), ("auto", 1, 9.0, ("flash-attn-3",), "flash_attention_3"),
    ("auto", 1, 8.9, ("flash-attn-3",), "torch_flash"), ("auto", 1, 10.0, ("flash-attn-3",), "torch_flash"),
    ("auto", 1, 10.0, ("flash-attn-3", "flash-attn-4"), "flash_attention_4"), ("eager", 1, 9.0, ("flash-attn-3",), "eager"),
    ("org/kernel", 1, 9.0, (), "org/kernel"),
]  # fmt: skip


@pytest.mark.parametrize(("requested", "gpus", "capability", "installed", "chosen"), CHOSEN)
def test_attention_choice_says_why(requested, gpus, capability, installed, chosen):
    attention, reason = choices.choose_attention(requested, gpus, capability, installed)
    assert attention == chosen and len(reason) > 10
    assert (reason == "set by ATTN_IMPL") is (requested != "auto")
    warning = choices.attention_warning(attention) or ""
    assert ("gradients may be wrong" in warning and f"ATTN_IMPL={chosen}" in warning) is ("/" in chosen)


PACKED = [
    (None, "torch_flash", 1, "prefix"), (None, "eager", 0, "prefix"), (None, "eager", 1, "none"),
    (None, "org/kernel", 1, "none"), ("none", "torch_flash", 1, "none"), ("prefix", "eager", 1, "prefix"),
]  # fmt: skip


@pytest.mark.parametrize(("requested", "attention", "gpus", "chosen"), PACKED)
def test_packing_choice(requested, attention, gpus, chosen):
    packing, reason = choices.choose_packing(requested, attention, gpus)
    assert packing == chosen and (reason == "set by PACKING") is (requested is not None)


@pytest.mark.parametrize(
    ("epochs", "rows", "prompts", "steps"),
    [
        (None, 30, 12, 100),
        (1, 30, 12, 3),
        (2, 30, 12, 5),
        (1.1, 10, 1, 11),
        (0.1, 30, 1, 3),
        (0.01, 30, 12, 1),
        (1, 0, 12, 100),
    ],
)
def test_steps_of_so_many_epochs(epochs, rows, prompts, steps):
    """By hand; 1.1 x 10 is more than 11 in floating point; without rows there is nothing to count."""
    chosen, reason = choices.choose_steps(100, epochs, rows, prompts)
    assert chosen == steps and ("NUM_TRAIN_EPOCHS" in reason) is (epochs is not None and rows > 0)


@pytest.mark.parametrize(
    ("parameters", "gpus", "environ", "threads"),
    [
        (301_464, 0, {}, 1),
        (301_464, 0, {"OMP_NUM_THREADS": "4"}, None),
        (301_464, 1, {}, None),
        (2_000_000, 0, {}, None),
    ],
)
def test_threads_of_a_small_model_on_a_cpu(parameters, gpus, environ, threads):
    chosen, reason = choices.choose_threads(parameters, gpus, environ)
    assert chosen == threads and len(reason) > 10


ROLLOUTS = [
    (True, 0, True, None, True, "set by USE_VLLM"), (False, 1, False, "0.26.0", False, "set by USE_VLLM"),
    (None, 0, False, "0.26.0", False, "no GPU"), (None, 1, True, "0.26.0", False, "tiny"),
    (None, 1, False, None, False, "NOT INSTALLED"), (None, 1, False, "0.26.0", True, "a GPU and vLLM"),
]  # fmt: skip


@pytest.mark.parametrize(("requested", "gpus", "tiny", "vllm", "uses", "words"), ROLLOUTS)
def test_choose_rollouts(requested, gpus, tiny, vllm, uses, words):
    chosen, reason = choices.choose_rollouts(requested, gpus, tiny, vllm)
    assert chosen is uses and words in reason


def test_clip_range_choice():
    assert choices.choose_epsilon_high(Settings(EPSILON=0.1))[0] == 0.1
    assert choices.choose_epsilon_high(Settings(EPSILON_HIGH=0.3))[0] == 0.3
    assert choices.choose_epsilon_high(Settings(LOSS_TYPE="cispo"))[0] == 5.0


def test_rewards_and_their_scale():
    bare = Row("old.csv", 1, (("user", "x"),), (0.5, 0.5), {})
    valued = dataclasses.replace(bare, file="new.csv", q=(-1.0, -1.0))
    assert choices.choose_rewards(None, [valued, valued]) == ("regret", "every training row has q_action_k")
    assert choices.choose_rewards(None, [valued, bare]) == ("action", "old.csv has no q_action_k")
    assert choices.choose_rewards(None, [])[0] == "action"
    assert choices.choose_rewards("best", [valued]) == ("best", "set by REWARDS")
    for names, scale in (
        (["regret"], "batch"),
        (["action", "shortfall"], "batch"),
        (["action", "format"], "group"),
        ([], "group"),
    ):
        chosen, reason = choices.choose_scale_rewards(None, names)
        assert chosen == scale and len(reason) > 10
    assert choices.choose_scale_rewards("none", ["regret"]) == ("none", "set by SCALE_REWARDS")


EXACT = [
    ({}, False, 230_000, "", False, True, "0.23M parameters"), ({}, False, 10_000_000, "", False, True, "10M parameters"),
    ({}, False, 10_000_001, "", False, False, "too long"), ({}, True, 230_000, "", False, False, "vLLM generates"),
    ({}, False, 230_000, "full prompts", False, False, "full prompts"), ({"TOP_P": 0.9}, False, 1, "", False, False, "TOP_P"),
    ({"MAX_COMPLETION_LEN": 7}, False, 1, "", False, False, "MAX_COMPLETION_LEN"), ({}, False, 1, "", True, False, "opened channels"),
    ({"EVAL_SAMPLES": 0}, False, 1, "", False, False, "EVAL_SAMPLES=0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "engine", "parameters", "kind", "opened", "exact", "words"), EXACT)
def test_whether_evaluations_are_exact(change, engine, parameters, kind, opened, exact, words):
    result = choices.choose_evaluation(Settings(**change), engine, parameters, kind, opened)
    assert result[0] is exact and words in result[1]


KINDS = ("shared", "bf16", "mxfp4", "paged")
EXPERTS = [  # requested, possible, and of these what fits
    ((None, KINDS, KINDS), "shared", "Hopper"), ((None, KINDS, ()), "paged", "while vLLM is awake"),
    ((None, KINDS[1:], KINDS), "bf16", "fit"), ((None, KINDS[1:], ["mxfp4", "paged"]), "mxfp4", "do not fit"),
    ((None, KINDS[1:3], ()), "mxfp4", "do not fit"), ((None, ["bf16"], ()), "bf16", "not quantized"),
    (("mxfp4", KINDS, KINDS), "mxfp4", "set by EXPERTS"), (("bf16", KINDS, ()), "bf16", "set by"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "chosen", "words"), EXPERTS)
def test_choose_experts(given, chosen, words):
    result = choices.choose_experts(*given)
    assert result[0] == chosen and words in result[1]


def test_what_the_best_adapter_is_kept_by():
    assert choices.choose_best(Settings(), 9, True)[0] == "plant"
    assert choices.choose_best(Settings(), 9, False)[0] == "reward"
    assert choices.choose_best(Settings(BEST_BY="reward"), 9, True) == ("reward", "set by BEST_BY")
    assert choices.choose_best(Settings(BEST_BY="plant", EVAL_SAMPLES=0), 9, True)[0] == ""
    assert choices.choose_best(Settings(BEST_BY="reward"), 0, False) == ("", "no rows are held out")


DEMO_PROFILE = "data/profile_heldout.csv"
DEMO_ROWS, OWN = "data/tes_heldout_compact.csv", "tests/run/fixtures/rows.csv"
DEMOS = [  # settings -> (EVAL_DATA, EVAL_PROFILE)
    ({}, ("data/tes_heldout.csv", DEMO_PROFILE)),
    ({"MODEL_ID": "tiny"}, (DEMO_ROWS, DEMO_PROFILE)),
    ({"DATA": "data/tes_train_compact.csv", "EVAL_DATA": DEMO_ROWS}, (DEMO_ROWS, DEMO_PROFILE)),
    ({"DATA": str(ROOT / "data/tes_train_compact.csv")}, (DEMO_ROWS, DEMO_PROFILE)),  # by its path
    ({"TASK": "gsm8k"}, ("data/gsm8k_heldout.jsonl", None)),
    ({"TASK": "gsm8k", "MODEL_ID": "tiny"}, ("data/gsm8k_heldout.jsonl", None)),
    ({"EVAL_PROFILE": ""}, ("data/tes_heldout.csv", "")),  # set by the user
    ({"EVAL_PROFILE": "mine.csv"}, ("data/tes_heldout.csv", "mine.csv")),
    ({"EVAL_DATA": OWN}, (OWN, None)),  # the demo's days are not those of other rows
    ({"DATA": OWN, "EVAL_DATA": DEMO_ROWS}, (DEMO_ROWS, None)),  # nor is the plant of interest to other training rows
    ({"DATA": OWN}, (None, None)),
    ({"DATA": f"data/tes_train.csv,{OWN}"}, (None, None)),  # more than the demo's
    ({"DATA": "org/name"}, (None, None)),
    ({"TASK": "gsm8k", "DATA": OWN}, (None, None)),
]


@pytest.mark.parametrize(("environ", "chosen"), DEMOS, ids=lambda value: str(value)[:60])
def test_the_demos_rows_and_days_are_for_the_demos_data_alone(environ, chosen):
    given, sources, problems = load_settings(environ)
    settings, after = choices.choose_demo(given, sources)
    assert not problems and chosen == (settings.EVAL_DATA, settings.EVAL_PROFILE)
    for name in ("EVAL_DATA", "EVAL_PROFILE"):
        assert (after[name] == "chosen") is (getattr(given, name) != getattr(settings, name))
