# SPDX-License-Identifier: Apache-2.0
"""Reward functions before a run: loaded, tried, refused where garbage pays."""

import dataclasses
import math
import sys
from unittest import mock

import pytest
from helpers import ROOT, write_csv
from machines import only

from grpo import numerals
from grpo.common import Problems
from grpo.data.files import Row, read_file
from grpo.plan.hub import TINY_PATH
from grpo.reward.reward_checks import (
    check_answers,
    check_heldout,
    check_rewards,
    longest_answer_warning,
    sample_rows,
    try_rewards,
)
from grpo.settings.table import Settings

ROW = Row("d.csv", 1, (("user", "x"),), (0.0, 1.0), {"reward_action_0": 0.0, "reward_action_1": 1.0})
BARE = dataclasses.replace(ROW, rewards=(), columns={"user": "x"})
TOKENIZER = TINY_PATH / "tokenizer.json"
MY_REWARDS = """NUMBER = 3
def total(completions, *, reward_action_0, **columns): return [sum(reward_action_0)]
def penalty(completions, **columns): return [-3.0 if "[" in text else 0.0 for text in completions]
def brief(completions, **columns): return [5.0 if "final" in text and "[" not in text else 0.0 for text in completions]
def length(completions, **columns): return [float(len(text)) for text in completions]
def tokens(completion_ids, **columns): return [float(len(ids)) for ids in completion_ids]
def picky(completions, **columns): return [-1.0 if "[0]" in text else 0.0 for text in completions]
def mute(completions, **columns): return [None for _ in completions]
def dreamy(completions, **columns): return [5.0 if "analysis" in text else 0.0 for text in completions]
async def polite(completions, *, note, **columns): return [None if note[0] is None else 0.5 for _ in completions]
def late(completions, **columns): return [__import__("my_helper").zero for _ in completions]
def narrow(completions): return [0.0]
def leaves(completions, **columns): raise SystemExit
def deep(completions, **columns): return deep(completions)
def same(completions, **columns): return [0.0 for _ in completions]
def worth_of(worth, **columns): return [float(value) for value in worth]
def third(raw_completions, note, **columns):
    return [1 / (n != "3" or "[0]" not in text) for n, text in zip(note, raw_completions)]
def empty(completions, **columns): pass
def worded(completions, **columns): return [len(text) - "4" for text in completions]
def finals_length(completions, **columns): return [float(len(text.partition("final")[2])) for text in completions]
def finals(completions, **columns): return [float(len(text.split("final")[1])) for text in completions]
"""
MODULES = {"my_rewards": MY_REWARDS, "my_helper": "zero = 0.0\n", "my_exit": "import sys\nsys.exit(0)\n"}


def checked(*rows, REWARDS="action", **settings):
    """(problems, warning) of these rows and reward functions."""
    problems = Problems()
    return problems, check_rewards(Settings(**settings), REWARDS, rows, problems, TOKENIZER)[1]


def problems_of(*rows, **settings):
    return checked(*rows, **settings)[0]


def warning_of(*rows, **settings):
    problems, warning = checked(*rows, **settings)
    assert not problems
    return warning


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # of another test, whose folder was another


