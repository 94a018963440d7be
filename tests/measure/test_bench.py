# SPDX-License-Identifier: Apache-2.0
"""What every measurement writes, and `bench.py rollout` and `step` with a stub in vLLM's place."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import bench
import pytest
import torch
from conftest import RENDERED
from machines import H100
from stub_vllm import StubLLM, StubLoRARequest, StubSampling
from trainers import make, plain_float32

import train_grpo
from grpo.measure import generate, record, rollout, step, trl_path, watched
from grpo.measure.watched import child_result, completions_of, kept_trainers
from grpo.plan.machine import installed_versions
from grpo.rollout import engine as rollout_engine
from grpo.rollout.engine import Engine


def values(path: Path) -> dict[str, float]:
    return {one["name"]: one["value"] for one in record.read_json(path)["figures"]}


def test_results_make_no_commit_dirty_and_code_does(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    code, result = tmp_path / "code.py", tmp_path / "docs" / "results" / "one.json"
    result.parent.mkdir(parents=True)
    code.write_text("1")
    result.write_text("1")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    clean = record.commit()
    result.write_text("2")
    assert record.commit() == clean and len(clean) == 40
    code.write_text("2")
    assert record.commit() == clean + "-dirty"


def test_the_shown_command_is_complete(monkeypatch):
    """What the pages print can be run with one's own paths: every option that is required is in it."""
    required = {"rollout": ["--sync", "merge"], "generate": [], "step": ["--lengths", "real_completions.csv"]}
    for kind, flags in required.items():
        monkeypatch.setattr(sys, "argv", record.shown(kind, *flags).split()[1:])
        assert bench.parse_args().command == kind


