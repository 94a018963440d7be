# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints in gpt-oss's format; their folder is either complete or absent."""

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM

from grpo.common import InputError
from grpo.output.durable import locked
from grpo.plan.tensors import WEIGHTS_INDEX

BLOCK = 32  # number of elements that share a scale in MXFP4
SHARD_BYTES = 4 * 2**30
MakeTensor = Callable[[str, torch.Tensor], torch.Tensor]  # (name, meta tensor of that type and shape) -> tensor


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield an empty sibling of `out` that becomes `out` by a rename if the body succeeds and is removed if not.

    Files of a killed process in the sibling are deleted first. Raises InputError if `out` is not empty, or if another
    process holds the lock on the sibling; the system releases it when that process ends."""
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty: remove it, or choose another folder")
    temporary = out.with_name(f".{out.name}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    with locked(temporary) as is_free:
        if not is_free:
            raise InputError(f"another process is writing {out}")
        for leftover in temporary.iterdir():
            leftover.unlink()
        try:
            yield temporary
            os.umask(umask := os.umask(0o077))  # The umask can be read only by setting another one.
            for path in filter(Path.is_file, temporary.rglob("*")):
                path.chmod(0o666 & ~umask)  # safetensors makes files that only their owner can read.
            os.replace(temporary, out)  # This replaces an empty folder as well.
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def expected_tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint with this config.json by name, on the meta device.

    The tensors are those of transformers' own model in BF16. With a quantization_config the expert matrices are in
    MXFP4, and then transposed relative to the modules: rows are outputs, the quantized last dimension is the input,
    and the rows of gate_up_proj alternate between gate and up."""
    own = GptOssConfig.from_dict(copy.deepcopy(dict(config)))  # It writes rope_theta into rope_scaling.
    quantized = getattr(own, "quantization_config", None) is not None
    with torch.device("meta"):
        expected: dict[str, torch.Tensor] = {}
        for name, tensor in GptOssForCausalLM(own).state_dict().items():
            if quantized and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, inputs, outputs = tensor.shape
                shape = experts, outputs, inputs // BLOCK
                expected[f"{name}_blocks"] = torch.empty(*shape, BLOCK // 2, dtype=torch.uint8)
                expected[f"{name}_scales"] = torch.empty(shape, dtype=torch.uint8)
            else:
                expected[name] = torch.empty(tensor.shape, dtype=torch.bfloat16)
    return expected


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(directory: Path, expected: Mapping[str, torch.Tensor], make: MakeTensor) -> None:
    """Write the tensors that `make` supplies for `expected` (meta tensors by name) to shards of SHARD_BYTES, with an
    index. Memory holds one shard at a time."""
    split = split_torch_state_dict_into_shards(dict(expected), max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        # No variable refers to the tensors, because it would keep a shard in memory while the next one is made.
        save_file({name: make(name, expected[name]).contiguous() for name in names}, directory / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(directory / WEIGHTS_INDEX, index)
