# SPDX-License-Identifier: Apache-2.0
"""The trainer: its loss and gradient against plain TRL's however a step is cut, and every hook into TRL."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import read_csv
from trainers import LOSSES, apart, batch, loss_and_gradients, make, plain_float32, policy_logps, score_completions

from grpo.output.logs import FunctionLog
from grpo.rollout.parity import MismatchWatch
from grpo.settings.table import FIELDS

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def trainer(tiny, tmp_path_factory):
    """One in float32, for all tests that change no more than the kind of its loss."""
    return plain_float32(make(tiny, tmp_path_factory.mktemp("shared"), TEMPERATURE=0.8))


CASES = {
    "off-policy, KL": ({"old": True, "beta": 0.1}, []),
    "off-policy by sequence, KL": ({"old": True, "beta": 0.1}, []),
    "by sequence, KL, engine": ({"sampled": True, "beta": 0.1}, [2]),
    "engine": ({"sampled": True}, []),
    "two masked": ({"sampled": True}, [2, 3]),
    "all masked": ({"sampled": True}, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_any_cut_agrees_with_plain_trl(trainer, loss_type, case):
    """In float32, however the step is cut into micro-batches: with policy ratios away from 1 and a KL term, with the
    engine's log-probs, and with completions that MASK_TRUNCATED leaves without any token."""
    options, masked = CASES[case]
    trainer.loss_type, trainer.beta = loss_type, options.get("beta", 0.0)
    trainer.importance_sampling_level = "sequence" if "sequence" in case and loss_type != "vespo" else "token"
    inputs = batch(trainer, **options)
    inputs["completion_mask"][masked] = 0
    expected_loss, expected = loss_and_gradients(trainer, inputs, plain=True)
    assert expected.norm() > 1e-4 or len(masked) == 4, "a gradient of nothing proves nothing"
    # vespo's loss holds log-probs themselves, which nearly cancel: its rounding is theirs.
    rounding = 1e-6 * policy_logps(trainer, inputs).abs().max().item() if loss_type == "vespo" else 3e-6
    for micro_batch, packing in ((1, "prefix"), (3, "prefix"), (2, "none")):
        loss, gradient = loss_and_gradients(trainer, inputs, micro_batch, packing)
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=rounding), (packing, micro_batch)
        assert (gradient - expected).norm() <= 1e-4 * expected.norm(), (packing, micro_batch)


def test_the_logged_mismatch_is_over_known_tokens_only(tiny, tmp_path):
    """Not over padding, nor over the token whose engine log-prob is unknown; its ratio counts as 1."""
    trainer = plain_float32(make(tiny, tmp_path, IS_CORRECTION="token_truncate", IS_CLIP_MAX=1.3))
    inputs, metrics = batch(trainer, sampled=True), trainer._metrics["train"]
    mask = inputs["completion_mask"].bool()
    difference = (policy_logps(trainer, inputs) - inputs["sampling_per_token_logps"])[mask]
    known = difference[~difference.isnan()]
    assert len(known) == len(difference) - 1 == 18
    watched = []
    trainer.run.watch = SimpleNamespace(compare=lambda *figures: watched.append(figures))
    for micro_batch in (1, 2, 4):
        metrics.clear()
        loss_and_gradients(trainer, inputs, micro_batch)
        for name, value in (("mean", known.abs().mean()), ("max", known.abs().max())):
            assert metrics[f"sampling/sampling_logp_difference/{name}"] == [pytest.approx(value.item(), rel=1e-4)]
        assert watched.pop() == (1, pytest.approx(known.abs().mean().item(), rel=1e-4), pytest.approx(1 / 19))
        mean = (known.exp().clamp(max=1.3).sum().item() + 1) / 19
        assert metrics["sampling/importance_sampling_ratio/mean"] == [pytest.approx(mean, rel=1e-4)]


def test_a_step_of_truncated_completions_alone_is_no_mismatch(tiny, tmp_path):
    """MASK_TRUNCATED leaves out all of them: no log-prob is left that could be compared with vLLM's."""
    trainer = plain_float32(make(tiny, tmp_path, MASK_TRUNCATED=True))
    trainer.run.watch = MismatchWatch(trainer.run.settings, [])
    inputs = batch(trainer, sampled=True)
    inputs["completion_mask"][:] = 0
    loss, gradient = loss_and_gradients(trainer, inputs, 2)
    assert loss == 0 and not gradient.any()
    assert all(math.isfinite(value) for values in trainer._metrics["train"].values() for value in values)


@pytest.mark.parametrize("mode", FIELDS["IS_CORRECTION"].metadata["choices"])
def test_corrections_agree_with_plain_trl(tiny, tmp_path, mode):
    """A limit that some tokens and sequences exceed, and others do not."""
    trainer = plain_float32(make(tiny, tmp_path, IS_CORRECTION=mode, IS_CLIP_MAX=4.0 if "seq" in mode else 1.3))
    inputs = batch(trainer, sampled=True)
    expected_loss, expected = loss_and_gradients(trainer, inputs, plain=True)
    loss, gradient = loss_and_gradients(trainer, inputs, 2)
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert apart(gradient, expected) < 1e-4


