# SPDX-License-Identifier: Apache-2.0
"""The warm-up that makes a model readable for GRPO: its layers, its rows, and what it teaches."""

import dataclasses
import math
import re

import pytest
import torch

from grpo.plan.hub import TINY_PATH
from grpo.tasks.tes.dataset import synthetic_windows, trajectory
from grpo.tasks.tes.plant import step
from grpo.tasks.tes.profiles import TRAIN_START
from scripts.dev.gptoss_format import TINY, quantize_experts, read_tokenizer
from scripts.dev.warmup import TINY_RECIPE, WARMUP_EXPERTS, WarmUp, figures, forward, log_probs, new_model
from scripts.dev.warmup_rows import WarmupTensors, readings, stated_numbers, warmup_rows

pytestmark = pytest.mark.numeric

# A window that is shorter than the rows of these tests.
SIZES = TINY | {"num_hidden_layers": 4, "sliding_window": 12}
RECIPE = dataclasses.replace(TINY_RECIPE, sizes=SIZES, batch=8, steps=40)


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(TINY_PATH)


@pytest.fixture(scope="module")
def rows(tokenizer) -> WarmupTensors:
    return WarmupTensors(warmup_rows(7, 2, "compact", 1.0), tokenizer, "cpu")


@pytest.fixture(scope="module")
def chain_rows(tokenizer) -> WarmupTensors:
    return WarmupTensors(warmup_rows(7, 2, "compact", 1.0), tokenizer, "cpu", reasons=True)


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    return new_model(RECIPE, tokenizer)


