# SPDX-License-Identifier: Apache-2.0
"""Several optimizer steps that share a rollout: what they learn from, how they are resumed, and what the logs say."""

import dataclasses
import functools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import read_csv
from ranked import in_ranks
from test_distributed import TIMES, learned
from test_expected_reward import MIXED, REWARDS, scored, step_gradient, trainer_with
from trainers import apart, batch, loss_and_gradients, make, plain_float32, policy_logps, step_of

from grpo.learn.distributed import flat_adapter
from grpo.learn.learner import Learner
from grpo.model.attention import unwrap_peft
from grpo.output.checkpoints import ROLLOUT, checkpoint_fault
from grpo.output.folder import cut_logs
from grpo.output.layout import MANIFEST

pytestmark = pytest.mark.numeric
SHARED = {"STEPS_PER_GENERATION": 2, "NUM_ITERATIONS": 2}


@pytest.mark.parametrize("sharing", [SHARED, {"NUM_ITERATIONS": 2}, {"STEPS_PER_GENERATION": 2}])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_the_engines_ratio_counts_once(tiny, tmp_path, mode, sharing):
    """As long as nothing is clipped, a step that shares its rollout has the gradient of one that does not, whose weight
    is the corrected ratio: the policy ratio already is that ratio, and only its excess is taken away. The limit is
    exceeded by some tokens, and one token's log-prob is unknown."""
    changes = {"IS_CORRECTION": mode, "IS_CLIP_MAX": 1.3, "EPSILON": 0.99, "EPSILON_HIGH": 99.0}
    gradients = []
    for name, shared in (("alone", {}), ("shared", sharing)):
        (tmp_path / name).mkdir()
        trainer = plain_float32(make(tiny, tmp_path / name, **changes | shared))
        inputs = batch(trainer, sampled=True)
        if shared:
            inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
        gradients.append(loss_and_gradients(trainer, inputs, 2)[1])
    alone, shared = gradients
    assert apart(shared, alone) < 1e-5


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate"])
def test_a_sequence_above_the_limit_counts_less(tiny, tmp_path, mode):
    """With sequence_mask not at all, with sequence_truncate as much as the limit is of its ratio."""
    limit = 4.0
    trainer = plain_float32(make(tiny, tmp_path, IS_CORRECTION=mode, IS_CLIP_MAX=limit, **SHARED))
    inputs = batch(trainer, sampled=True)
    inputs["old_per_token_logps"] = sampled = inputs["sampling_per_token_logps"]
    ratios = ((policy_logps(trainer, inputs) - sampled) * inputs["completion_mask"]).nan_to_num(nan=0.0).sum(1).exp()
    assert (ratios > limit).tolist().count(True) in (1, 2, 3)
    gradient = loss_and_gradients(trainer, inputs, 2)[1]
    trainer.run.resolved.settings = dataclasses.replace(trainer.run.settings, IS_CORRECTION="none")
    weights = torch.where(ratios > limit, limit / ratios if mode == "sequence_truncate" else torch.zeros(()), 1.0)
    corrected = inputs | {"advantages": inputs["advantages"] * weights}
    assert apart(gradient, loss_and_gradients(trainer, corrected, 2)[1]) < 1e-5


def with_engine(trainer):
    """The trainer beside an engine that samples the same tokens with the same log-probs for every caller. Returns the
    list that gets the batch of each step."""
    trainer.run.engine = SimpleNamespace(
        generate=lambda prompts, *arguments: step_of(trainer, len(prompts)),
        wake=lambda: None,
        sleep=lambda: None,
        sync_weights=lambda *arguments: None,
        seconds=dict.fromkeys(("wake", "handover", "sleep"), 1.0),
        sync_share=None,
    )
    trainer.args.save_strategy, seen = "no", []
    trainer.learn = lambda model, part, *others: seen.append(part) or Learner.learn(trainer, model, part, *others)
    return seen


