# SPDX-License-Identifier: Apache-2.0
"""However many processes share a step, they learn the same, and each generates its own whole groups."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers import read_csv
from ranked import in_ranks
from test_steps import reward
from trainers import LOSSES, make, moved_by_training, plain_float32, sample_with, seed_weights, step_of

from grpo.data.prompts import sampling_seed
from grpo.learn.distributed import adapter_parameters, adopt_rank0_state, sync_stop_signal
from grpo.output.checkpoints import RESUME_FILES, ROLLOUT
from grpo.output.logs import METRICS
from grpo.rollout.sampler import evaluation_sampling, rollout_sampling
from grpo.settings.table import Settings

PROMPTS, GROUP, STEPS = 5, 3, 2  # 3 and 2 prompts for two processes; 2, 1, 1 and 1 for four
TIMES = {"time", "rollout_tokens_per_s", *(name for name in METRICS if name.endswith("_s"))}


def make_on(ranks, tiny, folder, **changes):
    """A trainer of one of several processes, in a folder of its own."""
    folder = folder / str(ranks.rank)
    folder.mkdir(parents=True)
    return make(tiny, folder, ranks, **changes)


def learned(ranks, tiny, folder, losses=LOSSES, **changes):
    """How the steps with each of `losses` in turn moved the adapter, (losses, P). Steps that share a rollout compute
    their old log-probs."""
    settings = {"TOTAL_STEPS": STEPS, "PROMPTS_PER_STEP": PROMPTS, "NUM_GENERATIONS": GROUP, "BETA": 0.1}
    settings |= {"LEARNING_RATE": 1e-3, "TEMPERATURE": 0.8, "SCALE_REWARDS": "batch", "MASK_TRUNCATED": True}
    trainer = plain_float32(make_on(ranks, tiny, folder, GRADIENT_CHECKPOINTING=False, **settings | changes))
    trainer.args.adam_epsilon, trainer.scorer.functions = 1e-4, [reward]  # They are those of test_steps.py.

    def rollout():
        torch.manual_seed(ranks.rank)  # After a real rollout each rank has drawn other noise.
        completions, logps = step_of(trainer, trainer.args.generation_batch_size)
        return completions, None if changes else logps

    sample_with(trainer, rollout)
    moved = []
    for trainer.loss_type in losses:
        seed_weights(trainer.model)
        trainer.optimizer = trainer.lr_scheduler = None
        moved.append(moved_by_training(trainer))
    return moved


@pytest.mark.numeric
@pytest.mark.slow
def test_the_same_update_and_the_same_rows(tiny, tmp_path):
    updates = {size: in_ranks(size, learned, tiny, tmp_path / str(size)) for size in (1, 2, 4)}
    alone, logs = torch.tensor(updates[1][0]), {}
    assert (alone.abs().mean(1) > 1e-5).all() and len({row.norm().item() for row in alone}) > 3
    for size, (first, *others) in updates.items():
        assert all(other == first for other in others), "bit for bit on every rank"
        difference = (torch.tensor(first) - alone).norm(dim=1) / alone.norm(dim=1)
        # Rounding makes 3e-6 to 2.1e-5 by processor and loss; a sum of gradients that is 0.1% too large makes 2.5e-3.
        assert (difference < 5e-5).all(), (size, dict(zip(LOSSES, difference.tolist(), strict=True)))
        folder = tmp_path / str(size)
        assert {path.parent.name for path in folder.rglob("*.csv")} == {"0"}, "rank 0 writes"
        completions, metrics = (read_csv(folder / "0" / name) for name in ("completions.csv", "metrics.csv"))
        figures = [{name: float(row[name]) for name in row if row[name] and name not in TIMES} for row in metrics]
        logs[size] = completions, figures
        assert completions == logs[1][0] and len(completions) == len(LOSSES) * STEPS * PROMPTS * GROUP
        assert figures == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in logs[1][1]]


def generated(ranks, tiny, folder):
    """Completions by seed and batch, in training and in an evaluation that rank 0 alone asks for, and the sizes of the
    batches of this rank."""
    trainer, rows, sizes = (
        make_on(ranks, tiny, folder, MAX_COMPLETION_LEN=12, TEMPERATURE=1.3, EVAL_TEMPERATURE=1.0),
        {},
        [],
    )
    generate, s = trainer.model.generate, trainer.run.settings

    def counted(**inputs):
        sizes.append(len(inputs["input_ids"]))
        return generate(**inputs)

    prompts = trainer.processing_class(text=[trainer.run.rows[n // 3].prompt for n in range(12)])["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.model, "generate", counted)
        for step in range(2):
            for size in (12, 5):
                trainer.run.resolved.plan = dataclasses.replace(trainer.run.plan, generation_batch=size)
                rows[step, size] = trainer.sampler.sample(prompts, 3, rollout_sampling(s, step))
    for greedy in (False, True):
        sampling = evaluation_sampling(s, 7, greedy, base=True)
        rows[greedy] = trainer.sampler.run_on_rank0(trainer.sampler.answer, [prompts[0]] * 4, 1, sampling)
    return rows, sizes


def test_every_rank_draws_its_own_completions(tiny, tmp_path):
    ((alone, _),) = in_ranks(1, generated, tiny, tmp_path / "1")
    assert len({str(rows) for rows in alone.values()}) == len(alone), "other seeds and batches draw other tokens"
    (first, sizes), (second, own_sizes) = in_ranks(2, generated, tiny, tmp_path / "2")
    assert all(first[key] == second[key] for key in first if isinstance(key, tuple)), "all have all of them"
    assert sizes == own_sizes == [6, 3, 3] * 2, "GENERATION_BATCH is what all generate at once"
    assert first[False][:2] != first[False][2:], "the second rank's answers to the same prompt are others"
    assert first[True] == alone[True], "greedily all are alike"


def beside_engines(ranks, tiny, folder):
    """The calls of the engine of each rank, and the completions that all ranks have afterwards."""
    trainer, calls = make_on(ranks, tiny, folder), []

    def generate(prompts, seed, max_tokens, top_p, temperature):
        calls.append((len(prompts), seed, temperature))
        return [[row[0], 7] for row in prompts], [[-float(row[0]), None] for row in prompts]

    engine = SimpleNamespace(generate=generate, wake=lambda: None, sleep=lambda: None)
    engine.sync_weights = lambda policy, active, seed: calls.append(active)
    trainer.run.engine, s, prompts = engine, trainer.run.settings, [[n] for n in range(10)]
    samples = trainer.sampler.sample(prompts, 2, rollout_sampling(s, 0))
    trainer.sampler.run_on_rank0(trainer.sampler.answer, prompts[:2], 2, evaluation_sampling(s, 0, base=True))
    return calls, [(sample.ids, sample.logps) for sample in samples]


def test_each_engine_generates_whole_groups_with_its_own_noise(tiny, tmp_path):
    """Five groups of two for three; a single one is the first rank's. The log-probs come with the tokens, in order."""
    (first, *others) = in_ranks(3, beside_engines, tiny, tmp_path)
    assert [[call[0] for call in calls[1::2]] for calls, _ in (first, *others)] == [[4, 2], [4], [2]]
    seeds = [calls[1][1] for calls, _ in (first, *others)]
    assert len(set(seeds)) == 3 and seeds[0] == sampling_seed(3, 0, "train"), "rank 0's is that of one process"
    assert [first[0][0], first[0][1][2]] == [True, None] and first[0][2] is False, "the base model's evaluation"
    assert first[0][3][2] == Settings.EVAL_TEMPERATURE
    assert all(samples == [([n, 7], [-float(n), None]) for n in range(10)] for _, samples in (first, *others))


