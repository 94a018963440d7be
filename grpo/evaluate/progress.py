# SPDX-License-Identifier: Apache-2.0
"""The evaluations of a run, from before its first step to behind its last: what they say about it, and the best adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.data.files import data_fingerprint
from grpo.evaluate.heldout import evaluate, measure_rewards
from grpo.evaluate.plant import measure_closed_loop, plant_record, run_plant
from grpo.learn.trainer import Trainer
from grpo.phases import Phase
from grpo.preflight.resolve import ResolvedRun
from grpo.run import best
from grpo.run.archive import model_card
from grpo.run.durable import write_text
from grpo.run.logs import banner_text
from grpo.settings import log


@dataclass(frozen=True)
class Figures:
    """What was measured after a step (0: the base model, or INIT_ADAPTER as it is): held-out reward, and of the closed loop regret [%] and unserved
    load [kWh], None where it does not run."""

    step: int
    reward: float | None  # None: no function gave one
    regret: float | None = None
    unserved: float | None = None
    change_low: float | None = None  # low end of the 95% interval of the regret's change, paired over windows

    @classmethod
    def of(cls, step: int, reward: float, record: Mapping[str, Any] | None, base: bool = False) -> Figures:
        """From the held-out reward and closed_loop.json, of the adapter or of the `base` model."""
        if not record:
            return cls(step, reward)
        total = record["totals"]["base" if base else "trained"]
        low = None if base else record.get("difference", {}).get("regret_percent_low")
        return cls(step, reward, total["regret_percent"], total["unserved_kwh"], low)

    @property
    def columns(self) -> dict[str, float]:
        """Those of metrics.csv that have a value."""
        values = {"heldout_reward": self.reward, "plant_regret": self.regret, "plant_unserved_kwh": self.unserved}
        return {name: value for name, value in values.items() if value is not None}


def plant_warning(base: Figures, now: Figures, exact: bool) -> str | None:
    """A sentence where the plant got worse than the base model's while the held-out reward rose; None else. Figures that
    were sampled count only where the interval over windows says so, exact ones as they are."""
    if None in (now.regret, base.regret, now.reward, base.reward) or now.reward <= base.reward:
        return None
    if not (now.regret > base.regret if exact else now.change_low is not None and now.change_low > 0):
        return None
    return (
        f"The reward rises and the plant gets WORSE, step {now.step} against the base model: held-out reward {base.reward:.3f} "
        f"to {now.reward:.3f}, regret {base.regret:.1f} to {now.regret:.1f} %, unserved load {base.unserved:,.0f} to "
        f"{now.unserved:,.0f} kWh. Read docs/evaluation.md#read-both; train on more short hours (make_dataset.py "
        "--short-share), lower LEARNING_RATE, or load an earlier adapter (best/)"
    )


class Progress:
    """Measures before, while and after a run trains. Without held-out rows it does nothing."""

    def __init__(self, resolved: ResolvedRun):
        self.resolved, self.exact, self.by = resolved, resolved.exact, resolved.best_by
        self.base: Figures | None = None
        self.warned = False  # about the plant, in the evaluation before

    def before(self, trainer: Trainer) -> None:
        """The base model, and INIT_ADAPTER as step 0; after it `during` may be called every EVAL_STEPS steps."""
        if self.resolved.eval_rows:
            results = measure_rewards(trainer, self.resolved.eval_rows, self.exact, base=True)
            record = measure_closed_loop(self.resolved, trainer, base=True)
            self.base = Figures.of(0, results["before"]["reward"], record, base=True)
            if self.resolved.settings.INIT_ADAPTER and not self.resolved.run.checkpoint:
                self.during(trainer)  # it may be better than all that is learned from it

    def during(self, trainer: Trainer) -> dict[str, float]:
        """Columns of metrics.csv, measured with the adapter as it is now."""
        with Phase(f"evaluation after step {trainer.state.global_step}"):
            reward, record = evaluate(trainer, self.resolved.eval_rows, self.exact)["reward"], None
            if self.resolved.closed_loop.prompt:
                record = plant_record(self.resolved, trainer)
                run_plant(self.resolved, trainer, record, "trained", greedy=False)
        now = Figures.of(trainer.state.global_step, reward, record)
        self.judge(trainer, now)
        return now.columns

    def after(self, trainer: Trainer) -> None:
        """The trained adapter, and the last words about the run."""
        if not self.resolved.eval_rows:
            log.info("nothing was measured, no rows are held out: %s", self.resolved.reasons["heldout"])
            return
        results = measure_rewards(trainer, self.resolved.eval_rows, self.exact, base=False)
        record = measure_closed_loop(self.resolved, trainer, base=False)
        found = self.judge(trainer, Figures.of(trainer.state.global_step, results["after"]["reward"], record), True)
        if found:
            (log.info if found["better_than_base"] else log.warning)("best adapter: %s", found["in_words"])

    def judge(self, trainer: Trainer, now: Figures, last: bool = False) -> best.Record:
        """Log the figures of a step, warn where the plant gets worse, keep the adapter if it is the best; returns
        best.json."""
        shown = "" if now.regret is None else f", plant regret {now.regret:.1f} %, unserved {now.unserved:,.1f} kWh"
        if not last:
            when = f"after step {now.step}" if now.step else "INIT_ADAPTER before the first step"
            reward = "-" if now.reward is None else f"{now.reward:.3f}"
            log.info("measured %s: held-out reward %s%s", when, reward, shown)
        warning = plant_warning(self.base, now, self.exact)
        if warning and (last or not self.warned):
            log.warning(banner_text(warning))
        self.warned = warning is not None
        s, evaluated = self.resolved.settings, self.resolved.closed_loop
        measured = {"samples": s.EVAL_SAMPLES, "temperature": s.EVAL_TEMPERATURE, "exact": self.exact}
        measured |= {
            "windows": [case.name for case in evaluated.cases],
            "rows": data_fingerprint(self.resolved.eval_rows),
        }

        def save(folder: Path, record: best.Record) -> None:
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(str(folder))
            words = f"S{record['in_words'][1:]}.\n"
            card = model_card(s, now.step, trainer.functions, words, tokenizer="..")
            write_text(folder / "README.md", card)

        values = {"step": now.step} | now.columns
        return best.keep_best(trainer.run.folder, self.by, self.base.columns, measured, values, save)
