# SPDX-License-Identifier: Apache-2.0
"""Plays one episode with made-up calls before a run, so that a fault of ENVIRONMENT costs seconds and not hours."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import rewards
from grpo.common import Problems, one_line
from grpo.data.files import Row, column_names, missing_actions_problem
from grpo.environment.pool import Environment, EnvironmentPool
from grpo.environment.worker import Description, Reply
from grpo.harmony import answer_turn
from grpo.reward.calling import RewardError, load_rewards
from grpo.reward.episode import Episode
from grpo.reward.loading import reads_environments
from grpo.reward.scoring import initial_trainer_state, read_completion, score
from grpo.settings.table import Settings

MADE_UP: dict[str, Any] = {"integer": 1, "number": 1.0, "string": "text", "boolean": True, "array": [], "object": {}}


class EpisodeFault(Exception):
    """An environment fails in the trial; the message says how."""


@dataclass(frozen=True)
class Trial:
    """The episode of `row` that was played, and (request, text that came back) of its reset and its calls."""

    row: Row
    episode: Episode
    transcript: list[tuple[str, str]]
    raised: str = ""  # The last call whose tool raised, and its error.
    is_unscored: bool = False  # `get_reward` returned None, and REWARDS have its rewards.

    @property
    def warning(self) -> str | None:
        """A tool may be right to raise for made-up arguments, and `get_reward` to leave such calls out; if they are
        not, every episode of a run would be wasted."""
        if not self.raised:
            text = "get_reward returned None after made-up calls: such episodes are left out. Does it lack a `return`?"
            return f"ENVIRONMENT: {text}" if self.is_unscored else None
        calls = f"{self.episode.errors} of {self.episode.calls} made-up calls raised, such as {self.raised}"
        return f"ENVIRONMENT: {calls}. The model reads such errors; correct the tool if its arguments are not to blame"


def made_up_arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """An argument of the right type for each that the tool needs."""
    parameters = tool["function"]["parameters"]
    arguments = {}
    for name in parameters.get("required", ()):
        schema = parameters["properties"][name]
        kind = schema.get("type", "string")
        kind = kind if isinstance(kind, str) else kind[0]
        arguments[name] = schema["enum"][0] if schema.get("enum") else MADE_UP.get(kind)
    return arguments


def try_episode(settings: Settings, description: Description, row: Row, wants_copy: bool) -> Trial:
    """Plays an episode of `row` in which each tool is called once. Raises EpisodeFault."""
    pool = EnvironmentPool(settings.ENVIRONMENT, settings.ENV_TIMEOUT)

    def ask(environment: Environment, *request: Any) -> Reply:
        environment.ask(pool.timeout, *request)
        replies: list[tuple[Environment, Reply]] = []
        while not replies:
            replies = pool.replies([environment], block=True)
        ((_, reply),) = replies
        if reply.failed:
            called = f"the call of {request[1]}" if request[0] == "call" else request[0].replace("finish", "get_reward")
            raise EpisodeFault(f"{called}: {reply.failed}")
        return reply

    with contextlib.closing(pool):
        environment, started = pool.take(), time.monotonic()
        ask(environment, "construct")  # The first answer has more time. Resets have ENV_TIMEOUT, as later in a run.
        first = ask(environment, "reset", row.reset_arguments)
        transcript = [("reset", first.text)]
        earned, errors, raised = [], 0, ""
        for tool in description.tools[: settings.MAX_TURNS]:
            name, arguments = tool["function"]["name"], made_up_arguments(tool)
            reply = ask(environment, "call", name, arguments)
            request = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            transcript.append((request, reply.text))
            if first.reward is None and reply.reward is not None:  # A run would not see this call's reward.
                raise EpisodeFault(f"`step_rewards` is there after the call of {name}, but not after reset")
            earned.append(reply.reward or 0.0)
            errors += reply.is_error
            raised = f"{request}: {one_line(reply.text, 200)}" if reply.is_error else raised
            if reply.done:
                break
        last = ask(environment, "finish", wants_copy)
    episode = Episode(
        prompt=row.prompt,
        prompt_ids=[],
        learned=[],
        turns=[0] * len(earned),
        turn_rewards=None if first.reward is None else earned,
        reward=last.reward,
        end="done",
        calls=len(earned),
        errors=errors,
        tool_s=time.monotonic() - started,
        copy=base64.b64encode(last.copy).decode(),
    )
    return Trial(row, episode, transcript, raised)


def check_environment(
    settings: Settings,
    description: Description | None,
    specs: Sequence[tuple[str, float]],
    rows: Sequence[Row],
    problems: Problems,
) -> Trial | None:
    """Checks settings that ENVIRONMENT excludes, plays an episode, and calls the reward functions `specs` with it.
    Returns the trial for the preview; None if no episode could be played to its end."""
    where = f"ENVIRONMENT={settings.ENVIRONMENT}"
    if settings.DIRECT_ANSWERS:
        problems.add("DIRECT_ANSWERS", "an episode has calls, and no single token is its answer", "Set it to 0")
    if settings.EXPECTED_REWARD:
        problems.add("EXPECTED_REWARD", "the rewards of calls that were not made are not known", "Set it to auto")
    if description is None or not rows:
        return None  # This has a message of its own.
    row = max(rows, key=lambda row: len(row.prompt))  # There a reset's text is most likely to be too much.
    try:
        trial = try_episode(settings, description, row, reads_environments(specs))
    except EpisodeFault as error:
        fault = f"in an episode of {row.file}, row {row.number}, with made-up calls, {error}"
        problems.add(where, fault, "Correct it, or raise ENV_TIMEOUT if it only takes longer")
        return None
    episode = trial.episode
    if not specs:
        return trial  # Faults of REWARDS have messages of their own.
    is_unscored = episode.total() is None and any(name == "environment" for name, weight in specs if weight)
    if is_unscored and not description.has_reward:
        fault = "no reward arrives: it has neither `get_reward`, which returns a number, nor `step_rewards`"
        problems.add(where, fault, "Add one of them, or let REWARDS name functions and `environment=0`")
        return trial
    trial = replace(trial, is_unscored=is_unscored)
    by_turn = episode.turn_rewards is not None and any(name == "environment" for name, _ in specs)
    if by_turn and settings.LOSS_TYPE == "vespo":
        fault = "vespo weights whole completions, and with `step_rewards` each turn has an advantage of its own"
        problems.add("LOSS_TYPE", fault, "Choose another, such as bnpo, or give all rewards by `get_reward`")
    of_actions = [name for name, _ in specs if name in rewards.ACTION_REWARDS]
    if of_actions and not rows[0].rewards:
        fix = f"Add them, or leave {' and '.join(of_actions)} out of REWARDS: `environment` is what an episode earns"
        problems.add(f"{rows[0].file}, columns", missing_actions_problem(rows[0]), fix)
        return trial
    completion = replace(read_completion(row, answer_turn("Done."), "Done.", 1, False), episode=episode)
    try:
        state = initial_trainer_state(settings.TOTAL_STEPS)
        score(load_rewards(specs, settings), [completion], [[0]], column_names(rows), state)
    except RewardError as error:
        problems.add(where, f"{error}, in an episode with made-up calls", "Correct the function")
    return trial
