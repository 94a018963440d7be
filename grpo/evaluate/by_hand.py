# SPDX-License-Identifier: Apache-2.0
"""An adapter, its base model or both are evaluated without a run; for scripts/evaluate.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from grpo.data.files import Row, label, read_rows
from grpo.data.prompts import render_rows
from grpo.data.reward_checks import check_heldout, check_rewards
from grpo.data.scoring import first_state, load_rewards
from grpo.evaluate.adapter import check_model, load_run_settings
from grpo.evaluate.heldout import HeldoutEvaluation, Results, new_results
from grpo.evaluate.models import start_model
from grpo.evaluate.simulation import CLOSED_LOOP, ModelResponder
from grpo.evaluate.tables import table
from grpo.plan.hub import count_parameters
from grpo.plan.machine import installed_versions, read_machine
from grpo.preflight.choices import choose_evaluation, choose_loop_evaluation, choose_rewards, choose_rollouts
from grpo.run.durable import check_writable, write_named
from grpo.settings import InputError, Problems, Settings, show
from grpo.tasks.simulator import load_simulator

WORDS = ("Mean reward", "base model", "adapter", "adapter - base")  # of the table, as `table` takes them
# Figures with another value of these are of another evaluation, and so are those sampled with other settings.
HOW = ("data_sha256", "samples", "temperature", "exact", "model", "adapter", "rewards", "settings")
SAMPLED_WITH = (
    "MAX_COMPLETION_LEN", "TOP_P", "SEED", "INVALID_REWARD", "SYSTEM_PROMPT", "REASONING_EFFORT", "PROMPT_DATE",
)  # fmt: skip
REPLACED = "it holds another evaluation (other rows, windows, rewards, samples or settings). Name another --out"


def asked_models(options: argparse.Namespace) -> tuple[str, ...]:
    """Which models the options ask for: the adapter or, without one, its base model, or both."""
    if options.base_too:
        return "base", "trained"
    return ("trained",) if options.adapter else ("base",)


def simulate(options: argparse.Namespace) -> tuple[str, Path]:
    """Let models act in the simulator of their task, and write closed_loop.json. `options` are those of
    scripts/evaluate.py. Returns (the table, the file's path).

    Raises InputError before anything takes time, EngineError where vLLM fails.
    """
    adapter = options.adapter
    s, problems = load_run_settings(adapter, MODEL_ID=options.model)
    s = dataclasses.replace(s, EVAL_SAMPLES=options.samples or (s.EVAL_SAMPLES if adapter else 0) or 1)
    path = options.out or (adapter or Path()) / CLOSED_LOOP
    if options.out or not problems:  # a folder that is no adapter's has its own problem already
        check_writable(path, problems)
    machine = read_machine()
    files = check_model(s, adapter, machine, problems)
    simulator = load_simulator(s.TASK)
    if simulator is None:
        raise InputError(*problems, f"TASK={s.TASK}: it has no simulator. Name rows with --data")
    plan = simulator.plan_by_hand(options, s, files.template if files else "", problems)
    if files is None or problems:
        raise InputError(*dict.fromkeys(problems))
    tiny, vllm = s.MODEL_ID == "tiny", installed_versions(["vllm"])["vllm"]
    use_vllm, why = choose_rollouts(s.USE_VLLM, machine.gpus, tiny, vllm, s.DIRECT_ANSWERS)
    parameters = count_parameters(files.config)["total"]
    exact, how = choose_evaluation(s, use_vllm, parameters, plan.why_sampled)
    exact, how = choose_loop_evaluation(s, exact, how, parameters)
    record = simulator.new_record(plan, s, s.EVAL_SAMPLES, exact)
    if not simulator.keep_models(record, path) and path.exists():
        raise InputError(f"{path}: {REPLACED}")
    engine = "vLLM" if use_vllm else "transformers"
    print(f"{s.MODEL_ID}, {plan.reason}, {'exact' if exact else 'sampled'}: {how}; {engine}: {why}", flush=True)
    model = start_model(s, files, adapter, machine, use_vllm, plan.opening_prompts() * s.EVAL_SAMPLES)
    for name in asked_models(options):
        started = time.perf_counter()
        simulator.run(plan, record, name, ModelResponder(model, name == "base"))
        write_named(path, json.dumps(record, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    return simulator.table(record), path


def evaluate_rows(options: argparse.Namespace) -> tuple[str, Path]:
    """Score models on the rows of --data, and write the figures as evaluation.json has them. `options` are those of
    scripts/evaluate.py. Returns (the table, the file's path).

    Raises InputError before anything takes time, EngineError where vLLM fails.
    """
    adapter = options.adapter
    s, problems = load_run_settings(adapter, MODEL_ID=options.model, REWARDS=options.rewards)
    s = dataclasses.replace(s, EVAL_SAMPLES=options.samples or s.EVAL_SAMPLES or 1)
    rows = read_rows("--data", ",".join(options.data), problems, s.SYSTEM_PROMPT)
    path = options.out or (adapter or Path()) / f"evaluation-{file_name(rows)}.json"
    if options.out or not problems:
        check_writable(path, problems)
    requested, _ = choose_rewards(s.REWARDS, rows)
    specs, _ = check_rewards(s, requested, [], problems)  # that these functions exist
    machine, longest = read_machine(), 0
    files = check_model(s, adapter, machine, problems)
    if files and files.tokenizer and not problems:
        rows, longest = render_rows(s, rows, files.template, files.tokenizer, problems)
    if specs:
        tokenizer = files.tokenizer if files and longest else None
        check_heldout(specs, s, rows, problems, tokenizer, "--data", "name other --rewards")
    if files is None or problems:
        raise InputError(*dict.fromkeys(problems))
    vllm = installed_versions(["vllm"])["vllm"]
    use_vllm, why = choose_rollouts(s.USE_VLLM, machine.gpus, s.MODEL_ID == "tiny", vllm, s.DIRECT_ANSWERS)
    exact, how = choose_exact(s, rows, use_vllm, count_parameters(files.config)["total"])
    results = new_results(s, rows, exact) | {
        "model": s.MODEL_ID,
        "adapter": adapter.resolve().name if adapter else None,
        "data": list(dict.fromkeys(label(row.file) for row in rows)),
        "rewards": [list(spec) for spec in specs],
        "settings": {name: show(getattr(s, name)) for name in SAMPLED_WITH},
    }
    results |= earlier_base(path, results)
    engine, shown = "vLLM" if use_vllm else "transformers", ", ".join(f"{name} x {weight:g}" for name, weight in specs)
    print(f"{s.MODEL_ID}, {len(rows)} rows, rewards {shown}", flush=True)
    print(f"{'exact' if exact else 'sampled'} at {s.EVAL_TEMPERATURE:g}, {how}; {engine}: {why}", flush=True)
    prompts = [row.prompt for row in rows for _ in range(s.EVAL_SAMPLES)]
    model = start_model(s, files, adapter, machine, use_vllm, prompts)
    functions = load_rewards(specs, s)
    names, weights = [function.__name__ for function in functions], [weight for _, weight in specs]
    evaluation = HeldoutEvaluation(model, rows, exact, names, functions, weights, first_state(s.TOTAL_STEPS))
    evaluation.add_models(results, [{"base": "before", "trained": "after"}[name] for name in asked_models(options)])
    write_named(path, json.dumps(results, indent=1) + "\n")
    return table(results, WORDS), path


def choose_exact(s: Settings, rows: Sequence[Row], use_vllm: bool, parameters: int) -> tuple[bool, str]:
    """`choose_evaluation` of these rows, as a run chooses."""
    simulator = load_simulator(s.TASK)
    without_profile = dataclasses.replace(s, EVAL_PROFILE="")
    plan = simulator.plan(without_profile, rows, "", use_vllm, False, Problems()) if simulator else None
    opened = any(not row.prompt.endswith("<|start|>assistant") for row in rows)
    actions = all(row.rewards for row in rows)
    return choose_evaluation(s, use_vllm, parameters, plan.why_sampled if plan else "", opened, actions)


def file_name(rows: Sequence[Row]) -> str:
    """A part of a file's name that says which rows were evaluated: that of the first file."""
    return label(rows[0].file).replace("/", "-").replace(":", "-") if rows else "rows"


def earlier_base(path: Path, results: Results) -> Results:
    """What the file at `path` holds of the base model, which is not asked again. Raises InputError where it holds
    another evaluation, which this one would replace."""
    if not path.is_file():
        return {}
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if all(earlier[name] == results[name] for name in HOW):
            return {name: earlier[name] for name in ("before", "before_greedy") if name in earlier}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path}: {REPLACED}")
