# SPDX-License-Identifier: Apache-2.0
"""Puts together what every process of a run checked for itself: all problems once, and one run for all."""

from __future__ import annotations

import dataclasses

from grpo.data.files import data_fingerprint
from grpo.preflight.resolve import ResolvedRun
from grpo.settings import Problems, show


def merge_rank_problems(resolved: ResolvedRun) -> ResolvedRun:
    """`resolved` with the problems of all ranks, the same on each: a problem that only some ranks have names these."""
    ranks = resolved.ranks
    if ranks.size == 1:
        return resolved
    facts = {name: show(value) for name, value in dataclasses.asdict(resolved.settings).items()}
    facts |= {"GPUs": str(resolved.machine.gpus), "vLLM": "used" if resolved.use_vllm else "not used"}
    facts |= {"rows of DATA and EVAL_DATA": data_fingerprint([*resolved.rows, *resolved.eval_rows])[:8]}
    reports = ranks.share((list(resolved.problems), facts))
    problems = Problems()
    for text in dict.fromkeys(text for texts, _ in reports for text in texts):
        affected = [rank for rank, (texts, _) in enumerate(reports) if text in texts]
        problems.append(text if len(affected) == ranks.size else f"{text} ({ranks_text(affected)})")
    for name, first in reports[0][1].items() if not problems else ():
        if others := [rank for rank, (_, values) in enumerate(reports) if values[name] != first]:
            fix = "Every process needs one GPU, and every machine the same settings, files and packages"
            problems.add(name, f"{first} on rank 0 and {reports[others[0]][1][name]} on {ranks_text(others)}", fix)
            break  # The other differences may follow from this one.
    return dataclasses.replace(resolved, problems=problems)


def ranks_text(ranks: list[int]) -> str:
    """The ranks in words: `rank 1` or `ranks 1, 3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def adopt_rank0_state(resolved: ResolvedRun) -> ResolvedRun:
    """`resolved` with the step and the batch that rank 0 goes on from, which has locked OUTPUT_DIR and inspected it.
    Raises RankLost where rank 0 does not go on."""
    run, plan = resolved.run, resolved.plan
    assert plan  # A run that passed its checks has one.
    step, batch = resolved.ranks.broadcast((run.step, plan.generation_batch))
    plan = dataclasses.replace(plan, generation_batch=batch)
    return dataclasses.replace(resolved, plan=plan, run=dataclasses.replace(run, step=step))
