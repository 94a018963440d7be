# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in gpt-oss's format: written into a folder that is complete or absent, and checked."""

from __future__ import annotations

import contextlib
import glob
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

from grpo.model.gptoss_format import BLOCK, BOS, EOS, PAD, SPECIAL_TOKENS, STOP_TOKENS, ModelError, Shape, config_dict
from grpo.plan.hub import WEIGHTS_INDEX, count_parameters
from grpo.run.durable import locked, read_json

DTYPES = {torch.bfloat16: "BF16", torch.uint8: "U8"}  # safetensors' names
SHARD_BYTES = 4 * 2**30
MakeTensor = Callable[[str, torch.Tensor], torch.Tensor]  # from its name and a meta tensor of its type and shape


def require_space(out: Path, needed: int) -> None:
    """Raise ModelError if the file system that will hold `out` has fewer than `needed` bytes free."""
    existing = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        sizes = f"{out} needs {needed / 2**30:.2f} GiB and {existing} has {free / 2**30:.2f} GiB free"
        raise ModelError(f"{sizes}: free some space, or choose another folder")


def is_checkpoint(path: Path) -> bool:
    """Whether the folder holds the config.json of a gpt-oss."""
    return read_json(path / "config.json", (OSError, ValueError)).get("model_type") == "gpt_oss"


def remove_leftovers(out: Path) -> None:
    """Deletes what processes that were killed left beside `out`. The earlier `out` comes back where it had been moved
    away and nothing was put in its place."""
    for leftover in out.parent.glob(f".{glob.escape(out.name)}-*.tmp"):
        with contextlib.suppress(OSError), locked(leftover) as is_free:
            if is_free:
                shutil.rmtree(leftover, ignore_errors=True)
    for old in out.parent.glob(f".{glob.escape(out.name)}-*.old"):
        if old.with_suffix(".tmp").exists():  # Another process is about to put it there.
            continue
        if os.path.lexists(out):
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, out)


