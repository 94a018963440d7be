# SPDX-License-Identifier: Apache-2.0
"""Imported by the process that environments are forked from, and by nothing else: signals do not end it.

A job scheduler, a service manager or `timeout` signals all processes of a job. The run then still finishes its step;
without their parent the environments would be killed in the middle of it, and their episodes would count as failed.
The parent ends when the run's process does. Handlers that do nothing, unlike ignored signals, do not pass on to
programs that a tool starts."""

import signal

from grpo.process.ending import SIGNALS


def stay(number: int, frame: object) -> None:
    """Does nothing."""


for signal_number in SIGNALS:
    signal.signal(signal_number, stay)
