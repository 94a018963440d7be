# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what may continue, what is never deleted; its logs: rows that read back, warnings."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT
from machines import only
from run_folders import metrics_row

from grpo.data.files import Row, data_fingerprint
from grpo.data.scoring import REWARD_INTERFACE, Completion, load_reward
from grpo.run.durable import begin_checkpoint, finish_checkpoint, sealed
from grpo.run.folder import (
    CHECKPOINT_FILES,
    COMPLETE,
    RECORDS,
    inspect_run,
    lock_run,
    prepare_run,
    retire_checkpoint,
    rotate_checkpoints,
)
from grpo.run.log_rows import read_log
from grpo.run.logs import (
    COMPLETIONS,
    METRICS,
    CsvLog,
    RunLog,
    banner_text,
    garbage_gains,
    garbage_warning,
    parse_rate_warning,
    reward_warning,
)
from grpo.settings import Problems, Settings

ROW = Row("d.csv", 1, (("user", "x"),), (0.0, 1.0), {})


def run_dir(tmp_path, **changes):
    """A folder as an interrupted run of an earlier version leaves it: no manifests, a whole checkpoint at step 4, a torn
    one at step 6, logs up to step 5."""
    settings = dataclasses.replace(Settings(OUTPUT_DIR=str(tmp_path / "run"), TOTAL_STEPS=8), **changes)
    folder = tmp_path / "run"
    record = {"settings": dataclasses.asdict(settings), "data_sha256": data_fingerprint([ROW])}
    for step, names in ((2, CHECKPOINT_FILES), (4, CHECKPOINT_FILES), (6, ("optimizer.pt",))):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        for name in names:
            (folder / f"checkpoint-{step}" / name).write_text("{}")
    (folder / "settings.json").write_text(json.dumps(record))
    CsvLog(folder / "metrics.csv", METRICS).write(metrics_row(step) for step in range(1, 6))
    rows = [dict.fromkeys(COMPLETIONS, "x") | {"step": 1 + i // 96, "reward": 0.5} for i in range(96 * 5)]
    CsvLog(folder / "completions.csv", COMPLETIONS).write(rows)
    return settings, folder


def end_of(path, rows):
    """What a checkpoint's manifest says of a log with so many rows."""
    content = b"".join(path.read_bytes().splitlines(True)[: 1 + rows])
    return len(content), hashlib.sha256(content).hexdigest()


def with_manifests(folder, ends=False):
    """The checkpoints as this version leaves them; `ends`: with what the logs began with."""
    for step in (2, 4):
        begin_checkpoint(folder / f"checkpoint-{step}")
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        logs, per_step = (
            {"metrics.csv": METRICS, "completions.csv": COMPLETIONS},
            {"metrics.csv": 1, "completions.csv": 96},
        )
        found = {name: end_of(folder / name, step * count) for name, count in per_step.items() if ends}
        finish_checkpoint(folder / f"checkpoint-{step}", {name: list(log) for name, log in logs.items()}, found)
    begin_checkpoint(folder / "checkpoint-6")


def inspect(settings, rows=(ROW,), **changes):
    problems = Problems()
    return inspect_run(dataclasses.replace(settings, **changes), rows, problems), problems


def test_an_interrupted_run_continues_from_its_last_whole_checkpoint(tmp_path):
    settings, folder = run_dir(tmp_path)
    state, problems = inspect(settings)
    assert not problems and (state.step, state.checkpoint) == (4, folder / "checkpoint-4")
    for torn in ("{", "[" * 100_000):
        (folder / "checkpoint-4" / "trainer_state.json").write_text(torn)
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
    problem = only(inspect(settings, TOTAL_STEPS=3, NUM_TRAIN_EPOCHS=1.0)[1])
    assert (
        problem.startswith("NUM_TRAIN_EPOCHS: ") and "more than 3. Raise NUM_TRAIN_EPOCHS, set OVERWRITE=1" in problem
    )
    assert not inspect(settings, TOTAL_STEPS=4)[1], "every step, but the evaluation and the zip are owed"
    (folder / COMPLETE).write_text("{}")
    assert "Raise NUM_TRAIN_EPOCHS to train on" in only(inspect(settings, TOTAL_STEPS=4, NUM_TRAIN_EPOCHS=1.0)[1])
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
    for name in ("adapter_model.safetensors", "manifest.json.tmp"):
        (tmp_path / "checkpoint-1" / name).touch()
    retire_checkpoint(tmp_path / "checkpoint-1")
    assert [path.name for path in (tmp_path / "superseded-checkpoint-1").iterdir()] == ["adapter_model.safetensors"]
    rotate_checkpoints(tmp_path, 1)
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


def test_a_kill_while_a_run_writes_its_first_file_leaves_a_fresh_folder(tmp_path):
    """Also on a disk of its own, in whose root the file system has a folder."""
    settings = Settings(OUTPUT_DIR=str(tmp_path / "run"))
    for name in ("run/lost+found", "run"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "run" / "settings.json.tmp").write_text('{"settings": {"MOD')
    state, problems = inspect(settings)
    assert not problems and not state.exists
    prepare_run(state, settings, {"settings.json": {"settings": {}, "data_sha256": ""}})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lost+found", "settings.json"]


class Killed(BaseException):
    pass


def killed_at(patch, moment):
    """From the `moment`th change of the disk on that this program makes, none is made any more."""
    changes = itertools.count()

    def until(change):
        def call(*arguments, **options):
            if next(changes) >= moment:
                raise Killed
            return change(*arguments, **options)

        return call

    for owner, name in ((shutil, "rmtree"), (Path, "unlink"), (os, "replace"), (Path, "open")):
        patch.setattr(owner, name, until(getattr(owner, name)))


def test_a_kill_inside_overwrites_deletion_leaves_a_folder_that_the_same_command_goes_on_with(tmp_path, monkeypatch):
    moment, whole, said = 0, False, set()
    while not whole:
        (tmp_path / str(moment)).mkdir()
        settings, folder = run_dir(tmp_path / str(moment), OVERWRITE=True)
        records = {"settings.json": {**json.loads((folder / "settings.json").read_text()), "new": 1}}
        for path in (folder / "notes.txt", folder / "metrics.csv", folder.with_name("run.zip")):
            path.touch()
        state, number = inspect(settings)[0], folder.stat().st_ino
        with monkeypatch.context() as patch:
            killed_at(patch, moment)
            with contextlib.suppress(Killed):
                prepare_run(state, settings, records)
                whole = True
        state, problems = inspect(settings, OVERWRITE=False)
        untouched = state.step == 4 and (folder / "notes.txt").exists()
        said |= set(problem.split(": ", 1)[1] for problem in problems)
        assert problems or untouched or not state.exists or "new" in (folder / "settings.json").read_text(), (
            "never half a run"
        )
        state, problems = inspect(settings)
        assert not problems
        prepare_run(state, settings, records)
        assert [path.name for path in folder.iterdir()] == ["settings.json"] and not folder.with_name(
            "run.zip"
        ).exists()
        assert folder.stat().st_ino == number, "a mount point cannot be removed"
        moment += 1
    (message,) = said
    assert moment > 8 and "an OVERWRITE=1 that was deleting" in message and "Set OVERWRITE=1" in message


def test_overwrite_says_what_it_deletes_that_no_run_wrote(tmp_path):
    settings, folder = run_dir(tmp_path, OVERWRITE=True)
    for inner in ("mine/deep", "best", "report", "runs/Nov22", "superseded-checkpoint-4.2", "superseded-adapter-last"):
        (folder / inner).mkdir(parents=True)
    own = ("metrics.superseded.csv", "tokenizer_config.json", "special_tokens_map.json", "versions.json.tmp", "best/best.json",
           "checkpoint-4/rng_state.pth", "report/best_action_rate_2.png", "runs/Nov22/events.out.tfevents.1.host.2.0")  # fmt: skip
    mine = ("checkpoint-4-mine", "checkpoint-4/notes.md", "metrics.csv.bak", "my_tokens.json", "notes.txt", "report/notes.md",
            "runs/Nov22/first.csv", "superseded-bestiary.txt", "thesis.tmp")  # fmt: skip
    for name in (*own, *mine):
        (folder / name).touch()
    assert sorted(inspect(settings)[0].foreign) == sorted((*mine, "mine/"))


@pytest.mark.parametrize(
    ("name", "what"), [(".run.lock", "its lock"), ("run.zip", "its zip"), ("run.zip.tmp", "what its zip is called")]
)
def test_what_is_in_the_way_beside_the_folder_is_said(tmp_path, name, what):
    (tmp_path / name).mkdir()
    problem = only(inspect(Settings(OUTPUT_DIR=str(tmp_path / "run")))[1])
    assert what in problem and f" {tmp_path / name} is not a file" in problem


@pytest.mark.parametrize("name", ["run.zip", "run.zip.tmp"])
def test_another_users_file_in_the_place_of_the_zip_is_said(tmp_path, name, monkeypatch):
    """In a folder like /tmp, where the run could not replace it in the end."""
    (tmp_path / name).symlink_to("theirs")
    for mode, user, told in ((0o777, 99, False), (0o1777, os.geteuid(), False), (0o1777, 99, True)):
        tmp_path.chmod(mode)
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert [
            f"{name} is another user's" in problem for problem in inspect(Settings(OUTPUT_DIR=str(tmp_path / "run")))[1]
        ] == [True] * told


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / ".run.lock").symlink_to(tmp_path / "planted")
    problem = only(inspect(Settings(OUTPUT_DIR=str(tmp_path / "run")))[1])
    assert f"its lock {tmp_path / '.run.lock'} is a link" in problem
    with pytest.raises(OSError):
        lock_run(tmp_path / "run")
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "tokenizer.json", "training.log", "best", "checkpoint-6"])
def test_a_link_with_a_name_of_the_runs_own_is_refused(tmp_path, name):
    """PEFT, the tokenizer, the Trainer and the log would write through it."""
    settings, folder = run_dir(tmp_path)
    shutil.rmtree(folder / "checkpoint-6")
    (folder / "mine.csv").symlink_to(tmp_path / "mine.csv")
    assert not inspect(settings)[1]
    (folder / name).symlink_to(tmp_path / "planted")
    assert f"{name} in it is a link" in only(inspect(settings)[1])
    assert not inspect(settings, OVERWRITE=True)[1], "which deletes the link"


