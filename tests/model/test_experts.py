# SPDX-License-Identifier: Apache-2.0
"""Fused and quantized experts: against transformers' own, and the Triton kernels (interpreted) against plain torch."""

from unittest.mock import MagicMock

import pytest
import torch
from expert_models import load
from interpreter import cached_source, interpreted
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from grpo.model import experts
from grpo.model.experts import experts_forward, quantized_experts
from grpo.output.durable import read_json

pytestmark = pytest.mark.numeric

KERNELS = """
import torch, triton
from functools import partial
from torch.utils.checkpoint import checkpoint
from grpo.model import expert_kernels as K, experts as t

torch.manual_seed(0)
E, H, I, N, k = 4, 48, 40, 13, 3
S = N * k
index = torch.stack([torch.randperm(E)[:k] for _ in range(N)])
expert, order = index.flatten().sort()
inverse = torch.empty_like(order).scatter_(0, order, torch.arange(S))


def compare(name, ours, plain, inputs):
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5, msg=lambda text: name + ": " + text)
    gradient = torch.randn(plain.shape)
    gradients = (torch.autograd.grad(out, inputs, gradient) for out in (ours, plain))
    for ours, plain in zip(*gradients):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5, msg=lambda text: name + " backward: " + text)


# Whole numbers lie on both sides of each clamp and at its limit.
gate_up, bias = torch.randint(-6, 7, (S, 2 * I)) * 1.0, torch.randint(-5, 6, (E, 2 * I)) * 1.0
gate_up.requires_grad_()
# As the learner calls them: with gradient checkpointing, which unpacks what a function saved a single time.
kept = partial(checkpoint, use_reentrant=False)
ours = kept(t.Activation.apply, gate_up, bias, expert)
compare("activation", ours, t.activation(gate_up, bias, expert), [gate_up])
rows, bias, weights, hidden = torch.randn(S, H), torch.randn(E, H), torch.rand(N, k), torch.randn(N, H)
for tensor in (rows, weights, hidden):
    tensor.requires_grad_()
tensors = rows, bias, expert, inverse, weights
compare("combine", kept(t.Combine.apply, *tensors), t.combine(*tensors), [rows, weights])
compare("spread", kept(t.Dispatch.apply, hidden, expert, order, inverse, k), hidden[order // k], [hidden])

blocks = torch.randint(0, 256, (E, 64, 2, 16), dtype=torch.uint8)
blocks[:, :, 0] = torch.arange(16) * 17  # each code in the low and in the high bits, with each scale
scales = torch.arange(E * 64).fmod(255).to(torch.uint8).view(E, 64, 1).repeat(1, 1, 2)
out, groups = torch.empty(E, 64, 64, dtype=torch.bfloat16), scales.numel() - 1
out[-1, -1] = 7
K.dequantize[(triton.cdiv(groups, 128),)](blocks, scales, out.view(torch.int32), groups, BLOCK=128, num_warps=4)
plain = t.dequantize_mxfp4(blocks, scales).transpose(1, 2).contiguous()
plain[-1, -1, 32:] = 7  # beyond the groups
assert torch.equal(out.view(torch.int16), plain.view(torch.int16)), "dequantize"  # by their bits, so that -0 counts

blocks = torch.randint(0, 256, (E, 40, 3, 16), dtype=torch.uint8)  # 40 columns, 96 rows of weights: no tile is full
blocks[1, 0] = torch.arange(16) * 17
for lowest, highest in ((124, 130), (0, 6)):  # down to subnormal ones; every sum is exact
    scales = torch.randint(lowest, highest, (E, 40, 3), dtype=torch.uint8)
    offs = torch.tensor([2, 2, 40, 41], dtype=torch.int32)  # none, and more than two tiles of rows
    rows, out = torch.randint(-4, 5, (41, 96)) * 2.0 ** (120 - lowest), torch.full((41, 40), torch.nan)
    halves = rows.unflatten(1, (-1, 2)).permute(2, 0, 1).contiguous()
    K.packed_product[(2, E)](*halves, blocks, scales, offs, out, 40, 96, ROWS=16, COLUMNS=32, GROUPS=2)
    plain = t.grouped_mm(rows, t.dequantize_mxfp4(blocks, scales).float(), offs=offs)
    assert torch.equal(out, plain), f"packed_product, scales from {lowest}"
print("all equal")
"""


