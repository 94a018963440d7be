# SPDX-License-Identifier: Apache-2.0
"""Exact probabilities of a small model's answers, instead of samples of them."""

import os
from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from grpo.harmony import ANSWER_AFTER, ANSWER_BEFORE
from grpo.model.attention import using_attention
from grpo.model.load import evaluating
from grpo.phases import with_progress

ANSWER_TEXT = ANSWER_BEFORE + "{}" + ANSWER_AFTER
BATCH_TOKENS = 4096  # tokens that go through the model at once


@torch.no_grad()
def answer_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], temperature: float, actions: int
) -> np.ndarray:
    """(N, K): the probability of ANSWER_TEXT for each of K `actions` after each of N prompts, at a sampling
    `temperature`; at 0 the greedy answer has probability 1. A row may sum to less than 1, as there are other answers.
    `model` is a gpt-oss with or without an adapter. Equal prompts are computed once."""
    position = {prompt: n for n, prompt in enumerate(dict.fromkeys(prompts))}
    rows = tokenizer(text=list(position))["input_ids"]
    answers = tokenizer(text=[ANSWER_TEXT.format(k) for k in range(actions)], add_special_tokens=False)["input_ids"]
    probabilities, order = np.zeros((len(rows), actions)), sorted(range(len(rows)), key=lambda n: len(rows[n]))
    size = max(1, BATCH_TOKENS // (max(map(len, rows)) + sum(map(len, answers))))
    with evaluating(model), using_attention(model, "eager"):
        for start in with_progress("", range(0, len(order), size), "prompt", len(order), size):
            batch = order[start : start + size]
            logps = answer_logps(model, [rows[n] for n in batch], answers, temperature)
            probabilities[batch] = logps.exp().cpu().numpy()
    return probabilities[[position[prompt] for prompt in prompts]]


def answer_logps(
    model: PreTrainedModel, prompts: Sequence[list[int]], answers: Sequence[list[int]], temperature: float
) -> torch.Tensor:
    """(B, K) float64: the log-probabilities of K `answers` after each of B prompts, all as token ids. Prompt and
    common prefix of the answers go through the model once; their tails follow in a second pass with its cache."""
    common, device = list(os.path.commonprefix(list(answers))), model.device
    tails, width = [answer[len(common) :] for answer in answers], max(map(len, prompts)) + len(common)
    begins = [[*prompt, *common] for prompt in prompts]
    ids = torch.tensor([[0] * (width - len(begin)) + begin for begin in begins], device=device)
    mask = torch.tensor([[0] * (width - len(begin)) + [1] * len(begin) for begin in begins], device=device)
    cache = DynamicCache()  # Without a config every layer caches all tokens; the masks apply the sliding window.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    logps = token_logps(model, out.last_hidden_state[:, -len(common) - 1 :], temperature)  # (B, C + 1, V)
    prefix = logps[:, range(len(common)), common].sum(1, keepdim=True)
    sums = prefix + logps[:, -1, [tail[0] for tail in tails]]
    cache.batch_repeat_interleave(len(tails))
    longest = max(map(len, tails))
    ids = torch.tensor([tail + [0] * (longest - len(tail)) for tail in tails], device=device).repeat(len(prompts), 1)
    lengths = mask.sum(1).repeat_interleave(len(tails))
    mask = torch.cat([mask.repeat_interleave(len(tails), 0), mask.new_ones(len(ids), longest)], 1)
    positions = lengths[:, None] + torch.arange(longest, device=device)
    out = model.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    logps = token_logps(model, out.last_hidden_state, temperature).unflatten(0, sums.shape)  # (B, K, T, V)
    for k, tail in enumerate(tails):
        sums[:, k] += logps[:, k, range(len(tail) - 1), tail[1:]].sum(1)
    return sums


def token_logps(model: PreTrainedModel, states: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities (B, T, V) after hidden states (B, T, D); at temperature 0 that of the likeliest token is 0."""
    logits = model.lm_head(states).double()
    if temperature == 0:
        likeliest = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter(-1, likeliest, 0.0)
    return (logits / temperature).log_softmax(-1)
