#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the project on the machine it runs on, and write the figures as JSON.

    python scripts/bench.py demo --out docs/results/demo-cpu.json --figure docs/demo.png
    python scripts/bench.py main --model checkpoints/full --data 'days/*.csv' --out docs/results/main-h100.json

`demo` runs train_grpo.py on the tiny model for seeds 1 to 3 and records held-out reward before and after training.

`main` runs train_grpo.py's own `main()` in this process (so that every weight can be compared before and after) for a
few steps of 4 prompts x 4 completions x 128 tokens, and records time per phase, peak memory, how many adapter tensors
moved and how many elements of the base weights changed (0, or the run is broken and the exit code is 1).

The JSON holds `command, machine, date, versions, commit, figures: [{name, value, unit, note}]`.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# ---- What every measurement says about itself ------------------------------------------------------------------------


def commit() -> str:
    """The commit that is measured; `-dirty` where the tree differs from it. BENCH_COMMIT names it outside a checkout."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("-dirty" if changed.strip() else "")


def machine() -> str:
    """Processor, memory and GPU in words."""
    import torch

    gpu = "no GPU"
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        gpu = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    return f"{gpu}; {os.cpu_count()} cores {platform.machine()}; Python {platform.python_version()}"


def write(path: Path, figures: list[dict[str, Any]], command: str | None = None) -> None:
    """The measurement as JSON, in the form of all files under docs/results/."""
    versions = {}
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "liger-kernel", "triton", "vllm"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    record = {
        "command": command or " ".join(["python", "scripts/bench.py", *sys.argv[1:]]),
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "commit": commit(),
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for one in figures:
        print(f"{one['name']:<28} {one['value']:>14,.6g} {one['unit']:<10} {one['note']}")
    print(f"written: {path}")


def figure(name: str, value: float, unit: str, note: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "note": note}


# ---- demo: the tiny model on three seeds -----------------------------------------------------------------------------


def bench_demo(options: argparse.Namespace) -> int:
    """Held-out reward before and after training on the tiny model, three seeds; exit code 1 unless each seed gains."""
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
    figures += [figure(name, runs[0][1][name], "reward", "held-out rows") for name in ("random", "constant", "oracle")]
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
        with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rewards = [float(row["reward"]) for row in csv.DictReader(file)]
        smooth = [
            sum(rewards[max(0, i - 9) : i + 1]) / len(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))
        ]
        steps = range(1, len(rewards) + 1)
        axes.plot(steps, rewards, color=colour, alpha=0.18, linewidth=0.8)
        label = f"{run.name.replace('-', ' ')}: held-out {result['before']['reward']:.2f} to {result['after']['reward']:.2f}"
        axes.plot(steps, smooth, color=colour, linewidth=1.8, label=label)
    last = len(rewards)
    for name, text in (("oracle", "oracle"), ("constant", "best constant action"), ("random", "random action")):
        value = runs[0][1][name]
        axes.axhline(value, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(last * 1.01, value, f"{text} {value:.2f}", va="center", fontsize=8, color="#333333")
    axes.set(xlabel="optimizer step", ylabel="mean reward", xlim=(1, last), ylim=(0.2, 0.85))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.1), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    plot.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, metadata={"Software": None})


# ---- main: the whole path, weights compared before and after ---------------------------------------------------------


def noise(completions: list[str], **columns: Any) -> list[float]:
    """A reward of 0 to 1 by the completion's hash: random weights never answer, and equal rewards would move nothing."""
    return [int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF for text in completions]


