# SPDX-License-Identifier: Apache-2.0
"""Finds the small files of a model in a folder, on the Hub, or in data/tiny, and downloads its weights."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.common import ROOT, Problems, one_line
from grpo.output.durable import read_json, type_fault
from grpo.plan.machine import GIB
from grpo.plan.tensors import WEIGHTS_INDEX, missing_shards, names_fault

ModelConfig = Mapping[str, Any]  # A model's config.json.


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters of a gpt-oss, in total and of embeddings and head, from its config.json."""
    hidden, layers, head = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts, inner = config["num_local_experts"], config["intermediate_size"]
    attention = hidden * (q + 2 * kv) + (q + 2 * kv) + q * hidden + hidden + config["num_attention_heads"]
    moe = experts * (3 * hidden * inner + 2 * inner + hidden) + experts * (hidden + 1)
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    total = layers * (attention + moe + 2 * hidden) + embeddings + hidden
    return {"total": total, "embeddings": embeddings}


def expert_elements(config: ModelConfig) -> int:
    """The number of elements of all expert matrices in one layer, biases excluded."""
    return int(config["num_local_experts"] * 3 * config["hidden_size"] * config["intermediate_size"])


def packed_gib(config: ModelConfig) -> float:
    """GiB of the expert matrices of all layers in MXFP4: 4 bits an element, and a byte for 32 elements."""
    return expert_elements(config) * config["num_hidden_layers"] * 4.25 / 8 / GIB


def has_mxfp4(config: ModelConfig | None) -> bool:
    """Whether the experts of a checkpoint with this config.json are quantized to MXFP4."""
    return ((config or {}).get("quantization_config") or {}).get("quant_method") == "mxfp4"


TINY_PATH = ROOT / "data" / "tiny"
TINY_ACTIONS = 4  # It was made to answer [0] to [3], the plant's actions, and never answers another one.
REAL_MODEL = "openai/gpt-oss-20b"
# The part of openai/gpt-oss-20b's config.json that memory is planned with before anything is downloaded.
REAL_CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
# (layers, experts) of a checkpoint -> the model with MXFP4 experts that it may be a BF16 copy of.
ORIGINALS = {(24, 32): REAL_MODEL, (36, 128): "openai/gpt-oss-120b"}
MODEL_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.*", WEIGHTS_INDEX,
]  # fmt: skip


@dataclass(frozen=True)
class ModelFiles:
    """The small files of a model: folder (None before the download), config.json, chat template, tokenizer.json."""

    folder: Path | None
    config: ModelConfig
    template: str | None = None
    tokenizer: Path | None = None
    commit: str | None = None  # The Hub's commit that the files are of.


def is_no_hub_id(model_id: str) -> bool:
    """Whether a MODEL_ID cannot be one of the Hub's, owner/name: then it is meant to be a folder."""
    return model_id.startswith((".", "/", "~")) or model_id.count("/") != 1


def find_model(model_id: str, problems: Problems, commit: str | None = None) -> ModelFiles | None:
    """The small files of MODEL_ID, which is a local folder, `tiny` or a Hub id; None after a problem. `commit` is the
    Hub's commit that a run began with; without it the newest is taken."""
    local = TINY_PATH if model_id == "tiny" else Path(model_id)
    is_local = bool(model_id) and os.path.isdir(local)  # Path.is_dir may raise for odd names, os.path.isdir never does.
    if not is_local and is_no_hub_id(model_id):
        fix = f"Use {REAL_MODEL}, tiny, or an existing folder"
        problems.add("MODEL_ID", f"{model_id!r} is neither a folder nor a Hub id", fix)
        return None
    folder = local if is_local else fetch_small_files(model_id, commit, problems)
    if folder is None:
        return ModelFiles(None, REAL_CONFIG) if model_id == REAL_MODEL else None
    try:
        files = read_model_files(folder)
    except (OSError, ValueError) as error:
        fix = f"Set MODEL_ID={REAL_MODEL}, tiny, or a model made from one of these; download a damaged one again"
        problems.add(f"MODEL_ID={model_id}", one_line(str(error), 500), fix)
        return None
    for name in missing_shards(folder) if is_local else ():
        problems.add(f"MODEL_ID={model_id}", f"{name} is missing", "Copy the whole checkpoint, weights included")
    if fault := names_fault(folder, files.config, has_mxfp4(files.config)):
        fix = f"Save it as transformers does (save_pretrained), or set MODEL_ID={REAL_MODEL}"
        problems.add(f"MODEL_ID={model_id}", fault, fix)
    return files if is_local else dataclasses.replace(files, commit=folder.name)  # The cache names folders so.


