#!/usr/bin/env bash
# The whole path on a machine without a GPU: environment, 400 GRPO steps of the tiny model, held-out reward, plant, zip.
#   bash scripts/demo.sh              some three minutes on two CPU cores, after the install
#   SEED=2 bash scripts/demo.sh       settings pass through (docs/settings.md)
set -euo pipefail
case "${1:-}" in
    "") ;;
    --help | -h) sed -n '2,4s/^# //p' "$0" && exit 0 ;;
    *) echo "demo: it takes no arguments; settings are environment variables (docs/settings.md)" >&2 && exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# A GPU environment is left alone: the demo is the CPU path.
if [ -z "${VENV:-}" ]; then
    VENV=.venv
    if grep -q '^gpu' .venv/.setup-stamp 2>/dev/null; then VENV=.venv-cpu; fi
fi
export VENV
bash scripts/setup.sh --cpu

export MODEL_ID=tiny OUTPUT_DIR=${OUTPUT_DIR:-runs/demo}
export EXPECTED_REWARD=${EXPECTED_REWARD:-1} # The figures of docs/ were measured so.
# The demo may be run again and again: only its own default folder is overwritten without being asked.
if [ "$OUTPUT_DIR" = runs/demo ]; then export OVERWRITE=${OVERWRITE:-1}; fi
export CUDA_VISIBLE_DEVICES=""
SECONDS=0
"$VENV/bin/python" train_grpo.py
echo "demo: training and evaluation took $SECONDS s; the adapter is in $OUTPUT_DIR, the download in $OUTPUT_DIR.zip"
