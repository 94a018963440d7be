# SPDX-License-Identifier: Apache-2.0
"""Renders a prompt, counts tokens, gives a row's correct answer, and sets the order in which a run uses the prompts."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from grpo.common import InputError, nearest_hint, one_line
from grpo.data.files import Messages, Row
from grpo.data.formats import Cell, read_literal
from grpo.harmony import ANSWER_BEFORE, FINAL, RETURN, TOKEN, opened_turn
from grpo.phases import with_progress
from grpo.settings.parsing import parse_value
from grpo.settings.table import Settings

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer

# Columns whose cells are arguments of the chat template: name, type, and its name in messages.
TEMPLATE_COLUMNS: list[tuple[str, type, str]] = [
    ("reasoning_effort", str, "text"),
    ("tools", list, "a list of functions as JSON schemas"),
    ("chat_template_kwargs", dict, "an object"),
]


def answer_of(row: Row, direct: bool = False) -> str | None:
    """The correct completion of a row's prompt, or of the prompt that `open_answer` extended if `direct` is true. It is
    the `answer` column, which holds the final channel's text or a whole turn from `<|channel|>` on, else the best
    action; None if all actions are equal. Raises ValueError if prompt and answer open different channels."""
    answer, values = row.columns.get("answer"), row.q or row.rewards
    text = "" if answer is None else str(answer).strip()
    if not text and len(set(values)) < 2:
        return None
    if not text.startswith("<|channel|>"):
        text = FINAL + (text or f"[{values.index(max(values))}]")
    role, prompt = row.messages[0]
    opened = opened_turn(prompt) if role == "rendered" else ""
    if direct:
        opened = ANSWER_BEFORE
    if not text.startswith(opened):
        raise ValueError(f"the prompt opens {opened!r}, and the answer begins with {text[: len(opened)]!r}")
    # A stored conversation ends its turns by <|end|>.
    return text.removeprefix(opened).removesuffix(RETURN).removesuffix("<|end|>") + RETURN


def render(
    template: str, messages: Messages, effort: str, date: str, arguments: Mapping[str, Cell] = MappingProxyType({})
) -> str:
    """A conversation rendered by a Hugging Face chat template, up to where the assistant begins. `arguments` are a
    row's own, see `template_arguments`.

    It equals what transformers renders, without torch, and has `date` in place of today's, so that it never changes."""
    conversation = [{"role": role, "content": text} for role, text in messages]
    variables = {"reasoning_effort": effort, **arguments, "messages": conversation, "add_generation_prompt": True}
    return compile_template(template, date).render(variables)


