# SPDX-License-Identifier: Apache-2.0
"""How the processes of a run speak to each other, and how they notice that one of them is gone.

Simplified: every process has the whole model, so only gradients, token ids, log-probs and short messages travel.
The groups are made directly, not by `init_process_group`: torch's default group stays free for vLLM, and a collective
can only run on the group whose method it is. Messages are JSON, never pickles.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore, Work

from grpo.run.ranks import RankLost, Ranks

CONNECT_S = 300.0  # Seconds until all processes must have connected.
SILENT_ROUNDS = 45  # A machine counts as lost after so many rounds of a second without its heartbeat.
GRACE_S = 20.0  # Seconds after the loss of a process in which the others end: torchrun kills them after 30.
# A slow process is not lost: only the heartbeat says who is, so gloo's own limit must not come first.
GLOO_TIMEOUT = timedelta(days=30)
NCCL_TIMEOUT = timedelta(hours=1)  # All ranks have met on gloo just before, so they are milliseconds apart.


def birth(pid: int) -> str:
    """When a process of this machine started, in the kernel's clock ticks; '' where it has ended."""
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


class ConnectedRanks(Ranks):
    """Several processes. Creating one waits for all of them, and raises RankLost where one does not come."""

    def __init__(self, ranks: Ranks):
        super().__init__(**{field.name: getattr(ranks, field.name) for field in dataclasses.fields(Ranks)})
        self.lost: RankLost | None = None  # The first process that is gone.
        self.disconnected = threading.Event()
        self.rounds_waited = 0  # Seconds since the store answered last.
        self.siblings: dict[int, tuple[int, str]] = {}  # Rank -> process id and birth, on this machine.
        self.nccl: ProcessGroup | None = None  # It is made at the first sum of tensors on GPUs.
        self.store = self._open_store()
        self._meet()
        gloo = ProcessGroupGloo(PrefixStore("gloo", self.store), self.rank, self.size, GLOO_TIMEOUT)
        self.gloo = cast(ProcessGroup, gloo)  # A backend has the same collectives, which torch's stubs leave out.
        self.machine = self.rank - self.local_rank  # A machine is known by the rank of its first process.
        processes = self.share([self.machine, os.getpid(), birth(os.getpid())])
        # A process that has ended since it shared its birth is watched too, so that its end is noticed.
        for rank, (machine, pid, born) in enumerate(processes):
            if machine == self.machine and rank != self.rank and born:
                self.siblings[rank] = pid, born
        self.other_machines = sorted({machine for machine, *_ in processes} - {self.machine})
        self.threads = [threading.Thread(target=loop, daemon=True) for loop in (self._beat, self._guard)]
        for thread in self.threads:
            thread.start()

    def _open_store(self) -> Store:
        """A connection to the launcher's store: no process of the run listens for one."""
        try:
            store = TCPStore(self.address, self.port, timeout=timedelta(seconds=30), wait_for_workers=False)
        except RuntimeError:
            raise RankLost(0, message=f"nobody answers at {self.address}, port {self.port}") from None
        store.set_timeout(timedelta(seconds=CONNECT_S))
        return PrefixStore(f"train_grpo/{self.run_id}", store)

    def _meet(self) -> None:
        """Waits for all processes before a group starts, as that start would block and answer no signal."""
        deadline = time.monotonic() + CONNECT_S
        self.store.set(f"here/{self.rank}", "")
        while missing := [rank for rank in range(self.size) if not self.store.check([f"here/{rank}"])]:
            if time.monotonic() > deadline:
                raise RankLost(missing[0], message=f"it did not come within {CONNECT_S:.0f} s")
            time.sleep(0.05)

    # ---- Exchanging values ----

    def _wait(self, work: Work) -> None:
        """Waits for `work`, however late other ranks are, unless one is lost. Short pauses let signals be answered."""
        pause = 0.0005
        while not work.is_completed():
            if self.lost:
                raise self.lost
            time.sleep(pause)
            pause = min(pause * 1.2, 0.02)
        try:
            work.wait()
        except RuntimeError as error:  # A connection broke, and the heartbeat is about to learn who is gone.
            for _ in range(10 * (SILENT_ROUNDS + 10)):
                if self.lost:
                    raise self.lost from None
                time.sleep(0.1)
            raise RuntimeError(f"the connection to another process broke ({error})") from None

    def share(self, value: Any) -> list[Any]:
        data = json.dumps(value, default=lambda scalar: scalar.item()).encode()  # JSON lacks NumPy's numbers.
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(self.gloo.allgather([lengths], [torch.tensor([len(data)])]))
        padded = torch.frombuffer(bytearray(data.ljust(int(max(lengths)) + 1, b"\0")), dtype=torch.uint8)
        messages = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(self.gloo.allgather([messages], [padded]))
        texts = (message[: int(length)].numpy().tobytes() for message, length in zip(messages, lengths, strict=True))
        return list(map(json.loads, texts))

    def broadcast(self, value: Any = None) -> Any:
        return self.share(None if self.rank else value)[0]

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        message = torch.zeros(self.broadcast(len(data)) + 1, dtype=torch.uint8)  # Gloo takes no empty tensor.
        if not self.rank:
            message[:-1] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        self.broadcast_tensor(message)
        return message[:-1].numpy().tobytes()

    def broadcast_tensor(self, tensor: Tensor) -> None:
        self._wait(self.gloo.broadcast(tensor, 0))

    def sum_tensor(self, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            return self._wait(self.gloo.allreduce([tensor]))
        # NCCL gives up on a rank that comes after its timeout. Gloo does not: it waits here until every GPU is ready.
        torch.cuda.synchronize()
        self._wait(self.gloo.barrier())
        if self.nccl is None:
            # NCCL's group is made at the first sum, after vLLM has captured its graphs. It has its own connection to
            # the store, so that NCCL's waiting there does not hold up the heartbeat.
            backend = torch.distributed.ProcessGroupNCCL
            options = backend.Options()
            options._timeout = NCCL_TIMEOUT
            nccl = backend(PrefixStore("nccl", self._open_store()), self.rank, self.size, options)
            self.nccl = cast(ProcessGroup, nccl)  # It is cast for the same reason as gloo.
        self._wait(self.nccl.allreduce([tensor]))

    # ---- Noticing lost processes ----

    def is_broken(self) -> bool:
        return not self.disconnected.is_set() and (self.lost is not None or self._lost_sibling() is not None)

    def _lost_sibling(self) -> int | None:
        return next((rank for rank, (pid, born) in self.siblings.items() if birth(pid) != born), None)

    def _report(self, rank: int, code: int = 1, message: str = "") -> RankLost:
        """Records in the store that a process is gone, unless another one is recorded; returns the recorded one."""
        return RankLost(*json.loads(self.store.compare_set("end", "", json.dumps([rank, code, message]))))

    def _beat(self) -> None:
        """Tells the others once a second that this machine is alive, and looks for processes that are gone. A process
        that is busy or stopped counts as alive. Each machine has a heartbeat because one that loses its power closes no
        connection."""
        beats: dict[int, int] = {}
        silent: Counter[int] = Counter()
        while not self.lost and not self.disconnected.wait(1):
            try:
                self.store.add(f"beat/{self.machine}", 1)
                lost_rank = self._lost_sibling()
                if lost_rank is not None or self.store.check(["end"]):
                    self.lost = self._report(self.rank if lost_rank is None else lost_rank)
                for machine in self.other_machines:
                    beat = self.store.add(f"beat/{machine}", 0)
                    silent[machine] = silent[machine] + 1 if beat == beats.get(machine) else 0
                    beats[machine] = beat
                    if silent[machine] > SILENT_ROUNDS:
                        self.lost = self._report(machine)
            except RuntimeError:  # The store is gone, and with it the launcher on rank 0's machine.
                self.lost = self.lost or RankLost(0)
            self.rounds_waited = 0

    def _guard(self) -> None:
        """Ends this process if it does not notice that another one is gone. It may be in a rollout, or wait for a store
        whose machine is gone."""
        while not self.lost and not self.disconnected.wait(1):
            self.rounds_waited += 1
            if self.rounds_waited > SILENT_ROUNDS:
                self.lost = self.lost or RankLost(0)
        if self.lost and not self.disconnected.wait(GRACE_S):
            self.on_lost(self.lost)
            os._exit(self.lost.code or 1)

    def disconnect(self, code: int, message: str = "") -> None:
        if self.disconnected.is_set():
            return
        with contextlib.suppress(RuntimeError):
            if not self.lost:
                self._report(self.rank, code, message)
        self.disconnected.set()
        for thread in self.threads:  # A thread that still uses the store when Python ends would abort the process.
            thread.join(2)
        if self.nccl is not None:
            self.nccl.abort()  # Unlike `shutdown`, this waits for nobody.
        # Gloo's group is never destroyed: its destructor waits for collectives that others may never join.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.gloo))
        if self.rank == 0 and self.other_machines:
            time.sleep(3)  # The store ends with rank 0's torchrun, and the others read there how the run ended.
