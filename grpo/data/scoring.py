# SPDX-License-Identifier: Apache-2.0
"""Reward functions: found, checked before the run, and called as TRL calls them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import itertools
import math
import os
import random
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import rewards
from grpo.data.files import Row, flat_rows, no_actions, reward_columns
from grpo.data.prompts import ANSWER_AFTER, ANSWER_BEFORE
from grpo.settings import (
    MOST_REWARD,
    MOST_WEIGHT,
    Problems,
    Settings,
    described,
    listed,
    nearest,
    one_line,
    read_number,
    show,
)


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
        raise ValueError(f"{name!r} cannot be loaded: {ended(error)}") from None
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


def check_rewards(
    settings: Settings, text: str, rows: Sequence[Row], problems: Problems
) -> tuple[list[tuple[str, float]], str | None]:
    """The reward functions that `text` names exist, the CSVs hold what they need, and garbage does not pay. Returns (name,
    weight) of each, and what an INVALID_REWARD of the user's has to be warned about, if anything."""
    try:
        specs = reward_specs(text)
        for name, _ in specs:
            load_reward(name)
    except ValueError as error:
        problems.add("REWARDS", str(error), "Write e.g. REWARDS=action,format=0.1 or REWARDS=my_module:my_function")
        return [], None
    known = len(problems)
    check_columns({name for name, _ in specs}, rows, problems)
    complete = len(problems) == known
    try:
        tried = try_rewards(specs if complete else [spec for spec in specs if ":" in spec[0]], settings, rows)
    except RuntimeError as error:
        asked = f"the answers [0], [1], ... and none to {len(sample_rows(rows))} rows of DATA"
        problems.append(f"{error}. It was tried on {asked}")
        return [], None
    return specs, check_garbage(specs, tried, settings, problems) if complete else None


def check_heldout(
    specs: Sequence[tuple[str, float]],
    settings: Settings,
    rows: Sequence[Row],
    problems: Problems,
    where: str = "EVAL_DATA",
    otherwise: str = "set EVAL_SAMPLES=0",
) -> None:
    """The reward functions can score the held-out rows: those with actions by their columns, others as they train.
    `where`: what named the rows; `otherwise`: what the user may do instead of changing them."""
    bare = next((row for row in rows if not row.rewards), None)
    if bare and {name for name, _ in specs} & rewards.ACTION_REWARDS.keys():
        problems.add(f"{bare.file}, columns", no_actions(bare), f"Add them, or {otherwise}")
        return
    check_answers([name for name, _ in specs], rows, problems)
    try:
        try_rewards(specs, settings, rows)
    except RuntimeError as error:
        problems.add(where, str(error), f"Give these rows the columns of DATA, or {otherwise}")


def check_columns(names: Collection[str], rows: Sequence[Row], problems: Problems) -> None:
    """The rows hold what the reward functions of these names need, and something to learn."""
    if names & rewards.ACTION_REWARDS.keys():
        for file, row in sorted({row.file: row for row in rows if not row.rewards}.items()):
            problems.add(f"{file}, columns", no_actions(row), "Add one per action, or choose other REWARDS")
    paid = [row for row in rows if row.rewards]
    without = {row.file: row for row in reversed(paid) if not row.q}.values()
    if "shortfall" in names:
        for row in without:
            fix = "Add the value of each action, or leave shortfall out of REWARDS"
            problems.add(f"{row.file}, columns", "`shortfall` needs q_action_0, q_action_1, ...", fix)
    other = {row.file: row for row in reversed(paid) if not row.q and not is_softmax(row.rewards)}
    for row in other.values() if "regret" in names else ():
        what = "its rewards are no softmax (0 or more, with a sum of 1), so they do not tell its regret"
        fix = "Add the value of each action as q_action_k, or set REWARDS=action"
        problems.add(f"{row.file}, row {row.number}", what, fix)
    check_answers(names, rows, problems)
    if paid and len(flat_rows(paid)) == len(paid) and names <= rewards.ACTION_REWARDS.keys():
        what = "every row pays all its actions the same, so there is nothing to learn"
        problems.add("DATA", what, "Give better actions higher rewards, or choose other REWARDS")


def check_answers(names: Collection[str], rows: Sequence[Row], problems: Problems) -> None:
    """Every row has the answer that `gsm8k` compares with: only a few of them are tried."""
    for row in rows if "gsm8k" in names else ():
        if rewards.number_of(str(row.columns.get("answer", ""))) is None:
            where = f"{row.file}, row {row.number}, column answer"
            problems.add(where, "there is no number", "Write it behind ####, or choose other REWARDS")
            return


def is_softmax(row: Sequence[float]) -> bool:
    """Whether rewards by action can be a softmax, as they are rounded in files."""
    return min(row) >= 0 and abs(math.fsum(row) - 1) <= 1e-3


