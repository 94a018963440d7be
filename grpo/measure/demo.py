# SPDX-License-Identifier: Apache-2.0
"""The demo on ten seeds."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

from grpo.measure.record import SCRIPT, figure, read_json, steps_of, tabled, write
from grpo.tasks.tes.closed_loop import RULES

SEED = """
reward_before reward_after | reward | held-out, the mean CSV reward, {how}
greedy_reward_before greedy_reward_after | reward | of the likeliest answer
parse_rate_after | share |
regret_before regret_after | % | closed loop: above the exact optimum, unserved load at its price, {how}
greedy_regret_before greedy_regret_after | % | the same with the likeliest answer
unserved_before unserved_after greedy_unserved_after | kWh | load that nothing served
co2_before co2_after | kg | emissions alone
total_s | s | process start to zip, beside another seed, one core each
"""
NEEDED = {"better_than_base": 10, "better_than_rule": 9}  # seeds of ten


def run_seed(run: Path, seed: int) -> dict[str, Any]:
    """Train with `seed` in the folder `run`, and what its evaluations say. The demo's settings, as demo.sh has them."""
    settings = {"MODEL_ID": "tiny", "SEED": str(seed), "OUTPUT_DIR": str(run), "OVERWRITE": "1", "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    with (run.parent / f"{run.name}.log").open("w") as log:
        subprocess.run([sys.executable, SCRIPT], env=os.environ | settings, check=True, stdout=log)
    found = {"seed": seed, "total_s": time.perf_counter() - started}
    result, plant = read_json(run / "evaluation.json"), read_json(run / "closed_loop.json")["totals"]
    for when, name in (("before", "base"), ("after", "trained")):
        likeliest = plant[f"{name}_greedy"]
        found |= {f"reward_{when}": result[when]["reward"], f"greedy_reward_{when}": result[f"{when}_greedy"]["reward"]}
        found |= {f"regret_{when}": plant[name]["regret_percent"], f"greedy_regret_{when}": likeliest["regret_percent"]}
        found |= {f"unserved_{when}": plant[name]["unserved_kwh"], f"greedy_unserved_{when}": likeliest["unserved_kwh"]}
        found |= {f"co2_{when}": plant[name]["co2_kg"], f"parse_rate_{when}": result[when]["parse_rate"]}
    exact = "exactly" if result["exact"] else f"{result['samples']} samples"
    return found | {"how": f"at temperature {result['temperature']:g}, {exact}"}


def bench_demo(options: argparse.Namespace) -> int:
    """Seeds 1 to 10, two side by side: held-out reward and plant before and after. Exit code 1 unless the plant gets better
    than the base model's on all of them, and than the best rule's on nine."""
    folder = Path(options.run)
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        seeds = list(pool.map(lambda seed: run_seed(folder / f"seed-{seed}", seed), range(1, 11)))
    plant = read_json(folder / "seed-1" / "closed_loop.json")
    result, totals = read_json(folder / "seed-1" / "evaluation.json"), plant["totals"]
    rule = min(RULES, key=lambda name: totals[name]["regret_percent"])
    made = []
    for name, other in (("base", "before"), ("rule", None)):
        for kind, note in (("", f"of ten seeds, {seeds[0]['how']}"), ("greedy_", "of ten seeds, the likeliest answer")):
            limits = [one[f"{kind}regret_before"] if other else totals[rule]["regret_percent"] for one in seeds]
            better = sum(one[f"{kind}regret_after"] < limit for one, limit in zip(seeds, limits, strict=True))
            made.append(figure(f"{kind}better_than_{name}", better, "seeds", note))
    failed = [one for one in made if one["value"] < NEEDED[one["name"].removeprefix("greedy_")]]
    made.append(figure("rule_regret", totals[rule]["regret_percent"], "%", f"the best rule, {rule}"))
    made.append(figure("windows", len(plant["windows"]), "windows", "of three held-out days"))
    made.append(figure("optimum_co2", totals["optimum"]["co2_kg"], "kg"))
    made += [figure(name, result[name], "reward", "held-out rows") for name in ("random", "constant", "oracle")]
    for one in seeds:
        made += [row | {"name": f"seed{one['seed']}_{row['name']}"} for row in tabled(SEED, one)]
    plot_seeds(folder, seeds, totals[rule]["regret_percent"], Path(options.figure))
    write(Path(options.out), made)
    return int(bool(failed))


def plot_seeds(folder: Path, seeds: list[dict[str, Any]], rule: float, path: Path) -> None:
    """Reward of the sampled completions over the steps, and regret of the plant at each evaluation, a line a seed."""
    matplotlib.use("Agg")
    plot, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), dpi=160)
    for one in seeds:
        steps = steps_of(folder / f"seed-{one['seed']}").set_index("step")
        steps.reward.rolling(20, min_periods=1).mean().plot(ax=left, color="#0b6e99", alpha=0.6, linewidth=1)
        regret = steps.plant_regret.dropna()
        regret.loc[0], regret.loc[steps.index[-1]] = one["regret_before"], one["regret_after"]
        regret.sort_index().plot(ax=right, color="#0b6e99", alpha=0.6, linewidth=1, marker=".", markersize=4)
    right.axhline(rule, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
    right.text(steps.index[-1], rule * 1.1, f"best rule {rule:.1f} %", ha="right", fontsize=8, color="#333333")
    left.set(title="Reward, ten seeds", xlabel="optimizer step", ylabel="mean of the step's rows")
    right.set(
        title="Plant's regret, held-out days", xlabel="optimizer step", ylabel="% above the optimum", yscale="log"
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    plot.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, metadata={"Software": None})
