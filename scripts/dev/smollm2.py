# SPDX-License-Identifier: Apache-2.0
"""Rewrites SmolLM2-135M-Instruct into gpt-oss's format: a trained model that reads English and is small. For verl it is
also written as the Llama that it is.

Llama's block becomes gpt-oss's without a change of what it computes, but for two things. gpt-oss clamps the gate at
`swiglu_limit`, and its experts are in MXFP4. One MXFP4 term a weight makes the model answer nonsense, so each weight
W is the sum of two, Q(W) and Q(W - Q(W)): the residual stream is doubled to [x | x], which leaves an RMS norm as it is,
and the experts multiply one half of it by each term. Attention and head read the first half only."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from torch.nn import Module, functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from grpo.common import InputError
from grpo.model import write_checkpoint as checkpoint
from grpo.model.experts import GATE_ALPHA, GATE_LIMIT
from scripts.dev import gptoss_format as gptoss

EXPERTS = 4  # All of them are chosen for every token, each with a weight of 1/4.
# SmolLM2 has three query heads to a key head. A fourth, whose output nothing reads, makes the group a power of two.
QUERY_GROUP = 4
# gpt-oss computes gate * sigmoid(GATE_ALPHA * gate) * (up + 1), with gate and up clamped to GATE_LIMIT. This is what a
# layer's `up` may reach in `CALIBRATION_TEXTS`; other texts have the rest up to GATE_LIMIT + 1.
LARGEST_UP = 5.5
NO_SINK = -100.0  # A head's sink that takes no share of the attention.
# Tokens of SmolLM2 that Harmony's take over. Nothing in its training used those from `<repo_name>` on.
RENAMED = {
    "<|im_start|>": "<|start|>", "<|im_end|>": "<|end|>", "<repo_name>": "<|startoftext|>",
    "<file_sep>": "<|return|>", "<gh_stars>": "<|channel|>", "<issue_start>": "<|message|>",
    "<issue_comment>": "<|constrain|>", "<issue_closed>": "<|call|>",
}  # fmt: skip
# Each token that Harmony adds begins with the row of an unused one and a random part of this norm (a row's is 3.2 on
# average): an adapter on attention could not part tokens that have the same row.
OWN_PART = 2.5
# These begin with the row of a token of similar meaning instead; the number is the norm of their own part. The model
# answers after `<|message|>` as it did after ChatML's line feed, and ends an answer with `<|return|>`.
EMBEDDED_LIKE = {"<|message|>": ("\u010a", 2.5), "<|return|>": ("<|end|>", 2.5)}  # A line feed, as BPE spells bytes.
PREDICTED_LIKE = {"<|return|>": ("<|end|>", 0.5)}
CALIBRATION_TEXTS = (
    "<|start|>user\nA shop sells pens for 3 dollars each. How much do 14 pens cost?<|end|>\n"
    "<|start|>assistant\nEach pen costs 3 dollars, so 14 pens cost 14 * 3 = 42 dollars.<|end|>\n",
    "The storage holds 20 of 300 kWh at 09:00. The cooling load is 55 kW, electricity has 0.45 kg of CO2 per kWh, and "
    "the chiller can run at none, half or all of its power. At night the grid is cleaner, so it pays to charge then.",
    "Once upon a time there was a small village by the sea. Its people built boats of oak, and every morning they went "
    "out to fish. One day a storm came, and nobody knew whether the boats would return before the evening.",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([1, 2, 3]))\n",
)


def read_source(source: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model in float32 and its tokenizer, from a folder of the Hub's form or from a GGUF file.

    Raises InputError for another model, and where the package `gguf` is needed and missing."""
    folder, options = (source.parent, {"gguf_file": source.name}) if source.is_file() else (source, {})
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
    except ImportError as error:
        raise InputError(f"{source}: {error}. Install what reads GGUF: pip install gguf==0.19.0") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{source}: no SmolLM2-135M-Instruct can be read ({error})") from None
    if not isinstance(model, LlamaForCausalLM) or model.config.hidden_size % 32 or "<|im_end|>" not in tokenizer.vocab:
        raise InputError(f"{source}: this is a model of type {model.config.model_type}, not SmolLM2-135M-Instruct")
    return model.eval(), tokenizer


