# SPDX-License-Identifier: Apache-2.0
"""What to change in a run whose memory plan does not fit."""

import dataclasses

from grpo.plan.hub import ORIGINALS, has_mxfp4
from grpo.plan.memory import Changes, PlanInputs
from grpo.settings.parsing import show
from grpo.settings.table import Settings

BESIDE_VLLM = ("shared", "paged")  # Values of EXPERTS that make room for vLLM.


def without_vllm(settings: Settings) -> Changes:
    """The changes that turn vLLM off; EXPERTS changes too if its value makes sense only beside vLLM."""
    return {"EXPERTS": "mxfp4", "USE_VLLM": False} if settings.EXPERTS in BESIDE_VLLM else {"USE_VLLM": False}


def format_changes(changes: Changes) -> str:
    """The changes as a user would set them: `NAME=VALUE and NAME=VALUE`."""
    return " and ".join(f"{name}={show(value)}" for name, value in changes.items())


def fitting_original(settings: Settings, inputs: PlanInputs) -> str | None:
    """The model with MXFP4 experts that fits, if this one has its shape and no packed experts; None otherwise."""
    config = inputs.config
    if has_mxfp4(config):
        return None
    packed = dataclasses.replace(inputs, config={**config, "quantization_config": {"quant_method": "mxfp4"}})
    kinds = packed.expert_kinds(settings)
    fits = any(packed.fits(settings, {"EXPERTS": kind}) for kind in kinds)
    return ORIGINALS.get((config["num_hidden_layers"], config["num_local_experts"])) if fits else None


def memory_advice(settings: Settings, inputs: PlanInputs) -> str:
    """Advice for a run that does not fit the GPU: the model that a BF16 checkpoint may be a copy of if that fits, and
    every single change of the settings that makes it fit, or else all of them."""
    original, advice = fitting_original(settings, inputs), ""
    if original:
        advice = f"If this is a BF16 copy of it, set MODEL_ID={original}: its MXFP4 experts fit. "
    trials: list[Changes] = [{"VLLM_GPU_MEM": None}, {"GRADIENT_CHECKPOINTING": True}]
    trials += [{"GENERATION_BATCH": None}, {"MICRO_BATCH": None}]
    if packed := [kind for kind in inputs.expert_kinds(settings) if kind != "bf16"]:
        fitting = [kind for kind in packed if inputs.fits(settings, {"EXPERTS": kind})]
        trials.append({"EXPERTS": fitting[0] if fitting else "mxfp4"})
    trials.append(without_vllm(settings))
    trials = [trial for trial in trials if any(value != getattr(settings, name) for name, value in trial.items())]
    together = {name: value for trial in trials for name, value in trial.items()}
    beside_vllm = {name: value for trial in trials[:-1] for name, value in trial.items()}
    for candidates in (trials, [beside_vllm], [together]):
        if remedies := [format_changes(trial) for trial in candidates if inputs.fits(settings, trial)]:
            return f"{advice}With all else as set, {' or '.join(remedies)} fits"
    return f"{advice}Free some memory (nvidia-smi names its users), lower MAX_COMPLETION_LEN, or rent a larger GPU"
