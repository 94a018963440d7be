# SPDX-License-Identifier: Apache-2.0
"""One step of GRPO on one screen: from rows to what the learner needs (DeepSeekMath, 2402.03300, section 4.1).

    sample      G completions of every prompt, from the present policy
    score       the weighted sum of what the reward functions give each completion
    advantages  how much better a completion is than its group, or with `step_rewards` each turn of an episode
    reference   log-probs of the base model, where a KL divergence holds the policy near it (BETA)

With EXPECTED_REWARD, `Learner.expect` (expected_reward.py) replaces these advantages for groups that name an action:
there the rewards of all actions are known, and not that of the sampled one alone. The learner (learner.py) makes a
gradient of it. The tests compare every part with TRL's GRPOTrainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.data.files import Row
from grpo.learn.expected_reward import EPSILON, StepRewards
from grpo.learn.rollout_figures import nan_deviation, rollout_figures
from grpo.learn.scorer import Scores
from grpo.output.logs import Cell
from grpo.rollout.sampler import EndTokens, Sample
from grpo.settings.table import Settings

Batch = dict[str, Tensor]  # The tensors of a step, or of some of its completions, by TRL's names.


@dataclass(frozen=True)
class Step:
    """What the learner gets: the scored completions of a rollout, which several optimizer steps may share, and what the
    logs say about them in each of these.

    `batch` holds `prompt_ids` (B, P), padded on the left, `completion_ids` (B, C), padded on the right, their masks,
    `advantages` (B,), or (B, C) by turn, and `num_items_in_batch` (), the tokens that count. With ENVIRONMENT
    `tool_mask` (B, C) is 0 for the tokens of results, which are not learned. Where they are known it also holds
    `sampling_per_token_logps` (vLLM's), `ref_per_token_logps` (with BETA) and `old_per_token_logps` (where several
    steps share a rollout), each (B, C), NaN where unknown."""

    batch: Batch
    answers: StepRewards | None  # With EXPECTED_REWARD: the rewards of all actions.
    metrics: dict[str, float]  # Figures by TRL's names.
    rates: dict[str, Cell]  # Columns of metrics.csv.
    # (B, K), with DIRECT_ANSWERS: the actions' probabilities when the answers were chosen. A rank knows those of its
    # own rows; the others are 0, so that the learner's sum over ranks completes them.
    probabilities: Tensor | None = None


def new_step(
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    sample: Callable[[Sequence[Sequence[int]]], list[Sample]],
    score: Callable[[Sequence[Row], list[list[int]]], Scores],
    logps: Callable[[Batch, bool], Tensor],
    s: Settings,
    ends: EndTokens,
) -> Step:
    """The step of B rows, which stand in groups of NUM_GENERATIONS, and their `prompts` as token ids.

    `sample` completes prompts, `score` rewards completions, and `logps` computes log-probs (B, C) of a batch, with the
    adapter or without."""
    samples = sample(prompts)
    scores = score(rows, [completion.ids for completion in samples])
    batch = to_tensors(prompts, samples, s, scores.rewards.device, ends)
    advantages, deviations = group_advantages(scores.rewards, s.NUM_GENERATIONS, s.SCALE_REWARDS)
    batch["advantages"] = advantages
    if scores.turn_rewards is not None:
        to_go = returns_to_go(scores.rewards, scores.turn_rewards)
        by_turn = turn_advantages(to_go, s.NUM_GENERATIONS, s.SCALE_REWARDS)
        batch["advantages"] = spread_over_turns(by_turn, samples, batch["completion_ids"].size(1))
    if s.steps_per_rollout > 1:  # Otherwise the policy that learns is the one that sampled, and the ratio is 1.
        sampled = batch.get("sampling_per_token_logps")
        batch["old_per_token_logps"] = logps(batch, True) if sampled is None else sampled
    if s.BETA:
        batch["ref_per_token_logps"] = logps(batch, False)
    metrics = rollout_figures(prompts, samples, scores, deviations, None if s.DIRECT_ANSWERS else ends)
    return Step(batch, scores.answers, metrics, scores.rates, known_probabilities(samples))


def group_advantages(rewards: Tensor, group: int, scale_rewards: str | None) -> tuple[Tensor, Tensor]:
    """(advantages, deviations), both (B,), of rewards (B,) whose groups are consecutive. `scale_rewards`: `group`,
    `batch` or `none`. A completion that every function left out (NaN) does not count, and has the advantage 0.

    The mean is taken in float64. In float32 that of equal rewards may be off by rounding, which a deviation of nearly 0
    makes large: eight completions with -1509.8 each would all have the advantage -0.53."""
    groups = rewards.view(-1, group)
    mean = groups.double().nanmean(1).to(rewards.dtype).repeat_interleave(group)
    if scale_rewards == "batch":
        deviation = nan_deviation(rewards).expand_as(rewards)
    else:
        deviation = nan_deviation(groups).repeat_interleave(group)
    advantages = rewards - mean
    if scale_rewards != "none":
        advantages = advantages / (deviation + EPSILON)
    return advantages.nan_to_num(nan=0.0), deviation


def returns_to_go(rewards: Tensor, turn_rewards: Sequence[Sequence[float]]) -> Tensor:
    """What each turn and those behind it earn, (B, T); NaN where an episode has no such turn or no reward.

    `rewards` (B,) are those of whole episodes, of which `turn_rewards` belong to turns and the rest to the end. A turn
    does not earn what came before it (R. Sutton et al., Policy Gradient Methods for Reinforcement Learning with
    Function Approximation, NIPS 1999); DeepSeekMath 4.1.3 sums the rewards of later steps in the same way."""
    steps = [torch.tensor(values, dtype=rewards.dtype, device=rewards.device) for values in turn_rewards]
    earned = pad_sequence(steps, True, torch.nan)  # (B, T)
    return rewards[:, None] - (earned.cumsum(1) - earned)


def turn_advantages(to_go: Tensor, group: int, scale_rewards: str | None) -> Tensor:
    """The advantage of each turn (B, T), 0 where there is none: how much better its return-to-go (B, T) is than the
    mean of those that the group's episodes have at the same turn. A turn that no other episode of the group reached
    keeps the advantage of the turn before it.

    `scale_rewards` divides by the deviation of these from their means, over all turns of the `group` or `batch`, which
    for episodes of one turn is the group's deviation."""
    groups = to_go.double().view(-1, group, to_go.size(1))  # (P, G, T), as in `group_advantages`
    centred, count = groups - groups.nanmean(1, keepdim=True), (~groups.isnan()).sum(1)  # (P, T)
    freedom = (count - 1).clamp(min=0).sum(1)  # (P,)
    squares = centred.square().nansum((1, 2))
    if scale_rewards == "batch":
        squares, freedom = squares.sum().expand_as(squares), freedom.sum().expand_as(freedom)
    deviation = (squares / freedom.clamp(min=1)).sqrt()[:, None, None]
    for turn in range(1, groups.size(2)):
        alone = (count[:, turn] == 1)[:, None] & ~groups[:, :, turn].isnan()
        centred[:, :, turn] = torch.where(alone, centred[:, :, turn - 1], centred[:, :, turn])
    if scale_rewards != "none":
        centred = centred / (deviation + EPSILON)
    return centred.nan_to_num(nan=0.0).view_as(to_go).to(to_go.dtype)


