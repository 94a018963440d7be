# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks over shared prompts: against its definition, gradcheck, and stock transformers on padded rows.

Run: python -m pytest tests/test_attention.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import DIM, HEADS, KEY_HEADS, REFERENCE, SCALE, normal, packed
from reference_kernel import reference_backward, reference_forward

from grpo.model.attention import (
    KERNELS,
    ONE_ROW,
    flex_mask,
    flex_sinks,
    hidden_states,
    kernel_attention,
    sink_attention,
    torch_flash_backward,
    torch_flash_forward,
)
from grpo.model.load import load_model
from grpo.model.packing import make_layout, may_attend
from grpo.preflight.memory import bucket

WINDOWS = [None, 1, 3, 100]
# Two completions share a prompt, a third has its own; lengths down to one token.
PROMPTS, COMPLETIONS = [[1, 2, 3], [1, 2, 3], [4]], [[5, 6], [7], [8, 9, 5]]


@pytest.fixture
def reference(monkeypatch):
    """The reference kernel as a choice of ATTN_IMPL."""
    monkeypatch.setitem(KERNELS, "reference", REFERENCE)
    monkeypatch.setattr("grpo.learn.trainer.ONE_ROW", (*ONE_ROW, "reference"))


def one_query(q, keys, values, sink):
    """Attention of one query (Hq, D) over keys and values (n, Hkv, D), from the definition: ((Hq, D), lse (Hq,))."""
    group = HEADS // KEY_HEADS
    scores = SCALE * torch.einsum("hd,nhd->hn", q, keys.repeat_interleave(group, 1))
    logits = scores if sink is None else torch.cat([scores, sink[:, None]], 1)
    weights = logits.softmax(1)[:, : len(keys)]
    return torch.einsum("hn,nhd->hd", weights, values.repeat_interleave(group, 1)), scores.logsumexp(1)


def by_softmax(q, k, v, starts_q, starts_k, window):
    """Query by query, so that it shares no masking code with the reference."""
    out, lse = [], []
    for i in range(len(starts_q) - 1):
        n_q, n_k = int(starts_q[i + 1] - starts_q[i]), int(starts_k[i + 1] - starts_k[i])
        for row in range(n_q):
            last = n_k - n_q + row
            seen = [int(starts_k[i]) + j for j in range(n_k) if j <= last and (window is None or j > last - window)]
            one = one_query(q[int(starts_q[i]) + row], k[seen], v[seen], None)
            out.append(one[0])
            lse.append(one[1])
    return torch.stack(out), torch.stack(lse).T


def visible(layout, window):
    """Keys of each real token of the single row, from the words of Layout's docstring."""
    group, segment, position = (x[0].tolist() for x in (layout.group, layout.segment, layout.positions))
    for i in range(layout.queries):
        yield [
            j for j in range(layout.queries)
            if group[j] == group[i] and segment[j] in (0, segment[i]) and position[i] - position[j] >= 0
            and (window is None or position[i] - position[j] < window)
        ]  # fmt: skip


def sinks_by_softmax(q, k, v, sink, layout, window):
    rows = [one_query(q[i], k[seen], v[seen], sink)[0] for i, seen in enumerate(visible(layout, window))]
    return torch.cat([torch.stack(rows), q.new_zeros(len(q) - len(rows), HEADS, DIM)])


def tensors(layout, dtype=torch.float64, seed=0):
    g, length = torch.Generator().manual_seed(seed), layout.ids.shape[1]
    return [normal(length, heads, DIM, generator=g, dtype=dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)] + [
        normal(HEADS, generator=g, dtype=dtype)
    ]


def layout_of(share=True):
    return make_layout(PROMPTS, COMPLETIONS, share, True, "cpu")


def error(a, b):
    return ((a - b).norm() / b.norm()).item()


