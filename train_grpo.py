#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune gpt-oss-20b with GRPO on one GPU: one script, from CSVs of rewards to a trained LoRA adapter and a zip.

    python train_grpo.py --help                   every setting: default, unit, one sentence
    python train_grpo.py --check                  every check that needs no training, and the plan of the run
    MODEL_ID=tiny python train_grpo.py            the whole path on two CPU cores in minutes (model made on the spot)
    DATA='days/*.csv' python train_grpo.py        the real run, on one GPU with 80 GB

Settings are environment variables. The file reads in the order in which a run passes through it: settings, preflight,
data, model, rollouts, learner, logging, main. Nothing heavy is imported before the preflight has passed.

Exit codes: 0 the run is complete, 2 the input must be mended (all problems are listed), 130 or 143 interrupted after
a checkpoint was saved (the same command continues it), 1 anything else.

What is simplified: one process and one GPU; one optimizer step per rollout, so the policy ratio is 1 until the first
update of a step and clipping never acts; no reward model, only functions (rewards.py).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import difflib
import glob
import hashlib
import importlib
import importlib.metadata
import io
import json
import logging
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
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
    ATTN_IMPL: str = knob("Model", "auto", "", "Attention of the learner: `auto`, `eager`, `flex_attention`, `flash_attention_2`, `flash_attention_3`, `flash_attention_4`, or a Hub kernel (`kernels-community/...`).")
    LORA_R: int = knob("Model", 4, "rank", "Rank of the LoRA adapter.", tiny=8, low=1)
    LORA_ALPHA: float = knob("Model", 8.0, "", "LoRA scale: updates are multiplied by LORA_ALPHA / LORA_R.", tiny=16.0, above=0)
    LORA_TARGETS: str = knob("Model", "all-linear", "", "`all-linear` (q, k, v and o projections) or a comma-separated list of module names.")
    LORA_DROPOUT: float = knob("Model", 0.0, "share", "Dropout on the adapter's input while learning.", low=0, high=0.9)

    DATA: str = knob("Data", "data/tes_train.csv", "", "Training CSVs: files or globs, separated by commas.", tiny="data/tes_train_compact.csv")
    EVAL_DATA: str = knob("Data", "data/tes_heldout.csv", "", "Held-out CSVs for the evaluation before and after training.", tiny="data/tes_heldout_compact.csv")
    EVAL_SAMPLES: int = knob("Data", 0, "completions", "Completions per held-out prompt, before and after training; 0 skips the evaluation.", tiny=8, low=0)
    REASONING_EFFORT: str = knob("Data", "medium", "", "Reasoning effort that the chat template writes into prompts which are not rendered yet.", tiny="low", choices=("low", "medium", "high"))
    PROMPT_DATE: str = knob("Data", "2025-11-06", "date", "Current date that the chat template writes, fixed so that a resumed run sees the same prompts.", pattern=r"\d{4}-\d{2}-\d{2}")
    MAX_PROMPT_LEN: int = knob("Data", 2048, "tokens", "Longest prompt that is accepted; a longer one is an error, never cut.", tiny=256, low=1)

    REWARDS: str = knob("Rewards", "action", "", "Reward functions with optional weights, `name=weight,...`: action, best, format, or `module:function`.")
    INVALID_REWARD: float = knob("Rewards", 0.0, "reward", "Reward of an answer that cannot be parsed; `nan` leaves it out of its group.", nan=True)
    SCALE_REWARDS: str = knob("Rewards", "group", "", "Divide advantages by the standard deviation of the group, of the batch, or not at all.", choices=("group", "batch", "none"))
    MASK_TRUNCATED: bool = knob("Rewards", False, "", "Leave completions that met MAX_COMPLETION_LEN out of the loss (bad length then costs nothing).")

    USE_VLLM: bool = knob("Rollouts", False, "", "Generate with vLLM beside the trainer (BF16 checkpoints only, see docs/rollouts.md) instead of transformers.")
    PROMPTS_PER_STEP: int = knob("Rollouts", 12, "prompts", "Prompts per optimizer step.", tiny=8, low=1)
    NUM_GENERATIONS: int = knob("Rollouts", 8, "completions", "Completions per prompt: the group that advantages compare.", low=2)
    GENERATION_BATCH: int | None = knob("Rollouts", None, "completions", "Completions that transformers generates at once; `auto` plans it from the free memory.", low=1)
    MAX_COMPLETION_LEN: int = knob("Rollouts", 4000, "tokens", "Longest completion; one that meets it counts as truncated.", tiny=12, low=1)
    TEMPERATURE: float = knob("Rollouts", 1.0, "", "Sampling temperature of the rollouts; the loss uses the same.", above=0, high=10)
    TOP_P: float = knob("Rollouts", 1.0, "probability", "Nucleus sampling; below 1 the sampled and the trained distribution differ.", above=0, high=1)

    TOTAL_STEPS: int = knob("Learner", 100, "steps", "Optimizer steps of the whole run, resumed parts included.", tiny=150, low=1)
    LEARNING_RATE: float = knob("Learner", 5e-5, "", "Peak learning rate of AdamW.", tiny=1e-3, above=0)
    LR_SCHEDULER: str = knob("Learner", "constant_with_warmup", "", "Learning-rate schedule.", choices=("constant", "constant_with_warmup", "linear", "cosine"))
    WARMUP_STEPS: int = knob("Learner", 0, "steps", "Steps over which the learning rate rises from 0.", low=0)
    WEIGHT_DECAY: float = knob("Learner", 0.0, "", "AdamW's weight decay.", low=0)
    MAX_GRAD_NORM: float = knob("Learner", 1.0, "norm", "Gradients are scaled down to this norm.", above=0)
    MICRO_BATCH: int | None = knob("Learner", None, "completions", "Completions per forward and backward pass; must divide PROMPTS_PER_STEP x NUM_GENERATIONS; `auto` plans it.", low=1)
    GRADIENT_CHECKPOINTING: bool = knob("Learner", True, "", "Recompute activations in the backward pass: much less memory, about a third more time.", tiny=False)
    LOSS_TYPE: str = knob("Learner", "bnpo", "", "GRPO variant, TRL's names.", choices=("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"))
    LOSS_IMPL: str = knob("Learner", "liger", "", "`liger`: Liger's chunked fused-linear loss; `trl`: TRL's own fused head.", choices=("liger", "trl"))
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