@pytest.mark.parametrize("name", ["metrics.csv", "completions.csv", COMPLETE, "training.log"])
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path, name):
    settings, folder = run_dir(tmp_path)
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    assert f"{name} in it is not a file that you may read and write" in only(inspect(settings)[1])


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
    read_log(path, 1).write()
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["step", "completion"], ["1", "a\rb"]]


def test_trimming_a_log(tmp_path):
    path = tmp_path / "completions.csv"
    path.write_text('step,completion\n1,"two\nlines"\n2,b\n3,c\n3,"torn off', encoding="utf-8")
    read_log(path, 2).write()
    assert path.read_text(encoding="utf-8") == 'step,completion\n1,"two\nlines"\n2,b\n'
    aside = tmp_path / "completions.superseded.csv"
    assert aside.read_text(encoding="utf-8") == "step,completion\n3,c\n3,torn off\n"
    read_log(path, 1).write()
    assert aside.read_text(encoding="utf-8") == "step,completion\n3,c\n3,torn off\n2,b\n", "one header"
    path.write_text("step,text\n2,d\n", encoding="utf-8")
    read_log(path, 1).write()
    assert aside.read_text(encoding="utf-8").endswith("\n2,b\nstep,text\n2,d\n"), "other columns, their own header"
    read_log(tmp_path / "none.csv", 1).write()


