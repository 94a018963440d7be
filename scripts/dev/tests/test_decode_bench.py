# SPDX-License-Identifier: Apache-2.0
"""`bench.py decode` and `bench.py tails`: how kernels are counted, what a step must move, and what long tails cost."""

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
from scripts.dev import decode, tails
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
    values = parse_json_values(["a=1", 'b={"c": 2}', "d=raw_logprobs"], "--engine")
    assert values == {"a": 1, "b": {"c": 2}, "d": "raw_logprobs"}
    with pytest.raises(InputError, match="--engine a"):
        parse_json_values(["a"], "--engine")


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
    calls = []
    flags = SimpleNamespace(update_opt_flags_constraints=calls.append)
    monkeypatch.setitem(sys.modules, "triton_kernels.matmul_ogs_details.opt_flags", flags)
    monkeypatch.setattr(rollout_engine, "engine_arguments", lambda *words: dict(own))
    monkeypatch.setattr(rollout_engine, "patch_kernels", lambda: calls.append("patched"))
    with decode.engine_changes({"compilation_config": {"cudagraph_mode": "FULL"}, "block_size": 32}, {"split_k": 2}):
        changed = rollout_engine.engine_arguments("settings")
        rollout_engine.patch_kernels()
    flags.update_opt_flags_constraints({"split_k": 1, "block_m": 16})  # as vLLM does later
    assert changed == {"compilation_config": {"cudagraph_mode": "FULL", "sizes": [1]}, "seed": 1, "block_size": 32}
    assert calls == ["patched", {"split_k": 2}, {"split_k": 2, "block_m": 16}]
    assert rollout_engine.engine_arguments() == own


def test_an_engine_starts_as_a_run_starts_it(monkeypatch):
    calls = []
    engine = SimpleNamespace(sampling=lambda **more: more, wake=lambda: calls.append("awake"))

    def start(settings, plan, path, stops):
        calls.append((settings.ROLLOUT_SYNC, settings.VLLM_EAGER, plan.max_num_seqs, stops))
        return engine

    monkeypatch.setattr(rollout_engine, "start_engine", start)
    monkeypatch.setattr(decode, "read_machine", lambda: H100)
    options = argparse.Namespace(model="tiny", set=[("VLLM_EAGER", "1")], engine=[], tiles=[])
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


def test_lengths_are_those_that_were_counted():
    fit = tails.fit_lengths(3200, 0.28, 1450)
    assert (2.718281828**fit.mean, fit.stdev) == (pytest.approx(1960, abs=1), pytest.approx(0.841, abs=0.001))
    lengths = tails.tail_lengths(96, 3200, 0)
    assert len(lengths) == 96 and sum(length == 3200 for length in lengths) == 27 and lengths != sorted(lengths)
    ended = sorted(length for length in lengths if length < 3200)
    assert ended[len(ended) // 2] == pytest.approx(1450, rel=0.02)
    assert ended[int(0.95 * len(ended))] == pytest.approx(2650, rel=0.12), "not fitted, but nearly right"
    assert sorted(tails.tail_lengths(96, 3200, 1)) == sorted(lengths) and max(tails.tail_lengths(96, 16_384, 1)) > 9000
    equal = tails.equal_lengths(lengths)
    assert sum(equal) == sum(lengths) and max(equal) - min(equal) <= 1 and len(equal) == 96


@pytest.mark.parametrize(
    ("ends", "part", "share"),
    [
        ([5.0] * 4, 1 / 2, 0.0),
        ([1.0, 2.0, 3.0, 10.0], 1 / 2, 0.7),  # With the third end a single one is left.
        ([1.0, 2.0, 3.0, 10.0], 1 / 4, 0.0),  # One of four is not fewer than a quarter.
        ([8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 10.0], 1 / 4, 0.2),
    ],
)
def test_share_of_time_with_few_left(ends, part, share):
    assert tails.share_below(ends, part) == pytest.approx(share)


def test_learning_takes_groups_as_they_end():
    ends = [1.0, 4.0, 10.0, 2.0]  # groups of two end at 4 and at 10
    assert tails.end_of_learning(ends, 1.0, 2) == 12, "the first group is learned from beside the second one's tail"
    assert tails.end_of_learning(ends, 4.0, 2) == 20, "it waits for the first group's learning"
    assert tails.end_of_learning([10.0] * 4, 1.0, 2) == 14, "without a tail nothing is saved"


def test_larger_rollouts_are_compared_by_step():
    ends = {96: [10.0] * 95 + [40.0], 192: [12.0] * 191 + [44.0]}
    values = tails.tail_values(ends, {96: 4000, 192: 8800}, 0.25)
    assert values["step_s_96"] == 40 + 24 and values["step_s_192"] == 22 + 24
    assert values["gain_192"] == pytest.approx(100 * (1 - 46 / 64)) and "gain_96" not in values
    assert values["tail_tok_s_96"] == 100 and values["below_half_96"] == 75
    # Eleven of twelve groups are learned from beside the tail.
    assert values["overlap_s_96"] == 42 and values["gain_overlap_96"] == pytest.approx(100 * 22 / 64)


def test_tails_play_each_size(clock, monkeypatch):
    for name, value in {"STEP": 16, "SIZES": (16, 32), "WARMUP": 3}.items():
        monkeypatch.setattr(tails, name, value)
    engine = StandIn()
    values = tails.measure(engine, 100, 50, 0.1)
    assert engine.count == 16 + 32 + 16 + 16 + 32 and values["tokens_mean"] == 50 and values["step_s_32"] > 0


@pytest.mark.parametrize("command", ["decode", "tails"])
def test_commands_write_their_figures(command, clock, monkeypatch, tmp_path):
    module = {"decode": decode, "tails": tails}[command]
    engine = StandIn()
    engine.backends = {"experts": "TRITON"}
    monkeypatch.setenv("BENCH_COMMIT", "c1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(module, "start_alone", lambda options, points, whole=True: (engine, REAL_CONFIG))
    monkeypatch.setattr(decode, "measure_bandwidth", lambda: 4e12)
    monkeypatch.setattr(decode, "profile_point", lambda *words: words[-1].write_text(json.dumps(TRACE)) and 2.0)
    words = ["bench.py", command, "--model", "M", "--out", f"{tmp_path}/out.json"]
    more = ["--points", "4x10x20", "--run", str(tmp_path)] if command == "decode" else ["--limit", "60"]
    monkeypatch.setattr(sys, "argv", [*words, *more])
    options: argparse.Namespace = bench.parse_args()
    assert getattr(module, f"bench_{command}")(options) == 0
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert record["versions"]["vllm experts"] == "TRITON"
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in record["command"].partition(" python bench.py ")[0]
    names = {row["name"] for row in record["figures"]}
    expected = {"tok_s_4x10x20", "gaps_ms_4x10x20"} if command == "decode" else {"tail_tok_s_384", "gain_overlap_96"}
    assert expected <= names
