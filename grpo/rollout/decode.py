# SPDX-License-Identifier: Apache-2.0
"""The decoding loop of transformers' generate over a cache of fixed size; on a GPU each step is one CUDA graph."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, DynamicCache, GenerationConfig, PreTrainedModel

from grpo.common import log
from grpo.model.attention import using_attention

DECODING_ATTENTION = "decoding"  # The name of `decoding_attention` in transformers.


def decoding_attention(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """transformers' eager attention with sinks for one new token a row. The query heads of a group read the same keys;
    eager attention would copy them for each head, 2 GiB in a layer with 96 rows of 1,452 tokens.

    `query` (B, Hq, 1, D), `key` and `value` (B, Hkv, S, D), `attention_mask` (B, 1, 1, S) is added to the scores.
    Returns (B, 1, Hq, D)."""
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])  # (B, Hkv, G, D)
    scores = grouped @ key.transpose(2, 3) * scaling + attention_mask
    sinks = module.get_parameter("sinks").view(1, key.shape[1], -1, 1).expand(len(query), -1, -1, -1)
    scores = torch.cat([scores, sinks], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = scores.softmax(dim=-1, dtype=scores.dtype)[..., :-1].to(value.dtype).contiguous()
    return (weights @ value).reshape(len(query), 1, -1, query.shape[-1]), None


# https://huggingface.co/docs/transformers/attention_interface
AttentionInterface.register(DECODING_ATTENTION, decoding_attention)


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Callable[[Tensor, None], Tensor],
    generation_config: GenerationConfig,
    **inputs: Any,
) -> Tensor:
    """Ids (B, L + C) of prompts (B, L), padded on the left, and their completions. transformers' generate prepares the
    arguments and calls this function as `custom_generate`. It draws tokens and ends rows as its own loop does.

    https://huggingface.co/docs/transformers/generation_strategies#custom-generation-methods"""
    assert generation_config.max_length is not None
    step = DecodingStep(model, inputs["attention_mask"], generation_config.max_length - 1)
    logits = step.prefill(input_ids, inputs["attention_mask"])
    unfinished = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    with using_attention(model, DECODING_ATTENTION):
        while True:
            scores = logits_processor(input_ids, logits.float())
            if generation_config.do_sample:
                tokens = torch.multinomial(scores.softmax(-1), 1)[:, 0]
            else:
                tokens = scores.argmax(-1)
            tokens = torch.where(unfinished, tokens, generation_config.pad_token_id)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
            unfinished &= ~stopping_criteria(input_ids, None)
            if not unfinished.any():
                return input_ids
            logits = step(tokens)


