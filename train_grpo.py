#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune gpt-oss-20b with GRPO on one GPU: one script, from CSVs of rewards to a trained LoRA adapter and a zip.

    python train_grpo.py --help                   every setting: default, unit, one sentence
    python train_grpo.py --check                  every check that needs no training, and the plan of the run
    MODEL_ID=tiny python train_grpo.py            the whole path on two CPU cores in minutes (model made on the spot)
    DATA='days/*.csv' python train_grpo.py        the real run, on one GPU with 80 GB

Settings are environment variables. The file reads in the order in which a run passes through it: settings, preflight,
data, model, rollouts, learner, logging, main. Nothing heavy is imported before the preflight has passed.

Exit codes: 0 the run is complete, 2 the input must be mended (all problems are listed), 130, 143 or 129 interrupted by
Ctrl-C, SIGTERM or a lost terminal (during training after a checkpoint was saved: the same command continues it), 3 vLLM
and the trainer do not agree (the parity gate), 4 vLLM failed (the same command continues from the last checkpoint), 1
anything else.

What is simplified: one process and one GPU; one optimizer step per rollout, so the policy ratio is 1 until the first
update of a step and clipping never acts; no reward model, only functions (rewards.py).
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import bisect
import collections
import contextlib
import csv
import dataclasses
import difflib
import errno
import functools
import gc
import glob
import hashlib
import importlib
import importlib.metadata
import inspect
import io
import itertools
import json
import logging
import math
import netrc
import os
import platform
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import urllib.parse
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rewards

ROOT = Path(__file__).resolve().parent
log = logging.getLogger("train_grpo")

# ---- Settings --------------------------------------------------------------------------------------------------------


def knob(group: str, default: Any, unit: str, text: str, *, tiny: Any = None, **limits: Any) -> Any:
    """One setting: its group in `--help`, default, unit, one sentence, the default for `MODEL_ID=tiny` where that
    differs, and limits: `low`, `high` (both inclusive), `above` (exclusive), `choices`."""
    return field(default=default, metadata={"group": group, "unit": unit, "text": text, "tiny": tiny, **limits})


