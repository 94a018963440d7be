# SPDX-License-Identifier: Apache-2.0
"""What train_grpo.py reads, checked as there, and written as verl reads it: Parquet files, and one file for the rewards."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rewards
from grpo.data.files import SHOWN, Row, label, read_rows
from grpo.data.prompts import answer_of, render_rows
from grpo.data.reward_checks import check_heldout, check_rewards
from grpo.preflight.choices import choose_rewards
from grpo.preflight.hub import OTHERS, fetch_small_files, has_mxfp4, missing_shards, read_template
from grpo.run.durable import read_json, whole_file, write_text
from grpo.settings import Problems, Settings, load_settings, one_line
from grpo.verl.options import check_counterparts
from grpo.verl.score import has_channels

TRAIN, HELDOUT, SPEC = "train.parquet", "heldout.parquet", "rewards.json"


@dataclass(frozen=True)
class Prepared:
    """What is known before verl starts. `model`: folder of the model's small files; `harmony`: it answers in channels."""

    settings: Settings
    sources: dict[str, str]
    problems: Problems
    model: Path | None
    harmony: bool
    rows: list[Row]
    eval_rows: list[Row]
    answers: list[str | None]  # of rows, then of eval_rows
    reward_specs: list[tuple[str, float]]

    @property
    def data(self) -> Path:
        """The folder of the files for verl."""
        return Path(self.settings.OUTPUT_DIR).expanduser().absolute() / "data"


def read_model(model_id: str, problems: Problems) -> tuple[Path | None, str]:
    """Folder with the small files of any model that transformers can load, and its chat template; problems where verl
    could not train it."""
    where, folder = f"MODEL_ID={model_id}", Path(model_id).expanduser()
    local = folder.is_dir()
    if not local and (model_id == "tiny" or model_id.count("/") != 1):
        problems.add(where, "it is neither a folder nor a Hub id", "Name a checkpoint in 16 or 32 bits")
        return None, ""
    if not local and (folder := fetch_small_files(model_id, problems)) is None:
        return None, ""
    try:
        config = read_json(folder / "config.json")
        others = {name: read_json(folder / name) for name in OTHERS if (folder / name).exists()}
        template = read_template(folder, others) or ""
    except (OSError, ValueError) as error:
        problems.add(where, one_line(str(error), 500), "Download or make the model again")
        return None, ""
    needed = ["tokenizer.json", *(missing_shards(folder) if local else ())]
    if missing := [name for name in needed if not (folder / name).exists()]:
        problems.add(where, f"{missing[0]} is missing", "Copy the whole checkpoint, tokenizer and weights included")
    if not template:
        problems.add(where, "it has no chat template, and verl renders every prompt", "Add chat_template.jinja")
    if has_mxfp4(config):
        problems.add(where, "its experts are in MXFP4, and verl trains 16 bits", "Dequantize it first: docs/verl.md")
    return folder, template


def read_answers(rows: Sequence[Row], harmony: bool, problems: Problems) -> list[str | None]:
    """What each row asks for (`answer_of`), None where all its actions are alike; without channels the final one's text."""
    answers = []
    for row in rows:
        if row.messages[:1] and row.messages[0][0] == "rendered":
            what = "the prompt is rendered, and verl renders every prompt itself"
            problems.add(f"{row.file}, row {row.number}", what, "Give it as `user` and `system`, or as messages")
            answers.append(None)
            continue
        answer = answer_of(row)
        answers.append(answer if harmony or answer is None else rewards.final_channel(answer))
    return answers


