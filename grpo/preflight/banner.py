# SPDX-License-Identifier: Apache-2.0
"""The plan of a run in words: what `--check` prints, and what a run begins with."""

from __future__ import annotations

from collections.abc import Iterator

from grpo.data.files import flat_rows, renamed_columns
from grpo.plan.machine import Machine
from grpo.plan.memory import Plan
from grpo.plan.targets import hit_lines
from grpo.preflight.resolve import ResolvedRun
from grpo.run.logs import banner_text
from grpo.run.pace import UNKNOWN, Pace
from grpo.run.ranks import Ranks
from grpo.settings import FIELDS, show
from rewards import ACTION_REWARDS

FOREIGN = 20  # names of them that are listed


def banner(resolved: ResolvedRun, every_setting: bool = False) -> str:
    """The settings that are not at their defaults (`every_setting`: all of them) with units and where each came from,
    and what the run makes of them: sizes, and every choice with its reason."""
    lines = ["Settings" if every_setting else "Settings that are not at their defaults (`--check` shows all of them)"]
    for name, spec in FIELDS.items():
        value, source = getattr(resolved.settings, name), resolved.sources[name]
        # MODEL_ID=tiny brings defaults of its own, and each automatic choice has a line with its reason below.
        if every_setting or (source not in ("default", "tiny", "chosen") and value != spec.default):
            lines.append(f"  {name:<22} {show(value):<28} {spec.metadata['unit']:<12} {source}")
    lines += ["", "This run", *(f"  {title:<13} {text}" for title, text in facts(resolved))]
    warnings = [*resolved.warnings, *data_warnings(resolved), *resolved.run.notes]
    return "\n".join([*lines, *map(banner_text, warnings)])


def facts(resolved: ResolvedRun) -> Iterator[tuple[str, str]]:
    """(title, text) of each line about the run itself."""
    s, m, run, reasons = resolved.settings, resolved.machine, resolved.run, resolved.reasons
    gpu = f"{m.gpu}, {m.gpu_free:.1f} of {m.gpu_total:.1f} GiB free" if m.gpus else "no GPU"
    yield "machine", f"{gpu}; {m.cores} cores ({m.arch}), {m.ram_free:.1f} GiB of memory free"
    rows = resolved.rows
    if rows:
        yield "data", f"{len(rows)} training rows, {len(resolved.eval_rows)} held-out rows"
        yield "held out", reasons["heldout"]
    else:
        yield "data", "no row that can be used, see below"
    batch = f"{s.PROMPTS_PER_STEP} prompts x {s.NUM_GENERATIONS} generations"
    yield "step", f"{batch} = {s.completions_per_step} completions"
    length = f"{s.TOTAL_STEPS} steps"
    if rows:
        length += f", {s.TOTAL_STEPS * s.PROMPTS_PER_STEP / len(rows):.1f} epochs over the rows"
    if m.ranks > 1:
        yield "processes", processes_text(resolved)
    yield "length", f"{length}: {reasons['total_steps']}"
    so_far = Pace.read(run.folder / "metrics.csv", s.TOTAL_STEPS, s.EVAL_STEPS).left(run.step) if run.checkpoint else ""
    yield "time", so_far or f"{UNKNOWN}: training.log says it with each step from there on"
    specs = resolved.reward_specs
    if any(problem.startswith("REWARDS") for problem in resolved.problems):
        specs = ()
    functions = ", ".join(f"{name} x {weight:g}" for name, weight in specs)
    yield "rewards", f"{functions}: {reasons['rewards']}" if functions else "none that can be used, see below"
    if any(":" in name for name, _ in specs) and (renamed := renamed_columns(rows)):
        names = ", ".join(f"`{name}` goes by `csv_{name}`" for name in renamed)
        yield "columns", f"{names} to reward functions, which get something else under that name"
    yield "scaled by", f"{resolved.scale_rewards}: {reasons['scale_rewards']}"
    if s.INIT_ADAPTER:
        own = f"rank {s.LORA_R}, alpha {s.LORA_ALPHA:g} on {s.LORA_TARGETS}"
        yield "adapter", f"starts from {s.INIT_ADAPTER}: {own}; KL and `before` mean the base model without it"
    if resolved.files and not m.gpus:
        threads, reason = resolved.choice("threads")
        yield "threads", f"{threads}: {reason}" if threads else reason
    if resolved.files:
        yield from (("adapter on", line) for line in hit_lines(s.LORA_TARGETS, resolved.files.config, s.LORA_R))
    yield from ((name, ": ".join(resolved.choice(name))) for name in ("attention", "packing"))
    yield "loss", f"{s.LOSS_TYPE} by liger: over chunked log-probs, the same as TRL's to five digits"
    yield "rollouts", f"{'vLLM' if resolved.use_vllm else 'transformers'}: {reasons['use_vllm']}"
    if resolved.use_vllm:
        yield "weight sync", ": ".join(resolved.choice("rollout_sync"))
    yield "experts", ": ".join(resolved.choice("experts"))
    yield from evaluation_facts(resolved)
    high, reason = resolved.choice("epsilon_high")
    yield "clip range", f"{s.EPSILON:g} below, {high:g} above: {reason}"
    if resolved.plan:
        yield from memory_facts(resolved.plan, m)
    state = f"continues from step {run.step}" if run.checkpoint else "starts at step 0"
    if run.exists and s.OVERWRITE:
        state = "DELETES the run that is there (OVERWRITE=1)"
        if run.foreign:
            more = f" and {len(run.foreign) - FOREIGN} more" * (len(run.foreign) > FOREIGN)
            state += f", and what no run wrote: {', '.join(run.foreign[:FOREIGN])}{more}"
    if any(problem.startswith("OUTPUT_DIR=") for problem in resolved.problems):
        state = "cannot be used, see below"
    yield "OUTPUT_DIR", f"{run.folder}: {state}"


