# SPDX-License-Identifier: Apache-2.0
"""How a run ended: under torchrun, whose own exit code is 1 for every reason, and where nobody reads its output."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from grpo.run.durable import write_text
from grpo.run.place import EXIT
from grpo.settings import described, log, one_line


class LastWords(logging.Handler):
    """Keeps what this program's log says last; what is critical before anything that follows."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.words, self.fatal = "", False

    def emit(self, record: logging.LogRecord) -> None:
        fatal = record.levelno >= logging.CRITICAL
        if fatal >= self.fatal:
            raised = f" ({described(record.exc_info[1])})" if record.exc_info else ""
            said = one_line(record.getMessage().strip()) + raised
            self.words = f"{self.words}; {said}" if self.fatal else said
            self.fatal = fatal


def write_end(folder: Path, code: int, words: str) -> None:
    """The exit code and its reason as the last line of training.log, and in EXIT."""
    (log.warning if code else log.info)("exit code %d: %s", code, words)
    if folder.is_dir():
        write_text(folder / EXIT, json.dumps({"code": code, "reason": words}) + "\n")


def end_quietly(main: Callable[[], int]) -> int:
    """The exit code of `main`. Where it is cut short because the reader of its output has gone (`--help | head`), there
    is no traceback, and the code is that of a command which SIGPIPE ends."""
    code = 128 + signal.SIGPIPE
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not is_unread(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
    return code


def is_unread(descriptor: int) -> bool:
    """Whether nobody can read any more what is written there."""
    poll = select.poll()
    poll.register(descriptor, 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))
