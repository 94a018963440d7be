# SPDX-License-Identifier: Apache-2.0
"""The plan of a run as text: `--check` prints it, and every run prints it first."""

from collections.abc import Iterator
from typing import Any

from grpo.data.heldout import prompt_of, trained_days_warning
from grpo.output.logs import banner_text, rounded_duration
from grpo.plan.cards import evaluation_seconds, find_card, knows_times, step_times
from grpo.plan.engine_memory import describe_cache
from grpo.plan.machine import Machine
from grpo.plan.memory import Plan
from grpo.plan.targets import target_lines
from grpo.preflight.choices import Choice
from grpo.preflight.resolve import ResolvedRun
from grpo.process.ranks import Ranks
from grpo.settings.environment import own_default
from grpo.settings.parsing import show
from grpo.settings.table import FIELDS


def banner(resolved: ResolvedRun, every_setting: bool = False) -> str:
    """The settings that are not at their defaults, or `every_setting`; sizes and choices with reasons; warnings."""
    lines = ["Settings" if every_setting else "Settings that are not at their defaults (`--check` shows all of them)"]
    for name, spec in FIELDS.items():
        value, source = getattr(resolved.recorded, name), resolved.sources[name]
        if name in OF_SIMULATOR and source == "default" and not resolved.closed_loop.is_mentioned:
            continue  # The rows are none of the demo's task.
        default = spec.default
        if source == "environment":  # MODEL_ID=tiny and each TASK have defaults of their own.
            default, _ = own_default(name, resolved.recorded.MODEL_ID, resolved.recorded.TASK)
        # Each automatic choice has a line with its reason below.
        if every_setting or (source not in ("default", "tiny", "chosen") and value != default):
            lines.append(f"  {name:<25} {show(value):<28} {spec.metadata['unit']:<12} {source}")
    lines += ["", "This run", *(f"  {title:<16} {text}" for title, text in run_lines(resolved))]
    warnings = [*resolved.warnings, *data_warnings(resolved), *resolved.state.notes]
    return "\n".join([*lines, *map(banner_text, warnings)])


OF_SIMULATOR = ("TASK", "EVAL_PROFILE")
# Choices that the lines below say in their own words; every other choice gets a line under its name.
WITH_OWN_LINE = {
    "heldout", "TOTAL_STEPS", "REWARDS", "SCALE_REWARDS", "EXPECTED_REWARD", "EPSILON_HIGH", "ATTN_IMPL", "PACKING",
    "USE_VLLM", "ROLLOUT_SYNC", "EXPERTS", "GRADIENT_CHECKPOINTING", "MICRO_BATCH", "GENERATION_BATCH", "exact",
    "exact_loop", "BEST_BY",
}  # fmt: skip


def with_reason(choice: Choice[Any], unit: str = "") -> str:
    return f"{show(choice.value)}{unit}: {choice.reason}"


