# SPDX-License-Identifier: Apache-2.0
"""Resolves a run: turns the settings and the facts about machine, model and rows into one object without any `auto`."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo.common import Problems
from grpo.data.files import Row
from grpo.data.prepare import prepare_rows
from grpo.output.folder import RunState
from grpo.output.layout import run_folder
from grpo.plan import hub
from grpo.plan.hub import DraftModel, ModelConfig, ModelFiles
from grpo.plan.machine import TESTED, TESTED_VLLM, Machine, installed_versions, read_machine
from grpo.plan.memory import KEPT_SHARE, LEAST_KEPT_TOKENS, Plan, PlanInputs, micro_batch_tokens, plan_memory
from grpo.preflight import choices
from grpo.preflight.adapter import StartAdapter, read_start_adapter
from grpo.process.ranks import Ranks
from grpo.reward.loading import is_by_action, reward_specs
from grpo.settings.parsing import show
from grpo.settings.table import Settings
from grpo.tasks.simulator import SimulationPlan, load_simulator

# DIRECT_ANSWERS takes each prompt once, chooses one token, and generates nothing: these replace the run's settings.
DIRECT_SETTINGS = {"NUM_GENERATIONS": 1, "MAX_COMPLETION_LEN": 1, "USE_VLLM": False}
AUTO_SETTINGS = ("EXPERTS", "ROLLOUT_SYNC", "GRADIENT_CHECKPOINTING")  # `resolve` replaces `auto` in the settings.


@dataclass(frozen=True)
class Facts:
    """What is read before any choice is made: machine, packages, model, draft, rows, and the adapter to start from."""

    sources: Mapping[str, str]  # Where each setting came from.
    machine: Machine
    ranks: Ranks
    versions: Mapping[str, str | None]
    files: ModelFiles | None
    draft: DraftModel | None
    adapter: StartAdapter
    rows: list[Row]
    eval_rows: list[Row]
    heldout_reason: str
    longest_prompt: int  # In tokens; 0 where no prompt could be rendered.

    @property
    def config(self) -> ModelConfig | None:
        return self.files.config if self.files else None

    @property
    def has_packages(self) -> bool:
        """Whether all packages of a run are installed: tokenizers and numpy come with them."""
        return all(self.versions[name] for name in TESTED)


def read_facts(
    settings: Settings,
    sources: Mapping[str, str],
    machine: Machine | None,
    ranks: Ranks,
    problems: Problems,
    commit: str | None = None,
) -> Facts:
    """Reads the model's small files, the rows, the start adapter and the machine; adds their problems to `problems`.
    `commit` is the one of the model with which the run began, if it continues."""
    files = hub.find_model(settings.MODEL_ID, problems, commit)
    versions = installed_versions([*TESTED, *TESTED_VLLM])
    has_packages = all(versions[name] for name in TESTED)
    split = prepare_rows(settings, files if has_packages else None, problems)
    return Facts(
        sources=sources,
        machine=dataclasses.replace(machine or read_machine(), ranks=ranks.size, here=ranks.local_size),
        ranks=ranks,
        versions=versions,
        files=files,
        draft=hub.find_draft(settings.DRAFT_MODEL, files.config if files else None, problems),
        adapter=read_start_adapter(settings, sources, files.config if files else None, problems),
        rows=split.train,
        eval_rows=split.heldout,
        heldout_reason=split.reason,
        longest_prompt=split.longest_prompt,
    )


@dataclass(frozen=True)
class ResolvedRun(Facts):
    """Everything that is known about a run before anything heavy is imported: the facts, and every choice.

    `settings` hold the chosen AUTO_SETTINGS and TOTAL_STEPS, the shape of INIT_ADAPTER, and DIRECT_SETTINGS with
    DIRECT_ANSWERS. In this form they are recorded, and compared when a run continues. `reasons` says why each
    value was chosen, by the name of its field here or of its setting in lower case."""

    settings: Settings
    reasons: Mapping[str, str]
    rewards: str
    reward_specs: list[tuple[str, float]]  # (name, weight) of each function; empty where `rewards` cannot be read.
    scale_rewards: str
    expected_reward: bool
    epsilon_high: float
    attention: str
    packing: str
    use_vllm: bool
    inputs: PlanInputs | None  # None without a model; so is `plan`.
    plan: Plan | None
    closed_loop: SimulationPlan
    exact: bool  # Held-out rows are evaluated by the probabilities of all answers, instead of samples.
    exact_loop: bool  # The simulator goes through all states that can be reached, instead of samples of them.
    best_by: str  # A value of BEST_BY; empty if nothing is measured.
    state: RunState  # What OUTPUT_DIR holds.
    problems: Problems = dataclasses.field(default_factory=Problems)
    warnings: tuple[str, ...] = ()

    @property
    def action_functions(self) -> tuple[int, ...]:
        """Indices in `reward_specs` of the functions that score all actions of a row; empty without EXPECTED_REWARD."""
        names = [name for name, _ in self.reward_specs if self.expected_reward]
        return tuple(n for n, name in enumerate(names) if is_by_action(name))


def resolve_steps(settings: Settings, sources: Mapping[str, str], rows: int, problems: Problems) -> tuple[int, str]:
    """(steps of the whole run, reason) for this number of training `rows`. Adds a problem if the user set both."""
    total, epochs, prompts = settings.TOTAL_STEPS, settings.NUM_TRAIN_EPOCHS, settings.PROMPTS_PER_STEP
    if epochs is None or not rows:
        return total, "TOTAL_STEPS"
    if sources["TOTAL_STEPS"] == "environment":
        fault = f"it says {epochs:g} rounds over the rows, and TOTAL_STEPS={total} is set as well"
        problems.add("NUM_TRAIN_EPOCHS", fault, "Unset one of the two")
        return total, "TOTAL_STEPS"
    # Rounded first: 1.1 x 70 is 77.00000000000001 in floating point.
    steps = max(1, math.ceil(round(rows * epochs * settings.NUM_ITERATIONS / prompts, 6)))
    times = f" x NUM_ITERATIONS={settings.NUM_ITERATIONS}" if settings.NUM_ITERATIONS > 1 else ""
    return steps, f"NUM_TRAIN_EPOCHS={epochs:g} x {rows} rows{times} / {prompts} prompts a step, rounded up"


def resolve_experts(settings: Settings, inputs: PlanInputs) -> tuple[str, str]:
    """(EXPERTS, reason) of a run with these settings."""
    if settings.EXPERTS is not None:
        return settings.EXPERTS, "set by EXPERTS"
    kinds = inputs.expert_kinds(settings)
    if len(kinds) == 1:
        return kinds[0], "the checkpoint's are not quantized"
    if not inputs.machine.gpus:
        return kinds[0], "no GPU: models that a CPU can train are small"
    fitting = (kind for kind in kinds if inputs.fits(settings, {"EXPERTS": kind}))
    chosen = next(fitting, "paged" if "paged" in kinds else "mxfp4")  # Where nothing fits, what lacks least.
    return chosen, choices.EXPERTS_REASONS[chosen]


def resolve_checkpointing(settings: Settings, inputs: PlanInputs) -> tuple[bool, str]:
    """(GRADIENT_CHECKPOINTING, reason) of a run with these settings. Without it a step takes less time if micro-batches
    stay large and memory is not nearly full (`KEPT_SHARE`)."""
    machine = inputs.machine
    if settings.GRADIENT_CHECKPOINTING is not None:
        return settings.GRADIENT_CHECKPOINTING, f"GRADIENT_CHECKPOINTING={show(settings.GRADIENT_CHECKPOINTING)}"
    if not machine.gpus:
        return True, "no GPU: it saves memory"
    plan = plan_memory(dataclasses.replace(settings, GRADIENT_CHECKPOINTING=False), inputs)
    tokens = micro_batch_tokens(settings, plan.micro_batch, inputs.prompt_len, inputs.share_prompts)
    if plan.learning_peak > machine.gpu_free * KEPT_SHARE:
        return True, f"without it micro-batches of {tokens:,} tokens would take over {KEPT_SHARE:.0%} of the memory"
    if tokens < LEAST_KEPT_TOKENS:
        return True, f"without it micro-batches would have {tokens:,} tokens, fewer than {LEAST_KEPT_TOKENS:,}"
    return False, f"there is room for all that micro-batches of {tokens:,} tokens keep"


def resolve_sources(settings: Settings, facts: Facts) -> dict[str, str]:
    """The source of each setting of a resolved run, by name."""
    sources = dict(facts.sources)
    sources |= {name: "INIT_ADAPTER" for name in facts.adapter.settings if sources[name] != "environment"}
    if settings.NUM_TRAIN_EPOCHS is not None and sources["TOTAL_STEPS"] != "environment":
        sources["TOTAL_STEPS"] = "chosen"
    sources |= {name: "chosen" for name in AUTO_SETTINGS if getattr(settings, name) is None}
    return sources | (dict.fromkeys(DIRECT_SETTINGS, "chosen") if settings.DIRECT_ANSWERS else {})


def resolve(settings: Settings, facts: Facts, problems: Problems) -> ResolvedRun:
    """Makes every choice of a run that `auto` leaves open. Adds problems of NUM_TRAIN_EPOCHS, and of the profiles of
    the closed loop, which are read only if it runs."""
    machine, rows, eval_rows = facts.machine, facts.rows, facts.eval_rows
    reasons = {"heldout": facts.heldout_reason}
    use_vllm, reasons["use_vllm"] = choices.choose_use_vllm(settings, machine.gpus, facts.versions["vllm"])
    settings = dataclasses.replace(settings, **facts.adapter.settings)
    sync, reasons["rollout_sync"] = choices.choose_sync(settings)
    steps, reasons["total_steps"] = resolve_steps(settings, facts.sources, len(rows), problems)
    sources = resolve_sources(settings, facts)
    if settings.DIRECT_ANSWERS:
        settings = dataclasses.replace(settings, **DIRECT_SETTINGS)  # type: ignore[arg-type]
    settings = dataclasses.replace(settings, ROLLOUT_SYNC=sync, TOTAL_STEPS=steps)

    attention, reasons["attention"] = choices.choose_attention(settings.ATTN_IMPL, machine.gpus)
    packing, reasons["packing"] = choices.choose_packing(settings.PACKING, attention, machine.gpus)
    inputs, plan = None, None
    reasons |= dict.fromkeys(("experts", "gradient_checkpointing"), "there is no model")
    if facts.files:
        prompt_len = facts.longest_prompt or settings.MAX_PROMPT_LEN
        beside_vllm = use_vllm and bool(machine.gpus)
        inputs = PlanInputs(facts.files.config, machine, prompt_len, attention, packing, beside_vllm, facts.draft)
        experts, reasons["experts"] = resolve_experts(settings, inputs)
        settings = dataclasses.replace(settings, EXPERTS=experts)
        checkpointing, reasons["gradient_checkpointing"] = resolve_checkpointing(settings, inputs)
        settings = dataclasses.replace(settings, GRADIENT_CHECKPOINTING=checkpointing)
        plan = plan_memory(settings, inputs)
    else:
        settings = dataclasses.replace(settings, EXPERTS=settings.EXPERTS or "bf16")

    rewards, reasons["rewards"] = choices.choose_rewards(settings.REWARDS, rows)
    specs: list[tuple[str, float]] = []
    with contextlib.suppress(ValueError):  # `check_rewards` adds the problem.
        specs = reward_specs(rewards)
    scale, reasons["scale_rewards"] = choices.choose_scale_rewards(settings.SCALE_REWARDS)
    epsilon_high, reasons["epsilon_high"] = choices.choose_epsilon_high(settings)
    by_action = [name for name, _ in specs if is_by_action(name)]
    expected_reward, reasons["expected_reward"] = choices.choose_expected_reward(settings, rows, by_action)
    parameters = hub.count_parameters(facts.config)["total"] if facts.config else 0

    simulator = load_simulator(settings.TASK) if facts.has_packages else None
    closed_loop = SimulationPlan()
    if simulator:
        template, own_profile = facts.files.template if facts.files else "", sources["EVAL_PROFILE"] == "environment"
        closed_loop = simulator.plan(settings, eval_rows, template, use_vllm, own_profile, problems)
    reasons["closed_loop"] = closed_loop.reason
    opens_channel = any(not row.prompt.endswith("<|start|>assistant") for row in eval_rows if row.prompt)
    exact, reasons["exact"] = choices.choose_exact(
        settings, use_vllm, parameters, closed_loop.why_sampled, opens_channel, all(row.rewards for row in eval_rows)
    )
    exact_loop, reasons["exact_loop"] = choices.choose_exact_loop(settings, exact, reasons["exact"], parameters)
    best_by, reasons["best_by"] = choices.choose_best_by(settings, len(eval_rows), closed_loop.runs)
    return ResolvedRun(
        **vars(facts) | {"sources": sources},
        settings=settings,
        reasons=reasons,
        rewards=rewards,
        reward_specs=specs,
        scale_rewards=scale,
        expected_reward=expected_reward,
        epsilon_high=epsilon_high,
        attention=attention,
        packing=packing,
        use_vllm=use_vllm,
        inputs=inputs,
        plan=plan,
        closed_loop=closed_loop,
        exact=exact,
        exact_loop=exact_loop,
        best_by=best_by,
        state=RunState(run_folder(settings)),
    )
