# SPDX-License-Identifier: Apache-2.0
"""A small Llama of random weights with a real tokenizer, to try verl without a download. It answers nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo.model.checkpoint import read_tokenizer
from grpo.run.durable import read_json

# For a tokenizer without a template of its own.
CHAT = (
    "{% for message in messages %}{{ message.role + ':\\n' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def write_llama(out: Path, tokenizer: Path, hidden: int, layers: int) -> int:
    """Writes a Llama of `layers` layers and width `hidden` in BF16 to the folder `out`, with the tokenizer in the folder
    `tokenizer` (tokenizer.json or .json.xz, tokenizer_config.json, perhaps chat_template.jinja); returns its parameters.
    Raises ModelError or OSError for a tokenizer that cannot be read."""
    told = read_json(tokenizer / "tokenizer_config.json")
    names = ("bos_token", "eos_token", "pad_token")
    words = PreTrainedTokenizerFast(
        tokenizer_object=read_tokenizer(tokenizer), **{name: told[name] for name in names if told.get(name)}
    )
    words.pad_token = words.pad_token or words.eos_token
    words.chat_template = told.get("chat_template") or CHAT
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=8192,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(out)
    words.save_pretrained(out)
    if (own := tokenizer / "chat_template.jinja").exists():
        shutil.copyfile(own, out / own.name)
    return model.num_parameters()
