# SPDX-License-Identifier: Apache-2.0
"""OUTPUT_DIR: its lock, what is in the way beside it and in it, its disk, and how it is emptied."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import only
from run_folders import inspect, run_dir
from safetensors import SafetensorError

from grpo.run.folder import prepare_run
from grpo.run.layout import COMPLETE, full_disk, lock_output_dir, lock_run
from grpo.settings import Settings


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
    state, problems = inspect(settings, OVERWRITE=False)
    assert name == "open" or "an OVERWRITE=1 that was deleting" in only(problems) and "Set OVERWRITE=1" in problems[0]
    assert name != "open" or not state.exists, "never half a run"
    prepare_run(inspect(settings)[0], settings, records)
    assert [path.name for path in folder.iterdir()] == ["settings.json"] and not archive.exists()
    assert folder.stat().st_ino == number, "a mount point cannot be removed"


def test_overwrite_names_what_it_deletes_that_no_run_wrote(tmp_path):
    settings, folder = run_dir(tmp_path, OVERWRITE=True)
    for inner in ("mine/deep", "best", "report", "runs/Nov22", "superseded-checkpoint-4.2", "superseded-adapter-last"):
        (folder / inner).mkdir(parents=True)
    own = "tokenizer_config.json special_tokens_map.json versions.json.tmp best/best.json checkpoint-4/rng_state.pth"
    own += " report/best_action_rate_2.png runs/Nov22/events.out.tfevents.1.host.2.0"
    mine = "checkpoint-4-mine checkpoint-4/notes.md metrics.csv.bak my_tokens.json notes.txt report/notes.md"
    mine += " runs/Nov22/first.csv superseded-bestiary.txt thesis.tmp"
    for name in f"{own} {mine}".split():
        (folder / name).touch()
    assert sorted(inspect(settings)[0].foreign) == sorted([*mine.split(), "mine/"])


def test_what_is_in_the_way_beside_the_folder_is_named(tmp_path, monkeypatch):
    """Also another user's file in the place of the zip, in a folder like /tmp: the run could not replace it."""
    settings = Settings(OUTPUT_DIR=str(tmp_path / "run"))
    for name in (".run.lock", "run.zip", "run.zip.tmp"):
        (tmp_path / name).mkdir()
        assert f"{tmp_path / name} is not a file" in only(inspect(settings)[1])
        (tmp_path / name).rmdir()
    (tmp_path / "run.zip").symlink_to("theirs")
    for mode, user, refused in ((0o777, 99, 0), (0o1777, os.geteuid(), 0), (0o1777, 99, 1)):
        tmp_path.chmod(mode)
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        problems = inspect(settings)[1]
        assert len(problems) == refused and all("run.zip is another user's" in problem for problem in problems)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / ".run.lock").symlink_to(tmp_path / "planted")
    problem = only(inspect(Settings(OUTPUT_DIR=str(tmp_path / "run")))[1])
    assert f"its lock {tmp_path / '.run.lock'} is a link" in problem
    with pytest.raises(OSError):
        lock_run(tmp_path / "run")
    assert not (tmp_path / "planted").exists() and (tmp_path / ".run.lock").is_symlink()


def test_a_link_or_a_folder_with_a_name_of_the_runs_own_is_refused(tmp_path):
    """PEFT, the tokenizer, the Trainer and the log would write through a link."""
    settings, folder = run_dir(tmp_path)
    shutil.rmtree(folder / "checkpoint-6")
    (folder / "mine.csv").symlink_to(tmp_path / "mine.csv")
    assert not inspect(settings)[1]
    for name in ("adapter_config.json", "training.log", "best", "checkpoint-6"):
        (folder / name).symlink_to(tmp_path / "planted")
        assert f"{name} in it is a link" in only(inspect(settings)[1])
        assert not inspect(settings, OVERWRITE=True)[1], "which deletes the link"
        (folder / name).unlink()
    for name in ("metrics.csv", COMPLETE):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
        assert f"{name} in it is not a file that you may read and write" in only(inspect(settings)[1])
        (folder / name).rmdir()


def test_a_lock_that_is_taken_back_or_fails_leaves_nothing_that_was_not_there(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "sub" / "run"
    lock = lock_run(folder)
    assert [path.name for path in folder.parent.iterdir()] == [".run.lock"]
    lock.release(remove=True)
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr("filelock.FileLock.acquire", lambda lock: os.close(-1))
        lock_run(folder)
    assert not list(tmp_path.iterdir())
    lock_run(folder).release()
    lock_run(folder).release(remove=True)
    assert (folder.parent / ".run.lock").exists(), "an earlier run's"


def test_a_lock_is_refused_where_another_process_writes_and_left_to_the_checks_where_no_run_can_be(tmp_path):
    environ = {"OUTPUT_DIR": str(tmp_path / "run")}
    lock, problem = lock_output_dir(environ)
    refusal = "another process is writing there. Wait for it, or choose another OUTPUT_DIR"
    assert lock_output_dir(environ) == (None, f"OUTPUT_DIR={tmp_path / 'run'}: {refusal}") and not problem
    lock.release(remove=True)
    (tmp_path / "file").touch()
    for wrong in ({"OUTPUT_DIR": str(tmp_path / "file" / "run")}, {"OUTPUT_DIR": " "}, environ | {"SEED": "x"}):
        assert lock_output_dir(wrong) == (None, None) and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_which_errors_are_a_full_disk(monkeypatch, tmp_path):
    def fill(*full_disks):
        free = {str(path): 0 for path in full_disks}
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free.get(str(path), 1 << 40)))

    written = RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0")
    full, ours = OSError(errno.ENOSPC, "x"), f"OUTPUT_DIR={tmp_path}"
    has_room = f"{ours} (it has room: see `df -i` for its inodes, or a quota is met)"
    fill(tmp_path)
    assert [full_disk(error, tmp_path) for error in (written, full, ValueError("odd"))] == [ours, ours, None]
    fill(tempfile.gettempdir())
    assert full_disk(written, tmp_path) is None, "not where checkpoints are written"
    assert full_disk(full, tmp_path) == tempfile.gettempdir()
    fill()
    assert full_disk(OSError(errno.EDQUOT, "x"), tmp_path) == ours
    rusts = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    wrapped = RuntimeError("REWARDS: mine raised")
    wrapped.__cause__ = full
    assert [full_disk(error, tmp_path) for error in (rusts, wrapped)] == [has_room] * 2
    for table, words in ((100, f"{ours} (no inodes left: delete files, however small)"), (0, has_room)):
        # btrfs has no table of inodes, and says 0 of 0.
        monkeypatch.setattr(os, "statvfs", lambda path, table=table: SimpleNamespace(f_files=table, f_favail=0))
        assert full_disk(full, tmp_path) == words
