# SPDX-License-Identifier: Apache-2.0
"""Keeps the learner's frozen weights in host memory while vLLM is awake, if the GPU has no room for both."""

from mmap import PAGESIZE

import torch

from grpo.model.load import copy_to_own_segment, paged_tensors


def pinned_buffer(size: int) -> torch.Tensor:
    """(`size`,) bytes of pinned host memory. torch's own allocator would round the size up to a power of two. Raises
    RuntimeError if the memory cannot be pinned."""
    pages = -(-size // PAGESIZE) * PAGESIZE
    buffer = torch.zeros(pages + PAGESIZE, dtype=torch.uint8)  # All cores touch the pages here; pinning would use one.
    # Only whole pages can be pinned, and below 32 MiB malloc lets two buffers share a page.
    whole = buffer[-buffer.data_ptr() % PAGESIZE :][:pages]
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), pages, 0)))
    return whole[:size]


class PagedWeights:
    """The frozen weights of `policy`, which leave the GPU while vLLM is awake. As they never change, they are copied to
    the host once, and from then on only back to the GPU."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.device = next(policy.parameters()).device
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor and its copy on the host
        for tensor in paged_tensors(policy):
            host_copy = pinned_buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            self.copies.append((tensor, host_copy.copy_(tensor.data)))
        self.nbytes = sum(host_copy.nbytes for _, host_copy in self.copies)

    def offload(self) -> None:
        """Frees the weights on the GPU, where torch holds the blocks until its cache is emptied."""
        for tensor, host_copy in self.copies:
            tensor.data = host_copy

    def reload(self) -> None:
        """Copies the weights back onto the GPU. Raises torch.OutOfMemoryError."""
        for tensor, host_copy in self.copies:
            tensor.data = copy_to_own_segment(host_copy, self.device)
