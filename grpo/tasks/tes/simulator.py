# SPDX-License-Identifier: Apache-2.0
"""The TES plant as the simulator of its task: the model controls it through the windows of EVAL_PROFILE."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo.common import InputError, Problems
from grpo.data.files import Row, find_files, read_rows
from grpo.data.prompts import render
from grpo.figures.text import finite_number, object_at, table_lines, with_interval, wrapped
from grpo.figures.verdict import BASE, RARE_LOSSES, RULE, START_ADAPTER, Comparison, verdict
from grpo.harmony import open_answer
from grpo.settings.table import Settings
from grpo.tasks.simulator import GREEDY, Record, ReportSection, Responder, Simulator
from grpo.tasks.tes import closed_loop as loop
from grpo.tasks.tes import record as tes_record
from grpo.tasks.tes.plant import DECISION_DAYS, PLANT
from grpo.tasks.tes.profiles import Window
from grpo.tasks.tes.prompts import prompt_kind, renderer
from grpo.tasks.tes.record import ClosedLoopPlan

PROFILE = "data/profile_heldout.csv"  # of the demo's held-out rows
HEADER = ("", "CO2, kg", "Cycled, kWh", "Regret, %", "Unparsed", "Unserved, kWh", "In windows", "Worst window (kWh)")
NOTE = (
    "Totals over all windows. Regret: cost above the optimum's, in brackets its 95% interval over windows. Little CO2 "
    "is worth nothing where load stays unserved."
)
# Models that left less in every window gained nothing by a second run (docs/maintainers/proof.md).
MUCH_KWH = 1.0
SECOND_RUN = "The trained model leaves load unserved: a second run with REWARDS=cost often serves it (docs/data.md)."
UNSERVED_LOSSES = f"Load stayed unserved in some windows, and {RARE_LOSSES.format('window')}."


def skip_reason(settings: Settings, kind: str | None, use_vllm: bool, is_chosen: bool) -> str:
    """Why the closed loop does not run beside held-out prompts of this kind (None: others or none); else empty."""
    if not settings.EVAL_SAMPLES:
        return "EVAL_SAMPLES=0"
    if settings.EVAL_PROFILE is not None and not settings.EVAL_PROFILE.strip():
        return "EVAL_PROFILE is empty"
    if kind is None:
        return "no held-out prompts are those of the plant in scripts/make_dataset.py"
    if settings.EVAL_PROFILE is None:
        return "set EVAL_PROFILE to the hourly profile of the held-out days to run it on the plant"
    if settings.MODEL_ID != "tiny" and not (use_vllm or settings.DIRECT_ANSWERS) and not is_chosen:
        return "transformers takes too long for its consecutive hours; set EVAL_PROFILE to run it nevertheless"
    return ""


def why_sampled(settings: Settings, kind: str | None) -> str:
    """Why the model's answers are sampled, with prompts of this kind; empty if the probabilities of all answers can be
    computed. With DIRECT_ANSWERS these take one pass over a prompt."""
    if kind == "full" and not settings.DIRECT_ANSWERS:
        return "full prompts are too long and too many to ask all that can happen"
    return ""


def make_plan(
    settings: Settings, files: Sequence[Path], where: str, prompt: str, template: str | None, problems: Problems
) -> ClosedLoopPlan:
    """The plan of a closed loop over the windows in `files`, which the setting or option `where` names. Adds a problem
    for each fault in them. Without a window the loop does not run."""
    windows: list[tuple[str, Window]] = []
    for path in files:
        try:
            windows += tes_record.read_windows(path)
        except InputError as error:
            problems += [f"{where}: {line}" for line in error.args]
    optimum_kg = round(sum(loop.optimal_kg(window) for _, window in windows), 1) + 0.0  # Not -0.0.
    if windows and optimum_kg <= 0:
        fault = f"the optimum of these days costs {optimum_kg:,.1f} kg CO2, and regret is a share of that"
        problems.add(where, fault, "Name days with more cooling load, or no profile")
    if prompt == "compact" and template is None:
        fix = "Add chat_template.jinja, or take full prompts"
        problems.add(f"MODEL_ID={settings.MODEL_ID}", "it has no chat template", fix)
    effort, date = settings.REASONING_EFFORT, settings.PROMPT_DATE
    render_state = renderer(prompt, lambda turns: render(template or "", tuple(turns), effort, date))
    profiles = tuple(path.name for path in files)
    return ClosedLoopPlan(
        reason=f"{len(windows)} windows of {', '.join(profiles)}, {loop.DECISIONS} decisions one after the other",
        runs=bool(windows),
        is_mentioned=True,
        why_sampled=why_sampled(settings, prompt),
        episodes=tuple(name for name, _ in windows),
        dates=tuple(dict.fromkeys(str(day) for _, window in windows for day in window.dates[:DECISION_DAYS])),
        prompt=prompt,
        profiles=profiles,
        windows=tuple(window for _, window in windows),
        render=(lambda state: open_answer(render_state(state))) if settings.DIRECT_ANSWERS else render_state,
    )


def recorded_prompt(settings: Settings) -> tuple[str, str]:
    """(kind of the prompts, reason), read from the run's held-out or training rows if their files can be read."""
    for name in ("EVAL_DATA", "DATA"):
        rows = read_rows(name, getattr(settings, name) or "", Problems())
        if rows and (kind := prompt_kind([row.messages for row in rows])):
            return kind, f"as in {name}"
    kind = "compact" if settings.MODEL_ID == "tiny" else "full"
    return kind, "none of the plant could be read from the run's data; the model's usual kind"


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
        if reason := skip_reason(settings, kind, use_vllm, is_chosen):
            is_mentioned = bool(kind or settings.EVAL_PROFILE)
            return ClosedLoopPlan(reason, is_mentioned=is_mentioned, why_sampled=why_sampled(settings, kind))
        files = find_files("EVAL_PROFILE", settings.EVAL_PROFILE or "", problems)
        plan = make_plan(settings, files, "EVAL_PROFILE", kind or "", template, problems)
        reason = f"the held-out prompts are the plant's ({kind}); {plan.reason}"
        return dataclasses.replace(plan, reason=reason)

    def plan_by_hand(
        self, profiles: Sequence[str], settings: Settings, template: str | None, problems: Problems
    ) -> ClosedLoopPlan:
        files = find_files("--profile", ",".join(profiles) or settings.EVAL_PROFILE or PROFILE, problems)
        kind, reason = recorded_prompt(settings)
        plan = make_plan(settings, files, "--profile", kind, template, problems)
        return dataclasses.replace(plan, reason=f"{kind} prompts ({reason}), {plan.reason}")

    new_record = staticmethod(tes_record.new_record)
    keep_base = staticmethod(tes_record.keep_base)
    as_start = staticmethod(tes_record.as_start)

    def run(self, plan: ClosedLoopPlan, record: Record, name: str, responder: Responder, greedy: bool = True) -> None:
        if record["exact"]:
            probabilities = functools.partial(responder.probabilities, actions=len(PLANT.ratios))
            tes_record.run_exact(plan, record, name, probabilities)
            return
        for is_greedy in (False, True) if greedy else (False,):
            ask = functools.partial(responder.texts, greedy=is_greedy)
            tes_record.run_model(plan, record, name + GREEDY if is_greedy else name, ask)

    def figures(self, record: Record, name: str) -> dict[str, float]:
        total = object_at(record, "totals", name)
        names = {"plant_regret": "regret_percent", "plant_unserved_kwh": "unserved_kwh"}
        figures = {column: finite_number(total.get(key)) for column, key in names.items()}
        return {column: value for column, value in figures.items() if not math.isnan(value)}

    def summary(self, record: Record, name: str) -> str:
        return f"{super().summary(record, name)}, {unserved_text(record['totals'][name], len(record['windows']))}"

    def table(self, record: Record) -> str:
        how = "exact" if record["exact"] else f"{record['samples']} passes"
        lines = [f"Closed loop, {len(record['windows'])} windows of three days, {how}"]
        lines += table_lines([HEADER, *policy_rows(record)])
        if "difference" in record:
            change = with_interval(record["difference"], "regret_percent", "+.1f", "95% interval ")
            lines.append(f"  trained against base: regret {change} points")
        if "difference_start" in record:
            change = with_interval(record["difference_start"], "regret_percent", "+.1f", "95% interval ")
            lines.append(f"  trained against start: regret {change} points")
        lines += wrapped(verdict(self.comparisons(record)))
        if needs_second_run(record):
            lines += wrapped(SECOND_RUN)
        if any(map(hides_losses, record["totals"].values())):
            lines += wrapped(f"* {UNSERVED_LOSSES}")
        return "\n".join(lines)

    def comparisons(self, record: Record) -> list[Comparison]:
        """Gains are regret that the trained model saves."""
        totals, windows = object_at(record, "totals"), len(record.get("windows", ()))
        gains = []
        if "base" in totals and "trained" in totals:
            gains.append(saved_regret(BASE, object_at(record, "difference"), windows))
        if "difference_start" in record:
            gains.append(saved_regret(START_ADAPTER, object_at(record, "difference_start"), windows))
        if "trained" in totals and (rule := tes_record.best_rule(totals)):
            gains.append(saved_regret(RULE.format(rule), object_at(record, "difference_rule"), windows))
        return gains

    def report(self, record: Record) -> ReportSection:
        sentences, base, trained = "", object_at(record, "totals", "base"), object_at(record, "totals", "trained")
        if base and trained:
            change = object_at(record, "difference")
            regret = [finite_number(total.get("regret_percent")) for total in (base, trained)]
            unserved = [finite_number(total.get("unserved_kwh")) for total in (base, trained)]
            difference = with_interval(change, "regret_percent", "+,.1f", "95% interval ")
            sentences = (
                f"At the plant regret went from {regret[0]:,.1f}% to {regret[1]:,.1f}%, by {difference} points: "
                f"{verdict(self.comparisons(record))}. "
                f"Load left unserved: {unserved[0]:,.1f} kWh before, {unserved[1]:,.1f} after, "
                f"{unserved_text(trained, len(record['windows']))}."
            )
            sentences += f" {SECOND_RUN}" if needs_second_run(record) else ""
            sentences += f" {UNSERVED_LOSSES}" if hides_losses(base) or hides_losses(trained) else ""
        is_marked = any(map(hides_losses, object_at(record, "totals").values()))
        note = f"{NOTE} * {UNSERVED_LOSSES}" if is_marked else NOTE
        return ReportSection(sentences, "Closed loop at the plant", HEADER, policy_rows(record), note)


