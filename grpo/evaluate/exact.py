# SPDX-License-Identifier: Apache-2.0
"""Exact probabilities of a small model's answers, instead of samples of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from grpo.data.prompts import ANSWER_AFTER, ANSWER_BEFORE
from grpo.model.attention import attention_of
from grpo.model.load import evaluating
from grpo.phases import with_progress

ANSWER = ANSWER_BEFORE + "{}" + ANSWER_AFTER
BATCH_TOKENS = 4096  # that go through the model at once


@torch.no_grad()
def answer_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], temperature: float, actions: int
) -> np.ndarray:
    """(N, K): the probability of ANSWER for each of K `actions` after each of N prompts, sampled at `temperature`; at 0
    the greedy answer's is 1. What is left of 1 is no such answer. `model`: a gpt-oss, its adapter inside or not; it is
    computed in float32 on a CPU. Equal prompts are asked once, and what all of them begin with is computed once."""
    place = {prompt: n for n, prompt in enumerate(dict.fromkeys(prompts))}
    rows = tokenizer(text=list(place))["input_ids"]
    answers = tokenizer(text=[ANSWER.format(k) for k in range(actions)], add_special_tokens=False)["input_ids"]
    shared = os.path.commonprefix(rows)[: min(map(len, rows)) - 1]
    if model.device.type == "cpu" and model.dtype != torch.float32:  # where BF16 is slow
        model = copy.deepcopy(model).float()
    found, order = np.zeros((len(rows), actions)), sorted(range(len(rows)), key=lambda n: len(rows[n]))
    size = max(1, BATCH_TOKENS // (max(map(len, rows)) - len(shared) + sum(map(len, answers))))
    with evaluating(model), attention_of(model, "eager"):
        for start in with_progress("", range(0, len(order), size), "prompt", len(order), size):
            batch = order[start : start + size]
            ends = [rows[n][len(shared) :] for n in batch]
            found[batch] = tree_probabilities(model, shared, ends, answers, temperature).numpy()
    return found[[place[prompt] for prompt in prompts]]


def tree_probabilities(
    model: PreTrainedModel,
    shared: Sequence[int],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    temperature: float,
) -> torch.Tensor:
    """(B, K) float64: `answers` as token ids after each of B prompts, of which `shared` is the begin and `prompts` the
    rest. One pass: behind a prompt stands what the answers have in common, and behind that each answer's own tail, which
    attends to all before it but not to the other tails."""
    common = os.path.commonprefix(list(answers))
    fed, position, segment, before, target, owner = list(common), [*range(len(common))], [0] * len(common), [], [], []
    for k, answer in enumerate(answers):
        first = len(fed)  # of the tail, without its last token, which nothing follows
        fed += answer[len(common) : -1]
        position += range(len(common), len(answer) - 1)
        segment += [k + 1] * (len(answer) - 1 - len(common))
        # The token before each of the answer's; -1 is the prompt's last one.
        before += [*range(-1, len(common)), *range(first, len(fed))]
        target, owner = target + list(answer), owner + [k] * len(answer)
    lengths = [len(prompt) for prompt in prompts]
    width, device = max(lengths) + len(fed), model.device
    ids, positions = torch.zeros(len(prompts), width, dtype=torch.int64), torch.zeros(len(prompts), width)
    segments = torch.full((len(prompts), width), -1)  # padding attends to padding alone
    for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        ids[row, : n + len(fed)] = torch.tensor([*prompt, *fed])
        positions[row, : n + len(fed)] = torch.tensor([*range(n), *(n + p for p in position)]) + len(shared)
        segments[row, : n + len(fed)] = torch.tensor([0] * n + segment)
    ids, positions, segments = ids.to(device), positions.long().to(device), segments.to(device)
    cache = DynamicCache()  # without a config: every layer keeps all, the masks say how far it looks
    if shared:
        alone = torch.tensor([list(shared)], device=device)
        model.model(input_ids=alone, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(prompts))
    key_position = torch.cat([torch.arange(len(shared), device=device).expand(len(prompts), -1), positions], 1)
    key_segment = torch.cat([segments.new_zeros(len(prompts), len(shared)), segments], 1)
    distance = positions[:, :, None] - key_position[:, None, :]
    allowed = (segments[:, :, None] == key_segment[:, None, :]) | (key_segment == 0)[:, None]
    allowed &= distance >= 0
    masks, lowest = {}, torch.finfo(model.dtype).min
    for kind, window in (("full_attention", width + len(shared)), ("sliding_attention", model.config.sliding_window)):
        seen = allowed & (distance < window)
        masks[kind] = torch.zeros_like(seen, dtype=model.dtype).masked_fill_(~seen, lowest)[:, None]
    out = model.model(
        input_ids=ids, position_ids=positions, attention_mask=masks, past_key_values=cache, use_cache=True
    )
    different = sorted(set(before))
    at = torch.tensor([[n + b for b in different] for n in lengths], device=device)
    states = out.last_hidden_state[torch.arange(len(prompts), device=device)[:, None], at]
    logits, state = model.lm_head(states).double(), [different.index(b) for b in before]
    if temperature == 0:
        logp = torch.where(logits.argmax(-1)[:, state] == torch.tensor(target, device=device), 0.0, -torch.inf)
    else:
        logits = logits / temperature
        logp = logits[:, state, target] - logits.logsumexp(-1)[:, state]
    summed = torch.zeros(len(prompts), len(answers), dtype=torch.float64, device=device)
    return summed.index_add(1, torch.tensor(owner, device=device), logp.double()).exp().cpu()
