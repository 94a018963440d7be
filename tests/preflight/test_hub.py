# SPDX-License-Identifier: Apache-2.0
"""The small files of a model: found, read, refused. Run: python -m pytest tests/preflight/test_hub.py"""

from __future__ import annotations

import json
import os

import pytest
import torch
from machines import only
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.preflight.hub import REAL_CONFIG, REAL_MODEL, ModelFiles, checkpoint_gib, count_parameters, find_model
from grpo.preflight.machine import GIB
from grpo.settings import Problems


def test_parameter_count_is_transformers_own(tiny):
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny))
    assert count_parameters(config)["total"] == model.num_parameters()


@pytest.mark.parametrize("model_id", ["./nowhere", "nowhere", "a/b/c"])
def test_unknown_models(model_id):
    problems = Problems()
    assert find_model(model_id, problems) is None
    assert "neither a folder nor a Hub id" in only(problems)


FOLDERS = [
    ('{"model_type": "llama"}', "model_type 'llama'"), ('{"model_type": "gpt_oss"}', "and lacks hidden_size"),
    ("{", "config.json cannot be read"), (json.dumps(REAL_CONFIG), "tokenizer.json is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), FOLDERS)
def test_folders_that_are_no_gpt_oss(tmp_path, config, message):
    problems = Problems()
    (tmp_path / "config.json").write_text(config)
    assert find_model(str(tmp_path), problems) is None
    assert message in only(problems) and only(problems).startswith(f"MODEL_ID={tmp_path}: ")


def test_every_shard_that_the_index_names_is_there(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(REAL_CONFIG))
    (tmp_path / "tokenizer.json").touch()
    problems = Problems()
    find_model(str(tmp_path), problems)
    assert "model.safetensors is missing" in only(problems)
    problems.clear()
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").touch()
    find_model(str(tmp_path), problems)
    assert "two.safetensors is missing" in only(problems)


def test_what_was_downloaded_counts(tmp_path):
    files = ModelFiles(tmp_path, {})
    assert checkpoint_gib(REAL_MODEL, ModelFiles(None, {})) == checkpoint_gib("mine", files) == 12.9
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 5 * GIB)
    assert checkpoint_gib(REAL_MODEL, files) == 12.9, "a download that broke off"
    assert checkpoint_gib("mine", files) == 5.0
