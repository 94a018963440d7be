# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: written as transformers loads them, and never over anything else."""

import os

import pytest
import torch
from expert_models import stock_model
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from grpo.common import InputError
from grpo.model.write_checkpoint import new_directory
from grpo.plan.hub import TINY_PATH
from scripts.dev.gptoss_format import GPT_OSS_20B
from scripts.dev.random_weights import write_full

SMALL = GPT_OSS_20B | {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "head_dim": 16,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 800,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_shards():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.model.write_checkpoint.SHARD_BYTES", 100_000)
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random checkpoint in several shards, with the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("full") / "model"
    write_full(folder, SMALL, TINY_PATH, "cpu")
    return folder


def test_transformers_loads_a_checkpoint_in_several_shards_bit_for_bit(small):
    model = stock_model(small)
    loaded, files = model.state_dict(), list(small.glob("*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        tensors[name] = convert_moe_packed_tensors(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
    assert len(files) > 1 and tensors.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert model.config.layer_types == ["sliding_attention", "full_attention"]


def test_a_folder_is_written_by_one_process_and_what_a_killed_one_left_is_removed(tmp_path):
    out, left = tmp_path / "model", tmp_path / ".model.tmp"
    left.mkdir()
    (left / "half").write_text("x")
    with new_directory(out) as folder:
        (folder / "whole").write_text("x")
        with pytest.raises(InputError, match="another process is writing"), new_directory(out):
            pass
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "whole"]
    with pytest.raises(InputError, match="not empty"), new_directory(out):
        pass


@pytest.mark.parametrize(("umask", "modes"), [(0o022, (0o755, 0o644)), (0o077, (0o700, 0o600))])
def test_a_written_folder_is_as_readable_as_the_umask_says(tmp_path, umask, modes):
    before = os.umask(umask)
    try:
        with new_directory(tmp_path / "model") as folder:
            (folder / "weights").write_text("x")
    finally:
        os.umask(before)
    paths = tmp_path / "model", tmp_path / "model" / "weights"
    assert tuple(path.stat().st_mode & 0o777 for path in paths) == modes
