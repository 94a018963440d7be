# SPDX-License-Identifier: Apache-2.0
"""Lines about work that takes time, and threads that write them."""

import io
import logging
import re
import threading
from collections.abc import Iterator

import pytest
from runs import has_line, wait_until

from grpo import phases
from grpo.output.logs import start_logging
from grpo.phases import Phase, with_progress


@pytest.fixture
def out(monkeypatch) -> Iterator[io.StringIO]:
    """What is printed; lines come fast."""
    screen = io.StringIO()
    monkeypatch.setattr(phases, "LINE_S", 0.01)
    monkeypatch.setattr(phases, "print", lambda line, flush: screen.write(f"{line}\n"), raising=False)
    yield screen
    assert not Phase.active


def test_a_phase_begins_goes_on_and_ends_with_a_line_each(out):
    with Phase("closed loop", "decision", 30) as phase:
        assert out.getvalue() == "closed loop ...\n"
        phase.done = 4
        wait_until(lambda: "closed loop, decision 4 of 30, 0 s\n" in out.getvalue())
        phase.result = "regret 9.0 %"
    assert re.search(r"^closed loop: regret 9\.0 % \(\d+\.\d s\)$", out.getvalue(), re.MULTILINE)
    with pytest.raises(ValueError), Phase("loading"):
        raise ValueError
    assert "loading: stopped (" in out.getvalue()


def test_phases_inside_of_another_one_add_to_its_lines(out):
    with Phase("evaluation"):
        for _ in with_progress("", range(3), "decision", 3):
            with Phase("generating", "completion", 1_000) as inner:
                inner.done = 12
                wait_until(
                    lambda: "evaluation, decision 0 of 3, generating, completion 12 of 1,000, 0 s" in out.getvalue()
                )
            break
    lines = out.getvalue().splitlines()
    assert all(line.startswith("evaluation") for line in lines), "the inner ones have no lines of their own"
    items = with_progress("learning", range(3))
    with pytest.raises(ValueError), Phase("a step"):
        next(items)
        raise ValueError
    assert not Phase.active, "an exception leaves no inner phase behind"


def test_work_that_is_mostly_short_has_no_lines_at_begin_and_end(out):
    assert list(with_progress("reading x.csv", "abc", first_s=1000)) == list("abc")
    assert out.getvalue() == ""
    for item in with_progress("reading x.csv", "abcd", total=3500, each=1000, first_s=0.01):
        if item == "d":
            wait_until(lambda: "reading x.csv, row 3,000 of 3,500, 0 s\n" in out.getvalue())
    assert re.fullmatch(r"(reading x\.csv, row \d,000 of 3,500, 0 s\n)+", out.getvalue())
    assert not [thread for thread in threading.enumerate() if getattr(thread, "_target", None) == Phase.watch]


def test_the_log_has_the_lines_too(out, tmp_path, quiet):
    start_logging(tmp_path)
    with Phase("generating", "completion", 4, first_s=0.01) as phase:
        phase.done = 1
        wait_until(lambda: has_line(tmp_path, "I train_grpo: generating, completion 1 of 4, 0 s\n"))
    assert not out.getvalue()
    # A file's name may be any bytes. Another handler, which is pytest's, could not send it to another process.
    (handler,) = (handler for handler in logging.root.handlers if type(handler) is logging.FileHandler)
    handler.handle(logging.makeLogRecord({"msg": "d\udcff.csv", "name": "train_grpo", "levelname": "WARNING"}))
    assert has_line(tmp_path, "W train_grpo: d\\udcff.csv\n")
