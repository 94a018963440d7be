# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what may continue, what is never deleted, what its logs are cut back to."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

import pytest
from machines import only
from run_folders import PER_STEP, ROW, inspect, run_dir, write_steps

from grpo.output.archive import write_zip
from grpo.output.checkpoints import retire_checkpoint, rotate_checkpoints
from grpo.output.durable import read_sealed, sealed
from grpo.output.folder import prepare_run, recorded_commit
from grpo.output.layout import ADAPTER, BEST, COMPLETE, LOGS, MANIFEST
from grpo.settings.table import FIELDS, Settings


def test_an_interrupted_run_continues_from_its_last_whole_checkpoint(tmp_path):
    """Its logs are cut back to what they held at that step: no row is lost and none is there twice."""
    settings, folder = run_dir(tmp_path)
    whole = {name: (folder / name).read_bytes() for name in LOGS}
    with (folder / LOGS[1]).open("a") as file:
        file.write('6,"torn')
    state, problems = inspect(settings)
    assert not problems and (state.step, state.checkpoint) == (4, folder / "checkpoint-4")
    note = "checkpoint-6: it was cut off while it was written: set aside, the run continues from step 4"
    assert state.notes == (note,)
    prepare_run(state, settings, {})
    assert not (folder / "checkpoint-6").exists() and inspect(settings)[0].notes == (), "said once"
    for name, lines in zip(LOGS, (5, 1 + 4 * PER_STEP), strict=True):
        assert (folder / name).read_bytes() == b"".join(whole[name].splitlines(True)[:lines])
    write_steps(folder, [5], PER_STEP, saved=[5])
    assert {name: (folder / name).read_bytes() for name in LOGS} == whole
    assert inspect(settings)[0].step == 5, "its manifest speaks of the whole log, not of what this start wrote"


def test_what_may_not_continue(tmp_path):
    settings, folder = run_dir(tmp_path, SYSTEM_PROMPT="Two words.")
    assert not inspect(settings, TOTAL_STEPS=20, SAVE_STEPS=3)[1], "a longer run is the same run"
    problem = only(inspect(settings, LEARNING_RATE=1e-6)[1])
    assert "LEARNING_RATE: the run in" in problem and "started with 0.0001, now it is 1e-06" in problem
    assert "LOG_PROMPTS=0 to continue it" in only(inspect(settings, LOG_PROMPTS=True)[1]), "it adds a column"
    assert "Set SYSTEM_PROMPT='Two words.' to continue it" in only(inspect(settings, SYSTEM_PROMPT="One")[1])
    problem = only(inspect(settings, [dataclasses.replace(ROW, rewards=(1.0, 0.0))])[1])
    assert "an earlier version held other rows out: finish the run with that version" in problem
    start = (
        f"was started on other rows. To learn from these rows too, start from its adapter: set INIT_ADAPTER={folder}"
    )
    assert f"{start} and choose" in problem, "before all else"
    assert "To continue it, restore DATA, EVAL_DATA and EVAL_SAMPLES" in problem and "OVERWRITE=1 deletes it" in problem
    (folder / BEST).mkdir()
    (folder / BEST / ADAPTER).touch()
    assert f"{start}/best and" in only(inspect(settings, [dataclasses.replace(ROW, rewards=(1.0, 0.0))])[1])
    shutil.rmtree(folder / BEST)
    problem = only(inspect(settings, TOTAL_STEPS=3)[1])
    assert problem.startswith("TOTAL_STEPS: ") and "has 4 steps, more than 3. Set TOTAL_STEPS=4 or higher" in problem
    assert "Raise NUM_TRAIN_EPOCHS, set" in only(inspect(settings, TOTAL_STEPS=3, NUM_TRAIN_EPOCHS=1.0)[1])
    assert not inspect(settings, TOTAL_STEPS=4)[1], "every step, but the evaluation and the zip are owed"
    (folder / COMPLETE).write_text("{}")
    assert "complete (4 of 4 steps)" in only(inspect(settings, TOTAL_STEPS=4)[1])
    assert not inspect(settings, TOTAL_STEPS=4, OVERWRITE=True)[1]


