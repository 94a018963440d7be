# SPDX-License-Identifier: Apache-2.0
"""Both evaluations of a real run, and scripts/evaluate.py."""

import dataclasses
import json
import logging
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import evaluate as ev
import pytest
from closed_loop_schema import check_schema
from helpers import RENDERED, ROOT, write_csv
from machines import H100
from runs import plant_inputs, run_here
from safetensors.torch import load_file, save_file
from stub_vllm import stub_engine

import train_grpo
from grpo.common import Problems
from grpo.evaluate.models import start_vllm_model
from grpo.evaluate.progress import Progress
from grpo.evaluate.saved_adapter import recorded_settings
from grpo.output.durable import read_json, sealed
from grpo.plan.hub import find_model
from grpo.rollout.engine import EngineError
from grpo.settings.environment import load_settings
from grpo.settings.table import Settings
from grpo.tasks.tes.simulator import SIMULATOR, make_plan

PROFILE = ROOT / "data" / "profile_heldout.csv"
MODEL_POLICIES = ("base", "base_greedy", "trained", "trained_greedy")
SETTINGS = {
    "MODEL_ID": "tiny", "TOTAL_STEPS": 2, "SAVE_STEPS": 1, "PROMPTS_PER_STEP": 2, "NUM_GENERATIONS": 4,
    "EVAL_SAMPLES": 1, "DATA": "data/tes_heldout_compact.csv", "SEED": 5, "LEARNING_RATE": "1e-2", "EVAL_STEPS": 0,
    "TOP_P": 0.999,  # exact evaluations do not know it: these are sampled
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """Two steps with both evaluations; three windows, 12 held-out rows."""
    folder = tmp_path_factory.mktemp("evaluated")
    log = run_here(**SETTINGS | plant_inputs(folder, windows=3) | {"OUTPUT_DIR": folder / "run"})
    return SimpleNamespace(folder=folder / "run", log=log)


def test_a_run_leaves_both_evaluations(run):
    result = read_json(run.folder / "evaluation.json")
    assert result["temperature"] == 0.5 and result["exact"] is False
    for part in (result[name] for name in ("before", "before_greedy", "after", "after_greedy")):
        assert part["reward"] + part["regret"] == pytest.approx(result["oracle"])
        assert sum(part["action_counts"]) + part["unparsed"] == len(part["reward_by_prompt"]) == 12
        assert part["parse_rate"] == pytest.approx(1 - part["unparsed"] / 12)
    gain = result["after"]["reward"] - result["before"]["reward"]
    assert result["difference"]["reward"] == pytest.approx(gain)
    record = read_json(run.folder / "closed_loop.json")
    check_schema(record, set(MODEL_POLICIES))
    assert record["profiles"] == ["profile_heldout.csv"] and record["samples"] == 1
    assert len(record["windows"]) == 3 and record["totals"]["base"]["answers"] == 90
    assert record["sampling"]["prompt"] == "compact" and record["sampling"]["eval_temperature"] == 0.5
    for words in ("trained - base model", "trained against base", "base model, greedy", "best adapter: step"):
        assert words in run.log


def test_the_command_evaluates_an_adapter_and_its_base(run, tmp_path, capsys, monkeypatch):
    """On the windows of the run's EVAL_PROFILE, with its seeds: the figures of its own closed loop, at the same
    batches."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("EVAL_PROFILE", str(PROFILE))  # The demo's, which the run's record replaces.
    out = tmp_path / "out.json"
    arguments = [run.folder / "checkpoint-2", "--base-too", "--out", out]
    assert ev.main([str(argument) for argument in arguments]) == 0
    printed = capsys.readouterr().out
    assert "compact prompts (as in EVAL_DATA)" in printed and "such as 2025-09-01, are in DATA as well" in printed
    record, own = read_json(out), read_json(run.folder / "closed_loop.json")
    assert record["sampling"] == own["sampling"], "the run's settings, not the environment's"
    for name in MODEL_POLICIES:
        for mine, theirs in zip(record["windows"], own["windows"], strict=True):
            assert mine["policies"][name] == theirs["policies"][name]
    assert record["totals"]["base"] != record["totals"]["trained"]


def test_windows_are_those_of_the_option_else_of_the_run_else_of_the_demo(tmp_path):
    own = shutil.copy(PROFILE, tmp_path / "own.csv")
    cases = [([own], "missing.csv", "own.csv"), ([], own, "own.csv"), ([], "", PROFILE.name), ([], None, PROFILE.name)]
    for profiles, recorded, name in cases:
        problems = Problems()
        settings = Settings(EVAL_PROFILE=recorded and str(recorded))
        plan = SIMULATOR.plan_by_hand([str(path) for path in profiles], settings, "", problems)
        assert plan.profiles == (name,) and not problems


@pytest.mark.parametrize("data", ["own.csv", "gone.csv"])
def test_a_run_on_other_rows_is_told_so_before_it_controls_the_plant(data, tmp_path):
    write_csv(tmp_path / "own.csv", ["user", "answer"], [["Which city?", "Rome"]])
    plan = SIMULATOR.plan_by_hand([str(PROFILE)], Settings(DATA=str(tmp_path / data)), "", Problems())
    assert plan.reason.startswith("full prompts (none of the plant could be read from the run's data; ")


def test_vllm_gets_the_adapter_from_its_folder(run, monkeypatch, tmp_path):
    """The engine's part against the stub: no adapter for the base, the folder's for the trained model, never asleep."""
    folder = tmp_path / "strong"  # two steps alone may not change an answer
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({n: 50 * t if "lora_B" in n else t for n, t in weights.items()}, folder / "adapter_model.safetensors")
    monkeypatch.setattr("grpo.evaluate.models.start_engine", stub_engine)
    settings, _, problems = load_settings(recorded_settings(folder, {"LORA_R": "1"}))
    files = find_model("tiny", problems)
    assert not problems and settings.SEED == 5
    prompts = [RENDERED.format(f"hour 8 store {kwh} load 30") for kwh in (50, 100, 150) for _ in range(2)]
    with_trainer = dataclasses.replace(settings, EXPERTS="shared")
    model = start_vllm_model(with_trainer, files, folder, H100, prompts)
    engine = model.sampler.sampler.engine
    assert engine.settings.EXPERTS is None, "there is no trainer to share with"
    base, trained = (model.complete(prompts, 2, greedy=True, base=base) for base in (True, False))
    assert len(base) == len(trained) == 6 and base != trained
    stub = engine.llm
    assert [request and request.lora_path for request in stub.requests] == [None, str(folder.resolve())]
    assert stub.calls[:2] == ["sleep", "wake_up"] and "sleep" not in stub.calls[2:], "awake from the start on"
    config = read_json(folder / "adapter_config.json")
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_parameters": ["1.mlp.experts.down_proj"]}))
    wider = start_vllm_model(settings, files, folder, H100, prompts).sampler.sampler.engine.llm.lora_target_modules
    assert (stub.lora_target_modules, wider) == (["qkv_proj", "o_proj"], ["qkv_proj", "o_proj", "experts"])
    with pytest.raises(EngineError, match="of the GPU"):
        start_vllm_model(settings, files, None, dataclasses.replace(H100, gpu_free=0.0), prompts)


@pytest.mark.parametrize(("seed", "is_taken"), [("42", True), ("43", False)])
def test_a_damaged_closed_loop_is_not_taken_over(monkeypatch, tmp_path, seed, is_taken):
    plan = make_plan(Settings(), [PROFILE], "EVAL_PROFILE", "full", None, Problems())
    text = json.dumps(sealed({"sampling": {"seed": 42}}))
    (tmp_path / "closed_loop.json").write_text(text.replace("42", seed))
    monkeypatch.setattr(SIMULATOR, "keep_base", keep := mock.Mock())
    resolved = SimpleNamespace(closed_loop=plan, settings=Settings(), exact_loop=False)
    Progress(resolved).new_record(SIMULATOR, SimpleNamespace(run=SimpleNamespace(folder=tmp_path)))
    assert keep.called == is_taken


@pytest.mark.parametrize("module", [mock.Mock(write_report=mock.Mock(side_effect=ZeroDivisionError)), None])
def test_a_report_that_fails_does_not_fail_the_run(monkeypatch, tmp_path, caplog, module):
    """Nor does one that cannot begin, without matplotlib or jinja2."""
    monkeypatch.setitem(sys.modules, "grpo.evaluate.report", module)
    with caplog.at_level(logging.WARNING, "train_grpo"):
        train_grpo.write_report_and_zip(tmp_path)
    assert "scripts/report.py" in caplog.text and tmp_path.with_name(tmp_path.name + ".zip").exists()
