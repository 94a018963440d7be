# SPDX-License-Identifier: Apache-2.0
"""The table of settings: every environment variable with its default, limits and meaning."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

# Rewards times their weights stay within 1e16: the squares of a step's MOST_COMPLETIONS then sum to less than float32's
# 3e38. Beyond that their standard deviation is infinite, and every advantage is 0.
MOST_REWARD, MOST_WEIGHT, MOST_COMPLETIONS = 1e12, 1e4, 100_000
Default = TypeVar("Default")
Value = str | int | float | bool | None
# A task is a folder of grpo/tasks with a task.json, which grpo/tasks/simulator.py describes.
TASK_FILES: dict[str, dict[str, Any]] = {
    path.parent.name: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parents[1] / "tasks").glob("*/task.json"))
}
TASKS: dict[str, dict[str, Value]] = {name: record.get("defaults", {}) for name, record in TASK_FILES.items()}
# The figures of all tasks' simulators by their column of metrics.csv, and the values of BEST_BY that choose by one.
TASK_FIGURES: dict[str, dict[str, str]] = {
    name: figure for record in TASK_FILES.values() for name, figure in record.get("figures", {}).items()
}
BEST_BY_NAMES = tuple(record["best_by"] for record in TASK_FILES.values() if "best_by" in record)


def setting(
    group: str, default: Default, unit: str = "", text: str = "", **metadata: Value | tuple[str, ...]
) -> Default:
    """One setting: its group in `--help`, its default, its unit and what it means in one sentence.

    `metadata` may hold `tiny`, the default for `MODEL_ID=tiny` if that differs; `resume`, whether the setting may
    change when a run is resumed; the limits `low` and `high` (inclusive), `above` and `choices`; `date` for a day;
    `nan` if NaN is accepted; and `path` for a file or folder."""
    return field(default=default, metadata={"group": group, "unit": unit, "text": text, "tiny": None, **metadata})


@dataclass(frozen=True)
class Settings:
    """Every setting of a run; the field's name is the environment variable's. None means `auto`.

    To add a setting, add a field: it is then read, checked against its limits, and listed by `--help`. Run
    `python scripts/dev/make_docs.py` for docs/settings.md. Rules between settings belong into grpo/preflight/checks.py,
    and what `auto` means into grpo/preflight/choices.py, which leaves no setting of a resolved run at None."""

    # fmt: off
    MODEL_ID: str = setting("Model", "openai/gpt-oss-20b", path=True, text=
        "Hub id, local folder, or `tiny`: a gpt-oss of 0.3M parameters that comes with the project (data/tiny).")
    ATTN_IMPL: str = setting("Model", "auto", resume=True, text=
        "Attention of the learner: `auto`, `torch_flash` (torch's FlashAttention 2), `flash_attention_2`, "
        "`flash_attention_3`, `eager`, or a Hub kernel (`kernels-community/...`).")
    EXPERTS: str | None = setting("Model", None, choices=("bf16", "mxfp4", "shared", "paged"), resume=True, text=
        "How the learner holds the experts (docs/memory.md): `bf16` dequantized once; `mxfp4` in a third of the "
        "memory; `shared` in vLLM's own copy (Hopper cards); `paged` in host memory while vLLM is awake; `auto`: "
        "what fits.")
    GPU_MEM_LIMIT: float | None = setting("Model", None, "GiB", above=0, high=10_000, resume=True, text=
        "Most memory of each GPU that the run may take, vLLM included; `auto`: all that is free.")
    LORA_R: int = setting("Model", 4, "rank", tiny=8, low=1, text="Rank of the LoRA adapter.")
    LORA_ALPHA: float = setting("Model", 8.0, tiny=16.0, above=0, high=10_000, text=
        "LoRA scale: updates are multiplied by LORA_ALPHA / LORA_R.")
    LORA_TARGETS: str = setting("Model", "all-linear", text=
        "Modules that get an adapter, separated by commas: `all-linear` (q_proj, k_proj, v_proj, o_proj), single ones "
        "of these, `experts`, `7.experts` (those of layer 7).")
    LORA_DROPOUT: float = setting("Model", 0.0, "share", low=0, high=0.9, text=
        "Dropout on the adapter's input while learning.")
    INIT_ADAPTER: str = setting("Model", "", "folder", path=True, text=
        "LoRA adapter to start from, such as one from scripts/sft.py, with its rank, alpha and targets.")

    TASK: str = setting("Data", "tes", choices=tuple(TASKS), text=
        "What is learned: sets the defaults of DATA, REWARDS, SYSTEM_PROMPT and more (docs/tasks.md).")
    DATA: str = setting("Data", "data/tes_train.csv", tiny="data/tes_train_compact.csv", resume=True, text=
        "Training rows, separated by commas: CSV, JSON-lines and Parquet files, globs, data sets of the Hub "
        "(`org/name:config:split`).")
    EVAL_DATA: str | None = setting("Data", None, resume=True, text=
        "Held-out rows for evaluations, in the form of DATA; `auto`: EVAL_SHARE of DATA (the demo has its own).")
    EVAL_SHARE: float = setting("Data", 0.1, "share", low=0, high=0.5, text=
        "Share of DATA that is held out: whole days where rows have a date, else whole prompts.")
    EVAL_SAMPLES: int = setting("Data", 4, "completions", tiny=8, low=0, high=1000, resume=True, text=
        "Completions per held-out prompt, and passes through the closed loop; 0 skips evaluations.")
    EVAL_TEMPERATURE: float = setting("Data", 0.5, above=0, high=10, resume=True, text=
        "Sampling temperature of evaluations (vLLM: 0.01 to 2).")
    EVAL_EXACT: bool = setting("Data", True, resume=True, text=
        "Evaluate small models by the probabilities of all answers `[k]`; set 0 for one that reasons.")
    EVAL_STEPS: int = setting("Data", 50, "steps", tiny=100, low=0, resume=True, text=
        "Steps between evaluations; 0: evaluate only before and after training.")
    BEST_BY: str | None = setting("Data", None, choices=(*BEST_BY_NAMES, "reward"), resume=True, text=
        "What chooses the best adapter: held-out `reward`, or `plant`, the closed loop's regret; `auto`: plant if it "
        "is simulated.")
    EVAL_PROFILE: str | None = setting("Data", None, resume=True, text=
        "Input files of the task's simulator: hourly profiles for the plant's closed loop; `auto`: the demo's for the "
        "demo's rows, else none.")
    SYSTEM_PROMPT: str = setting("Data", "", text=
        "System message of rows without one.")
    PROMPT_TEMPLATE: str = setting("Data", "{}", text=
        "The user's message in rows with one question, which `{}` stands for.")
    REASONING_EFFORT: str = setting("Data", "medium", tiny="low", choices=("low", "medium", "high"), text=
        "Reasoning effort that the chat template writes into prompts.")
    PROMPT_DATE: str = setting("Data", "2025-11-06", "date", date=True, text=
        "Current date in prompts, fixed so that a resumed run sees the same.")
    MAX_PROMPT_LEN: int = setting("Data", 2048, "tokens", tiny=256, low=1, text=
        "Longest prompt; a longer one is an error, never cut.")

    REWARDS: str | None = setting("Rewards", None, text=
        "Reward functions, `name=weight,...`: regret, cost, action, best, format, gsm8k, gsm8k_strict, overlong, "
        "or `module:function`; `auto`: regret if every training row has q_action_k, else action.")
    INVALID_REWARD: float | None = setting(
        "Rewards", None, "reward", low=-MOST_REWARD, high=MOST_REWARD, nan=True, text=
        "Reward of an unreadable answer; `auto`: a tenth of the row's range below its worst action; `nan` leaves it "
        "out of its group.")
    OVERLONG_SHARE: float = setting("Rewards", 0.2, "share", above=0, high=1, text=
        "Last part of MAX_COMPLETION_LEN over which the reward `overlong` falls from 0 to -1.")
    SCALE_REWARDS: str | None = setting("Rewards", None, choices=("group", "batch", "none"), text=
        "Divide advantages by the standard deviation of the group, of the batch, or not at all; `auto`: group.")
    EXPECTED_REWARD: bool | None = setting("Rewards", None, text=
        "Learn at the answer `[k]` from the rewards of all actions (docs/answers.md); `auto`: with DIRECT_ANSWERS.")
    DIRECT_ANSWERS: bool = setting("Rewards", False, text=
        "Make one token the answer (docs/answers.md).")
    MASK_TRUNCATED: bool = setting("Rewards", False, text=
        "Leave completions that reach MAX_COMPLETION_LEN out of the loss, so that running on costs nothing.")

    USE_VLLM: bool | None = setting("Rollouts", None, resume=True, text=
        "Generate with vLLM instead of transformers; `auto`: on a GPU.")
    ROLLOUT_SYNC: str | None = setting("Rollouts", None, choices=("merge", "lora"), resume=True, text=
        "How vLLM gets the adapter: `merge` pushes merged attention weights, `lora` loads the adapter natively; "
        "`auto`: lora with experts in LORA_TARGETS, else merge.")
    VLLM_GPU_MEM: float | None = setting("Rollouts", None, "share", above=0, high=0.95, resume=True, text=
        "Most of the whole GPU that vLLM may take while awake; `auto` plans it.")
    VLLM_EAGER: bool = setting("Rollouts", False, resume=True, text=
        "Run vLLM without compilation and CUDA graphs: it starts faster and generates ten times slower.")
    IS_CORRECTION: str = setting(
        "Rollouts", "token_truncate",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"), text=
        "Importance-sampling correction of vLLM's probabilities, TRL's modes, or `none`.")
    IS_CLIP_MAX: float = setting("Rollouts", 3.0, "ratio", above=1, text=
        "Importance ratios are truncated or masked above this.")
    PARITY: str = setting("Rollouts", "on", choices=("on", "off"), resume=True, text=
        "Compare vLLM's log-probs with the trainer's before the first step, and stop if they differ "
        "(docs/mismatch.md).")
    PARITY_LIMIT: float = setting("Rollouts", 0.1, "nats", above=0, resume=True, text=
        "Largest mean difference without an adapter that this check accepts.")
    PROMPTS_PER_STEP: int = setting("Rollouts", 12, "prompts", tiny=8, low=1, high=MOST_COMPLETIONS, text=
        "Prompts per optimizer step.")
    STEPS_PER_GENERATION: int = setting("Rollouts", 1, "steps", low=1, high=1000, text=
        "Optimizer steps that share a rollout, each with PROMPTS_PER_STEP prompts of its own.")
    NUM_ITERATIONS: int = setting("Rollouts", 1, "times", low=1, high=1000, text=
        "How often a rollout's completions are learned from; multiplies the steps that share it.")
    NUM_GENERATIONS: int = setting("Rollouts", 8, "completions", low=2, high=MOST_COMPLETIONS, text=
        "Completions per prompt: the group that is compared.")
    GENERATION_BATCH: int | None = setting("Rollouts", None, "completions", low=1, resume=True, text=
        "Completions that transformers generates at once, a divisor of a rollout's; `auto` plans it.")
    MAX_COMPLETION_LEN: int = setting("Rollouts", 4000, "tokens", tiny=12, low=1, text=
        "Longest completion; one that reaches it counts as truncated.")
    ENVIRONMENT: str = setting("Rollouts", "", text=
        "`module:Class` in TRL's form, whose public methods are tools; a row is then an episode of several turns "
        "(docs/environments.md).")
    MAX_TURNS: int = setting("Rollouts", 32, "turns", low=1, high=10_000, text=
        "Most turns of an episode; one that reaches it counts as truncated.")
    MAX_TURN_LEN: int = setting("Rollouts", 0, "tokens", low=0, text=
        "Longest turn of an episode; 0: only MAX_COMPLETION_LEN, the whole episode's, limits it.")
    MAX_RESULT_LEN: int = setting("Rollouts", 1000, "tokens", low=1, text=
        "Longest result of a tool; the rest is cut off.")
    ENV_TIMEOUT: float = setting("Rollouts", 30.0, "s", above=0, high=86_400, resume=True, text=
        "Time for one answer of an environment; a later one ends the episode.")
    TEMPERATURE: float = setting("Rollouts", 1.0, tiny=1.5, above=0, high=10, text=
        "Sampling temperature of the rollouts (vLLM: 0.01 to 2).")
    TOP_P: float = setting("Rollouts", 1.0, "probability", above=0, high=1, text=
        "Nucleus sampling; below 1 the sampled and the trained distribution differ.")

    TOTAL_STEPS: int = setting("Learner", 100, "steps", tiny=400, low=1, resume=True, text=
        "Optimizer steps of the whole run, resumed parts included.")
    NUM_TRAIN_EPOCHS: float | None = setting("Learner", None, "epochs", above=0, high=1e6, resume=True, text=
        "Length of the run in epochs over the training rows; `auto`: TOTAL_STEPS decides.")
    LEARNING_RATE: float = setting("Learner", 1e-4, tiny=4e-3, above=0, high=1, text="Peak learning rate of AdamW.")
    LR_SCHEDULER: str = setting(
        "Learner", "constant_with_warmup", tiny="linear",
        choices=("constant", "constant_with_warmup", "linear", "cosine"), text=
        "Learning-rate schedule; linear and cosine fall to 0 at TOTAL_STEPS, and jump up again if a finished run gets "
        "more steps.")
    WARMUP_STEPS: int = setting("Learner", 0, "steps", low=0, text="Steps over which the learning rate rises from 0.")
    WEIGHT_DECAY: float = setting("Learner", 0.0, low=0, high=10, text="AdamW's weight decay.")
    MAX_GRAD_NORM: float = setting("Learner", 1.0, "norm", above=0, text="Gradients are scaled down to this norm.")
    MICRO_BATCH: int | None = setting("Learner", None, "completions", low=1, resume=True, text=
        "Completions of MAX_COMPLETION_LEN in one micro-batch; changes only memory; `auto` plans it.")
    PACKING: str | None = setting("Learner", None, choices=("prefix", "none"), resume=True, text=
        "`prefix` computes a prompt once for all its completions, `none` once for each; `auto`: prefix where the "
        "attention supports it.")
    GRADIENT_CHECKPOINTING: bool | None = setting("Learner", None, tiny=False, resume=True, text=
        "Recompute activations in the backward pass: much less memory, a third more learning time; `auto`: unless "
        "they fit (docs/memory.md).")
    LOSS_TYPE: str = setting(  # Each value is computed by `Learner.liger_loss`, and the tests compare it with TRL's.
        "Learner", "bnpo", choices=("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"), text=
        "GRPO variant, TRL's names; the loss is Liger's.")
    BETA: float = setting("Learner", 0.0, low=0, high=1000, text=
        "Weight of the KL penalty against the base model; 0 saves a forward pass.")
    EPSILON: float = setting("Learner", 0.2, above=0, text=
        "Lower clip range of the policy ratio, which is 1 with one step a rollout.")
    EPSILON_HIGH: float | None = setting("Learner", None, above=0, text=
        "Upper clip range; with one step a rollout it acts only with cispo and a value below 1; `auto`: EPSILON, 5.0 "
        "for cispo.")
    IMPORTANCE_SAMPLING_LEVEL: str = setting("Learner", "token", choices=("token", "sequence"), text=
        "Policy ratios by token, or by completion (GSPO).")
    SEED: int = setting("Learner", 42, low=0, high=2**31 - 1, text=
        "Seed of prompt order, adapter initialization and sampling.")

    OUTPUT_DIR: str = setting("Output", "runs/gpt-oss-20b", tiny="runs/tiny", resume=True, path=True, text=
        "Folder of the run; OUTPUT_DIR.zip is written beside it.")
    ZIP: str = setting("Output", "all", choices=("all", "no_completions", "adapter"), resume=True, text=
        "What OUTPUT_DIR.zip holds, for slow lines: `no_completions` leaves out completions.csv, `adapter` all but the "
        "best and the last adapter and settings.json.")
    LOG_PROMPTS: bool = setting("Output", False, text="Write each prompt into completions.csv, beside its completion.")
    SAVE_STEPS: int = setting("Output", 10, "steps", tiny=50, low=1, resume=True, text="Steps between checkpoints.")
    SAVE_TOTAL_LIMIT: int = setting("Output", 3, "checkpoints", low=1, resume=True, text="Checkpoints that are kept.")
    OVERWRITE: bool = setting("Output", False, resume=True, text=
        "Delete the run that is in OUTPUT_DIR and start again.")
    REPORT_TO: str = setting("Output", "none", resume=True, text=
        "Trackers, separated by commas: none, wandb, tensorboard, trackio.")
    PRICE_PER_HOUR: float = setting("Output", 0.0, "money", resume=True, low=0, text=
        "Price of an hour of the machine: `--check` then says what the run will cost.")
    ALLOW_UNTESTED: bool = setting("Output", False, resume=True, text=
        "Go on with untested package versions, and without a C compiler.")
    IGNORE_VARS: str = setting("Output", "", resume=True, text=
        "Variables of other programs that look like mistyped settings, separated by commas.")
    # fmt: on

    @property
    def completions_per_step(self) -> int:
        return self.PROMPTS_PER_STEP * self.NUM_GENERATIONS

    @property
    def completions_per_rollout(self) -> int:
        return self.STEPS_PER_GENERATION * self.completions_per_step

    @property
    def steps_per_rollout(self) -> int:
        return self.STEPS_PER_GENERATION * self.NUM_ITERATIONS


FIELDS = {spec.name: spec for spec in dataclasses.fields(Settings)}
