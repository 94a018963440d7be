# SPDX-License-Identifier: Apache-2.0
"""`bench.py shared`: its children with a stub in vLLM's place, and what it makes of what they find."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import bench
import pytest
import torch
from engines import trainer_with_engine
from expert_models import load

from grpo.measure import record, shared, watched
from grpo.model import experts
from grpo.model import load as model_load
from grpo.model.experts import dequantize_mxfp4
from grpo.model.load import TABLES
from grpo.rollout import engine as rollout_engine


@pytest.fixture
def child(tiny, tmp_path, monkeypatch):
    """Options of a child, whose entry point trains the tiny model for three steps with a stub of vLLM; what a GPU would say is
    pretended: 11 GiB were free, 2 are. `vLLM` keeps 3 GiB in host memory, and lends 5."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * 2**30, 2**34))
    monkeypatch.setattr("grpo.measure.watched.read_machine", lambda: SimpleNamespace(gpu_free=11.0))
    backup = SimpleNamespace(numel=lambda: 3 * 2**30)
    blocks = [
        SimpleNamespace(is_asleep=n < 2, cpu_backup_tensor=b, handle=(0, 5 * 2**30))
        for n, b in enumerate((backup, None, None))
    ]
    allocator = ModuleType("vllm.device_allocator")
    allocator.get_mem_allocator_instance = lambda: SimpleNamespace(pointer_to_data=dict(enumerate(blocks)))
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, allocator.__name__, allocator)
    monkeypatch.setattr(model_load, "load_base", lambda *given: None)
    run = tmp_path / "run"
    weight, asked = torch.ones(4, 6, dtype=torch.bfloat16), []
    options = SimpleNamespace(
        model=str(tiny), data="d", run=str(run), out=str(tmp_path / "child.json"), child="shared", weight=weight
    )

    def main(arguments):
        asked.append({name: os.environ.get(name) for name in ("EXPERTS", "MAX_COMPLETION_LEN", "TOTAL_STEPS")})
        model_load.load_base()
        run.mkdir()
        trainer = trainer_with_engine(tiny, run, TOTAL_STEPS=int(os.environ["TOTAL_STEPS"]), MAX_COMPLETION_LEN=6)
        options.engine = trainer.run.engine
        # Each completion would be of one token.
        options.engine.stop_token_ids = list(range(trainer.model.config.vocab_size))
        assert rollout_engine.start_engine("settings", "plan", "path", "eos", trainer.model) is trainer.run.engine
        trainer.run.parity += [{"mean": 0.1}, {"mean": 0.2}]
        trainer.train()
        return 0

    monkeypatch.setattr(rollout_engine, "start_engine", lambda *given: options.engine)
    options.main = main
    with mock.patch.dict(os.environ):
        yield options, asked


def test_a_child_measures_a_run_and_what_vllm_lends(child, monkeypatch):
    options, asked = child
    monkeypatch.setattr(shared, "lent_tensors", lambda policy: {"one": options.weight, "other": options.weight + 1})
    counts = {"experts_elements": 7, "experts_different": 0}
    monkeypatch.setattr(shared, "compared", lambda base, folder: counts if folder == Path(options.model) else {})
    assert shared.bench_shared(options) == 0
    found, steps = record.read_json(Path(options.out)), record.steps_of(Path(options.run))
    assert asked == [{"EXPERTS": "shared", "MAX_COMPLETION_LEN": "512", "TOTAL_STEPS": "3"}]
    assert len(steps) == 3 and found["step_s"] == pytest.approx(steps.step_s[1:].mean())
    assert found["tokens"] == 6, "every completion is full"
    assert (
        "paged_gib" not in found and found["job_peak_gib"] == 9 and found["free"] == 11 and found["plan_error"] == -1
    ), "a plan of 0 GiB"
    assert found["host_gib"] == 3 and found["lent_gib"] == 5 and found["parity_mean"] == 0.2 and found["startup_s"] > 0
    assert found["lent_tensors"] == 2 and not found["lent_changed"] and found["experts_elements"] == 7
    names = {one["name"] for one in shared.shared_figures({"shared": found})}
    assert {"shared_step_s", "shared_experts_different", "shared_lent_changed", "shared_startup_s"} <= names


