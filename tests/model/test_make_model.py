# SPDX-License-Identifier: Apache-2.0
"""scripts/make_model.py: what it prints and refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPT = ROOT / "scripts" / "make_model.py"
sys.path.insert(0, str(SCRIPT.parent))

import make_model as mm  # noqa: E402


def test_help_is_cheap() -> None:
    """torch takes seconds to import."""
    code = "import sys, make_model\ntry:\n    make_model.main(['--help'])\nfinally:\n    print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True)
    assert "gpt-oss" in done.stdout and done.stdout.endswith("False\n"), done


def test_check_command(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mm.main(["check", str(tiny)]) == 0
    assert "327,064 parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["full", "--out", "{tmp}/new"], "one of the arguments --tokenizer --no-tokenizer is required"),
        (["full", "--out", "{tmp}/new", "--tokenizer", "{tmp}"], "holds neither tokenizer.json nor tokenizer.json.xz"),
        (["full", "--out", "{tmp}/new", "--no-tokenizer", "--layers", "0"], "Shape.layers must be positive"),
        (["full", "--out", "{tmp}/new", "--no-tokenizer", "--layers", "99999"], "GiB free"),
        (["tiny", "--out", "{tmp}"], "exists and is not empty"),
        (["tiny", "--out", "{tmp}", "--force"], "holds no gpt-oss checkpoint, so it is not replaced"),
        (["tiny", "--out", "{tmp}/file/model"], "cannot write"),
        (["check", "{tmp}"], "holds no config.json of model_type gpt_oss"),
        ([], "required: command"),
    ],
)
def test_errors(args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("keep me")
    try:
        code = mm.main([arg.format(tmp=tmp_path) for arg in args])
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
