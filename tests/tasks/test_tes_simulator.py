# SPDX-License-Identifier: Apache-2.0
"""The plant as its task's simulator: when it runs, and what it says of a model."""

from __future__ import annotations

import pytest
from helpers import ROOT
from run_folders import plant_record
from test_tes_profiles import as_csv, profile_rows

from grpo.common import Problems
from grpo.data.files import read_file
from grpo.settings.table import Settings
from grpo.tasks.tes.simulator import SECOND_RUN, SIMULATOR, skip_reason

PROFILE = "data/profile_heldout.csv"
RUNS = [  # settings, kind of prompts, vLLM, EVAL_PROFILE is the user's, why it does not run
    ({}, "full", True, False, ""),
    ({"MODEL_ID": "tiny"}, "compact", False, False, ""),
    ({"EVAL_SAMPLES": 0}, "full", True, True, "EVAL_SAMPLES=0"),
    ({"EVAL_PROFILE": " "}, "full", True, True, "EVAL_PROFILE is empty"),
    ({"EVAL_PROFILE": None}, "full", True, False, "set EVAL_PROFILE to the hourly profile of the held-out days"),
    ({"EVAL_PROFILE": None}, None, True, False, "no held-out prompts are those of the plant"),
    ({}, None, True, True, "no held-out prompts are those of the plant"),
    ({}, "full", False, False, "transformers takes too long"),
    ({}, "full", False, True, ""),
]


@pytest.mark.parametrize(("change", "kind", "use_vllm", "is_chosen", "words"), RUNS)
def test_whether_the_closed_loop_runs(change, kind, use_vllm, is_chosen, words):
    reason = skip_reason(Settings(**{"EVAL_PROFILE": PROFILE} | change), kind, use_vllm, is_chosen)
    assert words in reason and bool(words) is bool(reason)


def test_the_plan_reads_the_profiles_and_names_their_problems(tmp_path, good_csv):
    problems = Problems()
    full, compact = (read_file(ROOT / "data" / f"tes_heldout{end}.csv", problems) for end in ("", "_compact"))
    other = read_file(good_csv, problems)

    def plan(rows, profile=PROFILE, template="{{ messages }}"):
        return SIMULATOR.plan(Settings(EVAL_PROFILE=profile), rows, template, True, False, problems)

    of_full = plan(full)
    words = "5 windows of profile_heldout.csv, 30 decisions one after"
    assert of_full.runs and of_full.why_sampled and words in of_full.reason
    assert len(of_full.opening_prompts()) == 5 and of_full.opening_prompts()[0].endswith("<|start|>assistant")
    plans = [of_full, plan(other), plan(other, None), plan(full, None)]
    assert [plan_of_rows.is_mentioned for plan_of_rows in plans] == [True, True, False, True]
    assert plans[3].why_sampled and not plan(compact).why_sampled and not problems
    assert plan(compact, template=None).runs and "it has no chat template" in problems.pop()
    (tmp_path / "bad.csv").write_text("datetime,co2,load\n2025-07-01 08:00,410,3\n")
    assert not plan(full, f"{tmp_path}/bad.csv,{tmp_path}/none.csv").runs
    text = "\n".join(problems)
    assert "none.csv" in text and "bad.csv, row 1, column 'co2': '410' is more than 2 kg/kWh" in text


def test_days_whose_optimum_costs_nothing_are_refused(tmp_path):
    """Regret is a share of its cost: without one no adapter was chosen, and the report said `nan%`."""
    rows = read_file(ROOT / "data/tes_heldout.csv", Problems())
    for load, refusal in (("30", []), ("0", ["of these days costs 0.0 kg CO2, and regret is a share of that"])):
        path, problems = tmp_path / "days.csv", Problems()
        table = [[stamp, "0.3", load if "08:00" in stamp else "0"] for stamp, *_ in profile_rows()[1:]]
        path.write_text(as_csv([["datetime", "co2", "load"], *table]))
        SIMULATOR.plan(Settings(EVAL_PROFILE=str(path)), rows, None, True, True, problems)
        assert len(problems) == len(refusal) and all(word in problems[0] for word in refusal), problems


