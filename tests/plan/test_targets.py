# SPDX-License-Identifier: Apache-2.0
"""LORA_TARGETS: the matrices that its words match."""

import random

import pytest
from machines import only

from grpo.common import Problems
from grpo.plan import targets
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.targets import EXPERT_PARAMETERS, LINEAR_MODULES, shortest_targets, target_matrices


@pytest.mark.parametrize(
    ("words", "count", "parameters"),
    [("all-linear", 96, 1_990_656), ("all-linear,q_proj,7.experts", 98, 3_833_856), ("24.experts", 0, 0)],
)
def test_what_words_match_in_gpt_oss_20b(words, count, parameters):
    """At rank 4; 1,990,656 is PEFT's own count of `all-linear`."""
    matrices = target_matrices(words, 24)
    assert (len(matrices), targets.adapter_parameters(REAL_CONFIG, 4, matrices)) == (count, parameters)
    shapes = targets.expected_shapes(REAL_CONFIG, 4, words)
    assert {targets.matrix_of(name) for name in shapes} == matrices and len(shapes) == 2 * count


def test_a_layer_is_written_as_peft_looks_for_it():
    """PEFT only warns of a name that it does not find, and would train no expert."""
    problems = Problems()
    targets.check_targets("all-linear,07.experts,0.experts", REAL_CONFIG, problems)
    assert only(problems).startswith("LORA_TARGETS: '07.experts' is nothing in gpt-oss that takes an adapter")


def test_any_choice_has_a_name():
    choose = random.Random(1)
    for _ in range(50):
        linear = [(layer, name) for name in LINEAR_MODULES if choose.random() < 0.5 for layer in range(5)]
        experts = [(layer, name) for layer in range(5) if choose.random() < 0.5 for name in EXPERT_PARAMETERS]
        assert target_matrices(shortest_targets([*linear, *experts], 5), 5) == {*linear, *experts}
