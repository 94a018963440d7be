# SPDX-License-Identifier: Apache-2.0
"""What the parts of the trainer share during a run."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import rewards
from grpo.data.files import Row, reward_columns
from grpo.data.scoring import Completion, completion_rates
from grpo.preflight.machine import GIB
from grpo.preflight.memory import Plan
from grpo.rollout.engine import Engine
from grpo.run.logs import COMPLETIONS, METRICS, WARN_EVERY, CsvLog, parse_rate_warning, reward_warning
from grpo.run.signals import StopRequest
from grpo.settings import Settings, log


class RunContext:
    """What the parts of the trainer share: rows, plan, timers and the logs of OUTPUT_DIR."""

    def __init__(
        self,
        settings: Settings,
        rows: list[Row],
        plan: Plan,
        folder: Path,
        attention: str,
        packing: str,
        stop: StopRequest,
    ):
        self.settings, self.rows, self.plan, self.folder = settings, rows, plan, folder
        self.attention, self.packing, self.stop = attention, packing, stop
        self.metrics = CsvLog(self.folder / "metrics.csv", METRICS)
        self.completions = CsvLog(self.folder / "completions.csv", COMPLETIONS)
        # TRL asks the first completion for the columns: every row gets those of every file.
        self.actions = max(len(row.rewards) for row in rows)
        self.empty_columns = {name: None for row in rows for name in reward_columns(row, self.actions)}
        self.seconds = {"rollout": 0.0, "reward": 0.0}
        self.stream = "train"  # or `evaluation`, or `base`: an evaluation without the adapter
        self.engine: Engine | None = None
        self.parity: list[dict[str, Any]] = []
        self.started = time.time()
        self.rollout_tokens = 0
        self.rollout: dict[str, float] = {}
        self.step_started = self.step_seconds = 0.0
        with (self.folder / "metrics.csv").open(newline="", encoding="utf-8") as file:  # of a resumed run
            rows_before = list(csv.DictReader(file))
        self.parse_history = [float(row["parse_rate"]) for row in rows_before]
        self.reward_history = [
            (float(row["reward"] or "nan"), float(row["zero_std_fraction"] or "nan")) for row in rows_before
        ]
        self.warned_at: dict[Callable[..., Any], int] = {}
        self.last: dict[str, Any] = {}

    def record_rollout(self, step: int, read: Sequence[Completion], totals: Sequence[float]) -> None:
        """Write a step's completions and remember its rates."""
        best = [rewards.best_action(one.row.rewards) if one.row.rewards else None for one in read]
        self.completions.write(
            {
                "step": step,
                "prompt_id": one.row.id,
                "completion": one.text,
                "parsed_action": "" if one.action is None else one.action,
                "reward": f"{total:.6g}",
                "best_action": "" if k is None else k,
                "tokens": one.tokens,
                "truncated": int(one.truncated),
            }
            for one, total, k in zip(read, totals, best, strict=True)
        )
        self.rollout = completion_rates(read)

    def record_step(self, step: int, logs: Mapping[str, Any]) -> None:
        """Write a step's row of metrics.csv and a line of training.log, and warn when answers stop parsing or rewards stop
        teaching."""
        seconds = {name: self.seconds[name] for name in self.seconds}
        row: dict[str, Any] = {
            "step": step,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "reward": logs.get("reward"),
            "reward_std": logs.get("reward_std"),
            "zero_std_fraction": logs.get("frac_reward_zero_std"),
            **self.rollout,
            "loss": logs.get("loss"),
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
            "kl": logs.get("kl"),
            "entropy": logs.get("entropy"),
            "clip_fraction": logs.get("clip_ratio/region_mean"),
            "logp_diff_mean": logs.get("sampling/sampling_logp_difference/mean"),
            "logp_diff_max": logs.get("sampling/sampling_logp_difference/max"),
            "is_ratio_mean": logs.get("sampling/importance_sampling_ratio/mean"),
            **{
                f"{name}_s": self.engine.seconds[name] if self.engine else None
                for name in ("wake", "handover", "sleep")
            },
            "rollout_s": seconds["rollout"],
            "reward_s": seconds["reward"],
            "learn_s": self.step_seconds - sum(seconds.values()),
            "step_s": self.step_seconds,
            "rollout_tokens_per_s": self.rollout_tokens / max(seconds["rollout"], 1e-9),
            "gpu_peak_gib": torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None,
        }
        formatted = {k: "" if v is None else f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
        self.metrics.write([formatted])
        self.last = row
        self.parse_history.append(row["parse_rate"])
        message = "step %d/%d: reward %s, parse rate %.2f, clipped %.2f, %.0f tokens, %.1f s (rollout %.1f, learn %.1f)"
        reward, total = formatted["reward"] or "nan", self.settings.TOTAL_STEPS
        log.info(message, step, total, reward, row["parse_rate"], row["clipped_ratio"], row["tokens_mean"], row["step_s"], row["rollout_s"], row["learn_s"])  # fmt: skip
        self.reward_history.append(
            tuple(math.nan if row[name] is None else row[name] for name in ("reward", "zero_std_fraction"))
        )
        for warn, history in ((parse_rate_warning, self.parse_history), (reward_warning, self.reward_history)):
            if step - self.warned_at.get(warn, -WARN_EVERY) >= WARN_EVERY and (warning := warn(history)):
                self.warned_at[warn] = step
                log.warning(warning)
