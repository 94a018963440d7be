# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what may continue, what is never deleted; its logs: rows that read back, warnings."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from machines import only
from transformers.trainer_utils import rotate_checkpoints

from grpo.data.files import Row, data_fingerprint
from grpo.data.scoring import Completion, load_reward
from grpo.run.folder import CHECKPOINT_FILES, COMPLETE, inspect_run, lock_run, prepare_run, retire_checkpoint
from grpo.run.logs import METRICS, CsvLog, RunLog, garbage_warning, parse_rate_warning, reward_warning, trim_csv
from grpo.settings import Problems, Settings

ROW = Row("d.csv", 1, (("user", "x"),), (0.0, 1.0), {})


def run_dir(tmp_path, **changes):
    """A folder as an interrupted run leaves it, with a whole checkpoint at step 4 and a torn one at step 6."""
    settings = dataclasses.replace(Settings(OUTPUT_DIR=str(tmp_path / "run"), TOTAL_STEPS=8), **changes)
    folder = tmp_path / "run"
    record = {"settings": dataclasses.asdict(settings), "data_sha256": data_fingerprint([ROW])}
    for step, names in ((2, CHECKPOINT_FILES), (4, CHECKPOINT_FILES), (6, ("optimizer.pt",))):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        for name in names:
            (folder / f"checkpoint-{step}" / name).write_text("{}")
    (folder / "settings.json").write_text(json.dumps(record))
    return settings, folder


def inspect(settings, rows=(ROW,), **changes):
    problems = Problems()
    return inspect_run(dataclasses.replace(settings, **changes), rows, problems), problems


def test_an_interrupted_run_continues_from_its_last_whole_checkpoint(tmp_path):
    settings, folder = run_dir(tmp_path)
    state, problems = inspect(settings)
    assert not problems and (state.step, state.checkpoint) == (4, folder / "checkpoint-4")
    (folder / "checkpoint-4" / "trainer_state.json").write_text("{")
    assert inspect(settings)[0].step == 2, "a torn state file does not count"


def test_what_may_not_continue(tmp_path):
    settings, folder = run_dir(tmp_path)
    assert "RESUME=never" in only(inspect(settings, RESUME="never")[1])
    assert not inspect(settings, TOTAL_STEPS=20, SAVE_STEPS=3)[1], "a longer run is the same run"
    problem = only(inspect(settings, LEARNING_RATE=1e-6)[1])
    assert "LEARNING_RATE: the run in" in problem and "5e-05" in problem
    assert "started on other rows" in only(inspect(settings, [dataclasses.replace(ROW, rewards=(1.0, 0.0))])[1])
    problem = only(inspect(settings, TOTAL_STEPS=3)[1])
    assert problem.startswith("TOTAL_STEPS: ") and "has 4 steps, more than 3. Set TOTAL_STEPS=4 or higher" in problem
    assert not inspect(settings, TOTAL_STEPS=4)[1], "every step, but the evaluation and the zip are owed"
    (folder / COMPLETE).write_text("{}")
    assert "complete (4 of 4 steps)" in only(inspect(settings, TOTAL_STEPS=4)[1])
    assert not inspect(settings, TOTAL_STEPS=4, OVERWRITE=True)[1]


def strip(folder, *steps):
    """What a zip leaves of checkpoints: no optimizer, no scheduler."""
    for step in steps:
        for name in ("optimizer.pt", "scheduler.pt"):
            (folder / f"checkpoint-{step}" / name).unlink()


UNRESUMABLE = [  # what the folder of `run_dir` lost or got, what the problem must name
    ("an unpacked zip of an interrupted run", (2, 4), {"adapter_model.safetensors": ""}, "it holds a trained adapter, but"),
    ("an unpacked zip of a failed run", (2, 4), {}, "it holds the adapter of checkpoint-4, but"),
    ("a complete run whose checkpoints were deleted", None, {"complete.json": '{"steps": 8}'}, "it holds a complete run of 8 steps, but"),
    ("a complete run whose last checkpoint was deleted", (), {"complete.json": '{"steps": 8}'}, "it holds a complete run of 8 steps, but"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "lost", "files", "message"), UNRESUMABLE, ids=[case[0] for case in UNRESUMABLE])
