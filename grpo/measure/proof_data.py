# SPDX-License-Identifier: Apache-2.0
"""The proof's scales, rows and vocabulary."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.model.gptoss_format import TINY, Shape
from grpo.model.tiny_warmup import ACTIONS, ANSWER_AFTER, ANSWER_BEFORE, EFFORTS, FIXED_DATE
from grpo.tasks.tes.dataset import (
    HELDOUT_STREAM,
    ROWS_STREAM,
    SHORT_SHARE,
    TRAIN_STREAM,
    rows_csv,
    short_hours,
    short_windows,
    synthetic_windows,
    trajectory,
    with_short_hours,
)
from grpo.tasks.tes.plant import DECISION_DAYS, START_KWH
from grpo.tasks.tes.profiles import HELDOUT_START, TRAIN_START, profile_csv, synthetic_profile
from grpo.tasks.tes.prompts import State


@dataclass(frozen=True)
class Scale:
    """Everything that a proof is made from; lengths of phases are shares of the warm-up's seconds or steps."""

    shape: Shape
    prompt: str  # full or compact, as make_dataset.py's
    windows: int  # of warm-up rows, 40 rows each
    probe_windows: int  # of rows on which the warm-up is measured
    seconds: float  # budget of the warm-up; the schedule follows whichever of the two budgets runs out first
    steps: int
    focus: float  # phase 1, read: share in which the text around the numbers is left out of the prompts
    soften: float  # phase 2: share in which the experts are frozen in 4 bit and the choice is made even
    batch: int
    lr: float
    soften_lr: float
    train_windows: int  # of the rows for GRPO; short hours of more windows come on top
    heldout_windows: int
    settings: Mapping[str, str] = field(default_factory=dict)  # of train_grpo.py
    sharpness: float = 0.25  # phase 2's targets are the rewards to this power ...
    uniform: float = 0.9  # ... and this share of the probability is spread evenly: the choice is GRPO's to learn
    format_weight: float = 0.5  # of the loss on the fixed tokens of the answer against the loss on the action
    text_weight: float = 0.2  # ... on the prompt's own tokens
    reading_weight: float = 2.0  # ... on the quantities that a linear probe reads from a middle layer
    near_weight: float = 3.0  # how much more often a row is drawn whose storage just carries the load of the hour


COMMON = {"EVAL_SAMPLES": "8", "SEED": "1"}
SCALES = {
    # 43M weights besides the embeddings. hidden is a multiple of 256 and intermediate of 128, as vLLM's MXFP4 kernels
    # like them; head_dim is gpt-oss's.
    "mid": Scale(
        shape=Shape(
            layers=8, hidden=512, intermediate=384, experts=8, experts_per_token=4, heads=8, kv_heads=2, head_dim=64
        ),
        prompt="full",
        windows=2400,
        probe_windows=60,
        seconds=200,
        steps=100_000,
        focus=0.45,
        soften=0.2,
        batch=64,
        lr=1e-3,
        soften_lr=3e-4,
        train_windows=80,
        heldout_windows=32,
        settings=COMMON
        | {
            "USE_VLLM": "1", "PARITY": "on", "LOSS_IMPL": "liger", "PROMPTS_PER_STEP": "32", "NUM_GENERATIONS": "8",
            "MAX_COMPLETION_LEN": "24", "TOTAL_STEPS": "250", "LEARNING_RATE": "5e-4", "LR_SCHEDULER": "linear",
            "LORA_R": "16", "LORA_ALPHA": "32",
            "SAVE_STEPS": "100",
        },
    ),
    "small": Scale(
        shape=TINY,
        prompt="compact",
        windows=100,
        probe_windows=4,
        seconds=60,
        steps=120,
        focus=0.0,
        soften=0.3,
        batch=32,
        lr=4e-3,
        soften_lr=1e-3,
        train_windows=10,
        heldout_windows=4,
        settings=COMMON
        | {
            "USE_VLLM": "0", "PROMPTS_PER_STEP": "8", "NUM_GENERATIONS": "8", "MAX_COMPLETION_LEN": "12",
            "MAX_PROMPT_LEN": "256", "TOTAL_STEPS": "4", "LEARNING_RATE": "1e-3", "LORA_R": "8", "LORA_ALPHA": "16",
            "SAVE_STEPS": "4", "EVAL_SAMPLES": "2", "GRADIENT_CHECKPOINTING": "0", "REASONING_EFFORT": "low",
        },
    ),
}  # fmt: skip
# The same proof on one CPU core, with the toy model and compact prompts.
SCALES["cpu"] = replace(
    SCALES["small"],
    windows=1200,
    probe_windows=20,
    seconds=330,
    steps=3000,
    train_windows=60,
    heldout_windows=32,
    settings=SCALES["small"].settings
    | {
        "PROMPTS_PER_STEP": "16",
        "TOTAL_STEPS": "250",
        "LR_SCHEDULER": "linear",
        "SAVE_STEPS": "125",
        "EVAL_SAMPLES": "8",
    },
)
WARMUP_SEED, PROBE_SEED, DATA_SEED = 40_000, 30_000, 20_000  # of days; a window's own number is added to the first two
NEAR_KWH = 40.0  # by which it does at most
KEPT_TAIL = 8  # tokens of a prompt's end that a focused row keeps
PAD_TO = 8  # columns; attention kernels want aligned masks
LARGEST_NUMBER = 999  # the o200k tokenizer has a token for every run of one to three digits
QUANTITIES = (
    "hour", "stored", "load", "co2", "next_low", "next_load", "later_load", "later_low", "later_mean", "rank", "short",
    "room", "need", "gain",
)  # fmt: skip


