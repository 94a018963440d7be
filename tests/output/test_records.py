# SPDX-License-Identifier: Apache-2.0
"""What a run reads back of its own files: whatever they hold, the answer is a fault with the file's name."""

from __future__ import annotations

import copy
import json
import os
import threading
import zipfile
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import EVALUATION, inspect, metrics_row, run_dir, write_run

from grpo.common import InputError
from grpo.evaluate.report_text import choices_rows, facts, settings_rows
from grpo.evaluate.run_files import read_run
from grpo.evaluate.saved_adapter import recorded_settings
from grpo.figures.verdict import Comparison, loading_advice
from grpo.output.archive import write_zip
from grpo.output.best import keep_best, read_best
from grpo.output.checkpoints import checkpoints
from grpo.output.durable import read_json, read_measured, read_sealed, write_sealed
from grpo.output.folder import complete_steps, continuation
from grpo.output.layout import ADAPTER
from grpo.output.logs import Pace

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
    max_leaves=4,
)
NAMES = ("settings.json", "checkpoint-4/manifest.json", "best/best.json", "complete.json", "evaluation.json")
NAMES += ("closed_loop.json", "checkpoint-4/trainer_state.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder that holds every kind of record."""
    run_settings, folder = run_dir(tmp_path_factory.mktemp("records"))
    closed_loop = {"windows": [{"name": "a", "hours": 30}], "totals": {"base": {"regret_percent": 9.0}}}
    for name, record in {"evaluation.json": EVALUATION, "closed_loop.json": closed_loop}.items():
        write_sealed(folder / name, record)
    values = {"step": 4, "heldout_reward": 0.5}
    save, comparisons = lambda new, _: (new / ADAPTER).write_text("x"), [Comparison("the base model", 0.05, 0.15, 12)]
    keep_best(folder, "reward", {"heldout_reward": 0.4}, {}, values, save, comparisons)
    write_sealed(folder / "complete.json", {"steps": 4, "adapter_sha256": "0"})
    return run_settings, folder


def paths_of(value, path=()):
    """The paths of every value inside JSON."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from paths_of(part, (*path, key))


def replaced(record, path, value):
    if not path:
        return value
    changed = copy.copy(record)
    changed[path[0]] = replaced(record[path[0]], path[1:], value)
    return changed


def read_everything(run_settings, folder):
    """All that a start, a resumed run, a report and an adapter's user read of a run's folder."""
    inspect(run_settings)
    inspect(run_settings, OVERWRITE=True)
    continuation(folder, run_settings.OVERWRITE)
    complete_steps(folder)
    loading_advice(read_best(folder), 5)
    read_measured(folder / "evaluation.json")
    recorded_settings(folder / "checkpoint-4", {})
    with suppress(InputError):
        run = read_run(folder)
        facts(run), settings_rows(run), choices_rows(run), run.evaluated_steps()


@settings(deadline=None, max_examples=int(os.environ.get("RECORD_VARIANTS", "100")))
@given(st.sampled_from(NAMES), st.data())
def test_any_value_in_a_record_is_answered(folder, name, data):
    run_settings, folder = folder
    whole = (folder / name).read_text()
    record = {key: value for key, value in json.loads(whole).items() if key != "sha256"}
    path = data.draw(st.sampled_from(list(paths_of(record))))
    try:
        (folder / name).write_text(json.dumps(replaced(record, path, data.draw(JSON))))
        read_everything(run_settings, folder)
    finally:
        (folder / name).write_text(whole)


def test_a_record_is_changed_by_hand_as_the_documentation_says(tmp_path):
    """docs/maintainers/reliability.md: delete the line with the checksum."""
    path = tmp_path / "complete.json"
    write_sealed(path, {"steps": 4})
    path.write_text(path.read_text().replace('"steps": 4', '"steps": 5'))
    with pytest.raises(ValueError, match="does not match its checksum"):
        read_sealed(path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "sha256" not in line))
    assert read_sealed(path) == {"steps": 5}


@pytest.mark.parametrize("name", [*NAMES, "metrics.csv", "completions.csv"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder, name):
    run_settings, folder = folder
    path, kept = folder / name, folder.parent / "kept"
    path.rename(kept)
    os.mkfifo(path)
    try:
        reader = threading.Thread(target=read_everything, args=(run_settings, folder), daemon=True)
        reader.start()
        reader.join(20)
        assert not reader.is_alive(), "it reads a pipe that nobody writes to"
    finally:
        path.unlink()
        kept.rename(path)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"files": []}, "`files` is not an object"),
        ({"files": {"a": 1}}, "`files` is not a text"),
        ({"ends": {"metrics.csv": [1]}}, "`ends` has 1 elements instead of 2"),
        ({"ends": {"metrics.csv": [True, "x"]}}, "`ends` is not a number"),
        ([1], "it holds no JSON object"),
    ],
)
def test_a_record_names_the_value_of_a_wrong_type(tmp_path, value, fault):
    (tmp_path / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match=rf"manifest.json cannot be read \({fault}\)"):
        read_sealed(tmp_path / "manifest.json")


def test_a_large_file_is_not_read(tmp_path):
    with (tmp_path / "settings.json").open("wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(ValueError, match="larger than 256 MiB"):
        read_json(tmp_path / "settings.json")


def test_odd_names_and_numbers_do_no_harm(tmp_path):
    rows = [metrics_row(step) | {"step_s": "1e999"} for step in (1, 2, 3)]
    folder = write_run(tmp_path / "run", rows)
    pace = Pace(10, 0, rows)
    assert pace.time_left(3) == "" and not pace.step_s
    (folder / "checkpoint-²").mkdir()
    assert not checkpoints(folder)
    (folder / "checkpoint-²").rmdir()
    name = os.fsdecode(b"caf\xe9.txt")
    (folder / name).write_text("x")
    with zipfile.ZipFile(write_zip(folder)) as archive:
        assert "run/caf\\xe9.txt" in archive.namelist()