def test_an_earlier_versions_checkpoint_is_taken_and_said(tmp_path):
    settings, folder = run_dir(tmp_path)
    (note,) = [note for note in inspect(settings)[0].notes if "manifest" in note]
    assert note.startswith("checkpoint-4 has no manifest.json (an earlier version wrote it)")
    with_manifests(folder)
    (note,) = inspect(settings)[0].notes
    assert note == "checkpoint-6: it was cut off while it was written: set aside, the run continues from step 4"


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_continued(tmp_path):
    settings, folder = run_dir(tmp_path)
    with_manifests(folder)
    (folder / "checkpoint-4" / "optimizer.pt").write_text("{]")
    (folder / "checkpoint-2").rename(folder / "checkpoint-3")
    problem = only(inspect(settings)[1])
    assert "holds the adapter of checkpoint-4" in problem and "checkpoint-4: optimizer.pt is damaged" in problem
    assert "checkpoint-3: its trainer_state.json is of step 2" in problem, "no step is counted twice"
    (folder / "checkpoint-3").rename(folder / "checkpoint-2")
    state, problems = inspect(settings)
    assert not problems and state.step == 2 and "checkpoint-4: optimizer.pt is damaged: set aside" in state.notes[0]
    prepare_run(state, settings, {})
    assert (folder / "superseded-checkpoint-4" / "optimizer.pt").is_file() and not (folder / "checkpoint-4").exists()