@pytest.mark.parametrize("sharing", [{}, {"NUM_ITERATIONS": 2}, {"STEPS_PER_GENERATION": 2}])
def test_either_setting_alone_makes_vllms_log_probs_the_old_ones(tiny, tmp_path, sharing):
    trainer = plain_float32(make(tiny, tmp_path, **sharing))
    seen = with_engine(trainer)
    trainer.train()
    assert [part.get("old_per_token_logps") is not None for part in seen] == [bool(sharing)] * 2


def test_vllms_log_probs_are_the_old_ones(tiny, tmp_path):
    """They are not computed a second time, but those of the reference are. Each step has its own prompts, whole groups,
    and half of the tokens that the rollout counts."""
    trainer = plain_float32(make(tiny, tmp_path, BETA=0.1, TOTAL_STEPS=5, **SHARED))
    seen = with_engine(trainer)
    compute, computed = trainer.batch_logps, []
    trainer.batch_logps = lambda batch, with_adapter: computed.append(with_adapter) or compute(batch, with_adapter)
    trainer.train()
    assert computed == [False] * 2
    for part in seen:
        assert part["old_per_token_logps"] is not None and len(part["completion_ids"]) == 4
        torch.testing.assert_close(part["old_per_token_logps"], part["sampling_per_token_logps"], equal_nan=True)
        assert not torch.equal(part["ref_per_token_logps"], part["old_per_token_logps"])
    ids = [part["completion_ids"].tolist() for part in seen]
    assert ids[:2] == ids[2:4] and ids[0] != ids[1] and ids[4] not in ids[:4]
    assert 2 * seen[0]["num_items_in_batch"] == sum(part["completion_mask"].sum() for part in seen[:2])
    prompts = seen[0]["prompt_ids"]
    assert torch.equal(prompts[0], prompts[1]) and not torch.equal(prompts[0], prompts[2])
    assert [row["wake_s"] for row in read_csv(tmp_path / "metrics.csv")] == ["1", "0", "0", "0", "1"]


def test_old_log_probs_know_no_dropout(tiny, tmp_path):
    """Where transformers generates, they are computed as it sampled."""
    trainer = trainer_with(tiny, tmp_path, LORA_DROPOUT=0.5, **SHARED)
    first, second = (scored(trainer, MIXED[:2])[0]["old_per_token_logps"] for _ in range(2))
    assert torch.equal(first, second)


def test_the_expected_reward_is_that_of_the_policy_that_learns(tiny, tmp_path):
    """In a later step of a rollout the tokens of the prefix have ratios away from 1. Nothing else differs from a step
    whose completions the present policy sampled: neither mean, scale and V, nor the answer's token."""
    trainer = trainer_with(tiny, tmp_path, (REWARDS, REWARDS), EPSILON=0.99, EPSILON_HIGH=99.0, **SHARED)
    inputs, answers = scored(trainer, MIXED)
    del inputs["old_per_token_logps"]
    assert answers.is_expected.tolist() == [True, True, True, False]
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * parameter.requires_grad)
    policy = policy_logps(trainer, inputs)
    before = torch.arange(policy.size(1)) < answers.position[:, None]
    fresh = step_gradient(trainer, inputs, answers)
    at_answer = inputs | {"old_per_token_logps": policy - 0.7 * ~before * answers.is_expected[:, None]}
    assert apart(step_gradient(trainer, at_answer, answers), fresh) < 1e-5
    # With a ratio of e at every token of the prefix, the gradient of the prefix alone is e times as large.
    older = inputs | {"old_per_token_logps": policy - (before | ~answers.is_expected[:, None]).float()}
    without_v = trainer.expect(unwrap_peft(trainer.model), inputs, answers)
    without_v.slopes = torch.zeros_like(without_v.slopes)
    prefix = step_gradient(trainer, older, answers) - fresh
    trainer.expect = lambda *arguments: without_v
    assert apart(prefix, (torch.e - 1) * step_gradient(trainer, inputs, answers)) < 1e-4


