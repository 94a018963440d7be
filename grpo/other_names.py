# SPDX-License-Identifier: Apache-2.0
"""Settings of other trainers (TRL, transformers, Unsloth, Axolotl, verl, tes_grpo_trl) and what to do about them here.

One table answers command-line flags and environment variables. No name in it works as an alias: each gets an answer
that names our setting, or the reason why there is none. Arguments that do not change the result are not listed.
"""

# fmt: off
# Our setting -> its names elsewhere. Meaning and unit are the same, so the value can be copied.
SYNONYMS = {
    "MODEL_ID": "MODEL MODEL_NAME MODEL_NAME_OR_PATH BASE_MODEL",
    "ATTN_IMPL": "ATTENTION ATTN_IMPLEMENTATION",
    "LORA_R": "LORA_RANK",
    "LORA_TARGETS":
        "LORA_TARGET_MODULES LORA_TARGET_PARAMETERS PEFT_TARGET_MODULES PEFT_TARGET_PARAMETERS TARGET_MODULES",
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
    "set EXPERTS=mxfp4 for the checkpoint's own 4 bits, bf16 for none": "QUANTIZATION LOAD_IN_4BIT LOAD_IN_8BIT",
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
    "the loss is that of LOSS_TYPE with TRL's defaults": "DELTA ENTROPY_COEF ENTROPY_COEFF",
    "rewards are functions, there is no reward model (docs/data.md)": "REWARD_MODEL REWARD_MODEL_NAME_OR_PATH",
    "the optimizer is torch's AdamW with betas of 0.9 and 0.999": "OPTIM OPTIMIZER ADAM_BETA1 ADAM_BETA2 ADAM_EPSILON",
    "what is trained is a plain LoRA adapter on LORA_TARGETS (all weights: docs/verl.md)":
        "USE_PEFT FULL_FINETUNING LORA_MODULES_TO_SAVE USE_RSLORA USE_DORA",
    "every process holds the whole model (docs/clusters.md)":
        "FSDP DEEPSPEED VLLM_TENSOR_PARALLEL_SIZE TENSOR_PARALLEL_SIZE",
}
# fmt: on

# Every other tool's name -> what to do instead. {} stands for the value.
ANSWERS = {
    name: answer
    for answer, names in [
        *((f"set {setting}={{}}", names) for setting, names in SYNONYMS.items()),
        *ADVICE.items(),
        *((f"leave it out: {reason}", names) for reason, names in UNSUPPORTED.items()),
    ]
    for name in names.split()
}

# Words that any program may export: as environment variables they give a warning, not an error.
COMMON_WORDS = (
    "MODEL DATASET DATASETS SYSTEM REWARD REWARD_MODEL STEPS MAX_TOKENS MAX_LENGTH RANDOM_SEED RANDOM_STATE "
    "ATTENTION OVERRIDE OUT OUTPUT OUTDIR OUT_DIR DO_EVAL OPTIM OPTIMIZER DELTA FSDP DEEPSPEED"
)
