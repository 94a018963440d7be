# SPDX-License-Identifier: Apache-2.0
"""Resolves a run: turns the settings and the facts about machine, model and rows into one object without any `auto`."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo.common import InputError, Problems
from grpo.data.files import Row
from grpo.data.heldout import Split
from grpo.data.prepare import prepare_rows
from grpo.environment.pool import describe_environment
from grpo.environment.worker import Description
from grpo.figures.text import object_at
from grpo.output.folder import RunState, inspect_run
from grpo.output.layout import run_folder
from grpo.plan import hub
from grpo.plan.hub import ModelConfig, ModelFiles
from grpo.plan.machine import TESTED, TESTED_VLLM, Machine, installed_versions, read_machine
from grpo.plan.memory import Plan, PlanInputs, plan_memory
from grpo.preflight import choices
from grpo.preflight.adapter import StartAdapter, read_start_adapter
from grpo.preflight.choices import Choice
from grpo.preflight.episodes import Trial
from grpo.process.ranks import Ranks
from grpo.reward.loading import is_by_action, reward_specs
from grpo.settings.table import FIELDS, Settings
from grpo.tasks.simulator import SimulationPlan, load_simulator

Choices = dict[str, Choice[Any]]  # By the name of the setting, or of the choice where there is no setting.
# DIRECT_ANSWERS takes each prompt once, chooses one token, and generates nothing: these replace the run's settings.
DIRECT_SETTINGS = {"NUM_GENERATIONS": 1, "MAX_COMPLETION_LEN": 1, "USE_VLLM": False}
# Automatic choices that settings.json records among the settings too, so that scripts/evaluate.py takes the run's own.
# The others stay `auto` there: they are made anew for other rows or another machine.
KEPT_CHOICES = ("EXPERTS", "ROLLOUT_SYNC", "GRADIENT_CHECKPOINTING")


@dataclass(frozen=True)
class Facts:
    """What is read before any choice is made: machine, packages, model, rows, and the adapter to start from."""

    asked: Settings  # As they were asked for: None is `auto`. The shape of INIT_ADAPTER is in them.
    sources: Mapping[str, str]  # Where each of these settings came from.
    machine: Machine
    ranks: Ranks
    versions: Mapping[str, str | None]
    files: ModelFiles | None
    adapter: StartAdapter
    rows: list[Row]
    eval_rows: list[Row]
    heldout_reason: str
    longest_prompt: int  # In tokens; 0 where no prompt could be rendered.
    environment: Description | None  # What ENVIRONMENT offers; None without it.

    @property
    def config(self) -> ModelConfig | None:
        return self.files.config if self.files else None

    @property
    def has_packages(self) -> bool:
        return has_packages(self.versions)


def has_packages(versions: Mapping[str, str | None]) -> bool:
    """Whether all packages of a run are installed: tokenizers and numpy come with them."""
    return all(versions[name] for name in TESTED)


def read_facts(
    settings: Settings,
    sources: Mapping[str, str],
    split: Split,
    machine: Machine | None,
    ranks: Ranks,
    problems: Problems,
    commit: str | None = None,
) -> Facts:
    """Reads the model's small files, the start adapter and the machine, and renders the rows of `split`; adds their
    problems to `problems`. `commit` is the one of the model with which the run began, if it continues."""
    files = hub.find_model(settings.MODEL_ID, problems, commit)
    versions = installed_versions([*TESTED, *TESTED_VLLM])
    if machine and machine.is_planned:  # scripts/setup.sh will install vLLM there.
        versions |= {name: oldest for name, (oldest, _) in TESTED_VLLM.items()}
    environment = read_environment(settings, problems) if has_packages(versions) else None
    tools = environment.tools if environment else ()
    has_prompts = has_packages(versions) and bool(environment) == bool(settings.ENVIRONMENT)
    split = prepare_rows(settings, files if has_prompts else None, problems, split, tools=tools)
    adapter = read_start_adapter(settings, sources, files.config if files else None, problems)
    of_adapter = {name: "INIT_ADAPTER" for name in adapter.settings if sources[name] != "environment"}
    machine = (machine or read_machine()).limited(settings.GPU_MEM_LIMIT)
    return Facts(
        asked=dataclasses.replace(settings, **adapter.settings),
        sources={**sources, **of_adapter},
        machine=dataclasses.replace(machine, ranks=ranks.size, here=ranks.local_size),
        ranks=ranks,
        versions=versions,
        files=files,
        adapter=adapter,
        rows=split.train,
        eval_rows=split.heldout,
        heldout_reason=split.reason,
        # The text of a reset may make any prompt as long as it may be.
        longest_prompt=settings.MAX_PROMPT_LEN if environment and split.longest_prompt else split.longest_prompt,
        environment=environment,
    )


def read_environment(settings: Settings, problems: Problems) -> Description | None:
    """What ENVIRONMENT offers; None without it, or with a fault, which is added to `problems`."""
    if not settings.ENVIRONMENT:
        return None
    try:
        return describe_environment(settings.ENVIRONMENT, settings.ENV_TIMEOUT)
    except InputError as error:
        fix = "Correct it, or name another class as module:Class (docs/environments.md)"
        problems.add(f"ENVIRONMENT={settings.ENVIRONMENT}", str(error), fix)
        return None


@dataclass(frozen=True)
class ResolvedRun(Facts):
    """Everything that is known about a run before anything heavy is imported: the facts, and every choice.

    No setting that has a choice is `auto` in `settings`: it has the value of its entry in `choices`, beside the reason.
    Those that stay None are rules: held-out rows by EVAL_SHARE, a reward for each row, as much memory as fits."""

    settings: Settings
    choices: Choices
    state: RunState  # What OUTPUT_DIR holds.
    inputs: PlanInputs | None  # None without a model; so is `plan`.
    plan: Plan | None
    reward_specs: list[tuple[str, float]] = dataclasses.field(default_factory=list)  # (name, weight); see REWARDS.
    closed_loop: SimulationPlan = dataclasses.field(default_factory=SimulationPlan)
    problems: Problems = dataclasses.field(default_factory=Problems)
    warnings: tuple[str, ...] = ()
    trial: Trial | None = None  # The episode that the checks have played with ENVIRONMENT.

    @property
    def recorded(self) -> Settings:
        """The settings as settings.json records them, and as all processes must have them."""
        return dataclasses.replace(self.asked, **{name: getattr(self.settings, name) for name in KEPT_CHOICES})

    @property
    def use_vllm(self) -> bool:
        return bool(self.settings.USE_VLLM)

    @property
    def best_by(self) -> str:
        """A value of BEST_BY; empty if nothing is measured."""
        return str(self.settings.BEST_BY)

    @property
    def exact(self) -> bool:
        """Whether held-out rows are evaluated by the probabilities of all answers, instead of samples."""
        return bool(self.choices["exact"].value)

    @property
    def exact_loop(self) -> bool:
        """Whether the simulator goes through all states that can be reached, instead of samples of them."""
        return bool(self.choices["exact_loop"].value)


def fill_in(settings: Settings, chosen: Choices) -> Settings:
    return dataclasses.replace(settings, **{name: choice.value for name, choice in chosen.items() if name in FIELDS})


def read_state(asked: Settings, facts: Facts, problems: Problems) -> RunState:
    """What OUTPUT_DIR holds. Rank 0, which has locked it, reads it, and tells the others from which step to go on."""
    ranks = facts.ranks
    state = RunState(run_folder(asked)) if ranks.rank else inspect_run(asked, facts.rows, problems)
    step, recorded = ranks.broadcast((state.step, state.choices))
    return dataclasses.replace(state, step=step, choices=recorded)


def recorded_batch(asked: Settings, use_vllm: bool, state: RunState) -> int | None:
    """The GENERATION_BATCH that `auto` chose when a run that is continued was started: another one would sample
    differently. None for other runs, if vLLM takes the place of transformers or leaves it, and if it was edited."""
    recorded = object_at(state.choices, "plan").get("generation_batch")
    is_chosen = asked.GENERATION_BATCH is None and not asked.DIRECT_ANSWERS
    if not (state.step and is_chosen and state.began_with_vllm in (use_vllm, None)):
        return None
    is_batch = isinstance(recorded, int) and recorded > 0 and asked.completions_per_rollout % recorded == 0
    return recorded if is_batch else None


def plan_run(
    settings: Settings, facts: Facts, prompt_len: int, batch: int | None = None
) -> tuple[Choices, PlanInputs | None, Plan | None]:
    """The choices that follow from the memory of model and machine, the inputs of the plan, and the plan. `prompt_len`
    are the tokens of the longest prompt, `batch` those of `recorded_batch`."""
    if not facts.files:
        return {"EXPERTS": Choice(settings.EXPERTS or "bf16", "there is no model")}, None, None
    config, machine, beside_vllm = facts.files.config, facts.machine, bool(settings.USE_VLLM and facts.machine.gpus)
    inputs = PlanInputs(config, machine, prompt_len, settings.ATTN_IMPL, str(settings.PACKING), beside_vllm)
    experts = choices.choose_experts(settings, inputs)
    settings = dataclasses.replace(settings, EXPERTS=experts.value)
    checkpointing = choices.choose_checkpointing(settings, inputs)
    settings = dataclasses.replace(settings, GRADIENT_CHECKPOINTING=checkpointing.value)
    plan = plan_memory(dataclasses.replace(settings, GENERATION_BATCH=batch or settings.GENERATION_BATCH), inputs)
    generation = choices.choose_generation_batch(settings, inputs, plan)
    planned: Choices = {
        "EXPERTS": experts,
        "GRADIENT_CHECKPOINTING": checkpointing,
        "MICRO_BATCH": choices.choose_micro_batch(settings, inputs, plan),
        "GENERATION_BATCH": Choice(batch, "as the run was started") if batch else generation,
    }
    return planned, inputs, plan


def chosen_sources(asked: Settings, sources: Mapping[str, str]) -> dict[str, str]:
    """`sources`, with `chosen` for each setting that settings.json records with another value than was asked for."""
    chosen = [name for name in KEPT_CHOICES if getattr(asked, name) is None]
    if asked.NUM_TRAIN_EPOCHS is not None and sources["TOTAL_STEPS"] != "environment":
        chosen.append("TOTAL_STEPS")
    return {**sources, **dict.fromkeys([*chosen, *(DIRECT_SETTINGS if asked.DIRECT_ANSWERS else ())], "chosen")}


def resolve(facts: Facts, problems: Problems) -> ResolvedRun:
    """Makes every choice of a run that `auto` leaves open. Adds problems of NUM_TRAIN_EPOCHS, of OUTPUT_DIR, and of the
    profiles of the closed loop, which are read only if it runs."""
    asked, machine, rows, eval_rows = facts.asked, facts.machine, facts.rows, facts.eval_rows
    sources = chosen_sources(asked, facts.sources)
    steps = choices.choose_total_steps(asked, facts.sources, len(rows), problems)
    asked = dataclasses.replace(asked, TOTAL_STEPS=steps.value)
    if asked.DIRECT_ANSWERS:
        asked = dataclasses.replace(asked, **DIRECT_SETTINGS)  # type: ignore[arg-type]
    state = read_state(asked, facts, problems)

    attention = choices.choose_attention(asked.ATTN_IMPL, machine.gpus)
    use_vllm = choices.choose_use_vllm(asked, machine.gpus, facts.versions["vllm"])
    rewards = choices.choose_rewards(asked.REWARDS, rows, asked.ENVIRONMENT, facts.environment)
    specs: list[tuple[str, float]] = []
    with contextlib.suppress(ValueError):  # `check_rewards` adds the problem.
        specs = reward_specs(rewards.value)
    by_action = [name for name, _ in specs if is_by_action(name)]
    chosen: Choices = {
        "heldout": Choice(len(eval_rows), facts.heldout_reason),
        "TOTAL_STEPS": steps,
        "REWARDS": rewards,
        "SCALE_REWARDS": choices.choose_scale_rewards(asked.SCALE_REWARDS),
        "EXPECTED_REWARD": choices.choose_expected_reward(asked, rows, by_action),
        "EPSILON_HIGH": choices.choose_epsilon_high(asked),
        "ATTN_IMPL": attention,
        "PACKING": choices.choose_packing(asked.PACKING, attention.value, machine.gpus, asked.ENVIRONMENT),
        "USE_VLLM": use_vllm,
        "ROLLOUT_SYNC": choices.choose_sync(asked),
    }
    prompt_len, batch = facts.longest_prompt or asked.MAX_PROMPT_LEN, recorded_batch(asked, use_vllm.value, state)
    planned, inputs, plan = plan_run(fill_in(asked, chosen), facts, prompt_len, batch)

    simulator = load_simulator(asked.TASK) if facts.has_packages and not asked.ENVIRONMENT else None
    closed_loop = SimulationPlan()
    if simulator:
        template, own_profile = facts.files.template if facts.files else "", sources["EVAL_PROFILE"] == "environment"
        closed_loop = simulator.plan(asked, eval_rows, template, use_vllm.value, own_profile, problems)
    parameters = hub.count_parameters(facts.config)["total"] if facts.config else 0
    exact = choices.choose_exact(asked, use_vllm.value, parameters, eval_rows, closed_loop.why_sampled)
    chosen |= {
        **planned,
        "exact": exact,
        "exact_loop": choices.choose_exact_loop(asked, exact, parameters),
        "BEST_BY": choices.choose_best_by(asked, len(eval_rows), closed_loop.runs),
    }
    return ResolvedRun(
        **vars(facts) | {"asked": asked, "sources": sources},
        settings=fill_in(asked, chosen),
        choices=chosen,
        state=state,
        inputs=inputs,
        plan=plan,
        reward_specs=specs,
        closed_loop=closed_loop,
    )