@dataclass(frozen=True)
class Settings:
    """Every setting of a run, one line each; the name is the environment variable's. None means `auto`."""

    # fmt: off
    MODEL_ID: str = knob("Model", "openai/gpt-oss-20b", "", "Hub id, local folder, or `tiny`: a gpt-oss of 0.2M parameters made on first use.")
    ATTN_IMPL: str = knob("Model", "auto", "", "Attention of the learner: `auto`, `torch_flash` (FlashAttention 2 as torch ships it), `flash_attention_2`, `flash_attention_3`, `flash_attention_4`, `flex_attention`, `eager`, or a Hub kernel (`kernels-community/...`).")
    EXPERTS: str | None = knob("Model", "bf16", "", "The learner's experts on the GPU: `bf16` dequantized once, `mxfp4` packed (a third of the memory) and dequantized layer by layer, `auto` by the memory plan.", choices=("bf16", "mxfp4"))
    LORA_R: int = knob("Model", 4, "rank", "Rank of the LoRA adapter.", tiny=8, low=1)
    LORA_ALPHA: float = knob("Model", 8.0, "", "LoRA scale: updates are multiplied by LORA_ALPHA / LORA_R.", tiny=16.0, above=0)
    LORA_TARGETS: str = knob("Model", "all-linear", "", "`all-linear` (q, k, v and o projections) or a comma-separated list of module names.")
    LORA_DROPOUT: float = knob("Model", 0.0, "share", "Dropout on the adapter's input while learning.", low=0, high=0.9)

    DATA: str = knob("Data", "data/tes_train.csv", "", "Training CSVs: files or globs, separated by commas.", tiny="data/tes_train_compact.csv")
    EVAL_DATA: str = knob("Data", "data/tes_heldout.csv", "", "Held-out CSVs for the evaluation before and after training.", tiny="data/tes_heldout_compact.csv")
    EVAL_SAMPLES: int = knob("Data", 4, "completions", "Completions per held-out prompt, and passes through the closed loop, before and after training; 0 skips both.", tiny=8, low=0)
    EVAL_PROFILE: str = knob("Data", "data/profile_heldout.csv", "", "Hourly profiles for the closed loop before and after training; it runs where the held-out prompts are the TES plant's; empty skips it.")
    REASONING_EFFORT: str = knob("Data", "medium", "", "Reasoning effort that the chat template writes into prompts which are not rendered yet.", tiny="low", choices=("low", "medium", "high"))
    PROMPT_DATE: str = knob("Data", "2025-11-06", "date", "Current date that the chat template writes, fixed so that a resumed run sees the same prompts.", date=True)
    MAX_PROMPT_LEN: int = knob("Data", 2048, "tokens", "Longest prompt that is accepted; a longer one is an error, never cut.", tiny=256, low=1)

    REWARDS: str = knob("Rewards", "action", "", "Reward functions with optional weights, `name=weight,...`: action, best, format, or `module:function`.")
    INVALID_REWARD: float = knob("Rewards", 0.0, "reward", "Reward of an answer that cannot be parsed; `nan` leaves it out of its group.", nan=True)
    SCALE_REWARDS: str = knob("Rewards", "group", "", "Divide advantages by the standard deviation of the group, of the batch, or not at all.", choices=("group", "batch", "none"))
    MASK_TRUNCATED: bool = knob("Rewards", False, "", "Leave completions that met MAX_COMPLETION_LEN out of the loss (bad length then costs nothing).")

    USE_VLLM: bool | None = knob("Rollouts", None, "", "Generate with vLLM beside the trainer (MXFP4 weights, asleep while learning) instead of transformers; `auto`: on a GPU.")
    ROLLOUT_SYNC: str = knob("Rollouts", "merge", "", "How vLLM gets the adapter: `merge` pushes merged attention weights, `lora` loads it natively.", choices=("merge", "lora"))
    VLLM_GPU_MEM: float | None = knob("Rollouts", None, "share", "The most of the whole GPU that vLLM may take while awake; `auto` plans it from one step's key-value cache and the free memory.", above=0, high=0.95)
    VLLM_EAGER: bool = knob("Rollouts", False, "", "Run vLLM without compilation and CUDA graphs: starts faster, generates slower (its kernels in Triton need a C compiler all the same).")
    IS_CORRECTION: str = knob("Rollouts", "token_truncate", "", "Importance-sampling correction of vLLM's probabilities, TRL's modes, or `none`.", choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"))
    IS_CLIP_MAX: float = knob("Rollouts", 3.0, "ratio", "Importance ratios are truncated or masked above this.", above=1)
    PARITY: str = knob("Rollouts", "on", "", "Compare vLLM's log-probs with the trainer's before the first step, and stop (exit code 3) where they differ.", choices=("on", "off"))
    PARITY_LIMIT: float = knob("Rollouts", 0.05, "nats", "Largest mean difference of log-probs that the parity gate accepts.", above=0)
    PROMPTS_PER_STEP: int = knob("Rollouts", 12, "prompts", "Prompts per optimizer step.", tiny=8, low=1)
    NUM_GENERATIONS: int = knob("Rollouts", 8, "completions", "Completions per prompt: the group that advantages compare.", low=2)
    GENERATION_BATCH: int | None = knob("Rollouts", None, "completions", "Completions that transformers generates at once; must divide PROMPTS_PER_STEP x NUM_GENERATIONS; `auto` plans it from the free memory.", low=1)
    MAX_COMPLETION_LEN: int = knob("Rollouts", 4000, "tokens", "Longest completion; one that meets it counts as truncated.", tiny=12, low=1)
    TEMPERATURE: float = knob("Rollouts", 1.0, "", "Sampling temperature of the rollouts; the loss uses the same.", above=0, high=10)
    TOP_P: float = knob("Rollouts", 1.0, "probability", "Nucleus sampling; below 1 the sampled and the trained distribution differ.", above=0, high=1)

    TOTAL_STEPS: int = knob("Learner", 100, "steps", "Optimizer steps of the whole run, resumed parts included.", tiny=150, low=1)
    LEARNING_RATE: float = knob("Learner", 5e-5, "", "Peak learning rate of AdamW.", tiny=1e-3, above=0)
    LR_SCHEDULER: str = knob("Learner", "constant_with_warmup", "", "Learning-rate schedule; linear and cosine fall to 0 at TOTAL_STEPS, so the rate jumps up again where a finished run is given more steps.", tiny="linear", choices=("constant", "constant_with_warmup", "linear", "cosine"))
    WARMUP_STEPS: int = knob("Learner", 0, "steps", "Steps over which the learning rate rises from 0.", low=0)
    WEIGHT_DECAY: float = knob("Learner", 0.0, "", "AdamW's weight decay.", low=0)
    MAX_GRAD_NORM: float = knob("Learner", 1.0, "norm", "Gradients are scaled down to this norm.", above=0)
    MICRO_BATCH: int | None = knob("Learner", None, "completions", "Completions of MAX_COMPLETION_LEN that fit into one forward and backward pass (shorter ones: more of them); a matter of memory, never of what is learned; `auto` plans it.", low=1)
    PACKING: str | None = knob("Learner", None, "", "`prefix` computes a prompt once for all its completions, `none` once for each; `auto`: prefix where the attention supports it.", choices=("prefix", "none"))
    GRADIENT_CHECKPOINTING: bool = knob("Learner", True, "", "Recompute activations in the backward pass: much less memory, about a third more time.", tiny=False)
    LOSS_TYPE: str = knob("Learner", "bnpo", "", "GRPO variant, TRL's names.", choices=("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"))
    LOSS_IMPL: str = knob("Learner", "liger", "", "`liger`: Liger's GRPO loss over chunked log-probs; `trl`: TRL's, the same to five digits.", choices=("liger", "trl"))
    BETA: float = knob("Learner", 0.0, "", "Weight of the KL penalty against the base model; 0 saves a forward pass.", low=0)
    EPSILON: float = knob("Learner", 0.2, "", "Lower clip range of the policy ratio.", above=0)
    EPSILON_HIGH: float | None = knob("Learner", None, "", "Upper clip range; `auto` is EPSILON, 5.0 for cispo.", above=0)
    SEED: int = knob("Learner", 42, "", "Seed of prompt order, adapter initialization and sampling.", low=0, high=2**31 - 1)

    OUTPUT_DIR: str = knob("Output", "runs/gpt-oss-20b", "", "Folder of the run; OUTPUT_DIR.zip is written beside it.", tiny="runs/tiny")
    SAVE_STEPS: int = knob("Output", 10, "steps", "Steps between checkpoints.", tiny=50, low=1)
    SAVE_TOTAL_LIMIT: int = knob("Output", 3, "checkpoints", "Checkpoints that are kept.", low=1)
    RESUME: str = knob("Output", "auto", "", "`auto` continues an interrupted run in OUTPUT_DIR from its last checkpoint; `never` refuses to.", choices=("auto", "never"))
    OVERWRITE: bool = knob("Output", False, "", "Delete the run that is in OUTPUT_DIR and start anew.")
    REPORT_TO: str = knob("Output", "none", "", "Trackers of the Trainer, separated by commas: none, wandb, tensorboard, trackio.")
    ALLOW_UNTESTED: bool = knob("Output", False, "", "Go on with package versions outside the tested range.")
    IGNORE_VARS: str = knob("Output", "", "", "Variables of other programs that look like a mistyped setting, separated by commas.")
    # fmt: on

    @property
    def completions_per_step(self) -> int:
        return self.PROMPTS_PER_STEP * self.NUM_GENERATIONS


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Names that other trainers use for our settings: worth a better answer than "unknown".
ALIASES = {
    "MODEL": "MODEL_ID", "MODEL_NAME": "MODEL_ID", "MAX_STEPS": "TOTAL_STEPS", "NUM_STEPS": "TOTAL_STEPS",
    "LR": "LEARNING_RATE", "LORA_RANK": "LORA_R", "BATCH_SIZE": "PROMPTS_PER_STEP", "GROUP_SIZE": "NUM_GENERATIONS",
    "MICRO_BATCH_SIZE": "MICRO_BATCH", "PER_DEVICE_TRAIN_BATCH_SIZE": "MICRO_BATCH",
    "MAX_PROMPT_LENGTH": "MAX_PROMPT_LEN", "MAX_COMPLETION_LENGTH": "MAX_COMPLETION_LEN",
    "MAX_NEW_TOKENS": "MAX_COMPLETION_LEN", "ATTN_IMPLEMENTATION": "ATTN_IMPL", "ATTENTION": "ATTN_IMPL",
    "TRAIN_DATA": "DATA", "DATASET": "DATA", "OUT_DIR": "OUTPUT_DIR", "KL_COEF": "BETA", "VLLM": "USE_VLLM",
}  # fmt: skip


def listed(text: str) -> list[str]:
    """The parts of a comma-separated setting, without spaces around them and without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


class Problems(list[str]):
    """What is wrong with the input: collected, so that the user mends everything in one go."""

    def add(self, where: str, what: str, fix: str) -> None:
        self.append(f"{where}: {what}. {fix}")


def show(value: Any) -> str:
    """A setting's value as a user would write it: `auto` for None, 1 and 0 for booleans."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def takes_auto(name: str) -> bool:
    """Whether setting `name` takes `auto`, which is None as a value."""
    return FIELDS[name].type.endswith("| None")


def choices(name: str) -> tuple[str, ...]:
    """The words that setting `name` takes, `auto` first where it takes that; empty where it is no choice."""
    words = FIELDS[name].metadata.get("choices", ())
    return ("auto", *words) if words and takes_auto(name) else words


def parse_value(name: str, text: str) -> Any:
    """The value of setting `name` written as `text`; raises ValueError with a sentence on what is expected."""
    spec, text = FIELDS[name].metadata, text.strip()
    kind, optional = FIELDS[name].type.removesuffix("| None").strip(), takes_auto(name)
    if optional and text.lower() == "auto":
        return None
    if kind == "bool":
        if text.lower() not in TRUE + FALSE:
            raise ValueError("expected auto, 1 or 0" if optional else "expected 1 or 0")
        return text.lower() in TRUE
    if kind == "str":
        value, known = text.lower() if spec.get("choices") else text, choices(name)
        if known and value not in known:
            near = difflib.get_close_matches(value, known, 1)
            raise ValueError(f"expected one of {', '.join(known)}" + (f"; nearest: {near[0]}" if near else ""))
        if spec.get("date"):
            try:
                return time.strftime("%Y-%m-%d", time.strptime(value, "%Y-%m-%d"))
            except ValueError:
                raise ValueError("expected a date such as 2025-11-06") from None
        return value
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError:
        expected = "expected a whole number" if kind == "int" else "expected a number"
        raise ValueError(expected + " or auto" * optional) from None
    if not math.isfinite(value) and not (spec.get("nan") and math.isnan(value)):
        raise ValueError("expected a finite number" + (" or nan" if spec.get("nan") else ""))
    for limit, wrong, words in (
        ("low", lambda low: value < low, "at least"),
        ("above", lambda low: value <= low, "above"),
        ("high", lambda high: value > high, "at most"),
    ):
        if limit in spec and wrong(spec[limit]):
            raise ValueError(f"must be {words} {show(spec[limit])}")
    return value


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance that counts a swap of two neighbours as one edit (optimal string alignment)."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        rows.append([i])
        for j, y in enumerate(b, 1):
            cost = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                cost = min(cost, rows[i - 2][j - 2] + 1)
            rows[i].append(cost)
    return rows[-1][-1]


def nearest_setting(variable: str) -> str | None:
    """The setting that an environment variable was probably meant to be, or None for somebody else's variable.

    Short names tolerate no edit beyond their case (`SPEED` is not `SEED`), longer ones one in five letters, at most 2.
    """
    name = variable.upper().replace("-", "_")
    if name in FIELDS or name in ALIASES:
        return FIELDS[name].name if name in FIELDS else ALIASES[name]
    squeezed = name.replace("_", "")
    for setting in FIELDS:
        allowed = min(2, len(setting) // 5)
        if squeezed == setting.replace("_", "") or (
            allowed and abs(len(name) - len(setting)) <= allowed and edit_distance(name, setting) <= allowed
        ):
            return setting
    return None


def load_settings(environ: Mapping[str, str]) -> tuple[Settings, dict[str, str], Problems]:
    """Settings from the environment, where each value came from (`default`, `tiny` or `environment`), and problems."""
    problems, values, sources = Problems(), {}, {}
    tiny = environ.get("MODEL_ID", "").strip() == "tiny"
    for name, spec in FIELDS.items():
        values[name], sources[name] = spec.default, "default"
        if tiny and spec.metadata["tiny"] is not None:
            values[name], sources[name] = spec.metadata["tiny"], "tiny"
        if (text := environ.get(name)) is not None:
            try:
                values[name], sources[name] = parse_value(name, text), "environment"
            except ValueError as error:
                default = show(values[name])
                problems.add(name, f"{text!r} is not accepted, {error}", f"Unset it for the default ({default})")
    ignored = {name.strip() for name in values["IGNORE_VARS"].split(",")}
    for variable in sorted(set(environ) - set(FIELDS) - ignored):
        if meant := nearest_setting(variable):
            fix = f"Write {meant}, or IGNORE_VARS={variable} if it belongs to another program"
            problems.add(variable, f"no such setting, the nearest is {meant}", fix)
    return Settings(**values), sources, problems


def settings_table() -> Iterator[tuple[str, str, str, str, str, str]]:
    """(group, name, default, default for tiny or '', unit and limits, sentence) of every setting, in order."""
    for name, spec in FIELDS.items():
        meta = spec.metadata
        limits = [f"one of {', '.join(choices(name))}"] if choices(name) else []
        limits += [
            f"{sign} {show(meta[key])}" for key, sign in (("low", ">="), ("above", ">"), ("high", "<=")) if key in meta
        ]
        flags = {"bool": "0 or 1", "bool | None": "auto, 0 or 1"}
        unit = "; ".join(filter(None, [flags.get(spec.type, meta["unit"]), *limits]))
        tiny = "" if meta["tiny"] is None else show(meta["tiny"])
        yield meta["group"], name, show(spec.default) or "(empty)", tiny, unit, meta["text"]


def unknown_option(word: str) -> str:
    """The problem of a word on the command line that is no option, probably a setting."""
    name, equals, value = word.lstrip("-").partition("=")
    setting = nearest_setting(name)
    if not (equals or setting):
        return f"{word}: no such option. There are --help and --check"
    example = f"{setting or name.upper().replace('-', '_')}={shlex.quote(value) if equals else '...'}"
    return f"{word}: no such option. Settings are environment variables: {example} python train_grpo.py"


def help_text() -> str:
    """The text of `--help`: the docstring and every setting, grouped."""
    lines, group = [__doc__.strip(), ""], None
    for section, name, default, tiny, unit, text in settings_table():
        if section != group:
            lines += ["", f"{section}:"]
            group = section
        lines.append(f"  {name}={default}" + (f"   (tiny: {tiny})" if tiny else "") + (f"   [{unit}]" if unit else ""))
        lines.append(f"      {text}")
    return "\n".join(lines)


# ---- Choices: pure functions that return what they chose, and why ----------------------------------------------------

GIB = 2**30
# ATTN_IMPL -> (distribution, how to install it). What transformers would take in their place knows no sinks in its backward
# pass (https://github.com/huggingface/transformers/pull/42736); see "Attention".
FLASH_PACKAGES = {
    "flash_attention_2": ("flash-attn", "bash scripts/setup.sh --flash-attn"),
    "flash_attention_3": ("flash-attn-3", "build it from source, for Hopper cards"),
    "flash_attention_4": ("flash-attn-4", "pip install --no-deps flash-attn-4==4.0.0b26 quack-kernels==0.6.1"),
}
ATTENTION = ("torch_flash", *FLASH_PACKAGES, "flex_attention", "eager")
# What `all-linear` finds in a gpt-oss: router and experts are raw parameters.
LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Machine:
    """What the run has to work with; sizes in GiB, 0 GPUs on a CPU machine."""

    gpu: str = ""
    gpus: int = 0
    gpu_total: float = 0.0
    gpu_free: float = 0.0
    ram_free: float = 0.0
    cores: int = 1
    arch: str = ""
    capability: float = 0.0  # CUDA compute capability: 8.0 is Ampere, 9.0 Hopper, 10.0 Blackwell
    compiler: str = "gcc"  # of C, as Triton finds it; empty where there is none


@dataclass(frozen=True)
class EnginePlan:
    """What vLLM gets beside the trainer; sizes in GiB."""

    weights: float
    scratch: float
    cache: float
    cache_reason: str
    cache_least: float
    asleep: float
    max_model_len: int
    max_num_seqs: int
    capture_sizes: tuple[int, ...]

    @property
    def awake(self) -> float:
        return self.weights + self.scratch + self.cache


@dataclass(frozen=True)
class Plan:
    """What a run of these settings needs, in GiB, and how it is cut into passes."""

    weights: float
    adapter: float
    generation: float
    learning: float
    micro_batch: int
    micro_batch_reason: str
    generation_batch: int
    generation_batch_reason: str
    engine: EnginePlan | None = None
    prompt_len: int = 0  # of the longest prompt, in tokens
    # (largest value that fits the card or 0, what stops the next one), with all else as set; None on a CPU.
    largest_length: tuple[int, str] | None = None
    largest_micro_batch: tuple[int, str] | None = None

    @property
    def rollout_peak(self) -> float:
        return self.weights + self.adapter + (self.engine.awake if self.engine else self.generation)

    @property
    def learning_peak(self) -> float:
        return self.weights + self.adapter + self.learning + (self.engine.asleep if self.engine else 0.0)

    @property
    def peak(self) -> float:
        return max(self.rollout_peak, self.learning_peak)

    @property
    def needed(self) -> float:
        """Free memory to ask for: a tenth of it stays free. vLLM's own plan leaves its margin."""
        return max(self.rollout_peak / (1.0 if self.engine else GPU_SHARE), self.learning_peak / GPU_SHARE)


def choose_attention(requested: str, gpus: int, capability: float, installed: Iterable[str]) -> tuple[str, str]:
    """(attention implementation of the learner, reason), given the installed distributions. All are exact with sinks, but
    for Hub kernels, where the reason says what is not known; generation by transformers always uses eager attention."""
    if "/" in requested:
        return requested, f"set by ATTN_IMPL; {hub_kernel_doubt(requested)}"
    if requested != "auto":
        return requested, "set by ATTN_IMPL"
    if not gpus:
        return "eager", "no GPU: eager is the only implementation with attention sinks on a CPU"
    if "flash-attn-3" in installed and 9 <= capability < 10:
        known = "on an H100 no faster than torch_flash at 2,083 tokens"  # docs/results/attention-h100.json
        return "flash_attention_3", f"flash-attn-3 is installed, made for Hopper cards; {known}"
    if "flash-attn-4" in installed and capability >= 10:
        return "flash_attention_4", "flash-attn-4 is installed, made for Blackwell cards"
    return "torch_flash", "FlashAttention 2 as torch ships it, nothing to install; exact with sinks at any shape"


# The Hub kernels that transformers takes for a gpt-oss (GptOssPreTrainedModel._compatible_flash_implementations): it loads
# the first in the place of any other whose name has "flash" in it.
HUB_FLASH = ("kernels-community/vllm-flash-attn3", "kernels-community/metal-flash-sdpa")


def hub_kernel_doubt(kernel: str) -> str:
    """What is not known about a Hub kernel that learns a gpt-oss. That of vllm-flash-attn3:
    https://huggingface.co/kernels-community/vllm-flash-attn3/discussions/3"""
    if kernel == HUB_FLASH[0]:
        return "its forward pass takes the attention sinks, its backward pass is not known to handle them"
    if "flash" in kernel and kernel not in HUB_FLASH:
        return (
            f"for a gpt-oss transformers loads {HUB_FLASH[0]} in its place, whose backward pass is not known to handle "
            "attention sinks"
        )
    return "neither its forward nor its backward pass is known to handle attention sinks"


def attention_warning(attention: str) -> str | None:
    """What a run with this attention has to be warned about, if anything."""
    if "/" not in attention:
        return None
    return f"ATTN_IMPL={attention}: its gradients may be wrong (attention sinks). Use ATTN_IMPL=torch_flash"


def choose_packing(requested: str | None, attention: str, gpus: int) -> tuple[str, str]:
    """(`prefix` or `none`, reason)."""
    if requested is not None:
        return requested, "set by PACKING"
    if attention == "eager" and gpus:
        return "none", "eager attention holds all scores of a row: shorter rows need less memory"
    if attention not in ATTENTION:
        return "none", f"{attention} takes padded rows only"
    return "prefix", "a prompt is computed once for all its completions"


def choose_experts(requested: str | None, mxfp4: bool, bf16: Plan, packed: Plan, free: float) -> tuple[str, str]:
    """(`bf16` or `mxfp4`, reason), given the plans with either and the free memory in GiB."""
    if requested is not None:
        return requested, "as EXPERTS says"
    if not mxfp4:
        return "bf16", "the checkpoint has no MXFP4 experts"
    roomy = (not bf16.engine or bf16.engine.cache >= packed.engine.cache) and bf16.micro_batch >= packed.micro_batch
    if bf16.needed <= free and (roomy or packed.needed > free):
        return "bf16", f"all fits ({bf16.peak:.0f} of {free:.0f} GiB) with nothing to unpack"
    return (
        "mxfp4",
        f"bf16 would need {bf16.needed:.0f} GiB free for passes of {bf16.micro_batch} completions, packed it is {packed.needed:.0f} for {packed.micro_batch}",
    )


def choose_rollouts(requested: bool | None, gpus: int, tiny: bool, vllm: str | None) -> tuple[bool, str]:
    """(whether vLLM generates, reason)."""
    if requested is not None:
        return requested, "set by USE_VLLM"
    if not gpus:
        return False, "no GPU: transformers generates"
    if tiny:
        return False, "the tiny model is made for CPUs: transformers generates"
    if vllm is None:
        return (
            False,
            "vLLM IS NOT INSTALLED: transformers generates, some 50 times slower (bash scripts/setup.sh --gpu)",
        )
    return True, "a GPU and vLLM are there"


def choose_epsilon_high(settings: Settings) -> tuple[float, str]:
    """(upper clip range, reason)."""
    if settings.EPSILON_HIGH is not None:
        return settings.EPSILON_HIGH, "set by EPSILON_HIGH"
    if settings.LOSS_TYPE == "cispo":
        return 5.0, "cispo truncates the ratio itself, far from 1"
    return settings.EPSILON, "EPSILON on both sides"


def count_parameters(config: Mapping[str, Any]) -> dict[str, int]:
    """Parameters of a gpt-oss by part, from its config.json."""
    hidden, layers, head = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts, inner = config["num_local_experts"], config["intermediate_size"]
    attention = hidden * (q + 2 * kv) + (q + 2 * kv) + q * hidden + hidden + config["num_attention_heads"]
    moe = experts * (3 * hidden * inner + 2 * inner + hidden) + experts * (hidden + 1)
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    total = layers * (attention + moe + 2 * hidden) + embeddings + hidden
    return {"total": total, "experts": layers * moe, "attention": layers * attention, "embeddings": embeddings}


def has_mxfp4(config: Mapping[str, Any] | None) -> bool:
    """Whether the experts of a checkpoint with this config.json are packed in MXFP4."""
    return ((config or {}).get("quantization_config") or {}).get("quant_method") == "mxfp4"


VLLM_COLDEST = 0.01  # _MAX_TEMP of vllm/sampling_params.py: smaller temperatures are raised to it
# Ten percent stay free for fragmentation and CUDA's own context; a CPU plans with half of what is free.
GPU_SHARE, CPU_SHARE = 0.9, 0.5
PASS_TOKENS = 50_000  # tokens of a forward and backward pass beyond which more tokens gain nothing
KV_BLOCK = 16  # tokens per block of vLLM's key-value cache
BATCHED_TOKENS = 8192  # tokens of one prefill pass of vLLM
ASLEEP_GIB = 2.1  # left on the GPU by a sleeping engine and the CUDA context: graphs, workspaces, kernels (measured)


def capture_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes that get a CUDA graph: decode batches shrink from `most` to 1 as completions end, and a batch runs in
    the next larger graph, whose surplus rows load experts too. So all sizes up to 16, where many experts are idle otherwise,
    and steps of a quarter to an eighth beyond, where few are.

    >>> capture_sizes(20)
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20)
    """
    sizes, size = {most}, 1
    while size < most:
        sizes.add(size)
        size += 1 if size < 16 else 2 ** (int(math.log2(size)) - 2)
    return tuple(sorted(sizes))


def plan_engine(
    settings: Settings, config: Mapping[str, Any], machine: Machine, prompt_len: int, trainer: float, checkpoint: float
) -> EnginePlan:
    """vLLM's memory beside a trainer of `trainer` GiB, for a `checkpoint` of that many GiB on disk.

    The cache of one step: vLLM keeps full and sliding layers in one group each, and both draw blocks of KV_BLOCK tokens
    from one pool (vllm/v1/core/kv_cache_utils.py). The whole blocks of a prompt are shared by its completions; a sliding
    layer keeps its window, plus what two prefill passes have in flight.
    """
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    layers = max(kinds.count("full_attention"), kinds.count("sliding_attention"), 1)
    block = layers * KV_BLOCK * 2 * config["num_key_value_heads"] * config["head_dim"] * 2 / GIB
    window, length = config.get("sliding_window") or 0, prompt_len + settings.MAX_COMPLETION_LEN
    # Rounded up, as vLLM's compile cache knows it: another longest prompt is no reason to compile anew.
    longest = max(length, min(-(-length // 1024) * 1024, config.get("max_position_embeddings", length)))
    whole, shared = -(-length // KV_BLOCK), prompt_len // KV_BLOCK
    sliding = min(whole, -(-(window + 1) // KV_BLOCK) + 1)
    in_flight = 2 * BATCHED_TOKENS // KV_BLOCK
    prompts, group = settings.PROMPTS_PER_STEP, settings.NUM_GENERATIONS
    wanted = (1 + in_flight + prompts * (shared + group * (whole - shared + sliding))) * block
    most = -(-longest // KV_BLOCK)
    least = (2 + most + min(most, -(-window // KV_BLOCK) + in_flight)) * block
    # Kernels pad the experts by up to a tenth of their bytes.
    weights = checkpoint * 1.08
    inner = config["num_experts_per_tok"] * 3 * config["intermediate_size"] + 8 * config["hidden_size"]
    seqs = settings.completions_per_step
    # Activations of a prefill pass, three float32 copies of a decode step's logits, graphs.
    scratch = (BATCHED_TOKENS * inner * 2 + seqs * config["vocab_size"] * 4 * 3) / GIB + 0.5
    if settings.VLLM_GPU_MEM is None:
        room, where = (
            machine.gpu_free * 0.95 - trainer - weights - scratch,
            "95% of the free memory, beside the trainer",
        )
    else:
        room, where = (
            machine.gpu_total * settings.VLLM_GPU_MEM - weights - scratch,
            f"VLLM_GPU_MEM={settings.VLLM_GPU_MEM:g}",
        )
    cache = max(min(max(wanted, least), room), 0.0)
    reason = (
        f"one step: {prompts} prompts of {prompt_len} tokens x {group} completions of {settings.MAX_COMPLETION_LEN}"
    )
    if cache < wanted:
        reason += (
            f"; {where} leaves {cache / wanted:.0%} of the {wanted:.1f} GiB they may need, the rest waits its turn"
        )
    return EnginePlan(weights, scratch, cache, reason, least, ASLEEP_GIB, longest, seqs, capture_sizes(seqs))


def plan_memory(
    settings: Settings,
    config: Mapping[str, Any],
    machine: Machine,
    prompt_len: int,
    attention: str,
    engine_checkpoint: float | None = None,
    packing: str = "none",
    experts: str = "bf16",
) -> Plan:
    """Memory of a run and, from it, MICRO_BATCH and GENERATION_BATCH where they are `auto`.

    An estimate from shapes: BF16 weights (experts of 4.25 bits and one layer unpacked with `mxfp4`) and activations,
    float32 adapter with gradients and two AdamW moments, checkpointed layer inputs plus one layer in full while learning,
    and the key-value cache plus one layer of prefill while generating. `prompt_len` is the longest prompt in tokens;
    `engine_checkpoint` the size in GiB of the checkpoint that vLLM loads, None where transformers generates.
    """
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    head, kv, top = config["head_dim"], config["num_key_value_heads"], config["num_experts_per_tok"]
    inner = config["intermediate_size"]
    length = prompt_len + settings.MAX_COMPLETION_LEN
    q_and_kv = (heads + 2 * kv) * head
    weights = count_parameters(config)["total"] * 2 / GIB
    matrices = config["num_local_experts"] * 3 * hidden * inner  # of one layer's experts
    if experts == "mxfp4":
        weights += matrices * (layers * (4.25 / 8 - 2) + 2) / GIB
    lora_parameters = layers * settings.LORA_R * (3 * hidden + q_and_kv + heads * head + hidden)
    adapter = lora_parameters * 16 / GIB

    share = packing == "prefix"

    def learning(rows: int) -> float:
        tokens = bucket(pass_tokens(settings, rows, prompt_len, share))
        longest = (
            bucket(prompt_len + min(rows, settings.NUM_GENERATIONS) * settings.MAX_COMPLETION_LEN) if share else length
        )
        scores = tokens * longest * heads * 2 * 6 if attention == "eager" else 0
        # Bytes of a token in one layer's backward pass: its experts' two products with their gradients; queries, keys,
        # values; norms in float32. The head has its turn before: states, their gradient, one tile of logits.
        per_token = 2 * top * (4 * inner + 3 * hidden) + 8 * q_and_kv + 16 * hidden
        kept = (
            tokens * hidden * 2 * layers if settings.GRADIENT_CHECKPOINTING else (tokens * per_token + scores) * layers
        )
        if experts == "mxfp4" and not settings.GRADIENT_CHECKPOINTING:  # every layer's stay unpacked until its backward
            kept += (layers - 1) * matrices * 2
        # flex attention's mask is made in full before it is reduced to blocks; measured.
        mask = 10.5 * tokens**2 if attention == "flex_attention" else 0
        scored = rows * settings.MAX_COMPLETION_LEN
        head_need = min(scored, 4096) * min(config["vocab_size"], HEAD_TILE) * 2 + (tokens * 2 + scored * 8) * hidden
        return max(kept + max(tokens * per_token + scores, head_need), mask) / GIB + 0.1

    def generation(rows: int) -> float:
        window = min(length, config.get("sliding_window") or length)
        cache = rows * 2 * kv * head * 2 * (length + window) * layers / 2
        prefill = rows * (
            heads * prompt_len**2 * 2 * 3 + prompt_len * 2 * (4 * hidden + 4 * top * config["intermediate_size"])
        )
        return (cache + prefill + rows * config["vocab_size"] * 4 * 3) / GIB

    engine = None
    if engine_checkpoint is not None:
        engine = plan_engine(settings, config, machine, prompt_len, weights + adapter, engine_checkpoint)
    total = settings.completions_per_step
    room = (machine.gpu_free * GPU_SHARE if machine.gpus else machine.ram_free * CPU_SHARE) - weights - adapter
    where = (
        f"{machine.gpu_free:.1f} GiB free on the GPU" if machine.gpus else f"{machine.ram_free:.1f} GiB of free memory"
    )

    room -= engine.asleep if engine else 0.0

    def largest(need: Callable[[int], float], most: int) -> int:
        sizes = [n for n in range(1, min(total, most) + 1) if total % n == 0]
        return max((n for n in sizes if need(n) <= room), default=1)

    # Beyond this a pass is no faster, only larger: its products are large enough, and the unpacking of experts and the
    # start of some hundred kernels a layer are spread over enough tokens.
    most = 64
    if length * hidden >= 100_000:
        sizes = [pass_tokens(settings, n, prompt_len, share) for n in range(1, total + 1)]
        most = max(1, bisect.bisect_right(sizes, PASS_TOKENS))
    micro, micro_reason = settings.MICRO_BATCH, "set by MICRO_BATCH"
    if micro is None:
        micro = largest(learning, most)
        micro_reason = (
            f"largest divisor of {total} up to {most} whose {learning(micro):.1f} GiB fit beside the weights in {where}"
        )
    micro = min(micro, total)
    chunk, chunk_reason = settings.GENERATION_BATCH, "set by GENERATION_BATCH"
    if chunk is None:
        chunk = largest(generation, total)
        chunk_reason = (
            f"largest divisor of {total} whose cache and prefill ({generation(chunk):.1f} GiB) fit in {where}"
        )
    return Plan(
        weights, adapter, generation(chunk), learning(micro), micro, micro_reason, chunk, chunk_reason, engine, prompt_len
    )  # fmt: skip


def misfit(plan: Plan, machine: Machine) -> str:
    """Why a plan does not fit into GPU_SHARE of the GPU's free memory, or '' where it does."""
    free, engine = machine.gpu_free, plan.engine
    if engine and engine.cache < engine.cache_least:
        return f"vLLM would have {engine.cache:.1f} GiB of cache, one completion may need {engine.cache_least:.1f}"
    # vLLM's own plan leaves a margin; a share of the GPU that was set by hand may leave none.
    for what, need, share in (
        (f"learning in passes of {plan.micro_batch}", plan.learning_peak, GPU_SHARE),
        ("the rollout", plan.rollout_peak, 1.0 if engine else GPU_SHARE),
    ):
        if need > free * share:
            return f"{what} would need {need:.1f} GiB, {share:.0%} of what is free are {free * share:.1f}"
    return ""


def largest_that_fits(misfit: Callable[[int], str], most: int) -> tuple[int, str]:
    """(largest n up to `most` whose `misfit` is empty, or 0; that of n + 1, '' for n = `most`). What does not fit must
    not fit with more either.

    >>> largest_that_fits(lambda n: f"{n} > 5" if n > 5 else "", 100)
    (5, '6 > 5')
    """
    most = max(most, 0)
    largest = bisect.bisect_left(range(1, most + 1), True, key=lambda n: bool(misfit(n)))
    return largest, misfit(largest + 1) if largest < most else ""


def find_limits(
    settings: Settings,
    config: Mapping[str, Any],
    machine: Machine,
    prompt_len: int,
    planned: Callable[[Settings], Plan],
) -> tuple[tuple[int, str], tuple[int, str]]:
    """Largest MAX_COMPLETION_LEN and largest MICRO_BATCH that fit the GPU, each with all else as set and with what stops
    the next one. `planned(settings)` is the plan of a run with these settings."""

    def stops(**change: int) -> str:
        return misfit(planned(dataclasses.replace(settings, **change)), machine)

    positions, total = config["max_position_embeddings"], settings.completions_per_step
    length, reason = largest_that_fits(lambda n: stops(MAX_COMPLETION_LEN=n), positions - prompt_len)
    what = f"; with {length + 1} {reason}" if length else f": {reason}"
    if not reason:
        what = f"; the model has {positions} positions, the longest prompt takes {prompt_len}"
    size, reason = largest_that_fits(lambda n: stops(MICRO_BATCH=n), total)
    how = (f"; with {size + 1} {reason}" if size else f": {reason}") if reason else ", the whole step"
    return (length, what), (size, how)


def limit_text(name: str, limit: tuple[int, str]) -> str:
    """One limit of a plan in words.

    >>> limit_text("MICRO_BATCH", (96, ", the whole step")), limit_text("MICRO_BATCH", (0, ": learning would ..."))
    ('MICRO_BATCH=96, the whole step', 'no MICRO_BATCH: learning would ...')
    """
    return (f"{name}={limit[0]}" if limit[0] else f"no {name}") + limit[1]


# ---- Preflight: every check that needs no training -------------------------------------------------------------------

# Distribution -> [oldest tested, first untested). tests/test_packaging.py holds the pins of both requirements files
# against this table. Hooks into TRL's internals (see Learner) are the reason for the narrow ranges.
TESTED = {
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.18"),
    "trl": ("1.16", "1.17"),
    "peft": ("0.21", "0.22"),
    "accelerate": ("1.15", "1.16"),
    "datasets": ("5.2", "5.3"),
    "liger-kernel": ("0.8.5", "0.9"),
    "huggingface_hub": ("1.33", "1.34"),
}
TESTED_VLLM = {"vllm": ("0.26", "0.27")}  # only where vLLM generates
FLASH_ATTN_OLDEST = "2.7.0"  # the functions that the adapter calls took other arguments before
REAL_MODEL = "openai/gpt-oss-20b"
# config.json of openai/gpt-oss-20b, as far as the plan needs it before anything was downloaded.
REAL_CONFIG = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
DOWNLOAD_GIB = 12.9  # the official checkpoint's safetensors


def cgroup_free(root: Path = Path("/sys/fs/cgroup")) -> float:
    """GiB that a container's memory limit leaves (cgroup v2, or v1), page cache that can go counted as free; inf without
    a limit. /proc/meminfo shows a container the memory of its host."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):
            most = int((root / limit).read_text())  # "max" where there is none
            now, stat = root / used, (root / used).with_name("memory.stat")
            kept = dict(line.split() for line in stat.read_text().splitlines())[cache]
            return max(0.0, (most - int(now.read_text()) + int(kept)) / GIB)
    return math.inf


def read_machine() -> Machine:
    """This machine: its visible GPUs by nvidia-smi, free memory by /proc/meminfo, cores."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        ram = int(meminfo["MemAvailable"].split()[0]) / 2**20
    facts: dict[str, Any] = {
        "ram_free": min(locals().get("ram", 0.0), cgroup_free()),
        "cores": os.cpu_count() or 1,
        "arch": platform.machine(),
        "compiler": next(
            filter(shutil.which, [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]), ""
        ),
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or visible.strip() not in ("", "-1"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits"]
        if visible:
            query.append(f"--id={visible}")
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            lines = (
                subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
                .stdout.strip()
                .splitlines()
            )
            name, total, free, capability = (cell.strip() for cell in lines[0].split(","))
            facts |= {"gpu": name, "gpus": len(lines), "gpu_total": int(total) / 1024, "gpu_free": int(free) / 1024}
            facts["capability"] = float(capability)
    return Machine(**facts)


def version_key(version: str) -> tuple[int, ...]:
    """Leading numbers of a version, comparable: 2.11.0+cu130 -> (2, 11, 0)."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version).group().split(".") if part)


def installed_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Installed version of each distribution, None where it is missing. Imports nothing."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def check_packages(
    settings: Settings, versions: Mapping[str, str | None], problems: Problems, use_vllm: bool = False
) -> None:
    """Every package is there in a tested version; the chosen FlashAttention is installed."""
    for name, (oldest, untested) in (TESTED | (TESTED_VLLM if use_vllm else {})).items():
        version = versions.get(name)
        if version is None:
            problems.add(
                name, "the package is not installed", "Run `bash scripts/setup.sh` and activate its environment"
            )
        elif not version_key(oldest) <= version_key(version) < version_key(untested) and not settings.ALLOW_UNTESTED:
            fix = "Run `bash scripts/setup.sh` for the tested set, or set ALLOW_UNTESTED=1"
            problems.add(name, f"version {version} is outside the tested range (from {oldest}, below {untested})", fix)
    package, install = FLASH_PACKAGES.get(settings.ATTN_IMPL, (None, None))
    if package:
        version, fix = installed_versions([package])[package], f"Install it ({install}; see docs/install.md)"
        if version is None:
            problems.add("ATTN_IMPL", f"{settings.ATTN_IMPL} needs {package}, which is not installed", fix)
        elif package == "flash-attn" and version_key(version) < version_key(FLASH_ATTN_OLDEST):
            what = f"{settings.ATTN_IMPL} needs flash-attn {FLASH_ATTN_OLDEST} or newer, {version} is installed"
            problems.add("ATTN_IMPL", what, fix)
    if "/" in settings.ATTN_IMPL and installed_versions(["kernels"])["kernels"] is None:
        what = f"{settings.ATTN_IMPL} is loaded by the kernels package, which is not installed"
        problems.add("ATTN_IMPL", what, "Run `bash scripts/setup.sh --gpu`, or set ATTN_IMPL=auto")


def check_trackers(settings: Settings, environ: Mapping[str, str], problems: Problems) -> None:
    """The trackers are known, installed and logged in: wandb would raise after the model was loaded."""
    for tracker in listed(settings.REPORT_TO):
        if tracker not in ("none", "wandb", "tensorboard", "trackio"):
            problems.add("REPORT_TO", f"{tracker!r} is unknown", "Use none, wandb, tensorboard or trackio")
        elif tracker != "none" and installed_versions([tracker])[tracker] is None:
            problems.add("REPORT_TO", f"{tracker} is not installed", f"pip install {tracker}, or set REPORT_TO=none")
        elif tracker == "wandb" and not wandb_can_start(environ):
            problems.add(
                "REPORT_TO", "wandb has no API key", "Run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            )


def wandb_can_start(environ: Mapping[str, str]) -> bool:
    """Whether wandb needs no key or finds one: in the environment or in the netrc file that `wandb login` writes."""
    if environ.get("WANDB_MODE", "online") != "online" or environ.get("WANDB_DISABLED"):
        return True
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(environ.get("HOME", "~")).expanduser()
    paths = [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    host = urllib.parse.urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for path in paths:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            return netrc.netrc(path).authenticators(host) is not None
    return False


def check_settings(settings: Settings, config: Mapping[str, Any] | None, machine: Machine, problems: Problems) -> None:
    """Settings that contradict each other or the machine."""
    total, chunk = settings.completions_per_step, settings.GENERATION_BATCH
    for name, size in (("GENERATION_BATCH", chunk),):
        if size and total % size:
            near = min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: (abs(n - size), n))
            product = f"PROMPTS_PER_STEP x NUM_GENERATIONS = {settings.PROMPTS_PER_STEP} x {settings.NUM_GENERATIONS} = {total}"
            problems.add(name, f"{size} does not divide {product}", f"The nearest that does is {near}")
    known = ("auto", *ATTENTION)
    if settings.ATTN_IMPL not in known and "/" not in settings.ATTN_IMPL:
        near = difflib.get_close_matches(settings.ATTN_IMPL, known, 1) or ["auto"]
        problems.add(
            "ATTN_IMPL",
            f"{settings.ATTN_IMPL!r} is unknown, the nearest is {near[0]}",
            f"Use one of {', '.join(known)}, or a Hub kernel",
        )
    if settings.ATTN_IMPL not in ("auto", "eager") and not machine.gpus:
        problems.add(
            "ATTN_IMPL", f"{settings.ATTN_IMPL} needs a GPU and none is visible", "Set ATTN_IMPL=eager (or auto)"
        )
    if settings.ATTN_IMPL == "flex_attention":
        for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
            if os.environ.get(name) == "1":
                what = f"flex attention without compilation is unfused and holds all scores, and {name}=1 switches that off"
                problems.add("ATTN_IMPL", what, f"Unset {name}, or set ATTN_IMPL=torch_flash, which needs none")
    if machine.gpus and 0 < machine.capability < 8:
        what = f"{machine.gpu} has compute capability {machine.capability:g}, BF16 and FlashAttention need 8.0"
        problems.add("GPU", what, "Take an A100, L40S, H100, GH200 or a newer card")
    if settings.ATTN_IMPL == "flash_attention_3" and machine.gpus and not 9 <= (machine.capability or 9) < 10:
        problems.add("ATTN_IMPL", f"flash_attention_3 is made for Hopper, not for {machine.gpu}", "Set ATTN_IMPL=auto")
    if settings.ATTN_IMPL == "flash_attention_4" and machine.gpus and 0 < machine.capability < 9:
        what = f"flash_attention_4 needs compute capability 9.0, {machine.gpu} has {machine.capability:g}"
        problems.add("ATTN_IMPL", what, "Set ATTN_IMPL=auto")
    if settings.PACKING == "prefix" and settings.ATTN_IMPL not in known:
        problems.add(
            "PACKING",
            f"{settings.ATTN_IMPL} takes padded rows only",
            f"Set PACKING=auto, or ATTN_IMPL to one of {', '.join(ATTENTION)}",
        )
    quantized = has_mxfp4(config)
    if settings.EXPERTS == "mxfp4" and config and not quantized:
        problems.add("EXPERTS", f"{settings.MODEL_ID} has no MXFP4 experts", "Set EXPERTS=bf16")
    targets = listed(settings.LORA_TARGETS)
    for target in targets if targets != ["all-linear"] else ():
        if target not in LINEAR_MODULES:
            if any(word in target for word in ("expert", "mlp", "gate_up", "down_proj", "router")):
                what = f"{target!r}: LoRA on experts and router is refused, as vLLM's MXFP4 experts could not follow it"
                fix = f"Train the attention: all-linear, or some of {', '.join(LINEAR_MODULES)}"
                problems.add("LORA_TARGETS", what, fix)
                continue
            near = difflib.get_close_matches(target, LINEAR_MODULES, 1)
            what = f"{target!r} is no linear module of gpt-oss" + (f", the nearest is {near[0]}" if near else "")
            problems.add("LORA_TARGETS", what, f"Use all-linear, or some of {', '.join(LINEAR_MODULES)}")
    if not targets:
        problems.add("LORA_TARGETS", "it names no module", f"Use all-linear, or some of {', '.join(LINEAR_MODULES)}")
    if settings.LOSS_IMPL == "liger" and settings.LOSS_TYPE == "luspo":
        problems.add(
            "LOSS_TYPE",
            "Liger's luspo divides by the number of tokens where TRL's does not",
            "Set LOSS_IMPL=trl for luspo",
        )
    if settings.USE_VLLM and not machine.gpus:
        problems.add("USE_VLLM", "vLLM beside the trainer needs a GPU and none is visible", "Set USE_VLLM=0")
    if settings.USE_VLLM is not False and settings.TEMPERATURE > 2 and machine.gpus:
        problems.add("TEMPERATURE", "vLLM takes at most 2", "Lower it, or set USE_VLLM=0")
    if settings.USE_VLLM is not False and settings.TEMPERATURE < VLLM_COLDEST and machine.gpus:
        what = f"vLLM samples no colder than {VLLM_COLDEST}, and the loss would be that of another temperature"
        problems.add("TEMPERATURE", what, f"Set {VLLM_COLDEST} or more, or USE_VLLM=0")
    if settings.ROLLOUT_SYNC == "lora" and max(LORA_RANKS) < settings.LORA_R:
        what = f"vLLM takes adapters of rank {max(LORA_RANKS)} at most"
        problems.add("LORA_R", what, "Lower it, or set ROLLOUT_SYNC=merge")
    if settings.WARMUP_STEPS >= settings.TOTAL_STEPS:
        what = f"the learning rate would rise over {settings.WARMUP_STEPS} steps, the run has {settings.TOTAL_STEPS}"
        problems.add("WARMUP_STEPS", what, "Lower it, or raise TOTAL_STEPS")
    sequence = settings.IS_CORRECTION.startswith("sequence")
    if settings.LOSS_TYPE == "vespo" and sequence:
        problems.add("IS_CORRECTION", "vespo corrects sequences itself", "Set token_truncate or token_mask")
    if machine.gpus > 1:
        fix = "Make one visible, e.g. CUDA_VISIBLE_DEVICES=0"
        problems.add("CUDA_VISIBLE_DEVICES", f"{machine.gpus} GPUs are visible, this script uses one", fix)


def reward_specs(text: str) -> list[tuple[str, float]]:
    """(name, weight) of each reward function in `REWARDS`; raises ValueError for what is not `name` or `name=weight`."""
    specs = []
    for part in listed(text):
        name, equals, weight = part.partition("=")
        try:
            specs.append((name.strip(), float(weight) if equals else 1.0))
        except ValueError:
            raise ValueError(f"weight {weight!r} of {name!r} is not a number") from None
        if not math.isfinite(specs[-1][1]):
            raise ValueError(f"weight {weight!r} of {name!r} is not finite")
    if not specs:
        raise ValueError("no reward function is named")
    if len({name for name, _ in specs}) < len(specs):
        raise ValueError("a reward function is named twice")
    return specs


def load_reward(name: str) -> Callable[..., Sequence[float | None]]:
    """The reward function `name` of rewards.py, or `module:function` from the current folder; raises ValueError."""
    if name in rewards.REWARD_FUNCTIONS:
        return rewards.REWARD_FUNCTIONS[name]
    module, colon, function = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, rewards.REWARD_FUNCTIONS, 1)
        known = ", ".join(rewards.REWARD_FUNCTIONS)
        raise ValueError(f"{name!r} is unknown (there are {known}" + (f"; nearest: {near[0]}" if near else "") + ")")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the user's module raises while it is imported is the answer to give
        raise ValueError(f"{name!r} cannot be loaded: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ValueError(f"{name!r} is no function")
    return found


def check_rewards(
    settings: Settings, rows: Sequence[Row], problems: Problems, chosen: bool = False
) -> list[tuple[str, float]]:
    """The reward functions exist, and the CSVs hold what they need. Returns (name, weight) of each.

    `chosen`: INVALID_REWARD was set by the user, who may well want it above the worst reward.
    """
    try:
        specs = reward_specs(settings.REWARDS)
        for name, _ in specs:
            function = load_reward(name)
            columns = {key for row in rows for key in reward_columns(row, len(row.rewards))}
            given = dict.fromkeys(columns | {"prompts", "completion_ids", "truncated", "trainer_state"})
            try:
                inspect.signature(function).bind([], **given)
            except TypeError as error:
                if rows:
                    raise ValueError(f"{name!r} cannot be called with (completions, **columns): {error}") from None
            if ":" in name and rows:
                try_reward(name, settings, rows[0], columns)
    except ValueError as error:
        problems.add("REWARDS", str(error), "Write e.g. REWARDS=action,format=0.1 or REWARDS=my_module:my_function")
        return []
    except RuntimeError as error:
        problems.append(f"{error}. It was tried on the answers [0] and [1] to the first row of {rows[0].file}")
        return []
    if any(name in ("action", "best") for name, _ in specs):
        for file, row in sorted({row.file: row for row in rows if not row.rewards}.items()):
            problems.add(f"{file}, columns", no_actions(row), "Add one per action, or choose other REWARDS")
    paid = [row for row in rows if row.rewards]
    if paid and len(flat_rows(paid)) == len(paid) and {name for name, _ in specs} <= {"action", "best"}:
        what = "every row pays all its actions the same, so there is nothing to learn"
        problems.add("DATA", what, "Give better actions higher rewards, or choose other REWARDS")
    worst = min((min(row.rewards) for row in rows if row.rewards), default=settings.INVALID_REWARD)
    if worst < settings.INVALID_REWARD and not chosen and any(name == "action" for name, _ in specs):
        what = (
            f"an answer that cannot be parsed scores {settings.INVALID_REWARD:g}, more than the lowest reward {worst:g}"
        )
        problems.add("INVALID_REWARD", what, f"Set INVALID_REWARD={worst:g} or lower, so that garbage never pays")
    return specs


def no_actions(row: Row) -> str:
    """What is wrong with a file that has no rewards, of which this is a row."""
    return "there is no column reward_action_0, reward_action_1, ..." + near_column("reward_action_0", row.columns)


def flat_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows whose actions all pay the same: answers to them cannot be told apart."""
    return [row for row in rows if len(set(row.rewards)) == 1]


def try_reward(name: str, settings: Settings, row: Row, columns: Iterable[str]) -> None:
    """Call a user's reward function once, as TRL would: a mistake in it costs a second here and an hour in a run. With two
    completions, so that one reward for all of them is a mistake. Columns that the row's file does not have are None.

    Raises RuntimeError, naming the function and what it raised or returned.
    """
    values = dict.fromkeys(columns) | reward_columns(row, len(row.rewards))
    values |= {"prompts": row.prompt, "completion_ids": [0], "truncated": False}
    given: dict[str, Any] = {key: [value, value] for key, value in values.items()}
    given["trainer_state"] = types.SimpleNamespace(global_step=0, max_steps=settings.TOTAL_STEPS)
    answers = [f"<|start|>assistant<|channel|>final<|message|>[{action}]<|return|>" for action in (0, 1)]
    result = reward_callable(name, settings)(answers, **given)
    if inspect.isawaitable(result):
        asyncio.run(result)


@dataclass(frozen=True)
class ModelFiles:
    """The small files of a model: its folder (None before `tiny` was built), config.json, template, tokenizer.json."""

    folder: Path | None
    config: dict[str, Any]
    template: str | None = None
    tokenizer: Path | None = None


def find_model(model_id: str, problems: Problems) -> ModelFiles | None:
    """The model's small files: of a local folder, of the built `tiny`, or of the Hub (its cache first)."""
    if model_id == "tiny":
        sys.path.insert(0, str(ROOT / "scripts"))
        import make_model

        folder = make_model.tiny_path()
        if not all((folder / name).is_file() for name in ("model.safetensors", "tokenizer.json", "config.json")):
            return None
    elif Path(model_id).is_dir():
        folder = Path(model_id)
    elif model_id.startswith((".", "/", "~")) or len(model_id.split("/")) != 2:
        problems.add(
            "MODEL_ID",
            f"{model_id!r} is neither a folder nor a Hub id",
            f"Use {REAL_MODEL}, tiny, or an existing folder",
        )
        return None
    else:
        folder = fetch_small_files(model_id, problems)
        if folder is None:
            return ModelFiles(None, dict(REAL_CONFIG)) if model_id == REAL_MODEL else None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        missing = [key for key in REAL_CONFIG if key not in config and key != "quantization_config"]
        if config.get("model_type") != "gpt_oss" or missing:
            what = f"config.json says model_type {config.get('model_type')!r}" + (
                f" and lacks {', '.join(missing)}" if missing else ""
            )
            problems.add(f"MODEL_ID={model_id}", what, "This script trains gpt-oss models (model_type gpt_oss)")
            return None
        template = None
        if (folder / "chat_template.jinja").exists():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        elif (folder / "tokenizer_config.json").exists():
            template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError) as error:
        problems.add(
            f"MODEL_ID={model_id}", f"its files cannot be read ({error})", "Download or build the checkpoint again"
        )
        return None
    if not (folder / "tokenizer.json").exists():
        problems.add(
            f"MODEL_ID={model_id}", "tokenizer.json is missing", "Add the tokenizer to the checkpoint's folder"
        )
        return None
    if Path(model_id).is_dir():
        shards = {"model.safetensors"}
        with contextlib.suppress(OSError, ValueError, KeyError):
            index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
            shards = set(index["weight_map"].values())
        for name in sorted(name for name in shards if not (folder / name).is_file()):
            problems.add(f"MODEL_ID={model_id}", f"{name} is missing", "Copy the whole checkpoint, weights included")
    return ModelFiles(folder, config, template, folder / "tokenizer.json")


def fetch_small_files(model_id: str, problems: Problems) -> Path | None:
    """Config, tokenizer and template of a Hub model, from the cache or by a download of some 28 MB."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        return None  # check_packages names the missing package
    try:
        try:
            cached = Path(snapshot_download(model_id, allow_patterns=list(MODEL_FILES), local_files_only=True))
            if all((cached / name).exists() for name in ("config.json", "tokenizer.json")):
                return cached
            raise LocalEntryNotFoundError("the cache holds only a part of it")
        except LocalEntryNotFoundError:
            return Path(snapshot_download(model_id, allow_patterns=list(MODEL_FILES)))
    except Exception as error:  # offline, no such repository, no access: the user needs the same answer
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "Check the name, the network and `hf auth login`, or set MODEL_ID to a local folder or to tiny"
        problems.add("MODEL_ID", f"{model_id} is not in the cache and cannot be fetched ({reason[:200]})", fix)
        return None


def check_machine(
    settings: Settings,
    files: ModelFiles | None,
    machine: Machine,
    plan: Plan | None,
    problems: Problems,
    planned: Callable[[Settings, Machine], Plan],
    resumed: bool = False,
) -> None:
    """The GPU is there and large enough, and so is the disk. `planned` and `resumed` as in `propose`."""
    if plan is None or files is None:
        return
    positions = files.config.get("max_position_embeddings", math.inf)
    if plan.prompt_len + settings.MAX_COMPLETION_LEN > positions:
        what = f"after a prompt of {plan.prompt_len} tokens, {settings.MAX_COMPLETION_LEN} are more than the model's {positions} positions"
        room = positions - plan.prompt_len
        problems.add("MAX_COMPLETION_LEN", what, f"Set it to {room} or lower" if room > 0 else "Shorten the prompts")
    if machine.gpus:
        if not machine.compiler:
            what = "there is none, and the kernels of learner and engine are written in Triton, which needs one"
            problems.add("C compiler", what, "apt install build-essential, or name one in CC")
        engine = plan.engine
        if misfit(plan, machine):
            free = f"{machine.gpu_free:.0f} of {machine.gpu_total:.0f} GiB are free"
            if engine and engine.cache < engine.cache_least:
                name = "VLLM_GPU_MEM"
                what = (
                    f"vLLM needs at least {engine.weights + engine.scratch + engine.cache_least:.1f} GiB beside the "
                    f"trainer's {plan.weights + plan.adapter:.1f} and {free} ({engine.cache_reason})"
                )
            else:
                name, rollout = f"GPU {machine.gpu}", f"generation {plan.generation:.1f}"
                if engine:
                    rollout = f"vLLM awake {engine.awake:.1f} and asleep {engine.asleep:.1f}"
                parts = (
                    f"weights {plan.weights:.1f}, adapter {plan.adapter:.1f}, {rollout}, learning {plan.learning:.1f}"
                )
                what = f"the run needs about {plan.peak:.0f} GiB ({parts}) and {free}"
                if plan.peak <= machine.gpu_free:
                    what += ", a tenth of which is kept for what the plan does not see"
            problems.add(name, what, propose(settings, files.config, machine, planned, resumed))
        if engine and engine.weights + 2 > machine.ram_free:
            what = f"the sleeping engine keeps {engine.weights:.1f} GiB in host memory, {machine.ram_free:.1f} GiB are free"
            without = planned(dataclasses.replace(settings, USE_VLLM=False), machine)
            fix = "" if misfit(without, machine) else ", or set USE_VLLM=0"
            problems.add("memory", what, f"Free memory, take a machine with more of it{fix}")
    elif plan.weights > 4:
        what = f"no GPU is visible, and {settings.MODEL_ID} needs one ({plan.weights:.0f} GiB of BF16 weights)"
        problems.add("MODEL_ID", what, "Run on a machine with an 80 GB GPU, or try MODEL_ID=tiny, which needs none")
    elif plan.peak > machine.ram_free > 0:
        what = f"the run needs about {plan.peak:.1f} GiB of memory and {machine.ram_free:.1f} GiB are free"
        problems.add("memory", what, "Lower MICRO_BATCH or MAX_COMPLETION_LEN")
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    # Adapter and its two AdamW moments in float32, per kept checkpoint, plus the final adapter, the logs and the zip.
    output = plan.adapter * (settings.SAVE_TOTAL_LIMIT + 2) + 0.2
    needs = {Path(settings.OUTPUT_DIR): (output, "OUTPUT_DIR", "checkpoints, logs and the zip")}
    if settings.MODEL_ID == REAL_MODEL:
        found = downloaded_gib(files)
        if found < DOWNLOAD_GIB - 0.2:  # nothing, or a part of it
            needs[home] = (DOWNLOAD_GIB - found, "HF_HOME", "the checkpoint's download")
    for path, (need, name, purpose) in needs.items():
        free = shutil.disk_usage(existing_parent(path)).free / GIB
        if free < need:
            problems.add(
                f"{name}={path}",
                f"{purpose} need {need:.1f} GiB and {free:.1f} GiB are free",
                f"Free space, or point {name} to a larger disk",
            )


def propose(
    settings: Settings,
    config: Mapping[str, Any],
    machine: Machine,
    planned: Callable[[Settings, Machine], Plan],
    resumed: bool = False,
) -> str:
    """The advice for a run that does not fit the GPU: every setting that alone makes it fit, best first; else the few that
    do together; else how much memory is missing. `planned(settings, machine)` is the plan that is refused, for any
    settings and machine; a `resumed` run may change only some settings."""

    def stops(on: Machine = machine, **change: Any) -> str:
        return misfit(planned(dataclasses.replace(settings, **change), on), on)

    def least_free(**change: Any) -> int:  # GiB
        return bisect.bisect_left(
            range(10_000), True, key=lambda n: not stops(dataclasses.replace(machine, gpu_free=n), **change)
        )

    by_hand = settings.MICRO_BATCH or settings.GENERATION_BATCH
    levers = {  # best first; `...` is a number to lower as little as will do
        "VLLM_GPU_MEM": None,
        "EXPERTS": "mxfp4" if has_mxfp4(config) else settings.EXPERTS,
        "GRADIENT_CHECKPOINTING": True,
        "GENERATION_BATCH": None,
        "MAX_COMPLETION_LEN": ...,
        "MICRO_BATCH": ... if settings.MICRO_BATCH else None,
        # A batch that was set by hand is what to lower, and need not go into the completions of fewer prompts.
        "PROMPTS_PER_STEP": settings.PROMPTS_PER_STEP if by_hand else ...,
        "USE_VLLM": False,
    }
    levers = {n: v for n, v in levers.items() if v != getattr(settings, n) and (not resumed or n in MAY_CHANGE)}

    def smallest(names: Iterable[str]) -> dict[str, Any]:
        return {name: 1 if levers[name] is ... else levers[name] for name in names}

    def written(names: Iterable[str]) -> str:
        change = smallest(names)
        for name in change:
            if levers[name] is ...:
                most = getattr(settings, name)
                change[name] = largest_that_fits(lambda n, name=name: stops(**change | {name: n}), most)[0]
        return " and ".join(f"{name}={show(value)}" for name, value in change.items())

    if alone := [written([name]) for name in levers if not stops(**smallest([name]))]:
        if alone[0] == "VLLM_GPU_MEM=auto":
            larger = (n / 100 for n in range(int(settings.VLLM_GPU_MEM * 100) + 1, 96))
            alone[1:1] = [f"VLLM_GPU_MEM={share:g}" for share in larger if not stops(VLLM_GPU_MEM=share)][:1]
        advice = f"With all else as set, {' or '.join(alone)} fits"
    elif not stops(**smallest(levers)):
        names = list(levers)
        for name in reversed(levers):
            rest = [other for other in names if other != name]
            names = names if stops(**smallest(rest)) else rest
        advice = f"With all else as set, {written(names)} fit together"
    else:
        least = least_free(**smallest(levers))
        advice = f"No setting helps on this GPU: the smallest run needs {least} GiB free, {least - machine.gpu_free:.1f} more than there are"
    if (needed := least_free()) <= machine.gpu_total:
        return f"{advice}. Or free {needed - machine.gpu_free:.1f} GiB more of the GPU (nvidia-smi names its users)"
    return advice if alone else f"{advice}. Or rent a larger GPU"


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` (or itself) that exists."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path


# ---- Data: CSVs to rendered prompts ----------------------------------------------------------------------------------

REWARD_COLUMN = re.compile(r"reward_action_(0|[1-9]\d*)")
# Keyword arguments that TRL and this script themselves pass to reward functions: a CSV column of that name goes by `csv_NAME`.
RESERVED_ARGUMENTS = {"prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments", "truncated", "prompt_id", "invalid_reward"}  # fmt: skip
SHOWN = 20  # problems listed per file: the rest is counted
# First bytes of files that are given in place of a CSV.
FOREIGN = {
    b"PK\x03\x04": "an Excel workbook or another zipped file",
    b"\xd0\xcf\x11\xe0": "an Excel workbook (.xls)",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}


@dataclass(frozen=True)
class Row:
    """One row of a CSV: `prompt` as text (rendered later by `render_rows`), rewards by action, and every column."""

    file: str
    number: int  # 1 is the first row below the header
    messages: tuple[tuple[str, str], ...]  # (role, text) ..., or one ("rendered", text)
    rewards: tuple[float, ...]
    columns: dict[str, Any]
    prompt: str = ""

    @property
    def id(self) -> str:
        return f"{Path(self.file).stem}:{self.number}"


def find_files(setting: str, text: str, problems: Problems) -> list[Path]:
    """The files that a setting names: paths or globs, relative to the current folder or else to this script's."""
    found: list[Path] = []
    for part in listed(text):
        candidates = [Path(part).expanduser(), ROOT / part]
        matches = next(([c] for c in candidates if c.is_file()), None)
        matches = matches or next(
            (m for c in candidates if (m := sorted(map(Path, glob.glob(str(c), recursive=True))))), []
        )
        matches = [m for m in matches if m.is_file()]
        if not matches:
            problems.add(
                setting, f"no file matches {part!r}", "Name existing CSV files or a glob such as 'days/*.csv' (quoted)"
            )
        found += [m for m in matches if m not in found]
    if not text.strip():
        problems.add(setting, "it is empty", "Name CSV files or a glob")
    return found


def near_column(name: str, header: Iterable[str]) -> str:
    """A question in brackets that names the column which was probably meant to be `name`, or nothing."""
    others = {column.lower(): column for column in header if not REWARD_COLUMN.fullmatch(column)}
    near = difflib.get_close_matches(name, others, 1, 0.6)
    return f" (should {others[near[0]]!r} be `{name}`?)" if near else ""


def read_csv(path: Path, problems: Problems) -> list[Row]:
    """The rows of one CSV. Problems name the file, the row (1 is the first below the header), the column and the line.

    Accepted: a `prompt` column (rendered in Harmony, beginning with `<|start|>`, or plain text, taken as the user's
    message), or `user` with an optional `system`; `reward_action_0` .. `reward_action_{K-1}` with finite numbers, K >= 2,
    for the rewards that need them. Other columns pass through as text.
    """
    mine = Problems()
    csv.field_size_limit(2**31 - 1)
    try:
        content = path.read_bytes()
    except OSError as error:
        problems.add(str(path), f"cannot be read ({error.strerror})", "Check the path and its permissions")
        return []
    for start, kind in FOREIGN.items():
        if content.startswith(start):
            fix = "Open it in a spreadsheet and save it as 'CSV UTF-8'"
            problems.add(str(path), f"it is {kind}, not UTF-8 text", fix)
            return []
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        problems.add(
            f"{path}, line {line}",
            f"byte {error.start} is not UTF-8",
            "Save the file as UTF-8 (in a spreadsheet: 'CSV UTF-8')",
        )
        return []
    if "\0" in text:
        problems.add(
            f"{path}, line {text[: text.index(chr(0))].count(chr(10)) + 1}",
            "it holds a NUL byte",
            "Export the CSV again; UTF-16 must become UTF-8",
        )
        return []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records: list[tuple[int, int, list[str]]] = []
    start = 1
    try:
        for cells in reader:
            if cells:
                records.append((len(records), start, cells))
            start = reader.line_num + 1
    except csv.Error as error:
        where = f"{path}, row {len(records)} (from line {start})" if records else f"{path}, line {start}"
        problems.add(
            where, f"broken CSV quoting ({error})", "Close every quote, and double quotes inside a quoted cell"
        )
        return []
    if not records:
        problems.add(str(path), "it is empty", "Give it a header and at least one row")
        return []
    header = [name.strip() for name in records[0][2]]
    for name in sorted({name for name in header if header.count(name) > 1}):
        mine.add(
            f"{path}, header",
            f"column {name!r} stands there twice" if name else "a column has no name",
            "Name every column once",
        )
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        problems.add(f"{path}, header", "its cells are separated by semicolons or tabs", "Save it with commas")
        return []
    if "prompt" not in header and "user" not in header:
        mine.add(
            f"{path}, header",
            "there is neither a `prompt` nor a `user` column" + near_column("prompt", header),
            "Add one of them; docs/data.md shows both forms",
        )
    actions = sorted(int(m[1]) for name in header if (m := REWARD_COLUMN.fullmatch(name)))
    if actions and actions != list(range(len(actions))):
        gap = next(k for k in range(len(actions) + 1) if k not in actions)
        mine.add(
            f"{path}, header",
            f"reward_action_{gap} is missing beside {', '.join(f'reward_action_{k}' for k in actions)}"
            + near_column(f"reward_action_{gap}", header),
            "Number the actions from 0 without a gap",
        )
    elif len(actions) == 1:
        mine.add(
            f"{path}, header",
            "there is only one action, reward_action_0" + near_column("reward_action_1", header),
            "GRPO needs at least two actions to compare",
        )
    if not records[1:]:
        mine.add(str(path), "there is no row below the header", "Add at least one row")
    rows: list[Row] = []
    for number, line, cells in records[1:] if not mine else []:
        where = f"{path}, row {number} (line {line})"
        if len(cells) != len(header):
            mine.add(
                where,
                f"it has {len(cells)} cells, the header has {len(header)}",
                "Quote cells that hold commas or line breaks",
            )
            continue
        columns: dict[str, Any] = dict(zip(header, cells, strict=True))
        values = []
        for k in actions:
            cell = columns[f"reward_action_{k}"].strip()
            try:
                values.append(float(cell))
                if not math.isfinite(values[-1]):
                    raise ValueError
            except ValueError:
                what = "the reward is missing" if not cell else f"{cell!r} is not a finite number"
                mine.add(f"{where}, column reward_action_{k}", what, "Every action needs a number")
        columns |= {f"reward_action_{k}": value for k, value in zip(actions, values, strict=False)}
        prompt, user, system = (columns.get(name, "").strip() for name in ("prompt", "user", "system"))
        if not (prompt or user):
            mine.add(
                f"{where}, column {'prompt' if 'prompt' in header else 'user'}",
                "the prompt is empty",
                "Fill it in or remove the row",
            )
        if prompt.startswith("<|start|>"):
            messages = (("rendered", columns["prompt"]),)
            if not re.search(r"<\|start\|>assistant(?:<\|channel\|>[^<]*(?:<\|message\|>)?)?\Z", columns["prompt"]):
                mine.add(
                    f"{where}, column prompt",
                    "a rendered prompt must end where the assistant begins",
                    "End it with <|start|>assistant",
                )
        else:
            messages = ((("system", system),) if system else ()) + (("user", prompt or user),)
        rows.append(Row(str(path), number, messages, tuple(values), columns))
    problems += mine[:SHOWN]
    if len(mine) > SHOWN:
        problems.add(str(path), f"and {len(mine) - SHOWN} more problems like these", "Mend the file and run again")
    return [] if mine else rows


def read_rows(setting: str, text: str, problems: Problems) -> list[Row]:
    """The rows of every file that a setting names."""
    rows = [row for path in find_files(setting, text, problems) for row in read_csv(path, problems)]
    names: dict[str, str] = {}
    for row in rows:
        if names.setdefault(Path(row.file).stem, row.file) != row.file:
            fix = "Rename one: rows are identified in the logs by file name and row"
            problems.add(setting, f"{names[Path(row.file).stem]} and {row.file} have the same name", fix)
            break
    return rows


def render(template: str, messages: Sequence[tuple[str, str]], effort: str, date: str) -> str:
    """A conversation rendered by a Hugging Face chat template, up to where the assistant begins.

    The same sandbox, options and helpers as transformers' own renderer (a test compares the two), which would cost an
    import of torch. gpt-oss's template writes today's date; here it gets `date`, so that a prompt never changes.
    """
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda x, ensure_ascii=False, **kwargs: json.dumps(
        x, ensure_ascii=ensure_ascii, **kwargs
    )
    environment.globals["raise_exception"] = raise_exception
    moment = time.strptime(date, "%Y-%m-%d")
    environment.globals["strftime_now"] = lambda form: time.strftime(form, moment)
    conversation = [{"role": role, "content": text} for role, text in messages]
    return environment.from_string(template).render(
        messages=conversation, add_generation_prompt=True, reasoning_effort=effort
    )


def render_rows(
    settings: Settings, rows: Sequence[Row], files: ModelFiles, problems: Problems
) -> tuple[list[Row], int]:
    """The rows with their prompts rendered, and the longest prompt in tokens; prompts over MAX_PROMPT_LEN are problems."""
    from tokenizers import Tokenizer

    rendered = []
    for row in rows:
        if row.messages[0][0] == "rendered":
            prompt = row.messages[0][1]
        elif files.template is None:
            problems.add(
                f"MODEL_ID={settings.MODEL_ID}",
                f"it has no chat template, and {row.file} holds prompts that are not rendered",
                "Add chat_template.jinja to the model, or give rendered prompts",
            )
            return list(rows), 0
        else:
            prompt = render(files.template, row.messages, settings.REASONING_EFFORT, settings.PROMPT_DATE)
        rendered.append(dataclasses.replace(row, prompt=prompt))
    tokenizer = Tokenizer.from_file(str(files.tokenizer))
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch([row.prompt for row in rendered])]
    long = [(row, n) for row, n in zip(rendered, lengths, strict=True) if n > settings.MAX_PROMPT_LEN]
    for row, n in long[:SHOWN]:
        what = f"the prompt has {n} tokens, MAX_PROMPT_LEN is {settings.MAX_PROMPT_LEN}"
        problems.add(f"{row.file}, row {row.number}", what, f"Shorten it, or set MAX_PROMPT_LEN={max(lengths)}")
    if len(long) > SHOWN:
        problems.add(
            "MAX_PROMPT_LEN", f"{len(long) - SHOWN} more prompts are too long", f"The longest has {max(lengths)} tokens"
        )
    return rendered, max(lengths, default=0)


def prompt_order(rows: int, seed: int, count: int) -> Iterator[int]:
    """The first `count` row indices of an endless stream of shuffled passes over `rows` rows.

    A function of `seed` alone: a resumed run continues the stream where it was, also in a later pass, which a sampler
    that shuffles once per epoch cannot (https://github.com/huggingface/trl/issues/7040). No row is ever left over.
    """
    done = 0
    for cycle in range(math.ceil(count / rows)):
        order = list(range(rows))
        random.Random(f"{seed}/{cycle}").shuffle(order)
        yield from order[: count - done]
        done += len(order)


# ---- Run directory: what is there, and what may be done with it -----------------------------------------------------

# What a resumed run may change: everything else would make it a different run. How rollouts are generated may change, as what
# fails there must not end a run; the importance ratios correct for the difference.
MAY_CHANGE = {
    "TOTAL_STEPS", "SAVE_STEPS", "SAVE_TOTAL_LIMIT", "REPORT_TO", "RESUME", "OVERWRITE", "EVAL_DATA", "EVAL_SAMPLES",
    "EVAL_PROFILE",
    "OUTPUT_DIR", "IGNORE_VARS", "ALLOW_UNTESTED", "GENERATION_BATCH", "MICRO_BATCH", "PACKING", "EXPERTS", "ATTN_IMPL", "DATA", "VLLM_GPU_MEM", "VLLM_EAGER",
    "PARITY", "PARITY_LIMIT", "USE_VLLM", "ROLLOUT_SYNC",
}  # fmt: skip
COMPLETE = "complete.json"  # the very last file that a run writes, after its zip
ADAPTER = "adapter_model.safetensors"
CHECKPOINT_FILES = ("trainer_state.json", ADAPTER, "optimizer.pt", "scheduler.pt")


@dataclass(frozen=True)
class RunState:
    """What OUTPUT_DIR holds: the step and folder of its last complete checkpoint (0 and None for a fresh run)."""

    folder: Path
    step: int = 0
    checkpoint: Path | None = None
    exists: bool = False
    choices: dict[str, Any] = field(default_factory=dict)


def run_folder(settings: Settings) -> Path:
    """OUTPUT_DIR as an absolute path without links, so that the zip has a place beside it."""
    return Path(settings.OUTPUT_DIR).expanduser().resolve()


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint, whole or not, in order."""
    steps = ((path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return sorted((int(step), path) for step, path in steps if step.isdigit())


def was_written(path: Path) -> bool:
    """Whether a checkpoint was written to its end, which is trainer_state.json, and still holds its adapter."""
    with contextlib.suppress(ValueError, OSError):
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        return (path / ADAPTER).is_file()
    return False


def last_checkpoint(folder: Path) -> tuple[int, Path | None]:
    """Step and folder of the last complete checkpoint: one that was cut off while it was written does not count."""
    for step, path in reversed(checkpoints(folder)):
        if was_written(path) and all((path / name).is_file() for name in CHECKPOINT_FILES):
            return step, path
    return 0, None


def unresumable(folder: Path, step: int) -> str | None:
    """What training on from `step`, that of the last complete checkpoint, would replace although it is of a later step;
    None where there is no such thing. An unpacked zip is like that, and a run whose checkpoints were deleted."""
    steps = 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        steps = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))["steps"]
    if steps > step:
        return f"a complete run of {steps} steps"
    if not step and (folder / ADAPTER).is_file():  # no run leaves it without a checkpoint
        return "a trained adapter"
    stripped = [path.name for _, path in checkpoints(folder) if was_written(path)]
    return f"the adapter of {stripped[-1]}" if stripped and not step else None


def data_fingerprint(rows: Sequence[Row]) -> str:
    """SHA-256 over everything that training sees of the rows, whatever their files are called."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.messages, row.rewards, sorted(row.columns.items())], default=str).encode())
    return digest.hexdigest()


def inspect_run(settings: Settings, rows: Sequence[Row], problems: Problems) -> RunState:
    """What is in OUTPUT_DIR, with a problem wherever this run must not go on there."""
    folder = run_folder(settings)
    where, other = f"OUTPUT_DIR={settings.OUTPUT_DIR}", "choose another OUTPUT_DIR"
    if not settings.OUTPUT_DIR.strip() or (folder.exists() and not folder.is_dir()):
        problems.add(
            where, "it is not a folder" if settings.OUTPUT_DIR.strip() else "it is empty", "Name a folder for the run"
        )
        return RunState(folder)
    if not existing_parent(folder).is_dir():
        problems.add(where, f"{existing_parent(folder)} is a file, not a folder", "Choose a place inside a folder")
        return RunState(folder)
    if not os.access(existing_parent(folder), os.W_OK):
        problems.add(where, f"{existing_parent(folder)} is not writable", "Choose a folder that is")
    if folder.parent == folder or not os.access(existing_parent(folder.parent), os.W_OK):
        problems.add(where, f"{folder}.zip could not be written beside it", "Choose a folder inside a writable one")
    if not folder.exists() or not any(folder.iterdir()):
        archive = folder.with_name(folder.name + ".zip") if folder.name else folder
        if archive.is_file() and not settings.OVERWRITE:
            problems.add(where, f"{archive} of an earlier run is there", f"Move it away, set OVERWRITE=1, or {other}")
        return RunState(folder)
    try:
        before = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        old, fingerprint = before["settings"], before["data_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        problems.add(
            where,
            "it holds files, but no run of this script (no readable settings.json)",
            f"Empty it yourself, or {other}",
        )
        return RunState(folder)
    if settings.OVERWRITE:
        used = {Path.cwd(), *(Path(row.file) for row in rows)}
        for name in ("DATA", "EVAL_DATA", "EVAL_PROFILE"):  # also those that this run has no use for
            used.update(find_files(name, getattr(settings, name), Problems()))
        used |= {Path(settings.MODEL_ID)} if Path(settings.MODEL_ID).exists() else set()
        # The user's reward functions were imported, with all that they import.
        files = (getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()])
        used |= {Path(file) for file in files if file}
        for path in sorted(path for path in {path.resolve() for path in used} if path.is_relative_to(folder)):
            problems.add("OVERWRITE", f"it would delete {path}, which this run needs", f"Move that away, or {other}")
        return RunState(folder, exists=True)
    step, checkpoint = last_checkpoint(folder)
    if settings.RESUME == "never":
        problems.add(
            where,
            f"it holds a run (last checkpoint: step {step}) and RESUME=never",
            f"Set OVERWRITE=1 to delete it, or {other}",
        )
    elif lost := unresumable(folder, step):
        what = f"it holds {lost}, but not the optimizer state that it takes to continue (a run's zip has none)"
        use = f"Use it as it is (python scripts/evaluate.py --adapter {shlex.quote(str(folder))})"
        problems.add(where, what, f"{use}, set OVERWRITE=1 to delete it, or {other}")
        return RunState(folder, exists=True)
    elif step > settings.TOTAL_STEPS:
        fix = f"Set TOTAL_STEPS={step} or higher, OVERWRITE=1 to delete that run, or {other}"
        problems.add("TOTAL_STEPS", f"the run in {folder} has {step} steps, more than {settings.TOTAL_STEPS}", fix)
    elif step >= settings.TOTAL_STEPS and (folder / COMPLETE).exists():
        fix = f"Raise TOTAL_STEPS to train on, set OVERWRITE=1 to delete it, or {other}"
        problems.add(where, f"it holds a run that is complete ({step} of {settings.TOTAL_STEPS} steps)", fix)
    for name, value in dataclasses.asdict(settings).items():
        if name not in MAY_CHANGE and name in old and show(old[name]) != show(value):
            fix = f"Set {name}={show(old[name])} to continue it, OVERWRITE=1 to delete it, or {other}"
            problems.add(name, f"the run in {folder} was started with {show(old[name])}, now it is {show(value)}", fix)
    if rows and fingerprint != data_fingerprint(rows):
        problems.add(
            "DATA",
            f"the run in {folder} was started on other rows",
            f"Restore the data to continue it, set OVERWRITE=1, or {other}",
        )
    return RunState(folder, step, checkpoint, exists=True, choices=before.get("choices") or {})


