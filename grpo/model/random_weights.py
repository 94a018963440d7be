# SPDX-License-Identifier: Apache-2.0
"""A full-size checkpoint of random weights, and the check of any checkpoint."""

from __future__ import annotations

import contextlib
import json
import lzma
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GptOssForCausalLM

from grpo.model.gptoss_format import (
    BLOCK,
    E2M1,
    E8M0_BIAS,
    GPT_OSS_20B,
    SHARD_BYTES,
    SPECIAL_TOKENS,
    ModelError,
    Shape,
    TensorSpec,
    chat_template,
    checkpoint_bytes,
    config_dict,
    generation_config_dict,
    tensor_specs,
    tokenizer_config_dict,
    write_json,
    write_weights,
)
from grpo.preflight.hub import _is_checkpoint

# Directories: nothing half-written under its final name, nothing overwritten by accident


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
            what this script could have written is ever replaced).
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


# Full: gpt-oss-20b's shapes, random weights

# Ids of openai/gpt-oss-20b, for checkpoints without a tokenizer.
O200K_IDS = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
# Standard deviations of the random weights, chosen so that rounding stays rounding. With 0.02 everywhere (gpt-oss's
# initializer_range) the model is chaotic: experts write as much into the residual stream as all there is, the fourth and
# the fifth expert of a token are often nearly tied, so a rounding error swaps them and grows from layer to layer. Two
# exact BF16 implementations then disagree by 0.25 to 0.5 nats a token, which hides most bugs. So experts
# write little (a swap changes little), attention writes more (an adapter on it must show), router scores are spread (the
# fourth expert weighs little), and embeddings are large against what one layer adds. docs/models.md has the figures.
# Matrices: times 1 / sqrt(fan-in), so that other widths behave alike.
MATRIX_GAIN = {
    "q_proj": 0.75,  # attention scores N(0, 1), with YaRN's factor of 1.81 on them: neither flat nor one-hot
    "k_proj": 0.75,
    "v_proj": 1.0,
    "o_proj": 0.5,
    "router": 3.0,
    "gate_up_proj": 1.0,
    "down_proj": 0.1,
    "lm_head": 1.5,  # logits N(0, 1.5**2): sampled tokens vary, entropy is 1.1 nats below that of even chances
}
EMBEDDING_STD, SINK_STD, BIAS_STD = 1.0, 1.0, 0.02
E2M1_RMS = math.sqrt(sum(value**2 for value in E2M1) / len(E2M1))  # 2.926, of equally likely codes


