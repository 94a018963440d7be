# SPDX-License-Identifier: Apache-2.0
"""The process in which one environment lives: it runs the user's code, and answers what the pool asks.

An environment is a class in TRL's form (`environment_factory` of its GRPOTrainer): `reset(**row)` begins an episode and
may return text for the prompt, its other public methods are the tools, and `get_reward()`, if there is one, scores the
episode. Two attributes or properties are this project's own, and optional: `done` ends the episode after a call, and
`step_rewards`, a list, has the rewards of the calls so far. Methods may be async."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import pickle
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from grpo.common import format_exception, one_line, text_of, without_surrogates
from grpo.environment.calls import TOOL_NAME, error_text
from grpo.harmony import TOKEN
from grpo.process.child import end_with_parent
from grpo.reward.loading import lines_in_module, load_object, show_line
from grpo.settings.table import MOST_REWARD

MOST_TEXT = 1_000_000  # Characters of a result; the trainer cuts it further, by tokens.
MOST_COPY = 1_000_000  # Bytes of an environment's copy for reward functions.
NOT_TOOLS = ("reset", "get_reward")
# What the user knows these requests by.
METHODS = {"describe": "constructing it", "construct": "constructing it", "finish": "get_reward"}


@dataclass(frozen=True)
class Reply:
    """An environment's answer to one request."""

    text: str = ""  # of a reset or a call
    failed: str = ""  # Why the episode cannot go on; `text` and the rest are empty.
    is_error: bool = False  # Whether the call raised: `text` is its message.
    done: bool = False
    reward: float | None = None  # New `step_rewards`, None without such a list; or what `get_reward` returned.
    copy: bytes = b""  # The environment as a pickle, where reward functions want it.


@dataclass(frozen=True)
class Description:
    """What a class of environments offers."""

    name: str
    tools: Sequence[dict[str, Any]]  # JSON schemas, as chat templates take them
    has_reward: bool  # `get_reward`, or `step_rewards` from the start


class EnvironmentFault(Exception):
    """The user's environment does something that it must not; the message names it."""


def tool_names(kind: type) -> list[str]:
    """The public methods of the class but for NOT_TOOLS, in TRL's order."""
    members = [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]
    return [name for name in members if name not in NOT_TOOLS and not name.startswith("_")]


def describe(factory: Any) -> Description:
    """Constructs an environment and describes it. Raises EnvironmentFault, or what the user's code raises."""
    environment = factory()
    kind = type(environment)
    if not callable(getattr(environment, "reset", None)):
        subject = kind.__name__ if kind is factory else f"it makes a {kind.__name__}, which"
        raise EnvironmentFault(f"{subject} has no method `reset`")
    if own := {"done", "step_rewards"} & set(tool_names(kind)):
        raise EnvironmentFault(f"{min(own)} is a method: make it an attribute or a property")
    # This imports torch, which stays in a process that ends with the check.
    from transformers.utils.chat_template_utils import get_json_schema

    schemas = []
    for name in tool_names(kind):
        if not TOOL_NAME.fullmatch(name):
            raise EnvironmentFault(f"Harmony cannot carry the tool name {name!r}: take ASCII letters, digits and _")
        try:
            schema = get_json_schema(getattr(environment, name))
        except Exception as error:  # It raises its own errors, and what evaluating the annotations raises.
            reason = one_line(str(error), 300)
            raise EnvironmentFault(f"the method {name} needs types and a docstring with its Args ({reason})") from None
        schema["function"].pop("return", None)  # Templates show what is returned nowhere.
        schemas.append(schema)
    if not schemas:
        raise EnvironmentFault(f"{kind.__name__} has no public method beside reset: there is no tool to call")
    text = json.dumps(schemas, ensure_ascii=False)  # A default value that JSON cannot hold is a TypeError here.
    if token := TOKEN.search(text):
        fault = f"its tools' docstrings or defaults hold {token[0]}"
        raise EnvironmentFault(f"{fault}: the model reads these as the begin or end of a message")
    has_reward = callable(getattr(environment, "get_reward", None)) or hasattr(environment, "step_rewards")
    return Description(kind.__name__, schemas, has_reward)


