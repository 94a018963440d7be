# SPDX-License-Identifier: Apache-2.0
"""Reads from the environment which of a run's processes this one is, as torchrun and `accelerate launch` say it."""

import os
import signal
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from types import FrameType

from grpo.common import InputError

# torchrun and `accelerate launch` set these for each process. They are removed, so that TRL, accelerate, transformers
# and vLLM each see one process with one GPU, and none of them shards or wraps the model.
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_")
LAUNCHERS = "torchrun or `accelerate launch`"


@dataclass
class Launch:
    """This process among those of a run, one a GPU. A process that nothing launched is rank 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""  # Host of the launcher's store, a table of keys and values that all processes share.
    port: int = 0
    run_id: str = ""  # Differs for every start by the launcher, restarts included.
    launched: bool = False  # True under torchrun and the like, whose own exit code is the same for every failure.


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the program at once with the exit code of this signal, as Python does by itself for SIGINT alone."""
    raise KeyboardInterrupt(number)


def read_launch(environ: MutableMapping[str, str]) -> Launch:
    """Reads and removes the launcher's variables. CUDA_VISIBLE_DEVICES then names this process's GPU (none where there
    are too few), so torch must not have used CUDA yet. All ranks but 0 print nothing from here on. Raises InputError
    for processes that cannot be one run."""
    if missing := [name for name in LAUNCH_VARIABLES if not environ.get(name)]:
        world = environ.get("WORLD_SIZE", "")  # Kubeflow and mpirun's wrappers set it without all of the others.
        if world.isdecimal() and int(world) > 1:
            fault = f"is set without {', '.join(missing)}: each of {world} processes would train alone"
            raise InputError(f"WORLD_SIZE={world} {fault}. Start them with {LAUNCHERS}, or unset WORLD_SIZE")
        return Launch()
    names = (*LAUNCH_VARIABLES[:4], "MASTER_PORT")
    try:
        rank, size, local_rank, local_size, port = (int(environ[name]) for name in names)
    except ValueError as error:
        raise InputError(f"{', '.join(names)}: {error}") from None
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        numbers = ", ".join(f"{name}={environ[name]}" for name in LAUNCH_VARIABLES[:4])
        raise InputError(f"{numbers}: a rank is a number from 0 to one below the number of processes")
    if size > 1 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise InputError(f"WORLD_SIZE={size} was not set by {LAUNCHERS}: start the run with one of them")
    run_id = environ.get("TORCHELASTIC_RUN_ID", "") + "/" + environ.get("TORCHELASTIC_RESTART_COUNT", "")
    address = environ["MASTER_ADDR"]
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
        signal.signal(number, interrupt)
    return Launch(rank, size, local_rank, local_size, address, port, run_id, launched=True)
