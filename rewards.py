# SPDX-License-Identifier: Apache-2.0
"""Reward functions: pure, typed, without I/O. Run the examples with `python -m doctest rewards.py`.

`REWARDS` chooses among them by name, each with an optional weight, and takes functions of your own:

    REWARDS=action                          # the CSV's reward_action_k of the action that was answered (default)
    REWARDS=action,format=0.1               # plus a tenth of a point for an answer that is exactly `[k]`
    REWARDS=my_rewards:score                # my_rewards.py in the current folder, function `score`

Every reward function is called as TRL calls it, with one list entry per completion:

    function(completions, *, prompts, completion_ids, truncated, **columns) -> list[float | None]

`completions` keep their Harmony tokens (they are decoded from `completion_ids`), `truncated` says which of them met
`MAX_COMPLETION_LEN`, and `columns` holds every column of the CSV by its name, `reward_action_k` as numbers. `None` or
NaN leaves a completion out of its group's mean and gives it no advantage (docs/data.md says what that teaches).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# ---- Harmony: which part of a completion is the answer ---------------------------------------------------------------

# https://cookbook.openai.com/articles/openai-harmony: a message is <|channel|>NAME...<|message|>TEXT, closed by one of
# the tokens below. What stands between the name and <|message|> may name a recipient or a content type.
_END = r"<\|(?:end|return|call|start|channel|endoftext)\|>"
_FINAL = re.compile(rf"<\|channel\|>\s*final\b(?:(?!{_END}|<\|message\|>).)*<\|message\|>(.*?)(?={_END}|\Z)", re.DOTALL)
_MARKER = re.compile(r"<\|(?:start|channel|message|end|return|call)\|>")
_ACTION = re.compile(r"\[\s*([0-9]{1,6})\s*\]")


def final_channel(text: str) -> str | None:
    """The text of the last message in Harmony's final channel, or None where there is none.

    With special tokens only they count, so that reasoning which merely mentions a channel is no answer. Text whose
    special tokens were stripped glues role and channel together, and there the last `assistantfinal` begins the answer.

    >>> final_channel("<|channel|>analysis<|message|>Is it [1]?<|end|><|start|>assistant<|channel|>final<|message|>[2]")
    '[2]'
    >>> final_channel("analysisMaybe [1] or [3].assistantfinal[3]")
    '[3]'
    >>> final_channel("final[0]")
    '[0]'
    >>> final_channel("<|channel|>analysis<|message|>I would say assistantfinal[2], but the tokens ran") is None
    True
    >>> final_channel("analysisThe best is [2]. Let me check") is None
    True
    """
    if _MARKER.search(text):
        answers = _FINAL.findall(text)
        return answers[-1] if answers else None
    before, glue, answer = text.rpartition("assistantfinal")
    if glue:
        return answer
    return text.removeprefix("final") if text.startswith("final") else None


def assistant_turn(prompt: str, completion: str) -> str:
    """The completion with what the prompt already holds of the assistant's turn, so that a prompt which itself opens
    the final channel is understood, and a completion without any special token is never taken for stripped text.

    >>> assistant_turn("<|start|>user<|message|>Go<|end|><|start|>assistant", "<|channel|>final<|message|>[1]<|return|>")
    '<|start|>assistant<|channel|>final<|message|>[1]<|return|>'
    >>> parse_action(assistant_turn("...<|start|>assistant<|channel|>final<|message|>", "[3]<|return|>"))
    3
    """
    start = prompt.rfind("<|start|>assistant")
    return (prompt[start:] if start >= 0 else "") + completion


def parse_action(text: str, actions: int = 4) -> int | None:
    """The action `[k]` that the final channel names, 0 <= k < `actions`, or None.

    An answer that names several different actions is none: it would otherwise pay to name them all.

    >>> parse_action("<|channel|>final<|message|>[2]<|return|>")
    2
    >>> parse_action("analysis[0] looks good, [1] too.assistantfinalI choose [1].")
    1
    >>> [parse_action(f"assistantfinal{answer}") for answer in ("[0] or [1]", "[4]", "2", "[2", "")]
    [None, None, None, None, None]
    """
    answer = final_channel(text)
    named = {int(digits) for digits in _ACTION.findall(answer)} if answer else set()
    action = named.pop() if len(named) == 1 else None
    return action if action is not None and action < actions else None


# ---- Reward functions ------------------------------------------------------------------------------------------------


def reward_rows(columns: Mapping[str, Sequence[Any]]) -> list[list[float]]:
    """Rewards by completion and action, shape (B, K), out of the columns `reward_action_0` .. `reward_action_{K-1}`.

    Files may differ in their number of actions: a row ends where its column is missing (None).

    >>> reward_rows({"reward_action_0": [0.1, 0.5], "reward_action_1": [0.9, 0.5], "day": [1, 2]})
    [[0.1, 0.9], [0.5, 0.5]]
    """
    names = []
    while (name := f"reward_action_{len(names)}") in columns:
        names.append(name)
    rows = zip(*(columns[name] for name in names), strict=True)
    return [[float(value) for value in row if value is not None] for row in rows]


def action(completions: Sequence[str], *, invalid_reward: float = 0.0, **columns: Any) -> list[float]:
    """The CSV's reward for the action that each completion answers; `invalid_reward` where it answers none.

    >>> table = {"reward_action_0": [0.1, 0.1, 0.1], "reward_action_1": [0.9, 0.9, 0.9]}
    >>> action(["assistantfinal[1]", "analysis[1] it is", "assistantfinal[0]"], **table)
    [0.9, 0.0, 0.1]
    """
    rows = reward_rows(columns)
    answers = [parse_action(text, len(row)) for text, row in zip(completions, rows, strict=True)]
    return [invalid_reward if k is None else row[k] for k, row in zip(answers, rows, strict=True)]


def best(completions: Sequence[str], *, invalid_reward: float = 0.0, **columns: Any) -> list[float]:
    """1.0 for an action whose reward is the row's highest, 0.0 for another, `invalid_reward` for no answer.

    >>> table = {"reward_action_0": [0.1, 0.1], "reward_action_1": [0.9, 0.9]}
    >>> best(["assistantfinal[1]", "assistantfinal[0]"], **table)
    [1.0, 0.0]
    """
    rows = reward_rows(columns)
    answers = [parse_action(text, len(row)) for text, row in zip(completions, rows, strict=True)]
    return [invalid_reward if k is None else float(row[k] == max(row)) for k, row in zip(answers, rows, strict=True)]


def format(completions: Sequence[str], **columns: Any) -> list[float]:
    """1.0 where the final channel is exactly one `[k]`, else 0.0. It looks at the form alone, not at the action.

    >>> format(["assistantfinal[1]", "assistantfinalI take [1].", "analysis[1]"])
    [1.0, 0.0, 0.0]
    """
    answers = [final_channel(text) for text in completions]
    return [float(bool(answer and re.fullmatch(r"\s*\[[0-9]+\]\s*", answer))) for answer in answers]


REWARD_FUNCTIONS: dict[str, Callable[..., list[float]]] = {"action": action, "best": best, "format": format}


# ---- What a reward is compared with ----------------------------------------------------------------------------------


def best_action(row: Sequence[float]) -> int:
    """The first action with the highest reward.

    >>> best_action([0.2, 0.7, 0.1])
    1
    """
    return max(range(len(row)), key=row.__getitem__)


def baselines(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean reward of a uniformly random, the best constant and the best possible policy over `rows` of shape (N, K).

    >>> baselines([[0.0, 1.0], [0.5, 0.5], [0.25, 0.0]])
    {'random': 0.375, 'constant': 0.5, 'constant_action': 1, 'oracle': 0.5833333333333334}
    """
    if not rows:
        raise ValueError("baselines need at least one row of rewards")
    shortest = min(len(row) for row in rows)
    means = [math.fsum(row[k] for row in rows) / len(rows) for k in range(shortest)]
    return {
        "random": math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows),
        "constant": max(means),
        "constant_action": best_action(means),
        "oracle": math.fsum(max(row) for row in rows) / len(rows),
    }
