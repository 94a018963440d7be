# SPDX-License-Identifier: Apache-2.0
"""Runs of the entry point with a stub in vLLM's place."""

from __future__ import annotations

import json
import os
import sys
import zipfile

import pytest
import torch
from helpers import read_csv
from runs import SETTINGS, assert_same_run, only_settings
from stub_vllm import pretend_vllm, stub_engine

import train_grpo
from grpo.model.load import paged_tensors
from grpo.output.checkpoints import find_checkpoint
from grpo.output.durable import SCRATCH
from grpo.rollout import paged_weights
from grpo.rollout.weight_sync import write_adapter

RUN = SETTINGS | {
    "USE_VLLM": 1, "TOTAL_STEPS": 4, "SAVE_STEPS": 1, "REWARDS": "auto", "LEARNING_RATE": "1e-2", "ATTN_IMPL": "eager",
    "EVAL_PROFILE": "", "LR_SCHEDULER": "constant",  # a run whose TOTAL_STEPS is raised stays the same
}  # fmt: skip


class Run:
    """`train_grpo.main` in this process on a machine that claims a GPU and vLLM, with a stub in vLLM's place."""

    def __init__(self, folder):
        self.folder, self.stubs = folder, []

    def __call__(self, prepare=lambda stub: None, **settings):
        variables = RUN | {"OUTPUT_DIR": self.folder} | settings
        with only_settings(**variables), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train_grpo.py"])

            def start_engine(*arguments):
                engine = stub_engine(*arguments, prepare)
                self.stubs.append(engine.llm)
                return engine

            pretend_vllm(patch, start_engine)
            return train_grpo.main([])

    def read(self, name):
        return (self.folder / name).read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def whole(straight):
    """An uninterrupted run of four steps: made by the first test that needs it, kept for the others."""
    assert straight.stubs or straight() == 0
    return straight


def test_a_run_with_vllm(whole):
    metrics, choices = read_csv(whole.folder / "metrics.csv"), json.loads(whole.read("settings.json"))["choices"]
    for row in metrics:
        assert 0 < float(row["logp_diff_mean"]) < 0.02 and float(row["is_ratio_mean"]) == pytest.approx(1, abs=0.02)
        assert float(row["logp_diff_max"]) >= float(row["logp_diff_mean"])
        assert float(row["clipped_ratio"]) < 0.5, "completions end at the stop tokens"
        for name in ("wake_s", "handover_s", "sleep_s"):
            assert 0 <= float(row[name]) <= float(row["rollout_s"])
        assert float(row["handover_s"]) > 0
    engine, log = choices["plan"]["engine"], whole.read("training.log")
    assert engine["max_num_seqs"] == 12 and engine["capture_sizes"] == list(range(1, 13))
    for words in ("before the first step, fixed tokens", "after a sleep, sampled tokens", "complete: 4", "vLLM awake"):
        assert words in log
    # B is zero in the first step. 0.2% by rounding of weights as large as the tiny model's.
    assert [row["sync_share"] == "" for row in metrics] == [True, False, False, False]
    assert all(float(row["sync_share"]) == pytest.approx(1, abs=0.01) for row in metrics[1:])
    assert whole.stubs[0].calls.count("generate") == 2 * 3 + 4, "the mismatch check's three rounds, and one a step"


def test_a_dying_engine_leaves_a_run_that_continues(whole, run):
    """The mismatch check calls generate six times, so the ninth call is step 3: exit 4, zip, checkpoint 2, then the
    rest, as in the uninterrupted run."""

    def die(stub):
        stub.fail["generate"] = (9, RuntimeError("an illegal memory access was encountered"))

    assert run(die) == 4
    log = run.read("training.log")
    assert "vLLM: generating failed (RuntimeError: an illegal memory access" in log and "it continues" in log
    with zipfile.ZipFile(run.folder.with_name("run.zip")) as archive:
        assert "run/checkpoint-2/adapter_model.safetensors" in archive.namelist()
    assert find_checkpoint(run.folder)[0] == 2
    assert run() == 0 and "continuing from step 2" in run.read("training.log")
    assert_same_run(run.folder, whole.folder)


