# SPDX-License-Identifier: Apache-2.0
"""OUTPUT_DIR: its lock, what is in the way beside it and in it, its disk, and how it is emptied."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import only
from run_folders import inspect, run_dir
from safetensors import SafetensorError

from grpo.output.folder import prepare_run
from grpo.output.layout import existing_parent, is_full_disk, lock_output_dir, lock_run


@pytest.mark.parametrize(("owner", "name"), [(shutil, "rmtree"), (Path, "unlink"), (Path, "open")])
def test_a_kill_inside_overwrites_deletion_leaves_a_folder_that_the_same_command_goes_on_with(
    tmp_path, monkeypatch, owner, name
):
    """Killed at the first folder, at the zip, and when all is deleted and the first file is written."""
    settings, folder = run_dir(tmp_path, OVERWRITE=True)
    archive, records = folder.with_name("run.zip"), {"settings.json": {"settings": {}, "data_sha256": ""}}
    archive.touch()
    (folder / "link").symlink_to(tmp_path)
    state, number = inspect(settings)[0], folder.stat().st_ino

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, killed)
        prepare_run(state, settings, records)
    problems = inspect(settings, OVERWRITE=False)[1]
    assert "OVERWRITE=1 was interrupted" in only(problems) and "Set OVERWRITE=1" in problems[0]
    prepare_run(inspect(settings)[0], settings, records)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["link", "run.env", "settings.json"] and not archive.exists()
    assert folder.stat().st_ino == number, "a mount point cannot be removed"


def test_overwrite_deletes_what_a_run_wrote_and_nothing_else(tmp_path):
    settings, folder = run_dir(tmp_path, OVERWRITE=True)
    for inner in ("mine/deep", "best", "report", "runs/Nov22", "superseded-checkpoint-4.2", "superseded-best"):
        (folder / inner).mkdir(parents=True)
    measured = "evaluation-more.json"  # by scripts/evaluate.py, of the adapter that is deleted
    for name in ("tokenizer_config.json", "special_tokens_map.json", "versions.json.tmp", "complete.json", measured):
        (folder / name).touch()
    mine = ["checkpoint-4-mine", "evaluation-of-mine.csv", "metrics.csv.bak", "my_tokens.json", "notes.txt"]
    for name in mine:
        (folder / name).touch()
    prepare_run(inspect(settings)[0], settings, {})
    new = "run.env"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*mine, "mine", new])


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / ".run.lock").symlink_to(tmp_path / "planted")
    _, problem = lock_output_dir({"OUTPUT_DIR": str(tmp_path / "run")})
    assert f"its lock {tmp_path / '.run.lock'} cannot be taken (" in problem
    assert not (tmp_path / "planted").exists() and (tmp_path / ".run.lock").is_symlink()


def test_a_lock_that_fails_leaves_nothing_that_was_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("filelock.FileLock.acquire", lambda lock: os.close(-1))
    with pytest.raises(OSError):
        lock_run(tmp_path / "new" / "sub" / "run")
    assert not list(tmp_path.iterdir())


def test_who_watches_does_not_keep_a_run_from_starting(tmp_path, monkeypatch):
    """It shares the lock for an instant."""
    with (tmp_path / ".run.lock").open("wb") as shared:
        fcntl.flock(shared, fcntl.LOCK_SH)
        assert lock_run(tmp_path / "run") is None
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", lambda seconds: fcntl.flock(shared, fcntl.LOCK_UN))
            lock = lock_run(tmp_path / "run")
    assert lock and lock_run(tmp_path / "run") is None
    lock.release()


def test_where_no_run_can_be_nothing_is_locked_and_the_checks_say_why(tmp_path):
    (tmp_path / "file").touch()
    for path, seed in (("file/run", "5"), ("run", "x")):
        assert lock_output_dir({"OUTPUT_DIR": str(tmp_path / path), "SEED": seed}) == (None, None)
    assert lock_output_dir({"OUTPUT_DIR": " "}) == (None, None) and [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_which_errors_are_a_full_disk(monkeypatch, tmp_path):
    written = RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0")
    rusts = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    wrapped = RuntimeError("REWARDS: mine raised")
    wrapped.__cause__ = OSError(errno.ENOSPC, "x")
    for free, torch_failed in ((0, True), (1 << 40, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        errors = (written, wrapped, rusts, OSError(errno.EDQUOT, "x"), ValueError("odd"))
        assert [is_full_disk(error, tmp_path) for error in errors] == [torch_failed, True, True, True, False]


def test_a_path_that_cannot_be_is_no_error(tmp_path):
    """Such as a HF_HOME in a folder that this user may not enter, or a name that is too long."""
    assert existing_parent(tmp_path / ("a" * 300) / "hf") == tmp_path
    assert existing_parent(Path("~nobody-has-this-name/hf")) == Path.cwd()
