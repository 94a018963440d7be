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
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo.common import ROOT, reflow
from grpo.data.heldout import MOST_HELD_OUT
from grpo.output.logs import COMPLETIONS, EPISODE_COLUMNS, EPISODE_METRICS, METRICS
from grpo.plan.cards import (
    CARDS,
    LONG,
    NAMES,
    PROMPT_TOKENS,
    RAM,
    SHORT,
    Card,
    evaluation_seconds,
    step_seconds,
    step_times,
)
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.machine import Machine
from grpo.plan.memory import Plan, PlanInputs, plan_memory
from grpo.preflight.choices import choose_checkpointing, choose_experts
from grpo.preflight.preview import START_SECONDS
from grpo.process.ending import ExitCode
from grpo.settings.help import setting_rows
from grpo.settings.parsing import MAY_CHANGE
from grpo.settings.table import Settings
from scripts.dev import architecture, language_tables
from scripts.dev.language_tables import table

LENGTHS = (SHORT, LONG)  # of the completions in the README's table of cards


def settings_tables() -> str:
    """Every setting by group; a star marks those that may change when a run is resumed."""
    groups: dict[str, list[list[str]]] = {}
    for group, name, default, tiny, unit, text in setting_rows():
        default = f"`{default}`" + (f"; tiny: `{tiny}`" if tiny else "")
        star = "*" if name in MAY_CHANGE else ""
        groups.setdefault(group, []).append([f"`{name}`{star}", default, unit, text])
    header = ["Setting", "Default", "Unit and limits", "Meaning"]
    return "\n\n".join(f"## {group}\n\n{table(header, rows)}" for group, rows in groups.items())


def columns_table(columns: Mapping[str, Sequence[str]]) -> str:
    """Every column of a log, from (unit, meaning) by name."""
    return table(["Column", "Unit", "Meaning"], [[f"`{name}`", unit, text] for name, (unit, text) in columns.items()])


def card_inputs(card: Card) -> PlanInputs:
    """What the plan of a run on a card depends on."""
    machine = Machine(card.label, 1, card.free, card.free, RAM, 16, card.arch, card.capability)
    return PlanInputs(REAL_CONFIG, machine, PROMPT_TOKENS, "torch_flash", "prefix", beside_vllm=True)


def plan_for_card(card: Card, length: int) -> tuple[Settings, Plan]:
    """The settings that `auto` chooses on a card for completions of `length` tokens, and their plan."""
    inputs = card_inputs(card)
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
    for card in CARDS:
        (settings, short), (same, long) = (plan_for_card(card, length) for length in LENGTHS)
        assert settings.EXPERTS == same.EXPERTS, f"{card}: EXPERTS depends on the length, which the table cannot show"
        seconds = [f"{card.measured[length].step:.1f}" if length in card.measured else "" for length in LENGTHS]
        peaks = [f"{plan.peak:.0f}" for plan in (short, long)]
        planned = longest_completion(settings, card_inputs(card))
        ran = f"**{card.longest:,}**" if card.longest else ""
        longest = ran if planned == card.longest else ", ".join(filter(None, [f"{planned:,}", ran]))
        rows.append([card.label, f"`{settings.EXPERTS}`", *peaks, *seconds, longest])
    measures = [f"{measure}, {length:,} tokens" for measure in ("GiB", "s a step") for length in LENGTHS]
    return table(["Card", "`EXPERTS`", *measures, "longest completion by the plan; bold: ran in as much memory"], rows)


def picture_of_a_run() -> str:
    """docs/architecture.svg: the default job on the card that is rented most, and on the smallest."""
    return architecture.draw({card.label: plan_for_card(card, LONG) for card in (NAMES["H100"], NAMES["4090"])})


# Dollars an hour of a card, as stored copies of these pages had them.
PRICES = {
    "4090": (0.29, "[OpenRelay](https://openrelay.inc/pricing), 20 Sep 2026"),
    "L40S": (0.94, "[Verda](https://verda.com/pricing), spot, 29 Oct 2026"),
    "A100": (1.79, "[RunPod](https://www.runpod.io/pricing), 9 Nov 2026"),
    "H100": (3.99, "[RunPod](https://www.runpod.io/pricing), 9 Nov 2026"),
    "H200": (4.59, "[RunPod](https://www.runpod.io/pricing), 7 Oct 2026"),
}


def costs() -> str:
    """Hours and dollars of the default run on some cards, by the estimates that `--check --card` prints."""
    rows, settings, lengths = [], Settings(USE_VLLM=True), (LONG // 2, LONG)
    for name, (price, source) in PRICES.items():
        times, engine = step_times(name)[0], plan_for_card(NAMES[name], LONG)[1].engine
        steps = [step_seconds(times, settings, length, engine) for length in lengths]
        evaluations = [evaluation_seconds(times, settings, MOST_HELD_OUT, length, engine) for length in lengths]
        totals = [START_SECONDS + settings.TOTAL_STEPS * a + b for a, b in zip(steps, evaluations, strict=True)]
        hours = [seconds / 3600 for seconds in totals]
        known = {2: "measured", 1: "partly measured", 0: "estimate"}[len(NAMES[name].measured)]
        cost = " to ".join(f"{h * price:.0f}" for h in hours)
        rows.append([name, " to ".join(f"{h:.1f}" for h in hours), known, f"{price:.2f}", cost, source])
    return table(["Card", "Hours", "", "$ an hour", "$", "Price"], rows)


def exit_codes() -> str:
    """The table of exit codes."""
    return table(["Exit code", "How the run ended"], [[str(int(code)), code.sentence] for code in ExitCode])


# Pages, and the functions that make their text between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"cards": fitting_cards},
    "docs/install.md": {"costs": costs},
    "docs/maintainers/language.md": {
        **{
            f"sweep of {results}": functools.partial(language_tables.sweep_table, results)
            for results in language_tables.SWEEPS
        },
        "gains": language_tables.gains_table,
        "days": language_tables.days_table,
        "completions": language_tables.completions_table,
    },
    "docs/report.md": {"exit codes": exit_codes},
    "docs/settings.md": {"settings": settings_tables},
    "docs/metrics.md": {
        "metrics.csv": functools.partial(columns_table, METRICS),
        "completions.csv": functools.partial(columns_table, COMPLETIONS),
        "metrics.csv of episodes": functools.partial(columns_table, EPISODE_METRICS),
        "completions.csv of episodes": functools.partial(columns_table, EPISODE_COLUMNS),
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
