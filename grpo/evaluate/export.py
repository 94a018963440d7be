# SPDX-License-Identifier: Apache-2.0
"""Merges an adapter into its base model, to a checkpoint that loads without this project; for scripts/export.py."""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from grpo.common import InputError, Problems
from grpo.evaluate.model_card import copy_small, model_readme
from grpo.evaluate.saved_adapter import commit_of_run, load_run_settings
from grpo.model.experts import dequantize_mxfp4
from grpo.model.write_checkpoint import expected_tensors, new_directory, write_json, write_tensors
from grpo.output.durable import sync_files, write_text
from grpo.output.layout import ADAPTER
from grpo.plan.hub import ModelFiles, fetch_weights, find_model, has_mxfp4
from grpo.plan.targets import checkpoint_weight
from grpo.plan.tensors import WEIGHTS_INDEX, weight_files
from grpo.preflight.adapter import NAME_AN_ADAPTER, read_adapter, tensor_shapes
from grpo.rollout.weight_sync import update_products, update_share
from grpo.settings.table import Settings

CONFIG = "config.json"


class Merged:
    """The tensors of the checkpoint in `base`, merged with an adapter: W + scale * B @ A, in float32, rounded once to
    the nearest BF16. Memory holds one tensor and the adapter. Raises InputError if the adapter is not finite."""

    def __init__(self, base: Path, adapter: Path, scale: float) -> None:
        self.base = base
        self.shards = {name: tensor_shapes(base / name) for name in weight_files(base)}
        self.shard_of = {name: base / shard for shard, names in self.shards.items() for name in names}
        weights = load_file(adapter / ADAPTER)
        self.factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, a in weights.items():
            if not torch.isfinite(a).all():
                raise InputError(f"{adapter / ADAPTER}: {name} holds NaN or infinity. Export another checkpoint")
            if name.endswith(".lora_A.weight"):
                b = weights[name.replace(".lora_A.", ".lora_B.")]
                self.factors[checkpoint_weight(name)] = (a.float(), b.float() * scale)
        self.sums: list[torch.Tensor] = []  # of the merged matrices, for `share`
        self.elements = 0

    def stored(self, name: str) -> torch.Tensor:
        """The base checkpoint's own tensor, which must not be written to."""
        with safe_open(self.shard_of[name], "pt") as file:
            return file.get_tensor(name)

    def add(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Merge the adapter into `weight`, (out, in) or for experts (E, in, out), in place, and return it."""
        if name not in self.factors:
            return weight
        (a, b), matrices = self.factors[name], weight.mT if weight.dim() == 3 else weight[None]
        # The rows of A are sorted by expert; the columns of B alternate between experts.
        every_a, every_b = a.view(len(matrices), -1, a.shape[1]), b.view(len(b), -1, len(matrices)).unbind(2)
        for matrix, own_a, own_b in zip(matrices, every_a, every_b, strict=True):
            wide = matrix.float()
            matrix.copy_(torch.addmm(wide, own_b, own_a))
            self.sums.append(update_products(own_a, own_b, matrix.float() - wide))
        self.elements += weight.numel()
        return weight

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in the base's own format, merged if the adapter changes it."""
        weight = self.stored(name)  # a memory map of the base's file, which must not change
        return self.add(name, weight.clone()) if name in self.factors else weight

    def dequantized(self, name: str) -> torch.Tensor:
        """The merged tensor in BF16. MXFP4 experts (E, in, out) are dequantized exactly before they are merged, one by
        one, because all at once would take four times their size on a CPU."""
        if f"{name}_blocks" not in self.shard_of:
            return self.tensor(name)
        device = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU takes a minute for a layer of gpt-oss-20b
        every = zip(*(self.stored(f"{name}_{part}").split(1) for part in ("blocks", "scales")), strict=True)
        wide = [dequantize_mxfp4(blocks.to(device), scales.to(device)).cpu() for blocks, scales in every]
        return self.add(name, torch.cat(wide))

    def share(self) -> float | None:
        """The share of the adapter's update that survived rounding until now; None if the adapter is zero."""
        share = update_share(self.sums, self.elements)
        return share[0] if share else None


def write_mxfp4(merged: Merged, folder: Path) -> None:
    """Write the base's own files, shard by shard, in which only the tensors that the adapter changes differ."""
    for shard, names in merged.shards.items():
        save_file({name: merged.tensor(name) for name in names}, folder / shard, {"format": "pt"})
    for name in (CONFIG, WEIGHTS_INDEX):
        if (merged.base / name).is_file():
            shutil.copyfile(merged.base / name, folder / name)


def write_bf16(merged: Merged, files: ModelFiles, folder: Path) -> None:
    """Write every tensor as transformers' own model holds it, in new shards."""
    config = {name: value for name, value in files.config.items() if name != "quantization_config"}
    write_tensors(folder, expected_tensors(config), lambda name, like: merged.dequantized(name))
    write_json(folder / CONFIG, config)


def prepare(options: argparse.Namespace) -> tuple[Settings, ModelFiles, Path]:
    """(settings of the adapter's run, its base model's small files, their folder) by `options`. Raises InputError."""
    s, problems = load_run_settings(options.adapter, MODEL_ID=options.model)
    files = None if problems else find_model(s.MODEL_ID, problems, commit_of_run(options.adapter, s.MODEL_ID))
    if files is None or files.folder is None or problems:
        raise InputError(*dict.fromkeys(problems))
    return s, files, files.folder


def check_merge(options: argparse.Namespace, files: ModelFiles) -> float:
    """The LoRA scale of the adapter. Raises InputError if it cannot be merged into this model in the format of --to."""
    problems, scale = Problems(), 0.0
    if options.to != "bf16" and not has_mxfp4(files.config):
        problems.add(f"--to {options.to}", "the base model's experts are not in MXFP4", "Use --to bf16")
    where = str(options.adapter)
    try:
        experts = [name for name in tensor_shapes(options.adapter / ADAPTER) if ".self_attn." not in name]
        if options.to != "bf16" and experts:
            # MXFP4's values lie a quarter or more apart: rounding to them would erase nearly all of the update.
            fault = f"it changes more than the attention ({experts[0]}), and --to {options.to} keeps the experts' MXFP4"
            problems.add(where, fault, "Use --to bf16")
        else:
            lora = read_adapter(options.adapter, files.config)
            scale = lora["LORA_ALPHA"] / lora["LORA_R"]
    except (OSError, InputError) as error:
        problems.add(where, str(error), NAME_AN_ADAPTER)
    if problems:
        raise InputError(*problems)
    return scale


def export(options: argparse.Namespace) -> float | None:
    """Write the merged model to --out, whole or not at all; returns the share of the adapter's update that survived
    rounding. Raises InputError, and SafetensorError for a damaged base."""
    s, files, base = prepare(options)
    scale = check_merge(options, files)
    if problem := fetch_weights(s.MODEL_ID, files):
        raise InputError(problem)
    merged = Merged(base, options.adapter, scale)
    with new_directory(options.out) as folder:
        copy_small(base, folder)
        if options.to == "mxfp4":
            write_mxfp4(merged, folder)
        else:
            write_bf16(merged, files, folder)
        card = model_readme(s, options.adapter, options.push or str(options.out.resolve()), options.to, merged.share())
        write_text(folder / "README.md", card)
        sync_files(folder)
    return merged.share()
