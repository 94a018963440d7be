# SPDX-License-Identifier: Apache-2.0
"""Reward functions: what they get, and what they may return."""

from __future__ import annotations

import contextlib
import dataclasses
import sys

import pytest

from grpo.data import scoring
from grpo.data.files import Row
from grpo.data.scoring import RewardError, initial_trainer_state, load_rewards, read_completion, reward_callable, score
from grpo.settings import ROOT, Settings

RESULTS = [
    ("[1, None, 0.5]", None),
    ("[True, 0, 1]", None),
    ("__import__('numpy').ones(3)", None),
    ("list(__import__('numpy').ones(3, 'float32'))", None),
    ("[1, 2]", "returned 2 rewards for 3"),
    ("None", "returned NoneType"),
    ("['a', 1, 2]", "returned 'a'"),
    ("[1, 2, float('inf')]", "returned inf"),
    ("[1, 2, -1e20]", "returned -1e.20, which is neither"),
    ("__import__('json').loads('x')", r"raised JSONDecodeError: .*\(returns_[0-9]+.py, line 2\)"),
]


@pytest.mark.parametrize(("result", "message"), RESULTS)
def test_what_a_reward_may_return(result, message, tmp_path, monkeypatch):
    name = f"returns_{abs(hash(result))}"
    (tmp_path / f"{name}.py").write_text(f"async def score(completions, **columns):\n    return {result}\n")
    monkeypatch.chdir(tmp_path)
    reward = reward_callable(f"{name}:score", "score", Settings())
    expected = pytest.raises(RuntimeError, match=f"REWARDS: {name}:score {message}")
    with expected if message else contextlib.nullcontext():
        assert len(reward(["a", "b", "c"])) == 3


ODD = """
class Odd(Exception):
    def __repr__(self):
        return 1 / 0
    __str__ = __repr__
def raises(completions, **columns):
    raise Odd
def returns(completions, **columns):
    return [Odd()]
"""


def test_objects_whose_text_raises_are_named(tmp_path, monkeypatch):
    (tmp_path / "odd_rewards.py").write_text(ODD)
    monkeypatch.chdir(tmp_path)
    faults = {"raises": r"raised Odd: its text cannot be made: ZeroDivisionError \(odd_rewards.py, line 7\)"}
    faults["returns"] = "returned its text cannot be made: ZeroDivisionError, which is neither"
    for name, fault in faults.items():
        with pytest.raises(RewardError, match=f"REWARDS: odd_rewards:{name} {fault}"):
            reward_callable(f"odd_rewards:{name}", name, Settings())(["a"])


def test_rates_of_completions():
    """Two of four answer, one of them the best action; one was cut off. Without actions, text is an answer."""
    row = Row("d.csv", 1, (("user", "x"),), (0.0, 1.0), {})
    answers = [("[1]", 10, False), ("[0]", 20, False), ("", 30, True), ("so", 40, False)]

    def rates(row):
        texts = [(f"<|channel|>final<|message|>{text}<|return|>", tokens, cut) for text, tokens, cut in answers]
        return scoring.completion_rates([read_completion(row, text, "", tokens, cut) for text, tokens, cut in texts])

    lengths = {"clipped_ratio": 0.25, "tokens_mean": 25, "tokens_max": 40}
    assert rates(row) == lengths | {"parse_rate": 0.5, "best_action_rate": 0.25}
    assert rates(dataclasses.replace(row, rewards=())) == lengths | {"parse_rate": 0.75, "best_action_rate": 0}


TURN = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"
PLAIN = "analysisHmassistantfinal{}"  # what TRL decodes of it


def scores_of(names, row, texts):
    """The rewards of these answers to a row (N, F), with functions called as the trainer calls them."""
    functions = load_rewards([(name, 1.0) for name in names], Settings())
    completions = [read_completion(row, TURN.format(text), PLAIN.format(text), 3, False) for text in texts]
    return score(functions, completions, [[1, 2, 3]] * len(texts), list(row.columns), initial_trainer_state(5))


def scores(name, row, texts):
    return [value for (value,) in scores_of([name], row, texts)]


TEXT = Row("d.jsonl", 1, (("user", "2 + 2?"),), (), {}, "<|start|>assistant", trl_prompt="2 + 2?")
CHAT = dataclasses.replace(TEXT, trl_prompt=[{"role": "user", "content": "2 + 2?"}])


