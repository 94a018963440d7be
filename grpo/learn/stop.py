# SPDX-License-Identifier: Apache-2.0
"""Ends training after the step in which a signal came."""

from transformers.trainer_callback import TrainerCallback

from grpo.learn.distributed import sync_stop_signal
from grpo.process.ending import StopRequest
from grpo.process.ranks import Ranks


class StopCallback(TrainerCallback):
    """After a signal to any process it lets all of them save a checkpoint and end training; what signals mean is said
    in grpo/process/ending.py."""

    def __init__(self, stop: StopRequest, ranks: Ranks):
        self.stop, self.ranks = stop, ranks

    def on_step_end(self, args, state, control, **kwargs):
        if signal := sync_stop_signal(self.ranks, self.stop.signal, kwargs["model"], state.global_step):
            self.stop.adopt(signal)
            control.should_save = control.should_training_stop = True
        return control
