# SPDX-License-Identifier: Apache-2.0
"""The proof's scales and rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from grpo.model.gptoss_format import TINY, Shape
from grpo.model.tiny_warmup import ACTIONS, EFFORTS, FIXED_DATE, Answer
from grpo.tasks.tes import dataset
from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, START_KWH
from grpo.tasks.tes.profiles import HELDOUT_START, TRAIN_START, profile_csv, synthetic_profile
from grpo.tasks.tes.prompts import State, render_compact


def environment(text: str) -> dict[str, str]:
    """NAME=VALUE words as settings of train_grpo.py."""
    return dict(word.split("=") for word in text.split())


@dataclass(frozen=True)
class Scale:
    """Everything that a proof is made from; lengths of phases are shares of the warm-up's seconds or steps."""

    shape: Shape
    prompt: str  # full or compact, as make_dataset.py's
    windows: int  # of warm-up rows, 40 rows each
    probe_windows: int  # of rows on which the warm-up is measured
    seconds: float  # budget of the warm-up; the schedule follows whichever of the two budgets runs out first
    steps: int
    soften: float  # phase 2: share in which the experts are frozen in 4 bit and the choice is made even
    batch: int
    lr: float
    soften_lr: float
    train_windows: int  # of the rows for GRPO; short hours of more windows come on top
    heldout_windows: int
    settings: Mapping[str, str]  # of train_grpo.py
    sharpness: float = 0.25  # phase 2's targets are the rewards to this power ...
    uniform: float = 0.9  # ... and this share of the probability is spread evenly: the choice is GRPO's to learn


# 43M weights besides the embeddings. hidden is a multiple of 256 and intermediate of 128, as vLLM's MXFP4 kernels like
# them; head_dim is gpt-oss's.
MID = Shape(layers=8, hidden=512, intermediate=384, experts=8, experts_per_token=4, heads=8, kv_heads=2, head_dim=64)
MID_RUN = """EVAL_SAMPLES=8 SEED=1 USE_VLLM=1 PARITY=on PROMPTS_PER_STEP=32 NUM_GENERATIONS=8 MAX_COMPLETION_LEN=24
    TOTAL_STEPS=250 LEARNING_RATE=5e-4 LR_SCHEDULER=linear LORA_R=16 LORA_ALPHA=32 SAVE_STEPS=100"""
SMALL_RUN = """EVAL_SAMPLES=2 SEED=1 USE_VLLM=0 PROMPTS_PER_STEP=8 NUM_GENERATIONS=8 MAX_COMPLETION_LEN=12
    MAX_PROMPT_LEN=256 TOTAL_STEPS=4 LEARNING_RATE=1e-3 LORA_R=8 LORA_ALPHA=16 SAVE_STEPS=4
    GRADIENT_CHECKPOINTING=0 REASONING_EFFORT=low"""
CPU_RUN = SMALL_RUN + " EVAL_SAMPLES=8 PROMPTS_PER_STEP=16 TOTAL_STEPS=250 LR_SCHEDULER=linear SAVE_STEPS=125"
SCALES = {
    "mid": Scale(
        MID, "full", 2400, 60, seconds=300, steps=100_000, soften=0.2, batch=64, lr=1e-3, soften_lr=3e-4,
        train_windows=80, heldout_windows=32, settings=environment(MID_RUN),
    ),
    "small": Scale(
        TINY, "compact", 100, 4, seconds=60, steps=120, soften=0.3, batch=32, lr=4e-3, soften_lr=1e-3,
        train_windows=10, heldout_windows=4, settings=environment(SMALL_RUN),
    ),
}  # fmt: skip
# The same proof on one CPU core, with the toy model and compact prompts.
SCALES["cpu"] = replace(
    SCALES["small"], windows=1200, probe_windows=20, seconds=330, steps=3000, train_windows=60, heldout_windows=32,
    settings=environment(CPU_RUN),
)  # fmt: skip
WARMUP_SEED, PROBE_SEED, DATA_SEED = 40_000, 30_000, 20_000  # of days; a window's own number is added to the first two
NEAR_KWH = 40.0  # by which the storage of a row near the boundary carries the hour's load at most ...
NEAR_WEIGHT = 3.0  # ... and how much more often such a row is drawn
READINGS = 10  # numbers that a compact prompt begins with


class WarmupRow(NamedTuple):
    prompt: str
    rewards: list[float]  # of the actions
    readings: list[float]  # the first numbers of the state's compact prompt: what there is to read and to derive
    weight: float  # how often it is drawn, relative to others


def rendered(row: Mapping[str, Any], number: int) -> str:
    """The prompt of a row of make_dataset.py as train_grpo.py sees it; compact ones vary in date and effort."""
    if "prompt" in row:
        return row["prompt"]
    day = date.fromisoformat(FIXED_DATE) + timedelta(days=number % 997)
    effort = EFFORTS[number % len(EFFORTS)]
    return (
        f"<|start|>system<|message|>Current date: {day}\n\nReasoning: {effort}<|end|>"
        f"<|start|>developer<|message|># Instructions\n\n{row['system']}\n\n<|end|>"
        f"<|start|>user<|message|>{row['user']}<|end|><|start|>assistant"
    )


