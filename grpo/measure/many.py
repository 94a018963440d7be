# SPDX-License-Identifier: Apache-2.0
"""The same step on one GPU, on two, and so on."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from grpo.learn import trainer as learner
from grpo.learn.trainer import Trainer
from grpo.measure import watched
from grpo.measure.record import BENCH, figure, read_json, shown, steps_of, write
from grpo.run.ranks import Ranks

GROUP, LARGE = 8, 4  # completions of a prompt; the large step has so many times the prompts of one GPU
OWN = {
    "own_min_s": "of learning: the fastest rank's own part, until its GPU is done",
    "own_max_s": "the slowest rank's",
    "add_up_s": "of learning: until gradients are added up, on rank 0, waiting for the slowest included",
}
Results = Mapping[tuple[int, int], Mapping[str, Any]]  # what a child found, by GPUs and prompts of the whole step


class Learning:
    """Watches each rank learn: `own`, by step, every rank's seconds until its GPU has done its own part, and `added`, this rank's
    until all is added up, waiting for the slowest included."""

    def __init__(self) -> None:
        self.started, self.own, self.added = 0.0, [], []

    def learn(self, original: Callable[..., Any], *given: Any) -> Any:
        self.started = time.perf_counter()
        return original(*given)

    def sum_over_ranks(self, original: Callable[..., None], ranks: Ranks, tensors: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        done = time.perf_counter()
        original(ranks, tensors)
        self.added.append(time.perf_counter() - done)
        self.own.append(ranks.share(done - self.started))

    def figures(self) -> dict[str, float]:
        """Means without the first step; nothing where one process learned alone."""
        own = [mean(times) for times in zip(*self.own[1:], strict=True)]
        return {"own_min_s": min(own), "own_max_s": max(own), "add_up_s": mean(self.added[1:])} if own else {}


def many_child(options: argparse.Namespace) -> int:
    """One process of torchrun: three steps through the entry point. Rank 0 writes what they took."""
    found: dict[str, Any] = {}
    options.run = options.child  # torchrun takes `--run` for an option of its own

    def train(original: Callable[..., Any], trainer: Trainer, *given: Any, **named: Any) -> Any:
        found["startup_s"] = time.time() - options.started
        return original(trainer, *given, **named)

    settings = {
        "USE_VLLM": int(options.vllm),
        "PROMPTS_PER_STEP": options.prompts,
        "MAX_COMPLETION_LEN": options.tokens,
    }
    learning = Learning()
    with (
        watched.intercept(Trainer, "train", train),
        watched.intercept(Trainer, "learn", learning.learn),
        watched.intercept(learner, "sum_over_ranks", learning.sum_over_ranks),
        watched.kept_trainers() as trainers,
    ):
        code = watched.run_w1(options, **settings)
    if code or trainers[0].run.ranks.rank:
        return code
    steps = steps_of(Path(options.run))
    found |= {name: steps[name][1:].mean() for name in ("step_s", "rollout_s", "learn_s", "tokens_mean")}
    found |= learning.figures()
    found["reduced_mb"] = trainers[0].run.ranks.summed_bytes / len(steps) / 1e6
    watched.keep(options, found)
    return 0


def run_many(options: argparse.Namespace, gpus: int, prompts: int) -> dict[str, Any]:
    """What a child on so many GPUs found, with `options.resume` one that has ended before; empty where it failed."""
    out = Path(options.run).absolute().with_name(f"many-{gpus}-{prompts}.json")
    if options.resume and (before := watched.kept(out, options)):
        return before
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus), str(BENCH), "many"]
    command += ["--vllm"] * torch.cuda.is_available()
    given = {"child": options.run, "out": out, "prompts": prompts, "started": time.time()}
    given |= {name: getattr(options, name) for name in ("model", "data", "tokens")}
    subprocess.run([*command, *(f"--{name}={value}" for name, value in given.items())], check=False)
    return read_json(out)


def many_figures(results: Results, prompts: int, tokens: int) -> list[dict[str, Any]]:
    """Figures of the children that have ended, given the prompts of one GPU."""
    made = []
    for (gpus, asked), found in results.items():
        here = f"{gpus}x{asked * GROUP}"
        what = f"{gpus} GPUs, {asked} prompts x {GROUP} completions x {tokens} tokens in all"
        made += [
            figure(f"{here}_step_s", found["step_s"], "s", f"{what}: mean of steps 2 and 3"),
            figure(f"{here}_rollout_s", found["rollout_s"], "s", "its rollout, until all have all of it"),
            figure(f"{here}_learn_s", found["learn_s"], "s", "its learning, gradients added up"),
            *(figure(f"{here}_{name}", found[name], "s", note) for name, note in OWN.items() if name in found),
            figure(f"{here}_tok_s", asked * GROUP * found["tokens_mean"] / found["step_s"], "tokens/s", "of the step"),
            figure(f"{here}_startup_s", found["startup_s"], "s", "from the command to the first step"),
            figure(f"{here}_reduced_mb", found["reduced_mb"], "MB", "of float32 that are added up a step"),
        ]
        alone = results.get((1, prompts))
        if gpus > 1 and alone and asked == prompts * gpus:
            made.append(
                figure(f"weak_{gpus}", alone["step_s"] / found["step_s"], "share", "one GPU's step by this one's")
            )
        if gpus > 1 and (alone := results.get((1, asked))):
            made.append(
                figure(f"strong_{gpus}x{asked * GROUP}", alone["step_s"] / found["step_s"], "x", "sooner than one")
            )
    return made


def bench_many(options: argparse.Namespace) -> int:
    """Weak scaling (PROMPTS on each GPU) and strong (as many, and LARGE times as many, on all together). Returns 1 where a
    run failed."""
    if options.child:
        return many_child(options)
    results: dict[tuple[int, int], dict[str, Any]] = {}
    for gpus in options.gpus:
        for prompts in sorted({options.prompts, LARGE * options.prompts, gpus * options.prompts}):
            if not (found := run_many(options, gpus, prompts)):
                print(f"{prompts} prompts on {gpus} GPUs: the run failed, see above", file=sys.stderr)
                return 1
            results[gpus, prompts] = found
            flags = f"--gpus {' '.join(map(str, options.gpus))} --prompts {options.prompts} --tokens {options.tokens}"
            figures = many_figures(results, options.prompts, options.tokens)
            write(Path(options.out), figures, shown("many", flags))
    return 0
