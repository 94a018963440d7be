# SPDX-License-Identifier: Apache-2.0
"""Tokens of some rows, drawn as they are where one process draws those of all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList


class SharedNoise(LogitsProcessor):
    """What torch.multinomial does with a batch of all rows (it divides probabilities by exponential noise and takes the
    largest), for some of them: every process draws the noise of all rows, and uses its own.

    The last of transformers' logits processors: it leaves the drawn token as the only possible one.
    """

    def __init__(self, seed: int, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.own, self.rows, self.drawn = range(0), 0, 0

    def begin(self, own: range, rows: int) -> None:
        """A batch of `rows` follows, of which this process generates the `own`."""
        self.own, self.rows, self.drawn = own, rows, 0

    def draw(self, vocabulary: int) -> Tensor:
        """Noise (rows, V) of the next token."""
        self.drawn += 1
        noise = torch.empty(self.rows, vocabulary, device=self.generator.device)
        return noise.exponential_(generator=self.generator)

    def catch_up(self, tokens: int, vocabulary: int) -> None:
        """Draw for those of the batch's `tokens` that other processes' rows had and these had not: the next batch goes on
        from there."""
        while self.drawn < tokens:
            self.draw(vocabulary)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` (B, V) with -inf but for one token of each row."""
        noise = self.draw(scores.shape[1])[self.own.start : self.own.stop]
        chosen = (scores.softmax(-1) / noise).argmax(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)

    def drawing(self, loop: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A decoding loop, as transformers' `custom_generate` takes it, whose tokens are drawn here."""

        def drawn(model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, **more: Any) -> Tensor:
            return loop(model, input_ids, logits_processor=LogitsProcessorList([*logits_processor, self]), **more)

        return drawn
