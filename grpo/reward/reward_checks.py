# SPDX-License-Identifier: Apache-2.0
"""Checks reward functions before a run: they exist, rows hold what they need, and garbage earns less than answers."""

import dataclasses
import itertools
import math
import random
from collections.abc import Collection, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import rewards
from grpo.common import Problems, one_line
from grpo.data.files import Row, column_names, missing_actions_problem
from grpo.data.prompts import answer_of, count_tokens, open_tokenizer
from grpo.harmony import ASSISTANT, RETURN, answer_turn, completion_of, final_channel
from grpo.numerals import gold_number
from grpo.reward.calling import RewardError, load_rewards
from grpo.reward.loading import is_by_action, load_reward, reward_specs
from grpo.reward.scoring import initial_trainer_state, read_completion, score, total
from grpo.settings.parsing import show
from grpo.settings.table import Settings

Specs = Sequence[tuple[str, float]]  # (name, weight) of each reward function
Trial = tuple[Row, list[list[float]]]  # a row, and for each answer (GARBAGE first) the reward of each function
MOST_TRIED_ROWS = 64  # reward functions are tried on so many rows before a run
# Answers without an action: the first ends before its final channel, the second has an empty one.
GARBAGE = (f"{ASSISTANT}<|channel|>analysis<|message|>The load is{RETURN}", answer_turn(""))


def check_rewards(
    settings: Settings, text: str, rows: Sequence[Row], problems: Problems, tokenizer: Path | None = None
) -> tuple[list[tuple[str, float]], str | None]:
    """Checks that the reward functions of `text` exist, that the rows hold what they need, and that garbage earns
    less than answers. Returns (name, weight) of each function, and a warning about garbage or None."""
    specs = check_reward_names(text, problems)
    if not specs:
        return [], None
    problems_before = len(problems)
    check_columns({name for name, _ in specs}, rows, problems)
    has_columns = len(problems) == problems_before
    try:
        # If the project's own functions lack their columns, only the user's functions are tried.
        tried = specs if has_columns else [spec for spec in specs if ":" in spec[0]]
        trials = try_rewards(tried, settings, rows, tokenizer)
    except RewardError as error:
        problems.append(str(error))
        return [], None
    return specs, check_garbage(specs, trials, settings, problems) if has_columns else None


def check_reward_names(text: str, problems: Problems) -> list[tuple[str, float]]:
    """Checks that the reward functions of `text` exist. Returns (name, weight) of each; nothing if one does not."""
    try:
        specs = reward_specs(text)
        for name, _ in specs:
            load_reward(name)
        return specs
    except ValueError as error:
        problems.add("REWARDS", str(error), "Write e.g. REWARDS=action,format=0.1 or REWARDS=my_module:my_function")
        return []


def check_heldout(
    specs: Specs,
    settings: Settings,
    rows: Sequence[Row],
    problems: Problems,
    tokenizer: Path | None = None,
    where: str = "EVAL_DATA",
    alternative: str = "set EVAL_SAMPLES=0",
    columns: Collection[str] = (),
) -> None:
    """Checks that the reward functions can score the held-out rows. `where` and `alternative` go into messages;
    `columns` are those of the training rows."""
    unrewarded = next((row for row in rows if not row.rewards), None)
    if unrewarded and {name for name, _ in specs} & rewards.ACTION_REWARDS.keys():
        problems.add(f"{unrewarded.file}, columns", missing_actions_problem(unrewarded), f"Add them, or {alternative}")
        return
    check_answers([name for name, _ in specs], rows, problems)
    fix = f"Give the held-out rows the columns that DATA has, or {alternative}"
    for function in load_rewards(specs, settings):
        # Without this column its first argument would get the completions instead.
        if function.positional in set(columns) - set(column_names(rows)):
            problems.add(where, f"{function.name} takes the column {function.positional!r}, which it lacks", fix)
            return
    try:
        try_rewards(specs, settings, rows, tokenizer)
    except RewardError as error:
        problems.add(where, str(error), fix)