def parse_value(name: str, text: str) -> Any:
    """The value of setting `name` written as `text`; raises ValueError with a sentence on what is expected."""
    spec, kind, text = FIELDS[name].metadata, FIELDS[name].type, text.strip()
    if kind.endswith("| None"):
        if text.lower() == "auto":
            return None
        kind = kind.removesuffix("| None").strip()
    if kind == "bool":
        if text.lower() not in TRUE + FALSE:
            raise ValueError("expected 1 or 0")
        return text.lower() in TRUE
    if kind == "str":
        value = text.lower() if spec.get("choices") else text
        if spec.get("choices") and value not in spec["choices"]:
            near = difflib.get_close_matches(value, spec["choices"], 1)
            raise ValueError(
                f"expected one of {', '.join(spec['choices'])}" + (f"; nearest: {near[0]}" if near else "")
            )
        if spec.get("pattern"):
            try:
                time.strptime(value, "%Y-%m-%d")
            except ValueError:
                raise ValueError("expected a date such as 2025-11-06") from None
        return value
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError:
        raise ValueError("expected a whole number" if kind == "int" else "expected a number") from None
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
        limits = [f"one of {', '.join(meta['choices'])}"] if meta.get("choices") else []
        limits += [
            f"{sign} {show(meta[key])}" for key, sign in (("low", ">="), ("above", ">"), ("high", "<=")) if key in meta
        ]
        unit = "; ".join(filter(None, ["0 or 1" if spec.type == "bool" else meta["unit"], *limits]))
        tiny = "" if meta["tiny"] is None else show(meta["tiny"])
        yield meta["group"], name, show(spec.default) or "(empty)", tiny, unit, meta["text"]


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
FLASH_PACKAGES = {
    "flash_attention_2": ("flash-attn", "bash scripts/setup.sh --flash-attn"),
    "flash_attention_3": ("flash-attn-3", "build it from the `hopper` folder of the flash-attention repository"),
    "flash_attention_4": ("flash-attn-4", "pip install flash-attn-4"),
}

# Their plain kernels know no attention sinks (https://github.com/huggingface/transformers/pull/42736).
NO_SINKS = ("flash_attention_2", "flash_attention_3")
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

    @property
    def peak(self) -> float:
        return self.weights + self.adapter + max(self.generation, self.learning)


def choose_attention(requested: str, cuda: bool) -> tuple[str, str]:
    """(attention implementation of the learner, reason). Generation by transformers always uses eager attention."""
    if requested != "auto":
        return requested, "set by ATTN_IMPL"
    if not cuda:
        return "eager", "no GPU: eager is the only implementation with attention sinks on a CPU"
    return (
        "eager",
        "exact sinks at any shape; flex_attention compiles anew for each length and was slower in docs/results/",
    )


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


def plan_memory(
    settings: Settings, config: Mapping[str, Any], machine: Machine, prompt_len: int, attention: str
) -> Plan:
    """Memory of a run and, from it, MICRO_BATCH and GENERATION_BATCH where they are `auto`.

    An estimate from shapes: BF16 weights and activations, float32 adapter with gradients and two AdamW moments,
    checkpointed layer inputs plus one layer in full (attention scores, four experts per token) while learning, and the
    key-value cache plus one layer of prefill while generating. `prompt_len` is the longest prompt in tokens.
    """
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    head, kv, top = config["head_dim"], config["num_key_value_heads"], config["num_experts_per_tok"]
    length = prompt_len + settings.MAX_COMPLETION_LEN
    q_and_kv = (heads + 2 * kv) * head
    weights = count_parameters(config)["total"] * 2 / GIB
    lora_parameters = layers * settings.LORA_R * (3 * hidden + q_and_kv + heads * head + hidden)
    adapter = lora_parameters * 16 / GIB

    def learning(rows: int) -> float:
        tokens = rows * length
        scores = rows * heads * length**2 * 2 * 6 if attention == "eager" else 0
        per_token = 2 * (8 * hidden + 4 * q_and_kv + top * (4 * config["intermediate_size"] + 2 * hidden) * 2)
        kept = (
            tokens * hidden * 2 * layers if settings.GRADIENT_CHECKPOINTING else (tokens * per_token + scores) * layers
        )
        head_chunk = min(tokens, 2048) * min(config["vocab_size"], 4096) * 4 * 4 + tokens * hidden * 4 * 2
        return (kept + tokens * per_token + scores + head_chunk) / GIB

    def generation(rows: int) -> float:
        window = min(length, config.get("sliding_window") or length)
        cache = rows * 2 * kv * head * 2 * (length + window) * layers / 2
        prefill = rows * (
            heads * prompt_len**2 * 2 * 3 + prompt_len * 2 * (4 * hidden + 4 * top * config["intermediate_size"])
        )
        return (cache + prefill + rows * config["vocab_size"] * 4 * 3) / GIB

    total = settings.completions_per_step
    # Ten percent stay free for fragmentation and CUDA's own context; a CPU plans with half of what is free.
    room = (machine.gpu_free * 0.9 if machine.gpus else machine.ram_free * 0.5) - weights - adapter
    where = (
        f"{machine.gpu_free:.1f} GiB free on the GPU" if machine.gpus else f"{machine.ram_free:.1f} GiB of free memory"
    )

    def largest(need: Callable[[int], float], most: int) -> int:
        sizes = [n for n in range(1, min(total, most) + 1) if total % n == 0]
        return max((n for n in sizes if need(n) <= room), default=1)

    # Beyond 8 sequences of real length a pass is no faster, only larger; tiny sequences are all overhead.
    most = 64 if length * hidden < 100_000 else 8
    micro, micro_reason = settings.MICRO_BATCH, "set by MICRO_BATCH"
    if micro is None:
        micro = largest(learning, most)
        micro_reason = (
            f"largest divisor of {total} up to {most} whose {learning(micro):.1f} GiB fit beside the weights in {where}"
        )
    chunk, chunk_reason = settings.GENERATION_BATCH, "set by GENERATION_BATCH"
    if chunk is None:
        chunk = largest(generation, total)
        chunk_reason = (
            f"largest divisor of {total} whose cache and prefill ({generation(chunk):.1f} GiB) fit in {where}"
        )
    return Plan(weights, adapter, generation(chunk), learning(micro), micro, micro_reason, chunk, chunk_reason)


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
REAL_MODEL = "openai/gpt-oss-20b"
# config.json of openai/gpt-oss-20b, as far as the plan needs it before anything was downloaded.
REAL_CONFIG = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
DOWNLOAD_GIB = 13.8  # the official checkpoint's safetensors


