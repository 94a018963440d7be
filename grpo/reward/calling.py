# SPDX-License-Identifier: Apache-2.0
"""How a reward function is called, and what it may return: as in TRL 1.16, with a clear error for everything else."""

import asyncio
import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import rewards
from grpo.common import format_exception, one_line, text_of
from grpo.data.files import RESERVED_ARGUMENTS
from grpo.reward.loading import lines_in_module, load_reward, reward_titles, show_line, undisturbed
from grpo.settings.table import MOST_REWARD, Settings

Rewards = list[float | None]
MOST_RETURNED = 100 * MOST_REWARD  # `cost` is up to 44 times the largest number of a file, and an episode earns a sum.
# The arguments that every reward function gets beside the columns.
TRL_ARGUMENTS = RESERVED_ARGUMENTS - {"prompt", "completion"}


class RewardError(RuntimeError):
    """A reward function raised an exception or returned something else than rewards; the message names the function."""


class Reward:
    """A function of REWARDS, `async` or not, with its `weight`, called `title` in the logs. It passes on the settings
    that the project's own functions need, and raises RewardError for any error.

    A user's function is called by keyword as in TRL. The project's own functions, and a user's function whose first
    argument has a name that neither TRL nor a column uses, get completions with special tokens as first argument."""

    def __init__(self, function: Callable[..., Any], name: str, title: str, settings: Settings, weight: float = 1.0):
        self.function, self.name, self.__name__, self.is_custom = function, name, title, ":" in name
        self.weight = weight
        self.options: dict[str, float | None] = {}
        if name in rewards.ACTION_REWARDS or name == "environment":
            self.options["invalid_reward"] = settings.INVALID_REWARD
        if name == "overlong":
            longest = settings.MAX_COMPLETION_LEN
            self.options |= {"longest": longest, "span": settings.OVERLONG_SHARE * longest}
        self.positional = positional_argument(function) if self.is_custom else "completions"

    # The `/` here and below is for files with a column called `self`.
    def __call__(self, /, completions: list[Any], **columns: Any) -> Rewards:
        """Calls the function alone, as TRL's trainer does where it calls functions itself."""
        return call_rewards([self], lambda: columns | {"completions": completions}, len(completions))[0]

    def begin(self, /, completions: list[Any], **columns: Any) -> Rewards | Coroutine[Any, Any, Any]:
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
            raise self.describe(error, columns) from error
        return values if isinstance(values, Coroutine) else validate_rewards(self.name, values, count)

    async def finish(self, coroutine: Coroutine[Any, Any, Any], count: int) -> Rewards:
        """The rewards of an async function for `count` completions."""
        try:
            with undisturbed(self.name):
                values = await coroutine
        except BaseException as error:  # A SystemExit would end the loop, and the run would wait for ever.
            # `gather` cancels the coroutine; a function may also await a task that it cancelled itself.
            task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
            if task and task.cancelling():
                raise
            raise self.describe(error) from error
        return validate_rewards(self.name, values, count)

    def describe(self, error: BaseException, columns: Iterable[str] = ()) -> RewardError:
        """The error for the user, with its line, or with the names of the `columns` if the call itself failed."""
        while isinstance(error, BaseExceptionGroup):  # A TaskGroup's says only how many there are.
            error = error.exceptions[0]
        # Outside of the user's module the last line counts, but for the first, which is the call in this file.
        lines = lines_in_module(error, self.name) or traceback.extract_tb(error.__traceback__)[1:]
        location = show_line(lines) if self.is_custom else ""
        if self.is_custom and not location and (names := [name for name in columns if name not in TRL_ARGUMENTS]):
            location = f". Rows have the columns {', '.join(names)}; let it take `**kwargs` for what it does not use"
        return RewardError(f"REWARDS: {self.name} raised {format_exception(error)}{location}")


def load_rewards(specs: Sequence[tuple[str, float]], settings: Settings) -> list[Reward]:
    """The reward functions of REWARDS, under the names that logs and columns use."""
    titles = zip(specs, reward_titles([name for name, _ in specs]), strict=True)
    return [Reward(load_reward(name), name, title, settings, weight) for (name, weight), title in titles]


def call_rewards(
    functions: Sequence[Reward], make_arguments: Callable[[], dict[str, Any]], count: int
) -> list[Rewards]:
    """The rewards of `count` completions by function. Every function is called once, with arguments of its own. As in
    TRL, async functions run at the same time, after all others."""
    begun: list[Rewards | Coroutine[Any, Any, Any]] = []
    try:
        for function in functions:
            begun.append(function.begin(**make_arguments()))
    except BaseException:
        for values in begun:
            if isinstance(values, Coroutine):
                values.close()  # Otherwise Python warns that it was never awaited.
        raise
    pairs = zip(functions, begun, strict=True)
    awaited = iter(gather([f.finish(values, count) for f, values in pairs if isinstance(values, Coroutine)]))
    return [next(awaited) if isinstance(values, Coroutine) else values for values in begun]


def validate_rewards(name: str, values: Any, count: int) -> Rewards:
    """The `values` of function `name` as a list. Raises RewardError unless they are `count` numbers, None or NaN."""
    returned = f"REWARDS: {name} returned"
    try:
        values = values.tolist() if hasattr(values, "tolist") else values
    except Exception as error:  # A tensor on the device `meta` holds no numbers.
        raise RewardError(f"{returned} {type(values).__name__} without numbers: {format_exception(error)}") from error
    if not isinstance(values, Sequence):
        raise RewardError(f"{returned} {type(values).__name__}, not a list with one number for each completion")
    if len(values) != count:
        raise RewardError(f"{returned} {len(values)} rewards for {count} completions")
    numbers = list(map(plain_number, values))
    for value in numbers:
        is_number = isinstance(value, (int, float)) and (value != value or abs(value) <= MOST_RETURNED)
        if value is not None and not is_number:
            problem = f"neither a finite number of at most {MOST_RETURNED:g} in size nor None"
            raise RewardError(f"{returned} {one_line(text_of(value, repr), 200)}, which is {problem}")
    return numbers


def plain_number(value: Any) -> Any:
    """The number of numpy or torch, a fraction or a decimal as Python's own; any other value, such as an array of
    several numbers, as it is."""
    try:
        if hasattr(value, "item"):
            return value.item()
        return float(value) if isinstance(value, (Fraction, Decimal)) else value
    except (ArithmeticError, RuntimeError, ValueError):
        return value


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
    """The loop of all async functions, from the check before a run to its end, as TRL keeps one for a run: a client or
    semaphore of the user's module belongs to the loop that used it first. Its thread ends with the process."""
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
