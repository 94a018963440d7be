# SPDX-License-Identifier: Apache-2.0
"""The learner's frozen weights wait in host memory while vLLM is awake, if the GPU has no room for both."""

from __future__ import annotations

from mmap import PAGESIZE

import torch

from grpo.model.load import copy_to_own_segment, paged_tensors


def pinned(size: int) -> torch.Tensor:
    """(`size`,) bytes of pinned host memory: torch's own allocator takes the next power of two. Raises RuntimeError."""
    pages = -(-size // PAGESIZE) * PAGESIZE
    buffer = torch.zeros(pages + PAGESIZE, dtype=torch.uint8)  # All cores touch the pages before they are pinned.
    # Only whole pages can be pinned: below 32 MiB malloc lets two buffers share one.
    whole = buffer[-buffer.data_ptr() % PAGESIZE :][:pages]
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), pages, 0)))
    return whole[:size]


class PagedWeights:
    """The frozen weights of `policy`, which leave the GPU while vLLM is awake. As they never change, they are copied to
    the host once, and from then on only back to the GPU."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.device = next(policy.parameters()).device
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor and its copy on the host
        for tensor in paged_tensors(policy):
            kept = pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            self.held.append((tensor, kept.copy_(tensor.data)))
        self.nbytes = sum(kept.nbytes for _, kept in self.held)

    def offload(self) -> None:
        """Frees the weights on the GPU, where torch holds the blocks until its cache is emptied."""
        for tensor, kept in self.held:
            tensor.data = kept

    def reload(self) -> None:
        """Copies the weights back onto the GPU. Raises torch.OutOfMemoryError."""
        for tensor, kept in self.held:
            tensor.data = copy_to_own_segment(kept, self.device)
