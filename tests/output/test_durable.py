# SPDX-License-Identifier: Apache-2.0
"""Files, manifests and checksums: damage is noticed, whatever happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from damage import KINDS
from helpers import CLEAN, ROOT, run_python
from machines import only

from grpo.common import Problems
from grpo.output import durable
from grpo.output.checkpoints import CUT_OFF, begin_checkpoint, checkpoint_fault, finish_checkpoint
from grpo.output.durable import read_measured, read_sealed, sealed, whole_file, write_text
from grpo.output.layout import ADAPTER, MANIFEST

FILES = {ADAPTER: b"adapter", "sub/rng_state.pth": b"states", "trainer_state.json": b'{"global_step": 3}'}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint-3"
    begin_checkpoint(path)
    assert checkpoint_fault(path) == CUT_OFF
    (path / "sub").mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    finish_checkpoint(path, {"metrics.csv": (9, "0")})
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_damage_is_noticed_and_names_the_file(checkpoint, name, kind):
    assert checkpoint_fault(checkpoint) is None
    before = (checkpoint / name).read_bytes()
    KINDS[kind](checkpoint / name)
    assert checkpoint_fault(checkpoint).startswith(name)
    (checkpoint / name).write_bytes(before)
    assert checkpoint_fault(checkpoint) is None
    (checkpoint / name).unlink()
    assert checkpoint_fault(checkpoint) == f"{name} is missing"


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_who_may_read_a_folder_may_read_its_weights(tmp_path, mode):
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    for name in ("adapter.safetensors", "own.txt"):
        (folder / name).touch(0o600)
    outside = folder.with_name("outside.safetensors")
    outside.touch(0o600)
    (folder / "link.safetensors").symlink_to(outside)
    durable.sync_files(folder)
    assert outside.stat().st_mode & 0o777 == 0o600, "a link leads to other people's files"
    modes = [(folder / name).stat().st_mode & 0o777 for name in ("adapter.safetensors", "own.txt")]
    assert modes == [0o600 | mode & 0o444, 0o600]


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(OSError), whole_file(path) as temporary:
        temporary.write_text("half")
        raise OSError
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path], "a full disk keeps no part of a file"


def test_a_file_that_a_user_names_may_be_a_link_or_a_pipe(tmp_path):
    real, link, pipe = tmp_path / "real.csv", tmp_path / "link.csv", tmp_path / "pipe"
    problems = Problems()
    real.touch()
    link.symlink_to(real)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (real, link, pipe, tmp_path / "new.csv"):
        durable.check_writable(path, problems)
        assert not problems and not (tmp_path / "new.csv").exists()
        durable.write_named(path, path.name)
    assert link.is_symlink() and real.read_text() == "link.csv" and pipe.is_fifo() and os.read(reader, 9) == b"pipe"
    os.close(reader)
    for path in (tmp_path / "missing" / "new.csv", tmp_path):
        problems = Problems()
        durable.check_writable(path, problems)
        assert only(problems).startswith(f"{path}: cannot be written. Name another --out")


def test_no_flipped_bit_changes_what_a_record_says(tmp_path, caplog):
    path, record = tmp_path / "evaluation.json", {"steps": 12, "values": [0.25, None], "exact": True}
    path.write_text(json.dumps(sealed(record)))
    whole = path.read_bytes()
    assert read_sealed(path) == record and read_measured(path) and not caplog.text
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="recursion"):
        read_sealed(path)
    for bit in range(0, 8 * len(whole), 3):
        path.write_bytes(bytes(byte ^ (1 << bit % 8) * (i == bit // 8) for i, byte in enumerate(whole)))
        try:
            values = read_sealed(path)
            assert {name: values.get(name) for name in record} == record, "the name of the checksum was hit"
        except ValueError:
            assert not read_measured(path)
    assert "evaluation.json is damaged" in caplog.text and "measured again" in caplog.text
    assert not read_measured(tmp_path / "none.json")


def test_a_scratch_folder_of_a_process_that_was_killed_is_deleted_by_the_next(tmp_path, monkeypatch):
    """Not one that is in use, or about to be by a living process, nor anything of another name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import time; from grpo.output.durable import scratch_folder\n"
    code += "path = scratch_folder(); (path / 'a').touch(); print(path, flush=True); time.sleep(60)"
    starting = tmp_path / f"train_grpo-scratch-{os.getppid()}-a"
    for folder in (tmp_path / "train_grpo-main", starting, tmp_path / "train_grpo-scratch-99999999-a"):
        folder.mkdir()

    environ = CLEAN | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}

    def start():
        process = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
        return process, Path(process.stdout.readline().strip())

    (killed, old), (living, used) = start(), start()
    killed.kill()
    killed.wait()
    new = durable.scratch_folder()
    assert {*tmp_path.iterdir()} == {used, new, starting, tmp_path / "train_grpo-main"} and (used / "a").exists()
    assert new.stat().st_mode & 0o777 == 0o700 and old != used
    living.terminate()
    living.communicate()
    run_python("-c", "from grpo.output.durable import scratch_folder; scratch_folder()", TMPDIR=tmp_path)
    assert {*tmp_path.iterdir()} == {new, starting, tmp_path / "train_grpo-main"}, "deletes its own, and the used one"
