# SPDX-License-Identifier: Apache-2.0
"""The proof: its data and model, its run, and the collection of its figures."""

import argparse
import itertools
import math
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from grpo.common import ROOT, InputError
from grpo.evaluate.ask import prepare
from grpo.evaluate.models import start_model
from grpo.figures.statistics import confidence_interval
from grpo.harmony import ANSWER_BEFORE
from grpo.model import write_checkpoint as checkpoint
from grpo.model.load import load_model
from grpo.output.folder import complete_steps
from grpo.plan.hub import TINY_PATH, count_parameters
from grpo.plan.machine import read_machine
from grpo.process.child import run_child
from grpo.settings.parsing import parse_value
from grpo.tasks.tes.dataset import file_name
from grpo.tasks.tes.record import add_totals
from scripts.dev import gptoss_format as gptoss
from scripts.dev import record
from scripts.dev.proof_data import OTHER_PROFILE, Scale, write_data
from scripts.dev.record import Figure, figure, read_json
from scripts.dev.warmup import Log, figures, write_warmed_up
from scripts.dev.warmup_rows import ACTIONS

RUN_FIGURES = """
besides_embeddings | parameters |
make_s | s | data, warm-up, checkpoint
warmup_reward_read | reward | warm-up, expected when sampling, on rows it was not trained on, end of phase 1
warmup_reward_rounded | reward | the same, right after rounding the experts to MXFP4
warmup_reward_stored | reward | the same, end of phase 2, as stored
warmup_parse_rate | share |
warmup_reward_loaded | reward | the stored checkpoint, on some of these rows
train_s | s | train_grpo.py from start to zip
train_reward_first5 train_reward_last5 | reward | mean of the first or the last 5 steps' rollouts
step_s | s | mean, without the first step
steps | steps |
"""
CHAIN_FIGURES = """
plan_best_base plan_best_trained | share | of held-out chains
reward_chain_base_answer_base reward_chain_trained_answer_base | reward | expected, the base model's answers
reward_chain_base_answer_trained reward_chain_trained_answer_trained | reward | expected, the trained model's answers
"""
# In OUT: the run's command and seconds, what its chains are worth, and the closed loop of best/ on other days.
TRAIN, CHAINS, OTHER = "train.json", "chains.json", "other.json"


def make(options: argparse.Namespace, scale: Scale, log: Log) -> None:
    """Writes OUT/data and OUT/model with the warm-up's figures. Raises InputError where the tokenizer is missing."""
    started, model_dir, recipe = time.perf_counter(), options.out / "model", scale.recipe
    if options.tokenizer is None and recipe.prompt == "full":
        raise InputError("full prompts need --tokenizer DIR with tokenizer.json (o200k with Harmony's tokens)")
    write_data(options.out / "data", scale)
    tokenizer = gptoss.read_tokenizer(options.tokenizer or TINY_PATH)
    vocabulary = gptoss.GPT_OSS_20B if options.tokenizer else gptoss.TINY
    sizes = recipe.sizes | {"vocab_size": vocabulary["vocab_size"]}
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    parts = count_parameters(gptoss.config_dict(sizes))
    body = parts["total"] - parts["embeddings"]
    log(f"{body:,} parameters besides the embeddings")
    recipe = replace(recipe, sizes=sizes)
    shutil.rmtree(model_dir, ignore_errors=True)  # An earlier model is replaced.
    with checkpoint.new_directory(model_dir) as directory:
        stages, probe = write_warmed_up(directory, recipe, tokenizer, options.device, options.seed, log)
        loaded = load_model(str(directory), read_json(directory / "config.json"), "eager").to(options.device).eval()
        seconds = round(time.perf_counter() - started, 1)
        warmup = {"besides_embeddings": body, "seconds": seconds, "recipe": asdict(recipe), "stages": stages}
        warmup["loaded"] = figures(loaded, probe, 120)
        checkpoint.write_json(directory / "warmup.json", warmup)
    log(f"{model_dir} written, {time.perf_counter() - started:.0f} s")


def run_settings(options: argparse.Namespace, scale: Scale) -> dict[str, str]:
    """The settings of train_grpo.py; those of --set win. An interrupted run continues unless its model changed."""
    out, overwrite = options.out, options.force or is_stale(options.out)
    overrides = dict(options.set)
    direct = parse_value("DIRECT_ANSWERS", overrides.get("DIRECT_ANSWERS", "0"))
    return {
        "MODEL_ID": str(out / "model"),
        "DATA": str(out / "data" / file_name("train", scale.recipe.prompt)),
        "EVAL_DATA": str(out / "data" / file_name("heldout", scale.recipe.prompt)),
        "EVAL_PROFILE": str(out / "data" / "profile_heldout.csv"),
        "OUTPUT_DIR": str(out / "run"),
        **scale.settings,
        **({"USE_VLLM": "auto"} if direct else {}),  # Direct answers generate nothing.
        **({"OVERWRITE": "1"} if overwrite else {}),
        **overrides,
    }