def evaluation_facts(resolved: ResolvedRun) -> Iterator[tuple[str, str]]:
    """(title, text) of each line about what is measured; nothing about a simulator in a run that is not about it."""
    s, reasons = resolved.settings, resolved.reasons
    if resolved.closed_loop.is_mentioned:
        yield "closed loop", f"{'on' if resolved.closed_loop.runs else 'off'}: {reasons['closed_loop']}"
    best, reason = resolved.choice("best_by")
    if not resolved.eval_rows:
        yield "evaluation", f"none: {reason}"
        return
    exact, way = resolved.choice("exact")
    steps = f"every {s.EVAL_STEPS} steps" if s.EVAL_STEPS else "not while it trains"
    yield "evaluation", f"{'exact' if exact else 'sampled'} at {s.EVAL_TEMPERATURE:g}, {way}; {steps}"
    if not exact:
        yield "that asks", asked_text(resolved)
    yield "best adapter", f"by {best}: {reason}"


def asked_text(resolved: ResolvedRun) -> str:
    """How many answers all sampled evaluations of a run ask for."""
    s = resolved.settings
    times = 1 + bool(s.INIT_ADAPTER) + Pace(s.TOTAL_STEPS, s.EVAL_STEPS).evaluations_left(0)
    answers = (times * s.EVAL_SAMPLES + 2) * len(resolved.eval_rows)
    text = f"{times} times, and twice greedily: {answers:,} answers to held-out rows"
    if resolved.closed_loop.runs:
        text += f" and {(times + 2) * resolved.closed_loop.rollouts} rollouts of the closed loop, one after the other"
    return f"{text}; training: {s.TOTAL_STEPS} rollouts of {s.completions_per_step} completions"


def processes_text(resolved: ResolvedRun) -> str:
    """How many processes share a step, and what each gets of it."""
    m, prompts = resolved.machine, resolved.settings.PROMPTS_PER_STEP
    shares = ", ".join(str(len(Ranks(rank, m.ranks).share_out(prompts))) for rank in range(m.ranks))
    each = f"each with its own model{' and vLLM' * resolved.use_vllm}"
    there = f"{m.ranks} on {m.ranks // m.here} machines" if m.ranks > m.here else f"{m.ranks}"
    return f"{there}, {each}: {shares} of {prompts} prompts"


def memory_facts(plan: Plan, machine: Machine) -> Iterator[tuple[str, str]]:
    """(title, text) of each line about memory and batch sizes, of one process."""
    yield "MICRO_BATCH", f"{plan.micro_batch}: {plan.micro_batch_reason}"
    if engine := plan.engine:
        parts = f"weights {engine.weights:.1f} + scratch {engine.scratch:.1f} + cache {engine.cache:.1f}"
        yield "vLLM awake", f"{parts} = {engine.awake:.1f} GiB; cache for {engine.cache_reason}"
        small = sum(size == place for place, size in enumerate(engine.capture_sizes, 1))  # 1, 2, 3, ... without a gap
        graphs = ", ".join([f"1 to {small}", *map(str, engine.capture_sizes[small:])])
        asleep = f"{engine.asleep:.1f} GiB on the GPU, {plan.on_host:.1f} GiB of host memory"
        asleep += f", {plan.paged:.1f} of them experts, embeddings and head of the learner" * bool(plan.paged)
        if machine.here > 1:
            asleep += f" ({plan.on_host * machine.here:.0f} of {machine.here} engines, {machine.ram_free:.0f} are free)"
        yield "vLLM asleep", f"{asleep}; graphs for batches of {graphs}"
    else:
        yield "GENERATION_BATCH", f"{plan.generation_batch}: {plan.generation_batch_reason}"
    yield "memory", f"{plan.parts} = {plan.peak:.2f} GiB{' per process' * (machine.ranks > 1)} (estimate)"


def data_warnings(resolved: ResolvedRun) -> list[str]:
    """What a run with these rows has to be warned about: rows that teach nothing, an evaluation that is not held out,
    or none at all."""
    warnings, rows, held_out = [], resolved.rows, resolved.eval_rows
    flat = flat_rows(rows)
    if 2 * len(flat) > len(rows) and any(name in ACTION_REWARDS for name, _ in resolved.reward_specs):
        first = f"the first is {flat[0].file}, row {flat[0].number}"
        warnings.append(f"{len(flat)} of {len(rows)} rows pay all their actions the same and teach nothing; {first}")
    told: dict[object, set[tuple[float, ...]]] = {}
    for row in rows:
        told.setdefault(row.prompt or row.messages, set()).add(row.rewards)
    if odd := sum(len(ways) > 1 for ways in told.values()):
        warnings.append(
            f"{odd} of {len(told)} prompts stand in several rows with other rewards: the model learns their mean"
        )
    if rows and not held_out and resolved.settings.EVAL_SAMPLES and resolved.settings.EVAL_SHARE:
        what = "Nothing is measured, so nothing will say whether the adapter beats the base model"
        warnings.append(
            f"{what}. Held out: {resolved.reasons['heldout']}. Set EVAL_DATA='...', or EVAL_SAMPLES=0 to skip this"
        )
    asked = {row.prompt or row.messages for row in held_out}
    if shared := len(told.keys() & asked):
        what = f"{shared} of {len(asked)} held-out prompts are in DATA as well"
        warnings.append(f"{what}: what they score was trained, not held out. Take them out of one of the two")
    return warnings
