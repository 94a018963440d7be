# SPDX-License-Identifier: Apache-2.0
"""What a run's folder holds, read for its report."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.run.logs import METRICS

EXAMPLES = 3  # completions shown of each kind
HEAD, TAIL = 3000, 1500  # characters of a completion that are shown from its begin and its end
SHORT = 300  # characters up to which a completion is not folded


class ReportError(RuntimeError):
    """There is nothing to report on, or nowhere to write; the message says what to do."""


def read_log(path: Path) -> Iterator[dict[str, str]]:
    """Whole rows of metrics.csv or completions.csv, as text by column, also while the run goes on writing.

    A last row that is half written (no line end, or cells missing) is left out. Raises ReportError where the file is
    not a log of this project.
    """

    def lines(file: Iterable[str]) -> Iterator[str]:
        for line in file:
            if line.endswith(("\n", "\r")):  # only the last can lack it
                yield line.replace("\0", "")

    limit = csv.field_size_limit(sys.maxsize)  # csv's own limit is 128 KiB a cell; a completion may be longer
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.reader(lines(file))
            header = next(rows, None)
            if header is not None and "step" not in header:
                raise ReportError(f"{path} has no column `step`: it is not a log of train_grpo.py")
            for cells in rows:
                if len(cells) == len(header) and cells[header.index("step")].isdigit():
                    yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ReportError(f"{path} cannot be read as CSV ({error}); was it edited by another program?") from None
    finally:
        csv.field_size_limit(limit)


def number(value: Any) -> float:
    """A finite number, or NaN for anything else (an empty cell, `inf`, None)."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        return math.nan
    return result if math.isfinite(result) else math.nan


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of metrics.csv in order of their steps: `step` a whole number, every other column but `time` a float.

    Columns that the file lacks (it is older) are NaN. Of two rows for one step the later counts.
    """
    rows = {}
    for cells in read_log(path):
        row = {name: number(cells.get(name)) for name in METRICS}
        rows[int(cells["step"])] = row | {"step": int(cells["step"]), "time": cells.get("time", "")}
    return [rows[step] for step in sorted(rows)]


def part(found: Any, *names: str) -> dict[str, Any]:
    """The object at a path of names inside JSON; an empty one where there is none, or something else."""
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


@dataclass(frozen=True)
class Example:
    """A completion that is shown; `text` is cut already."""

    step: int
    prompt_id: str
    action: str
    best_action: str
    reward: float
    tokens: str
    truncated: bool
    text: str
    rank: tuple[float, int] = (0.0, 0)

    @property
    def folded(self) -> bool:
        return len(self.text) > SHORT or self.text.count("\n") > 4

    @property
    def facts(self) -> str:
        action = f"action [{self.action}]" if self.action else "no action"
        best = f" (best [{self.best_action}])" if self.best_action else ""
        reward = "none" if math.isnan(self.reward) else f"{self.reward:.3g}"
        cut = ", truncated" if self.truncated else ""
        return f"step {self.step}, prompt {self.prompt_id}: {action}{best}, reward {reward}, {self.tokens} tokens{cut}"


KINDS = {
    "best": "Highest reward",
    "worst": "Lowest reward of an answer that parses",
    "unparsed": "No action could be read",
    "truncated": "Truncated at MAX_COMPLETION_LEN",
}


@dataclass
class Completions:
    """What the report needs of completions.csv: actions by step ('' where none was named) and some examples."""

    count: int = 0
    actions: dict[int, Counter[str]] = field(default_factory=dict)
    examples: dict[str, list[Example]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def keep(self, kind: str, example: Example) -> None:
        """Keep the example if it ranks among the first of its kind; one for each prompt."""
        held = self.examples[kind]
        rivals = [one for one in held if one.prompt_id == example.prompt_id] or (held if len(held) >= EXAMPLES else [])
        lowest = min(rivals, key=lambda one: one.rank, default=None)
        if lowest is not None:
            if lowest.rank >= example.rank:
                return
            held.remove(lowest)
        held.append(example)
        held.sort(key=lambda one: one.rank, reverse=True)


def cut(text: str) -> str:
    """A completion as it is shown: control characters made visible, and the middle of a long one left out."""
    left_out = len(text) - HEAD - TAIL
    if left_out > 0:
        text = f"{text[:HEAD]}\n[... {left_out:,} characters left out ...]\n{text[-TAIL:]}"
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", "\ufffd", text)


def read_completions(path: Path) -> Completions:
    """One pass over completions.csv, whatever its size; recent steps are preferred as examples."""
    found = Completions()
    if not path.is_file():
        return found
    for cells in read_log(path):
        step, action, reward = int(cells["step"]), cells.get("parsed_action", ""), number(cells.get("reward"))
        found.count += 1
        found.actions.setdefault(step, Counter())[action] += 1
        truncated, best = cells.get("truncated") == "1", cells.get("best_action", "")
        ranks = {
            "best": None if math.isnan(reward) else (reward, step),
            # Data without reward columns names no actions at all: there every completion may be the worst.
            "worst": (-reward, step) if not math.isnan(reward) and (action or not best) else None,
            "unparsed": None if action or truncated else (0.0, step),
            "truncated": (0.0, step) if truncated else None,
        }
        for kind, rank in ranks.items():
            held = found.examples[kind]
            if rank is not None and (len(held) < EXAMPLES or rank > held[-1].rank):
                text = cut(cells.get("completion", ""))
                prompt = cells.get("prompt_id", "")[:120]
                found.keep(kind, Example(step, prompt, action, best, reward, cells.get("tokens", ""), truncated, text, rank))  # fmt: skip
    return found


@dataclass
class Run:
    """Everything that a report is made of."""

    folder: Path
    metrics: list[dict[str, Any]]
    completions: Completions
    record: dict[str, Any]  # settings.json
    evaluation: dict[str, Any]
    closed_loop: dict[str, Any]

    @property
    def settings(self) -> Mapping[str, Any]:
        return part(self.record, "settings")

    @property
    def steps(self) -> int:
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def total(self) -> int | None:
        total = self.settings.get("TOTAL_STEPS")
        return total if isinstance(total, int) else None

    def values(self, column: str) -> list[float]:
        return [row[column] for row in self.metrics]


def read_run(folder: Path) -> Run:
    """Raises ReportError where the folder holds no run."""
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder. Name a run's OUTPUT_DIR")
    if not (folder / "metrics.csv").is_file():
        raise ReportError(
            f"{folder}: there is no metrics.csv. Name a run's OUTPUT_DIR, after the run has loaded its model"
        )
    return Run(
        folder,
        read_metrics(folder / "metrics.csv"),
        read_completions(folder / "completions.csv"),
        *(read_json(folder / f"{name}.json") for name in ("settings", "evaluation", "closed_loop")),
    )