def read_machine() -> Machine:
    """This machine: its visible GPUs by nvidia-smi, free memory by /proc/meminfo, cores."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        ram = int(meminfo["MemAvailable"].split()[0]) / 2**20
    facts: dict[str, Any] = {
        "ram_free": locals().get("ram", 0.0),
        "cores": os.cpu_count() or 1,
        "arch": platform.machine(),
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or visible.strip() not in ("", "-1"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
        if visible:
            query.append(f"--id={visible}")
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            lines = (
                subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
                .stdout.strip()
                .splitlines()
            )
            name, total, free = (cell.strip() for cell in lines[0].split(","))
            facts |= {"gpu": name, "gpus": len(lines), "gpu_total": int(total) / 1024, "gpu_free": int(free) / 1024}
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


def check_packages(settings: Settings, versions: Mapping[str, str | None], problems: Problems) -> None:
    """Every package is there in a tested version; the chosen FlashAttention is installed."""
    for name, (oldest, untested) in TESTED.items():
        version = versions.get(name)
        if version is None:
            problems.add(
                name, "the package is not installed", "Run `bash scripts/setup.sh` and activate its environment"
            )
        elif not version_key(oldest) <= version_key(version) < version_key(untested) and not settings.ALLOW_UNTESTED:
            fix = "Run `bash scripts/setup.sh` for the tested set, or set ALLOW_UNTESTED=1"
            problems.add(name, f"version {version} is outside the tested range (from {oldest}, below {untested})", fix)
    if settings.USE_VLLM and installed_versions(["vllm"])["vllm"] is None:
        problems.add("USE_VLLM", "vLLM is not installed", "Run `bash scripts/setup.sh --gpu`, or set USE_VLLM=0")
    package, install = FLASH_PACKAGES.get(settings.ATTN_IMPL, (None, None))
    if package and installed_versions([package])[package] is None:
        problems.add(
            "ATTN_IMPL",
            f"{settings.ATTN_IMPL} needs {package}, which is not installed",
            f"Install it ({install}; see docs/install.md)",
        )


def check_settings(settings: Settings, config: Mapping[str, Any] | None, machine: Machine, problems: Problems) -> None:
    """Settings that contradict each other or the machine."""
    total, micro, chunk = settings.completions_per_step, settings.MICRO_BATCH, settings.GENERATION_BATCH
    for name, size in (("MICRO_BATCH", micro), ("GENERATION_BATCH", chunk)):
        if size and total % size:
            near = min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: (abs(n - size), n))
            product = f"PROMPTS_PER_STEP x NUM_GENERATIONS = {settings.PROMPTS_PER_STEP} x {settings.NUM_GENERATIONS} = {total}"
            problems.add(name, f"{size} does not divide {product}", f"The nearest that does is {near}")
    known = ("auto", "eager", "flex_attention", *FLASH_PACKAGES)
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
    if settings.ATTN_IMPL in NO_SINKS:
        what = f"transformers has no {settings.ATTN_IMPL} with gpt-oss's attention sinks and would load a Hub kernel in its place"
        fix = "Set ATTN_IMPL=auto, flex_attention or eager, or name a Hub kernel yourself"
        problems.add("ATTN_IMPL", what, fix)
    targets = [name.strip() for name in settings.LORA_TARGETS.split(",") if name.strip()]
    for target in targets if targets != ["all-linear"] else ():
        if target not in LINEAR_MODULES:
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
    for tracker in filter(None, (name.strip() for name in settings.REPORT_TO.split(","))):
        if tracker not in ("none", "wandb", "tensorboard", "trackio"):
            problems.add("REPORT_TO", f"{tracker!r} is unknown", "Use none, wandb, tensorboard or trackio")
        elif tracker != "none" and installed_versions([tracker])[tracker] is None:
            problems.add("REPORT_TO", f"{tracker} is not installed", f"pip install {tracker}, or set REPORT_TO=none")
    if settings.USE_VLLM and not machine.gpus:
        problems.add("USE_VLLM", "vLLM beside the trainer needs a GPU and none is visible", "Set USE_VLLM=0")
    if settings.USE_VLLM and config and config.get("quantization_config"):
        what = "TRL pushes BF16 experts into an engine that holds this checkpoint's MXFP4 weights and dies (docs/rollouts.md)"
        problems.add("USE_VLLM", what, "Set USE_VLLM=0, or use a BF16 checkpoint")
    if machine.gpus > 1:
        fix = "Make one visible, e.g. CUDA_VISIBLE_DEVICES=0"
        problems.add("CUDA_VISIBLE_DEVICES", f"{machine.gpus} GPUs are visible, this script uses one", fix)


def reward_specs(text: str) -> list[tuple[str, float]]:
    """(name, weight) of each reward function in `REWARDS`; raises ValueError for what is not `name` or `name=weight`."""
    specs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
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


def check_rewards(settings: Settings, rows: Sequence[Row], problems: Problems) -> list[tuple[str, float]]:
    """The reward functions exist, and the CSVs hold what they need. Returns (name, weight) of each."""
    try:
        specs = reward_specs(settings.REWARDS)
        for name, _ in specs:
            load_reward(name)
    except ValueError as error:
        problems.add("REWARDS", str(error), "Write e.g. REWARDS=action,format=0.1 or REWARDS=my_module:my_function")
        return []
    if any(name in ("action", "best") for name, _ in specs):
        for file in sorted({row.file for row in rows if not row.rewards}):
            problems.add(
                f"{file}, columns",
                "there is no column reward_action_0, reward_action_1, ...",
                "Add one per action, or choose other REWARDS",
            )
    return specs


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
        if not folder.exists():
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
            return Path(snapshot_download(model_id, allow_patterns=list(MODEL_FILES), local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(snapshot_download(model_id, allow_patterns=list(MODEL_FILES)))
    except Exception as error:  # offline, no such repository, no access: the user needs the same answer
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "Check the name, the network and `hf auth login`, or set MODEL_ID to a local folder or to tiny"
        problems.add("MODEL_ID", f"{model_id} is not in the cache and cannot be fetched ({reason[:200]})", fix)
        return None


def check_machine(
    settings: Settings, files: ModelFiles | None, machine: Machine, plan: Plan | None, problems: Problems
) -> None:
    """The GPU is there and large enough, and so is the disk."""
    if plan is None or files is None:
        return
    if machine.gpus:
        if plan.peak > machine.gpu_free:
            parts = f"weights {plan.weights:.1f}, adapter {plan.adapter:.1f}, generation {plan.generation:.1f}, learning {plan.learning:.1f}"
            what = f"the run needs about {plan.peak:.0f} GiB ({parts}) and {machine.gpu_free:.0f} of {machine.gpu_total:.0f} GiB are free"
            fix = "Lower MAX_COMPLETION_LEN, MICRO_BATCH or GENERATION_BATCH, free the GPU (nvidia-smi names its users), or rent a larger one"
            problems.add(f"GPU {machine.gpu}", what, fix)
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
    if settings.MODEL_ID == REAL_MODEL and not (files.folder and list(files.folder.glob("*.safetensors"))):
        needs[home] = (DOWNLOAD_GIB, "HF_HOME", "the checkpoint's download")
    for path, (need, name, purpose) in needs.items():
        free = shutil.disk_usage(existing_parent(path)).free / GIB
        if free < need:
            problems.add(
                f"{name}={path}",
                f"{purpose} need {need:.1f} GiB and {free:.1f} GiB are free",
                f"Free space, or point {name} to a larger disk",
            )


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` (or itself) that exists."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path


# ---- Data: CSVs to rendered prompts ----------------------------------------------------------------------------------

REWARD_COLUMN = re.compile(r"reward_action_(\d+)")
# Keyword arguments that TRL itself passes to reward functions: a CSV column of that name goes by `csv_NAME`.
TRL_ARGUMENTS = {"prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments", "truncated"}  # fmt: skip
SHOWN = 20  # problems listed per file: the rest is counted


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
    for part in filter(None, (part.strip() for part in text.split(","))):
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


def read_csv(path: Path, problems: Problems) -> list[Row]:
    """The rows of one CSV. Problems name the file, the row (1 is the first below the header), the column and the line.

    Accepted: a `prompt` column (rendered in Harmony, beginning with `<|start|>`, or plain text, taken as the user's
    message), or `user` with an optional `system`; `reward_action_0` .. `reward_action_{K-1}` with finite numbers, K >= 2,
    for the rewards that need them. Other columns pass through as text.
    """
    mine = Problems()
    csv.field_size_limit(2**31 - 1)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        problems.add(str(path), f"cannot be read ({error.strerror})", "Check the path and its permissions")
        return []
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
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
    if "prompt" not in header and "user" not in header:
        near = difflib.get_close_matches("prompt", header, 1, 0.6)
        mine.add(
            f"{path}, header",
            "there is neither a `prompt` nor a `user` column" + (f" (should {near[0]!r} be `prompt`?)" if near else ""),
            "Add one of them; docs/data.md shows both forms",
        )
    actions = sorted(int(m[1]) for name in header if (m := REWARD_COLUMN.fullmatch(name)))
    if actions and actions != list(range(len(actions))):
        gap = next(k for k in range(len(actions) + 1) if k not in actions)
        mine.add(
            f"{path}, header",
            f"reward_action_{gap} is missing beside {', '.join(f'reward_action_{k}' for k in actions)}",
            "Number the actions from 0 without a gap",
        )
    elif len(actions) == 1:
        mine.add(
            f"{path}, header", "there is only one action, reward_action_0", "GRPO needs at least two actions to compare"
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

# What a resumed run may change: everything else would make it a different run.
MAY_CHANGE = {
    "TOTAL_STEPS", "SAVE_STEPS", "SAVE_TOTAL_LIMIT", "REPORT_TO", "RESUME", "OVERWRITE", "EVAL_DATA", "EVAL_SAMPLES",
    "OUTPUT_DIR", "IGNORE_VARS", "ALLOW_UNTESTED", "GENERATION_BATCH", "ATTN_IMPL", "DATA",
}  # fmt: skip
CHECKPOINT_FILES = ("trainer_state.json", "adapter_model.safetensors", "optimizer.pt", "scheduler.pt")


@dataclass(frozen=True)
class RunState:
    """What OUTPUT_DIR holds: the step and folder of its last complete checkpoint (0 and None for a fresh run)."""

    folder: Path
    step: int = 0
    checkpoint: Path | None = None
    exists: bool = False


def last_checkpoint(folder: Path) -> tuple[int, Path | None]:
    """Step and folder of the last complete checkpoint: one that was cut off while it was written does not count."""
    found = []
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdigit() and all((path / name).is_file() for name in CHECKPOINT_FILES):
            with contextlib.suppress(ValueError, OSError):  # trainer_state.json is written last
                json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
                found.append((int(step), path))
    return max(found, default=(0, None), key=lambda pair: pair[0])


def data_fingerprint(rows: Sequence[Row]) -> str:
    """SHA-256 over everything that training sees of the rows, whatever their files are called."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.messages, row.rewards, sorted(row.columns.items())], default=str).encode())
    return digest.hexdigest()