@contextlib.contextmanager
def shared_prefill(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, `model.generate` decodes by `decode`, which computes a prompt once for all of its completions:
    for a group of 8 the prefill takes an eighth of the time and memory."""
    stock = cast(Any, model).generate  # The method's own annotations accept no class of transformers.

    def generate(**options: Any) -> torch.Tensor:
        ids = stock(**options, custom_generate=decode)
        torch.cuda.empty_cache()  # Until the cache is emptied, nothing else can use the memory of the graph.
        return ids

    vars(model)["generate"] = generate  # PEFT's model finds this before the method of the class.
    try:
        yield
    finally:
        del vars(model)["generate"]


class DecodingStep:
    """Computes the logits after one more token in each of B rows, in buffers at fixed addresses as CUDA graphs need.

    It is the model's key-value cache as well. Each layer has a ring buffer: column c of the padded rows lies in slot c
    modulo the layer's size, which is the number of columns or the sliding window. Rows that have ended are still
    computed: a step with few rows takes hardly less time, because it mostly reads the experts' weights."""

    graphs = True  # A capture that fails sets this to False for the whole process.

    def __init__(self, model: PreTrainedModel, mask: Tensor, columns: int):
        """`mask` (B, L) is that of the padded prompts; `columns` is the length of prompt and completion together, less
        the last token."""
        kinds, window, device = model.config.layer_types, model.config.sliding_window, mask.device
        columns = -(-columns // 8) * 8  # Matrix products are fast for multiples of 8.
        sizes = {"full_attention": columns, "sliding_attention": min(window, columns)}
        self.model, self.sizes = model, [sizes[kind] for kind in kinds]
        self.slots = {kind: torch.arange(size, device=device) for kind, size in sizes.items()}
        self.keys: list[Tensor] = []  # One tensor for each layer, (B, Hkv, its size, D).
        self.values: list[Tensor] = []
        self.first = mask.shape[1] - mask.sum(1, keepdim=True)  # (B, 1): columns before it are padding
        self.column = torch.tensor([mask.shape[1]], device=device)  # The column of the next token.
        self.tokens = torch.zeros(len(mask), 1, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)  # output buffer of the graph
        self.capturing = device.type == "cuda" and self.graphs

    def prefill(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Fills the cache with prompts `input_ids` and `mask` (B, L) and returns the logits (B, V) after them. Equal
        prompts are computed once, and each alone: eager attention over all would take more memory than all else."""
        prompts, owner = torch.cat([input_ids, mask], 1).unique(dim=0, return_inverse=True)
        logits = []
        for number, (ids, kept) in enumerate(prompt.chunk(2) for prompt in prompts):
            rows, cache = (owner == number).nonzero()[:, 0], DynamicCache(config=self.model.config)
            out = self.model(input_ids=ids[kept.bool()][None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits.append(out.logits[0, -1])
            for layer, (size, states) in enumerate(zip(self.sizes, cache, strict=True)):
                for stores, part in zip((self.keys, self.values), states[:2], strict=True):
                    if len(stores) == layer:  # zeros, because a masked slot must not hold NaN
                        stores.append(part.new_zeros(len(input_ids), part.shape[1], size, part.shape[3]))
                    ring = part.new_zeros(1, part.shape[1], size, part.shape[3])
                    columns = torch.arange(mask.shape[1] - part.shape[2], mask.shape[1], device=part.device)
                    stores[layer][rows] = ring.index_copy_(2, columns % size, part)
        return torch.stack(logits)[owner]

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """transformers' cache interface: stores `key` and `value` (B, Hkv, 1, D) of this column, and returns the keys
        and values of all columns in this layer."""
        for store, new in ((self.keys[layer], key), (self.values[layer], value)):
            store.index_copy_(2, self.column % self.sizes[layer], new)
        return self.keys[layer], self.values[layer]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after `tokens` (B,), valid until the next call."""
        self.tokens.copy_(tokens[:, None])
        if self.capturing:
            self.capturing = False
            self.capture()
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.logits

    def run(self) -> Tensor:
        """Computes the logits (B, V) after `self.tokens`, which take the next column, without waiting for the GPU."""
        masks, dtype = {}, self.keys[0].dtype
        for kind, slots in self.slots.items():
            # The column in each slot; negative if there is none yet.
            column = self.column - (self.column - slots) % len(slots)
            mask = torch.zeros(len(self.first), len(slots), dtype=dtype, device=slots.device)
            masks[kind] = mask.masked_fill_(column < self.first, torch.finfo(dtype).min)[:, None, None]
        inputs = {"input_ids": self.tokens, "position_ids": self.column - self.first, "attention_mask": masks}
        out = self.model(**inputs, past_key_values=self, use_cache=True)
        self.column += 1
        return out.logits[:, -1]

    def capture(self) -> None:
        """Records `run` as a CUDA graph, which lives as long as this object: for a rollout, in which no weight changes.
        If recording fails, each kernel of a step is launched by itself, as slowly as in transformers' loop."""
        graph, column, debug = torch.cuda.CUDAGraph(), self.column.clone(), torch.cuda.get_sync_debug_mode()
        capture = torch.cuda.graph(graph, capture_error_mode="thread_local")
        side_stream = capture.capture_stream  # It is always the same stream, because each stream keeps workspaces.
        assert side_stream is not None
        torch.cuda.empty_cache()  # the prefill's free blocks belong to another stream
        side_stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side_stream):
                # The first run compiles and loads kernels. The second raises if the host waits for the GPU: a
                # capture that fails for this reason would leave torch's allocator broken.
                for mode in ("default", "error"):
                    torch.cuda.set_sync_debug_mode(mode)
                    self.run()
                    self.column.copy_(column)
                torch.cuda.set_sync_debug_mode("default")
                with capture:
                    self.logits = self.run()
            self.graph = graph
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            DecodingStep.graphs, reason = False, " ".join(str(error).split())[:300]
            log.warning("rollouts are slow: no CUDA graph of a decoding step can be made here (%s)", reason)
            # A failed capture may leave the random generator in its capturing state.
            generator = torch.cuda.default_generators[column.device.index]
            generator.graphsafe_set_state(generator.clone_state())
        finally:
            torch.cuda.set_sync_debug_mode(debug)
            torch.cuda.current_stream().wait_stream(side_stream)
            self.column.copy_(column)
