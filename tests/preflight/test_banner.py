# SPDX-License-Identifier: Apache-2.0
"""The plan in words, and what a run is warned of. Run: python -m pytest tests/preflight/test_banner.py"""

from __future__ import annotations

from conftest import CLEAN, RENDERED, write_csv
from machines import CPU, only

from grpo.preflight import banner
from grpo.preflight.checks import preflight
from grpo.run.logs import banner_text
from grpo.settings import FIELDS

NAMES = ["user", "reward_action_0", "reward_action_1"]


def data_warnings(**environ):
    result = preflight(CLEAN | {"MODEL_ID": "tiny"} | {k: str(v) for k, v in environ.items()}, CPU)
    found, text = banner.data_warnings(result), banner.banner(result)
    assert all(banner_text(warning) in text for warning in found)
    assert all(f"\n  {name} " in text for name in FIELDS)
    return found


def test_a_run_is_warned_of_flat_rows(tiny, tmp_path):
    rows = [["first", 0, 1], ["second", 1, 1], ["third", 0.5, 0.5], ["fourth", 1, 0]]
    half, more = (write_csv(tmp_path / f"{n}.csv", NAMES, rows[:n]) for n in (4, 3))
    output = {"OUTPUT_DIR": tmp_path / "run", "EVAL_SAMPLES": 0}
    assert not data_warnings(DATA=half, **output)
    assert only(data_warnings(DATA=more, **output)) == (
        f"2 of 3 rows pay all their actions the same and teach nothing; the first is {more}, row 2"
    )
    assert not data_warnings(DATA=more, REWARDS="format", **output)


def test_a_run_is_warned_of_an_evaluation_on_the_demos_rows(tiny, tmp_path, good_csv):
    output = {"OUTPUT_DIR": tmp_path / "run"}
    assert not data_warnings(DATA="data/tes_train_compact.csv", **output), "the demo's own rows"
    warning = only(data_warnings(DATA=good_csv, **output))
    assert "Evaluated on the demo's rows and closed loop (data/tes_heldout_compact.csv), nothing held out" in warning
    assert "EVAL_DATA='...'" in warning and "EVAL_SAMPLES=0" in warning
    assert "closed loop" not in only(data_warnings(DATA=good_csv, EVAL_PROFILE="", **output))
    assert not data_warnings(DATA=good_csv, EVAL_SAMPLES=0, **output)
    assert not data_warnings(DATA=good_csv, EVAL_DATA="data/tes_heldout_compact.csv", **output)


def test_a_run_is_warned_of_held_out_prompts_that_are_trained_on(tiny, tmp_path, good_csv):
    rows = [[RENDERED.format(text), 0, 1] for text in ("question 3", "question 3", "question 7", "another")]
    other = write_csv(tmp_path / "other.csv", ["prompt", *NAMES[1:]], rows)
    warning = only(data_warnings(DATA=good_csv, EVAL_DATA=other, OUTPUT_DIR=tmp_path / "run"))
    assert warning.startswith("2 of 3 held-out prompts are in DATA as well")
