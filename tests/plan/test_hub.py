# SPDX-License-Identifier: Apache-2.0
"""The small files of a model, and what is wrong with them."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from machines import only
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.plan.hub import REAL_CONFIG, REAL_MODEL, ModelFiles, checkpoint_gib, count_parameters, find_model, read_json
from grpo.plan.machine import GIB
from grpo.settings import Problems


def test_parameter_count_is_transformers_own(tiny):
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny))
    assert count_parameters(config)["total"] == model.num_parameters()


@pytest.mark.parametrize("model_id", ["./nowhere", "nowhere", "a/b/c", ""])
def test_unknown_models(model_id):
    assert find_model(model_id, problems := Problems()) is None
    assert "neither a folder nor a Hub id" in only(problems)


FOLDERS = [
    ('{"model_type": "qwen2"}', "of type qwen2, and this program trains gpt-oss (type gpt_oss). Set MODEL_ID="),
    ('{"model_type": "gpt_oss"}', "config.json lacks hidden_size"),
    ('{"model_type": 3}', "says model_type 3"),
    ("{", "config.json cannot be read"),
    (json.dumps(REAL_CONFIG), "tokenizer.json is missing"),
    (None, "config.json is missing"),
]


@pytest.mark.parametrize(("config", "message"), FOLDERS)
def test_folders_that_are_no_gpt_oss(tmp_path, config, message):
    if config:
        (tmp_path / "config.json").write_text(config)
    assert find_model(str(tmp_path), problems := Problems()) is None
    assert message in only(problems) and only(problems).startswith(f"MODEL_ID={tmp_path}: ")


DAMAGES = [
    ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, which"),
    ("config.json", {"hidden_size": "64"}, "config.json says hidden_size '64'"),
    ("config.json", {"layer_types": 3}, "config.json says layer_types 3"),
    ("config.json", {"quantization_config": "mxfp4"}, "quantization_config 'mxfp4'"),
    ("config.json", {"attention_dropout": 1e9}, "says attention_dropout 1000000000.0"),
    ("config.json", b"[" * 10_000, "config.json cannot be read (maximum recursion"),
    ("generation_config.json", b"{", "generation_config.json cannot be read"),
    ("generation_config.json", {"eos_token_id": [1, "2"]}, "eos_token_id [1, '2'], which is no token's number"),
    ("generation_config.json", {"eos_token_id": 10**30}, "which is no token's number"),
    ("chat_template.jinja", b"\0\0", "chat_template.jinja cannot be read (it holds no text)"),
    ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
    ("chat_template.jinja", None, "chat_template in tokenizer_config.json is no text"),
    ("model.safetensors.index.json", b'{"weight_map": [3]}', "names no files of weights"),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES)
def test_damaged_files_are_one_line(tiny, tmp_path, name, damage, words):
    """Sizes that no plan can be made of, files that the loaders of a run would raise on."""
    shutil.copytree(tiny, tmp_path / "model")
    path = tmp_path / "model" / name
    if damage is None:
        path.unlink()
        path.with_name("tokenizer_config.json").write_text('{"chat_template": [1]}')
    else:
        path.write_bytes(damage if isinstance(damage, bytes) else json.dumps({**read_json(path), **damage}).encode())
    assert find_model(str(tmp_path / "model"), problems := Problems()) is None
    assert words in only(problems) and len(problems[0].splitlines()) == 1


def test_every_shard_that_the_index_names_is_there(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(REAL_CONFIG))
    (tmp_path / "tokenizer.json").touch()
    find_model(str(tmp_path), problems := Problems())
    assert "model.safetensors is missing" in only(problems)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").touch()
    find_model(str(tmp_path), problems := Problems())
    assert "two.safetensors is missing" in only(problems)


def test_what_was_downloaded_counts(tmp_path):
    files = ModelFiles(tmp_path, {})
    assert checkpoint_gib(REAL_MODEL, ModelFiles(None, {})) == checkpoint_gib("mine", files) == 12.9
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 5 * GIB)
    assert checkpoint_gib(REAL_MODEL, files) == 12.9, "a download that broke off"
    assert checkpoint_gib("mine", files) == 5.0
