# SPDX-License-Identifier: Apache-2.0
"""Logs that a run writes while it trains: metrics.csv, completions.csv, training.log with warnings and time left."""

import contextlib
import csv
import hashlib
import io
import json
import logging
import math
import os
import sys
import textwrap
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from grpo.common import log, printable, text_of
from grpo.output.layout import LOGS, TRAINING_LOG
from grpo.output.terminal import detach_closed_terminal, lasting
from grpo.reward.episode import Episode
from grpo.reward.scoring import Completion, completion_rates
from grpo.settings.table import TASK_FIGURES, TASK_FILES, Settings
from rewards import best_action

COLUMNS = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
# Unit and meaning of each column, in order. The columns of the tasks' simulators come after heldout_reward.
METRICS: dict[str, list[str]] = {}
for name, row in COLUMNS["metrics.csv"].items():
    METRICS[name] = row[:2]
    if name == "heldout_reward":
        METRICS |= {figure: [spec["unit"], spec["meaning"]] for figure, spec in TASK_FIGURES.items()}
# Columns of metrics.csv that hold TRL's own metrics -> TRL's names of these.
TRL_FIGURES: dict[str, str] = {name: row[2] for name, row in COLUMNS["metrics.csv"].items() if len(row) == 3}
COMPLETIONS: dict[str, list[str]] = COLUMNS["completions.csv"]
EPISODE_METRICS: dict[str, list[str]] = COLUMNS["metrics.csv of episodes"]  # Behind the others, with ENVIRONMENT.
EPISODE_COLUMNS: dict[str, list[str]] = COLUMNS["completions.csv of episodes"]
EVALUATED = ("heldout_reward", *TASK_FIGURES)  # These are empty in most steps.
GENERATED = ("parse_rate", "clipped_ratio", "tokens_mean", "tokens_max")  # These are empty with DIRECT_ANSWERS.
PROMPT = "prompt"  # The column of completions.csv that LOG_PROMPTS=1 adds: the rendered prompt.
# With a reward function of the user's own, the last column of metrics.csv and of completions.csv: what it gave to
# TRL's functions of these names, as a JSON object. A column for each name might be the run's own, and overwrite it.
LOG_METRIC, LOG_EXTRA = "log_metric", "log_extra"
Cell = str | float | None  # An int is a float to a type checker.


def function_column(name: str) -> str:
    return f"reward/{name}"


class FunctionLog:
    """What reward functions log about `count` completions by TRL's `log_metric` and `log_extra`."""

    def __init__(self, count: int):
        self.count = count
        self.values: dict[str, list[float]] = {}
        self.extra: list[dict[str, object]] = [{} for _ in range(count)]

    def log_metric(self, name: str, value: float) -> None:
        """Takes a number of the whole step; the mean is logged if there are several of a name, as in TRL."""
        self.values.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Iterable[object]) -> None:
        """Takes a value for each completion. Raises ValueError if there are more or fewer."""
        values = list(values)
        if len(values) != self.count:
            raise ValueError(f"log_extra({column!r}) has {len(values)} values for {self.count} completions")
        for completion, value in zip(self.extra, values, strict=True):
            completion[column] = value

    @property
    def metrics(self) -> dict[str, float]:
        return {name: fmean(values) for name, values in self.values.items()}


def as_json(logged: Mapping[str, object]) -> str | None:
    """What was logged as a JSON object, None if nothing was; arrays as lists, other values that JSON lacks as text."""

    def plain(value: object) -> object:
        return value.tolist() if hasattr(value, "tolist") else text_of(value)

    def cell(value: object) -> object:
        try:
            return json.loads(json.dumps(value, default=plain))
        except (TypeError, ValueError):  # Such as a key that is a tuple, or a list that holds itself.
            return text_of(value)

    cells = {str(name): cell(value) for name, value in logged.items()}
    return json.dumps(cells, ensure_ascii=False) if cells else None


def tracker_figures(row: Mapping[str, Cell], taken: Collection[str]) -> dict[str, float]:
    """The numbers of a `row` of metrics.csv that trackers get, and what reward functions logged, under other names
    where those are `taken`. Names with a slash are left out: TRL logs means of reward functions itself."""
    logged: dict[str, float] = json.loads(str(row.get(LOG_METRIC) or "{}"))
    names = {*METRICS, *TRL_FIGURES.values(), *taken}
    figures = {f"{LOG_METRIC}/{name}" if name in names else name: value for name, value in logged.items()}
    return figures | {n: value for n, value in row.items() if isinstance(value, (int, float)) and "/" not in n}


def read_header(path: Path) -> list[str]:
    """The names of a CSV's columns; none if it is empty."""
    with path.open(newline="", encoding="utf-8", errors="replace") as text:
        return next(csv.reader(text), [])


