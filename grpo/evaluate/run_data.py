# SPDX-License-Identifier: Apache-2.0
"""What a run's folder holds, read for its report and for watching it, also while the run goes on writing."""

from __future__ import annotations

import csv
import functools
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas

from grpo.data.files import data_fingerprint, read_rows
from grpo.data.formats import is_dataset
from grpo.data.heldout import hold_out
from grpo.run import durable
from grpo.run.logs import COMPLETIONS, EVALUATED, METRICS, function_column
from grpo.settings import Problems, listed

FUNCTION = function_column("")  # begin of the columns of reward functions
ROWS = 400  # of a log that are read at once: completions are long
EXAMPLES = 3  # completions shown of each kind
HEAD, TAIL = 3000, 1500  # characters of a completion that are shown from its begin and its end
# A file that is missing or damaged says nothing.
read_json = functools.partial(durable.read_json, empty=(OSError, ValueError))
PHASES = ("wake", "handover", "generation", "sleep", "reward", "learn")  # of a step, in order


class ReportError(RuntimeError):
    """There is nothing to report on, or nowhere to write; the message says what to do."""


class Beginning(io.FileIO):
    """The first `size` bytes of a file."""

    size = 0

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[: max(0, self.size - self.tell())])


def whole_size(path: Path) -> int:
    """Bytes of a CSV up to the end of its last whole row."""
    end = place = quotes = 0
    with path.open("rb") as file:
        for line in file:
            place += len(line)
            quotes += line.count(b'"')
            if line.endswith(b"\n") and quotes % 2 == 0:  # else this line feed is inside a cell: not the end of a row
                end = place
    return end


def read_log(path: Path, columns: Iterable[str]) -> Iterator[pandas.DataFrame]:
    """metrics.csv or completions.csv, of which ROWS at a time are in memory: `step` a whole number, all else text.

    A last row that is half written is left out; columns that the file lacks (it is older) are empty. Raises ReportError
    where the file is not a log of this project, OSError where it cannot be read.
    """
    options = {"dtype": str, "na_filter": False, "encoding_errors": "replace", "on_bad_lines": "skip"}
    with Beginning(path) as file:
        if not (size := whole_size(path)):
            yield pandas.DataFrame(columns=list(columns), dtype=str).astype({"step": int})
            return
        file.size = size
        try:
            for found in pandas.read_csv(io.BufferedReader(file), chunksize=ROWS, **options):
                if "step" not in found:
                    raise ReportError(f"{path} has no column `step`: it is not a log of train_grpo.py")
                known = found[found["step"].str.fullmatch(r"\d{1,9}").astype(bool)]
                yield known.reindex(columns=list(columns), fill_value="").fillna("").astype({"step": int})
        except ValueError as error:  # pandas' own errors are ValueErrors
            raise ReportError(f"{path} cannot be read as CSV ({error}); was it edited by another program?") from None


def finite(values: pandas.Series) -> pandas.Series:
    """Text as numbers; NaN for what is none or not finite."""
    numbers = pandas.to_numeric(values, errors="coerce").astype(float)
    return numbers.where(numbers.abs() < math.inf)


def read_metrics(path: Path) -> pandas.DataFrame:
    """metrics.csv, one row a step in their order; every column but `step` and `time` holds floats, NaN where it is empty.

    Of two rows for one step the later counts. Raises as `read_log`.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        own = [name for name in next(csv.reader(file), []) if name.startswith(FUNCTION)]
    columns = dict.fromkeys([*METRICS, *EVALUATED, *own])
    found = pandas.concat(read_log(path, columns), ignore_index=True)
    found = found.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)
    numbers = [name for name in columns if name not in ("step", "time")]
    return found.assign(**{name: finite(found[name]) for name in numbers})


def phase_seconds(metrics: pandas.DataFrame) -> pandas.DataFrame:
    """Seconds of each step by phase, columns PHASES; what was not measured is 0. Generation is the rest of the rollout."""
    spent = metrics[[f"{name}_s" for name in ("rollout", *PHASES) if name != "generation"]].fillna(0.0)
    spent.columns = [name.removesuffix("_s") for name in spent]
    generation = spent["rollout"] - spent["wake"] - spent["handover"] - spent["sleep"]
    return spent.assign(generation=generation.clip(lower=0.0))[list(PHASES)]


def number(value: Any) -> float:
    """A finite number, or NaN for anything else (an empty cell, `inf`, None)."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        return math.nan
    return result if math.isfinite(result) else math.nan


