# SPDX-License-Identifier: Apache-2.0
"""scripts/verl/run.py, its YAML files, and what verl loads of this project. verl itself is not needed."""

import asyncio
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import CLEAN, ROOT
from pyarrow import parquet

from grpo.common import InputError
from grpo.model.load import load_tokenizer
from grpo.plan.hub import TINY_PATH
from grpo.verl.answers import Answers, prompt_and_answer
from grpo.verl.rows import read_input, write_data

SPEC = importlib.util.spec_from_file_location("verl_run", ROOT / "scripts" / "verl" / "run.py")
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)
CONFIGS = ROOT / "scripts" / "verl"
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_chat_model(parent: Path, harmony: bool = False) -> Path:
    """The files of a model without weights that answers in Harmony's channels, or of a plain one."""
    folder = parent / ("harmony" if harmony else "plain")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_PATH / name, folder)
    if not harmony:
        (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """GSM8K-like rows for a plain chat model, as the environment, with verl's version installed."""
    monkeypatch.chdir(tmp_path)
    settings = {"MODEL_ID": make_chat_model(tmp_path).name, "TASK": "gsm8k", "OUTPUT_DIR": "it's a run"}
    monkeypatch.setattr(os, "environ", CLEAN | settings)
    monkeypatch.setattr(script, "installed_versions", lambda names: {"verl": script.VERSION})
    return settings


@pytest.fixture
def started(settings, monkeypatch):
    """In place of the start of verl: a mock that ends with exit code 0."""
    started = mock.Mock(return_value=0)
    monkeypatch.setattr(script, "run_child", started)
    return started


@pytest.mark.parametrize(("stage", "module"), [("sft", "sft_trainer"), ("ppo", "main_ppo"), ("grpo", "main_ppo")])
def test_a_stage_writes_the_rows_and_starts_verl(started, tmp_path, stage, module):
    assert script.main([stage, "--gpus", "2", "data.train_batch_size=8"]) == 0
    command, env = started.call_args.args
    assert f"verl.trainer.{module}" in command and command[-1] == "data.train_batch_size=8"
    assert command[command.index("--config-name") + 1] == stage and "trainer.n_gpus_per_node=2" in command
    cpus = [int(word.partition("=")[2]) for word in command if word.startswith("ray_kwargs.ray_init.num_cpus=")]
    assert ("--nproc-per-node=2" in command) == (stage == "sft") == (not cpus) and all(count >= 18 for count in cpus)
    output_dir = tmp_path / "it's a run"
    assert env["OUTPUT_DIR"] == str(output_dir) and env["MODEL_ID"] == str(tmp_path / "plain"), "absolute, for Ray"
    assert env["PYTHONPATH"] == str(ROOT)
    assert env["VERL_USE_EXTERNAL_MODULES"] == "grpo.verl.sum_resolver,grpo.verl.critic"
    assert len(parquet.read_table(output_dir / "data" / "train.parquet")) == 200


def test_a_dry_run_runs_and_writes_nothing(started, tmp_path, capsys):
    assert script.main(["ppo", "--gpus", "2", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "-m verl.trainer.main_ppo" in shown and f"MODEL_ID={tmp_path}/plain" in shown
    assert not started.called and not (tmp_path / "it's a run").exists()


def test_what_ends_early(started, monkeypatch):
    started.return_value = 7
    assert script.main(["grpo", "--gpus", "2"]) == 7
    monkeypatch.setattr(script, "installed_versions", lambda names: {"verl": None})
    monkeypatch.setitem(os.environ, "TOTAL_STEPS", "5")
    with pytest.raises(InputError) as caught:
        script.main(["grpo", "--gpus", "2"])
    assert "verl: this Python has none, the options are those of 0.9.1" in str(caught.value)
    assert "TOTAL_STEPS: verl does not read this setting of train_grpo.py" in str(caught.value)


def test_the_yaml_names_what_is_here():
    """verl finds each `pkg://` module and the object in it."""
    text = "".join(path.read_text() for path in CONFIGS.glob("*.yaml"))
    modules = set(re.findall(r"pkg://grpo\.verl\.(\w+)", text))
    assert modules == {"answers", "score", "manager", "replay_buffer"}
    source = "".join((ROOT / "grpo" / "verl" / f"{name}.py").read_text() for name in modules)
    for name in ("class Answers", "def compute_score", "class RewardManager", "class StrictReplayBuffer"):
        assert name in source and (name.split()[1] in text or name == "def compute_score")  # verl's default name


@pytest.mark.parametrize("harmony", [True, False])
def test_sft_learns_what_a_rollout_would_write(settings, tmp_path, harmony):
    data, problems = read_input(settings, "sft")
    assert not problems
    write_data(data)
    (tmp_path / "other").mkdir()
    tokenizer = load_tokenizer(str(make_chat_model(tmp_path / "other", harmony)))
    file = str(data.output_dir / "data" / "train.parquet")
    config = {"apply_chat_template_kwargs": {"reasoning_effort": "low"}, "max_length": 3000, "train_batch_size": 16}
    rows = Answers(file, tokenizer, config)
    assert len(rows) == 200 and {len(tensor) for tensor in rows[0].values()} == {len(rows[0]["input_ids"])}
    record = parquet.read_table(file).to_pylist()[0]
    _, answer = prompt_and_answer(tokenizer, record["prompt"], record["answer"], config["apply_chat_template_kwargs"])
    learned = rows[0]["input_ids"][rows[0]["loss_mask"].bool()]
    assert learned.tolist() == tokenizer(answer, add_special_tokens=False)["input_ids"]
    begin, end = ("<|channel|>final<|message|>", "<|return|>") if harmony else ("", "<|end|>")
    assert answer == begin + data.rows[0].columns["answer"] + end
    with pytest.raises(ValueError, match=r"gsm8k_train, row 1: prompt and answer have .* Raise data.max_length"):
        Answers(file, tokenizer, config | {"max_length": 20})
    with pytest.raises(ValueError, match=r"200 rows have an `answer` .*, and data.train_batch_size is 201"):
        Answers(file, tokenizer, config | {"train_batch_size": 201})


def in_place_of_verl(monkeypatch, name, **contents):
    """A module of verl, which is not here, with these contents, and its packages."""
    package, _, last = name.rpartition(".")
    if package and package not in sys.modules:
        in_place_of_verl(monkeypatch, package)
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    if package:
        monkeypatch.setattr(sys.modules[package], last, module, raising=False)


def test_a_failed_rollout_ends_the_run(monkeypatch):
    class Queue:
        def _sync_metadata_from_transfer_queue(self):
            self.failure_keys = {"train": self.failed, "val": []}

    in_place_of_verl(monkeypatch, "verl.trainer.ppo.v1.replay_buffer", ReplayBuffer=Queue)
    monkeypatch.delitem(sys.modules, "grpo.verl.replay_buffer", raising=False)
    from grpo.verl.replay_buffer import StrictReplayBuffer

    queue = StrictReplayBuffer()
    queue.failed = []
    queue._sync_metadata_from_transfer_queue()
    queue.failed = ["a", "b"]
    with pytest.raises(RuntimeError, match="2 prompt.s. have no completion or no reward"):
        queue._sync_metadata_from_transfer_queue()


def test_the_manager_tells_tokens_and_end(monkeypatch):
    """verl's own base class is not here: the manager takes three attributes of it."""

    class Base:
        def __init__(self, config, tokenizer, compute_score):
            self.tokenizer, self.compute_score, self.loop = tokenizer, compute_score, asyncio.get_event_loop()

    in_place_of_verl(monkeypatch, "verl.experimental.reward_loop.reward_manager.base", RewardManagerBase=Base)
    monkeypatch.delitem(sys.modules, "grpo.verl.manager", raising=False)
    from grpo.verl.manager import RewardManager

    tokenizer, calls = load_tokenizer(str(ROOT / "data" / "tiny")), []

    def compute_score(**arguments):
        calls.append(arguments)
        return {"score": 0.5}

    async def score(text, limit):
        config = SimpleNamespace(data=SimpleNamespace(max_response_length=limit))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        mask = torch.tensor([1] * (3 + len(ids)) + [0, 0])
        batch = {"responses": torch.tensor([*ids, 0, 0]), "attention_mask": mask}
        item = SimpleNamespace(batch=batch, non_tensor_batch={"extra_info": {"row": "r"}})
        return ids, await RewardManager(config, tokenizer, compute_score).run_single([item])

    whole, unfinished = "<|channel|>final<|message|>[1]<|return|>", "<|channel|>final<|message|>[1]"
    length = len(tokenizer(unfinished, add_special_tokens=False)["input_ids"])
    # A completion below the limit has ended, by a stop token that only vLLM knows.
    cases = [(whole, 99, False), (unfinished, length, True), (unfinished, length + 1, False), ("", 9, True)]
    for text, limit, truncated in cases:
        ids, result = asyncio.run(score(text, limit))
        assert result == {"reward_score": 0.5, "reward_extra_info": {"score": 0.5}}
        extra_info = {"row": "r", "truncated": truncated, "completion_ids": ids, "harmony": True}
        assert calls.pop() == {"solution_str": text, "extra_info": extra_info}
