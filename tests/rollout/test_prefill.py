# SPDX-License-Identifier: Apache-2.0
"""Each prompt is computed once for all of its completions, which are those of transformers' own generate."""

from __future__ import annotations

import pytest
import torch
from expert_models import config_of
from trl.trainer.utils import pad

from grpo.model.load import in_working_type, load_model
from grpo.rollout.prefill import shared_prefill

LENGTHS, GROUPS = (
    (70, 41, 55),
    (0, 0, 1, 2, 0, 2),
)  # tokens of three prompts (the sliding window has 32); whose row it is


@pytest.fixture(scope="module")
def model(tiny):
    return in_working_type(load_model(str(tiny), config_of(tiny), "eager"))


def asked(rows):
    ids = torch.randint(5, 500, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(3))
    prompts = [ids[n, : LENGTHS[n]] for n in rows]
    masks = [torch.ones_like(prompt) for prompt in prompts]
    return {"input_ids": pad(prompts, 0, "left"), "attention_mask": pad(masks, 0, "left")}


def generate(model, inputs):
    """Ids (B, L + C) and the logits (C, B, V) that the C tokens were chosen from."""
    out = model.generate(**inputs, max_new_tokens=40, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize(("rows", "computed"), [(GROUPS, (3, 69)), ((0, 1, 2), (3, 70)), ((1, 1), (1, 40))])
def test_equal_prompts_are_computed_once(model, rows, computed):
    """`computed`: rows and columns of the first pass; without two that are equal it is the stock one."""
    inputs, passes = asked(rows), []
    ids, logits = generate(model, inputs)
    hook = model.model.register_forward_pre_hook(
        lambda _, args, kw: passes.append(kw["input_ids"].shape), with_kwargs=True
    )
    with shared_prefill(model):
        shared_ids, shared_logits = generate(model, inputs)
    hook.remove()
    assert passes[0] == computed and set(passes[1:]) == {(len(rows), 1)}
    assert torch.equal(ids, shared_ids)
    torch.testing.assert_close(logits, shared_logits, atol=1e-3, rtol=1e-4)
    assert "generate" not in vars(model), "and afterwards it is transformers' again"