def run_lines(resolved: ResolvedRun) -> Iterator[tuple[str, str]]:
    """(title, text) of each line below the settings: sizes, and every choice with its reason."""
    s, machine, rows, chosen = resolved.settings, resolved.machine, resolved.rows, resolved.choices
    gpu = "no GPU" if not machine.has_amd else "no GPU that can be used (AMD's are not supported)"
    if machine.gpus:
        gpu = f"{machine.gpu}, {machine.gpu_memory_text}"
    yield "machine", f"{gpu}; {machine.cores} cores ({machine.arch}), {machine.ram_free:.1f} GiB of memory free"
    if resolved.files and (commit := resolved.files.commit):
        begun = resolved.state.choices.get("model_commit") == commit
        reason = "with which the run began" if begun else "the newest; a continuation takes the same"
        yield "model", f"commit {commit} of {s.MODEL_ID}: {reason}"
    length = f"{s.TOTAL_STEPS} steps"
    if rows:
        yield "data", f"{len(rows)} training rows, {len(resolved.eval_rows)} held-out rows"
        yield "held out", chosen["heldout"].reason
        epochs = s.TOTAL_STEPS * s.PROMPTS_PER_STEP / s.NUM_ITERATIONS / len(rows)
        length += f", {epochs:{'.1f' if epochs >= 0.95 else '.2g'}} epochs over the rows"
    else:
        yield "data", "no row that can be used, see below"
    batch = f"{s.PROMPTS_PER_STEP} prompts x {s.NUM_GENERATIONS} generations = {s.completions_per_step} completions"
    yield "step", f"{s.PROMPTS_PER_STEP} prompts, each once" if s.DIRECT_ANSWERS else batch
    if s.steps_per_rollout > 1:
        times = f", {s.NUM_ITERATIONS} times" if s.NUM_ITERATIONS > 1 else ""
        yield "rollout", f"{s.completions_per_rollout} completions for {s.STEPS_PER_GENERATION} steps{times}"
    if machine.ranks > 1:
        yield "processes", processes_text(resolved)
    yield "length", f"{length}: {chosen['TOTAL_STEPS'].reason}"
    yield from reward_lines(resolved)
    if s.INIT_ADAPTER:
        shape = f"rank {s.LORA_R}, alpha {s.LORA_ALPHA:g} on {s.LORA_TARGETS}"
        yield "adapter", f"starts from {s.INIT_ADAPTER}: {shape}; KL and `before` mean the base model without it"
    if resolved.config:
        yield from (("adapter on", line) for line in target_lines(s.LORA_TARGETS, resolved.config, s.LORA_R))
    yield "attention", with_reason(chosen["ATTN_IMPL"])
    yield "packing", with_reason(chosen["PACKING"])
    yield "loss", f"{s.LOSS_TYPE} by liger: over chunked log-probs, the same as TRL's to five digits"
    generator = "none" if s.DIRECT_ANSWERS else "vLLM" if resolved.use_vllm else "transformers"
    yield "rollouts", f"{generator}: {chosen['USE_VLLM'].reason}"
    if resolved.use_vllm:
        yield "weight sync", with_reason(chosen["ROLLOUT_SYNC"])
    yield "experts", with_reason(chosen["EXPERTS"])
    yield from evaluation_lines(resolved)
    yield "clip range", f"{s.EPSILON:g} below, {with_reason(chosen['EPSILON_HIGH'], ' above')}"
    if resolved.plan:
        activations = "recomputed" if s.GRADIENT_CHECKPOINTING else "kept"
        yield "activations", f"{activations}: {chosen['GRADIENT_CHECKPOINTING'].reason}"
        yield from memory_lines(resolved, resolved.plan)
    yield from ((name, with_reason(choice)) for name, choice in chosen.items() if name not in WITH_OWN_LINE)
    yield "OUTPUT_DIR", f"{resolved.state.folder}: {output_dir_text(resolved)}"


def reward_lines(resolved: ResolvedRun) -> Iterator[tuple[str, str]]:
    """(title, text) of each line about the reward functions."""
    is_unusable = any(problem.startswith("REWARDS") for problem in resolved.problems)
    specs = [] if is_unusable else resolved.reward_specs
    functions = ", ".join(f"{name} x {weight:g}" for name, weight in specs)
    reason, expected = resolved.choices["REWARDS"].reason, resolved.choices["EXPECTED_REWARD"]
    yield "rewards", f"{functions}: {reason}" if functions else "none that can be used, see below"
    yield "scaled by", with_reason(resolved.choices["SCALE_REWARDS"])
    learned = "rewards of all actions at the answer" if expected.value else "no, sampled rewards"
    yield "expected", f"{learned}: {expected.reason}"


def output_dir_text(resolved: ResolvedRun) -> str:
    """Says what the run does with OUTPUT_DIR."""
    state, s = resolved.state, resolved.settings
    if any(problem.startswith("OUTPUT_DIR=") for problem in resolved.problems):
        return "cannot be used, see below"
    if state.exists and s.OVERWRITE:
        return "DELETES the run that is there (OVERWRITE=1)"
    if not state.checkpoint:
        return "starts at step 0"
    text = f"continues from step {state.step}"
    if state.complete_steps:  # Raised on purpose, or the command lacks the TOTAL_STEPS of before.
        source = resolved.sources["TOTAL_STEPS"]
        text += f" of a run that was complete ({state.complete_steps} steps): TOTAL_STEPS={s.TOTAL_STEPS} ({source})"
        if s.LR_SCHEDULER in ("linear", "cosine"):
            text += f" stretches LR_SCHEDULER={s.LR_SCHEDULER}, so the learning rate jumps"
    return text


def evaluation_lines(resolved: ResolvedRun) -> Iterator[tuple[str, str]]:
    """(title, text) of each line about evaluations, and about the task's simulator where it concerns the run."""
    s, exact, best_by = resolved.settings, resolved.choices["exact"], resolved.choices["BEST_BY"]
    if resolved.closed_loop.is_mentioned:
        yield "closed loop", f"{'on' if resolved.closed_loop.runs else 'off'}: {resolved.closed_loop.reason}"
    if not resolved.eval_rows:
        yield "evaluation", f"none: {best_by.reason}"
        return
    kind = "exact" if exact.value else "sampled"
    steps = f"every {s.EVAL_STEPS} steps" if s.EVAL_STEPS else "not during training"
    yield "evaluation", f"{kind} at {s.EVAL_TEMPERATURE:g}, {exact.reason}; {steps}"
    if not exact.value and (time := evaluation_time(resolved)):
        yield "evaluations", time
    yield "best adapter", f"by {with_reason(best_by)}"


