# SPDX-License-Identifier: Apache-2.0
"""The checks of scripts/sft.py: those of train_grpo.py with the same settings, and that rows have answers."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from grpo.common import Problems
from grpo.data.files import MOST_PROBLEMS
from grpo.data.heldout import read_split
from grpo.data.prompts import answer_of, count_tokens
from grpo.harmony import open_answer
from grpo.output.layout import ADAPTER, DELETING, NO_RUN, SETTINGS
from grpo.plan.hub import find_model
from grpo.plan.machine import installed_versions
from grpo.preflight.checks import preflight
from grpo.preflight.choices import choose_demo
from grpo.preflight.resolve import ResolvedRun, resolve_steps
from grpo.settings.environment import load_settings

# Nothing is generated, scored or evaluated, and rows are padded, which only eager attention takes.
ONLY_LEARNING = {
    "USE_VLLM": "0",
    "EVAL_SAMPLES": "0",
    "REWARDS": "format",
    "ATTN_IMPL": "eager",
    "PACKING": "none",
    "BEST_BY": "auto",
    "DIRECT_ANSWERS": "0",  # `sft_preflight` opens the prompts itself.
}


def was_killed(out: Path) -> bool:
    """Whether `out` holds only files of a killed scripts/sft.py, which writes the adapter last, and no log."""
    names = {path.name for path in out.iterdir()}
    return names <= NO_RUN or (bool(names & {SETTINGS, DELETING}) and not names & {ADAPTER, "training.log"})


def sft_preflight(environ: Mapping[str, str], out: Path) -> tuple[ResolvedRun, list[str | None]]:
    """(the resolved run of the settings in `environ` with OUTPUT_DIR=`out`; each row's answer, None if it has none).

    Rows that train_grpo.py would hold out are left out here too, because its run may start from this adapter."""
    problems, answers = Problems(), []
    settings, sources = choose_demo(*load_settings(environ)[:2])
    split = read_split(settings, Problems())  # The preflight lists the problems of DATA.
    for row in split.train:
        try:
            answers.append(answer_of(row, settings.DIRECT_ANSWERS))
        except ValueError as error:
            fix = "Let prompt and answer begin with the same channel"
            problems.add(f"{row.file}, row {row.number}", str(error), fix)
    files = find_model(settings.MODEL_ID, Problems())  # The preflight lists its problems.
    lengths = {answer: len(answer) for answer in answers if answer}  # In characters, if there is no tokenizer yet.
    if files and files.tokenizer and installed_versions(["tokenizers"])["tokenizers"]:
        lengths = count_tokens(files.tokenizer, list(lengths))
    longest = max(lengths.values(), default=1)  # Memory is planned from it.
    changes = ONLY_LEARNING | {"OUTPUT_DIR": str(out), "MAX_COMPLETION_LEN": str(longest)}
    if not settings.OVERWRITE and out.is_dir() and any(out.iterdir()):
        changes["OVERWRITE"] = "1"  # The preflight would report the folder as well.
        if not was_killed(out):
            fix = "Name another folder, or set OVERWRITE=1 to replace the run in it"
            problems.add(f"--out {out}", "it is not empty", fix)
    resolved = preflight(dict(environ) | changes)
    train = {row.id for row in split.train}
    rows = [row for row in resolved.rows if row.id in train]
    if settings.DIRECT_ANSWERS and not resolved.problems:
        rows = [dataclasses.replace(row, prompt=open_answer(row.prompt)) for row in rows]
    if rows and not problems and not any(answers):
        fix = "Add a column `answer`, or rewards that differ"
        problems.add("DATA", "no row has an answer, or an action better than others", fix)
    # settings.json records the user's settings, without the changes for the checks.
    as_set = {name: getattr(settings, name) for name in (*ONLY_LEARNING, "MAX_COMPLETION_LEN", "OVERWRITE")}
    once = dataclasses.replace(settings, NUM_ITERATIONS=1)  # There is no rollout that could be learned from again.
    steps, steps_reason = resolve_steps(once, sources, sum(map(bool, answers)), Problems())
    resolved = dataclasses.replace(
        resolved,
        settings=dataclasses.replace(resolved.settings, **as_set, TOTAL_STEPS=steps),
        rows=rows,
        reasons={**resolved.reasons, "heldout": split.reason, "total_steps": steps_reason},
        problems=Problems([*resolved.problems, *problems[:MOST_PROBLEMS]]),
    )
    return resolved, answers
