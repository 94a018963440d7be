# SPDX-License-Identifier: Apache-2.0
"""`bench.py decode`: how kernels are counted, and what a step must move."""

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import bench
import pytest
from machines import H100

from grpo.common import InputError
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.machine import GIB
from grpo.rollout import engine as rollout_engine
from grpo.settings.table import Settings
from scripts.dev import decode
from scripts.dev.decode import Point, parse_json_values, parse_point
from scripts.dev.kernels import Kernel, kind_of, longest_kernels, read_kernels, step_bytes, step_times

NAMES = {
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu": "experts",
    "void marlin_moe_wna16::Marlin<__nv_bfloat16, 1, 4>": "experts",
    "_reduce_grouped": "routing",
    "_combined_routing_compute": "routing",
    "_topk_forward": "routing",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Mainloop>>>": "attention",
    "void flash::prepare_varlen_num_blocks_kernel<1, true>(int)": "attention",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>": "attention",
    "kernel_unified_attention_3d": "attention",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue>": "sampling",
    "void at::native::distribution_elementwise_grid_stride_kernel<float, 4, exponential>": "sampling",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps<float>>>": "sampling",
    "triton_red_fused_ge_sum_0": "sampling",
    "void at::native::vectorized_elementwise_kernel<4, BinaryFunctor<float, DivFunctor<float>>>": "sampling",
    "nvjet_tst_64x8_64x16_4x1_v_bz_bias_TNN": "dense",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "dense",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "norms",
    "triton_poi_fused__to_copy_moe_forward_unified_attention_slice_2": "norms",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>": "norms",
    "Memcpy DtoH (Device -> Pinned)": "copies",
    "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>": "copies",
    "_compute_slot_mapping_kernel": "other",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items(), ids=str)
def test_a_kernel_has_a_kind(name, kind):
    assert kind_of(name) == kind


