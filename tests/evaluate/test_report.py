# SPDX-License-Identifier: Apache-2.0
"""The report of a run, from whatever a run has written. Run: python -m pytest tests/evaluate/test_report.py"""

from __future__ import annotations

import base64
import html
import json
import math
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pandas
import pytest
import report
from conftest import ROOT
from run_folders import EVALUATION, GPU, metrics_row, write_run

import train_grpo
from grpo.data.files import data_fingerprint, read_rows
from grpo.evaluate import figures, run_data
from grpo.evaluate.figures import CURVES as ALL_CURVES
from grpo.evaluate.figures import stacked
from grpo.evaluate.page import write_report
from grpo.evaluate.report import (
    best_rule,
    curves_section,
    heldout_section,
    plant_section,
    plant_verdict,
    reward_verdict,
)
from grpo.evaluate.run_data import Completions, Run, read_completions, read_metrics
from grpo.run.logs import METRICS
from grpo.settings import Problems

NO_METRICS, NO_COMPLETIONS = pandas.DataFrame(columns=list(METRICS)), Completions(0, pandas.DataFrame(), {})


def run_of(evaluation: dict | None = None, found: dict | None = None, completions: Completions = NO_COMPLETIONS) -> Run:
    return Run(Path("x"), NO_METRICS, completions, {}, evaluation or {}, found or {})


def completion_row(step: int, text: str = "[1]", **cells: object) -> dict[str, object]:
    row = {"step": step, "prompt_id": "days:1", "completion": text, "parsed_action": 1, "reward": 0.5}
    return row | {"best_action": 1, "tokens": 7, "truncated": 0} | cells


def policy(actions: list[int | None], co2: float) -> dict[str, object]:
    output = [0.0 if k is None else 100 * k / 3 for k in actions]
    return {"actions": actions, "output_kw": output, "storage_kwh": [150.0] * len(actions), "co2_kg": [co2] * len(actions), "unserved_kwh": [0.0] * len(actions), "unparsed": 0}  # fmt: skip


def closed_loop(windows: int = 1, names: tuple[str, ...] = ("base", "trained", "optimum", "always_0")) -> dict:
    actions = [None] * 8 + [1] * 10 + [None] * 6
    policies = {name: policy(actions * 3, 1.0 + i) for i, name in enumerate(names)}
    window = {"name": "profile_heldout: 2025-09-01", "start": "2025-09-01 00:00", "hours": 72, "policies": policies}
    window |= {"load_kw": ([0.0] * 8 + [30.0] * 10 + [0.0] * 6) * 3, "co2_kg_per_kwh": [None, *[0.4] * 71]}
    totals = {name: {"co2_kg": 100.0 + i, "unserved_kwh": 0.0, "storage_cycled_kwh": 5.0, "regret_percent": 20.0 - i, "regret_percent_low": 15.0, "regret_percent_high": 22.0, "unparsed": 1, "answers": 90} for i, name in enumerate(names)}  # fmt: skip
    record = {"profiles": ["data/profile_heldout.csv"], "start_kwh": 150.0, "samples": 1, "vote": False}
    record |= {"safe_action": 1, "safe_action_reason": "it serves most loads.", "windows": [window] * windows}
    difference = {"regret_percent": -9.0, "regret_percent_low": -12.0, "regret_percent_high": -6.0}
    return record | {"totals": totals, "difference": difference}


def test_tables_name_greedy_answers_and_exact_figures():
    exact = {key: value for key, value in EVALUATION["after"].items() if not key.startswith(("tokens", "clipped"))}
    run = run_of(EVALUATION | {"exact": True, "after": exact, "after_greedy": exact})
    _, rows, text = heldout_section(run).tables[0]
    labels = [row[0] for row in rows]
    assert labels[2:6] == ["base model", "trained", "base model, greedy", "trained, greedy"]
    assert rows[3][-1] == "-" and rows[2][-1] == "7, 12" and text.startswith("Exact: all answers by their probability at temperature 0.5")  # fmt: skip
    found = closed_loop(names=("base", "base_greedy", "trained", "trained_greedy", "optimum")) | {"exact": True}
    section = plant_section(run_of(found=found))
    assert "by their probability (exact)" in section.notes[0] and "the greedy path" in section.notes[0]
    assert [row[0] for row in section.tables[0][1]][:2] == ["base model", "base greedy"]


