# SPDX-License-Identifier: Apache-2.0
"""What a completion of verl's earns: this project's reward functions on the row that travels with it."""

from __future__ import annotations

import functools
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.data.files import SPECIAL, Row, column_names
from grpo.data.prompts import ANSWER_AFTER, ANSWER_BEFORE
from grpo.data.scoring import Reward, first_state, load_rewards, read_completion, reward_titles, score, total
from grpo.run.durable import read_json
from grpo.settings import Settings

# verl scores in threads, and a user's function may be async or change the folder.
ONE_AT_A_TIME = threading.Lock()


def has_channels(template: str) -> bool:
    """Whether a model with this chat template answers in Harmony's channels."""
    return "<|channel|>" in template


@functools.cache
def loaded(spec: str) -> tuple[dict[str, Any], list[Reward]]:
    """The file that `write_data` wrote, and its reward functions."""
    told = read_json(Path(spec))
    os.chdir(told["folder"])  # workers of Ray may be elsewhere, and a user's module lies there
    return told, load_rewards([(name, weight) for name, weight in told["rewards"]], Settings(**told["settings"]))


def read_row(text: str) -> Row:
    """A row that `to_record` wrote."""
    told = json.loads(text)
    messages = tuple((role, content) for role, content in told["messages"])
    return Row(**told | {"messages": messages, "rewards": tuple(told["rewards"]), "q": tuple(told["q"])})


def as_turn(text: str, truncated: bool) -> str:
    """What a model without channels says, as the final channel of one that has them: no marker in it means anything.

    >>> as_turn("<|end|>so [1]", truncated=False)
    '<|channel|>final<|message|>< |end|>so [1]<|return|>'
    """
    return ANSWER_BEFORE[:-1] + text.replace("<|", "< |") + ("" if truncated else ANSWER_AFTER[1:])


def score_completion(
    spec: str, row: str, text: str, truncated: bool = False, completion_ids: Sequence[int] = ()
) -> dict[str, float]:
    """`score`, the weighted sum that train_grpo.py would give the completion `text`, and what each function gave
    as reward_NAME. `spec`: the path of rewards.json; `row`: as `to_record` wrote it. Raises RuntimeError where all functions leave
    it out."""
    with ONE_AT_A_TIME:
        told, functions = loaded(spec)
        this = read_row(row)
        turn, plain = (text, SPECIAL.sub("", text)) if told["harmony"] else (as_turn(text, truncated), text)
        one = read_completion(this, turn, plain, len(completion_ids), truncated)
        state = first_state(told["settings"]["TOTAL_STEPS"])
        (values,) = score(functions, [one], [completion_ids], column_names([this]), state)  # the row has every column
    earned = total([weight * value for (_, weight), value in zip(told["rewards"], values, strict=True)])
    names = [name for name, _ in told["rewards"]]
    if math.isnan(earned):
        raise RuntimeError(f"REWARDS: {', '.join(names)} left out {this.id} (None), and verl needs a number for each")
    each = {f"reward_{title}": value for title, value in zip(reward_titles(names), values, strict=True)}
    return {"score": earned} | each


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any], spec: str, **_: Any
) -> dict[str, float]:
    """`score_completion` by the signature that verl calls, with rewards.json as `spec` out of reward_kwargs."""
    more = {name: extra_info[name] for name in ("truncated", "completion_ids") if name in extra_info}
    return score_completion(spec, extra_info["row"], solution_str, **more)