def prepare(environ: Mapping[str, str], steps: Collection[str], gpus: int) -> Prepared:
    """Settings, model and rows for the `steps` of scripts/verl/run.py on so many GPUs; all problems are collected, and nothing
    is written."""
    settings, sources, problems = load_settings(environ)
    check_counterparts(settings, sources, problems)
    if gpus and settings.PROMPTS_PER_STEP % gpus:
        what = f"{settings.PROMPTS_PER_STEP} cannot be shared by {gpus} GPUs"
        problems.add("PROMPTS_PER_STEP", what, f"Set a multiple of {gpus}, or fewer --gpus")
    model, template = read_model(settings.MODEL_ID, problems)
    rows, eval_rows = read_rows("DATA", settings.DATA, problems, settings.SYSTEM_PROMPT), []
    specs, told = [], Problems()
    scored = bool({"data", "ppo", "grpo"} & set(steps))
    if scored and settings.EVAL_SAMPLES:
        eval_rows = read_rows("EVAL_DATA", settings.EVAL_DATA, problems, settings.SYSTEM_PROMPT)
    harmony = has_channels(template)
    answers = read_answers([*rows, *eval_rows], harmony, told)
    if "sft" in steps and rows and not told and not any(answers[: len(rows)]):
        fix = "Add a column `answer`, or rewards that differ"
        told.add("DATA", "no row has an answer, or an action better than others", fix)
    least = sum(map(bool, answers[: len(rows)])) if "sft" in steps else len(rows)
    if rows and not told and least < settings.PROMPTS_PER_STEP:
        what = f"a step takes {settings.PROMPTS_PER_STEP} different rows here, and there are {least}"
        told.add("PROMPTS_PER_STEP", what, "Lower it, or give more rows")
    problems += told[:SHOWN]
    if model and template and not told and (model / "tokenizer.json").exists():
        both, _ = render_rows(settings, [*rows, *eval_rows], template, model / "tokenizer.json", problems)
        rows, eval_rows = both[: len(rows)], both[len(rows) :]
    if scored:
        tokenizer = model / "tokenizer.json" if harmony and rows and rows[0].prompt else None
        specs = check_rewards(settings, choose_rewards(settings.REWARDS, rows)[0], rows, problems, tokenizer)[0]
        check_heldout(specs, settings, eval_rows, problems, tokenizer)
    problems[:] = dict.fromkeys(problems)
    return Prepared(settings, sources, problems, model, harmony, rows, eval_rows, answers, specs)


def to_record(row: Row, answer: str | None, split: str, number: int, columns: Mapping[str, None]) -> dict[str, Any]:
    """A row as verl's data sets hold it, with `answer` for SFT. The whole row is in extra_info as JSON: columns of Parquet
    have one type, a user's cells need not, and reward functions get what they get from train_grpo.py. Raises ValueError
    for a cell that JSON cannot hold."""
    for name, cell in row.columns.items():
        try:
            json.dumps(cell)
        except (TypeError, ValueError):
            where = f"{row.file}, row {row.number}, column {name}"
            what = f"JSON cannot hold {one_line(repr(cell), 200)}"
            raise ValueError(f"{where}: {what}. Write it as text or a number") from None
    told = dataclasses.asdict(dataclasses.replace(row, columns=dict(columns) | row.columns))
    return {
        "data_source": label(row.file),
        "prompt": [{"role": role, "content": text} for role, text in row.messages],
        "reward_model": {"style": "rule", "ground_truth": rewards.final_channel(answer or "") or answer or ""},
        "extra_info": {"split": split, "index": number, "row": json.dumps(told)},
        "answer": answer,
    }


def reward_spec(p: Prepared) -> dict[str, Any]:
    """What grpo/verl/score.py needs beside the rows: reward functions and weights, settings, and the folder in which a
    user's module is looked for."""
    return {
        "rewards": p.reward_specs,
        "settings": dataclasses.asdict(p.settings),
        "harmony": p.harmony,
        "folder": os.getcwd(),
    }


def write_data(p: Prepared) -> Path:
    """Writes both Parquet files and the rewards' into OUTPUT_DIR/data; returns the folder. Raises ValueError as `to_record`."""
    import pyarrow
    from pyarrow import parquet  # late: --help needs neither

    p.data.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(name for row in p.rows for name in row.columns)
    pairs = list(zip([*p.rows, *p.eval_rows], p.answers, strict=True))
    train, heldout = pairs[: len(p.rows)], pairs[len(p.rows) :] or pairs  # verl wants some also where it asks none
    for name, some in ((TRAIN, train), (HELDOUT, heldout)):
        made = [to_record(row, answer, Path(name).stem, n, columns) for n, (row, answer) in enumerate(some)]
        with whole_file(p.data / name) as path:
            parquet.write_table(pyarrow.Table.from_pylist(made), path)
    write_text(p.data / SPEC, json.dumps(reward_spec(p), indent=1) + "\n")
    return p.data