@pytest.fixture(scope="module", autouse=True)
def coarse():
    """Figures of few pixels: the tests look at what is there, not at how sharp it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.evaluate.figures.DPI", 40)
        yield


def with_evaluations(folder: Path, evaluated: dict[int, tuple[float, float, float]]) -> Path:
    """metrics.csv with the columns that evaluated steps fill, and the first of the steps kept as the best."""
    metrics = pandas.read_csv(folder / "metrics.csv", dtype=str)
    cells = [evaluated.get(step, ("", "", "")) for step in metrics["step"].astype(int)]
    metrics[list(run_data.EVALUATED)] = cells
    metrics.to_csv(folder / "metrics.csv", index=False, lineterminator="\n")
    (folder / "best").mkdir()
    (folder / "best" / "best.json").write_text(
        json.dumps({"step": min(evaluated), "figure": "plant_regret", "value": 9.0})
    )
    return folder


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The panels of every figure that is made."""
    made = []

    def keep(axes, name, title, line, columns=3):
        made.append(axes.figure.axes)
        return figures.Picture(name, title, line, b"")

    monkeypatch.setattr(figures, "picture", keep)
    return made


@pytest.fixture(scope="module")
def full(tmp_path_factory, coarse) -> Path:
    """A complete GPU run with everything there is, and its report."""
    metrics = [metrics_row(step, **GPU) for step in range(1, 31)]
    samples = [
        completion_row(1, "\u51b7\u623f \x1b[31m\r\nline\u202eback <|message|>[1]<|return|>", reward=0.9),
        completion_row(2, "bad", parsed_action=2, reward=0.05, prompt_id="days:2"),
        completion_row(3, "no answer", parsed_action="", reward=0, prompt_id="days:3"),
        completion_row(4, "long " * 200_000, parsed_action="", reward=0, prompt_id="days:4", truncated=1),
        *[completion_row(5, parsed_action=action, prompt_id=f"more:{action}") for action in range(30)],
    ]
    folder = tmp_path_factory.mktemp("runs") / "\u5b9f\u9a13"
    write_run(folder, metrics, samples, evaluation=EVALUATION, closed_loop=closed_loop(4))
    write_report(with_evaluations(folder, {10: (0.5, 9.0, 2.0), 20: (0.55, 12.0, 0.0)}))
    return folder


def pictures_of(folder: Path) -> set[str]:
    return set(re.findall(r'<figure id="([^"]+)">', (folder / "report.html").read_text(encoding="utf-8")))


def text_of(folder: Path, write: bool = True) -> str:
    """The text of the report, written again."""
    page = write_report(folder) if write else folder / "report.html"
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_the_page_of_a_full_run_is_one_file_with_every_part_in_order(full):
    page = (full / "report.html").read_text(encoding="utf-8")
    assert not {"script", "link", "iframe", "object", "form"} & set(re.findall(r"<(\w+)", page))
    sources = re.findall(r'(?:src|href|srcset)="([^"]*)', page)
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in page.replace("http-equiv", "") and len(page) < 1_000_000
    assert "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in page
    titles = re.findall(r"<h2>([^<]+)</h2>", page)
    assert [title.split()[0].strip(",:") for title in titles] == ["Learning", "Actions", "Held-out", "Closed", "Completions", "Glossary"]  # fmt: skip
    assert page.index('class="verdict"') < page.index("<h2>")
    empty = pandas.read_csv(full / "metrics.csv").isna().all()
    for column, (_, line) in METRICS.items():
        assert (f"<td>{column}<div" in page) != empty[column]
        assert empty[column] or html.unescape(line) in html.unescape(page)
    pictures = re.findall(r'<figure id="([^"]+)"><img alt="([^"]+)" src="data:image/png;base64,([^"]+)">\s*<figcaption><b>([^<]+)</b>([^<]*)', page)  # fmt: skip
    names = {*ALL_CURVES, "evaluations", "phases", "actions", "heldout", "plant_1", "plant_2", "plant_3"}
    assert len(pictures) == page.count("<figure") and {name for name, *_ in pictures} == names
    for _, alt, data, title, line in pictures:
        assert alt == title and len(line) > 20 and base64.b64decode(data).startswith(b"\x89PNG")


