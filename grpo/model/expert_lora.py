# SPDX-License-Identifier: Apache-2.0
"""LoRA on gpt-oss's experts: PEFT's wrappers, names and files, computed without merging the product into the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from torch.nn.functional import pad

from grpo.model.experts import OURS, expert_weights
from grpo.model.load import QuantizedExperts, quantized_experts
from grpo.plan.targets import EXPERT_PARAMETERS

RANK_MULTIPLE = 8  # grouped products want rows of 16 bytes: smaller ranks are filled up with zeros


def low_rank(layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """A (E, r, in) and scale * B (E, out, r) of an adapted layer in float32, with E = 1 for a linear one. PEFT stores those of
    experts as lora_A (E * r, in) and lora_B (out, r * E)."""
    count = layer.num_experts if isinstance(layer, ParamWrapper) else 1
    a, b = (getattr(layer, f"lora_{name}")["default"].weight.float() for name in "AB")
    b = b.reshape(len(b), -1, count).permute(2, 0, 1)
    return a.reshape(count, -1, a.shape[-1]), b * layer.scaling["default"]


def base_norm(layer: torch.nn.Module) -> Tensor:
    """2-norm of the weights that an adapted layer adapts."""
    base = layer.get_base_layer()
    weights = expert_weights(base, layer.parameter_name) if isinstance(layer, ParamWrapper) else base.weight
    return torch.linalg.vector_norm(weights, dtype=torch.float32)


def update_norm(layer: torch.nn.Module) -> Tensor:
    """2-norm of what the adapter adds to these weights, by products of r x r alone."""
    a, b = low_rank(layer)
    return ((b.mT @ b) * (a @ a.mT)).sum().sqrt()


class ExpertAdapter(ParamWrapper):
    """PEFT's LoRA of one parameter of the experts, whose factors `experts_forward` takes. PEFT's own way merges their product
    into the weights at each use: that costs the weights' size in memory, once more for the gradient, and packed weights have none."""

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        experts = self.get_base_layer()
        theirs = not isinstance(experts, QuantizedExperts) and experts.config._experts_implementation != OURS
        if theirs or self.merged:
            return super().forward(hidden_states, *given, **named)
        if not self.disable_adapters and self.active_adapters:
            a, b = low_rank(self)
            fill = (0, -a.shape[1] % RANK_MULTIPLE)
            # In rows or columns, as the products take them: in PEFT's B the experts come last.
            factors = pad(a.transpose(1, 2), fill).contiguous(), pad(b, fill).contiguous().transpose(1, 2)
            experts.adapters[self.parameter_name] = factors
        try:
            return self.base_layer(hidden_states, *given, **named)
        finally:
            experts.adapters.pop(self.parameter_name, None)


@contextlib.contextmanager
def experts_wrapped(model: torch.nn.Module) -> Iterator[None]:
    """Meanwhile PEFT may put an adapter on `model`, also on experts that are kept in MXFP4: it asks for parameters of a shape, of
    which these have none. What it has put on experts becomes an `ExpertAdapter` at the end."""
    quantized = quantized_experts(model)
    for experts in quantized:
        (count, twice), hidden = experts.gate_up_proj_bias.shape, experts.down_proj_bias.shape[1]
        for name, shape in zip(EXPERT_PARAMETERS, ((hidden, twice), (twice // 2, hidden)), strict=True):
            nothing = experts.gate_up_proj_bias.new_zeros(()).expand(count, *shape)
            experts.register_parameter(name, torch.nn.Parameter(nothing, requires_grad=False))
    try:
        yield
    finally:
        for experts in quantized:
            for name in EXPERT_PARAMETERS:
                delattr(experts, name)
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = ExpertAdapter
            module.get_base_layer().adapters = {}
