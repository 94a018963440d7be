# SPDX-License-Identifier: Apache-2.0
"""Values that the processes of a run exchange by torch.distributed; imported only where there are several processes.

Simplified: every process has the whole model, so only gradients, token ids, log-probs and short messages travel. The
groups are made directly, not by `init_process_group`: torch's default group stays free for vLLM, and a collective can
only run on the group whose method it is. Messages are JSON, never pickles.
"""

import ctypes
import json
import time
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore, Work

from grpo.process import heartbeat
from grpo.process.heartbeat import Heartbeat, RankLost
from grpo.process.launcher import Launch

CONNECT_S = 300.0  # Seconds until all processes must have connected.
# A slow process is not a lost one. Only the heartbeat tells them apart, so gloo's own timeout must not come first.
GLOO_TIMEOUT = timedelta(days=30)
NCCL_TIMEOUT = timedelta(hours=1)  # All ranks have met on gloo just before, so they are milliseconds apart.


def open_store(launch: Launch) -> Store:
    """A new connection to the store, which torchrun serves."""
    try:
        store = TCPStore(launch.address, launch.port, timeout=timedelta(seconds=30), wait_for_workers=False)
    except RuntimeError:
        raise RankLost(0, message=f"nobody answers at {launch.address}, port {launch.port}") from None
    store.set_timeout(timedelta(seconds=CONNECT_S))
    return PrefixStore(f"train_grpo/{launch.run_id}", store)


def wait_for_all(launch: Launch, store: Store) -> None:
    """Waits until all processes have connected to the store. Raises RankLost if one does not."""
    deadline = time.monotonic() + CONNECT_S
    store.set(f"here/{launch.rank}", "")
    while missing := [rank for rank in range(launch.size) if not store.check([f"here/{rank}"])]:
        if time.monotonic() > deadline:
            raise RankLost(missing[0], message=f"it did not connect within {CONNECT_S:.0f} s")
        time.sleep(0.05)


class Exchange:
    """The collectives of `Ranks`. They raise RankLost as soon as `watch` knows of it."""

    def __init__(self, launch: Launch, store: Store, watch: Heartbeat):
        self.launch, self.watch = launch, watch
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), launch.rank, launch.size, GLOO_TIMEOUT)
        # Gloo's group is never destroyed: its destructor waits for collectives that others may never join.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))
        self.gloo = cast("ProcessGroup", gloo)  # A backend has the same collectives, which torch's stubs leave out.
        self.nccl: ProcessGroup | None = None

    def _wait(self, work: Work) -> None:
        """Waits for `work`, in short pauses so that signals are answered. Raises RankLost if a rank is lost."""
        pause = 0.0005
        while not work.is_completed():
            if self.watch.lost:
                raise self.watch.lost
            time.sleep(pause)
            pause = min(pause * 1.2, 0.02)
        try:
            work.wait()
        except RuntimeError as error:  # A connection broke, and the heartbeat is about to learn which rank is lost.
            for _ in range(10 * (heartbeat.SILENT_ROUNDS + 10)):
                if self.watch.lost:
                    raise self.watch.lost from None
                time.sleep(0.1)
            raise RuntimeError(f"the connection to another process broke ({error})") from None

    def share(self, value: Any) -> list[Any]:
        """The values of all ranks in order, on every rank. JSON must be able to hold them."""
        data = json.dumps(value, default=lambda scalar: scalar.item()).encode()  # JSON lacks NumPy's numbers.
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.launch.size)]
        self._wait(self.gloo.allgather([lengths], [torch.tensor([len(data)])]))
        padded = torch.frombuffer(bytearray(data.ljust(int(max(lengths)) + 1, b"\0")), dtype=torch.uint8)
        messages = [torch.empty_like(padded) for _ in lengths]
        self._wait(self.gloo.allgather([messages], [padded]))
        texts = (message[: int(length)].numpy().tobytes() for message, length in zip(messages, lengths, strict=True))
        return list(map(json.loads, texts))

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        self._wait(self.gloo.broadcast(tensor, 0))

    def sum_tensor(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor by its sum over all ranks, the same bits on every rank."""
        if not tensor.is_cuda:
            return self._wait(self.gloo.allreduce([tensor]))
        # NCCL gives up on a rank that comes after its timeout. Gloo does not: it waits here until every GPU is ready.
        torch.cuda.synchronize()
        self._wait(self.gloo.barrier())
        self.nccl = self.nccl or self._make_nccl()
        self._wait(self.nccl.allreduce([tensor]))

    def _make_nccl(self) -> ProcessGroup:
        """NCCL's group, made at the first sum, after vLLM has captured its graphs. It has its own connection to the
        store, so that NCCL's waiting there does not hold up the heartbeat."""
        backend = torch.distributed.ProcessGroupNCCL
        options = backend.Options()
        options._timeout = NCCL_TIMEOUT
        store = PrefixStore("nccl", open_store(self.launch))
        return cast("ProcessGroup", backend(store, self.launch.rank, self.launch.size, options))  # Cast as gloo is.

    def abort(self) -> None:
        """Ends NCCL's group; unlike `shutdown`, this waits for nobody."""
        if self.nccl is not None:
            self.nccl.abort()
