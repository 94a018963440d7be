# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's experts: fused, frozen, and optionally kept in MXFP4."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from transformers import GptOssConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from grpo.model import expert_kernels as kernels

EXPERTS_IMPLEMENTATION = "frozen_experts"  # name of `experts_forward` in transformers
GATE_ALPHA, GATE_LIMIT = 1.702, 7.0  # gpt-oss's clamped SwiGLU
FEW_TOKENS = 256  # Up to this number of tokens, reading the weights takes longer than computing with them.


class QuantizedExperts(torch.nn.Module):
    """A stand-in for a layer's GptOssExperts that keeps the MXFP4 tensors of the checkpoint, under their names there.
    If not `packed`, it has no weights and cannot compute until grpo/rollout/shared_weights.py lends it vLLM's."""

    is_transposed = True  # PEFT reads this attribute: the weights are (E, in, out), as in GptOssExperts
    dequantize_again = False  # whether the backward pass dequantizes again (FrozenProduct)
    parts = 1  # the number of parts in which a matrix is then dequantized, one after the other
    gate_up_proj_bias: torch.nn.Parameter
    down_proj_bias: torch.nn.Parameter

    def __init__(self, config: GptOssConfig, packed: bool = True) -> None:
        super().__init__()
        # Matrix -> arguments of `dequantize_swizzled`, not as buffers, which are moved and saved with the model.
        self.shared: dict[str, tuple[Tensor, Tensor, int, int]] = {}
        self.dequantized: dict[str, Tensor] = {}  # Matrix -> its weights, inside `dequantized_once`.
        count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            if packed:
                self.register_buffer(f"{name}_blocks", torch.empty(count, rows, columns // 32, 16, dtype=torch.uint8))
                self.register_buffer(f"{name}_scales", torch.empty(count, rows, columns // 32, dtype=torch.uint8))
            bias = torch.empty(count, rows, dtype=torch.bfloat16)
            self.register_parameter(f"{name}_bias", torch.nn.Parameter(bias, requires_grad=False))

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, router_indices, routing_weights)


Experts = GptOssExperts | QuantizedExperts
Adapters = Mapping[str, tuple[Tensor, Tensor]]


def quantized_experts(model: torch.nn.Module) -> list[QuantizedExperts]:
    """The QuantizedExperts of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


def experts_forward(module: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: `hidden_states` (N, H), `top_k_index` and `top_k_weights` (N, k) -> (N, H).

    The weights get no gradient. `module.adapters`, if it is set, holds factors A (E, in, r) and B (E, r, out) by the
    name of a parameter, to which their product is added."""
    hidden, adapters = hidden_states.to(module.gate_up_proj_bias.dtype), getattr(module, "adapters", {})
    few = len(hidden) <= FEW_TOKENS and not torch.is_grad_enabled()
    fused = few and hidden.is_cuda and not adapters and hasattr(module, "gate_up_proj_blocks")
    return routed_experts(module, hidden, top_k_index, top_k_weights, adapters, fused)


# https://huggingface.co/docs/transformers/experts_interface
ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)


def expert_weights(module: Experts, name: str, part: slice = slice(None)) -> Tensor:
    """(E, in, out) weights of `gate_up_proj` or `down_proj`, of the experts in `part`: the parameter, or a temporary
    that is dequantized from vLLM's tensors if `module.shared` has them, else from the module's own."""
    if hasattr(module, name):
        return getattr(module, name)[part]
    if (weights := cast(QuantizedExperts, module).dequantized.get(name)) is not None:
        return weights[part]
    if shared := cast(QuantizedExperts, module).shared:
        values, scales, *sizes = shared[name]
        weights = dequantize_swizzled(values[part], scales[part], *sizes)
    else:
        weights = dequantize_mxfp4(getattr(module, f"{name}_blocks")[part], getattr(module, f"{name}_scales")[part])
    return weights.to(module.gate_up_proj_bias.dtype)


@contextlib.contextmanager
def dequantized_once(layer: torch.nn.Module) -> Iterator[None]:
    """Dequantize the experts of a layer for all that is computed inside the block, unless they fit only in parts."""
    whole = [module for module in quantized_experts(layer) if module.parts == 1]
    for module in whole:
        module.dequantized = {name: expert_weights(module, name) for name in ("gate_up_proj", "down_proj")}
    try:
        yield
    finally:
        for module in whole:
            module.dequantized = {}


def dequantized_product(module: QuantizedExperts, name: str, rows: Tensor, offs: Tensor, backward: bool) -> Tensor:
    """The product of `FrozenProduct`, or if `backward` that with the transposed weights. They are dequantized in
    `module.parts` parts, of which only one is in memory at a time. The result is the same bit by bit."""

    def product(part: slice, rows: Tensor, offs: Tensor) -> Tensor:
        weights = expert_weights(module, name, part)
        return grouped_mm(rows, weights.mT if backward else weights, offs=offs)

    if module.parts == 1:
        return product(slice(None), rows, offs)
    products, start, ends = [], 0, offs.tolist()
    size = -(-len(ends) // module.parts)
    for first in range(0, len(ends), size):
        part = slice(first, first + size)
        if (end := ends[part][-1]) > start:
            products.append(product(part, rows[start:end], offs[part] - start))
        start = end
    return torch.cat(products)


def packed_product(module: Experts, name: str, rows: Tensor, offs: Tensor) -> Tensor:
    """The product of `FrozenProduct` for packed weights, on a GPU and without gradients. The kernel dequantizes tile by
    tile, which is faster for few rows than writing and reading whole weights. Its sums round in another order."""
    blocks, scales = (getattr(module, f"{name}_{part}") for part in ("blocks", "scales"))
    out = rows.new_empty(len(rows), blocks.shape[1])
    halves = rows.unflatten(1, (-1, 2)).permute(2, 0, 1).contiguous()  # (2, S, in / 2): even columns, odd columns
    tile = {"ROWS": 16 if len(rows) <= 16 * len(blocks) else 32, "COLUMNS": 128, "GROUPS": 4}
    grid = -(-out.shape[1] // tile["COLUMNS"]), len(blocks)
    kernels.packed_product[grid](*halves, blocks, scales, offs, out, out.shape[1], rows.shape[1], **tile, num_warps=4)
    return out


def routed_experts(
    module: Experts, hidden: Tensor, index: Tensor, weights: Tensor, adapters: Adapters, fused: bool
) -> Tensor:
    """Apply each token's experts, on a GPU with `packed_product` if `fused`. Else the result has the same bits as with
    transformers' grouped_mm experts: products and roundings to BF16 are the same, but two kernels replace twenty."""
    expert, order = index.flatten().sort()  # (S,), S = N * k: token-expert pairs, by expert
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    count, top_k = module.gate_up_proj_bias.shape[0], index.shape[1]
    offs = torch.searchsorted(expert, torch.arange(count, device=expert.device), right=True).int()

    def project(rows: Tensor, name: str) -> Tensor:
        out = (packed_product if fused else FrozenProduct.apply)(module, name, rows, offs)
        if name not in adapters:
            return out
        # On Blackwell, experts without rows may get a gradient (https://github.com/pytorch/pytorch/issues/172439).
        used = offs.diff(prepend=offs.new_zeros(1)).bool()[:, None, None]
        a, b = (torch.where(used, factor.to(rows.dtype), 0) for factor in adapters[name])
        return out + grouped_mm(grouped_mm(rows, a, offs=offs), b, offs=offs)

    dispatched = Dispatch.apply(hidden, expert, order, inverse, top_k) if hidden.is_cuda else hidden[order // top_k]
    gate_up = project(dispatched, "gate_up_proj")  # (S, 2I)
    down = project(activation(gate_up, module.gate_up_proj_bias, expert), "down_proj")  # (S, H)
    return combine(down, module.down_proj_bias, expert, inverse, weights)


class FrozenProduct(torch.autograd.Function):
    """(S, in) rows, sorted by expert, times the weights `name` of their expert, which get no gradient: (S, out). `offs`
    (E,) holds the end of each expert's rows.

    With gradient checkpointing, autograd keeps the dequantized weights of a layer. Without it, or if these do not fit
    (`module.parts`), the backward pass dequantizes again: those of all layers take 36 GiB in gpt-oss-20b."""

    @staticmethod
    def forward(ctx, module, name, rows, offs):
        ctx.packed = (module, name) if getattr(module, "dequantize_again", False) else None
        if ctx.packed:
            ctx.save_for_backward(offs)
            return dequantized_product(module, name, rows, offs, backward=False)
        weights = expert_weights(module, name)
        ctx.save_for_backward(offs, weights)
        return grouped_mm(rows, weights, offs=offs)

    @staticmethod
    def backward(ctx, gradient):
        offs, *kept = ctx.saved_tensors
        if ctx.packed:
            return None, None, dequantized_product(*ctx.packed, gradient.contiguous(), offs, backward=True), None
        return None, None, grouped_mm(gradient.contiguous(), kept[0].transpose(1, 2), offs=offs), None


def activation(gate_up: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    """gpt-oss's gate: `gate_up` (S, 2I), where gate and up alternate, `bias` (E, 2I), `expert` (S,) -> (S, I)."""
    if gate_up.is_cuda:
        return Activation.apply(gate_up, bias, expert)
    biased = gate_up + bias[expert]
    gate, up = biased[:, ::2].clamp(max=GATE_LIMIT), biased[:, 1::2].clamp(-GATE_LIMIT, GATE_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * GATE_ALPHA))


def combine(rows: Tensor, bias: Tensor, expert: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    """(S, H) expert outputs, sorted by expert, -> (N, H) tokens: adds `bias` (E, H), multiplies by `weights` (N, k),
    and sums in float32 over the k experts of a token; `inverse` (S,) is the row of each token-expert pair."""
    if rows.is_cuda:
        return Combine.apply(rows, bias, expert, inverse, weights)
    weighted = (rows + bias[expert])[inverse] * weights.flatten()[:, None]
    return weighted.view(*weights.shape, -1).sum(1).to(rows.dtype)


class Dispatch(torch.autograd.Function):
    """(N, H) tokens -> (S, H) on a GPU: copies each token to a row for each of its experts, sorted by expert."""

    @staticmethod
    def forward(ctx, hidden, expert, order, inverse, top_k):
        ctx.save_for_backward(expert, inverse)
        ctx.top_k = top_k
        return hidden[order // top_k]

    @staticmethod
    def backward(ctx, gradient):
        expert, inverse = ctx.saved_tensors
        out = gradient.new_empty(len(inverse) // ctx.top_k, gradient.shape[1])
        tensors = gradient.contiguous(), None, expert, inverse, None, out
        launch_rows(kernels.combine, *out.shape, *tensors, top_k=ctx.top_k)
        return out, None, None, None, None


class Activation(torch.autograd.Function):
    """`activation` on a GPU, with the same arguments."""

    @staticmethod
    def forward(ctx, *inputs):
        gate_up = inputs[0]
        ctx.save_for_backward(*inputs)
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        launch_rows(kernels.activation, *out.shape, *inputs, out, limit=GATE_LIMIT, alpha=GATE_ALPHA)
        return out

    @staticmethod
    def backward(ctx, gradient):
        saved = ctx.saved_tensors  # Read only once, because gradient checkpointing allows a single unpacking.
        out = torch.empty_like(saved[0])
        tensors = *saved, gradient.contiguous(), out
        launch_rows(kernels.activation_backward, *gradient.shape, *tensors, limit=GATE_LIMIT, alpha=GATE_ALPHA)
        return out, None, None


class Combine(torch.autograd.Function):
    """`combine` on a GPU, with the same arguments."""

    @staticmethod
    def forward(ctx, *inputs):
        rows, *_, weights = inputs
        ctx.save_for_backward(*inputs)
        out = rows.new_empty(len(weights), rows.shape[1])
        launch_rows(kernels.combine, *out.shape, *inputs, out, top_k=weights.shape[1])
        return out

    @staticmethod
    def backward(ctx, gradient):
        saved = rows, *_, weights = ctx.saved_tensors  # Read once, as in Activation.
        d_rows, d_weights = torch.empty_like(rows), torch.empty_like(weights)
        tensors = gradient.contiguous(), *saved, d_rows, d_weights
        launch_rows(kernels.combine_backward, *rows.shape, *tensors, top_k=weights.shape[1])
        return d_rows, None, None, None, d_weights


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """(E, in, out) BF16 weights of `blocks` (E, out, in / 32, 16) and `scales` (E, out, in / 32), exactly: pairs of
    e2m1 codes, the first in the low bits, and powers of two with a bias of 127 (OCP Microscaling Formats 1.0)."""
    if not blocks.is_cuda:
        return convert_moe_packed_tensors(blocks, scales)
    out = torch.empty(*blocks.shape[:2], blocks.shape[2] * 32, dtype=torch.bfloat16, device=blocks.device)
    groups = scales.numel()
    kernels.dequantize[(-(-groups // 128),)](blocks, scales, out.view(torch.int32), groups, BLOCK=128, num_warps=4)
    return out.transpose(1, 2)


def dequantize_swizzled(values: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """(E, `columns`, `rows`) BF16 weights as `dequantize_mxfp4` returns them, from vLLM's tensors on a Hopper card.

    vLLM's tensors are uint8 `values` (E, columns * 2, rows / 4) and `scales` (E, columns, rows / 32), views of their
    transposes, padded to whole tiles, in triton_kernels' layouts HOPPER_VALUE and, for 8 warps, HOPPER_SCALE. Raises
    RuntimeError for tensors that are too small."""
    # A word holds 8 weights, a short 2 scales.
    words, shorts = values.mT.view(torch.int32), scales.mT.view(torch.int16)
    out = torch.empty(len(words), rows, columns, dtype=torch.bfloat16, device=words.device)
    sizes, out_words = (*words.shape[1:], *shorts.shape[1:]), out.view(torch.int32)
    if any(held < needed for held, needed in zip(sizes, (rows / 4, columns / 2, rows / 32, columns / 2), strict=True)):
        raise RuntimeError(f"values {(*values.shape,)} and scales {(*scales.shape,)} do not hold {rows} x {columns}")
    grid = -(-columns // 512), -(-rows // 16), len(words)
    kernels.dequantize_swizzled[grid](words, shorts, out_words, rows, columns // 32, *sizes, GROUPS=16, num_warps=4)
    return out.mT


def launch_rows(kernel: Any, rows: int, columns: int, *tensors: Tensor | None, **constants: float) -> None:
    """Start a kernel with one program for each row."""
    if rows:
        width = 1 << (columns - 1).bit_length()
        kernel[(rows,)](*tensors, columns, BLOCK=width, num_warps=8 if width >= 1024 else 1, **constants)
