# SPDX-License-Identifier: Apache-2.0
"""A model without a trainer, by transformers or by vLLM, controls the plant; for scripts/evaluate.py."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from grpo.data.files import find_files, read_rows
from grpo.data.prompts import render, sampling_seed
from grpo.evaluate.exact import answer_probabilities
from grpo.evaluate.plant import CLOSED_LOOP
from grpo.model.expert_lora import experts_wrapped
from grpo.model.load import in_working_type, load_generation_config, load_model, load_tokenizer
from grpo.plan.hub import ModelFiles, checkpoint_gib, count_parameters, fetch_weights, find_model, read_json
from grpo.plan.machine import GIB, Machine, installed_versions, read_machine
from grpo.plan.memory import plan_engine
from grpo.preflight.adapter import CONFIG, missing_files, on_experts
from grpo.preflight.choices import choose_evaluation, choose_rollouts
from grpo.rollout.engine import EngineError, start_engine
from grpo.rollout.prefill import shared_prefill
from grpo.run.best import adapter_fault
from grpo.run.durable import check_writable, write_named, write_text
from grpo.settings import InputError, Problems, Settings, load_settings, show
from grpo.tasks.tes import record as tes_record
from grpo.tasks.tes.plant import Plant
from grpo.tasks.tes.profiles import ProfileError
from grpo.tasks.tes.prompts import prompt_kind, renderer, state_at

# What the adapter's run recorded of its model and sampling; the rest belongs to the machine and comes from here.
RECORDED = (
    "MODEL_ID", "REASONING_EFFORT", "PROMPT_DATE", "EVAL_TEMPERATURE", "TOP_P", "SEED", "DATA", "EVAL_DATA", "EVAL_SAMPLES", "SYSTEM_PROMPT",
)  # fmt: skip
# Recorded too, but other rows than the run's may need others.
REPLACEABLE = ("MAX_PROMPT_LEN", "MAX_COMPLETION_LEN", "REWARDS", "INVALID_REWARD")

MOST_AT_ONCE = 512  # sequences that vLLM is planned for: more wait their turn


def recorded_settings(adapter: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with what settings.json of the adapter's folder (or of the run that a checkpoint lies in) says, of
    REPLACEABLE only those that are not set; where there is none, with the base model that adapter_config.json names, if
    MODEL_ID is not set. REWARDS is what `auto` was in the run."""
    for path in (adapter, adapter.resolve().parent) if adapter else ():
        try:
            record = read_json(path / "settings.json")
            found = dict(record["settings"])
            if found.get("REWARDS", "") is None:
                found["REWARDS"] = ((record.get("choices") or {}).get("rewards") or [None])[0]
            own, fixed = ({n: show(found[n]) for n in names if n in found} for names in (REPLACEABLE, RECORDED))
            return own | dict(environ) | fixed
        except (OSError, ValueError, KeyError, TypeError):
            continue
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if adapter and (base := read_json(adapter / CONFIG).get("base_model_name_or_path")):
            return {"MODEL_ID": str(base)} | dict(environ)
    return dict(environ)


def read_profiles(options: argparse.Namespace, problems: Problems) -> tuple[list[str], list[tes_record.Case]]:
    """(the files that --profile names, for the record; their windows); what is wrong with them is added."""
    paths, cases = [], []
    for name in options.profile:  # a name with a comma is one file here, not two as in a setting
        paths += [Path(name)] if Path(name).is_file() else find_files("--profile", name, problems)
    for path in paths:
        try:
            cases += tes_record.read_cases(path, options.co2_column, options.load_column)
        except ProfileError as error:
            problems += error.problems
    return list(map(tes_record.shown_path, paths)), cases


