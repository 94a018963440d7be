# SPDX-License-Identifier: Apache-2.0
"""The table of settings: one line each, read from environment variables, with hints for typos."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("train_grpo")


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


def help_text(about: str) -> str:
    """The text of `--help`: what the program is `about`, and every setting, grouped."""
    lines, group = [about.strip(), ""], None
    for section, name, default, tiny, unit, text in settings_table():
        if section != group:
            lines += ["", f"{section}:"]
            group = section
        lines.append(f"  {name}={default}" + (f"   (tiny: {tiny})" if tiny else "") + (f"   [{unit}]" if unit else ""))
        lines.append(f"      {text}")
    return "\n".join(lines)
