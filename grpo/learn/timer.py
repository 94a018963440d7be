# SPDX-License-Identifier: Apache-2.0
"""How long a step and its parts take, how busy the GPU is meanwhile, and whether it is the last step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from statistics import fmean

import torch
from transformers.trainer_callback import TrainerCallback

from grpo.rollout.engine import gpu_used_gib
from grpo.run.ending import StopRequest

SAMPLE_S = 0.5  # Seconds between two samples of the GPU's utilization.


class StepTimerCallback(TrainerCallback):
    """Times each step and its parts, and ends training after a checkpoint when a signal asks the run to end.

    `sync_signal` takes the signal of this process and the model, and returns the signal of any process.
    """

    def __init__(self, stop: StopRequest, sync_signal: Callable[[int, torch.nn.Module], int]):
        self.stop, self.sync_signal = stop, sync_signal
        self.parts = {"rollout": 0.0, "reward": 0.0}  # Seconds of this step by its parts.
        self.started = self.seconds = 0.0
        self.used_gib = 0.0  # The highest use of the GPU that was read in this step.
        self.utilizations: list[float] = []  # Samples of this step, in percent.
        self.utilization: float | None = None  # The mean of the last step, in percent; None without samples.
        self.ended = threading.Event()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to a part of the step."""
        started = time.perf_counter()
        yield
        self.parts[name] += time.perf_counter() - started

    def sample_utilization(self, device: int) -> None:
        """Reads every SAMPLE_S seconds the share of time in which the GPU computed anything, until training has ended.
        Reads nothing where NVML does not answer: its package comes with vLLM, and not every driver fits."""
        with contextlib.suppress(Exception):
            while not self.ended.wait(SAMPLE_S):
                self.utilizations.append(torch.cuda.utilization(device))

    def figures(self) -> dict[str, float | None]:
        """Columns of metrics.csv: the times of the last step in seconds, the GPU's memory in GiB, its utilization."""
        return {
            **{f"{name}_s": seconds for name, seconds in self.parts.items()},
            "learn_s": self.seconds - sum(self.parts.values()),
            "step_s": self.seconds,
            "gpu_peak_gib": self.used_gib or None,
            "gpu_utilization": self.utilization,
        }

    def on_train_begin(self, args, state, control, **kwargs):
        state.save_steps = args.save_steps  # The Trainer would ignore that a resumed run changes SAVE_STEPS.
        if torch.cuda.is_available():
            device = torch.cuda.current_device()
            threading.Thread(target=self.sample_utilization, args=[device], daemon=True).start()

    def on_train_end(self, args, state, control, **kwargs):
        self.ended.set()

    def on_step_begin(self, args, state, control, **kwargs):
        self.parts = dict.fromkeys(self.parts, 0.0)
        self.used_gib = 0.0
        self.utilizations = []  # This drops samples taken between the steps, in an evaluation.
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.started
        self.utilization = fmean(self.utilizations) if self.utilizations else None
        # torch keeps the memory of learning until the engine wakes, so this reads its peak.
        self.used_gib = max(self.used_gib, gpu_used_gib())
        if signal := self.sync_signal(self.stop.signal, kwargs["model"]):
            self.stop.signal = signal
            control.should_save = control.should_training_stop = True
        return control
