# SPDX-License-Identifier: Apache-2.0
"""Makes the rows of a small model's warm-up: the plant's prompts, and the numbers that it learns to read there."""

import re
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from grpo.common import InputError
from grpo.data.prompts import render
from grpo.harmony import ANSWER_AFTER, ANSWER_BEFORE
from grpo.plan.hub import TINY_PATH
from grpo.tasks.tes import dataset
from grpo.tasks.tes.plant import HOURS, PLANT, low_co2
from grpo.tasks.tes.profiles import TRAIN_START
from grpo.tasks.tes.prompts import State

ACTIONS = 4
TEMPLATE = (TINY_PATH / "chat_template.jinja").read_text(encoding="utf-8")  # of every checkpoint that is made here
EFFORTS = ("low", "medium", "high")
FIXED_DATE = "2025-04-07"  # compact prompts draw their dates around it
# The chain that a reasoning model writes before its answer: numbers from the prompt, then an action, which is its plan.
CHAIN = "<|channel|>analysis<|message|>store {} load {} co2 {} next {} action {}<|end|><|start|>assistant"
NUMBERS = re.compile(
    r"store (\d+) load (\d+) co2 (\d+) next (\d+)|"  # compact prompts, then full ones
    r"energy \[kWh\]: (\d+)$.*?load=(\d+)\.\d kW, co2=\d\.(\d+) kg-CO2/kWh  ←.*?low5_avg=\d\.(\d+)",
    re.DOTALL | re.MULTILINE,
)
WARMUP_SEED, PROBE_SEED = 40_000, 30_000  # seeds of the first windows, above those of data files


class WarmupRow(NamedTuple):
    """A prompt, and the numbers that a small model learns to read out of it."""

    prompt: str
    rewards: list[float]  # of the actions, only for measurements: the model does not learn from them
    readings: list[float]


def readings(state: State) -> list[float]:
    """The numbers that a prompt states or implies; none of them says which action is better.

    They are the energies [kWh] that each action would store, lose to a full storage or fail to serve, and features of
    hour, CO2 intensities and loads that a decision may depend on."""
    now = HOURS.index(state.stamp.hour)
    load, co2, later = state.load_kw[now], state.co2[now], state.co2[now + 1 :]
    balance = state.energy_kwh + PLANT.outputs_kw - load
    gain = low_co2(state.next_co2) - co2
    need = state.load_kw[now + 1 :].sum() - max(state.energy_kwh - load, 0.0)
    stored, lost = balance.clip(0, PLANT.capacity_kwh), (balance - PLANT.capacity_kwh).clip(0)
    return [
        *stored, *lost, *(-balance[:2]).clip(0), float(balance[0] < 0), co2, gain, max(-gain, 0.0), (later < co2).sum(),
        need, state.stamp.hour, load, state.energy_kwh,
    ]  # fmt: skip


def stated_numbers(prompt: str) -> list[str]:
    """The four numbers of the CHAIN as a prompt writes them, so that a model can copy their tokens: stored energy, load
    and CO2 intensity now, and that of the next day's cleanest hours."""
    match = NUMBERS.search(prompt)
    if match is None:
        raise ValueError(f"this is not a prompt of the plant: {prompt[-200:]!r}")
    return [number for number in match.groups() if number is not None]


def rendered(row: Mapping[str, str], number: int) -> str:
    """The prompt of a row of make_dataset.py as train_grpo.py renders it. Date and effort of compact prompts vary
    with `number`, so that the model learns to ignore them."""
    if "prompt" in row:
        return row["prompt"]
    day = date.fromisoformat(FIXED_DATE) + timedelta(days=number % 997)
    turns = ("system", row["system"]), ("user", row["user"])
    prompt = render(TEMPLATE, turns, EFFORTS[number % len(EFFORTS)], FIXED_DATE)
    return prompt.replace(FIXED_DATE, str(day))  # A template is compiled for one date, which takes long.


