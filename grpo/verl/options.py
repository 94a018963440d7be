# SPDX-License-Identifier: Apache-2.0
"""Settings of this project as options of verl 0.9.1 (overrides of Hydra), one line a setting; docs/verl.md has the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from grpo.preflight.choices import choose_epsilon_high
from grpo.settings import FIELDS, Problems, Settings, listed, nearest, show

ACTOR, ROLLOUT, RATIO = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
MODELS = ("actor_rollout_ref.model", "critic.model")

# Values of a setting that verl knows by another name; it has no others. None: what the YAML says.
VALUES: dict[str, dict[Any, Any]] = {
    "ATTN_IMPL": {"auto": None, "eager": "eager", "flash_attention_2": "flash_attention_2", "flash_attention_3": "flash_attention_3"},
    "EXPERTS": {"bf16": "bf16"},
    "IS_CORRECTION": {"token_truncate": "token", "sequence_truncate": "sequence", "none": "null"},
    "LOSS_TYPE": {"bnpo": "token-mean", "dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"},
    "LR_SCHEDULER": {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"},
    "SCALE_REWARDS": {None: True, "group": True, "none": False},
    "USE_VLLM": {None: True, True: True},
}  # fmt: skip

# Settings that the pipeline itself reads: grpo/verl/rows.py, score.py, commands.py.
OURS = {
    "MODEL_ID", "TASK", "DATA", "EVAL_DATA", "SYSTEM_PROMPT", "REWARDS", "INVALID_REWARD", "OUTPUT_DIR", "EXPERTS", "USE_VLLM",
    "IGNORE_VARS",
}  # fmt: skip

# Settings without a counterpart, and why.
WHOLE = "here all weights are trained, not an adapter"
OWN = "this is train_grpo.py's own machinery"
WITHOUT = {
    "LORA_R": WHOLE, "LORA_ALPHA": WHOLE, "LORA_TARGETS": WHOLE, "LORA_DROPOUT": WHOLE, "INIT_ADAPTER": WHOLE,
    "NUM_TRAIN_EPOCHS": "set TOTAL_STEPS",
    "BEST_BY": "verl keeps the newest checkpoints", "EVAL_PROFILE": "verl runs no closed loop",
    "PROMPT_DATE": "verl's rollouts have the date that the chat template writes",
    "MASK_TRUNCATED": "verl has no such mask", "ROLLOUT_SYNC": OWN, "PARITY": OWN, "PARITY_LIMIT": OWN,
    "GENERATION_BATCH": OWN, "PACKING": OWN, "LOG_PROMPTS": "verl writes prompts beside completions (rollouts/)",
    "RESUME": "verl continues from its newest checkpoint in OUTPUT_DIR", "OVERWRITE": "name another OUTPUT_DIR instead",
    "ALLOW_UNTESTED": "the versions are those of requirements-verl.txt",
}  # fmt: skip

Options = dict[str, Any]
Translate = Callable[[Settings], Options]


def same(name: str, *keys: str) -> Translate:
    """What a setting is called there; its value goes over as it is, or as VALUES has it. None is left to the YAML."""

    def options(s: Settings) -> Options:
        value = VALUES[name][getattr(s, name)] if name in VALUES else getattr(s, name)
        return {} if value is None else dict.fromkeys(keys, value)

    return options


def both(name: str, key: str) -> Translate:
    """`same`, of the policy and of the critic."""
    return same(name, *(f"{model}.{key}" for model in MODELS))


def attention(*models: str) -> Translate:
    """ATTN_IMPL of each; eager attention is as large as the square of a packed row, so its rows are padded."""
    named = same("ATTN_IMPL", *(f"{model}.override_config.attn_implementation" for model in models))
    padded = {f"{model}.use_remove_padding": False for model in models}
    return lambda s: named(s) | (padded if s.ATTN_IMPL == "eager" else {})


def tokens(s: Settings) -> int:
    """The longest prompt and completion together."""
    return s.MAX_PROMPT_LEN + s.MAX_COMPLETION_LEN


def micro_batch(s: Settings) -> int:
    """Tokens of a micro-batch; without MICRO_BATCH two of the longest: logits over a large vocabulary are GiB each."""
    return (s.MICRO_BATCH or 2) * tokens(s)


def loggers(s: Settings) -> list[str]:
    """verl's trackers: its lines on the screen, and those of REPORT_TO."""
    return ["console", *(name for name in listed(s.REPORT_TO) if name != "none")]


