# SPDX-License-Identifier: Apache-2.0
"""Reward functions: found, checked before the run, and called. Run: python -m pytest tests/data/test_scoring.py"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import only

from grpo.data.files import Row
from grpo.data.scoring import (
    FINAL,
    Completion,
    check_heldout,
    check_rewards,
    completion_rates,
    load_rewards,
    reward_callable,
    reward_titles,
    sample_rows,
    score,
    tried_text,
    try_rewards,
)
from grpo.settings import Problems, Settings

ROW = Row("d.csv", 1, (("user", "x"),), (0.0, 1.0), {"reward_action_0": 0.0, "reward_action_1": 1.0})
MY_REWARDS = """NUMBER = 3
def score(completions, **columns): return [1.0] * len(completions)
def total(completions, *, prompt_id, reward_action_0, **columns): return [sum(reward_action_0)]
def penalty(completions, **columns): return [-3.0 if "[" in text else 0.0 for text in completions]
def brief(completions, **columns): return [5.0 if "final" in text and "[" not in text else 0.0 for text in completions]
def mute(completions, **columns): return [None for _ in completions]
def dreamy(completions, **columns): return [5.0 if "analysis" in text else 0.0 for text in completions]
async def polite(completions, *, note, **columns): return [None if note[0] is None else 0.5 for _ in completions]
def late(completions, **columns):
    from my_helper import zero
    return [zero for _ in completions]
def narrow(completions): return [0.0]
def leaves(completions, **columns): raise SystemExit
def deep(completions, **columns): return deep(completions)
class Silent(Exception):
    def __str__(self): raise ValueError
