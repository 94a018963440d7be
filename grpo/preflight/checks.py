# SPDX-License-Identifier: Apache-2.0
"""Every check before a run: settings, model, data, rewards, OUTPUT_DIR, memory and disk."""

import dataclasses
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.common import Problems, nearest_hint
from grpo.data.files import Row, column_names, data_fingerprint
from grpo.data.heldout import read_split
from grpo.data.prepare import RESET_TOO_LONG, episode_prompt
from grpo.data.prompts import count_tokens
from grpo.environment.calls import without_tokens
from grpo.output.folder import recorded_commit
from grpo.output.layout import existing_parent
from grpo.plan import hub, memory
from grpo.plan.advice import BESIDE_VLLM, fitting_original, format_changes, memory_advice, without_vllm
from grpo.plan.engine_memory import LORA_RANKS
from grpo.plan.hub import TINY_ACTIONS, ModelConfig, ModelFiles
from grpo.plan.machine import GIB, TESTED, Machine, check_compiler, check_packages, check_trackers, installed_versions
from grpo.plan.memory import Plan, PlanInputs, host_shortfall, memory_shortfall
from grpo.plan.targets import check_targets, expert_words, target_lines
from grpo.plan.vllm_model import fixed_faults, vllm_faults
from grpo.preflight import choices
from grpo.preflight.adapter import check_start_adapter
from grpo.preflight.choices import ATTENTION, VLLM_COLDEST, expected_reward_obstacles
from grpo.preflight.episodes import Trial, check_environment
from grpo.preflight.resolve import ResolvedRun, read_facts, resolve
from grpo.process.ranks import Ranks
from grpo.reward.loading import is_by_action
from grpo.reward.reward_checks import check_heldout, check_reward_names, check_rewards, longest_answer_warning
from grpo.settings.environment import load_settings, unknown_variables
from grpo.settings.parsing import show
from grpo.settings.table import TASK_FILES, Settings

WHOLE_UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
BLACKWELL = 10  # The compute capability of the first cards of this generation; those of the last are 12.x.


def check_attention(settings: Settings, machine: Machine, problems: Problems) -> None:
    """Checks that ATTN_IMPL is known, that the GPU can run it, and that it supports PACKING."""
    name, known = settings.ATTN_IMPL, ("auto", *ATTENTION)
    capability = machine.capability if machine.gpus else 0  # 0 also if nvidia-smi did not tell it.
    if name not in known and "/" not in name:
        fix = f"Use one of {', '.join(known)}, or a Hub kernel"
        problems.add("ATTN_IMPL", f"{name!r} is unknown{nearest_hint(name, known)}", fix)
    elif name not in ("auto", "eager") and not machine.gpus:
        problems.add("ATTN_IMPL", f"{name} needs a GPU, and {machine.no_gpu}", "Set ATTN_IMPL=eager (or auto)")
    if 0 < capability < 8:
        fault = f"{machine.gpu} has compute capability {capability:g}, BF16 and FlashAttention need 8.0"
        problems.add("GPU", fault, "Take an A100, L40S, H100, GH200 or a newer card")
    if settings.PACKING == "prefix" and name not in known:
        fix = f"Set PACKING=auto, or ATTN_IMPL to one of {', '.join(ATTENTION)}"
        problems.add("PACKING", f"{name} takes padded rows only", fix)


def check_lora(settings: Settings, config: ModelConfig | None, use_vllm: bool, problems: Problems) -> None:
    """Checks that LORA_TARGETS matches something, and that ROLLOUT_SYNC can bring all of it to vLLM."""
    check_targets(settings.LORA_TARGETS, config, problems)
    experts = expert_words(settings.LORA_TARGETS)
    if experts and settings.ROLLOUT_SYNC == "merge" and use_vllm:
        fault = f"merge brings vLLM the attention's weights alone, and LORA_TARGETS has {experts[0]}"
        problems.add("ROLLOUT_SYNC", fault, "Set ROLLOUT_SYNC=auto (which takes lora), or USE_VLLM=0")


