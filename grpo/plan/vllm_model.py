# SPDX-License-Identifier: Apache-2.0
"""Where vLLM computes another model than config.json describes, because its source has the value and reads no field.

transformers reads the field, so that trainer and rollouts would be two models. The values are those of vLLM 0.26
(model_executor/models/gpt_oss.py); tests/rollout/test_hooks.py holds them against its source and transformers'."""

from collections.abc import Iterator, Mapping

from grpo.plan.hub import ModelConfig

FieldValues = Mapping[str, str | float | bool | None]  # Values by the names of their fields; None: it must be absent.
# What vLLM takes for a field of config.json. transformers takes the same where the field is missing.
VLLM_VALUES: FieldValues = {
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,  # vLLM would neither load a head nor tie it.
}
# The same for the fields of the rotary embedding (`rope_scaling`), of which vLLM reads ROPE_READ without a default.
VLLM_ROPE: FieldValues = {
    "rope_type": "yarn",
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "partial_rotary_factor": 1.0,
}
ROPE_READ = ("factor", "beta_fast", "beta_slow")
# No library reads these, nor do this project's kernels: all of them compute these values.
FIXED_VALUES: FieldValues = {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def differences(values: FieldValues, fields: ModelConfig) -> Iterator[str]:
    """A clause for each of the `fields` that has another value; missing ones and null stand for the default."""
    for name, value in values.items():
        if (own := fields.get(name)) is not None and own != value:
            yield f"{name} is {own}" + ("" if value is None else f" instead of {value}")


def rope_fields(config: ModelConfig) -> ModelConfig:
    """The fields of the rotary embedding in config.json, under either of its names; empty for gpt-oss's own."""
    fields = config.get("rope_scaling") or config.get("rope_parameters")
    return {"rope_type": fields.get("type", "default")} | fields if isinstance(fields, dict) else {}


def sliding_layers(config: ModelConfig) -> list[bool]:
    """Whether each layer has the sliding window by config.json."""
    if (kinds := config.get("layer_types")) is None:
        return [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]
    return [kind == "sliding_attention" for kind in kinds]


def vllm_sliding_layers(config: ModelConfig) -> list[bool]:
    """Whether each layer has the sliding window in vLLM: the even ones whatever `layer_types` says, and if these are
    all alike (be it `full_attention`) every layer (vllm/engine/arg_utils.py)."""
    is_mixed = len(set(sliding_layers(config))) > 1
    return [layer % 2 == 0 or not is_mixed for layer in range(config["num_hidden_layers"])]


def fixed_faults(config: ModelConfig) -> list[str]:
    """The fields of config.json that nothing reads and that describe another model than everything computes."""
    values = {**FIXED_VALUES, "experts_per_token": config["num_experts_per_tok"]}
    return [f"config.json: {text}, which neither transformers nor vLLM reads" for text in differences(values, config)]


def vllm_faults(config: ModelConfig, longest: int) -> list[str]:
    """What vLLM computes otherwise than config.json says, for sequences of up to `longest` tokens. The sliding
    window matters only to longer ones."""
    rope, why = rope_fields(config), "vLLM would compute another model than transformers"
    fields = [*differences(VLLM_VALUES, config), *(f"rope_scaling's {text}" for text in differences(VLLM_ROPE, rope))]
    fields += [f"rope_scaling has no {name}" for name in ROPE_READ if rope and rope.get(name) is None]
    faults = [f"config.json: {text}. {why}" for text in fields]
    own, vllm = sliding_layers(config), vllm_sliding_layers(config)
    layers = [layer for layer in range(min(len(own), len(vllm))) if own[layer] != vllm[layer]]
    window = config["sliding_window"] or longest  # vLLM takes 0 for no window.
    if layers and window < longest:
        named = f"layer {layers[0]}" + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")
        rule = f"gives its window of {window} tokens to even layers, or to all where layer_types are alike"
        faults.append(f"config.json: by layer_types {named} is another kind than in vLLM, which {rule}")
    return faults
