# SPDX-License-Identifier: Apache-2.0
"""Samplers: one by one, and transformers' generation against TRL's own."""

import pytest
import torch
from engines import set_adapter
from trainers import make, plain_trl

from grpo.data.prompts import sampling_seed
from grpo.rollout.sampler import Sample, Session, evaluation_sampling, rollout_sampling
from grpo.settings.table import Settings


def test_prompts_go_in_while_samples_come_out():
    """As in an episode, whose next turn begins when its last one has ended: each prompt here asks for a shorter one."""
    batches = []
    session = Session(lambda prompts: batches.append(len(prompts)) or (Sample(list(prompt)) for prompt in prompts))
    numbers, finished = [session.submit([n] * n) for n in (3, 1)], []
    for number, sample in session.samples():
        finished.append((number, len(sample.ids)))
        if len(sample.ids) > 1:
            session.submit(sample.ids[1:])
    assert numbers == [0, 1] and finished == [(0, 3), (1, 1), (2, 2), (3, 1)] and batches == [2, 1, 1]


def test_rollouts_and_evaluations_draw_from_streams_of_their_own():
    """The same ones for every model that is evaluated, whatever samples from it."""
    seeds = [evaluation_sampling(Settings(SEED=7), 3).seed, rollout_sampling(Settings(SEED=7), 3).seed]
    assert seeds == [sampling_seed(7, 3, "evaluation"), sampling_seed(7, 3, "train")] and len(set(seeds)) == 2


def test_each_prompt_gets_a_sample_in_order():
    session = Session(lambda prompts: (Sample([*prompt, n]) for n, prompt in enumerate(prompts)))
    assert [sample.ids for sample in session.complete([[5], [5], [7]])] == [[5, 0], [5, 1], [7, 2]]


@pytest.mark.numeric
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_transformers_generates_as_trl_does(tiny, tmp_path, top_p):
    """The same tokens from the same seed, cut behind the first token that stops, with the adapter."""
    trainer = make(tiny, tmp_path, TEMPERATURE=1.3, TOP_P=top_p, MAX_COMPLETION_LEN=12)
    set_adapter(trainer, 1, 1.0)
    trainer.model.eval()
    prompts = trainer.processing_class(text=[row.prompt for row in trainer.run.rows])["input_ids"]
    sampling = rollout_sampling(trainer.run.settings, 0)
    samples = [sample.ids for sample in trainer.sampler.sample(prompts, 1, sampling)]
    torch.manual_seed(sampling.seed)
    with plain_trl(trainer):
        theirs, _ = trainer._generate_single_turn(prompts, None, {}, 1)
    assert samples == theirs and len({*map(tuple, samples)}) == len(prompts)
