# SPDX-License-Identifier: Apache-2.0
"""Every check that needs no training: settings, model, data, rewards, folder, memory and disk."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.data.files import Row, data_fingerprint
from grpo.data.heldout import read_split
from grpo.data.prompts import render_rows
from grpo.data.reward_checks import check_heldout, check_rewards
from grpo.data.scoring import REWARD_INTERFACE
from grpo.plan import hub
from grpo.plan.hub import ModelFiles
from grpo.plan.machine import (
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
from grpo.plan.memory import (
    BESIDE_VLLM,
    LORA_RANKS,
    Plan,
    Shapes,
    divisors,
    host_shortfall,
    in_words,
    memory_advice,
    memory_shortfall,
    without_vllm,
)
from grpo.plan.targets import check_targets, expert_words, hits
from grpo.preflight import choices
from grpo.preflight.adapter import check_start, start_adapter
from grpo.preflight.choices import ATTENTION, VLLM_COLDEST, ClosedLoop
from grpo.run.folder import RunState, existing_parent, inspect_run, run_folder
from grpo.run.ranks import Ranks
from grpo.settings import (
    MOST_COMPLETIONS,
    MOST_WHOLE,
    Problems,
    Settings,
    is_text,
    load_settings,
    nearest,
    path_fault,
    unknown_variables,
)


def check_attention(settings: Settings, machine: Machine, problems: Problems) -> None:
    """ATTN_IMPL is known, and the GPU can run it; PACKING goes with it."""
    name, known, gpu = settings.ATTN_IMPL, ("auto", *ATTENTION), machine.gpu
    capability = machine.capability if machine.gpus else 0  # 0 where it is unknown too
    has = f"{gpu} has compute capability {capability:g}"
    if name not in known and "/" not in name:
        what = f"{name!r} is unknown{nearest(name, known)}"
        problems.add("ATTN_IMPL", what, f"Use one of {', '.join(known)}, or a Hub kernel")
    elif name not in ("auto", "eager") and not machine.gpus:
        problems.add("ATTN_IMPL", f"{name} needs a GPU and none is visible", "Set ATTN_IMPL=eager (or auto)")
    if 0 < capability < 8:
        fix = "Take an A100, L40S, H100, GH200 or a newer card"
        problems.add("GPU", f"{has}, BF16 and FlashAttention need 8.0", fix)
    if name == "flash_attention_3" and capability and not 9 <= capability < 10:
        problems.add("ATTN_IMPL", f"{name} is made for Hopper, {has}", "Set ATTN_IMPL=auto")
    if name == "flash_attention_4" and 0 < capability < 9:
        problems.add("ATTN_IMPL", f"{name} needs compute capability 9.0, {has}", "Set ATTN_IMPL=auto")
    if settings.PACKING == "prefix" and name not in known:
        fix = f"Set PACKING=auto, or ATTN_IMPL to one of {', '.join(ATTENTION)}"
        problems.add("PACKING", f"{name} takes padded rows only", fix)


def check_lora(settings: Settings, config: Mapping[str, Any] | None, problems: Problems) -> None:
    """LORA_TARGETS matches something, and vLLM can follow by the chosen ROLLOUT_SYNC; so can it LORA_R."""
    check_targets(settings.LORA_TARGETS, config, problems)
    experts = expert_words(settings.LORA_TARGETS)
    if experts and settings.LORA_DROPOUT:
        what = f"with {experts[0]} in LORA_TARGETS there is no dropout: PEFT has none for experts"
        problems.add("LORA_DROPOUT", what, "Set LORA_DROPOUT=0")
    if settings.USE_VLLM is False:
        return
    if experts and settings.ROLLOUT_SYNC == "merge":
        what = f"merge brings vLLM the attention's weights alone, and LORA_TARGETS has {experts[0]}"
        problems.add("ROLLOUT_SYNC", what, "Set ROLLOUT_SYNC=auto (which takes lora), or USE_VLLM=0")
    if settings.ROLLOUT_SYNC == "lora" and max(LORA_RANKS) < settings.LORA_R:
        what = f"vLLM takes adapters of rank {max(LORA_RANKS)} at most"
        problems.add("LORA_R", what, f"Lower it, or set {'USE_VLLM=0' if experts else 'ROLLOUT_SYNC=merge'}")


def check_settings(settings: Settings, config: Mapping[str, Any] | None, machine: Machine, problems: Problems) -> None:
    """Settings that contradict each other, the model's config.json or the machine."""
    total, chunk = settings.completions_per_step, settings.GENERATION_BATCH
    numbers = f"{settings.PROMPTS_PER_STEP} x {settings.NUM_GENERATIONS} = {total}"
    if chunk and total % chunk:
        near = min(divisors(total), key=lambda n: abs(n - chunk))
        what = f"{chunk} does not divide PROMPTS_PER_STEP x NUM_GENERATIONS = {numbers}"
        problems.add("GENERATION_BATCH", what, f"The nearest that does is {near}")
    if total > MOST_COMPLETIONS:
        what = f"x NUM_GENERATIONS = {numbers} completions in one step, and {MOST_COMPLETIONS:,} are the most"
        problems.add("PROMPTS_PER_STEP", what, "Lower one of the two")
    check_attention(settings, machine, problems)
    check_lora(settings, config, problems)
    if settings.EXPERTS not in ("bf16", None) and config and not hub.has_mxfp4(config):
        problems.add("EXPERTS", f"{settings.MODEL_ID} has no MXFP4 experts", "Set EXPERTS=bf16")
    if settings.USE_VLLM and not machine.gpus:
        problems.add("USE_VLLM", "vLLM beside the trainer needs a GPU and none is visible", "Set USE_VLLM=0")
    for name in ("TEMPERATURE", "EVAL_TEMPERATURE") if settings.USE_VLLM is not False and machine.gpus else ():
        if VLLM_COLDEST <= getattr(settings, name) <= 2:
            continue
        what = f"vLLM samples no colder than {VLLM_COLDEST}, and vLLM takes at most 2"
        problems.add(name, what, "Set it between the two, or USE_VLLM=0")
    if settings.WARMUP_STEPS >= settings.TOTAL_STEPS:
        what = f"the learning rate would rise over {settings.WARMUP_STEPS} steps, the run has {settings.TOTAL_STEPS}"
        problems.add("WARMUP_STEPS", what, "Lower it, or raise TOTAL_STEPS")
    if settings.LOSS_TYPE == "vespo" and settings.IS_CORRECTION.startswith("sequence"):
        problems.add("IS_CORRECTION", "vespo corrects sequences itself", "Set token_truncate or token_mask")
    if machine.gpus > 1:
        start = f"Start one for each (torchrun --nproc-per-node {machine.gpus} train_grpo.py, see docs/clusters.md)"
        fix = f"{start}, or make one visible, e.g. CUDA_VISIBLE_DEVICES=0"
        problems.add(
            "CUDA_VISIBLE_DEVICES", f"{machine.gpus} GPUs are visible, a process of this program uses one", fix
        )
    if machine.ranks > settings.PROMPTS_PER_STEP:
        what = f"{settings.PROMPTS_PER_STEP} cannot be shared out among {machine.ranks} processes, each needs one"
        problems.add("PROMPTS_PER_STEP", what, f"Set it to {machine.ranks} or higher, or start fewer processes")


