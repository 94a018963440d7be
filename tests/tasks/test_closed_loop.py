# SPDX-License-Identifier: Apache-2.0
"""The closed loop: its arithmetic, its prompts, its record."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from closed_loop_schema import check_schema
from helpers import ROOT
from test_tes_plant import hour_by_hand

from grpo.common import Problems
from grpo.data.files import read_file
from grpo.data.heldout import Split
from grpo.data.prepare import prepare_rows
from grpo.data.prompts import render
from grpo.plan.hub import find_model
from grpo.settings.table import Settings
from grpo.tasks.tes import closed_loop as loop
from grpo.tasks.tes import record as tes_record
from grpo.tasks.tes.closed_loop import RULES, closed_loop
from grpo.tasks.tes.dataset import rows_csv, trajectory
from grpo.tasks.tes.plant import PLANT
from grpo.tasks.tes.prompts import prompt_kind, renderer
from grpo.tasks.tes.record import ClosedLoopPlan, read_windows, run_model
from grpo.tasks.tes.simulator import SIMULATOR

CASES = read_windows(ROOT / "data" / "profile_heldout.csv")
WINDOWS = [window for _, window in CASES]


@pytest.mark.parametrize("action", (0, 2))
def test_always_the_same_equals_a_simulation_by_hand(action):
    """Hour by hour, and its costs and what is taken out of the storage added up."""
    trace = closed_loop(WINDOWS, RULES[f"always_{action}"])
    figures = loop.outcome(trace, WINDOWS)
    for w, window in enumerate(WINDOWS):
        energy, cost, cycled = 150.0, 0.0, 0.0
        for t, (load, co2) in enumerate(zip(window.load_kw[:3].flat, window.co2[:3].flat, strict=True)):
            after, hour_cost = hour_by_hand(energy, 100.0 * action / 3, load, co2)
            energy, cost, cycled = after, cost + hour_cost, cycled + max(0.0, energy - after)
            assert trace.storage_kwh[w, t] == pytest.approx(energy, abs=1e-6)
        low5 = sum(sorted(window.co2[3].tolist())[:5]) / 5
        expected = 6 * cost - (energy - 150.0) * low5 / 4
        assert figures["priced_kg"][w] == pytest.approx(expected)
        assert figures["storage_cycled_kwh"][w] == pytest.approx(cycled, abs=1e-6)


def test_rules_do_what_they_say():
    follow = closed_loop(WINDOWS, RULES["follow_the_load"])
    assert follow.unserved_kwh.max() == 0 and loop.outcome(follow, WINDOWS)["storage_cycled_kwh"].max() == 0
    loads = np.stack([w.load_kw[:3].ravel() for w in WINDOWS])
    below = np.where(follow.actions > 0, PLANT.outputs_kw[follow.actions - 1], -1)
    assert (PLANT.outputs_kw[follow.actions] >= loads).all(), "it is enough"
    assert (below < loads).all(), "and the smallest one that is"
    clean = closed_loop(WINDOWS, RULES["charge_when_clean"])
    assert clean.unserved_kwh.max() == 0 and loop.outcome(clean, WINDOWS)["storage_cycled_kwh"].min() > 100
    dirty = np.stack([(w.co2[:3] > np.median(w.co2[:3], axis=1, keepdims=True)).ravel() for w in WINDOWS])
    output_kw = PLANT.outputs_kw[clean.actions]
    assert output_kw[dirty].mean() < 0.5 * output_kw[~dirty].mean()


@pytest.mark.parametrize("kind", ("full", "compact"))
def test_prompts_are_those_of_the_dataset(kind, tmp_path):
    """Driven by the optimum, the loop passes through the rows of a trajectory without exploration: the same prompts,
    read and rendered by the trainer from the CSV."""
    rng = np.random.default_rng(0)
    path = tmp_path / "rows.csv"
    path.write_text(rows_csv([row for w in WINDOWS for row, _ in trajectory(w, rng, kind, 150.0, 0)]))
    problems = Problems()
    files, s = find_model("tiny", problems), Settings(MODEL_ID="tiny", MAX_PROMPT_LEN=9999)
    rows = prepare_rows(s, files, problems, Split(read_file(path, problems), [], "")).train
    assert not problems and prompt_kind([row.messages for row in rows]) == kind
    render_state = renderer(kind, lambda turns: render(files.template, turns, s.REASONING_EFFORT, s.PROMPT_DATE))
    seen, best = [], loop.optimal_policy(WINDOWS)

    def policy(states):
        seen.append([render_state(state) for state in states])
        return best(states)

    closed_loop(WINDOWS, policy)
    assert [prompt for window in zip(*seen, strict=True) for prompt in window] == [row.prompt for row in rows]


def test_which_plant_the_prompts_are_of():
    names = ("tes_heldout.csv", "tes_heldout_compact.csv")
    full, compact = ([row.messages for row in read_file(ROOT / "data" / n, Problems())[:3]] for n in names)

    def edited(messages, old, new):
        return [[(role, text.replace(old, new)) for role, text in conversation] for conversation in messages]

    assert prompt_kind(full) == "full" and prompt_kind(compact) == "compact"
    assert prompt_kind(edited(full, "capacity [kWh]: 300.0", "capacity [kWh]: 500.0")) is None
    assert prompt_kind(edited(compact, "store", "tank")) is None
    assert prompt_kind([full[0], compact[0]]) is prompt_kind([]) is None


def test_answers_are_actions_and_unreadable_ones_are_counted():
    answers = {"a": "[1]", "b": "no", "c": "[7]"}
    hours, unparsed = [], np.zeros(3, int)

    def ask(prompts, hour):
        hours.append(hour)
        return [f"<|channel|>final<|message|>{answers[prompt[0]]}<|return|>" for prompt in prompts]

    states = [SimpleNamespace(name=name) for name in answers]
    policy = loop.model_policy(ask, lambda state: f"{state.name}<|start|>assistant", unparsed)
    assert policy(states) == policy(states) == [1, None, None]
    assert unparsed.tolist() == [0, 2, 2] and hours == [0, 1]


def plan_of(cases=CASES):
    names, windows = zip(*cases, strict=True)
    return ClosedLoopPlan(profiles=("p.csv",), episodes=names, windows=windows)


def record_of(cases=CASES, samples=1, exact=False, seed=1):
    return tes_record.new_record(plan_of(cases), Settings(SEED=seed), samples, exact)


def answering(answer, unparsed_at=()):
    """A model that gives this answer to each prompt, and nothing readable in some hours."""

    def ask(prompts, hour):
        text = "hm" if hour in unparsed_at else answer
        return [f"<|channel|>final<|message|>{text}<|return|>" for _ in prompts]

    return ask


def test_the_record_adds_up():
    record = record_of(samples=2)
    run_model(plan_of(), record, "base", answering("[1]"))
    run_model(plan_of(), record, "trained", answering("[1]", unparsed_at=(3, 4)))
    check_schema(record, {"base", "trained"})
    totals = record["totals"]
    for total in totals.values():
        expected = 100 * (total["priced_kg"] / totals["optimum"]["priced_kg"] - 1)
        assert total["regret_percent"] == pytest.approx(expected, abs=1e-4)
    assert totals["base"] | {"answers": 0} == totals["always_1"]
    assert totals["base"]["answers"] == 2 * 30 * len(CASES) and totals["trained"]["unparsed"] == 2 * 2 * len(CASES)
    change = record["difference"]
    gap = totals["trained"]["regret_percent"] - totals["base"]["regret_percent"]
    assert change["regret_percent"] == pytest.approx(gap, abs=1e-4)
    assert change["regret_percent_low"] <= change["regret_percent"] <= change["regret_percent_high"]
    text = SIMULATOR.table(record)
    assert f"{4 * len(CASES)} of {60 * len(CASES)}" in text and "trained against base" in text


def test_windows_with_unserved_load_are_counted_and_the_worst_is_named():
    """A window counts above 0.05 kWh, the mean of its passes; a policy that serves all load names no window."""
    record = record_of(CASES[:4])
    names = [entry["name"] for entry in record["windows"]]
    for kwh, count, worst in (((0.0, 0.05, 0.0, 0.0), 0, None), ((0.1, 0.051, 7.0, 0.05), 3, names[2])):
        for entry, unserved in zip(record["windows"], kwh, strict=True):
            entry["policies"]["always_3"]["mean"]["unserved_kwh"] = unserved
        tes_record.add_totals(record)
        total = record["totals"]["always_3"]
        assert (total["unserved_windows"], total["worst_window"]) == (count, worst)
        assert total["worst_unserved_kwh"] == max(kwh)
    for entry in record["windows"]:  # As of a/july.csv and b/july.csv.
        entry["name"] = names[0]
    tes_record.add_totals(record)
    assert record["totals"]["always_3"]["unserved_windows"] == 3


def test_passes_are_averaged_and_the_first_is_shown():
    record = record_of(CASES[:2])
    trace = closed_loop(WINDOWS[:2] * 2, lambda states: [0, 1, 3, 3])  # pass 1 of both windows, then pass 2
    tes_record.add_policy(record, "base", WINDOWS[:2], trace, np.arange(1, 5), answers=120)
    for entry, action, unparsed in zip(record["windows"], (0, 1), (4, 6), strict=True):
        base, first, second = (entry["policies"][name] for name in ("base", f"always_{action}", "always_3"))
        assert base["actions"] == [action] * 30 and base["unparsed"] == unparsed
        for key, value in base["mean"].items():
            assert value == pytest.approx((first["mean"][key] + second["mean"][key]) / 2, abs=1e-5)
    total = record["totals"]["base"]
    assert total["answers"] == 120 and total["unparsed"] == 10
    assert total["regret_percent_low"] is None and record["totals"]["always_3"]["regret_percent_high"] is None


def invented(state):
    """Probabilities of the four actions that depend on all of a state, and sum to less than 1."""
    x = np.sin(np.arange(1, 5) * (1 + state.energy_kwh / 40 + state.load_kw[state.stamp.hour - 8]))
    return np.exp(x) / np.exp(x).sum() * 0.9


def test_the_expected_loop_is_the_mean_over_all_that_can_happen(monkeypatch):
    """Against every sequence of three answers, unreadable ones among them, each run for itself and weighted. Little is
    stored at their start, so that loads are left unserved."""
    windows = [WINDOWS[0], WINDOWS[3]]
    monkeypatch.setattr(loop, "DECISIONS", 3)
    monkeypatch.setattr(loop, "START_KWH", 40.0)
    expectation = loop.expected_loop(windows, lambda states: np.stack([*map(invented, states)]))
    sums = loop.expected_outcome(expectation, windows)
    for w, window in enumerate(windows):
        mean, unread = dict.fromkeys(sums, 0.0), 0.0
        for answers in itertools.product((0, 1, 2, 3, None), repeat=3):
            weight, remaining = 1.0, iter(answers)

            def policy(states, remaining=remaining):
                nonlocal weight
                p, answer = invented(states[0]), next(remaining)
                weight *= 1 - p.sum() if answer is None else p[answer]
                return [answer]

            trace = closed_loop([window], policy)
            unread += weight * answers.count(None)
            for name, values in loop.outcome(trace, [window]).items():
                mean[name] += weight * values[0]
        assert expectation.unparsed[w] == pytest.approx(unread)
        for name, values in sums.items():
            assert values[w] == pytest.approx(mean[name], rel=1e-4, abs=1e-4), name


def test_states_are_merged_and_the_unlikely_ones_dropped(monkeypatch):
    """No more states than energies that can be reached. What is left of those that are dropped counts for all."""
    most = []

    def chances(states):
        most.append(len(states))
        return np.tile([0.5, 0.0, 1e-7, 0.5 - 1e-7], (len(states), 1))

    loop.expected_loop(WINDOWS[:1], chances)
    assert max(most) < 400
    monkeypatch.setattr("grpo.tasks.tes.closed_loop.LEAST_PROBABILITY", 0.2)
    most = closed_loop(WINDOWS[:1], RULES["always_3"]).co2_kg.sum()
    expectation = loop.expected_loop(WINDOWS[:1], lambda states: np.tile([0.9, 0.0, 0.0, 0.1], (len(states), 1)))
    assert expectation.co2_kg[0] == pytest.approx(0.1 * most)


def test_an_exact_record_holds_the_greedy_path_and_the_expectation():
    """The greedy answers are the same function at temperature 0; the hours of both are the greedy path's."""
    record = record_of(CASES[:3], 4, exact=True)
    record_greedy = record_of(CASES[:3])
    run_model(plan_of(CASES[:3]), record_greedy, "base_greedy", answering("[2]"))

    def probabilities(prompts, greedy):
        return np.tile([0.0, 0.0, 1.0, 0.0] if greedy else [0.0, 0.3, 0.6, 0.0], (len(prompts), 1))

    tes_record.run_exact(plan_of(CASES[:3]), record, "base", probabilities)
    check_schema(record, {"base", "base_greedy"})
    assert record["totals"]["base_greedy"] == record_greedy["totals"]["base_greedy"] | {"answers": 90}
    base, greedy = (record["windows"][1]["policies"][name] for name in ("base", "base_greedy"))
    assert base["actions"] == greedy["actions"] and base["mean"] != greedy["mean"]
    totals, shares = record["totals"], {"always_1": 0.3, "always_2": 0.6, "always_3": 0.1}
    assert totals["base"]["unparsed"] == pytest.approx(0.1 * 3 * 30 * 4) and totals["base"]["answers"] == 360
    co2 = sum(totals[rule]["co2_kg"] * share for rule, share in shares.items())
    assert totals["base"]["co2_kg"] == pytest.approx(co2, rel=1e-4), "emissions follow the output alone"
    assert "of three days, exact" in SIMULATOR.table(record) and "base greedy" in SIMULATOR.table(record)


