# SPDX-License-Identifier: Apache-2.0
"""Whether the closed loop runs, and with which windows."""

from __future__ import annotations

import pytest
from conftest import ROOT

from grpo.data.files import read_csv
from grpo.preflight.choices import choose_closed_loop, plan_closed_loop
from grpo.settings import Problems, Settings

CASES = [
    ({}, "full", True, False, True, "plant's (full)"), ({"MODEL_ID": "tiny"}, "compact", False, False, True, "plant's (compact)"),
    ({"EVAL_SAMPLES": 0}, "full", True, True, False, "EVAL_SAMPLES=0"), ({"EVAL_PROFILE": " "}, "full", True, True, False, "EVAL_PROFILE is empty"),
    ({}, None, True, True, False, "not those of the plant"), ({}, "full", False, False, False, "transformers too long"),
    ({}, "full", False, True, True, "plant's"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "engine", "chosen", "runs", "words"), CASES)
def test_whether_the_closed_loop_runs(change, kind, engine, chosen, runs, words):
    result = choose_closed_loop(Settings(**change), kind, engine, chosen)
    assert result[0] is runs and words in result[1]


def test_the_plan_reads_the_profiles_and_names_their_problems(tmp_path, good_csv):
    problems = Problems()
    settings = Settings()
    rows = read_csv(ROOT / "data" / "tes_heldout.csv", problems)
    plan = plan_closed_loop(settings, rows, True, False, problems)
    assert plan.prompt == "full" and len(plan.cases) == 5 and plan.profiles == ("data/profile_heldout.csv",)
    assert not problems and "5 windows x 4 runs" in plan.reason
    other = plan_closed_loop(settings, read_csv(good_csv, problems), True, True, problems)
    assert not other.prompt and "not those of the plant" in other.reason and not problems
    (tmp_path / "bad.csv").write_text("datetime,co2,load\n2025-07-01 08:00,410,3\n")
    settings = Settings(EVAL_PROFILE=f"{tmp_path}/bad.csv,{tmp_path}/none.csv")
    assert not plan_closed_loop(settings, rows, True, False, problems).prompt
    text = "\n".join(problems)
    assert "none.csv" in text and "bad.csv, row 1 (line 2), column 'co2': '410' is more than 2 kg/kWh" in text