@pytest.fixture
def options(tiny, tmp_path, monkeypatch):
    """Options of a child, whose entry point trains the tiny model for three steps of 2 x 8 completions with a stub of vLLM;
    what a GPU would say is pretended."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name, value in {"memory_allocated": 0, "max_memory_allocated": 2**30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    free = itertools.cycle([1, *[2] * 9])  # GiB; 11 before the process came, of which its context counts
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free) * 2**30, 2**34))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an H100")
    monkeypatch.setattr("grpo.measure.watched.read_machine", lambda: SimpleNamespace(gpu_free=11.0))
    triton = ModuleType("triton")
    triton.knobs = SimpleNamespace(runtime=SimpleNamespace(jit_post_compile_hook=None))
    monkeypatch.setitem(sys.modules, "triton", triton)
    different = SimpleNamespace(format=lambda text: RENDERED.format(text.split()[1] * 20))
    monkeypatch.setattr("trainers.RENDERED", different)  # so that a wrong prompt matters
    monkeypatch.setattr(trl_path, "ATTENTION", "eager")
    monkeypatch.setattr(watched, "completions_of", lambda asked: completions_of({512: 6}[asked]))
    monkeypatch.setattr(step, "LONGEST", 8)
    monkeypatch.setattr(rollout, "LONG_TOKENS", 9)
    (tmp_path / "lengths.csv").write_text("completion\n" + "one two three\n" * 5 + '"hour 8\nload 30"\n')
    engines, run = [], tmp_path / "run"

    def start_engine(settings, plan, model_path, stop_token_ids):
        stub = StubLLM(tiny, dtype=torch.float32)
        engines.append(Engine(stub, StubSampling, StubLoRARequest, settings, stop_token_ids))
        engines[-1].sleep()
        return engines[-1]

    monkeypatch.setattr(rollout_engine, "start_engine", start_engine)

    def main(arguments):
        assert os.environ["NUM_GENERATIONS"] == "8" and os.environ["OUTPUT_DIR"] == str(run)
        run.mkdir()
        trainer = make(tiny, run, NUM_GENERATIONS=8, MAX_COMPLETION_LEN=600, TOTAL_STEPS=3, LOSS_TYPE="bnpo")
        plain_float32(trainer)
        trainer.run.engine = rollout_engine.start_engine(trainer.run.settings, None, "", trainer.eos_token_ids)
        trainer.run.engine.stop_token_ids = []  # every completion is as long as it may be
        trainer.run.parity += [{"mean": m, "max": 2 * m, "control_mean": 1 - m} for m in (0.1, 0.2)]
        trainer.train()
        plan = trainer.run.plan
        trainer.run.plan = dataclasses.replace(plan, weights=8.0, adapter=1.0, learning=6.0, generation=1.5)
        return 0

    given = {
        "model": str(tiny),
        "data": "d",
        "run": str(run),
        "out": str(tmp_path / "child.json"),
        "sync": "merge",
        "targets": "all-linear",
    }
    with mock.patch.dict(os.environ):
        yield SimpleNamespace(**given, lengths=str(tmp_path / "lengths.csv"), main=main, warm_caches=True, only=None)
    for engine in engines:
        shutil.rmtree(engine.folder or "", ignore_errors=True)


def test_the_checks_let_a_measurement_begin(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.preflight.resolve.read_machine", lambda: H100)
    versions = installed_versions
    found = lambda names: versions(names) | {"vllm": "0.26.0"}  # noqa: E731
    monkeypatch.setattr("grpo.preflight.resolve.installed_versions", found)
    given = {"model": "tiny", "data": str(record.ROOT / "data/tes_train_compact.csv"), "run": tmp_path / "run"}
    with mock.patch.dict(os.environ):
        options = SimpleNamespace(**given, main=lambda arguments: train_grpo.main(["--check"]))
        assert watched.run_w1(options, ATTN_IMPL="eager") == 0


def test_a_rollout_is_watched_and_a_changed_base_weight_fails_it(options, monkeypatch, tmp_path):
    main, before = options.main, {name: getattr(Engine, name) for name in ("rollout", "generate", "wake")}

    def damaging(arguments):
        with kept_trainers() as made:
            code = main(arguments)
        made[0].model.get_base_model().model.layers[0].input_layernorm.weight.data[3] += 1e-3
        return code

    options.main, options.command, options.child = damaging, "rollout", "short"
    assert rollout.bench_rollout(options) == 0
    assert before == {name: getattr(Engine, name) for name in before}, "nothing stays watched"
    found = record.read_json(Path(options.out))
    assert found["same_seed_alike"] == 16 and found["long_tokens"] == 16 * 9
    assert found["parity_mean"] == 0.2 and found["parity_max"] == 0.4 and found["parity_control_mean"] == 0.8
    assert found["base_changed_elements"] == 1 and found["adapter_nonzero_lora_b"] > 0
    assert found["sync_share"] == pytest.approx(1, abs=1e-3)
    assert found["rollout_compiled"] == 0 and found["rollout_tok_s"] > 0 and 0 < found["start_to_rollout_s"] < 10_000
    # The parent of both children.
    parent = SimpleNamespace(**vars(options) | {"child": None, "warm_caches": False, "out": str(tmp_path / "r.json")})
    monkeypatch.setattr(
        watched, "run_child", lambda given, child: int(not shutil.copy(options.out, child_result(given, child)))
    )
    assert rollout.bench_rollout(parent) == 1
    assert {"rollout_tok_s", "speedup_many"} <= values(Path(parent.out)).keys(), "what the README reads"


def test_rollouts_without_vllm_are_timed_beside_transformers(options, monkeypatch):
    """By a run that takes 9 of the 11 GiB: 1 of what it seems to take is the ballast. 10 GiB are its context's."""
    left = []
    monkeypatch.setattr(watched, "occupy", lambda gib: left.append(gib) or SimpleNamespace(nbytes=2**30))

    def main(arguments):
        given = {"USE_VLLM": "0", "EXPERTS": "mxfp4", "MAX_COMPLETION_LEN": "512", "NUM_GENERATIONS": "8"}
        assert given.items() <= os.environ.items()
        run = Path(os.environ["OUTPUT_DIR"])
        run.mkdir()
        trainer = plain_float32(make(Path(options.model), run, NUM_GENERATIONS=8, MAX_COMPLETION_LEN=6, TOTAL_STEPS=3))
        trainer.run.plan = dataclasses.replace(trainer.run.plan, weights=12.0, generation=1.5, learning=1.0)
        trainer.train()
        return 0

    options.main, options.command = main, "generate"
    assert generate.bench_generate(options) == 0
    found, steps = values(Path(options.out)), record.steps_of(Path(options.run))[1:]
    assert left == [22 - 10] and found["job_peak_gib"] == 9 and found["plan_error"] == pytest.approx(13.5 / 9 - 1)
    assert found["step_s"] == pytest.approx(steps.step_s.mean()) and found["rollout_s"] < found["step_s"]
    assert found["generate_tok_s"] == pytest.approx(found["speedup"] * found["hf_generate_tok_s"])
    assert found["token_s"] == pytest.approx(4 / found["generate_tok_s"]), "four at once"
    options.main = lambda arguments: 4
    assert generate.bench_generate(options) == 4


