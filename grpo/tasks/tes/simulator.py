# SPDX-License-Identifier: Apache-2.0
"""The TES plant as the simulator of its task: the model controls it through the windows of EVAL_PROFILE."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo.data.files import Row, find_files, read_rows
from grpo.data.prompts import open_answer, render
from grpo.settings import Problems, Settings, number
from grpo.tasks.figure_text import aligned, judged, part, spread
from grpo.tasks.figure_text import number as finite
from grpo.tasks.simulator import GREEDY, Record, ReportSection, Responder, Simulator
from grpo.tasks.tes import record as tes_record
from grpo.tasks.tes.plant import DECISION_DAYS, START_KWH, Plant
from grpo.tasks.tes.profiles import ProfileError
from grpo.tasks.tes.prompts import prompt_kind, renderer
from grpo.tasks.tes.record import Case, ClosedLoopPlan

HOURS = 24 * DECISION_DAYS
PROFILE = "data/profile_heldout.csv"  # of the demo's held-out rows
FULL_IS_SAMPLED = "full prompts are too long and too many to ask all that can happen"
MODELS = ("base", "trained", "base_greedy", "trained_greedy", "optimum")  # the others are fixed rules
HEADER = ("", "CO2, kg", "Cycled, kWh", "Regret, %", "Unparsed", "Unserved, kWh", "In windows", "Worst window (kWh)")
NOTE = (
    "Totals over all windows. Regret: cost above the optimum's, in brackets its 95% interval over windows. Little CO2 "
    "is worth nothing where load stays unserved."
)
RARE_LOSSES = (  # measured with such losses; docs/evaluation.md says the same
    "Load stayed unserved in some windows, and an interval over few windows cannot show rare losses: with one window "
    "in ten bearing a large loss, 38% of such intervals hold the truth at five windows, 65% at 15."
)


def why_not(settings: Settings, kind: str | None, use_vllm: bool, is_chosen: bool) -> str:
    """Why the closed loop does not run beside held-out prompts of this kind (None: other prompts, or none); empty where
    it runs."""
    if not settings.EVAL_SAMPLES:
        return "EVAL_SAMPLES=0"
    if settings.EVAL_PROFILE is not None and not settings.EVAL_PROFILE.strip():
        return "EVAL_PROFILE is empty"
    if kind is None:
        return "no held-out prompts are those of the plant in scripts/make_dataset.py"
    if settings.EVAL_PROFILE is None:
        return "set EVAL_PROFILE to the hourly profile of the held-out days to run it on the plant"
    if settings.MODEL_ID != "tiny" and not (use_vllm or settings.DIRECT_ANSWERS) and not is_chosen:
        return "its hours in turn take transformers too long; set EVAL_PROFILE to run it nevertheless"
    return ""


def why_sampled(settings: Settings, kind: str | None, vote: bool = False) -> str:
    """Why the model's answers are sampled, with prompts of this kind; empty where all of them can be asked. With
    DIRECT_ANSWERS the probabilities of all answers to a prompt take one pass over it."""
    if kind == "full" and not settings.DIRECT_ANSWERS:
        return FULL_IS_SAMPLED
    return "answers vote" if vote else ""


# What scripts/evaluate.py may change, and a run leaves as it is.
DEFAULTS = argparse.Namespace(
    vote=False, hours_limit=HOURS, start_kwh=START_KWH, prompt="auto", co2_column=None, load_column=None
)


def make_plan(
    settings: Settings,
    files: Mapping[Path, str],
    prompt: str,
    template: str | None,
    problems: Problems,
    options: argparse.Namespace = DEFAULTS,
) -> ClosedLoopPlan:
    """The closed loop over the windows of profiles, `files` by the setting or option that names them; what is wrong
    with them is added to `problems`. It does not run without a window."""
    cases: list[Case] = []
    for path, name in files.items():
        try:
            cases += tes_record.read_cases(path, options.co2_column, options.load_column)
        except ProfileError as error:
            problems += [f"{name}: {line}" for line in error.problems]
    if prompt == "compact" and template is None:
        fix = "Add chat_template.jinja, or take full prompts"
        problems.add(f"MODEL_ID={settings.MODEL_ID}", "it has no chat template", fix)
    effort, date = settings.REASONING_EFFORT, settings.PROMPT_DATE
    shown = renderer(prompt, lambda turns: render(template or "", tuple(turns), effort, date))
    plan = ClosedLoopPlan(
        runs=bool(cases),
        is_mentioned=True,
        why_sampled=why_sampled(settings, prompt, options.vote),
        episodes=tuple(case.name for case in cases),
        prompt=prompt,
        profiles=tuple(map(tes_record.shown_path, files)),
        cases=tuple(cases),
        render=(lambda state: open_answer(shown(state))) if settings.DIRECT_ANSWERS else shown,
        start_kwh=options.start_kwh,
        hours=options.hours_limit,
        vote=options.vote,
    )
    reason = f"{len(cases)} windows of {', '.join(plan.profiles)}, {plan.decisions} decisions one after the other"
    return dataclasses.replace(plan, rollouts=plan.decisions, reason=reason)


def recorded_prompt(settings: Settings) -> tuple[str, str]:
    """(kind of the prompts, reason): what the run's held-out or training rows are, where they can be read."""
    for name in ("EVAL_DATA", "DATA"):
        rows = read_rows(name, getattr(settings, name) or "", Problems())
        if rows and (kind := prompt_kind([row.messages for row in rows])):
            return kind, f"as in {name}"
    kind = "compact" if settings.MODEL_ID == "tiny" else "full"
    return kind, "the data of the run are not here, as the model needs"


