# SPDX-License-Identifier: Apache-2.0
"""LoRA on gpt-oss's experts with PEFT's wrappers, names and files, computed without merging it into the weights."""

import contextlib
from collections.abc import Iterator
from typing import cast

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor
from torch.nn.functional import pad

from grpo.model.experts import Experts, expert_weights, quantized_experts
from grpo.plan.targets import EXPERT_PARAMETERS

RANK_MULTIPLE = 8  # grouped products need rows of 16 bytes, so the rank is padded with zeros


def stored_factors(layer: torch.nn.Module, active: bool = True) -> tuple[Tensor, Tensor]:
    """(A, scale * B) of an adapted layer in float32, as PEFT stores them: (r, in) and (out, r), for experts (E * r, in)
    and (out, r * E). B is zero where the adapter is not `active`."""
    assert isinstance(layer, LoraLayer)
    a, b = (layer.get_parameter(f"lora_{name}.default.weight").float() for name in "AB")
    return a, b * (layer.scaling["default"] if active else 0.0)


def lora_factors(layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """`stored_factors` by expert: (E, r, in) and (E, out, r), with E = 1 for a linear layer."""
    (a, b), count = stored_factors(layer), int(layer.num_experts) if isinstance(layer, ParamWrapper) else 1
    return a.reshape(count, -1, a.shape[-1]), b.reshape(len(b), -1, count).permute(2, 0, 1)


def weight_norm(layer: torch.nn.Module) -> Tensor:
    """Frobenius norm of the frozen weights of an adapted layer."""
    if isinstance(layer, ParamWrapper):
        weights = expert_weights(cast(Experts, layer.get_base_layer()), layer.parameter_name)
    else:
        weights = layer.get_parameter("base_layer.weight")
    return torch.linalg.vector_norm(weights, dtype=torch.float32)


def update_norm(layer: torch.nn.Module) -> Tensor:
    """Frobenius norm of a layer's update scale * B @ A, computed from r x r matrices alone."""
    a, b = lora_factors(layer)
    return ((b.mT @ b) * (a @ a.mT)).sum().sqrt()


class ExpertAdapter(ParamWrapper):
    """PEFT's LoRA of a parameter of the experts, whose factors are passed to `experts_forward`. PEFT itself adds
    their product to the weights at each use. This takes twice the memory of the weights, because of the gradient, and
    is impossible for packed experts. The experts' implementation must not be changed."""

    def forward(self, x: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if self.merged:
            raise RuntimeError("the adapter is merged into the experts' weights, and would count twice")
        adapters = vars(self.get_base_layer()).setdefault("adapters", {})
        if not self.disable_adapters and self.active_adapters:
            a, b = lora_factors(self)
            fill = (0, -a.shape[1] % RANK_MULTIPLE)
            # Grouped products need contiguous rows or columns, but the last dimension of PEFT's B is the expert.
            a, b = pad(a.transpose(1, 2), fill).contiguous(), pad(b, fill).contiguous().transpose(1, 2)
            adapters[self.parameter_name] = a, b
        try:
            return self.base_layer(x, *args, **kwargs)
        finally:
            adapters.pop(self.parameter_name, None)


@contextlib.contextmanager
def experts_wrapped(model: torch.nn.Module) -> Iterator[None]:
    """Let PEFT add an adapter to `model` inside the block, also to MXFP4 experts, which get placeholder parameters
    because PEFT reads their shapes. At the end PEFT's wrappers of experts become `ExpertAdapter`s."""
    quantized = quantized_experts(model)
    for experts in quantized:
        (count, gate_up), hidden = experts.gate_up_proj_bias.shape, experts.down_proj_bias.shape[1]
        for name, shape in zip(EXPERT_PARAMETERS, ((hidden, gate_up), (gate_up // 2, hidden)), strict=True):
            empty = experts.gate_up_proj_bias.new_zeros(()).expand(count, *shape)
            experts.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))
    try:
        yield
    finally:
        for experts in quantized:
            for name in EXPERT_PARAMETERS:
                delattr(experts, name)
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = ExpertAdapter
