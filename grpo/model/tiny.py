# SPDX-License-Identifier: Apache-2.0
"""The tiny model that comes with the project (data/tiny), and how it was made."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from grpo.model.checkpoint import new_directory, require_space, write_json
from grpo.model.gptoss_format import SPECIAL_TOKENS, TINY, ModelError
from grpo.model.warmup import Log, Recipe, write_warmed_up
from grpo.model.warmup_rows import EFFORTS
from grpo.tasks.tes.dataset import synthetic_rows

NUMBER = r" ?[0-9]{1,3}"  # a token of its own; every integer from 0 to 100 has one, with and without the space before
LARGEST_NUMBER = 100
BLANK = "\u0120"  # a space in the alphabet of byte-level BPE
TOKENIZER_SEED = 10_001  # of synthetic_rows, beyond those that data files use
RECIPE = Recipe(
    TINY, "compact", windows=1200, probe_windows=20, seconds=math.inf, steps=1200, batch=32, lr=4e-3,
    distances=((1, 2, 3, 4), (0,)),
)  # fmt: skip


def _tokenizer_corpus() -> list[str]:
    """The texts between the numbers of rendered prompts and answers, from which words are learned."""
    texts = []
    for row in synthetic_rows(TOKENIZER_SEED, 2):
        for effort in EFFORTS:
            texts += [f"Current date: 2025-11-06\n\nReasoning: {effort}", "system", "developer", "user", "assistant"]
        texts += [f"# Instructions\n\n{row['system']}\n\n", row["user"], "final", "[0]", "analysis", "commentary"]
    return [piece for text in texts for piece in re.split(NUMBER, text) if piece]


def make_tokenizer(vocab: int = TINY.vocab) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab` entries, the same for every call.

    Merges that make the numbers come first, then those learned from the prompts' words; the special tokens come last.
    Raises ModelError if `vocab` is too small for the numbers or larger than the prompts' words can fill.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = [(str(n // 10), str(n % 10)) for n in range(10, LARGEST_NUMBER + 1)]
    numbers += [(BLANK, str(n)) for n in range(LARGEST_NUMBER + 1)]
    words = vocab - len(alphabet) - len(numbers) - len(SPECIAL_TOKENS)
    if words < 0:
        raise ModelError(f"a vocabulary of {vocab} cannot hold all bytes, numbers and special tokens")

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + words, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(_tokenizer_corpus(), trainer)
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


def write_tiny(out: Path, recipe: Recipe = RECIPE, force: bool = False, seed: int = 0, log: Log = print) -> None:
    """Warm up the tiny model on the CPU and write its checkpoint, with figures in warmup.json, to the folder `out`.

    The same seed gives the same model on the same machine. Raises ModelError before training, as `new_directory` does.
    """
    require_space(out, 64 * 2**20)
    with new_directory(out, force) as directory, torch.random.fork_rng([]):
        stages, _ = write_warmed_up(directory, recipe, make_tokenizer(recipe.shape.vocab), "cpu", seed, log)
        write_json(directory / "warmup.json", {"seed": seed, "steps": recipe.steps, **stages["stored"]})