SUMMARY = [
    "30 of 30",
    "0.400 \u2192 0.600",
    "100 \u2192 101 kg",
    "0.400 (0.370 to 0.430)",
    "unserved load 0 \u2192 0 kWh",
]
SUMMARY += ["regret 20.0 \u2192 19.0 %", "20.0 (15.0 to 22.0)", "optimum 102 kg", "1 of 90", "characters left out"]
SUMMARY += ["step 2, prompt days:2: action [2] (best [1]), reward 0.05, 7 tokens\n", "\u5b9f\u9a13: training report"]
SUMMARY += ["\u51b7\u623f \ufffd[31m\nline\ufffdback <|message|>[1]"]


def test_summary_names_the_figures_and_completions_are_harmless(full):
    text = text_of(full, write=False)
    assert [words for words in SUMMARY if words not in text] == []
    assert "someone" not in text and "days.csv" in text  # no folders of the machine


VERDICTS = [(0.1, 0.3, "improvement exceeds its confidence interval"), (-0.1, 0.3, "contains zero")]
VERDICTS += [(-0.3, -0.1, "worse than the base model"), (None, None, "nothing can be said about chance")]


@pytest.mark.parametrize("low, high, words", VERDICTS)
def test_verdicts(low, high, words):
    """Reward is better when it is higher, regret when it is lower."""
    difference = {"reward": 0.2, "reward_low": low, "reward_high": high}
    said = reward_verdict(run_of(EVALUATION | {"difference": difference}))
    assert words in said and "+0.200" in said and ("95% interval" in said) == (low is not None)
    found = closed_loop()
    found["difference"] |= {"regret_percent_low": high and -high, "regret_percent_high": low and -low}
    said = plant_verdict(run_of(found=found))
    assert words in said and "-9.0" in said and "unserved" not in said
    found["totals"]["trained"]["unserved_kwh"] = 7.0
    assert "Besides, 7.0 kWh of load stayed unserved" in plant_verdict(run_of(found=found))


@pytest.mark.parametrize("constant, words", [(0.5, "It also beats"), (0.65, "It still earns less"), (0.6, None)])
def test_verdict_mentions_the_best_constant_action(constant, words):
    said = reward_verdict(run_of(EVALUATION | {"constant": constant}))
    assert f"{words} the best constant action" in said or (f"{words} than the best constant" in said) if words else "constant" not in said  # fmt: skip


SKIPPED = {"settings": {"TOTAL_STEPS": 3, "EVAL_SAMPLES": 0}, "resumed_from_step": 2}
CUT_OFF = {name: value for name, value in EVALUATION.items() if name not in ("after", "difference")}
CURVES = {"best_action_rate", "clipped_ratio", "length", "parse_rate", "reward", "zero_std", "phases"}


