# SPDX-License-Identifier: Apache-2.0
"""The terminal of a run, which may be gone before the run ends."""

import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def is_unread(descriptor: int) -> bool:
    """Whether nobody reads the other end of this descriptor any more."""
    poll = select.poll()
    poll.register(descriptor, 0)  # Errors and hang-ups are always reported.
    return bool(poll.poll(0))


def detach_closed_terminal() -> None:
    """Redirects stdout and stderr to /dev/null if nobody reads them any more (a lost SSH session, a `| tee` that
    ended): writing to them raises OSError, which must not end a run or change its exit code."""
    for stream in (1, 2):
        if is_unread(stream):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)


class LastingFile(io.FileIO):
    """A stream that goes on after its reader is gone: what a reward function prints must not end the run."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError:
            detach_closed_terminal()
            return super().write(data)


def lasting(stream: TextIO) -> TextIO:
    """stdout or stderr by way of a LastingFile; any other stream, such as one that a test catches, as it is."""
    if not isinstance(stream, io.TextIOWrapper) or stream not in (sys.__stdout__, sys.__stderr__):
        return stream
    stream.flush()
    file = io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False))
    at_once = stream.line_buffering or stream.write_through  # The second is PYTHONUNBUFFERED's.
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=at_once)
