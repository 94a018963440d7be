# SPDX-License-Identifier: Apache-2.0
"""Samplers: one by one, and transformers' generation against TRL's own."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from engines import prompts_of, set_adapter
from trainers import make, plain_trl

from grpo.data.prompts import sampling_seed
from grpo.rollout.sampler import (
    BatchSession,
    EngineSession,
    Sample,
    Sampling,
    VllmSampler,
    evaluation_sampling,
    rollout_sampling,
)
from grpo.settings.table import Settings


def test_prompts_go_in_while_samples_come_out():
    """As in an episode, whose next turn begins when its last one has ended: each prompt here asks for a shorter one."""
    batches = []

    def answer(prompts, limits):
        batches.append(limits)
        return (Sample(list(prompt)) for prompt in prompts)

    session, finished = BatchSession(answer), []
    numbers = [session.submit([n] * n, limit) for n, limit in ((3, None), (1, 5))]
    while arrived := list(session.advance()):
        for number, sample in arrived:
            finished.append((number, len(sample.ids)))
            if len(sample.ids) > 1:
                session.submit(sample.ids[1:])
    assert numbers == [0, 1] and finished == [(0, 3), (1, 1), (2, 2), (3, 1)]
    assert batches == [(None, 5), (None,), (None,)]


def test_rollouts_and_evaluations_draw_from_streams_of_their_own():
    """The same ones for every model that is evaluated, whatever samples from it."""
    seeds = [evaluation_sampling(Settings(SEED=7), 3).seed, rollout_sampling(Settings(SEED=7), 3).seed]
    assert seeds == [sampling_seed(7, 3, "evaluation"), sampling_seed(7, 3, "train")] and len(set(seeds)) == 2


def test_each_prompt_gets_a_sample_in_order():
    session = BatchSession(lambda prompts, limits: (Sample([*prompt, n]) for n, prompt in enumerate(prompts)))
    assert [sample.ids for sample in session.complete([[5], [5], [7]])] == [[5, 0], [5, 1], [7, 2]]


@pytest.mark.numeric
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_checkpoint_changes_no_probabilities_by_its_generation_config(tiny, tmp_path, temperature):
    """The learner knows no penalty for repetitions, and vLLM is told to leave the file alone."""
    other = shutil.copytree(tiny, tmp_path / "model") / "generation_config.json"
    penalties = {"repetition_penalty": 3.0, "min_p": 0.9, "no_repeat_ngram_size": 1}
    other.write_text(json.dumps(json.loads(other.read_text(encoding="utf-8")) | penalties), encoding="utf-8")
    samples = []
    for model in (tiny, other.parent):
        trainer = make(model, tmp_path / "run", MAX_COMPLETION_LEN=12)
        set_adapter(trainer, 1, 1.0)
        drawn = trainer.sampler.sample(prompts_of(trainer), 2, Sampling(5, temperature, 1.0, 12))
        samples.append([sample.ids for sample in drawn])
    assert samples[0] == samples[1]


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


def test_transformers_gives_each_answer_its_own_limit(tiny, tmp_path):
    """Two at a time: a turn may have what its episode has left, whatever the others have."""
    trainer = make(tiny, tmp_path, MAX_COMPLETION_LEN=12)
    sampler = trainer.sampler.sampler
    sampler.at_once, sampler.stops = 2, [trainer.model.config.vocab_size + 1]  # No token ends an answer.
    with sampler.session(evaluation_sampling(trainer.run.settings, 0, greedy=True)) as session:
        for prompt, limit in zip(prompts_of(trainer)[:4], (3, None, 5, 1), strict=True):
            session.submit(prompt, limit)
        assert [len(sample.ids) for _, sample in session.advance()] == [3, 12, 5, 1]


@pytest.mark.parametrize("sync", ["merge", "lora"])
def test_vllm_steps_answer_as_its_batches_do(build, sync):
    """Whatever finishes first, and with prompts that go in between steps; log-probs come where they are wanted."""
    trainer = build(ROLLOUT_SYNC=sync)
    set_adapter(trainer, 1, 1.0)
    sampler, stub = VllmSampler(trainer.run.engine, trainer.model), trainer.run.engine.llm
    prompts = prompts_of(trainer)[:3]
    greedy = evaluation_sampling(trainer.run.settings, 0, greedy=True)
    batch = sampler.sample(prompts, greedy)
    stub.calls.clear()
    with sampler.session(replace(greedy, in_turns=True)) as session:
        numbers, samples = [session.submit(prompts[0]), session.submit(prompts[1], 3)], {}
        samples |= dict(session.advance())
        assert list(samples) == numbers[1:] and session.is_stepwise
        numbers.append(session.submit(prompts[2]))
        while len(samples) < 3:
            samples |= dict(session.advance())
        assert not session.advance(), "nothing is left"
    assert [samples[n].ids for n in numbers] == [batch[0].ids, batch[1].ids[:3], batch[2].ids]
    assert stub.calls.count("wake_up") == stub.calls.count("sleep") == 1 and stub.asleep
    with sampler.session(replace(rollout_sampling(trainer.run.settings, 0), in_turns=True)) as session:
        (sample,) = session.complete(prompts[:1])
    assert len(sample.logps) == len(sample.ids) and samples[0].logps is None


class CountingEngine:
    """An engine whose requests write a token a step; it notes with how many steps behind it each was added."""

    def __init__(self):
        self.left, self.steps, self.added = {}, 0, []

    def add(self, prompt, max_tokens, top_p, temperature):
        self.added.append((self.steps, max_tokens))
        self.left[str(len(self.added))] = max_tokens
        return str(len(self.added))

    def step(self):
        self.steps += 1
        self.left = {request: tokens - 1 for request, tokens in self.left.items()}
        ended = [request for request, tokens in self.left.items() if not tokens]
        return [(request, [self.left.pop(request)], None) for request in ended]


def test_a_turn_joins_the_engines_next_step():
    engine = CountingEngine()
    session = EngineSession(engine, Sampling(0, 1.0, 1.0, 30))
    numbers = [session.submit([1]), session.submit([1], 2), session.submit([1], 3)]
    samples = {}
    while engine.steps < 3:
        for number, sample in session.advance():
            samples[number] = sample
            numbers.append(session.submit([1], 5))
    while len(samples) < len(numbers):
        samples |= dict(session.advance())
    assert list(samples) == [1, 2, 3, 4, 0] and engine.steps == 30
    assert engine.added == [(0, 30), (0, 2), (0, 3), (2, 5), (3, 5)]
    assert session.advance() == [] and engine.steps == 30, "nothing waits and nothing runs"
