# SPDX-License-Identifier: Apache-2.0
"""Figures of a rollout, by the names under which TRL logs them to trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from grpo.learn.scorer import Scores
from grpo.rollout.sampler import EndTokens, Sample

FOLDS: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "min": min, "max": max}


def rollout_figures(
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    scores: Scores,
    deviations: Tensor,
    ends: EndTokens | None,
) -> dict[str, float]:
    """Figures of B completions: `num_tokens` in prompts and completions, lengths, and rewards. `deviations` (B,) are
    those of each completion's group; `ends` is None with DIRECT_ANSWERS, whose completions have no sampled length."""
    lengths = [sample.written for sample in samples]
    figures: dict[str, float] = {"num_tokens": sum(map(len, prompts)) + sum(lengths)}
    if ends is not None:
        ended = [sample.written for sample in samples if ends.has_ended(sample)]
        for name, values in (("", lengths), ("terminated_", ended or [0])):
            figures |= {f"completions/{kind}_{name}length": fold(values) for kind, fold in FOLDS.items()}
        figures["completions/clipped_ratio"] = 1 - len(ended) / len(samples)
    for name, values in zip(scores.names, scores.by_function.T, strict=True):
        figures |= {
            f"rewards/{name}/mean": values.nanmean().item(),
            f"rewards/{name}/std": nan_deviation(values).item(),
        }
    figures |= {"reward": scores.rewards.nanmean().item(), "reward_std": nan_deviation(scores.rewards).item()}
    figures["frac_reward_zero_std"] = (deviations.abs() <= 1e-8).float().mean().item()
    return figures


def nan_deviation(values: Tensor) -> Tensor:
    """The standard deviation (with n - 1) over the last dimension, of all but NaN; NaN of fewer than two numbers, and 0
    where the dimension has one place alone. In float64, so that it is 0 for equal values of float32."""
    if values.size(-1) == 1:
        return torch.zeros(values.shape[:-1], device=values.device)
    return nanstd(values.double(), -1).to(values.dtype)