def diverging(ranks, tiny, folder):
    trainer = make_on(ranks, tiny, folder, PROMPTS_PER_STEP=3, TOTAL_STEPS=2, SAVE_STEPS=1)
    if ranks.rank == 1:
        step = trainer.create_optimizer

        def wrong(*arguments):
            optimizer = step(*arguments)
            optimizer.register_step_post_hook(lambda *_: adapter_parameters(trainer.model)[0].data.add_(1e-7))
            return optimizer

        trainer.create_optimizer = wrong
    trainer.train()


def test_an_adapter_that_is_not_rank_0s_ends_the_run(tiny, tmp_path):
    for error in in_ranks(3, diverging, tiny, tmp_path):
        assert "the adapter of rank 1 is not that of rank 0 after step 1" in str(error)
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_any_ranks_signal_stops_all():
    model = torch.nn.Linear(2, 2)
    assert in_ranks(3, lambda ranks: sync_stop_signal(ranks, 15 * (ranks.rank == 1), model, 3)) == [15] * 3
    assert in_ranks(2, lambda ranks: sync_stop_signal(ranks, 0, model, 3)) == [0] * 2


@pytest.mark.parametrize("missing", [(), (ROLLOUT,)])
def test_every_rank_gets_rank_0s_adapter_and_checkpoint(tmp_path, missing):
    """They get the files that a run continues from, and no other file of rank 0's folder, whatever its name is."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    files = {name: name.encode() * 999 for name in RESUME_FILES if name not in missing}
    for name, data in (files | {"manifest.json": b"{}", "README.md": b"x"}).items():
        (folder / name).write_bytes(data)

    def copied(ranks):
        scratch, model = tmp_path / str(ranks.rank), torch.nn.Linear(2, 2)
        scratch.mkdir()
        torch.nn.init.constant_(model.weight, ranks.rank + 5)
        assert adopt_rank0_state(ranks, model, None, scratch) is None and (model.weight == 5).all()
        checkpoint = adopt_rank0_state(ranks, model, None if ranks.rank else folder, scratch)
        return checkpoint.name, {path.name: path.read_bytes() for path in scratch.iterdir()}

    assert in_ranks(2, copied) == [("checkpoint-2", {}), ("1", files)]
