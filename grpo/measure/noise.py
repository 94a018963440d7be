# SPDX-License-Identifier: Apache-2.0
"""The reward of measurements on random weights."""

from __future__ import annotations

import hashlib
from typing import Any


def noise(completions: list[str], **columns: Any) -> list[float]:
    """A reward of 0 to 1 by the completion's hash: random weights never answer, and equal rewards would move nothing."""
    return [int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF for text in completions]
