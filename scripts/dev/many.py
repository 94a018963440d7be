# SPDX-License-Identifier: Apache-2.0
"""Measures the same step on one GPU, on two, and so on."""

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas
import psutil
import torch

from grpo.plan.machine import GIB
from grpo.process.child import run_child
from grpo.process.ranks import Ranks
from scripts.dev.harness import CHILD, Function, child_path, intercept, run_settings
from scripts.dev.record import BENCH, Figure, Json, figure, read_json, steps_of, write

GROUP, LARGE = 8, 4  # completions of a prompt; the large step's prompts, in multiples of one GPU's
WATCH_SECONDS = 0.5  # Between two looks at the host's memory.


def many_child(options: argparse.Namespace) -> int:
    """Runs the entry point as one of torchrun's processes; returns its exit code. Rank 0 writes size and time of the
    last of the largest sums over all GPUs, if any. A second, equal sum is timed: the first waits for slower GPUs."""
    rank = os.environ["RANK"]  # Read here, as the entry point removes torchrun's variables.
    sums: list[tuple[int, float]] = []

    def sum_twice(sum_tensor: Function, ranks: Ranks, tensor: torch.Tensor) -> None:
        sum_tensor(ranks, tensor)
        again, started = torch.zeros_like(tensor), time.perf_counter()
        sum_tensor(ranks, again)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        sums.append((tensor.nbytes, time.perf_counter() - started))

    with intercept(Ranks, "sum_tensor", sum_twice):
        code: int = options.main([])
    if rank == "0" and sums:
        size = max(size for size, _ in sums)
        seconds = [seconds for n, seconds in sums if n == size]
        child_path(options).write_text(json.dumps({"sum_mb": size / 1e6, "sum_ms": 1000 * seconds[-1]}))
    return code


@contextlib.contextmanager
def host_memory() -> Iterator[Json]:
    """Fills in `host_gib`, the most host memory that the block took beyond what was in use before."""
    before, done, values = psutil.virtual_memory().available, threading.Event(), {"host_gib": 0.0}

    def watch() -> None:
        while not done.wait(WATCH_SECONDS):
            used = (before - psutil.virtual_memory().available) / GIB
            values["host_gib"] = max(values["host_gib"], used)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield values
    done.set()
    watcher.join()


def run_many(options: argparse.Namespace, gpus: int, prompts: int) -> Json:
    """Measures three steps of `prompts` prompts on `gpus` GPUs. Empty if the run failed."""
    defaults = {"USE_VLLM": int(torch.cuda.is_available()), "MAX_COMPLETION_LEN": 512, "PROMPTS_PER_STEP": prompts}
    settings = run_settings(options, defaults | dict(options.set))
    child_options = ["--model", options.model, "--data", options.data, "--run", options.run, "--out", "-"]
    # Without "--" torchrun takes the program's --run for its own --run-path.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus), "--", str(BENCH), "many"]
    child_path(options).unlink(missing_ok=True)
    started = time.time()
    with host_memory() as memory:
        code = run_child([*command, *child_options, "--child", CHILD], settings)
    if code:
        return {}
    steps = steps_of(Path(options.run))
    values = {name: steps[name][1:].mean() for name in ("step_s", "rollout_s", "learn_s", "tokens_mean")}
    first_end = pandas.to_datetime(steps.time[0], utc=True).timestamp()
    values["startup_s"] = first_end - steps.step_s[0] - started
    return values | memory | read_json(child_path(options))


def many_figures(results: Mapping[tuple[int, int], Json], prompts: int, group: int) -> list[Figure]:
    """Figures of the runs that have ended, by GPUs and prompts of the whole step, given the prompts of one GPU and the
    completions of a prompt (`group`)."""
    figures, speedup = [], "step time of one GPU divided by that of these"
    for (gpus, count), values in results.items():
        name, tokens = f"{gpus}x{count * group}", count * group * values["tokens_mean"]
        size = f"{gpus} GPUs, {count} prompts x {group} completions x {values['tokens_mean']:.0f} tokens in all"
        figures += [
            figure(f"{name}_step_s", values["step_s"], "s", f"{size}: mean of steps 2 and 3"),
            figure(f"{name}_rollout_s", values["rollout_s"], "s", "its rollout, until every GPU has all completions"),
            figure(f"{name}_learn_s", values["learn_s"], "s", "its learning, gradients added up"),
            figure(f"{name}_tok_s", tokens / values["step_s"], "tokens/s", "of the step"),
            figure(f"{name}_startup_s", values["startup_s"], "s", "from the command to the first step"),
            figure(f"{name}_host_gib", values["host_gib"], "GiB", "host memory that all processes took at most"),
        ]
        if "sum_ms" in values:
            note = f"a sum of {values['sum_mb']:.1f} MB over the GPUs: gradients, log-probs and ratios of a step"
            figures.append(figure(f"{name}_sum_ms", values["sum_ms"], "ms", note))
        if gpus > 1 and count == prompts * gpus and (alone := results.get((1, prompts))):
            share = alone["step_s"] / values["step_s"]
            figures.append(figure(f"weak_{gpus}", share, "share", speedup))
        if gpus > 1 and (alone := results.get((1, count))):
            figures.append(figure(f"strong_{name}", alone["step_s"] / values["step_s"], "x", speedup))
    return figures


def bench_many(options: argparse.Namespace) -> int:
    """Weak scaling (PROMPTS on each GPU) and strong scaling (as many, and LARGE times as many, on all together).
    Returns 1 if a run fails."""
    if options.child:
        return many_child(options)
    results: dict[tuple[int, int], Json] = {}
    group = int(dict(options.set).get("NUM_GENERATIONS", GROUP))
    # Weak scaling comes first, and the large step last, as it takes longest.
    sizes = {(options.prompts * size, gpus) for gpus in options.gpus for size in (1, gpus, LARGE)}
    for prompts, gpus in sorted(sizes, key=lambda size: (size[0] != size[1] * options.prompts, size)):
        results[gpus, prompts] = run_many(options, gpus, prompts)
        if not results[gpus, prompts]:
            print(f"{prompts} prompts on {gpus} GPUs: the run failed, see above", file=sys.stderr)
            return 1
        write(Path(options.out), many_figures(results, options.prompts, group))
    return 0
