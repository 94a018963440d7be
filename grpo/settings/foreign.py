# SPDX-License-Identifier: Apache-2.0
"""Settings of other trainers (TRL, transformers, Unsloth, Axolotl, verl, tes_grpo_trl) and what to do about them here.

The same answers are for command-line flags and environment variables (grpo/settings/hints.py). No name works as an
alias: each gets an answer that names our setting, or the reason why there is none. tests/test_settings.py holds the
tables against TRL's own fields."""

import re
from collections.abc import Mapping

# fmt: off
# Our setting -> its names elsewhere. Meaning and unit are the same, so the value can be copied.
SYNONYMS = {
    "MODEL_ID": "MODEL MODEL_NAME MODEL_NAME_OR_PATH BASE_MODEL",
    "ATTN_IMPL": "ATTENTION ATTN_IMPLEMENTATION",
    "EXPERTS": "QUANTIZATION",
    "GPU_MEM_LIMIT": "GPU_MEMORY_LIMIT",
    "LORA_R": "LORA_RANK",
    "LORA_TARGETS": "LORA_TARGET_MODULES PEFT_TARGET_MODULES TARGET_MODULES",
    "INIT_ADAPTER": "ADAPTER_NAME_OR_PATH LORA_MODEL_DIR",
    "DATA": "DATASET DATASETS DATASET_NAME TRAIN_DATA TRAIN_FILE TRAIN_FILES",
    "EVAL_DATA": "EVAL_DATASET VAL_FILES TEST_DATASETS",
    "EVAL_SAMPLES": "NUM_GENERATIONS_EVAL",
    "EVAL_STEPS": "EVAL_EVERY TEST_FREQ",
    "SYSTEM_PROMPT": "SYSTEM SYSTEM_MESSAGE",
    "MAX_PROMPT_LEN": "MAX_PROMPT_LENGTH",
    "INVALID_REWARD": "INVALID_PENALTY",
    "MASK_TRUNCATED": "MASK_TRUNCATED_COMPLETIONS",
    "USE_VLLM": "VLLM FAST_INFERENCE",
    "VLLM_EAGER": "VLLM_ENFORCE_EAGER ENFORCE_EAGER",
    "IS_CORRECTION": "VLLM_IMPORTANCE_SAMPLING_MODE",
    "IS_CLIP_MAX": "VLLM_IMPORTANCE_SAMPLING_CAP VLLM_IMPORTANCE_SAMPLING_CLIP_MAX",
    "NUM_ITERATIONS": "PPO_EPOCHS",
    "NUM_GENERATIONS": "GROUP_SIZE",
    "MAX_COMPLETION_LEN": "MAX_COMPLETION_LENGTH MAX_NEW_TOKENS MAX_TOKENS MAX_RESPONSE_LENGTH",
    "TOTAL_STEPS": "MAX_STEPS NUM_STEPS STEPS TOTAL_TRAINING_STEPS",
    "NUM_TRAIN_EPOCHS": "EPOCHS NUM_EPOCHS TOTAL_EPOCHS",
    "LEARNING_RATE": "LR",
    "LR_SCHEDULER": "LR_SCHEDULER_TYPE",
    "WARMUP_STEPS": "LR_WARMUP_STEPS",
    "MAX_GRAD_NORM": "GRAD_CLIP CLIP_GRAD",
    "MICRO_BATCH": "MICRO_BATCH_SIZE",
    "GRADIENT_CHECKPOINTING": "USE_GRADIENT_CHECKPOINTING",
    "BETA": "KL_BETA KL_COEF KL_LOSS_COEF",
    "EPSILON": "CLIP_RATIO CLIP_RATIO_LOW EPSILON_LOW",
    "EPSILON_HIGH": "CLIP_RATIO_HIGH",
    "SEED": "RANDOM_SEED RANDOM_STATE",
    "OUTPUT_DIR": "OUT OUTPUT OUTDIR OUT_DIR",
    "OVERWRITE": "OVERRIDE",
    "SAVE_STEPS": "SAVE_EVERY SAVE_FREQ",
}

