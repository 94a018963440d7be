# SPDX-License-Identifier: Apache-2.0
"""scripts/make_model.py: what it prints and refuses."""

from __future__ import annotations

import make_model
import pytest


def test_check_command(tiny, capsys):
    assert make_model.main(["check", str(tiny)]) == 0
    assert "327,064 parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("full --out {tmp}/new", "one of the arguments --tokenizer --no-tokenizer is required"),
        ("full --out {tmp}/new --tokenizer {tmp}", "holds neither tokenizer.json nor tokenizer.json.xz"),
        ("full --out {tmp}/new --no-tokenizer --layers 0", "Shape.layers must be positive"),
        ("full --out {tmp}/new --no-tokenizer --layers 99999", "GiB free"),
        ("tiny --out {tmp} --force", "holds no gpt-oss checkpoint, so it is not replaced"),
        ("tiny --out {tmp}/file/model", "cannot write"),
        ("check {tmp}", "holds no config.json of model_type gpt_oss"),
    ],
)
def test_errors(command, message, tmp_path, capsys):
    (tmp_path / "file").write_text("keep me")
    try:
        code = make_model.main(command.format(tmp=tmp_path).split())
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
