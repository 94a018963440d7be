# SPDX-License-Identifier: Apache-2.0
"""What happens around each step: timing, stopping."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from transformers.trainer_callback import TrainerCallback

from grpo.preflight.machine import GIB
from grpo.run.signals import StopRequest


class StepTimerCallback(TrainerCallback):
    """Times each step and its parts, and ends training after a checkpoint when the process is asked to end."""

    def __init__(self, stop: StopRequest):
        self.stop = stop
        self.parts = {"rollout": 0.0, "reward": 0.0}  # seconds of this step
        self.started = self.seconds = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to a part of the step."""
        started = time.perf_counter()
        yield
        self.parts[name] += time.perf_counter() - started

    def figures(self) -> dict[str, float | None]:
        """Columns of metrics.csv: the times of the last step in seconds, and the most GPU memory in GiB."""
        cuda = torch.cuda.is_available()
        return {
            **{f"{name}_s": seconds for name, seconds in self.parts.items()},
            "learn_s": self.seconds - sum(self.parts.values()),
            "step_s": self.seconds,
            "gpu_peak_gib": torch.cuda.max_memory_allocated() / GIB if cuda else None,
        }

    def on_train_begin(self, args, state, control, **kwargs):
        state.save_steps = args.save_steps  # a resumed run may change it; the Trainer takes the checkpoint's

    def on_step_begin(self, args, state, control, **kwargs):
        self.parts = dict.fromkeys(self.parts, 0.0)
        self.started = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.started
        if self.stop.signal:
            control.should_save = control.should_training_stop = True
        return control
