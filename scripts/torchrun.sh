#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs train_grpo.py by torchrun, one process a GPU. A signal goes to these processes, which finish their step and save a
# checkpoint; torchrun itself would kill them after 30 s, which no option changes before torch 2.12. A lost terminal ends
# nothing.
#
#   bash scripts/torchrun.sh --nproc-per-node 2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
(
    trap '' HUP INT TERM # inherited
    exec python -m torch.distributed.run --signals-to-handle SIGQUIT "$@" train_grpo.py
) &
run=$!
trap 'pkill -INT -P $run || true' INT
trap 'pkill -TERM -P $run || true' TERM
while true; do
    wait $run && code=0 || code=$?
    kill -0 $run 2> /dev/null || break # a signal ends `wait`, not torchrun
done
exit $code
