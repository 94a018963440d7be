#!/usr/bin/env bash
set -euo pipefail

# TRL needs 3.11 or later; the requirements were resolved up to 3.13. pyproject.toml states the same range.
PYTHON_VERSIONS="3.11 3.12 3.13"
# PyPI's torch is the CUDA build. uv knows where PyTorch keeps the CPU one, so that no package host stands in this file.
UV_VERSION=0.13.8
# torch in requirements.txt is built for CUDA 13, which needs at least this NVIDIA driver.
MIN_DRIVER=580

usage() {
    cat <<'HELP'
Usage: bash scripts/setup.sh [--cpu | --gpu] [--dry-run]

Makes a Python environment in .venv and installs the packages of requirements.txt (GPU) or requirements-cpu.txt (CPU).
With neither --cpu nor --gpu it takes the GPU set when nvidia-smi finds a GPU. A second run with nothing changed does
nothing.

  --cpu          install the CPU set
  --gpu          install the GPU set, also where no GPU is seen (to prepare an image, say)
  --dry-run      print the decisions and stop
  --help         print this text

Settings (environment variables):
  VENV=DIR          where to make the environment; a relative path is taken from the project's folder (.venv)
  PYTHON=FILE       the Python to use
  ALLOW_UNTESTED=1  go on beside an NVIDIA driver that is too old. Not needed where CUDA's forward-compatibility package
                    is installed: it is looked for in LD_LIBRARY_PATH, CUDA_HOME, CONDA_PREFIX and /usr/local/cuda*

Exit codes: 0 done; 1 a package could not be installed; 2 wrong option, or a folder that this script will not touch;
3 no fitting Python; 4 the system lacks something (card, driver, C library, compiler); 5 installed, but the check
afterwards failed.
HELP
}

say() { printf 'setup: %s\n' "$*"; }
warn() { printf 'setup: WARNING: %s\n' "$*" >&2; }
die() {
    printf 'setup: ERROR: %s\n' "${*:2}" >&2
    exit "$1"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind="" dry_run=no
for option in "$@"; do
    case "$option" in
        --cpu | --gpu)
            [ "${kind:-${option#--}}" = "${option#--}" ] || die 2 "--cpu and --gpu exclude each other"
            kind=${option#--} reason="$option was given"
            ;;
        --dry-run) dry_run=yes ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && die 2 "unknown option '$option'" ;;
    esac
done

# --- which set, and is it there already? -------------------------------------------------------------------------------
# nvidia-smi can be installed and still fail (no driver loaded), so it is run, not only looked for.
gpus=$(nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>/dev/null) || gpus=""
gpu=${gpus%%$'\n'*}
if [ -z "$kind" ]; then
    kind=cpu reason="nvidia-smi finds no GPU"
    [ -z "$gpu" ] || kind=gpu reason="nvidia-smi reports $gpu"
fi
if [ -z "$gpu" ] && { [ -e /dev/kfd ] || command -v rocm-smi >/dev/null; }; then
    warn "AMD GPUs are not supported: training gpt-oss needs an NVIDIA GPU, the CPU set trains MODEL_ID=tiny"
fi
requirements=requirements.txt
[ "$kind" = gpu ] || requirements=requirements-cpu.txt
say "set: $kind, from $requirements ($reason)"

# The stamp is written last: an install that broke off has "incomplete" in it and is taken up again. Only a folder with
# a stamp is ever emptied or installed into, as VENV may be mistyped, or an environment that somebody else made.
venv=${VENV:-.venv} stamp=${VENV:-.venv}/.setup-stamp
have=$(cat "$stamp" 2>/dev/null) || have=""
want="$kind $(sha256sum "$requirements" | cut -d' ' -f1)"
if [ "$have" = "$want" ] && [ -x "$venv/bin/python" ]; then
    say "$venv is up to date with $requirements: nothing to do"
    exit 0
elif [ -z "$have" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
    die 2 "$venv exists and was not made by this script: name another folder with VENV=DIR, or delete it"
elif [ -n "$have" ] && [ "${have%% *}" != "$kind" ]; then
    die 2 "$venv holds the ${have%% *} set, not $kind: take another folder (VENV=.venv-$kind), or delete it"
fi

# --- which Python ------------------------------------------------------------------------------------------------------
# Each candidate is run, because a version manager's stand-in can be on PATH and still fail.
python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
# vLLM and its kernels are tested most on 3.12. For the CPU set any version will do, and the system's needs no install.
candidates=(python3.12 python3 python3.13 python3.11)
[ "$kind" = gpu ] || candidates=(python3 "${candidates[@]}")
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
python="" version=""
for candidate in "${candidates[@]}"; do
    version=$(python_version "$candidate") || continue
    case " $PYTHON_VERSIONS " in *" $version "*) python=$candidate && break ;; esac
done
[ -n "$python" ] || die 3 "no Python of these versions runs: $PYTHON_VERSIONS (tried: ${candidates[*]}). For example:
  Ubuntu 24.04 and later:  apt install python3.12 python3.12-venv python3.12-dev
  any other Linux:         pip install uv && uv python install 3.12
                           PYTHON=\"\$(uv python find 3.12)\" bash scripts/setup.sh"
say "python: $(command -v "$python"), version $version"

# --- does the system fit? ----------------------------------------------------------------------------------------------
# Prints nothing if the libcuda.so.1 that is found first, with folder $1 before all others, serves this GPU and CUDA 13;
# else why not. Only the library knows: cuInit returns 803 or 804 where forward compatibility is not for driver or card.
libcuda_fault() {
    LD_LIBRARY_PATH="$1${1:+${LD_LIBRARY_PATH:+:}}${LD_LIBRARY_PATH:-}" "$python" -c '
import ctypes
cuda, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
code = cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version))
words = {803: ", it does not go with the driver", 804: ", it is not for this card"}
old = "" if version.value >= 13000 else "it is older than CUDA 13"
print(f"CUDA error {code}{words.get(code, str())}" if code else old)' 2>/dev/null ||
        echo "it cannot be loaded"
}

