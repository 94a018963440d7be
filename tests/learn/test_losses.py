# SPDX-License-Identifier: Apache-2.0
"""Golden losses: fixed completions and seeded weights in float64, the same on every CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainers import batch, loss_and_gradients, make, plain_float32
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm, GptOssRotaryEmbedding

from grpo.model.warmup import TINY_RECIPE, write_tiny

pytestmark = pytest.mark.numeric

# Loss and norm of its gradient: old policy, reference and engine all differ from the policy.
GOLDEN = {
    "grpo": (0.1051224797202834, 1.145103650245977),
    "bnpo": (-0.156731027352558, 1.1555888118113213),
    "dr_grpo": (-0.0930590474905813, 0.6861308570129722),
    "dapo": (-0.12947345737820004, 0.9546168445397869),
    "cispo": (1.459494777985063, 2.198664718553774),
    "sapo": (0.020114108586, 1.7616436999100133),
    "vespo": (-0.2965067167717388, 0.6422919168413315),
    "luspo": (-0.7444723799246503, 5.489046856103777),
}


def normalize(self, states):
    return self.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def rotate(self, x, position_ids):
    steps = torch.arange(len(self.inv_freq), dtype=torch.float64)
    angles = position_ids[..., None] * 100.0 ** (-steps / len(steps))
    return angles.cos(), angles.sin()


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    """A model of the shape that the golden losses were computed with; its weights are replaced by seeded ones."""
    folder = tmp_path_factory.mktemp("golden") / "model"
    recipe = replace(TINY_RECIPE, shape=replace(TINY_RECIPE.shape, layers=2), windows=1, probe_windows=1, steps=1)
    write_tiny(folder, recipe, log=lambda line: None)
    return folder


@pytest.fixture
def in_float64(monkeypatch):
    """Makes a trainer compute without float32 anywhere: gpt-oss's norms, positions and experts and TRL's kernel for
    log-probs are replaced."""
    monkeypatch.setattr(GptOssRMSNorm, "forward", normalize)
    monkeypatch.setattr(GptOssRotaryEmbedding, "forward", rotate)

    def convert(trainer):
        def compute_logps(base, states, targets):
            logps = (base.get_output_embeddings()(states) / trainer.temperature).log_softmax(-1)
            return logps.gather(1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)

        trainer.model.double().get_base_model().set_experts_implementation("eager")
        trainer.compute_logps = compute_logps
        torch.set_default_dtype(torch.float64)
        return trainer

    yield convert
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("loss_type", GOLDEN)
def test_losses_are_the_golden_ones(in_float64, two_layers, tmp_path, loss_type):
    trainer = make(two_layers, tmp_path, LOSS_TYPE=loss_type, BETA=0.1, TEMPERATURE=0.8, IS_CLIP_MAX=1.5)
    in_float64(plain_float32(trainer))
    inputs = batch(trainer, beta=0.1, old=True, sampled=True, near=torch.full((4, 7), -6.5))
    loss, gradient = loss_and_gradients(trainer, inputs, 2)
    assert (loss, gradient.norm().item()) == pytest.approx(GOLDEN[loss_type], rel=1e-9)
