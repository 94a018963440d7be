# SPDX-License-Identifier: Apache-2.0
"""Golden losses: fixed completions and seeded weights in float64, the same on every CPU."""

import pytest
import torch
from trainers import batch, loss_and_gradients, make, plain_float32
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm, GptOssRotaryEmbedding

pytestmark = pytest.mark.numeric

# Loss and norm of its gradient: old policy, reference and engine all differ from the policy.
GOLDEN = {
    "grpo": (0.3032811398153021, 4.485251291657771),
    "bnpo": (-0.23553457817592144, 2.6508347352395787),
    "dr_grpo": (-0.13984865579195335, 1.5739331240485008),
    "dapo": (-0.19457204284097857, 2.1898199986761746),
    "cispo": (1.703675738905744, 2.5979972915458815),
    "sapo": (0.2767903026272456, 4.2982015650137955),
    "vespo": (3.7425714075948937, 2.482263920370457),
    "luspo": (-1.1187892463356268, 12.591464992388007),
}


def normalize(self, states):
    return self.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def rotate(self, x, position_ids):
    steps = torch.arange(len(self.inv_freq), dtype=torch.float64)
    angles = position_ids[..., None] * 100.0 ** (-steps / len(steps))
    return angles.cos(), angles.sin()


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
def test_losses_are_the_golden_ones(in_float64, tiny, tmp_path, loss_type):
    trainer = make(tiny, tmp_path, LOSS_TYPE=loss_type, BETA=0.1, TEMPERATURE=0.8, IS_CLIP_MAX=1.5)
    in_float64(plain_float32(trainer))
    inputs = batch(trainer, beta=0.1, old=True, sampled=True, near=torch.full((4, 7), -6.5))
    loss, gradient = loss_and_gradients(trainer, inputs, 2)
    assert (loss, gradient.norm().item()) == pytest.approx(GOLDEN[loss_type], rel=1e-9)