def check_batches(settings: Settings, ranks: int, problems: Problems) -> None:
    """Checks that a rollout can be cut into batches, and a step's prompts shared out among the `ranks` processes."""
    prompts, total, batch = settings.PROMPTS_PER_STEP, settings.completions_per_rollout, settings.GENERATION_BATCH
    if batch and total % batch and not settings.DIRECT_ANSWERS:
        near = min(memory.divisors(total), key=lambda n: abs(n - batch))
        names = ["PROMPTS_PER_STEP", "NUM_GENERATIONS"]
        if settings.STEPS_PER_GENERATION > 1:
            names.insert(0, "STEPS_PER_GENERATION")
        factors = " x ".join(str(getattr(settings, name)) for name in names)
        fault = f"{batch} does not divide {' x '.join(names)} = {factors} = {total}"
        problems.add("GENERATION_BATCH", fault, f"The nearest that does is {near}")
    if ranks > prompts:
        fault = f"{prompts} cannot be shared out among {ranks} processes, each needs one"
        problems.add("PROMPTS_PER_STEP", fault, f"Set it to {ranks} or higher, or start fewer processes")


def check_settings(
    settings: Settings, config: ModelConfig | None, machine: Machine, use_vllm: bool, problems: Problems
) -> None:
    """Checks that the settings contradict neither each other nor the model's config.json nor the machine."""
    check_batches(settings, machine.ranks, problems)
    check_attention(settings, machine, problems)
    check_lora(settings, config, use_vllm, problems)
    if settings.EXPERTS not in ("bf16", None) and config and not hub.has_mxfp4(config):
        problems.add("EXPERTS", f"{settings.MODEL_ID} has no MXFP4 experts", "Set EXPERTS=bf16")
    if settings.USE_VLLM and not machine.gpus:
        problems.add("USE_VLLM", f"vLLM beside the trainer needs a GPU, and {machine.no_gpu}", "Set USE_VLLM=0")
    if use_vllm and settings.ROLLOUT_SYNC == "lora" and LORA_RANKS[-1] < settings.LORA_R:
        fault = f"vLLM loads adapters of a rank of at most {LORA_RANKS[-1]}, this is {settings.LORA_R}"
        problems.add("LORA_R", fault, "Lower it, or leave out experts and ROLLOUT_SYNC, or set USE_VLLM=0")
    for name in ("TEMPERATURE", "EVAL_TEMPERATURE") if use_vllm else ():
        if not VLLM_COLDEST <= getattr(settings, name) <= 2:
            fault = f"vLLM samples at temperatures from {VLLM_COLDEST} to 2"
            problems.add(name, fault, "Set it between the two, or USE_VLLM=0")
    if settings.WARMUP_STEPS >= settings.TOTAL_STEPS:
        fault = f"the learning rate would rise over {settings.WARMUP_STEPS} steps, the run has {settings.TOTAL_STEPS}"
        problems.add("WARMUP_STEPS", fault, "Lower it, or raise TOTAL_STEPS")
    if settings.LOSS_TYPE == "vespo" and settings.IS_CORRECTION.startswith("sequence"):
        problems.add("IS_CORRECTION", "vespo corrects sequences itself", "Set token_truncate or token_mask")
    if settings.LOSS_TYPE == "vespo" and settings.IMPORTANCE_SAMPLING_LEVEL == "sequence":
        problems.add("IMPORTANCE_SAMPLING_LEVEL", "vespo weights completions itself", "Set token")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if use_vllm and not machine.is_planned and visible.startswith("GPU-") and len(visible) < len(WHOLE_UUID):
        fault = f"vLLM finds no GPU by a part of its UUID, {visible}"
        problems.add("CUDA_VISIBLE_DEVICES", fault, "Write all of it (nvidia-smi -L), or the GPU's number")
    if machine.gpus > 1:
        start = f"Start one for each (torchrun --nproc-per-node {machine.gpus} train_grpo.py, see docs/clusters.md)"
        fault = f"{machine.gpus} GPUs are visible, a process of this program uses one"
        fix = f"{start}, or make one visible, e.g. CUDA_VISIBLE_DEVICES={machine.freest}"
        problems.add("CUDA_VISIBLE_DEVICES", fault, fix)


