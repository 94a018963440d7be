# SPDX-License-Identifier: Apache-2.0
"""Several processes of one run without torchrun: forks of the test, which has imported everything.

One more process holds the store, as torchrun's own process does.
"""

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import TCPStore

from grpo.process.ranks import Ranks

FORK = multiprocessing.get_context("fork")


def _host(listener: socket.socket, port: int, ready: Any) -> None:
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    ready.send(store.port)
    with contextlib.suppress(EOFError):
        ready.recv()
    os._exit(0)


@contextlib.contextmanager
def launcher_store() -> Iterator[tuple[int, int]]:
    """The port of a store, and the id of the process that holds it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ours, theirs = FORK.Pipe()
    host = FORK.Process(target=_host, args=(listener, port, theirs))
    host.start()
    listener.close()
    theirs.close()
    ours.recv()
    yield port, host.pid
    host.kill()
    host.join()


def _child(pipe: Any, ranks: Ranks, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)  # A fork has none of its parent's threads.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        ranks.connect()
        pipe.send(function(ranks, *arguments))
        ranks.disconnect(0)
    except Exception as error:
        pipe.send(error)
        ranks.disconnect(1, str(error))
    os._exit(0)


def in_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    local_size: int = 0,
    beside: Callable[..., None] | None = None,
) -> list[Any]:
    """What `function(ranks, *arguments)` returned or raised in each of `size` processes; None where a process died.

    local_size: number of processes that take each other for one machine (default: all).
    beside: runs in this process meanwhile, with the store's port and process id and the ids of the ranks."""
    local_size = local_size or size
    with launcher_store() as (port, host):
        started = []
        for rank in range(size):
            ours, theirs = FORK.Pipe()
            ranks = Ranks(rank, size, rank % local_size, local_size, "127.0.0.1", port)
            process = FORK.Process(target=_child, args=(theirs, ranks, function, arguments))
            process.start()
            theirs.close()
            started.append((process, ours))
        if beside:
            beside(port, host, [process.pid for process, _ in started])
        results = []
        for _, pipe in started:
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append(None)
        for process, _ in started:
            process.join()
    return results
