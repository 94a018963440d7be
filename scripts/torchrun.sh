#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torchrun for train_grpo.py: one process a GPU. A signal goes to these processes, which finish their step and save a
# checkpoint; torchrun itself would kill them 30 s later (before torch 2.12 whatever is set). A lost terminal ends nothing.
#
#   bash scripts/torchrun.sh --nproc-per-node 2
set -u
cd "$(dirname "$0")/.." || exit 1
(
    trap '' HUP INT TERM # inherited
    exec python -m torch.distributed.run --signals-to-handle SIGQUIT "$@" train_grpo.py
) &
run=$!
trap 'pkill -INT -P $run' INT
trap 'pkill -TERM -P $run' TERM
while
    wait $run
    code=$?
    kill -0 $run 2> /dev/null # a signal ends `wait`, not torchrun
do :; done
exit $code
