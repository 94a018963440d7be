# SPDX-License-Identifier: Apache-2.0
"""What a run would do with the user's rows, and what it would take, as text: `--check` prints it below the plan."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from statistics import fmean, quantiles

from grpo.common import one_line, printable
from grpo.data.files import Row, column_names
from grpo.data.heldout import group_of
from grpo.data.prompts import count_tokens
from grpo.figures.text import plain
from grpo.harmony import answer_turn, completion_of
from grpo.plan.cards import LONG, NAMES, evaluation_seconds, find_card, knows_times, step_seconds, step_times
from grpo.preflight.resolve import ResolvedRun
from grpo.reward.calling import RewardError
from grpo.reward.reward_checks import GARBAGE, answer_lengths, correct_completion, score_made_up

MOST_COUNTED = 1000  # Prompts whose tokens are counted once more for the quantiles.
MOST_LISTED = 8  # Held-out groups that are named, actions in the table.
MOST_PROMPT = 3000  # Characters of the prompt that is shown.
Line = tuple[str, str]


def preview(resolved: ResolvedRun) -> str:
    """The preview of a run; what cannot be told after a problem is left out."""
    lines = [*row_lines(resolved), *episode_lines(resolved), *answer_lines(resolved), *time_lines(resolved)]
    return "\n".join(["", "Preview", *(f"  {title:<16} {text}" for title, text in lines)])


def row_lines(resolved: ResolvedRun) -> Iterator[Line]:
    """Rows: one prompt as the model gets it, lengths, rewards by action, and days or prompts."""
    rows, s = resolved.rows, resolved.settings
    if not rows:
        return
    if resolved.longest_prompt and resolved.files and resolved.files.tokenizer:
        every = list(dict.fromkeys(row.prompt for row in rows))
        sample = list(dict.fromkeys([rows[0].prompt, *every[:: -(-len(every) // MOST_COUNTED)]]))
        lengths = count_tokens(resolved.files.tokenizer, sample)
        shown = "before the text that its reset adds" if s.ENVIRONMENT else "as the model gets it"
        yield "a prompt", f"{rows[0].id}, {lengths[rows[0].prompt]} tokens, {shown}:"
        yield from (("", f"| {line}") for line in shown_prompt(rows[0].prompt))
        low, middle, high = deciles(list(lengths.values()))
        longest = f"the longest {resolved.longest_prompt} of MAX_PROMPT_LEN={s.MAX_PROMPT_LEN}"
        if s.ENVIRONMENT:
            longest = f"resets may add text up to MAX_PROMPT_LEN={s.MAX_PROMPT_LEN}"
        spread = f"a tenth up to {low:.0f} tokens, half up to {middle:.0f}, nine tenths up to {high:.0f}"
        yield "prompt lengths", f"{spread}; {longest}"
    yield from reward_lines(rows)
    yield from group_lines(rows, resolved.eval_rows, bool(s.ENVIRONMENT))


def shown_prompt(prompt: str) -> list[str]:
    """A prompt as lines for a terminal, without the middle of a long one."""
    half = MOST_PROMPT // 2
    if len(prompt) > MOST_PROMPT:
        prompt = f"{prompt[:half]}\n[... {len(prompt) - 2 * half:,} characters ...]\n{prompt[-half:]}"
    return [printable(line) for line in prompt.split("\n") if line]


def deciles(values: Sequence[int]) -> tuple[float, float, float]:
    """The first decile, the median and the last decile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[4], cuts[8]


def reward_lines(rows: Sequence[Row]) -> Iterator[Line]:
    """For each action its mean, least and largest reward, and how often it is its row's best."""
    rewarded = [row.rewards for row in rows if row.rewards]
    if not rewarded:
        return
    best = Counter(k for row in rewarded for k, reward in enumerate(row) if reward == max(row))
    yield "rewards", f"{'action':>8} {'mean':>10} {'least':>10} {'largest':>10}   best in"
    actions = max(map(len, rewarded))
    for k in range(min(actions, MOST_LISTED)):
        column = [row[k] for row in rewarded if k < len(row)]
        figures = " ".join(f"{plain(value):>10}" for value in (fmean(column), min(column), max(column)))
        yield "", f"{f'[{k}]':>8} {figures}   {best[k] / len(rewarded):.0%} of {len(rewarded)} rows"
    if actions > MOST_LISTED:
        yield "", f"and {actions - MOST_LISTED} more actions"


def group_lines(rows: Sequence[Row], eval_rows: Sequence[Row], episodes: bool) -> Iterator[Line]:
    """Rows by day, or by prompt, and which of these are held out; the plan's line `held out` says why and what is left
    out. With `episodes` rows of one prompt differ by their columns."""
    trained, held = (Counter(group_of(row, episodes) for row in part) for part in (rows, eval_rows))
    kinds = " and ".join(sorted({f"{kind}s" for kind, _ in trained}))
    least, most = min(trained.values()), max(trained.values())
    each = f"{least} to {most} rows" if least < most else f"{least} row{'s' if least > 1 else ''}"
    yield "trained on", f"{len(trained)} {kinds} with {each} each"
    prompts = {group_of(row, episodes): one_line(row.messages[-1][1], 50) for row in eval_rows}
    names = [f"{key[1] if key[0] == 'day' else prompts[key]} ({count})" for key, count in sorted(held.items())]
    rest = f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    if names:
        yield "evaluated", f"{', '.join(names[:MOST_LISTED])}{rest}; in brackets rows"


