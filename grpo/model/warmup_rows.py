# SPDX-License-Identifier: Apache-2.0
"""Rows that a small model is warmed up on: the plant's prompts, and what each action would do in the hour."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from datetime import date, timedelta
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from grpo.data.prompts import ANSWER_AFTER, ANSWER_BEFORE
from grpo.tasks.tes import dataset
from grpo.tasks.tes.plant import HOURS, low_co2
from grpo.tasks.tes.profiles import TRAIN_START
from grpo.tasks.tes.prompts import State

ACTIONS = 4
EFFORTS = ("low", "medium", "high")
FIXED_DATE = "2025-04-07"  # compact prompts draw their dates around it
WARMUP_SEED, PROBE_SEED = 40_000, 30_000  # of days, beyond those of data files; a window's own number is added


class WarmupRow(NamedTuple):
    prompt: str
    rewards: list[float]  # of the actions, for the figures alone: nothing is learned from them
    readings: list[float]


def readings(state: State) -> list[float]:
    """The numbers that a prompt states or implies; none of them says which action is better.

    They are, for each action, the energy that it would leave stored and the load that it would leave unserved [kWh],
    and of hour, prices and loads what a decision may depend on.
    """
    plant, now = state.plant, HOURS.index(state.stamp.hour)
    load, co2, later = state.load_kw[now], state.co2[now], state.co2[now + 1 :]
    balance = state.energy_kwh + plant.outputs_kw - load
    gain = low_co2(state.next_co2) - co2
    need = state.load_kw[now + 1 :].sum() - max(state.energy_kwh - load, 0.0)
    stored, lost = balance.clip(0, plant.capacity_kwh), (balance - plant.capacity_kwh).clip(0)
    return [
        *stored, *lost, *(-balance[:2]).clip(0), float(balance[0] < 0), co2, gain, max(-gain, 0.0), (later < co2).sum(),
        need, state.stamp.hour, load, state.energy_kwh,
    ]  # fmt: skip


def rendered(row: Mapping[str, str], number: int) -> str:
    """The prompt of a row of make_dataset.py as train_grpo.py sees it; compact ones vary in date and effort, so that
    neither means anything."""
    if "prompt" in row:
        return row["prompt"]
    day = date.fromisoformat(FIXED_DATE) + timedelta(days=number % 997)
    return (
        f"<|start|>system<|message|>Current date: {day}\n\nReasoning: {EFFORTS[number % len(EFFORTS)]}<|end|>"
        f"<|start|>developer<|message|># Instructions\n\n{row['system']}\n\n<|end|>"
        f"<|start|>user<|message|>{row['user']}<|end|><|start|>assistant"
    )


def warmup_rows(job: tuple[int, int, str, float]) -> list[WarmupRow]:
    """Every decision of some windows and ten short hours in each. `job` is (first seed, windows, kind of prompt, most
    factor of a day's load).

    Every window has a seed of its own and one of a year's dates, so that no row repeats and dates mean nothing.
    """
    first, count, kind, most = job
    rows = []
    for seed in range(first, first + count):
        start = TRAIN_START + timedelta(weeks=seed % 52)
        for plain, rng in dataset.synthetic_windows(seed, dataset.ROWS_STREAM, 1, start):
            window = dataset.varied(plain, rng, most)
            decisions = dataset.trajectory(window, rng, kind, None) + dataset.short_hours(window, rng, kind)
            for number, (row, state) in enumerate(decisions):
                rewards = [row[f"reward_action_{k}"] for k in range(ACTIONS)]
                rows.append(WarmupRow(rendered(row, 31 * seed + number), rewards, readings(state)))
    return rows


def make_rows(
    kind: str, windows: int, probe_windows: int, most_factor: float
) -> tuple[list[WarmupRow], list[WarmupRow]]:
    """Rows to learn from and rows to measure on, of that many windows each; all cores make them, in 40 ms a window."""
    jobs = [(WARMUP_SEED + n, min(50, windows - n), kind, most_factor) for n in range(0, windows, 50)]
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        *parts, probe = pool.map(warmup_rows, [*jobs, (PROBE_SEED, probe_windows, kind, most_factor)])
    return [row for rows in parts for row in rows], probe


class Rows:
    """Warm-up rows on the device where they are used: `ids` (N, T) of prompt and answer, padded on the right, `lengths`
    (N,), `rewards` (N, actions), and `readings` (N, R) with mean 0 and deviation 1.

    `answer` has the tokens that each row ends in: ``ANSWER_BEFORE``, action 0 at index `action_at`, ``ANSWER_AFTER``;
    `fixed` are the indices of its other tokens, `actions` the tokens of the actions.
    """

    def __init__(self, rows: list[WarmupRow], tokenizer: Tokenizer, device: str) -> None:
        answers = [tokenizer.encode(f"{ANSWER_BEFORE}{k}{ANSWER_AFTER}").ids for k in range(ACTIONS)]
        self.answer, self.action_at = answers[0], len(tokenizer.encode(ANSWER_BEFORE).ids)
        self.fixed = [n for n in range(len(self.answer)) if n != self.action_at]
        self.actions = [answer[self.action_at] for answer in answers]
        encodings = tokenizer.encode_batch([row.prompt for row in rows], add_special_tokens=False)
        ids = [torch.tensor(encoding.ids + self.answer, dtype=torch.int32) for encoding in encodings]
        self.ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        self.lengths = torch.tensor([len(row) for row in ids], device=device)
        self.rewards = torch.tensor([row.rewards for row in rows], device=device)
        readings = torch.tensor([row.readings for row in rows], dtype=torch.float32, device=device)
        self.readings = (readings - readings.mean(0)) / readings.std(0).clamp(min=1e-3)

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, picked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (B, T) and lengths (B,) of the `picked` rows; T is a multiple of 8, as attention kernels want it."""
        lengths = self.lengths[picked]
        columns = -(-int(lengths.max()) // 8) * 8
        ids = self.ids[picked, :columns].long()
        return torch.nn.functional.pad(ids, (0, columns - ids.shape[1])), lengths
