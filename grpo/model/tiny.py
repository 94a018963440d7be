# SPDX-License-Identifier: Apache-2.0
"""The tiny model: made once, kept in the user's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from grpo.model.gptoss_format import (
    SPECIAL_TOKENS,
    TINY,
    TINY_SYSTEM,
    ModelError,
    chat_template,
    config_dict,
    generation_config_dict,
    tensor_specs,
    tokenizer_config_dict,
    write_json,
    write_weights,
)
from grpo.model.random_weights import check_checkpoint, new_directory, require_space
from grpo.model.tiny_warmup import Recipe, train_tiny
from grpo.preflight.hub import _is_checkpoint, tiny_path


def write_tiny(
    out: Path,
    seed: int = 0,
    force: bool = False,
    recipe: Recipe | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, float]:
    """Train the tiny model and write its checkpoint to the directory `out`; returns the figures of `train_tiny`.

    The figures are kept in ``warmup.json`` beside the weights.

    Raises:
        ModelError: see `new_directory`; the target is refused before the training, not after it.
    """
    require_space(out, 64 * 2**20)
    with new_directory(out, force) as directory:
        tensors, tokenizer, figures = train_tiny(TINY, recipe, seed, log)
        write_weights(directory, tensor_specs(TINY), lambda spec: tensors[spec.name])
        token_ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        write_json(directory / "config.json", config_dict(TINY, token_ids))
        write_json(directory / "generation_config.json", generation_config_dict(token_ids))
        write_json(directory / "tokenizer_config.json", tokenizer_config_dict())
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(chat_template(*TINY_SYSTEM), encoding="utf-8")
        write_json(directory / "warmup.json", {"seed": seed, "recipe": asdict(recipe or Recipe()), **figures})
        check_checkpoint(directory)
    return figures


def build_tiny(
    cache_dir: Path | None = None, force: bool = False, log: Callable[[str], None] = lambda line: None
) -> Path:
    """The directory of the tiny model (seed 0); trains it on first use and reuses it afterwards.

    Built under a temporary name and renamed: an interrupted build leaves no model behind, and of two processes that
    build at once both get the one that was finished first.

    Args:
        cache_dir: instead of the user's cache directory.
        force: build anew.
        log: takes progress lines.

    Raises:
        ModelError: if the directory cannot be written; it says how to choose another.
    """
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