def part(found: Any, *names: str) -> dict[str, Any]:
    """The object at a path of names inside JSON; an empty one where there is none, or something else."""
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def interval(result: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """A figure and the ends of its 95% interval; NaN where they are missing."""
    value, low, high = (number(result.get(name + end)) for end in ("", "_low", "_high"))
    return value, low, high


def spread(result: Mapping[str, Any], name: str, digits: str = ".3f", label: str = "") -> str:
    """A figure with its 95% interval where there is one: `0.521 (0.480 to 0.560)`; `-` without the figure."""
    value, low, high = interval(result, name)
    if math.isnan(value):
        return "-"
    return f"{value:{digits}}" + ("" if math.isnan(low + high) else f" ({label}{low:{digits}} to {high:{digits}})")


FUNCTIONS_HEADER = [
    "Reward function", "First steps", "Last steps", "Held out, base", "Held out, trained", "Trained, greedy",
]  # fmt: skip


def function_rows(metrics: pandas.DataFrame, evaluation: Mapping[str, Any], steps: int) -> list[list[str]]:
    """What each reward function of the run gave on average, below FUNCTIONS_HEADER: over the first and the last `steps`
    training steps, and on the held-out prompts. Empty for runs of earlier versions."""
    rows = []
    for column in (name for name in metrics if name.startswith(FUNCTION)):
        name, values = column.removeprefix(FUNCTION), metrics[column].dropna()
        means = [f"{some.mean():.3f}" if len(some) else "-" for some in (values.head(steps), values.tail(steps))]
        models = (part(evaluation, key, "functions", name) for key in ("before", "after", "after_greedy"))
        rows.append([name, *means, *(spread(one, "reward") for one in models)])
    return rows


def duration(seconds: float) -> str:
    """`6.7 s`, or `1:02:03` from a minute on; `-` where it is not known."""
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


HELDOUT_HEADER = ["", "Reward", "Regret", "Parse rate", "Best action", "Clipped", "Tokens"]


def heldout_rows(evaluation: Mapping[str, Any]) -> list[list[str]]:
    """The table of evaluation.json, below HELDOUT_HEADER: the model before and after training between its references."""
    rows = []
    if "oracle" in evaluation:  # its rows have rewards of their actions
        rows.append(["random action", spread(evaluation, "random")])
        rows.append([f"always [{evaluation.get('constant_action')}]", spread(evaluation, "constant")])
    models = (("before", "base model"), ("after", "trained"))
    for key, label in (*models, *((f"{key}_greedy", f"{label}, greedy") for key, label in models)):
        if found := part(evaluation, key):
            figures = [spread(found, name) for name in ("reward", "regret")]
            figures += [spread(found, name, ".2f") for name in ("parse_rate", "best_action_rate", "clipped_ratio")]
            lengths = [number(found.get(name)) for name in ("tokens_mean", "tokens_max")]
            length = "-" if math.isnan(sum(lengths)) else ", ".join(f"{one:,.0f}" for one in lengths)
            rows.append([label, *figures, length])
    rows += [["oracle", spread(evaluation, "oracle")]] if "oracle" in evaluation else []
    return [row + [""] * (len(HELDOUT_HEADER) - len(row)) for row in rows]


@dataclass
class Completions:
    """What the report needs of completions.csv: actions by step ('' where none was named) and the rows to show."""

    count: int
    actions: pandas.DataFrame  # how many completions: a row for each step, a column for each action
    examples: dict[str, pandas.DataFrame]  # by what is shown of them


def cut(text: str) -> str:
    """A completion as it is shown: control characters made visible, and the middle of a long one left out."""
    left_out = len(text) - HEAD - TAIL
    if left_out > 0:
        text = f"{text[:HEAD]}\n[... {left_out:,} characters left out ...]\n{text[-TAIL:]}"
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]", "\ufffd", text)


