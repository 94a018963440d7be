# SPDX-License-Identifier: Apache-2.0
"""`bench.py attention`: it runs on a CPU, its float64 is right, and it notices what it is there for.

Run: python -m pytest tests/test_bench.py
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import bench
import pytest
import torch
from conftest import CLEAN, ROOT
from reference_kernel import reference_backward, reference_forward

import train_grpo
from grpo.measure import record as measure_record
from grpo.measure.attention import PARTS, AttentionCase, exact_attention
from grpo.measure.record import shown
from grpo.measure.resume import sampled_by_step
from grpo.measure.rollout import FirstRollout
from grpo.measure.step import bench_step, compare_gradients, step_figures
from grpo.measure.watched import PeakMemory
from grpo.model.attention import KERNELS, Kernel
from grpo.run.logs import COMPLETIONS
from grpo.settings import Settings


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


def test_results_make_no_commit_dirty_and_code_does(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.measure.record.ROOT", tmp_path)
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "docs" / "results").mkdir(parents=True)
    files = tmp_path / "code.py", tmp_path / "docs" / "results" / "one.json"
    for path in files:
        path.write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    clean = measure_record.commit()
    assert len(clean) == 40
    files[1].write_text("2")
    assert measure_record.commit() == clean
    files[0].write_text("2")
    assert measure_record.commit() == clean + "-dirty"


# ---- The step's figures ----------------------------------------------------------------------------------------------


@pytest.fixture
def halves(tmp_path, monkeypatch):
    """bench.py step with children that are pretended: a function of exit codes and options, which returns (code, result)."""
    monkeypatch.setattr("grpo.measure.step.ballast", lambda gib: contextlib.nullcontext())
    monkeypatch.setattr("grpo.measure.step.commit", lambda: "c1")
    monkeypatch.setattr(
        "grpo.measure.step.step_figures", lambda results: [measure_record.figure(name, 1.0, "s") for name in results]
    )
    result = tmp_path / "step.json"

    def run(codes, commit="c1", **options):
        def child(command, check):
            name = command[command.index("--child") + 1]
            if not codes[name]:
                out = command[command.index("--out") + 1]
                Path(out).write_text(json.dumps({"commit": commit}))
            return SimpleNamespace(returncode=codes[name])

        monkeypatch.setattr("subprocess.run", child)
        defaults = {"only": None, "model": "m", "data": "d", "lengths": "l"}
        given = SimpleNamespace(**defaults | options, run=str(tmp_path / "run"), out=str(result))
        code = bench_step(given)
        return code, [one["name"] for one in json.loads(result.read_text())["figures"]] if result.exists() else None

    return run


def test_the_halves_of_a_step_can_be_run_one_by_one(halves):
    assert halves({"bf16": 0, "mxfp4": 0}) == (0, ["bf16", "mxfp4"])
    assert halves({"bf16": 1, "mxfp4": 0}, only="mxfp4") == (0, ["bf16", "mxfp4"])


def test_a_half_that_fails_publishes_nothing_old(halves):
    assert halves({"bf16": 0, "mxfp4": 3}) == (3, ["bf16"])
    assert halves({"bf16": 3, "mxfp4": 0}) == (3, ["bf16"]), "as it was before"
    assert halves({"bf16": 0, "mxfp4": 0}, only="mxfp4")[0] == 1, "the other half is not there"


def test_halves_of_two_commits_do_not_mix(halves, capsys):
    assert halves({"bf16": 0, "mxfp4": 0}, commit="c0")[0] == 1
    assert "is of commit c0: run --only bf16 again" in capsys.readouterr().err


def test_figures_of_a_step_carry_the_names_that_are_asked_for():
    step = dict.fromkeys(
        ("step_s", "rollout_s", "wake_s", "handover_s", "sleep_s", "reward_s", "rollout_tokens_per_s"), "1"
    )
    step |= {"rollout_s": "5", "step_s": "10.5"}
    one = {
        "steps": [step] * 3, "w1": {"seconds": 5.0, "peak_gib": 9.0}, "micro_batch": 12, "w1_floor_s": 1.0,
        "job_peaks_gib": {"starting": 60.0, "rollout": 64.0}, "planned_gib": 62.0,
    }  # fmt: skip
    wide = one | {
        "w2": {"seconds": 17.0, "peak_gib": 19.0}, "w2_mean": 2180.0, "w2_max": 3198, "long_peak_gib": 19.0,
        "long_logits_gib": 18.0, "long_head_gib": 2.0, "w3_rollout_s": 20.0, "w3_learn_s": 3.0, "w1_trl_s": 25.0,
        "w1_trl_old_s": 6.0, "w1_trl_peak_gib": 30.0, "w3_tokens": 34_000, "w2_trl_s": 73.0, "logp_difference": 0.01, "logp_batching": 0.01,
        "logp_wrong_prompt": 0.1, "gradients": {"difference": 0.01, "batching": 0.01, "wrong_prompt": 1.0},
    }  # fmt: skip
    figures = {figure["name"]: figure for figure in step_figures({"bf16": wide, "mxfp4": one})}
    asked = """w1_step_s, w1_learn_s, w1_learn_trl_s, w1_floor_s, w2_learn_s, w2_learn_trl_s, w2_peak_gib, w3_step_s,
        w1_job_peak_mxfp4_gib, w1_learn_mxfp4_s, plan_error_bf16, plan_error_mxfp4"""
    assert {name.strip() for name in asked.split(",")} <= set(figures)
    assert figures["w3_step_s"]["value"] == pytest.approx(20 + 3 + 0.5), "a step has its rewards and optimizer too"
    assert figures["plan_error_bf16"]["value"] == pytest.approx(62 / 64 - 1)
    assert {"w1_speedup", "w2_speedup", "gradient_difference", "logp_wrong_prompt"} <= set(figures)


def test_a_peak_counts_from_what_was_free_before_the_process_came(monkeypatch):
    """79 GiB free at first; the process's context alone takes half a GiB, and counts."""
    monkeypatch.setattr("grpo.measure.watched.read_machine", lambda: SimpleNamespace(gpu_free=79.0))
    free = iter([78.5, 70.0, 60.0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(next(free, 75.0) * 2**30), 80 * 2**30))
    memory = PeakMemory()
    deadline = time.monotonic() + 10
    while memory.peaks.get("starting", 0.0) < 19 and time.monotonic() < deadline:
        time.sleep(0.01)
    memory.running = False
    memory.join()
    assert memory.peaks == {"starting": 19.0}