def check_experts(
    settings: Settings, config: ModelConfig | None, machine: Machine, use_vllm: bool, problems: Problems
) -> None:
    """Checks that vLLM generates if EXPERTS makes room for it, and with EXPERTS=shared also that it runs the kernels
    whose weight layout the learner can read."""
    fault = ""
    if settings.EXPERTS in BESIDE_VLLM and not use_vllm:
        fault = f"{settings.EXPERTS} is for a run beside vLLM, which does not generate here"
    elif settings.EXPERTS == "shared":
        fault = memory.unshared_reason(settings.ROLLOUT_SYNC, config, machine)
    if fault:
        problems.add("EXPERTS", fault, "Set EXPERTS=auto")


def check_direct(
    settings: Settings, names: Sequence[str], rows: Sequence[Row], tokenizer: Path | None, problems: Problems
) -> None:
    """Checks for DIRECT_ANSWERS that a step has several prompts and a rollout of its own, that every row has the reward
    of each action, that the reward functions `names` depend on nothing else, and that each action is one token of
    `tokenizer`, if any."""
    if not settings.DIRECT_ANSWERS:
        return
    otherwise = "or set DIRECT_ANSWERS=0"
    if settings.EXPECTED_REWARD is False:
        fault = "DIRECT_ANSWERS samples nothing: it learns from the rewards of all actions alone"
        problems.add("EXPECTED_REWARD", fault, f"Unset it, {otherwise}")
    for name in ("STEPS_PER_GENERATION", "NUM_ITERATIONS"):
        if getattr(settings, name) > 1:
            fault = "DIRECT_ANSWERS samples nothing that several steps could share"
            problems.add(name, fault, f"Leave it at 1, {otherwise}")
    if settings.PROMPTS_PER_STEP == 1:
        fault = "DIRECT_ANSWERS takes each prompt once, and TRL's trainer refuses a step of one completion"
        problems.add("PROMPTS_PER_STEP", fault, f"Set it to 2 or higher, {otherwise}")
    if sampled := [name for name in names if not is_by_action(name)]:
        fault = f"{', '.join(sampled)} may depend on more than row and action, and DIRECT_ANSWERS samples nothing else"
        problems.add("REWARDS", fault, f"Leave it out, give a function of your own `by_action = True`, {otherwise}")
    for obstacle in expected_reward_obstacles(settings, rows, names):
        fault = f"it learns from the rewards of all actions, and {obstacle}"
        problems.add("DIRECT_ANSWERS", fault, f"Change that, {otherwise}")
    last = max((len(row.rewards) for row in rows), default=0) - 1
    if tokenizer and last >= 0 and count_tokens(tokenizer, [str(last)])[str(last)] > 1:
        fault = f"DIRECT_ANSWERS chooses one token, and its tokenizer writes `{last}` in several"
        problems.add(f"MODEL_ID={settings.MODEL_ID}", fault, f"Number fewer actions, {otherwise}")


def check_top_p(settings: Settings, use_vllm: bool, problems: Problems) -> None:
    """Checks that vLLM's log-probs are comparable with the learner's. With TOP_P below 1 vLLM renormalizes its own over
    the nucleus, whose probability is then missing in each ratio (https://github.com/huggingface/trl/issues/6789)."""
    shares = settings.steps_per_rollout > 1
    if settings.TOP_P < 1 and use_vllm and (shares or settings.IS_CORRECTION != "none"):
        fault = "vLLM renormalizes log-probs over the nucleus, the learner does not: all importance ratios are wrong"
        problems.add("TOP_P", fault, "Set TOP_P=1" if shares else "Set TOP_P=1, or IS_CORRECTION=none")


