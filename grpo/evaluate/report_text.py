# SPDX-License-Identifier: Apache-2.0
"""The sentences and tables of a run's report."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from grpo.common import split_commas
from grpo.evaluate.run_files import Run, duration
from grpo.figures.text import object_at, with_interval
from grpo.figures.verdict import RARE_LOSSES, loading_advice, reward_verdict
from grpo.output.layout import ADAPTER
from grpo.settings.parsing import show
from grpo.settings.table import Value
from grpo.tasks.simulator import ReportSection


def simulator_section(run: Run) -> ReportSection:
    """The section that the task's simulator writes; an empty section if nothing was simulated."""
    return run.simulator.report(run.closed_loop) if run.simulator else ReportSection()


# The names of choices in settings.json that do not say by themselves what was chosen.
CHOICES = {
    "rollouts": "vLLM generates",
    "evaluation": "exact evaluation",
    "simulation": "exact simulation",
    "best": "best adapter by",
    "heldout": "held-out rows",
    "sync": "weight sync",
}


def without_folders(text: str) -> str:
    """A setting's value with absolute paths cut to their file names, because a report may be shown to others."""
    return ", ".join(Path(part).name if part.startswith("/") else part for part in split_commas(text))


TEXTS = ("SYSTEM_PROMPT", "PROMPT_TEMPLATE")  # Settings in which a comma separates nothing and a slash begins no path.


def setting_text(name: str, value: Value) -> str:
    """A setting's value as report and card show it."""
    return show(value) if name in TEXTS else without_folders(show(value))


def adapter_advice(run: Run) -> str:
    """The advice of the run's README.md on which adapter to load, as plain text."""
    has_adapter = (run.folder / ADAPTER).is_file()
    if not run.best and not has_adapter:
        return "The run has no adapter yet, except in its checkpoints."
    advice = loading_advice(run.best, run.steps if has_adapter else None)
    return re.sub(r"\*\*|`|\n", "", advice)


def heldout_verdict(run: Run) -> str:
    """`reward_verdict` of a run; before the last evaluation how far the run has come."""
    if not run.evaluation.get("before") or run.evaluation.get("after"):
        return reward_verdict(run.evaluation)
    state = f"Training stands at step {run.steps} of {run.settings.get('TOTAL_STEPS', '?')}"
    measured = [
        f"{with_interval({'reward': reward}, 'reward')} {f'after step {step}' if step else 'before training'}"
        for step, reward in run.evaluated_steps()["heldout_reward"].dropna().items()
    ]
    if measured:
        state = f"Held-out reward was {' and '.join(dict.fromkeys([measured[0], measured[-1]]))}. {state}"
    return f"{state}: the comparison comes after the last."


def without_repeats(verdicts: Sequence[str]) -> list[str]:
    """The verdicts that say anything, with the caveat about rare losses in the first of them that has it alone."""
    kept: list[str] = []
    for text in filter(None, verdicts):
        for unit in ("prompt", "day", "window"):
            caveat = f"; {RARE_LOSSES.format(unit)}"
            text = text.replace(caveat, "") if caveat in " ".join(kept) else text
        kept.append(text)
    return kept


def facts(run: Run) -> list[tuple[str, str]]:
    """(label, text) of the run's model, data, settings, machine and time."""
    settings, machine, seconds = run.settings, object_at(run.record, "machine"), run.metrics["step_s"].dropna()
    (rewards, _), (heldout, _) = (run.choices.get(name, ("?", "")) for name in ("rewards", "heldout"))
    known = defaultdict(lambda: "?", settings)
    known |= {
        "REWARDS": settings.get("REWARDS") or rewards,
        "EVAL_DATA": settings.get("EVAL_DATA") or f"{heldout} rows held out of DATA",
    }
    names = {"Model": "MODEL_ID", "Training data": "DATA", "Held-out data": "EVAL_DATA", "Rewards": "REWARDS"}
    rows = [(label, without_folders(str(known[name]))) for label, name in names.items()]
    if start := settings.get("INIT_ADAPTER"):
        rows.append(("Starts from", "/".join(Path(str(start)).parts[-2:])))
    rows.append(("Machine", str(machine.get("gpu") or f"no GPU, {machine.get('cores', '?')} cores")))
    time = f"{duration(seconds.sum())}, median {duration(seconds.median())} a step"
    rows.append(("Steps", f"{run.steps} of {known['TOTAL_STEPS']}; {time}"))
    return rows


def settings_rows(run: Run) -> list[list[str]]:
    """The settings that are not at their defaults, and where each was set."""
    sources = [(name, source) for name, source in object_at(run.record, "sources").items() if source != "default"]
    return [[name, setting_text(name, run.settings.get(name)), str(source)] for name, source in sources]


def choices_rows(run: Run) -> list[list[str]]:
    """Every automatic choice and its reason; that of the simulation only where there was one."""
    words = {"True": "yes", "False": "no", "None": "none"}
    return [
        [CHOICES.get(name, name), words.get(str(value), str(value)), reason]
        for name, (value, reason) in run.choices.items()
        if name != "simulation" or run.simulator
    ]
