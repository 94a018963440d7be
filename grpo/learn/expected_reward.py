# SPDX-License-Identifier: Apache-2.0
"""Expected reward at the answer: a completion learns from the rewards of all actions, not of the sampled one alone.

A completion that answers with one `[k]` decides its reward at the token k. With p_k the policy's probability of action
k there, r_k the reward of that action and r_invalid that of any other token, its expected reward is

    V = sum_k p_k r_k + (1 - sum_k p_k) r_invalid + the sampled rewards of functions that cannot be looked up.

The answer's token gets the gradient of V itself, and the tokens before it get the advantage of V over the group's mean.
Sources: Mean Actor-Critic (1709.00503), Expected Policy Gradients (1706.05374), VeriFree (2505.21493).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo.reward.lookup import AnswerRewards

EPSILON = 1e-4  # TRL adds it to the deviation that it divides by.


@dataclass(frozen=True)
class StepRewards:
    """The AnswerRewards of a step's B completions as tensors. Rows with fewer than K actions are filled up with gains
    of 0, and so is every completion that is learned from as it was sampled: V needs no mask for them.

    Rewards are float64, and so are V, its mean and its deviation, for the reason in `group_advantages`."""

    position: Tensor  # (B,) int64, -1 where the completion is learned from as it was sampled
    tokens: Tensor  # (B, K) int64
    gains: Tensor  # (B, K)
    base_reward: Tensor  # (B,)
    other_reward: Tensor  # (B,)
    surplus: Tensor  # (B,)

    @classmethod
    def stack(cls, answers: Sequence[AnswerRewards], device: torch.device | str) -> StepRewards:
        """Stacks the AnswerRewards of a step's completions, padded to the largest number of actions."""
        width = max(1, *(len(answer.tokens) for answer in answers))

        def stacked(name: str) -> Tensor:
            values = [getattr(answer, name) for answer in answers]
            if name in ("tokens", "gains"):
                values = [[*row, *[0] * (width - len(row))] for row in values]
            dtype = torch.int64 if name in ("position", "tokens") else torch.float64
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(**{field.name: stacked(field.name) for field in fields(cls)})

    def __getitem__(self, rows: Tensor) -> StepRewards:
        """The rewards of the completions whose indices are `rows` (b,)."""
        return StepRewards(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @property
    def is_expected(self) -> Tensor:
        """(B,) bool: which completions learn from their expected reward."""
        return self.position >= 0


class ExpectedReward:
    """What the rewards of all actions change in a step: the advantages of its tokens, and its loss.

    `advantages` (B, C) takes the place of one advantage a completion, and `loss` is added for each micro-batch, whose
    gradient is that of V at the answer's token."""

    def __init__(
        self,
        answers: StepRewards,
        probabilities: Tensor,
        sampled: Tensor,
        weights: Tensor,
        group: int,
        scale_rewards: str,
    ):
        """Mean and deviation of a group must be known before its first micro-batch learns, so `probabilities` (B, K)
        are those of a pass before. `sampled` (B,) are the advantages of the sampled rewards; `weights` (B, C) what
        LOSS_TYPE multiplies each token's advantage by."""
        self.answers = answers
        values = expected_rewards(answers, probabilities)
        self.means, scale = mean_and_scale(answers, probabilities, group, scale_rewards)
        advantages = token_advantages(answers, values, self.means, scale, sampled, group, weights.size(1))
        self.advantages = advantages.to(sampled.dtype)
        at_answer = weights.gather(1, answers.position.clamp(min=0)[:, None])[:, 0]
        self.slopes = (at_answer / scale).masked_fill(~answers.is_expected, 0.0)

    def loss(self, rows: Tensor, probabilities: Tensor) -> Tensor:
        """What the completions `rows` (b,) add to the loss, given the policy's `probabilities` (b, K) of the actions,
        through which the gradient flows. A completion that every function left out adds nothing."""
        values = expected_rewards(self.answers[rows], probabilities)
        return -(self.slopes[rows] * (values - self.means[rows]).nan_to_num()).sum().to(probabilities.dtype)


def expected_rewards(answers: StepRewards, probabilities: Tensor) -> Tensor:
    """V (B,) of each completion, given the probabilities (B, K) of the actions; the sampled reward of a completion
    that no token decides. NaN if every function left the completion out. Differentiable."""
    return answers.base_reward + (probabilities * answers.gains).sum(-1)


def mean_and_scale(
    answers: StepRewards, probabilities: Tensor, group: int, scale_rewards: str
) -> tuple[Tensor, Tensor]:
    """(mean of V over each completion's group, the scale by which its advantage is divided), both (B,). `group` is the
    number of consecutive completions that form a group.

    The deviation is that of the mixture of all actions, not of V: equal prefixes have equal V, and dividing by
    the deviation of V would amplify rounding."""
    values = expected_rewards(answers, probabilities)
    mean = values.view(-1, group).nanmean(1).repeat_interleave(group)
    if scale_rewards == "none":
        return mean, torch.ones_like(mean)
    invalid = (answers.base_reward - mean)[:, None]
    of_actions = (invalid + answers.gains).square() - invalid.square()  # 0 without a gain
    variance = invalid[:, 0].square() + (probabilities * of_actions).sum(-1)
    if scale_rewards == "batch":
        variance = variance.nanmean().expand_as(mean)
    else:
        variance = variance.view(-1, group).nanmean(1).repeat_interleave(group)
    return mean, variance.clamp(min=0).sqrt() + EPSILON  # Rounding may leave a little less than 0.


def token_advantages(
    answers: StepRewards, values: Tensor, mean: Tensor, scale: Tensor, sampled: Tensor, group: int, width: int
) -> Tensor:
    """Advantage (B, `width`) of each token of the completions, without the gradient of V at the answer's token.

    Before that token it is the advantage of V. From that token on only the sampled rewards of functions that are not
    looked up count, and behind it also what the looked-up functions gave beyond the answered action's reward. A
    completion without an answer's token has the advantage of its sampled reward throughout. `sampled` (B,) are the
    advantages of the sampled rewards, which groups without any answer's token keep."""
    group_rewards = answers.other_reward.masked_fill(values.isnan(), torch.nan).view(-1, group)
    others = answers.other_reward - group_rewards.nanmean(1).repeat_interleave(group)
    offset = torch.arange(width, device=values.device) - answers.position[:, None]  # 0 at the answer's token
    behind = others[:, None] + answers.surplus[:, None] * (offset > 0)
    before = (values - mean)[:, None].expand(-1, width)
    advantages = torch.where((offset >= 0) & answers.is_expected[:, None], behind, before) / scale[:, None]
    some_expected = answers.is_expected.view(-1, group).any(1).repeat_interleave(group)
    return torch.where(some_expected[:, None], advantages.nan_to_num(nan=0.0), sampled[:, None])