@dataclass(frozen=True)
class Preflight:
    """Everything that is known about a run before anything heavy is imported."""

    settings: Settings
    sources: dict[str, str]
    problems: Problems
    machine: Machine
    versions: dict[str, str | None]
    files: ModelFiles | None
    rows: list[Row]
    eval_rows: list[Row]
    reward_specs: list[tuple[str, float]]
    attention: tuple[str, str]
    packing: tuple[str, str]
    experts: tuple[str, str]
    rollouts: tuple[bool, str]
    plan: Plan | None
    run: RunState
    closed_loop: ClosedLoop


def preflight(environ: Mapping[str, str], machine: Machine | None = None) -> Preflight:
    """Every check that needs no training; all problems are collected, and nothing is written."""
    settings, sources, problems = load_settings(environ)
    machine = machine or read_machine()
    versions = installed_versions([*TESTED, *TESTED_VLLM])
    rollouts = choose_rollouts(settings.USE_VLLM, machine.gpus, settings.MODEL_ID == "tiny", versions["vllm"])
    check_packages(settings, versions, problems, rollouts[0])
    files = find_model(settings.MODEL_ID, problems)
    check_settings(settings, files.config if files else None, machine, problems)
    check_trackers(settings, environ, problems)
    rows = read_rows("DATA", settings.DATA, problems)
    eval_rows = read_rows("EVAL_DATA", settings.EVAL_DATA, problems) if settings.EVAL_SAMPLES else []
    for row in eval_rows:
        if not row.rewards:
            problems.add(f"{row.file}, columns", no_actions(row), "Add them, or set EVAL_SAMPLES=0")
            break
    specs = check_rewards(settings, rows, problems, sources["INVALID_REWARD"] == "environment")
    run = inspect_run(settings, rows, problems)
    flash = installed_versions(package for package, _ in FLASH_PACKAGES.values())
    installed = [name for name, version in flash.items() if version]
    attention = choose_attention(settings.ATTN_IMPL, machine.gpus, machine.capability, installed)
    packing = choose_packing(settings.PACKING, attention[0], machine.gpus)
    experts, plan, longest = (settings.EXPERTS or "bf16", "the model is not there yet"), None, 0
    if files and files.tokenizer:
        rows, longest = render_rows(settings, rows, files, problems)
        eval_rows, longest_eval = render_rows(settings, eval_rows, files, problems)
        longest = max(longest, longest_eval)
    checkpoint = checkpoint_gib(settings.MODEL_ID, files) if files and rollouts[0] and machine.gpus else None

    def choose_plan(s: Settings, on: Machine = machine) -> tuple[tuple[str, str], Plan]:
        shapes = s, files.config, on, longest or s.MAX_PROMPT_LEN, attention[0]
        engine = None if s.USE_VLLM is False else checkpoint
        plans = {kind: plan_memory(*shapes, engine, packing[0], kind) for kind in ("bf16", "mxfp4")}
        chosen = choose_experts(
            s.EXPERTS, has_mxfp4(files.config), *plans.values(), on.gpu_free if on.gpus else on.ram_free
        )
        return chosen, plans[chosen[0]]

    def planned(s: Settings, on: Machine = machine) -> Plan:
        return choose_plan(s, on)[1]

    if files:
        experts, plan = choose_plan(settings)
        if machine.gpus:
            length, size = find_limits(settings, files.config, machine, plan.prompt_len, planned)
            plan = dataclasses.replace(plan, largest_length=length, largest_micro_batch=size)
    if run.checkpoint and plan:  # what `auto` chose stays: other batches would sample differently
        engine, _ = run.choices.get("rollouts") or rollouts
        recorded = (run.choices.get("plan") or {}).get("generation_batch")
        if engine != rollouts[0]:
            if settings.USE_VLLM is None:
                what = f"the run in {run.folder} was started with USE_VLLM={int(engine)}, now it is {int(rollouts[0])}"
                fix = (
                    f"Set USE_VLLM={int(engine)} to continue as before, USE_VLLM={int(rollouts[0])} to go on like this"
                )
                problems.add("USE_VLLM", f"{what} ({rollouts[1]})", fix)
        elif recorded and settings.GENERATION_BATCH is None:
            plan = dataclasses.replace(
                plan, generation_batch=recorded, generation_batch_reason="as the run was started"
            )
    chosen = sources["EVAL_PROFILE"] == "environment"
    closed_loop = plan_closed_loop(settings, eval_rows, rollouts[0], chosen, problems)
    check_machine(settings, files, machine, plan, problems, planned, run.checkpoint is not None)
    problems[:] = dict.fromkeys(problems)
    return Preflight(
        settings, sources, problems, machine, versions, files, rows, eval_rows, specs, attention, packing, experts,
        rollouts, plan, run, closed_loop,
    )  # fmt: skip