@pytest.mark.parametrize("what", ["a weight is written", "an expert is another", "the run fails"])
def test_a_child_fails(child, monkeypatch, what):
    options, _ = child
    monkeypatch.setattr(shared, "lent_tensors", lambda policy: {"one": options.weight})
    monkeypatch.setattr(
        shared, "compared", lambda base, folder: {"experts_different": int(what == "an expert is another")}
    )
    main, options.child = options.main, "shared-22" if what == "a weight is written" else "shared"

    def other(arguments):
        code = main(arguments)
        if what == "a weight is written":
            options.weight[2, 3] = 1.0078125  # the next number in BF16
        return 3 if what == "the run fails" else code

    options.main = other
    assert shared.bench_shared(options) == (3 if what == "the run fails" else 1)
    if what == "a weight is written":
        found = record.read_json(Path(options.out))
        assert found["lent_changed"] == 1 and "experts_different" not in found, "no room on a small card"


def test_a_long_child_takes_its_only_step_and_lends_nothing_to_bf16(child, monkeypatch):
    options, asked = child
    options.child = "shared-22-4000"
    assert shared.bench_shared(options) == 0 and asked[0]["MAX_COMPLETION_LEN"] == "4000"
    found = record.read_json(Path(options.out))
    assert (
        found["learn_s"] == pytest.approx(record.steps_of(Path(options.run)).learn_s[0]) and "lent_tensors" not in found
    )


def test_a_paged_child_tells_what_went_away_and_an_old_card_has_no_hopper_kernels(child, monkeypatch):
    options, asked = child
    monkeypatch.setattr(rollout_engine, "engine_arguments", lambda settings, plan: {"plan": plan})
    main = options.main

    def other(arguments):
        code = main(arguments)
        options.engine.pages = SimpleNamespace(nbytes=2**23)
        for sync, more in (("merge", {}), ("lora", {"attention_backend": "TRITON_ATTN"})):
            found = rollout_engine.engine_arguments(SimpleNamespace(ROLLOUT_SYNC=sync), "p")
            assert found == {"plan": "p"} | more
        return code

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**29)
    options.main, options.child = other, "paged-22-old"
    assert shared.bench_shared(options) == 0 and asked[0]["EXPERTS"] == "paged"
    found = record.read_json(Path(options.out))
    assert found["paged_gib"] == 2**-7 and found["stranded_gib"] == 0.5 and os.environ["ROLLOUT_SYNC"] == "lora"
    notes = {one["name"]: one["note"] for one in shared.shared_figures({"paged-22-old": found})}
    assert "ROLLOUT_SYNC=lora" in notes["paged_22_old_step_s"] and "EXPERTS=paged" in notes["paged_22_old_step_s"]


