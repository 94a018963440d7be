# SPDX-License-Identifier: Apache-2.0
"""The evaluations of a run, from before its first step to after its last, and the choice of its best adapter."""

from pathlib import Path

from grpo.common import format_exception, log
from grpo.data.files import data_fingerprint
from grpo.evaluate.heldout_reward import HeldoutEvaluation, Results, measure_rewards, trainer_evaluation
from grpo.evaluate.models import ModelResponder, trained_model
from grpo.figures.text import with_interval
from grpo.figures.verdict import objection, reward_comparisons
from grpo.learn.trainer import Trainer
from grpo.output import best
from grpo.output.archive import model_card
from grpo.output.durable import read_measured, write_sealed, write_text
from grpo.phases import Phase
from grpo.preflight.resolve import ResolvedRun
from grpo.tasks.simulator import GREEDY, Record, Simulator, load_simulator

CLOSED_LOOP = "closed_loop.json"
Columns = dict[str, float]  # the columns of metrics.csv that have a value


class Progress:
    """Measures a run before, during and after training. Without held-out rows it does nothing."""

    def __init__(self, resolved: ResolvedRun):
        self.resolved = resolved
        self.simulator = load_simulator(resolved.settings.TASK) if resolved.closed_loop.runs else None
        self.base: Columns = {}
        self.base_results: Results = {}  # evaluation.json before the first step

    def before(self, trainer: Trainer) -> None:
        """Measure the base model, and INIT_ADAPTER as step 0. `during` needs these figures for comparison."""
        if not self.resolved.eval_rows:
            return
        starts = bool(self.resolved.settings.INIT_ADAPTER and not self.resolved.state.checkpoint)
        self.base_results = measure_rewards(self.evaluation(trainer), trainer.run.folder, base=True, start=starts)
        record = self.simulation_record(trainer, base=True)
        self.base = self.columns(self.base_results["before"]["reward"], record, "base")
        if starts:
            self.during(trainer)  # INIT_ADAPTER may stay the best adapter

    def during(self, trainer: Trainer) -> Columns:
        """Measure the current adapter and return its columns of metrics.csv."""
        with Phase(f"evaluation after step {trainer.state.global_step}"):
            evaluation, record = self.evaluation(trainer), None
            results = dict(self.base_results)
            # Before the first step this is the start adapter, which was measured, and is not compared with itself.
            is_start = not trainer.state.global_step and "start" in results
            results["after"] = results.pop("start") if is_start else evaluation.measure()
            evaluation.add_differences(results)
            reward = results["after"]["reward"]
            if self.simulator:
                record = self.new_record(self.simulator, trainer)
                responder = ModelResponder(trained_model(trainer), base=False)
                self.simulator.run(self.resolved.closed_loop, record, "trained", responder, greedy=False)
                if is_start:
                    write_sealed(trainer.run.folder / CLOSED_LOOP, self.simulator.as_start(record))
        columns = self.columns(reward, record)
        step = trainer.state.global_step
        when = f"after step {step}" if step else "INIT_ADAPTER before the first step"
        text = [f"held-out reward {with_interval({'reward': reward}, 'reward')}"]
        text += [self.simulator.summary(record, "trained")] if self.simulator and record else []
        log.info("measured %s: %s", when, ", ".join(text))
        self.keep_best(trainer, columns, results, record)
        return columns

    def after(self, trainer: Trainer) -> None:
        """Measure the trained adapter, and log which adapter is the best."""
        if not self.resolved.eval_rows:
            log.info("nothing was measured, no rows are held out: %s", self.resolved.heldout_reason)
            return
        results = measure_rewards(self.evaluation(trainer), trainer.run.folder, base=False)
        record = self.simulation_record(trainer, base=False)
        if chosen := self.keep_best(trainer, self.columns(results["after"]["reward"], record), results, record):
            (log.warning if objection(chosen) else log.info)("best adapter: %s", chosen["in_words"])

    def evaluation(self, trainer: Trainer) -> HeldoutEvaluation:
        return trainer_evaluation(trainer, self.resolved.eval_rows, self.resolved.exact)

    def simulation_record(self, trainer: Trainer, base: bool) -> Record | None:
        """Lets the base model or the trained adapter act in the simulator, writes closed_loop.json and returns it. A
        resumed run keeps the base model's figures. None if no simulator runs; the log says why not if rows or settings
        refer to it."""
        if self.simulator is None:
            if self.resolved.closed_loop.is_mentioned:
                log.info("no closed loop: %s", self.resolved.closed_loop.reason)
            return None
        name, record = "base" if base else "trained", self.new_record(self.simulator, trainer)
        with Phase(f"closed loop, {name} model") as phase:
            if not {name, name + GREEDY} <= record["totals"].keys():
                responder = ModelResponder(trained_model(trainer), base)
                self.simulator.run(self.resolved.closed_loop, record, name, responder)
            write_sealed(trainer.run.folder / CLOSED_LOOP, record)
            phase.result = self.simulator.summary(record, name)
        if not base:
            log.info("\n%s\n", self.simulator.table(record))
        return record

    def new_record(self, simulator: Simulator, trainer: Trainer) -> Record:
        """A new closed_loop.json, with the base model's figures if the file has them from the same measurement."""
        resolved, path = self.resolved, trainer.run.folder / CLOSED_LOOP
        samples = resolved.settings.EVAL_SAMPLES
        record = simulator.new_record(resolved.closed_loop, resolved.settings, samples, resolved.exact_loop)
        if earlier := read_measured(path):
            try:
                simulator.keep_base(record, earlier)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                problem = "is not as a run wrote it, so its figures are measured again"
                log.warning("%s %s (%s)", path.name, problem, format_exception(error))
                record = simulator.new_record(resolved.closed_loop, resolved.settings, samples, resolved.exact_loop)
        return record

    def columns(self, reward: float | None, record: Record | None, name: str = "trained") -> Columns:
        """The columns of metrics.csv for the model `name`; `reward` is None if no function returned a number."""
        columns = {} if reward is None else {"heldout_reward": reward}
        return columns | (self.simulator.figures(record, name) if self.simulator and record else {})

    def keep_best(self, trainer: Trainer, columns: Columns, results: Results, record: Record | None) -> best.Record:
        """Keep the adapter if it is the best. `results` and `record` are evaluation.json and closed_loop.json with its
        figures. Returns best.json."""
        resolved, values = self.resolved, {"step": trainer.state.global_step} | columns
        s = resolved.settings
        windows, rows = list(resolved.closed_loop.episodes), data_fingerprint(resolved.eval_rows)
        conditions: best.Record = {"samples": s.EVAL_SAMPLES, "temperature": s.EVAL_TEMPERATURE}
        conditions |= {"exact": resolved.exact, "windows": windows, "rows": rows}

        def save(folder: Path, chosen: best.Record) -> None:
            trainer.model.save_pretrained(str(folder))
            words = f"S{chosen['in_words'][1:]}.\n"
            card = model_card(s, trainer.state.global_step, trainer.reward_summary, words)
            write_text(folder / "README.md", card)

        if resolved.best_by == "reward":
            comparisons = reward_comparisons(results)
        else:
            comparisons = self.simulator.comparisons(record) if self.simulator and record else []
        return best.keep_best(trainer.run.folder, resolved.best_by, self.base, conditions, values, save, comparisons)
