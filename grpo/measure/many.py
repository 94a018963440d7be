# SPDX-License-Identifier: Apache-2.0
"""The same step on one GPU, on two, and so on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pandas
import torch

from grpo.measure.record import SCRIPT, Figure, Json, figure, steps_of, write
from grpo.measure.variants import read_result, run_settings, write_result
from grpo.run.child import run_child

GROUP, LARGE = 8, 4  # completions of a prompt; how many times the prompts of one GPU the large step has


def run_many(options: argparse.Namespace, gpus: int, prompts: int) -> Json:
    """What three steps of so many prompts took on so many GPUs, with `--resume` perhaps in an earlier call; empty if
    the run failed."""
    child = f"{gpus}x{prompts}"
    if options.resume and (values := read_result(options, child)):
        return values
    defaults = {"USE_VLLM": int(torch.cuda.is_available()), "MAX_COMPLETION_LEN": 512, "PROMPTS_PER_STEP": prompts}
    settings = run_settings(options, defaults | dict(options.set))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus), str(SCRIPT)]
    started = time.time()
    if run_child(command, settings):
        return {}
    steps = steps_of(Path(options.run))
    values = {name: steps[name][1:].mean() for name in ("step_s", "rollout_s", "learn_s", "tokens_mean")}
    first_end = pandas.to_datetime(steps.time[0], utc=True).timestamp()
    values["startup_s"] = first_end - steps.step_s[0] - started
    write_result(options, child, values)
    return values


def many_figures(results: Mapping[tuple[int, int], Json], prompts: int) -> list[Figure]:
    """Figures of the runs that have ended, by GPUs and prompts of the whole step, given the prompts of one GPU."""
    figures = []
    for (gpus, count), values in results.items():
        name, tokens = f"{gpus}x{count * GROUP}", count * GROUP * values["tokens_mean"]
        size = f"{gpus} GPUs, {count} prompts x {GROUP} completions x {values['tokens_mean']:.0f} tokens in all"
        figures += [
            figure(f"{name}_step_s", values["step_s"], "s", f"{size}: mean of steps 2 and 3"),
            figure(f"{name}_rollout_s", values["rollout_s"], "s", "its rollout, until all have all of it"),
            figure(f"{name}_learn_s", values["learn_s"], "s", "its learning, gradients added up"),
            figure(f"{name}_tok_s", tokens / values["step_s"], "tokens/s", "of the step"),
            figure(f"{name}_startup_s", values["startup_s"], "s", "from the command to the first step"),
        ]
        if gpus > 1 and count == prompts * gpus and (alone := results.get((1, prompts))):
            share = alone["step_s"] / values["step_s"]
            figures.append(figure(f"weak_{gpus}", share, "share", "one GPU's step by this one's"))
        if gpus > 1 and (alone := results.get((1, count))):
            figures.append(figure(f"strong_{name}", alone["step_s"] / values["step_s"], "x", "sooner than one"))
    return figures


def bench_many(options: argparse.Namespace) -> int:
    """Weak scaling (PROMPTS on each GPU) and strong scaling (as many, and LARGE times as many, on all together).
    Returns 1 if a run fails."""
    results: dict[tuple[int, int], Json] = {}
    for gpus in options.gpus:
        for prompts in sorted({options.prompts, LARGE * options.prompts, gpus * options.prompts}):
            results[gpus, prompts] = run_many(options, gpus, prompts)
            if not results[gpus, prompts]:
                print(f"{prompts} prompts on {gpus} GPUs: the run failed, see above", file=sys.stderr)
                return 1
            write(Path(options.out), many_figures(results, options.prompts))
    return 0