def choose_prompt(requested: str, settings: Settings) -> tuple[str, str]:
    """(renderer of the prompts, reason): what the run's held-out or training rows are, where they can be read."""
    if requested != "auto":
        return requested, "set by --prompt"
    for name in ("EVAL_DATA", "DATA"):
        rows = read_rows(name, getattr(settings, name) or "", Problems())
        if rows and (kind := prompt_kind([row.messages for row in rows])):
            return kind, f"as in {name}"
    kind = "compact" if settings.MODEL_ID == "tiny" else "full"
    return kind, "the data of the run are not here, as the model needs"


def check_adapter(adapter: Path | None, problems: Problems) -> None:
    """The files of an adapter are there, and its weights undamaged where its folder says what they were."""
    if adapter is None:
        return
    fix = "Name a run's folder, its best/, or a checkpoint"
    if not adapter.is_dir():
        problems.add(str(adapter), "there is no such folder", fix)
    elif missing := missing_files(adapter):
        verb = "is" if len(missing) == 1 else "are"
        problems.add(str(adapter), f"{' and '.join(missing)} {verb} not there", fix)
    elif fault := adapter_fault(adapter):
        problems.add(str(adapter), fault, fix)


def check_model(settings: Settings, adapter: Path | None, machine: Machine, problems: Problems) -> ModelFiles | None:
    """The files of MODEL_ID; its problems are added."""
    # Without its adapter there is nothing to look up: the base model may be another one than the default.
    if adapter and missing_files(adapter):
        return None
    files = find_model(settings.MODEL_ID, problems)
    if files and not machine.gpus and count_parameters(files.config)["total"] * 2 / GIB > 4:
        problems.add("--model", f"{settings.MODEL_ID} needs a GPU and none is visible", "Run it where there is one")
    return files


class TransformersModel:
    """A model, with its adapter or without, that transformers generates with (eager attention: exact at any length)."""

    def __init__(self, settings: Settings, model_path: str, config: Mapping[str, Any], adapter: Path | None):
        self.settings, self.tokenizer, self.adapter = settings, load_tokenizer(model_path), adapter
        experts = "bf16" if settings.EXPERTS == "bf16" else "mxfp4"  # there is no engine to share with
        self.model = in_working_type(load_model(model_path, config, "eager", experts)).eval()
        self.eos = stop_tokens(self.model.generation_config.eos_token_id, self.tokenizer)
        self.base = self.model
        if adapter is not None:
            with experts_wrapped(self.base):
                self.model = PeftModel.from_pretrained(self.base, str(adapter)).eval()

    def without_adapter(self, base: bool) -> contextlib.AbstractContextManager[None]:
        return self.model.disable_adapter() if base and self.adapter else contextlib.nullcontext()

    def disable_adapter(self) -> contextlib.AbstractContextManager[None]:
        """As PeftModel's, also where there is no adapter."""
        return self.without_adapter(True)

    def get_base_model(self) -> PreTrainedModel:
        """As PeftModel's, the adapter inside or not."""
        return self.base

    def probabilities(self, prompts: Sequence[str], temperature: float, base: bool) -> np.ndarray:
        """(N, K): `answer_probabilities` of the plant's actions."""
        with self.without_adapter(base):
            return answer_probabilities(self.base, self.tokenizer, prompts, temperature, len(Plant().ratios))

    @torch.no_grad()
    def complete(self, prompts: Sequence[str], seed: int, base: bool, temperature: float) -> list[list[int]]:
        """Token ids of one completion of each prompt, up to the one that ends it; at temperature 0 greedily."""
        s, completions = self.settings, []
        chunk = s.GENERATION_BATCH or 64
        torch.manual_seed(seed)
        way = {"do_sample": True, "temperature": temperature, "top_p": s.TOP_P, "top_k": 0}
        with self.without_adapter(base), shared_prefill(self.base):
            for start in range(0, len(prompts), chunk):
                batch = self.tokenizer(text=prompts[start : start + chunk], padding=True, return_tensors="pt")
                ids = self.model.generate(
                    **batch.to(self.model.device), **(way if temperature else {"do_sample": False}),
                    max_new_tokens=s.MAX_COMPLETION_LEN, eos_token_id=self.eos, pad_token_id=self.tokenizer.pad_token_id,
                )  # fmt: skip
                for row in ids[:, batch["input_ids"].shape[1] :].tolist():
                    end = next((place for place, token in enumerate(row) if token in self.eos), len(row))
                    completions.append(row[: end + 1])
        return completions

    def ask(self, prompts: Sequence[str], seed: int, base: bool = False, greedy: bool = False) -> list[str]:
        """One completion of each prompt as text, special tokens included."""
        temperature = 0.0 if greedy else self.settings.EVAL_TEMPERATURE
        return self.tokenizer.batch_decode(self.complete(prompts, seed, base, temperature))


