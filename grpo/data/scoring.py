# SPDX-License-Identifier: Apache-2.0
"""Reward functions: found, and called with what TRL 1.16 gives them, by checks, training and evaluation alike."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import inspect
import math
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rewards
from grpo.data.files import Row, data_prompt, reward_columns
from grpo.data.prompts import ANSWER_AFTER
from grpo.settings import MOST_REWARD, MOST_WEIGHT, Settings, described, listed, nearest, one_line, read_number


def reward_specs(text: str) -> list[tuple[str, float]]:
    """(name, weight) of each reward function in `REWARDS`; raises ValueError for what is not `name` or `name=weight`."""
    specs = []
    for part in listed(text):
        name, equals, weight = part.partition("=")
        try:
            specs.append((name.strip(), read_number(weight.strip()) if equals else 1.0))
        except ValueError:
            specs.append((name, math.nan))
        if not math.isfinite(specs[-1][1]):
            raise ValueError(f"weight {weight!r} of {name!r} is not a finite number")
        if abs(specs[-1][1]) > MOST_WEIGHT:
            raise ValueError(f"weight {weight!r} of {name!r} is more than {MOST_WEIGHT:g} in size")
    if not specs:
        raise ValueError("no reward function is named")
    if len({name for name, _ in specs}) < len(specs):
        raise ValueError("a reward function is named twice")
    return specs


class RewardError(RuntimeError):
    """A reward function raised something, or returned what are no rewards; the message names it."""


@contextlib.contextmanager
def users_code(here: str) -> Iterator[None]:
    """While code of the user's runs, it may import from the current folder `here`, last on Python's path. Afterwards no
    library finds in there what it asks for, and the run is in that folder again, wherever the code went."""
    if added := here not in sys.path:
        sys.path.append(here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
        with contextlib.suppress(OSError):  # it was deleted
            os.chdir(here)


def load_reward(name: str) -> Callable[..., Sequence[float | None]]:
    """The reward function `name` of rewards.py, or `module:function` from any package or the current folder, which is
    looked into last: nothing in it takes a library's place. Raises ValueError."""
    (module, colon, function), here = name.partition(":"), str(Path.cwd())
    others = [place for place in sys.path if place not in ("", here)]
    sys.path[:] = others + [here] * (len(others) < len(sys.path))
    if name in rewards.REWARD_FUNCTIONS:
        return rewards.REWARD_FUNCTIONS[name]
    if not colon:
        known = rewards.REWARD_FUNCTIONS
        raise ValueError(f"{name!r} is unknown (there are {', '.join(known)}{nearest(name, known)})")
    try:
        with users_code(here):
            loaded = importlib.import_module(module)
        if taken := shadowed(loaded, Path(here, *module.split("."))):
            raise ImportError(taken)
        found = getattr(loaded, function)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's module raises is the answer to give
        hint = f"; write {module.removesuffix('.py')}:{function}, without .py" if module.endswith(".py") else ""
        raise ValueError(f"{name!r} cannot be loaded: {ended(error)}{hint}") from None
    if not callable(found):
        raise ValueError(f"{name!r} is no function")
    return found


def shadowed(module: types.ModuleType, own: Path) -> str | None:
    """Where `module` is from, if that is not the file which the user has at `own`, without its ending."""
    files = [path.resolve() for path in (Path(f"{own}.py"), own / "__init__.py") if path.is_file()]
    found = getattr(module, "__file__", None)
    if not files or (found and Path(found).resolve() in files):
        return None
    return f"Python takes {found or 'its own module'} for it, not {files[0]}: rename your file"


def ended(error: BaseException) -> str:
    """What was raised, in one line; in words where it would have ended the program."""
    if isinstance(error, SystemExit):
        return f"{described(error)}, which would end the run: leave it, and a command line, to `if __name__ == ...`"
    return described(error)


def total(scores: Sequence[float]) -> float:
    """Their sum as TRL's: those that are NaN are left out, and NaN where all are."""
    kept = [score for score in scores if not math.isnan(score)]
    return math.fsum(kept) if kept else math.nan


@dataclass(frozen=True)
class Completion:
    """One completion as rewards and logs see it."""

    row: Row
    text: str  # as the model wrote it, special tokens included
    action: int | None  # None too where the row has no actions
    tokens: int
    truncated: bool
    decoded: str | list[dict[str, Any]] = ""  # as TRL hands it to reward functions, see `read_completion`


