# SPDX-License-Identifier: Apache-2.0
"""One process per GPU: reads which of them this is, exchanges values between them, and notices when one is lost.

Simplified: every process has the whole model, so only gradients, token ids, log-probs and short messages travel. The
groups are made directly, not by `init_process_group`: torch's default group stays free for vLLM, and a collective can
only run on the group whose method it is. Messages are JSON, never pickles. A process alone imports no torch here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Store, Work

# torchrun and `accelerate launch` set these for each process. They are removed, so that TRL, accelerate, transformers
# and vLLM each see one process with one GPU, and none of them shards or wraps the model.
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_")
CONNECT_S = 300.0  # Seconds until all processes must have connected.
SILENT_ROUNDS = 45  # A machine counts as lost after so many seconds (rounds of `_beat`) without a heartbeat.
GRACE_S = 20.0  # Seconds in which the others end after a process is lost: torchrun kills them after 30.
# A slow process is not a lost one. Only the heartbeat tells them apart, so gloo's own timeout must not come first.
GLOO_TIMEOUT = timedelta(days=30)
NCCL_TIMEOUT = timedelta(hours=1)  # All ranks have met on gloo just before, so they are milliseconds apart.


class RankLost(RuntimeError):
    """Another process ended: with an exit code and a message of its own, or without any."""

    def __init__(self, rank: int, code: int = 1, message: str = ""):
        super().__init__(rank, code, message)
        self.rank, self.code, self.message = rank, code, message

    def __str__(self) -> str:
        reason = f": {self.message}" if self.message else " without a word (killed, or its machine is gone)"
        return f"rank {self.rank} ended{reason}"


def has_ended(pid: int) -> bool:
    """Whether a process of this machine has ended; one that is stopped has not."""
    import psutil  # Inside, so that the preflight can name missing packages.

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass
class Ranks:
    """This process among those of a run, one a GPU; rank 0 writes and decides. A run of one process is rank 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""  # Host of the launcher's store, a table of keys and values that all processes share.
    port: int = 0
    run_id: str = ""  # Differs for every start by the launcher, restarts included.
    launched: bool = False  # True under torchrun and the like, whose own exit code is the same for every failure.
    # Called before this process is killed because it did not notice in time that another rank had died.
    on_lost: Callable[[RankLost], None] = lambda lost: None

    def __post_init__(self) -> None:
        self.lost: RankLost | None = None  # The first process that was lost.
        self.disconnected = threading.Event()
        self.rounds_waited = 0  # Rounds of `_guard`, a second each, since the store last answered.
        self.siblings: dict[int, int] = {}  # Rank -> process id, of the others on this machine.
        self.threads: list[threading.Thread] = []  # Empty until `connect` is done.
        self.nccl: ProcessGroup | None = None  # It is made at the first sum of tensors on GPUs.

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Ranks:
        """Reads and removes the launcher's variables. CUDA_VISIBLE_DEVICES then names this process's GPU (none where
        there are too few), so torch must not have used CUDA yet. All ranks but 0 print nothing from here on. Raises
        ValueError for processes that cannot be one run."""
        if not all(environ.get(name) for name in LAUNCH_VARIABLES):
            return cls()
        rank, size, local_rank, local_size = (int(environ[name]) for name in LAUNCH_VARIABLES[:4])
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            numbers = ", ".join(f"{name}={environ[name]}" for name in LAUNCH_VARIABLES[:4])
            raise ValueError(f"{numbers}: a rank is a number from 0 to one below the number of processes")
        if size > 1 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            launchers = "torchrun or `accelerate launch`"
            raise ValueError(f"WORLD_SIZE={size} was not set by {launchers}: start the run with one of them")
        run_id = environ.get("TORCHELASTIC_RUN_ID", "") + "/" + environ.get("TORCHELASTIC_RESTART_COUNT", "")
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        for name in [name for name in environ if name in LAUNCH_VARIABLES or name.startswith(LAUNCHER_PREFIXES)]:
            del environ[name]
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible not in ("", "-1"):
            cards = visible.split(",") if visible else list(map(str, range(local_size)))
            environ["CUDA_VISIBLE_DEVICES"] = cards[local_rank].strip() if local_rank < len(cards) else ""
        if local_size > 1:  # vLLM's engines start at the same time, and share neither ports nor compiled code.
            first_port = port + 1 if port < 60_000 else port - 5_000
            environ["VLLM_PORT"] = str(first_port + 100 * local_rank)
            root = environ.get("VLLM_CACHE_ROOT") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
            environ["VLLM_CACHE_ROOT"] = os.path.join(root, f"rank-{local_rank}") if local_rank else root
        if 1 < size == local_size:  # On one machine, nobody else needs to reach what gloo and NCCL listen on.
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        if rank:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        for number in (signal.SIGINT, signal.SIGTERM):  # scripts/torchrun.sh starts this with both ignored.
            signal.signal(number, signal.default_int_handler)
        return cls(rank, size, local_rank, local_size, address, port, run_id, launched=True)

    def share_out(self, count: int, group: int = 1) -> range:
        """This process's part of `count` rows, in whole groups if `group` divides `count`. The first may get more."""
        group = group if count % group == 0 else 1
        groups = count // group
        start, stop = (groups // self.size * n + min(n, groups % self.size) for n in (self.rank, self.rank + 1))
        return range(start * group, stop * group)

    def connect(self) -> None:
        """Waits for all processes, then begins to watch them. Raises RankLost if one does not connect."""
        if self.size == 1:
            return
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self.store, deadline = self._open_store(), time.monotonic() + CONNECT_S
        self.store.set(f"here/{self.rank}", "")
        # Creating a group blocks and answers no signal, so this waits for all processes first.
        while missing := [rank for rank in range(self.size) if not self.store.check([f"here/{rank}"])]:
            if time.monotonic() > deadline:
                raise RankLost(missing[0], message=f"it did not connect within {CONNECT_S:.0f} s")
            time.sleep(0.05)
        gloo = ProcessGroupGloo(PrefixStore("gloo", self.store), self.rank, self.size, GLOO_TIMEOUT)
        # Gloo's group is never destroyed: its destructor waits for collectives that others may never join.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))
        self.gloo = cast("ProcessGroup", gloo)  # A backend has the same collectives, which torch's stubs leave out.
        self.machine = self.rank - self.local_rank  # A machine is known by the rank of its first process.
        processes = self.share([self.machine, os.getpid()])
        own = {rank: pid for rank, (machine, pid) in enumerate(processes) if machine == self.machine}
        self.siblings = {rank: pid for rank, pid in own.items() if rank != self.rank}
        self.other_machines = sorted({machine for machine, _ in processes} - {self.machine})
        self.threads = [threading.Thread(target=loop, daemon=True) for loop in (self._beat, self._guard)]
        for thread in self.threads:
            thread.start()

    def _open_store(self) -> Store:
        """A new connection to the store, which torchrun serves."""
        from torch.distributed import PrefixStore, TCPStore

        try:
            store = TCPStore(self.address, self.port, timeout=timedelta(seconds=30), wait_for_workers=False)
        except RuntimeError:
            raise RankLost(0, message=f"nobody answers at {self.address}, port {self.port}") from None
        store.set_timeout(timedelta(seconds=CONNECT_S))
        return PrefixStore(f"train_grpo/{self.run_id}", store)

    # ---- Exchanging values: all processes must call these in the same order. They raise RankLost. ----

    def _wait(self, work: Work) -> None:
        """Waits for `work`, in short pauses so that signals are answered. Raises RankLost if a rank is lost."""
        pause = 0.0005
        while not work.is_completed():
            if self.lost:
                raise self.lost
            time.sleep(pause)
            pause = min(pause * 1.2, 0.02)
        try:
            work.wait()
        except RuntimeError as error:  # A connection broke, and the heartbeat is about to learn which rank is lost.
            for _ in range(10 * (SILENT_ROUNDS + 10)):
                if self.lost:
                    raise self.lost from None
                time.sleep(0.1)
            raise RuntimeError(f"the connection to another process broke ({error})") from None

    def share(self, value: Any) -> list[Any]:
        """The values of all ranks in order, on every rank. JSON must be able to hold them."""
        if self.size == 1:
            return [value]
        import torch

        data = json.dumps(value, default=lambda scalar: scalar.item()).encode()  # JSON lacks NumPy's numbers.
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(self.gloo.allgather([lengths], [torch.tensor([len(data)])]))
        padded = torch.frombuffer(bytearray(data.ljust(int(max(lengths)) + 1, b"\0")), dtype=torch.uint8)
        messages = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(self.gloo.allgather([messages], [padded]))
        texts = (message[: int(length)].numpy().tobytes() for message, length in zip(messages, lengths, strict=True))
        return list(map(json.loads, texts))

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank. JSON must be able to hold it; the other ranks' values are ignored."""
        return self.share(None if self.rank else value)[0]

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Copies rank 0's values into a tensor on the CPU."""
        self._wait(self.gloo.broadcast(tensor, 0))

    def sum_tensor(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over all ranks, the same bits on every rank."""
        if not tensor.is_cuda:
            return self._wait(self.gloo.allreduce([tensor]))
        import torch

        # NCCL gives up on a rank that comes after its timeout. Gloo does not: it waits here until every GPU is ready.
        torch.cuda.synchronize()
        self._wait(self.gloo.barrier())
        if self.nccl is None:
            # NCCL's group is made at the first sum, after vLLM has captured its graphs. It has its own connection to
            # the store, so that NCCL's waiting there does not hold up the heartbeat.
            backend = torch.distributed.ProcessGroupNCCL
            options = backend.Options()
            options._timeout = NCCL_TIMEOUT
            nccl = backend(torch.distributed.PrefixStore("nccl", self._open_store()), self.rank, self.size, options)
            self.nccl = cast("ProcessGroup", nccl)  # Cast for the same reason as gloo.
        self._wait(self.nccl.allreduce([tensor]))

    # ---- Noticing lost processes ----

    def is_broken(self) -> bool:
        """Whether another process is lost: a SIGTERM then comes from torchrun, which ends the other processes."""
        return not self.disconnected.is_set() and (self.lost is not None or self._lost_sibling() is not None)

    def _lost_sibling(self) -> int | None:
        return next((rank for rank, pid in self.siblings.items() if has_ended(pid)), None)

    def _report(self, rank: int, code: int = 1, message: str = "") -> RankLost:
        """Records in the store how a process ended, if it is the first that did. Returns the first."""
        return RankLost(*json.loads(self.store.compare_set("end", "", json.dumps([rank, code, message]))))

    def _beat(self) -> None:
        """Tells the others once a second that this machine is alive, and looks for lost processes. A process that is
        busy or stopped is not lost. Machines need a heartbeat because one that loses power closes no connection."""
        beats: dict[int, int] = {}
        silent: Counter[int] = Counter()
        while not self.lost and not self.disconnected.wait(1):
            try:
                self.store.add(f"beat/{self.machine}", 1)
                lost_rank = self._lost_sibling()
                if lost_rank is not None or self.store.check(["end"]):
                    # If the store has an end already, that one is returned, and the arguments do not count.
                    self.lost = self._report(self.rank if lost_rank is None else lost_rank)
                for machine in self.other_machines:
                    beat = self.store.add(f"beat/{machine}", 0)
                    silent[machine] = silent[machine] + 1 if beat == beats.get(machine) else 0
                    beats[machine] = beat
                    if silent[machine] > SILENT_ROUNDS:
                        self.lost = self._report(machine)
            except RuntimeError:  # The store ended, and so did the launcher on rank 0's machine, which serves it.
                self.lost = self.lost or RankLost(0)
            self.rounds_waited = 0

    def _guard(self) -> None:
        """Ends this process GRACE_S after another one was lost, if the main thread has not done so: it may be in a
        rollout. If `_beat` gets no answer from the store for SILENT_ROUNDS, rank 0 counts as lost."""
        while not self.lost and not self.disconnected.wait(1):
            self.rounds_waited += 1
            if self.rounds_waited > SILENT_ROUNDS:
                self.lost = self.lost or RankLost(0)
        if self.lost and not self.disconnected.wait(GRACE_S):
            self.on_lost(self.lost)
            os._exit(self.lost.code or 1)

    def disconnect(self, code: int, message: str = "") -> None:
        """Tells the others how this process ends, and closes its connections."""
        if self.disconnected.is_set() or not self.threads:
            return
        with contextlib.suppress(RuntimeError):
            if not self.lost:
                self._report(self.rank, code, message)
        self.disconnected.set()
        for thread in self.threads:  # A thread that still used the store when Python ended would abort the process.
            thread.join(2)
        if self.nccl is not None:
            self.nccl.abort()  # Unlike `shutdown`, this waits for nobody.
        if self.rank == 0 and self.other_machines:
            time.sleep(3)  # The store ends with rank 0's torchrun; until then the others read how the run ended.
