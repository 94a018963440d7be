# SPDX-License-Identifier: Apache-2.0
"""How the tiny model that comes with the project (data/tiny) was made."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from grpo.model.checkpoint import new_directory, read_tokenizer, write_json
from grpo.model.gptoss_format import TINY
from grpo.model.warmup import Log, Recipe, write_warmed_up
from grpo.plan.hub import TINY_PATH

RECIPE = Recipe(
    TINY, "compact", windows=1200, probe_windows=20, seconds=math.inf, steps=1200, batch=32, lr=4e-3,
    distances=((1, 2, 3, 4), (0,)), most_factor=2.0,
)  # fmt: skip


def write_tiny(out: Path, recipe: Recipe = RECIPE, seed: int = 0, log: Log = print) -> None:
    """Warm up the tiny model on the CPU and write its checkpoint, with figures in warmup.json, to the folder `out`.

    Its tokenizer is that of data/tiny: every integer from 0 to 200 is a token of its own, with and without the space
    before, so that prompts are short and numbers are easy to read. The same seed gives the same model on the same
    machine. Raises ModelError before training, as `new_directory` does.
    """
    with new_directory(out) as directory, torch.random.fork_rng([]):
        stages, _ = write_warmed_up(directory, recipe, read_tokenizer(TINY_PATH), "cpu", seed, log)
        write_json(directory / "warmup.json", {"seed": seed, "steps": recipe.steps, **stages["stored"]})