def read_completion(
    row: Row, text: str, plain: str, tokens: int, truncated: bool, template: Mapping[str, Any] | None = None
) -> Completion:
    """The completion of a row, given its text with special tokens and without them (`plain`).

    As in TRL 1.16 (GRPOTrainer._generate), functions get `plain`, or where the prompt is a list of messages a list of
    one message with it. Where the tokenizer has a `response_template`, that parses the message."""
    turn = rewards.assistant_turn(row.prompt, text)
    action = rewards.parse_action(turn, len(row.rewards)) if row.rewards else None
    decoded: str | list[dict[str, Any]] = plain
    if not isinstance(data_prompt(row), str):
        message = parsed_message(row.prompt, text, template) if template else None
        decoded = [message or {"role": "assistant", "content": plain}]
    return Completion(row, text, action, tokens, truncated, decoded)


def read_completions(
    tokenizer: Any, stops: Sequence[int], rows: Sequence[Row], completion_ids: Sequence[Sequence[int]]
) -> list[Completion]:
    """What the completions of `rows` say, decoded by a tokenizer of transformers with their special tokens and without.
    Truncated is one that ended without one of the `stops` or padding: the same rule as TRL's clipped ratio and mask."""
    ends = {*stops, tokenizer.pad_token_id}
    texts, plain = (
        tokenizer.batch_decode(list(completion_ids), skip_special_tokens=skipped) for skipped in (False, True)
    )
    template = getattr(tokenizer, "response_template", None)
    return [
        read_completion(row, text, bare, len(ids), ids[-1] not in ends, template)
        for row, text, bare, ids in zip(rows, texts, plain, completion_ids, strict=True)
    ]


def parsed_message(prompt: str, text: str, template: Mapping[str, Any]) -> dict[str, Any] | None:
    """The message that a tokenizer's `response_template` makes of a completion, finished as TRL's `parse_response`
    does; None where it cannot be parsed."""
    from transformers.utils.chat_parsing import parse_response  # late: few tokenizers have one. It imports no torch

    try:
        message = parse_response(text, dict(template), prefix=prompt)
    except (ValueError, TypeError):
        return None
    content = message.get("content") or ""
    return message | {"content": content.removesuffix(ANSWER_AFTER[1:]) if isinstance(content, str) else content}


def error_place(error: BaseException, module: str) -> str:
    """Where in the user's `module` an exception was raised, else where in any other file: ` (my_rewards.py, line 3)`.
    Nothing where the function was not even entered."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is the call in this file
    file = getattr(sys.modules.get(module), "__file__", None)
    frames = [frame for frame in frames if frame.filename == file] or frames
    if not frames:
        return ""
    path = Path(frames[-1].filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f" ({shown}, line {frames[-1].lineno})"


def checked_rewards(name: str, values: Any, count: int) -> list[float | None]:
    """What reward function `name` returned for `count` completions, as a list; raises RewardError for what is none."""
    returned = f"REWARDS: {name} returned"
    if not isinstance(values, Sequence):
        raise RewardError(f"{returned} {type(values).__name__}, not a list of numbers")
    if len(values) != count:
        raise RewardError(f"{returned} {len(values)} rewards for {count} completions")
    for value in values:
        number = isinstance(value, (int, float))
        if value is not None and not (number and (value != value or abs(value) <= MOST_REWARD)):
            what = f"neither a finite number of at most {MOST_REWARD:g} in size nor None"
            raise RewardError(f"{returned} {one_line(repr(value), 200)}, which is {what}")
    return values


Reward = Callable[..., list[float | None]]
# What every reward function is given beside the columns.
GIVEN = {
    "prompts", "completions", "completion_ids", "raw_completions", "rendered_prompts", "truncated", "trainer_state",
    "log_extra", "log_metric",
}  # fmt: skip


def is_called_by_keyword(function: Callable[..., Any]) -> bool:
    """Whether a reward function of the user's is called as TRL does it, all by keyword; else its first argument has a name
    of its own, and gets the completions."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built into Python, without a signature
        return True
    first = next((one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)), None)
    return first is None or first in GIVEN or any(one.name == "completions" for one in parameters)


def copied(name: str, value: Any) -> Any:
    """An argument for one function alone: what it changes in place, neither the next one nor the rows see."""
    if name == "completion_ids":
        return [list(ids) for ids in value]
    return copy.deepcopy(value) if isinstance(value, list) else value