# Of verl.trainer.main_ppo, by PPO and GRPO.
RL: dict[str, Translate] = {
    "ATTN_IMPL": attention(*MODELS),
    "GRADIENT_CHECKPOINTING": both("GRADIENT_CHECKPOINTING", "enable_gradient_checkpointing"),
    "EVAL_SAMPLES": lambda s: {f"{ROLLOUT}.val_kwargs.n": max(1, s.EVAL_SAMPLES), "trainer.val_before_train": s.EVAL_SAMPLES > 0},
    "EVAL_TEMPERATURE": same("EVAL_TEMPERATURE", f"{ROLLOUT}.val_kwargs.temperature"),
    "EVAL_STEPS": lambda s: {"trainer.test_freq": (s.EVAL_STEPS or s.TOTAL_STEPS) if s.EVAL_SAMPLES else -1},
    "REASONING_EFFORT": same("REASONING_EFFORT", "+data.apply_chat_template_kwargs.reasoning_effort"),
    "MAX_PROMPT_LEN": same("MAX_PROMPT_LEN", "data.max_prompt_length"),
    "SCALE_REWARDS": same("SCALE_REWARDS", "algorithm.norm_adv_by_std_in_grpo"),
    "VLLM_GPU_MEM": same("VLLM_GPU_MEM", f"{ROLLOUT}.gpu_memory_utilization"),
    "VLLM_EAGER": same("VLLM_EAGER", f"{ROLLOUT}.enforce_eager"),
    "IS_CORRECTION": same("IS_CORRECTION", f"{RATIO}.rollout_is"),
    "IS_CLIP_MAX": same("IS_CLIP_MAX", f"{RATIO}.rollout_is_threshold"),
    "PROMPTS_PER_STEP": same("PROMPTS_PER_STEP", "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
    "NUM_GENERATIONS": same("NUM_GENERATIONS", f"{ROLLOUT}.n"),
    "MAX_COMPLETION_LEN": lambda s: {
        "data.max_response_length": s.MAX_COMPLETION_LEN, f"{ACTOR}.loss_scale_factor": s.MAX_COMPLETION_LEN,
        f"{ROLLOUT}.max_model_len": tokens(s),  # else the model's own: vLLM wants a KV cache of that length
    },
    "TEMPERATURE": same("TEMPERATURE", f"{ROLLOUT}.temperature"),
    "TOP_P": same("TOP_P", f"{ROLLOUT}.top_p"),
    "TOTAL_STEPS": same("TOTAL_STEPS", "trainer.total_training_steps", "trainer.total_epochs"),
    "LEARNING_RATE": same("LEARNING_RATE", f"{ACTOR}.optim.lr"),
    "LR_SCHEDULER": same("LR_SCHEDULER", f"{ACTOR}.optim.lr_scheduler_type"),
    "WARMUP_STEPS": same("WARMUP_STEPS", f"{ACTOR}.optim.lr_warmup_steps"),
    "WEIGHT_DECAY": same("WEIGHT_DECAY", f"{ACTOR}.optim.weight_decay"),
    "MAX_GRAD_NORM": same("MAX_GRAD_NORM", f"{ACTOR}.optim.clip_grad", "critic.optim.clip_grad"),
    # The critic's engine takes the last one, whatever the others say.
    "MICRO_BATCH": lambda s: dict.fromkeys(
        (f"{ACTOR}.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu", "+critic.ppo_infer_max_token_len_per_gpu"),
        micro_batch(s),
    ),
    "LOSS_TYPE": same("LOSS_TYPE", f"{ACTOR}.loss_agg_mode"),
    "BETA": lambda s: {f"{ACTOR}.use_kl_loss": s.BETA > 0, f"{ACTOR}.kl_loss_coef": s.BETA},
    "EPSILON": same("EPSILON", f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low"),
    "EPSILON_HIGH": lambda s: {f"{ACTOR}.clip_ratio_high": choose_epsilon_high(s)[0]},
    "SEED": same("SEED", "data.seed", f"{ACTOR}.data_loader_seed", f"{ACTOR}.fsdp_config.seed", f"{ROLLOUT}.seed"),
    "SAVE_STEPS": same("SAVE_STEPS", "trainer.save_freq"),
    "SAVE_TOTAL_LIMIT": same("SAVE_TOTAL_LIMIT", "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"),
    "REPORT_TO": lambda s: {"trainer.logger": loggers(s)},
}  # fmt: skip

# Of verl.trainer.sft_trainer.
SFT: dict[str, Translate] = {
    "ATTN_IMPL": attention("model"),
    "GRADIENT_CHECKPOINTING": same("GRADIENT_CHECKPOINTING", "model.enable_gradient_checkpointing"),
    "REASONING_EFFORT": same("REASONING_EFFORT", "+data.apply_chat_template_kwargs.reasoning_effort"),
    "MAX_COMPLETION_LEN": lambda s: {"data.max_length": tokens(s)},
    "PROMPTS_PER_STEP": same("PROMPTS_PER_STEP", "data.train_batch_size"),
    "TOTAL_STEPS": same("TOTAL_STEPS", "trainer.total_training_steps", "trainer.total_epochs"),
    "LEARNING_RATE": same("LEARNING_RATE", "optim.lr"),
    "LR_SCHEDULER": same("LR_SCHEDULER", "optim.lr_scheduler_type"),
    "WARMUP_STEPS": same("WARMUP_STEPS", "optim.lr_warmup_steps"),
    "WEIGHT_DECAY": same("WEIGHT_DECAY", "optim.weight_decay"),
    "MAX_GRAD_NORM": same("MAX_GRAD_NORM", "optim.clip_grad"),
    "MICRO_BATCH": lambda s: {"data.max_token_len_per_gpu": micro_batch(s)},
    "SEED": same("SEED", "trainer.seed", "engine.seed"),
    "SAVE_STEPS": same("SAVE_STEPS", "trainer.save_freq"),
    "SAVE_TOTAL_LIMIT": same("SAVE_TOTAL_LIMIT", "trainer.max_ckpt_to_keep"),
    "REPORT_TO": lambda s: {"trainer.logger": loggers(s)},
}  # fmt: skip
# Where these are left alone the YAML's value holds: train_grpo.py's suits an adapter of a few million weights.
LEFT_TO_YAML = {"LEARNING_RATE"}


def check_counterparts(s: Settings, sources: Mapping[str, str], problems: Problems) -> None:
    """A problem for each setting that the user gave and verl knows nothing of, and for each value that it has no word for."""
    for name, why in WITHOUT.items():
        if sources[name] == "environment" and getattr(s, name) != FIELDS[name].default:
            problems.add(f"{name}={show(getattr(s, name))}", f"verl has no counterpart, {why}", "Unset it")
    for name, known in VALUES.items():
        if (value := getattr(s, name)) not in known:
            words = ", ".join(show(word) for word in known)
            what = f"verl has no counterpart{nearest(show(value), map(show, known))}"
            problems.add(f"{name}={show(value)}", what, f"Set one of {words}, or unset it")
    if s.INVALID_REWARD is not None and s.INVALID_REWARD != s.INVALID_REWARD:
        problems.add("INVALID_REWARD=nan", "verl leaves no completion out", "Set a number, or unset it")


def translated(table: Mapping[str, Translate], s: Settings, sources: Mapping[str, str]) -> Options:
    """verl's options for all settings of a table, by key."""
    used = (name for name in table if name not in LEFT_TO_YAML or sources[name] != "default")
    return {key: value for name in used for key, value in table[name](s).items()}


def overrides(options: Options) -> list[str]:
    """Arguments of a command line in Hydra's grammar.

    >>> overrides({"a.b": 1e-05, "c": True, "d": ["console"], "e": "it's", "f": "null"})
    ['a.b=1e-05', 'c=true', 'd=[console]', "e='it\\\\'s'", 'f=null']
    """
    return [f"{key}={hydra_value(value)}" for key, value in options.items()]


def hydra_value(value: Any) -> str:
    """A value in Hydra's grammar: text that is no plain word or path in single quotes."""
    if isinstance(value, list):
        return f"[{','.join(map(hydra_value, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    return value if re.fullmatch(r"[\w./:-]+", value) else "'" + value.replace("'", "\\'") + "'"
