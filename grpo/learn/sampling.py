# SPDX-License-Identifier: Apache-2.0
"""The importance ratio of sampled completions, and a block that leaves the random states as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor


def importance_ratio(logps: Tensor, sampled: Tensor, mask: Tensor, mode: str, limit: float) -> Tensor:
    """pi / mu for the policy's log-probs (B, C) and those with which the engine sampled (NaN: unknown, ratio 1), as TRL
    computes it: truncated at `limit`, or 0 above it, by token (B, C) or by sequence (B, 1)."""
    difference = ((logps - sampled) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    return ratio.clamp(max=limit) if mode.endswith("truncate") else ratio.masked_fill(ratio > limit, 0.0)


@contextlib.contextmanager
def kept_randomness() -> Iterator[None]:
    """Leave every random state as it was: torch's (CPU and GPUs), Python's and numpy's."""
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
