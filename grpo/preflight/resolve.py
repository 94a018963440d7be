# SPDX-License-Identifier: Apache-2.0
"""Resolves a run once: from the settings and from what was read, to one object whose every value is concrete."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from grpo.data.files import Row
from grpo.data.heldout import read_split
from grpo.data.prompts import render_rows
from grpo.data.scoring import reward_specs
from grpo.plan import hub
from grpo.plan.hub import ModelFiles
from grpo.plan.machine import FLASH_PACKAGES, TESTED, TESTED_VLLM, Machine, installed_versions, read_machine
from grpo.plan.memory import Plan, Shapes
from grpo.plan.targets import expert_words
from grpo.preflight import choices
from grpo.preflight.adapter import StartAdapter, read_start_adapter
from grpo.run.folder import RunState, run_folder
from grpo.run.ranks import Ranks
from grpo.settings import MOST_WHOLE, Problems, Settings
from grpo.tasks.simulator import SimulationPlan, load_simulator


@dataclass(frozen=True)
class Facts:
    """What was read before anything is chosen: machine, packages, model, rows, and the adapter to start from."""

    machine: Machine
    ranks: Ranks
    versions: Mapping[str, str | None]
    flash_packages: list[str]  # those of FLASH_PACKAGES that are installed
    files: ModelFiles | None
    adapter: StartAdapter
    rows: list[Row]
    eval_rows: list[Row]
    heldout_reason: str  # how the held-out rows were told apart
    longest_prompt: int  # in tokens; 0 where no prompt could be rendered

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The model's config.json."""
        return self.files.config if self.files else None

    @property
    def has_packages(self) -> bool:
        """Whether all packages of a run are installed: tokenizers and numpy come with them."""
        return all(self.versions[name] for name in TESTED)


def read_facts(
    settings: Settings, sources: Mapping[str, str], machine: Machine | None, ranks: Ranks, problems: Problems
) -> Facts:
    """Read all that a run is resolved from; what is wrong with it is added to `problems`."""
    machine = dataclasses.replace(machine or read_machine(), ranks=ranks.size, here=ranks.local_size)
    versions = installed_versions([*TESTED, *TESTED_VLLM])
    flash = installed_versions(package for package, _ in FLASH_PACKAGES.values())
    files = hub.find_model(settings.MODEL_ID, problems)
    adapter = read_start_adapter(settings, sources, files.config if files else None, problems)
    split = read_split(settings, problems)
    facts = Facts(
        machine=machine,
        ranks=ranks,
        versions=versions,
        flash_packages=[name for name, version in flash.items() if version],
        files=files,
        adapter=adapter,
        rows=split.train,
        eval_rows=split.heldout,
        heldout_reason=split.reason,
        longest_prompt=0,
    )
    if not (facts.has_packages and files and files.tokenizer):
        return facts
    every_row = [*split.train, *split.heldout]
    rendered, longest = render_rows(settings, every_row, files.template, files.tokenizer, problems)
    count = len(split.train)
    return dataclasses.replace(facts, rows=rendered[:count], eval_rows=rendered[count:], longest_prompt=longest)


@dataclass(frozen=True)
class ResolvedRun:
    """Everything that is known about a run before anything heavy is imported.

    `settings` are those that were set, with EXPERTS, ROLLOUT_SYNC and TOTAL_STEPS as they were chosen and the LoRA's as
    INIT_ADAPTER has them: so they are recorded, and compared when a run continues. `sources` says where each came from.
    `reasons` says why each value is what it is, by the name of its field here or of its setting in lower case.
    """

    settings: Settings
    sources: Mapping[str, str]
    reasons: Mapping[str, str]
    machine: Machine
    ranks: Ranks
    files: ModelFiles | None
    rows: list[Row]
    eval_rows: list[Row]
    init_adapter: str | None  # SHA-256 of its weights
    rewards: str
    reward_specs: list[tuple[str, float]]  # empty where `rewards` cannot be read
    scale_rewards: str
    epsilon_high: float
    attention: str
    packing: str
    use_vllm: bool
    threads: int | None  # None: torch's own choice
    shapes: Shapes | None  # None, as the plan, without a model
    plan: Plan | None
    closed_loop: SimulationPlan
    exact: bool  # evaluations go through all answers by their probability, instead of samples
    best_by: str  # as BEST_BY names it, or empty where nothing is measured
    run: RunState  # of OUTPUT_DIR
    problems: Problems = dataclasses.field(default_factory=Problems)
    warnings: tuple[str, ...] = ()

    @property
    def experts(self) -> str:
        """EXPERTS of the learner."""
        return self.settings.EXPERTS

    @property
    def rollout_sync(self) -> str:
        """ROLLOUT_SYNC, how vLLM gets the adapter."""
        return self.settings.ROLLOUT_SYNC

    def choice(self, name: str) -> list[Any]:
        """[value, reason] of a field, as settings.json records it."""
        return [getattr(self, name), self.reasons[name]]


def resolve_steps(settings: Settings, sources: Mapping[str, str], rows: int) -> tuple[int, str]:
    """(steps of the whole run, reason), given the number of training rows. Where `check_epochs` finds a problem, it is
    TOTAL_STEPS as it was set."""
    total, epochs = settings.TOTAL_STEPS, settings.NUM_TRAIN_EPOCHS
    if sources["TOTAL_STEPS"] == "environment":
        return total, "TOTAL_STEPS"
    steps, reason = choices.choose_steps(total, epochs, rows, settings.PROMPTS_PER_STEP)
    return (steps, reason) if steps <= MOST_WHOLE else (total, "TOTAL_STEPS")


