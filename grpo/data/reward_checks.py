# SPDX-License-Identifier: Apache-2.0
"""Reward functions before a run: they exist, the rows hold what they need, and garbage does not pay."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import rewards
from grpo.data.files import (
    PROMPT_COLUMNS,
    RESERVED_ARGUMENTS,
    Row,
    column_names,
    data_prompt,
    flat_rows,
    no_actions,
    reward_columns,
)
from grpo.data.formats import is_dataset, read_csv_table, reader_of
from grpo.data.prompts import ANSWER_AFTER, ANSWER_BEFORE
from grpo.data.scoring import (
    Completion,
    RewardError,
    first_state,
    load_reward,
    load_rewards,
    read_completion,
    reward_specs,
    score,
    total,
)
from grpo.settings import Problems, Settings, one_line, show


def check_rewards(
    settings: Settings, text: str, rows: Sequence[Row], problems: Problems, tokenizer: Path | None = None
) -> tuple[list[tuple[str, float]], str | None]:
    """The reward functions that `text` names exist, the CSVs hold what they need, and garbage does not pay. Returns
    (name, weight) of each, and what has to be warned about garbage, if anything. `tokenizer`: see `try_rewards`."""
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
    able = specs if complete else [spec for spec in specs if ":" in spec[0]]
    try:
        tried = try_rewards(able, settings, rows, tokenizer, shown=True)
    except RewardError as error:
        problems.append(f"{error}. {trial_text(rows)}")
        return [], None
    return specs, check_garbage(specs, tried, settings, problems) if complete else None


def check_heldout(
    specs: Sequence[tuple[str, float]],
    settings: Settings,
    rows: Sequence[Row],
    problems: Problems,
    tokenizer: Path | None = None,
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
        try_rewards(specs, settings, rows, tokenizer)
    except RewardError as error:
        problems.add(where, str(error), f"Give these rows the columns of DATA, or {otherwise}")


def check_columns(names: Collection[str], rows: Sequence[Row], problems: Problems) -> None:
    """The rows hold what the reward functions of these names need, and something to learn."""
    if names & rewards.ACTION_REWARDS.keys():
        for file, row in sorted({row.file: row for row in rows if not row.rewards}.items()):
            fix = "Add one per action, or choose other REWARDS, such as your own: REWARDS=my_module:my_function"
            problems.add(f"{file}, columns", no_actions(row), fix)
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
    return text.removeprefix(rewards.assistant_turn(prompt, ""))


def sample_rows(rows: Sequence[Row]) -> list[Row]:
    """At most SAMPLED rows, about as many of each file, always the same ones."""
    files: dict[str, list[Row]] = {}
    for row in random.Random(0).sample(rows, len(rows)):
        files.setdefault(row.file, []).append(row)
    turns = itertools.zip_longest(*files.values())
    return [row for turn in turns for row in turn if row is not None][:SAMPLED]


def trial_text(rows: Sequence[Row]) -> str:
    """Two sentences on what `try_rewards` called the functions with: the answers, and the types of the arguments."""
    sample = sample_rows(rows)
    answers = "one that stops before its final channel, an empty one, [0], [1]"
    if any(len(row.rewards) > 2 for row in sample):
        answers += ", ..."
    kinds = {isinstance(data_prompt(row), str) for row in sample}
    if len(kinds) > 1:
        form = "text for rows whose prompt is text, lists of messages for the others"
    else:
        form = "text, as the prompts of DATA are" if True in kinds else "lists of messages, as the prompts of DATA are"
    types = {name: type(value).__name__ for row in reversed(sample) for name, value in reward_columns(row).items()}
    columns = one_line(", ".join(f"{name} ({kind})" for name, kind in types.items()), 600)
    tried = f"It was tried before the run on made-up answers to {len(sample)} rows of DATA ({answers})"
    return f"{tried}: prompts and completions were {form}; the columns, by keyword as well, are {columns}"


def tokenize(texts: Sequence[str], tokenizer: Path | None) -> tuple[list[list[int]], list[str]]:
    """Tokens of some completions, and what TRL decodes of them. Without a tokenizer.json their bytes, and the text of
    the final channel: that is all that a model without channels writes."""
    if tokenizer is None:
        return [list(text.encode()) for text in texts], [rewards.final_channel(text) or "" for text in texts]
    from tokenizers import Tokenizer  # late, so that the preflight can name packages that are missing

    loaded = Tokenizer.from_file(str(tokenizer))
    ids = [encoding.ids for encoding in loaded.encode_batch(texts, add_special_tokens=False)]
    return ids, loaded.decode_batch(ids, skip_special_tokens=True)


def response_template(tokenizer: Path | None) -> dict[str, Any] | None:
    """How the tokenizer parses a message, where the tokenizer_config.json beside its tokenizer.json says it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = tokenizer.with_name("tokenizer_config.json").read_text(encoding="utf-8")
        return json.loads(text).get("response_template")
    return None


COLUMNS_SHOWN = 5  # in the line about the first call