def event(name, ts, dur, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


TRACE = {
    "traceEvents": [
        event("_matmul_ogs", 5000.0, 400.0),
        event("flash_fwd", 1000.0, 500.0),
        event("Memcpy DtoH", 1400.0, 300.0, "gpu_memcpy"),  # 100 us of it beside the attention
        event("cudaGraphLaunch", 0.0, 9000.0, "cuda_runtime"),
        event("_matmul_ogs", 1700.0, 1000.0),
        {"ph": "M", "name": "process_name"},
    ]
}


def test_times_of_a_step_are_those_of_the_gpu():
    kernels = read_kernels(TRACE)
    assert [kernel.start for kernel in kernels] == [1000.0, 1400.0, 1700.0, 5000.0]
    times = step_times(kernels, 2)
    assert times["span"] == 2.2 and times["experts"] == 0.7 and times["attention"] == 0.25
    assert times["copies"] == 0.15 and times["gaps"] == 1.15 and not times["dense"]
    assert sum(times.values()) - 2 * times["span"] == pytest.approx(0.05), "the copy that ran beside a kernel"
    assert longest_kernels(kernels, 2)[0] == ("_matmul_ogs", 0.7, 1.0)
    assert not step_times([], 2)


def test_a_kernel_inside_another_leaves_no_gap():
    assert step_times([Kernel("a", 0.0, 10.0), Kernel("b", 2.0, 3.0), Kernel("c", 10.0, 10.0)], 1)["gaps"] == 0


def test_bytes_of_a_step_of_gpt_oss():
    many, few = step_bytes(REAL_CONFIG, 96, 8, 940, 256), step_bytes(REAL_CONFIG, 4, 1, 60_000, 100)
    assert many["experts"] / GIB == pytest.approx(9.46, abs=0.01), "all experts of gpt-oss-20b"
    assert few["experts"] / many["experts"] == pytest.approx(1 - (7 / 8) ** 4, abs=1e-4)
    assert many["dense"] == few["dense"] and many["dense"] / 1e9 == pytest.approx(2.43, abs=0.02)
    assert few["attention"] == pytest.approx(4 * 12 * 2048 * (60_100 + 128))
    assert many["attention"] == pytest.approx(12 * 2048 * (12 * 940 + 96 * 256 + 96 * 128)), "a group shares its prompt"
    assert many["sampling"] == 2 * 96 * 201_088 * 4


def test_points_and_values_are_read():
    assert parse_point("96x940x512x8") == Point(96, 940, 512, 8) and str(Point(4, 60_000, 200)) == "4x60000x200"
    for text in ("96", "96x940", "4x9x-5", "4x9x20x3", "4x0x20", "4x9x3", "1x2x30x4x5", "axbxc"):
        with pytest.raises(InputError, match=text):
            parse_point(text)
    values = parse_json_values(["a=1", 'b={"c": 2}', "d=raw_logprobs"])
    assert values == {"a": 1, "b": {"c": 2}, "d": "raw_logprobs"}
    with pytest.raises(InputError, match="--engine a"):
        parse_json_values(["a"])


def test_only_a_group_shares_its_prompt():
    prompts = Point(8, 30, 20, 4).prompts(200_000, 0)
    assert prompts[0] == prompts[3] != prompts[4] and len(prompts) == 8 and {len(prompt) for prompt in prompts} == {30}
    assert prompts != Point(8, 30, 20, 4).prompts(200_000, 1)


def test_the_engine_holds_every_point():
    points = [Point(96, 940, 512, 8), Point(4, 60_000, 200)]
    plan = decode.plan_points(Settings(), REAL_CONFIG, H100, points, True)
    assert plan.max_num_seqs == 96 and plan.max_model_len >= 60_200 and {4, 96} <= set(plan.capture_sizes)
    assert plan.cache > 4 * 60_000 * 12 * 2048 / GIB
    points.append(Point(96, 60_000, 200))
    with pytest.raises(InputError, match="96x60000x200: its cache"):
        decode.plan_points(Settings(), REAL_CONFIG, H100, points, True)
    assert decode.plan_points(Settings(), REAL_CONFIG, H100, points, False).max_num_seqs == 96


def test_arguments_of_vllm_can_be_changed(monkeypatch):
    own = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "sizes": [1]}, "seed": 1}
    monkeypatch.setattr(rollout_engine, "engine_arguments", lambda *words: dict(own))
    with decode.engine_changes({"compilation_config": {"cudagraph_mode": "FULL"}, "block_size": 32}):
        changed = rollout_engine.engine_arguments("settings")
    assert changed == {"compilation_config": {"cudagraph_mode": "FULL", "sizes": [1]}, "seed": 1, "block_size": 32}
    assert rollout_engine.engine_arguments() == own


def test_an_engine_starts_as_a_run_starts_it(monkeypatch):
    calls = []
    engine = SimpleNamespace(sampling=lambda **more: more, wake=lambda: calls.append("awake"))

    def start(settings, plan, path, stops):
        calls.append((settings.ROLLOUT_SYNC, settings.VLLM_EAGER, plan.max_num_seqs, stops))
        return engine

    monkeypatch.setattr(rollout_engine, "start_engine", start)
    monkeypatch.setattr(decode, "read_machine", lambda: H100)
    options = argparse.Namespace(model="tiny", set=[("VLLM_EAGER", "1")], engine=[])
    started, config = decode.start_alone(options, [Point(8, 20, 30, 4)])
    assert started.sampling(n=1) == {"n": 1, "ignore_eos": True} and config["vocab_size"] == 792
    assert calls == [("merge", True, 8, []), "awake"]
    options.set = [("TOP_P", "2")]
    with pytest.raises(InputError, match="TOP_P"):
        decode.start_alone(options, [Point(8, 20, 30, 4)])


@dataclass
class Request:
    """A sequence of the stand-in: it has written `num_output_tokens` of `limit` tokens."""

    number: str
    limit: int
    num_output_tokens: int = 0


