# SPDX-License-Identifier: Apache-2.0
"""What the learner has of frozen weights waits in host memory while vLLM is awake, where the GPU has no room for both."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from grpo.model.load import quantized_experts, tables_of


def pinned(size: int) -> torch.Tensor:
    """(`size`,) bytes of pinned host memory, no more: torch's own allocator takes the next power of two. Raises RuntimeError."""
    held = torch.zeros(size, dtype=torch.uint8)  # touched by all cores, then pinned
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(held.data_ptr(), size, 0)))
    return held


def paged_tensors(policy: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Packed experts, embeddings and output head. Attention stays, which the weight sync reads."""
    for module in quantized_experts(policy):
        yield from module.buffers(recurse=False)
    yield from dict.fromkeys(tables_of(policy))  # once where they are tied


class PagedWeights:
    """Those of `policy`. They never change: they are copied to the host once, and then only back. Without them it cannot compute
    on a GPU."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.device = policy.device
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor and its copy on the host
        for tensor in paged_tensors(policy):
            kept = pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            self.held.append((tensor, kept.copy_(tensor.data)))

    def leave(self) -> None:
        """Free them on the GPU, where torch holds the blocks until its cache is emptied."""
        for tensor, kept in self.held:
            tensor.data = kept

    def enter(self) -> None:
        """Back onto the GPU. Raises torch.OutOfMemoryError."""
        for tensor, kept in self.held:
            tensor.data = kept.to(self.device, non_blocking=True, copy=True)
