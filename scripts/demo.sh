#!/usr/bin/env bash
# The whole path on a machine without a GPU: environment, 400 GRPO steps of the tiny model, held-out reward, plant, zip.
#   bash scripts/demo.sh              some three minutes on two CPU cores, after the install
#   SEED=2 bash scripts/demo.sh       settings pass through (docs/settings.md)
#   bash scripts/demo.sh --language   on a GPU: a small model that speaks English solves sums in words, before and after
set -euo pipefail
language=no
case "${1:-}" in
    "") ;;
    --language) language=yes ;;
    --help | -h) sed -n '2,5s/^# //p' "$0" && exit 0 ;;
    *) echo "demo: it takes --language or nothing; settings are environment variables (docs/settings.md)" >&2 && exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# SmolLM2-135M in gpt-oss's format learns the form of answers (SFT), then to be right (GRPO), by TASK=gsm8k's problems.
if [ "$language" = yes ]; then
    export MODEL_ID=${MODEL_ID:-checkpoints/smollm2} OUTPUT_DIR=${OUTPUT_DIR:-runs/language} TASK=gsm8k
    python=${VENV:-.venv}/bin/python
    if [ ! -f "$MODEL_ID/config.json" ] || [ ! -x "$python" ]; then
        echo "demo: $MODEL_ID or $python is missing. Make them first:" >&2
        echo "  bash scripts/setup.sh && source .venv/bin/activate" >&2
        echo "  hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir smollm2-source" >&2
        echo "  python scripts/dev/make_model.py smollm2 --source smollm2-source --out checkpoints/smollm2" >&2
        exit 2
    fi
    command -v nvidia-smi >/dev/null || echo "demo: no GPU is visible, so this takes an hour or more instead of minutes" >&2
    export LORA_R=${LORA_R:-16} LORA_ALPHA=${LORA_ALPHA:-32} PROMPTS_PER_STEP=${PROMPTS_PER_STEP:-16}
    export MAX_COMPLETION_LEN=${MAX_COMPLETION_LEN:-128}
    if [ "$OUTPUT_DIR" = runs/language ]; then export OVERWRITE=${OVERWRITE:-1}; fi
    sft=$OUTPUT_DIR-sft
    TOTAL_STEPS=${SFT_STEPS:-80} LEARNING_RATE=1e-3 WARMUP_STEPS=5 "$python" scripts/sft.py --out "$sft"
    TOTAL_STEPS=${TOTAL_STEPS:-20} LEARNING_RATE=${LEARNING_RATE:-1e-4} INIT_ADAPTER=$sft "$python" train_grpo.py
    question=$("$python" -c 'import json; print(json.loads(open("data/gsm8k_heldout.jsonl").readline())["question"])')
    ask() { "$python" scripts/ask.py "$@" "$question" 2>/dev/null; }
    printf '\nA held-out question: %s\n\nThe model before any training:\n' "$question"
    ask "$sft" --base
    printf '\nAfter SFT, where GRPO starts:\n' && ask "$sft"
    printf '\nAfter GRPO:\n' && ask "$OUTPUT_DIR"
    echo "demo: report.html in $OUTPUT_DIR has the shares that are right, before, at the start and after"
    exit 0
fi

# A GPU environment is left alone: the demo is the CPU path.
if [ -z "${VENV:-}" ]; then
    VENV=.venv
    if grep -q '^gpu' .venv/.setup-stamp 2>/dev/null; then VENV=.venv-cpu; fi
fi
export VENV
bash scripts/setup.sh --cpu

export MODEL_ID=tiny OUTPUT_DIR=${OUTPUT_DIR:-runs/demo}
# The figures of docs/ were measured so; other rows may not have the reward of each action.
if [ -z "${TASK:-}${DATA:-}${REWARDS:-}" ]; then export EXPECTED_REWARD=${EXPECTED_REWARD:-1}; fi
# The demo may be run again and again: only its own default folder is overwritten without being asked.
if [ "$OUTPUT_DIR" = runs/demo ]; then export OVERWRITE=${OVERWRITE:-1}; fi
export CUDA_VISIBLE_DEVICES=""
SECONDS=0
"$VENV/bin/python" train_grpo.py
echo "demo: training and evaluation took $SECONDS s; the adapter is in $OUTPUT_DIR, the download in $OUTPUT_DIR.zip"
