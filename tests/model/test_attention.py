# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks over shared prompts, against stock transformers."""

import pytest
import torch
from expert_models import stock_model
from reference_kernel import REFERENCE

from grpo.model.attention import KERNELS, SinkAttention, hidden_states
from grpo.model.load import load_model
from grpo.model.packing import pack_batch
from grpo.output.durable import read_json

pytestmark = pytest.mark.numeric

HEADS, KEY_HEADS, DIM, SCALE = 4, 2, 8, 0.3
# Two completions share a prompt, a third has its own; lengths down to one token.
PROMPTS, COMPLETIONS = [[1, 2, 3], [1, 2, 3], [4]], [[5, 6], [7], [8, 9, 5]]


def error(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_narrow_types_stay_near_float64(monkeypatch, dtype, tolerance, window):
    """Of padding the gradient is zero; the next test shows that float64 is right. Gradients of a prompt's keys are
    added up in float32: on a GPU a BF16 sum of many completions would stop growing."""
    batch, added, add = pack_batch(PROMPTS, COMPLETIONS, True, True, "cpu"), [], torch.Tensor.index_add_
    monkeypatch.setattr(torch.Tensor, "index_add_", lambda x, *rest: added.append(x.dtype) or add(x, *rest))
    generator, length = torch.Generator().manual_seed(0), batch.ids.shape[1]
    shapes = (length, HEADS, DIM), (length, KEY_HEADS, DIM), (length, KEY_HEADS, DIM), (HEADS,)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    *inputs, sink = [x.to(dtype) for x in drawn]
    inputs = [x.requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    assert batch.queries < batch.ids.shape[1], "padding is part of it"
    out = SinkAttention.apply(*inputs, sink, batch, REFERENCE, SCALE, window)
    expected = SinkAttention.apply(*wide, sink.double(), batch, REFERENCE, SCALE, window)
    dout = torch.randn(out.shape, generator=generator).to(dtype)
    gradients, exact = torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, wide, dout.double())
    for ours, other in zip((out, *gradients), (expected, *exact), strict=True):
        assert ours.dtype == dtype and error(ours.double(), other) < tolerance
    assert added == [torch.float32] * 2 + [torch.float64] * 2
    assert not gradients[0][batch.queries :].any() and not gradients[1][batch.queries :].any()


def by_expert(rows, weights, offs):
    """torch's grouped_mm, which knows no float64."""
    return torch.cat([part @ w for part, w in zip(rows.tensor_split(offs[:-1].tolist()), weights, strict=True)])


def with_wide_heads(model):
    """The model in float64; the tiny model's heads look at near tokens alone, but without these biases far beyond."""
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias.data.zero_()
    return model.double()


def is_learned(name):
    """Experts and sinks are frozen in every run."""
    return "experts" not in name and "sinks" not in name


@pytest.fixture(scope="module")
def stock(tiny):
    """Log-probs, their weights and gradients by transformers alone, row by row: eager attention, float64."""
    model = with_wide_heads(stock_model(tiny, experts_implementation="eager"))
    g = torch.Generator().manual_seed(0)
    first, second, *completions = (torch.randint(3, 792, (n,), generator=g).tolist() for n in (40, 55, 9, 30, 17))
    prompts, rows = [first, first, second], []
    assert len(first) > model.config.sliding_window, "the window must matter"
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    logps = torch.cat(rows)
    weights = torch.randn(len(logps), generator=g)
    (logps * weights).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if is_learned(n)}
    return prompts, completions, logps.detach(), weights, gradients


@pytest.mark.parametrize(
    ("attention", "one_row", "share", "experts"),
    [
        ("eager", True, True, "mxfp4"),
        ("eager", False, True, "bf16"),
        ("reference", True, True, "bf16"),
        ("reference", True, False, "mxfp4"),
    ],
)
def test_the_model_equals_stock_transformers(tiny, stock, monkeypatch, attention, one_row, share, experts):
    """Log-probs and the gradient of every parameter but experts and sinks: with any attention, packing, experts. In
    float64, where only the norms and RoPE round to float32: the limit holds on every CPU and for any weights."""
    monkeypatch.setattr("grpo.model.experts.grouped_mm", by_expert)
    monkeypatch.setitem(KERNELS, "reference", lambda: REFERENCE)
    prompts, completions, expected, weights, gradients = stock
    model = with_wide_heads(load_model(str(tiny), read_json(tiny / "config.json"), attention, experts))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_learned(name))
    batch = pack_batch(prompts, completions, share, one_row, "cpu")
    logits = model.lm_head(hidden_states(model, batch, attention))
    logps = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    order = (batch.rows * 1000 + batch.columns).argsort()
    torch.testing.assert_close(logps[order], expected, rtol=0, atol=1e-6)
    (logps[order] * weights).sum().backward()
    ours = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert set(ours) == set(gradients)
    for name, gradient in gradients.items():
        assert error(ours[name], gradient) < 1e-6, name
