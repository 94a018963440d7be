# SPDX-License-Identifier: Apache-2.0
"""The demo on several seeds, judged on windows that were fixed before any setting of it was chosen.

`selection` picks best/ and the settings, and is never reported. `shown` are the windows of data/profile_heldout.csv
that a user sees. `others` are further days of the same synthetic weather. `varied` are days whose loads are multiplied
by a factor of their own, log-uniform from a half to double, as another season or building would have them. The policy
to beat on the reported sets is the rule `charge_when_clean`.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpo.common import ROOT
from grpo.output.layout import BEST
from grpo.process.child import forwarding_signals, run_child
from grpo.tasks.simulator import GREEDY
from grpo.tasks.tes.dataset import DATA_DIR, synthetic_windows, vary_loads
from grpo.tasks.tes.plant import HOURS
from grpo.tasks.tes.profiles import HELDOUT_START, Profile, profile_csv, synthetic_profile
from grpo.tasks.tes.record import add_totals
from grpo.tasks.tes.simulator import unserved_text
from scripts.dev.record import TRAIN_SCRIPT, Figure, Json, figure, read_json, reward_figures, steps_of, write

RULE = "charge_when_clean"
REPORTED = ("shown", "others", "varied")
SEED = 1
# Random streams beyond those of the data files and short hours (dataset.py), so that no day is shared with them.
STREAMS = {"selection": 4, "others": 5, "varied": 6}
COUNTS = {"selection": 10, "others": 20, "varied": 20}
MOST_FACTOR = 2.0  # Largest factor of a varied day's load; the smallest is its reciprocal.
EVALUATE = ROOT / "scripts" / "evaluate.py"
ADAPTERS = {"last": "", "best": BEST}  # adapter -> its folder in OUTPUT_DIR
KINDS = {"": "at the evaluation's temperature", GREEDY: "the likeliest answer"}
SEED_ENDINGS = ("_before", "_after", "_gain", "_greedy")  # of names of reward figures that differ between seeds


@dataclass(frozen=True)
class SeedResult:
    """A seed's run. `totals` holds the totals of closed_loop.json by set of windows and by policy: the rules, the
    optimum, `last` and `best` for the adapters, for seed 1 `base` as well, and their greedy answers. `windows` is the
    number of windows in each set."""

    run: Path
    seconds: float
    totals: dict[str, dict[str, Json]]
    windows: dict[str, int]


def profile_text(name: str) -> str:
    """The hourly profile of a set of windows, as CSV text: four days a window, one window a week from HELDOUT_START.

    Raises KeyError for a set that is not known."""
    if name == "shown":
        return (DATA_DIR / "profile_heldout.csv").read_text(encoding="utf-8")
    stream = STREAMS[name]
    blocks = []
    for number, (window, generator) in enumerate(synthetic_windows(SEED, stream, COUNTS[name], HELDOUT_START)):
        block = synthetic_profile((SEED, stream, number), len(window.dates), window.dates[0])
        if name == "varied":
            load_kw = block.load_kw.copy()
            load_kw[:, HOURS[0] : HOURS[-1] + 1] = vary_loads(window, generator, MOST_FACTOR).load_kw
            block = Profile(block.dates, block.co2, load_kw)
        blocks.append(block)
    return profile_csv(blocks)


def write_profiles(folder: Path) -> dict[str, Path]:
    """Writes the windows and returns the file of each set; a window's name begins with its stem."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.csv" for name in ("selection", *REPORTED)}
    for name, path in paths.items():
        path.write_text(profile_text(name), encoding="utf-8")
    return paths


def totals_by_set(record: Json) -> tuple[dict[str, dict[str, Json]], dict[str, int]]:
    """closed_loop.json's totals for each reported set of windows alone, and how many windows the set has."""
    totals, windows = {}, {}
    for name in REPORTED:
        of_set: Json = {"windows": [entry for entry in record["windows"] if entry["name"].startswith(f"{name}: ")]}
        add_totals(of_set)
        totals[name], windows[name] = of_set["totals"], len(of_set["windows"])
    return totals, windows


def run_seed(options: argparse.Namespace, profiles: Mapping[str, Path], seed: int) -> SeedResult:
    """Trains with `seed` and the demo's settings, as demo.sh has them but for the windows that choose best/, and lets
    both adapters control the plant through the reported windows."""
    run = Path(options.run) / f"seed-{seed}"
    settings = {"MODEL_ID": "tiny", "SEED": str(seed), "OUTPUT_DIR": str(run), "OVERWRITE": "1"}
    settings |= {"EXPECTED_REWARD": "1", "EVAL_PROFILE": str(profiles["selection"])}
    started = time.perf_counter()
    with run.with_name(f"{run.name}.log").open("w") as log:

        def start(command: Sequence[str | Path], environ: Mapping[str, str]) -> None:
            if code := run_child(command, {"OMP_NUM_THREADS": "1", **environ}, log):
                raise RuntimeError(f"exit code {code}: {log.name} says why")

        start([sys.executable, TRAIN_SCRIPT], settings | dict(options.set))
        seconds = time.perf_counter() - started
        totals: dict[str, dict[str, Json]] = {name: {} for name in REPORTED}
        for adapter, folder in ADAPTERS.items():
            path = run.with_name(f"{run.name}-{adapter}.json")
            path.unlink(missing_ok=True)  # An earlier measurement's file must not be read.
            command: list[str | Path] = [sys.executable, EVALUATE, run / folder, "--out", path, "--profile"]
            command += [profiles[name] for name in REPORTED]
            # The base model is measured once, as it is the same for all seeds.
            start([*command, *(["--base-too"] if (seed, adapter) == (1, "last") else [])], {})
            by_set, windows = totals_by_set(read_json(path))
            for name, policies in by_set.items():
                totals[name] |= {policy.replace("trained", adapter): total for policy, total in policies.items()}
    return SeedResult(run, seconds, totals, windows)