# Goes on beside an older driver if a forward-compatibility library is there and works; `compat` becomes its folder.
use_compat_library() {
    local folder fault refused=""
    local known=(${CUDA_HOME:+"$CUDA_HOME/compat"} ${CONDA_PREFIX:+"$CONDA_PREFIX/cuda-compat"})
    for folder in "" "${known[@]}" /usr/local/cuda*/compat{,/lib}; do
        [ -z "$folder" ] || [ -e "$folder/libcuda.so.1" ] || continue
        fault=$(libcuda_fault "$folder")
        if [ -z "$fault" ]; then
            compat=$folder
            say "driver $driver goes with CUDA 13 by the forward-compatibility library${folder:+ in $folder}"
            return
        fi
        [ -z "$folder" ] || refused="$refused The library in $folder does not do it: $fault."
    done
    local old="the NVIDIA driver is $driver; torch here is built for CUDA 13, which needs driver $MIN_DRIVER or newer"
    local advice="Install CUDA's forward-compatibility package (cuda-compat-13-0 from NVIDIA's package repository, or
  cuda-compat from conda-forge), or work in a CUDA 13 container, whose image brings it; then run this script again"
    case "$gpu" in
        *GeForce* | *RTX* | *GTX* | *TITAN* | *Quadro*)
            advice="Take an image with driver $MIN_DRIVER: CUDA's forward compatibility is for data-center cards"
            ;;
    esac
    [ "${ALLOW_UNTESTED:-0}" = 1 ] || die 4 "$old.$refused $advice (docs/install.md#older-drivers)"
    warn "$old.$refused Continuing because ALLOW_UNTESTED=1"
}

compat=""
if [ "$kind" = gpu ]; then
    # --check refuses such a card too; beside a newer one it can be left unused.
    [ -z "$gpu" ] || grep -qvE ', [1-7]\.[0-9]$' <<<"$gpus" ||
        die 4 "${gpu%%,*} has compute capability ${gpu##*, }, BF16 and FlashAttention need 8.0. Take an A100, L40S,
  H100, GH200 or a newer card, or --cpu for MODEL_ID=tiny"
    driver=$(cut -d, -f2 <<<"$gpu" | tr -d ' ')
    if [ -z "$gpu" ]; then
        warn "no GPU is seen: the set is installed, but whether it runs cannot be checked"
    elif ! [ "${driver%%.*}" -ge "$MIN_DRIVER" ] 2>/dev/null; then
        use_compat_library
    fi
    # With an older C library packages have no wheel: llguidance below 2.31 on x86_64, pynvvideocodec below 2.34 on aarch64.
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2) || glibc="0 (another C library)"
    printf '%s\n' 2.34 "$glibc" | sort -CV || die 4 "the GPU set needs glibc 2.34 or newer (Ubuntu 22.04), this is $glibc"
    # Triton compiles a small C launcher at run time: without a compiler and Python's headers training dies minutes in.
    [ -n "${CC:-}" ] || command -v gcc >/dev/null || command -v clang >/dev/null ||
        die 4 "no C compiler: apt install build-essential, or name another one in CC"
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$headers/Python.h" ] || die 4 "Python's headers are missing: apt install python$version-dev"
fi

[ "$dry_run" = no ] || { say "--dry-run: stopping before anything is made" && exit 0; }

# --- the environment ---------------------------------------------------------------------------------------------------
vpython=$venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
[ -t 1 ] || export PIP_QUIET=1
if [ -n "$have" ] && [ "$(python_version "$vpython")" != "$version" ]; then
    say "environment: $venv has another Python version and is deleted"
    rm -rf "$venv"
fi
say "environment: $venv"
mkdir -p "$venv"
echo "$kind incomplete" >"$stamp"
[ -x "$vpython" ] || "$python" -m venv "$venv" || die 3 "python -m venv failed: apt install python$version-venv"
if [ "$kind" = cpu ]; then
    # "+cpu" is what pip finds where it has been told of PyTorch's CPU wheels; elsewhere uv fetches them.
    torch=$(grep '^torch==' "$requirements")
    "$vpython" -m pip install "$torch+cpu" 2>/dev/null ||
        { "$vpython" -m pip install "uv==$UV_VERSION" &&
            UV_HTTP_RETRIES=1 "$vpython" -m uv pip install --python "$vpython" --torch-backend cpu "$torch"; } ||
        warn "torch's CPU build cannot be had; pip takes the CUDA build, which runs on a CPU as well but takes 3 GB more"
fi
"$vpython" -m pip install -r "$requirements" || die 1 "pip could not install $requirements (its messages are above)"

if [ -n "$compat" ]; then
    export LD_LIBRARY_PATH="$compat${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    grep -qsF "$compat" "$venv/bin/activate" ||
        printf 'export LD_LIBRARY_PATH=%q"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"\n' "$compat" >>"$venv/bin/activate"
    say "$venv/bin/activate puts $compat first on LD_LIBRARY_PATH: source it in every shell that trains"
fi
device=cpu
[ "$kind" = cpu ] || [ -z "$gpu" ] || device=cuda
"$vpython" -c 'import sys, torch; torch.ones(2, device=sys.argv[1]).sum().item(); print("setup: torch", torch.__version__)' "$device" ||
    die 5 "installed, but torch does not work on $device (its message is above; cuda: is the driver too old for it?)"
say "installed, and torch works on $device"
echo "$want" >"$stamp"
say "done in $SECONDS s; use it with:  source $venv/bin/activate"
