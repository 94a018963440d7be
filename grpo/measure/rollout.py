# SPDX-License-Identifier: Apache-2.0
"""A run at any settings: its time, its memory, and whether the weights stay what the checkpoint says."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch
from safetensors import safe_open
from torch import Tensor

from grpo.learn.trainer import Trainer
from grpo.measure import watched
from grpo.measure.record import steps_of, tabled
from grpo.measure.variants import Figures, Variant, keep, run_variants
from grpo.model import load as model_load
from grpo.model.experts import dequantize_mxfp4, expert_weights
from grpo.model.load import TABLES, quantized_experts, tables_of
from grpo.plan.targets import EXPERT_PARAMETERS
from grpo.rollout import engine as rollout_engine
from grpo.rollout.engine import Engine

# What `--kernels` adds to vLLM's arguments. Older cards have attention in Triton, and with a native adapter Marlin's
# experts, which vLLM then takes by itself.
KERNELS = {"own": {}, "older-cards": {"attention_backend": "TRITON_ATTN"}}
SEED = 7  # of the rollout that is made twice
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
RUN = """
step_s | s | {words}: {which}
rollout_s learn_s | s | of that
wake_s handover_s sleep_s | s | of the rollout; handover is the weight sync
reward_s | s | decoding and scoring the completions
sync_share | share | of the adapter's update that vLLM's weights held in the last step
rollout_tok_s | tokens/s | tokens by rollout_s
generate_tok_s | tokens/s | tokens by the time of generating alone, prefill included
startup_s | s | process start to the first step's learning; a machine's first child fills the compile caches
job_peak_gib | GiB | by the driver, engine and CUDA context included; {free:.1f} GiB were free
plan_error | share | plan of --check against that peak
micro_batch | completions | of MAX_COMPLETION_LEN in a micro-batch
rows | completions | that transformers generates at once
asleep_gib | GiB | of the GPU that the sleeping engine holds before the first rollout
host_gib | GiB | in host memory for the sleeping engine
lent_gib | GiB | of the sleeping engine that stay on the GPU, in whole blocks of the allocator
paged_gib | GiB | of the learner, in host memory while vLLM is awake
parity_mean parity_max | nats | worst of fixed and sampled tokens, before and after a sleep
parity_control_mean | nats | smallest with the trainer's adapter off
base_changed | tensors | of the trainer's frozen weights, whose sum of bits is another after training
lent_tensors lent_changed | tensors | that vLLM lends, and those of them whose sum of bits is another after training
experts_elements experts_different | elements | experts that vLLM lends, dequantized, against the checkpoint's bits
tables_elements tables_different | elements | the same of embeddings and output head
adapter_nonzero_lora_b | tensors | lora_B starts at 0: how many the steps have moved
same_seed_alike | completions | the same rollout twice with one seed: how many are alike
"""
COLUMNS = ("step_s", "rollout_s", "learn_s", "wake_s", "handover_s", "sleep_s", "reward_s")  # of metrics.csv
UNTOUCHED = ("base_changed", "lent_changed", "experts_different", "tables_different")  # these must be 0


def lent_tensors(policy: torch.nn.Module) -> dict[str, Tensor]:
    """What vLLM has lent to the policy, by name."""
    lent = {}
    for number, experts in enumerate(quantized_experts(policy)):
        for name, (values, scales, *_) in experts.shared.items():
            lent |= {f"{number}.{name}.values": values, f"{number}.{name}.scales": scales}
    return lent | (dict(zip(TABLES, tables_of(policy), strict=True)) if lent else {})


def frozen_tensors(policy: torch.nn.Module) -> dict[str, Tensor]:
    """The policy's weights that do not learn, packed experts among them, by name."""
    return {name: p for name, p in policy.named_parameters() if not p.requires_grad} | dict(policy.named_buffers())


