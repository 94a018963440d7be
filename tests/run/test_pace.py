# SPDX-License-Identifier: Apache-2.0
"""How long a run still takes. Run: python -m pytest tests/run/test_pace.py"""

from __future__ import annotations

import math
import time

import pytest

from grpo.run.logs import LEAST, Pace

NOON = time.mktime((2026, 3, 2, 12, 0, 0, 0, 0, -1))


def rows(*seconds: float, **evaluated: object) -> list[dict[str, object]]:
    return [{"step_s": str(value), "eval_s": ""} for value in seconds] + [{"step_s": "", **evaluated}] * bool(evaluated)


CASES = [
    (rows(10, 10), 10, 0, math.nan),  # too few to know
    (rows(900, 10, 10), 10, 0, 70),  # the first step loads: a median
    (rows(*[99] * 20, *[1] * 10), 40, 0, 37),  # the last ten count
    (rows(1, 1, 1, eval_s="100"), 10, 4, 7 + 3 * 100),  # steps 4 and 8, and the end
    (rows(1, 1, 1, eval_s=100.0), 8, 4, 5 + 2 * 100),  # the last step is evaluated once
    (rows(1, 1, 1, eval_s="100"), 10, 0, 7 + 100),
    (rows(1, 1, 1, eval_s=None), 10, 4, 7),  # no evaluation was measured: none is invented
]


@pytest.mark.parametrize(("found", "total", "eval_steps", "seconds"), CASES)
def test_seconds_left_after_step_3(found, total, eval_steps, seconds):
    assert Pace(total, eval_steps, found).seconds_left(LEAST) == pytest.approx(seconds, nan_ok=True)


def test_it_is_said_with_the_hour_at_which_it_ends():
    said = [Pace(103, 0, rows(s, s, s)).left(3, NOON) for s in (60.0, 0.9, 0.1, 600.0)]
    assert said[:3] == [
        "about 1 h 40 min left, until 13:40",
        "about 2 min left, until 12:01",
        "about 10 s left, until 12:00",
    ]
    assert said[3] == "about 16 h 40 min left, until Tue 03 Mar 04:40" and Pace(9, 0).left(2) == ""
