# SPDX-License-Identifier: Apache-2.0
"""What LORA_TARGETS matches: projections of the attention, in every layer, and experts, of all layers or of some."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from grpo.plan.hub import ModelConfig
from grpo.settings import Problems, nearest, split_commas

# The modules that PEFT's `all-linear` adapts in a gpt-oss. Its router and experts are raw parameters, not modules.
LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
# `experts`, `7.experts`, or as PEFT's target_parameters spell it: `7.mlp.experts.gate_up_proj`, with any prefix.
EXPERTS = re.compile(r"(?:(?:model\.)?(?:layers\.)?([0-9]{1,4})\.)?(?:mlp\.)?experts(?:\.(gate_up_proj|down_proj))?")
UNKNOWN_LAYERS = 100  # The number of layers that is assumed without a config.json.
# PEFT wraps the second parameter of a module around the first.
STEMS = {"gate_up_proj": "mlp.experts.base_layer", "down_proj": "mlp.experts"}
MODULES = STEMS | {name: f"self_attn.{name}" for name in LINEAR_MODULES}
TENSOR = re.compile(
    rf"base_model\.model\.model\.layers\.([0-9]{{1,4}})\.({'|'.join(map(re.escape, MODULES.values()))})"
    r"\.lora_[AB]\.weight"
)
Matrix = tuple[int, str]  # Its layer, and one of LINEAR_MODULES or EXPERT_PARAMETERS.


def parse_experts(word: str) -> tuple[int | None, tuple[str, ...]] | None:
    """(layer, None for all of them; parameters) of a word that names experts; None for any other word."""
    if not (match := EXPERTS.fullmatch(word)):
        return None
    layer, parameter = match.groups()
    return int(layer) if layer else None, (parameter,) if parameter else EXPERT_PARAMETERS


def word_matrices(word: str, layers: int) -> list[Matrix] | None:
    """The matrices that one word of LORA_TARGETS matches in a model of `layers` layers; None if it is no such word."""
    if word == "all-linear" or word in LINEAR_MODULES:
        names = LINEAR_MODULES if word == "all-linear" else (word,)
        return [(layer, name) for layer in range(layers) for name in names]
    if not (experts := parse_experts(word)):
        return None
    numbers = range(layers) if experts[0] is None else [experts[0]]
    return [(layer, name) for layer in numbers if layer < layers for name in experts[1]]


def target_matrices(targets: str, layers: int) -> set[Matrix]:
    """The matrices that LORA_TARGETS matches in a model of `layers` layers."""
    return {matrix for word in split_commas(targets) for matrix in word_matrices(word, layers) or ()}


def expert_words(targets: str) -> list[str]:
    """The words of LORA_TARGETS that name experts."""
    return [word for word in split_commas(targets) if parse_experts(word)]


def peft_targets(targets: str) -> dict[str, Any]:
    """LORA_TARGETS as arguments of PEFT's LoraConfig."""
    linear, parameters = [], []
    for word in split_commas(targets):
        if experts := parse_experts(word):
            prefix = "" if experts[0] is None else f"{experts[0]}."
            parameters += [f"{prefix}mlp.experts.{name}" for name in experts[1]]
        else:
            linear.append(word)
    options: dict[str, Any] = {"target_modules": "all-linear" if "all-linear" in linear else linear}
    return options | ({"target_parameters": parameters} if parameters else {})