def without_none(value: Cell) -> Cell:
    """An object without its empty keys: Parquet gives every object of a column the keys of all others, with None."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value


def template_arguments(row: Row, template: str) -> dict[str, Cell]:
    """The arguments that a row has for the chat template, in the columns that TRL's and transformers' users know:
    `reasoning_effort`, `tools` (functions as JSON schemas) and `chat_template_kwargs` (an object of any arguments).
    Raises InputError, also for those that the template does not take: they would change nothing."""
    arguments: dict[str, Cell] = {}
    for column, kind, form in TEMPLATE_COLUMNS:
        cell = row.columns.get(column)
        if isinstance(cell, str):
            cell = cell.strip()
        try:
            value = without_none(read_literal(cell) if cell and isinstance(cell, str) and kind is not str else cell)
        except ValueError as error:
            raise InputError(f"column {column}: {error}") from None
        if value and not isinstance(value, kind):
            raise InputError(f"column {column}: {one_line(repr(value), 200)} is not {form}")
        own = value if kind is dict else {column: value}
        for name, argument in own.items() if value else ():
            if arguments.setdefault(name, argument) != argument:
                raise InputError(f"column {column}: the row has another {name} in a second column")
    unknown = sorted(arguments.keys() - template_variables(template)) if arguments else []
    if unknown:
        near = nearest_hint(unknown[0], template_variables(template))
        raise InputError(f"the model's chat template takes no {', '.join(unknown)}{near}")
    if tokens := dict.fromkeys(TOKEN.findall(json.dumps(arguments, default=str))):
        raise InputError(f"an argument of the chat template holds {', '.join(tokens)}, which ends a message")
    if effort := arguments.get("reasoning_effort"):
        try:
            arguments["reasoning_effort"] = parse_value("REASONING_EFFORT", str(effort))
        except ValueError as error:
            raise InputError(f"column reasoning_effort: {effort!r} is not accepted, {error}") from None
    return arguments


@functools.cache
def template_variables(template: str) -> set[str]:
    """The names of all variables in a chat template, but for those that `render` sets."""
    # Imported late, as in `compile_template`.
    from jinja2 import Environment, meta
    from jinja2.ext import loopcontrols

    names = meta.find_undeclared_variables(Environment(extensions=[loopcontrols]).parse(template))
    return names - {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}


@functools.cache
def compile_template(template: str, date: str) -> jinja2.Template:
    """Compile a chat template that writes `date`; cached, because this takes as long as rendering a hundred prompts."""
    # Imported late, so that the preflight can name packages that are missing.
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    moment = time.strptime(date, "%Y-%m-%d")
    environment.globals["strftime_now"] = lambda form: time.strftime(form, moment)
    compiled = environment.from_string(template)
    compiled.globals = dict(compiled.globals)  # jinja copies its ChainMap slowly: a fifth of rendering a row
    return compiled


PROMPTS_PER_BATCH = 1000  # limited, because the encoding of a prompt takes more memory than its row


@functools.cache
def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, cached, because gpt-oss's takes a second. An unusable file may raise a
    BaseException that is no Exception."""
    from tokenizers import Tokenizer  # Imported late, as in `compile_template`.

    return Tokenizer.from_file(str(path))


def count_tokens(tokenizer: Path, prompts: Sequence[str]) -> dict[str, int]:
    """The number of tokens of each prompt. Raises what `open_tokenizer` does."""
    loaded = open_tokenizer(tokenizer)
    lengths: dict[str, int] = {}
    starts = range(0, len(prompts), PROMPTS_PER_BATCH)
    for start in with_progress("counting tokens", starts, total=len(prompts), each=PROMPTS_PER_BATCH):
        batch = prompts[start : start + PROMPTS_PER_BATCH]
        lengths |= zip(batch, map(len, loaded.encode_batch_fast(batch)), strict=True)
    return lengths


def prompt_order(rows: int, seed: int, count: int) -> Iterator[int]:
    """The first `count` row indices of an endless stream that shuffles `rows` rows again and again.

    The stream depends on `seed` alone, so that a resumed run continues it even in a later epoch; a sampler that
    shuffles once per epoch cannot (https://github.com/huggingface/trl/issues/7040). Each shuffle uses every row."""
    for done in range(0, count, rows):
        order = list(range(rows))
        random.Random(f"{seed}/{done // rows}").shuffle(order)
        yield from order[: count - done]


def row_order(rows: int, s: Settings) -> Iterator[int]:
    """The row of each completion that each optimizer step learns from, step after step: each prompt NUM_GENERATIONS
    times, and a rollout's prompts once for every step that shares it."""
    prompts, rollouts = s.STEPS_PER_GENERATION * s.PROMPTS_PER_STEP, -(-s.TOTAL_STEPS // s.steps_per_rollout)
    order = list(prompt_order(rows, s.SEED, rollouts * prompts))
    for step in range(s.TOTAL_STEPS):
        start = step // s.steps_per_rollout * prompts
        for row in order[start : start + prompts]:
            yield from [row] * s.NUM_GENERATIONS


def sampling_seed(seed: int, step: int, stream: str) -> int:
    """The seed of one generation. It depends on SEED, step and stream alone: a resumed run samples the same tokens."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stream}/{step}".encode()).digest()[:8], "big") >> 1
