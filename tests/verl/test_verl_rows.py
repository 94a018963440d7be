# SPDX-License-Identifier: Apache-2.0
"""Rows and rewards on their way through verl. Run: python -m pytest tests/verl/test_verl_rows.py"""

from __future__ import annotations

import json
import math
import random
import sys
from datetime import date

import pyarrow
import pytest
from chat_models import make_chat_model
from conftest import RENDERED, write_csv
from machines import only
from pyarrow import parquet

from grpo.data.files import SPECIAL, column_names
from grpo.data.scoring import first_state, load_rewards, read_completion, score, total
from grpo.verl.rows import HELDOUT, SPEC, TRAIN, prepare, write_data
from grpo.verl.score import compute_score

MINE = """
def length(completion_ids, note, **columns): return [float(len(ids)) if told else None for ids, told in zip(completion_ids, note)]
def score(completions, prompts, **columns): return [len(text) + len(prompt) if "[" in text else -9 for text, prompt in zip(completions, prompts)]
def nothing(completions, **columns): return [None for _ in completions]
"""
PIECES = (
    "<|channel|>final<|message|>",
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    "[0]",
    "[1]",
    "[2]",
    " so ",
    "<|return|>",
)


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
    settings = {
        "MODEL_ID": str(make_chat_model(tmp_path)),
        "DATA": "two.csv,three.csv",
        "EVAL_DATA": "two.csv",
        "OUTPUT_DIR": "out",
    }
    return settings | {
        "PROMPTS_PER_STEP": "4",
        "REWARDS": "regret,format=0.1,best=-0.5,verl_mine:length=0.01,verl_mine:score",
    }


@pytest.mark.parametrize("harmony", [True, False])
def test_a_completion_earns_what_train_grpo_gives_it(environ, tmp_path, harmony):
    model = {"MODEL_ID": str(make_chat_model(tmp_path, harmony))} if harmony else {}
    p = prepare(environ | model | {"INVALID_REWARD": "-12.5"}, ["ppo"], 2)
    assert not p.problems and p.harmony == harmony
    folder, draw = write_data(p), random.Random(1)
    records = parquet.read_table(folder / TRAIN).to_pylist()
    assert len(parquet.read_table(folder / HELDOUT)) == 6 and len(records) == 12
    read, ids, earned = [], [], []
    for _ in range(150):
        n, cut = draw.randrange(len(records)), draw.random() < 0.2
        text = "".join(draw.choices(PIECES if harmony else PIECES[3:7], k=draw.randint(0, 5)))
        turn = text if harmony else f"<|channel|>final<|message|>{text}" + "<|return|>" * (not cut)
        ids.append([7] * draw.randint(1, 9))
        plain = SPECIAL.sub("", text) if harmony else text
        read.append(read_completion(p.rows[n], turn, plain, len(ids[-1]), cut))
        known = records[n]["extra_info"] | {"truncated": cut, "completion_ids": ids[-1]}
        earned.append(compute_score("two", text, "", known, spec=str(folder / SPEC))["score"])
    values = score(load_rewards(p.reward_specs, p.settings), read, ids, column_names(p.rows), first_state(9))
    expected = [total([w * v for (_, w), v in zip(p.reward_specs, row, strict=True)]) for row in values]
    assert earned == pytest.approx(expected, abs=1e-12) and len(set(earned)) > 50


def test_what_verl_reads(environ):
    p = prepare(environ, ["sft", "grpo"], 1)
    record = parquet.read_table(write_data(p) / TRAIN).to_pylist()[-1]
    assert record["prompt"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "task 5"}]
    assert (record["data_source"], record["answer"], record["reward_model"]["ground_truth"]) == ("three", "[0]", "[0]")
    assert record["extra_info"]["index"] == 11 and json.loads(record["extra_info"]["row"])["number"] == 6
    given = compute_score("three", "[0]", "", record["extra_info"], spec=str(p.data / SPEC))
    assert given["reward_regret"] == 0 and math.isnan(given["reward_length"]), "no note: None"
    assert given["score"] == pytest.approx(0.1 - 0.5 - 9), "a module's own `score` gets messages, and is reward_score"