def saved_regret(other: str, figures: Mapping[str, object], windows: int) -> Comparison:
    """The comparison with another policy, from the difference to its regret in `figures`, over so many `windows`. Only
    where there is no interval their number is said: the report warns of rare losses where load stayed unserved."""
    low, high = (0.0 - finite_number(figures.get(f"regret_percent_{end}")) for end in ("high", "low"))
    if math.isnan(low + high):
        return Comparison(other, None, None, windows, "window")
    return Comparison(other, low, high, unit="window")


def hides_losses(policy: Mapping[str, object]) -> bool:
    """Whether a policy left load unserved in some windows and has an interval, which then may hide rare losses."""
    return finite_number(policy.get("unserved_windows")) > 0 and policy.get("regret_percent_low") is not None


def needs_second_run(record: Record) -> bool:
    """Whether a first run's model left so much load unserved in a window that a second run is worth its time: load that
    the optimum serves, since no run serves what is above the plant's capacity."""
    trained, optimum = (object_at(record, "totals", name) for name in ("trained", "optimum"))
    above = finite_number(trained.get("unserved_kwh")) - finite_number(optimum.get("unserved_kwh"))
    is_much = finite_number(trained.get("worst_unserved_kwh")) > MUCH_KWH and above > MUCH_KWH
    return is_much and "difference_start" not in record  # A run with INIT_ADAPTER compares with its start.