def test_a_run_writes_its_settings_for_a_shell(tmp_path):
    """Only what the user gave, quoted: a shell has the same settings, but for the folder and its deletion."""
    chosen = {"DATA": "my days/*.csv", "LEARNING_RATE": 1e-4, "SYSTEM_PROMPT": "It's $5", "OVERWRITE": True}
    settings = Settings(OUTPUT_DIR=str(tmp_path / "run"), **chosen)
    sources = dict.fromkeys(FIELDS, "default") | dict.fromkeys([*chosen, "OUTPUT_DIR"], "environment")
    prepare_run(inspect(settings)[0], settings, {"settings.json": {"sources": sources}})
    command = f"set -a; . {tmp_path}/run/run.env; set +a; env"
    done = subprocess.run(["env", "-i", "PATH=/usr/bin:/bin", "sh", "-c", command], capture_output=True, text=True)
    lines = {line for line in done.stdout.splitlines() if not line.startswith(("PWD=", "PATH=", "_=", "SHLVL="))}
    assert lines == {"DATA=my days/*.csv", "LEARNING_RATE=0.0001", "SYSTEM_PROMPT=It's $5"}
    assert str(tmp_path) not in (tmp_path / "run/run.env").read_text(), "it may be shared"


def test_the_commit_of_its_model(tmp_path):
    settings, folder = run_dir(tmp_path, MODEL_ID="org/model")
    record = json.loads((folder / "settings.json").read_text())
    assert recorded_commit(settings) is None, "a run that began before commits were recorded"
    for commit, expected in (("a" * 40, "a" * 40), (None, None), (3, None)):
        (folder / "settings.json").write_text(json.dumps(record | {"choices": {"model_commit": commit}}))
        assert recorded_commit(settings) == expected
    (folder / "settings.json").write_text(json.dumps(record | {"choices": {"model_commit": "a" * 40}}))
    assert recorded_commit(dataclasses.replace(settings, OVERWRITE=True)) is None, "it starts again"
    assert recorded_commit(dataclasses.replace(settings, MODEL_ID="org/other")) is None, "which is refused"
    for text in ("", '{"choices": {}}', '{"choices": 3}'):
        (folder / "settings.json").write_text(text)
        assert recorded_commit(settings) is None
    assert recorded_commit(Settings(OUTPUT_DIR=str(tmp_path / "none"))) is None


def strip(folder, *steps):
    """Deletes what a zip leaves out of checkpoints: the optimizer and the scheduler."""
    for step in steps:
        for name in ("optimizer.pt", "scheduler.pt"):
            (folder / f"checkpoint-{step}" / name).unlink()


@pytest.mark.parametrize("message", ["a trained adapter", "the adapter of checkpoint-4"])
def test_a_trained_adapter_that_cannot_be_trained_on_is_not_replaced(tmp_path, message):
    """In the zip of an interrupted run, and in that of a failed one."""
    settings, folder = run_dir(tmp_path)
    strip(folder, 2, 4)
    if "trained" in message:
        (folder / ADAPTER).touch()
    problem = only(inspect(settings)[1])
    assert problem.startswith(f"OUTPUT_DIR={folder}: it holds {message}, but") and "OVERWRITE=1" in problem
    assert f"scripts/evaluate.py {folder})" in problem and "choose another OUTPUT_DIR" in problem
    assert not inspect(settings, OVERWRITE=True)[1]


