# SPDX-License-Identifier: Apache-2.0
"""The small files of a model, and what is wrong with them."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from machines import only

from grpo.plan.hub import REAL_CONFIG, REAL_MODEL, ModelFiles, checkpoint_gib, find_model
from grpo.plan.machine import GIB
from grpo.settings import Problems


@pytest.mark.parametrize("model_id", ["./nowhere", "nowhere", "a/b/c", ""])
def test_unknown_models(model_id):
    assert find_model(model_id, problems := Problems()) is None
    assert "neither a folder nor a Hub id" in only(problems)


FOLDERS = [
    ('{"model_type": "qwen2"}', "of type qwen2, and this program trains gpt-oss (type gpt_oss). Set MODEL_ID="),
    ('{"model_type": "gpt_oss"}', "config.json lacks hidden_size"),
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


def test_what_cannot_be_read_of_a_model_is_one_line(tiny, tmp_path):
    template = shutil.copytree(tiny, tmp_path / "model") / "chat_template.jinja"
    template.write_bytes(b"\xff")
    assert find_model(str(template.parent), problems := Problems()) is None
    assert "can't decode byte" in only(problems) and len(problems[0].splitlines()) == 1


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