def inspect_run(settings: Settings, rows: Sequence[Row], problems: Problems) -> RunState:
    """What is in OUTPUT_DIR, with a problem wherever this run must not go on there."""
    folder = Path(settings.OUTPUT_DIR).expanduser()
    where, other = f"OUTPUT_DIR={settings.OUTPUT_DIR}", "choose another OUTPUT_DIR"
    if not settings.OUTPUT_DIR.strip() or (folder.exists() and not folder.is_dir()):
        problems.add(
            where, "it is not a folder" if settings.OUTPUT_DIR.strip() else "it is empty", "Name a folder for the run"
        )
        return RunState(folder)
    if not os.access(existing_parent(folder), os.W_OK):
        problems.add(where, f"{existing_parent(folder)} is not writable", "Choose a folder that is")
    if not folder.exists() or not any(folder.iterdir()):
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
        return RunState(folder, exists=True)
    step, checkpoint = last_checkpoint(folder)
    if settings.RESUME == "never":
        problems.add(
            where,
            f"it holds a run (last checkpoint: step {step}) and RESUME=never",
            f"Set OVERWRITE=1 to delete it, or {other}",
        )
    elif step >= settings.TOTAL_STEPS and (folder / "adapter_model.safetensors").exists():
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
    return RunState(folder, step, checkpoint, exists=True)


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
    plan: Plan | None
    run: RunState