@pytest.mark.parametrize(
    "steps, completions, files, pictures, words",
    [
        (0, 0, {}, set(), ["0 of 30", "there is none so far", "There are no completions yet", "There is no evaluation on held-out prompts"]),
        (1, 1, {}, {"phases", "actions"}, ["A curve needs two steps, and there is one so far"]),
        (3, 0, {"evaluation": CUT_OFF}, CURVES | {"heldout"}, ["3 of 30", "in progress, or interrupted", "No step between the first and the last was evaluated", "Whether training helped is not known yet"]),
        (3, 1, {"settings": SKIPPED}, CURVES | {"actions"}, ["Held-out prompts were not evaluated: EVAL_SAMPLES is 0", "there is no closed_loop.json", "resumed from step 2", "None to show."]),
    ],
)  # fmt: skip
def test_runs_that_are_not_complete(tmp_path, steps, completions, files, pictures, words):
    rows = [completion_row(step) for step in range(1, completions + 1)]
    folder = write_run(tmp_path / "run", [metrics_row(s) for s in range(1, steps + 1)], rows, **files)
    text = text_of(folder)
    assert [word for word in words if word not in text] == [] and "exceeds" not in text
    assert pictures_of(folder) == pictures
    assert not [column for column in GPU if column in text], "on a CPU they are empty"
    assert "nan" not in text.replace("by NaN", "").replace("nan where", "")


def test_nan_and_infinite_rewards(tmp_path):
    metrics = [metrics_row(1, reward="nan"), metrics_row(2, reward=""), metrics_row(3, reward="inf", grad_norm="-inf")]
    folder = write_run(tmp_path / "run", [*metrics, metrics_row(4)], [completion_row(1, reward="nan", parsed_action="")])  # fmt: skip
    assert "reward none" in text_of(folder) and "reward" in pictures_of(folder)
    assert read_metrics(folder / "metrics.csv")["reward"].count() == 1


def test_row_that_is_half_written_is_left_out_and_of_two_the_later_counts(tmp_path):
    folder = write_run(tmp_path / "run", [metrics_row(2), metrics_row(1), metrics_row(2, reward=0.2)], [completion_row(1), completion_row(2, "two\nlines")])  # fmt: skip
    assert list(read_metrics(folder / "metrics.csv")["reward"]) == [0.31, 0.2]
    whole = (folder / "metrics.csv").read_bytes()
    third = whole.splitlines(keepends=True)[-1].replace(b"2,2026", b"3,2026", 1)
    for end in range(len(third) + 1):  # also where every cell is there, but the last may be cut
        (folder / "metrics.csv").write_bytes(whole + third[:end])
        assert list(read_metrics(folder / "metrics.csv")["step"]) == [1, 2, 3][: 2 + (end == len(third))]  # fmt: skip
    text = (folder / "completions.csv").read_bytes()
    for end in range(text.index(b"[1]"), len(text)):
        (folder / "completions.csv").write_bytes(text[:end])
        assert read_completions(folder / "completions.csv").count == (end >= text.index(b"\n2,") + 1)


def test_damaged_files_cost_their_section_only(tmp_path):
    found = closed_loop()
    folder = write_run(tmp_path / "run", [metrics_row(1), metrics_row(2)], evaluation=EVALUATION, closed_loop=found)
    write_report(folder)
    assert "plant_1" in pictures_of(folder)
    found["windows"][0]["policies"]["base"]["co2_kg"] = [1.0]
    (folder / "closed_loop.json").write_text(json.dumps(found))
    assert "Closed loop is left out: its data is not as expected (ValueError: " in text_of(folder)
    assert "reward" in pictures_of(folder) and "plant_1" not in pictures_of(folder)
    (folder / "evaluation.json").write_text('{"before": 3')
    (folder / "closed_loop.json").write_text('{"totals": [], "windows": {}, "difference": 1}')
    (folder / "settings.json").write_text('{"settings": [], "machine": "m", "choices": {"rollouts": 1}}')
    assert "Learning curves" in text_of(folder)


