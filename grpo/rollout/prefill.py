# SPDX-License-Identifier: Apache-2.0
"""transformers' generate with the loop of grpo/rollout/decode.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from grpo.rollout.decode import decode


@contextlib.contextmanager
def shared_prefill(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, `model.generate` takes the steps of `decode`, which computes each prompt once however many
    completions it gets: a group of 8 costs an eighth of the prefill, in time and in memory."""
    stock = cast(Any, model).generate  # its own annotations accept no class of transformers

    def generate(**options: Any) -> torch.Tensor:
        ids = stock(**options, custom_generate=decode)
        torch.cuda.empty_cache()  # the memory of a graph serves nothing else until then
        return ids

    vars(model)["generate"] = generate  # PEFT's model finds it before the class's own
    try:
        yield
    finally:
        del vars(model)["generate"]
