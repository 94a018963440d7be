# SPDX-License-Identifier: Apache-2.0
"""Run folders as a run leaves them, written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from grpo.run.logs import COMPLETIONS, METRICS, CsvLog

EVAL = {"reward": 0.4, "reward_low": 0.37, "reward_high": 0.43, "regret": 0.3, "regret_low": 0.27, "regret_high": 0.33, "parse_rate": 0.99, "parse_rate_low": 0.98, "parse_rate_high": 1.0, "best_action_rate": 0.5, "clipped_ratio": 0.01, "tokens_mean": 7.0, "tokens_max": 12, "action_counts": [5, 2, 2, 1], "unparsed": 1}  # fmt: skip

EVALUATION = {"random": 0.25, "constant": 0.5, "constant_action": 0, "oracle": 0.7, "samples": 8, "before": EVAL}
EVALUATION |= {"temperature": 0.5, "exact": False, "before_greedy": EVAL}
EVALUATION |= {"after": EVAL | {"reward": 0.6, "reward_low": 0.57, "reward_high": 0.63}}
EVALUATION |= {"difference": {"reward": 0.2, "reward_low": 0.15, "reward_high": 0.25}}


def metrics_row(step: int, **cells: object) -> dict[str, object]:
    row = dict.fromkeys(METRICS, "") | {"step": step, "time": f"2026-01-01T00:00:{step % 60:02}Z"}
    row |= {"reward": 0.3 + step / 100, "parse_rate": 0.9, "best_action_rate": 0.5, "clipped_ratio": 0.1, "tokens_mean": 50, "tokens_max": 99, "zero_std_fraction": 0.1, "rollout_s": 2, "reward_s": 0.1, "learn_s": 3, "step_s": 5.1, "rollout_tokens_per_s": 900}  # fmt: skip
    return row | cells


GPU = {"entropy": 0.5, "logp_diff_mean": 0.02, "logp_diff_max": 0.9, "is_ratio_mean": 1.01, "wake_s": 0.4, "handover_s": 0.1, "sleep_s": 0.1, "gpu_peak_gib": 61.5, "gpu_utilization": 87.4}  # fmt: skip


def write_run(folder: Path, metrics: list[dict], completions: list[dict] | None = None, **files: dict) -> Path:
    """A run's folder with the logs as the run writes them, and JSON files by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    CsvLog(folder / "metrics.csv", METRICS).write(metrics)
    if completions is not None:
        CsvLog(folder / "completions.csv", COMPLETIONS).write(completions)
    record = {"settings": {"TOTAL_STEPS": 30, "MODEL_ID": "tiny", "DATA": "/home/someone/days.csv", "EVAL_SAMPLES": 8, "PROMPTS_PER_STEP": 8, "NUM_GENERATIONS": 8}, "machine": {"gpu": "", "cores": 2}}  # fmt: skip
    for name, content in ({"settings": record} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
