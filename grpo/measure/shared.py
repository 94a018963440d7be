# SPDX-License-Identifier: Apache-2.0
"""EXPERTS=shared and paged beside the other values of EXPERTS, on the whole card and on what a small one has free."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from torch import Tensor

from grpo.measure import watched
from grpo.measure.record import figure, shown, steps_of, tabled, write
from grpo.model import load as model_load
from grpo.model.experts import dequantize_mxfp4, expert_weights
from grpo.model.load import TABLES, QuantizedExperts, tables_of
from grpo.plan.targets import EXPERT_PARAMETERS
from grpo.rollout import engine as rollout_engine
from grpo.rollout.engine import Engine

# vLLM as on older cards: attention in Triton and, with a native adapter, Marlin's experts.
OLD = {"attention_backend": "TRITON_ATTN"}
W1 = {"MAX_COMPLETION_LEN": 512}
LONG = {"MAX_COMPLETION_LEN": 4000, "TOTAL_STEPS": 1}
# Child -> its settings, and the GiB of the card that it gets (None: all). The most telling come first.
CHILDREN: dict[str, tuple[dict[str, Any], float | None]] = {
    "shared": (W1 | {"EXPERTS": "shared"}, None),
    "shared-22": (W1 | {"EXPERTS": "shared"}, 22.0),
    "bf16": (W1 | {"EXPERTS": "bf16"}, None),
    "shared-22-4000": (LONG | {"EXPERTS": "shared"}, 22.0),
    "mxfp4": (W1 | {"EXPERTS": "mxfp4"}, None),
    "shared-20": (W1 | {"EXPERTS": "shared"}, 20.0),
    "shared-4000": (LONG | {"EXPERTS": "shared"}, None),
    "shared-384": (W1 | {"EXPERTS": "shared", "NUM_GENERATIONS": 32}, None),
    "shared-kept": (W1 | {"EXPERTS": "shared", "GRADIENT_CHECKPOINTING": 0}, None),
    "bf16-kept": (W1 | {"EXPERTS": "bf16", "GRADIENT_CHECKPOINTING": 0}, None),
    "paged-22": (W1 | {"EXPERTS": "paged"}, 22.0),
    "paged-22-old": (W1 | {"EXPERTS": "paged", "ROLLOUT_SYNC": "lora"}, 22.0),
    # Whose matrices are of the sizes that would lie behind paged weights, in segments that could not be freed then.
    "paged-22-experts": (W1 | {"EXPERTS": "paged", "ROLLOUT_SYNC": "lora", "LORA_TARGETS": "experts"}, 22.0),
}
SHARED = """
step_s | s | {what}, {tokens:.0f} tokens each: {which}
rollout_s learn_s | s | of that
wake_s sleep_s | s | of the rollout
startup_s | s | process start to the end of the first rollout, mismatch check included; a machine's first child fills the compile caches
job_peak_gib | GiB | by the driver, engine and CUDA context included; {free:.1f} GiB were free
plan_error | share | plan of --check against that peak
micro_batch | completions | of MAX_COMPLETION_LEN in a micro-batch
host_gib | GiB | in host memory for the sleeping engine
paged_gib | GiB | of the learner, in host memory while vLLM is awake
stranded_gib | GiB | that torch's allocator holds beyond its tensors when vLLM has woken, at most
lent_gib | GiB | of the sleeping engine that stay on the GPU, in whole blocks of the allocator
parity_mean | nats | worst of fixed and sampled tokens, before and after a sleep
lent_tensors lent_changed | tensors | that vLLM lends, and those of them whose sum of bits is another after training
experts_elements experts_different | elements | experts, dequantized from what vLLM lends, bit by bit against the checkpoint's
tables_elements tables_different | elements | the same of embeddings and output head
"""
RATIOS = (  # name, of which child's figure, by which child's
    ("learn_by_bf16", "learn_s", "shared", "bf16"), ("step_by_bf16", "step_s", "shared", "bf16"),
    ("learn_by_mxfp4", "learn_s", "shared", "mxfp4"), ("step_22_by_bf16", "step_s", "shared-22", "bf16"),
    ("step_22_by_shared", "step_s", "shared-22", "shared"), ("step_20_by_bf16", "step_s", "shared-20", "bf16"),
    ("startup_22_by_bf16", "startup_s", "shared-22", "bf16"),  # both with warm compile caches
)  # fmt: skip


def lent_tensors(policy: torch.nn.Module) -> dict[str, Tensor]:
    """By name, what vLLM has lent."""
    lent = {}
    for place, module in policy.named_modules():
        for name, (values, scales, *_) in module.shared.items() if isinstance(module, QuantizedExperts) else ():
            lent |= {f"{place}.{name}.values": values, f"{place}.{name}.scales": scales}
    return lent | (dict(zip(TABLES, tables_of(policy), strict=True)) if lent else {})


@torch.no_grad()
def bit_sums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """A number for each tensor that is another one where one of its elements is."""
    whole = {name: one.view(torch.int16) if one.is_floating_point() else one for name, one in tensors.items()}
    return {name: int(one.sum(dtype=torch.int64)) for name, one in whole.items()}


@torch.no_grad()
def compared(base: torch.nn.Module, folder: Path) -> dict[str, int]:
    """Elements of the model's experts and tables that were compared bit by bit with those of the checkpoint in `folder`, and of
    these the different ones."""
    places, counts = {}, Counter()
    for shard in sorted(folder.glob("model*.safetensors")):
        with safe_open(shard, "pt") as file:
            places |= dict.fromkeys(file.keys(), shard)

    def read(name: str) -> Tensor:
        with safe_open(places[name], "pt", device=str(base.device)) as file:
            return file.get_tensor(name)

    def count(kind: str, found: Tensor, expected: Tensor) -> None:
        if found.shape != expected.shape:
            raise ValueError(f"{kind}: {(*found.shape,)} against the checkpoint's {(*expected.shape,)}")
        different = int((found.view(torch.int16) != expected.view(torch.int16)).sum())
        counts.update({f"{kind}_elements": found.numel(), f"{kind}_different": different})

    for number, layer in enumerate(base.model.layers):
        for name in EXPERT_PARAMETERS:
            stem = f"model.layers.{number}.mlp.experts.{name}"
            packed = read(f"{stem}_blocks"), read(f"{stem}_scales")
            count("experts", expert_weights(layer.mlp.experts, name), dequantize_mxfp4(*packed))
    for name in TABLES:
        count("tables", base.get_parameter(name), read(name))
    return dict(counts)


def held_gib() -> dict[str, float]:
    """GiB of the sleeping engine: in host memory, and on the GPU where it lends them."""
    from vllm.device_allocator import get_mem_allocator_instance  # vLLM is optional

    held = list(get_mem_allocator_instance().pointer_to_data.values())
    host = sum(data.cpu_backup_tensor.numel() for data in held if data.cpu_backup_tensor is not None)
    lent = sum(data.handle[1] for data in held if not data.is_asleep)
    return {"host_gib": host / 2**30, "lent_gib": lent / 2**30}


class SharedWatch:
    """Watches a run. `lent`: what vLLM lends, by name; `sums`: its bits before training."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.born, self.memory = psutil.Process().create_time(), watched.PeakMemory()
        self.startup_s, self.stranded, self.lent, self.sums = 0.0, 0, {}, {}

    def load(self, load_base: Callable[..., Any], *given: Any) -> Any:
        # Not before the checks, which would see this process's context on the GPU.
        self.stack.enter_context(self.memory)
        return load_base(*given)

    def arguments(self, engine_arguments: Callable[..., dict[str, Any]], settings: Any, *given: Any) -> dict[str, Any]:
        return engine_arguments(settings, *given) | (OLD if settings.ROLLOUT_SYNC == "lora" else {})

    def start(self, start_engine: Callable[..., Engine], *given: Any) -> Engine:
        engine, policy = start_engine(*given), given[-1]
        engine.stop_token_ids = []  # every completion is as long as it may be
        self.lent = lent_tensors(policy)
        self.sums = bit_sums(self.lent)
        return engine

    def wake(self, wake: Callable[..., None], *given: Any) -> None:
        wake(*given)
        self.stranded = max(self.stranded, torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def rollout(self, rollout: Callable[..., Any], *given: Any) -> Any:
        result = rollout(*given)
        self.startup_s = self.startup_s or time.time() - self.born
        return result


def shared_child(options: argparse.Namespace) -> int:
    """One child of `bench_shared`: the entry point with its settings. Exit code 1 where what is lent is not the checkpoint's, or
    was written."""
    settings = CHILDREN[options.child][0]
    with ExitStack() as stack, watched.kept_trainers() as trainers:
        watch = SharedWatch(stack)
        stack.enter_context(watched.intercept(model_load, "load_base", watch.load))
        stack.enter_context(watched.intercept(rollout_engine, "engine_arguments", watch.arguments))
        stack.enter_context(watched.intercept(rollout_engine, "start_engine", watch.start))
        stack.enter_context(watched.intercept(Engine, "rollout", watch.rollout))
        stack.enter_context(watched.intercept(Engine, "wake", watch.wake))
        code = watched.run_w1(options, **settings)
    if code:
        return code
    trainer, steps = trainers[0], steps_of(Path(options.run))
    later = steps[1:] if len(steps) > 1 else steps
    found = {name: later[name].mean() for name in ("step_s", "rollout_s", "learn_s", "wake_s", "sleep_s")}
    plan, peak = trainer.run.plan, watch.memory.peak
    found |= {"free": watch.memory.before, "tokens": later.tokens_mean.mean()}
    found |= {
        "startup_s": watch.startup_s,
        "job_peak_gib": peak,
        "plan_error": plan.peak / peak - 1,
        "micro_batch": plan.micro_batch,
    }
    found |= {"parity_mean": max(one["mean"] for one in trainer.run.parity), **held_gib()}
    if pages := trainer.run.engine.pages:
        found |= {"paged_gib": pages.nbytes / 2**30, "stranded_gib": watch.stranded / 2**30}
    watched.keep(options, found)
    if not watch.lent:
        return 0
    now = bit_sums(watch.lent)
    found |= {"lent_tensors": len(now), "lent_changed": sum(now[name] != bits for name, bits in watch.sums.items())}
    watched.keep(options, found)
    if CHILDREN[options.child][1] is None:  # there is no room for it on a small card
        found |= compared(trainer.accelerator.unwrap_model(trainer.model).get_base_model(), Path(options.model))
        watched.keep(options, found)
    return int(any(found.get(name) for name in ("lent_changed", "experts_different", "tables_different")))


def shared_figures(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of the children that have ended, under their names, and some by others."""
    made = []
    for child, found in results.items():
        settings, left = CHILDREN[child]
        room = f", all but {left:g} GiB of the card occupied" if left else ""
        sync = ", ROLLOUT_SYNC=lora, vLLM without what only Hopper cards have" * ("ROLLOUT_SYNC" in settings)
        sync += ", adapter on the experts" * ("LORA_TARGETS" in settings)
        sync += ", GRADIENT_CHECKPOINTING=0" * ("GRADIENT_CHECKPOINTING" in settings)
        what = f"EXPERTS={settings['EXPERTS']}{sync}, 12 x {settings.get('NUM_GENERATIONS', 8)} completions{room}"
        which = "the first step" if settings.get("TOTAL_STEPS") == 1 else "mean of steps 2 and 3"
        named = tabled(SHARED, found | {"what": what, "which": which})
        made += [one | {"name": f"{child.replace('-', '_')}_{one['name']}"} for one in named]
    for name, of, child, other in RATIOS:
        if of in results.get(child, ()) and of in results.get(other, ()):
            made.append(
                figure(name, results[child][of] / results[other][of], "x", f"{of} of {child} by that of {other}")
            )
    return made


def bench_shared(options: argparse.Namespace) -> int:
    """The children one after the other, or those of `--only`; the others' last results are read where they are of the same subject.
    Exit code 1 where one fails."""
    if options.child:
        return shared_child(options)
    chosen = options.only or list(CHILDREN)
    if strange := [child for child in chosen if child not in CHILDREN]:
        print(f"no such child: {', '.join(strange)}. There are: {', '.join(CHILDREN)}", file=sys.stderr)
        return 2
    bad = 0
    for child in (one for one in CHILDREN if one in chosen):
        left = CHILDREN[child][1]
        ballast = watched.occupy(left) if left else None
        bad += watched.run_child(options, child) != 0
        del ballast
        torch.cuda.empty_cache()
        # After each child: what was measured is not lost when the machine is given back during the next one.
        read = {one: watched.kept(watched.child_result(options, one), options) for one in CHILDREN}
        results = {one: found for one, found in read.items() if found}
        write(Path(options.out), shared_figures(results), shown("shared"))
    return int(bad > 0)
