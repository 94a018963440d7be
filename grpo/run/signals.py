# SPDX-License-Identifier: Apache-2.0
"""How a run is asked to end: the first Ctrl-C, SIGTERM or SIGHUP while it trains, or any later one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from grpo.run.logs import detach_closed_terminal
from grpo.settings import log

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_signals() -> None:
    """For a run that is ending: none of the three changes any more what it says and how it ends."""
    for name in SIGNALS:
        signal.signal(name, signal.SIG_IGN)


class StopRequest:
    """While the run trains, the first Ctrl-C, SIGTERM or SIGHUP ends it after the step and a checkpoint, and the second one
    at once; at any other time the first one does."""

    def __init__(self) -> None:
        self.signal = 0  # number of the signal that asked for the end; 0: none did
        self.at_once = True  # while there is nothing to lose: before training, and in the evaluation after it
        self.is_broken: Callable[[], bool] = lambda: False  # `Ranks.is_broken` where there are several processes
        self.again_s = 0.0  # after the first one, in which another SIGTERM is the same request
        self.received = 0.0

    def listen(self) -> None:
        """Take the three signals over. A SIGHUP that `nohup` ignores stays ignored."""
        for name in SIGNALS:
            if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:
                signal.signal(name, self.receive)

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Answer a signal. Raises KeyboardInterrupt(number) to end the run at once. A second SIGHUP is ignored: shell and
        kernel both send one when a terminal is lost. With several processes torchrun sends SIGTERM where one of them has
        ended: that asks for nothing, as the run is about to say which one."""
        if self.is_broken():
            return
        if number == signal.SIGTERM == self.signal and time.monotonic() < self.received + self.again_s:
            return
        self.received = time.monotonic()
        if number == signal.SIGHUP:
            detach_closed_terminal()
            if self.signal:
                return
        at_once = self.at_once or self.signal
        self.signal, self.at_once = self.signal or number, False
        if at_once:
            raise KeyboardInterrupt(number)
        log.warning("signal %d: finishing this step and saving a checkpoint; once more ends the run at once", number)
