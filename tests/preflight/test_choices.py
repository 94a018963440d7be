# SPDX-License-Identifier: Apache-2.0
"""Each automatic choice says what it chose and why."""

import dataclasses
import math

import pytest
from helpers import ROOT

from grpo.data.files import Row
from grpo.preflight import choices
from grpo.preflight.choices import Choice
from grpo.settings.environment import load_settings
from grpo.settings.table import Settings

BARE = Row("old.csv", 1, (("user", "x"),), (0.5, 0.5), {})
VALUED = dataclasses.replace(BARE, file="new.csv", q=(-1.0, -1.0))
OPENED = dataclasses.replace(BARE, prompt="<|start|>assistant<|channel|>final")
UNREWARDED = dataclasses.replace(BARE, file="bare.csv", rewards=())


def expected(changes, rows=(BARE,), names=("regret",)):
    return choices.choose_expected_reward(Settings(**changes), rows, names)


def evaluation(changes, parameters=1, row=BARE, engine=False):
    return choices.choose_exact(Settings(**changes), engine, parameters, [row])


def best(changes, heldout=9, closed_loop=True):
    return choices.choose_best_by(Settings(**changes), heldout, closed_loop)


CHOICES = [  # A function, its arguments, the choice, and words of the reason.
    (choices.choose_attention, ("auto", 0), "eager", "no GPU"),
    (choices.choose_attention, ("auto", 1), "torch_flash", "exact with sinks"),
    (choices.choose_attention, ("org/kernel", 1), "org/kernel", "set by ATTN_IMPL"),
    (choices.choose_packing, (None, "eager", 0), "prefix", "once for all"),
    (choices.choose_packing, (None, "eager", 0, "shop:Shop"), "none", "all scores of a row"),
    (choices.choose_packing, (None, "eager", 1), "none", "all scores of a row"),
    (choices.choose_packing, (None, "org/kernel", 1), "none", "padded rows only"),
    (choices.choose_packing, ("prefix", "eager", 1), "prefix", "set by PACKING"),
    (choices.choose_use_vllm, (Settings(), 0, "0.26.0"), False, "no GPU"),
    (choices.choose_use_vllm, (Settings(MODEL_ID="tiny"), 1, "0.26.0"), False, "tiny"),
    (choices.choose_use_vllm, (Settings(), 1, None), False, "NOT INSTALLED"),
    (choices.choose_sync, (Settings(LORA_TARGETS="experts"),), "lora", "names experts"),
    (choices.choose_epsilon_high, (Settings(EPSILON=0.1),), 0.1, "EPSILON on both sides"),
    (choices.choose_epsilon_high, (Settings(LOSS_TYPE="cispo"),), 5.0, "cispo"),
    (choices.choose_scale_rewards, (None,), "group", "a few costly rows"),
    (choices.choose_rewards, (None, [VALUED, VALUED]), "regret", "every training row has q_action_k"),
    (choices.choose_rewards, (None, [VALUED, BARE]), "action", "old.csv has no q_action_k"),
    (choices.choose_rewards, (None, []), "action", "no training rows"),
    (expected, ({},), False, "learn as much without"),
    (expected, ({"DIRECT_ANSWERS": True},), True, "a function of it alone (regret)"),
    (expected, ({"EXPECTED_REWARD": False},), False, "set by EXPECTED_REWARD"),
    (expected, ({"DIRECT_ANSWERS": True}, [BARE], []), False, "no function of REWARDS"),
    (expected, ({"EXPECTED_REWARD": True, "IMPORTANCE_SAMPLING_LEVEL": "sequence"},), False, "LEVEL=sequence weights"),
    (expected, ({"EXPECTED_REWARD": True}, [BARE, UNREWARDED]), False, "bare.csv has no reward_action_k"),
    (expected, ({"EXPECTED_REWARD": True, "INVALID_REWARD": math.nan},), False, "INVALID_REWARD=nan"),
    (expected, ({"EXPECTED_REWARD": True, "LOSS_TYPE": "vespo"},), False, "vespo"),
    (expected, ({"EXPECTED_REWARD": True, "IS_CORRECTION": "sequence_truncate"},), False, "sequence_truncate"),
    (expected, ({"EXPECTED_REWARD": True, "TOP_P": 0.99},), False, "TOP_P"),
    (evaluation, ({}, 10_000_000), True, "10M parameters"),
    (evaluation, ({}, 10_000_001), False, "too long"),
    (evaluation, ({}, 230_000, BARE, True), False, "vLLM generates"),
    (evaluation, ({"TOP_P": 0.9},), False, "does not support TOP_P below 1"),
    (evaluation, ({"MAX_COMPLETION_LEN": 7},), False, "short MAX_COMPLETION_LEN"),
    (evaluation, ({}, 1, OPENED), False, "opened channels"),
    (evaluation, ({}, 1, UNREWARDED), False, "no actions"),
    (evaluation, ({"DIRECT_ANSWERS": True}, 1, UNREWARDED), False, "no actions"),
    (evaluation, ({"EVAL_SAMPLES": 0},), False, "EVAL_SAMPLES=0"),
    (evaluation, ({"EVAL_EXACT": False},), False, "EVAL_EXACT=0"),
    (choices.choose_exact_loop, (Settings(), Choice(True, "why"), 10_000_000), True, "why"),
    (choices.choose_exact_loop, (Settings(), Choice(True, "why"), 10_000_001), False, "4 passes: all states"),
    (choices.choose_exact_loop, (Settings(), Choice(False, "why"), 10_000_001), False, "why"),
    (best, ({},), "plant", "closed loop runs"),
    (best, ({"BEST_BY": "reward"},), "reward", "set by BEST_BY"),
    (best, ({"BEST_BY": "plant", "EVAL_SAMPLES": 0},), "", "EVAL_SAMPLES=0"),
    (best, ({"BEST_BY": "reward"}, 0, False), "", "no rows are held out"),
]


