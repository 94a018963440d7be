# SPDX-License-Identifier: Apache-2.0
"""Asks an adapter to answer prompts, and prints the commands that serve it with vLLM; for scripts/ask.py."""

import argparse
import csv
import dataclasses
import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rewards
from grpo.common import InputError, Problems, printable, split_commas
from grpo.data.files import REWARD_COLUMN, Row, in_template, read_file, read_messages
from grpo.data.heldout import Split
from grpo.data.prepare import Tools, prepare_rows
from grpo.evaluate.models import EvaluatedModel, start_model
from grpo.evaluate.saved_adapter import check_model, load_run_settings, strange_environment
from grpo.harmony import ASSISTANT, assistant_turn, parse_action
from grpo.output.durable import read_json
from grpo.output.layout import ADAPTER_CONFIG
from grpo.plan.engine_memory import vllm_rank
from grpo.plan.hub import ModelFiles
from grpo.plan.machine import Machine, read_machine
from grpo.plan.vllm_model import vllm_faults
from grpo.preflight.adapter import is_on_experts
from grpo.preflight.resolve import read_environment
from grpo.rollout.engine import vllm_modules
from grpo.rollout.sampler import Sample
from grpo.settings.table import Settings

EXAMPLE = "Which one? Answer [0] or [1]."
URL = "http://localhost:8000/v1/completions"


def read_prompts(options: argparse.Namespace, system: str, problems: Problems) -> list[Row]:
    """The rows of --csv, or a single row with the prompt: a rendered one, or a user's message. `system` is the run's
    system message, which --system replaces."""
    if options.csv:
        return read_file(options.csv, problems, options.system or system, rewards=False)
    prompt = EXAMPLE if options.prompt is None else options.prompt
    # An environment's `reset` may take no column that its rows do not have.
    columns = {"prompt": prompt} | ({"system": options.system} if options.system else {})
    messages, trl_prompt = read_messages("PROMPT", columns, system, problems)
    return [Row("PROMPT", 1, messages, (), columns, trl_prompt=trl_prompt)]


def prepare(options: argparse.Namespace) -> tuple[Settings, ModelFiles, list[Row], Tools]:
    """(settings of the adapter's run, its base model's files, rendered prompts, the tools of its ENVIRONMENT) by
    `options`. Raises InputError."""
    s, problems = load_run_settings(options.adapter, MODEL_ID=options.model)
    if fault := strange_environment(options.adapter, s):
        raise InputError(*problems, fault)
    # --serve only prints commands, which may run on another machine with a GPU.
    machine = Machine(gpus=1) if options.serve else read_machine()
    files = check_model(s, options.adapter, machine, problems)
    rows = in_template(read_prompts(options, s.SYSTEM_PROMPT, problems), s.PROMPT_TEMPLATE)
    environment = read_environment(s, problems)
    tools = environment.tools if environment else ()
    if not problems:
        rows = prepare_rows(s, files, problems, Split([], rows, ""), tools=tools).heldout
    if files is None or problems:
        raise InputError(*dict.fromkeys(problems))
    return s, files, rows, tools


