# SPDX-License-Identifier: Apache-2.0
"""Rows and rewards for verl: read and checked as by train_grpo.py, written as Parquet files and one JSON file."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.common import Problems
from grpo.data.files import Row, label
from grpo.data.heldout import read_split
from grpo.data.prompts import TEMPLATE_COLUMNS, answer_of
from grpo.harmony import final_channel
from grpo.output.durable import read_json, whole_file, write_text
from grpo.output.layout import check_output_dir
from grpo.plan.hub import REAL_MODEL, has_mxfp4, is_no_hub_id
from grpo.preflight.choices import choose_demo, choose_rewards
from grpo.reward.reward_checks import check_heldout, check_rewards
from grpo.settings.environment import load_settings
from grpo.settings.table import FIELDS

# The settings of train_grpo.py that apply to verl too. verl's own options are in scripts/verl/*.yaml.
SHARED = {"MODEL_ID", "TASK", "DATA", "EVAL_DATA", "EVAL_SAMPLES", "EVAL_SHARE", "SYSTEM_PROMPT", "PROMPT_TEMPLATE"}
SHARED |= {"REWARDS", "INVALID_REWARD", "OUTPUT_DIR", "IGNORE_VARS"}


@dataclasses.dataclass(frozen=True)
class VerlInput:
    """The checked input of a stage. `model` and `output_dir` are absolute: Ray's workers may be in another folder."""

    model: str
    output_dir: Path
    rows: list[Row]
    eval_rows: list[Row]
    reward_specs: list[tuple[str, float]]
    invalid_reward: float | None


def as_messages(rows: Sequence[Row], problems: Problems) -> list[Row]:
    """The rows with their last message as the prompt that reward functions get. A rendered prompt is a problem."""
    reason, fix = "it is rendered, and verl renders every prompt itself", "Give `user` and `system`, or messages"
    rendered = {row.file: row for row in reversed(rows) if row.messages[0][0] == "rendered"}  # The first of each file.
    for file in sorted(rendered):
        problems.add(f"{file}, row {rendered[file].number}", reason, fix)
    for column in (name for name, _, _ in TEMPLATE_COLUMNS):
        if row := next((row for row in rows if row.columns.get(column)), None):
            reason, fix = "verl renders all prompts with the same arguments", "Rename it, and give verl's own option"
            problems.add(f"{row.file}, row {row.number}, column {column}", reason, fix)
    return [dataclasses.replace(row, prompt=row.messages[-1][1]) for row in rows]


def read_input(environ: Mapping[str, str], stage: str) -> tuple[VerlInput, Problems]:
    """Reads and checks a stage's input, and writes nothing. Returns the input and all problems."""
    settings, sources, problems = load_settings(environ)
    fix = "Unset it, and give verl's own option: docs/verl.md names the counterparts"
    for name in sorted(name for name in FIELDS.keys() - SHARED if sources[name] == "environment"):
        problems.add(name, "verl does not read this setting of train_grpo.py", fix)
    model, folder = settings.MODEL_ID, Path(settings.MODEL_ID).absolute()
    if model != "tiny" and not folder.is_dir() and is_no_hub_id(model):
        problems.add(
            "MODEL_ID", f"{model!r} is neither a folder nor a Hub id", "Name an existing folder, or owner/name"
        )
    elif model in ("tiny", REAL_MODEL) or has_mxfp4(read_json(folder / "config.json", (OSError, ValueError))):
        reason = "its experts are in MXFP4, and verl trains 16 bits"
        problems.add(f"MODEL_ID={model}", reason, "Name another model, or dequantize it: docs/verl.md")
    if settings.INVALID_REWARD is not None and settings.INVALID_REWARD != settings.INVALID_REWARD:
        problems.add("INVALID_REWARD=nan", "verl leaves no completion out", "Set a number, or unset it")
    if settings.ENVIRONMENT:
        problems.add("ENVIRONMENT", "verl gets rows that are one answer each", "Unset it, or run train_grpo.py")
    check_output_dir(settings, problems)
    split = read_split(choose_demo(settings, sources)[0], problems, train_only=stage == "sft")
    rows, eval_rows, specs = as_messages(split.train, problems), [], []
    if stage != "sft":
        eval_rows = as_messages(split.heldout, problems)
        specs = check_rewards(settings, choose_rewards(settings.REWARDS, rows).value, rows, problems)[0]
        check_heldout(specs, settings, eval_rows, problems)
    if "overlong" in dict(specs):
        reason, fix = "verl has its own limit", "Write a function that gets `completion_ids`: docs/data.md"
        problems.add("REWARDS=overlong", reason, fix)
    model = str(folder) if folder.is_dir() else model
    output_dir = Path(settings.OUTPUT_DIR).absolute()
    return VerlInput(model, output_dir, rows, eval_rows, specs, settings.INVALID_REWARD), problems


def to_records(split: str, rows: Iterable[Row], columns: Mapping[str, None]) -> list[dict[str, Any]]:
    """Rows as verl's data sets hold them, with `answer` for SFT. A row gets None in each of `columns` that it lacks.

    `extra_info` holds the whole row as JSON, because a Parquet column has one type and a user's cells may have several:
    thus reward functions get the same values as from train_grpo.py, but what JSON lacks, such as a date, as text."""
    records: list[dict[str, Any]] = []
    for index, row in enumerate(rows):
        answer, filled = answer_of(row) or "", dataclasses.replace(row, columns=dict(columns) | row.columns)
        prompt = [{"role": role, "content": text} for role, text in row.messages]
        truth = {"style": "rule", "ground_truth": final_channel(answer) or answer}
        info = {"split": split, "index": index, "row": json.dumps(dataclasses.asdict(filled), default=str)}
        record = {"data_source": label(row.file), "answer": answer, "prompt": prompt, "reward_model": truth}
        records.append(record | {"extra_info": info})
    return records


def write_data(data: VerlInput) -> None:
    """Writes train.parquet, heldout.parquet and rewards.json into OUTPUT_DIR/data."""
    import pyarrow
    from pyarrow import parquet  # Imported here, so that --help works without pyarrow.

    folder = data.output_dir / "data"
    folder.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(name for row in data.rows for name in row.columns)
    # verl requires held-out rows even where it never validates.
    for split, rows in (("train", data.rows), ("heldout", data.eval_rows or data.rows)):
        with whole_file(folder / f"{split}.parquet") as path:
            parquet.write_table(pyarrow.Table.from_pylist(to_records(split, rows, columns)), path)
    # A user's module of reward functions lies in this folder, to which verl's workers change.
    spec = {"rewards": data.reward_specs, "INVALID_REWARD": data.invalid_reward, "folder": os.getcwd()}
    write_text(folder / "rewards.json", json.dumps(spec))
