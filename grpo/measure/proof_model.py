# SPDX-License-Identifier: Apache-2.0
"""The proof's data and model."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, replace

import torch

from grpo.measure.proof_data import Scale, write_data
from grpo.measure.record import read_json
from grpo.model import checkpoint
from grpo.model import gptoss_format as gptoss
from grpo.model.load import load_model
from grpo.model.warmup import Log, figures, write_warmed_up
from grpo.plan.hub import TINY_PATH, count_parameters


def make(options: argparse.Namespace, scale: Scale, log: Log) -> None:
    """Write OUT/data and OUT/model; figures of the warm-up are kept in OUT/model/warmup.json.

    Raises:
        ModelError: where the device, the tokenizer or the space is missing.
    """
    started, model_dir = time.perf_counter(), options.out / "model"
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise gptoss.ModelError("--device cuda: PyTorch sees no GPU here; choose --device cpu --scale small")
    recipe = scale.recipe
    if options.tokenizer is None and recipe.prompt == "full":
        raise gptoss.ModelError("full prompts need --tokenizer DIR with tokenizer.json (o200k with Harmony's tokens)")
    write_data(options.out / "data", scale)
    tokenizer = checkpoint.read_tokenizer(options.tokenizer or TINY_PATH)
    shape = replace(recipe.shape, vocab=(gptoss.TINY if options.tokenizer is None else gptoss.GPT_OSS_20B).vocab)
    recipe = replace(recipe, shape=shape)
    checkpoint.require_space(model_dir, checkpoint.checkpoint_bytes(shape) + 64 * 2**20)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    parts = count_parameters(gptoss.config_dict(shape))
    body = parts["total"] - parts["embeddings"]
    log(f"{body:,} parameters besides the embeddings")
    with checkpoint.new_directory(model_dir, force=True) as directory:
        stages, probe = write_warmed_up(directory, recipe, tokenizer, options.device, options.seed, log)
        loaded = load_model(str(directory), read_json(directory / "config.json"), "eager").to(options.device).eval()
        record = {
            "besides_embeddings": body,
            "seconds": round(time.perf_counter() - started, 1),
            "recipe": asdict(recipe),
            "stages": stages,
            "loaded": figures(loaded, probe, 120),
        }
        checkpoint.write_json(directory / "warmup.json", record)
    log(f"{model_dir} written and checked, {time.perf_counter() - started:.0f} s")
