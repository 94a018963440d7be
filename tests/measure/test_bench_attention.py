# SPDX-License-Identifier: Apache-2.0
"""`bench.py attention`: it runs on a CPU, its float64 is what two right kernels compute, and a wrong one is noticed."""

from __future__ import annotations

import json
import sys

import bench
import pytest
import torch
from reference_kernel import reference_backward, reference_forward

from grpo.measure.attention import PARTS
from grpo.model.attention import KERNELS, Kernel


def run_attention(monkeypatch, tmp_path, *only, forward=reference_forward, backward=reference_backward):
    """(exit code, record, values of its figures) of `bench.py attention` on the CPU, with a kernel in place of torch's."""
    monkeypatch.setitem(KERNELS, "torch_flash", Kernel(forward, backward))
    out = tmp_path / "attention.json"
    chosen = ["--only", *only] if only else []
    monkeypatch.setattr(sys, "argv", ["bench.py", "attention", "--device", "cpu", "--out", str(out), *chosen])
    code, record = bench.main(), json.loads(out.read_text(encoding="utf-8"))
    return code, record, {one["name"]: one["value"] for one in record["figures"]}


def test_it_runs_on_a_cpu(monkeypatch, tmp_path):
    code, record, found = run_attention(monkeypatch, tmp_path)
    assert code == 0 and record["command"] == "python scripts/bench.py attention --device cpu"
    assert set(record) == {"command", "machine", "date", "versions", "commit", "figures"}
    assert all(set(one) == {"name", "value", "unit", "note"} for one in record["figures"])
    parts = {f"eager_{kind}_{part}_error" for kind in ("full", "window") for part in PARTS}
    assert set(found) == parts | {"tokens", "error_bound", "eager_full_ms", "eager_window_ms", "eager_usable"}
    assert found["tokens"] == 44 and found["error_bound"] == 1e-5 and found["eager_usable"] == 1
    assert all(0 < found[name] < 1e-6 for name in parts) and found["eager_full_ms"] > 0
    assert record["versions"]["torch"] and None not in record["versions"].values()


def wider(kernel):
    return lambda *rest: kernel(*rest[:-1], rest[-1] and rest[-1] + 1)


def forgets_the_group(*rest):
    dq, dk, dv = reference_backward(*rest)
    return dq, dk / 2, dv  # as if one of its two query heads were lost


def knows_no_sink(*rest):
    out, lse = reference_forward(*rest)
    return out, lse + 1e4


def not_a_number(*rest):
    return tuple(x * torch.nan for x in reference_backward(*rest))


BOTH = ("full", "window")
KERNELS_TRIED = {  # and the kinds of layers and the parts that it gets wrong
    "right": ({}, (), ()),
    "NaN": ({"backward": not_a_number}, BOTH, ("q", "k", "v")),
    "window": ({"forward": wider(reference_forward), "backward": wider(reference_backward)}, ("window",), PARTS),
    "keys": ({"backward": forgets_the_group}, BOTH, ("k",)),
    "sinks": ({"forward": knows_no_sink}, BOTH, PARTS),
}


@pytest.mark.parametrize("name", KERNELS_TRIED)
def test_a_wrong_kernel_is_told_from_a_right_one(monkeypatch, tmp_path, capsys, name):
    kernel, kinds, parts = KERNELS_TRIED[name]
    code, _, found = run_attention(monkeypatch, tmp_path, "torch_flash", **kernel)
    wrong = {key for key in found if key.endswith("_error") and not found[key] < 1e-3}
    assert wrong == {f"torch_flash_{kind}_{part}_error" for kind in kinds for part in parts}
    assert code == bool(kinds) and ("FAILED torch_flash" in capsys.readouterr().err) == bool(kinds)


def test_what_cannot_be_measured_leaves_the_others_figures(monkeypatch, tmp_path, capsys):
    """A kernel that raises is a failure, a package that is missing is none, and that nothing is left is one."""

    def raises(*rest):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setitem(sys.modules, "flash_attn_3._C", None)
    names = ("torch_flash", "flash_attention_3", "eager")
    code, record, found = run_attention(monkeypatch, tmp_path, *names, forward=raises)
    errors = capsys.readouterr().err
    assert code == 1 and "FAILED torch_flash: RuntimeError: no kernel image is available" in errors
    assert [found[f"{name}_usable"] for name in names] == [0, 0, 1] and errors.count("FAILED") == 1
    assert any("flash_attn_3" in one["note"] for one in record["figures"])
    assert run_attention(monkeypatch, tmp_path, "flash_attention_3")[0] == 1
    assert "no implementation could be measured" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.py", "attention", "--out", str(tmp_path / "attention.json")])
    assert bench.main() == 2 and "no GPU here" in capsys.readouterr().err
