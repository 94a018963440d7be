# SPDX-License-Identifier: Apache-2.0
"""The demo on several seeds."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure as Drawing

from grpo.measure.record import SCRIPT, figure, outcome_figures, read_json, steps_of, write
from grpo.tasks.tes.closed_loop import RULES

OF_SEED = ("_before", "_after", "_gain", "_base", "_trained", "_greedy")  # ends of figures that differ between seeds
LEAST = {"base": 1.0, "rule": 0.9}  # share of the seeds whose plant must beat the base model's, and the best rule's


def run_seed(options: argparse.Namespace, seed: int) -> tuple[Path, float]:
    """Trains with `seed` and the demo's settings, as demo.sh has them; returns the run's folder and its seconds."""
    run = Path(options.run) / f"seed-{seed}"
    settings = {"MODEL_ID": "tiny", "SEED": str(seed), "OUTPUT_DIR": str(run), "OVERWRITE": "1", "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    with run.with_name(f"{run.name}.log").open("w") as log:
        subprocess.run([sys.executable, SCRIPT], env=os.environ | settings | dict(options.set), check=True, stdout=log)
    return run, time.perf_counter() - started


def regrets(run: Path) -> dict[str, float]:
    """Regret in the closed loop by policy, in %."""
    return {name: total["regret_percent"] for name, total in read_json(run / "closed_loop.json")["totals"].items()}


def bench_demo(options: argparse.Namespace) -> int:
    """Seeds 1 to `options.seeds`, two side by side: held-out reward and plant before and after. Returns 1 unless the
    plant gets better than the base model's on all seeds, and than the best rule's on nine of ten."""
    Path(options.run).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        seconds = dict(pool.map(partial(run_seed, options), range(1, options.seeds + 1)))
    seeds = {run: regrets(run) for run in seconds}
    first = next(iter(seeds))
    rule, evaluation = min(RULES, key=seeds[first].__getitem__), read_json(first / "evaluation.json")
    exactly = "exactly" if evaluation["exact"] else f"{evaluation['samples']} samples"
    notes = {"": f"at temperature {evaluation['temperature']:g}, {exactly}", "_greedy": "the likeliest answer"}
    figures, failed = [], False
    for name, least in LEAST.items():
        for kind, note in notes.items():
            limit = rule if name == "rule" else f"base{kind}"
            better = sum(regret[f"trained{kind}"] < regret[limit] for regret in seeds.values())
            figures.append(figure(f"better_than_{name}{kind}", better, "seeds", f"of {len(seeds)}, {note}"))
            failed |= better < least * len(seeds)
    figures.append(figure("rule_regret", seeds[first][rule], "%", f"the best rule, {rule}"))
    for number, run in enumerate(seeds, 1):
        rows = outcome_figures(run, f"seed{number}_")
        figures += [row for row in rows if number == 1 or row["name"].endswith(OF_SEED)]
        figures.append(figure(f"seed{number}_total_s", seconds[run], "s", "process start to zip, beside another seed"))
    plot_seeds(seeds, rule, Path(options.figure))
    write(Path(options.out), figures)
    return int(failed)


def plot_seeds(seeds: Mapping[Path, Mapping[str, float]], rule: str, path: Path) -> None:
    """Reward of the sampled completions over the steps, and regret of the plant at each evaluation, a line a seed.
    `seeds`: regret by policy, by folder of the run."""
    drawing = Drawing(figsize=(9, 3.6), dpi=160)
    left, right = drawing.subplots(1, 2)
    line = {"color": "#0b6e99", "alpha": 0.6, "linewidth": 1}
    for run, policies in seeds.items():
        steps = steps_of(run).set_index("step")
        left.plot(steps.reward.rolling(20, min_periods=1).mean(), **line)
        regret = steps.plant_regret.dropna()
        regret.loc[0], regret.loc[steps.index[-1]] = policies["base"], policies["trained"]
        right.plot(regret.sort_index(), marker=".", markersize=4, **line)
        limit = policies[rule]
    right.axhline(limit, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
    right.text(steps.index[-1], limit * 1.1, f"best rule {limit:.1f} %", ha="right", fontsize=8, color="#333333")
    left.set(title=f"Reward, {len(seeds)} seeds", xlabel="optimizer step", ylabel="mean of the step's rows")
    right.set(title="Plant's regret, held-out days", xlabel="optimizer step", ylabel="% above the optimum")
    right.set_yscale("log")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Software": None})