def matrix_sizes(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """(matrices, inputs, outputs) of what can be adapted in a layer of the model with this config.json."""
    hidden, head, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts = config["num_local_experts"]
    return {
        "q_proj": (1, hidden, queries),
        "k_proj": (1, hidden, keys),
        "v_proj": (1, hidden, keys),
        "o_proj": (1, queries, hidden),
        "gate_up_proj": (experts, hidden, 2 * inner),
        "down_proj": (experts, inner, hidden),
    }


def expected_shapes(config: ModelConfig, rank: int, targets: str) -> dict[str, list[int]]:
    """Shape of every tensor by name of an adapter on `targets` of the model with this config.json, as PEFT saves it."""
    shapes: dict[str, list[int]] = {}
    sizes, matrices = matrix_sizes(config), target_matrices(targets, config["num_hidden_layers"])
    for layer in range(config["num_hidden_layers"]):
        for name, (count, inputs, outputs) in sizes.items():
            if (layer, name) in matrices:
                stem = f"base_model.model.model.layers.{layer}.{MODULES[name]}.lora"
                shapes |= {f"{stem}_A.weight": [count * rank, inputs], f"{stem}_B.weight": [outputs, count * rank]}
    return shapes


def matrix_of(tensor: str) -> Matrix | None:
    """The matrix to which a tensor of an adapter belongs, by its name; None for a name that none has."""
    if not (match := TENSOR.fullmatch(tensor)):
        return None
    return int(match[1]), {module: name for name, module in MODULES.items()}[match[2]]


def checkpoint_name(tensor: str) -> str:
    """The weight of the checkpoint that a tensor of an adapter changes; PEFT's names are its own for experts alone."""
    layer, name = matrix_of(tensor) or (0, tensor)
    return f"model.layers.{layer}." + (f"mlp.experts.{name}" if name in STEMS else f"self_attn.{name}.weight")


def adapter_parameters(config: ModelConfig, rank: int, matrices: Collection[Matrix]) -> int:
    """How many parameters an adapter of this rank has on these matrices."""
    sizes = matrix_sizes(config)
    return sum(rank * sizes[name][0] * sum(sizes[name][1:]) for _, name in matrices)


def shortest_targets(matrices: Collection[Matrix], layers: int) -> str:
    """The shortest LORA_TARGETS that matches just these matrices."""
    names = {name for _, name in matrices}
    words = [name for name in LINEAR_MODULES if name in names]
    words = ["all-linear"] if len(words) == len(LINEAR_MODULES) else words
    experts = sorted({layer for layer, name in matrices if name in EXPERT_PARAMETERS})
    words += ["experts"] if len(experts) == layers else [f"{layer}.experts" for layer in experts]
    return ",".join(words)


def layers_text(layers: Collection[int]) -> str:
    """`0 to 23` for layers without a gap, else each of them: `7, 15, 23`."""
    first, last = min(layers), max(layers)
    return f"{first} to {last}" if len(layers) == last - first + 1 > 2 else ", ".join(map(str, sorted(layers)))


def target_lines(targets: str, config: ModelConfig, rank: int) -> Iterator[str]:
    """For each word of LORA_TARGETS the matrices that it matches, with the parameters that an adapter has there."""
    for word in dict.fromkeys(split_commas(targets)):
        matrices = word_matrices(word, config["num_hidden_layers"])
        if not matrices:
            yield f"{word}: nothing"
            continue
        layers = {layer for layer, _ in matrices}
        of_layer = [matrix for matrix in matrices if matrix[0] == min(layers)]
        counts = " + ".join(f"{matrix[1]} {adapter_parameters(config, rank, [matrix]):,}" for matrix in of_layer)
        if len(layers) == 1:
            yield f"{word}: layer {layers_text(layers)} {counts} parameters"
        else:
            total = adapter_parameters(config, rank, matrices)
            yield f"{word}: layers {layers_text(layers)}, each {counts} parameters = {total:,}"


def check_targets(targets: str, config: ModelConfig | None, problems: Problems) -> None:
    """Every word of LORA_TARGETS matches something, and both matrices of an expert. `config`: None if it is unknown."""
    layers = config["num_hidden_layers"] if config else UNKNOWN_LAYERS
    fix = f"Use all-linear, some of {', '.join(LINEAR_MODULES)}, experts (of all layers), or 7.experts (of layer 7)"
    for word in split_commas(targets):
        matrices = word_matrices(word, layers)
        if matrices is None:
            near = "; the nearest is experts"  # By spelling, o_proj would be said to be near down_proj.
            if not word.endswith(EXPERT_PARAMETERS):
                near = nearest(word, ("all-linear", *LINEAR_MODULES, "experts"))
            problems.add("LORA_TARGETS", f"{word!r} is nothing in gpt-oss that takes an adapter{near}", fix)
        elif not matrices:
            problems.add(
                "LORA_TARGETS", f"{word!r} matches nothing in the model", f"The model has layers 0 to {layers - 1}"
            )
    if not split_commas(targets):
        problems.add("LORA_TARGETS", "it names no module", fix)
    matched = target_matrices(targets, layers)
    gate_up, down = ({layer for layer, name in matched if name == parameter} for parameter in EXPERT_PARAMETERS)
    if halves := gate_up ^ down:
        names = " and ".join(EXPERT_PARAMETERS)
        fault = f"only one of {names} in layers {layers_text(halves)}; vLLM takes both or none"
        problems.add("LORA_TARGETS", fault, f"Name {min(halves)}.experts, which is both")