def test_a_finished_run_with_a_damaged_last_checkpoint_goes_on_and_keeps_its_adapter(tmp_path):
    settings, folder = run_dir(tmp_path)
    with_manifests(folder)
    (folder / COMPLETE).write_text(json.dumps(sealed({"steps": 4})))
    (folder / "adapter_model.safetensors").write_text("trained")
    (folder / "checkpoint-4" / "trainer_state.json").write_text("")
    assert "complete (4 of 4 steps)" in only(inspect(settings, TOTAL_STEPS=4)[1]), "nothing is trained again"
    assert "has 4 steps, more than 3" in only(inspect(settings, TOTAL_STEPS=3)[1])
    state, problems = inspect(settings)
    assert not problems and state.step == 2
    prepare_run(state, settings, {})
    assert (folder / "superseded-adapter-4" / "adapter_model.safetensors").read_text() == "trained"


def test_damaged_records_are_refused_or_passed_over(tmp_path):
    settings, folder = run_dir(tmp_path)
    with_manifests(folder)
    for text in ("", "\0" * 40, "7", '{"steps": 9, "sha256": "0"}'):
        (folder / COMPLETE).write_text(text)
        assert not inspect(settings)[1] and "complete (4 of 4" in only(inspect(settings, TOTAL_STEPS=4)[1])
    record = json.dumps(sealed(json.loads((folder / "settings.json").read_text())))
    for text in ("", "{", "[]", record.replace("5e-05", "6e-05"), record[:-90], '{"settings": 1, "data_sha256": ""}'):
        (folder / "settings.json").write_text(text)
        problem = only(inspect(settings)[1])
        assert "its settings.json is damaged" in problem and "Put the one of another copy" in problem
        folder.with_name("run.zip").touch()
        assert "Put the one of run.zip or of another copy" in only(inspect(settings)[1])
        folder.with_name("run.zip").unlink()
    (folder / "settings.json").write_text(record)
    assert not inspect(settings)[1]


@pytest.mark.parametrize("name", RECORDS)
def test_a_damaged_record_that_the_run_goes_on_without_is_told(tmp_path, name):
    settings, folder = run_dir(tmp_path)
    with_manifests(folder)
    (folder / name).write_text(json.dumps(sealed({"steps": 4})))
    assert len(inspect(settings)[0].notes) == 1, "of checkpoint-6, cut off"
    (folder / name).write_text("{")
    assert inspect(settings)[0].notes[1].startswith(f"{name} is damaged (Expecting")