def test_a_trained_adapter_that_cannot_be_trained_on_is_not_replaced(tmp_path, reason, lost, files, message):
    settings, folder = run_dir(tmp_path)
    if lost is None:
        for path in folder.glob("checkpoint-*"):
            shutil.rmtree(path)
    else:
        strip(folder, *lost)
    for name, text in files.items():
        (folder / name).write_text(text)
    for changes in ({}, {"TOTAL_STEPS": 20}):
        problem = only(inspect(settings, **changes)[1])
        assert problem.startswith(f"OUTPUT_DIR={folder}: {message}") and "OVERWRITE=1" in problem, reason
        assert f"scripts/evaluate.py --adapter {folder})" in problem and "choose another OUTPUT_DIR" in problem
    assert not inspect(settings, OVERWRITE=True)[1]


def test_what_may_continue_although_an_adapter_is_there(tmp_path):
    settings, folder = run_dir(tmp_path)
    (folder / "adapter_model.safetensors").touch()
    assert not inspect(settings)[1], "interrupted: a whole checkpoint is there as well"
    strip(folder, 4)
    assert not inspect(settings)[1] and inspect(settings)[0].step == 2, "an earlier checkpoint is whole"
    (folder / "complete.json").write_text('{"steps": 2}')
    assert not inspect(settings)[1], "a complete run that is to train on"


def test_a_run_without_a_whole_checkpoint_starts_anew(tmp_path):
    """Killed before its first checkpoint, or while it was written: its state is written last."""
    settings, folder = run_dir(tmp_path)
    for step in (2, 4):
        shutil.rmtree(folder / f"checkpoint-{step}")
    (folder / "checkpoint-6" / "adapter_model.safetensors").touch()
    for _ in range(2):
        state, problems = inspect(settings)
        assert not problems and state.exists and state.step == 0
        (folder / "checkpoint-6" / "trainer_state.json").write_text("{")


def test_no_checkpoint_with_an_adapter_is_deleted(tmp_path):
    settings, folder = run_dir(tmp_path)
    strip(folder, 4)
    (folder / "checkpoint-4-mine").mkdir()
    (folder / COMPLETE).write_text('{"steps": 2}')
    (folder / "superseded-checkpoint-4").mkdir()
    state, problems = inspect(settings)
    prepare_run(state, settings, {})
    assert not problems and state.step == 2
    assert not (folder / COMPLETE).exists(), "ended after this, nothing says any more that the run is complete"
    assert sorted(path.name for path in folder.glob("*checkpoint-*")) == [
        "checkpoint-2", "checkpoint-4-mine", "superseded-checkpoint-4", "superseded-checkpoint-4.2",
    ]  # fmt: skip
    assert (folder / "superseded-checkpoint-4.2" / "adapter_model.safetensors").is_file()


def test_the_trainer_leaves_what_was_set_aside(tmp_path):
    for step in range(1, 5):
        (tmp_path / f"checkpoint-{step}").mkdir()
    retire_checkpoint(tmp_path / "checkpoint-4")
    assert not (tmp_path / "checkpoint-4").exists(), "no adapter: deleted"
    (tmp_path / "checkpoint-1" / "adapter_model.safetensors").touch()
    retire_checkpoint(tmp_path / "checkpoint-1")
    rotate_checkpoints(output_dir=str(tmp_path), save_total_limit=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "superseded-checkpoint-1"]