def is_stale(out: Path) -> bool:
    """Whether the run in OUT/run began with another model than OUT/model."""
    run, model = out / "run" / "settings.json", out / "model" / "warmup.json"
    return run.is_file() and model.is_file() and run.stat().st_mtime < model.stat().st_mtime


def command_line(settings: dict[str, str]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), "python train_grpo.py"])


def train(options: argparse.Namespace, scale: Scale, log: Log) -> int:
    """Runs train_grpo.py on OUT/model; returns its exit code. Its command and seconds are kept in OUT."""
    if not (options.out / "model" / "config.json").is_file():
        raise InputError(f"{options.out / 'model'} is missing: run --stage make first")
    settings = run_settings(options, scale)
    log(command_line(settings))
    for name in (CHAINS, OTHER):
        (options.out / name).unlink(missing_ok=True)  # They are those of an earlier run.
    started = time.perf_counter()
    code = run_child([sys.executable, str(record.TRAIN_SCRIPT)], settings)
    seconds = time.perf_counter() - started
    shown = {name: value.replace(f"{options.out}/", "OUT/") for name, value in settings.items()}
    checkpoint.write_json(options.out / TRAIN, {"command": command_line(shown), "seconds": round(seconds, 1)})
    log(f"train_grpo.py ended with exit code {code} after {seconds:.0f} s")
    return code


def chain_figures(run: Path, heldout: Path) -> record.Json:
    """How often the plans of the base model and of the adapter in `run` are the best action, in one chain for every
    fourth held-out prompt at EVAL_TEMPERATURE, and the expected reward of both models' answers behind both models'
    chains."""
    options = argparse.Namespace(adapter=run, model=None, serve=False, csv=heldout, system=None)
    settings, files, every_row, _ = prepare(options)
    rows = every_row[::4]  # All 960 took more than 90 s beside two other runs on an H200.
    model = start_model(settings, files, run, read_machine(), use_vllm=False)
    prompts = [row.prompt for row in rows]
    rewards = np.array([[float(str(row.columns[f"reward_action_{k}"])) for k in range(ACTIONS)] for row in rows])
    chains: dict[str, list[str]] = {}
    figures: dict[str, float] = {}
    for name in ("base", "trained"):
        completions = model.tokenizer.batch_decode(model.complete(prompts, base=name == "base"))
        chains[name] = [text.partition(ANSWER_BEFORE)[0] for text in completions]
        pairs = zip(chains[name], rewards, strict=True)
        # Only the number that ends a chain is its plan: trained chains may lack the word before it.
        is_best = [f" {reward.argmax()}<|end|>" in chain for chain, reward in pairs]
        figures[f"plan_best_{name}"] = float(np.mean(is_best))
    for chain, answer in itertools.product(chains, chains):
        opened = [prompt + text for prompt, text in zip(prompts, chains[chain], strict=True)]
        shares = model.probabilities(opened, ACTIONS, greedy=False, base=answer == "base")
        figures[f"reward_chain_{chain}_answer_{answer}"] = float((shares * rewards).sum(-1).mean())
    return figures


def play_other_days(out: Path) -> int:
    """Evaluates OUT/run/best on the days of OTHER_PROFILE; returns the exit code of scripts/evaluate.py."""
    evaluate: list[str | Path] = [sys.executable, ROOT / "scripts/evaluate.py", out / "run/best", "--out", out / OTHER]
    return run_child([*evaluate, "--profile", out / "data" / OTHER_PROFILE])


def other_figures(heldout: record.Json, other: record.Json) -> list[Figure]:
    """The closed loop of best/ and of the rules on other days, and trained minus the best rule over both kinds of days,
    of which windows of the same dates count as one."""
    rows = record.plant_figures(other)
    figures = [figure(f"{row['name']}_other", row["value"], row["unit"], f"other days; {row['note']}") for row in rows]
    if "difference_rule" in heldout and "difference_rule" in other:
        windows = [*heldout["windows"], *other["windows"]]
        shared = set.intersection(*(set(window["policies"]) for window in windows))
        played = [{name: window["policies"][name] for name in shared} for window in windows]
        pairs = zip(windows, played, strict=True)
        all_days: record.Json = {"windows": [window | {"policies": policies} for window, policies in pairs]}
        add_totals(all_days)
        for name, value in all_days["difference_rule"].items():
            figures.append(figure(name.replace("percent", "over_rule_all"), value, "%", "over all days"))
    return figures


