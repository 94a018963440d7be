# SPDX-License-Identifier: Apache-2.0
"""Trainers on the tiny model, and the loss and gradients that they compute."""

from __future__ import annotations

import contextlib
import dataclasses
import math

from conftest import RENDERED
from peft import LoraConfig
from trl import GRPOConfig

import train_grpo
from grpo.data.files import Row
from grpo.data.scoring import reward_callable
from grpo.learn.context import RunContext
from grpo.learn.trainer import Trainer
from grpo.model.load import load_model, load_tokenizer
from grpo.preflight.choices import choose_loss
from grpo.preflight.hub import find_model
from grpo.preflight.memory import Plan
from grpo.run.signals import StopRequest
from grpo.settings import Problems, Settings

BOTH = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")


def make(tiny, folder, **changes):
    """A trainer on the tiny model over four rows, built as `run` builds it. Returns (trainer, base weights' hash)."""
    settings = dataclasses.replace(
        Settings(MODEL_ID="tiny", OUTPUT_DIR=str(folder), PROMPTS_PER_STEP=2, NUM_GENERATIONS=2, MAX_COMPLETION_LEN=8,
                 TOTAL_STEPS=2, LORA_R=4, SEED=3), **changes,
    )  # fmt: skip
    files = find_model("tiny", Problems())
    prompts = [RENDERED.format(f"hour {8 + i} store 50 load 30") for i in range(4)]
    rows = [Row("t.csv", i + 1, (("rendered", p),), (0.1, 0.2, 0.3, 0.4), {f"reward_action_{k}": k / 10 for k in range(4)}, p) for i, p in enumerate(prompts)]  # fmt: skip
    plan = Plan(0, 0, 0, 0, settings.MICRO_BATCH or 2, "test", 4, "test")
    model = load_model(str(tiny), files.config, "eager").float()
    context = RunContext(
        settings, rows, plan, folder, "eager", "prefix", choose_loss(settings.LOSS_TYPE)[0], StopRequest()
    )
    return Trainer(
        context, model, load_tokenizer(str(tiny)), LoraConfig(**train_grpo.lora_options(settings)),
        GRPOConfig(**train_grpo.grpo_options(settings, cuda=False)), [reward_callable("action", settings)],
    )  # fmt: skip


def plain_float32(trainer):
    """Leave autocast out, so that two ways to the same number can be told apart from rounding."""
    trainer.args.bf16 = False
    trainer.accelerator.state._mixed_precision = "no"
    trainer.accelerator.native_amp = False
    return trainer


def batch(trainer, beta=0.0, old=False, sampled=False):
    """A step of two prompts with two completions each, all of different lengths, with random adapter weights, so that
    nothing is zero."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    vocabulary = trainer.model.config.vocab_size
    ids = lambda *shape: torch.randint(3, vocabulary, shape, generator=generator)  # noqa: E731
    inputs = {
        "prompt_ids": ids(2, 12).repeat_interleave(2, 0),
        "prompt_mask": torch.tensor([[0] * 3 + [1] * 9] * 2 + [[1] * 12] * 2),
        "completion_ids": ids(4, 7),
        "completion_mask": torch.tensor([[1] * n + [0] * (7 - n) for n in (7, 4, 2, 6)]),
        "advantages": torch.tensor([1.3, -0.7, -1.1, 0.4]),
        "num_items_in_batch": torch.tensor(23),
    }
    near = policy_logps(trainer, inputs)  # policy, old policy, engine and reference differ, but not absurdly
    noise = lambda: near + torch.randn(4, 7, generator=generator) * 0.2  # noqa: E731
    if old:
        inputs["old_per_token_logps"] = noise()
    if beta:
        inputs["ref_per_token_logps"] = noise()
    if sampled:
        inputs["sampling_per_token_logps"] = noise() - 0.3
        inputs["sampling_per_token_logps"][0, 2] = math.nan
    return inputs


@contextlib.contextmanager
def plain_trl(trainer):
    """The trainer without any of this file's methods."""
    from trl import GRPOTrainer

    ours = trainer.__class__
    trainer.__class__ = GRPOTrainer
    try:
        yield trainer
    finally:
        trainer.__class__ = ours


def policy_logps(trainer, inputs):
    """Log-probs of the completion tokens by TRL's own head over padded rows, without gradient, (B, C)."""
    import torch

    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad(), plain_trl(trainer):
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, inputs["completion_ids"].size(1))[0]


def loss_and_gradients(trainer, inputs, implementation, micro_batch=None, packing=None):
    """(loss, all gradients as one vector) of a step: by `learn` with Liger's loss (`liger`) or TRL's (`trl`), or with `plain` by TRL
    alone, from padded rows. An importance ratio for TRL comes from its own definition."""
    import torch

    run, s = trainer.run, trainer.run.settings
    trainer.model.train()
    trainer.model.zero_grad()
    inputs = dict(inputs)
    if implementation == "plain":
        sampled = inputs.pop("sampling_per_token_logps", None)
        if sampled is not None and s.IS_CORRECTION != "none":
            difference = (policy_logps(trainer, inputs) - sampled) * inputs["completion_mask"]
            difference[difference.isnan()] = 0.0
            if s.IS_CORRECTION.startswith("sequence"):
                difference = difference.sum(-1, keepdim=True)
            ratio = difference.exp()
            above = torch.full_like(ratio, s.IS_CLIP_MAX if s.IS_CORRECTION.endswith("truncate") else 0.0)
            inputs["importance_sampling_ratio"] = torch.where(ratio > s.IS_CLIP_MAX, above, ratio)
            trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        try:
            with plain_trl(trainer):
                loss = trainer._compute_loss(trainer.model, inputs)
        finally:
            trainer.use_vllm = trainer.vllm_importance_sampling_correction = False
        loss.backward()
    else:
        before = run.plan, run.packing, run.loss_impl
        run.plan = dataclasses.replace(run.plan, micro_batch=micro_batch or run.plan.micro_batch)
        run.packing, run.loss_impl = packing or run.packing, implementation
        try:
            loss = trainer.learn(trainer.model, inputs)
        finally:
            run.plan, run.packing, run.loss_impl = before
    gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]
    return loss.item(), torch.cat(gradients)
