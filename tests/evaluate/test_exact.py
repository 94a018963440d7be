# SPDX-License-Identifier: Apache-2.0
"""Exact probabilities of answers. Run: python -m pytest tests/evaluate/test_exact.py"""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from engines import set_adapter
from helpers import RENDERED
from trainers import make, plain_float32

from grpo.evaluate.exact import ANSWER_TEXT, answer_probabilities
from grpo.evaluate.heldout_reward import expectation, measure_rewards, trainer_evaluation
from grpo.evaluate.models import trained_model
from grpo.output.durable import write_sealed

PROMPTS = [
    RENDERED.format(text) for text in ("hour 8 store 50 load 30", "hour 17 store 9 load 30 co2 41", "hour 8 store 7")
]


@pytest.fixture
def trainer(tiny, tmp_path):
    """In float32, with an adapter that matters, whatever the tiny model is; answers of 12 tokens."""
    float_trainer = plain_float32(
        make(tiny, tmp_path, MAX_COMPLETION_LEN=12, EVAL_SAMPLES=3, EVAL_TEMPERATURE=1.2, INVALID_REWARD=0.0)
    )
    set_adapter(float_trainer, 1, 0.003)
    return float_trainer


def by_hand(model, tokenizer, prompt, answer, temperature):
    """The probability of one answer after one prompt, from the model's own logits of the whole conversation."""
    before, tokens = (tokenizer(text=text)["input_ids"] for text in (prompt, answer))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([before + tokens]), use_cache=False).logits[0, len(before) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)[range(len(tokens)), tokens].sum().exp().item()


@pytest.mark.parametrize("temperature", [0.3, 2.5])
def test_it_is_the_product_of_the_tokens_probabilities(trainer, temperature):
    """For prompts of all lengths in one batch, doubled ones, and actions of two digits, whose tails differ in
    length."""
    model, tokenizer = trainer.model.eval(), trainer.processing_class
    probabilities = answer_probabilities(model.get_base_model(), tokenizer, [*PROMPTS, PROMPTS[0]], temperature, 12)
    assert probabilities.shape == (4, 12) and np.array_equal(probabilities[0], probabilities[3])
    for prompt, row in zip(PROMPTS, probabilities, strict=False):
        for action in (0, 3, 11):
            expected = by_hand(model, tokenizer, prompt, ANSWER_TEXT.format(action), temperature)
            assert row[action] == pytest.approx(expected, rel=1e-4), (prompt, action)
    alone = answer_probabilities(model.get_base_model(), tokenizer, PROMPTS[:1], temperature, 4)
    assert alone[0] == pytest.approx(probabilities[0, :4], rel=1e-4), "alone as among others"


@pytest.mark.parametrize("window", [16, 3])
def test_the_window_of_the_sliding_layers_is_kept(trainer, window):
    """A prompt much longer than it: what all prompts share lies outside. In a short one each key counts."""
    model, tokenizer = trainer.model.get_base_model().eval(), trainer.processing_class
    model.config.sliding_window = window
    for layer in model.model.layers[::2]:
        layer.self_attn.sliding_window = window
    prompts = [RENDERED.format("hour 8 " * 20 + end) for end in ("store 7", "load 30")]
    probabilities = answer_probabilities(model, tokenizer, prompts, 1.0, 4)
    for prompt, row in zip(prompts, probabilities, strict=True):
        assert row[2] == pytest.approx(by_hand(model, tokenizer, prompt, ANSWER_TEXT.format(2), 1.0), rel=1e-4)


def test_sampled_answers_come_as_often_as_they_should(trainer):
    """At EVAL_TEMPERATURE, not at the rollouts'; each share within four standard errors."""
    count, tokenizer = 300, trainer.processing_class
    model = trained_model(trainer)
    answers = Counter(tokenizer.batch_decode(model.complete([PROMPTS[0]] * count, count)))
    (exact,) = model.probabilities(PROMPTS[:1], 4, greedy=False, base=False)
    assert exact.max() < 0.99 and exact.sum() > 0.1, "certain answers, or none that can be read, show nothing"
    for action, p in enumerate(exact.tolist()):
        share = answers[ANSWER_TEXT.format(action)] / count
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / count) + 1 / count, (action, share, p)
    (other,) = model.probabilities(PROMPTS[:1], 4, greedy=False, base=True)
    assert abs(other - exact).max() > 0.002, "the base model's are others"
    base = trainer.model.get_base_model()
    (heated,) = answer_probabilities(base, tokenizer, PROMPTS[:1], trainer.run.settings.EVAL_TEMPERATURE, 4)
    assert exact.tolist() == heated.tolist()


