#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'HELP'
Usage: bash scripts/test.sh [--setup-only] [pytest's arguments]

Makes the CPU environment if it is not there (scripts/setup.sh --cpu), adds the test tools of pyproject.toml, and runs
all tests and rewards.py's doctests; with file names only those.

  bash scripts/test.sh                        everything
  bash scripts/test.sh -m 'not slow' -x       whatever pytest takes
  bash scripts/test.sh tests/test_rewards.py  one file
  bash scripts/test.sh --setup-only           make the environment, print its Python, run nothing

VENV=DIR chooses the environment's folder (.venv; .venv-cpu where .venv holds the GPU set).
HELP
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
setup_only=no
case "${1:-}" in
    --help | -h) usage && exit 0 ;;
    --setup-only) setup_only=yes && shift ;;
esac

# The tests are written for the CPU set's versions, and a GPU environment is not to be changed for their sake.
if [ -z "${VENV:-}" ]; then
    VENV=.venv
    if grep -q '^gpu' .venv/.setup-stamp 2>/dev/null; then VENV=.venv-cpu; fi
fi
export VENV
bash scripts/setup.sh --cpu
python=$(cd "$VENV/bin" && pwd)/python

# pip learned to read dependency groups in 25.1; reading them here works with every pip.
tools=$("$python" -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["dependency-groups"]["test"])
')
if [ "$(cat "$VENV/.test-stamp" 2>/dev/null || true)" != "$tools" ]; then
    echo "test: installing $tools"
    # shellcheck disable=SC2086 # a list of words
    "$python" -m pip install --quiet --disable-pip-version-check $tools
    echo "$tools" >"$VENV/.test-stamp"
fi
[ "$setup_only" = no ] || { echo "$python" && exit 0; }

# Tests that read vLLM's source are skipped where it is not there; in CI they must run, so it is fetched (290 MiB, once).
[ -z "${CI:-}" ] || "$python" tests/vllm_source.py

# So must the test that opens the report in a browser, and a CI machine is one's own to install on.
if [ -n "${CI:-}" ] && ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi

# No test may depend on the network, and a hub that answers slowly must not slow them down.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The models in the tests are tiny: threads that wait for each other cost more than they bring, minutes on busy cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# One pytest for both, so that its last line counts everything; two processes, each with whole files, in the order of
# tests/helpers.py: by the number of tests, files with a few long ones would come last.
exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --doctest-modules "$@"
