# SPDX-License-Identifier: Apache-2.0
"""Models without vLLM or a trainer: how they hold their experts, and how much they generate at once."""

import dataclasses
import json
import shutil

import pytest
import torch
from ask import parse_args
from helpers import QUESTION, RENDERED
from machines import CPU, H100, only

from grpo.common import InputError, Problems
from grpo.evaluate.ask import serve_commands
from grpo.evaluate.evaluate_adapter import choose_engine
from grpo.evaluate.models import load_torch_model, settings_alone, start_model
from grpo.evaluate.saved_adapter import check_model, load_run_settings, recorded_settings
from grpo.model.experts import quantized_experts
from grpo.plan.hub import REAL_CONFIG, find_model
from grpo.settings.table import Settings

BF16 = REAL_CONFIG | {"quantization_config": None}


@pytest.mark.parametrize(
    ("experts", "config", "free", "chosen", "batch"),
    [
        ("shared", REAL_CONFIG, 79.0, "mxfp4", 64),
        ("paged", REAL_CONFIG, 79.0, "mxfp4", 64),
        (None, REAL_CONFIG, 79.0, "mxfp4", 64),  # An adapter without a record.
        ("bf16", REAL_CONFIG, 79.0, "bf16", 64),
        ("bf16", REAL_CONFIG, 47.0, "bf16", 8),
        ("bf16", REAL_CONFIG, 23.5, "mxfp4", 32),  # A card of 24 GB.
        ("shared", REAL_CONFIG, 10.0, "mxfp4", 1),  # Nothing fits: the least is tried.
        ("bf16", BF16, 23.5, "bf16", 1),
        ("shared", BF16, 79.0, "bf16", 64),
        ("bf16", REAL_CONFIG, 0.0, "bf16", 64),  # No GPU.
        ("shared", REAL_CONFIG, 0.0, "mxfp4", 64),
        (None, REAL_CONFIG, 0.0, "bf16", 64),
    ],
)
def test_experts_are_held_as_in_the_run_where_that_fits(experts, config, free, chosen, batch):
    machine = dataclasses.replace(H100, gpu_free=free) if free else CPU
    settings = Settings(EXPERTS=experts, MAX_PROMPT_LEN=2048, MAX_COMPLETION_LEN=4000)
    alone = settings_alone(settings, config, machine)
    assert (chosen, batch) == (alone.EXPERTS, alone.GENERATION_BATCH)
    assert dataclasses.replace(alone, EXPERTS=experts, GENERATION_BATCH=None) == settings, "nothing else changes"
    assert settings_alone(dataclasses.replace(settings, GENERATION_BATCH=5), config, machine).GENERATION_BATCH == 5


def test_an_adapter_is_asked_with_the_experts_of_its_run(saved_adapter, tmp_path, monkeypatch):
    """The environment may say otherwise, and the answers are the same."""
    record = {"settings": {"MODEL_ID": "tiny", "EXPERTS": "shared", "MAX_COMPLETION_LEN": 8}}
    adapter = tmp_path / "run"
    adapter.mkdir()
    for path in saved_adapter.iterdir():
        (adapter / path.name).write_bytes(path.read_bytes())
    (adapter / "settings.json").write_text(json.dumps(record))
    files, answers = find_model("tiny", Problems()), []
    for replaced, is_packed in (({}, True), ({"EXPERTS": "bf16"}, False)):
        for name, value in replaced.items():
            monkeypatch.setenv(name, value)
        settings, problems = load_run_settings(adapter)
        assert not problems and replaced.get("EXPERTS", "shared") == settings.EXPERTS
        model = start_model(settings, files, adapter, CPU, use_vllm=False)
        assert bool(list(quantized_experts(model.network))) == is_packed
        answers.append(model.complete([RENDERED.format(QUESTION)] * 2, greedy=True))
    assert answers[0] == answers[1] and len(answers[0][0]) > 1


def test_vllm_does_not_answer_for_a_model_that_it_computes_otherwise(tiny, tmp_path, saved_adapter):
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    files = find_model(str(folder), Problems())
    serve = parse_args([str(saved_adapter), "--serve", "--model", str(folder)])
    with pytest.raises(InputError, match=r"rms_norm_eps is 1e-06 instead of 1e-05\. .* Ask without --serve"):
        serve_commands(serve)
    with pytest.raises(InputError, match=r"rms_norm_eps is 1e-06 instead of 1e-05\. .* Set USE_VLLM=0"):
        choose_engine(Settings(USE_VLLM=True), files, H100)
    assert choose_engine(Settings(USE_VLLM=False), files, H100)[0] is False
    (folder / "config.json").write_text(json.dumps(config | {"swiglu_limit": 5.0}))
    check_model(Settings(MODEL_ID=str(folder)), None, CPU, problems := Problems())
    assert "swiglu_limit is 5.0 instead of 7.0" in only(problems)


def test_evaluations_sample_from_all_tokens():
    """transformers' own default leaves all but the 50 likeliest out, and rollouts do not."""
    settings = Settings(MODEL_ID="tiny", EXPERTS="bf16", MAX_COMPLETION_LEN=1)
    model = load_torch_model(settings, find_model("tiny", Problems()), None, "eager")
    with torch.no_grad():  # Nearly equal: of equal ones, the 50 likeliest would be all.
        model.network.lm_head.weight *= 1e-3
    tokens = {ids[0] for ids in model.complete(["hour 8"] * 256, 256)}
    assert len(tokens) > 150, "of some 800 nearly equally likely ones"


def test_what_its_rewards_need_is_a_runs_own(tmp_path):
    settings = {"REWARDS": "overlong", "OVERLONG_SHARE": 0.5, "INVALID_REWARD": -2.0}
    (tmp_path / "settings.json").write_text(json.dumps({"settings": settings}))
    recorded = recorded_settings(tmp_path, {"INVALID_REWARD": "-3"})
    assert recorded == {"REWARDS": "overlong", "OVERLONG_SHARE": "0.5", "INVALID_REWARD": "-3"}
