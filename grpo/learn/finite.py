# SPDX-License-Identifier: Apache-2.0
"""Ends training before weights that are not finite are saved."""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers.trainer_callback import TrainerCallback

from grpo.learn.distributed import adapter_parameters
from grpo.process.ending import RunFailure


class NotFinite(RunFailure):
    """A gradient or the weights hold NaN or infinity."""

    label = "training"
    continues = True


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors hold neither NaN nor infinity, which their common norm would be as well."""
    return bool(torch.nn.utils.get_total_norm([tensor.detach() for tensor in tensors]).isfinite())


class FiniteCallback(TrainerCallback):
    """Raises NotFinite before the optimizer steps along a gradient that is not finite, and after a step that made the
    weights so. A single NaN reaches all weights in the next step, and no later step mends them: neither a checkpoint
    nor the adapter may hold one."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not is_finite(p.grad for p in adapter_parameters(kwargs["model"]) if p.grad is not None):
            raise NotFinite(f"the gradient of step {state.global_step + 1} is not finite: the step was not made")

    def on_optimizer_step(self, args, state, control, **kwargs):
        if not is_finite(adapter_parameters(kwargs["model"])):
            step = state.global_step + 1
            raise NotFinite(f"the weights are not finite after step {step}: nothing of this step was saved")