def test_report_and_table_compare_with_the_base_model_and_the_best_rule():
    """A lower regret is better; tests/tasks/test_verdict.py has all that an interval may say."""
    record = plant_record("always_0", "follow_the_load") | {"samples": 1, "exact": True}
    record["difference"] |= {"regret_percent_low": -9.5, "regret_percent_high": -8.0}
    record["difference_rule"] = {"regret_percent_low": 1.0, "regret_percent_high": 3.0}
    words = "the trained model is better than the base model, but is worse than the best fixed rule, follow_the_load"
    section = SIMULATOR.report(record)
    assert f": {words}. " in section.verdict and words in " ".join(SIMULATOR.table(record).split())
    assert "by -9.0" in section.verdict and "0.0 kWh before, 7.0 after" in section.verdict
    assert [row[0] for row in section.rows] == ["base", "trained", "optimum", "always 0", "follow the load"]
    cells = ["100.0", "5.0", "19.0 (15.0 to 22.0) *", "1 of 90", "7.0", "1 of 5", "days: 2025-07-07 (6.5)"]
    assert section.rows[1] == ["trained", *cells]
    texts = section.verdict, " ".join(SIMULATOR.table(record).split())
    assert "second run" not in texts[0] + texts[1], "the optimum leaves 14 kWh: the plant is too small for the load"
    record["totals"]["optimum"]["unserved_kwh"] = 0.0
    texts = SIMULATOR.report(record).verdict, " ".join(SIMULATOR.table(record).split())
    assert all(SECOND_RUN in text for text in texts), "6.5 kWh in a window are worth a second run"
    second = record | {"difference_start": record["difference"]}
    assert "second run" not in SIMULATOR.report(second).verdict + SIMULATOR.table(second), "it is one"
    record["totals"]["trained"]["worst_unserved_kwh"] = 0.9
    assert "second run" not in SIMULATOR.report(record).verdict + SIMULATOR.table(record)
    record["windows"], no_interval = [{}], {"regret_percent_low": None, "regret_percent_high": None}
    for figures in (record["difference"], record["difference_rule"]):
        figures |= no_interval
    assert "; a single window shows nothing" in SIMULATOR.report(record).verdict
    assert not SIMULATOR.report({}).verdict and not SIMULATOR.report({}).rows


UNSERVED = {"unserved_windows": 2, "worst_window": "july: 2025-07-07", "worst_unserved_kwh": 6.54}
SERVED = {"unserved_windows": 0, "worst_window": None, "worst_unserved_kwh": 0.01}
INTERVAL = {"regret_percent_low": 3.0, "regret_percent_high": 30.0}
NO_INTERVAL = dict.fromkeys(INTERVAL)


@pytest.mark.parametrize(
    ("base", "trained", "is_marked"),
    [
        (UNSERVED | INTERVAL, SERVED | INTERVAL, True),
        (SERVED | INTERVAL, SERVED | INTERVAL, False),
        (SERVED | NO_INTERVAL, UNSERVED | NO_INTERVAL, False),  # Fewer than three windows give no interval.
    ],
)
def test_unserved_windows_stand_beside_each_policy_and_qualify_its_interval(base, trained, is_marked):
    record = plant_record("always_0") | {"samples": 1, "exact": True}
    policies = {"base": base, "trained": trained, "optimum": SERVED | NO_INTERVAL, "always_0": UNSERVED | INTERVAL}
    for name, policy in policies.items():
        record["totals"][name] |= policy
    section, table = SIMULATOR.report(record), SIMULATOR.table(record)
    for name, policy, row in zip(policies, policies.values(), section.rows, strict=True):
        is_unserved = policy["unserved_windows"] == 2
        assert row[6:] == (["2 of 5", "july: 2025-07-07 (6.5)"] if is_unserved else ["0 of 5"])
        assert row[3].endswith(" *") == (is_unserved and policy["regret_percent_low"] is not None)
        line = "in 2 of 5 windows, worst july: 2025-07-07 with 6.5 kWh" if is_unserved else "in none of 5 windows"
        assert SIMULATOR.summary(record, name).endswith(line)
    assert ("an interval over few windows cannot show rare losses" in section.verdict) == is_marked
    assert "rare losses" in section.note and "rare losses" in table, "of the rule, which left load"


def test_figures_are_columns_and_those_without_a_value_are_left_out():
    record = plant_record()
    record["totals"]["base"]["regret_percent"] = None
    assert SIMULATOR.figures(record, "base") == {"plant_unserved_kwh": 0.0}
    assert SIMULATOR.figures(record, "trained") == {"plant_regret": 19.0, "plant_unserved_kwh": 7.0}
