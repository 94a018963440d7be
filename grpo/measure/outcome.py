# SPDX-License-Identifier: Apache-2.0
"""Figures of a run's evaluation.json and closed_loop.json."""

from __future__ import annotations

from pathlib import Path

from grpo.measure.record import Figure, Json, figure, read_json, tabled

REWARDS = """
heldout_random heldout_constant heldout_oracle reward_before regret_before reward_after regret_after | reward |
reward_low_before reward_high_before reward_low_after reward_high_after | reward | 95% interval over days' prompts
reward_before_greedy reward_after_greedy | reward | of the likeliest answer
parse_rate_before best_action_rate_before parse_rate_after best_action_rate_after | share |
reward_gain reward_low_gain reward_high_gain | reward | after minus before, paired by prompt
"""
UNITS = {"co2_kg": "kg", "unserved_kwh": "kWh", "regret_percent": "%"}  # of each policy's figures


def reward_figures(evaluation: Json) -> list[Figure]:
    """Held-out reward before and after; nothing if it was not measured at both times."""
    if not {"before", "after"} <= evaluation.keys():
        return []
    values = {f"heldout_{name}": evaluation[name] for name in ("random", "constant", "oracle")}
    for when in ("before", "after", "before_greedy", "after_greedy"):
        values |= {f"{name}_{when}": value for name, value in evaluation.get(when, {}).items()}
    values |= {f"{name}_gain": value for name, value in evaluation.get("difference", {}).items()}
    return tabled(REWARDS, values)


def plant_figures(plant: Json) -> list[Figure]:
    """What each policy emits, leaves unserved and loses, over all held-out windows."""
    figures = []
    for policy, total in plant.get("totals", {}).items():
        for name, unit in UNITS.items():
            low, high = (total.get(f"{name}_{end}") for end in ("low", "high"))
            note = "" if low is None or high is None else f"95% interval over windows {low:.2f} to {high:.2f}"
            if total.get(name) is not None:
                figures.append(figure(f"{name}_{policy}", total[name], unit, note))
    return figures


def outcome_figures(run: Path, prefix: str = "", suffix: str = "") -> list[Figure]:
    """Reward and plant of a run, as far as it has measured them. `prefix` and `suffix` are put around the names."""
    figures = reward_figures(read_json(run / "evaluation.json")) + plant_figures(read_json(run / "closed_loop.json"))
    return [figure(f"{prefix}{row['name']}{suffix}", row["value"], row["unit"], row["note"]) for row in figures]
