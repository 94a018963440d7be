# SPDX-License-Identifier: Apache-2.0
"""AdamW steps of the trainer against TRL's own, through TRL's own loop, on the same completions."""

import contextlib

import pytest
from trainers import LOSSES, apart, make, plain_float32, plain_trl, sample_with, seed_weights, step_of

from grpo.learn.distributed import flat_adapter
from grpo.learn.trainer import Trainer
from grpo.reward.calling import Reward
from grpo.settings.table import Settings

pytestmark = pytest.mark.numeric

STEPS, PROMPTS, GROUP = 5, 2, 4
COMPARED = ("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy")


def by_tokens(completion_ids, **columns):
    """By the tokens; none where the first is a multiple of 5."""
    return [None if ids[0] % 5 == 0 else sum(ids) % 17 / 17 for ids in completion_ids]


reward = Reward(by_tokens, "test_steps:by_tokens", "by_tokens", Settings())


def trained(tiny, folder, loss_type, correction, plain, **changes):
    """How the steps moved the adapter, as one vector, and the figures of each step under TRL's names."""
    folder.mkdir()
    trainer = plain_float32(make(
        tiny, folder, LOSS_TYPE=loss_type, PROMPTS_PER_STEP=PROMPTS, NUM_GENERATIONS=GROUP, BETA=0.1,
        TOTAL_STEPS=7 if changes else STEPS, LEARNING_RATE=1e-3,
        TEMPERATURE=0.8, MASK_TRUNCATED=True, IS_CORRECTION=correction, IS_CLIP_MAX=1.2,
        GRADIENT_CHECKPOINTING=False, **changes,
    ))  # fmt: skip
    seed_weights(trainer.model)
    for layer in trainer.model.get_base_model().model.layers:
        layer.mlp.router.top_k = 4  # Of four experts: rounding cannot exchange one, as it does on some CPUs.
    # AdamW's usual 1e-8 makes a whole step, up or down, of a gradient that is nothing but rounding.
    trainer.args.adam_epsilon, trainer.args.save_strategy = 1e-4, "no"
    trainer.reward_funcs = trainer.scorer.functions = [reward]

    def rollout():
        completions, logps = step_of(trainer, trainer.args.generation_batch_size)
        return completions, None if changes else logps

    sample_with(trainer, rollout)
    before = flat_adapter(trainer.model)
    with plain_trl(trainer) if plain else contextlib.nullcontext():
        if plain:
            trainer._get_train_sampler = lambda dataset=None: Trainer._get_train_sampler(trainer)  # the prompts' order
            # TRL corrects beside its own vLLM alone, which is not asked for anything else here.
            trainer.use_vllm = trainer.vllm_importance_sampling_correction = correction != "none"
            trainer.vllm_importance_sampling_mode = correction
            trainer.vllm_importance_sampling_clip_max = trainer.run.settings.IS_CLIP_MAX
        trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    return flat_adapter(trainer.model) - before, [{k: row[k] for k in COMPARED if k in row} for row in steps]


CASES = [(loss_type, "token_truncate") for loss_type in LOSSES]


@pytest.mark.parametrize(("loss_type", "correction"), [*CASES, ("grpo", "none")])
def test_five_steps_are_trls(tiny, tmp_path, loss_type, correction):
    """With a KL term, masked truncated completions and rewards that leave completions out."""
    (ours, figures), (theirs, their_figures) = (
        trained(tiny, tmp_path / str(plain), loss_type, correction, plain) for plain in (False, True)
    )
    assert theirs.abs().mean() > 1e-4 and apart(ours, theirs) < 2e-4
    assert len(figures) == STEPS and figures == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in their_figures]


SHARED = [(loss_type, level) for loss_type in LOSSES for level in ("token", "sequence")]
SHARED.remove(("vespo", "sequence"))  # It is refused.


@pytest.mark.parametrize(("loss_type", "level"), SHARED)
def test_steps_that_share_a_rollout_are_trls(tiny, tmp_path, loss_type, level, monkeypatch):
    """Seven steps, of which the first four learn from two batches twice, without vLLM: old log-probs are the trainer's
    own. The clip range is so narrow that most ratios leave it, and rounding may move one across its border. TRL must
    not shuffle."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)
    shared = {"STEPS_PER_GENERATION": 2, "NUM_ITERATIONS": 2, "IMPORTANCE_SAMPLING_LEVEL": level}
    (ours, figures), (theirs, their_figures) = (
        trained(tiny, tmp_path / str(plain), loss_type, "none", plain, EPSILON=0.004, EPSILON_HIGH=0.004, **shared)
        for plain in (False, True)
    )
    assert theirs.abs().mean() > 1e-4 and apart(ours, theirs) < 2e-3
    assert ["reward" in row for row in their_figures] == [True, False, False, False, True, False, False]
    for n, row in enumerate(their_figures):
        assert {name: figures[n][name] for name in row} == pytest.approx(row, rel=5e-3, abs=5e-3)
        assert figures[n]["reward"] == figures[n - n % 4]["reward"], "a later step repeats what is known of the rollout"