def short_run(tiny, folder, checkpoint=None, **changes):
    """A run of six steps, from a checkpoint where there is one: adapter, metrics but for times, and completions. The
    evaluations of the whole run alone draw random numbers."""
    sizes = {"TOTAL_STEPS": 6, "EVAL_STEPS": 1, "SAVE_STEPS": 1, "SAVE_TOTAL_LIMIT": 9, "PROMPTS_PER_STEP": 2}
    sizes |= {"LORA_DROPOUT": 0.1, "BETA": 0.1, "LEARNING_RATE": 3e-3, "REWARDS": "action,format=0.3"}
    trainer = trainer_with(tiny, folder, (REWARDS,) * 4, **sizes | SHARED | changes)
    trainer.measure = lambda trainer: {"heldout_reward": 1.0 if checkpoint else torch.rand(9).sign().max().item()}
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    metrics = [{name: row[name] for name in row if name not in TIMES} for row in read_csv(folder / "metrics.csv")]
    return flat_adapter(trainer.model), metrics, read_csv(folder / "completions.csv")


@pytest.fixture(scope="module")
def whole_run(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, short_run(tiny, folder)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_run_that_continues_after_any_step_is_the_uninterrupted_one(tiny, tmp_path, whole_run, step):
    whole, (adapter, metrics, completions) = whole_run
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    checkpoint = folder / f"checkpoint-{step}"
    files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    assert (ROLLOUT in files) == (checkpoint / ROLLOUT).exists() == (step != 4) and not checkpoint_fault(checkpoint)
    cut_logs(folder, checkpoint)
    continued, own_metrics, own_completions = short_run(tiny, folder, checkpoint)
    assert torch.equal(continued, adapter) and own_metrics == metrics and own_completions == completions


def test_the_logs_of_shared_rollouts(whole_run):
    """Completions are written once, with the step that generated them, and every step has the figures of its own."""
    folder, (_, metrics, completions) = whole_run
    assert [row["step"] for row in completions] == ["1"] * 8 + ["5"] * 8
    for name in ("reward", "reward_std", "expected_share", "zero_std_fraction", "reward/format", "tokens_mean"):
        assert metrics[0][name] and [row[name] for row in metrics] == [metrics[n - n % 4][name] for n in range(6)], name
    rows = read_csv(folder / "metrics.csv")
    assert [float(row["rollout_s"]) > 0 for row in rows] == [row["rollout_tokens_per_s"] != "" for row in rows]
    assert [float(row["rollout_s"]) > 0 for row in rows] == [True, False, False, False, True, False]


def test_two_processes_learn_what_one_does(tiny, tmp_path):
    shared = functools.partial(learned, losses=["grpo"], TOTAL_STEPS=6, **SHARED)
    (alone,) = in_ranks(1, shared, tiny, tmp_path / "1")
    first, second = in_ranks(2, shared, tiny, tmp_path / "2")
    assert first == second and apart(torch.tensor(first), torch.tensor(alone)) < 2e-5


@pytest.mark.parametrize("shared", [SHARED, {"STEPS_PER_GENERATION": 2, "NUM_ITERATIONS": 1}])
def test_a_run_that_continues_from_its_last_step_trains_no_more(tiny, tmp_path, shared):
    """The last rollout would feed another step. A kill between the last checkpoint and complete.json leaves this."""
    parts = []
    for checkpoint in (None, tmp_path / "checkpoint-3"):
        adapter, metrics, _ = short_run(tiny, tmp_path, checkpoint, TOTAL_STEPS=3, **shared)
        parts.append((adapter.tolist(), [row["step"] for row in metrics]))
    assert parts[0] == parts[1] and parts[1][1] == ["1", "2", "3"]
    assert not (tmp_path / "checkpoint-4").exists()
