# SPDX-License-Identifier: Apache-2.0
"""Expected reward at the answer: its gradient is the mean of the sampled one, and everything else of a step stays."""

import dataclasses
import math
from statistics import fmean

import pytest
import test_losses
import torch
import trainers
from helpers import RENDERED, read_csv
from ranked import in_ranks
from trainers import apart, loss_and_gradients, make, moved_by_training, plain_float32, plain_trl, policy_logps, uniform

from grpo.data.files import Row
from grpo.harmony import assistant_turn, parse_action
from grpo.learn.expected_reward import (
    ExpectedReward,
    StepRewards,
    expected_rewards,
    mean_and_scale,
    token_advantages,
)
from grpo.model.load import load_tokenizer
from grpo.reward.calling import load_rewards
from grpo.reward.lookup import AnswerRewards, RewardLookup, action_tokens
from grpo.reward.scoring import Completion, initial_trainer_state
from grpo.settings.environment import load_settings
from grpo.settings.table import FIELDS

pytestmark = pytest.mark.numeric
in_float64 = test_losses.in_float64  # a fixture

DIRECT = "<|channel|>final<|message|>[{}]<|return|>"
REASONED = "<|channel|>analysis<|message|>hour {}<|end|><|start|>assistant" + DIRECT
LOSSES = [name for name in trainers.LOSSES if name != "vespo"]
OTHER_WORDS = "<|channel|>final<|message|>hour [{}]<|return|>"
REWARDS = (-1.0, 0.5, 0.0, -0.25)  # of the four actions
INVALID = -1.15  # a tenth of the range below the worst


def rows_with(*tables):
    """Rendered prompts, each with the rewards of its actions."""
    rows = []
    for i, rewards in enumerate(tables):
        prompt = RENDERED.format(f"hour {8 + i} store 50 load 30")
        columns = {f"reward_action_{k}": value for k, value in enumerate(rewards)}
        rows.append(Row("t.csv", i + 1, (("rendered", prompt),), tuple(rewards), columns, prompt))
    return rows


def trainer_with(tiny, folder, tables=(REWARDS,), ranks=None, rows=None, strength=0.5, **changes):
    """A trainer on the tiny model's own weights, with an adapter that is not zero, in float32. One of several ranks has
    a folder of its own."""
    settings = {"REWARDS": "action", "EXPECTED_REWARD": True, "PROMPTS_PER_STEP": len(tables), "SCALE_REWARDS": "group"}
    settings |= {"MAX_COMPLETION_LEN": 24, "TEMPERATURE": 1.3}
    if ranks:
        folder = folder / str(ranks.rank)
        folder.mkdir(parents=True)
    trainer = plain_float32(make(tiny, folder, ranks, rows or rows_with(*tables), **settings | changes))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(uniform(generator, *parameter.shape) * strength)
    trainer.model.train()
    return trainer


def scored(trainer, texts, logps=None):
    """The batch of a step whose completions are `texts`, with its StepRewards."""
    ids = trainer.processing_class(text=list(texts))["input_ids"]
    step = trainers.score_completions(trainer, ids, logps and logps(ids))
    return step.batch, step.answers


def step_gradient(trainer, inputs, answers, micro_batch=4, packing="prefix"):
    """The gradient of a step as one vector."""
    return loss_and_gradients(trainer, inputs, micro_batch, packing, answers=answers)[1]


def answer_probabilities(trainer, inputs, i):
    """Probabilities (V,) of all tokens at the answer of completion `i`, which ends with `k]<|return|>`."""
    length = int(inputs["completion_mask"][i].sum())
    ids = torch.cat([inputs["prompt_ids"][i], inputs["completion_ids"][i, : length - 3]])
    with torch.no_grad():
        logits = trainer.model(input_ids=ids[None]).logits[0, -1]
    return (logits / trainer.temperature).softmax(-1)


