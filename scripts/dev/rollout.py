# SPDX-License-Identifier: Apache-2.0
"""Measures a run at any settings: its time, its memory, and whether weights that do not learn stay the same."""

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch
from torch import Tensor

from grpo.learn.trainer import Trainer
from grpo.model.experts import quantized_experts
from grpo.model.load import VOCAB_WEIGHTS, vocab_weights
from grpo.plan.machine import GIB, read_machine
from grpo.process.child import run_child
from grpo.rollout import engine as rollout_engine
from grpo.rollout.engine import Engine, Generated
from grpo.rollout.parity import BASE
from grpo.rollout.sampler import Sample
from scripts.dev.harness import Function, intercept, let_none_end, run_settings
from scripts.dev.record import BENCH, Figure, Json, command_with_variables, read_json, steps_of, tabled, write

SUM_PARTS = 32  # in which `bit_sums` adds up a tensor
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
RUN = """
step_s | s | {setup}: {averaged}
rows_per_minute | rows/min | prompts divided by step_s, each learned from once
rollout_s learn_s | s | of step_s{rollout_note}
wake_s handover_s sleep_s | s | of the rollout; handover is the weight sync
reward_s | s | decoding and scoring the completions
sync_share | share | of the adapter's update that vLLM's weights held in the last step
rollout_tok_s | tokens/s | tokens divided by rollout_s
generate_tok_s | tokens/s | tokens divided by the time of generating alone, prefill included
startup_s | s | process start to the first step's learning; a machine's first child fills the compile caches
job_peak_gib | GiB | by the driver, engine and CUDA context included; {free:.1f} GiB were free
plan_error | share | planned peak of --check divided by job_peak_gib, minus 1
micro_batch | completions | in a micro-batch, of MAX_COMPLETION_LEN tokens each
rows | completions | generated at once by transformers
asleep_gib | GiB | of the GPU that the sleeping engine holds before the first rollout
paged_gib | GiB | of the learner, in host memory while vLLM is awake
parity_base | nats | largest mean difference without an adapter, of fixed and sampled tokens
parity_mean parity_max | nats | worst of fixed and sampled tokens, without and with an adapter
parity_kl | nats | largest estimate of the KL divergence of the sampled tokens
parity_control_mean | nats | smallest with the trainer's adapter off
base_changed | tensors | of the trainer's frozen weights, whose sum of bits differs after training
lent_tensors lent_changed | tensors | that vLLM lends, and those of them whose sum of bits differs after training
"""
COLUMNS = ("step_s", "rollout_s", "learn_s", "wake_s", "handover_s", "sleep_s", "reward_s")  # columns of metrics.csv
UNTOUCHED = ("base_changed", "lent_changed")  # figures that must be 0


def free_gib() -> float:
    """GiB of the GPU that are free once torch has given back what it does not use."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / GIB


def occupy(leave_gib: float) -> torch.Tensor:
    """Takes all of the GPU's memory but for `leave_gib`, until the returned tensor is deleted."""
    size = int((free_gib() - leave_gib) * GIB)
    return torch.empty(max(0, size), dtype=torch.uint8, device="cuda")


