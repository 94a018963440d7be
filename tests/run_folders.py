# SPDX-License-Identifier: Apache-2.0
"""Writes folders as a run leaves them."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.common import Problems
from grpo.data.files import Row, data_fingerprint
from grpo.output.checkpoints import begin_checkpoint, finish_checkpoint
from grpo.output.folder import RunState, inspect_run
from grpo.output.layout import ADAPTER
from grpo.output.logs import COMPLETIONS, METRICS, CsvLog
from grpo.settings.table import Settings

ROW = Row("d.csv", 1, (("user", "x"),), (0.0, 1.0), {})
PER_STEP = 96  # completions of a step with default settings

EVAL = {"reward": 0.4, "reward_low": 0.37, "reward_high": 0.43, "regret": 0.3, "regret_low": 0.27, "regret_high": 0.33}
EVAL |= {"parse_rate": 0.99, "parse_rate_low": 0.98, "parse_rate_high": 1.0, "best_action_rate": 0.5, "unparsed": 1}
EVAL |= {"clipped_ratio": 0.01, "tokens_mean": 7.0, "tokens_max": 12, "action_counts": [5, 2, 2, 1]}

EVALUATION = {"random": 0.25, "constant": 0.5, "constant_action": 0, "oracle": 0.7, "samples": 8, "before": EVAL}
EVALUATION |= {"temperature": 0.5, "exact": False, "before_greedy": EVAL}
EVALUATION |= {"after": EVAL | {"reward": 0.6, "reward_low": 0.57, "reward_high": 0.63}}
EVALUATION |= {"difference": {"reward": 0.2, "reward_low": 0.15, "reward_high": 0.25}}


STEP = {"parse_rate": 0.9, "best_action_rate": 0.5, "clipped_ratio": 0.1, "tokens_mean": 50, "tokens_max": 99}
STEP |= {"zero_std_fraction": 0.1, "rollout_s": 2, "reward_s": 0.1, "learn_s": 3, "step_s": 5.1}
STEP |= {"rollout_tokens_per_s": 900}
GPU = {"entropy": 0.5, "logp_diff_mean": 0.02, "logp_diff_max": 0.9, "is_ratio_mean": 1.01, "wake_s": 0.4}
GPU |= {"handover_s": 0.1, "sleep_s": 0.1, "gpu_peak_gib": 61.5}
SETTINGS = {"TOTAL_STEPS": 30, "MODEL_ID": "tiny", "DATA": "/home/someone/days.csv", "EVAL_SAMPLES": 8}
SETTINGS |= {"PROMPTS_PER_STEP": 8, "NUM_GENERATIONS": 8}


def metrics_row(step: int, **cells: object) -> dict[str, object]:
    """A row of metrics.csv with plausible figures, and `cells` in their places."""
    time = f"2026-01-01T00:00:{step % 60:02}Z"
    return dict.fromkeys(METRICS, "") | {"step": step, "time": time, "reward": 0.3 + step / 100} | STEP | cells


def plant_record(*names: str) -> dict[str, Any]:
    """A closed_loop.json in which `names` ran beside the base, the trained model and the optimum."""
    totals = {}
    for place, name in enumerate(("base", "trained", "optimum", *names)):
        totals[name] = {"co2_kg": 100.0, "unserved_kwh": 7.0 * place, "storage_cycled_kwh": 5.0, "unparsed": 1}
        totals[name] |= {"answers": 90, "regret_percent": 20.0 - place, "regret_percent_low": 15.0}
        totals[name] |= {"regret_percent_high": 22.0, "unserved_windows": place, "worst_unserved_kwh": 6.5}
        totals[name]["worst_window"] = "days: 2025-07-07" if place else None
    return {"totals": totals, "difference": {"regret_percent": -9.0}, "windows": [{}] * 5}


def write_run(folder: Path, metrics: list[dict], completions: list[dict] | None = None, **files: dict) -> Path:
    """A run's folder: both logs, of which metrics and completions are rows, and JSON files by name, as `best/best`."""
    folder.mkdir(parents=True, exist_ok=True)
    CsvLog(folder / "metrics.csv", METRICS).write(metrics)
    if completions is not None:
        CsvLog(folder / "completions.csv", COMPLETIONS).write(completions)
    record = {"settings": SETTINGS, "machine": {"gpu": "", "cores": 2}}
    for name, content in ({"settings": record} | files).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_checkpoint(folder: Path, step: int, ends: Mapping[str, tuple[int, str]]) -> Path:
    """A checkpoint of a few bytes, which the run in `folder` can be continued from by its manifest."""
    checkpoint = folder / f"checkpoint-{step}"
    begin_checkpoint(checkpoint)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name in (ADAPTER, "optimizer.pt", "scheduler.pt"):
        (checkpoint / name).write_text(f"{name} of step {step}")
    finish_checkpoint(checkpoint, ends)
    return checkpoint


def write_steps(folder: Path, steps: Iterable[int], per_step: int, saved: Iterable[int]) -> None:
    """Rows of these steps in both logs, `per_step` completions each, and a checkpoint after those that are `saved`."""
    metrics, completions = CsvLog(folder / "metrics.csv", METRICS), CsvLog(folder / "completions.csv", COMPLETIONS)
    for step in steps:
        metrics.write([metrics_row(step)])
        completions.write([dict.fromkeys(COMPLETIONS, "x") | {"step": step, "reward": 0.5} for _ in range(per_step)])
        if step in saved:
            write_checkpoint(folder, step, {"metrics.csv": metrics.end, "completions.csv": completions.end})


def run_dir(tmp_path: Path, **changes: object) -> tuple[Settings, Path]:
    """A folder as a killed run leaves it: checkpoints of steps 2 and 4, one cut off at step 6, logs up to step 5."""
    settings = dataclasses.replace(Settings(OUTPUT_DIR=str(tmp_path / "run"), TOTAL_STEPS=8), **changes)
    folder = tmp_path / "run"
    folder.mkdir()
    record = {"settings": dataclasses.asdict(settings), "data_sha256": data_fingerprint([ROW])}
    (folder / "settings.json").write_text(json.dumps(record))
    write_steps(folder, range(1, 6), PER_STEP, saved=(2, 4))
    begin_checkpoint(folder / "checkpoint-6")
    (folder / "checkpoint-6" / "optimizer.pt").write_text("{}")
    return settings, folder


def inspect(settings: Settings, rows: Sequence[Row] = (ROW,), **changes: object) -> tuple[RunState, Problems]:
    """The state of OUTPUT_DIR, and its problems, with changed settings."""
    problems = Problems()
    return inspect_run(dataclasses.replace(settings, **changes), rows, problems), problems
