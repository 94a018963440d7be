# SPDX-License-Identifier: Apache-2.0
"""Evaluations while a run trains, its best adapter, and what it notices. Run: python -m pytest tests/evaluate/test_progress.py"""

from __future__ import annotations

import json
import logging
import random
import zipfile
from types import SimpleNamespace

import evaluate as ev
import numpy
import pytest
import runs
import torch
from conftest import ROOT, read_csv, run_script
from peft import PeftModel
from reliability import KINDS
from trainers import make

from grpo.evaluate.progress import Figures, Progress, plant_warning
from grpo.learn.sampling import kept_randomness
from grpo.model.load import load_model
from grpo.plan.hub import find_model
from grpo.run.best import best_fault, better, keep_best, read_best, recover_best, replace_best, which_to_load
from grpo.run.folder import ADAPTER, BEST
from grpo.settings import Problems, Settings

BASE = Figures(0, 0.4, 20.0, 10.0)


@pytest.mark.parametrize(
    ("now", "exact", "warned"),
    [
        (Figures(5, 0.5, 30.0, 90.0, 4.0), True, True),
        (Figures(5, 0.5, 30.0, 90.0, 4.0), False, True),
        (Figures(5, 0.5, 20.1, 10.0, -4.0), True, True),
        (Figures(5, 0.5, 30.0, 90.0, -0.1), False, False),  # chance
        (Figures(5, 0.5, 30.0, 90.0, None), False, False),  # fewer than three windows
        (Figures(5, 0.5, 19.0, 90.0, 1.0), True, False),
        (Figures(5, 0.4, 30.0, 90.0, 4.0), True, False),  # the reward does not rise
        (Figures(5, 0.5), True, False),  # no closed loop
    ],
)
def test_a_plant_that_gets_worse_while_the_reward_rises_is_told(now, exact, warned):
    said = plant_warning(BASE, now, exact)
    assert (said is not None) is warned
    for words in ("0.400 to 0.500", "20.0 to", "10 to", "docs/evaluation.md#read-both", "step 5") if said else ():
        assert words in said


def test_it_is_told_when_it_begins_and_at_the_end(tmp_path, caplog, monkeypatch):
    resolved = SimpleNamespace(
        exact=True,
        best_by="plant",
        settings=Settings(),
        closed_loop=SimpleNamespace(cases=()),
        eval_rows=[],
    )
    progress, trainer = Progress(resolved), SimpleNamespace(run=SimpleNamespace(folder=tmp_path))
    progress.base = BASE
    monkeypatch.setattr("grpo.run.best.keep_best", lambda *given: {})
    told = []
    for step, regret, last in ((1, 10.0, False), (2, 30.0, False), (3, 31.0, False), (4, 9.0, False), (5, 40.0, False), (6, 41.0, True)):  # fmt: skip
        caplog.clear()
        with caplog.at_level(logging.INFO, "train_grpo"):
            progress.judge(trainer, Figures(step, 0.5, regret, 50.0, 1.0), last)
        told.append("====" in caplog.text and "gets WORSE" in caplog.text)
    assert told == [False, True, False, False, True, True]


def kept(folder, step, regret, by="plant", measured=None, reward=0.5):
    values = {"step": step, "heldout_reward": reward, "plant_regret": regret}
    base = {"heldout_reward": 0.4, "plant_regret": 20.0}

    def save(new, record):
        (new / ADAPTER).write_text(f"step {step}")
        assert record["step"] == step

    return keep_best(folder, by, base, measured or {"samples": 4}, values, save)


def test_the_best_step_is_kept_and_a_step_measured_again_changes_nothing(tmp_path):
    for step, regret, best in ((25, 12.0, 25), (50, 9.0, 50), (75, 9.0, 50), (50, 9.0, 50), (100, 11.0, 50)):
        assert kept(tmp_path, step, regret)["step"] == best
        assert (tmp_path / BEST / ADAPTER).read_text() == f"step {best}"
    record = read_best(tmp_path)
    assert [one["step"] for one in record["evaluated"]] == [25, 50, 75, 100] and record["better_than_base"]
    assert (record["value"], record["base_value"], record["by"]) == (9.0, 20.0, "plant")
    assert "Load the adapter in `best/`" in which_to_load(record, 100) and "in this folder" in which_to_load(record, 50)
    assert kept(tmp_path, 125, None) == {} and read_best(tmp_path) == record, "a figure without a value chooses nothing"
    again = kept(tmp_path, 125, 15.0, measured={"samples": 8})
    assert again["step"] == 125 and len(again["evaluated"]) == 1, "figures that were measured otherwise do not compare"
    worse = kept(tmp_path, 150, 99.0, by="reward", reward=0.3)
    assert worse["better_than_base"] is False and "No adapter beats the base model" in which_to_load(worse, 150)
    assert "NOT BETTER than the base model" in read_best(tmp_path)["in_words"] and better("reward", 2, 1)


