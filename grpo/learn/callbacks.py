# SPDX-License-Identifier: Apache-2.0
"""What happens around each step: timing, stopping, the progress bar."""

from __future__ import annotations

import math
import time

import torch
from transformers.trainer_callback import ProgressCallback, TrainerCallback

from grpo.learn.context import RunContext


class Watch(TrainerCallback):
    """Callback: times each step, and stops after a checkpoint when the process is asked to end."""

    def __init__(self, run: RunContext):
        self.run = run

    def on_train_begin(self, args, state, control, **kwargs):
        state.save_steps = args.save_steps  # a resumed run may change it; the Trainer takes the checkpoint's

    def on_step_begin(self, args, state, control, **kwargs):

        self.run.seconds = dict.fromkeys(self.run.seconds, 0.0)
        self.run.step_started = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **kwargs):

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.run.step_seconds = time.perf_counter() - self.run.step_started
        if self.run.stop.signal:
            control.should_save = control.should_training_stop = True
        return control


class Bar(ProgressCallback):
    """The Trainer's progress bar with time left, showing reward and parse rate instead of every metric."""

    def __init__(self, run: RunContext):
        super().__init__()
        self.run = run

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        # A resumed run begins where it was: else the time left is computed from steps that took none.
        self.training_bar.initial = self.training_bar.n = self.training_bar.last_print_n = state.global_step
        self.current_step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and self.run.last:
            self.training_bar.set_postfix(
                reward=f"{math.nan if self.run.last['reward'] is None else self.run.last['reward']:.3f}",
                parse=f"{self.run.last['parse_rate']:.2f}",
            )
