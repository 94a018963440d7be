# SPDX-License-Identifier: Apache-2.0
"""Measures and profiles the decoding steps of vLLM alone: tokens/s without a profiler, then where a step's time goes.

No sequence ends early, every one samples like a rollout, and prompts are random tokens, so that sequences read blocks
of the cache of their own, except where a point lets a group share a prompt, as a rollout's groups do.
"""

import argparse
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from grpo.common import InputError
from grpo.plan.engine_memory import EnginePlan, plan_engine
from grpo.plan.hub import ModelConfig, ModelFiles, find_model
from grpo.plan.machine import GIB, Machine, read_machine
from grpo.rollout import engine as rollout_engine
from grpo.rollout.engine import Engine
from grpo.settings.environment import load_settings
from grpo.settings.table import Settings
from scripts.dev.harness import Function, intercept, let_none_end
from scripts.dev.kernels import KINDS, longest_kernels, read_kernels, step_bytes, step_times
from scripts.dev.record import Figure, Json, command_with_variables, figure, package_versions, read_json, write

LEAST_TOKENS = 16
COPIED_GIB = 4  # Size of the tensor with which the machine's bandwidth is measured.


@dataclass(frozen=True)
class Point:
    """A batch of sequences that decode `tokens` tokens behind prompts, of which a `group` of sequences shares each."""

    sequences: int
    prompt: int
    tokens: int
    group: int = 1

    def __str__(self) -> str:
        words = [self.sequences, self.prompt, self.tokens, *([self.group] if self.group > 1 else [])]
        return "x".join(map(str, words))

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        """A prompt for each sequence, of random tokens."""
        draw = random.Random(seed)
        return [
            prompt
            for _ in range(self.sequences // self.group)
            for prompt in [draw.choices(range(vocab), k=self.prompt)] * self.group
        ]


def parse_point(text: str) -> Point:
    """A point from SEQUENCESxPROMPTxTOKENS or SEQUENCESxPROMPTxTOKENSxGROUP. Raises InputError."""
    numbers = [int(word) for word in text.split("x") if word.isdecimal()]
    if len(numbers) != text.count("x") + 1 or len(numbers) not in (3, 4) or not all(numbers):
        raise InputError(f"--points {text}: not SEQUENCESxPROMPTxTOKENS[xGROUP]")
    point = Point(*numbers)
    if point.sequences % point.group or point.tokens < LEAST_TOKENS:
        raise InputError(f"--points {text}: whole groups of sequences, and at least {LEAST_TOKENS} tokens")
    return point


def parse_json_values(texts: Sequence[str]) -> Json:
    """The arguments of --engine, each NAME=JSON; what is no JSON is a text. Raises InputError."""
    values: Json = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise InputError(f"--engine {text}: not NAME=VALUE")
        values[name] = value
        with contextlib.suppress(ValueError):
            values[name] = json.loads(value)
    return values


def plan_points(
    settings: Settings, config: ModelConfig, machine: Machine, points: Sequence[Point], whole: bool
) -> EnginePlan:
    """The memory and limits of an engine for each of the points. Raises InputError if its cache does not hold a point,
    where it must be `whole`: otherwise sequences wait their turn, as in a run."""
    plans = []
    for point in points:
        prompts, length = point.sequences // point.group, point.tokens
        s = replace(settings, PROMPTS_PER_STEP=prompts, NUM_GENERATIONS=point.group, MAX_COMPLETION_LEN=length)
        s = replace(s, STEPS_PER_GENERATION=1)
        plan = plan_engine(s, config, machine, point.prompt, 0.0)
        if whole and plan.cache < plan.cache_wanted:
            raise InputError(f"{point}: its cache takes {plan.cache_wanted:.1f} GiB, {plan.cache:.1f} are left")
        plans.append(plan)
    return replace(
        max(plans, key=lambda plan: plan.cache),
        scratch=max(plan.scratch for plan in plans),
        max_model_len=max(plan.max_model_len for plan in plans),
        max_num_seqs=max(plan.max_num_seqs for plan in plans),
        capture_sizes=max((plan.capture_sizes for plan in plans), key=max),
    )


@contextlib.contextmanager
def engine_changes(arguments: Json) -> Iterator[None]:
    """In the block an engine starts with other arguments of vllm.LLM."""

    def change(engine_arguments: Function, *words: Any) -> Json:
        changed: Json = engine_arguments(*words)
        for name, value in arguments.items():
            if isinstance(value, dict):
                value = {**(changed.get(name) or {}), **value}
            changed[name] = value
        return changed

    with intercept(rollout_engine, "engine_arguments", change):
        yield


def start_alone(options: argparse.Namespace, points: Sequence[Point], whole: bool = True) -> tuple[Engine, ModelConfig]:
    """An awake engine without a trainer, as a run starts it, for the points; none of its completions ends early.
    `whole` is that of `plan_points`."""
    settings, _, problems = load_settings({"MODEL_ID": options.model, **dict(options.set)})
    files: ModelFiles | None = find_model(settings.MODEL_ID, problems)
    if files is None or problems:
        raise InputError(*problems)
    settings = replace(settings, ROLLOUT_SYNC=settings.ROLLOUT_SYNC or "merge")
    plan = plan_points(settings, files.config, read_machine(), points, whole)
    with engine_changes(parse_json_values(options.engine)):
        engine = rollout_engine.start_engine(settings, plan, str(files.folder), [])
    let_none_end(engine)
    engine.wake()
    return engine, files.config


def running(engine: Engine) -> list[Any]:
    """The requests that vLLM decodes (v1/engine/core_client.py and v1/core/sched/scheduler.py of vLLM 0.26)."""
    requests: list[Any] = engine.llm.llm_engine.engine_core.engine_core.scheduler.running
    return requests


def written(engine: Engine) -> int:
    """The number of tokens that the running requests have written."""
    return sum(request.num_output_tokens for request in running(engine))


def begin(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Adds the prompts and steps until every sequence has written a token. Returns how many steps are left in which all
    of them write."""
    for prompt in prompts:
        engine.add(prompt, tokens, engine.settings.TOP_P, None)
    while len(running(engine)) < len(prompts) or not all(request.num_output_tokens for request in running(engine)):
        if engine.step():
            raise InputError("a sequence ended before the last one began: take more tokens, or fewer sequences")
    # Two steps are under way whose tokens do not count yet.
    return tokens - max(request.num_output_tokens for request in running(engine)) - 2


def finish(engine: Engine, sequences: int) -> None:
    """Steps until all sequences have ended."""
    while sequences:
        sequences -= len(engine.step())


def time_steps(engine: Engine, steps: int) -> tuple[int, float]:
    """Makes some steps; returns the number of tokens that they wrote, and their seconds."""
    torch.cuda.synchronize()
    before, started = written(engine), time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    return written(engine) - before, time.perf_counter() - started


def measure_point(engine: Engine, point: Point, vocab: int, trials: int) -> dict[str, float]:
    """The fastest of some trials: milliseconds of a decoding step, tokens/s of such steps alone, and of the whole batch
    with its prefill. Before them a trial that does not count compiles kernels."""
    best: dict[str, float] = {}
    for trial in range(trials + 1):
        prompts = point.prompts(vocab, trial)
        engine.llm.reset_prefix_cache()
        with engine.stepping(trial):
            started = time.perf_counter()
            left = begin(engine, prompts, point.tokens)
            tokens, seconds = time_steps(engine, max(1, left))
            finish(engine, point.sequences)
            whole = time.perf_counter() - started
        values = {"tok_s": tokens / seconds, "rollout_tok_s": point.sequences * point.tokens / whole}
        if trial:
            best = {name: max(value, best.get(name, 0.0)) for name, value in values.items()}
    return best | {"step_ms": 1000 * point.sequences / best["tok_s"]}


def profile_point(engine: Engine, point: Point, vocab: int, steps: int, trial: int, path: Path) -> float:
    """Writes a trace of some decoding steps from the middle of the completions, behind the prompts of a `trial`, which
    are cached after the last one. Returns how many steps it holds."""
    prompts = point.prompts(vocab, trial)
    with engine.stepping(trial):
        left = begin(engine, prompts, point.tokens)
        steps = max(1, min(steps, left // 2))
        time_steps(engine, max(1, left // 2 - steps // 2))
        with profile(activities=[ProfilerActivity.CUDA]):  # The first one pays for the profiler's own start.
            torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            tokens, _ = time_steps(engine, steps)
        finish(engine, point.sequences)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return tokens / point.sequences


def measure_bandwidth() -> float:
    """Bytes a second of the GPU's memory: the faster of a copy, read and written, and of a sum."""
    source = torch.ones(COPIED_GIB * GIB // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    moves: list[tuple[int, Callable[[], object]]] = [(2, lambda: target.copy_(source)), (1, source.sum)]
    rates = []
    for times, move in moves:
        for _ in range(6):
            torch.cuda.synchronize()
            started = time.perf_counter()
            move()
            torch.cuda.synchronize()
            rates.append(times * source.nbytes / (time.perf_counter() - started))
    return max(rates)


def point_figures(
    point: Point, config: ModelConfig, values: Json, trace: Json, steps: float, bandwidth: float
) -> list[Figure]:
    """The figures of a point, whose names end in it, from its measured values and the trace of some steps."""
    end, kernels = f"_{point}", read_kernels(trace)
    moved = step_bytes(config, point.sequences, point.group, point.prompt, point.tokens // 2)
    needed = {kind: 1000 * size / bandwidth for kind, size in moved.items()}
    text = f"{point.sequences} sequences behind {point.prompt} tokens"
    if point.group > 1:
        text += f", which {point.group} share"
    figures = [
        figure(f"tok_s{end}", values["tok_s"], "tokens/s", f"{text}: steps in which all write, without a profiler"),
        figure(f"rollout_tok_s{end}", values["rollout_tok_s"], "tokens/s", "the whole batch, prefill included"),
        figure(f"step_ms{end}", values["step_ms"], "ms", "of tok_s"),
        figure(f"needed_ms{end}", sum(needed.values()), "ms", "bytes of a step at the measured bandwidth"),
    ]
    times = step_times(kernels, steps)
    if not times:
        return figures
    span = times.pop("span")
    about = f"with the profiler: {steps:.0f} steps, {len(kernels) / steps:.0f} kernels and copies a step"
    figures.append(figure(f"profiled_ms{end}", span, "ms", about))
    for kind, value in times.items():
        note = f"{value / span:.1%}: {KINDS[kind][0] if kind in KINDS else 'the GPU does nothing'}"
        if kind in needed:
            note += f"; must move {moved[kind] / GIB:.2f} GiB, {needed[kind]:.2f} ms"
        figures.append(figure(f"{kind}_ms{end}", value, "ms", note))
    for number, (name, value, calls) in enumerate(longest_kernels(kernels, steps), 1):
        figures.append(figure(f"kernel_{number:02}_ms{end}", value, "ms", f"{calls:.1f} calls a step: {name[:160]}"))
    return figures


def write_measured(options: argparse.Namespace, figures: Sequence[Figure], command: str, engine: Engine) -> None:
    """Writes figures of an engine alone; the kernels that vLLM chose stand among the versions."""
    kernels = {f"vllm {part}": name for part, name in engine.backends.items()}
    write(Path(options.out), figures, command, more={"versions": package_versions() | kernels})


def bench_decode(options: argparse.Namespace) -> int:
    """Starts vLLM alone, measures and profiles each point, and writes the figures; traces stay in --run."""
    command, points = command_with_variables(), [parse_point(text) for text in options.points]
    engine, config = start_alone(options, points)
    bandwidth = measure_bandwidth()
    figures = [figure("bandwidth", bandwidth / 1e12, "TB/s", "the faster of a copy and a sum of 4 GiB")]
    for point in points:
        values = measure_point(engine, point, config["vocab_size"], options.trials)
        path = Path(options.run) / f"{point}.json"
        steps = profile_point(engine, point, config["vocab_size"], options.steps, options.trials, path)
        figures += point_figures(point, config, values, read_json(path), steps, bandwidth)
        write_measured(options, figures, command, engine)
    return 0
