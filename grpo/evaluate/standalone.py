# SPDX-License-Identifier: Apache-2.0
"""A model controls the plant without a training run around it, for scripts/evaluate.py."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.data.files import find_files, read_rows
from grpo.data.prompts import render, sampling_seed
from grpo.evaluate.models import TransformersModel, VllmModel
from grpo.evaluate.plant import CLOSED_LOOP
from grpo.model.gptoss_format import ModelError
from grpo.model.load import load_tokenizer
from grpo.model.tiny import build_tiny
from grpo.preflight.choices import choose_rollouts
from grpo.preflight.hub import ModelFiles, count_parameters, find_model
from grpo.preflight.machine import GIB, Machine, installed_versions, read_machine
from grpo.run.folder import ADAPTER
from grpo.settings import Problems, Settings, load_settings, show
from grpo.tasks.tes.plant import Plant
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
    write_record,
)

# What the adapter's run recorded of its model and sampling; the rest belongs to the machine and comes from here.
RECORDED = (
    "MODEL_ID", "REASONING_EFFORT", "PROMPT_DATE", "MAX_COMPLETION_LEN", "TEMPERATURE", "TOP_P", "SEED", "DATA", "EVAL_DATA", "EVAL_SAMPLES",
)  # fmt: skip


class InputError(ValueError):
    """The input is wrong; `args` are the problems, each a sentence for the user."""


def recorded_settings(adapter: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with what settings.json of the adapter's folder (or of the run that a checkpoint lies in) says."""
    for path in (adapter, adapter.resolve().parent) if adapter else ():
        try:
            found = json.loads((path / "settings.json").read_text(encoding="utf-8"))["settings"]
            return dict(environ) | {name: show(found[name]) for name in RECORDED if name in found}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return dict(environ)


def read_profiles(options: argparse.Namespace, problems: Problems) -> tuple[list[str], list[Case]]:
    """(the files that --profile names, for the record; their windows); what is wrong with them is added."""
    paths: list[Path] = []
    cases: list[Case] = []
    for name in options.profile:  # a name with a comma is one file here, not two as in a setting
        paths += [Path(name)] if Path(name).is_file() else find_files("--profile", name, problems)
    for path in paths:
        try:
            cases += read_cases(path, options.co2_column, options.load_column)
        except ProfileError as error:
            problems += error.problems
    return list(map(shown_path, paths)), cases


def choose_prompt(requested: str, settings: Settings) -> tuple[str, str]:
    """(renderer of the prompts, reason): what the run's held-out or training rows are, where they can be read."""
    if requested != "auto":
        return requested, "set by --prompt"
    for name in ("EVAL_DATA", "DATA"):
        rows = read_rows(name, getattr(settings, name), Problems())
        if rows and (kind := prompt_kind([row.messages for row in rows])):
            return kind, f"as in {name}"
    kind = "compact" if settings.MODEL_ID == "tiny" else "full"
    return kind, "the data of the run are not here, as the model needs"


def check_model(settings: Settings, machine: Machine, problems: Problems) -> ModelFiles | None:
    """The files of MODEL_ID (the tiny model is made where nothing else is wrong); its problems are added."""
    if settings.MODEL_ID == "tiny" and not problems:
        try:
            build_tiny()
        except ModelError as error:
            problems.append(f"MODEL_ID=tiny: {error}")
    # Without its adapter there is nothing to look up: the base model may be another one than the default.
    if any(problem.startswith("--adapter") for problem in problems):
        return None
    files = find_model(settings.MODEL_ID, problems)
    if files and not machine.gpus and count_parameters(files.config)["total"] * 2 / GIB > 4:
        problems.add("--model", f"{settings.MODEL_ID} needs a GPU and none is visible", "Run it where there is one")
    return files


def refuse(problems: Sequence[str]) -> None:
    """Raises InputError where there are problems."""
    if problems:
        raise InputError(*dict.fromkeys(problems))


def evaluate_adapter(options: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """Let the trained adapter or, without one, the base model (or both) control the plant, and write closed_loop.json.
    `options` are those of scripts/evaluate.py. Returns (the record, its path).

    Raises InputError before anything takes time, EngineError where vLLM fails.
    """
    adapter = options.adapter
    environ = recorded_settings(adapter, os.environ) | ({"MODEL_ID": options.model} if options.model else {})
    s, _, problems = load_settings(environ)
    samples = options.samples or (s.EVAL_SAMPLES if adapter else 0) or 1
    for name in ("adapter_config.json", ADAPTER) if adapter else ():
        if not (adapter / name).is_file():
            problems.add(f"--adapter {adapter}", f"{name} is not there", "Name a run's folder or a checkpoint")
    path = options.out or (adapter or Path()) / CLOSED_LOOP
    if options.out or not problems:  # a folder that is no adapter's has been told already
        check_writable(path, problems)
    profiles, cases = read_profiles(options, problems)
    machine = read_machine()
    files = check_model(s, machine, problems)
    refuse(problems)
    kind, reason = choose_prompt(options.prompt, s)
    if kind == "compact" and files.template is None:
        problems.add(f"MODEL_ID={s.MODEL_ID}", "it has no chat template", "Add chat_template.jinja, or --prompt full")
        refuse(problems)
    sampling = sampling_of(s, kind)
    record = new_record(cases, profiles, samples, options.vote, sampling, options.start_kwh, options.hours_limit)
    if not keep_models(record, path) and path.exists():
        problems.add(
            str(path), "it holds another evaluation (other windows, samples or settings)", "Name another --out"
        )
        refuse(problems)

    vllm, tiny = installed_versions(["vllm"])["vllm"], s.MODEL_ID == "tiny"
    use_vllm, why = choose_rollouts(s.USE_VLLM, machine.gpus, tiny, vllm)
    way = f"{'vLLM' if use_vllm else 'transformers'}: {why}"
    print(f"{s.MODEL_ID}, {kind} prompts ({reason}), {len(cases)} window(s) x {samples}, {way}", flush=True)
    render_state = renderer(kind, lambda turns: render(files.template, turns, s.REASONING_EFFORT, s.PROMPT_DATE))
    model_path = str(files.folder) if tiny else s.MODEL_ID
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if use_vllm:
        # Room for the longest prompt: measured on the first hour, which lists the most, and a little more.
        first = [render_state(state_at(case.window, Plant(), 0, options.start_kwh)) for case in cases]
        longest = max(map(len, load_tokenizer(model_path)(text=first)["input_ids"])) + 32
        model: Any = VllmModel(s, files, model_path, adapter, machine, longest, len(cases) * samples)
    else:
        model = TransformersModel(s, model_path, files.config, adapter)
    for name in ("base", "trained") if options.base_too else ("trained" if adapter else "base",):
        started = time.perf_counter()

        def ask(prompts: Sequence[str], count: int, hour: int, base: bool = name == "base") -> list[str]:
            # The same seeds as a run's own closed loop, and the same for both models.
            return model.ask(prompts, count, sampling_seed(s.SEED, hour + 1, "evaluation"), base)

        run_model(record, name, cases, ask, render_state)
        write_record(record, path)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    return record, path