def enumerated(trainer, inputs, tokens):
    """The mean of the sampled gradient over every token of the vocabulary at each answer: completions end with that
    token, and each weighs as much as the policy gives it."""
    probabilities = [answer_probabilities(trainer, inputs, i) for i in range(len(inputs["prompt_ids"]))]
    rewards = torch.full_like(probabilities[0], INVALID)
    rewards[tokens] = torch.tensor(REWARDS)
    mean = torch.stack([(p * rewards).sum() for p in probabilities]).mean()
    variance = torch.stack([(p * (rewards - mean).square()).sum() for p in probabilities]).mean()
    advantages = (rewards - mean) / (variance.sqrt() + 1e-4)
    gradient = 0.0
    for i, p in enumerate(probabilities):
        end = int(inputs["completion_mask"][i].sum()) - 2
        ids = inputs["completion_ids"][i, :end].repeat(len(p), 1)
        ids[:, -1] = torch.arange(len(p))
        step = {name: inputs[name][i].repeat(len(p), 1) for name in ("prompt_ids", "prompt_mask")}
        step |= {"completion_ids": ids, "completion_mask": torch.ones_like(ids), "num_items_in_batch": torch.tensor(1)}
        # dr_grpo divides by the number of completions, of which the step has len(probabilities).
        step["advantages"] = p * advantages * len(p) / len(probabilities)
        gradient = gradient + step_gradient(trainer, step, None, 8)
    return gradient


@pytest.mark.slow
def test_it_is_the_mean_of_the_sampled_gradient_over_all_answers(tiny, tmp_path, in_float64):
    """With mean and deviation held fixed, whatever the tokens behind the answer."""
    trainer = in_float64(trainer_with(tiny, tmp_path, LOSS_TYPE="dr_grpo"))
    inputs, answers = scored(trainer, (DIRECT.format(2), REASONED.format(9, 0)))
    tokens = action_tokens(trainer.processing_class, 4)
    gradient = step_gradient(trainer, inputs, answers)
    assert gradient.norm() > 1e-4
    assert apart(gradient, enumerated(trainer, inputs, tokens)) < 1e-6


# (r_invalid, r_0, r_1, ...): other numbers of actions, a completion as it was sampled, and one that has no reward.
TABLES = [(-1.2, -1.0, 1.0, 0.5), (-3.0, 2.0, -2.0, 0.0), (0.7,), (math.nan,), (-0.4, 0.1, 0.2), (-0.4, 0.1, 0.2)]
CHANCES = [(0.2, 0.5, 0.2), (0.9, 0.05, 0.0), (), (), (0.99, 0.01), (0.3, 0.7)]


def definition(group, scale_rewards):
    """(m, S) of TABLES and CHANCES by the sums of their definition."""
    pairs = zip(TABLES, CHANCES, strict=True)
    outcomes = [[(1 - sum(ps), invalid), *zip(ps, rewards, strict=True)] for (invalid, *rewards), ps in pairs]
    groups = [outcomes[i : i + group] for i in range(0, len(outcomes), group)]
    groups = [[row for row in members if not math.isnan(row[0][1])] for members in groups]
    means = [fmean(sum(p * r for p, r in row) for row in members) for members in groups]
    squares = [
        [sum(p * (r - mean) ** 2 for p, r in row) for row in members]
        for mean, members in zip(means, groups, strict=True)
    ]
    pools = [sum(squares, [])] * len(groups) if scale_rewards == "batch" else squares
    scales = [1.0 if scale_rewards == "none" else math.sqrt(fmean(pool)) + 1e-4 for pool in pools]
    return [[value for value in values for _ in range(group)] for values in (means, scales)]


def step_rewards(tables=TABLES, others=(0.0,) * 6, surplus=(0.0,) * 6):
    """Answers at the third token of each completion with more than one reward."""
    answers = []
    for (invalid, *rewards), other, more in zip(tables, others, surplus, strict=True):
        gains = [reward - invalid for reward in rewards]
        column = 2 if gains else -1
        answers.append(AnswerRewards(invalid + other, column, [7] * len(gains), gains, other, more))
    return StepRewards.stack(answers, "cpu")


def padded_chances():
    """CHANCES (6, 3), with a probability where a row has no action: nothing is gained there."""
    return torch.tensor([[*row, *[0.6] * (3 - len(row))] for row in CHANCES])


