# SPDX-License-Identifier: Apache-2.0
"""What a step owes to how its completions were sampled: the importance ratio, and random states left as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor


def importance_ratio(logps: Tensor, sampled: Tensor, mask: Tensor, mode: str, most: float) -> Tensor:
    """pi / mu for the policy's log-probs (B, C) and those with which the engine sampled (NaN: unknown, ratio 1), as TRL
    computes it: truncated at `most`, or 0 above it, by token (B, C) or by sequence (B, 1)."""
    difference = ((logps - sampled) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    return ratio.clamp(max=most) if mode.endswith("truncate") else ratio.masked_fill(ratio > most, 0.0)


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
