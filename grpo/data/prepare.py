# SPDX-License-Identifier: Apache-2.0
"""Rows prepared once, for training, SFT, evaluation and asking: rendered and counted.

With DIRECT_ANSWERS every prompt also opens its answer. What follows needs no model: rewards, plans and logs."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo.common import InputError, Problems, format_exception, is_text
from grpo.data.files import HALF_A_CHARACTER, Row
from grpo.data.formats import Cell
from grpo.data.heldout import Split
from grpo.data.prompts import count_tokens, render, template_arguments, template_variables
from grpo.harmony import open_answer
from grpo.phases import with_progress
from grpo.settings.table import Settings

Tools = Sequence[dict[str, Any]]  # JSON schemas of functions, as chat templates take them
RESET_TOO_LONG = "the prompt has {} tokens with the text of its reset, MAX_PROMPT_LEN is {}"


class PromptFiles(Protocol):
    """The files of a model that prompts need: its chat template, and tokenizer.json. `ModelFiles` has them."""

    @property
    def template(self) -> str | None: ...
    @property
    def tokenizer(self) -> Path | None: ...


class UnpreparedPrompt(Exception):
    """A prompt cannot be rendered or counted; the arguments are those of `Problems.add`."""


def prepare_rows(
    settings: Settings, files: PromptFiles | None, problems: Problems, split: Split, tools: Tools = ()
) -> Split:
    """The rows of `split` with rendered prompts, and the tokens of the longest one. A prompt of more tokens than
    MAX_PROMPT_LEN is a problem.

    `tools` are the schemas of an environment's tools, which every prompt then lists. Prompts stay unrendered, with a
    `longest_prompt` of 0, without a tokenizer (`files`), and where the template or tokenizer fails, which is a
    problem."""
    if files is None or files.tokenizer is None:
        return split
    rows = [*split.train, *split.heldout]
    try:
        progress = with_progress("rendering prompts", rows, total=len(rows))
        rendered = [render_row(settings, row, files.template, tools) for row in progress]
        lengths = count_prompts(settings, rendered, files.tokenizer)
    except UnpreparedPrompt as error:
        problems.add(*error.args)
        return split
    check_lengths(settings, rendered, lengths, problems)
    count = len(split.train)
    return Split(rendered[:count], rendered[count:], split.reason, max(lengths.values(), default=0))


def render_row(settings: Settings, row: Row, template: str | None, tools: Tools = ()) -> Row:
    """The row with its prompt as the model gets it. Raises UnpreparedPrompt."""
    role, prompt = row.messages[0]
    where, model = f"{row.file}, row {row.number}", f"MODEL_ID={settings.MODEL_ID}"
    if tools and role == "rendered":
        fault = "the prompt is rendered, and the template could not list ENVIRONMENT's tools in it"
        raise UnpreparedPrompt(where, fault, "Give messages or a plain prompt")
    if role != "rendered":
        if template is None:
            fault = f"it has no chat template, and {row.file} holds prompts that are not rendered"
            raise UnpreparedPrompt(model, fault, "Add chat_template.jinja to the model, or give rendered prompts")
        try:
            arguments = template_arguments(row, template)
            if tools:
                arguments = arguments_with_tools(arguments, template, tools)
            prompt = render(template, row.messages, settings.REASONING_EFFORT, settings.PROMPT_DATE, arguments)
        except InputError as error:
            fix = "Correct it, or rename the column if it is no argument of the template"
            raise UnpreparedPrompt(where, str(error), fix) from None
        except Exception as error:  # a template may raise anything
            fault = f"its chat template fails on {where} ({format_exception(error)})"
            fix = "Download the model again, or write what its template takes"
            raise UnpreparedPrompt(model, fault, fix) from None
    if not is_text(prompt):  # An argument of the template, or a prompt from a command line.
        raise UnpreparedPrompt(where, *HALF_A_CHARACTER)
    if settings.DIRECT_ANSWERS:
        try:
            prompt = open_answer(prompt)
        except ValueError as error:
            raise UnpreparedPrompt(where, str(error), "End it with <|start|>assistant") from None
    return dataclasses.replace(row, prompt=prompt)


def arguments_with_tools(arguments: Mapping[str, Cell], template: str, tools: Tools) -> dict[str, Cell]:
    """The `arguments` of a chat template with an environment's tools. Raises InputError."""
    if "tools" in arguments:
        raise InputError("column tools: the row has tools of its own, and ENVIRONMENT's are listed")
    if "tools" not in template_variables(template):
        raise InputError("the model's chat template lists no tools, and ENVIRONMENT has some")
    return {**arguments, "tools": list(tools)}


def episode_prompt(settings: Settings, row: Row, template: str | None, tools: Tools, observation: str) -> str:
    """The rendered prompt of an episode: the text that the environment's `reset` returned stands at the end of the last
    message, as in TRL."""
    role, text = row.messages[-1]
    messages = (*row.messages[:-1], (role, text + observation))
    return render_row(settings, dataclasses.replace(row, messages=messages), template, tools).prompt


def count_prompts(settings: Settings, rows: Sequence[Row], tokenizer: Path) -> dict[str, int]:
    """The number of tokens of each prompt. Raises UnpreparedPrompt."""
    try:
        return count_tokens(tokenizer, list(dict.fromkeys(row.prompt for row in rows)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in the Rust code of tokenizers is a BaseException
        fault = f"its tokenizer.json fails ({format_exception(error)})"
        raise UnpreparedPrompt(f"MODEL_ID={settings.MODEL_ID}", fault, "Download the model again") from None


def check_lengths(settings: Settings, rows: Sequence[Row], lengths: Mapping[str, int], problems: Problems) -> None:
    """Adds a problem if prompts have more tokens than MAX_PROMPT_LEN: they are never cut."""
    too_long = [row for row in rows if lengths[row.prompt] > settings.MAX_PROMPT_LEN]
    if not too_long:
        return
    row = max(too_long, key=lambda row: lengths[row.prompt])
    longest = lengths[row.prompt]
    problem = f"the prompt has {longest} tokens, MAX_PROMPT_LEN is {settings.MAX_PROMPT_LEN}"
    if len(too_long) > 1:
        problem += f"; {len(too_long)} of {len(rows)} prompts are longer than that, and this is the longest"
    fix = f"Shorten what is too long, or set MAX_PROMPT_LEN={longest}"
    fix += ", and more for the text that resets add" if settings.ENVIRONMENT else ""
    problems.add(f"{row.file}, row {row.number}", problem, fix)
