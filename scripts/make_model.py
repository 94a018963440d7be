# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in gpt-oss's exact format that this project makes itself: everything can be tried without a download.

    python scripts/make_model.py tiny                        # a trained toy model, into the user's cache directory
    python scripts/make_model.py tiny --out checkpoints/tiny
    python scripts/make_model.py full --out checkpoints/full --tokenizer o200k/   # gpt-oss-20b's shapes, random weights
    python scripts/make_model.py full --out checkpoints/mid --layers 4 --no-tokenizer
    python scripts/make_model.py check checkpoints/full      # every tensor's name, type, shape and place

``tiny`` has a few hundred thousand parameters, its own tokenizer and a short supervised warm-up on synthetic TES
prompts: it answers in the right format, reads the numbers, but leans only a little to the better action, so that GRPO
has something to improve within a minute on two CPU cores. ``full`` has gpt-oss-20b's shapes and noise for weights: it
costs what the real model costs in memory and time and answers nothing. docs/models.md says what each can show.

Both are written in the MXFP4 layout of openai/gpt-oss-20b. What is simplified: ``full`` does not imitate the
statistics of trained weights, only a scale at which activations stay finite.

Exit codes: 0 done, 2 a usage error, a refused target, a full disk or a failed check.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import lzma
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# ---------------------------------------------------------------------------------------------------------------------
# Settings: the two shapes, and the recipe of the tiny model
# ---------------------------------------------------------------------------------------------------------------------


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