class VllmModel:
    """A model that vLLM generates with: MXFP4 weights, the adapter loaded natively from its folder (ROLLOUT_SYNC=lora's
    way). There is no trainer beside it, so it stays awake. `prompts`: those that are asked at once, of the closed loop
    the first hour's. Raises EngineError."""

    def __init__(
        self,
        settings: Settings,
        files: ModelFiles,
        path: str,
        adapter: Path | None,
        machine: Machine,
        prompts: list[str],
    ):
        self.tokenizer, self.adapter, rank = load_tokenizer(path), adapter, settings.LORA_R
        self.temperature = settings.EVAL_TEMPERATURE
        if adapter is not None:
            rank = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))["r"]
        # The plan of a step serves here too: as many sequences as are asked at once, up to MOST_AT_ONCE, no trainer's
        # memory. The first hour lists the most hours; a little more for longer numbers.
        at_once = min(len(prompts), MOST_AT_ONCE)
        changes = {"ROLLOUT_SYNC": "lora", "LORA_R": rank, "PROMPTS_PER_STEP": at_once, "NUM_GENERATIONS": 1}
        changes["LORA_TARGETS"] = "experts" if adapter and on_experts(adapter) else "all-linear"
        s = dataclasses.replace(settings, **changes)
        longest = max(map(len, self.tokenizer(text=list(dict.fromkeys(prompts)))["input_ids"])) + 32
        plan = plan_engine(s, files.config, machine, longest, 0.0, checkpoint_gib(settings.MODEL_ID, files))
        if plan.cache < plan.cache_least:
            need = plan.weights + plan.scratch + plan.cache_least
            raise EngineError(f"it needs {need:.1f} GiB of the GPU, {machine.gpu_free:.1f} are free")
        self.eos = stop_tokens(load_generation_config(path).eos_token_id, self.tokenizer)
        self.engine = start_engine(s, plan, path, self.eos)
        self.engine.wake()

    def complete(self, prompts: Sequence[str], seed: int, base: bool, temperature: float) -> list[list[int]]:
        """Token ids of one completion of each prompt, up to the one that ends it; at temperature 0 greedily."""
        self.engine.use_adapter(None if base else self.adapter)
        return self.engine.generate(self.tokenizer(text=prompts)["input_ids"], seed, temperature=temperature)[0]

    def ask(self, prompts: Sequence[str], seed: int, base: bool = False, greedy: bool = False) -> list[str]:
        """One completion of each prompt as text, special tokens included."""
        return self.tokenizer.batch_decode(self.complete(prompts, seed, base, 0.0 if greedy else self.temperature))


def start_model(
    settings: Settings, files: ModelFiles, adapter: Path | None, machine: Machine, use_vllm: bool, prompts: list[str]
) -> TransformersModel | VllmModel:
    """The base model, downloaded where it is not here, with its adapter. Raises InputError and EngineError."""
    if problem := fetch_weights(settings.MODEL_ID, files):
        raise InputError(problem)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if use_vllm:
        return VllmModel(settings, files, str(files.folder), adapter, machine, prompts)
    return TransformersModel(settings, str(files.folder), files.config, adapter)


