# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run do together: add up what each learned, stay equal, and answer for rank 0's evaluations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.run.ranks import Ranks


def adapter_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What is learned, in the order of the model."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat_adapter(model: torch.nn.Module) -> Tensor:
    """All that is learned, (N,), as it is now."""
    return torch.cat([parameter.detach().flatten() for parameter in adapter_of(model)])


def plain(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def add_up(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Put into each tensor the sum of what all ranks hold in it, added in float32 in the order of the ranks: the same bits
    everywhere."""
    if ranks.size == 1:
        return
    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors]).cpu()  # one trip from the GPU
    ranks.summed_bytes += flat.nbytes
    for other in ranks.others_bytes(plain(flat)):
        flat += torch.frombuffer(other, dtype=torch.float32)
    flat = torch.frombuffer(ranks.broadcast_bytes(plain(flat)), dtype=torch.float32)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def gradients_of(model: torch.nn.Module) -> list[Tensor]:
    """The adapter's gradients; zeros where a process's rows gave none."""
    found = []
    for parameter in adapter_of(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found.append(parameter.grad)
    return found


@torch.no_grad()
def give_adapter(ranks: Ranks, model: torch.nn.Module) -> None:
    """Every rank gets rank 0's adapter."""
    for parameter in adapter_of(model) if ranks.size > 1 else ():
        data = ranks.broadcast_bytes(plain(parameter.cpu()))
        parameter.copy_(torch.frombuffer(data, dtype=parameter.dtype).view_as(parameter))


def give_files(ranks: Ranks, folder: Path | None, place: Path) -> Path | None:
    """Every rank gets the files of rank 0's `folder`, which other machines may not see, as files below `place`; returns where
    they are. None where rank 0 has no folder."""
    names = ranks.broadcast(sorted(path.name for path in folder.iterdir() if path.is_file()) if folder else None)
    if names is None or not ranks.rank:
        for name in names or () if ranks.size > 1 else ():
            ranks.broadcast_bytes((folder / name).read_bytes())
        return folder if names is not None else None
    for name in names:
        (place / name).write_bytes(ranks.broadcast_bytes())
    return place


def agree(ranks: Ranks, signal: int, model: torch.nn.Module, step: int) -> int:
    """The signal by which any process was asked to stop (0: none was), the same on all. Raises RuntimeError where an adapter
    is not rank 0's any more."""
    if ranks.size == 1:
        return signal
    adapter = flat_adapter(model).cpu()
    said = ranks.share((signal, hashlib.blake2b(plain(adapter)).hexdigest()))
    if other := [rank for rank, (_, mine) in enumerate(said) if mine != said[0][1]]:
        what = f"the adapter of rank {other[0]} is not that of rank 0 after step {step}"
        raise RuntimeError(f"{what}: one of their machines computes wrongly. No checkpoint of this step was saved")
    return max(stop for stop, _ in said)


def lead(trainer: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on rank 0 alone, which may ask the `trainer` for answers: all generate them. Returns what it does on
    rank 0, None on the others."""
    ranks = trainer.run.ranks
    if not ranks.rank:
        found = function(*arguments)
        ranks.broadcast()
        return found
    while request := ranks.broadcast():
        trainer.answers(**request)
    return None


def in_parts(ranks: Ranks, count: int, size: int) -> Iterator[tuple[range, range]]:
    """(rows, this process's own of them) of `count` rows, `size` at a time."""
    for start in range(0, count, size):
        rows = range(start, min(start + size, count))
        own = ranks.share_out(len(rows))
        yield rows, rows[own.start : own.stop]