def test_a_damaged_best_adapter_is_told(tmp_path):
    settings, folder = run_dir(tmp_path)
    with_manifests(folder)
    (folder / "best").mkdir()
    (folder / "best" / "best.json").write_text(json.dumps(sealed({"step": 2, "adapter_sha256": "0"})))
    (folder / "best" / "adapter_model.safetensors").write_text("flipped")
    note = inspect(settings)[0].notes[-1]
    assert note.startswith("best/: adapter_model.safetensors is damaged: set aside, the choice of the best")


def test_checkpoints_go_by_step(tmp_path):
    """Whatever the clock says: with times in the future transformers deletes each new one as it is saved."""
    for step, year in ((9, 2100), (10, 2000), (11, 2050)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (year * 31556952 - 62167219200,) * 2)
    rotate_checkpoints(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-11"]


def edited(lines, at, *new, drop=0):
    return lines[:at] + list(new) + lines[at + drop :]


DAMAGED_LOGS = [  # what happens to the lines of metrics.csv, the step it goes on from (None: refused), what is said
    ("no header", lambda lines: lines[1:], 4, "metrics.csv: its header was missing or damaged"),
    ("another header", lambda lines: edited(lines, 0, lines[0].replace("reward", "rewarc"), drop=1), 4, "its header was"),
    ("zeroed header", lambda lines: edited(lines, 0, "\0" * 90 + "\n", drop=1), 4, "its header was missing or damaged"),
    ("a step twice", lambda lines: edited(lines, 3, lines[2]), 4, "metrics.csv: step 2 was there 2 times"),
    ("swapped steps", lambda lines: edited(lines, 2, lines[3], lines[2], drop=2), 4, "its steps were not in order"),
    ("zeroed end", lambda lines: [*lines, "\0" * 4096], 4, "metrics.csv: 1 of its lines held bytes that are no text"),
    ("a torn last row", lambda lines: [*lines, "6,2026-01"], 4, None),
    ("a later step", lambda lines: [*lines, lines[5]], 4, None),
    ("a step missing", lambda lines: edited(lines, 4, drop=1), 2, "metrics.csv is not whole at step 4: later checkpoints"),
    ("a row cut off", lambda lines: [*lines[:4], lines[4][:-1]], 2, "metrics.csv is not whole at step 4"),
    ("a step twice, differing", lambda lines: edited(lines, 5, lines[4].replace(",0.9,", ",0.8,")), 2, "not whole at step 4"),
    ("no number", lambda lines: edited(lines, 3, lines[3].replace(",0.9,", ",0.},"), drop=1), 2, "not whole at step 3"),
    ("the first step missing", lambda lines: edited(lines, 1, drop=1), None, "metrics.csv is not whole at step 1, and no"),
    ("nothing", lambda lines: [], None, "metrics.csv is not whole at step 1, and no checkpoint is before it. Put the log"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "edit", "step", "words"), DAMAGED_LOGS, ids=[case[0] for case in DAMAGED_LOGS])
def test_a_damaged_log_is_repaired_or_refused(tmp_path, reason, edit, step, words):
    settings, folder = run_dir(tmp_path)
    with_manifests(folder)
    shutil.rmtree(folder / "checkpoint-6")
    path = folder / "metrics.csv"
    before = path.read_text().splitlines(True)
    path.write_text("".join(edit(before)))
    state, problems = inspect(settings)
    if step is None:
        assert words in only(problems)
        return
    assert not problems and state.step == step
    assert bool(state.notes) is bool(words) and (not words or words in state.notes[0])
    prepare_run(state, settings, {})
    assert path.read_text() == "".join(before[: step + 1]), "no gap, no step twice, one header"
    assert len((folder / "completions.csv").read_text().splitlines()) == 1 + 96 * step
    assert bool(list(folder.glob("superseded-checkpoint-4"))) is (step < 4)
    state, problems = inspect(settings)
    assert not problems and (state.step, state.notes) == (step, ()), "said once"


def test_completions_are_counted_and_a_missing_log_is_refused(tmp_path):
    settings, folder = run_dir(tmp_path)
    with_manifests(folder)
    path = folder / "completions.csv"
    lines = path.read_text().splitlines(True)
    path.write_text("".join(lines[:-150]))
    assert inspect(settings)[0].step == 2, "a row of step 4 is missing"
    path.write_bytes("".join(lines).encode().replace(b"x", b"\xff", 1))
    assert "1 of its lines held bytes that are no text" in inspect(settings)[0].notes[1]
    path.write_text("".join(edited(lines, 97, *lines[1:97])))
    assert "completions.csv: step 1 was there 2 times" in inspect(settings)[0].notes[1]
    path.write_text("".join(edited(lines, 90, *lines[97:107], *lines[90:97], drop=17)))
    state, _ = inspect(settings)
    assert state.notes[1:] == ("completions.csv: its steps were not in order",), "rows of step 2 among those of step 1"
    prepare_run(state, settings, {})
    assert path.read_text() == "".join(lines[: 1 + 96 * 4])
    path.unlink()
    assert "completions.csv is not whole at step 1, and no checkpoint is before it" in only(inspect(settings)[1])


@pytest.mark.parametrize("name", ["metrics.csv", "completions.csv"])
def test_no_flipped_bit_in_a_log_goes_unnoticed(tmp_path, name):
    settings, folder = run_dir(tmp_path)
    with_manifests(folder, ends=True)
    shutil.rmtree(folder / "checkpoint-6")
    path, whole = folder / name, (folder / name).read_bytes()
    assert (inspect(settings)[0].step, inspect(settings)[0].notes) == (4, ())
    size, _ = end_of(path, 4 * (96 if name[0] == "c" else 1))
    for bit in range(3, 8 * size, 8 * size // 60):
        path.write_bytes(bytes(byte ^ (1 << bit % 8) * (i == bit // 8) for i, byte in enumerate(whole)))
        state, problems = inspect(settings)
        assert problems or (name in state.notes[0] and state.step in (2, 4)), bit
    for step, words in ((1, "steps 1 to 4"), (3, "steps 3 to 4")):
        lines = whole.splitlines(True)
        at = 96 * step if name[0] == "c" else step
        lines[at] = lines[at].replace(b",x,", b",y,", 1).replace(b",0.9,", b",0.8,", 1)
        path.write_bytes(b"".join(lines))
        state, problems = inspect(settings)
        assert not problems and state.step == 4 and len(state.notes) == 1
        assert state.notes[0].startswith(f"{name}: the text of rows of {words} is not what was written")
    prepare_run(state, settings, {})
    assert path.read_bytes() == b"".join(lines)[:size], "rows of step 5 are gone, nothing else"


def test_a_log_that_is_written_again_is_no_damage(tmp_path):
    """Repaired, which brings back what was there, or given a column."""
    settings, folder = run_dir(tmp_path)
    with_manifests(folder, ends=True)
    lines = (folder / "metrics.csv").read_text().splitlines(True)
    (folder / "metrics.csv").write_text("".join(edited(lines, 3, lines[2])))
    state, _ = inspect(settings)
    assert state.notes[1:] == ("metrics.csv: step 2 was there 2 times",)
    prepare_run(state, settings, {})
    assert (folder / "metrics.csv").read_text() == "".join(lines[:5])
    log = RunLog(folder, 8, prompts=True)
    assert inspect(settings)[0].notes == ()
    figures = {name: 1.0 for name in METRICS if name not in ("step", "time")}
    for step in (5, 6):
        read = [Completion(ROW, "CO₂\r", None, 9, False)] * 2
        log.write_completions(step, read, [0.1, 0.5])
        log.write_step(step, {name: value for name, value in figures.items() if name not in log.rates})
        log = RunLog(folder, 8, prompts=True) if step == 5 else log
    rows = {"metrics.csv": 6, "completions.csv": 999}
    assert log.sync()[1] == {name: end_of(folder / name, count) for name, count in rows.items()}, "resumed or not"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_large_log_is_not_held_in_memory(tmp_path, damaged):
    """Neither read, repaired nor written with another column. Held at once is a row or two, 20 times what it is long (bytes,
    text, cells, buffers), and a record of each of the five steps."""
    settings, folder = run_dir(tmp_path)
    with_manifests(folder)
    path, text = folder / "completions.csv", "word " * 4000
    path.write_text(path.read_text().replace(",x,x,0.5", f",{text},x,0.5"))
    if damaged:
        path.write_bytes(path.read_bytes().replace(b"word", b"\xff", 1))
    tracemalloc.start()
    state, problems = inspect(settings)
    prepare_run(state, settings, {})
    RunLog(folder, 8, prompts=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not problems and state.step == 4 and path.stat().st_size > 384 * len(text)
    assert peak < 40 * len(text) + 5 * 10_000, "not 384 rows"


def test_a_run_without_a_checkpoint_begins_its_logs_again(tmp_path):
    settings, folder = run_dir(tmp_path)
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    state, problems = inspect(settings)
    assert not problems and state.step == 0
    prepare_run(state, settings, {})
    assert (
        not (folder / "metrics.csv").exists() and len((folder / "metrics.superseded.csv").read_text().splitlines()) == 6
    )


EQUAL, FINE, NONE, LOST = (0.5, 1.0, 0.9), (0.5, 0.9, 0.9), (math.nan, 0.0, 0.9), (0.5, 1.0, 0.0)


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
        (reward_warning, [FINE] + [EQUAL] * 3 + [LOST] * 10, "Nothing was learned for 13 steps"),
        (reward_warning, [FINE] + [LOST] * 9, "nothing is learned"),
        (reward_warning, [FINE] + [LOST] * 9 + [EQUAL], "nothing is learned"),
        (reward_warning, [LOST] * 20, "nothing is learned"),  # it never could answer
        (partial(reward_warning, total_steps=3), [EQUAL] * 2, None),
        (partial(reward_warning, total_steps=3), [EQUAL] * 3, "in every step of this run: nothing was learned"),
        (partial(reward_warning, total_steps=3), [EQUAL, FINE, EQUAL], None),
    ],
)
def test_warnings(warn, history, words):
    said = warn(history)
    assert said is None if words is None else words in said


def test_a_box_fits_into_a_terminal():
    text = " ".join(f"word{n}" for n in range(60))
    lines = banner_text(text).splitlines()[1:]
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 100 and len(lines) > 4
    assert " ".join(line[2:-2].strip() for line in lines[1:-1]) == text
    assert banner_text("brief") == "\n=========\n| brief |\n========="


POEM = "<|channel|>final<|message|>A poem<|return|>"
UNREAD = ("<|channel|>analysis<|message|>Hm", "<|channel|>final<|message|> ")


def test_garbage_that_earns_more_than_answers_is_boxed_once(tmp_path, caplog):
    """Of rows without actions an empty final channel is no answer, and words in it are one; with actions only `[k]` is."""
    free, log = dataclasses.replace(ROW, rewards=()), RunLog(tmp_path, 40)
    read = [Completion(free, text, None, 9, False) for text in (POEM, *UNREAD, UNREAD[0])]
    figures = {name: 1.0 for name in METRICS if name not in ("step", "time")}
    for step in range(1, 31):
        log.write_completions(step, read, [0.1, 0.5, 0.6, math.nan])
        rates = log.rates
        log.write_step(step, {name: value for name, value in figures.items() if name not in rates})
        assert ("garbage is being learned" in caplog.text) is (step >= 10)
    said = "earned 0.45 more than the others to their prompts, on average of 10 groups of the last 10 steps: garbage is"
    (message,) = (record.getMessage() for record in caplog.records if "garbage" in record.getMessage())
    words = " ".join(line.strip("| ") for line in message.splitlines())
    assert message.startswith("\n====") and said in words


def test_garbage_is_compared_inside_its_groups():
    """A hard prompt whose answers all earn little, and an unreadable one that is its worst: nothing is wrong there."""
    easy, hard = (dataclasses.replace(ROW, number=number) for number in (1, 2))
    answers = [
        (easy, 0, -0.1),
        (easy, 1, -0.1),
        (easy, None, -0.4),
        (hard, 0, -9.0),
        (hard, 1, -9.0),
        (hard, None, -9.9),
    ]
    read = [Completion(row, POEM, action, 9, False) for row, action, _ in answers]
    rewards = [reward for *_, reward in answers]
    assert garbage_gains(read, rewards) == pytest.approx([-0.3, -0.9])
    assert garbage_gains(read[1:3] + read[4:], [0.3, 0.3, 0.1, 0.3]) == pytest.approx([0.0, 0.2]), "equal is no gain"
    assert garbage_gains(read[:2] + read[5:], [1.0, 2.0, 3.0]) == [], "a group of one kind alone says nothing"
    assert garbage_gains(read, [math.nan, math.nan, 1.0, math.nan, 2.0, 3.0]) == [1.0], "nor does what was left out"
    same = [0.1 + 0.2, 0.3, 0.3]
    assert garbage_gains([read[0], read[1], read[2]], [same[0], same[0], same[1]]) == [0.0], "nor rounding"


@pytest.mark.parametrize(
    ("steps", "warns", "reason"),
    [
        ([[0.2, 0.2]] * 10, True, "all groups pay garbage more"),
        ([[0.2, 0.2]] * 9, False, "ten steps have not passed"),
        ([[]] * 6 + [[0.2]] * 4, False, "four groups are too few"),
        ([[0.0, 0.0]] * 10, False, "no more than answers"),
        ([[-0.2, -0.1]] * 10, False, "less than answers"),
        ([[1.0, -0.9]] * 10, False, "more in one group, less in the next: chance"),
        ([[1.0, -0.9], [0.9, 0.8]] * 5 + [[0.7] * 40], True, "more, and too often for chance"),
        ([[]] * 20 + [[0.3] * 3] * 10, True, "a run that learned it late"),
        ([[0.3] * 3] * 10 + [[-0.3] * 3] * 10, False, "the last ten steps count"),
    ],
)
def test_when_garbage_is_warned_about(steps, warns, reason):
    assert (garbage_warning(steps) is not None) is warns, reason


@pytest.mark.parametrize(
    ("rewards", "choices", "refused"),
    [
        ("action,mine:score=0.5", {}, True),
        ("mine:score", {"reward_interface": REWARD_INTERFACE}, False),
        ("action,format", {}, False),
    ],
)
def test_a_run_whose_own_functions_were_given_something_else_is_not_continued(tmp_path, rewards, choices, refused):
    """Those of this project earn the same by either way."""
    settings, folder = run_dir(tmp_path, REWARDS=rewards)
    record = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps(record | {"choices": choices}))
    state, problems = inspect(settings)
    assert bool(problems) is refused and state.step == 4
    if refused:
        words = f"REWARDS: the run in {folder} began when functions of your own were given other prompts"
        assert only(problems).startswith(words) and "OVERWRITE=1" in only(problems)
        for step in (2, 4, 6):
            shutil.rmtree(folder / f"checkpoint-{step}")
        assert not inspect(settings)[1], "it starts at step 0"


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
