# SPDX-License-Identifier: Apache-2.0
"""Manifests and seals: what was damaged is told, whatever happened to it."""

from __future__ import annotations

import json

import pytest

from grpo.measure.damages import KINDS
from grpo.run import durable
from grpo.run.durable import MANIFEST, begin_checkpoint, damage, finish_checkpoint, is_intact, read_sealed, sealed

FILES = {"adapter_model.safetensors": b"adapter", "optimizer.pt": b"optimizer", "sub/rng_state.pth": b"states"}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint-3"
    begin_checkpoint(path)
    assert damage(path) == "it was cut off while it was written"
    (path / "sub").mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    finish_checkpoint(path, {"metrics.csv": ["step"]})
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
    assert damage(checkpoint) == (None if name == MANIFEST else f"{name} is missing"), "earlier versions wrote none"


def test_the_manifest_is_written_when_all_else_is_on_the_disk(checkpoint, monkeypatch):
    synced, empty = [], lambda: durable.read_manifest(checkpoint) == {}
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
    assert read_sealed(path) == {"steps": 12}, "earlier versions wrote no checksum"
    assert not is_intact(tmp_path / "none.json")
