# SPDX-License-Identifier: Apache-2.0
"""The engine generates with the adapter that is trained."""

import contextlib

import pytest
import torch
from engines import EXACT, apart, digest, prompts_of, rollout, set_adapter, trainer_logps
from stub_vllm import SYNCS

from grpo.rollout import weight_sync
from grpo.rollout.parity import fill_with_small_update
from grpo.rollout.weight_sync import lora_layers, round_stochastically


@pytest.mark.parametrize(
    ("sync", "targets"),
    [("merge", "all-linear"), ("merge", "k_proj,o_proj"), ("lora", "q_proj,1.experts"), ("lora", "experts")],
)
def test_rollouts_are_sampled_from_the_policy(build, sync, targets):
    """Log-probs of sampled tokens and of given ones, with a temperature, against the trainer's; and without adapter."""
    trainer = build(ROLLOUT_SYNC=sync, LORA_TARGETS=targets, TEMPERATURE=0.7)
    set_adapter(trainer, 1)
    policy, engine, prompts = trainer.model, trainer.run.engine, prompts_of(trainer)
    engine.stop_token_ids = list(range(0, 792, 4))
    for active in (True, False):
        ids, values = rollout(engine, policy, prompts, 4, active)
        assert [len(row) for row in values] == [len(row) for row in ids] and all(1 <= len(row) <= 8 for row in ids)
        stops = [[token in engine.stop_token_ids for token in row] for row in ids]
        assert any(row[-1] for row in stops) and not any(any(row[:-1]) for row in stops), "a stop token ends, and stays"
        engine.wake()
        engine.sync_weights(policy, active)
        scored = engine.score(prompts)
        engine.sleep()
        with policy.disable_adapter() if not active else contextlib.nullcontext():
            assert apart(values, trainer_logps(trainer, prompts, ids, 0.7)) < EXACT
            assert apart(values, trainer_logps(trainer, prompts, ids, 1.0)) > 10 * EXACT, "temperature counts"
            assert apart(scored, trainer_logps(trainer, prompts)) < EXACT
    assert apart(scored, trainer_logps(trainer, prompts)) > 50 * EXACT, "the adapter must matter"


@pytest.mark.parametrize("sync", SYNCS)
def test_the_engine_has_the_adapter_of_the_last_sync(build, sync):
    """Without a sleep, which would have emptied the prefix cache. The policy stays bit for bit, and nothing drifts on
    the engine's side."""
    trainer = build(ROLLOUT_SYNC=sync)
    engine, prompts = trainer.run.engine, prompts_of(trainer)
    engine.wake()
    for seed in (1, 2):
        set_adapter(trainer, seed)
        kept = digest(trainer.model), digest(trainer.model, adapter=True)
        for active in (True, False, False, True):
            engine.sync_weights(trainer.model, active)
        assert (digest(trainer.model), digest(trainer.model, adapter=True)) == kept
        assert apart(engine.score(prompts), trainer_logps(trainer, prompts)) < EXACT


def test_merged_weights_are_exact_in_float32(build):
    """From a base in BF16: what is rounded is the sum, once."""
    trainer = build()
    set_adapter(trainer, 1)
    engine, (layer, *_) = trainer.run.engine, lora_layers(trainer.model).values()
    layer.get_base_layer().weight.data = layer.get_base_layer().weight.data.bfloat16()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    exact = layer.get_base_layer().weight.double() + 2.0 * b.double() @ a.double()
    engine.wake()
    engine.sync_weights(trainer.model)
    qkv = "model.layers.0.attn.qkv_proj.weight"
    torch.testing.assert_close(engine.llm.packed[qkv][: len(b)], exact.float())


def test_random_rounding_keeps_the_mean_and_what_bf16_holds():
    """Odds of the two neighbours follow the distance: 3 + 3 * 2^-8 is three quarters of the way to 3 + 2^-6."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.tensor([0.0, 1.0, -1.0, 3e-38, -255.0, 1e-3]).bfloat16()
    assert torch.equal(round_stochastically(exact.float().expand(99, -1), generator), exact.expand(99, -1))
    rounded = round_stochastically(torch.full((40_000,), 3 + 3 * 2**-8), generator)
    assert set(rounded.tolist()) == {3.0, 3 + 2**-6}
    assert (rounded > 3).float().mean().item() == pytest.approx(0.75, abs=0.01), "4.6 standard deviations"


@pytest.mark.parametrize(("nearest", "least", "most"), [(True, 0.0, 0.3), (False, 1, 1)])
def test_the_share_of_a_small_update_that_arrives_in_bf16(build, monkeypatch, nearest, least, most):
    """Against the merged weights themselves, in float64. Rounding to the nearest would lose most of it."""
    if nearest:
        monkeypatch.setattr(weight_sync, "round_stochastically", lambda values, generator: values.bfloat16())
    trainer = build(dtype=torch.bfloat16)
    engine, policy, layers = trainer.run.engine, trainer.model, lora_layers(trainer.model)
    engine.wake()
    engine.sync_weights(policy)
    assert engine.sync_share is None, "an adapter of zeros has no share"
    fill_with_small_update([layer.lora_B["default"].weight for layer in layers.values()], 5e-5, 3)
    engine.sync_weights(policy)
    share, error = engine.sync_share
    assert least - 0.01 - 4 * error < share < most + 0.01 + 4 * error and error < 0.05
    along = squared = 0.0
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight.double()
        target, rows = weight_sync.vllm_weight(name, len(weight))
        update = 2.0 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        along += ((engine.llm.packed[target][rows].double() - weight) * update).sum().item()
        squared += update.square().sum().item()
    assert share == pytest.approx(along / squared, abs=1e-5)
    engine.sync_weights(policy, active=False)
    assert engine.sync_share is None


def test_rounding_is_seeded_by_the_rollout_and_reads_only_what_is_adapted(build):
    """The embeddings may be elsewhere meanwhile (EXPERTS=paged): here they have no data."""
    trainer = build(dtype=torch.bfloat16)
    set_adapter(trainer, 1)
    trainer.model.get_base_model().model.embed_tokens.to("meta")
    engine, held = trainer.run.engine, []
    engine.wake()
    for seed in (1, 1, 2):
        engine.sync_weights(trainer.model, seed=seed)
        held.append(torch.cat([p.flatten().clone() for p in engine.llm.packed.values()]))
    assert torch.equal(held[0], held[1]) and not torch.equal(held[0], held[2])
    assert engine.sync_share[0] == pytest.approx(1, abs=0.01)