def random_tensor(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Noise for one tensor of a full-size checkpoint, made on the generator's device; norms are ones.

    An expert's blocks are even random codes. Its scales are two neighbouring powers of two, the larger one as often as
    the standard deviation of `MATRIX_GAIN` needs.
    """

    device = generator.device
    *_, module, last = spec.name.split(".")
    if last.endswith("_blocks"):
        return torch.randint(0, 256, spec.shape, dtype=torch.uint8, device=device, generator=generator)
    if last.endswith("_scales"):
        scale = MATRIX_GAIN[last.removesuffix("_scales")] / math.sqrt(spec.shape[-1] * BLOCK) / E2M1_RMS
        exponent = math.floor(math.log2(scale))
        share = ((scale / 2.0**exponent) ** 2 - 1) / 3  # the mean of squares: (1 - share) * 1 + share * 4
        larger = torch.rand(spec.shape, device=device, generator=generator) < share
        return larger.to(torch.uint8) + (E8M0_BIAS + exponent)
    if "norm" in spec.name:
        return torch.ones(spec.shape, dtype=torch.bfloat16, device=device)
    if last == "sinks":
        std = SINK_STD
    elif last.endswith("bias"):
        std = BIAS_STD
    elif module == "embed_tokens":
        std = EMBEDDING_STD
    else:
        std = MATRIX_GAIN[module] / math.sqrt(spec.shape[-1])
    return torch.empty(spec.shape, dtype=torch.bfloat16, device=device).normal_(0.0, std, generator=generator)


def _read_tokenizer(source: Path) -> bytes:
    """The bytes of ``tokenizer.json`` or, unpacked, of ``tokenizer.json.xz`` in the directory `source`."""
    plain, packed = source / "tokenizer.json", source / "tokenizer.json.xz"
    try:
        if plain.is_file():
            data = plain.read_bytes()
        elif packed.is_file():
            data = lzma.decompress(packed.read_bytes())
        else:
            raise ModelError(f"{source} holds neither tokenizer.json nor tokenizer.json.xz")
        json.loads(data)
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise ModelError(f"cannot read the tokenizer in {source}: {error}") from error
    return data


def special_token_ids(tokenizer_json: bytes, vocab: int) -> dict[str, int]:
    """Ids of `SPECIAL_TOKENS` in a tokenizer.json.

    Raises:
        ModelError: if one is missing, or the tokenizer has ids that a model with `vocab` embeddings lacks.
    """
    content = json.loads(tokenizer_json)
    ids = {**content["model"]["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
    missing = [token for token in SPECIAL_TOKENS if token not in ids]
    if missing:
        raise ModelError(f"the tokenizer lacks Harmony's special tokens {', '.join(missing)}")
    if max(ids.values()) >= vocab:
        raise ModelError(f"the tokenizer has ids up to {max(ids.values())}, the model {vocab} embeddings")
    return {token: ids[token] for token in SPECIAL_TOKENS}


def write_full(
    out: Path,
    shape: Shape = GPT_OSS_20B,
    tokenizer: Path | None = None,
    device: str = "cpu",
    seed: int = 0,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint with random weights, streamed: peak memory is the largest tensor (1.1 GiB for gpt-oss-20b).

    Args:
        out: new directory.
        shape: sizes; the default is gpt-oss-20b's, 12.8 GiB on disk.
        tokenizer: directory with tokenizer.json or tokenizer.json.xz to copy; None leaves the model without one.
        device: where the noise is generated; the same seed gives other noise on another kind of device.
        seed: of the noise.
        force: replace an existing checkpoint.
        shard_bytes: limit of one safetensors file.

    Raises:
        ModelError: see `new_directory`, `require_space`, `special_token_ids`, `check_checkpoint`; also for a device
            that is not there.
    """
    if tokenizer is not None:
        tokenizer_json = _read_tokenizer(tokenizer)
        ids = special_token_ids(tokenizer_json, shape.vocab)
    else:
        # A smaller vocabulary has no such ids; the last ones stand in, so that generation still runs.
        ids = {token: min(n, shape.vocab - 1) for token, n in O200K_IDS.items()}
    require_space(out, checkpoint_bytes(shape) + 64 * 2**20)
    specs = tensor_specs(shape)
    with new_directory(out, force) as directory:
        try:
            generator = torch.Generator(device=device).manual_seed(seed)
        except RuntimeError as error:
            raise ModelError(f"--device {device} is not usable here: {str(error).splitlines()[0]}") from error
        write_weights(directory, specs, lambda spec: random_tensor(spec, generator), shard_bytes)
        write_json(directory / "config.json", config_dict(shape, ids))
        write_json(directory / "generation_config.json", generation_config_dict(ids))
        if tokenizer is not None:
            (directory / "tokenizer.json").write_bytes(tokenizer_json)
            write_json(directory / "tokenizer_config.json", tokenizer_config_dict())
            (directory / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")
        check_checkpoint(directory)
    return out


# Check: what is on disk against what transformers expects


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, without ``__metadata__``.

    Raises:
        ModelError: if the file is unreadable, or its size is not what its header promises (a truncated copy).
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            header = json.loads(file.read(length)) if length < size else None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file")
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        raise ModelError(f"{path} has {size} bytes, its header promises {end}")
    return header


def expected_tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, types and shapes that transformers' GptOssForCausalLM needs for the directory's config.json.

    Built from the model itself on the meta device, not from `tensor_specs`, so that the two check each other.
    """

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            expected[f"{name}_blocks"] = ("U8", (experts, outputs, inputs // BLOCK, BLOCK // 2))
            expected[f"{name}_scales"] = ("U8", (experts, outputs, inputs // BLOCK))
        else:
            expected[name] = ("BF16", tuple(tensor.shape))
    return expected


def check_checkpoint(directory: Path) -> dict[str, Any]:
    """Compare a checkpoint's files with what transformers expects: names, types, shapes, file sizes and the index.

    Reads headers only, so that it takes seconds at full size; the weights' values are not looked at.

    Returns:
        ``tensors``, ``files``, ``bytes`` (of tensors) and ``parameters`` (weights after dequantization).

    Raises:
        ModelError: naming every difference, at most ten of each kind.
    """
    if not _is_checkpoint(directory):
        raise ModelError(f"{directory} holds no config.json of model_type gpt_oss")
    index = directory / "model.safetensors.index.json"
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} holds no *.safetensors")
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    where: dict[str, str] = {}
    size = 0
    for path in files:
        for name, entry in read_header(path).items():
            found[name] = (entry["dtype"], tuple(entry["shape"]))
            where[name] = path.name
            size += entry["data_offsets"][1] - entry["data_offsets"][0]
    expected = expected_tensors(directory)
    problems = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:10])}"
        for what, names in (
            ("missing", expected.keys() - found.keys()),
            ("unexpected", found.keys() - expected.keys()),
            ("of another type or shape", {n for n in expected.keys() & found.keys() if expected[n] != found[n]}),
        )
        if names
    ]
    if len(files) > 1 and not index.is_file():
        problems.append(f"{len(files)} shards and no {index.name}")
    if index.is_file() and json.loads(index.read_text(encoding="utf-8")).get("weight_map") != where:
        problems.append(f"{index.name} does not say where the tensors are")
    if problems:
        raise ModelError(f"{directory} is not a complete gpt-oss checkpoint: " + "; ".join(problems))
    parameters = sum(
        math.prod(dims) * (2 if name.endswith("_blocks") else 1)
        for name, (_, dims) in found.items()
        if not name.endswith("_scales")
    )
    return {"tensors": len(found), "files": len(files), "bytes": size, "parameters": parameters}