def test_markup_is_escaped_in_every_place_a_run_can_put_it(tmp_path):
    evil = "'\"><script>{{ 7 * 7 }}</script>"
    found = closed_loop(names=("base", "trained", "optimum", evil))
    found["safe_action_reason"] = found["windows"][0]["name"] = found["profiles"][0] = evil
    names = ("MODEL_ID", "DATA", "EVAL_DATA", "REWARDS", "LORA_TARGETS", "LORA_R", "TOTAL_STEPS")
    record = {"settings": dict.fromkeys(names, evil), "machine": {"gpu": evil}, "choices": {"rollouts": [True, evil]}}
    folder = write_run(
        tmp_path / f"run {evil.replace('/', '')}",
        [metrics_row(1, time=evil), metrics_row(2, time=evil)],
        [completion_row(1, evil, prompt_id=evil, parsed_action=evil, best_action=evil, tokens=evil)],
        settings=record | {"resumed_from_step": evil},
        evaluation=EVALUATION | {"samples": evil, "constant_action": evil},
        closed_loop=found,
    )
    assert text_of(folder).count(evil) >= 12
    assert "<script" not in (folder / "report.html").read_text(encoding="utf-8")


def test_examples_are_the_extremes_and_the_latest(tmp_path):
    rows = [completion_row(step, f"text {step}", prompt_id=f"days:{step % 7}", reward=(step * 37 % 50) / 50) for step in range(1, 51)]  # fmt: skip
    rows += [completion_row(51 + i, f"none {i}", prompt_id=f"days:{i}", parsed_action="", reward=0) for i in range(5)]
    found = read_completions(write_run(tmp_path / "run", [], rows) / "completions.csv")
    best = [max(row["reward"] for row in rows[:50] if row["prompt_id"] == f"days:{n}") for n in range(7)]
    highest, worst, unparsed, truncated = found.examples.values()
    assert list(highest["reward"]) == sorted(best, reverse=True)[:3]
    assert worst["reward"].iloc[0] == 0.0 and len(set(worst["prompt_id"])) == 3 and all(worst["parsed_action"] == "1")
    assert list(unparsed["completion"]) == ["none 4", "none 3", "none 2"]
    assert truncated.empty and found.count == 55
    assert found.actions.sum().to_dict() == {"": 5, "1": 50} and list(found.actions.index) == list(range(1, 56))


def test_completions_are_never_all_in_memory(tmp_path):
    row, count = 2000, 20 * run_data.ROWS
    path = tmp_path / "completions.csv"
    path.write_text(
        "step,prompt_id,completion,reward\n" + "".join(f"{n},p{n % 7},{'x' * row},{n % 50}\n" for n in range(count))
    )
    tracemalloc.start()
    found, (_, peak) = read_completions(path), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.count == count and list(found.examples["Highest reward"]["step"]) == [
        count - 1,
        count - 51,
        count - 101,
    ]
    assert peak < 4 * run_data.ROWS * row < path.stat().st_size / 4, "rows that are read, and their copies"


def test_examples_show_their_prompt_where_it_is_known(tmp_path):
    """From completions.csv, else from the training data where that is the run's still; never one of other rows."""
    data, rows = tmp_path / "days.csv", [completion_row(1), completion_row(1, prompt_id="days:2")]
    data.write_text("user,reward_action_0,reward_action_1\n<b>first?</b>,1,0\nsecond?,0,1\n")
    digest = data_fingerprint(read_rows("DATA", str(data), Problems()))
    record = {"settings": {"DATA": str(data)}, "data_sha256": digest}
    folder = write_run(tmp_path / "run", [metrics_row(1)], rows, settings=record)
    text = text_of(folder)
    assert text.count("<b>first?</b>") == text.count("second?") == 2
    assert "<b>first" not in (folder / "report.html").read_text()
    data.write_text("user,reward_action_0,reward_action_1\nother?,1,0\nsecond?,0,1\n")
    assert "?" not in text_of(folder).partition("Completions, good and bad")[2].partition("Glossary")[0]
    pandas.DataFrame([row | {"prompt": "in the log?"} for row in rows]).to_csv(folder / "completions.csv", index=False)
    assert text_of(folder).count("in the log?") == 4


def test_numbers():
    assert [run_data.number(value) for value in ("1.5", 2, "1e3")] == [1.5, 2.0, 1000.0]
    assert all(math.isnan(run_data.number(value)) for value in ("", "inf", "-inf", "nan", None, "x", [], math.inf))