class CsvLog:
    """A CSV whose rows a killed run keeps: each write is flushed. Raises ValueError for a file with other columns."""

    def __init__(self, path: Path, columns: Iterable[str]):
        self.columns = list(columns)
        self.file = path.open("a+b")
        self.file.seek(0)
        self.digest = hashlib.file_digest(self.file, "sha256")  # `write` continues it.
        header = read_header(path)
        if not self.file.tell():
            self.write([{name: name for name in self.columns}])
        elif header != self.columns:
            columns = f"{path} has the columns {', '.join(header)}, and this run has {', '.join(self.columns)}"
            raise ValueError(f"{columns}: finish the run with the version that began it")

    def write(self, rows: Iterable[Mapping[str, Cell]]) -> None:
        """Appends rows. A row with a carriage return is quoted, as Python's writer does not: it would read as two."""
        text = io.StringIO(newline="")
        plain = csv.writer(text, lineterminator="\n")
        quoted = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
        for row in rows:
            cells = [row[name] for name in self.columns]
            (quoted if any("\r" in str(cell) for cell in cells) else plain).writerow(cells)
        # The name of a file, or what a reward function logs, may hold lone surrogates, which UTF-8 cannot encode.
        content = text.getvalue().encode("utf-8", "backslashreplace")
        self.file.write(content)
        self.file.flush()
        self.digest.update(content)

    @property
    def end(self) -> tuple[int, str]:
        """How many bytes the log holds, and their SHA-256."""
        return self.file.tell(), self.digest.hexdigest()


def episode_cells(episode: Episode | None) -> dict[str, Cell]:
    """The columns of completions.csv about an episode."""
    if episode is None:
        return {}
    cells: dict[str, Cell] = {"end": episode.end, "turns": len(episode.turns), "calls": episode.calls}
    cells |= {"unread": episode.unread, "errors": episode.errors, "tool_s": f"{episode.tool_s:.3g}"}
    return cells | {"fault": episode.fault}


def episode_rates(episodes: Sequence[Episode]) -> dict[str, Cell]:
    """The columns of metrics.csv about a step's episodes."""
    if not episodes:
        return {}
    calls = sum(episode.calls for episode in episodes)
    return {
        "turns_mean": fmean(len(episode.turns) for episode in episodes),
        "calls_mean": calls / len(episodes),
        "call_errors": sum(episode.unread + episode.errors for episode in episodes) / calls if calls else None,
        "tool_s_mean": fmean(episode.tool_s for episode in episodes),
        "ends": json.dumps(Counter(episode.end for episode in episodes)),
    }


BOX_WIDTH = 100  # A wider box breaks in a usual terminal.
WATCHED = ("reward", "zero_std_fraction", "parse_rate")  # The columns of metrics.csv that warnings are computed from.
WARN_EVERY = 10  # Steps between two warnings about the same thing.
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
EQUAL_REWARDS = (
    "all completions of each prompt got the same reward in the last 5 steps: nothing is learned. Look at "
    "completions.csv: where no answer can be read any more, end this run, and start another with a lower LEARNING_RATE "
    "(INIT_ADAPTER takes what is in best/); where they read alike, raise TEMPERATURE or NUM_GENERATIONS; where they do "
    "not, REWARDS or the reward columns of DATA do not tell them apart. Where episodes' `ends` are limits, raise them; "
    "where episodes have no calls, show the model some first (scripts/sft.py, docs/environments.md)"
)


def banner_text(text: str) -> str:
    """A warning in a box, so that nobody overlooks it."""
    lines = textwrap.wrap(text, BOX_WIDTH - 4, break_long_words=False, break_on_hyphens=False) or [""]
    width = max(map(len, lines))
    bar = "=" * (width + 4)
    return "\n".join(["", bar, *(f"| {line:<{width}} |" for line in lines), bar])


def parse_rate_warning(history: Sequence[float]) -> str | None:
    """A warning if answers stop parsing, from the parse rate of each step: if the mean of the last 5 steps is more than
    0.1 below the best 5 steps in a row, or if that of the first 5 steps is below 0.5. Else None."""
    means = [sum(history[i : i + 5]) / 5 for i in range(len(history) - 4)]
    if means and means[-1] < max(means) - 0.1:
        return UNLEARNED.format(means[-1], max(means))
    return UNPARSED.format(means[0]) if len(means) == 1 and means[0] < 0.5 else None


def reward_warning(rewards: Sequence[float], shares: Sequence[float]) -> str | None:
    """A warning if steps teach nothing, from the mean reward and the zero_std_fraction of each step: if the last step
    has no reward, or if in the last 5 steps all rewards of each group are equal. Else None."""
    if math.isnan(rewards[-1]):
        return NO_REWARD
    return EQUAL_REWARDS if len(shares) >= 5 and min(shares[-5:]) == 1 else None


