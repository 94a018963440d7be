# SPDX-License-Identifier: Apache-2.0
"""Models that are evaluated without a run: how they sample, and how their answers are counted."""

import torch

from grpo.common import Problems
from grpo.evaluate.heldout_table import answers_by_action
from grpo.evaluate.models import TransformersModel
from grpo.plan.hub import find_model
from grpo.settings.table import Settings


def test_evaluations_sample_from_all_tokens():
    """transformers' own default leaves all but the 50 likeliest out, and rollouts do not."""
    settings = Settings(MODEL_ID="tiny", EXPERTS="bf16", MAX_COMPLETION_LEN=1)
    model = TransformersModel(settings, find_model("tiny", Problems()), None, "eager")
    with torch.no_grad():  # Nearly equal: of equal ones, the 50 likeliest would be all.
        model.network.lm_head.weight *= 1e-3
    tokens = {ids[0] for ids in model.complete(["hour 8"] * 256, 256)}
    assert len(tokens) > 150, "of some 800 nearly equally likely ones"


def test_answers_are_counted_by_action():
    """Also the action that no answer names; exact figures are expected numbers."""
    figures = {"action_counts": [1234, 0, 3], "unparsed": 2}
    assert answers_by_action(figures) == "[0] 1234, [1] 0, [2] 3, none 2"
    assert answers_by_action({"action_counts": [11.654, 0.0], "unparsed": 0.25}) == "[0] 11.7, [1] 0, none 0.2"
    assert answers_by_action({"reward": 0.5}) == "", "rows without actions"