def examples_of(rows: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """The first of every kind among rows of completions.csv, one for each prompt; of equal ones the latest."""
    rows = rows.assign(reward=finite(rows["reward"])).sort_values("step", ascending=False, kind="stable")
    named, truncated = rows["parsed_action"] != "", rows["truncated"] == "1"
    best = rows[rows["reward"].notna()].sort_values("reward", ascending=False, kind="stable")
    # Data without reward columns names no actions at all: there every completion may be the worst.
    worst = rows[rows["reward"].notna() & (named | (rows["best_action"] == ""))].sort_values("reward", kind="stable")
    kinds = {
        "Highest reward": best,
        "Lowest reward of an answer that parses": worst,
        "No action could be read": rows[~named & ~truncated & (rows["best_action"] != "")],
        "Truncated at MAX_COMPLETION_LEN": rows[truncated],
    }
    return {title: ranked.drop_duplicates("prompt_id").head(EXAMPLES) for title, ranked in kinds.items()}


def read_prompts(record: Mapping[str, Any]) -> dict[str, str]:
    """The run's prompts by prompt_id, from the training data that settings.json names; empty where that is gone or others
    rows by now."""
    if any(is_dataset(name) for name in listed(str(part(record, "settings").get("DATA", "")))):
        return {}  # a report asks no network
    data, system = (str(part(record, "settings").get(name, "")) for name in ("DATA", "SYSTEM_PROMPT"))
    rows = read_rows("DATA", data, Problems(), system)
    share = part(record, "settings").get("EVAL_SHARE")
    splits = [rows, hold_out(rows, share).train if isinstance(share, float) else rows]  # with EVAL_DATA=auto the latter
    same = rows and record.get("data_sha256") in map(data_fingerprint, splits)
    return {row.id: "\n".join(text for _, text in row.messages) for row in rows} if same else {}


def read_completions(path: Path, record: Mapping[str, Any] | None = None) -> Completions:
    """completions.csv, of which only what is shown is kept; `record`: settings.json. Raises as `read_log`; a missing file is
    an empty one."""
    columns = dict.fromkeys([*COMPLETIONS, "prompt"])  # the latter where the file has it, else from the data
    parts = read_log(path, columns) if path.is_file() else [pandas.DataFrame(columns=list(columns), dtype=str)]
    best, actions = None, []
    for rows in parts:
        actions.append(rows.groupby(["step", "parsed_action"]).size())
        rows = pandas.concat([best, rows])  # in the order of the file, which tells equal ones apart
        best = rows[rows.index.isin([place for few in examples_of(rows).values() for place in few.index])]
    sums = pandas.concat(actions).groupby(level=[0, 1]).sum()
    prompts = read_prompts(record) if record and not best["prompt"].all() else {}
    logged = [text or prompts.get(name, "") for name, text in zip(best["prompt_id"], best["prompt"], strict=True)]
    best = best.assign(completion=best["completion"].map(cut), prompt=[cut(text) for text in logged])
    return Completions(int(sums.sum()), sums.unstack(fill_value=0), examples_of(best))


@dataclass
class Run:
    """Everything that a report is made of."""

    folder: Path
    metrics: pandas.DataFrame
    completions: Completions
    record: dict[str, Any]  # settings.json
    evaluation: dict[str, Any]
    closed_loop: dict[str, Any]
    best: dict[str, Any] = field(default_factory=dict)  # best/best.json

    @property
    def settings(self) -> Mapping[str, Any]:
        return part(self.record, "settings")

    @property
    def columns(self) -> list[str]:
        """The columns of metrics.csv in which a step has a value; on a CPU those about GPU and vLLM have none."""
        return [name for name in self.metrics if (self.metrics[name].notna() & (self.metrics[name] != "")).any()]

    @property
    def steps(self) -> int:
        return int(self.metrics["step"].max()) if len(self.metrics) else 0

    @property
    def total(self) -> int | None:
        total = self.settings.get("TOTAL_STEPS")
        return total if isinstance(total, int) else None

    @property
    def rewards(self) -> str:
        """REWARDS, as set or as chosen."""
        chosen = part(self.record, "choices").get("rewards")
        return str(self.settings.get("REWARDS") or (chosen[0] if isinstance(chosen, list) and chosen else "action"))

    def evaluated(self) -> pandas.DataFrame:
        """Columns EVALUATED by evaluated step, with the base model as step 0; empty where no step was evaluated."""
        found = self.metrics.set_index("step").reindex(columns=EVALUATED).astype(float).dropna(how="all")
        for step, when, who in ((0, "before", "base"), (self.steps, "after", "trained")):
            if len(found) and step not in found.index:
                plant = part(self.closed_loop, "totals", who)
                reward = part(self.evaluation, when).get("reward")
                values = reward, plant.get("regret_percent"), plant.get("unserved_kwh")
                found.loc[step] = [number(value) for value in values]
        return found.dropna(how="all").sort_index()


def read_run(folder: Path) -> Run:
    """Raises ReportError where the folder holds no run."""
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder. Name a run's OUTPUT_DIR")
    if not (folder / "metrics.csv").is_file():
        raise ReportError(f"{folder}: no metrics.csv. Name a run's OUTPUT_DIR, after the run has loaded its model")
    names = ("settings", "evaluation", "closed_loop", "best/best")
    record, *found = (read_json(folder / f"{name}.json") for name in names)
    completions = read_completions(folder / "completions.csv", record)
    return Run(folder, read_metrics(folder / "metrics.csv"), completions, record, *found)