RECENT_STEPS = 10  # The pace is the median of so many steps.
LEAST_STEPS = 3  # Steps before the pace is known: the first ones also compile and load.
TIME_UNKNOWN = f"time left not known before step {LEAST_STEPS}"


class Pace:
    """Estimates the time left of a run of `total` steps, from the rows of its metrics.csv. `eval_steps`: the steps
    between two evaluations (0: only before and after training). `steps_per_rollout`: in so many steps one generates."""

    def __init__(
        self, total: int, eval_steps: int, rows: Iterable[Mapping[str, Cell]] = (), steps_per_rollout: int = 1
    ):
        self.total, self.eval_steps, self.steps_per_rollout = total, eval_steps, steps_per_rollout
        self.step_s: list[float] = []
        self.eval_s: list[float] = []
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Cell]) -> None:
        """Adds the times in a row, as text or numbers; skips empty cells, None, and numbers that are not finite."""
        for column, seconds in (("step_s", self.step_s), ("eval_s", self.eval_s)):
            with contextlib.suppress(ValueError):
                if math.isfinite(value := float(row.get(column) or "nan")):
                    seconds.append(value)

    def seconds_left(self, step: int) -> float:
        """Seconds from the end of `step` to the end of the last evaluation. Each step counts as the median of the last
        RECENT_STEPS, each evaluation as the last one did (0 before the first). NaN before LEAST_STEPS steps. If steps
        share a rollout, means over as many steps take the place of a step's time."""
        shared = self.steps_per_rollout
        means = [sum(self.step_s[n : n + shared]) / shared for n in range(len(self.step_s) - shared + 1)]
        if len(self.step_s) < LEAST_STEPS or not means:
            return math.nan
        evaluations = 1  # One comes after training.
        if self.eval_steps:
            evaluations += (self.total - 1) // self.eval_steps - step // self.eval_steps
        return (self.total - step) * median(means[-RECENT_STEPS:]) + evaluations * sum(self.eval_s[-1:])

    def time_left(self, step: int) -> str:
        """The time left as text, such as `about 1 h 40 min left`; empty if it is not known."""
        if math.isnan(seconds := self.seconds_left(step)):
            return ""
        return f"about {rounded_duration(seconds)} left"


