# SPDX-License-Identifier: Apache-2.0
"""What a run writes while it trains: metrics.csv and completions.csv row by row, training.log, warnings,
and how long it still takes."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import logging
import math
import os
import select
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from grpo.data.scoring import Completion, completion_rates, is_answer
from grpo.run.durable import require_regular
from grpo.run.layout import LOGS
from grpo.settings import log
from grpo.settings_table import TASK_FIGURES
from rewards import best_action

COLUMNS = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
METRICS: dict[
    str, list[str]
] = {}  # Unit and meaning of each column, in order; those of the tasks' simulators included.
for name, facts in COLUMNS["metrics.csv"].items():
    METRICS[name] = facts
    if name == "heldout_reward":
        METRICS |= {figure: [spec["unit"], spec["meaning"]] for figure, spec in TASK_FIGURES.items()}
COMPLETIONS: dict[str, list[str]] = COLUMNS["completions.csv"]
EVALUATED = ("heldout_reward", *TASK_FIGURES)  # These are empty in most steps.
GENERATED = ("parse_rate", "clipped_ratio", "tokens_mean", "tokens_max")  # These are of generated completions.
PROMPT = "prompt"  # The column of completions.csv that LOG_PROMPTS=1 adds: the rendered prompt.
Cell = str | float | None  # An int is a float to a type checker.


def function_column(name: str) -> str:
    """The column of a reward function in both files, by its name in the logs."""
    return f"reward/{name}"


def read_header(path: Path) -> list[str]:
    """The columns of a log; none where it is empty."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return next(csv.reader(file), [])


def metric_columns(path: Path) -> list[str]:
    """The columns of METRICS that metrics.csv at `path` has, or will have where it is not there yet: a run continues
    without the figures of a task that was added after it began."""
    header = read_header(path) if path.exists() else []
    return [name for name in METRICS if not header or name in header or name not in TASK_FIGURES]


def has_known_columns(path: Path) -> bool:
    """Whether a log has the columns that this version writes. Those that settings add stand behind them."""
    known = metric_columns(path) if path.name == LOGS[0] else list(COMPLETIONS)
    return read_header(path)[: len(known)] == known


class CsvLog:
    """A CSV that grows row by row; each row is flushed, so that a killed run keeps what it had. Raises ValueError where
    the file is there with other columns."""

    def __init__(self, path: Path, columns: Iterable[str]):
        self.columns = list(columns)
        self.file = path.open("a+b")
        self.file.seek(0)
        self.digest = hashlib.file_digest(self.file, "sha256")  # `write` continues it.
        if not self.file.tell():
            self.write([{name: name for name in self.columns}])
        elif (header := read_header(path)) != self.columns:
            raise ValueError(f"{path} has the columns {', '.join(header)}, and this run has {', '.join(self.columns)}")

    def write(self, rows: Iterable[Mapping[str, Cell]]) -> None:
        """Appends rows. Those with a carriage return are quoted whole: Python's writer leaves a lone one unquoted, and
        the row would read back as two."""
        text = io.StringIO(newline="")
        plain = csv.writer(text, lineterminator="\n")
        quoted = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
        for row in rows:
            cells = [row[name] for name in self.columns]
            (quoted if any("\r" in str(cell) for cell in cells) else plain).writerow(cells)
        content = text.getvalue().encode()
        self.file.write(content)
        self.file.flush()
        self.digest.update(content)

    def sync(self) -> tuple[int, str]:
        """Waits until the log is on the disk; returns how many bytes it holds, and their SHA-256."""
        os.fsync(self.file.fileno())
        return self.file.tell(), self.digest.hexdigest()


