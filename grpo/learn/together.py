# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run do together: add up what each learned, stay equal, and answer for rank 0's
evaluations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.run.ranks import Ranks

# What a run continues from. Other ranks write files of these names only: no name comes from another process.
CHECKPOINT_FILES = ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt",
                    "trainer_state.json")  # fmt: skip


def adapter_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What is learned, in the order of the model."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat_adapter(model: torch.nn.Module) -> Tensor:
    """All that is learned, (N,), as it is now."""
    return torch.cat([parameter.detach().flatten() for parameter in adapter_of(model)])


def sum_over_ranks(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Puts into each tensor the sum of what all ranks hold in it, added in float32: the same bits on every rank."""
    if ranks.size == 1:
        return
    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])  # one trip for all of them
    ranks.sum_tensor(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def gradients_of(model: torch.nn.Module) -> list[Tensor]:
    """The adapter's gradients; zeros where a process's rows gave none."""
    gradients = []
    for parameter in adapter_of(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


@torch.no_grad()
def broadcast_adapter(ranks: Ranks, model: torch.nn.Module) -> None:
    """Every rank gets rank 0's adapter."""
    for parameter in adapter_of(model) if ranks.size > 1 else ():
        values = parameter.detach().cpu().contiguous()
        ranks.broadcast_tensor(values)
        parameter.copy_(values)


def broadcast_checkpoint(ranks: Ranks, folder: Path | None, scratch: Path) -> Path | None:
    """Every rank gets the files of rank 0's checkpoint `folder`, which other machines may not see, written into its own
    `scratch` folder; returns where they are. None where rank 0 has no checkpoint."""
    if ranks.size == 1 or not ranks.broadcast(folder is not None):
        return folder
    for name in CHECKPOINT_FILES:
        data = ranks.broadcast_bytes((folder / name).read_bytes() if folder else b"")
        if ranks.rank:
            (scratch / name).write_bytes(data)
    return scratch if ranks.rank else folder


def sync_stop_signal(ranks: Ranks, signal: int, model: torch.nn.Module, step: int) -> int:
    """The signal by which any process was asked to stop (0: none was), the same on all. Raises RuntimeError where an
    adapter is not rank 0's any more."""
    if ranks.size == 1:
        return signal
    adapter = flat_adapter(model).cpu().view(torch.uint8).numpy()
    states = ranks.share((signal, hashlib.blake2b(adapter).hexdigest()))
    if different := [rank for rank, (_, digest) in enumerate(states) if digest != states[0][1]]:
        problem = f"the adapter of rank {different[0]} is not that of rank 0 after step {step}"
        raise RuntimeError(f"{problem}: one of their machines computes wrongly. No checkpoint of this step was saved")
    return max(signal for signal, _ in states)


def answer_rank0(trainer: Any) -> None:
    """On the other ranks: generates this rank's share of what rank 0's function asks, until that function returns.
    Where rank 0's process ends instead, this raises RankLost with its exit code."""
    while request := trainer.run.ranks.broadcast():
        trainer.answers(**request)


def run_on_rank0(trainer: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function on rank 0 alone, which may ask the `trainer` for answers: all ranks generate them. Returns what
    it does on rank 0, None on the others."""
    ranks = trainer.run.ranks
    if ranks.rank:
        return answer_rank0(trainer)
    result = function(*arguments)
    ranks.broadcast()
    return result
