# SPDX-License-Identifier: Apache-2.0
"""The proof's run and the collection of its figures."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from grpo.measure.outcome import outcome_figures
from grpo.measure.proof_data import Scale
from grpo.measure.proof_model import make
from grpo.measure.record import SCRIPT, figure, read_json, steps_of, tabled, write
from grpo.model.gptoss_format import ModelError
from grpo.model.warmup import Log
from rewards import confidence_interval

OTHERS = """
besides_embeddings | parameters |
make_s | s | data, warm-up, checkpoint
warmup_reward_read | reward | warm-up, expected when sampling, rows of its own, end of phase 1
warmup_reward_rounded | reward | the same, right after rounding the experts to MXFP4
warmup_reward_stored | reward | the same, end of phase 2, as stored
warmup_parse_rate | share |
warmup_reward_loaded | reward | some of these rows
train_s | s | train_grpo.py from start to zip
train_reward_first5 train_reward_last5 | reward | mean of the first or the last 5 steps' rollouts
step_s | s | mean, without the first step
steps | steps |
"""


def run_settings(options: argparse.Namespace, scale: Scale) -> dict[str, str]:
    """The settings of train_grpo.py; those of --set win. An interrupted run continues unless its model changed."""
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
    """Whether the run in OUT/run began with another model than OUT/model."""
    run, model = out / "run" / "settings.json", out / "model" / "warmup.json"
    return run.is_file() and model.is_file() and run.stat().st_mtime < model.stat().st_mtime


def train(options: argparse.Namespace, scale: Scale, log: Log) -> int:
    """Run train_grpo.py on OUT/model; its exit code. The command is kept in OUT/command.txt."""
    if not (options.out / "model" / "config.json").is_file():
        raise ModelError(f"{options.out / 'model'} is missing: run --stage make first")
    settings = run_settings(options, scale)
    command = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), "python train_grpo.py"])
    (options.out / "command.txt").write_text(command + "\n", encoding="utf-8")
    log(command)
    started = time.perf_counter()
    code = subprocess.run([sys.executable, str(SCRIPT)], env=os.environ | settings).returncode
    seconds = time.perf_counter() - started
    (options.out / "train_seconds.txt").write_text(f"{seconds:.1f}\n", encoding="utf-8")
    log(f"train_grpo.py ended with exit code {code} after {seconds:.0f} s")
    return code


def saved_figures(plant: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """(what the trained model saves in the closed loop, whether that is more than its interval).

    A policy could save CO2 by leaving load unserved or the storage empty, so what counts is `priced_kg`
    (docs/evaluation.md), per window, base minus trained, in pairs over windows.
    """
    figures, low = [], 0.0
    for key, note in (("co2_kg", "emissions alone"), ("priced_kg", "and unserved load and storage at their price")):
        policies = [window["policies"] for window in plant["windows"]]
        saved = [policy["base"]["mean"][key] - policy["trained"]["mean"][key] for policy in policies]
        low, high = confidence_interval(saved)
        mean = math.fsum(saved) / len(saved)
        figures.append(figure(f"{key}_saved", mean, "kg/window", f"base minus trained, {note}"))
        for end, value in (("low", low), ("high", high)):
            figures.append(figure(f"{key}_saved_{end}", value, "kg/window", "95%, in pairs over windows"))
    return figures, low > 0  # of `priced_kg`, the last one


def other_figures(out: Path) -> list[dict[str, Any]]:
    """Figures of the warm-up and of the run's own files, as far as they are there."""
    values, record, seconds = {}, read_json(out / "model" / "warmup.json"), out / "train_seconds.txt"
    if record:
        values |= {f"warmup_reward_{name}": stage["reward"] for name, stage in record["stages"].items()}
        values |= {"besides_embeddings": record["besides_embeddings"], "make_s": record["seconds"]}
        values["warmup_parse_rate"] = record["stages"]["stored"]["parse_rate"]
        values["warmup_reward_loaded"] = record["loaded"]["reward"]
    if seconds.is_file():
        values["train_s"] = float(seconds.read_text())
    if (out / "run" / "metrics.csv").is_file():
        steps = steps_of(out / "run").dropna(subset=["reward"])
        values |= {"train_reward_first5": steps.reward[:5].mean(), "train_reward_last5": steps.reward[-5:].mean()}
        values |= {"step_s": steps.step_s[1:].mean(), "steps": len(steps)}
    return tabled(OTHERS, values)


def collect(options: argparse.Namespace, log: Log) -> int:
    """Writes the figures as JSON, copies the report; returns 0 if reward and closed loop improved, else 1."""
    run = options.out / "run"
    evaluation, plant = read_json(run / "evaluation.json"), read_json(run / "closed_loop.json")
    if "before" not in evaluation or "after" not in evaluation:
        raise ModelError(f"{run / 'evaluation.json'} has no result before and after: run --stage train first")
    figures, gain = outcome_figures(run), evaluation.get("difference", {}).get("reward_low", 0)
    verdicts = {"held-out reward": gain > 0, "closed loop": False}
    if {"base", "trained"} <= plant.get("totals", {}).keys():
        saved, verdicts["closed loop"] = saved_figures(plant)
        figures += saved
    else:
        log(f"NOTE: {run / 'closed_loop.json'} holds no base and trained model: closed loop not collected")
    record = options.out / "command.txt"
    command = record.read_text(encoding="utf-8").strip() if record.is_file() else "python scripts/prove.py"
    folder = command.partition("MODEL_ID=")[2].partition("/model ")[0]  # Where it lay says nothing.
    command = command.replace(f"={folder}/", "=OUT/")
    # The figures may be collected anywhere: machine and versions are those of the run.
    facts = read_json(run / "settings.json").get("machine", {})
    words = "{gpu}, {gpu_total:.0f} GiB; {cores} cores {arch}" if facts.get("gpus") else "no GPU; {cores} cores {arch}"
    more = {"machine": words.format(**facts), "versions": read_json(run / "versions.json")} if facts else {}
    shown = f"python scripts/prove.py --scale {options.scale} --out OUT, which ran: {command}"
    write(options.results, figures + other_figures(options.out), shown, **more)
    report = run / "report.html"
    if report.is_file():
        shutil.copyfile(report, options.results.with_name(options.report_name))
    else:
        log(f"NOTE: {report} is missing, so no report was copied")
    for name, passed in verdicts.items():
        log(f"{'PASS' if passed else 'FAIL'}: {name} {'improved' if passed else 'did not improve'} beyond its interval")
    return 0 if all(verdicts.values()) else 1


def prove(options: argparse.Namespace, scale: Scale) -> int:
    """Runs the wanted stages that are not complete; returns the exit code."""
    started = time.perf_counter()
    log: Log = partial(print, flush=True)

    def is_wanted(stage: str, complete: bool) -> bool:
        return options.stage in (stage, "all") and (options.force or not complete)

    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if is_wanted("make", (options.out / "model" / "warmup.json").is_file()):
            make(options, scale, log)
        trained = "after" in read_json(options.out / "run" / "evaluation.json") and not stale(options.out)
        if is_wanted("train", trained) and (code := train(options, scale, log)):
            return code
        return collect(options, log) if options.stage in ("collect", "all") else 0
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        log(f"{time.perf_counter() - started:.0f} s in all")
