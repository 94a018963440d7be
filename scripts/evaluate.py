#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Let a model control the plant hour by hour through held-out days, beside rules and the exact optimum.

    python scripts/evaluate.py --adapter runs/first                 # a trained adapter (settings from its run)
    python scripts/evaluate.py --adapter runs/first --base-too      # and its base model, on the same seeds
    python scripts/evaluate.py --model tiny                         # a base model
    python scripts/evaluate.py --adapter runs/first --profile profiles/*.csv --samples 8 --vote

Every window is three days of a profile (docs/data.md) from 150 kWh. All windows are asked in one batch an hour; the
answer moves the plant, and the plant's new state makes the next prompt. docs/evaluation.md defines every figure.
Exit codes: 0 done, 2 bad input (every problem is named), 4 vLLM failed, 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.data import prompts as data_prompts
from grpo.data.files import find_files, read_rows
from grpo.data.prompts import sampling_seed
from grpo.evaluate.models import TransformersModel, VllmModel, recorded_settings
from grpo.model.gptoss_format import ModelError
from grpo.model.load import load_tokenizer
from grpo.model.tiny import build_tiny
from grpo.preflight.choices import choose_rollouts
from grpo.preflight.hub import count_parameters, find_model
from grpo.preflight.machine import GIB, installed_versions, read_machine
from grpo.rollout.engine import EngineError
from grpo.settings import Problems, load_settings
from grpo.tasks.tes import dataset
from grpo.tasks.tes.plant import DECISION_DAYS, START_KWH, Plant
from grpo.tasks.tes.profiles import ProfileError
from grpo.tasks.tes.prompts import prompt_kind, renderer, state_at
from grpo.tasks.tes.record import (
    Case,
    check_writable,
    keep_models,
    new_record,
    read_cases,
    run_model,
    sampling_of,
    shown_path,
    table,
    write_record,
)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with code 2 on a wrong one."""
    about = (__doc__ or "").partition("\n")[0]
    number = dataset.number
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--base-too", action="store_true", help="evaluate the base model as well (with --adapter)")
    parser.add_argument("--model", metavar="MODEL_ID", help="base model (default: the adapter's run's, or MODEL_ID)")
    profiles = ["data/profile_heldout.csv"]
    parser.add_argument("--profile", nargs="+", metavar="CSV", default=profiles, help="(default %(default)s)")
    parser.add_argument("--samples", type=number(1, 1000, int), metavar="N", help="passes through each window, or with --vote answers an hour (default: the run's EVAL_SAMPLES, else 1)")  # fmt: skip
    parser.add_argument("--vote", action="store_true", help="the majority of N answers decides each hour")
    parser.add_argument("--hours-limit", type=number(9, 24 * DECISION_DAYS, int), default=24 * DECISION_DAYS, metavar="H", help="only the first H hours of each window (default %(default)s)")  # fmt: skip
    parser.add_argument("--start-kwh", type=number(0, Plant().capacity_kwh), default=START_KWH, metavar="E", help="stored at the start (default %(default)g)")  # fmt: skip
    parser.add_argument("--prompt", choices=("auto", "full", "compact"), default="auto", help="auto: as the held-out rows of the run (default %(default)s)")  # fmt: skip
    parser.add_argument("--co2-column", metavar="NAME", help="CO2 intensity [kg/kWh], where names do not tell")
    parser.add_argument("--load-column", metavar="NAME", help="cooling load [kW], where names do not tell")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default closed_loop.json in DIR, without --adapter in the current folder)")  # fmt: skip
    args = parser.parse_args(argv)
    if args.base_too and args.adapter is None:
        parser.error("--base-too: only with --adapter; without it the base model is what is evaluated")
    if args.vote and (args.samples == 1 or (args.samples is None and args.adapter is None)):
        parser.error("--vote: needs --samples of 2 or more, or there is nothing to count")
    return args


def choose_prompt(requested: str, settings: Any) -> tuple[str, str]:
    """(renderer of the prompts, reason): what the run's held-out or training rows are, where they can be read."""

    if requested != "auto":
        return requested, "set by --prompt"
    for name in ("EVAL_DATA", "DATA"):
        rows = read_rows(name, getattr(settings, name), Problems())
        if rows and (kind := prompt_kind([row.messages for row in rows])):
            return kind, f"as in {name}"
    return (
        "compact" if settings.MODEL_ID == "tiny" else "full"
    ), "the data of the run are not here, as the model needs"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)

    environ = recorded_settings(args.adapter, os.environ)
    if args.model:
        environ["MODEL_ID"] = args.model
    settings, _, problems = load_settings(environ)
    args.samples = args.samples or (settings.EVAL_SAMPLES if args.adapter else 0) or 1
    if args.adapter is not None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            if not (args.adapter / name).is_file():
                problems.add(f"--adapter {args.adapter}", f"{name} is not there", "Name a run's folder or a checkpoint")
    out = args.out or (args.adapter or Path()) / "closed_loop.json"
    if args.out or not problems:  # a folder that is no adapter's has been told already
        check_writable(out, problems)
    cases: list[Case] = []
    paths: list[Path] = []
    for name in args.profile:  # a name with a comma is one file here, not two as in a setting
        paths += [Path(name)] if Path(name).is_file() else find_files("--profile", name, problems)
    for path in paths:
        try:
            cases += read_cases(path, args.co2_column, args.load_column)
        except ProfileError as error:
            problems += error.problems
    machine = read_machine()
    versions = installed_versions(["vllm"])
    use_vllm, why = choose_rollouts(settings.USE_VLLM, machine.gpus, settings.MODEL_ID == "tiny", versions["vllm"])
    if settings.MODEL_ID == "tiny" and not problems:
        try:
            build_tiny()
        except ModelError as error:
            problems.append(f"MODEL_ID=tiny: {error}")
    # Without its adapter there is nothing to look up: the base model may be another one than the default.
    missing = any(problem.startswith("--adapter") for problem in problems)
    files = None if missing else find_model(settings.MODEL_ID, problems)
    if files and not machine.gpus and count_parameters(files.config)["total"] * 2 / GIB > 4:
        problems.add("--model", f"{settings.MODEL_ID} needs a GPU and none is visible", "Run it where there is one")
    if problems:
        return refuse(problems)

    kind, reason = choose_prompt(args.prompt, settings)
    if kind == "compact" and files.template is None:
        problems.add(f"MODEL_ID={settings.MODEL_ID}", "it has no chat template", "Add chat_template.jinja, or --prompt full")  # fmt: skip
        return refuse(problems)
    sampling = sampling_of(settings, kind)
    profiles = [shown_path(path) for path in paths]
    record = new_record(cases, profiles, args.samples, args.vote, sampling, args.start_kwh, args.hours_limit)
    if not keep_models(record, out) and out.exists():
        problems.add(str(out), "it holds another evaluation (other windows, samples or settings)", "Name another --out")
        return refuse(problems)

    render = renderer(
        kind,
        lambda messages: data_prompts.render(files.template, messages, settings.REASONING_EFFORT, settings.PROMPT_DATE),
    )
    rows = len(cases) * args.samples
    print(f"{settings.MODEL_ID}, {kind} prompts ({reason}), {len(cases)} window(s) x {args.samples}, "
          f"{'vLLM' if use_vllm else 'transformers'}: {why}", flush=True)  # fmt: skip
    model_path = str(files.folder) if settings.MODEL_ID == "tiny" else settings.MODEL_ID
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if use_vllm:
            # Room for the longest prompt: measured on the first hour, which lists the most, and a little more.
            tokenizer = load_tokenizer(model_path)
            first = [render(state_at(case.window, Plant(), 0, args.start_kwh)) for case in cases]
            longest = max(map(len, tokenizer(text=first)["input_ids"])) + 32
            model: Any = VllmModel(settings, files, model_path, args.adapter, machine, longest, rows)
        else:
            model = TransformersModel(settings, model_path, files.config, args.adapter)
        for name in ("base", "trained") if args.base_too else ("trained" if args.adapter else "base",):
            started = time.perf_counter()

            def ask(prompts: Sequence[str], samples: int, hour: int, name: str = name) -> list[str]:
                # The same seeds as a run's own closed loop, and the same for both models.
                seed = sampling_seed(settings.SEED, hour + 1, "evaluation")
                return model.ask(prompts, samples, seed, base=name == "base")

            run_model(record, name, cases, ask, render)
            write_record(record, out)
            print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    except EngineError as error:
        print(f"vLLM: {error}", file=sys.stderr)
        return 4
    print(table(record))
    print(f"written: {out}")
    return 0


def refuse(problems: Sequence[str]) -> int:
    """Print every problem; returns exit code 2."""
    print("\n".join(dict.fromkeys(problems)), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
