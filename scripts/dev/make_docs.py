#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the parts of the documentation that code and recorded figures already hold, so that nobody edits a fact twice.

    python scripts/dev/make_docs.py

The marked parts of README.md and docs/ lie between comments: NAME: begin, NAME: end. docs/architecture.svg is made as a
whole. tests/test_docs.py compares them.
"""

import argparse
import bisect
import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo.common import ROOT, reflow
from grpo.figures.text import markdown_table
from grpo.output.logs import COMPLETIONS, METRICS
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.machine import Machine
from grpo.plan.memory import Plan, PlanInputs, plan_memory
from grpo.preflight.choices import choose_checkpointing, choose_experts
from grpo.process.ending import ExitCode
from grpo.settings.help import setting_rows
from grpo.settings.parsing import MAY_CHANGE
from grpo.settings.table import Settings
from scripts.dev import architecture, language_tables

PROMPT_TOKENS = 940  # of the longest TES prompt
LENGTHS = (512, Settings.MAX_COMPLETION_LEN)  # of the completions in the README's table of cards
# Name, compute capability, GiB that are free, and the results of 12 x 8 completions of 512 and of 4,000 tokens, if any.
CARDS = (
    ("RTX 4090, A10 (24 GB)", 8.9, 23.0),
    ("L40S, A6000 (48 GB)", 8.9, 46.0),
    ("A100 of 80 GB", 8.0, 78.6),
    ("Hopper with 22 GiB free", 9.0, 22.0, "experts-shared-22-h200.json", "experts-shared-22-4000-h200.json"),
    ("H100 of 80 GB, GH200", 9.0, 78.6, "experts-shared-h100.json"),
    ("H200", 9.0, 139.8, "experts-shared-h200.json", "experts-shared-4000-h200.json"),
)
table = functools.partial(markdown_table, longest_cell=2000)  # More than any cell has: nothing is cut.


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


def card_inputs(card: str, capability: float, free: float) -> PlanInputs:
    """What the plan of a run on a card with `free` GiB depends on."""
    machine = Machine(card, 1, free, free, 64.0, 16, "x86_64", capability)
    return PlanInputs(REAL_CONFIG, machine, PROMPT_TOKENS, "torch_flash", "prefix", beside_vllm=True)


def plan_for_card(card: str, capability: float, free: float, length: int) -> tuple[Settings, Plan]:
    """The settings that `auto` chooses on a card with `free` GiB for completions of `length` tokens, and their plan."""
    inputs = card_inputs(card, capability, free)
    settings = Settings(ROLLOUT_SYNC="merge", MAX_COMPLETION_LEN=length)
    settings = replace(settings, EXPERTS=choose_experts(settings, inputs).value)
    settings = replace(settings, GRADIENT_CHECKPOINTING=choose_checkpointing(settings, inputs).value)
    return settings, plan_memory(settings, inputs)


def longest_completion(settings: Settings, inputs: PlanInputs) -> int:
    """The most tokens, a multiple of 1,024, that fit behind the longest prompt into memory and the model's context."""

    def fits(length: int) -> bool:
        return inputs.fits(settings, {"MAX_COMPLETION_LEN": length, "GRADIENT_CHECKPOINTING": True})

    lengths = range(1024, REAL_CONFIG["max_position_embeddings"] - PROMPT_TOKENS + 1, 1024)
    return lengths[bisect.bisect_left(lengths, True, key=lambda length: not fits(length)) - 1]


def fitting_cards() -> str:
    """The README's table of cards: what the plan chooses and needs there, and what was measured."""
    rows = []
    for card, capability, free, *results in CARDS:
        (settings, short), (same, long) = (plan_for_card(card, capability, free, length) for length in LENGTHS)
        assert settings.EXPERTS == same.EXPERTS, f"{card}: EXPERTS depends on the length, which the table cannot show"
        seconds = [f"{recorded_values(result)['step_s']:.1f}" for result in results]
        peaks = [f"{plan.peak:.0f}" for plan in (short, long)]
        longest = f"{longest_completion(settings, card_inputs(card, capability, free)):,}"
        rows.append([card, f"`{settings.EXPERTS}`", *peaks, *seconds, *[""] * (2 - len(seconds)), longest])
    measures = [f"{measure}, {length:,} tokens" for measure in ("GiB", "s a step") for length in LENGTHS]
    return table(["Card", "`EXPERTS`", *measures, "longest completion, tokens"], rows)


def picture_of_a_run() -> str:
    """docs/architecture.svg: the default job on the card that is rented most, and on the smallest."""
    (h100, *_), (small, *_) = ([card for card in CARDS if name in card[0]] for name in ("H100", "24 GB"))
    machines = ((card, capability, free) for card, capability, free, *_ in (h100, small))
    return architecture.draw({card: plan_for_card(card, *facts, LENGTHS[1]) for card, *facts in machines})


def exit_codes() -> str:
    """The table of exit codes."""
    return table(["Exit code", "How the run ended"], [[str(int(code)), code.sentence] for code in ExitCode])


# Pages, and the functions that make their text between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"cards": fitting_cards},
    "docs/choosing.md": {"sweep": language_tables.sweep_table},
    "docs/maintainers/language.md": {
        "gains": language_tables.gains_table,
        "completions": language_tables.completions_table,
    },
    "docs/report.md": {"exit codes": exit_codes},
    "docs/settings.md": {"settings": settings_tables},
    "docs/metrics.md": {
        "metrics.csv": functools.partial(columns_table, METRICS),
        "completions.csv": functools.partial(columns_table, COMPLETIONS),
    },
}


PICTURE = "docs/architecture.svg"


def regenerated(page: str) -> str:
    """The text of a page, with its generated parts made anew; the picture is made as a whole."""
    if page == PICTURE:
        return picture_of_a_run()
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
    pages = [*GENERATED, PICTURE]
    for page in pages:
        (ROOT / page).write_text(regenerated(page), encoding="utf-8")
    print(f"written: {', '.join(pages)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
