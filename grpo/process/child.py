# SPDX-License-Identifier: Apache-2.0
"""Runs other programs from a script: forwards signals to them and returns their exit codes."""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

from grpo.process.ending import SIGNALS

PR_SET_PDEATHSIG = 1  # The number of an option of prctl(2).
_libc = ctypes.CDLL(None)
_children: set[subprocess.Popen[bytes]] = set()
_received: list[int] = []  # signals since `forwarding_signals` began
_forwarding = False


@contextlib.contextmanager
def forwarding_signals() -> Iterator[None]:
    """Inside the block SIGINT, SIGTERM and SIGHUP are forwarded to the child programs, and this process waits for them.
    Only the main thread can catch signals: enter a block there before other threads call `run_child`."""
    global _forwarding
    if _forwarding or threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        for child in list(_children):
            child.send_signal(number)

    _forwarding, handlers = True, {number: signal.getsignal(number) for number in SIGNALS}
    for number, previous in handlers.items():
        if previous != signal.SIG_IGN:  # `nohup` ignores SIGHUP, and its children do as well.
            signal.signal(number, forward)
    try:
        yield
    finally:
        for number, previous in handlers.items():
            signal.signal(number, previous)
        _received.clear()
        _forwarding = False


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """In a child: asks Linux for this signal when its parent is killed, so that no process goes on unseen."""
    if hasattr(_libc, "prctl"):  # Only Linux has it.
        _libc.prctl(PR_SET_PDEATHSIG, number)


def run_child(
    command: Sequence[str | os.PathLike[str]], environ: Mapping[str, str] | None = None, output: IO | None = None
) -> int:
    """Runs a program with this process's environment and `environ`, and returns its exit code, 128 + N where signal N
    ended it. `output`: the file for the program's output, None for the terminal.

    After a signal to this process it raises SystemExit, with the child's code unless 0: nothing else is started."""
    with forwarding_signals():
        if _received:
            raise SystemExit(128 + _received[0])
        # A process group of its own, so that Ctrl-C reaches the child once, from here: a second one ends it at once.
        child = subprocess.Popen(
            command,
            env=os.environ | (environ or {}),
            stdout=output,
            stderr=output and subprocess.STDOUT,
            process_group=0,
            preexec_fn=end_with_parent,
        )
        _children.add(child)
        for number in _received[:]:  # A signal that came while the child started was not forwarded.
            child.send_signal(number)
        try:
            code = child.wait()
        finally:
            _children.discard(child)
        code = 128 - code if code < 0 else code
        if _received:
            raise SystemExit(code or 128 + _received[0])
        return code