# Advice, where a value cannot simply be copied -> the other tools' names for it. {} stands for the value.
ADVICE = {
    "set PROMPTS_PER_STEP, the prompts of a whole step (TRL's per_device_train_batch_size x "
    "gradient_accumulation_steps x GPUs / num_generations); micro-batches plan themselves":
        "BATCH_SIZE TRAIN_BATCH_SIZE PER_DEVICE_TRAIN_BATCH_SIZE GRADIENT_ACCUMULATION_STEPS AUTO_FIND_BATCH_SIZE",
    "set STEPS_PER_GENERATION to {} / (PROMPTS_PER_STEP x NUM_GENERATIONS)": "GENERATION_BATCH_SIZE",
    "set PROMPTS_PER_STEP={}, and STEPS_PER_GENERATION to verl's train_batch_size / {}": "PPO_MINI_BATCH_SIZE",
    "set MAX_PROMPT_LEN and MAX_COMPLETION_LEN, whose sum it is, in tokens":
        "MAX_SEQ_LENGTH MAX_SEQ_LEN MAX_LENGTH MAX_MODEL_LEN SEQUENCE_LEN CUTOFF_LEN VLLM_MAX_MODEL_LENGTH",
    "set WARMUP_STEPS to {} x TOTAL_STEPS": "WARMUP_RATIO LR_WARMUP_STEPS_RATIO",
    "set EXPERTS=mxfp4 for the checkpoint's own 4 bits, bf16 for none": "LOAD_IN_4BIT LOAD_IN_8BIT",
    "set EXPERTS=bf16": "FULL_PRECISION",
    # PEFT's target_parameters come besides its target_modules, LORA_TARGETS is both.
    "set LORA_TARGETS=all-linear,{}; all-linear stands for target_modules":
        "LORA_TARGET_PARAMETERS PEFT_TARGET_PARAMETERS",
    "set ATTN_IMPL=auto": "FLASH_ATTENTION",
    "set GRADIENT_CHECKPOINTING=0": "DISABLE_GRADIENT_CHECKPOINTING",
    "name its files in DATA, such as 'days/*.csv'": "DATA_DIR",
    "set REWARDS=action for the file's reward_action_k, or regret for q_action_k": "Q_REWARD_MODE Q_TEMPERATURE",
    "add `overlong` to REWARDS and set OVERLONG_SHARE to {} / MAX_COMPLETION_LEN":
        "OVERLONG_BUFFER_LEN SOFT_PUNISH_CACHE",
    "set SCALE_REWARDS=group for true, none for false": "NORM_ADV_BY_STD_IN_GRPO",
    "set LOSS_TYPE=bnpo for token-mean, grpo for seq-mean-token-mean, dr_grpo for seq-mean-token-sum-norm":
        "LOSS_AGG_MODE",
    "write --check behind train_grpo.py": "DRY_RUN",
    "leave it out: the same command continues from the last checkpoint in OUTPUT_DIR":
        "RESUME_FROM_CHECKPOINT RESUME_FROM RESUME_MODE",
    "set OVERWRITE=1, which deletes the run that is there": "OVERWRITE_OUTPUT_DIR",
    "write configuration and split into DATA, as org/name:config:split":
        "DATASET_CONFIG DATASET_CONFIG_NAME DATASET_SPLIT DATASET_TRAIN_SPLIT DATASET_TEST_SPLIT",
    "name held-out rows in EVAL_DATA": "VAL_SET_SIZE",
    "set REWARDS to the names: trl.rewards:... for those of trl, module:function for your own":
        "REWARD REWARD_FUNC REWARD_FUNCS",
    "write them into REWARDS, as name=weight,...": "REWARD_WEIGHTS",
    "set VLLM_GPU_MEM={}, or leave it out: it is planned": "VLLM_GPU_MEMORY_UTILIZATION GPU_MEMORY_UTILIZATION",
    "set IS_CORRECTION=none to turn it off": "VLLM_IMPORTANCE_SAMPLING_CORRECTION",
    "set EVAL_STEPS, the steps between two evaluations; EVAL_SAMPLES=0 leaves out all of them":
        "EVAL_STRATEGY EVAL_ON_START EVAL_DELAY DO_EVAL",
    "set BEST_BY, the figure by which the adapter in best/ is chosen":
        "LOAD_BEST_MODEL_AT_END METRIC_FOR_BEST_MODEL GREATER_IS_BETTER",
}

