# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's checkpoint format: MXFP4, chat template, config, tensors, safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

# Settings: the two shapes, and the recipe of the tiny model


class ModelError(Exception):
    """A problem the user can solve: the message says what is wrong and what to do; the command exits with 2."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a gpt-oss model; the defaults are openai/gpt-oss-20b's (config.json, read November 2026)."""

    layers: int = 24  # alternating: even layers attend within the sliding window, odd ones to everything
    hidden: int = 2880  # must be a multiple of 32, the MXFP4 block
    intermediate: int = 2880  # of one expert; must be a multiple of 32
    experts: int = 32
    experts_per_token: int = 4
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 201088
    sliding_window: int = 128
    rope_theta: float = 150000.0
    rope_factor: float = 32.0  # YaRN: the context is this many times the original one
    original_context: int = 4096

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ModelError(f"Shape.{name} must be positive, got {value}")
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % BLOCK:
                raise ModelError(
                    f"Shape.{name} must be a multiple of {BLOCK} (the MXFP4 block), got {getattr(self, name)}"
                )
        if self.heads % self.kv_heads or self.head_dim % 2 or self.experts_per_token > self.experts:
            raise ModelError(
                f"impossible shape: heads % kv_heads, head_dim % 2 or experts_per_token > experts in {self}"
            )


BLOCK = 32  # elements that share one scale in MXFP4
GPT_OSS_20B = Shape()
TINY = Shape(
    layers=2,
    hidden=64,
    intermediate=64,
    experts=4,
    experts_per_token=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=592,
    sliding_window=32,
)
# MXFP4: four-bit floats in blocks of 32 that share a power-of-two scale

# Magnitudes of e2m1, in the order of their codes; bit 3 of a code is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points. Ties go to the even code: a tie at 0.25, 1.25, 2.5, 5.0 rounds down, at 0.75, 1.75, 3.5 up.
E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E8M0_BIAS = 127
E2M1_MAX_EXPONENT = 2  # 6.0 = 1.5 * 2**2


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize along the last dimension to MXFP4 as the OCP Microscaling Formats specification 1.0, section 6.3, says.

    The scale of a block is 2 to the exponent of its largest magnitude, less 2; elements are rounded to nearest, ties to
    even, and saturate at 6 times the scale. Values that MXFP4 can represent come back exactly, signed zeros included.

    Args:
        weight: float tensor ``[..., K]``, K a multiple of 32; gpt-oss's experts are ``[E, rows, K]``.

    Returns:
        blocks: uint8 ``[..., K/32, 16]``, two codes to a byte, the element with the even index in the low four bits.
        scales: uint8 ``[..., K/32]``, exponents with a bias of 127 (e8m0).

    Raises:
        ModelError: if K is not a multiple of 32, or a value is not finite.
    """

    if weight.shape[-1] % BLOCK:
        raise ModelError(f"the last dimension must be a multiple of {BLOCK}, got {tuple(weight.shape)}")
    # float64 because 2**-128, a code of 0.5 under the smallest scale, is subnormal in float32 and may be flushed.
    values = weight.detach().to(torch.float64).unflatten(-1, (-1, BLOCK))
    if not torch.isfinite(values).all():
        raise ModelError("cannot quantize a tensor that holds NaN or infinity")
    largest = values.abs().amax(dim=-1)
    exponent = torch.frexp(largest).exponent - 1 - E2M1_MAX_EXPONENT  # frexp's mantissa is in [0.5, 1)
    # 255 is NaN. The largest scale used is 2**125, so that 6 times it still fits into bfloat16.
    exponent = torch.where(largest > 0, exponent, -E8M0_BIAS).clamp(-E8M0_BIAS, E8M0_BIAS - E2M1_MAX_EXPONENT)
    magnitude = torch.ldexp(values.abs(), -exponent.unsqueeze(-1))
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for code, edge in enumerate(E2M1_EDGES):
        codes += (magnitude > edge) if code % 2 == 0 else (magnitude >= edge)
    codes += torch.signbit(values).to(torch.uint8) * 8
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks.contiguous(), (exponent + E8M0_BIAS).to(torch.uint8)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantize_mxfp4`: float32 ``[..., K]`` of ``[..., K/32, 16]`` blocks and ``[..., K/32]`` scales."""

    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponent = scales.to(torch.int32) - E8M0_BIAS
    return torch.ldexp(table[codes.long()], exponent.unsqueeze(-1)).flatten(-2).to(torch.float32)


