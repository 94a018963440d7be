#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'HELP'
Usage: OUTPUT_DIR=runs/first bash scripts/cloud/train_and_copy.sh COPY [SECONDS]

Runs train_grpo.py and copies OUTPUT_DIR to COPY every SECONDS (30) while it trains, and the zip at its end. Where
OUTPUT_DIR holds no run yet, it first takes the one in COPY: on a new machine the same command continues the run.

COPY is a folder, such as one of a mounted bucket or disk, or HOST:FOLDER of a folder that exists. Needs rsync.
The exit code is that of train_grpo.py, or 1 where it was 0 and the last copy failed.
HELP
}

case "${1:-}" in
    "" | -*) usage && exit 2 ;;
esac
run=${OUTPUT_DIR:?name the folder of the run in OUTPUT_DIR}
run=${run%/} copy=${1%/} seconds=${2:-30}

# --- take the copy ---------------------------------------------------------------------------------------------------
# A failed copy ends the script here: a fresh run instead of the one in COPY would overwrite COPY.
if [ ! -f "$run/settings.json" ]; then
    [[ $copy == *:* ]] || mkdir -p "$copy"
    # The copy goes to another folder first: a run must not begin from half of it if the machine goes away now.
    rm -rf "$run.part"
    mkdir -p "$run.part"
    rsync -rt "$copy/" "$run.part/"
    if [ -f "$run.part/settings.json" ]; then
        echo "train_and_copy: $run continues from $copy"
        # rmdir fails if OUTPUT_DIR holds other files, which are not this script's to delete.
        [ ! -d "$run" ] || rmdir "$run"
        mv "$run.part" "$run"
    else
        # The first machine went away before a run was copied: there is nothing to continue.
        rm -rf "$run.part"
    fi
fi

# --- train, and copy meanwhile ---------------------------------------------------------------------------------------
# New files come first and old ones are deleted last: cut off at any moment, the copy holds a whole checkpoint.
copy_run() { [ ! -f "$run/settings.json" ] || rsync -rt --delete-after "$run/" "$copy/"; }
copy_all() { copy_run && { [ ! -f "$run.zip" ] || rsync -t "$run.zip" "$copy.zip"; }; }

python train_grpo.py &
training=$!
# On a notice that the machine goes away, or Ctrl-C, the run saves a checkpoint after its step, and ends.
trap 'kill -TERM "$training" 2>/dev/null || true' TERM INT HUP
while kill -0 "$training" 2>/dev/null; do
    sleep "$seconds" >/dev/null 2>&1 &
    wait $! || true # a signal ends this wait
    copy_run || echo "train_and_copy: the copy to $copy failed; the next one is in $seconds s" >&2
done
code=0
wait "$training" || code=$?
for attempt in 1 2 3 4 5; do
    copy_all && exit "$code"
    echo "train_and_copy: copy $attempt of 5 to $copy failed" >&2
    sleep "$seconds"
done
[ "$code" -ne 0 ] || code=1
exit "$code"
