# SPDX-License-Identifier: Apache-2.0
"""The tiny model with its experts packed or not."""

import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from grpo.model.load import load_model
from grpo.output.durable import read_json


def load(folder, experts="bf16"):
    return load_model(str(folder), read_json(folder / "config.json"), "eager", experts)


def stock_model(folder, **options):
    """transformers' own model in BF16, with MXFP4 experts dequantized."""
    options |= {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True), **options)
