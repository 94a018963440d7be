# SPDX-License-Identifier: Apache-2.0
"""Scores the completions of a step: calls the reward functions, looks up what other actions earn, and writes
completions.csv."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from grpo.common import log
from grpo.data.files import Row, column_names
from grpo.learn.context import RunContext
from grpo.learn.expected_reward import StepRewards
from grpo.output.logs import Cell, FunctionLog, RunLog
from grpo.reward.calling import Reward
from grpo.reward.episode import Episode
from grpo.reward.lookup import AnswerRewards, RewardLookup, expected_text
from grpo.reward.scoring import partial_none_text, read_completions, score


@dataclass(frozen=True)
class Scores:
    """The rewards of a step's B completions."""

    names: Sequence[str]  # of the F functions
    by_function: Tensor  # (B, F), NaN where a function left a completion out
    rewards: Tensor  # (B,): weighted sums
    answers: StepRewards | None  # The rewards of all actions, with EXPECTED_REWARD.
    rates: dict[str, Cell]  # Columns of metrics.csv about these completions; empty on ranks other than 0.
    # Weighted `step_rewards` of each turn of each episode, parts of `rewards`; None where no environment has any.
    turn_rewards: list[list[float]] | None = None


def weighted_rewards(by_function: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum (B,) of rewards (B, F), in which NaN counts as 0; NaN where every function gave NaN."""
    return (by_function * weights).nansum(dim=1).masked_fill(by_function.isnan().all(dim=1), torch.nan)


class Scorer:
    """The reward functions of a run, with their weights. Rank 0 calls them for all ranks, because a function may be
    random or ask a judge. Checks and evaluations call them by the same `score`."""

    def __init__(
        self,
        run: RunContext,
        functions: Sequence[Reward],
        tokenizer: PreTrainedTokenizerBase,
        run_log: RunLog | None,
        device: torch.device,
    ):
        """`run_log` is None on ranks other than 0."""
        self.run, self.functions, self.tokenizer = run, list(functions), tokenizer
        self.names = [function.__name__ for function in functions]
        self.run_log, self.device, self.group = run_log, device, run.settings.NUM_GENERATIONS
        self.weights = torch.tensor([f.weight for f in functions], dtype=torch.float32, device=device)
        self.columns = column_names(run.rows)  # Functions get all columns with every row.
        self.lookup: RewardLookup | None = None  # None without EXPECTED_REWARD.
        if run.settings.EXPECTED_REWARD:
            self.lookup = RewardLookup(functions, self.columns, tokenizer)
        self.has_told_none = False  # Whether the log says what a None beside other rewards counts as.
        self.has_told_expected = False  # Whether it says how many completions learn from their expected reward.

    def score(
        self,
        rows: Sequence[Row],
        ids: list[list[int]],
        stops: Sequence[int],
        state: TrainerState,
        episodes: Sequence[Episode] = (),
    ) -> Scores:
        """The scores of the completions `ids` of `rows`, or of `episodes`; `stops` are the tokens that end one. Raises
        RewardError."""
        if self.run_log is None:
            values, answer_values = self.run.ranks.broadcast()
            answers = [AnswerRewards(*answer) for answer in answer_values]
        else:
            completions = read_completions(self.tokenizer, stops, rows, ids, episodes)
            # TRL's own would put a metric called `reward` among the values of its own, and drops what log_extra gets.
            logged = FunctionLog(len(completions))
            log_functions = logged.log_extra, logged.log_metric
            values = score(self.functions, completions, ids, self.columns, state, *log_functions)
            if not self.has_told_none and (text := partial_none_text(self.names, values)):
                self.has_told_none = True
                log.warning("%s", text)
            answers = []
            if self.lookup and self.run.settings.DIRECT_ANSWERS:
                answers = self.lookup.look_up_rows(rows, state)
            elif self.lookup:
                answers = self.lookup.look_up(completions, ids, values, state)
            if answers and not self.has_told_expected:
                self.has_told_expected = True
                log.info("%s", expected_text(completions, answers))
            self.run.ranks.broadcast([values, [dataclasses.astuple(answer) for answer in answers]])
        by_function = torch.tensor(values, dtype=torch.float32, device=self.device)
        rewards, rates = weighted_rewards(by_function, self.weights), {}
        if self.run_log:
            expected = sum(answer.position >= 0 for answer in answers) / len(answers) if answers else None
            step, zero_std = state.global_step + 1, 1 - self.teaching_share(rewards, answers)
            rates = self.run_log.write_completions(
                step, completions, rewards.tolist(), by_function.tolist(), zero_std, expected, logged
            )
        stacked = StepRewards.stack(answers, self.device) if answers else None
        return Scores(self.names, by_function, rewards, stacked, rates, self.turn_rewards(episodes))

    def turn_rewards(self, episodes: Sequence[Episode]) -> list[list[float]] | None:
        """What `Scores.turn_rewards` holds."""
        if all(episode.turn_rewards is None for episode in episodes):
            return None
        # By its name in REWARDS: in the logs a user's own `module:environment` has the same one.
        weight = next((function.weight for function in self.functions if function.name == "environment"), None)
        if weight is None:
            return None
        return [
            [weight * value for value in episode.turn_rewards or [0.0] * len(episode.turns)] for episode in episodes
        ]

    def teaching_share(self, rewards: Tensor, answers: Sequence[AnswerRewards]) -> float:
        """Share of the groups in which rewards, or the rewards of actions, differ.

        TRL's own figure is the batch's with SCALE_REWARDS=batch, and leaves out groups of fewer than two rewards."""
        groups = rewards.view(-1, self.group)
        teaches = groups.nan_to_num(nan=-math.inf).amax(1) > groups.nan_to_num(nan=math.inf).amin(1)
        if answers:
            differing = [len(set(answer.gains)) > 1 for answer in answers]
            teaches |= torch.tensor(differing, device=teaches.device).view(groups.shape).any(1)
        return teaches.float().mean().item()