def read_model_files(folder: Path) -> ModelFiles:
    """The small files in `folder`. Raises OSError, and ValueError if it holds no gpt-oss with a tokenizer whose weights
    are in BF16, or in BF16 with MXFP4 experts."""
    if not (folder / "config.json").exists():
        raise ValueError("config.json is missing")
    config, tokenizer, template = read_json(folder / "config.json"), folder / "tokenizer.json", None
    if (kind := config.get("model_type")) != "gpt_oss":
        raise ValueError(f"this is a model of type {kind}, and this program trains gpt-oss (type gpt_oss)")
    if missing := [key for key in REAL_CONFIG if key not in config and key != "quantization_config"]:
        raise ValueError(f"config.json lacks {', '.join(missing)}, which every gpt-oss has")
    for key, value in REAL_CONFIG.items():
        if config.get(key) is None and key in ("quantization_config", "sliding_window"):
            continue  # BF16 weights, or no window
        if fault := type_fault(config[key], type(value), key):
            raise ValueError(f"config.json: {fault}")
    quantization = config.get("quantization_config")
    if quantization is not None and not has_mxfp4(config):
        fault = f"its weights are quantized by {quantization.get('quant_method', 'an unnamed method')}"
        raise ValueError(f"{fault}, and this program trains MXFP4 experts or BF16 weights")
    if not tokenizer.exists():
        raise ValueError("tokenizer.json is missing")
    if (folder / WEIGHTS_INDEX).exists():
        read_json(folder / WEIGHTS_INDEX)  # It raises for a damaged one.
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    elif (folder / "tokenizer_config.json").exists():
        template = read_json(folder / "tokenizer_config.json").get("chat_template")
    return ModelFiles(folder, config, template, tokenizer)


def download_problem(model_id: str, error: BaseException, commit: str | None = None) -> tuple[str, str]:
    """(fault, fix) for `Problems.add`, after an exception in a download from the Hub. `commit`: as in `find_model`."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):  # Its cause is the network's error.
        error = error.__cause__ or error
    fault = f"{model_id} is not in the cache and cannot be fetched ({one_line(str(error), 300)})"
    token = "for a gated or private model accept the licence on its page and run `hf auth login` or set HF_TOKEN"
    network = "look at the network, HF_ENDPOINT, HF_HUB_OFFLINE and the disk"
    if commit:
        fault = f"the run began with commit {commit} and uses no other, and {fault}"
        return fault, f"{token.capitalize()}; {network}. A new OUTPUT_DIR begins with the newest commit"
    return fault, f"Check the name; {token}; {network}. Or set MODEL_ID to a local folder or to tiny"


def fetch_small_files(model_id: str, commit: str | None, problems: Problems) -> Path | None:
    """The folder with the small files of a Hub model, of `commit` or else the newest; None after a problem."""
    try:
        from huggingface_hub import snapshot_download  # The package may be missing.

        return Path(snapshot_download(model_id, revision=commit, allow_patterns=MODEL_FILES))
    except Exception as error:  # Offline, no such repository, or no access.
        if getattr(error, "name", "") != "huggingface_hub":  # `check_packages` reports that package.
            problems.add("MODEL_ID", *download_problem(model_id, error, commit))
        return None


def fetch_weights(model_id: str, files: ModelFiles) -> str | None:
    """Downloads the weight files that `files.folder`, in the Hub's cache, lacks. Returns a problem, or None."""
    problems = Problems()
    if files.folder and (names := missing_shards(files.folder)):
        from huggingface_hub import snapshot_download  # Imported here, because it takes a second.

        try:
            snapshot_download(model_id, revision=files.folder.name, allow_patterns=names)
        except Exception as error:  # Many things can end a long download.
            problems.add("MODEL_ID", *download_problem(model_id, error))
    return problems[0] if problems else None


def weights_gib(config: ModelConfig, packed: bool) -> float:
    """GiB of all weights in BF16, but for experts that are `packed`: those are in MXFP4."""
    size = count_parameters(config)["total"] * 2 / GIB
    if packed:
        size += packed_gib(config) - expert_elements(config) * config["num_hidden_layers"] * 2 / GIB
    return size


def checkpoint_gib(config: ModelConfig) -> float:
    """GiB of the weights of a checkpoint with this config.json: for gpt-oss-20b and 120b to the byte of their index."""
    return weights_gib(config, has_mxfp4(config))
