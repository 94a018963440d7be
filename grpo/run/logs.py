# SPDX-License-Identifier: Apache-2.0
"""What a run writes while it goes on: metrics.csv and completions.csv row by row, training.log, warnings."""

from __future__ import annotations

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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TextIO

from grpo.data.scoring import Completion, completion_rates, is_answer
from grpo.phases import BAR
from grpo.run.pace import Pace
from grpo.settings import TASK_FIGURES, log
from rewards import best_action

BOX_WIDTH = 100  # columns at most: a wider box breaks in a usual terminal


def banner_text(text: str) -> str:
    """A warning that is seen: a degraded run must not look like a normal one."""
    lines = textwrap.wrap(text, BOX_WIDTH - 4, break_long_words=False, break_on_hyphens=False) or [""]
    width = max(map(len, lines))
    bar = "=" * (width + 4)
    return "\n".join(["", bar, *(f"| {line:<{width}} |" for line in lines), bar])


# Every column of metrics.csv, in order: unit and meaning. docs/metrics.md is generated from this table.
METRICS = {
    "step": ("steps", "Optimizer step, from 1."),
    "time": ("UTC", "When the step ended."),
    "reward": ("reward", "Mean weighted reward of the step's completions; those left out by NaN are not counted."),
    "reward_std": ("reward", "Standard deviation of those rewards."),
    "zero_std_fraction": ("share", "Prompts whose completions all got the same reward: they teach nothing."),
    "parse_rate": ("share", "Completions whose final channel names exactly one action, or holds text where the row has no actions. Watch it: a falling rate means the format is being unlearned."),
    "best_action_rate": ("share", "Completions that name an action with the row's highest reward."),
    "clipped_ratio": ("share", "Completions that met MAX_COMPLETION_LEN without a stop token."),
    "tokens_mean": ("tokens", "Mean length of a completion."),
    "tokens_max": ("tokens", "Length of the longest completion."),
    "loss": ("", "GRPO loss. Near 0 by construction while the policy ratio is 1; its size says little."),
    "grad_norm": ("norm", "Norm of the adapter's gradient before it is limited to MAX_GRAD_NORM."),
    "learning_rate": ("", "AdamW's learning rate of this step."),
    "kl": ("nats", "Mean KL estimate (k3) against the base model; empty while BETA is 0."),
    "entropy": ("nats", "Mean entropy of the next-token distribution over the completions' tokens."),
    "clip_fraction": ("share", "Tokens whose policy ratio left the clip range."),
    "logp_diff_mean": ("nats", "Mean difference of the log-probs of vLLM and trainer on the sampled tokens; empty without vLLM."),
    "logp_diff_max": ("nats", "Largest such difference."),
    "is_ratio_mean": ("", "Mean importance ratio after IS_CORRECTION; 1 where the two agree."),
    "sync_share": ("share", "Part of the adapter's update that vLLM's weights hold, by projection; empty while the adapter is zero (as in the first step of a fresh run), with ROLLOUT_SYNC=lora, and without vLLM."),
    "rollout_s": ("s", "Time to generate the completions, vLLM's waking, weight sync and sleeping included."),
    "wake_s": ("s", "Part of it: waking vLLM."),
    "handover_s": ("s", "Part of it: weight sync, the adapter to vLLM."),
    "sleep_s": ("s", "Part of it: putting vLLM to sleep."),
    "reward_s": ("s", "Time to decode and score them."),
    "learn_s": ("s", "Rest of the step: forward, backward, optimizer."),
    "step_s": ("s", "Whole step, evaluation not counted."),
    "rollout_tokens_per_s": ("tokens/s", "Generated tokens per second of rollout."),
    "heldout_reward": ("reward", "Mean reward on the held-out prompts, measured after this step; empty in steps that are not a multiple of EVAL_STEPS, and in the last one, which evaluation.json has."),
    **{name: (figure["unit"], figure["meaning"]) for name, figure in TASK_FIGURES.items()},
    "eval_s": ("s", "Time of these measurements."),
    "gpu_peak_gib": ("GiB", "Most GPU memory that the driver says is in use (other programs' included), read where a rollout is generated, before vLLM sleeps, and where the step ends; empty without a GPU."),
    "gpu_utilization": (
        "percent",
        "Share of the step in which the GPU computed anything, as the driver says: mean of two samples a second; "
        "empty without a GPU, and where NVML cannot be read.",
    ),
}  # fmt: skip
# Behind them stands, named by `function_column`, the unweighted mean of each reward function.
# Empty in most steps.
EVALUATED = ("heldout_reward", *TASK_FIGURES)
# Every column of completions.csv, in order.
COMPLETIONS = {
    "step": ("steps", "Optimizer step that the completion was sampled for."),
    "prompt_id": ("", "File name and row of the prompt; the first row below the header is 1."),
    "completion": ("", "Text as the model wrote it, special tokens included."),
    "parsed_action": ("", "Action named in the final channel; empty where it names none, or the row has no actions."),
    "reward": ("reward", "Weighted sum of the reward functions; nan where the completion is left out."),
    "best_action": ("", "Action with the row's highest reward; empty without reward columns."),
    "tokens": ("tokens", "Length of the completion, stop token included."),
    "truncated": ("0 or 1", "Whether it met MAX_COMPLETION_LEN without a stop token."),
}
PROMPT = "prompt"  # a further column with LOG_PROMPTS=1, the rendered prompt; behind it what each function gave


