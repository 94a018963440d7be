# SPDX-License-Identifier: Apache-2.0
"""Following a run in the terminal. Run: python -m pytest tests/evaluate/test_watch.py"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import watch
from helpers import write_commands
from run_folders import GPU, metrics_row, write_checkpoint, write_run

from grpo.common import InputError
from grpo.output.layout import COMPLETE, lock_run
from grpo.output.logs import banner_text


def text_of(folder: Path) -> str:
    return "\n".join(watch.frame(folder)[0])


def test_frame_shows_what_a_run_is_doing(tmp_path):
    rows = [metrics_row(step, **GPU, step_s=10 if step > 5 else 1000) for step in range(1, 21)]
    folder = write_run(tmp_path / "first", rows)
    lines = ["I train_grpo: measured after step 10: held-out reward 0.512", "W train_grpo: parse rate fell"]
    (folder / "training.log").write_text("".join(f"12:00:00 {line}\n" for line in lines))
    text = text_of(folder)
    words = ["20 of 30, about 2 min left", "0.500, mean of the last 10: 0.455", "0.90, clipped 0.10"]
    words += ["61.5 GiB", "measured after step 10: held-out", "parse rate fell"]
    assert [word for word in words if word not in text] == []
    text = text_of(write_run(tmp_path / "cpu", [metrics_row(1)]))
    assert "1 of 30, time left not known" in text
    assert not [word for word in ("GPU", "measured", "nan") if word in text]


def test_it_shows_how_busy_the_gpus_of_this_machine_are(tmp_path, monkeypatch):
    """Where nvidia-smi is there and works, and while the run goes on."""
    folder = write_run(tmp_path / "run", [metrics_row(1, **GPU)])
    for answer, expected in (
        ("echo '0, 97, 62976, 81559, 512.30, 61'; echo '1, 0, 0, 97871, [N/A], 30'", 2),
        ("echo 'Unable to determine the device handle'", 0),
        ("exit 9", 0),
    ):
        tools = write_commands(tmp_path / "bin", {"nvidia-smi": answer})
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        lines = [line for line in watch.frame(folder)[0] if " now " in line]
        assert len(lines) == expected, answer
        if lines:
            assert lines[0] == "GPU 0 now   97% busy, 61.5 of 79.6 GiB, 512.30 W, 61 C"
    write_commands(tmp_path / "bin", {"nvidia-smi": "echo '0, 97, 62976, 81559, 512.30, 61'"})
    assert " now " in text_of(folder)
    (folder / COMPLETE).write_text(json.dumps({"steps": 30}))
    assert " now " not in text_of(folder)


def test_it_waits_for_the_run_and_sees_its_end(tmp_path):
    folder = tmp_path / "run"
    assert watch.frame(folder) == ([f"{folder} does not exist yet: waiting for a run to make it"], False)
    folder.mkdir()
    assert watch.frame(folder) == ([f"{folder} holds no run (an OUTPUT_DIR): waiting for one"], False)
    write_run(folder, [])
    (folder / "metrics.csv").write_text("half a he")
    (folder / "settings.json").write_text('{"settings": {"TOTAL')
    assert text_of(folder) == "waiting for the first step"
    (folder / "metrics.csv").unlink()
    write_run(folder, [metrics_row(30)])
    assert "30 of 30, every step is done: evaluation and saving" in text_of(folder)
    for steps, is_complete in ((20, False), (30, True)):  # a part of the run that was resumed with TOTAL_STEPS=30
        (folder / COMPLETE).write_text(json.dumps({"steps": steps}))
        assert watch.frame(folder)[1] == is_complete == ("complete" in text_of(folder))


@pytest.mark.parametrize("name", ["TOTAL_STEPS", "EVAL_STEPS", "STEPS_PER_GENERATION", "NUM_ITERATIONS"])
@pytest.mark.parametrize("value", ["30 ", None, [], 0])
def test_a_setting_that_was_edited_ends_nothing(tmp_path, name, value):
    folder = write_run(tmp_path / "run", [metrics_row(step, step_s=10) for step in range(1, 21)])
    record = json.loads((folder / "settings.json").read_text())
    record["settings"][name] = value
    (folder / "settings.json").write_text(json.dumps(record))
    expected = "time left not known" if name == "TOTAL_STEPS" else "20 of 30, about 2 min left"
    assert expected in text_of(folder)
    (folder / COMPLETE).write_text(json.dumps({"steps": 30}))
    assert text_of(folder).startswith("step        20 of ") and "complete" in text_of(folder)


def test_a_run_whose_process_is_gone_says_so(tmp_path):
    """The lock tells; a copy of a run has none and says nothing."""
    folder = write_run(tmp_path / "run", [metrics_row(step) for step in range(1, 4)])
    assert "no process" not in text_of(folder), "no lock beside it"
    lock = lock_run(folder)
    assert "no process" not in text_of(folder) and lock_run(folder) is None
    lock.release()
    assert "no process is running; the same command starts at step 0: no checkpoint was saved" in text_of(folder)
    write_checkpoint(folder, 2, {})
    assert "3 of 30, no process is running; the same command continues from step 2" in text_of(folder)
    lock_run(folder).release()  # Watching does not keep the run from starting.


def test_news_are_the_last_ones_and_harmless(tmp_path):
    log = tmp_path / "training.log"
    assert watch.read_news(log) == []
    lines = [f"12:00:{i:02} {'WIEC'[i % 4]} train_grpo: line {i}\n  Traceback of it" for i in range(20)]
    log.write_text("\n".join(lines) + "\n12:01:00 W x: \x1b[2Jred\u51b7\n12:01:01 I W x", encoding="utf-8")
    expected = ["line 15", "line 16", "line 18", "line 19", " [2Jred\u51b7"]
    assert [line.split(": ")[1] for line in watch.read_news(log)] == expected
    log.write_text(f"12:01:02 W x: {banner_text('in a | box')}\n12:01:03 W x: a\n")
    assert [line.strip("| ") for line in watch.read_news(log)] == ["in a | box", "12:01:03 W x: a"]


def test_without_a_terminal_it_prints_one_picture(tmp_path, capsys):
    assert watch.main([str(write_run(tmp_path / "run", [metrics_row(1)]))]) == 0
    printed = capsys.readouterr().out
    assert printed.count("1 of 30") == 1 and "\x1b" not in printed


def test_in_a_terminal_it_follows_until_the_run_is_complete(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "run", [metrics_row(1)])
    changes = [lambda: write_run(folder, [metrics_row(2)]), lambda: (folder / COMPLETE).write_text('{"steps": 30}')]
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: changes.pop(0)())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert watch.main([str(folder)]) == 0
    pictures = capsys.readouterr().out.split(watch.CLEAR)[1:]
    assert ["2 of 30" in picture for picture in pictures] == [False, True, True]
    assert ["complete" in picture for picture in pictures] == [False, False, True]


def test_what_is_no_run_is_one_line_and_so_is_ctrl_c(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "run", [])
    with pytest.raises(InputError, match="is not a folder"):
        watch.main([str(folder / "metrics.csv")])
    (folder / "metrics.csv").write_text("a,b\n")
    with pytest.raises(InputError, match="no column `step`"):
        watch.main([str(folder)])
    monkeypatch.setattr(watch, "frame", mock.Mock(side_effect=KeyboardInterrupt))
    assert watch.main([str(folder)]) == 0 and "the run goes on" in capsys.readouterr().err
