# SPDX-License-Identifier: Apache-2.0
"""Measures the mismatch of vLLM and trainer, and which faults the mismatch check finds: each is made on purpose."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Module

from grpo.learn.trainer import Trainer
from grpo.model import experts
from grpo.model.attention import unwrap_peft
from grpo.process.ending import RunFailure
from grpo.rollout import parity, weight_sync
from grpo.rollout.parity import BASE, FIXED, SAMPLED, ParityError
from grpo.rollout.sampler import Sampling, VllmSampler
from scripts.dev.cpu_vllm import vllm_on_the_cpu
from scripts.dev.harness import intercept, run_settings
from scripts.dev.record import Figure, figure, write

Fault = Callable[[Trainer], contextlib.AbstractContextManager[object]]


class Measured(RunFailure):
    """Ends the run after the check, which is all that is measured."""

    code = 0
    label = "measured"
    is_zipped = False


def middle_layer(trainer: Trainer) -> int:
    return len(unwrap_peft(trainer.model).model.layers) // 2


def without_sync(later_only: bool) -> Fault:
    """The engine never gets the adapter; or, with `later_only`, keeps the first one."""

    @contextlib.contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        engine, calls = trainer.run.engine, []
        assert engine
        sync = engine.sync_weights

        def stale(policy: Module, active: bool = True, seed: int | None = None) -> None:
            calls.extend([active] if active else [])
            if not (later_only and len(calls) > 1):
                sync(policy, active and later_only, seed)

        with mock.patch.object(engine, "sync_weights", stale):
            yield

    return fault


def without_layers(word: str) -> Fault:
    """The engine does not get the adapter of the modules whose names contain `word`; {} is the middle layer."""

    def fault(trainer: Trainer) -> contextlib.AbstractContextManager[object]:
        part, layers = word.format(middle_layer(trainer)), weight_sync.lora_layers

        def remaining(policy: Module) -> dict[str, Module]:
            return {name: layer for name, layer in layers(policy).items() if part not in name}

        return mock.patch.object(weight_sync, "lora_layers", remaining)

    return fault


def multiplied(factor: float) -> Fault:
    """The engine gets the adapter's update times `factor`."""

    def fault(trainer: Trainer) -> contextlib.AbstractContextManager[object]:
        factors = weight_sync.stored_factors

        def wrong(layer: Module, active: bool = True) -> tuple[Tensor, Tensor]:
            a, b = factors(layer, active)
            return a, factor * b

        return mock.patch.object(weight_sync, "stored_factors", wrong)

    return fault


def with_weights(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """The trainer computes with the parameters or buffers changed whose names end with `name`."""

    @contextlib.contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        model = unwrap_peft(trainer.model)
        tensors = [
            t for names in (model.named_parameters(), model.named_buffers()) for n, t in names if n.endswith(name)
        ]
        kept = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(change(tensor))
            yield
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)

    return fault


def without_module(path: str) -> Fault:
    """The trainer's module at `path` of the middle layer adds nothing to the residual stream."""

    @contextlib.contextmanager
    def fault(trainer: Trainer) -> Iterator[None]:
        layer = unwrap_peft(trainer.model).model.layers[middle_layer(trainer)]
        zeros = lambda module, inputs, output: (torch.zeros_like(output[0]), *output[1:])  # noqa: E731
        hook = layer.get_submodule(path).register_forward_hook(zeros)
        yield
        hook.remove()

    return fault


def without_clamp(trainer: Trainer) -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(experts, "GATE_LIMIT", 1e9)


def with_attention_factor(trainer: Trainer) -> contextlib.AbstractContextManager[object]:
    """YaRN's factor of cosines and sines, 1.35 in gpt-oss and 1 without YaRN, is another one."""
    rotary = unwrap_peft(trainer.model).model.rotary_emb
    return mock.patch.object(rotary, "attention_scaling", 1.1 if rotary.attention_scaling == 1.0 else 1.0)


@contextlib.contextmanager
def without_window(trainer: Trainer) -> Iterator[None]:
    """The config's window makes masks, each layer's own is passed to flash kernels."""
    model = unwrap_peft(trainer.model)
    windowed = [layer.self_attn for layer in model.model.layers if layer.self_attn.sliding_window]
    with contextlib.ExitStack() as stack:
        for owner in (model.config, *windowed):
            stack.enter_context(mock.patch.object(owner, "sliding_window", 1_000_000))
        yield


def with_nan(trainer: Trainer) -> contextlib.AbstractContextManager[object]:
    """vLLM has no number for the first sampled token."""
    assert trainer.run.engine
    generate = trainer.run.engine.generate

    def incomplete(*arguments: Any, **options: Any) -> Any:
        ids, values = generate(*arguments, **options)
        return ids, [[None, *values[0][1:]], *values[1:]]

    return mock.patch.object(trainer.run.engine, "generate", incomplete)


