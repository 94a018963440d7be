# SPDX-License-Identifier: Apache-2.0
"""The tiny model's tokenizer and its supervised warm-up."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GptOssConfig, GptOssForCausalLM

from grpo.model.gptoss_format import (
    PAD,
    SPECIAL_TOKENS,
    TINY,
    ModelError,
    Shape,
    config_dict,
    dequantize_mxfp4,
    quantize_mxfp4,
)
from grpo.tasks.tes.dataset import synthetic_rows

# Tiny: tokenizer

NUMBER = r" ?[0-9]{1,3}"  # a token of its own; every integer from 0 to 100 has one, with and without the space before
LARGEST_NUMBER = 100
EFFORTS = ("low", "medium", "high")


def _tokenizer_corpus() -> list[str]:
    """Texts without numbers, to learn words from: what stands between the numbers of rendered prompts and answers."""

    texts = []
    for row in synthetic_rows(TOKENIZER_SEED, 2):
        for effort in EFFORTS:
            texts += [f"Current date: 2025-11-06\n\nReasoning: {effort}", "system", "developer", "user", "assistant"]
        texts += [f"# Instructions\n\n{row['system']}\n\n", row["user"], "final", "[0]", "analysis", "commentary"]
    return [piece for text in texts for piece in re.split(NUMBER, text) if piece]


def make_tokenizer(vocab: int = TINY.vocab) -> Any:
    """A byte-level BPE tokenizer with exactly `vocab` entries, the same for every call.

    Any text survives encoding and decoding, because every byte is in the vocabulary. The merges are those that make the
    numbers, then those learned from the prompts' words. The special tokens come last.

    Returns:
        a `tokenizers.Tokenizer`.

    Raises:
        ModelError: if `vocab` is too small for the numbers or larger than the prompts' words can fill.
    """

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # how byte-level BPE writes a blank
    numbers = [(str(n // 10), str(n % 10)) for n in range(10, LARGEST_NUMBER + 1)]
    numbers += [(space, str(n)) for n in range(LARGEST_NUMBER + 1)]
    words = vocab - len(alphabet) - len(numbers) - len(SPECIAL_TOKENS)
    if words < 0:
        raise ModelError(f"a vocabulary of {vocab} cannot hold all bytes, numbers and special tokens")

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.train_from_iterator(
        _tokenizer_corpus(),
        trainers.BpeTrainer(vocab_size=len(alphabet) + words, initial_alphabet=alphabet, show_progress=False),
    )
    learned = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    if len(learned) < words:
        raise ModelError(f"the prompts give {len(learned)} words, a vocabulary of {vocab} needs {words}")
    merges = numbers + learned
    entries = alphabet + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE(vocab={entry: n for n, entry in enumerate(entries)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(NUMBER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


# Tiny: supervised warm-up

# Seeds of make_dataset.synthetic_rows, beyond those that data files use.
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


def _encode_rows(tokenizer: Any, rows: list[dict[str, Any]], seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """Token ids of each row's whole conversation up to ``<|return|>``, and rewards ``[rows, actions]``.

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
    rewards = torch.tensor([[row[f"reward_action_{k}"] for k in range(ACTIONS)] for row in rows])
    return ids, rewards


def _answer_logits(model: Any, batch: list[list[int]], answer: int, pad: int) -> torch.Tensor:
    """Logits ``[rows, answer, vocab]`` that predict the last `answer` tokens of each sequence; padding on the left."""

    length = max(map(len, batch))
    ids = torch.tensor([[pad] * (length - len(row)) + row for row in batch])
    mask = (torch.arange(length) >= torch.tensor([[length - len(row)] for row in batch])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, -answer - 1 : -1])


def _initial_numbers(model: Any, tokenizer: Any) -> None:
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
            weight[tokenizer.token_to_id(f"\u0120{n}")] += table[n]