@pytest.mark.parametrize("name", ["DATA", "EVAL_DATA", "EVAL_PROFILE"])
def test_overwrite_never_deletes_a_file_that_a_setting_names(tmp_path, name):
    """Not even one that this run would not read (EVAL_SAMPLES=0)."""
    settings, folder = run_dir(tmp_path, OVERWRITE=True, EVAL_SAMPLES=0)
    (folder / "sub").mkdir()
    (folder / "sub" / "mine.csv").touch()
    problem = only(inspect(settings, **{name: f"{folder}/*/mine.csv"})[1])
    assert f"it would delete {folder / 'sub' / 'mine.csv'}, which" in problem


def test_overwrite_never_deletes_a_users_reward_function(tmp_path, monkeypatch):
    settings, folder = run_dir(tmp_path, OVERWRITE=True, REWARDS="reward_inside:score")
    (folder / "reward_inside.py").write_text("def score(completions, **columns): return [0.0] * len(completions)\n")
    monkeypatch.syspath_prepend(str(folder))
    load_reward(settings.REWARDS)
    assert f"it would delete {folder / 'reward_inside.py'}, which" in only(inspect(settings)[1])
    monkeypatch.delitem(sys.modules, "reward_inside")


def test_a_zip_of_an_earlier_run_is_not_overwritten(tmp_path):
    settings = Settings(OUTPUT_DIR=str(tmp_path / "run"))
    state, problems = inspect(settings)
    assert not problems and not state.exists and state.checkpoint is None
    (tmp_path / "run.zip").write_text("precious")
    assert "run.zip of an earlier run is there" in only(inspect(settings)[1])
    assert not inspect(settings, OVERWRITE=True)[1]


def test_a_run_folder_has_one_writer(tmp_path):
    code = f"import pathlib; from grpo.run.folder import lock_run; print(lock_run(pathlib.Path({str(tmp_path / 'run')!r})))"
    lock = lock_run(tmp_path / "run")
    for locked in (True, False):
        other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert ("None" in other.stdout) is locked, other.stderr
        lock.release()


def test_folders_of_others_are_never_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        problem = only(inspect(Settings(OUTPUT_DIR=str(tmp_path), OVERWRITE=overwrite))[1])
        assert "no run of this script" in problem
    for name in ("thesis.txt", "thesis.txt/a/b"):
        problem = only(inspect(Settings(OUTPUT_DIR=str(tmp_path / name)))[1])
        assert f"{tmp_path / 'thesis.txt'} is a file, not a folder" in problem


def test_logs_survive_carriage_returns(tmp_path):
    path = tmp_path / "completions.csv"
    written = [{"step": 1, "completion": "a\rb"}, {"step": 2, "completion": 'c\r\n"d"'}]
    CsvLog(path, ["step", "completion"]).write(written)
    trim_csv(path, 1)
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["step", "completion"], ["1", "a\rb"]]


def test_trimming_a_log(tmp_path):
    path = tmp_path / "completions.csv"
    path.write_text('step,completion\n1,"two\nlines"\n2,b\n3,c\n3,"torn off', encoding="utf-8")
    trim_csv(path, 2)
    assert path.read_text(encoding="utf-8") == 'step,completion\n1,"two\nlines"\n2,b\n'
    aside = tmp_path / "completions.superseded.csv"
    assert aside.read_text(encoding="utf-8") == "step,completion\n3,c\n3,torn off\n"
    trim_csv(path, 1)
    assert aside.read_text(encoding="utf-8") == "step,completion\n3,c\n3,torn off\n2,b\n", "one header"
    path.write_text("step,text\n2,d\n", encoding="utf-8")
    trim_csv(path, 1)
    assert aside.read_text(encoding="utf-8").endswith("\n2,b\nstep,text\n2,d\n"), "other columns, their own header"
    trim_csv(tmp_path / "none.csv", 1)


EQUAL, FINE, NONE = (0.5, 1.0), (0.5, 0.9), (math.nan, 0.0)


