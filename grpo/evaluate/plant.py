# SPDX-License-Identifier: Apache-2.0
"""The model runs the plant before and after training."""

from __future__ import annotations

import time
from collections.abc import Sequence

from grpo.data.prompts import render
from grpo.evaluate.heldout import generate_completions, measure_rewards
from grpo.learn.trainer import Trainer
from grpo.preflight.checks import Preflight
from grpo.preflight.choices import ClosedLoop
from grpo.settings import log
from grpo.tasks.tes.closed_loop import DECISIONS
from grpo.tasks.tes.prompts import renderer
from grpo.tasks.tes.record import keep_models, new_record, run_model, sampling_of, table, write_record

CLOSED_LOOP = "closed_loop.json"


def measure_closed_loop(trainer: Trainer, plan: ClosedLoop, template: str | None, base: bool) -> None:
    """closed_loop.json: the base model or the trained adapter controls the plant through the windows of EVAL_PROFILE. A
    resumed run keeps the base model's. `template`: the model's chat template."""
    s, started = trainer.run.settings, time.perf_counter()
    said = started
    if not plan.prompt:
        log.info("no closed loop: %s", plan.reason)
        return
    path, name = trainer.run.folder / CLOSED_LOOP, "base" if base else "trained"
    record = new_record(plan.cases, plan.profiles, s.EVAL_SAMPLES, False, sampling_of(s, plan.prompt))
    keep_models(record, path, ("base",))
    render_state = renderer(plan.prompt, lambda turns: render(template, turns, s.REASONING_EFFORT, s.PROMPT_DATE))

    def ask(prompts: Sequence[str], samples: int, hour: int) -> list[str]:
        nonlocal said
        if time.perf_counter() - said > 30:
            said = time.perf_counter()
            log.info("closed loop, %s model: decision %d of %d", name, hour + 1, DECISIONS)
        # Step 0 is the held-out rows' seed.
        ids = generate_completions(trainer, [p for p in prompts for _ in range(samples)], samples, base, hour + 1)
        return trainer.processing_class.batch_decode(ids, skip_special_tokens=False)

    if name not in record["totals"]:
        run_model(record, name, plan.cases, ask, render_state)
    write_record(record, path)
    regret = record["totals"][name]["regret_percent"]
    shown = "" if regret is None else f": regret {regret:.1f} % of the optimum's priced CO2"
    log.info("closed loop, %s model%s (%.1f s)", name, shown, time.perf_counter() - started)
    if not base:
        log.info("\n%s\n", table(record))


def measure(check: Preflight, trainer: Trainer, base: bool) -> None:
    """Both evaluations, of the base model (`base`) or of the trained adapter; none where EVAL_SAMPLES is 0."""
    if check.eval_rows:
        measure_rewards(trainer, check.eval_rows, base)
        measure_closed_loop(trainer, check.closed_loop, check.files.template, base)