def spread_over_turns(by_turn: Tensor, samples: Sequence[Sample], width: int) -> Tensor:
    """The values (B, T) of turns at each of their tokens, (B, `width`); those of a result are its call's."""
    spread = by_turn.new_zeros(len(samples), width)
    for values, row, sample in zip(by_turn, spread, samples, strict=True):
        turns = sample.episode.turns if sample.episode else []
        for turn, start in enumerate(turns):
            row[start : len(sample.ids)] = values[turn]
    return spread


def to_tensors(
    prompts: Sequence[Sequence[int]], samples: Sequence[Sample], s: Settings, device: torch.device, ends: EndTokens
) -> Batch:
    """The `batch` of a Step without advantages, old and reference log-probs."""
    # With DIRECT_ANSWERS the tokens behind the first were not sampled: neither loss nor entropy may count them.
    completions = [completion.ids[:1] if s.DIRECT_ANSWERS else completion.ids for completion in samples]
    batch: Batch = {}
    for kind, token_rows, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
        ids = [torch.tensor(row) for row in token_rows]
        batch[f"{kind}_ids"] = pad_sequence(ids, True, ends.padding, side).to(device)
        batch[f"{kind}_mask"] = pad_sequence([torch.ones_like(row) for row in ids], True, 0, side).to(device)
    if s.MASK_TRUNCATED:
        ended = torch.tensor([ends.has_ended(completion) for completion in samples], device=device)
        batch["completion_mask"] = batch["completion_mask"] * ended[:, None]
    if episodes := [sample.episode for sample in samples if sample.episode]:
        learned = [torch.tensor(episode.learned) for episode in episodes]
        batch["tool_mask"] = pad_sequence(learned, True, 1).to(device)
    batch["num_items_in_batch"] = learned_mask(batch).sum()
    if (known := [sample.logps for sample in samples if sample.logps is not None]) and len(known) == len(samples):
        logps = [torch.tensor([torch.nan if value is None else value for value in row]) for row in known]
        batch["sampling_per_token_logps"] = pad_sequence(logps, True, 0.0).to(device)
    return batch


def learned_mask(batch: Batch) -> Tensor:
    """(B, C): 1 for the tokens that the model wrote and learns from, 0 for padding and the results of tools."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def known_probabilities(samples: Sequence[Sample]) -> Tensor | None:
    """The probabilities (B, K) that samples come with; zeros for those of other ranks, None if no sample has any."""
    known = [sample.probabilities for sample in samples if sample.probabilities is not None]
    if not known:
        return None
    zeros = torch.zeros_like(known[0])
    return torch.stack([zeros if sample.probabilities is None else sample.probabilities for sample in samples])
