# SPDX-License-Identifier: Apache-2.0
"""Sums gradients over the processes of a run, and keeps their adapters equal."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from grpo.output.checkpoints import RESUME_FILES
from grpo.process.ranks import Ranks


def adapter_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trained parameters, in the order of the model."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat_adapter(model: torch.nn.Module) -> Tensor:
    """A copy of all trained parameters, flattened: (N,)."""
    return torch.cat([parameter.detach().flatten() for parameter in adapter_parameters(model)])


def sum_over_ranks(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Replaces each tensor by its sum over all ranks, in place and added in float32: the same bits on every rank."""
    if ranks.size == 1:
        return
    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])  # All tensors travel in one message.
    ranks.sum_tensor(flat)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def adapter_gradients(model: torch.nn.Module) -> list[Tensor]:
    """The gradients of the adapter; zeros for a parameter that this rank's micro-batches did not reach."""
    gradients = []
    for parameter in adapter_parameters(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


@torch.no_grad()
def adopt_rank0_state(ranks: Ranks, model: torch.nn.Module, folder: Path | None, scratch: Path) -> Path | None:
    """Gives the `model` of every rank the adapter of rank 0. The files of rank 0's checkpoint `folder`, which other
    machines may not see, are copied to the `scratch` folder of each other rank. Returns where this rank finds the
    checkpoint; None if rank 0 has none."""
    if ranks.size == 1:
        return folder
    for parameter in adapter_parameters(model):
        values = parameter.detach().cpu().contiguous()
        ranks.broadcast_tensor(values)
        parameter.copy_(values)
    sent = ranks.broadcast([name for name in RESUME_FILES if folder and (folder / name).is_file()])
    if not sent:
        return None
    for name in (name for name in RESUME_FILES if name in sent):  # No other name that a process might send is written.
        content = bytearray((folder / name).read_bytes()) if folder else bytearray()
        size = ranks.broadcast(len(content))
        values = torch.frombuffer(content or bytearray(size), dtype=torch.uint8)
        ranks.broadcast_tensor(values)
        if ranks.rank:
            (scratch / name).write_bytes(values.numpy().tobytes())
    return folder or scratch


def sync_stop_signal(ranks: Ranks, signal: int, model: torch.nn.Module, step: int) -> int:
    """The signal that asked any process to stop, the same on all ranks; 0 if there was none. Raises RuntimeError if the
    adapter of another rank differs from that of rank 0."""
    if ranks.size == 1:
        return signal
    adapter = flat_adapter(model).cpu().view(torch.uint8).numpy()
    states = ranks.share((signal, hashlib.blake2b(adapter.data).hexdigest()))
    if different := [rank for rank, (_, digest) in enumerate(states) if digest != states[0][1]]:
        problem = f"the adapter of rank {different[0]} is not that of rank 0 after step {step}"
        raise RuntimeError(f"{problem}: one of their machines computes wrongly. No checkpoint of this step was saved")
    return max(signal for signal, _ in states)
