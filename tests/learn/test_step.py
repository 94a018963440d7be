# SPDX-License-Identifier: Apache-2.0
"""A step up to its gradient, tensor by tensor against TRL's own."""

import inspect

import pytest
import torch
import transformers
from test_steps import reward
from trainers import make, plain_float32, plain_trl, sample_with, seed_weights, step_of
from trl import GRPOTrainer

from grpo.learn.learner import Learner
from grpo.learn.step import group_advantages, turn_advantages
from grpo.learn.trainer import Trainer
from grpo.settings.table import FIELDS

SCALINGS = FIELDS["SCALE_REWARDS"].metadata["choices"]


@pytest.mark.numeric
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_step_holds_what_trls_holds(tiny, tmp_path, scaling):
    """With a KL term, masked truncated completions, rewards that leave completions out, and an engine's log-probs, of
    which one is unknown. The reward functions see the same state, and trackers the same figures."""
    settings = {"PROMPTS_PER_STEP": 2, "NUM_GENERATIONS": 4, "BETA": 0.1, "MASK_TRUNCATED": True}
    trainer = plain_float32(make(tiny, tmp_path, SCALE_REWARDS=scaling, **settings))
    seed_weights(trainer.model)
    trainer.reward_funcs = trainer.scorer.functions = [reward]
    sample_with(trainer, lambda: step_of(trainer, 8))
    rows = [n for n in range(2) for _ in range(4)]
    trainer.model.train()
    step = trainer.new_rollout([trainer.run.rows[n] for n in rows])
    with plain_trl(trainer):
        theirs = trainer._generate_and_score_completions([{"prompt": trainer.run.rows[n].prompt} for n in rows])
    assert step.batch.keys() == theirs.keys() and step.batch["advantages"].abs().sum() > 1
    for name, values in theirs.items():
        torch.testing.assert_close(step.batch[name], values, equal_nan=True, rtol=1e-4, atol=1e-5)
    figures = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
    assert step.metrics.keys() - figures.keys() == set()
    assert step.metrics == {name: pytest.approx(value, rel=1e-5) for name, value in figures.items()}


def test_advantages_by_hand():
    """The first group's mean is 1 and its deviation 1; the second has a single reward, the third none at all."""
    nan = torch.nan
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0, nan, nan, nan, nan, nan])
    advantages, deviations = group_advantages(rewards, 3, "none")
    assert advantages.tolist() == [-1, 0, 1, 0, 0, 0, 0, 0, 0] and deviations[:3].tolist() == [1, 1, 1]
    assert group_advantages(rewards, 3, "group")[0].tolist() == pytest.approx([-0.9999, 0, 0.9999, *[0] * 6], abs=1e-5)
    deviation = torch.tensor([0.0, 1.0, 2.0, 5.0]).std().item()
    expected = [-1 / (deviation + 1e-4), 0, 1 / (deviation + 1e-4), *[0] * 6]
    assert group_advantages(rewards, 3, "batch")[0].tolist() == pytest.approx(expected)
    assert group_advantages(torch.tensor([3.0, 4.0]), 1, "group")[0].tolist() == [0, 0], "groups of one teach nothing"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_equal_rewards_teach_nothing_whatever_their_size(scaling):
    """TRL's mean in float32 differs from such rewards by 0.0001, and its deviation is as small."""
    for value in (-1509.8, -73.2, 9.99, 123456.7):
        rewards = torch.full((24,), value)
        for group in (6, 8, 12, 24):
            advantages, deviations = group_advantages(rewards, group, scaling)
            assert advantages.dtype == torch.float32 and not advantages.any() and not deviations.any()
            assert not turn_advantages(rewards[:, None], group, scaling).any()


def test_of_trls_private_methods_three_are_overridden():
    """With the same parameters, so that a method that moves or changes is noticed."""
    theirs = [*GRPOTrainer.__mro__]
    overridden = {
        name
        for ours in (Trainer, Learner)
        for name in vars(ours)
        if not name.startswith("__") and any(name in vars(owner) for owner in theirs)
    }
    private = {name for name in overridden if name.startswith("_")} - {"_abc_impl"}
    assert private == {"_get_train_sampler", "_load_optimizer_and_scheduler", "_save_checkpoint"}
    assert overridden - private == {"create_model_card", "log", "training_step"}
    for name in (overridden - {"create_model_card"}) & vars(Trainer).keys():
        ours, original = (inspect.signature(getattr(owner, name)) for owner in (Trainer, GRPOTrainer))
        assert list(ours.parameters) == list(original.parameters), name
    assert issubclass(GRPOTrainer, transformers.Trainer)
