# SPDX-License-Identifier: Apache-2.0
"""scripts/dev/verl_smollm2.py: its rows, its commands, and what it makes of verl's files. verl itself is not needed."""

import importlib.util
import json
import re
import shlex
from unittest import mock

import pytest
import verl_smollm2
from helpers import ROOT, run_python

from grpo.common import InputError
from rewards import gsm8k_strict
from scripts.dev.record import read_lines


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(verl_smollm2, "SIZES", {"train": 130, "heldout": 40, "warmup": 200})


def test_rows_are_distinct_and_the_warm_up_alone_answers_by_chance(few, tmp_path):
    verl_smollm2.write_rows(tmp_path, 1)
    rows = {part: read_lines(tmp_path / f"{part}.jsonl") for part in verl_smollm2.SIZES}
    questions = {part: {row["question"] for row in rows[part]} for part in rows}
    assert {part: len(questions[part]) for part in rows} == verl_smollm2.SIZES
    assert not questions["heldout"] & (questions["train"] | questions["warmup"])
    for row in rows["train"] + rows["heldout"]:
        assert gsm8k_strict([f"assistantfinal{row['answer']}"], answer=[row["answer"]]) == [1.0]
        assert "<|" not in row["answer"] and re.fullmatch(r"(\d+ [-+*] \d+ = \d+\. )+#### \d+", row["answer"])
    signs = {re.search(r"[-+*]", row["answer"])[0] for row in rows["warmup"] if " buys " in row["question"]}
    assert signs == {"+", "-", "*"}


def test_settings_are_those_of_the_recipe_s_script():
    script = (ROOT / "scripts/verl/recipes" / verl_smollm2.RECIPE / "run.sh").read_text(encoding="utf-8")
    template = re.search(r"PROMPT_TEMPLATE=\$\{PROMPT_TEMPLATE-(.*)\}$", script, re.MULTILINE)[1]
    assert shlex.split(template) == [verl_smollm2.TASK["PROMPT_TEMPLATE"]]
    assert f"REWARDS=${{REWARDS-{verl_smollm2.TASK['REWARDS']}}} SYSTEM_PROMPT=${{SYSTEM_PROMPT-}}" in script
    assert f"TASK={verl_smollm2.TASK['TASK']}" in script


