# SPDX-License-Identifier: Apache-2.0
"""Makes checkpoints in gpt-oss's format: sizes, MXFP4, special tokens, config.json and the tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from grpo.model.write_checkpoint import BLOCK, MakeTensor, expected_tensors, write_json, write_tensors
from grpo.output.durable import read_json
from grpo.plan.hub import REAL_CONFIG, TINY_PATH

# Sizes of a gpt-oss by their names in config.json. The hidden and the intermediate size must be multiples of BLOCK.
Sizes = dict[str, int]
GPT_OSS_20B: Sizes = {name: size for name, size in REAL_CONFIG.items() if isinstance(size, int)}
GPT_OSS_120B: Sizes = GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128}
TINY: Sizes = {name: size for name, size in read_json(TINY_PATH / "config.json").items() if name in GPT_OSS_20B}

# MXFP4 holds four-bit floats (e2m1) in blocks of 32 that share a power-of-two scale. These are the magnitudes in the
# order of their codes; bit 3 of a code is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points between these. A tie goes to the even code: those at 0.25, 1.25, 2.5 and 5.0 round down, others up.
E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E8M0_BIAS = 127
E2M1_MAX_EXPONENT = 2  # 6.0 = 1.5 * 2**2


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize along the last dimension to MXFP4, by section 6.3 of the OCP Microscaling Formats specification 1.0.

    The scale of a block is 2 to the exponent of its largest magnitude, less 2; elements are rounded to nearest, ties to
    even, and saturate at 6 times the scale. Values that MXFP4 can represent come back exactly, signed zeros included.

    A float tensor (..., K) becomes the blocks, uint8 (..., K/32, 16), two codes to a byte, the element with the even
    index in the low four bits, and the scales, uint8 (..., K/32), exponents with a bias of 127 (e8m0)."""
    # float64 because 2**-128, a code of 0.5 under the smallest scale, is subnormal in float32 and may be flushed.
    values = weight.detach().to(torch.float64).unflatten(-1, (-1, BLOCK))
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


def quantize_experts(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Round a gpt-oss's experts to MXFP4 in place and freeze them; return their checkpoint tensors by name."""
    quantized: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # (E, in, out)
            blocks, scales = quantize_mxfp4(weight.transpose(1, 2))
            weight.requires_grad_(False).copy_(convert_moe_packed_tensors(blocks, scales))
            quantized |= {f"{name}_blocks": blocks.cpu(), f"{name}_scales": scales.cpu()}
    return quantized


# Harmony's special tokens.
SPECIAL_TOKENS = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
)  # fmt: skip
BOS, EOS, PAD = "<|startoftext|>", "<|return|>", "<|endoftext|>"
STOP_TOKENS = ("<|return|>", "<|endoftext|>", "<|call|>")  # the order of gpt-oss-20b's generation_config.json


def config_dict(sizes: Mapping[str, Any], token_ids: Mapping[str, int] | None = None) -> dict[str, Any]:
    """`config.json` of a gpt-oss of these `sizes`: data/tiny's, which has the keys and the spelling of
    openai/gpt-oss-20b. Even layers attend within the sliding window, odd ones to everything.

    `token_ids` are those of `SPECIAL_TOKENS`; without them all are 0, which is enough to count parameters."""
    token_ids = token_ids or dict.fromkeys(SPECIAL_TOKENS, 0)
    layers = range(sizes["num_hidden_layers"])
    return {
        **read_json(TINY_PATH / "config.json"),
        **sizes,
        "eos_token_id": token_ids[EOS],
        "experts_per_token": sizes["num_experts_per_tok"],
        "layer_types": ["full_attention" if n % 2 else "sliding_attention" for n in layers],
        "pad_token_id": token_ids[PAD],
    }


def write_checkpoint(directory: Path, sizes: Mapping[str, Any], make: MakeTensor, tokenizer: Tokenizer) -> None:
    """Fill `directory` with a checkpoint of these `sizes`. `make` supplies the tensors. The chat template is
    data/tiny's, as is all of config.json that `sizes` do not hold."""
    token_ids = special_token_ids(tokenizer)
    config = config_dict(sizes, token_ids)
    write_json(directory / "config.json", config)
    generation = {"do_sample": True, "eos_token_id": [token_ids[token] for token in STOP_TOKENS]}
    generation |= {"bos_token_id": token_ids[BOS], "pad_token_id": token_ids[PAD]}
    write_json(directory / "generation_config.json", generation)
    options: dict[str, Any] = {"padding_side": "left", "model_input_names": ["input_ids", "attention_mask"]}
    options |= {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "model_max_length": 131072}
    options["chat_template"] = (TINY_PATH / "chat_template.jinja").read_text(encoding="utf-8")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    fast.save_pretrained(directory)
    write_tensors(directory, expected_tensors(config), make)


def read_tokenizer(source: Path) -> Tokenizer:
    """The tokenizer of the folder `source`. Raises OSError where its tokenizer.json is missing."""
    return Tokenizer.from_buffer((source / "tokenizer.json").read_bytes())


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of `SPECIAL_TOKENS`. Raises KeyError for a tokenizer that lacks one."""
    ids = tokenizer.get_vocab()
    return {token: ids[token] for token in SPECIAL_TOKENS}