@pytest.mark.parametrize("scale_rewards", FIELDS["SCALE_REWARDS"].metadata["choices"])
def test_mean_and_deviation_are_those_of_the_mixture(scale_rewards):
    means, scale = mean_and_scale(step_rewards(), padded_chances(), 2, scale_rewards)
    expected_means, expected_scale = definition(2, scale_rewards)
    assert means.tolist() == pytest.approx(expected_means, rel=1e-5)
    assert scale.tolist() == pytest.approx(expected_scale, rel=1e-5)


def test_a_policy_that_is_certain_divides_by_no_nan():
    """Rounding leaves a variance below 0 here."""
    answers = step_rewards([(-37.6, 0.4, 1.5)] * 2, (0.0,) * 2, (0.0,) * 2)
    _, scale = mean_and_scale(answers, torch.tensor([[1.2e-7, 0.99999988]] * 2), 2, "group")
    assert (scale >= 1e-4).all()


def test_equal_expected_rewards_teach_nothing_whatever_their_size():
    """A policy that is certain of its answer. In float32 the mean of V differs from it by rounding, and its deviation
    is as small."""
    for best in (-1509.8, -73.2, 123456.7):
        answers = step_rewards([(best - 330, best, best - 300)] * 8, (0.0,) * 8, (0.0,) * 8)
        for chances in ([1.0, 0.0], [0.0, 1.0]):
            weights, sampled = torch.ones(8, 5) / 40, torch.zeros(8)
            expected = ExpectedReward(answers, torch.tensor([chances] * 8), sampled, weights, 8, "group")
            assert expected.advantages.dtype == torch.float32 and expected.advantages.abs().max() < 1e-5
            loss = expected.loss(torch.arange(8), torch.tensor([chances] * 8, requires_grad=True))
            assert loss.dtype == torch.float32 and abs(loss.item()) < 1e-5


def test_advantages_by_token():
    """Before the answer it is the advantage of V, and at it that of the sampled rewards of the other functions. Behind
    it the looked-up functions add what they gave beyond the reward of the action. A completion as it was sampled has
    the same advantage at all tokens, and one without a reward has none and is left out of the means."""
    others, surplus = (0.4, 0.0, 0.0, 0.0, 0.0, 0.6), (0.0, 0.3, 0.0, 0.0, 0.0, 0.0)
    answers, p = step_rewards(others=others, surplus=surplus), padded_chances()
    values = expected_rewards(answers, p)
    means, scale = mean_and_scale(answers, p, 3, "none")
    advantages = token_advantages(answers, values, means, scale, torch.full((6,), 9.0), 3, 5)
    v = values.tolist()
    m, n = sum(v[:3]) / 3, sum(v[4:]) / 2
    before = [v[0] - m, v[1] - m, v[2] - m, 0.0, v[4] - n, v[5] - n]
    at = [0.8 / 3, -0.4 / 3, v[2] - m, 0.0, -0.3, 0.3]
    behind = [0.8 / 3, -0.4 / 3 + 0.3, v[2] - m, 0.0, -0.3, 0.3]
    for column, expected in enumerate((before, before, at, behind, behind)):
        assert advantages[:, column].tolist() == pytest.approx(expected, abs=1e-6), column


MIXED = (DIRECT.format(2), REASONED.format(9, 0), REASONED.format(7, 3), "<|channel|>final<|message|>hour<|return|>")
READABLE = (*MIXED[:2], REASONED.format(7, 1), MIXED[3])  # the second row has no action 3
TWO_ROWS = (REWARDS, (0.3, 0.1, 0.2))  # the second with three actions


@pytest.fixture(scope="module")
def mixed_trainer(tiny, tmp_path_factory):
    """With a KL term, a limit on the engine's ratios and a function beside; rows with four and with three actions."""
    changes = {"BETA": 0.1, "IS_CLIP_MAX": 1.3, "REWARDS": "action,format=0.3", "SCALE_REWARDS": "batch"}
    return trainer_with(tiny, tmp_path_factory.mktemp("mixed"), TWO_ROWS, **changes)