@contextlib.contextmanager
def new_directory(out: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary sibling of `out` that becomes `out` by a rename if the body succeeds and is removed if not.

    Raises ModelError if `out` is not empty, without `force`; with it, if `out` is no gpt-oss checkpoint: only what this
    project could have written is ever replaced.
    """
    out = out.absolute()
    remove_leftovers(out)
    occupied = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if occupied and not force:
        raise ModelError(f"{out} exists and is not empty: move it away, choose another folder, or use --force")
    if occupied and not is_checkpoint(out):
        raise ModelError(f"{out} exists and holds no gpt-oss checkpoint, so it is not replaced: move it away")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", suffix=".tmp", dir=out.parent))
    except OSError as error:
        raise ModelError(f"cannot write beside {out}: {error}") from error
    try:
        with locked(temporary):
            yield temporary
            # mkdtemp makes folders, and safetensors files, for their owner alone.
            os.umask(umask := os.umask(0o077))
            temporary.chmod(0o777 & ~umask)
            for path in filter(Path.is_file, temporary.rglob("*")):
                path.chmod(0o666 & ~umask)
            if occupied:
                os.replace(out, old := temporary.with_suffix(".old"))
            os.replace(temporary, out)  # This replaces an empty folder as well.
            if occupied:
                shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def expected_tensors(config: GptOssConfig) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint with this config by name, on the meta device.

    They are those of transformers' own model in BF16; with a quantization_config its expert matrices are in MXFP4.
    Those are stored transposed against its modules: rows are outputs, the quantized last dimension is the input, and
    the rows of gate_up_proj alternate gate, up, gate, up.
    """
    quantized = getattr(config, "quantization_config", None) is not None
    with torch.device("meta"):
        expected: dict[str, torch.Tensor] = {}
        for name, tensor in GptOssForCausalLM(config).state_dict().items():
            if quantized and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, inputs, outputs = tensor.shape
                shape = experts, outputs, inputs // BLOCK
                expected[f"{name}_blocks"] = torch.empty(*shape, BLOCK // 2, dtype=torch.uint8)
                expected[f"{name}_scales"] = torch.empty(shape, dtype=torch.uint8)
            else:
                expected[name] = torch.empty(tensor.shape, dtype=torch.bfloat16)
    return expected


def checkpoint_bytes(shape: Shape) -> int:
    """Bytes of all tensors of that shape: two a parameter, and 17 for each 32 of an expert's matrices."""
    matrices = shape.layers * shape.experts * 3 * shape.hidden * shape.intermediate
    return 2 * (count_parameters(config_dict(shape))["total"] - matrices) + matrices * 17 // 32


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(
    directory: Path,
    shape: Shape,
    token_ids: Mapping[str, int],
    make: MakeTensor,
    tokenizer: Tokenizer | None,
    template: str,
) -> None:
    """Fill `directory` with a checkpoint, its tensors supplied by `make`, and check it. Without a `tokenizer` the chat
    `template` is left out too."""
    config = config_dict(shape, token_ids)
    write_json(directory / "config.json", config)
    stop = {"do_sample": True, "eos_token_id": [token_ids[token] for token in STOP_TOKENS]}
    stop |= {"bos_token_id": token_ids[BOS], "pad_token_id": token_ids[PAD]}
    write_json(directory / "generation_config.json", stop)
    if tokenizer is not None:
        options: dict[str, Any] = {"padding_side": "left", "model_input_names": ["input_ids", "attention_mask"]}
        options |= {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "model_max_length": 131072}
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **options)
        fast.save_pretrained(directory)
    write_tensors(directory, expected_tensors(GptOssConfig.from_dict(config)), make)
    check_checkpoint(directory)


def write_tensors(directory: Path, expected: Mapping[str, torch.Tensor], make: MakeTensor) -> None:
    """Write the `expected` tensors (of the meta device, by name), in order, as `make` supplies them, in shards of
    SHARD_BYTES and their index; memory holds one shard."""
    split = split_torch_state_dict_into_shards(dict(expected), max_shard_size=SHARD_BYTES)
    for filename, names in split.filename_to_tensors.items():
        # The tensors are in no variable: that would hold the last shard while the next is made.
        save_file(
            {name: make(name, expected[name]).contiguous() for name in names}, directory / filename, {"format": "pt"}
        )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(directory / WEIGHTS_INDEX, index)


def read_tokenizer(source: Path) -> Tokenizer:
    """The tokenizer.json or, compressed, tokenizer.json.xz in the directory `source`; raises ModelError if it is
    missing or cannot be read."""
    plain, compressed = source / "tokenizer.json", source / "tokenizer.json.xz"
    try:
        if plain.is_file():
            return Tokenizer.from_buffer(plain.read_bytes())
        return Tokenizer.from_buffer(lzma.decompress(compressed.read_bytes()))
    except FileNotFoundError:
        raise ModelError(f"{source} holds neither tokenizer.json nor tokenizer.json.xz") from None
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(f"cannot read the tokenizer in {source}: {error}") from error


def special_token_ids(tokenizer: Tokenizer, vocab: int) -> dict[str, int]:
    """Ids of `SPECIAL_TOKENS`. Raises ModelError if one is missing, or an id is beyond a model's `vocab` embeddings."""
    ids = tokenizer.get_vocab()
    if missing := [token for token in SPECIAL_TOKENS if token not in ids]:
        raise ModelError(f"the tokenizer lacks Harmony's special tokens {', '.join(missing)}")
    if (largest := max(ids.values())) >= vocab:
        raise ModelError(f"the tokenizer has ids up to {largest}, the model {vocab} embeddings")
    return {token: ids[token] for token in SPECIAL_TOKENS}


def check_checkpoint(directory: Path) -> dict[str, int]:
    """Compare a checkpoint's files with what transformers expects: names, types, shapes, file sizes and the index.

    Reads headers only, so that it takes seconds at full size; the weights' values are not looked at. Returns the
    numbers of `tensors`, `files`, `bytes` (of tensors) and `parameters` (weights after dequantization). Raises
    ModelError naming the first ten differences, None for what is absent, or the file that cannot be read.
    """
    if not is_checkpoint(directory):
        raise ModelError(f"{directory} holds no config.json of model_type gpt_oss")
    stored: dict[str, tuple[str | int, ...]] = {}  # type and shape of each tensor
    shards: dict[str, str] = {}  # the file that holds it
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  not a dictionary
                    tensor = file.get_slice(name)
                    stored[name], shards[name] = (tensor.get_dtype(), *tensor.get_shape()), path.name
        except (OSError, SafetensorError) as error:  # no safetensors, or another size than its header says
            raise ModelError(f"cannot read {path}: {error}") from error
    tensors = expected_tensors(AutoConfig.from_pretrained(directory))
    expected = {name: (DTYPES[tensor.dtype], *tensor.shape) for name, tensor in tensors.items()}
    different = sorted({name for name, _ in expected.items() ^ stored.items()})
    problems = [f"{name} is {stored.get(name)}, not {expected.get(name)}" for name in different]
    index, files = directory / WEIGHTS_INDEX, len(set(shards.values()))
    indexed = read_json(index, (FileNotFoundError,)).get("weight_map")
    if indexed != shards and (index.is_file() or files > 1):
        problems.insert(0, f"{index.name} does not say where the tensors are")
    if problems:
        summary = f"{directory} is not a complete gpt-oss checkpoint, {len(problems)} problems: "
        raise ModelError(summary + "; ".join(problems[:10]))
    parameters = count_parameters(read_json(directory / "config.json"))["total"]
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {"tensors": len(stored), "files": files, "bytes": size, "parameters": parameters}
