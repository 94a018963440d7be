# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from grpo.evaluate.figures import (
    CURVES,
    FIGURES,
    MEAN_OF,
    MOST_WINDOWS,
    Picture,
    actions_figure,
    curve,
    heldout_figure,
    meaning,
    phases_figure,
    plant_figure,
    policy,
    spread,
)
from grpo.evaluate.run_data import KINDS, Example, Run, number, part


@dataclass
class Table:
    header: list[str]
    rows: list[list[str]]
    text: str = ""


@dataclass
class Section:
    """One part of the page. `notes`: sentences above it, `missing`: what is left out, and why."""

    title: str
    notes: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def curves_section(run: Run) -> Section:
    section = Section("Learning curves")
    if len(run.metrics) < 2:
        section.missing.append(f"A curve needs two steps, and there {'is one' if run.metrics else 'is none'} so far.")
        return section
    for name, columns in CURVES.items():
        if name == "gpu_memory":
            continue
        if all(math.isnan(value) for column in columns for value in run.values(column)):
            listed = " and ".join(f"`{column}`" for column in columns)
            section.missing.append(
                f"{FIGURES[name][0]} is left out: no step has a value in {listed}. {meaning(columns[0])}"
            )
        else:
            section.pictures.append(curve(run, name))
    return section


def machine_section(run: Run) -> Section:
    section = Section("Time and memory")
    if not run.metrics:
        section.missing.append("No step has ended yet.")
        return section
    section.pictures.append(phases_figure(run))
    if all(math.isnan(value) for value in run.values("gpu_peak_gib")):
        section.missing.append(
            "GPU memory is left out: no step has a value in `gpu_peak_gib`; without a GPU it is empty."
        )
    elif len(run.metrics) > 1:
        section.pictures.append(curve(run, "gpu_memory"))
    else:
        section.notes.append(f"GPU memory peak: {run.metrics[0]['gpu_peak_gib']:.1f} GiB.")
    return section


def actions_section(run: Run) -> Section:
    section = Section("Actions")
    if not run.completions.count:
        section.missing.append("There are no completions yet.")
    elif not any(action for counts in run.completions.actions.values() for action in counts):
        section.missing.append("No completion names an action: the data has no actions, or no answer parses.")
    else:
        section.pictures.append(actions_figure(run.completions))
    return section


def heldout_section(run: Run) -> Section:
    section, found = Section("Held-out prompts: before and after"), run.evaluation
    if not part(found, "before"):
        section.missing.append(no_evaluation(run))
        return section
    if not part(found, "after"):
        section.missing.append("There is no evaluation after training: the run goes on, or was interrupted.")
    constant = f"best constant action [{found['constant_action']}]"
    rows = [["random action", spread(found, "random"), "", "", "", "", ""]]
    rows.append([constant, spread(found, "constant"), "", "", "", "", ""])
    actions = max((len(found[key].get("action_counts") or []) for key in ("before", "after") if found.get(key)), default=0)  # fmt: skip
    counted = []
    for key, label in (("before", policy("base")[0]), ("after", policy("trained")[0])):
        if result := found.get(key):
            figures = [spread(result, name) for name in ("reward", "regret")]
            figures += [spread(result, name, ".2f") for name in ("parse_rate", "best_action_rate", "clipped_ratio")]
            length = f"{number(result.get('tokens_mean')):,.0f}, {number(result.get('tokens_max')):,.0f}"
            rows.append([label, *figures, length])
            if counts := result.get("action_counts"):
                unparsed = result.get("unparsed", 0)
                answers = max(1, sum(counts) + unparsed)
                shares = [f"{n / answers:.1%}" for n in [*counts, *[0] * (actions - len(counts)), unparsed]]
                counted.append([label, *shares])
    rows.append(["oracle", spread(found, "oracle"), "", "", "", "", ""])
    header = ["", "Reward", "Regret", "Parse rate", "Best action", "Clipped", "Tokens"]
    text = f"{found.get('samples', '?')} completions for each prompt. In brackets: 95% intervals, bootstrap over prompts. Regret: the row's best reward minus the reward earned. Tokens: mean, longest."
    section.pictures.append(heldout_figure(found))
    section.tables.append(Table(header, rows, text))
    if counted:
        header = ["", *(f"[{k}]" for k in range(actions)), "no action"]
        section.tables.append(Table(header, counted, "Share of each action among the held-out completions."))
    return section


