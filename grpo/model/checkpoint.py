# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in gpt-oss's format: written tensor by tensor into a folder that is complete or absent, and checked."""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, GptOssConfig, GptOssForCausalLM

from grpo.model.gptoss_format import (
    BLOCK,
    SPECIAL_TOKENS,
    ModelError,
    Shape,
    config_dict,
    generation_config_dict,
    tokenizer_config_dict,
)
from grpo.preflight.hub import _is_checkpoint, count_parameters

DTYPES = {torch.bfloat16: "BF16", torch.uint8: "U8"}  # safetensors' names
SHARD_BYTES = 4 * 2**30


def require_space(where: Path, needed: int) -> None:
    """Raise ModelError if the file system that will hold `where` has fewer than `needed` bytes free."""
    existing = next(parent for parent in (where.absolute(), *where.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ModelError(
            f"{where} needs {needed / 2**30:.2f} GiB and {existing} has {free / 2**30:.2f} GiB free: "
            "free some space, or choose another folder"
        )


@contextlib.contextmanager
def new_directory(out: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary sibling of `out` that becomes `out` by a rename if the body succeeds and is removed if not.

    Raises:
        ModelError: if `out` exists and is not empty, without `force`; with it, if it is no gpt-oss checkpoint (only
            what this project could have written is ever replaced).
    """
    out = out.absolute()
    occupied = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if occupied and not force:
        raise ModelError(
            f"{out} exists and is not empty: move it away, choose another folder, or use make_model.py --force"
        )
    if occupied and not _is_checkpoint(out):
        raise ModelError(f"{out} exists and holds no gpt-oss checkpoint, so it is not replaced: move it away")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", suffix=".tmp", dir=out.parent))
    except OSError as error:
        raise ModelError(f"cannot write beside {out}: {error}") from error
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's 0o700 would hide the model from other users
        if occupied:
            old = temporary.with_suffix(".old")
            os.replace(out, old)
            os.replace(temporary, out)
            shutil.rmtree(old)
        else:
            os.replace(temporary, out)  # replaces an empty directory too
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def expected_tensors(config: GptOssConfig) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint with this config, on the meta device: what transformers' own model holds, its expert
    matrices in MXFP4. Those are stored transposed against its modules: rows are outputs, the quantized last dimension is
    the input; the rows of gate_up_proj alternate gate, up, gate, up."""
    with torch.device("meta"):
        expected: dict[str, torch.Tensor] = {}
        for name, tensor in GptOssForCausalLM(config).state_dict().items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, inputs, outputs = tensor.shape
                shape = experts, outputs, inputs // BLOCK
                expected[f"{name}_blocks"] = torch.empty(*shape, BLOCK // 2, dtype=torch.uint8)
                expected[f"{name}_scales"] = torch.empty(shape, dtype=torch.uint8)
            else:
                expected[name] = torch.empty(tensor.shape, dtype=torch.bfloat16)
    return expected


def checkpoint_bytes(shape: Shape) -> int:
    """Bytes of all tensors of that shape; computed from two small ones, so that absurd shapes are refused quickly."""
    one, two = (
        sum(t.nbytes for t in expected_tensors(GptOssConfig.from_dict(config_dict(replace(shape, layers=n)))).values())
        for n in (1, 2)
    )
    return one + (shape.layers - 1) * (two - one)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


Make = Callable[[str, torch.Tensor], torch.Tensor]  # (name, a meta tensor of its type and shape) -> the tensor


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], make: Make) -> None:
    """Write one safetensors file tensor by tensor: memory holds one of them, where the library's writer takes a whole file.

    The format (https://huggingface.co/docs/safetensors): the header's length as 8 bytes little-endian, a JSON header,
    then the tensors' bytes without gaps. Raises ModelError if `make` returns another type or shape.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, like in tensors.items():
        start, end = end, end + like.nbytes
        header[name] = {"dtype": DTYPES[like.dtype], "shape": list(like.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, like in tensors.items():
            tensor = make(name, like)
            if (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
                wanted = f"{like.dtype} {tuple(like.shape)}"
                raise ModelError(f"{name}: expected {wanted}, got {tensor.dtype} {tuple(tensor.shape)}")
            file.write(tensor.contiguous().cpu().view(torch.uint8).numpy().data)


def write_checkpoint(
    directory: Path,
    shape: Shape,
    token_ids: Mapping[str, int],
    make: Make,
    tokenizer: Tokenizer | None,
    template: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Fill `directory` with a checkpoint whose tensors `make` supplies in order, and check it. Without a `tokenizer` the
    chat `template` is left out too."""
    config = config_dict(shape, token_ids)
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", generation_config_dict(token_ids))
    if tokenizer is not None:
        tokenizer.save(str(directory / "tokenizer.json"))
        write_json(directory / "tokenizer_config.json", tokenizer_config_dict())
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    tensors = expected_tensors(GptOssConfig.from_dict(config))
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_bytes)
    for filename, names in split.filename_to_tensors.items():
        write_safetensors(directory / filename, {name: tensors[name] for name in names}, make)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(directory / "model.safetensors.index.json", index)
    check_checkpoint(directory)


def read_tokenizer(source: Path) -> Tokenizer:
    """The tokenizer.json or, compressed, tokenizer.json.xz in the directory `source`; raises ModelError if it is missing or
    cannot be read."""
    plain, compressed = source / "tokenizer.json", source / "tokenizer.json.xz"
    if not plain.is_file() and not compressed.is_file():
        raise ModelError(f"{source} holds neither tokenizer.json nor tokenizer.json.xz")
    try:
        return Tokenizer.from_buffer(
            plain.read_bytes() if plain.is_file() else lzma.decompress(compressed.read_bytes())
        )
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(f"cannot read the tokenizer in {source}: {error}") from error


def special_token_ids(tokenizer: Tokenizer, vocab: int) -> dict[str, int]:
    """Ids of `SPECIAL_TOKENS`.

    Raises:
        ModelError: if one is missing, or the tokenizer has ids that a model with `vocab` embeddings lacks.
    """
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    missing = [token for token, number in ids.items() if number is None]
    if missing:
        raise ModelError(f"the tokenizer lacks Harmony's special tokens {', '.join(missing)}")
    if (largest := max(tokenizer.get_vocab().values())) >= vocab:
        raise ModelError(f"the tokenizer has ids up to {largest}, the model {vocab} embeddings")
    return ids


def check_checkpoint(directory: Path) -> dict[str, int]:
    """Compare a checkpoint's files with what transformers expects: names, types, shapes, file sizes and the index.

    Reads headers only, so that it takes seconds at full size; the weights' values are not looked at. Returns the numbers
    of `tensors`, `files`, `bytes` (of tensors) and `parameters` (weights after dequantization).

    Raises:
        ModelError: naming every difference, at most ten of each kind, or the file that cannot be read.
    """
    if not _is_checkpoint(directory):
        raise ModelError(f"{directory} holds no config.json of model_type gpt_oss")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} holds no *.safetensors")
    found, where = {}, {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  not a dictionary
                    part = file.get_slice(name)
                    found[name], where[name] = (part.get_dtype(), part.get_shape()), path.name
        except (OSError, SafetensorError) as error:  # no safetensors, or another size than its header says
            raise ModelError(f"cannot read {path}: {error}") from error
    tensors = expected_tensors(AutoConfig.from_pretrained(directory))
    expected = {name: (DTYPES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()}
    problems = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:10])}"
        for what, names in (
            ("missing", expected.keys() - found.keys()),
            ("unexpected", found.keys() - expected.keys()),
            ("of another type or shape", {n for n in expected.keys() & found.keys() if expected[n] != found[n]}),
        )
        if names
    ]
    index = directory / "model.safetensors.index.json"
    if len(files) > 1 and not index.is_file():
        problems.append(f"{len(files)} shards and no {index.name}")
    if index.is_file() and json.loads(index.read_text(encoding="utf-8")).get("weight_map") != where:
        problems.append(f"{index.name} does not say where the tensors are")
    if problems:
        raise ModelError(f"{directory} is not a complete gpt-oss checkpoint: " + "; ".join(problems))
    parameters = count_parameters(json.loads((directory / "config.json").read_text(encoding="utf-8")))["total"]
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {"tensors": len(found), "files": len(files), "bytes": size, "parameters": parameters}