def call_text(name: str, completion: Completion, value: float) -> str:
    """A line that says what a function of the user's was given for one completion, and what it returned."""
    row = completion.row
    shown = (key for key in row.columns if not key.startswith(("reward_action_", "q_action_")))
    own = {key: row.columns[key] for key in shown if key not in (*PROMPT_COLUMNS, *RESERVED_ARGUMENTS)}
    cells = {"prompts": data_prompt(row), "completions": completion.decoded} | dict(list(own.items())[:COLUMNS_SHOWN])
    arguments = ", ".join(f"{key}=[{one_line(repr(cell), 80)}]" for key, cell in cells.items())
    text = f"{name}({arguments}, ...) returned {value:g} for it"
    if own and not is_dataset(row.file) and reader_of(Path(row.file)) is read_csv_table:
        text += "; columns of a CSV are text, as in the file"
    return text


def try_rewards(
    specs: Sequence[tuple[str, float]],
    settings: Settings,
    rows: Sequence[Row],
    tokenizer: Path | None = None,
    shown: bool = False,
) -> list[tuple[Row, list[list[float]]]]:
    """What garbage and every action earn, (row, rewards by answer and function) of a sample of rows: those of GARBAGE
    first, NaN where a function leaves an answer out. Rows without actions are asked for [0] and [1]. Each function is
    called once, as in training, with completions in tokens of `tokenizer`, a tokenizer.json: a mistake costs a second
    here and an hour in a run. `shown`: print the first call of each function of the user's. Raises RewardError,
    naming the function and what it raised or returned."""
    if not rows:
        return []
    asked = [
        (row, [*GARBAGE, *(FINAL.format(f"[{k}]") for k in range(len(row.rewards) or 2))]) for row in sample_rows(rows)
    ]
    # Rows that were not rendered, for want of a tokenizer or a template, have a prompt that only begins the answer.
    known = [(row if row.prompt else dataclasses.replace(row, prompt=START), answers) for row, answers in asked]
    tried = [(row, tried_text(row.prompt, text)) for row, answers in known for text in answers]
    texts, template = list(dict.fromkeys(text for _, text in tried)), response_template(tokenizer)
    tokens = dict(zip(texts, zip(*tokenize(texts, tokenizer), strict=True), strict=True))
    ids = [tokens[text][0] for _, text in tried]
    read = [read_completion(row, text, tokens[text][1], len(tokens[text][0]), False, template) for row, text in tried]
    functions, state = load_rewards(specs, settings), first_state(settings.TOTAL_STEPS)
    scores = score(functions, read, ids, column_names(rows), state)
    for n, (name, _) in enumerate(specs if shown else ()):
        if ":" in name:
            print(call_text(name, read[len(GARBAGE)], scores[len(GARBAGE)][n]), flush=True)
    weighted = iter([weight * value for (_, weight), value in zip(specs, values, strict=True)] for values in scores)
    return [(row, list(itertools.islice(weighted, len(answers)))) for row, answers in asked]


def check_garbage(
    specs: Sequence[tuple[str, float]],
    tried: Sequence[tuple[Row, Sequence[Sequence[float]]]],
    settings: Settings,
    problems: Problems,
) -> str | None:
    """An unreadable answer earns less than a row's worst action, on average over the rows of `try_rewards`: a problem
    where it does not, or a warning (returned) where the user set INVALID_REWARD, or where REWARDS do not look at
    actions: every action of a row earns the same. An answer that all functions leave out has no advantage, as if it
    earned the mean of the row's actions."""
    worst: list[float] = []
    alike = True  # whether all actions of each row earn the same
    kinds: list[list[tuple[float, Sequence[float]]]] = [[] for _ in GARBAGE]  # (worth, reward of each function) by row
    for row, answers in tried:
        earned = [value for value in map(total, answers[len(GARBAGE) :]) if not math.isnan(value)]
        if row.rewards and earned:
            worst.append(min(earned))
            alike = alike and max(earned) == min(earned)
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
    own = [name for name, _ in specs if name not in rewards.ACTION_REWARDS]
    weight = math.fsum(weight for name, weight in specs if name not in own)
    ways = [f"Let {' and '.join(own)} return less where rewards.parse_action finds no action"] if own else []
    invalid = settings.INVALID_REWARD
    if invalid is not None:
        teaches = "costs nothing, and a model unlearns its format" if math.isnan(invalid) else "pays"
        fix = ways[0] if len(own) == len(specs) else "unset it"
        return f"INVALID_REWARD={show(invalid)}: {what}. Garbage {teaches}: {fix}"
    if alike:
        fix = "Add action or regret to REWARDS if [k] is the answer that is wanted"
        return f"REWARDS: {what}, and all actions of a row earn the same: a run may learn to answer none. {fix}"
    if weight > 0:
        room = least - math.fsum(value for (name, _), value in zip(specs, means, strict=True) if name in own)
        ways.append(f"set INVALID_REWARD={math.floor(10 * room / weight) / 10 - 0.1:.1f}")
    elif len(own) == len(specs):
        ways.append("set INVALID_REWARD=0, which these functions do not get, to start with a warning instead")
    fix = " or ".join(ways) or f"Give {' and '.join(name for name, _ in specs)} weights above 0"
    problems.add("REWARDS", f"{what}, so a run would learn garbage", fix)
    return None
