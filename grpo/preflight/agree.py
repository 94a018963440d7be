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
    about = {"settings": {name: show(value) for name, value in dataclasses.asdict(found.settings).items()}}
    about |= {"rows of DATA and EVAL_DATA": data_fingerprint([*found.rows, *found.eval_rows])}
    about |= {"a GPU": bool(found.machine.gpus), "vLLM": found.rollouts[0]}
    said = ranks.share({"problems": list(found.problems), "about": about})
    problems = Problems()
    for text in dict.fromkeys(text for one in said for text in one["problems"]):
        who = [rank for rank, one in enumerate(said) if text in one["problems"]]
        problems.append(text if len(who) == ranks.size else f"{text} ({ranks_named(who)})")
    for what, first in said[0]["about"].items() if not problems else ():
        other = [rank for rank, one in enumerate(said) if one["about"][what] != first]
        if not other:
            continue
        theirs = said[other[0]]["about"][what]
        if what == "settings":
            name = next(name for name in first if first[name] != theirs[name])
            fix = "Set it alike on every machine"
            problems.add(name, f"it is {first[name]} on rank 0 and {theirs[name]} on {ranks_named(other)}", fix)
        elif what == "a GPU":
            has, lacks = ("rank 0", ranks_named(other)) if first else (ranks_named(other), "rank 0")
            fix = "Start as many processes as there are GPUs (--nproc-per-node)"
            problems.add("GPU", f"{has} has one and {lacks} has none", fix)
        else:
            fix = "Every machine needs the same files and packages"
            problems.add(what, f"they are not the same on rank 0 and on {ranks_named(other)}", fix)
    return dataclasses.replace(found, problems=problems)


def ranks_named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def follow(found: Preflight) -> Preflight:
    """`found` with what rank 0, which has locked and looked at OUTPUT_DIR, goes on from. Raises RankLost where it does not."""
    ranks: Ranks = found.ranks
    step, batch = ranks.broadcast((found.run.step, found.plan.generation_batch))
    if not ranks.rank:
        return found
    plan = dataclasses.replace(found.plan, generation_batch=batch)
    return dataclasses.replace(found, plan=plan, run=dataclasses.replace(found.run, step=step))