@pytest.mark.parametrize("at", ["save", "write", "first rename", "second rename"])
def test_a_kill_while_the_best_is_replaced_loses_nothing(tmp_path, at, monkeypatch):
    kept(tmp_path, 25, 12.0)

    def killed(*given):
        raise KeyboardInterrupt

    renames = iter([None, killed] if at == "second rename" else [killed])
    rename = type(tmp_path).rename
    if at == "write":
        monkeypatch.setattr("grpo.run.best.write_sealed", killed)
    elif "rename" in at:
        monkeypatch.setattr(type(tmp_path), "rename", lambda *given: (next(renames) or rename)(*given))
    with pytest.raises(KeyboardInterrupt):
        save = killed if at == "save" else lambda new: (new / ADAPTER).write_text("step 50")
        replace_best(tmp_path, save, {"step": 50})
    monkeypatch.undo()
    recover_best(tmp_path)
    step = 50 if at == "second rename" else 25
    assert read_best(tmp_path)["step"] == step and (tmp_path / BEST / ADAPTER).read_text() == f"step {step}"
    assert [path.name for path in tmp_path.iterdir()] == [BEST]


@pytest.mark.parametrize("name", ["best.json", ADAPTER])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_best_adapter_is_not_offered(tmp_path, name, kind):
    kept(tmp_path, 25, 12.0)
    recover_best(tmp_path)
    assert read_best(tmp_path)["step"] == 25 and best_fault(tmp_path / BEST) is None
    KINDS[kind](tmp_path / BEST / name)
    assert read_best(tmp_path) == {} and best_fault(tmp_path / BEST).startswith(name)
    recover_best(tmp_path)
    assert kept(tmp_path, 50, 14.0)["step"] == 50, "the choice begins again"
    assert (tmp_path / f"superseded-{BEST}" / name).exists()
    (tmp_path / BEST / ADAPTER).unlink()
    assert "cannot be read" in best_fault(tmp_path / BEST)


def test_random_states_are_kept():
    drawn = lambda: (torch.rand(2).tolist(), random.random(), numpy.random.rand())  # noqa: E731
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    expected = drawn()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    with kept_randomness():
        torch.manual_seed(5), drawn()
    assert drawn() == expected


def test_what_is_measured_reaches_logs_and_trackers_and_is_no_part_of_the_step(tiny, tmp_path):
    """Every EVAL_STEPS steps but for the last, after the update; the model is left as it was."""
    trainer, seen, logged = make(tiny, tmp_path, TOTAL_STEPS=4, EVAL_STEPS=2), [], []

    def measure(trainer):
        seen.append((trainer.state.global_step, trainer.model.training))
        torch.manual_seed(0)
        return {"heldout_reward": 0.25}

    trainer.measure = measure
    trainer.add_callback(type("Tracker", (type(trainer.timer).__mro__[1],), {"on_log": lambda self, args, state, control, logs, **rest: logged.append(logs)}))  # fmt: skip
    trainer.train()
    rows = read_csv(tmp_path / "metrics.csv")
    assert seen == [(2, True)] and [row["heldout_reward"] for row in rows] == ["", "0.25", "", ""]
    assert float(rows[1]["eval_s"]) >= 0 and not rows[0]["eval_s"] and not rows[1]["plant_regret"]
    assert ["heldout_reward" in one for one in logged] == [False, True, False, False, False], (
        "the last is the run's end"
    )
    assert all(float(row["step_s"]) > 0 for row in rows)