class Host:
    """The environment of this process, which is constructed once and reset for each episode."""

    def __init__(self, factory: Any):
        self.environment = factory()
        self.loop = asyncio.new_event_loop()
        self.rewards_read = 0  # So many `step_rewards` were reported already.

    # The `/` is for tools with an argument, and rows with a column, called `method`.
    def run(self, method: Any, /, *arguments: object, **options: object) -> Any:
        """Calls the method; awaits it if it is async."""
        value = method(*arguments, **options)
        return self.loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def construct(self) -> Reply:
        """Nothing but what the first request of a process does."""
        return Reply()

    def reset(self, columns: dict[str, object]) -> Reply:
        """Begins an episode with the columns of a row."""
        value = self.run(self.environment.reset, **columns)
        if isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value):
            value = "".join(str(part["text"]) for part in value)  # TRL's blocks of content
        if value is not None and not isinstance(value, str):
            shown = one_line(text_of(value, repr), 100)
            raise EnvironmentFault(f"reset returned {shown} ({type(value).__name__}), neither text nor None")
        self.rewards_read = 0
        return Reply(text=(value or "")[:MOST_TEXT], reward=self.new_rewards())

    def call(self, name: str, arguments: dict[str, object]) -> Reply:
        """Calls a tool. What it raises is its result, as in TRL: the model reads it. So is the error where JSON cannot
        hold what it returned."""
        try:
            value, is_error = self.run(getattr(self.environment, name), **arguments), False
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=text_of)
        except Exception as error:
            text, is_error = error_text(text_of(error) or type(error).__name__), True
        reward, done = self.new_rewards(), bool(getattr(self.environment, "done", False))
        return Reply(text=text[:MOST_TEXT], is_error=is_error, done=done, reward=reward)

    def finish(self, wants_copy: bool) -> Reply:
        """The episode's reward, None without `get_reward`, and a copy of the environment if it is wanted."""
        reward = None
        if callable(getattr(self.environment, "get_reward", None)):
            reward = number(self.run(self.environment.get_reward), "get_reward returned")
        return Reply(reward=reward, copy=copy_of(self.environment) if wants_copy else b"")

    def new_rewards(self) -> float | None:
        """The sum of the `step_rewards` that came since the last call; None if the environment has no such list."""
        rewards = getattr(self.environment, "step_rewards", None)
        if rewards is None:
            return None
        new = [number(value, "step_rewards has") for value in list(rewards)[self.rewards_read :]]
        self.rewards_read += len(new)
        return math.fsum(value for value in new if value is not None)


def number(value: Any, where: str) -> float | None:
    """The value as a float; None for None and NaN, as for reward functions. Raises EnvironmentFault."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or value != value:
        return None
    if not isinstance(value, (int, float)) or abs(value) > MOST_REWARD:
        shown = one_line(text_of(value, repr), 100)
        raise EnvironmentFault(f"{where} {shown}, neither a finite number of at most {MOST_REWARD:g} in size nor None")
    return float(value)


def copy_of(environment: object) -> bytes:
    """A pickle of the environment, or of those of its attributes that can be pickled and read again."""

    def pickled(value: object) -> bytes:
        try:
            data = pickle.dumps(value)
            if len(data) > MOST_COPY:
                return b""
            pickle.loads(data)  # An exception with arguments of its own is written, but raises where it is read.
        except Exception:  # Open files, locks, the user's own errors.
            return b""
        return data

    if whole := pickled(environment):
        return whole
    attributes = getattr(environment, "__dict__", {})
    return pickled({name: value for name, value in attributes.items() if pickled(value)})


def serve(connection: Connection, name: str) -> None:
    """The worker's life: answers (method, arguments) one by one until the pool closes the connection.

    The process is the first of a session of its own, so that Ctrl-C does not reach it, and everything that it starts
    can be ended with it. A copy of it that a tool has forked never answers."""
    os.setsid()
    end_with_parent(signal.SIGKILL)
    process, host = os.getpid(), None
    while True:
        try:
            method, *arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if method == "describe":
                answer: Any = describe(load_object(name))
            else:
                host = host or Host(load_object(name))
                answer = getattr(host, method)(*arguments)
        except BaseException as error:  # A user's code may raise anything, SystemExit included.
            text = str(error)
            if not isinstance(error, EnvironmentFault):
                text = f"{METHODS.get(method, method)} raised {format_exception(error)}"
                text += show_line(lines_in_module(error, name))
            answer = Reply(failed=without_surrogates(text))  # It is written to completions.csv.
        if os.getpid() != process:
            os._exit(1)
        try:
            connection.send(answer)
        except OSError:
            return