def check_memory(settings: Settings, inputs: PlanInputs, plan: Plan, problems: Problems) -> None:
    """Checks that the model has enough positions, and the machine enough memory, for the run as it is planned."""
    machine = inputs.machine
    engine, positions = plan.engine, inputs.config["max_position_embeddings"]
    room = positions - plan.prompt_len
    if room < settings.MAX_COMPLETION_LEN:
        fault = f"{settings.MAX_COMPLETION_LEN} are more than the model's {positions} positions"
        fix = f"Set it to {room} or lower" if room > 0 else "Shorten the prompts"
        problems.add("MAX_COMPLETION_LEN", f"after a prompt of {plan.prompt_len} tokens, {fault}", fix)
    fewer = ", or start fewer processes" if machine.here > 1 else ""
    if machine.gpus:
        if not machine.gpu_total:
            fix = "Set GPU_MEM_LIMIT to the GiB that the run may take"
            problems.add(f"GPU {machine.gpu}", machine.gpu_memory_text, fix)
        elif shortfall := memory_shortfall(plan, machine):
            limited = settings.VLLM_GPU_MEM is not None and engine and engine.cache < engine.cache_least
            name = "VLLM_GPU_MEM" if limited else f"GPU {machine.gpu}"
            fault = f"{machine.gpu_memory_text}, and {shortfall} ({plan.parts})"
            problems.add(name, fault, memory_advice(settings, inputs))
    elif plan.weights > 4:
        fault = f"{machine.no_gpu}, and {settings.MODEL_ID} needs one ({plan.weights:.0f} GiB of BF16 weights)"
        problems.add("MODEL_ID", fault, "Run it where there is an NVIDIA GPU (docs/memory.md), or try MODEL_ID=tiny")
    elif plan.peak > machine.ram_share > 0:
        each = f" in each of {machine.here} processes" if fewer else ""
        fault = f"the run needs about {plan.peak:.1f} GiB of memory{each} and {machine.ram_free:.1f} GiB are free"
        sizes = "MICRO_BATCH or MAX_COMPLETION_LEN" if plan.micro_batch > 1 else "MAX_COMPLETION_LEN"
        problems.add("memory", fault, f"Free some memory, or lower {sizes}{fewer}")
    if shortfall := host_shortfall(plan, machine):
        trials: list[memory.Changes] = [{"EXPERTS": kind} for kind in inputs.expert_kinds(settings)]
        fitting = (trial for trial in [*trials, without_vllm(settings, inputs)] if inputs.fits(settings, trial))
        other = next((f", or set {format_changes(trial)}" for trial in fitting), "")
        if original := fitting_original(settings, inputs):
            other += f", or set {format_changes(original)} if this is a BF16 copy of it"
        problems.add("memory", shortfall, f"Free some, or take a machine with more{fewer}{other}")


def check_disk(settings: Settings, files: ModelFiles, adapter: float, problems: Problems) -> None:
    """Checks that the disks have room for what the run writes and downloads. `adapter`: GiB, as in `Plan`."""
    # Adapter and its two AdamW moments in float32, per kept checkpoint, plus the final adapter, the logs and the zip.
    output = adapter * (settings.SAVE_TOTAL_LIMIT + 2) + 0.2
    cache = "HF_HUB_CACHE" if os.environ.get("HF_HUB_CACHE") else "HF_HOME"
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    home = Path(os.path.expanduser(os.environ.get(cache) or default))
    is_local = settings.MODEL_ID == "tiny" or os.path.isdir(settings.MODEL_ID)
    cached = files.folder.glob("*.safetensors") if files.folder else ()
    download = 0.0 if is_local else hub.checkpoint_gib(files.config) - sum(path.stat().st_size for path in cached) / GIB
    for name, path, need, purpose in (
        ("OUTPUT_DIR", Path(settings.OUTPUT_DIR), output, "checkpoints, logs and the zip"),
        (cache, home, download if download > 0.2 else 0.0, "the files of the checkpoint"),
        ("HOME", Path.home(), 0.05, "the caches of PyTorch, Triton and the Hub's library"),
    ):
        if need and not os.access(existing_parent(path), os.W_OK):
            problems.add(f"{name}={path}", f"{purpose} cannot be written there", f"Point {name} to a folder of yours")
        elif need and (free := shutil.disk_usage(existing_parent(path)).free / GIB) < need:
            fault = f"{purpose} need {need:.1f} GiB and {free:.1f} GiB are free"
            problems.add(f"{name}={path}", fault, f"Free space, or point {name} to a larger disk")


def check_engine_kept(resolved: ResolvedRun, problems: Problems) -> None:
    """Checks that a run that began with vLLM does not go on without it by itself, nor the other way round."""
    state, now = resolved.state, resolved.choices["USE_VLLM"]
    begun = state.began_with_vllm
    if not state.step or begun is None or resolved.asked.USE_VLLM is not None:
        return
    if begun != now.value:
        fault = f"the run in {state.folder} was started with USE_VLLM={begun:d}, now it is {now.value:d} ({now.reason})"
        fix = f"Set USE_VLLM={begun:d} to continue as before, or USE_VLLM={now.value:d} to change it"
        problems.add("USE_VLLM", fault, fix)


