# SPDX-License-Identifier: Apache-2.0
"""Evaluates an adapter, its base model or both without a run; for scripts/evaluate.py."""

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.common import InputError, Problems, split_commas
from grpo.data.files import Row, data_fingerprint, in_template, label, read_rows
from grpo.data.formats import is_dataset
from grpo.data.heldout import Split, date_notes, prompt_of, read_split, trained_days_warning
from grpo.data.prepare import prepare_rows
from grpo.evaluate.heldout_reward import HeldoutEvaluation, new_results
from grpo.evaluate.heldout_table import evaluation_table
from grpo.evaluate.models import ModelResponder, start_model
from grpo.evaluate.saved_adapter import (
    check_model,
    load_run_settings,
    run_record,
    strange_code,
    strange_environment,
)
from grpo.output.durable import check_writable, write_named
from grpo.output.layout import MEASURED_LATER
from grpo.plan.hub import ModelFiles, count_parameters
from grpo.plan.machine import Machine, installed_versions, read_machine
from grpo.plan.vllm_model import vllm_faults
from grpo.preflight.choices import choose_exact, choose_exact_loop, choose_rewards, choose_use_vllm
from grpo.preflight.resolve import read_environment
from grpo.reward.calling import load_rewards
from grpo.reward.reward_checks import check_heldout, check_rewards
from grpo.reward.scoring import initial_trainer_state
from grpo.settings.table import Settings
from grpo.tasks.simulator import load_simulator


def requested_models(options: argparse.Namespace) -> tuple[str, ...]:
    """The names of the models that the options request: the adapter, or the base model if none is named, or both."""
    if options.base_too:
        return "base", "trained"
    return ("trained",) if options.run else ("base",)


def read_settings(options: argparse.Namespace) -> tuple[Settings, Problems]:
    """The settings of the adapter's run, updated by the options, and their problems."""
    s, problems = load_run_settings(options.run, MODEL_ID=options.model, REWARDS=options.rewards)
    return dataclasses.replace(s, EVAL_SAMPLES=options.samples or s.EVAL_SAMPLES or 1), problems


def strange_rewards(options: argparse.Namespace, text: str) -> str | None:
    """`strange_code` of REWARDS, `text`, unless the user has named any."""
    if options.rewards or os.environ.get("REWARDS"):
        return None
    return strange_code(options.run, "REWARDS", text, f"give --rewards {shlex.quote(text)}")


def rows_of_run(options: argparse.Namespace, s: Settings) -> Sequence[Row] | None:
    """The rows that the adapter's run trained on; None if they are not known: DATA is on the Hub, cannot be read from
    here, or holds other rows by now."""
    if options.run is None:
        return []
    if any(map(is_dataset, split_commas(s.DATA))):
        return None
    rows = read_split(s, Problems(), train_only=True).train
    return rows if run_record(options.run).get("data_sha256") == data_fingerprint(rows) else None


def trained_rows(options: argparse.Namespace, s: Settings, rows: Sequence[Row]) -> int | None:
    """How many of `rows` have prompts that the adapter's run trained on; None if those are not known."""
    if (trained_on := rows_of_run(options, s)) is None:
        return None
    episodes = bool(s.ENVIRONMENT)
    trained = {prompt_of(row, episodes) for row in trained_on}
    return sum(prompt_of(row, episodes) in trained for row in rows)


def output_path(options: argparse.Namespace, name: str, problems: Problems) -> Path:
    """The file of --out, or evaluation-`name`.json in the adapter's folder. Adds a problem if it is not writable."""
    path: Path = options.out or (options.run or Path()) / MEASURED_LATER.replace("*", name)
    if options.out or not problems:  # a missing adapter was already reported: its folder is not reported again
        check_writable(path, problems)
    return path


def write_results(path: Path, results: dict[str, Any], table: str) -> str:
    """Writes the results as JSON and returns their table. Where they cannot be written, the table is printed: hours of
    work must not be lost to a full disk."""
    try:
        write_named(path, json.dumps(results, indent=1) + "\n")
    except OSError:
        print(table, flush=True)
        raise
    return table


def choose_engine(s: Settings, files: ModelFiles, machine: Machine) -> tuple[bool, str]:
    """Whether vLLM generates, and the reason as text for the log. Raises InputError if it computes another model."""
    use_vllm = choose_use_vllm(s, machine.gpus, installed_versions(["vllm"])["vllm"])
    if use_vllm.value and (faults := vllm_faults(files.config, s.MAX_PROMPT_LEN + s.MAX_COMPLETION_LEN)):
        raise InputError(*(f"MODEL_ID={s.MODEL_ID}: {fault}. Set USE_VLLM=0" for fault in faults))
    return use_vllm.value, f"{'vLLM' if use_vllm.value else 'transformers'}: {use_vllm.reason}"


def evaluate(options: argparse.Namespace) -> tuple[str, Path]:
    """Score models on rows or let them act in a simulator, by the options of scripts/evaluate.py. Without --data and
    --profile the run's rows decide: they are scored if its task has no simulator or they are none of the simulator's.

    Returns (a table, the path of the file that was written). Raises InputError before anything takes time, EngineError
    where vLLM fails."""
    if options.data or options.profile:
        return evaluate_rows(options) if options.data else simulate(options)
    s, problems = load_run_settings(options.run, MODEL_ID=options.model)
    split, simulator = read_split(s, problems), load_simulator(s.TASK)
    if (
        simulator
        and not s.ENVIRONMENT
        and simulator.plan(s, split.heldout or split.train, "", False, True, Problems()).is_mentioned
    ):
        return simulate(options)
    if options.run and s.EVAL_DATA is None and split.heldout:
        recorded = run_record(options.run).get("data_sha256")
        if recorded and recorded != data_fingerprint(split.train):
            fault = f"{options.run} was not trained on the rows that DATA leaves for training: it may have seen these"
            problems.add("held-out rows", fault, "Restore DATA, or name the rows to score: --data FILE")
    if problems:
        raise InputError(*problems)
    return evaluate_rows(options, split)