def resolve_experts(settings: Settings, shapes: Shapes) -> tuple[str, str]:
    """(EXPERTS, reason) of a run with these settings."""
    kinds, gpu, requested = shapes.expert_kinds(settings), shapes.machine.gpus, settings.EXPERTS
    # Plans take a moment: none where nothing is to be chosen.
    tried = [dataclasses.replace(settings, EXPERTS=kind) for kind in kinds if requested is None]
    fits = [trial.EXPERTS for trial in tried if not (gpu and shapes.shortfall(trial))]
    return choices.choose_experts(requested, kinds, fits)


def resolve_specs(rewards: str) -> list[tuple[str, float]]:
    """(name, weight) of each reward function; none where `rewards` cannot be read, which `check_rewards` says."""
    try:
        return reward_specs(rewards)
    except ValueError:
        return []


def resolve_sources(settings: Settings, sources: Mapping[str, str], from_adapter: Collection[str]) -> dict[str, str]:
    """Where each setting of a resolved run comes from, given where those that were set came from, and the names of
    those that INIT_ADAPTER brings."""
    origins = dict(sources)
    origins |= {name: "INIT_ADAPTER" for name in from_adapter if sources[name] != "environment"}
    if settings.NUM_TRAIN_EPOCHS is not None and sources["TOTAL_STEPS"] != "environment":
        origins["TOTAL_STEPS"] = "chosen"
    return origins | {name: "chosen" for name in ("EXPERTS", "ROLLOUT_SYNC") if getattr(settings, name) is None}


def resolve(settings: Settings, sources: Mapping[str, str], facts: Facts, problems: Problems) -> ResolvedRun:
    """Make every choice of a run that `auto` leaves open. `sources`: where each of the settings came from; `problems`
    gets what is wrong with the files of EVAL_PROFILE, which are read only if the closed loop runs."""
    machine, config, rows = facts.machine, facts.config, facts.rows
    reasons = {"heldout": facts.heldout_reason}
    is_tiny, vllm = settings.MODEL_ID == "tiny", facts.versions["vllm"]
    use_vllm, reasons["use_vllm"] = choices.choose_rollouts(settings.USE_VLLM, machine.gpus, is_tiny, vllm)

    from_adapter = facts.adapter.settings
    targets = from_adapter.get("LORA_TARGETS", settings.LORA_TARGETS)
    sync, reasons["rollout_sync"] = choices.choose_sync(settings.ROLLOUT_SYNC, bool(expert_words(targets)))
    steps, reasons["total_steps"] = resolve_steps(settings, sources, len(rows))
    concrete = dataclasses.replace(settings, **from_adapter, ROLLOUT_SYNC=sync, TOTAL_STEPS=steps)

    attention, reasons["attention"] = choices.choose_attention(
        settings.ATTN_IMPL, machine.gpus, machine.capability, facts.flash_packages
    )
    packing, reasons["packing"] = choices.choose_packing(settings.PACKING, attention, machine.gpus)
    shapes, experts, reasons["experts"] = None, settings.EXPERTS or "bf16", "there is no model"
    if facts.files:
        checkpoint = hub.checkpoint_gib(settings.MODEL_ID, facts.files) if use_vllm and machine.gpus else None
        prompt_len = facts.longest_prompt or settings.MAX_PROMPT_LEN
        shapes = Shapes(config, machine, prompt_len, attention, packing, checkpoint)
        experts, reasons["experts"] = resolve_experts(concrete, shapes)
        if sources["EXPERTS"] == "default":
            reasons["experts"] = "the default"
    concrete = dataclasses.replace(concrete, EXPERTS=experts)

    rewards, reasons["rewards"] = choices.choose_rewards(settings.REWARDS, rows)
    specs = resolve_specs(rewards)
    scale, reasons["scale_rewards"] = choices.choose_scale_rewards(settings.SCALE_REWARDS, [name for name, _ in specs])
    epsilon_high, reasons["epsilon_high"] = choices.choose_epsilon_high(settings)
    parameters = hub.count_parameters(config)["total"] if config else 0
    threads, reasons["threads"] = choices.choose_threads(parameters, machine.gpus, os.environ)

    simulator = load_simulator(settings.TASK) if facts.has_packages else None
    closed_loop = SimulationPlan()
    if simulator:
        template, own_profile = facts.files.template if facts.files else "", sources["EVAL_PROFILE"] == "environment"
        closed_loop = simulator.plan(settings, facts.eval_rows, template, use_vllm, own_profile, problems)
    reasons["closed_loop"] = closed_loop.reason
    opened = any(not row.prompt.endswith("<|start|>assistant") for row in facts.eval_rows if row.prompt)
    have_rewards = all(row.rewards for row in facts.eval_rows)
    exact, reasons["exact"] = choices.choose_evaluation(
        settings, use_vllm, parameters, closed_loop.why_sampled, opened, have_rewards
    )
    best_by, reasons["best_by"] = choices.choose_best(settings, len(facts.eval_rows), closed_loop.runs)
    return ResolvedRun(
        settings=concrete,
        sources=resolve_sources(settings, sources, from_adapter),
        reasons=reasons,
        machine=machine,
        ranks=facts.ranks,
        files=facts.files,
        rows=rows,
        eval_rows=facts.eval_rows,
        init_adapter=facts.adapter.digest,
        rewards=rewards,
        reward_specs=specs,
        scale_rewards=scale,
        epsilon_high=epsilon_high,
        attention=attention,
        packing=packing,
        use_vllm=use_vllm,
        threads=threads,
        shapes=shapes,
        plan=shapes.plan(concrete) if shapes else None,
        closed_loop=closed_loop,
        exact=exact,
        best_by=best_by,
        run=RunState(run_folder(settings)),
    )