@torch.no_grad()
def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A number for each tensor that changes when one of its elements does."""
    return {
        name: int(tensor.view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def compare_with_checkpoint(base: torch.nn.Module, folder: Path) -> dict[str, int]:
    """How many elements of the model's experts and tables were compared bit by bit with those of the checkpoint in
    `folder`, and how many of these are different."""
    shards, counts = {}, Counter()
    for shard in sorted(folder.glob("model*.safetensors")):
        with safe_open(shard, "pt") as file:
            shards |= dict.fromkeys(file.keys(), shard)

    def read(name: str) -> Tensor:
        with safe_open(shards[name], "pt", device=str(base.device)) as file:
            return file.get_tensor(name)

    def count(kind: str, ours: Tensor, stored: Tensor) -> None:
        if ours.shape != stored.shape:
            raise ValueError(f"{kind}: {(*ours.shape,)} against the checkpoint's {(*stored.shape,)}")
        different = int((ours.view(torch.int16) != stored.view(torch.int16)).sum())
        counts.update({f"{kind}_elements": ours.numel(), f"{kind}_different": different})

    for number, layer in enumerate(base.model.layers):
        for name in EXPERT_PARAMETERS:
            stem = f"model.layers.{number}.mlp.experts.{name}"
            packed = read(f"{stem}_blocks"), read(f"{stem}_scales")
            count("experts", expert_weights(layer.mlp.experts, name), dequantize_mxfp4(*packed))
    for name in TABLES:
        count("tables", base.get_parameter(name), read(name))
    return dict(counts)


def held_gib() -> dict[str, float]:
    """GiB of the sleeping engine: in host memory, and on the GPU where it lends its weights."""
    from vllm.device_allocator import get_mem_allocator_instance  # vLLM is optional

    blocks = list(get_mem_allocator_instance().pointer_to_data.values())
    host = sum(block.cpu_backup_tensor.numel() for block in blocks if block.cpu_backup_tensor is not None)
    lent = sum(block.handle[1] for block in blocks if not block.is_asleep)
    return {"host_gib": host / 2**30, "lent_gib": lent / 2**30}


class RunWatch:
    """Watches one run of the entry point: its start, its engine, its rollouts and the batch of its last step."""

    def __init__(self, stack: contextlib.ExitStack, kernels: str) -> None:
        self.stack, self.kernels = stack, KERNELS[kernels]
        self.born, self.memory = psutil.Process().create_time(), watched.PeakMemory()
        self.startup_s, self.asleep_gib = 0.0, None
        self.lent: dict[str, Tensor] = {}
        self.sums: dict[str, int] = {}
        self.tok_s: list[float] = []  # of each rollout's generation
        self.prompt_ids: list[list[int]] = []
        self.batch: dict[str, Tensor] = {}
        self.trainers = stack.enter_context(watched.kept_trainers())
        for owner, name, watch in (
            (model_load, "load_base", self.load),
            (rollout_engine, "engine_arguments", self.arguments),
            (rollout_engine, "start_engine", self.start),
            (Engine, "rollout", self.rollout),
            (Trainer, "learn", self.learn),
        ):
            stack.enter_context(watched.intercept(owner, name, watch))

    def load(self, load_base: Callable[..., Any], *arguments: Any) -> Any:
        # Sampling begins here and not earlier, since the checks would see this process's CUDA context on the GPU.
        self.stack.enter_context(self.memory)
        return load_base(*arguments)

    def arguments(self, engine_arguments: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        return engine_arguments(*arguments) | self.kernels

    def start(self, start_engine: Callable[..., Engine], *arguments: Any) -> Engine:
        before = watched.free_gib()
        engine = start_engine(*arguments)
        self.asleep_gib = before - watched.free_gib()
        engine.stop_token_ids = []  # Every completion is as long as it may be.
        self.remember(arguments[-1])
        return engine

    def remember(self, policy: torch.nn.Module) -> None:
        """Takes the sums of the policy's frozen and lent weights as they are before training."""
        self.lent = lent_tensors(policy)
        self.sums = bit_sums(frozen_tensors(policy) | self.lent)

    def rollout(self, rollout: Callable[..., Any], engine: Engine, policy: Any, prompts: Any, *arguments: Any) -> Any:
        result = rollout(engine, policy, prompts, *arguments)
        self.tok_s.append(sum(map(len, result[0])) / engine.seconds["generate"])
        self.prompt_ids = [list(ids) for ids in prompts]
        return result

    def learn(
        self, learn: Callable[..., Any], trainer: Trainer, model: torch.nn.Module, batch: Any, *arguments: Any
    ) -> Any:
        self.startup_s = self.startup_s or time.time() - self.born
        self.batch = batch
        if not self.sums:  # without an engine
            self.remember(model)
        return learn(trainer, model, batch, *arguments)

    def values(self, run: Path) -> dict[str, Any]:
        """What the run's files, its plan and its weights say once it has ended."""
        trainer, steps = self.trainers[0], steps_of(run)
        later = steps[1:] if len(steps) > 1 else steps
        plan, engine, parity, s = trainer.run.plan, trainer.run.engine, trainer.run.parity, trainer.run.settings
        values: dict[str, Any] = {name: later[name].mean() for name in COLUMNS}
        values["rollout_tok_s"] = values["generate_tok_s"] = later.rollout_tokens_per_s.mean()
        values |= {"sync_share": steps.sync_share.iloc[-1], "startup_s": self.startup_s}
        values |= {"job_peak_gib": self.memory.peak, "free": self.memory.before, "micro_batch": plan.micro_batch}
        values["plan_error"] = plan.peak / self.memory.peak - 1 if self.memory.peak else None
        if parity:
            worst = {f"parity_{name}": max(row[name] for row in parity if name in row) for name in ("mean", "max")}
            values |= worst | {"parity_control_mean": min(row["control_mean"] for row in parity)}
        if engine:
            values["generate_tok_s"] = mean(self.tok_s[1:] or self.tok_s)
            values |= {"asleep_gib": self.asleep_gib, **held_gib()}
            if engine.pages:
                values["paged_gib"] = engine.pages.nbytes / 2**30
        else:
            values["rows"] = plan.generation_batch
        sums = bit_sums(frozen_tensors(trainer.model) | self.lent)
        changed = {name for name, bits in self.sums.items() if sums[name] != bits}
        values["base_changed"] = len(changed - self.lent.keys())
        if self.lent:
            values |= {"lent_tensors": len(self.lent), "lent_changed": len(changed & self.lent.keys())}
        adapter = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        values["adapter_nonzero_lora_b"] = sum(bool(p.any()) for p in adapter)
        tokens = f"{s.PROMPTS_PER_STEP} x {s.NUM_GENERATIONS} completions, {later.tokens_mean.mean():.0f} tokens each"
        values["size"] = f"{tokens}, EXPERTS={s.EXPERTS}"
        values["which"] = "mean without the first step" if len(steps) > 1 else "the first step"
        return {name: value for name, value in values.items() if value == value}  # NaN: the run has no such figure


