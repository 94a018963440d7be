# SPDX-License-Identifier: Apache-2.0
"""What to change in a run whose memory plan does not fit."""

import dataclasses
from collections.abc import Iterator

from grpo.plan.hub import ORIGINALS, has_mxfp4
from grpo.plan.memory import Changes, PlanInputs
from grpo.settings.parsing import show
from grpo.settings.table import Settings

BESIDE_VLLM = ("shared", "paged")  # Values of EXPERTS that make room for vLLM.


def without_vllm(settings: Settings, inputs: PlanInputs) -> Changes:
    """The changes that turn vLLM off; EXPERTS changes too if its value makes sense only beside vLLM."""
    kind = "mxfp4" if has_mxfp4(inputs.config) else "bf16"
    return {"EXPERTS": kind, "USE_VLLM": False} if settings.EXPERTS in BESIDE_VLLM else {"USE_VLLM": False}


def format_changes(changes: Changes) -> str:
    """The changes as a user would set them: `NAME=VALUE and NAME=VALUE`."""
    return " and ".join(f"{name}={show(value)}" for name, value in changes.items())


def fitting_original(settings: Settings, inputs: PlanInputs) -> Changes | None:
    """The changes to the model with MXFP4 experts, if this one has its shape and no packed experts and that one fits;
    None otherwise. A value of EXPERTS that was set for this one may not do for that one."""
    config = inputs.config
    if has_mxfp4(config):
        return None
    packed = dataclasses.replace(inputs, config={**config, "quantization_config": {"quant_method": "mxfp4"}})
    kinds = packed.expert_kinds(settings)
    fits = any(packed.fits(settings, {"EXPERTS": kind}) for kind in kinds)
    original = ORIGINALS.get((config["num_hidden_layers"], config["num_local_experts"]))
    return {"MODEL_ID": original, "EXPERTS": None} if fits and original else None


def lowered(settings: Settings, inputs: PlanInputs) -> Iterator[str]:
    """`lower NAME to VALUE` for each setting that makes the run fit if it is halved so often. An adapter that the run
    starts from keeps its rank."""
    for name in ("MAX_COMPLETION_LEN", *(() if settings.INIT_ADAPTER else ("LORA_R",))):
        value = getattr(settings, name) // 2
        while value and not inputs.fits(settings, {name: value}):
            value //= 2
        if value:
            yield f"lower {name} to {value}"


def memory_advice(settings: Settings, inputs: PlanInputs) -> str:
    """Advice for a run that does not fit the GPU: the model that a BF16 checkpoint may be a copy of if that fits, and
    every single change of the settings that makes it fit, or else all of them."""
    original, machine, advice = fitting_original(settings, inputs), inputs.machine, ""
    if machine.gpu_limit is not None:
        advice = "Raise GPU_MEM_LIMIT if the GPU has room. "
    if original:
        advice += f"If this is a BF16 copy of it, set {format_changes(original)}: its MXFP4 experts fit. "
    trials: list[Changes] = [{"VLLM_GPU_MEM": None}, {"GRADIENT_CHECKPOINTING": True}]
    trials += [{"GENERATION_BATCH": None}, {"MICRO_BATCH": None}]
    if packed := [kind for kind in inputs.expert_kinds(settings) if kind != "bf16"]:
        fitting = [kind for kind in packed if inputs.fits(settings, {"EXPERTS": kind})]
        trials.append({"EXPERTS": fitting[0] if fitting else "mxfp4"})
    trials.append(without_vllm(settings, inputs))
    trials = [trial for trial in trials if any(value != getattr(settings, name) for name, value in trial.items())]
    together = {name: value for trial in trials for name, value in trial.items()}
    beside_vllm = {name: value for trial in trials[:-1] for name, value in trial.items()}
    for candidates in (trials, [beside_vllm], [together]):
        if remedies := [format_changes(trial) for trial in candidates if inputs.fits(settings, trial)]:
            return f"{advice}With all else as set, {' or '.join(remedies)} fits"
    ways = [*lowered(settings, inputs), "rent a larger GPU"]
    if machine.gpu_limit is None and not machine.is_planned:
        ways.insert(0, "free some memory (nvidia-smi names its users)")
    text = " or ".join(ways)
    return f"{advice}{text[0].upper()}{text[1:]}"
