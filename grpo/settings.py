# SPDX-License-Identifier: Apache-2.0
"""The table of settings: one line each, read from environment variables, with hints for typos."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import itertools
import json
import logging
import math
import os
import re
import shlex
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import gt, le, lt
from pathlib import Path
from typing import Any

from grpo.other_names import ANSWERS, COMMON, FOREIGN

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("train_grpo")
# Rewards times their weights stay within 1e16: the squares of a step's MOST_COMPLETIONS then sum to less than float32's
# 3e38. Beyond that their standard deviation is infinite, and every advantage 0.
MOST_REWARD, MOST_WEIGHT, MOST_COMPLETIONS = 1e12, 1e4, 100_000
MOST_WHOLE = 10**9  # of a whole number without a limit of its own: plans are computed with it
LEAST_FLOAT, MOST_FLOAT = 1e-30, 1e30  # in size, of a number other than 0: its products stay within float32
# A task is a folder of grpo/tasks with a task.json, which grpo/tasks/simulator.py describes.
TASK_FILES: dict[str, dict[str, Any]] = {
    path.parent.name: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "grpo" / "tasks").glob("*/task.json"))
}
TASKS: dict[str, dict[str, Any]] = {name: record.get("defaults", {}) for name, record in TASK_FILES.items()}
# What the simulators of all tasks measure, by column of metrics.csv, and the names that BEST_BY takes for them.
TASK_FIGURES: dict[str, dict[str, str]] = {
    name: figure for record in TASK_FILES.values() for name, figure in record.get("figures", {}).items()
}
BEST_BY_NAMES = tuple(record["best_by"] for record in TASK_FILES.values() if "best_by" in record)


def setting(group: str, default: Any, unit: str, text: str, **more: Any) -> Any:
    """One setting: its group in `--help`, default, unit, one sentence; `tiny`: the default for `MODEL_ID=tiny` where
    that differs; `resume`: it may change when a run is resumed; limits: `low`, `high` (inclusive), `above`, `choices`;
    `room`: it is a path, beside which names longer by so many bytes are written."""
    facts = {"group": group, "unit": unit, "text": text, "tiny": None, "resume": False}
    return field(default=default, metadata=facts | more)


@dataclass(frozen=True)
class Settings:
    """Every setting of a run, one line each; the name is the environment variable's. None means `auto`."""

    # fmt: off
    MODEL_ID: str = setting("Model", "openai/gpt-oss-20b", "", "Hub id, local folder, or `tiny`: a gpt-oss of 0.3M parameters that comes with the project (data/tiny).", room=0)
    ATTN_IMPL: str = setting("Model", "auto", "", "Attention of the learner: `auto`, `torch_flash` (FlashAttention 2 as torch ships it), `flash_attention_2`, `flash_attention_3`, `flash_attention_4`, `eager`, or a Hub kernel (`kernels-community/...`).", resume=True)
    EXPERTS: str | None = setting("Model", "bf16", "", "The learner's experts on the GPU: `bf16` dequantized once, `mxfp4` quantized (a third of the memory) and dequantized layer by layer, `shared` likewise those of vLLM, with its embeddings and head, on Hopper cards, `paged` as mxfp4 and in host memory while vLLM is awake; `auto`: shared where that can be, else the first of bf16, mxfp4 and paged that fits the GPU.", choices=("bf16", "mxfp4", "shared", "paged"), resume=True)
    LORA_R: int = setting("Model", 4, "rank", "Rank of the LoRA adapter.", tiny=8, low=1)
    LORA_ALPHA: float = setting("Model", 8.0, "", "LoRA scale: updates are multiplied by LORA_ALPHA / LORA_R.", tiny=16.0, above=0, high=10_000)
    LORA_TARGETS: str = setting("Model", "all-linear", "", "What gets an adapter: `all-linear` (q, k, v and o projections) or some of these, `experts` of all layers or `7.experts` of one, separated by commas.")
    LORA_DROPOUT: float = setting("Model", 0.0, "share", "Dropout on the adapter's input while learning.", low=0, high=0.9)
    INIT_ADAPTER: str = setting("Model", "", "folder", "LoRA adapter that the run starts from instead of a fresh one, such as scripts/sft.py makes: its rank, alpha and targets take the place of the defaults. Empty: a fresh one.", room=0)

    TASK: str = setting("Data", "tes", "", "What is learned: other defaults of DATA, REWARDS, SYSTEM_PROMPT and more (docs/tasks.md).", choices=tuple(TASK_FILES))
    DATA: str = setting("Data", "data/tes_train.csv", "", "Training rows, separated by commas: CSV, JSON-lines and Parquet files, globs, data sets of the Hub (`org/name:config:split`).", tiny="data/tes_train_compact.csv", resume=True)
    EVAL_DATA: str | None = setting("Data", None, "", "Held-out rows, named as in DATA, for the evaluations; `auto`: EVAL_SHARE of DATA is held out, and of the demo's DATA the rows that come with it.", resume=True)
    EVAL_SHARE: float = setting("Data", 0.1, "share", "Share of DATA that is held out where EVAL_DATA is auto: whole days where rows carry a date, else whole prompts, 64 at most; 0 holds nothing out.", low=0, high=0.5)
    EVAL_SAMPLES: int = setting("Data", 4, "completions", "Completions per held-out prompt, and runs through the closed loop, in every evaluation; 0 skips them all.", tiny=8, low=0, high=1000, resume=True)
    EVAL_TEMPERATURE: float = setting("Data", 0.5, "", "Sampling temperature of every evaluation; beside it the greedy answer is measured.", above=0, high=10, resume=True)
    EVAL_STEPS: int = setting("Data", 50, "steps", "Steps between two evaluations while it trains; 0: only before and after.", tiny=100, low=0, resume=True)
    BEST_BY: str | None = setting("Data", None, "", "Figure by which the best adapter of the evaluated steps is kept: `reward` (held-out), or that of the task's simulator, `plant` (regret of the closed loop); `auto`: the latter where the simulator runs.", choices=(*BEST_BY_NAMES, "reward"), resume=True)
    EVAL_PROFILE: str | None = setting("Data", None, "", "Input files of the task's simulator: hourly profiles of the TES plant for the closed loop before and after training, where the held-out prompts are the plant's; `auto`: the demo's for the demo's rows, else no simulation; empty skips it.", resume=True)
    SYSTEM_PROMPT: str = setting("Data", "", "", "System message of rows that are not rendered and have none; gpt-oss's template puts it into the developer message.")
    REASONING_EFFORT: str = setting("Data", "medium", "", "Reasoning effort that the chat template writes into prompts which are not rendered yet.", tiny="low", choices=("low", "medium", "high"))
    PROMPT_DATE: str = setting("Data", "2025-11-06", "date", "Current date that the chat template writes, fixed so that a resumed run sees the same prompts.", date=True)
    MAX_PROMPT_LEN: int = setting("Data", 2048, "tokens", "Longest prompt that is accepted; a longer one is an error, never cut.", tiny=256, low=1)

    REWARDS: str | None = setting("Rewards", None, "", "Reward functions, `name=weight,...`: regret, action, best, shortfall, format, gsm8k, or `module:function`; `auto`: regret if every training row has q_action_k, else action.")
    INVALID_REWARD: float | None = setting("Rewards", None, "reward", "Reward of an answer that cannot be parsed; `auto`: a tenth of the row's range below its worst action; `nan` leaves it out of its group.", low=-MOST_REWARD, high=MOST_REWARD, nan=True)
    SCALE_REWARDS: str | None = setting("Rewards", None, "", "Divide advantages by the standard deviation of the group, of the batch, or not at all; `auto`: batch with regret or shortfall, else group.", choices=("group", "batch", "none"))
    MASK_TRUNCATED: bool = setting("Rewards", False, "", "Leave completions that met MAX_COMPLETION_LEN out of the loss (bad length then costs nothing).")

    USE_VLLM: bool | None = setting("Rollouts", None, "", "Generate with vLLM beside the trainer (MXFP4 weights, asleep while learning) instead of transformers; `auto`: on a GPU.", resume=True)
    ROLLOUT_SYNC: str | None = setting("Rollouts", None, "", "Weight sync, how vLLM gets the adapter: `merge` pushes merged attention weights, rounded at random, `lora` loads the adapter natively; `auto`: lora with experts in LORA_TARGETS, else merge.", choices=("merge", "lora"), resume=True)
    VLLM_GPU_MEM: float | None = setting("Rollouts", None, "share", "The most of the whole GPU that vLLM may take while awake; `auto` plans it from one step's key-value cache and the free memory.", above=0, high=0.95, resume=True)
    VLLM_EAGER: bool = setting("Rollouts", False, "", "Run vLLM without compilation and CUDA graphs: starts faster, generates slower (its kernels in Triton need a C compiler all the same).", resume=True)
    IS_CORRECTION: str = setting("Rollouts", "token_truncate", "", "Importance-sampling correction of vLLM's probabilities, TRL's modes, or `none`.", choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"))
    IS_CLIP_MAX: float = setting("Rollouts", 3.0, "ratio", "Importance ratios are truncated or masked above this.", above=1)
    PARITY: str = setting("Rollouts", "on", "", "Train/inference mismatch check: compare vLLM's log-probs with the trainer's before the first step, and stop (exit code 3) where they differ.", choices=("on", "off"), resume=True)
    PARITY_LIMIT: float = setting("Rollouts", 0.05, "nats", "Largest mean difference of log-probs that the mismatch check accepts.", above=0, resume=True)
    PROMPTS_PER_STEP: int = setting("Rollouts", 12, "prompts", "Prompts per optimizer step.", tiny=8, low=1, high=MOST_COMPLETIONS)
    NUM_GENERATIONS: int = setting("Rollouts", 8, "completions", "Completions per prompt: the group that advantages compare.", low=2, high=MOST_COMPLETIONS)
    GENERATION_BATCH: int | None = setting("Rollouts", None, "completions", "Completions that transformers generates at once; must divide PROMPTS_PER_STEP x NUM_GENERATIONS; `auto` plans it from the free memory.", low=1, resume=True)
    MAX_COMPLETION_LEN: int = setting("Rollouts", 4000, "tokens", "Longest completion; one that meets it counts as truncated.", tiny=12, low=1)
    TEMPERATURE: float = setting("Rollouts", 1.0, "", "Sampling temperature of the rollouts; the loss uses the same.", tiny=1.5, above=0, high=10)
    TOP_P: float = setting("Rollouts", 1.0, "probability", "Nucleus sampling; below 1 the sampled and the trained distribution differ.", above=0, high=1)

    TOTAL_STEPS: int = setting("Learner", 100, "steps", "Optimizer steps of the whole run, resumed parts included.", tiny=400, low=1, resume=True)
    NUM_TRAIN_EPOCHS: float | None = setting("Learner", None, "epochs", "Rounds over the training rows, in place of TOTAL_STEPS: that is then rows x NUM_TRAIN_EPOCHS / PROMPTS_PER_STEP, rounded up; `auto`: TOTAL_STEPS says.", above=0, high=1e6, resume=True)
    LEARNING_RATE: float = setting("Learner", 5e-5, "", "Peak learning rate of AdamW.", tiny=4e-3, above=0, high=1)
    LR_SCHEDULER: str = setting("Learner", "constant_with_warmup", "", "Learning-rate schedule; linear and cosine fall to 0 at TOTAL_STEPS, so the rate jumps up again where a finished run is given more steps.", tiny="linear", choices=("constant", "constant_with_warmup", "linear", "cosine"))
    WARMUP_STEPS: int = setting("Learner", 0, "steps", "Steps over which the learning rate rises from 0.", low=0)
    WEIGHT_DECAY: float = setting("Learner", 0.0, "", "AdamW's weight decay.", low=0, high=10)
    MAX_GRAD_NORM: float = setting("Learner", 1.0, "norm", "Gradients are scaled down to this norm.", above=0)
    MICRO_BATCH: int | None = setting("Learner", None, "completions", "Completions of MAX_COMPLETION_LEN in one micro-batch (of shorter ones it takes more); a matter of memory, never of what is learned; `auto` plans it.", low=1, resume=True)
    PACKING: str | None = setting("Learner", None, "", "`prefix` computes a prompt once for all its completions, `none` once for each; `auto`: prefix where the attention supports it.", choices=("prefix", "none"), resume=True)
    GRADIENT_CHECKPOINTING: bool = setting("Learner", True, "", "Recompute activations in the backward pass: much less memory, about a third more time.", tiny=False)
    LOSS_TYPE: str = setting("Learner", "bnpo", "", "GRPO variant, TRL's names; the loss is Liger's.", choices=("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"))
    BETA: float = setting("Learner", 0.0, "", "Weight of the KL penalty against the base model; 0 saves a forward pass.", low=0, high=1000)
    EPSILON: float = setting("Learner", 0.2, "", "Lower clip range of the policy ratio.", above=0)
    EPSILON_HIGH: float | None = setting("Learner", None, "", "Upper clip range; `auto` is EPSILON, 5.0 for cispo.", above=0)
    SEED: int = setting("Learner", 42, "", "Seed of prompt order, adapter initialization and sampling.", low=0, high=2**31 - 1)

    OUTPUT_DIR: str = setting("Output", "runs/gpt-oss-20b", "", "Folder of the run; OUTPUT_DIR.zip is written beside it.", tiny="runs/tiny", resume=True, room=16)
    LOG_PROMPTS: bool = setting("Output", False, "", "Write each prompt into completions.csv, beside its completion.")
    SAVE_STEPS: int = setting("Output", 10, "steps", "Steps between checkpoints.", tiny=50, low=1, resume=True)
    SAVE_TOTAL_LIMIT: int = setting("Output", 3, "checkpoints", "Checkpoints that are kept.", low=1, resume=True)
    OVERWRITE: bool = setting("Output", False, "", "Delete the run that is in OUTPUT_DIR and start again.", resume=True)
    REPORT_TO: str = setting("Output", "none", "", "Trackers of the Trainer, separated by commas: none, wandb, tensorboard, trackio.", resume=True)
    ALLOW_UNTESTED: bool = setting("Output", False, "", "Go on with package versions outside the tested range.", resume=True)
    IGNORE_VARS: str = setting("Output", "", "", "Variables of other programs that look like a mistyped setting, separated by commas.", resume=True)
    # fmt: on

    @property
    def completions_per_step(self) -> int:
        return self.PROMPTS_PER_STEP * self.NUM_GENERATIONS


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
MAY_CHANGE = {name for name, spec in FIELDS.items() if spec.metadata["resume"]}
# Values that other programs take, and why they are refused here.
REFUSED = {
    "ATTN_IMPL=flex_attention": "it was removed: ATTN_IMPL=torch_flash (or auto) replaces it",
    "ATTN_IMPL=sdpa": "it knows no attention sinks, so transformers refuses it for gpt-oss: take auto",
}


def listed(text: str) -> list[str]:
    """The parts of a comma-separated setting, without spaces around them and without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


class Problems(list[str]):
    """What is wrong with the input: collected, so that the user fixes everything in one go."""

    def add(self, where: str, what: str, fix: str) -> None:
        """One line, whatever a name or a message of another program holds."""
        self.append(one_line(f"{where}: {what}. {fix}"))


class InputError(ValueError):
    """The input is wrong; `args` are the problems, each a sentence for the user."""


def one_line(text: str, most: int = 2000) -> str:
    """A text without its line ends, and without its middle where it has more than `most` characters."""
    text = " ".join(text.splitlines())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def show(value: Any) -> str:
    """A setting's value as a user would write it: `auto` for None, 1 and 0 for booleans."""
    return "auto" if value is None else f"{value:g}" if isinstance(value, (float, bool)) else str(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that names the word which was probably meant, or nothing."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; the nearest is {near[0]}" if near else ""


def read_number(text: str, kind: Callable[[str], Any] = float) -> Any:
    """A number as people write it: Python also reads the digits of every script, and `1_0` as 10. Raises ValueError."""
    if not text.isascii() or "_" in text:
        raise ValueError(f"{text!r} is not written in plain digits")
    return kind(text)


def is_text(text: str) -> bool:
    """Whether a text can be written: file names, the environment and JSON may hold what is none (lone surrogates)."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def path_fault(path: str | Path, room: int = 0) -> str | None:
    """Why there can be no file at `path`, or None: one that is merely missing can. `room`: bytes that the names beside it
    are longer."""
    if any(len(os.fsencode(part)) + room > 255 for part in Path(path).parts):
        return f"a name in it has more than {255 - room} bytes"
    try:
        os.stat(Path(path).expanduser())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no access, no such user
        return getattr(error, "strerror", None) or str(error)
    return None


def keep_compiled_private() -> None:
    """Have torch keep what it compiles below the user's cache folder, where that can be written: its default is a folder in
    /tmp whose name anybody can take before, and it runs what it finds there. Called before torch is imported."""
    with contextlib.suppress(OSError, RuntimeError):  # no access, no home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "torchinductor"
        if os.access(next(place for place in (folder, *folder.parents) if place.exists()), os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def described(error: BaseException) -> str:
    """What was raised, in one line, even where it cannot be told in words."""
    try:
        said = str(error)
    except Exception:
        said = ""
    return one_line(": ".join(filter(None, (type(error).__name__, said))), 300)


def choices(name: str) -> tuple[str, ...]:
    """The words that setting `name` takes, `auto` first where it takes that; empty where it is no choice."""
    words = FIELDS[name].metadata.get("choices", ())
    return ("auto", *words) if words and FIELDS[name].type.endswith("| None") else words


def parse_value(name: str, text: str) -> Any:
    """The value of setting `name` written as `text`; raises ValueError with a sentence on what is expected."""
    spec, text = FIELDS[name].metadata, text.strip()
    kind, optional, _ = FIELDS[name].type.partition(" | None")
    if not is_text(text):
        raise ValueError("it holds bytes that are not UTF-8")
    if optional and text.lower() == "auto":
        return None
    if reason := REFUSED.get(f"{name}={text}"):
        raise ValueError(reason)
    if kind == "bool":
        if text.lower() not in TRUE + FALSE:
            raise ValueError("expected auto, 1 or 0" if optional else "expected 1 or 0")
        return text.lower() in TRUE
    if known := choices(name):
        if text.lower() not in known:
            raise ValueError(f"expected one of {', '.join(known)}{nearest(text.lower(), known)}")
        return text.lower()
    if spec.get("date"):
        with contextlib.suppress(ValueError):
            # strftime writes an earlier year in three digits, and strptime does not read them.
            if text.isascii() and (day := time.strptime(text, "%Y-%m-%d")).tm_year >= 1000:
                return time.strftime("%Y-%m-%d", day)
        raise ValueError("expected a date such as 2025-11-06")
    if "room" in spec and (fault := path_fault(text, spec["room"])):
        raise ValueError(fault)
    if kind == "str":
        return text
    try:
        value = read_number(text, int if kind == "int" else float)
    except ValueError:
        expected = "expected a whole number" if kind == "int" else "expected a number"
        raise ValueError(expected + (" or auto" if optional else "")) from None
    if kind == "float" and not math.isfinite(value) and not (spec.get("nan") and math.isnan(value)):
        raise ValueError("expected a finite number" + (" or nan" if spec.get("nan") else ""))
    limits = {"high": MOST_WHOLE if kind == "int" else MOST_FLOAT} | spec
    for limit, words, wrong in (("low", "at least", lt), ("above", "above", le), ("high", "at most", gt)):
        if limit in limits and wrong(value, limits[limit]):
            raise ValueError(f"must be {words} {show(limits[limit])}")
    if kind == "float" and 0 < abs(value) < LEAST_FLOAT:
        raise ValueError(f"float32 cannot compute with it: the least in size is {LEAST_FLOAT:g}")
    return value


def nearest_setting(variable: str) -> str | None:
    """The setting that an environment variable was probably meant to be, or None for somebody else's variable. Short
    names are matched but for their case and underscores (`SPEED` is not `SEED`), longer ones if they are alike."""
    name = canonical_name(variable)
    known = {form: ours for ours in FIELDS for form in (ours.replace("_", ""), f"{ours}S")}
    near = difflib.get_close_matches(name, [ours for ours in FIELDS if len(ours) > 4], 1, cutoff=0.83)
    return known.get(name) or known.get(name.replace("_", "")) or (near[0] if near else None)


def canonical_name(word: str) -> str:
    """A flag or a variable as settings are written: `--num-generations` as NUM_GENERATIONS."""
    return word.lstrip("-").upper().replace("-", "_")


def remedy(answer: str, value: str) -> str:
    """An answer of grpo/other_names.py with the value in it; where the setting that it names refuses it, the reason."""
    if answer.endswith("={}"):
        setting = answer.removeprefix("set ").removesuffix("={}")
        return next(iter(load_settings({setting: value})[2]), answer.replace("{}", shlex.quote(value) if value else ""))
    return answer.replace("{}", value)


def flag_answers(words: Sequence[str]) -> list[str]:
    """What to do instead, for each part of a command line that is no option here: `--num-generations 8: set
    NUM_GENERATIONS=8`. Where the setting would refuse the value, the reason."""
    answers, flags = [], []
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            flags.append(word.split("=", 1))
        elif flags:
            flags[-1].append(word)
        else:
            answers.append(f"{word}: settings stand before `python`")
    for flag, *values in flags:
        name, value = canonical_name(flag), ",".join(values)
        positive = name.removeprefix("NO_")
        setting = nearest_setting(positive)
        answer = ANSWERS.get(positive) or (f"set {setting}={{}}" if setting else "no such setting, --help lists them")
        if not value and answer.endswith("={}") and "bool" in FIELDS[answer[len("set ") : -len("={}")]].type:
            value = "1" if name == positive else "0"
        answers.append(f"{' '.join([flag, *values])}: {remedy(answer, value)}")
    return answers


def unknown_variables(environ: Mapping[str, str]) -> tuple[Problems, list[str]]:
    """Variables that look like settings and are none: (problems, warnings about words that any program may export)."""
    problems, warnings = Problems(), []
    for variable in sorted(set(environ) - set(FIELDS) - set(listed(environ.get("IGNORE_VARS", "")))):
        name, ignore = canonical_name(variable), f"IGNORE_VARS={variable} if it belongs to another program"
        value = environ[variable].strip().encode("utf-8", "backslashreplace").decode()
        if name in FOREIGN.split() or (name in COMMON.split() and not value):
            continue
        if answer := ANSWERS.get(name):
            fix = one_line(remedy(answer, value), 300)
            if name in COMMON.split():
                warnings.append(f"{variable} is set and is no setting: {fix}; or {ignore}")
            else:
                problems.add(variable, "no such setting", f"{fix[0].upper()}{fix[1:]}; or {ignore}")
        elif meant := nearest_setting(variable):
            problems.add(variable, f"no such setting, the nearest is {meant}", f"Write {meant}, or {ignore}")
    return problems, warnings


def load_settings(environ: Mapping[str, str]) -> tuple[Settings, dict[str, str], Problems]:
    """Settings from the environment, where each value came from (`default`, `tiny`, the task or `environment`), and
    problems."""
    problems, values, sources = Problems(), {}, {}
    tiny, task = environ.get("MODEL_ID", "").strip() == "tiny", environ.get("TASK", "").strip().lower()
    for name, spec in FIELDS.items():
        values[name], sources[name] = spec.default, "default"
        if tiny and spec.metadata["tiny"] is not None:
            values[name], sources[name] = spec.metadata["tiny"], "tiny"
        if name in TASKS.get(task, {}):
            values[name], sources[name] = TASKS[task][name], task
        if (text := environ.get(name)) is not None:
            try:
                values[name], sources[name] = parse_value(name, text), "environment"
            except ValueError as error:
                default = show(values[name])
                what = f"{one_line(repr(text), 200)} is not accepted, {error}"
                problems.add(name, what, f"Unset it for the default ({default})")
    problems.extend(unknown_variables(environ)[0])
    return Settings(**values), sources, problems


def assignment(text: str) -> tuple[str, str]:
    """(name, value) of NAME=VALUE, as an option of a command. Raises argparse.ArgumentTypeError."""
    name, sign, value = text.partition("=")
    if not sign or not name.isupper():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as LEARNING_RATE=1e-3")
    return name, value


def number(low: float, high: float, kind: type = float) -> Callable[[str], float]:
    """An argparse type: a finite number from low to high."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind.__name__} from {low:g} to {high:g}")
        return value

    return parse


def settings_table() -> Iterator[tuple[str, str, str, str, str, str]]:
    """(group, name, default, default for tiny or '', unit and limits, sentence) of every setting, in order."""
    for name, spec in FIELDS.items():
        meta = spec.metadata
        signs = {"low": ">=", "above": ">", "high": "<="}
        limits = [f"one of {', '.join(choices(name))}"] if choices(name) else []
        limits += [f"{sign} {show(meta[key])}" for key, sign in signs.items() if key in meta]
        flags = {"bool": "0 or 1", "bool | None": "auto, 0 or 1"}
        unit = "; ".join(filter(None, [flags.get(spec.type, meta["unit"]), *limits]))
        tiny = "" if meta["tiny"] is None else show(meta["tiny"])
        yield meta["group"], name, show(spec.default) or "(empty)", tiny, unit, meta["text"]


HELP_WIDTH = 100  # columns


def wrapped(line: str, indent: int) -> list[str]:
    """A line in lines of at most HELP_WIDTH columns, those after the first with this indent."""
    options = {"subsequent_indent": " " * indent, "break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, HELP_WIDTH, **options) or [""]


def fold(about: str | None) -> str:
    """A script's docstring for `--help`: paragraphs filled anew, commands with what stands beside them broken below it."""
    lines: list[str] = []
    for prose, part in itertools.groupby((about or "").strip().splitlines(), lambda line: line[:1].strip() != ""):
        if prose:
            lines += wrapped(" ".join(part), 0)
        for line in () if prose else part:
            beside = re.match(r" +\S.*? {2,}|", line).end() or 8
            lines += wrapped(line, beside)
    return "\n".join(lines)


def help_text(about: str) -> str:
    """The text of `--help`: what the program is `about`, and every setting, grouped."""
    lines = [fold(about), ""]
    for group, settings in itertools.groupby(settings_table(), lambda row: row[0]):
        lines += ["", f"{group}:"]
        for _, name, default, tiny, unit, text in settings:
            more = (f"   (tiny: {tiny})" if tiny else "") + (f"   [{unit}]" if unit else "")
            lines += wrapped(f"  {name}={default}{more}", 10) + wrapped(f"      {text}", 6)
    return "\n".join(lines)
