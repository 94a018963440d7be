# SPDX-License-Identifier: Apache-2.0
"""Runs code in Triton's interpreter, in a process of its own because it must be chosen before triton is imported."""

import importlib.util
import os
from pathlib import Path

import pytest
import vllm_source
from helpers import ROOT, run_python


def cached_source() -> Path:
    """The folder of vLLM's source; where it is missing, the test is skipped, and fails in CI."""
    if not (folder := vllm_source.cached_source()).is_dir():
        missing = "vLLM's source is not in the cache: `python tests/vllm_source.py` gets it (290 MiB)"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    return folder


def interpreted(code: str, folder: Path = ROOT, *arguments: Path) -> None:
    """Runs `code`, which must print "all equal", with `folder` on its path; skips the test without triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    path = f"{ROOT}{os.pathsep}{folder}"
    assert "all equal" in run_python("-c", code, *arguments, TRITON_INTERPRET=1, PYTHONPATH=path).stdout
