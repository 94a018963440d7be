# SPDX-License-Identifier: Apache-2.0
"""Variants of a measurement, with processes that are pretended, and the record that every measurement writes."""

from __future__ import annotations

import subprocess
import sys

import bench
import pytest

from grpo.measure import record, rollout, variants

COMMAND = "rollout --model m --data d --set TOTAL_STEPS=2 --variant a-22@22 EXPERTS=shared --variant b EXPERTS=bf16"


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """`bench.py rollout` with two variants, of which those that `fails` names end with exit code 3: exit code, names
    and notes of the figures, the children that ran, and the GiB that were left to them."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*more, fails=()):
        children, left = [], []

        def process(command):
            monkeypatch.setattr(sys, "argv", command[1:])
            child = bench.parse_args()
            children.append(child.child)
            assert child.set == [("TOTAL_STEPS", "2")] and child.model == "m"
            if child.child in fails:
                return 3
            values = {"step_s": 2.0, "free": 22.0, "size": "12 x 8", "which": "mean"}
            variants.write_result(child, child.child, values)
            return 0

        monkeypatch.setattr(rollout, "occupy", left.append)
        monkeypatch.setattr(rollout, "run_child", process)
        out = ["--run", str(tmp_path / "run"), "--out", str(tmp_path / "out.json")]
        monkeypatch.setattr(sys, "argv", ["scripts/bench.py", *COMMAND.split(), *out, *more])
        code = bench.main()
        figures = record.read_json(tmp_path / "out.json").get("figures", [])
        return code, {row["name"]: row["note"] for row in figures}, children, left

    return run


def test_each_variant_runs_alone_and_one_that_fails_leaves_the_others(measure, capsys, monkeypatch):
    code, notes, children, left = measure()
    assert code == 0 and children == ["a-22", "b"] and left == [22.0] and list(notes) == ["a_22_step_s", "b_step_s"]
    assert notes["a_22_step_s"].startswith("12 x 8, TOTAL_STEPS=2, EXPERTS=shared, all but 22 GiB of the GPU occupied")
    code, notes, children, _ = measure(fails=("a-22",))
    assert code == 1 and children == ["a-22", "b"] and list(notes) == ["b_step_s"]
    assert "a-22 ended with exit code 3" in capsys.readouterr().err
    assert measure("--resume")[2] == ["a-22"], "which did not finish"
    assert measure("--resume")[2] == []
    assert measure("--resume", "--kernels", "older-cards")[2] == ["a-22", "b"], "another measurement"
    monkeypatch.setenv("BENCH_COMMIT", "c2")
    assert measure("--resume")[2] == ["a-22", "b"], "another commit"


REFUSED = [
    ("--variant b", "each needs a name of its own"),
    ("--variant c EXPERT=x", "EXPERT: no setting has this name"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_a_variant_that_cannot_run_is_refused_before_any_does(measure, capsys, words, message):
    with pytest.raises(SystemExit):
        measure(*words.split())
    assert message in capsys.readouterr().err


def test_the_command_names_no_folder_of_the_machine(monkeypatch):
    words = ["rollout", "--data", "/b/c d/*.csv,/e/f.csv", "runs/x", "A=/g/h"]
    monkeypatch.setattr(sys, "argv", ["/a/scripts/bench.py", *words])
    assert record.this_command() == "python scripts/bench.py rollout --data '*.csv,f.csv' runs/x A=h"


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