def test_what_may_continue_although_an_adapter_is_there(tmp_path):
    """An earlier checkpoint is whole. No checkpoint with an adapter is deleted."""
    settings, folder = run_dir(tmp_path)
    (folder / ADAPTER).touch()
    assert not inspect(settings)[1], "interrupted: a whole checkpoint is there as well"
    strip(folder, 4)
    for name in ("checkpoint-4-mine", "superseded-checkpoint-4"):
        (folder / name).mkdir()
    (folder / COMPLETE).write_text('{"steps": 8}')
    assert "complete (8 of 8 steps)" in only(inspect(settings)[1]), "nothing is trained again"
    (folder / COMPLETE).write_text('{"steps": 2}')
    state, problems = inspect(settings)
    assert not problems and (state.step, state.complete_steps) == (2, 2), "a complete run that is to train on"
    prepare_run(state, settings, {})
    assert not (folder / COMPLETE).exists(), "ended after this, nothing says any more that the run is complete"
    names = ["checkpoint-2", "checkpoint-4-mine", "superseded-checkpoint-4", "superseded-checkpoint-4.2"]
    assert sorted(path.name for path in folder.glob("*checkpoint-*")) == names
    assert (folder / "superseded-checkpoint-4.2" / ADAPTER).is_file()


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(tmp_path):
    settings, folder = run_dir(tmp_path)
    for step in (2, 4):
        shutil.rmtree(folder / f"checkpoint-{step}")
    (folder / "checkpoint-6" / ADAPTER).touch()
    state, problems = inspect(settings)
    assert not problems and state.exists and state.step == 0
    prepare_run(state, settings, {})
    assert not any((folder / name).exists() for name in LOGS)


def test_the_last_checkpoints_by_step_stay_and_so_do_superseded_ones(tmp_path):
    """Whatever the clock says: with times in the future transformers deletes each new one as it is saved."""
    for step, year in ((8, 2020), (9, 2100), (10, 2000), (11, 2050), (12, 2020)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (year * 31556952 - 62167219200,) * 2)
    retire_checkpoint(tmp_path / "checkpoint-12")
    assert not (tmp_path / "checkpoint-12").exists(), "it has no adapter"
    for name in (ADAPTER, f"{MANIFEST}.tmp"):
        (tmp_path / "checkpoint-8" / name).touch()
    retire_checkpoint(tmp_path / "checkpoint-8")
    assert [path.name for path in (tmp_path / "superseded-checkpoint-8").iterdir()] == [ADAPTER]
    rotate_checkpoints(tmp_path, 2)
    names = ["checkpoint-10", "checkpoint-11", "superseded-checkpoint-8"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_checkpoint_that_a_kill_in_rotation_left_is_deleted(tmp_path):
    """After the last step no other rotation comes."""
    settings, folder = run_dir(tmp_path, SAVE_TOTAL_LIMIT=1)
    (folder / "checkpoint-2" / "optimizer.pt").unlink()
    prepare_run(inspect(settings)[0], settings, {})
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]


def put_pipe(path):
    os.mkfifo(path)


def put_link(path):
    path.symlink_to(path.parents[1] / "elsewhere")


@pytest.mark.parametrize(
    ("name", "put", "words"),
    [
        ("adapter_config.json", put_pipe, "adapter_config.json is no regular file"),
        ("chat_template.jinja", put_pipe, "chat_template.jinja is no regular file"),
        ("training.log", Path.mkdir, "training.log is no regular file"),
        ("settings.json.tmp", Path.mkdir, "settings.json.tmp is no regular file"),
        ("best", Path.touch, "best is no folder"),
        ("runs", put_pipe, "runs is no folder"),
        ("report", put_link, "report is a link, and the run would follow it out of the folder"),
        ("training.log", put_link, "training.log is a link"),
        ("best.tmp", put_link, "best.tmp is a link"),
        ("checkpoint-9", put_link, "checkpoint-9 is a link"),
        ("deleting.json", Path.mkdir, "deleting.json is no regular file"),
    ],
)
def test_what_a_run_would_write_through_or_hang_at_is_refused(tmp_path, name, put, words):
    settings, folder = run_dir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    put(folder / name)
    problem = only(inspect(settings)[1])
    assert problem.startswith(f"OUTPUT_DIR={folder}: {words}") and "move it away" in problem
    if name != "deleting.json":
        prepare_run(inspect(settings, OVERWRITE=True)[0], dataclasses.replace(settings, OVERWRITE=True), {})
        assert not os.path.lexists(folder / name) and (tmp_path / "elsewhere").is_dir()


