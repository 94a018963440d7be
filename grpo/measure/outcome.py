# SPDX-License-Identifier: Apache-2.0
"""What a run came to: figures of its evaluation.json and closed_loop.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.measure.record import figure, read_json, tabled

REWARDS = """
heldout_random heldout_constant heldout_oracle reward_before regret_before reward_after regret_after | reward |
reward_low_before reward_high_before reward_low_after reward_high_after | reward | 95% interval over days' prompts
reward_before_greedy reward_after_greedy | reward | of the likeliest answer
parse_rate_before best_action_rate_before parse_rate_after best_action_rate_after | share |
reward_gain reward_low_gain reward_high_gain | reward | after minus before, paired by prompt
"""
POLICY = {"co2_kg": "kg", "unserved_kwh": "kWh", "regret_percent": "%"}  # figures of each policy, units


def reward_figures(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Held-out reward before and after; nothing if it was not measured at both times."""
    if not {"before", "after"} <= evaluation.keys():
        return []
    values = {f"heldout_{name}": evaluation[name] for name in ("random", "constant", "oracle")}
    for when in ("before", "after", "before_greedy", "after_greedy"):
        values |= {f"{name}_{when}": value for name, value in evaluation.get(when, {}).items()}
    values |= {f"{name}_gain": value for name, value in evaluation.get("difference", {}).items()}
    return tabled(REWARDS, values)


def plant_figures(plant: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each policy emits, leaves unserved and loses, over all held-out windows."""
    figures = []
    for policy, total in plant.get("totals", {}).items():
        for name, unit in POLICY.items():
            ends = [total.get(f"{name}_{end}") for end in ("low", "high")]
            note = "" if None in ends else f"95% interval over windows {ends[0]:.2f} to {ends[1]:.2f}"
            if total.get(name) is not None:
                figures.append(figure(f"{name}_{policy}", total[name], unit, note))
    return figures


def outcome_figures(run: Path, prefix: str = "", label: str = "") -> list[dict[str, Any]]:
    """Both, as far as the run has them; `prefix` and `label` are put around the names."""
    figures = reward_figures(read_json(run / "evaluation.json")) + plant_figures(read_json(run / "closed_loop.json"))
    return [row | {"name": f"{prefix}{row['name']}{label}"} for row in figures]
