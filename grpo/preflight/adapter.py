# SPDX-License-Identifier: Apache-2.0
"""The rank, alpha and targets of the adapter: from the settings, or from the adapter that INIT_ADAPTER names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.common import InputError, Problems
from grpo.output.best import adapter_fault
from grpo.output.durable import Record, file_sha256, read_json
from grpo.output.folder import RunState
from grpo.output.layout import ADAPTER, ADAPTER_CONFIG
from grpo.plan.hub import ModelConfig
from grpo.plan.targets import expected_shapes, matrix_of, peft_targets, shortest_targets, target_matrices
from grpo.settings.parsing import show
from grpo.settings.table import Settings

# Values of PEFT's init_lora_weights that subtract the first adapter from the base model (peft/tuners/lora/layer.py).
CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
NAME_AN_ADAPTER = "Name the folder of an adapter: a run's, its best/, a checkpoint, or what scripts/sft.py wrote"


def lora_options(s: Settings) -> dict[str, Any]:
    """Arguments of PEFT's LoraConfig."""
    options = {"r": s.LORA_R, "lora_alpha": s.LORA_ALPHA, "lora_dropout": s.LORA_DROPOUT, "task_type": "CAUSAL_LM"}
    return options | peft_targets(s.LORA_TARGETS)


def missing_files(folder: Path) -> list[str]:
    return [name for name in (ADAPTER_CONFIG, ADAPTER) if not (folder / name).is_file()]


def is_on_experts(folder: Path) -> bool:
    """Whether the adapter in `folder` is on experts, alone or among others."""
    return bool(read_json(folder / ADAPTER_CONFIG).get("target_parameters"))


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Shape of every tensor of a safetensors file by name. Raises OSError, and InputError if it is damaged."""
    from safetensors import SafetensorError, safe_open  # Inside, so that the preflight can name missing packages.

    try:
        with safe_open(path, "np") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path.name} is damaged or no safetensors file ({error})") from None


def read_lora_config(folder: Path) -> Record:
    """adapter_config.json of a LoRA. Raises OSError if it cannot be read, InputError if it is another adapter's."""
    config = read_json(folder / ADAPTER_CONFIG)
    is_lora = config.get("peft_type") == "LORA" and type(config.get("r")) is int
    if not is_lora or not isinstance(config.get("lora_alpha"), int | float):
        raise InputError(f"{ADAPTER_CONFIG} is not that of a LoRA adapter")
    return config


def read_adapter(folder: Path, model: ModelConfig) -> dict[str, Any]:
    """LORA_R, LORA_ALPHA and LORA_TARGETS of the adapter in `folder`. Raises OSError if it cannot be read, and
    InputError with the reason if this program cannot train it on the model with the config.json `model`."""
    config, shapes = read_lora_config(folder), tensor_shapes(folder / ADAPTER)
    rank, alpha = config["r"], config["lora_alpha"]
    if rank < 1 or not 0 < alpha < math.inf:
        raise InputError(f"nothing can be learned with r={rank} and lora_alpha={alpha:g}")
    if (start := str(config.get("init_lora_weights")).lower()).startswith(CHANGING_THE_BASE):
        fault = f"PEFT's init_lora_weights={start} changed its base model's weights, which are not in it"
        raise InputError(f"{fault}. save_pretrained can make a plain LoRA (path_initial_model_for_weight_conversion)")
    # All other options change the tensors, which are compared below.
    for name in ("use_rslora", "alpha_pattern"):
        if config.get(name):
            fault = f"it was made with PEFT's {name}"
            raise InputError(f"{fault}, and this program scales all modules by LORA_ALPHA / LORA_R")
    matrices = {matrix for name in shapes if (matrix := matrix_of(name))}
    lora_targets = shortest_targets(matrices, model["num_hidden_layers"])
    expected = expected_shapes(model, rank, lora_targets)
    for name in [*shapes, *expected]:
        if shapes.get(name) != expected.get(name):
            actual, right = (str(tensors.get(name, "not there")) for tensors in (shapes, expected))
            raise InputError(f"it is no LoRA of rank {rank} for this model: {name} is {actual}, expected {right}")
    return {"LORA_R": rank, "LORA_ALPHA": float(alpha), "LORA_TARGETS": lora_targets}


@dataclass(frozen=True)
class StartAdapter:
    """The adapter that a run starts from: its rank, alpha and targets by setting, and the SHA-256 of its weights."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None  # None where the run starts from a fresh adapter.


def read_start_adapter(
    settings: Settings, sources: Mapping[str, str], model: ModelConfig | None, problems: Problems
) -> StartAdapter:
    """The adapter that INIT_ADAPTER names. Adds a problem if it cannot be used, and for each setting of the user's that
    contradicts it; `sources` tells where each setting came from."""
    folder, where = Path(settings.INIT_ADAPTER), f"INIT_ADAPTER={settings.INIT_ADAPTER}"
    if not settings.INIT_ADAPTER:
        return StartAdapter()
    try:
        if missing := missing_files(folder):
            raise InputError(f"{' and '.join(missing)} not found there")
        if model is None:  # That is a problem already.
            return StartAdapter()
        if fault := adapter_fault(folder):
            raise InputError(fault)
        adapter_settings = read_adapter(folder, model)
        digest = file_sha256(folder / ADAPTER)
    except (ImportError, OSError, InputError) as error:
        problems.add(where, str(error), NAME_AN_ADAPTER)
        return StartAdapter()
    layers = model["num_hidden_layers"]
    for name, value in adapter_settings.items():
        setting = getattr(settings, name)
        is_same = setting == value
        if name == "LORA_TARGETS":
            is_same = target_matrices(setting, layers) == target_matrices(value, layers)
        if sources[name] == "environment" and not is_same:
            fault = f"it was set to {show(setting)}, and the adapter in {settings.INIT_ADAPTER} has {show(value)}"
            problems.add(name, fault, f"Unset it (the adapter's own is taken), or set {name}={show(value)}")
    return StartAdapter(adapter_settings, digest)


def check_start_adapter(settings: Settings, state: RunState, digest: str | None, problems: Problems) -> None:
    """Checks that a resumed run began with the weights that INIT_ADAPTER holds now: the folder may have new ones."""
    if digest and state.choices and state.choices.get("init_adapter") != digest:
        fault = f"the run in {state.folder} began with other weights than it holds now"
        fix = "Put the adapter that it began with back, choose another OUTPUT_DIR, or set OVERWRITE=1"
        problems.add(f"INIT_ADAPTER={settings.INIT_ADAPTER}", fault, fix)
