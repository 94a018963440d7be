#!/usr/bin/env bash
set -euo pipefail

# The bounds are those of the packages: TRL needs Python 3.11, and 3.13 is the newest one the sets were resolved for.
# pyproject.toml states the same range; tests/test_packaging.py compares the two.
PYTHON_VERSIONS="3.11 3.12 3.13"
# uv fetches in parallel and knows PyTorch's own CPU wheels, so that no package host has to stand in this file.
UV_VERSION=0.13.8
# Free space asked for, in GB: the finished environment, and the packages that pip or uv keep in their cache beside it.
GPU_DISK_GB=14
CPU_DISK_GB=4
# The same where only torch's CUDA build can be had.
CPU_FALLBACK_DISK_GB=9
# torch's PyPI wheel in requirements.txt is built for CUDA 13, which needs at least this NVIDIA driver.
MIN_DRIVER=580

usage() {
    cat <<'HELP'
Usage: bash scripts/setup.sh [--cpu | --gpu] [--flash-attn] [--recreate] [--dry-run]

Makes a Python environment in .venv and installs the packages of requirements.txt (GPU) or requirements-cpu.txt (CPU).
With neither --cpu nor --gpu it takes the GPU set when nvidia-smi finds a GPU. A second run with nothing changed does
nothing.

  --cpu          install the CPU set
  --gpu          install the GPU set, also where no GPU is seen (to prepare an image, say)
  --flash-attn   GPU set, then build FlashAttention 2 from source (needs nvcc; can take an hour)
  --recreate     delete an environment that this script made before, and make it anew
  --dry-run      print the decisions and stop
  --help         print this text

Settings (environment variables):
  VENV=DIR       where to make the environment; a relative path is taken from the project's folder (.venv)
  PYTHON=FILE    the Python to use
  MAX_JOBS=N     compilers at a time for FlashAttention 2 (by default from the free memory)

Exit codes: 0 done; 1 a package could not be installed; 2 wrong option, or a folder that this script will not touch;
3 no fitting Python; 4 the system lacks something (disk space, C library, compiler, nvcc); 5 installed, but the check
afterwards failed.
HELP
}

say() { printf 'setup: %s\n' "$*"; }
warn() { printf 'setup: WARNING: %s\n' "$*" >&2; }
die() {
    local code=$1
    shift
    printf 'setup: ERROR: %s\n' "$*" >&2
    exit "$code"
}

free_gb_at() { echo $(($(df -Pk "$1" | awk 'NR == 2 { print $4 }') * 1024 / 1000000000)); }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
SECONDS=0
kind=auto flash=no recreate=no dry_run=no
while [ $# -gt 0 ]; do
    case "$1" in
        --cpu | --gpu)
            [ "$kind" = auto ] || [ "$kind" = "${1#--}" ] || die 2 "--cpu and --gpu exclude each other"
            kind=${1#--}
            ;;
        --flash-attn) flash=yes ;;
        --recreate) recreate=yes ;;
        --dry-run) dry_run=yes ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            usage >&2
            die 2 "unknown option '$1'"
            ;;
    esac
    shift
done
venv=${VENV:-.venv}
[ "$(uname -s)" = Linux ] || warn "written for Linux, this is $(uname -s): the CPU set may work, the GPU set will not"

# --- which set ---------------------------------------------------------------------------------------------------------
# nvidia-smi can be installed and still fail (no driver loaded), so it is run, not only looked for.
gpus=$(nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>/dev/null) || gpus=""
case "$kind" in
    cpu) reason="--cpu was given" ;;
    gpu) reason="--gpu was given" ;;
    auto)
        if [ "$flash" = yes ]; then
            kind=gpu reason="--flash-attn needs it"
        elif [ -n "$gpus" ]; then
            kind=gpu reason="nvidia-smi reports ${gpus%%$'\n'*}"
        else
            kind=cpu reason="nvidia-smi finds no GPU"
        fi
        ;;
esac
[ "$kind" = gpu ] || [ "$flash" = no ] || die 2 "--flash-attn needs the GPU set"
if [ "$kind" = gpu ]; then
    requirements=requirements.txt need_gb=$GPU_DISK_GB
else
    requirements=requirements-cpu.txt need_gb=$CPU_DISK_GB
fi
say "set: $kind, from $requirements ($reason)"

