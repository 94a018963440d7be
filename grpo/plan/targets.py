# SPDX-License-Identifier: Apache-2.0
"""What LORA_TARGETS matches: projections of the attention, in every layer, and experts, of all layers or of some."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from grpo.settings import Problems, listed, nearest

# What `all-linear` finds in a gpt-oss: router and experts are raw parameters.
LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
# `experts`, `7.experts`, `7.mlp.experts.gate_up_proj` as PEFT's target_parameters spell it, or with all that stands before.
EXPERTS = re.compile(r"(?:(?:model\.)?(?:layers\.)?([0-9]{1,4})\.)?(?:mlp\.)?experts(?:\.(gate_up_proj|down_proj))?")
UNKNOWN_LAYERS = 100  # taken where there is no config.json
# Where PEFT wraps them: the second parameter of a module around the first.
STEMS = {"gate_up_proj": "mlp.experts.base_layer", "down_proj": "mlp.experts"}
TENSOR = re.compile(rf"base_model\.model\.model\.layers\.([0-9]{{1,4}})\.({'|'.join(map(re.escape, STEMS.values()))}|self_attn\.(?:{'|'.join(LINEAR_MODULES)}))\.lora_[AB]\.weight")  # fmt: skip
Place = tuple[int, str]  # of a matrix: its layer, and one of LINEAR_MODULES or EXPERT_PARAMETERS


def places(word: str, layers: int) -> list[Place] | None:
    """What one word of LORA_TARGETS matches in a model of so many layers; None where it is no such word."""
    if word == "all-linear" or word in LINEAR_MODULES:
        return [(layer, name) for layer in range(layers) for name in LINEAR_MODULES if word in ("all-linear", name)]
    if not (found := EXPERTS.fullmatch(word)):
        return None
    wanted = range(layers) if found[1] is None else [int(found[1])]
    return [
        (layer, name) for layer in wanted if layer < layers for name in EXPERT_PARAMETERS if found[2] in (None, name)
    ]


def matched(targets: str, layers: int) -> set[Place]:
    """What LORA_TARGETS matches."""
    return {place for word in listed(targets) for place in places(word, layers) or ()}


def expert_words(targets: str) -> list[str]:
    """The words of LORA_TARGETS that name experts."""
    return [word for word in listed(targets) if EXPERTS.fullmatch(word)]


def peft_targets(targets: str) -> dict[str, Any]:
    """LORA_TARGETS as arguments of PEFT's LoraConfig."""
    linear = [word for word in listed(targets) if not EXPERTS.fullmatch(word)]
    parameters = []
    for found in map(EXPERTS.fullmatch, expert_words(targets)):
        before = "" if found[1] is None else f"{int(found[1])}."
        parameters += [f"{before}mlp.experts.{name}" for name in EXPERT_PARAMETERS if found[2] in (None, name)]
    options = {"target_modules": "all-linear" if "all-linear" in linear else linear}
    return options | ({"target_parameters": parameters} if parameters else {})


def sizes(config: Mapping[str, Any]) -> dict[str, tuple[int, int, int]]:
    """(matrices, inputs, outputs) of what can be adapted in a layer of the model with this config.json."""
    hidden, head, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts = config["num_local_experts"]
    ends = (1, hidden, queries), (1, hidden, keys), (1, hidden, keys), (1, queries, hidden)
    ends += (experts, hidden, 2 * inner), (experts, inner, hidden)
    return dict(zip((*LINEAR_MODULES, *EXPERT_PARAMETERS), ends, strict=True))


def expected_shapes(config: Mapping[str, Any], rank: int, targets: str) -> dict[str, list[int]]:
    """Shape of every tensor by name of an adapter on `targets` of the model with this config.json, as PEFT saves it."""
    shapes, known, found = {}, sizes(config), matched(targets, config["num_hidden_layers"])
    for layer, name in itertools.product(range(config["num_hidden_layers"]), known):
        if (layer, name) not in found:
            continue
        count, inner, outer = known[name]
        stem = f"base_model.model.model.layers.{layer}.{STEMS.get(name, f'self_attn.{name}')}.lora"
        shapes |= {f"{stem}_A.weight": [count * rank, inner], f"{stem}_B.weight": [outer, count * rank]}
    return shapes