BOX_WIDTH = 100  # A wider box breaks in a usual terminal.
WARN_EVERY = 10  # Steps between two warnings about the same thing.
EQUAL_STEPS = 5  # Steps without a difference of rewards after which the run warns that it learns nothing.
LEAST_GROUPS = 5  # Groups with both kinds of answers that `garbage_warning` needs.
UNLEARNED = (
    "parse rate fell to {:.2f} over the last 5 steps, its best was {:.2f}: the answer format is being unlearned. "
    "Lower LEARNING_RATE, leave INVALID_REWARD at auto, or raise MAX_COMPLETION_LEN if the clipped ratio is high"
)
UNPARSED = (
    "only {:.2f} of the answers parse: most of the reward signal is lost. Look at completions.csv; a high clipped "
    "ratio asks for a larger MAX_COMPLETION_LEN or a lower REASONING_EFFORT"
)
NO_REWARD = (
    "the reward is nan: every completion of this step was left out, so it taught nothing. Look at completions.csv; set "
    "INVALID_REWARD to auto, or fix the function in REWARDS that returns nan or None"
)
GARBAGE_PAYS = (
    "Answers that cannot be read earned {:.3g} more than the others to their prompts, on average of {} groups of the "
    "last 10 steps: garbage is being learned. Let REWARDS pay less where rewards.final_channel finds no text"
)
EQUAL_REWARDS = (
    "all completions of each prompt got the same reward in {}: nothing {} learned. Look at completions.csv: where they "
    "read alike, raise TEMPERATURE or NUM_GENERATIONS; where they do not, REWARDS or the reward columns of DATA do not "
    "tell them apart"
)
LOST = (
    "Nothing was learned for {} steps, and nothing will be: no answer can be read any more, and those that cannot all "
    "earn the same. End this run, and start another with a lower LEARNING_RATE; INIT_ADAPTER takes what is in best/"
)


def banner_text(text: str) -> str:
    """A warning in a box, so that a degraded run does not look like a normal one."""
    lines = textwrap.wrap(text, BOX_WIDTH - 4, break_long_words=False, break_on_hyphens=False) or [""]
    width = max(map(len, lines))
    bar = "=" * (width + 4)
    return "\n".join(["", bar, *(f"| {line:<{width}} |" for line in lines), bar])


def parse_rate_warning(history: Sequence[float]) -> str | None:
    """A sentence when answers stop parsing, by the parse rate of each step: the last 5 steps against the best 5 steps
    so far. None while all is well."""
    means = [sum(history[i : i + 5]) / 5 for i in range(len(history) - 4)]
    if means and means[-1] < max(means) - 0.1:
        return UNLEARNED.format(means[-1], max(means))
    return UNPARSED.format(means[0]) if len(means) == 1 and means[0] < 0.5 else None


Teaching = tuple[float, float, float]  # Mean reward, zero_std_fraction and parse rate of a step.


def read_teaching(row: Mapping[str, Cell]) -> Teaching:
    """What `reward_warning` needs of a row of metrics.csv."""
    reward, zero_std_fraction, parse_rate = (
        float(row[name] or "nan") for name in ("reward", "zero_std_fraction", "parse_rate")
    )
    return reward, zero_std_fraction, parse_rate


def reward_warning(history: Sequence[Teaching], total_steps: int = 0) -> str | None:
    """A sentence when steps teach nothing: the last one has no reward, or the last 5 (all in a run of fewer
    `total_steps`) have none that differ inside a group. It is boxed once a run that could answer has not for 10 such
    steps. None while all is well."""
    if history and math.isnan(history[-1][0]):
        return NO_REWARD
    equal = next((i for i, (_, share, _) in enumerate(reversed(history)) if share < 1), len(history))
    answered, recently = (any(rate for *_, rate in steps) for steps in (history, history[-WARN_EVERY:]))
    if equal >= WARN_EVERY and answered and not recently:
        return banner_text(LOST.format(equal))
    if equal >= EQUAL_STEPS:
        return EQUAL_REWARDS.format(f"the last {EQUAL_STEPS} steps", "is")
    if equal and equal == len(history) == total_steps:
        return EQUAL_REWARDS.format("every step of this run", "was")
    return None


def garbage_gains(completions: Sequence[Completion], totals: Sequence[float]) -> list[float]:
    """By how much the answers of a step that cannot be read out-earn the others to the same prompt: the difference of
    their mean rewards in each group that holds both. A reward of NaN does not count: that answer was left out."""
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for completion, reward in zip(completions, totals, strict=True):
        if not math.isnan(reward):
            groups.setdefault(completion.row.id, ([], []))[is_answer(completion)].append(reward)
    means = [(fmean(garbage), fmean(answers)) for garbage, answers in groups.values() if garbage and answers]
    return [0.0 if math.isclose(garbage, answers) else garbage - answers for garbage, answers in means]


def garbage_warning(history: Sequence[Sequence[float]]) -> str | None:
    """A sentence when answers that cannot be read earned more than the others of their groups over the last 10 steps,
    by more than chance: three standard errors. `history` holds the `garbage_gains` of each step."""
    gains = [gain for step in history[-WARN_EVERY:] for gain in step]
    if len(history) < WARN_EVERY or len(gains) < LEAST_GROUPS:
        return None
    mean, error = fmean(gains), stdev(gains) / math.sqrt(len(gains))
    return GARBAGE_PAYS.format(mean, len(gains)) if mean > 3 * error else None


