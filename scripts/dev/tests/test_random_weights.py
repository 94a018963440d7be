# SPDX-License-Identifier: Apache-2.0
"""Random weights: the plain kind as it always was, the realistic one with the statistics of a trained model."""

import hashlib

import pytest
import torch
from expert_models import stock_model
from safetensors.torch import load_file

from grpo.plan.hub import TINY_PATH
from scripts.dev.gptoss_format import GPT_OSS_20B
from scripts.dev.random_weights import MASSIVE, MASSIVE_NORM, write_full

# The vocabulary is gpt-oss's own, because the entropy and the largest logit depend on its size.
SMALL = GPT_OSS_20B | {
    "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 128, "num_local_experts": 16, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
TOKENS = 192

PLAIN_CODES = "b791e64baf189438f9f9dc4d72752e54cd77e76186096655e92d5ac350cac637"
PLAIN_VALUES = {
    "lm_head.weight": [0.00552368, -0.02771, -0.0441895],
    "model.embed_tokens.weight": [-1.125, -1.15625, -0.25],
    "model.norm.weight": [1.0, 1.0, 1.0],
    "model.layers.3.self_attn.sinks": [-0.628906, 0.0854492, 0.229492],
    "model.layers.0.self_attn.o_proj.bias": [-0.0045166, 0.0292969, -0.0118408],
    "model.layers.2.self_attn.q_proj.weight": [-0.0439453, -0.12793, -0.0766602],
    "model.layers.3.mlp.router.weight": [-0.204102, 0.102051, 0.275391],
}


def test_plain_weights_stay_as_they_were(tmp_path):
    """Older figures rest on them. Each draw moves all behind it, so experts' codes, which are integers, fix the draws.
    A normal number's last bit may differ between CPUs."""
    write_full(tmp_path / "model", SMALL | {"vocab_size": 800}, TINY_PATH, "cpu")
    files = (tmp_path / "model").glob("*.safetensors")
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    codes = hashlib.sha256()
    for name in sorted(name for name in tensors if name.endswith(("_blocks", "_scales"))):
        codes.update(tensors[name].numpy().tobytes())
    assert codes.hexdigest() == PLAIN_CODES
    for name, values in PLAIN_VALUES.items():
        assert tensors[name].flatten()[:3].tolist() == pytest.approx(values, rel=2**-7), name


class Observed:
    """A realistic model in BF16 and what happened in it to TOKENS random tokens, of which a few are massive."""

    def __init__(self, folder):
        self.model = stock_model(folder)
        self.residual, self.attention, self.experts, self.router = [], [], [], []
        for layer in self.model.model.layers:
            layer.input_layernorm.register_forward_pre_hook(lambda _, inputs: self.residual.append(inputs[0][0]))
            layer.self_attn.register_forward_hook(lambda _, __, out: self.attention.append(out))
            layer.mlp.register_forward_hook(lambda _, __, out: self.experts.append(out[0][0]))
            layer.mlp.router.register_forward_hook(lambda _, __, out: self.router.append(out))
        tokens = torch.randint(0, SMALL["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(0))
        channel = self.model.model.embed_tokens.weight[:, MASSIVE[0]]
        tokens[0, 40] = channel.argmax()
        self.ordinary = channel[tokens[0]] < 1000
        with torch.no_grad():
            self.logits = self.model(tokens).logits[0].float()

    def share_of_residual(self, layer, output):
        """The rms of a layer's `output` over the residual stream's, in channels and at tokens that are not massive."""
        keep = torch.ones(SMALL["hidden_size"], dtype=torch.bool)
        keep[list(MASSIVE)] = False
        added, before = (tensor[self.ordinary][:, keep].float() for tensor in (output, self.residual[layer]))
        return (added.norm() / before.norm()).item()


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("realistic") / "model"
    write_full(folder, SMALL, TINY_PATH, "cpu", realistic=True)
    return Observed(folder)


def test_norms_spread_and_two_channels_and_one_token_are_massive(observed):
    for name, module in observed.model.named_modules():
        if name.endswith("norm"):
            mean, weight = (1.8 if name == "model.norm" else 1.0), module.weight.float()
            others = weight[[channel not in MASSIVE for channel in range(len(weight))]]
            assert others.mean().item() == pytest.approx(mean, rel=0.1), name
            assert others.std().item() / mean == pytest.approx(0.25, rel=0.2), name
            assert (weight[list(MASSIVE)] / mean).tolist() == pytest.approx([MASSIVE_NORM] * 2, rel=0.01), name
    for layer, residual in enumerate(observed.residual):
        squares = residual.float().square()
        ordinary = squares[observed.ordinary].mean(0)
        assert sorted(ordinary.topk(2).indices.tolist()) == sorted(MASSIVE), layer
        assert 0.4 < (ordinary[list(MASSIVE)].sum() / ordinary.sum()).item() < 0.6, layer
        assert 1000 < (squares.max().sqrt() / ordinary.mean().sqrt()).item() < 4096, layer


def test_layers_add_what_a_trained_models_add_with_sinks_and_uneven_experts(observed):
    for layer in range(SMALL["num_hidden_layers"]):
        (added, weights), (_, shares, chosen) = observed.attention[layer], observed.router[layer]
        assert 0.15 < observed.share_of_residual(layer, added[0]) < 0.4, layer
        assert 0.25 < observed.share_of_residual(layer, observed.experts[layer]) < 0.5, layer
        weights = weights[0, :, TOKENS // 2 :].float()  # (heads, queries, keys)
        sinks = 1 - weights.sum(-1).mean(-1)
        assert 0.15 < sinks.mean().item() < 0.6 and sinks.max() - sinks.min() > 0.2, layer
        keys = weights / weights.sum(-1, keepdim=True)
        assert 1.5 < torch.special.entr(keys).sum(-1).mean().item() < 3.5, f"layer {layer}: flat is 5"
        assert 0.4 < shares.max(-1).values.float().mean().item() < 0.8, layer
        load = chosen.flatten().bincount(minlength=SMALL["num_local_experts"]).float()
        assert (load.max() / load.mean()).item() > 1.5 and load.min() / load.mean() < 0.5, layer
    logits = observed.logits[observed.ordinary]
    assert 22 < logits.max(-1).values.mean().item() < 30, "the largest, where BF16's step is 0.125"
    assert 2.5 < torch.special.entr(logits.softmax(-1)).sum(-1).mean().item() < 5.5
