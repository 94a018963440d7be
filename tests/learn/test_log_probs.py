# SPDX-License-Identifier: Apache-2.0
"""Log-probs and their gradients from logits in float32, against float64 and TRL's own kernel."""

import pytest
import torch
from interpreter import interpreted
from trl.kernels import ChunkedLogProbFunction

from grpo.learn.log_probs import HeadLogProbs

pytestmark = pytest.mark.numeric

KERNELS = """
import torch
from unittest import mock
from grpo.learn.log_probs import HeadLogProbs, kernels

torch.manual_seed(0)
states, weight, targets = torch.randn(5, 8), torch.randn(2500, 8), torch.tensor([0, 1023, 1024, 2400, 2499])
results = []
for on_gpu in (False, True):
    leaf = states.clone().requires_grad_()
    with mock.patch.object(kernels, "_use_triton", lambda device: on_gpu), mock.patch.multiple(
        "grpo.learn.log_probs", HEAD_ROWS=3, HEAD_TILE=1500
    ):
        logps, entropies = HeadLogProbs.apply(leaf, weight, targets, 0.8)
        results.append((logps, entropies, torch.autograd.grad(logps.square().sum(), leaf)[0]))
for torchs, tritons in zip(*results):
    torch.testing.assert_close(tritons, torchs, rtol=1e-4, atol=1e-5)
print("all equal")
"""
ROWS, HIDDEN, VOCABULARY, TEMPERATURE = 48, 96, 1000, 0.8


def example(dtype):
    """(states, head, targets, slopes): each row's largest logit is 23 to 31, and its target another token, whose
    log-prob is -11 to -0.0005."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    best, second = torch.randint(VOCABULARY, (2, ROWS), generator=generator)
    states = (weight[best] + 0.98 * weight[second]) * 27 / HIDDEN
    slopes = torch.randn(ROWS, generator=generator)
    return states.to(dtype).requires_grad_(), weight.to(dtype), second, slopes


def exact(states, weight, targets, slopes):
    """Log-probs, entropies and the gradient of the states in float64."""
    states = states.detach().double().requires_grad_()
    logps = (states @ weight.double().t() / TEMPERATURE).log_softmax(-1)
    chosen = logps.gather(1, targets[:, None])[:, 0]
    entropies = -(logps.exp() * logps).sum(-1)
    return chosen.detach(), entropies.detach(), torch.autograd.grad(chosen, states, slopes.double())[0]


def ours(states, weight, targets, slopes):
    logps, entropies = HeadLogProbs.apply(states, weight, targets, TEMPERATURE)
    return logps.detach(), entropies, torch.autograd.grad(logps, states, slopes)[0]


def trls(states, weight, targets, slopes):
    arguments = states, weight, None, targets, TEMPERATURE, 300, None, 1.0, ("entropy",)
    logps, entropies = ChunkedLogProbFunction.apply(*arguments)[:2]
    return logps.detach(), entropies.detach(), torch.autograd.grad(logps, states, slopes)[0]


def errors(function, dtype):
    """The largest error of log-probs and of entropies, in nats, and the relative one of the gradient."""
    inputs = example(dtype)
    (logps, entropies, gradient), expected = function(*inputs), exact(*inputs)
    relative = (gradient - expected[2]).norm() / expected[2].norm()
    return (logps - expected[0]).abs().max().item(), (entropies - expected[1]).abs().max().item(), relative.item()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles, of which the last is smaller, of rows and of the vocabulary."""
    monkeypatch.setattr("grpo.learn.log_probs.HEAD_ROWS", 20)
    monkeypatch.setattr("grpo.learn.log_probs.HEAD_TILE", 300)


def test_logits_of_a_bf16_model_are_not_rounded():
    """Gradients are rounded to BF16, of which one step is 0.4 to 0.8%, after as before."""
    largest = (example(torch.bfloat16)[0] @ example(torch.bfloat16)[1].t()).amax(-1)
    assert largest.min() > 20 and 25 < largest.mean() < 29
    rounded, unrounded = errors(trls, torch.bfloat16), errors(ours, torch.bfloat16)
    assert rounded[0] > 0.05 and unrounded[0] < 1e-4
    assert unrounded[1] < 1e-4 < rounded[1]
    assert unrounded[2] < 0.004 and unrounded[2] < rounded[2]
    assert ours(*example(torch.bfloat16))[2].dtype == torch.bfloat16


def test_a_float32_model_learns_as_with_trls_kernel():
    for mine, theirs in zip(ours(*example(torch.float32)), trls(*example(torch.float32)), strict=True):
        assert torch.equal(mine, theirs)
    assert max(errors(ours, torch.float32)) < 1e-4


@pytest.mark.slow
def test_tritons_kernels_and_torch_compute_the_same():
    """What runs on a GPU, with tiles of several blocks and one with a part of a block."""
    interpreted(KERNELS)