def test_weights_are_compared_bit_by_bit(tiny, monkeypatch):
    """With the checkpoint's own tensors in vLLM's place, then with a bit of an expert and a sign of the head changed."""
    monkeypatch.setattr(experts, "dequantize_swizzled", lambda values, scales, *_: dequantize_mxfp4(values, scales))
    packed, model = load(tiny, "mxfp4"), load(tiny, "shared")
    assert not shared.lent_tensors(model), "none yet"
    for ours, theirs in zip(model.model.layers, packed.model.layers, strict=True):
        e = theirs.mlp.experts
        names = "gate_up_proj", "down_proj"
        ours.mlp.experts.shared = {
            n: (getattr(e, f"{n}_blocks").clone(), getattr(e, f"{n}_scales").clone(), 0, 0) for n in names
        }
    for name in TABLES:
        model.get_parameter(name).data = packed.get_parameter(name).clone()
    sums, layers = shared.bit_sums(shared.lent_tensors(model)), len(model.model.layers)
    assert len(sums) == 4 * layers + 2 and set(TABLES) < set(sums)
    found, c = shared.compared(model, tiny), model.config
    experts_of = c.num_local_experts * 3 * c.hidden_size * c.intermediate_size
    assert found == {
        "experts_elements": layers * experts_of, "experts_different": 0,
        "tables_elements": 2 * c.vocab_size * c.hidden_size, "tables_different": 0,
    }  # fmt: skip
    model.model.layers[-1].mlp.experts.shared["down_proj"][0].view(-1)[5] ^= 1
    model.lm_head.weight.data[3, 2] *= -1
    found = shared.compared(model, tiny)
    assert found["experts_different"] == found["tables_different"] == 1
    now = shared.bit_sums(shared.lent_tensors(model))
    assert [name for name in now if now[name] != sums[name]] == [
        f"model.layers.{layers - 1}.mlp.experts.down_proj.values", "lm_head.weight",
    ]  # fmt: skip


def test_children_that_fail_leave_the_others(tmp_path, monkeypatch, capsys):
    """On as much of the card as they are to have; old results are of no use, nor are those of another commit."""
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    left, ran, fails, given = [], [], {"shared-22"}, {"model": "m", "data": "d", "run": str(tmp_path / "runs" / "run")}
    monkeypatch.setattr(watched, "occupy", left.append)
    out = tmp_path / "shared.json"

    def process(command, check):
        monkeypatch.setattr(sys, "argv", command[1:])
        options = bench.parse_args()
        assert given.items() <= vars(options).items() and options.command == "shared"
        ran.append(options.child)
        seconds = 2.0 if options.child == "bf16" else 3.0
        found = {"step_s": seconds, "learn_s": seconds, "tokens": 512, "free": 22.0}
        if options.child not in fails:
            watched.keep(options, found)
        return SimpleNamespace(returncode=int(options.child in fails))

    monkeypatch.setattr("grpo.measure.watched.subprocess", SimpleNamespace(run=process))

    def run(*only):
        del left[:], ran[:]
        command = ["bench.py", "shared", "--out", str(out), *sum(([f"--{n}", v] for n, v in given.items()), [])]
        monkeypatch.setattr(sys, "argv", [*command, *(["--only", *only] if only else [])])
        code = bench.main()
        figures = record.read_json(out)["figures"] if out.exists() else []
        return code, {one["name"]: one["value"] for one in figures}, {one["name"]: one["note"] for one in figures}

    assert run("tiny")[0] == 2 and "no such child: tiny. There are: shared, shared-22, bf16" in capsys.readouterr().err
    code, found, notes = run()
    assert code == 1 and ran == list(shared.CHILDREN) and left == [22.0, 22.0, 20.0, 22.0, 22.0, 22.0]
    assert "child shared-22 ended with exit code 1" in capsys.readouterr().err
    assert found["learn_by_bf16"] == found["step_20_by_bf16"] == 1.5 and found["learn_by_mxfp4"] == 1
    assert "step_22_by_bf16" not in found and "shared_22_step_s" not in found and "shared_22_4000_step_s" in found
    assert (
        "EXPERTS=shared, 12 x 8 completions, all but 20 GiB of the card occupied, 512 tokens"
        in notes["shared_20_step_s"]
    )
    assert "the first step" in notes["shared_22_4000_step_s"] and "steps 2 and 3" in notes["bf16_step_s"]
    fails.clear()
    code, found, _ = run("bf16", "shared-22")
    assert code == 0 and ran == ["shared-22", "bf16"] and left == [22.0]
    assert found["step_22_by_bf16"] == 1.5 and found["step_22_by_shared"] == 1, "beside the last results of the others"
    given["model"] = "n"
    assert "shared_step_s" not in run("bf16")[1], "those of another model do not count"