def resolve_steps(settings: Settings, sources: dict[str, str], rows: int, problems: Problems) -> Settings:
    """The settings with the TOTAL_STEPS that NUM_TRAIN_EPOCHS asks for, given the number of training rows; `sources`
    learns of it. Both at once are a problem."""
    epochs = settings.NUM_TRAIN_EPOCHS
    if epochs is None:
        return settings
    if sources["TOTAL_STEPS"] == "environment":
        what = f"it says {epochs:g} rounds over the rows, and TOTAL_STEPS={settings.TOTAL_STEPS} is set as well"
        problems.add("NUM_TRAIN_EPOCHS", what, "Unset one of the two")
        return settings
    steps, _ = choices.choose_steps(settings.TOTAL_STEPS, epochs, rows, settings.PROMPTS_PER_STEP)
    if steps > MOST_WHOLE:
        what = f"{epochs:g} rounds over {rows} rows are {steps} steps, and {MOST_WHOLE} are the most"
        problems.add("NUM_TRAIN_EPOCHS", what, "Lower it")
        return settings
    sources["TOTAL_STEPS"] = "chosen"
    return dataclasses.replace(settings, TOTAL_STEPS=steps)


def check_shared(
    settings: Settings, config: Mapping[str, Any] | None, machine: Machine, vllm: bool, sync: str, problems: Problems
) -> None:
    """Whether `vllm` generates, and for EXPERTS=shared with the kernels whose layout the learner reads."""
    why, shared = "", settings.EXPERTS == "shared"
    if settings.EXPERTS in BESIDE_VLLM and not vllm:
        why = f"{settings.EXPERTS} is for a run beside vLLM, which does not generate here"
    elif shared and sync == "lora":
        why = "with ROLLOUT_SYNC=lora vLLM keeps its experts for other kernels"
    elif shared and not 9 <= machine.capability < 10:
        why = f"the learner reads them as on Hopper cards (capability 9.0), {machine.gpu} has {machine.capability}"
    elif shared and config and config.get("tie_word_embeddings"):
        why = "vLLM has no output head where it is tied to the embeddings"
    if why:
        problems.add("EXPERTS", why, "Set EXPERTS=auto")


