# SPDX-License-Identifier: Apache-2.0
"""scripts/verl/run.py with a verl that only leaves its files, and what verl loads of this project.
Run: python -m pytest tests/verl/test_verl_run.py"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from chat_models import make_chat_model
from conftest import CLEAN, ROOT
from pyarrow import parquet

from grpo.model.load import load_tokenizer
from grpo.verl.answers import Answers, prompt_and_answer
from grpo.verl.llama import write_llama
from grpo.verl.rows import prepare, write_data

PLACE = importlib.util.spec_from_file_location("verl_run", ROOT / "scripts" / "verl" / "run.py")
script = importlib.util.module_from_spec(PLACE)
PLACE.loader.exec_module(script)


@pytest.fixture
def environ(tmp_path, monkeypatch):
    """GSM8K-like rows for a plain chat model, as the environment, with verl's version installed."""
    settings = {"MODEL_ID": str(make_chat_model(tmp_path)), "TASK": "gsm8k", "OUTPUT_DIR": str(tmp_path / "out")}
    settings |= {"PROMPTS_PER_STEP": "4", "TOTAL_STEPS": "10"}
    monkeypatch.setattr(os, "environ", CLEAN | settings)
    monkeypatch.setattr(script, "installed_versions", lambda names: {"verl": script.VERSION})
    return settings


@pytest.fixture
def ran(environ, tmp_path, monkeypatch):
    """The commands that were run; each leaves behind what verl leaves."""
    commands = []

    def leave(command, env, check):
        commands.append((command, env))
        if "merge" in command:
            folder = tmp_path / "out" / f"{'ppo' if 'actor' in command[-3] else 'sft'}-merged"
            folder.mkdir()
            (folder / "config.json").write_text("{}")
        else:
            trainer = "sft" if "verl.trainer.sft_trainer" in command else "ppo"
            (tmp_path / "out" / trainer).mkdir()
            (tmp_path / "out" / trainer / "latest_checkpointed_iteration.txt").write_text("10")

    monkeypatch.setattr(script.subprocess, "run", leave)
    return commands


def test_all_steps_one_after_the_other(ran, tmp_path, capsys):
    assert script.main(["all", "--gpus", "2", "algorithm.lam=0.9"]) == 0
    sft, merge, ppo, last = (command for command, _ in ran)
    out = tmp_path / "out"
    assert "--nproc-per-node=2" in sft and f"model.path={tmp_path}/plain" in sft and "algorithm.lam=0.9" not in sft
    assert merge[-4:] == ["--local_dir", f"{out}/sft/global_step_10", "--target_dir", f"{out}/sft-merged"]
    assert f"critic.model.path={out}/sft-merged" in ppo and ppo[-1] == "algorithm.lam=0.9"
    assert last[-3:] == [f"{out}/ppo/global_step_10/actor", "--target_dir", f"{out}/ppo-merged"]
    assert all(
        env["PYTHONPATH"] == str(ROOT) and env["VERL_USE_EXTERNAL_MODULES"] == "grpo.verl.critic" for _, env in ran
    )
    assert len(parquet.read_table(out / "data" / "train.parquet")) == 200
    capsys.readouterr()
    assert script.main(["upload", "--push", "me/model", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert (
        "would be uploaded to me/model" in told and "PPO with a critic, step 10" in told and "`REWARDS` | gsm8k" in told
    )
    assert str(tmp_path) not in told and len(ran) == 4
    assert (
        script.main(["all", "--gpus", "2"]) == 0 and all("merge" in command for command, _ in ran[4:]) and len(ran) == 6
    )
    assert "ppo: step 10 is there, TOTAL_STEPS=10" in capsys.readouterr().out, "what is finished is left out"


def test_a_dry_run_runs_and_writes_nothing(ran, tmp_path, capsys):
    assert script.main(["all", "--gpus", "2", "--push", "bad name", "--dry-run"]) == 2
    assert "--push bad name: " in capsys.readouterr().err
    assert script.main(["all", "--gpus", "8", "--push", "me/model", "--dry-run"]) == 2
    assert "PROMPTS_PER_STEP: 4 cannot be shared by 8 GPUs" in capsys.readouterr().err
    assert script.main(["all", "--gpus", "2", "--push", "me/model", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert [told.count(f"-m {name}") for name in ("verl.trainer", "verl.model_merger")] == [2, 2]
    assert f"from {tmp_path}/out/sft-merged" in told and "then the merged model goes to me/model" in told
    assert not ran and not (tmp_path / "out").exists()


def test_what_ends_early(ran, tmp_path, capsys, monkeypatch):
    assert script.main(["merge", "--gpus", "2"]) == 2 and "there is no checkpoint in" in capsys.readouterr().err
    assert script.main(["upload", "--push", "me/x", "--dry-run"]) == 2
    assert "there is no merged model in" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["merge", "algorithm.lam=0.9"])
    assert "options and --config are for a trainer" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["sfft"])
    assert "'sfft' is no step: data, sft, ppo, grpo, merge, upload, all" in capsys.readouterr().err

    def fail(command, env, check):
        raise subprocess.CalledProcessError(7, command)

    monkeypatch.setattr(script.subprocess, "run", fail)
    assert script.main(["grpo", "--gpus", "2"]) == 1 and "verl ended with exit code 7" in capsys.readouterr().err
    monkeypatch.setattr(script, "installed_versions", lambda names: {"verl": None})
    assert script.main(["grpo", "--gpus", "2"]) == 2
    assert "verl: this Python has none, the options are those of 0.9.1" in capsys.readouterr().err


@pytest.mark.parametrize("harmony", [True, False])
def test_sft_learns_what_a_rollout_would_write(environ, tmp_path, harmony):
    place = tmp_path / "place"
    place.mkdir()
    folder = make_chat_model(place, harmony)
    p = prepare(environ | {"MODEL_ID": str(folder)}, ["sft"], 2)
    tokenizer, file = load_tokenizer(str(folder)), str(write_data(p) / "train.parquet")
    config = {"apply_chat_template_kwargs": {"reasoning_effort": "low"}, "max_length": 3000}
    rows = Answers([file], tokenizer, config)
    assert len(rows) == 200 and {len(tensor) for tensor in rows[0].values()} == {len(rows[0]["input_ids"])}
    record = parquet.read_table(file).to_pylist()[0]
    _, answer = prompt_and_answer(tokenizer, record["prompt"], record["answer"], config["apply_chat_template_kwargs"])
    learned = rows[0]["input_ids"][rows[0]["loss_mask"].bool()]
    assert learned.tolist() == tokenizer(answer, add_special_tokens=False)["input_ids"]
    begin, end = ("<|channel|>final<|message|>", "<|return|>") if harmony else ("", "<|end|>")
    assert answer == begin + p.rows[0].columns["answer"] + end
    with pytest.raises(ValueError, match="gsm8k_train, row 1: prompt and answer have .* Raise MAX_PROMPT_LEN"):
        Answers(file, tokenizer, config | {"max_length": 20})


def in_place_of_verl(monkeypatch, name, **given):
    """A module of verl, which is not here, and its packages, and what it holds; the room that imports it is imported anew."""
    for n in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:n])
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    vars(sys.modules[name]).update(given)