def simulate(options: argparse.Namespace) -> tuple[str, Path]:
    """Let models act in their task's simulator and write its record."""
    s, problems = read_settings(options)
    path = output_path(options, "closed_loop", problems)
    machine = read_machine()
    files = check_model(s, options.run, machine, problems)
    simulator = load_simulator(s.TASK)
    if simulator is None:
        raise InputError(*problems, f"TASK={s.TASK}: it has no simulator. Name rows with --data")
    plan = simulator.plan_by_hand(options.profile or [], s, files.template if files else "", problems)
    if files is None or problems:
        raise InputError(*dict.fromkeys(problems))
    use_vllm, engine = choose_engine(s, files, machine)
    parameters = count_parameters(files.config)["total"]
    exact = choose_exact_loop(s, choose_exact(s, use_vllm, parameters, (), plan.why_sampled), parameters)
    record = simulator.new_record(plan, s, s.EVAL_SAMPLES, exact.value)
    kind = "exact" if exact.value else "sampled"
    print(f"{s.MODEL_ID}, {plan.reason}, {kind}: {exact.reason}; {engine}", flush=True)
    if warning := trained_days_warning(plan.dates, rows_of_run(options, s) or []):
        print(warning, flush=True)
    model = start_model(s, files, options.run, machine, use_vllm, plan.opening_prompts() * s.EVAL_SAMPLES)
    for name in requested_models(options):
        simulator.run(plan, record, name, ModelResponder(model, name == "base"))
    return write_results(path, record, simulator.table(record)), path


def evaluate_rows(options: argparse.Namespace, split: Split | None = None) -> tuple[str, Path]:
    """Score models on the held-out rows of `split`, or else on those of --data, and write the figures as
    evaluation.json has them."""
    s, problems = read_settings(options)
    if split is None:
        rows = in_template(read_rows("--data", ",".join(options.data), problems, s.SYSTEM_PROMPT), s.PROMPT_TEMPLATE)
        path = output_path(options, label(rows[0].file).replace("/", "-") if rows else "rows", problems)
    else:
        rows, path = split.heldout, output_path(options, "heldout", problems)
        if not rows:
            problems.add("held-out rows", split.reason, "Name the rows to score: --data FILE")
    if fault := strange_rewards(options, s.REWARDS or "") or strange_environment(options.run, s):
        raise InputError(*problems, fault)
    environment = read_environment(s, problems)
    tools = environment.tools if environment else ()
    rewards = choose_rewards(s.REWARDS, rows, s.ENVIRONMENT, environment).value
    specs, _ = check_rewards(s, rewards, [], problems)  # without rows this checks only that the functions exist
    machine, longest = read_machine(), 0
    files = check_model(s, options.run, machine, problems)
    if not problems:
        prepared = prepare_rows(s, files, problems, Split([], rows, ""), tools=tools)
        rows, longest = prepared.heldout, prepared.longest_prompt
    if specs and not s.ENVIRONMENT:
        tokenizer = files.tokenizer if files and longest else None
        check_heldout(specs, s, rows, problems, tokenizer, "held-out rows" if split else "--data", "name other REWARDS")
    if files is None or problems:
        raise InputError(*dict.fromkeys(problems))
    use_vllm, engine = choose_engine(s, files, machine)
    exact = choose_exact(s, use_vllm, count_parameters(files.config)["total"], rows)
    results = new_results(s, rows, exact.value) | {
        "model": s.MODEL_ID,
        "adapter": options.run.resolve().name if options.run else None,
        "data": list(dict.fromkeys(label(row.file) for row in rows)),
        "rewards": [list(spec) for spec in specs],
    }
    for note in [] if split else date_notes(rows):  # The reason of a run's split names them already.
        print(f"--data: {note}", flush=True)
    if split is None and (count := trained_rows(options, s, rows)) != 0:
        results["trained_on"] = count
        fault = f"{count} of {len(rows)} rows have prompts that {options.run} was trained on: they flatter it"
        if count is None:
            fault = f"its DATA is not here, or not as it was: {options.run} may be trained on these rows"
        print(f"--data: {fault}. Without --data its held-out rows are scored", flush=True)
    shown = ", ".join(f"{name} x {weight:g}" for name, weight in specs)
    print(f"{s.MODEL_ID}, {len(rows)} {'held-out ' if split else ''}rows, rewards {shown}", flush=True)
    kind = "exact" if exact.value else "sampled"
    print(f"{kind} at temperature {s.EVAL_TEMPERATURE:g}, {exact.reason}; {engine}", flush=True)
    prompts = [row.prompt for row in rows for _ in range(s.EVAL_SAMPLES)]
    model = start_model(s, files, options.run, machine, use_vllm, prompts, tools)
    state = initial_trainer_state(s.TOTAL_STEPS)
    evaluation = HeldoutEvaluation(model, rows, exact.value, load_rewards(specs, s), state)
    evaluation.add_models(results, [{"base": "before", "trained": "after"}[name] for name in requested_models(options)])
    return write_results(path, results, evaluation_table(results)), path
