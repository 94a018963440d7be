# SPDX-License-Identifier: Apache-2.0
"""The tiny model on three seeds."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

from grpo.measure.record import figure, read_json, steps_of, tabled, write
from grpo.model.tiny import build_tiny
from grpo.settings import ROOT

SEED = """
before | reward | held-out mean reward, sampled
after | reward | the same prompts after training
parse_rate_after | share |
total_s | s | process start to zip, model already made
co2_before co2_after | kg | closed loop, five windows of three days
unserved_before unserved_after | kWh | load that nothing served
plant_regret_before plant_regret_after | % | against the exact optimum, unserved load at its price
"""


def bench_demo(options: argparse.Namespace) -> int:
    """Held-out reward before and after training on the tiny model, three seeds; exit code 1 unless each seed gains."""
    build_tiny()  # once, so that no seed pays for it
    results, figures, gains = {}, [], []
    for seed in (1, 2, 3):
        run = Path(options.run) / f"seed-{seed}"
        settings = {"MODEL_ID": "tiny", "SEED": str(seed), "OUTPUT_DIR": str(run), "OVERWRITE": "1"}
        started = time.perf_counter()
        command = [sys.executable, str(ROOT / "train_grpo.py")]
        subprocess.run(command, env=os.environ | settings | {"OMP_NUM_THREADS": "1"}, check=True)
        result, plant = read_json(run / "evaluation.json"), read_json(run / "closed_loop.json")["totals"]
        found = {"total_s": time.perf_counter() - started, "parse_rate_after": result["after"]["parse_rate"]}
        for name, when in (("base", "before"), ("trained", "after")):
            found |= {when: result[when]["reward"], f"co2_{when}": plant[name]["co2_kg"]}
            found |= {f"unserved_{when}": plant[name]["unserved_kwh"]}
            found |= {f"plant_regret_{when}": plant[name]["regret_percent"]}
        figures += [one | {"name": f"seed{seed}_{one['name']}"} for one in tabled(SEED, found)]
        gains.append(found["after"] - found["before"])
        results[run] = result
    figures += [figure(name, result[name], "reward", "held-out rows") for name in ("random", "constant", "oracle")]
    figures.append(figure("optimum_co2", plant["optimum"]["co2_kg"], "kg", "the same windows"))
    plot_runs(results, Path(options.figure))
    write(Path(options.out), figures)
    return int(min(gains) <= 0)


def plot_runs(results: dict[Path, dict[str, Any]], path: Path) -> None:
    """Reward of the sampled completions over the steps, one line a run, with what other policies earn beside it.
    `results`: evaluation.json by the run's folder."""
    matplotlib.use("Agg")
    plot, axes = plt.subplots(figsize=(7.2, 3.6), dpi=160)
    for (run, result), colour in zip(results.items(), ("#0b6e99", "#d9730d", "#448361"), strict=False):
        steps = steps_of(run).set_index("step")
        steps.reward.plot(ax=axes, color=colour, alpha=0.18, linewidth=0.8, label="_nolegend_")
        label = f"{run.name.replace('-', ' ')}: held-out {result['before']['reward']:.2f} to {result['after']['reward']:.2f}"
        steps.reward.rolling(10, min_periods=1).mean().plot(ax=axes, color=colour, linewidth=1.8, label=label)
    last = steps.index[-1]
    for name, text in (("oracle", "held-out: oracle"), ("constant", "best constant"), ("random", "random")):
        axes.axhline(result[name], color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(last * 1.01, result[name], f"{text} {result[name]:.2f}", va="center", fontsize=8, color="#333333")
    axes.set(xlabel="optimizer step", ylabel="mean reward of the step's rows", xlim=(1, last), ylim=(0.2, 0.85))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.1), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    plot.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, metadata={"Software": None})
