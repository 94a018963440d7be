# SPDX-License-Identifier: Apache-2.0
"""The choices that `auto` leaves open, one pure function for each.

To add a setting that has `auto`: its line in grpo/settings/table.py, its function here, and the line of `resolve` that
calls it. Banner, settings.json and the resolved settings then have it."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from grpo.common import Problems, split_commas
from grpo.data.files import Row
from grpo.data.heldout import names_single_file
from grpo.environment.worker import Description
from grpo.harmony import ASSISTANT
from grpo.plan import memory
from grpo.plan.machine import FLASH_PACKAGES, Machine
from grpo.plan.memory import KEPT_SHARE, LEAST_KEPT_TOKENS, Plan, PlanInputs, free_gib
from grpo.plan.targets import expert_words
from grpo.settings.table import TASK_FILES, Settings

ATTENTION = ("torch_flash", *FLASH_PACKAGES, "eager")
MOST_EXACT = 10_000_000  # Parameters of the largest model for which exact evaluation is faster than sampling.
LEAST_ANSWER = 8  # The least MAX_COMPLETION_LEN, in tokens, into which every answer `[k]` fits.
VLLM_COLDEST = 0.01  # The value of _MAX_TEMP in vllm/sampling_params.py: smaller temperatures are raised to it.

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value that the run takes, and the reason as a clause for the user."""

    value: T
    reason: str


def choose_attention(requested: str, gpus: int) -> Choice[str]:
    """ATTN_IMPL, the attention of the learner. All but Hub kernels are exact with attention sinks. Generation by
    transformers always uses eager attention."""
    if requested != "auto":
        return Choice(requested, "set by ATTN_IMPL")
    if not gpus:
        return Choice("eager", "no GPU: eager is the only implementation with attention sinks on a CPU")
    reason = "FlashAttention 2 as torch ships it, nothing to install; exact with sinks at any shape"
    return Choice("torch_flash", reason)


def choose_packing(requested: str | None, attention: str, gpus: int, environment: str = "") -> Choice[str]:
    """PACKING, for the learner's chosen `attention`; `environment` is ENVIRONMENT."""
    if requested is not None:
        return Choice(requested, "set by PACKING")
    if attention == "eager" and (gpus or environment):  # Eight episodes in one row took ten times as long on a CPU.
        return Choice("none", "eager attention holds all scores of a row: shorter rows need less memory and time")
    if attention not in ATTENTION:
        return Choice("none", f"{attention} takes padded rows only")
    return Choice("prefix", "a prompt is computed once for all its completions")


def choose_use_vllm(settings: Settings, gpus: int, vllm: str | None) -> Choice[bool]:
    """USE_VLLM. `vllm`: its installed version."""
    if settings.DIRECT_ANSWERS:
        return Choice(False, "DIRECT_ANSWERS chooses one token from a forward pass")
    if settings.USE_VLLM is not None:
        return Choice(settings.USE_VLLM, "set by USE_VLLM")
    if not gpus:
        return Choice(False, "no GPU: transformers generates")
    if settings.MODEL_ID == "tiny":
        return Choice(False, "the tiny model is made for CPUs: transformers generates")
    if not vllm:
        reason = "vLLM IS NOT INSTALLED: transformers generates, at about half the speed (scripts/setup.sh --gpu)"
        return Choice(False, reason)
    return Choice(True, "a GPU and vLLM are there")


def choose_sync(settings: Settings) -> Choice[str]:
    """ROLLOUT_SYNC."""
    if settings.ROLLOUT_SYNC is not None:
        return Choice(settings.ROLLOUT_SYNC, "set by ROLLOUT_SYNC")
    if expert_words(settings.LORA_TARGETS):
        reason = "LORA_TARGETS names experts, which vLLM keeps in four bits: nothing can be merged into them"
        return Choice("lora", reason)
    return Choice("merge", "faster than lora, which only experts in LORA_TARGETS need")