def engine_logps(ids):
    return [[-1.0 + 0.1 * n for n in range(len(row))] for row in ids]


@pytest.mark.parametrize("loss_type", LOSSES)
def test_any_cut_gives_the_same_gradient(mixed_trainer, loss_type):
    trainer, mixed_trainer.loss_type = mixed_trainer, loss_type
    inputs, answers = scored(trainer, READABLE, engine_logps)
    assert answers.is_expected.tolist() == [True, True, True, False]
    first = step_gradient(trainer, inputs, answers, 4)
    assert first.norm() > 1e-4
    for cut in ((1, "prefix"), (3, "none")):
        assert apart(step_gradient(trainer, inputs, answers, *cut), first) < 1e-3, cut


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_answer_weighs_what_the_loss_gives_a_token(mixed_trainer, loss_type, monkeypatch):
    """As TRL's own loss weighs it: its slope by each log-prob at an advantage of 1."""
    trainer, mixed_trainer.loss_type = mixed_trainer, loss_type
    monkeypatch.setattr(trainer, "beta", 0.0)
    inputs, _ = scored(trainer, MIXED)
    inputs["completion_mask"][2] = 0
    logps = torch.zeros(inputs["completion_mask"].shape, requires_grad=True)
    figures = lambda *arguments, **options: (logps, torch.zeros_like(logps), None)  # noqa: E731
    with plain_trl(trainer), monkeypatch.context() as patch:
        patch.setattr(trainer, "_get_per_token_logps_and_entropies", figures)
        loss = trainer._compute_loss(trainer.model, inputs | {"advantages": torch.ones(4)})
    (slope,) = torch.autograd.grad(loss, logps)
    torch.testing.assert_close(trainer.token_weights(inputs), -slope, rtol=1e-5, atol=1e-9)
    assert -slope[0, 0] > 0 and not slope[2].any()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_advantages_by_token_are_those_by_completion_where_they_are_equal(mixed_trainer, loss_type):
    """So Liger's loss takes them as it takes its own: value, gradient and logged means, with ratios away from 1."""
    trainer, mixed_trainer.loss_type = mixed_trainer, loss_type
    inputs, _ = scored(trainer, MIXED, engine_logps)
    shape = inputs["completion_mask"].shape
    inputs["old_per_token_logps"] = torch.full(shape, -1.0)
    inputs["advantages"] = torch.tensor([1.3, -0.7, -1.1, 0.4])
    loss, gradient = loss_and_gradients(trainer, inputs, 2)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
    inputs["advantages"] = inputs["advantages"][:, None].expand(shape)
    by_token, gradient_by_token = loss_and_gradients(trainer, inputs, 2)
    assert by_token == pytest.approx(loss, rel=1e-6) and apart(gradient_by_token, gradient) < 1e-6
    assert {name: values[-1] for name, values in trainer._metrics["train"].items() if values} == pytest.approx(metrics)


@pytest.mark.parametrize("rewards", ["action", "action,test_expected_reward:by_length"])
def test_the_importance_ratio_is_for_sampled_tokens(tiny, tmp_path, rewards):
    """The answer's token has none, as all actions stand there by their probability. The tokens before it have theirs,
    and so has the answer's for functions that are not looked up."""
    trainer = trainer_with(tiny, tmp_path, REWARDS=rewards, IS_CLIP_MAX=100.0)
    inputs, answers = scored(trainer, (DIRECT.format(2), REASONED.format(9, 0)))
    policy = policy_logps(trainer, inputs)
    at_answer = torch.arange(policy.size(1)) == answers.position[:, None]
    gradients = []
    for mismatch in (torch.zeros_like(policy), 0.7 * at_answer, 0.7 * ~at_answer):
        gradients.append(step_gradient(trainer, inputs | {"sampling_per_token_logps": policy - mismatch}, answers))
    on_policy, off_at_answer, off_elsewhere = gradients
    assert apart(off_elsewhere, on_policy) > 1e-2
    if rewards == "action":
        assert apart(off_at_answer, on_policy) < 1e-5
    else:
        assert apart(off_at_answer, on_policy) > 1e-2


