# SPDX-License-Identifier: Apache-2.0
"""Loads and calls reward functions as TRL 1.16 does; checks, training and evaluation all use it."""

import asyncio
import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import math
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rewards
from grpo.common import format_exception, nearest_hint, one_line, read_number, split_commas, text_of
from grpo.data.files import RESERVED_ARGUMENTS, Conversation, Row, reward_columns
from grpo.harmony import assistant_turn, final_channel, parse_action
from grpo.settings.table import MOST_REWARD, MOST_WEIGHT, Settings

Rewards = list[float | None]
# The arguments that every reward function gets beside the columns.
TRL_ARGUMENTS = RESERVED_ARGUMENTS - {"prompt", "completion", "environments"}


def reward_specs(text: str) -> list[tuple[str, float]]:
    """(name, weight) of each reward function in `REWARDS`. Raises ValueError for a part that is not `name=weight`."""
    specs: dict[str, float] = {}
    for part in split_commas(text):
        name, equals, weight = (piece.strip() for piece in part.partition("="))
        try:
            value = read_number(weight) if equals else 1.0
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"weight {weight!r} of {name!r} is not a finite number")
        if abs(value) > MOST_WEIGHT:
            raise ValueError(f"weight {weight!r} of {name!r} is more than {MOST_WEIGHT:g} in size")
        if name in specs:
            raise ValueError("a reward function is named twice")
        specs[name] = value
    if not specs:
        raise ValueError("no reward function is named")
    return list(specs.items())


class RewardError(RuntimeError):
    """A reward function raised an exception or returned something else than rewards; the message names the function."""


@contextlib.contextmanager
def undisturbed(name: str) -> Iterator[None]:
    """Calls of the user's code `name`, of which nothing stays that would change the run around it: the current folder,
    to which OUTPUT_DIR may be relative, and torch's switches, which a judge model's code likes to set. If the code has
    forked this process and returns in the copy too, the copy ends: two processes would train in one folder."""
    process, folder, torch = os.getpid(), os.getcwd(), sys.modules.get("torch")
    before = (torch.is_grad_enabled(), torch.get_default_dtype()) if torch else None
    try:
        yield
    finally:
        if os.getpid() != process:
            os.write(2, f"REWARDS: {name} forked a process and returned in it; the copy ends here\n".encode())
            os._exit(1)
        os.chdir(folder)
        if torch := sys.modules.get("torch"):
            grad, dtype = before or (True, torch.float32)
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(dtype)


def load_reward(name: str) -> Callable[..., Any]:
    """The reward function `name` of rewards.py, or `module:function` from an installed package or else from the current
    folder. Raises ValueError if it cannot be loaded."""
    module, colon, function = name.partition(":")
    if not colon:
        if name in rewards.REWARD_FUNCTIONS:
            return rewards.REWARD_FUNCTIONS[name]
        known = rewards.REWARD_FUNCTIONS
        raise ValueError(f"{name!r} is unknown (there are {', '.join(known)}{nearest_hint(name, known)})")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        check_module_file(module.partition(".")[0])
        with undisturbed(name):
            reward = getattr(importlib.import_module(module), function)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A user's module may raise anything, SystemExit included.
        raise ValueError(f"{name!r} cannot be loaded: {format_exception(error)}") from None
    if not callable(reward):
        raise ValueError(f"{name!r} is no function")
    return reward


def check_module_file(module: str) -> None:
    """Raises ImportError if a module of the current folder is hidden by another one of its name, such as the project's
    own `rewards`: the function of that other module would be taken."""
    own = next((path for path in (Path(f"{module}.py"), Path(module, "__init__.py")) if path.is_file()), None)
    spec = importlib.util.find_spec(module) if own else None
    if own and spec and not (spec.origin and Path(spec.origin).is_file() and own.samefile(spec.origin)):
        raise ImportError(f"{own} is hidden by {spec.origin}, which has the same name: rename yours")


def error_location(error: BaseException, module: str) -> str:
    """Where an exception was raised, such as ` (my_rewards.py, line 3)`: the last line in the user's `module`, or in
    any file if it is not there. It is empty if the call itself failed."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # The first frame is the call in this file.
    file = getattr(sys.modules.get(module), "__file__", None)
    frames = [frame for frame in frames if frame.filename == file] or frames
    return f" ({os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""


def total(scores: Sequence[float]) -> float:
    """The sum of the scores that are not NaN, as in TRL; NaN if all are."""
    kept = [score for score in scores if not math.isnan(score)]
    return math.fsum(kept) if kept else math.nan


@dataclass(frozen=True)
class Completion:
    """A completion with everything that reward functions and logs need."""

    row: Row
    text: str  # as the model wrote it, special tokens included
    action: int | None  # None if the completion names no action, or if the row has none
    tokens: int
    truncated: bool
    decoded: str | Conversation = ""  # the completion as TRL passes it to reward functions, see `read_completion`

    @property
    def turn(self) -> str:
        """The assistant's whole turn: the part that the prompt holds, and the completion."""
        return assistant_turn(self.row.prompt, self.text)


