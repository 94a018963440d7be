# SPDX-License-Identifier: Apache-2.0
"""The learner's frozen weights in host memory and back. On a CPU both are the same memory, so addresses tell copies
apart."""

import pytest
import torch
from expert_models import load
from torch.multiprocessing.reductions import StorageWeakRef

from grpo.model.load import OWN_SEGMENT, SEGMENT_STEP
from grpo.rollout import paged_weights

pytestmark = pytest.mark.numeric


def weights(model):
    """What is paged: all but attention, router, norms and biases."""
    ends = ("_blocks", "_scales", "embed_tokens.weight", "lm_head.weight")
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith(ends)}


def test_weights_leave_free_the_gpu_and_come_back_as_they_were(tiny, monkeypatch):
    """They share no segment of torch's allocator, which frees whole ones alone: as loaded, and as they come back."""
    sizes: list[int] = []
    allocate = lambda size: sizes.append(size) or torch.zeros(size, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(paged_weights, "pinned_buffer", allocate)
    model, expected = load(tiny, "paged"), load(tiny, "mxfp4").state_dict()
    pages = paged_weights.PagedWeights(model)
    assert sizes and sorted(sizes) == sorted(tensor.nbytes for tensor in weights(model).values())
    for _ in range(2):
        held = [tensor.untyped_storage() for tensor in weights(model).values()]
        assert all(s.nbytes() >= OWN_SEGMENT and not s.nbytes() % SEGMENT_STEP for s in held)
        assert len({storage.data_ptr() for storage in held}) == len(held)
        there = [StorageWeakRef(held.pop()) for _ in range(len(held))]
        pages.offload()
        assert all(storage.expired() for storage in there)
        pages.reload()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