def by_length(completion_ids, **columns):
    """A function that cannot be looked up."""
    return [len(ids) / 10 for ids in completion_ids]


def twice_action(completions, *, reward_action_0, **columns):
    """A user's function that depends on row and action alone, and says so."""
    return [2.0 * ("[0]" in text) + value for text, value in zip(completions, reward_action_0, strict=True)]


twice_action.by_action = True


def stays_away(completion_ids, **columns):
    """None for a direct answer of action 2."""
    return [None if len(ids) == 7 and ids[4] == 17 else 1.0 for ids in completion_ids]


def test_functions_beside_are_sampled_and_own_ones_can_take_part(tiny, tmp_path):
    rewards = "action=2,test_expected_reward:twice_action=0.5,format=0.25"
    trainer = trainer_with(tiny, tmp_path, REWARDS=rewards)
    assert [f.name for f in trainer.scorer.lookup.looked_up] == ["action", "test_expected_reward:twice_action"]
    _, answers = scored(trainer, (DIRECT.format(2), OTHER_WORDS.format(2)))
    assert answers.other_reward.tolist() == [0.25, 0.0]
    unreadable = 2 * INVALID + 0.5 * REWARDS[0]
    assert answers.base_reward.tolist() == pytest.approx([unreadable + 0.25, unreadable])
    gains = [2 * (r - INVALID) + 1.0 * (k == 0) for k, r in enumerate(REWARDS)]
    assert answers.gains.tolist() == [pytest.approx(gains)] * 2
    assert answers.surplus.tolist() == pytest.approx([0.0] * 2, abs=1e-6)


def shy(completions, **columns):
    return [None] * len(completions)


shy.by_action = True


def test_functions_that_are_looked_up_keep_their_own_weights(tiny, tmp_path):
    """By their names and not by their places among all functions; one of weight 0 may leave everything out."""
    rewards = "format=0.25,test_expected_reward:by_length=7,action=2,test_expected_reward:shy=0"
    trainer = trainer_with(tiny, tmp_path, REWARDS=rewards)
    assert trainer.scorer.lookup.looked_up == trainer.scorer.functions[2:]
    _, answers = scored(trainer, (DIRECT.format(2), DIRECT.format(0)))
    assert answers.is_expected.all()
    assert answers.gains.tolist() == [pytest.approx([2 * (r - INVALID) for r in REWARDS])] * 2
    assert answers.surplus.tolist() == pytest.approx([0.0] * 2, abs=1e-6)
    assert (answers.base_reward - answers.other_reward).tolist() == pytest.approx([2 * INVALID] * 2)


def test_a_completion_without_a_reward_is_sampled_as_before(tiny, tmp_path):
    trainer = trainer_with(tiny, tmp_path, REWARDS="action,test_expected_reward:stays_away=0.5", NUM_GENERATIONS=3)
    texts = (DIRECT.format(2), DIRECT.format(1), REASONED.format(9, 0))
    inputs, answers = scored(trainer, texts)
    assert answers.is_expected.tolist() == [False, True, True]
    assert answers.base_reward[0].item() == pytest.approx(REWARDS[2]) and not answers.gains[0].any()
    assert step_gradient(trainer, inputs, answers).isfinite().all()


def test_a_run_without_an_answer_learns_as_if_it_were_off(tiny, tmp_path):
    """Truncated and unreadable completions: the very gradient of the sampled rewards."""
    texts = ("<|channel|>final<|message|>hour<|return|>", "<|channel|>analysis<|message|>[2]")
    trainer = trainer_with(tiny, tmp_path, REWARDS="action,test_expected_reward:by_length")
    inputs, answers = scored(trainer, texts)
    assert not answers.is_expected.any()
    expected = step_gradient(trainer, inputs, None)
    assert expected.norm() > 1e-4 and apart(step_gradient(trainer, inputs, answers), expected) < 1e-6


# Completions, and the action whose token decides; None: it is learned from as it was sampled.
DECIDED = {
    DIRECT.format(3): 3,
    REASONED.replace("hour {}", "3").format(3): 3,
    OTHER_WORDS.format(0): 0,
    DIRECT.format("1] [1"): None,
    DIRECT.format("1] at 1 hour [1"): None,
    DIRECT.format(4): None,
    "<|channel|>analysis<|message|>[2]<|return|>": None,
    DIRECT.format(2).removesuffix("<|return|>"): None,
}