def read_completion(row: Row, text: str, plain: str, tokens: int, truncated: bool) -> Completion:
    """The completion of a row, given its `text` with special tokens and its `plain` text without them.

    As in TRL 1.16 (GRPOTrainer._generate), functions get `plain`, as a list of one message if the prompt is a list."""
    turn = assistant_turn(row.prompt, text)
    action = parse_action(turn, len(row.rewards)) if row.rewards else None
    decoded = plain if isinstance(row.trl_prompt, str) else [{"role": "assistant", "content": plain}]
    return Completion(row, text, action, tokens, truncated, decoded)


def read_completions(
    tokenizer: Any, stops: Sequence[int], rows: Sequence[Row], completion_ids: Sequence[Sequence[int]]
) -> list[Completion]:
    """Decodes the completions of `rows`, with special tokens and without, by a tokenizer of transformers.

    A completion is truncated if its last token is neither in `stops` nor padding: TRL's rule for its clipped ratio."""
    ends = {*stops, tokenizer.pad_token_id}
    ids_lists = [list(ids) for ids in completion_ids]
    texts, plain_texts = (tokenizer.batch_decode(ids_lists, skip_special_tokens=skipped) for skipped in (False, True))
    return [
        read_completion(row, text, plain, len(ids), ids[-1] not in ends)
        for row, text, plain, ids in zip(rows, texts, plain_texts, completion_ids, strict=True)
    ]


def validate_rewards(name: str, values: Any, count: int) -> Rewards:
    """The `values` of function `name` as a list. Raises RewardError unless they are `count` numbers, None or NaN."""
    returned = f"REWARDS: {name} returned"
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence):
        raise RewardError(f"{returned} {type(values).__name__}, not a list of numbers")
    if len(values) != count:
        raise RewardError(f"{returned} {len(values)} rewards for {count} completions")
    numbers = [value.item() if hasattr(value, "item") else value for value in values]  # numpy's numbers
    for value in numbers:
        is_number = isinstance(value, (int, float)) and (value != value or abs(value) <= MOST_REWARD)
        if value is not None and not is_number:
            problem = f"neither a finite number of at most {MOST_REWARD:g} in size nor None"
            raise RewardError(f"{returned} {one_line(text_of(value, repr), 200)}, which is {problem}")
    return numbers


def positional_argument(function: Callable[..., Any]) -> str:
    """The name of a user's first argument if the completions may be meant by it: it has no default, none of TRL's
    names, and there is no argument `completions`. Empty if the function is called by keyword alone, as in TRL."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # A function built into Python may have no signature.
        return ""
    first = next((p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)), None)
    if first is None or first.default is not first.empty or "completions" in parameters:
        return ""
    return "" if first.name in TRL_ARGUMENTS else first.name


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop in which all async functions run, from the check before a run to its end, as TRL keeps one for a run:
    a client or semaphore of the user's module belongs to the loop that used it first. Its thread ends with the process.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async reward functions", daemon=True).start()
    return loop


def gather(coroutines: Sequence[Coroutine[Any, Any, Rewards]]) -> list[Rewards]:
    """The results of coroutines that run at the same time in `event_loop`; the first exception is raised."""
    if not coroutines:
        return []

    async def run_all() -> list[Rewards]:
        return await asyncio.gather(*coroutines)

    future = asyncio.run_coroutine_threadsafe(run_all(), event_loop())
    try:
        return future.result()
    except BaseException:  # Such as a KeyboardInterrupt: the coroutines must not go on alone.
        future.cancel()
        raise


class Reward:
    """A function of REWARDS, `async` or not, called `title` in the logs. It passes INVALID_REWARD on and raises
    RewardError for any error.

    A user's function is called by keyword as in TRL. The project's own functions, and a user's function whose first
    argument has a name that neither TRL nor a column uses, get completions with special tokens as first argument."""

    def __init__(self, function: Callable[..., Any], name: str, title: str, settings: Settings):
        self.function, self.name, self.__name__, self.is_custom = function, name, title, ":" in name
        self.options = {"invalid_reward": settings.INVALID_REWARD} if name in rewards.ACTION_REWARDS else {}
        self.positional = positional_argument(function) if self.is_custom else "completions"

    def __call__(self, completions: list[Any], **columns: Any) -> Rewards:
        values, count = self.begin(completions, **columns), len(completions)
        return gather([self.finish(values, count)])[0] if isinstance(values, Coroutine) else values

    def begin(self, completions: list[Any], **columns: Any) -> Rewards | Coroutine[Any, Any, Any]:
        """Calls the function: its rewards, or of an async one the coroutine that `finish` awaits."""
        # The count is taken before the call, because a function may change the list.
        arguments, count = columns | self.options, len(completions)
        try:
            with undisturbed(self.name):
                if self.positional and self.positional not in columns:
                    values = self.function(columns.get("raw_completions", completions), **arguments)
                else:
                    values = self.function(completions=completions, **arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit too: it would end the run as if it were complete
            raise self.describe(error) from error
        return values if isinstance(values, Coroutine) else validate_rewards(self.name, values, count)

    async def finish(self, coroutine: Coroutine[Any, Any, Any], count: int) -> Rewards:
        """The rewards of an async function for `count` completions."""
        try:
            with undisturbed(self.name):
                values = await coroutine
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # A SystemExit would end the loop, and the run would wait for ever.
            raise self.describe(error) from error
        return validate_rewards(self.name, values, count)

    def describe(self, error: BaseException) -> RewardError:
        location = error_location(error, self.name.partition(":")[0]) if self.is_custom else ""
        return RewardError(f"REWARDS: {self.name} raised {format_exception(error)}{location}")


def reward_callable(name: str, title: str, settings: Settings) -> Reward:
    """The reward function `name`, which `score` can call."""
    return Reward(load_reward(name), name, title, settings)


def is_by_action(name: str) -> bool:
    """Whether the reward function `name` depends on the row and the answered action alone, so that the rewards of all
    actions can be tabulated: those in ACTION_REWARDS, and a user's with a true attribute `by_action`."""
    if ":" not in name:
        return name in rewards.ACTION_REWARDS
    try:
        return bool(getattr(load_reward(name), "by_action", False))
    except ValueError:  # `check_rewards` reports it.
        return False