# The reason why no setting corresponds -> the other tools' names, each of which would change what is learned.
UNSUPPORTED = {
    "like TOP_P below 1, it would bend the sampled log-probs away from the trained ones "
    "(https://github.com/huggingface/trl/issues/6789)":
        "TOP_K MIN_P REPETITION_PENALTY PRESENCE_PENALTY FREQUENCY_PENALTY",
    "it was removed, the same command always continues the run, and OVERWRITE=1 starts again": "RESUME",
    "it was removed, vLLM generates without a draft": "DRAFT_MODEL",
    "the loss is that of LOSS_TYPE with TRL's defaults": "DELTA ENTROPY_COEF ENTROPY_COEFF",
    "rewards are functions, there is no reward model (docs/data.md)": "REWARD_MODEL REWARD_MODEL_NAME_OR_PATH",
    "the optimizer is torch's AdamW with betas of 0.9 and 0.999": "OPTIM OPTIMIZER ADAM_BETA1 ADAM_BETA2 ADAM_EPSILON",
    "what is trained is a plain LoRA adapter on LORA_TARGETS (all weights: docs/verl.md)":
        "USE_PEFT FULL_FINETUNING LORA_MODULES_TO_SAVE USE_RSLORA USE_DORA",
    "every process holds the whole model (docs/clusters.md)":
        "FSDP DEEPSPEED VLLM_TENSOR_PARALLEL_SIZE TENSOR_PARALLEL_SIZE",
    "it computes in BF16 on a GPU, in float32 on a CPU": "COMPUTE_DTYPE TORCH_DTYPE",
    "it runs on the visible GPU, else on the CPU": "DEVICE_MAP",
    "kernels, packing and memory are this program's own (docs/memory.md)": "COMPILE_MODE COMPILE_FULLGRAPH TORCHDYNAMO",
    "metrics.csv in OUTPUT_DIR has every step": "METRICS_CSV METRICS_EMA_ALPHA",
    "completions.csv in OUTPUT_DIR has every completion":
        "GENERATIONS_CSV GRPO_LOG_COMPLETIONS GRPO_COMPLETION_LOG_PATH",
    "the checkpoint's own 4 bits have no options": "BNB_QUANT_TYPE DISABLE_DOUBLE_QUANT",
}