@pytest.fixture(scope="module")
def lookup(tiny):
    return RewardLookup([], [], load_tokenizer(str(tiny)))


def completion_of(row, text):
    action = parse_action(assistant_turn(row.prompt, text), len(row.rewards))
    return Completion(row, text, action, 1, not text.endswith("<|return|>"))


@pytest.mark.parametrize(("text", "action"), DECIDED.items())
def test_the_answers_token(lookup, text, action):
    (row,) = rows_with(REWARDS)
    (ids,) = lookup.tokenizer(text=[text])["input_ids"]
    (column,) = lookup.answer_positions([completion_of(row, text)], [ids])
    assert column == (-1 if action is None else len(ids) - 3)
    assert action is None or ids[column] == action_tokens(lookup.tokenizer, 4)[action]


def test_the_answers_token_behind_an_opened_channel(lookup):
    (row,) = rows_with(REWARDS)
    row = dataclasses.replace(row, prompt=row.prompt + "<|channel|>final<|message|>")
    ids = lookup.tokenizer(text=["[3]<|return|>"])["input_ids"]
    assert lookup.answer_positions([completion_of(row, "[3]<|return|>")], ids) == [1]


def test_rewards_of_actions_whatever_token_ends_a_text(tiny):
    """A tokenizer may name another end than Harmony's <|return|>: answers are not truncated then."""
    tokenizer = load_tokenizer(str(tiny))
    tokenizer.eos_token = "<|endoftext|>"
    settings = load_settings({"MODEL_ID": "tiny"})[0]
    (row,) = rows_with(REWARDS)
    lookup = RewardLookup(load_rewards([("action", 1.0)], settings), list(row.columns), tokenizer)
    assert lookup.rewards_of_actions(row, initial_trainer_state(1)) == pytest.approx([INVALID, *REWARDS])


class PiecewiseTokenizer:
    def __call__(self, text, **options):
        return {"input_ids": [list(part.encode()) for part in text]}


def test_actions_of_several_tokens_are_sampled():
    assert action_tokens(PiecewiseTokenizer(), 10) == list(range(48, 58))
    assert action_tokens(PiecewiseTokenizer(), 11) == []


def test_metrics_say_how_many_learned_so(tiny, tmp_path):
    """A group whose completions agree teaches nevertheless, unless its actions pay the same. The last group cannot be
    read."""
    trainer = trainer_with(tiny, tmp_path, (REWARDS, (0.5, 0.5), REWARDS))
    texts = [DIRECT.format(1)] * 4 + ["<|channel|>final<|message|>hour<|return|>"] * 2
    rates = trainers.score_completions(trainer, trainer.processing_class(text=texts)["input_ids"]).rates
    assert rates["zero_std_fraction"] == pytest.approx(2 / 3) and rates["expected_share"] == pytest.approx(4 / 6)


def learned(ranks, tiny, folder):
    """How two steps moved the adapter."""
    changes = {"LEARNING_RATE": 1e-3, "SCALE_REWARDS": "batch", "REWARDS": "action,format=0.3"}
    trainer = trainer_with(tiny, folder, TWO_ROWS * 2, ranks, **changes)
    ids = trainer.processing_class(text=[*READABLE] * 2)["input_ids"]
    trainers.sample_with(trainer, lambda: (ids, None))
    return moved_by_training(trainer)


def test_two_processes_learn_what_one_does(tiny, tmp_path):
    (alone,) = in_ranks(1, learned, tiny, tmp_path / "1")
    first, second = in_ranks(2, learned, tiny, tmp_path / "2")
    assert first == second and torch.tensor(alone).norm() > 1e-3
    assert apart(torch.tensor(first), torch.tensor(alone)) < 1e-4
    (row, *_) = read_csv(tmp_path / "2" / "0" / "metrics.csv")
    assert float(row["expected_share"]) == pytest.approx(3 / 4)
