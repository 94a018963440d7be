# SPDX-License-Identifier: Apache-2.0
"""Loads the reward functions that REWARDS names: of rewards.py, or of the user's own modules."""

import contextlib
import importlib
import importlib.util
import logging
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rewards
from grpo.common import format_exception, log, nearest_hint, read_number, split_commas
from grpo.settings.table import MOST_WEIGHT


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


@contextlib.contextmanager
def undisturbed(name: str) -> Iterator[None]:
    """Calls of the user's code `name`, of which nothing stays that would change the run around it: the current folder,
    to which OUTPUT_DIR may be relative, torch's switches, which a judge model's code likes to set, and the set-up of
    logging, without which a run may fail without a word. If the code has forked this process and returns in the copy
    too, the copy ends: two processes would train in one folder."""
    process, folder, torch = os.getpid(), os.getcwd(), sys.modules.get("torch")
    before = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()) if torch else None
    root = logging.root
    handlers, level, disabled = [*root.handlers], root.level, root.manager.disable
    try:
        yield
    finally:
        if os.getpid() != process:
            os.write(2, f"REWARDS: {name} forked a process and returned in it; the copy ends here\n".encode())
            os._exit(1)
        os.chdir(folder)
        # A file of the user's own log stays; a second handler for the terminal would say each line twice.
        files = [handler for handler in root.handlers if isinstance(handler, logging.FileHandler)]
        root.handlers[:] = [*handlers, *(file for file in files if file not in handlers)]
        root.setLevel(level)
        logging.disable(disabled)
        log.disabled = False  # `logging.config.dictConfig` disables every logger that is there.
        if torch := sys.modules.get("torch"):
            grad, dtype, device = before or (True, torch.float32, torch.device("cpu"))
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(dtype)
            if torch.get_default_device() != device:  # Torch without one calls its functions faster.
                torch.set_default_device(None if device.type == "cpu" else device)


def load_reward(name: str) -> Callable[..., Any]:
    """The reward function `name` of rewards.py, or `module:function` from an installed package or else from the current
    folder. Raises ValueError if it cannot be loaded."""
    if ":" not in name:
        if name in rewards.REWARD_FUNCTIONS:
            return rewards.REWARD_FUNCTIONS[name]
        check_no_file(name)
        known = rewards.REWARD_FUNCTIONS
        if "." in name:
            raise ValueError(f"{name!r} has no colon: write {':'.join(name.rsplit('.', 1))}")
        raise ValueError(f"{name!r} is unknown (there are {', '.join(known)}{nearest_hint(name, known)})")
    reward = load_object(name)
    if not callable(reward):
        raise ValueError(f"{name!r} is no function")
    return reward


def load_object(name: str) -> Any:
    """What `module:name` names, from an installed package or else from the current folder. Raises ValueError."""
    check_no_file(name)
    module, _, attribute = name.partition(":")
    if not attribute:
        hint = ":".join(name.rsplit(".", 1)) if "." in name else f"{module}:NAME"
        raise ValueError(f"{name!r} names a module alone: write {hint}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        check_module_file(module.partition(".")[0])
        with undisturbed(name):
            return getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A user's module may raise anything, SystemExit included.
        source = Path(here, *module.split(".")).with_suffix(".py")
        lines = [line for line in traceback.extract_tb(error.__traceback__) if line.filename == str(source)]
        reason = format_exception(error) + show_line(lines)
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            reason += f", neither as {module.replace('.', '/')}.py in {here} nor as an installed package"
        raise ValueError(f"{name!r} cannot be loaded: {reason}") from None


def check_no_file(name: str) -> None:
    """Raises ValueError where a file stands in the place of a module; says what to write for it."""
    file, _, attribute = name.partition(":")
    if "/" not in file and not file.endswith(".py"):
        return
    path = Path(os.path.relpath(os.path.expanduser(file).removesuffix(".py")))
    module, where = ".".join(path.parts), ""
    if ".." in path.parts:
        module, where = path.name, f" and set PYTHONPATH={shlex.quote(str(path.parent.resolve()))}"
    words = "names a file, and Python wants its module: write"
    raise ValueError(f"{name!r} {words} {module}:{attribute or 'NAME'}{where}")


def lines_in_module(error: BaseException, name: str) -> list[traceback.FrameSummary]:
    """The lines of the module of `module:name` that an exception came through; none if the call itself failed."""
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    return [line for line in traceback.extract_tb(error.__traceback__) if line.filename == file]


def show_line(lines: Sequence[traceback.FrameSummary]) -> str:
    """The last of these lines, such as ` (my_rewards.py, line 3)`; empty if there are none."""
    return f" ({os.path.relpath(lines[-1].filename)}, line {lines[-1].lineno})" if lines else ""


def check_module_file(module: str) -> None:
    """Raises ImportError if a module of the current folder is hidden by another one of its name, such as the project's
    own `rewards`: the function of that other module would be taken."""
    own = next((path for path in (Path(f"{module}.py"), Path(module, "__init__.py")) if path.is_file()), None)
    spec = importlib.util.find_spec(module) if own else None
    if own and spec and not (spec.origin and Path(spec.origin).is_file() and own.samefile(spec.origin)):
        raise ImportError(f"{own} is hidden by {spec.origin}, which has the same name: rename yours")


def reads_environments(specs: Iterable[tuple[str, float]]) -> bool:
    """Whether a function of REWARDS is the user's own: only these read the copies of an episode's environment."""
    return any(":" in name for name, _ in specs)


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