def ask(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The columns of every prompt's row with `completion`, special tokens included, and where the row or the run's
    REWARDS know actions with `action` (None if the answer names none). With the run's ENVIRONMENT it is an episode,
    with its `end` and what the environment gave as `reward`. A column of the file that has one of these names
    becomes `csv_NAME`, as for reward functions. `options` are those of scripts/ask.py. Raises InputError before the
    model is loaded."""
    s, files, rows, tools = prepare(options)
    s = dataclasses.replace(s, EVAL_TEMPERATURE=options.temperature)
    model = start_model(s, files, options.adapter, read_machine(), use_vllm=False, tools=tools)
    if s.ENVIRONMENT:
        played = [episode_answer(sample, model) for sample in model.play(rows, base=options.base)]
        return [with_columns(row, answer) for row, answer in zip(rows, played, strict=True)]
    ids = model.complete([row.prompt for row in rows], base=options.base)
    functions = {part.partition("=")[0].strip() for part in split_commas(s.REWARDS or "action")}
    has_actions = bool(functions & rewards.ACTION_REWARDS.keys())
    answers = []
    for row, text in zip(rows, model.tokenizer.batch_decode(ids), strict=True):
        actions = sum(REWARD_COLUMN.fullmatch(name) is not None for name in row.columns)
        answer: dict[str, Any] = {"completion": text}
        if actions or has_actions:
            action = parse_action(assistant_turn(row.prompt, text), actions or 10**9)
            answer = {"action": action, "completion": text}
        answers.append(with_columns(row, answer))
    return answers


def with_columns(row: Row, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer to a row behind the row's own columns."""
    return {(f"csv_{name}" if name in answer else name): cell for name, cell in row.columns.items()} | answer


def episode_answer(sample: Sample, model: EvaluatedModel) -> dict[str, Any]:
    """The columns of an episode; `fault` only if its environment failed."""
    episode = sample.episode
    assert episode
    text = episode.prompt[episode.prompt.rfind(ASSISTANT) :] + str(model.tokenizer.decode(sample.ids))
    fault = {"fault": episode.fault} if episode.fault else {}
    return {"end": episode.end, "reward": episode.total(), **fault, "completion": text}


def as_csv(answers: Sequence[dict[str, Any]]) -> str:
    """The answers as a CSV. Lists and objects, which JSON lines and Parquet may hold, are written as pandas writes
    them, and lone surrogates, which UTF-8 cannot encode, as escapes."""
    text = io.StringIO()
    # Only some rows may have an answer in `extra_info`, which becomes a column.
    writer = csv.DictWriter(text, dict.fromkeys(name for answer in answers for name in answer))
    writer.writeheader()
    writer.writerows(answers)
    return text.getvalue().encode("utf-8", "backslashreplace").decode()


def serve_commands(options: argparse.Namespace) -> str:
    """Two commands: vLLM serves the adapter, and curl sends it the prompt as the run renders it. Raises InputError."""
    s, files, rows, tools = prepare(options)
    if faults := vllm_faults(files.config, s.MAX_PROMPT_LEN + s.MAX_COMPLETION_LEN):
        raise InputError(*(f"MODEL_ID={s.MODEL_ID}: {fault}. Ask without --serve" for fault in faults))
    path, lora, name = s.MODEL_ID, [], s.MODEL_ID
    if files.folder and (path == "tiny" or Path(path).is_dir()):
        path = name = str(files.folder.resolve())
    if options.adapter:
        adapter = options.adapter.resolve()
        name = adapter.name if adapter.name != "best" else adapter.parent.name
        rank, targets = vllm_rank(read_json(adapter / ADAPTER_CONFIG)["r"]), vllm_modules(is_on_experts(adapter))
        lora = [
            f"--enable-lora --lora-modules {shlex.quote(f'{name}={adapter}')}",
            f"--max-lora-rank {rank} --lora-target-modules {' '.join(targets)}",
        ]
    # The completions endpoint takes a rendered prompt; the chat endpoint would render it again, with today's date.
    body = {
        "model": name,
        "prompt": rows[0].prompt,
        "max_tokens": 1 if s.DIRECT_ANSWERS else s.MAX_COMPLETION_LEN,  # a direct answer is a single token
        "temperature": options.temperature,
        "skip_special_tokens": False,  # special tokens separate the final channel from the reasoning
    }
    if tools:  # vLLM renders messages and tools by openai_harmony, as the chat template did in training.
        body = {name: body[name] for name in ("model", "temperature")} | {
            "messages": [{"role": role, "content": text} for role, text in rows[0].messages],
            "tools": list(tools),
            "reasoning_effort": s.REASONING_EFFORT,
            "max_completion_tokens": s.MAX_TURN_LEN or s.MAX_COMPLETION_LEN,
        }
    serve = [
        f"vllm serve {shlex.quote(path)}",
        *lora,
        f"--max-model-len {s.MAX_PROMPT_LEN + s.MAX_COMPLETION_LEN}",
        *(["--enable-auto-tool-choice --tool-call-parser openai"] if tools else []),
    ]
    # JSON's own escapes take the place of what a terminal would obey.
    text = json.dumps(body, ensure_ascii=False)
    text = "".join(char if printable(char) == char else json.dumps(char)[1:-1] for char in text)
    url = URL.replace("/completions", "/chat/completions") if tools else URL
    curl = [f"curl {url}", "-H 'Content-Type: application/json'", f"-d {shlex.quote(text)}"]
    return "\n\n".join(" \\\n  ".join(lines) for lines in (serve, curl))