# ---- The reference kernel and the sinks ------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
def test_reference_equals_autograd_of_softmax(window):
    q, k, v, rest = packed()
    expected, expected_lse = by_softmax(q, k, v, *rest[:2], window)
    with torch.no_grad():
        out, lse = reference_forward(q, k, v, *rest, window)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    gradients = reference_backward(dout, q.detach(), k.detach(), v.detach(), out, lse, *rest, window)
    for ours, autograd in zip(gradients, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(ours, autograd, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
def test_folded_sink_equals_softmax_with_one_more_column(window, share):
    """Through a layout with shared prompts and padding; the gradient of padding is zero."""
    layout = layout_of(share)
    inputs = tensors(layout)
    assert layout.queries < layout.ids.shape[1], "padding is part of it"
    expected = sinks_by_softmax(*inputs, layout, window)
    out = sink_attention()(*inputs, layout, REFERENCE, SCALE, window)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    gradients, expected = (torch.autograd.grad(x, inputs, dout) for x in (out, expected))
    for ours, autograd in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, autograd, rtol=1e-11, atol=1e-12)
    assert not gradients[0][layout.queries :].any() and not gradients[1][layout.queries :].any()


@pytest.mark.parametrize("window", [None, 2])
def test_gradcheck(window):
    layout = layout_of()
    short = dataclasses.replace(layout, ids=layout.ids[:, : layout.queries + 1])  # one token of padding is enough
    inputs = tensors(short)
    assert torch.autograd.gradcheck(lambda *x: sink_attention()(*x, short, REFERENCE, SCALE, window), inputs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_narrow_types_stay_near_float64(dtype, tolerance):
    layout = layout_of()
    inputs = tensors(layout, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = (sink_attention()(*x, layout, REFERENCE, SCALE, 3) for x in (inputs, wide))
    assert out.dtype == dtype and error(out.double(), expected) < tolerance
    dout = torch.randn_like(out)
    ours, exact = torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, wide, dout.double())
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == dtype and error(a.double(), b) < tolerance


def test_a_very_low_sink_is_no_sink_and_a_high_one_takes_all():
    layout = layout_of()
    q, k, v, sink = tensors(layout)
    rest = layout.query_starts, layout.key_starts, layout.longest_query, layout.longest_key, SCALE, None
    plain, _ = reference_forward(q[: layout.queries].detach(), k[layout.keys].detach(), v[layout.keys].detach(), *rest)
    low, high = (
        sink_attention()(q, k, v, torch.full_like(sink, x), layout, REFERENCE, SCALE, None) for x in (-1e4, 1e4)
    )
    torch.testing.assert_close(low[: layout.queries], plain)
    assert high.abs().max() == 0


def test_gradients_of_a_prompts_keys_are_added_up_in_float32(monkeypatch):
    """On a GPU a BF16 sum of many completions would stop growing; on a CPU torch adds in float32 whatever the type."""
    seen, add = [], torch.Tensor.index_add_
    monkeypatch.setattr(torch.Tensor, "index_add_", lambda x, *rest: seen.append(x.dtype) or add(x, *rest))
    layout = layout_of()
    inputs = tensors(layout, torch.bfloat16)
    sink_attention()(*inputs, layout, REFERENCE, SCALE, None).sum().backward()
    assert seen == [torch.float32] * 2 and inputs[1].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("window", [None, 3])
def test_flex_masks_and_sinks(monkeypatch, window):
    """Without a GPU flex attention has no gradient: dense attention stands in for it, through the same BlockMask."""
    from torch.nn.attention.flex_attention import create_mask

    def dense(query, key, value, block_mask, scale, enable_gqa, return_lse):
        length = query.shape[2]
        mask = create_mask(block_mask.mask_mod, None, None, length, length, device="cpu")
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        scores = (scale * query @ key.transpose(2, 3)).masked_fill(~mask, -torch.inf)
        assert enable_gqa and return_lse
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    monkeypatch.setattr("grpo.model.attention.compiled_flex", lambda: dense)
    layout = layout_of()
    block_mask = flex_mask(layout, window)
    length = layout.ids.shape[1]
    assert torch.equal(
        create_mask(block_mask.mask_mod, None, None, length, length, device="cpu")[0, 0], may_attend(layout, window)[0]
    )
    *inputs, sink = tensors(layout)
    rows = [x.transpose(0, 1)[None] for x in inputs]
    found = flex_sinks(None, *rows, block_mask, SCALE, s_aux=sink)[0][0, : layout.queries]
    expected = sinks_by_softmax(*inputs, sink, layout, window)[: layout.queries]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    dout = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad(x, (*inputs, sink), dout) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# ---- Layouts ---------------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=3), st.data(), st.booleans(), st.booleans(), st.sampled_from([None, 1, 4]))
def test_every_token_sees_what_it_would_in_its_own_row(pool, data, share, one_row, window):
    """Brute force: the visible (token, position) pairs of every completion are those of prompt + completion alone, and
    the gathered keys of a kernel's segments are the same places as the mask's."""
    prompts = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=5))
    completions = [data.draw(st.lists(st.integers(10, 99), max_size=6)) for _ in prompts]
    layout = make_layout(prompts, completions, share, one_row, "cpu")
    mask = may_attend(layout, window)
    width = layout.ids.shape[1]
    groups = len({tuple(p) for p in prompts}) if share else len(prompts)
    assert layout.ids.shape[0] == (1 if one_row else groups) and width == bucket(width)
    order = list(zip(layout.rows.tolist(), layout.columns.tolist(), strict=True))
    assert sorted(order) == [(i, c) for i, row in enumerate(completions) for c in range(len(row))]
    for place, target, (i, column) in zip(layout.before.tolist(), layout.targets.tolist(), order, strict=True):
        alone = prompts[i] + completions[i]
        at = len(prompts[i]) + column - 1  # place of the predicting token in its own row
        assert target == alone[at + 1]
        r, c = divmod(place, width)
        assert layout.ids[r, c] == alone[at] and layout.positions[r, c] == at
        seen = mask[r, c].nonzero().flatten()
        pairs = sorted((layout.positions[r, j].item(), layout.ids[r, j].item()) for j in seen)
        assert pairs == [(j, alone[j]) for j in range(at + 1) if window is None or at - j < window]
    padding = layout.segment < 0
    assert mask.any(-1).all(), "no row of scores is empty"
    assert not (mask & (padding[:, :, None] != padding[:, None, :])).any()
    if one_row:
        kernel = torch.zeros(layout.queries, width, dtype=torch.bool)
        starts, key_starts = layout.query_starts.tolist(), layout.key_starts.tolist()
        assert starts[-1] == layout.queries == int((~padding).sum()) and key_starts[-1] == len(layout.keys)
        for s in range(len(starts) - 1):
            keys, n = layout.keys[key_starts[s] : key_starts[s + 1]], starts[s + 1] - starts[s]
            assert n <= layout.longest_query and len(keys) <= layout.longest_key
            for row in range(n):
                last = len(keys) - n + row
                kernel[starts[s] + row, keys[max(0, last + 1 - (window or width)) : last + 1]] = True
        assert torch.equal(kernel, mask[0, : layout.queries])


