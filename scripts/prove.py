#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prove that the path a user runs learns: make a mid-size gpt-oss, train it with train_grpo.py, collect the figures.

    python scripts/prove.py --out runs/proof --device cuda --tokenizer o200k/       # all of it, 20 minutes of one H100
    python scripts/prove.py --out runs/proof --stage make --device cuda --tokenizer o200k/
    python scripts/prove.py --out runs/proof --stage train --set LEARNING_RATE=1e-3
    python scripts/prove.py --out runs/proof --stage collect
    python scripts/prove.py --out runs/proof-cpu --scale cpu                        # a toy model, 10 minutes of one CPU core
    python scripts/prove.py --out runs/proof-small --scale small                    # the same code in a minute, proves nothing

`make` writes OUT/data (training rows, held-out rows and their hourly profile) and OUT/model: a gpt-oss that a supervised
warm-up has taught to read full TES prompts and to answer in the right format, but to choose little better than chance.
`train` runs train_grpo.py on it as a user would, in OUT/run. `collect` compares held-out reward and closed-loop CO2
before and after, and writes them with the command as JSON; its exit code is 1 unless both improved.
A stage that is complete is not repeated (--force does). docs/proof.md explains the recipe.

What is simplified: the model never reasons, and the features that it needs are there before GRPO starts. So this shows
that rollouts, rewards, gradients, hand-over and evaluation work together, not how much gpt-oss-20b would gain.

Exit codes: 0 done, 1 the run did not improve, 2 a usage error; those of train_grpo.py where it fails.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import bench  # noqa: E402
import make_dataset as ds  # noqa: E402
import make_model as mm  # noqa: E402

from rewards import bootstrap_interval  # noqa: E402

if TYPE_CHECKING:
    import torch