def test_fast_experts_equal_transformers_in_values_and_gradients(model):
    """Float32, with weights at which the router's choice matters."""
    ids = torch.randint(TINY["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))
    direction = torch.randn(TINY["hidden_size"], generator=torch.Generator().manual_seed(4))
    for layer in model.model.layers:
        layer.mlp.router.weight.data.mul_(20)
    results = []
    for experts in (WARMUP_EXPERTS, "eager"):
        model.set_experts_implementation(experts)
        model.zero_grad()
        hidden = forward(model, ids)
        (hidden * direction).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results.append((hidden.detach(), gradients))
    (fast, fast_gradients), (slow, slow_gradients) = results
    torch.testing.assert_close(fast, slow, atol=2e-5, rtol=1e-4)
    for name, gradient in slow_gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(fast_gradients[name], gradient, atol=1e-4 * scale + 1e-6, rtol=1e-3, msg=name)


def test_initial_heads_look_back_by_their_distance(model):
    ids = torch.randint(TINY["vocab_size"], (1, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True, use_cache=False).attentions[0]
    for head in range(TINY["num_attention_heads"]):
        distance = RECIPE.distances[0][head]
        looked = attentions[0, head, 20:].argmax(-1)
        assert (torch.arange(20, 30) - looked == distance).float().mean() >= 0.8  # content has a say too


def test_rows_that_reason_say_the_prompts_numbers_and_a_plan(chain_rows, tokenizer):
    ids, lengths = chain_rows.batch(torch.arange(len(chain_rows)))
    chain_rows.write_actions(ids, lengths, 0, torch.full_like(lengths, 2))
    chain_rows.write_actions(ids, lengths, 1, torch.full_like(lengths, 3))
    for row, length in zip(ids, lengths, strict=True):
        text = tokenizer.decode(row[:length].tolist(), skip_special_tokens=False)
        prompt, _, chain = text.rpartition("<|channel|>analysis<|message|>")
        stated = re.search(r"store (\d+) load (\d+) co2 (\d+) next (\d+)", prompt)[0]
        assert chain == (f"{stated} action 2<|end|><|start|>assistant<|channel|>final<|message|>[3]<|return|>")
    assert len(chain_rows.numbers) == 4 and len(chain_rows.fixed) + 6 == len(chain_rows.answer)


def test_full_prompts_state_the_numbers_of_the_hour_and_the_next_day():
    (prompt,) = [row.prompt for row in warmup_rows(7, 1, "full", 1.0)[3:4]]
    energy = re.search(r"energy \[kWh\]: (\d+)", prompt)[1]
    now = re.search(r"load=(\d+)\.\d kW, co2=0\.(\d+) .*Now", prompt)
    low = re.search(r"low5_avg=0\.(\d+)", prompt)[1]
    assert prompt.count("load=") > 3 and stated_numbers(prompt) == [energy, now[1], now[2], low]
    with pytest.raises(ValueError, match="not a prompt of the plant"):
        stated_numbers("What is 2 + 2?")


def test_readings_are_what_the_hour_would_do():
    """Against the plant itself; nothing in them ranks the actions."""
    ((window, rng),) = synthetic_windows(3, 2, 1, TRAIN_START)
    for _, state in trajectory(window, rng, "full", None):
        now = state.stamp.hour - 8
        done = step(state.energy_kwh, [0, 1, 2, 3], state.load_kw[now], state.co2[now])
        values = readings(state)
        assert values[:4] == pytest.approx(done.energy_kwh) and values[8:10] == pytest.approx(done.unserved_kwh[:2])
        assert values[10] == (done.unserved_kwh[0] > 0) and values[-1] == state.energy_kwh


def test_the_warm_up_learns_format_text_and_readings(model, rows):
    """Few steps on few rows: each part of the loss falls, experts are then what MXFP4 can say, and stay so."""
    training = WarmUp(model, rows, RECIPE, 0)
    ids, lengths = rows.batch(torch.arange(8))

    def text() -> float:
        with torch.no_grad():
            logp = log_probs(model, forward(model, ids)[:, :-1]).gather(-1, ids[:, 1:, None])[..., 0]
        return -logp[:, : int(lengths.min()) - len(rows.answer) - 1].mean().item()

    def misread() -> float:
        with torch.no_grad():
            return (training.losses(torch.arange(40))[1] - rows.readings[:40]).square().mean().item()

    before, first, wrong = figures(model, rows), text(), misread()
    training.train_until(0.9, RECIPE.lr, print)
    assert figures(model, rows)["parse_rate"] > 10 * before["parse_rate"] and text() < first - 0.3
    assert misread() < 0.72 * wrong and training.step == 36
    stored = quantize_experts(model)
    kept = model.model.layers[1].mlp.experts.down_proj.clone()
    training.train_until(1.0, RECIPE.lr / 4, print)
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj, kept) and len(stored) == 16


def test_answers_are_taught_to_follow_the_plan_that_is_shown(model, chain_rows, monkeypatch):
    """From a model whose log-probs of the four actions at the answer are 0, -1, -2 and -3, and 0 everywhere else."""
    logp, shown, name = torch.zeros(len(chain_rows.answer), SIZES["vocab_size"]), [], chain_rows.write_actions
    logp[chain_rows.choices[1], chain_rows.actions[1]] = -torch.arange(4.0)
    monkeypatch.setattr(
        "scripts.dev.warmup.log_probs", lambda model, hidden: logp[: hidden.shape[1]].expand(len(hidden), -1, -1)
    )

    def watched(ids, lengths, choice, named):
        shown.append(named)
        name(ids, lengths, choice, named)

    monkeypatch.setattr(chain_rows, "write_actions", watched)
    training = WarmUp(model, chain_rows, dataclasses.replace(RECIPE, follow=0.7), 0)
    loss, readings = training.losses(torch.arange(40))
    plans = shown[0].float()
    assert plans.unique().tolist() == [0, 1, 2, 3] and len(shown) == 2
    assert loss.item() == pytest.approx((0.7 * plans + 0.1 * (6 - plans)).mean().item(), rel=1e-5)
    assert readings.shape == (40, chain_rows.readings.shape[1])


def test_figures_of_a_model_that_reasons_count_all_plans(model, chain_rows, monkeypatch):
    shares, logp = torch.tensor([0.7, 0.1, 0.1, 0.1]), torch.zeros(len(chain_rows.answer), SIZES["vocab_size"])
    logp[chain_rows.choices[0], chain_rows.actions[0]] = math.log(0.2)
    logp[chain_rows.choices[1], chain_rows.actions[1]] = shares.log()
    logp[chain_rows.numbers[0]] = math.log(0.5)
    monkeypatch.setattr("scripts.dev.warmup.log_probs", lambda model, hidden: logp.expand(len(hidden), -1, -1))
    values = figures(model, chain_rows)
    assert values["parse_rate"] == pytest.approx(0.8)  # a plan in four of five chains, and then an answer
    assert values["reward"] == pytest.approx(0.8 * (chain_rows.rewards @ shares).mean().item())
    assert (values["numbers"], values["follows"]) == pytest.approx((0.5, 0.25))
