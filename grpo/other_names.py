# SPDX-License-Identifier: Apache-2.0
"""Settings of other trainers (TRL, transformers, Unsloth, Axolotl, verl, tes_grpo_trl) and what to do about them here.

One table answers both command-line flags and environment variables. No name in it works as an alias: each gets an
answer that names our setting, or the reason why there is none. tests/test_settings.py compares TRL's own fields.
"""

from __future__ import annotations

# fmt: off
# Our setting -> its names elsewhere. Meaning and unit are the same, so the value can be copied.
SAME = {
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
INSTEAD = {
    "set PROMPTS_PER_STEP, the prompts of a whole step (TRL's per_device_train_batch_size x "
    "gradient_accumulation_steps x GPUs / num_generations); micro-batches plan themselves":
        "BATCH_SIZE TRAIN_BATCH_SIZE PER_DEVICE_TRAIN_BATCH_SIZE GRADIENT_ACCUMULATION_STEPS STEPS_PER_GENERATION "
        "GENERATION_BATCH_SIZE AUTO_FIND_BATCH_SIZE",
    "set MAX_PROMPT_LEN and MAX_COMPLETION_LEN, of which it is the sum in tokens":
        "MAX_SEQ_LENGTH MAX_SEQ_LEN MAX_LENGTH MAX_MODEL_LEN SEQUENCE_LEN CUTOFF_LEN VLLM_MAX_MODEL_LENGTH",
    "set WARMUP_STEPS to {} x TOTAL_STEPS": "WARMUP_RATIO LR_WARMUP_STEPS_RATIO",
    "set EXPERTS=mxfp4 for the checkpoint's own 4 bits, bf16 (the default) for none":
        "QUANTIZATION LOAD_IN_4BIT LOAD_IN_8BIT BNB_QUANT_TYPE BNB_4BIT_QUANT_TYPE BNB_4BIT_QUANT_STORAGE "
        "USE_BNB_NESTED_QUANT DISABLE_DOUBLE_QUANT",
    "set EXPERTS=bf16, the default": "FULL_PRECISION",
    "set ATTN_IMPL=auto, the default": "FLASH_ATTENTION",
    "leave it out: the same command continues from the last checkpoint in OUTPUT_DIR":
        "RESUME_FROM_CHECKPOINT RESUME_FROM RESUME_MODE IGNORE_DATA_SKIP RESTORE_CALLBACK_STATES_FROM_CHECKPOINT",
    "set OVERWRITE=1, which deletes the run that is there": "OVERWRITE_OUTPUT_DIR",
    "set DATA='{}/*.csv'": "DATA_DIR",
    "write configuration and split into DATA, as org/name:config:split":
        "DATASET_CONFIG DATASET_CONFIG_NAME DATASET_SPLIT DATASET_TRAIN_SPLIT DATASET_TEST_SPLIT",
    "name held-out rows in EVAL_DATA": "VAL_SET_SIZE",
    "set REWARDS to the names: trl.rewards:... for those of trl, module:function for your own":
        "REWARD REWARD_FUNC REWARD_FUNCS",
    "write them into REWARDS, as name=weight,...": "REWARD_WEIGHTS",
    "set REWARDS=action for the CSV's reward_action_k, or regret for q_action_k": "Q_REWARD_MODE Q_TEMPERATURE",
    "set SCALE_REWARDS=group for true, none for false": "NORM_ADV_BY_STD_IN_GRPO",
    "set LOSS_TYPE=bnpo for token-mean, grpo for seq-mean-token-mean, dr_grpo for seq-mean-token-sum-norm":
        "LOSS_AGG_MODE",
    "set REASONING_EFFORT and PROMPT_DATE, which gpt-oss's chat template takes": "CHAT_TEMPLATE_KWARGS",
    "set VLLM_GPU_MEM={}, or leave it out: it is planned": "VLLM_GPU_MEMORY_UTILIZATION GPU_MEMORY_UTILIZATION",
    "set IS_CORRECTION=none to do without": "VLLM_IMPORTANCE_SAMPLING_CORRECTION",
    "set GRADIENT_CHECKPOINTING=0": "DISABLE_GRADIENT_CHECKPOINTING",
    "set EVAL_STEPS, the steps between two evaluations; EVAL_SAMPLES=0 leaves out all of them":
        "EVAL_STRATEGY EVAL_ON_START EVAL_DELAY DO_EVAL",
    "set BEST_BY, the figure that the adapter in best/ is kept by":
        "LOAD_BEST_MODEL_AT_END METRIC_FOR_BEST_MODEL GREATER_IS_BETTER",
    "set SAVE_STEPS, the steps between checkpoints; a signal saves one as well":
        "SAVE_STRATEGY SAVE_ONLY_MODEL SAVE_ON_EACH_NODE ENABLE_JIT_CHECKPOINT SKIP_SAVE_LORA SKIP_SAVE_MERGED",
    "name a local folder of that revision in MODEL_ID": "MODEL_REVISION",
    "write --check behind train_grpo.py": "DRY_RUN",
    "run scripts/export.py OUTPUT_DIR --push you/name afterwards":
        "PUSH_TO_HUB HUB_MODEL_ID HUB_TOKEN HUB_PRIVATE_REPO HUB_STRATEGY HUB_ALWAYS_PUSH HUB_REVISION",
}

# Why there is nothing to set -> the other tools' names for it.
UNSUPPORTED = {
    "like TOP_P below 1, it would bend the sampled log-probs away from the trained ones "
    "(https://github.com/huggingface/trl/issues/6789)":
        "TOP_K MIN_P REPETITION_PENALTY PRESENCE_PENALTY FREQUENCY_PENALTY VLLM_STRUCTURED_OUTPUTS_REGEX",
    "rollouts are sampled with TEMPERATURE, TOP_P and MAX_COMPLETION_LEN alone": "GENERATION_KWARGS",
    "vLLM generates, or transformers in batches of GENERATION_BATCH":
        "CACHE_IMPLEMENTATION USE_TRANSFORMERS_PAGED USE_TRANSFORMERS_CONTINUOUS_BATCHING "
        "TRANSFORMERS_CONTINUOUS_BATCHING_CONFIG",
    "vLLM runs inside this program and sleeps while the model learns":
        "VLLM_MODE VLLM_MODEL_IMPL VLLM_ENABLE_SLEEP_MODE VLLM_SERVER_BASE_URL VLLM_SERVER_HOST VLLM_SERVER_PORT "
        "VLLM_SERVER_TIMEOUT VLLM_GROUP_PORT",
    "importance ratios have an upper limit only, IS_CLIP_MAX": "VLLM_IMPORTANCE_SAMPLING_CLIP_MIN",
    "there is one optimizer step a rollout": "NUM_ITERATIONS PPO_EPOCHS PPO_MINI_BATCH_SIZE",
    "it was removed, the same command always continues the run, and OVERWRITE=1 starts again": "RESUME",
    "it was removed, the loss is Liger's for every LOSS_TYPE, luspo included": "LOSS_IMPL",
    "the loss is that of LOSS_TYPE with TRL's defaults":
        "DELTA SAPO_TEMPERATURE_NEG SAPO_TEMPERATURE_POS VESPO_K_POS VESPO_LAMBDA_POS VESPO_K_NEG VESPO_LAMBDA_NEG "
        "IMPORTANCE_SAMPLING_LEVEL MULTI_OBJECTIVE_AGGREGATION OFF_POLICY_MASK_THRESHOLD USE_BIAS_CORRECTION_KL "
        "TOP_ENTROPY_QUANTILE ENTROPY_COEF ENTROPY_COEFF USE_ADAPTIVE_ENTROPY ENTROPY_COEF_MIN ENTROPY_COEF_MAX "
        "ENTROPY_COEF_DELTA ENTROPY_TARGET LABEL_SMOOTHING_FACTOR NEFTUNE_NOISE_ALPHA",
    "the reference is the base model without the adapter, and stays as it is":
        "SYNC_REF_MODEL REF_MODEL_MIXUP_ALPHA REF_MODEL_SYNC_STEPS",
    "a load-balancing loss would be added to that of the rewards, so its weight is 0": "ROUTER_AUX_LOSS_COEF",
    "rewards are functions, there is no reward model (docs/data.md)": "REWARD_MODEL REWARD_MODEL_NAME_OR_PATH",
    "there are no tools": "MAX_TOOL_CALLING_ITERATIONS",
    "the optimizer is torch's AdamW with betas of 0.9 and 0.999":
        "OPTIM OPTIMIZER OPTIM_ARGS OPTIM_TARGET_MODULES ADAM_BETA1 ADAM_BETA2 ADAM_EPSILON",
    "LR_SCHEDULER has no options but WARMUP_STEPS": "LR_SCHEDULER_KWARGS",
    "what is trained is a plain LoRA adapter on LORA_TARGETS (all weights: docs/verl.md)":
        "USE_PEFT FULL_FINETUNING LORA_MODULES_TO_SAVE LORA_TASK_TYPE LORA_TARGET_LINEAR USE_RSLORA USE_DORA",
    "how gpt-oss is loaded is settled":
        "MODEL_INIT_KWARGS TRUST_REMOTE_CODE TOKENIZER_NAME DISABLE_FAST_TOKENIZER DISABLE_DROPOUT",
    "it computes in BF16 on a GPU, in float32 on a CPU":
        "BF16 FP16 TF32 BF16_FULL_EVAL FP16_FULL_EVAL DTYPE TORCH_DTYPE COMPUTE_DTYPE",
    "it runs on the visible GPU, else on the CPU (CUDA_VISIBLE_DEVICES)": "USE_CPU DEVICE_MAP",
    "every process holds the whole model (docs/clusters.md)":
        "LOCAL_RANK FSDP FSDP_CONFIG DEEPSPEED DS3_GATHER_FOR_GENERATION ACCELERATOR_CONFIG PARALLELISM_CONFIG "
        "AVERAGE_TOKENS_ACROSS_DEVICES DDP_FIND_UNUSED_PARAMETERS DDP_BUCKET_CAP_MB DDP_BROADCAST_BUFFERS "
        "DDP_STATIC_GRAPH DDP_BACKEND DDP_TIMEOUT IGNORE_BIAS_BUFFERS VLLM_TENSOR_PARALLEL_SIZE TENSOR_PARALLEL_SIZE",
    "kernels, packing and memory are this program's own (docs/learner.md)":
        "USE_LIGER_KERNEL USE_LIGER_LOSS LIGER_KERNEL_CONFIG TORCH_COMPILE TORCH_COMPILE_BACKEND TORCH_COMPILE_MODE "
        "COMPILE_MODE COMPILE_FULLGRAPH GRADIENT_CHECKPOINTING_KWARGS CAST_LM_HEAD_TO_FP32 PAD_TO_MULTIPLE_OF "
        "USE_CACHE TORCH_EMPTY_CACHE_STEPS SAMPLE_PACKING",
    "rows stay in memory, and SEED shuffles them anew for every round":
        "DATA_SEED FULL_DETERMINISM SHUFFLE_DATASET DATASET_STREAMING TRAIN_SAMPLING_STRATEGY LENGTH_COLUMN_NAME "
        "REMOVE_UNUSED_COLUMNS LABEL_NAMES DATALOADER_DROP_LAST DATALOADER_NUM_WORKERS DATALOADER_PIN_MEMORY "
        "DATALOADER_PERSISTENT_WORKERS DATALOADER_PREFETCH_FACTOR DATALOADER_MULTIPROCESSING_CONTEXT "
        "DATALOADER_IN_ORDER",
    "train_grpo.py trains, and evaluates before and after":
        "DO_TRAIN DO_PREDICT PER_DEVICE_EVAL_BATCH_SIZE PREDICTION_LOSS_ONLY EVAL_DO_CONCAT_BATCHES "
        "EVAL_USE_GATHER_OBJECT EVAL_ACCUMULATION_STEPS INCLUDE_FOR_METRICS BATCH_EVAL_METRICS",
    "every step is in metrics.csv, every completion in completions.csv":
        "LOGGING_STEPS LOGGING_STRATEGY LOGGING_FIRST_STEP LOGGING_DIR LOGGING_NAN_INF_FILTER LOG_ON_EACH_NODE "
        "LOG_LEVEL LOG_LEVEL_REPLICA LOG_COMPLETIONS LOG_MULTIMODAL LOG_UNIQUE_PROMPTS LOG_COMPLETIONS_HUB_REPO "
        "NUM_COMPLETIONS_TO_PRINT INCLUDE_NUM_INPUT_TOKENS_SEEN SKIP_MEMORY_METRICS DISABLE_TQDM DEBUG METRICS_CSV "
        "GENERATIONS_CSV METRICS_EMA_ALPHA GRPO_LOG_COMPLETIONS GRPO_COMPLETION_LOG_PATH",
    "trackers call the run as OUTPUT_DIR's folder":
        "RUN_NAME PROJECT TRACKIO_SPACE_ID TRACKIO_BUCKET_ID TRACKIO_STATIC_SPACE_ID",
}
# fmt: on

# Every name -> its answer, an instruction. That of SAME ends in ={}.
ANSWERS = {
    name: answer
    for answer, names in [
        *((f"set {setting}={{}}", names) for setting, names in SAME.items()),
        *INSTEAD.items(),
        *((f"leave it out: {reason}", names) for reason, names in UNSUPPORTED.items()),
    ]
    for name in names.split()
}

# Words that any program may export: as variables they are worth a warning, not an error.
COMMON = (
    "MODEL DATASET DATASETS DATA_DIR SYSTEM REWARD REWARD_MODEL STEPS MAX_TOKENS MAX_LENGTH RANDOM_SEED RANDOM_STATE "
    "ATTENTION OVERRIDE OUT OUTPUT OUTDIR OUT_DIR DRY_RUN OPTIM OPTIMIZER RUN_NAME DELTA BF16 FP16 TF32 DTYPE FSDP "
    "DEEPSPEED USE_CPU USE_CACHE DISABLE_TQDM LOGGING_DIR LABEL_NAMES DO_TRAIN DO_EVAL DO_PREDICT"
)
# Variables that other programs do read: they are left alone without a word.
FOREIGN = "DEBUG LOG_LEVEL LOCAL_RANK PROJECT HUB_TOKEN TRACKIO_SPACE_ID TRACKIO_BUCKET_ID"
