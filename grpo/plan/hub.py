# SPDX-License-Identifier: Apache-2.0
"""The small files of a model: of a folder, of the Hub, or of `tiny`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.plan.download import PARTIAL, download, refusal
from grpo.plan.machine import GIB
from grpo.run.durable import read_json
from grpo.settings import ROOT, Problems, one_line

ModelConfig = Mapping[str, Any]  # A model's config.json.


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters of a gpt-oss by part, from its config.json."""
    hidden, layers, head = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts, inner = config["num_local_experts"], config["intermediate_size"]
    attention = hidden * (q + 2 * kv) + (q + 2 * kv) + q * hidden + hidden + config["num_attention_heads"]
    moe = experts * (3 * hidden * inner + 2 * inner + hidden) + experts * (hidden + 1)
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    total = layers * (attention + moe + 2 * hidden) + embeddings + hidden
    return {"total": total, "experts": layers * moe, "attention": layers * attention, "embeddings": embeddings}


def config_digest(config: ModelConfig) -> str:
    """A name for a config.json: a resumed run must find the base model that it began with."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def has_mxfp4(config: ModelConfig | None) -> bool:
    """Whether the experts of a checkpoint with this config.json are quantized to MXFP4."""
    return ((config or {}).get("quantization_config") or {}).get("quant_method") == "mxfp4"


TINY_PATH = ROOT / "data" / "tiny"
REAL_MODEL = "openai/gpt-oss-20b"
# config.json of openai/gpt-oss-20b, as far as the plan needs it before anything was downloaded.
REAL_CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
WEIGHTS_INDEX = "model.safetensors.index.json"  # It names the weights to load; `original/` and `metal/` hold others.
MODEL_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.*", WEIGHTS_INDEX,
]  # fmt: skip
OTHERS = [name for name in MODEL_FILES if name.endswith(".json") and name not in ("config.json", "tokenizer.json")]
DOWNLOAD_GIB = 12.9  # The size of the official checkpoint's safetensors.


@dataclass(frozen=True)
class ModelFiles:
    """The small files of a model: its folder (None before it was downloaded), config.json, template, tokenizer.json."""

    folder: Path | None
    config: ModelConfig
    template: str | None = None
    tokenizer: Path | None = None


def find_model(model_id: str, problems: Problems) -> ModelFiles | None:
    """The model's small files: of a local folder, of `tiny`, or of the Hub."""
    local = TINY_PATH if model_id == "tiny" else Path(model_id)
    is_local = bool(model_id) and os.path.isdir(local)  # os.path.isdir raises nothing, whatever the name is.
    if not is_local and (model_id.startswith((".", "/", "~")) or model_id.count("/") != 1):
        fix = f"Use {REAL_MODEL}, tiny, or an existing folder"
        problems.add("MODEL_ID", f"{model_id!r} is neither a folder nor a Hub id", fix)
        return None
    folder = local if is_local else fetch_small_files(model_id, problems)
    if folder is None:
        return ModelFiles(None, REAL_CONFIG) if model_id == REAL_MODEL else None
    try:
        files = read_model_files(folder)
    except (OSError, ValueError) as error:
        fix = "Download or build the checkpoint of a gpt-oss model again"
        if isinstance(error, OtherModelError):
            fix = f"Set MODEL_ID={REAL_MODEL}, tiny, or a model made from one of these"
        problems.add(f"MODEL_ID={model_id}", one_line(str(error), 500), fix)
        return None
    for name in missing_shards(folder) if is_local else ():
        problems.add(f"MODEL_ID={model_id}", f"{name} is missing", "Copy the whole checkpoint, weights included")
    return files


# No size in a config.json is larger: with one damaged digit, planning would never end.
MOST_IN_CONFIG = 10**7


class OtherModelError(ValueError):
    """The model is whole, but of another kind than gpt-oss."""


def check_config(config: ModelConfig) -> None:
    """Raises OtherModelError where a config.json is that of another model, ValueError where it is damaged."""
    kind, sizes = config.get("model_type"), [key for key, value in REAL_CONFIG.items() if isinstance(value, int)]
    if kind != "gpt_oss" and isinstance(kind, str):
        raise OtherModelError(f"this is a model of type {kind}, and this program trains gpt-oss (type gpt_oss)")
    if kind != "gpt_oss":
        raise ValueError(f"config.json says model_type {kind!r}, and that of a gpt-oss is gpt_oss")
    if missing := [key for key in sizes if key not in config]:
        raise ValueError(f"config.json lacks {', '.join(missing)}, which every gpt-oss has")
    dropout = config.get("attention_dropout", 0)
    valid = {key: type(config[key]) is int and 0 < config[key] <= MOST_IN_CONFIG for key in sizes}
    valid["sliding_window"] |= config["sliding_window"] is None
    valid["attention_dropout"] = type(dropout) in (int, float) and 0 <= dropout <= 1
    valid["layer_types"] = isinstance(config.get("layer_types"), list | None)
    valid["quantization_config"] = isinstance(config.get("quantization_config"), dict | None)
    for key in (key for key, is_valid in valid.items() if not is_valid):
        raise ValueError(f"config.json says {key} {config.get(key)!r}, which no gpt-oss has")


