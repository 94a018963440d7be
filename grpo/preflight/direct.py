# SPDX-License-Identifier: Apache-2.0
"""Whether a run can learn from direct answers (DIRECT_ANSWERS), and its settings then."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo.data.files import Row
from grpo.data.scoring import is_by_action
from grpo.preflight.choices import expected_reward_obstacles
from grpo.settings import Problems, Settings

# What a run has where nothing is generated, whatever was set: each prompt once, one token behind it, no vLLM.
UNUSED = {"NUM_GENERATIONS": 1, "MAX_COMPLETION_LEN": 1, "USE_VLLM": False}
REMEDY = "or set DIRECT_ANSWERS=0"


def direct_settings(settings: Settings, sources: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """(settings, sources) with UNUSED where DIRECT_ANSWERS is set."""
    if not settings.DIRECT_ANSWERS:
        return settings, dict(sources)
    changed = dataclasses.replace(settings, **UNUSED)  # type: ignore[arg-type]
    return changed, {**sources, **dict.fromkeys(UNUSED, "chosen")}


def check_direct(
    settings: Settings, names: Sequence[str], rows: Sequence[Row], tokenizer: Path | None, problems: Problems
) -> None:
    """Where DIRECT_ANSWERS is set, every row of DATA and EVAL_DATA tells the reward of each action to the functions of
    these `names`, and one token names the action. `tokenizer`: a tokenizer.json, None where there is none."""
    if not settings.DIRECT_ANSWERS:
        return
    if settings.EXPECTED_REWARD is False:
        fault = "DIRECT_ANSWERS samples nothing: it learns from the rewards of all actions alone"
        problems.add("EXPECTED_REWARD", fault, f"Unset it, {REMEDY}")
    if sampled := [name for name in names if not is_by_action(name)]:
        fault = f"{', '.join(sampled)} may depend on more than row and action, and DIRECT_ANSWERS samples nothing else"
        problems.add("REWARDS", fault, f"Leave it out, give a function of your own `by_action = True`, {REMEDY}")
    for obstacle in expected_reward_obstacles(settings, rows, names):
        fault = f"it learns from the rewards of all actions, and {obstacle}"
        problems.add("DIRECT_ANSWERS", fault, f"Change that, {REMEDY}")
    if settings.PROMPTS_PER_STEP < 2:
        fault = "DIRECT_ANSWERS computes each prompt once, and a step takes two of them at least"
        problems.add("PROMPTS_PER_STEP", fault, f"Set it to 2 or higher, {REMEDY}")
    last = max((len(row.rewards) for row in rows), default=0) - 1
    if tokenizer and last >= 0:
        from tokenizers import Tokenizer  # Inside, so that the preflight can name packages that are missing.

        if len(Tokenizer.from_file(str(tokenizer)).encode(str(last), add_special_tokens=False).ids) > 1:
            fault = f"DIRECT_ANSWERS chooses one token, and its tokenizer writes `{last}` in several"
            problems.add(f"MODEL_ID={settings.MODEL_ID}", fault, f"Number fewer actions, {REMEDY}")
