# SPDX-License-Identifier: Apache-2.0
"""What a run's report says in words and tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from grpo.evaluate.run_data import Run, duration, number, part, spread
from grpo.run.hub import short
from grpo.run.layout import ADAPTER, BEST
from grpo.settings import show

PLANT_HEADER = ["", "CO2, kg", "Unserved, kWh", "Storage cycled, kWh", "Regret, %", "Unparsed"]
MODELS = ("base", "trained", "base_greedy", "trained_greedy", "optimum")  # the others are fixed rules


def judged(low: float, high: float) -> str:
    """What the 95% interval of an improvement (positive: the trained model is better) says; NaN where there is none."""
    if low > 0:
        return "the trained model is better than the base model"
    if high < 0:
        return "the trained model is worse than the base model"
    return "this evaluation cannot tell the trained model from the base model"


def reward_verdict(run: Run) -> str:
    """Whether training improved the held-out reward, in plain words."""
    before, after, difference = (part(run.evaluation, key) for key in ("before", "after", "difference"))
    if not before or not after:
        return "Held-out prompts were not evaluated before and after training: the run goes on, or evaluates none."
    rewards = number(before.get("reward")), number(after.get("reward"))
    change = {"reward": rewards[1] - rewards[0]} | difference
    verdict = judged(number(change.get("reward_low")), number(change.get("reward_high")))
    moved = spread(change, "reward", "+.3f", "95% interval ")
    return f"Held-out reward changed by {moved}, from {rewards[0]:.3f} to {rewards[1]:.3f}: {verdict}."


def plant_verdict(run: Run) -> str:
    """Whether the trained model runs the plant better than the base model, in plain words; empty without both."""
    base, trained = part(run.closed_loop, "totals", "base"), part(run.closed_loop, "totals", "trained")
    if not base or not trained:
        return ""
    change = part(run.closed_loop, "difference")
    verdict = judged(-number(change.get("regret_percent_high")), -number(change.get("regret_percent_low")))
    regrets, unserved = (
        [number(totals.get(name)) for totals in (base, trained)] for name in ("regret_percent", "unserved_kwh")
    )
    moved = spread(change, "regret_percent", "+,.1f", "95% interval ")
    return (
        f"At the plant regret went from {regrets[0]:,.1f}% to {regrets[1]:,.1f}%, by {moved} points: {verdict}. "
        f"Load left unserved: {unserved[0]:,.1f} kWh before, {unserved[1]:,.1f} after."
    )


def adapter_advice(run: Run) -> str:
    """Which adapter to load."""
    if reason := run.best.get("in_words"):
        return f"Load the adapter in {BEST}/: {reason}."
    if (run.folder / ADAPTER).is_file():
        return "Load the adapter in the run's folder, that of the last step; none was kept as the best."
    return "There is no adapter to load yet but those of the checkpoints."


def facts(run: Run) -> list[tuple[str, str]]:
    """What was run, in words."""
    settings, machine, seconds = run.settings, part(run.record, "machine"), run.metrics["step_s"].dropna()
    rewards, _ = run.choices.get("rewards", ("?", ""))
    known = defaultdict(lambda: "?", settings)
    known |= {"REWARDS": settings.get("REWARDS") or rewards, "EVAL_DATA": settings.get("EVAL_DATA") or "a part of DATA"}
    names = {"Model": "MODEL_ID", "Training data": "DATA", "Held-out data": "EVAL_DATA", "Rewards": "REWARDS"}
    rows = [(label, short(str(known[name]))) for label, name in names.items()]
    step = "{PROMPTS_PER_STEP} prompts x {NUM_GENERATIONS} completions of at most {MAX_COMPLETION_LEN} tokens"
    adapter = "LoRA, rank {LORA_R}, on {LORA_TARGETS}; learning rate {LEARNING_RATE}"
    rows += [("A step", step.format_map(known)), ("Adapter", adapter.format_map(known))]
    rows.append(("Machine", str(machine.get("gpu") or f"no GPU, {machine.get('cores', '?')} cores")))
    time = f"{duration(seconds.sum())}, median {duration(seconds.median())} a step"
    rows.append(("Steps", f"{run.steps} of {known['TOTAL_STEPS']}; {time}"))
    return rows


def plant_rows(totals: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The table of closed_loop.json, below PLANT_HEADER: models first, then the fixed rules."""
    rows = []
    for name in sorted(totals, key=lambda name: name not in MODELS):
        policy = totals[name]
        cells = [f"{number(policy.get(key)):,.1f}" for key in ("co2_kg", "unserved_kwh", "storage_cycled_kwh")]
        answers = f"{policy['unparsed']:.0f} of {policy['answers']}" if policy.get("answers") else ""
        rows.append([name.replace("_", " "), *cells, spread(policy, "regret_percent", ",.1f"), answers])
    return rows


def settings_rows(run: Run) -> list[list[str]]:
    """The settings that are not at their defaults, and who set them."""
    sources = [(name, source) for name, source in part(run.record, "sources").items() if source != "default"]
    return [[name, short(show(run.settings.get(name))), str(source)] for name, source in sources]


def choices_rows(run: Run) -> list[list[str]]:
    """Every automatic choice and its reason."""
    words = {"True": "yes", "False": "no", "None": "none"}
    return [[name, words.get(str(value), str(value)), reason] for name, (value, reason) in run.choices.items()]
