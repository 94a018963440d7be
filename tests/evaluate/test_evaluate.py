# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the closed loop's arithmetic, its prompts, its record, and both evaluations of a real run.

Run: python -m pytest tests/test_evaluate.py
"""

from __future__ import annotations

import dataclasses
import doctest
import errno
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import evaluate as ev
import numpy as np
import pytest
from conftest import CLEAN, ROOT, run_script
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import train_grpo
from grpo.data import prompts as data_prompts
from grpo.data.files import read_csv
from grpo.data.prompts import render_rows
from grpo.evaluate.models import VllmModel, recorded_settings
from grpo.evaluate.plant import measure_closed_loop
from grpo.preflight.choices import ClosedLoop, choose_closed_loop, plan_closed_loop
from grpo.preflight.hub import find_model
from grpo.preflight.machine import Machine
from grpo.rollout.engine import Engine, EngineError, engine_arguments
from grpo.settings import Problems, Settings, load_settings
from grpo.tasks.tes.closed_loop import (
    RULES,
    ModelPolicy,
    always,
    charge_when_clean,
    closed_loop,
    end_price,
    follow_the_load,
    optimum,
    priced_kg,
    safe_action,
)
from grpo.tasks.tes.dataset import rows_csv, window_rows
from grpo.tasks.tes.plant import HOURS, Plant, solve
from grpo.tasks.tes.profiles import ProfileError
from grpo.tasks.tes.prompts import prompt_kind, render_full, renderer, state_at
from grpo.tasks.tes.record import (
    add_policy,
    check_writable,
    keep_models,
    new_record,
    read_cases,
    run_model,
    table,
    write_record,
)

PLANT = Plant()
PROFILE = ROOT / "data" / "profile_heldout.csv"
CASES = read_cases(PROFILE)
WINDOWS = [case.window for case in CASES]
ACTIONS = st.lists(st.lists(st.integers(0, 3), min_size=30, max_size=30), min_size=1, max_size=1)


def replay(rows):
    """A policy out of a table of actions, (W, T)."""
    hours = iter(zip(*rows, strict=True))
    return lambda states: next(hours)


# ---- The simulation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", (0.0, 150.0, 300.0))
@pytest.mark.parametrize("decisions", (30, 10, 17))
def test_the_best_action_of_the_exact_values_reproduces_the_optimum(start, decisions):
    trace = closed_loop(WINDOWS, PLANT, optimum(WINDOWS, PLANT, start, decisions), start, decisions)
    for priced, window in zip(priced_kg(trace, WINDOWS, PLANT), WINDOWS, strict=True):
        price = end_price(window, PLANT, decisions) / PLANT.cost_scale
        load, co2 = window.load_kw.ravel()[:decisions], window.co2.ravel()[:decisions]
        solution = solve(PLANT, load, co2, price, start_kwh=start, grid_kwh=None)
        value = np.interp(start, solution.nodes[0], solution.values[0])
        assert priced == pytest.approx(-PLANT.cost_scale * value + start * PLANT.cost_scale * price, abs=1e-6)


@pytest.mark.parametrize(("decisions", "day"), ((30, 3), (10, 1), (11, 2), (1, 1)))
def test_what_is_left_is_priced_by_the_day_after_the_last_decision(decisions, day):
    low5 = sum(sorted(WINDOWS[0].co2[day].tolist())[:5]) / 5
    assert end_price(WINDOWS[0], PLANT, decisions) == pytest.approx(low5 / 4)


@pytest.mark.parametrize("action", range(4))
def test_always_the_same_equals_a_simulation_by_hand(action):
    """Plain numbers and branches, not make_dataset.step."""
    trace = closed_loop(WINDOWS, PLANT, always(action))
    for w, window in enumerate(WINDOWS):
        energy, output, cycled = 150.0, 100.0 * action / 3, 0.0
        for t in range(30):
            load, co2 = float(window.load_kw[t // 10, t % 10]), float(window.co2[t // 10, t % 10])
            unserved = 0.0
            if output >= load:
                energy = min(300.0, energy + output - load)
            elif energy >= load - output:
                energy -= load - output
                cycled += load - output
            else:
                unserved, cycled, energy = load - output - energy, cycled + energy, 0.0
            assert trace.storage_kwh[w, t] == pytest.approx(energy, abs=1e-6)
            assert trace.unserved_kwh[w, t] == pytest.approx(unserved, abs=1e-6)
            assert trace.co2_kg[w, t] == pytest.approx(output / 4 * co2)
        assert trace.cycled_kwh[w] == pytest.approx(cycled, abs=1e-6)
        low5 = sum(sorted(window.co2[3].tolist())[:5]) / 5
        expected = trace.co2_kg[w].sum() + 10 * trace.unserved_kwh[w].sum() - (energy - 150.0) * low5 / 4
        assert priced_kg(trace, WINDOWS, PLANT)[w] == pytest.approx(expected)


@given(ACTIONS)
@hypothesis_settings(max_examples=30, deadline=None)
def test_nothing_beats_the_optimum(rows):
    best = closed_loop(WINDOWS[:1], PLANT, optimum(WINDOWS[:1], PLANT, 150.0))
    other = closed_loop(WINDOWS[:1], PLANT, replay(rows))
    assert priced_kg(best, WINDOWS, PLANT)[0] <= priced_kg(other, WINDOWS[:1], PLANT)[0] + 1e-6


def test_serving_nothing_or_emptying_the_storage_does_not_look_good():
    priced = {}
    for name, policy in {"nothing": always(0), "rule": charge_when_clean, "load": follow_the_load}.items():
        priced[name] = priced_kg(closed_loop(WINDOWS, PLANT, policy), WINDOWS, PLANT)
    assert (priced["nothing"] > 5 * priced["load"]).all() and (priced["rule"] < priced["load"]).all()
    # The same emissions with less left in the storage cost more.
    trace = closed_loop(WINDOWS, PLANT, follow_the_load)
    emptied = dataclasses.replace(trace, storage_kwh=trace.storage_kwh - 20.0)
    assert (priced_kg(emptied, WINDOWS, PLANT) > priced_kg(trace, WINDOWS, PLANT)).all()


def test_rules_do_what_they_say():
    follow = closed_loop(WINDOWS, PLANT, follow_the_load)
    assert follow.unserved_kwh.max() == 0 and follow.cycled_kwh.max() == 0
    loads = np.stack([w.load_kw[:3].ravel() for w in WINDOWS])
    below = np.where(follow.actions > 0, PLANT.outputs_kw[follow.actions - 1], -1)
    assert (follow.output_kw >= loads).all() and (below < loads).all(), "the smallest output that is enough"
    clean = closed_loop(WINDOWS, PLANT, charge_when_clean)
    assert clean.unserved_kwh.max() == 0 and clean.cycled_kwh.min() > 100
    dirty = np.stack([(w.co2[:3] > np.median(w.co2[:3], axis=1, keepdims=True)).ravel() for w in WINDOWS])
    assert clean.output_kw[dirty].mean() < 0.5 * clean.output_kw[~dirty].mean()


def test_an_unreadable_answer_takes_the_safe_action_and_is_counted():
    assert safe_action(PLANT) == 3
    rows = [[0] * 30 for _ in WINDOWS]
    rows[1] = [None] * 30
    rows[2][4] = None
    trace = closed_loop(WINDOWS, PLANT, replay(rows))
    assert trace.safe.tolist() == [0, 30, 1, 0, 0]
    assert trace.actions[1].tolist() == [3] * 30 and trace.actions[2, 4] == 3 and trace.actions[0].max() == 0
    assert trace.unserved_kwh[1].max() == 0
    most = closed_loop(WINDOWS, PLANT, always(3)).co2_kg.sum(axis=1)
    assert trace.co2_kg[1].sum() == pytest.approx(most[1]), "no answer emits the most"


@pytest.mark.parametrize("bad", ([4] * 5, [-1] * 5, [0] * 4))
def test_a_policy_that_breaks_the_rules_is_an_error(bad):
    with pytest.raises(ValueError, match="the policy gave"):
        closed_loop(WINDOWS, PLANT, lambda states: bad)


# ---- Prompts and answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("full", "compact"))
def test_prompts_are_those_of_the_dataset(kind, tiny, tmp_path):
    """Driven by the optimum, the loop passes through the rows of a trajectory without exploration: the same prompts,
    read and rendered by the trainer from the CSV."""
    rng = np.random.default_rng(0)
    path = tmp_path / "rows.csv"
    path.write_text(rows_csv([r for w in WINDOWS for r in window_rows(w, rng, kind, 150.0, 0)]))
    problems = Problems()
    files, settings = find_model("tiny", problems), Settings(MODEL_ID="tiny", MAX_PROMPT_LEN=9999)
    rows, _ = render_rows(settings, read_csv(path, problems), files, problems)
    assert not problems and prompt_kind([row.messages for row in rows]) == kind
    effort, date = settings.REASONING_EFFORT, settings.PROMPT_DATE
    render = renderer(kind, lambda messages: data_prompts.render(files.template, messages, effort, date))
    seen, best = [], optimum(WINDOWS, PLANT, 150.0)

    def policy(states):
        seen.append([render(state) for state in states])
        return best(states)

    closed_loop(WINDOWS, PLANT, policy)
    assert [prompt for window in zip(*seen, strict=True) for prompt in window] == [row.prompt for row in rows]


def test_which_plant_the_prompts_are_of():
    def kind(name, edit=lambda text: text):
        rows = read_csv(ROOT / "data" / name, Problems())[:3]
        return prompt_kind([[(role, edit(text)) for role, text in row.messages] for row in rows])

    assert kind("tes_heldout.csv") == "full" and kind("tes_heldout_compact.csv") == "compact"
    assert kind("tes_heldout.csv", lambda text: text.replace("capacity [kWh]: 300.0", "capacity [kWh]: 500.0")) is None
    assert kind("tes_heldout.csv", lambda text: text.replace("Reasoning: medium", "Reasoning: high")) is None
    assert kind("tes_heldout_compact.csv", lambda text: text.replace("store", "tank")) is None
    assert prompt_kind([(("user", "hour 8 store 50 load 31 co2 41"),)]) is None
    both = [read_csv(ROOT / "data" / n, Problems())[0].messages for n in ("tes_heldout.csv", "tes_heldout_compact.csv")]  # fmt: skip
    assert prompt_kind(both) is None and prompt_kind([]) is None


def test_votes_and_unreadable_answers():
    answers = {"a": ["[2]", "[1]", "[2]"], "b": ["no", "[0] or [1]", "[3]"], "c": ["", "no", "[7]"]}
    asked = []

    def ask(prompts, samples, hour):
        asked.append((list(prompts), samples, hour))
        return [f"<|channel|>final<|message|>{answer}<|return|>" for prompt in prompts for answer in answers[prompt[0]]]

    policy = ModelPolicy(ask, lambda state: f"{state}<|start|>assistant", 3)
    with pytest.raises(AttributeError):
        policy(["a"])  # a state knows its plant
    states = [type("Named", (), {"plant": PLANT, "__str__": lambda self, n=name: n})() for name in "abc"]
    policy = ModelPolicy(ask, lambda state: f"{state}<|start|>assistant", 3)
    assert policy(states) == [2, 3, None] and policy(states) == [2, 3, None]
    assert policy.unparsed.tolist() == [0, 4, 6] and policy.answers == 18
    assert [hour for _, _, hour in asked[1:]] == [0, 1]
    with pytest.raises(ValueError, match="2 completions came back for 1 prompts x 3"):
        ModelPolicy(lambda *_: ["", ""], str, 3)(states[:1])


# ---- The record ------------------------------------------------------------------------------------------------------

TOTALS = {"co2_kg", "unserved_kwh", "storage_cycled_kwh", "priced_kg", "regret_percent", "regret_percent_low",
          "regret_percent_high", "unparsed", "answers"}  # fmt: skip


def record_of(cases=CASES, samples=1, vote=False, hours=72, **sampling):
    return new_record(cases, ["p.csv"], samples, vote, sampling, hours=hours)


def check_schema(record, models, hours=72):
    """What docs/evaluation.md and the report expect of closed_loop.json."""
    json.loads(json.dumps(record, allow_nan=False))
    names = {*models, "optimum", *RULES}
    assert {
        "profiles",
        "start_kwh",
        "samples",
        "vote",
        "safe_action",
        "safe_action_reason",
        "windows",
        "totals",
    } <= set(record)
    assert set(record["totals"]) == names and record["safe_action"] == 3
    for entry in record["windows"]:
        assert re.fullmatch(r".+: \d{4}-\d\d-\d\d", entry["name"]) and entry["hours"] == hours
        assert entry["start"].endswith(" 00:00") and set(entry["policies"]) == names
        assert len(entry["load_kw"]) == len(entry["co2_kg_per_kwh"]) == hours
        for policy in entry["policies"].values():
            for name in ("actions", "output_kw", "storage_kwh", "co2_kg", "unserved_kwh"):
                assert len(policy[name]) == hours
            assert [a is None for a in policy["actions"]] == [h % 24 not in HOURS for h in range(hours)]
            assert all(value is not None for value in policy["storage_kwh"])
            assert policy["storage_kwh"][7] == record["start_kwh"] and isinstance(policy["unparsed"], int)
    for total in record["totals"].values():
        assert set(total) == TOTALS
        low, high = total["regret_percent_low"], total["regret_percent_high"]
        assert low is None or low <= total["regret_percent"] + 1e-6 <= high + 2e-6


def oracle_ask(seen=None, unparsed_at=()):
    """A model that answers [1], and nothing readable in some hours."""

    def ask(prompts, samples, hour):
        text = "hm" if hour in unparsed_at else "[1]"
        return [f"<|channel|>final<|message|>{text}<|return|>"] * (len(prompts) * samples)

    return ask


def test_the_record_adds_up():
    record = record_of(samples=2)
    run_model(record, "base", CASES, oracle_ask(), render_full)
    run_model(record, "trained", CASES, oracle_ask(unparsed_at=(3, 4)), render_full)
    check_schema(record, {"base", "trained"})
    totals = record["totals"]
    assert list(totals)[:3] == ["base", "trained", "optimum"]
    for name, total in totals.items():
        for column in ("co2_kg", "unserved_kwh"):  # the passes of these models are all the same
            assert total[column] == pytest.approx(sum(math.fsum(w["policies"][name][column]) for w in record["windows"]), abs=1e-3)  # fmt: skip
        expected = 100 * (total["priced_kg"] / totals["optimum"]["priced_kg"] - 1)
        assert total["regret_percent"] == pytest.approx(expected, abs=1e-4)
    assert {k: v for k, v in totals["base"].items() if k != "answers"} == {k: v for k, v in totals["always_1"].items() if k != "answers"}  # fmt: skip
    assert totals["base"]["answers"] == 2 * 5 * 30 and totals["trained"]["unparsed"] == 2 * 5 * 2
    assert totals["optimum"]["regret_percent"] == 0 == totals["optimum"]["answers"]
    change = record["difference"]
    gap = totals["trained"]["regret_percent"] - totals["base"]["regret_percent"]
    assert change["regret_percent"] == pytest.approx(gap, abs=1e-4)
    assert change["regret_percent_low"] <= change["regret_percent"] <= change["regret_percent_high"]
    text = table(record)
    assert "follow_the_load" in text and "20 of 300" in text and "trained against base" in text


def test_passes_are_averaged_and_the_first_is_shown():
    record = record_of(CASES[:2])
    rows = [[0] * 30, [1] * 30, [3] * 30, [3] * 30]  # pass 1 of both windows, then pass 2
    trace = closed_loop(WINDOWS[:2] * 2, PLANT, replay(rows))
    add_policy(record, "base", WINDOWS[:2], trace, [1, 2, 3, 4], answers=120)
    first, second = record["windows"]
    shown = [a for a in first["policies"]["base"]["actions"] if a is not None]
    assert (
        shown == [0] * 30 and first["policies"]["base"]["unparsed"] == 4 and second["policies"]["base"]["unparsed"] == 6
    )
    for entry, one in ((first, "always_0"), (second, "always_1")):
        for key, value in entry["policies"]["base"]["mean"].items():
            mean = (entry["policies"][one]["mean"][key] + entry["policies"]["always_3"]["mean"][key]) / 2
            assert value == pytest.approx(mean, abs=1e-5)
    total = record["totals"]["base"]
    assert total["answers"] == 120 and total["unparsed"] == 10
    assert total["regret_percent_low"] is None and record["totals"]["always_3"]["regret_percent_high"] is None


def test_a_vote_decides_each_hour():
    record = record_of(CASES[:3], samples=3, vote=True)

    def ask(prompts, samples, hour):
        assert samples == 3 and len(prompts) == 3
        return [f"<|channel|>final<|message|>[{k}]<|return|>" for _ in prompts for k in (2, 0, 2)]

    run_model(record, "base", CASES[:3], ask, render_full)
    mine, rule = (record["totals"][name] for name in ("base", "always_2"))
    assert mine["co2_kg"] == rule["co2_kg"] and mine["answers"] == 3 * 3 * 30


@pytest.mark.parametrize("hours", (9, 24, 34))
def test_fewer_hours(hours):
    record = record_of(hours=hours)
    check_schema(record, set(), hours)
    assert all(total["regret_percent"] >= -1e-6 for total in record["totals"].values())


def test_what_a_file_holds_of_the_models_is_kept_only_if_it_is_the_same_measurement(tmp_path):
    path = tmp_path / "closed_loop.json"
    record = record_of(seed=1)
    for name in ("base", "trained"):
        run_model(record, name, CASES, oracle_ask(), render_full)
    write_record(record, path)
    again = record_of(seed=1)
    assert keep_models(again, path) and again == record
    again = record_of(seed=1)
    assert keep_models(again, path, ("base",)) and "trained" not in again["totals"] and "base" in again["totals"]
    changed = [dataclasses.replace(CASES[0], co2=CASES[0].co2 + 0.1), *CASES[1:]]
    for other in (record_of(seed=2), record_of(CASES[:4], seed=1), record_of(samples=2, seed=1), record_of(changed, seed=1)):  # fmt: skip
        assert not keep_models(other, path) and "base" not in other["totals"]
    assert not keep_models(record_of(), tmp_path / "none.json")
    for broken in ("", "[]", "{", '{"windows": 3}'):
        path.write_text(broken)
        assert not keep_models(record_of(seed=1), path)


def test_a_profile_of_the_users_own_without_nights(tmp_path):
    lines = ["CO2排出係数[kg-CO2/kWh],日時,冷房需要[kW]"]
    lines += [f"{0.3 + 0.01 * h},2025/07/0{d} {h}:00,{20 + h}" for d in range(1, 5) for h in range(8, 18)]
    path = tmp_path / "july.csv"
    path.write_bytes("\n".join(lines).encode("cp932"))
    (case,) = read_cases(path)
    assert case.name == "july: 2025-07-01"
    record = record_of([case])
    check_schema(record, set())
    shown = record["windows"][0]["co2_kg_per_kwh"]
    assert [v is None for v in shown] == [h % 24 not in HOURS for h in range(72)] and shown[32] == 0.38
    with pytest.raises(ProfileError, match=r"july.csv, row 1 .*kg"):
        path.write_text("datetime,co2,load\n2025-07-01 08:00,410,3\n")
        read_cases(path)


def test_doctests():
    assert doctest.testmod(ev) == (0, 4)


# ---- The choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "engine", "chosen", "runs", "words"),
    [
        ({}, "full", True, False, True, "plant's (full)"),
        ({"MODEL_ID": "tiny"}, "compact", False, False, True, "plant's (compact)"),
        ({"EVAL_SAMPLES": 0}, "full", True, True, False, "EVAL_SAMPLES=0"),
        ({"EVAL_PROFILE": " "}, "full", True, True, False, "EVAL_PROFILE is empty"),
        ({}, None, True, True, False, "not those of the plant"),
        ({}, "full", False, False, False, "transformers too long"),
        ({}, "full", False, True, True, "plant's"),
    ],
)
def test_whether_the_closed_loop_runs(change, kind, engine, chosen, runs, words):
    result = choose_closed_loop(dataclasses.replace(Settings(), **change), kind, engine, chosen)
    assert result[0] is runs and words in result[1]


def test_the_plan_reads_the_profiles_and_names_their_problems(tmp_path, good_csv):
    problems = Problems()
    settings = dataclasses.replace(Settings(), EVAL_PROFILE="data/profile_heldout.csv")
    rows = read_csv(ROOT / "data" / "tes_heldout.csv", problems)
    plan = plan_closed_loop(settings, rows, True, False, problems)
    assert plan.prompt == "full" and len(plan.cases) == 5 and plan.profiles == ("data/profile_heldout.csv",)
    assert not problems and "5 windows x 4 passes" in plan.reason
    other = plan_closed_loop(settings, read_csv(good_csv, problems), True, True, problems)
    assert not other.prompt and "not those of the plant" in other.reason and not problems
    (tmp_path / "bad.csv").write_text("datetime,co2,load\n2025-07-01 08:00,410,3\n")
    settings = dataclasses.replace(settings, EVAL_PROFILE=f"{tmp_path}/bad.csv,{tmp_path}/none.csv")
    assert not plan_closed_loop(settings, rows, True, False, problems).prompt
    text = "\n".join(problems)
    assert "none.csv" in text and "bad.csv, row 1 (line 2), column 'co2': '410' is more than 2 kg/kWh" in text


def test_a_report_that_fails_does_not_fail_the_run(monkeypatch, tmp_path, caplog):
    def broken(folder):
        raise ZeroDivisionError("no rows")

    monkeypatch.setattr("grpo.evaluate.page.write_report", broken)
    with caplog.at_level(logging.WARNING, "train_grpo"):
        train_grpo.write_archive(tmp_path)
    assert "ZeroDivisionError: no rows" in caplog.text and (tmp_path.with_name(tmp_path.name + ".zip")).exists()
    assert "scripts/report.py" in caplog.text


# ---- A real run, and the command -------------------------------------------------------------------------------------

SETTINGS = {
    "MODEL_ID": "tiny", "TOTAL_STEPS": 2, "SAVE_STEPS": 1, "PROMPTS_PER_STEP": 2, "NUM_GENERATIONS": 4, "EVAL_SAMPLES": 1,
    "DATA": "data/tes_heldout_compact.csv", "SEED": 5, "LEARNING_RATE": "1e-2",
}  # fmt: skip
EVAL = {"reward", "reward_low", "reward_high", "regret", "regret_low", "regret_high", "parse_rate", "parse_rate_low",
        "parse_rate_high", "best_action_rate", "clipped_ratio", "tokens_mean", "tokens_max", "action_counts", "unparsed"}  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """Two steps with both evaluations; three windows, 12 held-out rows."""
    folder = tmp_path_factory.mktemp("evaluated")
    held_out, profile = folder / "held_out.csv", folder / "days.csv"
    held_out.write_text("".join((ROOT / "data" / "tes_heldout_compact.csv").read_text().splitlines(True)[:13]))
    days = PROFILE.read_text().splitlines(True)
    profile.write_text("".join(days[: 1 + 3 * 96]))
    settings = SETTINGS | {"OUTPUT_DIR": folder / "run", "EVAL_DATA": held_out, "EVAL_PROFILE": profile}
    done = run_script(**settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(folder=folder / "run", settings=settings, output=done.stdout, profile=profile)


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_a_run_leaves_both_evaluations(run):
    result = read(run.folder, "evaluation.json")
    assert {"random", "constant", "constant_action", "oracle", "samples", "data_sha256", "before", "after", "difference"} == set(result)  # fmt: skip
    for part in (result["before"], result["after"]):
        assert set(part) == EVAL | {"reward_by_prompt"} and len(part["reward_by_prompt"]) == 12
        for name in ("reward", "regret", "parse_rate"):
            assert part[f"{name}_low"] <= part[name] + 1e-9 <= part[f"{name}_high"] + 2e-9
        assert part["reward"] + part["regret"] == pytest.approx(result["oracle"])
        assert sum(part["action_counts"]) + part["unparsed"] == 12 and len(part["action_counts"]) == 4
        assert part["parse_rate"] == pytest.approx(1 - part["unparsed"] / 12)
    change = result["difference"]
    assert change["reward"] == pytest.approx(result["after"]["reward"] - result["before"]["reward"])
    assert change["reward_low"] <= change["reward"] <= change["reward_high"]
    record = read(run.folder, "closed_loop.json")
    check_schema(record, {"base", "trained"})
    assert record["profiles"] == ["days.csv"] and record["samples"] == 1 and record["vote"] is False
    assert len(record["windows"]) == 3 and record["totals"]["base"]["answers"] == 90
    assert record["sampling"]["prompt"] == "compact"
    for words in ("95% interval", "after - before", "charge_when_clean", "trained against base"):
        assert words in run.output
    assert "Traceback" not in (run.folder / "training.log").read_text(encoding="utf-8")


def test_a_resumed_run_keeps_what_was_measured_before_it(run, tmp_path):
    """Marked figures stay where they belong to the start, and are made anew where they belong to the end."""
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    result, record = read(folder, "evaluation.json"), read(folder, "closed_loop.json")
    result["before"]["reward"] = result["after"]["reward"] = 0.123
    for entry in record["windows"]:
        for name in ("base", "trained"):
            entry["policies"][name]["unparsed"] = 77
    (folder / "evaluation.json").write_text(json.dumps(result))
    (folder / "closed_loop.json").write_text(json.dumps(record))
    done = run_script(**run.settings | {"OUTPUT_DIR": folder, "TOTAL_STEPS": 3})
    assert done.returncode == 0, done.stdout + done.stderr
    result, record = read(folder, "evaluation.json"), read(folder, "closed_loop.json")
    assert result["before"]["reward"] == 0.123 != result["after"]["reward"]
    assert record["totals"]["base"]["unparsed"] == 3 * 77 and record["totals"]["trained"]["unparsed"] < 77
    assert "held-out reward before training: 0.123" in done.stdout


def command(*arguments, **environ):
    line = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), *map(str, arguments)]
    return subprocess.run(line, env=CLEAN | environ, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_the_command_evaluates_an_adapter_and_its_base(run, tmp_path):
    """On the windows of the run, with its seeds: the figures of the run's own closed loop, at the same batches."""
    out = tmp_path / "out.json"
    done = command("--adapter", run.folder / "checkpoint-2", "--base-too", "--profile", run.profile, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compact prompts (as in EVAL_DATA)" in done.stdout and "trained against base" in done.stdout
    record, own = json.loads(out.read_text()), read(run.folder, "closed_loop.json")
    check_schema(record, {"base", "trained"})
    assert record["sampling"] == own["sampling"], "the run's settings, not the environment's"
    for name in ("base", "trained"):
        for mine, theirs in zip(record["windows"], own["windows"], strict=True):
            assert mine["policies"][name] == theirs["policies"][name]
    assert record["totals"]["base"] != record["totals"]["trained"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--base-too",), "only with --adapter"),
        (("--vote",), "needs --samples"),
        (("--hours-limit", "8"), "'8' is not int from 9 to 72"),
        (("--model", "tiny", "--adapter", "docs", "--profile", "nowhere.csv", "README.md"),
         "adapter_config.json is not there|no file matches 'nowhere.csv'|README.md, header"),
        (("--model", "tiny", "--out", "nowhere/x.json"), "nowhere/x.json: cannot be written: No such file or directory"),
        (("--model", "tiny", "--out", "docs"), "docs: cannot be written: Is a directory"),
        (("--model", "tiny", "--out", "README.md/x.json"), "README.md/x.json: cannot be written: Not a directory"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(arguments, words, capsys, monkeypatch):
    """And before anything takes time: the tiny model is not even made."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("make_model.build_tiny", lambda: pytest.fail("made"))
    try:
        code = ev.main(arguments)
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr().err
    assert code == 2 and all(part in shown for part in words.split("|")), shown


def test_a_result_that_could_not_be_written_is_found_before_the_model_is_asked(tmp_path, capsys, monkeypatch):
    """By trying: what root may not write (/sys) or a full disk refuses is in no permission bit."""
    monkeypatch.setattr("make_model.build_tiny", lambda: pytest.fail("made"))
    touch = Path.touch

    def full(path, *arguments, **named):
        if path.parent == tmp_path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        touch(path, *arguments, **named)

    monkeypatch.setattr(Path, "touch", full)
    assert ev.main(["--model", "tiny", "--out", str(tmp_path / "x.json")]) == 2
    assert f"{tmp_path / 'x.json'}: cannot be written: No space left" in capsys.readouterr().err
    monkeypatch.setattr(Path, "touch", touch)
    problems = Problems()
    check_writable(tmp_path / "x.json", problems)
    assert not problems and not list(tmp_path.iterdir()), "and a trial leaves nothing"


def test_a_tiny_model_that_cannot_be_made_is_told(tmp_path, capsys, monkeypatch):
    (tmp_path / "train_grpo").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ev.main(["--model", "tiny", "--out", str(tmp_path / "x.json")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("MODEL_ID=tiny: the tiny model cannot be made") and "XDG_CACHE_HOME" in shown


def test_another_evaluation_is_not_overwritten(run, capsys):
    before = (run.folder / "closed_loop.json").read_bytes()
    assert ev.main(["--adapter", str(run.folder), "--samples", "3", "--profile", str(run.profile)]) == 2
    assert "holds another evaluation" in capsys.readouterr().err
    assert (run.folder / "closed_loop.json").read_bytes() == before


def test_vllm_gets_the_adapter_from_its_folder(run, tiny, monkeypatch, tmp_path):
    """The engine's part against the stub: no adapter for the base, the folder's for the trained model, never asleep."""
    from safetensors.torch import load_file, save_file
    from stub_vllm import StubLLM, StubLoRARequest, StubSampling

    folder = tmp_path / "strong"  # two steps alone may not change an answer
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({n: 50 * t if "lora_B" in n else t for n, t in weights.items()}, folder / "adapter_model.safetensors")
    machine = Machine("H100", 1, 79.0, 78.0, 100.0, 16, "x86_64")
    stubs = []

    def start_engine(settings, plan, model_path, stop_token_ids):
        arguments = engine_arguments(settings, plan, model_path, machine.gpu_total)
        keep = {k: v for k, v in arguments.items() if "lora" in k and k.startswith(("enable", "max_lora_r"))}
        stubs.append(StubLLM(arguments["model"], max_model_len=arguments["max_model_len"], **keep))
        engine = Engine(stubs[0], StubSampling, StubLoRARequest, settings, stop_token_ids)
        engine.sleep()
        return engine

    monkeypatch.setattr("grpo.evaluate.models.start_engine", start_engine)
    environ = recorded_settings(folder, {"LORA_R": "1"})
    settings, _, problems = load_settings(environ)
    files = find_model("tiny", problems)
    assert not problems and settings.SEED == 5
    model = VllmModel(settings, files, str(tiny), folder, machine, 120, 6)
    render = renderer("compact", lambda m: data_prompts.render(files.template, m, "low", "2025-11-06"))
    prompts = [render(state_at(window, PLANT, 0, 150.0)) for window in WINDOWS[:3]]
    base, trained = model.ask(prompts, 2, 7, base=True), model.ask(prompts, 2, 7)
    assert len(base) == len(trained) == 6 and base != trained
    assert [request and request.lora_path for request in stubs[0].requests] == [None, str(folder.resolve())]
    assert stubs[0].calls == ["sleep", "wake_up", "generate", "generate", "add_lora"], "awake from the start on"
    assert all(text.startswith("<|channel|>final") for text in base)
    with pytest.raises(EngineError, match="of the GPU"):
        VllmModel(settings, files, str(tiny), None, dataclasses.replace(machine, gpu_free=0.0), 120, 6)


def test_a_run_that_is_ended_in_the_closed_loop_leaves_no_part_of_it(monkeypatch, tmp_path):
    plan = ClosedLoop("full", "", ("p.csv",), tuple(CASES))
    check = SimpleNamespace(settings=Settings(), run=SimpleNamespace(folder=tmp_path), closed_loop=plan,
                            files=SimpleNamespace(template=""))  # fmt: skip
    asked = []

    def completions(*arguments):
        asked.append(len(arguments[1]))
        if len(asked) == 2:
            raise KeyboardInterrupt  # as train_grpo's handler of signals does
        return [[0]] * len(arguments[1])

    monkeypatch.setattr("grpo.evaluate.plant.complete", completions)
    batch_decode = SimpleNamespace(batch_decode=lambda ids, **options: ["[0]"] * len(ids))
    trainer = SimpleNamespace(run=SimpleNamespace(stop_signal=0), processing_class=batch_decode)
    with pytest.raises(KeyboardInterrupt):
        measure_closed_loop(check, trainer, base=True)
    assert len(asked) == 2 and not list(tmp_path.iterdir())