def readings(prompt: str) -> list[float] | None:
    """The quantities of `QUANTITIES` that a full prompt states or implies; None for any other text.

    Hours since opening, kWh stored, kW and kg/kWh now, the next day's low CO2 and mean load; of the later hours of
    today: sum of loads, lowest and mean CO2, how many are below now's; load beyond the stored energy, free capacity
    plus load, later load beyond what is stored, and what waiting for tomorrow would save.
    """
    stored = re.search(r"Current TES energy \[kWh\]: (\d+)", prompt)
    if stored is None:
        return None
    hours = [(float(a), float(b)) for a, b in re.findall(r"load=([\d.]+) kW, co2=([\d.]+) kg", prompt)]
    energy = float(stored[1])
    next_load = float(re.search(r"load_mean=([\d.]+)", prompt)[1])
    next_low = float(re.search(r"co2_low5_avg=([\d.]+)", prompt)[1])
    (load, co2), later = hours[0], hours[1:]
    later_load = sum(a for a, _ in later)
    later_co2 = [b for _, b in later] or [next_low]
    return [
        10.0 - len(hours),
        energy,
        load,
        co2,
        next_low,
        next_load,
        later_load,
        min(later_co2),
        sum(later_co2) / len(later_co2),
        float(sum(b < co2 for _, b in later)),
        max(load - energy, 0.0),
        load + 300.0 - energy,
        max(later_load - max(energy - load, 0.0), 0.0),
        next_low - co2,
    ]


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


def warmup_rows(job: tuple[int, int, str]) -> list[tuple[str, list[float], list[float] | None]]:
    """(prompt, rewards, readings) of every decision of `count` windows and of ten short hours in each.

    job: (first seed, count, kind of prompt). Every window has a seed of its own and one of a year's dates, so that no row
    repeats and dates mean nothing.
    """
    first, count, kind = job
    rows = []
    for seed in range(first, first + count):
        start = TRAIN_START + timedelta(weeks=seed % 52)
        for window, rng in synthetic_windows(seed, ROWS_STREAM, 1, start):
            decisions = trajectory(window, rng, kind, None) + short_hours(window, rng, kind)
            for number, (row, _) in enumerate(decisions):
                prompt = rendered(row, 31 * seed + number)
                rewards = [row[f"reward_action_{k}"] for k in range(ACTIONS)]
                rows.append((prompt, rewards, readings(prompt)))
    return rows


def make_rows(seed: int, windows: int, kind: str) -> list[tuple[str, list[float], list[float] | None]]:
    """`warmup_rows` on all cores: some 40 ms of one core for a window."""
    if windows < 200:
        return warmup_rows((seed, windows, kind))
    jobs = [(seed + n, min(50, windows - n), kind) for n in range(0, windows, 50)]
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return [row for rows in pool.map(warmup_rows, jobs) for row in rows]