def downloaded_gib(files: ModelFiles) -> float:
    """Size of the checkpoint's weights that are on this machine, in GiB."""
    return sum(path.stat().st_size for path in files.folder.glob("*.safetensors")) / GIB if files.folder else 0.0


def checkpoint_gib(model_id: str, files: ModelFiles) -> float:
    """Size of the checkpoint's weights in GiB; of the official one where nothing was downloaded yet."""
    found = downloaded_gib(files)
    if model_id == REAL_MODEL:  # a download may have broken off
        return max(found, DOWNLOAD_GIB)
    return found or DOWNLOAD_GIB


def banner(check: Preflight) -> str:
    """The resolved settings with units and where each came from, the sizes derived from them, and every choice."""
    s, m, lines = check.settings, check.machine, []
    for name, spec in FIELDS.items():
        lines.append(f"  {name:<22} {show(getattr(s, name)):<28} {spec.metadata['unit']:<12} {check.sources[name]}")
    gpu = f"{m.gpu}, {m.gpu_free:.1f} of {m.gpu_total:.1f} GiB free" if m.gpus else "no GPU"
    passes = s.TOTAL_STEPS * s.PROMPTS_PER_STEP / max(len(check.rows), 1)
    lines = ["Settings", *lines, "", "This run"]
    lines += [
        f"  machine       {gpu}; {m.cores} cores ({m.arch}), {m.ram_free:.1f} GiB of memory free",
        f"  data          {len(check.rows)} training rows, {len(check.eval_rows)} held-out rows",
        f"  step          {s.PROMPTS_PER_STEP} prompts x {s.NUM_GENERATIONS} generations = {s.completions_per_step} completions",
        f"  length        {s.TOTAL_STEPS} steps, {passes:.1f} passes over the rows",
        f"  rewards       {', '.join(f'{name} x {weight:g}' for name, weight in check.reward_specs)}",
        f"  attention     {check.attention[0]}: {check.attention[1]}",
        f"  packing       {check.packing[0]}: {check.packing[1]}",
        f"  experts       {check.experts[0]}: {check.experts[1]}",
        f"  rollouts      {'vLLM' if check.rollouts[0] else 'transformers'}: {check.rollouts[1]}",
        f"  closed loop   {'on' if check.closed_loop.prompt else 'off'}: {check.closed_loop.reason}",
        f"  clip range    {s.EPSILON:g} below, {choose_epsilon_high(s)[0]:g} above: {choose_epsilon_high(s)[1]}",
    ]
    if plan := check.plan:
        lines += [
            f"  MICRO_BATCH   {plan.micro_batch}: {plan.micro_batch_reason}",
        ]
        if engine := plan.engine:
            # How many stand there without a gap: 1, 2, 3, ...
            small = sum(size == place for place, size in enumerate(engine.capture_sizes, 1))
            lines += [
                f"  vLLM awake    weights {engine.weights:.1f} + scratch {engine.scratch:.1f} + cache {engine.cache:.1f} = "
                f"{engine.awake:.1f} GiB; cache for {engine.cache_reason}",
                f"  vLLM asleep   {engine.asleep:.1f} GiB on the GPU, {engine.weights:.1f} GiB of host memory; "
                f"graphs for batches of {', '.join([f'1 to {small}', *map(str, engine.capture_sizes[small:])])}",
            ]
            rollout = f"vLLM awake {engine.awake:.2f} and learning {plan.learning:.2f} + asleep {engine.asleep:.2f}"
        else:
            lines.append(f"  GENERATION_BATCH {plan.generation_batch}: {plan.generation_batch_reason}")
            rollout = f"generation {plan.generation:.2f} and learning {plan.learning:.2f}"
        lines.append(
            f"  memory        weights {plan.weights:.2f} + adapter {plan.adapter:.2f} + the larger of {rollout} = "
            f"{plan.peak:.2f} GiB (estimate)"
        )
        for name, limit in (("MAX_COMPLETION_LEN", plan.largest_length), ("MICRO_BATCH", plan.largest_micro_batch)):
            if limit:
                lines.append(f"  largest       {limit_text(name, limit)}")
    else:
        lines.append(
            "  model         the tiny model is made at the first start (under a minute); prompts are measured then"
        )
    state = f"continues from step {check.run.step}" if check.run.checkpoint else "starts at step 0"
    if check.run.exists and s.OVERWRITE:
        state = "DELETES the run that is there (OVERWRITE=1)"
    if any(problem.startswith("OUTPUT_DIR=") for problem in check.problems):
        state = "cannot be used, see below"
    lines.append(f"  OUTPUT_DIR    {check.run.folder}: {state}")
    lines += map(boxed, filter(None, [attention_warning(check.attention[0]), *data_warnings(check)]))
    return "\n".join(lines)


def data_warnings(check: Preflight) -> list[str]:
    """What a run with these rows has to be warned about: rows that teach nothing, an evaluation that is not held out."""
    warnings, rows, held_out = [], check.rows, check.eval_rows
    flat = flat_rows(rows)
    if 2 * len(flat) > len(rows) and any(name in ("action", "best") for name, _ in check.reward_specs):
        first = f"the first is {flat[0].file}, row {flat[0].number}"
        warnings.append(f"{len(flat)} of {len(rows)} rows pay all their actions the same and teach nothing; {first}")
    shipped = FIELDS["DATA"].default, FIELDS["DATA"].metadata["tiny"]
    own = check.sources["DATA"] == "environment" and check.settings.DATA not in shipped
    if held_out and own and check.sources["EVAL_DATA"] != "environment":
        demo = "rows and closed loop" if check.closed_loop.prompt else "rows"
        what = f"Evaluated on the demo's {demo} ({check.settings.EVAL_DATA}), nothing held out from your DATA"
        warnings.append(f"{what}: set EVAL_DATA='...', or EVAL_SAMPLES=0 to skip")
    prompts = [{row.prompt or row.messages for row in part} for part in (rows, held_out)]
    if shared := len(prompts[0] & prompts[1]):
        what = f"{shared} of {len(prompts[1])} held-out prompts are in DATA as well"
        warnings.append(f"{what}: what they score was trained, not held out. Take them out of one of the two")
    return warnings


def prepare_run(check: Preflight) -> None:
    """Make OUTPUT_DIR ready: delete what OVERWRITE=1 allows, drop what a resumed run will write again."""
    folder, s = check.run.folder, check.settings
    if check.run.exists and s.OVERWRITE:
        shutil.rmtree(folder)
        folder.with_name(folder.name + ".zip").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if check.run.exists and not s.OVERWRITE:
        (folder / COMPLETE).unlink(missing_ok=True)  # TOTAL_STEPS was raised
        for step, path in checkpoints(folder):
            if step > check.run.step:  # most likely cut off while it was written
                set_aside(path)
        for name in ("metrics.csv", "completions.csv"):
            trim_csv(folder / name, check.run.step)
    record = {
        "settings": dataclasses.asdict(s),
        "sources": check.sources,
        "choices": {
            "attention": check.attention,
            "packing": check.packing,
            "experts": check.experts,
            "rollouts": check.rollouts,
            "epsilon_high": choose_epsilon_high(s),
            "plan": dataclasses.asdict(check.plan) if check.plan else None,
        },
        "machine": dataclasses.asdict(check.machine),
        "data_sha256": data_fingerprint(check.rows),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "resumed_from_step": check.run.step,
    }
    versions = {"python": platform.python_version()} | installed_versions([*TESTED, "vllm", "triton", "pandas"])
    write_text(folder / "settings.json", json.dumps(record, indent=2, allow_nan=True) + "\n")
    write_text(folder / "versions.json", json.dumps(versions, indent=2) + "\n")


def set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint that cannot be continued to `superseded-checkpoint-N`: the Trainer neither counts nor deletes
    it then. One without an adapter is deleted."""
    if not (checkpoint / ADAPTER).is_file():
        shutil.rmtree(checkpoint)
        return
    names = (f"superseded-{checkpoint.name}" + f".{count}" * (count > 1) for count in itertools.count(1))
    checkpoint.rename(next(path for name in names if not (path := checkpoint.with_name(name)).exists()))


def lock_run(folder: Path) -> Any:
    """An open lock file beside OUTPUT_DIR, held until this process ends; None where another process holds it."""
    import fcntl

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    return lock


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# ---- Attention: exact with gpt-oss's sinks, over rows that share a prompt -------------------------------------------


@dataclass(frozen=True, eq=False)
class Layout:
    """How the tokens of one pass lie in memory, and what each of them attends to.

    R rows of T tokens, padded at their ends. A row holds groups one after the other; a group is a prompt and, behind it,
    its completions: each of them attends to the prompt and, causally, to itself, as if it stood alone. Kernels take a
    single row (R = 1) with keys gathered for each segment (a prompt or a completion); eager and flex attention a mask.
    """

    ids: Any  # (R, T) int64
    positions: Any  # (R, T) int64, counted from the group's start of each prompt
    group: Any  # (R, T) int32, -1 for padding
    segment: Any  # (R, T) int32, 0 for the prompt, 1.. for its completions, -1 for padding
    queries: int  # real tokens of a single row, all at its front
    keys: Any  # (K,) int64: place of each gathered key
    query_starts: Any  # (S + 1,) int32
    key_starts: Any  # (S + 1,) int32
    longest_query: int
    longest_key: int
    before: Any  # (N,) int64: place of the state that predicts each completion token
    targets: Any  # (N,) int64: those tokens
    rows: Any  # (N,) int64: the completion that each of them belongs to
    columns: Any  # (N,) int64: its place in the completion


def bucket(length: int) -> int:
    """`length` rounded up to at most an eighth more, so that few shapes occur: compiled attention compiles once for
    each, and torch's allocator reuses its blocks.

    >>> bucket(5), bucket(100), bucket(1000), bucket(5026)
    (32, 128, 1024, 5120)
    """
    step = max(32, 2 ** (max(length - 1, 1).bit_length() - 4))
    return -(-length // step) * step


def make_layout(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], share: bool, one_row: bool, device: Any
) -> Layout:
    """The layout of some completions, each with its prompt (both as token ids): equal prompts stand there once if they
    `share`; all groups stand in one row, or each in a row of its own."""
    import torch

    groups: dict[Any, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt) if share else i, []).append(i)
    lines = [list(groups.values())] if one_row else [[members] for members in groups.values()]
    sizes = [sum(len(prompts[m[0]]) + sum(len(completions[i]) for i in m) for m in line) for line in lines]
    width = bucket(max(sizes))
    shape = (len(lines), width)
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    group, segment = (torch.full(shape, -1, dtype=torch.int32) for _ in range(2))
    keys, starts, key_starts, longest, longest_key = [], [0], [0], 0, 0
    before, targets, rows, columns = [], [], [], []
    for r, line in enumerate(lines):
        at = 0
        for g, members in enumerate(line):
            prompt = prompts[members[0]]
            first = r * width + at
            for number, i in enumerate([None, *members]):
                tokens = prompt if i is None else completions[i]
                place = slice(at, at + len(tokens))
                ids[r, place] = torch.tensor(tokens, dtype=torch.int64)
                offset = 0 if i is None else len(prompt)
                positions[r, place] = torch.arange(offset, offset + len(tokens))
                group[r, place], segment[r, place] = g, number
                own = torch.arange(r * width + at, r * width + at + len(tokens))
                if i is not None:
                    keys.append(torch.arange(first, first + len(prompt)))
                    before.append(torch.cat([own.new_tensor([first + len(prompt) - 1]), own])[: len(tokens)])
                    targets.append(ids[r, place])
                    rows.append(torch.full((len(tokens),), i))
                    columns.append(torch.arange(len(tokens)))
                keys.append(own)
                at += len(tokens)
                starts.append(starts[-1] + len(tokens))
                key_starts.append(key_starts[-1] + offset + len(tokens))
                longest, longest_key = max(longest, len(tokens)), max(longest_key, offset + len(tokens))

    def put(tensor: Any) -> Any:
        return tensor.to(device, non_blocking=True)

    return Layout(
        put(ids), put(positions), put(group), put(segment), sizes[0], put(torch.cat(keys)),
        put(torch.tensor(starts, dtype=torch.int32)), put(torch.tensor(key_starts, dtype=torch.int32)), longest,
        longest_key, put(torch.cat(before)), put(torch.cat(targets)), put(torch.cat(rows)), put(torch.cat(columns)),
    )  # fmt: skip


def may_attend(layout: Layout, window: int | None) -> Any:
    """(R, T, T) bool: what each token attends to. Padding attends to padding, so that no row of scores is empty."""
    group, segment, position = layout.group, layout.segment, layout.positions
    distance = position[:, :, None] - position[:, None, :]
    allowed = (group[:, :, None] == group[:, None, :]) & (distance >= 0)
    allowed &= (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    return allowed if window is None else allowed & (distance < window)


def attention_masks(layout: Layout, attention: str, window: int, dtype: Any) -> Any:
    """What the model gets as `attention_mask`: a dictionary by layer type, as GptOssModel takes it, or for a Hub kernel
    the (R, T) mask of real tokens, from which transformers makes its own."""
    import torch

    kinds = {"full_attention": None, "sliding_attention": window}
    if attention in KERNELS:
        return dict.fromkeys(kinds, layout)
    if attention == "flex_attention":
        return {kind: flex_mask(layout, size) for kind, size in kinds.items()}
    if attention == "eager":
        lowest = torch.finfo(dtype).min
        return {
            kind: torch.where(may_attend(layout, size)[:, None], 0.0, lowest).to(dtype) for kind, size in kinds.items()
        }
    return (layout.segment >= 0).long()


def hidden_states(model: Any, layout: Layout, attention: str) -> Any:
    """States of the base `model` (without its head) that predict the completion tokens of `layout`: (N, hidden)."""
    masks = attention_masks(layout, attention, model.config.sliding_window, model.dtype)
    states = model.model(
        input_ids=layout.ids, position_ids=layout.positions, attention_mask=masks, use_cache=False
    ).last_hidden_state
    return states.flatten(0, 1)[layout.before]


@dataclass(frozen=True)
class Kernel:
    """A flash kernel over sequences that lie one behind the other, causal, aligned at their ends, without sinks.

    forward(q, k, v, starts_q, starts_k, longest_q, longest_k, scale, window) -> (out, lse) and
    backward(dout, q, k, v, out, lse, ... the same) -> (dq, dk, dv). q, out (Tq, Hq, D); k, v (Tk, Hkv, D); starts (S + 1,)
    int32; lse (Hq, Tq) float32, natural logarithm; window None, or how many keys a query looks back on, its own included.
    load() imports the two functions of the package that they call; with torch's own there is nothing to import.
    """

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., tuple[Any, Any, Any]]
    load: Callable[[], tuple[Callable[..., Any], Callable[..., Any]]] | None = None


def left_of(window: int | None) -> int:
    """window_size_left of the kernels: keys before the query's own; -1 is no limit."""
    return -1 if window is None else window - 1


def torch_flash_forward(q, k, v, starts_q, starts_k, longest_q, longest_k, scale, window):
    import torch

    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, longest_q, longest_k, 0.0, True, False, scale=scale, window_size_left=left_of(window), window_size_right=0
    )  # fmt: skip
    return out, lse


def torch_flash_backward(dout, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, scale, window):
    import torch

    # The random state is read only with dropout; its type and shape are those of torch.nn.attention.varlen.
    random_state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), starts_q, starts_k, longest_q, longest_k, 0.0, True, random_state, unused,
        scale=scale, window_size_left=left_of(window), window_size_right=0,
    )  # fmt: skip


def flash2_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

    return _flash_attn_varlen_forward, _flash_attn_varlen_backward