def episode_lines(resolved: ResolvedRun) -> Iterator[Line]:
    """The episode that the checks have played with made-up calls: what its reset adds to the prompt, what calls return
    and earn."""
    if resolved.trial is None:
        return
    yield "an episode", f"{resolved.trial.row.id}, with made-up calls:"
    for request, text in resolved.trial.transcript:
        yield "", f"{request}{':' if text else ' returns nothing'}"
        yield from (("", f"| {line}") for line in shown_prompt(text))
    if (total := resolved.trial.episode.total()) is not None:
        yield "", f"earned: environment {plain(total)}"


def answer_lines(resolved: ResolvedRun) -> Iterator[Line]:
    """The longest answer that is expected, and three made-up answers to the first row with what they earn."""
    rows, s, files = resolved.rows, resolved.settings, resolved.files
    tokenizer = files.tokenizer if files and resolved.longest_prompt else None
    names = [name for name, _ in resolved.reward_specs]
    if not rows or not names or any(problem.startswith("REWARDS") for problem in resolved.problems):
        return
    if tokenizer and not s.DIRECT_ANSWERS and (lengths := answer_lengths(names, rows, tokenizer)):
        tokens, row = max(lengths, key=itemgetter(0))
        room = f"MAX_COMPLETION_LEN={s.MAX_COMPLETION_LEN} has room for {s.MAX_COMPLETION_LEN - tokens} of reasoning"
        yield "longest answer", f"{tokens} tokens without reasoning ({row.id}); {room}"
    answers = made_up_answers(rows[0], names)
    try:
        answered = [(rows[0], text) for _, text in answers]
        scores = score_made_up(resolved.reward_specs, s, answered, column_names(rows), tokenizer)
    except RewardError:
        return  # The checks have reported it.
    yield "made-up answers", f"to {rows[0].id}, and what they earn before weights:"
    for (meaning, _), values in zip(answers, scores, strict=True):
        earned = ", ".join(f"{name} {plain(value)}" for name, value in zip(names, values, strict=True))
        yield "", f"{meaning}: {earned}"


def made_up_answers(row: Row, names: Sequence[str]) -> list[tuple[str, str]]:
    """(meaning, completion) of three answers to a row: a good and a bad one, and one that is cut off."""
    if row.rewards:
        ranked = sorted(range(len(row.rewards)), key=row.rewards.__getitem__)
        chosen = {"its best action": ranked[-1], "its worst action": ranked[0]}
        turns = {f"[{k}], {meaning}": answer_turn(f"[{k}]") for meaning, k in chosen.items()}
    else:
        turns = {text: answer_turn(text) for text in ("[0]", "I do not know.")}
    turns["reasoning without an answer"] = GARBAGE[0]
    answers = [(meaning, completion_of(row.prompt, turn)) for meaning, turn in turns.items()]
    if not row.rewards and (right := correct_completion(row, names)):
        answers[0] = ("the expected answer", right)
    return answers


def time_lines(resolved: ResolvedRun) -> Iterator[Line]:
    """What the rest of a run takes on a known card: seconds a step, hours, and money where PRICE_PER_HOUR is set. How
    long the completions will be is not known, so both ends of a range are told."""
    s, machine, name = resolved.settings, resolved.machine, find_card(resolved.machine.gpu)
    if not name or not resolved.plan:
        return
    engine = resolved.plan.engine
    if not knows_times(s, resolved.config):
        known = "sampled completions by vLLM with CUDA graphs were measured, no others"
        yield "time", f"not known: steps of gpt-oss-20b with {known}"
        return
    times, source = step_times(name)
    lengths = ((s.MAX_COMPLETION_LEN + 1) // 2, s.MAX_COMPLETION_LEN)
    of_one = dataclasses.replace(s, PROMPTS_PER_STEP=-(-s.PROMPTS_PER_STEP // machine.ranks))  # of one process
    seconds = [step_seconds(times, of_one, length, engine) for length in lengths]
    ends = [f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" for value in seconds]
    if s.MAX_COMPLETION_LEN > LONG:
        source = f"beyond {LONG:,} tokens ESTIMATED, {source}"
    if machine.gpu_free < MOST_FREE * NAMES[name].free:
        source += f"; with {NAMES[name].free:g} GiB free, less takes longer"
    cards = f"the card {name}" if machine.ranks == 1 else f"{machine.ranks} cards {name}"
    range_text = f"{ends[0]} if completions have {lengths[0]:,} tokens, {ends[1]} at {lengths[1]:,}"
    yield "step time", f"{range_text}, on {cards} ({source})"
    count = 0 if resolved.exact else -(-len(resolved.eval_rows) // machine.ranks)
    evaluating = [evaluation_seconds(times, s, count, length, engine) for length in lengths]
    steps = max(0, s.TOTAL_STEPS - resolved.state.step)
    training = [steps * value for value in seconds]
    hours = [(a + b + START_SECONDS) / 3600 for a, b in zip(training, evaluating, strict=True)]
    share = evaluating[1] / 3600 / hours[1]
    text = f"{hours[0]:.1f} to {hours[1]:.1f} for {steps} steps; held-out rows take {share:.0%} of it"
    if resolved.closed_loop.runs:
        text += ", the closed loop comes besides (docs/evaluation.md#closed-loop)"
    if s.ENVIRONMENT:
        text += ", the environment's own time comes besides"
    yield "hours", text
    if s.PRICE_PER_HOUR:
        cost = [s.PRICE_PER_HOUR * value for value in hours]
        price = f"at PRICE_PER_HOUR={s.PRICE_PER_HOUR:g}, besides installing and downloads"
        yield "money", f"{cost[0]:.2f} to {cost[1]:.2f} {price}"
    else:
        yield "money", "set PRICE_PER_HOUR to what the machine costs, in any currency"


START_SECONDS = 180  # Loading the weights and vLLM's start with empty caches.
MOST_FREE = 0.9  # With a smaller share of a card's memory a step takes longer than the measured ones.
