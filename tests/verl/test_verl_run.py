# SPDX-License-Identifier: Apache-2.0
"""scripts/verl/run.py, its YAML files, and what verl loads of this project. verl itself is not needed."""

import asyncio
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from helpers import CLEAN, ROOT, write_commands
from pyarrow import parquet

from grpo.common import InputError, Problems
from grpo.data.files import read_file
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


def write_rows(folder: Path) -> str:
    """The path of 300 training rows: a step of the recipe takes 256."""
    rows = ({"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(300))
    (folder / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "many.jsonl")


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
    modules = env["VERL_USE_EXTERNAL_MODULES"].split(",")
    assert modules == ["grpo.verl.sum_resolver", "grpo.verl.critic"]
    assert ("+ray_kwargs.ray_init.address=local" in command) == (stage != "sft"), "a Ray that has this environment"
    assert "trainer.test_freq=-1" not in command, "there are held-out rows"
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


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_verl_does_not_validate_with_training_rows(started, monkeypatch, stage):
    monkeypatch.setitem(os.environ, "EVAL_SAMPLES", "0")
    assert script.main([stage, "trainer.val_before_train=true"]) == 0
    command = started.call_args.args[0]
    assert ("trainer.test_freq=-1" in command) == (stage == "ppo")
    assert command[-1] == "trainer.val_before_train=true", "what was typed wins"


def test_a_step_takes_no_more_prompts_than_there_are_rows(started, monkeypatch):
    """verl would divide by zero once model and vLLM are loaded and the held-out rows validated."""
    monkeypatch.setitem(os.environ, "DATA", str(ROOT / "data/gsm8k_train.jsonl"))
    for stage, size in {"ppo": 256, "grpo": 64}.items():
        assert script.prompts_per_step(stage, [], RECIPE.name) == size
        assert script.prompts_per_step(stage, [], None) == 16
    few = "200 training rows, but a step takes {}, and verl repeats none. Name more rows, or append"
    with pytest.raises(InputError, match=few.format(256)):
        script.main(["ppo", "--recipe", RECIPE.name])
    with pytest.raises(InputError, match=few.format(201)):
        script.main(["grpo", "data.train_batch_size=8", "data.train_batch_size=201"])
    assert script.main(["grpo", "data.train_batch_size=200"]) == 0
    assert script.main(["ppo", "--recipe", RECIPE.name, "data.train_batch_size=64"]) == 0


def test_verl_does_not_continue_another_model_s_run(started, settings, tmp_path, monkeypatch):
    """It would load the checkpoint over MODEL_ID without a word."""
    folder = tmp_path / settings["OUTPUT_DIR"] / "ppo"
    assert script.main(["ppo"]) == 0
    (tmp_path / "other").mkdir()
    other = str(make_chat_model(tmp_path / "other"))
    monkeypatch.setitem(os.environ, "MODEL_ID", other)
    assert script.main(["ppo"]) == 0, "the first run left no checkpoint"
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    assert script.main(["ppo"]) == 0, "the same command continues"
    monkeypatch.setitem(os.environ, "MODEL_ID", settings["MODEL_ID"])
    with pytest.raises(InputError, match=f"verl would continue {folder}, which began from {other}. Name another"):
        script.main(["ppo", "--dry-run"])
    assert script.main(["grpo"]) == 0 and script.main(["ppo", "trainer.resume_mode=disable"]) == 0
    (folder / "model.txt").unlink()
    assert script.main(["ppo"]) == 0


RECIPE = CONFIGS / "recipes" / "llama32_gsm8k"
# The options of the first users' guide to verl, as its commands have them. verl's data, paths and counts of GPUs are
# not here, and of the two loggers the guide gives, the later.
GUIDE = {
    "sft": """data.micro_batch_size_per_gpu=8 trainer.total_epochs=2 trainer.logger=[console,wandb]""",
    "ppo": """data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=256
        data.dataloader_num_workers=0 actor_rollout_ref.actor.optim.lr=1.0e-6
        actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.4
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 critic.optim.lr=1.0e-5
        critic.ppo_micro_batch_size_per_gpu=4 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=[console,wandb]
        trainer.val_before_train=false trainer.save_freq=10 trainer.test_freq=10 trainer.total_epochs=15""",
}


@pytest.mark.parametrize("stage", GUIDE)
def test_the_recipe_has_the_values_of_the_guide(stage):
    """Micro-batches count rows there, which verl heeds without dynamic ones alone, and epochs, not steps, end it."""
    config = yaml.safe_load((RECIPE / f"recipe_{stage}.yaml").read_text())
    off = "data.use_dynamic_bsz=false" if stage == "sft" else "actor_rollout_ref.actor.use_dynamic_bsz=false"
    for option in [*GUIDE[stage].split(), off, "trainer.total_training_steps=null"]:
        path, _, text = option.partition("=")
        value = functools.reduce(lambda part, key: part[key], path.split("."), config)
        assert value == yaml.safe_load(text), option
    name = f"llama3.2_{stage.upper()}_test"
    assert config["trainer"]["experiment_name"] == f"${{oc.env:WANDB_RUN_NAME,{name}}}"


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_recipe_is_laid_over_the_stage_and_needs_rows(started, monkeypatch, tmp_path, gpus):
    monkeypatch.setitem(os.environ, "ROCR_VISIBLE_DEVICES", "0")
    arguments = ["ppo", "--recipe", RECIPE.name, "--gpus", str(gpus)]
    with pytest.raises(InputError, match="DATA: the recipe brings no rows"):
        script.main(arguments)
    monkeypatch.setitem(os.environ, "DATA", write_rows(tmp_path))
    assert script.main(arguments) == 0 and "ROCR_VISIBLE_DEVICES" not in os.environ
    command = started.call_args.args[0]
    assert command[command.index("--config-dir") + 1] == str(RECIPE) and f"trainer.n_gpus_per_node={gpus}" in command
    assert command[command.index("--config-name") + 1] == "recipe_ppo" and (RECIPE / "recipe_ppo.yaml").exists()
    assert f"hydra.searchpath=['file://{CONFIGS}']" in command, "where `defaults: [ppo]` is"


def test_the_recipe_s_stages_follow_each_other(settings, tmp_path):
    """A dry run prints every command; PPO starts from the SFT model once there is one."""
    tools = write_commands(tmp_path / "bin", {"python": f'exec {sys.executable} "$@"'})
    environ = CLEAN | settings | {"PATH": f"{tools}:{CLEAN['PATH']}", "HF_REPO": "team/name", "DRY_RUN": "1"}
    environ |= {"MODEL_ID": str(tmp_path / "plain"), "OUTPUT_DIR": str(tmp_path / "llama")}
    environ |= {"DATA": write_rows(tmp_path), "PYTHONPATH": ""}
    command = ["bash", str(RECIPE / "run.sh")]

    def run(*stages, **changes):
        return subprocess.run([*command, *stages], env=environ | changes, capture_output=True, text=True)

    done = run("sft", "ppo", "merge", "upload")
    assert done.returncode == 0, done.stderr
    words = [
        "verl.trainer.sft_trainer", "--config-name recipe_sft", f"{tmp_path}/llama/sft/global_step_N --target_dir",
        f"ppo starts from {tmp_path}/plain", "verl.trainer.main_ppo", "recipe_ppo", "global_step_N/actor --target_dir",
        "ppo-merged --push team/name",
    ]  # fmt: skip
    places = [done.stdout.index(word) for word in words]
    assert places == sorted(places)
    merged = tmp_path / "llama/sft-merged"
    shutil.copytree(tmp_path / "plain", merged)
    for step in (9, 10, 20):  # The last may be half written: verl notes a checkpoint once it is whole.
        (tmp_path / f"llama/ppo/global_step_{step}").mkdir(parents=True)
    notes = [tmp_path / f"llama/{stage}/latest_checkpointed_iteration.txt" for stage in ("grpo", "ppo")]
    notes[1].write_text("10")
    done = run("ppo", "merge")
    assert f"MODEL_ID={merged}" in done.stdout and "ppo/global_step_10/actor --target_dir" in done.stdout
    notes[0].parent.mkdir()
    notes[0].write_text("30")
    for last, words in ((1, "ppo/global_step_10/actor"), (0, "grpo/global_step_30/actor")):
        os.utime(notes[1 - last], (1, 1))
        os.utime(notes[last], (2, 2))
        assert words in run("merge").stdout, "what was trained last"
    notes[1].unlink()
    assert "grpo-merged --push team/name" in run("upload").stdout, "what was trained"
    assert f"ppo starts from {tmp_path}/plain" in run("ppo", FROM=str(tmp_path / "plain")).stdout
    assert run().returncode == 2, "a job without a stage must not end as if it were done"
    for stages, repo in ((["sft", "--gpus"], "team/name"), (["sft", "upload"], "")):
        done = run(*stages, HF_REPO=repo)
        assert done.returncode in (1, 2) and not done.stdout, "told before the first stage"
    assert "DATA: the recipe brings no rows" in run("ppo", DATA="").stderr
    assert "+ python -m verl.model_merger" in run("merge", DRY_RUN="yes").stdout


def test_the_answer_of_verls_own_rows_is_found(tmp_path):
    """Under `extra_info`, unless the row has an answer itself."""
    prompt = [{"role": "user", "content": "6 x 7?"}]
    rows = [
        {"prompt": prompt, "extra_info": {"answer": "#### 42", "index": 0}, "answer": own} for own in (None, "#### 7")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row.columns["answer"] for row in read_file(tmp_path / "rows.jsonl", Problems())] == ["#### 42", "#### 7"]


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
    assert len(Answers(file, tokenizer, config, max_samples=40)) == 40, "data.train_max_samples"
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
        def __init__(self, trainer_mode, poll_interval=2.0):
            self.trainer_mode, self.poll_interval = trainer_mode, poll_interval

        def _sync_metadata_from_transfer_queue(self):
            self.failure_keys = {"train": self.failed, "val": []}

    in_place_of_verl(monkeypatch, "verl.trainer.ppo.v1.replay_buffer", ReplayBuffer=Queue)
    monkeypatch.delitem(sys.modules, "grpo.verl.replay_buffer", raising=False)
    from grpo.verl.replay_buffer import StrictReplayBuffer

    queue = StrictReplayBuffer(trainer_mode="sync")
    assert queue.trainer_mode == "sync" and queue.poll_interval < 1
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