# Chat template and special tokens

SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
BOS, EOS, PAD = "<|startoftext|>", "<|return|>", "<|endoftext|>"
STOP_TOKENS = ("<|return|>", "<|endoftext|>", "<|call|>")  # the order of gpt-oss-20b's generation_config.json
TINY_SYSTEM = ("", "")  # nothing but date and effort, so that prompts stay short
FULL_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
FULL_CHANNELS = "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message."
_TEMPLATE = """\
{#- Harmony layout, plain chats only: no tools. Variables: reasoning_effort, strftime_now. -#}
{{- "<|start|>system<|message|>" + IDENTITY + "Current date: " + strftime_now("%Y-%m-%d") -}}
{{- "\\n\\nReasoning: " + (reasoning_effort or "medium") + CHANNELS + "<|end|>" -}}
{%- for message in messages -%}
  {%- if message.role in ("system", "developer") -%}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + message.content + "\\n\\n<|end|>" -}}
  {%- elif message.role == "user" -%}
    {{- "<|start|>user<|message|>" + message.content + "<|end|>" -}}
  {%- elif message.role == "assistant" -%}
    {{- "<|start|>assistant<|channel|>final<|message|>" + message.content -}}
    {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" -}}
  {%- else -%}
    {{- raise_exception("unknown role " + message.role + ": use system, developer, user or assistant") -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start|>assistant" -}}{%- endif -%}
"""


def chat_template(identity: str = FULL_IDENTITY, channels: str = FULL_CHANNELS) -> str:
    """The Jinja template of `chat_template.jinja`, in the Harmony layout of gpt-oss.

    Args:
        identity: opens the system message, before the date.
        channels: closes the system message, after the reasoning effort.

    Rendering takes ``reasoning_effort`` (default medium) and ``strftime_now``, both as keyword arguments of
    ``apply_chat_template``; transformers supplies ``strftime_now`` itself where the caller does not.
    """
    return _TEMPLATE.replace("IDENTITY", json.dumps(identity)).replace("CHANNELS", json.dumps(channels))


# Layout: config files, the list of tensors, safetensors written as a stream

