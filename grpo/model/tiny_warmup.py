# SPDX-License-Identifier: Apache-2.0
"""The tiny model's tokenizer and its supervised warm-up."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GptOssConfig, GptOssForCausalLM

from grpo.model.gptoss_format import PAD, SPECIAL_TOKENS, TINY, ModelError, config_dict, quantize_experts
from grpo.tasks.tes.dataset import synthetic_rows

# Tokenizer

NUMBER = r" ?[0-9]{1,3}"  # a token of its own; every integer from 0 to 100 has one, with and without the space before
LARGEST_NUMBER = 100
BLANK = "\u0120"  # how byte-level BPE writes it
EFFORTS = ("low", "medium", "high")


def _tokenizer_corpus() -> list[str]:
    """Texts without numbers, to learn words from: what stands between the numbers of rendered prompts and answers."""
    texts = []
    for row in synthetic_rows(TOKENIZER_SEED, 2):
        for effort in EFFORTS:
            texts += [f"Current date: 2025-11-06\n\nReasoning: {effort}", "system", "developer", "user", "assistant"]
        texts += [f"# Instructions\n\n{row['system']}\n\n", row["user"], "final", "[0]", "analysis", "commentary"]
    return [piece for text in texts for piece in re.split(NUMBER, text) if piece]


def make_tokenizer(vocab: int = TINY.vocab) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab` entries, the same for every call. The merges are those that make the
    numbers, then those learned from the prompts' words; the special tokens come last. Raises ModelError if `vocab` is too
    small for the numbers or larger than the prompts' words can fill."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = [(str(n // 10), str(n % 10)) for n in range(10, LARGEST_NUMBER + 1)]
    numbers += [(BLANK, str(n)) for n in range(LARGEST_NUMBER + 1)]
    words = vocab - len(alphabet) - len(numbers) - len(SPECIAL_TOKENS)
    if words < 0:
        raise ModelError(f"a vocabulary of {vocab} cannot hold all bytes, numbers and special tokens")

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    sizes = {"vocab_size": len(alphabet) + words, "initial_alphabet": alphabet}
    learner.train_from_iterator(_tokenizer_corpus(), trainers.BpeTrainer(**sizes, show_progress=False))
    learned = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    if len(learned) < words:
        raise ModelError(f"the prompts give {len(learned)} words, a vocabulary of {vocab} needs {words}")
    merges = numbers + learned
    entries = alphabet + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE(vocab={entry: n for n, entry in enumerate(entries)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(NUMBER), "isolated"), as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


# Supervised warm-up

# Seeds of synthetic_rows, beyond those that data files use.
TOKENIZER_SEED, WARMUP_SEED, PROBE_SEED = 10_001, 10_002, 10_003
TINY_DISTANCES = ((1, 2, 3, 4),)  # tokens back, one for each head of the sliding layer
ANSWER_BEFORE, ANSWER_AFTER = "<|channel|>final<|message|>[", "]<|return|>"
ACTIONS = 4
FIXED_DATE = "2025-04-07"  # warm-up prompts draw their dates around it


@dataclass(frozen=True)
class Recipe:
    """The warm-up of the tiny model; changing anything changes the model, and with it `recipe_hash`."""

    windows: int = 360  # of synthetic rows, 30 each
    probe_windows: int = 20
    short_weight: int = 9  # how often a row is drawn whose storage cannot carry the load: rare, but costly to misread
    read_steps: int = 300  # phase 1: all weights, targets as sharp as the rewards: learn to read the numbers
    soften_steps: int = 100  # phase 2: experts frozen in 4 bit, targets flattened: become undecided
    batch: int = 32
    lr: float = 4e-3
    soften_lr: float = 1e-3
    sharpness: float = 0.25  # phase 2 targets are the rewards to this power: a softmax of the values, 4 times as hot
    format_weight: float = 0.5  # of the loss on the fixed tokens of the answer against the loss on the action


def is_short(row: dict[str, Any]) -> bool:
    """Whether the storage cannot carry the hour's load in a compact row, so that output 0 leaves load unserved."""
    return " short 0 " not in row["user"]