def flash2_forward(q, k, v, starts_q, starts_k, longest_q, longest_k, scale, window):
    out, lse, *_ = flash2_functions()[0](
        q, k, v, starts_q, starts_k, longest_q, longest_k, dropout_p=0.0, softmax_scale=scale, causal=True,
        window_size_left=left_of(window), window_size_right=0,
    )  # fmt: skip
    return out, lse


def flash2_backward(dout, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, scale, window):
    dq, dk, dv = new_gradients(q, k, v)
    flash2_functions()[1](
        dout, q, k, v, out, lse.contiguous(), dq, dk, dv, starts_q, starts_k, longest_q, longest_k, dropout_p=0.0,
        softmax_scale=scale, causal=True, window_size_left=left_of(window), window_size_right=0, softcap=0.0,
        alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return dq, dk, dv


def flash3_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """FlashAttention 3's torch operators: their argument names hold since May 2025, those of its Python functions do not."""
    import flash_attn_3._C  # noqa: F401  registers them
    import torch

    return torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd


def flash3_forward(q, k, v, starts_q, starts_k, longest_q, longest_k, scale, window):
    # Arguments that have no default in older builds.
    absent = ("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table", "kv_batch_idx",
              "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")  # fmt: skip
    out, lse, *_ = flash3_functions()[0](
        q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k,
        softmax_scale=scale, is_causal=True, window_size_left=left_of(window), window_size_right=0, num_splits=1,
        **dict.fromkeys(absent),
    )  # fmt: skip
    return out, lse


def flash3_backward(dout, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, scale, window):
    dq, dk, dv = new_gradients(q, k, v)  # builds return different tuples, all of them fill what is passed in
    flash3_functions()[1](
        dout, q, k, v, out, lse.contiguous(), dq=dq, dk=dk, dv=dv, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k,
        seqused_q=None, seqused_k=None, max_seqlen_q=longest_q, max_seqlen_k=longest_k, softmax_scale=scale,
        is_causal=True, window_size_left=left_of(window), window_size_right=0, deterministic=False,
    )  # fmt: skip
    return dq, dk, dv


def flash4_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    # Its own `learnable_sink` stays unused: before 4.0.0b26 the backward pass returned no gradient of it, and folding the
    # sink in keeps one formula for all kernels, which scripts/bench.py holds to float64.
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


def flash4_mask(window: int | None) -> dict[str, Any]:
    # None, not -1, is "no limit" here, and causal excludes a left bound: a window is given by both bounds.
    return {"causal": True} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def flash4_forward(q, k, v, starts_q, starts_k, longest_q, longest_k, scale, window):
    out, lse, *_ = flash4_functions()[0](
        q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k,
        softmax_scale=scale, return_lse=True, **flash4_mask(window),
    )  # fmt: skip
    return out, lse


def flash4_backward(dout, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, scale, window):
    return flash4_functions()[1](
        q, k, v, out, dout, lse, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=longest_q,
        max_seqlen_k=longest_k, softmax_scale=scale, **flash4_mask(window),
    )[:3]  # fmt: skip


def new_gradients(*tensors: Any) -> list[Any]:
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


KERNELS = {
    "torch_flash": Kernel(torch_flash_forward, torch_flash_backward),
    "flash_attention_2": Kernel(flash2_forward, flash2_backward, flash2_functions),
    "flash_attention_3": Kernel(flash3_forward, flash3_backward, flash3_functions),
    "flash_attention_4": Kernel(flash4_forward, flash4_backward, flash4_functions),
}


def unusable_attention(attention: str) -> str | None:
    """Why the package of this attention cannot be used although its metadata is there, or None. Imports it."""
    package, install = FLASH_PACKAGES.get(attention, (None, None))
    if package is None:
        return None
    try:
        KERNELS[attention].load()
    except Exception as error:  # a missing module, a missing function, a library built for another torch
        text = " ".join(f"{type(error).__name__}: {error}".split())
        fix = f"Install it again ({install}; see docs/install.md), or set ATTN_IMPL=torch_flash"
        return f"ATTN_IMPL: {attention} was chosen, but {package} cannot be used ({text}). {fix}"
    return None


def install_attention(attention: str) -> str:
    """Register this script's attention with transformers; returns the name under which a model finds it.

    https://huggingface.co/docs/transformers/attention_interface
    """
    from transformers import AttentionInterface

    if attention in KERNELS:
        # Not under its own name: transformers would look for a kernel on the Hub in its place.
        name = "sinks_" + attention.replace("flash_attention_", "kernel_").replace("torch_flash", "kernel_torch")
        AttentionInterface.register(name, functools.partial(kernel_attention, attention))
        return name
    if attention == "flex_attention":
        AttentionInterface.register("sinks_flex", flex_sinks)
        return "sinks_flex"
    return attention


def kernel_attention(
    name, module, query, key, value, attention_mask, scaling, sliding_window=None, s_aux=None, **kwargs
):
    """transformers' attention interface over a flash kernel: `query` (1, Hq, T, D), `key` and `value` (1, Hkv, T, D),
    `attention_mask` a Layout, `s_aux` the sinks (Hq,). Returns (1, T, Hq, D)."""
    if not isinstance(attention_mask, Layout):
        raise TypeError(f"{name}: rows of the learner come with a Layout, got {type(attention_mask).__name__}")
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    out = sink_attention()(*flat, s_aux, attention_mask, KERNELS[name], scaling, sliding_window)
    return out.unsqueeze(0), None


@functools.cache
def sink_attention() -> Callable[..., Any]:
    """Attention with sinks from a flash kernel without: apply(q, k, v, sink, layout, kernel, scale, window), q (T, Hq, D),
    k and v (T, Hkv, D), sink (Hq,). Exact in q, k, v and sink.

    A sink is one more score in the softmax's denominator, with a value of 0. With lse' = logaddexp(lse, sink) and
    out' = out * exp(lse - lse'), the kernel's own backward, given (out', lse'), computes P' = exp(S - lse') and
    dS = P' * (dP - rowsum(dout * out')): just what the wider softmax has. What remains is dsink, the same formula at the
    sink's own score: -sum over rows of exp(sink - lse') * rowsum(dout * out').
    """
    import torch

    class SinkAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, sink, layout, kernel, scale, window):
            n, keys = layout.queries, layout.keys
            shape = layout.query_starts, layout.key_starts, layout.longest_query, layout.longest_key, scale, window
            out, lse = kernel.forward(q[:n], k[keys], v[keys], *shape)
            total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])  # (Hq, n)
            out = (out * (lse - total).exp().T[..., None]).to(q.dtype)
            ctx.save_for_backward(q, k, v, sink, out, total)
            ctx.rest = layout, kernel, shape
            return torch.cat([out, out.new_zeros(len(q) - n, *out.shape[1:])]) if n < len(q) else out

        @staticmethod
        def backward(ctx, gradient):
            q, k, v, sink, out, total = ctx.saved_tensors
            layout, kernel, shape = ctx.rest
            n, keys = layout.queries, layout.keys
            gradient = gradient[:n].contiguous()
            dq, dk, dv = kernel.backward(gradient, q[:n], k[keys], v[keys], out, total, *shape)
            dq = torch.cat([dq, dq.new_zeros(len(q) - n, *dq.shape[1:])]) if n < len(q) else dq
            # A prompt's key has a gradient from each of its completions: added up in float32.
            wide = torch.promote_types(k.dtype, torch.float32)
            dk, dv = (
                torch.zeros(k.shape, dtype=wide, device=k.device).index_add_(0, keys, d.to(wide)) for d in (dk, dv)
            )
            dsink = None
            if ctx.needs_input_grad[3]:
                rows = (gradient.to(wide) * out.to(wide)).sum(-1).T  # (Hq, n)
                dsink = -((sink.to(total.dtype)[:, None] - total).exp() * rows).sum(1).to(sink.dtype)
            return dq, dk.to(k.dtype), dv.to(v.dtype), dsink, None, None, None, None

    return SinkAttention.apply


def flex_sinks(module, query, key, value, attention_mask, scaling, s_aux=None, **kwargs):
    """transformers' attention interface over flex attention, the sinks applied in float32 (transformers' own rounds the
    log-sum-exp to BF16 first). Shapes as in `kernel_attention`, `attention_mask` a BlockMask."""
    import torch

    # Past its recompile limit torch would silently take an unfused version that holds T x T scores.
    limits = {"recompile_limit": FLEX_VERSIONS, "accumulated_recompile_limit": FLEX_VERSIONS}
    try:
        with torch._dynamo.config.patch(**limits, fail_on_recompile_limit_hit=True):
            out, lse = compiled_flex()(
                query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True, return_lse=True
            )
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        what = f"flex attention has {FLEX_VERSIONS} compiled versions, a row of {query.shape[2]} tokens needs one more"
        why = "unfused attention is not taken in its place"
        raise RuntimeError(f"{what}, and {why}. ATTN_IMPL=torch_flash needs no compilation") from error
    out = (out.float() * torch.sigmoid(lse - s_aux.float()[None, :, None])[..., None]).to(query.dtype)
    return out.transpose(1, 2), None


FLEX_TOKENS = 2**18  # of a pass: 50,000 are a large one
# The compiled versions that can occur: of each length, for both layer types, with gradients and without; and the very first
# a second time, as it holds a warning of torch's that comes once.
FLEX_VERSIONS = 2 * 2 * len({bucket(length) for length in range(32, FLEX_TOKENS + 1, 32)}) + 1


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.cache
def flex_rule(length: int, window: int | None, device: str) -> tuple[Callable[..., Any], Any]:
    """(mask function, its (3, T) buffer of group, segment, position). Kept for each length: a new function would be
    compiled anew."""
    import torch

    table = torch.zeros(3, length, dtype=torch.int32, device=device)

    def rule(batch, head, q, k):
        distance = table[2, q] - table[2, k]
        allowed = (table[0, q] == table[0, k]) & (distance >= 0)
        allowed = allowed & ((table[1, q] == table[1, k]) | (table[1, k] == 0))
        return allowed if window is None else allowed & (distance < window)

    return rule, table


def flex_mask(layout: Layout, window: int | None) -> Any:
    """The BlockMask of a single row. It holds until the next layout of the same length is laid over its buffer."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    length, device = layout.ids.shape[1], layout.ids.device
    rule, table = flex_rule(length, window, str(device))
    table.copy_(torch.stack([layout.group[0], layout.segment[0], layout.positions[0].int()]))
    return create_block_mask(rule, None, None, length, length, device=device)


# ---- Experts: fused, and optionally kept in MXFP4 --------------------------------------------------------------------

# The values are those of transformers' grouped_mm experts bit by bit: the same matrix products, and in between the same
# roundings to BF16, in two kernels instead of some twenty passes over memory. No gradient is computed for the weights.
GATE_ALPHA, GATE_LIMIT = 1.702, 7.0  # gpt-oss's clamped SwiGLU


def install_experts() -> str:
    """Register this script's experts with transformers; returns their name.

    https://huggingface.co/docs/transformers/experts_interface
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("frozen_experts", experts_forward)
    return "frozen_experts"


def experts_forward(module, hidden_states, top_k_index, top_k_weights):
    """transformers' experts interface: `hidden_states` (N, H), `top_k_index` and `top_k_weights` (N, k) -> (N, H)."""
    hidden_states = hidden_states.to(module.gate_up_proj_bias.dtype)
    return frozen_experts()(hidden_states, top_k_index, top_k_weights, module)


def expert_weights(module: Any, name: str) -> Any:
    """(E, in, out) weights of `gate_up_proj` or `down_proj`: a parameter, or unpacked for the moment."""
    if hasattr(module, name):
        return getattr(module, name)
    unpacked = unpack_mxfp4(getattr(module, f"{name}_blocks"), getattr(module, f"{name}_scales"))
    return unpacked.to(module.gate_up_proj_bias.dtype)


