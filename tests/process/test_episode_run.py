# SPDX-License-Identifier: Apache-2.0
"""A run with ENVIRONMENT as a user starts it: its logs, and that it goes on in the middle of a rollout."""

import csv
import io
import json
import signal

import ask
import pytest
import watch
from helpers import read_csv, run_script
from runs import assert_same_run, environment, finish, go_on, has_line, start_held, wait_until

from grpo.output.checkpoints import ROLLOUT
from grpo.output.logs import EPISODE_COLUMNS, EPISODE_METRICS


@pytest.fixture
def settings(tmp_path):
    """A rollout feeds three steps. The tiny model answers without a call, in a prompt that the reset has completed."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Add numbers.", "target": n}) + "\n" for n in range(6)))
    return {
        "DATA": data, "ENVIRONMENT": "worlds:Paid", "REWARDS": "environment,paused:hold", "NUM_ITERATIONS": 3,
        "MAX_PROMPT_LEN": 900, "MAX_COMPLETION_LEN": 200, "EVAL_DATA": data, "TOTAL_STEPS": 6,
    }  # fmt: skip


def test_a_run_goes_on_in_the_middle_of_a_rollout(tmp_path, settings, capsys, forked_description):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    run_script(**environment(whole, **settings))
    process = start_held(folder, 3, **settings)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: has_line(folder), process)
    go_on(folder)
    finish(process)
    assert process.returncode == 143 and (folder / "checkpoint-4" / ROLLOUT).is_file()
    run_script(**environment(folder, **settings))
    assert_same_run(folder, whole)
    metrics, completions = read_csv(whole / "metrics.csv"), read_csv(whole / "completions.csv")
    assert list(metrics[0])[-len(EPISODE_METRICS) :] == list(EPISODE_METRICS)
    assert list(completions[0])[-len(EPISODE_COLUMNS) :] == list(EPISODE_COLUMNS)
    assert json.loads(metrics[0]["ends"]) == {"answer": 12} and metrics[0]["turns_mean"] == "1"
    assert {row["end"] for row in completions} == {"answer"} and float(completions[0]["tool_s"]) > 0
    capsys.readouterr()
    assert watch.main([str(whole)]) == 0
    assert 'ends        {"answer": 12}' in capsys.readouterr().out
    assert ask.main([str(whole), "--csv", str(settings["DATA"])]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["target"], row["end"], row["reward"]) for row in rows[:2]] == [
        ("0", "answer", "0.0"),
        ("1", "answer", "-0.1"),
    ]
    assert all(row["completion"].startswith("<|start|>assistant<|channel|>final") for row in rows)
    report = (whole / "report.html").read_text()
    assert "An episode of the first step" in report and "end: answer" in report