def check_stop_tokens(config: ModelConfig) -> None:
    """Raises ValueError where a token to stop at in generation_config.json is no token's number."""
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        ids = config.get(key)
        tokens = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(token) is int and 0 <= token < MOST_IN_CONFIG for token in tokens):
            raise ValueError(f"generation_config.json says {key} {ids!r}, which is no token's number")


def read_template(folder: Path, tokenizer_config: ModelConfig) -> str | None:
    """The chat template in `folder`, or else in its tokenizer_config.json; None where there is none. Raises OSError or
    ValueError where it is damaged."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            text = path.read_text(encoding="utf-8")
        except ValueError as error:
            raise ValueError(f"{path.name} cannot be read ({error})") from None
        if not text.strip("\0 \t\r\n"):  # Every prompt would have no token.
            raise ValueError(f"{path.name} cannot be read (it holds no text)")
        return text
    template = tokenizer_config.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError("the chat_template in tokenizer_config.json is no text")
    return template


def read_model_files(folder: Path) -> ModelFiles:
    """The small files that lie in `folder`. Raises OSError or ValueError where it holds no gpt-oss with a tokenizer."""
    if not (folder / "config.json").exists():
        raise ValueError("config.json is missing")
    config = read_json(folder / "config.json")
    check_config(config)
    # The loaders of a run read these files too, and raise whatever is wrong in them.
    others = {name: read_json(folder / name) for name in OTHERS if (folder / name).exists()}
    check_stop_tokens(others.get("generation_config.json", {}))
    shards = others.get(WEIGHTS_INDEX, {"weight_map": {}}).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{WEIGHTS_INDEX} names no files of weights")
    if not (folder / "tokenizer.json").exists():
        raise ValueError("tokenizer.json is missing")
    template = read_template(folder, others.get("tokenizer_config.json", {}))
    return ModelFiles(folder, config, template, folder / "tokenizer.json")


def missing_shards(folder: Path) -> list[str]:
    """The files of weights that a checkpoint lacks, by its index; without an index that is model.safetensors."""
    shards = {"model.safetensors"}
    with contextlib.suppress(OSError, ValueError, KeyError):
        shards = set(read_json(folder / WEIGHTS_INDEX)["weight_map"].values())
    return sorted(name for name in shards if not (folder / name).is_file())


def fetch_small_files(model_id: str, problems: Problems) -> Path | None:
    """The folder with config, tokenizer and template of a Hub model: some 28 MB, from the cache if the Hub is
    unreachable; None on failure."""
    try:
        from huggingface_hub import snapshot_download  # Inside, because it may be missing.

        return Path(snapshot_download(model_id, allow_patterns=MODEL_FILES))
    except Exception as error:  # Offline, no such repository, or no access.
        if getattr(error, "name", "") != "huggingface_hub":  # `check_packages` names that package where it is missing.
            problems.add("MODEL_ID", *refusal(model_id, error))
        return None


def fetch_weights(model_id: str, files: ModelFiles) -> str | None:
    """Download those weights of a Hub model that its index names and the cache lacks; then `files.folder` is the whole
    checkpoint. Returns what prevents it, or None."""
    problems = Problems()
    if files.folder and (names := missing_shards(files.folder)):
        try:
            download(model_id, files.folder, names)
        except Exception as error:  # Many things can end a long download.
            problems.add("MODEL_ID", *refusal(model_id, error))
    return problems[0] if problems else None


def downloaded_gib(files: ModelFiles) -> float:
    """Size of the checkpoint's weights that are on this machine, in GiB; those that came in part count."""
    if not files.folder:
        return 0.0
    paths = [*files.folder.glob("*.safetensors"), *files.folder.glob(f"../../blobs/*{PARTIAL}")]
    return sum(path.stat().st_size for path in paths) / GIB


def checkpoint_gib(model_id: str, files: ModelFiles) -> float:
    """Size of the checkpoint's weights in GiB; that of the official one at least, until a download is whole."""
    size, is_whole = downloaded_gib(files), files.folder and not missing_shards(files.folder)
    return size if is_whole and model_id != REAL_MODEL else max(size, DOWNLOAD_GIB)
