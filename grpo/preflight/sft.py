# SPDX-License-Identifier: Apache-2.0
"""Every check that scripts/sft.py needs: those of a run of train_grpo.py on the same settings, and the rows' answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from grpo.data.files import SHOWN, read_rows
from grpo.data.prompts import answer_of
from grpo.preflight.checks import Preflight, preflight
from grpo.settings import Problems, load_settings

# Nothing is generated, scored or evaluated, and rows are padded, which only eager attention takes.
ONLY_LEARNING = {"USE_VLLM": "0", "EVAL_SAMPLES": "0", "REWARDS": "format", "ATTN_IMPL": "eager", "PACKING": "none"}


def sft_preflight(environ: Mapping[str, str], out: Path) -> tuple[Preflight, list[str | None]]:
    """(the preflight of the settings in `environ` with OUTPUT_DIR=`out`, the answer of each row, None where there is none)."""
    settings, answers, problems = load_settings(environ)[0], [], Problems()
    for row in read_rows("DATA", settings.DATA, Problems()):  # the preflight tells of their problems
        try:
            answers.append(answer_of(row))
        except ValueError as error:
            problems.add(f"{row.file}, row {row.number}", str(error), "Let both begin with the same channel")
    # No token is shorter than a character: so the plan of the memory has room for every answer.
    longest = max((len(answer) for answer in answers if answer), default=1)
    changes = ONLY_LEARNING | {"OUTPUT_DIR": str(out), "MAX_COMPLETION_LEN": str(longest)}
    if not settings.OVERWRITE and out.is_dir() and any(out.iterdir()):
        problems.add(
            f"--out {out}", "it is not empty", "Name another folder, or set OVERWRITE=1 to replace the run in it"
        )
        changes["OVERWRITE"] = "1"  # the one word about it is enough
    check = preflight(dict(environ) | changes)
    if check.rows and not problems and not any(answers):
        fix = "Add a column `answer`, or rewards that differ"
        problems.add("DATA", "no row has an answer, or an action better than others", fix)
    check.problems.extend(problems[:SHOWN])
    kept = {name: getattr(settings, name) for name in (*ONLY_LEARNING, "MAX_COMPLETION_LEN")}
    return dataclasses.replace(check, settings=dataclasses.replace(check.settings, **kept)), answers
