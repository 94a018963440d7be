# SPDX-License-Identifier: Apache-2.0
"""Following a run in the terminal. Run: python -m pytest tests/evaluate/test_watch.py"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pandas
import pytest
import watch
from conftest import CLEAN, ROOT
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_folders import EVALUATION, GPU, metrics_row, write_checkpoint, write_run

from grpo.evaluate.run_data import number
from grpo.run.durable import write_text
from grpo.run.folder import COMPLETE
from grpo.run.logs import METRICS, banner_text
from grpo.run.place import lock_run

SCRIPT = ROOT / "scripts" / "watch.py"


def drawn(state: watch.State, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(watch.frame(state))
    return console.file.getvalue()


def state_of(rows: list[dict], **values: object) -> watch.State:
    """A state of rows as read_metrics gives them, 12 s after the last one."""
    read = [{name: number(cell) for name, cell in row.items()} for row in rows]
    defaults = {"folder": "first", "total": 30, "ago": 12.0}
    return watch.State(metrics=pandas.DataFrame(read, columns=list(METRICS)), **(defaults | values))


def test_frame_shows_what_a_run_is_doing():
    rows = [
        metrics_row(step, **GPU, step_s=10 if step > 5 else 1000, eval_s=40 if step == 9 else "")
        for step in range(1, 21)
    ]
    text = drawn(state_of(rows, warnings=["12:00:00 W train_grpo: parse rate fell"], eval_steps=25))
    for words in ("first", "20/30", "about 3 min left, until", "last step 12.0 s ago", "0.500   mean of the last 10: 0.455", "0.90   clipped 0.10", "900 tokens/s", "61.5 GiB, most so far 61.5 GiB   busy 87 % of the step", "generation 1.4 s", "handover 0.1 s", "0.0200 nats", "W train_grpo: parse rate fell"):  # fmt: skip
        assert words in text, (words, text)
    assert watch.sparkline(state_of(rows).metrics["reward"]) in text
    high, low = ([row | {"parse_rate": rate} for row in rows] for rate in (1.0, 0.02))
    assert watch.BLOCKS[-1] * 20 in drawn(state_of(high)) and watch.BLOCKS[0] * 20 in drawn(state_of(low)), (
        "from 0 to 1"
    )
    assert "complete" not in text and "held-out" not in text
    rows[9] |= {"heldout_reward": 0.512, "plant_regret": 12.34, "plant_unserved_kwh": 1.5}
    words = "after step 10: held-out reward 0.512   plant regret 12.3 %, unserved 1.5 kWh"
    assert words in drawn(state_of(rows)) and "held-out" not in drawn(state_of(rows[:9]))
    rows[9] |= {"plant_regret": "", "plant_unserved_kwh": ""}
    assert "after step 10: held-out reward 0.512" in drawn(state_of(rows)) and "plant" not in drawn(state_of(rows))


def test_its_lines_fit_100_columns():
    """Of a long run with large figures: nothing is broken at that width."""
    slow = {name: 934.5 for name in ("rollout_s", "learn_s", "step_s")} | {"wake_s": 12.3, "handover_s": 12.3, "sleep_s": 12.3, "reward_s": 12.3}  # fmt: skip
    long = {"tokens_mean": 12345, "tokens_max": 131072, "rollout_tokens_per_s": 12345}
    found = {"heldout_reward": -1.234, "plant_regret": 234.5, "plant_unserved_kwh": 34.5, "eval_s": 3600}
    rows = [metrics_row(step, **GPU | slow | long | found) for step in range(101, 111)]
    for state in (state_of(rows, total=200, ago=7200.0), state_of(rows, total=200, **ENDED)):
        narrow, wide = ([line.rstrip() for line in drawn(state, width).splitlines()] for width in (100, 300))
        assert narrow == wide and any("plant regret 234.5 %" in line for line in wide)


ENDED = {"said": watch.DONE, "evaluation": EVALUATION}
SAVING = {"said": "every step is done: evaluation and saving"}


@pytest.mark.parametrize(
    "row, state, words, absent",
    [
        (
            metrics_row(30),
            ENDED,
            ["30/30   complete", "0.600 (0.570 to 0.630)", "base model, greedy", "always [0]", "oracle"],
            ["left"],
        ),
        (metrics_row(30), {"said": watch.DONE}, ["complete"], ["held-out"]),  # EVAL_SAMPLES=0
        (metrics_row(30), SAVING, ["evaluation and saving   last step 12.0 s ago"], ["left"]),
        (metrics_row(1), {}, ["1/30"], ["GPU", "nats", "wake"]),  # a CPU run
        (
            dict.fromkeys(METRICS, "") | {"step": 1},
            {"total": None, "ago": math.nan},
            ["1/?", "time left not known"],
            [],
        ),
        (None, {"said": "waiting: no metrics.csv"}, ["waiting: no metrics.csv"], []),
    ],
)
def test_frame_shows_what_is_known_and_no_more(row, state, words, absent):
    text = drawn(state_of([row] if row else [], **state), width=80 if "evaluation" in state else 100)
    assert not [word for word in words if word not in text] and not [word for word in [*absent, "nan"] if word in text]


def test_frame_takes_markup_from_files_as_text():
    state = state_of([metrics_row(1)], folder="[bold]run[/bold]", warnings=["[red]x[/red] [/]"], evaluation=EVALUATION | {"constant_action": "[/]"}, said=watch.DONE)  # fmt: skip
    text = drawn(state)
    assert "[bold]run[/bold]" in text and "[red]x[/red] [/]" in text and "always [[/]]" in text


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=200), st.integers(1, 60))
def test_sparkline_fits_and_keeps_the_order(values, width):
    line = watch.sparkline(pandas.Series(values, dtype=float), width)
    assert len(line) <= min(width, len(values)) and set(line) <= set(watch.BLOCKS + " ")
    if len(values) <= width:
        assert all(low <= high for (a, low), (b, high) in pairwise(zip(values, line, strict=True)) if a <= b)


def test_reader_waits_for_the_run(tmp_path):
    folder = tmp_path / "run"
    assert "there is no run in this folder yet" in watch.read_state(folder).said
    write_run(folder, [])
    state = watch.read_state(folder)
    assert state.said == "waiting: the first step has not ended yet" and state.total == 30
    (folder / "metrics.csv").unlink()
    assert "the run is starting" in watch.read_state(folder).said
    (folder / "metrics.csv").write_text("half a he")
    assert watch.read_state(folder).said == "waiting: the first step has not ended yet"
    (folder / "metrics.csv").write_text("a,b\n")
    assert "no column `step`" in watch.read_state(folder).said
    (folder / "settings.json").write_text('{"settings": {"TOTAL')
    assert watch.read_state(folder).total is None
    (folder / "metrics.csv").unlink()
    write_run(folder, [metrics_row(20)])
    for steps, complete in ((20, False), (30, True)):  # a part of the run that was resumed with TOTAL_STEPS=30
        (folder / COMPLETE).write_text(json.dumps({"steps": steps}))
        assert (watch.read_state(folder).said == watch.DONE) == complete


def test_a_run_whose_process_is_gone_says_so(tmp_path):
    """The lock tells, also before the first step; a complete run, and a copy without the lock, say nothing."""
    folder = write_run(tmp_path / "run", [metrics_row(step) for step in range(1, 4)])
    assert "no process" not in watch.read_state(folder).said, "no lock beside it"
    lock = lock_run(folder)
    assert "no process" not in watch.read_state(folder).said and lock_run(folder) is None
    lock.release()
    words = "no process is running; the same command starts at step 0: no checkpoint was saved"
    assert watch.read_state(folder).said == words
    write_checkpoint(folder, 2, {})
    words = "no process is running; the same command continues from step 2"
    text = drawn(watch.read_state(folder), width=120)
    assert words in text and "3/30" in text and "left" not in text
    (folder / "metrics.csv").unlink()
    text = drawn(watch.read_state(folder))
    assert words in text and "waiting" not in text
    (folder / COMPLETE).write_text('{"steps": 30}')
    assert "no process" not in watch.read_state(folder).said
    lock = lock_run(folder)
    assert lock, "watching does not keep the run from starting"
    lock.release()


def test_warnings_are_the_last_ones_and_harmless(tmp_path):
    log = tmp_path / "training.log"
    assert watch.read_warnings(log) == []
    lines = [f"12:00:{i:02} {'WIEC'[i % 4]} train_grpo: line {i}\n  Traceback of it" for i in range(20)]
    log.write_text("\n".join(lines) + "\n12:01:00 W x: \x1b[2Jred\u51b7\n12:01:01 I W x", encoding="utf-8")
    found = watch.read_warnings(log)
    assert [line.split(": ")[1] for line in found] == ["line 16", "line 18", "line 19", " [2Jred\u51b7"]
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n12:01:02 W train_grpo: {banner_text('in a | box')}\n12:01:03 W train_grpo: plain\n| no box |\n")
    assert [line[9:] for line in watch.read_warnings(log)][-2:] == ["W train_grpo: in a | box", "W train_grpo: plain"]


@pytest.mark.parametrize("terminal", [False, True])
def test_follow_survives_a_new_run_and_ends_when_it_is_complete(tmp_path, terminal):
    folder, output = tmp_path / "run", io.StringIO()
    console = Console(file=output, width=100, force_terminal=terminal, color_system=None)
    watching = threading.Thread(target=watch.follow, args=(folder, console, 0.01), daemon=True)
    watching.start()

    def wait_for(words: str) -> None:
        while words not in output.getvalue():  # pytest's own limit ends it
            assert watching.is_alive(), output.getvalue()[-2000:]
            time.sleep(0.01)

    wait_for("there is no run in this folder yet")
    write_run(folder, [metrics_row(1), metrics_row(2)])
    wait_for("2/30")
    shutil.rmtree(folder)
    write_run(folder, [metrics_row(step) for step in range(1, 31)], evaluation=EVALUATION)
    wait_for("30/30")
    assert "held-out" not in output.getvalue()
    write_text(folder / COMPLETE, json.dumps({"steps": 30}))
    watching.join()
    assert "held-out reward" in output.getvalue()


def test_once_shows_one_picture_and_a_file_is_no_folder(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [metrics_row(1), metrics_row(2)], evaluation=EVALUATION)
    assert watch.main([str(folder), "--once"]) == 0 and capsys.readouterr().out.count("2/30") == 1
    assert watch.main([str(folder / "metrics.csv")]) == 2 and "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_prints_plain_text_into_a_pipe_until_ctrl_c(tmp_path, encoding):
    folder = write_run(tmp_path / "run", [metrics_row(1)])
    (folder / "training.log").write_text("12:00:00 W x: \u51b7" + "long " * 60, encoding="utf-8")
    command, environ = [sys.executable, str(SCRIPT), str(folder)], CLEAN | {"PYTHONIOENCODING": encoding}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        shown = b""
        while b"long" not in shown:
            assert watching.poll() is None
            shown += watching.stdout.readline()
        os.kill(watching.pid, signal.SIGINT)
        _, errors = watching.communicate()
    assert b"1/30" in shown and b"\x1b" not in shown
    assert watching.returncode == 0 and b"the run goes on" in errors and b"Traceback" not in errors