SETTINGS = {
    "TOTAL_STEPS": 5, "EVAL_STEPS": 2, "SAVE_STEPS": 3, "EVAL_SAMPLES": 2, "LEARNING_RATE": "1e-2", "PROMPTS_PER_STEP": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory):
    """Five steps, measured exactly after the second and the fourth; one window, twelve held-out rows."""
    folder = tmp_path_factory.mktemp("measured")
    for name, lines in (("tes_heldout_compact.csv", 13), ("profile_heldout.csv", 1 + 96)):
        (folder / name).write_text("".join((ROOT / "data" / name).read_text().splitlines(True)[:lines]))
    given = {"EVAL_DATA": folder / "tes_heldout_compact.csv", "EVAL_PROFILE": folder / "profile_heldout.csv"}
    done = run_script(**runs.SETTINGS | SETTINGS | given | {"OUTPUT_DIR": folder / "run"})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", given, done.stdout


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_a_run_measures_itself_and_keeps_its_best_adapter(measured, tiny):
    folder, _, output = measured
    evaluation, plant, best = (read(folder, name) for name in ("evaluation.json", "closed_loop.json", "best/best.json"))
    rows = read_csv(folder / "metrics.csv")
    assert [bool(row["plant_regret"]) for row in rows] == [False, True, False, True, False]
    assert [one["step"] for one in best["evaluated"]] == [2, 4, 5] and "exact at 0.5" in output
    for row, one in zip((rows[1], rows[3]), best["evaluated"], strict=False):
        for name in ("heldout_reward", "plant_regret", "plant_unserved_kwh"):
            assert float(row[name]) == pytest.approx(one[name], rel=1e-5)
    last, total = best["evaluated"][2], plant["totals"]["trained"]
    assert (last["heldout_reward"], last["plant_regret"]) == (evaluation["after"]["reward"], total["regret_percent"])
    assert (
        best["base_value"] == plant["totals"]["base"]["regret_percent"]
        and evaluation["exact"] is plant["exact"] is True
    )
    assert (
        best["value"] == min(one["plant_regret"] for one in best["evaluated"]) and f"step {best['step']} is" in output
    )
    assert {path.name for path in (folder / BEST).iterdir()} == {
        ADAPTER,
        "adapter_config.json",
        "README.md",
        "best.json",
    }
    model = PeftModel.from_pretrained(
        load_model(str(tiny), find_model("tiny", Problems()).config, "eager"), folder / BEST
    )
    assert any(p.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)
    mine, own = ((path / "README.md").read_text(encoding="utf-8") for path in (folder / BEST, folder))
    assert f"trained for {best['step']} steps" in mine and best["in_words"][1:] in mine and '"..")' in mine
    assert own.split("\n\n")[2] == which_to_load(best, 5).strip() and best["in_words"] in own
    assert ((folder / BEST / ADAPTER).read_bytes() == (folder / ADAPTER).read_bytes()) == (best["step"] == 5)
    with zipfile.ZipFile(folder.with_name("run.zip")) as archive:
        first = [name.startswith(f"run/{BEST}/") for name in archive.namelist()]
    assert first == sorted(first, reverse=True) and sum(first) == 4


def test_the_command_gives_the_exact_figures_of_the_run(measured, tmp_path, monkeypatch):
    """Of its best adapter and its base, by the run's recorded temperature."""
    folder, given, _ = measured
    monkeypatch.chdir(ROOT)
    arguments = [
        "--adapter",
        folder / BEST,
        "--base-too",
        "--profile",
        given["EVAL_PROFILE"],
        "--out",
        tmp_path / "x.json",
    ]
    assert ev.main(list(map(str, arguments))) == 0
    mine, own, best = read(tmp_path, "x.json"), read(folder, "closed_loop.json"), read(folder, "best/best.json")
    assert mine["exact"] and mine["sampling"] == own["sampling"]
    for name in ("base", "base_greedy"):
        assert mine["totals"][name]["regret_percent"] == pytest.approx(own["totals"][name]["regret_percent"], abs=1e-3)
    assert mine["totals"]["trained"]["regret_percent"] == pytest.approx(best["value"], abs=1e-3)


def test_evaluations_leave_no_trace_in_what_is_learned(measured, tmp_path):
    folder, given, _ = measured
    done = run_script(**runs.SETTINGS | SETTINGS | given | {"OUTPUT_DIR": tmp_path / "run", "EVAL_STEPS": 0})
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (ADAPTER, "completions.csv"):
        assert (folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert [one["step"] for one in read(tmp_path / "run", "best/best.json")["evaluated"]] == [5]


def test_a_killed_run_ends_with_the_same_figures_and_the_same_best(measured, tmp_path):
    """Killed after step 4 was measured, with its last checkpoint at 3: it is measured again."""
    whole, given, _ = measured
    folder = tmp_path / "run"
    process = runs.start_held(folder, 4, **SETTINGS | given)
    process.kill()
    runs.finish(process)
    assert [one["step"] for one in read(folder, "best/best.json")["evaluated"]] == [2, 4]
    (folder / BEST).rename(folder / "best.old")  # as if killed between the two renames
    done = run_script(**runs.SETTINGS | SETTINGS | given | {"OUTPUT_DIR": folder})
    assert done.returncode == 0 and "continuing from step 3" in done.stdout, done.stdout + done.stderr
    runs.assert_same_run(folder, whole)
    for name in (ADAPTER, "best.json", "README.md"):  # adapter_config.json lists modules in any order
        assert (folder / BEST / name).read_bytes() == (whole / BEST / name).read_bytes(), name
    assert read(folder, "evaluation.json") == read(whole, "evaluation.json")
    assert read(folder, "closed_loop.json") == read(whole, "closed_loop.json")
