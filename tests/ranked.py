# SPDX-License-Identifier: Apache-2.0
"""Several processes of one run, without torchrun: forks of the test, which has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo.run.ranks import Ranks


def free_port() -> int:
    """A port below some that are free as well, most likely."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1] - 1


def _child(pipe: Any, ranks: Ranks, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)  # threads of the parent are not there
    try:
        ranks.connect()
        pipe.send(function(ranks, *arguments))
        ranks.leave(0)
    except Exception as error:
        pipe.send(error)
        ranks.leave(1, str(error))
    os._exit(0)


def in_ranks(size: int, function: Callable[..., Any], *arguments: Any, port: int = 0) -> list[Any]:
    """What `function(ranks, *arguments)` returned or raised in each of `size` processes; None of one that died."""
    context, port, started = multiprocessing.get_context("fork"), port or free_port(), []
    for rank in range(size):
        ours, theirs = context.Pipe()
        ranks = Ranks(rank, size, rank, size, port=port)
        one = context.Process(target=_child, args=(theirs, ranks, function, arguments))
        one.start()
        theirs.close()
        started.append((one, ours))
    found = []
    for _, pipe in started:
        try:
            found.append(pipe.recv())
        except EOFError:
            found.append(None)
    for one, _ in started:  # late: one that leaves waits for the others, and they for their pipes to be read
        one.join()
    return found