def test_an_answer_that_was_cut_is_none(environ, tmp_path):
    (tmp_path / "sums.jsonl").write_text(
        "".join(f'{{"question": "{n}?", "answer": "so #### {n}"}}\n' for n in range(4))
    )
    asked = {"MODEL_ID": environ["MODEL_ID"], "TASK": "gsm8k", "DATA": "sums.jsonl", "EVAL_DATA": "sums.jsonl"}
    p = prepare(asked | {"OUTPUT_DIR": "sums", "PROMPTS_PER_STEP": "4"}, ["sft", "ppo"], 2)
    record = parquet.read_table(write_data(p) / TRAIN).to_pylist()[3]
    assert record["answer"] == "so #### 3" and "End your answer with ####" in record["prompt"][0]["content"]
    spec = str(p.data / SPEC)
    scores = [
        compute_score("", "#### 3", "", record["extra_info"] | {"truncated": cut}, spec=spec) for cut in (False, True)
    ]
    assert [one["score"] for one in scores] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MODEL_ID": "tiny"}, "it is neither a folder nor a Hub id"),
        ({"PROMPTS_PER_STEP": "3"}, "PROMPTS_PER_STEP: 3 cannot be shared by 2 GPUs. Set a multiple of 2"),
        ({"PROMPTS_PER_STEP": "20"}, "a step takes 20 different rows here, and there are 12"),
        ({"MAX_PROMPT_LEN": "2"}, "two.csv, row 1: the prompt has"),
        ({"LORA_R": "8"}, "LORA_R=8: verl has no counterpart, here all weights are trained, not an adapter. Unset it"),
        ({"LOSS_TYPE": "vespo"}, "LOSS_TYPE=vespo: verl has no counterpart. Set one of bnpo, dapo, grpo, dr_grpo"),
        ({"INVALID_REWARD": "nan"}, "INVALID_REWARD=nan: verl leaves no completion out"),
        ({"DATA": "rendered.csv"}, "rendered.csv, row 1: the prompt is rendered, and verl renders every prompt itself"),
    ],
)
def test_what_is_refused(environ, tmp_path, changes, message):
    header = ["prompt", "reward_action_0", "reward_action_1"]
    write_csv(tmp_path / "rendered.csv", header, [[RENDERED.format(n), 0.25, 0.75] for n in range(4)])
    told = prepare(environ | {"REWARDS": "action"} | changes, ["ppo"], 2).problems
    assert any(message in line for line in told), told


@pytest.mark.parametrize(
    ("missing", "config", "message"),
    [
        ("model.safetensors", {}, "model.safetensors is missing. Copy the whole checkpoint"),
        ("chat_template.jinja", {}, "it has no chat template"),
        (None, {"quantization_config": {"quant_method": "mxfp4"}}, "verl trains 16 bits. Dequantize it first"),
    ],
)
def test_models_that_verl_cannot_train(environ, tmp_path, missing, config, message):
    (tmp_path / "other").mkdir()
    folder = make_chat_model(tmp_path / "other", **config)
    if missing:
        (folder / missing).unlink()
    assert message in only(prepare(environ | {"MODEL_ID": str(folder)}, ["sft"], 2).problems)


def test_cells_and_rewards_that_verl_cannot_take(environ, tmp_path):
    table = pyarrow.Table.from_pylist([{"prompt": f"{n}?", "answer": "so", "day": date(2026, 1, 1)} for n in range(4)])
    parquet.write_table(table, tmp_path / "days.parquet")
    with pytest.raises(
        ValueError, match=r"days.parquet, row 1, column day: JSON cannot hold datetime.date\(2026, 1, 1\)"
    ):
        write_data(prepare(environ | {"DATA": "days.parquet"}, ["sft"], 2))
    p = prepare(environ | {"REWARDS": "verl_mine:nothing", "OUTPUT_DIR": "other"}, ["ppo"], 2)
    record = parquet.read_table(write_data(p) / TRAIN).to_pylist()[0]
    with pytest.raises(RuntimeError, match=r"verl_mine:nothing left out two:1 \(None\)"):
        compute_score("two", "[0]", "", record["extra_info"], spec=str(p.data / SPEC))
