# SPDX-License-Identifier: Apache-2.0
"""What a run writes while it goes on: tables of columns, CSVs row by row, training.log."""

from __future__ import annotations

import logging
import math
import os
import select
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.run.folder import write_rows
from grpo.settings import log


def boxed(text: str) -> str:
    """A warning that is seen: a degraded run must not look like a normal one."""
    bar = "=" * (len(text) + 4)
    return f"\n{bar}\n| {text} |\n{bar}"


# Every column of metrics.csv, in order: unit and meaning. docs/metrics.md is generated from this table.
METRICS = {
    "step": ("steps", "Optimizer step, from 1."),
    "time": ("UTC", "When the step ended."),
    "reward": ("reward", "Mean weighted reward of the step's completions; those left out by NaN are not counted."),
    "reward_std": ("reward", "Standard deviation of those rewards."),
    "zero_std_fraction": ("share", "Prompts whose completions all got the same reward: they teach nothing."),
    "parse_rate": ("share", "Completions whose final channel names exactly one action. Watch it: a falling rate means the format is being unlearned."),
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
    "rollout_s": ("s", "Time to generate the completions, vLLM's waking, hand-over and sleeping included."),
    "wake_s": ("s", "Part of it: waking vLLM."),
    "handover_s": ("s", "Part of it: handing the adapter to vLLM."),
    "sleep_s": ("s", "Part of it: putting vLLM to sleep."),
    "reward_s": ("s", "Time to decode and score them."),
    "learn_s": ("s", "Rest of the step: forward, backward, optimizer."),
    "step_s": ("s", "Whole step."),
    "rollout_tokens_per_s": ("tokens/s", "Generated tokens per second of rollout."),
    "gpu_peak_gib": ("GiB", "Most GPU memory by torch's count during the step, a sleeping vLLM's weights included (they are not on the GPU then); empty without a GPU."),
}  # fmt: skip
# Every column of completions.csv, in order.
COMPLETIONS = {
    "step": ("steps", "Optimizer step that the completion was sampled for."),
    "prompt_id": ("", "File name and row of the prompt; the first row below the header is 1."),
    "completion": ("", "Text as the model wrote it, special tokens included."),
    "parsed_action": ("", "Action named in the final channel; empty where it names none."),
    "reward": ("reward", "Weighted sum of the reward functions; nan where the completion is left out."),
    "best_action": ("", "Action with the row's highest reward; empty without reward columns."),
    "tokens": ("tokens", "Length of the completion, stop token included."),
    "truncated": ("0 or 1", "Whether it met MAX_COMPLETION_LEN without a stop token."),
}


class CsvLog:
    """A CSV that grows row by row; each row is flushed, so that a killed run keeps what it had."""

    def __init__(self, path: Path, columns: Iterable[str]):
        self.columns = list(columns)
        fresh = not path.exists() or not path.stat().st_size
        self.file = path.open("a", newline="", encoding="utf-8")
        if fresh:
            self.write([dict(zip(self.columns, self.columns, strict=True))])

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        write_rows(self.file, ([row[name] for name in self.columns] for row in rows))
        self.file.flush()


WARN_EVERY = 10  # steps between two warnings about the same thing


def parse_rate_warning(history: Sequence[float]) -> str | None:
    """A sentence when answers stop parsing: the last 5 steps against the best 5 steps so far. None while all is well."""
    if len(history) < 5:
        return None
    means = [sum(history[i : i + 5]) / 5 for i in range(len(history) - 4)]
    if means[-1] < max(means) - 0.1:
        return (
            f"parse rate fell to {means[-1]:.2f} over the last 5 steps, its best was {max(means):.2f}: the answer format "
            "is being unlearned. Lower LEARNING_RATE, keep INVALID_REWARD at 0 or below, or raise MAX_COMPLETION_LEN "
            "if the clipped ratio is high"
        )
    if len(history) == 5 and means[-1] < 0.5:
        return (
            f"only {means[-1]:.2f} of the answers parse: most of the reward signal is lost. Look at completions.csv; a high "
            "clipped ratio asks for a larger MAX_COMPLETION_LEN or a lower REASONING_EFFORT"
        )
    return None


def reward_warning(history: Sequence[tuple[float, float]]) -> str | None:
    """A sentence when steps teach nothing: the last one has no reward at all, or the last 5 have none that differ inside
    a group. `history`: mean reward and zero_std_fraction of each step. None while all is well."""
    if history and math.isnan(history[-1][0]):
        return (
            "the reward is nan: every completion of this step was left out, so it taught nothing. Look at completions.csv; "
            "set INVALID_REWARD to a number, or mend the function in REWARDS that returns nan or None"
        )
    if len(history) >= 5 and all(share == 1 for _, share in history[-5:]):
        return (
            "all completions of each prompt got the same reward in the last 5 steps: nothing is learned. Look at "
            "completions.csv: where they read alike, raise TEMPERATURE or NUM_GENERATIONS; where they do not, REWARDS or "
            "the reward columns of DATA do not tell them apart"
        )
    return None


def leave_terminal() -> None:
    """Let what goes to stdout and stderr go nowhere where nobody reads it any more (a lost SSH session, a `| tee` that
    ended): writing there raises OSError, which must not end a run or change its exit code."""
    for stream in (1, 2):
        poll = select.poll()
        poll.register(stream, 0)  # errors and hang-ups are always reported
        if poll.poll(0):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class TerminalHandler(logging.StreamHandler):
    """Writes above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        text = self.format(record)
        try:
            tqdm.write(text, file=sys.stdout)
        except (OSError, RuntimeError):  # nobody reads, or a signal's message met another one: training.log has it
            leave_terminal()


def start_logging(folder: Path) -> None:
    """Log to the terminal and to training.log; libraries' messages and Python's warnings go there as well."""
    formatter = logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    file = logging.FileHandler(folder / "training.log", encoding="utf-8")
    file.handleError = lambda record: None  # a full disk: what is written for the run itself fails, and says so once
    for handler in (TerminalHandler(), file):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    log.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # INVALID_REWARD=nan makes TRL print a whole row, prompt included, at every step: parse_rate says it shorter.
    unscorable = "All reward functions returned None"
    logging.getLogger("trl.trainer.grpo_trainer").addFilter(lambda record: unscorable not in record.getMessage())