SAMPLED = 64  # rows that reward functions are tried on before a run
START = "<|start|>assistant"
FINAL = START + ANSWER_BEFORE[:-1] + "{}" + ANSWER_AFTER[1:]
# Answers that cannot be read: one that stopped before its final channel, and one that is empty there.
GARBAGE = ("<|start|>assistant<|channel|>analysis<|message|>The load is<|return|>", FINAL.format(""))


def tried_text(prompt: str, text: str) -> str:
    """A whole turn such as FINAL's without the begin that a rendered prompt already holds."""
    return text.removeprefix(START) if prompt.endswith(START) else text


def sample_rows(rows: Sequence[Row]) -> list[Row]:
    """At most SAMPLED rows, about as many of each file, always the same ones."""
    files: dict[str, list[Row]] = {}
    for row in random.Random(0).sample(rows, len(rows)):
        files.setdefault(row.file, []).append(row)
    turns = itertools.zip_longest(*files.values())
    return [row for turn in turns for row in turn if row is not None][:SAMPLED]


def try_rewards(
    specs: Sequence[tuple[str, float]], settings: Settings, rows: Sequence[Row]
) -> list[tuple[Row, list[list[float]]]]:
    """What garbage and every action earn, (row, rewards by answer and function) of a sample of rows: those of GARBAGE first,
    NaN where a function leaves an answer out. Rows without actions are asked for [0] and [1]. Each function is called once,
    as TRL would: a mistake costs a second here and an hour in a run. Columns that only other files have are None.
    Raises RuntimeError, naming the function and what it raised or returned."""
    asked = [
        (row, [*GARBAGE, *(FINAL.format(f"[{k}]") for k in range(len(row.rewards) or 2))]) for row in sample_rows(rows)
    ]
    read = []
    for row, answers in asked:
        known = dataclasses.replace(row, prompt=row.prompt or row.messages[-1][1])
        read += [Completion(known, tried_text(known.prompt, text), None, 1, False) for text in answers]
    most = max((len(row.rewards) for row in rows), default=0)
    state = types.SimpleNamespace(global_step=0, max_steps=settings.TOTAL_STEPS)
    functions = load_rewards(specs, settings) if asked else []
    scores = score(functions, read, [[0]] * len(read), most, trainer_state=state)
    weighted = iter([weight * value for (_, weight), value in zip(specs, values, strict=True)] for values in scores)
    return [(row, list(itertools.islice(weighted, len(answers)))) for row, answers in asked]


def total(scores: Sequence[float]) -> float:
    """Their sum as TRL's: those that are NaN are left out, and NaN where all are."""
    kept = [score for score in scores if not math.isnan(score)]
    return math.fsum(kept) if kept else math.nan


def check_garbage(
    specs: Sequence[tuple[str, float]],
    tried: Sequence[tuple[Row, Sequence[Sequence[float]]]],
    settings: Settings,
    problems: Problems,
) -> str | None:
    """An unreadable answer earns less than a row's worst action, on average over the rows of `try_rewards`: a problem where
    it does not, or a warning (returned) where the user set INVALID_REWARD. One that all functions leave out has no
    advantage, as if it earned the mean of the row's actions."""
    worst: list[float] = []
    kinds: list[list[tuple[float, Sequence[float]]]] = [[] for _ in GARBAGE]  # (worth, reward of each function) by row
    for row, answers in tried:
        earned = [value for value in map(total, answers[len(GARBAGE) :]) if not math.isnan(value)]
        if row.rewards and earned:
            worst.append(min(earned))
            for kind, scores in zip(kinds, answers, strict=False):
                kind.append((fmean(earned) if math.isnan(total(scores)) else total(scores), scores))
    if not worst:
        if any(row.rewards for row, _ in tried):
            what = "no function rewards any answer to the rows that were tried, [0] and all other actions included"
            problems.add(
                "REWARDS", what, "Return numbers; None leaves an answer out, and there is nothing to learn from"
            )
        return None
    kind = max(kinds, key=lambda kind: fmean(worth for worth, _ in kind))
    most, least = fmean(worth for worth, _ in kind), fmean(worst)
    if most < least:
        return None
    means = [total(scores) / len(kind) for scores in zip(*(scores for _, scores in kind), strict=True)]
    parts = ", ".join(f"{name} {value:.3g}" for (name, _), value in zip(specs, means, strict=True))
    what = f"an unreadable answer earns {most:.3g} on average ({parts}), a row's worst action {least:.3g}"
    invalid = settings.INVALID_REWARD
    if invalid is not None:
        teaches = "costs nothing, and a model unlearns its format" if math.isnan(invalid) else "pays"
        return f"INVALID_REWARD={show(invalid)}: {what}. Garbage {teaches}: unset it"
    own = [name for name, _ in specs if name not in rewards.ACTION_REWARDS]
    weight = math.fsum(weight for name, weight in specs if name not in own)
    ways = [f"Let {' and '.join(own)} return less where rewards.parse_action finds no action"] if own else []
    if weight > 0:
        room = least - math.fsum(value for (name, _), value in zip(specs, means, strict=True) if name in own)
        ways.append(f"set INVALID_REWARD={math.floor(10 * room / weight) / 10 - 0.1:.1f}")
    fix = " or ".join(ways) or f"Give {' and '.join(name for name, _ in specs)} weights above 0"
    problems.add("REWARDS", f"{what}, so a run would learn garbage", fix)
    return None


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
    if not isinstance(values, Sequence):
        raise RuntimeError(f"{returned} {type(values).__name__}, not a list of numbers")
    if len(values) != count:
        raise RuntimeError(f"{returned} {len(values)} rewards for {count} completions")
    for value in values:
        number = isinstance(value, (int, float))
        if value is not None and not (number and (value != value or abs(value) <= MOST_REWARD)):
            what = f"neither a finite number of at most {MOST_REWARD:g} in size nor None"
            raise RuntimeError(f"{returned} {one_line(repr(value), 200)}, which is {what}")
    return values