@given(st.integers(1, 200_000))
def test_buckets_are_few_and_waste_little(length):
    """Compiled attention is bounded by FLEX_VERSIONS only if an octave has at most 8 of them."""
    size = bucket(length)
    eighth = max(32, 2 ** ((length - 1).bit_length() - 1) // 8) if length > 1 else 32
    assert size % eighth == 0 and 0 <= size - length < eighth


def test_prompts_are_shared_only_where_they_are_equal():
    assert layout_of(True).queries == 3 + 2 + 1 + 1 + 3 and layout_of(False).queries == 3 + 2 + 3 + 1 + 1 + 3


# ---- The whole model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock(tiny):
    """Log-probs, their weights and gradients by transformers alone: padded rows, eager attention, float32."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.bfloat16, attn_implementation="eager", quantization_config=Mxfp4Config(dequantize=True)
    ).float()
    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(3, model.config.vocab_size, (n,), generator=g).tolist()  # noqa: E731
    prompts, completions = [draw(40), draw(40), draw(55)], [draw(9), draw(30), draw(17)]
    prompts[1] = prompts[0]
    length = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    assert length > model.config.sliding_window, "the window must matter"
    ids, mask = torch.zeros(2, 3, length, dtype=torch.long)
    for i, tokens in enumerate(p + c for p, c in zip(prompts, completions, strict=True)):
        ids[i, -len(tokens) :], mask[i, -len(tokens) :] = torch.tensor(tokens), 1
    logps = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    logps = torch.cat(
        [logps[i, -len(c) - 1 : -1].gather(1, torch.tensor(c)[:, None])[:, 0] for i, c in enumerate(completions)]
    )
    weights = torch.randn(len(logps), generator=g)
    (logps * weights).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if "experts" not in n}
    return prompts, completions, logps.detach(), weights, gradients


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("attention", "one_row"), [("eager", True), ("eager", False), ("reference", True)])
def test_the_model_equals_stock_transformers(tiny, stock, reference, attention, one_row, share, experts):
    """1e-5 on log-probs and on the gradient of every parameter but the experts': with any attention, layout, experts."""
    prompts, completions, expected, weights, gradients = stock
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    model = load_model(str(tiny), config, attention, experts).float()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    layout = make_layout(prompts, completions, share, one_row, "cpu")
    logits = model.lm_head(hidden_states(model, layout, attention))
    logps = logits.log_softmax(-1).gather(1, layout.targets[:, None])[:, 0]
    order = (layout.rows * 1000 + layout.columns).argsort()
    torch.testing.assert_close(logps[order], expected, rtol=2e-6, atol=1e-5)
    (logps[order] * weights).sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert set(found) == set(gradients) and any("sinks" in name for name in found)
    for name, gradient in gradients.items():
        assert error(found[name], gradient) < 1e-5, name


def test_a_row_without_a_layout_is_an_error(reference):
    with pytest.raises(TypeError, match="come with a Layout, got NoneType"):
        kernel_attention("reference", None, *torch.zeros(3, 1, 1, 2, 4), None, 1.0)


# ---- What torch's kernel is called ------------------------------------------------------------------------------------

POSITIONAL = {
    "_flash_attention_forward": [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask",
    ],
    "_flash_attention_backward": [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "rng_state", "unused",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIONAL)
def test_torchs_operators_have_not_changed(name):
    arguments = [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments]
    assert arguments[: len(POSITIONAL[name])] == POSITIONAL[name]
    assert {"scale", "window_size_left", "window_size_right"} <= set(arguments[len(POSITIONAL[name]) :])


@pytest.mark.parametrize("window", [None, 3])
def test_torch_flash_passes_its_arguments_in_that_order(monkeypatch, window):
    """Both adapters on stand-ins for the operators that bind each argument to its name in the schema."""
    seen = {}

    def stand_in(name):
        names = [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments]

        def call(*arguments, **keywords):
            seen[name] = dict(zip(names, arguments, strict=False)) | keywords
            return torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1)

        return call

    operators = type("Aten", (), {name: staticmethod(stand_in(name)) for name in POSITIONAL})
    monkeypatch.setattr(torch.ops, "aten", operators)
    q, k, v, out, dout, lse, sq, sk = (torch.full((1,), float(i)) for i in range(8))
    torch_flash_forward(q, k, v, sq, sk, 5, 9, 0.5, window)
    torch_flash_backward(dout, q, k, v, out, lse, sq, sk, 5, 9, 0.5, window)
    left = -1 if window is None else window - 1
    common = {"query": q, "key": k, "value": v, "cum_seq_q": sq, "cum_seq_k": sk, "max_q": 5, "max_k": 9, "dropout_p": 0.0,
              "is_causal": True, "scale": 0.5, "window_size_left": left, "window_size_right": 0}  # fmt: skip
    for name, call in seen.items():
        more = {"grad_out": dout, "out": out, "logsumexp": lse} if "backward" in name else {"return_debug_mask": False}
        for argument, value in (common | more).items():
            assert call[argument] is value or call[argument] == value, (name, argument)
    assert set(seen) == set(POSITIONAL)
