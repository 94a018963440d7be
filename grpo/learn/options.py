# SPDX-License-Identifier: Apache-2.0
"""The arguments of TRL's GRPOConfig for a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo.run.layout import run_folder
from grpo.settings import Settings, split_commas

# GRPOConfig knows these settings by the same names.
SHARED = ("TEMPERATURE", "TOP_P", "LEARNING_RATE", "WARMUP_STEPS", "WEIGHT_DECAY", "MAX_GRAD_NORM",
"BETA", "LOSS_TYPE", "EPSILON", "GRADIENT_CHECKPOINTING", "SAVE_STEPS", "SEED")  # fmt: skip


def grpo_options(s: Settings, cuda: bool, specs: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Arguments of TRL's GRPOConfig for this run, given (name, weight) of its reward functions."""
    trackers = [name for name in split_commas(s.REPORT_TO) if name != "none"]
    return {
        **{name.lower(): getattr(s, name) for name in SHARED},
        "output_dir": str(run_folder(s)),
        # TRL refuses groups of one, which direct answers are: the step counts as one group until `Trainer` puts the
        # true size in its place.
        "num_generations": s.PROMPTS_PER_STEP if s.DIRECT_ANSWERS else s.NUM_GENERATIONS,
        # TRL sees the step's completions as one batch; `Trainer.training_step` cuts it into micro-batches.
        "per_device_train_batch_size": s.completions_per_step,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "max_completion_length": s.MAX_COMPLETION_LEN,
        "max_steps": s.TOTAL_STEPS,
        "lr_scheduler_type": s.LR_SCHEDULER,
        "epsilon_high": s.EPSILON_HIGH or (5.0 if s.LOSS_TYPE == "cispo" else s.EPSILON),
        "mask_truncated_completions": s.MASK_TRUNCATED,
        "reward_weights": [weight for _, weight in specs],
        # By the batch's deviation a few costly rows decide, and a run may settle on the safest action.
        "scale_rewards": s.SCALE_REWARDS or "group",
        # gpt-oss's config carries a load-balancing coefficient that TRL would silently add to the loss
        # (https://github.com/huggingface/trl/issues/7248).
        "router_aux_loss_coef": 0.0,
        # The engine is our own (grpo/rollout), and so is the correction for its log-probs: TRL's needs a whole forward
        # pass before the loss (grpo/learn/trainer.py).
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "bf16": cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": 1,
        "disable_tqdm": True,  # training.log has a line for each step; scripts/watch.py shows the time left
        "save_strategy": "steps",
        "report_to": trackers or "none",
        "run_name": run_folder(s).name,
        "project": run_folder(s).name,  # for trackio, where all runs would share the project `huggingface`
        "data_seed": s.SEED,
        "dataloader_pin_memory": cuda,
    }
