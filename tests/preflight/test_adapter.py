# SPDX-License-Identifier: Apache-2.0
"""INIT_ADAPTER: the settings that it brings, and which adapters are refused."""

import json
import shutil
from pathlib import Path

import pytest
from damage import KINDS
from machines import only, resolved_run

from grpo.common import Problems
from grpo.output.checkpoints import begin_checkpoint, finish_checkpoint
from grpo.output.durable import file_sha256, read_json
from grpo.output.folder import RunState
from grpo.output.layout import ADAPTER
from grpo.plan.hub import REAL_CONFIG
from grpo.preflight.adapter import check_start_adapter, read_start_adapter
from grpo.settings.environment import load_settings


def start(tiny, folder, model=None, **environ):
    """(settings, StartAdapter, problems) of a run that starts from the adapter in `folder`."""
    settings, sources, problems = load_settings({"MODEL_ID": "tiny", "INIT_ADAPTER": str(folder)} | environ)
    adapter = read_start_adapter(settings, sources, model or read_json(tiny / "config.json"), problems)
    return settings, adapter, problems


def test_the_adapters_own_shape_is_taken(saved_adapter, tmp_path):
    for changes in ({}, {"LORA_R": "3", "LORA_TARGETS": " v_proj,q_proj"}):
        resolved = resolved_run(tmp_path / "run", INIT_ADAPTER=saved_adapter, EVAL_SAMPLES=0, **changes)
        assert resolved.adapter.settings == {"LORA_R": 3, "LORA_ALPHA": 5.0, "LORA_TARGETS": "q_proj,v_proj"}
        assert all(getattr(resolved.settings, name) == value for name, value in resolved.adapter.settings.items())
        assert resolved.adapter.digest == file_sha256(saved_adapter / ADAPTER) and not resolved.problems
        assert resolved.sources["LORA_ALPHA"] == "INIT_ADAPTER"
        assert (resolved.sources["LORA_R"] == "environment") is bool(changes)


def test_a_setting_that_says_otherwise_is_a_problem(tiny, saved_adapter):
    for name, value, own in (("LORA_R", 8, 3), ("LORA_ALPHA", 16, 5), ("LORA_TARGETS", "all-linear", "q_proj,v_proj")):
        problem = only(start(tiny, saved_adapter, **{name: str(value)})[-1])
        assert problem.startswith(f"{name}: it was set to {value}") and f"has {own}. Unset it" in problem


def change_config(**changes):
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def flip_a_weight(folder: Path) -> None:
    """In a checkpoint."""
    finish_checkpoint(folder, {})
    KINDS["one bit"](folder / ADAPTER)


@pytest.mark.parametrize(
    ("spoil", "model", "words"),
    [
        (lambda folder: (folder / ADAPTER).unlink(), None, [ADAPTER, "not found", "scripts/sft.py"]),
        (lambda folder: (folder / ADAPTER).write_bytes(b"version https"), None, ["no safetensors file"]),
        (lambda folder: (folder / "best.json").write_text('{"adapter_sha256": "0"}'), None, [f"{ADAPTER} is damaged"]),
        (flip_a_weight, None, [f"{ADAPTER} is damaged"]),
        (begin_checkpoint, None, ["it was cut off while it was written"]),
        (change_config(peft_type="IA3"), None, ["not that of a LoRA"]),
        (change_config(use_rslora=True), None, ["use_rslora"]),
        (change_config(init_lora_weights="pissa_niter_4"), None, ["init_lora_weights=pissa_niter_4 changed its base"]),
        (change_config(lora_alpha=0), None, ["nothing can be learned with r=3 and lora_alpha=0"]),
        (change_config(lora_alpha=float("nan")), None, ["nothing can be learned with r=3 and lora_alpha=nan"]),
        (change_config(r=4), None, ["no LoRA of rank 4 for this model", "0.self_attn.q_proj.lora_A.weight is [3, "]),
        (lambda folder: None, REAL_CONFIG, ["for this model", "expected [3, 2880]"]),
        (lambda folder: None, {"num_hidden_layers": 9}, ["q_proj.lora_A.weight is not there, expected"]),
    ],
    ids=lambda value: "" if callable(value) else str(value)[:40],
)
def test_what_cannot_be_started_from(tiny, saved_adapter, tmp_path, spoil, model, words):
    folder = Path(shutil.copytree(saved_adapter, tmp_path / "a"))
    spoil(folder)
    _, adapter, problems = start(tiny, folder, model and read_json(tiny / "config.json") | model)
    problem = only(problems)
    assert problem.startswith(f"INIT_ADAPTER={folder}: ") and all(word in problem for word in words), problem
    assert adapter.digest is None and not adapter.settings


def test_a_checkpoint_out_of_a_zip_is_taken(tiny, saved_adapter, tmp_path):
    folder = Path(shutil.copytree(saved_adapter, tmp_path / "a"))
    (folder / "optimizer.pt").touch()
    finish_checkpoint(folder, {})
    (folder / "optimizer.pt").unlink()
    change_config(base_model_name_or_path="./data/tiny")(folder)
    assert not start(tiny, folder)[-1]


def test_a_resumed_run_began_with_the_same_weights(tiny, saved_adapter, tmp_path):
    s, adapter, _ = start(tiny, saved_adapter)
    digest = adapter.digest
    for choices, faults in (({"init_adapter": digest}, 0), ({"init_adapter": "other"}, 1), ({"plan": None}, 1)):
        problems = Problems()
        check_start_adapter(s, RunState(tmp_path, 2, tmp_path, True, choices), digest, problems)
        assert len(problems) == faults and all("began with other weights" in problem for problem in problems)