def preflight(environ: Mapping[str, str], machine: Machine | None = None) -> Preflight:
    """Every check that needs no training; all problems are collected, and nothing is written."""
    settings, sources, problems = load_settings(environ)
    machine = machine or read_machine()
    versions = installed_versions(TESTED)
    check_packages(settings, versions, problems)
    files = find_model(settings.MODEL_ID, problems)
    check_settings(settings, files.config if files else None, machine, problems)
    rows = read_rows("DATA", settings.DATA, problems)
    eval_rows = read_rows("EVAL_DATA", settings.EVAL_DATA, problems) if settings.EVAL_SAMPLES else []
    for row in eval_rows:
        if not row.rewards:
            problems.add(
                f"{row.file}, columns",
                "there is no column reward_action_0, reward_action_1, ...",
                "Add them, or set EVAL_SAMPLES=0",
            )
            break
    specs = check_rewards(settings, rows, problems)
    run = inspect_run(settings, rows, problems)
    attention, plan, longest = choose_attention(settings.ATTN_IMPL, machine.gpus > 0), None, 0
    if files and files.tokenizer:
        rows, longest = render_rows(settings, rows, files, problems)
        eval_rows, _ = render_rows(settings, eval_rows, files, problems)
    if files:
        plan = plan_memory(settings, files.config, machine, longest or settings.MAX_PROMPT_LEN, attention[0])
    check_machine(settings, files, machine, plan, problems)
    problems[:] = dict.fromkeys(problems)
    return Preflight(
        settings, sources, problems, machine, versions, files, rows, eval_rows, specs, attention, plan, run
    )


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
        f"  clip range    {s.EPSILON:g} below, {choose_epsilon_high(s)[0]:g} above: {choose_epsilon_high(s)[1]}",
    ]
    if plan := check.plan:
        lines += [
            f"  MICRO_BATCH   {plan.micro_batch}: {plan.micro_batch_reason}",
            f"  GENERATION_BATCH {plan.generation_batch}: {plan.generation_batch_reason}",
            f"  memory        weights {plan.weights:.2f} + adapter {plan.adapter:.2f} + the larger of generation "
            f"{plan.generation:.2f} and learning {plan.learning:.2f} = {plan.peak:.2f} GiB (estimate)",
        ]
    else:
        lines.append(
            "  model         the tiny model is made at the first start (under a minute); prompts are measured then"
        )
    state = f"continues from step {check.run.step}" if check.run.checkpoint else "starts at step 0"
    if check.run.exists and s.OVERWRITE:
        state = "DELETES the run that is there (OVERWRITE=1)"
    lines.append(f"  OUTPUT_DIR    {check.run.folder}: {state}")
    return "\n".join(lines)


