# SPDX-License-Identifier: Apache-2.0
"""What a run's report says: its sections, the figures at its top and the verdicts in plain words."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pandas

from grpo.evaluate import figures
from grpo.evaluate.figures import MEAN_OF, Picture
from grpo.evaluate.run_data import (
    FUNCTIONS_HEADER,
    HELDOUT_HEADER,
    Run,
    duration,
    function_rows,
    heldout_rows,
    interval,
    number,
    part,
    spread,
)
from grpo.run.hub import short
from grpo.settings import described
from grpo.tasks.tes.closed_loop import RULES

MOST_WINDOWS = 3  # of the closed loop that get a figure


@dataclass
class Section:
    """One part of the page. `notes`: sentences above it, `missing`: what is left out, and why."""

    title: str
    notes: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[tuple[list[str], list[list[str]], str]] = field(default_factory=list)  # header, rows, text below
    # Rows of completions.csv by what is shown of them.
    examples: dict[str, pandas.DataFrame] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def curves_section(run: Run) -> Section:
    """The learning curves that have values, and the time of each phase."""
    section = Section("Learning curves, time and memory", [f"Dots: steps; lines: mean of the last {MEAN_OF}."])
    if len(run.metrics) < 2:
        section.missing.append(f"A curve needs two steps, and there {'is one' if run.steps else 'is none'} so far.")
    else:
        lines = {"reward": run.evaluation}
        if run.rewards != "action" and "oracle" in run.evaluation:  # which has rewards of the CSV: on another scale
            lines = {}
            section.missing.append(f"The reward curve does not show what other policies earn: it is of REWARDS={run.rewards}, theirs is of the CSV.")  # fmt: skip
        for name, (_, columns) in figures.CURVES.items():
            if not set(columns).isdisjoint(run.columns):
                section.pictures.append(figures.curve(run.metrics, name, lines.get(name, {})))
    section.pictures += [figures.phases_figure(run.metrics)] if len(run.metrics) else []
    if rows := function_rows(run.metrics, run.evaluation, MEAN_OF):
        text = f"What each function of REWARDS gave on average, before its weight: over the first and the last {MEAN_OF} steps, and on the held-out prompts, in brackets 95% intervals."
        section.tables.append((FUNCTIONS_HEADER, rows, text))
    found = run.evaluated()
    if len(found):
        section.pictures.append(figures.evaluations_figure(found, run.evaluation, best_rule(run), run.best))
    else:
        section.missing.append("No step between the first and the last was evaluated.")
    return section


def best_rule(run: Run) -> tuple[str, dict[str, Any]]:
    """Name and totals of the rule with the lowest regret at the plant; empty ones where there is none."""
    totals = {name: part(run.closed_loop, "totals", name) for name in RULES}
    known = {name: one for name, one in totals.items() if not math.isnan(number(one.get("regret_percent")))}
    return min(known.items(), key=lambda item: item[1]["regret_percent"], default=("", {}))


def actions_section(run: Run) -> Section:
    section = Section("Actions")
    if not run.completions.count:
        section.missing.append("There are no completions yet.")
    elif not any(run.completions.actions):
        section.missing.append("No completion names an action: the data has no actions, or no answer parses.")
    else:
        section.pictures.append(figures.actions_figure(run.completions.actions))
    return section


def heldout_section(run: Run) -> Section:
    section, found = Section("Held-out prompts: before and after"), run.evaluation
    if not part(found, "before"):
        section.missing.append(no_evaluation(run))
        return section
    if not part(found, "after"):
        section.missing.append("There is no evaluation after training: the run goes on, or was interrupted.")
    section.pictures.append(figures.heldout_figure(found))
    way = "Exact: all answers by their probability" if found.get("exact") else f"{found.get('samples', '?')} completions for each prompt"  # fmt: skip
    heat = f" at temperature {found['temperature']}" * ("temperature" in found)
    text = f"{way}{heat}; greedy: the likeliest answer, once. In brackets: 95% intervals over prompts, those of a day together. Regret: the row's best reward minus the reward earned. Tokens: mean, longest."
    if "oracle" not in found:
        text += f" The rows have no rewards of actions: the reward is that of REWARDS={run.rewards}."
    section.tables.append((HELDOUT_HEADER, heldout_rows(found), text))
    return section


def no_evaluation(run: Run) -> str:
    if run.settings.get("EVAL_SAMPLES") == 0:
        return "Held-out prompts were not evaluated: EVAL_SAMPLES is 0."
    if isinstance(heldout := part(run.record, "choices").get("heldout"), list) and heldout[:1] == [0]:
        return "Held-out prompts were not evaluated: no rows are held out."
    return "There is no evaluation on held-out prompts (evaluation.json) yet."


def plant_section(run: Run) -> Section:
    section, found = Section("Closed loop: three days at the plant"), run.closed_loop
    if not found:
        section.missing.append("The plant was not run in closed loop: there is no closed_loop.json (scripts/evaluate.py writes it).")  # fmt: skip
        return section
    windows, totals, samples = found["windows"], found["totals"], found.get("samples", 1)
    asked = f"the majority of {samples} sampled answers" if found.get("vote") else "one sampled answer"
    passes = 1 if found.get("vote") or found.get("exact") else samples
    if found.get("exact"):
        asked = "all answers by their probability (exact)"
    means = " Drawn is the greedy path, the table has expectations." * bool(found.get("exact"))
    means += f" Every window was run {passes} times: drawn is the first, the table has means." * (passes != 1)
    drawn = f" Drawn are the first {MOST_WINDOWS}." * (len(windows) > MOST_WINDOWS)
    section.notes.append(
        f"Windows: {len(windows)}, of {short(', '.join(map(str, found.get('profiles') or [])))}, with "
        f"{number(found.get('start_kwh')):g} kWh in the storage at first.{drawn} Each hour takes {asked}.{means} An answer "
        f"that cannot be parsed counts as [{found.get('safe_action', '?')}], the safe action: "
        f"{str(found.get('safe_action_reason', 'no reason was recorded')).rstrip('.')}."
    )
    for index, window in enumerate(windows[:MOST_WINDOWS], 1):
        section.pictures.append(figures.plant_figure(window, number(found.get("start_kwh")), index))
    rows = []
    models = ("base", "trained", "base_greedy", "trained_greedy", "optimum")
    for name in sorted(totals, key=lambda name: name not in models):
        one = totals[name]
        answers = f"{round(one['unparsed'], 1):g} of {one['answers']}" if one.get("answers") else ""
        values = (f"{number(one.get(key)):,.1f}" for key in ("co2_kg", "unserved_kwh", "storage_cycled_kwh"))
        rows.append([figures.policy(name)[0], *values, spread(one, "regret_percent", ",.1f"), answers])
    header = ["", "CO2, kg", "Unserved, kWh", "Storage cycled, kWh", "Regret, %", "Unparsed"]
    text = "Totals over all windows. Regret: cost above the optimum's, in percent (docs/evaluation.md), with its 95% interval over windows where there are three or more. Little CO2 is worth nothing where load stays unserved."
    section.tables.append((header, rows, text))
    return section


def examples_section(run: Run) -> Section:
    section = Section("Completions, good and bad")
    if not run.completions.count:
        section.missing.append("There are no completions yet.")
        return section
    section.notes.append(f"Chosen from {run.completions.count:,} completions; of equal ones the latest are shown, one for each prompt.")  # fmt: skip
    section.examples = run.completions.examples
    return section


SECTIONS = (curves_section, actions_section, heldout_section, plant_section, examples_section)


def sections_of(run: Run) -> list[Callable[[Run], Section]]:
    """The sections of a run's report; without a closed loop and a profile for one it is not about the plant."""
    has_plant = run.closed_loop or run.settings.get("EVAL_PROFILE", "") is not None
    return [make for make in SECTIONS if has_plant or make is not plant_section]


