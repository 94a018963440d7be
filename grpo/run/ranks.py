# SPDX-License-Identifier: Apache-2.0
"""One process a GPU: which of the run's processes this one is, and what it exchanges with the others."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

# torchrun and `accelerate launch` set these for each process. They are removed, so that TRL, accelerate, transformers
# and vLLM each see one process with one GPU, and none of them shards or wraps the model.
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_")


class RankLost(RuntimeError):
    """Another process ended: with an exit code and a message of its own, or without a word."""

    def __init__(self, rank: int, code: int = 1, message: str = ""):
        super().__init__(rank, code, message)
        self.rank, self.code, self.message = rank, code, message

    def __str__(self) -> str:
        reason = f": {self.message}" if self.message else " without a word (killed, or its machine is gone)"
        return f"rank {self.rank} ended{reason}"


@dataclass
class Ranks:
    """The processes of a run, each with a GPU; rank 0 writes and decides. This class serves a process that runs alone,
    and does not import torch; grpo/learn/groups.py has the class for several processes."""

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
            raise ValueError(
                f"WORLD_SIZE={size} was not set by torchrun or `accelerate launch`: start the run with one of them"
            )
        run_id = environ.get("TORCHELASTIC_RUN_ID", "") + "/" + environ.get("TORCHELASTIC_RESTART_COUNT", "")
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        for name in [name for name in environ if name in LAUNCH_VARIABLES or name.startswith(LAUNCHER_PREFIXES)]:
            del environ[name]
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible not in ("", "-1"):
            cards = visible.split(",") if visible else list(map(str, range(local_size)))
            environ["CUDA_VISIBLE_DEVICES"] = cards[local_rank].strip() if local_rank < len(cards) else ""
        if local_size > 1:  # vLLM's engines start at the same time, and share neither ports nor compiled code.
            user_port = environ.get("VLLM_PORT", "")  # A service called `vllm` makes Kubernetes set it to a URL.
            first_port = int(user_port) if user_port.isdigit() else port + 1 if port < 60_000 else port - 5_000
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
        """This process's part of `count` rows, in whole groups where `group` divides them. Where the ranks cannot get
        equal parts, the first ones get more."""
        group = group if count % group == 0 else 1
        groups = count // group
        start, stop = (groups // self.size * n + min(n, groups % self.size) for n in (self.rank, self.rank + 1))
        return range(start * group, stop * group)

    # All processes must call these methods in the same order. With several processes the methods raise RankLost.

    def share(self, value: Any) -> list[Any]:
        """The values of all ranks in order, on every rank. JSON must be able to hold them."""
        return [value]

    def share_rows(self, rows: list[Any]) -> list[Any]:
        """Every rank's rows in order."""
        return [row for rank_rows in self.share(rows) for row in rank_rows]

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank. JSON must be able to hold it; the other ranks' values are ignored."""
        return value

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        """Rank 0's bytes, on every rank; the other ranks' bytes are ignored."""
        return data

    def broadcast_tensor(self, tensor: Any) -> None:
        """Copies rank 0's values into a torch.Tensor on the CPU."""

    def sum_tensor(self, tensor: Any) -> None:
        """Replaces a torch.Tensor by its sum over all ranks, the same bits on every rank."""

    def is_broken(self) -> bool:
        """Whether another process is gone: then a SIGTERM is torchrun's, which ends all processes after the first."""
        return False

    def disconnect(self, code: int, message: str = "") -> None:
        """Tells the others how this process ends, and closes its connections."""
