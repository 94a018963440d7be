# SPDX-License-Identifier: Apache-2.0
"""Exact probabilities of answers. Run: python -m pytest tests/evaluate/test_exact.py"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import RENDERED
from engines import set_adapter
from trainers import make, plain_float32

import rewards
from grpo.evaluate.exact import ANSWER, answer_probabilities
from grpo.evaluate.heldout import (
    add_models,
    day_of,
    evaluate,
    exact_probabilities,
    expectation,
    generate_completions,
    table,
)

PROMPTS = [
    RENDERED.format(text) for text in ("hour 8 store 50 load 30", "hour 17 store 9 load 30 co2 41", "hour 8 store 7")
]


@pytest.fixture
def trainer(tiny, tmp_path):
    """In float32, with an adapter that matters, whatever the tiny model is; answers of 12 tokens."""
    made = plain_float32(
        make(tiny, tmp_path, MAX_COMPLETION_LEN=12, EVAL_SAMPLES=3, EVAL_TEMPERATURE=1.5, INVALID_REWARD=0.0)
    )
    set_adapter(made, 1, 0.02)
    return made


def by_hand(model, tokenizer, prompt, answer, temperature):
    """The probability of one answer after one prompt, from the model's own logits of the whole conversation."""
    before, tokens = (tokenizer(text=text)["input_ids"] for text in (prompt, answer))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([before + tokens]), use_cache=False).logits[0, len(before) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)[range(len(tokens)), tokens].sum().exp().item()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_it_is_the_product_of_the_tokens_probabilities(trainer, temperature):
    """For prompts of all lengths in one batch, doubled ones, and actions of two digits, whose tails differ in length."""
    model, tokenizer = trainer.model.eval(), trainer.processing_class
    found = answer_probabilities(model.get_base_model(), tokenizer, [*PROMPTS, PROMPTS[0]], temperature, 12)
    assert found.shape == (4, 12) and np.array_equal(found[0], found[3])
    for prompt, row in zip(PROMPTS, found, strict=False):
        for action in (0, 3, 11):
            expected = by_hand(model, tokenizer, prompt, ANSWER.format(action), temperature)
            assert row[action] == pytest.approx(expected, rel=1e-4), (prompt, action)
    one = answer_probabilities(model.get_base_model(), tokenizer, PROMPTS[:1], temperature, 4)
    assert one[0] == pytest.approx(found[0, :4], rel=1e-4), "alone as among others"


@pytest.mark.parametrize("window", [16, 3])
def test_the_window_of_the_sliding_layers_is_kept(trainer, window):
    """A prompt much longer than it: what all prompts share lies outside. In a short one each key counts."""
    model, tokenizer = trainer.model.get_base_model().eval(), trainer.processing_class
    model.config.sliding_window = window
    for layer in model.model.layers[::2]:
        layer.self_attn.sliding_window = window
    prompts = [RENDERED.format("hour 8 " * 20 + end) for end in ("store 7", "load 30")]
    found = answer_probabilities(model, tokenizer, prompts, 1.0, 4)
    for prompt, row in zip(prompts, found, strict=True):
        assert row[2] == pytest.approx(by_hand(model, tokenizer, prompt, ANSWER.format(2), 1.0), rel=1e-4)


def test_sampled_answers_come_as_often_as_they_should(trainer):
    """At EVAL_TEMPERATURE, not at the rollouts'; each share within four standard errors."""
    count, tokenizer = 600, trainer.processing_class
    ids = generate_completions(trainer, [PROMPTS[0]] * count, count, base=False)
    said = Counter(tokenizer.batch_decode(ids))
    (exact,) = exact_probabilities(trainer, PROMPTS[:1], False, False, 4)
    assert exact.max() < 0.99 and exact.sum() > 0.2, "certain answers, or none that can be read, show nothing"
    for action, p in enumerate(exact.tolist()):
        share = said[ANSWER.format(action)] / count
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / count) + 1 / count, (action, share, p)
    (other,) = exact_probabilities(trainer, PROMPTS[:1], True, False, 4)
    assert abs(other - exact).max() > 0.002, "the base model's are others"
    base = trainer.model.get_base_model()
    (heated,) = answer_probabilities(base, tokenizer, PROMPTS[:1], trainer.run.settings.EVAL_TEMPERATURE, 4)
    assert exact.tolist() == heated.tolist()