EXPERTS_REASONS = {
    "shared": "vLLM generates on a Hopper card, where the learner can read its weights",
    "bf16": "they fit beside all else",
    "mxfp4": "without vLLM the learner is as fast with them packed, in a third of the memory",
    "paged": "dequantized to BF16 they do not fit beside vLLM",
}


def choose_experts(settings: Settings, inputs: PlanInputs) -> Choice[str]:
    """EXPERTS: the first kind that fits."""
    if settings.EXPERTS is not None:
        return Choice(settings.EXPERTS, "set by EXPERTS")
    kinds = inputs.expert_kinds(settings)
    if len(kinds) == 1:
        return Choice(kinds[0], "the checkpoint's are not quantized")
    if not inputs.machine.gpus:
        return Choice(kinds[0], "no GPU: models that a CPU can train are small")
    fitting = (kind for kind in kinds if inputs.fits(settings, {"EXPERTS": kind}))
    chosen = next(fitting, "paged" if "paged" in kinds else "mxfp4")  # Where nothing fits, what lacks least.
    if chosen == "mxfp4" and inputs.starts_vllm(settings):
        return Choice(chosen, "the host has no room for paged ones, and the GPU has some for packed ones beside vLLM")
    return Choice(chosen, EXPERTS_REASONS[chosen])


def choose_checkpointing(settings: Settings, inputs: PlanInputs) -> Choice[bool]:
    """GRADIENT_CHECKPOINTING. Without it a step takes less time if micro-batches stay large and memory is not nearly
    full (`KEPT_SHARE`)."""
    if (requested := settings.GRADIENT_CHECKPOINTING) is not None:
        return Choice(requested, "set by GRADIENT_CHECKPOINTING")
    if not inputs.machine.gpus:
        return Choice(True, "no GPU: it saves memory")
    plan = memory.plan_memory(dataclasses.replace(settings, GRADIENT_CHECKPOINTING=False), inputs)
    tokens = memory.micro_batch_tokens(settings, plan.micro_batch, inputs.prompt_len, inputs.share_prompts)
    if plan.learning_peak > inputs.machine.gpu_free * KEPT_SHARE:
        reason = f"without it micro-batches of {tokens:,} tokens would take over {KEPT_SHARE:.0%} of the memory"
        return Choice(True, reason)
    if tokens < LEAST_KEPT_TOKENS:
        return Choice(True, f"without it micro-batches would have {tokens:,} tokens, fewer than {LEAST_KEPT_TOKENS:,}")
    return Choice(False, f"there is room for all that micro-batches of {tokens:,} tokens keep")


def free_memory_text(machine: Machine, share: float) -> str:
    """How much memory a batch may fill, with the reason for the limit."""
    where = "GiB free on the GPU" if machine.gpus else "GiB of free memory"
    if machine.gpu_limit is not None:
        where = "GiB that GPU_MEM_LIMIT allows"
    return f"{share:.0%} of {free_gib(machine):.1f} {where}"


def choose_micro_batch(settings: Settings, inputs: PlanInputs, plan: Plan) -> Choice[int]:
    """MICRO_BATCH, as the `plan` has it."""
    if settings.MICRO_BATCH is not None:
        return Choice(plan.micro_batch, "set by MICRO_BATCH")
    share = memory.usable_share(settings, inputs.machine, learning=True)
    largest = memory.useful_micro_batches(settings, inputs)[-1]
    reason = f"largest divisor of {memory.rank_completions(settings, inputs.machine)} up to {largest}"
    reason += f" whose {plan.learning:.1f} GiB fit"
    if plan.learning_peak > free_gib(inputs.machine) * share:
        reason = f"the smallest, whose {plan.learning:.1f} GiB do not fit"
    return Choice(plan.micro_batch, f"{reason} beside the weights in {free_memory_text(inputs.machine, share)}")


