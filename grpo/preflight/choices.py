# SPDX-License-Identifier: Apache-2.0
"""The choices that `auto` leaves open: pure functions that return a value and its reason."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from grpo.data.files import Row
from grpo.data.heldout import names_single_file
from grpo.plan.machine import FLASH_PACKAGES
from grpo.plan.targets import expert_words
from grpo.settings.table import TASK_FILES, Settings

ATTENTION = ("torch_flash", *FLASH_PACKAGES, "eager")
MOST_EXACT = 10_000_000  # Parameters of the largest model for which exact evaluation is faster than sampling.
LEAST_ANSWER = 8  # The least MAX_COMPLETION_LEN, in tokens, into which every answer `[k]` fits.
VLLM_COLDEST = 0.01  # The value of _MAX_TEMP in vllm/sampling_params.py: smaller temperatures are raised to it.


def choose_attention(requested: str, gpus: int) -> tuple[str, str]:
    """(attention implementation of the learner, reason). All but Hub kernels are exact with attention sinks. Generation
    by transformers always uses eager attention."""
    if requested != "auto":
        return requested, "set by ATTN_IMPL"
    if not gpus:
        return "eager", "no GPU: eager is the only implementation with attention sinks on a CPU"
    return "torch_flash", "FlashAttention 2 as torch ships it, nothing to install; exact with sinks at any shape"


def choose_packing(requested: str | None, attention: str, gpus: int) -> tuple[str, str]:
    """(PACKING, reason)."""
    if requested is not None:
        return requested, "set by PACKING"
    if attention == "eager" and gpus:
        return "none", "eager attention holds all scores of a row: shorter rows need less memory"
    if attention not in ATTENTION:
        return "none", f"{attention} takes padded rows only"
    return "prefix", "a prompt is computed once for all its completions"


def choose_use_vllm(settings: Settings, gpus: int, vllm: str | None) -> tuple[bool, str]:
    """(whether vLLM generates, reason). `vllm`: its installed version."""
    if settings.DIRECT_ANSWERS:
        return False, "DIRECT_ANSWERS chooses one token from a forward pass"
    if settings.USE_VLLM is not None:
        return settings.USE_VLLM, "set by USE_VLLM"
    if not gpus:
        return False, "no GPU: transformers generates"
    if settings.MODEL_ID == "tiny":
        return False, "the tiny model is made for CPUs: transformers generates"
    if not vllm:
        return False, "vLLM IS NOT INSTALLED: transformers generates, at about half the speed (scripts/setup.sh --gpu)"
    return True, "a GPU and vLLM are there"


def choose_sync(settings: Settings) -> tuple[str, str]:
    """(ROLLOUT_SYNC, reason)."""
    if settings.ROLLOUT_SYNC is not None:
        return settings.ROLLOUT_SYNC, "set by ROLLOUT_SYNC"
    if expert_words(settings.LORA_TARGETS):
        return "lora", "LORA_TARGETS names experts, which vLLM keeps in four bits: nothing can be merged into them"
    return "merge", "faster than lora, which only experts in LORA_TARGETS need"


EXPERTS_REASONS = {
    "shared": "vLLM generates on a Hopper card, where the learner can read its weights",
    "bf16": "they fit beside all else",
    "mxfp4": "without vLLM the learner is as fast with them packed, in a third of the memory",
    "paged": "dequantized to BF16 they do not fit beside vLLM",
}


def choose_rewards(requested: str | None, rows: Sequence[Row]) -> tuple[str, str]:
    """(REWARDS, reason)."""
    if requested is not None:
        return requested, "set by REWARDS"
    file = next((row.file for row in rows if not row.q), None)
    if rows and file is None:
        return "regret", "every training row has q_action_k"
    return "action", f"{file} has no q_action_k" if file else "there are no training rows"


def choose_scale_rewards(requested: str | None) -> tuple[str, str]:
    """(SCALE_REWARDS, reason)."""
    if requested is not None:
        return requested, "set by SCALE_REWARDS"
    return "group", "by the batch's deviation a few costly rows decide, and a run may settle on the safest action"


def choose_epsilon_high(settings: Settings) -> tuple[float, str]:
    """(upper clip range, reason)."""
    if settings.EPSILON_HIGH is not None:
        return settings.EPSILON_HIGH, "set by EPSILON_HIGH"
    if settings.LOSS_TYPE == "cispo":
        return 5.0, "cispo truncates the ratio itself, far from 1"
    return settings.EPSILON, "EPSILON on both sides"


def expected_reward_obstacles(settings: Settings, rows: Sequence[Row], names: Sequence[str]) -> Iterator[str]:
    """Each reason why no completion can learn from its expected reward. `names`: functions that are `is_by_action`."""
    if not names:
        yield "no function of REWARDS depends on the answered action alone"
    file = next((row.file for row in rows if not row.rewards), None)
    if file or not rows:
        yield f"{file} has no reward_action_k" if file else "there are no training rows"
    if settings.INVALID_REWARD is not None and math.isnan(settings.INVALID_REWARD):
        yield "INVALID_REWARD=nan gives answers that cannot be read no reward"
    if settings.LOSS_TYPE == "vespo":
        yield "LOSS_TYPE=vespo weights whole completions"
    if settings.IS_CORRECTION.startswith("sequence") and not settings.DIRECT_ANSWERS:
        yield f"IS_CORRECTION={settings.IS_CORRECTION} weights whole completions"
    if settings.IMPORTANCE_SAMPLING_LEVEL == "sequence":
        yield "IMPORTANCE_SAMPLING_LEVEL=sequence weights whole completions"
    if settings.TOP_P < 1:
        yield "TOP_P below 1 samples from other probabilities than the learner's"


def choose_expected_reward(settings: Settings, rows: Sequence[Row], names: Sequence[str]) -> tuple[bool, str]:
    """(whether completions learn from the expected reward, reason); `names` as in `expected_reward_obstacles`."""
    if settings.EXPECTED_REWARD is False:
        return False, "set by EXPECTED_REWARD"
    for obstacle in expected_reward_obstacles(settings, rows, names):
        return False, obstacle
    return True, f"every row has the reward of each action, and REWARDS a function of it alone ({', '.join(names)})"


def choose_demo(settings: Settings, sources: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """(settings, sources) in which `auto` is filled in for the demo: EVAL_DATA with the demo's held-out rows if DATA is
    the demo's, and EVAL_PROFILE with the demo's profile if training and held-out rows are the demo's. For the user's
    own rows both stay None, because the demo's files say nothing about them."""
    eval_data, profile = settings.EVAL_DATA, settings.EVAL_PROFILE
    pairs = [pair for task in TASK_FILES.values() for pair in task.get("heldout", {}).items()]
    heldout = next((path for train, path in pairs if names_single_file(settings.DATA, train)), None)
    demo_profile = TASK_FILES[settings.TASK].get("profiles", {}).get(heldout)
    if heldout and demo_profile and profile is None and (eval_data is None or names_single_file(eval_data, heldout)):
        profile = demo_profile
    demo = dataclasses.replace(settings, EVAL_DATA=heldout if eval_data is None else eval_data, EVAL_PROFILE=profile)
    chosen = [name for name in ("EVAL_DATA", "EVAL_PROFILE") if getattr(demo, name) != getattr(settings, name)]
    return demo, {**sources, **dict.fromkeys(chosen, "chosen")}