Reward = Callable[..., list[float | None]]
# What every reward function is given beside the columns.
GIVEN = {"prompts", "completions", "completion_ids", "trainer_state", "truncated", "log_extra", "log_metric"}


def is_called_by_keyword(function: Callable[..., Any]) -> bool:
    """Whether a reward function of the user's is called as TRL does it, all by keyword; else its first argument has a name
    of its own, and gets the completions."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built into Python, without a signature
        return True
    first = next((one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)), None)
    return first is None or first in GIVEN or any(one.name == "completions" for one in parameters)


def as_message(turn: str) -> list[dict[str, str]]:
    """An assistant's turn as the one message that TRL makes of it (`gptoss_template` of trl/chat_template_utils.py):
    `content` is the final channel's text, `thinking` the reasoning before it; both may be empty.

    >>> as_message("<|start|>assistant<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>[1]<|return|>")
    [{'role': 'assistant', 'thinking': 'Hm', 'content': '[1]'}]
    """
    thinking = re.search(r"<\|channel\|>analysis<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|\Z)", turn, re.DOTALL)
    content = rewards.final_channel(turn) or ""
    return [{"role": "assistant", "thinking": thinking[1] if thinking else "", "content": content}]


def reward_callable(name: str, settings: Settings, title: str | None = None) -> Reward:
    """A reward function, `async` or not, as TRL calls it: named `title` for the logs, given INVALID_REWARD, its errors named.

    One of the user's gets prompts and completions of conversational rows as lists of messages, as from TRL, if it is called
    by keyword."""
    function, own, here = load_reward(name), ":" in name, str(Path.cwd())
    options = {"invalid_reward": settings.INVALID_REWARD} if name in rewards.ACTION_REWARDS else {}
    by_keyword = own and is_called_by_keyword(function)

    def reward(
        completions: list[Any], prompts: Sequence[Any] = (), prompt_messages: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        if by_keyword and any(prompt_messages):
            talks = [[{"role": role, "content": text} for role, text in talk or ()] for talk in prompt_messages]
            prompts = [talk or text for talk, text in zip(talks, prompts, strict=True)]
            completions = [as_message(text) if talk else text for talk, text in zip(talks, completions, strict=True)]
        given = columns | options | {"prompts": prompts}
        try:
            with users_code(here) if own else contextlib.nullcontext():
                values = function(completions=completions, **given) if by_keyword else function(completions, **given)
                values = asyncio.run(values) if inspect.iscoroutine(values) else values
            values = values.tolist() if hasattr(values, "tolist") else values
            if isinstance(values, Sequence):
                values = [value.item() if hasattr(value, "item") else value for value in values]  # numpy's
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit too: it would end the run as if it were complete
            raise RuntimeError(f"REWARDS: {name} raised {ended(error)}") from error
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


def score(
    functions: Sequence[Reward], read: Sequence[Completion], ids: Sequence[Sequence[int]], actions: int, **more: Any
) -> list[list[float]]:
    """What each function gives each completion (N, F), NaN for None. `ids`: their tokens; `actions`: the most of any row;
    `more`: what else the functions are given. Each is called once, as TRL would."""
    table = [reward_columns(one.row, actions) for one in read]
    names = dict.fromkeys(name for mine in table for name in mine)
    given: dict[str, list[Any]] = {name: [mine.get(name) for mine in table] for name in names}
    given |= {"prompts": [one.row.prompt for one in read], "truncated": [one.truncated for one in read]}
    turns = [rewards.assistant_turn(one.row.prompt, one.text) for one in read]
    nothing = {"log_extra": lambda *values: None, "log_metric": lambda *values: None}
    made = [function(completions=turns, completion_ids=list(ids), **nothing, **given, **more) for function in functions]
    return [[math.nan if value is None else value for value in values] for values in zip(*made, strict=True)]


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