@pytest.mark.parametrize("stage", verl_smollm2.STAGES)
def test_each_stage_is_a_command_of_run_py(few, tmp_path, stage, monkeypatch, capsys):
    """run.py accepts its environment, and a stage of learning ends with a checkpoint and a validation."""
    verl_smollm2.write_rows(tmp_path / "rows", 1)
    for folder in ("model", "verl/sft-merged"):
        (tmp_path / folder).mkdir(parents=True)
    command, environ = verl_smollm2.stage_command(stage, tmp_path, 120, ["critic.optim.lr=1"])
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("verl_run", command[0])
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main([*map(str, command[1:]), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    learned = stage in ("ppo", "grpo")
    assert f"MODEL_ID={tmp_path / ('verl/sft-merged' if learned else 'model')}" in shown
    assert ("trainer.total_training_steps=120 trainer.save_freq=120" in shown) == (stage != "sft")
    assert ("trainer.val_only=true" in shown) == (stage == "base") and shown.rstrip().endswith("critic.optim.lr=1")
    assert ("trainer.resume_mode=disable" in shown) == (stage == "base"), "it shares the folder of grpo's checkpoints"


def validated(folder, step, scores):
    """A validation as verl writes it, in an order of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"input": f"prompt {k}", "output": f"#### {k}", "score": score} for k, score in enumerate(scores)]
    text = "".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: (row["score"], row["input"])))
    (folder / f"{step}.jsonl").write_text(text, encoding="utf-8")


def test_figures_of_verl_s_files(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results.json"
    validated(out / "heldout/base", 0, [0.0] * 8)
    for stage, last in (("ppo", [1.0] * 4 + [0.0] * 4), ("grpo", [1.0] * 6 + [0.0] * 2)):
        validated(out / "heldout" / stage, 0, [1.0, 1.0] + [0.0] * 6)
        validated(out / "heldout" / stage, 10, [1.0] * 3 + [0.0] * 5)
        validated(out / "heldout" / stage, 100, last)
    (out / "metrics").mkdir()
    steps = [{"step": 0, "data": {"val-core/rows/reward/mean@1": 0.25}}]
    steps += [
        {
            "step": k,
            "data": {"critic/score/mean": k / 10, "timing_s/step": 9.0 - k, "actor/perf/max_memory_allocated_gb": k},
        }
        for k in range(1, 8)
    ]
    (out / "metrics/ppo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps), encoding="utf-8")
    (out / "stages.json").write_text('{"sft": 40.0}', encoding="utf-8")
    verl_smollm2.write_results(out, results)
    values = {row["name"]: row["value"] for row in json.loads(results.read_text(encoding="utf-8"))["figures"]}
    accuracies = {name: values[f"accuracy.{name}"] for name in ("base", "sft", "ppo", "grpo")}
    assert accuracies == {"base": 0.0, "sft": 0.25, "ppo": 0.5, "grpo": 0.75}
    gains = {name: values[f"gain.{name}"] for name in ("sft", "ppo", "grpo")} | {"both": values["grpo_over_ppo"]}
    assert gains == {"sft": 0.25, "ppo": 0.25, "grpo": 0.5, "both": 0.25}
    assert values["gain.grpo_low"] <= 0.5 <= values["gain.grpo_high"] and values["ppo.accuracy_step_10"] == 0.375
    assert values["ppo.steps"] == 7 and values["ppo.step_s"] == 4.5 and values["ppo.torch_gib"] == 7
    assert values["ppo.reward_first"] == pytest.approx(0.3) and values["ppo.reward_last"] == pytest.approx(0.5)
    assert values["sft.seconds"] == 40.0 and "grpo.steps" not in values
    rows = [json.loads(line) for line in results.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["model"] for row in rows] == [name for name in accuracies for _ in range(8)]
    assert rows[0] == {"model": "base", "prompt": "prompt 0", "completion": "#### 0", "reward": 0.0}


def test_what_a_stopped_run_left_has_figures_too(tmp_path):
    validated(tmp_path / "heldout/ppo", 0, [1.0, 0.0])
    values = {row["name"]: row["value"] for row in verl_smollm2.figures_of(tmp_path)}
    assert values == {"accuracy.sft": 0.5, "ppo.accuracy_step_0": 0.5}, "nothing is called PPO's before a step of it"


def test_stages_follow_each_other(few, tmp_path, monkeypatch):
    """A merge of SFT's last checkpoint follows it, a stage begins anew, and the JSON is there after each."""
    out, results = tmp_path / "out", tmp_path / "results.json"
    for folder in ("model", "verl/sft/global_step_94", "verl/ppo/global_step_100", "verl/grpo/global_step_100"):
        (out / folder).mkdir(parents=True)

    def run(command, environ):
        if command[1] == "sft":
            assert not (out / "verl/sft").exists()
            (out / "verl/sft").mkdir()
            (out / "verl/sft/latest_checkpointed_iteration.txt").write_text("93")
        return 1.25

    ran = mock.Mock(side_effect=run)
    monkeypatch.setattr(verl_smollm2, "run", ran)
    arguments = ["--out", str(out), "--results", str(results), "--set", "a=b"]
    assert verl_smollm2.main([*arguments, "--stages", "sft", "ppo"]) == 0
    sft, merge, ppo = (call.args[0] for call in ran.call_args_list)
    assert sft[1] == "sft" and ppo[1] == "ppo" and ppo[-1] == "a=b" != sft[-1]
    assert merge[:3] == ["-m", "verl.model_merger", "merge"] and out / "verl/sft/global_step_93" in merge
    assert not (out / "verl/ppo").exists() and (out / "verl/grpo").exists(), "verl would have continued from step 100"
    values = {row["name"]: row["value"] for row in json.loads(results.read_text(encoding="utf-8"))["figures"]}
    assert values == {"sft.seconds": 2.5, "ppo.seconds": 1.2}
    results.unlink()
    assert verl_smollm2.main([*arguments, "--stages"]) == 0 and results.exists() and ran.call_count == 3
    with pytest.raises(InputError, match="holds no model: give --source"):
        verl_smollm2.main(["--out", str(tmp_path / "new"), "--results", str(results)])


def test_it_starts_beside_verl_s_package_scripts(tmp_path):
    """verl's wheel installs a package of the name of this project's folder."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/__init__.py").touch()
    done = run_python(ROOT / "scripts/dev/verl_smollm2.py", "--help", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "SmolLM2-135M-Instruct" in done.stdout