def no_evaluation(run: Run) -> str:
    if run.settings.get("EVAL_SAMPLES") == 0:
        return "Held-out prompts were not evaluated: EVAL_SAMPLES is 0."
    return "There is no evaluation on held-out prompts (evaluation.json) yet."


def plant_section(run: Run) -> Section:
    section, found = Section("Closed loop: three days at the plant"), run.closed_loop
    if not found:
        section.missing.append("The plant was not run in closed loop: there is no closed_loop.json (scripts/evaluate.py writes it).")  # fmt: skip
        return section
    windows, totals = found["windows"], found["totals"]
    samples = found.get("samples", 1)
    asked = "Each hour takes one sampled answer."
    if samples != 1 and found.get("vote"):
        asked = f"Each hour takes the majority of {samples} sampled answers."
    elif samples != 1:
        asked = f"Each hour takes one sampled answer; every window was run {samples} times: drawn is the first, the table has means."
    section.notes.append(
        f"{len(windows)} window{'' if len(windows) == 1 else 's'} of {short(', '.join(map(str, found.get('profiles') or [])))}, "
        f"with {number(found.get('start_kwh')):g} kWh in the storage at first. {asked} An answer that cannot be parsed counts as "
        f"[{found.get('safe_action', '?')}], the safe action: {str(found.get('safe_action_reason', 'no reason was recorded')).rstrip('.')}."
    )
    start = number(found.get("start_kwh"))
    for index, window in enumerate(windows[:MOST_WINDOWS], 1):
        section.pictures.append(plant_figure(window, start, index))
    if len(windows) > MOST_WINDOWS:
        section.notes.append(f"Shown: the first {MOST_WINDOWS} windows. The table counts all of them.")
    order = [*(name for name in ("base", "trained", "optimum") if name in totals)]
    order += [name for name in totals if name not in order]
    rows = []
    for name in order:
        one = totals[name]
        answers = f"{one['unparsed']} of {one['answers']}" if one.get("answers") else ""
        figures = (f"{number(one.get(key)):,.1f}" for key in ("co2_kg", "unserved_kwh", "storage_cycled_kwh"))
        rows.append([policy(name)[0], *figures, spread(one, "regret_percent", ",.1f"), answers])
    header = ["", "CO2, kg", "Unserved, kWh", "Storage cycled, kWh", "Regret, %", "Unparsed"]
    text = "Totals over all windows. Regret: cost above the optimum's, in percent (docs/evaluation.md), with its 95% interval over windows where there are three or more. Little CO2 is worth nothing where load stays unserved."
    section.tables.append(Table(header, rows, text))
    return section


def examples_section(run: Run) -> Section:
    section = Section("Completions, good and bad")
    section.examples = {KINDS[kind]: held for kind, held in run.completions.examples.items() if held}
    if not run.completions.count:
        section.missing.append("There are no completions yet.")
    else:
        section.notes.append(f"Chosen from {run.completions.count:,} completions; of equal ones the latest are shown, one for each prompt.")  # fmt: skip
        none = [KINDS[kind][0].lower() + KINDS[kind][1:] for kind, held in run.completions.examples.items() if not held]
        section.missing += [f"None to show: {', '.join(none)}."] if none else []
    return section


SECTIONS = (curves_section, machine_section, actions_section, heldout_section, plant_section, examples_section)


