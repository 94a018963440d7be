# SPDX-License-Identifier: Apache-2.0
"""The small files of a model: found, read, refused. Run: python -m pytest tests/preflight/test_hub.py"""

from __future__ import annotations

import json
import os

import pytest
import torch
from conftest import run_script
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


def test_a_model_of_the_hub_is_taken_from_its_cache(tiny, tmp_path):
    """The layout that huggingface_hub keeps; offline, so that nothing but the cache can answer."""
    repository = tmp_path / "hf" / "hub" / "models--someone--small-gpt-oss"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "0123abc").symlink_to(tiny)
    settings = {
        "HF_HOME": tmp_path / "hf", "MODEL_ID": "someone/small-gpt-oss", "DATA": "data/tes_train_compact.csv",
        "OUTPUT_DIR": tmp_path / "run", "MAX_COMPLETION_LEN": 8, "TOTAL_STEPS": 1, "PROMPTS_PER_STEP": 2,
        "NUM_GENERATIONS": 2, "IGNORE_VARS": "", "EVAL_SAMPLES": 0,
    }  # fmt: skip
    done = run_script(**settings)
    assert done.returncode == 0, done.stdout + done.stderr
    adapter = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "someone/small-gpt-oss"
    done = run_script("--check", **settings | {"MODEL_ID": "someone/other"})
    assert done.returncode == 2 and "someone/other is not in the cache and cannot be fetched" in done.stderr
