# SPDX-License-Identifier: Apache-2.0
"""Rows and rewards on their way through verl."""

import datetime
import json
import math
import random
import sys

import pytest
from helpers import RENDERED, write_csv
from machines import only
from pyarrow import parquet

from grpo.data.files import Row, column_names
from grpo.harmony import TOKEN
from grpo.reward.calling import load_rewards
from grpo.reward.scoring import initial_trainer_state, read_completion, score, total
from grpo.settings.table import Settings
from grpo.verl.rows import read_input, to_records, write_data
from grpo.verl.score import compute_score

MINE = """
def length(completion_ids, note, **columns):
    return [float(len(ids)) if text else None for ids, text in zip(completion_ids, note)]
def score(completions, prompts, **columns):
    return [len(text) + len(prompt) if "[" in text else -9 for text, prompt in zip(completions, prompts)]
def nothing(completions, **columns):
    return [None for _ in completions]
"""
CHANNELS = ("<|channel|>final<|message|>", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|return|>")
WORDS = ("[0]", "[1]", "[2]", " so ")


@pytest.fixture
def environ(tmp_path, monkeypatch):
    """Two files whose columns and actions differ, a module of the user's, and settings that train them."""
    (tmp_path / "verl_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "verl_mine", raising=False)
    two = [[f"question {i}", 0.25 + i / 100, 0.75 - i / 100, f"note {i}"] for i in range(6)]
    three = [[f"task {i}", "be brief", 0.5, 0.25, 0.25] for i in range(6)]
    header = [f"reward_action_{k}" for k in range(3)]
    write_csv(tmp_path / "two.csv", ["prompt", *header[:2], "note"], two)
    write_csv(tmp_path / "three.csv", ["user", "system", *header], three)
    settings = {"MODEL_ID": "some/llama", "DATA": "two.csv,three.csv", "EVAL_DATA": "two.csv", "OUTPUT_DIR": "out"}
    return settings | {"REWARDS": "regret,format=0.1,best=-0.5,verl_mine:length=0.01,verl_mine:score"}


def written(environ, stage="ppo"):
    """The input of a stage, the training rows as verl reads them, and the path of its rewards."""
    data, problems = read_input(environ, stage)
    assert not problems
    write_data(data)
    folder = data.output_dir / "data"
    return data, parquet.read_table(folder / "train.parquet").to_pylist(), str(folder / "rewards.json")


def as_rolled_out(record, truncated=False, ids=(7,), harmony=False):
    """`extra_info` as verl's reward manager hands it over."""
    return record["extra_info"] | {"truncated": truncated, "completion_ids": list(ids), "harmony": harmony}


@pytest.mark.parametrize("harmony", [True, False])
def test_a_completion_earns_what_train_grpo_gives_it(environ, harmony):
    data, records, spec = written(environ | {"INVALID_REWARD": "-12.5"})
    draw = random.Random(1)
    assert len(parquet.read_table(data.output_dir / "data/heldout.parquet")) == 6 and len(records) == 12
    completions, all_ids, rewards = [], [], []
    for _ in range(150):
        index, cut = draw.randrange(len(records)), draw.random() < 0.2
        text = "".join(draw.choices(WORDS + CHANNELS if harmony else WORDS, k=draw.randint(0, 5)))
        turn = text if harmony else f"<|channel|>final<|message|>{text}" + ("" if cut else "<|return|>")
        plain = TOKEN.sub("", text) if harmony else text
        all_ids.append([7] * draw.randint(1, 9))
        completions.append(read_completion(data.rows[index], turn, plain, len(all_ids[-1]), cut))
        extra_info = as_rolled_out(records[index], cut, all_ids[-1], harmony)
        rewards.append(compute_score(text, extra_info, spec)["score"])
    functions = load_rewards(data.reward_specs, Settings(INVALID_REWARD=-12.5))
    values = score(functions, completions, all_ids, column_names(data.rows), initial_trainer_state(9))
    expected = [total([w * v for (_, w), v in zip(data.reward_specs, row, strict=True)]) for row in values]
    assert rewards == pytest.approx(expected, abs=1e-12) and len(set(rewards)) > 50


def test_what_verl_reads(environ):
    _, records, spec = written(environ)
    record = records[-1]
    assert record["prompt"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "task 5"}]
    assert (record["data_source"], record["reward_model"]["ground_truth"]) == ("three", "[0]")
    assert record["answer"] == "<|channel|>final<|message|>[0]<|return|>"
    assert record["extra_info"]["index"] == 11 and json.loads(record["extra_info"]["row"])["number"] == 6
    result = compute_score("[0]", as_rolled_out(record), spec)
    assert result["reward_regret"] == 0 and math.isnan(result["reward_length"]), "no note: None"
    assert result["score"] == pytest.approx(0.1 - 0.5 - 9), "a module's own `score` gets messages, and is reward_score"


RENDERS = "rendered.csv, row 1: it is rendered, and verl renders every prompt itself"
REFUSED = [
    ({"MODEL_ID": "mxfp4"}, "its experts are in MXFP4, and verl trains 16 bits"),
    ({"MODEL_ID": "/no/such/llama"}, "MODEL_ID: '/no/such/llama' is neither a folder nor a Hub id"),
    ({"MODEL_ID": "models/my/llama"}, "MODEL_ID: 'models/my/llama' is neither a folder nor a Hub id"),
    ({"OUTPUT_DIR": "rendered.csv/out"}, "rendered.csv is a file, not a folder"),
    ({"LEARNING_RATE": "1e-5"}, "LEARNING_RATE: verl does not read this setting of train_grpo.py. Unset it"),
    ({"INVALID_REWARD": "nan"}, "INVALID_REWARD=nan: verl leaves no completion out"),
    ({"REWARDS": "action,overlong"}, "REWARDS=overlong: verl has its own limit. Write a function"),
    ({"DATA": "rendered.csv"}, RENDERS),
    ({"DATA": "effort.csv"}, "effort.csv, row 1, column reasoning_effort: verl renders all prompts with the same"),
    ({"DATA": "answers.csv"}, "answers.csv, columns: there is no column reward_action_0"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_refused(environ, tmp_path, changes, message):
    header = ["prompt", "reward_action_0", "reward_action_1"]
    write_csv(tmp_path / "effort.csv", [*header, "reasoning_effort"], [[n, 0.25, 0.75, "high"] for n in range(4)])
    write_csv(tmp_path / "rendered.csv", header, [[RENDERED.format(n), 0.25, 0.75] for n in range(4)])
    write_csv(tmp_path / "answers.csv", ["prompt", "answer"], [[f"{n}?", "so"] for n in range(4)])
    (tmp_path / "mxfp4").mkdir()
    (tmp_path / "mxfp4" / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    _, problems = read_input(environ | {"REWARDS": "action"} | changes, "ppo")
    assert message in only(problems)


def test_sft_needs_no_rewards(environ, tmp_path):
    write_csv(tmp_path / "answers.csv", ["prompt", "answer"], [[f"{n}?", "so"] for n in range(4)])
    _, records, _ = written(environ | {"DATA": "answers.csv", "EVAL_DATA": "missing.csv"}, "sft")
    assert [record["answer"] for record in records] == ["<|channel|>final<|message|>so<|return|>"] * 4


def test_a_completion_that_every_function_leaves_out_ends_the_run(environ):
    _, records, spec = written(environ)
    with open(spec, "w") as file:  # the checks before a run refuse such a function
        json.dump({"rewards": [["verl_mine:nothing", 1.0]], "INVALID_REWARD": None, "folder": "."}, file)
    with pytest.raises(RuntimeError, match=r"verl_mine:nothing left out two:1 \(None\)"):
        compute_score("[0]", as_rolled_out(records[0]), spec)


def test_a_date_of_a_parquet_file_travels_as_text():
    row = Row("days.parquet", 1, (("user", "?"),), (), {"prompt": "?", "day": datetime.date(2025, 1, 2)})
    (record,) = to_records("train", [row], {})
    assert json.loads(record["extra_info"]["row"])["columns"]["day"] == "2025-01-02"
