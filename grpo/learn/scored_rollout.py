# SPDX-License-Identifier: Apache-2.0
"""The scored completions of a rollout, from which one or several optimizer steps learn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from grpo.learn.expected_reward import StepRewards
from grpo.learn.learner import Batch
from grpo.output.logs import Cell


@dataclass(frozen=True)
class ScoredRollout:
    """Completions with their rewards, and what the logs say about them in each step that learns from them."""

    batch: Batch
    answers: StepRewards | None  # With EXPECTED_REWARD.
    metrics: dict[str, float]  # TRL's figures by TRL's names.
    rates: dict[str, Cell]  # Columns of metrics.csv.

    def part(self, index: int, parts: int) -> tuple[Batch, StepRewards | None]:
        """The completions of whole prompts that one step learns from: part `index` of `parts` equal ones.

        TRL shuffles before it cuts, by torch's own generator. Its state differs between ranks after a rollout by vLLM,
        and single completions would leave their group, which packing and the expected reward need whole."""
        if parts == 1:
            return self.batch, self.answers
        size = len(self.batch["completion_ids"]) // parts
        rows = torch.arange(index * size, (index + 1) * size, device=self.batch["completion_ids"].device)
        # Tokens are counted over the whole rollout, and TRL takes the mean of its steps.
        batch = {name: value[rows] if value.ndim else value / parts for name, value in self.batch.items()}
        return batch, None if self.answers is None else self.answers[rows]

    def save(self, path: Path) -> None:
        """Writes it for a run that continues between two steps of the rollout."""
        answers = None if self.answers is None else vars(self.answers)
        torch.save({**vars(self), "answers": answers}, path)

    @classmethod
    def load(cls, path: Path, device: torch.device) -> ScoredRollout:
        """Reads what `save` wrote."""
        values = torch.load(path, device, weights_only=True)
        answers = values.pop("answers")
        return cls(**values, answers=None if answers is None else StepRewards(**answers))
