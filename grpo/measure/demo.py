# SPDX-License-Identifier: Apache-2.0
"""The tiny model on three seeds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grpo.measure.record import figure, steps_of, write
from grpo.model.tiny import build_tiny
from grpo.settings import ROOT


def bench_demo(options: argparse.Namespace) -> int:
    """Held-out reward before and after training on the tiny model, three seeds; exit code 1 unless each seed gains."""

    build_tiny()  # once, so that no seed pays for it
    runs, figures, gains = [], [], []
    for seed in (1, 2, 3):
        run = Path(options.run) / f"seed-{seed}"
        environ = os.environ | {
            "MODEL_ID": "tiny", "SEED": str(seed), "OUTPUT_DIR": str(run), "OVERWRITE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        started = time.perf_counter()
        subprocess.run([sys.executable, str(ROOT / "train_grpo.py")], env=environ, check=True)
        seconds = time.perf_counter() - started
        result = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
        before, after = result["before"], result["after"]
        runs.append((run, result))
        gains.append(after["reward"] - before["reward"])
        figures += [
            figure(f"seed{seed}_before", before["reward"], "reward", "held-out mean reward, sampled"),
            figure(f"seed{seed}_after", after["reward"], "reward", "the same prompts after training"),
            figure(f"seed{seed}_parse_rate_after", after["parse_rate"], "share"),
            figure(f"seed{seed}_total_s", seconds, "s", "process start to zip, model already made"),
        ]
        plant = json.loads((run / "closed_loop.json").read_text(encoding="utf-8"))["totals"]
        for name, when in (("base", "before"), ("trained", "after")):
            figures += [
                figure(f"seed{seed}_co2_{when}", plant[name]["co2_kg"], "kg", "closed loop, five windows of three days"),
                figure(f"seed{seed}_unserved_{when}", plant[name]["unserved_kwh"], "kWh", "load that nothing served"),
                figure(f"seed{seed}_plant_regret_{when}", plant[name]["regret_percent"], "%", "against the exact optimum, unserved load at its price"),
            ]  # fmt: skip
    figures += [figure(name, runs[0][1][name], "reward", "held-out rows") for name in ("random", "constant", "oracle")]
    figures.append(figure("optimum_co2", plant["optimum"]["co2_kg"], "kg", "the same windows"))
    plot_runs(runs, Path(options.figure))
    write(Path(options.out), figures)
    return int(min(gains) <= 0)


def plot_runs(runs: list[tuple[Path, dict[str, Any]]], path: Path) -> None:
    """Reward of the sampled completions over the steps, one line a seed, with what other policies earn beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plot, axes = plt.subplots(figsize=(7.2, 3.6), dpi=160)
    for (run, result), colour in zip(runs, ("#0b6e99", "#d9730d", "#448361"), strict=False):
        rewards = [float(row["reward"]) for row in steps_of(run)]
        smooth = [
            sum(rewards[max(0, i - 9) : i + 1]) / len(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))
        ]
        steps = range(1, len(rewards) + 1)
        axes.plot(steps, rewards, color=colour, alpha=0.18, linewidth=0.8)
        label = f"{run.name.replace('-', ' ')}: held-out {result['before']['reward']:.2f} to {result['after']['reward']:.2f}"
        axes.plot(steps, smooth, color=colour, linewidth=1.8, label=label)
    last = len(rewards)
    for name, text in (("oracle", "held-out: oracle"), ("constant", "best constant"), ("random", "random")):
        value = runs[0][1][name]
        axes.axhline(value, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(last * 1.01, value, f"{text} {value:.2f}", va="center", fontsize=8, color="#333333")
    axes.set(xlabel="optimizer step", ylabel="mean reward of the step's rows", xlim=(1, last), ylim=(0.2, 0.85))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.1), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    plot.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, metadata={"Software": None})
