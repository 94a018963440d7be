# SPDX-License-Identifier: Apache-2.0
"""Measures the duration of each step and its parts, and ends training when a signal asks for it."""

import contextlib
import time
from collections.abc import Iterator

import torch
from transformers.trainer_callback import TrainerCallback

from grpo.learn.distributed import sync_stop_signal
from grpo.process.ending import StopRequest
from grpo.process.ranks import Ranks
from grpo.rollout.engine import gpu_used_gib


class StepTimerCallback(TrainerCallback):
    """Times each step and its parts. After a signal to any process it saves a checkpoint and ends training."""

    def __init__(self, stop: StopRequest, ranks: Ranks):
        self.stop, self.ranks = stop, ranks
        self.parts = {"rollout": 0.0, "reward": 0.0}  # Seconds of each part of this step.
        self.started = self.seconds = 0.0
        self.used_gib = 0.0  # The highest use of the GPU that was read in this step.

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to the part `name` of the step."""
        started = time.perf_counter()
        yield
        self.parts[name] += time.perf_counter() - started

    def figures(self) -> dict[str, float | None]:
        """Columns of metrics.csv: the times of the last step in seconds, and the GPU's memory in GiB."""
        return {
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
        if signal := sync_stop_signal(self.ranks, self.stop.signal, kwargs["model"], state.global_step):
            self.stop.signal = signal
            control.should_save = control.should_training_stop = True
        return control
