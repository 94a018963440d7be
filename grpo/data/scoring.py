# SPDX-License-Identifier: Apache-2.0
"""Reward functions: found, checked before the run, and called as TRL calls them."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rewards
from grpo.data.files import Row, flat_rows, no_actions, reward_columns
from grpo.settings import Problems, Settings, listed, nearest


def reward_specs(text: str) -> list[tuple[str, float]]:
    """(name, weight) of each reward function in `REWARDS`; raises ValueError for what is not `name` or `name=weight`."""
    specs = []
    for part in listed(text):
        name, equals, weight = part.partition("=")
        try:
            specs.append((name.strip(), float(weight) if equals else 1.0))
        except ValueError:
            specs.append((name, math.nan))
        if not math.isfinite(specs[-1][1]):
            raise ValueError(f"weight {weight!r} of {name!r} is not a finite number")
    if not specs:
        raise ValueError("no reward function is named")
    if len({name for name, _ in specs}) < len(specs):
        raise ValueError("a reward function is named twice")
    return specs


def load_reward(name: str) -> Callable[..., Sequence[float | None]]:
    """The reward function `name` of rewards.py, or `module:function` from the current folder; raises ValueError."""
    module, colon, function = name.partition(":")
    if name in rewards.REWARD_FUNCTIONS:
        return rewards.REWARD_FUNCTIONS[name]
    if not colon:
        known = rewards.REWARD_FUNCTIONS
        raise ValueError(f"{name!r} is unknown (there are {', '.join(known)}{nearest(name, known)})")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the user's module raises is the answer to give
        raise ValueError(f"{name!r} cannot be loaded: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ValueError(f"{name!r} is no function")
    return found


def check_rewards(
    settings: Settings, rows: Sequence[Row], problems: Problems, chosen: bool = False
) -> list[tuple[str, float]]:
    """The reward functions exist, and the CSVs hold what they need. Returns (name, weight) of each.
    `chosen`: INVALID_REWARD was set by the user, who may well want it above the worst reward."""
    try:
        specs = reward_specs(settings.REWARDS)
        for name, _ in specs:
            load_reward(name)
            if ":" in name and rows:
                try_reward(name, settings, rows)
    except ValueError as error:
        problems.add("REWARDS", str(error), "Write e.g. REWARDS=action,format=0.1 or REWARDS=my_module:my_function")
        return []
    except RuntimeError as error:
        problems.append(f"{error}. It was tried on the answers [0] and [1] to the first row of {rows[0].file}")
        return []
    names = {name for name, _ in specs}
    if names & {"action", "best"}:
        for file, row in sorted({row.file: row for row in rows if not row.rewards}.items()):
            problems.add(f"{file}, columns", no_actions(row), "Add one per action, or choose other REWARDS")
    paid = [row for row in rows if row.rewards]
    if paid and len(flat_rows(paid)) == len(paid) and names <= {"action", "best"}:
        what = "every row pays all its actions the same, so there is nothing to learn"
        problems.add("DATA", what, "Give better actions higher rewards, or choose other REWARDS")
    worst = min((min(row.rewards) for row in paid), default=settings.INVALID_REWARD)
    if worst < settings.INVALID_REWARD and not chosen and "action" in names:
        what = f"an unreadable answer scores {settings.INVALID_REWARD:g}, more than the lowest reward {worst:g}"
        problems.add("INVALID_REWARD", what, f"Set INVALID_REWARD={worst:g} or lower, so that garbage never pays")
    return specs


def try_reward(name: str, settings: Settings, rows: Sequence[Row]) -> None:
    """Call a user's reward function once, as TRL would: a mistake in it costs a second here and an hour in a run. With two
    completions, so that one reward for all of them is a mistake. Columns that only other files have are None.
    Raises RuntimeError, naming the function and what it raised or returned."""
    values = {key: None for row in rows for key in reward_columns(row, len(row.rewards))}
    values |= reward_columns(rows[0], len(rows[0].rewards))
    values |= {"prompts": rows[0].prompt, "completion_ids": [0], "truncated": False}
    state = types.SimpleNamespace(global_step=0, max_steps=settings.TOTAL_STEPS)
    given = {key: [value, value] for key, value in values.items()} | {"trainer_state": state}
    answers = [f"<|start|>assistant<|channel|>final<|message|>[{action}]<|return|>" for action in (0, 1)]
    reward_callable(name, settings)(answers, **given)


@dataclass(frozen=True)
class Completion:
    """One completion as rewards and logs see it."""

    row: Row
    text: str
    action: int | None
    tokens: int
    truncated: bool


def checked_rewards(name: str, values: Any, count: int) -> list[float | None]:
    """What reward function `name` returned for `count` completions, as a list; raises RuntimeError for what is none."""
    returned = f"REWARDS: {name} returned"
    if not isinstance(values, Sequence) and not hasattr(values, "tolist"):
        raise RuntimeError(f"{returned} {type(values).__name__}, not a list of numbers")
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(values) != count:
        raise RuntimeError(f"{returned} {len(values)} rewards for {count} completions")
    for value in values:
        if value is not None and (not isinstance(value, (int, float)) or math.isinf(value)):
            raise RuntimeError(f"{returned} {value!r}, which is neither a finite number nor None")
    return values


def reward_callable(name: str, settings: Settings) -> Callable[..., list[float | None]]:
    """A reward function, `async` or not, as TRL calls it: named for the logs, given INVALID_REWARD, its errors named."""
    function = load_reward(name)
    options = {"invalid_reward": settings.INVALID_REWARD} if name in ("action", "best") else {}

    def reward(completions: list[str], **columns: Any) -> list[float | None]:
        try:
            values = function(completions, **(columns | options))
            values = asyncio.run(values) if inspect.iscoroutine(values) else values
        except Exception as error:
            raise RuntimeError(f"REWARDS: {name} raised {type(error).__name__}: {error}") from error
        return checked_rewards(name, values, len(completions))

    reward.__name__ = name.rpartition(":")[2]
    return reward


def completion_rates(read: Sequence[Completion]) -> dict[str, float]:
    """Parse rate, best-action rate, clipped ratio and lengths of some completions."""
    answered = [one for one in read if one.action is not None]
    best = [one for one in answered if one.row.rewards and one.row.rewards[one.action] == max(one.row.rewards)]
    return {
        "parse_rate": len(answered) / len(read),
        "best_action_rate": len(best) / len(read),
        "clipped_ratio": sum(one.truncated for one in read) / len(read),
        "tokens_mean": sum(one.tokens for one in read) / len(read),
        "tokens_max": max(one.tokens for one in read),
    }
