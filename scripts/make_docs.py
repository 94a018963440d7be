#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the parts of the documentation that code and recorded figures already know, so that no fact stands in two places.

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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.run.logs import COMPLETIONS, METRICS
from grpo.settings import ROOT, fold, settings_table

ROLLOUT_RECORDS = {
    "`merge`, H200": "rollout-h200.json", "`lora`, H100": "rollout-lora-h100.json", "`lora`, experts too, H200": "expert-lora-h200.json",
}  # fmt: skip
SYNC_WAYS = {  # that were compared, under the names they had then
    "rounded at random: `merge` now": "stochastic", "a side path, deleted": "side", "rounded to the nearest, deleted": "merge",
}  # fmt: skip
SYNC_FIGURES = {
    "share that arrives of AdamW's first step": "{}_share_1", "of its tenth": "{}_share_10", "generation": "{}_tok_s",
    "weight sync, measuring the share included": "{}_sync_s", "measuring the share, timed alone": "{}_share_s",
    "mean mismatch, adapter of one step": "{}_small_mean", "mean mismatch, strong adapter": "{}_strong_mean",
}  # fmt: skip
CURVE_WAYS = {"`merge`": "merge", "`lora`": "lora", "plain TRL, transformers' `generate`": "trl"}
CURVE_FIGURES = {
    "held-out reward, exact at temperature 0.5, step 50": "reward_{}_50", "step 100": "reward_{}_100", "step 120, the last": "reward_{}_120",
    "of the likeliest answers, step 50": "greedy_reward_{}_50", "likeliest, step 100": "greedy_reward_{}_100", "likeliest, step 120": "greedy_reward_{}_120",
    "training, all three side by side on one GPU": "{}_s",
}  # fmt: skip
MANY_WAYS = {
    "1 GPU, 96 completions": "1x96", "2 GPUs, 192": "2x192", "2 GPUs, 96": "2x96", "1 GPU, 384": "1x384", "2 GPUs, 384": "2x384",
}  # fmt: skip
MANY_FIGURES = {
    "step": "{}_step_s", "rollout": "{}_rollout_s", "learning": "{}_learn_s", "tokens/s over the whole step": "{}_tok_s",
    "from the command to the first step": "{}_startup_s", "added up a step": "{}_reduced_mb",
}  # fmt: skip
HEADLINE = {  # the README's sentence: the record and the figure of each of its numbers
    "step": ("step-h200.json", "w1_step_s"),
    "learning": ("step-h200.json", "w1_learn_s"),
    "trl": ("step-h200.json", "w1_learn_trl_s"),
    "rollouts": ("step-h200.json", "rollout_tok_s"),
    "without vLLM": ("generate-h200.json", "generate_tok_s"),
    "peak": ("step-h200.json", "job_peak_bf16_gib"),
    "packed peak": ("step-h200.json", "w1_job_peak_mxfp4_gib"),
}
LAYERS = ("full", "window")  # of attention
PARTS = ("out", "q", "k", "v", "sinks")  # whose errors were measured
# What a first real run decides; everything else has a default that fits the TES data.
KEY_SETTINGS = (
    "MODEL_ID", "DATA", "TOTAL_STEPS", "PROMPTS_PER_STEP", "NUM_GENERATIONS", "MAX_COMPLETION_LEN", "LEARNING_RATE",
    "LORA_R", "REWARDS", "OUTPUT_DIR",
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


def measured(name: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Figures of docs/results/NAME by name, and the command, machine, date and commit that they come from; a command that
    is gone is in that commit."""
    record = json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))
    machine = record["machine"].split(";")[0]
    where = f"{machine}, {record['date']}, commit {record['commit'][:7]}"
    source = f"`{record['command']}` on {where}: [{name}](results/{name})."
    return {one["name"]: one for one in record["figures"]}, source


def in_words(figure: dict[str, Any]) -> str:
    """Value and unit, with four digits or those before the point."""
    value = figure["value"]
    return f"{value:,.0f} {figure['unit']}" if value >= 1000 else f"{value:.4g} {figure['unit']}"


def headline() -> str:
    """The README's sentence about speed and memory."""
    value = {word: measured(record)[0][name]["value"] for word, (record, name) in HEADLINE.items()}
    text = (
        "Measured on one H200, random weights in gpt-oss-20b's exact format: a step of 12 prompts x 8 completions x 512 "
        f"tokens takes {value['step']:.1f} s, {value['learning']:.1f} s of it learning (TRL's padded path: "
        f"{value['trl']:.1f} s); rollouts reach {value['rollouts']:,.0f} tokens/s, "
        f"{value['rollouts'] / value['without vLLM']:.1f} times those without vLLM. The default job, with completions of "
        f"up to 4,000 tokens, peaks at {value['peak']:.0f} GiB, with `EXPERTS=mxfp4` and 512 tokens at "
        f"{value['packed peak']:.0f} ([rollouts](docs/rollouts.md#measured), [learning](docs/learner.md#measured))."
    )
    return textwrap.fill(text, 150, break_long_words=False, break_on_hyphens=False)


def key_settings() -> str:
    """The README's table of the settings that a first run decides."""
    rows = [[f"`{row[1]}`", f"`{row[2]}`", row[5]] for row in settings_table() if row[1] in KEY_SETTINGS]
    return table(["Setting", "Default", "Meaning"], rows)


def figures_table(records: Mapping[str, str]) -> str:
    """Every figure of the first record and its value in each: files of docs/results/ by the heading of their column."""
    found, sources = zip(*map(measured, records.values()), strict=True)
    rows = [
        [f"`{name}`", *(in_words(figures[name]) if name in figures else "" for figures in found), one["note"]]
        for name, one in found[0].items()
    ]
    return table(["figure", *records, "what it is"], rows) + "\n\n" + "\n".join(sources)


def crossed_table(record: str, ways: Mapping[str, str], names: Mapping[str, str]) -> str:
    """A column for each of `ways`, whose word stands in the figures' `names`, and a line for each of these."""
    figures, source = measured(record)
    rows = [[text, *(in_words(figures[name.format(way)]) for way in ways.values())] for text, name in names.items()]
    return table(["", *ways], rows) + f"\n\n{source}"


def attention_table() -> str:
    """Error against float64 and time of every attention in attention-h100.json, the worse of full and window."""
    figures, source = measured("attention-h100.json")
    value, rows = {key: one["value"] for key, one in figures.items()}, []
    for name in [key.removesuffix("_usable") for key in value if key.endswith("_usable") and value[key]]:
        if name == "flex_attention":  # measured then, removed since: torch_flash is as fast and compiles nothing
            continue
        errors = [max(value[f"{name}_{layer}_{part}_error"] for layer in LAYERS) for part in PARTS]
        times = [value[f"{name}_{layer}_ms"] for layer in LAYERS]
        package = figures[f"{name}_usable"]["note"]
        rows.append([f"`{name}`", package, *(f"{e:.4f}" for e in errors), *(f"{ms:.2f} ms" for ms in times)])
    header = ["", "package", "output", *PARTS[1:], "full attention", "window of 128"]
    return table(header, rows) + f"\n\n{source}"


# Pages, and what stands on them between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"measured": headline, "key settings": key_settings},
    "docs/settings.md": {"settings": settings_tables},
    "docs/metrics.md": {
        "metrics.csv": functools.partial(columns_table, METRICS),
        "completions.csv": functools.partial(columns_table, COMPLETIONS),
    },
    "docs/rollouts.md": {
        "sync figures": functools.partial(crossed_table, "sync-h200.json", SYNC_WAYS, SYNC_FIGURES),
        "rollout figures": functools.partial(figures_table, ROLLOUT_RECORDS),
        "generate figures": functools.partial(figures_table, {"value": "generate-h200.json"}),
    },
    "docs/learner.md": {
        "step figures": functools.partial(figures_table, {"value": "step-h200.json"}),
        "curves figures": functools.partial(crossed_table, "curves-h200.json", CURVE_WAYS, CURVE_FIGURES),
        "attention figures": attention_table,
    },
    "docs/clusters.md": {"many figures": functools.partial(crossed_table, "many-gpus.json", MANY_WAYS, MANY_FIGURES)},
}


def renewed(page: str) -> str:
    """The page with its generated parts written again."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in GENERATED[page].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=fold(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    new = {page: renewed(page) for page in GENERATED}
    stale = [page for page, text in new.items() if (ROOT / page).read_text(encoding="utf-8") != text]
    if check and stale:
        print(f"out of date: {', '.join(stale)}. Run `python scripts/make_docs.py`", file=sys.stderr)
        return 1
    for page in stale:
        (ROOT / page).write_text(new[page], encoding="utf-8")
    print(f"written: {', '.join(stale)}" if stale else "up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