def guarded(make: Callable[[Run], Section], run: Run) -> Section:
    """A section, or one that says that its data is not as agreed: a file edited by hand must not cost the report."""
    try:
        return make(run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        title = {"plant_section": "Closed loop", "heldout_section": "Held-out prompts"}.get(make.__name__, "A section")
        return Section(title, missing=[f"{title} is left out: its data is not as expected ({described(error)})."])  # fmt: skip


def judged(low: float, high: float) -> str:
    """What the 95% interval of an improvement (positive: the trained model is better) says, in plain words."""
    if math.isnan(low + high):
        return "without a confidence interval nothing can be said about chance"
    if low > 0:
        return "the improvement exceeds its confidence interval, the trained model is better than the base model"
    if high < 0:
        return "the trained model is worse than the base model, beyond its confidence interval"
    return "the interval contains zero, so this evaluation cannot tell the trained model from the base model"


def reward_verdict(run: Run) -> str:
    """Whether training improved the held-out reward, in plain words."""
    before, after, difference = (part(run.evaluation, key) for key in ("before", "after", "difference"))
    if not before:
        return no_evaluation(run)
    if not after:
        return "Whether training helped is not known yet: there is no evaluation after training."
    change = {"reward": number(after.get("reward")) - number(before.get("reward"))} | difference
    _, low, high = interval(change, "reward")
    said = f"Held-out reward changed by {spread(change, 'reward', '+.3f', '95% interval ')}: {judged(low, high)}."
    constant = number(run.evaluation.get("constant"))
    if low > 0 and number(after.get("reward_low")) > constant:
        said += f" It also beats the best constant action ({constant:.3f})."
    elif low > 0 and number(after.get("reward_high")) < constant:
        said += f" It still earns less than the best constant action ({constant:.3f})."
    return said


def plant_verdict(run: Run) -> str:
    """Whether the trained model runs the plant better than the base model, in plain words; empty without both."""
    base, trained = part(run.closed_loop, "totals", "base"), part(run.closed_loop, "totals", "trained")
    if not base or not trained:
        return ""
    difference = part(run.closed_loop, "difference")
    _, low, high = interval(difference, "regret_percent")
    ends = " to ".join(f"{number(one.get('regret_percent')):,.1f}%" for one in (base, trained))
    change = spread(difference, "regret_percent", "+,.1f", "95% interval ")
    said = f"At the plant regret went from {ends}, by {change} points: {judged(-high, -low)}."
    unserved, before = number(trained.get("unserved_kwh")), number(base.get("unserved_kwh"))
    if unserved > before + 0.05:
        said += f" Besides, {unserved:,.1f} kWh of load stayed unserved, {before:,.1f} before."
    return said


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The figures at the top of the page, as far as the run has them: label, value, a note."""
    state = "every step is done" if run.total and run.steps >= run.total else "in progress, or interrupted"
    if resumed := run.record.get("resumed_from_step"):
        state += f"; resumed from step {resumed}"
    found = [("Steps", f"{run.steps} of {run.total or '?'}", state)]

    def over(results: list[dict[str, Any]], name: str, digits: str) -> str:
        return " \u2192 ".join(f"{number(one.get(name)):{digits}}" for one in results)

    if part(run.evaluation, "before"):
        measured = [one for key in ("before", "after") if (one := part(run.evaluation, key))]
        random, constant, oracle = (spread(run.evaluation, key) for key in ("random", "constant", "oracle"))
        note = f"random {random}, best constant {constant}, oracle {oracle}"
        if oracle == "-":
            note = f"of REWARDS={run.rewards}"
        found.append(("Held-out reward", over(measured, "reward", ".3f"), note))
    if models := [one for name in ("base", "trained") if (one := part(run.closed_loop, "totals", name))]:
        optimum = number(part(run.closed_loop, "totals", "optimum").get("co2_kg"))
        # Cooling nothing emits nothing: the CO2 must not be read without the load that stayed unserved.
        note = f"unserved load {over(models, 'unserved_kwh', ',.0f')} kWh; regret {over(models, 'regret_percent', ',.1f')} %"
        note += f"; optimum {optimum:,.0f} kg"
        found.append(("CO2 in closed loop", over(models, "co2_kg", ",.0f") + " kg", note))
    rewards = run.metrics["reward"].dropna()
    if len(rewards) >= 2 * MEAN_OF:
        value = f"{rewards.head(MEAN_OF).mean():.3f} \u2192 {rewards.tail(MEAN_OF).mean():.3f}"
        found.append(("Reward while training", value, f"mean of the first {MEAN_OF} and of the last {MEAN_OF} steps"))
    return found


def facts(run: Run) -> list[tuple[str, str]]:
    """What was run, in words."""
    s, machine, choices = run.settings, part(run.record, "machine"), part(run.record, "choices")
    names = {"Model": "MODEL_ID", "Training data": "DATA", "Held-out data": "EVAL_DATA", "Rewards": "REWARDS"}
    if isinstance(chosen := choices.get("rewards"), list) and chosen:  # what `auto` was
        s = {**s, "REWARDS": chosen[0]}
    if s.get("EVAL_DATA", "") is None:
        s = {**s, "EVAL_DATA": "a part of DATA"}
        if isinstance(chosen := choices.get("heldout"), list) and len(chosen) == 2:
            s["EVAL_DATA"] = chosen[1]
    if run.closed_loop:
        names["Plant's days"] = "EVAL_PROFILE"
    found = [("Run", run.folder.resolve().name)]
    found += [(label, short(str(s[name]))) for label, name in names.items() if name in s]
    if s:
        known = defaultdict(lambda: "?", s)
        step = "{PROMPTS_PER_STEP} prompts x {NUM_GENERATIONS} completions of at most {MAX_COMPLETION_LEN} tokens"
        adapter = "LoRA, rank {LORA_R}, on {LORA_TARGETS}; learning rate {LEARNING_RATE}"
        found += [("A step", step.format_map(known)), ("Adapter", adapter.format_map(known))]
    for name in ("rollouts", "attention", "packing", "experts"):
        if isinstance(chosen := choices.get(name), list) and len(chosen) == 2:
            word = {True: "vLLM", False: "transformers"}.get(chosen[0], chosen[0])
            found.append((name.capitalize(), f"{word} ({chosen[1]})"))
    if machine:
        found.append(("Machine", machine.get("gpu") or f"no GPU, {machine.get('cores', '?')} cores"))
    seconds = run.metrics["step_s"].dropna()
    if len(seconds):
        found.append(("Time", f"{duration(seconds.sum())} for {len(seconds)} steps, median {duration(seconds.median())} a step"))  # fmt: skip
        found.append(("Last step", run.metrics["time"].iloc[-1]))
    return found