def experts_of(settings: Settings, shapes: Shapes) -> tuple[str, str]:
    """(EXPERTS, reason) of a run with these settings."""
    kinds, gpu, asked = shapes.expert_kinds(settings), shapes.machine.gpus, settings.EXPERTS
    # Plans take a moment: none where nothing is to be chosen.
    tried = [dataclasses.replace(settings, EXPERTS=kind) for kind in kinds if asked is None]
    fits = [one.EXPERTS for one in tried if not (gpu and shapes.shortfall(one))]
    return choices.choose_experts(asked, kinds, fits)


def check_memory(settings: Settings, shapes: Shapes, problems: Problems, resumed: bool = False) -> None:
    """The model has as many positions, and the machine as much memory, as the run takes, `resumed` or not."""
    plan, machine = shapes.plan(settings), shapes.machine
    engine, positions = plan.engine, shapes.config["max_position_embeddings"]
    room = positions - plan.prompt_len
    if room < settings.MAX_COMPLETION_LEN:
        what = f"{settings.MAX_COMPLETION_LEN} are more than the model's {positions} positions"
        fix = f"Set it to {room} or lower" if room > 0 else "Shorten the prompts"
        problems.add("MAX_COMPLETION_LEN", f"after a prompt of {plan.prompt_len} tokens, {what}", fix)
    if machine.gpus:
        if not machine.compiler:
            what = "there is none, and the kernels of learner and engine are written in Triton, which needs one"
            problems.add("C compiler", what, "apt install build-essential, or name one in CC")
        if shortfall := memory_shortfall(plan, machine):
            name = "VLLM_GPU_MEM" if engine and engine.cache < engine.cache_least else f"GPU {machine.gpu}"
            what = f"{machine.gpu_free:.0f} of {machine.gpu_total:.0f} GiB are free, and {shortfall} ({plan.parts})"
            problems.add(name, what, memory_advice(settings, shapes, resumed))
    elif plan.weights > 4:
        what = f"no GPU is visible, and {settings.MODEL_ID} needs one ({plan.weights:.0f} GiB of BF16 weights)"
        problems.add("MODEL_ID", what, "Run on a machine with an 80 GB GPU, or try MODEL_ID=tiny, which needs none")
    elif plan.peak > machine.ram_share > 0:
        each = f" in each of {machine.here} processes" * (machine.here > 1)
        what = f"the run needs about {plan.peak:.1f} GiB of memory{each} and {machine.ram_free:.1f} GiB are free"
        problems.add("memory", what, "Lower MICRO_BATCH or MAX_COMPLETION_LEN" + ", or start fewer" * bool(each))
    if short := host_shortfall(plan, machine):
        others = [*({"EXPERTS": kind} for kind in shapes.expert_kinds(settings)), without_vllm(settings)]
        fit = [way for way in others if not shapes.shortfall(dataclasses.replace(settings, **way))][:1]
        ways = ["take a machine with more"] + ["start fewer processes"] * (machine.here > 1)
        ways += ["set " + " and ".join(in_words(way)) for way in fit]
        problems.add("memory", short, ", or ".join(["Free some", *ways]))


