# SPDX-License-Identifier: Apache-2.0
"""`bench.py attention`: it runs on a CPU, its float64 is right, and it notices what it is there for."""

from __future__ import annotations

import json
import subprocess
import sys

import bench
import pytest
import torch
from conftest import CLEAN, ROOT
from reference_kernel import reference_backward, reference_forward

from grpo.measure.attention import PARTS, AttentionCase, exact_attention
from grpo.model.attention import KERNELS, Kernel


def run_attention(monkeypatch, tmp_path, *arguments, forward=reference_forward, backward=reference_backward):
    """(exit code, record or None) of `bench.py attention` in this process, with a kernel in place of torch's."""
    monkeypatch.setitem(KERNELS, "torch_flash", Kernel(forward, backward))
    out = tmp_path / "attention.json"
    arguments = arguments or ("--only", "torch_flash")
    command = ["bench.py", "attention", "--device", "cpu", "--small", "--out", str(out), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    code = bench.main()
    return code, json.loads(out.read_text(encoding="utf-8")) if out.exists() else None


def values(record):
    return {one["name"]: one["value"] for one in record["figures"]}


def test_it_runs_on_a_cpu(tmp_path):
    out = tmp_path / "attention.json"
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "attention", "--device", "cpu", "--small"]
    done = subprocess.run([*command, "--out", str(out)], env=CLEAN, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert set(record) == {"command", "machine", "date", "versions", "commit", "figures"}
    assert record["command"] == "python scripts/bench.py attention --device cpu --small"
    assert all(set(one) == {"name", "value", "unit", "note"} for one in record["figures"])
    found = values(record)
    parts = {f"eager_{kind}_{part}_error" for kind in ("full", "window") for part in PARTS}
    assert set(found) == parts | {"tokens", "error_bound", "eager_full_ms", "eager_window_ms", "eager_usable"}
    assert found["tokens"] == 44 and found["error_bound"] == 1e-5 and found["eager_usable"] == 1
    assert all(0 < found[name] < 1e-6 for name in parts) and found["eager_full_ms"] > 0


def test_a_right_kernel_passes(monkeypatch, tmp_path):
    code, record = run_attention(monkeypatch, tmp_path)
    assert code == 0 and values(record)["torch_flash_window_sinks_error"] < 1e-6


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


WRONG = {
    "NaN": ({"backward": not_a_number}, "full", ["q", "k", "v"]),
    "window": ({"forward": wider(reference_forward), "backward": wider(reference_backward)}, "window", PARTS),
    "keys": ({"backward": forgets_the_group}, "full", ["k"]),
    "sinks": ({"forward": knows_no_sink}, "full", PARTS),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_does_not(monkeypatch, tmp_path, capsys, name):
    kernel, kind, parts = WRONG[name]
    code, record = run_attention(monkeypatch, tmp_path, **kernel)
    found, errors = values(record), capsys.readouterr().err
    assert code == 1 and "FAILED torch_flash" in errors
    for part in parts:
        assert not found[f"torch_flash_{kind}_{part}_error"] < 1e-3, part
    if name == "window":
        assert found["torch_flash_full_q_error"] < 1e-6, "full attention has no window"
    if name == "keys":
        assert found["torch_flash_full_v_error"] < 1e-6


def test_a_kernel_that_raises_fails_and_leaves_the_others_figures(monkeypatch, tmp_path, capsys):
    def raises(*rest):
        raise RuntimeError("no kernel image\nis available")

    code, record = run_attention(monkeypatch, tmp_path, "--only", "torch_flash", "eager", forward=raises)
    assert code == 1 and "FAILED torch_flash: RuntimeError: no kernel image is available" in capsys.readouterr().err
    assert values(record)["torch_flash_usable"] == 0 and values(record)["eager_usable"] == 1


def test_a_missing_package_is_named_and_no_failure(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "flash_attn_3._C", None)
    code, record = run_attention(monkeypatch, tmp_path, "--only", "flash_attention_3", "eager")
    (missing,) = [one for one in record["figures"] if one["name"] == "flash_attention_3_usable"]
    assert code == 0 and missing["value"] == 0 and "flash_attn_3" in missing["note"]
    code, _ = run_attention(monkeypatch, tmp_path, "--only", "flash_attention_3")
    assert code == 1 and "no implementation could be measured" in capsys.readouterr().err


def test_unknown_names_and_a_missing_gpu_are_told(monkeypatch, tmp_path, capsys):
    assert run_attention(monkeypatch, tmp_path, "--only", "flash")[0] == 2
    assert "no flash; use torch_flash" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_attention(monkeypatch, tmp_path, "--device", "cuda")[0] == 2
    assert "no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("window", [None, 2])
def test_float64_is_the_definition(window):
    """Against one query at a time over the keys that it may see, written out, and autograd through that."""
    case = AttentionCase(3, (2, 1), 2, 1, 4, 2)
    generator = torch.Generator().manual_seed(0)
    q, k, v, sinks = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 2, 4), (6, 1, 4), (6, 1, 4), (2,))
    )
    # Tokens 0 to 2 are the prompt, 3 and 4 one completion, 5 the other.
    before = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 5]]
    rows = []
    for i, seen in enumerate(before):
        seen = seen[-(window or 99) :]
        weights = (q[i] @ k[seen, 0].T / 2).exp()
        rows.append(weights / (weights.sum(1) + sinks.exp())[:, None] @ v[seen, 0])
    out, gradient = torch.stack(rows), torch.randn(6, 2, 4, generator=generator, dtype=torch.float64)
    expected = [out, *torch.autograd.grad(out, (q, k, v, sinks), gradient)]
    for ours, true in zip(exact_attention(case, window, (q, k, v, sinks), gradient), expected, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)