def stop_tokens(eos: int | Sequence[int] | None, tokenizer: Any) -> list[int]:
    """The ids that end a completion, as TRL collects them: the generation config's and the tokenizer's."""
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return ids if tokenizer.eos_token_id in ids else [tokenizer.eos_token_id, *ids]


def evaluate_adapter(options: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """Let the trained adapter or, without one, the base model (or both) control the plant, and write closed_loop.json.
    `options` are those of scripts/evaluate.py. Returns (the record, its path).

    Raises InputError before anything takes time, EngineError where vLLM fails.
    """
    adapter = options.adapter
    environ = recorded_settings(adapter, os.environ) | ({"MODEL_ID": options.model} if options.model else {})
    s, _, problems = load_settings(environ)
    samples = options.samples or (s.EVAL_SAMPLES if adapter else 0) or 1
    if options.vote and samples < 2:
        problems.add("--vote", "there is one answer an hour, so nothing to count", "Add --samples of 2 or more")
    check_adapter(adapter, problems)
    path = options.out or (adapter or Path()) / CLOSED_LOOP
    if options.out or not problems:  # a folder that is no adapter's has been told already
        check_writable(path, problems)
    profiles, cases = read_profiles(options, problems)
    machine = read_machine()
    files = check_model(s, adapter, machine, problems)
    kind, reason = choose_prompt(options.prompt, s)
    if files and kind == "compact" and files.template is None:
        problems.add(f"MODEL_ID={s.MODEL_ID}", "it has no chat template", "Add chat_template.jinja, or --prompt full")
    if problems:
        raise InputError(*dict.fromkeys(problems))
    sampling = tes_record.sampling_of(s, kind)
    tiny = s.MODEL_ID == "tiny"
    use_vllm, why = choose_rollouts(s.USE_VLLM, machine.gpus, tiny, installed_versions(["vllm"])["vllm"])
    exact, how = choose_evaluation(s, use_vllm, count_parameters(files.config)["total"], kind)
    exact &= not options.vote
    given = (samples, options.vote, sampling, options.start_kwh, options.hours_limit, exact)
    record = tes_record.new_record(cases, profiles, *given)
    if not tes_record.keep_models(record, path) and path.exists():
        raise InputError(
            f"{path}: it holds another evaluation (other windows, samples or settings). Name another --out"
        )

    way = f"{'vLLM' if use_vllm else 'transformers'}: {why}"
    print(
        f"{s.MODEL_ID}, {kind} prompts ({reason}), {len(cases)} window(s), {f'exact ({how})' if exact else f'x {samples}'}, {way}",
        flush=True,
    )
    render_state = renderer(kind, lambda turns: render(files.template, turns, s.REASONING_EFFORT, s.PROMPT_DATE))
    first = [render_state(state_at(case.window, Plant(), 0, options.start_kwh)) for case in cases]
    model = start_model(s, files, adapter, machine, use_vllm, first * samples)
    for name in ("base", "trained") if options.base_too else ("trained" if adapter else "base",):
        started, base = time.perf_counter(), name == "base"
        if exact:

            def probabilities(prompts: Sequence[str], greedy: bool, base: bool = base) -> np.ndarray:
                return model.probabilities(prompts, 0.0 if greedy else s.EVAL_TEMPERATURE, base)

            tes_record.run_exact(record, name, cases, probabilities, render_state)
        for greedy in () if exact else (False, True):

            def ask(
                prompts: Sequence[str], count: int, hour: int, base: bool = base, greedy: bool = greedy
            ) -> list[str]:
                # The same seeds as a run's own closed loop, and the same for both models.
                rows = [prompt for prompt in prompts for _ in range(count)]
                return model.ask(rows, sampling_seed(s.SEED, hour + 1, "evaluation"), base, greedy)

            tes_record.run_model(record, name + tes_record.GREEDY * greedy, cases, ask, render_state)
        (write_named if options.out else write_text)(path, json.dumps(record, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    return record, path
