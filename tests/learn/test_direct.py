# SPDX-License-Identifier: Apache-2.0
"""Direct answers: a step's gradient is that of the mean of V / S by hand."""

import dataclasses

import pytest
import torch
from ranked import in_ranks
from test_expected_reward import LOSSES, REWARDS, rows_with, trainer_with
from trainers import apart, gradient_of, moved_by_training

from grpo.harmony import open_answer
from grpo.learn import learner
from grpo.model.attention import unwrap_peft
from grpo.reward.lookup import action_tokens
from grpo.rollout import direct
from grpo.settings.table import FIELDS

pytestmark = pytest.mark.numeric

TABLES = (REWARDS, (0.3, 0.1, 0.2), (0.0, 1.0, 0.5, 0.25))  # the second row has three actions
SCALINGS = FIELDS["SCALE_REWARDS"].metadata["choices"]


def direct_trainer(tiny, folder, tables=TABLES, ranks=None, **changes):
    """A trainer as `train_grpo.train` builds it with DIRECT_ANSWERS."""
    settings = {"DIRECT_ANSWERS": True, "NUM_GENERATIONS": 1, "MAX_COMPLETION_LEN": 1}
    rows = [dataclasses.replace(row, prompt=open_answer(row.prompt)) for row in rows_with(*tables)]
    return trainer_with(tiny, folder, tables, ranks, rows, 0.25, **settings | changes)


def step_gradient(trainer, micro_batch=4, packing="prefix"):
    """The gradient of a whole step over all rows, choosing included, as one vector."""
    trainer.run.resolved.plan = dataclasses.replace(trainer.run.plan, micro_batch=micro_batch)
    trainer.run.resolved.settings = dataclasses.replace(trainer.run.settings, PACKING=packing)
    trainer.model.zero_grad()
    trainer.training_step(trainer.model, [{"prompt": row.prompt, "row": n} for n, row in enumerate(trainer.run.rows)])
    return gradient_of(trainer)


def logps_by_hand(trainer, row):
    """Log-probs (V,) of all tokens behind a row's prompt, from the whole model alone; differentiable."""
    ids = torch.tensor(trainer.processing_class(text=[row.prompt])["input_ids"])
    return (trainer.model(input_ids=ids, use_cache=False).logits[0, -1] / trainer.temperature).log_softmax(-1)


def by_hand(trainer, scale_rewards="group"):
    """The gradient of -mean(V / (S + eps)), over all tokens of the vocabulary."""
    trainer.model.eval()
    values, variances = [], []
    for row in trainer.run.rows:
        p, (worst, best) = logps_by_hand(trainer, row).exp(), (min(row.rewards), max(row.rewards))
        table = torch.full_like(p, worst - 0.1 * (best - worst)).detach()
        table[action_tokens(trainer.processing_class, len(row.rewards))] = torch.tensor(row.rewards)
        values.append((p * table).sum())
        variances.append((p * (table - values[-1]).square()).sum().detach())
    values, variance = torch.stack(values), torch.stack(variances)
    variance = variance.mean() if scale_rewards == "batch" else variance
    trainer.model.zero_grad()
    (-values / (1 if scale_rewards == "none" else variance.sqrt() + 1e-4)).mean().backward()
    return gradient_of(trainer)


@pytest.mark.parametrize(
    ("scale_rewards", "loss_type"),
    [*((scaling, LOSSES[0]) for scaling in SCALINGS), *(("group", loss_type) for loss_type in LOSSES[1:])],
)
def test_the_gradient_is_that_of_the_expected_reward(tiny, tmp_path, scale_rewards, loss_type):
    """With every loss type: there are no lengths to weigh, and MAX_COMPLETION_LEN divides nothing."""
    trainer = direct_trainer(tiny, tmp_path, SCALE_REWARDS=scale_rewards, LOSS_TYPE=loss_type)
    expected = by_hand(trainer, scale_rewards)
    assert expected.norm() > 1e-4
    assert apart(step_gradient(trainer), expected) < 1e-3


@pytest.mark.parametrize("micro_batch, packing", [(1, "prefix"), (2, "prefix"), (3, "none"), (1, "none")])
def test_any_cut_gives_the_same_gradient(tiny, tmp_path, micro_batch, packing):
    """Two of the prompts are equal, so that they share a group where prompts are shared."""
    trainer = direct_trainer(tiny, tmp_path, SCALE_REWARDS="batch")
    trainer.run.rows[2] = dataclasses.replace(trainer.run.rows[2], prompt=trainer.run.rows[0].prompt)
    whole = step_gradient(trainer)
    assert whole.norm() > 1e-4 and apart(step_gradient(trainer, micro_batch, packing), whole) < 1e-4


