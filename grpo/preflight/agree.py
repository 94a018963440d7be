# SPDX-License-Identifier: Apache-2.0
"""What every process of a run checked for itself, put together: all problems once, and one run for all."""

from __future__ import annotations

import dataclasses

from grpo.data.files import data_fingerprint
from grpo.preflight.checks import Preflight
from grpo.run.ranks import Ranks
from grpo.settings import Problems, show


def agreed(found: Preflight) -> Preflight:
    """`found` with the problems of all ranks, the same on each of them: one that only some have names these."""
    ranks = found.ranks
    if ranks.size == 1:
        return found
    alike = {name: show(value) for name, value in dataclasses.asdict(found.settings).items()}
    alike |= {"GPUs": str(found.machine.gpus), "vLLM": "used" if found.rollouts[0] else "not used"}
    alike |= {"rows of DATA and EVAL_DATA": data_fingerprint([*found.rows, *found.eval_rows])[:8]}
    chosen = [name for name, source in found.sources.items() if source == "chosen"]
    said = ranks.share((list(found.problems), alike, chosen))
    problems = Problems()
    for text in dict.fromkeys(text for theirs, *_ in said for text in theirs):
        who = [rank for rank, (theirs, *_) in enumerate(said) if text in theirs]
        problems.append(text if len(who) == ranks.size else f"{text} ({named(who)})")
    for name, first in said[0][1].items() if not problems else ():
        if other := [rank for rank, (_, theirs, _) in enumerate(said) if theirs[name] != first]:
            fix = "Every process needs one GPU, and every machine the same settings, files and packages"
            if any(name in names for *_, names in said):  # by the memory of each GPU
                fix = f"Set {name} to one of the two"
            problems.add(name, f"{first} on rank 0 and {said[other[0]][1][name]} on {named(other)}", fix)
            break  # the rest may follow from it
    return dataclasses.replace(found, problems=problems)


def named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def follow(found: Preflight) -> Preflight:
    """`found` with what rank 0, which has locked and looked at OUTPUT_DIR, goes on from. Raises RankLost where it does not."""
    ranks: Ranks = found.ranks
    step, batch = ranks.broadcast((found.run.step, found.plan.generation_batch))
    if not ranks.rank:
        return found
    plan = dataclasses.replace(found.plan, generation_batch=batch)
    return dataclasses.replace(found, plan=plan, run=dataclasses.replace(found.run, step=step))