# ---- Scales: sizes, recipe of the warm-up, settings of the run -------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Everything that a proof is made from; lengths of phases are shares of the warm-up's seconds or steps."""

    shape: mm.Shape
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
        shape=mm.Shape(
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
        shape=mm.TINY,
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

# ---- Rows ------------------------------------------------------------------------------------------------------------

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
    day = date.fromisoformat(mm.FIXED_DATE) + timedelta(days=number % 997)
    effort = mm.EFFORTS[number % len(mm.EFFORTS)]
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
        start = ds.TRAIN_START + timedelta(weeks=seed % 52)
        for window, rng in ds.synthetic_windows(seed, ds.ROWS_STREAM, 1, start):
            decisions = ds.trajectory(window, rng, kind, None) + ds.short_hours(window, rng, kind)
            for number, (row, _) in enumerate(decisions):
                prompt = rendered(row, 31 * seed + number)
                rewards = [row[f"reward_action_{k}"] for k in range(mm.ACTIONS)]
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

    def decisions(stream: int, count: int, start: date, energy: float | None) -> list[tuple[dict[str, Any], ds.State]]:
        made = ds.synthetic_windows(DATA_SEED, stream, count, start)
        return [one for window, rng in made for one in ds.trajectory(window, rng, scale.prompt, energy)]

    train = ds.with_short_hours(
        decisions(ds.TRAIN_STREAM, scale.train_windows, ds.TRAIN_START, None),
        ds.short_windows(DATA_SEED), scale.prompt, ds.SHORT_SHARE,
    )  # fmt: skip
    heldout = [row for row, _ in decisions(ds.HELDOUT_STREAM, scale.heldout_windows, ds.HELDOUT_START, ds.START_KWH)]
    for stem, rows in (("train", train), ("heldout", heldout)):
        (folder / f"tes_{stem}.csv").write_bytes(ds.rows_csv(rows).encode())
    days = [ds.HELDOUT_START + timedelta(weeks=i) for i in range(scale.heldout_windows)]
    blocks = [
        ds.synthetic_profile((DATA_SEED, ds.HELDOUT_STREAM, i), ds.DECISION_DAYS + 1, day) for i, day in enumerate(days)
    ]
    (folder / "profile_heldout.csv").write_bytes(ds.profile_csv(blocks).encode())


# ---- Tokens: a small vocabulary of what occurs -----------------------------------------------------------------------


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
        self.answer = [self.number[i] for i in tokenizer.encode(f"{mm.ANSWER_BEFORE}0{mm.ANSWER_AFTER}").ids]
        self.place = len(tokenizer.encode(mm.ANSWER_BEFORE).ids)  # of the action within the answer
        self.fixed = [n for n in range(len(self.answer)) if n != self.place]
        self.actions = [self.number[tokenizer.token_to_id(str(k))] for k in range(mm.ACTIONS)]


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
        import torch

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
    answer = tokenizer.encode(f"{mm.ANSWER_BEFORE}0{mm.ANSWER_AFTER}").ids
    made = []
    for start in range(0, len(rows), chunk):
        texts = [prompt for prompt, _, _ in rows[start : start + chunk]]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        made += [np.array(encoding.ids + answer, np.int32) for encoding in encodings]
    return made


def place(encoded: Sequence[np.ndarray], rows: Sequence[tuple], vocabulary: Vocabulary, device: str) -> Rows:
    """Rows on a device; ids become numbers of the vocabulary there."""
    import torch

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


# ---- Model: transformers' gpt-oss with kernels that train fast -------------------------------------------------------


def fast_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    s_aux: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with sinks by PyTorch's fused kernels: the sink is one more key whose value is zero.

    Kernels want sizes that are multiples of 8: the heads get 8 dimensions more, of which one carries the sink's logit,
    and `PAD_TO` keys are added, of which the mask shows the first. query ``[B, H, T, D]``, mask ``[B or 1, 1, T, T + 8]``.
    """
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, heads, columns, size = query.shape
    groups = heads // key.shape[1]
    # Under autocast RoPE leaves float32 behind; the mask has the type to compute in.
    query, key, value = (x.to(attention_mask.dtype) for x in (query, key, value))
    one = query.new_zeros(batch, heads, columns, 8)
    one[..., 0] = 1
    query = torch.cat((query, one), dim=-1)
    key, value = (functional.pad(x.repeat_interleave(groups, dim=1), (0, 8)) for x in (key, value))
    sinks = query.new_zeros(batch, heads, PAD_TO, size + 8)
    sinks[..., 0, size] = (s_aux / scaling).to(query.dtype)
    key = torch.cat((key, sinks), dim=2)
    value = torch.cat((value, torch.zeros_like(sinks)), dim=2)
    # The fused kernel for a GPU that takes any mask; a CPU's own.
    fused = SDPBackend.EFFICIENT_ATTENTION if query.device.type == "cuda" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel([fused, SDPBackend.MATH]):
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out[..., :size].transpose(1, 2).contiguous(), None


def fast_experts(self: Any, hidden_states: torch.Tensor, router_indices: Any, routing_weights: Any) -> torch.Tensor:
    """All experts on all tokens in three matrix products; those that the router left out get a weight of zero.

    Half of the arithmetic is wasted with 4 of 8, and it is still faster than a loop over experts.
    """
    import torch

    experts, hidden, _ = self.gate_up_proj.shape

    def project(columns: slice) -> torch.Tensor:
        matrix = self.gate_up_proj[..., columns].permute(1, 0, 2).reshape(hidden, -1)
        return torch.addmm(self.gate_up_proj_bias[..., columns].reshape(-1), hidden_states, matrix)

    gate = project(slice(0, None, 2)).clamp(max=self.limit)
    up = project(slice(1, None, 2)).clamp(min=-self.limit, max=self.limit)
    # The type of the products, BF16 under autocast: wide tensors in float32 would take twice the memory.
    weights = torch.zeros(len(hidden_states), experts, dtype=gate.dtype, device=gate.device)
    weights = weights.scatter(1, router_indices, routing_weights.to(weights.dtype))
    inner = (up + 1) * gate * torch.sigmoid(gate * self.alpha)
    inner = inner.unflatten(-1, (experts, -1)) * weights.unsqueeze(-1)
    out = inner.flatten(-2) @ self.down_proj.reshape(-1, hidden)
    return (out + weights @ self.down_proj_bias).to(hidden_states.dtype)


@contextlib.contextmanager
def fast_kernels(model: Any) -> Iterator[None]:
    """Use `fast_attention` and `fast_experts` in a gpt-oss of transformers; masks must then be given (`masks`)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    before, forward = model.config._attn_implementation, GptOssExperts.forward
    ALL_ATTENTION_FUNCTIONS.register("prove", fast_attention)
    model.config._attn_implementation, GptOssExperts.forward = "prove", fast_experts
    try:
        yield
    finally:
        model.config._attn_implementation, GptOssExperts.forward = before, forward


def masks(positions: torch.Tensor, window: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Additive masks of `fast_attention`, ``[B, 1, T, T + 8]``, for tokens at ascending positions ``[B, T]``.

    Padding stands behind the tokens, where the causal mask hides it.
    """
    import torch

    least = torch.finfo(dtype).min
    rows, columns = positions.shape
    causal = torch.ones(columns, columns, dtype=torch.bool, device=positions.device).tril()
    near = positions.unsqueeze(2) - positions.unsqueeze(1) < window
    made = {}
    for name, allowed in (("full_attention", causal.unsqueeze(0)), ("sliding_attention", causal & near)):
        mask = torch.full((len(allowed), 1, columns, columns + PAD_TO), least, dtype=dtype, device=positions.device)
        mask[:, 0, :, :columns].masked_fill_(allowed, 0)
        mask[..., columns] = 0  # the sink
        made[name] = mask
    return made


# Standard deviations of the initial matrices, times 1 / sqrt(fan-in). 0.02 everywhere, gpt-oss's initializer range, lets
# narrow layers pass on next to nothing.
INITIAL_GAIN = {
    "q_proj": 0.5, "k_proj": 0.5, "v_proj": 1.0, "o_proj": 0.5, "router": 1.0, "gate_up_proj": 1.0, "down_proj": 0.5,
}  # fmt: skip


def new_model(shape: mm.Shape, vocabulary: Vocabulary) -> Any:
    """A gpt-oss in float32 with the vocabulary's size, and initial weights from which reading is learned quickly."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    size = vocabulary.rest + 1
    config = mm.config_dict(replace(shape, vocab=size), dict.fromkeys(mm.SPECIAL_TOKENS, 0))
    config.pop("quantization_config")
    config |= {"pad_token_id": None, "eos_token_id": None}
    model = GptOssForCausalLM._from_config(
        GptOssConfig.from_dict(config), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 0.1)
        for name, parameter in model.model.layers.named_parameters():
            *_, module, kind = name.split(".")
            gain = INITIAL_GAIN.get(kind if module == "experts" else module)
            if gain and parameter.dim() > 1 and not kind.endswith("bias"):
                fan_in = parameter.shape[-2] if module == "experts" else parameter.shape[-1]
                parameter.normal_(0.0, gain / math.sqrt(fan_in))
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(0.0, 0.5)
            layer.self_attn.sinks.requires_grad_(False)
        initial_numbers(model, vocabulary)
        mm.initial_heads(model, HEAD_DISTANCES)
    return model


def initial_numbers(model: Any, vocabulary: Vocabulary) -> None:
    """Give number tokens embeddings that vary smoothly with the number: 358 begins near 357, as in the tiny model."""
    import torch

    numbers = torch.tensor([vocabulary.number[i] for i in vocabulary.values])
    value = torch.tensor([float(v) for v in vocabulary.values.values()]).unsqueeze(1)
    fine, coarse = value / 100 * math.pi, value / (LARGEST_NUMBER + 1) * math.pi
    waves = [fine * k for k in range(1, 5)] + [coarse * k for k in range(1, 9)]
    linear = [value / 1000 - 0.3, (value / 100).clamp(max=1) - 0.5, value.log1p() / 7 - 0.5]
    features = torch.cat([*linear, *(w.sin() for w in waves), *(w.cos() for w in waves)], dim=1)
    table = features @ (torch.randn(features.shape[1], model.config.hidden_size) * 0.1)
    weight = model.model.embed_tokens.weight
    weight[numbers] += table.to(weight.device)


# Tokens back, one for each head, in the first two sliding layers: neighbours first, then, in the second, an hour's own
# numbers and the same number an hour earlier (a line of the forecast has 26 tokens).
HEAD_DISTANCES = ((1, 2, 3, 4, 5, 6, 7, 8), (1, 8, 6, 11, 17, 26, 20, 3))


def forward(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Last hidden states ``[B, T, hidden]``; BF16 autocast on a GPU, float32 elsewhere. Under `fast_kernels`."""
    import torch

    cuda = ids.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else next(model.parameters()).dtype
    # Whole rows share their positions, and with them the masks.
    first = positions[:1] if bool((positions == positions[:1]).all()) else positions
    mask = masks(first, model.config.sliding_window, dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
        return model.model(
            input_ids=ids.long(), attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state


def log_probs(model: Any, hidden: torch.Tensor, others: int) -> torch.Tensor:
    """Log-probs in float32 over the small vocabulary; the last one is that of all other tokens together."""
    logits = model.lm_head(hidden.to(model.lm_head.weight.dtype)).float()
    offset = logits.new_zeros(logits.shape[-1])
    offset[-1] = math.log(others) if others else -math.inf
    return (logits + offset).log_softmax(-1)


def at_answer(hidden: torch.Tensor, valid: torch.Tensor, answer: int) -> torch.Tensor:
    """Hidden states ``[B, answer, hidden]`` that predict the last `answer` tokens of each row."""
    import torch

    index = valid[:, None] - answer - 1 + torch.arange(answer, device=valid.device)
    return hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


def figures(
    model: Any, rows: Rows, vocabulary: Vocabulary, focus: bool = False, limit: int | None = None
) -> dict[str, float]:
    """What sampling at temperature 1 gives in expectation, from probabilities; the keys are those of make_model.py.

    ``parse_rate``, ``reward`` (an unparseable answer counts 0), ``greedy``, ``random``, ``best_constant``, ``oracle``;
    with full prompts also ``unserved``, the probability of an action that leaves load unserved, in hours that have one.
    """
    import torch

    fixed = vocabulary.fixed
    wanted = torch.tensor(vocabulary.answer, device=rows.ids.device)[fixed]
    chosen = []
    count = min(len(rows), limit or len(rows))
    with torch.no_grad(), fast_kernels(model):
        for start in range(0, count, 64):
            picked = torch.arange(start, min(start + 64, count), device=rows.ids.device)
            ids, positions, valid = rows.batch(picked, len(vocabulary.answer), focus)
            hidden = at_answer(forward(model, ids, positions), valid, len(vocabulary.answer))
            logp = log_probs(model, hidden, vocabulary.others)
            around = logp[:, fixed, wanted].sum(-1)
            chosen.append((logp[:, vocabulary.place, vocabulary.actions] + around.unsqueeze(-1)).exp())
    p, rewards = torch.cat(chosen), rows.rewards[:count]
    bad = torch.tensor(ds.Plant().outputs_kw, device=p.device) < rows.deficit[:count, None]
    found = {"unserved": ((p * bad).sum() / bad.any(-1).sum()).item()} if bad.any() else {}
    return found | mm.answer_figures(p, rewards)


# ---- Warm-up ---------------------------------------------------------------------------------------------------------


def describe(found: Mapping[str, float]) -> str:
    return (
        f"reward {found['reward']:.3f} greedy {found['greedy']:.3f} parse {found['parse_rate']:.3f} (random "
        f"{found['random']:.3f} constant {found['best_constant']:.3f} oracle {found['oracle']:.3f})"
    ) + (f" unserved {found['unserved']:.3f}" if "unserved" in found else "")


class Clock:
    """How far the warm-up is, 0 to 1: by the seconds or by the steps, whichever is further."""

    def __init__(self, seconds: float, steps: int) -> None:
        self.seconds, self.steps, self.step, self.started = seconds, steps, 0, time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def progress(self) -> float:
        return min(1.0, max(self.elapsed / self.seconds, self.step / self.steps))


def draw_weights(deficit: torch.Tensor, scale: Scale) -> torch.Tensor:
    """How often each row is drawn, relative to others; `deficit` as `Rows.deficit`, ``[N]``."""
    import torch

    return torch.where((deficit > -NEAR_KWH) & (deficit <= 0), scale.near_weight, 1.0)


def warm_up(
    model: Any, rows: Rows, probe: Rows, vocabulary: Vocabulary, scale: Scale, seed: int, log: Callable[[str], None]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, float]]]:
    """Train in two phases, read and soften, as make_model.py's tiny model; docs/proof.md says what and why.

    Returns:
        the experts' blocks and scales by their names in the checkpoint, and `figures` after each phase and right after
        the experts were rounded to MXFP4.
    """
    import torch

    device, answer = rows.ids.device, len(vocabulary.answer)
    generator = torch.Generator(device=device).manual_seed(seed)
    fixed, actions = vocabulary.fixed, torch.tensor(vocabulary.actions, device=device)
    wanted_fixed = torch.tensor(vocabulary.answer, device=device)[fixed]
    middle: dict[str, torch.Tensor] = {}
    depth = 3 * len(model.model.layers) // 4
    tap = model.model.layers[depth if depth % 2 else depth - 1]  # a layer that attends to everything
    hook = tap.register_forward_hook(lambda module, inputs, output: middle.update(hidden=output))
    probe_head = None
    if rows.readings is not None:
        mean, deviation = rows.readings.mean(0), rows.readings.std(0).clamp(min=1e-6)
        probe_head = torch.nn.Linear(model.config.hidden_size, len(QUANTITIES)).to(device)
    clock = Clock(scale.seconds, scale.steps)
    seen = {"tokens": 0, "rows": 0, "said": 0.0}
    chance = draw_weights(rows.deficit, scale)

    def phase(name: str, end: float, lr: float, targets: torch.Tensor, focus_until: float) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        trained = parameters + (list(probe_head.parameters()) if probe_head else [])
        optimizer = torch.optim.AdamW(
            trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True if device.type == "cuda" else None
        )
        first_step, begin = clock.step, clock.progress
        while clock.progress < end:
            done = (clock.progress - begin) / max(end - begin, 1e-9)
            rise = min(1.0, (clock.step - first_step + 1) / 30)
            for group in optimizer.param_groups:
                group["lr"] = lr * rise * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
            focus = clock.progress < focus_until
            picked = torch.multinomial(chance, scale.batch, replacement=True, generator=generator)
            ids, positions, valid = rows.batch(picked, answer, focus)
            ids = ids.long()
            # The action's token is visible to the tokens behind it: show them all four.
            shown = actions[torch.randint(mm.ACTIONS, (scale.batch,), device=device, generator=generator)]
            ids.scatter_(1, (valid - answer + vocabulary.place)[:, None], shown[:, None])

            hidden = forward(model, ids, positions)
            logp = log_probs(model, at_answer(hidden, valid, answer), vocabulary.others)
            wanted = targets[picked]
            action_loss = -(wanted * logp[:, vocabulary.place, actions]).sum(-1).mean()
            loss = action_loss - scale.format_weight * logp[:, fixed, wanted_fixed].sum(-1).mean()
            text_loss = reading_loss = torch.zeros((), device=device)
            if scale.text_weight:
                # Next tokens of the prompt, except across a gap; one row in four is enough, the text is always the same.
                some = slice(0, max(1, scale.batch // 4))
                column = torch.arange(ids.shape[1] - 1, device=device)
                follows = positions[some, 1:] == positions[some, :-1] + 1
                scored = follows & (column < (valid[some] - answer - 1)[:, None])
                text = log_probs(model, hidden[some, :-1], vocabulary.others)
                text = text.gather(-1, ids[some, 1:, None])[..., 0]
                text_loss = -(text * scored).sum() / scored.sum()
                loss = loss + scale.text_weight * text_loss
            if probe_head is not None and scale.reading_weight:
                state = at_answer(middle["hidden"], valid, answer)[:, vocabulary.place].float()
                state = torch.nn.functional.rms_norm(state, state.shape[-1:])
                truth = (rows.readings[picked] - mean) / deviation
                reading_loss = torch.nn.functional.smooth_l1_loss(probe_head(state), truth)
                loss = loss + scale.reading_weight * reading_loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            clock.step += 1
            seen["tokens"] += ids.numel()
            seen["rows"] += len(ids)
            if clock.elapsed - seen["said"] > min(20.0, clock.seconds / 12):
                span = clock.elapsed - seen["said"]
                entropy = -(wanted * wanted.clamp(min=1e-9).log()).sum(-1).mean()
                found = figures(model, probe, vocabulary, limit=256)
                focused = figures(model, probe, vocabulary, True, 256)["reward"] if focus else math.nan
                log(
                    f"{clock.elapsed:5.0f} s {name}{' focused' * focus} step {clock.step} rows {seen['rows']}: KL "
                    f"{(action_loss - entropy).item():.3f} text {text_loss.item():.2f} reading {reading_loss.item():.3f} "
                    + describe(found)
                    + (f" focused {focused:.3f}" if focus else "")
                    + f" {seen['tokens'] / span:,.0f} tokens/s"
                )
                seen["tokens"], seen["said"] = 0, clock.elapsed
                if not math.isfinite(loss.item()):
                    raise mm.ModelError("the warm-up's loss is not finite: try a smaller --lr")

    stages = {}
    packed = {}
    try:
        with fast_kernels(model):
            phase("read", 1 - scale.soften, scale.lr, rows.rewards, scale.focus)
            stages["read"] = figures(model, probe, vocabulary)
            log(f"after reading:  {describe(stages['read'])}")
            with torch.no_grad():
                for name, weight in mm._expert_matrices(model):
                    blocks, scales = mm.quantize_mxfp4(weight.transpose(1, 2))
                    weight.copy_(mm.dequantize_mxfp4(blocks, scales).transpose(1, 2))
                    weight.requires_grad_(False)
                    packed |= {f"{name}_blocks": blocks.cpu(), f"{name}_scales": scales.cpu()}
            stages["rounded"] = figures(model, probe, vocabulary)
            log(f"after rounding: {describe(stages['rounded'])}")
            soft = rows.rewards.clamp(min=1e-30) ** scale.sharpness
            soft = (1 - scale.uniform) * soft / soft.sum(-1, keepdim=True) + scale.uniform / mm.ACTIONS
            phase("soften", 1.0, scale.soften_lr, soft, 0.0)
    finally:
        hook.remove()
    # What the checkpoint holds: everything but the experts in BF16.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                parameter.copy_(parameter.to(torch.bfloat16))
    stages["stored"] = figures(model, probe, vocabulary)
    log(f"as stored:      {describe(stages['stored'])}; {clock.step} steps, {seen['rows']} rows, {clock.elapsed:.0f} s")
    return packed, stages


def checkpoint_tensors(
    model: Any, packed: Mapping[str, torch.Tensor], vocabulary: Vocabulary, vocab: int, seed: int
) -> dict[str, torch.Tensor]:
    """Tensors as the checkpoint stores them: the small vocabulary's rows go back to their ids.

    Other tokens get random embeddings, and as output rows the one that stood for them all, with a little noise.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(vocabulary.ids)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16)
        for name, tensor in model.state_dict().items()
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    for name, std in (("model.embed_tokens.weight", 0.1), ("lm_head.weight", 0.002)):
        trained = tensors[name].float()
        table = torch.randn(vocab, trained.shape[1], generator=generator) * std
        if name.startswith("lm_head"):
            table += trained[-1]
        table[ids] = trained[:-1]
        tensors[name] = table.to(torch.bfloat16)
    return tensors | dict(packed)


# ---- Stage make ------------------------------------------------------------------------------------------------------


def load_tokenizer(folder: Path | None) -> tuple[Any, bytes]:
    """(tokenizer, bytes of its tokenizer.json): the one in `folder`, or the tiny model's own."""
    from tokenizers import Tokenizer

    text = mm._read_tokenizer(folder) if folder else mm.make_tokenizer(mm.TINY.vocab).to_str().encode()
    return Tokenizer.from_str(text.decode()), text


def make(options: argparse.Namespace, scale: Scale, log: Callable[[str], None]) -> None:
    """Write OUT/data and OUT/model; figures of the warm-up are kept in OUT/model/warmup.json."""
    import torch

    started = time.perf_counter()
    model_dir = options.out / "model"
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise mm.ModelError("--device cuda: PyTorch sees no GPU here; choose --device cpu --scale small")
    write_data(options.out / "data", scale)
    if options.tokenizer is None and scale.prompt == "full":
        raise mm.ModelError("full prompts need --tokenizer DIR with tokenizer.json (o200k with Harmony's tokens)")
    tokenizer, tokenizer_json = load_tokenizer(options.tokenizer)
    shape = replace(scale.shape, vocab=(mm.TINY if options.tokenizer is None else mm.GPT_OSS_20B).vocab)
    token_ids = mm.special_token_ids(tokenizer_json, shape.vocab)
    mm.require_space(model_dir, mm.checkpoint_bytes(shape) + 64 * 2**20)

    # Workers start before CUDA does, and before the tokenizer's threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    train_rows = make_rows(WARMUP_SEED, scale.windows, scale.prompt)
    probe_rows = make_rows(PROBE_SEED, scale.probe_windows, scale.prompt)
    log(f"{len(train_rows)} + {len(probe_rows)} rows made, {time.perf_counter() - started:.0f} s")
    encoded, probe_encoded = encode(tokenizer, train_rows), encode(tokenizer, probe_rows)
    with (options.out / "data" / "tes_train.csv").open(newline="", encoding="utf-8") as file:
        own = [(rendered(row, n), None, None) for n, row in enumerate(csv.DictReader(file))]
    used = {
        int(i) for rows in (encoded, probe_encoded, encode(tokenizer, own)) for i in np.unique(np.concatenate(rows))
    }
    vocabulary = Vocabulary(tokenizer, used, shape.vocab)
    rows = place(encoded, train_rows, vocabulary, options.device)
    probe = place(probe_encoded, probe_rows, vocabulary, options.device)
    answer = len(vocabulary.answer)
    head, tail = shared_ends([row[:-answer] for row in encoded[:3000]])
    rows.head = probe.head = head
    rows.tail = probe.tail = tail
    widest = int(rows.lengths.max())
    saved = (head + tail - 3 * KEPT_TAIL) / widest
    if scale.focus and saved < 0.2:  # nothing worth leaving out
        scale = replace(scale, focus=0.0)
    log(
        f"{widest} tokens at most, the first {head} and the last {tail} of a prompt never change; {vocabulary.rest} of "
        f"{shape.vocab} tokens occur; {time.perf_counter() - started:.0f} s"
    )
    torch.manual_seed(options.seed)
    model = new_model(shape, vocabulary).to(options.device)
    total = mm.parameter_count(shape)
    body = total - 2 * shape.vocab * shape.hidden
    log(f"{total:,} parameters, {body:,} besides the embeddings")
    packed, stages = warm_up(model, rows, probe, vocabulary, scale, options.seed, log)
    if stages["rounded"]["reward"] < stages["rounded"]["best_constant"]:
        log("WARNING: the warm-up reads hardly anything: GRPO will have little to choose by (more --warmup-seconds?)")
    if stages["rounded"].get("unserved", 0.0) > 0.05:
        log(
            "WARNING: the model does not tell hours with too little storage from others: GRPO would make the plant worse"
        )

    tensors = checkpoint_tensors(model, packed, vocabulary, shape.vocab, options.seed)
    with mm.new_directory(model_dir, force=True) as directory:
        mm.write_weights(directory, mm.tensor_specs(shape), lambda spec: tensors[spec.name])
        mm.write_json(directory / "config.json", mm.config_dict(shape, token_ids))
        mm.write_json(directory / "generation_config.json", mm.generation_config_dict(token_ids))
        mm.write_json(directory / "tokenizer_config.json", mm.tokenizer_config_dict())
        (directory / "tokenizer.json").write_bytes(tokenizer_json)
        template = mm.chat_template() if scale.prompt == "full" else mm.chat_template(*mm.TINY_SYSTEM)
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        mm.check_checkpoint(directory)
        seconds = time.perf_counter() - started
        record = {
            "parameters": total,
            "besides_embeddings": body,
            "seconds": round(seconds, 1),
            "stages": stages,
            "scale": asdict(scale),
        }
        del model, rows
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
        record["loaded"] = read_back(directory, probe_rows, encode(tokenizer, probe_rows), vocabulary, options.device)
        mm.write_json(directory / "warmup.json", record)
    log(f"loaded again:   {describe(record['loaded'] | {k: stages['stored'][k] for k in REFERENCES})}")
    log(
        "prompt tokens as the parity gate scores them (nats): mean -log p {text_nll:.3f}, BF16 against float32 "
        "{rounding_nats:.4f}, effect of a random adapter {adapter_nats:.4f}".format(**record["loaded"])
    )
    log(f"{model_dir} written and checked, {time.perf_counter() - started:.0f} s")


REFERENCES = ("random", "best_constant", "oracle")


def read_back(
    directory: Path,
    rows: Sequence[tuple],
    encoded: Sequence[np.ndarray],
    vocabulary: Vocabulary,
    device: str,
    limit: int = 120,
) -> dict[str, float]:
    """Load the checkpoint as train_grpo.py does (BF16, eager attention) and measure it on some probe rows.

    Returns reward, greedy, parse_rate as `figures` does, over the whole vocabulary; and for the first 256 tokens of
    four prompts: mean negative log-prob, mean difference to float32, mean effect of a random change of q, k, v and o
    by 0.3 of their norm (what the parity gate's test adapter does), all in nats.
    """
    import torch

    import train_grpo

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model = train_grpo.load_model(str(directory), config, "eager").to(device).eval()
    answer = [vocabulary.ids[n] for n in vocabulary.answer]
    fixed, place_, actions = vocabulary.fixed, vocabulary.place, [vocabulary.ids[n] for n in vocabulary.actions]
    every = max(1, len(rows) // limit)
    picked = list(range(0, len(rows), every))[:limit]
    p = []

    def score(ids: Sequence[int], last: int) -> torch.Tensor:
        hidden = model.model(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state
        return model.lm_head(hidden[:, -last - 1 : -1]).float().log_softmax(-1)[0]

    with torch.no_grad():
        for n in picked:
            logp = score(encoded[n].tolist(), len(answer))
            around = logp[fixed, torch.tensor(answer, device=device)[fixed]].sum()
            p.append((logp[place_, actions] + around).exp().cpu())
        texts = [row[:256].tolist() for row in encoded[:4]]

        def text() -> torch.Tensor:
            scored = [
                score(row, len(row) - 1).gather(-1, torch.tensor(row[1:], device=device)[:, None]) for row in texts
            ]
            return torch.cat(scored)[:, 0].cpu()

        plain = text()
        generator = torch.Generator().manual_seed(0)
        kept = {}
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                weight = getattr(layer.self_attn, name).weight
                kept[weight] = weight.clone()
                rank = 16
                a, b = (torch.randn(size, rank, generator=generator) for size in weight.shape)
                update = (a @ b.T).to(weight.device)
                weight += (update * (0.3 * weight.float().norm() / update.norm())).to(weight.dtype)
        changed = text()
        model.float()
        exact = text()  # rounding with the adapter on, as the gate sees it
    found = torch.stack(p)
    rewards = torch.tensor([rows[n][1] for n in picked])
    return {
        "parse_rate": found.sum(-1).mean().item(),
        "reward": (found * rewards).sum(-1).mean().item(),
        "greedy": rewards.gather(1, found.argmax(-1, keepdim=True)).mean().item(),
        "text_nll": -plain.mean().item(),
        "rounding_nats": (changed - exact).abs().mean().item(),
        "adapter_nats": (changed - plain).abs().mean().item(),
    }


# ---- Stage train -----------------------------------------------------------------------------------------------------


def run_settings(options: argparse.Namespace, scale: Scale) -> dict[str, str]:
    """The settings of train_grpo.py; those given with --set win. An interrupted run goes on unless its model changed."""
    return {
        "MODEL_ID": str(options.out / "model"),
        "DATA": str(options.out / "data" / "tes_train.csv"),
        "EVAL_DATA": str(options.out / "data" / "tes_heldout.csv"),
        "EVAL_PROFILE": str(options.out / "data" / "profile_heldout.csv"),
        "OUTPUT_DIR": str(options.out / "run"),
        **scale.settings,
        **({"OVERWRITE": "1"} if options.force or stale(options.out) else {}),
        **dict(options.set),
    }


def stale(out: Path) -> bool:
    """Whether the run in OUT/run began with another model than the one that is in OUT/model now."""
    run, model = out / "run" / "settings.json", out / "model" / "warmup.json"
    return run.is_file() and model.is_file() and run.stat().st_mtime < model.stat().st_mtime


def command_line(settings: Mapping[str, str]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), "python train_grpo.py"])


def train(options: argparse.Namespace, scale: Scale, log: Callable[[str], None]) -> int:
    """Run train_grpo.py on OUT/model; its exit code. The command is kept in OUT/command.txt."""
    if not (options.out / "model" / "config.json").is_file():
        raise mm.ModelError(f"{options.out / 'model'} is missing: run --stage make first")
    settings = run_settings(options, scale)
    command = command_line(settings)
    (options.out / "command.txt").write_text(command + "\n", encoding="utf-8")
    log(command)
    started = time.perf_counter()
    code = subprocess.run([sys.executable, str(ROOT / "train_grpo.py")], env=os.environ | settings).returncode
    (options.out / "train_seconds.txt").write_text(f"{time.perf_counter() - started:.1f}\n", encoding="utf-8")
    log(f"train_grpo.py ended with exit code {code} after {time.perf_counter() - started:.0f} s")
    return code


# ---- Stage collect ---------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def reward_figures(found: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """(figures of evaluation.json, whether held-out reward improved beyond its interval)."""
    made = [bench.figure(f"heldout_{name}", found[name], "reward") for name in ("random", "constant", "oracle")]
    for when in ("before", "after"):
        for name, unit in (
            ("reward", "reward"), ("reward_low", "reward"), ("reward_high", "reward"), ("regret", "reward"),
            ("parse_rate", "share"), ("best_action_rate", "share"),
        ):  # fmt: skip
            if name in found[when]:
                note = "95% interval, bootstrap over prompts" if name.endswith(("low", "high")) else ""
                made.append(bench.figure(f"{name}_{when}", found[when][name], unit, note))
    gain = found.get("difference", {})
    for name in ("reward", "reward_low", "reward_high"):
        if name in gain:
            made.append(bench.figure(f"{name}_gain", gain[name], "reward", "after minus before, paired by prompt"))
    return made, bool(gain) and gain["reward_low"] > 0


def plant_figures(found: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """(figures of closed_loop.json, whether CO2 fell beyond its interval).

    A policy could save CO2 by leaving load unserved or the storage empty, so what counts is `priced_kg`
    (docs/evaluation.md), per window, base minus trained, with a paired bootstrap over windows.
    """
    made = []
    for name, total in found["totals"].items():
        made.append(bench.figure(f"co2_kg_{name}", total["co2_kg"], "kg", "all held-out windows"))
        made.append(bench.figure(f"unserved_kwh_{name}", total["unserved_kwh"], "kWh"))
        if total.get("regret_percent") is not None:
            low, high = total.get("regret_percent_low"), total.get("regret_percent_high")
            note = "" if low is None or high is None else f"95% interval {low:.2f} to {high:.2f}"
            made.append(bench.figure(f"regret_percent_{name}", total["regret_percent"], "%", note))
    better = False
    for key, note in (("co2_kg", "emissions alone"), ("priced_kg", "and unserved load and storage at their price")):
        pairs = [[window["policies"][name]["mean"][key] for name in ("base", "trained")] for window in found["windows"]]
        saved = [before - after for before, after in pairs]
        mean, (low, high) = math.fsum(saved) / len(saved), bootstrap_interval(saved)
        better = low > 0  # the last one decides
        made += [
            bench.figure(f"{key}_saved", mean, "kg/window", f"base minus trained, {note}"),
            bench.figure(f"{key}_saved_low", low, "kg/window", "95%, paired bootstrap over windows"),
            bench.figure(f"{key}_saved_high", high, "kg/window", "95%, paired bootstrap over windows"),
        ]
    return made, better


def collect(options: argparse.Namespace, log: Callable[[str], None]) -> int:
    """Write the figures as JSON, copy the report; 0 if reward and closed loop improved, 1 if not."""
    run, warmup = options.out / "run", read_json(options.out / "model" / "warmup.json")
    evaluation, plant = read_json(run / "evaluation.json"), read_json(run / "closed_loop.json")
    if "before" not in evaluation or "after" not in evaluation:
        raise mm.ModelError(f"{run / 'evaluation.json'} has no result before and after: run --stage train first")
    made, learned = reward_figures(evaluation)
    verdicts = {"held-out reward": learned}
    if {"base", "trained"} <= plant.get("totals", {}).keys():
        more, controlled = plant_figures(plant)
        made += more
        verdicts["closed loop"] = controlled
    else:
        log(f"NOTE: {run / 'closed_loop.json'} holds no base and trained model: closed loop not collected")
        verdicts["closed loop"] = False
    if warmup:
        made.append(bench.figure("besides_embeddings", warmup["besides_embeddings"], "parameters"))
        made.append(bench.figure("make_s", warmup["seconds"], "s", "data, warm-up, checkpoint"))
        for name, text in (
            ("read", "end of phase 1"), ("rounded", "right after rounding the experts to MXFP4"),
            ("stored", "end of phase 2, as stored"),
        ):  # fmt: skip
            note = f"warm-up, expected when sampling, rows of its own, {text}"
            made.append(bench.figure(f"warmup_reward_{name}", warmup["stages"][name]["reward"], "reward", note))
        made.append(bench.figure("warmup_parse_rate", warmup["stages"]["stored"]["parse_rate"], "share"))
        made.append(bench.figure("warmup_reward_loaded", warmup["loaded"]["reward"], "reward", "some of these rows"))
    seconds = options.out / "train_seconds.txt"
    if seconds.is_file():
        made.append(bench.figure("train_s", float(seconds.read_text()), "s", "train_grpo.py from start to zip"))
    metrics = run / "metrics.csv"
    if metrics.is_file():
        steps = [row for row in bench.steps_of(run) if row.get("reward")]
        for name, part in (("first", steps[:5]), ("last", steps[-5:])):
            mean = math.fsum(float(row["reward"]) for row in part) / len(part)
            made.append(bench.figure(f"train_reward_{name}5", mean, "reward", f"mean of the {name} 5 steps' rollouts"))
        later = [float(row["step_s"]) for row in steps[1:] if row.get("step_s")]
        if later:
            made.append(bench.figure("step_s", sum(later) / len(later), "s", "mean, without the first step"))
        made.append(bench.figure("steps", len(steps), "steps"))
    record = options.out / "command.txt"
    command = record.read_text(encoding="utf-8").strip() if record.is_file() else "python scripts/prove.py"
    command = command.replace(str(options.out.resolve()), "OUT")  # where it lay on this machine says nothing
    how = f"python scripts/prove.py --scale {options.scale} --out OUT, which ran: {command}"
    bench.write(options.results, made, how)
    report = run / "report.html"
    if report.is_file():
        shutil.copyfile(report, options.results.with_name(options.report_name))
    else:
        log(f"NOTE: {report} is missing, so no report was copied")
    for name, passed in verdicts.items():
        log(f"{'PASS' if passed else 'FAIL'}: {name} {'improved' if passed else 'did not improve'} beyond its interval")
    return 0 if all(verdicts.values()) else 1


# ---- Command line ----------------------------------------------------------------------------------------------------


def setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.isupper():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as LEARNING_RATE=1e-3")
    return name, value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Prove that the path a user runs learns.", epilog="Examples and exit codes: top of this file."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the proof: data/, model/, run/")
    parser.add_argument("--scale", choices=tuple(SCALES), default="mid", help="(default %(default)s)")
    parser.add_argument("--stage", choices=("make", "train", "collect", "all"), default="all")
    parser.add_argument("--device", default="cpu", help="of the warm-up: cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json or tokenizer.json.xz")
    parser.add_argument("--warmup-seconds", type=float, help="budget of the warm-up (default: the scale's)")
    parser.add_argument("--warmup-steps", type=int, help="budget in steps (default: the scale's)")
    parser.add_argument("--batch", type=int, help="rows of a warm-up step")
    parser.add_argument("--windows", type=int, help="of warm-up rows, 40 each")
    parser.add_argument("--probe-windows", type=int, help="of the rows on which the warm-up is measured")
    parser.add_argument("--lr", type=float, help="learning rate of the warm-up's first phase")
    parser.add_argument("--sharpness", type=float, help="of the softened targets: 0 says nothing, 1 is the reward")
    parser.add_argument(
        "--uniform", type=float, help="share of the softened targets that is spread evenly: 1 knows the format alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and warm-up (default %(default)s)")
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="a setting of train_grpo.py"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/proof-h100.json", help="JSON to write")
    parser.add_argument("--report-name", default="proof-report.html", help="of the report, beside the JSON")
    parser.add_argument("--force", action="store_true", help="repeat stages that are complete")
    return parser.parse_args(argv)


def chosen_scale(options: argparse.Namespace) -> Scale:
    """The scale with the command line's changes."""
    changes = {
        "seconds": options.warmup_seconds, "steps": options.warmup_steps, "batch": options.batch,
        "windows": options.windows, "probe_windows": options.probe_windows, "lr": options.lr, "sharpness": options.sharpness,
        "uniform": options.uniform,
    }  # fmt: skip
    return replace(SCALES[options.scale], **{name: value for name, value in changes.items() if value is not None})


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_args(argv)
    scale = chosen_scale(options)
    started = time.perf_counter()

    def log(line: str) -> None:
        print(line, flush=True)

    def wanted(stage: str, complete: bool) -> bool:
        if options.stage == stage:
            return options.force or not complete
        return options.stage == "all" and (options.force or not complete)

    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if wanted("make", (options.out / "model" / "warmup.json").is_file()):
            make(options, scale, log)
        trained = "after" in read_json(options.out / "run" / "evaluation.json") and not stale(options.out)
        if wanted("train", trained):
            code = train(options, scale, log)
            if code:
                return code
        if options.stage in ("collect", "all"):
            return collect(options, log)
    except (mm.ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        log(f"{time.perf_counter() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