def warmup_rows(first_seed: int, windows: int, kind: str, most_factor: float) -> list[WarmupRow]:
    """A row for every decision of so many windows, and for ten hours of shortage in each, in 40 ms a window. `kind` is
    that of the prompts, `most_factor` the largest factor of a day's load.

    Each window has its own seed and one of a year's dates, so that no row repeats and dates carry no information."""
    rows = []
    for seed in range(first_seed, first_seed + windows):
        start = TRAIN_START + timedelta(weeks=seed % 52)
        for plain, rng in dataset.synthetic_windows(seed, dataset.ROWS_STREAM, 1, start):
            window = dataset.vary_loads(plain, rng, most_factor)
            decisions = dataset.trajectory(window, rng, kind, None) + dataset.short_hours(window, rng, kind)
            for number, (row, state) in enumerate(decisions):
                rewards = [row[f"reward_action_{k}"] for k in range(ACTIONS)]
                rows.append(WarmupRow(rendered(row, 31 * seed + number), rewards, readings(state)))
    return rows


def standardized(values: torch.Tensor) -> torch.Tensor:
    """Readings (..., R) with mean 0 and deviation 1 over all rows."""
    rows = values.flatten(0, -2)
    return (values - rows.mean(0)) / rows.std(0).clamp(min=1e-3)


class WarmupTensors:
    """Warm-up rows on the device where they are used: `ids` (N, T) of prompt and answer, padded on the right, `lengths`
    (N,), `rewards` (N, actions), and `readings` (N, R) with mean 0 and deviation 1.

    `answer` has the tokens that a row ends in: action 0 between its `ends`, behind a `CHAIN` where the model
    `reasons`. `choices` are the indices in it of the plan, if there is a chain, and of the action; `actions` the
    tokens that name the actions at each of these. `numbers` are the indices of the chain's numbers, which vary by
    row, and `fixed` those of the other tokens."""

    def __init__(
        self,
        rows: list[WarmupRow],
        tokenizer: Tokenizer,
        device: str,
        reasons: bool = False,
        ends: Sequence[str] = (ANSWER_BEFORE, ANSWER_AFTER),
    ) -> None:
        def answer(action: int, numbers: Sequence[str]) -> list[int]:
            chain = CHAIN.format(*numbers, action) if reasons else ""
            return tokenizer.encode(f"{chain}{ends[0]}{action}{ends[1]}").ids

        def differing(other: list[int]) -> list[int]:
            return [n for n, (a, b) in enumerate(zip(self.answer, other, strict=True)) if a != b]

        answers = [answer(k, "0000") for k in range(ACTIONS)]
        self.answer = answers[0]
        self.choices, self.numbers = differing(answers[1]), differing(answer(0, "1111"))
        self.fixed = [n for n in range(len(self.answer)) if n not in {*self.choices, *self.numbers}]
        self.actions = [[answer[n] for answer in answers] for n in self.choices]
        encodings = tokenizer.encode_batch([row.prompt for row in rows], add_special_tokens=False)
        own = [answer(0, stated_numbers(row.prompt)) if reasons else self.answer for row in rows]
        if {len(tokens) for tokens in own} != {len(self.answer)}:
            raise InputError("the tokenizer splits numbers below 1000: a chain of thought needs the o200k one")
        pairs = zip(encodings, own, strict=True)
        ids = [torch.tensor(encoding.ids + tokens, dtype=torch.int32) for encoding, tokens in pairs]
        self.ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        self.lengths = torch.tensor([len(row) for row in ids], device=device)
        self.rewards = torch.tensor([row.rewards for row in rows], device=device)
        readings = [row.readings for row in rows]
        self.readings = standardized(torch.tensor(readings, dtype=torch.float32, device=device))

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, picked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (B, T) and lengths (B,) of the `picked` rows; T is a multiple of 8, as attention kernels want it."""
        lengths = self.lengths[picked]
        columns = -(-int(lengths.max()) // 8) * 8
        ids = self.ids[picked, :columns].long()
        return torch.nn.functional.pad(ids, (0, columns - ids.shape[1])), lengths

    def write_actions(self, ids: torch.Tensor, lengths: torch.Tensor, choice: int, named: torch.Tensor) -> None:
        """Writes the actions `named` (B,) into the `ids` of a batch, at one of the `choices`."""
        tokens = torch.tensor(self.actions[choice], device=ids.device)[named, None]
        ids.scatter_(1, (lengths - len(self.answer) + self.choices[choice])[:, None], tokens)