RECENT = 10  # steps that the pace is taken from
LEAST = 3  # steps before the pace is known: the first ones also compile and load
UNKNOWN = f"time left not known before step {LEAST}"


class Pace:
    """The times of a run of `total` steps, from the rows of its metrics.csv, evaluated every `eval_steps` steps (0:
    only before and after)."""

    def __init__(self, total: int, eval_steps: int, rows: Iterable[Mapping[str, Cell]] = ()):
        self.total, self.eval_steps = total, eval_steps
        self.step_s: list[float] = []
        self.eval_s: list[float] = []
        for row in rows:
            self.add(row)

    @classmethod
    def read(cls, metrics: Path, total: int, eval_steps: int) -> Pace:
        """The pace by a metrics.csv, which may be missing."""
        with contextlib.suppress(OSError, ValueError, csv.Error):
            require_regular(metrics)
            with metrics.open(newline="", encoding="utf-8", errors="replace") as file:
                return cls(total, eval_steps, csv.DictReader(file))
        return cls(total, eval_steps)

    def add(self, row: Mapping[str, Cell]) -> None:
        """Adds the times of a row, text or numbers; an empty cell, None and what is not finite do not count."""
        for column, seconds in (("step_s", self.step_s), ("eval_s", self.eval_s)):
            with contextlib.suppress(ValueError):
                if math.isfinite(value := float(row.get(column) or "nan")):
                    seconds.append(value)

    def evaluations_left(self, step: int) -> int:
        """How many evaluations follow `step`, the last one included."""
        return 1 + ((self.total - 1) // self.eval_steps - step // self.eval_steps if self.eval_steps else 0)

    def seconds_left(self, step: int) -> float:
        """Seconds from the end of `step` to that of the last evaluation: steps at the median of the last RECENT,
        evaluations like the last one (none while none is known). NaN before LEAST steps."""
        if len(self.step_s) < LEAST:
            return math.nan
        return (self.total - step) * median(self.step_s[-RECENT:]) + self.evaluations_left(step) * sum(self.eval_s[-1:])

    def left(self, step: int, now: float | None = None) -> str:
        """`about 1 h 40 min left, until 17:20`, by this machine's clock; empty where it is not known."""
        if math.isnan(seconds := self.seconds_left(step)):
            return ""
        now = time.time() if now is None else now
        hours, minutes = divmod(round(seconds / 60), 60)
        duration = f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
        start, end = time.localtime(now), time.localtime(now + seconds)
        clock = time.strftime("%H:%M" if start[:3] == end[:3] else "%a %d %b %H:%M", end)
        return f"about {duration} left, until {clock}"


class RunLog:
    """The logs of OUTPUT_DIR: a step's completions and metrics, its line in training.log, and a warning where answers
    stop parsing or rewards stop teaching. A resumed run goes on with the history in metrics.csv.

    functions: the reward functions' names; prompts: whether completions.csv holds the prompts; direct: whether one
    token of each completion is chosen (DIRECT_ANSWERS), so that nothing is said about their form and length."""

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        eval_steps: int = 0,
        functions: Sequence[str] = (),
        prompts: bool = False,
        direct: bool = False,
    ):
        self.direct = direct
        self.function_columns = [function_column(name) for name in functions]
        prompt_column = [PROMPT] if prompts else []
        metrics, completions = (folder / name for name in LOGS)
        self.metrics = CsvLog(metrics, [*metric_columns(metrics), *self.function_columns])
        self.completions = CsvLog(completions, [*COMPLETIONS, *prompt_column, *self.function_columns])
        self.total_steps = total_steps
        self.rates: dict[str, float | None] = {}  # Of the last completions, with the mean of each function.
        with metrics.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.pace = Pace(total_steps, eval_steps, rows)
        self.reward_history = [read_teaching(row) for row in rows]
        self.garbage_history: list[list[float]] = []
        self.warned_at: dict[str, int] = {}
        self.garbage_pays = False

    def write_completions(
        self,
        step: int,
        completions: Sequence[Completion],
        totals: Sequence[float],
        scores: Sequence[Sequence[float]],
        zero_std_fraction: float,
        expected_share: float | None = None,
    ) -> None:
        """Writes a step's completions, each with its weighted reward of `totals` (N,) and what each function gave it,
        `scores` (N, F), and remembers their rates. `zero_std_fraction`: the share of their groups that teach nothing;
        `expected_share`: the share of them that learns from its expected reward, None without EXPECTED_REWARD."""
        self.completions.write(
            {
                "step": step,
                "prompt_id": completion.row.id,
                "completion": completion.text,
                "parsed_action": completion.action,
                "reward": f"{total:.6g}",
                "best_action": best_action(completion.row.rewards) if completion.row.rewards else None,
                "tokens": None if self.direct else completion.tokens,
                "truncated": None if self.direct else int(completion.truncated),
                PROMPT: completion.row.prompt,
                **{name: f"{score:.6g}" for name, score in zip(self.function_columns, by_function, strict=True)},
            }
            for completion, total, by_function in zip(completions, totals, scores, strict=True)
        )
        shares = {"zero_std_fraction": zero_std_fraction, "expected_share": expected_share}
        self.rates = {**completion_rates(completions), **shares}
        if self.direct:
            self.rates |= dict.fromkeys(GENERATED)
        for name, values in zip(self.function_columns, zip(*scores, strict=True), strict=True):
            kept = [value for value in values if not math.isnan(value)]
            self.rates[name] = fmean(kept) if kept else math.nan
        self.garbage_history.append(garbage_gains(completions, totals))

    def sync(self) -> dict[str, tuple[int, str]]:
        """Waits until both CSVs are on the disk; returns their ends by name, for `finish_checkpoint`."""
        return dict(zip(LOGS, (self.metrics.sync(), self.completions.sync()), strict=True))

    def write_step(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Writes a step's row: `figures` by column of METRICS; those of its completions are known already."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row: dict[str, Cell] = {"step": step, "time": now, **self.rates, **figures}
        row |= {name: f"{value:.6g}" for name, value in row.items() if isinstance(value, float)}
        self.metrics.write([row])
        self.pace.add(row)
        left = self.pace.left(step) if step < self.total_steps else ""
        names = ("parse_rate", "clipped_ratio", "tokens_mean", "step_s", "rollout_s", "learn_s")
        parse_rate, clipped, tokens, step_s, rollout_s, learn_s = (float(row[name] or "nan") for name in names)
        form = f", parse rate {parse_rate:.2f}, clipped {clipped:.2f}, {tokens:.0f} tokens"
        first = "choose" if self.direct else "rollout"
        log.info(
            "step %d/%d: reward %s%s, %.1f s (%s %.1f, learn %.1f)%s",
            step,
            self.total_steps,
            row["reward"] or "nan",
            "" if self.direct else form,
            step_s,
            first,
            rollout_s,
            learn_s,
            f"; {left}" if left else "",
        )
        self.reward_history.append(read_teaching(row))
        warnings = {
            "parse rate": parse_rate_warning([parse_rate for *_, parse_rate in self.reward_history]),
            "reward": reward_warning(self.reward_history, self.total_steps),
        }
        for name, warning in warnings.items():
            if warning and step - self.warned_at.get(name, -WARN_EVERY) >= WARN_EVERY:
                self.warned_at[name] = step
                log.warning(warning)
        if not self.garbage_pays and (garbage := garbage_warning(self.garbage_history)):
            self.garbage_pays = True
            log.warning(banner_text(garbage))


def is_unread(descriptor: int) -> bool:
    """Whether nobody can read any more what is written there."""
    poll = select.poll()
    poll.register(descriptor, 0)  # Errors and hang-ups are always reported.
    return bool(poll.poll(0))


def detach_closed_terminal() -> None:
    """Sends stdout and stderr to nowhere where nobody reads them any more (a lost SSH session, a `| tee` that ended):
    writing there raises OSError, which must not end a run or change its exit code."""
    for stream in (1, 2):
        if is_unread(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class TerminalHandler(logging.StreamHandler):
    """Writes to stdout for as long as somebody reads that."""

    def handleError(self, record: logging.LogRecord) -> None:
        detach_closed_terminal()  # training.log has the message.


def start_logging(folder: Path) -> None:
    """Logs to the terminal and to training.log; libraries' messages and Python's warnings go there as well."""
    formatter = logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    terminal, file = TerminalHandler(sys.stdout), logging.FileHandler(folder / "training.log", encoding="utf-8")
    terminal.addFilter(lambda record: not hasattr(record, "file_only"))
    for handler in (terminal, file):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    logging.raiseExceptions = False  # On a full disk what is written for the run itself fails, and says so once.
    log.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # Every run aligns the model's special tokens with the tokenizer's.
    aligned = "The tokenizer has new PAD/BOS/EOS tokens"
    logging.getLogger("transformers.trainer_utils").addFilter(lambda record: aligned not in record.getMessage())
