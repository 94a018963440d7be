# SPDX-License-Identifier: Apache-2.0
"""Whether a run can learn from direct answers (DIRECT_ANSWERS), and its settings then."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo.data.files import Row, no_actions
from grpo.data.prompts import ANSWER_AFTER, ANSWER_BEFORE
from grpo.data.scoring import is_by_action
from grpo.settings import FIELDS, Problems, Settings

# What a run has where nothing is generated: each prompt once, one token behind it, no vLLM.
UNUSED = {"NUM_GENERATIONS": 1, "MAX_COMPLETION_LEN": 1, "USE_VLLM": False}
REMEDY = "or set DIRECT_ANSWERS=0"


def direct_settings(settings: Settings, sources: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """(settings, sources) with UNUSED where DIRECT_ANSWERS is set. What the user set against it stays, for
    `check_direct` to refuse."""
    if not settings.DIRECT_ANSWERS:
        return settings, dict(sources)
    changes = {name: value for name, value in UNUSED.items() if name not in contradictions(settings, sources)}
    changed = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
    return changed, {**sources, **dict.fromkeys(changes, "chosen")}


def contradictions(settings: Settings, sources: Mapping[str, str]) -> dict[str, str]:
    """By name, why settings of the user's cannot be where nothing is generated. MAX_COMPLETION_LEN limits nothing."""
    reasons = {}
    if settings.USE_VLLM:
        reasons["USE_VLLM"] = "nothing is generated with DIRECT_ANSWERS, so vLLM does not start"
    generations = settings.NUM_GENERATIONS
    own = sources["NUM_GENERATIONS"] == "environment" and generations != FIELDS["NUM_GENERATIONS"].default
    if own and generations != UNUSED["NUM_GENERATIONS"]:
        reasons["NUM_GENERATIONS"] = (
            f"{generations} completions of a prompt would be the same with DIRECT_ANSWERS: each prompt is computed once"
        )
    return reasons


def check_direct(
    settings: Settings,
    sources: Mapping[str, str],
    names: Sequence[str],
    rows: Sequence[Row],
    tokenizer: Path | None,
    problems: Problems,
) -> None:
    """Where DIRECT_ANSWERS is set, every row of DATA and EVAL_DATA tells the reward of each action to the functions of
    these `names`, and one token names the action. `tokenizer`: a tokenizer.json, None where there is none."""
    if not settings.DIRECT_ANSWERS:
        return
    for name, fault in contradictions(settings, sources).items():
        problems.add(name, fault, f"Unset it, {REMEDY}")
    if settings.EXPECTED_REWARD is False:
        fault = "DIRECT_ANSWERS samples nothing: it learns from the rewards of all actions alone"
        problems.add("EXPECTED_REWARD", fault, f"Unset it, {REMEDY}")
    if sampled := [name for name in names if not is_by_action(name)]:
        fault = f"{', '.join(sampled)} may depend on more than row and action, and DIRECT_ANSWERS samples nothing else"
        problems.add("REWARDS", fault, f"Leave it out, give a function of your own `by_action = True`, {REMEDY}")
    if bare := next((row for row in rows if not row.rewards), None):
        fault = f"DIRECT_ANSWERS needs the reward of each action, and {no_actions(bare)}"
        problems.add(f"{bare.file}, columns", fault, f"Add one per action, {REMEDY}")
    if settings.INVALID_REWARD is not None and math.isnan(settings.INVALID_REWARD):
        fault = "DIRECT_ANSWERS needs the reward of a token that names no action"
        problems.add("INVALID_REWARD", fault, f"Set INVALID_REWARD=auto, {REMEDY}")
    if settings.TOP_P < 1:
        fault = "DIRECT_ANSWERS samples nothing, and learns by the probabilities of all tokens"
        problems.add("TOP_P", fault, f"Set TOP_P=1, {REMEDY}")
    if settings.LOSS_TYPE == "vespo":
        fault = "vespo weights sampled completions, and DIRECT_ANSWERS has none"
        problems.add("LOSS_TYPE", fault, f"Set any other one, which are all the same here, {REMEDY}")
    if settings.PROMPTS_PER_STEP < 2:
        fault = "DIRECT_ANSWERS computes each prompt once, and a step takes two of them at least"
        problems.add("PROMPTS_PER_STEP", fault, f"Set it to 2 or higher, {REMEDY}")
    actions = max((len(row.rewards) for row in rows), default=0)
    if tokenizer and actions and (fault := token_fault(tokenizer, actions)):
        problems.add(f"MODEL_ID={settings.MODEL_ID}", fault, f"Number fewer actions, {REMEDY}")


def token_fault(tokenizer: Path, actions: int) -> str:
    """Why not every one of so many actions is a token of its own behind ANSWER_BEFORE, or '' where it is."""
    from tokenizers import Tokenizer  # Inside, so that the preflight can name packages that are missing.

    loaded = Tokenizer.from_file(str(tokenizer))
    texts = [ANSWER_BEFORE, ANSWER_AFTER, *(f"{ANSWER_BEFORE}{k}{ANSWER_AFTER}" for k in range(actions))]
    before, after, *answers = (encoding.ids for encoding in loaded.encode_batch(texts, add_special_tokens=False))
    names = set()
    for k, answer in enumerate(answers):
        if (
            len(answer) != len(before) + 1 + len(after)
            or answer[: len(before)] != before
            or after != answer[-len(after) :]
        ):
            return f"DIRECT_ANSWERS chooses one token, and its tokenizer writes `{k}` of `[{k}]` in several"
        names.add(answer[len(before)])
    return (
        "" if len(names) == actions else "DIRECT_ANSWERS chooses one token, and its tokenizer has one for two actions"
    )
