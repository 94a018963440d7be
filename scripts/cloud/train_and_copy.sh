#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'HELP'
Usage: OUTPUT_DIR=runs/first bash scripts/cloud/train_and_copy.sh COPY [SECONDS]

Runs train_grpo.py and copies OUTPUT_DIR to COPY every SECONDS (30) while it trains, and the zip at its end. Where
OUTPUT_DIR holds no run yet, it first takes the one in COPY: on a new machine the same command continues the run.

COPY is a folder of its own, such as one in a mounted bucket or on a disk, or HOST:FOLDER of a folder that exists. The
zip comes beside it. Files in COPY that no run wrote stay. Needs rsync.
The exit code is that of train_grpo.py, 2 where nothing was started, or 1 where it was 0 and the last copy failed.
HELP
}

refuse() {
    echo "train_and_copy: $1. Nothing was started" >&2
    exit 2
}

case "${1:-}" in
    "" | -*) usage && exit 2 ;;
esac
run=${OUTPUT_DIR:?name the folder of the run in OUTPUT_DIR}
run=${run%/} copy=${1%/} seconds=${2:-30}
[[ $# -le 2 && $seconds =~ ^[0-9]*\.?[0-9]+$ && $seconds =~ [1-9] ]] || refuse "SECONDS=${*:2}: give a number above 0"
command -v rsync >/dev/null || refuse "rsync is not installed"
case "${OVERWRITE:-0}" in
    0 | [Ff]* | [Nn]* | off) ;;
    *) refuse "OVERWRITE=$OVERWRITE would begin again on every machine: delete $run and $copy yourself" ;;
esac
if [[ $copy == *:* ]]; then
    [ -n "${copy#*:}" ] || refuse "$1: name a folder of the host"
elif [ -z "$copy" ] || mountpoint -q "$copy"; then
    refuse "$1 is the root of a disk or bucket: name a folder in it, because the zip comes beside that"
else
    case "$(realpath -m "$copy")/" in
        "$(realpath -m "$run")"/*) refuse "$1 lies in OUTPUT_DIR: every copy would copy the copies" ;;
    esac
    mkdir -p "$copy"
fi

# --- compare with the copy, or take it -------------------------------------------------------------------------------
# The step of the last whole checkpoint in a folder, empty without. A manifest stays empty until the rest is written.
last_step() {
    local manifest name
    for manifest in "$1"/checkpoint-*/manifest.json; do
        name=$(dirname "$manifest")
        [ "$(stat -c %s "$manifest" 2>/dev/null || echo 0)" -le 9 ] || echo "${name##*-}"
    done | sort -n | tail -n 1
}
first_row() { [ ! -f "$1/metrics.csv" ] || sed -n 2p "$1/metrics.csv"; }

owed="" # 1: the run here is complete, and its copy is not
# A fresh run instead of one in COPY that cannot be read would overwrite COPY.
unread() { refuse "$copy cannot be read (rsync's message is above)"; }
if [ ! -f "$run/settings.json" ]; then
    # The copy goes to another folder first: a run must not begin from half of it if the machine goes away now.
    rm -rf "$run.part"
    mkdir -p "$run.part"
    rsync -rt "$copy/" "$run.part/" || unread
    if [ -f "$run.part/settings.json" ]; then
        echo "train_and_copy: $run continues from $copy"
        # Other files in OUTPUT_DIR are not this script's to delete.
        [ ! -d "$run" ] || rmdir "$run" || refuse "$run holds files of no run: name another OUTPUT_DIR"
        mv "$run.part" "$run"
    else
        # The first machine went away before a run was copied: there is nothing to continue. But a project's or an
        # adapter's folder would be written over.
        for name in README.md adapter_model.safetensors metrics.csv; do
            [ ! -e "$run.part/$name" ] || refuse "$copy holds $name and no run (no settings.json): name another folder"
        done
        rm -rf "$run.part"
    fi
else
    # The disk of an earlier machine may hold an older state of the run than its copy, or another run.
    peek=$(mktemp -d)
    rsync -rt --include=/metrics.csv --include=/complete.json --include='/checkpoint-*/' \
        --include='/checkpoint-*/manifest.json' --exclude='*' "$copy/" "$peek/" || unread
    there=$(last_step "$peek") here=$(last_step "$run") row_there=$(first_row "$peek") row_here=$(first_row "$run")
    [ ! -f "$run/complete.json" ] || [ -f "$peek/complete.json" ] || owed=1
    rm -rf "$peek"
    if [ "${there:-0}" -gt "${here:-0}" ]; then
        refuse "$copy is at step $there, $run at step ${here:-0}: move $run away to continue the copy"
    elif [ -n "$there" ] && [ "$row_there" != "$row_here" ]; then
        refuse "$copy holds another run than $run: name another folder"
    fi
fi

# --- train, and copy meanwhile ---------------------------------------------------------------------------------------
# The trainer writes settings.json again when its checks have passed. Before that nothing is copied: what it refuses,
# such as a damaged folder, must not replace a good copy. It refuses a complete run, too, which may lack its last copy.
written() { stat -c '%i %z' "$run/settings.json" 2>/dev/null || true; }
before=$(written)
may_copy() { [ -n "$owed" ] || [ "$(written)" != "$before" ]; }
# settings.json is first, because a folder without it is no run. complete.json, which the run writes after its zip, is
# hidden until it is there at the beginning: it must not come into a copy whose zip was still missing. Old files are
# deleted last: cut off at any moment, the copy holds a whole checkpoint. R names what may be deleted, P protects
# everything else.
copy_run() {
    local unfinished=()
    [ -f "$run/complete.json" ] || unfinished=(--filter='H /complete.json')
    rsync -t "$run/settings.json" "$copy/" && { [ ! -f "$run.zip" ] || rsync -t "$run.zip" "$copy.zip"; } &&
        rsync -rt --delete-after "${unfinished[@]}" --filter='R /checkpoint-*/***' --filter='R /complete.json' \
            --filter='R /exit.json' --filter='R /best.old/***' --filter='P *' --exclude='*.tmp' "$run/" "$copy/"
}

# On a notice that the machine goes away, or Ctrl-C, the run saves a checkpoint after its step, and ends.
training="" notice=""
on_notice() {
    notice=1
    [ -z "$training" ] || kill -TERM "$training" 2>/dev/null || true
}
trap on_notice TERM INT HUP
# In a session of its own Ctrl-C reaches the run once, from here: a second signal would end it at once. Where this
# script is killed, the run saves a checkpoint too.
setsid setpriv --pdeathsig TERM python train_grpo.py &
training=$!
[ -z "$notice" ] || on_notice
while kill -0 "$training" 2>/dev/null; do
    # This ends with the run, so that the last copy begins at once.
    timeout "$seconds" tail -s 0.1 --pid="$training" -f /dev/null &
    wait $! || true # A signal ends this wait.
    ! may_copy || copy_run || echo "train_and_copy: the copy to $copy failed; the next one is in $seconds s" >&2
done
code=0
wait "$training" || code=$?
may_copy || exit "$code"
for attempt in 1 2 3 4 5; do
    copy_run && exit "$code"
    echo "train_and_copy: copy $attempt of 5 to $copy failed" >&2
    sleep 2
done
[ "$code" -ne 0 ] || code=1
exit "$code"
