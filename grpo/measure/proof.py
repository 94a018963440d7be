# SPDX-License-Identifier: Apache-2.0
"""The proof's run and the collection of its figures."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.measure.proof_data import Scale, Vocabulary
from grpo.measure.record import figure, steps_of, write
from grpo.model.gptoss_format import ModelError
from grpo.model.load import load_model
from grpo.settings import ROOT
from rewards import bootstrap_interval

REFERENCES = ("random", "best_constant", "oracle")


def read_back(
    directory: Path,
    rows: Sequence[tuple],
    encoded: Sequence[np.ndarray],
    vocabulary: Vocabulary,
    device: str,
    limit: int = 120,
) -> dict[str, float]:
    """Load the checkpoint as train_grpo.py does (BF16, eager attention) and measure it on some probe rows.

    Returns reward, greedy, parse_rate as `figures` does, over the whole vocabulary; and for the first 256 tokens of
    four prompts: mean negative log-prob, mean difference to float32, mean effect of a random change of q, k, v and o
    by 0.3 of their norm (what the parity gate's test adapter does), all in nats.
    """

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model = load_model(str(directory), config, "eager").to(device).eval()
    answer = [vocabulary.ids[n] for n in vocabulary.answer]
    fixed, place_, actions = vocabulary.fixed, vocabulary.place, [vocabulary.ids[n] for n in vocabulary.actions]
    every = max(1, len(rows) // limit)
    picked = list(range(0, len(rows), every))[:limit]
    p = []

    def score(ids: Sequence[int], last: int) -> torch.Tensor:
        hidden = model.model(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state
        return model.lm_head(hidden[:, -last - 1 : -1]).float().log_softmax(-1)[0]

    with torch.no_grad():
        for n in picked:
            logp = score(encoded[n].tolist(), len(answer))
            around = logp[fixed, torch.tensor(answer, device=device)[fixed]].sum()
            p.append((logp[place_, actions] + around).exp().cpu())
        texts = [row[:256].tolist() for row in encoded[:4]]

        def text() -> torch.Tensor:
            scored = [
                score(row, len(row) - 1).gather(-1, torch.tensor(row[1:], device=device)[:, None]) for row in texts
            ]
            return torch.cat(scored)[:, 0].cpu()

        plain = text()
        generator = torch.Generator().manual_seed(0)
        kept = {}
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                weight = getattr(layer.self_attn, name).weight
                kept[weight] = weight.clone()
                rank = 16
                a, b = (torch.randn(size, rank, generator=generator) for size in weight.shape)
                update = (a @ b.T).to(weight.device)
                weight += (update * (0.3 * weight.float().norm() / update.norm())).to(weight.dtype)
        changed = text()
        model.float()
        exact = text()  # rounding with the adapter on, as the gate sees it
    found = torch.stack(p)
    rewards = torch.tensor([rows[n][1] for n in picked])
    return {
        "parse_rate": found.sum(-1).mean().item(),
        "reward": (found * rewards).sum(-1).mean().item(),
        "greedy": rewards.gather(1, found.argmax(-1, keepdim=True)).mean().item(),
        "text_nll": -plain.mean().item(),
        "rounding_nats": (changed - exact).abs().mean().item(),
        "adapter_nats": (changed - plain).abs().mean().item(),
    }


def run_settings(options: argparse.Namespace, scale: Scale) -> dict[str, str]:
    """The settings of train_grpo.py; those given with --set win. An interrupted run goes on unless its model changed."""
    return {
        "MODEL_ID": str(options.out / "model"),
        "DATA": str(options.out / "data" / "tes_train.csv"),
        "EVAL_DATA": str(options.out / "data" / "tes_heldout.csv"),
        "EVAL_PROFILE": str(options.out / "data" / "profile_heldout.csv"),
        "OUTPUT_DIR": str(options.out / "run"),
        **scale.settings,
        **({"OVERWRITE": "1"} if options.force or stale(options.out) else {}),
        **dict(options.set),
    }


def stale(out: Path) -> bool:
    """Whether the run in OUT/run began with another model than the one that is in OUT/model now."""
    run, model = out / "run" / "settings.json", out / "model" / "warmup.json"
    return run.is_file() and model.is_file() and run.stat().st_mtime < model.stat().st_mtime


def command_line(settings: Mapping[str, str]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), "python train_grpo.py"])


def train(options: argparse.Namespace, scale: Scale, log: Callable[[str], None]) -> int:
    """Run train_grpo.py on OUT/model; its exit code. The command is kept in OUT/command.txt."""
    if not (options.out / "model" / "config.json").is_file():
        raise ModelError(f"{options.out / 'model'} is missing: run --stage make first")
    settings = run_settings(options, scale)
    command = command_line(settings)
    (options.out / "command.txt").write_text(command + "\n", encoding="utf-8")
    log(command)
    started = time.perf_counter()
    code = subprocess.run([sys.executable, str(ROOT / "train_grpo.py")], env=os.environ | settings).returncode
    (options.out / "train_seconds.txt").write_text(f"{time.perf_counter() - started:.1f}\n", encoding="utf-8")
    log(f"train_grpo.py ended with exit code {code} after {time.perf_counter() - started:.0f} s")
    return code


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def reward_figures(found: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """(figures of evaluation.json, whether held-out reward improved beyond its interval)."""
    made = [figure(f"heldout_{name}", found[name], "reward") for name in ("random", "constant", "oracle")]
    for when in ("before", "after"):
        for name, unit in (
            ("reward", "reward"), ("reward_low", "reward"), ("reward_high", "reward"), ("regret", "reward"),
            ("parse_rate", "share"), ("best_action_rate", "share"),
        ):  # fmt: skip
            if name in found[when]:
                note = "95% interval, bootstrap over prompts" if name.endswith(("low", "high")) else ""
                made.append(figure(f"{name}_{when}", found[when][name], unit, note))
    gain = found.get("difference", {})
    for name in ("reward", "reward_low", "reward_high"):
        if name in gain:
            made.append(figure(f"{name}_gain", gain[name], "reward", "after minus before, paired by prompt"))
    return made, bool(gain) and gain["reward_low"] > 0


def plant_figures(found: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """(figures of closed_loop.json, whether CO2 fell beyond its interval).

    A policy could save CO2 by leaving load unserved or the storage empty, so what counts is `priced_kg`
    (docs/evaluation.md), per window, base minus trained, with a paired bootstrap over windows.
    """
    made = []
    for name, total in found["totals"].items():
        made.append(figure(f"co2_kg_{name}", total["co2_kg"], "kg", "all held-out windows"))
        made.append(figure(f"unserved_kwh_{name}", total["unserved_kwh"], "kWh"))
        if total.get("regret_percent") is not None:
            low, high = total.get("regret_percent_low"), total.get("regret_percent_high")
            note = "" if low is None or high is None else f"95% interval {low:.2f} to {high:.2f}"
            made.append(figure(f"regret_percent_{name}", total["regret_percent"], "%", note))
    better = False
    for key, note in (("co2_kg", "emissions alone"), ("priced_kg", "and unserved load and storage at their price")):
        pairs = [[window["policies"][name]["mean"][key] for name in ("base", "trained")] for window in found["windows"]]
        saved = [before - after for before, after in pairs]
        mean, (low, high) = math.fsum(saved) / len(saved), bootstrap_interval(saved)
        better = low > 0  # the last one decides
        made += [
            figure(f"{key}_saved", mean, "kg/window", f"base minus trained, {note}"),
            figure(f"{key}_saved_low", low, "kg/window", "95%, paired bootstrap over windows"),
            figure(f"{key}_saved_high", high, "kg/window", "95%, paired bootstrap over windows"),
        ]
    return made, better


def collect(options: argparse.Namespace, log: Callable[[str], None]) -> int:
    """Write the figures as JSON, copy the report; 0 if reward and closed loop improved, 1 if not."""
    run, warmup = options.out / "run", read_json(options.out / "model" / "warmup.json")
    evaluation, plant = read_json(run / "evaluation.json"), read_json(run / "closed_loop.json")
    if "before" not in evaluation or "after" not in evaluation:
        raise ModelError(f"{run / 'evaluation.json'} has no result before and after: run --stage train first")
    made, learned = reward_figures(evaluation)
    verdicts = {"held-out reward": learned}
    if {"base", "trained"} <= plant.get("totals", {}).keys():
        more, controlled = plant_figures(plant)
        made += more
        verdicts["closed loop"] = controlled
    else:
        log(f"NOTE: {run / 'closed_loop.json'} holds no base and trained model: closed loop not collected")
        verdicts["closed loop"] = False
    if warmup:
        made.append(figure("besides_embeddings", warmup["besides_embeddings"], "parameters"))
        made.append(figure("make_s", warmup["seconds"], "s", "data, warm-up, checkpoint"))
        for name, text in (
            ("read", "end of phase 1"), ("rounded", "right after rounding the experts to MXFP4"),
            ("stored", "end of phase 2, as stored"),
        ):  # fmt: skip
            note = f"warm-up, expected when sampling, rows of its own, {text}"
            made.append(figure(f"warmup_reward_{name}", warmup["stages"][name]["reward"], "reward", note))
        made.append(figure("warmup_parse_rate", warmup["stages"]["stored"]["parse_rate"], "share"))
        made.append(figure("warmup_reward_loaded", warmup["loaded"]["reward"], "reward", "some of these rows"))
    seconds = options.out / "train_seconds.txt"
    if seconds.is_file():
        made.append(figure("train_s", float(seconds.read_text()), "s", "train_grpo.py from start to zip"))
    metrics = run / "metrics.csv"
    if metrics.is_file():
        steps = [row for row in steps_of(run) if row.get("reward")]
        for name, part in (("first", steps[:5]), ("last", steps[-5:])):
            mean = math.fsum(float(row["reward"]) for row in part) / len(part)
            made.append(figure(f"train_reward_{name}5", mean, "reward", f"mean of the {name} 5 steps' rollouts"))
        later = [float(row["step_s"]) for row in steps[1:] if row.get("step_s")]
        if later:
            made.append(figure("step_s", sum(later) / len(later), "s", "mean, without the first step"))
        made.append(figure("steps", len(steps), "steps"))
    record = options.out / "command.txt"
    command = record.read_text(encoding="utf-8").strip() if record.is_file() else "python scripts/prove.py"
    command = command.replace(str(options.out.resolve()), "OUT")  # where it lay on this machine says nothing
    how = f"python scripts/prove.py --scale {options.scale} --out OUT, which ran: {command}"
    write(options.results, made, how)
    report = run / "report.html"
    if report.is_file():
        shutil.copyfile(report, options.results.with_name(options.report_name))
    else:
        log(f"NOTE: {report} is missing, so no report was copied")
    for name, passed in verdicts.items():
        log(f"{'PASS' if passed else 'FAIL'}: {name} {'improved' if passed else 'did not improve'} beyond its interval")
    return 0 if all(verdicts.values()) else 1