def check_columns(names: set[str], rows: Sequence[Row], problems: Problems) -> None:
    """Checks that the rows have the columns that these reward functions need, and that rewards differ by action."""
    if names & rewards.ACTION_REWARDS.keys():
        unrewarded = {row.file: row for row in reversed(rows) if not row.rewards}
        fix = "Add one per action, or choose other REWARDS, such as your own: REWARDS=my_module:my_function"
        for file in sorted(unrewarded):
            problems.add(f"{file}, columns", missing_actions_problem(unrewarded[file]), fix)
    rewarded_rows = [row for row in rows if row.rewards]
    if names & {"regret", "cost"}:
        problem = "its rewards are no softmax (0 or more, with a sum of 1), so they do not tell its regret"
        fix = "Add the value of each action as q_action_k, or set REWARDS=action"
        no_softmax = {row.file: row for row in reversed(rewarded_rows) if not row.q and not is_softmax(row.rewards)}
        for row in no_softmax.values():
            problems.add(f"{row.file}, row {row.number}", problem, fix)
    check_answers(names, rows, problems)
    is_flat = all(len(set(row.rewards)) == 1 and len(set(row.q)) < 2 for row in rewarded_rows)
    if rewarded_rows and is_flat and names <= rewards.ACTION_REWARDS.keys():
        problem = "every row gives all its actions the same reward, so there is nothing to learn"
        problems.add("DATA", problem, "Give better actions higher rewards, or choose other REWARDS")


def check_answers(names: Collection[str], rows: Sequence[Row], problems: Problems) -> None:
    """Checks every row for the answer that `gsm8k` and `gsm8k_strict` need: `try_rewards` calls functions with a
    sample only."""
    for row in rows if {"gsm8k", "gsm8k_strict"} & set(names) else ():
        answer = str(row.columns.get("answer", ""))
        if gold_number(answer) is None:
            problem = "there is no number"
            if any(character.isdigit() for character in answer):
                problem = f"{one_line(answer[-200:], 60)!r} is not one number"
            where = f"{row.file}, row {row.number}, column answer"
            problems.add(where, problem, "Write it behind ####, or choose other REWARDS")
            return


def is_softmax(row: Sequence[float]) -> bool:
    """Whether `row`, the rewards of its actions, can be a softmax: not negative, with a sum of 1 up to rounding."""
    return min(row) >= 0 and abs(math.fsum(row) - 1) <= 1e-3


def cell_kind(cell: object) -> str:
    """What a reward function may have to tell apart in a column: types, empty cells, and text that is no number."""
    if not isinstance(cell, str):
        return type(cell).__name__ + (" of nothing" if isinstance(cell, (list, dict)) and not cell else "")
    try:
        float(cell)
    except ValueError:
        return "text" if cell.strip() else "empty"
    return "number"


def sample_rows(rows: Sequence[Row]) -> list[Row]:
    """At most MOST_TRIED_ROWS rows, about equally many from each file, and always the same ones. Every kind of cell in
    a column is among them, even if that takes more rows: one empty cell in thousands would end a run in the middle."""
    shuffled = random.Random(0).sample(rows, len(rows))
    files: dict[str, list[int]] = {}
    kinds: set[tuple[str, str]] = set()
    chosen = []
    for n, row in enumerate(shuffled):
        files.setdefault(row.file, []).append(n)
        row_kinds = {(name, cell_kind(cell)) for name, cell in row.columns.items()}
        row_kinds.add(("", f"{len(row.columns)} columns, {len(row.rewards)} actions"))
        if not row_kinds <= kinds:
            kinds |= row_kinds
            chosen.append(n)
    count = max(MOST_TRIED_ROWS, len(chosen))
    chosen += [n for turn in itertools.zip_longest(*files.values()) for n in turn if n is not None]
    return [shuffled[n] for n in list(dict.fromkeys(chosen))[:count]]


def tokenize(texts: Sequence[str], tokenizer: Path | None) -> tuple[list[list[int]], list[str]]:
    """Token ids of completions, and the texts that TRL decodes from them. Without a tokenizer.json the bytes stand in
    for token ids, and the final channel's text for the decoded one."""
    if tokenizer is None:
        return [list(text.encode()) for text in texts], [final_channel(text) or "" for text in texts]
    loaded = open_tokenizer(tokenizer)
    ids = [encoding.ids for encoding in loaded.encode_batch(texts, add_special_tokens=False)]
    return ids, loaded.decode_batch(ids, skip_special_tokens=True)


