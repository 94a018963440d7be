# SPDX-License-Identifier: Apache-2.0
"""The checks of scripts/sft.py: those of train_grpo.py that are about learning, and that rows have answers."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo.common import Problems
from grpo.data.files import Row, merge_alike
from grpo.data.formats import Cell, read_literal
from grpo.data.heldout import read_split
from grpo.data.prompts import answer_of, count_tokens, without_none
from grpo.environment.calls import shown_calls
from grpo.environment.worker import Description
from grpo.harmony import TOKEN
from grpo.output.folder import RunState, inspect_run
from grpo.output.layout import ADAPTER, DELETING, NO_RUN, SETTINGS, check_entries, check_output_dir
from grpo.preflight import resolve
from grpo.preflight.checks import check_learning, load_run_settings
from grpo.preflight.choices import Choice, choose_sync, choose_total_steps
from grpo.preflight.resolve import Choices, Facts, ResolvedRun, fill_in
from grpo.process.ranks import Ranks
from grpo.settings.table import Settings

CALLS = "calls"  # The column of the calls that an episode shows.


def was_killed(out: Path) -> bool:
    """Whether `out` holds only files of a killed scripts/sft.py, which writes the adapter last, and no log."""
    names = {path.name for path in out.iterdir()}
    return names <= NO_RUN or (bool(names & {SETTINGS, DELETING}) and not names & {ADAPTER, "training.log"})


def inspect_out(asked: Settings, out: Path, problems: Problems) -> RunState:
    """What --out holds. Adds a problem unless it is empty, OVERWRITE=1 is set, or a killed scripts/sft.py left it."""
    if asked.OVERWRITE or not (out.is_dir() and any(out.iterdir())):
        return inspect_run(asked, [], problems)
    state = RunState(out.expanduser().resolve(), exists=True)
    if not was_killed(out):
        fix = "Name another folder, or set OVERWRITE=1 to replace the run in it"
        problems.add(f"--out {out}", "it is not empty", fix)
    elif check_output_dir(asked, problems):
        check_entries(asked, problems)
    return state


def read_calls(cell: Cell) -> Cell:
    """What the column `calls` of a row holds, as itself or as text. Raises ValueError."""
    try:
        return without_none(read_literal(cell) if cell and isinstance(cell, str) else cell or [])
    except ValueError:
        raise ValueError("it is no JSON, nor a Python literal") from None


def read_turns(
    rows: Sequence[Row], direct: bool, environment: Description | None, problems: Problems
) -> list[list[str]]:
    """The turns that each row shows, none if it shows none: its answer, and with an `environment` the calls before it.
    Adds a problem for each answer that its prompt does not let through, and for calls that cannot be read."""
    turns: list[list[str]] = []
    faults = Problems()
    names = [tool["function"]["name"] for tool in environment.tools] if environment else []
    for row in rows:
        where = f"{row.file}, row {row.number}"
        try:
            answer = answer_of(row, direct)
        except ValueError as error:
            faults.add(where, str(error), "Let prompt and answer begin with the same channel")
            continue
        cell = str(row.columns.get("answer") or "").strip()
        if (token := TOKEN.search(cell)) and not cell.startswith("<|channel|>"):
            fault = f"it holds {token[0]}: the model reads these as the begin or end of a message"
            faults.add(f"{where}, answer", fault, "Take it out, or write the whole turn, from its first <|channel|> on")
        try:
            calls = shown_calls(read_calls(row.columns.get(CALLS)), names) if environment else []
        except ValueError as error:
            faults.add(f"{where}, {CALLS}", str(error), 'Write [{"name": ..., "arguments": {...}}, ...]')
            continue
        # An environment's answer may be what its reward needs: without calls it shows nothing.
        turns.append([*calls, answer] if answer and (calls or not environment) else calls)
    if rows and not faults and not any(turns):
        fault = "no row has an answer, or an action better than others"
        fix = "Add a column `answer`, or rewards that differ"
        if environment:
            fault, fix = f"no row has a column `{CALLS}`", "Add it (docs/environments.md)"
        faults.add("DATA", fault, fix)
    problems += merge_alike("DATA", faults)
    return turns


def longest_completion(facts: Facts, turns: Sequence[Sequence[str]]) -> int:
    """The tokens of the longest answer, from which memory is planned; its characters if no tokenizer works. An
    episode's results are not known yet, so it may be as long as MAX_COMPLETION_LEN."""
    if facts.environment:
        return facts.asked.MAX_COMPLETION_LEN
    lengths = {answer: len(answer) for answers in turns for answer in answers}
    if facts.longest_prompt and facts.files and facts.files.tokenizer:
        lengths = count_tokens(facts.files.tokenizer, list(lengths))
    return max(lengths.values(), default=1)


def sft_preflight(environ: Mapping[str, str], out: Path) -> tuple[ResolvedRun, list[list[str]]]:
    """(the resolved run of the settings in `environ` with OUTPUT_DIR=`out`; the turns of each row, see `read_turns`).

    Rows that train_grpo.py would hold out are left out here too, because its run may start from this adapter."""
    settings, sources, problems = load_run_settings(environ)
    settings = dataclasses.replace(settings, OUTPUT_DIR=str(out))
    split = read_split(settings, problems, train_only=True)
    facts = resolve.read_facts(settings, sources, split, None, Ranks(), problems)
    turns = read_turns(facts.rows, settings.DIRECT_ANSWERS, facts.environment, problems)
    # There is no rollout that could be learned from again.
    once, rows = dataclasses.replace(facts.asked, NUM_ITERATIONS=1), sum(map(bool, turns))
    steps = choose_total_steps(once, sources, rows, problems)
    asked = dataclasses.replace(facts.asked, TOTAL_STEPS=steps.value)
    chosen: Choices = {
        "heldout": Choice(0, facts.heldout_reason),
        "TOTAL_STEPS": steps,
        "USE_VLLM": Choice(False, "nothing is generated"),
        "ATTN_IMPL": Choice("eager", "rows are padded"),
        "PACKING": Choice("none", "rows are padded"),
        "ROLLOUT_SYNC": choose_sync(asked),
    }
    # A completion is here an answer: memory is planned for the longest one.
    learning = dataclasses.replace(fill_in(asked, chosen), MAX_COMPLETION_LEN=longest_completion(facts, turns))
    planned, inputs, plan = resolve.plan_run(learning, facts, facts.longest_prompt or asked.MAX_PROMPT_LEN)
    resolved = ResolvedRun(
        **vars(facts) | {"asked": asked, "sources": resolve.chosen_sources(asked, facts.sources)},
        settings=fill_in(asked, chosen | planned),
        choices=chosen | planned,
        state=inspect_out(asked, out, problems),
        inputs=inputs,
        plan=plan,
    )
    kept = {name: getattr(resolved.settings, name) for name in resolve.KEPT_CHOICES}
    check_learning(resolved, dataclasses.replace(learning, **kept), problems)
    return dataclasses.replace(resolved, problems=problems), turns