def unserved_text(policy: Mapping[str, object], windows: int) -> str:
    """Words that follow a policy's unserved kWh: in how many windows load stayed unserved, and the worst window."""
    if not policy["unserved_windows"]:
        return f"in none of {windows} windows"
    worst = f"{policy['worst_window']} with {finite_number(policy['worst_unserved_kwh']):,.1f} kWh"
    return f"in {policy['unserved_windows']} of {windows} windows, worst {worst}"


def policy_rows(record: Record) -> list[list[str]]:
    """The rows below HEADER, in the record's order: models, the optimum, then the fixed rules."""
    rows = []
    for name, policy in object_at(record, "totals").items():
        keys = ("co2_kg", "storage_cycled_kwh", "unserved_kwh")
        co2, cycled, unserved = (f"{finite_number(policy.get(key)):,.1f}" for key in keys)
        regret = with_interval(policy, "regret_percent", ",.1f") + (" *" if hides_losses(policy) else "")
        answers = f"{policy['unparsed']:.0f} of {policy['answers']}" if policy.get("answers") else ""
        windows = f"{policy['unserved_windows']} of {len(record['windows'])}"
        row = [name.replace("_", " "), co2, cycled, regret, answers, unserved, windows]
        if policy.get("worst_window"):
            row.append(f"{policy['worst_window']} ({policy['worst_unserved_kwh']:,.1f})")
        rows.append(row)
    return rows


SIMULATOR = ClosedLoop()
