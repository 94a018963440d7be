# SPDX-License-Identifier: Apache-2.0
"""The correction for log-probs of the engine that differ from the trainer's."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from conftest import read_csv
from engines import set_adapter, trainer_with_engine
from trainers import loss_and_gradients

pytestmark = pytest.mark.numeric


@pytest.fixture
def build(tiny, tmp_path):
    return functools.partial(trainer_with_engine, tiny, tmp_path)


def scored_batch(trainer):
    """A step's batch as TRL makes it, with the advantages replaced by ones that are not zero."""
    set_adapter(trainer, 1)
    trainer.model.train()
    rows = [0, 0, 1, 1]
    inputs = trainer._generate_and_score_completions([{"prompt": trainer.run.rows[i].prompt, "row": i} for i in rows])
    inputs["advantages"] = torch.tensor([1.3, -0.7, 0.4, -2.0])
    return inputs


@pytest.mark.parametrize(
    ("mode", "shift", "ratio"),
    [
        ("token_truncate", 0.0, 1.0),
        ("token_truncate", -0.7, math.exp(0.7)),
        ("token_truncate", -2.0, 2.5),
        ("token_mask", -0.7, math.exp(0.7)),
        ("token_mask", -2.0, 0.0),
        ("sequence_truncate", 0.0, 1.0),
        ("none", -0.7, 1.0),
    ],
)
def test_importance_ratios_reach_the_loss(build, mode, shift, ratio):
    """The stub reports log-probs that are off by `shift`: the gradient is scaled by the ratio, truncated at 2.5."""
    trainer = build(IS_CORRECTION=mode, IS_CLIP_MAX=2.5)
    trainer.run.engine.llm.shift = shift
    inputs = scored_batch(trainer)
    assert "importance_sampling_ratio" not in inputs, "TRL's correction is off"
    assert inputs["old_per_token_logps"] is None if "old_per_token_logps" in inputs else True
    plain = {name: value for name, value in inputs.items() if name != "sampling_per_token_logps"}
    uncorrected, expected = loss_and_gradients(trainer, plain)
    logged = trainer._metrics["train"]
    logged.clear()
    loss, gradient = loss_and_gradients(trainer, inputs)
    assert logged["sampling/sampling_logp_difference/mean"] == [pytest.approx(abs(shift), abs=1e-3)]
    assert logged["sampling/sampling_logp_difference/max"] == [pytest.approx(abs(shift), abs=1e-3)]
    assert logged["sampling/importance_sampling_ratio/mean"] == [pytest.approx(ratio, abs=1e-3)]
    assert expected.norm() > 1e-3 and abs(uncorrected) > 1e-3
    assert loss == pytest.approx(ratio * uncorrected, rel=2e-3, abs=1e-7)
    assert (gradient - ratio * expected).norm() < 2e-3 * expected.norm()


def test_a_step_learns_from_the_engines_log_probs(build):
    """Through TRL's own loop: rollout, rewards, `training_step`; the step's parity and ratio are in its metrics."""
    trainer = build(TOTAL_STEPS=1)
    trainer.run.engine.llm.shift = -0.3
    trainer.train()
    (row,) = read_csv(trainer.run.folder / "metrics.csv")
    assert float(row["logp_diff_mean"]) == pytest.approx(0.3, abs=1e-3)
    assert float(row["is_ratio_mean"]) == pytest.approx(math.exp(0.3), abs=1e-2)
