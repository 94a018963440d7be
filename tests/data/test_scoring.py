# SPDX-License-Identifier: Apache-2.0
"""Reward functions: found, checked before the run, and called. Run: python -m pytest tests/data/test_scoring.py"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from machines import only

from grpo.data.files import Row
from grpo.data.scoring import Completion, check_rewards, completion_rates, reward_callable
from grpo.settings import Problems, Settings

ROW = Row("d.csv", 1, (("user", "x"),), (0.0, 1.0), {"reward_action_0": 0.0, "reward_action_1": 1.0})
MY_REWARDS = """NUMBER = 3
def score(completions, **columns): return [1.0] * len(completions)
def total(completions, *, prompt_id, reward_action_0, **columns): return [sum(reward_action_0)]
def narrow(completions): return [0.0]
"""


def problems(*rows, chosen=False, **settings):
    found = Problems()
    check_rewards(Settings(**settings), rows, found, chosen)
    return found


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(MY_REWARDS)
    (tmp_path / "my_broken.py").write_text("def score(:\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actoin", "the nearest is action"),
        ("action=high", "weight 'high' of 'action' is not a finite number"),
        ("action=inf", "not a finite number"),
        ("", "no reward function"),
        ("action,action=2", "named twice"),
        ("nowhere:score", "cannot be loaded: ModuleNotFoundError"),
        ("my_broken:score", "SyntaxError"),
        ("my_rewards:scroe", "AttributeError"),
        ("my_rewards:NUMBER", "is no function"),
        ("my_rewards:total", "my_rewards:total returned 1 rewards for 2 completions"),
        ("my_rewards:narrow", "narrow raised TypeError: narrow() got an unexpected keyword argument"),
    ],
)
def test_bad_rewards(text, message, my_rewards):
    problem = only(problems(ROW, REWARDS=text))
    assert message in problem and problem.startswith("REWARDS")


def test_rewards_of_ones_own_need_no_columns(my_rewards):
    bare, found = dataclasses.replace(ROW, rewards=(), columns={"user": "x"}), Problems()
    specs = check_rewards(Settings(REWARDS="my_rewards:score=2,format"), [bare], found)
    assert specs == [("my_rewards:score", 2.0), ("format", 1.0)] and not found
    problem = only(problems(bare))
    assert "d.csv, columns: there is no column reward_action_0" in problem and "should" not in problem
    named = dataclasses.replace(bare, columns={"user": "x", "Reward_Action_0": "1", "Reward_Action_1": "0"})
    assert "(should 'Reward_Action_0' be `reward_action_0`?)" in only(problems(named))


def test_rows_that_teach_nothing():
    """Every action pays the same: a problem where all rows are like that, as long as nothing else is rewarded."""
    flat = dataclasses.replace(ROW, rewards=(0.5, 0.5))
    for text in ("action", "best", "action=2,best"):
        assert "every row pays all its actions the same" in only(problems(flat, flat, REWARDS=text))
        assert not problems(flat, flat, ROW, REWARDS=text)
    assert not problems(flat, REWARDS="action,format") and not problems(flat, REWARDS="format")


def test_garbage_must_not_pay():
    row = dataclasses.replace(ROW, rewards=(-3.0, -1.0))
    problem = only(problems(row))
    assert "more than the lowest reward -3" in problem and "INVALID_REWARD=-3" in problem
    assert not problems(row, INVALID_REWARD=-3.0) and not problems(row, REWARDS="best")
    assert not problems(row, chosen=True)


REWARD_RESULTS = [
    ("[1, None, 0.5]", None), ("[True, 0, 1]", None), ("__import__('numpy').ones(3)", None),
    ("[1, 2]", "returned 2 rewards for 3"), ("None", "returned NoneType"), ("['a', 1, 2]", "returned 'a'"),
    ("[1, 2, float('inf')]", "returned inf"), ("[1 / 0]", "raised ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "message"), REWARD_RESULTS)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_a_reward_may_return(result, message, kind, tmp_path, monkeypatch):
    name = f"returns_{abs(hash((result, kind)))}"
    (tmp_path / f"{name}.py").write_text(f"{kind} score(completions, **columns):\n    return {result}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = reward_callable(f"{name}:score", Settings())
    expected = pytest.raises(RuntimeError, match=f"REWARDS: {name}:score {message}")
    with expected if message else contextlib.nullcontext():
        assert len(reward(["a", "b", "c"])) == 3


def test_rates_of_completions():
    """Two of four answer, one of them the best action; one was cut off."""
    answers = [(1, 10, False), (0, 20, False), (None, 30, True), (None, 40, False)]
    read = [Completion(ROW, "", action, tokens, cut) for action, tokens, cut in answers]
    rates = {"parse_rate": 0.5, "best_action_rate": 0.25, "clipped_ratio": 0.25, "tokens_mean": 25, "tokens_max": 40}
    assert completion_rates(read) == rates