@functools.cache
def frozen_experts() -> Callable[..., Any]:
    """apply(hidden (N, H), index (N, k), weights (N, k), module): differentiable in `hidden` and `weights`."""
    import torch

    class FrozenExperts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, index, weights, module):
            count = module.gate_up_proj_bias.shape[0]
            expert, order = index.flatten().sort()  # (S,), S = N * k: token-expert pairs, by expert
            place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
            ends = torch.searchsorted(expert, torch.arange(count, device=expert.device), right=True).int()
            gate_up = expert_weights(module, "gate_up_proj")
            raw = grouped_mm(hidden[order // index.shape[1]], gate_up, ends)  # (S, 2I)
            active = activation(raw, module.gate_up_proj_bias, expert)
            down = expert_weights(module, "down_proj")
            out = grouped_mm(active, down, ends)  # (S, H)
            bias = module.down_proj_bias
            ctx.save_for_backward(raw, out, gate_up, down, module.gate_up_proj_bias, bias, expert, place, ends, weights)  # fmt: skip
            return combine(out, bias, expert, place, weights, index.shape[1])

        @staticmethod
        def backward(ctx, gradient):
            raw, out, gate_up, down, gate_up_bias, bias, expert, place, ends, weights = ctx.saved_tensors
            spread, d_weights = combine_backward(gradient.contiguous(), out, bias, expert, place, weights)
            d_raw = activation_backward(grouped_mm(spread, down.transpose(1, 2), ends), raw, gate_up_bias, expert)
            d_hidden = grouped_mm(d_raw, gate_up.transpose(1, 2), ends)
            return combine(d_hidden, None, expert, place, None, weights.shape[1]), None, d_weights, None

    return FrozenExperts.apply


def grouped_mm(rows: Any, weights: Any, ends: Any) -> Any:
    """(S, in) rows, sorted by expert, times (E, in, out) weights; `ends` (E,) int32 is where each expert's rows end."""
    import torch

    return torch.nn.functional.grouped_mm(rows, weights, offs=ends)


def activation(raw: Any, bias: Any, expert: Any) -> Any:
    """gpt-oss's gate: `raw` (S, 2I) interleaved gate and up, `bias` (E, 2I), `expert` (S,) -> (S, I)."""
    import torch

    if raw.is_cuda:
        out = raw.new_empty(len(raw), raw.shape[1] // 2)
        launch_rows(expert_kernels().activation, len(raw), out.shape[1], raw, bias, expert, out, limit=GATE_LIMIT, alpha=GATE_ALPHA)  # fmt: skip
        return out
    gate_up = raw + bias[expert]
    gate, up = gate_up[..., ::2].clamp(max=GATE_LIMIT), gate_up[..., 1::2].clamp(-GATE_LIMIT, GATE_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * GATE_ALPHA))


def activation_backward(gradient: Any, raw: Any, bias: Any, expert: Any) -> Any:
    """Gradient of `activation` with respect to `raw`: (S, I) -> (S, 2I)."""
    import torch

    out = torch.empty_like(raw)
    if raw.is_cuda:
        launch_rows(expert_kernels().activation_backward, len(raw), gradient.shape[1], raw, bias, expert, gradient, out, limit=GATE_LIMIT, alpha=GATE_ALPHA)  # fmt: skip
        return out
    gate_up = raw + bias[expert]
    gate, up = gate_up[..., ::2].clamp(max=GATE_LIMIT), gate_up[..., 1::2].clamp(-GATE_LIMIT, GATE_LIMIT)
    sigmoid = torch.sigmoid(gate * GATE_ALPHA)
    slope = sigmoid * (1 + GATE_ALPHA * gate * (1 - sigmoid))
    out[..., ::2] = gradient * (up + 1) * slope * (gate_up[..., ::2] <= GATE_LIMIT)
    out[..., 1::2] = gradient * gate * sigmoid * (gate_up[..., 1::2].abs() <= GATE_LIMIT)
    return out


def combine(rows: Any, bias: Any, expert: Any, place: Any, weights: Any, pairs: int) -> Any:
    """(S, H) expert outputs, sorted by expert, to (N, H) tokens: plus `bias` (E, H), times `weights` (N, k), summed in
    float32 over the k = `pairs` of a token; `place` (S,) is where each pair stands. Plain sums where both are None."""
    if rows.is_cuda:
        out = rows.new_empty(len(place) // pairs, rows.shape[1])
        launch_rows(expert_kernels().combine, len(out), rows.shape[1], rows, bias, expert, place, weights, out, pairs=pairs)  # fmt: skip
        return out
    out = (rows if bias is None else rows + bias[expert])[place]
    out = out if weights is None else out * weights.flatten()[:, None]
    return out.view(-1, pairs, rows.shape[1]).sum(1).to(rows.dtype)


def combine_backward(gradient: Any, rows: Any, bias: Any, expert: Any, place: Any, weights: Any) -> tuple[Any, Any]:
    """Gradients of `combine` with respect to `rows` (S, H) and `weights` (N, k), given that of its result (N, H)."""
    import torch

    spread, pairs = torch.empty_like(rows), weights.shape[1]
    if rows.is_cuda:
        d_weights = torch.empty_like(weights)
        launch_rows(expert_kernels().combine_backward, len(rows), rows.shape[1], gradient, rows, bias, expert, place, weights, spread, d_weights, pairs=pairs)  # fmt: skip
        return spread, d_weights
    wide = gradient.repeat_interleave(pairs, 0)
    spread[place] = (wide * weights.flatten()[:, None]).to(rows.dtype)
    return spread, (wide * (rows + bias[expert])[place]).sum(-1).view_as(weights).to(weights.dtype)


def unpack_mxfp4(blocks: Any, scales: Any) -> Any:
    """(E, in, out) BF16 weights of `blocks` (E, out, in / 32, 16) and `scales` (E, out, in / 32), exactly: pairs of e2m1
    codes, the first in the low bits, and powers of two with a bias of 127 (OCP Microscaling Formats 1.0)."""
    import torch

    if blocks.is_cuda:
        import triton

        out = torch.empty(*blocks.shape[:2], blocks.shape[2] * 32, dtype=torch.bfloat16, device=blocks.device)
        groups = scales.numel()
        expert_kernels().unpack[(triton.cdiv(groups, 128),)](blocks, scales, out, groups, BLOCK=128, num_warps=4)
        return out.transpose(1, 2)
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)


def launch_rows(kernel: Any, rows: int, columns: int, *tensors: Any, **constants: Any) -> None:
    """Start a kernel with one program for each row."""
    if rows:
        width = 1 << (columns - 1).bit_length()
        kernel[(rows,)](*tensors, columns, BLOCK=width, num_warps=8 if width >= 1024 else 1, **constants)


@functools.cache
def expert_kernels() -> Any:
    """The Triton kernels, compiled when a GPU first needs them. Each has a twin in plain torch above, which a test holds
    against it in Triton's interpreter."""
    global triton, tl, round_to, load_gate_up, e2m1  # kernels find what they call among globals
    import triton
    import triton.language as tl

    @triton.jit
    def round_to(x, like):
        return x.to(like.dtype.element_ty).to(tl.float32)

    @triton.jit
    def load_gate_up(raw, bias, row, expert, columns, BLOCK: tl.constexpr):
        at = tl.arange(0, 2 * BLOCK)
        mask = at < 2 * columns
        both = tl.load(raw + row * 2 * columns + at, mask, 0.0).to(tl.float32)
        both += tl.load(bias + expert * 2 * columns + at, mask, 0.0).to(tl.float32)
        return tl.split(tl.reshape(round_to(both, raw), (BLOCK, 2)))

    @triton.jit
    def activation(raw, bias, expert, out, columns, limit: tl.constexpr, alpha: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        gate, up = load_gate_up(raw, bias, row, tl.load(expert + row), columns, BLOCK)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        sigmoid = round_to(1 / (1 + tl.exp(-round_to(gate * alpha, raw))), raw)
        value = round_to(up + 1, raw) * round_to(gate * sigmoid, raw)
        at = tl.arange(0, BLOCK)
        tl.store(out + row * columns + at, value.to(out.dtype.element_ty), at < columns)

    @triton.jit
    def activation_backward(raw, bias, expert, gradient, out, columns, limit: tl.constexpr, alpha: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        gate_raw, up_raw = load_gate_up(raw, bias, row, tl.load(expert + row), columns, BLOCK)
        gate = tl.minimum(gate_raw, limit)
        up = tl.minimum(tl.maximum(up_raw, -limit), limit)
        sigmoid = 1 / (1 + tl.exp(-gate * alpha))
        at = tl.arange(0, BLOCK)
        d = tl.load(gradient + row * columns + at, at < columns, 0.0).to(tl.float32)
        d_gate = tl.where(gate_raw <= limit, d * (up + 1) * sigmoid * (1 + alpha * gate * (1 - sigmoid)), 0.0)
        d_up = tl.where(tl.abs(up_raw) <= limit, d * gate * sigmoid, 0.0)
        both = tl.reshape(tl.join(d_gate, d_up), (2 * BLOCK,))
        at = tl.arange(0, 2 * BLOCK)
        tl.store(out + row * 2 * columns + at, both.to(out.dtype.element_ty), at < 2 * columns)

    @triton.jit
    def combine(rows, bias, expert, place, weights, out, columns, pairs: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        mask = at < columns
        total = tl.zeros((BLOCK,), tl.float32)
        for pair in tl.static_range(pairs):
            row = tl.load(place + token * pairs + pair)
            value = tl.load(rows + row * columns + at, mask, 0.0).to(tl.float32)
            if bias is not None:
                value += tl.load(bias + tl.load(expert + row) * columns + at, mask, 0.0).to(tl.float32)
                value = round_to(value, rows)
            if weights is not None:
                # Rounded as the product would be: to BF16, unless the weights are wider.
                value = round_to(value * tl.load(weights + token * pairs + pair).to(tl.float32), weights)
            total += value
        if weights is not None:
            total = round_to(total, weights)
        tl.store(out + token * columns + at, total.to(out.dtype.element_ty), mask)

    @triton.jit
    def combine_backward(gradient, rows, bias, expert, place, weights, spread, d_weights, columns, pairs: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        pair = tl.program_id(0).to(tl.int64)
        row = tl.load(place + pair)
        at = tl.arange(0, BLOCK)
        mask = at < columns
        d = tl.load(gradient + pair // pairs * columns + at, mask, 0.0).to(tl.float32)
        value = tl.load(rows + row * columns + at, mask, 0.0).to(tl.float32)
        value += tl.load(bias + tl.load(expert + row) * columns + at, mask, 0.0).to(tl.float32)
        tl.store(d_weights + pair, tl.sum(d * value, 0).to(d_weights.dtype.element_ty))
        scaled = d * tl.load(weights + pair).to(tl.float32)
        tl.store(spread + row * columns + at, scaled.to(spread.dtype.element_ty), mask)

    @triton.jit
    def unpack(blocks, scales, out, groups, BLOCK: tl.constexpr):
        group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = group < groups
        scale = tl.load(scales + group, inside, 0).to(tl.int32)
        # 2 ** (scale - 127) by its bits; that of 0 is subnormal.
        power = tl.where(scale == 0, 1 << 22, scale << 23).to(tl.float32, bitcast=True)[:, None]
        byte = tl.arange(0, 16)[None, :]
        code = tl.load(blocks + group[:, None] * 16 + byte, inside[:, None], 0).to(tl.int32)
        low, high = e2m1(code & 15) * power, e2m1(code >> 4) * power
        both = tl.reshape(tl.join(low, high), (BLOCK, 32))
        at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(out + at, both.to(out.dtype.element_ty), inside[:, None])

    @triton.jit
    def e2m1(code):
        exponent, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
        value = tl.where(exponent == 0, half, (1 + half) * (1 << tl.maximum(exponent - 1, 0)).to(tl.float32))
        return value * tl.where(code >= 8, -1.0, 1.0)  # -value is 0 - value in older Triton, which loses the sign of 0

    return argparse.Namespace(
        activation=activation, activation_backward=activation_backward, combine=combine,
        combine_backward=combine_backward, unpack=unpack,
    )  # fmt: skip


def packed_experts(config: Any) -> Any:
    """A stand-in for a layer's GptOssExperts that keeps the checkpoint's own tensors, under their own names."""
    import torch

    count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size

    class PackedExperts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
                self.register_buffer(f"{name}_blocks", torch.empty(count, rows, columns // 32, 16, dtype=torch.uint8))
                self.register_buffer(f"{name}_scales", torch.empty(count, rows, columns // 32, dtype=torch.uint8))
                bias = torch.empty(count, rows, dtype=torch.bfloat16)
                self.register_parameter(f"{name}_bias", torch.nn.Parameter(bias, requires_grad=False))

        def forward(self, hidden_states, router_indices=None, routing_weights=None):
            return experts_forward(self, hidden_states, router_indices, routing_weights)

    return PackedExperts()


NOT_LOADED = ["original/*", "metal/*"]  # other forms of the same weights in the official repository


def load_packed(model_path: str, attention: str, device: Any) -> Any:
    """The model with its experts as they are in the checkpoint, everything else as `from_pretrained` has it.

    transformers' own MXFP4 path computes with kernels that have no backward pass, so the module is exchanged. Raises
    ValueError where the checkpoint holds other tensors.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        for layer in model.model.layers:
            layer.mlp.experts = packed_experts(config)
    folder = Path(model_path)
    if not folder.is_dir():  # a Hub id: the official repository holds the weights three times
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model_path, allow_patterns="*.safetensors", ignore_patterns=NOT_LOADED))
    wanted, found = model.state_dict(), set()
    for shard in sorted(folder.glob("model*.safetensors")):  # an adapter beside them is none of the model's
        try:
            tensors = load_file(shard, device=str(device))
        except SafetensorError as error:
            raise ValueError(f"{shard}: {error}. Download the model again") from error
        for name, tensor in tensors.items():
            if name not in wanted:
                raise ValueError(f"{shard}: {name} is no part of a gpt-oss in MXFP4. Download the model again")
            if tensor.shape != wanted[name].shape:
                sizes = f"{tuple(tensor.shape)}, config.json makes it {tuple(wanted[name].shape)}"
                raise ValueError(f"{shard}: {name} is {sizes}. Download the model again")
            tensors[name] = tensor.to(wanted[name].dtype)
        model.load_state_dict(tensors, strict=False, assign=True)
        found |= set(tensors)
    model.tie_weights()
    missing = sorted(
        wanted.keys() - found - {"lm_head.weight"} if config.tie_word_embeddings else wanted.keys() - found
    )
    if missing:
        raise ValueError(f"{model_path}: {missing[0]} is missing ({len(missing)} tensors). Download the model again")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    model.generation_config = load_generation_config(model_path)
    return model.eval().requires_grad_(False)


def load_generation_config(model_path: str) -> Any:
    """The checkpoint's generation_config.json (its stop tokens); without such a file, what config.json says."""
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model_path)
    except OSError:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(model_path))


def unpack_experts(model: Any) -> None:
    """Dequantize what `load_packed` loaded to BF16, layer by layer, into the modules that transformers would have.

    The values are those of `Mxfp4Config(dequantize=True)`. That way's temporaries leave torch's allocator in pieces, some
    8 GiB on an H100, which vLLM cannot have while the trainer lives. On a GPU the weights are transposed views, laid out as
    in the checkpoint.
    """
    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    for layer in model.model.layers:
        packed = layer.mlp.experts
        with torch.device("meta"):
            wide = GptOssExperts(model.config)
        for name in ("gate_up_proj", "down_proj"):
            setattr(wide, name, torch.nn.Parameter(expert_weights(packed, name), requires_grad=False))
            setattr(wide, f"{name}_bias", getattr(packed, f"{name}_bias"))
        layer.mlp.experts = wide.eval()
        del packed
        empty_cache()


# ---- Model -----------------------------------------------------------------------------------------------------------


def load_model(model_path: str, config: Mapping[str, Any], attention: str, experts: str = "bf16") -> Any:
    """The base model in BF16 on the GPU, or on the CPU where there is none, with this script's attention and experts.

    MXFP4 experts are dequantized, or stay packed with `experts` = `mxfp4`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    name, device = install_attention(attention), torch.device("cuda", 0) if torch.cuda.is_available() else "cpu"
    if has_mxfp4(config):
        model = load_packed(model_path, name, device)
        if experts == "mxfp4":
            return model
        unpack_experts(model)
    else:
        place = {"": device} if torch.cuda.is_available() else None
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.bfloat16, attn_implementation=name, device_map=place
        )
    model.set_experts_implementation(install_experts())
    return model


def lora_config(settings: Settings) -> Any:
    """PEFT's LoRA on the modules of LORA_TARGETS. `all-linear` finds q, k, v and o: the experts are no linear modules."""
    from peft import LoraConfig

    targets: str | list[str] = settings.LORA_TARGETS.strip()
    if targets != "all-linear":
        targets = listed(targets)
    return LoraConfig(
        r=settings.LORA_R,
        lora_alpha=settings.LORA_ALPHA,
        lora_dropout=settings.LORA_DROPOUT,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def load_tokenizer(model_path: str) -> Any:
    """The model's tokenizer, padding on the left for generation."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, padding_side="left")


# ---- Rollouts --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attention_of(model: Any, implementation: str) -> Iterator[None]:
    """Run `model` with another attention for a while: generation has a new shape at every token."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = base.config._attn_implementation
    if before == implementation:
        yield
        return
    base.set_attn_implementation(implementation)
    try:
        yield
    finally:
        base.set_attn_implementation(before)


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def sampling_seed(seed: int, step: int, stream: str) -> int:
    """Seed of one generation: a function of SEED and the step, so that a resumed run samples what it would have."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stream}/{step}".encode()).digest()[:8], "big") >> 1


class PromptSampler:
    """Row indices for TRL's dataloader: each step's prompts, every one `generations` times in a row, and the whole
    batch `repeats` times (TRL draws the generation batch anew for each micro-batch and uses the first)."""

    def __init__(self, rows: int, seed: int, steps: int, prompts: int, generations: int, repeats: int):
        self.rows, self.seed, self.steps = rows, seed, steps
        self.prompts, self.generations, self.repeats = prompts, generations, repeats

    def __len__(self) -> int:
        return self.steps * self.prompts * self.generations * self.repeats

    def __iter__(self) -> Iterator[int]:
        order = prompt_order(self.rows, self.seed, self.steps * self.prompts)
        for _ in range(self.steps):
            batch = [next(order) for _ in range(self.prompts)]
            for _ in range(self.repeats):
                yield from (row for row in batch for _ in range(self.generations))


class Rollouts:
    """Part of the trainer: which prompts, how they are completed, and what the completions are worth.

    Mixed into TRL's GRPOTrainer by `make_trainer`, over these of its methods (tests hold their signatures):
    `_get_train_sampler`, `_tokenize_prompts`, `_generate_single_turn`, `_calculate_rewards`.
    """

    run: RunContext

    def _get_train_sampler(self, dataset: Any = None) -> PromptSampler:
        s, repeats = self.run.settings, self.args.steps_per_generation * self.num_iterations
        return PromptSampler(len(self.run.rows), s.SEED, s.TOTAL_STEPS, s.PROMPTS_PER_STEP, s.NUM_GENERATIONS, repeats)

    def _tokenize_prompts(self, prompts: list):
        """Each prompt once, however many completions it gets: 256 prompts of 890 tokens take a third of a second."""
        different = list(dict.fromkeys(prompts))
        prompt_ids, *rest = super()._tokenize_prompts(different)
        ids_of = dict(zip(different, prompt_ids, strict=True))
        return [ids_of[prompt] for prompt in prompts], *rest

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        import torch

        run, started = self.run, time.perf_counter()
        arguments = (images, multimodal_fields, num_generations, has_tool_images)
        stream = "train" if run.stream == "train" else "evaluation"
        torch.manual_seed(sampling_seed(run.settings.SEED, self.state.global_step, stream))
        if run.engine is not None:
            policy = self.accelerator.unwrap_model(self.model)
            completion_ids, logprobs = run.engine.rollout(
                policy, prompt_ids, torch.initial_seed(), run.stream != "base"
            )
        else:
            completion_ids, logprobs = [], None
            with attention_of(self.model, "eager"), evaluating(self.model):
                for start in range(0, len(prompt_ids), run.plan.generation_batch):
                    chunk = prompt_ids[start : start + run.plan.generation_batch]
                    completion_ids += super()._generate_single_turn(chunk, *arguments)[0]
        run.seconds["rollout"] += time.perf_counter() - started
        run.rollout_tokens = sum(map(len, completion_ids))
        return completion_ids, logprobs

    def is_truncated(self, ids: Sequence[int]) -> bool:
        """Whether a completion ended without a stop token: the same rule as TRL's clipped ratio and mask."""
        return ids[-1] not in (*self.eos_token_ids, self._tokenizer.pad_token_id)

    def read_completions(self, rows: Sequence[Row], completion_ids: Sequence[Sequence[int]]) -> list[Completion]:
        """What the completions of `rows` say, decoded with their special tokens."""
        texts = self._tokenizer.batch_decode(list(completion_ids), skip_special_tokens=False)
        return [
            Completion(
                row, text, rewards.parse_action(rewards.assistant_turn(row.prompt, text), len(row.rewards) or 10**9),
                len(ids), self.is_truncated(ids),
            )
            for row, text, ids in zip(rows, texts, completion_ids, strict=True)
        ]  # fmt: skip

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        started = time.perf_counter()
        read = self.read_completions([self.run.rows[x["row"]] for x in inputs], completion_ids_list)
        width = self.run.actions
        enriched = [
            {"prompt": prompt, "truncated": one.truncated} | self.run.empty_columns | reward_columns(one.row, width)
            for prompt, one in zip(prompts, read, strict=True)
        ]
        turns = [rewards.assistant_turn(one.row.prompt, one.text) for one in read]
        per_function = super()._calculate_rewards(enriched, prompts, turns, completion_ids_list)
        weights = self.reward_weights.to(per_function.device)
        totals = (per_function * weights).nansum(dim=1).masked_fill(per_function.isnan().all(dim=1), math.nan)
        self.run.record_rollout(self.state.global_step + 1, read, totals.tolist())
        self.run.seconds["reward"] += time.perf_counter() - started
        return per_function


@dataclass(frozen=True)
class Completion:
    """One completion as rewards and logs see it."""

    row: Row
    text: str
    action: int | None
    tokens: int
    truncated: bool


def reward_columns(row: Row, actions: int) -> dict[str, Any]:
    """The columns of a row as keyword arguments of a reward function; a file with fewer actions is filled with None."""
    columns = {f"reward_action_{k}": None for k in range(actions)}
    columns |= {(f"csv_{name}" if name in RESERVED_ARGUMENTS else name): value for name, value in row.columns.items()}
    return columns | {"prompt_id": row.id}


def reward_callable(name: str, settings: Settings) -> Callable[..., Sequence[float | None]]:
    """A reward function as TRL calls it: named for the logs, given INVALID_REWARD, its errors named."""
    function = load_reward(name)
    options = {"invalid_reward": settings.INVALID_REWARD} if name in ("action", "best") else {}

    def failed(reason: str) -> RuntimeError:
        return RuntimeError(f"REWARDS: {name} {reason}")

    def checked(values: Any, count: int) -> list[float | None]:
        if not isinstance(values, Sequence) and not hasattr(values, "tolist"):
            raise failed(f"returned {type(values).__name__}, not a list of numbers")
        values = values.tolist() if hasattr(values, "tolist") else list(values)
        if len(values) != count:
            raise failed(f"returned {len(values)} rewards for {count} completions")
        for value in values:
            if value is not None and not (isinstance(value, (int, float)) and not math.isinf(value)):
                raise failed(f"returned {value!r}, which is neither a finite number nor None")
        return values

    if inspect.iscoroutinefunction(function):

        async def reward(completions: list[str], **columns: Any) -> list[float | None]:
            try:
                values = await function(completions, **(columns | options))
            except Exception as error:
                raise failed(f"raised {type(error).__name__}: {error}") from error
            return checked(values, len(completions))

    else:

        def reward(completions: list[str], **columns: Any) -> list[float | None]:
            try:
                values = function(completions, **(columns | options))
            except Exception as error:
                raise failed(f"raised {type(error).__name__}: {error}") from error
            return checked(values, len(completions))

    reward.__name__ = name.rpartition(":")[2]
    return reward


# ---- Rollout engine: vLLM beside the trainer, asleep while it learns ------------------------------------------------

# Every touch of vLLM stands in this section. TRL as shipped builds its own engine and pushes every merged BF16 weight,
# which an engine with MXFP4 experts refuses (docs/rollouts.md), so TRL is built without vLLM (`grpo_config`). What is
# overridden of TRL are methods of its trainer: see Rollouts, Learner and `make_trainer`, which puts them together.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as max_lora_rank
KEEP_BYTES = 32 * 2**20  # larger allocations hold experts and embeddings, which never change
# The level of logging is what TRL sets; below it vLLM warns of every kernel that the warm-up compiles.
VLLM_SWITCHES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
# Numbers of tokens in a prefill for which Triton compiles each kernel of gpt-oss-20b's experts and router in vLLM once (from
# 33 tokens up). It compiles anew for blocks of 16, 32, 64 and 128 rows (up to 135, 263, 519 tokens, and above), and where
# a number that it is passed turns into a multiple of 16: the tokens, four or eight times as many, the blocks.
WARM_UP_TOKENS = (
    72, 73, 101, 112, 136, 137, 160, 161, 265, 272, 301, 304, 521, 528, 912, 913, 1008, 1009,
)  # fmt: skip
# vLLM redirects these for its own compilation; the trainer's kernels must not follow.
COMPILER_VARIABLES = ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class EngineError(RuntimeError):
    """vLLM failed in a way from which this process cannot recover; the last checkpoint can."""


class ParityError(RuntimeError):
    """vLLM and the trainer give different log-probs for the same adapter."""


@contextlib.contextmanager
def engine_faults(doing: str, advice: str) -> Iterator[None]:
    """Say what the engine was doing and what helps. An in-process vLLM must not be used again after an exception."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise EngineError(f"{doing} failed ({type(error).__name__}: {reason}). {advice}") from error


def engine_arguments(settings: Settings, plan: EnginePlan, model_path: str, gpu_total: float) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: one engine in this process, MXFP4 weights as in the checkpoint, room as planned."""
    s = settings
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # no sampling defaults and no stop tokens but those of each request
        "enable_sleep_mode": True,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "kv_cache_memory_bytes": int(plan.cache * GIB),
        # vLLM refuses to start unless this share of the GPU is free, even where the line above replaces it.
        "gpu_memory_utilization": max(0.01, min(0.9, plan.awake / gpu_total)),
        "logprobs_mode": "processed_logprobs",  # after temperature: what the importance correction compares
        "enable_prefix_caching": True,  # the completions of a prompt share it
        "enable_flashinfer_autotune": False,  # costs seconds of start-up for kernels that gpt-oss does not use
        "enforce_eager": s.VLLM_EAGER,
        "disable_log_stats": True,
        "seed": s.SEED,
    }
    if not s.VLLM_EAGER:
        # Decoding is what repeats; prefill runs compiled without a graph. One capture per size: every request carries
        # the adapter, so no second set without it.
        arguments["compilation_config"] = {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(plan.capture_sizes),
            "cudagraph_specialize_lora": False,
        }
    if s.ROLLOUT_SYNC == "lora":
        # Without the list of modules, router and every expert would get LoRA buffers and kernels too.
        rank = min((rank for rank in LORA_RANKS if rank >= s.LORA_R), default=LORA_RANKS[-1])
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
        arguments["lora_target_modules"] = ["qkv_proj", "o_proj"]
    return arguments


def start_engine(settings: Settings, plan: EnginePlan, model_path: str, stop_token_ids: Sequence[int]) -> Engine:
    """Start vLLM beside the loaded trainer and put it to sleep."""
    import torch

    started = time.perf_counter()
    kept = {name: os.environ.get(name) for name in COMPILER_VARIABLES}
    for name, value in VLLM_SWITCHES.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in another process neither weights nor the seed would reach it
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    advice = "`--check` prints the plan; VLLM_EAGER=1 compiles less, USE_VLLM=0 does without vLLM"
    try:
        with engine_faults("starting the engine", advice):
            import triton
            from vllm import LLM, SamplingParams
            from vllm.lora.request import LoRARequest

            # torch moves Triton's cache into its own, which vLLM keeps by settings, in a process that compiles but not in one
            # that loads what was compiled: https://github.com/sgl-project/sglang-omni/issues/439
            os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
            mend_kernels()
            llm = LLM(**engine_arguments(settings, plan, model_path, total))
            keep_weights_asleep(llm)
            atexit.register(close_process_group)
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    engine = Engine(llm, SamplingParams, LoRARequest, settings, stop_token_ids)
    engine.warm_up(plan.max_model_len)
    before = torch.cuda.mem_get_info()[0]
    engine.sleep()
    freed = (torch.cuda.mem_get_info()[0] - before) / GIB
    seconds = time.perf_counter() - started
    note = f"{freed:.1f} GiB freed; {engine.seconds['warm_up']:.1f} s of it warm-up"
    log.info("vLLM: started and asleep after %.0f s, %s", seconds, note)
    return engine


def close_process_group() -> None:
    """Close what vLLM opened, at the very end: torch warns of it otherwise."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def mend_kernels() -> None:
    """Repair vLLM's copy of triton_kernels before the engine compiles any of it. Where that fails a run is slower, no worse."""
    for mend, cost in (
        (compile_router_once, "may stop for a second to compile"),
        (tune_decoding, "take a little longer"),
    ):
        try:
            from vllm.utils.import_utils import has_triton_kernels

            if has_triton_kernels():
                mend()
        except Exception as error:
            what = "vLLM's experts are not what they were (%s: %r): rollouts %s. Nothing else changes"
            log.warning(what, mend.__name__, error, cost)


def compile_router_once() -> None:
    """Make a stride that two kernels of vLLM's router compile in as a constant an argument of theirs at run time.

    It is the number of tokens rounded up to 32, so every new size of a prefill compiled both kernels in the middle of a
    rollout, 1.2 s on an H100. Upstream mended it in the same way, after the copy of triton_kernels that vLLM 0.26 ships:
    https://github.com/triton-lang/triton/issues/10872.
    """
    import triton

    # By their full names: `from triton_kernels import topk` would load vLLM's copy under another name, a second time.
    tensor, topk = map(importlib.import_module, ("triton_kernels.tensor", "triton_kernels.topk"))
    # The names as the two functions that launch the kernels see them.
    for launcher, name, stride in (
        (topk.topk_forward, "_topk_forward", "stride_rn"),
        (tensor.sum_bitmatrix_rows, "_sum_bitmatrix_rows", "stride_bn"),
    ):
        kernel = launcher.__globals__[name]
        if "constexpr" in str(kernel.fn.__annotations__.get(stride)):
            del kernel.fn.__annotations__[stride]
            launcher.__globals__[name] = triton.jit(kernel.fn)


def tune_decoding() -> None:
    """Let two blocks of the experts' products share a multiprocessor of a Hopper card while decoding: at most 128 registers a
    thread (the second product takes 129), and tiles in plain order. The same bits, 3 to 8% sooner with 1 to 96 sequences.

    For tiles of 16 rows alone, with gpt-oss-20b those of up to 135 tokens: larger ones would spill. triton_kernels' own setter,
    update_opt_flags_constraints, knows neither the size nor these two flags.
    """
    import torch

    scope = importlib.import_module("triton_kernels.matmul_ogs").matmul_ogs.__globals__
    choose = scope["make_opt_flags"]
    if torch.cuda.get_device_capability()[0] != 9 or hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def tuned(*arguments: Any, **named: Any) -> Any:
        flags = choose(*arguments, **named)
        if flags.block_m != 16:
            return flags
        kernel = {**flags.target_kernel_kwargs, "maxnreg": 128}
        return dataclasses.replace(flags, group_m=1, target_kernel_kwargs=kernel)

    scope["make_opt_flags"] = tuned


def keep_weights_asleep(llm: Any) -> None:
    """A sleep backend for vLLM that copies weights which never change to host memory once instead of at every sleep.

    vLLM's own copies all of them each time (0.3 s against 0.06 s on an H100). Sleep backends are pluggable
    (vllm/device_allocator/sleep_mode_backend.py); which one is taken is read at the first sleep.
    """
    import torch
    from vllm.device_allocator import get_mem_allocator_instance
    from vllm.device_allocator.cumem import create_and_map, libcudart, unmap_and_release
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

    class KeepBackend(SleepModeBackend):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[int, Any] = {}

        def suspend(self, level: int = 1) -> None:
            if level != 1:
                raise ValueError("only level 1: level 2 discards the weights, and waking would generate garbage")
            self._state = "SUSPENDED"
            for pointer, data in get_mem_allocator_instance().pointer_to_data.items():
                size = data.handle[1]
                if data.tag == "weights" and pointer not in self.kept:
                    if size >= KEEP_BYTES:
                        # Exactly `size` bytes, touched by all cores, then pinned.
                        backup = torch.zeros(size, dtype=torch.uint8)
                        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(backup.data_ptr(), size, 0)))
                        self.kept[pointer] = backup
                    else:  # attention weights, LoRA buffers: written between two sleeps
                        backup = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                        data.cpu_backup_tensor = backup
                    libcudart.cudaMemcpy(backup.data_ptr(), pointer, size)
                unmap_and_release(data.handle)
                data.is_asleep = True
            torch.cuda.empty_cache()

        def resume(self, tags: list[str] | None = None) -> None:
            self._state = "RESUMING"
            for pointer, data in get_mem_allocator_instance().pointer_to_data.items():
                if not data.is_asleep or (tags is not None and data.tag not in tags):
                    continue
                create_and_map(data.handle)
                data.is_asleep = False
                backup = self.kept.get(pointer, data.cpu_backup_tensor)
                if backup is not None:
                    libcudart.cudaMemcpy(pointer, backup.data_ptr(), data.handle[1])
                    data.cpu_backup_tensor = None
            self._state = "RUNNING"

        @classmethod
        def preserves_communicators(cls) -> bool:
            return True

    module = sys.modules[__name__]
    module.KeepBackend = KeepBackend  # vLLM looks the class up by module and name
    SleepModeBackendFactory.register_backend("keep", __name__, "KeepBackend")
    llm.llm_engine.vllm_config.model_config.sleep_mode_backend = "keep"  # not an engine argument in 0.26


def lora_layers(policy: Any) -> dict[str, Any]:
    """PEFT's name of every adapted linear layer -> the layer."""
    return {
        name: module
        for name, module in policy.named_modules()
        if "default" in getattr(module, "lora_A", {}) and hasattr(module, "get_base_layer")
    }


def adapter_tensors(policy: Any, active: bool = True) -> dict[str, Any]:
    """The adapter as vLLM reads it: BF16 on the CPU, the scale multiplied into B in float32 (one rounding); B is zero
    where the adapter is not `active`."""
    import torch

    tensors = {}
    for name, layer in lora_layers(policy).items():
        b = layer.lora_B["default"].weight.detach().float() * (layer.scaling["default"] if active else 0.0)
        a = layer.lora_A["default"].weight.detach()
        tensors[f"{name}.lora_A.weight"] = a.to("cpu", torch.bfloat16).contiguous()
        tensors[f"{name}.lora_B.weight"] = b.to("cpu", torch.bfloat16).contiguous()
    return tensors


def merged_weights(policy: Any, active: bool = True) -> Iterator[tuple[str, Any]]:
    """(name in the checkpoint, W + scale * B @ A) of every adapted layer, out of place in float32, rounded once.

    The base is only read: PEFT's merge_adapter works in place and drifts (https://github.com/huggingface/trl/issues/6688).
    """
    import torch

    with torch.no_grad():
        for name, layer in lora_layers(policy).items():
            weight = layer.get_base_layer().weight
            merged = weight
            if active:
                a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
                merged = torch.addmm(weight.float(), b, a, alpha=layer.scaling["default"]).to(weight.dtype)
            yield name.removeprefix("base_model.model.") + ".weight", merged


def push_weights(model: Any, merged: Iterable[tuple[str, Any]]) -> None:
    """Copy merged attention weights into vLLM's GptOss: q, k, v are the rows of `attn.qkv_proj.weight`, in that order."""
    parameters = {name.replace(".base_layer.", "."): value for name, value in model.named_parameters()}
    for name, weight in merged:
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        stem = stem.replace(".self_attn", ".attn")
        if kind == "o_proj":
            target = parameters[f"{stem}.o_proj.weight"].data
        else:  # query rows first, then as many key rows as value rows
            packed, rows = parameters[f"{stem}.qkv_proj.weight"].data, weight.shape[0]
            start = {"q_proj": 0, "k_proj": len(packed) - 2 * rows, "v_proj": len(packed) - rows}[kind]
            target = packed[start : start + rows]
        if target.shape != weight.shape:
            raise ValueError(f"{name}: {tuple(weight.shape)} does not fit the engine's {tuple(target.shape)}")
        target.copy_(weight)


class Engine:
    """One vLLM in this process: awake for rollouts, asleep (level 1) while the trainer learns.

    It holds no state of the adapter that could be stale: `rollout` wakes it, hands the current adapter over, generates
    and lets it sleep, every time. `sampling` and `lora_request` are vLLM's SamplingParams and LoRARequest, passed in so
    that tests can put a stub in vLLM's place.
    """

    def __init__(self, llm: Any, sampling: Any, lora_request: Any, settings: Settings, stop_token_ids: Sequence[int]):
        self.llm, self.sampling, self.lora_request, self.settings = llm, sampling, lora_request, settings
        self.stop_token_ids = list(stop_token_ids)
        shared = Path("/dev/shm")
        self.folder = (
            shared if shared.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))
        ) / f"train_grpo-{os.getpid()}"
        self.handovers = 0
        self.request: Any = None  # the native adapter that the engine holds
        self.current = False  # whether an adapter was handed over since the engine woke
        self.asleep = False
        self.seconds = dict.fromkeys(("warm_up", "wake", "handover", "generate", "sleep"), 0.0)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def warm_up(self, max_model_len: int) -> None:
        """Meet what a prefill of gpt-oss-20b compiles before the first rollout does: WARM_UP_TOKENS at a time, with the base
        weights. Triton keeps it on disk for the next start. A native adapter takes other kernels (Marlin's), which are
        not compiled by number of tokens."""
        if self.settings.ROLLOUT_SYNC == "lora":
            return
        with self.timed("warm_up"), engine_faults("warming up", "USE_VLLM=0 needs no vLLM"):
            once = self.sampling(temperature=0.0, max_tokens=1, detokenize=False)
            for tokens in WARM_UP_TOKENS:
                # Tokens of any vocabulary, and no prefix of one size that is cached for the next.
                row = random.Random(tokens).choices(range(500), k=tokens)
                rows = [row[i : i + max_model_len - 1] for i in range(0, tokens, max_model_len - 1)]
                self._run(rows, [once] * len(rows))

    def wake(self) -> None:
        """Weights and cache back onto the GPU. torch gives its free blocks back first: the engine maps memory past its
        allocator and gets no second try (https://github.com/vllm-project/vllm/issues/15254)."""
        if not self.asleep:
            return
        advice = "The GPU is too full beside the trainer: lower MICRO_BATCH or VLLM_GPU_MEM, or set EXPERTS=mxfp4"
        with self.timed("wake"), engine_faults("waking the engine", advice):
            empty_cache()
            self.llm.wake_up()
        self.asleep, self.current = False, False

    def sleep(self) -> None:
        """Weights to host memory, the cache dropped (and with it the prefix cache)."""
        if self.asleep:
            return
        advice = "Host memory may be short: the engine keeps its weights there"
        with self.timed("sleep"), engine_faults("putting the engine to sleep", advice):
            self.llm.sleep(level=1)
        self.asleep, self.current = True, False

    def hand_over(self, policy: Any, active: bool = True) -> None:
        """Give the awake engine the adapter as it is now (or one of zeros). A native adapter gets an id and a name that
        were never used: vLLM loads an id once, and keys its prefix cache by the name."""
        if self.asleep:
            raise EngineError("the adapter was handed to a sleeping engine, whose buffers are not there")
        self.current = False
        with self.timed("handover"), engine_faults("handing the adapter over", "Try the other ROLLOUT_SYNC"):
            if self.settings.ROLLOUT_SYNC == "lora":
                self.handovers += 1
                path = self.write_adapter(policy, active)
                self.request = self.lora_request(f"adapter-{self.handovers}", self.handovers, str(path))
                if not self.llm.llm_engine.add_lora(self.request):
                    raise RuntimeError(f"the engine did not take {path}")
            else:
                # Called in the worker, which is this process: tensors pass by reference.
                self.llm.apply_model(lambda model: push_weights(model, merged_weights(policy, active)))
                self.llm.reset_prefix_cache()  # it was computed with other weights
        self.current = True

    def use_adapter(self, folder: Path | None) -> None:
        """Generate with an adapter that PEFT saved, or with none, until the engine sleeps; needs ROLLOUT_SYNC=lora."""
        self.request = self.lora_request("adapter", 1, str(folder.resolve())) if folder else None
        self.current = True

    def write_adapter(self, policy: Any, active: bool) -> Path:
        """Write the adapter as PEFT would, with alpha = r because B carries the scale."""
        from safetensors.torch import save_file

        tensors = adapter_tensors(policy, active)
        modules = sorted({name.split(".")[-3] for name in tensors})
        rank = self.settings.LORA_R
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, self.folder / ADAPTER)
        return self.folder

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        seed: int,
        max_tokens: int | Sequence[int] | None = None,
        top_p: float | None = None,
    ) -> tuple[list[list[int]], list[list[float | None]]]:
        """One completion for each row (a prompt stands there once for each of its completions), in order.

        Returns completion ids, a stop token included, and the log-prob of each sampled token after temperature. `seed`
        sets torch's generator, from which vLLM draws in this process: a generator for each request would cost a kernel
        for each sequence and token.
        """
        import torch

        if self.asleep or not self.current:
            raise EngineError("generating needs the engine awake and the current adapter handed over")
        s, most = self.settings, max_tokens or self.settings.MAX_COMPLETION_LEN
        parameters = [
            self.sampling(
                n=1, temperature=s.TEMPERATURE, top_p=top_p or s.TOP_P, max_tokens=tokens, logprobs=0, flat_logprobs=True,
                stop_token_ids=self.stop_token_ids, detokenize=False,
            )
            for tokens in ([most] * len(prompt_ids) if isinstance(most, int) else most)
        ]  # fmt: skip
        advice = "Run the same command again: it continues"
        with self.timed("generate"), engine_faults("generating", advice), no_collection():
            torch.manual_seed(seed)
            outputs = [output.outputs[0] for output in self._run(prompt_ids, parameters)]
            ids = [list(output.token_ids) for output in outputs]
            values = [[None if math.isnan(v) else v for v in output.logprobs.logprobs] for output in outputs]
            if [len(row) for row in ids] != [len(row) for row in values]:
                raise RuntimeError("the engine gave another number of log-probs than of tokens")
        return ids, values

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of tokens 1..N-1 of each row, at temperature 1 whatever TEMPERATURE is. Keep rows short: vLLM holds
        float32 logits of a whole row."""
        parameters = self.sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        with engine_faults("scoring", "PARITY=off skips the gate"):
            outputs = self._run(rows, parameters)
            return [
                [position[token].logprob for token, position in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
                for row, output in zip(rows, outputs, strict=True)
            ]

    def _run(self, rows: Sequence[Sequence[int]], parameters: Any) -> list[Any]:
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False, lora_request=self.request)
        if len(outputs) != len(prompts):
            raise RuntimeError(f"the engine returned {len(outputs)} of {len(prompts)} requests")
        return outputs

    def rollout(
        self, policy: Any, prompt_ids: Sequence[Sequence[int]], seed: int, active: bool = True
    ) -> tuple[list[list[int]], list[list[float | None]]]:
        """Wake, hand the current adapter over, generate, sleep."""
        self.wake()
        self.hand_over(policy, active)
        result = self.generate(prompt_ids, seed)
        self.sleep()
        return result


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector waits: a rollout makes millions of small objects, none of them garbage yet, and a
    collection visits every object of every library, up to half a second each."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def empty_cache() -> None:
    """Give the free blocks of torch's allocator back to the driver."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PARITY_PROMPTS, PARITY_TOKENS, PARITY_SAMPLED = 4, 256, 32  # prompts, fixed tokens of each, sampled tokens of each
PARITY_STRENGTH = 0.3  # of the test adapter: norm of its update against the norm of the weight


def parity_gate(trainer: Any) -> None:
    """Stop before the first step unless vLLM and the trainer give the same log-probs for the same adapter.

    The adapter of a fresh run is zero and would prove nothing, so a strong random one takes its place for the test.
    Fixed tokens test the engine's prefill, sampled ones its decoding; both again after a sleep. The control is the
    trainer with its adapter switched off: if that agreed as well, the comparison could not see an adapter at all.

    Raises ParityError. Prints mean and maximum of |difference| in nats.
    """
    import torch

    run, engine = trainer.run, trainer.run.engine
    if run.settings.PARITY == "off":
        log.warning(boxed("PARITY=off: nothing checks that vLLM generates with the adapter that is trained"))
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    layers = lora_layers(policy)
    kept = {name: layer.lora_B["default"].weight.detach().clone() for name, layer in layers.items()}
    training = trainer.model.training
    trainer.model.eval()
    rows = trainer.processing_class(text=[row.prompt for row in run.rows[:PARITY_PROMPTS]])["input_ids"]
    fixed = [row[:PARITY_TOKENS] for row in rows]
    try:
        generator = torch.Generator().manual_seed(run.settings.SEED)
        with torch.no_grad():
            for layer in layers.values():
                weight, a, b = (
                    layer.get_base_layer().weight,
                    layer.lora_A["default"].weight,
                    layer.lora_B["default"].weight,
                )
                b.copy_(torch.randn(b.shape, generator=generator))
                update = (b.float() @ a.float()).norm() * layer.scaling["default"]
                b.mul_(PARITY_STRENGTH * weight.float().norm() / update)
        for when in ("before the first step", "after a sleep"):
            engine.wake()
            engine.hand_over(policy)
            scored = engine.score(fixed)
            # Without nucleus sampling, whose renormalized log-probs the trainer does not have.
            ids, values = engine.generate(rows, run.settings.SEED, PARITY_SAMPLED, top_p=1.0)
            engine.sleep()
            sampled, starts = [p + c for p, c in zip(rows, ids, strict=True)], list(map(len, rows))
            for kind, sequences, first, theirs, temperature in (
                ("fixed tokens", fixed, [1] * len(fixed), scored, 1.0),
                ("sampled tokens", sampled, starts, values, run.settings.TEMPERATURE),
            ):
                engines = torch.tensor([math.nan if v is None else v for row in theirs for v in row])
                ours = score_tokens(trainer, sequences, first, temperature)
                with policy.disable_adapter():
                    control = score_tokens(trainer, sequences, first, temperature)
                difference, without = (engines - ours).abs(), (engines - control).abs().mean().item()
                mean, largest = difference.mean().item(), difference.max().item()
                report = "parity %s, %s: mean %.4f, max %.3f nats; control (adapter off) %.4f"
                log.info(report, when, kind, mean, largest, without)
                run.parity.append({"when": when, "kind": kind, "mean": mean, "max": largest, "control_mean": without})
                # A confident model samples tokens that no adapter changes: the control is asked of fixed ones alone.
                control_mean = without if kind == "fixed tokens" else None
                if problem := parity_problem(mean, control_mean, run.settings.PARITY_LIMIT):
                    raise ParityError(f"{when}, {kind}: {problem}. {bare_difference(trainer, fixed)}")
            with torch.no_grad():  # another adapter for the next round: an engine that kept the first one must be seen
                for layer in layers.values():
                    layer.lora_B["default"].weight.neg_()
    finally:
        with torch.no_grad():
            for name, layer in layers.items():
                layer.lora_B["default"].weight.copy_(kept[name])
        trainer.model.train(training)


def bare_difference(trainer: Any, fixed: Sequence[Sequence[int]]) -> str:
    """How far engine and trainer are apart without any adapter: whether adapters are the matter at all."""
    engine, policy = trainer.run.engine, trainer.accelerator.unwrap_model(trainer.model)
    try:
        engine.wake()
        engine.hand_over(policy, active=False)
        scored = [value for row in engine.score(fixed) for value in row]
        engine.sleep()
    except EngineError as error:
        return f"Without an adapter they could not be compared: {error}"
    with policy.disable_adapter():
        ours = score_tokens(trainer, fixed, [1] * len(fixed), 1.0).tolist()
    mean = sum(abs(a - b) for a, b in zip(scored, ours, strict=True)) / len(ours)
    return f"Without any adapter, in both, the mean is {mean:.4f}: if that is as large, the two compute the model itself otherwise, and PARITY_LIMIT above it accepts that"


PARITY_VISIBLE = 0.01  # nats: least effect of the test adapter that the gate must see


def parity_problem(mean: float, control: float | None, limit: float) -> str | None:
    """Why log-probs that differ by `mean` nats, and by `control` without the adapter, are not good enough; or None.

    `control` None: not asked for.
    """
    if not mean <= limit:
        return (
            f"vLLM and trainer differ by {mean:.4f} nats a token on average, PARITY_LIMIT is {limit:g}. Try the other "
            "ROLLOUT_SYNC, ATTN_IMPL=eager or VLLM_EAGER=1; USE_VLLM=0 generates with transformers"
        )
    if control is not None and not control > max(2 * mean, PARITY_VISIBLE):
        return (
            f"switching the adapter off changes the difference only from {mean:.4f} to {control:.4f} nats, so it cannot be "
            "told whether vLLM uses the adapter. Try the other ROLLOUT_SYNC, or PARITY=off if this is expected"
        )
    return None


def score_tokens(trainer: Any, rows: Sequence[Sequence[int]], first: Sequence[int], temperature: float) -> Any:
    """The trainer's log-probs of tokens `first[i]`.. of each row, one after the other, float32 on the CPU."""
    import torch

    base = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    attention, scores = trainer.run.attention, []
    for row, start in zip(rows, first, strict=True):
        layout = make_layout([row[:start]], [row[start:]], True, attention in ONE_ROW, base.device)
        with torch.no_grad(), trainer.accelerator.autocast():
            logits = base.get_output_embeddings()(hidden_states(base, layout, attention)).float() / temperature
        scores.append(logits.log_softmax(-1).gather(1, layout.targets[:, None])[:, 0].cpu())
    return torch.cat(scores)


def boxed(text: str) -> str:
    """A warning that is seen: a degraded run must not look like a normal one."""
    bar = "=" * (len(text) + 4)
    return f"\n{bar}\n| {text} |\n{bar}"


# ---- Learner ---------------------------------------------------------------------------------------------------------

# Attention that takes all groups of a pass in one row; the others take one row for each.
ONE_ROW = (*KERNELS, "flex_attention")


def cut_passes(
    prompts: Sequence[Any], lengths: Sequence[tuple[int, int]], most_tokens: int, share: bool
) -> list[list[int]]:
    """Which completions go through the model together: indices by pass, at most `most_tokens` tokens in each (or a single
    completion that has more). `lengths` are those of prompt and completion; equal `prompts` are computed once a pass if
    they `share`.

    >>> cut_passes("aab", [(10, 5), (10, 5), (10, 5)], most_tokens=20, share=True)
    [[0, 1], [2]]
    """
    passes: list[list[int]] = []
    used, present = 0, set()
    # Groups stay together, in the order of their first completions.
    first = {prompt: i for i, prompt in reversed(list(enumerate(prompts)))}
    for i in sorted(range(len(prompts)), key=lambda i: (first[prompts[i]], i)):
        prompt, completion = lengths[i]
        need = completion + (0 if share and prompts[i] in present else prompt)
        if not passes or used + need > most_tokens:
            passes.append([])
            used, present, need = 0, set(), prompt + completion
        passes[-1].append(i)
        used += need
        present.add(prompts[i])
    return passes


def pass_tokens(settings: Settings, micro_batch: int, prompt_len: int, share: bool) -> int:
    """Tokens of the largest pass: `micro_batch` completions of MAX_COMPLETION_LEN with their prompts.

    >>> pass_tokens(Settings(NUM_GENERATIONS=8, MAX_COMPLETION_LEN=100), 16, 50, share=True)
    1700
    """
    prompts = -(-micro_batch // settings.NUM_GENERATIONS) if share else micro_batch
    return prompts * prompt_len + micro_batch * settings.MAX_COMPLETION_LEN


def importance_ratio(logps: Any, sampled: Any, mask: Any, mode: str, most: float) -> Any:
    """pi / mu for the policy's log-probs (B, C) and those with which the engine sampled (NaN: unknown, ratio 1), as TRL
    computes it: truncated at `most`, or 0 above it, by token (B, C) or by sequence (B, 1)."""
    difference = ((logps - sampled) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    return ratio.clamp(max=most) if mode.endswith("truncate") else ratio.masked_fill(ratio > most, 0.0)


class Learner:
    """Part of the trainer: one step's completions in few dense passes, with Liger's (or TRL's) loss of the step as a whole.

    Mixed into TRL's GRPOTrainer by `make_trainer`, over `training_step` (a documented hook of the Trainer) and
    `_get_per_token_logps_and_entropies` (for the KL term's reference), with TRL's `_compute_loss` or Liger's loss at the
    end. Nothing is computed twice: a prompt once for its completions, no padding, and no pass for old log-probs, as there
    is one optimizer step a rollout: they are the current ones.

    However the step is cut into passes, the loss and its gradient are those of the whole batch.
    """

    run: RunContext

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Rollout, rewards, then forward and backward of each pass. Returns the step's loss."""
        model.train()
        batch = self._prepare_inputs(inputs)
        self._step += 1
        started = time.perf_counter()
        loss = self.learn(model, batch)
        self._metrics["train"]["step_time"].append(time.perf_counter() - started)
        return loss

    def learn(self, model: Any, batch: dict[str, Any]) -> Any:
        """Gradients of the loss of `batch`: `prompt_ids` (B, P), `completion_ids` (B, C), their masks, `advantages` (B,),
        and where they are known `sampling_per_token_logps` and `ref_per_token_logps` (B, C)."""
        import torch

        total, mask = torch.zeros((), device=batch["completion_ids"].device), batch["completion_mask"]
        logps = torch.full(mask.shape, math.nan, device=mask.device)
        ratios = torch.ones(mask.shape, device=mask.device)
        sums: collections.Counter[str] = collections.Counter()
        base = self.base_model_of(model)
        for rows, layout in self.passes(batch):
            with self.accelerator.autocast():
                states = hidden_states(base, layout, self.run.attention)
                leaf = states.detach().requires_grad_()  # head and loss first: their memory is free before the rest
                found, entropy = self.head(base, leaf, layout.targets)
            part = {
                name: value[rows] if torch.is_tensor(value) and value.ndim else value for name, value in batch.items()
            }
            padded = padded_like(part["completion_mask"], layout, found)
            logps[rows] = padded.detach()
            s, sampled = self.run.settings, part.get("sampling_per_token_logps")
            if sampled is not None and s.IS_CORRECTION != "none":
                ratio = importance_ratio(
                    padded.detach(), sampled, part["completion_mask"], s.IS_CORRECTION, s.IS_CLIP_MAX
                )
                part["importance_sampling_ratio"], ratios[rows] = ratio, ratio.expand_as(padded)
            loss, metrics = self.pass_loss(model, part, batch, padded, entropy, layout)
            loss.backward()
            states.backward(leaf.grad)
            total += loss.detach()
            sums.update(metrics)
        self.record_learning(batch, logps, ratios, sums)
        return total

    def base_model_of(self, model: Any) -> Any:
        return self.accelerator.unwrap_model(model).get_base_model()

    def passes(self, batch: Mapping[str, Any]) -> Iterator[tuple[Any, Layout]]:
        """(indices of some completions, their layout), together all of `batch`."""
        import torch

        s, share, attention = self.run.settings, self.run.packing == "prefix", self.run.attention
        tokens = []
        for kind in ("prompt", "completion"):
            ids, kept = batch[f"{kind}_ids"].cpu(), batch[f"{kind}_mask"].cpu().bool()
            tokens.append([row.tolist() for row in ids[kept].split(kept.sum(1).tolist())])
        prompts, completions = tokens
        numbers: dict[Any, int] = {}  # a number stands for equal prompts, whose tokens are so compared once
        number = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
        lengths = [(len(p), len(c)) for p, c in zip(prompts, completions, strict=True)]
        most = pass_tokens(s, self.run.plan.micro_batch, max(p for p, _ in lengths), share)
        device = batch["completion_ids"].device
        for rows in cut_passes(number, lengths, most, share):
            chosen = [prompts[i] for i in rows], [completions[i] for i in rows]
            yield torch.tensor(rows, device=device), make_layout(*chosen, share, attention in ONE_ROW, device)

    def head(self, base: Any, states: Any, targets: Any) -> tuple[Any, Any]:
        """Log-probs and entropies (N,) of `targets` (N,) after `states` (N, hidden) of `base`. Logits are held for one tile
        of tokens and vocabulary at a time. TRL's kernel for either loss: Liger's own streams several float32 copies of each tile
        through memory, and a step of 12 x 8 x 512 tokens took 6.4 s with it, 5.2 s with TRL's (docs/log.md)."""
        from trl.kernels import ChunkedLogProbFunction

        head = base.get_output_embeddings()
        return ChunkedLogProbFunction.apply(
            states, head.weight, head.bias, targets, self.temperature, HEAD_TILE, None, 1.0, ("entropy",)
        )[:2]

    def pass_loss(
        self, model: Any, part: dict[str, Any], batch: Mapping[str, Any], logps: Any, entropy: Any, layout: Layout
    ) -> tuple[Any, dict[str, float]]:
        """This pass's share of the loss of `batch`, and sums over its tokens for the logs. `logps` (b, C)."""
        from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

        mask, ratio = part["completion_mask"], part.get("importance_sampling_ratio")
        if self.run.settings.LOSS_IMPL == "liger":
            a = self.args
            loss, metrics = LigerFusedLinearGRPOFunction.ppo_loss_fn(
                logps, mask, part["advantages"], batch["completion_mask"],  # normalized by the whole step's tokens
                ref_per_token_logps=part.get("ref_per_token_logps"), old_per_token_logps=part.get("old_per_token_logps"),
                epsilon_low=self.epsilon_low, epsilon_high=self.epsilon_high, beta=self.beta, loss_type=self.loss_type,
                max_completion_length=self.max_completion_length, importance_sampling_level=self.importance_sampling_level,
                sapo_temperature_pos=a.sapo_temperature_pos, sapo_temperature_neg=a.sapo_temperature_neg,
                vllm_is_ratio=ratio, delta=a.delta, use_bias_correction_kl=a.use_bias_correction_kl,
                vespo_k_pos=a.vespo_k_pos, vespo_lambda_pos=a.vespo_lambda_pos, vespo_k_neg=a.vespo_k_neg,
                vespo_lambda_neg=a.vespo_lambda_neg, num_items_in_batch=batch["num_items_in_batch"],
            )  # fmt: skip
            names = ("kl", "clip_ratio/region_mean") if self.beta else ("clip_ratio/region_mean",)
            sums = {name: value.item() for name, value in zip(names, metrics, strict=True)}
            return loss, sums | {"entropy": (entropy.detach().sum() / batch["completion_mask"].sum()).item()}
        # TRL's loss takes log-probs from `_get_per_token_logps_and_entropies` and normalizes by the completions it is given.
        # Its own correction is off; as the ratio is never negative, advantages by token are the same thing.
        self.ready = logps, padded_like(mask, layout, entropy), None
        if ratio is not None and self.loss_type != "vespo":
            part["advantages"] = part["advantages"][:, None] * ratio
        before = {name: len(values) for name, values in self._metrics["train"].items()}
        try:
            loss = super()._compute_loss(model, part)
        finally:
            self.ready = None
        tokens, whole = mask.sum().clamp(min=1), batch["completion_mask"].sum().clamp(min=1)
        fresh = {
            name: values.pop() for name, values in self._metrics["train"].items() if len(values) > before.get(name, 0)
        }
        share = {"bnpo": tokens / whole}.get(self.loss_type, len(mask) / len(batch["completion_mask"]))
        weighted = {name: value * (tokens / whole).item() for name, value in fresh.items() if name in TOKEN_MEANS}
        return loss if self.loss_type in TOKEN_NORMALIZED else loss * share, weighted

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        """Log-probs (B, C) of the last `logits_to_keep` tokens: those at hand in `pass_loss`, or those of the reference."""
        import torch

        if getattr(self, "ready", None) is not None:
            return self.ready
        keep = logits_to_keep
        batch = {
            "prompt_ids": input_ids[:, :-keep], "prompt_mask": attention_mask[:, :-keep],
            "completion_ids": input_ids[:, -keep:], "completion_mask": attention_mask[:, -keep:],
        }  # fmt: skip
        logps = input_ids.new_zeros(batch["completion_ids"].shape, dtype=torch.float32)
        base = self.base_model_of(model)
        for rows, layout in self.passes(batch):
            with self.accelerator.autocast():
                found, _ = self.head(base, hidden_states(base, layout, self.run.attention), layout.targets)
            logps[rows] = padded_like(batch["completion_mask"][rows], layout, found)
        return logps, None, None

    def record_learning(self, batch: Mapping[str, Any], logps: Any, ratios: Any, sums: Mapping[str, float]) -> None:
        """The step's means under TRL's names, and how far the engine's log-probs are from the trainer's."""
        metrics, mask = self._metrics["train"], batch["completion_mask"].bool()
        for name, value in sums.items():
            metrics[name].append(value)
        if (sampled := batch.get("sampling_per_token_logps")) is not None:
            difference = (logps - sampled).abs()
            difference = difference[mask & ~difference.isnan()]
            if difference.numel():
                metrics["sampling/sampling_logp_difference/mean"].append(difference.mean().item())
                metrics["sampling/sampling_logp_difference/max"].append(difference.max().item())
            metrics["sampling/importance_sampling_ratio/mean"].append(ratios[mask].mean().item())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL merges its metrics into `logs`; a training step's become a row of metrics.csv."""
        super().log(logs, start_time)
        if "loss" in logs and self.model.training:
            self.run.record_step(self.state.global_step, logs)


HEAD_TILE = 32768  # vocabulary of one tile of logits, as in TRL
# TRL and Liger divide these by the tokens of the whole step; the other losses are means over completions, or over the
# tokens of what they are given (bnpo).
TOKEN_NORMALIZED = ("dapo", "cispo", "vespo")
TOKEN_MEANS = ("kl", "entropy", "clip_ratio/region_mean")  # TRL's means over tokens that go into metrics.csv


def padded_like(mask: Any, layout: Layout, values: Any) -> Any:
    """`values` (N,) of the layout's completion tokens as (b, C), zero beyond each completion; differentiable."""
    return values.new_zeros(mask.shape).index_put((layout.rows, layout.columns), values)


def grpo_config(settings: Settings, plan: Plan, cuda: bool) -> Any:
    """TRL's configuration of this run."""
    from trl import GRPOConfig

    s = settings
    trackers = [name for name in listed(s.REPORT_TO) if name != "none"]
    return GRPOConfig(
        output_dir=str(run_folder(s)),
        # TRL sees the step's completions as one batch; `Learner.training_step` cuts it into passes.
        per_device_train_batch_size=s.completions_per_step,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=s.NUM_GENERATIONS,
        max_completion_length=s.MAX_COMPLETION_LEN,
        temperature=s.TEMPERATURE,
        top_p=s.TOP_P,
        max_steps=s.TOTAL_STEPS,
        learning_rate=s.LEARNING_RATE,
        lr_scheduler_type=s.LR_SCHEDULER,
        warmup_steps=s.WARMUP_STEPS,
        weight_decay=s.WEIGHT_DECAY,
        max_grad_norm=s.MAX_GRAD_NORM,
        loss_type=s.LOSS_TYPE,
        beta=s.BETA,
        epsilon=s.EPSILON,
        epsilon_high=choose_epsilon_high(s)[0],
        scale_rewards=s.SCALE_REWARDS,
        mask_truncated_completions=s.MASK_TRUNCATED,
        reward_weights=[weight for _, weight in reward_specs(s.REWARDS)],
        # gpt-oss's config carries a load-balancing coefficient that TRL would silently add to the loss
        # (https://github.com/huggingface/trl/issues/7248).
        router_aux_loss_coef=0.0,
        # The engine is our own (see "Rollout engine"), and so is the correction for its log-probs: TRL's needs a whole
        # forward pass before the loss (see `Learner`).
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        bf16=True,
        use_cpu=not cuda,
        gradient_checkpointing=s.GRADIENT_CHECKPOINTING,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        disable_tqdm=not sys.stderr.isatty(),  # a file would be full of bars, and the lines of the steps tell all
        save_strategy="steps",
        save_steps=s.SAVE_STEPS,
        save_total_limit=s.SAVE_TOTAL_LIMIT,
        report_to=trackers or "none",
        run_name=run_folder(s).name,
        seed=s.SEED,
        data_seed=s.SEED,
        dataloader_pin_memory=cuda,
    )


def make_trainer(check: Preflight, run: RunContext, model: Any, tokenizer: Any) -> Any:
    """TRL's GRPOTrainer with this file's Rollouts and Learner over it."""
    import torch
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback
    from trl import GRPOTrainer

    trainer_class = type("Trainer", (Rollouts, Learner, GRPOTrainer), {"run": run})
    trainer = trainer_class(
        model=model,
        reward_funcs=[reward_callable(name, check.settings) for name, _ in check.reward_specs],
        args=grpo_config(check.settings, run.plan, torch.cuda.is_available()),
        # Only the index travels through TRL: the columns are looked up where they are needed.
        train_dataset=Dataset.from_dict(
            {"prompt": [row.prompt for row in run.rows], "row": list(range(len(run.rows)))}
        ),
        processing_class=tokenizer,
        peft_config=lora_config(check.settings),
        callbacks=[type("Watch", (Watch, TrainerCallback), {})(run)],
    )
    trainer.current_gradient_accumulation_steps = 1  # the Trainer sets it when it trains, losses ask for it before
    if trainer.args.disable_tqdm:
        trainer.remove_callback(PrinterCallback)
    else:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(type("Bar", (Bar, ProgressCallback), {})(run))
    # PEFT writes README.md into every folder that the adapter is saved in, with the path of the base model's files; TRL
    # writes one into OUTPUT_DIR.
    trainer.create_model_card = lambda **options: None
    trainer.model.create_or_update_model_card = lambda folder: write_text(
        Path(folder) / "README.md", model_card(check, trainer.state.global_step)
    )
    return trainer


# ---- Logging: what a run leaves --------------------------------------------------------------------------------------

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


def write_rows(file: Any, rows: Iterable[Sequence[Any]]) -> None:
    """CSV rows ending in a line feed. Python's writer leaves a lone carriage return unquoted then, and the row would
    read back as two: such rows are quoted whole."""
    plain = csv.writer(file, lineterminator="\n")
    quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        (quoted if any("\r" in str(cell) for cell in row) else plain).writerow(row)


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


def trim_csv(path: Path, last_step: int) -> int:
    """Drop the rows after `last_step` from a log (they will be written again), and a row that was cut off.

    Returns how many were dropped. What is dropped is kept beside it in NAME.superseded.csv: nothing written is lost.
    """
    if not path.exists():
        return 0
    kept, dropped = [], []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for number, cells in enumerate(csv.reader(line.replace("\0", "") for line in file)):
            if number == 0:
                kept.append(cells)
            else:
                whole = len(cells) == len(kept[0]) and cells[0].isdigit()
                (kept if whole and int(cells[0]) <= last_step else dropped).append(cells)
    if dropped:
        with path.with_name(path.stem + ".superseded.csv").open("a", newline="", encoding="utf-8") as file:
            write_rows(file, dropped)
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            write_rows(file, kept)
        os.replace(temporary, path)
    return len(dropped)


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


class RunContext:
    """What the parts of the trainer share: rows, plan, timers and the logs of OUTPUT_DIR."""

    def __init__(self, check: Preflight, rows: list[Row], plan: Plan):
        self.settings, self.rows, self.plan, self.folder = check.settings, rows, plan, check.run.folder
        self.attention, self.packing = check.attention[0], check.packing[0]
        self.metrics = CsvLog(self.folder / "metrics.csv", METRICS)
        self.completions = CsvLog(self.folder / "completions.csv", COMPLETIONS)
        # TRL asks the first completion for the columns: every row gets those of every file.
        self.actions = max(len(row.rewards) for row in rows)
        self.empty_columns = {name: None for row in rows for name in reward_columns(row, self.actions)}
        self.seconds = {"rollout": 0.0, "reward": 0.0}
        self.stream = "train"  # or `evaluation`, or `base`: an evaluation without the adapter
        self.engine: Engine | None = None
        self.parity: list[dict[str, Any]] = []
        self.started = time.time()
        self.rollout_tokens = 0
        self.rollout: dict[str, float] = {}
        self.step_started = self.step_seconds = 0.0
        with (self.folder / "metrics.csv").open(newline="", encoding="utf-8") as file:  # of a resumed run
            rows_before = list(csv.DictReader(file))
        self.parse_history = [float(row["parse_rate"]) for row in rows_before]
        self.reward_history = [
            (float(row["reward"] or "nan"), float(row["zero_std_fraction"] or "nan")) for row in rows_before
        ]
        self.warned_at: dict[Callable[..., Any], int] = {}
        self.stop_signal = 0
        self.stop_at_once = True  # while there is nothing to lose: before training, and in the evaluation after it
        self.last: dict[str, Any] = {}

    def record_rollout(self, step: int, read: Sequence[Completion], totals: Sequence[float]) -> None:
        """Write a step's completions and remember its rates."""
        best = [rewards.best_action(one.row.rewards) if one.row.rewards else None for one in read]
        self.completions.write(
            {
                "step": step,
                "prompt_id": one.row.id,
                "completion": one.text,
                "parsed_action": "" if one.action is None else one.action,
                "reward": f"{total:.6g}",
                "best_action": "" if k is None else k,
                "tokens": one.tokens,
                "truncated": int(one.truncated),
            }
            for one, total, k in zip(read, totals, best, strict=True)
        )
        self.rollout = completion_rates(read)

    def record_step(self, step: int, logs: Mapping[str, Any]) -> None:
        """Write a step's row of metrics.csv and a line of training.log, and warn when answers stop parsing or rewards stop
        teaching."""
        import torch

        seconds = {name: self.seconds[name] for name in self.seconds}
        row: dict[str, Any] = {
            "step": step,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "reward": logs.get("reward"),
            "reward_std": logs.get("reward_std"),
            "zero_std_fraction": logs.get("frac_reward_zero_std"),
            **self.rollout,
            "loss": logs.get("loss"),
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
            "kl": logs.get("kl"),
            "entropy": logs.get("entropy"),
            "clip_fraction": logs.get("clip_ratio/region_mean"),
            "logp_diff_mean": logs.get("sampling/sampling_logp_difference/mean"),
            "logp_diff_max": logs.get("sampling/sampling_logp_difference/max"),
            "is_ratio_mean": logs.get("sampling/importance_sampling_ratio/mean"),
            **{
                f"{name}_s": self.engine.seconds[name] if self.engine else None
                for name in ("wake", "handover", "sleep")
            },
            "rollout_s": seconds["rollout"],
            "reward_s": seconds["reward"],
            "learn_s": self.step_seconds - sum(seconds.values()),
            "step_s": self.step_seconds,
            "rollout_tokens_per_s": self.rollout_tokens / max(seconds["rollout"], 1e-9),
            "gpu_peak_gib": torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None,
        }
        formatted = {k: "" if v is None else f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
        self.metrics.write([formatted])
        self.last = row
        self.parse_history.append(row["parse_rate"])
        message = "step %d/%d: reward %s, parse rate %.2f, clipped %.2f, %.0f tokens, %.1f s (rollout %.1f, learn %.1f)"
        reward, total = formatted["reward"] or "nan", self.settings.TOTAL_STEPS
        log.info(message, step, total, reward, row["parse_rate"], row["clipped_ratio"], row["tokens_mean"], row["step_s"], row["rollout_s"], row["learn_s"])  # fmt: skip
        self.reward_history.append(
            tuple(math.nan if row[name] is None else row[name] for name in ("reward", "zero_std_fraction"))
        )
        for warn, history in ((parse_rate_warning, self.parse_history), (reward_warning, self.reward_history)):
            if step - self.warned_at.get(warn, -WARN_EVERY) >= WARN_EVERY and (warning := warn(history)):
                self.warned_at[warn] = step
                log.warning(warning)


def completion_rates(read: Sequence[Completion]) -> dict[str, float]:
    """Parse rate, best-action rate, clipped ratio and lengths of some completions."""
    count = len(read)
    return {
        "parse_rate": sum(one.action is not None for one in read) / count,
        "best_action_rate": sum(
            one.action is not None and bool(one.row.rewards) and one.row.rewards[one.action] == max(one.row.rewards)
            for one in read
        )
        / count,
        "clipped_ratio": sum(one.truncated for one in read) / count,
        "tokens_mean": sum(one.tokens for one in read) / count,
        "tokens_max": max(one.tokens for one in read),
    }


class Watch:
    """Callback: times each step, and stops after a checkpoint when the process is asked to end."""

    def __init__(self, run: RunContext):
        self.run = run

    def on_train_begin(self, args, state, control, **kwargs):
        state.save_steps = args.save_steps  # a resumed run may change it; the Trainer takes the checkpoint's

    def on_step_begin(self, args, state, control, **kwargs):
        import torch

        self.run.seconds = dict.fromkeys(self.run.seconds, 0.0)
        self.run.step_started = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **kwargs):
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.run.step_seconds = time.perf_counter() - self.run.step_started
        if self.run.stop_signal:
            control.should_save = control.should_training_stop = True
        return control


class Bar:
    """The Trainer's progress bar with time left, showing reward and parse rate instead of every metric."""

    def __init__(self, run: RunContext):
        super().__init__()
        self.run = run

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        # A resumed run begins where it was: else the time left is computed from steps that took none.
        self.training_bar.initial = self.training_bar.n = self.training_bar.last_print_n = state.global_step
        self.current_step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and self.run.last:
            self.training_bar.set_postfix(
                reward=f"{math.nan if self.run.last['reward'] is None else self.run.last['reward']:.3f}",
                parse=f"{self.run.last['parse_rate']:.2f}",
            )


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


def model_card(check: Preflight, step: int) -> str:
    """README.md of an adapter after `step` steps, as the Hub reads it (https://huggingface.co/docs/hub/model-cards).

    A local base model is named after its folder, not after its path on this machine.
    """
    s = check.settings
    local = s.MODEL_ID == "tiny" or Path(s.MODEL_ID).is_dir()
    base = Path(s.MODEL_ID).resolve().name if local else s.MODEL_ID
    base_model = "" if local else f"\nbase_model: {base}"
    return f"""---
library_name: peft
pipeline_tag: text-generation
tags: [grpo, lora]{base_model}
---

# {run_folder(s).name}

A LoRA adapter for {base}, trained for {step} steps with GRPO ([paper](https://arxiv.org/abs/2402.03300)): rank {s.LORA_R}
on {s.LORA_TARGETS}, {s.PROMPTS_PER_STEP} prompts a step with {s.NUM_GENERATIONS} completions each, rewards: {s.REWARDS}.
The run's `settings.json` holds every setting, `versions.json` the packages' versions, `metrics.csv` each step.

To load it, from the folder of this file{" and with the path of the base model's folder" if local else ""}:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto", device_map="auto")
model = PeftModel.from_pretrained(base, ".")
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""


def continuation(folder: Path, settings: Mapping[str, Any]) -> str:
    """What the same command does with the run in `folder` that ended before it was complete."""
    hinders = ["OVERWRITE=1"] if settings.get("OVERWRITE") else []
    hinders += ["RESUME=never"] if settings.get("RESUME") == "never" else []
    again = "the same command" + (f" WITHOUT {' and '.join(hinders)}" if hinders else "")
    step, checkpoint = last_checkpoint(folder)
    return f"{again} continues from step {step}" if checkpoint else f"{again} starts at step 0: no checkpoint was saved"


def full_disk(error: BaseException, folder: Path) -> str | None:
    """The disk that is full, where an exception or one that it came from says so; None for any other.

    safetensors and torch.save raise no OSError (torch: `enforce fail at inline_container.cc`, for every failed write).
    """
    ours = f"OUTPUT_DIR={folder}"
    places = {ours: str(folder)} | {name: name for name in (tempfile.gettempdir(), "/dev/shm") if Path(name).exists()}
    full = [name for name, place in places.items() if shutil.disk_usage(place).free < 2**26]
    cause: BaseException | None = error
    while cause is not None:
        said = getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        said |= bool(re.search(r"No space left on device|Disk quota exceeded", str(cause)))
        if said or (ours in full and "inline_container" in str(cause)):
            return next(iter(full), ours)  # none: a quota, or space was freed in the meantime
        cause = cause.__cause__ or cause.__context__
    return None


def write_zip(folder: Path) -> Path:
    """OUTPUT_DIR.zip beside OUTPUT_DIR: everything but optimizer states and half-written files, whole or not at all."""
    target = folder.with_name(folder.name + ".zip")
    temporary = target.with_name(target.name + ".tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for path in sorted(folder.rglob("*")):
                state = path.name in ("optimizer.pt", "scheduler.pt") or path.name.startswith("rng_state")
                if path.is_file() and not state and path.suffix != ".tmp":
                    archive.write(path, path.relative_to(folder.parent))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)  # a part of a zip would only fill a disk that is full already
    return target


# ---- Evaluation on held-out prompts ----------------------------------------------------------------------------------


CLOSED_LOOP = "closed_loop.json"


def complete(trainer: Any, prompts: Sequence[str], samples: int, base: bool, step: int = 0) -> list[list[int]]:
    """Token ids of one completion for each prompt, generated as the rollouts are (same engine, temperature and length).
    The seed is that of `step`, before as after training. `base`: without the adapter."""
    run, now = trainer.run, trainer.state.global_step
    prompt_ids = trainer._tokenize_prompts(list(prompts))[0]
    run.stream = "base" if base else "evaluation"
    trainer.state.global_step = step
    try:
        with evaluating(trainer.model), trainer.model.disable_adapter() if base else contextlib.nullcontext():
            return trainer._generate_single_turn(prompt_ids, None, {}, samples)[0]
    finally:
        run.stream, trainer.state.global_step = "train", now


def evaluate(trainer: Any, rows: Sequence[Row], samples: int, base: bool = False) -> dict[str, Any]:
    """What `samples` completions for each held-out row are worth by the CSV: `rewards.score_answers` and their lengths.
    An answer that cannot be parsed counts as INVALID_REWARD, or as the row's lowest reward where that is nan."""
    sampled = [row for row in rows for _ in range(samples)]
    read = trainer.read_completions(sampled, complete(trainer, [row.prompt for row in sampled], samples, base))
    answers = [[one.action for one in read[start : start + samples]] for start in range(0, len(read), samples)]
    scores = rewards.score_answers([row.rewards for row in rows], answers, trainer.run.settings.INVALID_REWARD)
    rates = completion_rates(read)
    return scores | {name: rates[name] for name in ("clipped_ratio", "tokens_mean", "tokens_max")}


def report_evaluation(path: Path, results: Mapping[str, Any]) -> str:
    """Write evaluation.json; returns the table that the run prints last."""
    write_text(path, json.dumps(results, indent=2) + "\n")
    lines = ["Held-out mean reward, 95% interval over prompts", f"  random action         {results['random']:.3f}"]
    lines.append(f"  best constant action  {results['constant']:.3f}   (always [{results['constant_action']}])")
    for name in ("before", "after"):
        if result := results.get(name):
            lines.append(
                f"  {name + ' training':<21} {result['reward']:.3f}   {result['reward_low']:.3f} to "
                f"{result['reward_high']:.3f}   (regret {result['regret']:.3f}, parse rate {result['parse_rate']:.2f}, "
                f"best action {result['best_action_rate']:.2f})"
            )
    lines.append(f"  oracle                {results['oracle']:.3f}")
    if change := results.get("difference"):
        lines.append(
            f"  after - before       {change['reward']:+.3f}   {change['reward_low']:+.3f} to {change['reward_high']:+.3f}"
        )
    return "\n".join(lines)


def measure_rewards(check: Preflight, trainer: Any, base: bool) -> None:
    """evaluation.json: held-out reward before training (`base`) or after it, beside what other policies earn. A resumed
    run keeps what was measured at its start."""
    path = check.run.folder / "evaluation.json"
    results: dict[str, Any] = rewards.baselines([row.rewards for row in check.eval_rows])
    results |= {"samples": check.settings.EVAL_SAMPLES, "data_sha256": data_fingerprint(check.eval_rows)}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        earlier = json.loads(path.read_text(encoding="utf-8"))
        same = all(earlier[name] == results[name] for name in ("samples", "data_sha256"))
        if same and len(earlier["before"]["reward_by_prompt"]) == len(check.eval_rows):
            results["before"] = earlier["before"]
    if "before" not in results:
        results["before"] = evaluate(trainer, check.eval_rows, check.settings.EVAL_SAMPLES, base=True)
    if not base:
        results["after"] = evaluate(trainer, check.eval_rows, check.settings.EVAL_SAMPLES)
        scores = (results[name]["reward_by_prompt"] for name in ("before", "after"))
        results["difference"] = rewards.paired_difference(*scores)
    table = report_evaluation(path, results)
    if base:
        log.info("held-out reward before training: %.3f", results["before"]["reward"])
    else:
        log.info("\n%s\n", table)


def script(name: str) -> Any:
    """A module of scripts/, imported when it is needed."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.insert(0, str(ROOT / "scripts"))
    return importlib.import_module(name)


@dataclass(frozen=True)
class ClosedLoop:
    """Whether the closed loop runs: `prompt` is `full` or `compact`, or empty where it does not. And with which windows:
    `cases` of scripts/evaluate.py."""

    prompt: str
    reason: str
    profiles: tuple[str, ...] = ()
    cases: tuple[Any, ...] = ()


def choose_closed_loop(settings: Settings, kind: str | None, engine: bool, chosen: bool) -> tuple[bool, str]:
    """(whether the closed loop runs, reason). `kind` of the held-out prompts: full, compact, or None for other ones;
    `engine`: vLLM generates; `chosen`: EVAL_PROFILE was set by the user."""
    if not settings.EVAL_SAMPLES:
        return False, "EVAL_SAMPLES=0"
    if not settings.EVAL_PROFILE.strip():
        return False, "EVAL_PROFILE is empty"
    if kind is None:
        return False, "the held-out prompts are not those of the plant in scripts/make_dataset.py"
    if settings.MODEL_ID != "tiny" and not engine and not chosen:
        hours = script("evaluate").DECISIONS
        return False, f"{hours} hours in turn take transformers too long; set EVAL_PROFILE to run it nevertheless"
    return True, f"the held-out prompts are the plant's ({kind})"


def plan_closed_loop(
    settings: Settings, rows: Sequence[Row], engine: bool, chosen: bool, problems: Problems
) -> ClosedLoop:
    """Choose, and read the profiles; their problems are added."""
    kind = None
    if settings.EVAL_SAMPLES and settings.EVAL_PROFILE.strip() and rows:
        kind = script("evaluate").prompt_kind([row.messages for row in rows])
    runs, reason = choose_closed_loop(settings, kind, engine, chosen)
    if not runs:
        return ClosedLoop("", reason)
    paths, cases = find_files("EVAL_PROFILE", settings.EVAL_PROFILE, problems), []
    for path in paths:
        try:
            cases += script("evaluate").read_cases(path)
        except script("make_dataset").ProfileError as error:
            problems += [f"EVAL_PROFILE: {line}" for line in error.problems]
    passes = f"{len(cases)} windows x {settings.EVAL_SAMPLES} passes: {script('evaluate').DECISIONS} rollouts one after the other, before and after training"
    profiles = tuple(script("evaluate").shown_path(path) for path in paths)
    return ClosedLoop(kind if cases else "", f"{reason}, {passes}", profiles, tuple(cases))


def measure_closed_loop(check: Preflight, trainer: Any, base: bool) -> None:
    """closed_loop.json: the base model or the trained adapter controls the plant through the windows of EVAL_PROFILE. A
    resumed run keeps the base model's."""
    s, plan, started = check.settings, check.closed_loop, time.perf_counter()
    if not plan.prompt:
        log.info("no closed loop: %s", plan.reason)
        return
    loop, path, name = script("evaluate"), check.run.folder / CLOSED_LOOP, "base" if base else "trained"
    record = loop.new_record(plan.cases, plan.profiles, s.EVAL_SAMPLES, False, loop.sampling_of(s, plan.prompt))
    loop.keep_models(record, path, ("base",))
    render_prompt = loop.renderer(
        plan.prompt,
        lambda messages: render(check.files.template, messages, s.REASONING_EFFORT, s.PROMPT_DATE),
    )

    said = started

    def ask(prompts: Sequence[str], samples: int, hour: int) -> list[str]:
        nonlocal said
        if time.perf_counter() - said > 30:
            said = time.perf_counter()
            log.info("closed loop, %s model: decision %d of %d", name, hour + 1, loop.DECISIONS)
        # Step 0 is the held-out rows' seed.
        ids = complete(trainer, [p for p in prompts for _ in range(samples)], samples, base, hour + 1)
        return trainer.processing_class.batch_decode(ids, skip_special_tokens=False)

    if name not in record["totals"]:
        loop.run_model(record, name, plan.cases, ask, render_prompt)
    loop.write_record(record, path)
    regret = record["totals"][name]["regret_percent"]
    shown = "" if regret is None else f": regret {regret:.1f} % of the optimum's priced CO2"
    log.info("closed loop, %s model%s (%.1f s)", name, shown, time.perf_counter() - started)
    if not base:
        log.info("\n%s\n", loop.table(record))


def measure(check: Preflight, trainer: Any, base: bool) -> None:
    """Both evaluations, of the base model (`base`) or of the trained adapter; none where EVAL_SAMPLES is 0."""
    if check.eval_rows:
        measure_rewards(check, trainer, base)
        measure_closed_loop(check, trainer, base)


def write_report(folder: Path) -> None:
    """report.html of scripts/report.py. A report that fails must not fail the run."""
    try:
        script("report").write_report(folder)
    except Exception as error:
        again = f"python scripts/report.py {folder}"
        log.warning("no report was written (%s: %s); try again with: %s", type(error).__name__, error, again)


def pack(folder: Path) -> Path:
    """The run's report, then the zip that holds it with the rest; returns the zip's path."""
    write_report(folder)
    return write_zip(folder)


# ---- Main ------------------------------------------------------------------------------------------------------------


def fail(problems: Sequence[str]) -> int:
    """Print every problem; returns exit code 2."""
    plural = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"\n{plural} to mend before the run can start:\n", file=sys.stderr)
    for number, problem in enumerate(problems, 1):
        print(f"  {number}. {problem}", file=sys.stderr)
    print("\nNothing was started and nothing was changed.", file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="train_grpo.py", add_help=False, usage="[NAME=VALUE ...] python %(prog)s [--help | --check]"
    )
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--check", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    if options.help:
        print(help_text())
        return 0
    problems = [unknown_option(word) for word in rest]
    try:
        check = preflight(os.environ)
        problems += check.problems
        print(banner(check))
        if problems:
            return fail(problems)
        if options.check:
            print("\nEvery check passed. Nothing was started.")
            return 0
        return run(check)
    except KeyboardInterrupt:  # `launch` answers the later ones
        print("\ninterrupted before the run began: nothing was written to OUTPUT_DIR", file=sys.stderr)
        return 128 + signal.SIGINT


def run(check: Preflight) -> int:
    """Train: everything from here on may take time, memory and a GPU."""
    s = check.settings
    model_path = s.MODEL_ID
    if check.files is None:  # `tiny` before its first use: make it, then repeat the checks that needed its tokenizer
        import make_model

        print("\nMaking the tiny model (once, under a minute) ...", flush=True)
        try:
            make_model.build_tiny(force=make_model.tiny_path().exists())  # a damaged one is made again
        except make_model.ModelError as error:
            return fail([f"MODEL_ID=tiny: {error}"])
        check = preflight(os.environ)
        if check.problems:
            return fail(check.problems)
    if s.MODEL_ID == "tiny":
        model_path = str(check.files.folder)
    lock = lock_run(check.run.folder)
    if lock is None:
        return fail(
            [f"OUTPUT_DIR={s.OUTPUT_DIR}: another process is writing there. Wait for it, or choose another OUTPUT_DIR"]
        )
    with contextlib.closing(lock):
        return launch(check, model_path)


def unseen_gpu(machine: Machine) -> str | None:
    """Why the machine's GPU is of no use to torch, or None."""
    import torch

    if not machine.gpus or torch.cuda.is_available():
        return None
    what = f"{machine.gpu} is there, but torch {torch.__version__} does not see it"
    return f"torch: {what}. It needs driver 580 or newer and a build for CUDA: bash scripts/setup.sh"


def launch(check: Preflight, model_path: str) -> int:
    """Make OUTPUT_DIR ready, then `load_and_train`. Exit code of the run, however it ends."""
    import torch

    if problem := unseen_gpu(check.machine) or unusable_attention(check.attention[0]):
        return fail([problem])
    prepare_run(check)
    folder, settings = check.run.folder, vars(check.settings)
    start_logging(folder)
    try:
        return load_and_train(check, model_path)
    except KeyboardInterrupt as stop:
        log.warning("stopped at once; %s", continuation(folder, settings))
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except ParityError as error:
        log.critical("PARITY: %s", error)
        return 3
    except EngineError as error:
        log.critical("vLLM: %s", error)
        pack(folder)
        return 4
    except torch.OutOfMemoryError as error:
        way = "EXPERTS=mxfp4 takes less memory, or free some of the GPU; then the same command continues"
        if smaller := check.plan.micro_batch // 2:
            way = f"MICRO_BATCH={smaller} learns the same in smaller passes; with it, the same command continues"
        log.critical("out of memory: %s", str(error).splitlines()[0])
        log.critical(way)
        pack(folder)
        return 1
    except Exception as error:
        if disk := full_disk(error, folder):
            log.critical("no space left on the disk of %s: free some, %s", disk, continuation(folder, settings))
        else:
            log.critical("the run failed", exc_info=True)
            log.critical("when its cause is mended, %s", continuation(folder, settings))
        return 1


def load_and_train(check: Preflight, model_path: str) -> int:
    """Load the model, start the engine, train. Exit code of a run that ends as it should, or is interrupted."""
    s, started = check.settings, time.time()
    if check.run.checkpoint is None:
        log.info("\n%s\n", banner(check))
    else:
        log.info("continuing from step %d", check.run.step)
        if warning := attention_warning(check.attention[0]):
            log.warning("%s", boxed(warning))

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()
    tokenizer = load_tokenizer(model_path)
    try:
        model = load_model(model_path, check.files.config, check.attention[0], check.experts[0])
    except ValueError as error:
        log.critical("model: %s", error)
        return 1
    log.info(
        "model: %.2fM parameters on %s, loaded after %.0f s",
        model.num_parameters() / 1e6,
        model.device,
        time.time() - started,
    )
    context = RunContext(check, check.rows, check.plan)
    trainer = make_trainer(check, context, model, tokenizer)
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    log.info("adapter: %s trainable parameters on %s", f"{trainable:,}", s.LORA_TARGETS)

    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:  # nohup
            signal.signal(name, lambda number, frame: on_signal(context, number))
    try:
        if check.rollouts[0]:
            context.engine = start_engine(s, check.plan.engine, model_path, trainer.eos_token_ids)
            parity_gate(trainer)
        return train(check, context, trainer)
    finally:
        if context.engine is not None:
            shutil.rmtree(context.engine.folder, ignore_errors=True)


def train(check: Preflight, context: RunContext, trainer: Any) -> int:
    """Evaluation, training, evaluation, and what the run leaves."""
    measure(check, trainer, base=True)
    context.stop_at_once = False
    trainer.train(resume_from_checkpoint=str(check.run.checkpoint) if check.run.checkpoint else None)

    trainer.save_model(str(context.folder))
    trainer.processing_class.save_pretrained(str(context.folder))
    if not context.stop_signal:
        context.stop_at_once = True
        with contextlib.suppress(KeyboardInterrupt):
            measure(check, trainer, base=False)
        context.stop_at_once = False
    archive = pack(context.folder)
    if context.stop_signal:
        again = continuation(context.folder, vars(check.settings))
        log.warning("interrupted at step %d; %s. So far: %s", trainer.state.global_step, again, archive)
        return 128 + context.stop_signal
    write_text(context.folder / COMPLETE, json.dumps({"steps": trainer.state.global_step}) + "\n")
    log.info(
        "complete: %d steps in %.0f s. Adapter: %s, download: %s",
        trainer.state.global_step,
        time.time() - context.started,
        context.folder,
        archive,
    )
    return 0


def on_signal(context: RunContext, number: int) -> None:
    """While the run trains, the first Ctrl-C, SIGTERM or SIGHUP ends it after the step and a checkpoint, and the second one
    at once; at any other time the first one does.

    Raises KeyboardInterrupt(number) to end it. A second SIGHUP is ignored: shell and kernel both send one when a terminal
    is lost.
    """
    if number == signal.SIGHUP:
        leave_terminal()
        if context.stop_signal:
            return
    at_once = context.stop_at_once or context.stop_signal
    context.stop_signal, context.stop_at_once = context.stop_signal or number, False
    if at_once:
        raise KeyboardInterrupt(number)
    log.warning("signal %d: finishing this step and saving a checkpoint; once more ends the run at once", number)


if __name__ == "__main__":
    sys.exit(main())