def test_a_step_is_measured_beside_trls(options, monkeypatch):
    """In float32 on a CPU this learner's gradients and log-probs are TRL's, and other prompts give others."""
    monkeypatch.setattr(step, "ragged", lambda lengths: [lengths[i % len(lengths)] for i in range(24)])
    options.command, options.child = "step", "bf16"
    assert step.bench_step(options) == 0
    found = record.read_json(Path(options.out))
    for name in ("gradient", "logp"):
        assert found[f"{name}_difference"] < 1e-4 and found[f"{name}_batching"] < 1e-4
        assert found[f"{name}_wrong_prompt"] > 1e-3
    assert 0 < found["w1_trl_old_logps_s"] < found["w1_learn_trl_s"] and found["w1_trl_micro_batch"] in (8, 16)
    assert found["job_peak_gib"] == 10 and found["plan_error"] == pytest.approx((8 + 1 + 6) / 10 - 1)
    assert found["w3_tokens"] == sum(step.real_lengths(Path(options.lengths), options.model)[i % 6] for i in range(6))
    packed = found | {"w1_learn_s": 2 * found["w1_learn_s"]}
    figures = {one["name"]: one["value"] for one in step.step_figures({"bf16": found, "mxfp4": packed})}
    read = {"w1_step_s", "w1_learn_s", "w1_learn_trl_s", "w1_job_peak_mxfp4_gib"}
    assert read <= figures.keys(), "what the README reads"
    assert 0 < figures["w1_speedup_without_pass"] < figures["w1_speedup"]
    assert figures["w1_learn_mxfp4_s"] == 2 * figures["w1_learn_s"]
    besides = found["w1_step_s"] - found["w1_rollout_s"] - found["w1_learn_s"]
    assert figures["w3_step_s"] == pytest.approx(found["w3_rollout_s"] + found["w3_learn_s"] + besides)


@pytest.mark.parametrize(
    "room, fits, best", [(99, 99, 24), (16, 99, 16), (1, 99, 8), (99, 16, 16)], ids=["all", "room", "first", "oom"]
)
def test_trls_path_is_timed_at_its_best_micro_batch(monkeypatch, room, fits, best):
    """Of those that take no more memory than this learner; here as many GiB as completions, fastest at 24."""
    tried = []

    def learning(trainer, batch, micro, least=None):
        tried.append(micro)
        if micro > fits:
            raise torch.OutOfMemoryError
        return {"seconds": abs(micro - 24), "peak_gib": micro}

    monkeypatch.setattr(trl_path, "trl_learning", learning)
    trainer = SimpleNamespace(model=torch.nn.Linear(1, 1))
    assert trl_path.fastest_trl(trainer, {"advantages": torch.ones(48)}, room)["micro"] == best
    assert max(tried) <= 48, "never more than there are"


def test_the_halves_of_a_step_can_be_run_one_by_one_and_publish_nothing_old(tmp_path, monkeypatch, capsys):
    """With processes that are pretended, and get the options."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    monkeypatch.setattr(watched, "occupy", lambda gib: None)
    monkeypatch.setattr(step, "step_figures", lambda results: [record.figure(name, 1.0, "s") for name in results])
    given = {"model": "m", "data": "d", "lengths": "l", "run": str(tmp_path / "new" / "run")}
    result = tmp_path / "step.json"

    def run(bf16, mxfp4, commit="c1", only=None):
        def process(command, check):
            monkeypatch.setattr(sys, "argv", command[1:])
            child = bench.parse_args()
            assert given.items() <= vars(child).items() and child.command == "step"
            code = {"bf16": bf16, "mxfp4": mxfp4}[child.child]
            if not code and commit:
                with mock.patch.dict(os.environ, BENCH_COMMIT=commit):
                    watched.keep(child, {"step_s": 1.0})
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr("subprocess.run", process)
        options = SimpleNamespace(command="step", child=None, only=only, out=str(result), **given)
        return step.bench_step(options), list(values(result)) if result.exists() else None

    assert run(0, 0, only="mxfp4") == (1, None)
    assert "is not there: run --only bf16 first" in capsys.readouterr().err
    assert run(0, 0, commit="c0") == (1, None)
    assert "is of another commit or model: run --only bf16 first" in capsys.readouterr().err
    assert run(0, 0) == (0, ["bf16", "mxfp4"])
    assert run(1, 0, only="mxfp4") == (0, ["bf16", "mxfp4"])
    assert run(0, 3) == (3, ["bf16"])
    assert run(3, 0) == run(3, 0, only="bf16") == (3, ["bf16"]), "as it was before"
    assert run(0, 0, commit=None) == (1, ["bf16"]), "it wrote nothing, and the old result does not count"
