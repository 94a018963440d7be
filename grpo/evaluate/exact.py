# SPDX-License-Identifier: Apache-2.0
"""Exact probabilities of a small model's answers, instead of samples of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from grpo.data.prompts import ANSWER_AFTER, ANSWER_BEFORE
from grpo.learn.expected_reward import action_tokens
from grpo.model.attention import attention_of
from grpo.model.load import evaluating
from grpo.phases import with_progress

ANSWER = ANSWER_BEFORE + "{}" + ANSWER_AFTER
BATCH_TOKENS = 4096  # that go through the model at once


Chooser = Callable[[Sequence[Sequence[int]], float, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


def direct_probabilities(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], actions: int, temperature: float, choose: Chooser
) -> np.ndarray:
    """(N, K): the probability of the token of each of K `actions` behind each of N prompts that end in ANSWER_BEFORE
    (DIRECT_ANSWERS); at a temperature of 0 the likeliest token's is 1. What is left of 1 names no action. Equal prompts
    are asked once. `choose(prompt_ids, temperature, tokens)` is `choose_tokens` of a model."""
    position = {prompt: n for n, prompt in enumerate(dict.fromkeys(prompts))}
    rows = tokenizer(text=list(position))["input_ids"]
    _, probabilities = choose(rows, temperature, action_tokens(tokenizer, actions))
    return probabilities.double().cpu().numpy()[[position[prompt] for prompt in prompts]]


@torch.no_grad()
def answer_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], temperature: float, actions: int
) -> np.ndarray:
    """(N, K): the probability of ANSWER for each of K `actions` after each of N prompts, sampled at `temperature`; at 0
    the greedy answer's is 1. What is left of 1 is no such answer. `model` is a gpt-oss, its adapter inside or not; on a
    CPU it is computed in float32. Equal prompts are asked once, and what all of them begin with is computed once."""
    position = {prompt: n for n, prompt in enumerate(dict.fromkeys(prompts))}
    rows = tokenizer(text=list(position))["input_ids"]
    answers = tokenizer(text=[ANSWER.format(k) for k in range(actions)], add_special_tokens=False)["input_ids"]
    shared = os.path.commonprefix(rows)[: min(map(len, rows)) - 1]
    if model.device.type == "cpu" and model.dtype != torch.float32:  # where BF16 is slow
        model = copy.deepcopy(model).float()
    probabilities, order = np.zeros((len(rows), actions)), sorted(range(len(rows)), key=lambda n: len(rows[n]))
    size = max(1, BATCH_TOKENS // (max(map(len, rows)) - len(shared) + sum(map(len, answers))))
    with evaluating(model), attention_of(model, "eager"):
        for start in with_progress("", range(0, len(order), size), "prompt", len(order), size):
            batch = order[start : start + size]
            ends = [rows[n][len(shared) :] for n in batch]
            probabilities[batch] = tree_probabilities(model, shared, ends, answers, temperature).numpy()
    return probabilities[[position[prompt] for prompt in prompts]]


@dataclass(frozen=True)
class AnswerTree:
    """Answers as one sequence: what they have in common, then each one's own tail without its last token, which nothing
    follows. Lists by token fed, then by token predicted."""

    fed: list[int]
    position: list[int]  # of a token fed, counted from the end of the prompt
    segment: list[int]  # 0: in common; k + 1: the tail of answer k
    before: list[int]  # index in `fed` of the token before the predicted one; -1 is the prompt's last one
    target: list[int]  # the predicted token
    owner: list[int]  # the answer that it is of


def answer_tree(answers: Sequence[list[int]]) -> AnswerTree:
    """The tree of answers given as token ids."""
    common = list(os.path.commonprefix(list(answers)))
    count = len(common)
    tree = AnswerTree(common[:], [*range(count)], [0] * count, [], [], [])
    for k, answer in enumerate(answers):
        first = len(tree.fed)
        tree.fed.extend(answer[count:-1])
        tree.position.extend(range(count, len(answer) - 1))
        tree.segment.extend([k + 1] * (len(answer) - 1 - count))
        tree.before.extend([*range(-1, count), *range(first, len(tree.fed))])
        tree.target.extend(answer)
        tree.owner.extend([k] * len(answer))
    return tree


def tree_probabilities(
    model: PreTrainedModel,
    shared: Sequence[int],
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    temperature: float,
) -> torch.Tensor:
    """(B, K) float64: the probabilities of K `answers` after each of B prompts, all as token ids. `shared` is the begin
    of every prompt and `prompts` the rest. One pass after the shared prefix: the answers' tree follows each
    prompt, and each answer attends to the prompt and its own tokens, not to other answers."""
    tree, lengths, device = answer_tree(answers), [len(prompt) for prompt in prompts], model.device
    width = max(lengths) + len(tree.fed)
    shape = len(prompts), width
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    segments = torch.full(shape, -1)  # padding attends to padding alone
    for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        ids[row, : n + len(tree.fed)] = torch.tensor([*prompt, *tree.fed])
        positions[row, : n + len(tree.fed)] = torch.tensor([*range(n), *(n + p for p in tree.position)]) + len(shared)
        segments[row, : n + len(tree.fed)] = torch.tensor([0] * n + tree.segment)
    ids, positions, segments = ids.to(device), positions.to(device), segments.to(device)
    cache = DynamicCache()  # without a config: every layer keeps all, and the masks say how far a layer looks
    if shared:
        model.model(input_ids=torch.tensor([list(shared)], device=device), past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(prompts))
    masks = attention_masks(model, positions, segments, len(shared))
    out = model.model(
        input_ids=ids, position_ids=positions, attention_mask=masks, past_key_values=cache, use_cache=True
    )
    different = sorted(set(tree.before))
    index = torch.tensor([[n + b for b in different] for n in lengths], device=device)
    states = out.last_hidden_state[torch.arange(len(prompts), device=device)[:, None], index]
    logits, state = model.lm_head(states).double(), [different.index(b) for b in tree.before]
    target, owner = torch.tensor(tree.target, device=device), torch.tensor(tree.owner, device=device)
    if temperature == 0:
        logps = torch.where(logits.argmax(-1)[:, state] == target, 0.0, -torch.inf).double()
    else:
        logits = logits / temperature
        logps = logits[:, state, target] - logits.logsumexp(-1)[:, state]
    sums = torch.zeros(len(prompts), len(answers), dtype=torch.float64, device=device)
    return sums.index_add(1, owner, logps).exp().cpu()


def attention_masks(
    model: PreTrainedModel, positions: torch.Tensor, segments: torch.Tensor, shared: int
) -> dict[str, torch.Tensor]:
    """Additive masks (B, 1, T, shared + T) by kind of layer, for tokens at `positions` (B, T) of `segments` (B, T)
    behind `shared` cached ones."""
    rows = len(positions)
    key_position = torch.cat([torch.arange(shared, device=positions.device).expand(rows, -1), positions], 1)
    key_segment = torch.cat([segments.new_zeros(rows, shared), segments], 1)
    distance = positions[:, :, None] - key_position[:, None, :]
    allowed = (segments[:, :, None] == key_segment[:, None, :]) | (key_segment == 0)[:, None]
    allowed &= distance >= 0
    masks, lowest = {}, torch.finfo(model.dtype).min
    windows = {"full_attention": key_position.shape[1], "sliding_attention": model.config.sliding_window}
    for kind, window in windows.items():
        seen = allowed & (distance < window)
        masks[kind] = torch.zeros_like(seen, dtype=model.dtype).masked_fill_(~seen, lowest)[:, None]
    return masks
