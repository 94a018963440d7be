# SPDX-License-Identifier: Apache-2.0
"""Completions and their rewards: checks, training and evaluation score all completions here."""

import copy
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo.data.files import Conversation, Row, reward_columns
from grpo.harmony import assistant_turn, final_channel, parse_action
from grpo.reward.calling import Reward, call_rewards
from grpo.reward.episode import Episode


@dataclass(frozen=True)
class Completion:
    """A completion with everything that reward functions and logs need."""

    row: Row
    text: str  # as the model wrote it, special tokens included
    action: int | None  # None if the completion names no action, or if the row has none
    tokens: int
    truncated: bool
    decoded: str | Conversation = ""  # the completion as TRL passes it to reward functions, see `read_completion`
    episode: Episode | None = None  # with ENVIRONMENT

    @property
    def turn(self) -> str:
        """The assistant's whole turn: the part that the prompt holds, and the completion."""
        return assistant_turn(self.row.prompt, self.text)


def read_completion(row: Row, text: str, plain: str, tokens: int, truncated: bool) -> Completion:
    """The completion of a row, given its `text` with special tokens and its `plain` text without them.

    As in TRL 1.16 (GRPOTrainer._generate), functions get `plain`, as a list of one message if the prompt is a list."""
    action = parse_action(assistant_turn(row.prompt, text), len(row.rewards)) if row.rewards else None
    decoded = plain if isinstance(row.trl_prompt, str) else [{"role": "assistant", "content": plain}]
    return Completion(row, text, action, tokens, truncated, decoded)


def read_completions(
    tokenizer: Any,
    stops: Sequence[int],
    rows: Sequence[Row],
    completion_ids: Sequence[Sequence[int]],
    episodes: Sequence[Episode] = (),
) -> list[Completion]:
    """Decodes the completions of `rows`, with special tokens and without, by a tokenizer of transformers.

    A completion is truncated if its last token is neither in `stops` nor padding: TRL's rule for its clipped ratio. One
    of `episodes` is truncated if a limit cut it, and has as many tokens as the model wrote."""
    ends = {*stops, tokenizer.pad_token_id}
    ids_lists = [list(ids) for ids in completion_ids]
    texts, plain_texts = (tokenizer.batch_decode(ids_lists, skip_special_tokens=skipped) for skipped in (False, True))
    completions = [
        read_completion(row, text, plain, len(ids), ids[-1] not in ends)
        for row, text, plain, ids in zip(rows, texts, plain_texts, completion_ids, strict=True)
    ]
    if not episodes:
        return completions
    return [
        replace(completion, tokens=episode.tokens, truncated=episode.is_cut, episode=episode)
        for completion, episode in zip(completions, episodes, strict=True)
    ]


def total(scores: Sequence[float]) -> float:
    """The sum of the scores that are not NaN, as in TRL; NaN if all are."""
    kept = [score for score in scores if not math.isnan(score)]
    return math.fsum(kept) if kept else math.nan


def initial_trainer_state(total_steps: int) -> types.SimpleNamespace:
    """A stand-in for transformers' TrainerState in the first step, for calls without a trainer. It has every field, so
    that no function passes the check and fails in training, or the other way round."""
    return types.SimpleNamespace(
        **{"epoch": 0, "global_step": 0, "max_steps": total_steps, "num_input_tokens_seen": 0, "total_flos": 0},
        **dict.fromkeys(("logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs"), 1),
        **dict.fromkeys(("best_metric", "best_global_step", "best_model_checkpoint", "trial_name", "trial_params")),
        **{"is_local_process_zero": True, "is_world_process_zero": True, "is_hyper_param_search": False},
        log_history=[],
        stateful_callbacks={},
    )


def log_nothing(name: str, value: Any) -> None:
    """Takes the place of TRL's `log_extra` and `log_metric` outside of training."""


def score(
    functions: Sequence[Reward],
    completions: Sequence[Completion],
    ids: Sequence[Sequence[int]],
    columns: Sequence[str],
    trainer_state: Any,
    log_extra: Callable[..., None] = log_nothing,
    log_metric: Callable[..., None] = log_nothing,
) -> list[list[float]]:
    """Calls each function once, async ones together. Returns the rewards by completion and function (N, F), with NaN
    for None.

    `ids` are the completions' tokens, `columns` the names of all columns; a row that lacks one has None there."""
    cells = [reward_columns(completion.row) for completion in completions]

    def arguments() -> dict[str, Any]:
        """Fresh copies of the arguments, so that a function that changes them in place does not affect the next one.
        Token ids are copied as lists of numbers, because `deepcopy` is too slow for them."""
        shared: dict[str, Any] = {name: [row.get(name) for row in cells] for name in columns}
        shared["prompts"] = [completion.row.trl_prompt for completion in completions]
        shared["completions"] = [completion.decoded for completion in completions]
        episodes = [completion.episode for completion in completions if completion.episode]
        if episodes:
            shared |= {"episodes": episodes, "environments": [episode.environment() for episode in episodes]}
        return copy.deepcopy(shared) | {
            "completion_ids": [list(tokens) for tokens in ids],
            "raw_completions": [completion.turn for completion in completions],
            "rendered_prompts": [completion.row.prompt for completion in completions],
            "truncated": [completion.truncated for completion in completions],
            "trainer_state": trainer_state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }

    values = call_rewards(functions, arguments, len(completions))
    return [[math.nan if value is None else value for value in row] for row in zip(*values, strict=True)]


def partial_none_text(names: Sequence[str], scores: Sequence[Sequence[float]]) -> str | None:
    """Says which functions left completions out (NaN in `scores`, N x F) that other functions gave a number, or None:
    such a completion keeps its place in the group, and the missing number counts as 0, also beside a weight of 0."""
    partly = [row for row in scores if any(map(math.isnan, row)) and not all(map(math.isnan, row))]
    counts = {name: sum(math.isnan(row[i]) for row in partly) for i, name in enumerate(names)}
    missing = ", ".join(f"{name} for {count} of {len(scores)}" for name, count in counts.items() if count)
    if not missing:
        return None
    return (
        f"REWARDS: {missing} completions returned None, and other functions a number. As in TRL, None then counts as 0 "
        "in the sum; a completion is left out only if all functions return None, those of weight 0 too"
    )


def parsed_share(completion: Completion) -> float:
    """1 if a completion names an action or, if its row has no actions, if its final channel holds text; else 0. Of an
    episode the share of turns that could be read."""
    if completion.episode:
        return completion.episode.read_share
    if completion.row.rewards:
        return float(completion.action is not None)
    return float(bool((final_channel(completion.turn) or "").strip()))


def completion_rates(completions: Sequence[Completion]) -> dict[str, float | None]:
    """Columns of metrics.csv for these completions: parse rate, best-action rate, clipped ratio and lengths in tokens.
    The best-action rate is None where no row has actions."""
    acted = [(completion.row.rewards, completion.action) for completion in completions]
    count, lengths = len(completions), [completion.tokens for completion in completions]
    best = sum(k is not None and row[k] == max(row) for row, k in acted) / count
    return {
        "parse_rate": sum(map(parsed_share, completions)) / count,
        "best_action_rate": best if any(row for row, _ in acted) else None,
        "clipped_ratio": sum(completion.truncated for completion in completions) / count,
        "tokens_mean": sum(lengths) / count,
        "tokens_max": max(lengths),
    }