def check_disk(settings: Settings, files: ModelFiles, adapter: float, problems: Problems) -> None:
    """The disks have room for what the run writes, with an adapter of `adapter` GiB, and for what it downloads."""
    # Adapter and its two AdamW moments in float32, per kept checkpoint, plus the final adapter, the logs and the zip.
    output = adapter * (settings.SAVE_TOTAL_LIMIT + 2) + 0.2
    cache = "HF_HUB_CACHE" if os.environ.get("HF_HUB_CACHE") else "HF_HOME"
    home = Path(os.environ.get(cache) or "~/.cache/huggingface")
    download = hub.DOWNLOAD_GIB - hub.downloaded_gib(files) if settings.MODEL_ID == hub.REAL_MODEL else 0.0
    for name, path, need, purpose in (
        ("OUTPUT_DIR", Path(settings.OUTPUT_DIR), output, "checkpoints, logs and the zip"),
        (cache, home, download if download > 0.2 else 0.0, "the checkpoint's download"),
    ):
        if need and (fault := path_fault(path)):
            problems.add(f"{name}={path}", fault, "Name a folder for it")
        elif need and (free := shutil.disk_usage(existing_parent(path)).free / GIB) < need:
            what = f"{purpose} need {need:.1f} GiB and {free:.1f} GiB are free"
            problems.add(f"{name}={path}", what, f"Free space, or point {name} to a larger disk")


@dataclass(frozen=True)
class Preflight:
    """Everything that is known about a run before anything heavy is imported. A choice is (what, reason)."""

    settings: Settings
    sources: dict[str, str]
    problems: Problems
    machine: Machine
    files: ModelFiles | None
    rows: list[Row]
    eval_rows: list[Row]
    reward_specs: list[tuple[str, float]]
    heldout_reason: str  # how the held-out rows were told apart
    garbage_warning: str | None
    rewards: tuple[str, str]
    scale_rewards: tuple[str, str]
    attention: tuple[str, str]
    packing: tuple[str, str]
    rollouts: tuple[bool, str]
    sync: tuple[str, str]
    experts: tuple[str, str]
    plan: Plan | None
    run: RunState
    closed_loop: ClosedLoop
    evaluation: tuple[bool, str]  # exact or sampled
    best: tuple[str, str]
    init_adapter: str | None  # SHA-256 of its weights
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    warnings: list[str] = dataclasses.field(default_factory=list)  # about variables that are no settings


def keep_choices(settings: Settings, rollouts: tuple[bool, str], plan: Plan, run: RunState, problems: Problems) -> Plan:
    """The plan of a resumed run with what `auto` chose at its start: other batches would sample differently."""
    engine, _ = run.choices.get("rollouts") or rollouts
    recorded = (run.choices.get("plan") or {}).get("generation_batch")
    if engine != rollouts[0] and settings.USE_VLLM is None:
        was, now = f"USE_VLLM={int(engine)}", f"USE_VLLM={int(rollouts[0])}"
        what = f"the run in {run.folder} was started with {was}, now it is {int(rollouts[0])} ({rollouts[1]})"
        problems.add("USE_VLLM", what, f"Set {was} to continue as before, {now} to go on like this")
    elif engine == rollouts[0] and recorded and settings.GENERATION_BATCH is None:
        reason = "as the run was started"
        return dataclasses.replace(plan, generation_batch=recorded, generation_batch_reason=reason)
    return plan