def lent_tensors(policy: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors that vLLM has lent to the policy, by name."""
    lent: dict[str, Tensor] = {}
    for number, experts in enumerate(quantized_experts(policy)):
        for name, (values, scales, *_) in experts.shared.items():
            lent |= {f"{number}.{name}.values": values, f"{number}.{name}.scales": scales}
    return lent | (dict(zip(VOCAB_WEIGHTS, vocab_weights(policy), strict=True)) if lent else {})


def frozen_tensors(policy: torch.nn.Module) -> dict[str, Tensor]:
    """The policy's weights that do not learn, packed experts among them, by name."""
    return {name: p for name, p in policy.named_parameters() if not p.requires_grad} | dict(policy.named_buffers())


@torch.no_grad()
def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of each tensor's bits as integers, by name: it changes if one element does. Added up in parts, because
    torch.sum makes a copy in 8-byte integers, 8 GiB for a matrix of gpt-oss-120b's experts."""
    sums = {}
    for name, tensor in tensors.items():
        parts = tensor.view(INTEGERS[tensor.element_size()]).tensor_split(SUM_PARTS)
        sums[name] = sum(int(part.sum(dtype=torch.int64)) for part in parts)
    return sums


class RunWatch:
    """Watches one run of the entry point: its start, its engine, its rollouts and its trainer."""

    trainer: Trainer

    def __init__(self, stack: contextlib.ExitStack, tokens: int | None) -> None:
        self.tokens = tokens
        self.born, self.free_before = psutil.Process().create_time(), read_machine().gpu_free
        self.startup_s = self.asleep_gib = 0.0
        self.lent: dict[str, Tensor] = {}
        self.sums: dict[str, int] = {}
        self.tok_s: list[float] = []  # tokens per second of each rollout
        stack.enter_context(intercept(rollout_engine, "start_engine", self.start_engine))
        stack.enter_context(intercept(Engine, "generate", self.generate))
        stack.enter_context(intercept(Trainer, "sample", self.sample))
        stack.enter_context(intercept(Trainer, "learn", self.learn))

    def start_engine(self, start_engine: Function, *arguments: Any) -> Engine:
        """Starts the engine, measures what it holds asleep, lets no completion end early, and sums the weights."""
        before = free_gib()
        engine: Engine = start_engine(*arguments)
        self.asleep_gib = before - free_gib()
        let_none_end(engine)
        self.sum_weights(arguments[-1])
        return engine

    def sum_weights(self, policy: torch.nn.Module) -> None:
        """Takes the sums of the policy's frozen and lent weights as they are before training."""
        self.lent = lent_tensors(policy)
        self.sums = bit_sums(frozen_tensors(policy) | self.lent)

    def generate(
        self, generate: Function, engine: Engine, prompts: Any, seed: int, tokens: int, *arguments: Any
    ) -> Generated:
        """Generates as `generate` does, but no more than the tokens that were asked for."""
        result: Generated = generate(engine, prompts, seed, min(tokens, self.tokens or tokens), *arguments)
        return result

    def sample(self, draw: Function, trainer: Trainer, prompts: Any) -> list[Sample]:
        """Samples a rollout as `draw` does, and records the tokens per second of generating alone."""
        samples: list[Sample] = draw(trainer, prompts)
        if trainer.run.engine:
            self.tok_s.append(sum(len(sample.ids) for sample in samples) / trainer.run.engine.seconds["generate"])
        return samples

    def learn(self, learn: Function, trainer: Trainer, *arguments: Any) -> Tensor:
        """Learns as `learn` does, and records the trainer and the time of the first call."""
        self.startup_s = self.startup_s or time.time() - self.born
        self.trainer = trainer
        if not self.sums:  # Without an engine no sums were taken.
            self.sum_weights(trainer.model)
        return learn(trainer, *arguments)

    def values(self, folder: Path) -> Json:
        """The figures of the run's files, its plan and its weights once it has ended."""
        run, steps = self.trainer.run, steps_of(folder)
        first = run.settings.steps_per_rollout  # Whole rollouts are averaged.
        later = steps[first:] if len(steps) > first else steps
        values: Json = {name: later[name].mean() for name in COLUMNS}
        values["rollout_tok_s"] = values["generate_tok_s"] = later.rollout_tokens_per_s.mean()
        values |= {"sync_share": steps.sync_share.iloc[-1], "startup_s": self.startup_s}
        values |= {"free": self.free_before, "micro_batch": run.plan.micro_batch}
        if torch.cuda.is_available():  # Memory that was in use before belongs to other programs.
            values["job_peak_gib"] = self.free_before - torch.cuda.mem_get_info()[1] / GIB + steps.gpu_peak_gib.max()
            values["plan_error"] = run.plan.peak / values["job_peak_gib"] - 1
        if run.parity:
            controls = [row["control_mean"] for row in run.parity if "control_mean" in row]
            for name in ("mean", "max", "kl"):
                values[f"parity_{name}"] = max(row[name] for row in run.parity if name in row)
            values |= {"parity_base": max(row["mean"] for row in run.parity if row["when"] == BASE)}
            values |= {"parity_control_mean": min(controls)}
        if run.engine:
            values["generate_tok_s"] = mean(self.tok_s[1:] or self.tok_s or [math.nan])  # Episodes are not sampled.
            values["asleep_gib"] = self.asleep_gib
            if run.engine.pages:
                values["paged_gib"] = run.engine.pages.nbytes / GIB
        elif not run.settings.DIRECT_ANSWERS:
            values["rows"] = run.plan.generation_batch
        sums = bit_sums(frozen_tensors(self.trainer.model) | self.lent)
        changed = {name for name, bits in self.sums.items() if sums[name] != bits}
        values["base_changed"] = len(changed - self.lent.keys())
        if self.lent:
            values |= {"lent_tensors": len(self.lent), "lent_changed": len(changed & self.lent.keys())}
        s, tokens = run.settings, later.tokens_mean.mean()
        completions = f"{s.PROMPTS_PER_STEP} x {s.NUM_GENERATIONS} completions, {tokens:.0f} tokens each"
        values["size"], values["rollout_note"] = f"{completions}, EXPERTS={s.EXPERTS}", ""
        if s.DIRECT_ANSWERS:
            values["size"] = f"DIRECT_ANSWERS, {s.PROMPTS_PER_STEP} prompts, EXPERTS={s.EXPERTS}"
            values["rollout_note"] = "; rollout_s is the pass that chooses the answers"
            values["rows_per_minute"] = 60 * s.PROMPTS_PER_STEP / values["step_s"]
        left_out = "mean without the first step" if first == 1 else "mean without the first rollout's steps"
        values["averaged"] = left_out if len(later) < len(steps) else "the first step"
        return {name: value for name, value in values.items() if value == value}  # A figure that the run lacks is NaN.


def run_figures(options: argparse.Namespace, values: Json) -> list[Figure]:
    """The figures of the run that the options ask for."""
    setup = [values["size"], *(f"{name}={value}" for name, value in options.set)]
    if options.free_gib:
        setup.append(f"all but {options.free_gib:g} GiB of the GPU occupied")
    return tabled(RUN, values | {"setup": ", ".join(setup)})


def child_path(options: argparse.Namespace) -> Path:
    """The JSON that a measured process writes for the one that measures, beside the run's folder."""
    return Path(options.run).absolute().with_name(f"{Path(options.run).name}-child.json")


def rollout_child(options: argparse.Namespace) -> int:
    """Measures the run in this process. Returns its exit code, or 1 if a weight was written that does not learn."""
    with contextlib.ExitStack() as stack:
        watch = RunWatch(stack, options.tokens)
        os.environ |= run_settings(options, {"MAX_COMPLETION_LEN": 512, **dict(options.set)})
        if code := options.main([]):
            return code
        values = watch.values(Path(options.run))
    child_path(options).write_text(json.dumps(values), encoding="utf-8")
    return int(any(values.get(name) for name in UNTOUCHED))


def bench_rollout(options: argparse.Namespace) -> int:
    """Measures a run in a child process, beside which this one may occupy the GPU; returns the child's exit code."""
    if options.child:
        return rollout_child(options)
    child_path(options).unlink(missing_ok=True)
    ballast = occupy(options.free_gib) if options.free_gib else None
    code = run_child([sys.executable, str(BENCH), *sys.argv[1:], "--child"])
    del ballast
    if values := read_json(child_path(options)):
        write(Path(options.out), run_figures(options, values), command_with_variables())
    return code
