# SPDX-License-Identifier: Apache-2.0
"""Runs with EXPERTS=paged, in which nothing may read what is paged while vLLM is awake: there it has no data."""

from __future__ import annotations

import pytest
import test_vllm_run
import torch
from conftest import ROOT
from test_vllm_run import RUN, start  # noqa: F401

from grpo.model.load import paged_tensors
from grpo.rollout import paged_weights


class Gone(paged_weights.PagedWeights):
    """Puts tensors without data in the place of what leaves."""

    def __init__(self, policy):
        super().__init__(policy)
        self.policy = policy

    def leave(self):
        gone = {id(tensor) for tensor, _ in self.held}
        assert gone == {id(tensor) for tensor in paged_tensors(self.policy)}, "the tensors are still the model's"
        held = [part for module in self.policy.modules() for part in (module._parameters, module._buffers)]
        self.places = [(part, name, part[name]) for part in held for name in part if id(part[name]) in gone]
        for part, name, tensor in self.places:
            empty = torch.empty_like(tensor, device="meta")
            part[name] = torch.nn.Parameter(empty, False) if isinstance(tensor, torch.nn.Parameter) else empty
        super().leave()

    def enter(self):
        for part, name, tensor in self.places:
            part[name] = tensor
        super().enter()


@pytest.mark.slow
def test_nothing_reads_what_is_away(start, monkeypatch, tmp_path):  # noqa: F811
    """With mismatch check, evaluations, checkpoints and a resume."""
    monkeypatch.setattr(paged_weights, "pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
    plain, engines = test_vllm_run.stub_engine, []

    def paging(settings, plan, path, eos, policy, prepare):
        engine = plain(settings, plan, path, eos, policy, prepare)
        engine.wake()
        engine.pages = Gone(policy)
        engine.pages.leave()
        engine.sleep()
        engines.append(engine)
        return engine

    monkeypatch.setattr(test_vllm_run, "stub_engine", paging)
    held_out = tmp_path / "held_out.csv"
    held_out.write_bytes(b"".join((ROOT / RUN["DATA"]).read_bytes().splitlines(keepends=True)[:4]))
    run = start()
    changes = {"LORA_TARGETS": "all-linear,1.experts", "BETA": 0.04, "EXPERTS": "paged"}
    changes |= {"EVAL_SAMPLES": 2, "EVAL_STEPS": 1, "EVAL_DATA": held_out}
    for steps in (2, 3):
        assert run(**changes, TOTAL_STEPS=steps) == 0 and engines.pop().pages.places