def choose_generation_batch(settings: Settings, inputs: PlanInputs, plan: Plan) -> Choice[int]:
    """GENERATION_BATCH, as the `plan` has it."""
    batch, share = plan.generation_batch, memory.usable_share(settings, inputs.machine)
    if settings.DIRECT_ANSWERS:
        return Choice(batch, "nothing is generated: the learner's micro-batches choose one token a prompt")
    if settings.GENERATION_BATCH is not None:
        return Choice(batch, "set by GENERATION_BATCH")
    if plan.engine:
        return Choice(batch, "of no effect, vLLM generates")
    chosen, fit = f"largest divisor of {settings.completions_per_rollout}", "fit"
    if plan.rollout_peak > free_gib(inputs.machine) * share:
        chosen, fit = "the smallest,", "do not fit"
    size = f"whose cache and prefill ({plan.generation:.1f} GiB)"
    return Choice(batch, f"{chosen} {size} {fit} in {free_memory_text(inputs.machine, share)}")


def choose_rewards(
    requested: str | None, rows: Sequence[Row], environment: str = "", description: Description | None = None
) -> Choice[str]:
    """REWARDS, by the columns of the training `rows`, or by ENVIRONMENT and its `description`."""
    if environment and requested is None:
        return Choice("environment", "ENVIRONMENT rewards its episodes")
    names = {part.partition("=")[0].strip() for part in split_commas(requested or "")}
    if description and description.has_reward and "environment" not in names:
        return Choice(f"{requested},environment=1", "set by REWARDS, and ENVIRONMENT rewards its episodes, as in TRL")
    if requested is not None:
        return Choice(requested, "set by REWARDS")
    file = next((row.file for row in rows if not row.q), None)
    if rows and file is None:
        return Choice("regret", "every training row has q_action_k")
    return Choice("action", f"{file} has no q_action_k" if file else "there are no training rows")


def choose_scale_rewards(requested: str | None) -> Choice[str]:
    """SCALE_REWARDS."""
    if requested is not None:
        return Choice(requested, "set by SCALE_REWARDS")
    reason = "by the batch's deviation a few costly rows decide, and a run may settle on the safest action"
    return Choice("group", reason)


def choose_epsilon_high(settings: Settings) -> Choice[float]:
    """EPSILON_HIGH, the upper clip range."""
    if settings.EPSILON_HIGH is not None:
        return Choice(settings.EPSILON_HIGH, "set by EPSILON_HIGH")
    if settings.LOSS_TYPE == "cispo":
        return Choice(5.0, "cispo truncates the ratio itself, far from 1")
    return Choice(settings.EPSILON, "EPSILON on both sides")


def expected_reward_obstacles(settings: Settings, rows: Sequence[Row], names: Sequence[str]) -> Iterator[str]:
    """Each reason why no completion can learn from its expected reward. `names`: functions that are `is_by_action`."""
    if settings.ENVIRONMENT:
        yield "the rewards of calls that an episode did not make are not known"
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


def choose_expected_reward(settings: Settings, rows: Sequence[Row], names: Sequence[str]) -> Choice[bool]:
    """EXPECTED_REWARD; `names` as in `expected_reward_obstacles`."""
    if settings.EXPECTED_REWARD is False:
        return Choice(False, "set by EXPECTED_REWARD")
    if settings.EXPECTED_REWARD is None and not settings.DIRECT_ANSWERS:
        return Choice(False, "sampled answers learn as much without its forward pass (docs/answers.md)")
    for obstacle in expected_reward_obstacles(settings, rows, names):
        return Choice(False, obstacle)
    functions = ", ".join(names)
    return Choice(True, f"every row has the reward of each action, and REWARDS a function of it alone ({functions})")


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


