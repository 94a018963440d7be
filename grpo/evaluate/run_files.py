# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a run's folder, for its report, for the card of its adapter and for scripts/watch.py."""

import functools
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas

from grpo.common import InputError, Problems, printable, split_commas, without_surrogates
from grpo.data.files import data_fingerprint, in_template, read_rows
from grpo.data.formats import is_dataset
from grpo.data.heldout import hold_out
from grpo.figures.text import finite_number, object_at
from grpo.output import durable
from grpo.output.logs import COMPLETIONS, EPISODE_COLUMNS, EPISODE_METRICS, EVALUATED, METRICS, PROMPT, function_column
from grpo.tasks.simulator import START, Simulator, load_simulator

FUNCTION = function_column("")  # prefix of the columns of reward functions
ROWS = 400  # rows of completions.csv in memory at once: completions are long
EXAMPLES = 2  # completions that the report shows of each kind
HEAD, TAIL = 3000, 1500  # characters that the report shows of the start and the end of a long text
# A missing or damaged file counts as empty here, because a run that is watched may be writing it.
read_json = functools.partial(durable.read_json, empty=(OSError, ValueError))


def finite_numbers(values: pandas.Series) -> pandas.Series:
    """Text as numbers, with NaN for text that is no finite number."""
    numbers = pandas.to_numeric(values, errors="coerce").astype(float)
    return numbers.where(numbers.abs() < math.inf)


def read_metrics(path: Path) -> pandas.DataFrame:
    """The table of metrics.csv: `step` holds whole numbers, `time` and `ends` text, every other column finite numbers
    or NaN. Raises InputError if the file is not the log of a run."""
    try:
        durable.regular_file_size(path)
    except ValueError as error:
        raise InputError(f"{path.parent}: {error}") from None
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]  # a row without a line feed is still being written
    try:
        rows = pandas.read_csv(io.StringIO(whole or "step\n"), dtype=str, on_bad_lines="skip")
    except ValueError as error:  # pandas' own errors are ValueErrors
        raise InputError(f"{path} cannot be read as CSV ({error}); was it edited by another program?") from None
    if "step" not in rows:
        raise InputError(f"{path} has no column `step`: it is not a log of train_grpo.py")
    functions = [name for name in rows if name.startswith(FUNCTION)]
    rows = rows.reindex(columns=[*METRICS, *functions, *EPISODE_METRICS])
    rows = rows.assign(**{name: finite_numbers(rows[name]) for name in rows if name not in ("time", "ends")})
    return rows.dropna(subset="step").astype({"step": int}).reset_index(drop=True)


def duration(seconds: float) -> str:
    """A duration as text: `6.7 s`, or `1:02:03` from a minute on; `-` for NaN."""
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def excerpt(text: str) -> str:
    """A text for the report: control characters are replaced, and the middle of a long text is left out."""
    excess = len(text) - HEAD - TAIL
    if excess > 0:
        text = f"{text[:HEAD]}\n[... {excess:,} characters left out ...]\n{text[-TAIL:]}"
    return without_surrogates(printable(text))


