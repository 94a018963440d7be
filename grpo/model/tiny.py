# SPDX-License-Identifier: Apache-2.0
"""The tiny model: made once, kept in the user's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from grpo.model.checkpoint import new_directory, require_space, special_token_ids, write_checkpoint, write_json
from grpo.model.gptoss_format import TINY, TINY_SYSTEM, ModelError, chat_template
from grpo.model.tiny_warmup import Recipe, train_tiny
from grpo.preflight.hub import _is_checkpoint, tiny_path


def write_tiny(out: Path, seed: int = 0, force: bool = False, log: Callable[[str], None] | None = None) -> None:
    """Train the tiny model and write its checkpoint to the directory `out`, the figures of `train_tiny` in ``warmup.json``
    beside it. Raises ModelError as `new_directory` does, before the training."""
    require_space(out, 64 * 2**20)
    with new_directory(out, force) as directory:
        tensors, tokenizer, figures = train_tiny(recipe := Recipe(), seed, log)
        ids, template = special_token_ids(tokenizer, TINY.vocab), chat_template(*TINY_SYSTEM)
        write_checkpoint(directory, TINY, ids, lambda name, like: tensors[name], tokenizer, template)
        write_json(directory / "warmup.json", {"seed": seed, "recipe": asdict(recipe), **figures})


def build_tiny(cache_dir: Path | None = None, force: bool = False, log: Callable[[str], None] | None = None) -> Path:
    """The directory of the tiny model (seed 0), in `cache_dir` or the user's cache; trains it on first use, or again if
    `force` is set. Built under a temporary name and renamed: of two processes that build at once both get the one that
    was finished first. Raises ModelError if the directory cannot be written; it says how to choose another."""
    path = tiny_path(cache_dir)
    if not force and _is_checkpoint(path):
        return path
    try:
        write_tiny(path, force=force, log=log)
    except (ModelError, OSError) as error:
        # The rename fails if another process was faster; its model is the same.
        if force or not _is_checkpoint(path):
            where = "XDG_CACHE_HOME=/another/folder keeps the tiny model elsewhere"
            raise ModelError(f"the tiny model cannot be made: {error}. {where}") from error
    return path
