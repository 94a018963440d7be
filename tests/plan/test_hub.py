# SPDX-License-Identifier: Apache-2.0
"""The small files of a model, and what is wrong with them."""

import json

import pytest
from machines import only

from grpo.common import Problems
from grpo.plan.hub import REAL_CONFIG, DraftModel, find_draft, find_model
from grpo.plan.machine import GIB
from grpo.plan.tensors import tensor_names


@pytest.mark.parametrize("model_id", ["./nowhere", "nowhere", "a/b/c", ""])
def test_unknown_models(model_id):
    assert find_model(model_id, problems := Problems()) is None
    assert "neither a folder nor a Hub id" in only(problems)


OTHER_METHODS = ("bitsandbytes", "fp8", "quark", "compressed-tensors", "gptq", "awq")


def quantized(value):
    return json.dumps(REAL_CONFIG | {"quantization_config": value})


FOLDERS = [
    ('{"model_type": "qwen2"}', "of type qwen2, and this program trains gpt-oss (type gpt_oss). Set MODEL_ID="),
    ('{"model_type": "gpt_oss"}', "config.json lacks hidden_size"),
    ("{", "config.json cannot be read"),
    (json.dumps(REAL_CONFIG), "tokenizer.json is missing"),
    (None, "config.json is missing"),
    (quantized([]), "`quantization_config` is not an object"),
    (quantized({}), "its weights are quantized by an unnamed method, and this program trains MXFP4 experts or BF16"),
    *((quantized({"quant_method": name}), f"are quantized by {name}, and") for name in OTHER_METHODS),
]


@pytest.mark.parametrize(("config", "message"), FOLDERS)
def test_folders_that_are_no_gpt_oss(tmp_path, config, message):
    if config:
        (tmp_path / "config.json").write_text(config)
    assert find_model(str(tmp_path), problems := Problems()) is None
    assert message in only(problems) and only(problems).startswith(f"MODEL_ID={tmp_path}: ")


# What vLLM needs to know of a draft for gpt-oss-20b, in EAGLE-3's own format.
DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 2880, "vocab_size": 201088, "num_key_value_heads": 8,
    "head_dim": 64, "num_hidden_layers": 1,
}  # fmt: skip


def write_draft(folder, config=DRAFT, size=2048):
    """A folder with a draft's config.json and as many bytes of weights; None writes no config.json."""
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    if size:
        (folder / "model.safetensors").write_bytes(bytes(size))
    return str(folder)


@pytest.mark.parametrize(
    "config",
    [DRAFT, {"architectures": ["Eagle3Speculator"], "transformer_layer_config": DRAFT | {"architectures": ["Llama"]}}],
)
def test_a_draft_in_each_format(tmp_path, config):
    assert find_draft(write_draft(tmp_path, config), REAL_CONFIG, problems := Problems()) == DraftModel(1, 2048 / GIB)
    assert find_draft("", REAL_CONFIG, problems) is None and not problems, "none is asked for"
    assert find_draft(str(tmp_path), None, problems) and not problems, "the model has problems of its own"


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (None, 1, "config.json"),
        ({**DRAFT, "transformer_layer_config": 3}, 1, "`transformer_layer_config` is not an object"),
        ({**DRAFT, "num_hidden_layers": "one"}, 1, "`num_hidden_layers` is not a number"),
        ({**DRAFT, "architectures": ["LlamaForCausalLM"]}, 1, "are ['LlamaForCausalLM'], none of EAGLE-3"),
        ({**DRAFT, "hidden_size": 4096, "vocab_size": 8}, 1, "hidden_size is 4096, not 2880, vocab_size is 8, not"),
        ({key: DRAFT[key] for key in DRAFT if key != "head_dim"}, 1, "head_dim is None, not 64"),
        (DRAFT, 0, "no .safetensors"),
    ],
)
def test_drafts_that_do_not_fit(tmp_path, config, size, message):
    find_draft(write_draft(tmp_path, config, size), REAL_CONFIG, problems := Problems())
    assert message in only(problems) and only(problems).startswith(f"DRAFT_MODEL={tmp_path}: ")


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