def readable(value):
    """A test's id, without addresses: pytest-xdist wants the same ones in every process."""
    return value.__name__ if callable(value) else str(value)[:40]


@pytest.mark.parametrize(("choose", "arguments", "chosen", "words"), CHOICES, ids=readable)
def test_a_choice_says_why(choose, arguments, chosen, words):
    choice = choose(*arguments)
    assert choice.value == chosen and words in choice.reason


DEMO_PROFILE = "data/profile_heldout.csv"
DEMO_ROWS, OWN = "data/tes_heldout_compact.csv", "tests/process/fixtures/rows.csv"
DEMOS = [  # Variables, and the EVAL_DATA and EVAL_PROFILE that they come to.
    ({}, ("data/tes_heldout.csv", DEMO_PROFILE)),
    ({"DATA": "data/tes_train_compact.csv", "EVAL_DATA": DEMO_ROWS}, (DEMO_ROWS, DEMO_PROFILE)),
    ({"DATA": str(ROOT / "data/tes_train_compact.csv")}, (DEMO_ROWS, DEMO_PROFILE)),
    ({"TASK": "gsm8k", "MODEL_ID": "tiny"}, ("data/gsm8k_heldout.jsonl", None)),
    ({"EVAL_PROFILE": "mine.csv"}, ("data/tes_heldout.csv", "mine.csv")),
    ({"EVAL_DATA": OWN}, (OWN, None)),  # The demo's days are not those of other rows.
    ({"DATA": OWN, "EVAL_DATA": DEMO_ROWS}, (DEMO_ROWS, None)),  # The plant is of no interest to other training rows.
    ({"DATA": OWN}, (None, None)),
]


@pytest.mark.parametrize(("environ", "chosen"), DEMOS, ids=lambda value: str(value)[:60])
def test_the_demos_rows_and_days_are_for_the_demos_data_alone(environ, chosen):
    loaded, sources, problems = load_settings(environ)
    settings, changed = choices.choose_demo(loaded, sources)
    assert not problems and chosen == (settings.EVAL_DATA, settings.EVAL_PROFILE)
    for name in ("EVAL_DATA", "EVAL_PROFILE"):
        assert (changed[name] == "chosen") is (getattr(loaded, name) != getattr(settings, name))
