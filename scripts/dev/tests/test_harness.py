# SPDX-License-Identifier: Apache-2.0
"""The processes of a measurement, which are pretended, and the record that every measurement writes."""

import json
import subprocess
import sys

import bench
import pytest

from scripts.dev import record, rollout

COMMAND = "rollout --model m --data d --set TOTAL_STEPS=2 --free-gib 22"


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch, code):
    """Pretended here: it is told what this process was told, and nothing is written where it fails."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")

    def process(command):
        monkeypatch.setattr(sys, "argv", command[1:])
        child = bench.parse_args()
        assert (child.child, child.set, child.model) == (True, [("TOTAL_STEPS", "2")], "m")
        if code == 0:
            values = {"step_s": 2.0, "free": 22.0, "size": "12 x 8", "averaged": "mean"}
            rollout.child_path(child).write_text(json.dumps(values))
        return code

    left: list[float] = []
    monkeypatch.setattr(rollout, "occupy", left.append)
    monkeypatch.setattr(rollout, "run_child", process)
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", *COMMAND.split(), "--run", f"{tmp_path}/run", "--out", str(out)])
    assert bench.main() == code and left == [22.0]
    notes = [row["note"] for row in record.read_json(out).get("figures", [])]
    words = "12 x 8, TOTAL_STEPS=2, all but 22 GiB of the GPU occupied: mean"
    assert notes == ([words] if code == 0 else [])


def test_a_setting_that_does_not_exist_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", *COMMAND.split(), "--out", "o", "--set", "EXPERT=x"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "EXPERT: no setting has this name" in capsys.readouterr().err


def test_the_command_names_no_folder_of_the_machine(monkeypatch):
    words = ["rollout", "--data", "/b/c d/*.csv,/e/f.csv", "runs/x", "A=/g/h"]
    monkeypatch.setattr(sys, "argv", ["/a/scripts/dev/bench.py", *words])
    assert record.this_command() == "python scripts/dev/bench.py rollout --data '*.csv,f.csv' runs/x A=h"


def test_results_make_no_commit_dirty_and_code_does(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    for words in ("init -q", "-c user.name=a -c user.email=a@b.c commit -q --allow-empty -m a"):
        subprocess.run(["git", "-C", tmp_path, *words.split()], check=True)
    (tmp_path / "docs" / "results" / "a.json").touch()
    clean = record.commit()
    assert len(clean) == 40
    (tmp_path / "code.py").touch()
    assert record.commit() == clean + "-dirty"