def test_steps_are_dots_and_no_line_joins_them(drawn):
    """A line through lengths that jump between two values is a barcode."""
    lengths = [[12, 7][step % 2] for step in range(100)]
    metrics = pandas.DataFrame({"step": range(100), "tokens_mean": 7.0, "tokens_max": lengths}).astype(float)
    figures.curve(metrics, "length", {})
    dots, mean = drawn[0][0].lines[2:]
    assert dots.get_linestyle() == "None" and list(dots.get_ydata()) == lengths
    assert mean.get_linestyle() == "-" and set(mean.get_ydata()[10:]) == {9.5}


def test_bars_are_means_over_their_steps_and_stack():
    steps = pandas.RangeIndex(1, 81)
    axes = stacked(pandas.DataFrame({"a": [float(step) for step in steps], "b": 1.0}, steps), ["red", "blue"], "s")
    first, second = axes.containers
    assert [bar.get_height() for bar in first][:2] == [1.5, 3.5] and len(first) == 40
    assert (first[1].get_x(), first[1].get_width()) == (2.5, 2.0) and second[1].get_y() == 3.5


def level(line) -> float:
    return float(line.get_ydata()[0])


@pytest.mark.parametrize("record, shown", [({}, True), ({"settings": {"REWARDS": None}, "choices": {"rewards": ["regret", "why"]}}, False), ({"settings": {"REWARDS": "action,format=0.1"}}, False)])  # fmt: skip
def test_the_reward_curve_has_what_other_policies_earn_where_it_is_the_csv_s(tmp_path, drawn, record, shown):
    folder = write_run(tmp_path / "run", [metrics_row(1), metrics_row(2)], evaluation=EVALUATION, settings=record)
    section = curves_section(run_data.read_run(folder))
    assert section.pictures[0].name == "reward"
    lines = [(line.get_label(), level(line)) for line in drawn[0][0].lines[2:]]
    assert lines == ([("random 0.25", 0.25), ("always [0] 0.50", 0.5), ("oracle 0.70", 0.7)] if shown else [])
    assert ("what other policies earn on the held-out" in section.pictures[0].line) == shown
    assert any("The reward curve does not show" in sentence for sentence in section.missing) != shown
    styles = {line.get_linestyle() for panels in drawn[1:] for line in panels[0].lines}
    assert styles == {"None", "-"}  # other curves have no such lines


def test_evaluated_steps_are_drawn_between_base_and_trained_beside_the_best_rule(tmp_path, drawn):
    found = closed_loop(names=("base", "trained", "optimum", "always_0", "always_2"))
    found["totals"]["always_0"] |= {"regret_percent": 30.0}
    rows = [metrics_row(step) for step in range(1, 31)]
    folder = write_run(tmp_path / "run", rows, evaluation=EVALUATION, closed_loop=found)
    run = run_data.read_run(with_evaluations(folder, {10: (0.5, 9.0, 2.0), 20: (0.55, 12.0, 0.0)}))
    steps = run.evaluated()
    assert steps.index.tolist() == [0, 10, 20, 30]
    assert steps.to_numpy().tolist() == [[0.4, 20, 0], [0.5, 9, 2], [0.55, 12, 0], [0.6, 19, 0]]
    assert best_rule(run)[0] == "always_2"
    section = curves_section(run)
    assert "Star: step 10, whose adapter is kept in best/ (chosen by plant regret)" in section.pictures[-1].line
    assert "Dotted: always [2], the rule" in section.pictures[-1].line
    labels = [axes.get_legend_handles_labels()[1] for axes in drawn[-1]]
    assert labels[0] == ["base 0.40", "kept 0.50", "random 0.25", "always [0] 0.50", "oracle 0.70"]
    assert labels[1:] == [["base 20.0", "always [2] 16.0", "kept 9.0"], ["base 0.0", "always [2] 0.0", "kept 2.0"]]
    # Without a plant there is one panel; without an evaluated step nothing of the two ends.
    metrics = pandas.read_csv(folder / "metrics.csv", dtype=str).drop(columns=["plant_regret", "plant_unserved_kwh"])
    run = run_data.Run(folder, metrics.assign(step=metrics["step"].astype(int)), NO_COMPLETIONS, {}, EVALUATION, {})
    assert run.evaluated().dropna(axis=1, how="all").columns.tolist() == ["heldout_reward"]
    run.metrics = run.metrics.drop(columns="heldout_reward")
    assert run.evaluated().empty