def try_rewards(specs: Specs, settings: Settings, rows: Sequence[Row], tokenizer: Path | None = None) -> list[Trial]:
    """The weighted rewards of GARBAGE and of every action in a sample of rows, NaN where a function returns None.

    Rows without actions get the answers [0], [1], and the expected one where it is known. Each function is called once,
    as in training, with token ids of `tokenizer`, a tokenizer.json: here a mistake costs a second, in a run an hour.
    Raises RewardError."""
    if not rows:
        return []
    sample = sample_rows(rows)
    by_row = [made_up_answers(row, [name for name, _ in specs]) for row in sample]
    answered = list(itertools.chain.from_iterable(by_row))
    try:
        scores = score_made_up(specs, settings, answered, column_names(rows), tokenizer)
    except RewardError as error:
        tried = f"It was tried before the run on made-up answers to {len(sample)} rows"
        if failing := find_failing(specs, settings, answered, column_names(rows), tokenizer):
            (decoded,) = tokenize([failing[1]], tokenizer)[1]
            tried += f", such as {decoded!r} to {failing[0].id}"
            if "'str'" in str(error) and not failing[0].file.endswith((".json", ".jsonl", ".parquet")):
                tried += ". Cells of a CSV are text: float(...) makes a number of one"
        raise RewardError(f"{error}. {tried}") from error
    weighted = iter([weight * value for (_, weight), value in zip(specs, values, strict=True)] for values in scores)
    return [(row, list(itertools.islice(weighted, len(own)))) for row, own in zip(sample, by_row, strict=True)]


def made_up_answers(row: Row, names: Sequence[str]) -> list[tuple[Row, str]]:
    """The completions that `try_rewards` tries on a row, which stands beside each."""
    # Rows stay unrendered without a tokenizer or a template: their prompt becomes ASSISTANT alone.
    rendered = row if row.prompt else dataclasses.replace(row, prompt=ASSISTANT)
    turns = (*GARBAGE, *(answer_turn(f"[{k}]") for k in range(len(row.rewards) or 2)))
    texts = [completion_of(rendered.prompt, turn) for turn in turns]
    if not row.rewards and (expected := correct_completion(rendered, names)) is not None:
        texts.append(expected)
    return [(rendered, text) for text in texts]


def find_failing(
    specs: Specs,
    settings: Settings,
    answered: Sequence[tuple[Row, str]],
    columns: Sequence[str],
    tokenizer: Path | None,
) -> tuple[Row, str] | None:
    """A completion on which a function fails, found by halving these, on all of which it failed, and its row. None if
    it fails on no single one, as a function that compares answers may."""

    def fails(part: Sequence[tuple[Row, str]]) -> bool:
        try:
            score_made_up(specs, settings, part, columns, tokenizer)
        except RewardError:
            return True
        return False

    while len(answered) > 1:
        middle = len(answered) // 2
        answered = answered[middle:] if fails(answered[middle:]) else answered[:middle]
    return answered[0] if fails(answered) else None


def score_made_up(
    specs: Specs,
    settings: Settings,
    answered: Sequence[tuple[Row, str]],
    columns: Sequence[str],
    tokenizer: Path | None,
) -> list[list[float]]:
    """What each function gives, before its weight, to each of these completions of rows. Raises RewardError."""
    ids, decoded = tokenize([text for _, text in answered], tokenizer)
    completions = [
        read_completion(row, text, plain, len(tokens), False)
        for (row, text), plain, tokens in zip(answered, decoded, ids, strict=True)
    ]
    state = initial_trainer_state(settings.TOTAL_STEPS)
    return score(load_rewards(specs, settings), completions, ids, columns, state)


def answer_lengths(names: Sequence[str], rows: Sequence[Row], tokenizer: Path) -> list[tuple[int, Row]]:
    """The tokens of each row's correct answer, without any reasoning, where it is known."""
    answers = [(text, row) for row in rows if (text := correct_completion(row, names))]
    lengths = count_tokens(tokenizer, list(dict.fromkeys(text for text, _ in answers)))
    return [(lengths[text], row) for text, row in answers]


def longest_answer_warning(
    settings: Settings, names: Sequence[str], rows: Sequence[Row], tokenizer: Path | None
) -> str | None:
    """A warning if a row's correct answer, without any reasoning, has more tokens than MAX_COMPLETION_LEN, or None."""
    if tokenizer is None or settings.DIRECT_ANSWERS:
        return None
    lengths = answer_lengths(names, rows, tokenizer)
    too_long = [length for length, _ in lengths if length > settings.MAX_COMPLETION_LEN]
    if not too_long:
        return None
    longest, row = max(lengths, key=itemgetter(0))
    return (
        f"MAX_COMPLETION_LEN={settings.MAX_COMPLETION_LEN}: the answers of {len(too_long)} of {len(rows)} rows have "
        f"more tokens and are cut, even without reasoning; the longest has {longest} ({row.file}, row {row.number}). "
        f"Set MAX_COMPLETION_LEN={longest} at least"
    )


