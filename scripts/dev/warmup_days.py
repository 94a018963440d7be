# SPDX-License-Identifier: Apache-2.0
"""The warm-up in which a small model learns to play a day of the plant, by any calls, and to read what they return."""

from collections.abc import Iterator, Sequence
from datetime import datetime, time, timedelta
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from grpo.common import ROOT
from grpo.data.prompts import render
from grpo.environment.calls import result_parts, write_call
from grpo.environment.worker import describe
from grpo.output.durable import read_json
from grpo.tasks.tes import dataset
from grpo.tasks.tes.plant import HOURS, q_values
from grpo.tasks.tes.prompts import State
from grpo.tasks.tes_day.environment import TRAIN_START, Day, day_rows
from scripts.dev.warmup_rows import (
    ACTIONS,
    EFFORTS,
    FIXED_DATE,
    TEMPLATE,
    WarmupRow,
    WarmupTensors,
    readings,
    standardized,
)

SYSTEM_PROMPT = read_json(ROOT / "grpo/tasks/tes_day/task.json")["defaults"]["SYSTEM_PROMPT"]
CALL_ENDS = tuple(write_call("run", {"level": 0}).split("0"))  # what a turn has before and behind its level


def warmup_day_rows(first_seed: int, windows: int, most_factor: float) -> list[WarmupRow]:
    """A row for every hour of three days in each of so many windows: the episode up to there, and what its last state
    says. Days begin with any energy. `most_factor` is the largest factor of a day's load."""
    rows: list[WarmupRow] = []
    tools = describe(Day).tools
    for seed in range(first_seed, first_seed + windows):
        start = TRAIN_START + timedelta(weeks=seed % 52)
        for plain, rng in dataset.synthetic_windows(seed, dataset.ROWS_STREAM, 1, start):
            for row in day_rows(dataset.vary_loads(plain, rng, most_factor), rng):
                rows += day_turns(row, rng, tools, EFFORTS[len(rows) % len(EFFORTS)])
    return rows


def day_turns(
    row: dict[str, Any], rng: np.random.Generator, tools: Sequence[dict[str, Any]], effort: str
) -> Iterator[WarmupRow]:
    """The row of each hour of a day, whose levels are random up to one that is drawn for the day: some days empty the
    storage, others fill it."""
    day, most = Day(), int(rng.integers(1, ACTIONS + 1))
    turns = ("system", SYSTEM_PROMPT), ("user", row["prompt"] + day.reset(**row))
    # The day's own date stands for today's too, so that the model learns to ignore it.
    prompt = render(TEMPLATE, turns, effort, FIXED_DATE, {"tools": tools}).replace(FIXED_DATE, row["date"])
    before, behind = result_parts("functions.run")
    while not day.done:
        values = q_values(day.solution, day.hour, day.stored)
        stamp = datetime.combine(datetime.fromisoformat(row["date"]), time(HOURS[day.hour]))
        state = State(stamp, day.stored, day.load, day.co2, np.full(len(HOURS), np.nan), day.next_co2)
        # The rewards only measure how often the best level is called.
        yield WarmupRow(prompt, [float(value == values.max()) for value in values], readings(state))
        level = int(rng.integers(most))
        prompt += f"{write_call('run', {'level': level})}{before}{day.run(level)}{behind}"


class DayTensors(WarmupTensors):
    """Whole days: rows that end in their day's last call, with the index of each call's level, `levels` (N, hours), and
    `readings` (N, hours, R)."""

    def __init__(self, rows: Sequence[WarmupRow], tokenizer: Tokenizer, device: str) -> None:
        days = [rows[n : n + len(HOURS)] for n in range(0, len(rows), len(HOURS))]
        super().__init__([day[-1] for day in days], tokenizer, device, ends=CALL_ENDS)
        before = self.answer[: self.choices[0]]
        levels = [
            [
                n
                for n in range(len(before), len(ids))
                if ids[n - len(before) : n] == before and ids[n] in self.actions[0]
            ]
            for ids in self.ids.tolist()
        ]
        self.levels = torch.tensor(levels, device=device)
        readings = [[row.readings for row in day] for day in days]
        self.readings = standardized(torch.tensor(readings, dtype=torch.float32, device=device))
