#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SFT, PPO with a critic (or GRPO), merge and upload of Llama 3.2 1B on GSM8K, with the values of the first users' guide
# to verl (recipe_*.yaml), on the GPUs of one node that are visible: 1, 2, 4 or 8, as batches are shared out evenly.
#
#   export DATA=openai/gsm8k:main EVAL_DATA=openai/gsm8k:main:test OUTPUT_DIR=runs/llama HF_REPO=team/name
#   export WANDB_ENTITY=team            # after `hf auth login` and `wandb login`; WANDB_MODE=offline needs no account
#   srun --partition=TEAM --nodes=1 --gpus-per-node=8 --cpus-per-task=240 --time=30:30:00 --pty bash -i   # then, there:
#   bash scripts/verl/recipes/llama32_gsm8k/run.sh sft ppo merge upload
#   sbatch --partition=TEAM scripts/verl/recipes/llama32_gsm8k/run.sh sft ppo merge upload                # or as a job
#
# DRY_RUN=1 prints every command, and checks what needs no GPU. The same command continues stages that were interrupted.
# PPO starts from the SFT model where there is one, else from MODEL_ID; FROM=... names another.
#SBATCH --job-name=SFT_PPO_test
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=240
#SBATCH --time=30:30:00
set -euo pipefail
# A word that is wrong is told before the first stage, which takes hours.
for stage in "${@:-}"; do
    case "$stage" in
        sft | ppo | grpo | merge) ;;
        upload) : "${HF_REPO:?name it, as team/name}" ;;
        *) echo "unknown stage '$stage': sft, ppo, grpo, merge, upload" >&2 && exit 2 ;;
    esac
done

# Where a cluster has its software in modules, and the environment in conda:
#   module reset && module load nccl/2.22.3 hpcx/2.18.1-gcc-cuda12/hpcx-mt miniconda/24.7.1-py311
#   source "$(conda info --base)/etc/profile.d/conda.sh" && conda activate "$CONDA_PATH"
# verl's FSDP has no use for NVTE_FUSED_ATTN (TransformerEngine's). NCCL_SOCKET_IFNAME is needed where NCCL takes a
# wrong network (`ip -brief address`). scripts/verl/run.py takes ROCR_VISIBLE_DEVICES out, at which verl stops.

# sbatch runs a copy of this file, from elsewhere.
here=$(dirname "${BASH_SOURCE[0]}")
if [ -f "$here/recipe_ppo.yaml" ]; then cd "$here/../../../.."; else cd "${SLURM_SUBMIT_DIR:?}"; fi
export OUTPUT_DIR=${OUTPUT_DIR:-runs/llama32_gsm8k} MODEL_ID=${MODEL_ID:-meta-llama/Llama-3.2-1B-Instruct} TASK=gsm8k
# verl's own prompt and reward for GSM8K: the answer has to say #### and the number.
export REWARDS=${REWARDS-gsm8k_strict} SYSTEM_PROMPT=${SYSTEM_PROMPT-}
export PROMPT_TEMPLATE=${PROMPT_TEMPLATE-'{} Let'"'"'s think step by step and output the final answer after "####".'}
# CUDA reserves far more addresses than memory: a cluster's limit on them ends a run.
ulimit -v unlimited 2>/dev/null || echo "ulimit -v stays at $(ulimit -v) KiB, and CUDA may need more" >&2

NOTE=latest_checkpointed_iteration.txt # where verl names the last checkpoint that is whole

run() {
    printf '+ %s\n' "$*"
    [ "${DRY_RUN:-0}" != 0 ] || "$@"
}

train() { # STAGE
    local dry=()
    [ "${DRY_RUN:-0}" = 0 ] || dry=(--dry-run)
    python scripts/verl/run.py "$1" --recipe llama32_gsm8k "${dry[@]}"
}

merge() { # FOLDER_OF_CHECKPOINTS PART TARGET: the last that was saved whole, as transformers and vLLM load a model
    local step
    step=$(cat "$1/$NOTE" 2>/dev/null || echo N)
    run python -m verl.model_merger merge --backend fsdp --local_dir "$1/global_step_$step$2" --target_dir "$3"
}

# merge and upload take what this command trains, else what was trained last.
learned=ppo
[ ! "$OUTPUT_DIR/grpo/$NOTE" -nt "$OUTPUT_DIR/ppo/$NOTE" ] || learned=grpo
for stage in "$@"; do
    case "$stage" in
        sft)
            train sft
            merge "$OUTPUT_DIR/sft" "" "$OUTPUT_DIR/sft-merged"
            ;;
        ppo | grpo)
            learned=$stage from=$MODEL_ID
            [ ! -f "$OUTPUT_DIR/sft-merged/config.json" ] || from=$OUTPUT_DIR/sft-merged
            echo "$stage starts from ${FROM:-$from}"
            MODEL_ID=${FROM:-$from} train "$stage"
            ;;
        merge) merge "$OUTPUT_DIR/$learned" /actor "$OUTPUT_DIR/$learned-merged" ;;
        upload) run python scripts/export.py "$OUTPUT_DIR/$learned-merged" --push "$HF_REPO" ;;
    esac
done
