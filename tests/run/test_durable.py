# SPDX-License-Identifier: Apache-2.0
"""Manifests and seals: what was damaged is told, whatever happened to it."""

from __future__ import annotations

import errno
import json
import os

import pytest
from reliability import KINDS

from grpo.run import durable
from grpo.run.durable import MANIFEST, begin_checkpoint, damage, finish_checkpoint, is_intact, read_sealed, sealed
from grpo.settings import Problems

FILES = {"adapter_model.safetensors": b"adapter", "optimizer.pt": b"optimizer", "sub/rng_state.pth": b"states"}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint-3"
    begin_checkpoint(path)
    assert damage(path) == "it was cut off while it was written"
    (path / "sub").mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    finish_checkpoint(path, {"metrics.csv": (9, "0")})
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_damage_is_told_and_names_the_file(checkpoint, name, kind):
    assert damage(checkpoint) is None
    before = (checkpoint / name).read_bytes()
    KINDS[kind](checkpoint / name)
    assert damage(checkpoint).startswith(name)
    (checkpoint / name).write_bytes(before)
    assert damage(checkpoint) is None
    (checkpoint / name).unlink()
    assert damage(checkpoint).startswith(f"{name} is missing")
    assert ("finished by commit 7add771" in damage(checkpoint)) is (name == MANIFEST), "earlier versions wrote none"


def test_the_manifest_is_written_when_all_else_is_on_the_disk(checkpoint, monkeypatch):
    synced, empty = [], lambda: read_sealed(checkpoint / MANIFEST) == {}
    monkeypatch.setattr(durable, "sync", lambda path: synced.append((path.name, empty())))
    begin_checkpoint(checkpoint)
    assert synced == [(f"{MANIFEST}.tmp", False), ("checkpoint-3", True)]
    synced.clear()
    finish_checkpoint(checkpoint, {})
    files = [("adapter_model.safetensors", True), (MANIFEST, True), ("optimizer.pt", True), ("rng_state.pth", True)]
    assert synced == [*files, (f"{MANIFEST}.tmp", True), ("checkpoint-3", False), (checkpoint.parent.name, False)]


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_who_may_read_a_folder_may_read_its_weights(tmp_path, mode):
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    for name in ("adapter.safetensors", "own.txt"):
        (folder / name).touch(0o600)
    durable.sync_files(folder)
    modes = [(folder / name).stat().st_mode & 0o777 for name in ("adapter.safetensors", "own.txt")]
    assert modes == [0o600 | mode & 0o444, 0o600]


def test_what_lies_beside_a_file_that_a_user_names_is_theirs(tmp_path):
    real, link, theirs = tmp_path / "real.csv", tmp_path / "link.csv", tmp_path / "real.csv.tmp"
    problems = Problems()
    real.touch(0o600)
    link.symlink_to(real)
    theirs.write_text("theirs")
    for path in (real, link, tmp_path / "new.csv"):
        durable.check_writable(path, problems)
        assert not problems and not (tmp_path / "new.csv").exists()
        durable.write_named(path, path.name)
    assert theirs.read_text() == "theirs" and len(list(tmp_path.iterdir())) == 4
    assert link.is_symlink() and real.read_text() == "link.csv" and real.stat().st_mode & 0o777 == 0o600


def test_a_file_that_may_not_be_written_is_no_target(tmp_path, monkeypatch):
    path, real, problems = tmp_path / "kept.csv", os.open, Problems()
    path.touch(0o400)

    def refused(name, *more, **named):  # root may write everywhere
        if os.fspath(name) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(name, *more, **named)

    monkeypatch.setattr(os, "open", refused)
    durable.check_writable(path, problems)
    assert problems == [f"{path}: cannot be written: Permission denied. Name another --out, in a folder that exists"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    path, problems = tmp_path / "pipe", Problems()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        durable.check_writable(path, problems)
        durable.write_named(path, "text")
        assert os.read(reader, 9) == b"text" and path.is_fifo() and not problems
    finally:
        os.close(reader)


def test_no_flipped_bit_changes_what_a_record_says(tmp_path, caplog):
    path, record = tmp_path / "evaluation.json", {"steps": 12, "values": [0.25, None], "exact": True}
    path.write_text(json.dumps(sealed(record)))
    whole = path.read_bytes()
    assert read_sealed(path) == record and is_intact(path) and not caplog.text
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="recursion"):
        read_sealed(path)
    told = 0
    for bit in range(8 * len(whole)):
        path.write_bytes(bytes(byte ^ (1 << bit % 8) * (i == bit // 8) for i, byte in enumerate(whole)))
        try:
            found = read_sealed(path)
            assert {name: found.get(name) for name in record} == record, "the name of the checksum was hit"
        except ValueError:
            told += 1
    assert told > 0.9 * 8 * len(whole) and not is_intact(path)
    assert "evaluation.json is damaged" in caplog.text and "measured again" in caplog.text
    path.write_text('{"steps": 12}')
    assert read_sealed(path) == {"steps": 12}, "who edited it has deleted the checksum"
    assert not is_intact(tmp_path / "none.json")
