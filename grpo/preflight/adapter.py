# SPDX-License-Identifier: Apache-2.0
"""The shape of the adapter: as the settings have it, or as one has it that the run starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.plan.hub import read_json
from grpo.plan.targets import UNKNOWN_LAYERS, canonical, expected_shapes, matched, peft_targets, place_of
from grpo.run.best import adapter_fault
from grpo.run.durable import file_sha256
from grpo.run.folder import ADAPTER, RunState
from grpo.settings import MOST_FLOAT, MOST_WHOLE, Problems, Settings, described, show

CONFIG = "adapter_config.json"
WHICH = "Name the folder of an adapter: a run's, its best/, a checkpoint, or what scripts/sft.py wrote"


def lora_options(s: Settings) -> dict[str, Any]:
    """Arguments of PEFT's LoraConfig."""
    options = {"r": s.LORA_R, "lora_alpha": s.LORA_ALPHA, "lora_dropout": s.LORA_DROPOUT, "task_type": "CAUSAL_LM"}
    return options | peft_targets(s.LORA_TARGETS)


def missing_files(folder: Path) -> list[str]:
    """The files of an adapter that are not in `folder`."""
    return [name for name in (CONFIG, ADAPTER) if not (folder / name).is_file()]


def on_experts(folder: Path) -> bool:
    """Whether the adapter in `folder` is on experts, alone or among others."""
    return bool(read_json(folder / CONFIG).get("target_parameters"))


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Shape of every tensor by name, from the header of a safetensors file. Raises OSError, and ValueError for what is
    none."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"{path.name} is cut off or no safetensors file")
        try:
            header = json.loads(file.read(size))
            return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path.name} is damaged or no safetensors file ({described(error)})") from None


def read_adapter(folder: Path, model: Mapping[str, Any] | None) -> dict[str, Any]:
    """LORA_R, LORA_ALPHA and LORA_TARGETS of the adapter in `folder`. Raises OSError, and ValueError with a sentence where
    it cannot be read, or is not one for the model with this config.json (None: unknown)."""
    config, found = read_json(folder / CONFIG), tensor_shapes(folder / ADAPTER)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    whole = type(rank) is int and 0 < rank <= MOST_WHOLE and isinstance(alpha, (int, float)) and 0 < alpha <= MOST_FLOAT
    if config.get("peft_type") != "LORA" or not whole:
        raise ValueError(f"{CONFIG} is not that of a LoRA adapter")
    for name in ("use_rslora", "alpha_pattern"):  # what else there is shows in the tensors
        if config.get(name):
            raise ValueError(
                f"it was made with PEFT's {name}, and this program scales all modules by LORA_ALPHA / LORA_R"
            )
    places = {place for name in found if (place := place_of(name))}
    layers = model["num_hidden_layers"] if model else 1 + max((layer for layer, _ in places), default=0)
    chosen = canonical(places, layers)
    expected = expected_shapes(model, rank, chosen) if model else found
    for name in [*found, *expected]:
        if found.get(name) != expected.get(name):
            theirs, ours = (str(shapes.get(name, "not there")) for shapes in (found, expected))
            raise ValueError(f"it is no LoRA of rank {rank} for this model: {name} is {theirs} in it, expected {ours}")
    return {"LORA_R": rank, "LORA_ALPHA": float(alpha), "LORA_TARGETS": chosen}


@dataclass(frozen=True)
class StartAdapter:
    """What INIT_ADAPTER brings: rank, alpha and targets by the name of the setting, and the SHA-256 of its weights."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None  # None: the run starts from a fresh adapter


def read_start_adapter(
    settings: Settings, sources: Mapping[str, str], model: Mapping[str, Any] | None, problems: Problems
) -> StartAdapter:
    """The adapter that INIT_ADAPTER names, given where the settings came from. A problem is one that cannot be used,
    and a setting of the user's that says something else."""
    folder, where = Path(settings.INIT_ADAPTER).expanduser(), f"INIT_ADAPTER={settings.INIT_ADAPTER}"
    if not settings.INIT_ADAPTER:
        return StartAdapter()
    if missing := missing_files(folder):
        problems.add(where, f"{' and '.join(missing)} not found there", WHICH)
        return StartAdapter()
    try:
        if fault := adapter_fault(folder):
            raise ValueError(fault)
        own = read_adapter(folder, model)
        digest = file_sha256(folder / ADAPTER)
    except (OSError, ValueError) as error:
        problems.add(where, str(error), WHICH)
        return StartAdapter()
    layers = model["num_hidden_layers"] if model else UNKNOWN_LAYERS
    for name, value in own.items():
        mine = getattr(settings, name)
        if sources[name] != "environment":
            continue
        if matched(mine, layers) != matched(value, layers) if name == "LORA_TARGETS" else mine != value:
            what = f"it was set to {show(mine)}, and the adapter in {settings.INIT_ADAPTER} has {show(value)}"
            problems.add(name, what, f"Unset it (the adapter's own is taken), or set {name}={show(value)}")
    return StartAdapter(own, digest)


def check_start(settings: Settings, run: RunState, digest: str | None, problems: Problems) -> None:
    """A resumed run began with these very weights: its name may hold others by now."""
    told = any(problem.startswith("INIT_ADAPTER") for problem in problems)
    if run.choices and not told and run.choices.get("init_adapter") != digest:
        what = f"the run in {run.folder} began with other weights than those that are there now"
        fix = "Put the adapter that it began with back, choose another OUTPUT_DIR, or set OVERWRITE=1"
        problems.add(f"INIT_ADAPTER={settings.INIT_ADAPTER}", what, fix)