def place_of(tensor: str) -> Place | None:
    """The matrix to which a tensor of an adapter belongs, by its name; None for a name that none has."""
    if not (found := TENSOR.fullmatch(tensor)):
        return None
    names = {stem: name for name, stem in STEMS.items()}
    return int(found[1]), names.get(found[2], found[2].removeprefix("self_attn."))


def checkpoint_name(tensor: str) -> str:
    """The weight of the checkpoint that a tensor of an adapter changes; PEFT's names are its own for experts alone."""
    layer, name = place_of(tensor) or (0, tensor)
    return f"model.layers.{layer}." + (f"mlp.experts.{name}" if name in STEMS else f"self_attn.{name}.weight")


def parameters(config: Mapping[str, Any], rank: int, places: Collection[Place]) -> int:
    """How many numbers an adapter of this rank has there."""
    known = sizes(config)
    return sum(rank * known[name][0] * sum(known[name][1:]) for _, name in places)


def canonical(found: Collection[Place], layers: int) -> str:
    """The shortest LORA_TARGETS that matches just this."""
    names = {name for _, name in found}
    words = [name for name in LINEAR_MODULES if name in names]
    words = ["all-linear"] if len(words) == len(LINEAR_MODULES) else words
    experts = sorted({layer for layer, name in found if name in EXPERT_PARAMETERS})
    words += ["experts"] if len(experts) == layers else [f"{layer}.experts" for layer in experts]
    return ",".join(words)


def spans(layers: Collection[int]) -> str:
    """`0 to 23`, or `7, 15, 23`."""
    runs = [[layer for _, layer in group] for _, group in itertools.groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0])]  # fmt: skip
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def hits(targets: str, config: Mapping[str, Any], rank: int) -> Iterator[tuple[str, dict[int, dict[str, int]]]]:
    """What each word of LORA_TARGETS matched: the word, and by layer and matrix the numbers that an adapter has there."""
    for word in dict.fromkeys(listed(targets)):
        found: dict[int, dict[str, int]] = {}
        for layer, name in places(word, config["num_hidden_layers"]) or ():
            found.setdefault(layer, {})[name] = parameters(config, rank, [(layer, name)])
        yield word, found


def hit_lines(targets: str, config: Mapping[str, Any], rank: int) -> Iterator[str]:
    """`hits` in words, a line for each word of LORA_TARGETS."""
    for word, found in hits(targets, config, rank):
        each = next(iter(found.values()), {})
        told = " + ".join(f"{name} {count:,}" for name, count in each.items())
        total, few = sum(sum(layer.values()) for layer in found.values()), len(found) == 1
        where = f"layer{'s' * (not few)} {spans(found)}{', each' * (not few)}"
        yield f"{word}: {where} {told} parameters{'' if few else f' = {total:,}'}" if found else f"{word}: nothing"


def check_targets(targets: str, config: Mapping[str, Any] | None, problems: Problems) -> None:
    """Every word of LORA_TARGETS matches something, and both matrices of an expert. `config`: config.json, None where it is
    unknown."""
    layers = config["num_hidden_layers"] if config else UNKNOWN_LAYERS
    fix = f"Use all-linear, some of {', '.join(LINEAR_MODULES)}, experts (of all layers), or 7.experts (of layer 7)"
    for word in listed(targets):
        found = places(word, layers)
        if found is None:
            near = "; the nearest is experts"  # where o_proj would be said to be near down_proj
            if not word.endswith(EXPERT_PARAMETERS):
                near = nearest(word, ("all-linear", *LINEAR_MODULES, "experts"))
            problems.add("LORA_TARGETS", f"{word!r} is nothing in gpt-oss that takes an adapter{near}", fix)
        elif not found:
            problems.add("LORA_TARGETS", f"{word!r} matches nothing", f"The model has layers 0 to {layers - 1}")
    if not listed(targets):
        problems.add("LORA_TARGETS", "it names no module", fix)
    gate_up, down = ({layer for layer, one in matched(targets, layers) if one == name} for name in EXPERT_PARAMETERS)
    if halves := gate_up ^ down:
        what = f"only one of {' and '.join(EXPERT_PARAMETERS)} in layers {spans(halves)}; vLLM takes both or none"
        problems.add("LORA_TARGETS", what, f"Name {min(halves)}.experts, which is both")
