# SPDX-License-Identifier: Apache-2.0
"""The environments of a run, each in a process of its own: what one of them does never reaches the trainer."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from grpo.common import ROOT, InputError, restored_variables
from grpo.environment.worker import Description, Reply, serve

TIMED_OUT, DIED = "it gave no answer in ENV_TIMEOUT", "its process ended"
START_S = 60.0  # Added to the timeout of the first answer: a process is forked, and modules are imported.


class Environment:
    """An environment's process, and this side of the connection to it."""

    def __init__(self, process: BaseProcess, connection: Connection):
        self.process, self.connection = process, connection
        self.deadline = 0.0  # Of the answer that it owes.
        self.grace = START_S

    def ask(self, timeout: float, *request: object) -> None:
        """Sends (method, arguments) of `Host`; `EnvironmentPool.replies` has the answer."""
        with contextlib.suppress(OSError):  # The process ended: its connection reports that.
            self.connection.send(request)
        self.deadline, self.grace = time.monotonic() + timeout + self.grace, 0.0

    def answer(self) -> Reply:
        """The answer that has arrived."""
        try:
            reply = self.connection.recv()
        except Exception:  # EOFError, or a torn pickle.
            return Reply(failed=DIED)
        return reply if isinstance(reply, Reply) else Reply(failed=DIED)

    def kill(self) -> None:
        """Ends the process and everything that it has started in its session."""
        if self.process.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


def spawn(method: str, name: str) -> Environment:
    """Starts a process for the environment `name` by a start method of multiprocessing."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, name), daemon=True, name=f"environment {name}")  # type: ignore[attr-defined]
    with without_main():
        process.start()
    theirs.close()
    return Environment(process, ours)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Inside the block new processes do not import the program that runs, as those of multiprocessing do: they need
    nothing of it, and it may import torch."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def with_project_on_path() -> Iterator[None]:
    """Inside the block a new fork server can import this project wherever the program was started. Before Python 3.12.8
    and 3.13.1 it ignores `sys.path`, and passes over what it cannot import without a word
    (https://github.com/python/cpython/issues/117378)."""
    with restored_variables("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        yield


def describe_environment(name: str, timeout: float) -> Description:
    """What the class `name` offers, read in a process of its own. Raises InputError with the fault."""
    environment = spawn("spawn", name)
    try:
        environment.ask(timeout, "describe")
        if not environment.connection.poll(max(0.0, environment.deadline - time.monotonic())):
            raise InputError(f"constructing it took more than {timeout:g} s")
        try:
            answer = environment.connection.recv()
        except Exception:
            raise InputError("its process ended while it was constructed") from None
        if not isinstance(answer, Description):
            raise InputError(answer.failed.removeprefix("constructing it raised ValueError: "))
        return answer
    finally:
        environment.kill()


class EnvironmentPool:
    """Lends environments, which are constructed once and reset for each episode, as TRL does. They are forked from a
    process that has imported the user's module and nothing of torch."""

    def __init__(self, name: str, timeout: float):
        self.name, self.timeout = name, timeout
        self.idle: list[Environment] = []
        self.all: set[Environment] = set()
        atexit.register(self.close)

    def take(self) -> Environment:
        """An environment that plays no episode."""
        while self.idle:
            environment = self.idle.pop()
            if environment.process.is_alive():
                return environment
            self.kill(environment)
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        # `describe_environment` has imported the module already: it neither fails nor hangs here.
        # The first one is named, because importing it here would let this process ignore its signals.
        modules = ["grpo.environment.unsignalled", serve.__module__, self.name.partition(":")[0]]
        multiprocessing.set_forkserver_preload(modules)
        with with_project_on_path():
            environment = spawn("forkserver", self.name)
        self.all.add(environment)
        return environment

    def give_back(self, environment: Environment) -> None:
        self.idle.append(environment)

    def kill(self, environment: Environment) -> None:
        """Ends an environment that failed; another one takes its place when it is needed."""
        self.all.discard(environment)
        environment.kill()

    def replies(self, environments: Collection[Environment], block: bool) -> list[tuple[Environment, Reply]]:
        """The answers that these `environments` owe, in no order: those that are there, or with `block` at
        least one. One that is late or whose process ended has failed; its process is ended."""
        first = min((environment.deadline for environment in environments), default=0.0)
        connections = {environment.connection: environment for environment in environments}
        ready = wait(list(connections), max(0.0, first - time.monotonic()) if block else 0.0)
        replies = [(connections[c], connections[c].answer()) for c in ready if isinstance(c, Connection)]
        answered, now = {environment for environment, _ in replies}, time.monotonic()
        late = [
            environment for environment in environments if environment not in answered and environment.deadline <= now
        ]
        replies += [(environment, Reply(failed=TIMED_OUT)) for environment in late]
        for environment, reply in replies:
            if reply.failed:
                self.kill(environment)
        return replies

    def close(self) -> None:
        """Ends all environments."""
        for environment in [*self.all]:
            self.kill(environment)
        self.idle.clear()
