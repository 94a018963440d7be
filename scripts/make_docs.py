#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the parts of the documentation that code and recorded figures already hold, so that nobody edits a fact twice.

    python scripts/make_docs.py

The marked parts of README.md and docs/ lie between comments: NAME: begin, NAME: end. tests/test_docs.py compares them.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.run.logs import COMPLETIONS, METRICS
from grpo.settings import MAY_CHANGE, ROOT, reflow, setting_rows

# The settings to choose for a first real run, besides DATA and OUTPUT_DIR, which stand in the README's commands.
KEY_SETTINGS = (
    "REWARDS", "TOTAL_STEPS", "PROMPTS_PER_STEP", "NUM_GENERATIONS", "MAX_COMPLETION_LEN", "LEARNING_RATE", "LORA_R",
)  # fmt: skip


HEADLINE = (
    "On an H200, with random weights, 12 x 8 completions of 512 tokens take {step} s and {memory} GiB a step, "
    "{four_steps} s with `STEPS_PER_GENERATION=4`, and {small_step} s and {small_memory} GiB with 22 free "
    "([figures](docs/learner.md#experts))."
)
JAPANESE_HEADLINE = """1 枚の H200 とランダムな重みでは、12 プロンプト × 8 応答（各 512 トークン）の 1 ステップは \
{step} 秒、{memory} GiB です。
`STEPS_PER_GENERATION=4` では {four_steps} 秒です。
空きメモリが 22 GiB だけの場合は、{small_step} 秒、{small_memory} GiB です（[測定結果](learner.md#experts)）。"""


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; `|` inside a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def settings_tables() -> str:
    """Every setting by group; a star marks those that may change when a run is resumed."""
    groups: dict[str, list[list[str]]] = {}
    for group, name, default, tiny, unit, text in setting_rows():
        default = f"`{default}`" + (f"; tiny: `{tiny}`" if tiny else "")
        star = "*" if name in MAY_CHANGE else ""
        groups.setdefault(group, []).append([f"`{name}`{star}", default, unit, text])
    header = ["Setting", "Default", "Unit and limits", "Meaning"]
    return "\n\n".join(f"## {group}\n\n{table(header, rows)}" for group, rows in groups.items())


def columns_table(columns: Mapping[str, tuple[str, str]]) -> str:
    """Every column of a log, from (unit, meaning) by name."""
    return table(["Column", "Unit", "Meaning"], [[f"`{name}`", unit, text] for name, (unit, text) in columns.items()])


def recorded_values(name: str) -> dict[str, float]:
    """The values of docs/results/NAME by the names of their figures."""
    record = json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))
    return {figure["name"]: figure["value"] for figure in record["figures"]}


def headline(template: str) -> str:
    """The sentence about speed and memory in a README, from its lines with names of figures in braces."""
    whole, steps, small = (
        recorded_values(f"{name}-h200.json") for name in ("experts-shared", "steps-per-generation", "experts-shared-22")
    )
    text = template.format(
        step=f"{whole['step_s']:.1f}",
        memory=f"{whole['job_peak_gib']:.0f}",
        four_steps=f"{steps['step_s']:.1f}",
        small_step=f"{small['step_s']:.1f}",
        small_memory=f"{small['job_peak_gib']:.0f}",
    )
    lines = (textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return "\n".join(lines)


def key_settings() -> str:
    """The README's table of the settings to choose for a first run."""
    rows = [[f"`{row[1]}`", f"`{row[2]}`", row[5]] for row in setting_rows() if row[1] in KEY_SETTINGS]
    return table(["Setting", "Default", "Meaning"], rows)


# Pages, and the functions that make their text between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"measured": functools.partial(headline, HEADLINE), "key settings": key_settings},
    "docs/README.ja.md": {"measured": functools.partial(headline, JAPANESE_HEADLINE)},
    "docs/settings.md": {"settings": settings_tables},
    "docs/metrics.md": {
        "metrics.csv": functools.partial(columns_table, METRICS),
        "completions.csv": functools.partial(columns_table, COMPLETIONS),
    },
}


def regenerated(page: str) -> str:
    """The text of a page, with its generated parts made anew."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in GENERATED[page].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for page in GENERATED:
        (ROOT / page).write_text(regenerated(page), encoding="utf-8")
    print(f"written: {', '.join(GENERATED)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