def correct_completion(row: Row, names: Sequence[str]) -> str | None:
    """The shortest completion that these reward functions can take for correct; of `[k]` that with the last action.
    None if it is unknown: of an own function only the column `answer` may tell it."""
    if row.rewards and any(name == "format" or is_by_action(name) for name in names):
        return completion_of(row.prompt, answer_turn(f"[{len(row.rewards) - 1}]"))
    if {"gsm8k", "gsm8k_strict"} & set(names):
        number = gold_number(str(row.columns.get("answer", "")))
        mark = "#### " if "gsm8k_strict" in names else ""
        return None if number is None else completion_of(row.prompt, answer_turn(f"{mark}{number}"))
    try:
        return answer_of(row) if row.columns.get("answer") else None
    except ValueError:  # Prompt and answer open different channels.
        return None


def expected_answer_warning(trials: Sequence[Trial]) -> str | None:
    """A warning if in no row of `trials` the expected answer earns more than an answer that cannot be read, or None."""
    expected = [answers for row, answers in trials if not row.rewards and len(answers) > len(GARBAGE) + 2]
    if not expected or any(not total(answers[-1]) <= max(map(total, answers[: len(GARBAGE)])) for answers in expected):
        return None
    return (
        f"REWARDS: in none of the {len(expected)} rows that were tried the text of its column `answer` earns more than "
        "no answer at all. Correct the function, unless it looks for something else"
    )


def check_garbage(specs: Specs, trials: Sequence[Trial], settings: Settings, problems: Problems) -> str | None:
    """Checks that an unreadable answer earns less than a row's worst action, on average over the rows of `trials`.

    Otherwise it adds a problem, or returns a warning in two cases: the user set INVALID_REWARD, or all actions of a row
    earn the same, because REWARDS do not depend on them. An answer for which all functions return None counts as the
    mean of the row's actions, because it gets no advantage. Rows without actions yield a warning if no answer gets a
    number, or if the expected answers earn no more than none; but none if only [0] and [1] earn the same: these are
    rarely right."""
    worst: list[float] = []
    all_alike = True  # whether all actions of each row earn the same
    # For each text of GARBAGE, by row: its reward, and that of each function.
    garbage: list[list[tuple[float, Sequence[float]]]] = [[] for _ in GARBAGE]
    for row, answers in trials:
        earned = [value for value in map(total, answers[len(GARBAGE) :]) if not math.isnan(value)]
        if row.rewards and earned:
            worst.append(min(earned))
            all_alike = all_alike and max(earned) == min(earned)
            for rewarded, scores in zip(garbage, answers, strict=False):
                rewarded.append((fmean(earned) if math.isnan(total(scores)) else total(scores), scores))
    if not worst:
        if any(row.rewards for row, _ in trials):
            problem = "no function rewards any answer to the rows that were tried, [0] and all other actions included"
            fix = "Return numbers; None leaves an answer out, and there is nothing to learn from"
            problems.add("REWARDS", problem, fix)
        elif trials and all(math.isnan(total(scores)) for _, answers in trials for scores in answers):
            tried = f"no made-up answer to the {len(trials)} rows that were tried got a number, only None or nan"
            return f"REWARDS: {tried}. If real answers get none either, nothing is learned"
        return expected_answer_warning(trials)
    best_paid = max(garbage, key=lambda rewarded: fmean(reward for reward, _ in rewarded))
    garbage_reward, worst_reward = fmean(reward for reward, _ in best_paid), fmean(worst)
    if garbage_reward < worst_reward:
        return None
    means = [total(scores) / len(best_paid) for scores in zip(*(scores for _, scores in best_paid), strict=True)]
    parts = ", ".join(f"{name} {value:.3g}" for (name, _), value in zip(specs, means, strict=True))
    problem = (
        f"an unreadable answer earns {garbage_reward:.3g} on average ({parts}), a row's worst action {worst_reward:.3g}"
    )
    if settings.INVALID_REWARD is not None:
        return f"INVALID_REWARD={show(settings.INVALID_REWARD)}: {problem}, so a run may learn garbage"
    if all_alike:
        fix = "Add action or regret to REWARDS if [k] is the answer that is wanted"
        return f"REWARDS: {problem}, and all actions of a row earn the same: a run may learn to answer none. {fix}"
    own = " and ".join(name for name, _ in specs if name not in rewards.ACTION_REWARDS)
    fix = f"Let {own} return less where rewards.parse_action finds no action" if own else "Give actions weights above 0"
    problems.add("REWARDS", f"{problem}, so a run would learn garbage", f"{fix}, or set INVALID_REWARD")
    return None
