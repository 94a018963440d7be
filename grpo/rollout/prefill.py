# SPDX-License-Identifier: Apache-2.0
"""transformers' generate with each prompt computed once, however many completions it gets; on a GPU with its own loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from grpo.rollout.decode import decode


@contextlib.contextmanager
def shared_prefill(model: PreTrainedModel) -> Iterator[None]:
    """For a while, `model.generate` computes equal rows of `input_ids` once, all but their last token, and goes on from
    copies of that cache (https://huggingface.co/docs/transformers/kv_cache#prefill-a-cache-prefix-caching). A group of 8
    completions costs an eighth of the prefill, in time and in memory. On a GPU the steps are those of `decode`, whose memory
    is free again afterwards."""
    stock = model.generate

    def generate(input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        """`input_ids`, `attention_mask` (B, L), padded on the left, as `generate` takes them, and what it returns."""
        if input_ids.is_cuda:
            ids = stock(input_ids=input_ids, attention_mask=attention_mask, **options, custom_generate=decode)
            torch.cuda.empty_cache()  # a graph's memory serves nothing else before
            return ids
        rows, owner = torch.cat([input_ids, attention_mask], 1).unique(dim=0, return_inverse=True)
        ids, mask = (half[:, :-1] for half in rows.chunk(2, 1))
        if ids.shape[1] and len(rows) < len(input_ids):
            options["past_key_values"] = cache = DynamicCache(config=model.config)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            with torch.no_grad():
                model.model(
                    input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
                )
            cache.batch_select_indices(owner)
        return stock(input_ids=input_ids, attention_mask=attention_mask, **options)

    model.generate = generate  # found before the class's own, by PEFT's models too
    try:
        yield
    finally:
        del model.generate