def test_evaluations_have_random_numbers_of_their_own(tiny, tmp_path):
    """The answers of a rollout of the same step, at the same temperature, would be scored as held-out ones; those of an
    evaluation are the same each time, so that steps compare."""
    trainer = make(tiny, tmp_path, TEMPERATURE=1.2, EVAL_TEMPERATURE=1.2, MAX_COMPLETION_LEN=12)
    set_adapter(trainer, 2, 3.0)  # what it writes is hardly ever the same twice
    model, prompts = trained_model(trainer), PROMPTS * 4
    evaluated = model.complete(prompts)
    assert evaluated == model.complete(prompts) != model.complete(prompts, step=1)
    assert [sample.ids for sample in trainer.sample(model.tokenizer(text=prompts)["input_ids"])] != evaluated


def test_temperature_0_is_greedy_generation(trainer):
    """Also where the greedy answer cannot be read: there no action has a probability."""
    model = trained_model(trainer)
    for strength in (0.02, 3.0):
        set_adapter(trainer, 2, strength)
        texts = model.tokenizer.batch_decode(model.complete(PROMPTS, greedy=True))
        probabilities = model.probabilities(PROMPTS, 4, greedy=True, base=False)
        assert probabilities.tolist() == [[float(text == ANSWER_TEXT.format(k)) for k in range(4)] for text in texts]
    assert not probabilities.any(), "the strong adapter's answers are none"


def test_held_out_figures_are_expectations(trainer):
    rows, s = trainer.run.rows, trainer.run.settings
    exact = trainer_evaluation(trainer, rows, exact=True)
    figures = exact.measure()
    p = exact.model.probabilities([row.prompt for row in rows], 4, greedy=False, base=False)
    assert figures["reward"] == pytest.approx((p @ np.array(rows[0].rewards)).mean(), abs=1e-6)
    assert figures["action_counts"] == pytest.approx((s.EVAL_SAMPLES * p.sum(0)).tolist(), abs=1e-5)
    assert figures["parse_rate"] == pytest.approx(p.sum(1).mean()) and "tokens_mean" not in figures
    (function,) = figures["functions"].values()
    by_columns = (p @ np.arange(4) / 10).mean()  # as the rows' columns have it; an answer without an action counts as 0
    assert function["reward"] == pytest.approx(by_columns, abs=1e-6)
    shorter = [rows[0], dataclasses.replace(rows[1], rewards=rows[1].rewards[:3])]
    by_prompt = trainer_evaluation(trainer, shorter, exact=True).measure()["reward_by_prompt"]
    assert by_prompt == pytest.approx([p[0] @ rows[0].rewards, p[1, :3] @ rows[1].rewards[:3]], abs=1e-6)
    sampled = trainer_evaluation(trainer, rows, exact=False).measure(greedy=True)
    greedy = exact.measure(greedy=True)
    assert sampled["reward_by_prompt"] == greedy["reward_by_prompt"] and sampled["tokens_mean"] >= 1
    assert sum(sampled["action_counts"]) + sampled["unparsed"] == len(rows), "greedily each row is asked once"


def test_a_resumed_run_measures_again_what_it_measures_otherwise(trainer, tmp_path):
    """A marked figure stays, but not at another temperature, of other rows, or by other or no samples."""
    evaluation, rows = trainer_evaluation(trainer, trainer.run.rows, exact=True), trainer.run.rows
    marked = measure_rewards(evaluation, tmp_path, base=True)
    marked["before"]["reward"] = 0.123

    def is_kept(settings=trainer.run.settings, **changes):
        write_sealed(tmp_path / "evaluation.json", marked)
        evaluation.model.settings = settings
        changed = dataclasses.replace(evaluation, **changes)
        return measure_rewards(changed, tmp_path, base=True)["before"]["reward"] == 0.123

    assert is_kept() and not is_kept(rows=rows[::-1]) and not is_kept(exact=False)
    for change in ({"EVAL_TEMPERATURE": 0.7}, {"EVAL_SAMPLES": 2}):
        assert not is_kept(dataclasses.replace(trainer.run.settings, **change)), change


def test_an_expectation_leaves_out_what_has_no_reward():
    assert expectation([0.5, 0.25, 0.25], [math.nan, 1.0, 3.0]) == 2.0
    assert math.isnan(expectation([0.0, 1.0], [1.0, math.nan]))