def choose_total_steps(settings: Settings, sources: Mapping[str, str], rows: int, problems: Problems) -> Choice[int]:
    """TOTAL_STEPS for this number of training `rows`. Adds a problem if the user set both it and NUM_TRAIN_EPOCHS."""
    total, epochs, prompts = settings.TOTAL_STEPS, settings.NUM_TRAIN_EPOCHS, settings.PROMPTS_PER_STEP
    if epochs is None or not rows:
        return Choice(total, "TOTAL_STEPS")
    if sources["TOTAL_STEPS"] == "environment":
        fault = f"it says {epochs:g} rounds over the rows, and TOTAL_STEPS={total} is set as well"
        problems.add("NUM_TRAIN_EPOCHS", fault, "Unset one of the two")
        return Choice(total, "TOTAL_STEPS")
    # Rounded first: 1.1 x 70 is 77.00000000000001 in floating point.
    steps = max(1, math.ceil(round(rows * epochs * settings.NUM_ITERATIONS / prompts, 6)))
    times = f" x NUM_ITERATIONS={settings.NUM_ITERATIONS}" if settings.NUM_ITERATIONS > 1 else ""
    return Choice(steps, f"NUM_TRAIN_EPOCHS={epochs:g} x {rows} rows{times} / {prompts} prompts a step, rounded up")


def choose_exact(
    settings: Settings, use_vllm: bool, parameters: int, rows: Sequence[Row] = (), why_sampled: str = ""
) -> Choice[bool]:
    """Whether held-out `rows` are evaluated exactly, by the probabilities of all answers instead of samples.

    `parameters`: the model's; `why_sampled`: that of the task's SimulationPlan."""
    if not settings.EVAL_SAMPLES:
        return Choice(False, "EVAL_SAMPLES=0")
    sampled, has_rewards = f"{settings.EVAL_SAMPLES} answers a prompt", all(row.rewards for row in rows)
    if settings.ENVIRONMENT:
        return Choice(False, f"{settings.EVAL_SAMPLES} episodes a prompt")
    if not settings.EVAL_EXACT:
        return Choice(False, f"{sampled}: EVAL_EXACT=0")
    if settings.DIRECT_ANSWERS and has_rewards and not why_sampled:
        return Choice(True, "all answers by their probability: with DIRECT_ANSWERS one forward pass gives it")
    if use_vllm:
        return Choice(False, f"{sampled}: vLLM generates")
    if not has_rewards:
        return Choice(False, f"{sampled}: rows without reward_action_k have no actions to go through")
    if parameters > MOST_EXACT:
        return Choice(False, f"{sampled}: exact takes too long for {parameters / 1e6:,.0f}M parameters")
    if why_sampled:
        return Choice(False, f"{sampled}: {why_sampled}")
    unsupported = {
        "opened channels": any(row.prompt and not row.prompt.endswith(ASSISTANT) for row in rows),
        "TOP_P below 1": settings.TOP_P < 1,
        "short MAX_COMPLETION_LEN": settings.MAX_COMPLETION_LEN < LEAST_ANSWER,
    }
    if obstacles := [text for text, applies in unsupported.items() if applies]:
        return Choice(False, f"{sampled}: exact evaluation does not support {' or '.join(obstacles)}")
    return Choice(True, f"all answers by their probability: {parameters / 1e6:.2g}M parameters, transformers generates")


def choose_exact_loop(settings: Settings, exact: Choice[bool], parameters: int) -> Choice[bool]:
    """Whether the simulator is run exactly, through all states that can be reached. The choice of `choose_exact` holds
    here too, except for large models: with DIRECT_ANSWERS their held-out rows are evaluated exactly, but a simulator
    reaches hundreds of states in every hour."""
    if not exact.value or parameters <= MOST_EXACT:
        return exact
    reason = f"all states that can be reached take too long for {parameters / 1e6:,.0f}M parameters"
    return Choice(False, f"{settings.EVAL_SAMPLES} passes: {reason}")


def choose_best_by(settings: Settings, heldout: int, closed_loop: bool) -> Choice[str]:
    """BEST_BY, or '' if nothing is measured. `closed_loop`: whether the task's simulator runs."""
    if not settings.EVAL_SAMPLES:
        return Choice("", "EVAL_SAMPLES=0")
    if not heldout:
        return Choice("", "no rows are held out")
    if settings.BEST_BY is not None:
        return Choice(settings.BEST_BY, "set by BEST_BY")
    if closed_loop:
        return Choice(TASK_FILES[settings.TASK]["best_by"], "the closed loop runs")
    return Choice("reward", "measured on the held-out rows")