def reward_titles(names: Sequence[str]) -> list[str]:
    """The names of reward functions in logs and columns: with the module only if two functions have the same name."""
    short = [name.rpartition(":")[2] for name in names]
    return [name if short.count(last) > 1 else last for name, last in zip(names, short, strict=True)]


def load_rewards(specs: Sequence[tuple[str, float]], settings: Settings) -> list[Reward]:
    """The reward functions of REWARDS, under the names that logs and columns use."""
    names = [name for name, _ in specs]
    return [reward_callable(name, title, settings) for name, title in zip(names, reward_titles(names), strict=True)]


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
    turns = [completion.turn for completion in completions]

    def arguments() -> dict[str, Any]:
        """Fresh copies of the arguments, so that a function that changes them in place does not affect the next one.
        Token ids are copied as lists of numbers, because `deepcopy` is too slow for them."""
        shared = {name: [row.get(name) for row in cells] for name in columns}
        shared["prompts"] = [completion.row.trl_prompt for completion in completions]
        shared["completions"] = [completion.decoded for completion in completions]
        return copy.deepcopy(shared) | {
            "completion_ids": [list(tokens) for tokens in ids],
            "raw_completions": [*turns],
            "rendered_prompts": [completion.row.prompt for completion in completions],
            "truncated": [completion.truncated for completion in completions],
            "trainer_state": trainer_state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }

    begun: list[Rewards | Coroutine[Any, Any, Any]] = []
    try:
        for function in functions:
            begun.append(function.begin(**arguments()))
    except BaseException:
        for values in begun:
            if isinstance(values, Coroutine):
                values.close()  # Otherwise Python warns that it was never awaited.
        raise
    # As in TRL, async functions run at the same time, after all others.
    pairs = list(zip(functions, begun, strict=True))
    coroutines = [f.finish(values, len(completions)) for f, values in pairs if isinstance(values, Coroutine)]
    awaited = iter(gather(coroutines))
    finished = [next(awaited) if isinstance(values, Coroutine) else values for values in begun]
    return [[math.nan if value is None else value for value in row] for row in zip(*finished, strict=True)]


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


def is_answer(completion: Completion) -> bool:
    """Whether a completion names an action or, if its row has no actions, whether its final channel holds text."""
    if completion.row.rewards:
        return completion.action is not None
    return bool((final_channel(completion.turn) or "").strip())


def completion_rates(completions: Sequence[Completion]) -> dict[str, float]:
    """Columns of metrics.csv for these completions: parse rate, best-action rate, clipped ratio and lengths in tokens.
    A held-out evaluation uses the last three; its other figures come from `score_probabilities` or `score_values`."""
    acted = [(completion.row.rewards, completion.action) for completion in completions]
    count, lengths = len(completions), [completion.tokens for completion in completions]
    return {
        "parse_rate": sum(map(is_answer, completions)) / count,
        "best_action_rate": sum(k is not None and row[k] == max(row) for row, k in acted) / count,
        "clipped_ratio": sum(completion.truncated for completion in completions) / count,
        "tokens_mean": sum(lengths) / count,
        "tokens_max": max(lengths),
    }
