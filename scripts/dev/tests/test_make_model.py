# SPDX-License-Identifier: Apache-2.0
"""scripts/dev/make_model.py: what it refuses."""

import make_model
import pytest

from grpo.common import InputError


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
    with pytest.raises((InputError, SystemExit)) as caught:
        make_model.main(command.format(tmp=tmp_path).split())
    assert getattr(caught.value, "code", 2) == 2, "argparse ends by itself, run_script for the rest"
    assert message.format(tmp=tmp_path) in f"{caught.value} {capsys.readouterr().err}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
