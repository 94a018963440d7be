# SPDX-License-Identifier: Apache-2.0
"""The arguments of TRL's GRPOConfig for a run, and of SFTConfig for scripts/sft.py."""

from collections.abc import Sequence
from typing import Any

from grpo.common import split_commas
from grpo.output.layout import run_folder
from grpo.settings.table import Settings

# Settings that GRPOConfig and SFTConfig have under the same names; those that GRPOConfig has as well.
TRAINING_SETTINGS = ("LEARNING_RATE", "WARMUP_STEPS", "WEIGHT_DECAY", "MAX_GRAD_NORM", "GRADIENT_CHECKPOINTING", "SEED")
LOSS_SETTINGS = ("BETA", "LOSS_TYPE", "EPSILON", "EPSILON_HIGH", "IMPORTANCE_SAMPLING_LEVEL")
SAMPLING_SETTINGS = ("TEMPERATURE", "TOP_P", "STEPS_PER_GENERATION", "NUM_ITERATIONS")
GRPO_SETTINGS = (*LOSS_SETTINGS, *SAMPLING_SETTINGS, "SCALE_REWARDS", "SAVE_STEPS")


def training_options(s: Settings, cuda: bool) -> dict[str, Any]:
    """Arguments that GRPOConfig and SFTConfig have in common."""
    return {
        **{name.lower(): getattr(s, name) for name in TRAINING_SETTINGS},
        "output_dir": str(run_folder(s)),
        "max_steps": s.TOTAL_STEPS,
        "lr_scheduler_type": s.LR_SCHEDULER,
        # gpt-oss's config carries a load-balancing coefficient that TRL would silently add to the loss
        # (https://github.com/huggingface/trl/issues/7248).
        "router_aux_loss_coef": 0.0,
        "bf16": cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "disable_tqdm": True,  # training.log has a line for each step; scripts/watch.py shows the time left
        "dataloader_pin_memory": cuda,
    }


def grpo_options(s: Settings, cuda: bool, specs: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Arguments of TRL's GRPOConfig for this run; `specs` are (name, weight) of its reward functions."""
    trackers = [name for name in split_commas(s.REPORT_TO) if name != "none"]
    return {
        **training_options(s, cuda),
        **{name.lower(): getattr(s, name) for name in GRPO_SETTINGS},
        # Nothing reads it but TRL's own check, which refuses groups of one: DIRECT_ANSWERS has these.
        "num_generations": s.PROMPTS_PER_STEP if s.DIRECT_ANSWERS else s.NUM_GENERATIONS,
        # TRL sees the step's completions as one batch; `Learner.micro_batches` cuts it.
        "per_device_train_batch_size": s.completions_per_step,
        "max_completion_length": s.MAX_COMPLETION_LEN,
        "mask_truncated_completions": s.MASK_TRUNCATED,
        "reward_weights": [weight for _, weight in specs],
        # The engine is our own (grpo/rollout), and so is the importance correction: TRL's needs a whole forward pass.
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "logging_steps": 1,
        "report_to": trackers or "none",
        "run_name": run_folder(s).name,
        "project": run_folder(s).name,  # for trackio, where all runs would share the project `huggingface`
        "data_seed": s.SEED,
    }