def test_a_folder_in_the_place_of_the_zip_is_refused(tmp_path):
    settings, _ = run_dir(tmp_path)
    (tmp_path / "run.zip").mkdir()
    assert "run.zip is a folder, in the place of the run's zip" in only(inspect(settings)[1])
    assert "run.zip is a folder" in only(inspect(settings, OVERWRITE=True)[1])


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("metrics.csv", 0o444, "metrics.csv cannot be written"),
        ("settings.json", 0, "settings.json cannot be read"),
        ("checkpoint-4", 0, "checkpoint-4 cannot be read"),
        ("checkpoint-4", 0o555, "checkpoint-4 cannot be written"),
        ("checkpoint-4/trainer_state.json", 0, None),
        (".", 0o300, "cannot be read"),
    ],
)
def test_a_normal_users_closed_files_are_named(open_path, name, mode, words):
    """Root may read and write everything. A checkpoint with a closed file is passed over, and that file is not in the
    zip."""
    settings, folder = run_dir(open_path)

    def look():
        state, problems = inspect(settings)
        if problems:
            return [*problems]
        with zipfile.ZipFile(write_zip(folder)) as archive:
            return [state.step, [path for path in archive.namelist() if path.endswith("4/trainer_state.json")]]

    # Also so that Python has loaded all that the other user's process needs.
    assert look() == [4, ["run/checkpoint-4/trainer_state.json"]]
    for path in (open_path, *open_path.rglob("*")):
        os.chown(path, 65534, 65534)
    (folder / name).chmod(mode)
    seen = as_normal_user(look)
    if words:
        assert words in only(seen) and seen[0].startswith(f"OUTPUT_DIR={folder}: ")
        if name != ".":
            only(as_normal_user(lambda: [*inspect(settings, OVERWRITE=True)[1]] or ["none"]))
    else:
        assert seen == [2, []]


@pytest.fixture
def open_path():
    """A temporary folder below which others may come: pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def as_normal_user(function):
    """What a function returns in a process without root's rights, as JSON."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(sender, json.dumps(function()).encode())
        except BaseException as error:
            os.write(sender, json.dumps([f"raised {error!r}"]).encode())
        os._exit(0)
    os.close(sender)
    os.waitpid(child, 0)
    with open(receiver, "rb") as file:
        return json.loads(file.read())


def test_overwrite_does_not_delete_the_adapter_that_the_run_starts_from(tmp_path):
    settings, folder = run_dir(tmp_path, OVERWRITE=True, INIT_ADAPTER=str(tmp_path / "run/checkpoint-4"))
    assert "it would delete the folder that INIT_ADAPTER names" in only(inspect(settings)[1])
    assert not inspect(settings, INIT_ADAPTER=str(tmp_path))[1]


def test_a_folder_without_a_run_is_fresh(tmp_path):
    """After a kill in the first file, and on a disk of its own, in whose root the file system has a folder. Beside a
    zip a run would replace that."""
    settings = Settings(OUTPUT_DIR=str(tmp_path / "run"))
    (tmp_path / "run/lost+found").mkdir(parents=True)
    (tmp_path / "run/settings.json.tmp").write_text('{"settings": {"MOD')
    state, problems = inspect(settings)
    assert not problems and not state.exists and state.checkpoint is None
    (tmp_path / "run.zip").write_text("precious")
    assert "run.zip of an earlier run is there" in only(inspect(settings)[1])
    assert not inspect(settings, OVERWRITE=True)[1]
    prepare_run(state, settings, {"settings.json": {"settings": {}, "data_sha256": ""}})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lost+found", "run.env", "settings.json"]