# --- nothing to do? ----------------------------------------------------------------------------------------------------
# The stamp is written last, so a broken-off install has "incomplete" in it and is taken up again.
stamp=$venv/.setup-stamp
want="$kind $(sha256sum "$requirements" | cut -d' ' -f1)"
have=$(cat "$stamp" 2>/dev/null) || have=""
flash_done=no
case "$have" in *" flash-attn") flash_done=yes ;; esac
if [ "$recreate" = no ] && [ -x "$venv/bin/python" ] && [ "${have% flash-attn}" = "$want" ] &&
    { [ "$flash" = no ] || [ "$flash_done" = yes ]; }; then
    say "$venv is up to date with $requirements: nothing to do (${SECONDS} s)"
    exit 0
fi

# --- may the folder be used? -------------------------------------------------------------------------------------------
# Only a folder with this script's stamp is ever emptied or installed into: VENV may have been mistyped, and an
# environment made by somebody else is not ours to change.
if [ -e "$venv" ] && [ -z "$have" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
    die 2 "$venv exists and was not made by this script: name another folder with VENV=DIR, or delete it"
fi
if [ -n "$have" ] && [ "${have%% *}" != "$kind" ] && [ "$recreate" = no ]; then
    die 2 "$venv holds the ${have%% *} set, not $kind: take another folder (VENV=.venv-$kind), or add --recreate"
fi

# --- which Python ------------------------------------------------------------------------------------------------------
# Each candidate is run: a version manager's stand-in can be on PATH and still fail.
python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
in_range() { case " $PYTHON_VERSIONS " in *" $1 "*) return 0 ;; *) return 1 ;; esac }
if [ "$kind" = gpu ]; then
    # vLLM and its kernels are tried most on 3.12.
    candidates="python3.12 python3 python3.13 python3.11" wanted=3.12
else
    # Anything in range does; the system's own needs no further install.
    candidates="python3 python3.12 python3.13 python3.11" wanted=3.12
fi
python=""
if [ -n "${PYTHON:-}" ]; then
    version=$(python_version "$PYTHON") || die 3 "PYTHON=$PYTHON does not run"
    in_range "$version" || die 3 "PYTHON=$PYTHON is Python $version; one of $PYTHON_VERSIONS is needed"
    python=$PYTHON reason="PYTHON names it"
else
    for candidate in $candidates; do
        version=$(python_version "$candidate") || continue
        if in_range "$version"; then
            python=$candidate reason="first that fits of: $candidates"
            break
        fi
    done
fi
if [ -z "$python" ]; then
    die 3 "no Python $wanted found (also fine: $PYTHON_VERSIONS). Install one, for example
  Ubuntu 24.04 and later:  apt install python$wanted python$wanted-venv python$wanted-dev
  any other Linux:         pip install uv && uv python install $wanted
                           PYTHON=\"\$(uv python find $wanted)\" bash scripts/setup.sh"
fi
say "python: $(command -v "$python"), version $version ($reason)"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die 3 "Python $version lacks venv or ensurepip: apt install python$version-venv (on Debian also: python3-venv)"

# --- does the system fit? ----------------------------------------------------------------------------------------------
machine=$(uname -m)
if [ "$kind" = gpu ]; then
    # Older than this, two packages have no wheel (llguidance on x86_64, pynvvideocodec on aarch64).
    case "$machine" in
        x86_64) min_glibc=2.31 ;;
        aarch64) min_glibc=2.34 ;;
        *) die 4 "the GPU set has wheels for x86_64 and aarch64 only, this machine is $machine" ;;
    esac
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2) || glibc=""
    [ -n "$glibc" ] || die 4 "the GPU set needs glibc $min_glibc or newer, and this system has another C library"
    [ "$(printf '%s\n' "$min_glibc" "$glibc" | sort -V | head -n 1)" = "$min_glibc" ] ||
        die 4 "the GPU set needs glibc $min_glibc or newer on $machine, this is $glibc (Ubuntu 22.04 is new enough)"
    # Triton compiles a small C launcher at run time: without a compiler and Python's headers training dies minutes in.
    command -v gcc >/dev/null || command -v clang >/dev/null || die 4 "no C compiler: apt install build-essential"
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$headers/Python.h" ] || die 4 "Python's headers are missing: apt install python$version-dev"
    if [ -n "$gpus" ]; then
        driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
        [ "${driver%%.*}" -ge "$MIN_DRIVER" ] ||
            warn "the NVIDIA driver is $driver; torch here is built for CUDA 13, which needs driver $MIN_DRIVER or newer"
    else
        warn "no GPU is seen: the set is installed, but whether it runs cannot be checked"
    fi
