# SPDX-License-Identifier: Apache-2.0
"""Weight sync: the trainer's adapter, as vLLM takes it, and the share of it that arrives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo.run.folder import ADAPTER


def lora_layers(policy: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """PEFT's name of every adapted linear layer -> the layer."""
    return {
        name: module
        for name, module in policy.named_modules()
        if "default" in getattr(module, "lora_A", {}) and hasattr(module, "get_base_layer")
    }


def factors(layer: torch.nn.Module, active: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """A (r, in) and scale * B (out, r) of an adapted layer, in float32; B is zero where the adapter is not `active`."""
    scale = layer.scaling["default"] if active else 0.0
    return layer.lora_A["default"].weight.detach().float(), layer.lora_B["default"].weight.detach().float() * scale


def vllm_place(name: str, rows: int) -> tuple[str, slice]:
    """The weight in which vLLM's GptOss keeps the projection `name`, which has so many rows, and the rows in there: q, k, v
    are those of `attn.qkv_proj`, in that order (vllm/model_executor/models/gpt_oss.py)."""
    stem, _, kind = name.removeprefix("base_model.model.").rpartition(".")
    # Query rows first, then as many key rows as value rows.
    parts = {"q_proj": slice(rows), "k_proj": slice(-2 * rows, -rows), "v_proj": slice(-rows, None)}
    module = f"{stem.replace('.self_attn', '.attn')}.{'qkv_proj' if kind in parts else kind}"
    return f"{module}.weight", parts.get(kind, slice(None))


def write_adapter(policy: torch.nn.Module, folder: Path, rank: int, active: bool = True) -> None:
    """Write the adapter as PEFT would, A (r, in) and B (out, r) in BF16, with alpha = r because B carries the scale,
    multiplied in float32 (one rounding). B is zero where the adapter is not `active`."""
    tensors = {}
    for name, layer in lora_layers(policy).items():
        for kind, weight in zip("AB", factors(layer, active), strict=True):
            tensors[f"{name}.lora_{kind}.weight"] = weight.to("cpu", torch.bfloat16).contiguous()
    modules = sorted({name.removesuffix(".base_layer").split(".")[-1] for name in lora_layers(policy)})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / ADAPTER)


def rounded_at_random(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Float32 `values` (finite) as BF16, up or down with such odds that the mean is the value. What BF16 holds stays as it
    is. A float's bits count up in size whatever its sign: 16 random ones are added to the half that BF16 leaves out."""
    noise = torch.randint(1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    return noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32).bfloat16()


def gained_along(a: torch.Tensor, b: torch.Tensor, gained: torch.Tensor) -> torch.Tensor:
    """<G, U>, <U, U> and <G, G> (3,) of what a weight has gained, G (out, in), and its update U = b (out, r) @ a (r, in): all
    in float32, <U, U> by r x r products alone."""
    its = torch.linalg.vector_norm(gained).square()
    return torch.stack((((b.T @ gained) * a).sum(), ((b.T @ b) * (a @ a.T)).sum(), its))


def share_of(sums: Sequence[torch.Tensor], elements: int) -> tuple[float, float] | None:
    """The share of an update that so many elements of weights have gained, and its standard error, by `gained_along` of every
    weight: the sum of <G, U> by that of <U, U>. None where there is no update."""
    both, asked, its = torch.stack(tuple(sums)).sum(0).tolist()
    if not asked:
        return None
    # What was gained beside the update, by element: of rounding errors that know nothing of each other.
    return both / asked, (max(its - 2 * both + asked, 0.0) / elements / asked) ** 0.5


@torch.no_grad()
def sync(model: torch.nn.Module, policy: torch.nn.Module, seed: int, active: bool = True) -> tuple[float, float] | None:
    """Push W + scale * B @ A of every adapted layer into the weights of vLLM's `model`, rounded at random where these are in
    BF16: rounded to the nearest, most of a small update would be lost. `seed` is that of the rounding.

    Returns the share of the update that these weights hold then, and the standard error that the rounding gives it; None where
    the adapter is zero or not `active`. The base is only read: PEFT's merge_adapter works in place and drifts
    (https://github.com/huggingface/trl/issues/6688). Raises RuntimeError, as torch does, for a weight of another shape.
    """
    # Not the seed itself: sampling starts with it, and would draw the very same numbers.
    held, sums, elements = {name: weight.data for name, weight in model.named_parameters()}, [], 0
    generator = torch.Generator(next(iter(held.values())).device).manual_seed(seed + 1)
    for name, layer in lora_layers(policy).items():
        (a, b), weight = factors(layer, active), layer.get_base_layer().weight.float()
        place, rows = vllm_place(name, len(b))
        target, merged = held[place][rows], torch.addmm(weight, b, a)
        target.copy_(rounded_at_random(merged, generator) if target.dtype == torch.bfloat16 else merged)
        if active:
            sums.append(gained_along(a, b, target.float() - weight))
            elements += weight.numel()
    return share_of(sums, elements) if active else None