def own_tokenizer(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """SmolLM2's tokenizer, its special tokens renamed by `names`. It is made anew from the vocabulary and the merges,
    because the one that transformers makes of a GGUF does not split numbers into digits."""
    bpe = json.loads(tokenizer.to_str())["model"]
    vocabulary = {names.get(token, token): number for token, number in bpe["vocab"].items()}
    renamed = Tokenizer(BPE(vocabulary, [tuple(pair) for pair in bpe["merges"]]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    renamed.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    renamed.decoder = decoders.ByteLevel()
    renamed.add_special_tokens(["<|endoftext|>", *names.values()])
    return renamed


def epsilon(config: LlamaConfig) -> float:
    """The norms' epsilon as it was meant: a GGUF file holds 1e-5 as a float32."""
    return float(f"{config.rms_norm_eps:.6g}")


def config_values(config: LlamaConfig) -> dict[str, Any]:
    """What config.json of the rewritten model has in place of data/tiny's values."""
    length, rope_theta = config.max_position_embeddings, config.rope_parameters["rope_theta"]  # type: ignore[index]
    assert config.num_key_value_heads
    # vLLM gives every even layer the sliding window, whatever layer_types says; as long as the context it cuts nothing.
    # vLLM reads the factor of YaRN, which with 1 is plain RoPE.
    rope = {"rope_type": "yarn", "factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {
        "hidden_size": 2 * config.hidden_size,
        "intermediate_size": 2 * config.intermediate_size // EXPERTS,
        "num_hidden_layers": config.num_hidden_layers,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_key_value_heads * QUERY_GROUP,
        "num_key_value_heads": config.num_key_value_heads,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "vocab_size": config.vocab_size,
        "sliding_window": length,
        "max_position_embeddings": length,
        "initial_context_length": length,
        "rope_theta": rope_theta,
        "rope_scaling": rope | {"original_max_position_embeddings": length},
        "swiglu_limit": GATE_LIMIT,
        "rms_norm_eps": epsilon(config),
    }


@torch.no_grad()
def largest_ups(model: LlamaForCausalLM, tokenizer: Tokenizer) -> list[float]:
    """The largest magnitude of each layer's `up` in `CALIBRATION_TEXTS`."""
    largest = [0.0] * len(model.model.layers)

    def watch(layer: int) -> Callable[[Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: Module, inputs: tuple[Tensor, ...], up: Tensor) -> None:
            largest[layer] = max(largest[layer], up.abs().max().item())

        return hook

    hooks = [layer.mlp.up_proj.register_forward_hook(watch(n)) for n, layer in enumerate(model.model.layers)]
    for text in CALIBRATION_TEXTS:
        model(input_ids=torch.tensor([tokenizer.encode(text).ids]))
    for hook in hooks:
        hook.remove()
    return largest


def two_terms(weight: Tensor) -> Tensor:
    """[Q(W) | Q(W - Q(W))] (N, 2K) of a weight (N, K), in values that MXFP4 holds exactly."""

    def nearest(values: Tensor) -> Tensor:
        blocks, scales = gptoss.quantize_mxfp4(values)
        return convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T

    first = nearest(weight)
    return torch.cat([first, nearest(weight - first)], -1)


def expert_tensors(mlp: LlamaMLP, largest_up: float) -> dict[str, Tensor]:
    """gpt-oss's expert tensors by their names in a checkpoint's layer, for a Llama's MLP that is cut into `EXPERTS`.

    silu(g) * u = GATE_ALPHA * glu(g / GATE_ALPHA) * u, and the `+ 1` of gpt-oss's `up + 1` is taken back by a bias of
    -1. With `scale` the up projection stays within the clamp; the down projection undoes it, and the routing weight of
    1/4."""
    scale = min(1.0, LARGEST_UP / largest_up)
    gate, up = (two_terms(w.detach()) for w in (mlp.gate_proj.weight / GATE_ALPHA, mlp.up_proj.weight * scale))
    pairs = torch.stack([gate, up], 1)  # (I, 2, 2H): the rows of gate_up_proj alternate
    per_expert = pairs.unflatten(0, (EXPERTS, -1)).repeat(1, 2, 1, 1)  # Each hidden unit twice, for down's two terms.
    gate_up = per_expert.flatten(1, 2)
    down = mlp.down_proj.weight.detach() * (GATE_ALPHA * EXPERTS / scale)
    down = torch.stack([two_terms(part) for part in down.chunk(EXPERTS, dim=1)]).repeat(1, 2, 1)
    tensors = {"gate_up_proj_bias": torch.tensor([0.0, -1.0]).repeat(EXPERTS, gate_up.shape[1] // 2)}
    tensors["down_proj_bias"] = torch.zeros(EXPERTS, down.shape[1])
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = gptoss.quantize_mxfp4(weight)
    return tensors


def attention_tensors(attention: LlamaAttention, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """gpt-oss's attention tensors by their names in a checkpoint's layer: query heads of zeros fill each group up."""
    keys, head = sizes["num_key_value_heads"], sizes["head_dim"]
    q = attention.q_proj.weight.detach().unflatten(0, (keys, -1, head))  # (keys, queries of a key, head, H)
    missing = QUERY_GROUP - q.shape[1]
    q = functional.pad(q, (0, 0, 0, 0, 0, missing)).flatten(0, 2)
    o = attention.o_proj.weight.detach().unflatten(1, (keys, -1, head))  # (H, keys, queries of a key, head)
    o = functional.pad(o, (0, 0, 0, missing)).flatten(1)
    tensors = {"o_proj.weight": torch.cat([o, o]), "sinks": torch.full((keys * QUERY_GROUP,), NO_SINK)}
    projections = {"q_proj": q, "k_proj": attention.k_proj.weight.detach(), "v_proj": attention.v_proj.weight.detach()}
    for name, weight in projections.items():
        tensors[f"{name}.weight"] = functional.pad(weight, (0, weight.shape[1]))  # It reads the first half.
        tensors[f"{name}.bias"] = torch.zeros(len(weight))
    return tensors | {"o_proj.bias": torch.zeros(2 * len(o))}


def token_rows(rows: Tensor, vocabulary: Mapping[str, int], like: Mapping[str, tuple[str, float]]) -> Tensor:
    """The `rows` (V, H) of embedding or head with those of the tokens that Harmony adds, which ChatML has not."""
    rows, generator = rows.clone(), torch.Generator().manual_seed(0)
    unused = rows[vocabulary["<jupyter_text>"]].clone()
    for name in (new for old, new in RENAMED.items() if not old.startswith("<|im_")):
        token, norm = like.get(name, ("", OWN_PART))
        own = torch.randn(rows.shape[1], generator=generator)
        rows[vocabulary[name]] = (rows[vocabulary[token]] if token else unused) + own * (norm / own.norm())
    return rows


def model_tensors(
    model: LlamaForCausalLM, sizes: Mapping[str, int], tokenizer: Tokenizer
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the rewritten checkpoint with its name."""

    def twice(norm: LlamaRMSNorm) -> Tensor:
        return norm.weight.detach().repeat(2)

    vocabulary = tokenizer.get_vocab()
    embeddings = token_rows(model.model.embed_tokens.weight.detach(), vocabulary, EMBEDDED_LIKE)
    head = token_rows(model.lm_head.weight.detach(), vocabulary, PREDICTED_LIKE)
    yield "model.embed_tokens.weight", embeddings.repeat(1, 2)
    yield "lm_head.weight", functional.pad(head, (0, head.shape[1]))  # It reads the first half.
    yield "model.norm.weight", twice(model.model.norm)
    for number, (layer, largest_up) in enumerate(zip(model.model.layers, largest_ups(model, tokenizer), strict=True)):
        prefix = f"model.layers.{number}"
        yield f"{prefix}.input_layernorm.weight", twice(layer.input_layernorm)
        yield f"{prefix}.post_attention_layernorm.weight", twice(layer.post_attention_layernorm)
        yield f"{prefix}.mlp.router.weight", torch.zeros(EXPERTS, sizes["hidden_size"])
        yield f"{prefix}.mlp.router.bias", torch.zeros(EXPERTS)
        for name, tensor in attention_tensors(layer.self_attn, sizes).items():
            yield f"{prefix}.self_attn.{name}", tensor
        for name, tensor in expert_tensors(layer.mlp, largest_up).items():
            yield f"{prefix}.mlp.experts.{name}", tensor


def write_smollm2(out: Path, source: Path) -> None:
    """Write the model in `source`, a folder or a GGUF file, to the folder `out` in gpt-oss's format.

    Raises InputError as `read_source` and `new_directory` do."""
    with checkpoint.new_directory(out) as directory:
        model, tokenizer = read_source(source)
        values, renamed = config_values(model.config), own_tokenizer(tokenizer.backend_tokenizer, RENAMED)
        tensors = dict(model_tensors(model, values, renamed))
        gptoss.write_checkpoint(directory, values, lambda name, like: tensors[name].to(like.dtype), renamed)


def write_llama(out: Path, source: Path) -> None:
    """Write the model in `source`, a folder or a GGUF file, to the folder `out` as the Hub has it: a Llama in BF16.

    Raises InputError as `read_source` and `new_directory` do."""
    with checkpoint.new_directory(out) as directory:
        model, tokenizer = read_source(source)
        end = "<|im_end|>"  # A GGUF file names the token that begins a message here, at which no answer ends.
        own = own_tokenizer(tokenizer.backend_tokenizer, {token: token for token in RENAMED})
        fast = PreTrainedTokenizerFast(
            tokenizer_object=own, bos_token="<|im_start|>", eos_token=end, pad_token=end, unk_token="<|endoftext|>",
            chat_template=tokenizer.chat_template, model_max_length=model.config.max_position_embeddings,
        )  # fmt: skip
        model.config.rms_norm_eps = epsilon(model.config)
        ends = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id}
        model.config.update(ends)
        model.generation_config.update(**ends, bos_token_id=fast.bos_token_id)
        model.bfloat16().save_pretrained(directory)
        fast.save_pretrained(directory)
