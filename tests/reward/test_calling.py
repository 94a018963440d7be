# SPDX-License-Identifier: Apache-2.0
"""Reward functions: what they get, what they may return, and what they leave behind."""

import contextlib
import dataclasses
import gc
import logging
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, run_python

from grpo.common import log
from grpo.data.files import Row
from grpo.reward.calling import RewardError, load_rewards
from grpo.reward.scoring import initial_trainer_state, read_completion, score
from grpo.settings.table import MOST_REWARD, Settings
from rewards import ACTION_REWARDS


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Writes a module of the user's into the current folder; one of its name may be imported from another test."""

    def write(name, text):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.chdir(tmp_path)

    return write


RESULTS = [
    ("[1, None, 0.5]", None),
    ("[True, 0, 1]", None),
    ("__import__('numpy').ones(3)", None),
    ("list(__import__('numpy').ones(3, 'float32'))", None),
    ("[__import__('fractions').Fraction(1, 2), __import__('decimal').Decimal('0.5'), 1]", None),
    ("[1, 2]", "returned 2 rewards for 3"),
    ("[__import__('numpy').ones(2)] * 3", r"returned array\(\[1., 1.\]\), which is neither"),
    ("[__import__('torch').ones(2)] * 3", r"returned tensor\(\[1., 1.\]\), which is neither"),
    ("[__import__('fractions').Fraction(10**400)] * 3", r"returned Fraction\(10+ ... 0+, 1\), which is neither"),
    ("__import__('torch').ones(3, device='meta')", "returned Tensor without numbers: NotImplementedError"),
    ("None", "returned NoneType"),
    ("['a', 1, 2]", "returned 'a'"),
    ("[1, 2, float('inf')]", "returned inf"),
    ("[1, 2, -1e20]", "returned -1e.20, which is neither"),
    ("__import__('json').loads('x')", r"raised JSONDecodeError: .*\(returns.py, line 2\)"),
]


@pytest.mark.parametrize(("result", "message"), RESULTS)
def test_what_a_reward_may_return(result, message, write_module):
    write_module("returns", f"async def score(completions, **columns):\n    return {result}\n")
    (reward,) = load_rewards([("returns:score", 1.0)], Settings())
    expected = pytest.raises(RuntimeError, match=f"REWARDS: returns:score {message}")
    with expected if message else contextlib.nullcontext():
        assert len(reward(["a", "b", "c"])) == 3


@pytest.mark.parametrize("name", ACTION_REWARDS)
def test_the_largest_numbers_that_a_file_may_hold_can_be_scored(name):
    """Before a run the functions are tried on some rows only, and in the middle no error would name the cell."""
    columns = {f"{kind}_action_{k}": [MOST_REWARD * (2 * k - 1)] * 2 for kind in ("reward", "q") for k in range(2)}
    (reward,) = load_rewards([(name, 1.0)], Settings())
    worst, unread = reward(["assistantfinal[0]", "assistantfinal"], **columns)
    assert unread < worst


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


def test_objects_whose_text_raises_are_named(write_module):
    write_module("odd_rewards", ODD)
    faults = {"raises": r"raised Odd: its text cannot be made: ZeroDivisionError \(odd_rewards.py, line 7\)"}
    faults["returns"] = "returned its text cannot be made: ZeroDivisionError, which is neither"
    for name, fault in faults.items():
        with pytest.raises(RewardError, match=f"REWARDS: odd_rewards:{name} {fault}"):
            load_rewards([(f"odd_rewards:{name}", 1.0)], Settings())[0](["a"])


TASKS = """
import asyncio
async def judge():
    raise ValueError("no quota")
async def cancels(completions, **columns):
    task = asyncio.create_task(judge())
    task.cancel()
    await task
async def groups(completions, **columns):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(judge())
"""