def blackwell_warning(machine: Machine, use_vllm: bool) -> str:
    """The warning for a run on a card that is newer than all on which this program was tried."""
    text = f"{machine.gpu} has compute capability {machine.capability:g} (Blackwell): nothing was tried on such a card"
    if use_vllm:
        text += ", and others saw larger differences between vLLM and trainer there than on an H100"
        text += " (https://github.com/NVIDIA-NeMo/RL/issues/1774). Watch logp_diff_mean"
    return text


def load_run_settings(environ: Mapping[str, str]) -> tuple[Settings, dict[str, str], Problems]:
    """The settings in `environ`, the source of each, and their problems; the demo's rows are filled in."""
    settings, sources, problems = load_settings(environ)
    return *choices.choose_demo(settings, sources), problems


def preflight(environ: Mapping[str, str], machine: Machine | None = None, ranks: Ranks | None = None) -> ResolvedRun:
    """The resolved run, with all problems of all ranks that can be found without training. Writes nothing."""
    settings, sources, problems = load_run_settings(environ)
    ranks = ranks or Ranks()
    commit, split = ranks.broadcast(recorded_commit(settings)), read_split(settings, problems)
    resolved = resolve(read_facts(settings, sources, split, machine, ranks, problems, commit), problems)
    check_learning(resolved, resolved.recorded, problems)
    garbage_warning, trial = check_rollouts(resolved, problems), check_episodes(resolved, problems)
    _, warnings = unknown_variables(environ)
    warnings += filter(None, [garbage_warning, *answer_warnings(resolved), trial.warning if trial else None])
    if resolved.machine.capability >= BLACKWELL:
        warnings.append(blackwell_warning(resolved.machine, resolved.use_vllm))
    # No Hub kernel is known to handle attention sinks in its backward pass
    # (https://huggingface.co/kernels-community/vllm-flash-attn3/discussions/3). For a gpt-oss, transformers loads
    # vllm-flash-attn3 in place of any other kernel with `flash` in its name.
    if "/" in (name := resolved.settings.ATTN_IMPL):
        warnings.append(f"ATTN_IMPL={name}: its gradients may be wrong (attention sinks). Use ATTN_IMPL=torch_flash")
    merged = merge_rank_problems(resolved, problems)
    return dataclasses.replace(resolved, problems=merged, warnings=tuple(warnings), trial=trial)


def merge_rank_problems(resolved: ResolvedRun, problems: Problems) -> Problems:
    """The problems of all ranks, the same list on every rank: each problem once, with the ranks that have it unless all
    do. If there is none, the list holds the first setting or other input that differs between ranks."""
    ranks, rank_input = resolved.ranks, {name: show(value) for name, value in vars(resolved.recorded).items()}
    if resolved.sources["GRADIENT_CHECKPOINTING"] == "chosen":  # By each rank's memory, as its micro-batches are.
        rank_input["GRADIENT_CHECKPOINTING"] = "auto"
    rank_input |= {"GPUs": str(resolved.machine.gpus), "vLLM": "used" if resolved.use_vllm else "not used"}
    rank_input |= {"commit of MODEL_ID": (resolved.files and resolved.files.commit) or "none"}
    rank_input |= {"rows of DATA and EVAL_DATA": data_fingerprint([*resolved.rows, *resolved.eval_rows])[:8]}
    texts, rank_inputs = zip(*ranks.share((problems, rank_input)), strict=True)
    merged = Problems()
    for text in dict.fromkeys(text for rank_texts in texts for text in rank_texts):
        affected = [str(rank) for rank, rank_texts in enumerate(texts) if text in rank_texts]
        merged.append(text if len(affected) == ranks.size else f"{text} (rank {', '.join(affected)})")
    for name, value in rank_inputs[0].items() if not merged else ():
        if rank := next((rank for rank in range(ranks.size) if rank_inputs[rank][name] != value), 0):
            fix = "Every process needs one GPU, and every machine the same settings, files and packages"
            merged.add(name, f"{value} on rank 0 and {rank_inputs[rank][name]} on rank {rank}", fix)
            break  # The other differences may follow from this one.
    return merged


