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
# Slim images have no pkill, and torchrun gives each process a group of its own.
processes() { cat /proc/$run/task/*/children 2> /dev/null || true; }
starting=1
forward() {
    local started child
    started=$(processes)
    for child in $started; do kill -s "$1" "$child" 2> /dev/null || true; done
    # torchrun itself heeds no signal while it waits for other machines, which may be a quarter of an hour.
    [ -z "$starting" ] || [ -n "$started" ] || kill -KILL $run 2> /dev/null || true
}
trap 'forward INT' INT
trap 'forward TERM' TERM
while [ -z "$(processes)" ] && kill -0 $run 2> /dev/null; do sleep 0.2 || true; done
starting=""
while true; do
    wait $run && code=0 || code=$?
    kill -0 $run 2> /dev/null || break # a signal ends `wait`, not torchrun
done
exit $code