def reward_callable(name: str, settings: Settings, title: str | None = None) -> Reward:
    """A reward function, `async` or not, as `score` calls it: named `title` for the logs, given INVALID_REWARD, its
    errors named.

    One of the user's is called by keyword with what TRL gives it. The project's own, and the user's with a first
    argument of another name than TRL's, get the completions with their special tokens there."""
    function, own, here = load_reward(name), ":" in name, str(Path.cwd())
    options = {"invalid_reward": settings.INVALID_REWARD} if name in rewards.ACTION_REWARDS else {}
    by_keyword = own and is_called_by_keyword(function)

    def reward(completions: list[Any], **columns: Any) -> list[float | None]:
        texts = completions if by_keyword else columns.get("raw_completions", completions)
        arguments = columns | options
        if own:
            texts = copied("completions", texts)
            arguments = {key: copied(key, value) for key, value in arguments.items()}
        try:
            with users_code(here) if own else contextlib.nullcontext():
                values = function(completions=texts, **arguments) if by_keyword else function(texts, **arguments)
                values = asyncio.run(values) if inspect.iscoroutine(values) else values
            values = values.tolist() if hasattr(values, "tolist") else values
            if isinstance(values, Sequence):
                values = [value.item() if hasattr(value, "item") else value for value in values]  # numpy's
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit too: it would end the run as if it were complete
            place = error_place(error, name.partition(":")[0]) if own else ""
            raise RewardError(f"REWARDS: {name} raised {ended(error)}{place}") from error
        return checked_rewards(name, values, len(completions))

    reward.__name__ = title or name.rpartition(":")[2]
    return reward


def reward_titles(names: Sequence[str]) -> list[str]:
    """The names of reward functions in logs and columns: a function's own where no other has it, else with its module.

    >>> reward_titles(["action", "mine:score", "yours:score", "mine:other"])
    ['action', 'mine:score', 'yours:score', 'other']
    """
    short = [name.rpartition(":")[2] for name in names]
    return [name if short.count(last) > 1 else last for name, last in zip(names, short, strict=True)]


def load_rewards(specs: Sequence[tuple[str, float]], settings: Settings) -> list[Reward]:
    """The reward functions of REWARDS, under the names that logs and columns use."""
    names = [name for name, _ in specs]
    return [reward_callable(name, settings, title) for name, title in zip(names, reward_titles(names), strict=True)]


def no_log_extra(column: str, values: list[Any]) -> None:
    """TRL's `log_extra` outside of training, where nothing is logged."""


def no_log_metric(name: str, value: float) -> None:
    """TRL's `log_metric` outside of training."""


def first_state(total_steps: int) -> types.SimpleNamespace:
    """What transformers' TrainerState holds before the first step, for calls without a trainer."""
    return types.SimpleNamespace(
        epoch=0, global_step=0, max_steps=total_steps, logging_steps=1, eval_steps=500, save_steps=500,
        train_batch_size=None, num_train_epochs=0, num_input_tokens_seen=0, total_flos=0, log_history=[],
        best_metric=None, best_global_step=None, best_model_checkpoint=None, is_local_process_zero=True,
        is_world_process_zero=True, is_hyper_param_search=False, trial_name=None, trial_params=None,
        stateful_callbacks={},
    )  # fmt: skip


def score(
    functions: Sequence[Reward],
    read: Sequence[Completion],
    ids: Sequence[Sequence[int]],
    columns: Sequence[str],
    trainer_state: Any,
    log_extra: Callable[..., None] = no_log_extra,
    log_metric: Callable[..., None] = no_log_metric,
) -> list[list[float]]:
    """What each function gives each completion (N, F), NaN for None. `ids`: their tokens; `columns`: the names of all
    columns, which a row of another file has as None. Each function is called once, by the arguments that TRL gives
    it."""
    cells = [reward_columns(one.row) for one in read]
    arguments: dict[str, Any] = {name: [row.get(name) for row in cells] for name in columns}
    arguments |= {
        "prompts": [data_prompt(one.row) for one in read],
        "completions": [one.decoded for one in read],
        "completion_ids": [list(tokens) for tokens in ids],
        "raw_completions": [rewards.assistant_turn(one.row.prompt, one.text) for one in read],
        "rendered_prompts": [one.row.prompt for one in read],
        "truncated": [one.truncated for one in read],
        "trainer_state": trainer_state,
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    values = [function(**arguments) for function in functions]
    return [[math.nan if value is None else value for value in row] for row in zip(*values, strict=True)]


def is_answer(one: Completion) -> bool:
    """Whether a completion can be read: it names an action where its row has some, else its final channel holds text."""
    if one.row.rewards:
        return one.action is not None
    return bool((rewards.final_channel(rewards.assistant_turn(one.row.prompt, one.text)) or "").strip())


def completion_rates(read: Sequence[Completion]) -> dict[str, float]:
    """Parse rate, best-action rate, clipped ratio and lengths of some completions."""
    answered = [one for one in read if is_answer(one)]
    best = [one for one in answered if one.row.rewards and one.row.rewards[one.action] == max(one.row.rewards)]
    return {
        "parse_rate": len(answered) / len(read),
        "best_action_rate": len(best) / len(read),
        "clipped_ratio": sum(one.truncated for one in read) / len(read),
        "tokens_mean": sum(one.tokens for one in read) / len(read),
        "tokens_max": max(one.tokens for one in read),
    }