def test_hours_with_unserved_load_are_marked_and_counted(drawn):
    found = closed_loop()
    found["windows"][0]["policies"]["base"]["unserved_kwh"][9:13] = [30.0, 0.5, 0.0, 1e-6]
    section = plant_section(run_of(found=found))
    assert "Load left unserved (hatched, below a triangle): base model 2 hours, 30.5 kWh, trained none, optimum none." in section.pictures[0].line  # fmt: skip
    base, trained, *_ = drawn[0]
    assert [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in base.patches] == [(9, 0, 30), (10, 29.5, 0.5)]
    assert base.lines[-1].get_xdata().tolist() == [9.5, 10.5] and base.lines[-1].get_marker() == "v"
    assert [text.get_text() for text in base.get_legend().get_texts()] == ["load unserved"]
    assert not trained.patches and not trained.get_legend()


@pytest.mark.parametrize("names", [("base", "optimum"), ("trained", "optimum"), ("optimum",)])
def test_the_plant_is_drawn_with_the_models_that_there_are(drawn, names):
    """A run that goes on, or was interrupted, has no trained model yet."""
    section = plant_section(run_of(found=closed_loop(names=names)))
    assert len(section.pictures) == 1 and len(drawn[0]) == 3 + len(names) and section.tables


NO_REPORT = [(None, "no such folder"), ("x.csv", "no metrics.csv"), ("metrics.csv", "no column `step`")]


@pytest.mark.parametrize("name, words", [*NO_REPORT, ("report.html", "cannot be written")])
def test_clear_error_where_no_report_can_be_written(tmp_path, capsys, name, words):
    folder = tmp_path / "run"
    if name == "report.html":
        write_run(folder, [metrics_row(1)])
        (folder / name).mkdir()  # it stands in the way
    elif name:
        folder.mkdir()
        (folder / name).write_text("a,b\n1,2\n")
    assert report.main([str(folder)]) == 2 and words in capsys.readouterr().err
    assert not (folder / "report.html").is_file()


@pytest.mark.parametrize("package", ["matplotlib.style", "jinja2"])
def test_a_run_without_a_package_of_the_report_is_complete(tmp_path, monkeypatch, caplog, package):
    monkeypatch.delitem(sys.modules, "grpo.evaluate.page")
    monkeypatch.setitem(sys.modules, package, None)
    train_grpo.write_archive(write_run(tmp_path / "run", [metrics_row(1)]))
    assert "no report was written (ModuleNotFoundError" in caplog.text and (tmp_path / "run.zip").is_file()


def test_scripts_start_without_torch_and_leave_a_caller_s_matplotlib_alone(tmp_path):
    folder = write_run(tmp_path / "run", [metrics_row(s, **GPU) for s in (1, 2, 3)])
    code = f"""
import sys; sys.path.insert(0, "scripts"); sys.argv[1:] = ["--help"]
import bench, days, prove, watch
for main in (bench.main, days.main, prove.main, watch.main):
    try: main()
    except SystemExit: assert not {{"torch", "transformers", "matplotlib"}} & set(sys.modules)
import report, matplotlib
matplotlib.rcParams["axes.facecolor"] = "black"
before = matplotlib.rcParams.copy()
report.main([{str(folder)!r}])
assert not {{"torch", "transformers", "matplotlib.pyplot"}} & set(sys.modules)
assert matplotlib.rcParams.copy() == before
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.strip().endswith("MB)"), found.stderr
    assert found.stdout.count("usage: ") == 4
