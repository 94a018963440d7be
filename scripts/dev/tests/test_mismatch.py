# SPDX-License-Identifier: Apache-2.0
"""`bench.py mismatch`: faults that are made on purpose, with a stub in vLLM's place."""

import os
import sys
from unittest import mock

import bench
import torch
from stub_vllm import pretend_vllm, stub_engine

import train_grpo
from scripts.dev import mismatch, record

UNSEEN = {"none", "clamp_lost"}  # The tiny model never reaches its clamp.


def test_each_fault_is_made_and_goes_away(tmp_path, monkeypatch, quiet):
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    pretend_vllm(monkeypatch, stub_engine)
    out, data = tmp_path / "out.json", f"{record.ROOT}/data/tes_heldout_compact.csv"
    words = ["--model", "tiny", "--data", data, "--out", str(out), "--run", f"{tmp_path}/run"]
    names = [*mismatch.FAULTS, "none"]
    words += ["--set", "ATTN_IMPL=eager", "--set", "EXPERTS=bf16", "--set", "MAX_COMPLETION_LEN=16", "--faults", *names]
    monkeypatch.setattr(sys, "argv", ["bench.py", "mismatch", *words])
    options = bench.parse_args()
    options.main = train_grpo.main
    with mock.patch.dict(os.environ):
        assert mismatch.bench_mismatch(options) == 0
    figures = [(figure["name"], figure["value"]) for figure in record.read_json(out)["figures"]]
    verdicts = [(name.removesuffix("_found"), value) for name, value in figures if name.endswith("_found")]
    assert [name for name, _ in verdicts] == names
    assert {name for name, value in verdicts if not value} == UNSEEN
    first, last = ([value for name, value in figures if name == f"none_{kind}"] for kind in ("base_fixed", "control"))
    assert len(first) == len(last) == 2 and torch.allclose(
        torch.tensor(first[:1] + last[:1]), torch.tensor(first[1:] + last[1:])
    )