def place_problem() -> str | None:
    """Why nothing can be done in the current folder, or None."""
    try:
        here = os.getcwd()
    except OSError as error:
        return f"current folder: it cannot be found ({error.strerror}). Change into one that is there"
    return None if is_text(here) else f"current folder: {here!r} is no name in UTF-8. Rename it, or change into another"


def preflight(environ: Mapping[str, str], machine: Machine | None = None, ranks: Ranks | None = None) -> Preflight:
    """Every check that needs no training; all problems are collected, and nothing is written. OUTPUT_DIR is rank 0's."""
    settings, sources, problems = load_settings(environ)
    ranks = ranks or Ranks()
    machine = dataclasses.replace(machine or read_machine(), ranks=ranks.size, here=ranks.local_size)
    versions = installed_versions([*TESTED, *TESTED_VLLM])
    rollouts = choices.choose_rollouts(settings.USE_VLLM, machine.gpus, settings.MODEL_ID == "tiny", versions["vllm"])
    check_packages(settings, versions, problems, rollouts[0])
    files = hub.find_model(settings.MODEL_ID, problems)
    config = files.config if files else None
    settings, init_adapter = start_adapter(settings, sources, config, problems)
    sync = choices.choose_sync(settings.ROLLOUT_SYNC, bool(expert_words(settings.LORA_TARGETS)))
    if settings.ROLLOUT_SYNC is None:
        settings, sources["ROLLOUT_SYNC"] = dataclasses.replace(settings, ROLLOUT_SYNC=sync[0]), "chosen"
    check_shared(settings, config, machine, rollouts[0], sync[0], problems)
    check_trackers(settings, environ, problems)
    settings, sources = choices.choose_demo(settings, sources)
    split = read_split(settings, problems)
    rows, eval_rows, longest = split.train, split.heldout, 0
    settings = resolve_steps(settings, sources, len(rows), problems)
    check_settings(settings, config, machine, problems)
    ready = all(versions[name] for name in TESTED)  # tokenizers and numpy come with these packages
    if ready and files and files.tokenizer:
        both, longest = render_rows(settings, [*rows, *eval_rows], files.template, files.tokenizer, problems)
        rows, eval_rows = both[: len(rows)], both[len(rows) :]
    rewards, tokenizer = choices.choose_rewards(settings.REWARDS, rows), files.tokenizer if longest else None
    specs, garbage = check_rewards(settings, rewards[0], rows, problems, tokenizer)
    check_heldout(specs, settings, eval_rows, problems, tokenizer)
    scale = choices.choose_scale_rewards(settings.SCALE_REWARDS, [name for name, _ in specs])
    run = RunState(run_folder(settings)) if ranks.rank else inspect_run(settings, rows, problems)
    check_start(settings, run, init_adapter, problems)
    flash = installed_versions(package for package, _ in FLASH_PACKAGES.values())
    installed = [name for name, version in flash.items() if version]
    attention = choices.choose_attention(settings.ATTN_IMPL, machine.gpus, machine.capability, installed)
    packing = choices.choose_packing(settings.PACKING, attention[0], machine.gpus)
    plan, experts = None, (settings.EXPERTS or "bf16", "there is no model")
    if files:
        checkpoint = hub.checkpoint_gib(settings.MODEL_ID, files) if rollouts[0] and machine.gpus else None
        prompt_len = longest or settings.MAX_PROMPT_LEN
        shapes = Shapes(files.config, machine, prompt_len, attention[0], packing[0], checkpoint)
        experts = experts_of(settings, shapes)
        if settings.EXPERTS is None:
            settings, sources["EXPERTS"] = dataclasses.replace(settings, EXPERTS=experts[0]), "chosen"
        elif sources["EXPERTS"] == "default":
            experts = experts[0], "the default"
        plan = shapes.plan(settings)
        if run.checkpoint:
            plan = keep_choices(settings, rollouts, plan, run, problems)
            # Runs that do not say began before data/tiny was there, with a tiny model of their own.
            began = run.choices.get("model", "made on the spot" if settings.MODEL_ID == "tiny" else None)
            if began not in (None, hub.config_digest(files.config)):
                what = f"the run in {run.folder} began with another model of that name (its config.json differs)"
                problems.add(f"MODEL_ID={settings.MODEL_ID}", what, "Choose another OUTPUT_DIR, or set OVERWRITE=1")
        check_memory(settings, shapes, problems, run.checkpoint is not None)
        check_disk(settings, files, plan.adapter, problems)
    closed_loop = ClosedLoop("", "packages are missing")
    if ready:
        own_profile = sources["EVAL_PROFILE"] == "environment"
        closed_loop = choices.plan_closed_loop(settings, eval_rows, rollouts[0], own_profile, problems)
    parameters = hub.count_parameters(files.config)["total"] if files else 0
    opened = any(not row.prompt.endswith("<|start|>assistant") for row in eval_rows if row.prompt)
    evaluation = choices.choose_evaluation(
        settings, rollouts[0], parameters, closed_loop.kind, opened, all(row.rewards for row in eval_rows)
    )
    best = choices.choose_best(settings, len(eval_rows), bool(closed_loop.prompt))
    if best[0] == "plant" and not closed_loop.prompt:
        problems.add("BEST_BY", f"the closed loop does not run ({closed_loop.reason})", "Set BEST_BY=auto or reward")
    problems[:] = dict.fromkeys(problems)
    chosen = (
        split.reason, garbage, rewards, scale, attention, packing, rollouts, sync, experts, plan, run, closed_loop,
        evaluation, best, init_adapter, ranks, unknown_variables(environ)[1],
    )  # fmt: skip
    return Preflight(settings, sources, problems, machine, files, rows, eval_rows, specs, *chosen)