def test_what_goes_wrong_in_a_functions_own_tasks_is_named(write_module):
    """A cancelled task was a traceback, and of a TaskGroup only the number of its errors was told."""
    write_module("task_rewards", TASKS)
    for name, fault in (("cancels", "CancelledError"), ("groups", r"ValueError: no quota \(task_rewards.py, line 4\)")):
        with pytest.raises(RewardError, match=f"REWARDS: task_rewards:{name} raised {fault}"):
            load_rewards([(f"task_rewards:{name}", 1.0)], Settings())[0](["a"])


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


SOLVED = dataclasses.replace(CHAT, columns={"solution": "$4$"})


def test_trls_own_rewards_run_as_they_are(write_module):
    """Its functions by their names, its factories by a module of one's own."""
    assert scores("trl.rewards:accuracy_reward", SOLVED, [r"\boxed{4}", r"\boxed{5}"]) == [1.0, 0.0]
    write_module("my_made_rewards", "from trl.rewards import *\nlong = get_soft_overlong_punishment(4, 2)\n")
    assert scores("my_made_rewards:long", CHAT, ["x"]) == [-0.5]


def test_overlong_is_dapos_punishment_as_trl_computes_it(write_module):
    """With the settings' length and share as its two numbers, at every length up to the longest."""
    write_module("my_punishment", "from trl.rewards import *\nsoft = get_soft_overlong_punishment(12, 3)\n")
    settings = Settings(MAX_COMPLETION_LEN=12, OVERLONG_SHARE=0.25)
    ours, trls = load_rewards([("overlong", 1.0), ("my_punishment:soft", 1.0)], settings)
    ids = [[1] * length for length in range(13)]
    punished = ours([""] * 13, completion_ids=ids)
    assert punished == pytest.approx(trls([""] * 13, completion_ids=ids))
    assert punished[9:] == pytest.approx([0, -1 / 3, -2 / 3, -1])


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
def test_a_function_that_changes_its_lists_changes_nothing_for_others(row, write_module):
    """Neither for those behind it nor in the next step, where the rows are the same."""
    write_module("my_greedy", GREEDY)
    row = dataclasses.replace(row, columns=row.columns | {"tags": ["a", "b"]})
    for _ in range(2):
        values = scores_of(["my_greedy:takes", "my_greedy:looks", "format"], row, ["[0]", "so"])
        assert values == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]


JUDGES = """
import asyncio
limit, meeting, loops = asyncio.Semaphore(1), asyncio.Event(), set()
async def ask():
    loops.add(asyncio.get_running_loop())
    async with limit:
        await asyncio.sleep(0.01)
    return 1.0
async def first(completions, **columns):
    await asyncio.wait_for(meeting.wait(), 10)
    return await asyncio.gather(*(ask() for _ in completions))
async def second(completions, **columns):
    meeting.set()
    return [float(len(loops))] * len(completions)
def plain(completions, **columns):
    return [float(meeting.is_set())] * len(completions)
async def leaves(completions, **columns):
    raise SystemExit("enough")
def fails(completions, **columns):
    raise ValueError("no")
"""


def test_async_functions_share_one_loop_for_the_whole_run(write_module):
    """Its semaphore belongs to the loop that used it first; functions run together, after those that are not async."""
    write_module("my_judges", JUDGES)
    names = ["my_judges:first", "my_judges:second", "my_judges:plain"]
    assert scores_of(names, TEXT, ["[0]", "[1]"]) == [[1.0, 0.0, 0.0]] * 2, "first waits for second, second for plain"
    assert scores_of(names, TEXT, ["[0]", "[1]"]) == [[1.0, 1.0, 1.0]] * 2, "the second call, of the same loop"


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # Files of earlier tests may be collected here.
def test_an_async_function_that_fails_ends_no_loop(write_module):
    write_module("my_judges", JUDGES)
    for names in (["my_judges:leaves", "my_judges:second"], ["my_judges:second", "my_judges:fails"]):
        with pytest.raises(RewardError, match=r"my_judges:(leaves|fails) raised (SystemExit|ValueError)"):
            scores_of(names, TEXT, ["[0]"])
    gc.collect()  # A coroutine that nobody awaited would warn.
    assert scores("my_judges:second", TEXT, ["[0]"])