fi
place=$venv
while [ ! -d "$place" ]; do place=$(dirname "$place"); done
free_gb=$(free_gb_at "$place")
say "disk: $free_gb GB free at $(cd "$place" && pwd), $need_gb GB asked for (environment and package cache)"
# An environment that is already half there needs less, so only a new one is refused.
if [ "$free_gb" -lt "$need_gb" ]; then
    [ -n "$have" ] || die 4 "not enough disk space: free some, or name a folder on another disk with VENV=DIR"
    warn "little disk space left"
fi

# --- FlashAttention 2: checked before anything is downloaded -----------------------------------------------------------
if [ "$flash" = yes ]; then
    flash_requirement=$(sed -n 's/^# optional: \(flash-attn==[^ ]*\)$/\1/p' requirements.txt)
    [ -n "$flash_requirement" ] || die 2 "requirements.txt names no flash-attn version"
    if [ -z "${CUDA_HOME:-}" ]; then
        nvcc=$(command -v nvcc || true)
        if [ -n "$nvcc" ]; then
            CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
        else
            CUDA_HOME=/usr/local/cuda
        fi
    fi
    export CUDA_HOME
    [ -x "$CUDA_HOME/bin/nvcc" ] || die 4 "FlashAttention 2 is compiled here and needs nvcc: install the CUDA toolkit, or set CUDA_HOME"
    if [ -z "${MAX_JOBS:-}" ]; then
        # One nvcc with its 4 threads takes 8 to 9 GB; more jobs than memory allows end in the out-of-memory killer.
        mem_gb=$(awk '/^MemAvailable/ { print int($2 / 1000000) }' /proc/meminfo)
        MAX_JOBS=$((mem_gb / 9))
        cores=$(nproc)
        [ "$MAX_JOBS" -le "$cores" ] || MAX_JOBS=$cores
        [ "$MAX_JOBS" -ge 1 ] || MAX_JOBS=1
        reason="$mem_gb GB free at 9 GB a job, $cores cores"
    else
        reason="MAX_JOBS was set"
    fi
    export MAX_JOBS
    if [ -z "${FLASH_ATTN_CUDA_ARCHS:-}" ] && [ -n "$gpus" ]; then
        # Its default is four GPU generations; compiling only for this one takes about a quarter of the time.
        capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
        export FLASH_ATTN_CUDA_ARCHS="${capability%%.*}0"
    fi
    say "flash-attn: $flash_requirement, MAX_JOBS=$MAX_JOBS ($reason), GPU architectures ${FLASH_ATTN_CUDA_ARCHS:-its default}"
fi
if [ "$dry_run" = yes ]; then
    say "--dry-run: stopping before anything is made"
    exit 0
fi

# --- the environment ---------------------------------------------------------------------------------------------------
if [ -n "$have" ] && { [ "$recreate" = yes ] || [ "$(python_version "$venv/bin/python" || true)" != "$version" ]; }; then
    say "environment: $venv is made anew with Python $version"
    rm -rf "$venv"
    have=""
fi
if [ -z "$have" ]; then
    say "environment: $venv"
    mkdir -p "$venv"
    # Stamped before the first file is made, so that a run broken off here can be taken up.
    echo "$kind incomplete" >"$stamp"
    "$python" -m venv "$venv" || die 3 "python -m venv failed: apt install python$version-venv"
else
    say "environment: $venv is brought up to date"
    echo "$kind incomplete" >"$stamp"
fi
vpython=$(cd "$venv/bin" && pwd)/python
quiet=()
[ -t 1 ] || quiet=(--quiet)
pip_install() { "$vpython" -m pip install --disable-pip-version-check ${quiet[@]+"${quiet[@]}"} "$@"; }
# Short limits: where a host cannot be reached, the fallback should start in seconds, not minutes.
uv_install() {
    UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-30} UV_HTTP_RETRIES=${UV_HTTP_RETRIES:-2} \
        "$vpython" -m uv pip install --python "$vpython" ${quiet[@]+"${quiet[@]}"} "$@"
}