@dataclass(frozen=True)
class Answer:
    """The tokens of ``ANSWER_BEFORE``, an action, ``ANSWER_AFTER``."""

    ids: list[int]  # with action 0
    action_at: int  # index of the action among them
    actions: list[int]  # the token of each action
    pad: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Answer:
        before = tokenizer.encode(ANSWER_BEFORE).ids
        actions = [tokenizer.token_to_id(str(k)) for k in range(ACTIONS)]
        ids = tokenizer.encode(f"{ANSWER_BEFORE}0{ANSWER_AFTER}").ids
        return cls(ids, len(before), actions, tokenizer.token_to_id(PAD))

    def log_probs(self, model: GptOssForCausalLM, batch: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each action (B, ACTIONS) and of the tokens around it (B, answer - 1), for B whole conversations."""
        length = max(map(len, batch))
        ids = torch.tensor([[self.pad] * (length - len(row)) + list(row) for row in batch])
        mask = (torch.arange(length) >= torch.tensor([[length - len(row)] for row in batch])).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        states = out.last_hidden_state[:, -len(self.ids) - 1 : -1]
        logp = model.lm_head(states).float().log_softmax(-1)  # (B, answer, vocab)
        fixed = [n for n in range(len(self.ids)) if n != self.action_at]
        return logp[:, self.action_at, self.actions], logp[:, fixed, torch.tensor(self.ids)[fixed]]


def encode_rows(tokenizer: Tokenizer, rows: list[dict[str, Any]], seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """Token ids of each row's whole conversation up to ``<|return|>``, and rewards (N, ACTIONS).

    The action's own token is a placeholder (action 0). Dates and reasoning efforts vary, so that neither matters.
    """
    draw = random.Random(seed)
    texts = []
    for row in rows:
        day = date.fromisoformat(FIXED_DATE) + timedelta(days=draw.randrange(1000))
        texts.append(
            f"<|start|>system<|message|>Current date: {day}\n\nReasoning: {draw.choice(EFFORTS)}<|end|>"
            f"<|start|>developer<|message|># Instructions\n\n{row['system']}\n\n<|end|>"
            f"<|start|>user<|message|>{row['user']}<|end|><|start|>assistant{ANSWER_BEFORE}0{ANSWER_AFTER}"
        )
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    return ids, torch.tensor([[row[f"reward_action_{k}"] for k in range(ACTIONS)] for row in rows])


def _initial_numbers(model: GptOssForCausalLM, tokenizer: Tokenizer) -> None:
    """Give number tokens embeddings that vary smoothly with the number, the same with and without a blank before it.

    A few seconds of training see each number a few dozen times: too few to learn from nothing that 37 lies by 38.
    """
    width = model.config.hidden_size
    number = torch.arange(LARGEST_NUMBER + 1).unsqueeze(1)
    value = number / LARGEST_NUMBER
    waves = torch.arange(1, 7) * math.pi
    # The logarithm tells 0 from 1 and 2: whether anything is short matters more than how much.
    small = number.log1p() / math.log(LARGEST_NUMBER + 1) - 0.5
    features = torch.cat((value - 0.5, (value - 0.5).abs(), (value * waves).sin(), (value * waves).cos(), small), dim=1)
    table = features @ (torch.randn(features.shape[1], width) * 0.1)
    weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for n in range(LARGEST_NUMBER + 1):
            weight[tokenizer.token_to_id(str(n))] += table[n]
            weight[tokenizer.token_to_id(f"{BLANK}{n}")] += table[n]


def initial_heads(model: GptOssForCausalLM, distances: Sequence[Sequence[int]], sharpness: float = 5.0) -> None:
    """Let the heads of the first sliding layers look back by `distances`, the tokens of each head, layer after layer (fewer
    than heads are repeated). `sharpness` is how far the logit falls one token beside the peak.

    A number must know which word stands before it before anything can find it; from random weights, heads that do that
    are the slowest thing to appear. The biases of q and k lie in the fast-turning pairs of RoPE, the key's at angle 0, the
    query's turned back by the distance: their product peaks where the distance is that.
    """
    rotary, size = model.model.rotary_emb, model.config.head_dim
    pairs = [n for n in range(size // 2) if rotary.inv_freq[n] > 0.08]
    turns = rotary.inv_freq[pairs].float()
    fall = (1 - turns.cos()).sum() * rotary.attention_scaling**2 / math.sqrt(size)
    length = (sharpness / fall).sqrt()
    with torch.no_grad():
        for layer, back in zip(model.model.layers[0::2], distances, strict=False):
            key = layer.self_attn.k_proj.bias.view(-1, size)
            query = layer.self_attn.q_proj.bias.view(-1, size)
            key[:, pairs] = length
            for n in range(len(query)):
                angle = -back[n % len(back)] * turns
                query[n, pairs] = length * angle.cos()
                query[n, [p + size // 2 for p in pairs]] = length * angle.sin()


def answer_figures(p: torch.Tensor, rewards: torch.Tensor) -> dict[str, float]:
    """Figures of a policy that gives the actions of N rows the probabilities `p`, (N, actions), as `rewards`.

    ``parse_rate`` is the probability of an answer ``[k]`` in the final channel; ``reward`` the mean reward, an unparseable
    answer counting 0; ``greedy`` that of the likeliest action; ``random``, ``best_constant`` and ``oracle`` those of
    reference policies on the same rows.
    """
    return {
        "parse_rate": p.sum(-1).mean().item(),
        "reward": (p * rewards).sum(-1).mean().item(),
        "greedy": rewards.gather(1, p.argmax(-1, keepdim=True)).mean().item(),
        "random": rewards.mean().item(),
        "best_constant": rewards.mean(0).max().item(),
        "oracle": rewards.amax(-1).mean().item(),
    }


def action_probabilities(model: GptOssForCausalLM, ids: list[list[int]], answer: Answer) -> torch.Tensor:
    """(N, ACTIONS): what sampling at temperature 1 gives in expectation, exactly."""
    chosen = []
    with torch.no_grad():
        for start in range(0, len(ids), 100):
            actions, around = answer.log_probs(model, ids[start : start + 100])
            # The tokens behind the action are taken from the run with action 0; the others' differ by a hair.
            chosen.append((actions + around.sum(-1, keepdim=True)).exp())
    return torch.cat(chosen)


def train_phase(model: torch.nn.Module, steps: int, lr: float, loss_of: Callable[[int], torch.Tensor]) -> None:
    """Train what of `model` has a gradient with AdamW; `loss_of(step)` is the loss of that step's batch. The learning rate
    rises over 20 steps to `lr` and falls along a cosine to a twentieth of it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    factor = lambda n: min(1.0, (n + 1) / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * n / steps)) / 2)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def shuffled(count: int, size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Endless batches of `size` indices below `count`; what does not fill a batch is left out until the next shuffle."""
    order: list[int] = []
    while True:
        if len(order) < size:
            order = torch.randperm(count, generator=generator).tolist()
        yield [order.pop() for _ in range(size)]


def train_tiny(
    recipe: Recipe, seed: int = 0, log: Callable[[str], None] | None = None
) -> tuple[Mapping[str, torch.Tensor], Tokenizer, dict[str, float]]:
    """Train the tiny model on the CPU in float32; the same seed gives the same model on the same machine.

    Returns tensors as the checkpoint stores them, by name (BF16, and uint8 for the experts); the tokenizer; the
    `answer_figures` of the weights as stored, on rows of their own.
    """
    tokenizer = make_tokenizer()
    answer = Answer.of(tokenizer)
    rows = synthetic_rows(WARMUP_SEED, recipe.windows)
    rows += [row for row in rows if is_short(row)] * (recipe.short_weight - 1)
    ids, rewards = encode_rows(tokenizer, rows, WARMUP_SEED)
    probe_ids, probe_rewards = encode_rows(tokenizer, synthetic_rows(PROBE_SEED, recipe.probe_windows), PROBE_SEED)
    config = config_dict(TINY, {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS})
    config.pop("quantization_config")
    with torch.random.fork_rng(devices=[]), contextlib.ExitStack() as stack:
        # Tensors this small gain little from a second thread, threads that wait for each other on busy cores take minutes
        # instead of seconds, and sums do not depend on the number of cores.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = GptOssForCausalLM._from_config(GptOssConfig.from_dict(config), **options)
        _initial_numbers(model, tokenizer)
        initial_heads(model, TINY_DISTANCES)
        model.train()
        shuffle = torch.Generator().manual_seed(seed)

        def phase(name: str, steps: int, lr: float, targets: torch.Tensor) -> None:
            drawn = shuffled(len(ids), recipe.batch, shuffle)

            def loss_of(step: int) -> torch.Tensor:
                picked = next(drawn)
                batch = [list(ids[row]) for row in picked]
                # The action's token is visible to the tokens behind it: show them all four.
                for row, k in zip(batch, torch.randint(ACTIONS, (recipe.batch,), generator=shuffle), strict=True):
                    row[answer.action_at - len(answer.ids)] = answer.actions[k]
                actions, around = answer.log_probs(model, batch)
                action_loss = -(targets[picked] * actions).sum(-1).mean()
                loss = action_loss - recipe.format_weight * around.sum(-1).mean()
                if log and (step + 1) % 50 == 0:
                    log(f"{name} {step + 1}/{steps}: loss {loss.item():.3f}")
                return loss

            train_phase(model, steps, lr, loss_of)

        phase("read", recipe.read_steps, recipe.lr, rewards)
        quantized = quantize_experts(model)
        soft = rewards.clamp(min=1e-30) ** recipe.sharpness
        phase("soften", recipe.soften_steps, recipe.soften_lr, soft / soft.sum(-1, keepdim=True))

        state = {name: tensor for name, tensor in model.state_dict().items() if f"{name}_blocks" not in quantized}
        tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in state.items()} | quantized
        p = action_probabilities(model.eval().to(torch.bfloat16), probe_ids, answer)
    return tensors, tokenizer, answer_figures(p, probe_rewards)
