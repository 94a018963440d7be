# SPDX-License-Identifier: Apache-2.0
"""Decoder layers that compute long micro-batches in chunks of tokens, so that only attention needs memory for all."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import (
    ALL_ATTENTION_FUNCTIONS,
    GptOssDecoderLayer,
    GptOssRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from grpo.common import allocator_settings
from grpo.model.experts import dequantized_once

ByToken = Callable[..., tuple[Tensor, ...]]  # (slice of tokens, their inputs) -> their outputs


@contextlib.contextmanager
def joined_memory(wanted: bool) -> Iterator[None]:
    """Inside the block torch's allocator joins all memory that is free, if `wanted`, whatever the sizes of the tensors
    that it held. Otherwise an input that a layer keeps lies in a block of twice its size, of which nobody needs the
    rest: without it four completions of 65,536 tokens took 3.8 GiB more (docs/results/long-46-apart-h200.json).

    Memory of vLLM's that sleeps must not be joined (https://github.com/pytorch/pytorch/issues/147851), so this is no
    variable of the environment. Where the user's variable turned it on, nothing changes: `vllm_environment` sees to
    vLLM. torch has no public name for it; vLLM and verl call this one too."""
    settings = allocator_settings()
    if not wanted or "expandable_segments:True" in settings:
        yield
        return
    change = torch._C._accelerator_setAllocatorSettings
    kept = f"{settings}," if settings else ""  # Some options that a call leaves out return to torch's own values.
    torch.cuda.empty_cache()  # Blocks that are there already would be used first, as they are.
    change(f"{kept}expandable_segments:True")
    try:
        yield
    finally:
        change(f"{kept}expandable_segments:False")


def chunk_layers(model: PreTrainedModel, tokens: int, on_host: bool) -> None:
    """Let the layers of the base `model` compute longer micro-batches in chunks of `tokens`, and with `on_host` keep
    what the backward pass starts from in host memory."""
    for layer in model.model.layers:
        layer.__class__ = LongLayer
        layer.chunk, layer.on_host = tokens, on_host
    model.model.norm.__class__ = LongNorm
    model.model.norm.chunk = tokens


class LongLayer(GptOssDecoderLayer):
    """A decoder layer as attention between two functions of single tokens: `before` computes queries, keys and values,
    `after` the rest, experts included. For more than `chunk` tokens these run chunk by chunk, in both passes.

    It does its own gradient checkpointing, because torch's computes the whole layer again before any of it is
    differentiated: each chunk of `after` is computed once in the backward pass, and freed before the next. Dropout
    would draw other numbers each time, so the plan chunks no layer with LORA_DROPOUT."""

    chunk: int
    on_host: bool

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        if hidden_states.shape[:2].numel() <= self.chunk or options["past_key_values"] is not None:
            return cast(Tensor, super().__call__(hidden_states, **options))
        # The parameters are inputs so that autograd differentiates the first layer, whose input has no gradient.
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if self.on_host else contextlib.nullcontext():
            return cast(Tensor, ChunkedLayer.apply(self, options, hidden_states, *trainable))

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (R, T, heads, head_dim), of layer inputs (R, T, H)."""
        attention, normed = self.self_attn, self.input_layernorm(hidden)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (projection(normed).unflatten(-1, (-1, attention.head_dim)) for projection in projections)
        return *apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), v

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: object) -> Tensor:
        """The result of attention, (R, T, heads * head_dim)."""
        attention = self.self_attn
        name = attention.config._attn_implementation
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        by_head = (x.transpose(1, 2) for x in (queries, keys, values))
        options = {"scaling": attention.scaling, "sliding_window": attention.sliding_window, "s_aux": attention.sinks}
        return cast(Tensor, kernel(attention, *by_head, mask, **options)[0].flatten(2))

    def after(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor]:
        """The layer's outputs (R, T, H) from its inputs and the result of attention."""
        hidden = hidden + self.self_attn.o_proj(attended)
        return (hidden + self.mlp(self.post_attention_layernorm(hidden))[0],)


class LongNorm(GptOssRMSNorm):
    """The norm behind the layers, which in float32 would take five times what it normalizes."""

    chunk: int

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.shape[:2].numel() <= self.chunk:
            return super().forward(hidden_states)
        return cast(Tensor, ChunkedNorm.apply(self, hidden_states))

    def of_chunk(self, _: slice, hidden: Tensor) -> tuple[Tensor]:
        return (super().forward(hidden),)