@pytest.mark.parametrize("row", [TEXT, CHAT])
def test_a_first_argument_of_another_name_gets_whole_turns(row, tmp_path, monkeypatch):
    """By position; test_wiring.py shows that all other functions are called as TRL calls them."""
    monkeypatch.delitem(sys.modules, "my_turns", raising=False)  # of the other case, whose folder was another
    code = "return [float(x.startswith('<|start|>assistant')) for x in texts]"
    (tmp_path / "my_turns.py").write_text(f"def turns(texts, *, prompts, **columns): {code}")
    monkeypatch.chdir(tmp_path)
    assert scores("my_turns:turns", row, ["so 4", "boxed{4}"]) == [1.0, 1.0]


HIDDEN = [  # the user's own file, what REWARDS name, and what hides it
    ("rewards.py", "rewards:regret", "the project's own module"),
    ("rewards.py", "rewards:mine", "which has no such function"),
    ("rewards/__init__.py", "rewards:regret", "a package"),
    ("own_folder/mine.py", "own_folder.mine:regret", None),
    ("json.py", "json:loads", "the standard library's"),
    ("grpo/__init__.py", "grpo.mine:regret", "a module inside of a hidden package"),
    ("numpy.py", "numpy:mean", "a library's"),
]


@pytest.mark.parametrize(("file", "name", "hidden_by"), HIDDEN)
def test_a_module_of_ones_own_is_not_taken_for_another_of_its_name(file, name, hidden_by, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("def regret(completions, **columns):\n    return [7.0] * len(completions)\n")
    if hidden_by:
        with pytest.raises(ValueError, match=rf"{file} is hidden by /.*, which has the same name: rename yours"):
            scoring.load_reward(name)
    else:
        assert scores(name, TEXT, ["x"]) == [7.0], "a folder without __init__.py hides nothing and is not hidden"


def test_the_projects_own_rewards_may_be_named_in_its_folder(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert scoring.load_reward("rewards:regret") is scoring.load_reward("regret")


SOLVED = dataclasses.replace(CHAT, columns={"solution": "$4$"})


def test_trls_own_rewards_run_as_they_are(tmp_path, monkeypatch):
    """Its functions by their names, its factories by a module of one's own."""
    assert scores("trl.rewards:accuracy_reward", SOLVED, [r"\boxed{4}", r"\boxed{5}"]) == [1.0, 0.0]
    module = "from trl.rewards import *\nlong = get_soft_overlong_punishment(4, 2)\n"
    (tmp_path / "my_made_rewards.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    assert scores("my_made_rewards:long", CHAT, ["x"]) == [-0.5]


GREEDY = """
def takes(prompts, completions, completion_ids, tags, **columns):
    for values in (prompts, completions, completion_ids, tags, tags[0], completion_ids[0], columns["raw_completions"]):
        values.pop()
    if prompts and isinstance(prompts[0], list):
        prompts[0][0]["content"] = completions[0][0]["content"] = ""
    return [1.0, 1.0]
def looks(prompts, completions, completion_ids, tags, raw_completions, **columns):
    whole = len(prompts) == len(completions) == len(completion_ids) == len(raw_completions) == 2
    text = "2 + 2?" in str(prompts[0]) and "assistantfinal[0]" in str(completions[0])
    return [float(whole and text and tags == [["a", "b"]] * 2 and completion_ids[0] == [1, 2, 3])] * 2
"""


@pytest.mark.parametrize("row", [TEXT, CHAT])
def test_a_function_that_changes_its_lists_changes_nothing_for_others(row, tmp_path, monkeypatch):
    """Neither for those behind it nor in the next step, where the rows are the same."""
    monkeypatch.delitem(sys.modules, "my_greedy", raising=False)  # of the other case, whose folder was another
    (tmp_path / "my_greedy.py").write_text(GREEDY)
    monkeypatch.chdir(tmp_path)
    row = dataclasses.replace(row, columns=row.columns | {"tags": ["a", "b"]})
    for _ in range(2):
        values = scores_of(["my_greedy:takes", "my_greedy:looks", "format"], row, ["[0]", "so"])
        assert values == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]


def test_titles_tell_functions_apart():
    names = ["action", "mine:score", "yours:score", "mine:last"]
    assert scoring.reward_titles(names) == ["action", "mine:score", "yours:score", "last"]
