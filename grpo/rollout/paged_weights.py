# SPDX-License-Identifier: Apache-2.0
"""What the learner has of frozen weights waits in host memory while vLLM is awake, where the GPU has no room for both."""

from __future__ import annotations

from mmap import PAGESIZE

import torch

from grpo.model.load import copy_to_own_segment, paged_tensors


def pinned(size: int) -> torch.Tensor:
    """(`size`,) bytes of pinned host memory, no more: torch's own allocator takes the next power of two. Raises RuntimeError."""
    pages = -(-size // PAGESIZE) * PAGESIZE
    held = torch.zeros(pages + PAGESIZE, dtype=torch.uint8)  # touched by all cores, then pinned
    # Whole pages of its own: below 32 MiB malloc puts one behind the other, with a page that is part of both.
    whole = held[-held.data_ptr() % PAGESIZE :][:pages]
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), pages, 0)))
    return whole[:size]


class PagedWeights:
    """Those of `policy`. They never change: they are copied to the host once, and then only back. Without them it cannot compute
    on a GPU."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.device = policy.device
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor and its copy on the host
        for tensor in paged_tensors(policy):
            kept = pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            self.held.append((tensor, kept.copy_(tensor.data)))
        self.nbytes = sum(kept.nbytes for _, kept in self.held)

    def leave(self) -> None:
        """Free them on the GPU, where torch holds the blocks until its cache is emptied."""
        for tensor, kept in self.held:
            tensor.data = kept

    def enter(self) -> None:
        """Back onto the GPU. Raises torch.OutOfMemoryError."""
        for tensor, kept in self.held:
            tensor.data = copy_to_own_segment(kept, self.device)
