# SPDX-License-Identifier: Apache-2.0
"""The loop over a cache of fixed size draws the tokens of transformers' own, with a (pretended) graph and without."""

import contextlib
import logging
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from expert_models import load
from peft import LoraConfig, get_peft_model
from trainers import seed_weights
from trl.trainer.utils import pad

from grpo.model.load import in_compute_dtype
from grpo.rollout import decode as decoding
from grpo.rollout.decode import DecodingStep, shared_prefill

LENGTHS = (70, 41, 55)  # tokens of three prompts; the sliding window has 32
GROUPS = (0, 0, 1, 2, 0, 2)  # the prompt of each row
NEW = 40  # tokens: beyond the sliding window
GREEDY = {"do_sample": False}
DRAWN = {"do_sample": True, "temperature": 0.7, "top_p": 1.0, "top_k": 0}


@pytest.fixture(scope="module")
def policy(tiny):
    """The tiny model with an adapter that is not zero, on weights that no machine's rounding depends on."""
    lora = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(in_compute_dtype(load(tiny)), lora).eval()
    seed_weights(model)
    return model


def inputs_of(rows):
    ids = torch.randint(5, 500, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(3))
    prompts = [ids[n, : LENGTHS[n]] for n in rows]
    masks = [torch.ones_like(prompt) for prompt in prompts]
    return {"input_ids": pad(prompts, 0, "left"), "attention_mask": pad(masks, 0, "left")}


def generate(policy, rows, sampling, ours=True, seed=1, **more):
    """Ids (B, L + C) and the logits (C, B, V) that the tokens were drawn from, by this loop or transformers' own."""
    logits = []
    torch.manual_seed(seed)
    options = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": []} | sampling | more
    keep = lambda _, scores: logits.append(scores.clone()) or scores  # noqa: E731
    with shared_prefill(policy.base_model.model) if ours else contextlib.nullcontext():
        ids = policy.generate(**inputs_of(rows), **options, logits_processor=[keep])
    return ids, torch.stack(logits)


def assert_alike(policy, rows, sampling, **more):
    (ids, logits), (expected, expected_logits) = (
        generate(policy, rows, sampling, ours, **more) for ours in (True, False)
    )
    assert torch.equal(ids, expected)
    torch.testing.assert_close(logits, expected_logits, atol=1e-3, rtol=1e-4)
    return ids


@pytest.mark.parametrize(
    ("rows", "sampling"),
    [(GROUPS, GREEDY), (GROUPS, DRAWN), ((0, 1), DRAWN | {"temperature": 1.3, "top_p": 0.6}), ((2,), DRAWN)],
)
def test_tokens_and_what_they_are_drawn_from_are_those_of_transformers(policy, rows, sampling):
    """Rows of different lengths behind padding, past the sliding window, with the adapter and without."""
    ids = assert_alike(policy, rows, sampling)
    assert ids.shape[1] == max(LENGTHS[n] for n in rows) + NEW
    with policy.disable_adapter():
        assert not torch.equal(ids, assert_alike(policy, rows, sampling))


def test_rows_end_at_a_stop_token_and_are_padded(policy):
    free, _ = generate(policy, GROUPS, DRAWN)
    assert not torch.equal(free, generate(policy, GROUPS, DRAWN, seed=2)[0])
    first, last = free[0, -NEW + 9].item(), free[3, -NEW + 4].item()
    ids = assert_alike(policy, GROUPS, DRAWN, eos_token_id=[first, last])[:, -NEW:]
    stops = torch.isin(ids, torch.tensor([first, last]))
    behind = stops.cumsum(1) - stops.long() > 0
    assert not ids[behind].any() and behind[0, 10:].all() and behind[3, 5:].all()
    assert not behind[:, -1].all(), "others go on"
    everyone = free[:, -NEW + 2].tolist()
    assert generate(policy, GROUPS, DRAWN, eos_token_id=everyone)[0].shape[1] <= max(LENGTHS) + 3


def test_a_prompt_is_computed_once_and_alone(policy):
    passes = []
    hook = policy.base_model.model.model.register_forward_pre_hook(
        lambda _, args, kw: passes.append(tuple(kw["input_ids"].shape)), with_kwargs=True
    )
    generate(policy, GROUPS, GREEDY)
    hook.remove()
    assert "generate" not in vars(policy.base_model.model), "transformers' own loop is back"
    assert sorted(passes[:3]) == [(1, n) for n in sorted(LENGTHS)]
    assert passes[3:] == [(len(GROUPS), 1)] * (NEW - 1), "the last token is never fed"


@pytest.fixture
def cuda(monkeypatch):
    """Takes the place of `torch.cuda`: CUDA graphs on a CPU, where a capture computes as well."""
    steps, init = [], DecodingStep.__init__
    replacement = MagicMock()
    # A replay computes the captured step again in its buffers.
    replacement.CUDAGraph().replay.side_effect = lambda: steps[-1].logits.copy_(steps[-1].run())

    def capturing(step, *arguments):
        init(step, *arguments)
        step.capturing = step.graphs
        steps.append(step)

    monkeypatch.setattr(DecodingStep, "__init__", capturing)
    monkeypatch.setattr(DecodingStep, "graphs", True)
    monkeypatch.setattr(decoding, "torch", SimpleNamespace(**vars(torch) | {"cuda": replacement}))
    return replacement


def test_runs_before_a_capture_leave_no_trace(policy, cuda):
    assert_alike(policy, GROUPS, DRAWN)
    assert cuda.CUDAGraph().replay.call_count == NEW - 1


def test_where_no_graph_can_be_made_steps_are_launched_one_by_one(policy, cuda, caplog):
    """It is logged once, and not tried again."""
    cuda.set_sync_debug_mode.side_effect = [None, RuntimeError("called a synchronizing\nCUDA operation"), None]
    with caplog.at_level(logging.WARNING, "train_grpo"):
        assert_alike(policy, GROUPS, DRAWN)
        generate(policy, (1, 1), DRAWN)
    assert cuda.graph.call_count == 1 and not cuda.CUDAGraph().replay.called
    assert caplog.text.count("no CUDA graph of a decoding step can be made here (called a synchronizing CUDA") == 1


def test_out_of_memory_is_no_reason_to_go_on(policy, cuda):
    cuda.set_sync_debug_mode.side_effect = [None, torch.OutOfMemoryError(), None]
    with pytest.raises(torch.OutOfMemoryError):
        generate(policy, GROUPS, DRAWN)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_graph_computes_what_the_loop_does(tiny, monkeypatch):
    model, tokens = load(tiny, "mxfp4"), []
    inputs = {name: value.cuda() for name, value in inputs_of(GROUPS).items()}
    for graphs in (True, False):
        monkeypatch.setattr(DecodingStep, "graphs", graphs)
        torch.manual_seed(1)
        with shared_prefill(model):
            options = DRAWN | {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": []}
            tokens.append(model.generate(**inputs, **options))
        assert DecodingStep.graphs == graphs, "the capture failed"
    assert torch.equal(*tokens)