def measure_run(options: argparse.Namespace, stack: contextlib.ExitStack, **defaults: object) -> tuple[int, RunWatch]:
    """Runs this child's variant; `defaults` are settings that it may change. Returns the exit code, and what watched
    the run, from which its figures are kept."""
    (variant,) = (variant for variant in options.variants if variant.name == options.child)
    watch = RunWatch(stack, options.kernels)
    if options.tokens:
        stack.enter_context(watched.completions_of(options.tokens))
    code = watched.run_entry(options, {**defaults, **variant.settings})
    watch.memory.ended.set()
    return code, watch


def run_figures(variant: Variant, values: dict[str, Any], prefix: str) -> Figures:
    """Figures of a variant's run."""
    words = ", ".join(filter(None, [values["size"], variant.words]))
    return tabled(RUN, values | {"words": words}, prefix)


def rollout_child(options: argparse.Namespace) -> int:
    """Measures one variant in this process. Returns 1 if a weight is not the checkpoint's or was written."""
    with contextlib.ExitStack() as stack:
        code, watch = measure_run(options, stack, MAX_COMPLETION_LEN=512)
        if code:
            return code
        values = watch.values(Path(options.run))
        keep(options, values)
        trainer = watch.trainers[0]
        policy, engine = trainer.accelerator.unwrap_model(trainer.model), trainer.run.engine
        is_whole_card = all(variant.free_gib is None for variant in options.variants if variant.name == options.child)
        if watch.lent and is_whole_card:  # A small card has no room for the comparison.
            values |= compare_with_checkpoint(policy.get_base_model(), Path(options.model))
        if engine:
            first, second = (engine.rollout(policy, watch.prompt_ids, SEED)[0] for _ in range(2))
            values["same_seed_alike"] = sum(one == other for one, other in zip(first, second, strict=True))
    keep(options, values, done=True)
    return int(any(values.get(name) for name in UNTOUCHED))


def bench_rollout(options: argparse.Namespace) -> int:
    """The variants, one after the other. Returns 1 if one fails, or if a weight is not what it must be."""
    return rollout_child(options) if options.child else run_variants(options, run_figures)
