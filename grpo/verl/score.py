# SPDX-License-Identifier: Apache-2.0
"""The reward of one completion in verl: this project's reward functions, called on the row that travels with it."""

import functools
import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.data.files import Row, column_names
from grpo.harmony import FINAL, RETURN, TOKEN
from grpo.output.durable import read_json
from grpo.reward.calling import Reward, load_rewards
from grpo.reward.scoring import initial_trainer_state, read_completion, score, total
from grpo.settings.table import Settings

# verl scores in threads. A user's function may be async or change the current folder, so only one thread may score.
SCORING_LOCK = threading.Lock()


def has_channels(tokenizer: Any) -> bool:
    """Whether the model of this tokenizer answers in Harmony's channels."""
    return "<|channel|>" in (tokenizer.chat_template or "")


@functools.cache
def load_spec(path: str) -> list[Reward]:
    """The reward functions of the rewards.json that `write_data` wrote."""
    spec = read_json(Path(path))
    os.chdir(spec["folder"])  # Ray's workers may start elsewhere, but a user's module lies here.
    settings = Settings(INVALID_REWARD=spec["INVALID_REWARD"])
    return load_rewards(spec["rewards"], settings)


def as_turn(text: str, truncated: bool) -> str:
    """The text of a model without channels as a final channel; markers in the text lose their meaning.

    >>> as_turn("<|end|>so [1]", truncated=False)
    '<|channel|>final<|message|>< |end|>so [1]<|return|>'
    """
    turn = FINAL + text.replace("<|", "< |")
    return turn if truncated else turn + RETURN


def compute_score(solution_str: str, extra_info: Mapping[str, Any], spec: str) -> dict[str, float]:
    """verl's custom reward function: `score`, the weighted sum that train_grpo.py would give, and each reward_NAME.

    `extra_info` holds the row, and what `RewardManager` adds (truncated, completion_ids, harmony); `spec` is the path
    of rewards.json. Raises RuntimeError where all functions leave the completion out."""
    row = Row(**json.loads(extra_info["row"]))
    truncated, ids = extra_info["truncated"], extra_info["completion_ids"]
    turn = solution_str if extra_info["harmony"] else as_turn(solution_str, truncated)
    plain = TOKEN.sub("", solution_str) if extra_info["harmony"] else solution_str
    completion = read_completion(row, turn, plain, len(ids), truncated)
    with SCORING_LOCK:
        functions = load_spec(spec)
        # The row has every column, and verl does not tell reward functions its step.
        (values,) = score(functions, [completion], [ids], column_names([row]), initial_trainer_state(0))
    reward = total([f.weight * value for f, value in zip(functions, values, strict=True)])
    if math.isnan(reward):
        names = ", ".join(function.name for function in functions)
        raise RuntimeError(f"REWARDS: {names} left out {row.id} (None), and verl needs a number for each")
    return {"score": reward} | {f"reward_{f.__name__}": value for f, value in zip(functions, values, strict=True)}
