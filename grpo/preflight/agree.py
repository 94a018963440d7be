# SPDX-License-Identifier: Apache-2.0
"""What every process of a run checked for itself, put together: all problems once, and one run for all."""

from __future__ import annotations

import dataclasses

from grpo.data.files import data_fingerprint
from grpo.preflight.resolve import ResolvedRun
from grpo.settings import Problems, show


def merge_rank_problems(resolved: ResolvedRun) -> ResolvedRun:
    """`resolved` with the problems of all ranks, the same on each of them: one that only some have names these."""
    ranks = resolved.ranks
    if ranks.size == 1:
        return resolved
    facts = {name: show(value) for name, value in dataclasses.asdict(resolved.settings).items()}
    facts |= {"GPUs": str(resolved.machine.gpus), "vLLM": "used" if resolved.use_vllm else "not used"}
    facts |= {"rows of DATA and EVAL_DATA": data_fingerprint([*resolved.rows, *resolved.eval_rows])[:8]}
    chosen = [name for name, source in resolved.sources.items() if source == "chosen"]
    reports = ranks.share((list(resolved.problems), facts, chosen))
    problems = Problems()
    for text in dict.fromkeys(text for theirs, *_ in reports for text in theirs):
        who = [rank for rank, (theirs, *_) in enumerate(reports) if text in theirs]
        problems.append(text if len(who) == ranks.size else f"{text} ({ranks_text(who)})")
    for name, first in reports[0][1].items() if not problems else ():
        if others := [rank for rank, (_, theirs, _) in enumerate(reports) if theirs[name] != first]:
            fix = "Every process needs one GPU, and every machine the same settings, files and packages"
            if any(name in names for *_, names in reports):  # by the memory of each GPU
                fix = f"Set {name} to one of the two"
            problems.add(name, f"{first} on rank 0 and {reports[others[0]][1][name]} on {ranks_text(others)}", fix)
            break  # the rest may follow from it
    return dataclasses.replace(resolved, problems=problems)


def ranks_text(ranks: list[int]) -> str:
    """The ranks in words: `rank 1` or `ranks 1, 3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def adopt_rank0_state(resolved: ResolvedRun) -> ResolvedRun:
    """`resolved` with the step and the batch that rank 0, which has locked OUTPUT_DIR and looked at it, goes on from.
    Raises RankLost where rank 0 does not go on."""
    step, batch = resolved.ranks.broadcast((resolved.run.step, resolved.plan.generation_batch))
    if not resolved.ranks.rank:
        return resolved
    plan = dataclasses.replace(resolved.plan, generation_batch=batch)
    return dataclasses.replace(resolved, plan=plan, run=dataclasses.replace(resolved.run, step=step))