# ---------------------------------------------------------------------------------------------------------------------
# MXFP4: four-bit floats in blocks of 32 that share a power-of-two scale
# ---------------------------------------------------------------------------------------------------------------------

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
    import torch

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
    import torch

    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponent = scales.to(torch.int32) - E8M0_BIAS
    return torch.ldexp(table[codes.long()], exponent.unsqueeze(-1)).flatten(-2).to(torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Chat template and special tokens
# ---------------------------------------------------------------------------------------------------------------------

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


# ---------------------------------------------------------------------------------------------------------------------
# Layout: config files, the list of tensors, safetensors written as a stream
# ---------------------------------------------------------------------------------------------------------------------

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
    import torch

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


# ---------------------------------------------------------------------------------------------------------------------
# Directories: nothing half-written under its final name, nothing overwritten by accident
# ---------------------------------------------------------------------------------------------------------------------


def require_space(where: Path, needed: int) -> None:
    """Raise ModelError if the file system that will hold `where` has fewer than `needed` bytes free."""
    existing = next(parent for parent in (where.absolute(), *where.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ModelError(
            f"{where} needs {needed / 2**30:.2f} GiB and {existing} has {free / 2**30:.2f} GiB free: "
            "free some space, or choose another folder"
        )


def _is_checkpoint(path: Path) -> bool:
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"] == "gpt_oss"
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def new_directory(out: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary sibling of `out` that becomes `out` by a rename if the body succeeds and is removed if not.

    Raises:
        ModelError: if `out` exists and is not empty, without `force`; with it, if it is no gpt-oss checkpoint (only
            what this script could have written is ever replaced).
    """
    out = out.absolute()
    occupied = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if occupied and not force:
        raise ModelError(
            f"{out} exists and is not empty: move it away, choose another folder, or use make_model.py --force"
        )
    if occupied and not _is_checkpoint(out):
        raise ModelError(f"{out} exists and holds no gpt-oss checkpoint, so it is not replaced: move it away")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", suffix=".tmp", dir=out.parent))
    except OSError as error:
        raise ModelError(f"cannot write beside {out}: {error}") from error
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's 0o700 would hide the model from other users
        if occupied:
            old = temporary.with_suffix(".old")
            os.replace(out, old)
            os.replace(temporary, out)
            shutil.rmtree(old)
        else:
            os.replace(temporary, out)  # replaces an empty directory too
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# Full: gpt-oss-20b's shapes, random weights
# ---------------------------------------------------------------------------------------------------------------------

# Ids of openai/gpt-oss-20b, for checkpoints without a tokenizer.
O200K_IDS = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
# Standard deviations of the random weights, chosen so that rounding stays rounding. With 0.02 everywhere (gpt-oss's
# initializer_range) the model is chaotic: experts write as much into the residual stream as all there is, the fourth and
# the fifth expert of a token are often nearly tied, so a rounding error swaps them and grows from layer to layer. Two
# exact BF16 implementations then disagree by 0.25 to 0.5 nats a token, which hides most bugs. So experts
# write little (a swap changes little), attention writes more (an adapter on it must show), router scores are spread (the
# fourth expert weighs little), and embeddings are large against what one layer adds. docs/models.md has the figures.
# Matrices: times 1 / sqrt(fan-in), so that other widths behave alike.
MATRIX_GAIN = {
    "q_proj": 0.75,  # attention scores N(0, 1), with YaRN's factor of 1.81 on them: neither flat nor one-hot
    "k_proj": 0.75,
    "v_proj": 1.0,
    "o_proj": 0.5,
    "router": 3.0,
    "gate_up_proj": 1.0,
    "down_proj": 0.1,
    "lm_head": 1.5,  # logits N(0, 1.5**2): sampled tokens vary, entropy is 1.1 nats below that of even chances
}
EMBEDDING_STD, SINK_STD, BIAS_STD = 1.0, 1.0, 0.02
E2M1_RMS = math.sqrt(sum(value**2 for value in E2M1) / len(E2M1))  # 2.926, of equally likely codes


def random_tensor(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Noise for one tensor of a full-size checkpoint, made on the generator's device; norms are ones.

    An expert's blocks are even random codes. Its scales are two neighbouring powers of two, the larger one as often as
    the standard deviation of `MATRIX_GAIN` needs.
    """
    import torch

    device = generator.device
    *_, module, last = spec.name.split(".")
    if last.endswith("_blocks"):
        return torch.randint(0, 256, spec.shape, dtype=torch.uint8, device=device, generator=generator)
    if last.endswith("_scales"):
        scale = MATRIX_GAIN[last.removesuffix("_scales")] / math.sqrt(spec.shape[-1] * BLOCK) / E2M1_RMS
        exponent = math.floor(math.log2(scale))
        share = ((scale / 2.0**exponent) ** 2 - 1) / 3  # the mean of squares: (1 - share) * 1 + share * 4
        larger = torch.rand(spec.shape, device=device, generator=generator) < share
        return larger.to(torch.uint8) + (E8M0_BIAS + exponent)
    if "norm" in spec.name:
        return torch.ones(spec.shape, dtype=torch.bfloat16, device=device)
    if last == "sinks":
        std = SINK_STD
    elif last.endswith("bias"):
        std = BIAS_STD
    elif module == "embed_tokens":
        std = EMBEDDING_STD
    else:
        std = MATRIX_GAIN[module] / math.sqrt(spec.shape[-1])
    return torch.empty(spec.shape, dtype=torch.bfloat16, device=device).normal_(0.0, std, generator=generator)


def _read_tokenizer(source: Path) -> bytes:
    """The bytes of ``tokenizer.json`` or, unpacked, of ``tokenizer.json.xz`` in the directory `source`."""
    plain, packed = source / "tokenizer.json", source / "tokenizer.json.xz"
    try:
        if plain.is_file():
            data = plain.read_bytes()
        elif packed.is_file():
            data = lzma.decompress(packed.read_bytes())
        else:
            raise ModelError(f"{source} holds neither tokenizer.json nor tokenizer.json.xz")
        json.loads(data)
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise ModelError(f"cannot read the tokenizer in {source}: {error}") from error
    return data


def special_token_ids(tokenizer_json: bytes, vocab: int) -> dict[str, int]:
    """Ids of `SPECIAL_TOKENS` in a tokenizer.json.

    Raises:
        ModelError: if one is missing, or the tokenizer has ids that a model with `vocab` embeddings lacks.
    """
    content = json.loads(tokenizer_json)
    ids = {**content["model"]["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
    missing = [token for token in SPECIAL_TOKENS if token not in ids]
    if missing:
        raise ModelError(f"the tokenizer lacks Harmony's special tokens {', '.join(missing)}")
    if max(ids.values()) >= vocab:
        raise ModelError(f"the tokenizer has ids up to {max(ids.values())}, the model {vocab} embeddings")
    return {token: ids[token] for token in SPECIAL_TOKENS}


def write_full(
    out: Path,
    shape: Shape = GPT_OSS_20B,
    tokenizer: Path | None = None,
    device: str = "cpu",
    seed: int = 0,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint with random weights, streamed: peak memory is the largest tensor (1.1 GiB for gpt-oss-20b).

    Args:
        out: new directory.
        shape: sizes; the default is gpt-oss-20b's, 12.8 GiB on disk.
        tokenizer: directory with tokenizer.json or tokenizer.json.xz to copy; None leaves the model without one.
        device: where the noise is generated; the same seed gives other noise on another kind of device.
        seed: of the noise.
        force: replace an existing checkpoint.
        shard_bytes: limit of one safetensors file.

    Raises:
        ModelError: see `new_directory`, `require_space`, `special_token_ids`, `check_checkpoint`; also for a device
            that is not there.
    """
    if tokenizer is not None:
        tokenizer_json = _read_tokenizer(tokenizer)
        ids = special_token_ids(tokenizer_json, shape.vocab)
    else:
        # A smaller vocabulary has no such ids; the last ones stand in, so that generation still runs.
        ids = {token: min(n, shape.vocab - 1) for token, n in O200K_IDS.items()}
    require_space(out, checkpoint_bytes(shape) + 64 * 2**20)
    specs = tensor_specs(shape)
    with new_directory(out, force) as directory:
        import torch

        try:
            generator = torch.Generator(device=device).manual_seed(seed)
        except RuntimeError as error:
            raise ModelError(f"--device {device} is not usable here: {str(error).splitlines()[0]}") from error
        write_weights(directory, specs, lambda spec: random_tensor(spec, generator), shard_bytes)
        write_json(directory / "config.json", config_dict(shape, ids))
        write_json(directory / "generation_config.json", generation_config_dict(ids))
        if tokenizer is not None:
            (directory / "tokenizer.json").write_bytes(tokenizer_json)
            write_json(directory / "tokenizer_config.json", tokenizer_config_dict())
            (directory / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")
        check_checkpoint(directory)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Check: what is on disk against what transformers expects
# ---------------------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, without ``__metadata__``.

    Raises:
        ModelError: if the file is unreadable, or its size is not what its header promises (a truncated copy).
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            header = json.loads(file.read(length)) if length < size else None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file")
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        raise ModelError(f"{path} has {size} bytes, its header promises {end}")
    return header


def expected_tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, types and shapes that transformers' GptOssForCausalLM needs for the directory's config.json.

    Built from the model itself on the meta device, not from `tensor_specs`, so that the two check each other.
    """
    import torch
    from transformers import AutoConfig, GptOssForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            expected[f"{name}_blocks"] = ("U8", (experts, outputs, inputs // BLOCK, BLOCK // 2))
            expected[f"{name}_scales"] = ("U8", (experts, outputs, inputs // BLOCK))
        else:
            expected[name] = ("BF16", tuple(tensor.shape))
    return expected


def check_checkpoint(directory: Path) -> dict[str, Any]:
    """Compare a checkpoint's files with what transformers expects: names, types, shapes, file sizes and the index.

    Reads headers only, so that it takes seconds at full size; the weights' values are not looked at.

    Returns:
        ``tensors``, ``files``, ``bytes`` (of tensors) and ``parameters`` (weights after dequantization).

    Raises:
        ModelError: naming every difference, at most ten of each kind.
    """
    if not _is_checkpoint(directory):
        raise ModelError(f"{directory} holds no config.json of model_type gpt_oss")
    index = directory / "model.safetensors.index.json"
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} holds no *.safetensors")
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    where: dict[str, str] = {}
    size = 0
    for path in files:
        for name, entry in read_header(path).items():
            found[name] = (entry["dtype"], tuple(entry["shape"]))
            where[name] = path.name
            size += entry["data_offsets"][1] - entry["data_offsets"][0]
    expected = expected_tensors(directory)
    problems = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:10])}"
        for what, names in (
            ("missing", expected.keys() - found.keys()),
            ("unexpected", found.keys() - expected.keys()),
            ("of another type or shape", {n for n in expected.keys() & found.keys() if expected[n] != found[n]}),
        )
        if names
    ]
    if len(files) > 1 and not index.is_file():
        problems.append(f"{len(files)} shards and no {index.name}")
    if index.is_file() and json.loads(index.read_text(encoding="utf-8")).get("weight_map") != where:
        problems.append(f"{index.name} does not say where the tensors are")
    if problems:
        raise ModelError(f"{directory} is not a complete gpt-oss checkpoint: " + "; ".join(problems))
    parameters = sum(
        math.prod(dims) * (2 if name.endswith("_blocks") else 1)
        for name, (_, dims) in found.items()
        if not name.endswith("_scales")
    )
    return {"tensors": len(found), "files": len(files), "bytes": size, "parameters": parameters}


# ---------------------------------------------------------------------------------------------------------------------
# Tiny: tokenizer
# ---------------------------------------------------------------------------------------------------------------------

NUMBER = r" ?[0-9]{1,3}"  # a token of its own; every integer from 0 to 100 has one, with and without the space before
LARGEST_NUMBER = 100
EFFORTS = ("low", "medium", "high")


@cache
def _dataset() -> ModuleType:
    """The sibling make_dataset.py, found by its path: this file may have been imported from anywhere."""
    path = Path(__file__).resolve().with_name("make_dataset.py")
    spec = importlib.util.spec_from_file_location("make_dataset", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ModelError(f"{path} is missing: the tiny model is trained on its rows")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("make_dataset", module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _tokenizer_corpus() -> list[str]:
    """Texts without numbers, to learn words from: what stands between the numbers of rendered prompts and answers."""
    import re

    texts = []
    for row in _dataset().synthetic_rows(TOKENIZER_SEED, 2):
        for effort in EFFORTS:
            texts += [f"Current date: 2025-11-06\n\nReasoning: {effort}", "system", "developer", "user", "assistant"]
        texts += [f"# Instructions\n\n{row['system']}\n\n", row["user"], "final", "[0]", "analysis", "commentary"]
    return [piece for text in texts for piece in re.split(NUMBER, text) if piece]


def make_tokenizer(vocab: int = TINY.vocab) -> Any:
    """A byte-level BPE tokenizer with exactly `vocab` entries, the same for every call.

    Any text survives encoding and decoding, because every byte is in the vocabulary. The merges are those that make the
    numbers, then those learned from the prompts' words. The special tokens come last.

    Returns:
        a `tokenizers.Tokenizer`.

    Raises:
        ModelError: if `vocab` is too small for the numbers or larger than the prompts' words can fill.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # how byte-level BPE writes a blank
    numbers = [(str(n // 10), str(n % 10)) for n in range(10, LARGEST_NUMBER + 1)]
    numbers += [(space, str(n)) for n in range(LARGEST_NUMBER + 1)]
    words = vocab - len(alphabet) - len(numbers) - len(SPECIAL_TOKENS)
    if words < 0:
        raise ModelError(f"a vocabulary of {vocab} cannot hold all bytes, numbers and special tokens")

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.train_from_iterator(
        _tokenizer_corpus(),
        trainers.BpeTrainer(vocab_size=len(alphabet) + words, initial_alphabet=alphabet, show_progress=False),
    )
    learned = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    if len(learned) < words:
        raise ModelError(f"the prompts give {len(learned)} words, a vocabulary of {vocab} needs {words}")
    merges = numbers + learned
    entries = alphabet + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE(vocab={entry: n for n, entry in enumerate(entries)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(NUMBER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Tiny: supervised warm-up
# ---------------------------------------------------------------------------------------------------------------------

# Seeds of make_dataset.synthetic_rows, beyond those that data files use.
TOKENIZER_SEED, WARMUP_SEED, PROBE_SEED = 10_001, 10_002, 10_003
TINY_DISTANCES = ((1, 2, 3, 4),)  # tokens back, one for each head of the sliding layer
ANSWER_BEFORE, ANSWER_AFTER = "<|channel|>final<|message|>[", "]<|return|>"
ACTIONS = 4
FIXED_DATE = "2025-04-07"  # warm-up prompts draw their dates around it


@dataclass(frozen=True)
class Recipe:
    """The warm-up of the tiny model; changing anything changes the model, and with it `recipe_hash`."""

    windows: int = 360  # of synthetic rows, 30 each
    probe_windows: int = 20
    short_weight: int = 9  # how often a row is drawn whose storage cannot carry the load: rare, but costly to misread
    read_steps: int = 300  # phase 1: all weights, targets as sharp as the rewards: learn to read the numbers
    soften_steps: int = 100  # phase 2: experts frozen in 4 bit, targets flattened: become undecided
    batch: int = 32
    lr: float = 4e-3
    soften_lr: float = 1e-3
    sharpness: float = 0.25  # phase 2 targets are the rewards to this power: a softmax of the values, 4 times as hot
    format_weight: float = 0.5  # of the loss on the fixed tokens of the answer against the loss on the action


def is_short(row: dict[str, Any]) -> bool:
    """Whether the storage cannot carry the hour's load in a compact row, so that output 0 leaves load unserved."""
    return " short 0 " not in row["user"]


def _encode_rows(tokenizer: Any, rows: list[dict[str, Any]], seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """Token ids of each row's whole conversation up to ``<|return|>``, and rewards ``[rows, actions]``.

    The action's own token is a placeholder (action 0). Dates and reasoning efforts vary, so that neither matters.
    """
    import random
    from datetime import date, timedelta

    import torch

    draw = random.Random(seed)
    texts = []
    for row in rows:
        day = date.fromisoformat(FIXED_DATE) + timedelta(days=draw.randrange(1000))
        texts.append(
            f"<|start|>system<|message|>Current date: {day}\n\nReasoning: {draw.choice(EFFORTS)}<|end|>"
            f"<|start|>developer<|message|># Instructions\n\n{row['system']}\n\n<|end|>"
            f"<|start|>user<|message|>{row['user']}<|end|><|start|>assistant{ANSWER_BEFORE}0{ANSWER_AFTER}"
        )
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    rewards = torch.tensor([[row[f"reward_action_{k}"] for k in range(ACTIONS)] for row in rows])
    return ids, rewards


def _answer_logits(model: Any, batch: list[list[int]], answer: int, pad: int) -> torch.Tensor:
    """Logits ``[rows, answer, vocab]`` that predict the last `answer` tokens of each sequence; padding on the left."""
    import torch

    length = max(map(len, batch))
    ids = torch.tensor([[pad] * (length - len(row)) + row for row in batch])
    mask = (torch.arange(length) >= torch.tensor([[length - len(row)] for row in batch])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, -answer - 1 : -1])


def _initial_numbers(model: Any, tokenizer: Any) -> None:
    """Give number tokens embeddings that vary smoothly with the number, the same with and without a blank before it.

    A few seconds of training see each number a few dozen times: too few to learn from nothing that 37 lies by 38.
    """
    import torch

    width = model.config.hidden_size
    number = torch.arange(LARGEST_NUMBER + 1).unsqueeze(1)
    value = number / LARGEST_NUMBER
    waves = torch.arange(1, 7) * math.pi
    # The logarithm tells 0 from 1 and 2: whether anything is short matters more than how much.
    small = number.log1p() / math.log(LARGEST_NUMBER + 1) - 0.5
    features = torch.cat((value - 0.5, (value - 0.5).abs(), (value * waves).sin(), (value * waves).cos(), small), dim=1)
    table = features @ (torch.randn(features.shape[1], width) * 0.1)
    weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for n in range(LARGEST_NUMBER + 1):
            weight[tokenizer.token_to_id(str(n))] += table[n]
            weight[tokenizer.token_to_id(f"\u0120{n}")] += table[n]


def initial_heads(model: Any, distances: Sequence[Sequence[int]], sharpness: float = 5.0) -> None:
    """Let the heads of the first sliding layers look a fixed number of tokens back, through the biases of q and k.

    A number must know which word stands before it before anything can find it; from random weights, heads that do that
    are the slowest thing to appear. Both biases lie in the fast-turning pairs of RoPE, the key's at angle 0, the query's
    turned back by the distance: their product peaks where the distance is that.

    Args:
        distances: tokens back of each head, for one sliding layer after the other; fewer than heads are repeated.
        sharpness: how far the logit falls one token beside the peak.
    """
    import torch

    rotary, size = model.model.rotary_emb, model.config.head_dim
    pairs = [n for n in range(size // 2) if rotary.inv_freq[n] > 0.08]
    turns = rotary.inv_freq[pairs].float()
    fall = (1 - turns.cos()).sum() * rotary.attention_scaling**2 / math.sqrt(size)
    length = (sharpness / fall).sqrt()
    with torch.no_grad():
        for layer, back in zip(model.model.layers[0::2], distances, strict=False):
            key = layer.self_attn.k_proj.bias.view(-1, size)
            query = layer.self_attn.q_proj.bias.view(-1, size)
            key[:, pairs] = length
            for n in range(len(query)):
                angle = -back[n % len(back)] * turns
                query[n, pairs] = length * angle.cos()
                query[n, [p + size // 2 for p in pairs]] = length * angle.sin()


def answer_figures(p: torch.Tensor, rewards: torch.Tensor) -> dict[str, float]:
    """Figures of a policy that gives the actions of N rows the probabilities `p`, ``[N, actions]``, as `rewards`.

    Returns:
        ``parse_rate``: probability of an answer ``[k]`` in the final channel with k from 0 to 3;
        ``reward``: mean reward, an unparseable answer counting 0; ``greedy``: of the likeliest action;
        ``random``, ``best_constant``, ``oracle``: of reference policies on the same rows.
    """
    return {
        "parse_rate": p.sum(-1).mean().item(),
        "reward": (p * rewards).sum(-1).mean().item(),
        "greedy": rewards.gather(1, p.argmax(-1, keepdim=True)).mean().item(),
        "random": rewards.mean().item(),
        "best_constant": rewards.mean(0).max().item(),
        "oracle": rewards.amax(-1).mean().item(),
    }


def _figures(model: Any, ids: list[list[int]], rewards: torch.Tensor, answer: dict[str, Any]) -> dict[str, float]:
    """What sampling at temperature 1 gives in expectation, exactly: probabilities instead of samples.

    Returns: those of `answer_figures`.
    """
    import torch

    fixed, place = answer["fixed"], answer["place"]
    chosen = []
    with torch.no_grad():
        for start in range(0, len(ids), 100):
            batch = ids[start : start + 100]
            logp = _answer_logits(model, batch, len(answer["ids"]), answer["pad"]).float().log_softmax(-1)
            format_logp = logp[:, fixed, torch.tensor(answer["ids"])[fixed]].sum(-1)
            # The tokens behind the action are taken from the run with action 0; the others' differ by a hair.
            chosen.append((logp[:, place, answer["actions"]] + format_logp.unsqueeze(-1)).exp())
    return answer_figures(torch.cat(chosen), rewards)


def _expert_matrices(model: Any) -> Iterator[tuple[str, Any]]:
    for n, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            yield f"model.layers.{n}.mlp.experts.{name}", getattr(layer.mlp.experts, name)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train_tiny(
    shape: Shape = TINY, recipe: Recipe | None = None, seed: int = 0, log: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, torch.Tensor], Any, dict[str, float]]:
    """Train the tiny model on the CPU in float32; the same seed gives the same model on the same machine.

    One thread only: tensors this small gain little from a second one, threads that wait for each other on busy cores
    take minutes instead of seconds, and sums do not depend on the number of cores.

    Returns:
        tensors as the checkpoint stores them, by name (BF16, and uint8 for the experts); the tokenizer; figures of
        `_figures` for the weights as stored, on rows of their own.
    """
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    recipe = recipe or Recipe()
    tokenizer = make_tokenizer(shape.vocab)
    token_ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    answer_ids = tokenizer.encode(f"{ANSWER_BEFORE}0{ANSWER_AFTER}").ids
    place = len(tokenizer.encode(ANSWER_BEFORE).ids)
    answer = {
        "ids": answer_ids,
        "place": place,
        "fixed": [n for n in range(len(answer_ids)) if n != place],
        "actions": [tokenizer.token_to_id(str(k)) for k in range(ACTIONS)],
        "pad": token_ids[PAD],
    }
    rows = _dataset().synthetic_rows(WARMUP_SEED, recipe.windows)
    rows += [row for row in rows if is_short(row)] * (recipe.short_weight - 1)
    ids, rewards = _encode_rows(tokenizer, rows, WARMUP_SEED)
    probe_ids, probe_rewards = _encode_rows(
        tokenizer, _dataset().synthetic_rows(PROBE_SEED, recipe.probe_windows), PROBE_SEED
    )

    config = config_dict(shape, token_ids)
    config.pop("quantization_config")
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        model = GptOssForCausalLM._from_config(
            GptOssConfig.from_dict(config), dtype=torch.float32, attn_implementation="eager"
        )
        _initial_numbers(model, tokenizer)
        initial_heads(model, TINY_DISTANCES)
        model.train()
        shuffle = torch.Generator().manual_seed(seed)

        def phase(steps: int, lr: float, targets: torch.Tensor, name: str) -> None:
            parameters = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda n: min(1.0, (n + 1) / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * n / steps)) / 2)
            )
            order: list[int] = []
            for step in range(steps):
                if len(order) < recipe.batch:
                    order = torch.randperm(len(ids), generator=shuffle).tolist()
                picked = [order.pop() for _ in range(recipe.batch)]
                # The action's token is visible to the tokens behind it: show them all four.
                batch = []
                for row, k in zip(picked, torch.randint(ACTIONS, (recipe.batch,), generator=shuffle), strict=True):
                    batch.append(list(ids[row]))
                    batch[-1][place - len(answer_ids)] = answer["actions"][k]
                logp = _answer_logits(model, batch, len(answer_ids), answer["pad"]).log_softmax(-1)
                wanted = targets[picked]
                action_loss = -(wanted * logp[:, place, answer["actions"]]).sum(-1).mean()
                format_logp = logp[:, answer["fixed"], torch.tensor(answer_ids)[answer["fixed"]]]
                loss = action_loss - recipe.format_weight * format_logp.sum(-1).mean()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
                if (step + 1) % 50 == 0:
                    entropy = -(wanted * wanted.clamp(min=1e-9).log()).sum(-1).mean()
                    log(
                        f"{name} {step + 1}/{steps}: loss {loss.item():.3f}, "
                        f"KL of the action {(action_loss - entropy).item():.3f}"
                    )

        phase(recipe.read_steps, recipe.lr, rewards, "read")
        packed = {}
        with torch.no_grad():
            for name, weight in _expert_matrices(model):
                blocks, scales = quantize_mxfp4(weight.transpose(1, 2))
                weight.copy_(dequantize_mxfp4(blocks, scales).transpose(1, 2))
                weight.requires_grad_(False)
                packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        soft = rewards.clamp(min=1e-30) ** recipe.sharpness
        soft /= soft.sum(-1, keepdim=True)
        phase(recipe.soften_steps, recipe.soften_lr, soft, "soften")

        model.eval()
        tensors = {
            name: tensor.detach().to(torch.bfloat16)
            for name, tensor in model.state_dict().items()
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        }
        tensors |= packed
        figures = _figures(model.to(torch.bfloat16), probe_ids, probe_rewards, answer)
    return tensors, tokenizer, figures


def write_tiny(
    out: Path,
    seed: int = 0,
    force: bool = False,
    recipe: Recipe | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, float]:
    """Train the tiny model and write its checkpoint to the directory `out`; returns the figures of `train_tiny`.

    The figures are kept in ``warmup.json`` beside the weights.

    Raises:
        ModelError: see `new_directory`; the target is refused before the training, not after it.
    """
    require_space(out, 64 * 2**20)
    with new_directory(out, force) as directory:
        tensors, tokenizer, figures = train_tiny(TINY, recipe, seed, log)
        write_weights(directory, tensor_specs(TINY), lambda spec: tensors[spec.name])
        token_ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        write_json(directory / "config.json", config_dict(TINY, token_ids))
        write_json(directory / "generation_config.json", generation_config_dict(token_ids))
        write_json(directory / "tokenizer_config.json", tokenizer_config_dict())
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(chat_template(*TINY_SYSTEM), encoding="utf-8")
        write_json(directory / "warmup.json", {"seed": seed, "recipe": asdict(recipe or Recipe()), **figures})
        check_checkpoint(directory)
    return figures


@cache
def recipe_hash() -> str:
    """Twelve hex digits that change with this file or make_dataset.py: everything the tiny model is made from."""
    digest = hashlib.sha256()
    for name in ("make_dataset.py", "make_model.py"):
        digest.update(Path(__file__).resolve().with_name(name).read_bytes())
    return digest.hexdigest()[:12]


def tiny_path(cache_dir: Path | None = None) -> Path:
    """Where `build_tiny` keeps the model: ``$XDG_CACHE_HOME/train_grpo/tiny-<hash>``, or under ``~/.cache``."""
    if cache_dir is None:
        # The XDG specification says to ignore a relative path.
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        cache_dir = (base if base.is_absolute() else Path.home() / ".cache") / "train_grpo"
    return Path(cache_dir) / f"tiny-{recipe_hash()}"


def build_tiny(
    cache_dir: Path | None = None, force: bool = False, log: Callable[[str], None] = lambda line: None
) -> Path:
    """The directory of the tiny model (seed 0); trains it on first use and reuses it afterwards.

    Built under a temporary name and renamed: an interrupted build leaves no model behind, and of two processes that
    build at once both get the one that was finished first.

    Args:
        cache_dir: instead of the user's cache directory.
        force: build anew.
        log: takes progress lines.

    Raises:
        ModelError: if the directory cannot be written; it says how to choose another.
    """
    path = tiny_path(cache_dir)
    if not force and _is_checkpoint(path):
        return path
    try:
        write_tiny(path, force=force, log=log)
    except (ModelError, OSError) as error:
        # The rename fails if another process was faster; its model is the same.
        if force or not _is_checkpoint(path):
            where = "XDG_CACHE_HOME=/another/folder keeps the tiny model elsewhere"
            raise ModelError(f"the tiny model cannot be made: {error}. {where}") from error
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make checkpoints in gpt-oss's exact format.",
        epilog="Examples and exit codes: see the top of this file.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    tiny = commands.add_parser("tiny", help="a trained toy model, a few hundred thousand parameters, under a minute")
    tiny.add_argument("--out", type=Path, help="directory to write (default: the user's cache directory)")
    tiny.add_argument("--seed", type=int, help="of the weights and the warm-up (default 0; another one needs --out)")
    tiny.add_argument("--force", action="store_true", help="replace what is there")

    full = commands.add_parser("full", help="gpt-oss-20b's shapes with random weights, 12.8 GiB")
    full.add_argument("--out", type=Path, required=True, help="directory to write")
    full.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json or tokenizer.json.xz to copy")
    full.add_argument("--no-tokenizer", action="store_true", help="write none; nothing can then render a prompt")
    full.add_argument("--device", default="cpu", help="where the noise is made: cpu (default), cuda, cuda:1, ...")
    full.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    full.add_argument("--layers", type=int, default=GPT_OSS_20B.layers, help="default 24, 0.45 GiB each")
    full.add_argument("--force", action="store_true", help="replace a checkpoint that is there")

    check = commands.add_parser("check", help="compare a checkpoint's tensors with what transformers expects")
    check.add_argument("directory", type=Path)

    args = parser.parse_args(argv)
    if args.command == "full" and (args.tokenizer is None) != args.no_tokenizer:
        parser.error("full needs --tokenizer DIR or --no-tokenizer, and not both")
    if args.command == "tiny" and args.seed not in (None, 0) and args.out is None:
        parser.error("the cache keeps the model of seed 0: give --out with another --seed")
    return args


def report(directory: Path) -> None:
    """Print the result of `check_checkpoint`."""
    found = check_checkpoint(directory)
    print(
        f"{directory}: {found['parameters']:,} parameters in {found['tensors']} tensors, {found['files']} file(s), "
        f"{found['bytes']:,} bytes; names, types and shapes are what transformers expects"
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    start = time.perf_counter()
    try:
        if args.command == "check":
            report(args.directory)
        elif args.command == "full":
            write_full(
                args.out, replace(GPT_OSS_20B, layers=args.layers), args.tokenizer, args.device, args.seed, args.force
            )
            report(args.out)
        else:
            if args.out is None:
                path = build_tiny(force=args.force, log=print)
            else:
                path = args.out
                write_tiny(path, args.seed or 0, args.force, log=print)
            report(path)
            figures = json.loads((path / "warmup.json").read_text(encoding="utf-8"))
            print(
                f"sampled at temperature 1: parse rate {figures['parse_rate']:.3f}, mean reward {figures['reward']:.3f}"
                f" (greedy {figures['greedy']:.3f}, random {figures['random']:.3f}, best constant "
                f"{figures['best_constant']:.3f}, oracle {figures['oracle']:.3f})"
            )
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