ITEM_BYTES = {"BF16": 2, "U8": 1}
SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint: its name, safetensors type (``BF16`` or ``U8``) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def tensor_specs(shape: Shape) -> list[TensorSpec]:
    """Every tensor of a gpt-oss checkpoint of that shape, in the order in which it is written.

    Expert matrices are stored transposed against transformers' modules: rows are outputs, the quantized last dimension
    is the input; the rows of gate_up_proj alternate gate, up, gate, up.
    """
    h, i, e = shape.hidden, shape.intermediate, shape.experts
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    specs = [TensorSpec("model.embed_tokens.weight", "BF16", (shape.vocab, h))]
    for n in range(shape.layers):
        for name, dtype, dims in (
            ("input_layernorm.weight", "BF16", (h,)),
            ("self_attn.q_proj.weight", "BF16", (q, h)),
            ("self_attn.q_proj.bias", "BF16", (q,)),
            ("self_attn.k_proj.weight", "BF16", (kv, h)),
            ("self_attn.k_proj.bias", "BF16", (kv,)),
            ("self_attn.v_proj.weight", "BF16", (kv, h)),
            ("self_attn.v_proj.bias", "BF16", (kv,)),
            ("self_attn.o_proj.weight", "BF16", (h, q)),
            ("self_attn.o_proj.bias", "BF16", (h,)),
            ("self_attn.sinks", "BF16", (shape.heads,)),
            ("post_attention_layernorm.weight", "BF16", (h,)),
            ("mlp.router.weight", "BF16", (e, h)),
            ("mlp.router.bias", "BF16", (e,)),
            ("mlp.experts.gate_up_proj_blocks", "U8", (e, 2 * i, h // BLOCK, BLOCK // 2)),
            ("mlp.experts.gate_up_proj_scales", "U8", (e, 2 * i, h // BLOCK)),
            ("mlp.experts.gate_up_proj_bias", "BF16", (e, 2 * i)),
            ("mlp.experts.down_proj_blocks", "U8", (e, h, i // BLOCK, BLOCK // 2)),
            ("mlp.experts.down_proj_scales", "U8", (e, h, i // BLOCK)),
            ("mlp.experts.down_proj_bias", "BF16", (e, h)),
        ):
            specs.append(TensorSpec(f"model.layers.{n}.{name}", dtype, dims))
    specs.append(TensorSpec("model.norm.weight", "BF16", (h,)))
    specs.append(TensorSpec("lm_head.weight", "BF16", (shape.vocab, h)))
    return specs


def checkpoint_bytes(shape: Shape) -> int:
    """Bytes of all tensors of that shape; computed from one layer, so that absurd shapes are refused quickly."""
    one, two = (sum(spec.nbytes for spec in tensor_specs(replace(shape, layers=n))) for n in (1, 2))
    return one + (shape.layers - 1) * (two - one)


def parameter_count(shape: Shape) -> int:
    """Number of weights of a model of that shape, after dequantization (scales are not counted)."""
    total = 0
    for spec in tensor_specs(shape):
        if spec.name.endswith("_blocks"):
            total += 2 * math.prod(spec.shape)  # two weights in a byte
        elif not spec.name.endswith("_scales"):
            total += math.prod(spec.shape)
    return total


def config_dict(shape: Shape, token_ids: dict[str, int]) -> dict[str, Any]:
    """`config.json` with the keys and spelling of openai/gpt-oss-20b; `token_ids` maps special tokens to their ids."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": token_ids[EOS],
        "experts_per_token": shape.experts_per_token,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initial_context_length": shape.original_context,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "layer_types": ["full_attention" if n % 2 else "sliding_attention" for n in range(shape.layers)],
        "max_position_embeddings": int(shape.original_context * shape.rope_factor),
        "model_type": "gpt_oss",
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_local_experts": shape.experts,
        "output_router_logits": False,
        "pad_token_id": token_ids[PAD],
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": shape.rope_factor,
            "original_max_position_embeddings": shape.original_context,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": shape.rope_theta,
        "router_aux_loss_coef": 0.9,
        "sliding_window": shape.sliding_window,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        # As in the official file. Without it transformers takes a local tokenizer for one of Mistral's, and warns.
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def generation_config_dict(token_ids: dict[str, int]) -> dict[str, Any]:
    """`generation_config.json`: generation stops at any of `STOP_TOKENS`."""
    return {
        "bos_token_id": token_ids[BOS],
        "do_sample": True,
        "eos_token_id": [token_ids[token] for token in STOP_TOKENS],
        "pad_token_id": token_ids[PAD],
    }


def tokenizer_config_dict() -> dict[str, Any]:
    """`tokenizer_config.json`. Padding is on the left, as generation in batches needs."""
    return {
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
        "pad_token": PAD,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def plan_shards(specs: Iterable[TensorSpec], limit: int = SHARD_BYTES) -> list[list[TensorSpec]]:
    """Cut the list into shards of at most `limit` bytes, order kept; a larger tensor gets a shard for itself."""
    shards: list[list[TensorSpec]] = []
    size = limit
    for spec in specs:
        if size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def write_safetensors(path: Path, specs: list[TensorSpec], make: Callable[[TensorSpec], torch.Tensor]) -> None:
    """Write one safetensors file tensor by tensor, so that memory holds one tensor and not one shard.

    The format (https://huggingface.co/docs/safetensors): the header's length as 8 bytes little-endian, a JSON header,
    then the tensors' bytes without gaps. `make` is called once for each spec, in order.

    Raises:
        ModelError: if `make` returns another type or shape than the spec says.
    """

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8 bytes
    dtypes = {"BF16": torch.bfloat16, "U8": torch.uint8}
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            tensor = make(spec)
            if tensor.dtype != dtypes[spec.dtype] or tuple(tensor.shape) != spec.shape:
                raise ModelError(f"{spec.name}: expected {spec.dtype} {spec.shape}, got {tensor.dtype} {tensor.shape}")
            file.write(tensor.contiguous().cpu().view(torch.uint8).numpy().data)


def write_weights(
    out: Path, specs: list[TensorSpec], make: Callable[[TensorSpec], torch.Tensor], limit: int = SHARD_BYTES
) -> list[Path]:
    """Write all tensors into `out`: one ``model.safetensors``, or shards with ``model.safetensors.index.json``."""
    shards = plan_shards(specs, limit)
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        where = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        total = sum(spec.nbytes for spec in specs)
        write_json(
            out / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))},
        )
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(out / name, shard, make)
    return [out / name for name in names]
