# SPDX-License-Identifier: Apache-2.0
"""The model runs the plant before and after training, and while it trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo.data.prompts import render
from grpo.evaluate.heldout import exact_probabilities, generate_completions
from grpo.learn.trainer import Trainer
from grpo.phases import Phase
from grpo.preflight.resolve import ResolvedRun
from grpo.run.durable import is_intact, write_sealed
from grpo.settings import log
from grpo.tasks.tes.plant import Plant
from grpo.tasks.tes.prompts import renderer
from grpo.tasks.tes.record import GREEDY, Record, keep_models, new_record, run_exact, run_model, sampling_of, table

CLOSED_LOOP = "closed_loop.json"


def run_plant(resolved: ResolvedRun, trainer: Trainer, record: Record, name: str, greedy: bool = True) -> None:
    """Let the model, `base` or `trained`, control the plant and put it into the record; `greedy`: its greedy answers too,
    which in an exact evaluation are there anyhow."""
    s, base = trainer.run.settings, name == "base"
    plan, template = resolved.closed_loop, resolved.files.template
    render_state = renderer(plan.prompt, lambda turns: render(template, turns, s.REASONING_EFFORT, s.PROMPT_DATE))
    if record["exact"]:

        def probabilities(prompts: Sequence[str], likeliest: bool) -> np.ndarray:
            return exact_probabilities(trainer, prompts, base, likeliest, len(Plant().ratios))

        run_exact(record, name, plan.cases, probabilities, render_state)
        return
    for policy, temperature in ((name, None), (name + GREEDY, 0.0))[: 1 + greedy]:

        def ask(prompts: Sequence[str], samples: int, hour: int, temperature: float | None = temperature) -> list[str]:
            asked = [prompt for prompt in prompts for _ in range(samples)]
            # Step 0 is the held-out rows' seed.
            ids = generate_completions(trainer, asked, samples, base, hour + 1, temperature)
            return trainer.processing_class.batch_decode(ids, skip_special_tokens=False)

        run_model(record, policy, plan.cases, ask, render_state)


def plant_record(resolved: ResolvedRun, trainer: Trainer) -> Record:
    """closed_loop.json before a model was asked, with what the file holds of the base model."""
    s, plan = trainer.run.settings, resolved.closed_loop
    given = (plan.cases, plan.profiles, s.EVAL_SAMPLES, False, sampling_of(s, plan.prompt))
    record = new_record(*given, exact=resolved.exact)
    path = trainer.run.folder / CLOSED_LOOP
    if is_intact(path):
        keep_models(record, path, ("base",))
    return record


def measure_closed_loop(resolved: ResolvedRun, trainer: Trainer, base: bool) -> Record | None:
    """closed_loop.json, which is returned: the base model or the trained adapter controls the plant through the windows of
    EVAL_PROFILE. A resumed run keeps the base model's. None where the closed loop does not run."""
    if not resolved.closed_loop.prompt:
        if resolved.closed_loop.has_plant:
            log.info("no closed loop: %s", resolved.reasons["closed_loop"])
        return None
    name, record = "base" if base else "trained", plant_record(resolved, trainer)
    with Phase(f"closed loop, {name} model") as phase:
        if not {name, name + GREEDY} <= record["totals"].keys():
            run_plant(resolved, trainer, record, name)
        write_sealed(trainer.run.folder / CLOSED_LOOP, record)
        regret = record["totals"][name]["regret_percent"]
        phase.result = "" if regret is None else f"regret {regret:.1f} % of the optimum's priced CO2"
    if not base:
        log.info("\n%s\n", table(record))
    return record