def evaluation_time(resolved: ResolvedRun) -> str:
    """Says how long the evaluations of held-out rows may take on a card whose times are known; else ''."""
    s, name = resolved.settings, find_card(resolved.machine.gpu)
    if not name or not resolved.plan or not knows_times(s, resolved.config):
        return ""
    rows = -(-len(resolved.eval_rows) // resolved.machine.ranks)
    seconds = evaluation_seconds(step_times(name)[0], s, rows, s.MAX_COMPLETION_LEN, resolved.plan.engine)
    return f"all take some {rounded_duration(seconds)} if completions have {s.MAX_COMPLETION_LEN:,} tokens"


def processes_text(resolved: ResolvedRun) -> str:
    """Says how many processes share a step, and how many prompts each of them gets."""
    machine, prompts = resolved.machine, resolved.settings.PROMPTS_PER_STEP
    shares = ", ".join(str(len(Ranks(rank, machine.ranks).share_out(prompts))) for rank in range(machine.ranks))
    own = "its own model and vLLM" if resolved.use_vllm else "its own model"
    machines = f" on {machine.ranks // machine.here} machines" if machine.ranks > machine.here else ""
    return f"{machine.ranks}{machines}, each with {own}: {shares} of {prompts} prompts"


def memory_lines(resolved: ResolvedRun, plan: Plan) -> Iterator[tuple[str, str]]:
    """(title, text) of each line about memory and batch sizes of one process."""
    s, machine = resolved.settings, resolved.machine
    yield "MICRO_BATCH", with_reason(resolved.choices["MICRO_BATCH"])
    if plan.expert_parts > 1:
        parts = f"{plan.expert_parts} parts of a layer's experts, one after the other"
        yield "dequantized", f"{parts}: with a whole layer at a time less than half as many completions fit"
    if plan.layer_chunk:
        text = f"{plan.layer_chunk:,} tokens at a time but for attention: more would not fit"
        if plan.checkpoints:
            text += f"; what their backward pass starts from waits in {plan.checkpoints:.1f} GiB of host memory"
        yield "layers", text
    if engine := plan.engine:
        parts = f"weights {engine.weights:.1f} + scratch {engine.scratch:.1f} + cache {engine.cache:.1f}"
        cache = describe_cache(s, engine, plan.prompt_len)
        yield "vLLM awake", f"{parts} = {engine.awake:.1f} GiB; cache for {cache}"
        yield "vLLM asleep", asleep_text(plan, machine, engine.asleep)
    elif not s.DIRECT_ANSWERS:
        yield "GENERATION_BATCH", with_reason(resolved.choices["GENERATION_BATCH"])
    each = " per process" if machine.ranks > 1 else ""
    yield "memory", f"{plan.parts} = {plan.peak:.2f} GiB{each} (estimate)"


def asleep_text(plan: Plan, machine: Machine, on_gpu: float) -> str:
    """Says where the weights are while vLLM sleeps, or the learner's while it does not; `on_gpu`: GiB that it keeps."""
    text = f"{on_gpu:.1f} GiB on the GPU, {plan.on_host:.1f} GiB of host memory"
    if plan.paged:
        text += f", {plan.paged:.1f} of them experts, embeddings and head of the learner"
    if machine.here > 1:
        text += f" ({plan.on_host * machine.here:.0f} of {machine.here} engines, {machine.ram_free:.0f} are free)"
    return text


def data_warnings(resolved: ResolvedRun) -> list[str]:
    """Warnings if no row could be held out, and if held-out prompts or simulated days are trained on. An EVAL_DATA
    without rows is a problem already."""
    warnings, rows, settings = [], resolved.rows, resolved.settings
    is_split = settings.EVAL_DATA is None and settings.EVAL_SAMPLES and settings.EVAL_SHARE
    if rows and is_split and not resolved.eval_rows:
        warnings.append(
            "Nothing is measured, so nothing will say whether the adapter beats the base model. Held out: "
            f"{resolved.choices['heldout'].reason}. Set EVAL_DATA='...', or EVAL_SAMPLES=0 to skip this"
        )
    episodes = bool(settings.ENVIRONMENT)  # Their rows may share a prompt and differ in what an environment gets.
    trained, heldout = (
        {prompt_of(row, episodes) if episodes else row.prompt or row.messages for row in part}
        for part in (rows, resolved.eval_rows)
    )
    if shared := len(trained & heldout):
        fault = f"{shared} of {len(heldout)} held-out prompts are in DATA as well"
        warnings.append(f"{fault}: their scores are not held out. Remove them from DATA or from the held-out rows")
    return warnings + list(filter(None, [trained_days_warning(resolved.closed_loop.dates, rows)]))