def set_figures(seed: SeedResult, policy: str, prefix: str = "") -> list[Figure]:
    """Regret of a policy and the load that it leaves unserved, for each set of windows."""
    figures = []
    for name in REPORTED:
        total, windows = seed.totals[name][policy], seed.windows[name]
        figures.append(figure(f"{prefix}{policy}_{name}_regret", total["regret_percent"], "%", f"{windows} windows"))
        unserved = f"{prefix}{policy}_{name}_unserved_kwh"
        figures.append(figure(unserved, total["unserved_kwh"], "kWh", unserved_text(total, windows)))
    return figures


def below_rule(seeds: Sequence[SeedResult], policy: str) -> int:
    """The number of pairs of a seed and a set on which the regret of a policy is below the rule's."""
    pairs = [(seed.totals[name][policy], seed.totals[name][RULE]) for seed in seeds for name in REPORTED]
    return sum(total["regret_percent"] < rule["regret_percent"] for total, rule in pairs)


def bench_demo(options: argparse.Namespace) -> int:
    """Measures seeds 1 to `options.seeds`, `options.jobs` side by side: held-out reward before and after, and the plant
    by the last and the best adapter. Returns 1 unless the best adapters, at the evaluation's temperature, are below
    the rule on all seeds and sets."""
    profiles = write_profiles(Path(options.run) / "profiles")
    with forwarding_signals(), ThreadPoolExecutor(options.jobs) as pool:
        seeds = list(pool.map(partial(run_seed, options, profiles), range(1, options.seeds + 1)))
    figures, count = [], len(seeds) * len(REPORTED)
    for adapter in ADAPTERS:
        for kind, how in KINDS.items():
            note = f"of {count} seeds x sets below {RULE}, {how}"
            figures.append(figure(f"{adapter}{kind}_below_rule", below_rule(seeds, adapter + kind), "counts", note))
    for policy in (RULE, *(f"base{kind}" for kind in KINDS)):
        figures += set_figures(seeds[0], policy)
    for number, seed in enumerate(seeds, 1):
        prefix = f"seed{number}_"
        rewards = reward_figures(read_json(seed.run / "evaluation.json"))
        rewards = [row for row in rewards if number == 1 or row["name"].endswith(SEED_ENDINGS)]
        figures += [figure(prefix + row["name"], row["value"], row["unit"], row["note"]) for row in rewards]
        for adapter in ADAPTERS:
            for kind in KINDS:
                figures += set_figures(seed, adapter + kind, prefix)
        note = f"process start to zip, {options.jobs} seeds side by side"
        figures.append(figure(f"{prefix}total_s", seed.seconds, "s", note))
    # The JSON is written before the picture, which changes the working tree whose commit the JSON names.
    write(Path(options.out), figures)
    if options.figure:
        plot_seeds(seeds, Path(options.figure))
    return int(below_rule(seeds, "best") < count)


def plot_seeds(seeds: Sequence[SeedResult], path: Path) -> None:
    """Reward over the steps, a line a seed, and regret of the plant by set of windows and adapter, a dot a seed."""
    from matplotlib.figure import Figure as Drawing  # Imported here: a GPU machine measures without a picture.

    drawing = Drawing(figsize=(9, 3.6), dpi=160)
    left, right = drawing.subplots(1, 2)
    for seed in seeds:
        reward = steps_of(seed.run).set_index("step").reward.rolling(20, min_periods=1).mean()
        left.plot(reward, color="#0b6e99", alpha=0.6, linewidth=1)
    labels: list[str] = []
    for name in REPORTED:
        first = len(labels)
        for policy in ("base", *ADAPTERS):
            regrets = [seed.totals[name][policy]["regret_percent"] for seed in seeds if policy in seed.totals[name]]
            right.plot([len(labels)] * len(regrets), regrets, "o", color="#0b6e99", alpha=0.6, markersize=4)
            labels.append(f"{policy}\n{name}" if policy == "last" else policy)
        limit = seeds[0].totals[name][RULE]["regret_percent"]
        right.hlines(limit, first - 0.4, first + 2.4, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
        right.text(first + 2.4, limit * 1.1, f"rule {limit:.1f} %", ha="right", fontsize=8, color="#333333")
    left.set(title=f"Reward, {len(seeds)} seeds", xlabel="optimizer step", ylabel="mean of the step's rows")
    right.set(title="Plant's regret by set of windows", ylabel="% above the optimum")
    right.set_xticks(range(len(labels)), labels, fontsize=8)
    right.set_yscale("log")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Software": None})