def test_a_row_without_the_reward_of_an_action_teaches_nothing(tiny, tmp_path):
    trainer = direct_trainer(tiny, tmp_path, REWARDS="action,test_direct:knows_all_but_the_first=0.5")
    assert trainer.scorer.lookup.looked_up == trainer.scorer.functions
    whole = step_gradient(trainer)
    trainer.run.rows[0] = dataclasses.replace(trainer.run.rows[0], prompt=trainer.run.rows[1].prompt)
    assert whole.isfinite().all() and whole.norm() > 1e-4 and apart(step_gradient(trainer), whole) < 1e-5


def knows_all_but_the_first(completions, *, reward_action_0, **columns):
    """None for one answer to the first row, the same for all others. The prompt holds the answer's `[`."""
    pairs = zip(completions, reward_action_0, strict=True)
    return [None if first == REWARDS[0] and text == "1]" else 0.5 for text, first in pairs]


knows_all_but_the_first.by_action = True


def test_a_step_is_two_forward_passes(tiny, tmp_path, monkeypatch):
    """One chooses, without a gradient, and tells the probabilities that learning divides by; the other learns."""
    passes = []
    for module in (learner, direct):

        def counted(*arguments, original=module.hidden_states):
            passes.append(torch.is_grad_enabled())
            return original(*arguments)

        monkeypatch.setattr(module, "hidden_states", counted)
    trainer = direct_trainer(tiny, tmp_path)
    step_gradient(trainer)
    assert passes == [False, True]


def test_logits_are_held_for_one_position_of_a_prompt(tiny, tmp_path):
    trainer, shapes = direct_trainer(tiny, tmp_path), []
    head = unwrap_peft(trainer.model).get_output_embeddings()
    head.register_forward_hook(lambda module, arguments, logits: shapes.append(tuple(logits.shape)))
    step_gradient(trainer, micro_batch=1)
    assert shapes == [(1, trainer.model.config.vocab_size)] * 3


def test_figures_are_those_of_the_chosen_token(tiny, tmp_path):
    """Entropy is that behind the prompt, and TRL's figures of lengths are not logged."""
    trainer = direct_trainer(tiny, tmp_path)
    step_gradient(trainer)
    trainer.model.eval()
    with torch.no_grad():
        logps = [logps_by_hand(trainer, row) for row in trainer.run.rows]
    entropy = -sum((logp.exp() * logp).sum().item() for logp in logps) / len(logps)
    metrics = trainer._metrics["train"]
    assert metrics["entropy"] == [pytest.approx(entropy, rel=1e-4)]
    assert not [name for name in metrics if name.startswith("completions/")]


def test_probabilities_and_tokens_behind_prompts(tiny, tmp_path):
    """Those of the model's own logits, in any micro-batches; a seed decides which tokens are drawn; 0 is greedy."""
    trainer = direct_trainer(tiny, tmp_path)
    prompts = [trainer.processing_class(text=[row.prompt])["input_ids"][0] for row in trainer.run.rows]
    tokens = action_tokens(trainer.processing_class, 4)
    trainer.model.eval()
    with torch.no_grad():
        logps = torch.stack([logps_by_hand(trainer, row) for row in trainer.run.rows])
    base = unwrap_peft(trainer.model)
    for limit in (1, 10_000):
        _, chances = direct.choose_tokens(base, prompts, tokens, trainer.temperature, "eager", limit, True)
        torch.testing.assert_close(chances, logps.exp()[:, tokens], rtol=1e-4, atol=1e-7)
    chosen, chances = direct.choose_tokens(base, prompts, tokens, 0.0, "eager", 10_000, True)
    assert chosen.tolist() == logps.argmax(-1).tolist()
    assert torch.equal(chances, (chosen[:, None] == torch.tensor(tokens)).float())

    def drawn(seed):
        torch.manual_seed(seed)
        many = direct.choose_tokens(base, prompts[:1] * 600, tokens, trainer.temperature, "eager", 10_000, True)
        return many[0].tolist()

    assert drawn(1) == drawn(1) != drawn(2)
    share = drawn(1).count(tokens[0]) / 600
    assert share == pytest.approx(logps[0, tokens[0]].exp().item(), abs=0.08), "four standard errors"


def learned(ranks, tiny, folder):
    """How two steps moved the adapter."""
    tables, changes = (*TABLES, REWARDS, REWARDS[::-1]), {"LEARNING_RATE": 1e-3, "SCALE_REWARDS": "batch"}
    return moved_by_training(direct_trainer(tiny, folder, tables, ranks, **changes))


def test_two_processes_learn_what_one_does(tiny, tmp_path):
    (alone,) = in_ranks(1, learned, tiny, tmp_path / "1")
    first, second = in_ranks(2, learned, tiny, tmp_path / "2")
    assert first == second and torch.tensor(alone).norm() > 1e-3
    assert apart(torch.tensor(first), torch.tensor(alone)) < 1e-3
