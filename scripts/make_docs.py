#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the parts of the documentation that code and recorded figures already hold, so that no fact stands twice.

    python scripts/make_docs.py             write the marked parts of README.md and docs/
    python scripts/make_docs.py --check     change nothing; exit code 1 and the file's name where one is out of date

The marked parts lie between comments: NAME: begin, NAME: end.
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
from grpo.settings import ROOT, fold, settings_table

# What a first real run decides beside DATA and OUTPUT_DIR, which stand in the README's commands.
KEY_SETTINGS = (
    "REWARDS", "TOTAL_STEPS", "PROMPTS_PER_STEP", "NUM_GENERATIONS", "MAX_COMPLETION_LEN", "LEARNING_RATE", "LORA_R",
)  # fmt: skip


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; `|` inside a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def settings_tables() -> str:
    """Every setting by group."""
    groups: dict[str, list[list[str]]] = {}
    for group, name, default, tiny, unit, text in settings_table():
        default = f"`{default}`" + (f"; tiny: `{tiny}`" if tiny else "")
        groups.setdefault(group, []).append([f"`{name}`", default, unit, text])
    header = ["Setting", "Default", "Unit and limits", "Meaning"]
    return "\n\n".join(f"## {group}\n\n{table(header, rows)}" for group, rows in groups.items())


def columns_table(columns: Mapping[str, tuple[str, str]]) -> str:
    """Every column of a log, from (unit, meaning) by name."""
    return table(["Column", "Unit", "Meaning"], [[f"`{name}`", unit, text] for name, (unit, text) in columns.items()])


def measured(name: str) -> dict[str, float]:
    """The values of docs/results/NAME by the names of their figures."""
    record = json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))
    return {figure["name"]: figure["value"] for figure in record["figures"]}


def headline() -> str:
    """The README's sentence about speed and memory."""
    without, step = measured("generate-h200.json"), measured("step-h200.json")
    speedup = step["rollout_tok_s"] / without["generate_tok_s"]
    text = f"""On one H200, with random weights, rollouts reach {step["rollout_tok_s"]:,.0f} tokens/s,
        {speedup:.1f} times those without vLLM, and the default job, with completions of up to 4,000 tokens, peaks at
        {step["job_peak_bf16_gib"]:.0f} GiB ([figures](docs/learner.md#measured))."""
    text = " ".join(text.split())
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def step_bars() -> list[tuple[str, float, float, float]]:
    """The bars of the README's picture: (label, seconds of rollout, seconds of learning, peak in GiB)."""
    step, shared = measured("step-h200.json"), measured("shared-h200.json")
    # TRL's path learned from the same rollouts, in the fastest micro-batches that fit into this learner's memory.
    trl_peak = shared["bf16_job_peak_gib"] - step["w1_learn_peak_gib"] + step["w1_trl_peak_gib"]
    bars = [("TRL's padded path, same rollouts", step["w1_rollout_s"], step["w1_learn_trl_s"], trl_peak)]
    for label, name in (("EXPERTS=bf16", "bf16"), ("EXPERTS=shared", "shared"), ("shared, 22 GiB free", "shared_22")):
        bars.append((label, *(shared[f"{name}_{figure}"] for figure in ("rollout_s", "learn_s", "job_peak_gib"))))
    return bars


def step_picture() -> str:
    """An SVG of the time of one step and the GPU memory that it needs, beside TRL's own learning path."""
    bars = step_bars()
    per_second, per_gib = 330 / max(rollout + learning for _, rollout, learning, _ in bars), 3.6
    parts = [
        f"""<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{78 + 34 * len(bars)}"
    font-family="sans-serif" font-size="13" fill="#333"><rect width="100%" height="100%" fill="#fff"/>
<text x="220" y="22" font-weight="bold">seconds a step of 12 x 8 x 512 tokens</text>
<text x="640" y="22" font-weight="bold">GiB of GPU memory at the peak</text>
<rect x="220" y="34" width="12" height="12" fill="#9ecae1"/><text x="237" y="45">rollout</text>
<rect x="300" y="34" width="12" height="12" fill="#0b6e99"/><text x="317" y="45">learning</text>"""
    ]
    for number, (label, rollout, learning, gib) in enumerate(bars):
        top = 58 + 34 * number
        left, right, end = rollout * per_second, learning * per_second, (rollout + learning) * per_second + 226
        parts.append(f"""<text x="210" y="{top + 16}" text-anchor="end">{label}</text>
<rect x="220" y="{top}" width="{left:.1f}" height="22" fill="#9ecae1"/>
<rect x="{220 + left:.1f}" y="{top}" width="{right:.1f}" height="22" fill="#0b6e99"/>
<text x="{end:.1f}" y="{top + 16}">{rollout + learning:.1f}</text>
<rect x="640" y="{top}" width="{gib * per_gib:.1f}" height="22" fill="#888"/>
<text x="{646 + gib * per_gib:.1f}" y="{top + 16}">{gib:.1f}</text>""")
    return "\n".join([*parts, "</svg>"]) + "\n"


def key_settings() -> str:
    """The README's table of the settings that a first run decides."""
    rows = [[f"`{row[1]}`", f"`{row[2]}`", row[5]] for row in settings_table() if row[1] in KEY_SETTINGS]
    return table(["Setting", "Default", "Meaning"], rows)


# Pages, and what stands on them between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"measured": headline, "key settings": key_settings},
    "docs/settings.md": {"settings": settings_tables},
    "docs/metrics.md": {
        "metrics.csv": functools.partial(columns_table, METRICS),
        "completions.csv": functools.partial(columns_table, COMPLETIONS),
    },
}

PICTURE = "docs/step.svg"


def renewed(page: str) -> str:
    """The page with its generated parts written again."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in GENERATED[page].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def is_current(path: Path, text: str) -> bool:
    """Whether a file holds this text already."""
    return path.is_file() and path.read_text(encoding="utf-8") == text


def main() -> int:
    parser = argparse.ArgumentParser(description=fold(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    new = {page: renewed(page) for page in GENERATED} | {PICTURE: step_picture()}
    stale = [page for page, text in new.items() if not is_current(ROOT / page, text)]
    if check and stale:
        print(f"out of date: {', '.join(stale)}. Run `python scripts/make_docs.py`", file=sys.stderr)
        return 1
    for page in stale:
        (ROOT / page).write_text(new[page], encoding="utf-8")
    print(f"written: {', '.join(stale)}" if stale else "up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