def silent(completions, **columns): raise Silent
"""
# Modules of the user's that must be named where they end the program, or are not the ones that Python takes.
MODULES = {
    "my_helper": "zero = 0.0\n",
    "my_place": "import os\nos.chdir('/')\ndef score(completions, **columns): return [os.chdir('/') or 0.0 for _ in completions]\n",
    "my_exit": "import sys\nsys.exit(0)\n",
    "my_arguments": "import argparse\nargparse.ArgumentParser().parse_args(['--check'])\n",
    "my_depth": "def deeper(): return deeper()\ndeeper()\n",
    "datasets": "def score(completions, **columns): return [1.0 for _ in completions]\n",
    "rewards": "def score(completions, **columns): return [1.0 for _ in completions]\n",
    "math": "def score(completions, **columns): return [1.0 for _ in completions]\n",
}


def checked(*rows, REWARDS="action", **settings):
    """(problems, warning) of these rows and reward functions."""
    found = Problems()
    return found, check_rewards(Settings(**settings), REWARDS, rows, found)[1]


def problems(*rows, **settings):
    return checked(*rows, **settings)[0]


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(MY_REWARDS)
    (tmp_path / "my_broken.py").write_text("def score(:\n")
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # of another test, whose folder was another


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
        ("my_rewards:total", "my_rewards:total returned 1 rewards for 4 completions"),
        ("my_rewards:narrow", "narrow raised TypeError: narrow() got an unexpected keyword argument"),
        ("action=1_0", "weight '1_0' of 'action' is not a finite number"),
        ("action=1e5", "weight '1e5' of 'action' is more than 10000 in size"),
        ("my_exit:score", "'my_exit:score' cannot be loaded: SystemExit: 0, which would end the run"),
        ("my_arguments:score", "'my_arguments:score' cannot be loaded: SystemExit: 2"),
        ("my_depth:score", "'my_depth:score' cannot be loaded: RecursionError"),
        ("my_rewards:leaves", "my_rewards:leaves raised SystemExit, which would end the run"),
        ("my_rewards:deep", "my_rewards:deep raised RecursionError"),
        ("my_rewards:silent", "my_rewards:silent raised Silent. It was tried"),
        ("math:hypot", "math:hypot' cannot be loaded: ImportError: Python takes "),
        ("datasets:score", "/datasets.py: rename your file"),
        ("rewards:score", "/rewards.py: rename your file"),
        (":score", "cannot be loaded: ValueError: Empty module name"),
        ("builtins:max", "builtins:max raised TypeError"),
    ],
)
def test_bad_rewards(text, message, my_rewards):
    problem = only(problems(ROW, REWARDS=text))
    assert message in problem and problem.startswith("REWARDS")


def test_the_users_folder_takes_no_librarys_place(my_rewards, tmp_path, monkeypatch):
    """It is looked into last, wherever it stood before."""
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    problem = only(problems(ROW, REWARDS="datasets:score"))
    assert "Python takes /" in problem and problem.count("datasets") >= 3
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1 and "" not in sys.path


def test_the_users_folder_is_looked_into_for_the_users_code_alone(my_rewards, tmp_path):
    """Libraries try to import what is not installed; a function may import late."""
    for text in ("action", "action,my_rewards:late"):
        assert not problems(ROW, REWARDS=text) and str(tmp_path) not in sys.path


def test_the_users_code_does_not_move_the_run(my_rewards, tmp_path):
    """Neither when it is imported nor when it is called: OUTPUT_DIR, DATA and the rest may be relative."""
    assert not problems(dataclasses.replace(ROW, rewards=()), REWARDS="my_place:score")
    assert Path.cwd() == tmp_path
    reward = reward_callable("my_place:score", Settings())
    assert Path.cwd() == tmp_path and reward(["a"]) == [0.0] and Path.cwd() == tmp_path


def test_rewards_of_ones_own_need_no_columns(my_rewards):
    bare, found = dataclasses.replace(ROW, rewards=(), columns={"user": "x"}), Problems()
    specs, warning = check_rewards(Settings(), "my_rewards:score=2,format", [bare], found)
    assert specs == [("my_rewards:score", 2.0), ("format", 1.0)] and not found and not warning
    problem = only(problems(bare))
    assert "d.csv, columns: there is no column reward_action_0" in problem and "should" not in problem
    named = dataclasses.replace(bare, columns={"user": "x", "Reward_Action_0": "1", "Reward_Action_1": "0"})
    assert "(should 'Reward_Action_0' be `reward_action_0`?)" in only(problems(named))


def test_rows_that_teach_nothing():
    """Every action pays the same: a problem where all rows are like that, as long as nothing else is rewarded."""
    flat = dataclasses.replace(ROW, rewards=(0.5, 0.5))
    for text in ("action", "best", "action=2,best", "regret"):
        assert "every row pays all its actions the same" in only(problems(flat, flat, REWARDS=text))
        assert not problems(flat, flat, ROW, REWARDS=text)
    assert not problems(flat, REWARDS="action,format") and not problems(flat, REWARDS="format")


SOFTMAX = dataclasses.replace(ROW, rewards=(0.25, 0.75), columns={"reward_action_0": 0.25, "reward_action_1": 0.75})
VALUES = dataclasses.replace(SOFTMAX, q=(-1.0, -3.5))


def test_what_regret_and_shortfall_need():
    signs, scale = (dataclasses.replace(SOFTMAX, number=7, rewards=row) for row in ((-0.5, 1.5), (0.25, 0.752)))
    for row in (signs, scale):
        problem = only(problems(SOFTMAX, row, row, REWARDS="regret"))
        assert problem.startswith("d.csv, row 7: its rewards are no softmax") and "REWARDS=action" in problem
        assert "q_action_k" in problem and not problems(row, REWARDS="best")
        assert not problems(dataclasses.replace(row, q=(0.0, 1.0)), REWARDS="regret"), "its values tell"
    assert not problems(dataclasses.replace(SOFTMAX, rewards=(0.25, 0.7509)), REWARDS="regret"), "rounded"
    problem = only(problems(VALUES, SOFTMAX, REWARDS="action,shortfall=10"))
    assert problem.startswith("d.csv, columns: `shortfall` needs q_action_0")
    assert not problems(VALUES, REWARDS="action,shortfall=10")


def test_garbage_never_pays():
    """Whatever the rewards are, as long as INVALID_REWARD is left alone; a number that pays is boxed, not refused."""
    negative = dataclasses.replace(VALUES, columns={"reward_action_0": -3.0, "reward_action_1": -1.0})
    for text in ("action", "best", "regret", "shortfall", "action,shortfall=10", "action,format=-0.01"):
        assert checked(negative, REWARDS=text) == ([], None), text
    found, warning = checked(negative, REWARDS="action", INVALID_REWARD=-3.0)
    assert not found and "earns -3 on average (action -3), a row's worst action -3. Garbage pays: unset it" in warning
    assert checked(negative, INVALID_REWARD=-3.1) == ([], None)
    found, warning = checked(negative, REWARDS="regret", INVALID_REWARD=0.0)
    assert not found and warning.startswith("INVALID_REWARD=0: an unreadable answer earns 0 on average")
    found, warning = checked(negative, INVALID_REWARD=math.nan)
    assert not found and "earns -2 on average (action nan)" in warning and "unlearns its format" in warning
    problem = only(problems(negative, REWARDS="action=-1"))
    assert problem.endswith("Give action weights above 0")


def test_garbage_that_a_function_of_ones_own_pays(my_rewards):
    """A penalty on answers, and none on what is no answer: six runs learned garbage from one like it."""
    problem = only(problems(ROW, REWARDS="action,my_rewards:penalty=2"))
    assert (
        "an unreadable answer earns -0.1 on average (action -0.1, my_rewards:penalty 0), a row's worst action -6"
        in problem
    )
    assert "Let my_rewards:penalty return less where rewards.parse_action finds no action" in problem
    assert "or set INVALID_REWARD=-6.1" in problem
    assert checked(ROW, REWARDS="action,my_rewards:penalty=2", INVALID_REWARD=-6.1) == ([], None)
    found, warning = checked(ROW, REWARDS="action,my_rewards:penalty", INVALID_REWARD=0.0)
    assert not found and "my_rewards:penalty 0), a row's worst action -3. Garbage pays" in warning
    for one in ("brief", "dreamy"):  # what pays is an empty final channel alone, or none
        assert f"earns 4.9 on average (action -0.1, my_rewards:{one} 5)" in only(
            problems(ROW, REWARDS=f"action,my_rewards:{one}")
        )
    assert "no function rewards any answer to the rows that were tried" in only(
        problems(ROW, REWARDS="my_rewards:mute")
    )
    problem = only(problems(ROW, REWARDS="my_rewards:score"))
    assert "earns 1 on average" in problem and "INVALID_REWARD" not in problem
    assert not problems(dataclasses.replace(ROW, rewards=()), REWARDS="my_rewards:score"), (
        "no actions, no answers known"
    )


def test_functions_are_tried_on_rows_of_every_file(my_rewards):
    """An async one that needs a column which one file of two has, and leaves all answers out where it is missing."""
    noted = dataclasses.replace(ROW, file="e.csv", columns=ROW.columns | {"note": "x"})
    rows = [dataclasses.replace(ROW, number=n) for n in range(200)]
    sampled = sample_rows([*rows, noted])
    assert len(sampled) == 64 and noted in sampled and sampled == sample_rows([*rows, noted])
    tried = try_rewards([("action", 2.0), ("my_rewards:polite", 1.0)], Settings(), [noted])
    assert tried == [(noted, [[pytest.approx(-0.2), 0.5], [pytest.approx(-0.2), 0.5], [0.0, 0.5], [2.0, 0.5]])]
    assert not problems(noted, ROW, REWARDS="action,my_rewards:polite")
    assert "unexpected keyword argument" in only(problems(noted, ROW, REWARDS="my_rewards:narrow"))
    assert "missing 1 required keyword-only argument: 'note'" in only(problems(ROW, REWARDS="my_rewards:polite"))


REWARD_RESULTS = [
    ("[1, None, 0.5]", None), ("[True, 0, 1]", None), ("__import__('numpy').ones(3)", None), ("list(__import__('numpy').ones(3, 'float32'))", None),
    ("[1, 2]", "returned 2 rewards for 3"), ("None", "returned NoneType"), ("['a', 1, 2]", "returned 'a'"),
    ("[1, 2, float('inf')]", "returned inf"), ("[1, 2, 10**400]", "returned 1000"), ("[1, 2, 1e20]", "returned 1e.20, which is neither"), ("[1 / 0]", "raised ZeroDivisionError"),
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


# As TRL's documentation has them (docs/source/grpo_trainer.md, "Using a custom reward function").
TRL_EXAMPLES = """
import re
def by_ids(completion_ids, **kwargs): return [float(len(ids)) for ids in completion_ids]
def by_text(completions, **kwargs): return [float(len(completion)) for completion in completions]
def form(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^so .*$", content) else 0.0 for content in contents]
def boxed(completions, ground_truth, **kwargs):
    matches = [re.search(r"boxed\\{(.*?)\\}", completion) for completion in completions]
    return [1.0 if match and match.group(1) == gt else 0.0 for match, gt in zip(matches, ground_truth)]
def math_only(prompts, completions, task, **kwargs):
    return [float(len(p)) if t == "math" else None for p, c, t in zip(prompts, completions, task)]
async def later(prompts, completions, **kwargs): return [0.5 for _ in completions]
def logged(completions, trainer_state, log_extra=None, log_metric=None, **kwargs):
    log_extra("seen", [1.0 for _ in completions])
    log_metric("step", trainer_state.global_step)
    return [1.0 for _ in completions]
def positional(texts, *, prompts, **columns): return [float(text.startswith("<|start|>assistant")) for text in texts]
"""
TURN = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"


@pytest.fixture
def examples(tmp_path, monkeypatch):
    name = f"trl_examples_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TRL_EXAMPLES)
    monkeypatch.chdir(tmp_path)
    return name


def scores(name, row, texts, **more):
    """What a reward function gives these answers to a row, called as the trainer calls it."""
    read = [Completion(row, TURN.format(text), None, 3, False) for text in texts]
    state = SimpleNamespace(global_step=0)
    made = score(load_rewards([(name, 1.0)], Settings()), read, [[1, 2, 3]] * len(read), 0, trainer_state=state, **more)
    return [one[0] for one in made]


TEXT = Row("d.jsonl", 1, (("user", "2 + 2?"),), (), {"ground_truth": "4", "task": "math"}, "<|start|>assistant")
CHAT = dataclasses.replace(TEXT, conversational=True)


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("by_ids", TEXT, [3.0, 3.0]), ("by_text", TEXT, [len("<|start|>assistant" + TURN.format(text)) for text in ("so 4", "boxed{4}")]),
        ("form", CHAT, [1.0, 0.0]), ("boxed", TEXT, [0.0, 1.0]), ("math_only", TEXT, [18.0, 18.0]), ("math_only", CHAT, [1.0, 1.0]),
        ("later", TEXT, [0.5, 0.5]), ("later", CHAT, [0.5, 0.5]), ("logged", CHAT, [1.0, 1.0]),
        ("positional", TEXT, [1.0, 1.0]), ("positional", CHAT, [1.0, 1.0]),
    ],
)  # fmt: skip
def test_trls_documented_examples_run_as_they_are(examples, name, row, expected):
    """By keyword, with strings or with messages; only a first argument of another name gets the turns by position."""
    assert scores(f"{examples}:{name}", row, ["so 4", "boxed{4}"]) == expected


SOLVED = dataclasses.replace(CHAT, columns={"solution": "$4$"})


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("accuracy_reward", [r"\boxed{4}", r"\boxed{5}"], [1.0, 0.0]),
        ("reasoning_accuracy_reward", [r"</think> \boxed{4}", r"</think> \boxed{5}"], [1.0, 0.0]),
        ("think_format_reward", ["<think>a</think>b", "b"], [1.0, 0.0]),
    ],
)  # fmt: skip
def test_trls_own_rewards_run_as_they_are(name, texts, expected):
    assert scores(f"trl.rewards:{name}", SOLVED, texts) == expected


def test_trls_reward_factories_by_a_module_of_ones_own(tmp_path, monkeypatch):
    made = "repeated, long, cosine = get_repetition_penalty_reward(2), get_soft_overlong_punishment(4, 2), get_cosine_scaled_reward(9)"
    (tmp_path / "my_made_rewards.py").write_text(f"from trl.rewards import *\n{made}\n")
    monkeypatch.chdir(tmp_path)
    assert scores("my_made_rewards:repeated", CHAT, ["x"]) == [0.0]
    assert scores("my_made_rewards:long", CHAT, ["x"]) == [-0.5]
    assert scores("my_made_rewards:cosine", SOLVED, [r"\boxed{4}"])[0] > 0.5


def test_titles_tell_functions_apart():
    specs = [("action", 1.0), ("one:score", 1.0), ("two:score", 1.0), ("one:last", 1.0)]
    assert reward_titles([name for name, _ in specs]) == ["action", "one:score", "two:score", "last"]


def test_held_out_rows_that_the_rewards_cannot_score(examples):
    """They lack the actions, or a column that a function asks for."""
    for name, words in (
        ("regret", "there is no column reward_action_0"),
        (f"{examples}:boxed", "missing 1 required positional argument: 'ground_truth'"),
    ):
        found = Problems()
        check_heldout([(name, 1.0)], Settings(), [dataclasses.replace(TEXT, columns={})], found)
        assert words in only(found)


def test_every_row_has_the_answer_that_gsm8k_compares_with():
    """Not only those that are tried; numbers need not be text."""
    rows = [dataclasses.replace(TEXT, number=n, columns={"answer": 42 if n % 2 else "#### 42"}) for n in range(1, 300)]
    assert not problems(*rows, REWARDS="gsm8k")
    for bad in ({"answer": "#### none"}, {"answer": None}, {}):
        told = only(problems(*rows, dataclasses.replace(TEXT, number=300, columns=bad), REWARDS="gsm8k"))
        assert told.startswith("d.jsonl, row 300, column answer: there is no number")


def test_an_answer_that_is_tried_goes_on_behind_its_prompt():
    assert tried_text("...<|start|>assistant", FINAL.format("[1]")) == "<|channel|>final<|message|>[1]<|return|>"
    assert tried_text("2 + 2?", FINAL) == FINAL
