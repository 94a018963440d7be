# SPDX-License-Identifier: Apache-2.0
"""Every check that needs no training, and the plan of the run in words."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.data.files import Row, data_fingerprint, flat_rows, no_actions, read_rows
from grpo.data.prompts import render_rows
from grpo.data.scoring import check_rewards
from grpo.preflight.choices import (
    ATTENTION,
    LINEAR_MODULES,
    VLLM_COLDEST,
    ClosedLoop,
    attention_warning,
    choose_attention,
    choose_epsilon_high,
    choose_experts,
    choose_packing,
    choose_rollouts,
    plan_closed_loop,
)
from grpo.preflight.hub import (
    DOWNLOAD_GIB,
    REAL_MODEL,
    ModelFiles,
    checkpoint_gib,
    downloaded_gib,
    find_model,
    has_mxfp4,
)
from grpo.preflight.machine import (
    FLASH_PACKAGES,
    GIB,
    TESTED,
    TESTED_VLLM,
    Machine,
    check_packages,
    check_trackers,
    installed_versions,
    read_machine,
)
from grpo.preflight.memory import LORA_RANKS, Plan, find_limits, limit_text, misfit, plan_memory, propose
from grpo.run.folder import RunState, existing_parent, inspect_run
from grpo.run.logs import banner_text
from grpo.settings import FIELDS, Problems, Settings, listed, load_settings, show


def check_settings(settings: Settings, config: Mapping[str, Any] | None, machine: Machine, problems: Problems) -> None:
    """Settings that contradict each other or the machine."""
    total, chunk = settings.completions_per_step, settings.GENERATION_BATCH
    for name, size in (("GENERATION_BATCH", chunk),):
        if size and total % size:
            near = min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: (abs(n - size), n))
            product = f"PROMPTS_PER_STEP x NUM_GENERATIONS = {settings.PROMPTS_PER_STEP} x {settings.NUM_GENERATIONS} = {total}"
            problems.add(name, f"{size} does not divide {product}", f"The nearest that does is {near}")
    known = ("auto", *ATTENTION)
    if settings.ATTN_IMPL not in known and "/" not in settings.ATTN_IMPL:
        near = difflib.get_close_matches(settings.ATTN_IMPL, known, 1) or ["auto"]
        problems.add(
            "ATTN_IMPL",
            f"{settings.ATTN_IMPL!r} is unknown, the nearest is {near[0]}",
            f"Use one of {', '.join(known)}, or a Hub kernel",
        )
    if settings.ATTN_IMPL not in ("auto", "eager") and not machine.gpus:
        problems.add(
            "ATTN_IMPL", f"{settings.ATTN_IMPL} needs a GPU and none is visible", "Set ATTN_IMPL=eager (or auto)"
        )
    if settings.ATTN_IMPL == "flex_attention":
        for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
            if os.environ.get(name) == "1":
                what = f"flex attention without compilation is unfused and holds all scores, and {name}=1 switches that off"
                problems.add("ATTN_IMPL", what, f"Unset {name}, or set ATTN_IMPL=torch_flash, which needs none")
    if machine.gpus and 0 < machine.capability < 8:
        what = f"{machine.gpu} has compute capability {machine.capability:g}, BF16 and FlashAttention need 8.0"
        problems.add("GPU", what, "Take an A100, L40S, H100, GH200 or a newer card")
    if settings.ATTN_IMPL == "flash_attention_3" and machine.gpus and not 9 <= (machine.capability or 9) < 10:
        problems.add("ATTN_IMPL", f"flash_attention_3 is made for Hopper, not for {machine.gpu}", "Set ATTN_IMPL=auto")
    if settings.ATTN_IMPL == "flash_attention_4" and machine.gpus and 0 < machine.capability < 9:
        what = f"flash_attention_4 needs compute capability 9.0, {machine.gpu} has {machine.capability:g}"
        problems.add("ATTN_IMPL", what, "Set ATTN_IMPL=auto")
    if settings.PACKING == "prefix" and settings.ATTN_IMPL not in known:
        problems.add(
            "PACKING",
            f"{settings.ATTN_IMPL} takes padded rows only",
            f"Set PACKING=auto, or ATTN_IMPL to one of {', '.join(ATTENTION)}",
        )
    quantized = has_mxfp4(config)
    if settings.EXPERTS == "mxfp4" and config and not quantized:
        problems.add("EXPERTS", f"{settings.MODEL_ID} has no MXFP4 experts", "Set EXPERTS=bf16")
    targets = listed(settings.LORA_TARGETS)
    for target in targets if targets != ["all-linear"] else ():
        if target not in LINEAR_MODULES:
            if any(word in target for word in ("expert", "mlp", "gate_up", "down_proj", "router")):
                what = f"{target!r}: LoRA on experts and router is refused, as vLLM's MXFP4 experts could not follow it"
                fix = f"Train the attention: all-linear, or some of {', '.join(LINEAR_MODULES)}"
                problems.add("LORA_TARGETS", what, fix)
                continue
            near = difflib.get_close_matches(target, LINEAR_MODULES, 1)
            what = f"{target!r} is no linear module of gpt-oss" + (f", the nearest is {near[0]}" if near else "")
            problems.add("LORA_TARGETS", what, f"Use all-linear, or some of {', '.join(LINEAR_MODULES)}")
    if not targets:
        problems.add("LORA_TARGETS", "it names no module", f"Use all-linear, or some of {', '.join(LINEAR_MODULES)}")
    if settings.LOSS_IMPL == "liger" and settings.LOSS_TYPE == "luspo":
        problems.add(
            "LOSS_TYPE",
            "Liger's luspo divides by the number of tokens where TRL's does not",
            "Set LOSS_IMPL=trl for luspo",
        )
    if settings.USE_VLLM and not machine.gpus:
        problems.add("USE_VLLM", "vLLM beside the trainer needs a GPU and none is visible", "Set USE_VLLM=0")
    if settings.USE_VLLM is not False and settings.TEMPERATURE > 2 and machine.gpus:
        problems.add("TEMPERATURE", "vLLM takes at most 2", "Lower it, or set USE_VLLM=0")
    if settings.USE_VLLM is not False and settings.TEMPERATURE < VLLM_COLDEST and machine.gpus:
        what = f"vLLM samples no colder than {VLLM_COLDEST}, and the loss would be that of another temperature"
        problems.add("TEMPERATURE", what, f"Set {VLLM_COLDEST} or more, or USE_VLLM=0")
    if settings.ROLLOUT_SYNC == "lora" and max(LORA_RANKS) < settings.LORA_R:
        what = f"vLLM takes adapters of rank {max(LORA_RANKS)} at most"
        problems.add("LORA_R", what, "Lower it, or set ROLLOUT_SYNC=merge")
    if settings.WARMUP_STEPS >= settings.TOTAL_STEPS:
        what = f"the learning rate would rise over {settings.WARMUP_STEPS} steps, the run has {settings.TOTAL_STEPS}"
        problems.add("WARMUP_STEPS", what, "Lower it, or raise TOTAL_STEPS")
    sequence = settings.IS_CORRECTION.startswith("sequence")
    if settings.LOSS_TYPE == "vespo" and sequence:
        problems.add("IS_CORRECTION", "vespo corrects sequences itself", "Set token_truncate or token_mask")
    if machine.gpus > 1:
        fix = "Make one visible, e.g. CUDA_VISIBLE_DEVICES=0"
        problems.add("CUDA_VISIBLE_DEVICES", f"{machine.gpus} GPUs are visible, this script uses one", fix)


def check_machine(
    settings: Settings,
    files: ModelFiles | None,
    machine: Machine,
    plan: Plan | None,
    problems: Problems,
    planned: Callable[[Settings, Machine], Plan],
    resumed: bool = False,
) -> None:
    """The GPU is there and large enough, and so is the disk. `planned` and `resumed` as in `propose`."""
    if plan is None or files is None:
        return
    positions = files.config.get("max_position_embeddings", math.inf)
    if plan.prompt_len + settings.MAX_COMPLETION_LEN > positions:
        what = f"after a prompt of {plan.prompt_len} tokens, {settings.MAX_COMPLETION_LEN} are more than the model's {positions} positions"
        room = positions - plan.prompt_len
        problems.add("MAX_COMPLETION_LEN", what, f"Set it to {room} or lower" if room > 0 else "Shorten the prompts")
    if machine.gpus:
        if not machine.compiler:
            what = "there is none, and the kernels of learner and engine are written in Triton, which needs one"
            problems.add("C compiler", what, "apt install build-essential, or name one in CC")
        engine = plan.engine
        if misfit(plan, machine):
            free = f"{machine.gpu_free:.0f} of {machine.gpu_total:.0f} GiB are free"
            if engine and engine.cache < engine.cache_least:
                name = "VLLM_GPU_MEM"
                what = (
                    f"vLLM needs at least {engine.weights + engine.scratch + engine.cache_least:.1f} GiB beside the "
                    f"trainer's {plan.weights + plan.adapter:.1f} and {free} ({engine.cache_reason})"
                )
            else:
                name, rollout = f"GPU {machine.gpu}", f"generation {plan.generation:.1f}"
                if engine:
                    rollout = f"vLLM awake {engine.awake:.1f} and asleep {engine.asleep:.1f}"
                parts = (
                    f"weights {plan.weights:.1f}, adapter {plan.adapter:.1f}, {rollout}, learning {plan.learning:.1f}"
                )
                what = f"the run needs about {plan.peak:.0f} GiB ({parts}) and {free}"
                if plan.peak <= machine.gpu_free:
                    what += ", a tenth of which is kept for what the plan does not see"
            problems.add(name, what, propose(settings, files.config, machine, planned, resumed))
        if engine and engine.weights + 2 > machine.ram_free:
            what = f"the sleeping engine keeps {engine.weights:.1f} GiB in host memory, {machine.ram_free:.1f} GiB are free"
            without = planned(dataclasses.replace(settings, USE_VLLM=False), machine)
            fix = "" if misfit(without, machine) else ", or set USE_VLLM=0"
            problems.add("memory", what, f"Free memory, take a machine with more of it{fix}")
    elif plan.weights > 4:
        what = f"no GPU is visible, and {settings.MODEL_ID} needs one ({plan.weights:.0f} GiB of BF16 weights)"
        problems.add("MODEL_ID", what, "Run on a machine with an 80 GB GPU, or try MODEL_ID=tiny, which needs none")
    elif plan.peak > machine.ram_free > 0:
        what = f"the run needs about {plan.peak:.1f} GiB of memory and {machine.ram_free:.1f} GiB are free"
        problems.add("memory", what, "Lower MICRO_BATCH or MAX_COMPLETION_LEN")
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    # Adapter and its two AdamW moments in float32, per kept checkpoint, plus the final adapter, the logs and the zip.
    output = plan.adapter * (settings.SAVE_TOTAL_LIMIT + 2) + 0.2
    needs = {Path(settings.OUTPUT_DIR): (output, "OUTPUT_DIR", "checkpoints, logs and the zip")}
    if settings.MODEL_ID == REAL_MODEL:
        found = downloaded_gib(files)
        if found < DOWNLOAD_GIB - 0.2:  # nothing, or a part of it
            needs[home] = (DOWNLOAD_GIB - found, "HF_HOME", "the checkpoint's download")
    for path, (need, name, purpose) in needs.items():
        free = shutil.disk_usage(existing_parent(path)).free / GIB
        if free < need:
            problems.add(
                f"{name}={path}",
                f"{purpose} need {need:.1f} GiB and {free:.1f} GiB are free",
                f"Free space, or point {name} to a larger disk",
            )


@dataclass(frozen=True)
class Preflight:
    """Everything that is known about a run before anything heavy is imported."""

    settings: Settings
    sources: dict[str, str]
    problems: Problems
    machine: Machine
    versions: dict[str, str | None]
    files: ModelFiles | None
    rows: list[Row]
    eval_rows: list[Row]
    reward_specs: list[tuple[str, float]]
    attention: tuple[str, str]
    packing: tuple[str, str]
    experts: tuple[str, str]
    rollouts: tuple[bool, str]
    plan: Plan | None
    run: RunState
    closed_loop: ClosedLoop


def preflight(environ: Mapping[str, str], machine: Machine | None = None) -> Preflight:
    """Every check that needs no training; all problems are collected, and nothing is written."""
    settings, sources, problems = load_settings(environ)
    machine = machine or read_machine()
    versions = installed_versions([*TESTED, *TESTED_VLLM])
    rollouts = choose_rollouts(settings.USE_VLLM, machine.gpus, settings.MODEL_ID == "tiny", versions["vllm"])
    check_packages(settings, versions, problems, rollouts[0])
    files = find_model(settings.MODEL_ID, problems)
    check_settings(settings, files.config if files else None, machine, problems)
    check_trackers(settings, environ, problems)
    rows = read_rows("DATA", settings.DATA, problems)
    eval_rows = read_rows("EVAL_DATA", settings.EVAL_DATA, problems) if settings.EVAL_SAMPLES else []
    for row in eval_rows:
        if not row.rewards:
            problems.add(f"{row.file}, columns", no_actions(row), "Add them, or set EVAL_SAMPLES=0")
            break
    specs = check_rewards(settings, rows, problems, sources["INVALID_REWARD"] == "environment")
    run = inspect_run(settings, rows, problems)
    flash = installed_versions(package for package, _ in FLASH_PACKAGES.values())
    installed = [name for name, version in flash.items() if version]
    attention = choose_attention(settings.ATTN_IMPL, machine.gpus, machine.capability, installed)
    packing = choose_packing(settings.PACKING, attention[0], machine.gpus)
    experts, plan, longest = (settings.EXPERTS or "bf16", "the model is not there yet"), None, 0
    if files and files.tokenizer:
        rows, longest = render_rows(settings, rows, files.template, files.tokenizer, problems)
        eval_rows, longest_eval = render_rows(settings, eval_rows, files.template, files.tokenizer, problems)
        longest = max(longest, longest_eval)
    checkpoint = checkpoint_gib(settings.MODEL_ID, files) if files and rollouts[0] and machine.gpus else None

    def choose_plan(s: Settings, on: Machine = machine) -> tuple[tuple[str, str], Plan]:
        shapes = s, files.config, on, longest or s.MAX_PROMPT_LEN, attention[0]
        engine = None if s.USE_VLLM is False else checkpoint
        plans = {kind: plan_memory(*shapes, engine, packing[0], kind) for kind in ("bf16", "mxfp4")}
        chosen = choose_experts(
            s.EXPERTS, has_mxfp4(files.config), *plans.values(), on.gpu_free if on.gpus else on.ram_free
        )
        return chosen, plans[chosen[0]]

    def planned(s: Settings, on: Machine = machine) -> Plan:
        return choose_plan(s, on)[1]

    if files:
        experts, plan = choose_plan(settings)
        if machine.gpus:
            length, size = find_limits(settings, files.config, machine, plan.prompt_len, planned)
            plan = dataclasses.replace(plan, largest_length=length, largest_micro_batch=size)
    if run.checkpoint and plan:  # what `auto` chose stays: other batches would sample differently
        engine, _ = run.choices.get("rollouts") or rollouts
        recorded = (run.choices.get("plan") or {}).get("generation_batch")
        if engine != rollouts[0]:
            if settings.USE_VLLM is None:
                what = f"the run in {run.folder} was started with USE_VLLM={int(engine)}, now it is {int(rollouts[0])}"
                fix = (
                    f"Set USE_VLLM={int(engine)} to continue as before, USE_VLLM={int(rollouts[0])} to go on like this"
                )
                problems.add("USE_VLLM", f"{what} ({rollouts[1]})", fix)
        elif recorded and settings.GENERATION_BATCH is None:
            plan = dataclasses.replace(
                plan, generation_batch=recorded, generation_batch_reason="as the run was started"
            )
    chosen = sources["EVAL_PROFILE"] == "environment"
    closed_loop = plan_closed_loop(settings, eval_rows, rollouts[0], chosen, problems)
    check_machine(settings, files, machine, plan, problems, planned, run.checkpoint is not None)
    problems[:] = dict.fromkeys(problems)
    return Preflight(
        settings, sources, problems, machine, versions, files, rows, eval_rows, specs, attention, packing, experts,
        rollouts, plan, run, closed_loop,
    )  # fmt: skip


def banner(check: Preflight) -> str:
    """The resolved settings with units and where each came from, the sizes derived from them, and every choice."""
    s, m, lines = check.settings, check.machine, []
    for name, spec in FIELDS.items():
        lines.append(f"  {name:<22} {show(getattr(s, name)):<28} {spec.metadata['unit']:<12} {check.sources[name]}")
    gpu = f"{m.gpu}, {m.gpu_free:.1f} of {m.gpu_total:.1f} GiB free" if m.gpus else "no GPU"
    passes = s.TOTAL_STEPS * s.PROMPTS_PER_STEP / max(len(check.rows), 1)
    lines = ["Settings", *lines, "", "This run"]
    lines += [
        f"  machine       {gpu}; {m.cores} cores ({m.arch}), {m.ram_free:.1f} GiB of memory free",
        f"  data          {len(check.rows)} training rows, {len(check.eval_rows)} held-out rows",
        f"  step          {s.PROMPTS_PER_STEP} prompts x {s.NUM_GENERATIONS} generations = {s.completions_per_step} completions",
        f"  length        {s.TOTAL_STEPS} steps, {passes:.1f} passes over the rows",
        f"  rewards       {', '.join(f'{name} x {weight:g}' for name, weight in check.reward_specs)}",
        f"  attention     {check.attention[0]}: {check.attention[1]}",
        f"  packing       {check.packing[0]}: {check.packing[1]}",
        f"  experts       {check.experts[0]}: {check.experts[1]}",
        f"  rollouts      {'vLLM' if check.rollouts[0] else 'transformers'}: {check.rollouts[1]}",
        f"  closed loop   {'on' if check.closed_loop.prompt else 'off'}: {check.closed_loop.reason}",
        f"  clip range    {s.EPSILON:g} below, {choose_epsilon_high(s)[0]:g} above: {choose_epsilon_high(s)[1]}",
    ]
    if plan := check.plan:
        lines += [
            f"  MICRO_BATCH   {plan.micro_batch}: {plan.micro_batch_reason}",
        ]
        if engine := plan.engine:
            # How many stand there without a gap: 1, 2, 3, ...
            small = sum(size == place for place, size in enumerate(engine.capture_sizes, 1))
            lines += [
                f"  vLLM awake    weights {engine.weights:.1f} + scratch {engine.scratch:.1f} + cache {engine.cache:.1f} = "
                f"{engine.awake:.1f} GiB; cache for {engine.cache_reason}",
                f"  vLLM asleep   {engine.asleep:.1f} GiB on the GPU, {engine.weights:.1f} GiB of host memory; "
                f"graphs for batches of {', '.join([f'1 to {small}', *map(str, engine.capture_sizes[small:])])}",
            ]
            rollout = f"vLLM awake {engine.awake:.2f} and learning {plan.learning:.2f} + asleep {engine.asleep:.2f}"
        else:
            lines.append(f"  GENERATION_BATCH {plan.generation_batch}: {plan.generation_batch_reason}")
            rollout = f"generation {plan.generation:.2f} and learning {plan.learning:.2f}"
        lines.append(
            f"  memory        weights {plan.weights:.2f} + adapter {plan.adapter:.2f} + the larger of {rollout} = "
            f"{plan.peak:.2f} GiB (estimate)"
        )
        for name, limit in (("MAX_COMPLETION_LEN", plan.largest_length), ("MICRO_BATCH", plan.largest_micro_batch)):
            if limit:
                lines.append(f"  largest       {limit_text(name, limit)}")
    else:
        lines.append(
            "  model         the tiny model is made at the first start (under a minute); prompts are measured then"
        )
    state = f"continues from step {check.run.step}" if check.run.checkpoint else "starts at step 0"
    if check.run.exists and s.OVERWRITE:
        state = "DELETES the run that is there (OVERWRITE=1)"
    if any(problem.startswith("OUTPUT_DIR=") for problem in check.problems):
        state = "cannot be used, see below"
    lines.append(f"  OUTPUT_DIR    {check.run.folder}: {state}")
    lines += map(banner_text, filter(None, [attention_warning(check.attention[0]), *data_warnings(check)]))
    return "\n".join(lines)


def data_warnings(check: Preflight) -> list[str]:
    """What a run with these rows has to be warned about: rows that teach nothing, an evaluation that is not held out."""
    warnings, rows, held_out = [], check.rows, check.eval_rows
    flat = flat_rows(rows)
    if 2 * len(flat) > len(rows) and any(name in ("action", "best") for name, _ in check.reward_specs):
        first = f"the first is {flat[0].file}, row {flat[0].number}"
        warnings.append(f"{len(flat)} of {len(rows)} rows pay all their actions the same and teach nothing; {first}")
    shipped = FIELDS["DATA"].default, FIELDS["DATA"].metadata["tiny"]
    own = check.sources["DATA"] == "environment" and check.settings.DATA not in shipped
    if held_out and own and check.sources["EVAL_DATA"] != "environment":
        demo = "rows and closed loop" if check.closed_loop.prompt else "rows"
        what = f"Evaluated on the demo's {demo} ({check.settings.EVAL_DATA}), nothing held out from your DATA"
        warnings.append(f"{what}: set EVAL_DATA='...', or EVAL_SAMPLES=0 to skip")
    prompts = [{row.prompt or row.messages for row in part} for part in (rows, held_out)]
    if shared := len(prompts[0] & prompts[1]):
        what = f"{shared} of {len(prompts[1])} held-out prompts are in DATA as well"
        warnings.append(f"{what}: what they score was trained, not held out. Take them out of one of the two")
    return warnings


def run_record(check: Preflight) -> dict[str, Any]:
    """settings.json of a run: every setting and where it came from, every choice and its reason."""
    return {
        "settings": dataclasses.asdict(check.settings),
        "sources": check.sources,
        "choices": {
            "attention": check.attention,
            "packing": check.packing,
            "experts": check.experts,
            "rollouts": check.rollouts,
            "epsilon_high": choose_epsilon_high(check.settings),
            "plan": dataclasses.asdict(check.plan) if check.plan else None,
        },
        "machine": dataclasses.asdict(check.machine),
        "data_sha256": data_fingerprint(check.rows),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "resumed_from_step": check.run.step,
    }


def run_versions() -> dict[str, str | None]:
    """versions.json of a run."""
    return {"python": platform.python_version()} | installed_versions([*TESTED, "vllm", "triton", "pandas"])