COLUMNS = """
def first(answer, **columns): return [float(a == "4") for a in answer]
def both(answer, completions, **_): return [float("4" in str(c) and a == "4") for a, c in zip(answer, completions)]
def optional(factor=2.0, **columns): return [factor for _ in columns["prompts"]]
def turns(answers, *, prompts, **columns): return [float(text.startswith("<|start|>assistant")) for text in answers]
"""


@pytest.mark.parametrize("row", [TEXT, CHAT])
@pytest.mark.parametrize("name", ["first", "both", "optional", "turns"])
def test_a_first_argument_that_is_a_column_or_has_a_default_is_given_by_keyword(name, row, write_module):
    """As in TRL; only a name that nothing else has gets the completions, as whole turns."""
    write_module("my_columns", COLUMNS)
    row = dataclasses.replace(row, columns={"answer": "4"})
    assert scores(f"my_columns:{name}", row, ["4"]) == [2.0 if name == "optional" else 1.0]


def test_a_column_may_have_any_name(write_module):
    write_module("my_columns", "def own(self, **columns): return [float(value) for value in self]\n")
    row = dataclasses.replace(TEXT, columns={"self": "4", "name": "", "": 0})
    assert scores("my_columns:own", row, ["4"]) == [4.0] and scores("format", row, ["[0]"]) == [1.0]


FORKS = """
from grpo.reward.calling import load_rewards
from grpo.settings.table import Settings
print(load_rewards([("my_forks:{name}", 1.0)], Settings())[0](["[0]", "[1]"]), flush=True)
"""
FORKING = """
import os
{at_import}
def plain(completions, **columns):
    os.fork()
    return [1.0 for _ in completions]
def fails(completions, **columns):
    if os.fork() == 0:
        raise ValueError("in the copy")
    return [1.0 for _ in completions]
async def waits(completions, **columns):
    os.fork()
    return [1.0 for _ in completions]
def still(completions, **columns):
    return [1.0 for _ in completions]
"""


@pytest.mark.parametrize("name", ["plain", "fails", "waits", "still"])
def test_a_function_that_forks_returns_in_one_process_alone(name, tmp_path):
    """Two processes would train in one folder. The last module forks when it is imported."""
    (tmp_path / "my_forks.py").write_text(FORKING.format(at_import="os.fork()" if name == "still" else ""))
    done = run_python("-c", FORKS.format(name=name), cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.stdout == "[1.0, 1.0]\n"
    assert done.stderr == f"REWARDS: my_forks:{name} forked a process and returned in it; the copy ends here\n"


MOVING = """
import logging, os, torch
FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "judge.log")
def set_up():  # What `logging.config.dictConfig` and `basicConfig(force=True)` do, but to this log alone.
    logging.root.handlers[:] = [logging.StreamHandler(), logging.FileHandler(FILE)]
    logging.root.setLevel("CRITICAL")
    logging.disable()
    logging.getLogger("train_grpo").disabled = True
os.chdir("/")
torch.set_grad_enabled(False)
set_up()
def plain(completions, **columns):
    os.chdir("/")
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    set_up()
    return [1.0 for _ in completions]
async def waits(completions, **columns):
    return plain(completions)
"""


@pytest.mark.parametrize("name", ["plain", "waits"])
def test_the_run_stays_where_it_is_and_torch_and_its_log_as_they_were(
    name, write_module, tmp_path, caplog, monkeypatch, capsys
):
    """A run whose OUTPUT_DIR is relative was written elsewhere, and one without a log failed without a word."""
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers])
    write_module("my_moves", MOVING)
    level = logging.root.level
    assert scores(f"my_moves:{name}", TEXT, ["[0]"]) == [1.0]
    assert (Path.cwd(), torch.is_grad_enabled(), torch.get_default_dtype()) == (tmp_path, True, torch.float32)
    assert torch.empty(1).device.type == "cpu"
    log.warning("said")
    assert "said" in caplog.text and "said" in (tmp_path / "judge.log").read_text()
    assert logging.root.level == level and "said" not in capsys.readouterr().err