class ChunkedNorm(torch.autograd.Function):
    """A frozen norm chunk by chunk: apply(norm, hidden states (R, T, H))."""

    @staticmethod
    def forward(ctx, norm, hidden):
        ctx.norm = norm
        ctx.save_for_backward(hidden)
        return in_chunks(norm.chunk, norm.of_chunk, hidden)[0]

    @staticmethod
    def backward(ctx, gradient):
        return None, backward_in_chunks(ctx.norm.chunk, ctx.norm.of_chunk, (gradient,), *ctx.saved_tensors)[0]


class ChunkedLayer(torch.autograd.Function):
    """A long layer: apply(layer, keyword arguments of a decoder layer, hidden states (R, T, H), trainable parameters).

    As with torch's reentrant checkpoints, the backward pass adds the parameters' gradients to their `grad` itself."""

    @staticmethod
    def forward(ctx, layer, options, hidden, *parameters):
        device = hidden.device.type
        ctx.layer, ctx.options, ctx.parameters = layer, options, len(parameters)
        ctx.autocast = {"device_type": device, "dtype": torch.get_autocast_dtype(device)}
        ctx.autocast["enabled"] = torch.is_autocast_enabled(device)
        ctx.save_for_backward(hidden)
        before, after = by_token(layer, options)
        attended = layer.attend(*in_chunks(layer.chunk, before, hidden), options["attention_mask"])
        with dequantized_once(layer):
            return in_chunks(layer.chunk, after, hidden, attended)[0]

    @staticmethod
    def backward(ctx, gradient):
        (hidden,), layer = ctx.saved_tensors, ctx.layer
        before, after = by_token(layer, ctx.options)
        # Older torch's autocast keeps weights that it cast without a gradient for passes that need one.
        with torch.autocast(**ctx.autocast, cache_enabled=False):
            projected = [x.requires_grad_() for x in in_chunks(layer.chunk, before, hidden)]
            with torch.enable_grad():
                attended = layer.attend(*projected, ctx.options["attention_mask"])
            with dequantized_once(layer):
                slope, slope_attended = backward_in_chunks(layer.chunk, after, (gradient,), hidden, attended.detach())
            attended.backward(slope_attended)
            slopes = [x.grad for x in projected]
            del projected, attended, slope_attended
            slope += backward_in_chunks(layer.chunk, before, slopes, hidden)[0]
        return None, None, slope, *[None] * ctx.parameters


def by_token(layer: LongLayer, options: dict[str, Any]) -> tuple[ByToken, ByToken]:
    """`before` and `after` of a layer, as functions of (slice of tokens, their inputs)."""
    cos, sin = options["position_embeddings"]
    return lambda part, x: layer.before(x, cos[:, part], sin[:, part]), lambda _, *inputs: layer.after(*inputs)


def chunks_of(size: int, hidden: Tensor) -> Iterator[slice]:
    """Slices of the tokens of `hidden` (R, T, H), `size` tokens of all rows together."""
    width = max(size // len(hidden), 1)
    return (slice(start, start + width) for start in range(0, hidden.shape[1], width))


def in_chunks(size: int, function: ByToken, *inputs: Tensor) -> list[Tensor]:
    """The outputs of `function`, computed chunk by chunk without gradient. Chunks that were kept until the last would
    divide the memory that the next layer needs whole."""
    outputs: list[Tensor] = []
    with torch.no_grad():
        for part in chunks_of(size, inputs[0]):
            pieces = function(part, *(x[:, part] for x in inputs))
            outputs = outputs or [x.new_empty(*inputs[0].shape[:2], *x.shape[2:]) for x in pieces]
            for output, piece in zip(outputs, pieces, strict=True):
                output[:, part] = piece
    return outputs


def backward_in_chunks(size: int, function: ByToken, gradients: Any, *inputs: Tensor) -> list[Tensor]:
    """The gradients of `inputs` from those of the outputs of `function`, which is computed again chunk by chunk."""
    slopes = [torch.empty_like(x) for x in inputs]
    for part in chunks_of(size, inputs[0]):
        leaves = [x[:, part].detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            outputs = function(part, *leaves)
        torch.autograd.backward(outputs, [gradient[:, part] for gradient in gradients])
        for slope, leaf in zip(slopes, leaves, strict=True):
            slope[:, part] = cast(Tensor, leaf.grad)
    return slopes
