# SPDX-License-Identifier: Apache-2.0
"""Environments in processes of their own: what they return, and what becomes of those that misbehave."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver

import pytest
from helpers import ROOT
from transformers.utils import get_json_schema
from worlds import Sum

from grpo.common import InputError
from grpo.environment.pool import DIED, TIMED_OUT, EnvironmentPool, describe_environment
from grpo.process.ending import SIGNALS


@pytest.fixture
def pool_of():
    pools = []

    def make(name, timeout=20.0):
        pools.append(EnvironmentPool(f"worlds:{name}", timeout))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def ask(pool, environment, *request, timeout=None):
    environment.ask(timeout or pool.timeout, *request)
    ((answered, reply),) = pool.replies([environment], block=True)
    assert answered is environment
    return reply


def test_an_episode(pool_of):
    """Rewards of a call are what it added to `step_rewards`, a call that raised included."""
    pool = pool_of("Sum")
    environment = pool.take()
    assert ask(pool, environment, "reset", {"target": 3, "prompt": "x"}).text == " Reach 3."
    reply = ask(pool, environment, "call", "add", {"number": 1})
    assert (reply.text, reply.reward, reply.done, reply.is_error) == ("total 1", -0.2, False, False)
    reply = ask(pool, environment, "call", "add", {"count": 1})
    assert reply.is_error and reply.reward == 0 and "unexpected keyword argument 'count'" in reply.text
    assert ask(pool, environment, "call", "wait", {}).text == '{"waited": 0.0, "by": null}'
    reply = ask(pool, environment, "call", "add", {"number": 2})
    assert (reply.text, reply.reward, reply.done) == ("total 3", 0.0, True)
    reply = ask(pool, environment, "finish", True)
    assert reply.reward == 1.0 and pickle.loads(reply.copy).total == 3
    assert not ask(pool, environment, "reset", {}).done, "constructed once, reset for each episode"


def test_a_signal_to_all_processes_of_a_job_ends_no_environment(pool_of):
    """The run finishes its step after one, and its episodes with it. A tool's own programs can be ended by one."""
    pool = pool_of("Sum")
    environment = pool.take()
    ask(pool, environment, "reset", {"target": 3, "prompt": "x"})
    for number in SIGNALS:
        for process in (forkserver._forkserver._forkserver_pid, environment.process.pid):
            os.kill(process, number)
    time.sleep(0.3)
    assert ask(pool, environment, "call", "add", {"number": 1}).text == "total 1"
    program = pool_of("Rough").take()
    assert ask(pool, program, "call", "end_program", {}).text == "-15"


FROM_ELSEWHERE = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from grpo.environment.pool import EnvironmentPool
pool = EnvironmentPool("world:World", 20)
for request in (("reset", {}), ("call", "parent", {})):
    if request[0] == "reset":
        environment = pool.take()
    else:
        os.kill(environment.process.pid, signal.SIGTERM)
        time.sleep(0.3)
    environment.ask(20, *request)
    ((_, reply),) = pool.replies([environment], block=True)
    print(reply.failed or reply.text)
print("PYTHONPATH" in os.environ)
"""
WORLD = """
import os
IMPORTED_BY = os.getpid()
class World:
    def reset(self):
        return "begun"
    def parent(self):
        return str(IMPORTED_BY == os.getppid())
