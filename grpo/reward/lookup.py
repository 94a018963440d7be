# SPDX-License-Identifier: Apache-2.0
"""Finds what every action of a row would earn in place of the one that a completion sampled (EXPECTED_REWARD)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo.data.files import Row
from grpo.harmony import ANSWER_AFTER, ANSWER_BEFORE, answer_turn, assistant_turn, completion_of, parse_action
from grpo.reward.calling import Reward
from grpo.reward.loading import is_by_action
from grpo.reward.scoring import Completion, read_completions, score, total

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerState


@dataclass(frozen=True)
class AnswerRewards:
    """Where one completion names its action, and what each action would earn there, as numbers that JSON can carry.

    A completion that is learned from as it was sampled has no position and no actions; `base_reward` is its reward."""

    # The reward of an unreadable answer, plus `other_reward`; NaN if every function left the completion out.
    base_reward: float
    position: int = -1  # of the answer's token in the completion
    tokens: Sequence[int] = ()  # (K,): the token that names each action
    gains: Sequence[float] = ()  # (K,): weighted reward of each action beyond that of an unreadable answer
    other_reward: float = 0.0  # weighted sampled reward of the functions that are not looked up
    surplus: float = 0.0  # sampled reward of the looked-up functions beyond that of the answered action


@functools.cache
def action_tokens(tokenizer: PreTrainedTokenizerBase, actions: int) -> list[int]:
    """The tokens that name the actions from `[0]` on; empty if a name takes several or changes those around it."""
    texts = [f"{ANSWER_BEFORE}{k}{ANSWER_AFTER}" for k in range(actions)]
    answers = tokenizer(text=texts, add_special_tokens=False)["input_ids"]
    if len(set(map(len, answers))) > 1:
        return []
    differing = [tokens for tokens in zip(*answers, strict=True) if len(set(tokens)) > 1]
    return list(differing[0]) if len(differing) == 1 else []


class RewardLookup:
    """Looks up what each action of a row earns by those reward functions that depend on row and action alone.

    The functions are called with made-up completions that answer `[k]` and nothing else, as the checks before a run
    call them, so that columns, weights and INVALID_REWARD count as in training."""

    def __init__(self, functions: Sequence[Reward], columns: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        """`functions` are all reward functions of the run, `columns` the names of all columns."""
        self.functions, self.columns, self.tokenizer = functions, columns, tokenizer
        self.looked_up = [function for function in functions if is_by_action(function.name)]
        self.tables: dict[str, list[float]] = {}  # row id -> rewards

    def rewards_of_actions(self, row: Row, state: TrainerState) -> list[float]:
        """Weighted rewards of an unreadable answer and of each action of `row`, summed over the looked-up functions;
        NaN for an answer that one of them leaves out, unless its weight is 0: then it changes no reward in TRL."""
        if row.id not in self.tables:
            answers = ["", *(f"[{k}]" for k in range(len(row.rewards)))]
            texts = [completion_of(row.prompt, answer_turn(answer)) for answer in answers]
            ids = self.tokenizer(text=texts, add_special_tokens=False)["input_ids"]
            stops = [tokens[-1] for tokens in ids]  # No answer is truncated, whatever token ends a text.
            probes = read_completions(self.tokenizer, stops, [row] * len(ids), ids)
            scores = score(self.looked_up, probes, ids, self.columns, state)
            pairs = (zip(self.looked_up, values, strict=True) for values in scores)
            self.tables[row.id] = [math.fsum(f.weight * value for f, value in row if f.weight) for row in pairs]
        return self.tables[row.id]

    def answer_positions(self, completions: Sequence[Completion], ids: Sequence[Sequence[int]]) -> list[int]:
        """Position of the token that names the action in each completion; -1 if the completion met MAX_COMPLETION_LEN,
        or no single token decides the action.

        A token counts only if replacing it by the token of another action makes the completion answer that action. So a
        number in the reasoning does not count, nor one of two equal `[k]`."""
        positions, replaced, tried = [-1] * len(completions), [], []
        for i, (completion, tokens) in enumerate(zip(completions, ids, strict=True)):
            actions, action = len(completion.row.rewards), completion.action
            if action is None or completion.truncated or not (names := action_tokens(self.tokenizer, actions)):
                continue
            position = max((n for n, token in enumerate(tokens) if token == names[action]), default=-1)
            if position >= 0:
                other = (action + 1) % actions
                tried.append((i, position, other))
                replaced.append([*tokens[:position], names[other], *tokens[position + 1 :]])
        texts = self.tokenizer.batch_decode(replaced) if replaced else []  # For no rows, batch_decode returns one text.
        for (i, position, other), text in zip(tried, texts, strict=True):
            row = completions[i].row
            if parse_action(assistant_turn(row.prompt, text), len(row.rewards)) == other:
                positions[i] = position
        return positions

    def look_up(
        self,
        completions: Sequence[Completion],
        ids: Sequence[Sequence[int]],
        scores: Sequence[Sequence[float]],
        state: TrainerState,
    ) -> list[AnswerRewards]:
        """The AnswerRewards of each completion, by its tokens in `ids` and its `scores` by function (NaN: left out)."""
        answers = []
        positions = self.answer_positions(completions, ids)
        for completion, position, values in zip(completions, positions, scores, strict=True):
            earned = [(f, f.weight * value) for f, value in zip(self.functions, values, strict=True)]
            counted = [(f, value) for f, value in earned if f.weight]
            sampled_reward = math.fsum(value for f, value in counted if f in self.looked_up)
            others = (value for f, value in counted if f not in self.looked_up)
            other_reward = math.fsum(value for value in others if not math.isnan(value))
            action = completion.action
            table = self.rewards_of_actions(completion.row, state) if position >= 0 else []
            if action is None or not table or any(map(math.isnan, [*table, *(value for _, value in counted)])):
                answers.append(AnswerRewards(total([value for _, value in earned]), other_reward=other_reward))
            else:
                surplus = sampled_reward - table[1 + action]
                answers.append(self.expected_answer(table, position, other_reward, surplus))
        return answers

    def look_up_rows(self, rows: Sequence[Row], state: TrainerState) -> list[AnswerRewards]:
        """The AnswerRewards of completions whose first token names the action (DIRECT_ANSWERS), which do not depend on
        the chosen action. If a function leaves an answer to a row out, the row has no reward."""
        answers = []
        for row in rows:
            table = self.rewards_of_actions(row, state)
            answers.append(AnswerRewards(math.nan) if any(map(math.isnan, table)) else self.expected_answer(table, 0))
        return answers

    def expected_answer(
        self, table: Sequence[float], position: int, other_reward: float = 0.0, surplus: float = 0.0
    ) -> AnswerRewards:
        """The AnswerRewards of a completion that names its action at `position`, by its row's `rewards_of_actions`."""
        unreadable, *actions = table
        gains, tokens = [reward - unreadable for reward in actions], action_tokens(self.tokenizer, len(actions))
        return AnswerRewards(unreadable + other_reward, position, tokens, gains, other_reward, surplus)


def expected_text(completions: Sequence[Completion], answers: Sequence[AnswerRewards]) -> str:
    """A line of training.log: how many of a step's completions learn from their expected reward, and why not all do."""
    sampled = [completion for completion, answer in zip(completions, answers, strict=True) if answer.position < 0]
    count = len(completions)
    text = f"expected reward at the answer: {count - len(sampled)} of {count} completions of this step"
    if not sampled:
        return text
    truncated = sum(completion.truncated for completion in sampled)
    unreadable = sum(completion.action is None and not completion.truncated for completion in sampled)
    return (
        f"{text}; the others are learned from as sampled: {truncated} met MAX_COMPLETION_LEN, {unreadable} cannot be "
        f"read, {len(sampled) - truncated - unreadable} have no single token that decides the action, or no reward"
    )