# All other arguments of TRL's GRPOConfig, ModelConfig and ScriptArguments. As environment variables they give one
# warning and no error: many change nothing about the result, and other programs export such names too.
# The remedy, or the reason why there is no setting -> TRL's names.
TRL_ONLY = {
    "set SAVE_STEPS": "SAVE_STRATEGY SAVE_ONLY_MODEL SAVE_ON_EACH_NODE ENABLE_JIT_CHECKPOINT",
    "name a local folder of that revision in MODEL_ID": "MODEL_REVISION",
    "scripts/export.py OUTPUT_DIR --push you/name does it afterwards":
        "PUSH_TO_HUB HUB_MODEL_ID HUB_TOKEN HUB_PRIVATE_REPO HUB_STRATEGY HUB_ALWAYS_PUSH HUB_REVISION",
    "set REASONING_EFFORT and PROMPT_DATE, or give rows a column of this name": "CHAT_TEMPLATE_KWARGS",
    "set EXPERTS=mxfp4 for the checkpoint's own 4 bits":
        "BNB_4BIT_QUANT_TYPE BNB_4BIT_QUANT_STORAGE USE_BNB_NESTED_QUANT",
    "rollouts are sampled with TEMPERATURE, TOP_P and MAX_COMPLETION_LEN alone":
        "GENERATION_KWARGS VLLM_STRUCTURED_OUTPUTS_REGEX",
    "vLLM generates, or transformers in batches of GENERATION_BATCH":
        "CACHE_IMPLEMENTATION USE_TRANSFORMERS_PAGED USE_TRANSFORMERS_CONTINUOUS_BATCHING "
        "TRANSFORMERS_CONTINUOUS_BATCHING_CONFIG",
    "vLLM runs inside this program and sleeps while the model learns":
        "VLLM_MODE VLLM_MODEL_IMPL VLLM_ENABLE_SLEEP_MODE VLLM_SERVER_BASE_URL VLLM_SERVER_HOST VLLM_SERVER_PORT "
        "VLLM_SERVER_TIMEOUT VLLM_GROUP_PORT",
    "importance ratios have an upper limit only, IS_CLIP_MAX": "VLLM_IMPORTANCE_SAMPLING_CLIP_MIN",
    "the loss is that of LOSS_TYPE with TRL's defaults":
        "SAPO_TEMPERATURE_NEG SAPO_TEMPERATURE_POS VESPO_K_POS VESPO_LAMBDA_POS VESPO_K_NEG VESPO_LAMBDA_NEG "
        "MULTI_OBJECTIVE_AGGREGATION OFF_POLICY_MASK_THRESHOLD USE_BIAS_CORRECTION_KL TOP_ENTROPY_QUANTILE "
        "USE_ADAPTIVE_ENTROPY ENTROPY_COEF_MIN ENTROPY_COEF_MAX ENTROPY_COEF_DELTA ENTROPY_TARGET "
        "LABEL_SMOOTHING_FACTOR NEFTUNE_NOISE_ALPHA",
    "the reference is the base model without the adapter and stays as it is":
        "SYNC_REF_MODEL REF_MODEL_MIXUP_ALPHA REF_MODEL_SYNC_STEPS",
    "a load-balancing loss would be added to that of the rewards, so its weight is 0": "ROUTER_AUX_LOSS_COEF",
    "rows may have `tools`, but nothing answers their calls": "MAX_TOOL_CALLING_ITERATIONS",
    "the optimizer is torch's AdamW": "OPTIM_ARGS OPTIM_TARGET_MODULES",
    "LR_SCHEDULER has no options but WARMUP_STEPS": "LR_SCHEDULER_KWARGS",
    "a plain LoRA adapter on LORA_TARGETS is trained": "LORA_TASK_TYPE",
    "how gpt-oss is loaded is settled": "MODEL_INIT_KWARGS TRUST_REMOTE_CODE DISABLE_DROPOUT",
    "it computes in BF16 on a GPU, in float32 on a CPU": "BF16 FP16 TF32 BF16_FULL_EVAL FP16_FULL_EVAL DTYPE",
    "it runs on the visible GPU, else on the CPU": "USE_CPU",
    "every process holds the whole model (docs/clusters.md)":
        "LOCAL_RANK FSDP_CONFIG DS3_GATHER_FOR_GENERATION ACCELERATOR_CONFIG PARALLELISM_CONFIG "
        "AVERAGE_TOKENS_ACROSS_DEVICES DDP_FIND_UNUSED_PARAMETERS DDP_BUCKET_CAP_MB DDP_BROADCAST_BUFFERS "
        "DDP_STATIC_GRAPH DDP_BACKEND DDP_TIMEOUT IGNORE_BIAS_BUFFERS",
    "kernels, packing and memory are this program's own (docs/memory.md)":
        "USE_LIGER_KERNEL LIGER_KERNEL_CONFIG TORCH_COMPILE TORCH_COMPILE_BACKEND TORCH_COMPILE_MODE "
        "GRADIENT_CHECKPOINTING_KWARGS CAST_LM_HEAD_TO_FP32 PAD_TO_MULTIPLE_OF USE_CACHE TORCH_EMPTY_CACHE_STEPS",
    "rows stay in memory, and SEED shuffles them anew in every round":
        "DATA_SEED FULL_DETERMINISM SHUFFLE_DATASET DATASET_STREAMING TRAIN_SAMPLING_STRATEGY LENGTH_COLUMN_NAME "
        "REMOVE_UNUSED_COLUMNS LABEL_NAMES DATALOADER_DROP_LAST DATALOADER_NUM_WORKERS DATALOADER_PIN_MEMORY "
        "DATALOADER_PERSISTENT_WORKERS DATALOADER_PREFETCH_FACTOR DATALOADER_MULTIPROCESSING_CONTEXT "
        "DATALOADER_IN_ORDER",
    "the same command continues from the last checkpoint in OUTPUT_DIR":
        "IGNORE_DATA_SKIP RESTORE_CALLBACK_STATES_FROM_CHECKPOINT",
    "a run trains, and EVAL_STEPS says when it evaluates":
        "DO_TRAIN DO_PREDICT PER_DEVICE_EVAL_BATCH_SIZE PREDICTION_LOSS_ONLY EVAL_DO_CONCAT_BATCHES "
        "EVAL_USE_GATHER_OBJECT EVAL_ACCUMULATION_STEPS INCLUDE_FOR_METRICS BATCH_EVAL_METRICS",
    "metrics.csv has every step and completions.csv every completion":
        "LOGGING_STEPS LOGGING_STRATEGY LOGGING_FIRST_STEP LOGGING_NAN_INF_FILTER LOG_ON_EACH_NODE LOG_LEVEL "
        "LOG_LEVEL_REPLICA LOG_COMPLETIONS LOG_MULTIMODAL LOG_UNIQUE_PROMPTS LOG_COMPLETIONS_HUB_REPO "
        "NUM_COMPLETIONS_TO_PRINT INCLUDE_NUM_INPUT_TOKENS_SEEN SKIP_MEMORY_METRICS DISABLE_TQDM DEBUG",
    "trackers call the run as OUTPUT_DIR's folder":
        "RUN_NAME PROJECT TRACKIO_SPACE_ID TRACKIO_BUCKET_ID TRACKIO_STATIC_SPACE_ID",
}