def prepare_run(check: Preflight) -> None:
    """Make OUTPUT_DIR ready: delete what OVERWRITE=1 allows, drop what a resumed run will write again."""
    folder, s = check.run.folder, check.settings
    if check.run.exists and s.OVERWRITE:
        shutil.rmtree(folder)
        folder.with_name(folder.name + ".zip").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if check.run.exists and not s.OVERWRITE:
        for path in folder.glob("checkpoint-*"):  # newer than the last complete one: cut off while it was written
            if int(re.sub(r"\D", "", path.name) or 0) > check.run.step:
                shutil.rmtree(path)
        for name in ("metrics.csv", "completions.csv"):
            trim_csv(folder / name, check.run.step)
    record = {
        "settings": dataclasses.asdict(s),
        "sources": check.sources,
        "choices": {
            "attention": check.attention,
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


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# ---- Model -----------------------------------------------------------------------------------------------------------


def load_model(model_path: str, config: Mapping[str, Any], attention: str) -> Any:
    """The base model in BF16 on the GPU, or on the CPU where there is none; MXFP4 experts are dequantized.

    Source: https://huggingface.co/docs/transformers/quantization/mxfp4 (`Mxfp4Config(dequantize=True)`).
    """
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config

    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": attention}
    if (config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    if torch.cuda.is_available():
        options["device_map"] = {"": 0}
    return AutoModelForCausalLM.from_pretrained(model_path, **options)


def lora_config(settings: Settings) -> Any:
    """PEFT's LoRA on the modules of LORA_TARGETS. `all-linear` finds q, k, v and o: the experts are no linear modules."""
    from peft import LoraConfig

    targets: str | list[str] = settings.LORA_TARGETS.strip()
    if targets != "all-linear":
        targets = [name.strip() for name in targets.split(",") if name.strip()]
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
    `_get_train_sampler`, `_generate_single_turn`, `_calculate_rewards`.
    """

    run: RunContext

    def _get_train_sampler(self, dataset: Any = None) -> PromptSampler:
        s, repeats = self.run.settings, self.args.steps_per_generation * self.num_iterations
        return PromptSampler(len(self.run.rows), s.SEED, s.TOTAL_STEPS, s.PROMPTS_PER_STEP, s.NUM_GENERATIONS, repeats)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        import torch

        run, started = self.run, time.perf_counter()
        arguments = (images, multimodal_fields, num_generations, has_tool_images)
        torch.manual_seed(sampling_seed(run.settings.SEED, self.state.global_step, run.stream))
        if self.use_vllm:
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *arguments)
        else:
            completion_ids, logprobs = [], None
            with attention_of(self.model, "eager"):
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
        width = max(len(row.rewards) for row in self.run.rows)
        enriched = [
            {"prompt": prompt, "truncated": one.truncated} | reward_columns(one.row, width)
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
    columns |= {(f"csv_{name}" if name in TRL_ARGUMENTS else name): value for name, value in row.columns.items()}
    return columns | {"prompt_id": row.id}


def reward_callable(name: str, settings: Settings) -> Callable[..., Sequence[float | None]]:
    """A reward function as TRL calls it: named for the logs, given INVALID_REWARD, its errors named."""
    function = load_reward(name)
    options = {"invalid_reward": settings.INVALID_REWARD} if name in ("action", "best") else {}

    def reward(completions: list[str], **columns: Any) -> Sequence[float | None]:
        try:
            return function(completions, **options, **columns)
        except Exception as error:
            raise RuntimeError(f"REWARDS: {name} raised {type(error).__name__}: {error}") from error

    reward.__name__ = name.rpartition(":")[2]
    return reward


# ---- Learner ---------------------------------------------------------------------------------------------------------

# Liger divides these by the tokens of the whole generation batch itself; TRL's accumulation factor is in there already.
TOKEN_NORMALIZED = ("dapo", "cispo", "vespo")


class Learner:
    """Part of the trainer: Liger's chunked GRPO loss in place of TRL's, with the same value and the same gradient.

    Mixed into TRL's GRPOTrainer by `make_trainer`, over `_compute_loss`. TRL dropped its own use of Liger's loss in
    1.13 for a fused head of its own (`LOSS_IMPL=trl`); both hold logits for a tile of tokens and vocabulary at a time.
    """

    run: RunContext

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Loss of one micro-batch: `prompt_ids` (B, P), `completion_ids` (B, C), their masks, `advantages` (B,)."""
        import torch

        if self.run.settings.LOSS_IMPL == "trl":
            return super()._compute_loss(model, inputs)
        base = self.accelerator.unwrap_model(model).get_base_model()
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)  # (B, P + C)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length, mask = inputs["completion_ids"].size(1), inputs["completion_mask"]
        with self.accelerator.autocast():
            hidden = base.model(input_ids=ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        head = base.get_output_embeddings()
        loss, metrics = self.liger_loss()(
            hidden[:, -length - 1 : -1],  # the state before each completion token, (B, C, H)
            head.weight,
            inputs["completion_ids"],
            mask,
            inputs["advantages"],
            bias=head.bias,
            ref_per_token_logps=inputs.get("ref_per_token_logps"),
            old_per_token_logps=inputs.get("old_per_token_logps"),
            vllm_is_ratio=inputs.get("importance_sampling_ratio"),
            num_items_in_batch=inputs["num_items_in_batch"],
        )
        mode = "train" if self.model.training else "eval"
        if self.beta:
            self._metrics[mode]["kl"].append(metrics[0].item())
        self._metrics[mode]["clip_ratio/region_mean"].append(metrics[-1].item())
        if self.loss_type in TOKEN_NORMALIZED or mode == "eval":
            return loss
        return loss / self.current_gradient_accumulation_steps

    def liger_loss(self) -> Any:
        """Liger's fused linear GRPO loss with this run's settings (arXiv:2410.10989)."""
        if getattr(self, "_liger_loss", None) is None:
            from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

            self._liger_loss = LigerFusedLinearGRPOLoss(
                beta=self.beta,
                # The loss math after the chunked projection is a few elementwise operations: compiling it would cost
                # more than it saves, and hosts without a C compiler could not run.
                compiled=False,
                use_ref_model=self.beta != 0.0,
                epsilon_low=self.epsilon_low,
                epsilon_high=self.epsilon_high,
                loss_type=self.loss_type,
                max_completion_length=self.max_completion_length,
                importance_sampling_level=self.importance_sampling_level,
                sapo_temperature_pos=self.args.sapo_temperature_pos,
                sapo_temperature_neg=self.args.sapo_temperature_neg,
                temperature=self.temperature,
                delta=self.args.delta,
                use_bias_correction_kl=self.args.use_bias_correction_kl,
                vespo_k_pos=self.args.vespo_k_pos,
                vespo_lambda_pos=self.args.vespo_lambda_pos,
                vespo_k_neg=self.args.vespo_k_neg,
                vespo_lambda_neg=self.args.vespo_lambda_neg,
            )
        return self._liger_loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL merges its metrics into `logs`; a training step's become a row of metrics.csv."""
        super().log(logs, start_time)
        if "loss" in logs and self.model.training:
            self.run.record_step(self.state.global_step, logs)


def grpo_config(settings: Settings, plan: Plan, cuda: bool) -> Any:
    """TRL's configuration of this run."""
    from trl import GRPOConfig

    s = settings
    trackers = [name.strip() for name in s.REPORT_TO.split(",") if name.strip() not in ("", "none")]
    accumulation = s.completions_per_step // plan.micro_batch
    return GRPOConfig(
        output_dir=str(Path(s.OUTPUT_DIR).expanduser()),
        per_device_train_batch_size=plan.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
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
        use_vllm=s.USE_VLLM,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        bf16=True,
        use_cpu=not cuda,
        gradient_checkpointing=s.GRADIENT_CHECKPOINTING,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="steps",
        save_steps=s.SAVE_STEPS,
        save_total_limit=s.SAVE_TOTAL_LIMIT,
        report_to=trackers or "none",
        seed=s.SEED,
        data_seed=s.SEED,
        dataloader_pin_memory=cuda,
    )


def make_trainer(check: Preflight, run: RunContext, model: Any, tokenizer: Any) -> Any:
    """TRL's GRPOTrainer with this file's Rollouts and Learner over it."""
    import torch
    from datasets import Dataset
    from transformers.trainer_callback import ProgressCallback, TrainerCallback
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
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(type("Bar", (Bar, ProgressCallback), {})(run))
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
    "entropy": ("nats", "Mean entropy of the next-token distribution; only LOSS_IMPL=trl computes it."),
    "clip_fraction": ("share", "Tokens whose policy ratio left the clip range."),
    "rollout_s": ("s", "Time to generate the completions."),
    "reward_s": ("s", "Time to decode and score them."),
    "learn_s": ("s", "Rest of the step: forward, backward, optimizer."),
    "step_s": ("s", "Whole step."),
    "rollout_tokens_per_s": ("tokens/s", "Generated tokens per second of rollout."),
    "gpu_peak_gib": ("GiB", "Most GPU memory allocated during the step; empty without a GPU."),
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
        self.writer = csv.writer(self.file, lineterminator="\n")
        if fresh:
            self.write([dict(zip(self.columns, self.columns, strict=True))])

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.writer.writerows([row[name] for name in self.columns] for row in rows)
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
            csv.writer(file, lineterminator="\n").writerows(dropped)
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(kept)
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


class RunContext:
    """What the parts of the trainer share: rows, plan, timers and the logs of OUTPUT_DIR."""

    def __init__(self, check: Preflight, rows: list[Row], plan: Plan):
        self.settings, self.rows, self.plan, self.folder = check.settings, rows, plan, check.run.folder
        self.metrics = CsvLog(self.folder / "metrics.csv", METRICS)
        self.completions = CsvLog(self.folder / "completions.csv", COMPLETIONS)
        self.seconds = {"rollout": 0.0, "reward": 0.0}
        self.stream = "train"
        self.rollout_tokens = 0
        self.rollout: dict[str, float] = {}
        self.step_started = self.step_seconds = 0.0
        with (self.folder / "metrics.csv").open(newline="", encoding="utf-8") as file:  # of a resumed run
            self.parse_history = [float(row["parse_rate"]) for row in csv.DictReader(file)]
        self.warned_at = -WARN_EVERY
        self.stop_signal = 0
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
        """Write a step's row of metrics.csv and a line of training.log, and warn when answers stop parsing."""
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
        if step - self.warned_at >= WARN_EVERY and (warning := parse_rate_warning(self.parse_history)):
            self.warned_at = step
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


class TerminalHandler(logging.StreamHandler):
    """Writes above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stdout)


def start_logging(folder: Path) -> None:
    """Log to the terminal and to training.log; libraries' messages and Python's warnings go there as well."""
    formatter = logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in (TerminalHandler(), logging.FileHandler(folder / "training.log", encoding="utf-8")):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    log.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # INVALID_REWARD=nan makes TRL print a whole row, prompt included, at every step: parse_rate says it shorter.
    unscorable = "All reward functions returned None"
    logging.getLogger("trl.trainer.grpo_trainer").addFilter(lambda record: unscorable not in record.getMessage())
    sys.excepthook = lambda kind, error, trace: log.critical("the run failed", exc_info=(kind, error, trace))


def write_zip(folder: Path) -> Path:
    """OUTPUT_DIR.zip beside OUTPUT_DIR: everything but optimizer states and half-written files, whole or not at all."""
    target = folder.with_name(folder.name + ".zip")
    temporary = target.with_name(target.name + ".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in sorted(folder.rglob("*")):
            state = path.name in ("optimizer.pt", "scheduler.pt") or path.name.startswith("rng_state")
            if path.is_file() and not state and path.suffix != ".tmp":
                archive.write(path, path.relative_to(folder.parent))
    os.replace(temporary, target)
    return target


# ---- Evaluation on held-out prompts ----------------------------------------------------------------------------------


def evaluate(trainer: Any, rows: Sequence[Row], samples: int) -> dict[str, float]:
    """Mean CSV reward of `samples` completions for each held-out row, with an unparseable answer counted as 0.

    Generated as the rollouts are (same engine, temperature and length), from the same seed before and after training.
    """
    run = trainer.run
    sampled = [row for row in rows for _ in range(samples)]
    prompt_ids = trainer.processing_class(text=[row.prompt for row in sampled])["input_ids"]
    was_training, run.stream, step = trainer.model.training, "evaluation", trainer.state.global_step
    trainer.model.eval()
    trainer.state.global_step = 0  # the seed of the evaluation, before as after
    try:
        completion_ids, _ = trainer._generate_single_turn(prompt_ids, None, {}, samples)
    finally:
        run.stream, trainer.state.global_step = "train", step
        trainer.model.train(was_training)
    read = trainer.read_completions(sampled, completion_ids)
    values = [0.0 if one.action is None else one.row.rewards[one.action] for one in read]
    return {"reward": math.fsum(values) / len(values), **completion_rates(read)}


def report_evaluation(path: Path, results: Mapping[str, Any]) -> str:
    """Write evaluation.json; returns the table that the run prints last."""
    write_text(path, json.dumps(results, indent=2) + "\n")
    lines = ["Held-out mean reward", f"  random action         {results['random']:.3f}"]
    lines.append(f"  best constant action  {results['constant']:.3f}   (always [{results['constant_action']}])")
    for name in ("before", "after"):
        if result := results.get(name):
            lines.append(
                f"  {name + ' training':<21} {result['reward']:.3f}   (parse rate {result['parse_rate']:.2f}, best action {result['best_action_rate']:.2f})"
            )
    return "\n".join([*lines, f"  oracle                {results['oracle']:.3f}"])


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
    problems = [
        f"{word}: no such option. Settings are environment variables: {word.lstrip('-')} python train_grpo.py"
        if "=" in word
        else f"{word}: no such option. There are --help and --check"
        for word in rest
    ]
    check = preflight(os.environ)
    problems += check.problems
    print(banner(check))
    if problems:
        return fail(problems)
    if options.check:
        print("\nEvery check passed. Nothing was started.")
        return 0
    return run(check)


def run(check: Preflight) -> int:
    """Train: everything from here on may take time, memory and a GPU."""
    s, started = check.settings, time.time()
    model_path = s.MODEL_ID
    if check.files is None:  # `tiny` before its first use: make it, then repeat the checks that needed its tokenizer
        import make_model

        print("\nMaking the tiny model (once, under a minute) ...", flush=True)
        make_model.build_tiny()
        check = preflight(os.environ)
        if check.problems:
            return fail(check.problems)
    if s.MODEL_ID == "tiny":
        model_path = str(check.files.folder)
    prepare_run(check)
    start_logging(check.run.folder)
    log.info("\n%s\n", banner(check)) if check.run.checkpoint is None else log.info(
        "continuing from step %d", check.run.step
    )

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    import transformers

    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()
    tokenizer = load_tokenizer(model_path)
    model = load_model(model_path, check.files.config, check.attention[0])
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

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, frame: on_signal(context, number))
    evaluation = context.folder / "evaluation.json"
    results: dict[str, Any] = {}
    if check.eval_rows:
        results = rewards.baselines([row.rewards for row in check.eval_rows])
        with contextlib.suppress(OSError, ValueError, KeyError):  # a resumed run keeps what was measured at its start
            results["before"] = json.loads(evaluation.read_text(encoding="utf-8"))["before"]
        if "before" not in results:
            with trainer.model.disable_adapter():
                results["before"] = evaluate(trainer, check.eval_rows, s.EVAL_SAMPLES)
            report_evaluation(evaluation, results)
            log.info("held-out reward before training: %.3f", results["before"]["reward"])

    trainer.train(resume_from_checkpoint=str(check.run.checkpoint) if check.run.checkpoint else None)

    trainer.save_model(str(context.folder))
    tokenizer.save_pretrained(str(context.folder))
    if context.stop_signal:
        archive = write_zip(context.folder)
        log.warning(
            "interrupted at step %d; the same command continues. So far: %s", trainer.state.global_step, archive
        )
        return 128 + context.stop_signal
    if check.eval_rows:
        results["after"] = evaluate(trainer, check.eval_rows, s.EVAL_SAMPLES)
        log.info("\n%s\n", report_evaluation(evaluation, results))
    archive = write_zip(context.folder)
    peak = f", GPU peak {torch.cuda.max_memory_reserved() / GIB:.1f} GiB" if torch.cuda.is_available() else ""
    log.info(
        "complete: %d steps in %.0f s%s. Adapter: %s, download: %s",
        trainer.state.global_step,
        time.time() - started,
        peak,
        context.folder,
        archive,
    )
    return 0


def on_signal(context: RunContext, number: int) -> None:
    """The first Ctrl-C or SIGTERM ends the run after the step and a checkpoint, the second one at once."""
    if context.stop_signal:
        raise KeyboardInterrupt
    context.stop_signal = number
    log.warning("signal %d: finishing this step and saving a checkpoint; once more ends the run at once", number)


if __name__ == "__main__":
    sys.exit(main())