@dataclass
class StandIn:
    """An engine of which each step writes a token of each of its `running` requests, one of which joins a step."""

    settings: Settings = field(default_factory=Settings)
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    resets: int = 0
    count: int = 0

    @property
    def llm(self):
        core = SimpleNamespace(scheduler=SimpleNamespace(running=self.running))
        return SimpleNamespace(
            llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)), reset_prefix_cache=self.reset
        )

    def reset(self):
        self.resets += 1

    def stepping(self, seed):
        return contextlib.nullcontext()

    def add(self, prompt, limit, top_p, temperature):
        assert temperature is None and top_p == 1.0, "as in a rollout"
        self.count += 1
        self.waiting.append(Request(str(self.count), limit))
        return str(self.count)

    def step(self):
        if self.waiting:
            self.running.append(self.waiting.pop(0))
        for request in self.running:
            request.num_output_tokens += 1
        ended = [request for request in self.running if request.num_output_tokens == request.limit]
        for request in ended:
            self.running.remove(request)
        return [(request.number, [0] * request.limit, None) for request in ended]


@pytest.fixture
def clock(monkeypatch):
    """A GPU that needs no waiting, and a clock that goes on by a second whenever somebody looks."""
    times = iter(range(10_000))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(times)))


def test_only_steps_in_which_all_write_are_timed(clock):
    engine = StandIn()
    values = decode.measure_point(engine, Point(4, 10, 20), 100, trials=2)
    # The first of four sequences has written four tokens when the last one begins, and two steps are left out.
    assert values["tok_s"] == 4 * (20 - 4 - 2) and not engine.running and engine.resets == 3
    assert values["rollout_tok_s"] == 4 * 20 / 3 and values["step_ms"] == pytest.approx(1000 / 14)


def test_a_sequence_that_ends_too_soon_is_an_error(clock):
    with pytest.raises(InputError, match="take more tokens"):
        decode.measure_point(StandIn(), Point(30, 10, 20), 100, 1)


def test_a_trace_holds_the_steps_that_were_asked_for(clock, monkeypatch, tmp_path):
    profiler = SimpleNamespace(export_chrome_trace=lambda path: open(path, "w").close())
    monkeypatch.setattr(decode, "profile", lambda activities: contextlib.nullcontext(profiler))
    path = tmp_path / "traces" / "point.json"
    assert decode.profile_point(StandIn(), Point(4, 10, 60), 100, 10, 3, path) == 10 and path.exists()
    assert decode.profile_point(StandIn(), Point(4, 10, 20), 100, 30, 3, path) == 7, "half of those that are left"


def test_figures_of_a_point_have_its_kinds_and_its_kernels():
    values = {"tok_s": 900.0, "rollout_tok_s": 800.0, "step_ms": 4.4}
    rows = decode.point_figures(Point(4, 60_000, 200), REAL_CONFIG, values, TRACE, 2, 4e12)
    by_name = {row["name"]: row for row in rows}
    assert by_name["experts_ms_4x60000x200"]["value"] == 0.7
    assert by_name["experts_ms_4x60000x200"]["note"].startswith("31.8%: the experts' products; must move 3.9")
    assert by_name["gaps_ms_4x60000x200"]["note"] == "52.3%: the GPU does nothing"
    assert by_name["kernel_01_ms_4x60000x200"]["note"] == "1.0 calls a step: _matmul_ogs"
    assert by_name["needed_ms_4x60000x200"]["value"] == pytest.approx(3.1, abs=0.1)
    no_gpu = decode.point_figures(Point(4, 9, 20), REAL_CONFIG, values, {"traceEvents": []}, 2, 4e12)
    assert len(no_gpu) == 4


def test_the_command_writes_its_figures(clock, monkeypatch, tmp_path):
    engine = StandIn()
    engine.backends = {"experts": "TRITON"}
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(decode, "start_alone", lambda options, points: (engine, REAL_CONFIG))
    monkeypatch.setattr(decode, "measure_bandwidth", lambda: 4e12)
    monkeypatch.setattr(decode, "profile_point", lambda *words: words[-1].write_text(json.dumps(TRACE)) and 2.0)
    words = ["bench.py", "decode", "--model", "M", "--out", f"{tmp_path}/out.json"]
    monkeypatch.setattr(sys, "argv", [*words, "--points", "4x10x20", "--run", str(tmp_path)])
    options: argparse.Namespace = bench.parse_args()
    assert decode.bench_decode(options) == 0
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert record["versions"]["vllm experts"] == "TRITON"
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in record["command"].partition(" python bench.py ")[0]
    assert {"tok_s_4x10x20", "gaps_ms_4x10x20"} <= {row["name"] for row in record["figures"]}