def bench_main(options: argparse.Namespace) -> int:
    import train_grpo

    run = Path(options.run).absolute()
    settings = {
        "MODEL_ID": str(options.model), "DATA": options.data, "USE_VLLM": "0", "PROMPTS_PER_STEP": "4",
        "NUM_GENERATIONS": "4", "MAX_COMPLETION_LEN": "128", "TOTAL_STEPS": str(options.steps), "SAVE_STEPS": "1",
        "SAVE_TOTAL_LIMIT": "99", "OUTPUT_DIR": str(run), "OVERWRITE": "1", "ATTN_IMPL": options.attention,
        "MICRO_BATCH": str(options.micro_batch), "REWARDS": options.rewards,
    }  # fmt: skip
    os.environ.update(settings)
    loaded: dict[str, Any] = {}
    load_model = train_grpo.load_model

    def load_and_keep(*arguments: Any) -> Any:
        started = time.perf_counter()
        model = load_model(*arguments)
        loaded["load_s"] = time.perf_counter() - started
        loaded["model"] = model
        loaded["parameters"] = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters()]
        return model

    train_grpo.load_model = load_and_keep
    started = time.perf_counter()
    code = train_grpo.main([])
    if code:
        return code
    total = time.perf_counter() - started

    import torch
    from safetensors.torch import load_file

    # By identity, not by name: PEFT renames the modules that it wraps.
    changed = 0
    for parameter, before in loaded["parameters"]:
        now, then = (t.contiguous().view(torch.uint8) for t in (parameter.detach(), before.to(parameter.device)))
        changed += int((now != then).view(-1, parameter.element_size()).any(dim=1).sum())
    elements = sum(p.numel() for p, _ in loaded["parameters"])
    first = load_file(run / "checkpoint-1" / "adapter_model.safetensors")
    last = load_file(run / "adapter_model.safetensors")
    moved = sum(bool((last[name] != first[name]).any()) for name in last)
    trained = sum(bool(last[name].any()) for name in last if "lora_B" in name)
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        steps = list(csv.DictReader(file))
    plan = json.loads((run / "settings.json").read_text(encoding="utf-8"))["choices"]["plan"]
    later = steps[1:] or steps  # the first step pays for compilation and caches

    def mean(name: str) -> float:
        return sum(float(step[name]) for step in later) / len(later)

    figures = [
        figure("load_s", loaded["load_s"], "s", "checkpoint to a dequantized BF16 model on the GPU"),
        figure("first_step_s", float(steps[0]["step_s"]), "s", "compilation and allocation included"),
        *(figure(name, mean(name), "s", f"mean of steps 2 to {len(steps)}") for name in ("step_s", "rollout_s", "reward_s", "learn_s")),
        figure("rollout_tokens_per_s", mean("rollout_tokens_per_s"), "tokens/s", "transformers' generate, 16 sequences"),
        figure("total_s", total, "s", "the whole run, loading and saving included"),
        figure("gpu_peak_gib", max(float(step["gpu_peak_gib"] or 0) for step in steps), "GiB", "allocated, any step"),
        figure("planned_peak_gib", sum(plan[k] for k in ("weights", "adapter")) + max(plan["generation"], plan["learning"]), "GiB", "what --check predicts"),
        figure("base_elements", elements, "", "elements of the base weights that were compared"),
        figure("base_changed_elements", changed, "", "bit for bit, against a copy made right after loading"),
        figure("adapter_tensors", len(last), ""),
        figure("adapter_moved_tensors", moved, "", "differ between the first checkpoint and the end"),
        figure("adapter_nonzero_lora_b", trained, "", "lora_B starts at 0"),
        figure("completed_steps", len(steps), "steps"),
        figure("reward_std", mean("reward_std"), "reward", "the bench rewards noise: advantages were not all 0"),
    ]  # fmt: skip
    environment = " ".join(f"{k}={v}" for k, v in settings.items() if k not in ("MODEL_ID", "DATA", "OUTPUT_DIR"))
    write(Path(options.out), figures, f"python scripts/bench.py main --attention {options.attention}  # {environment}")
    return int(changed != 0 or moved == 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("main", help="the whole path for a few steps")
    one.add_argument("--model", required=True, help="checkpoint folder or Hub id")
    one.add_argument("--data", required=True, help="training CSVs")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--run", default="runs/bench", help="OUTPUT_DIR of the run; deleted first")
    one.add_argument("--steps", type=int, default=4)
    one.add_argument("--attention", default="auto")
    one.add_argument("--micro-batch", type=int, default=4)
    one.add_argument("--rewards", default="action,bench:noise")
    one = commands.add_parser("demo", help="the tiny model on three seeds, on the CPU")
    one.add_argument("--out", required=True, help="JSON to write")
    one.add_argument("--figure", required=True, help="PNG to write")
    one.add_argument("--run", default="runs/bench-demo", help="folder of the three runs; deleted first")
    options = parser.parse_args()
    return {"main": bench_main, "demo": bench_demo}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