class ClosedLoop(Simulator):
    """The plant is controlled hour by hour: the answer moves it, and its new state makes the next prompt."""

    def plan(
        self,
        settings: Settings,
        rows: Sequence[Row],
        template: str | None,
        use_vllm: bool,
        is_chosen: bool,
        problems: Problems,
    ) -> ClosedLoopPlan:
        kind = prompt_kind([row.messages for row in rows]) if rows else None
        if reason := why_not(settings, kind, use_vllm, is_chosen):
            is_mentioned = bool(kind or settings.EVAL_PROFILE)
            return ClosedLoopPlan(reason, is_mentioned=is_mentioned, why_sampled=why_sampled(settings, kind))
        files = dict.fromkeys(find_files("EVAL_PROFILE", settings.EVAL_PROFILE or "", problems), "EVAL_PROFILE")
        plan = make_plan(settings, files, kind or "", template, problems)
        reason = f"the held-out prompts are the plant's ({kind}); {plan.reason}"
        return dataclasses.replace(plan, reason=reason)

    def plan_by_hand(
        self, options: argparse.Namespace, settings: Settings, template: str | None, problems: Problems
    ) -> ClosedLoopPlan:
        if options.vote and settings.EVAL_SAMPLES < 2:
            problems.add("--vote", "it needs --samples of 2 or more", "There is nothing to count else")
        paths = []
        for name in options.profile or [PROFILE]:  # a name with a comma is one file here, not two as in a setting
            paths += [Path(name)] if Path(name).is_file() else find_files("--profile", name, problems)
        kind, reason = recorded_prompt(settings) if options.prompt == "auto" else (options.prompt, "set by --prompt")
        plan = make_plan(settings, dict.fromkeys(paths, "--profile"), kind, template, problems, options)
        return dataclasses.replace(plan, reason=f"{kind} prompts ({reason}), {plan.reason}")

    def add_options(self, parser: argparse._ActionsContainer) -> None:
        energy, hours = number(0, Plant().capacity_kwh), number(9, HOURS, int)
        parser.add_argument("--vote", action="store_true", help="the majority of N answers decides each hour")
        text = "only the first H hours of each window (default %(default)s)"
        parser.add_argument("--hours-limit", type=hours, default=HOURS, metavar="H", help=text)
        text = "stored at the start (default %(default)g)"
        parser.add_argument("--start-kwh", type=energy, default=START_KWH, metavar="E", help=text)
        text = "auto: as the held-out rows of the run (default %(default)s)"
        parser.add_argument("--prompt", choices=("auto", "full", "compact"), default="auto", help=text)
        parser.add_argument("--co2-column", metavar="NAME", help="CO2 intensity [kg/kWh], where names do not tell")
        parser.add_argument("--load-column", metavar="NAME", help="cooling load [kW], where names do not tell")

    def new_record(self, plan: ClosedLoopPlan, settings: Settings, samples: int, exact: bool) -> Record:
        return tes_record.new_record(plan, settings, samples, exact)

    def keep_models(self, record: Record, path: Path, names: Sequence[str] = ("base", "trained")) -> bool:
        return tes_record.keep_models(record, path, names)

    def run(self, plan: ClosedLoopPlan, record: Record, name: str, responder: Responder, greedy: bool = True) -> None:
        if record["exact"]:
            probabilities = functools.partial(responder.probabilities, actions=len(Plant().ratios))
            tes_record.run_exact(plan, record, name, probabilities)
            return
        for is_greedy in (False, True) if greedy else (False,):
            ask = functools.partial(responder.texts, greedy=is_greedy)
            tes_record.run_model(plan, record, name + GREEDY if is_greedy else name, ask)

    def figures(self, record: Record, name: str) -> dict[str, float]:
        total = part(record, "totals", name)
        names = {"plant_regret": "regret_percent", "plant_unserved_kwh": "unserved_kwh"}
        figures = {column: finite(total.get(key)) for column, key in names.items()}
        return {column: value for column, value in figures.items() if not math.isnan(value)}

    def summary(self, record: Record, name: str) -> str:
        return f"{super().summary(record, name)}, {unserved_text(record['totals'][name], len(record['windows']))}"

    def warning(self, base: Mapping[str, float], now: Mapping[str, float], record: Record) -> str | None:
        """Sampled figures count only where the interval over windows says so, exact ones as they are."""
        if not all({"heldout_reward", "plant_regret"} <= columns.keys() for columns in (base, now)):
            return None
        low = finite(part(record, "difference").get("regret_percent_low"))
        is_worse = now["plant_regret"] > base["plant_regret"] if record["exact"] else low > 0
        if now["heldout_reward"] <= base["heldout_reward"] or not is_worse:
            return None
        reward, regret, unserved = (
            [columns[name] for columns in (base, now)]
            for name in ("heldout_reward", "plant_regret", "plant_unserved_kwh")
        )
        return (
            f"The reward rises and the plant gets WORSE, step {now['step']} against the base model: held-out reward "
            f"{reward[0]:.3f} to {reward[1]:.3f}, regret {regret[0]:.1f} to {regret[1]:.1f} %, unserved load "
            f"{unserved[0]:,.0f} to {unserved[1]:,.0f} kWh. Read docs/evaluation.md#read-both; train on more short "
            "hours (make_dataset.py --short-share), lower LEARNING_RATE, or load an earlier adapter (best/)"
        )

    def table(self, record: Record) -> str:
        count, hours = len(record["windows"]), record["windows"][0]["hours"]
        samples = record["samples"]
        how = f"the majority of {samples} answers" if record["vote"] else f"{samples} passes"
        how = "exact" if record["exact"] else how
        lines = [f"Closed loop, {count} windows of {hours} hours from {record['start_kwh']:g} kWh, {how}"]
        lines += aligned([HEADER, *policy_rows(record)])
        if "difference" in record:
            change = spread(record["difference"], "regret_percent", "+.1f", "95% interval ")
            lines.append(f"  trained against base: regret {change} points")
        if any(map(hides_losses, record["totals"].values())):
            lines += textwrap.wrap(f"* {RARE_LOSSES}", 110, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines)

    def report(self, record: Record) -> ReportSection:
        verdict, base, trained = "", part(record, "totals", "base"), part(record, "totals", "trained")
        if base and trained:
            change = part(record, "difference")
            better = judged(-finite(change.get("regret_percent_high")), -finite(change.get("regret_percent_low")))
            regret, unserved = (
                [finite(total.get(name)) for total in (base, trained)] for name in ("regret_percent", "unserved_kwh")
            )
            moved = spread(change, "regret_percent", "+,.1f", "95% interval ")
            verdict = (
                f"At the plant regret went from {regret[0]:,.1f}% to {regret[1]:,.1f}%, by {moved} points: {better}. "
                f"Load left unserved: {unserved[0]:,.1f} kWh before, {unserved[1]:,.1f} after"
            )
            if "unserved_windows" in trained:
                verdict += f", {unserved_text(trained, len(record['windows']))}"
            verdict += f". {RARE_LOSSES}" if hides_losses(base) or hides_losses(trained) else "."
        is_marked = any(map(hides_losses, part(record, "totals").values()))
        note = f"{NOTE} * {RARE_LOSSES}" if is_marked else NOTE
        return ReportSection(verdict, "Closed loop at the plant", HEADER, policy_rows(record), note)


