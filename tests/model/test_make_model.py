# SPDX-License-Identifier: Apache-2.0
"""scripts/make_model.py: what it refuses."""

from __future__ import annotations

import make_model
import pytest


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("full --out {tmp}/new", "arguments are required: --tokenizer"),
        ("full --out {tmp}/new --tokenizer {tmp}", "No such file or directory: '{tmp}/tokenizer.json'"),
        ("tiny --out {tmp}", "exists and is not empty"),
        ("tiny --out {tmp}/file/model", "Not a directory"),
    ],
)
def test_errors(command, message, tmp_path, capsys):
    (tmp_path / "file").write_text("keep me")
    try:
        code = make_model.main(command.format(tmp=tmp_path).split())
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
