# SPDX-License-Identifier: Apache-2.0
"""What vLLM computes otherwise than config.json says; tests/rollout/test_hooks.py reads its source for it."""

import pytest
from machines import only

from grpo.output.durable import read_json
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.vllm_model import fixed_faults, vllm_faults

ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LAYERS = REAL_CONFIG["num_hidden_layers"]
ALTERNATE = ["sliding_attention", "full_attention"] * (LAYERS // 2)
ALL_FULL, ALL_SLIDING = ["full_attention"] * LAYERS, ["sliding_attention"] * LAYERS


def faults_of(longest=1000, **fields):
    return vllm_faults(REAL_CONFIG | fields, longest)


def test_gpt_oss_itself_is_computed_as_it_says(tiny):
    assert not faults_of() and not faults_of(rope_scaling=ROPE, layer_types=ALTERNATE, rms_norm_eps=1e-05)
    assert not faults_of(rope_parameters=ROPE | {"rope_theta": 150000, "partial_rotary_factor": 1.0})
    assert not faults_of(attention_bias=True, attention_dropout=0, rope_scaling=None, tie_word_embeddings=False)
    config = read_json(tiny / "config.json")
    assert not vllm_faults(config, 10**6) and not fixed_faults(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06 instead of 1e-05. vLLM would compute another model"),
        ({"attention_bias": False}, "attention_bias is False instead of True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True instead of False"),
        ({"rope_scaling": {"type": "linear", "factor": 8}}, "rope_scaling's rope_type is linear instead of yarn"),
        ({"rope_parameters": {"rope_theta": 10000}}, "rope_scaling's rope_type is default instead of yarn"),
        ({"rope_scaling": ROPE | {"attention_factor": 1.5}}, "rope_scaling's attention_factor is 1.5. vLLM would"),
        ({"rope_scaling": ROPE | {"beta_fast": None}}, "rope_scaling has no beta_fast"),
    ],
)
def test_fields_that_vllm_does_not_read(fields, words):
    assert f"config.json: {words}" in faults_of(**fields)[0]


@pytest.mark.parametrize(
    ("kinds", "layers"),
    [
        (ALTERNATE, 0),
        (ALTERNATE[::-1], 24),
        (ALL_SLIDING, 0),  # vLLM then gives the window to the odd layers too.
        (ALL_FULL, 24),  # And here as well.
        ([*ALTERNATE[:-1], "sliding_attention"], 1),
    ],
)
def test_layers_whose_window_is_another(kinds, layers):
    faults = faults_of(layer_types=kinds)
    assert len(faults) == (layers > 0)
    if layers:
        first = next(n for n, kind in enumerate(kinds) if kind != ALTERNATE[n])
        first = 0 if kinds is ALL_FULL else first
        more = f" and {layers - 1} more" if layers > 1 else ""
        assert f"layer {first}{more} is another kind than in vLLM, which gives its window of 128 tokens" in only(faults)
    assert not faults_of(128, layer_types=kinds), "the window holds every token"
    assert bool(faults_of(129, layer_types=kinds)) == bool(layers)
    assert not faults_of(layer_types=kinds, sliding_window=0), "there is no window"


def test_fields_that_nothing_reads():
    assert not fixed_faults(REAL_CONFIG | {"swiglu_limit": 7, "hidden_act": "silu", "experts_per_token": 4})
    others = {"swiglu_limit": 10.0, "swiglu_alpha": 1.0, "hidden_act": "gelu", "experts_per_token": 2}
    for name, value in others.items():
        fault = only(fixed_faults(REAL_CONFIG | {name: value}))
        assert fault.startswith(f"config.json: {name} is {value} instead of "), fault