def guarded(make: Callable[[Run], Section], run: Run) -> Section:
    """A section, or one that says that its data is not as agreed: a file edited by hand must not cost the report."""
    try:
        return make(run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        title = {"plant_section": "Closed loop", "heldout_section": "Held-out prompts"}.get(make.__name__, "A section")
        return Section(title, missing=[f"{title} is left out: its data is not as expected ({type(error).__name__}: {str(error)[:200]})."])  # fmt: skip


def reward_verdict(run: Run) -> str:
    """Whether training improved the held-out reward, in plain words."""
    before, after, difference = (part(run.evaluation, key) for key in ("before", "after", "difference"))
    value, low, high = (number(difference.get(name)) for name in ("reward", "reward_low", "reward_high"))
    if not before:
        return no_evaluation(run)
    if not after:
        return "Whether training helped is not known yet: there is no evaluation after training."
    if math.isnan(value + low + high):
        change = number(after.get("reward")) - number(before.get("reward"))
        return (
            f"Held-out reward changed by {change:+.3f}; without a confidence interval nothing can be said about chance."
        )
    said = f"Held-out reward changed by {value:+.3f} (95% interval {low:+.3f} to {high:+.3f})"
    if low > 0:
        said += ": the improvement exceeds its confidence interval, the trained model is better than the base model."
        constant = number(run.evaluation.get("constant"))
        if number(after.get("reward_low")) > constant:
            said += f" It also beats the best constant action ({constant:.3f})."
        elif number(after.get("reward_high")) < constant:
            said += f" It still earns less than the best constant action ({constant:.3f})."
        return said
    if high < 0:
        return f"{said}: the trained model is worse than the base model, beyond its confidence interval."
    return f"{said}: the interval contains zero, so this evaluation cannot tell the trained model from the base model."


def plant_verdict(run: Run) -> str:
    """Whether the trained model runs the plant better than the base model, in plain words; empty without both."""
    base, trained = part(run.closed_loop, "totals", "base"), part(run.closed_loop, "totals", "trained")
    difference = part(run.closed_loop, "difference")
    if not base or not trained:
        return ""
    ends = (f"{number(one.get('regret_percent')):,.1f}%" for one in (base, trained))
    said = f"At the plant regret went from {' to '.join(ends)}"
    value, low, high = (number(difference.get(f"regret_percent{end}")) for end in ("", "_low", "_high"))
    if math.isnan(value + low + high):
        said += "; no confidence interval was recorded (it needs three windows), so nothing can be said about chance"
    else:
        said += f", by {value:+,.1f} points (95% interval {low:+,.1f} to {high:+,.1f}): "
        if high < 0:
            said += "the improvement exceeds its confidence interval, the trained model runs it better"
        elif low > 0:
            said += "the trained model runs it worse, beyond its confidence interval"
        else:
            said += "the interval contains zero, so this cannot tell the trained model from the base model"
    unserved, before = number(trained.get("unserved_kwh")), number(base.get("unserved_kwh"))
    if unserved > before + 0.05:
        said += f". Besides, {unserved:,.1f} kWh of load stayed unserved, {before:,.1f} before"
    return said + "."


@dataclass
class Tile:
    label: str
    value: str
    lines: list[str]


ARROW = " \u2192 "


def tiles(run: Run) -> list[Tile]:
    """The figures at the top of the page, as far as the run has them."""
    steps = f"{run.steps} of {run.total}" if run.total else str(run.steps)
    state = "every step is done" if run.total and run.steps >= run.total else "in progress, or interrupted"
    resumed = run.record.get("resumed_from_step")
    found = [Tile("Steps", steps, [state, *([f"resumed from step {resumed}"] if resumed else [])])]
    measured = {key: one for key in ("before", "after") if (one := part(run.evaluation, key))}
    if "before" in measured:
        value = ARROW.join(f"{number(one.get('reward')):.3f}" for one in measured.values())
        lines = [f"{key}: {spread(one, 'reward')}" for key, one in measured.items()]
        others = (("random", "random"), ("best constant", "constant"), ("oracle", "oracle"))
        lines.append(", ".join(f"{label} {spread(run.evaluation, key)}" for label, key in others))
        found.append(Tile("Held-out reward", value, lines))
    plant = {name: one for name in ("base", "trained", "optimum") if (one := part(run.closed_loop, "totals", name))}
    models = [one for name, one in plant.items() if name != "optimum"]
    if models:
        value = ARROW.join(f"{number(one.get('co2_kg')):,.0f}" for one in models) + " kg"
        unserved = [number(one.get("unserved_kwh")) for one in models]
        # Cooling nothing emits nothing: the figure above must not be read without this one.
        lines = [f"unserved load: {ARROW.join(f'{value:,.0f}' for value in unserved)} kWh"] if any(unserved) else []
        for name, one in plant.items():
            line = f"{policy(name)[0]}: {number(one.get('co2_kg')):,.0f} kg"
            regret = f", regret {spread(one, 'regret_percent', ',.1f', '%')}" if name != "optimum" else ""
            lines.append(line + regret)
        found.append(Tile("CO2 in closed loop", value, lines))
    rewards = [value for value in run.values("reward") if not math.isnan(value)]
    if len(rewards) >= 2 * MEAN_OF:
        value = ARROW.join(f"{statistics.fmean(part):.3f}" for part in (rewards[:MEAN_OF], rewards[-MEAN_OF:]))
        found.append(
            Tile("Reward while training", value, [f"mean of the first {MEAN_OF} and of the last {MEAN_OF} steps"])
        )
    return found


def short(text: str) -> str:
    """A setting's value without the folders of absolute paths: a report may be shown to others."""
    parts = [part.strip() for part in text.split(",")]
    return ", ".join(Path(part).name if part.startswith("/") else part for part in parts)


def duration(seconds: float) -> str:
    """`1:02:03 h`, `4:05 min` or `6.7 s`; `-` where it is not known."""
    if math.isnan(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h" if minutes >= 60 else f"{minutes}:{rest:02} min"


def facts(run: Run) -> list[tuple[str, str]]:
    """What was run, in words."""
    s, machine, choices = run.settings, part(run.record, "machine"), part(run.record, "choices")
    found = [("Run", run.folder.resolve().name)]
    for label, name in (("Model", "MODEL_ID"), ("Training data", "DATA"), ("Held-out data", "EVAL_DATA"), ("Rewards", "REWARDS")):  # fmt: skip
        if name in s:
            found.append((label, short(str(s[name]))))
    if "PROMPTS_PER_STEP" in s and "NUM_GENERATIONS" in s:
        found.append(("A step", f"{s['PROMPTS_PER_STEP']} prompts x {s['NUM_GENERATIONS']} completions of at most {s.get('MAX_COMPLETION_LEN', '?')} tokens"))  # fmt: skip
    if "LORA_R" in s:
        found.append(("Adapter", f"LoRA, rank {s['LORA_R']}, on {s.get('LORA_TARGETS', '?')}; learning rate {s.get('LEARNING_RATE', '?')}"))  # fmt: skip
    for label, name in (
        ("Rollouts", "rollouts"),
        ("Attention", "attention"),
        ("Packing", "packing"),
        ("Experts", "experts"),
    ):
        if isinstance(chosen := choices.get(name), list) and len(chosen) == 2:
            word = {True: "vLLM", False: "transformers"}.get(chosen[0], chosen[0])
            found.append((label, f"{word} ({chosen[1]})"))
    if machine:
        found.append(("Machine", machine.get("gpu") or f"no GPU, {machine.get('cores', '?')} cores"))
    seconds = [value for value in run.values("step_s") if not math.isnan(value)]
    if seconds:
        found.append(("Time", f"{duration(math.fsum(seconds))} for {len(seconds)} steps, median {duration(statistics.median(seconds))} a step"))  # fmt: skip
        found.append(("Last step ended", run.metrics[-1]["time"]))
    return found


def figures_md() -> str:
    """The glossary of figures as a Markdown table, for docs/report.md."""
    rows = [["Figure", "File", "Meaning"], ["---"] * 3]
    rows += [[title, f"`{name}{'_N' if name == 'plant' else ''}.png`", line] for name, (title, line) in FIGURES.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
