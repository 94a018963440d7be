# SPDX-License-Identifier: Apache-2.0
"""The small files of a model, and what is wrong with them."""

import json

import pytest
from machines import only

from grpo.common import Problems
from grpo.plan.hub import REAL_CONFIG, find_model
from grpo.plan.tensors import tensor_names


@pytest.mark.parametrize("model_id", ["./nowhere", "nowhere", "a/b/c", ""])
def test_unknown_models(model_id):
    assert find_model(model_id, problems := Problems()) is None
    assert "neither a folder nor a Hub id" in only(problems)


def quantized(value):
    return json.dumps(REAL_CONFIG | {"quantization_config": value})


FOLDERS = [
    ('{"model_type": "qwen2"}', "of type qwen2, and this program trains gpt-oss (type gpt_oss). Set MODEL_ID="),
    ('{"model_type": "gpt_oss"}', "config.json lacks hidden_size"),
    ("{", "config.json cannot be read"),
    (json.dumps(REAL_CONFIG), "tokenizer.json is missing"),
    (None, "config.json is missing"),
    (json.dumps(REAL_CONFIG | {"num_hidden_layers": None}), "config.json: `num_hidden_layers` is not a number"),
    (json.dumps(REAL_CONFIG | {"hidden_size": "2880"}), "config.json: `hidden_size` is not a number"),
    (quantized([]), "`quantization_config` is not an object"),
    (quantized({}), "its weights are quantized by an unnamed method, and this program trains MXFP4 experts or BF16"),
    (quantized({"quant_method": "fp8"}), "are quantized by fp8, and"),
]


@pytest.mark.parametrize(("config", "message"), FOLDERS)
def test_folders_that_are_no_gpt_oss(tmp_path, config, message):
    if config:
        (tmp_path / "config.json").write_text(config)
    assert find_model(str(tmp_path), problems := Problems()) is None
    assert message in only(problems) and only(problems).startswith(f"MODEL_ID={tmp_path}: ")


@pytest.mark.parametrize("weight_map", [["one.safetensors"], {"lm_head.weight": 3}, None])
def test_an_index_that_names_no_files(tmp_path, weight_map):
    (tmp_path / "config.json").write_text(json.dumps(REAL_CONFIG))
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert find_model(str(tmp_path), problems := Problems()) is None
    assert "model.safetensors.index.json cannot be read (`weight_map` is not a" in only(problems)


def test_every_shard_that_the_index_names_is_there(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(REAL_CONFIG))
    (tmp_path / "tokenizer.json").touch()
    find_model(str(tmp_path), problems := Problems())
    assert "model.safetensors is missing" in only(problems)
    names = tensor_names(REAL_CONFIG, is_mxfp4=True)
    index = {"weight_map": dict.fromkeys(names, "two.safetensors") | {"lm_head.weight": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").touch()
    find_model(str(tmp_path), problems := Problems())
    assert "two.safetensors is missing" in only(problems)