def test_a_failed_rollout_ends_the_run(monkeypatch):
    class Queue:
        def __init__(self):
            self.failure_keys = {"train": [], "val": []}

        def _sync_metadata_from_transfer_queue(self):
            self.synced = True

    in_place_of_verl(monkeypatch, "verl.trainer.ppo.v1.replay_buffer", ReplayBuffer=Queue)
    monkeypatch.delitem(sys.modules, "grpo.verl.sampler", raising=False)
    from grpo.verl.sampler import Strict

    queue = Strict()
    queue._sync_metadata_from_transfer_queue()
    assert queue.synced
    queue.failure_keys["train"] = ["a", "b"]
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

    tokenizer, seen = load_tokenizer(str(ROOT / "data" / "tiny")), []

    def earn(**given):
        seen.append(given)
        return {"score": 0.5}

    async def ask(text, longest):
        config = SimpleNamespace(data=SimpleNamespace(max_response_length=longest))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        item = SimpleNamespace(
            batch={
                "responses": torch.tensor([*ids, 0, 0]),
                "attention_mask": torch.tensor([1] * (3 + len(ids)) + [0, 0]),
            },
            non_tensor_batch={"extra_info": {"row": "r"}, "data_source": "d", "reward_model": {"ground_truth": "g"}},
        )
        return ids, await RewardManager(config, tokenizer, earn).run_single([item])

    whole, open_ended = "<|channel|>final<|message|>[1]<|return|>", "<|channel|>final<|message|>[1]"
    length = len(tokenizer(open_ended, add_special_tokens=False)["input_ids"])
    # One that is shorter than it may be has ended, by a stop token that only vLLM knows.
    for text, longest, cut in (
        (whole, 99, False),
        (open_ended, length, True),
        (open_ended, length + 1, False),
        ("", 9, True),
    ):
        ids, result = asyncio.run(ask(text, longest))
        assert result == {"reward_score": 0.5, "reward_extra_info": {"score": 0.5}}
        known = {"row": "r", "truncated": cut, "completion_ids": ids}
        assert seen.pop() == {"data_source": "d", "solution_str": text, "ground_truth": "g", "extra_info": known}


def test_a_llama_of_random_weights(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(ROOT / "data" / "tiny" / name)
    assert write_llama(tmp_path / "llama", folder, hidden=64, layers=1) > 50_000
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "llama"), load_tokenizer(str(tmp_path / "llama"))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "user:\n7\nassistant:\n" and model.config.eos_token_id == tokenizer.eos_token_id
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["vocab_size"] == len(tokenizer)
