# SPDX-License-Identifier: Apache-2.0
"""The tiny model with its experts packed or not."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from grpo.model.load import load_model


def config_of(tiny):
    return json.loads((tiny / "config.json").read_text(encoding="utf-8"))


def load(tiny, experts):
    return load_model(str(tiny), config_of(tiny), "eager", experts)


def stock_model(folder, **options):
    """transformers' own model in BF16, with MXFP4 experts dequantized."""
    options |= {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True), **options)