def check_learning(resolved: ResolvedRun, settings: Settings, problems: Problems) -> None:
    """Checks what every training needs, that of scripts/sft.py too: packages, a model that this machine can train, and
    room in memory and on disk. `settings` may have `auto` where advice may say so, as for batch sizes."""
    machine, use_vllm = resolved.machine, resolved.use_vllm
    check_packages(settings, resolved.versions, problems, use_vllm)
    check_compiler(settings, machine, problems)
    check_settings(settings, resolved.config, machine, use_vllm, problems)
    check_experts(settings, resolved.config, machine, use_vllm, problems)
    check_computed_model(resolved, problems)
    check_start_adapter(settings, resolved.state, resolved.adapter.digest, problems)
    if resolved.files and resolved.inputs and resolved.plan:
        check_memory(settings, resolved.inputs, resolved.plan, problems)
        if not machine.is_planned:
            check_disk(settings, resolved.files, resolved.plan.adapter, problems)


def check_rollouts(resolved: ResolvedRun, problems: Problems) -> str | None:
    """Checks rollouts of a run of train_grpo.py, and unless it has an ENVIRONMENT its rewards and evaluations. Returns
    a warning or None."""
    asked, use_vllm = resolved.asked, resolved.use_vllm
    check_engine_kept(resolved, problems)
    check_trackers(asked, problems)
    check_top_p(asked, use_vllm, problems)
    tokenizer = resolved.files.tokenizer if resolved.files and resolved.longest_prompt else None
    if asked.ENVIRONMENT:
        return None
    specs, garbage_warning = check_rewards(asked, resolved.choices["REWARDS"].value, resolved.rows, problems, tokenizer)
    if asked.EVAL_DATA is not None:  # Rows held out of DATA have its columns.
        columns = column_names(resolved.rows)
        check_heldout(specs, asked, resolved.eval_rows, problems, tokenizer, columns=columns)
    names, every_row = [name for name, _ in resolved.reward_specs], [*resolved.rows, *resolved.eval_rows]
    check_direct(asked, names, every_row, tokenizer, problems)
    expected = resolved.choices["EXPECTED_REWARD"]
    if asked.EXPECTED_REWARD and not expected.value:
        fix = "Set EXPECTED_REWARD=auto, or change that"
        problems.add("EXPECTED_REWARD", f"it cannot be used: {expected.reason}", fix)
    check_simulation(resolved, problems)
    return garbage_warning


def check_episodes(resolved: ResolvedRun, problems: Problems) -> Trial | None:
    """Checks the rewards of a run with an ENVIRONMENT, and plays a trial episode there, which it returns."""
    if not resolved.asked.ENVIRONMENT:
        return None
    specs = check_reward_names(resolved.choices["REWARDS"].value, problems)
    trial = check_environment(resolved.asked, resolved.environment, specs, resolved.rows, problems)
    if trial:
        check_reset(resolved, trial, problems)
    return trial


def check_reset(resolved: ResolvedRun, trial: Trial, problems: Problems) -> None:
    """Checks that the trial's prompt has room for the text of its reset: a run would end at such a row."""
    settings, files, row = resolved.asked, resolved.files, trial.row
    if not (files and files.tokenizer and resolved.environment and resolved.longest_prompt):
        return  # Faults of these have messages of their own.
    observation = without_tokens(trial.transcript[0][1])
    prompt = episode_prompt(settings, row, files.template, resolved.environment.tools, observation)
    length = count_tokens(files.tokenizer, [prompt])[prompt]
    if length > (most := settings.MAX_PROMPT_LEN):
        fault = RESET_TOO_LONG.format(length, most)
        fix = f"Let `reset` return less, or set MAX_PROMPT_LEN={length}, more where other resets add more"
        problems.add(f"{row.file}, row {row.number}", fault, fix)