def test_gradients_are_compared_with_trls(tiny, tmp_path, monkeypatch):
    """In float32 on a CPU this learner's are TRL's, and other prompts give others."""
    from trainers import batch, make, plain_float32

    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    trainer = plain_float32(make(tiny, tmp_path, LOSS_TYPE="bnpo"))
    found = compare_gradients(trainer, batch(trainer, sampled=True), "eager")
    assert found["difference"] < 1e-4 and found["batching"] < 1e-4 and found["wrong_prompt"] > 0.1
    assert not any(parameter.grad is not None for parameter in trainer.model.parameters())


def test_the_shown_command_is_complete():
    """What the README prints can be run with one's own paths: every option that is required is in it."""
    for kind, flags in (("rollout", ["--sync", "merge"]), ("step", ["--lengths", "real_completions.csv"])):
        words = shown(kind, *flags).split()[1:]
        done = subprocess.run([sys.executable, *words, "--no-such-option"], cwd=ROOT, capture_output=True, text=True)
        assert "unrecognized arguments: --no-such-option" in done.stderr


def test_a_killed_run_and_its_continuation_sample_alike(tmp_path, tiny):
    out, data = tmp_path / "resume.json", ROOT / "data" / "tes_train_compact.csv"
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "resume", "--model", str(tiny), "--data", str(data)]
    command += ["--tokens", "12", "--run", str(tmp_path / "run"), "--out", str(out)]
    done = subprocess.run(command, env=CLEAN, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    found = values(record)
    assert found["resumed_from_step"] == 4 and found["metrics_rows"] == 8
    assert found["next_step_alike"] == found["later_step_alike"] == found["completions_per_step"] == 16
    assert "--tokens 12" in record["command"] and str(tmp_path) not in record["command"]
    # Once more: the folder is there already, and nothing is deleted.
    again = subprocess.run(command, env=CLEAN, capture_output=True, text=True, timeout=100)
    assert again.returncode == 2 and "is there already" in again.stderr and (tmp_path / "run.zip").exists()


def test_other_completions_do_not_count_as_alike(tmp_path):
    """A log with a header, and superseded rows without one, the last torn off."""
    header = ",".join(COMPLETIONS)
    (tmp_path / "a.csv").write_text(f'{header}\n5,d:1,"[1]\n",1,0.5,2,3,0\n5,d:1,[2],2,0.1,2,3,0\n')
    (tmp_path / "b.csv").write_text('5,d:1,"[1]\n",1,0.5,2,3,0\n5,d:1,[3],2,0.1,2,3,0\n6,d:1,"tor')
    one, other = (sampled_by_step(tmp_path / name) for name in ("a.csv", "b.csv"))
    assert one == {5: [("d:1", "[1]\n", "3"), ("d:1", "[2]", "3")]} and list(other) == [5]
    assert [a == b for a, b in zip(one[5], other[5], strict=True)] == [True, False]


def test_the_child_that_fills_the_caches_can_leave_a_run(monkeypatch, tmp_path):
    """A run answers every Exception itself: what ends this child is none."""
    check = SimpleNamespace(
        machine=None, attention=("eager", ""), run=SimpleNamespace(folder=tmp_path), settings=Settings()
    )
    for name in ("model.load.unseen_gpu", "model.attention.unusable_attention"):
        monkeypatch.setattr(f"grpo.{name}", lambda *given: None)
    for name in ("run_record", "prepare_run", "start_logging"):
        monkeypatch.setattr(train_grpo, name, lambda *given: None)

    def leave(*given):
        raise FirstRollout

    monkeypatch.setattr("train_grpo.train", leave)
    with pytest.raises(FirstRollout):
        train_grpo.launch(check, "model")
