# SPDX-License-Identifier: Apache-2.0
"""The same step on one GPU, on two, and so on."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from grpo.learn.trainer import Trainer
from grpo.measure.record import figure, steps_of, write
from grpo.measure.variants import keep, kept, run_child
from grpo.measure.watched import intercept, run_entry

GROUP, LARGE = 8, 4  # completions of a prompt; how many times the prompts of one GPU the large step has
TOKENS = 512  # of a completion, unless --set says otherwise
STARTED = "BENCH_MANY_STARTED"  # variable: when the command was started
Results = Mapping[tuple[int, int], Mapping[str, Any]]  # what a child measured, by GPUs and prompts of the whole step


def many_child(options: argparse.Namespace) -> int:
    """One of torchrun's processes: three steps through the entry point. The one of rank 0 writes what they took."""
    rank, (ranks, prompts) = int(os.environ["RANK"]), map(int, options.child.split("x"))
    values: dict[str, Any] = {}

    def train(original: Callable[..., Any], trainer: Trainer, *arguments: Any, **named: Any) -> Any:
        values["startup_s"] = time.time() - float(os.environ[STARTED])
        adapter = [p for p in trainer.model.parameters() if p.requires_grad]
        values["reduced_mb"] = 4 * sum(p.numel() for p in adapter) / 1e6 if ranks > 1 else 0.0
        return original(trainer, *arguments, **named)

    settings = {"USE_VLLM": int(torch.cuda.is_available()), "MAX_COMPLETION_LEN": TOKENS, "PROMPTS_PER_STEP": prompts}
    with intercept(Trainer, "train", train):
        code = run_entry(options, settings | dict(options.set))
    if code or rank:
        return code
    steps = steps_of(Path(options.run))[1:]
    values |= {name: steps[name].mean() for name in ("step_s", "rollout_s", "learn_s", "tokens_mean")}
    keep(options, values, done=True)
    return 0


def run_many(options: argparse.Namespace, gpus: int, prompts: int) -> dict[str, Any]:
    """What a child on so many GPUs measured, with `--resume` perhaps in an earlier call; empty if it failed."""
    child = f"{gpus}x{prompts}"
    if options.resume and (values := kept(options, child, only_done=True)):
        return values
    os.environ[STARTED] = str(time.time())
    # Without the dashes torchrun takes `--run` for the beginning of an option of its own.
    run_child(options, child, ("-m", "torch.distributed.run", "--nproc-per-node", str(gpus), "--"))
    return kept(options, child)


def many_figures(results: Results, prompts: int) -> list[dict[str, Any]]:
    """Figures of the children that have ended, given the prompts of one GPU."""
    figures = []
    for (gpus, count), values in results.items():
        name = f"{gpus}x{count * GROUP}"
        size = f"{gpus} GPUs, {count} prompts x {GROUP} completions x {values['tokens_mean']:.0f} tokens in all"
        tokens = count * GROUP * values["tokens_mean"]
        figures += [
            figure(f"{name}_step_s", values["step_s"], "s", f"{size}: mean of steps 2 and 3"),
            figure(f"{name}_rollout_s", values["rollout_s"], "s", "its rollout, until all have all of it"),
            figure(f"{name}_learn_s", values["learn_s"], "s", "its learning, gradients added up"),
            figure(f"{name}_tok_s", tokens / values["step_s"], "tokens/s", "of the step"),
            figure(f"{name}_startup_s", values["startup_s"], "s", "from the command to the first step"),
            figure(
                f"{name}_reduced_mb", values["reduced_mb"], "MB", "of gradients in float32 that are added up a step"
            ),
        ]
        alone = results.get((1, prompts))
        if gpus > 1 and alone and count == prompts * gpus:
            share = alone["step_s"] / values["step_s"]
            figures.append(figure(f"weak_{gpus}", share, "share", "one GPU's step by this one's"))
        if gpus > 1 and (alone := results.get((1, count))):
            share = alone["step_s"] / values["step_s"]
            figures.append(figure(f"strong_{name}", share, "x", "sooner than one"))
    return figures


def bench_many(options: argparse.Namespace) -> int:
    """Weak scaling (PROMPTS on each GPU) and strong scaling (as many, and LARGE times as many, on all together).
    Returns 1 if a run fails."""
    if options.child:
        return many_child(options)
    results: dict[tuple[int, int], dict[str, Any]] = {}
    for gpus in options.gpus:
        for prompts in sorted({options.prompts, LARGE * options.prompts, gpus * options.prompts}):
            results[gpus, prompts] = run_many(options, gpus, prompts)
            if not results[gpus, prompts]:
                print(f"{prompts} prompts on {gpus} GPUs: the run failed, see above", file=sys.stderr)
                return 1
            write(Path(options.out), many_figures(results, options.prompts))
    return 0
