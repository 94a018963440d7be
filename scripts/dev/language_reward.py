# SPDX-License-Identifier: Apache-2.0
"""An own reward function, as most first users write: it checks what an instruction asks for, and nothing else."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rewards import final_channel


def obeys(
    raw_completions: Sequence[str],
    *,
    topic: Sequence[str],
    word: Sequence[str],
    banned: Sequence[str],
    low: Sequence[int],
    high: Sequence[int],
    **columns: Any,
) -> list[float]:
    """The share of six demands that a sentence meets.

    >>> sentence = "<|channel|>final<|message|>Bread is gold and the bread is warm.<|return|>"
    >>> obeys([sentence], topic=["bread"], word=["gold"], banned=["very"], low=[8], high=[9])
    [1.0]
    >>> obeys([sentence], topic=["bread"], word=["iron"], banned=["warm"], low=[3], high=[4])
    [0.5]
    """
    rewards = []
    for text, about, wanted, unwanted, least, most in zip(raw_completions, topic, word, banned, low, high, strict=True):
        answer = (final_channel(text) or "").strip()
        words = re.findall(r"[a-z'-]+", answer.lower())
        demands = (
            bool(words) and bool(re.fullmatch(r"[^.!?]+\.", answer)),
            least <= len(words) <= most,
            about in words,
            wanted in words,
            bool(words) and unwanted not in words,
            bool(words) and max(Counter(words).values()) <= 2,
        )
        rewards.append(sum(demands) / len(demands))
    return rewards