def hides_losses(policy: Mapping[str, object]) -> bool:
    """Whether a policy has an interval over windows, and left load unserved in some of them."""
    return finite(policy.get("unserved_windows")) > 0 and policy.get("regret_percent_low") is not None


def unserved_text(policy: Mapping[str, object], windows: int) -> str:
    """In how many of the windows a policy left load unserved, and in which one most; it follows the kWh of all."""
    if not policy["unserved_windows"]:
        return f"in none of {windows} windows"
    worst = f"{policy['worst_window']} with {finite(policy['worst_unserved_kwh']):,.1f} kWh"
    return f"in {policy['unserved_windows']} of {windows} windows, worst {worst}"


def policy_rows(record: Record) -> list[list[str]]:
    """The rows below HEADER: models first, then the fixed rules."""
    rows, totals = [], part(record, "totals")
    for name in sorted(totals, key=lambda name: name not in MODELS):
        policy = totals[name]
        keys = ("co2_kg", "storage_cycled_kwh", "unserved_kwh")
        co2, cycled, unserved = (f"{finite(policy.get(key)):,.1f}" for key in keys)
        regret = spread(policy, "regret_percent", ",.1f") + (" *" if hides_losses(policy) else "")
        answers = f"{policy['unparsed']:.0f} of {policy['answers']}" if policy.get("answers") else ""
        row = [name.replace("_", " "), co2, cycled, regret, answers, unserved]
        if "unserved_windows" in policy:  # An earlier version did not count them.
            row.append(f"{policy['unserved_windows']} of {len(record['windows'])}")
        if policy.get("worst_window"):
            row.append(f"{policy['worst_window']} ({policy['worst_unserved_kwh']:,.1f})")
        rows.append(row)
    return rows


SIMULATOR = ClosedLoop()