def initial_heads(model: Any, distances: Sequence[Sequence[int]], sharpness: float = 5.0) -> None:
    """Let the heads of the first sliding layers look a fixed number of tokens back, through the biases of q and k.

    A number must know which word stands before it before anything can find it; from random weights, heads that do that
    are the slowest thing to appear. Both biases lie in the fast-turning pairs of RoPE, the key's at angle 0, the query's
    turned back by the distance: their product peaks where the distance is that.

    Args:
        distances: tokens back of each head, for one sliding layer after the other; fewer than heads are repeated.
        sharpness: how far the logit falls one token beside the peak.
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
    """Figures of a policy that gives the actions of N rows the probabilities `p`, ``[N, actions]``, as `rewards`.

    Returns:
        ``parse_rate``: probability of an answer ``[k]`` in the final channel with k from 0 to 3;
        ``reward``: mean reward, an unparseable answer counting 0; ``greedy``: of the likeliest action;
        ``random``, ``best_constant``, ``oracle``: of reference policies on the same rows.
    """
    return {
        "parse_rate": p.sum(-1).mean().item(),
        "reward": (p * rewards).sum(-1).mean().item(),
        "greedy": rewards.gather(1, p.argmax(-1, keepdim=True)).mean().item(),
        "random": rewards.mean().item(),
        "best_constant": rewards.mean(0).max().item(),
        "oracle": rewards.amax(-1).mean().item(),
    }


def _figures(model: Any, ids: list[list[int]], rewards: torch.Tensor, answer: dict[str, Any]) -> dict[str, float]:
    """What sampling at temperature 1 gives in expectation, exactly: probabilities instead of samples.

    Returns: those of `answer_figures`.
    """

    fixed, place = answer["fixed"], answer["place"]
    chosen = []
    with torch.no_grad():
        for start in range(0, len(ids), 100):
            batch = ids[start : start + 100]
            logp = _answer_logits(model, batch, len(answer["ids"]), answer["pad"]).float().log_softmax(-1)
            format_logp = logp[:, fixed, torch.tensor(answer["ids"])[fixed]].sum(-1)
            # The tokens behind the action are taken from the run with action 0; the others' differ by a hair.
            chosen.append((logp[:, place, answer["actions"]] + format_logp.unsqueeze(-1)).exp())
    return answer_figures(torch.cat(chosen), rewards)


def _expert_matrices(model: Any) -> Iterator[tuple[str, Any]]:
    for n, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            yield f"model.layers.{n}.mlp.experts.{name}", getattr(layer.mlp.experts, name)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train_tiny(
    shape: Shape = TINY, recipe: Recipe | None = None, seed: int = 0, log: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, torch.Tensor], Any, dict[str, float]]:
    """Train the tiny model on the CPU in float32; the same seed gives the same model on the same machine.

    One thread only: tensors this small gain little from a second one, threads that wait for each other on busy cores
    take minutes instead of seconds, and sums do not depend on the number of cores.

    Returns:
        tensors as the checkpoint stores them, by name (BF16, and uint8 for the experts); the tokenizer; figures of
        `_figures` for the weights as stored, on rows of their own.
    """

    recipe = recipe or Recipe()
    tokenizer = make_tokenizer(shape.vocab)
    token_ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    answer_ids = tokenizer.encode(f"{ANSWER_BEFORE}0{ANSWER_AFTER}").ids
    place = len(tokenizer.encode(ANSWER_BEFORE).ids)
    answer = {
        "ids": answer_ids,
        "place": place,
        "fixed": [n for n in range(len(answer_ids)) if n != place],
        "actions": [tokenizer.token_to_id(str(k)) for k in range(ACTIONS)],
        "pad": token_ids[PAD],
    }
    rows = synthetic_rows(WARMUP_SEED, recipe.windows)
    rows += [row for row in rows if is_short(row)] * (recipe.short_weight - 1)
    ids, rewards = _encode_rows(tokenizer, rows, WARMUP_SEED)
    probe_ids, probe_rewards = _encode_rows(tokenizer, synthetic_rows(PROBE_SEED, recipe.probe_windows), PROBE_SEED)

    config = config_dict(shape, token_ids)
    config.pop("quantization_config")
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        model = GptOssForCausalLM._from_config(
            GptOssConfig.from_dict(config), dtype=torch.float32, attn_implementation="eager"
        )
        _initial_numbers(model, tokenizer)
        initial_heads(model, TINY_DISTANCES)
        model.train()
        shuffle = torch.Generator().manual_seed(seed)

        def phase(steps: int, lr: float, targets: torch.Tensor, name: str) -> None:
            parameters = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda n: min(1.0, (n + 1) / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * n / steps)) / 2)
            )
            order: list[int] = []
            for step in range(steps):
                if len(order) < recipe.batch:
                    order = torch.randperm(len(ids), generator=shuffle).tolist()
                picked = [order.pop() for _ in range(recipe.batch)]
                # The action's token is visible to the tokens behind it: show them all four.
                batch = []
                for row, k in zip(picked, torch.randint(ACTIONS, (recipe.batch,), generator=shuffle), strict=True):
                    batch.append(list(ids[row]))
                    batch[-1][place - len(answer_ids)] = answer["actions"][k]
                logp = _answer_logits(model, batch, len(answer_ids), answer["pad"]).log_softmax(-1)
                wanted = targets[picked]
                action_loss = -(wanted * logp[:, place, answer["actions"]]).sum(-1).mean()
                format_logp = logp[:, answer["fixed"], torch.tensor(answer_ids)[answer["fixed"]]]
                loss = action_loss - recipe.format_weight * format_logp.sum(-1).mean()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
                if (step + 1) % 50 == 0:
                    entropy = -(wanted * wanted.clamp(min=1e-9).log()).sum(-1).mean()
                    log(
                        f"{name} {step + 1}/{steps}: loss {loss.item():.3f}, "
                        f"KL of the action {(action_loss - entropy).item():.3f}"
                    )

        phase(recipe.read_steps, recipe.lr, rewards, "read")
        packed = {}
        with torch.no_grad():
            for name, weight in _expert_matrices(model):
                blocks, scales = quantize_mxfp4(weight.transpose(1, 2))
                weight.copy_(dequantize_mxfp4(blocks, scales).transpose(1, 2))
                weight.requires_grad_(False)
                packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        soft = rewards.clamp(min=1e-30) ** recipe.sharpness
        soft /= soft.sum(-1, keepdim=True)
        phase(recipe.soften_steps, recipe.soften_lr, soft, "soften")

        model.eval()
        tensors = {
            name: tensor.detach().to(torch.bfloat16)
            for name, tensor in model.state_dict().items()
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        }
        tensors |= packed
        figures = _figures(model.to(torch.bfloat16), probe_ids, probe_rewards, answer)
    return tensors, tokenizer, figures
