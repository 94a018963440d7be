# SPDX-License-Identifier: Apache-2.0
"""One process per GPU: what the other rooms need to know of the processes of a run and to say to them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo.common import InputError
from grpo.process.heartbeat import Heartbeat, RankLost
from grpo.process.launcher import Launch, read_launch

if TYPE_CHECKING:
    from torch import Tensor

    from grpo.process.exchange import Exchange


@dataclass
class Ranks(Launch):
    """The processes of a run; rank 0 writes and decides. A process alone is rank 0 of 1 and imports no torch here."""

    # Called before this process is ended because it did not notice in time that another rank was lost.
    on_lost: Callable[[RankLost], object] = lambda lost: None

    def __post_init__(self) -> None:
        self.exchange: Exchange | None = None  # Both are None until `connect` is done, and for a process alone.
        self.heartbeat: Heartbeat | None = None

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Ranks:
        """This process as the launcher's variables describe it (see `read_launch`)."""
        return cls(**vars(read_launch(environ)))

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
        from grpo.process.exchange import Exchange, open_store, wait_for_all

        store = open_store(self)
        wait_for_all(self, store)  # Creating a group blocks and answers no signal, so all processes meet before.
        machine = self.rank - self.local_rank
        heartbeat = Heartbeat(store, self.rank, machine, lambda lost: self.on_lost(lost))
        self.exchange = Exchange(self, store, heartbeat)
        heartbeat.start(self.share([machine, os.getpid()]))
        self.heartbeat = heartbeat

    # ---- All processes must call these in the same order. They raise RankLost. ----

    def share(self, value: Any) -> list[Any]:
        """The values of all ranks in order, on every rank. JSON must be able to hold them."""
        return self.exchange.share(value) if self.exchange else [value]

    def share_problem(self, problem: str | None) -> None:
        """Raises InputError, on every rank, if a rank has a problem."""
        if problems := dict.fromkeys(filter(None, self.share(problem))):
            raise InputError(*problems)

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank. JSON must be able to hold it; the other ranks' values are ignored."""
        return self.share(None if self.rank else value)[0]

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Copies rank 0's values into a tensor on the CPU."""
        if self.exchange:
            self.exchange.broadcast_tensor(tensor)

    def sum_tensor(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over all ranks, the same bits on every rank."""
        if self.exchange:
            self.exchange.sum_tensor(tensor)

    # ---- These exchange nothing. ----

    def is_broken(self) -> bool:
        """Whether another process is lost: a SIGTERM then comes from torchrun, which ends the other processes."""
        return self.heartbeat is not None and self.heartbeat.is_broken()

    def disconnect(self, code: int, message: str = "") -> None:
        """Tells the others how this process ends, and closes its connections."""
        heartbeat, self.heartbeat = self.heartbeat, None
        if heartbeat is None or self.exchange is None:
            return
        heartbeat.stop(code, message)
        self.exchange.abort()
        if self.rank == 0 and heartbeat.other_machines:
            time.sleep(3)  # The store ends with rank 0's torchrun; until then the others read how the run ended.