def test_temperature_0_is_greedy_generation(trainer):
    """Also where the greedy answer cannot be read: there no action has a probability."""
    before = trainer.generation_config, trainer.generation_kwargs
    for strength in (0.02, 3.0):
        set_adapter(trainer, 2, strength)
        texts = trainer.processing_class.batch_decode(generate_completions(trainer, PROMPTS, 1, False, temperature=0.0))
        found = exact_probabilities(trainer, PROMPTS, False, True, 4)
        assert found.tolist() == [[float(text == ANSWER.format(k)) for k in range(4)] for text in texts]
    assert not found.any(), "the strong adapter's answers are none"
    assert before == (trainer.generation_config, trainer.generation_kwargs)


def test_held_out_figures_are_expectations(trainer):
    rows, s = trainer.run.rows, trainer.run.settings
    found = evaluate(trainer, rows, exact=True)
    p = exact_probabilities(trainer, [row.prompt for row in rows], False, False, 4)
    assert found["reward"] == pytest.approx((p @ np.array(rows[0].rewards)).mean(), abs=1e-6)
    assert found["action_counts"] == pytest.approx((s.EVAL_SAMPLES * p.sum(0)).tolist(), abs=1e-5)
    assert found["parse_rate"] == pytest.approx(p.sum(1).mean()) and "tokens_mean" not in found
    sampled = evaluate(trainer, rows, exact=False, greedy=True)
    greedy = evaluate(trainer, rows, exact=True, greedy=True)
    assert sampled["reward_by_prompt"] == greedy["reward_by_prompt"] and sampled["tokens_mean"] >= 1


def test_intervals_are_over_days(trainer):
    """The rows of a day together, and rows of another file apart from them; so is the difference of two models."""
    dates = ("2025-09-01", "2025-09-01", "2025-09-02", "2025-09-02")
    rows = [
        dataclasses.replace(row, columns=row.columns | {"date": date}, rewards=tuple(np.roll(row.rewards, n)))
        for n, (row, date) in enumerate(zip(trainer.run.rows, dates, strict=True))
    ]
    results = {"exact": True}
    add_models(trainer, rows, results, ("before", "after"))
    p = exact_probabilities(trainer, [row.prompt for row in rows], False, False, 4).tolist()
    worth, samples = [row.rewards for row in rows], [trainer.run.settings.EVAL_SAMPLES] * 4
    by_day, by_row = (rewards.score_probabilities(worth, p, samples, 0.0, clusters) for clusters in (dates, range(4)))
    scores = [results[name]["reward_by_prompt"] for name in ("before", "after")]
    for name in ("reward_low", "reward_high"):
        assert results["after"][name] == pytest.approx(by_day[name]) != pytest.approx(by_row[name])
        difference = rewards.paired_difference(*scores, dates)[name]
        assert results["difference"][name] == difference != rewards.paired_difference(*scores)[name]
    assert day_of(rows[0]) == day_of(rows[1]) != day_of(rows[2])
    assert day_of(dataclasses.replace(rows[0], file="other.csv")) != day_of(rows[0])
    assert day_of(trainer.run.rows[0]) != day_of(trainer.run.rows[1]), "rows without a date stand alone"


def test_the_table_of_a_run_that_an_earlier_version_began():
    """Its base has no figures of the functions; and one whose functions gave nothing at all has no difference."""
    found = {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6, "parse_rate": 1.0}
    none = dict.fromkeys(("reward", "reward_low", "reward_high"))
    results = {
        "exact": False,
        "samples": 2,
        "temperature": 0.5,
        "before": found,
        "before_greedy": none,
        "after_greedy": found,
    }
    results["after"] = found | {"functions": {"a": found, "b": none}}
    lines = table(results).splitlines()
    assert lines[0].endswith("95% interval over prompts, of a day together")
    assert table(results | {"by_day": False}).splitlines()[0].endswith("95% interval over prompts")
    assert any("before training, greedy  -" in line for line in lines) and not any(
        "after - before" in line for line in lines
    )
    at = lines.index("  a")
    assert lines[at + 1].split() == ["before", "training", "-"] and lines[at + 3].endswith("0.500   0.400 to 0.600")


@pytest.mark.parametrize(
    ("shares", "values", "expected"),
    [([0.5, 0.5], [1.0, 3.0], 2.0), ([0.5, 0.25, 0.25], [math.nan, 1.0, 3.0], 2.0), ([0.0, 1.0], [math.nan, 3.0], 3.0)],
)
def test_an_expectation_leaves_out_what_has_no_reward(shares, values, expected):
    assert expectation(shares, values) == expected
    assert math.isnan(expectation(shares, [math.nan] * len(values)))
