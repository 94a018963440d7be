# SPDX-License-Identifier: Apache-2.0
"""Measures the duration of each step and its parts."""

import contextlib
import time
from collections.abc import Iterator

import torch
from transformers.trainer_callback import TrainerCallback

from grpo.rollout.engine import Engine, gpu_used_gib


class StepTimerCallback(TrainerCallback):
    """Times each step and its parts."""

    def __init__(self) -> None:
        self.parts = {"rollout": 0.0, "reward": 0.0}  # Seconds of each part of this step.
        self.started = self.seconds = 0.0
        self.used_gib = 0.0  # The highest use of the GPU that was read in this step.
        self.rollout_tokens = 0  # Tokens of the last rollout.

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to the part `name` of the step."""
        started = time.perf_counter()
        yield
        self.parts[name] += time.perf_counter() - started

    def figures(self, engine: Engine | None, is_direct: bool) -> dict[str, float | None]:
        """Columns of metrics.csv about the last step: times in seconds, the GPU's memory in GiB, and what the `engine`
        reports of a rollout."""
        rollout_s, figures = self.parts["rollout"], {}
        for name in ("wake", "handover", "sleep"):
            seconds = engine.seconds[name] if engine and rollout_s else 0.0
            figures[f"{name}_s"] = seconds if engine else None
        figures["sync_share"] = engine.sync_share[0] if engine and engine.sync_share else None
        has_speed = rollout_s and not is_direct
        figures["rollout_tokens_per_s"] = self.rollout_tokens / rollout_s if has_speed else None
        return figures | {
            **{f"{name}_s": seconds for name, seconds in self.parts.items()},
            "learn_s": self.seconds - sum(self.parts.values()),
            "step_s": self.seconds,
            "gpu_peak_gib": self.used_gib or None,
        }

    def on_train_begin(self, args, state, control, **kwargs):
        state.save_steps = args.save_steps  # transformers would keep the SAVE_STEPS of the run that is resumed.

    def on_step_begin(self, args, state, control, **kwargs):
        self.parts = dict.fromkeys(self.parts, 0.0)
        self.used_gib = 0.0
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.started
        # torch frees learning's blocks only when the engine wakes, so the current use is the peak of learning.
        self.used_gib = max(self.used_gib, gpu_used_gib())
