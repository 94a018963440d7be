# SPDX-License-Identifier: Apache-2.0
"""Lets a run's model act in the simulator of its task, before, during and after training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo.evaluate.models import EvaluatedModel, TrainedModel
from grpo.learn.trainer import Trainer
from grpo.phases import Phase
from grpo.preflight.resolve import ResolvedRun
from grpo.run.durable import is_intact, read_sealed, write_sealed
from grpo.settings import log
from grpo.tasks.simulator import GREEDY, Record, Simulator

CLOSED_LOOP = "closed_loop.json"


class ModelResponder:
    """A model in the form that simulators call (`grpo.tasks.simulator.Responder`); `base` turns its adapter off."""

    def __init__(self, model: EvaluatedModel, base: bool):
        self.model, self.base = model, base

    def texts(self, prompts: Sequence[str], moment: int, greedy: bool) -> list[str]:
        """A completion of each prompt, sampled with a seed that depends on `moment`."""
        # Step 0 seeds the answers to held-out rows, so moment 0 is step 1.
        ids = self.model.complete(prompts, 1, moment + 1, greedy, self.base)
        return self.model.tokenizer.batch_decode(ids, skip_special_tokens=False)

    def probabilities(self, prompts: Sequence[str], greedy: bool, actions: int) -> np.ndarray:
        return self.model.probabilities(prompts, actions, greedy, self.base)


def new_record(simulator: Simulator, resolved: ResolvedRun, trainer: Trainer) -> Record:
    """A new closed_loop.json, with the base model's figures if the file has them from the same measurement."""
    s, path = resolved.settings, trainer.run.folder / CLOSED_LOOP
    record = simulator.new_record(resolved.closed_loop, s, s.EVAL_SAMPLES, resolved.exact_loop)
    if is_intact(path):
        simulator.keep_base(record, read_sealed(path))
    return record


def measure_progress(simulator: Simulator, resolved: ResolvedRun, trainer: Trainer) -> Record:
    """Measure the current adapter, without greedy answers. Returns the record, which is not written to a file."""
    record = new_record(simulator, resolved, trainer)
    simulator.run(resolved.closed_loop, record, "trained", ModelResponder(TrainedModel(trainer), False), greedy=False)
    return record


def measure_simulation(simulator: Simulator, resolved: ResolvedRun, trainer: Trainer, base: bool) -> Record:
    """Measure the base model or the trained adapter; write closed_loop.json and return it. A resumed run keeps the base
    model's figures."""
    name, record = "base" if base else "trained", new_record(simulator, resolved, trainer)
    with Phase(f"closed loop, {name} model") as phase:
        if not {name, name + GREEDY} <= record["totals"].keys():
            simulator.run(resolved.closed_loop, record, name, ModelResponder(TrainedModel(trainer), base))
        write_sealed(trainer.run.folder / CLOSED_LOOP, record)
        phase.result = simulator.summary(record, name)
    if not base:
        log.info("\n%s\n", simulator.table(record))
    return record
