# SPDX-License-Identifier: Apache-2.0
"""scripts/prove.py: rows, collected figures, a small proof."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import prove
import pytest
from conftest import CLEAN, ROOT

from grpo.measure.proof import run_settings
from grpo.measure.proof_data import SCALES, write_data
from grpo.model.checkpoint import check_checkpoint
from grpo.settings import load_settings


def test_training_rows_hold_short_hours_and_held_out_rows_are_as_they_come(tmp_path):
    write_data(tmp_path, dataclasses.replace(SCALES["mid"], train_windows=2, heldout_windows=2))

    def short(name: str) -> list[bool]:
        with (tmp_path / name).open(newline="", encoding="utf-8") as file:
            prompts = [row["prompt"] for row in csv.DictReader(file)]
        found = [re.search(r"energy \[kWh\]: (\d+).*?load=([\d.]+) kW", prompt, re.DOTALL) for prompt in prompts]
        return [float(match[2]) > float(match[1]) - 0.5 for match in found]  # the prompt rounds what is stored

    train, heldout = short("tes_train.csv"), short("tes_heldout.csv")
    assert len(heldout) == 60 and sum(heldout) < 12
    assert len(train) > 65 and all(train[60:]) and 0.28 < sum(train) / len(train) < 0.36


def policies(base: float, trained: float, unserved: float = 0.0) -> dict:
    """A closed_loop.json of three windows in which the two models emit so many kg, and the trained one leaves load."""
    windows = []
    for n in range(3):
        after = {"co2_kg": trained, "priced_kg": trained + n + 10 * unserved}
        windows.append(
            {"policies": {"base": {"mean": {"co2_kg": base, "priced_kg": base + 2 * n}}, "trained": {"mean": after}}}
        )
    totals = {
        name: {"co2_kg": 3 * kg, "unserved_kwh": 0.0, "regret_percent": kg}
        for name, kg in (("base", base), ("trained", trained))
    }
    totals["rule"] = {"co2_kg": 1, "unserved_kwh": 0, "regret_percent": None}
    return {"windows": windows, "totals": totals}


def finished(out: Path, gain: tuple[float, float, float], plant: dict) -> Path:
    run = out / "run"
    run.mkdir(parents=True)
    reward, low, high = gain
    evaluation = {
        "random": 0.25, "constant": 0.5, "oracle": 0.7, "before": {"reward": 0.4, "parse_rate": 0.9},
        "after": {"reward": 0.4 + reward, "parse_rate": 1.0},
        "difference": {"reward": reward, "reward_low": low, "reward_high": high},
    }  # fmt: skip
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    (run / "closed_loop.json").write_text(json.dumps(plant))
    (run / "report.html").write_text("<html>")
    (out / "command.txt").write_text(f"MODEL_ID={out}/model python train_grpo.py\n")
    return out


@pytest.mark.parametrize(
    ("gain", "plant", "code"),
    [
        ((0.1, 0.05, 0.15), policies(10, 8), 0),
        ((0.1, -0.01, 0.21), policies(10, 8), 1),  # within its interval
        ((0.1, 0.05, 0.15), policies(10, 10.5), 1),  # better on average, within its interval
        ((0.1, 0.05, 0.15), policies(10, 8, unserved=5.0), 1),  # saved by leaving load unserved
    ],
)
def test_collect_judges_by_intervals(tmp_path, monkeypatch, gain, plant, code):
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    out = finished(tmp_path / "proof", gain, plant)
    results = tmp_path / "results" / "proof.json"
    assert prove.main(["--out", str(out), "--stage", "collect", "--results", str(results)]) == code
    record = json.loads(results.read_text())
    assert record["commit"] == "abc"
    assert "--scale mid --out OUT" in record["command"]
    assert "MODEL_ID=OUT/model python train_grpo.py" in record["command"]
    named = {one["name"]: one["value"] for one in record["figures"]}
    assert "regret_percent_rule" not in named and named["regret_percent_base"] == 10
    assert named["reward_gain"] == gain[0] and named["co2_kg_trained"] == plant["totals"]["trained"]["co2_kg"]
    assert (results.parent / "proof-report.html").is_file()


def test_collect_without_a_run_says_what_to_do(tmp_path, capsys):
    assert prove.main(["--out", str(tmp_path), "--stage", "collect"]) == 2
    assert "--stage train" in capsys.readouterr().err


def test_full_prompts_need_a_tokenizer(tmp_path, capsys):
    assert prove.main(["--out", str(tmp_path), "--stage", "make"]) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_settings_on_the_command_line_win(tmp_path):
    options = prove.parse_args(["--out", str(tmp_path), "--set", "LEARNING_RATE=1e-3", "--set", "TOTAL_STEPS=7"])
    settings = run_settings(options, SCALES["mid"])
    assert settings["LEARNING_RATE"] == "1e-3" and settings["TOTAL_STEPS"] == "7" and settings["USE_VLLM"] == "1"
    _, _, problems = load_settings(settings)
    assert not problems
    with pytest.raises(SystemExit):
        prove.parse_args(["--out", "x", "--set", "nonsense"])


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_can_be_named_and_its_settings_are_read(name, tmp_path):
    options = prove.parse_args(["--out", str(tmp_path), "--scale", name, "--warmup-steps", "5"])
    assert options.steps == 5 and not load_settings(run_settings(options, SCALES[name]))[2]


@pytest.mark.slow
@pytest.mark.numeric
def test_a_small_proof_from_model_to_figures(tmp_path):
    """All stages on a CPU. Four steps need not improve anything: the exit code may be 0 or 1, the files must be
    there."""
    out, results = tmp_path / "proof", tmp_path / "proof.json"  # given relative to the current folder
    command = [sys.executable, str(ROOT / "scripts" / "prove.py"), "--out", "proof", "--scale", "small"]
    done = subprocess.run(
        [*command, "--results", "proof.json"], env=CLEAN, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    check_checkpoint(out / "model")
    warmup = json.loads((out / "model" / "warmup.json").read_text())
    stages = warmup["stages"]
    assert stages["stored"]["parse_rate"] > 0.5
    assert abs(warmup["loaded"]["reward"] - stages["stored"]["reward"]) < 0.05  # some of the rows, BF16 throughout
    named = {one["name"]: one["value"] for one in json.loads(results.read_text())["figures"]}
    kept = json.loads((ROOT / "docs" / "results" / "proof-h200-seed1.json").read_text())["figures"]
    assert {one["name"] for one in kept} <= named.keys(), "names in docs/results are an interface"
    assert named["steps"] == 4
    assert str(tmp_path) not in results.read_text() and "MODEL_ID=OUT/model" in results.read_text()
    # What is complete is not repeated.
    before = (out / "model" / "warmup.json").stat().st_mtime_ns
    again = subprocess.run(
        [*command, "--stage", "make"], env=CLEAN, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert again.returncode == 0 and (out / "model" / "warmup.json").stat().st_mtime_ns == before