SWIZZLED = """
import torch
from torch.nn.functional import pad
from triton_kernels.tensor_details.layout_details.hopper_scale import HopperMXScaleLayout
from triton_kernels.tensor_details.layout_details.hopper_value import HopperMXValueLayout
from grpo.model.experts import dequantize_mxfp4, dequantize_swizzled

torch.manual_seed(0)
# No padding; padded columns; padded rows, and more groups than one program takes.
for count, rows, groups in ((1, 256, 4), (2, 48, 3), (2, 277, 17)):
    blocks = torch.randint(0, 256, (count, rows, groups, 16), dtype=torch.uint8)
    scales = torch.randperm(count * rows * groups).fmod(255).to(torch.uint8).view(count, rows, groups)  # 0 to 254
    # As _swizzle_mxfp4 of vllm/model_executor/layers/quantization/utils/mxfp4_utils.py does.
    values, padded = blocks.flatten(2).mT, pad(scales, (0, -groups % 4)).mT
    values = HopperMXValueLayout(values.shape, mx_axis=1).swizzle_data(values)
    swizzled = HopperMXScaleLayout(padded.shape, mx_axis=1, num_warps=8).swizzle_data(padded)
    ours, plain = dequantize_swizzled(values, swizzled, rows, groups * 32), dequantize_mxfp4(blocks, scales)
    assert ours.shape == plain.shape and ours.dtype == plain.dtype and ours.mT.is_contiguous()
    # By their bits, so that -0 counts.
    assert torch.equal(ours.mT.view(torch.int16), plain.mT.contiguous().view(torch.int16)), (count, rows, groups)
try:
    dequantize_swizzled(values, swizzled, rows + 256, groups * 32)
except RuntimeError as error:
    print("all equal", error)
"""


@pytest.mark.slow
def test_kernels_equal_plain_torch():
    interpreted(KERNELS)