# pip's configuration decides who installs: uv does not read it.
pip_config=$("$vpython" -m pip config list 2>/dev/null) || pip_config=""
installer=uv reason="parallel downloads"
if grep -q 'find-links' <<<"$pip_config"; then
    installer=pip reason="pip is told where wheels lie (find-links)"
elif [ "$kind" = gpu ] && grep -Eq 'index-url|no-index' <<<"$pip_config"; then
    installer=pip reason="pip is given an index of its own"
elif ! pip_install "uv==$UV_VERSION"; then
    installer=pip reason="uv could not be installed"
elif [ "$kind" = cpu ]; then
    reason="it finds torch's CPU build"
fi
say "installer: $installer ($reason)"
torch_first() {
    # torch by itself: the option would send uv to PyTorch's index for triton too, which need not have our release. What
    # is installed stays, so the second step takes only the rest.
    [ "$kind" = gpu ] || uv_install --torch-backend cpu "$(grep '^torch==' "$requirements")"
}
if [ "$installer" = uv ] && ! { torch_first && uv_install -r "$requirements"; }; then
    warn "uv failed; trying pip"
    if [ "$kind" = cpu ] && [ "$(uname -s)" = Linux ] && ! "$vpython" -c 'import torch' 2>/dev/null; then
        warn "pip takes torch's CUDA build from PyPI: it runs on a CPU as well, but the environment takes 5.4 GB, not 2.3"
        [ "$(free_gb_at "$venv")" -ge "$CPU_FALLBACK_DISK_GB" ] ||
            die 4 "that needs $CPU_FALLBACK_DISK_GB GB of free disk space with pip's cache: free some, or set VENV=DIR"
    fi
    installer=pip
fi
if [ "$installer" = pip ]; then
    pip_install -r "$requirements" || die 1 "pip could not install $requirements (its messages are above)"
fi

# --- does it work? -----------------------------------------------------------------------------------------------------
"$vpython" - "$kind" "$([ -n "$gpus" ] && echo seen)" <<'CHECK' || die 5 "installed, but the check failed (its message is above)"
import importlib.metadata as metadata
import platform
import sys

import torch

kind, gpu_seen = sys.argv[1:]
names = "torch transformers trl peft accelerate datasets" + (" vllm" if kind == "gpu" else "")
print("setup: installed: python", platform.python_version(), *(f"| {name} {metadata.version(name)}" for name in names.split()))
assert float(torch.ones(2, 2).sum()) == 4.0
if kind == "gpu" and gpu_seen:
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU although nvidia-smi does: the driver is probably older than the CUDA of this torch")
    assert float(torch.ones(2, 2, device="cuda").sum()) == 4.0
    print("setup: GPU:", torch.cuda.get_device_name(), "| CUDA", torch.version.cuda)
CHECK
# The set stands: a FlashAttention build that fails below does not undo it.
echo "$want" >"$stamp"

# --- FlashAttention 2 --------------------------------------------------------------------------------------------------
if [ "$flash" = yes ]; then
    # nvcc must be of the CUDA generation that torch was built for; torch's build helper refuses otherwise, late.
    torch_cuda=$("$vpython" -c 'import torch; print(torch.version.cuda or "")')
    nvcc_cuda=$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
    [ "${torch_cuda%%.*}" = "${nvcc_cuda%%.*}" ] ||
        die 4 "nvcc is of CUDA ${nvcc_cuda:-?}, torch was built for CUDA ${torch_cuda:-?}: install a CUDA ${torch_cuda%%.*} toolkit"
    # No build isolation: it must be compiled against the torch installed above, so its build tools come first.
    pip_install wheel setuptools packaging psutil ninja || die 1 "the build tools could not be installed"
    started=$SECONDS
    pip_install --no-build-isolation "$flash_requirement" || die 1 "$flash_requirement did not build"
    "$vpython" -c 'import flash_attn; print("setup: flash_attn", flash_attn.__version__)' || die 5 "flash_attn does not import"
    say "flash-attn: built in $((SECONDS - started)) s"
fi

if [ "$flash" = yes ] || { [ "$flash_done" = yes ] && "$vpython" -c 'import flash_attn' 2>/dev/null; }; then
    want="$want flash-attn"
fi
echo "$want" >"$stamp"
say "done in ${SECONDS} s; use it with:  source $venv/bin/activate"
