# SPDX-License-Identifier: Apache-2.0
"""scripts/dev/cpu_vllm.py, as far as it goes without vLLM: what it puts in the place of what."""

import os

import cpu_vllm
from helpers import write_csv
from machines import resolved_run

import train_grpo
from grpo.model import load
from grpo.rollout import engine


def test_a_run_gets_the_engine_of_the_cpu_and_a_plan_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr("os.environ", dict(os.environ))
    before, functions = load.in_compute_dtype, []

    def train(resolved):
        functions.extend([engine.start_engine, load.in_compute_dtype])
        return resolved.plan.engine

    monkeypatch.setattr(train_grpo, "train", train)
    rows = [(f"Ticket {n}", n % 2, 0.5) for n in range(4)]
    data = write_csv(tmp_path / "t.csv", ["prompt", "reward_action_0", "reward_action_1"], rows)
    resolved = resolved_run(tmp_path / "run", DATA=data, MAX_COMPLETION_LEN=20, EVAL_SAMPLES=0)
    with cpu_vllm.vllm_on_the_cpu():
        plan = train_grpo.train(resolved)
        assert os.environ["USE_VLLM"] == "0", "the checks ask for a GPU otherwise"
    assert plan.max_model_len == resolved.longest_prompt + 20
    assert plan.max_num_seqs == resolved.settings.completions_per_rollout
    assert functions[0] is cpu_vllm.start_engine and functions[1] is not before is load.in_compute_dtype
    assert train_grpo.train is train