def write_data(folder: Path, scale: Scale) -> None:
    """The CSVs of the run: training rows, held-out rows, and the hourly profile of the held-out windows.

    As in data/, short hours make up `ds.SHORT_SHARE` of the training rows; held-out rows are as they come.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def decisions(stream: int, count: int, start: date, energy: float | None) -> list[tuple[dict[str, Any], State]]:
        made = synthetic_windows(DATA_SEED, stream, count, start)
        return [one for window, rng in made for one in trajectory(window, rng, scale.prompt, energy)]

    train = with_short_hours(
        decisions(TRAIN_STREAM, scale.train_windows, TRAIN_START, None),
        short_windows(DATA_SEED), scale.prompt, SHORT_SHARE,
    )  # fmt: skip
    heldout = [row for row, _ in decisions(HELDOUT_STREAM, scale.heldout_windows, HELDOUT_START, START_KWH)]
    for stem, rows in (("train", train), ("heldout", heldout)):
        (folder / f"tes_{stem}.csv").write_bytes(rows_csv(rows).encode())
    days = [HELDOUT_START + timedelta(weeks=i) for i in range(scale.heldout_windows)]
    blocks = [synthetic_profile((DATA_SEED, HELDOUT_STREAM, i), DECISION_DAYS + 1, day) for i, day in enumerate(days)]
    (folder / "profile_heldout.csv").write_bytes(profile_csv(blocks).encode())


class Vocabulary:
    """The tokens that prompts, answers and numbers use, numbered anew; all others share one embedding while training.

    With 201,088 embeddings, of which some 1,400 are ever seen, most of the warm-up would go into rows that no gradient
    reaches. The last number, `rest`, stands for every other token; its probability is theirs together.
    """

    def __init__(self, tokenizer: Any, used: set[int], size: int) -> None:
        numbers = [f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width)]
        self.values = {i: int(text) for text in numbers if (i := tokenizer.token_to_id(text)) is not None}
        spaced = {tokenizer.token_to_id(f"\u0120{text}"): int(text) for text in numbers}
        self.values |= {i: value for i, value in spaced.items() if i is not None}
        self.ids = sorted(used | set(self.values))
        self.number = {token: n for n, token in enumerate(self.ids)}
        self.rest, self.others = len(self.ids), size - len(self.ids)
        self.answer = [self.number[i] for i in tokenizer.encode(f"{ANSWER_BEFORE}0{ANSWER_AFTER}").ids]
        self.place = len(tokenizer.encode(ANSWER_BEFORE).ids)  # of the action within the answer
        self.fixed = [n for n in range(len(self.answer)) if n != self.place]
        self.actions = [self.number[tokenizer.token_to_id(str(k))] for k in range(ACTIONS)]


@dataclass
class Rows:
    """Token numbers of prompt and answer, padded on the right, on the device where they are used."""

    ids: torch.Tensor  # [N, columns], numbers of a Vocabulary
    lengths: torch.Tensor  # [N], answer included
    rewards: torch.Tensor  # [N, actions]
    readings: torch.Tensor | None  # [N, quantities]
    head: int = 0  # tokens that all prompts begin with, numbers never among them
    tail: int = 0  # tokens that all prompts end with

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def deficit(self) -> torch.Tensor:
        """kWh by which the hour's load exceeds the stored energy, negative where it does not, ``[N]``."""
        if self.readings is None:  # not known
            return self.rewards.new_full((len(self),), -math.inf)
        return self.readings[:, QUANTITIES.index("load")] - self.readings[:, QUANTITIES.index("stored")]

    def batch(self, picked: torch.Tensor, answer: int, focus: bool) -> tuple[torch.Tensor, ...]:
        """(token numbers, positions, valid tokens in each row) of some rows, each ``[rows, columns]`` or ``[rows]``.

        `focus` leaves out the text before and behind the numbers, but for a few tokens; positions stay those of the
        whole prompt, so that what is learned on focused rows fits whole ones.
        """

        lengths = self.lengths[picked]
        first = max(0, self.head - KEPT_TAIL) if focus else 0
        kept = lengths - answer - self.tail + KEPT_TAIL - first if focus else lengths  # before the gap
        valid = kept + KEPT_TAIL + answer if focus else lengths
        columns = -(-int(valid.max()) // PAD_TO) * PAD_TO
        at = torch.arange(columns, device=self.ids.device).unsqueeze(0)
        behind = lengths - answer - KEPT_TAIL
        source = torch.where(at < kept[:, None], first + at, behind[:, None] + at - kept[:, None]) if focus else at
        source = source.expand(len(picked), -1)
        ids = self.ids[picked].gather(1, source.clamp(max=self.ids.shape[1] - 1))
        return ids, source, valid


def shared_ends(rows: Sequence[np.ndarray]) -> tuple[int, int]:
    """How many tokens all rows begin with, and how many they end with."""
    shortest = min(map(len, rows))
    table = np.array([row[:shortest] for row in rows])
    ends = np.array([row[-shortest:][::-1] for row in rows])
    same, same_end = (np.flatnonzero((part != part[0]).any(0)) for part in (table, ends))
    return (int(part[0]) if len(part) else shortest for part in (same, same_end))


def encode(tokenizer: Any, rows: Sequence[tuple], chunk: int = 8192) -> list[np.ndarray]:
    """Token ids of each row's prompt and answer (action 0)."""
    answer = tokenizer.encode(f"{ANSWER_BEFORE}0{ANSWER_AFTER}").ids
    made = []
    for start in range(0, len(rows), chunk):
        texts = [prompt for prompt, _, _ in rows[start : start + chunk]]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        made += [np.array(encoding.ids + answer, np.int32) for encoding in encodings]
    return made


def place(encoded: Sequence[np.ndarray], rows: Sequence[tuple], vocabulary: Vocabulary, device: str) -> Rows:
    """Rows on a device; ids become numbers of the vocabulary there."""

    lengths = np.array([len(row) for row in encoded])
    columns = -(-int(lengths.max()) // PAD_TO) * PAD_TO
    table = np.zeros((len(encoded), columns), np.int32)
    for n, row in enumerate(encoded):
        table[n, : len(row)] = row
    numbers = torch.zeros(max(vocabulary.ids) + 1, dtype=torch.long, device=device)
    numbers[torch.tensor(vocabulary.ids, device=device)] = torch.arange(len(vocabulary.ids), device=device)
    # In pieces, so that no second table of 8-byte indices is held.
    ids = torch.from_numpy(table).to(device)
    for start in range(0, len(ids), 4096):
        ids[start : start + 4096] = numbers[ids[start : start + 4096].long()].int()
    known = rows[0][2] is not None
    return Rows(
        ids,
        torch.from_numpy(lengths).to(device),
        torch.tensor([rewards for _, rewards, _ in rows], device=device),
        torch.tensor([quantities for _, _, quantities in rows], device=device) if known else None,
    )
