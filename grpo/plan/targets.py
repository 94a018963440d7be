# SPDX-License-Identifier: Apache-2.0
"""Resolves LORA_TARGETS: attention projections in every layer, and experts in all layers or in single ones."""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from grpo.common import Problems, nearest_hint, split_commas
from grpo.plan.hub import ModelConfig

# The modules that PEFT's `all-linear` adapts in a gpt-oss. Its router and experts are raw parameters, not modules.
LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
EXPERTS_WORD = re.compile(r"(?:(0|[1-9][0-9]{0,3})\.)?experts")  # `experts` of every layer, `7.experts` of one.
UNKNOWN_LAYERS = 100  # The number of layers that checks assume if there is no config.json.
# The experts' module in an adapter, by parameter: PEFT adapts the second one in a wrapper around that of the first.
STEMS = {"gate_up_proj": "mlp.experts.base_layer", "down_proj": "mlp.experts"}
MODULES = STEMS | {name: f"self_attn.{name}" for name in LINEAR_MODULES}
TENSOR = re.compile(
    rf"base_model\.model\.model\.layers\.([0-9]{{1,4}})\.({'|'.join(map(re.escape, MODULES.values()))})"
    r"\.lora_[AB]\.weight"
)
Matrix = tuple[int, str]  # The layer, and a name from LINEAR_MODULES or EXPERT_PARAMETERS.


def word_matrices(word: str, layers: int) -> list[Matrix] | None:
    """The matrices that a word of LORA_TARGETS matches in a model of `layers` layers; None if the word is unknown."""
    numbers: Sequence[int] = range(layers)
    names: Sequence[str] = LINEAR_MODULES
    if match := EXPERTS_WORD.fullmatch(word):
        names = EXPERT_PARAMETERS
        numbers = [int(match[1])] if match[1] else numbers
    elif word in LINEAR_MODULES:
        names = (word,)
    elif word != "all-linear":
        return None
    return [(layer, name) for layer in numbers if layer < layers for name in names]


def target_matrices(targets: str, layers: int) -> set[Matrix]:
    """The matrices that LORA_TARGETS matches in a model of `layers` layers."""
    return {matrix for word in split_commas(targets) for matrix in word_matrices(word, layers) or ()}


def expert_words(targets: str) -> list[str]:
    return [word for word in split_commas(targets) if EXPERTS_WORD.fullmatch(word)]


def peft_targets(targets: str) -> dict[str, Any]:
    """LORA_TARGETS as arguments of PEFT's LoraConfig."""
    words = expert_words(targets)
    linear = [word for word in split_commas(targets) if word not in words]
    parameters = [f"{word.replace('experts', 'mlp.experts')}.{name}" for word in words for name in EXPERT_PARAMETERS]
    options: dict[str, Any] = {"target_modules": "all-linear" if "all-linear" in linear else linear}
    return options | ({"target_parameters": parameters} if parameters else {})


def matrix_sizes(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Name -> (number of matrices, inputs, outputs), for everything in a layer that an adapter can change."""
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
    """Name -> shape of each tensor that PEFT saves of an adapter with LORA_R=`rank` and LORA_TARGETS=`targets`."""
    shapes: dict[str, list[int]] = {}
    sizes, matrices = matrix_sizes(config), target_matrices(targets, config["num_hidden_layers"])
    for layer in range(config["num_hidden_layers"]):
        for name, (count, inputs, outputs) in sizes.items():
            if (layer, name) in matrices:
                stem = f"base_model.model.model.layers.{layer}.{MODULES[name]}.lora"
                shapes |= {f"{stem}_A.weight": [count * rank, inputs], f"{stem}_B.weight": [outputs, count * rank]}
    return shapes


def matrix_of(tensor: str) -> Matrix | None:
    """The matrix that an adapter's tensor of this name changes; None if PEFT gives no tensor of gpt-oss this name."""
    if not (match := TENSOR.fullmatch(tensor)):
        return None
    return int(match[1]), {module: name for name, module in MODULES.items()}[match[2]]


def checkpoint_weight(tensor: str) -> str:
    """The name of the weight in the base model's checkpoint that the tensor of an adapter changes."""
    layer, name = matrix_of(tensor) or (0, tensor)
    return f"model.layers.{layer}." + (f"mlp.experts.{name}" if name in STEMS else f"self_attn.{name}.weight")


def adapter_parameters(config: ModelConfig, rank: int, matrices: Collection[Matrix]) -> int:
    """The number of parameters of an adapter with this rank on these matrices."""
    sizes = matrix_sizes(config)
    return sum(rank * sizes[name][0] * sum(sizes[name][1:]) for _, name in matrices)


def shortest_targets(matrices: Collection[Matrix], layers: int) -> str:
    """The shortest LORA_TARGETS that matches exactly these matrices."""
    names = {name for _, name in matrices}
    words = [name for name in LINEAR_MODULES if name in names]
    words = ["all-linear"] if len(words) == len(LINEAR_MODULES) else words
    experts = sorted({layer for layer, name in matrices if name in EXPERT_PARAMETERS})
    words += ["experts"] if len(experts) == layers else [f"{layer}.experts" for layer in experts]
    return ",".join(words)


def target_lines(targets: str, config: ModelConfig, rank: int) -> Iterator[str]:
    """A line for each word of LORA_TARGETS: its number of matrices, and of an adapter's parameters on them."""
    for word in dict.fromkeys(split_commas(targets)):
        matrices = word_matrices(word, config["num_hidden_layers"]) or ()
        yield f"{word}: {len(matrices)} matrices, {adapter_parameters(config, rank, matrices):,} parameters"


def check_targets(targets: str, config: ModelConfig | None, problems: Problems) -> None:
    """Checks that every word of LORA_TARGETS matches something. `config` is None if the model could not be read."""
    layers = config["num_hidden_layers"] if config else UNKNOWN_LAYERS
    fix = f"Use all-linear, some of {', '.join(LINEAR_MODULES)}, experts (of all layers), or 7.experts (of layer 7)"
    for word in split_commas(targets):
        matrices = word_matrices(word, layers)
        if matrices is None:
            near = nearest_hint(word, ("all-linear", *LINEAR_MODULES, "experts"))
            problems.add("LORA_TARGETS", f"{word!r} is nothing in gpt-oss that takes an adapter{near}", fix)
        elif not matrices:
            fault = f"{word!r} matches nothing in the model"
            problems.add("LORA_TARGETS", fault, f"The model has layers 0 to {layers - 1}")
    if not split_commas(targets):
        problems.add("LORA_TARGETS", "it names no module", fix)
