# SPDX-License-Identifier: Apache-2.0
"""A rollout from which several optimizer steps learn (STEPS_PER_GENERATION, NUM_ITERATIONS): its parts, and its file
in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from grpo.learn.expected_reward import StepRewards
from grpo.learn.step import Batch, Step


def part_of_rollout(rollout: Step, index: int, parts: int) -> tuple[Batch, StepRewards | None, torch.Tensor | None]:
    """The batch, rewards of actions and probabilities that one step learns from: part `index` of `parts` equal ones, of
    whole prompts. Probabilities are those of a rollout for one step alone, as DIRECT_ANSWERS has them.

    TRL shuffles before it cuts, by torch's own generator. Its state differs between ranks after a rollout by vLLM, and
    single completions would leave their group, which packing and the expected reward need whole."""
    if parts == 1:
        return rollout.batch, rollout.answers, rollout.probabilities
    size = len(rollout.batch["completion_ids"]) // parts
    rows = torch.arange(index * size, (index + 1) * size, device=rollout.batch["completion_ids"].device)
    # Tokens are counted over the whole rollout, and TRL takes the mean of its steps.
    batch = {name: value[rows] if value.ndim else value / parts for name, value in rollout.batch.items()}
    return batch, None if rollout.answers is None else rollout.answers[rows], None


def save_rollout(rollout: Step, path: Path) -> None:
    """Writes it for a run that continues between two steps of the rollout."""
    answers = None if rollout.answers is None else vars(rollout.answers)
    values = {"batch": rollout.batch, "metrics": rollout.metrics, "rates": rollout.rates, "answers": answers}
    torch.save(values, path)


def load_rollout(path: Path, device: torch.device) -> Step:
    """Reads what `save_rollout` wrote."""
    values = torch.load(path, device, weights_only=True)
    answers = values.pop("answers")
    return Step(**values, answers=None if answers is None else StepRewards(**answers))