@pytest.mark.parametrize(
    ("warn", "history", "words"),
    [
        (parse_rate_warning, [0.1] * 4, None),
        (parse_rate_warning, [0.1] * 5, "only 0.10"),
        (parse_rate_warning, [0.95] * 30, None),
        (parse_rate_warning, [0.95] * 10 + [0.7] * 5, "fell to 0.70"),
        (parse_rate_warning, [0.95] * 10 + [0.90] * 5, None),
        (parse_rate_warning, [0.2] * 5 + [0.9] * 5, None),
        (reward_warning, [], None),
        (reward_warning, [EQUAL] * 4, None),
        (reward_warning, [FINE] * 3 + [EQUAL] * 5, "nothing is learned"),
        (reward_warning, [EQUAL] * 9 + [FINE], None),
        (reward_warning, [EQUAL] * 4 + [FINE] + [EQUAL] * 4, None),
        (reward_warning, [FINE, NONE], "the reward is nan"),
        (reward_warning, [NONE, FINE], None),
    ],
)
def test_warnings(warn, history, words):
    said = warn(history)
    assert said is None if words is None else words in said


def test_garbage_that_earns_more_than_answers_is_boxed_once(tmp_path, caplog):
    """Of rows without actions an empty final channel is no answer, and words in it are one; with actions only `[k]` is."""
    free, log = dataclasses.replace(ROW, rewards=()), RunLog(tmp_path, 40)
    poem, rest = (
        "<|channel|>final<|message|>A poem<|return|>",
        ("<|channel|>analysis<|message|>Hm", "<|channel|>final<|message|> "),
    )
    read = [
        Completion(row, text, None, 9, False)
        for row, text in ((free, poem), *((free, text) for text in rest), (ROW, poem), (free, rest[0]))
    ]
    figures = {name: 1.0 for name in METRICS if name not in ("step", "time")}
    for step in range(1, 31):
        log.write_completions(step, read, [0.1, 0.5, 0.5, 0.9, math.nan])
        rates = log.rates
        log.write_step(step, {name: value for name, value in figures.items() if name not in rates})
        assert ("garbage is being learned" in caplog.text) is (step >= 10)
    said = "Answers that cannot be read earned 0.633 over the last 10 steps, all answers 0.5: garbage is being learned."
    (told,) = (record.getMessage() for record in caplog.records if "garbage" in record.getMessage())
    assert told.startswith("\n====") and said in told


def test_garbage_that_earns_no_more_is_no_warning():
    for garbage, every in (([], [1.0]), ([0.2], [0.2, 0.2]), ([0.1], [0.1, 0.3])):
        assert garbage_warning([(garbage, every)] * 12) is None
    assert garbage_warning([([0.3], [0.1, 0.3])] * 9) is None
    late = [([0.9], [0.1, 0.9])] * 5 + [([0.0], [0.1, 0.0])] * 10
    assert garbage_warning(late) is None and garbage_warning(late[:10]) is not None, "the last 10 steps count"


def test_a_run_from_before_the_rewards_were_chosen_says_what_to_set(tmp_path):
    settings, folder = run_dir(tmp_path, REWARDS="action", SCALE_REWARDS="group", INVALID_REWARD=0.0)
    _, problems = inspect(Settings(OUTPUT_DIR=str(folder), TOTAL_STEPS=8))
    assert len(problems) == 3
    for name, value in (("REWARDS", "action"), ("SCALE_REWARDS", "group"), ("INVALID_REWARD", "0")):
        started = (
            f"{name}: the run in {folder} was started with {value}, now it is auto. Set {name}={value} to continue it"
        )
        assert any(problem.startswith(started) for problem in problems), problems
    assert not inspect(settings)[1]


def test_a_log_without_rows_gets_the_columns_of_today(tmp_path):
    """Interrupted before its first checkpoint, and continued with others (LOG_PROMPTS): nothing may stand under a wrong name."""
    path = tmp_path / "log.csv"
    path.write_text("step,old\n")
    log = CsvLog(path, ["step", "new"])
    log.write([{"step": 1, "new": "x"}])
    assert path.read_text() == "step,new,old\n1,x,\n"
