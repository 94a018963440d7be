#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the parts of the documentation that code and recorded figures already know, so that no fact stands in two places.

python scripts/make_docs.py             write the marked parts of README.md and docs/
python scripts/make_docs.py --check     change nothing; exit code 1 and the file's name where one is out of date
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
from grpo.settings import ROOT, settings_table

ROLLOUT_FIGURES = {
    "rollout_tok_s": "vLLM, 96 completions x 512 tokens, prompts of about 930 tokens, adapter on",
    "hf_generate_tok_s": "transformers' generate, 16 of the same prompts x 128 tokens, same process",
    "hf_generate_many_tok_s": "the same with 48 at once x 64 tokens",
    "handover_s": "weight sync: the adapter into the engine",
    "sleep_s": "putting the engine to sleep",
    "wake_s": "waking it",
    "asleep_gib": "GPU memory that the engine holds asleep",
    "asleep_later_gib": "the same after three steps, with what the trainer took meanwhile",
    "start_to_rollout_s": "process start to first rollout, compile caches filled",
    "start_cold_s": "the same with empty compile caches",
    "long_rollout_s": "16 completions of up to 2,300 tokens",
    "long_step_s": "the whole step of those",
    "short_step_s": "the whole step of the 96 x 512 tokens",
    "same_seed_alike": "the same rollout twice with one seed: equal completions, of 96",
    "parity_mean": "mean difference of log-probs, vLLM against trainer",
    "parity_control_mean": "the same with the trainer's adapter off",
    "base_changed_elements": "elements of the trainer's base weights that changed, of 20.9 billion",
}
# The run with ROLLOUT_SYNC=lora did not find its kernels in the caches, so its start is no figure to compare.
ONLY_MERGE = ("start_to_rollout_s", "start_cold_s")
STEP_FIGURES = {
    "w1_step_s": "whole step, 12 x 8 x 512 tokens",
    "w1_learn_s": "its learning",
    "w1_learn_trl_s": "the same by TRL's padded path",
    "w1_floor_s": "the arithmetic alone at the card's peak",
    "w1_learn_mxfp4_s": "learning with `EXPERTS=mxfp4`",
    "w1_job_peak_mxfp4_gib": "peak of the whole job with `EXPERTS=mxfp4`, engine included, all but 40 GiB of the card occupied",
    "w2_learn_s": "learning from 96 completions of recorded lengths",
    "w2_learn_trl_s": "the same by TRL's padded path",
    "w3_step_s": "rollout and learning of 16 such completions",
    "w3_rollout_s": "of which the rollout takes",
    "long_learn_peak_gib": "memory beyond the weights while learning from completions of 4,000 tokens, 12 in a micro-batch",
    "long_head_gib": "of that, the log-probs of one micro-batch and their backward pass",
    "long_logits_gib": "what the logits of one micro-batch would take in float32",
    "logp_difference": "log-probs, mean difference to TRL's path",
    "logp_batching": "TRL's path against itself with other micro-batches",
    "logp_wrong_prompt": "the same with a wrong prompt",
    "gradient_difference": "gradients, difference to TRL's path",
    "gradient_batching": "TRL's path against itself with other micro-batches",
    "gradient_wrong_prompt": "the same with a wrong prompt",
    "plan_error_bf16": "plan of `--check` against the measured peak, less 1",
    "plan_error_mxfp4": "the same with `EXPERTS=mxfp4`",
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
    """Figures of docs/results/NAME by name, and the command, machine and date that they come from."""
    record = json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))
    machine = record["machine"].split(";")[0]
    source = f"`{record['command']}` on {machine}, {record['date']}: [{name}](results/{name})."
    return {one["name"]: one for one in record["figures"]}, source


def in_words(figure: dict[str, Any]) -> str:
    """Value and unit, with four digits or those before the point."""
    value = figure["value"]
    return f"{value:,.0f} {figure['unit']}" if value >= 1000 else f"{value:.4g} {figure['unit']}"


def headline() -> str:
    """The README's sentence about speed and memory."""
    records = (measured(name)[0] for name in ("rollout-h200.json", "step-h200.json"))
    rollout, step = ({key: one["value"] for key, one in record.items()} for record in records)
    text = (
        f"Measured on one H200: a step of 12 prompts x 8 completions x 512 tokens takes {step['w1_step_s']:.1f} s, "
        f"{step['w1_learn_s']:.1f} s of it learning (TRL's padded path: {step['w1_learn_trl_s']:.1f} s); vLLM generates "
        f"{rollout['rollout_tok_s']:,.0f} tokens/s, {rollout['speedup_many']:.0f} times transformers' `generate`; with "
        f"`EXPERTS=mxfp4` the whole job peaks at {step['w1_job_peak_mxfp4_gib']:.0f} GiB "
        "([rollouts](docs/rollouts.md#measured), [learning](docs/learner.md#measured))."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def key_settings() -> str:
    """The README's table of the settings that a first run decides."""
    rows = [[f"`{row[1]}`", f"`{row[2]}`", row[5]] for row in settings_table() if row[1] in KEY_SETTINGS]
    return table(["Setting", "Default", "Meaning"], rows)


def rollout_table() -> str:
    """Both values of ROLLOUT_SYNC side by side, from the runs of `bench.py rollout` with each."""
    (merge, one), (lora, other) = map(measured, ("rollout-h200.json", "rollout-lora-h100.json"))
    figures = [(text, merge[key], {} if key in ONLY_MERGE else lora[key]) for key, text in ROLLOUT_FIGURES.items()]
    rows = [[text, in_words(a), in_words(b) if b else ""] for text, a, b in figures]
    return table(["measured", "`merge`", "`lora`"], rows) + f"\n\n{one}\n{other}"


def step_table() -> str:
    """What a step takes in time and memory."""
    figures, source = measured("step-h200.json")
    rows = [[text, in_words(figures[key])] for key, text in STEP_FIGURES.items()]
    return table(["measured", ""], rows) + f"\n\n{source}"


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
    "docs/rollouts.md": {"rollout figures": rollout_table},
    "docs/learner.md": {"step figures": step_table, "attention figures": attention_table},
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
