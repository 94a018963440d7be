# SPDX-License-Identifier: Apache-2.0
"""How a run is asked to end: by Ctrl-C, SIGTERM or SIGHUP."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from grpo.run.logs import detach_closed_terminal
from grpo.settings import log

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_signals() -> None:
    """For a run that is ending: no signal changes its last message and its exit code any more."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """While the run trains, the first signal ends it after the step and a checkpoint, and the second one at once; at
    any other time the first one ends it at once."""

    def __init__(self) -> None:
        self.signal = 0  # the number of the first signal; 0: there was none
        self.at_once = True  # while there is nothing to lose: before training, and in the evaluation after it
        self.is_broken: Callable[[], bool] = lambda: False  # `Ranks.is_broken` where there are several processes
        self.again_s = 0.0  # seconds after the first signal in which another SIGTERM is the same request
        self.received = 0.0

    def listen(self) -> None:
        """Handles the three signals. A SIGHUP that `nohup` ignores stays ignored."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Handles a signal; raises KeyboardInterrupt(number) to end the run at once. These ask for nothing:
        - torchrun's SIGTERM where another process has ended: the run is about to say which one.
        - a second SIGHUP: shell and kernel both send one when a terminal is lost.
        """
        same_request = number == signal.SIGTERM == self.signal and time.monotonic() < self.received + self.again_s
        if self.is_broken() or same_request:
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