def saved_figures(plant: record.Json) -> tuple[list[Figure], bool]:
    """(what the trained model saves in the closed loop, whether the interval of `priced_kg` is above 0).

    A policy could save CO2 by leaving load unserved or the storage empty, so what counts is `priced_kg`
    (docs/evaluation.md), per window, base minus trained, in pairs over windows."""
    figures: list[Figure] = []
    for key, note in (("co2_kg", "emissions alone"), ("priced_kg", "and unserved load and storage at their price")):
        policies = [window["policies"] for window in plant["windows"]]
        saved = [policy["base"]["mean"][key] - policy["trained"]["mean"][key] for policy in policies]
        low, high = confidence_interval(saved)
        mean = math.fsum(saved) / len(saved)
        figures.append(figure(f"{key}_saved", mean, "kg/window", f"base minus trained, {note}"))
        for end, value in (("low", low), ("high", high)):
            if value is not None:
                figures.append(figure(f"{key}_saved_{end}", value, "kg/window", "95%, in pairs over windows"))
    return figures, low is not None and low > 0  # The last `low` is that of `priced_kg`.


def run_figures(out: Path) -> list[Figure]:
    """Figures of the warm-up and of the run's own files, where these exist."""
    values: record.Json = {"train_s": read_json(out / TRAIN).get("seconds")}
    if warmup := read_json(out / "model" / "warmup.json"):
        stages = {**warmup["stages"], "loaded": warmup["loaded"]}
        values |= {f"warmup_reward_{name}": stage["reward"] for name, stage in stages.items()}
        values |= {"besides_embeddings": warmup["besides_embeddings"], "make_s": warmup["seconds"]}
        values["warmup_parse_rate"] = stages["stored"]["parse_rate"]
    if (out / "run" / "metrics.csv").is_file():
        steps = record.steps_of(out / "run").dropna(subset=["reward"])
        values |= {"train_reward_first5": steps.reward[:5].mean(), "train_reward_last5": steps.reward[-5:].mean()}
        values |= {"step_s": steps.step_s[1:].mean(), "steps": len(steps)}
    return record.tabled(RUN_FIGURES, values)


def collect(options: argparse.Namespace, log: Log) -> int:
    """Writes the figures as JSON, copies the report; returns 0 if reward and closed loop improved, else 1."""
    run = options.out / "run"
    evaluation, plant = read_json(run / "evaluation.json"), read_json(run / "closed_loop.json")
    if not {"before", "after"} <= evaluation.keys():
        raise InputError(f"{run / 'evaluation.json'} lacks results before and after training: run --stage train first")
    results = record.reward_figures(evaluation) + record.plant_figures(plant)
    gain = evaluation.get("difference", {}).get("reward_low") or 0
    verdicts = {"held-out reward": gain > 0, "closed loop": False}
    if {"base", "trained"} <= plant.get("totals", {}).keys():
        saved, verdicts["closed loop"] = saved_figures(plant)
        results += saved
    else:
        log(f"NOTE: {run / 'closed_loop.json'} lacks the base or the trained model: the closed loop is not collected")
    command = f"python scripts/dev/prove.py --scale {options.scale} --out OUT" + (" --reason" if options.reason else "")
    if ran := read_json(options.out / TRAIN).get("command"):
        command += f", which ran: {ran}"
    # The figures may be collected elsewhere, but machine and versions are those of the run.
    facts, more = read_json(run / "settings.json").get("machine"), {}
    if facts:
        more = {"machine": record.machine_words(facts), "versions": read_json(run / "versions.json")}
    results += run_figures(options.out) + record.tabled(CHAIN_FIGURES, read_json(options.out / CHAINS))
    results += other_figures(plant, read_json(options.out / OTHER))
    record.write(options.results, results, command, more)
    if (run / "report.html").is_file():
        shutil.copyfile(run / "report.html", options.results.with_name("proof-report.html"))
    for name, passed in verdicts.items():
        log(f"{'PASS' if passed else 'FAIL'}: {name} {'improved' if passed else 'did not improve'} beyond its interval")
    return 0 if all(verdicts.values()) else 1


def prove(options: argparse.Namespace, scale: Scale) -> int:
    """Runs the stages of --stage that are not complete, with --force all; returns the exit code. Raises InputError."""
    log: Log = partial(print, flush=True)

    def is_wanted(stage: str, complete: bool) -> bool:
        return options.stage in (stage, "all") and (options.force or not complete)

    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if is_wanted("make", (options.out / "model" / "warmup.json").is_file()):
            make(options, scale, log)
        trained = complete_steps(options.out / "run") > 0 and not is_stale(options.out)
        if is_wanted("train", trained) and (code := train(options, scale, log)):
            return code
        # Measured on the run's machine: `collect` may run elsewhere.
        if scale.recipe.follow is not None and is_wanted("chains", (options.out / CHAINS).is_file()):
            heldout = Path(run_settings(options, scale)["EVAL_DATA"])
            checkpoint.write_json(options.out / CHAINS, chain_figures(options.out / "run", heldout))
        if is_wanted("other", (options.out / OTHER).is_file()) and (code := play_other_days(options.out)):
            return code
        return collect(options, log) if options.stage in ("collect", "all") else 0
    except OSError as error:
        raise InputError(str(error)) from None
