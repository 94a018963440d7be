# SPDX-License-Identifier: Apache-2.0
"""The learner's frozen weights in host memory and back. On a CPU both are the same memory, so addresses tell copies
apart."""

from __future__ import annotations

import pytest
import torch
from expert_models import load
from torch.multiprocessing.reductions import StorageWeakRef

from grpo.model.load import OWN_SEGMENT, SEGMENT_STEP, paged_tensors
from grpo.rollout import paged_weights

pytestmark = pytest.mark.numeric


@pytest.fixture
def paged(tiny, monkeypatch):
    """(the tiny model with packed experts, its PagedWeights, the bytes that were pinned)."""
    sizes: list[int] = []
    allocate = lambda size: sizes.append(size) or torch.zeros(size, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(paged_weights, "pinned", allocate)
    model = load(tiny, "paged")
    return model, paged_weights.PagedWeights(model), sizes


def weights(model):
    """What is paged: all but attention, router, norms and biases."""
    ends = ("_blocks", "_scales", "embed_tokens.weight", "lm_head.weight")
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith(ends)}


def logits(model):
    return model(torch.arange(12)[None]).logits


def test_weights_leave_free_the_gpu_and_come_back_as_they_were(paged):
    model, pages, sizes = paged
    start, expected = {name: tensor.clone() for name, tensor in weights(model).items()}, logits(model)
    assert sizes and sorted(sizes) == sorted(tensor.nbytes for tensor in start.values())
    for _ in range(2):
        there = [StorageWeakRef(tensor.untyped_storage()) for tensor in weights(model).values()]
        assert not any(storage.expired() for storage in there)
        pages.leave()
        assert all(storage.expired() for storage in there)
        pages.enter()
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights(model).items())
    assert torch.equal(logits(model), expected)


def test_nothing_else_gets_a_part_of_their_segments(paged, tiny):
    """Of torch's allocator on a GPU, which frees whole ones alone; as loaded, and as they come back."""
    model, pages, _ = paged
    quantized = load(tiny, "mxfp4").state_dict()
    for _ in range(2):
        held = [tensor.untyped_storage() for tensor in paged_tensors(model)]
        assert held and all(s.nbytes() >= OWN_SEGMENT and not s.nbytes() % SEGMENT_STEP for s in held)
        assert len({storage.data_ptr() for storage in held}) == len(held)
        assert all(torch.equal(tensor, quantized[name]) for name, tensor in model.state_dict().items())
        pages.leave()
        pages.enter()
