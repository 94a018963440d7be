# SPDX-License-Identifier: Apache-2.0
"""The weight sync: passes the trainer's adapter to vLLM, and measures the share of it that arrives."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import save_file
from torch.nn import Module

from grpo.model.expert_lora import stored_factors
from grpo.output.layout import ADAPTER, ADAPTER_CONFIG


def lora_layers(policy: Module) -> dict[str, Module]:
    """Maps PEFT's name of every adapted layer to the layer."""
    modules: Iterator[tuple[str, Module]] = policy.named_modules()
    return {name: layer for name, layer in modules if isinstance(layer, LoraLayer) and "default" in layer.lora_A}


def vllm_weight(name: str, rows: int) -> tuple[str, slice]:
    """(name of the weight of vLLM's GptOss that contains the projection `name`, the slice of its rows that this takes).
    The projection has `rows` rows. q, k and v are parts of `attn.qkv_proj`, in that order
    (vllm/model_executor/models/gpt_oss.py)."""
    stem, _, kind = name.removeprefix("base_model.model.").rpartition(".")
    # Query rows come first, then as many key rows as value rows.
    parts = {"q_proj": slice(rows), "k_proj": slice(-2 * rows, -rows), "v_proj": slice(-rows, None)}
    module = f"{stem.replace('.self_attn', '.attn')}.{'qkv_proj' if kind in parts else kind}"
    return f"{module}.weight", parts.get(kind, slice(None))


@torch.no_grad()
def write_adapter(policy: Module, folder: Path, rank: int, active: bool = True) -> None:
    """Writes the adapter as PEFT would, A (r, in) and B (out, r) in BF16, but with alpha = r: B contains the scale,
    multiplied in float32 and rounded once. B is zero where the adapter is not `active`."""
    tensors, layers = {}, lora_layers(policy)
    for name, layer in layers.items():
        for kind, weight in zip("AB", stored_factors(layer, active), strict=True):
            tensors[f"{name}.lora_{kind}.weight"] = weight.to("cpu", torch.bfloat16).contiguous()
    modules = sorted({name.removesuffix(".base_layer").split(".")[-1] for name in layers})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / ADAPTER)


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Finite float32 `values` as BF16, rounded up or down such that the expectation is the value; values that BF16 can
    represent are unchanged. The bits of a float, without its sign, count up with its size, so 16 random bits are added
    to those that BF16 cuts off."""
    noise = torch.randint(1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    return noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32).bfloat16()


def update_products(a: torch.Tensor, b: torch.Tensor, gained: torch.Tensor) -> torch.Tensor:
    """<G, U>, <U, U> and <G, G> (3,) of the change G (out, in) of a weight and its update U = b (out, r) @ a (r, in):
    all in float32. U is never computed."""
    squared = torch.linalg.vector_norm(gained).square()
    return torch.stack((((b.T @ gained) * a).sum(), ((b.T @ b) * (a @ a.T)).sum(), squared))


def update_share(sums: Sequence[torch.Tensor], elements: int) -> tuple[float, float] | None:
    """(share of an update that arrived in the weights, its standard error), from `update_products` of every weight and
    their number of `elements`. The share is the sum of <G, U> divided by that of <U, U>; None without an update."""
    along, update, change = torch.stack(tuple(sums)).sum(0).tolist()
    if not update:
        return None
    # The part of the change beside the update consists of rounding errors that are independent of each other.
    return along / update, (max(change - 2 * along + update, 0.0) / elements / update) ** 0.5


@torch.no_grad()
def sync_merged_weights(model: Module, policy: Module, seed: int, active: bool = True) -> tuple[float, float] | None:
    """Pushes W + scale * B @ A of every adapted layer into the weights of vLLM's `model`. Weights in BF16 are rounded
    stochastically, by `seed`: rounding to the nearest would lose most of a small update.

    Returns the share of the update that the weights then contain, and the standard error that the rounding gives it;
    None if the adapter is zero or not `active`. The base is only read: PEFT's merge_adapter works in place and
    drifts (https://github.com/huggingface/trl/issues/6688). Raises RuntimeError for a weight of another shape."""
    targets, sums, elements = {name: weight.data for name, weight in model.named_parameters()}, [], 0
    # The rounding takes another seed than sampling, which would otherwise draw the very same numbers.
    generator = torch.Generator(next(iter(targets.values())).device).manual_seed(seed + 1)
    for name, layer in lora_layers(policy).items():
        (a, b), weight = stored_factors(layer, active), layer.get_parameter("base_layer.weight").float()
        target_name, rows = vllm_weight(name, len(b))
        target, merged = targets[target_name][rows], torch.addmm(weight, b, a)
        target.copy_(round_stochastically(merged, generator) if target.dtype == torch.bfloat16 else merged)
        if active:
            sums.append(update_products(a, b, target.float() - weight))
            elements += weight.numel()
    return update_share(sums, elements) if active else None
