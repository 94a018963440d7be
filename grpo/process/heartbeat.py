# SPDX-License-Identifier: Apache-2.0
"""Notices that another process of the run is lost: one of this machine by its process id, a machine by its silence."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

SILENT_ROUNDS = 45  # A machine counts as lost after so many seconds (rounds of `_beat`) without a heartbeat.
GRACE_S = 20.0  # Seconds in which the others end after a process is lost: torchrun kills them after 30.


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


class Heartbeat:
    """Watches the other processes from `start` to `stop`, over the launcher's `store`. A machine is known by the rank
    of its first process. `on_lost` is called before this process is ended because it did not notice in time."""

    def __init__(self, store: Store, rank: int, machine: int, on_lost: Callable[[RankLost], object]):
        self.store, self.rank, self.machine, self.on_lost = store, rank, machine, on_lost
        self.lost: RankLost | None = None  # The first process that was lost.
        self.stopped = threading.Event()
        self.rounds_waited = 0  # Rounds of `_guard`, a second each, since the store last answered.
        self.siblings: Mapping[int, int] = {}  # Rank -> process id, of the others on this machine.
        self.other_machines: Sequence[int] = ()
        self.threads = [threading.Thread(target=loop, daemon=True) for loop in (self._beat, self._guard)]

    def start(self, processes: Sequence[tuple[int, int]]) -> None:
        """Begins to watch. `processes`: machine and process id of every rank."""
        own = {rank: pid for rank, (machine, pid) in enumerate(processes) if machine == self.machine}
        self.siblings = {rank: pid for rank, pid in own.items() if rank != self.rank}
        self.other_machines = sorted({machine for machine, _ in processes} - {self.machine})
        for thread in self.threads:
            thread.start()

    def stop(self, code: int, message: str) -> None:
        """Tells the others how this process ends, and ends the watch."""
        with contextlib.suppress(RuntimeError):
            if not self.lost:
                self._report(self.rank, code, message)
        self.stopped.set()
        for thread in self.threads:  # A thread that still used the store when Python ended would abort the process.
            thread.join(2)

    def is_broken(self) -> bool:
        return not self.stopped.is_set() and (self.lost is not None or self._lost_sibling() is not None)

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
        while not self.lost and not self.stopped.wait(1):
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
        while not self.lost and not self.stopped.wait(1):
            self.rounds_waited += 1
            if self.rounds_waited > SILENT_ROUNDS:
                self.lost = self.lost or RankLost(0)
        if self.lost and not self.stopped.wait(GRACE_S):
            self.on_lost(self.lost)
            os._exit(self.lost.code or 1)