def run_records(preflight_result: Preflight) -> dict[str, dict[str, Any]]:
    """What OUTPUT_DIR keeps of a run, by file: every setting, every choice and its reason, and the packages' versions."""
    p, settings = preflight_result, preflight_result.settings
    parameters = hub.count_parameters(p.files.config)["total"] if p.files else 0
    names = ("rewards", "scale_rewards", "attention", "packing", "rollouts", "sync", "experts", "evaluation", "best")
    chosen = {name: getattr(p, name) for name in names}
    chosen |= {
        "lora_targets": dict(hits(settings.LORA_TARGETS, p.files.config, settings.LORA_R)) if p.files else None,
        "epsilon_high": choices.choose_epsilon_high(settings),
        "threads": choices.choose_threads(parameters, p.machine.gpus, os.environ),
        "model": hub.config_digest(p.files.config) if p.files else None,
        "init_adapter": p.init_adapter,
        "heldout": [len(p.eval_rows), p.heldout_reason],
        "reward_interface": REWARD_INTERFACE,
    }
    settings_json = {
        "settings": dataclasses.asdict(settings),
        "sources": p.sources,
        "choices": chosen | {"plan": dataclasses.asdict(p.plan) if p.plan else None},
        "machine": dataclasses.asdict(p.machine),
        "data_sha256": data_fingerprint(p.rows),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "resumed_from_step": p.run.step,
    }
    versions = {"python": platform.python_version()} | installed_versions([*TESTED, "vllm", "triton", "pandas"])
    return {"settings.json": settings_json, "versions.json": versions}
