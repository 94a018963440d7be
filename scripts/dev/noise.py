# SPDX-License-Identifier: Apache-2.0
"""The reward of measurements on random weights."""

import hashlib
from typing import Any


def noise(completions: list[Any], **columns: Any) -> list[float]:
    """A reward from 0 to 1 by a completion's hash: random weights never answer, and equal rewards teach nothing."""
    hashes = (hashlib.sha256(str(completion).encode()).hexdigest() for completion in completions)
    return [int(digits[:8], 16) / 0xFFFFFFFF for digits in hashes]