def warmup_row(row: Mapping[str, Any], state: State, number: int) -> WarmupRow:
    readings = [float(word) for word in render_compact(state)[1].split()[1 : 2 * READINGS : 2]]
    spare = state.energy_kwh - state.load_kw[state.stamp.hour - HOURS[0]]
    weight = NEAR_WEIGHT if 0 <= spare < NEAR_KWH else 1.0
    return WarmupRow(rendered(row, number), [row[f"reward_action_{k}"] for k in range(ACTIONS)], readings, weight)


def warmup_rows(job: tuple[int, int, str]) -> list[WarmupRow]:
    """Every decision of `count` windows and ten short hours in each. job: (first seed, count, kind of prompt).

    Every window has a seed of its own and one of a year's dates, so that no row repeats and dates mean nothing.
    """
    first, count, kind = job
    rows = []
    for seed in range(first, first + count):
        start = TRAIN_START + timedelta(weeks=seed % 52)
        for window, rng in dataset.synthetic_windows(seed, dataset.ROWS_STREAM, 1, start):
            decisions = dataset.trajectory(window, rng, kind, None) + dataset.short_hours(window, rng, kind)
            rows += [warmup_row(*one, 31 * seed + number) for number, one in enumerate(decisions)]
    return rows


def make_rows(scale: Scale) -> tuple[list[WarmupRow], list[WarmupRow]]:
    """(rows to learn from, rows to measure on), made on all cores: some 40 ms of one core for a window."""
    jobs = [(WARMUP_SEED + n, min(50, scale.windows - n), scale.prompt) for n in range(0, scale.windows, 50)]
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        *made, probe = pool.map(warmup_rows, [*jobs, (PROBE_SEED, scale.probe_windows, scale.prompt)])
    return [row for rows in made for row in rows], probe


def write_data(folder: Path, scale: Scale) -> None:
    """The CSVs of the run: training rows, held-out rows, and the hourly profile of the held-out windows.

    As in data/, short hours make up `SHORT_SHARE` of the training rows; held-out rows are as they come.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def decisions(stream: int, count: int, start: date, energy: float | None) -> list[tuple[dict[str, Any], State]]:
        made = dataset.synthetic_windows(DATA_SEED, stream, count, start)
        return [one for window, rng in made for one in dataset.trajectory(window, rng, scale.prompt, energy)]

    train = dataset.with_short_hours(
        decisions(dataset.TRAIN_STREAM, scale.train_windows, TRAIN_START, None),
        dataset.short_windows(DATA_SEED), scale.prompt, dataset.SHORT_SHARE,
    )  # fmt: skip
    heldout = [row for row, _ in decisions(dataset.HELDOUT_STREAM, scale.heldout_windows, HELDOUT_START, START_KWH)]
    for stem, rows in (("train", train), ("heldout", heldout)):
        (folder / f"tes_{stem}.csv").write_bytes(dataset.rows_csv(rows).encode())
    days = [HELDOUT_START + timedelta(weeks=i) for i in range(scale.heldout_windows)]
    blocks = [
        synthetic_profile((DATA_SEED, dataset.HELDOUT_STREAM, i), DECISION_DAYS + 1, day) for i, day in enumerate(days)
    ]
    (folder / "profile_heldout.csv").write_bytes(profile_csv(blocks).encode())


class Rows:
    """Warm-up rows on the device where they are used: `ids` (N, T) of prompt and answer, padded on the right, `lengths`
    (N,), `rewards` (N, actions), `readings` (N, R) with mean 0 and deviation 1, and `weights` (N,) for drawing them."""

    def __init__(self, rows: list[WarmupRow], tokenizer: Tokenizer, answer: Answer, device: str) -> None:
        encodings = tokenizer.encode_batch([row.prompt for row in rows], add_special_tokens=False)
        made = [torch.tensor(encoding.ids + answer.ids, dtype=torch.int32) for encoding in encodings]
        self.ids = torch.nn.utils.rnn.pad_sequence(made, batch_first=True).to(device)
        self.lengths = torch.tensor([len(row) for row in made], device=device)
        self.rewards, readings, self.weights = (
            torch.tensor([getattr(row, name) for row in rows], device=device)
            for name in ("rewards", "readings", "weight")
        )
        self.readings = (readings - readings.mean(0)) / readings.std(0).clamp(min=1e-6)

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, picked: torch.Tensor, multiple: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids (B, T), lengths (B,)) of rows; T is a multiple of 8, as attention kernels want their masks."""
        lengths = self.lengths[picked]
        columns = -(-int(lengths.max()) // multiple) * multiple
        ids = self.ids[picked, :columns].long()
        return torch.nn.functional.pad(ids, (0, columns - ids.shape[1])), lengths


Log = Callable[[str], None]
