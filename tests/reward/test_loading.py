# SPDX-License-Identifier: Apache-2.0
"""Which function a name of REWARDS stands for."""

import pytest
from helpers import ROOT

from grpo.reward.loading import load_reward, reward_titles

HIDDEN = [  # the user's own file, what REWARDS name, and what hides it
    ("rewards.py", "rewards:regret", "the project's own module"),
    ("rewards.py", "rewards:mine", "which has no such function"),
    ("rewards/__init__.py", "rewards:regret", "a package"),
    ("own_folder/mine.py", "own_folder.mine:regret", None),
    ("json.py", "json:loads", "the standard library's"),
    ("colorsys.py", "colorsys:regret", "the standard library's, which nothing has imported before"),
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
            load_reward(name)
    else:
        assert load_reward(name)(["x"]) == [7.0], "a folder without __init__.py hides nothing and is not hidden"


def test_the_projects_own_rewards_may_be_named_in_its_folder(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load_reward("rewards:regret") is load_reward("regret")


def test_titles_tell_functions_apart():
    names = ["action", "mine:score", "yours:score", "mine:last"]
    assert reward_titles(names) == ["action", "mine:score", "yours:score", "last"]