def choose_exact(
    settings: Settings,
    use_vllm: bool,
    parameters: int,
    why_sampled: str = "",
    opens_channel: bool = False,
    has_rewards: bool = True,
) -> tuple[bool, str]:
    """(whether held-out rows are evaluated exactly, by the probabilities of all answers instead of samples, reason).

    `parameters`: the model's; `why_sampled`: that of the task's SimulationPlan; `opens_channel`: whether a prompt ends
    inside the answer's channel; `has_rewards`: whether every row has the rewards of its actions."""
    if not settings.EVAL_SAMPLES:
        return False, "EVAL_SAMPLES=0"
    sampled = f"{settings.EVAL_SAMPLES} answers a prompt"
    if not settings.EVAL_EXACT:
        return False, f"{sampled}: EVAL_EXACT=0"
    if settings.DIRECT_ANSWERS and has_rewards and not why_sampled:
        return True, "all answers by their probability: with DIRECT_ANSWERS one forward pass gives it"
    if use_vllm:
        return False, f"{sampled}: vLLM generates"
    if not has_rewards:
        return False, f"{sampled}: rows without reward_action_k have no actions to go through"
    if parameters > MOST_EXACT:
        return False, f"{sampled}: exact takes too long for {parameters / 1e6:,.0f}M parameters"
    if why_sampled:
        return False, f"{sampled}: {why_sampled}"
    unsupported = {
        "opened channels": opens_channel,
        "TOP_P below 1": settings.TOP_P < 1,
        "short MAX_COMPLETION_LEN": settings.MAX_COMPLETION_LEN < LEAST_ANSWER,
    }
    if obstacles := [text for text, applies in unsupported.items() if applies]:
        return False, f"{sampled}: exact evaluation does not support {' or '.join(obstacles)}"
    return True, f"all answers by their probability: {parameters / 1e6:.2g}M parameters, transformers generates"


def choose_exact_loop(settings: Settings, exact: bool, reason: str, parameters: int) -> tuple[bool, str]:
    """(whether the simulator is run exactly, through all states that can be reached, reason). `exact` and `reason` are
    those of `choose_exact`, which hold here too, except for large models: with DIRECT_ANSWERS their held-out rows are
    evaluated exactly, but a simulator reaches hundreds of states in every hour."""
    if not exact or parameters <= MOST_EXACT:
        return exact, reason
    sampled = f"{settings.EVAL_SAMPLES} passes"
    return False, f"{sampled}: all states that can be reached take too long for {parameters / 1e6:,.0f}M parameters"


def choose_best_by(settings: Settings, heldout: int, closed_loop: bool) -> tuple[str, str]:
    """(BEST_BY or, if nothing is measured, '', reason). `closed_loop`: whether the task's simulator runs."""
    if not settings.EVAL_SAMPLES:
        return "", "EVAL_SAMPLES=0"
    if not heldout:
        return "", "no rows are held out"
    if settings.BEST_BY is not None:
        return settings.BEST_BY, "set by BEST_BY"
    if closed_loop:
        return TASK_FILES[settings.TASK]["best_by"], "the closed loop runs"
    return "reward", "measured on the held-out rows"
