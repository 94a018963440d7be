# SPDX-License-Identifier: Apache-2.0
"""The output head of a BF16 model with logits in float32.

BF16 has steps of 0.125 between 16 and 32, where a trained model's largest logits are. The head's weights and the states
before it stay BF16: their products are added up in float32 anyway, and only the sums are no longer rounded."""

import torch
from torch import Tensor
from transformers import PreTrainedModel


def float32_logits(states: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Logits (N, V) in float32 after `states` (N, hidden), by a head's `weight` (V, hidden) of the same type.

    vLLM computes the same (LogitsProcessor._apply_head). torch has the product of BF16 matrices with a result in
    float32 on GPUs alone."""
    if states.is_cuda and states.dtype == torch.bfloat16:
        return torch.mm(states, weight.t(), out_dtype=torch.float32, out=out)
    return torch.mm(states.float(), weight.float().t(), out=out)


class Float32Head(torch.nn.Linear):
    """An output head whose logits are float32 wherever no gradient is asked for: to sample, to choose and to compare.
    GRPO learns by `grpo.learn.log_probs`, which takes the head's weight alone; supervised training, whose library holds
    the logits of all tokens at once, keeps them in BF16."""

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad:
            return super().forward(input)
        states = input.to(self.weight.dtype)
        return float32_logits(states.flatten(0, -2), self.weight).unflatten(0, states.shape[:-1])


def install_float32_head(model: PreTrainedModel) -> None:
    """Puts a Float32Head with the same weight in place of the head of `model`, which has no bias."""
    weight = model.get_output_embeddings().weight
    head = Float32Head(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = weight
    model.set_output_embeddings(head)
