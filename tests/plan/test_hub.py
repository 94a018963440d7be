# SPDX-License-Identifier: Apache-2.0
"""The small files of a model, and what is wrong with them. Run: python -m pytest tests/plan/test_hub.py"""

from __future__ import annotations

import json
import os
import shutil

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from machines import CPU, only
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.data.files import Row
from grpo.data.prompts import render_rows
from grpo.plan.hub import REAL_CONFIG, REAL_MODEL, ModelFiles, checkpoint_gib, count_parameters, find_model
from grpo.plan.machine import GIB
from grpo.plan.memory import Shapes, plan_memory
from grpo.settings import Problems, Settings


def test_parameter_count_is_transformers_own(tiny):
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny))
    assert count_parameters(config)["total"] == model.num_parameters()


@pytest.mark.parametrize("model_id", ["./nowhere", "nowhere", "a/b/c", ""])
def test_unknown_models(model_id):
    problems = Problems()
    assert find_model(model_id, problems) is None
    assert "neither a folder nor a Hub id" in only(problems)


FOLDERS = [
    ('{"model_type": "qwen2"}', "of type qwen2, and this program trains gpt-oss (type gpt_oss). Set MODEL_ID="),
    ('{"model_type": "gpt_oss"}', "config.json lacks hidden_size"), ("{}", "says model_type None"),
    ('{"model_type": 3}', "says model_type 3"),
    ("{", "config.json cannot be read"), (json.dumps(REAL_CONFIG), "tokenizer.json is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), FOLDERS)
def test_folders_that_are_no_gpt_oss(tmp_path, config, message):
    problems = Problems()
    (tmp_path / "config.json").write_text(config)
    assert find_model(str(tmp_path), problems) is None
    assert message in only(problems) and only(problems).startswith(f"MODEL_ID={tmp_path}: ")
    (tmp_path / "config.json").unlink()
    problems.clear()
    assert find_model(str(tmp_path), problems) is None and "config.json is missing" in only(problems)


def test_damaged_files_are_one_line(tiny, tmp_path):
    """Sizes that no plan can be made of, files that the loaders of a run would raise on."""
    shutil.copytree(tiny, tmp_path / "model", ignore=shutil.ignore_patterns("warmup.json"))
    config = json.loads((tiny / "config.json").read_text())
    damages = [
        ("config.json", json.dumps(config | {"num_hidden_layers": 10**9}), "num_hidden_layers 1000000000, which"),
        ("config.json", json.dumps(config | {"hidden_size": "64"}), "config.json says hidden_size '64'"),
        ("config.json", json.dumps(config | {"layer_types": 3}), "config.json says layer_types 3"),
        ("config.json", json.dumps(config | {"quantization_config": "mxfp4"}), "quantization_config 'mxfp4'"),
        ("config.json", "[" * 10_000, "config.json cannot be read (maximum recursion"),
        ("generation_config.json", "{", "generation_config.json cannot be read"),
        ("generation_config.json", '{"eos_token_id": [1, "2"]}', "eos_token_id [1, '2'], which is no token's number"),
        ("generation_config.json", '{"eos_token_id": [null]}', "eos_token_id [None], which is no token's number"),
        ("config.json", json.dumps(config | {"attention_dropout": 1e9}), "says attention_dropout 1000000000.0"),
        ("chat_template.jinja", b"\0\0", "chat_template.jinja cannot be read (it holds no text)"),
        ("generation_config.json", json.dumps({"eos_token_id": 10**30}), "which is no token's number"),
        ("tokenizer_config.json", "]", "tokenizer_config.json cannot be read"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
        ("model.safetensors.index.json", '{"weight_map": [3]}', "names no files of weights"),
    ]
    for name, text, words in damages:
        path, problems = tmp_path / "model" / name, Problems()
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert find_model(str(tmp_path / "model"), problems) is None
        assert words in only(problems) and len(problems[0].splitlines()) == 1
        path.unlink() if before is None else path.write_bytes(before)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"chat_template": [1]}')
    assert find_model(str(tmp_path / "model"), problems := Problems()) is None
    assert "chat_template in tokenizer_config.json is no text" in only(problems)


SMALL = ("tokenizer.json", "chat_template.jinja", "config.json", "generation_config.json", "tokenizer_config.json")


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.sampled_from(SMALL), st.booleans(), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_model_folder_that_is_cut_or_has_a_bit_flipped(tiny, tmp_path, name, cut, place, bit):
    """Used as it is, or one line: never an exception."""
    folder, problems = tmp_path / "model", Problems()
    if not folder.exists():
        shutil.copytree(tiny, folder)
    whole = (tiny / name).read_bytes()
    at = int(place * len(whole))
    changed = whole[:at] if cut else whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    (folder / name).write_bytes(changed)
    files = find_model(str(folder), problems)
    if files:
        row = Row("d.csv", 1, (("system", "Be brief."), ("user", "hour 14 store 50")), (), {})
        render_rows(Settings(MODEL_ID=str(folder)), [row], files.template, files.tokenizer, problems)
        plan_memory(Settings(), Shapes(files.config, CPU, 100, "eager", "prefix"))
    assert len(problems) == (not files) or len(problems) == 1
    assert all(len(problem.splitlines()) == 1 for problem in problems)
    (folder / name).write_bytes(whole)


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