def rounded_duration(seconds: float) -> str:
    """`1 h 40 min`, `3 min` or `20 s`."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


class RunLog:
    """The logs of OUTPUT_DIR: each step's completions and metrics, its line in training.log, and warnings if answers
    stop parsing or rewards stop teaching, for which metrics.csv is read. `functions`: names of the reward functions;
    `simulates`: whether the task's simulator runs, whose figures have no columns in other runs."""

    def __init__(self, folder: Path, settings: Settings, functions: Sequence[str] = (), simulates: bool = True):
        # With DIRECT_ANSWERS each completion is a single chosen token, whose form and length are not logged.
        self.direct, self.total_steps = settings.DIRECT_ANSWERS, settings.TOTAL_STEPS
        self.function_columns = [function_column(name) for name in functions]
        prompt_column = [PROMPT] if settings.LOG_PROMPTS else []
        is_own = ":" in (settings.REWARDS or "")
        metric_column, extra_column = ([name] if is_own else [] for name in (LOG_METRIC, LOG_EXTRA))
        episode_metrics, episode_columns = (
            list(columns) if settings.ENVIRONMENT else [] for columns in (EPISODE_METRICS, EPISODE_COLUMNS)
        )
        metrics, completions = (folder / name for name in LOGS)
        figures = set(TASK_FILES[settings.TASK].get("figures", {})) if simulates else set()
        if metrics.is_file():  # A run keeps the columns that it began with.
            figures = TASK_FIGURES.keys() & read_header(metrics)
        names = [name for name in METRICS if name not in TASK_FIGURES or name in figures]
        self.metrics = CsvLog(metrics, [*names, *self.function_columns, *metric_column, *episode_metrics])
        columns = [*COMPLETIONS, *prompt_column, *self.function_columns, *extra_column, *episode_columns]
        self.completions = CsvLog(completions, columns)
        self.mark_end()
        with metrics.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.pace = Pace(self.total_steps, settings.EVAL_STEPS, rows, settings.steps_per_rollout)
        self.history = {name: [float(row[name] or "nan") for row in rows] for name in WATCHED}
        self.warned_at: dict[str, int] = {}

    def write_completions(
        self,
        step: int,
        completions: Sequence[Completion],
        totals: Sequence[float],
        scores: Sequence[Sequence[float]],
        zero_std_fraction: float,
        expected_share: float | None = None,
        logged: FunctionLog | None = None,
    ) -> dict[str, Cell]:
        """Writes a step's N completions with their weighted rewards in `totals` (N,) and the `scores` of the F reward
        functions (N, F); returns the columns of metrics.csv about them. `zero_std_fraction`: share of groups that teach
        nothing; `expected_share`: that of completions with an expected reward, None without EXPECTED_REWARD;
        `logged`: what the functions logged about these completions."""
        logged = logged or FunctionLog(len(completions))
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
                LOG_EXTRA: as_json(extra),
                **episode_cells(completion.episode),
                **{name: f"{score:.6g}" for name, score in zip(self.function_columns, by_function, strict=True)},
            }
            for completion, total, by_function, extra in zip(completions, totals, scores, logged.extra, strict=True)
        )
        shares = {"zero_std_fraction": zero_std_fraction, "expected_share": expected_share}
        rates: dict[str, Cell] = {**completion_rates(completions), **shares, LOG_METRIC: as_json(logged.metrics)}
        rates |= episode_rates([completion.episode for completion in completions if completion.episode])
        if self.direct:
            rates |= dict.fromkeys(GENERATED)
        for name, values in zip(self.function_columns, zip(*scores, strict=True), strict=True):
            numbers = [value for value in values if not math.isnan(value)]
            rates[name] = fmean(numbers) if numbers else math.nan
        return rates

    def sync(self) -> dict[str, tuple[int, str]]:
        """Waits until both CSVs are on the disk; returns their ends after the last finished step by name, for
        `finish_checkpoint`. Completions of a step that does not finish are behind them: a resumed run cuts them off."""
        for table in (self.metrics, self.completions):
            os.fsync(table.file.fileno())
        return self.ends

    def mark_end(self) -> None:
        """Keeps where both CSVs end now."""
        self.ends = dict(zip(LOGS, (self.metrics.end, self.completions.end), strict=True))

    def write_step(self, step: int, figures: Mapping[str, Cell]) -> None:
        """Writes a step's row and line, and warns. `figures`: all columns but step and time."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row: dict[str, Cell] = {"step": step, "time": now, **figures}
        # The report draws the evaluated figures beside unrounded ones: six digits would show a dip in sums of money.
        digits = dict.fromkeys(EVALUATED, 9)
        row |= {name: f"{value:.{digits.get(name, 6)}g}" for name, value in row.items() if isinstance(value, float)}
        self.metrics.write([row])
        self.mark_end()
        self.pace.add(row)
        names = ("parse_rate", "clipped_ratio", "tokens_mean", "step_s", "rollout_s", "learn_s")
        parse_rate, clipped, tokens, step_s, rollout_s, learn_s = (float(row[name] or "nan") for name in names)
        line = f"step {step}/{self.total_steps}: reward {row['reward'] or 'nan'}"
        if row.get("ends"):
            line += f", {row['turns_mean']} turns, ends {row['ends']}"
        if not self.direct:
            line += f", parse rate {parse_rate:.2f}, clipped {clipped:.2f}, {tokens:.0f} tokens"
        generation = "choose" if self.direct else "rollout"
        line += f", {step_s:.1f} s ({generation} {rollout_s:.1f}, learn {learn_s:.1f})"
        if step < self.total_steps and (time_left := self.pace.time_left(step)):
            line += f"; {time_left}"
        log.info("%s", line)
        history = self.history
        for name, values in history.items():
            values.append(float(row[name] or "nan"))
        warnings = {
            "parse rate": parse_rate_warning(history["parse_rate"]),
            "reward": reward_warning(history["reward"], history["zero_std_fraction"]),
        }
        for name, warning in warnings.items():
            if warning and step - self.warned_at.get(name, -WARN_EVERY) >= WARN_EVERY:
                self.warned_at[name] = step
                log.warning(warning)


class PlainFormatter(logging.Formatter):
    """Formats messages without a terminal's control characters, which a model's answers may hold."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class TerminalHandler(logging.StreamHandler):
    """Writes to stdout until nobody reads it any more."""

    def handleError(self, record: logging.LogRecord) -> None:
        detach_closed_terminal()  # training.log has the message.


def start_logging(folder: Path) -> None:
    """Logs to the terminal and to training.log; libraries' messages and Python's warnings go there as well."""
    formatter = PlainFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    terminal = TerminalHandler(sys.stdout)
    file = logging.FileHandler(folder / TRAINING_LOG, encoding="utf-8", errors="backslashreplace")
    terminal.addFilter(lambda record: not hasattr(record, "file_only"))
    for handler in (terminal, file):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    logging.raiseExceptions = False  # On a full disk the run's own writes fail: that is reported once, not per message.
    log.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # Every run aligns the model's special tokens with the tokenizer's.
    aligned = "The tokenizer has new PAD/BOS/EOS tokens"
    logging.getLogger("transformers.trainer_utils").addFilter(lambda record: aligned not in record.getMessage())
