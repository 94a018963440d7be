# SPDX-License-Identifier: Apache-2.0
"""From sampled completions to the rewards of all actions of their rows (EXPECTED_REWARD)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase, TrainerState

import rewards
from grpo.data.files import Row
from grpo.data.reward_checks import FINAL, tried_text
from grpo.data.scoring import Completion, Reward, read_completion, score, total
from grpo.learn.expected_reward import AnswerRewards, action_tokens


class RewardLookup:
    """Looks up what each action of a row earns by those reward functions that depend on row and action alone.

    The functions are asked about made-up completions that answer `[k]` and nothing else, as the checks before a run ask
    them: so their own columns, weights and INVALID_REWARD hold, whatever they compute.
    """

    def __init__(
        self,
        functions: Sequence[Reward],
        weights: Sequence[float],
        looked_up: Sequence[int],
        columns: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
    ):
        """`functions` and `weights` are all of the run's; `looked_up` holds the indices of the functions that can be
        looked up, `columns` the names of all columns."""
        self.functions, self.weights, self.looked_up = functions, weights, looked_up
        self.columns, self.tokenizer = columns, tokenizer
        self.tables: dict[str, list[float]] = {}  # row id -> rewards

    def rewards_of_actions(self, row: Row, state: TrainerState) -> list[float]:
        """Weighted rewards of an unreadable answer and of each action of `row`, summed over the looked-up functions;
        NaN where one of them leaves an answer out."""
        if row.id not in self.tables:
            answers = ["", *(f"[{k}]" for k in range(len(row.rewards)))]
            texts = [tried_text(row.prompt, FINAL.format(answer)) for answer in answers]
            ids = self.tokenizer(text=texts, add_special_tokens=False)["input_ids"]
            plain = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            probes = [
                read_completion(row, text, bare, len(tokens), False)
                for text, bare, tokens in zip(texts, plain, ids, strict=True)
            ]
            scores = score([self.functions[n] for n in self.looked_up], probes, ids, self.columns, state)
            weights = [self.weights[n] for n in self.looked_up]
            self.tables[row.id] = [
                math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) for values in scores
            ]
        return self.tables[row.id]

    def answer_columns(self, completions: Sequence[Completion], ids: Sequence[Sequence[int]]) -> list[int]:
        """Place of the token in each completion that names its action; -1 where the completion met MAX_COMPLETION_LEN,
        or no single token decides the action.

        A token counts only if the completion answers another action once it is replaced by the token of that action. So
        a number in the reasoning does not count, nor one of two equal `[k]`.
        """
        columns, replaced, tried = [-1] * len(completions), [], []
        for i, (completion, tokens) in enumerate(zip(completions, ids, strict=True)):
            actions, action = len(completion.row.rewards), completion.action
            if action is None or completion.truncated or not (names := action_tokens(self.tokenizer, actions)):
                continue
            place = max((n for n, token in enumerate(tokens) if token == names[action]), default=-1)
            if place >= 0:
                other = (action + 1) % actions
                tried.append((i, place, other))
                replaced.append([*tokens[:place], names[other], *tokens[place + 1 :]])
        texts = self.tokenizer.batch_decode(replaced) if replaced else []  # Without rows, batch_decode makes one text.
        for (i, place, other), text in zip(tried, texts, strict=True):
            row = completions[i].row
            if rewards.parse_action(rewards.assistant_turn(row.prompt, text), len(row.rewards)) == other:
                columns[i] = place
        return columns

    def look_up(
        self,
        completions: Sequence[Completion],
        ids: Sequence[Sequence[int]],
        scores: Sequence[Sequence[float]],
        state: TrainerState,
    ) -> list[AnswerRewards]:
        """The AnswerRewards of each completion, given its tokens and the score that each function gave it (NaN: the
        function left it out)."""
        answers = []
        columns = self.answer_columns(completions, ids)
        for completion, column, values in zip(completions, columns, scores, strict=True):
            earned = [weight * value for weight, value in zip(self.weights, values, strict=True)]
            looked_up = math.fsum(earned[n] for n in self.looked_up)
            others = math.fsum(
                value for n, value in enumerate(earned) if n not in self.looked_up and not math.isnan(value)
            )
            action = completion.action
            table = self.rewards_of_actions(completion.row, state) if column >= 0 else []
            if action is None or not table or any(map(math.isnan, [*values, *table])):
                answers.append(AnswerRewards(total(earned), others=others))
                continue
            unreadable, *actions = table
            answers.append(
                AnswerRewards(
                    base=unreadable + others,
                    column=column,
                    tokens=action_tokens(self.tokenizer, len(actions)),
                    gains=[reward - unreadable for reward in actions],
                    others=others,
                    surplus=looked_up - actions[action],
                )
            )
        return answers

    def look_up_rows(self, rows: Sequence[Row], state: TrainerState) -> list[AnswerRewards]:
        """The AnswerRewards of completions whose first token names the action (DIRECT_ANSWERS): the same whichever
        action was chosen. A row where a function leaves an answer out has no reward."""
        answers = []
        for row in rows:
            unreadable, *actions = table = self.rewards_of_actions(row, state)
            gains = [reward - unreadable for reward in actions]
            answer = AnswerRewards(unreadable, 0, action_tokens(self.tokenizer, len(actions)), gains)
            answers.append(AnswerRewards(math.nan) if any(map(math.isnan, table)) else answer)
        return answers


def expected_text(completions: Sequence[Completion], answers: Sequence[AnswerRewards]) -> str:
    """A line on how many of a step's completions learn from their expected reward, and why the others do not."""
    sampled = [completion for completion, answer in zip(completions, answers, strict=True) if answer.column < 0]
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