"""


def test_the_process_that_forks_them_imports_everything_wherever_the_program_starts(tmp_path):
    """Before Python 3.12.8 it did not in another folder than the project's, and a signal then ended environments."""
    (tmp_path / "world.py").write_text(WORLD)
    command = [sys.executable, "-c", FROM_ELSEWHERE, str(ROOT)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["begun", "True", "False"], done.stdout + done.stderr


def test_arguments_and_columns_may_have_any_name(pool_of):
    """A tool that fetches pages has a `method`: it was answered that it got multiple values for it, at every call."""
    pool = pool_of("Fetch")
    environment = pool.take()
    reply = ask(pool, environment, "reset", {"method": "POST", "name": "x", "arguments": 1})
    assert (reply.text, reply.failed) == (" By POST, with name, arguments.", "")
    assert ask(pool, environment, "call", "fetch", {"method": "GET", "name": "page"}).text == "GET page"


FAILURES = [("leave", {}, DIED), ("stop", {}, "call raised SystemExit: 1"), ("wait", {"seconds": 60}, TIMED_OUT)]


@pytest.mark.parametrize(("tool", "arguments", "failure"), FAILURES)
def test_what_fails_is_named_and_replaced(pool_of, tool, arguments, failure):
    pool = pool_of("Rough")
    environment = pool.take()
    ask(pool, environment, "reset", {})
    failed = ask(pool, environment, "call", tool, arguments, timeout=20 if tool != "wait" else 0.2).failed
    assert failed.startswith(failure) and failed.count("line") == failure.count(" raised ")
    assert not environment.process.is_alive() and pool.all == set()
    assert ask(pool, pool.take(), "reset", {}).text == " Reach 0."


def test_what_died_between_two_episodes_is_not_lent(pool_of):
    """The kernel may end many at once where memory is short: an episode has two tries alone."""
    pool = pool_of("Sum")
    environments = [pool.take() for _ in range(3)]
    for environment in environments:
        ask(pool, environment, "reset", {})
        pool.give_back(environment)
        os.kill(environment.process.pid, signal.SIGKILL)
        environment.process.join()
    assert ask(pool, pool.take(), "reset", {}).text == " Reach 0." and len(pool.all) == 1


def test_a_copy_a_thread_and_megabytes_stay_there(pool_of):
    pool = pool_of("Rough")
    environment = pool.take()
    ask(pool, environment, "reset", {})
    assert ask(pool, environment, "call", "fail", {}).text == '{"error": "no such load"}'
    assert ask(pool, environment, "call", "fork", {}).text == "x" * 1_000_000, "the copy answered"
    assert ask(pool, environment, "call", "add", {"number": 0}).text == "total 0", "the copy answered"
    copy = pickle.loads(ask(pool, environment, "finish", True).copy)
    assert copy["total"] == 0 and not {"lock", "error"} & set(copy)


@pytest.mark.parametrize(("tool", "message"), [("tabulate", "keys must be str"), ("contain", "Circular reference")])
def test_a_result_that_json_cannot_hold_is_an_error_for_the_model(pool_of, tool, message):
    pool = pool_of("Rough")
    environment = pool.take()
    ask(pool, environment, "reset", {})
    reply = ask(pool, environment, "call", tool, {})
    assert reply.is_error and reply.text.startswith(f'{{"error": "{message}'), reply.failed
    assert ask(pool, environment, "call", "add", {"number": 0}).text == "total 0"


def test_nobody_waits_for_the_slow(pool_of):
    """The answers of others come while one waits, and a late one does not block."""
    pool = pool_of("Sum")
    slow, quick = pool.take(), pool.take()
    for environment in (slow, quick):
        ask(pool, environment, "reset", {})
    slow.ask(0.5, "call", "wait", {"seconds": 60})
    quick.ask(20, "call", "add", {"number": 1})
    started = time.monotonic()
    assert [environment for environment, _ in pool.replies([slow, quick], block=True)] == [quick]
    assert pool.replies([slow], block=False) == []
    ((_, reply),) = pool.replies([slow], block=True)
    assert reply.failed == TIMED_OUT and time.monotonic() - started < 10


def test_a_class_is_described_as_trl_describes_it():
    description = describe_environment("worlds:Sum", 20)
    schemas = [get_json_schema(getattr(Sum(), name)) for name in ("add", "wait")]
    for schema in schemas:
        schema["function"].pop("return", None)
    assert (description.name, description.tools, description.has_reward) == ("Sum", schemas, True)


FAULTS = {
    "NoReset": "NoReset has no method `reset`",
    "NoTool": "there is no tool to call",
    "Untyped": "the method multiply needs types and a docstring",
    "Umlaut": "Harmony cannot carry the tool name 'grösse'",
    "TokenInDocstring": r"docstrings or defaults hold <\|call\|>: the model reads these",
    "DoneMethod": "done is a method",
    "Missing": "'worlds:Missing' cannot be loaded: AttributeError",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_class_that_cannot_be_used_is_refused(forked_description, name):
    with pytest.raises(InputError, match=FAULTS[name].replace("(", r"\(")):
        describe_environment(f"worlds:{name}", 20)


@pytest.mark.parametrize(("name", "request_", "failure"), [
    ("IntReset", ("reset", {}), r"reset returned 3 (int), neither text nor None"),
    ("HalfCharacter", ("reset", {}), "reset raised ValueError: no file days\ufffd.csv"),
    ("TextReward", ("finish", False), "get_reward returned 'good', neither a finite number"),
    ("Late", ("finish", False), TIMED_OUT),
])  # fmt: skip
def test_what_an_environment_returns_is_checked(pool_of, name, request_, failure):
    pool = pool_of(name)
    environment = pool.take()
    if request_[0] != "reset":
        ask(pool, environment, "reset", {})
    assert ask(pool, environment, *request_, timeout=0.3 if name == "Late" else None).failed.startswith(failure)


def test_the_example_of_the_page_plays(forked_description, tmp_path, monkeypatch):
    """The class in docs/environments.md, as a user copies it."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/environments.md").read_text(), re.M | re.S)
    (tmp_path / "shop.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert [tool["function"]["name"] for tool in describe_environment("shop:Shop", 20).tools] == ["search", "total_is"]
    pool = EnvironmentPool("shop:Shop", 20.0)
    environment = pool.take()
    asked = {"prompt": "What do a desk and a desk lamp cost?"}  # As scripts/ask.py does.
    assert ask(pool, environment, "reset", asked).text == " The list has 4 things."
    ask(pool, environment, "reset", asked | {"total": "92.5"})
    assert ask(pool, environment, "call", "search", {"word": "desk"}).text == "desk lamp: 12.5; desk: 80.0"
    assert ask(pool, environment, "call", "total_is", {"price": 92.5}).done
    assert ask(pool, environment, "finish", False).reward == 1.0
    pool.close()