def function_column(name: str) -> str:
    """The column of a reward function in both files, by its name in the logs."""
    return f"reward/{name}"


def write_rows(file: TextIO, rows: Iterable[Sequence[Any]]) -> None:
    """CSV rows ending in a line feed. Python's writer leaves a lone carriage return unquoted then, and the row would
    read back as two: such rows are quoted whole."""
    plain = csv.writer(file, lineterminator="\n")
    quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        (quoted if any("\r" in str(cell) for cell in row) else plain).writerow(row)


def read_header(path: Path) -> list[str]:
    """The columns of a log; none where it is empty."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return next(csv.reader(file), [])


def metric_columns(path: Path) -> list[str]:
    """The columns of METRICS that metrics.csv at `path` has, or will have where it is not there yet: a run goes on without
    the figures of a task that was added after it began."""
    header = read_header(path) if path.exists() else []
    return [name for name in METRICS if not header or name in header or name not in TASK_FIGURES]


def check_columns(path: Path) -> str | None:
    """How the columns of an existing log differ from those that this version writes, in words; None where they do not.
    Those of reward functions and LOG_PROMPTS are not compared: the settings say which there are."""
    known = metric_columns(path) if path.name == "metrics.csv" else list(COMPLETIONS)
    header = [name for name in read_header(path) if name != PROMPT and not name.startswith(function_column(""))]
    if header == known:
        return None
    differing = [name for name in known if name not in header] or [name for name in header if name not in known]
    return f"it has other columns than this version writes ({', '.join(differing) or 'their order'})"


class CsvLog:
    """A CSV that grows row by row; each row is flushed, so that a killed run keeps what it had. Raises ValueError where
    the file is there with other columns."""

    def __init__(self, path: Path, columns: Iterable[str]):
        self.columns = list(columns)
        self.file = path.open("a+b")
        self.file.seek(0)
        self.digest = hashlib.file_digest(self.file, "sha256")  # goes on with what is written
        if not self.file.tell():
            self.write([{name: name for name in self.columns}])
        elif (header := read_header(path)) != self.columns:
            raise ValueError(f"{path} has the columns {', '.join(header)}, and this run has {', '.join(self.columns)}")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        write_rows(text, ([row[name] for name in self.columns] for row in rows))
        content = text.getvalue().encode()
        self.file.write(content)
        self.file.flush()
        self.digest.update(content)

    def sync(self) -> None:
        """Have what was written on the disk, not in memory alone."""
        os.fsync(self.file.fileno())

    @property
    def end(self) -> tuple[int, str]:
        """How many bytes the file holds, and their SHA-256."""
        return self.file.tell(), self.digest.hexdigest()


WARN_EVERY = 10  # steps between two warnings about the same thing
EQUAL_STEPS = 5  # without a difference of rewards, before a run is told that it learns nothing
TAUGHT = ("reward", "zero_std_fraction", "parse_rate")  # what `reward_warning` reads


UNLEARNED = (
    "parse rate fell to {:.2f} over the last 5 steps, its best was {:.2f}: the answer format is being unlearned. Lower "
    "LEARNING_RATE, leave INVALID_REWARD at auto, or raise MAX_COMPLETION_LEN if the clipped ratio is high"
)
UNPARSED = (
    "only {:.2f} of the answers parse: most of the reward signal is lost. Look at completions.csv; a high clipped ratio asks "
    "for a larger MAX_COMPLETION_LEN or a lower REASONING_EFFORT"
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
    "all completions of each prompt got the same reward in {}: nothing {} learned. Look at completions.csv: "
    "where they read alike, raise TEMPERATURE or NUM_GENERATIONS; where they do not, REWARDS or the reward columns of DATA "
    "do not tell them apart"
)
LOST = (
    "Nothing was learned for {} steps, and nothing will be: no answer can be read any more, and those that cannot all earn the same. "
    "End this run, and start another with a lower LEARNING_RATE; INIT_ADAPTER takes what is in best/"
)


def parse_rate_warning(history: Sequence[float]) -> str | None:
    """A sentence when answers stop parsing: the last 5 steps against the best 5 steps so far. None while all is well."""
    means = [sum(history[i : i + 5]) / 5 for i in range(len(history) - 4)]
    if means and means[-1] < max(means) - 0.1:
        return UNLEARNED.format(means[-1], max(means))
    return UNPARSED.format(means[0]) if len(means) == 1 and means[0] < 0.5 else None


def reward_warning(history: Sequence[tuple[float, float, float]], total_steps: int = 0) -> str | None:
    """A sentence when steps teach nothing: the last one has no reward at all, or the last 5 (in a run of fewer
    `total_steps`: all) have none that differ inside a group; boxed once a run that could answer has lost it for 10 such
    steps. `history`: mean reward, zero_std_fraction and parse rate of each step. None while all is well."""
    if history and math.isnan(history[-1][0]):
        return NO_REWARD
    equal = next((i for i, (_, share, _) in enumerate(reversed(history)) if share < 1), len(history))
    if (
        equal >= WARN_EVERY
        and not any(rate for *_, rate in history[-WARN_EVERY:])
        and any(rate for *_, rate in history)
    ):
        return banner_text(LOST.format(equal))
    if equal >= EQUAL_STEPS:
        return EQUAL_REWARDS.format(f"the last {EQUAL_STEPS} steps", "is")
    if equal and equal == len(history) == total_steps:
        return EQUAL_REWARDS.format("every step of this run", "was")
    return None


LEAST_GROUPS = 5  # that hold both kinds of answers, before `garbage_warning` says anything


def garbage_gains(read: Sequence[Completion], totals: Sequence[float]) -> list[float]:
    """By how much the answers of a step that cannot be read out-earn the others to the same prompt: the difference of
    their mean rewards in each group that holds both. NaN, an answer that was left out, does not count."""
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for completion, reward in zip(read, totals, strict=True):
        if not math.isnan(reward):
            groups.setdefault(completion.row.id, ([], []))[is_answer(completion)].append(reward)
    means = [(fmean(garbage), fmean(answers)) for garbage, answers in groups.values() if garbage and answers]
    return [0.0 if math.isclose(garbage, answers) else garbage - answers for garbage, answers in means]


def garbage_warning(history: Sequence[Sequence[float]]) -> str | None:
    """A sentence when answers that cannot be read earned more than the others of their groups over the last 10 steps,
    by more than chance: three standard errors. `history`: the `garbage_gains` of each step. None while all is well."""
    gains = [gain for step in history[-WARN_EVERY:] for gain in step]
    if len(history) < WARN_EVERY or len(gains) < LEAST_GROUPS:
        return None
    mean, error = fmean(gains), stdev(gains) / math.sqrt(len(gains))
    return GARBAGE_PAYS.format(mean, len(gains)) if mean > 3 * error else None


class RunLog:
    """The logs of OUTPUT_DIR: a step's completions and metrics, its line in training.log, and a warning where answers stop
    parsing or rewards stop teaching. A resumed run goes on with the history in metrics.csv.

    functions: the reward functions' names; prompts: whether completions.csv holds the prompts."""

    def __init__(
        self, folder: Path, total_steps: int, eval_steps: int = 0, functions: Sequence[str] = (), prompts: bool = False
    ):
        self.functions, own = functions, [function_column(name) for name in functions]
        self.metrics = CsvLog(folder / "metrics.csv", [*metric_columns(folder / "metrics.csv"), *own])
        self.completions = CsvLog(folder / "completions.csv", [*COMPLETIONS, *[PROMPT] * prompts, *own])
        self.total_steps = total_steps
        self.rates: dict[str, float] = {}  # of the last completions, with the mean of each function
        with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.pace = Pace(total_steps, eval_steps, rows)
        self.taught = [tuple(float(row[name] or "nan") for name in TAUGHT) for row in rows]
        self.warned_at: dict[str, int] = {}
        self.garbage: list[list[float]] = []  # see `garbage_warning`
        self.garbage_pays: str | None = None

    def write_completions(
        self,
        step: int,
        read: Sequence[Completion],
        totals: Sequence[float],
        scores: Sequence[Sequence[float]] = (),
        zero_std_fraction: float | None = None,
    ) -> None:
        """Write a step's completions, each with its weighted reward and what each function gave it (N, F), and remember
        their rates. `zero_std_fraction`: of their groups, those whose rewards are all the same."""
        given = {function_column(name): [row[i] for row in scores] for i, name in enumerate(self.functions)}
        self.completions.write(
            {
                "step": step,
                "prompt_id": one.row.id,
                "completion": one.text,
                "parsed_action": "" if one.action is None else one.action,
                "reward": f"{total:.6g}",
                "best_action": best_action(one.row.rewards) if one.row.rewards else "",
                "tokens": one.tokens,
                "truncated": int(one.truncated),
                PROMPT: one.row.prompt,
                **{name: f"{values[i]:.6g}" for name, values in given.items()},
            }
            for i, (one, total) in enumerate(zip(read, totals, strict=True))
        )
        self.rates = completion_rates(read)
        if zero_std_fraction is not None:
            self.rates["zero_std_fraction"] = zero_std_fraction
        for name, values in given.items():
            kept = [value for value in values if not math.isnan(value)]
            self.rates[name] = fmean(kept) if kept else math.nan
        self.garbage.append(garbage_gains(read, totals))

    def sync(self) -> dict[str, tuple[int, str]]:
        """Have both CSVs on the disk; returns their ends by name, for `finish_checkpoint`."""
        logs = {"metrics.csv": self.metrics, "completions.csv": self.completions}
        for log_file in logs.values():
            log_file.sync()
        return {name: log_file.end for name, log_file in logs.items()}

    def write_step(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Write a step's row: `figures` by column of METRICS, those of its completions come with `write_completions`."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row = {"step": step, "time": now, **self.rates, **figures}
        shown = {k: "" if v is None else f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
        self.metrics.write([shown])
        self.pace.add(row)
        left = self.pace.left(step) if step < self.total_steps else ""
        log.info(
            "step %d/%d: reward %s, parse rate %.2f, clipped %.2f, %.0f tokens, %.1f s (rollout %.1f, learn %.1f)%s",
            step, self.total_steps, shown["reward"] or "nan",
            *(row[name] for name in ("parse_rate", "clipped_ratio", "tokens_mean", "step_s", "rollout_s", "learn_s")),
            f"; {left}" if left else "",
        )  # fmt: skip
        self.taught.append(tuple(float(shown[name] or "nan") for name in TAUGHT))
        warnings = {
            "parse rate": parse_rate_warning([rate for *_, rate in self.taught]),
            "reward": reward_warning(self.taught, self.total_steps),
        }
        for name, warning in warnings.items():
            if warning and step - self.warned_at.get(name, -WARN_EVERY) >= WARN_EVERY:
                self.warned_at[name] = step
                log.warning(warning)
        if not self.garbage_pays and (warning := garbage_warning(self.garbage)):
            self.garbage_pays = warning
            log.warning(banner_text(warning))


def detach_closed_terminal() -> None:
    """Let what goes to stdout and stderr go nowhere where nobody reads it any more (a lost SSH session, a `| tee` that
    ended): writing there raises OSError, which must not end a run or change its exit code."""
    for stream in (1, 2):
        if is_unread(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class TerminalHandler(logging.StreamHandler):
    """Writes to stdout, above the bar of a phase that goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        with BAR.wiped():
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        detach_closed_terminal()  # nobody reads: training.log has it


# Messages of libraries that say what a run does on purpose.
UNIMPORTANT = {
    # Every run aligns the model's special tokens with the tokenizer's.
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens",
}


def start_logging(folder: Path) -> None:
    """Log to the terminal and to training.log; libraries' messages and Python's warnings go there as well."""
    formatter = logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    terminal, file = TerminalHandler(sys.stdout), logging.FileHandler(folder / "training.log", encoding="utf-8")
    terminal.addFilter(lambda record: not hasattr(record, "file_only"))
    file.handleError = lambda record: None  # a full disk: what is written for the run itself fails, and says so once
    for handler in (terminal, file):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    log.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for name, text in UNIMPORTANT.items():
        logging.getLogger(name).addFilter(lambda record, text=text: text not in record.getMessage())


def is_unread(descriptor: int) -> bool:
    """Whether nobody can read any more what is written there."""
    poll = select.poll()
    poll.register(descriptor, 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))