def test_folders_of_others_are_never_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        problem = only(inspect(Settings(OUTPUT_DIR=str(tmp_path), OVERWRITE=overwrite))[1])
        assert "no run of this script" in problem
    problem = only(inspect(Settings(OUTPUT_DIR=str(tmp_path / "thesis.txt/a/b")))[1])
    assert f"{tmp_path / 'thesis.txt'} is a file, not a folder" in problem


def test_damaged_records_are_refused_or_passed_over(tmp_path):
    settings, folder = run_dir(tmp_path)
    (folder / COMPLETE).write_text('{"steps": 9, "sha256": "0"}')
    assert not inspect(settings)[1] and "complete (4 of 4" in only(inspect(settings, TOTAL_STEPS=4)[1])
    (folder / "checkpoint-4" / MANIFEST).write_text('{"files": {}, "ends": {"metrics.csv": [-1, "0"]}}')
    assert "the rows of metrics.csv up to checkpoint-4 were edited or damaged" in only(inspect(settings)[1])
    record = json.dumps(sealed(json.loads((folder / "settings.json").read_text())))
    for text in ("", record.replace("0.0001", "0.0002"), '{"settings": 1, "data_sha256": ""}'):
        (folder / "settings.json").write_text(text)
        problem = only(inspect(settings)[1])
        assert "its settings.json is damaged" in problem and "Put another copy in its place (the run" in problem


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_was_edited_is_refused(tmp_path, name):
    settings, folder = run_dir(tmp_path)
    log = (folder / name).read_bytes()
    lost_row = log.splitlines(True)[:2] + log.splitlines(True)[3:]
    (folder / name).write_bytes(log + b"5,mine\n")
    assert not inspect(settings)[1], "a row that is written again"
    for edited in (log[:90] + bytes([log[90] ^ 4]) + log[91:], b"".join(lost_row)):
        (folder / name).write_bytes(edited)
        problem = only(inspect(settings)[1])
        assert f"OUTPUT_DIR={folder}: the rows of {name} up to checkpoint-4 were edited or damaged" in problem
    assert "Put another copy in its place (the run's zip may have one), move it away" in problem
    (folder / name).unlink()
    state, problems = inspect(settings)
    assert not problems and state.notes[1] == f"{name} is not there: a new one begins at step 5", "the way on"
    prepare_run(state, settings, {})
    write_steps(folder, [5], PER_STEP, saved=[])
    assert inspect(settings)[0].step == 4, "killed before the next checkpoint, it continues from the same one"
    write_steps(folder, [6], PER_STEP, saved=[6])
    assert inspect(settings)[0].step == 6 and inspect(settings)[0].notes == ()


@pytest.mark.parametrize("name", LOGS)
def test_a_checkpoint_whose_rows_are_missing_is_passed_over(tmp_path, name):
    """As in a copy that took the log before the run wrote to it, and the checkpoint after that."""
    settings, folder = run_dir(tmp_path)
    shutil.rmtree(folder / "checkpoint-6")
    whole = (folder / name).read_bytes()
    sizes = {step: read_sealed(folder / f"checkpoint-{step}" / MANIFEST)["ends"][name][0] for step in (2, 4)}
    (folder / name).write_bytes(whole[: sizes[4] - 1])
    state, problems = inspect(settings)
    assert not problems and state.step == 2
    assert state.notes[0].startswith(f"checkpoint-4: {name} is shorter than when the checkpoint was written")
    (folder / name).write_bytes(whole[: sizes[2] - 1])
    problem = only(inspect(settings)[1])
    assert "it holds the adapter of checkpoint-4, but no checkpoint that can be continued" in problem
    assert f"checkpoint-2: {name} is shorter than when the checkpoint was written" in problem