BAD = [
    ("actoin", "the nearest is action"),
    ("action=high", "weight 'high' of 'action' is not a finite number"),
    ("action=1e5", "weight '1e5' of 'action' is more than 10000 in size"),
    ("", "no reward function"),
    ("action,action=2", "named twice"),
    ("my_rewards:NUMBER", "is no function"),
    ("my_rewards:total", "my_rewards:total returned 1 rewards for 4 completions"),
    ("my_rewards:narrow", "argument 'reward_action_0'. Rows have the columns reward_action_0, reward_action_1; let it"),
    ("my_rewards:empty", "my_rewards:empty returned NoneType, not a list with one number for each completion"),
    ("my_reward:total", "No module named 'my_reward', neither as my_reward.py in "),
    ("my_rewards:worded", "(my_rewards.py, line 20). It was tried before the run on made-up answers to "),
    ("my_exit:score", "'my_exit:score' cannot be loaded: SystemExit: 0 (my_exit.py, line 2)"),
    ("my_rewards:leaves", "my_rewards:leaves raised SystemExit (my_rewards.py, line 13)"),
    ("my_rewards:deep", "my_rewards:deep raised RecursionError"),
    ("./my_rewards.py", "names a file, and Python wants its module: write my_rewards:NAME. Write e.g."),
    ("sub/my_rewards.py:score", "wants its module: write sub.my_rewards:score. Write e.g."),
    ("/away/my_rewards.py:score", "wants its module: write my_rewards:score and set PYTHONPATH=/away. Write e.g."),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_rewards(text, message, my_rewards):
    problem = only(problems_of(ROW, REWARDS=text))
    assert message in problem and problem.startswith("REWARDS")


def test_the_users_folder_is_looked_into_last(my_rewards, tmp_path):
    """Also by a function that imports late."""
    assert not problems_of(ROW, REWARDS="action,my_rewards:late") and sys.path[-1] == str(tmp_path)


def test_rewards_of_ones_own_need_no_columns(my_rewards):
    specs, warning = check_rewards(Settings(), "my_rewards:length=2,format", [BARE], problems := Problems())
    assert specs == [("my_rewards:length", 2.0), ("format", 1.0)] and not problems and not warning
    other = dataclasses.replace(BARE, columns={"user": "x", "Reward_Action_0": "1"})
    words = "d.csv, columns: there is no column reward_action_0, reward_action_1, ... among user, Reward_Action_0"
    assert words in only(problems_of(other))
    valued = dataclasses.replace(BARE, columns={"user": "x", "q_action_0": "-1", "q_action_1": "-3"})
    assert "q_action_1; they may hold the same numbers as q_action_k. Add one per" in only(problems_of(valued))


def test_rows_that_teach_nothing():
    """Every action pays the same: a problem where all rows are like that, as long as nothing else is rewarded."""
    flat = dataclasses.replace(ROW, rewards=(0.5, 0.5))
    for text in ("action=2,best", "regret"):
        assert "every row gives all its actions the same reward" in only(problems_of(flat, flat, REWARDS=text))
        assert not problems_of(flat, flat, ROW, REWARDS=text)
    assert not problems_of(flat, REWARDS="action,format")


SOFTMAX = dataclasses.replace(ROW, rewards=(0.25, 0.75), columns={"reward_action_0": 0.25, "reward_action_1": 0.75})
VALUES = dataclasses.replace(SOFTMAX, q=(-1.0, -3.5))


def test_what_regret_needs():
    for rewards in ((-0.5, 1.5), (0.25, 0.752)):
        row = dataclasses.replace(SOFTMAX, number=7, rewards=rewards)
        problem = only(problems_of(SOFTMAX, row, dataclasses.replace(row, number=8), REWARDS="regret"))
        assert problem.startswith("d.csv, row 7: its rewards are no softmax") and "REWARDS=action" in problem
        assert problems_of(row, REWARDS="cost")
        assert not problems_of(dataclasses.replace(row, q=(0.0, 1.0)), REWARDS="regret"), "its values tell"
    assert not problems_of(dataclasses.replace(SOFTMAX, rewards=(0.25, 0.7509)), REWARDS="regret"), "rounded"


def test_garbage_never_pays():
    """Whatever the rewards are, as long as INVALID_REWARD is left alone; a number that pays is boxed, not refused."""
    negative = dataclasses.replace(VALUES, columns={"reward_action_0": -3.0, "reward_action_1": -1.0})
    for text in ("action", "best", "regret", "cost", "action,format=-0.01"):
        assert checked(negative, REWARDS=text) == ([], None), text
    assert checked(negative, INVALID_REWARD=-3.1) == ([], None)
    warning = warning_of(negative, INVALID_REWARD=-3.0)
    assert "earns -3 on average (action -3), a row's worst action -3, so a run may learn garbage" in warning
    assert "earns -2 on average (action nan)" in warning_of(negative, INVALID_REWARD=math.nan)
    assert "Give actions weights above 0, or" in only(problems_of(negative, REWARDS="action=-1"))


def test_garbage_that_a_function_of_ones_own_pays(my_rewards):
    """A penalty on answers, and none on what is no answer: six runs learned garbage from one like it."""
    problem = only(problems_of(ROW, REWARDS="action,my_rewards:penalty=2"))
    assert "answer earns -0.1 on average (action -0.1, my_rewards:penalty 0), a row's worst action -6" in problem
    assert "Let my_rewards:penalty return less where rewards.parse_action finds no action" in problem
    assert checked(ROW, REWARDS="action,my_rewards:penalty=2", INVALID_REWARD=-6.1) == ([], None)
    for name in ("brief", "dreamy"):  # an empty final channel alone pays, or none
        problem = only(problems_of(ROW, REWARDS=f"action,my_rewards:{name}"))
        assert f"earns 4.9 on average (action -0.1, my_rewards:{name} 5)" in problem
    problem = only(problems_of(ROW, REWARDS="my_rewards:mute"))
    assert "no function rewards any answer to the rows that were tried" in problem
    for quiet in ("length", "same", "mute,my_rewards:length"):
        assert checked(BARE, REWARDS=f"my_rewards:{quiet}") == ([], None), "no actions known"
    assert warning_of(BARE, REWARDS="my_rewards:mute").endswith("If real answers get none either, nothing is learned")
    assert "Let my_rewards:picky return less" in only(problems_of(ROW, REWARDS="my_rewards:picky"))
    assert "may learn garbage" in warning_of(ROW, REWARDS="my_rewards:picky", INVALID_REWARD=0.0)


def test_functions_that_look_at_no_action_start_with_a_warning(my_rewards):
    """Such as the first examples of TRL's documentation: the length of the text, that in tokens."""
    for name, worth in (("length", "19"), ("tokens", "11")):
        warning = warning_of(ROW, REWARDS=f"my_rewards:{name}")
        assert f"an unreadable answer earns {worth} on average" in warning, name
        assert "all actions of a row earn the same" in warning and "Add action or regret" in warning
    assert len(problems_of(ROW, REWARDS="action=0.001,my_rewards:length")) == 1, "here the action counts"


def test_functions_are_tried_on_rows_of_every_file(my_rewards):
    """An async one that needs a column which one file of two has, and leaves all answers out where it is missing."""
    noted = dataclasses.replace(ROW, file="e.csv", columns=ROW.columns | {"note": "x"})
    rows = [dataclasses.replace(ROW, number=n) for n in range(200)]
    sampled = sample_rows([*rows, noted])
    assert len(sampled) == 64 and noted in sampled and sampled == sample_rows([*rows, noted])
    trials = try_rewards([("action", 2.0), ("my_rewards:polite", 1.0)], Settings(), [noted])
    assert trials == [(noted, [[pytest.approx(-0.2), 0.5], [pytest.approx(-0.2), 0.5], [0.0, 0.5], [2.0, 0.5]])]
    assert not problems_of(noted, ROW, REWARDS="action,my_rewards:polite")
    assert "unexpected keyword argument" in only(problems_of(noted, ROW, REWARDS="my_rewards:narrow"))


ODD_CELLS = [(0.5, None), ("0.5", ""), ("0.5", "n/a"), (3, "3"), (["a"], []), ({"a": 1}, None)]


@pytest.mark.parametrize(("usual", "odd"), ODD_CELLS)
def test_a_single_odd_cell_of_thousands_is_tried(usual, odd):
    """It would raise in the function in the middle of a run."""
    rows = [dataclasses.replace(ROW, number=n, columns=ROW.columns | {"note": usual}) for n in range(1, 3000)]
    row = dataclasses.replace(ROW, number=3000, columns=ROW.columns | {"note": odd})
    assert row in sample_rows([*rows, row]) and len(sample_rows([*rows, row])) == 64
    bare = dataclasses.replace(ROW, number=3000)  # a line of JSON may lack a key
    assert bare in sample_rows([*rows, bare])


def test_a_none_in_row_151_is_refused_before_the_run(my_rewards):
    rows = [dataclasses.replace(BARE, number=n, columns=BARE.columns | {"worth": 0.5}) for n in range(1, 300)]
    rows[150] = dataclasses.replace(rows[150], columns=BARE.columns | {"worth": None})
    problem = only(problems_of(*rows, REWARDS="my_rewards:worth_of"))
    assert "my_rewards:worth_of raised TypeError" in problem and "(my_rewards.py, line 16)" in problem
    rows[150] = rows[149]
    assert not problems_of(*rows, REWARDS="my_rewards:worth_of")


def test_held_out_rows_that_the_rewards_cannot_score(my_rewards):
    """They lack the actions, or a column that a function asks for."""
    for name, words in (("regret", "there is no column reward_action_0"), ("my_rewards:polite", "argument: 'note'")):
        check_heldout([(name, 1.0)], Settings(), [BARE], problems := Problems(), TOKENIZER)
        assert words in only(problems)
    specs, problems = [("my_rewards:worth_of", 1.0)], Problems()
    check_heldout(specs, Settings(), [BARE], problems, TOKENIZER, columns=["user", "worth"])
    assert only(problems).startswith("EVAL_DATA: my_rewards:worth_of takes the column 'worth', which it lacks. Give")


def test_every_row_has_the_answer_that_gsm8k_compares_with():
    """Not only those that are tried; numbers need not be text."""
    rows = [dataclasses.replace(BARE, columns={"answer": 42 if n % 2 else "#### 42"}) for n in range(1, 300)]
    assert not problems_of(*rows, REWARDS="gsm8k") and not problems_of(*rows, REWARDS="gsm8k_strict")
    for bad in ({"answer": "#### none"}, {"answer": None}, {}):
        problem = only(problems_of(*rows, dataclasses.replace(BARE, number=300, columns=bad), REWARDS="gsm8k_strict"))
        assert problem.startswith("d.csv, row 300, column answer: there is no number")
    for bad in ("7 boxes of 6, so 42", "#### 5-10", "x^2+1"):
        row = dataclasses.replace(BARE, number=300, columns={"answer": bad})
        problem = only(problems_of(*rows, row, REWARDS="gsm8k"))
        assert problem.startswith(f"d.csv, row 300, column answer: {bad!r} is not one number. Write it behind ####")


OPENED = "<|start|>assistant"
DIGITS = dataclasses.replace(BARE, columns={"answer": "7 * 30 = 210\n#### 210"}, prompt=OPENED)
ANSWERED = dataclasses.replace(BARE, columns={"answer": "Paris and not London"}, number=9, prompt=OPENED)
MANY = dataclasses.replace(ROW, rewards=(0.0,) * 300, number=7, prompt=OPENED)
LENGTHS = [  # (rows, REWARDS, tokens of the shortest correct answer, reason)
    ([dataclasses.replace(ROW, prompt=OPENED), MANY], "regret", 8, "[299] has a token more than [1]"),
    ([DIGITS], "gsm8k", 6, "the number alone, not the whole column"),
    ([DIGITS], "gsm8k_strict", 10, "with its mark"),
    ([BARE, ANSWERED], "my_rewards:same", 20, "an own function may compare with the column `answer`"),
    ([BARE], "my_rewards:same", 0, "nothing tells what is correct"),
]


@pytest.mark.parametrize(("rows", "names", "tokens", "reason"), LENGTHS)
def test_answers_that_max_completion_len_cuts_are_noticed(rows, names, tokens, reason, my_rewards):
    def warning(length, **settings):
        return longest_answer_warning(Settings(MAX_COMPLETION_LEN=length, **settings), [names], rows, TOKENIZER)

    assert warning(max(tokens, 1)) is None, reason
    if tokens:
        text = warning(tokens - 1)
        assert f"the answers of 1 of {len(rows)} rows have more tokens" in text, reason
        where = f"(d.csv, row {rows[-1].number})"
        assert text.endswith(f"the longest has {tokens} {where}. Set MAX_COMPLETION_LEN={tokens} at least")
        assert warning(tokens - 1, DIRECT_ANSWERS=True) is None, "a direct answer is one token"


def test_each_correct_answer_is_read_once(monkeypatch):
    """Reading 15,000 takes most of a second; the checks, the warning about long answers and the preview need them."""
    monkeypatch.setattr(numerals, "sole_number", read := mock.Mock(wraps=numerals.sole_number))
    rows = [dataclasses.replace(BARE, columns={"answer": f"#### 4,0{n}"}, prompt=OPENED) for n in range(10, 99)]
    check_answers(["gsm8k"], rows, Problems())
    assert longest_answer_warning(Settings(MAX_COMPLETION_LEN=99), ["gsm8k"], rows, TOKENIZER) is None
    assert read.call_count == len(rows)


def test_a_call_that_fails_is_shown(my_rewards):
    problem = only(problems_of(BARE, REWARDS="my_rewards:polite"))
    assert "missing 1 required keyword-only argument: 'note'" in problem
    assert problem.endswith("made-up answers to 1 rows, such as 'final[1]' to d:1")


def test_cells_of_a_csv_are_text(my_rewards):
    for file, is_hinted in (("d.csv", True), ("d.jsonl", False)):
        problem = only(problems_of(dataclasses.replace(BARE, file=file), REWARDS="my_rewards:worded"))
        assert ("Cells of a CSV are text: float(...)" in problem) == is_hinted


def test_an_expected_answer_that_earns_nothing_is_noticed(my_rewards):
    """A function with a fault, or one that always returns the same, would cost a run."""
    rows = [dataclasses.replace(ANSWERED, number=n) for n in range(1, 9)]
    warning = warning_of(*rows, REWARDS="my_rewards:same")
    assert "in none of the 8 rows that were tried the text of its column `answer` earns more than no answer" in warning
    assert not warning_of(*rows, REWARDS="my_rewards:finals_length"), "this one pays longer answers more"
    assert not warning_of(BARE, REWARDS="my_rewards:same"), "nothing tells what is correct"
    assert "only None or nan" in warning_of(*rows, REWARDS="my_rewards:mute")


def test_the_answer_that_fails_is_shown(my_rewards):
    """Of all made-up answers and rows one at which the function raises: any other would mislead."""
    rows = [dataclasses.replace(BARE, number=n, columns={"note": str(n)}) for n in range(1, 9)]
    problem = only(problems_of(*rows, REWARDS="my_rewards:third"))
    assert "ZeroDivisionError" in problem and problem.endswith("answers to 8 rows, such as 'final[0]' to d:3")
    problem = only(problems_of(*rows, REWARDS="my_rewards:finals"))
    assert "IndexError" in problem and "final" not in problem.rpartition("such as ")[2]


def test_the_example_of_the_docs_finds_its_answers(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    example = text[text.index("# answers.py, used as") :].partition("```")[0]
    (tmp_path / "answers.py").write_text(example)
    rows = [["What is 4+4? ", "[0]"], ["What is 4+5?", "[0]"]]
    path = write_csv(tmp_path / "train.csv", ["question", "answer"], rows)
    monkeypatch.chdir(tmp_path)
    trials = try_rewards([("answers:exact", 1.0)], Settings(), read_file(path, Problems()), TOKENIZER)
    assert [answers[2:] for _, answers in trials] == [[[1.0], [0.0], [1.0]]] * 2, "of [0], [1] and the expected one"