def test_what_was_measured_of_the_base_model_is_kept_only_if_it_is_the_same_measurement():
    cases = CASES[:2]
    earlier, again = record_of(cases), record_of(cases)
    for name in ("base", "trained"):
        run_model(plan_of(cases), earlier, name, answering("[1]"))
    tes_record.keep_base(again, earlier)
    assert again["totals"]["base"] == earlier["totals"]["base"] and "trained" not in again["totals"]
    name, window = cases[0]
    changed = [(name, dataclasses.replace(window, co2=window.co2 + 0.1)), cases[1]]
    for others, samples, seed in ((cases, 1, 2), (cases[:1], 1, 1), (cases, 2, 1), (changed, 1, 1)):
        other = record_of(others, samples, seed=seed)
        tes_record.keep_base(other, earlier)
        assert "base" not in other["totals"]


def test_the_start_adapter_has_a_row_and_its_difference():
    """It is the trained model before it learns, and stays in the record like the base model."""
    record = record_of(CASES[:3])
    for name, answer in (("base", "[1]"), ("trained", "[2]"), ("trained_greedy", "[3]")):
        run_model(plan_of(CASES[:3]), record, name, answering(answer))
    start = SIMULATOR.as_start(record)
    assert start["totals"]["start"] == record["totals"]["trained"] and "start_greedy" in start["totals"]
    assert "trained" not in start["totals"] and "trained" in record["totals"], "a copy"
    later = record_of(CASES[:3])
    SIMULATOR.keep_base(later, start)
    run_model(plan_of(CASES[:3]), later, "trained", answering("[3]"))
    change = later["totals"]["trained"]["regret_percent"] - later["totals"]["start"]["regret_percent"]
    assert later["difference_start"]["regret_percent"] == pytest.approx(change)
    assert "the adapter it started from" in SIMULATOR.report(later).verdict
    names = [row[0] for row in SIMULATOR.report(later).rows]
    assert names[:3] == ["base", "start", "trained"] and "trained against start" in SIMULATOR.table(later)