@pytest.mark.slow
def test_weights_in_vllms_layout_for_hopper_are_those_of_the_checkpoint():
    """Swizzled by vLLM's own functions, from its source."""
    interpreted(SWIZZLED, cached_source() / "third_party")


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_frozen_experts_equal_transformers_grouped_mm(dtype, limit):
    """The forward pass bit by bit; gradients of states and weights to rounding. Gates on both sides of their limit."""
    module = GptOssExperts(GptOssConfig(hidden_size=64, intermediate_size=48, num_local_experts=5))
    g = torch.Generator().manual_seed(5)
    for name, tensor in module.named_parameters():
        std = 1.0 if name.endswith("bias") else tensor.shape[1] ** -0.5
        tensor.data = (torch.randn(tensor.shape, generator=g) * std).to(dtype)
    module.requires_grad_(False)
    index = torch.stack([torch.randperm(4, generator=g)[:3] for _ in range(17)])  # the last expert gets no token
    states = (torch.randn(17, 64, generator=g) * 3).to(dtype).requires_grad_()
    weights = torch.rand(17, 3, generator=g).softmax(-1).to(dtype).requires_grad_()
    ours = experts_forward(module, states, index, weights)
    theirs = grouped_mm_experts_forward(module, states, index, weights)
    assert torch.equal(ours, theirs)
    gradient = torch.randn(ours.shape, generator=g).to(dtype)
    gradients = (torch.autograd.grad(x, (states, weights), gradient) for x in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == b.dtype == dtype
        assert ((a - b).norm() / b.norm()).item() < limit


@pytest.mark.parametrize(
    ("tokens", "grad", "packed", "adapters", "fused"),
    [(256, 0, 1, {}, 1), (257, 0, 1, {}, 0), (9, 1, 1, {}, 0), (9, 0, 0, {}, 0), (9, 0, 1, {"down_proj": 1}, 0)],
)
def test_few_rows_are_multiplied_by_packed_weights(monkeypatch, tokens, grad, packed, adapters, fused):
    """On a GPU (pretended), without gradients and adapters."""
    weights = "gate_up_proj_blocks" if packed else "gate_up_proj"
    module = MagicMock(spec=["gate_up_proj_bias", "adapters", weights], adapters=adapters)
    states = MagicMock(is_cuda=True)
    states.to.return_value, states.__len__.return_value = states, tokens
    monkeypatch.setattr(experts, "routed_experts", lambda *arguments: arguments[-1])
    with torch.set_grad_enabled(bool(grad)):
        assert experts_forward(module, states, None, None) == fused


def kept_and_gradient(model):
    """Bytes that autograd keeps of a forward pass beside the model's own, and the gradient of its inputs."""
    sizes = {}

    def keep(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    states = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(inputs_embeds=states).last_hidden_state
    kept = sum(sizes.values()) - sum(sizes.get(p.untyped_storage().data_ptr(), 0) for p in model.parameters())
    return kept, torch.autograd.grad(output.float().square().sum(), states)[0]


def test_without_checkpointing_packed_experts_are_dequantized_again_instead_of_kept(tiny):
    """Autograd then keeps no more than with BF16 experts, which are there anyway, else every layer's weights. The
    gradient is the same bit by bit."""
    config, packed = read_json(tiny / "config.json"), load(tiny, "mxfp4")
    wide_kept, expected = kept_and_gradient(load(tiny, "bf16"))
    matrices = config["num_local_experts"] * 3 * config["hidden_size"] * config["intermediate_size"]
    for again, more in ((True, 0), (False, config["num_hidden_layers"] * matrices * 2)):
        for module in quantized_experts(packed):
            module.dequantize_again = again
        kept, gradient = kept_and_gradient(packed)
        assert kept == wide_kept + more and gradient.any() and torch.equal(gradient, expected)


def test_experts_in_parts_are_those_of_a_whole_layer_bit_by_bit(tiny, monkeypatch):
    """With gradient checkpointing, and where no token needs a part. Only a part is dequantized at a time."""
    (module, *_), counts, dequantize = quantized_experts(load(tiny, "mxfp4")), [], experts.dequantize_mxfp4

    def counted(blocks, scales):
        counts.append(len(blocks))
        return dequantize(blocks, scales)

    monkeypatch.setattr(experts, "dequantize_mxfp4", counted)
    g = torch.Generator().manual_seed(0)
    used = torch.tensor([0, 1, 3])  # of 4 experts
    index = torch.stack([used[torch.randperm(3, generator=g)[:2]] for _ in range(20)])
    inputs = torch.randn(20, 64, generator=g).bfloat16(), index, torch.rand(20, 2, generator=g).softmax(-1).bfloat16()
    states, index, weights = (tensor.to(module.gate_up_proj_bias.device) for tensor in inputs)  # A GPU if there is one.
    states.requires_grad_()

    def learned(parts):
        module.parts, module.dequantize_again = parts, parts > 1
        counts.clear()
        output = checkpoint(experts_forward, module, states, index, weights, use_reentrant=False)
        return output.detach(), torch.autograd.grad(output.float().square().sum(), states)[0], list(counts)

    *whole, whole_counts = learned(1)
    assert set(whole_counts) == {4} and all(tensor.any() for tensor in whole)
    for parts, sizes in ((2, {2}), (3, {2}), (4, {1})):
        *tensors, part_counts = learned(parts)
        assert all(map(torch.equal, tensors, whole)) and set(part_counts) == sizes