def test_micro_batch_is_exact_for_completions_of_full_length(tiny, tmp_path):
    trainer = make(tiny, tmp_path)
    inputs = batch(trainer)
    ids = torch.cat([inputs["completion_ids"]] * 2, 1)[:, :8]
    inputs |= {"completion_ids": ids, "completion_mask": torch.ones_like(ids)}
    # In eager attention's rows, a third completion would take a row as long as that of the first two.
    cuts = {1: [[0], [1], [2], [3]], 2: [[0, 1], [2, 3]], 3: [[0, 1], [2, 3]], 4: [[0, 1, 2, 3]]}
    for micro_batch, expected in cuts.items():
        trainer.run.resolved.plan = dataclasses.replace(trainer.run.plan, micro_batch=micro_batch)
        assert [rows.tolist() for rows, _ in trainer.micro_batches(inputs)] == expected
    inputs["completion_mask"] = torch.arange(8) < torch.tensor([[2], [8], [4], [8]])
    trainer.run.resolved.plan = dataclasses.replace(trainer.run.plan, micro_batch=1)
    order = [rows.tolist() for rows, _ in trainer.micro_batches(inputs)]
    assert order == [[0, 1], [3], [2]], "the longest comes first"


@pytest.mark.parametrize("masked", [False, True])
def test_truncation_agrees_with_trl(tiny, tmp_path, masked):
    """TRL's clipped ratio, TRL's mask (MASK_TRUNCATED) and completions.csv call the same completions truncated: those
    that end with neither a stop token nor padding, however long they are."""
    trainer = plain_float32(make(tiny, tmp_path, MASK_TRUNCATED=masked, PROMPTS_PER_STEP=4))
    pad = trainer._tokenizer.pad_token_id
    assert len(trainer.eos_token_ids) >= 2, "gpt-oss ends a turn with <|return|> or <|call|>"
    # gpt-oss pads with a token that stops too: without it among those, TRL's two conditions can be told apart.
    trainer.eos_token_ids = [token for token in trainer.eos_token_ids if token != pad]
    stop, other = trainer.eos_token_ids
    cases = [
        ([5, 6, stop], False), ([5] * 8, True), ([7] * 7 + [other], False), ([5, stop, other, pad, 5], True),
        ([5, 6, pad], False), ([7] * 3, True), ([stop], False), ([5, 6, other], False),
    ]  # fmt: skip
    completions, truncated = map(list, zip(*cases, strict=True))
    step = score_completions(trainer, completions)
    inputs = step.batch
    assert [row["truncated"] == "1" for row in read_csv(tmp_path / "completions.csv")] == truncated
    assert step.metrics["completions/clipped_ratio"] == 3 / 8
    lengths = [0 if masked and cut else len(ids) for ids, cut in cases]
    assert inputs["completion_mask"].sum(1).tolist() == lengths and inputs["num_items_in_batch"] == sum(lengths)


def halved(completions, **columns):
    return [None if i in (2, 6, 7) else 0.5 for i in range(len(completions))]


def one_in_four(completions, **columns):
    return [None if i > 5 else float(i == 3) for i in range(len(completions))]


def test_groups_that_teach_nothing_and_completions_that_one_function_leaves_out(tiny, tmp_path):
    """The groups have two equal rewards, two different ones, one reward beside none, and no reward at all: the second
    group alone teaches. A completion that one of two functions leaves out has the reward of the other."""
    specs = "test_trainer:halved=2,test_trainer:one_in_four"
    trainer = make(tiny, tmp_path, PROMPTS_PER_STEP=4, REWARDS=specs)
    step = score_completions(trainer, [[5, trainer.eos_token_ids[0]]] * 8)
    rewards = [(row["reward"], row["best_action"]) for row in read_csv(tmp_path / "completions.csv")]
    assert rewards == [(reward, "3") for reward in ("1", "1", "0", "2", "1", "1", "nan", "nan")]
    assert step.rates["zero_std_fraction"] == 3 / 4
    assert (step.rates["reward/halved"], step.rates["reward/one_in_four"]) == (0.5, 1 / 6), "of those that got one"


def logging(completions, *, log_metric, log_extra, **columns):
    log_metric("reward", 100)
    log_metric("length", np.float32(2))
    log_metric("length", 4)
    log_extra("reward", ["hidden"] * len(completions))
    log_extra("place", np.arange(len(completions)))
    return [0.25] * len(completions)


def test_what_a_function_logs_is_kept_beside_the_runs_own_columns(tiny, tmp_path):
    """By TRL's log_metric and log_extra, under names of its own or of the run's, in each step that shares a rollout."""
    trainer = make(tiny, tmp_path, REWARDS="test_trainer:logging", NUM_ITERATIONS=2, LOG_PROMPTS=True)
    trainer.args.save_strategy = "no"
    trainer.train()
    steps = read_csv(tmp_path / "metrics.csv")
    assert [row["reward"] for row in steps] == ["0.25"] * 2
    assert [json.loads(row["log_metric"]) for row in steps] == [{"reward": 100, "length": 3}] * 2
    completions = read_csv(tmp_path / "completions.csv")
    assert [row["reward"] for row in completions] == ["0.25"] * 4
    assert [json.loads(row["log_extra"]) for row in completions] == [{"reward": "hidden", "place": n} for n in range(4)]
    logs = trainer.state.log_history[0]
    assert (logs["reward"], logs["log_metric/reward"], logs["length"]) == (0.25, 100, 3), "what trackers get"
    assert logs["num_tokens"] == trainer.state.log_history[1]["num_tokens"] > 0, "a rollout's tokens count once"


def test_log_extra_takes_a_value_for_each_completion():
    with pytest.raises(ValueError, match=r"log_extra\('seen'\) has 1 values for 2 completions"):
        FunctionLog(2).log_extra("seen", ["x"])