def test_windows_of_the_same_days_in_two_profiles_count_as_one():
    """They share the weather and the grid's CO2. A third of other days makes the interval possible."""

    def totals(names):
        windows = []
        for number, name in enumerate(names):
            means = {"optimum": 100.0, "base": 110.0 + int(name[-1]), "trained": 105.0, "always_0": 120.0}
            means |= {"charge_when_clean": 100.0 + number, "always_3": 130.0}
            policies = {
                policy: {"mean": {"priced_kg": kg, "unserved_kwh": 0.0}, "unparsed": 0, "answers": 30}
                for policy, kg in means.items()
            }
            windows.append({"name": f"{'ab'[number % 2]}: {name}", "policies": policies})
        record = {"windows": windows}
        tes_record.add_totals(record)
        return record

    twice = totals(["2025-07-01", "2025-07-01", "2025-07-04", "2025-07-04"])
    assert twice["totals"]["base"]["regret_percent_low"] is None, "two days"
    days = ["2025-07-01", "2025-07-04", "2025-07-07"]
    once, twice = totals(days), totals(sorted(days * 2))
    for name in ("base", "trained"):
        assert twice["totals"][name]["regret_percent_low"] == once["totals"][name]["regret_percent_low"]
    assert twice["difference"] == once["difference"] and once["difference"]["regret_percent_high"] < 0
    assert once["difference_rule"]["regret_percent"] == 4.0, "from charge_when_clean, the best of the three rules"
