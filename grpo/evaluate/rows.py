# SPDX-License-Identifier: Apache-2.0
"""An adapter, its base model or both are scored on any rows by any reward functions; for scripts/evaluate.py --data."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo.data.files import Row, column_names, label, read_rows
from grpo.data.prompts import render_rows, sampling_seed
from grpo.data.reward_checks import check_heldout, check_rewards
from grpo.data.scoring import first_state, load_rewards
from grpo.evaluate.heldout import add_models, new_results, table
from grpo.evaluate.standalone import (
    TransformersModel,
    VllmModel,
    check_adapter,
    check_model,
    recorded_settings,
    start_model,
)
from grpo.learn.trainer import Trainer
from grpo.plan.hub import count_parameters
from grpo.plan.machine import installed_versions, read_machine
from grpo.preflight.choices import choose_evaluation, choose_rewards, choose_rollouts
from grpo.run.durable import check_writable, write_named
from grpo.settings import InputError, Settings, load_settings, show
from grpo.tasks.tes.prompts import prompt_kind

WORDS = ("Mean reward", "base model", "adapter", "adapter - base")  # of the table, as `table` takes them
# Figures with another value of these are of another evaluation, and so are those sampled with other settings.
HOW = ("data_sha256", "samples", "temperature", "exact", "model", "adapter", "rewards", "settings")
SAMPLED_WITH = (
    "MAX_COMPLETION_LEN", "TOP_P", "SEED", "INVALID_REWARD", "SYSTEM_PROMPT", "REASONING_EFFORT", "PROMPT_DATE",
)  # fmt: skip


class ModelAlone:
    """What `evaluate` of grpo/evaluate/heldout.py uses of a Trainer, for a model that nothing trains."""

    read_completions = Trainer.read_completions  # truncated and unreadable answers count as in training

    def __init__(
        self,
        settings: Settings,
        model: TransformersModel | VllmModel,
        rows: Sequence[Row],
        specs: Sequence[tuple[str, float]],
    ):
        self.run = SimpleNamespace(settings=settings)
        self.model, self.accelerator = model, SimpleNamespace(unwrap_model=lambda model: model)
        self.processing_class = self._tokenizer = model.tokenizer
        self.eos_token_ids = model.eos
        self.reward_funcs = load_rewards(specs, settings)
        self.reward_func_names = [function.__name__ for function in self.reward_funcs]
        self.args = SimpleNamespace(reward_weights=[weight for _, weight in specs])
        self.columns = column_names(rows)
        self.state = first_state(settings.TOTAL_STEPS)

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[str]]:
        """The prompts as they are: `complete` of the model tokenizes them."""
        return (prompts,)

    def answers(
        self, prompts: Sequence[str], samples: int, base: bool, step: int, temperature: float
    ) -> list[list[int]]:
        """As Trainer's, with the seed of a run's own evaluation of `step`."""
        seed = sampling_seed(self.run.settings.SEED, step, "evaluation")
        return self.model.complete(prompts, seed, base, temperature)


def evaluate_rows(options: argparse.Namespace) -> tuple[str, Path]:
    """Score the adapter or, without one, the base model (or both) on the rows of --data, and write the figures as
    evaluation.json has them. `options` are those of scripts/evaluate.py. Returns (the table, the file's path).

    Raises InputError before anything takes time, EngineError where vLLM fails.
    """
    adapter, changes = options.adapter, {}
    if options.model:
        changes["MODEL_ID"] = options.model
    if options.rewards:
        changes["REWARDS"] = options.rewards
    s, _, problems = load_settings(recorded_settings(adapter, os.environ) | changes)
    s = dataclasses.replace(s, EVAL_SAMPLES=options.samples or s.EVAL_SAMPLES or 1)
    check_adapter(adapter, problems)
    rows = read_rows("--data", ",".join(options.data), problems, s.SYSTEM_PROMPT)
    path = options.out or (adapter or Path()) / f"evaluation-{file_name(rows)}.json"
    if options.out or not problems:
        check_writable(path, problems)
    rewards, _ = choose_rewards(s.REWARDS, rows)
    specs, _ = check_rewards(s, rewards, [], problems)  # that these functions exist
    machine, longest = read_machine(), 0
    files = check_model(s, adapter, machine, problems)
    if files and files.tokenizer and not problems:
        rows, longest = render_rows(s, rows, files.template, files.tokenizer, problems)
    if specs:
        tokenizer = files.tokenizer if longest else None
        check_heldout(specs, s, rows, problems, tokenizer, "--data", "name other --rewards")
    if problems:
        raise InputError(*dict.fromkeys(problems))
    vllm = installed_versions(["vllm"])["vllm"]
    use_vllm, why = choose_rollouts(s.USE_VLLM, machine.gpus, s.MODEL_ID == "tiny", vllm)
    exact, how = choose_exact(s, rows, use_vllm, count_parameters(files.config)["total"])
    results = new_results(s, rows, exact) | {
        "model": s.MODEL_ID,
        "adapter": adapter.resolve().name if adapter else None,
        "data": list(dict.fromkeys(label(row.file) for row in rows)),
        "rewards": [list(spec) for spec in specs],
        "settings": {name: show(getattr(s, name)) for name in SAMPLED_WITH},
    }
    results |= earlier_base(path, results)
    engine = "vLLM" if use_vllm else "transformers"
    functions = ", ".join(f"{name} x {weight:g}" for name, weight in specs)
    print(f"{s.MODEL_ID}, {len(rows)} rows, rewards {functions}", flush=True)
    print(f"{'exact' if exact else 'sampled'} at {s.EVAL_TEMPERATURE:g}, {how}; {engine}: {why}", flush=True)
    prompts = [row.prompt for row in rows for _ in range(s.EVAL_SAMPLES)]
    model = ModelAlone(s, start_model(s, files, adapter, machine, use_vllm, prompts), rows, specs)
    names = ("before", "after") if options.base_too else ("after",) if adapter else ("before",)
    add_models(model, rows, results, names)
    write_named(path, json.dumps(results, indent=1) + "\n")
    return table(results, WORDS), path


def choose_exact(s: Settings, rows: Sequence[Row], use_vllm: bool, parameters: int) -> tuple[bool, str]:
    """`choose_evaluation` of these rows, as a run chooses."""
    opened = any(not row.prompt.endswith("<|start|>assistant") for row in rows)
    kind = prompt_kind([row.messages for row in rows])
    return choose_evaluation(s, use_vllm, parameters, kind, opened, all(row.rewards for row in rows))


def file_name(rows: Sequence[Row]) -> str:
    """A part of a file's name that tells which rows were evaluated: that of the first file."""
    return label(rows[0].file).replace("/", "-").replace(":", "-") if rows else "rows"


def earlier_base(path: Path, results: dict[str, Any]) -> dict[str, Any]:
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
    what = "it holds another evaluation (other rows, rewards, samples or settings)"
    raise InputError(f"{path}: {what}. Name another --out")