def test_a_run_with_the_native_adapter_and_an_evaluation(run, monkeypatch):
    """Before and after training with vLLM, the first without adapter; continued with the other weight sync."""
    folders = []

    def watched(policy, folder, *rest):
        write_adapter(policy, folder, *rest)
        folders.append((folder, folder.stat().st_mode & 0o777))

    with monkeypatch.context() as patch:
        patch.setattr("grpo.rollout.engine.write_adapter", watched)
        assert run(ROLLOUT_SYNC="lora", TEMPERATURE=1.5, TOTAL_STEPS=1, EVAL_SAMPLES=2) == 0
    ((folder, mode),) = set(folders)
    assert mode == 0o700 and folder.name.startswith(f"{SCRATCH}{os.getpid()}-"), "which goes when its process ends"
    result = json.loads(run.read("evaluation.json"))
    assert 0 <= result["before"]["reward"] <= result["oracle"] and 0 <= result["after"]["reward"] <= result["oracle"]
    requests = run.stubs[0].requests  # The check's, before, before greedily, step 1, after, after greedily.
    assert len({r.lora_int_id for r in requests}) == len({r.lora_name for r in requests}) == 8
    assert float(read_csv(run.folder / "metrics.csv")[0]["logp_diff_mean"]) < 0.02
    assert run(ROLLOUT_SYNC="merge", TEMPERATURE=1.4, TOTAL_STEPS=2) == 2, "no other samples after resuming"
    assert run(ROLLOUT_SYNC="merge", TEMPERATURE=1.5, TOTAL_STEPS=2) == 0
    assert len(read_csv(run.folder / "metrics.csv")) == 2


def test_a_run_stops_where_vllm_and_trainer_do_not_agree(run):
    assert run(lambda stub: setattr(stub, "ignore_adapter", True)) == 3
    log = run.read("training.log")
    words = "PARITY: before the first step, fixed tokens: with the test adapter vLLM and trainer differ"
    assert words in log and "ROLLOUT_SYNC" in log
    assert len(run.read("metrics.csv").splitlines()) == 1, "no step was made"
    # What exit code 3 names can be tried at once, in the same folder.
    assert run(ROLLOUT_SYNC="lora", TOTAL_STEPS="1") == 0 and len(read_csv(run.folder / "metrics.csv")) == 1
    assert run(PARITY="off", TOTAL_STEPS="1", IS_CORRECTION="none", OVERWRITE="1") == 0
    assert "| PARITY=off" in run.read("training.log")
    row = read_csv(run.folder / "metrics.csv")[0]
    assert float(row["logp_diff_mean"]) > 0 and float(row["is_ratio_mean"]) == 1 and row["handover_s"]


class Gone(paged_weights.PagedWeights):
    """Puts tensors without data in the place of what leaves: nothing may read what is paged while vLLM is awake."""

    def __init__(self, policy):
        super().__init__(policy)
        self.policy = policy

    def offload(self):
        gone = {id(tensor) for tensor, _ in self.copies}
        assert gone == {id(tensor) for tensor in paged_tensors(self.policy)}, "the tensors are still the model's"
        held = [part for module in self.policy.modules() for part in (module._parameters, module._buffers)]
        self.places = [(part, name, part[name]) for part in held for name in part if id(part[name]) in gone]
        for part, name, tensor in self.places:
            empty = torch.empty_like(tensor, device="meta")
            part[name] = torch.nn.Parameter(empty, False) if isinstance(tensor, torch.nn.Parameter) else empty
        super().offload()

    def reload(self):
        for part, name, tensor in self.places:
            part[name] = tensor
        super().reload()


@pytest.mark.slow
def test_nothing_reads_what_is_away(run, monkeypatch):
    """With mismatch check, evaluations, checkpoints and a resume."""
    monkeypatch.setattr(paged_weights, "pinned_buffer", lambda size: torch.zeros(size, dtype=torch.uint8))
    plain, engines = stub_engine, []

    def paging(settings, plan, path, eos, policy, prepare):
        engine = plain(settings, plan, path, eos, policy, prepare)
        engine.wake()
        engine.pages = Gone(policy)
        engine.pages.offload()
        engine.sleep()
        engines.append(engine)
        return engine

    monkeypatch.setattr(sys.modules[__name__], "stub_engine", paging)
    changes = {"LORA_TARGETS": "all-linear,1.experts", "BETA": 0.04, "EXPERTS": "paged"}
    changes |= {"EVAL_SAMPLES": 2, "EVAL_STEPS": 1}
    for steps in (2, 3):
        assert run(**changes, TOTAL_STEPS=steps) == 0 and engines.pop().pages.places