# A value of other trainers, for the setting that has the same name here or a synonym -> what to set, and why.
OTHER_VALUES = {
    ("LOSS_TYPE", "gspo"): ("IMPORTANCE_SAMPLING_LEVEL=sequence", "GSPO is that, with any LOSS_TYPE but vespo"),
    ("SCALE_REWARDS", "true"): ("SCALE_REWARDS=group", "TRL's True"),
    ("SCALE_REWARDS", "false"): ("SCALE_REWARDS=none", "TRL's False"),
    ("EXPERTS", "4bit"): ("EXPERTS=mxfp4", "the checkpoint's own 4 bits"),
    ("EXPERTS", "nf4"): ("EXPERTS=mxfp4", "the checkpoint's own 4 bits"),
    ("EXPERTS", "8bit"): ("EXPERTS=mxfp4", "the checkpoint's own 4 bits, there are no 8"),
    ("EXPERTS", "none"): ("EXPERTS=bf16", "dequantized once"),
    ("ATTN_IMPL", "sdpa"): ("ATTN_IMPL=auto", "sdpa knows no attention sinks"),
    ("ATTN_IMPL", "xformers"): ("ATTN_IMPL=auto", "xformers knows no attention sinks"),
    ("ATTN_IMPL", "flex_attention"): ("ATTN_IMPL=auto", "torch_flash takes its place on a GPU"),
    ("ATTN_IMPL", "flash_attention"): ("ATTN_IMPL=auto", "it takes torch_flash on a GPU"),
    ("ATTN_IMPL", "flash_attention_4"): ("ATTN_IMPL=auto", "it takes torch_flash on a GPU"),
}
# A module or parameter as PEFT names it -> a word of LORA_TARGETS: the experts' two matrices get an adapter or neither.
PEFT_TARGET = re.compile(
    r"(?:[^0-9]*\.)?(?P<module>[qkvo]_proj)|(?:.*?\.)??(?:(?P<layer>[0-9]+)\.)?(?:mlp\.)?experts"
    r"(?:\.(?:gate_up_proj|down_proj))?|gate_up_proj|down_proj"
)
# fmt: on


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """The key of each name in a table of names, which spaces separate."""
    return {name: key for key, names in table.items() for name in names.split()}


SETTING_OF = by_name(SYNONYMS)
# Another tool's name -> what to do instead. {} stands for the value.
ANSWERS = {name: f"set {setting}={{}}" for name, setting in SETTING_OF.items()} | by_name(ADVICE)
ANSWERS |= {name: f"leave it out: {reason}" for name, reason in by_name(UNSUPPORTED).items()}
TRL_REASONS = by_name(TRL_ONLY)
TRL_ANSWER = "TRL's argument, no setting here: "  # stands before a reason of TRL_REASONS

# Words that any program may export: as environment variables they give a warning, not an error.
_COMMON = (
    "MODEL SYSTEM REWARD REWARD_MODEL STEPS MAX_TOKENS MAX_LENGTH RANDOM_SEED RANDOM_STATE ATTENTION OVERRIDE OUT "
    "OUTPUT OUTDIR OUT_DIR DATA_DIR DRY_RUN DO_EVAL OPTIM OPTIMIZER DELTA FSDP DEEPSPEED"
)
COMMON_WORDS = frozenset(_COMMON.split())