def examples_of(rows: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """Up to EXAMPLES rows of completions.csv of each kind, of different prompts; among equals the latest come first."""
    rows = rows.assign(reward=finite_numbers(rows["reward"]), step=finite_numbers(rows["step"]))
    rows = rows.sort_values("step", ascending=False, kind="stable")
    truncated = rows["truncated"] == "1"
    unparsed = (rows["parsed_action"] == "") & (rows["best_action"] != "")  # Rows without actions have no best one.
    rewarded, answers = rows.dropna(subset="reward"), rows[~unparsed & ~truncated].dropna(subset="reward")
    kinds = {}
    if len(episodes := rows[rows["end"] != ""]):  # The same prompt before and after, where it came again.
        first = episodes[episodes["step"] == episodes["step"].min()]
        again = episodes[episodes["prompt_id"].isin(first["prompt_id"])]
        kinds = {"An episode of the first step": first.head(1), "An episode of the last steps": again.head(1)}
    kinds |= {
        "Highest reward": rewarded.sort_values("reward", ascending=False, kind="stable"),
        "Lowest reward of an answer that parses": answers.sort_values("reward", kind="stable"),
        "No action could be read": rows[unparsed & ~truncated],
        "Cut off by a limit": rows[truncated],
    }
    return {kind: ranked.drop_duplicates("prompt_id").head(EXAMPLES) for kind, ranked in kinds.items() if len(ranked)}


def read_prompts(record: Mapping[str, Any]) -> dict[str, str]:
    """The run's prompts by prompt_id, from the DATA of settings.json; empty if it is missing or has changed since."""
    settings = object_at(record, "settings")
    data, system, share = (settings.get(name, "") for name in ("DATA", "SYSTEM_PROMPT", "EVAL_SHARE"))
    if any(is_dataset(name) for name in split_commas(data)):
        return {}  # a report must not need the network
    rows, template = read_rows("DATA", data, Problems(), system), settings.get("PROMPT_TEMPLATE", "{}")
    episodes = bool(settings.get("ENVIRONMENT"))
    # A run without EVAL_DATA held rows out.
    splits = (rows, hold_out(rows, share or 0.0, episodes).train)
    candidates = [in_template(split, template) for split in splits]
    if not rows or record.get("data_sha256") not in [data_fingerprint(split) for split in candidates]:
        return {}
    return {row.id: "\n".join(text for _, text in row.messages) for row in candidates[0]}


def read_examples(path: Path, record: Mapping[str, Any]) -> dict[str, pandas.DataFrame]:
    """The rows of completions.csv that the report shows, by kind, with their prompts. Prompts that the file lacks come
    from the training data named in `record`, which is settings.json."""
    rows = pandas.DataFrame(columns=[*COMPLETIONS, PROMPT, *EPISODE_COLUMNS], dtype=str)
    options = {"dtype": str, "na_filter": False, "encoding_errors": "replace", "on_bad_lines": "skip"}
    try:
        durable.regular_file_size(path)
        for chunk in pandas.read_csv(path, chunksize=ROWS, **options):
            chunk = chunk.reindex(columns=rows.columns, fill_value="").fillna("")
            kinds = examples_of(pandas.concat([rows, chunk], ignore_index=True)).values()
            rows = pandas.concat(kinds).drop_duplicates() if kinds else rows
    except (FileNotFoundError, ValueError):
        pass  # There is no completion yet, the last row is being written, or the file is no CSV.
    prompts = {} if rows[PROMPT].all() else read_prompts(record)
    texts = [text or prompts.get(name, "") for name, text in zip(rows["prompt_id"], rows[PROMPT], strict=True)]
    return examples_of(rows.assign(completion=rows["completion"].map(excerpt), prompt=list(map(excerpt, texts))))


@dataclass
class Run:
    """The figures and records of a run."""

    folder: Path
    metrics: pandas.DataFrame
    record: dict[str, Any]  # settings.json
    evaluation: dict[str, Any]
    closed_loop: dict[str, Any]
    best: dict[str, Any]  # best/best.json

    @property
    def settings(self) -> dict[str, Any]:
        return object_at(self.record, "settings")

    @property
    def choices(self) -> dict[str, tuple[Any, str]]:
        """The automatic choices that have a reason: value and reason by name."""
        choices = object_at(self.record, "choices").items()
        return {name: tuple(choice) for name, choice in choices if isinstance(choice, list) and len(choice) == 2}

    @property
    def steps(self) -> int:
        return int(self.metrics["step"].max()) if len(self.metrics) else 0

    @property
    def simulator(self) -> Simulator | None:
        """The simulator of the run's task; None if nothing was simulated."""
        return load_simulator(str(self.settings.get("TASK", "tes"))) if self.closed_loop else None

    def evaluated_steps(self) -> pandas.DataFrame:
        """The columns EVALUATED, indexed by the steps that were evaluated. Step 0 is before training: the adapter that
        the run starts from, or else the base model."""
        rows = self.metrics.set_index("step")[list(EVALUATED)].dropna(how="all")
        first = (0, START, START) if object_at(self.evaluation, START) else (0, "before", "base")
        for step, when, name in (first, (self.steps, "after", "trained")):
            figures = {"heldout_reward": object_at(self.evaluation, when).get("reward")}
            if self.simulator and object_at(self.closed_loop, "totals", name):
                figures |= self.simulator.figures(self.closed_loop, name)
            if step not in rows.index:
                rows.loc[step] = [finite_number(figures.get(column)) for column in EVALUATED]
        return rows.dropna(how="all").sort_index()


def read_run(folder: Path) -> Run:
    """Read the run in a folder. Raises InputError if there is no run, or if one of its records is damaged."""
    if not (folder / "metrics.csv").is_file():
        raise InputError(f"{folder}: no metrics.csv. Name a run's OUTPUT_DIR, after the run has loaded its model")
    names = ("settings", "evaluation", "closed_loop", "best/best")
    try:
        records = [durable.read_json(folder / f"{name}.json", empty=(FileNotFoundError,)) for name in names]
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from None
    return Run(folder, read_metrics(folder / "metrics.csv"), *records)
