# SPDX-License-Identifier: Apache-2.0
"""The names of a checkpoint's tensors: those of transformers' own model, and what differs from them."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo.model.write_checkpoint import expected_tensors
from grpo.output.durable import read_json
from grpo.plan.tensors import listed_tensors, names_fault, tensor_names


@pytest.mark.parametrize("is_mxfp4", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_names_are_those_of_transformers(tiny, is_mxfp4, has_bias):
    config = read_json(tiny / "config.json") | {"attention_bias": has_bias}
    if not is_mxfp4:
        del config["quantization_config"]
    assert tensor_names(config, is_mxfp4) == expected_tensors(config).keys()
    layers, projections = config["num_hidden_layers"], 4
    with_bias = tensor_names(config | {"attention_bias": True}, is_mxfp4)
    assert len(with_bias - tensor_names(config, is_mxfp4)) == (0 if has_bias else layers * projections)


def write_weights(folder, names):
    save_file({name: np.zeros(1) for name in names}, folder / "model.safetensors")


def test_tensors_that_differ_are_named(tiny, tmp_path):
    """Of a BF16 checkpoint in a single file, from its header."""
    config = {name: value for name, value in read_json(tiny / "config.json").items() if name != "quantization_config"}
    names = tensor_names(config, False)
    assert names_fault(tmp_path, config, False) is None, "nothing is there yet"
    write_weights(tmp_path, names)
    assert names_fault(tmp_path, config, False) is None
    assert names_fault(tmp_path, config, True).startswith("its weights lack 12 tensors (model.layers.0.mlp.exp")
    write_weights(tmp_path, names - {"model.layers.2.self_attn.sinks"} | {"value_head.weight"})
    fault = "its weights lack model.layers.2.self_attn.sinks and hold value_head.weight, which this program does not"
    assert names_fault(tmp_path, config, False).startswith(fault)
    write_weights(tmp_path, names - {"lm_head.weight"})
    assert names_fault(tmp_path, config, False) == "its weights lack lm_head.weight"
    assert names_fault(tmp_path, config | {"tie_word_embeddings": True}, False) is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b"null"])
def test_a_damaged_header_is_left_to_the_library_that_loads_it(tiny, tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert names_fault(tmp_path, read_json(tiny / "config.json"), True) is None
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    assert not listed_tensors(tmp_path), "reading a pipe would not end"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    assert not listed_tensors(tmp_path)