FAULTS: dict[str, Fault] = {
    "none": lambda trainer: contextlib.nullcontext(),
    "adapter_never_arrives": without_sync(later_only=False),
    "adapter_stale_after_sleep": without_sync(later_only=True),
    "adapter_without_q_proj": without_layers("q_proj"),
    "adapter_without_v_proj": without_layers("v_proj"),
    "adapter_without_one_layer": without_layers(".layers.{}."),
    "adapter_twice": multiplied(2.0),
    "adapter_times_0.9": multiplied(0.9),
    "sinks_lost": with_weights("self_attn.sinks", lambda sinks: torch.full_like(sinks, -1e4)),
    "clamp_lost": without_clamp,
    "window_lost": without_window,
    "rope_frequencies_3_percent_lower": with_weights("rotary_emb.inv_freq", lambda frequencies: 0.97 * frequencies),
    "rope_base_wrong": with_weights("rotary_emb.inv_freq", lambda frequencies: frequencies**0.9),
    "yarn_attention_factor_wrong": with_attention_factor,
    "router_in_fp8": with_weights("router.weight", lambda weight: weight.to(torch.float8_e4m3fn).to(weight.dtype)),
    "experts_of_one_layer_lost": without_module("mlp"),
    "attention_of_one_layer_lost": without_module("self_attn"),
    "nan_log_prob": with_nan,
}


def judge(check: Callable[[Trainer], None], trainer: Trainer, name: str) -> list[Figure]:
    """The figures of a check beside the fault `name`, which goes on where it would have ended the run."""
    problems: list[str] = []

    def recorded(problem: Callable[..., str | None]) -> Callable[..., None]:
        return lambda *arguments: problems.extend(filter(None, [problem(*arguments)]))

    trainer.run.parity.clear()
    assert trainer.run.engine
    with VllmSampler(trainer.run.engine, trainer.model).session(Sampling(0, 1.0, 1.0, 1, with_adapter=False)):
        pass  # What the last fault left in vLLM's weights goes.
    with contextlib.ExitStack() as stack:
        for function in (parity.base_problem, parity.adapter_problem, parity.effect_problem):
            stack.enter_context(mock.patch.object(parity, function.__name__, recorded(function)))
        stack.enter_context(FAULTS[name](trainer))
        try:
            check(trainer)
        except ParityError as error:  # the share of a small update
            problems.append(str(error))
    rows = trainer.run.parity
    figures = [figure(f"{name}_found", float(bool(problems)), "0 or 1", problems[0].split(". ")[0] if problems else "")]
    for kind, word in ((FIXED, "fixed"), (SAMPLED, "sampled")):
        means = {row["when"] == BASE: row["mean"] for row in rows if row["kind"] == kind}
        figures.append(figure(f"{name}_base_{word}", means[True], "nats", "mean |difference|, no adapter"))
        worst = max(row["mean"] for row in rows if row["kind"] == kind and row["when"] != BASE)
        figures.append(figure(f"{name}_adapter_{word}", worst, "nats", "with the test adapter, worst of two rounds"))
    kl = max(row["kl"] for row in rows if row["kind"] == SAMPLED and row["when"] == BASE)
    for end, base in (("rounding", True), ("adapter_rounding", False)):
        largest = max(row["rounding"] for row in rows if (row["when"] == BASE) == base)
        figures.append(figure(f"{name}_{end}", largest, "nats", "the trainer from itself with one more rounding"))
    control = min(row["control_mean"] for row in rows if "control_mean" in row)
    share, deviation = parity.mean_effect_share(rows)
    figures.append(
        figure(f"{name}_share", share, "share", f"of both test adapters' effect, standard error {deviation:.2g}")
    )
    figures.append(figure(f"{name}_base_kl", kl, "nats", "KL(vLLM || trainer) of the sampled tokens, no adapter"))
    return [*figures, figure(f"{name}_control", control, "nats", "with the trainer's adapter off")]


def bench_mismatch(options: argparse.Namespace) -> int:
    """Measures `options.faults` in this process; the JSON is written after each. Returns the run's exit code."""
    names, figures = options.faults or list(FAULTS), []

    def measure(check: Callable[[Trainer], None], trainer: Trainer) -> None:
        for name in names:
            figures.extend(judge(check, trainer, name))
            write(Path(options.out), figures)
        raise Measured("every fault")

    settings = {"MAX_COMPLETION_LEN": 128, **dict(options.set)}
    os.environ |= run_settings(options, settings)
    place = vllm_on_the_cpu() if options.cpu else contextlib.nullcontext()
    with intercept(parity, "check_mismatch", measure), place:
        return int(options.main([]))