def check_computed_model(resolved: ResolvedRun, problems: Problems) -> None:
    """Checks that trainer and vLLM compute the model that config.json describes."""
    config, plan, where = resolved.config, resolved.plan, f"MODEL_ID={resolved.settings.MODEL_ID}"
    if config is None or plan is None:
        return
    for fault in fixed_faults(config):
        problems.add(where, fault, "Name another model, or correct config.json where it is wrong")
    if not config["sliding_window"] and not resolved.use_vllm:
        fault = f"config.json: sliding_window is {config['sliding_window']}, and transformers generates with none"
        problems.add(where, fault, "Write the model's max_position_embeddings there, which means the same")
    longest = plan.prompt_len + resolved.settings.MAX_COMPLETION_LEN
    for fault in vllm_faults(config, longest) if resolved.use_vllm else ():
        problems.add(where, fault, "Set USE_VLLM=0 (transformers generates, which takes longer)")


def answer_warnings(resolved: ResolvedRun) -> Iterator[str | None]:
    """Warnings about answers that no completion can hold: the tiny model's fifth action, and answers that are cut."""
    most = max((len(row.rewards) for row in (*resolved.rows, *resolved.eval_rows)), default=0)
    if resolved.settings.MODEL_ID == "tiny" and most > TINY_ACTIONS:
        yield (
            f"MODEL_ID=tiny: it answers [0] to [{TINY_ACTIONS - 1}] alone, and rows have up to {most} actions: "
            f"[{TINY_ACTIONS}] and above are never answered. Name another model for results"
        )
    if resolved.files and resolved.longest_prompt:  # The tokenizer works.
        names = [name for name, _ in resolved.reward_specs]
        yield longest_answer_warning(resolved.settings, names, resolved.rows, resolved.files.tokenizer)


def check_simulation(resolved: ResolvedRun, problems: Problems) -> None:
    """Checks that the task's simulator runs if BEST_BY or EVAL_PROFILE asks for it."""
    best_by, runs = resolved.best_by, resolved.closed_loop.runs
    fault = f"the closed loop does not run ({resolved.closed_loop.reason})"
    if best_by not in ("", "reward") and not (runs and best_by == TASK_FILES[resolved.settings.TASK].get("best_by")):
        problems.add("BEST_BY", fault, "Set BEST_BY=auto or reward")
    is_set = resolved.sources["EVAL_PROFILE"] == "environment" and (resolved.settings.EVAL_PROFILE or "").strip()
    # Faults of its files, missing packages and missing held-out rows (an empty BEST_BY) have messages of their own.
    has_message = any(problem.startswith("EVAL_PROFILE: ") for problem in problems) or not resolved.has_packages
    if is_set and best_by and not runs and not has_message:
        problems.add("EVAL_PROFILE", f"it has no effect: {fault}", "Unset it")


# The names of choices in settings.json that are not the choice's own in lower case.
RECORD_NAMES = {
    "ATTN_IMPL": "attention",
    "USE_VLLM": "rollouts",
    "ROLLOUT_SYNC": "sync",
    "BEST_BY": "best",
    "exact": "evaluation",
    "exact_loop": "simulation",
}


def run_records(resolved: ResolvedRun) -> dict[str, dict[str, Any]]:
    """The contents of settings.json (every setting, every choice and its reason) and versions.json, by file name."""
    settings, config = resolved.recorded, resolved.config
    chosen: dict[str, Any] = {
        RECORD_NAMES.get(name, name.lower()): [choice.value, choice.reason] for name, choice in resolved.choices.items()
    }
    chosen |= {
        "lora_targets": list(target_lines(settings.LORA_TARGETS, config, settings.LORA_R)) if config else None,
        "init_adapter": resolved.adapter.digest,
        "model_commit": resolved.files.commit if resolved.files else None,
        "plan": dataclasses.asdict(resolved.plan) if resolved.plan else None,
    }
    settings_json = {
        "settings": dataclasses.asdict(settings),
        "sources": dict(resolved.sources),
        "choices": chosen,
        "machine": dataclasses.asdict(resolved.machine),
        "data_sha256": data_fingerprint(resolved.rows),
        "command": " ".join([Path(sys.executable).name, Path(sys.argv[0]).name, *sys.argv[1:]]),
        "resumed_from_step": resolved.state.step,
    }
    versions = {"python": platform.python_version()} | installed_versions([*TESTED, "vllm", "triton", "pandas"])
    return {"settings.json": settings_json, "versions.json": versions}
