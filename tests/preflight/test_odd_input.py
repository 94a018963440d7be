# SPDX-License-Identifier: Apache-2.0
"""CSVs and settings as nobody should write them: `--check` answers each in words."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from unittest import mock

import pytest
from conftest import CLEAN, ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_grpo

ROWS = str(ROOT / "tests/run/fixtures/rows.csv")
GOOD = {"MODEL_ID": "tiny", "DATA": ROWS, "EVAL_DATA": ROWS, "EVAL_PROFILE": ""}
PLACE = re.compile(r"\b(row|line|header|column)\b|: it is empty|more problems like these")  # Where in a file.
NUMBERS = ("nan", "-inf", "1e308", "1e-320", "9" * 400, "0." + "3" * 5000, " ", "1,5", "１２", "½", "1e", "0", "-1")
TEXTS = (
    "", "\ufeff", "\u2028", "\x1b[31m", "e" + "\u0301" * 2000, "\x00", "<|start|>system<|message|>", "{{ 7*7 }}",
    "\ud800", "a" * 100_000, "[" * 5000, "~nouser", "../" * 300, "https://example.com/x", ",,", "\r", "\n\n", '"""',
)  # fmt: skip
HEADERS = ("Prompt", "reward_action_01", "reward_action_９", "reward_action_7", "user", "q_action_0")
ODD = dict(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def check(**environ: object) -> tuple[int, str]:
    """Exit code and output of `train_grpo.py --check` in this process."""
    output = io.StringIO()
    values = CLEAN | GOOD | {name: str(value) for name, value in environ.items()}
    streams = contextlib.redirect_stdout(output), contextlib.redirect_stderr(output)
    with mock.patch.dict(os.environ, values, clear=True), streams[0], streams[1]:
        code = train_grpo.main(["--check"])
    return code, output.getvalue()


def problems_of(code: int, output: str) -> list[str]:
    """The problems of a refusal, of which there is at least one; none of what was accepted."""
    problems = re.findall(r"^  \d+\. (.+)$", output, re.MULTILINE)
    assert code == (2 if problems else 0) and "Traceback" not in output, output
    return problems


@st.composite
def tables(draw):
    """The bytes of a good CSV with up to three faults in its cells and rows, and perhaps one in its bytes."""
    row = ["Store 20 of 100. [0] off, [1] on?", "0.1", "0.5", "0.3", "a note"]
    rows = [["prompt", "reward_action_0", "reward_action_1", "reward_action_2", "note"], *(list(row) for _ in range(4))]
    for _ in range(draw(st.integers(0, 3))):
        cells = draw(st.sampled_from(rows))
        at = slice(draw(st.integers(0, 5)), draw(st.integers(0, 6)))  # A cell is changed, deleted or inserted.
        cells[at] = draw(st.lists(st.sampled_from(NUMBERS + TEXTS + HEADERS), max_size=2))
    del rows[draw(st.integers(1, 9)) :]
    text, ends = io.StringIO(), draw(st.sampled_from(["\n", "\r\n", "\r", "\n\n", "\u2028"]))
    csv.writer(text, delimiter=draw(st.sampled_from(",,,;\t|")), lineterminator=ends).writerows(rows)
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1", "shift_jis"]))
    content = text.getvalue().encode(encoding, "surrogatepass" if encoding.startswith("utf") else "replace")
    at = draw(st.integers(0, len(content)))
    return content[:at] + draw(st.sampled_from([b"", b"", b"\0", b'"', b"\xed\xa0\x80"])) + content[at:]


@pytest.mark.slow
@settings(max_examples=60, **ODD)
@given(tables())
def test_a_refused_csv_is_named_with_the_place_in_it(tmp_path, content):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    for problem in problems_of(*check(DATA=path, OUTPUT_DIR=tmp_path / "run")):
        assert "rows.csv" not in problem or PLACE.search(problem), problem
